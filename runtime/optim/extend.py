"""Optimizers over sharded parameters.

Any optimizer of ``torch.optim`` whose step works element by element runs on shards unchanged. This module moves an
optimizer that was built before sharding to the shards, with its groups and its state, and adds the arguments of
Megatron-FSDP's optimizers.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import compat
from ..memory.bucket import Bucket, ParamHandle
from ..owner import name_of, owner_of, owners_of
from .kinds import EXTENDED, EXTENDED_ZERO_GRAD, has_own_zero_grad, is_wrapped, why_not_whole
from .own_steps import whole_step_of
from .state import cut_loaded_state, name_state, shard_state, show_unstepped
from .tracking import OptimizedModel

_uses: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
"""How often each optimizer has used gradients. Not an attribute: captured steps refuse those that change."""


def named_groups(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[nn.Parameter, str]:
    """Return the name of every parameter that the optimizer holds.

    Raises:
        ValueError: It holds a parameter that is not the module's, or none at all, or state that cannot be sharded.
    """
    names = {param: name for name, param in module.named_parameters()}
    held = [(i, param) for i, group in enumerate(optimizer.param_groups) for param in group["params"]]
    if not held:
        raise ValueError(f"The {type(optimizer).__name__} has no parameters.")
    for i, param in held:
        if param not in names:
            raise ValueError(
                f"Parameter group {i} of the {type(optimizer).__name__} holds a parameter of shape "
                f"{tuple(param.shape)} that does not belong to the model. Build the optimizer from model.parameters()."
            )
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor) and value.ndim and value.shape != param.shape:
                raise ValueError(
                    f"The {type(optimizer).__name__} has state {key!r} of shape {tuple(value.shape)} for "
                    f"{names[param]!r} of shape {tuple(param.shape)}: only state with the parameter's shape can be "
                    "sharded. Shard before the first step, or use an elementwise optimizer."
                )
    return {param: names[param] for _, param in held}


def rebind(optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str], module: nn.Module) -> None:
    """Replace full parameters by the sharded ones of the same names. Groups keep their settings, and state its values.

    Args:
        names: Names from :func:`named_groups`, before sharding.
        module: The module after sharding.
    """
    sharded = dict(module.named_parameters())
    old_state = dict(optimizer.state)
    for whole in names:  # and nothing that the program keeps there by other keys
        optimizer.state.pop(whole, None)
    for group in optimizer.param_groups:
        for i, whole in enumerate(group["params"]):
            param = sharded[names[whole]]
            group["params"][i] = param
            if whole in old_state:
                optimizer.state[param] = {
                    key: shard_state(optimizer, key, value, param) for key, value in old_state[whole].items()
                }


def check(optimizer: object, what: str, flat: bool, whole: bool = False) -> None:
    """Check that :func:`extend` can be called, before anything is changed.

    Args:
        what: Name of the function that takes the optimizer, for messages.

    Raises:
        TypeError: ``optimizer`` is not an optimizer.
        ValueError: It was already extended, its ``step`` was wrapped, or it does not support ``flat``.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        kind, hint = type(optimizer).__name__, "Build it from the model's parameters"
        if isinstance(optimizer, torch.optim.lr_scheduler.LRScheduler):
            hint = "Pass the scheduler's optimizer (scheduler.optimizer)"
        elif isinstance(optimizer, nn.Module):
            hint = "The model goes to fully_shard_model, or first to fully_shard"
        elif isinstance(optimizer, (list, tuple)):
            hint = "Pass several one by one"
        elif isinstance(optimizer, type):
            kind, hint = f"class, {optimizer.__name__}", "Make an instance of it, from the model's parameters"
        raise TypeError(f"{what} takes a torch.optim.Optimizer, got a {kind}. {hint}.")
    if is_extended(optimizer):
        raise ValueError(
            f"The {type(optimizer).__name__} is already extended. Call fully_shard or fully_shard_optimizer on it "
            "only once."
        )
    if flat:
        from ..guests.optimizers.flat_step import check_elementwise

        check_elementwise(optimizer)
    if whole:
        _check_whole(optimizer, flat)
    if (flat or whole) and is_wrapped(optimizer):
        raise ValueError(
            f"The program has put a function around this {type(optimizer).__name__}'s step(). It would see "
            f"other tensors in the place of parameters: put it around step() after "
            "fully_shard_optimizer."
        )
    if type(optimizer) is torch.optim.Muon and "step" in vars(optimizer):
        raise ValueError(
            "Something has already wrapped this Muon's step(), perhaps a learning-rate scheduler. Create it after "
            "fully_shard_optimizer: Muon over sharded parameters has a step of its own."
        )


def uses_of_gradients(optimizer: torch.optim.Optimizer) -> int:
    """Return how often an extended optimizer has stepped or zeroed gradients: then another accumulation begins."""
    return _uses.get(optimizer, 0)


def _count_use(optimizer: torch.optim.Optimizer) -> None:
    _uses[optimizer] = uses_of_gradients(optimizer) + 1


def is_extended(optimizer: torch.optim.Optimizer) -> bool:
    """Whether :func:`extend` was called."""
    return EXTENDED in vars(optimizer)


def extend(
    optimizer: torch.optim.Optimizer, flat: bool = False, by_name: bool = True, whole: bool = False
) -> torch.optim.Optimizer:
    """Add Megatron-FSDP's arguments to ``step`` and ``zero_grad``, in place.

    Args:
        flat: Whether to step over flat shards; see :mod:`mfsdp_compile.runtime.guests.optimizers.flat_step`.
        whole: Whether to step over whole parameters; see :mod:`mfsdp_compile.runtime.guests.optimizers.whole_step`.
        by_name: Whether state dicts use names of parameters; see :mod:`mfsdp_compile.runtime.optim.state`.

    Raises:
        ValueError: The optimizer holds parameters of no sharded model.
        NotImplementedError: A Muon, or an optimizer with ``whole``, holds parameters that cannot be assembled, or that
            the model ignores.
    """
    owners = models_of_optimizer(optimizer, takes_ignored=not whole and type(optimizer) is not torch.optim.Muon)
    if type(optimizer) is torch.optim.Muon:
        from ..guests.optimizers.muon import ShardedMuon, check_matrices

        check_matrices(optimizer)
        optimizer.__class__ = ShardedMuon
        optimizer._patch_step_function()  # so that its hooks run around the new step as well
    had_own_zero_grad = "zero_grad" in vars(optimizer)
    step, zero_grad = _unbound(optimizer, "step"), _unbound(optimizer, "zero_grad")
    if flat or whole:
        step = functools.wraps(step)(_over(_other_step(optimizer, flat)))
    compat.complete_hooks(optimizer)
    optimizer.register_load_state_dict_pre_hook(cut_loaded_state)
    show_unstepped(optimizer)
    if by_name:
        name_state(optimizer)

    @compat.python_only
    @functools.wraps(step)
    def extended_step(
        self: torch.optim.Optimizer,
        closure: Callable[[], Any] | None = None,
        *,
        sync_grad_before_optimizer_step: bool = True,
        install_optimized_model_weights: bool = True,
    ) -> Any:
        if sync_grad_before_optimizer_step:
            for owner in owners:
                owner.grad_sync.finish_if_needed()
        for owner in owners:
            owner.grad_sync.before_step(owner.shared_buffers)
            owner.await_gathers()  # another optimizer's step may have started gathers
        try:
            for owner in owners:
                owner.step_tracker.begin(self)
            result = step(self) if closure is None else step(self, closure)
        except BaseException as error:
            for owner in owners:
                owner.step_tracker.fail(error)
            raise
        _count_use(self)
        for owner in owners:
            owner.step_tracker.end()
        if install_optimized_model_weights:
            for owner in owners:
                owner.refresh(ahead=True)
        return result

    @compat.python_only
    @functools.wraps(zero_grad)
    def extended_zero_grad(
        self: torch.optim.Optimizer, set_to_none: bool = True, *, zero_grad_buffer: bool = True
    ) -> None:
        _count_use(self)
        is_own = has_own_zero_grad(self, beneath=True)
        dropped = set_to_none and not any(owner.keeps_gradients for owner in owners)
        if not is_own:
            zero_grad(self, dropped)
        else:  # it may look at gradients, and keep some
            for owner in owners:
                owner.grad_sync.finish_if_needed()
            zero_grad(self, *(() if dropped else (False,)))
        if zero_grad_buffer:
            for owner in owners:
                params = [param for bucket in owner.buckets for param in bucket.params]
                kept = owner.optimizers.others_hold(params, self)
                if is_own:
                    kept |= {id(p) for group in self.param_groups for p in group["params"] if p.grad is not None}
                owner.zero_gradients(set_to_none, kept)

    for extended in (extended_step, extended_zero_grad):
        del extended.__wrapped__  # inspect.signature would show its arguments
    # Set on the instance, like the wrappers of learning-rate schedulers, which may exist already or follow later.
    optimizer.step = _Method(extended_step, optimizer)  # type: ignore[method-assign]
    optimizer.zero_grad = _Method(extended_zero_grad, optimizer)  # type: ignore[method-assign]
    if whole:
        copy_whole = functools.partial(_copy_whole, by_name=by_name)
        vars(optimizer)["__deepcopy__"] = _Method(copy_whole, optimizer)
    vars(optimizer)[EXTENDED] = optimizer.step
    vars(optimizer)[EXTENDED_ZERO_GRAD] = optimizer.zero_grad, had_own_zero_grad
    for owner in owners:
        owner.optimizers.add(optimizer)
    return optimizer


def _other_step(optimizer: torch.optim.Optimizer, flat: bool) -> Callable[..., Any]:
    """Return what steps an optimizer over flat shards, or else over whole parameters."""
    if flat:
        from ..guests.optimizers.flat_step import FlatStep

        return FlatStep(optimizer)
    from ..guests.optimizers.whole_step import WholeStep

    return WholeStep(optimizer)


def _over(over: Callable[..., Any]) -> Callable[..., Any]:
    """Return an optimizer's step over other tensors than its parameters, around which hooks run that see parameters."""

    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        vars(self)["_opt_called"] = True  # for schedulers that were created before
        return over(functools.partial(compat.step_without_hooks(type(self)), self), closure)

    hooked: Callable[..., Any] = torch.optim.Optimizer.profile_hook_step(step)
    return hooked


class _Method:
    """A method of an optimizer that is set on it, but does not keep it alive, and its state with it.

    Not a function: ``functools.wraps`` would copy ``__func__`` to what a program puts around the method, and a
    learning-rate scheduler, which calls that, would then leave it out.
    """

    __slots__ = ("__func__", "__name__", "__signature__", "_reference")

    def __init__(self, function: Callable[..., Any], optimizer: torch.optim.Optimizer) -> None:
        self._reference = weakref.ref(optimizer)
        self.__func__ = function  # learning-rate schedulers wrap this
        self.__name__ = getattr(function, "__name__", "a method")
        signature = inspect.signature(function)
        self.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (found := self._reference()) is None:
            raise ReferenceError(
                f"{self.__name__}() of an optimizer that was deleted. Keep the optimizer, not its method alone."
            )
        return self.__func__(found, *args, **kwargs)


def _unbound(optimizer: torch.optim.Optimizer, name: str) -> Callable[..., Any]:
    """Return a function of the optimizer that calls its method: what something has set on it, as schedulers do, else
    what its class has when the function is called, which the program may replace later."""
    own = vars(optimizer).get(name)
    if own is None:
        return functools.wraps(getattr(type(optimizer), name))(
            lambda self, *args, **kwargs: getattr(type(self), name)(self, *args, **kwargs)
        )
    if getattr(own, "__self__", None) is optimizer:
        function: Callable[..., Any] = own.__func__
        return function
    return functools.wraps(own)(lambda _, *args, **kwargs: own(*args, **kwargs))


def _copy_whole(optimizer: torch.optim.Optimizer, memo: dict[int, Any], *, by_name: bool) -> torch.optim.Optimizer:
    """Return a copy that steps over whole parameters, too.

    torch copies groups and state only, and what is set on the instance would be lost: the copy would step over shards.

    Raises:
        RuntimeError: The model was not copied before. Nothing has changed.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not all(hasattr(memo.get(id(param)), "mfsdp_handle") for param in params):
        raise RuntimeError(
            f"The {type(optimizer).__name__} steps over whole parameters (whole=True) and is copied without its model. "
            "Copy both together, the model first: copy.deepcopy((model, optimizer)). To keep its state, copy "
            "optimizer.state_dict()."
        )
    kind, step = type(optimizer), whole_step_of(optimizer)
    twin: torch.optim.Optimizer = object.__new__(kind)
    memo[id(optimizer)] = twin
    twin.__setstate__(copy.deepcopy(optimizer.__getstate__(), memo))
    extend(twin, by_name=by_name, whole=True)
    its = whole_step_of(twin)
    assert step is not None
    assert its is not None
    its.take_owners(step, {param: memo[id(param)] for param in params})
    return twin


def _check_whole(optimizer: torch.optim.Optimizer, flat: bool) -> None:
    name = type(optimizer).__name__
    if flat:
        raise ValueError("flat=True and whole=True contradict each other. Pass only one of them.")
    if optimizer.state:
        raise ValueError(f"whole=True: the {name} has state already. Pass it before its first step.")
    if type(optimizer) is torch.optim.Muon:
        raise ValueError("whole=True: torch.optim.Muon steps over whole matrices without it. Leave it out.")
    if why := why_not_whole(optimizer):
        raise ValueError(
            f"whole=True: {why}. Or leave whole=True out: an optimizer that works on DTensors, as LBFGS does, then "
            "gathers what it looks at."
        )


def models_of_optimizer(optimizer: torch.optim.Optimizer, takes_ignored: bool = True) -> list[OptimizedModel]:
    """Return the models whose parameters an optimizer holds.

    Args:
        takes_ignored: Whether it may hold parameters that a model ignores.

    Raises:
        ValueError: It holds no parameters of a sharded model, or others.
        NotImplementedError: It holds ignored parameters and must not.
    """
    buckets: dict[Bucket, None] = {}
    others = 0
    for i, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            handle: ParamHandle | None = getattr(param, "mfsdp_handle", None)
            if handle is None and owner_of(param) is not None:
                if not takes_ignored:
                    raise NotImplementedError(
                        f"Parameter {name_of(param)!r} is not sharded (ignored_params): each rank has its own, and a "
                        f"{type(optimizer).__name__} over whole parameters has one of each. Give it to an optimizer of "
                        "its own."
                    )
                others += 1
                continue
            if handle is None:
                raise ValueError(
                    f"Parameter group {i} of the {type(optimizer).__name__} holds a parameter of shape "
                    f"{tuple(param.shape)} that is not sharded. Build the optimizer after fully_shard_model, from "
                    "model.parameters(), or pass model and optimizer to fully_shard together."
                )
            buckets[handle.bucket] = None
    if not buckets and not others:
        raise ValueError(f"The {type(optimizer).__name__} has no parameters.")
    return owners_of(buckets)
