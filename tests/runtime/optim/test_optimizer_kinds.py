"""Optimizers of programs, in every way to step them: the numbers of one process, or a refusal in front."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
from parity import AOT_EAGER, INDUCTOR
from pool import on_ranks, shared_folder
from torch import Tensor, nn

from mfsdp_compile import compile_step, declare_optimizer, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints
from mfsdp_compile.runtime.guests.optimizers.flat_step import flat_step_of
from mfsdp_compile.runtime.optim import kinds


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.conv(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x).square().mean()


Update = Callable[[Any, dict[str, Any], Any, dict[str, Any], int], Any]
"""``(optimizer, group, parameter, state, number) -> update``, to be multiplied by ``-lr``."""


class Simple(torch.optim.Optimizer):
    """Applies an update to each parameter."""

    scale: Any = 1.0

    def __init__(self, params: Any, update: Update | None = None, **more: Any) -> None:
        super().__init__(params, {"lr": 0.05})
        self.update = update
        vars(self).update(more)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        number = 0
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self.updated(group, param, number), alpha=-group["lr"])
                number += 1

    def updated(self, group: dict[str, Any], param: Any, number: int) -> Any:
        assert self.update is not None
        return self.update(self, group, param, self.state[param], number)


def _centralized(self: Any, group: Any, p: Any, state: Any, number: int) -> Any:
    return p.grad - p.grad.mean(dim=(1, 2, 3), keepdim=True) if p.dim() > 3 else p.grad


def _scaled_by_attribute(self: Any, group: Any, p: Any, state: Any, number: int) -> Any:
    return p.grad * getattr(p, "lr_scale", 1.0)


def _trust_ratio(self: Any, group: Any, p: Any, state: Any, number: int) -> Any:
    ratio = p.norm() / p.grad.norm()
    return p.grad * (ratio.full_tensor() if hasattr(ratio, "full_tensor") else ratio)


def _factored(self: Any, group: Any, p: Any, state: Any, number: int) -> Any:
    if p.dim() != 2:
        return p.grad
    rows, columns = p.grad.square().mean(1), p.grad.square().mean(0)
    return p.grad / (rows[:, None] * columns[None, :] / rows.mean() + 1e-4).sqrt()


def _by_number(self: Any, group: Any, p: Any, state: Any, number: int) -> Any:
    return p.grad * self.rates[number]


def _by_id(self: Any, group: Any, p: Any, state: Any, number: int) -> Any:
    return p.grad * self.by_id.setdefault(id(p), 1.0 / (1 + len(self.by_id)))


def _by_name(self: Any, group: Any, p: Any, state: Any, number: int) -> Any:
    index = next(i for i, each in enumerate(group["params"]) if each is p)
    return p.grad * (0.5 if group["param_names"][index].endswith("bias") else 1.0)


def _by_depth(self: Any, group: Any, p: Any, state: Any, number: int) -> Any:
    return p.grad * (1 if p.ndim > 1 else 3)


def _by_size(self: Any, group: Any, p: Any, state: Any, number: int) -> Any:
    return p.grad / math.sqrt(p.numel())


def _calls_in_attribute(self: Any, group: Any, p: Any, state: Any, number: int) -> Any:
    self.calls += number == 0
    return p.grad / self.calls


@dataclasses.dataclass
class Holder:
    calls: int = 0


def _calls_in_holder(self: Any, group: Any, p: Any, state: Any, number: int) -> Any:
    self.holder.calls += number == 0
    return p.grad / self.holder.calls


def _computed(self: Any, group: Any, p: Any, state: Any, number: int) -> Any:
    return p.grad * self.anything


class Computes(Simple):
    def __getattr__(self, name: str) -> Any:
        if name == "anything":
            return 0.5 if self.param_groups else 1.0
        raise AttributeError(name)


class OverridesAHelper(torch.optim.SGD):
    """Leaves out vectors."""

    def _init_group(self, group: Any, params: Any, grads: Any, momentum_buffer_list: Any) -> Any:
        found = super()._init_group(group, params, grads, momentum_buffer_list)
        kept = [i for i, param in enumerate(params) if param.ndim > 1]
        for values in (params, grads, momentum_buffer_list):
            values[:] = [values[i] for i in kept]
        return found


class Skips(torch.optim.AdamW):
    """Skips its second step."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return None if self.calls == 2 else super().step(closure)


class TwoSteps(torch.optim.SGD):
    """Sharpness-aware: every other step only moves away."""

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        group["turn"] = not group.get("turn", True)
        group["lr"] = 0.1 if group["turn"] else -0.02
        return super().step(closure)


class Lookahead(torch.optim.Optimizer):
    """Holds another optimizer."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        for name in [*vars(base)]:
            if name.endswith("_hooks"):
                setattr(self, name, OrderedDict())
        self.base, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self.state = defaultdict(dict)
        self.param_groups[0]["count"] = 0
        self._patch_step_function()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.base.step(closure)
        group = self.param_groups[0]
        group["count"] += 1
        if group["count"] % 2 == 0:
            for param in group["params"]:
                slow = self.state[param].setdefault("slow", param.detach().clone())
                param.copy_(slow.lerp_(param, 0.5))


def _simple(update: Update, kind: type[Simple] = Simple, **more: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        for number, param in enumerate(model.parameters()):
            param.lr_scale = 0.5**number  # type: ignore[attr-defined]
        optimizer = kind(model.parameters(), update, **{name: value() for name, value in more.items()})
        optimizer.param_groups[0]["param_names"] = [name for name, _ in model.named_parameters()]
        return optimizer

    return make


def _closed_over() -> Callable[[nn.Module], torch.optim.Optimizer]:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        calls = 0

        def update(self: Any, group: Any, p: Any, state: Any, number: int) -> Any:
            nonlocal calls
            calls += number == 0
            return p.grad / calls

        return Simple(model.parameters(), update)

    return make


def _with_method_replaced(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    own = optimizer._init_group

    def doubled(group: Any, params: Any, grads: Any, buffers: Any) -> Any:
        found = own(group, params, grads, buffers)
        grads[:] = [grad * (2 if param.ndim > 1 else 1) for param, grad in zip(params, grads, strict=True)]
        return found

    optimizer._init_group = doubled  # type: ignore[method-assign]
    return optimizer


def _wrapped(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    own, calls = optimizer.step, []

    @functools.wraps(own)
    def step(closure: Any = None) -> Any:
        calls.append(1)
        return None if len(calls) == 2 else own(closure)

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


class KeepsGradients(torch.optim.SGD):
    """Drops gradients after every second step."""

    calls = 0

    def zero_grad(self, *args: Any) -> None:
        self.calls += 1
        if self.calls % 2 == 0:
            super().zero_grad(*args)


def _keep(optimizer: torch.optim.Optimizer) -> None:
    own, calls = optimizer.zero_grad, []

    def zero_grad() -> None:
        calls.append(1)
        if len(calls) % 2 == 0:
            own()

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]


PROGRAMS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "centralized convolutions": _simple(_centralized),
    "an attribute of the parameter": _simple(_scaled_by_attribute),
    "trust ratio": _simple(_trust_ratio),
    "factored matrices": _simple(_factored),
    "a list beside params": _simple(_by_number, rates=lambda: [1 / (1 + n) for n in range(20)]),
    "id": _simple(_by_id, by_id=dict),
    "param_names": _simple(_by_name),
    "dimensions": _simple(_by_depth),
    "sizes": _simple(_by_size),
    "calls in an attribute": _simple(_calls_in_attribute, calls=int),
    "calls in a holder": _simple(_calls_in_holder, holder=Holder),
    "computed attributes": _simple(_computed, Computes),
    "calls in a closure": _closed_over(),
    "a helper overridden": lambda model: OverridesAHelper(model.parameters(), lr=0.05, momentum=0.5),
    "a subclass that skips": lambda model: Skips(model.parameters(), lr=0.01),
    "two kinds of steps": lambda model: TwoSteps(model.parameters(), lr=0.1),
    "another optimizer inside": lambda model: Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
    "a method replaced": _with_method_replaced,
    "step wrapped": _wrapped,
    "a subclass that keeps gradients": lambda model: KeepsGradients(model.parameters(), lr=0.05),
}


def train(make: Any, how: str, between: Any = lambda *_: None, steps: int = 4) -> dict[str, Tensor]:
    """Return parameters after some steps.

    Args:
        how: ``"alone"``, in one process with the batches of all ranks; ``"plain"`` or ``"flat"``, written out; or
            ``compile_step`` with the backend ``"eager"``, ``AOT_EAGER`` or ``INDUCTOR``.
        between: Called with the module, the optimizer, and the number of the step, after each step and before the
            first one.
    """
    module = parity.build(Net)
    model = module if how == "alone" else fully_shard_model(module, fsdp_unit_modules=[Block])
    whole = model if how == "alone" else model.module
    optimizer, step = make(model), None
    if how in ("plain", "flat"):
        fully_shard_optimizer(optimizer, flat=how == "flat")
    elif how == "eager":
        step = compile_step(model, optimizer, backend=None)
    elif how != "alone":
        step = compile_step(model, optimizer, options={"inner": how})
    between(whole, optimizer, -1)
    for number, batch in enumerate(parity.batches(steps, shape=(2, 2, 4, 4))):
        if step is not None:
            step(batch[dist.get_rank()])
        else:
            for x in batch if how == "alone" else batch[dist.get_rank()][None]:
                (model(x) / (len(batch) if how == "alone" else 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        between(whole, optimizer, number)
    found = {name: param.detach() for name, param in whole.named_parameters()}
    if how != "alone":
        found = {name: param.full_tensor() for name, param in found.items()}
        if how == "eager":
            assert step is not None
            found["explained"] = step.explain()  # type: ignore[assignment]
    return found


def compare(make: Any, hows: Any, between: Any = lambda *_: None, name: str = "") -> list[str]:
    right, explained = train(make, "alone", between), []
    for how in hows:
        found = train(make, how, between)
        explained.append(found.pop("explained", ""))
        for key, value in right.items():
            torch.testing.assert_close(found[key], value, rtol=2e-4, atol=2e-5, msg=f"{name}, {how}, {key}")
    return explained


@on_ranks(2, timeout=300)
def test_what_is_not_declared_takes_its_own_step() -> None:
    for name, make in PROGRAMS.items():
        explained = compare(make, ("plain", "eager"), name=name)[-1]
        assert str(explained).startswith("all buckets are stepped after the backward"), (name, explained)
        with pytest.raises(ValueError, match=r"flat=True: .*is not known to|put a function around"):
            train(make, "flat", steps=1)


@pytest.mark.long
@pytest.mark.parametrize("how", [AOT_EAGER, INDUCTOR])
@on_ranks(2, timeout=300)
def test_the_same_compiled(how: str) -> None:
    for name, make in PROGRAMS.items():
        compare(make, [how], name=name)


# -- code around the step ---------------------------------------------------------------------------------------------


def _skip_later(whole: Any, optimizer: Any, number: int) -> None:
    if number == 0:
        own, calls = optimizer.step, []

        @functools.wraps(own)
        def step(*args: Any) -> Any:
            calls.append(1)
            return None if len(calls) == 2 else own(*args)

        optimizer.step = step


def _hook_later(whole: Any, optimizer: Any, number: int) -> None:
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        for index, param in enumerate(optimizer.param_groups[0]["params"]):
            if param.grad is not None:
                param.grad.mul_(0.5**index * (2 if param.ndim == 4 else 1))

    if number == 1:
        optimizer.register_step_pre_hook(hook)


def _class_patched(whole: Any, optimizer: Any, number: int) -> None:
    if number == 1:
        own = torch.optim.SGD._init_group

        def half(self: Any, group: Any, params: Any, grads: Any, buffers: Any) -> Any:
            found = own(self, group, params, grads, buffers)
            grads[:] = [grad * (0.5 if grad.ndim > 1 else 1) for grad in grads]
            return found

        patch = mock.patch.object(torch.optim.SGD, "_init_group", half)
        patch.start()
    if number == 3:
        mock.patch.stopall()


def _step_of_class_patched(whole: Any, optimizer: Any, number: int) -> None:
    if number == 1:
        own = torch.optim.SGD.step

        def step(self: Any, *args: Any) -> Any:
            for param in self.param_groups[0]["params"]:
                if param.grad is not None:
                    param.grad.mul_(0.5)
            return own(self, *args)

        mock.patch.object(torch.optim.SGD, "step", step).start()
    if number == 3:
        mock.patch.stopall()


def _keep_later(whole: Any, optimizer: Any, number: int) -> None:
    if number == 1:
        _keep(optimizer)


def _zero_grad_of_class_patched(whole: Any, optimizer: Any, number: int) -> None:
    if number == 1:
        own, calls = torch.optim.SGD.zero_grad, []

        def zero_grad(self: Any, *args: Any) -> None:
            calls.append(1)
            if len(calls) % 2 == 0:
                own(self, *args)

        mock.patch.object(torch.optim.SGD, "zero_grad", zero_grad, create=True).start()
    if number == 3:
        mock.patch.stopall()


@pytest.mark.parametrize(
    "between",
    [_skip_later, _hook_later, _class_patched, _step_of_class_patched, _keep_later, _zero_grad_of_class_patched],
)
@on_ranks(2, timeout=200)
def test_what_the_program_changes_after_the_first_steps(between: Any) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=False)

    compare(make, ("plain", "flat", "eager"), between)


@on_ranks(2, timeout=200)
def test_a_zero_grad_of_the_program_keeps_gradients() -> None:
    """Set on the optimizer before it is extended, or of a class that is declared."""

    def wrapped(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        _keep(optimizer)
        return optimizer

    def declared(model: nn.Module) -> torch.optim.Optimizer:
        return declare_optimizer("elementwise")(KeepsGradients)(model.parameters(), lr=0.05)

    try:
        for make in (wrapped, declared):
            explained = compare(make, ("plain", "flat", "eager"))[-1]
            assert explained.startswith("0 of ")
            assert "its own step or zero_grad" in explained
    finally:
        delattr(KeepsGradients, "mfsdp_optimizer_kind")


def test_schedulers_do_not_leave_out_what_is_around_step(fake_world: int) -> None:
    model = fully_shard_model(parity.build(Net), fsdp_unit_modules=[Block])
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), flat=True)
    torch.optim.lr_scheduler.LinearLR(optimizer)
    assert not kinds.is_wrapped(optimizer)
    _skip_later(None, optimizer, 0)
    assert kinds.is_wrapped(optimizer)
    other = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), flat=True)
    _skip_later(None, other, 0)
    with pytest.raises(AttributeError, match="__func__"):  # as without fully_shard_optimizer
        torch.optim.lr_scheduler.LinearLR(other)


def test_torchs_own_classes_are_known_unless_their_code_is_changed() -> None:
    params = [nn.Parameter(torch.ones(2, 2))]
    elementwise = [
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    ]
    for name in elementwise:
        assert kinds.kind_of(getattr(torch.optim, name)(params, lr=0.1)) == "elementwise", name
    for name in ("Adafactor", "LBFGS", "Muon", "SparseAdam"):
        assert kinds.why_not_flat(getattr(torch.optim, name)(params, lr=0.1)), name
    optimizer, module = torch.optim.AdamW(params), sys.modules["torch.optim.adam"]
    with mock.patch.object(module, "adam", functools.wraps(module.adam)(lambda *a, **k: None)):
        assert "the program has replaced code of its class" in kinds.why_not_flat(optimizer)
    assert kinds.why_not_flat(optimizer) == ""


# -- declared ---------------------------------------------------------------------------------------------------------


@declare_optimizer("elementwise")
class Momentum(torch.optim.Optimizer):
    """Keeps a number of steps, a list, and a sum for each element."""

    def __init__(self, params: Any, counts: str = "") -> None:
        super().__init__(params, {"lr": 0.05})
        self.counts = counts

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if self.counts:
                group[self.counts] = group.get(self.counts, 0) + 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                assert type(param) is not nn.Parameter or dist.get_world_size() > 1
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                state.setdefault("past", []).append(state["step"])
                sums = state.setdefault("sums", torch.zeros_like(param))
                sums.mul_(0.9).add_(param.grad)
                param.sub_(sums, alpha=group["lr"] / (state["step"] + len(state["past"])) / group.get("count", 1))


class Derived(Momentum):
    pass


@on_ranks(2, timeout=200)
def test_declared_classes() -> None:
    (explained,) = compare(lambda model: Momentum(model.parameters()), ["eager"])
    assert str(explained) == "3 of 3 buckets are stepped in backward"
    compare(lambda model: Momentum(model.parameters()), ["flat"])
    (explained,) = compare(lambda model: Momentum(model.parameters(), "count"), ["eager"])
    assert "counts steps by itself" in str(explained)
    (explained,) = compare(lambda model: Derived(model.parameters()), ["eager"])
    assert "declare_optimizer('elementwise', Derived)" in str(explained), "a derived class may do anything"


def test_declarations_of_something_else() -> None:
    with pytest.raises(ValueError, match="takes the kind 'elementwise', 'blockwise', 'per_parameter', got 'flat'"):
        declare_optimizer("flat", Derived)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes classes derived from"):
        declare_optimizer("elementwise", nn.Linear)  # type: ignore[arg-type]


@on_ranks(2)
def test_an_optimizer_around_another_is_refused_although_declared() -> None:
    declared = declare_optimizer("elementwise")(type("Declared", (Lookahead,), {}))
    model = fully_shard_model(parity.build(Net), fsdp_unit_modules=[Block])
    optimizer = declared(torch.optim.SGD(model.parameters(), lr=0.1))
    for how in ("flat", "whole"):
        with pytest.raises(ValueError, match="this Declared holds another optimizer"):
            fully_shard_optimizer(optimizer, **{how: True})
    before = [param.to_local().clone() for param in model.parameters()]
    with parity.first_rank_warns(RuntimeWarning, "its attribute 'base' is a SGD, which a step may change"):
        fully_shard_optimizer(optimizer).state_dict()
    assert optimizer.param_groups[0]["count"] == 0
    assert all(torch.equal(param.to_local(), was) for param, was in zip(model.parameters(), before, strict=True))


class Bare(torch.optim.Optimizer):
    """Holds another optimizer, and does not call torch's constructor."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.param_groups, self.defaults = base, base.param_groups, base.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._patch_step_function()

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)


class Counting(torch.optim.SGD):
    """Keeps more in its state than that of parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.state["steps"] = 0

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] += 1
        return super().step(closure)


@on_ranks(2)
def test_what_torch_steps_though_it_is_built_otherwise() -> None:
    for make, prepared in itertools.product(
        (lambda params: Bare(torch.optim.SGD(params, lr=0.1)), Counting),
        (lambda optimizer: None, fully_shard_optimizer),
    ):
        ends = []
        for is_sharded in (False, True):
            model = parity.build(lambda: nn.Linear(3, 5))
            if is_sharded:
                model = fully_shard_model(model)
            optimizer = make(model.parameters())
            if is_sharded:
                prepared(optimizer)
            for _ in range(2):
                model(torch.ones(2, 3)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            ends.append([p.full_tensor() if is_sharded else p.detach() for p in model.parameters()])
        torch.testing.assert_close(ends[1], ends[0])
        assert not isinstance(optimizer, Counting) or optimizer.state["steps"] == 2


# -- state of one parameter -------------------------------------------------------------------------------------------


def _in_place(optimizer: Any, param: Any) -> None:
    optimizer.state[param]["step"].fill_(1)


def _through_data(optimizer: Any, param: Any) -> None:
    optimizer.state[param]["step"].data.zero_()


def _added(optimizer: Any, param: Any) -> None:
    optimizer.state[param]["step"] += 5


def _replaced(optimizer: Any, param: Any) -> None:
    optimizer.state[param]["step"] = torch.tensor(7.0)


def _loaded(optimizer: Any, param: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.state[param]["step"].zero_()
    optimizer.state[param]["exp_avg"].zero_()


def _all_of_them(optimizer: Any, param: Any) -> None:
    for state in optimizer.state.values():
        state["step"].zero_()


@pytest.mark.parametrize("change", [_in_place, _through_data, _added, _replaced, _loaded, _all_of_them])
@on_ranks(2, timeout=200)
def test_numbers_in_the_state_of_one_parameter(change: Any) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)

    steps: list[list[float]] = []

    def between(whole: Any, optimizer: Any, number: int) -> None:
        if number == 1:
            change(optimizer, whole.blocks[0].linear.weight)
        if number == 3:
            steps.append([float(optimizer.state[param]["step"]) for param in whole.parameters()])

    compare(make, ("plain", "flat", "eager"), between)
    assert len({tuple(each) for each in steps}) == 1, steps


@on_ranks(2)
def test_state_that_cannot_be_separated_is_not_lost() -> None:
    """A list of tensors belongs to a flat tensor as a whole: its parameters cannot be stepped one by one."""

    @declare_optimizer("elementwise")
    class Lists(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for param in self.param_groups[0]["params"]:
                (sums,) = self.state[param].setdefault("sums", [torch.zeros_like(param)])
                param.sub_(sums.add_(param.grad), alpha=0.1)

    model = fully_shard_model(parity.build(Net), fsdp_unit_modules=[Block])
    optimizer = fully_shard_optimizer(Lists(model.parameters()), flat=True)
    x = parity.batches(1, shape=(2, 2, 4, 4))[0, dist.get_rank()]
    model(x).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="cannot be separated by parameter"):
        optimizer.state_dict()
    optimizer.zero_grad()
    model(x).backward()
    model.module.blocks[0].linear.weight.grad = None
    before = [param.to_local().clone() for param in model.parameters()]
    with pytest.raises(RuntimeError, match="which cannot be separated"):
        optimizer.step()
    assert all(torch.equal(param.to_local(), was) for param, was in zip(model.parameters(), before, strict=True))
    assert flat_step_of(optimizer) is not None


# -- microbatches -----------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_losses_are_divided_where_the_program_says_so() -> None:
    found = []
    for how in ("plain", "as they are", "in the loss", "asked for"):
        model = fully_shard_model(parity.build(Net), fsdp_unit_modules=[Block])
        optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), flat=True)
        micros = parity.batches(4, shape=(2, 2, 4, 4))[:, dist.get_rank()]
        if how == "plain":
            for first, second in micros.view(2, 2, *micros.shape[1:]):
                model(first).backward()
                model(second).backward()
                optimizer.step()
                optimizer.zero_grad()
        else:
            by = 2 if how == "in the loss" else 1
            step = compile_step(
                model,
                optimizer,
                lambda model, x, by=by: model(x) / by,
                accumulation=2,
                divide_loss=how == "asked for",
                backend=None,
            )
            for first, second in micros.view(2, 2, *micros.shape[1:]):
                step.accumulate(first)
                step(second)
        found.append([param.to_local().clone() for param in model.parameters()])
    plain, summed, in_loss, asked = found
    assert all(map(torch.equal, plain, summed))
    assert all(map(torch.equal, in_loss, asked))
    assert not all(map(torch.equal, plain, asked))


@on_ranks(2, timeout=120)
def test_steps_of_fewer_microbatches() -> None:
    """The last step of an epoch, and steps that end in another way: numbers of loops that are written out."""
    micros = parity.batches(8, shape=(2, 2, 4, 4))[:, dist.get_rank()]
    windows = ((0, 1, 2), (3, 4), (5, 6, 7))

    def written_out(model: Any, optimizer: Any, drops: bool) -> None:
        for window in windows:
            for number in window if not (drops and len(window) < 3) else ():
                (model(micros[number]) / len(window)).backward()
            if optimizer is not None and not (drops and len(window) < 3):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()

    ends: dict[str, Callable[..., Any]] = {
        "finish": lambda step, model, optimizer, folder: step.finish(),
        "written out": lambda step, model, optimizer, folder: (
            model.finish_grad_sync(),
            [param.grad.mul_(1.5) for param in model.parameters()],
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5),
            optimizer.step(),
            optimizer.zero_grad(),
        ),
        "step.reset": lambda step, *_: step.reset(),
        "zero_grad": lambda step, model, optimizer, folder: optimizer.zero_grad(),
        "model.reset": lambda step, model, optimizer, folder: model.reset(),
        "load": lambda step, model, optimizer, folder: folder.load(model, optimizer),
    }
    for end, act in ends.items():
        drops = end not in ("finish", "written out")
        found = []
        for how in ("written out", "compile_step"):
            sharding = {} if end != "written out" else {"zero_dp_strategy": 0}
            model = fully_shard_model(parity.build(Net), fsdp_unit_modules=[Block], **sharding)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            if how == "written out":
                written_out(model, fully_shard_optimizer(optimizer, flat=True), drops)
            else:
                step = compile_step(model, optimizer, max_norm=0.5, accumulation=3, divide_loss=True, backend=None)
                folder = Checkpoints(shared_folder())
                step.finish()  # nothing to do
                for window in windows:
                    for number in window:
                        full = len(window) == 3 and number == window[-1]
                        (step if full else step.accumulate)(micros[number])
                    if len(window) == 3:
                        folder.save(1, model, optimizer)
                    else:
                        with pytest.raises(RuntimeError, match=r"step\.finish\(\)"):
                            step.accumulate(micros[0])
                        act(step, model, optimizer, folder)
            found.append([param.to_local().clone() for param in model.parameters()])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=end)


@on_ranks(2)
def test_an_error_forgets_the_microbatches_of_its_step() -> None:
    """The next step begins with its first microbatch, and has the numbers of one without an error before."""
    found = []
    x = parity.batches(2, shape=(2, 2, 4, 4))[:, dist.get_rank()]
    for fails in (True, False):
        model = fully_shard_model(parity.build(Net), fsdp_unit_modules=[Block])
        step = compile_step(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation=2, backend=None)
        if fails:
            step.accumulate(x[1])
            with pytest.raises(TypeError, match="int"):
                step(0)
        step.accumulate(x[0])
        step(x[1])
        found.append([param.to_local().clone() for param in model.parameters()])
    assert all(map(torch.equal, *found))
