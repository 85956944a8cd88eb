"""Operators on parameters at rest.

Each is computed in the first of these ways that can:

    reduction     over all rows: one all-reduce, to a replicated tensor
    elementwise   on each rank's rows, without communication; optimizers consist of these. If the rows of two tensors
                  of one shape are on different ranks, those of one tensor move first, by one all-to-all
    random        draws the whole tensor and keeps its rows: the same values as without sharding, at any world size
    row by row    what computes each row from itself (sums of rows, a column, a product with a matrix): on each rank's
    rows whole         everything else: gathers the tensors, and computes a replicated tensor on every rank. A view is
                  gathered when it is read, and writes to it reach the rows

Whatever communicates must be called on all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import compat
from ..computed import computing, note
from ..dispatched import Dispatched, dispatching
from ..tensor import RowShardedTensor, UnreducedGradient
from . import elementwise, mixed, random, reductions, row_by_row, unreduced, whole
from .arguments import how_computed, is_of_shape, note_origin, refuse_packed
from .elementwise import like_rows

__all__ = ["like_rows"]

_TIERS = (reductions.compute, elementwise.compute, random.compute, row_by_row.compute)


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    leaves = [leaf for leaf in compat.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    if not func.is_view and not is_of_shape(func):
        refuse_packed(func, leaves, kwargs)
    if any(isinstance(leaf, UnreducedGradient) for leaf in leaves):
        return unreduced.compute(func, args, kwargs)
    if torch.is_inference_mode_enabled() and compat.is_composite(func):  # elsewhere, autograd decomposes it
        with dispatching():
            return func.decompose(*args, **kwargs)
    if not (text := how_computed(func, args, kwargs, leaves)):
        return _compute(func, args, kwargs, leaves)
    with computing(text):
        result = _compute(func, args, kwargs, leaves)
    note(text, result)
    return result


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Tensor]) -> Any:
    if not any(isinstance(leaf, RowShardedTensor) for leaf in leaves):
        return whole.compute(func, args, kwargs)
    for compute in (*_TIERS, whole.compute):
        if (result := compute(func, args, kwargs)) is not NotImplemented:
            break
    if not func._schema.is_mutable:
        note_origin(func, leaves, result)
    return result


Dispatched.call = staticmethod(mixed.call)
Dispatched.dispatch = staticmethod(_dispatch)
compat.convert_arguments_of_functions(mixed.argument_of)
