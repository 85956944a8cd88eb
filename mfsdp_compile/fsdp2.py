"""FSDP2's interface: a script written for ``torch.distributed.fsdp.fully_shard`` moves by changing an import.

::

    from mfsdp_compile.fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard

    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters())

One model is planned, checked and compiled as a whole, but FSDP2's calls come one by one and none says that it is the
last. So a call only records what is asked for, and the model is sharded when it is used for the first time: when a
parameter of it or its state dict is read, when it is moved or called. The outermost module that was given to
``fully_shard`` is then the model. Until then, parameters are whole. Whatever a program can see of them is sharded: each
module that owns some has a class that shards the model when they are read (:class:`_Pending`).

A module that is used before the model around it was given to ``fully_shard`` becomes a model of its own. The larger model
dissolves it at its own first use and takes over its parameters, which stay the same objects (:func:`_shard`).

Modules that are compiled (``layer.compile()``, ``torch.compile(layer)``) are compiled with ``backend="mfsdp"`` instead, with
the same settings: other backends do not know how to gather parameters.

What differs from FSDP2 is listed in docs/moving/fsdp2.md.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle
from torch.distributed.tensor import DTensor, Shard

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.eager.modules import is_sharded, owner_of, register_forward
from mfsdp_compile.runtime.eager.save_methods import guard_saving
from mfsdp_compile.runtime.eager.units import EagerPolicy, EagerUnit
from mfsdp_compile.runtime.geometry.topology import Accumulation
from mfsdp_compile.runtime.init import meta
from mfsdp_compile.runtime.memory.bucket import is_homeless
from mfsdp_compile.runtime.model.sharded_model import ShardedModel, note_values, recovery
from mfsdp_compile.runtime.owner import ModuleRef
from mfsdp_compile.runtime.plan.offload import AnyOffloadPolicy, offload_of
from mfsdp_compile.runtime.plan.references import tie_again

from .api import fully_shard_model
from .backend.options import INNER_COMPILERS

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


def __getattr__(name: str) -> Any:
    """Return the names of FSDP2 that only newer versions of torch have."""
    if name in ("DataParallelMeshDims", "GradientReductionHandle"):
        return getattr(fsdp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_REQUEST = "_mfsdp_request"
_SHARDED = "_mfsdp_fsdp2"
_SETTINGS = "_mfsdp_settings"


@dataclass(frozen=True, eq=False)
class _Request:
    """One call of :func:`fully_shard`: its arguments."""

    given: tuple[ModuleRef, ...]
    mesh: DeviceMesh | None
    dims: tuple[tuple[str, ...], tuple[str, ...]] | None
    reshard_after_forward: bool | int | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: AnyOffloadPolicy
    ignored: frozenset[nn.Parameter]
    check_values: bool
    compiled: tuple[ModuleRef, ...]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return tuple(module for each in self.given if (module := each()) is not None)

    @property
    def wrappers(self) -> list[nn.Module]:
        """What ``torch.compile`` has made of some of the modules."""
        return [module for each in self.compiled if (module := each()) is not None]

    def __deepcopy__(self, memo: dict[int, Any]) -> _Request:
        given, compiled, ignored = copy.deepcopy((self.given, self.compiled, tuple(self.ignored)), memo)
        return replace(self, given=given, compiled=compiled, ignored=frozenset(ignored))


@dataclass(eq=False)
class _Sharded:
    """What a module of a sharded model controls.

    Args:
        model: The sharded model.
        units: Units of the module; empty if it owns no parameters.
        name: Name of the module in the model; "" for the model.
        together: What each of the model's modules controls; its module keeps it alive.
        holder: The model, if it is a list of modules that :func:`fully_shard` was called on: nothing else keeps it alive.
        syncs, all_reduces: Whether gradients are to be reduced at all, and over outer ranks.
        reductions: How many units' reductions may run at a time.
    """

    model: ShardedModel
    units: tuple[EagerUnit, ...]
    name: str
    together: weakref.WeakKeyDictionary[_Sharded, None]
    holder: nn.Module | None
    syncs: bool = True
    all_reduces: bool = True
    reductions: int = EagerPolicy().reductions_in_flight

    def __deepcopy__(self, memo: dict[int, Any]) -> _Sharded:
        duplicate = memo[id(self)] = object.__new__(_Sharded)
        its = {**vars(self), "together": list(self.together)}
        vars(duplicate).update(copy.deepcopy(its, memo))
        duplicate.together = weakref.WeakKeyDictionary(dict.fromkeys(vars(duplicate)["together"]))
        return duplicate


_pending: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that were given to :func:`fully_shard` and are not sharded yet."""


def fully_shard(
    module: nn.Module | Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: AnyOffloadPolicy = OffloadPolicy(),
    ignored_params: Collection[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    check_values: bool = True,
) -> Any:
    """Make a module a unit of the model that it belongs to. See ``torch.distributed.fsdp.fully_shard``.

    The model is sharded when it, or a module inside, is used for the first time, which is a collective: every rank of the
    mesh makes the same calls. What is used before its model is given to ``fully_shard`` is sharded alone. The model then
    takes over its parameters, which stay the same objects.

    Args:
        module: The unit, or a list of modules that are one unit together; last, the model itself. Parameters of the
            model in no unit are gathered in up to three parts: those before, among and after the units.
        mesh: The ranks to shard over; with two dimensions, the first one replicates (HSDP). The same for all calls. None:
            all ranks.
        reshard_after_forward: Whether the unit's parameters are released after forward and gathered again in backward; or
            the number of ranks to gather over in backward. None: True, except for the unit that forward uses last.
            ``torch.compile``'s option of the same name goes before, if it is not True.
        shard_placement_fn: May return None or ``Shard(0)`` only.
        mp_policy: Dtypes of the unit's parameters, gradients, inputs and outputs.
        offload_policy: ``CPUOffloadPolicy()``: the unit's shards, gradients and optimizer state are in host memory.
            :class:`~mfsdp_compile.OptimizerOffloadPolicy`: the same, but gathers need no copy from the host.
        ignored_params: Parameters that are neither sharded nor reduced.
        dp_mesh_dims: Names of the mesh dimensions that shard and replicate, if ``mesh`` has others.
        check_values: Whether the values of parameters must be equal on all ranks, as FSDP2 assumes. They are compared before
            the first forward, except for parameters that have been overwritten by then, as by ``load_state_dict``.

    Returns:
        ``module``. Its class is a subclass of :class:`FSDPModule` and of its class.

    Raises:
        TypeError, ValueError, NotImplementedError: An argument is wrong or not supported. Nothing has changed. What
            concerns the model as a whole is raised at its first use.
    """
    given = (module,) if isinstance(module, nn.Module) else tuple(module)
    modules = tuple(compat.uncompiled(each) for each in given)
    _check_modules(modules)
    _check_bool("check_values", check_values)
    _check_placements(modules, shard_placement_fn)
    offload_of(offload_policy, "fully_shard(offload_policy)")
    request = _Request(
        tuple(map(ModuleRef, modules)),
        mesh,
        None if dp_mesh_dims is None else (dp_mesh_dims.shard_names, dp_mesh_dims.replicate_names),
        reshard_after_forward,
        mp_policy,
        offload_policy,
        frozenset(ignored_params or ()),
        check_values,
        tuple(ModuleRef(wrapper) for wrapper in given if wrapper not in modules),
    )
    for each in modules:
        vars(each)[_REQUEST] = request
        compat.register_fully_sharded(each)
        guard_saving(each)
        _wait(each)
    for wrapper in request.wrappers:
        compat.before_compiled_call(wrapper, functools.partial(_sharded, compat.uncompiled(wrapper)))
    return module


def _check_modules(modules: Sequence[nn.Module]) -> None:
    if not modules:
        raise ValueError("fully_shard got an empty list of modules.")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"fully_shard takes a module or a list of modules, got a {type(module).__name__}")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and type(module).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard got a {type(module).__name__}, which has no forward, so nothing would gather its parameters. "
                "Pass its modules, one by one or as a list."
            )
        if isinstance(module, FSDPModule):
            raise ValueError(f"fully_shard was called twice on the same {type(module).__name__}.")
        inside = set(module.modules())
        if any(unit not in inside for owner in _owners(module) for unit in _units_in(owner.module)):
            raise ValueError(
                f"fully_shard was called on a {type(module).__name__} that is a part of a sharded model. Call it on all modules, "
                "from the inside out, before anything uses the model."
            )
    for one in modules:
        inside = set(one.modules()) - {one}
        if any(other in inside for other in modules):
            raise ValueError(
                "fully_shard got a list of modules of which one contains another: pass modules side by side."
            )


def _check_placements(modules: Sequence[nn.Module], placement: Callable[[nn.Parameter], Any] | None) -> None:
    if placement is None:
        return
    for module in modules:
        for name, param in _whole_parameters(module):
            wanted = placement(param)
            if wanted is not None and not (isinstance(wanted, Shard) and wanted.dim == 0):
                raise NotImplementedError(
                    f"shard_placement_fn asks for {wanted} for parameter {name!r}: rows (dimension 0) are divided, unevenly "
                    "if need be. For experts on a mesh of their own use fully_shard_model(expt_device_mesh=...); for "
                    "whole matrices on one rank, whole_params."
                )


def _whole_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters with their names, without sharding modules that are not sharded yet."""
    for prefix, module in root.named_modules():
        for name, param in vars(module)["_parameters"].items():
            if param is not None:
                yield f"{prefix}.{name}" if prefix else name, param


# -- classes ----------------------------------------------------------------------------------------------------------


_Method = TypeVar("_Method", bound=Callable[..., None])


def _setting(method: _Method) -> _Method:
    """Repeat a call, the last one of its method, when the module's model becomes a part of a larger one."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        vars(self).setdefault(_SETTINGS, {})[method.__name__] = args, kwargs

    return cast(_Method, call)


class FSDPModule:
    """What :func:`fully_shard` adds to a module; see ``torch.distributed.fsdp.FSDPModule``.

    Gradients are synchronized, and the last backward is known, for the model as a whole: methods about these are called
    on the model. What concerns gathers in eager code has no effect on code compiled for the whole model, whose graph
    has a schedule of its own (options ``prefetch``, ``schedule``).
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make ``type(module)(...)`` return a module of the class that the user wrote."""
        return _written(cls)(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep generated classes from subclass hooks of the user's classes, such as registries."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module's forward, as ``nn.Module.compile``. The backend is ``"mfsdp"``, with the one given behind it."""
        before = self._compiled_call_impl  # type: ignore[has-type]
        super().compile(*args, **kwargs)  # type: ignore[misc]
        if not isinstance(self, _Pending):
            try:
                if (settings := _settings_of(cast(nn.Module, self), type(self).__name__)) is not None:
                    _compile_again(cast(nn.Module, self), settings)
            except ValueError:
                self._compiled_call_impl = before
                raise

    # -- gathered parameters ------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the module's own parameters, not those of units inside. A collective.

        Until the module's next forward has run, or :meth:`reshard`, its parameters can be read outside of forwards
        (``module.weight``); ``parameters()`` still returns shards.

        Args:
            async_op: Return a handle whose ``wait()`` waits for the parameters. A forward waits by itself.
        """
        state = _state(self)
        if not state.model.eager.is_in_window:
            state.model.leave_backward()
        handle = _Unshard(state.model.eager.gathering.unshard(state.units))
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Release the module's own gathered parameters."""
        state = _state(self)
        state.model.eager.gathering.reshard(state.units)

    @_setting
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether parameters are released after forward and gathered again in backward. Not during a step."""
        _check_bool("reshard_after_forward", reshard_after_forward)
        for model, units in _models(self, recurse):
            model.set_reshard_after_forward(_buckets(units), reshard_after_forward)

    @_setting
    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether parameters are released after backward.

        If not, they stay gathered from their first forward until the backward that reduces the step's gradients, so they
        are not released after forward either. That backward releases them by itself: between microbatches, True releases
        them at once, and the last microbatch gathers them again.
        """
        _check_bool("reshard_after_backward", reshard_after_backward)
        for model, units in _models(self, recurse):
            model.set_reshard_after_backward(_buckets(units), reshard_after_backward)

    @_setting
    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules to start gathering when this one has been gathered in forward."""
        for unit in (state := _state(self)).units[:1]:  # of the model's parts, the one that forward uses first
            state.model.eager.control(unit).forward_prefetch = _units_of(modules)

    @_setting
    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules to start gathering when this one has been gathered in backward."""
        for unit in (state := _state(self)).units[-1:]:
            state.model.eager.control(unit).backward_prefetch = _units_of(modules)

    def set_post_optim_event(self, event: torch.Event | None) -> None:
        """Let everything that the current stream runs from now on, gathers included, wait for ``event``.

        None, which is what the CPU's stream records, is no event.
        """
        if event is not None:
            event.wait()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Has no effect: backward gathers the parameters that it reads, and no others."""
        _check_bool("unshard_in_backward", unshard_in_backward)
        _state(self)

    # -- gradients ----------------------------------------------------------------------------------------------------

    @_setting
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether the next backwards reduce gradients. If not, each rank sums its whole gradients.

        Call it on the model, or on all of its modules: when backward runs, all must have the same setting. The first call
        with False, which must not be during a step, has graphs compiled again.
        """
        _check_bool("requires_gradient_sync", requires_gradient_sync)
        state = _state(self)
        accumulation = state.model.topology.accumulation
        if not requires_gradient_sync and not accumulation.whole_gradients:
            state.model.set_accumulation(Accumulation(True, accumulation.keeps_gathered))
        for each in _states(self, recurse):
            each.syncs = each.all_reduces = requires_gradient_sync
        _apply_sync(state)

    @_setting
    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether the next backwards reduce gradients over the ranks that replicate shards (HSDP).

        Call it on the model, or on all of its modules: when backward runs, all must have the same setting.
        """
        _check_bool("requires_all_reduce", requires_all_reduce)
        for each in _states(self, recurse):
            each.all_reduces = requires_all_reduce
        _apply_sync(_state(self))

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Has no effect: every backward waits for its own reductions before it returns."""
        _check_bool("is_last_backward", is_last_backward)
        _state(self)

    @_setting
    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this module's own gradients over ranks by ``factor``, instead of the number of ranks.

        Graphs are compiled again.
        """
        if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not factor > 0:
            raise ValueError(f"set_gradient_divide_factor takes a number above 0, got {factor!r}")
        state = _state(self)
        state.model.set_gradient_divide_factor(_buckets(state.units), float(factor))

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Has no effect: gradients are summed, and the sum is scaled."""
        _check_bool("enable", enable)
        _state(self)

    @_setting
    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook(gradient)`` with each reduced gradient of this module's own parameters before it is accumulated.

        ``gradient`` is this rank's flat shard in the shards' dtype, already divided. The hook may change it in place; if
        it communicates, all ranks do. For eager code, and for modules that are compiled one by one; code compiled for the
        whole model is refused.

        Args:
            stream: Must be None: the hook runs on the current stream.
        """
        if stream is not None:
            raise NotImplementedError(
                "set_all_reduce_hook(stream=...): the hook runs on the current stream. Leave stream out, and switch streams "
                "in the hook."
            )
        for unit in (state := _state(self)).units:
            state.model.eager.control(unit).reduced_hook = hook

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Has no effect: ranks may always use different parameters, and add zeros for those that they did not use."""
        _check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        _state(self)

    @_setting
    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many units' reductions may run in eager code before it waits for the oldest.

        The largest number that any module of the model has holds for all of them.
        """
        is_whole = isinstance(max_input_buffers, int) and not isinstance(max_input_buffers, bool)
        if not is_whole or max_input_buffers < 1:
            raise (ValueError if is_whole else TypeError)(
                f"set_reduce_scatter_max_input_buffers takes a whole number from 1 on, got {max_input_buffers!r}"
            )
        for each in _states(self, recurse):
            each.reductions = max_input_buffers
        runtime, together = _state(self).model.eager, _state(self).together
        runtime.policy = replace(runtime.policy, reductions_in_flight=max(each.reductions for each in together))

    # -- after failures -----------------------------------------------------------------------------------------------

    def reset_iter_state(self) -> None:
        """Drop what is left of a step that failed: gathered parameters, and gradients. Call it on the model.

        If ranks have diverged in that step, a collective: every rank calls this after its error, within four time
        limits of the process group. The model gets new process groups, and code is compiled once more.
        """
        state = _state(self)
        if state.name:
            raise ValueError(
                f"reset_iter_state was called on module {state.name!r}: it is for the model as a whole. Call it on the "
                "module that the last fully_shard was called on."
            )
        if state.model.conduct.order.stalled is not None:
            recovery.reset(state.model)
            return
        state.model.leave_backward()
        state.model.eager.reset()
        state.model.zero_gradients()


_PASSES = "a pass can change the collectives of a graph (torch.compile's option passes)"
_NCCL = "shard with fully_shard_model(nccl_ub=True), which registers buffers with NCCL"
_REFUSED = {
    "set_custom_all_gather": _PASSES,
    "set_custom_reduce_scatter": _PASSES,
    "set_allocate_memory_from_process_group_for_comm": _NCCL,
    "set_symm_mem_for_comm": _NCCL,
    "set_separate_reduce_scatter_group": "gathers have a communicator of their own with NCCL",
    "set_keep_unsharded_storage": "for CUDA graphs use fully_shard_model(cuda_graph_mode=True)",
    "set_manual_backward_finalization": "use fully_shard_model, and model.set_model_auto_sync(False)",
    "finalize_backward": "use fully_shard_model, and model.finish_grad_sync()",
}
"""Methods of FSDP2 that are not implemented, each with its alternative."""


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"FSDPModule.{name} is not implemented: {_REFUSED[name]}.")

    refuse.__doc__ = f"Not implemented: {_REFUSED[name]}."
    return refuse


for _name in _REFUSED:
    setattr(FSDPModule, _name, _refusing(_name))


class _Pending:
    """A module of a model that is not sharded yet. Any use of its parameters shards the model."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make ``type(module)(...)`` return a module of the class that the user wrote."""
        return _written(cls)(*args, **kwargs)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep generated classes from subclass hooks of the user's classes, such as registries."""

    @property
    def __call__(self) -> Callable[..., Any]:
        return _sharded(self).__call__

    @property
    def _parameters(self) -> dict[str, nn.Parameter | None]:
        """What all walks of parameters read, also those of a module around that was not given to :func:`fully_shard`."""
        return vars(_sharded(self))["_parameters"]

    def __getattr__(self, name: str) -> Any:
        if name in vars(self)["_parameters"]:
            return getattr(_sharded(self), name)
        return super().__getattr__(name)  # type: ignore[misc]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return _sharded(self)._load_from_state_dict(*args, **kwargs)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        _sharded(self).register_parameter(name, param)

    def __delattr__(self, name: str) -> None:
        _sharded(self).__delattr__(name)

    def apply(self, fn: Callable[[nn.Module], None]) -> nn.Module:
        return _sharded(self).apply(fn)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """Change dtypes while parameters are whole; then shard, and do the rest to shards."""

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(fn(torch.empty(0, dtype=tensor.dtype)).dtype)

        for module in self.modules() if recurse else [self]:  # type: ignore[attr-defined]
            params = [param for param in vars(module)["_parameters"].values() if param is not None]
            if not is_sharded(module) and any(
                cast(torch.empty(0, dtype=param.dtype)).dtype != param.dtype for param in params
            ):
                with _as_written(module):
                    nn.Module._apply(module, cast, recurse=False)
        return _sharded(self)._apply(fn, recurse)

    def __repr__(self) -> str:
        """Describe the module without sharding the model: one rank alone may print it."""
        with _as_written(cast(nn.Module, self)):
            return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(_sharded(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _sharded(self).__reduce_ex__(protocol)


@functools.cache
def _class_of(cls: type[nn.Module], is_pending: bool, is_unit: bool) -> type[nn.Module]:
    bases: list[type] = [*([_Pending] if is_pending else []), *([FSDPModule] if is_unit else []), cls]
    name, where = (f"FSDP{each}" if is_unit else each for each in (cls.__name__, cls.__qualname__))
    return type(name, tuple(bases), {"__module__": cls.__module__, "__qualname__": where, "__doc__": cls.__doc__})


def _written(cls: type) -> type[nn.Module]:
    """Return the class that the user wrote, of one that :func:`_class_of` has made."""
    mro = cls.__mro__
    return mro[max(mro.index(each) for each in (_Pending, FSDPModule) if each in mro) + 1]


def _set_class(module: nn.Module, is_pending: bool) -> None:
    cls, is_unit = type(module), _REQUEST in vars(module)
    written: Any = _written(cls) if issubclass(cls, (_Pending, FSDPModule)) else cls
    module.__class__ = _class_of(written, is_pending, is_unit) if is_pending or is_unit else written


@contextlib.contextmanager
def _as_written(module: nn.Module) -> Iterator[None]:
    is_pending = isinstance(module, _Pending)
    _set_class(module, is_pending=False)
    try:
        yield
    finally:
        _set_class(module, is_pending)


class _Unshard(UnshardHandle):
    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Wait until the parameters are gathered."""
        self._wait()


# -- sharding at first use --------------------------------------------------------------------------------------------


def _wait(module: nn.Module) -> None:
    """Let the first use of a module, or of one inside, shard the model that it belongs to."""
    _pending.add(module)
    for inner in module.modules():
        if inner is module or (vars(inner).get("_parameters") and not is_sharded(inner)):
            _set_class(inner, is_pending=True)


def _owners(module: nn.Module) -> list[ShardedModel]:
    """Return the sharded models that modules inside belong to."""
    return list({id(owner): owner for inner in module.modules() if (owner := owner_of(inner)) is not None}.values())


def _units_in(root: nn.Module) -> list[nn.Module]:
    """Return the modules inside that :func:`fully_shard` was called on."""
    return [module for module in root.modules() if _REQUEST in vars(module)]


def _sharded(module: Any) -> Any:
    """Shard the model that a module belongs to, if it is not sharded yet. Return the module."""
    if holders := [holder for holder in _pending if any(module is inner for inner in holder.modules())]:
        _shard(max(holders, key=lambda holder: sum(1 for _ in holder.modules())))
    elif isinstance(module, _Pending):  # the model that it belonged to is gone
        _set_class(module, is_pending=False)
    return module


def _shard(root: nn.Module) -> None:
    """Shard a model. Models inside, which were used before ``root`` was given to :func:`fully_shard`, become parts of it."""
    own: _Request = vars(root)[_REQUEST]
    holder = root if len(own.modules) == 1 else nn.ModuleList(own.modules)
    units = _units_in(holder)
    requests = list(dict.fromkeys(vars(module)[_REQUEST] for module in units))
    _check_requests(root, own, requests)
    compiled = _compiled(holder, [wrapper for request in requests for wrapper in request.wrappers])
    parts = list({id(state.model): state.model for module in units if (state := vars(module).get(_SHARDED))}.values())
    settings = {module: vars(module).get(_SETTINGS, {}) for module in units}
    for part in parts:
        part.check_dissolves()
    for part in parts:
        part.dissolve()
    for module in units:
        vars(module).pop(_SHARDED, None)
    for module in holder.modules():
        _set_class(module, is_pending=False)
    tie_again(holder)
    try:
        model = _shard_now(holder, own, requests)
    except BaseException:
        for module in units:  # as before: the model can be used, or the call repeated
            _wait(module)
        raise
    model.awaits_values |= any(part.awaits_values for part in parts)
    names = {module: name for name, module in holder.named_modules()}
    together: weakref.WeakKeyDictionary[_Sharded, None] = weakref.WeakKeyDictionary()
    kept = holder if holder is not root else None
    for module in units:
        _pending.discard(module)
        of_module = (
            each
            for each in model.eager.units
            if (each.is_root if module is holder else any(module is its() for its in each.modules))
        )
        state = vars(module)[_SHARDED] = _Sharded(model, tuple(of_module), names[module], together, kept)
        together[state] = None
        for name in vars(module).get(_METHODS, ()):
            vars(module).pop(name, None)
            register_forward(module, name)
    for module, how in compiled.items():
        _compile_again(module, how)
    for module, calls in settings.items():
        for name, (args, kwargs) in calls.items():
            getattr(module, name)(*args, **kwargs)


def _shard_now(root: nn.Module, own: _Request, requests: Sequence[_Request]) -> ShardedModel:
    units = [list(request.modules) for request in requests if request.modules != (root,)]
    is_meta = meta.has_meta(root)
    ignored = frozenset().union(*(request.ignored for request in requests))
    # The dimensions of tensor parallelism have values to compare, too.
    checks_later = not any(isinstance(param, DTensor) for param in root.parameters() if not is_homeless(param))
    if checks_later and all(request.check_values for request in requests):
        note_values(param for param in root.parameters() if param not in ignored)
    model = fully_shard_model(
        root,
        **_mesh(own),
        fsdp_unit_modules=units,
        mixed_precision_policy={
            None: own.mp_policy,
            **{module: each.mp_policy for each in requests for module in each.modules if module is not root},
        },
        init_model_with_meta_device=is_meta,
        init_fn=meta.Later() if is_meta else None,
        ignored_params=ignored,
        reshard_after_forward={module: each.reshard_after_forward for each in requests for module in each.modules},
        offload_policy={module: each.offload_policy for each in requests for module in each.modules},
        check_values=not checks_later and all(request.check_values for request in requests),
    ).sharded
    model.compares_values = checks_later and all(request.check_values for request in requests)
    return model


def _check_requests(root: nn.Module, own: _Request, requests: Sequence[_Request]) -> None:
    for request in requests:
        if (request.mesh, request.dims) != (own.mesh, own.dims):
            name = next(name for name, module in root.named_modules() if module is request.modules[0])
            raise NotImplementedError(
                f"fully_shard got another mesh for {name!r} ({request.mesh}) than for the model ({own.mesh}). Experts, "
                "which other ranks hold, are sharded with fully_shard_model(expt_device_mesh=...)."
            )


def _mesh(request: _Request) -> dict[str, Any]:
    mesh = request.mesh
    if mesh is None:
        return {}
    if request.dims is None:
        if mesh.ndim == 1:
            return {"device_mesh": mesh}
        if mesh.ndim != 2 or mesh.mesh_dim_names is None:
            raise ValueError(f"fully_shard takes a mesh of one dimension, or of two with names, got {mesh}")
        (outer, shard) = mesh.mesh_dim_names
    else:
        shard, outer = (_flattened(mesh, names) for names in request.dims)
    if shard is None:
        return {"device_mesh": mesh, "dp_shard_dim": outer, "zero_dp_strategy": "no_shard"}
    if outer is None:
        return {"device_mesh": mesh, "dp_shard_dim": shard}
    group = mesh[outer, shard]._flatten(f"{outer}_{shard}").get_group()
    return {"device_mesh": mesh, "dp_shard_dim": shard, "dp_outer_dim": outer, "hybrid_fsdp_group": group}


def _flattened(mesh: DeviceMesh, names: tuple[str, ...]) -> str | None:
    """Return the name of the mesh dimension that several form together; None for none."""
    if len(names) < 2:
        return next(iter(names), None)
    mesh[names]._flatten(name := "_".join(names))
    return name


def _compiled(root: nn.Module, wrappers: Sequence[nn.Module]) -> dict[nn.Module, compat.CompileSettings]:
    """Return the modules that were compiled with another backend than ours, and how.

    Args:
        wrappers: What ``torch.compile`` has made of modules, in addition to those inside.

    Raises:
        ValueError: The backend cannot be the compiler behind ours.
    """
    found = {}
    for name, module in [*root.named_modules(), *(("", wrapper) for wrapper in wrappers)]:
        if (how := _settings_of(module, name)) is not None:
            found[module] = how
    return found


def _settings_of(module: nn.Module, name: str) -> compat.CompileSettings | None:
    """Return how a module was compiled, if it was compiled with another backend than ours.

    Raises:
        ValueError: The backend cannot be the compiler behind ours.
    """
    settings = compat.module_settings(module)
    if settings is None or settings.backend == "mfsdp":
        return None
    if settings.backend not in INNER_COMPILERS:
        raise ValueError(
            f"Module {name!r} was compiled with backend={settings.backend!r}, which does not know how to gather parameters. "
            f"Compile it with backend='mfsdp', or one of {INNER_COMPILERS}, which is then the compiler behind it."
        )
    return settings


def _compile_again(module: nn.Module, settings: compat.CompileSettings) -> None:
    options: dict[str, Any] = {"inner": settings.backend}
    if settings.inductor:
        options["inductor"] = settings.inductor
    compat.compile_module(module, "mfsdp", settings, options)


# -- methods other than forward ---------------------------------------------------------------------------------------

_METHODS = "_mfsdp_forward_methods"


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method other than ``forward`` read gathered parameters.

    Raises:
        AttributeError: The module has no such method.
    """
    module = compat.uncompiled(module)
    if not hasattr(module, method_name):
        raise AttributeError(f"{type(module).__name__!r} has no method {method_name!r}")
    if not isinstance(module, FSDPModule):
        return  # as in FSDP2
    vars(module).setdefault(_METHODS, []).append(method_name)
    if not isinstance(module, _Pending):
        register_forward(cast(nn.Module, module), method_name)
        return

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(_sharded(self), method_name)(*args, **kwargs)

    vars(module)[method_name] = types.MethodType(call, module)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Has no effect: a model's schedule does not depend on others."""
    _units_of(modules)


# -- state ------------------------------------------------------------------------------------------------------------


def _state(module: Any) -> _Sharded:
    return vars(_sharded(module))[_SHARDED]


def _states(module: Any, recurse: bool) -> list[_Sharded]:
    """Return what a module controls, with what modules inside do if ``recurse``."""
    state = _state(module)
    return [vars(each)[_SHARDED] for each in module.modules() if _SHARDED in vars(each)] if recurse else [state]


def _models(module: Any, recurse: bool) -> list[tuple[ShardedModel, list[EagerUnit]]]:
    """Return a module's model, and its units, with those inside if ``recurse``."""
    inner = _states(module, recurse)
    return [(_state(module).model, list(dict.fromkeys(unit for each in inner for unit in each.units)))]


def _units_of(modules: Sequence[Any]) -> tuple[EagerUnit, ...]:
    modules = [compat.uncompiled(module) for module in modules]
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expected modules that fully_shard was called on, got a {type(module).__name__}")
    return tuple(unit for module in modules for unit in _state(module).units)


def _buckets(units: Sequence[EagerUnit]) -> list[Any]:
    return [bucket for unit in units for bucket in unit.buckets]


def _apply_sync(state: _Sharded) -> None:
    """Give the model the setting of its modules."""
    settings = state.model.grad_sync.settings
    settings_of = {each.name: each.syncs and each.all_reduces for each in state.together if each.units}
    waiting = [name for name, reduces in settings_of.items() if not reduces]
    reducing = [name for name, reduces in settings_of.items() if reduces]
    settings.last_microbatch = False if waiting else None
    settings.contradiction = (waiting[0], reducing[0]) if waiting and reducing else None


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} takes True or False, got {value!r}")
