"""Modules with sharded parameters, as seen from inside and outside their forward.

``_parameters`` always holds the DTensor shards, and everything that walks parameters (optimizers, ``state_dict``,
``apply``) finds those. ``module.weight`` is a property of a generated subclass of the module's class (a technique from
SimpleFSDP). It returns one of three things:

    while Dynamo traces for backend="mfsdp"       the marker ``torch.ops.mfsdp.unshard(shell, layout)``
    in eager mode, inside a forward or backward   the gathered parameter
    otherwise, and in hooks of parameters         the shard

If Dynamo traces for another backend inside a forward that runs eagerly, as for ``torch.cond`` or a method with a
decorator ``@torch.compile``, it finds the gathered parameter in a property of its own, and reads it at each call.

There is one subclass per class and set of names, so that equal layers keep sharing compiled code. The layout's
signature is a string that Dynamo guards on: instances with other layouts get their own code. The subclass's ``forward``
opens a window of the eager path around the original one. (Forward hooks would work, but Dynamo guards on the ids of
hooks, which differ between modules: six equal blocks, compiled one by one, would take six compilations.)

Therefore ``type(module)`` is a subclass of the class that the user wrote. ``isinstance`` accepts it; ``type(module) is
nn.Linear`` does not, except in ``apply()`` and ``summon_full_params()``, which restore the user's classes while they
run. (A metaclass could make the two classes compare equal, and a property could change ``module.__class__``. Both would
break Dynamo: it finds the place of ``super()`` in the MRO with ``==``, and looks up properties in ``__class__``.)
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import compat
from ..collectives import ops as ops  # defines the operators that Dynamo meets here
from ..formats.casts import Casts
from ..formats.extension import FORM as EXTENSION
from ..formats.packed import PACKED, PackedWeight, Weight
from ..geometry.partition import Partition
from ..memory.bucket import ParamHandle
from ..memory.dispatched import Dispatched
from ..memory.redistribute import announce_at_rest
from ..memory.replicated import is_own
from ..memory.tensor import RowShardedTensor
from ..owner import is_ignored, refuse_dropped
from ..program_lines import warn
from .engine import Window

_unshard = torch.ops.mfsdp.unshard.default  # bound once: Dynamo would look it up, and guard it, at each parameter
_traces_for_others = compat.traces_for_others
_unshard_quantized = torch.ops.mfsdp.unshard_quantized.default
_SHELLS = "_mfsdp_shells"
_LAYOUT = "_mfsdp_layout"
_HOMES = "_mfsdp_homes"
_WINDOW = "_mfsdp_window"
_WRAPPERS = "_mfsdp_wrappers"
_LENT = "_mfsdp_lent"
_CASTS = "_mfsdp_casts"
_MADE_OF = "_mfsdp_made_of"
_WHOLE = "_mfsdp_whole_"


def shard_module(module: nn.Module, handles: Mapping[str, ParamHandle], window: Window, casts: Casts) -> None:
    """Replace ``module``'s own parameters by shards, and wrap its forward in a window.

    Args:
        handles: Buckets and indices of its parameters, by attribute name. May be empty, for units and models that own
            no parameters themselves.
        casts: What its forward casts.
    """
    for attribute, handle in handles.items():
        module._parameters[attribute] = handle.bucket.params[handle.index]
    state = vars(module)
    state[_HOMES] = handles
    state[_WINDOW] = window
    # Read by Dynamo: a plain dict of tensors, and a string.
    state[_SHELLS] = {attribute: handle.bucket.shells[handle.index] for attribute, handle in handles.items()}
    wrappers = {attribute: handle.bucket.wrappers[handle.index] for attribute, handle in handles.items()}
    state[_WRAPPERS] = {attribute: wrapper for attribute, wrapper in wrappers.items() if wrapper is not None}
    label_module(module)
    cls: Any = type(module)
    partitions = [handle.bucket.splits[handle.index].partition for handle in handles.values()]
    # Modules that compute with ordinary tensors share classes, however their parameters are stored at rest.
    computed = tuple(p if p is not None and not p.bare else None for p in partitions)
    if isinstance(module, nn.RNNBase):
        state.pop("_flat_weights", None)  # the unsharded weights
    if compat.transformer_engine.prepare_layer(module, [handle.bucket.plan.form for handle in handles.values()]):
        warn(
            "fuse_wgrad_accumulation is switched off in LayerNormLinear: with it, Transformer Engine would keep the "
            "quantized weights of all layers from forward to backward. Their gradients are copied into the bucket "
            "instead."
        )
    scalings = tuple(
        EXTENSION
        if handle.bucket.plan.is_extension
        else handle.bucket.plan.scaling
        if wrappers[name] is not None
        else ""
        for name, handle in handles.items()
    )
    are_complex = tuple(handle.bucket.plan.is_complex for handle in handles.values())
    if casts and "forward" in state:  # set on the module itself, as a wrapper of its class's
        state["forward"] = casts.around_own(state["forward"])
    packed = tuple((name, tuple(part.attribute for part in its.parts)) for name, its in state.get(PACKED, {}).items())
    module.__class__ = _sharded_class(cls, tuple(handles), computed, scalings, are_complex, packed, casts)


def release_module(module: nn.Module) -> None:
    """Undo :func:`shard_module`. The module's parameters stay what they are."""
    state = vars(module)
    if isinstance(module, nn.RNNBase):
        state["_flat_weights"] = [module._parameters.get(name) for name in module._flat_weights_names]
    if getattr(module, _CASTS) and "forward" in state:
        state["forward"] = state["forward"].__wrapped__
    module.__class__ = unsharded_class(module)
    for name in (_HOMES, _WINDOW, _SHELLS, _WRAPPERS, _LAYOUT, _LENT):
        state.pop(name, None)


def owner_of(module: nn.Module) -> Any:
    """Return the sharded model that a module belongs to; None for a module that is not sharded."""
    return vars(module)[_WINDOW].owner if is_sharded(module) else None


def is_sharded(module: nn.Module) -> bool:
    """Whether a module was sharded by :func:`shard_module`."""
    return isinstance(module, _Sharded)


def unsharded_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a sharded module's class was generated from."""
    return type(module).__mro__[2]  # after the generated class and _Sharded


@contextlib.contextmanager
def as_written(root: nn.Module) -> Iterator[None]:
    """Context in which sharded modules have the classes that the user wrote.

    ``module.weight`` is what ``_parameters`` holds, and no forward opens a window.
    """
    classes = {module: type(module) for module in root.modules() if is_sharded(module)}
    recurrent = [module for module in classes if isinstance(module, nn.RNNBase)]
    for module in classes:
        module.__class__ = unsharded_class(module)
    for module in recurrent:
        vars(module)["_flat_weights"] = [getattr(module, name, None) for name in module._flat_weights_names]
    try:
        yield
    finally:
        for module in recurrent:
            del vars(module)["_flat_weights"]
        for module, cls in classes.items():
            module.__class__ = cls


def label_module(module: nn.Module, schedules: int = 0, policy: str = "") -> None:
    """Make a module's bucketing visible to Dynamo's guards.

    The label contains how the module's parameters are bucketed, how the buckets are exchanged, how often schedules of
    compiled graphs have been replaced, and the model's policy. A different label causes a recompilation.
    """
    handles: Mapping[str, ParamHandle] = vars(module)[_HOMES]
    layouts = [f"{name}={handle.bucket.signature}[{handle.index}]" for name, handle in handles.items()]
    also = [f"schedules {schedules}"] if schedules else []
    vars(module)[_LAYOUT] = ";".join([*layouts, *also, *([policy] if policy else [])])


@functools.cache
def _sharded_class(
    cls: type[nn.Module],
    attributes: tuple[str, ...],
    partitions: tuple[Partition | None, ...],
    scalings: tuple[str, ...],
    are_complex: tuple[bool, ...],
    packed: tuple[tuple[str, tuple[str, ...]], ...],
    casts: Casts,
    methods: tuple[str, ...] = (),
) -> type[nn.Module]:
    """Make the class of sharded modules of a class, of which some ``methods`` other than ``forward`` open a window
    too.

    Args:
        packed: Attributes with packed weights, and those of their parts; see :mod:`..formats.packed`.
    """
    namespace: dict[str, Any] = {
        name: _parameter_property(cls, name, partition, scaling, is_complex)
        for name, partition, scaling, is_complex in zip(attributes, partitions, scalings, are_complex, strict=True)
    }
    namespace |= {
        _WHOLE + name: compat.read_not_traced(_whole(name)) for name, scaling in zip(attributes, scalings, strict=True)
    }
    forward = cls.forward
    for name, parts in packed:
        read = _packed_reader(name, tuple(namespace[part].fget for part in parts))
        namespace[name] = _packed_property(namespace[name].fget, read)
        forward = compat.bitsandbytes.forward_of(cls, read) or forward
    namespace["forward"] = _forward_in_window(cls, forward, any(scalings), EXTENSION in scalings, casts)
    namespace |= {name: casts.around(_in_window(getattr(cls, name))) for name in methods}
    namespace[_CASTS] = casts
    namespace[_MADE_OF] = (cls, attributes, partitions, scalings, are_complex, packed, casts), methods
    namespace |= compat.transformer_engine.overrides(cls)
    if issubclass(cls, nn.RNNBase):
        namespace["_flat_weights"] = _rnn_weights
    # The name stays the same: repr, logs and messages show the class that the user wrote.
    namespace |= {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_Sharded, cls), namespace)


def _forward_in_window(
    cls: type[nn.Module], own: Callable[..., Any], gets_quantized: bool, gets_extensions: bool, casts: Casts
) -> Any:
    """Open a window around ``own``, the forward of sharded modules of a class."""
    is_layer = compat.transformer_engine.is_layer(cls)
    forward = casts.around(_in_window(_lending(own) if is_layer else own))
    # A forward that is excluded from compiled graphs needs a window there, so this wrapper must not be traced either.
    # Parts of layers of Transformer Engine would be graphs that return quantized weights. The methods of parameters
    # that gather themselves are a user's code, around a collective.
    is_disabled = compat.is_dynamo_disabled(cls.forward) or (is_layer and gets_quantized) or gets_extensions
    return torch.compiler.disable(forward) if is_disabled else forward


def _in_window(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return method(self, *args, **kwargs)
        window: Window = self._mfsdp_window  # type: ignore[assignment]
        window.runtime.pre_forward(window)
        try:
            result = method(self, *args, **kwargs)
        except BaseException as error:
            window.runtime.forward_failed(window, error)
            raise
        window.runtime.post_forward(window)
        return result

    return run


def _lending(method: Callable[..., Any]) -> Callable[..., Any]:
    """Take the memory of weights back from a layer of Transformer Engine when its forward has run.

    It keeps its weights from forward to backward in places that autograd does not know, or a weak reference to them
    which must stay alive (``fuse_wgrad_accumulation``). What backward needs of them has been saved by then, through our
    hooks. Biases keep their memory: a layer may return them.
    """

    @functools.wraps(method)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return method(self, *args, **kwargs)
        state, lent = vars(self), []  # type: ignore[var-annotated]
        outer, state[_LENT] = state.get(_LENT), lent
        try:
            result = method(self, *args, **kwargs)
        finally:
            state[_LENT] = outer
        if lent and torch.is_grad_enabled():
            _take_back(lent, [each for each in compat.tree_leaves(result) if isinstance(each, Tensor)])
        return result

    return run


def _take_back(lent: Sequence[Tensor], returned: Sequence[Tensor]) -> None:
    returned = [each for each in returned if not any(each is param for param in lent)]
    weights = [param for param in lent if param.ndim > 1]
    if compat.transformer_engine.packs_saved_tensors():
        compat.transformer_engine.drop_memory(weights)
    for node in {each.grad_fn for each in returned if each.grad_fn is not None}:
        node.metadata.setdefault(_LENT, []).extend(weights)  # alive until the layer's backward has run


def register_forward(module: nn.Module, name: str) -> None:
    """Open a window around another method, as around ``forward``, and cast what it gets and returns.

    Raises:
        AttributeError: There is no such method.
        ValueError: ``module`` has no window: it owns no parameters, and is neither a unit nor the model.
    """
    kind: Any = type(module)
    getattr(kind, name)
    if not is_sharded(module):
        raise ValueError(
            f"A {type(module).__name__} owns no sharded parameters and is not a unit, so {name!r} has nothing to "
            "gather. Register the method on the module that owns the parameters it reads, or on the model."
        )
    of, methods = getattr(kind, _MADE_OF)
    vars(module).pop(name, None)
    # In its class: a bound method that is set on a module keeps it alive.
    module.__class__ = _sharded_class(*of, tuple(dict.fromkeys((*methods, name))))


def _parameter_property(
    cls: type[nn.Module], name: str, partition: Partition | None, scaling: str, is_complex: bool
) -> property:
    """Create the property of a parameter.

    Args:
        cls: The class that the user wrote.
        partition: Partition of a parameter that the module computes with as a DTensor; None for an ordinary tensor.
        scaling: Scaling of a parameter that the module gets as it was gathered in float8; "" for others.
        is_complex: Whether the parameter is complex; its shell is real.
    """

    is_layer = compat.transformer_engine.is_layer(cls)

    @compat.python_only
    def get(self: nn.Module) -> Tensor:
        if torch.compiler.is_dynamo_compiling():  # true while Dynamo traces, but not while it runs this, as guards do
            if scaling == EXTENSION:
                raise NotImplementedError(
                    f"Compiled code reads {name!r} of a {cls.__name__}, which gathers itself (fsdp_pre_all_gather), "
                    "outside of that module's forward. Read it in the forward, which runs eagerly, or apply "
                    "torch.compiler.disable to the function that reads it."
                )
            if not scaling and _traces_for_others() and (part := getattr(self, _WHOLE + name)) is not None:
                return part if partition is None else partition.of_part(part)
            if scaling:
                shells: Any = self._mfsdp_shells
                parts = _unshard_quantized(shells[name], self._mfsdp_layout, scaling)
                part = self._mfsdp_wrappers[name].connect(*parts)  # type: ignore[index,operator]
            else:
                part = _unshard(self._mfsdp_shells[name], self._mfsdp_layout)  # type: ignore[index,operator]
                part = torch.view_as_complex(part) if is_complex else part
            return part if partition is None else partition.of_part(part)
        runtime = self._mfsdp_window.runtime  # type: ignore[union-attr]
        param = self._parameters.get(name)
        if param is None:  # removed temporarily: see _apply
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        handle: ParamHandle = self._mfsdp_homes[name]  # type: ignore[index,operator]
        bucket = handle.reference() or refuse_dropped()
        if not runtime.is_in_use(bucket) or compat.called_by_guards():
            return param
        if bucket.params[handle.index] is not param:
            bucket.check_unchanged()
            # By torch.func.functional_call: an ordinary tensor, or what was computed from parameters at rest.
            return param.unsharded("functional_call") if isinstance(param, Dispatched) else param
        part = runtime.parameters.read(bucket, handle.index)
        lent = vars(self).get(_LENT) if is_layer else None
        if lent is not None:
            lent.append(part)
            if compat.transformer_engine.writes_gradients(self) and part.ndim > 1:
                runtime.parameters.offer_gradient(handle, part)
        return part if partition is None else partition.of_part(part)

    return property(get)


def _packed_reader(
    name: str, parts: tuple[Callable[[nn.Module], Tensor], ...]
) -> Callable[[nn.Module], tuple[Weight, tuple[Tensor, ...]]]:
    """Create the function that returns a packed weight without its memory, and the tensors of it.

    Args:
        parts: Getters of the parameters that it consists of.
    """

    def read(self: nn.Module) -> tuple[Weight, tuple[Tensor, ...]]:
        packed: PackedWeight = self._mfsdp_packed[name]  # type: ignore[index,assignment]
        return packed.weight, packed.tensors(self, [part(self) for part in parts])

    return read


def _packed_property(
    bytes_of: Callable[[nn.Module], Tensor], read: Callable[[nn.Module], tuple[Weight, tuple[Tensor, ...]]]
) -> property:
    """Create the property of a packed weight: where others are gathered, the library's own tensor.

    Args:
        bytes_of: Getter of the parameter with its packed values.
        read: See :func:`_packed_reader`.
    """

    @compat.python_only
    def get(self: nn.Module) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            weight, tensors = read(self)
            return weight.connect(tensors)
        if isinstance(held := bytes_of(self), RowShardedTensor):
            return held
        with compat.below_function_transforms(), torch.no_grad():
            weight, tensors = read(self)
            return weight.wrap(tensors)

    return property(get)


def _whole(name: str) -> Callable[[nn.Module], Tensor | None]:
    """Create the getter of a parameter as compiled code of other backends reads it; None where it reads shards."""

    def get(self: nn.Module) -> Tensor | None:
        handle: ParamHandle = self._mfsdp_homes[name]  # type: ignore[index,operator]
        runtime = self._mfsdp_window.runtime  # type: ignore[union-attr]
        return runtime.parameters.read_apart(handle) if runtime.is_in_use(handle.bucket) else None

    return get


@compat.python_only
def _get_rnn_weights(self: nn.RNNBase) -> list[Tensor | None]:
    return [getattr(self, name, None) for name in self._flat_weights_names]


_rnn_weights = property(_get_rnn_weights, lambda self, value: None)
"""RNNs keep a list of their weights for cuDNN. It is rebuilt on every read; otherwise it would hold the unsharded
ones."""


class _Sharded(nn.Module):
    """Base of the generated subclasses: everything that they add except properties and windows."""

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refuse to replace or add parameters. ``module.name = nn.Parameter(...)`` calls this, too."""
        sharded, before = name in vars(self)[_HOMES], self._parameters.get(name)
        if (param is None and not sharded) or before is param or is_ignored(before):
            return super().register_parameter(name, param)
        if sharded:
            raise RuntimeError(
                f"Parameter {name!r} of {type(self).__name__} is sharded and cannot be replaced: the new one would not "
                "be trained. Copy values into it (with torch.no_grad(): module.weight.copy_(values)), or replace it "
                "before fully_shard_model."
            )
        raise RuntimeError(
            f"{type(self).__name__} gets a new parameter {name!r} after fully_shard_model: it would not be sharded, "
            "nor its gradient reduced. Add parameters before sharding."
        )

    def __delattr__(self, name: str) -> None:
        if name in vars(self)[_HOMES]:
            raise AttributeError(
                f"Parameter {name!r} of {type(self).__name__} cannot be deleted: it is part of a bucket. Change the "
                "model before fully_shard_model."
            )
        super().__delattr__(name)

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Implement ``to``, ``half``, ``cuda`` etc.: buffers move, but shards cannot change their dtype or device.

        The device of a shard in host memory is that of its use, or the host.
        """
        handles: Mapping[str, ParamHandle] = vars(self)[_HOMES]
        for handle in handles.values():
            flat = handle.bucket.flat
            probe = torch.empty(0, dtype=flat.dtype, device=handle.bucket.device)
            moved = fn(probe)
            if moved.dtype != probe.dtype or moved.device not in (probe.device, flat.device):
                raise RuntimeError(
                    f"Parameter {handle.bucket.splits[handle.index].name!r} is a shard of {flat.dtype} on "
                    f"{probe.device}; the model cannot be moved to {moved.dtype} on {moved.device} after "
                    "fully_shard_model. Convert it before sharding, or choose dtypes with mixed_precision_policy."
                )
        shards = {attribute: self._parameters.pop(attribute) for attribute in handles}
        try:
            return super()._apply(fn, recurse)
        finally:
            kept = dict(self._parameters)
            self._parameters.clear()
            self._parameters.update(shards | kept)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        """Copy values into shards, also with ``assign=True``: parameters are parts of a bucket.

        Each rank takes its rows of a whole tensor. If one rank did so alone, the weights would be a mixture.
        """
        for name, handle in vars(self)[_HOMES].items():
            value = state_dict.get(prefix + name)
            if isinstance(value, Tensor) and is_own(value):
                loaded = handle.bucket.splits[handle.index].name
                announce_at_rest(handle.bucket.topology, f"load_state_dict of {loaded!r}", loaded)
        if local_metadata.get("assign_to_params_buffers"):
            local_metadata = {**local_metadata, "assign_to_params_buffers": False}
            errors: list[str] = args[-1]
            for name in vars(self)[_HOMES]:
                value, param = state_dict.get(prefix + name), self._parameters[name]
                if isinstance(value, Tensor) and param is not None and value.dtype != param.dtype:
                    errors.append(
                        f"assign=True would change parameter {prefix + name!r} from {param.dtype} to {value.dtype}, "
                        "but shards keep their dtype. Leave assign out: values are then cast."
                    )
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)  # type: ignore[arg-type]

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Call ``fn`` with modules of the classes that the user wrote.

        Raises:
            RuntimeError: ``fn`` has replaced or added a parameter. Its module is unchanged.
        """
        apply = super().apply
        with as_written(self):
            before = {m: (type(m), dict(m._parameters), dict(m._modules)) for m in self.modules()}
            try:
                apply(fn)
            finally:
                changed = [module for module, state in before.items() if _restore(module, *state)]
        if changed:
            kinds = ", ".join(sorted({type(module).__name__ for module in changed}))
            raise RuntimeError(
                f"The function given to apply() replaced or added parameters of {kinds}, or its class: these would "
                "not be sharded, nor trained. It was undone. Write into parameters in place (torch.nn.init..., "
                "parameter.copy_(values)), or change the model before fully_shard_model."
            )
        return self

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make ``type(module)(...)`` return an unsharded module of the class that the user wrote."""
        original = cls.__mro__[2]
        return original(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep generated classes from subclass hooks of the user's classes, such as registries."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy a sharded module with its memory."""
        for handle in vars(self)[_HOMES].values():
            copy.deepcopy(handle.bucket, memo)
        if id(self) in memo:  # copying its bucket has copied it
            return memo[id(self)]
        duplicate = object.__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return duplicate

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"A {type(self).__name__} with sharded parameters cannot be pickled: it holds process groups and this "
            "rank's shards only. Save model.state_dict() with torch.distributed.checkpoint instead."
        )

    def __copy__(self) -> nn.Module:
        duplicate = object.__new__(type(self))
        duplicate.__dict__.update(self.__dict__)
        return duplicate


def _restore(
    module: nn.Module,
    cls: type[nn.Module],
    params: dict[str, nn.Parameter | None],
    children: dict[str, nn.Module | None],
) -> bool:
    """Undo changes to a module's class and parameters. Return whether there were any."""
    now = module._parameters
    same = now.keys() == params.keys() and all(now[name] is param for name, param in params.items())
    if same and type(module) is cls:
        return False
    module.__class__ = cls
    for current, earlier in ((module._parameters, params), (module._modules, children)):
        current.clear()
        current.update(earlier)  # type: ignore[arg-type]
    return True
