"""Operators on gradients that are not reduced yet."""

from __future__ import annotations

from typing import Any

import torch

from ... import compat
from ..replicated import as_rows
from ..tensor import UnreducedGradient, refuse_unreduced

aten = torch.ops.aten


def compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    waiting = [t for t in compat.tree_leaves((args, kwargs)) if isinstance(t, UnreducedGradient)]
    if func in (aten.detach.default, aten.alias.default):
        return waiting[0]
    if func is aten.is_same_size.default:
        return args[0].shape == args[1].shape
    if func in (aten.zero_.default, aten._foreach_zero_.default):
        for gradient in waiting:
            gradient.set_to_zero()
        others = [t for t in compat.tree_leaves(args) if not isinstance(t, UnreducedGradient)]
        if others:
            torch._foreach_zero_(others)
        return args[0] if func is aten.zero_.default else None
    if func is aten.add_.Tensor and compat.in_backward() and not compat.is_called_by_backward():  # by autograd itself
        args[0].add_reduced(as_rows(args[1], args[0]))
        return args[0]
    return refuse_unreduced(waiting[0].row_split.name)
