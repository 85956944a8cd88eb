"""A mixture-of-experts Llama, with three ways to dispatch tokens to experts.

``"balanced"``
    Every expert gets ``tokens * chosen / experts`` tokens of each rank, as if the router were balanced: an expert's
    surplus tokens are dropped, and gaps are filled. All shapes are static. For plans, measurements and tests of
    schedules.
``"all_to_all"``
    Dropless: an all-to-all sends each token to its experts, with a variable number of rows per rank, and another one
    sends the results back. Compiles to one graph with ``torch._dynamo.config.capture_scalar_outputs``; without it, the
    graph breaks where sizes are read.
``"all_gather"``
    Dropless with static shapes: every rank of an expert-parallel group gets all tokens of the group, and computes its
    experts on all of them; tokens that did not choose an expert have weight zero. No size is read. Costs
    ``experts / (ranks * chosen)`` times the computation and ``(ranks - 1) / chosen`` times the traffic. For few experts
    per rank.

Experts are parallel over a process group, if one is given: each of its n ranks holds 1/n of them. Over a second group,
each expert is divided further, by its hidden units (expert tensor parallelism). :func:`parallelize` divides everything
else over tensor-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.collectives import differentiable as differentiable_collectives

from .llama import Attention, LlamaConfig, _rotation

__all__ = ["MoeBlock", "MoeConfig", "MoeLlama", "divide_experts", "parallelize"]


@dataclass(frozen=True)
class MoeConfig(LlamaConfig):
    """Sizes. ``hidden`` is the width inside one expert.

    Each token goes to ``chosen`` of ``experts``, and also through ``shared`` experts. ``dispatch`` is one of the ways
    above.
    """

    experts: int = 8
    chosen: int = 2
    shared: int = 0
    dispatch: str = "balanced"


class Experts(nn.Module):
    """This rank's experts, ``up [experts, width, 2 * hidden]`` and ``down [experts, hidden, width]``.

    Their values are those that one process with all experts would draw. With ``parts``, this rank has the columns of
    its hidden units in both halves of ``up``, and ``hidden`` is divided by their number.

    Args:
        ranks, rank: Number of ranks that divide the experts, and this rank's number among them.
        parts, part: Number of ranks that divide each expert by its hidden units, and this rank's number among them.
            Outputs are then partial sums.
    """

    def __init__(self, config: MoeConfig, ranks: int, rank: int, parts: int = 1, part: int = 0) -> None:
        super().__init__()
        up = _drawn((config.experts, config.width, 2 * config.hidden), ranks, rank)
        down = _drawn((config.experts, config.hidden, config.width), ranks, rank)
        if parts > 1:
            up = torch.cat([half.chunk(parts, 2)[part] for half in up.chunk(2, 2)], 2)
            down = down.chunk(parts, 1)[part].clone()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down)

    def forward(self, x: Tensor) -> Tensor:
        """Run every expert on its own tokens: ``[experts, tokens, width]`` in and out."""
        gate, up = torch.bmm(x, _local(self.up)).chunk(2, dim=-1)
        return torch.bmm(F.silu(gate) * up, _local(self.down))

    def grouped(self, x: Tensor, loads: list[int]) -> Tensor:
        """Run experts on tokens sorted by expert, ``[sum(loads), width]`` in and out."""
        done = []
        for tokens, into, out in zip(x.split(loads), _local(self.up).unbind(), _local(self.down).unbind(), strict=True):
            gate, up = (tokens @ into).chunk(2, dim=-1)
            done.append((F.silu(gate) * up) @ out)
        return torch.cat(done)


def _local(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def _drawn(shape: tuple[int, ...], ranks: int, rank: int) -> Tensor:
    """Return this rank's part of a random tensor."""
    whole = torch.empty(shape)
    nn.init.normal_(whole, std=0.02)
    return whole.chunk(ranks)[rank].clone()


class Mixture(nn.Module):
    """Router and experts. ``forward(x)``, ``[tokens, width]`` in and out.

    Args:
        config: Sizes.
        group: Process group of expert parallelism. None: all experts are on this rank.
        within: Process group of expert tensor parallelism. None: experts are whole.

    Raises:
        ValueError: If a group's ranks cannot divide the experts, or there is no such dispatch.
        NotImplementedError: If experts are divided inside, and the dispatch is ``"all_to_all"``.
    """

    def __init__(
        self, config: MoeConfig, group: dist.ProcessGroup | None, within: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        ranks, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        if config.experts % ranks:
            raise ValueError(
                f"{config.experts} experts cannot be divided by the {ranks} ranks of the expert-parallel group"
            )
        if config.dispatch not in ("balanced", "all_to_all", "all_gather"):
            raise ValueError(f"dispatch={config.dispatch!r}: there are 'balanced', 'all_to_all' and 'all_gather'")
        parts, part = (within.size(), within.rank()) if within is not None else (1, 0)
        if config.hidden % parts:
            raise ValueError(
                f"{config.hidden} hidden units of an expert cannot be divided by the {parts} ranks of the expert "
                "tensor-parallel group"
            )
        if parts > 1 and config.dispatch == "all_to_all":
            raise NotImplementedError(
                f"dispatch='all_to_all' with experts that {parts} ranks divide inside, which get different numbers of "
                "tokens: use 'all_gather' or 'balanced', or whole experts"
            )
        self.parts, self.within = parts, within.group_name if within is not None else ""
        self.dispatch = config.dispatch
        self.chosen, self.ranks, self.rank = config.chosen, ranks, rank
        self.group = group.group_name if group is not None else ""
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = Experts(config, ranks, rank, parts, part)

    def forward(self, x: Tensor) -> Tensor:
        weights, choice = self.router(x).float().softmax(-1).topk(self.chosen)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        if self.dispatch == "balanced":
            return self._balanced(x, weights, choice)
        if self.dispatch == "all_to_all":
            return self._all_to_all(x, weights, choice)
        return self._all_gather(x, weights, choice)

    def _balanced(self, x: Tensor, weights: Tensor, choice: Tensor) -> Tensor:
        experts = self.router.out_features
        order = choice.flatten().argsort(stable=True)  # copies of tokens, sorted by expert
        load = x.shape[0] * self.chosen // experts
        order = order[: load * experts]
        source = order // self.chosen
        copies = x[source]
        if self.ranks > 1:  # the receiver's order is by rank, then expert; experts need expert, then rank
            each = [copies.shape[0] // self.ranks] * self.ranks
            copies = compat.all_to_all_autograd(copies, each, each, self.group)
            copies = copies.view(self.ranks, -1, load, x.shape[1]).transpose(0, 1).flatten(1, 2)
        y = self._computed(copies.view(experts // self.ranks, self.ranks * load, -1))
        if self.ranks > 1:
            y = y.view(-1, self.ranks, load, x.shape[1]).transpose(0, 1).flatten(0, 2)
            y = compat.all_to_all_autograd(y, each, each, self.group)
        return torch.zeros_like(x).index_add(0, source, y.view(len(order), -1) * weights.flatten()[order, None])

    def _computed(self, x: Tensor) -> Tensor:
        """Run experts on the tokens of all ranks that divide them inside: ``[experts, tokens, width]`` in and out."""
        if self.parts == 1:
            return self.experts(x)
        whole = differentiable_collectives.gather(x, self.parts, self.within)
        y = self.experts(whole.unflatten(0, (self.parts, -1)).transpose(0, 1).flatten(1, 2))
        partial = y.unflatten(1, (self.parts, -1)).transpose(0, 1).flatten(0, 1)
        return differentiable_collectives.scatter(partial, self.parts, self.within)

    def _all_to_all(self, x: Tensor, weights: Tensor, choice: Tensor) -> Tensor:
        experts = self.router.out_features
        wanted = choice.flatten()
        order = wanted.argsort(stable=True)  # copies of tokens, sorted by expert and therefore by rank
        source = order // self.chosen
        loads = torch.zeros(experts, dtype=torch.int64, device=x.device).scatter_add(0, wanted, torch.ones_like(wanted))
        copies = x[source]
        if self.ranks == 1:
            y = self.experts.grouped(copies, loads.tolist())
        else:
            # By sending rank, then by expert of this rank.
            arriving = self._exchange_loads(loads).view(self.ranks, -1)
            sent, received = loads.view(self.ranks, -1).sum(1).tolist(), arriving.sum(1).tolist()
            tokens = compat.all_to_all_autograd(copies, received, sent, self.group)
            expert = torch.arange(arriving.shape[1], device=x.device).repeat(self.ranks)
            by_expert = torch.repeat_interleave(expert, arriving.flatten(), output_size=tokens.shape[0]).argsort(
                stable=True
            )
            done = self.experts.grouped(tokens[by_expert], arriving.sum(0).tolist())
            back = torch.zeros_like(done).index_copy(0, by_expert, done)
            y = compat.all_to_all_autograd(back, sent, received, self.group)
        return torch.zeros_like(x).index_add(0, source, y * weights.flatten()[order, None])

    def _exchange_loads(self, loads: Tensor) -> Tensor:
        each = [loads.shape[0] // self.ranks] * self.ranks
        return compat.wait_tensor(compat.all_to_all(loads, each, each, self.group))

    def _all_gather(self, x: Tensor, weights: Tensor, choice: Tensor) -> Tensor:
        experts = self.router.out_features
        dense = torch.zeros(x.shape[0], experts, dtype=x.dtype, device=x.device).scatter(1, choice, weights)
        groups = [(n, group) for n, group in ((self.ranks, self.group), (self.parts, self.within)) if n > 1]
        for ranks, group in groups:
            x = differentiable_collectives.gather(x, ranks, group)
            dense = differentiable_collectives.gather(dense, ranks, group)
        here = dense.chunk(self.ranks, dim=1)[self.rank]  # [all tokens, experts of this rank]
        y = self.experts(x.expand(here.shape[1], -1, -1))
        y = torch.einsum("etw,te->tw", y, here)
        for ranks, group in reversed(groups):
            y = differentiable_collectives.scatter(y, ranks, group)
        return y


class Shared(nn.Module):
    """Experts that every token goes through, joined into one."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        hidden = config.hidden * config.shared
        self.up = nn.Linear(config.width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class MoeBlock(nn.Module):
    """One layer; the unit to shard by."""

    def __init__(
        self, config: MoeConfig, group: dist.ProcessGroup | None = None, within: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.mixture_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.mixture = Mixture(config, group, within)
        self.shared = Shared(config) if config.shared else None

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        flat = self.mixture_norm(x).flatten(0, 1)
        y = self.mixture(flat)
        if self.shared is not None:
            y = y + self.shared(flat)
        return x + y.view_as(x)


class MoeLlama(nn.Module):
    """Next-token prediction.

    ``forward(tokens, targets)``, both ``[batch, length]`` of int64, returns the mean cross entropy.

    Args:
        config: Sizes.
        group: Process group of expert parallelism. None: all experts are on every rank. With a group, pass the mesh of
            the ranks that hold the same experts to ``fully_shard_model`` as ``expt_device_mesh``.
        within: Process group of expert tensor parallelism. None: experts are whole. Otherwise, call
            :func:`divide_experts`.
    """

    def __init__(
        self, config: MoeConfig, group: dist.ProcessGroup | None = None, within: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(MoeBlock(config, group, within) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        rotation = _rotation(positions, self.config.width // self.config.heads, self.config.rope_base)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rotation)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def divide_experts(model: MoeLlama, mesh: DeviceMesh) -> MoeLlama:
    """Make DTensors of the experts that this rank holds, or of its parts of them, in place.

    The whole ``up`` has the columns of one rank's hidden units after another's: half by half only without expert tensor
    parallelism.

    Args:
        mesh: The dimensions ``("ep",)`` or ``("ep", "etp")`` of the mesh that ``fully_shard_model`` gets as
            ``expt_device_mesh``.
    """
    for module in model.modules():
        if isinstance(module, Experts):
            for name, dim in (("up", 2), ("down", 1)):
                placements: list[Placement] = [Shard(0), Shard(dim)][: mesh.ndim]
                part = DTensor.from_local(getattr(module, name).detach(), mesh, placements, run_check=False)
                setattr(module, name, nn.Parameter(part))
    return model


def parallelize(model: MoeLlama, mesh: DeviceMesh) -> MoeLlama:
    """Divide attention and vocabulary over tensor-parallel ranks, and all activations by positions, in place.

    Each of these ranks sends the tokens of its own positions to experts. Routers and shared experts are whole on each
    rank, and compute its own positions.

    Args:
        mesh: A mesh with one dimension, whose size divides the number of heads of keys and values. The length of a
            batch must be a multiple of it.

    Raises:
        ValueError: It does not divide them.
    """
    heads = model.config.kv_heads
    if heads % mesh.size():
        raise ValueError(f"{heads} heads of keys and values cannot be divided by {mesh.size()} tensor-parallel ranks")
    between = Shard(1)
    ends: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, ends, src_data_rank=None)  # all ranks have the same model
    of_tokens = SequenceParallel(sequence_dim=0, use_local_output=True)
    for layer in model.layers:
        plan: dict[str, ParallelStyle] = {
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.out": RowwiseParallel(output_layouts=between),
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(between, None), desired_input_layouts=(Replicate(), None)),
            "mixture_norm": SequenceParallel(use_local_output=True),
            "mixture.router": of_tokens,
        }
        if layer.shared is not None:
            plan |= {"shared.up": of_tokens, "shared.down": of_tokens}
        parallelize_module(layer, mesh, plan, src_data_rank=None)
    return model
