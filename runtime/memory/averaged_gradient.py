"""Results of reductions of parameters at rest, with gradients that are averaged over ranks.

A penalty (``sum(p.pow(2).sum() for p in model.parameters())``) is the same number on every rank. The factor that it is
multiplied by may not be: a weight of the batch, a number of tokens. Its gradient then differs between ranks, and each
rank would scale the rows that it holds by a different factor. Therefore the gradient is averaged over ranks before it
reaches the rows, like the gradients of parameters in forward. :class:`AveragedGradient` adds the node for this to the
autograd graph. The operators of sharded tensors cannot add it, because they run below autograd.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..ranks.agreement import announce
from ..topology import Group
from .redistribute import as_real

__all__ = ["AveragedGradient"]


class AveragedGradient(Tensor):
    """A tensor, equal on all ranks, whose gradient becomes the mean over ranks.

    Every operation runs on an ordinary tensor behind that mean; only the type is unusual.
    """

    _ordinary: Tensor | None
    _groups: Sequence[Group]
    _parameter: str

    @staticmethod
    def of(value: Tensor, groups: Sequence[Group], parameter: str) -> AveragedGradient:
        """Wrap a tensor.

        Args:
            value: Tensor computed below autograd. Autograd sees the result as the output of an operator.
            groups: Groups whose ranks to average over, one group after the other.
            parameter: Name of the parameter that the value is computed from.
        """
        averaged = value.as_subclass(AveragedGradient)
        averaged._ordinary, averaged._groups, averaged._parameter = None, groups, parameter
        return averaged

    @property
    def ordinary(self) -> Tensor:
        with compat.DisableTorchFunctionSubclass(), torch.enable_grad():
            if vars(self)["_ordinary"] is None:
                self._ordinary = _Average.apply(self.as_subclass(Tensor), self._groups, self._parameter)
        ordinary: Tensor = vars(self)["_ordinary"]
        return ordinary

    @classmethod
    @compat.python_only
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = compat.tree_map_only(AveragedGradient, lambda t: t.ordinary, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Average(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, groups: Sequence[Group], parameter: str) -> Tensor:
        ctx.groups, ctx.parameter = groups, parameter
        return value.clone()  # a view could not be written to

    @staticmethod
    @compat.python_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _Mean.apply(gradient, ctx.groups, ctx.parameter), None, None


class _Mean(torch.autograd.Function):
    """The mean over ranks. Its backward is the same operation."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, groups: Sequence[Group], parameter: str) -> Tensor:
        ctx.groups, ctx.parameter = groups, parameter
        what = f"a gradient of what was computed from {parameter!r}"
        is_complex, value = value.is_complex(), as_real(value)
        for group in groups:
            announce(what, group.name, parameter)
            if value.device.type == "cpu":  # of parameters in host memory, for which the group may have no backend
                value = compat.all_reduce_on_host(value, "sum", group.name) / group.size
            else:
                value = compat.wait_tensor(compat.all_reduce(value, "sum", group.name)) / group.size
        return torch.view_as_complex(value) if is_complex else value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _Mean.apply(gradient, ctx.groups, ctx.parameter), None, None
