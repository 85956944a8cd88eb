"""Attention over the ranks of a ring: keys and values travel from neighbor to neighbor.

In each of ``size`` steps, a rank computes attention to the keys and values of one rank, while it sends them to the next
rank and receives others from the previous one. Partial outputs are merged by their logarithms of sums of exponentials.
Backward sends keys and values around again, and their gradients one step behind ::

    4 ranks      step 0   step 1   step 2   step 3
    rank 2       kv 2     kv 1     kv 0     kv 3       and d(kv) 2 is complete on rank 1, which sends it to rank 2

Liu et al., Ring Attention with Blockwise Transformers, https://arxiv.org/abs/2310.01889. Torch's own
(``torch.distributed.tensor.experimental``) does the same with CUDA's kernels only.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime import compat


class Ring(NamedTuple):
    """The ranks that sequences are split over.

    Args:
        rank, size: This rank's number, and the number of ranks.
        group: Name of their process group.
        balanced: Whether each rank has one chunk from the front of a sequence and one from the back.
        causal: Whether queries see only keys up to their own position.
        scale: Factor of the scores. None: ``1 / sqrt(width)``.
    """

    rank: int
    size: int
    group: str
    balanced: bool
    causal: bool
    scale: float | None


def ring_attention(query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
    """Compute attention of this rank's queries to the keys and values of all ranks. Collective, differentiable once.

    Args:
        query: ``[batch, heads, length / size, width]``.
        key, value: ``[batch, kv_heads, length / size, width]``.

    Returns:
        As ``query``.
    """
    output: Tensor = _RingFunction.apply(query, key, value, ring)
    return output


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring) -> Tensor:
        length = key.shape[2]
        message = torch.stack([key, value])
        output = log_sum = None
        for step in range(ring.size):
            last = step == ring.size - 1
            arriving = message if last else _send(message, ring)
            keys, values = message.unbind()
            seen = _seen(ring, step, length)
            if seen is not None:
                rows, columns, causal = seen
                part, part_log_sum = compat.partial_attention(
                    query[:, :, rows:].contiguous(),
                    _repeated(keys[:, :, columns], query),
                    _repeated(values[:, :, columns], query),
                    causal,
                    ring.scale,
                )
                output, log_sum = _merged(output, log_sum, part, part_log_sum, rows)
            message = arriving if last else _received(arriving, message)
        assert output is not None  # every query sees itself
        assert log_sum is not None
        if output.dtype != query.dtype:  # Dynamo of torch 2.11 takes a wrong gradient if a cast returns its input
            output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.ring = ring
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        query, key, value, output, log_sum = ctx.saved_tensors
        ring: Ring = ctx.ring
        length = key.shape[2]
        # One element of the gradient goes along, so that the compiler's partitioner cannot move the exchange into the
        # forward, which would save the keys and values of all ranks.
        shape, count = (2, *key.shape), 2 * key.numel()
        message = torch.cat([key.flatten(), value.flatten(), gradient.flatten()[:1]])
        # Gradients add up in float32, as flash attention adds them up inside of a block.
        exact = log_sum.dtype
        of_query = torch.zeros_like(query, dtype=exact)
        travelling = None
        for step in range(ring.size):
            last = step == ring.size - 1
            arriving = message if last else _send(message, ring)
            returning = _send(travelling, ring) if travelling is not None else None
            keys, values = message[:count].view(shape).unbind()
            of_pair = torch.zeros(shape, dtype=exact, device=key.device)
            seen = _seen(ring, step, length)
            if seen is not None:
                rows, columns, causal = seen
                parts = compat.partial_attention_backward(
                    gradient[:, :, rows:].contiguous(),
                    query[:, :, rows:].contiguous(),
                    _repeated(keys[:, :, columns], query),
                    _repeated(values[:, :, columns], query),
                    output[:, :, rows:].contiguous(),
                    log_sum[:, :, rows:].contiguous(),
                    causal,
                    ring.scale,
                )
                of_query = _added(of_query, parts[0].to(exact), rows)
                of_pair = _padded(torch.stack([_summed(part.to(exact), key) for part in parts[1:]]), columns, length)
            travelling = of_pair if returning is None else _received(returning, of_pair) + of_pair
            message = arriving if last else _received(arriving, message)
        assert travelling is not None
        of_key, of_value = _received(_send(travelling, ring), travelling).to(key.dtype).unbind()
        return of_query.to(query.dtype), of_key, of_value, None


def _send(message: Tensor, ring: Ring) -> Tensor:
    """Start to send a tensor to the next rank. Return what arrives from the previous one; see :func:`_received`."""
    flat = message.flatten()
    outgoing, incoming = [0] * ring.size, [0] * ring.size
    outgoing[(ring.rank + 1) % ring.size] = incoming[(ring.rank - 1) % ring.size] = flat.shape[0]
    return compat.all_to_all(flat, incoming, outgoing, ring.group)


def _received(arriving: Tensor, like: Tensor) -> Tensor:
    """Wait for a tensor from the previous rank, which has the shape of the one sent."""
    return compat.wait_tensor(arriving).view(like.shape)


def _seen(ring: Ring, step: int, length: int) -> tuple[int, slice, bool] | None:
    """Return which scores between this rank's queries and the keys of a step there are. None: none at all.

    Returns:
        The first row, the columns, and whether the block is causal.
    """
    everything = slice(0, length)
    if not ring.causal or step == 0:
        return 0, everything, ring.causal
    before = step <= ring.rank  # the keys are of a rank with a smaller number
    if not ring.balanced:
        return (0, everything, False) if before else None
    # A rank has chunks `rank` and `2 * size - 1 - rank`. Both see the front chunk of a rank before; the one at the
    # back sees both chunks of a rank after.
    return (0, slice(0, length // 2), False) if before else (length // 2, everything, False)


def _merged(
    output: Tensor | None, log_sum: Tensor | None, part: Tensor, part_log_sum: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """Merge attention to some keys into that to others, for the rows from ``rows`` on."""
    part = part.to(part_log_sum.dtype)
    if output is None or log_sum is None:
        return part, part_log_sum
    old, old_log_sum = output[:, :, rows:], log_sum[:, :, rows:]
    new_log_sum = torch.logaddexp(old_log_sum, part_log_sum)
    new = (old_log_sum - new_log_sum).exp()[..., None] * old + (part_log_sum - new_log_sum).exp()[..., None] * part
    if rows == 0:
        return new, new_log_sum
    return torch.cat([output[:, :, :rows], new], 2), torch.cat([log_sum[:, :, :rows], new_log_sum], 2)


def _added(whole: Tensor, part: Tensor, rows: int) -> Tensor:
    return whole + part if rows == 0 else torch.cat([whole[:, :, :rows], whole[:, :, rows:] + part], 2)


def _padded(part: Tensor, columns: slice, length: int) -> Tensor:
    """Return gradients ``[2, batch, kv_heads, columns, width]`` of all columns."""
    missing = length - columns.stop
    return torch.cat([part, part.new_zeros(*part.shape[:3], missing, part.shape[4])], 3) if missing else part


def _repeated(part: Tensor, query: Tensor) -> Tensor:
    """Repeat each head of keys or values for the heads of queries that share it."""
    repeat = query.shape[1] // part.shape[1]
    return part.repeat_interleave(repeat, dim=1) if repeat > 1 else part.contiguous()


def _summed(gradient: Tensor, key: Tensor) -> Tensor:
    """Sum the gradients of heads that were repeated."""
    return gradient.unflatten(1, (key.shape[1], -1)).sum(2) if gradient.shape[1] != key.shape[1] else gradient
