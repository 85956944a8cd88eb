"""An optimizer's step over whole parameters, each on one rank.

For optimizers that need whole matrices (Shampoo, SOAP, Adafactor). Each parameter has an owner among the ranks that
share it; see :func:`.muon.owners`. At each step, rows of the parameter and of its gradient travel there, the optimizer
steps over ordinary tensors, those that its rank owns, and rows travel back. Work and state are ``1 / ranks`` of one
process's. Traffic per step and rank: three all-to-alls of ``elements / ranks``, in the dtypes of parameters and
gradients.

Between steps, state is found under the sharded parameters, on their owners only: ordinary tensors of any shape, in any
structure. State dicts hold what their rank owns. A checkpoint, to which every rank adds its own, holds everything, and
each rank reads what it owns then.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ...geometry.topology import Topology
from ...memory import devices
from ...memory.redistribute import announce_at_rest
from ...memory.tensor import RowShardedTensor
from ...optim.own_steps import WHOLE_STEP
from .muon import Item, Journey, Leg, Owner, check_is_one_parameter, legs_of, owners, together, whole_cut, whole_item


class WholeStep:
    """Steps one optimizer over whole parameters.

    Args:
        optimizer: Optimizer over sharded parameters, without state.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._reference = weakref.ref(optimizer)  # which holds this object
        self._owner: dict[RowShardedTensor, Owner] = {}
        self._wholes: dict[RowShardedTensor, nn.Parameter] = {}
        self._routes: dict[tuple[Any, ...], tuple[list[Item], list[Leg]]] = {}
        self._assign()
        vars(optimizer)[WHOLE_STEP] = self

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._reference()
        assert optimizer is not None
        return optimizer

    def __call__(self, step: Callable[[], Any], closure: Callable[[], Any] | None) -> Any:
        """Run ``step``, the optimizer's own, over the parameters that this rank owns. A collective."""
        loss = None
        if closure is not None:  # called once, before gradients travel
            with torch.enable_grad():
                loss = closure()
        self._assign()
        groups = self._optimizer.param_groups
        given = [group["params"] for group in groups]
        params = [param for group in given for param in group if _gradient(param) is not None]
        groups_of_ranks = together(params, whole_cut)
        for (topology, _), its in groups_of_ranks.items():
            self._fetch(its, topology)
        state = self._optimizer.state
        wholes = {param: self._wholes[param] for param in params if self.owns(param)}
        try:
            for group, its in zip(groups, given, strict=True):
                group["params"] = [wholes[param] for param in its if param in wholes]
            for param, whole in wholes.items():
                if param in state:
                    state[whole] = state.pop(param)
            result = step()
        finally:
            for group, its in zip(groups, given, strict=True):
                group["params"] = its
            for param, whole in wholes.items():
                setattr(whole, _grad_attribute(param), None)
                if whole in state:
                    state[param] = state.pop(whole)
        for param in params:
            # torch's get_optimizer_state_dict takes a step on ranks without state, which would wait for the others.
            state.setdefault(param, {})
        for (topology, _), its in groups_of_ranks.items():
            self._give_back(its, topology)
        return result if closure is None else loss

    def owns(self, param: RowShardedTensor) -> bool:
        """Whether this rank steps ``param``, and holds its state."""
        owner, cut = self._owner_of(param), whole_cut(param.row_split)
        return owner.shard == param.topology.shard and (cut is None or owner.part == cut.group.rank)

    def take_owners(self, other: WholeStep, copy_of: Mapping[RowShardedTensor, RowShardedTensor]) -> None:
        """Keep the owners of another optimizer, of which this one is a copy: they depend on when it got its
        parameters."""
        self._owner = {copy_of[param]: other._owner_of(param) for param in copy_of}

    def _owner_of(self, param: RowShardedTensor) -> Owner:
        if param not in self._owner:
            self._assign()
        return self._owner[param]

    def _assign(self) -> None:
        """Choose the owners of parameters that have none, all together: they must not depend on who has a gradient."""
        new = [p for group in self._optimizer.param_groups for p in group["params"] if p not in self._owner]
        for param in new:
            check_is_one_parameter(param)
        for (topology, _), params in together(new, whole_cut).items():
            found = owners([whole_item(param.row_split) for param in params], topology.shards)
            self._owner.update(zip(params, found, strict=True))

    def _journeys(
        self, params: list[RowShardedTensor], rows: list[Tensor], topology: Topology
    ) -> list[tuple[list[int], Journey]]:
        """Return journeys of one dtype each, with the numbers of the parameters that they take."""
        by_dtype: dict[torch.dtype, list[int]] = {}
        for number, its in enumerate(rows):
            by_dtype.setdefault(its.dtype, []).append(number)
        journeys = []
        for numbers in by_dtype.values():
            items, legs = self._route([params[n] for n in numbers], topology)
            moved = [devices.on_device(rows[n].reshape(-1), topology.mesh.device_type) for n in numbers]
            journeys.append((numbers, Journey(items, legs, moved)))
        return journeys

    def _route(self, params: list[RowShardedTensor], topology: Topology) -> tuple[list[Item], list[Leg]]:
        # Cached: computing it involves every shard of every parameter. Groups of parts are made again after failures.
        cut = whole_cut(params[0].row_split)
        key = (cut and cut.group.name, *map(id, params))
        if key not in self._routes:
            items = [whole_item(param.row_split) for param in params]
            self._routes[key] = items, legs_of(items, topology, [self._owner[param] for param in params])
        return self._routes[key]

    @torch.no_grad()
    def _fetch(self, params: list[RowShardedTensor], topology: Topology) -> None:
        announce_at_rest(
            topology, f"a step over whole parameters, from {params[0].row_split.name!r} on", params[0].row_split.name
        )
        for numbers, journey in self._journeys(params, [param.rows() for param in params], topology):
            for k, value in journey.there().items():
                param = params[numbers[k]]
                if param not in self._wholes:
                    self._wholes[param] = nn.Parameter(torch.empty_like(value, device=param.device))
                self._wholes[param].copy_(value)
        rows = [_gradient(param).to_local() for param in params]  # type: ignore[union-attr]
        for numbers, journey in self._journeys(params, rows, topology):
            for k, gradient in journey.there().items():
                param = params[numbers[k]]
                setattr(self._wholes[param], _grad_attribute(param), gradient.to(param.device))

    @torch.no_grad()
    def _give_back(self, params: list[RowShardedTensor], topology: Topology) -> None:
        announce_at_rest(
            topology,
            f"the end of a step over whole parameters, from {params[0].row_split.name!r} on",
            params[0].row_split.name,
        )
        for numbers, journey in self._journeys(params, [param.rows() for param in params], topology):
            owned = {k: self._wholes[params[n]].detach() for k, n in enumerate(numbers) if self.owns(params[n])}
            moved = {k: devices.on_device(whole, topology.mesh.device_type) for k, whole in owned.items()}
            for n, flat in zip(numbers, journey.back(moved), strict=True):
                param = params[n]
                rows = flat.view(param.rows().shape).to(param.device)
                param.copy_(RowShardedTensor.wrap(rows, param.row_split, topology))


def _grad_attribute(param: RowShardedTensor) -> str:
    name: str = param.mfsdp_handle.bucket.plan.grad_attribute  # type: ignore[attr-defined]
    return name


def _gradient(param: RowShardedTensor) -> RowShardedTensor | None:
    return getattr(param, _grad_attribute(param), None)
