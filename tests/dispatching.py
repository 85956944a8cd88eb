"""What dispatch modes ask about operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.collectives import kernels, ops, pack
from mfsdp_compile.runtime.guests.offload import operators as offload
from mfsdp_compile.runtime.guests.quantized import operators as quantized


def kernel_in_python(func: Any) -> Callable[..., Any] | None:
    """Return what runs an operator whose kernel calls other operators, which a mode sees if it is active meanwhile.

    These are higher-order operators, and those of this package.
    """
    if isinstance(func, torch._ops.HigherOrderOperator):
        return lambda *args, **kwargs: compat.run_higher_order(func, args, kwargs)
    if func.namespace == "mfsdp":
        found = vars(offload) | vars(quantized) | vars(ops) | vars(kernels) | vars(pack)
        return found.get(f"_{func._opname}") or found[func._opname]  # type: ignore[no-any-return]
    return None


def is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors that an operator is given and writes to."""
    if func is torch.ops.aten.native_batch_norm.default:  # its schema does not say so
        yield from (statistics for statistics in args[3:5] if statistics is not None)
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
