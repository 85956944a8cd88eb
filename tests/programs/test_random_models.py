"""Random models in random configurations: one step, compared with one process."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model
from mfsdp_compile.diagnostics.doctor import SCALINGS, STRATEGIES, WAYS, mesh_arguments

SIZES = (1, 2, 3, 5, 7, 8, 13, 31)


@dataclass(frozen=True)
class LayerSpec:
    hidden: int
    bias: bool
    norm: bool
    gain: bool  # whether it has a 0-d parameter
    unused: bool
    frozen: bool  # whether its first matrix is frozen
    double: bool  # whether its norm computes in float64
    tied: bool  # whether its first matrix is that of the first layer, if shapes agree
    nested: bool  # whether it contains another unit
    twice: bool


@dataclass(frozen=True)
class ModelSpec:
    width: int
    layers: tuple[LayerSpec, ...]
    root_parameter: bool


class Layer(nn.Module):
    def __init__(self, width: int, spec: LayerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.up = nn.Linear(width, spec.hidden, bias=spec.bias)
        self.down = nn.Linear(spec.hidden, width, bias=spec.bias)
        if spec.norm:
            self.norm = nn.LayerNorm(width, dtype=torch.float64 if spec.double else None)
        if spec.gain:
            self.gain = nn.Parameter(torch.tensor(0.7))
        if spec.unused:
            self.unused = nn.Parameter(torch.randn(3, 2))
        if spec.nested:
            self.inner = Layer(width, LayerSpec(3, True, False, False, False, False, False, False, False, False))
        self.up.weight.requires_grad_(not spec.frozen)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        if self.spec.norm:
            y = self.norm(y.double()).to(x.dtype) if self.spec.double else self.norm(y)
        y = self.down(torch.tanh(self.up(y)))
        if self.spec.gain:
            y = y * self.gain
        return self.inner(x + y) if self.spec.nested else x + y


class Model(nn.Module):
    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.enter = nn.Linear(4, spec.width)
        self.layers = nn.ModuleList(Layer(spec.width, layer) for layer in spec.layers)
        if spec.root_parameter:
            self.shift = nn.Parameter(torch.randn(spec.width))
        first = self.layers[0]
        for layer in self.layers[1:]:
            if layer.spec.tied and layer.spec.hidden == first.spec.hidden:
                layer.up.weight = first.up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for layer in self.layers:
            if hasattr(self, "shift"):
                x = x + self.shift
            x = layer(layer(x)) if layer.spec.twice else layer(x)
        return x.pow(2).mean()


layer_specs = st.builds(
    LayerSpec,
    hidden=st.sampled_from(SIZES),
    **{name: st.booleans() for name in LayerSpec.__annotations__ if name != "hidden"},
)
model_specs = st.builds(
    ModelSpec,
    width=st.sampled_from(SIZES),
    layers=st.lists(layer_specs, min_size=1, max_size=3).map(tuple),
    root_parameter=st.booleans(),
)
policies = st.builds(
    MixedPrecisionPolicy,
    main_params_dtype=st.sampled_from([torch.float32, torch.float64, None]),
    main_grads_dtype=st.sampled_from([None, torch.float32, torch.float64]),
    grad_comm_dtype=st.sampled_from([None, torch.float32, torch.float64]),
)


SIZES_OF_UNITS: list[dict[str, int]] = [
    {},
    {},
    {"unit_bytes": 1000},  # joins some layers
    {"unit_bytes": 1 << 20},  # joins all layers
    {"unit_bytes": 1 << 20, "bucket_bytes": 500},
]


def check(examples: int) -> None:
    """Check random examples. Every rank draws the same ones, by the run's seed.

    Examples are not shrunk, because ranks would shrink them differently.
    """
    number = int(os.environ["MFSDP_SEED"])

    @seed(number)
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        spec=model_specs,
        strategy=st.sampled_from(sorted(STRATEGIES)),
        scaling=st.sampled_from(sorted(SCALINGS)),
        way=st.sampled_from(sorted(WAYS)),
        policy=policies,
        mode=st.sampled_from(["eager", "eager", "aot_eager"]),
        microbatches=st.sampled_from([1, 3]),
        sizes=st.sampled_from(SIZES_OF_UNITS),
    )
    def one_step(
        spec: ModelSpec,
        strategy: str,
        scaling: str,
        way: str,
        policy: MixedPrecisionPolicy,
        mode: str,
        microbatches: int,
        sizes: dict[str, int],
    ) -> None:
        torch.manual_seed(0)
        model = fully_shard_model(
            Model(spec),
            fsdp_unit_modules=[Layer],
            mixed_precision_policy=policy,
            **mesh_arguments(strategy),
            **SCALINGS[scaling],
            **sizes,
        )
        call: Any = model
        if mode != "eager":
            torch._dynamo.reset()
            call = torch.compile(model, backend="mfsdp", options={"inner": mode}, dynamic=False)
        torch.manual_seed(0)
        alone = Model(spec)
        ranks, rank = dist.get_world_size(), dist.get_rank()
        data = torch.randn(microbatches, ranks, 3, 4, generator=torch.Generator().manual_seed(1))
        for i, micro in enumerate(data):
            with WAYS[way](model, i == microbatches - 1):
                call(micro[rank]).backward()
            for x in micro:
                (alone(x) / (1 if scaling == "sum" else ranks)).backward()
        model.finish_grad_sync()
        expected = {n: p.grad for n, p in alone.named_parameters()}
        largest = max((g.abs().max().item() for g in expected.values() if g is not None and g.numel()), default=0.0)
        for name, param in model.module.named_parameters():
            assert (param.grad is None) == (expected[name] is None), name
            if param.grad is None:
                continue
            difference = (param.grad.full_tensor() - expected[name]).abs().max().item()
            assert difference <= 1e-5 * largest + 1e-12, f"{name}: {difference} of {largest}"  # sums in another order

    try:
        one_step()
    except Exception as error:
        raise AssertionError(f"MFSDP_SEED={number} draws the same models") from error


@pytest.mark.long
@on_ranks(4)
def test_twenty_random_models() -> None:
    check(20)


@pytest.mark.long
@on_ranks(4, timeout=1800)
def test_two_hundred_random_models() -> None:
    check(200)
