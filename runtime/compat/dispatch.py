"""Modes that see operators and functions, and calls of modules."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from types import FrameType
from typing import Any

import torch
from torch import DisableTorchFunction, DisableTorchFunctionSubclass, DispatchKey, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    return_and_correct_aliasing,
)
from torch.utils.checkpoint import CheckpointFunction, create_selective_checkpoint_contexts

from .autograd import in_backward
from .frames import frames
from .version import MODULE_FILE

__all__ = [
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "DispatchKey",
    "TorchDispatchMode",
    "TorchFunctionMode",
    "in_call_of",
    "in_function_transform",
    "in_functional_call",
    "in_recomputation",
    "is_called_by_autograd",
    "is_called_by_backward",
    "is_called_by_transform",
    "is_composite",
    "no_torch_function",
    "outside_selective_checkpoint",
    "refuses_shared_memory",
    "return_and_correct_aliasing",
    "run_higher_order",
    "without_modes",
]


no_torch_function = nn.Parameter.__torch_function__
"""What a class has as ``__torch_function__`` whose instances are tensors like others to functions."""


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Context that hides operators from all dispatch modes, and functions from all function modes."""
    with _disable_current_modes(), DisableTorchFunction():
        yield


def outside_selective_checkpoint() -> contextlib.AbstractContextManager[None]:
    """Context that hides operators from selective activation checkpointing.

    Selective checkpointing counts operators, saves the results of some, and matches them by position when it
    recomputes.
    """
    if any(isinstance(mode, _SELECTIVE_CHECKPOINT) for mode in _get_current_dispatch_mode_stack()):
        outside: contextlib.AbstractContextManager[None] = _disable_current_modes()
        return outside
    return contextlib.nullcontext()


_SELECTIVE_CHECKPOINT: Any = tuple(map(type, create_selective_checkpoint_contexts([])))


def run_higher_order(operator: Any, args: Any, kwargs: Any) -> Any:
    """Run a higher-order operator that a dispatch mode was given. Modes see the operators of a subgraph's calls."""
    if operator is not torch.ops.higher_order.invoke_subgraph:
        return operator(*args, **kwargs)
    subgraph, _, *operands = args
    return subgraph(list(operands)) if getattr(subgraph, "_boxed_call", False) else subgraph(*operands)


_REFUSE_SHARED_MEMORY = ("cond", "while_loop", "scan", "associative_scan", "map_impl")


def refuses_shared_memory(operator: Any) -> bool:
    """Whether a higher-order operator refuses bodies whose operands share memory."""
    return isinstance(operator, torch._ops.HigherOrderOperator) and operator.name() in _REFUSE_SHARED_MEMORY


def is_composite(func: Any) -> bool:
    """Whether an operator consists of others. In inference mode, subclasses are given it whole."""
    return bool(func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))


def in_call_of(modules: Collection[nn.Module]) -> bool:
    """Whether this thread is inside the call of one of ``modules``.

    This is for code that runs eagerly in the middle of compiled code: the forwards around it were traced and do not
    run. A call of a module leaves a frame of ``nn.Module._call_impl`` on the stack, even if Dynamo has rewritten it.
    Other methods of ``nn.Module`` (``apply``, ``__repr__``, ``state_dict``) do not count as calls.
    """
    for frame in frames():
        if frame.f_code.co_filename == MODULE_FILE and "_call_impl" in frame.f_code.co_name:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and owner in modules:
                return True
    return False


_TRANSFORMS = ("torch._functorch.eager_transforms", "torch._functorch.vmap")


def in_function_transform() -> bool:
    """Whether a transform of ``torch.func`` runs in this thread."""
    return any(frame.f_globals.get("__name__") in _TRANSFORMS for frame in frames())


def is_called_by_transform() -> bool:
    """Whether the running operator is one on what a transform of ``torch.func`` has wrapped.

    The wrappers hide ``__torch_function__`` of what they wrap, so that the first thing to see it is this operator.
    """
    return torch._C._is_torch_function_enabled() and in_function_transform()


_STATELESS_FILE = torch.nn.utils.stateless.__file__


def in_functional_call() -> bool:
    """Whether this thread is in ``torch.func.functional_call``, which puts other tensors in places of parameters."""
    return any(
        frame.f_code.co_filename == _STATELESS_FILE and frame.f_code.co_name == "_functional_call" for frame in frames()
    )


_CHECKPOINT_FILE = CheckpointFunction.backward.__code__.co_filename


def in_recomputation() -> bool:
    """Whether this thread is inside a function that activation checkpointing computes again, in backward."""
    return in_backward() and any(
        frame.f_code.co_filename == _CHECKPOINT_FILE and frame.f_code.co_name in ("recompute_fn", "backward")
        for frame in frames()
    )


_RUNTIME = str(__package__).rpartition(".")[0]
_OPERATOR_METHODS = ("__torch_dispatch__", "__torch_function__")


def is_called_by_backward() -> bool:
    """Whether Python code that a backward calls (a hook, a custom function) has called the running operator.

    The other callers are autograd itself, for a derivative, a function that activation checkpointing computes again,
    and optimizers of torch, whose learning rates and numbers of steps are the same on every rank. The operator is one
    of a class or a mode of :mod:`mfsdp_compile.runtime`, whose own frames do not count.
    """
    caller = _caller_of_operator()
    by_optimizer = caller is not None and caller.f_globals.get("__package__") == "torch.optim"
    return caller is not None and not (_is_engine(caller) or by_optimizer or in_recomputation())


def is_called_by_autograd() -> bool:
    """Whether autograd itself has called the running operator, in backward, for a derivative."""
    caller = _caller_of_operator()
    return caller is not None and _is_engine(caller)


def _caller_of_operator() -> FrameType | None:
    for frame in frames():
        package = str(frame.f_globals.get("__package__"))
        if not package.startswith(_RUNTIME) and frame.f_code.co_name not in _OPERATOR_METHODS:
            return frame
    return None


def _is_engine(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__") == "torch.autograd.graph" and frame.f_code.co_name == "_engine_run_backward"
