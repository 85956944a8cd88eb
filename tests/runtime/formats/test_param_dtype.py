"""``param_dtype``, casts at borders of modules, and policies of classes: FSDP2's numbers to the bi."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import parity
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.checkpoint import checkpoint

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.runtime.formats.casts import cast_tensors

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BF16_PARAMS = TorchPolicy(param_dtype=BF16, reduce_dtype=F32)
NORMS = TorchPolicy(param_dtype=F32, output_dtype=BF16)


@dataclass
class Pair:
    x: Tensor
    note: str


class Both(NamedTuple):
    x: Tensor
    y: Any


class TakesStructures(nn.Module):
    """A unit that takes and returns nested structures with tensors of several dtypes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, given: dict[str, Any], *, pair: Pair, mask: Tensor) -> Any:
        x, (y, (z,)) = given["x"], given["rest"]
        assert {x.dtype, y.dtype, z.dtype, pair.x.dtype} == {self.layer.weight.dtype} and mask.dtype == torch.bool
        x = self.layer(x + y + z + pair.x).masked_fill(mask, 0.0)
        return Both(x, {"again": [x.float()]})


class Structures(nn.Module):
    block = TakesStructures

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(TakesStructures() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            noise = torch.ones(16, dtype=torch.float32)
            given = {"x": x.float(), "rest": (noise, [x.double()])}
            x, rest = block(given, pair=Pair(noise, "bias"), mask=x > 1)
            (again,) = rest["again"]
            x = torch.tanh(x + again.to(x.dtype))
        return x.pow(2).mean()


class OwnCasts(zoo.Plain):
    """A model that casts by itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.enter.weight.dtype))


class WithBuffer(zoo.Plain):
    """A unit with a buffer, which keeps its dtype."""

    class block(zoo.Block):
        scale: Tensor

        def __init__(self, width: int = 16) -> None:
            super().__init__(width)
            self.register_buffer("scale", torch.full((width,), 1.1))

        def forward(self, x: Tensor) -> Tensor:
            assert self.scale.dtype == F32
            return super().forward(x) * self.scale.to(x.dtype)


class Holder(zoo.Plain):
    """A unit without parameters of its own, around other units, and one that has none at all."""

    class block(nn.Module):
        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self.inner = zoo.Block(width)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x + torch.ones((), dtype=x.dtype)).float()


@dataclass(frozen=True)
class Case:
    """A model, and policies of its modules' classes; under None that of everything else."""

    model: Callable[[], nn.Module]
    policies: dict[Any, TorchPolicy]
    units: tuple[type[nn.Module], ...]

    @property
    def ours(self) -> Any:
        return self.policies if len(self.policies) > 1 else self.policies[None]


def plain(policy: TorchPolicy, model: Any = zoo.Plain) -> Case:
    return Case(model, {None: policy}, (model.block,))


CASES: dict[str, Case] = {
    "reduced in fp32": plain(BF16_PARAMS),
    "reduced in bf16": plain(TorchPolicy(param_dtype=BF16, reduce_dtype=BF16)),
    "reduced by default": plain(TorchPolicy(param_dtype=BF16)),
    "only the reduction": plain(TorchPolicy(reduce_dtype=BF16)),
    "fp16": plain(TorchPolicy(param_dtype=F16, reduce_dtype=F32)),
    "output": Case(
        zoo.Plain,
        {None: TorchPolicy(param_dtype=BF16, reduce_dtype=F32, output_dtype=F32), zoo.Block: BF16_PARAMS},
        (zoo.Block,),
    ),
    "no casts of inputs": plain(TorchPolicy(param_dtype=BF16, reduce_dtype=F32, cast_forward_inputs=False), OwnCasts),
    "nested": Case(zoo.Nested, {None: BF16_PARAMS}, (zoo.Nested.block, zoo.Block)),
    "nested policies": Case(
        zoo.Nested,
        {None: BF16_PARAMS, zoo.Block: TorchPolicy(param_dtype=F32, output_dtype=BF16)},
        (zoo.Nested.block, zoo.Block),
    ),
    "holders": Case(
        Holder,
        {None: BF16_PARAMS, Holder.block: TorchPolicy(param_dtype=BF16, output_dtype=BF16)},
        (Holder.block, zoo.Block),
    ),
    "norms in fp32": Case(zoo.Plain, {None: BF16_PARAMS, nn.LayerNorm: NORMS}, (zoo.Block,)),
    "norms as they are": Case(
        zoo.Plain, {None: BF16_PARAMS, nn.LayerNorm: TorchPolicy(output_dtype=BF16)}, (zoo.Block,)
    ),
    "structures": plain(BF16_PARAMS, Structures),
    "buffers": plain(BF16_PARAMS, WithBuffer),
    "frozen": plain(BF16_PARAMS, zoo.FrozenParameters),
    "checkpointed": plain(BF16_PARAMS, zoo.Checkpointed),
    "called twice": plain(BF16_PARAMS, zoo.CalledTwice),
}


def theirs(case: Case) -> nn.Module:
    """Shard with FSDP2: units, modules of classes with policies of their own, and the model, from the inside out."""
    model = parity.build(case.model)
    own = tuple(cls for cls in case.policies if cls is not None)
    for module in reversed(list(model.modules())):
        if module is model or isinstance(module, (*case.units, *own)):
            policy = next((case.policies[cls] for cls in own if isinstance(module, cls)), case.policies[None])
            fsdp.fully_shard(module, mp_policy=policy)
    return model


def ours(case: Case, mode: str, **arguments: Any) -> tuple[Any, Any]:
    return parity.shard(
        parity.build(case.model),
        mode,
        list(case.units),
        precision=case.ours,
        **({"fullgraph": True} if mode != EAGER else {}),
        sharding=arguments,
    )


def train(call: Any, model: nn.Module, steps: int = 4) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train with SGD. Returns this rank's losses and the whole parameters."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for batch in parity.batches(steps):
        loss = call(batch[dist.get_rank()])
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    whole = {name.removeprefix("module."): p.full_tensor().detach() for name, p in model.named_parameters()}
    return losses, whole


def assert_equal(a: tuple[list[Tensor], dict[str, Tensor]], b: tuple[list[Tensor], dict[str, Tensor]]) -> None:
    assert [loss.dtype for loss in a[0]] == [loss.dtype for loss in b[0]]
    assert all(map(torch.equal, a[0], b[0])), (a[0], b[0])
    assert a[1].keys() == b[1].keys()
    for name, param in a[1].items():
        assert param.dtype == b[1][name].dtype and torch.equal(param, b[1][name]), name


@pytest.mark.long_unless("*-eager", "*-structures-*")
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for mode in (EAGER, AOT_EAGER) for name in CASES],
)
@on_ranks(2)
def test_as_fsdp2(name: str, mode: str) -> None:
    """Losses and weights of four steps are those of FSDP2, and shards have the dtype that the model was built in."""
    case = CASES[name]
    model, call = ours(case, mode)
    assert_equal(train(call, model), train(reference := theirs(case), reference))


@on_ranks(2)
@pytest.mark.long
def test_inductor_is_close() -> None:
    """Inductor leaves out roundings between fused operators: a loss differs by a few of bfloat16."""
    case = CASES["output"]
    model, call = ours(case, INDUCTOR)
    losses, _ = train(call, model)
    for mine, its in zip(losses, train(reference := theirs(case), reference)[0], strict=True):
        assert abs(mine - its) <= 4 * torch.finfo(BF16).eps * abs(its), (losses, its)


@on_ranks(2)
def test_regions_remain_and_graphs_do_not_break() -> None:
    """Equal units are one region with their casts, in one graph."""
    model, call = ours(CASES["output"], AOT_EAGER)
    call(parity.batches(1)[0, 0]).backward()
    (record,) = model.sharded.compiled_graphs
    assert [body.units for body in record.regions] == [("blocks.0", "blocks.1", "blocks.2")] and not record.inlined


# -- the same as a bfloat16 model, if its weights can be converted without rounding ------------------------------------


def in_bfloat16(factory: Callable[[], nn.Module] = zoo.Plain, dtype: torch.dtype = BF16) -> nn.Module:
    """Return a model whose weights bfloat16 can represent, in this dtype."""
    return parity.build(factory).to(BF16).to(dtype)


def twins(mode: str, factory: Any = zoo.Plain, units: Any = None, **arguments: Any) -> tuple[Any, Any]:
    """Shard a bfloat16 model, and a float32 model of the same weights that computes in bfloat16."""
    policy = arguments.pop("policy", {})
    options = {"fullgraph": True} if mode != EAGER else {}
    options |= arguments.pop("options", {})
    options |= {name: arguments.pop(name) for name in ("unit_bytes", "bucket_bytes") if name in arguments}
    return tuple(
        parity.shard(
            in_bfloat16(factory, dtype),
            mode,
            units,
            precision=MixedPrecisionPolicy(**policy, **of_dtype),
            sharding=arguments,
            **options,
        )
        for dtype, of_dtype in ((BF16, {}), (F32, {"param_dtype": BF16}))
    )  # type: ignore[return-value]


def assert_twins(pair: Any, steps: int = 2, microbatches: int = 1) -> None:
    runs = []
    for (model, call), dtype in zip(pair, (BF16, F32), strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for batch in parity.batches(steps):
            for number in range(microbatches):
                model.is_last_microbatch = number == microbatches - 1
                loss = call((batch[dist.get_rank()] + number).to(BF16).to(dtype))
                loss.backward()
                found.append(loss.detach())
            found += [param.grad.to_local().clone() for param in model.parameters() if param.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
        runs.append(found + [param.to_local().detach().clone() for param in model.parameters()])
    for a, b in zip(*runs, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


FP8 = {"param_comm_dtype": torch.float8_e4m3fn}
TWINS: dict[str, dict[str, Any]] = {
    "no_shard": {"zero_dp_strategy": "no_shard"},
    "optim": {"zero_dp_strategy": "optim"},
    "optim_grads": {"zero_dp_strategy": "optim_grads"},
    "gathered in fp8": {"policy": FP8},
    "gathered in mxfp8": {
        "policy": FP8 | {"param_comm_scaling": "mxfp8"},
        "factory": zoo.Aligned,
        "unit_bytes": 1 << 12,
    },
    "multiplied in fp8": {"factory": zoo.Aligned, "options": {"fp8_matmul": "tensorwise"}},
    "main in bf16": {"policy": {"main_params_dtype": BF16}},
    "modules": {"enable_fine_grained_param_gather": True},
    "joined units": {"unit_bytes": 1 << 12},
    "parts": {"bucket_bytes": 1 << 10},
    "buffers": {"fsdp_double_buffer": True},
    "averaged": {"average_in_collective": True},
    "reentrant": {"factory": zoo.CheckpointedReentrant},
    "tied": {"factory": zoo.Tied},
    "reads child": {"factory": zoo.ReadsChild},
    "recurrent": {"factory": zoo.Recurrent, "options": {"fullgraph": False}},
    "parametrized": {"factory": zoo.Parametrized},
    "graph breaks": {"factory": zoo.GraphBreaks, "options": {"fullgraph": False}},
    "disabled child": {"factory": zoo.DisabledChild, "options": {"fullgraph": False}},
}
SHORT_TWINS = {"no_shard", "optim", "gathered in fp8", "gathered in mxfp8", "modules", "joined units", "recurrent"}


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[] if mode == EAGER and name in SHORT_TWINS else [pytest.mark.long])
        for mode in (EAGER, AOT_EAGER)
        for name in TWINS
    ],
)
@on_ranks(2)
def test_as_a_bfloat16_model(name: str, mode: str) -> None:
    assert_twins(twins(mode, **TWINS[name]), microbatches=2)


@pytest.mark.parametrize("strategy", ["HSDP optim_grads_params", "HFSDP"])
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(4)
@pytest.mark.long
def test_as_a_bfloat16_model_with_outer_ranks(strategy: str, mode: str) -> None:
    assert_twins(twins(mode, **mesh_arguments(strategy)), microbatches=2)


@on_ranks(2)
def test_blocks_that_are_compiled_alone() -> None:
    """Compiled blocks cast as eager ones do."""
    case = CASES["norms in fp32"]
    model, call = ours(case, EAGER)
    for block in model.module.blocks:
        block.compile(backend="mfsdp", options={"inner": AOT_EAGER})
    eager_model, eager_call = ours(case, EAGER)
    assert_equal(train(call, model, 2), train(eager_call, eager_model, 2))
    assert len(model.sharded.compiled_graphs) >= 1


@on_ranks(2)
def test_autocast_around() -> None:
    """Autocast around a model with a policy does what it does around FSDP2's."""
    case = plain(TorchPolicy(param_dtype=F32, reduce_dtype=BF16, output_dtype=BF16))
    case = Case(zoo.Plain, {None: TorchPolicy(output_dtype=F32), zoo.Block: case.policies[None]}, (zoo.Block,))

    def under(call: Any) -> Any:
        def run(x: Tensor) -> Tensor:
            with torch.autocast("cpu", BF16):
                return call(x)

        return run

    (model, call), reference = ours(case, EAGER), theirs(case)
    assert_equal(train(under(call), model), train(under(reference), reference))


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_accumulation_as_fsdp2(mode: str) -> None:
    """Whole gradients are summed in float32 over microbatches and reduced once, in float32."""
    case = CASES["reduced in fp32"]
    (model, call), reference = ours(case, mode), theirs(case)
    model.set_accumulation(whole_gradients=True)
    found = []
    for module, forward, set_last in (
        (model, call, lambda last: setattr(model, "is_last_microbatch", last)),
        (reference, reference, lambda last: reference.set_requires_gradient_sync(last)),
    ):
        for micro, batch in enumerate(parity.batches(3)):
            set_last(micro == 2)
            forward(batch[dist.get_rank()]).backward()
        found.append([param.grad.full_tensor() for param in module.parameters()])
    for mine, its in zip(*found, strict=True):
        assert mine.dtype == its.dtype == F32 and torch.equal(mine, its)


# -- counterparts of torch's own tests of casts ------------------------------------------------------------------------


class SavesInputs(nn.Module):
    """Two layers that note the dtypes of what they get, and cast it themselves if they are told to."""

    class Layer(nn.Module):
        def __init__(self, seen: dict[str, torch.dtype], name: str, casts: bool) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.seen, self.name, self.casts = seen, name, casts

        def forward(self, x: Tensor) -> Tensor:
            self.seen[self.name] = x.dtype
            return self.layer(x.to(self.layer.weight.dtype) if self.casts else x)

    class First(Layer):
        pass

    class Second(Layer):
        pass

    def __init__(self, casts: bool) -> None:
        super().__init__()
        self.seen: dict[str, torch.dtype] = {}
        self.c1, self.c2 = self.First(self.seen, "c1", casts), self.Second(self.seen, "c2", casts)

    def forward(self, x: Tensor) -> Tensor:
        self.seen["model"] = x.dtype
        return self.c2(self.c1(x))


First, Second = SavesInputs.First, SavesInputs.Second


@pytest.mark.parametrize(
    ("casts", "policies", "expected"),
    [
        (False, {Second: TorchPolicy(param_dtype=F16)}, {"model": F32, "c1": F32, "c2": F16}),
        (
            True,
            {Second: TorchPolicy(param_dtype=F16, cast_forward_inputs=False)},
            {"model": F32, "c1": F32, "c2": F32},
        ),
        (
            False,
            {First: TorchPolicy(param_dtype=F16, output_dtype=F32)},
            {"model": F32, "c1": F16, "c2": F32},
        ),
    ],
)
@pytest.mark.usefixtures("fake_world")
def test_float16_in_one_module(casts: bool, policies: Any, expected: dict[str, torch.dtype]) -> None:
    model = fully_shard_model(SavesInputs(casts), fsdp_unit_modules=list(policies), mixed_precision_policy=policies)
    model(torch.zeros(2, 8)).sum().backward()
    assert model.module.seen == expected


@pytest.mark.parametrize("casts", [False, True])
@pytest.mark.usefixtures("fake_world")
def test_a_unit_with_inputs_from_elsewhere(casts: bool) -> None:
    """What a parent makes in float32 is cast at the unit's border, unless its policy says not to."""
    seen: dict[str, torch.dtype] = {}

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            seen.update(x=x.dtype, y=y.dtype)
            return self.layer(x)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.inner = nn.Linear(8, 8), Inner()

        def forward(self, x: Tensor) -> Tensor:
            seen["model"] = x.dtype
            return self.inner(self.layer(x), torch.ones(2, 8))

    policies = {None: TorchPolicy(param_dtype=F16), Inner: TorchPolicy(param_dtype=F16, cast_forward_inputs=casts)}
    model = fully_shard_model(Outer(), fsdp_unit_modules=[Inner], mixed_precision_policy=policies)
    model(torch.zeros(2, 8)).sum().backward()
    assert seen == {"model": F16, "x": F16, "y": F16 if casts else F32}


@pytest.mark.parametrize("what", ["inputs", "outputs"])
@pytest.mark.usefixtures("fake_world")
def test_recomputation_casts(what: str) -> None:
    """A recomputed unit gets and returns the dtypes that it got and returned before."""
    got: list[torch.dtype] = []
    returned: list[torch.dtype] = []

    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            got.append(x.dtype)
            return super().forward(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer(8, 8)

        def run(self, x: Tensor) -> Tensor:
            x = self.layer(x)
            returned.append(x.dtype)
            return x

        def forward(self, x: Tensor) -> Tensor:
            x = x.to(F32 if what == "inputs" else BF16)
            x = checkpoint(self.run, x, use_reentrant=False, early_stop=False)  # type: ignore[call-arg]
            return x.float().sum()

    casts_outputs = what == "outputs"
    policy = TorchPolicy(BF16, BF16, F32 if casts_outputs else None, cast_forward_inputs=not casts_outputs)
    model = fully_shard_model(Model(), fsdp_unit_modules=[Layer], mixed_precision_policy=policy)
    model(torch.randn(4, 8)).backward()
    assert got == [BF16, BF16] and returned == ([F32, F32] if casts_outputs else [BF16, BF16])


def _norms(kind: str) -> nn.Sequential:
    if kind == "LayerNorm":
        return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    if kind == "BatchNorm1d":
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    return nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3))


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("how", ["LayerNorm", "BatchNorm1d", "BatchNorm2d", "buffers", "policy"])
@on_ranks(2)
def test_norms(how: str, dtype: torch.dtype) -> None:
    """Norms do what they do with FSDP2.

    With parameters of ``dtype``, batch norms need buffers of it: torch refuses others on a CPU. With a policy of their
    own they have float32 parameters.
    """
    kind = how if how in ("LayerNorm", "BatchNorm1d") else "BatchNorm2d"
    policies: dict[Any, TorchPolicy] = {None: TorchPolicy(param_dtype=dtype)}
    if how == "policy":
        policies[nn.BatchNorm2d] = TorchPolicy(output_dtype=dtype)

    def run(shards: Callable[[nn.Sequential], Any]) -> list[Tensor] | str:
        torch.manual_seed(0)
        model = _norms(kind)
        call = shards(model)
        if how == "buffers":
            model[1].running_mean, model[1].running_var = (b.to(dtype) for b in list(model[1].buffers())[:2])
        torch.manual_seed(1)
        try:
            result = call(torch.randn(3, 1, 9, 9) if kind == "BatchNorm2d" else torch.randn(4, 8))
        except RuntimeError as error:
            return str(error)
        assert result.dtype == dtype
        result.sum().backward()
        return [result.detach(), *(param.grad.full_tensor() for param in model.parameters())]

    def with_fsdp2(model: nn.Sequential) -> nn.Module:
        for module in (*model, model):
            fsdp.fully_shard(module, mp_policy=policies.get(type(module), policies[None]))
        return model

    def here(model: nn.Sequential) -> nn.Module:
        return fully_shard_model(model, fsdp_unit_modules={type(m) for m in model}, mixed_precision_policy=policies)

    mine, its = run(here), run(with_fsdp2)
    assert isinstance(its, str) == (how in ("BatchNorm1d", "BatchNorm2d"))
    if isinstance(its, str):
        assert mine == its
        return
    for a, b in zip(mine, its, strict=True):
        assert isinstance(a, Tensor) and a.dtype == b.dtype and torch.equal(a, b)


@on_ranks(2)
def test_reduced_in_float32_after_a_forward_of_a_frozen_model() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
            self.number = nn.Parameter(torch.ones(16, dtype=torch.int64), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            assert self.number.dtype == torch.int64
            return self.layers(x)

    model = fully_shard_model(Model(), fsdp_unit_modules=[nn.Linear], mixed_precision_policy=BF16_PARAMS)
    model.requires_grad_(False)
    with torch.no_grad():
        model(torch.randn(4, 16))
    model.module.layers.requires_grad_(True)
    assert model(torch.randn(4, 16)).dtype == BF16
    model(torch.randn(4, 16)).sum().backward()
    trained = [bucket.plan for bucket in model.sharded.buckets if bucket.plan.requires_grad]
    assert {plan.comm_dtype for plan in trained} == {F32}
    assert {p.grad.dtype for p in model.module.layers.parameters()} == {F32} and model.module.number.grad is None


@pytest.mark.usefixtures("fake_world")
def test_forward_mode_derivatives() -> None:
    policy = TorchPolicy(param_dtype=BF16, reduce_dtype=F32)
    first, last = (
        fully_shard_model(nn.Linear(*sizes, bias=False), mixed_precision_policy=policy) for sizes in ((8, 16), (16, 4))
    )
    between = first(torch.randn(8))
    point = torch.randn(4, dtype=BF16, requires_grad=True)
    value, derivative = torch.func.jvp(lambda unused: last(between), (point,), (torch.randn(4, dtype=BF16),))
    assert value.dtype == BF16 and torch.equal(derivative, torch.zeros_like(value))


@pytest.mark.usefixtures("fake_world")
def test_the_reduction_of_a_bfloat16_model() -> None:
    """A dtype of the reduction that is the model's own stays the reduction's with float32 shards."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=BF16, grad_comm_dtype=BF16)
    model = fully_shard_model(model, fsdp_unit_modules=[nn.Linear], mixed_precision_policy=policy)
    assert {(b.plan.comm_dtype, b.plan.main_dtype) for b in model.sharded.buckets} == {(BF16, F32)}


# -- what casts reach --------------------------------------------------------------------------------------------------


@dataclass
class Outer:
    inner: Pair
    both: Both


def test_structures_are_cast() -> None:
    """Floating-point tensors in containers are cast; containers without any are passed on, and nothing else changes."""
    x, number = torch.ones(2), torch.ones(2, dtype=torch.int64)
    untouched = [number, "text", {"deep": (None, 1.5)}]
    given = {
        "outer": Outer(Pair(x, "note"), Both(x, [x.double()])),
        "ordered": OrderedDict(b=x, a=number),
        "untouched": untouched,
        "maximum": torch.max(torch.ones(2, 2), dim=0),
        "set": {x},
    }
    cast = cast_tensors(given, BF16)
    assert cast["outer"].inner.x.dtype == BF16 and cast["outer"].inner.note == "note"
    assert cast["outer"].both.x.dtype == cast["outer"].both.y[0].dtype == BF16 and type(cast["outer"].both) is Both
    assert list(cast["ordered"]) == ["b", "a"] and type(cast["ordered"]) is OrderedDict
    assert (cast["ordered"]["b"].dtype, cast["ordered"]["a"]) == (BF16, number)
    assert cast["untouched"] is untouched
    assert cast["maximum"].values.dtype == BF16 and cast["maximum"].indices.dtype == torch.int64
    assert [each.dtype for each in cast["set"]] == [BF16]
    assert given["outer"].inner.x is x  # type: ignore[attr-defined]
    packed = pack_sequence([x])
    assert cast_tensors(packed, BF16) is packed and isinstance(packed, PackedSequence)
    assert cast_tensors(Pair, BF16) is Pair


def _noting(forward: Any, seen: list[torch.dtype], x: Tensor) -> Tensor:
    seen.append(x.dtype)
    return forward(x)


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_a_forward_that_was_wrapped_casts(mode: str) -> None:
    """A forward that is set on the module itself, as libraries do it, is cast around, also in a copy of the model."""
    policies = {
        None: MixedPrecisionPolicy(param_dtype=BF16),
        zoo.Block: MixedPrecisionPolicy(param_dtype=F16, output_dtype=BF16),
    }
    model, seen = parity.build(zoo.Plain), []
    for block in model.blocks:
        block.forward = functools.partial(_noting, block.forward, seen)
    sharded, call = parity.shard(model, mode, precision=policies)
    plain, _ = parity.shard(parity.build(zoo.Plain), EAGER, precision=policies)
    x = torch.randn(4, 8)
    assert torch.equal(call(x), plain(x))
    assert seen == [F16] * 3
    assert list(inspect.signature(model.blocks[0].forward).parameters) == ["x"]
    duplicate = copy.deepcopy(sharded)
    with torch.no_grad():
        sharded.module.blocks[0].up.weight.zero_()
    assert torch.equal(duplicate(x), plain(x)) and not torch.equal(sharded(x), plain(x))


@pytest.mark.usefixtures("fake_world")
def test_registered_methods_cast() -> None:
    class Model(zoo.Plain):
        def encode(self, x: Tensor) -> Tensor:
            assert x.dtype == BF16
            return F.linear(x, self.enter.weight, self.enter.bias)

    policy = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=F32)
    policies = {None: policy, zoo.Block: MixedPrecisionPolicy(param_dtype=BF16)}
    model = fully_shard_model(Model(), fsdp_unit_modules=[zoo.Block], mixed_precision_policy=policies)
    model.register_forward_method("encode")
    assert model.module.encode(torch.randn(2, 8)).dtype == F32


# -- values and state --------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_values_are_kept_in_full() -> None:
    """Shards, state dicts and whole parameters have the model's float32 values; modules compute with rounded ones."""
    values = {name: param.detach().clone() for name, param in parity.build(zoo.Plain).named_parameters()}
    model, _ = parity.shard(parity.build(zoo.Plain), EAGER, precision=MixedPrecisionPolicy(param_dtype=BF16))
    seen = {}
    model.module.head.register_forward_pre_hook(lambda module, args: seen.update(weight=module.weight.detach().clone()))
    model(torch.randn(4, 8))
    assert torch.equal(seen["weight"], values["head.weight"].bfloat16())
    for name, value in model.module.state_dict().items():
        assert value.dtype == F32 and torch.equal(value.full_tensor(), values[name])
    for name, whole in model.full_parameters():
        assert whole.dtype == F32 and torch.equal(whole, values[name.removeprefix("module.")])
    with model.summon_full_params():
        assert torch.equal(model.module.head.weight, values["head.weight"])
    duplicate = copy.deepcopy(model)
    x = torch.randn(4, 8)
    assert torch.equal(duplicate(x), model(x)) and duplicate(x).dtype == BF16
    assert not model.verify_step(x, options={"inner": AOT_EAGER}).where


@on_ranks(2)
def test_initialization_in_full() -> None:
    """Parameters on the meta device are initialized in the model's dtype, not in the one that it computes in."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = zoo.Plain()
    sharded = fully_shard_model(
        model,
        fsdp_unit_modules=[zoo.Block],
        mixed_precision_policy=MixedPrecisionPolicy(param_dtype=BF16),
        init_model_with_meta_device=True,
    )
    for name, param in parity.build(zoo.Plain).named_parameters():
        assert torch.equal(sharded.module.get_parameter(name).full_tensor(), param), name


# -- what is refused ---------------------------------------------------------------------------------------------------


def shard(policy: Any, factory: Any = zoo.Plain, **arguments: Any) -> Any:
    return fully_shard_model(factory(), fsdp_unit_modules=[factory.block], mixed_precision_policy=policy, **arguments)


@pytest.mark.usefixtures("fake_world")
def test_tied_parameters_of_several_policies_are_refused() -> None:
    class Last(nn.Linear):
        pass

    class Tied(zoo.Plain):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(16, 16), Last(16, 16)
            self.last.weight = self.first.weight

    model = Tied()
    policies = {None: MixedPrecisionPolicy(param_dtype=BF16), Last: MixedPrecisionPolicy(param_dtype=F32)}
    with pytest.raises(
        ValueError, match=r"'first\.weight' is also 'last\.weight'.*param_dtype=bfloat16, and param_dtype"
    ):
        fully_shard_model(model, fsdp_unit_modules=[zoo.Block], mixed_precision_policy=policies)
    policies[Last] = policies[None]
    fully_shard_model(model, fsdp_unit_modules=[zoo.Block], mixed_precision_policy=policies)


@pytest.mark.usefixtures("fake_world")
def test_the_most_derived_class_decides() -> None:
    class Special(nn.Linear):
        pass

    class Model(zoo.Plain):
        def __init__(self) -> None:
            super().__init__()
            self.head = Special(16, 5)

    policies = {
        nn.Linear: MixedPrecisionPolicy(param_dtype=F16),
        Special: MixedPrecisionPolicy(param_dtype=BF16),
        "LayerNorm": MixedPrecisionPolicy(param_dtype=torch.float64),
    }
    model = shard(policies, Model)
    found = {slot.name: b.plan.compute_dtype for b in model.sharded.buckets for slot in b.plan.layout.slots}
    assert found["head.weight"] == BF16 and found["blocks.0.up.weight"] == found["enter.bias"] == F16
    assert found["norm.weight"] == found["blocks.2.norm.bias"] == torch.float64


@pytest.mark.parametrize("policy_class", [MixedPrecisionPolicy, TorchPolicy])
@pytest.mark.usefixtures("fake_world")
def test_parameters_of_their_own_dtype(policy_class: Any) -> None:
    """``param_dtype_override_fn`` keeps a parameter in its dtype, and may not choose any other."""
    if "param_dtype_override_fn" not in {each.name for each in dataclasses.fields(policy_class)}:
        pytest.skip("after torch 2.13")
    asked = []

    def keep_vectors(param: nn.Parameter) -> torch.dtype | None:
        asked.append(param)
        return F32 if param.dim() == 1 else None

    model = shard(policy_class(param_dtype=BF16, param_dtype_override_fn=keep_vectors))
    found = {slot.name: b.plan.compute_dtype for b in model.sharded.buckets for slot in b.plan.layout.slots}
    assert {dtype for name, dtype in found.items() if name.endswith(("bias", "norm.weight"))} == {F32}
    assert found["head.weight"] == found["blocks.1.up.weight"] == BF16
    assert len(asked) == len(set(asked)) == len(found)
    with pytest.raises(ValueError, match=r"returned torch\.float64 for parameter 'enter\.weight'"):
        shard(policy_class(param_dtype=BF16, param_dtype_override_fn=lambda param: torch.float64))


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        ({nn.Conv2d: MixedPrecisionPolicy()}, ValueError, r"Conv2d, which mixed_precision_policy names"),
        (
            {"Conv2d": MixedPrecisionPolicy()},
            ValueError,
            "mixed_precision_policy contains 'Conv2d', but the model has no",
        ),
        ({1: MixedPrecisionPolicy()}, TypeError, "got the key 1"),
        ({nn.LayerNorm: BF16}, TypeError, r"mixed_precision_policy\[LayerNorm\] takes .* got a torch\.dtype"),
        (BF16, TypeError, "FSDP2's MixedPrecisionPolicy is taken too"),
        (MixedPrecision(param_dtype=BF16), TypeError, "cast_root_forward_inputs is cast_forward_inputs"),
    ],
)
@pytest.mark.usefixtures("fake_world")
def test_what_is_no_policy(policy: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        shard(policy)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"param_dtype": torch.int32}, ValueError, r"param_dtype takes a floating-point torch\.dtype or None"),
        ({"param_dtype": torch.float8_e4m3fn}, ValueError, "To gather in float8, use param_comm_dtype"),
        ({"output_dtype": torch.float8_e5m2}, ValueError, "output_dtype takes a dtype that modules compute in"),
        ({"grad_comm_dtype": "shards"}, ValueError, "'main' or None, got 'shards'"),
        ({"cast_forward_inputs": None}, TypeError, "takes True or False, got None"),
        ({"param_dtype_override_fn": BF16}, TypeError, "takes a function or None"),
    ],
)
def test_fields_that_mean_nothing(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MixedPrecisionPolicy(**fields)


@pytest.mark.parametrize("field", ["param_dtype", "output_dtype", "grad_comm_dtype"])
@on_ranks(2)
def test_ranks_agree_on_policies(field: str) -> None:
    policy = MixedPrecisionPolicy(**{field: BF16 if dist.get_rank() else F16})
    with parity.raises_everywhere(RuntimeError, "bfloat16"):
        shard(policy)
    shard(MixedPrecisionPolicy(**{field: BF16}))


@on_ranks(2)
def test_the_context_of_several_policies() -> None:
    """``mixed_precision_context`` changes the dtype of the reduction of each policy, and nothing else."""
    case = CASES["norms in fp32"]
    model, _ = ours(case, EAGER)
    inside = {cls: dataclasses.replace(policy, reduce_dtype=BF16) for cls, policy in case.policies.items()}
    with model.mixed_precision_context(inside):
        assert {bucket.plan.comm_dtype for bucket in model.sharded.buckets} == {BF16}
        model(parity.batches(1)[0, 0]).backward()
    assert {bucket.plan.comm_dtype for bucket in model.sharded.buckets} == {F32}
    for other in (inside[None], {**inside, nn.LayerNorm: TorchPolicy()}):
        with pytest.raises(ValueError, match=r"LayerNorm: .*everything else: "), model.mixed_precision_context(other):
            pass


@pytest.mark.usefixtures("fake_world")
def test_dtypes_of_shards() -> None:
    """FSDP2's policy leaves shards in the dtype of the model, ours makes them float32."""
    for policy, expected in ((TorchPolicy(param_dtype=F16), BF16), (MixedPrecisionPolicy(param_dtype=F16), F32)):
        model = fully_shard_model(zoo.Plain().bfloat16(), fsdp_unit_modules=[zoo.Block], mixed_precision_policy=policy)
        assert {param.dtype for param in model.parameters()} == {expected}
        assert {bucket.plan.compute_dtype for bucket in model.sharded.buckets} == {F16}


@pytest.mark.usefixtures("fake_world")
def test_the_default_of_fsdp2s_reduction() -> None:
    """``reduce_dtype=None`` means what it does in the installed torch: ``param_dtype`` before 2.15, then the own."""
    model = shard(TorchPolicy(param_dtype=BF16))
    expected = F32 if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15) else BF16
    assert {bucket.plan.comm_dtype for bucket in model.sharded.buckets} == {expected}
    main = shard(MixedPrecisionPolicy(param_dtype=BF16, grad_comm_dtype="main"))
    assert {bucket.plan.comm_dtype for bucket in main.sharded.buckets} == {F32}
