"""State dicts of optimizers by parameter name.

Torch numbers an optimizer's parameters in the order in which they were passed, so a checkpoint stops fitting when a
layer or a group is added. By name it fits as long as the names do, including at other world sizes and with parameters
in other groups. Reading a state dict needs no communication: state consists of DTensors like the parameters, which know
their rows.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import compat
from ..geometry.partition import whole_tensor
from ..memory.redistribute import take_rows
from ..memory.tensor import RowShardedTensor
from ..owner import name_of, owner_of
from ..program_lines import warn
from ..ranks.agreement import has_others
from .kinds import held_by, is_plain, kind_of
from .own_steps import StepsWhole, has_flat_step, whole_step_of

PREFIX = "module."
"""Prefix from the wrapper that ``fully_shard_model`` returns. Names are those of ``model.named_parameters()``."""


def parameter_names(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the optimizer's parameters, in order.

    Raises:
        ValueError: Two parameters have the same name, because they belong to different models.
    """
    names = [PREFIX + name_of(param) for param in _params(optimizer)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"The {type(optimizer).__name__} holds two parameters named {twice!r} of two models, so its state cannot "
            "be saved by name. Use one optimizer per model."
        )
    return names


_NUMBERS: Mapping[str, tuple[type[torch.optim.Optimizer], Callable[[Mapping[str, Any]], float]]] = {
    "step": (torch.optim.Optimizer, lambda group: 0),
    "mu_product": (torch.optim.NAdam, lambda group: 1),
    "mu": (torch.optim.ASGD, lambda group: 1),
    "eta": (torch.optim.ASGD, lambda group: float(group["lr"])),
}
"""State of torch's optimizers that has one number per parameter, not one per element; for a parameter with a single
element, the shape does not tell. With the class, and what computes the initial number of a parameter in ``group``."""


def is_number(optimizer: torch.optim.Optimizer, key: str) -> bool:
    """Whether state ``key`` is one number per parameter, because the optimizer's class is torch's or derived from it.

    Other classes may have state of that name for each element.
    """
    of_torch = (cls for cls in type(optimizer).__mro__ if cls.__module__.startswith("torch.optim."))
    return key in _NUMBERS and any(
        issubclass(cls, _NUMBERS[key][0]) for cls in of_torch if cls is not torch.optim.Optimizer
    )


def is_by_element(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it is known that the state of an optimizer consists of numbers and of tensors shaped like parameters."""
    return kind_of(optimizer) == "elementwise" and type(optimizer).__module__.startswith("torch.optim.")


def follows_rows(optimizer: torch.optim.Optimizer, key: str, shape: torch.Size, param: Any) -> bool:
    """Whether state ``key`` of a parameter is sharded like the parameter."""
    counts = key == "step" and not shape  # of any class: nothing else tells for a parameter that is a number
    return shape == param.shape and not counts and not is_number(optimizer, key)


def optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the optimizer's class as the program knows it."""
    return type(optimizer).__name__.removeprefix("Sharded")


def shard_state(optimizer: torch.optim.Optimizer, key: str, value: Any, param: Any) -> Any:
    """Copy this rank's rows of state with the parameter's shape; return anything else unchanged."""
    if (
        not isinstance(param, RowShardedTensor)
        or not isinstance(value, Tensor)
        or isinstance(value, RowShardedTensor)
        or not follows_rows(optimizer, key, value.shape, param)
    ):
        return value
    whole = whole_tensor(value) if isinstance(value, DTensor) else value
    rows = take_rows(whole, param.row_split, param.topology.shard)
    return RowShardedTensor.wrap(rows.to(param.rows().device, copy=True), param.row_split, param.topology)


def name_state(optimizer: torch.optim.Optimizer) -> None:
    """Make ``optimizer.state_dict()`` and ``load_state_dict()`` refer to parameters by name, in place.

    The helpers of ``torch.distributed.checkpoint.state_dict`` give their own names to numbered state, and keep doing
    so.
    """
    # Neither methods nor references to the optimizer: torch's helpers keep what is registered with them.
    reference = weakref.ref(optimizer)

    def state_dict() -> dict[str, Any]:
        """Return ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``. Does not communicate.

        For an optimizer before its first step, this is its initial state: ``torch.distributed.checkpoint.load`` reads
        only what it finds in a state dict. With ``whole=True``, state of what this rank steps.
        """
        it = reference()
        assert it is not None
        named = _named(it, type(it).state_dict(it))
        if not named["state"] and not any(_has_stepped(param) for param in _params(it)):
            named["state"] = dict(zip(parameter_names(it), _first_states(it), strict=False))
        return {**named, "state": {name: held for name, held in named["state"].items() if held}}

    def load_state_dict(state_dict: Mapping[str, Any]) -> None:
        """Load state of the same parameters, by name or by number, sharded or full.

        Raises:
            ValueError: Parameters are missing or unknown, or a group combines parameters of several saved groups.
        """
        it = reference()
        assert it is not None
        type(it).load_state_dict(it, _numbered(it, state_dict))

    optimizer.state_dict = state_dict  # type: ignore[method-assign, assignment]
    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign, assignment]
    compat.keep_from_state_dict_helpers(optimizer, state_dict, load_state_dict)


def named_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of an optimizer by name of parameter, whether and however it was extended.

    It has the initial state of parameters that have taken no step, as that of an extended optimizer.

    Raises:
        ValueError: It is not made of the state of parameters and their groups, or see :func:`parameter_names`.
    """
    check_holds_own_state(optimizer)
    found = _named(optimizer, optimizer.state_dict())
    names = iter(parameter_names(optimizer))
    for group in optimizer.param_groups:
        for param, name in zip(group["params"], names, strict=False):
            if name not in found["state"] and (first := initial_state(optimizer, group, param)):
                found["state"][name] = first
    return found


def check_holds_own_state(optimizer: torch.optim.Optimizer) -> None:
    """Check that the state dict of an optimizer has the state of those that it holds, and that they get it back.

    Raises:
        ValueError: It holds an optimizer with state of its own, and torch's methods, which save and load its own only.
    """
    cls, base = type(optimizer), torch.optim.Optimizer
    has_methods = cls.state_dict is not base.state_dict and cls.load_state_dict is not base.load_state_dict
    for held in held_by(optimizer):
        check_holds_own_state(held)
        params = ((group, param) for group in held.param_groups for param in group["params"])
        if not has_methods and (any(held.state.values()) or any(initial_state(held, *each) for each in params)):
            raise ValueError(
                f"The {cls.__name__} holds another optimizer, a {optimizer_name(held)}, and its state_dict() and "
                "load_state_dict() leave out the state of that. Define both in the class, such that they return and "
                f"take the state of what it holds, or save the {optimizer_name(held)} instead."
            )


def load_named(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load a state dict by name of parameter into an optimizer, whether and however it was extended.

    Raises:
        ValueError: It does not fit, or the optimizer has no state of a parameter afterwards which the state dict has.
    """
    cut = cut_loaded_state(optimizer, _numbered(optimizer, state_dict))
    optimizer.load_state_dict(cut)
    params = _params(optimizer)
    names = parameter_names(optimizer)
    lost = [names[number] for number, held in cut["state"].items() if held and not optimizer.state.get(params[number])]
    if lost:
        raise ValueError(f"load_state_dict of the {type(optimizer).__name__} has not taken the state of {_some(lost)}.")


def _named(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict of the optimizer, in which parameters are numbered or named, with names."""
    names = parameter_names(optimizer)
    if not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            f"state_dict() of the {type(optimizer).__name__} has {_some([*state_dict])}, not the state of parameters "
            "and their groups, so that it cannot be saved by name. Save the optimizer that it contains."
        )
    groups = state_dict["param_groups"]
    keys = [key for group in groups for key in group["params"]]
    name_of_key = dict(zip(keys, names, strict=True))
    if strangers := [key for key in state_dict["state"] if key not in name_of_key]:
        raise ValueError(
            f"The {type(optimizer).__name__} has state {_some([*map(str, strangers)])} of no parameter, so that it "
            "cannot be saved by name. Save that with the program's own data, and remove it from optimizer.state before."
        )
    return {
        **state_dict,
        "state": {name_of_key[key]: held for key, held in state_dict["state"].items()},
        "param_groups": [{**group, "params": [name_of_key[key] for key in group["params"]]} for group in groups],
    }


def named_param_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups of an optimizer by name of parameter, without computing the state."""
    names = iter(parameter_names(optimizer))
    return [
        {**group, "params": list(itertools.islice(names, len(group["params"])))} for group in optimizer.param_groups
    ]


def show_unstepped(optimizer: torch.optim.Optimizer) -> None:
    """Add the initial state of parameters without state to state dicts of an optimizer that has taken steps.

    Forward has not used these parameters yet. Code that reads state dicts expects all trainable parameters in them.
    """

    def fill(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        state, params = state_dict["state"], _params(optimizer)
        unstepped = [number for number in range(len(params)) if not state.get(number)] if state else []
        if unstepped:
            of = {id(params[number]) for number in unstepped}
            state.update((number, first) for number, first in enumerate(_first_states(optimizer, of)) if first)

    optimizer.register_state_dict_post_hook(fill)


def _first_states(optimizer: torch.optim.Optimizer, of: Collection[int] | None = None) -> list[dict[str, Any]]:
    """Return each parameter's state before its first step, in the order of the groups; nothing for frozen parameters.

    Args:
        of: ``id`` of the parameters to compute it for; nothing for the others. None: all.

    Optimizers create state within their first step. This does the same with a zero tensor without gradient in place of
    each parameter.
    """
    try:
        return [
            _first_state(optimizer, group, param)
            if _has_state(optimizer, param) and (of is None or id(param) in of)
            else {}
            for group in optimizer.param_groups
            for param in group["params"]
        ]
    except Exception as error:
        warn(
            f"The state of the {type(optimizer).__name__} cannot be created before its first step "
            f"({type(error).__name__}: {error}), so its state dict is empty and torch.distributed.checkpoint.load "
            "would load nothing into it. mfsdp_compile.checkpoint.load does.",
            RuntimeWarning,
        )
        return []


def initial_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: Any) -> dict[str, Any]:
    """Return the state of a parameter of ``group`` before its first step; nothing if only that step can tell."""
    if _has_state(optimizer, param):
        with contextlib.suppress(Exception):  # of a step without real parameters
            return _first_state(optimizer, group, param)
    return {}


def _has_stepped(param: Any) -> bool:
    owner = owner_of(param)
    return owner is not None and owner.coordinator.steps > 0


def _has_state(optimizer: torch.optim.Optimizer, param: Any) -> bool:
    whole = whole_step_of(optimizer)
    return param.requires_grad and (whole is None or whole.owns(param))


def _first_state(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], param: Any) -> dict[str, Any]:
    if isinstance(optimizer, torch.optim.Muon):  # its step covers the matrices of all ranks
        return {"momentum_buffer": torch.zeros_like(param.detach())}
    is_sharded = isinstance(param, RowShardedTensor)
    rows = param.rows().detach() if is_sharded else param.detach()
    # What is not known to work element by element has state of other shapes, which follow from the whole parameter's.
    by_rows = is_sharded and whole_step_of(optimizer) is None
    takes_rows = by_rows and (is_by_element(optimizer) or has_flat_step(optimizer))
    twin = nn.Parameter(torch.zeros_like(rows) if takes_rows else rows.new_zeros(param.shape))
    setattr(twin, param.mfsdp_handle.bucket.plan.grad_attribute if is_sharded else "grad", torch.zeros_like(twin))
    beside = object.__new__(type(optimizer))
    vars(beside).update(
        _copied_attributes(optimizer),
        state=defaultdict(dict),
        param_groups=[{**{key: _copy(value) for key, value in group.items() if key != "params"}, "params": [twin]}],
        _optimizer_step_pre_hooks=OrderedDict(),
        _optimizer_step_post_hooks=OrderedDict(),
    )
    compat.step_without_hooks(type(optimizer))(beside)
    state: dict[str, Any] = {}
    for key, value in beside.state[twin].items():
        if is_number(optimizer, key) or (key == "step" and (not isinstance(value, Tensor) or not value.ndim)):
            first = _NUMBERS[key][1](group)
            state[key] = torch.full_like(value, first) if isinstance(value, Tensor) else first
        elif by_rows and isinstance(value, Tensor) and value.shape == twin.shape:
            if type(value) is not Tensor:
                raise TypeError(f"its state {key!r} is a {type(value).__name__}, not an ordinary tensor")
            local = value if takes_rows else take_rows(value, param.row_split, param.topology.shard).clone()
            state[key] = RowShardedTensor.wrap(local, param.row_split, param.topology)
        else:
            state[key] = value
    return state


def _copied_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return copies of an optimizer's attributes, so that a step of a copy changes nothing of the program.

    Raises:
        TypeError: One is an object of the program, such as another optimizer, which the step may change.
    """
    found = {}
    for name, value in vars(optimizer).items():
        if name in _OVERRIDDEN or name in ("state", "param_groups") or "mfsdp" in name:
            continue
        is_of_torch = name == "defaults" or name.endswith("_hooks") or type(optimizer).__module__.startswith("torch.")
        if not (is_of_torch or isinstance(value, (Tensor, type, FunctionType)) or is_plain(value)):
            raise TypeError(f"its attribute {name!r} is a {type(value).__name__}, which a step may change")
        found[name] = _copy(value)
    return found


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if is_plain(value) else value


_OVERRIDDEN = ("step", "zero_grad", "state_dict", "load_state_dict", "__deepcopy__")
"""Methods that optimizers have as instance attributes, set by us and by learning-rate schedulers."""


def _params(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _numbered(
    optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], by_order: bool = False
) -> dict[str, Any]:
    """Convert a state dict to the form that torch's ``load_state_dict`` takes, in the optimizer's order.

    Args:
        by_order: Leave it as it is if it has none of the optimizer's names: torch's helpers give their own names to
            parameters, in the optimizer's order.
    """
    params = _params(optimizer)
    stored_groups: Sequence[Mapping[str, Any]] = state_dict["param_groups"]
    stored_names = [key for group in stored_groups for key in group["params"]]
    if all(isinstance(key, int) for key in stored_names):
        return dict(state_dict)
    names = parameter_names(optimizer)
    if by_order and not set(names) & set(stored_names):
        return dict(state_dict)
    number = {name: i for i, name in enumerate(names)}
    group_of = {name: i for i, group in enumerate(stored_groups) for name in group["params"]}
    missing = [name for name in names if name not in group_of]
    unexpected = [name for name in {**group_of, **state_dict["state"]} if name not in number]
    if missing or unexpected:
        raise ValueError(
            f"The state dict does not fit the {type(optimizer).__name__}: missing are {_some(missing)}; not held by it "
            f"are {_some(unexpected)}."
        )
    groups = []
    for i, group in enumerate(optimizer.param_groups):
        numbers = [number[name] for name in _names_of(group, params, names)]
        sources = {group_of[names[n]] for n in numbers}
        if len(sources) > 1:
            raise ValueError(
                f"Parameter group {i} of the {type(optimizer).__name__} holds parameters that were in the groups "
                f"{sorted(sources)} when the state was saved, so it has no single learning rate. Group parameters as "
                "before."
            )
        stored = dict(stored_groups[sources.pop()] if sources else group)
        if "param_names" in group:  # names of the current parameters of the group
            stored["param_names"] = group["param_names"]
        groups.append({**stored, "params": numbers})
    state = {number[name]: held for name, held in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


def _names_of(group: Mapping[str, Any], params: Sequence[Tensor], names: Sequence[str]) -> list[str]:
    name_of = {id(param): name for param, name in zip(params, names, strict=True)}
    return [name_of[id(param)] for param in group["params"]]


def cut_distributed_state(optimizer: torch.optim.Optimizer) -> None:
    """Cut state that torch has distributed by the placements of a sharded parameter, evenly, like the parameter.

    ``set_optimizer_state_dict(full_state_dict=True)`` loads such state.
    """
    state = getattr(optimizer, "state", {})  # some that hold another optimizer have none
    for param in _params(optimizer):
        held = state.get(param)
        if not isinstance(held, dict):
            continue
        for key, value in held.items():
            if _is_distributed_like(value, param):
                held[key] = shard_state(optimizer, key, value, param)


def _is_distributed_like(value: Any, param: Any) -> bool:
    return (
        isinstance(param, RowShardedTensor)
        and type(value) is DTensor
        and (value.shape, value.device_mesh, value.placements) == (param.shape, param.device_mesh, param.placements)
    )


def cut_loaded_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Number parameters that are named, and cut full tensors, and tensors that others sharded evenly, like parameters.

    Runs before torch's own ``load_state_dict``. What a state dict shows before the first step, and nothing has filled,
    is left out: the step creates it, possibly of values that are not zero. A collective if state does not count steps.

    Raises:
        ValueError: State of an optimizer that works element by element has another shape than its parameter.
    """
    state_dict = _numbered(optimizer, state_dict, by_order=True)
    params = _params(optimizer)
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]  # numbers, or names: torch's order
    group_of = [group for group in state_dict["param_groups"] for _ in group["params"]]
    param_of = dict(zip(keys, params, strict=False))  # torch raises if the number of parameters differs
    settings_of = dict(zip(keys, group_of, strict=True))
    if (whole := whole_step_of(optimizer)) is not None:
        state = _owned_state(optimizer, whole, state_dict["state"], param_of)
    else:
        state = {key: _cut(optimizer, held, param_of.get(key)) for key, held in state_dict["state"].items()}
    if is_by_element(optimizer):
        _check_shapes(optimizer, state, param_of)
    left_out = _unstepped(optimizer, state, param_of, settings_of)
    kept = {key: held for key, held in state.items() if key not in left_out}
    if whole is not None:  # which has an entry for every parameter
        kept |= {key: {} for key in left_out}
    return {**state_dict, "state": kept}


def _cut(optimizer: torch.optim.Optimizer, held: dict[str, Any], param: Any) -> dict[str, Any]:
    return held if param is None else {key: shard_state(optimizer, key, value, param) for key, value in held.items()}


def _check_shapes(
    optimizer: torch.optim.Optimizer, state: Mapping[Any, Mapping[str, Any]], param_of: Mapping[Any, Any]
) -> None:
    for number in (each for each in param_of if each in state):  # in one order, so that ranks name the same
        param = param_of[number]
        for key, value in state[number].items():
            if not isinstance(value, Tensor):
                continue
            if value.numel() != 1 if is_number(optimizer, key) else value.shape != param.shape:
                raise ValueError(
                    f"The state dict has state {key!r} of shape {tuple(value.shape)} for {name_of(param)!r} of shape "
                    f"{tuple(param.shape)}, which the {type(optimizer).__name__} cannot step with."
                )


def _unstepped(
    optimizer: torch.optim.Optimizer,
    state: Mapping[Any, Mapping[str, Any]],
    param_of: Mapping[Any, Any],
    settings_of: Mapping[Any, Mapping[str, Any]],
) -> set[Any]:
    """Return the keys of parameters whose state is to the bit what a state dict shows before their first step.

    The same on all ranks: a rank may have no rows of a parameter, or rows whose state is zero after steps as well.
    """
    candidates = [key for key, held in state.items() if held and key in param_of and not _has_counted(held)]
    found = {key for key in candidates if _is_first(optimizer, settings_of[key], param_of[key], state[key])}
    if whole_step_of(optimizer) is not None:  # state of whole parameters
        return found
    of_models: dict[Any, list[Any]] = {}
    for key in candidates:
        if isinstance(param_of[key], RowShardedTensor):
            of_models.setdefault(owner_of(param_of[key]), []).append(key)
    bits = {key: 1 << number for number, key in enumerate(param_of)}
    for model, keys in of_models.items():
        if model is not None and has_others(model.coordinator.members.agreeing):
            here = sum(bits[key] for key in keys if key in found)
            everywhere = int(
                model.coordinator.conclude("Loading an optimizer's state", [], hex(here), _common_bits), 16
            )
            found -= {key for key in keys if not bits[key] & everywhere}
    return found


def _common_bits(masks: Sequence[str]) -> str:
    return hex(functools.reduce(operator.and_, (int(mask, 16) for mask in masks)))


def _has_counted(held: Mapping[str, Any]) -> bool:
    """Whether state says that its parameter was stepped, without computing anything."""
    step = held.get("step", 0)
    if isinstance(step, Tensor):
        return step.numel() == 1 and float(step.full_tensor() if isinstance(step, DTensor) else step) != 0
    return step != 0


def _is_first(
    optimizer: torch.optim.Optimizer, settings: Mapping[str, Any], param: Any, held: Mapping[str, Any]
) -> bool:
    """Whether this is to the bit, in this rank's rows, the state of a parameter before its first step."""
    first = initial_state(optimizer, {**settings, "params": [param]}, param)
    return bool(first) and first.keys() == held.keys() and all(_same(value, held[key]) for key, value in first.items())


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and isinstance(one, (int, float, str, type(None))) and one == other
    if one.shape != other.shape or isinstance(one, RowShardedTensor) != isinstance(other, RowShardedTensor):
        return False
    mine, its = (value.to_local() if isinstance(value, DTensor) else value for value in (one, other))
    return mine.dtype == its.dtype and torch.equal(mine, its.to(mine.device))


def _owned_state(
    optimizer: torch.optim.Optimizer,
    whole: StepsWhole,
    state: Mapping[Any, dict[str, Any]],
    param_of: Mapping[Any, Any],
) -> dict[Any, dict[str, Any]]:
    """Return the state of what this rank steps, and empty state of other parameters. A collective if state is
    sharded."""
    gathered = {key: compat.tree_map_only(DTensor, _full_tensor, held) for key, held in state.items()}
    missing = [
        param.row_split.name
        for key, param in param_of.items()
        if state and key not in state and _has_state(optimizer, param) and any(_first_states(optimizer, {id(param)}))
    ]
    if missing:
        raise ValueError(
            f"The state dict has no state of {_some(missing)}, which this rank steps (whole=True). State dicts hold "
            "what their rank stepped: with another number of ranks, save and load with Checkpoints, or with "
            "full_optimizer_state_dict(optimizer, rank=None)."
        )
    return {
        key: held if (param := param_of.get(key)) is None or whole.owns(param) else {} for key, held in gathered.items()
    }


def _full_tensor(tensor: DTensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, RowShardedTensor) else whole_tensor(tensor)


def _some(names: Sequence[str]) -> str:
    return (", ".join(map(repr, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")) or "none"
