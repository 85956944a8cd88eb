"""torchao's float8 training: gathered in float8 if torchao was asked to, and equal to torchao under FSDP2."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import mutants
import pytest
import torch
import torch.distributed as dist
import torchao_models
import zoo
from documents import ROOT
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks, shared_folder
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao_models import convert, llama, loss_of, torchao, train

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.diagnostics.measure import collectives
from mfsdp_compile.models.llama import Block, Llama
from mfsdp_compile.passes import pipeline
from mfsdp_compile.passes.context import Context
from mfsdp_compile.passes.verifier.verify import breaches
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.formats import quantize
from mfsdp_compile.runtime.guests.quantized.operators import DEQUANTIZE
from mfsdp_compile.runtime.schedule.phase import Phase

pytestmark = pytest.mark.skipif(not torchao_models.IS_THERE, reason="needs torchao")

BF16, F8 = torch.bfloat16, quantize.DTYPE
ROWWISE = MixedPrecisionPolicy(param_comm_dtype=F8)
NVFP4 = MixedPrecisionPolicy(param_comm_dtype=torch.float4_e2m1fn_x2, param_comm_scaling="nvfp4")


def shard(model: nn.Module, mode: str = EAGER, **arguments: Any) -> tuple[Any, Callable[..., Tensor], Any]:
    options, fullgraph = arguments.pop("options", {}), arguments.pop("fullgraph", True)
    sharded = fully_shard_model(model, fsdp_unit_modules=arguments.pop("units", [Block]), **arguments)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(sharded.parameters(), lr=1e-3))
    if mode == EAGER:
        return sharded, sharded, optimizer
    chosen = {"inner": mode, "verify": "each", **options}
    return sharded, torch.compile(sharded, backend="mfsdp", fullgraph=fullgraph, options=chosen), optimizer


def by_torchao(model: Any) -> list[Any]:
    return [bucket for bucket in model.sharded.buckets if bucket.plan.form == compat.torchao.FORM]


def assert_equal(mine: list[Tensor], its: list[Tensor]) -> None:
    assert [x.item() for x in mine] == [x.item() for x in its]


# -- the oracle -------------------------------------------------------------------------------------------------------


@pytest.mark.long
@on_ranks(2, 4)
def test_losses_are_those_of_fsdp2() -> None:
    """With buckets of one parameter, ranks hold the same rows as under FSDP2, and gloo sums in the same order."""
    model = torchao_models.fsdp2(llama(torch.float32), init_device_mesh("cpu", (dist.get_world_size(),)))
    expected = train(model, model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for mode in (EAGER, AOT_EAGER):
        model, call, optimizer = shard(llama(), mode, disable_bucketing=True)
        assert_equal(train(model, call, optimizer), expected)
        names = {slot.name for bucket in by_torchao(model) for slot in bucket.plan.layout.slots}
        assert names == {n for n, p in model.module.named_parameters() if n.startswith("layers.") and p.dim() == 2}


@pytest.mark.long
@on_ranks(2, 4)
def test_uneven_rows() -> None:
    """Compared with FSDP2 on one rank: on several, FSDP2 gathers parts of different sizes, and fails."""
    ranks = dist.get_world_size()
    alone = DeviceMesh("cpu", torch.arange(ranks).view(ranks, 1), mesh_dim_names=("ranks", "one"))["one"]
    model = torchao_models.fsdp2(llama(torch.float32, hidden=45), alone)
    expected = train(model, model, torch.optim.AdamW(model.parameters(), lr=1e-3), rank=0)
    for mode in (EAGER, AOT_EAGER):
        model, call, optimizer = shard(llama(hidden=45), mode)
        assert_equal(train(model, call, optimizer, rank=0), expected)
    assert any(slot.shape[0] % ranks for bucket in by_torchao(model) for slot in bucket.plan.layout.slots)


@pytest.mark.long
@on_ranks(2)
def test_the_program_of_the_page() -> None:
    page = (ROOT / "docs" / "fp8.md").read_text()
    (program,) = [block for block in page.split("```python\n") if "import Float8LinearConfig" in block]
    program = program.partition("```")[0].replace('backend="mfsdp"', 'backend="mfsdp", options={"inner": "aot_eager"}')
    torchao()
    variables: dict[str, Any] = {}
    with mock.patch.object(dist, "init_process_group"):
        exec(compile(program, "docs/fp8.md", "exec"), variables)
    assert len(by_torchao(variables["model"])) == 4
    assert variables["loss"].isfinite()


@pytest.mark.long
@on_ranks(4)
def test_tensor_parallel() -> None:
    """Each part of a divided weight has a scale of its own, as under FSDP2."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    rank = mesh["dp"].get_local_rank()

    def divided(dtype: torch.dtype) -> nn.Module:
        model = llama(dtype)
        for layer in model.layers:
            plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(layer.feed_forward, mesh["tp"], plan)
        return model

    model = torchao_models.fsdp2(divided(torch.float32), mesh["dp"])
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    expected = train(model, model, adam, rank=rank, precomputes=False)
    for mode in (EAGER, AOT_EAGER):
        arguments = {"device_mesh": mesh, "dp_shard_dim": "dp", "disable_bucketing": True}
        model, call, optimizer = shard(divided(BF16), mode, **arguments)
        assert_equal(train(model, call, optimizer, rank=rank), expected)
    slots = [slot for bucket in by_torchao(model) for slot in bucket.plan.layout.slots]
    assert [slot.shape for slot in slots if slot.name == "layers.0.feed_forward.up.weight"] == [(24, 32)]


def test_scales_are_those_of_torchao() -> None:
    torchao()
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    drawn = torch.randn(30, 6, 8)  # of a third of which other ways to round give other scales
    for values in (*drawn, *drawn.to(BF16), torch.zeros(4, 4), torch.full((2, 2), 1e-30)):
        scales = compat.torchao.scales_of(quantize.amax(values, "tensorwise"))
        its = hp_tensor_to_float8_dynamic(values, F8, LinearMMConfig())
        assert torch.equal(scales.reshape(()), its._scale)
        assert torch.equal(quantize.quantize_by_factors(values, scales), its._data.view(torch.uint8))


# -- eager, compiled --------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "sharding", "options"),
    [
        pytest.param("HSDP optim_grads_params", {}, {"reshard_after_forward": 2}, id="HSDP, portions"),
        pytest.param("optim_grads_params", {"fsdp_double_buffer": True}, {"regions": True}, id="buffers, regions"),
        pytest.param("optim_grads_params", {}, {"memory_budget": "1GiB"}, id="solved"),
        pytest.param("optim_grads_params", {"bucket_bytes": 2048}, {}, id="small buckets"),
    ],
)
@on_ranks(4)
def test_compiled_equals_eager(strategy: str, sharding: dict[str, Any], options: dict[str, Any]) -> None:
    arguments = {**mesh_arguments(strategy), **sharding}
    found = []
    for mode in (EAGER, AOT_EAGER):
        model, call, optimizer = shard(llama(layers=3), mode, options=options, **arguments)
        losses = train(model, call, optimizer, steps=2, microbatches=2)
        for record in model.sharded.compiled_graphs if "regions" in options else ():
            assert "used as they are gathered in float8" in record.inlined["layers.1"], record.inlined
        found.append([*losses, *(param.to_local().detach() for param in model.parameters())])
        assert len(by_torchao(model)) >= 3
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


@pytest.mark.long
@on_ranks(2)
def test_kept_gathered_and_served() -> None:
    expected = train(*shard(llama()))
    model, call, optimizer = shard(llama())
    with model.gathered():
        assert_equal(train(model, call, optimizer), expected)
        assert all(bucket.hold_resident().dtype == torch.uint8 for bucket in by_torchao(model))
    model, call, optimizer = shard(llama(), AOT_EAGER)
    with model.gathered():
        assert_equal(train(model, call, optimizer), expected)
    model, call, optimizer = shard(llama())
    for layer in model.module.layers:
        layer.compile(backend="mfsdp", options={"inner": AOT_EAGER, "verify": "each"})
    assert_equal(train(model, call, optimizer), expected)
    copied = copy.deepcopy(shard(llama())[0])
    assert_equal(train(copied, copied, torch.optim.AdamW(copied.parameters(), lr=1e-3)), expected)


@pytest.mark.long
@on_ranks(2)
def test_inductor() -> None:
    _, eager, _ = shard(llama())
    _, call, _ = shard(llama(), INDUCTOR)
    for step in range(2):
        mine, its = loss_of(call, step), loss_of(eager, step)
        mine.backward()
        its.backward()
        assert torch.allclose(mine, its, rtol=1e-3)  # products are rounded to bfloat16 elsewhere


@pytest.mark.long
@pytest.mark.parametrize("factory", [zoo.FrozenUnit, zoo.FrozenParameters, zoo.Checkpointed])
@on_ranks(2)
def test_models(factory: type[nn.Module]) -> None:
    found = []
    for mode in (EAGER, AOT_EAGER):
        torch.manual_seed(0)
        model, call, optimizer = shard(convert(factory().bfloat16()), mode, units=[factory.block])
        assert by_torchao(model)
        losses = []
        for step in range(3):
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step)).to(BF16)
            loss = call(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found.append(losses)
    assert_equal(*found)
    assert len({loss.item() for loss in found[0]}) == 3


class WithExperts(nn.Module):
    """A linear layer of all ranks, and an expert of this expert-parallel rank, which gets all of the rank's tokens."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(32, 48)
        torch.manual_seed(rank)
        self.experts = nn.ModuleList([nn.Linear(48, 32, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts[0](self.up(x).relu())


@pytest.mark.long
@on_ranks(4)
def test_expert_parallel() -> None:
    """Scales are those of this rank's experts, over the ranks that share them."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep")), []
    for mode in (EAGER, AOT_EAGER):
        model = convert(nn.Sequential(*(WithExperts(mesh["ep"].get_local_rank()) for _ in range(2))).to(BF16))
        arguments = {"units": [WithExperts], "expt_device_mesh": mesh, "dp_shard_dim": "fsdp"}
        model, call, optimizer = shard(model, mode, **arguments)
        for step in range(3):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(BF16)
            loss = call(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        with torch.no_grad():
            call(x)
        assert {bucket.plan.is_expert for bucket in by_torchao(model)} == {True, False}
        for bucket in by_torchao(model):
            for index, whole in enumerate(bucket.gather_shards()):
                scale = bucket.maker.scale_of(bucket, torch.empty(0), index)  # not in the bucket with this scaling
                assert torch.equal(scale, compat.torchao.scales_of(quantize.amax(whole, "tensorwise")))
    assert_equal(found[3:], found[:3])


@pytest.mark.long
@on_ranks(2)
def test_without_gradients() -> None:
    model, call, _ = shard(llama(), AOT_EAGER)
    expected = loss_of(model, 0).item()
    for mode in (torch.no_grad, torch.inference_mode):
        for forward in (model, call):
            with mode():
                assert loss_of(forward, 0).item() == expected


@on_ranks(2)
def test_meta_device() -> None:
    values = []
    for converted in (True, False):
        with torch.device("meta"):
            model = Llama(torchao_models.config()).to(BF16)
        if converted:
            model = convert(model, where="layers")
        torch.manual_seed(0)
        sharded, call, _ = shard(model, init_model_with_meta_device=True)
        assert bool(by_torchao(sharded)) == converted
        assert loss_of(call, 0).isfinite()
        values.append([param.full_tensor() for param in sharded.parameters()])
    for mine, its in zip(*values, strict=True):
        assert torch.equal(mine, its)


# -- memory, collectives ----------------------------------------------------------------------------------------------


@pytest.mark.long
@on_ranks(2)
def test_no_weight_is_saved() -> None:
    """Neither bytes nor what a layer makes of a weight is saved by graphs, and in eager mode none outlives its unit."""
    saved: list[tuple[int, ...]] = []

    def look(graph: fx.Graph, context: Context, phase: Phase) -> None:
        if phase is Phase.FORWARD:
            values = [node.meta["val"] for node in graph.output_node().args[0] if isinstance(node, fx.Node)]
            saved.extend(tuple(value.shape) for value in values if isinstance(value, Tensor))

    matrices = [
        tuple(param.shape) for param in Llama(torchao_models.config()).layers[0].parameters() if param.dim() == 2
    ]
    plain = {"enable_fsdp_float8_all_gather": False}
    for model, policy in (
        (llama(), MixedPrecisionPolicy()),
        (llama(**plain), MixedPrecisionPolicy(param_comm_dtype=F8, param_comm_scaling="tensorwise")),
        (llama(**plain), MixedPrecisionPolicy()),
        (llama(recipe="rowwise"), ROWWISE),
        (llama(recipe="rowwise_with_gw_hp"), ROWWISE),
    ):
        saved.clear()
        call = shard(model, AOT_EAGER, options={"passes": [look]}, mixed_precision_policy=policy)[1]
        loss_of(call, 0).backward()
        assert saved
        assert not {shape for shape in saved if shape in matrices or shape[::-1] in matrices}


@on_ranks(2)
def test_no_weight_outlives_its_unit() -> None:
    model, call, _ = shard(llama())
    eager, gathered = model.sharded.eager, []
    read = eager.parameters.read

    def record(bucket: Any, index: int) -> Any:
        param = read(bucket, index)
        if bucket in by_torchao(model):
            gathered.append((bucket, weakref.ref(param._data.untyped_storage())))
        return param

    eager.parameters.read = record
    loss = loss_of(call, 0)
    last = model.module.layers[-1].attention.out.weight.mfsdp_handle.bucket
    assert len({bucket for bucket, _ in gathered}) == 2
    assert all(bucket is last for bucket, storage in gathered if storage() is not None)
    loss.backward()


@pytest.mark.long_unless("*-eager-4")
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_one_collective_of_scales_per_step(mode: str, microbatches: int) -> None:
    def counted(model: Any, call: Callable[..., Tensor], optimizer: Any) -> Any:
        train(model, call, optimizer, steps=1, microbatches=microbatches)
        return collectives(lambda: train(model, call, optimizer, steps=1, microbatches=microbatches))

    plain = counted(*shard(llama(enable_fsdp_float8_all_gather=False), mode))
    assert counted(*shard(llama(), mode))["all_reduce"] == plain["all_reduce"] + 1


@on_ranks(2)
def test_a_weight_is_for_one_forward() -> None:
    model, call, _ = shard(llama())
    kept = []
    model.module.layers[0].attention.q.register_forward_hook(lambda module, *_: kept.append(module.weight))
    loss_of(call, 0)
    assert type(kept[0]).__name__ == "Float8TrainingTensor"
    assert isinstance(kept[0], nn.Parameter)
    kept[0].t()
    loss_of(call, 1)
    with pytest.raises(RuntimeError, match=r"'layers.0.attention.q.weight' was gathered for an earlier forward"):
        kept[0].t()


# -- rowwise ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_gw_hp"])
@on_ranks(2)
def test_rowwise_recipes(recipe: str) -> None:
    """They get dequantized weights, gathered in float8 with scales like their own."""
    found = []
    for mode in (EAGER, AOT_EAGER):
        model, call, optimizer = shard(llama(recipe=recipe), mode, mixed_precision_policy=ROWWISE)
        quantized = [bucket for bucket in model.sharded.buckets if bucket.made is not None]
        assert [bucket.plan.form for bucket in quantized] == [quantize.ROUNDED] * 2
        found.append(train(model, call, optimizer))
    assert_equal(*found)
    model, call, _ = shard(llama(recipe=recipe), mixed_precision_policy=NVFP4)
    (form,) = {bucket.plan.form for bucket in model.sharded.buckets if bucket.made is not None}
    assert form == quantize.DEQUANTIZED  # with other scales than powers of two
    assert loss_of(call, 0).isfinite()


def test_mxfp8_is_that_of_torchao() -> None:
    """Bytes and scales of ``param_comm_scaling="mxfp8"``, to the bit; torchao calls its rounding of scales RCEIL."""
    torchao()
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    values = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 64).unsqueeze(-1)
    values[3], values[4, :32] = 0, 448 * 2.0
    scales, data = to_mx(values.bfloat16(), F8, quantize.MX_BLOCK, ScaleCalculationMode.RCEIL)
    plane = quantize.from_records(quantize.quantize_mx(values.bfloat16().flatten()))
    assert torch.equal(plane[: values.numel()], data.flatten().view(torch.uint8))
    assert torch.equal(plane[values.numel() :], scales.flatten().view(torch.uint8))


def test_nvfp4_is_that_of_torchao() -> None:
    """Bytes, scales and dequantized values of ``param_comm_scaling="nvfp4"``, to the bit.

    torchao multiplies by reciprocal scales, which may round to another side of a midpoint; with these values it does
    not. Its scales are no smaller than E4M3's normal numbers, so values are compared whose scales are normal.
    """
    torchao()
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    values = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 64).unsqueeze(-1)
    values = values.bfloat16()
    scales = quantize.matrix_scales_of(quantize.amax(values, "nvfp4"))
    theirs = NVFP4Tensor.to_nvfp4(values, per_tensor_scale=per_tensor_amax_to_scale(values.abs().max()))
    assert scales.item() == theirs.per_tensor_scale.item()
    data = quantize.quantize_nvfp4(values.flatten(), [(0, values.shape, scales)])
    records = data.view(64, 6, 9)
    normal = theirs.scale.float() > 2.0**-6
    assert normal.float().mean() > 0.8
    assert torch.equal(records[..., 8][normal], theirs.scale.view(torch.uint8)[normal])
    assert torch.equal(records[..., :8][normal], theirs.qdata.view(64, 6, 8)[normal])
    for dtype in (BF16, torch.float32):
        result = quantize.dequantize_bucket(data, scales.flatten(), [(0, values.shape)], dtype, "nvfp4")
        its = theirs.dequantize(dtype).view(64, 6, 16)
        assert torch.equal(result.view(64, 6, 16)[normal], its[normal])


@pytest.mark.parametrize("axis", [-1, 0, None])
@pytest.mark.parametrize("rounds", [True, False])
def test_weights_are_quantized_again_without_an_error(rounds: bool, axis: int | None) -> None:
    """By rows as they were gathered, and if scales are powers of two also by columns and as a whole."""
    torchao()
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    granularity = torchao().ScalingGranularity
    values = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 64).unsqueeze(-1)
    if axis != -1:
        values = values.sign() * values.abs().clamp(
            min=values.abs().max() / 2**12
        )  # what one scale can hold of several rows
    of_rows = quantize.rounded_scales_of if rounds else quantize.scales_of
    scales = of_rows(quantize.amax(values, "rowwise"))
    data = quantize.quantize(values, scales)
    got = quantize.dequantize(data.flatten(), [(0, values.shape, scales)], BF16, "rowwise").view(values.shape)
    kind = granularity.TENSORWISE if axis is None else granularity.AXISWISE
    again = hp_tensor_to_float8_dynamic(
        got, F8, LinearMMConfig(), scaling_granularity=kind, axiswise_dim=axis, round_scales_to_power_of_2=rounds
    )
    its = again._data.float() / again._scale
    normal = (its.abs() * again._scale >= 2**-6) | (got == 0)  # where float8 has all bits of its mantissa
    if rounds:
        assert torch.equal(its[normal], got.float()[normal])
        assert normal.float().mean() > 0.5
    elif axis == -1:
        assert torch.equal(again._data.view(torch.uint8), data)
    else:
        assert not torch.equal(its[normal], got.float()[normal])


# -- checkpoints ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_checkpoints_hold_main_weights() -> None:
    folder = shared_folder()
    model, call, optimizer = shard(llama())
    train(model, call, optimizer, steps=2)
    state = model.state_dict()
    assert all(value.dtype == torch.float32 for value in state.values())
    Checkpoints(folder).save(1, model, optimizer)
    expected = [param.full_tensor().detach() for param in model.parameters()]
    losses = train(model, call, optimizer, steps=2)
    torch.manual_seed(1)
    for other, is_same in ((llama(), True), (Llama(torchao_models.config()).to(BF16), False)):
        loaded, call, optimizer = shard(other)
        Checkpoints(folder).load(loaded, optimizer)
        for mine, its in zip(loaded.parameters(), expected, strict=True):
            assert torch.equal(mine.full_tensor(), its)
        loaded.load_state_dict(state)
        if is_same:
            again, call, optimizer = shard(llama())
            Checkpoints(folder).load(again, optimizer)
            assert_equal(train(again, call, optimizer, steps=2), losses)


# -- the verifier -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_world")
def test_broken_graphs_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes, scales and saved values of another bucket or parameter, or of none."""
    graphs: list[tuple[fx.Graph, Context, Phase]] = []
    finish = pipeline.finish_graph

    def spy(graph: fx.Graph, phase: Phase, record: pipeline.CompileRecord) -> None:
        finish(graph, phase, record)
        graphs.append((copy.deepcopy(graph), record.context, phase))

    monkeypatch.setattr(pipeline, "finish_graph", spy)
    _, call, _ = shard(llama(), AOT_EAGER)
    loss_of(call, 0).backward()
    tried: Counter[str] = Counter()
    for graph, context, phase in graphs:
        assert not breaches(graph, context, phase)
        for name, rule, breaks in _MUTANTS:
            places = sum(1 for _ in breaks(mutants.Subject(copy.deepcopy(graph), context, phase)))
            for number in range(0, places, max(1, places // 3)):
                subject = mutants.Subject(copy.deepcopy(graph), context, phase)
                next(itertools.islice(breaks(subject), number, None))()
                found = {breach.rule for breach in breaches(subject.graph, context, phase)}
                assert rule in found, (name, phase, number)
                tried[name] += 1
    assert all(tried[name] >= 2 for name, *_ in _MUTANTS)


def _quantized_gathers(s: mutants.Subject) -> list[Any]:
    return [launch for launch in s.gathers if s.info(launch.bucket).exchange.stays_quantized]


def _of_another_shard(s: mutants.Subject) -> Iterator[Callable[[], Any]]:
    for launch, other in itertools.permutations(_quantized_gathers(s), 2):
        yield mutants.set_arg(launch.node, 0, other.input)


def _of_main_weights(s: mutants.Subject) -> Iterator[Callable[[], Any]]:
    for launch in _quantized_gathers(s):

        def change(launch: Any = launch) -> None:
            launch.node.update_arg(0, mutants.call(launch.input, torch.ops.aten.clone.default, launch.input))

        yield change


def _dequantized_too(s: mutants.Subject) -> Iterator[Callable[[], Any]]:
    scales_of = {bucket: node.all_input_nodes[0] for bucket, node, _ in s.scale_slices}
    for launch in _quantized_gathers(s):
        if launch.bucket not in scales_of:
            continue

        def change(launch: Any = launch, scales: fx.Node = scales_of[launch.bucket]) -> None:
            exchange, wait = s.info(launch.bucket).exchange, launch.waits[0]
            places = exchange.sizes, exchange.ndims, exchange.offsets
            made = mutants.call(wait, DEQUANTIZE, wait, scales, *places, exchange.dtype, "tensorwise")
            wait.replace_all_uses_with(made)
            made.replace_input_with(made, wait)

        yield change


def _scales_of_another_bucket(s: mutants.Subject) -> Iterator[Callable[[], Any]]:
    for (bucket, node, _), (other, its, _) in itertools.permutations(s.scale_slices, 2):
        if bucket != other:
            yield mutants.set_arg(node, 0, its.args[0])


def _scales_of_another_parameter(s: mutants.Subject) -> Iterator[Callable[[], Any]]:
    for (bucket, node, part), (other, its, its_part) in itertools.permutations(s.scale_slices, 2):
        if bucket == other and part != its_part:
            yield lambda node=node, its=its: setattr(node, "args", its.args)


def _scales_of_no_parameter(s: mutants.Subject) -> Iterator[Callable[[], Any]]:
    for _, node, (start, stop) in s.scale_slices:
        yield lambda node=node, start=start, stop=stop: setattr(node, "args", (node.args[0], 0, start, stop + 1))


def _saved(s: mutants.Subject) -> Iterator[Callable[[], Any]]:
    for whole in s.gathered if s.phase is Phase.FORWARD else ():
        for alias in whole.aliases if s.info(whole.bucket).exchange.stays_quantized else ():
            yield lambda alias=alias: s.save(alias)
            yield lambda alias=alias: s.save(mutants.call(alias, torch.ops.aten.clone.default, alias))


_MUTANTS = (
    ("bytes of another bucket", "V10", _of_another_shard),
    ("other bytes", "V12", _of_main_weights),
    ("dequantized", "V12", _dequantized_too),
    ("scales of another bucket", "V10", _scales_of_another_bucket),
    ("scales of another parameter", "V10", _scales_of_another_parameter),
    ("scales of no parameter", "V10", _scales_of_no_parameter),
    ("a weight saved", "V8", _saved),
)


# -- refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "HFSDP"])
def test_other_strategies_are_refused(strategy: str) -> None:
    with pytest.raises(
        NotImplementedError, match=r"enable_fsdp_float8_all_gather=True\) is for shards that are gathered"
    ):
        shard(llama(), **mesh_arguments(strategy))


@pytest.mark.usefixtures("fake_world")
def test_other_dtypes_are_refused() -> None:
    weights = torchao().CastConfig(target_dtype=torch.float8_e5m2)
    with pytest.raises(NotImplementedError, match=r"is to be gathered in torch\.float8_e5m2"):
        shard(llama(cast_config_weight=weights))


@pytest.mark.usefixtures("fake_world")
def test_weights_that_torchao_has_untied_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'blocks.0.up.weight' and 'blocks.2.up.weight' were one before"):
        fully_shard_model(convert(zoo.Tied().bfloat16()), fsdp_unit_modules=[zoo.Block])


@pytest.mark.usefixtures("fake_world")
def test_weights_that_torchao_quantizes_at_rest_are_refused() -> None:
    torchao()
    from torchao.prototype import quantized_training as training
    from torchao.quantization import quantize_

    model = Llama(torchao_models.config()).to(BF16)
    config = training.int8_weight_only_quantized_training()
    quantize_(model, config, lambda module, name: isinstance(module, nn.Linear) and "layers" in name)
    with pytest.raises(
        NotImplementedError, match=r"Int8QuantizedTrainingLinearWeight .*quantized at rest .*no main weights"
    ):
        shard(model)


# -- other training of torchao ----------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("kind", ["int8", "mx"])
@on_ranks(2)
def test_layers_of_prototypes_equal_one_process(kind: str) -> None:
    """Layers that quantize ordinary parameters as they compute. torch traces those for MX, not for int8."""
    found = []
    for mode in (None, EAGER, AOT_EAGER):
        torch.manual_seed(0)
        model = Llama(torchao_models.config(hidden=64)).to(BF16)
        torchao_models.swap(model, kind)
        if mode is None:
            call, optimizer = model, torch.optim.SGD(model.parameters(), lr=1e-2)
        else:
            main = MixedPrecisionPolicy(main_params_dtype=BF16)
            model, call, _ = shard(model, mode, mixed_precision_policy=main, fullgraph=kind == "mx")
            optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
        found.append(train(model, call, optimizer, rank=0, steps=3, shape=(2, 17)))
    assert_equal(found[1], found[0])
    assert_equal(found[2], found[0])


@on_ranks(2)
@pytest.mark.long
def test_param_dtype_as_fsdp2() -> None:
    """A float32 model with FSDP2's policy trains as under FSDP2: float8 weights are for layers in bfloat16."""
    reference = torchao_models.fsdp2(llama(torch.float32), init_device_mesh("cpu", (dist.get_world_size(),)))
    expected = train(reference, reference, torch.optim.AdamW(reference.parameters(), lr=1e-3))
    policy = TorchPolicy(param_dtype=BF16, reduce_dtype=BF16)
    for mode in (EAGER, AOT_EAGER):
        model, call, optimizer = shard(
            llama(torch.float32), mode, disable_bucketing=True, mixed_precision_policy=policy
        )
        assert_equal(train(model, call, optimizer), expected)
        assert by_torchao(model)
