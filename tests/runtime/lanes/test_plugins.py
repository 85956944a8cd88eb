"""Stages of plug-ins: the strategy's bits in every mode. They are refused if they lie, or mean something else."""

from __future__ import annotations

import collections
import contextlib
import gc
import weakref
from dataclasses import dataclass, replace
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from strangers import STRANGERS, GatherChanges, GatherHere, InPairs, Kept, Scrambled, Times
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from mfsdp_compile import MixedPrecisionPolicy, OptimizerOffloadPolicy, fully_shard_model
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.runtime.formats.extension import FORM
from mfsdp_compile.runtime.lanes.lane import lane_at
from mfsdp_compile.runtime.lanes.probe import travel
from mfsdp_compile.runtime.lanes.strategies import lane_of
from mfsdp_compile.stages import AllGather, Collective, Lane, Local, LyingStage, Scale, Spec, WrongLane

RANKS = 4
STRATEGIES = (
    *("no_shard", "optim", "optim_grads", "optim_grads_params"),
    *("HSDP optim", "HSDP optim_grads_params", "HFSDP"),
)
MICROBATCHES = 2


def make(strategy: str, mode: str, *plugins: Any, **options: Any) -> tuple[Any, Any]:
    model = fully_shard_model(
        parity.build(zoo.Uneven), fsdp_unit_modules=[zoo.Block], plugins=plugins, **mesh_arguments(strategy), **options
    )
    if mode == EAGER:
        return model, model
    return model, torch.compile(model, backend="mfsdp", options={"inner": mode})


def trained(model: Any, call: Any, steps: int = 3) -> list[Tensor]:
    """Return losses, gradients and parameters of steps of microbatches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for data in parity.batches(steps * MICROBATCHES).chunk(steps):
        for number, micro in enumerate(data):
            model.is_last_microbatch = number == len(data) - 1
            loss = call(micro[dist.get_rank()])
            loss.backward()
            found.append(loss.detach())
        found += [param.grad._local_tensor.clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        found += [param._local_tensor.detach().clone() for param in model.parameters()]
    return found


def same_bits(kind: str, strategy: str) -> tuple[list[Tensor], list[Tensor]]:
    """Return what is trained without the stage, and compiled with it; compare both with eager steps."""
    plain, eager = trained(*make(strategy, EAGER)), trained(*make(strategy, EAGER, STRANGERS[kind]))
    compiled = trained(*make(strategy, AOT_EAGER, STRANGERS[kind]))
    assert all(torch.equal(ours, its) for ours, its in zip(eager, compiled, strict=True))
    if kind != "in pairs":  # which adds in another order
        assert all(torch.equal(ours, its) for ours, its in zip(eager, plain, strict=True))
    return plain, compiled


@pytest.mark.parametrize(
    ("kind", "strategy"), [*((kind, "HSDP optim_grads_params") for kind in STRANGERS), ("codec", "optim")]
)
@on_ranks(RANKS)
def test_the_same_bits(kind: str, strategy: str) -> None:
    """Eager and compiled, and, where a stage is exact, as without it."""
    same_bits(kind, strategy)


@dataclass(frozen=True)
class KeepsGradients:
    def __call__(self, lane: Lane, ranks: Any) -> Lane:
        return replace(lane, due=(*lane.due, Kept()))


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_what_a_stage_keeps_is_its_own(mode: str) -> None:
    """Gradients add up while the last stage overwrites what it has returned."""
    found = []
    for plugins in ([], [KeepsGradients()]):
        model, call = make("optim_grads_params", mode, *plugins)
        for batch in parity.batches(4):
            call(batch[dist.get_rank()]).backward()
        found.append([param.grad._local_tensor for param in model.parameters()])
    assert all(torch.equal(ours, its) for ours, its in zip(*found, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", STRANGERS)
@on_ranks(RANKS)
def test_every_strategy(kind: str, strategy: str) -> None:
    """Compiled by Inductor, too."""
    plain, _ = same_bits(kind, strategy)
    fused = trained(*make(strategy, INDUCTOR, STRANGERS[kind]))
    for ours, its in zip(fused, plain, strict=True):
        torch.testing.assert_close(ours, its, rtol=1e-4, atol=1e-5)  # float32 sums in another order, three steps


class _Sent(TorchDispatchMode):
    """Bytes that this rank sends to others."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and func._opname != "wait_tensor":
            size, ranks = args[0].numel() * args[0].element_size(), RANKS
            if "gather" in func._opname:
                self.bytes += size * (ranks - 1)
            else:
                self.bytes += size * (ranks - 1) // ranks * (2 if "all_reduce" in func._opname else 1)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kind", [*STRANGERS, "none"])
@on_ranks(RANKS)
def test_costs_are_what_is_sent(kind: str) -> None:
    """Bytes of all stages' costs are those that collectives count."""
    for strategy in ("no_shard", "optim", "optim_grads_params"):
        model, _ = make(strategy, EAGER, *([STRANGERS[kind]] if kind in STRANGERS else []))
        for bucket in model.sharded.buckets:
            lane = bucket.lane
            for parts in (("step", "use"), ("each", "due")):
                states: Any = collections.defaultdict(dict)
                x = torch.zeros(lane.spec(parts[0]).numel, dtype=lane.spec(parts[0]).dtype)
                with _Sent() as sent:
                    travel(lane, parts, x, states)
                expected = [stage.cost(lane.spec(p, i)) for p in parts for i, stage in enumerate(lane[p])]
                assert sent.bytes == sum(cost.sent for cost in expected)


@on_ranks(2)
def test_the_schedule_names_them() -> None:
    model, call = make("optim_grads_params", AOT_EAGER, Scrambled(), InPairs())
    call(torch.randn(6, 8)).sum().backward()
    (graphs,) = (record.schedules for record in model.sharded.compiled_graphs[:1])
    text = "\n".join(line for lines in graphs.values() for line in lines)
    assert "scramble key=90, gathered over 2 ranks, unscramble key=90 dtype=torch.float32" in text
    assert "sum in pairs over 2 ranks" in text


# -- what is refused --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Swapped(Collective):
    """Says that it gathers, and puts what ranks have in another order."""

    gathers = True

    def start(self, x: Tensor, state: Any) -> Tensor:
        return torch.ops._c10d_functional.all_gather_into_tensor(x, self.group.size, self.group.name)

    def wait(self, flying: Tensor, state: Any) -> Tensor:
        return torch.ops._c10d_functional.wait_tensor(flying).view(self.ranks, -1).flip(0).reshape(-1)


@dataclass(frozen=True)
class Forgetful(GatherChanges):
    """Keeps state, and does not say so."""

    keeps_state = False


@dataclass(frozen=True)
class OwnAllGather(AllGather):
    """Derived from a plain stage, whose operator graphs would have."""


@dataclass(frozen=True)
class Rounded(Local):
    """Rounds to 8 bits of mantissa."""

    bits: int = 3

    def run(self, x: Tensor, state: Any) -> Tensor:
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp((mantissa * 2**self.bits).round() / 2**self.bits, exponent)


class Undecorated(Rounded):
    """No dataclass of its own: its repr would not name what it adds."""


@dataclass(frozen=True)
class Residual(Local):
    """Keeps what rounding has lost, and adds it the next time: what is lost then may be as much."""

    keeps_state = True
    error = 2.0**-2

    def run(self, x: Tensor, state: Any) -> Tensor:
        total = x + state.get("lost", 0)
        rounded = Rounded().run(total, state)
        state["lost"] = total - rounded
        return rounded


@dataclass(frozen=True)
class RoundedAsItSays(Rounded):
    error = 2.0**-3


@dataclass(frozen=True)
class Halved(Local):
    """Keeps half, and says so."""

    def out(self, spec: Spec) -> Spec:
        return spec._replace(numel=spec.numel // 2)

    def run(self, x: Tensor, state: Any) -> Tensor:
        return x[: x.numel() // 2].clone()


@dataclass(frozen=True)
class Longer(Local):
    """Returns more than it says."""

    def run(self, x: Tensor, state: Any) -> Tensor:
        return torch.cat([x, x])


@dataclass(frozen=True)
class Put:
    """Replaces the stages of some parts that fly."""

    make: Any
    parts: tuple[str, ...] = ("step", "use")

    def __call__(self, lane: Lane, ranks: Any) -> Lane:
        return lane.change(lambda stage: stage.flies, lambda stage: self.make(stage), *self.parts)


BACK = ("each", "due")


@dataclass(frozen=True)
class Joint(Local):
    joint = True


@dataclass(frozen=True)
class Unawaited(GatherHere):
    functional = False


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "another order": (Put(lambda s: (Swapped(s.group),)), LyingStage, "gathers something else.*off by"),
    "rounds": (Put(lambda s: (Rounded(), s)), LyingStage, "gathers something else"),
    "halves what it sums": (Put(lambda s: (s, Rounded(1)), BACK), LyingStage, "reduces something else"),
    "state": (Put(lambda s: (Forgetful(s.group),)), RuntimeError, "keeps_state = True"),
    "derived": (Put(lambda s: (OwnAllGather(s.group),)), WrongLane, "Only plain stages may"),
    "undecorated": (Put(lambda s: (Undecorated(), s)), WrongLane, "is no frozen dataclass"),
    "half": (Put(lambda s: (Halved(), s)), WrongLane, "a gathered bucket is"),
    "longer": (Put(lambda s: (Longer(), s)), RuntimeError, "Longer.run returned"),
    "gathers twice": (Put(lambda s: (s, s)), WrongLane, "more than one stage of 'use' flies"),
    "sums nothing": (Put(lambda s: (), BACK), WrongLane, "adds what is on ranks|the gradient of the shard is"),
    "no lane": (lambda lane, ranks: None, WrongLane, "returned NoneType"),
    "no stage": (Put(lambda s: (s, "x")), WrongLane, "which is no stage"),
    "unawaited": (Put(lambda s: (Unawaited(s.group),)), NotImplementedError, "has no wait.*and is not functional"),
    "joint": (Put(lambda s: (Joint(), s)), WrongLane, "is joint or takes scales"),
    "scales": (Put(lambda s: (s, Scale(2.0)), BACK), WrongLane, "scales gradients by"),
}


@pytest.mark.parametrize("kind", REFUSED)
@on_ranks(2)
def test_what_is_refused(kind: str) -> None:
    """On all ranks, before anything is trained; the model can be sharded without the plug-in afterwards."""
    plugin, error, message = REFUSED[kind]
    model = parity.build(zoo.Uneven)
    with pytest.raises(error, match=f"(?s){message}"):
        fully_shard_model(model, fsdp_unit_modules=[zoo.Block], plugins=[plugin])
    sharded = fully_shard_model(model, fsdp_unit_modules=[zoo.Block])
    sharded(torch.randn(6, 8)).sum().backward()


@on_ranks(2)
def test_gradients_that_are_not_summed() -> None:
    """All ranks hold all of them, so their size says nothing."""
    with pytest.raises(WrongLane, match="adds what is on ranks: 1, and the strategy's 2"):
        make("no_shard", EAGER, Put(lambda s: (), BACK))


@on_ranks(2)
def test_rounding_that_is_declared() -> None:
    model, _ = make("optim_grads_params", EAGER, Put(lambda s: (RoundedAsItSays(), s)))
    model(torch.randn(6, 8)).sum().backward()


def test_classes_of_one_name_are_told_apart() -> None:
    """As in a notebook, where a cell runs again: graphs of the first model keep its stages."""

    def lane() -> Lane:
        @dataclass(frozen=True)
        class Made(Local):
            pass

        spec = Spec(8, torch.float32)
        return Lane(spec, spec, spec, use=(Made(),))

    first, second = lane(), lane()
    assert first.key != second.key
    assert lane_at(first.key) is first
    assert lane_at(second.key) is second


@dataclass(frozen=True)
class HalvedWhenDone:
    """Doubles what is reduced, and halves it in a part in which nothing flies."""

    def __call__(self, lane: Lane, ranks: Any) -> Lane:
        return replace(lane, each=(Times(2.0), *lane.each), due=(*lane.due, Times(0.5)))


@pytest.mark.parametrize(
    "strategy",
    [
        "HSDP optim_grads_params",
        *(pytest.param(s, marks=pytest.mark.long) for s in STRATEGIES if s != "HSDP optim_grads_params"),
    ],
)
@on_ranks(RANKS)
def test_no_stage_is_left_out(strategy: str) -> None:
    plain = trained(*make(strategy, EAGER), steps=2)
    for mode in (EAGER, AOT_EAGER):
        found = trained(*make(strategy, mode, HalvedWhenDone()), steps=2)
        assert all(torch.equal(ours, its) for ours, its in zip(found, plain, strict=True))


@on_ranks(2)
def test_gradients_that_are_not_trained_with() -> None:
    """Stages that keep state would remember them."""

    def put(stage: Any) -> tuple[Any, ...]:
        return Residual(), stage

    for mode in (EAGER, AOT_EAGER):
        model, call = make("optim_grads_params", mode, Put(put, BACK))
        loss = call(torch.randn(6, 8)).sum()
        with pytest.raises(NotImplementedError, match="asks for some gradients only"):
            torch.autograd.grad(loss, list(model.parameters()))


@on_ranks(2)
def test_with_sums_in_8_bits() -> None:
    """The user's stage is not blamed for the format's rounding."""
    policy = MixedPrecisionPolicy(grad_sum_dtype=torch.float32, grad_comm_dtype=torch.int8)
    for plugin in (Scrambled(), InPairs()):
        model, _ = make("optim_grads_params", EAGER, plugin, mixed_precision_policy=policy)
        model(torch.randn(6, 8)).sum().backward()


@on_ranks(2)
def test_a_plugin_that_changes_nothing() -> None:
    first = dist.get_rank() == 0
    with pytest.warns(UserWarning, match="changes the lane of no bucket") if first else contextlib.nullcontext():
        make("optim_grads_params", EAGER, Put(lambda s: (s,), ("step",)))


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER, INDUCTOR])
@on_ranks(2)
def test_nothing_holds_a_model_whose_program_has_a_stage(mode: str) -> None:
    """Functions of a stage's class hold the program's names, the model among them."""
    program = """
@dataclass(frozen=True)
class Same(Local):
    def run(self, x, state):
        return x

def plugin(lane, ranks):
    return lane.change(lambda s: s.gathers, lambda s: (Same(), s))

model = fully_shard_model(nn.Linear(8, 8), plugins=[plugin])
call = model if mode == "eager" else torch.compile(model, backend="mfsdp", options={"inner": mode})
call(torch.randn(2, 8)).sum().backward()
"""
    names: dict[str, Any] = {each.__name__: each for each in (dataclass, Local, fully_shard_model)}
    names |= {"nn": nn, "torch": torch, "mode": mode, "__name__": __name__}
    exec(program, names)
    bucket = weakref.ref(names["model"].sharded.buckets[0])
    del names
    gc.collect()
    assert bucket() is None


@dataclass(frozen=True)
class NoFirstStage:
    def __call__(self, lane: Lane, ranks: Any) -> Lane:
        return replace(lane, step=lane.step[1:])


@on_ranks(2)
def test_ranks_with_other_plugins() -> None:
    with pytest.raises(RuntimeError, match="lane of"):
        make("optim_grads_params", EAGER, Scrambled(1 + dist.get_rank()))


@on_ranks(2)
def test_what_is_not_gathered_by_stages() -> None:
    model, _ = make("optim_grads_params", EAGER)
    plan = replace(model.sharded.buckets[0].plan, form=FORM, plugins=(Scrambled(),))
    with pytest.raises(NotImplementedError, match="gathers itself"):
        lane_of(plan, model.sharded.members.topology)


@pytest.mark.parametrize(
    "strategy", ["HSDP optim_grads_params", pytest.param("optim_grads_params", marks=pytest.mark.long)]
)
@on_ranks(RANKS)
def test_stacked_on_float8(strategy: str) -> None:
    """What a plug-in wraps are the bytes that are gathered."""
    policy = MixedPrecisionPolicy(param_comm_dtype=torch.float8_e4m3fn)
    plain = trained(*make(strategy, EAGER, mixed_precision_policy=policy))
    for mode in (EAGER, AOT_EAGER):
        found = trained(*make(strategy, mode, Scrambled(), mixed_precision_policy=policy))
        assert all(torch.equal(ours, its) for ours, its in zip(found, plain, strict=True))


@dataclass(frozen=True)
class ToBytes(Local):
    def out(self, spec: Spec) -> Spec:
        return Spec(spec.bytes, torch.uint8)

    def run(self, x: Tensor, state: Any) -> Tensor:
        return ~x.view(torch.uint8)


@dataclass(frozen=True)
class FromBytes(Local):
    dtype: torch.dtype

    def out(self, spec: Spec) -> Spec:
        return Spec(spec.numel // self.dtype.itemsize, self.dtype)

    def run(self, x: Tensor, state: Any) -> Tensor:
        return (~x).view(self.dtype)


@dataclass(frozen=True)
class OncePerStep:
    """Encodes a shard after it has changed, and decodes it before each use."""

    def __call__(self, lane: Lane, ranks: Any) -> Lane:
        dtype = lane.spec("use").dtype
        return replace(lane, step=(*lane.step, ToBytes()), use=(FromBytes(dtype), *lane.use))


IN_FLOAT8 = {"mixed_precision_policy": MixedPrecisionPolicy(param_comm_dtype=torch.float8_e4m3fn)}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"mixed_precision_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    "float8": IN_FLOAT8,
    "optimizer offload": {"offload_policy": OptimizerOffloadPolicy()},
    "offload": {"offload_policy": CPUOffloadPolicy()},
}


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_what_is_made_once_per_step(way: str, strategy: str) -> None:
    if strategy != "optim_grads_params" and way in ("float8", "offload"):
        return  # they are refused: nothing is gathered at each use
    plain = trained(*make(strategy, EAGER, **WAYS[way]))
    for mode in (EAGER, AOT_EAGER):
        found = trained(*make(strategy, mode, OncePerStep(), **WAYS[way]))
        assert all(torch.equal(ours, its) for ours, its in zip(found, plain, strict=True)), mode


@on_ranks(2)
def test_what_runs_for_all_buckets_stays_in_front() -> None:
    policy = MixedPrecisionPolicy(param_comm_dtype=torch.float8_e4m3fn)
    with pytest.raises(WrongLane, match="does not begin with"):
        make("optim_grads_params", EAGER, NoFirstStage(), mixed_precision_policy=policy)


SUMS = {"grad_sum_dtype": torch.float32, "grad_comm_dtype": torch.int8}
STACKS: dict[str, dict[str, Any]] = {
    "float8": {"mixed_precision_policy": MixedPrecisionPolicy(param_comm_dtype=torch.float8_e4m3fn, **SUMS)},
    "host memory": {
        "mixed_precision_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, **SUMS),
        "offload_policy": OptimizerOffloadPolicy(),
    },
}


@pytest.mark.parametrize("stack", STACKS)
@on_ranks(RANKS)
def test_stacked_on_guests(stack: str) -> None:
    """HSDP with gathers in float8 or from host memory, gradients in 8 bits and communication buffers, and a plug-in."""
    options = STACKS[stack] | {"fsdp_double_buffer": True}
    plain = trained(*make("HSDP optim_grads_params", EAGER, **options))
    for mode in (EAGER, AOT_EAGER):
        found = trained(*make("HSDP optim_grads_params", mode, Scrambled(), **options))
        assert all(torch.equal(ours, its) for ours, its in zip(found, plain, strict=True)), mode
