"""What changes between a step's capture and its replays, and what a capture that is refused leaves behind."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from graph_recorder import recordable_kernels
from parity import EAGER, INDUCTOR
from pool import on_ranks
from test_captured_train_steps import Trained
from test_cuda_graphs import adamw, capturable, recorded, sgd
from torch import Tensor, nn

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer

STEPS = 9
Between = Callable[[int, Trained], None]


def losses(captures: bool, optimizer: Any, between: Between, **arguments: Any) -> tuple[list[Tensor], Trained]:
    """Train, with something before each step. A step that is refused is taken again."""
    trained = Trained(EAGER, optimizer, captures, **arguments)
    found: list[Tensor] = []
    for number, batch in enumerate(parity.batches(steps=STEPS)[:, dist.get_rank()]):
        between(number, trained)
        found.append(trained(batch))
    return [*(loss.clone() for loss in found), *trained.values()], trained


def compare(optimizer: Any, between: Between = lambda *_: None, replays: int = 2, **arguments: Any) -> Trained:
    """Compare steps that are captured with ordinary ones."""
    with capturable():
        found, mine = losses(True, optimizer, between, **arguments)
        expected, _ = losses(False, optimizer, between, **arguments)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), number
    assert sum(recording.replays for recording in mine.recorder.recordings) >= replays
    return mine


@pytest.mark.slow
@pytest.mark.long_unless("2-sgd-3")
@pytest.mark.parametrize("at", [3, 4])
@pytest.mark.parametrize("optimizer", [sgd, adamw], ids=["sgd", "adamw"])
@on_ranks(2, timeout=120)
def test_state_that_is_replaced_before_the_capture(at: int, optimizer: Any) -> None:
    """It is arranged in another step that runs as usual, which a graph would repeat."""

    def load(number: int, trained: Trained) -> None:
        if number == at:
            with capturable():
                trained.optimizer.load_state_dict(copy.deepcopy(trained.optimizer.state_dict()))
            trained.step.reset()

    compare(optimizer, load)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", [sgd, adamw], ids=["sgd", "adamw"])
@on_ranks(2, timeout=120)
def test_state_that_is_cleared_before_the_capture(optimizer: Any) -> None:
    def clear(number: int, trained: Trained) -> None:
        if number == 3:
            trained.optimizer.state.clear()

    compare(optimizer, clear)


@pytest.mark.long
@on_ranks(2, timeout=120)
def test_settings_that_change_before_the_capture() -> None:
    """A kernel for them is compiled in another step that runs as usual."""

    def decay(number: int, trained: Trained) -> None:
        if number == 3:
            trained.optimizer.param_groups[0]["weight_decay"] = 0.2

    with recordable_kernels():
        mine = compare(adamw, decay, compile_optimizer=True)
        with capturable():
            assert mine.step.explain().endswith("the optimizer's step is compiled, as 2 kernels")


class WithUnused(zoo.Block):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.unused = nn.Linear(16, 16)


class Unused(zoo.Plain):
    block = WithUnused


@on_ranks(2, timeout=120)
def test_parameters_that_are_never_used() -> None:
    """The parameters of their buckets are stepped one by one, each with a counter of its own."""
    compare(adamw, module=Unused)


class Decays(torch.optim.Optimizer):
    """Counts steps in Python: in an attribute, or in its groups."""

    def __init__(self, params: Any, in_groups: bool) -> None:
        super().__init__(params, {"lr": 0.1, **({"count": 0} if in_groups else {})})
        self.count, self.in_groups = 0, in_groups

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        if not self.in_groups:
            self.count += 1
        for group in self.param_groups:
            if self.in_groups:
                group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] / group.get("count", self.count))


@pytest.mark.parametrize("in_groups", [False, True])
@on_ranks(2, timeout=120)
def test_optimizers_that_count_in_python(in_groups: bool) -> None:
    """They are refused, and are left as they were: the step has not been taken."""
    trained = Trained(EAGER, lambda params: Decays(params, in_groups), True)
    taken = 0
    for batch in parity.batches(steps=7)[:, dist.get_rank()]:
        with contextlib.suppress(RuntimeError):
            trained(batch)
            taken += 1
        assert (trained.optimizer.param_groups[0]["count"] if in_groups else trained.optimizer.count) == taken
    assert taken < 7
    with pytest.raises(RuntimeError, match=r"replaces or changes on the host: Decays's (attribute|hyper).*'count'"):
        trained(batch)


BF16_SUMS = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)


@pytest.mark.long_unless("2-False")
@pytest.mark.parametrize("writes", [False, True])
@on_ranks(2, timeout=120)
def test_gradients_that_show_a_sum_in_another_dtype(writes: bool) -> None:
    """``zero_grad``, and whatever else writes to ``.grad``, is outside of what was captured."""

    def run(captures: bool) -> list[Tensor]:
        sharding = {"cuda_graph_mode": True}
        model, call = parity.shard(parity.build(zoo.Plain).bfloat16(), EAGER, sharding=sharding, precision=BF16_SUMS)
        optimizer = fully_shard_optimizer(sgd(model.parameters()))

        def forward_backward(x: Tensor) -> Tensor:
            loss = call(x)
            loss.backward()
            return loss

        do = recorded(call, forward_backward)[0] if captures else forward_backward
        found = []
        for number, batch in enumerate(parity.batches(steps=6)[:, dist.get_rank()].bfloat16()):
            for micro, part in enumerate(batch.chunk(6)):
                do(part)
                if writes and micro == 0 and number >= 3:
                    for param in model.parameters():
                        param.grad.mul_(0.25)
                found += [param.grad.to_local().clone() for param in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        assert not captures or len(do.graphs) >= 2
        return found

    for number, (one, other) in enumerate(zip(run(True), run(False), strict=True)):
        assert torch.equal(one, other), number


@pytest.mark.long
@on_ranks(2, timeout=120)
def test_gradients_that_are_changed_between_microbatches() -> None:
    def flip(number: int, trained: Trained) -> None:
        if number >= 5:
            trained.between_microbatches = lambda: [
                p.grad.mul_(-1) for p in trained.model.parameters() if p.grad is not None
            ]

    compare(adamw, flip, accumulation=2, sharding={"mixed_precision_policy": BF16_SUMS})


@on_ranks(2, timeout=120)
def test_tensors_on_another_device_are_refused() -> None:
    """A graph would keep the learning rate that it was captured with."""
    with capturable():
        trained = Trained(EAGER, adamw, True)
        batches = parity.batches(steps=5)[:, dist.get_rank()]
        for batch in batches[:3]:
            trained(batch)
        trained.optimizer.param_groups[0]["note"] = torch.empty((), device="meta")
        for _ in range(5):
            with contextlib.suppress(RuntimeError):
                trained(batches[3])
        with pytest.raises(RuntimeError, match=r"AdamW's hyperparameter 'note' is a tensor on meta.*Put it on cpu"):
            trained(batches[3])


class _Trains(zoo.Plain):
    class block(zoo.Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(2 * x if self.training else x)


@on_ranks(2, timeout=120)
def test_a_module_that_trains_and_one_that_does_not_have_graphs_of_their_own() -> None:
    """The model alone would not tell them apart."""

    def between(number: int, trained: Trained) -> None:
        trained.model.module.blocks[1].train(number % 2 == 0)

    mine = compare(sgd, between, module=_Trains)
    assert len(mine.recorder.recordings) == 2


@on_ranks(2, timeout=120)
def test_numbers_that_differ_from_call_to_call() -> None:
    """They take no memory, until there are too many of them."""
    with capturable():
        trained = Trained(EAGER, sgd, True, loss_fn=lambda model, x, scale: model(x) * scale)
        (x,) = parity.batches(steps=1)[:, dist.get_rank()]
        for number in range(64):
            trained.step(x, float(number))
        assert not trained.step._graphs._inputs
        with pytest.raises(RuntimeError, match="called in 64 ways, and this is another: an argument"):
            trained.step(x, -1.0)


@pytest.mark.long_unless("2-module", "2-optimizer")
@pytest.mark.parametrize("what", ["module", "all modules", "parameter", "optimizer"])
@on_ranks(2, timeout=120)
def test_hooks_that_are_registered_later(what: str) -> None:
    """A replay runs none."""
    calls: list[int] = []

    def note(*_: Any) -> None:
        calls.append(1)

    trained = Trained(EAGER, sgd, True)
    (x,) = parity.batches(steps=1)[:, dist.get_rank()]
    for _ in range(5):
        trained(x)
    before = trained.values()
    handle = {
        "module": trained.model.module.blocks[0].register_forward_hook,
        "all modules": torch.nn.modules.module.register_module_forward_hook,
        "parameter": next(trained.model.parameters()).register_hook,
        "optimizer": trained.optimizer.register_step_post_hook,
    }[what](note)
    try:
        with pytest.raises(
            RuntimeError, match=r"hooks .*is not that of the capture of.*replay runs none.*on all ranks"
        ):
            trained(x)
        assert all(map(torch.equal, before, trained.values()))
        trained.step.reset()
        for _ in range(3):
            trained(x)
        assert calls
        if what == "optimizer":
            with pytest.raises(RuntimeError, match="hooks run before or after the step of SGD"):
                trained(x)
        else:
            trained(x)
            assert len(trained.step._graphs.graphs) == 1
    finally:
        handle.remove()


@on_ranks(2, timeout=120)
def test_hooks_that_are_registered_in_each_step() -> None:
    """The same function is the same hook."""

    def halve(module: Any, args: Any, out: Tensor) -> Tensor:
        return out * 0.5

    def loss_of(model: Any, x: Tensor) -> Tensor:
        handle = model.module.blocks[0].register_forward_hook(halve)
        loss = model(x)
        handle.remove()
        return loss

    assert len(compare(sgd, loss_fn=loss_of).step._graphs.graphs) == 1


@on_ranks(2, timeout=120)
def test_losses_that_are_kept() -> None:
    with capturable():
        trained = Trained(EAGER, sgd, True, max_norm=0.1)
        kept, copies = [], []
        for batch in parity.batches(steps=7)[:, dist.get_rank()]:
            kept += [trained(batch), trained.step.grad_norm]
            copies += [kept[-2].clone(), kept[-1].clone()]
    assert len(set(map(float, kept))) == len(kept)
    assert all(map(torch.equal, kept, copies))


@on_ranks(2, timeout=120)
def test_arguments_that_are_written_to() -> None:
    def loss_of(model: Any, x: Tensor) -> Tensor:
        x.add_(0.0)
        return model(x)

    trained = Trained(EAGER, sgd, True, loss_fn=loss_of)
    (x,) = parity.batches(steps=1)[:, dist.get_rank()]
    for _ in range(3):
        trained(x)
    with pytest.raises(RuntimeError, match=r"it writes to its argument.*Clone the argument"):
        trained(x)


@on_ranks(2, timeout=120)
def test_graphs_of_one_model_have_names_of_their_own() -> None:
    """Ranks compare them, and notice that one replays another step."""
    model: Any = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block], cuda_graph_mode=True)
    optimizer = fully_shard_optimizer(sgd(model.parameters()), flat=True)
    (x,) = parity.batches(steps=1)[:, dist.get_rank()]

    def step(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    runs = [recorded(model, step)[0] for _ in range(2)]
    for run in runs:
        for _ in range(5):
            run(x)
    assert [name for run in runs for name in run.graphs] == [f"{step.__qualname__}, graph {n}" for n in (1, 2)]
    with pytest.raises(RuntimeError, match=r"graph [12]"):
        runs[dist.get_rank()](x)
    model.reset()


@on_ranks(2, timeout=120)
def test_a_list_that_changes_in_place() -> None:
    with capturable():
        trained = Trained(EAGER, adamw, True)
        trained.optimizer.param_groups[0]["factors"] = [0.9]
        (x,) = parity.batches(steps=1)[:, dist.get_rank()]
        for _ in range(5):
            trained(x)
        trained.optimizer.param_groups[0]["factors"][0] = 0.5
        with pytest.raises(RuntimeError, match=r"AdamW's hyperparameter.*'factors' is not that of the capture"):
            trained(x)


class Keeps(torch.optim.Optimizer):
    """Counts steps in what is neither a number of its own nor of a group.

    Args:
        where: Where.
    """

    def __init__(self, params: Any, where: str) -> None:
        super().__init__(params, {"lr": 0.1, "generator": torch.Generator()})
        self.where, self.held = where, {"list": [0], "dict": {"n": 0}, "tensor": torch.zeros(())}

    def count(self) -> Any:
        if self.where == "state":
            self.state["global"]["n"] = self.state["global"].get("n", 0) + 1
            return self.state["global"]["n"]
        held = self.held[self.where]
        if self.where == "tensor":
            self.held["tensor"] = held + 1
            return self.held["tensor"]
        held["n" if self.where == "dict" else 0] += 1
        return held["n"] if self.where == "dict" else held[0]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        count = 1 if self.where == "nothing" else self.count()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    sums = self.state[param].setdefault("sums", [torch.zeros_like(param), torch.zeros_like(param)])
                    sums[0].add_(param.grad)
                    param.sub_(sums[0] * (group["lr"] / count))


@pytest.mark.long_unless("2-list", "2-nothing")
@pytest.mark.parametrize("where", ["nothing", "list", "dict", "tensor", "state"])
@on_ranks(2, timeout=120)
def test_what_optimizers_keep(where: str) -> None:
    """State in lists is captured where it stays in place; what is counted outside of tensors would stand still."""

    def make(params: Any) -> torch.optim.Optimizer:
        return fully_shard_optimizer(Keeps(params, where))

    if where == "nothing":
        compare(make)
        return
    trained = Trained(EAGER, make, True)
    batches = parity.batches(steps=7)[:, dist.get_rank()]
    for batch in batches[:3]:
        trained(batch)
    before = trained.values()
    for batch in batches[3:]:
        with pytest.raises(RuntimeError, match=r"cannot be captured.*(replaces or changes on the host|neither)"):
            trained(batch)
    assert all(map(torch.equal, before, trained.values()))


@on_ranks(2, timeout=120)
def test_another_optimizer_that_begins_in_the_capture() -> None:
    """It has stepped for the first time in a call that has done nothing, and has no state afterwards."""
    model: Any = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block], cuda_graph_mode=True)
    first, *others = model.parameters()
    one, other = (fully_shard_optimizer(sgd(params)) for params in ([first], others))
    calls: list[int] = []

    def step(x: Tensor) -> Tensor:
        calls.append(1)
        loss = model(x)
        loss.backward()
        one.step()
        if len(calls) > 3:
            other.step()
        model.zero_grad()
        return loss

    run, _ = recorded(model, step)
    (x,) = parity.batches(steps=1)[:, dist.get_rank()]
    for _ in range(3):
        run(x)
    with pytest.raises(RuntimeError, match="other optimizers step in it"):
        run(x)
    assert not other.state
    assert torch.isfinite(step(x))
    assert torch.isfinite(step(x))


@on_ranks(2, timeout=120)
def test_a_change_on_one_rank_before_the_capture() -> None:
    """All ranks run as usual once more."""

    def note(number: int, trained: Trained) -> None:
        if number == 3 and dist.get_rank() == 1:
            trained.optimizer.param_groups[0]["note"] = "something"

    compare(sgd, note)


@pytest.mark.long
@on_ranks(2, timeout=200)
def test_arguments_that_compiled_code_writes_to() -> None:
    def loss_of(model: Any, x: Tensor) -> Tensor:
        loss = model(x * 1.0)
        x.add_(1.0)
        return loss

    with recordable_kernels():
        trained = Trained(INDUCTOR, sgd, True, loss_fn=loss_of)
        (x,) = parity.batches(steps=1)[:, dist.get_rank()]
        for _ in range(3):
            trained(x.clone())
        with pytest.raises(RuntimeError, match="it writes to its argument"):
            trained(x.clone())


@on_ranks(2, timeout=120)
def test_calls_that_fail_before_the_capture() -> None:
    fails = True

    def loss_of(model: Any, x: Tensor) -> Tensor:
        if fails:
            raise ValueError("a bad batch")
        return model(x)

    trained = Trained(EAGER, sgd, True, loss_fn=loss_of)
    (x,) = parity.batches(steps=1)[:, dist.get_rank()]
    for _ in range(4):
        with pytest.raises(ValueError, match="a bad batch"):
            trained(x)
        trained.model.reset()
    fails = False
    for _ in range(5):
        trained(x)
    assert len(trained.step._graphs.graphs) == 1
