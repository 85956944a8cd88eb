"""Context parallelism: each rank holds a part of every sequence, and attention covers the whole sequence.

Parameters are sharded over data-parallel and context-parallel ranks together. Each rank computes the loss of its own
tokens, and the mean over all these ranks is the mean over all tokens::

    mesh = init_device_mesh("cuda", (8, 4), mesh_dim_names=("dp", "cp"))
    mesh["dp", "cp"]._flatten("dp_cp")
    context = ContextParallel(mesh["cp"])
    model = fully_shard_model(model, mesh, dp_shard_dim="dp_cp", fsdp_unit_modules=[Block])
    ...
    tokens, targets = context.shard(tokens), context.shard(targets)         # [batch, length / 4]
    loss = model(tokens, targets, positions=context.positions(length))      # rotary, or learned, positions

Where the model would call ``scaled_dot_product_attention(q, k, v, is_causal=True)``, it calls
``context.attention(q, k, v, is_causal=True)`` instead. Keys and values reach the other ranks in one of two ways, which
have the names of ``set_rotate_method`` in torch's own context parallelism:

``"allgather"``
    One collective gathers the keys and values of all ranks. Its backward is one reduce-scatter.
``"alltoall"``
    Ring attention (:mod:`.ring_attention`): keys and values travel from neighbor to neighbor, while each rank computes
    with those it has.

All collectives are nodes of a compiled graph.

Balance
    In a causal sequence, the last rank's queries would see all keys and the first rank's almost none. Therefore the
    sequence is cut into two chunks per rank, and each rank holds one from the front and one from the back, as in
    Megatron's and torch's context parallelism::

        4 ranks, 8 chunks        rank 0: 0 7    rank 1: 1 6    rank 2: 2 5    rank 3: 3 4

Memory
    With ``"allgather"``, whatever saves the inputs of attention for backward saves the gathered keys and values of the
    whole sequence. If that is too much, checkpoint the layer, or the attention alone: backward then gathers again. With
    ``"alltoall"``, a rank saves only its own, and has those of two ranks at a time while it computes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import causal_lower_right

from ..runtime.collectives import differentiable as differentiable_collectives
from ..runtime.ranks.agreement import agree
from .ring_attention import Ring, ring_attention

__all__ = ["ContextParallel"]

ROTATE_METHODS = ("allgather", "alltoall")


class ContextParallel:
    """Splits sequences over the ranks of a mesh dimension. All of them create it, with equal arguments.

    Args:
        mesh: A mesh with one dimension, such as ``mesh["cp"]``.
        balanced: Give each rank one chunk from the front of a sequence and one from the back, so that causal attention
            is the same work for all ranks. If False, each rank gets one chunk, in order.
        rotate_method: How keys and values reach other ranks: ``"allgather"``, all at once, or ``"alltoall"``, around a
            ring.

    Raises:
        ValueError: If the mesh has several dimensions, or there is no such method.
        RuntimeError: If ranks differ in an argument.
    """

    def __init__(self, mesh: DeviceMesh, balanced: bool = True, rotate_method: str = "allgather") -> None:
        if mesh.ndim != 1:
            raise ValueError(
                f"ContextParallel takes one mesh dimension, got a mesh of {mesh.ndim}, {mesh.mesh_dim_names}. Pass "
                "the dimension that sequences are split over: mesh['cp']."
            )
        if rotate_method not in ROTATE_METHODS:
            raise ValueError(
                f"rotate_method={rotate_method!r}: ContextParallel has 'allgather', which gathers keys and values, and "
                "'alltoall', which is ring attention."
            )
        agree(
            mesh.get_group(), "context parallelism", lambda: [f"balanced={balanced}, rotate_method={rotate_method!r}"]
        )
        self.rotate_method = rotate_method
        self.size = mesh.size()
        self.rank = mesh.get_local_rank()
        self.balanced = balanced
        self._group = mesh.get_group().group_name
        self._masks: dict[tuple[int, int], Tensor] = {}

    @property
    def chunks(self) -> tuple[int, ...]:
        """Indices of the chunks that this rank holds, out of ``size`` chunks, or ``2 * size`` if balanced."""
        return (self.rank, 2 * self.size - 1 - self.rank) if self.balanced else (self.rank,)

    # -- parts of sequences -------------------------------------------------------------------------------------------

    def shard(self, whole: Tensor, dim: int = 1) -> Tensor:
        """Return a copy of this rank's part of a tensor that all ranks hold: ``[..., length / size, ...]``.

        Shift targets before sharding them: the token after the last one of a part is on another rank.

        Raises:
            ValueError: If the length cannot be divided into equal chunks.
        """
        pieces = whole.chunk(self._count(whole.shape[dim]), dim)
        self._prepare(pieces[0].shape[dim])
        return torch.cat([pieces[chunk] for chunk in self.chunks], dim)

    def positions(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """Return the positions of this rank's tokens in a sequence of ``length``: int64, ``[length / size]``."""
        return self.shard(torch.arange(length, device=device), dim=0)

    def unshard(self, part: Tensor, dim: int = 1) -> Tensor:
        """Reassemble the whole tensor, in order, from the parts of all ranks. Collective.

        Differentiable: backward gives each rank the sum of all ranks' gradients of its part.
        """
        return self._in_order(part.movedim(dim, 0)).movedim(0, dim)

    # -- attention ----------------------------------------------------------------------------------------------------

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        is_causal: bool = False,
        dropout_p: float = 0.0,
        scale: float | None = None,
    ) -> Tensor:
        """Compute ``torch.nn.functional.scaled_dot_product_attention`` over the whole sequences. Collective.

        Args:
            query: This rank's part, ``[batch, heads, length / size, width]``.
            key, value: This rank's part, ``[batch, kv_heads, length / size, width]``. ``heads`` must be a multiple of
                ``kv_heads``; values may have another width.
            is_causal: Whether each query sees only keys up to its own position.
            dropout_p, scale: As in torch.

        Returns:
            ``[batch, heads, length / size, width of values]``.

        Raises:
            RuntimeError: If compiled code encounters a length that :meth:`shard` or :meth:`positions` have not seen.
            ValueError: If the shapes do not fit together.
            NotImplementedError: If ring attention gets something that flash attention does not compute: dropout, values
                of another width than keys, or float32 on another device than the CPU.
        """
        if key.shape[:-1] != value.shape[:-1] or query.shape[1] % key.shape[1] or query.shape[2] != key.shape[2]:
            raise ValueError(
                f"Context-parallel attention got queries {tuple(query.shape)}, keys {tuple(key.shape)} and values "
                f"{tuple(value.shape)}; it takes [batch, heads, length, width] of equal lengths, with heads of keys "
                "and values that divide those of queries. Attention to another sequence needs no context parallelism."
            )
        if self.rotate_method == "alltoall":
            self._check_for_ring(query, key, value, dropout_p)
            ring = Ring(self.rank, self.size, self._group, self.balanced, is_causal, scale)
            return ring_attention(query, key, value, ring)
        widths = [key.shape[-1], value.shape[-1]]
        parts = torch.cat([key, value], -1).movedim(2, 0)  # one collective for both
        whole = self._in_order(parts) if is_causal else differentiable_collectives.gather(parts, self.size, self._group)
        whole = whole.movedim(0, 2)
        if (repeat := query.shape[1] // key.shape[1]) > 1:  # after the collective, which sends each head once
            whole = whole.repeat_interleave(repeat, dim=1)
        keys, values = whole.split(widths, -1)
        settings: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale}
        if not is_causal:
            return F.scaled_dot_product_attention(query, keys, values, **settings)
        outputs = []
        for rows, chunk in zip(query.chunk(len(self.chunks), 2), self.chunks, strict=True):
            seen = (chunk + 1) * rows.shape[2]
            mask = self._mask(rows.shape[2], seen)
            outputs.append(
                F.scaled_dot_product_attention(rows, keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, **settings)
            )
        return torch.cat(outputs, 2)

    # -- details ------------------------------------------------------------------------------------------------------

    def _check_for_ring(self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> None:
        why = ""
        if dropout_p:
            why = f"dropout_p={dropout_p}, but backward could not repeat what each rank dropped"
        elif not query.shape[-1] == key.shape[-1] == value.shape[-1]:
            widths = [x.shape[-1] for x in (query, key, value)]
            why = f"queries, keys and values of widths {widths}, but flash attention takes equal ones"
        elif query.device.type != "cpu" and query.dtype not in (torch.float16, torch.bfloat16):
            why = f"{query.dtype}, but flash attention takes torch.bfloat16 and torch.float16 on {query.device.type}"
        if why:
            raise NotImplementedError(
                f"Ring attention (rotate_method='alltoall') got {why}. Use ContextParallel(mesh, "
                "rotate_method='allgather') here."
            )

    def _count(self, length: int) -> int:
        count = self.size * len(self.chunks)
        if length == 0 or length % count:
            how = f"{len(self.chunks)} chunks for each of {self.size} context-parallel ranks"
            raise ValueError(
                f"A sequence of {length} tokens cannot be cut into {how}: pad it to a multiple of {count}, and "
                "exclude the padding from the loss."
            )
        return count

    def _in_order(self, parts: Tensor) -> Tensor:
        """Turn ``[length / size, ...]`` of each rank into ``[length, ...]``."""
        whole = differentiable_collectives.gather(parts, self.size, self._group)
        if not self.balanced:
            return whole
        chunks = whole.unflatten(0, (self.size, 2, -1))  # per rank: one chunk from the front, one from the back
        return torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).flatten(0, 1)

    def _prepare(self, rows: int) -> None:
        """Create masks for chunks of this length. Dynamo can use existing masks, but cannot create them."""
        for chunk in self.chunks:
            shape = (rows, (chunk + 1) * rows)
            if shape not in self._masks:
                self._masks[shape] = causal_lower_right(*shape)

    def _mask(self, rows: int, seen: int) -> Tensor:
        if (rows, seen) not in self._masks:
            if torch.compiler.is_compiling():
                raise RuntimeError(
                    f"Causal context-parallel attention is compiled for chunks of {rows} tokens, but its masks are "
                    "for other sizes. Cut the inputs with this ContextParallel's shard() or positions() first, "
                    "outside of compiled code."
                )
            self._prepare(rows)
        return self._masks[rows, seen]
