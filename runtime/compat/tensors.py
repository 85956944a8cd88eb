"""Storage, bits, DTensor placements and meshes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._state_dict_utils import _broadcast_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from .distributed import new_group_like
from .frames import frames
from .version import TORCH_VERSION

__all__ = [
    "DTENSOR_SUBCLASSES_DISPATCH",
    "EVERY_ROW",
    "DTensorSpec",
    "RowShard",
    "StorageWeakRef",
    "TensorMeta",
    "apart",
    "concatenate_meshes",
    "copy_each",
    "dtensor_of",
    "equal_bits",
    "inner_tensors",
    "local_shape_and_offset",
    "multiplies_by_rows",
    "references_of_one_tensor",
    "references_to",
    "renew_mesh",
    "scaled_mm",
    "span",
    "storage_address",
]


scaled_mm = torch._scaled_mm
"""``scaled_mm(a, b, scale_a, scale_b, bias=..., out_dtype=..., use_fast_accum=...)``, for matrices in float8."""


@functools.cache
def multiplies_by_rows(device: torch.device) -> bool:
    """Whether ``scaled_mm`` takes a scale per row and column: on CPUs, torch 2.11 and 2.12 do not."""
    if device.type != "cpu":
        return True
    with _disable_current_modes():
        matrix, scales = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(16, 1)
        try:
            scaled_mm(matrix, matrix.t(), scales, scales.view(1, 16), out_dtype=torch.bfloat16)
        except RuntimeError:
            return False
    return True


copy_each = torch._foreach_copy_
"""``copy_each(targets, sources)`` copies tensors to others, on a GPU with one kernel. Dtypes may differ."""

DTENSOR_SUBCLASSES_DISPATCH = TORCH_VERSION >= (2, 13)
"""Whether a DTensor subclass's own ``__torch_dispatch__`` is called. Older versions of torch call DTensor's."""


def equal_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of the same shape and dtype have equal bits. NaN equals the same NaN."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.view(integers), b.view(integers))


def storage_address(tensor: Tensor) -> int | None:
    """Return the address of a tensor's storage; None for a tensor that has none, or wraps others.

    The address is computed, because ``untyped_storage()`` would create a Python object per storage.
    """
    try:
        return tensor.data_ptr() - tensor.storage_offset() * tensor.element_size()
    except (RuntimeError, NotImplementedError):
        return None


def inner_tensors(tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a tensor wraps, by attribute; none for an ordinary tensor."""
    if isinstance(tensor, DTensor):
        return {"_local_tensor": tensor._local_tensor}
    flatten: Callable[[], tuple[list[str], Any]] | None = getattr(tensor, "__tensor_flatten__", None)
    return {name: getattr(tensor, name) for name in flatten()[0]} if flatten is not None else {}


def span(tensor: Tensor) -> int:
    """Return the number of bytes from the first to the last element, with those of other tensors between them."""
    if not tensor.numel():
        return 0
    last = sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def apart(tensor: Tensor) -> Tensor:
    """Return a tensor in the same memory, with a storage of its own that ends where ``tensor`` does."""
    start = tensor.storage_offset() * tensor.element_size()
    own = tensor.untyped_storage()[start : start + span(tensor)]
    alone: Any = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alone.set_(own, 0, tensor.shape, tensor.stride())  # type: ignore[no-any-return]


def references_to(storage: torch.UntypedStorage) -> int:
    """Return the number of tensors and other objects that keep a storage alive, on the C++ side."""
    return torch._C._storage_Use_Count(storage._cdata)


@functools.cache
def references_of_one_tensor() -> int:
    """Return what :func:`references_to` returns for the storage of a tensor that nothing else refers to."""
    memory = torch.empty(0)  # which lives until they are counted
    return references_to(memory.untyped_storage())


class RowShard(Shard):
    """A placement that equals ``Shard(0)`` but splits rows differently from ``torch.chunk``.

    Code that asks the placement for sizes and offsets gets the right rows, for example the helpers of
    ``torch.distributed.checkpoint.state_dict`` for a state dict that rank 0 broadcasts.

    Args:
        rows: Rows that this rank holds. With two sharded mesh dimensions, the last dimension has the rows and the first
            has :data:`EVERY_ROW`. None: all rows.
        dims: Number of leading dimensions whose indices, taken together, are rows. If there are several, the local
            tensor has one in place of them, and sizes and offsets do not exist.
        name: Name of the parameter, for error messages.
    """

    def __init__(self, rows: range | None, dims: int = 1, name: str = "") -> None:
        super().__init__(0)
        self.rows = rows
        self.dims = dims
        self.name = name

    @property
    def held(self) -> str:
        """What this rank holds, in words."""
        if self.rows is None:
            return "all rows"
        of = f" of dimensions 0 to {self.dims - 1} taken together" if self.dims > 1 else ""
        return f"rows {self.rows.start}:{self.rows.stop}{of}"

    def __repr__(self) -> str:
        return f"RowShard({self.held})" if self.dims > 1 else super().__repr__()

    def __str__(self) -> str:
        return repr(self) if self.dims > 1 else super().__str__()

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, Any]:
        _check_broadcast_state_dict()
        if self.rows is None:
            return curr_local_size, 0
        if self.dims > 1:
            raise RuntimeError(
                f"This rank holds {self.held} of {self.name!r}, which begin or end inside a matrix of the stack: its "
                "part has no size and offset by dimension, which broadcast_from_rank0=True needs. Call "
                "model.load_state_dict() with a full state dict on every rank instead, or load a checkpoint with "
                "mfsdp_compile.checkpoint.load()."
            )
        return len(self.rows), self.rows.start


EVERY_ROW = RowShard(None)


def _check_broadcast_state_dict() -> None:
    """Refuse a state dict that rank 0 broadcasts if it does not fit, before torch's helper writes into a parameter.

    The helper of ``torch.distributed.checkpoint.state_dict`` asks the placement of each parameter for rows, and copies
    these into the parameter. Names and shapes are compared only after that, by ``load_state_dict``, and on rank 0 only
    if names are unexpected. All ranks know them when the helper asks for the first time.

    Raises:
        RuntimeError: On all ranks.
    """
    near = itertools.islice(frames(), 12)
    frame = next((each for each in near if each.f_code is _broadcast_state_dict.__code__), None)
    if frame is None:
        return
    call = frame.f_locals
    broadcast, targets = call["ret"], call["local_state_dict"]
    if call["keys"][0] != next(key for key in broadcast if isinstance(targets.get(key), (DTensor, tuple))):
        return  # not the first
    model = frame.f_back.f_locals.get("model") if frame.f_back is not None else None
    state = {
        **targets,
        **(model.state_dict() if isinstance(model, nn.Module) else {}),
    }  # buffers are replaced in targets
    # Rank 0 broadcasts size and dtype of a tensor that has dimensions.
    shapes = {
        key: value.shape if isinstance(value, Tensor) else value[0]
        for key, value in broadcast.items()
        if isinstance(value, (Tensor, tuple)) and hasattr(value, "dtype")
    }
    complaints = [
        f"{key} has shape {tuple(shape)} there, {tuple(state[key].shape)} here"
        for key, shape in shapes.items()
        if key in targets and isinstance(state[key], Tensor) and state[key].shape != shape
    ]
    if call["strict"]:
        complaints += [f"{key} is missing there" for key in targets if key not in broadcast]
        complaints += [f"{key} is unknown here" for key in broadcast if key not in targets]
    if complaints:
        more = f"; and {len(complaints) - 8} more" if len(complaints) > 8 else ""
        raise RuntimeError(
            f"The state dict that rank 0 broadcasts does not fit: {'; '.join(complaints[:8])}{more}. Nothing was "
            "loaded."
        )


def local_shape_and_offset(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's part of an ordinary DTensor, and the offsets at which it begins."""
    with _disable_current_modes():  # the computation uses tensors
        local, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    return tuple(local), tuple(offset)


def dtensor_of(local: Tensor, spec: DTensorSpec) -> Tensor:
    """Create a DTensor without history. ``DTensor.from_local`` would run checks and record an autograd operation."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]


def renew_mesh(mesh: DeviceMesh) -> None:
    """Replace a mesh's process groups by new groups of the same ranks. Every rank of each group must call this.

    If the mesh is a slice of another mesh, other slices of that mesh keep the old groups.
    """
    for dim in range(mesh.ndim):
        mesh._dim_group_names[dim] = new_group_like(mesh.get_group(dim).group_name).group_name


def concatenate_meshes(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """Concatenate the dimensions of two slices of one mesh.

    Raises:
        RuntimeError: The arguments are not slices of one mesh.
    """
    with _disable_current_modes():  # the computation uses tensors
        mesh: DeviceMesh = DeviceMesh._concatenate([first, second])
    return mesh
