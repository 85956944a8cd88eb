"""What an optimizer's step of a parameter depends on, found out by steps over small tensors.

A step over something else than single whole parameters is right for some optimizers only. What kind an optimizer is, its
class does not tell. A shallow copy of it, with groups of the same settings, steps small random tensors in two ways, and the
results are compared.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["depends_on_others", "is_elementwise"]

STEPS = 30  # preconditioners set in late: some after 25 steps
_SHAPES = ((6, 4), (8,), (4, 4))


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step of several parameters is that of all their elements in one tensor; True if that cannot be tried."""

    def compare(group: dict[str, Any], steps: Sequence[Sequence[Tensor]]) -> bool:
        apart = _run(optimizer, group, steps)
        (joined,) = _run(optimizer, group, [[_joined(tensors)] for tensors in steps])
        return _alike([_joined(apart)], [joined])

    return _holds(optimizer, compare)


def depends_on_others(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step of one parameter depends on other parameters of the group; False if that cannot be tried."""

    def compare(group: dict[str, Any], steps: Sequence[Sequence[Tensor]]) -> bool:
        alone = [_run(optimizer, group, [[tensors[i]] for tensors in steps])[0] for i in range(len(_SHAPES))]
        return _alike(_run(optimizer, group, steps), alone)

    return not _holds(optimizer, compare)


def _holds(optimizer: torch.optim.Optimizer, compare: Any) -> bool:
    for group in optimizer.param_groups:
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        generator = torch.Generator().manual_seed(0)
        steps = [[torch.randn(s, generator=generator).to(device) for s in _SHAPES] for _ in range(STEPS + 1)]
        devices = [device] if device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):
                if not compare(group, steps):
                    return False
        except Exception:  # anything: the optimizer may take no such tensors, and steps of a copy harm nobody
            continue
    return True


def _run(optimizer: Any, group: dict[str, Any], steps: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return parameters that begin as ``steps[0]`` after a step with each of the other gradients."""
    params = [tensor.clone().requires_grad_() for tensor in steps[0]]
    trial = object.__new__(type(optimizer))
    held = {k: copy.copy(v) if isinstance(v, (dict, list, set)) else v for k, v in vars(optimizer).items()}
    vars(trial).update({k: OrderedDict() if k.endswith("_hooks") else v for k, v in held.items()})
    vars(trial).pop("step", None)  # a scheduler's wrapper, which counts
    settings = {key: value.clone() if isinstance(value, Tensor) else copy.copy(value) for key, value in group.items()}
    trial.param_groups, trial.state = [{**settings, "params": params}], defaultdict(dict)
    torch.manual_seed(0)
    for gradients in steps[1:]:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient.clone()
        type(optimizer).step(trial)
    return [param.detach() for param in params]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _alike(mine: Sequence[Tensor], its: Sequence[Tensor]) -> bool:
    # Kernels may round the last elements of a tensor otherwise than those that fill a vector register.
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-4, equal_nan=True) for a, b in zip(mine, its, strict=True))
