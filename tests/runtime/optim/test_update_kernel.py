"""Compiled steps: the numbers of ``optimizer.step()`` up to rounding, and what is left to the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import zoo
from parity import EAGER, INDUCTOR
from pool import on_ranks
from test_step_in_backward import OPTIMIZERS, Lion, Trained
from torch import Tensor, nn

from mfsdp_compile import compile_step, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.diagnostics.doctor import STRATEGIES, mesh_arguments
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.optim.update_kernel import UpdateKernel, UpdateKernels

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


COMPILED: dict[str, Optim] = {
    **{name: OPTIMIZERS[name] for name in OPTIMIZERS if name not in ("Muon", "CountsInGroups")},
    "maximizes": lambda params: torch.optim.Adam(params, lr=1e-2, maximize=True, foreach=True, weight_decay=0.1),
    "Nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "plain SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.1, centered=True),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=0.1),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=1e-2),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=1e-2),
}
LEFT: dict[str, tuple[Optim, str]] = {
    "RAdam": (lambda params: torch.optim.RAdam(params, lr=1e-2), "cannot be traced: GuardOnDataDependentSymNode"),
    "ASGD": (lambda params: torch.optim.ASGD(params, lr=1e-2), "cannot be traced: GuardOnDataDependentSymNode"),
    "itself": (LooksAtItself, "keeps something in itself"),
    "Python": (CountsInPython, "its state 'step' is a int, and not a tensor"),
    "integers": (CountsInIntegers, "its state 'step' counts in torch.int64"),
    "replaces": (Replaces, "keeps something in other tensors of its state"),
    "warms": (Warms, "cannot be traced: GuardOnDataDependentSymNode"),
    "powers": (Powers, "aten.clamp_.default takes or gives a number"),
    "a tensor": (
        lambda params: torch.optim.AdamW(params, weight_decay=torch.tensor(0.1)),
        "'weight_decay' is a tensor",
    ),
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
        kernel(flat, param.grad, torch.ones(()), optimizer.param_groups[0]["lr"], state)
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


def test_settings_that_change() -> None:
    """Three kernels are compiled for a group, whose settings change at each step; and one for each group otherwise."""
    optimizer, flat, state = stepped(lambda params: torch.optim.SGD(params, lr=0.1))
    kernels = UpdateKernels(optimizer, compat.step_without_hooks(torch.optim.SGD), {})
    group = optimizer.param_groups[0]
    found = []
    for decay in (0.1, 0.2, 0.3, 0.4, 0.5):
        group["weight_decay"] = decay
        found.append(kernels.find(flat, group, state, False))
    assert [isinstance(kernel, UpdateKernel) for kernel in found] == [True] * 3 + [False] * 2
    assert "keep changing" in str(found[-1])
    others = [{**group, "weight_decay": decay} for decay in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)]
    assert all(isinstance(kernels.find(flat, other, state, False), UpdateKernel) for other in others)
    assert kernels.find(flat, others[0], state, False) is found[0]


# -- training ---------------------------------------------------------------------------------------------------------


class Watched:
    """Counts the runs that kernels step over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, step = 0, UpdateKernel.__call__

        def counted(kernel: UpdateKernel, *args: Any) -> None:
            self.count += 1
            step(kernel, *args)

        monkeypatch.setattr(UpdateKernel, "__call__", counted)


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


@on_ranks(2)
def test_groups_state_and_steps_that_are_written_out() -> None:
    """Groups with settings of their own, a frozen and an ignored parameter, and state that is loaded in between."""

    def build() -> tuple[Any, Any, Any]:
        module = parity.build(zoo.Uneven)
        next(module.parameters()).requires_grad_(False)
        model = fully_shard_model(module, fsdp_unit_modules=[zoo.Block])
        params = [param for param in model.parameters() if param.requires_grad]
        groups = [{"params": [p for p in params if p.ndim == n], "weight_decay": 0.1 * n} for n in (1, 2)]
        optimizer = fully_shard_optimizer(torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2), flat=True)
        return model, optimizer, compile_step(model, optimizer, backend=None, compile_optimizer=True, max_norm=0.5)

    def write_out(model: Any, optimizer: Any, batch: Tensor) -> None:
        model(batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    data = parity.batches(6, shape=(3, 8))[:, torch.distributed.get_rank()]
    (model, optimizer, _), (other, other_optimizer, step) = build(), build()
    for number, batch in enumerate(data):
        write_out(model, optimizer, batch)
        if number == 2:
            write_out(other, other_optimizer, batch)
        else:
            step(batch)
        if number == 3:
            other_optimizer.load_state_dict(other_optimizer.state_dict())
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(two.to_local(), one.to_local(), rtol=1e-5, atol=1e-6)
    for one, two in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert one.keys() == two.keys()
        assert one["step"].item() == two["step"].item() == len(data)
    assert "as 2 kernels" in step.explain()


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
        assert "not compiled; its step cannot be traced" in other.step.explain()
