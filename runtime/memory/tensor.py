"""Parameters at rest: DTensors whose rows are cut where their bucket is cut.

DTensor's ``Shard(0)`` means ``torch.chunk``: every rank holds ``ceil(rows / world)`` rows, and the last ranks fewer. In
a flat bucket, the shard boundaries decide where a parameter's rows are: 5 on one rank, 3 on the next, none on the
others. A plain DTensor over such a shard adds and multiplies correctly, but ``full_tensor()``, ``mean()``, indexing and
random initialization are wrong, crash or hang (Megatron-FSDP users see this today). ``RowShardedTensor`` is a DTensor
that knows its rows. It handles an operator in one of four ways:

    elementwise      runs on the local rows, without communication; optimizers consist of these. If the rows of
                     two tensors of one shape are on different ranks, those of one tensor move first, by one all-to-all
    random           draws the whole tensor and keeps its rows: the same values as without sharding, at any world size
    reduction        one all-reduce, to an ordinary 0-d tensor that is equal on every rank; every rank must take part
    anything else    an error that says what to use instead; never a silent gather, never a wrong number
"""

from __future__ import annotations

import copy
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor
from torch.utils.hooks import RemovableHandle

from .. import compat
from ..layout import BucketLayout
from ..plan.partition import Partition, whole_tensor
from ..topology import Group, Topology
from . import host
from .averaged_gradient import AveragedGradient
from .redistribute import RowMove, all_gather_rows, move_rows, same_ranks, take_broadcast_rows, take_rows

__all__ = [
    "Backing",
    "RowBox",
    "RowShardedTensor",
    "RowSplit",
    "UnreducedGradient",
    "contiguous_strides",
    "hooks_of_parameters",
    "like_rows",
    "refuse_unreduced",
]

aten = torch.ops.aten


@dataclass(frozen=True)
class RowSplit:
    """How the rows of one parameter are spread over ranks: parameter ``index`` of a bucket's layout.

    Args:
        layout: Layout of the bucket.
        index: Index of the parameter.
        partition: How the parameter was already divided, if the bucket holds only a part of it. None: the bucket holds
            all of it.
    """

    layout: BucketLayout
    index: int
    partition: Partition | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> RowSplit:
        return self

    @property
    def name(self) -> str:
        return self.layout.slots[self.index].name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self.part_shape if self.partition is None else self.partition.shape

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the part that the bucket holds."""
        return self.layout.slots[self.index].shape

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where this part begins in the whole parameter, by dimension."""
        return (0,) * len(self.shape) if self.partition is None else self.partition.offsets

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups of ranks, other than the data-parallel ones, that hold other parts."""
        return () if self.partition is None else self.partition.groups

    @property
    def count(self) -> int:
        """Number of parameters that reductions cover, including an expert's counterparts on other ranks."""
        return 1 if self.partition is None else self.partition.count

    @property
    def number(self) -> int:
        """This rank's number among these parameters."""
        return 0 if self.partition is None else self.partition.number

    def part_of(self, value: Tensor) -> Tensor:
        """Reduce what broadcasts with the whole parameter to what broadcasts with the bucket's part of it; a view."""
        return value if self.partition is None else self.partition.take(value)

    def assemble(self, part: Tensor) -> Tensor:
        """Return the whole parameter from the parts of all ranks. A collective over :attr:`groups`."""
        return part if self.partition is None else self.partition.assemble(part)

    @property
    def row_dims(self) -> int:
        """Number of leading dimensions whose indices, taken together, are rows."""
        return self.layout.slots[self.index].row_dims

    def rows(self, rank: int) -> range:
        """Return the rows of ``rank``, counted in the part that the bucket holds."""
        return self.layout.rows(self.index, rank)

    def elements(self, rank: int) -> range:
        """Return the elements of ``rank``, counted in the part that the bucket holds."""
        rows, row_numel = self.rows(rank), self.layout.slots[self.index].row_numel
        return range(rows.start * row_numel, rows.stop * row_numel)

    def placement(self, rank: int) -> compat.RowShard:
        """Return the placement of the rows of ``rank``, counted in the whole parameter if they are indices of dimension 0."""
        rows, first = self.rows(rank), self.offsets[0] if self.shape and self.row_dims == 1 else 0
        return compat.RowShard(range(rows.start + first, rows.stop + first), self.row_dims, self.name)

    def boxes(self, rank: int) -> list[RowBox]:
        """Return the boxes of the whole parameter that the rows of ``rank`` are, in order.

        One if rows are indices of dimension 0, and at most three for rows of matrices: the end of a matrix, whole
        matrices, and the start of a matrix. None if there are no rows.
        """
        rows = self.rows(rank)
        leading, inner = self.part_shape[: self.row_dims], self.part_shape[self.row_dims :]
        found, at = [], 0
        for starts, sizes in _boxes_of_rows(rows.start, rows.stop, leading):
            offsets = (*starts, *([0] * len(inner)))
            its = tuple(o + first for o, first in zip(offsets, self.offsets, strict=True))
            found.append(RowBox(its, (*sizes, *inner), range(at, at := at + math.prod(sizes))))
        return found

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of what ``rank`` holds. A scalar's owner holds a scalar, other ranks an empty vector."""
        count = len(self.rows(rank))
        if not self.shape:
            return () if count else (0,)
        return (count, *self.part_shape[self.row_dims :])


class RowBox(NamedTuple):
    """A box of a parameter, all of which one rank holds."""

    offsets: tuple[int, ...]
    """Where it begins in the whole parameter, by dimension."""
    shape: tuple[int, ...]
    rows: range
    """Which of the rank's rows it is, counted from its first one."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """Slices of the whole parameter, one per dimension."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.shape, strict=True))

    def of(self, local: Tensor) -> Tensor:
        """Return the box as a view of the rank's rows, ``[n, *row_shape]``."""
        return local[self.rows.start : self.rows.stop].view(self.shape) if self.shape else local


def _boxes_of_rows(start: int, stop: int, shape: Sequence[int]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut ``range(start, stop)`` of the indices of ``shape`` into boxes; yield where each begins, and its sizes."""
    if not shape and start < stop:
        yield (), ()
        return
    inner = math.prod(shape[1:])
    while start < stop:
        index, first = divmod(start, inner)
        if first or stop - start < inner:  # a part of one index
            end = min(stop, (index + 1) * inner)
            for offsets, sizes in _boxes_of_rows(first, end - index * inner, shape[1:]):
                yield (index, *offsets), (1, *sizes)
        else:
            count = (stop - start) // inner
            end = start + count * inner
            yield (index, *([0] * (len(shape) - 1))), (count, *shape[1:])
        start = end


class Backing(tuple[Tensor, ...]):
    """The flat tensors whose memory contains some rows: a parameter's shard, and the resident around it.

    Copied rows have their own memory, so that copies of this object are empty.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Backing:
        return Backing()


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides: list[int] = []
    stride = 1
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= max(size, 1)
    return tuple(strides)


class _HooksOfParameters(threading.local):
    """Whether this thread runs a hook of a parameter: it sees parameters as they are at rest, although in a backward."""

    run = False

    def call(self, hook: Callable[[Any], Any], argument: Any) -> Any:
        before, self.run = self.run, True
        try:
            return hook(argument)
        finally:
            self.run = before


hooks_of_parameters = _HooksOfParameters()

_T = TypeVar("_T", bound="RowShardedTensor")


class RowShardedTensor(DTensor):
    """A DTensor, ``Shard(0)`` over the ranks of a topology that share it, with the rows of a :class:`RowSplit`.

    If it has a partition, the mesh dimensions of the partition follow.

    ``to_local()`` returns this rank's rows ``[n, *part_shape[row_dims:]]``; for parameters, a view of the bucket's flat
    shard. ``row_dims`` is 1 but for stacks of matrices whose matrices are cut: their rows may be no box of the stack, so
    that the local tensor has fewer dimensions than the whole one.
    ``full_tensor()`` returns the whole tensor on every rank; all ranks must call it.
    """

    split: RowSplit
    topology: Topology
    backing: Backing
    """Operators on this class run below autograd, which does not see that they change these tensors. Their versions are
    incremented explicitly, so that a backward through changed weights is still an error."""

    @classmethod
    def wrap(
        cls: type[_T],
        local: Tensor,
        split: RowSplit,
        topology: Topology,
        requires_grad: bool = False,
        backing: tuple[Tensor, ...] = (),
        spec: compat.DTensorSpec | None = None,
    ) -> _T:
        """Wrap this rank's rows, without copying them.

        Args:
            spec: What :meth:`spec_of` returns for the same arguments, for callers that wrap often.
        """
        spec = spec or cls.spec_of(split, topology, local.dtype)
        wrapped: _T = DTensor.__new__(cls, local, spec, requires_grad=requires_grad)  # type: ignore[call-arg]
        wrapped.split = split
        wrapped.topology = topology
        wrapped.backing = backing if isinstance(backing, Backing) else Backing(backing)
        return wrapped

    @staticmethod
    def spec_of(split: RowSplit, topology: Topology, dtype: torch.dtype) -> compat.DTensorSpec:
        """Return the spec of a tensor with the rows of ``split`` on this rank of ``topology``."""
        shape = torch.Size(split.shape)
        mesh, placements = topology.mesh, topology.placements(split.placement(topology.shard))
        if split.partition is not None:
            mesh = split.partition.beside(mesh)
            placements = (*placements, *split.partition.placements_at_rest)
        meta = compat.TensorMeta(shape, contiguous_strides(split.shape), dtype)
        return compat.DTensorSpec(mesh, placements, tensor_meta=meta)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Use :meth:`wrap`."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        piece = self.topology.shard
        placement, pieces = self.split.placement(piece), self.split.layout.world_size
        held = placement.held if placement.rows else "no rows"
        if self.split.partition is not None:
            held += f", {self.split.partition.placements} over {self.split.partition.mesh.mesh_dim_names}"
        return (
            f"{type(self).__name__}({self.split.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"rank {piece} of {pieces} holds {held}: {self._local_tensor!r})"
        )

    def over_pieces(self, value: Tensor, op: str, what: str = "") -> Tensor:
        """Reduce what each rank has computed from its rows to the result for the whole tensor; the same on every rank.

        Args:
            what: Description of the result, for error messages on ranks that do something else.
        """
        self.topology.announce(what or f"a {op} over {self.split.name!r}", self.split.name)
        home = value.device
        value = self.topology.sum(self.topology.on_device(value), op)
        for group in self.split.groups:
            value = compat.wait_tensor(compat.all_reduce(value, op, group.name))
        return value.to(home)

    # Torch would add the rows' storage offset to a null address, and take the sum for memory.

    def data_ptr(self) -> int:
        """Return 0: the memory is that of the local rows."""
        return 0

    def storage_offset(self) -> int:
        """Return 0; see :meth:`data_ptr`."""
        return 0

    # -- leaving the sharded world ------------------------------------------------------------------------------------

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return a copy of the whole tensor, ``[*shape]``, on every rank. A collective; not differentiable."""
        with torch.no_grad():
            return all_gather_rows(self._local_tensor, self.split, self.topology)

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **kwargs: Any
    ) -> DTensor:
        """Return an ordinary DTensor of the same values, replicated or evenly sharded.

        A collective; not differentiable.
        """
        mesh = device_mesh or self.device_mesh
        return distribute_tensor(self.full_tensor(), mesh, placements or [Replicate()] * mesh.ndim, src_data_rank=None)

    @property
    def data(self) -> RowShardedTensor:  # type: ignore[override]
        """The same rows, detached. Assignment copies the values, because the memory belongs to a bucket."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.shape != self.shape or values.dtype != self.dtype:
            raise RuntimeError(
                f"{self.split.name!r} is a shard of a bucket of {self.dtype}: .data takes values of shape "
                f"{tuple(self.shape)} and {self.dtype}, got {tuple(values.shape)} and {values.dtype}."
            )
        with torch.no_grad():
            self.detach().copy_(values)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's rows. Gradients of results computed from them are gradients of these rows only."""
        for resident in self.backing[1:]:
            compat.wait_tensor(resident)  # the caller may write to the rows
        for flat in self.backing[:1]:
            host.settle_pinned(flat)
        if not (self.requires_grad and torch.is_grad_enabled()):
            return self._local_tensor.view_as(self._local_tensor)
        return _ToLocal.apply(self)

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        return Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> RowShardedTensor:  # type: ignore[override]
        """Freeze or unfreeze a parameter, like ``Tensor.requires_grad_``. Call it between steps, and on all ranks."""
        super().requires_grad_(requires_grad)
        if (home := vars(self).get("mfsdp_home")) is not None:
            home.bucket.toggled(home.index)
        return self

    # Autograd passes no gradients to parameters (see :mod:`.gradients`), so it must not run their hooks, which would
    # get None.

    @property
    def tensor_hooks(self) -> dict[int, Callable[[Tensor], Tensor | None]]:
        """Hooks of a parameter that are called with its reduced gradient, a DTensor."""
        hooks: dict[int, Callable[[Tensor], Tensor | None]] = self.__dict__.setdefault("mfsdp_hooks", OrderedDict())
        return hooks

    @property
    def accumulate_hooks(self) -> dict[int, Callable[[Tensor], None]]:
        """Hooks of a parameter that are called with it after its gradient was accumulated."""
        hooks: dict[int, Callable[[Tensor], None]] = self.__dict__.setdefault("mfsdp_accumulate_hooks", OrderedDict())
        return hooks

    @property
    def has_tensor_hooks(self) -> bool:
        return bool(self.__dict__.get("mfsdp_hooks"))

    @property
    def has_accumulate_hooks(self) -> bool:
        return bool(self.__dict__.get("mfsdp_accumulate_hooks"))

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        """See ``Tensor.register_hook``."""
        return self._register(hook, self.tensor_hooks) if self._is_parameter else super().register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        """See ``Tensor.register_post_accumulate_grad_hook``."""
        if not self._is_parameter:
            return super().register_post_accumulate_grad_hook(hook)
        return self._register(hook, self.accumulate_hooks)

    def take_hooks(self, tensor_hooks: dict[int, Any] | None, accumulate_hooks: dict[int, Any] | None) -> None:
        """Adopt another tensor's hooks. Their handles keep working, because the dictionaries stay the same."""
        for name, hooks in (("mfsdp_hooks", tensor_hooks), ("mfsdp_accumulate_hooks", accumulate_hooks)):
            if hooks:
                self.__dict__[name] = hooks

    @property
    def _is_parameter(self) -> bool:
        return "mfsdp_home" in vars(self)

    def _register(self, hook: Any, hooks: dict[int, Any]) -> RemovableHandle:
        if not self.requires_grad:
            raise RuntimeError(f"{self.split.name!r} is frozen, so a hook on its gradient would never run.")
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def share_memory_(self) -> Tensor:
        raise RuntimeError(f"{self.split.name!r} is a part of a bucket: its memory cannot be shared between processes.")

    # torch.distributed.checkpoint calls these to learn which rows this rank holds. ``Shard(0)`` would imply others.

    def _boxes(self) -> list[RowBox]:
        boxes = self.split.boxes(self.topology.shard)
        if not self.numel() and not boxes and not self.topology.shard:  # it is in the checkpoint all the same
            return [RowBox(self.split.offsets, self.split.part_shape, range(0))]
        return boxes

    def __create_chunk_list__(self) -> list[Any]:
        # Called on every rank, with or without rows, before a checkpoint is read into these rows.
        if self.backing:
            _before_write(self.backing)
        return [compat.ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.shape)) for box in self._boxes()]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        return [
            compat.shard_write_item(fqn, box.offsets, box.of(self._local_tensor), self.shape) for box in self._boxes()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        if index.offset is None:
            return self._local_tensor
        return next(box for box in self._boxes() if box.offsets == tuple(index.offset)).of(self._local_tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy the rows to their own memory, outside of any bucket."""
        if not self.is_leaf:
            raise RuntimeError(
                f"only leaves of the autograd graph can be deep-copied, not a result computed from {self.split.name!r}"
            )
        duplicate: Tensor = RowShardedTensor.wrap(self._local_tensor.detach().clone(), self.split, self.topology)
        if isinstance(self, nn.Parameter):
            duplicate = nn.Parameter(duplicate, requires_grad=self.requires_grad)
        else:
            duplicate.requires_grad_(self.requires_grad)
        memo[id(self)] = duplicate
        if self.grad is not None:
            duplicate.grad = copy.deepcopy(self.grad, memo)
        return duplicate

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"{self.split.name!r} is sharded over {self.split.layout.world_size} ranks and cannot be pickled. "
            "Save the model with torch.distributed.checkpoint, or pickle tensor.full_tensor() (call it on all ranks)."
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the inner tensor to torch's tools.

        Dynamo calls this, too, when it finds a sharded parameter in code that it compiles: an optimizer's step, a
        penalty on weights. It would continue with a plain DTensor, which does not know where rows are, so this raises a
        graph break.
        """
        if compat.dynamo_traces():
            raise compat.graph_break(
                f"{self.split.name!r} is sharded over {self.split.layout.world_size} ranks: code that reads "
                "parameters between steps (an optimizer, a penalty on weights) runs eagerly. Take it out of what "
                "fullgraph=True compiles."
            )
        return ["_local_tensor"], (self.split, self.topology, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, *_: Any) -> RowShardedTensor:  # type: ignore[override]
        return RowShardedTensor.wrap(inner["_local_tensor"], *context)

    # -- operators ----------------------------------------------------------------------------------------------------

    @classmethod
    @compat.python_only
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(func, args, kwargs or {})

    if not compat.DTENSOR_SUBCLASSES_DISPATCH:

        @classmethod
        @compat.python_only
        def __torch_function__(
            cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            """Before torch 2.13, DTensor handles operators of its subclasses, so a dispatch mode intercepts them."""
            with compat.DisableTorchFunctionSubclass():
                if getattr(func, "__name__", "") in ("__get__", "__set__") and func.__self__ in _PLAIN_ATTRIBUTES:
                    return func(*args, **(kwargs or {}))
                with _RowShardedMode():
                    out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.grad_fn is not None:
                out.register_hook(_no_backward)
            return out


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RowShardedTensor) -> Tensor:
        ctx.of = tensor.split, tensor.topology
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return RowShardedTensor.wrap(gradient, *ctx.of)


class UnreducedGradient(RowShardedTensor):
    """The gradient of a parameter whose reduction is deferred: shape and dtype, but no values.

    It can be set to None, or to zero, which also applies to the deferred gradient. Computing with it raises an error
    that explains how to get the values. Otherwise a step would silently use a part of the gradient.
    """

    zeroed: bool = False

    @staticmethod
    def like(param: RowShardedTensor) -> UnreducedGradient:
        local = param._local_tensor
        nothing = torch.zeros((), dtype=local.dtype, device=local.device).expand(local.shape)
        return UnreducedGradient.wrap(nothing, param.split, param.topology)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.split.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        refuse_unreduced(self.split.name)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        refuse_unreduced(self.split.name)

    @classmethod
    @compat.python_only
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch_unreduced(func, args, kwargs or {})


def _dispatch_unreduced(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
    return refuse_unreduced(waiting[0].split.name)


def refuse_unreduced(name: str) -> NoReturn:
    raise RuntimeError(
        f"The gradient of {name!r} is not reduced yet: the last microbatch of this step was not "
        "marked. Mark it (model.is_last_microbatch = True, model.set_model_auto_sync(), model.sync()), or call "
        "model.finish_grad_sync() before gradients are read. An optimizer from fully_shard_optimizer does so in "
        "step()."
    )


def _dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if (reduction := _REDUCTIONS.get(func)) is not None:
        return _averaged(reduction(func, args, kwargs), args)
    if torch.Tag.nondeterministic_seeded in func.tags:
        return _random(func, args, kwargs)
    if func is aten.is_same_size.default:
        return args[0].shape == args[1].shape
    if func in _FACTORIES and tuple(args[1]) != tuple(args[0].shape):
        return func(args[0]._local_tensor, *args[1:], **kwargs)
    if torch.Tag.pointwise in func.tags or func in _ROW_LOCAL or _is_foreach_pointwise(func):
        return _row_local(func, args, kwargs)
    if func in _MASKED and _is_mask_of(args[1], args[0]):
        return _row_local(func, args, kwargs)
    if func in _SAME_SHAPE_VIEWS and tuple(args[1]) == tuple(args[0].shape):
        return _row_local(aten.alias.default, args[:1], {})
    raise _unsupported(func, args, kwargs)


class _RowShardedMode(compat.TorchDispatchMode):
    supports_higher_order_operators = True  # a backward of a compiled graph calls regions

    @compat.python_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = compat.tree_leaves((args, kwargs))
        if any(isinstance(leaf, UnreducedGradient) for leaf in leaves):
            return _dispatch_unreduced(func, args, kwargs)
        if any(isinstance(leaf, RowShardedTensor) for leaf in leaves):
            return _dispatch(func, args, kwargs)
        return func(*args, **kwargs)


_PLAIN_ATTRIBUTES = {
    getattr(Tensor, name)
    for name in ("device", "dtype", "grad", "grad_fn", "is_leaf", "layout", "ndim", "requires_grad", "shape")
}


def _no_backward(gradient: Tensor) -> Tensor:
    raise RuntimeError(
        f"torch {torch.__version__} cannot differentiate through sharded parameters between steps; torch 2.13 and "
        "newer can. Compute it from module.parameter inside a forward."
    )


# -- elementwise ------------------------------------------------------------------------------------------------------

_ROW_LOCAL = {
    aten.detach.default,
    aten.alias.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.copy_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.where.self,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.lift_fresh.default,
    aten._fused_adam_.default,
    aten._fused_adam_.tensor_lr,
    aten._fused_adamw_.default,
    aten._fused_adamw_.tensor_lr,
    aten._fused_sgd_.default,
    aten._fused_sgd_.tensor_lr,
    aten._fused_adagrad_.default,
}
_ALIASES = {aten.detach.default, aten.alias.default}
_SAME_SHAPE_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.reshape.default}
_FACTORIES = {aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}
_ROW_LOCAL |= _FACTORIES
_MASKED = {aten.index_put_.default, aten.index_put.default}
_FOREACH_REDUCTIONS = {"_foreach_norm", "_foreach_max", "_foreach_powsum"}


def _is_foreach_pointwise(func: Any) -> bool:
    name = func._schema.name.removeprefix("aten::")
    return name.startswith("_foreach_") and name not in _FOREACH_REDUCTIONS


def _is_mask_of(indices: Any, tensor: Any) -> bool:
    """Whether ``tensor[indices]`` indexes with a sharded boolean mask of the tensor's shape."""
    return (
        len(indices) == 1
        and isinstance(indices[0], RowShardedTensor)
        and isinstance(tensor, RowShardedTensor)
        and indices[0].dtype == torch.bool
        and indices[0].shape == tensor.shape
    )


def _row_local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on the local rows. Outputs are sharded like the input at the same place in the argument lists."""
    leaves = [t for t in compat.tree_leaves((args, kwargs)) if isinstance(t, RowShardedTensor)]
    first = leaves[0]
    in_lists = next((a for a in args if isinstance(a, (list, tuple)) and any(t is first for t in a)), None)
    if in_lists is None and any(t.split.shape != first.split.shape for t in leaves):
        raise _mismatch(func, leaves)
    references: Sequence[Any] = in_lists if in_lists is not None else [first]
    originals = {id(t._local_tensor): t for t in leaves}
    moved: dict[tuple[int, int], Tensor] = {}

    def each(value: Any, do: Callable[[Any, Any], Any]) -> Any:
        """Call ``do`` for every tensor of an argument, with the tensor that it is combined with."""
        if isinstance(value, (list, tuple)) and any(isinstance(t, Tensor) for t in value):
            return [do(t, references[i % len(references)]) for i, t in enumerate(value)]
        if in_lists is not None and not isinstance(value, DTensor):
            return value  # scalars of a foreach operator, one per tensor
        return do(value, first)

    def unwrap(value: Any, reference: Any) -> Any:
        if isinstance(value, Tensor) and isinstance(reference, RowShardedTensor):
            key = id(value), id(reference)
            return moved[key] if key in moved else _local_rows(func, value, reference)
        return value

    def wrap(value: Any, reference: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if (original := originals.get(id(value))) is not None:
            return original  # an in-place operator returns its argument
        if not isinstance(reference, RowShardedTensor):
            return value
        backing = reference.backing if func in _ALIASES else ()
        return RowShardedTensor.wrap(value, reference.split, reference.topology, backing=backing)

    if func in _FACTORIES:
        args = (args[0], first._local_tensor.shape, *args[2:])
    if len(leaves) > 1:
        moved = _move_all(func, args, kwargs, each)
    _tell_autograd(func, args, kwargs)
    out = func(*[each(a, unwrap) for a in args], **{k: each(v, unwrap) for k, v in kwargs.items()})
    if isinstance(out, (list, tuple)):
        return type(out)(wrap(o, references[i % len(references)]) for i, o in enumerate(out))
    return wrap(out, first)


def _move_all(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], each: Callable[[Any, Callable[[Any, Any], Any]], Any]
) -> dict[tuple[int, int], Tensor]:
    """Move the rows of arguments that are split differently than the tensor they are combined with, in one collective.

    Returns:
        The moved local rows, by ``id`` of both tensors.
    """
    pairs: dict[tuple[int, int], tuple[RowShardedTensor, RowShardedTensor]] = {}
    for argument, value in zip(func._schema.arguments, args, strict=False):
        _find_pairs(func, argument, value, each, pairs)
    for argument in func._schema.arguments:
        if argument.name in kwargs:
            _find_pairs(func, argument, kwargs[argument.name], each, pairs)
    if not pairs:
        return {}
    moves = [_move(func, value, reference) for value, reference in pairs.values()]
    return dict(zip(pairs, move_rows(moves), strict=True))


def _find_pairs(
    func: Any,
    argument: Any,
    value: Any,
    each: Callable[[Any, Callable[[Any, Any], Any]], Any],
    pairs: dict[tuple[int, int], tuple[RowShardedTensor, RowShardedTensor]],
) -> None:
    def look(tensor: Any, reference: Any) -> None:
        both = isinstance(tensor, RowShardedTensor) and isinstance(reference, RowShardedTensor)
        if both and not _lie_alike(tensor, reference):
            if argument.alias_info is not None and argument.alias_info.is_write:
                raise _mismatch(func, [reference, tensor])  # writes to moved rows would be lost
            pairs[id(tensor), id(reference)] = tensor, reference

    each(value, look)


def _lie_alike(mine: RowShardedTensor, its: RowShardedTensor) -> bool:
    return mine.split == its.split and same_ranks(mine.topology, its.topology)


def _move(func: Any, value: RowShardedTensor, reference: RowShardedTensor) -> RowMove:
    if value.shape != reference.shape or value.split.partition != reference.split.partition:
        raise _mismatch(func, [reference, value])
    return RowMove(value._local_tensor, value.split, value.topology, reference.split, reference.topology)


def like_rows(value: RowShardedTensor, reference: RowShardedTensor) -> RowShardedTensor:
    """Return the same tensor, with its rows where those of ``reference`` are. A collective if they are elsewhere."""
    if _lie_alike(value, reference):
        return value
    (local,) = move_rows([_move(aten.copy_.default, value, reference)])
    return RowShardedTensor.wrap(local, reference.split, reference.topology)


_PROVISIONAL = "mfsdp_provisional"


def mark_provisional(gradient: RowShardedTensor) -> None:
    """Mark zeros that stand for no gradient, until a gradient is known to exist or something is written to them."""
    gradient.__dict__[_PROVISIONAL] = True


def is_provisional(gradient: Tensor) -> bool:
    return _PROVISIONAL in vars(gradient)


def keep(gradient: Tensor) -> None:
    """Unmark a provisional gradient: it is a gradient."""
    vars(gradient).pop(_PROVISIONAL, None)


def _tell_autograd(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Increment the versions of shards that ``func`` is about to change."""
    if not func._schema.is_mutable:
        return
    written: dict[int, Sequence[Tensor]] = {}
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            for leaf in compat.tree_leaves(value):
                if isinstance(leaf, RowShardedTensor):
                    keep(leaf)
                    written[id(leaf.backing)] = leaf.backing
    for backing in written.values():
        _before_write(backing)


def _before_write(backing: Sequence[Tensor]) -> None:
    """Prepare for a write to rows that lie in these tensors.

    A running gather of the resident, such as one started by an optimizer's step, would send half-written rows, and
    overwrite the new values with old ones. Therefore this waits for it, and for copies of rows that rest on the host.
    """
    for resident in backing[1:]:
        compat.wait_tensor(resident)
    for flat in backing[:1]:
        host.settle_pinned(flat)
    torch.autograd.graph.increment_version(list(backing))


def _local_rows(func: Any, value: Tensor, reference: RowShardedTensor) -> Tensor:
    """Return this rank's part of an argument, to combine it with the local rows of ``reference``.

    Ordinary tensors and replicated DTensors hold the same values on every rank. Rows are taken from a whole tensor;
    everything else broadcasts over rows.
    """
    if isinstance(value, RowShardedTensor):
        return like_rows(value, reference)._local_tensor
    if isinstance(value, DTensor):
        if func is aten.copy_.default and value.shape == reference.shape:
            value = whole_tensor(value)  # from a state dict that was sharded differently; all ranks load it
        elif any(not placement.is_replicate() for placement in value.placements):
            raise _unsupported(func, (reference, value), {})
        else:
            value = value.to_local()
    fits = value.ndim <= reference.ndim and all(
        mine in (1, its) for mine, its in zip(reversed(value.shape), reversed(reference.shape), strict=False)
    )
    if not fits:
        raise _unsupported(func, (reference, value), {})
    _refuse_own_values(func, value, reference)
    return take_broadcast_rows(value, reference.split, reference.topology.shard)


def _refuse_own_values(func: Any, value: Tensor, reference: RowShardedTensor) -> None:
    """Raise if a hook or a function in backward combines a shard with an ordinary tensor, which is this rank's own.

    Operators of derivatives are not concerned: the gradient of a sum of shards is the same on every rank.
    """
    is_scalar = not any(value.stride()) or value.numel() == 1
    if is_scalar or not compat.in_backward() or hooks_of_parameters.run or not compat.is_called_by_backward():
        return
    raise RuntimeError(
        f"{func} in backward combines {reference.split.name!r}, of which this is one rank's shard, with an ordinary tensor of "
        f"shape {tuple(value.shape)}: rows of different ranks would be combined with values of different ranks. Read "
        "module.parameter instead, which is the whole tensor in backward. What is the same on every rank, such as a mask, "
        "can be applied in a hook of the parameter (parameter.register_hook), or between steps."
    )


# -- random -----------------------------------------------------------------------------------------------------------


def _random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the whole tensor from this rank's generator, and keep the local rows.

    With the same seed on every rank (as set by torch.manual_seed), these are the values that one process would draw.
    """
    target: RowShardedTensor = args[0]
    fills = func._schema.is_mutable or func._schema.name.endswith("_like")  # else the tensor's values matter
    if not fills or not isinstance(target, RowShardedTensor) or any(isinstance(a, Tensor) for a in args[1:]):
        raise _unsupported(func, args, kwargs)
    for peer in range(target.split.count):  # all ranks draw for all counterparts, so that later draws are equal
        whole = torch.empty(target.shape, dtype=target.dtype, device=target._local_tensor.device)
        result = func(whole, *args[1:], **kwargs)
        if peer == target.split.number:
            drawn = result
    if not isinstance(drawn, Tensor):
        raise _unsupported(func, args, kwargs)
    local = take_rows(drawn, target.split, target.topology.shard)
    if func._schema.is_mutable:
        _tell_autograd(func, args, kwargs)
        target._local_tensor.copy_(local)
        return target
    return RowShardedTensor.wrap(local.clone(), target.split, target.topology)


# -- reductions -------------------------------------------------------------------------------------------------------


def _named(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments of an operator by name. Reductions must be over all dimensions.

    Raises:
        RuntimeError: A dimension would remain, or the first tensor is an ordinary one.
    """
    named = {}
    for i, argument in enumerate(func._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        named[argument.name] = args[i] if i < len(args) else kwargs.get(argument.name, default)
    tensor, dim = args[0], named.get("dim")
    if not isinstance(tensor, RowShardedTensor):
        raise _unsupported(func, args, kwargs)
    if dim is not None and dim != []:
        dims = {d % max(tensor.ndim, 1) for d in (dim if isinstance(dim, (list, tuple)) else [dim])}
        if dims and len(dims) < tensor.ndim:
            raise _unsupported(func, args, kwargs)
    return named


def _shaped(value: Tensor, tensor: RowShardedTensor, named: dict[str, Any]) -> Tensor:
    return value.reshape((1,) * tensor.ndim) if named.get("keepdim") else value


def _count(tensor: RowShardedTensor) -> int:
    """Return the number of elements that a reduction covers."""
    return tensor.numel() * tensor.split.count


def _sum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    named, tensor = _named(func, args, kwargs), args[0]
    local = torch.nansum if func._schema.name == "aten::nansum" else torch.sum
    return _shaped(tensor.over_pieces(local(tensor._local_tensor, dtype=named["dtype"]), "sum"), tensor, named)


def _mean(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _sum(func, args, kwargs) / max(_count(args[0]), 1)


def _count_nonzero(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    _named(func, args, kwargs)
    return args[0].over_pieces(torch.count_nonzero(args[0]._local_tensor), "sum")


def _variance(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the mean first, then the variance: the difference of two large sums would have no digits left."""
    named, tensor, name = _named(func, args, kwargs), args[0], func._schema.name
    local = tensor._local_tensor
    wide = local if local.dtype.itemsize >= 4 else local.float()
    count = _count(tensor)
    mean = tensor.over_pieces(wide.sum(), "sum") / count
    squares = tensor.over_pieces((wide - mean).square().sum(), "sum")
    correction = 1 if named["correction"] is None else named["correction"]
    value = squares / max(count - correction, 0)
    value = _shaped(value.sqrt() if "std" in name else value, tensor, named).to(local.dtype)
    return (value, _shaped(mean, tensor, named).to(local.dtype)) if "mean" in name else value


def _dot(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    product: RowShardedTensor = _row_local(aten.mul.Tensor, args, {})
    return product.over_pieces(product._local_tensor.sum(), "sum")


def _distance(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return _norms([_row_local(aten.sub.Tensor, args[:2], {})], args[2] if len(args) > 2 else kwargs.get("p", 2), None)[
        0
    ]


_NONE, _MEAN = 0, 1
"""Values of a loss's argument ``reduction``."""


def _loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].shape != args[1].shape:
        raise _unsupported(func, args, kwargs)
    reduction = args[2] if len(args) > 2 else kwargs.pop("reduction", _MEAN)
    each: RowShardedTensor = _row_local(func, (*args[:2], _NONE, *args[3:]), kwargs)
    if reduction == _NONE:
        return each
    total = each.over_pieces(each._local_tensor.sum(), "sum")
    return total / _count(each) if reduction == _MEAN else total


def _loss_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradient, mine, its, reduction = args[:4]
    if reduction == _MEAN:  # divide by the elements of all ranks
        gradient = gradient / _count(next(t for t in (mine, its) if isinstance(t, RowShardedTensor)))
    return _row_local(func, (gradient, mine, its, _NONE, *args[4:]), kwargs)


def _extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    named, tensor = _named(func, args, kwargs), args[0]
    largest = "max" in func._schema.name
    local = tensor._local_tensor
    if not local.numel():
        limits = torch.finfo if local.is_floating_point() else torch.iinfo
        local = local.new_full((1,), limits(local.dtype).min if largest else limits(local.dtype).max)
    value = local.amax() if largest else local.amin()
    return _shaped(_extreme_of_all(value, "max" if largest else "min", tensor), tensor, named)


def _extreme_of_all(value: Tensor, op: str, of: RowShardedTensor) -> Tensor:
    """Reduce extremes so that NaN wins, as in torch. Collectives may prefer the number."""
    if not value.is_floating_point():
        return of.over_pieces(value, op)
    nan = value.isnan()
    largest = "max" in op
    clean = torch.where(nan, torch.full_like(value, float("-inf") if largest else float("inf")), value)
    clean = clean if largest else -clean
    found = of.over_pieces(torch.cat([clean.reshape(-1), nan.to(value.dtype).reshape(-1)]), "max")
    extremes, nans = found.chunk(2)
    extremes = extremes if largest else -extremes
    return torch.where(nans > 0, torch.full_like(extremes, float("nan")), extremes).view(value.shape)


def _truth(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    named, tensor, is_any = _named(func, args, kwargs), args[0], func._schema.name == "aten::any"
    local = (torch.any if is_any else torch.all)(tensor._local_tensor.reshape(-1)).to(torch.int32)
    return _shaped(tensor.over_pieces(local, "max" if is_any else "min").bool(), tensor, named)


def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Implement ``equal`` and ``allclose``."""
    if args[0].shape != args[1].shape:
        if func is aten.equal.default:
            return False
        raise _unsupported(func, args, kwargs)
    reference = next(a for a in args if isinstance(a, RowShardedTensor))
    rank = reference.topology.shard
    for each in args[:2]:
        if not isinstance(each, RowShardedTensor):
            _refuse_own_values(func, each, reference)
    mine = [
        _local_rows(func, a, reference) if isinstance(a, RowShardedTensor) else take_rows(a, reference.split, rank)
        for a in args[:2]
    ]
    same = func(*mine, *args[2:], **kwargs)
    device = reference._local_tensor.device
    return bool(reference.over_pieces(torch.tensor(int(same), device=device), "min").item())


def _norms(tensors: Sequence[RowShardedTensor], ord: Any, dtype: torch.dtype | None) -> list[Tensor]:
    """Return the vector norm of each whole tensor, with one all-reduce for all tensors over the same ranks."""
    ord = float(ord)
    alike: dict[Any, list[int]] = {}
    for position, tensor in enumerate(tensors):
        alike.setdefault((tensor.topology, tensor.split.groups), []).append(position)
    if len(alike) > 1:  # of several models, or already divided over other ranks
        found: dict[int, Tensor] = {}
        for positions in alike.values():
            found |= zip(positions, _norms([tensors[i] for i in positions], ord, dtype), strict=True)
        return [found[position] for position in range(len(tensors))]
    locals_ = []
    for tensor in tensors:
        local = tensor._local_tensor
        if not local.numel():  # vector_norm raises for empty tensors and some orders; zeros contribute nothing to any
            locals_.append(torch.zeros((), dtype=dtype or local.dtype, device=local.device))
        elif ord in (float("inf"), float("-inf")):
            locals_.append(torch.linalg.vector_norm(local, ord, dtype=dtype))
        elif ord > 0:
            locals_.append(torch.linalg.vector_norm(local, ord, dtype=dtype) ** ord)
        else:
            raise _unsupported(aten.linalg_vector_norm.default, (tensor, ord), {})
    if ord == float("-inf"):
        raise _unsupported(aten.linalg_vector_norm.default, (tensors[0], ord), {})
    if ord == float("inf"):
        return list(_extreme_of_all(torch.stack(locals_), "max", tensors[0]).unbind())
    others = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    what = f"a norm of {tensors[0].split.name!r}{others}"
    return list((tensors[0].over_pieces(torch.stack(locals_), "sum", what) ** (1.0 / ord)).unbind())


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    named = _named(func, args, kwargs)
    ord = named["ord"] if "ord" in named else named["p"]
    return _shaped(_norms([args[0]], 2 if ord is None else ord, named.get("dtype"))[0], args[0], named)


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    tensors = args[0]
    if not all(isinstance(t, RowShardedTensor) for t in tensors):
        raise _unsupported(func, args, kwargs)
    return _norms(tensors, args[1] if len(args) > 1 else kwargs.get("ord", 2), kwargs.get("dtype"))


def _unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Implement GradScaler's unscale. An inf on one rank counts on all ranks, so that all skip the same steps."""
    gradients, found_inf, inv_scale = args
    func([g._local_tensor if isinstance(g, RowShardedTensor) else g for g in gradients], found_inf, inv_scale)
    spread = {(g.topology, g.split.groups): g for g in gradients if isinstance(g, RowShardedTensor)}
    for gradient in spread.values():
        found_inf.copy_(gradient.over_pieces(found_inf, "max"))
    _tell_autograd(func, args, kwargs)


def _averaged(result: Any, args: tuple[Any, ...]) -> Any:
    """Make gradients of a result that is equal on every rank the mean over ranks; see :mod:`.averaged_gradient`."""
    if not (compat.DTENSOR_SUBCLASSES_DISPATCH and torch.is_grad_enabled()):
        return result
    tensors = [leaf for leaf in compat.tree_leaves(args) if isinstance(leaf, RowShardedTensor)]
    if not any(tensor.requires_grad for tensor in tensors):
        return result
    if isinstance(result, (list, tuple)):
        return type(result)(_averaged(each, args) for each in result)
    if not isinstance(result, Tensor) or isinstance(result, RowShardedTensor) or not result.is_floating_point():
        return result
    groups = [group for group in (tensors[0].topology.every, *tensors[0].split.groups) if group.size > 1]
    return result if not groups else AveragedGradient.of(result, groups, tensors[0].split.name)


_REDUCTIONS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.nansum.default: _sum,
    aten.count_nonzero.default: _count_nonzero,
    aten.count_nonzero.dim_IntList: _count_nonzero,
    aten.var.correction: _variance,
    aten.std.correction: _variance,
    aten.var_mean.correction: _variance,
    aten.std_mean.correction: _variance,
    aten.dot.default: _dot,
    aten.dist.default: _distance,
    aten.mse_loss.default: _loss,
    aten.smooth_l1_loss.default: _loss,
    aten.huber_loss.default: _loss,
    aten.mse_loss_backward.default: _loss_backward,
    aten.smooth_l1_loss_backward.default: _loss_backward,
    aten.huber_loss_backward.default: _loss_backward,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.max.default: _extreme,
    aten.min.default: _extreme,
    aten.amax.default: _extreme,
    aten.amin.default: _extreme,
    aten.any.default: _truth,
    aten.any.dim: _truth,
    aten.any.dims: _truth,
    aten.all.default: _truth,
    aten.all.dim: _truth,
    aten.all.dims: _truth,
    aten.equal.default: _equal,
    aten.allclose.default: _equal,
    aten.norm.Scalar: _vector_norm,
    aten.norm.ScalarOpt_dim: _vector_norm,
    aten.norm.ScalarOpt_dtype: _vector_norm,
    aten.norm.ScalarOpt_dim_dtype: _vector_norm,
    aten.linalg_vector_norm.default: _vector_norm,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}


# -- errors -----------------------------------------------------------------------------------------------------------


def _mismatch(func: Any, tensors: Sequence[RowShardedTensor]) -> RuntimeError:
    shards = ", ".join(f"{t.split.name!r} {tuple(t.shape)}" for t in tensors[:3])
    return RuntimeError(
        f"{func} was given parameters of different shapes, or parameters that are divided over different ranks, or is "
        f"to write to several whose rows lie on different ranks: {shards}. Combine their full_tensor()s (a "
        "collective: call it on all ranks)."
    )


def _unsupported(func: Any, args: Any, kwargs: Any) -> RuntimeError:
    tensors = compat.tree_leaves((args, kwargs))
    sharded = next((t for t in tensors if isinstance(t, RowShardedTensor)), None)
    name = repr(sharded.split.name) if sharded is not None else "a parameter"
    plain = [t for t in tensors if isinstance(t, Tensor) and not isinstance(t, DTensor)]
    if plain:
        what = f"{func} mixes the sharded parameter {name} with an ordinary tensor of shape {tuple(plain[0].shape)}"
    else:
        what = f"{func} on the sharded parameter {name} needs rows that other ranks hold"
    return RuntimeError(
        f"{what}. Between steps a parameter is this rank's shard; elementwise operators, sums, means, extremes and "
        "norms work on it. For anything else use parameter.full_tensor() (a collective: call it on all ranks). An optimizer "
        "that needs whole parameters steps with fully_shard_optimizer(optimizer, whole=True). Inside "
        "the forward of the module that owns it, and in backward, module.parameter is the whole tensor; code under "
        "torch.compiler.disable sees it there too if it runs in a module's forward."
    )
