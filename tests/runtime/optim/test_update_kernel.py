"""Compiled steps: the numbers of ``optimizer.step()`` up to rounding, and what is left to the optimizer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import parity
import pytest
import torch
import zoo
from parity import EAGER, INDUCTOR
from pool import on_ranks
from test_step_in_backward import OPTIMIZERS, Lion, Trained
from torch import Tensor, nn

from mfsdp_compile import (
    MixedPrecisionPolicy,
    compile_step,
    declare_optimizer,
    fully_shard_model,
    fully_shard_optimizer,
)
from mfsdp_compile.diagnostics.doctor import STRATEGIES, mesh_arguments
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.guests.optimizers.flat_step import FlatStep
from mfsdp_compile.runtime.guests.optimizers.update_kernel import UpdateKernel, UpdateKernels

# -- one tensor -------------------------------------------------------------------------------------------------------

Optim = Callable[[Any], torch.optim.Optimizer]


class LooksAtItself(Lion):
    """Keeps the last norm in an attribute."""

    def step(self, closure: None = None) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        super().step()


class CountsInPython(Lion):
    """Counts in Python, as many optimizers did before torch 1.12."""

    def step(self, closure: None = None) -> None:
        super().step()
        for state in self.state.values():
            state["step"] = state.get("step", 0) + 1


class CountsInIntegers(Lion):
    """A trace takes a number that it reads of an int64 tensor for a constant."""

    def step(self, closure: None = None) -> None:
        super().step()
        for state in self.state.values():
            state.setdefault("step", torch.zeros((), dtype=torch.int64)).add_(1)


class Replaces(Lion):
    """Puts another tensor into its state at each step."""

    def step(self, closure: None = None) -> None:
        super().step()
        for state in self.state.values():
            state["mean"] = state["mean"] * 1.0


class Warms(Lion):
    """Does something else in the first steps."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                count = self.state[param].setdefault("step", torch.zeros(()))
                count += 1
                if count > 3:
                    param.mul_(0.99)
        super().step()


class Powers(Lion):
    """Takes a number where no operator takes a tensor."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.clamp_(max=1 / group["lr"])
        super().step()


def custom(one: Callable[[Any, Any, Tensor, dict[str, Any]], None], **attributes: Any) -> Optim:
    class Made(torch.optim.Optimizer):
        of_class = 1.0

        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1, "list": [1.0], "dict": {"n": 1.0}})
            vars(self).update(attributes)

        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            if one is _first_parameter:
                self.param_groups[0]["params"][0].sub_(0.1)
                return
            for group in self.param_groups:
                for param in group["params"]:
                    one(self, group, param, self.state[param])

    return Made


def _global_state(self: Any, group: Any, param: Tensor, state: Any) -> None:
    whole = self.state["global"]
    whole["step"] = whole.get("step", 0) + 1
    param.sub_(param.grad, alpha=group["lr"] / whole["step"])


def _nested(self: Any, group: Any, param: Tensor, state: Any) -> None:
    group["dict"]["n"] += 1.0
    param.sub_(param.grad, alpha=group["lr"] / group["dict"]["n"])


def _array(self: Any, group: Any, param: Tensor, state: Any) -> None:
    self.count[0] += 1
    param.sub_(param.grad, alpha=group["lr"] / float(self.count[0]))


def _random(self: Any, group: Any, param: Tensor, state: Any) -> None:
    param.sub_(param.grad, alpha=group["lr"] * torch.rand(()).item())


def _reversed(self: Any, group: Any, param: Tensor, state: Any) -> None:
    param.copy_(torch.rsub(param.grad, param, alpha=group["lr"]))


def _notes_the_norm(self: Any, group: Any, param: Tensor, state: Any) -> None:
    state.setdefault("norm", torch.zeros(())).copy_(param.grad.abs().max())
    param.sub_(param.grad, alpha=group["lr"])


def _other_group(self: Any, group: Any, param: Tensor, state: Any) -> None:
    param.sub_(param.grad, alpha=self.param_groups[-1]["lr"])


def _long_ones(self: Any, group: Any, param: Tensor, state: Any) -> None:
    param.sub_(param.grad, alpha=group["lr"] * (2.0 if param.numel() > 10 else 1.0))


def _random_elements(self: Any, group: Any, param: Tensor, state: Any) -> None:
    param.sub_(param.grad * torch.rand_like(param), alpha=group["lr"])


def _flags(self: Any, group: Any, param: Tensor, state: Any) -> None:
    state.setdefault("up", torch.zeros_like(param, dtype=torch.bool)).copy_(param.grad > 0)
    param.sub_(param.grad, alpha=group["lr"])


def _first_parameter(self: Any, group: Any, param: Tensor, state: Any) -> None:
    raise NotImplementedError


_calls: list[int] = []


def _counts_elsewhere(self: Any, group: Any, param: Tensor, state: Any) -> None:
    _calls.append(1)
    param.sub_(param.grad, alpha=group["lr"] / len(_calls))


_rate, _drawn = 1.0, 0


def _reads_a_variable(self: Any, group: Any, param: Tensor, state: Any) -> None:
    param.sub_(param.grad, alpha=_rate * group["lr"])


def _changes_a_variable(self: Any, group: Any, param: Tensor, state: Any) -> None:
    global _drawn
    _drawn += 1
    param.sub_(param.grad, alpha=group["lr"])


def _reads_an_object(self: Any, group: Any, param: Tensor, state: Any) -> None:
    param.sub_(param.grad, alpha=group["lr"] * len(COMPILED))


def _counts_after_use(self: Any, group: Any, param: Tensor, state: Any) -> None:
    count = state.setdefault("step", torch.ones(()))
    param.sub_(param.grad * group["lr"] / count)
    count += 1


def _asks_whether_trained(self: Any, group: Any, param: Tensor, state: Any) -> None:
    if param.requires_grad:
        param.sub_(param.grad, alpha=group["lr"])


def _without_rate(self: Any, group: Any, param: Tensor, state: Any) -> None:
    group.pop("lr", None)
    param.sub_(param.grad, alpha=group["list"][0])


COMPILED: dict[str, Optim] = {
    **{name: OPTIMIZERS[name] for name in OPTIMIZERS if name not in ("Muon", "CountsInGroups", "KeepsGradients")},
    "maximizes": lambda params: torch.optim.Adam(params, lr=1e-2, maximize=True, foreach=True, weight_decay=0.1),
    "Nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "plain SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.1, centered=True),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=0.1),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=1e-2),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=1e-2),
    "counts after use": custom(_counts_after_use),
    "asks whether trained": custom(_asks_whether_trained),
    "without a rate": custom(_without_rate),
    "flags": custom(_flags),
}


class OfAnObject(Lion):
    """Has an object in its class."""

    held = [1.0]  # noqa: RUF012


class Computed(Lion):
    """Computes an attribute."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


LEFT: dict[str, tuple[Optim, str]] = {
    "RAdam": (lambda params: torch.optim.RAdam(params, lr=1e-2), "cannot be traced: GuardOnDataDependentSymNode"),
    "ASGD": (lambda params: torch.optim.ASGD(params, lr=1e-2), "cannot be traced: GuardOnDataDependentSymNode"),
    "itself": (LooksAtItself, "keeps something outside of its state"),
    "Python": (CountsInPython, "its state 'step' is a int, and not a tensor"),
    "integers": (CountsInIntegers, "its state 'step' counts in torch.int64"),
    "replaces": (Replaces, "puts other tensors into its state"),
    "warms": (Warms, "cannot be traced: GuardOnDataDependentSymNode"),
    "powers": (Powers, "aten.clamp_.default takes or changes a number"),
    "a tensor": (
        lambda params: torch.optim.AdamW(params, weight_decay=torch.tensor(0.1)),
        "'weight_decay' is a Tensor",
    ),
    "global state": (custom(_global_state), "keeps state that belongs to no parameter"),
    "nested": (custom(_nested), "keeps something outside of its state"),
    "array": (custom(_array, count=np.zeros(1)), "its attribute 'count' is a ndarray"),
    "object of the class": (OfAnObject, "its attribute 'OfAnObject.held' is a list"),
    "computed attributes": (Computed, "its class computes attributes (Computed.__getattr__)"),
    "a variable changed": (custom(_changes_a_variable), "_changes_a_variable() changes the variable '_drawn'"),
    "an object read": (custom(_reads_an_object), "_reads_an_object() reads an object by name, 'COMPILED', a dict"),
    "random": (custom(_random), "aten.rand.default draws random numbers"),
    "reversed": (custom(_reversed), "aten.rsub.Tensor takes or changes a number"),
    "notes the norm": (custom(_notes_the_norm), "takes or changes a number"),
    "length": (custom(_long_ones), "depends on the number of elements"),
    "random elements": (custom(_random_elements), "aten.rand_like.default draws random numbers"),
    "first parameter": (custom(_first_parameter), "compiling its step fails: IndexError"),
    "counts elsewhere": (custom(_counts_elsewhere), "_counts_elsewhere() reads an object by name, '_calls', a list"),
}


def stepped(make: Optim, numel: int = 1000, dtype: torch.dtype = torch.float32) -> tuple[Any, Tensor, dict[str, Any]]:
    """Return an optimizer that has taken a step over one tensor, a copy of the tensor, and of its state."""
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(numel, dtype=dtype))
    optimizer = make([param])
    param.grad = torch.randn_like(param)
    optimizer.step()
    state = {k: v.clone() if isinstance(v, Tensor) else v for k, v in optimizer.state[param].items()}
    return optimizer, param.detach().clone(), state


def find(optimizer: Any, flat: Tensor, state: dict[str, Any], scaled: bool = False) -> UpdateKernel | str:
    kernels = UpdateKernels(optimizer, compat.step_without_hooks(type(optimizer)), {})
    return kernels.find(flat, optimizer.param_groups[0], state, scaled)


@pytest.mark.slow
@pytest.mark.long_unless("AdamW", "Lion", "NAdam")
@pytest.mark.parametrize("name", COMPILED)
def test_numbers_of_the_optimizer(name: str) -> None:
    """Also with learning rates that change, with gradients that are scaled, and over other lengths."""
    optimizer, flat, state = stepped(COMPILED[name])
    (param,) = optimizer.param_groups[0]["params"]
    kernel = find(optimizer, flat, state, scaled=True)
    assert isinstance(kernel, UpdateKernel), kernel
    for number in range(1, 5):
        lr, gradient, scale = 1e-3 * number, torch.randn(1000), torch.rand(())
        optimizer.param_groups[0]["lr"] = torch.tensor(lr) if "tensor" in name else lr
        param.grad = gradient * scale
        optimizer.step()
        kernel(flat, gradient, scale, lr, state)
    torch.testing.assert_close(flat, param.detach(), rtol=3e-6, atol=3e-6)  # four steps, each rounded otherwise
    for key, value in optimizer.state[param].items():
        torch.testing.assert_close(state[key], value, rtol=3e-6, atol=3e-6)
    for numel in (1, 2, 1001):
        optimizer, flat, state = stepped(COMPILED[name], numel)
        (param,) = optimizer.param_groups[0]["params"]
        param.grad = gradient[:1].expand(numel).contiguous()
        optimizer.step()
        kernel(flat, param.grad, torch.ones(()), optimizer.param_groups[0].get("lr", 0.0), state)
        torch.testing.assert_close(flat, param.detach(), rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_the_optimizer(name: str) -> None:
    make, why = LEFT[name]
    optimizer, flat, state = stepped(make)
    params = optimizer.param_groups[0].pop("params")

    def seen() -> tuple[list[float], str, str, list[str]]:
        return flat.tolist(), str(state), str(optimizer.param_groups), dir(optimizer)

    before = seen()
    found = find(optimizer, flat, state)
    assert isinstance(found, str)
    assert why in found
    assert seen() == before, "nothing has changed"
    assert params[0].grad is not None


def test_another_groups_learning_rate() -> None:
    """It may change without the group's own."""
    optimizer, flat, state = stepped(custom(_other_group))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))], "lr": 0.3})
    assert "differs from the optimizer's" in str(find(optimizer, flat, state))


def test_settings_and_attributes_that_change_in_place() -> None:
    """Kernels of settings and attributes as they are now, whichever way the program changes them."""

    def rate(self: Any, group: Any, param: Tensor, state: Any) -> None:
        initial = group.get("initial_lr", 1.0) * self.defaults["dict"]["n"]
        param.sub_(param.grad, alpha=group["list"][0] * self.boost * self.of_class * initial)

    optimizer, flat, state = stepped(custom(rate, boost=1.0))
    kernels = UpdateKernels(optimizer, compat.step_without_hooks(type(optimizer)), {})
    (group,) = optimizer.param_groups

    def change() -> Iterator[float]:
        group["list"][0] = 2.0
        yield 2.0
        optimizer.boost = 5.0
        yield 10.0
        group["initial_lr"], type(optimizer).of_class = 3.0, 2.0
        yield 60.0

    for right in change():
        kernels.begin_step()
        kernel = kernels.find(flat, group, state, False)
        assert isinstance(kernel, UpdateKernel)
        moved = torch.zeros(1000)
        kernel(moved, torch.ones(1000), None, 0.0, {})
        assert moved[0].item() == -right


def test_a_variable_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, flat, state = stepped(custom(_reads_a_variable))
    kernels = UpdateKernels(optimizer, compat.step_without_hooks(type(optimizer)), {})
    for rate in (1.0, 3.0):
        monkeypatch.setitem(globals(), "_rate", rate)
        kernels.begin_step()
        kernel = kernels.find(flat, optimizer.param_groups[0], state, False)
        assert isinstance(kernel, UpdateKernel), kernel
        moved = torch.zeros(1000)
        kernel(moved, torch.ones(1000), None, 0.5, {})
        assert moved[0].item() == -0.5 * rate


def test_default_dtypes_of_the_program() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        optimizer, flat, state = stepped(OPTIMIZERS["AdamW"])
        torch.set_default_dtype(dtype)
        try:
            kernel = find(optimizer, flat, state, scaled=True)
        finally:
            torch.set_default_dtype(torch.float32)
        assert isinstance(kernel, UpdateKernel), kernel
        kernel(flat, torch.ones(1000), torch.ones(()), 1e-2, state)
        assert flat.isfinite().all()


def test_state_that_a_kernel_cannot_take() -> None:
    optimizer, flat, state = stepped(OPTIMIZERS["AdamW"])
    for wrong, why in (
        ({"exp_avg": state["exp_avg"][:10]}, "another shape"),
        ({"exp_avg": torch.zeros(2000)[::2]}, "another shape"),
        ({"exp_avg": state["exp_avg_sq"]}, "shares memory"),
        ({"exp_avg": flat}, "shares memory"),
    ):
        assert why in str(find(optimizer, flat, {**state, **wrong}))
    for dtype in (torch.float64, torch.complex64):
        optimizer, flat, state = stepped(OPTIMIZERS["AdamW"], dtype=dtype)
        assert f"its parameters are in {dtype}" in str(find(optimizer, flat, state))


@pytest.mark.long
def test_low_precision() -> None:
    """A kernel rounds less often than the optimizer, which rounds after each operator."""
    optimizer, flat, state = stepped(OPTIMIZERS["AdamW"], numel=10_000, dtype=torch.bfloat16)
    (param,) = optimizer.param_groups[0]["params"]
    exact = flat.float(), {key: value.float() for key, value in state.items()}
    param.grad = torch.randn_like(flat)
    optimizer.step()
    for values, gradient in (((flat, state), param.grad), (exact, param.grad.float())):
        kernel = find(optimizer, *values)
        assert isinstance(kernel, UpdateKernel)
        kernel(values[0], gradient, None, 1e-2, values[1])
    compiled, own = ((value.detach().float() - exact[0]).abs().mean() for value in (flat, param))
    assert compiled < 1.01 * own, "1 %: the last roundings of 10,000 numbers happen to differ"


@pytest.mark.slow
def test_settings_that_change() -> None:
    """Three kernels are compiled for a group, whose settings change at each step; and one for each group otherwise."""
    optimizer, flat, state = stepped(lambda params: torch.optim.SGD(params, lr=0.1))
    kernels = UpdateKernels(optimizer, compat.step_without_hooks(torch.optim.SGD), {})
    group = optimizer.param_groups[0]
    found = []
    for decay in (0.1, 0.2, 0.3, 0.4, 0.5):
        group["weight_decay"] = decay
        kernels.begin_step()
        found.append(kernels.find(flat, group, state, False))
    assert [isinstance(kernel, UpdateKernel) for kernel in found] == [True] * 3 + [False] * 2
    assert "keep changing" in str(found[-1])
    others = [{**group, "params": [nn.Parameter(flat)], "weight_decay": decay} for decay in (0.1, 0.6)]
    optimizer.param_groups += others
    for other in others:
        assert isinstance(kernels.find(flat, other, state, False), UpdateKernel)
    assert kernels.find(flat, others[0], state, False) is found[0]
    assert "keep changing" in str(kernels.find(flat, group, state, False))


# -- training ---------------------------------------------------------------------------------------------------------


class Watched:
    """Counts the runs that kernels step over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, step = 0, FlatStep._run_kernel

        def counted(flat: FlatStep, *args: Any) -> None:
            self.count += 1
            step(flat, *args)

        monkeypatch.setattr(FlatStep, "_run_kernel", counted)


def close(one: Trained, other: Trained) -> None:
    assert one.tensors.keys() == other.tensors.keys()
    for name, value in one.tensors.items():
        torch.testing.assert_close(other.tensors[name], value, rtol=1e-4, atol=1e-6, msg=name)


def train(mode: str, **arguments: Any) -> tuple[Trained, Trained, int]:
    """Train with steps that are written out, and compiled. Return both, and over how many runs kernels stepped."""
    with pytest.MonkeyPatch.context() as patch:
        watched = Watched(patch)
        other = Trained("compile_step", mode, compile_optimizer=True, **arguments)
    return Trained("written out", mode, **arguments), other, watched.count


def check(max_norm: float | None, accumulation: int = 1, **sharding: Any) -> None:
    one, other, count = train(EAGER, max_norm=max_norm, accumulation=accumulation, **sharding)
    close(one, other)
    runs = vars(other.optimizer)["mfsdp_flat_step"].runs_by_bucket().values()
    assert count == 3 * sum(map(len, runs)), "the first of four steps creates the state"
    assert max_norm is None or type(other.step.grad_norm) is Tensor
    assert "the optimizer's step is compiled, as 1 kernel" in other.step.explain()


@pytest.mark.long
@on_ranks(2)
def test_in_backward_and_after_it() -> None:
    for max_norm in (None, 1e6):
        check(max_norm)


@pytest.mark.long
@pytest.mark.parametrize("max_norm", [None, 0.01])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_strategies(strategy: str, max_norm: float | None) -> None:
    """Buckets that are used at rest are stepped after the backward, and all if gradients are clipped."""
    check(max_norm, accumulation=2, **mesh_arguments(strategy))


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["AdamW", "Lion", "SGD"])
@on_ranks(2)
def test_with_inductor(optimizer: str) -> None:
    """What is default there."""
    one, other, count = train(INDUCTOR, optimizer=optimizer, steps=6)
    close(one, other)
    assert count > 0


@on_ranks(2)
def test_when_steps_are_compiled() -> None:
    def kernels(make: Optim, **arguments: Any) -> bool:
        model = fully_shard_model(parity.build(zoo.Uneven), fsdp_unit_modules=[zoo.Block])
        return compile_step(model, make(model.parameters()), **arguments)._kernels is not None

    aot = {"options": {"inner": "aot_eager"}}
    assert kernels(OPTIMIZERS["AdamW"])
    assert not kernels(OPTIMIZERS["AdamW fused"])
    assert kernels(OPTIMIZERS["AdamW fused"], compile_optimizer=True)
    assert not kernels(OPTIMIZERS["AdamW"], compile_optimizer=False)
    assert not kernels(OPTIMIZERS["AdamW"], **aot)
    assert not kernels(OPTIMIZERS["AdamW"], backend=None)
    assert not kernels(OPTIMIZERS["Muon"])
    with pytest.raises(ValueError, match="Muon steps over parameters"):
        kernels(OPTIMIZERS["Muon"], compile_optimizer=True)


class Rarely(nn.Module):
    """Uses its second block in every other forward."""

    block = zoo.Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(zoo.Block() for _ in range(2))
        self.after = nn.Linear(16, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.blocks[0](x)
        return self.after(self.blocks[1](x) if self.calls % 2 else x).square().mean()


def compared(
    make: Callable[[list[Any]], torch.optim.Optimizer],
    between: Callable[[int, Any, torch.optim.Optimizer, Any], None] = lambda *_: None,
    module: Callable[[], nn.Module] = zoo.Uneven,
    max_norm: float | None = None,
    steps: int = 7,
    tolerance: float = 1e-5,
    shape: tuple[int, ...] = (3, 8),
    **sharding: Any,
) -> Any:
    """Train with steps that are written out and compiled, and compare parameters and state. Return the second step.

    Args:
        make: Makes the optimizer over trained parameters.
        between: Called with the number of a step, the model, the optimizer and its scheduler, after the step.
    """
    found = []
    for compiles in (False, True):
        whole = parity.build(module)
        next(whole.parameters()).requires_grad_(False)
        model = fully_shard_model(whole, fsdp_unit_modules=[zoo.Block], **sharding)
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = fully_shard_optimizer(make(trained), flat=True)
        step = compile_step(model, optimizer, backend=None, compile_optimizer=compiles, max_norm=max_norm)
        between(-1, model, optimizer, step)
        for number, batch in enumerate(parity.batches(steps, shape=shape)[:, torch.distributed.get_rank()]):
            step(batch)
            between(number, model, optimizer, step)
        tensors = {name: param.to_local().detach().float() for name, param in model.named_parameters()}
        for name, param in model.named_parameters():
            for key, value in optimizer.state.get(param, {}).items():
                tensors[f"{name}, {key}"] = value.to_local().float() if hasattr(value, "to_local") else value
        found.append((tensors, step))
    (right, _), (mine, step) = found
    assert right.keys() == mine.keys()
    for name, value in right.items():
        torch.testing.assert_close(mine[name], value, rtol=10 * tolerance, atol=tolerance, msg=name)
    return step


def by_dimension(params: list[Any]) -> torch.optim.Optimizer:
    groups = [{"params": [p for p in params if p.ndim == n], "weight_decay": 0.1 * n} for n in (1, 2)]
    return torch.optim.AdamW(groups, lr=1e-2)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("max_norm", [None, 0.5])
@on_ranks(2)
def test_state_that_the_program_changes(max_norm: float | None) -> None:
    """State that is loaded from a copy, replaced, and of a block that is not always used; in two groups."""
    saved: dict[int, Any] = {}

    def between(number: int, model: Any, optimizer: torch.optim.Optimizer, step: Any) -> None:
        if number == 1:
            saved[id(optimizer)] = copy.deepcopy(optimizer.state_dict())
        if number == 3:
            optimizer.load_state_dict(saved[id(optimizer)])
        if number == 4:
            for state in optimizer.state.values():
                state["exp_avg"] = torch.zeros_like(state["exp_avg"])

    step = compared(by_dimension, between, max_norm=max_norm)
    assert "as 2 kernels" in step.explain(), step.explain()
    compared(by_dimension, module=Rarely, max_norm=max_norm, shape=(3, 16))


@pytest.mark.slow
@pytest.mark.long
@on_ranks(2)
def test_schedules_and_hooks() -> None:
    schedulers: dict[int, Any] = {}

    def schedule(number: int, model: Any, optimizer: torch.optim.Optimizer, step: Any) -> None:
        if number < 0:
            schedulers[id(optimizer)] = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)
        else:
            schedulers[id(optimizer)].step()

    step = compared(lambda params: torch.optim.AdamW(params, lr=1e-2), schedule)
    assert "keep changing" in step.explain(), "it changes betas"

    def scheduled(params: list[Any]) -> torch.optim.Optimizer:
        """A scheduler that wraps ``step`` first."""
        optimizer = torch.optim.AdamW(params, lr=1e-2)
        torch.optim.lr_scheduler.LinearLR(optimizer)
        return optimizer

    assert "as 1 kernel" in compared(scheduled).explain()

    def clip(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        torch.nn.utils.clip_grad_value_(optimizer.param_groups[0]["params"], 1e-3)

    def hook(number: int, model: Any, optimizer: torch.optim.Optimizer, step: Any) -> None:
        if number < 0:
            optimizer.register_step_pre_hook(clip)

    for max_norm in (None, 0.5):
        step = compared(lambda params: torch.optim.SGD(params, lr=1e-1), hook, max_norm=max_norm)
        assert "code of the program runs before and after a step" in step.explain()


class Low(zoo.Uneven):
    """Parameters in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16())


@pytest.mark.slow
@on_ranks(2)
def test_parameters_in_bfloat16_are_clipped() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_params_dtype=None)
    step = compared(
        lambda params: torch.optim.SGD(params, lr=1e-2),
        max_norm=0.1,
        module=Low,
        mixed_precision_policy=policy,
        tolerance=2e-2,  # seven roundings to bfloat16, of 0.004 each
        steps=7,
    )
    assert "as 1 kernel" in step.explain()


@on_ranks(2)
def test_scaled_losses_of_a_fused_optimizer() -> None:
    """A scaler lets a fused step unscale gradients itself."""
    model = fully_shard_model(parity.build(zoo.Uneven), fsdp_unit_modules=[zoo.Block])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(ValueError, match="leaves gradients as they are for a fused optimizer"):
        compile_step(model, optimizer, scaler=scaler, compile_optimizer=True)


@declare_optimizer("elementwise")
class Decoupled(torch.optim.Optimizer):
    """Steps with ``decoupled_grad``, as Transformer Engine's FusedAdam does, or with ``grad``."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                gradient = getattr(param, "decoupled_grad", None)
                param.add_(param.grad if gradient is None else gradient, alpha=-group["lr"])


@pytest.mark.parametrize("why", ["cuda_graph_mode", "decoupled_grad"])
@on_ranks(2)
def test_models_whose_steps_are_not_compiled(why: str) -> None:
    model = fully_shard_model(
        parity.build(zoo.Uneven),
        fsdp_unit_modules=[zoo.Block],
        cuda_graph_mode=why == "cuda_graph_mode",
        use_decoupled_grad=why == "decoupled_grad",
    )
    optimizer = fully_shard_optimizer(Decoupled(model.parameters()), flat=True)
    step = compile_step(model, optimizer, backend=None, compile_optimizer=True)
    for batch in parity.batches(2, shape=(3, 8))[:, torch.distributed.get_rank()]:
        step(batch)
    lines = [line for line in step.explain().splitlines() if "not compiled" in line]
    assert len(lines) == len(model.sharded.buckets)
    assert all(why in line for line in lines)


@on_ranks(2)
def test_a_step_that_cannot_be_compiled() -> None:
    """The optimizer steps instead, with its own numbers, and ``explain`` says why."""
    OPTIMIZERS["RAdam"] = LEFT["RAdam"][0]
    for max_norm in (None, 0.01):
        one, other, count = train(EAGER, optimizer="RAdam", max_norm=max_norm)
        assert count == 0
        close(one, other)
        assert "not compiled; its step cannot be traced" in other.step.explain(), other.step.explain()
