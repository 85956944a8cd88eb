"""The models and settings whose code is generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

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
        microbatches: Microbatches of a step. Only the last one reduces.
        offloads: What is in host memory: ``"parameters"``, ``"optimizer"``, or nothing.
    """

    strategy: int = 3
    precision: str = "mixed"
    options: Mapping[str, Any] = field(default_factory=dict)
    outer: bool = False
    trains: bool = True
    sharding: Mapping[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    offloads: str = ""

    @property
    def dtype(self) -> Any:
        """The dtype that the model is made in. Needs torch."""
        import torch

        return torch.float32 if self.precision == "float32" else torch.bfloat16


@dataclass(frozen=True)
class Row:
    model: str
    name: str
    setting: Setting

    def __str__(self) -> str:
        return f"{self.model}: {self.name}"


_SUMS = {"grad_comm_dtype": "bfloat16", "grad_sum_dtype": "float32"}
PRECISIONS: dict[str, dict[str, str | int | None]] = {
    "float32": {},
    "bfloat16": {"main_params_dtype": None},
    "mixed": {},
    "float32 reductions": {"grad_comm_dtype": "float32"},
    "sums in float32": _SUMS,
    "gradients in int8": _SUMS | {"grad_comm_dtype": "int8"},
    "gradients in float8": _SUMS | {"grad_comm_dtype": "float8_e5m2"},
    "gradients in int4, stochastic": _SUMS | {"grad_comm_dtype": "int4", "grad_comm_rounding": "stochastic"},
    "gradients in float4": _SUMS | {"grad_comm_dtype": "float4_e2m1fn_x2"},
    "two levels, int8": _SUMS | {"grad_comm_dtype": "int8", "grad_sum_within": 2, "grad_outer_comm_dtype": "int8"},
    "float8 gathers": {"param_comm_dtype": "float8_e4m3fn"},
    "mxfp8 gathers": {"param_comm_dtype": "float8_e4m3fn", "param_comm_scaling": "mxfp8"},
    "nvfp4 gathers": {"param_comm_dtype": "float4_e2m1fn_x2", "param_comm_scaling": "nvfp4"},
}
"""Arguments of ``MixedPrecisionPolicy``. All but "float32" compute in bfloat16; "mixed" has shards in float32."""

_REGIONS = {"regions": True}
_WIDENED = {"float32_gradients": True}
_STEPS = {"step_in_backward": True}
_DOUBLE = {"fsdp_double_buffer": True}


def _rows(model: str, settings: Mapping[str, Setting]) -> list[Row]:
    return [Row(model, name, setting) for name, setting in settings.items()]


QUICK = _rows("Llama", {"regions": Setting(options=_REGIONS)})
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
    *_rows("gradients from outside", {"strategy 3, bfloat16": Setting(precision="bfloat16")}),
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


_FLOAT32 = Setting(precision="float32")


def _float32(**changes: Any) -> Setting:
    return replace(_FLOAT32, **changes)


COMPUTED: dict[int, list[Row]] = {
    2: [
        *_rows(
            "Llama",
            {
                "strategy 3": _FLOAT32,
                "strategy 1": _float32(strategy=1),
                "strategy 2": _float32(strategy=2),
                "regions": _float32(options=_REGIONS),
                "`fsdp_double_buffer`": _float32(sharding=_DOUBLE),
                "regions, `fsdp_double_buffer`": _float32(options=_REGIONS, sharding=_DOUBLE),
                "`maxpool_double_buffer`": _float32(sharding={"maxpool_double_buffer": True}),
                "`reshard_after_forward` False": _float32(options={"reshard_after_forward": False}),
                "`prefetch` 2, `reductions_in_flight` 2": _float32(options={"prefetch": 2, "reductions_in_flight": 2}),
                "`memory_budget`": _float32(options={"memory_budget": "1MiB"}),
                "2 microbatches": _float32(microbatches=2),
                "2 microbatches, strategy 1": _float32(microbatches=2, strategy=1),
                "parameters offloaded": _float32(offloads="parameters"),
                "optimizer offloaded": _float32(offloads="optimizer"),
                "steps in backward": _float32(options=_STEPS),
                "steps in backward, parameters offloaded": _float32(options=_STEPS, offloads="parameters"),
                "steps in backward, optimizer offloaded": _float32(options=_STEPS | _REGIONS, offloads="optimizer"),
                "activations offloaded": _float32(
                    options={"activation_offload": True, "activation_offload_least": 256}
                ),
                "bfloat16": Setting(precision="bfloat16"),
                "bfloat16, float32 shards": Setting(),
                "bfloat16, regions": Setting(options=_REGIONS),
                "float32 reductions": Setting(precision="float32 reductions"),
                "`float32_gradients`": Setting(precision="float32 reductions", options=_WIDENED),
                "regions, `float32_gradients`": Setting(precision="float32 reductions", options=_WIDENED | _REGIONS),
                **{
                    name: Setting(precision=name)
                    for name in (
                        "sums in float32",
                        "gradients in int8",
                        "gradients in float8",
                        "gradients in int4, stochastic",
                        "gradients in float4",
                    )
                },
                "float8 gathers": Setting(precision="float8 gathers"),
                "mxfp8 gathers": Setting(precision="mxfp8 gathers"),
                "nvfp4 gathers": Setting(precision="nvfp4 gathers"),
                "`fp8_matmul` rowwise": Setting(options={"fp8_matmul": "rowwise"}),
                "`fp8_matmul` tensorwise, wgrad": Setting(options={"fp8_matmul": "tensorwise", "fp8_wgrad": True}),
            },
        ),
        *_rows("checkpointed Llama", {"strategy 3": _FLOAT32}),
        *(
            row
            for model in ("mixture of experts", "encoder and decoder", "scan")
            for row in _rows(model, {"strategy 3": _FLOAT32, "regions": _float32(options=_REGIONS)})
        ),
        *_rows("convolutions", {"strategy 3": _FLOAT32}),
    ],
    4: _rows(
        "Llama",
        {
            "replicated over 2 groups": _float32(outer=True),
            "sharded over 2 groups": _float32(outer=True, sharding={"outer_dp_sharding_strategy": 1}),
            "`reshard_after_forward` 2": _float32(options={"reshard_after_forward": 2}),
            "2 groups, 2 microbatches, strategy 2": _float32(outer=True, strategy=2, microbatches=2),
            "two levels, int8": Setting(precision="two levels, int8"),
        },
    ),
}
"""Rows whose code is computed, by the number of ranks."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of models.

    Args:
        batch, length: Shape of a rank's batch of tokens.
        expert_hidden, experts: Width of an expert inside, and number of experts.
    """

    vocabulary: int = 4096
    width: int = 1024
    heads: int = 8
    kv_heads: int = 8
    hidden: int = 2816
    expert_hidden: int = 128
    experts: int = 32
    batch: int = 4
    length: int = 512
    layers: int = 2  # fewer than become a region by themselves


LARGE = Sizes()
SMALL = Sizes(vocabulary=64, width=32, heads=4, kv_heads=4, hidden=48, expert_hidden=16, experts=4, batch=2, length=7)
"""Sizes for code that is only generated, and for code that the interpreter runs too.

Small lengths are no powers of two, which would need no masks.
"""


def models(sizes: Sizes) -> dict[str, tuple[Callable[[], Any], list[type], Callable[[], list[Any]]]]:
    """Return functions that make a model, its units, and functions that make inputs. Needs torch."""
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
    from torch.utils.checkpoint import checkpoint

    from mfsdp_compile.models.llama import Block, Llama, LlamaConfig
    from mfsdp_compile.models.moe import MoeBlock, MoeConfig, MoeLlama

    common = {"vocabulary": sizes.vocabulary, "width": sizes.width, "layers": sizes.layers}
    common |= {"heads": sizes.heads, "kv_heads": sizes.kv_heads}
    llama = LlamaConfig(**common, hidden=sizes.hidden)
    moe = MoeConfig(**common, hidden=sizes.expert_hidden, experts=sizes.experts, chosen=2)

    def tokens(length: int = sizes.length) -> Tensor:
        return torch.randint(0, sizes.vocabulary, (sizes.batch, length))

    class Checkpointed(Block):
        """Is computed again in backward."""

        def forward(self, *args: Any) -> Any:
            return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False)  # no generator

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        """Attention by products: to compute flash attention again, AOTAutograd asks for the device's generator."""
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(later, float("-inf")).softmax(-1) @ v

    class CheckpointedLlama(Llama):
        def __init__(self) -> None:
            super().__init__(llama, attend)
            for layer in self.layers:
                layer.__class__ = Checkpointed

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
            width, heads = sizes.width, sizes.heads
            self.embedding = nn.Embedding(sizes.vocabulary, width)
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

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.GroupNorm(2, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.relu(self.norm(self.convolution(x)))

    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, padding=1)
            self.layers = nn.ModuleList(Convolution() for _ in range(sizes.layers))
            self.head = nn.Linear(8, sizes.vocabulary)

        def forward(self, images: Tensor, targets: Tensor) -> Tensor:
            x = self.stem(images)
            for layer in self.layers:
                x = layer(x)
            return F.cross_entropy(self.head(x.mean((2, 3))).float(), targets)

    class Scan(nn.Module):
        """A selective scan over the tokens, as in Mamba: each state is a gated sum of the last one and the input."""

        def __init__(self) -> None:
            super().__init__()
            width = sizes.width
            self.norm = nn.RMSNorm(width)
            self.into, self.gates, self.out = (nn.Linear(width, n, bias=False) for n in (width, 2 * width, width))
            self.decay = nn.Parameter(torch.zeros(width))

        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x)
            value, (step, gate) = self.into(normed), self.gates(normed).chunk(2, -1)
            step = F.softplus(step.float())
            kept = -step * self.decay.float().exp()
            state, states = torch.zeros_like(kept[:, 0]), []
            for token in range(x.shape[1]):
                state = kept[:, token].exp() * state + step[:, token] * value[:, token]
                states.append(state)
            return x + self.out(torch.stack(states, 1).to(x.dtype) * F.silu(gate))

    class Scans(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
            self.layers = nn.ModuleList(Scan() for _ in range(sizes.layers))
            self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten())

    def images() -> list[Any]:
        return [torch.randn(sizes.batch, 3, 8, 8), torch.randint(0, sizes.vocabulary, (sizes.batch,))]

    square = (sizes.width, sizes.width)
    half = sizes.length // 2
    return {
        "Llama": (lambda: Llama(llama), [Block], lambda: [tokens(), tokens()]),
        "checkpointed Llama": (CheckpointedLlama, [Checkpointed], lambda: [tokens(), tokens()]),
        "mixture of experts": (lambda: MoeLlama(moe), [MoeBlock], lambda: [tokens(), tokens()]),
        "encoder and decoder": (
            lambda: EncoderDecoder(sizes.layers),
            [EncoderLayer, DecoderLayer],
            lambda: [tokens(), tokens(half), tokens(half)],
        ),
        "convolutions": (Convolutions, [Convolution], images),
        "scan": (Scans, [Scan], lambda: [tokens(), tokens()]),
        "gradients from outside": (
            lambda: Adds(sizes.width),
            [],
            lambda: [torch.ones(*square, dtype=torch.bfloat16)],
        ),
    }
