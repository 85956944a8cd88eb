"""What operators compute from parameters at rest, and every rank then holds: norms, sums, products, transposes.

A :class:`ReplicatedTensor` is a DTensor like those that FSDP2's parameters give, so ``full_tensor()`` and
``to_local()`` exist. Unlike these, it can be combined with ordinary tensors, and then gives an ordinary one: a loss
plus a penalty.

A :class:`RowView` is a view of a sharded tensor that needs other ranks' rows (``p[0]``, ``p.t()``). It holds no memory:
reading gathers the tensor, and writing changes the tensor, as with every view.

A penalty (``sum(p.pow(2).sum() for p in model.parameters())``) is the same number on every rank. The factor that it is
multiplied by may not be: a weight of the batch, a number of tokens. Its gradient then differs between ranks, and each
rank would scale the rows that it holds by a different factor. Therefore the gradient is averaged over ranks before it
reaches the rows, like the gradients of parameters in forward. Operators cannot add the node for this to the autograd
graph, because they run below autograd: the first function that uses their result does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from .. import compat
from .averaging import Averaging, Reduction
from .computed import computing, note, text_of
from .dispatched import Dispatched
from .redistribute import all_gather_rows, take_rows
from .tensor import RowShardedTensor, redistributed, scaled


class ReplicatedTensor(Dispatched):
    """A DTensor of which every rank holds everything. Operators run on the local tensor."""

    averaging: Averaging | None
    """How the gradient of this tensor becomes one that parameters can take; None: it already is."""
    view_of: str | None
    """The parameter that this holds values of a view of, if writes to this would not reach it."""
    own: bool
    """Whether an ordinary number or index was combined with it, which may differ between ranks: so may this."""
    reduction: Reduction | None
    """What this number is of a sharded tensor; None: something else."""

    @classmethod
    def wrap(
        cls, local: Tensor, mesh: DeviceMesh, averaging: Averaging | None = None, view_of: str | None = None
    ) -> ReplicatedTensor:
        """Wrap a tensor that every rank of ``mesh`` holds."""
        return cls._make(local, mesh, local, averaging, view_of)

    @classmethod
    def _make(
        cls, local: Tensor, mesh: DeviceMesh, like: Tensor, averaging: Averaging | None, view_of: str | None = None
    ) -> Any:
        spec = compat.DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=_meta_of(like))
        made: Any = DTensor.__new__(cls, local, spec, requires_grad=False)  # type: ignore[call-arg]
        made.averaging, made.view_of, made.own, made.reduction = averaging, view_of, False, None
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Use :meth:`wrap`."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._local_tensor!r})"

    def __format__(self, spec: str) -> str:
        return format(self._local_tensor.detach(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._local_tensor.detach().__reduce_ex__(protocol)  # an ordinary tensor, in any process

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return memo.setdefault(id(self), ReplicatedTensor.wrap(self._local_tensor.clone(), self.device_mesh))

    def numpy(self, *, force: bool = False) -> Any:
        return self._local_tensor.numpy(force=force)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self._local_tensor.__array__(*args, **kwargs)

    def tolist(self) -> Any:
        return self._local_tensor.tolist()

    def data_ptr(self) -> int:
        return self._local_tensor.data_ptr()

    @compat.python_only
    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the ordinary tensor; the same on every rank."""
        with compat.below_function_transforms():  # transforms see a constant
            return _ToOrdinary.apply(self.averaged)

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """Return the ordinary tensor; the same on every rank."""
        return self.to_local()

    def unsharded(self, what: str) -> Tensor:
        """Return the ordinary tensor, for a function of it and of ordinary tensors, which are this rank's own."""
        return self.to_local()

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Placement] | None = None, **kwargs: Any
    ) -> DTensor:
        """Return an ordinary DTensor of the same values, replicated or evenly sharded."""
        return redistributed(self.to_local().clone(), device_mesh or self.device_mesh, placements, kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        if compat.dynamo_traces():
            raise compat.graph_break(
                "What was computed from sharded parameters between steps is used eagerly. Take it out of what "
                "fullgraph=True compiles, or pass its .full_tensor()."
            )
        return ["_local_tensor"], (self.device_mesh,)

    @staticmethod
    def __tensor_unflatten__(  # type: ignore[override]
        inner: dict[str, Tensor], context: Any, *_: Any
    ) -> ReplicatedTensor:
        return ReplicatedTensor.wrap(inner["_local_tensor"], *context)

    def __coerce_same_metadata_as_tangent__(self, expected: Any, expected_type: Any = None) -> Tensor | None:
        """Return the ordinary tensor as the gradient of an ordinary number that compiled code has returned."""
        return self._local_tensor if expected_type is Tensor else None

    def reshaped_in_place(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ReplicatedTensor:
        """Take the shape that the local tensor has got from an operator, such as ``squeeze_``."""
        self._spec = compat.DTensorSpec(self.device_mesh, self.placements, tensor_meta=_meta_of(self._local_tensor))
        changed: ReplicatedTensor = compat.return_and_correct_aliasing(func, args, kwargs, self)
        return changed

    @property
    def averaged(self) -> ReplicatedTensor:
        """This tensor; if autograd needs it, behind a node that averages its gradient."""
        if vars(self)["averaging"] is None:
            return self
        with compat.DisableTorchFunctionSubclass():
            if not (self.requires_grad and torch.is_grad_enabled()):
                return self
            if "_averaged" not in vars(self):
                with compat.below_function_transforms():
                    self._averaged = _Average.apply(self, self.averaging)
        return self._averaged


def _meta_of(tensor: Tensor) -> compat.TensorMeta:
    return compat.TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)


def replicate(result: Any, sources: Sequence[Tensor]) -> Any:
    """Wrap what every rank has computed from ``sources``, some of them sharded, in nested lists."""
    if isinstance(result, (list, tuple)):
        return type(result)([replicate(each, sources) for each in result])
    if not isinstance(result, Tensor) or isinstance(result, DTensor):
        return result
    mine = next(t for t in sources if isinstance(t, Dispatched))
    made = ReplicatedTensor.wrap(result, mine.device_mesh, averaging_of(result, sources))
    made.own = any(map(is_own, sources))
    return made


def is_own(tensor: Tensor) -> bool:
    """Whether a tensor may have other values on each rank."""
    return tensor.own if isinstance(tensor, ReplicatedTensor) else not isinstance(tensor, DTensor)


def own_of_rank(value: Tensor, mesh: DeviceMesh, view_of: str = "") -> ReplicatedTensor:
    """Make a DTensor of what this rank has computed from a parameter and from its own numbers.

    Args:
        view_of: The parameter, if these are values of a view of it.
    """
    made: ReplicatedTensor = _FromOrdinary.apply(value, mesh)
    made.own, made.view_of = True, view_of or None
    return made


def as_rows(gradient: Tensor, like: RowShardedTensor) -> Tensor:
    """Return a gradient that every rank holds as this rank's rows of it; others as they are."""
    if not isinstance(gradient, ReplicatedTensor):
        return gradient
    rows = take_rows(gradient.full_tensor().detach(), like.row_split, like.topology.shard).clone()
    return RowShardedTensor.wrap(rows, like.row_split, like.topology)


def averaging_of(result: Tensor, sources: Sequence[Tensor]) -> Averaging | None:
    """Return how to average the gradient of a result that was computed from ``sources``; None if there will be none."""
    if not (compat.DTENSOR_SUBCLASSES_DISPATCH and torch.is_grad_enabled()):
        return None
    if not (result.is_floating_point() or result.is_complex()):
        return None
    for tensor in sources:
        if tensor.requires_grad and isinstance(tensor, RowShardedTensor):
            return Averaging.over(tensor.topology, tensor.row_split)
        if tensor.requires_grad and isinstance(tensor, ReplicatedTensor) and tensor.averaging is not None:
            return tensor.averaging  # used by an operator that consists of several: no function has seen it
    return None


class Step(NamedTuple):
    """One operator of those that make a view: ``func(tensor, *args, **kwargs)``, of whose results it is number
    ``number``."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int | None = None

    def of(self, tensor: Tensor) -> Any:
        made = self.func(tensor, *self.args, **self.kwargs)
        return made if self.number is None else made[self.number]


class RowView(ReplicatedTensor):
    """A view of a sharded tensor that needs other ranks' rows; it keeps no values."""

    base: RowShardedTensor
    steps: tuple[Step, ...]

    @staticmethod
    def make(base: RowShardedTensor, steps: tuple[Step, ...], averaging: Averaging | None) -> RowView:
        like = functools.reduce(lambda t, step: step.of(t), steps, base.outline)
        nothing = base._local_tensor.new_zeros((), dtype=like.dtype).expand(like.shape)
        with torch.inference_mode(base.is_inference()):  # a view of an ordinary tensor is one, too
            view: RowView = RowView._make(nothing, base.device_mesh, like, averaging, base.row_split.name)
        view.base, view.steps = base, steps
        base.backing.aliases.add_view(view)
        return view

    def of(self, whole: Tensor) -> Tensor:
        """Return the view of an ordinary tensor in place of the sharded one."""
        return functools.reduce(lambda t, step: step.of(t), self.steps, whole)

    def unsharded(self, what: str) -> Tensor:
        return scaled(self.to_local(), self.base.gradient_factor)

    def storage_offset(self) -> int:
        """Return the offset in the whole tensor, for ``as_strided``."""
        return self.of(self.base.outline).storage_offset()

    @property
    def _local_tensor(self) -> Tensor:  # type: ignore[override]
        """The values. A collective."""
        base = self.base
        with torch.no_grad(), computing(text_of(base)):
            return self.of(all_gather_rows(base._local_tensor, base.row_split, base.topology, "a view"))

    @_local_tensor.setter
    def _local_tensor(self, values: Tensor) -> None:
        pass  # DTensor's constructor sets it

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"RowView({self.base.row_split.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


class _ToOrdinary(compat.Function):
    @staticmethod
    def forward(ctx: Any, value: ReplicatedTensor) -> Tensor:
        ctx.mesh = value.device_mesh
        local = value._local_tensor
        return local.view_as(local) if local.layout is torch.strided else local.detach()

    @staticmethod
    @compat.python_only
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return _FromOrdinary.apply(gradient, ctx.mesh)


class _FromOrdinary(compat.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, mesh: DeviceMesh) -> Tensor:
        return ReplicatedTensor.wrap(value, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient, None


class _Average(compat.Uncaptured):
    @staticmethod
    def forward(ctx: Any, value: ReplicatedTensor, averaging: Averaging) -> Tensor:
        ctx.mesh, ctx.averaging = value.device_mesh, averaging
        values = value._local_tensor
        # A copy: a view could not be written to.
        copy = ReplicatedTensor.wrap(values.clone(), value.device_mesh, view_of=value.view_of)
        note(text_of(value), copy)
        return copy

    @staticmethod
    @compat.python_only
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _Mean.apply(gradient, ctx.mesh, ctx.averaging), None


class _Mean(compat.Function):
    """The mean over ranks. Its backward is the same operation."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, mesh: DeviceMesh, averaging: Averaging) -> Tensor:
        ctx.mesh, ctx.averaging = mesh, averaging
        if isinstance(gradient, RowShardedTensor):
            return ReplicatedTensor.wrap(gradient.full_tensor(), mesh)  # each rank has its rows of one gradient
        value = gradient._local_tensor if isinstance(gradient, ReplicatedTensor) else gradient
        return ReplicatedTensor.wrap(averaging.mean(value), mesh)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _Mean.apply(gradient, ctx.mesh, ctx.averaging), None, None
