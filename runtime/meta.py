"""Values for models that were made on the meta device.

Shards are made first, empty. Then each module gets memory for its own parameters and buffers, is initialised, and its rows are
taken: never more than one module's own parameters are whole in memory, and the numbers drawn are those that

    model.to_empty(device=device)
    for module in model.modules():
        module.reset_parameters()

draws in one process, on any number of ranks. (Megatron-FSDP initialises a bucket at a time, each rank with its own generator.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from .bucket import Home

__all__ = ["InitFn", "check_initialisable", "has_meta", "initialise", "random_state"]

InitFn = Callable[[nn.Module], None]
"""Gives values to a module's own parameters and buffers, which have memory then."""

_METHODS = ("reset_parameters", "_reset_parameters")


def has_meta(module: nn.Module) -> bool:
    return any(_own_meta(owner) for owner in module.modules())


def check_initialisable(module: nn.Module, init_fn: InitFn | None) -> None:
    """Raise unless every tensor on the meta device can get a value.

    Raises:
        NotImplementedError: one is a DTensor.
        TypeError: ``init_fn`` is no function.
        ValueError: the module that owns it does not say how it is initialised.
    """
    if init_fn is not None and not callable(init_fn):
        raise TypeError(f"init_fn takes a function of a module, got a {type(init_fn).__name__}")
    for name, owner in module.named_modules():
        own = _own_meta(owner)
        for attribute, tensor in own.items():
            if isinstance(tensor, DTensor):
                raise NotImplementedError(
                    f"{f'{name}.{attribute}'.lstrip('.')!r} is a DTensor on the meta device: models that are divided over "
                    "other mesh dimensions cannot be initialised from there yet. Initialise it on a real device."
                )
        if own and init_fn is None and _method_of(owner) is None:
            raise ValueError(
                f"[init_model_with_meta_device=True] Module {name!r}, a {type(owner).__name__}, does not have a "
                f"reset_parameters or _reset_parameters method, and has {', '.join(map(repr, own))} on the meta device. Give the "
                "class such a method, or pass init_fn=..., which is called with every module that owns such tensors."
            )


def random_state(device: torch.device) -> str:
    """Of the generators that initialisation draws from, by a digest."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return hashlib.sha1(b"".join(state.numpy().tobytes() for state in states), usedforsecurity=False).hexdigest()


@torch.no_grad()
def initialise(
    module: nn.Module,
    homes: Mapping[nn.Module, Mapping[str, Home]],
    originals: Mapping[nn.Module, Mapping[str, nn.Parameter]],
    device: torch.device,
    init_fn: InitFn | None,
) -> None:
    """Give values to every module that owns a tensor on the meta device.

    Args:
        module: whose parameters are sharded, without values.
        homes: where the parameters of each module are, by attribute.
        originals: what was there before, likewise.
        device: of the values while they are whole.
        init_fn: see :data:`InitFn`; None: the modules' own method.
    """
    for owner in module.modules():
        own = homes.get(owner, {})
        sharded = {name: owner._parameters[name] for name in own}
        buffers = [name for name, buffer in owner._buffers.items() if buffer is not None and buffer.is_meta]
        if not buffers and not any(original.is_meta for original in originals.get(owner, {}).values()):
            continue
        for name, home in own.items():
            owner._parameters[name] = _empty(home, device)  # nothing else holds it: it is gone with the module's turn
        for name in buffers:
            owner._buffers[name] = torch.empty_like(owner._buffers[name], device=device)
        try:
            method = _method_of(owner)
            if init_fn is not None:
                init_fn(owner)
            elif method is not None:
                method()
            for name, home in own.items():
                _take(home, owner._parameters[name], name, owner)
        finally:
            owner._parameters.update(sharded)


def _empty(home: Home, device: torch.device) -> nn.Parameter:
    plan = home.bucket.plan
    values = torch.empty(home.bucket.splits[home.index].shape, dtype=plan.compute_dtype, device=device)
    return nn.Parameter(values, requires_grad=plan.requires_grad)


def _take(home: Home, whole: Tensor | None, name: str, owner: nn.Module) -> None:
    """Copy this rank's rows."""
    bucket, split = home.bucket, home.bucket.splits[home.index]
    if whole is None or whole.shape != split.shape:
        found = "nothing" if whole is None else f"a tensor of shape {tuple(whole.shape)}"
        raise ValueError(
            f"Initialising a {type(owner).__name__} left {found} in the place of its parameter {name!r} of shape "
            f"{tuple(split.shape)}. Give values to it in place."
        )
    rows = split.rows(bucket.topology.shard)
    if rows:
        view = bucket.views(bucket.flat.detach())[home.index]
        view.copy_(whole[rows.start : rows.stop] if split.shape else whole)


def _own_meta(owner: nn.Module) -> dict[str, Tensor]:
    tensors = {**owner._parameters, **owner._buffers}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.is_meta}


def _method_of(owner: nn.Module) -> Callable[[], None] | None:
    return next((getattr(owner, name) for name in _METHODS if callable(getattr(owner, name, None))), None)
