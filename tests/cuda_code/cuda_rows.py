"""The models and settings whose code is generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LONG", "PRECISIONS", "QUICK", "RANKS", "TABLED", "Row", "Setting", "models"]

RANKS = 8


@dataclass(frozen=True)
class Setting:
    """How a model is sharded and compiled.

    Args:
        strategy: Sharding strategy.
        precision: Key of :data:`PRECISIONS`.
        options: Options of the backend.
        outer: Whether shards are replicated over two groups of four ranks.
        trains: Whether there is a backward.
        sharding: Further arguments of ``fully_shard_model``.
    """

    strategy: int = 3
    precision: str = "mixed"
    options: Mapping[str, Any] = field(default_factory=dict)
    outer: bool = False
    trains: bool = True
    sharding: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    model: str
    name: str
    setting: Setting

    def __str__(self) -> str:
        return f"{self.model}: {self.name}"


PRECISIONS: dict[str, dict[str, str | None]] = {
    "bfloat16": {"main_params_dtype": None},
    "mixed": {},
    "float32 reductions": {"grad_comm_dtype": "float32"},
    "float8 gathers": {"param_comm_dtype": "float8_e4m3fn"},
}
"""Arguments of ``MixedPrecisionPolicy`` for a model that computes in bfloat16; "mixed" has shards in float32."""

_LAYERS = 2  # fewer than become a region by themselves
_REGIONS = {"regions": True}
_WIDENED = {"float32_gradients": True}
_DOUBLE = {"fsdp_double_buffer": True}


def _rows(model: str, settings: Mapping[str, Setting]) -> list[Row]:
    return [Row(model, name, setting) for name, setting in settings.items()]


QUICK = [
    *_rows("Llama", {"regions": Setting(options=_REGIONS)}),
    *_rows("gradients from outside", {"strategy 3, bfloat16": Setting(precision="bfloat16")}),
]
"""Rows of the table in ``docs/performance.md`` that ``make test`` generates."""

TABLED = [
    *_rows(
        "Llama",
        {
            "strategy 3": Setting(),
            "strategy 3, bfloat16": Setting(precision="bfloat16"),
            "strategy 1": Setting(1),
            "strategy 2": Setting(2),
            "float32 reductions": Setting(precision="float32 reductions"),
            "`float32_gradients`": Setting(precision="float32 reductions", options=_WIDENED),
            "regions, `float32_gradients`": Setting(precision="float32 reductions", options=_WIDENED | _REGIONS),
            "`prefetch` 2, `reductions_in_flight` 2": Setting(options={"prefetch": 2, "reductions_in_flight": 2}),
            "`reshard_after_forward` 2": Setting(options={"reshard_after_forward": 2}),
            "`reshard_after_forward` False": Setting(options={"reshard_after_forward": False}),
            "`memory_budget`": Setting(options={"memory_budget": "4GiB"}),
            "replicated over 2 groups": Setting(outer=True),
            "inference": Setting(trains=False),
            "`maxpool_double_buffer`, bfloat16": Setting(
                precision="bfloat16", sharding={"maxpool_double_buffer": True}
            ),
            "`fsdp_double_buffer`": Setting(sharding=_DOUBLE),
            "regions, `fsdp_double_buffer`": Setting(options=_REGIONS, sharding=_DOUBLE),
        },
    ),
    *_rows("mixture of experts", {"strategy 3": Setting(), "regions": Setting(options=_REGIONS)}),
    *_rows("encoder and decoder", {"strategy 3": Setting(), "regions": Setting(options=_REGIONS)}),
]
"""Its other rows, which ``make long`` generates."""

_FLOAT8 = _rows(
    "Llama",
    {
        f"`fp8_matmul` {scaling}{', wgrad' if wgrad else ''}": Setting(
            options={"fp8_matmul": scaling, "fp8_wgrad": wgrad}
        )
        for scaling in ("rowwise", "tensorwise")
        for wgrad in (False, True)
    }
    | {
        "float8 gathers": Setting(precision="float8 gathers"),
        "float8 gathers, `fp8_matmul` rowwise": Setting(
            precision="float8 gathers", options={"fp8_matmul": "rowwise"} | _REGIONS
        ),
    },
)

LONG = [
    *_FLOAT8,
    *(
        Row(
            model,
            f"strategy {strategy}, {precision}{', regions' if regions else ''}{', widened' if widened else ''}",
            Setting(strategy, precision, {**regions, **widened}),
        )
        for model in ("Llama", "mixture of experts", "encoder and decoder")
        for strategy in (1, 2, 3)
        for precision in ("bfloat16", "mixed", "float32 reductions")
        for regions in ({}, _REGIONS)
        for widened in (({}, _WIDENED) if precision == "float32 reductions" else ({},))
    ),
]
"""Every combination. These are not in the table."""


def models() -> dict[str, Callable[[], tuple[Any, list[type], list[Any]]]]:
    """Return functions that make a model, its units, and its inputs. Needs torch."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn

    from mfsdp_compile.models.llama import Block, Llama, LlamaConfig
    from mfsdp_compile.models.moe import MoeBlock, MoeConfig, MoeLlama

    sizes = {"vocabulary": 4096, "width": 1024, "heads": 8, "kv_heads": 8}

    def tokens(batch: int = 4, length: int = 512) -> Tensor:
        return torch.randint(0, sizes["vocabulary"], (batch, length), device="cuda")

    class Attention(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

        def forward(self, x: Tensor, memory: Tensor, is_causal: bool) -> Tensor:
            q, k, v = (
                linear(given).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for linear, given in ((self.q, x), (self.k, memory), (self.v, memory))
            )
            return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(2))

    class EncoderLayer(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attention = Attention(width, heads)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x)
            x = x + self.attention(normed, normed, False)
            return x + self.down(F.relu(self.up(self.mlp_norm(x))))

    class DecoderLayer(EncoderLayer):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__(width, heads)
            self.cross_norm = nn.LayerNorm(width)
            self.cross = Attention(width, heads)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
            normed = self.norm(x)
            x = x + self.attention(normed, normed, True)
            x = x + self.cross(self.cross_norm(x), memory, False)
            return x + self.down(F.relu(self.up(self.mlp_norm(x))))

    class EncoderDecoder(nn.Module):
        """The decoder's layers all read what the encoder returns. The head shares the embedding, as in T5.

        An auxiliary loss reads a value of each layer. Inductor likes to compute these in one kernel.
        """

        def __init__(self, layers: int) -> None:
            super().__init__()
            width, heads = sizes["width"], sizes["heads"]
            self.embedding = nn.Embedding(sizes["vocabulary"], width)
            self.encoder = nn.ModuleList(EncoderLayer(width, heads) for _ in range(layers))
            self.decoder = nn.ModuleList(DecoderLayer(width, heads) for _ in range(layers))
            self.norm = nn.LayerNorm(width)

        def forward(self, sources: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
            memory = self.embedding(sources)
            for layer in self.encoder:
                memory = layer(memory)
            x, penalty = self.embedding(tokens), 0.0
            for layer in self.decoder:
                x = layer(x, memory)
                penalty = penalty + x[:, 0].float().square().mean()
            logits = F.linear(self.norm(x), self.embedding.weight)
            return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) + penalty

    class Adds(nn.Module):
        """Returns sums with its parameters, whose gradients are then what backward is given."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.first, self.second = (nn.Parameter(torch.empty(width, width)) for _ in range(2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x + self.first, 2 * x + self.second

    return {
        "Llama": lambda: (
            Llama(LlamaConfig(**sizes, layers=_LAYERS, hidden=2816)),
            [Block],
            [tokens(), tokens()],
        ),
        "mixture of experts": lambda: (
            MoeLlama(MoeConfig(**sizes, layers=_LAYERS, hidden=128, experts=32, chosen=2)),
            [MoeBlock],
            [tokens(), tokens()],
        ),
        "encoder and decoder": lambda: (
            EncoderDecoder(_LAYERS),
            [EncoderLayer, DecoderLayer],
            [tokens(), tokens(length=256), tokens(length=256)],
        ),
        "gradients from outside": lambda: (
            Adds(sizes["width"]),
            [],
            [torch.ones(sizes["width"], sizes["width"], device="cuda", dtype=torch.bfloat16)],
        ),
    }
