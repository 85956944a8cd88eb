"""Which parameters gather themselves: those of classes with FSDP2's ``fsdp_pre_all_gather`` and
``fsdp_post_all_gather``.

:mod:`~mfsdp_compile.runtime.memory.extension` gathers them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import compat

FORM = "extension"
"""The form of a bucket whose parameter gathers itself."""


def is_extended(tensor: Tensor) -> bool:
    """Whether a tensor, or the local part of a DTensor, is of a class that gathers itself."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return hasattr(type(local), "fsdp_pre_all_gather")


def plain(tensor: Tensor) -> Tensor:
    """Return the ordinary tensor that such a tensor wraps; others as they are."""
    inside = list(compat.inner_tensors(tensor).values()) if is_extended(tensor) else []
    return inside[0] if len(inside) == 1 else tensor  # several: it is refused, or ignored


def check(name: str, param: Tensor, hint: str) -> None:
    """Raise unless a parameter whose class gathers itself can be sharded.

    Args:
        hint: What to use instead of its class, if that is known; else "".

    Raises:
        NotImplementedError: It wraps anything but one ordinary tensor, is divided by tensor parallelism, or its class
            has only one of the two methods.
    """
    local = param._local_tensor if isinstance(param, DTensor) else param
    kind = type(local)
    if not hasattr(kind, "fsdp_post_all_gather"):
        raise NotImplementedError(
            f"Parameter {name!r} is a {kind.__name__}, which has fsdp_pre_all_gather but no fsdp_post_all_gather. "
            "Define both."
        )
    if isinstance(param, DTensor):
        raise NotImplementedError(
            f"Parameter {name!r} is a {kind.__name__} inside a DTensor: parameters that gather themselves "
            "(fsdp_pre_all_gather) cannot be divided over other ranks as well. Leave its layer out of tensor "
            "parallelism."
        )
    inner = list(compat.inner_tensors(param).values())
    like = [(each.shape, each.dtype) for each in inner if type(each) in (Tensor, torch.nn.Parameter)]
    if like != [(param.shape, param.dtype)]:
        held = (
            ", ".join(f"{type(each).__name__} {tuple(each.shape)} of {each.dtype}" for each in inner)
            or "nothing to be seen"
        )
        raise NotImplementedError(
            f"Parameter {name!r} is a {kind.__name__} of shape {tuple(param.shape)} and {param.dtype} around {held}. A "
            "class that gathers itself (fsdp_pre_all_gather) must wrap one ordinary tensor of its own shape and dtype, "
            f"which is the main weight; weights that are quantized at rest are not supported.{hint}"
        )
