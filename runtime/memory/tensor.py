"""Parameters at rest: DTensors whose rows are cut where their bucket is cut.

DTensor's ``Shard(0)`` means ``torch.chunk``: every rank holds ``ceil(rows / world)`` rows, and the last ranks fewer. In
a flat bucket, the shard boundaries decide where a parameter's rows are: 5 on one rank, 3 on the next, none on the
others. A plain DTensor over such a shard adds and multiplies correctly, but ``full_tensor()``, ``mean()``, indexing and
random initialization are wrong, crash or hang (Megatron-FSDP users see this today). ``RowShardedTensor`` is a DTensor
that knows its rows. :mod:`.operators` computes with it.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.utils.hooks import RemovableHandle

from .. import compat
from ..formats.packed import PART_OF
from ..geometry.rows import RowBox, RowSplit, contiguous_strides
from ..geometry.topology import Topology
from . import computed, devices
from .aliases import Backing, follow, keep_values
from .averaging import Averaging
from .dispatched import Dispatched, refuse_backward
from .redistribute import all_gather_rows, announce_at_rest, as_real, reduce_over_shards, same_ranks, take_rows

_ORIGIN = "mfsdp_origin"
"""Attribute of what was computed from parameters: where a parameter is in its bucket; None if it is in none."""
TENSOR_HOOKS, ACCUMULATE_HOOKS = "mfsdp_hooks", "mfsdp_accumulate_hooks"
"""Attributes of parameters that have hooks."""


class _HooksOfParameters(threading.local):
    """Whether this thread runs a hook of a parameter: it sees parameters as they are at rest, although in a
    backward."""

    run = False

    def call(self, hook: Callable[[Any], Any], argument: Any) -> Any:
        before, self.run = self.run, True
        try:
            return hook(argument)
        finally:
            self.run = before


hooks_of_parameters = _HooksOfParameters()

_T = TypeVar("_T", bound="RowShardedTensor")


class RowShardedTensor(Dispatched):
    """A DTensor, ``Shard(0)`` over the ranks of a topology that share it, with the rows of a :class:`RowSplit`.

    If it has a partition, the mesh dimensions of the partition follow.

    ``to_local()`` returns this rank's rows ``[n, *row_shape]``; for parameters, a view of the bucket's flat
    shard. ``row_dims`` is 1 but for stacks of matrices whose matrices are cut: their rows may be no box of the stack,
    so that the local tensor has fewer dimensions than the whole one.
    ``full_tensor()`` returns the whole tensor on every rank; all ranks must call it.
    """

    row_split: RowSplit
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
        wrapped.row_split = split
        wrapped.topology = topology
        wrapped.backing = backing if isinstance(backing, Backing) else Backing(backing)
        return wrapped

    @staticmethod
    def spec_of(
        split: RowSplit, topology: Topology, dtype: torch.dtype, strides: tuple[int, ...] | None = None
    ) -> compat.DTensorSpec:
        """Return the spec of a tensor with the rows of ``split`` on this rank of ``topology``."""
        shape = torch.Size(split.shape)
        mesh, placements = topology.mesh, topology.placements(split.placement(topology.shard))
        if split.partition is not None:
            mesh = split.partition.beside(mesh)
            placements = (*placements, *split.partition.placements_at_rest)
        meta = compat.TensorMeta(shape, strides or contiguous_strides(split.shape), dtype)
        return compat.DTensorSpec(mesh, placements, tensor_meta=meta)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Use :meth:`wrap`."""

    def move_in(self, place: RowShardedTensor) -> None:
        """Let this tensor, whose memory is not in a bucket, refer to the memory and rows of ``place`` from now on."""
        for name in ("_local_tensor", "_spec", "row_split", "topology", "backing"):
            setattr(self, name, getattr(place, name))

    def with_local(self, local: Tensor, is_view: bool = False) -> RowShardedTensor:
        """Wrap ``local``, ``[n, ...]``, computed from this rank's rows row by row.

        Args:
            is_view: Whether it is a view of these rows.
        """
        split = self.row_split.with_local(local.shape, self.topology.shard)
        spec = None
        if not local.is_contiguous():
            leading = (stride * local.stride(0) for stride in contiguous_strides(split.leading))
            inner = local.stride()[local.ndim - len(split.row_shape) :]
            spec = self.spec_of(split, self.topology, local.dtype, (*leading, *inner))
        with torch.inference_mode(self.is_inference()) if is_view else contextlib.nullcontext():
            wrapped = RowShardedTensor.wrap(
                local, split, self.topology, backing=self.backing if is_view else (), spec=spec
            )
        if is_view:
            self.backing.aliases.add(wrapped)
            if _PROVISIONAL in vars(self):
                wrapped.__dict__[_PROVISIONAL] = vars(self)[_PROVISIONAL]
        return wrapped

    @property
    def outline(self) -> Tensor:
        """A tensor of the whole shape on the meta device."""
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        piece = self.topology.shard
        placement, pieces = self.row_split.placement(piece), self.row_split.layout.world_size
        held = placement.held if placement.rows else "no rows"
        if self.row_split.partition is not None:
            held += f", {self.row_split.partition.placements} over {self.row_split.partition.mesh.mesh_dim_names}"
        return (
            f"{type(self).__name__}({self.row_split.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"rank {piece} of {pieces} holds {held}: {self._local_tensor!r})"
        )

    def over_pieces(self, value: Tensor, op: str, what: str = "") -> Tensor:
        """Reduce what each rank has computed from its rows to the result for the whole tensor; the same on every rank.

        Args:
            what: Description of the result, for error messages on ranks that do something else.
        """
        if value.is_complex():
            return torch.view_as_complex(self.over_pieces(as_real(value), op, what))
        announce_at_rest(self.topology, what or f"a {op} over {self.row_split.name!r}", self.row_split.name)
        home = value.device
        value = reduce_over_shards(self.topology, devices.on_device(value, self.topology.mesh.device_type), op)
        for group in self.row_split.groups:
            value = group.all_reduce(value, op, self.topology.in_order)
        return value.to(home)

    # Torch would add the rows' storage offset to a null address, and take the sum for memory.

    def data_ptr(self) -> int:
        """Return 0: the memory is that of the local rows."""
        return 0

    def storage_offset(self) -> int:
        """Return 0; see :meth:`data_ptr`."""
        return 0

    # -- leaving the sharded world ------------------------------------------------------------------------------------

    @compat.python_only
    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return a copy of the whole tensor, ``[*shape]``, on every rank. A collective.

        So is its backward: the gradient of a rank's rows is the mean over ranks of the gradients of this copy.

        Args:
            grad_placements: What the gradients of this copy are: the same on every rank, or parts of a sum
                (``Partial()``).
        """
        whole = self._whole("full_tensor()")
        if not grad_placements or all(placement.is_replicate() for placement in grad_placements):
            return whole
        if all(placement == Partial("sum") for placement in grad_placements):
            return scaled(whole, self.device_mesh.size())
        raise ValueError(
            f"full_tensor of {self.row_split.name!r} takes grad_placements that are all Replicate() or all Partial(), "
            f"got {tuple(grad_placements)}."
        )

    @compat.python_only
    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **kwargs: Any
    ) -> DTensor:
        """Return an ordinary DTensor of the same values, replicated or evenly sharded. A collective."""
        return redistributed(self._whole("redistribute()"), device_mesh or self.device_mesh, placements, kwargs)

    def unsharded(self, what: str) -> Tensor:
        """Return the whole tensor for a function of it and of ordinary tensors, which are this rank's own.

        Its gradient becomes one like those of the forward: a mean over ranks, or, if the model has losses per token, a
        sum. A collective.
        """
        return scaled(self._whole(what), self.gradient_factor)

    def _whole(self, what: str) -> Tensor:
        with computed.computing(computed.text_of(self)):
            if self.requires_grad and torch.is_grad_enabled():
                with compat.below_function_transforms():  # transforms see a constant, as in forward
                    whole: Tensor = _Whole.apply(self, what)
                return whole
            with torch.no_grad():
                return all_gather_rows(self._local_tensor, self.row_split, self.topology, what)

    # -- where values come from ---------------------------------------------------------------------------------------

    @property
    def is_of_parameter(self) -> bool:
        """Whether these are a parameter's values, or computed from parameters only."""
        return isinstance(self, nn.Parameter) or _ORIGIN in vars(self)

    def computed_from(self, source: RowShardedTensor) -> None:
        """Note that these values were computed from those of a parameter."""
        self.__dict__[_ORIGIN] = source._home

    @property
    def _home(self) -> Any:
        return vars(self).get("mfsdp_handle") or vars(self).get(_ORIGIN)

    @property
    def part_of(self) -> str | None:
        """The class of the packed weight of which these are bytes; see :mod:`..formats.packed`."""
        bucket = self._home.reference() if self._home is not None else None
        return vars(bucket.params[self._home.index]).get(PART_OF) if bucket is not None else None

    @property
    def gradient_factor(self) -> float:
        """What the mean of ranks' gradients is multiplied by for a gradient like those of the forward."""
        bucket = self._home.reference() if self._home is not None else None
        return 1.0 if bucket is None else bucket.gradient_factor

    @property
    def data(self) -> RowShardedTensor:  # type: ignore[override]
        """The same rows, detached.

        Assignment to that of a parameter copies the values, because the memory belongs to a bucket. As in torch, what
        refers to the rows keeps the former values, and ``values`` refer to the rows if they are sharded like these.
        """
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, values: Tensor) -> None:
        if values.shape != self.shape or values.dtype != self.dtype:
            raise RuntimeError(
                f"{self.row_split.name!r} is a shard of a bucket, and keeps its shape and dtype: .data takes values of "
                f"shape {tuple(self.shape)} and {self.dtype}, got {tuple(values.shape)} and {values.dtype}. Change "
                "shapes, such as with resize_token_embeddings, and dtypes before the model is sharded."
            )
        with torch.no_grad():
            if isinstance(values, RowShardedTensor):
                if values.backing is self.backing and values._local_tensor.is_set_to(self._local_tensor):
                    return  # p.data -= update
                values.backing.aliases.of(values)  # raises before anything changes
            if not self._is_parameter and (isinstance(self, nn.Parameter) or _ORIGIN in vars(self)):
                own = RowShardedTensor.wrap(torch.empty_like(self._local_tensor), self.row_split, self.topology)
                own.copy_(values)
                self.move_in(own)
            else:
                keep_values(self)
                self.detach().copy_(values)
            if self._has_rows_of(values):
                follow(values, self)

    def _has_rows_of(self, other: Tensor) -> bool:
        """Whether ``other`` has the same rows, in memory of its own."""
        return (
            isinstance(other, RowShardedTensor)
            and not (other.backing or other._is_parameter)
            and other.row_split.has_rows_of(self.row_split)
            and same_ranks(other.topology, self.topology)
            and other._local_tensor.stride() == self._local_tensor.stride()
        )

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return this rank's rows. Gradients of results computed from them are gradients of these rows only."""
        rows = self.rows()
        if not (self.requires_grad and torch.is_grad_enabled()):
            rows = rows.view_as(rows)
        else:
            rows = _ToLocal.apply(self)
        if self.backing.watch is not None and type(rows) is Tensor:
            self.backing.watch()
            self.backing.aliases.lend(rows, self.row_split.name)
        return rows

    def rows(self) -> Tensor:
        """Return this rank's rows for a use that ends at once."""
        for resident in self.backing[1:]:
            compat.wait_tensor(resident)  # the caller may write to the rows
        if self.backing.settle is not None:
            self.backing.settle()
        return self._local_tensor

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        with compat.DisableTorchFunctionSubclass():
            return Tensor.requires_grad.__get__(self)  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> RowShardedTensor:  # type: ignore[override]
        """Freeze or unfreeze a parameter, like ``Tensor.requires_grad_``. Call it between steps, and on all ranks."""
        super().requires_grad_(requires_grad)
        if (home := vars(self).get("mfsdp_handle")) is not None:
            home.toggled()
        return self

    # Autograd passes no gradients to parameters (see :mod:`.gradients`), so it must not run their hooks, which would
    # get None.

    @property
    def tensor_hooks(self) -> dict[int, Callable[[Tensor], Tensor | None]]:
        """Hooks of a parameter that are called with its reduced gradient, a DTensor."""
        hooks: dict[int, Callable[[Tensor], Tensor | None]] = self.__dict__.setdefault(TENSOR_HOOKS, OrderedDict())
        return hooks

    @property
    def accumulate_hooks(self) -> dict[int, Callable[[Tensor], None]]:
        """Hooks of a parameter that are called with it after its gradient was accumulated."""
        hooks: dict[int, Callable[[Tensor], None]] = self.__dict__.setdefault(ACCUMULATE_HOOKS, OrderedDict())
        return hooks

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
        for name, hooks in ((TENSOR_HOOKS, tensor_hooks), (ACCUMULATE_HOOKS, accumulate_hooks)):
            if hooks:
                self.__dict__[name] = hooks

    @property
    def _is_parameter(self) -> bool:
        return "mfsdp_handle" in vars(self)

    def _register(self, hook: Any, hooks: dict[int, Any]) -> RemovableHandle:
        if not self.requires_grad:
            raise RuntimeError(f"{self.row_split.name!r} is frozen, so a hook on its gradient would never run.")
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def share_memory_(self) -> Tensor:
        raise RuntimeError(
            f"{self.row_split.name!r} is a part of a bucket: its memory cannot be shared between processes."
        )

    # torch.distributed.checkpoint calls these to learn which rows this rank holds. ``Shard(0)`` would imply others.

    def _boxes(self) -> list[RowBox]:
        boxes = self.row_split.boxes(self.topology.shard)
        if not self.numel() and not boxes and not self.topology.shard:  # it is in the checkpoint all the same
            return [RowBox(self.row_split.offsets, self.row_split.part_shape, range(0))]
        return boxes

    def __create_chunk_list__(self) -> list[Any]:
        # Called on every rank, with or without rows, before a checkpoint is read into these rows.
        if self.backing:
            self.backing.noted.pop(self.row_split.name, None)
            before_write(self)
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
                "only leaves of the autograd graph can be deep-copied, not a result computed from "
                f"{self.row_split.name!r}"
            )
        duplicate: Tensor = RowShardedTensor.wrap(self._local_tensor.detach().clone(), self.row_split, self.topology)
        if isinstance(self, nn.Parameter):
            duplicate = nn.Parameter(duplicate, requires_grad=self.requires_grad)
        else:
            duplicate.requires_grad_(self.requires_grad)
        memo[id(self)] = duplicate
        if self.grad is not None:
            duplicate.grad = copy.deepcopy(self.grad, memo)
        return duplicate

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the inner tensor to torch's tools.

        Dynamo calls this, too, when it finds a sharded parameter in code that it compiles: an optimizer's step, a
        penalty on weights. It would continue with a plain DTensor, which does not know where rows are, so this raises a
        graph break.
        """
        if compat.dynamo_traces():
            raise compat.graph_break(
                f"{self.row_split.name!r} is sharded over {self.row_split.layout.world_size} ranks: code that reads "
                "parameters between steps (an optimizer, a penalty on weights) runs eagerly. Take it out of what "
                "fullgraph=True compiles."
            )
        return ["_local_tensor"], (self.row_split, self.topology, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(  # type: ignore[override]
        inner: dict[str, Tensor], context: Any, *_: Any
    ) -> RowShardedTensor:
        return RowShardedTensor.wrap(inner["_local_tensor"], *context)


NOTED_VALUE = "mfsdp_value"
"""Attribute of an unsharded parameter: what :attr:`.Backing.noted` has of it when it is sharded."""


def noted_value(param: Tensor) -> str | None:
    """Return the digest of a parameter's whole value, if one was noted."""
    if isinstance(param, RowShardedTensor):
        return param.backing.noted.get(param.row_split.name)
    return vars(param).get(NOTED_VALUE)


def redistributed(
    whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement] | None, options: dict[str, Any]
) -> DTensor:
    """Distribute a tensor that every rank holds. Gradients are taken to be the same on every rank, as torch does."""
    everywhere = [Replicate()] * mesh.ndim
    replicated = DTensor.from_local(whole, mesh, everywhere, run_check=False)
    return replicated.redistribute(mesh, placements or everywhere, **options)


def scaled(tensor: Tensor, factor: float) -> Tensor:
    """Return a tensor whose gradient is multiplied by ``factor``."""
    if factor == 1 or not tensor.requires_grad:
        return tensor
    out: Tensor = _Scaled.apply(tensor, factor)
    return out


class _Scaled(compat.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.factor, None


class _Whole(compat.Function):
    """The whole tensor. In backward, each rank takes its rows of the mean of all ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: RowShardedTensor, what: str) -> Tensor:
        ctx.of = tensor.row_split, tensor.topology
        return all_gather_rows(tensor._local_tensor, tensor.row_split, tensor.topology, what)

    @staticmethod
    @compat.python_only
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        refuse_backward()
        split, topology = ctx.of
        gradient = Averaging.over(topology, split).mean(gradient)
        return RowShardedTensor.wrap(take_rows(gradient, split, topology.shard).clone(), split, topology), None


class _ToLocal(compat.Function):
    @staticmethod
    def forward(ctx: Any, tensor: RowShardedTensor) -> Tensor:
        ctx.of = tensor.row_split, tensor.topology
        return tensor._local_tensor.view_as(tensor._local_tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        refuse_backward()
        return RowShardedTensor.wrap(gradient, *ctx.of)


class UnreducedGradient(RowShardedTensor):
    """The gradient of a parameter whose reduction is deferred: shape and dtype, but no values.

    It can be set to None, or to zero, which also applies to the deferred gradient. Computing with it raises an error
    that explains how to get the values. Otherwise a step would silently use a part of the gradient.
    """

    zeroed: bool = False
    earlier: dict[int, Tensor]
    """Gradients of the bucket that are reduced already, by the parameter's index, and part of the result."""
    index: int

    @staticmethod
    def like(param: RowShardedTensor, earlier: dict[int, Tensor], index: int) -> UnreducedGradient:
        local = param._local_tensor
        nothing = torch.zeros((), dtype=local.dtype, device=local.device).expand(local.shape)
        made = UnreducedGradient.wrap(nothing, param.row_split, param.topology)
        made.earlier, made.index = earlier, index
        return made

    def add_reduced(self, gradient: Tensor) -> None:
        """Add a gradient of what was computed from the parameter outside of forward, which autograd has averaged."""
        keep(self)
        before = self.earlier.get(self.index)
        self.earlier[self.index] = gradient if before is None else before + gradient

    def set_to_zero(self) -> None:
        self.zeroed = True
        self.earlier.pop(self.index, None)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.row_split.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        refuse_unreduced(self.row_split.name)

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        refuse_unreduced(self.row_split.name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        refuse_unreduced(self.row_split.name)


def refuse_unreduced(name: str) -> NoReturn:
    raise RuntimeError(
        f"The gradient of {name!r} is not reduced yet: the last microbatch of this step was not "
        "marked. Mark it (model.is_last_microbatch = True, model.set_model_auto_sync(), model.sync()), or call "
        "model.finish_grad_sync() before gradients are read; of FSDP2's face: model.set_requires_gradient_sync(True) "
        "before the last microbatch. An optimizer from fully_shard_optimizer does so in step()."
    )


_PROVISIONAL = "mfsdp_provisional"


def mark_provisional(gradient: RowShardedTensor) -> None:
    """Mark zeros that stand for no gradient, until a gradient is known to exist or something is written to them."""
    gradient.__dict__[_PROVISIONAL] = [True]  # shared with views


def is_provisional(gradient: Tensor) -> bool:
    return any(vars(gradient).get(_PROVISIONAL, ()))


def keep(gradient: Tensor) -> None:
    """Unmark a provisional gradient: it is a gradient."""
    vars(gradient).get(_PROVISIONAL, []).clear()


def before_write(*tensors: RowShardedTensor) -> None:
    """Prepare for a write to the rows of ``tensors``.

    A running gather of the resident, such as one started by an optimizer's step, would send half-written rows, and
    overwrite the new values with old ones. Therefore this waits for it, and for copies of rows that rest on the host.
    """
    for backing in {id(tensor.backing): tensor.backing for tensor in tensors}.values():
        for resident in backing[1:]:
            compat.wait_tensor(resident)
        if backing.settle is not None:
            backing.settle()
        torch.autograd.graph.increment_version(list(backing))
