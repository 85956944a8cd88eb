"""Shards a model at its first use."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mfsdp_compile.distributed_index import hybrid_arguments
from mfsdp_compile.runtime.eager.modules import register_forward
from mfsdp_compile.runtime.init import meta
from mfsdp_compile.runtime.memory.bucket import is_homeless
from mfsdp_compile.runtime.model import first_values
from mfsdp_compile.runtime.model.shard import check_dissolves, dissolve
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.plan.references import tie_again
from mfsdp_compile.runtime.ranks.agreement import telling_others
from mfsdp_compile.sharding_arguments import Arguments, shard_by

from .compiled import compile_again, compiled_modules
from .first_use import pending, set_class, wait
from .request import REQUEST, Request, units_in
from .state import METHODS, SETTINGS, STATE, ModuleState


def shard(root: nn.Module) -> None:
    """Shard a model. Models inside, used before ``fully_shard`` was called on ``root``, become parts of it."""
    own: Request = vars(root)[REQUEST]
    holder = root if len(own.modules) == 1 else nn.ModuleList(own.modules)
    units = units_in(holder)
    requests = list(dict.fromkeys(vars(module)[REQUEST] for module in units))
    _check_requests(root, own, requests)
    compiled = compiled_modules(holder, [wrapper for request in requests for wrapper in request.wrappers])
    parts = list({id(state.model): state.model for module in units if (state := vars(module).get(STATE))}.values())
    settings = {module: vars(module).get(SETTINGS, {}) for module in units}
    ignored = _ignored(holder, requests, parts)
    for part in parts:
        check_dissolves(part)
    for part in parts:
        dissolve(part)
    for module in units:
        vars(module).pop(STATE, None)
    for module in holder.modules():
        set_class(module, is_pending=False)
    tie_again(holder)
    try:
        model = _shard_now(holder, own, requests, ignored)
    except BaseException:
        for module in units:  # as before: the model can be used, or the call repeated
            wait(module, shard)
        raise
    model.awaits_values |= any(part.awaits_values for part in parts)
    names = {module: name for name, module in holder.named_modules()}
    together: weakref.WeakKeyDictionary[ModuleState, None] = weakref.WeakKeyDictionary()
    kept = holder if holder is not root else None
    for module in units:
        pending.pop(module, None)
        of_module = (
            each
            for each in model.eager.units
            if (each.is_root if module is holder else any(module is reference() for reference in each.modules))
        )
        state = vars(module)[STATE] = ModuleState(model, tuple(of_module), names[module], together, kept)
        together[state] = None
        for name in vars(module).get(METHODS, ()):
            vars(module).pop(name, None)
            register_forward(module, name)
    for module, how in compiled.items():
        compile_again(module, how)
    for module, calls in settings.items():
        for name, (args, kwargs) in calls.items():
            getattr(module, name)(*args, **kwargs)


def _ignored(root: nn.Module, requests: Sequence[Request], parts: Sequence[ShardedModel]) -> frozenset[nn.Parameter]:
    """Return the parameters that are not sharded.

    As in FSDP2, a call of ``fully_shard`` says so for the parameters of its own modules, and not for those of units
    inside: it may get the set of the whole model, or that of another part.

    Raises:
        ValueError: A tied parameter is ignored in one place, and not in another.
    """
    of_module = {module: request for request in requests for module in request.modules}
    before = {place for part in parts for place in _ignored_places(part)}
    found: dict[nn.Parameter, dict[bool, str]] = {}
    waiting: list[tuple[str, nn.Module, Request | None]] = [("", root, None)]
    seen = set()
    while waiting:
        path, module, around = waiting.pop()
        request = of_module.get(module, around)
        if (module, request) in seen:
            continue
        seen.add((module, request))
        for name, param in vars(module)["_parameters"].items():
            if param is not None:
                is_ignored = (module, param) in before or (request is not None and param in request.ignored)
                found.setdefault(param, {}).setdefault(is_ignored, f"{path}{name}")
        waiting += [(f"{path}{name}.", child, request) for name, child in module.named_children()]
    for place in found.values():
        if len(place) > 1:
            raise ValueError(
                f"Parameters {place[True]!r} and {place[False]!r} are tied, and only the first one is ignored: pass it "
                "in ignored_params of fully_shard for the units of both, or of none."
            )
    return frozenset(param for param, place in found.items() if True in place)


def _ignored_places(part: ShardedModel) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield what a model ignores, replaced parameters included, with the modules that it is in."""
    ignored = set(part.ignored.values())
    for module in part.module.modules() if ignored and part.module is not None else ():
        for param in vars(module)["_parameters"].values():
            if param in ignored:
                yield module, param


def _shard_now(
    root: nn.Module, own: Request, requests: Sequence[Request], ignored: frozenset[nn.Parameter]
) -> ShardedModel:
    units = [list(request.modules) for request in requests if request.modules != (root,)]
    is_meta = meta.has_meta(root)
    # The dimensions of tensor parallelism have values to compare, too.
    checks_later = not any(isinstance(param, DTensor) for param in root.parameters() if not is_homeless(param))
    if checks_later and all(request.check_values for request in requests):
        first_values.note(param for param in root.parameters() if param not in ignored)
    arguments = Arguments(
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
    )
    with telling_others():
        model, _ = shard_by(root, arguments)
    model.compares_values = checks_later and all(request.check_values for request in requests)
    return model


def _check_requests(root: nn.Module, own: Request, requests: Sequence[Request]) -> None:
    for request in requests:
        if (request.mesh, request.dims) != (own.mesh, own.dims):
            name = next(name for name, module in root.named_modules() if module is request.modules[0])
            raise NotImplementedError(
                f"fully_shard got another mesh for {name!r} ({request.mesh}) than for the model ({own.mesh}). Experts, "
                "which other ranks hold, are sharded with fully_shard_model(expt_device_mesh=...)."
            )


def _mesh(request: Request) -> dict[str, Any]:
    mesh = request.mesh
    if mesh is None:
        return {}
    if request.dims is None:
        if mesh.ndim == 1:
            return {"device_mesh": mesh}
        assert mesh.mesh_dim_names is not None  # check_mesh
        outer, shard = mesh.mesh_dim_names
    else:
        shard, outer = (_flattened(mesh, names) for names in request.dims)
    if shard is None:
        return {"device_mesh": mesh, "dp_shard_dim": outer, "zero_dp_strategy": "no_shard"}
    if outer is None:
        return {"device_mesh": mesh, "dp_shard_dim": shard}
    return hybrid_arguments(mesh, shard, outer)


def _flattened(mesh: DeviceMesh, names: tuple[str, ...]) -> str | None:
    """Return the name of the mesh dimension that several form together; None for none."""
    if len(names) < 2:
        return next(iter(names), None)
    mesh[names]._flatten(name := "_".join(names))
    return name
