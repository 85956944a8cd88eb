"""A mixture-of-experts Llama with every expert equally loaded, as a balanced router leaves them.

Which tokens an expert gets is decided by the router; how many is fixed (``tokens * chosen / experts``), so that all shapes
are static: for plans, measurements and tests of schedules. Surplus tokens of an expert are dropped, gaps are filled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .llama import Attention, LlamaConfig, _rotation

__all__ = ["MoeBlock", "MoeConfig", "MoeLlama"]


@dataclass(frozen=True)
class MoeConfig(LlamaConfig):
    """``hidden`` is the width inside one expert; each token goes to ``chosen`` of ``experts``, and through ``shared`` more."""

    experts: int = 8
    chosen: int = 2
    shared: int = 0


class Experts(nn.Module):
    """``forward(x)``, ``[tokens, width]`` in and out."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.experts, self.chosen = config.experts, config.chosen
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.up = nn.Parameter(torch.empty(config.experts, config.width, 2 * config.hidden))
        self.down = nn.Parameter(torch.empty(config.experts, config.hidden, config.width))
        nn.init.normal_(self.up, std=0.02)
        nn.init.normal_(self.down, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[0]
        weights, choice = self.router(x).float().softmax(-1).topk(self.chosen)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        order = choice.flatten().argsort()  # copies of tokens, expert by expert
        load = tokens * self.chosen // self.experts
        order = order[: load * self.experts]
        source = order // self.chosen
        gate, up = torch.bmm(x[source].view(self.experts, load, -1), self.up).chunk(2, dim=-1)
        y = torch.bmm(F.silu(gate) * up, self.down).flatten(0, 1) * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, source, y)


class Shared(nn.Module):
    """Experts that every token goes through, as one."""

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

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.experts_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.experts = Experts(config)
        self.shared = Shared(config) if config.shared else None

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        flat = self.experts_norm(x).flatten(0, 1)
        y = self.experts(flat)
        if self.shared is not None:
            y = y + self.shared(flat)
        return x + y.view_as(x)


class MoeLlama(nn.Module):
    """Next-token prediction: ``forward(tokens, targets)``, both ``[batch, length]`` of int64, gives the mean cross entropy."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(MoeBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        rotation = _rotation(
            tokens.shape[1], self.config.width // self.config.heads, self.config.rope_base, tokens.device
        )
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, rotation)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())
