"""What an optimizer's step of a parameter depends on, found out by steps over small tensors.

A step over something else than single whole parameters is right for some optimizers only. What kind an optimizer is,
its class does not tell. A shallow copy of it, with groups of the same settings, steps small random tensors in two ways,
and the results are compared. Preconditioners may begin late, and be computed rarely: the copy also steps with every
such number at 1.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..memory.bucket import ParamHandle

_Shapes = Sequence[tuple[int, ...]]
_Run = Callable[..., list[Tensor]]
"""``run(steps, apart=False)``: see :func:`_run`."""

_SMALL = ((6, 4), (8,), (4, 4))
_BLOCKS = ((16, 16), (256,), (32, 8))  # whole blocks of optimizers that quantize their state
_TRIALS = ((True, 3), (False, 30))
"""Whether numbers of steps are made 1, and how many steps are taken: some preconditioners begin after 25."""
_COUNTS = ("step", "freq", "every", "gap", "interval")
"""Parts of names of settings that say after how many steps something begins or is repeated."""


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step of several parameters is that of all their elements in one tensor; True if that cannot be tried.

    On a rank, the tensor holds rows of parameters only, so that nothing may depend on the rest.
    """
    if depends_on_others(optimizer):
        return False

    def compare(run: _Run, steps: Sequence[Sequence[Tensor]]) -> bool:
        (joined,) = run([[_joined(tensors)] for tensors in steps])
        return _alike(_joined(run(steps)), joined)

    return _holds(optimizer, compare, _BLOCKS)


def depends_on_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step of one parameter depends on other parameters of the group; False if that cannot be tried."""

    def compare(run: _Run, steps: Sequence[Sequence[Tensor]]) -> bool:
        alone = [run([[tensors[i]] for tensors in steps])[0] for i in range(len(_SMALL))]
        return all(map(_alike, run(steps), alone))

    # D-adaptation and Prodigy estimate one distance for all parameters, too slowly to be seen here.
    estimates = any("growth_rate" in group for group in optimizer.param_groups)
    return estimates or not _holds(optimizer, compare, _SMALL)


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is one of torch's, and not of a class derived from one."""
    return type(optimizer).__module__.startswith("torch.optim.")


def counts_calls(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step must be called once for all parameters: a call for each of them would count as several steps.

    Some optimizers count steps in their groups, or in themselves. True if that cannot be tried.
    """
    if is_of_torch(optimizer):
        return False  # torch's own count in each parameter's state

    def compare(run: _Run, steps: Sequence[Sequence[Tensor]]) -> bool:
        return all(map(_alike, run(steps), run(steps, apart=True)))

    return not _holds(optimizer, compare, _SMALL, if_untried=False)


def _holds(
    optimizer: torch.optim.Optimizer,
    compare: Callable[[_Run, Sequence[Sequence[Tensor]]], bool],
    shapes: _Shapes,
    if_untried: bool = True,
) -> bool:
    was_tried = False
    for group, (hastened, count) in itertools.product(optimizer.param_groups, _TRIALS):
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        steps = [[tensor.to(device) for tensor in tensors] for tensors in _steps(shapes, count)]
        run = functools.partial(_run, optimizer, group, hastened)
        devices = [device] if device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
                if not compare(run, steps):
                    return False
                was_tried = True
        except Exception:  # anything: the optimizer may take no such tensors, and steps of a copy harm nobody
            continue
    return was_tried or if_untried


def _steps(shapes: _Shapes, count: int) -> list[list[Tensor]]:
    """Return parameters, and their gradients in ``count`` steps, each with a direction and a size of its own."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator) for shape in shapes]

    sizes = (0.1, 1.0, 10.0)
    params, directions = draw(), draw()
    noise = [draw() for _ in range(count)]
    gradients = [
        [size * (direction + 0.3 * each) for size, direction, each in zip(sizes, directions, noises, strict=True)]
        for noises in noise
    ]
    return [params, *gradients]


def _run(
    optimizer: Any, group: dict[str, Any], hastened: bool, steps: Sequence[Sequence[Tensor]], apart: bool = False
) -> list[Tensor]:
    """Return by how much parameters that begin as ``steps[0]`` change by a step with each of the other gradients.

    Args:
        hastened: Whether settings that count steps are made 1.
        apart: Whether each parameter is stepped by a call of its own.
    """
    params = [tensor.clone().requires_grad_() for tensor in steps[0]]
    handle: ParamHandle | None = getattr(group["params"][0], "mfsdp_handle", None) if group["params"] else None
    attribute = "grad" if handle is None else handle.bucket.plan.grad_attribute
    trial = object.__new__(type(optimizer))
    held = {key: _copied(value) for key, value in vars(optimizer).items()}
    vars(trial).update({k: OrderedDict() if k.endswith("_hooks") else v for k, v in held.items()})
    if hastened:
        vars(trial).update(dict.fromkeys(filter(_counts(held), held), 1))
    vars(trial).pop("step", None)  # a scheduler's wrapper, which counts
    settings = {key: _copied(value) for key, value in group.items()}
    if hastened:
        settings.update(dict.fromkeys(filter(_counts(settings), settings), 1))
    trial.param_groups, trial.state = [{**settings, "params": params}], defaultdict(dict)
    # torch.manual_seed would also seed other devices, whose generators are not restored.
    torch.default_generator.manual_seed(0)
    if params[0].device.type == "cuda":
        with torch.cuda.device(params[0].device):
            torch.cuda.manual_seed(0)
    step = compat.step_without_hooks(type(optimizer))
    for gradients in steps[1:]:
        for param, gradient in zip(params, gradients, strict=True):
            setattr(param, attribute, gradient.clone())
        for some in [[param] for param in params] if apart else [params]:
            trial.param_groups[0]["params"] = some
            step(trial)
    return [param.detach() - before for param, before in zip(params, steps[0], strict=True)]


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value


def _counts(settings: dict[str, Any]) -> Callable[[str], bool]:
    return lambda key: type(settings[key]) is int and settings[key] > 1 and any(part in key for part in _COUNTS)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _alike(one: Tensor, other: Tensor) -> bool:
    # Kernels may round the last elements of a tensor otherwise than those that fill a vector register: an error in the
    # last place of parameters near 1 at each step, and what a step makes of it.
    tolerance = 30 * torch.finfo(one.dtype).eps + 1e-3 * one.abs().max().item()
    return torch.allclose(one, other, rtol=0, atol=tolerance, equal_nan=True)
