"""``param_dtype``, casts at the borders of modules, and policies of classes: FSDP2's numbers to the bit, on two ranks."""

from __future__ import annotations

import copy
import dataclasses
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
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model
from mfsdp_compile.runtime.casts import cast_tensors

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
FAST = {("output", AOT_EAGER), ("norms in fp32", AOT_EAGER), ("structures", AOT_EAGER)}


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


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[] if mode == EAGER or (name, mode) in FAST else [pytest.mark.long])
        for mode in (EAGER, AOT_EAGER)
        for name in CASES
    ],
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
