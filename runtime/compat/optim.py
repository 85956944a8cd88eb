"""Functions of torch's optimizers."""

from __future__ import annotations

import inspect
import sys
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim._muon import _adjust_lr as muon_learning_rate
from torch.optim._muon import _zeropower_via_newtonschulz as orthogonalize

from .frames import frames

__all__ = [
    "complete_hooks",
    "has_step_hooks",
    "is_of_scheduler",
    "is_running",
    "muon_learning_rate",
    "orthogonalize",
    "step_without_hooks",
]


def complete_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Add what torch's methods for hooks on state dicts need, and optimizers lack whose constructor is not torch's."""
    for name in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
        vars(optimizer).setdefault(f"_optimizer_{name}_hooks", OrderedDict())


def is_running(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this thread is inside a method of ``optimizer``, as its class has it."""
    # Other frames are not looked into: before Python 3.13, f_locals of a running function keeps its variables alive.
    methods = (
        inspect.unwrap(each) for kind in type(optimizer).__mro__ for each in vars(kind).values() if callable(each)
    )
    codes = {getattr(method, "__code__", None) for method in methods}
    return any(frame.f_code in codes and frame.f_locals.get("self") is optimizer for frame in frames())


def step_without_hooks(cls: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return ``cls.step`` without what torch's constructor has put around it: global hooks, and a profiler's record."""
    return cls.step.__wrapped__ if getattr(cls.step, "hooked", False) else cls.step  # type: ignore[attr-defined]


def is_of_scheduler(step: Any) -> bool:
    """Whether a method was put around an optimizer's step by a scheduler of torch, which only counts calls."""
    code = getattr(step, "__code__", None)
    return code is not None and code.co_filename == torch.optim.lr_scheduler.__file__


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks of the program run before or after an optimizer's step: its own, or those of all optimizers."""
    own = [hooks for name, hooks in vars(optimizer).items() if "_step_" in name and name.endswith("_hooks")]
    of_all = [
        hooks for name, hooks in vars(sys.modules[torch.optim.Optimizer.__module__]).items() if name.endswith("_hooks")
    ]
    others = [hook for hooks in of_all if isinstance(hooks, dict) for hook in hooks.values()]
    ours = "mfsdp_compile."
    return any(own) or any(not (getattr(hook, "__module__", None) or "").startswith(ours) for hook in others)
