"""An optimizer's step over whole parameters, each on one rank.

For optimizers that need whole matrices (Shampoo, SOAP, Adafactor). Each parameter has an owner among the ranks that share
it; see :func:`.muon.owners`. At each step, rows of the parameter and of its gradient travel there, the optimizer steps over
ordinary tensors, those that its rank owns, and rows travel back. Work and state are ``1 / ranks`` of one process's.
Traffic per step and rank: three all-to-alls of ``elements / ranks``, in the dtypes of parameters and gradients.

State belongs to the owner's tensors, not to sharded parameters, so that it is in no state dict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..memory.tensor import RowShardedTensor
from ..topology import Topology
from .muon import Journey, Leg, legs_of

__all__ = ["WholeStep"]


class WholeStep:
    """Steps one optimizer over whole parameters.

    Args:
        optimizer: Optimizer over sharded parameters, without state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._owned: dict[RowShardedTensor, nn.Parameter] = {}
        self._legs: dict[tuple[int, ...], list[Leg]] = {}
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.split.groups:
                    raise NotImplementedError(
                        f"whole=True: {param.split.name!r} is divided over other ranks than the data-parallel ones (tensor or "
                        "expert parallel). Give such parameters to another optimizer."
                    )
        optimizer.register_state_dict_pre_hook(_refuse_state_dict)
        optimizer.register_load_state_dict_pre_hook(_refuse_state_dict)

    def __call__(self, step: Callable[[], Any], closure: Callable[[], Any] | None) -> Any:
        """Run ``step``, the optimizer's own, over the parameters that this rank owns. A collective."""
        loss = None
        if closure is not None:  # called once, before gradients travel
            with torch.enable_grad():
                loss = closure()
        groups = self._optimizer.param_groups
        given = [group["params"] for group in groups]
        params = [param for group in given for param in group if _gradient(param) is not None]
        for topology in dict.fromkeys(param.topology for param in params):
            self._fetch([param for param in params if param.topology == topology], topology)
        try:
            for group, its in zip(groups, given, strict=True):
                group["params"] = [self._owned[param] for param in its if param in self._owned]
            result = step()
        finally:
            for group, its in zip(groups, given, strict=True):
                group["params"] = its
        for topology in dict.fromkeys(param.topology for param in params):
            self._give_back([param for param in params if param.topology == topology], topology)
        return result if closure is None else loss

    def _routes(self, params: list[RowShardedTensor], topology: Topology) -> list[Leg]:
        key = tuple(id(param) for param in params)
        if key not in self._legs:
            self._legs[key] = legs_of([param.split for param in params], topology)
        return self._legs[key]

    @torch.no_grad()
    def _fetch(self, params: list[RowShardedTensor], topology: Topology) -> None:
        topology.announce(f"a step over whole parameters, from {params[0].split.name!r} on", params[0].split.name)
        shapes, legs = [param.split.shape for param in params], self._routes(params, topology)
        values = Journey(shapes, legs, [topology.on_device(param.to_local()) for param in params]).there()
        by_dtype: dict[torch.dtype, list[int]] = {}
        gradients: dict[int, Tensor] = {}
        rows = [topology.on_device(_gradient(param).to_local()) for param in params]  # type: ignore[union-attr]
        for number, its in enumerate(rows):
            by_dtype.setdefault(its.dtype, []).append(number)
        for numbers in by_dtype.values():
            chosen = [params[number] for number in numbers]
            journey = Journey([shapes[n] for n in numbers], self._routes(chosen, topology), [rows[n] for n in numbers])
            gradients |= {numbers[k]: whole for k, whole in journey.there().items()}
        for number, value in values.items():
            param = params[number]
            if param not in self._owned:  # where the shard rests, which may be in host memory
                self._owned[param] = nn.Parameter(torch.empty_like(value, device=param.device))
            self._owned[param].copy_(value)
            setattr(self._owned[param], _grad_attribute(param), gradients[number].to(param.device))

    @torch.no_grad()
    def _give_back(self, params: list[RowShardedTensor], topology: Topology) -> None:
        shapes, legs = [param.split.shape for param in params], self._routes(params, topology)
        owned = {
            number: topology.on_device(self._owned[param].detach())
            for number, param in enumerate(params)
            if param in self._owned
        }
        rows = Journey(shapes, legs, [topology.on_device(param.to_local()) for param in params]).back(owned)
        for number, param in enumerate(params):
            param.copy_(RowShardedTensor.wrap(rows[number].to(param.device), param.split, topology))
            if param in self._owned:
                setattr(self._owned[param], _grad_attribute(param), None)


def _grad_attribute(param: RowShardedTensor) -> str:
    name: str = param.mfsdp_home.bucket.plan.grad_attribute  # type: ignore[attr-defined]
    return name


def _gradient(param: RowShardedTensor) -> RowShardedTensor | None:
    return getattr(param, _grad_attribute(param), None)


def _refuse_state_dict(optimizer: torch.optim.Optimizer, *given: Any) -> NoReturn:
    raise NotImplementedError(
        f"The state of this {type(optimizer).__name__} is whole, of each parameter on the rank that steps it (whole=True), and "
        "in no state dict. Save the model without it, or train with an optimizer that works on shards."
    )
