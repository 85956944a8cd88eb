"""Linear layers in float8: arithmetic, what is rewritten and what is left, parity with the operator in a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import on_ranks
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.backend.fp8 import check_multiplies_fp8
from mfsdp_compile.backend.options import CompileOptions
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig
from mfsdp_compile.passes import pipeline, roles
from mfsdp_compile.passes.guests.fp8_matmul import _gains
from mfsdp_compile.passes.guests.solver.costs import CostModel
from mfsdp_compile.passes.guests.solver.hardware import hardware
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.formats.fp8_linear import quantize_over
from mfsdp_compile.runtime.schedule.phase import Phase

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
CONFIG = LlamaConfig(vocabulary=48, width=32, layers=3, heads=4, kv_heads=2, hidden=48)
needs_rows = pytest.mark.skipif(
    not compat.multiplies_by_rows(torch.device("cpu")), reason="needs products with scales of rows on CPUs"
)
SCALINGS = [pytest.param("rowwise", marks=needs_rows), "tensorwise"]
LINEARS = 7  # in a block
GATHERED = MixedPrecisionPolicy(param_comm_dtype=E4M3)
MXFP8 = MixedPrecisionPolicy(param_comm_dtype=E4M3, param_comm_scaling="mxfp8")
NVFP4 = MixedPrecisionPolicy(param_comm_dtype=torch.float4_e2m1fn_x2, param_comm_scaling="nvfp4")
ROUNDING = 2**-4
"""Largest relative error of a value that is rounded to 3 bits of mantissa."""


def build(dtype: torch.dtype = BF16, config: LlamaConfig = CONFIG) -> Llama:
    torch.manual_seed(0)
    return Llama(config).to(dtype)


def tokens(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    batch = torch.randint(0, CONFIG.vocabulary, (2, 17), generator=torch.Generator().manual_seed(100 * step + rank))
    return batch[:, :-1], batch[:, 1:]


def shard(module: nn.Module, **arguments: Any) -> Any:
    policy = arguments.pop("policy", MixedPrecisionPolicy())
    return fully_shard_model(module, fsdp_unit_modules=[Block], mixed_precision_policy=policy, **arguments)


def compiled(model: Any, inner: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(model, backend="mfsdp", options={"inner": inner, "verify": "each", **options})


# -- arithmetic -------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dims", [[1], [0], [0, 1]])
@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
def test_values_are_divided_by_the_scales_of_their_rows(dims: list[int], dtype: torch.dtype) -> None:
    values = torch.randn(32, 48) * torch.logspace(-4, 4, 32).unsqueeze(-1)
    values[3], values[:, 5] = 0, 0
    data, scales = quantize_over(values, dims, dtype)
    assert (data.dtype, scales.shape) == (
        dtype,
        torch.Size([1 if dim in dims else n for dim, n in enumerate((32, 48))]),
    )
    largest = (data.float() * scales).abs().amax(dims, keepdim=True)
    torch.testing.assert_close(largest, values.abs().amax(dims, keepdim=True), rtol=1e-6, atol=0)
    rounding = ROUNDING if dtype is E4M3 else 2 * ROUNDING  # 3 and 2 bits of mantissa
    smallest = torch.finfo(dtype).smallest_normal * rounding
    assert ((data.float() * scales - values).abs() <= rounding * values.abs() + smallest * scales).all()


def test_values_that_are_not_finite_stay_visible() -> None:
    for bad in (float("nan"), float("inf")):
        values = torch.ones(16, 16)
        values[2, 3] = bad
        data, scales = quantize_over(values, [1], E4M3)
        result = data.float() * scales
        assert result[2].isnan().any()
        assert torch.equal(result[3:], values[3:])


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("wgrad", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_products_and_gradients(scaling: str, wgrad: bool, bias: bool) -> None:
    """Each product is that of the exact values, within the rounding of its operands."""
    generator = torch.Generator().manual_seed(1)
    x, w, b, g = (
        torch.randn(size, generator=generator).to(BF16) for size in ((2, 16, 32), (48, 32), (48,), (2, 16, 48))
    )
    for value in (x, w, b):
        value.requires_grad_()
    result = torch.ops.mfsdp.fp8_linear(x, w, b if bias else None, scaling, wgrad)
    result.backward(g)
    exact = [t.detach().double().requires_grad_() for t in (x, w, b)]
    F.linear(exact[0], exact[1], exact[2] if bias else None).backward(g.double())

    def apart(mine: Tensor, its: Tensor) -> float:
        return ((mine.double() - its).norm() / its.norm()).item()

    # Errors of operands are independent: a product of two is off by their root mean square, 2.6 % each for 3 bits of
    # mantissa (uniform in a step), twice that for 2 bits.
    of_value, of_gradient = 0.026, 0.026 if scaling == "rowwise" else 0.052
    forward = 1.15 * 2**0.5 * of_value
    backward = 1.15 * (of_value**2 + of_gradient**2) ** 0.5
    assert 0.01 < apart(result, F.linear(*exact) if bias else F.linear(*exact[:2])) < forward
    assert 0.01 < apart(x.grad, exact[0].grad) < backward
    assert (0.01 if wgrad else 0) < apart(w.grad, exact[1].grad) < (backward if wgrad else 2**-8)
    if bias:
        assert apart(b.grad, exact[2].grad) < 2**-8


@needs_rows
def test_scales_of_a_weight_are_folded_into_the_gradient() -> None:
    """dgrad is as exact for rows of very different sizes as for equal ones."""
    x = torch.randn(16, 32).to(BF16).requires_grad_()
    w = (torch.randn(48, 32) * torch.logspace(-3, 3, 48).unsqueeze(-1)).to(BF16)
    g = torch.randn(16, 48).to(BF16)
    torch.ops.mfsdp.fp8_linear(x, w, None, "rowwise", False).backward(g)
    exact = g.double() @ w.double()
    assert (x.grad.double() - exact).norm() / exact.norm() < 1.15 * 2**0.5 * 0.026


def test_small_gradients_are_not_lost_beside_large_ones() -> None:
    """With one scale for all gradients, those of a token that are 300,000 times smaller keep their precision."""
    x, w = torch.randn(16, 128).to(BF16).requires_grad_(), torch.randn(256, 128).to(BF16)
    g = torch.randn(16, 256).to(BF16)
    g[3] *= 2**-18
    torch.ops.mfsdp.fp8_linear(x, w, None, "tensorwise", False).backward(g)
    exact = g[3].double() @ w.double()
    assert (x.grad[3].double() - exact).norm() / exact.norm() < 1.2 * (0.026**2 + 0.052**2) ** 0.5


def test_without_tokens_and_under_autocast() -> None:
    w = torch.randn(32, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        result = torch.ops.mfsdp.fp8_linear(torch.randn(8, 16), w, None, "tensorwise", False)
    assert result.dtype == BF16
    result.sum().backward()
    assert w.grad.dtype == torch.float32
    assert torch.ops.mfsdp.fp8_linear(torch.randn(0, 16), w, None, "tensorwise", True).shape == (0, 32)


# -- what is rewritten ------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Layers of all kinds in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.odd = nn.Linear(32, 24)
        self.last = nn.Linear(24, 16)
        self.inside = nn.Linear(16, 16, bias=False)
        self.transposed = nn.Parameter(torch.randn(16, 16))
        self.wide = nn.Linear(16, 16).float()

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.odd(self.first(x).relu()))
        x = checkpoint(lambda x: self.inside(x).relu(), x, use_reentrant=False)
        return F.linear(x, self.transposed.t()) + self.wide(x.float()).to(x.dtype)


def report_of(model: Any, *args: Any, **options: Any) -> list[str]:
    compiled(model, **options)(*args).float().sum().backward()
    (report,) = (r for r in model.sharded.compiled_graphs[-1].reports[None] if r.name == "fp8_matmul")
    return list(report.lines)


@needs_rows
@pytest.mark.usefixtures("fake_world")
def test_what_is_rewritten_and_why_the_rest_is_not() -> None:
    torch.manual_seed(0)
    unit = Mixed().to(BF16)
    unit.wide.float()
    model = fully_shard_model(nn.Sequential(unit, nn.Linear(16, 16, dtype=BF16)), fsdp_unit_modules=[Mixed])
    assert report_of(model, torch.randn(16, 16, dtype=BF16), fp8_matmul="rowwise") == [
        "2 linear layers (0.first.weight, 0.inside.weight) in float8, rowwise: forward and dgrad",
        "2 linear layers (0.odd.weight, 0.last.weight) left: a size of its weight is not a multiple of 16",
        "1 linear layer (linear_3) left: its weight is not a parameter as it is",
        "1 linear layer (0.wide.weight) left: it computes in torch.float32",
        "1 linear layer (1.weight) left: outside of FSDP units, or left out by fp8_filter",
    ]


@pytest.mark.long
@needs_rows
@pytest.mark.usefixtures("fake_world")
def test_a_filter_and_a_machine_choose() -> None:
    asked: list[tuple[str, torch.Size]] = []

    def choose(name: str, shape: torch.Size) -> bool:
        asked.append((name, shape))
        return name.endswith("down.weight") or name == "head.weight"

    model = shard(build())
    lines = report_of(model, *tokens(0), fp8_matmul="tensorwise", fp8_wgrad=True, fp8_filter=choose)
    assert lines[0] == (
        "4 linear layers (layers.0.feed_forward.down.weight, layers.1.feed_forward.down.weight, "
        "layers.2.feed_forward.down.weight and "
        "1 more) in float8, "
        "tensorwise: forward, dgrad and wgrad"
    )
    assert ("embedding.weight", torch.Size([48, 32])) in asked
    torch._dynamo.reset()
    lines = report_of(shard(build()), *tokens(0), fp8_matmul="auto")
    assert lines[0] == "no linear layer in float8"
    assert lines[1].endswith("left: no gain expected on cpu")


def test_auto_wants_a_gain() -> None:
    costs = CostModel(hardware("h100-ib"), fused=True)
    large, small = torch.empty(4096, 4096, device="meta"), torch.empty(256, 256, device="meta")
    assert _gains(torch.empty(2, 4096, 4096, device="meta"), large, False, costs)
    assert not _gains(
        torch.empty(2, 64, 4096, device="meta"), large, False, costs
    )  # memory, not products, takes the time
    assert not _gains(torch.empty(2, 4096, 256, device="meta"), small, True, costs)
    assert not _gains(
        torch.empty(2, 4096, 4096, device="meta"), large, True, CostModel(hardware("a100-ib"), fused=True)
    )


@pytest.mark.long_unless("True-True")
@needs_rows
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("wgrad", [False, True])
@pytest.mark.parametrize("regions", [False, True])
def test_graphs(wgrad: bool, regions: bool) -> None:
    """Products are in the graphs, weights are quantized again in backward, and no quantized weight is saved."""
    graphs: list[tuple[fx.Graph, Phase]] = []
    finish, finish_region = pipeline.finish_graph, pipeline.finish_region

    def spy(graph: fx.Graph, phase: Phase, record: Any) -> None:
        finish(graph, phase, record)
        graphs.append((graph, phase))

    def spy_region(graph: fx.Graph, context: Any, phase: Phase) -> None:
        finish_region(graph, context, phase)
        graphs.append((graph, phase))

    pipeline.finish_graph, pipeline.finish_region = spy, spy_region
    try:
        model = shard(build())
        compiled(model, fp8_matmul="rowwise", fp8_wgrad=wgrad, regions=regions)(*tokens(0)).backward()
    finally:
        pipeline.finish_graph, pipeline.finish_region = finish, finish_region
    blocks = 1 if regions else 3
    count = {phase: 0 for phase in Phase}
    for graph, phase in graphs:
        count[phase] += len(graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default))
        if phase is Phase.FORWARD:
            weights = {
                node
                for node in graph.find_nodes(op="call_function", target=roles.QUANTIZE)
                if roles.has_kind(node.args[0], roles.NodeKind.VIEW)
            }
            assert len(weights) in (0, LINEARS * blocks)
            for value in graph.output_node().args[0]:
                assert not (isinstance(value, fx.Node) and roles.is_of_quantized(value) and value.args[0] in weights)
    assert count[Phase.FORWARD] == LINEARS * blocks
    assert count[Phase.BACKWARD] == LINEARS * blocks * (2 if wgrad else 1)


# -- parity -----------------------------------------------------------------------------------------------------------


class Fp8Linear(nn.Linear):
    """The operator in a module: what the pass makes of a linear layer."""

    scaling = "rowwise"
    wgrad = False

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mfsdp.fp8_linear(x, self.weight, self.bias, self.scaling, self.wgrad)  # type: ignore[no-any-return]


def converted(model: Llama, scaling: str, wgrad: bool, where: str = "") -> Llama:
    kind = type("Fp8Linear", (Fp8Linear,), {"scaling": scaling, "wgrad": wgrad})
    for name, module in model.layers.named_modules():
        if type(module) is nn.Linear and where in name:
            module.__class__ = kind
    return model


def train(model: Any, call: Callable[..., Tensor], steps: int = 2, microbatches: int = 1) -> list[Tensor]:
    """Train with AdamW. Return losses, gradients and parameters of this rank."""
    group = model.sharded.topology.every
    replica = dist.get_rank(compat.process_group(group.name))
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    found = []
    for step in range(steps):
        for micro in range(microbatches):
            loss = call(*tokens(10 * step + micro, replica))
            loss.backward()
            found.append(loss.detach())
        found += [p.grad.to_local().clone() for p in model.parameters() if p.requires_grad]
        optimizer.step()
        optimizer.zero_grad()
    return found + [p.to_local().detach().clone() for p in model.parameters()]


def assert_parity(scaling: str = "rowwise", wgrad: bool = False, microbatches: int = 1, **arguments: Any) -> None:
    """Training with the option equals, bit by bit, eager training of a model that has the operator in its modules."""
    options = arguments.pop("options", {})
    change, where = arguments.pop("change", lambda model: model), arguments.pop("where", "")
    eager = shard(change(converted(build(), scaling, wgrad, where)), **arguments)
    expected = train(eager, eager, microbatches=microbatches)
    model = shard(change(build()), **arguments)
    got = train(model, compiled(model, fp8_matmul=scaling, fp8_wgrad=wgrad, **options), microbatches=microbatches)
    for mine, its in zip(got, expected, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.long
@needs_rows
@on_ranks(2, timeout=240)
def test_parity_with_the_operator_in_modules() -> None:
    assert_parity()
    assert_parity("tensorwise", wgrad=True, microbatches=2, options={"regions": False})


def _plain(model: Llama) -> Llama:
    return model


def _checkpointed(model: Llama) -> Llama:
    for layer in model.layers:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)  # type: ignore[method-assign]
    return model


def _frozen(model: Llama) -> Llama:
    for layer in model.layers:
        layer.attention.requires_grad_(False)
    return model


@pytest.mark.long
@needs_rows
@pytest.mark.parametrize("case", ["checkpointed", "frozen", "portions", "buffers", "HSDP", "optim", "no_shard"])
@on_ranks(4, timeout=300)
def test_parity_with_other_features(case: str) -> None:
    for wgrad in (False, True):
        torch._dynamo.reset()
        if case == "checkpointed":
            assert_parity(wgrad=wgrad, change=_checkpointed)
        elif case == "frozen":
            assert_parity(wgrad=wgrad, change=_frozen)
        elif case == "portions":
            assert_parity(wgrad=wgrad, options={"reshard_after_forward": 2})
        elif case == "buffers":
            assert_parity(wgrad=wgrad, fsdp_double_buffer=True)
        else:
            assert_parity(wgrad=wgrad, **mesh_arguments("HSDP optim_grads_params" if case == "HSDP" else case))


@needs_rows
@pytest.mark.long
@on_ranks(4, timeout=300)
def test_layers_with_divided_weights_stay_as_they_are() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {
        "feed_forward.gate": ColwiseParallel(),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(),
    }

    def divided(model: Llama) -> Llama:
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], plan)
        return model

    dimensions = {"device_mesh": mesh, "dp_shard_dim": "dp", "tp_dim": "tp"}
    assert_parity(change=divided, where="attention", **dimensions)


@pytest.mark.long
@needs_rows
@pytest.mark.parametrize("regions", [False, True])
@pytest.mark.parametrize("change", [_plain, _checkpointed, _frozen])
@on_ranks(2, timeout=240)
def test_gathered_bytes_are_multiplied(change: Callable[[Llama], Llama], regions: bool) -> None:
    """Weights that were gathered in float8 are multiplied as they are, and no bucket of them is dequantized.

    Values in bfloat16 have the same float8 whether they are quantized before or after their gather, so the first step
    is that of weights that were gathered in bfloat16. Later, main weights have more digits.
    """
    eager = shard(change(converted(build(), "rowwise", False)))
    expected = train(eager, eager, steps=1)
    model = shard(change(build()), policy=GATHERED)
    got = train(model, compiled(model, fp8_matmul="rowwise", regions=regions), steps=1)
    for mine, its in zip(_by_name(model, got), _by_name(eager, expected), strict=True):
        assert torch.equal(mine, its)
    (record,) = model.sharded.compiled_graphs
    (report,) = (r for r in record.reports[None] if r.name == "fp8_matmul")
    kinds = 2 if change is _frozen else 1  # frozen matrices have buckets of their own
    assert report.lines[-1] == f"{3 * kinds} of {len(record.context.buckets)} buckets stay in float8"
    assert len(record.regions) == regions


@pytest.mark.long
@pytest.mark.parametrize("policy", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])
@on_ranks(2, timeout=240)
def test_weights_that_were_gathered_with_other_scales(policy: MixedPrecisionPolicy) -> None:
    """They are dequantized, and quantized again as the products need it."""
    assert_parity("tensorwise", policy=policy)
    model = shard(build(), policy=policy)
    compiled(model, fp8_matmul="tensorwise")(*tokens(0)).backward()
    (record,) = model.sharded.compiled_graphs
    (report,) = (r for r in record.reports[None] if r.name == "fp8_matmul")
    assert not any("stay in float8" in line for line in report.lines)
    assert any(bucket.made is not None for bucket in model.sharded.buckets)


def _by_name(model: Any, found: list[Tensor]) -> list[Tensor]:
    """Return losses, gradients and parameters, whole and in the order of their names: buckets have other layouts."""
    params = dict(model.named_parameters())
    trainable = [name for name, p in params.items() if p.requires_grad]
    losses, gradients, values = found[: -len(trainable) - len(params)], {}, {}
    for name, local in zip(trainable, found[len(losses) :], strict=False):
        gradients[name] = _whole(params[name], local)
    for name, local in zip(params, found[len(losses) + len(trainable) :], strict=True):
        values[name] = _whole(params[name], local)
    return [*losses, *(gradients[name] for name in sorted(gradients)), *(values[name] for name in sorted(values))]


def _whole(param: Any, local: Tensor) -> Tensor:
    spec = param.detach()
    spec = spec.clone()
    spec.to_local().copy_(local)
    return spec.full_tensor()  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.parametrize("scaling", SCALINGS)
@on_ranks(2, timeout=300)
def test_inductor(scaling: str) -> None:
    """Inductor's kernels quantize as the operator does, so losses differ as little as without float8."""
    losses = []
    for inner in ("aot_eager", "inductor"):
        module = build(config=replace(CONFIG, layers=1))
        with torch.no_grad():
            module.layers[0].feed_forward.up.weight[3:5] = 0  # rows of zeros
        model = shard(module)
        losses.append(compiled(model, inner, fp8_matmul=scaling, fp8_wgrad=True)(*tokens(0, dist.get_rank())))
        losses[-1].backward()
    # Some of its sums are not rounded to bfloat16 in between, so some values round to the next one in float8.
    torch.testing.assert_close(*losses, rtol=2e-3, atol=0)


@pytest.mark.long
@needs_rows
@on_ranks(2, timeout=240)
def test_verify_step_allows_for_rounding_and_no_more() -> None:
    model = shard(build())
    batch = tokens(0, dist.get_rank())
    comparison = model.verify_step(*batch, options={"inner": "aot_eager", "fp8_matmul": "rowwise"})
    assert 0.005 < comparison.largest < 0.3
    with pytest.raises(RuntimeError, match=r"Compiled and eager differ.*allowed 0\.001"):
        model.verify_step(*batch, options={"inner": "aot_eager", "fp8_matmul": "rowwise"}, tolerance=1e-3)


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fp8_matmul": "blockwise"}, ValueError, r"must be one of \('rowwise', 'tensorwise', 'auto', None\)"),
        ({"fp8_matmul": "auto", "fp8_wgrad": 1}, TypeError, "takes True or False, got 1"),
        (
            {"fp8_matmul": "auto", "fp8_filter": "mlp"},
            TypeError,
            r"takes a function \(name, shape\) -> bool, got 'mlp'",
        ),
        ({"fp8_wgrad": True}, ValueError, "'fp8_matmul'.* is not given, so nothing is"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        CompileOptions.of(options, None)


def test_gpus_without_float8_are_refused() -> None:
    with (
        mock.patch.object(torch.cuda, "get_device_capability", return_value=(8, 0)),
        mock.patch.object(torch.cuda, "get_device_name", return_value="NVIDIA A100"),
        pytest.raises(ValueError, match=r"capability 8\.9 or newer\), but NVIDIA A100 has 8\.0"),
    ):
        check_multiplies_fp8(torch.device("cuda", 0), "rowwise")


def test_torch_without_scales_of_rows_is_refused() -> None:
    cpu = torch.device("cpu")
    with mock.patch.object(compat, "multiplies_by_rows", return_value=False):
        check_multiplies_fp8(cpu, "tensorwise")
        for scaling in ("rowwise", "auto"):
            with pytest.raises(ValueError, match=r"no products with scales of rows on CPUs\. Use 'tensorwise'"):
                check_multiplies_fp8(cpu, scaling)


@needs_rows
@pytest.mark.usefixtures("fake_world")
def test_code_is_not_shared_between_blocks_that_the_filter_tells_apart() -> None:
    model = shard(build())
    options = {"inner": "aot_eager", "fp8_matmul": "rowwise", "fp8_filter": lambda name, shape: "layers.0" in name}
    for layer in model.module.layers:
        layer.compile(backend="mfsdp", options=options)
    with pytest.raises(RuntimeError, match=r"'layers\.1', of which options.*chooses other weights"):
        model(*tokens(0))
