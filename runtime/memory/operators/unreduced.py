"""Operators on gradients that are not reduced yet."""

from __future__ import annotations

from typing import Any

import torch

from ... import compat
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
            gradient.zeroed = True
        others = [t for t in compat.tree_leaves(args) if not isinstance(t, UnreducedGradient)]
        if others:
            torch._foreach_zero_(others)
        return args[0] if func is aten.zero_.default else None
    return refuse_unreduced(waiting[0].row_split.name)
