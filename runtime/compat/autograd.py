"""Autograd's engine, hooks on saved tensors, and function transforms."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch._C import _current_graph_task_id, _will_engine_execute_node
from torch._C._autograd import _top_saved_tensors_default_hooks  # type: ignore[attr-defined]
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as below_function_transforms
from torch.autograd.graph import saved_tensors_hooks

__all__ = [
    "Function",
    "GradientRequest",
    "Uncaptured",
    "backward_id",
    "below_autograd",
    "below_function_transforms",
    "called_below_autograd",
    "convert_arguments_of_functions",
    "counts_tensors",
    "hook_saved_tensors",
    "in_backward",
    "on_backward_end",
    "profiler_runs",
    "refuses_saved_tensor_hooks",
    "unhook_saved_tensors",
    "wanted",
    "without_hook",
]


# ``below_function_transforms()`` is a context that hides operators from the running transforms of ``torch.func``. What
# is computed inside is a constant to them.
below_autograd = torch._C._AutoDispatchBelowAutograd
"""Context that calls operators without autograd. Those with an autograd kernel in Python (the functional collectives)
are several times faster there."""


def called_below_autograd(operator: Any) -> Any:
    """Return what calls a functional collective without autograd; other operators as they are.

    Kernels of others may run a user's code, which may use autograd.
    """
    if getattr(operator, "namespace", "") != "_c10d_functional":
        return operator

    def call(*args: Any, **kwargs: Any) -> Any:
        with below_autograd():
            return operator(*args, **kwargs)

    return call


_execution_engine = torch.autograd.Variable._execution_engine


def in_backward() -> bool:
    """Whether this thread is inside ``backward()``. True in hooks, and while activation checkpointing recomputes."""
    return _current_graph_task_id() != -1


backward_id = _current_graph_task_id
"""Returns a number that is the same throughout one backward pass; -1 outside of any."""


# A function of Python's in torch 2.13, one of C in 2.15.
_apply: Any = inspect.getattr_static(torch.autograd.Function, "apply")


class Function(torch.autograd.Function):
    """A function of this package, which gets its arguments as they are; see :func:`convert_arguments_of_functions`."""

    apply: Any = _apply


class Uncaptured(Function):
    """A function whose backward has effects that compiled autograd would lose: it refuses to be captured.

    Compiled autograd asks all nodes of a backward for their keys before it runs any.
    """

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> Any:
        raise NotImplementedError(
            "Compiled autograd (torch._dynamo.config.compiled_autograd) would capture a backward through sharded "
            "parameters, whose gradients are reduced and accumulated outside of what it captures. Switch it off: "
            'torch.compile(model, backend="mfsdp") compiles the backward together with the forward.'
        )


def convert_arguments_of_functions(convert: Callable[[type, Any], Any]) -> None:
    """Let ``convert`` replace each argument of autograd functions, given their class, before autograd sees it.

    They are the only functions of tensors that ask no tensor (``__torch_function__``) and no mode.
    """

    @functools.wraps(torch.autograd.Function.apply)
    def converting(cls: type, *args: Any, **kwargs: Any) -> Any:
        apply = _apply.__get__(None, cls)
        return apply(*[convert(cls, a) for a in args], **{k: convert(cls, v) for k, v in kwargs.items()})

    torch.autograd.Function.apply = classmethod(converting)  # type: ignore[assignment,method-assign]


class GradientRequest(Enum):
    """What a running backward does with the gradient of a leaf."""

    NOT = "nothing"
    ADDED = "adds it to .grad"
    RETURNED = "returns it"  # torch.autograd.grad


def wanted(leaf: Any) -> GradientRequest:
    """In backward, return what happens to the gradient of a leaf, given by its node.

    ``torch.autograd.grad`` and ``backward(inputs=...)`` request only some gradients.
    """
    try:
        return GradientRequest.ADDED if _will_engine_execute_node(leaf) else GradientRequest.NOT
    except RuntimeError:  # torch raises this for a leaf whose gradient torch.autograd.grad returns
        return GradientRequest.RETURNED


def counts_tensors(hook: Callable[..., Any]) -> bool:
    """Whether a tensor hook was created by ``torch.autograd.graph.register_multi_grad_hook``."""
    return getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook.<locals>.get_inner_hook")


def on_backward_end(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the innermost running backward has finished. It does not run if the backward raises."""
    _execution_engine.queue_callback(callback)


def hook_saved_tensors(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> bool:
    """Install default hooks on saved tensors in this thread if it records gradients and has none. Return whether.

    Checkpointing and offloading install hooks, and transforms like ``torch.func.grad`` allow none.
    """
    if not torch.is_grad_enabled() or _top_saved_tensors_default_hooks(False) is not None:
        return False
    try:
        saved_tensors_hooks(pack, unpack).__enter__()
    except RuntimeError:  # a transform allows none
        return False
    return True


def unhook_saved_tensors(pack: Callable[[Tensor], Any]) -> None:
    """Remove this thread's topmost default hooks on saved tensors, if they are ``pack``'s."""
    top = _top_saved_tensors_default_hooks(False)
    if top is not None and top[0] == pack:
        saved_tensors_hooks(*top).__exit__()


def refuses_saved_tensor_hooks(error: BaseException) -> bool:
    """Whether a transform of ``torch.func`` has raised ``error`` because there are default hooks on saved tensors."""
    return "torch.func" in str(error) and "saved tensor hooks" in str(error)


@contextlib.contextmanager
def without_hook(pack: Callable[..., Any]) -> Iterator[None]:
    """Temporarily remove this thread's default hooks on saved tensors, as long as the topmost is ``pack``'s."""
    taken: list[tuple[Any, Any]] = []
    while (top := _top_saved_tensors_default_hooks(False)) is not None and top[0] == pack:
        taken.append(top)
        saved_tensors_hooks(*top).__exit__()
    try:
        yield
    finally:
        for hooks in reversed(taken):
            saved_tensors_hooks(*hooks).__enter__()


profiler_runs = torch.autograd._profiler_enabled
"""Whether torch's profiler is recording."""
