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

Experts are parallel over a process group, if one is given: each of its n ranks holds 1/n of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mfsdp_compile.runtime import compat, differentiable_collectives

from .llama import Attention, LlamaConfig, _rotation

__all__ = ["MoeBlock", "MoeConfig", "MoeLlama"]


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

    Their values are those that one process with all experts would draw.
    """

    def __init__(self, config: MoeConfig, ranks: int, rank: int) -> None:
        super().__init__()
        self.up = nn.Parameter(_drawn((config.experts, config.width, 2 * config.hidden), ranks, rank))
        self.down = nn.Parameter(_drawn((config.experts, config.hidden, config.width), ranks, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Run every expert on its own tokens: ``[experts, tokens, width]`` in and out."""
        gate, up = torch.bmm(x, self.up).chunk(2, dim=-1)
        return torch.bmm(F.silu(gate) * up, self.down)

    def grouped(self, x: Tensor, loads: list[int]) -> Tensor:
        """Run experts on tokens sorted by expert, ``[sum(loads), width]`` in and out."""
        done = []
        for tokens, into, out in zip(x.split(loads), self.up.unbind(), self.down.unbind(), strict=True):
            gate, up = (tokens @ into).chunk(2, dim=-1)
            done.append((F.silu(gate) * up) @ out)
        return torch.cat(done)


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

    Raises:
        ValueError: If the group's ranks cannot divide the experts, or there is no such dispatch.
    """

    def __init__(self, config: MoeConfig, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        ranks, rank = (group.size(), group.rank()) if group is not None else (1, 0)
        if config.experts % ranks:
            raise ValueError(
                f"{config.experts} experts cannot be divided by the {ranks} ranks of the expert-parallel group"
            )
        if config.dispatch not in ("balanced", "all_to_all", "all_gather"):
            raise ValueError(f"dispatch={config.dispatch!r}: there are 'balanced', 'all_to_all' and 'all_gather'")
        self.dispatch = config.dispatch
        self.chosen, self.ranks, self.rank = config.chosen, ranks, rank
        self.group = group.group_name if group is not None else ""
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.experts = Experts(config, ranks, rank)

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
        order = choice.flatten().argsort()  # copies of tokens, sorted by expert
        load = x.shape[0] * self.chosen // experts
        order = order[: load * experts]
        source = order // self.chosen
        copies = x[source]
        if self.ranks > 1:  # the receiver's order is by rank, then expert; experts need expert, then rank
            each = [copies.shape[0] // self.ranks] * self.ranks
            copies = compat.all_to_all_autograd(copies, each, each, self.group)
            copies = copies.view(self.ranks, -1, load, x.shape[1]).transpose(0, 1).flatten(1, 2)
        y = self.experts(copies.view(experts // self.ranks, self.ranks * load, -1))
        if self.ranks > 1:
            y = y.view(-1, self.ranks, load, x.shape[1]).transpose(0, 1).flatten(0, 2)
            y = compat.all_to_all_autograd(y, each, each, self.group)
        return torch.zeros_like(x).index_add(0, source, y.view(len(order), -1) * weights.flatten()[order, None])

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
        if self.ranks > 1:
            x = differentiable_collectives.gather(x, self.ranks, self.group)
            dense = differentiable_collectives.gather(dense, self.ranks, self.group)
        here = dense.chunk(self.ranks, dim=1)[self.rank]  # [all tokens, experts of this rank]
        y = self.experts(x.expand(here.shape[1], -1, -1))
        y = torch.einsum("etw,te->tw", y, here)
        return differentiable_collectives.scatter(y, self.ranks, self.group) if self.ranks > 1 else y


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

    def __init__(self, config: MoeConfig, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.mixture_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.mixture = Mixture(config, group)
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
    """

    def __init__(self, config: MoeConfig, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(MoeBlock(config, group) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        rotation = _rotation(positions, self.config.width // self.config.heads, self.config.rope_base)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rotation)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())
