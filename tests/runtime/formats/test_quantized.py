"""Parameters gathered in float8 or float4: arithmetic, bytes, one collective for scales, parity with one process."""

from __future__ import annotations

import copy
import itertools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import Pools, on_ranks
from torch import Tensor, fx, nn

from mfsdp_compile import MixedPrecisionPolicy, explain, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.diagnostics.measure import collectives
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig
from mfsdp_compile.passes.context import Context
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.formats import quantize
from mfsdp_compile.runtime.geometry.layout import LayoutPolicy, ParamSpec, plan_layouts
from mfsdp_compile.runtime.schedule.phase import Phase

BF16, F32 = torch.bfloat16, torch.float32
CONFIG = LlamaConfig(vocabulary=50, width=32, layers=2, heads=4, kv_heads=2, hidden=44)
ROWWISE = MixedPrecisionPolicy(param_comm_dtype=quantize.DTYPE)
TENSORWISE = MixedPrecisionPolicy(param_comm_dtype=quantize.DTYPE, param_comm_scaling="tensorwise")
BLOCKWISE = MixedPrecisionPolicy(param_comm_dtype=quantize.DTYPE, param_comm_scaling="blockwise")
MXFP8 = MixedPrecisionPolicy(param_comm_dtype=quantize.DTYPE, param_comm_scaling="mxfp8")
FP4 = torch.float4_e2m1fn_x2
NVFP4 = MixedPrecisionPolicy(param_comm_dtype=FP4, param_comm_scaling="nvfp4")
POLICIES = {"rowwise": ROWWISE, "tensorwise": TENSORWISE, "blockwise": BLOCKWISE, "mxfp8": MXFP8, "nvfp4": NVFP4}
CONFIGS = {
    "rowwise": CONFIG,
    "tensorwise": CONFIG,
    "blockwise": LlamaConfig(vocabulary=50, width=160, layers=2, heads=4, kv_heads=2, hidden=300),  # shards cut blocks
    "mxfp8": LlamaConfig(vocabulary=50, width=64, layers=2, heads=4, kv_heads=2, hidden=96),  # multiples of 32
    "nvfp4": LlamaConfig(vocabulary=50, width=48, layers=2, heads=4, kv_heads=2, hidden=80),  # of 16
}


def build(config: LlamaConfig = CONFIG) -> nn.Module:
    torch.manual_seed(0)
    return Llama(config).to(BF16)


def tokens(step: int, rank: int = 0) -> Tensor:
    return torch.randint(0, CONFIG.vocabulary, (2, 9), generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(call: Callable[..., Tensor], step: int, rank: int = 0) -> Tensor:
    batch = tokens(step, rank)
    return F.cross_entropy(call(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


def shard(policy: MixedPrecisionPolicy, mode: str = EAGER, **arguments: Any) -> tuple[Any, Callable[..., Tensor]]:
    options = arguments.pop("options", {})
    model = fully_shard_model(
        arguments.pop("module", None) or build(),
        fsdp_unit_modules=arguments.pop("units", [Block]),
        mixed_precision_policy=policy,
        **arguments,
    )
    if mode == EAGER:
        return model, model
    return model, torch.compile(
        model, backend="mfsdp", fullgraph=True, options={"inner": mode, "verify": "each", **options}
    )


def train(model: Any, call: Callable[..., Tensor], steps: int = 3, own_data: bool = True) -> list[Tensor]:
    """Train with AdamW. Return losses, gradients and parameters of this rank."""
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    results = []
    for step in range(steps):
        loss = loss_of(call, step, dist.get_rank() if own_data else 0)
        loss.backward()
        results += [
            loss.detach(),
            *(param.grad.to_local().clone() for param in model.parameters() if param.requires_grad),
        ]
        optimizer.step()
        optimizer.zero_grad()
    return results + [param.to_local().detach().clone() for param in model.parameters()]


def assert_equal(mine: list[Tensor], its: list[Tensor]) -> None:
    for a, b in zip(mine, its, strict=True):
        assert torch.equal(a, b)


def quantized(model: Any) -> list[Any]:
    return [bucket for bucket in model.sharded.buckets if bucket.made is not None]


# -- arithmetic -------------------------------------------------------------------------------------------------------


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def nearest_e2m1(values: Tensor) -> Tensor:
    """Return the nearest values of E2M1; of two that are as near, the one with the even mantissa, every other one."""
    distances = (values.double().abs().unsqueeze(-1) - E2M1).abs()
    nearest = distances == distances.amin(-1, keepdim=True)
    return E2M1[(nearest * torch.tensor([2, 1] * 4)).argmax(-1)].copysign(values.double())


def as_gathered(values: Tensor, scaling: str, dtype: torch.dtype = BF16) -> Tensor:
    """Return what ranks compute with, worked out in another way: block by block, in float64."""
    if scaling == "nvfp4":
        blocks = values.float().unflatten(-1, (-1, 16))
        of_matrix = values.abs().amax((-2, -1), keepdim=True).float().unsqueeze(-1) / (6 * 448)
        of_matrix = of_matrix.where(of_matrix > 0, 1.0)
        of_block = (blocks.abs().amax(-1, keepdim=True) / 6 / of_matrix).to(quantize.DTYPE).float() * of_matrix
        rounded = nearest_e2m1((blocks / of_block).where(of_block > 0, 0.0))
        return (rounded * of_block.double()).float().to(dtype).flatten(-2)
    if scaling == "mxfp8":
        blocks = values.double().unflatten(-1, (-1, 32))
        largest = blocks.abs().amax(-1, keepdim=True)
        scale = torch.exp2(torch.ceil(torch.log2(largest / 448))).where(largest > 0, 1.0)
        return ((blocks / scale).to(quantize.DTYPE).double() * scale).flatten(-2).to(dtype)
    result = torch.empty(values.shape, dtype=dtype)
    rows, columns = {"rowwise": (1, values.shape[-1]), "tensorwise": values.shape[-2:], "blockwise": (128, 128)}[
        scaling
    ]
    for row, column in itertools.product(range(0, values.shape[-2], rows), range(0, values.shape[-1], columns)):
        at = ..., slice(row, row + rows), slice(column, column + columns)
        largest = values[at].abs().amax((-2, -1), keepdim=True)
        scale = (largest.float() / 448).where(largest > 0, 1.0)
        rounded = (values[at].float() / scale).clamp(-448, 448).to(quantize.DTYPE)
        result[at] = (rounded.double() * scale.double()).float().to(dtype)
    return result


def rounding(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return how far ``dtype`` rounds values, at most: float16 is coarser below its normal numbers."""
    limits = torch.finfo(dtype)
    return (values.abs() + limits.smallest_normal) * limits.eps


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise", "blockwise"])
@pytest.mark.parametrize("shape", [(6, 8), (4, 6, 8), (1, 5), (300, 200), (2, 129, 384)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32])
def test_values_are_rounded_once(shape: tuple[int, ...], scaling: str, dtype: torch.dtype) -> None:
    values = torch.randn(shape) * torch.logspace(-3, 3, shape[-2]).unsqueeze(-1)
    values[..., 0, :] = 0
    scales = quantize.scales_of(quantize.amax(values, scaling))
    assert scales.shape == quantize.scale_shape(shape, scaling)
    assert scales.numel() == quantize.scale_count(shape, scaling)
    data = torch.empty(math.prod(shape) + 3, dtype=quantize.SENT_DTYPE)
    per_row = quantize.per_row(scales, shape[-2], scaling)
    quantize.quantize_rows(values, per_row, scaling, quantize.quantize, out=data[:-3].view(shape))
    result = quantize.dequantize_bucket(data, scales.flatten(), [(0, shape)], dtype, scaling)[:-3].view(shape)
    assert torch.equal(result, as_gathered(values, scaling, dtype))
    if scaling == "blockwise":
        scales = scales.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., : shape[-2], : shape[-1]]
    error = (result.double() - values).abs()
    assert (error <= values.abs() / 16 + scales / 1024 + rounding(values, dtype)).all()


@pytest.mark.parametrize("shape", [(6, 64), (4, 6, 32)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32])
def test_mxfp8(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = torch.randn(shape) * torch.logspace(-3, 3, shape[-2]).unsqueeze(-1)
    values[..., 0, :32] = 0
    values[..., 1, 0] = 448 * 4  # fills its scale
    data = quantize.quantize_mx(values.flatten())
    assert (data.dtype, data.numel()) == (quantize.SENT_DTYPE, quantize.sent_numel(values.numel(), "mxfp8"))
    assert data.numel() == values.numel() * 33 // 32
    result = quantize.dequantize_mx(data, dtype).view(shape)
    assert torch.equal(result, as_gathered(values, "mxfp8", dtype))
    largest = values.unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True).expand(*shape[:-1], -1, 32).flatten(-2)
    error = (result.double() - values).abs()  # a scale is up to twice as large as the least that is enough
    assert (error <= values.abs() / 16 + 2 * largest / 448 / 1024 + rounding(values, dtype)).all()


@pytest.mark.parametrize(
    ("largest", "scale"),
    [
        (0.0, 0),
        (448.0, 127),
        (448.1, 128),  # rounded up: floor(log2) - 8 would be 127, and 448.1 more than the dtype has
        (511.0, 128),
        (896.0, 128),
        (2.0**-140, 0),  # the least scale is 2^-127
        (448 * 2.0**-127, 0),
        (449 * 2.0**-127, 1),
        (448 * 2.0**-126, 1),
        (3.0e38, 247),
        (math.inf, 254),
        (math.nan, 255),
    ],
)
def test_scales_of_mxfp8(largest: float, scale: int) -> None:
    assert quantize.exponents_of(torch.tensor([largest])).tolist() == [scale]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible_with_mxfp8(bad: float) -> None:
    values = torch.ones(2, 32)
    values[1, 2] = bad
    result = quantize.dequantize_mx(quantize.quantize_mx(values.flatten()), BF16).view(2, 32)
    assert not result[1, 2].isfinite()
    assert torch.equal(result[0], torch.ones(32, dtype=BF16))


def through_nvfp4(values: Tensor, dtype: torch.dtype = F32) -> Tensor:
    """Quantize and dequantize a parameter."""
    scales = quantize.matrix_scales_of(quantize.amax(values, "nvfp4"))
    assert scales.shape == quantize.scale_shape(values.shape, "nvfp4") == (*values.shape[:-2], 1, 1)
    data = quantize.quantize_nvfp4(values.flatten(), [(0, values.shape, scales)])
    assert (data.dtype, data.numel()) == (quantize.SENT_DTYPE, quantize.sent_numel(values.numel(), "nvfp4"))
    assert data.numel() == values.numel() * 9 // 16
    return quantize.dequantize_bucket(data, scales.flatten(), [(0, values.shape)], dtype, "nvfp4").view(values.shape)


@pytest.mark.parametrize("shape", [(6, 64), (4, 6, 48), (1, 16)])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, F32])
@pytest.mark.parametrize("spread", [0, 3])
def test_nvfp4(shape: tuple[int, ...], dtype: torch.dtype, spread: int) -> None:
    values = torch.randn(shape) * torch.logspace(-spread, spread, shape[-2]).unsqueeze(-1)
    values[..., 0, :8] = 0
    if shape[-2] > 1:
        values[..., 1, :16] = 0  # a block of zeros
        values[..., 2, :16] = values.abs().max() * 2.0**-23  # too small for a scale
    result = through_nvfp4(values, dtype)
    assert torch.equal(result, as_gathered(values, "nvfp4", dtype))
    # E4M3 rounds scales by at most 1/16, and below its normal numbers by 2^-10, perhaps to zero.
    below = values.abs().amax((-2, -1), keepdim=True) / (6 * 448) * 2.0**-10
    scales = values.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True) / 6 * 17 / 16
    half = scales.expand(*shape[:-1], -1, 16).flatten(-2) / 4 + below
    error = (result.double() - values).abs()
    assert (error <= torch.maximum(values.abs() / 5, half) + 6 * below + rounding(values, dtype)).all()


def test_values_of_nvfp4() -> None:
    """Each value that there is, and each that lies between two: it goes to the even mantissa. Signs of zeros stay."""
    between = (E2M1[1:] + E2M1[:-1]) / 2
    even = torch.tensor([0, 1, 1, 2, 2, 4, 4])
    values = torch.cat([E2M1, between, torch.tensor([5.5])]).float() * 448
    expected = torch.cat([E2M1, even, torch.tensor([6.0])]).float() * 448
    result = through_nvfp4(torch.stack([values, -values]))
    assert torch.equal(result, torch.stack([expected, -expected]))
    assert torch.equal(result.signbit(), torch.tensor([[False], [True]]).expand(2, 16))
    above, below = (between.float().nextafter(torch.tensor(limit)) for limit in (7.0, 0.0))
    near = F.pad(torch.stack([above, below]), (0, 9), value=6.0) * 448
    assert torch.equal(through_nvfp4(near)[:, :7], torch.stack([E2M1[1:], E2M1[:-1]]).float() * 448)


def test_bytes_of_nvfp4() -> None:
    """The first value of two is in the lower half of a byte, as in ``torch.float4_e2m1fn_x2``; the scale comes last."""
    values = torch.arange(16) % 8
    block = torch.where(torch.arange(16) < 8, E2M1[values], -E2M1[values]).float().unsqueeze(0) * 448
    data = quantize.quantize_nvfp4(block.flatten(), [(0, (1, 16), torch.ones(1, 1))])
    assert data.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, 0x7E]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible_with_nvfp4(bad: float) -> None:
    """Also where the maximum over ranks has lost a NaN."""
    values = torch.ones(2, 32)
    values[1, 2] = bad
    assert through_nvfp4(values, BF16)[1, :16].isnan().all()
    parts = [(0, (2, 32), torch.full((1, 1), 1 / (6 * 448)))]
    result = quantize.dequantize_nvfp4(quantize.quantize_nvfp4(values.flatten(), parts), parts, BF16).view(2, 32)
    if math.isnan(bad):
        assert result[1, :16].isnan().all()
        assert torch.equal(result[0], torch.ones(32, dtype=BF16))
        assert torch.equal(result[1, 16:], torch.ones(16, dtype=BF16))


@pytest.mark.parametrize("largest", [1e-44, 1e-38, 1e-30, 1e30, 3e38])
def test_ranges_of_nvfp4(largest: float) -> None:
    """Scales of matrices neither overflow nor become zero; where they lose bits, values are too small to matter."""
    values = torch.linspace(-1, 1, 32).unsqueeze(0) * largest
    result = through_nvfp4(values)
    assert torch.equal(result, as_gathered(values, "nvfp4", F32))
    assert ((result.double() - values).abs() <= largest / 6 + 3e-42).all()


ERRORS = {"rowwise": 0.0264, "tensorwise": 0.0264, "blockwise": 0.0264, "mxfp8": 0.0266, "nvfp4": 0.0952}


@pytest.mark.parametrize("scaling", POLICIES)
def test_error_of_a_gather(scaling: str) -> None:
    """Root mean square of the errors, of that of normally distributed weights: what docs/fp8.md says."""
    values = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    error = ((as_gathered(values, scaling, F32) - values).norm() / values.norm()).item()
    assert error == pytest.approx(ERRORS[scaling], abs=0.0001)


@pytest.mark.parametrize("scaling", ["rowwise", "tensorwise", "blockwise"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_visible(bad: float, scaling: str) -> None:
    values = torch.ones(3, 4)
    values[1, 2] = bad
    scales = quantize.scales_of(quantize.amax(values, scaling))
    data = quantize.quantize(values, scales).flatten()
    result = quantize.dequantize_bucket(data, scales.flatten(), [(0, (3, 4))], BF16, scaling).view(3, 4)
    assert result[1].isnan().any()
    assert scaling != "rowwise" or torch.equal(result[0], torch.ones(4, dtype=BF16))


def test_scales_that_are_powers_of_two() -> None:
    """They are the smallest that hold the largest value; what is not finite stays visible."""
    largest = torch.tensor([448.0, 448.1, 447.9, 896.0, 3.0, 1e-30, 0.0, math.inf])
    scales = quantize.rounded_scales_of(largest)
    expected = [1.0, 2.0, 1.0, 2.0, 2**-7, 2.0 ** math.ceil(math.log2(1e-30 / 448)), 1.0, math.inf]
    assert scales.tolist() == expected
    assert quantize.rounded_scales_of(torch.tensor([math.nan])).isnan().all()


def matrices(width: int, kv: int, hidden: int) -> dict[str, tuple[int, int]]:
    """Return the matrices of a layer of Llama 3."""
    attention = {"q": (width, width), "k": (kv, width), "v": (kv, width), "o": (width, width)}
    return attention | {"gate": (hidden, width), "up": (hidden, width), "down": (width, hidden)}


LLAMA = {
    "8B": (matrices(4096, 1024, 14336), 445),
    "70B": (matrices(8192, 1024, 28672), 741),
    "405B": (matrices(16384, 1024, 53248), 1024),
}
"""Shapes, and the number of ranks up to which padding is at most 3 % whatever the number. Beyond it, some numbers need
more, because shards never cut rows.
"""


@pytest.mark.parametrize("size", LLAMA)
def test_bytes_of_llama(size: str) -> None:
    """Elements per gather are at most 1.03 x parameters, of one byte each; 33/32 with mxfp8, and 9/16 with nvfp4."""
    shapes, most = LLAMA[size]
    numel = sum(math.prod(shape) for shape in shapes.values())
    for scaling in POLICIES:
        policy = LayoutPolicy(block_numel=quantize.block_numel(scaling))
        for ranks in {*range(1, most + 1, 1 if scaling == "mxfp8" else 37), *(2**i for i in range(11))}:
            layouts = plan_layouts([ParamSpec(name, shape) for name, shape in shapes.items()], 1, ranks, policy)
            assert all(layout.shard_numel % quantize.block_numel(scaling) == 0 for layout in layouts)
            data = sum(layout.numel for layout in layouts)
            assert numel <= data <= 1.03 * numel, (scaling, ranks)
            sent = sum(quantize.sent_numel(layout.numel, scaling) for layout in layouts)
            assert sent == data * {"mxfp8": 33, "nvfp4": 18}.get(scaling, 32) // 32
        scales = 4 * sum(quantize.scale_count(shape, scaling) for shape in shapes.values())
        assert (
            scales
            <= {"rowwise": 1e-3, "tensorwise": 1e-6, "blockwise": 3e-4, "mxfp8": 0, "nvfp4": 1e-6}[scaling] * numel
        )


# -- parity -----------------------------------------------------------------------------------------------------------


def reference(policy: MixedPrecisionPolicy, steps: int = 3) -> list[Tensor]:
    """Train in one process on weights that are what quantized gathers deliver. Return losses and whole parameters."""
    model = build(CONFIGS[policy.param_comm_scaling])
    main_params = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    optimizer = torch.optim.AdamW(main_params, lr=0.01)
    losses = []
    for step in range(steps):
        for (name, param), whole in zip(model.named_parameters(), main_params, strict=True):
            matrix = name.startswith("layers.") and param.dim() == 2
            param.data = as_gathered(whole.detach(), policy.param_comm_scaling) if matrix else whole.detach().to(BF16)
        loss = loss_of(model, step)
        loss.backward()
        losses.append(loss.detach())
        for param, whole in zip(model.parameters(), main_params, strict=True):
            whole.grad = param.grad.float()
        model.zero_grad()
        optimizer.step()
    return losses + [param.detach() for param in main_params]


@pytest.mark.long_unless("*-eager", "*-blockwise-*")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("scaling", POLICIES)
@on_ranks(2)
def test_equals_one_process_bitwise(scaling: str, mode: str) -> None:
    policy = POLICIES[scaling]
    model, call = shard(policy, mode, module=build(CONFIGS[scaling]))
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    found = []
    for step in range(3):
        loss = loss_of(call, step)
        loss.backward()
        found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(found + [param.full_tensor().detach() for param in model.parameters()], reference(policy))
    names = [slot.name for bucket in quantized(model) for slot in bucket.plan.layout.slots]
    assert set(names) == {n for n, p in model.module.named_parameters() if n.startswith("layers.") and p.dim() == 2}


@pytest.mark.long
@pytest.mark.parametrize("scaling", ["rowwise", "blockwise", "mxfp8", "nvfp4"])
@on_ranks(2, timeout=300)
def test_inductor(scaling: str) -> None:
    config = CONFIGS[scaling]
    _, eager = shard(POLICIES[scaling], module=build(config))
    _, call = shard(POLICIES[scaling], INDUCTOR, module=build(config))
    for step in range(2):
        mine, its = loss_of(call, step), loss_of(eager, step)
        mine.backward()
        its.backward()
        assert torch.allclose(mine, its, rtol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("scaling", ["tensorwise", "blockwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(
    ("strategy", "sharding", "options"),
    [
        pytest.param("optim_grads_params", {}, {"reshard_after_forward": 2}, id="portions"),
        pytest.param("HSDP optim_grads_params", {}, {}, id="HSDP"),
        pytest.param("optim_grads_params", {}, {"regions": True}, id="regions"),
        pytest.param("optim_grads_params", {}, {"memory_budget": "1GiB"}, id="solved"),
        pytest.param("optim_grads_params", {"fsdp_double_buffer": True}, {}, id="buffers"),
        pytest.param("optim_grads_params", {"bucket_bytes": 4096}, {}, id="small buckets"),
    ],
)
@on_ranks(4)
def test_compiled_equals_eager_bitwise(
    strategy: str, sharding: dict[str, Any], options: dict[str, Any], scaling: str
) -> None:
    arguments, policy, config = {**mesh_arguments(strategy), **sharding}, POLICIES[scaling], CONFIGS[scaling]
    eager = train(*shard(policy, EAGER, module=build(config), **arguments))
    model, call = shard(policy, AOT_EAGER, module=build(config), options=options, **arguments)
    assert_equal(train(model, call), eager)
    assert len(quantized(model)) >= 2


@pytest.mark.long
@on_ranks(2)
def test_kept_gathered_and_served() -> None:
    assert_kept_gathered_and_served(ROWWISE)


@pytest.mark.long
@on_ranks(2)
def test_kept_gathered_and_served_in_float4() -> None:
    assert_kept_gathered_and_served(NVFP4)


def assert_kept_gathered_and_served(policy: MixedPrecisionPolicy) -> None:
    expected = train(*shard(policy))
    model, call = shard(policy)
    with model.gathered():
        assert_equal(train(model, call), expected)
    model, _ = shard(policy)
    for layer in model.module.layers:
        layer.compile(backend="mfsdp", options={"inner": AOT_EAGER})
    assert_equal(train(model, model), expected)
    copied = copy.deepcopy(shard(policy)[0])
    assert_equal(train(copied, copied), expected)


@pytest.mark.long_if("*-aot_eager", "*-Tied-*")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("factory", [zoo.FrozenUnit, zoo.FrozenParameters, zoo.Checkpointed, zoo.Tied, zoo.Uneven])
@on_ranks(2)
def test_models(factory: type[nn.Module], mode: str) -> None:
    """Losses are those of plain gathers up to the rounding of weights, and compiled ones are eager ones to the bit."""
    assert_like_plain(factory, mode, ROWWISE)


@pytest.mark.long
@pytest.mark.parametrize("factory", [zoo.FrozenUnit, zoo.FrozenParameters, zoo.Checkpointed, zoo.Tied])
@on_ranks(2)
def test_models_in_float4(factory: type[nn.Module]) -> None:
    assert_like_plain(factory, AOT_EAGER, NVFP4)


def assert_like_plain(factory: type[nn.Module], mode: str, policy: MixedPrecisionPolicy) -> None:
    data = parity.batches(3)
    plain = parity.train_sharded(factory, EAGER, data)
    eager = parity.train_sharded(factory, EAGER, data, precision=policy)
    run = eager if mode == EAGER else parity.train_sharded(factory, mode, data, precision=policy)
    assert quantized(run.model)
    for a, b in zip(run.shards, eager.shards, strict=True):
        assert torch.equal(a, b)
    losses = zip(run.losses, plain.losses, strict=True)
    rtol = 0.1 if policy is ROWWISE else 0.3  # errors of weights are 3.6 times as large
    assert all(torch.allclose(a, b, rtol=rtol) for a, b in losses)
    assert any(not torch.equal(a, b) for a, b in zip(run.losses, plain.losses, strict=True))


# -- scales -----------------------------------------------------------------------------------------------------------


@contextmanager
def recorded() -> Iterator[list[tuple[str, torch.dtype, int]]]:
    """Record the collectives that the runtime starts: name, dtype and bytes of the input."""
    found: list[tuple[str, torch.dtype, int]] = []

    def recording(name: str) -> Any:
        start = getattr(compat, name)

        def record(tensor: Tensor, *args: Any) -> Tensor:
            found.append((name, tensor.dtype, tensor.nbytes))
            return start(tensor, *args)

        return mock.patch.object(compat, name, record)

    with recording("all_gather"), recording("all_reduce"), recording("reduce_scatter"):
        yield found


@pytest.mark.long_unless("*-eager-4")
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_one_collective_per_step(mode: str, microbatches: int) -> None:
    graphs: list[Counter[str]] = []

    def look(graph: fx.Graph, context: Context, phase: Phase) -> None:
        graphs.append(Counter(str(node.target) for node in graph.nodes))

    model, call = shard(ROWWISE, mode, options={"passes": [look]} if mode != EAGER else {})
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))

    def step(model: Any = model, call: Any = call, optimizer: Any = optimizer) -> None:
        for micro in range(microbatches):
            loss_of(call, micro).backward()
        optimizer.step()
        optimizer.zero_grad()

    plain, plain_call = shard(MixedPrecisionPolicy(), mode)
    plain_optimizer = fully_shard_optimizer(torch.optim.AdamW(plain.parameters(), lr=0.01))
    step(plain, plain_call, plain_optimizer)
    others = collectives(lambda: step(plain, plain_call, plain_optimizer))["all_reduce"]
    step()  # the first forward quantizes what the model was made with
    for _ in range(2):
        with recorded() as found:
            counts = collectives(step)
        scales = sum(bucket.scales.numel() for bucket in quantized(model))
        # Ranks also tell each other which parameters a backward has used, in bytes.
        assert [entry for entry in found if entry[:2] == ("all_reduce", F32)] == [("all_reduce", F32, 4 * scales)]
        assert counts["all_reduce"] == others + 1
        if mode == EAGER:
            for bucket in quantized(model):
                sent = [entry for entry in found if entry[1:] == (torch.uint8, bucket.plan.layout.shard_numel)]
                assert len(sent) >= microbatches
    assert not any("all_reduce" in name for graph in graphs for name in graph)


@pytest.mark.parametrize(("scaling", "record"), [("mxfp8", (32, 33)), ("nvfp4", (16, 9))])
@on_ranks(2)
def test_scales_that_are_gathered_with_the_data(scaling: str, record: tuple[int, int]) -> None:
    """They have no collective: one byte for 32 or 16 values. With nvfp4, those of matrices have one per step."""
    model, call = shard(POLICIES[scaling], module=build(CONFIGS[scaling]))
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in range(2):
        with recorded() as found:
            loss_of(call, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        matrices = sum(len(bucket.plan.layout.slots) for bucket in quantized(model))
        reduced = [("all_reduce", F32, 4 * matrices)] if scaling == "nvfp4" else []
        assert [entry for entry in found if entry[:2] == ("all_reduce", F32)] == reduced
        for bucket in quantized(model):
            assert bucket.scales.numel() == (len(bucket.plan.layout.slots) if reduced else 0)
            sent = bucket.plan.layout.shard_numel // record[0] * record[1]
            assert found.count(("all_gather", torch.uint8, sent)) >= 2


@on_ranks(2)
def test_shards_are_quantized_when_they_change() -> None:
    model, call = shard(ROWWISE)
    first, other = quantized(model)
    loss_of(call, 0)
    data = [bucket.made.clone() for bucket in (first, other)]
    with torch.no_grad():
        first.params[0].mul_(2)
    assert first.is_made_stale
    assert not other.is_made_stale
    with recorded() as found:
        loss_of(call, 0)
        loss_of(call, 0)
    assert [name for name, *_ in found].count("all_reduce") == 1
    assert torch.equal(first.made, data[0])  # doubled scales
    assert torch.equal(other.made, data[1])
    with torch.no_grad():
        for param in first.params:
            param.to_local().add_(1)
    loss_of(call, 0)
    assert not torch.equal(first.made, data[0])
    model.reset()
    assert first.is_made_stale


@on_ranks(2)
def test_whole_weights_are_not_saved() -> None:
    """After a forward only the last unit's dequantized weights are in memory, and the gathered bytes of none."""
    model, call = shard(ROWWISE)
    buckets, made = quantized(model), []
    dequantize = quantize.dequantize_bucket

    def record(gathered: Tensor, scales: Tensor, *settings: Any) -> Tensor:
        whole = dequantize(gathered, scales, *settings)
        (bucket,) = (each for each in buckets if each.scales.data_ptr() == scales.data_ptr())
        made.extend([(bucket, "float8", weakref.ref(gathered)), (bucket, "whole", weakref.ref(whole))])
        return whole

    with mock.patch.object(quantize, "dequantize_bucket", record):
        loss = loss_of(call, 0)
        alive = [(bucket, kind) for bucket, kind, tensor in made if tensor() is not None]
        assert all(kind == "whole" and bucket is buckets[-1] for bucket, kind in alive)
        assert len(made) == 4
        loss.backward()
        assert len(made) > 4


# -- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_checkpoints_hold_main_weights_only(pools: Pools, tmp_path: Path) -> None:
    saved = pools.of(2).run(_save, folder=str(tmp_path))[0]
    for ranks in (1, 2):
        for loaded in pools.of(ranks).run(_load, folder=str(tmp_path)):
            for a, b in zip(saved, loaded, strict=True):
                assert torch.equal(a, b)


def _save(folder: str) -> list[Tensor]:
    model, call = shard(ROWWISE)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    loss_of(call, 0).backward()
    optimizer.step()
    assert all(value.dtype == F32 for value in model.state_dict().values())
    Checkpoints(folder).save(1, model, optimizer)
    return [param.full_tensor().detach() for param in model.parameters()]


def _load(folder: str) -> list[Tensor]:
    for policy in (MixedPrecisionPolicy(), TENSORWISE, NVFP4, ROWWISE):
        model, call = shard(policy)
        with torch.no_grad():
            before = loss_of(call, 0)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        Checkpoints(folder).load(model, optimizer)
        with torch.no_grad():
            assert not torch.equal(loss_of(call, 0), before)
    return [param.full_tensor().detach() for param in model.parameters()]


# -- which parameters, and what is refused ----------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_world")
def test_which_parameters_are_quantized() -> None:
    asked = []

    def choose(name: str, parameter: nn.Parameter) -> bool:
        asked.append((name, parameter.dim()))
        return name.endswith("embedding.weight") or ".gate." in name

    model, _ = shard(MixedPrecisionPolicy(param_comm_dtype=quantize.DTYPE, param_comm_filter=choose))
    names = [slot.name for bucket in quantized(model) for slot in bucket.plan.layout.slots]
    assert names
    assert all(choose(name, model.module.get_parameter(name)) for name in names)
    assert {dim for _, dim in asked} == {2}


@pytest.mark.usefixtures("fake_world")
def test_reports_say_what_is_sent() -> None:
    model, call = shard(NVFP4, AOT_EAGER, module=build(CONFIGS["nvfp4"]))
    text = str(explain(call, tokens(0)[:, :-1]))
    plan = quantized(model)[0].plan
    sent = f"{plan.layout.numel // 16 * 9:,} B"
    assert f"7 of 7 parameters, {sent} gathered in float4, nvfp4, dequantized\n" in text
    ranks, dtype = f"{dist.get_world_size()} ranks", str(plan.compute_dtype).removeprefix("torch.")
    assert f"{sent} in uint8 of {ranks}, gathered over {ranks}, dequantized to {dtype}" in text


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize(("scaling", "block"), [("mxfp8", 32), ("nvfp4", 16)])
def test_rows_that_a_scaling_cannot_divide(scaling: str, block: int) -> None:
    model, _ = shard(POLICIES[scaling])
    names = [slot.name for bucket in quantized(model) for slot in bucket.plan.layout.slots]
    assert names
    assert all(model.module.get_parameter(name).shape[-1] == 32 for name in names)
    policy = replace(POLICIES[scaling], param_comm_filter=lambda name, parameter: name.endswith("down.weight"))
    message = rf"='{scaling}' scales {block} .*down.weight', which param_comm_filter has chosen, have 44 elements"
    with pytest.raises(ValueError, match=message):
        shard(policy)


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "HFSDP"])
def test_strategies_without_gathers_of_shards_are_refused(strategy: str) -> None:
    for policy in (ROWWISE, NVFP4):
        message = rf"param_comm_dtype={policy.param_comm_dtype} is for shards.*optim_grads_params"
        with pytest.raises(NotImplementedError, match=message):
            shard(policy, **mesh_arguments(strategy))


@pytest.mark.usefixtures("fake_world")
def test_nothing_to_quantize_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter is quantized: by default only matrices in units are"):
        shard(ROWWISE, units=None)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"param_comm_dtype": torch.float8_e5m2},
            ValueError,
            r"takes torch\.float8_e4m3fn, torch\.float4_e2m1fn_x2 or None, got torch\.float8_e5m2",
        ),
        ({"param_comm_dtype": BF16}, ValueError, "another dtype than the model's, use param_dtype"),
        (
            {"param_comm_dtype": quantize.DTYPE, "param_comm_scaling": "block"},
            ValueError,
            "takes one of rowwise, tensorwise, blockwise, mxfp8, nvfp4, got 'block'",
        ),
        (
            {"param_comm_dtype": quantize.DTYPE, "param_comm_scaling": "nvfp4"},
            ValueError,
            r"'nvfp4' is for torch\.float4_e2m1fn_x2, but param_comm_dtype is torch\.float8_e4m3fn",
        ),
        (
            {"param_comm_dtype": FP4},
            ValueError,
            r"'rowwise' is for torch\.float8_e4m3fn, but param_comm_dtype is torch\.float4_e2m1fn_x2\. Of the "
            r"scalings, 'nvfp4'",
        ),
        ({"param_comm_scaling": "nvfp4"}, ValueError, r"Give param_comm_dtype=torch\.float4_e2m1fn_x2"),
        (
            {"param_comm_dtype": quantize.DTYPE, "param_comm_filter": "mlp"},
            TypeError,
            "takes a function or None, got 'mlp'",
        ),
        ({"param_comm_scaling": "tensorwise"}, ValueError, "param_comm_dtype is None, so none is"),
        ({"param_comm_filter": lambda name, parameter: True}, ValueError, "param_comm_dtype is None, so none is"),
    ],
)
def test_policies_that_mean_nothing(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MixedPrecisionPolicy(**fields)
