"""DTensors whose operators this package computes, below autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import compat


class Dispatched(DTensor):
    """A DTensor whose functions go to :attr:`call`, and their operators to :attr:`dispatch`; :mod:`.operators` sets
    both."""

    call: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    dispatch: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]

    def unsharded(self, what: str) -> Tensor:
        """Return the whole tensor for ``what``, which computes with this rank's own ones; its gradient is averaged."""
        raise NotImplementedError

    @classmethod
    @compat.python_only
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return Dispatched.dispatch(func, args, kwargs or {})

    @classmethod
    @compat.python_only
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return Dispatched.call(func, args, kwargs or {})


def run_operators(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function whose operators are to be dispatched.

    Before torch 2.13, DTensor handles operators of its subclasses, so a dispatch mode intercepts them.
    """
    with compat.DisableTorchFunctionSubclass():
        if compat.DTENSOR_SUBCLASSES_DISPATCH or getattr(func, "__self__", None) in _PLAIN_ATTRIBUTES:
            return func(*args, **kwargs)
        with _DispatchMode():
            out = func(*args, **kwargs)
        if torch.is_grad_enabled() and isinstance(out, Tensor) and out.grad_fn is not None:
            out.register_hook(lambda _: refuse_backward())
        return out


class _DispatchMode(compat.TorchDispatchMode):
    supports_higher_order_operators = True  # a backward of a compiled graph calls regions

    @compat.python_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(leaf, Dispatched) for leaf in compat.tree_leaves((args, kwargs))):
            return Dispatched.dispatch(func, args, kwargs)
        return func(*args, **kwargs)


def dispatching() -> contextlib.AbstractContextManager[Any]:
    """Context for operators of :class:`Dispatched` tensors that are called while one is computed."""
    return contextlib.nullcontext() if compat.DTENSOR_SUBCLASSES_DISPATCH else _DispatchMode()


_PLAIN_ATTRIBUTES = {
    getattr(Tensor, name)
    for name in ("device", "dtype", "grad", "grad_fn", "is_leaf", "layout", "ndim", "requires_grad", "shape")
}


def refuse_backward() -> None:
    """Raise if this torch cannot differentiate what is computed from shards: their gradients would lose their rows."""
    if compat.DTENSOR_SUBCLASSES_DISPATCH:
        return
    raise RuntimeError(
        f"torch {torch.__version__} cannot differentiate through sharded parameters between steps; torch 2.13 and "
        "newer can. Compute it from module.parameter inside a forward."
    )
