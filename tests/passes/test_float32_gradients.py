"""Matmuls that write gradients in float32. Tests that need CUDA are in ``tests/gpu``.

Graphs here are of fake CUDA tensors, and run in an interpreter that knows the meaning of an out dtype.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import parity
import pytest
import torch
import zoo
from test_passes import RANKS, exchange_of, marked, scheduled, set_phase_of
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model
from mfsdp_compile.backend.checks import check_float32_gradients
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig
from mfsdp_compile.passes import pipeline, roles
from mfsdp_compile.passes.context import BucketInfo, Context, Report
from mfsdp_compile.passes.guests import float32_gradients
from mfsdp_compile.passes.verifier import verify
from mfsdp_compile.runtime.geometry.layout import BucketLayout, Slot
from mfsdp_compile.runtime.schedule.phase import Phase
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
PACK = torch.ops.mfsdp.pack_gradients.default
IN, OUT, BATCH = 16, 8, 32


# -- graphs made by hand ----------------------------------------------------------------------------------------------


def context(*shapes: tuple[int, ...], comm_dtype: torch.dtype = F32) -> Context:
    """Return a context with one bucket of parameters of these shapes, 128 elements apart."""
    slots = tuple(Slot(f"w{i}", shape, offset=128 * i) for i, shape in enumerate(shapes))
    layout = BucketLayout(2, 2, 64 * len(shapes), slots)
    exchange = exchange_of(layout, BF16, comm_dtype)
    info = BucketInfo("layers.0", "layers.0", layout, exchange, layout.numel * 2, True)
    return Context((info,), SchedulePolicy(), whole_model=False, features=(float32_gradients.Float32Gradients(),))


class Builder:
    """A graph whose nodes have the values that they would have on ``device``."""

    def __init__(self, device: str = "cuda", dtype: torch.dtype = BF16) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode()
        self.device, self.dtype = device, dtype

    def input(self, *shape: int, dtype: torch.dtype | None = None) -> fx.Node:
        node = self.graph.placeholder(f"input_{len(self.graph.nodes)}")
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        given = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self.mode:
            node.meta["val"] = target(*given[0], **given[1])
        return node

    def matmul(self) -> fx.Node:
        """Add a matmul that computes a gradient of shape ``[OUT, IN]``."""
        return self.call(aten.mm.default, self.input(OUT, BATCH), self.input(BATCH, IN))

    def finish(self, *gradients: fx.Node, dtype: torch.dtype = F32, outputs: tuple[fx.Node, ...] = ()) -> fx.Graph:
        offsets = [128 * i for i in range(len(gradients))]
        pack = marked(self.call(PACK, list(gradients), offsets, 128 * len(gradients), dtype), 0)
        start = marked(self.graph.call_function(c10d.reduce_scatter_tensor.default, (pack, "avg", 2, RANKS.name)), 0)
        wait = marked(self.graph.call_function(c10d.wait_tensor.default, (start,)), 0)
        set_phase_of(self.graph, (wait, *outputs), Phase.BACKWARD)
        return self.graph


def rewrite(graph: fx.Graph, ctx: Context) -> Report:
    report = float32_gradients.apply(graph, ctx, Phase.BACKWARD)
    graph.lint()
    for node in graph.nodes:  # the recorded values of nodes are what they would compute
        value = node.meta.get("val")
        if isinstance(value, Tensor) and node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            now = node.target(*args, **kwargs)
            assert (now.dtype, now.shape, now.stride()) == (value.dtype, value.shape, value.stride()), node
    return report


def targets(graph: fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def packed(graph: fx.Graph) -> list[fx.Node]:
    (pack,) = graph.find_nodes(op="call_function", target=PACK)
    return pack.args[0]


BETWEEN: dict[str, Callable[[Builder, fx.Node], fx.Node]] = {
    "nothing": lambda b, n: n,
    "permute": lambda b, n: b.call(aten.permute.default, n, [1, 0]),
    "two permutes": lambda b, n: b.call(aten.permute.default, b.call(aten.permute.default, n, [1, 0]), [1, 0]),
    "t": lambda b, n: b.call(aten.t.default, n),
    "view": lambda b, n: b.call(aten.view.default, n, [OUT, 4, IN // 4]),
    "unsafe view": lambda b, n: b.call(aten._unsafe_view.default, n, [OUT * IN]),
    "clone": lambda b, n: b.call(aten.clone.default, b.call(aten.t.default, n), memory_format=torch.contiguous_format),
    "slice": lambda b, n: b.call(aten.slice.Tensor, n, 0, 0, OUT - 1),  # Inductor pads the matmul
}


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("between", BETWEEN)
def test_matmuls_write_gradients_in_float32(between: str, dtype: torch.dtype) -> None:
    build = Builder(dtype=dtype)
    matmul = build.matmul()
    graph = build.finish(BETWEEN[between](build, matmul))
    before = targets(graph)
    report = rewrite(graph, context((OUT, IN)))
    assert (matmul.target, matmul.args[2]) == (aten.mm.dtype, F32)
    assert [t for t in targets(graph) if t is not aten.mm.dtype] == [t for t in before if t is not aten.mm.default]
    assert packed(graph)[0].meta["val"].dtype == F32
    assert report.lines == [f"layers.0: w0 in float32 from {matmul}"]


@pytest.mark.parametrize("keywords", [{}, {"layout": torch.strided, "device": torch.device("cuda", 0)}])
def test_casts_to_float32_go(keywords: dict[str, Any]) -> None:
    """Casts to float32 disappear, as those of autocast, which computes in bfloat16 with float32 parameters."""
    build = Builder()
    matmul = build.matmul()
    turned = build.call(aten.t.default, matmul)
    cast = build.call(aten._to_copy.default, turned, dtype=F32, **keywords)
    graph = build.finish(build.call(aten.t.default, cast))
    report = rewrite(graph, context((OUT, IN)))
    assert aten._to_copy.default not in targets(graph)
    assert packed(graph)[0].args[0] is turned
    assert len(report.lines) == 1

    build = Builder()
    cast = build.call(torch.ops.prims.convert_element_type.default, build.matmul(), F32)
    graph = build.finish(cast, cast)  # one gradient for two parameters
    report = rewrite(graph, context((OUT, IN), (OUT, IN)))
    assert [n.target for n in packed(graph)] == [aten.mm.dtype] * 2
    assert [line.split(" in ")[0] for line in report.lines] == ["layers.0: w0", "layers.0: w1"]


def test_parts_of_a_gradient() -> None:
    """A gradient of a matrix that forward made of two parameters is written once in float32 and then split."""
    build = Builder()
    matmul = build.matmul()
    parts = [build.call(aten.slice.Tensor, matmul, 0, i * OUT // 2, (i + 1) * OUT // 2) for i in range(2)]
    graph = build.finish(*parts)
    assert len(rewrite(graph, context((OUT // 2, IN), (OUT // 2, IN))).lines) == 2
    assert targets(graph).count(aten.mm.dtype) == 1
    assert {n.meta["val"].dtype for n in packed(graph)} == {F32}


def test_other_gradients_are_packed_as_before() -> None:
    build = Builder()
    matmul = build.matmul()
    norm = build.call(aten.sum.dim_IntList, build.input(BATCH, IN), [0])
    wide = build.input(4, dtype=F32)
    graph = build.finish(matmul, norm, wide)
    report = rewrite(graph, context((OUT, IN), (IN,), (4,)))
    assert [n.meta["val"].dtype for n in packed(graph)] == [F32, BF16, F32]
    assert packed(graph)[1:] == [norm, wide]
    assert report.lines[1:] == ["as they were: 1 from aten.sum.dim_IntList, 1 from placeholder"]


def used_twice(build: Builder) -> fx.Graph:
    matmul = build.matmul()
    other = build.call(aten.tanh.default, matmul)
    return build.finish(matmul, outputs=(other,))


def view_used_twice(build: Builder) -> fx.Graph:
    turned = build.call(aten.t.default, build.matmul())
    return build.finish(turned, outputs=(build.call(aten.tanh.default, turned),))


def returned(build: Builder) -> fx.Graph:
    matmul = build.matmul()
    return build.finish(matmul, outputs=(matmul,))


def packed_in_bfloat16(build: Builder) -> fx.Graph:
    return build.finish(build.matmul(), dtype=BF16)


def added(build: Builder) -> fx.Graph:
    """The gradient of a weight that is used twice."""
    return build.finish(build.call(aten.add.Tensor, build.matmul(), build.matmul()))


def batched(build: Builder) -> fx.Graph:
    return build.finish(build.call(aten.bmm.default, build.input(2, 4, BATCH), build.input(2, BATCH, IN)))


def of_four_dimensions(build: Builder) -> fx.Graph:
    """A batched matmul and views of it."""
    product = build.call(aten.bmm.default, build.input(4, 2, BATCH), build.input(4, BATCH, IN))
    return build.finish(build.call(aten.view.default, product, [2, 2, 2, IN]))


def bits(build: Builder) -> fx.Graph:
    """A matmul whose bits are read as another dtype."""
    return build.finish(build.call(aten.view.dtype, build.matmul(), F16))


def cast_elsewhere(build: Builder) -> fx.Graph:
    return build.finish(build.call(aten._to_copy.default, build.matmul(), dtype=torch.float64))


@pytest.mark.parametrize(
    "make",
    [
        *(used_twice, view_used_twice, returned, packed_in_bfloat16, added, batched, of_four_dimensions, bits),
        cast_elsewhere,
    ],
)
def test_what_stays(make: Callable[[Builder], fx.Graph]) -> None:
    graph = make(Builder())
    before = str(graph)
    report = rewrite(graph, context((OUT, IN)))
    assert str(graph) == before
    assert report.lines[0] == "no gradient is computed by a matmul that this applies to"
    assert report.lines[1].startswith("as they were: 1 from aten.")


@pytest.mark.parametrize(("device", "dtype"), [("cpu", BF16), ("xpu", BF16), ("cuda", F32), ("cuda", torch.float64)])
def test_other_devices_and_dtypes_stay(device: str, dtype: torch.dtype) -> None:
    build = Builder(device, dtype)
    graph = build.finish(build.matmul())
    before = str(graph)
    report = rewrite(graph, context((OUT, IN)))
    assert str(graph) == before
    assert report.lines[1] == f"as they were: 1 from aten.mm.default in {dtype} on {device}"


def test_graphs_without_values_stay() -> None:
    build = Builder()
    graph = build.finish(build.matmul())
    for node in graph.nodes:
        node.meta.pop("val", None)
    before = str(graph)
    float32_gradients.apply(graph, context((OUT, IN)), Phase.BACKWARD)
    assert str(graph) == before


# -- in the pipeline --------------------------------------------------------------------------------------------------


def test_it_runs_first_and_only_if_asked_for() -> None:
    for asked in (True, False):
        build = Builder()
        graph, ctx = build.finish(build.matmul()), context((OUT, IN))
        if not asked:
            ctx = replace(ctx, features=())
        record = pipeline.CompileRecord(ctx)
        pipeline.finish_graph(graph, Phase.BACKWARD, record)
        names = [report.name for report in record.reports[Phase.BACKWARD]]
        assert names == ["float32_gradients"] * asked + ["reduce", "schedule", "verify"]
        assert (aten.mm.dtype in targets(graph)) == asked


def test_caches_know_the_option() -> None:
    ctx = context((OUT, IN))
    assert ctx.signature != replace(ctx, features=()).signature


def test_buckets_are_packed_in_the_dtype_of_their_reduction() -> None:
    build = Builder()
    ctx, graph = context((OUT, IN)), build.finish(build.matmul(), dtype=BF16)
    with pytest.raises(verify.ScheduleError, match=r"V10 .*bfloat16.*float32"):
        verify.verify(scheduled(graph, ctx, Phase.BACKWARD), ctx, Phase.BACKWARD)


# -- rejected graphs --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_refused_on_cpu(inner: str) -> None:
    policy = MixedPrecisionPolicy(grad_comm_dtype=F32)
    model = fully_shard_model(zoo.Plain().to(BF16), fsdp_unit_modules="auto", mixed_precision_policy=policy)
    compiled = torch.compile(model, backend="mfsdp", options={"inner": inner, "float32_gradients": True})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"float32_gradients.*'cpu'.*need CUDA") as caught:
        compiled(torch.randn(2, 8, dtype=BF16))
    assert isinstance(caught.value.inner_exception, ValueError)


def bucket(device: str = "cuda", compute: torch.dtype = BF16, comm: torch.dtype = F32, trains: bool = True) -> Any:
    plan = SimpleNamespace(
        name="layers.0", unit="layers.0", requires_grad=trains, compute_dtype=compute, comm_dtype=comm
    )
    return SimpleNamespace(plan=plan, device=torch.device(device))


def test_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", None)
    check_float32_gradients([bucket(), bucket(compute=F32), bucket(comm=BF16, trains=False)])
    for wrong in (BF16, F16, torch.float64):
        with pytest.raises(
            ValueError, match=rf"'layers.0'.*reduces gradients in {wrong}.*grad_comm_dtype=torch.float32"
        ):
            check_float32_gradients([bucket(), bucket(comm=wrong)])
    with pytest.raises(ValueError, match="device 'cpu'"):
        check_float32_gradients([bucket(device="cpu")])
    before = torch.backends.cuda.matmul.allow_fp16_accumulation
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        check_float32_gradients([bucket()])
        with pytest.raises(ValueError, match="allow_fp16_accumulation"):
            check_float32_gradients([bucket(compute=F16)])
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = before
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ValueError, match="a ROCm device"):
        check_float32_gradients([bucket()])


# -- traced graphs ----------------------------------------------------------------------------------------------------


class LlamaLoss(nn.Module):
    """bfloat16 throughout: an embedding, norms, matrices."""

    block = Block

    def __init__(self) -> None:
        super().__init__()
        self.llama = Llama(LlamaConfig(vocabulary=32, width=16, layers=2, heads=2, kv_heads=1, hidden=24)).to(BF16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.llama(tokens[:, :-1], tokens[:, 1:])


class Autocast(nn.Module):
    """float32 parameters with bfloat16 matmuls: gradients are cast before they are packed."""

    block = nn.Sequential

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=BF16):
            return self.blocks(x).float().pow(2).mean()


def on_tokens(call: Any) -> Tensor:
    return call(torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0)))


def on_features(call: Any) -> Tensor:
    return call(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)))


def on_halves(call: Any) -> Tensor:
    return call(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(BF16))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor], int]] = {
    "Llama": (LlamaLoss, on_tokens, 2 * 7 + 1),
    "autocast": (Autocast, on_features, 3),
    "with biases": (lambda: zoo.Plain().to(BF16), on_halves, 5),
}


def traced_backward(name: str) -> tuple[fx.Graph, Context]:
    """Return the backward graph of a model, as passes get it."""
    caught: list[tuple[fx.Graph, Context]] = []
    finish = pipeline.finish_graph

    def spy(graph: fx.Graph, phase: Phase, record: pipeline.CompileRecord) -> None:
        if phase is Phase.BACKWARD:
            caught.append((copy.deepcopy(graph), record.context))
        finish(graph, phase, record)

    factory, run, _ = MODELS[name]
    pipeline.finish_graph = spy
    try:
        precision = MixedPrecisionPolicy(grad_comm_dtype=F32)
        _, call = parity.shard(parity.build(factory), parity.AOT_EAGER, precision=precision, regions=False)
        run(call).backward()
    finally:
        pipeline.finish_graph = finish
    ((graph, ctx),) = caught
    roles.assign(graph)
    return graph, replace(ctx, features=(float32_gradients.Float32Gradients(),))


def move(graph: fx.Graph, device: str) -> None:
    """Change the graph as if it had been traced on a device.

    CPU builds of torch cannot run autograd for other devices.
    """
    with FakeTensorMode():
        for node in graph.nodes:
            node.kwargs = {k: torch.device(device) if k == "device" else v for k, v in node.kwargs.items()}
            value = node.meta.get("val")
            if node.op == "placeholder" and isinstance(value, Tensor):
                node.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            elif node.op == "call_function":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
                node.meta["val"] = node.target(*args, **kwargs)


class OnCPU(fx.Interpreter):
    """Runs a graph on the CPU, up to packing.

    Matmuls with an out dtype multiply in that dtype. Gathers repeat this rank's shard.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        kwargs = {k: "cpu" if k == "device" else v for k, v in kwargs.items()}
        if target is aten.mm.dtype:
            return args[0].to(args[2]) @ args[1].to(args[2])
        if target is c10d.all_gather_into_tensor.default:
            return args[0].repeat(args[1], *[1] * (args[0].dim() - 1))
        if target is c10d.wait_tensor.default:
            return args[0]
        return super().call_function(target, args, kwargs)


class Exact(OnCPU):
    """Runs matmuls of the same inputs in float64, unrounded."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.mm.dtype:
            return args[0].double() @ args[1].double()
        if target is PACK:
            args = (*args[:3], torch.float64)
        return super().call_function(target, args, kwargs)


def gradients(interpreter: type[OnCPU], graph: fx.Graph) -> list[Tensor]:
    """Return the buckets of gradients that a graph packs for some inputs."""
    graph = copy.deepcopy(graph)
    output = graph.output_node()
    output.args = (tuple(graph.find_nodes(op="call_function", target=PACK)),)
    graph.eliminate_dead_code()
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if value.dtype.is_floating_point:
            inputs.append(torch.randn(value.shape, generator=generator).to(value.dtype))
        else:
            inputs.append(torch.zeros(value.shape, dtype=value.dtype))
    return list(interpreter(fx.GraphModule(nn.Module(), graph)).run(*inputs))


@pytest.mark.long_if("Llama")
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("name", MODELS)
def test_traced_backward(name: str) -> None:
    graph, ctx = traced_backward(name)
    move(graph, "cuda")
    before = copy.deepcopy(graph)
    report = float32_gradients.apply(graph, ctx, Phase.BACKWARD)
    graph.lint()
    matrices = [s.name for info in ctx.buckets for s in info.layout.slots if len(s.shape) == 2]
    written = [line.split()[1] for line in report.lines[:-1]]
    expected = [name for name in matrices if "embedding" not in name]
    assert sorted(written) == sorted(expected), report
    assert targets(graph).count(aten.mm.dtype) == len(expected) >= MODELS[name][2]
    pipeline.finish_graph(graph, Phase.BACKWARD, pipeline.CompileRecord(ctx))  # later passes accept it

    default, wide, exact = (gradients(kind, g) for kind, g in ((OnCPU, before), (OnCPU, graph), (Exact, graph)))
    for packs in zip(default, wide, exact, strict=True):
        rounded, unrounded, reference = (pack.double() for pack in packs)
        scale = reference.abs().max()
        assert (rounded - reference).abs().max() <= 2**-8 * scale  # one rounding to bfloat16
        assert (unrounded - reference).abs().max() <= 1e-5 * scale
    assert sum((a.double() - c).abs().sum() for a, c in zip(default, exact, strict=True)) > 100 * sum(
        (b.double() - c).abs().sum() for b, c in zip(wide, exact, strict=True)
    )


# -- Inductor ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("comm_dtype", [BF16, F32])
def test_inductor_writes_matmuls_into_the_bucket(comm_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor lowers the matmuls to write into the bucket.

    Lowering for CUDA takes no GPU. Inductor's scheduler rejects matmuls in a list of foreach kernels.
    """
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    from mfsdp_compile.backend.lowerings import register_lowerings

    build = Builder()
    left, right = build.input(OUT, BATCH), build.input(BATCH, IN)
    matmuls = [build.call(aten.mm.default, left, right) for _ in range(2)]
    vector = build.input(IN)
    pack = marked(
        build.call(PACK, [*matmuls, build.call(aten.tanh.default, vector)], [0, 128, 256], 384, comm_dtype), 0
    )
    set_phase_of(build.graph, (pack,), Phase.BACKWARD)
    rewrite(build.graph, context((OUT, IN), (OUT, IN), (IN,), comm_dtype=comm_dtype))

    monkeypatch.setattr("torch._inductor.utils.is_big_gpu", lambda *_: False)  # asks the GPU
    register_lowerings()
    values = [node.meta["val"] for node in build.graph.find_nodes(op="placeholder")]
    with V.set_fake_mode(build.mode):
        lowering = GraphLowering(fx.GraphModule(nn.Module(), build.graph), example_inputs=values)
        with V.set_graph_handler(lowering):
            lowering.run(*values)
    kernel = "extern_kernels.mm_dtype" if comm_dtype is F32 else "extern_kernels.mm"
    operations = [op for op in lowering.operations if getattr(op, "python_kernel_name", None) == kernel]
    layouts = [type(op.layout).__name__ for op in operations]
    assert layouts == ["NonOwningLayout"] * 2
    assert not lowering.lists
