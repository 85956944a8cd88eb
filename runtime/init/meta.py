"""Initialization of models that were constructed on the meta device.

Shards are created first, empty. Then each module in turn gets memory for its own parameters and buffers and is
initialized, and this rank's rows are copied. At any time, only one module's own parameters are whole in memory. On any
number of ranks, the numbers drawn are those that

    model.to_empty(device=device)
    for module in model.modules():
        module.reset_parameters()

draws in one process. (Megatron-FSDP initializes one bucket at a time, each rank with its own generator.) Values that
can be read by rows, from a file, are read directly into the shards, and nothing is whole.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .. import compat
from ..geometry.rows import RowBox, RowSplit

if TYPE_CHECKING:
    from ..memory.bucket import Bucket, ParamHandle

InitFn = Callable[[nn.Module], None]
"""Function that gives values to a module's own parameters and buffers, which have memory when it is called."""


class Initializer:
    """Gives values to a model on the meta device.

    Subclasses may read values by rows, so that no rank holds them whole.
    """

    def prepare(self, module: nn.Module) -> None:
        """Raise unless all of ``module`` will get values. Every rank calls this; if one raises, all do."""

    draws: bool = True
    """Whether random numbers are drawn, as far as known after :meth:`prepare`. If so, ranks need the same seed."""

    gives_values: bool = True
    """Whether all have values afterwards. If not, the model awaits them before its first forward."""

    all_modules: bool = False
    """Whether modules that own nothing on the meta device are passed in, too."""

    def order(self, module: nn.Module) -> Iterable[nn.Module]:
        """Return all modules, in the order in which to initialize them."""
        return module.modules()

    def __call__(self, owner: nn.Module) -> None:
        """Give values to a module's own parameters and buffers, which are whole.

        Parameters of other modules are shards, which support fills and elementwise computation.
        """
        raise NotImplementedError

    def decides(self, name: str) -> bool:
        """Whether ``name`` determines the values of a tied parameter, which gets values under several names.

        If several names do, the last one counts.
        """
        return True

    def has(self, name: str) -> bool:
        """Whether this parameter's or buffer's values can be read. They are read after all modules were initialized."""
        return False

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Read a part of a tensor for which :meth:`has` returns True, given by one slice per dimension."""
        raise NotImplementedError


class ByMethod(Initializer):
    """Initializes modules with their ``reset_parameters()`` or ``_reset_parameters()``."""

    _NAMES = ("reset_parameters", "_reset_parameters")

    def prepare(self, module: nn.Module) -> None:
        """Check that the modules have such a method.

        Raises:
            ValueError: A module that owns tensors on the meta device has none.
        """
        for name, owner in module.named_modules():
            own = _own_meta(owner)
            if own and self._method_of(owner) is None:
                raise ValueError(
                    f"[init_model_with_meta_device=True] Module {name!r}, a {type(owner).__name__}, has "
                    f"{', '.join(map(repr, own))} on the meta device, but no reset_parameters or _reset_parameters "
                    "method. Give the class such a method, or pass init_fn=..., which is called with every module "
                    "that owns such tensors (for models of transformers: "
                    "mfsdp_compile.integrations.huggingface_init.Initialization())."
                )

    def __call__(self, owner: nn.Module) -> None:
        method = self._method_of(owner)
        assert method is not None
        method()

    def _method_of(self, owner: nn.Module) -> Callable[[], None] | None:
        return next((getattr(owner, name) for name in self._NAMES if callable(getattr(owner, name, None))), None)


class ByFunction(Initializer):
    """Initializes modules with the user's function.

    Raises:
        TypeError: It is not callable.
    """

    def __init__(self, function: InitFn) -> None:
        if not callable(function):
            raise TypeError(f"init_fn takes a function (module) -> None, got a {type(function).__name__}")
        self._function = function

    def __call__(self, owner: nn.Module) -> None:
        self._function(owner)


class Later(Initializer):
    """Leaves the values to the program, which fills the shards. Until then they are NaN, which shows missing ones."""

    draws = False
    gives_values = False

    def __call__(self, owner: nn.Module) -> None:
        for tensor in (*owner._parameters.values(), *owner._buffers.values()):
            if tensor is not None:
                tensor.detach().fill_(float("nan") if tensor.is_floating_point() else 0)


def has_meta(module: nn.Module) -> bool:
    return any(_own_meta(owner) for owner in module.modules())


def random_state(device: torch.device) -> str:
    """Return a digest of the state of the generators that initialization draws from."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return hashlib.sha1(b"".join(state.numpy().tobytes() for state in states), usedforsecurity=False).hexdigest()


@torch.no_grad()
def initialize(
    module: nn.Module,
    handles: Mapping[nn.Module, Mapping[str, ParamHandle]],
    originals: Mapping[nn.Module, Mapping[str, nn.Parameter]],
    device: torch.device,
    initializer: Initializer,
) -> None:
    """Give values to every module that owns a tensor on the meta device.

    Args:
        module: Module whose parameters are sharded, without values.
        handles: Bucket and index of each module's parameters, by attribute.
        originals: The parameters before sharding, by attribute.
        device: Device of the values while they are whole.
        initializer: Initializer that was prepared.

    Raises:
        NotImplementedError: Values of experts that differ between ranks should be read.
        ValueError: An initializer has replaced a parameter.
    """
    _Initialization(module, handles, originals, device, initializer).run()


class _Initialization:
    """One initialization. The arguments are those of :func:`initialize`."""

    def __init__(
        self,
        module: nn.Module,
        handles: Mapping[nn.Module, Mapping[str, ParamHandle]],
        originals: Mapping[nn.Module, Mapping[str, nn.Parameter]],
        device: torch.device,
        initializer: Initializer,
    ) -> None:
        self._module, self._handles, self._originals = module, handles, originals
        self._device, self._initializer = device, initializer
        self._names = {owner: name for name, owner in module.named_modules()}
        self._buffers = {
            owner: [name for name, buffer in owner._buffers.items() if buffer is not None and buffer.is_meta]
            for owner in self._names
        }

    def run(self) -> None:
        experts = self._outermost_of_experts()
        for outermost, together in itertools.groupby(self._initializer.order(self._module), key=experts.get):
            if outermost is None:
                for owner in together:
                    self._call(owner)
            else:
                self._call_for_all_ranks(outermost, list(together))
        self._read()

    def _outermost_of_experts(self) -> dict[nn.Module, nn.Module]:
        """Map each module in which all parameters are experts to the outermost such module around it."""
        found: dict[nn.Module, nn.Module] = {}
        for module in self._module.modules():
            if module not in found:
                inside = self._handles_in(module)
                if inside and all(handle.bucket.plan.is_expert for handle in inside):
                    found |= dict.fromkeys(module.modules(), module)
        return found

    def _handles_in(self, module: nn.Module) -> list[ParamHandle]:
        return [handle for owner in module.modules() for handle in self._handles.get(owner, {}).values()]

    def _call_for_all_ranks(self, outermost: nn.Module, owners: Sequence[nn.Module]) -> None:
        """Initialize experts like one process that has all of them.

        Stacked parameters, which the outermost module owns itself, are initialized once. Other modules have different
        counterparts on each rank. They are initialized as often as there are ranks, one turn per rank.
        """
        handles = self._handles_in(outermost)
        ranks, mine = max(map(_parted, handles))
        kept: list[tuple[Tensor, Tensor]] = []
        for turn in range(ranks):
            for owner in owners:
                if owner is not outermost:
                    self._call(owner, of_whole=False, keep=turn == mine)
                elif turn == 0:
                    self._call(owner)
            if turn == mine < ranks - 1:
                kept = [(rows, rows.clone()) for rows in map(_shard, handles)]
        for rows, values in kept:  # other turns may have overwritten them: parents write to children
            rows.copy_(values)

    def _call(self, owner: nn.Module, of_whole: bool = True, keep: bool = True) -> None:
        """Initialize a module, unless everything it owns can be read.

        Args:
            of_whole: Whether to initialize whole parameters, or only the parts that this rank's buckets hold.
            keep: Whether to copy this rank's rows.
        """
        from .deferred_fill import DeferredFills

        own, buffers = self._handles.get(owner, {}), self._buffers[owner]
        prefix = f"{self._names[owner]}." if self._names[owner] else ""
        empty = [handle for name, handle in own.items() if self._originals[owner][name].is_meta]
        if not (empty or buffers):
            if self._initializer.all_modules:
                self._initializer(owner)
            return
        has = self._initializer.has
        if all(_stored(handle, self._initializer) for handle in empty) and all(has(prefix + name) for name in buffers):
            return
        before = {name: owner._parameters[name] for name in own}, {name: owner._buffers[name] for name in buffers}
        for name, handle in own.items():
            # Nothing else references these values, so they are freed when the next module is initialized.
            owner._parameters[name] = self._empty(handle, of_whole)
        for name in buffers:
            owner._buffers[name] = torch.empty_like(owner._buffers[name], device=self._device)
        try:
            drawing = DeferredFills([param for name in own if (param := owner._parameters[name]) is not None])
            with drawing, compat.transformer_engine.unquantized(owner):
                self._initializer(owner)
            for name, handle in own.items():
                values, rows = _checked(owner, name, _shape(handle, of_whole)), _shard(handle)
                if keep and rows.numel() and self._initializer.decides(prefix + name):
                    drawing.take(values, [(box.slices, box.of(rows)) for box in _boxes(handle, of_whole)])
        finally:
            owner._parameters.update(before[0])
            if not keep:
                owner._buffers.update(before[1])

    def _empty(self, handle: ParamHandle, of_whole: bool) -> nn.Parameter:
        plan = handle.bucket.plan
        values = torch.empty(_shape(handle, of_whole), dtype=plan.model_dtype, device=self._device)
        return nn.Parameter(values, requires_grad=plan.requires_grad)

    def _read(self) -> None:
        known: set[tuple[Bucket, int]] = set()
        for owner, path in self._names.items():
            prefix = f"{path}." if path else ""
            for name in self._buffers[owner]:
                if self._initializer.has(prefix + name):
                    buffer = owner._buffers[name]
                    assert buffer is not None
                    values = self._initializer.read(prefix + name, tuple(slice(0, size) for size in buffer.shape))
                    owner._buffers[name] = values.to(self._device, buffer.dtype)
            for name, handle in self._handles.get(owner, {}).items():
                if self._originals[owner][name].is_meta and (handle.bucket, handle.index) not in known:
                    known.add((handle.bucket, handle.index))
                    if (stored := _stored(handle, self._initializer)) is not None:
                        read_rows(handle, stored, self._initializer)


def _parted(handle: ParamHandle) -> tuple[int, int]:
    """Return how many ranks have different experts in place of this parameter, and this rank's number among them."""
    partition = _split(handle).partition
    if handle.bucket.plan.is_expert and partition is not None and partition.bare:
        return partition.mesh.size(), partition.mesh.get_local_rank()
    return 1, 0


def _shape(handle: ParamHandle, of_whole: bool) -> tuple[int, ...]:
    return _split(handle).shape if of_whole else _split(handle).part_shape


def _boxes(handle: ParamHandle, of_whole: bool) -> list[RowBox]:
    """Return the boxes that this rank holds of the whole parameter, or of the part that the bucket holds."""
    split = _split(handle)
    boxes = split.boxes(handle.bucket.topology.shard)
    if of_whole:
        return boxes
    first = split.offsets
    return [box._replace(offsets=tuple(map(operator.sub, box.offsets, first))) for box in boxes]


def _stored(handle: ParamHandle, initializer: Initializer) -> str | None:
    """Return a name under which a parameter's values can be read, if any. A tied parameter has several names."""
    return next(
        (location.name for location in handle.bucket.locations[handle.index] if initializer.has(location.name)), None
    )


def read_rows(handle: ParamHandle, name: str, initializer: Initializer) -> None:
    """Read this rank's rows of a parameter, in place.

    Args:
        handle: Its place.
        name: Its name, for which ``initializer`` can read values.

    Raises:
        NotImplementedError: Ranks hold different experts under that name.
        ValueError: The values have another shape.
    """
    split, rank = _split(handle), handle.bucket.topology.shard
    if _parted(handle)[0] > 1:
        raise NotImplementedError(
            f"Parameter {name!r} is an expert, and ranks hold different experts under that name: which one the file "
            "holds is unknown. Convert the file (mfsdp convert), and load the checkpoint into a model that was "
            "initialized."
        )
    for box in split.boxes(rank):
        part, found = box.of(_shard(handle)), initializer.read(name, box.slices)
        if found.shape != part.shape:
            raise ValueError(
                f"Reading values of parameter {name!r} {split.shape} returned a tensor of shape {tuple(found.shape)}, "
                f"but this rank's part has shape {tuple(part.shape)}: the file belongs to another model."
            )
        part.copy_(found)


def _checked(owner: nn.Module, name: str, shape: Sequence[int]) -> Tensor:
    values = owner._parameters[name]
    if values is None or tuple(values.shape) != tuple(shape):
        found = "nothing" if values is None else f"a tensor of shape {tuple(values.shape)}"
        raise ValueError(
            f"Initializing a {type(owner).__name__} left {found} in place of its parameter {name!r} of shape "
            f"{tuple(shape)}. Give values to it in place."
        )
    return values


def _split(handle: ParamHandle) -> RowSplit:
    return handle.bucket.splits[handle.index]


def _shard(handle: ParamHandle) -> Tensor:
    """Return this rank's rows in their bucket."""
    return handle.bucket.views(handle.bucket.flat.detach())[handle.index]


def _own_meta(owner: nn.Module) -> dict[str, Tensor]:
    tensors = {**owner._parameters, **owner._buffers}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.is_meta}
