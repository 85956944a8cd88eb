"""Keeps gathered parameters out of what autograd saves for backward.

A saved tensor that lies in a bucket is packed as (bucket, version, offset, sizes, strides), and unpacking it in
backward gathers the bucket again. (FSDP2 and Megatron-FSDP keep the tensor and resize its storage to zero; code that
touches it at the wrong time then reads freed memory.)

Tensors are packed by hooks, which cost more than anything else here. They are active from the first read of a parameter
in a module's window to the end of that window, because this is where parameters are used. If a bucket is still
referenced when it is released, a module has used what another one returned, and from the next forward on hooks are
active everywhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import compat
from ..formats import quantize
from ..memory.bucket import Bucket
from .context import EagerOwner, StepContext
from .gathered_parameter import ORDINARY
from .gathering import Gathering, Planes


@dataclass(frozen=True)
class _SavedView:
    """A tensor saved for backward that lies in a bucket, recorded without its memory."""

    bucket: Bucket
    version: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    leaf: int = -1
    """For a parameter that is gathered as several tensors: the number of the tensor that this one is a view of."""


@dataclass(frozen=True)
class _SavedPlane:
    """A tensor saved for backward that wraps a plane of a parameter, recorded without its memory.

    Backward gets the plane of columns if ``columns``, else that of rows.
    """

    bucket: Bucket
    version: int
    index: int
    columns: bool


@dataclass(frozen=True)
class _SavedDTensor:
    """A DTensor saved for backward whose local part lies in a bucket."""

    local: Any
    spec: compat.DTensorSpec


@dataclass(frozen=True)
class _SavedWrapper:
    """A tensor saved for backward that wraps others, some of which lie in a bucket."""

    kind: Any
    inner: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


_Saved: TypeAlias = "_SavedView | _SavedPlane | _SavedDTensor | _SavedWrapper | tuple[Tensor, int]"


def check_version(bucket: Bucket, version: int) -> None:
    """Raise if a bucket's shard has changed since a forward gathered it, in a backward that needs its values."""
    if bucket.flat._version != version:
        raise RuntimeError(
            f"Parameters of {bucket.plan.unit!r} were modified in place between forward and backward (by an "
            "optimizer step?), so that gradients cannot be computed for the values that forward used."
        )


class SavedTensors:
    """Packs and unpacks the tensors that autograd saves in the windows of one model.

    Args:
        step: The running step.
        gathering: What is gathered.

    Attributes:
        hooked_at: Depth of the window that has installed the hooks; 0: none has.
    """

    def __init__(self, step: StepContext, gathering: Gathering) -> None:
        self._step = step
        self._gathering = gathering
        self.hooked_at = 0

    def hook(self) -> None:
        """Keep gathered parameters out of what autograd saves until the innermost window ends.

        Does nothing under hooks of others (checkpointing, offloading), which may keep our tensors: ours on top would
        hide tensors from a recomputation that counts them. Nor inside of torch.func.grad, which allows no hooks:
        gathered parameters then stay in memory until the backward.
        """
        if self.hooked_at:
            return

        def unpack(packed: _Saved, owner: EagerOwner = self._step.owner) -> Tensor:
            # A graph of autograd keeps the model alive as long as it may need parameters: that is what ``owner`` is
            # for.
            return self.unpack(packed)

        if compat.hook_saved_tensors(self.pack, unpack):
            self.hooked_at = self._step.depth
        else:
            self._gathering.learns_hooks = False

    def unhook(self) -> None:
        if self.hooked_at:
            compat.unhook_saved_tensors(self.pack)
            self.hooked_at = 0

    def for_compiled_code(self) -> contextlib.AbstractContextManager[None]:
        """Context for compiled graphs in a window. They save no gathered parameter, so there is nothing to pack."""
        return compat.without_hook(self.pack)

    @compat.python_only
    def pack(self, tensor: Tensor) -> _Saved:
        if type(tensor) not in ORDINARY and (inside := compat.inner_tensors(tensor)):
            if not any(map(self._lies_in_a_bucket, inside.values())):
                return tensor.detach(), tensor._version
            if (saved := self._plane_of(inside.values())) is not None:
                return saved
            packed = {name: self.pack(inner) for name, inner in inside.items()}
            if isinstance(tensor, DTensor):
                return _SavedDTensor(packed["_local_tensor"], tensor._spec)
            _, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
            return _SavedWrapper(type(tensor), packed, context, tensor.size(), tensor.stride())
        bucket = self._gathering.by_storage.get(compat.storage_address(tensor) or 0)
        leaf = (
            made.leaf_of(tensor)
            if bucket is not None and (made := self._gathering.gathered[bucket].made) is not None
            else None
        )
        if bucket is not None and (tensor.is_conj() or tensor.is_neg()):  # the memory does not hold the values
            bucket, tensor = None, tensor.resolve_conj().resolve_neg()
        own = () if bucket is None else (bucket.plan.held_dtype, quantize.DTYPE, bucket.plan.given_dtype)
        has_dtype = tensor.dtype in own or quantize.SENT_DTYPE in own[:1]  # bytes may be viewed as anything
        if bucket is None or (leaf is None and (bucket.extension is not None or not has_dtype)):
            # Detached, because a saved output would otherwise keep its own node alive. Autograd does not check tensors
            # that went through hooks for in-place changes, so the version is checked in `unpack`.
            return tensor.detach(), tensor._version
        state = self._gathering.gathered[bucket]
        state.is_saved = True
        version, size = state.version, tuple(tensor.shape)
        offset = tensor.storage_offset()
        if leaf is None:  # the storage may be that of a parameter apart
            start = compat.storage_address(state.full)
            offset = (tensor.data_ptr() - start) // tensor.element_size()
        place = tensor.stride(), offset, tensor.dtype
        return _SavedView(bucket, version, size, *place, -1 if leaf is None else leaf)

    def _plane_of(self, inside: Iterable[Tensor]) -> _SavedPlane | None:
        """Return what to save for a tensor that wraps data and scales of a plane, of which backward takes the other."""
        for tensor in inside:
            bucket = self._gathering.by_storage.get(compat.storage_address(tensor) or 0)
            if bucket is None or bucket.made_columns is None:
                continue
            start = tensor.storage_offset() % bucket.plan.held_numel
            index = next(i for i, slot in enumerate(bucket.plan.layout.slots) if slot.offset == start and slot.numel)
            columns = not compat.transformer_engine.backward_takes_rows()
            state = self._gathering.gathered[bucket]
            state.is_saved = True
            return _SavedPlane(bucket, state.version, index, columns)
        return None

    def _lies_in_a_bucket(self, tensor: Tensor) -> bool:
        """Whether a tensor, or one that it wraps, is in the memory of a gathered bucket."""
        if type(tensor) not in ORDINARY and (inside := compat.inner_tensors(tensor)):
            return any(map(self._lies_in_a_bucket, inside.values()))
        return self._gathering.by_storage.get(compat.storage_address(tensor) or 0) is not None

    @compat.python_only
    def unpack(self, packed: _Saved) -> Tensor:
        if isinstance(packed, _SavedDTensor):
            return compat.dtensor_of(self.unpack(packed.local), packed.spec)
        if isinstance(packed, _SavedWrapper):
            inner = {name: self.unpack(each) for name, each in packed.inner.items()}
            return packed.kind.__tensor_unflatten__(inner, packed.context, packed.size, packed.stride)
        if isinstance(packed, tuple):
            tensor, version = packed
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    f"a tensor of shape {tuple(tensor.shape)} is at version {tensor._version}; expected version "
                    f"{version} instead."
                )
            return tensor
        bucket = packed.bucket
        columns = isinstance(packed, _SavedPlane) and packed.columns
        check_version(bucket, packed.version)
        self._step.owner.grad_sync.enter_backward()
        state = self._gathering.gather(bucket, Planes.COLUMNS if columns else Planes.ROWS)
        full = state.full
        assert full is not None
        if isinstance(packed, _SavedView) and packed.leaf >= 0:
            assert state.made is not None
            full = state.made.leaves[packed.leaf]
        if isinstance(packed, _SavedPlane):
            assert bucket.maker is not None
            return self._unpacked_plane(packed, bucket.maker.plane(bucket, full, columns))
        if packed.dtype != full.dtype:
            step = max(packed.dtype.itemsize // full.element_size(), 1)
            full = full[: full.numel() // step * step].view(packed.dtype)
        return full.as_strided(packed.size, packed.stride, packed.offset)

    def _unpacked_plane(self, saved: _SavedPlane, plane: Tensor) -> Tensor:
        bucket, index = saved.bucket, saved.index
        wrapper, maker = bucket.wrappers[index], bucket.maker
        assert wrapper is not None
        assert maker is not None
        inside = maker.view(bucket, plane, index)
        of_rows, of_columns = ((None, None), inside) if saved.columns else (inside, (None, None))
        return wrapper.wrap(*of_rows, bucket.plan.compute_dtype, *of_columns)
