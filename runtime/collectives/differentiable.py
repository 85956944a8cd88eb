"""Differentiable collectives, compiled or not, for models that communicate themselves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import compat


def gather(part: Tensor, ranks: int, group: str) -> Tensor:
    """Concatenate the tensors of all ranks along the first dimension. The backward is a reduce-scatter (sum).

    Args:
        part: ``[n, ...]``, with equal shape on all ranks.
        ranks: Number of ranks in the group.
        group: Name of the group.

    Returns:
        ``[ranks * n, ...]``.
    """
    gathered: Tensor = _MoveFunction.apply(part, True, ranks, group)
    return gathered


def scatter(whole: Tensor, ranks: int, group: str) -> Tensor:
    """Return this rank's part of the sum over ranks: ``[ranks * n, ...]`` to ``[n, ...]``.

    The adjoint of :func:`gather`.
    """
    part: Tensor = _MoveFunction.apply(whole, False, ranks, group)
    return part


class _MoveFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gathers: bool, ranks: int, group: str) -> Tensor:
        ctx.back = not gathers, ranks, group
        return _moved(x, gathers, ranks, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _moved(gradient, *ctx.back), None, None, None


def _moved(x: Tensor, gathers: bool, ranks: int, group: str) -> Tensor:
    if gathers:
        return compat.wait_tensor(compat.all_gather(x.contiguous(), ranks, group))
    return compat.wait_tensor(compat.reduce_scatter(x.contiguous(), "sum", ranks, group))
