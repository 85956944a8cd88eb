"""A sharded model: the one object that owns its buckets and everything that happens to them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import compat, gradients
from .agreement import agree, value_digest
from .bucket import Bucket, BucketPlan, Home
from .eager import EagerPolicy, EagerRuntime, EagerUnit, Window
from .layout import LayoutPolicy, ParamSpec, plan_layouts
from .modules import check_no_stray_references, shard_module
from .units import Unit, UnitClasses, find_units, repeated_blocks, resolve_unit_classes

__all__ = ["Precision", "ShardedModel"]


@dataclass(frozen=True)
class Precision:
    """Which dtypes shards have.

    Args:
        main_params_dtype: of shards, gradients and optimizer state; None keeps each parameter's own.
    """

    main_params_dtype: torch.dtype | None

    def main_dtype(self, compute_dtype: torch.dtype) -> torch.dtype:
        if self.main_params_dtype is None or not compute_dtype.is_floating_point:
            return compute_dtype
        return self.main_params_dtype


@dataclass
class _BackwardIds:
    """The backward pass under way, and one inside it."""

    outer: int | None = None
    inner: int | None = None


class ShardedModel:
    """Shards ``module`` in place.

    Args:
        module: the model, whole on this rank.
        unit_modules: see :func:`~mfsdp_compile.runtime.units.resolve_unit_classes`.
        mesh: one-dimensional, the data-parallel ranks.
        precision: dtypes of shards.
        device: where shards and buffers live.
        check_values: compare parameter values between ranks, not only names, shapes and dtypes.
        layout_policy: bounds for bucket layouts.
        eager_policy: bounds for the eager path.

    Raises:
        ValueError, TypeError: unit classes or parameters that cannot be sharded. The model is as it was.
        RuntimeError: ranks hold different models. The model is as it was.
    """

    def __init__(
        self,
        module: nn.Module,
        unit_modules: UnitClasses,
        mesh: DeviceMesh,
        precision: Precision,
        device: torch.device,
        check_values: bool = True,
        layout_policy: LayoutPolicy | None = None,
        eager_policy: EagerPolicy | None = None,
    ) -> None:
        self.mesh = mesh
        plans: list[tuple[Unit, list[BucketPlan]]] = []

        def describe() -> list[str]:
            units = _find_units(module, unit_modules)
            plans.extend((unit, _plan_unit(unit, mesh.size(), precision, layout_policy)) for unit in units)
            return _describe(module, plans, check_values)

        agree(mesh.get_group(), "fully_shard_model", describe)

        # From here on nothing fails but for want of memory.
        self._backward = _BackwardIds()
        self._touched: set[Bucket] = set()
        self.compiled_graphs: list[Any] = []  # records of the passes, added by the backend
        homes: dict[nn.Module, dict[str, Home]] = {}
        units = []
        for unit, unit_plans in plans:
            members = {sites[0].name: (param, sites) for param, sites in unit.params}
            buckets = []
            for plan in unit_plans:
                params = [members[slot.name] for slot in plan.layout.slots]
                bucket = Bucket(plan, [p for p, _ in params], [s for _, s in params], mesh, device)
                bucket.owner = self
                gradients.watch(bucket, self.touched)
                buckets.append(bucket)
                for index, (_, sites) in enumerate(params):
                    for site in sites:
                        site.module._parameters[site.attribute] = bucket.params[index]  # lets go of the original
                        homes.setdefault(site.module, {})[site.attribute] = Home(bucket, index)
            units.append(EagerUnit(unit.name, unit.module, unit.is_root, tuple(buckets)))
        plans.clear()
        for owner in module.modules():
            for name, buffer in owner._buffers.items():
                owner._buffers[name] = buffer.to(device) if buffer is not None else None
        self.buckets: tuple[Bucket, ...] = tuple(bucket for unit in units for bucket in unit.buckets)
        self.eager = EagerRuntime(units, module.modules(), self, eager_policy or EagerPolicy())
        self._shard_modules(module, homes)

    def _shard_modules(self, root: nn.Module, homes: dict[nn.Module, dict[str, Home]]) -> None:
        unit_of = {unit.module: unit for unit in self.eager.units if not unit.is_root}
        root_buckets = {bucket for unit in self.eager.units if unit.is_root for bucket in unit.buckets}
        for module in dict.fromkeys([root, *unit_of, *homes]):
            owned = {home.bucket for home in homes.get(module, {}).values()}
            owns_of_root = tuple(b for b in self.buckets if b in owned and b in root_buckets)
            window = Window(self.eager, unit_of.get(module), owns_of_root, is_root=module is root)
            self.eager.add_window(window)
            shard_module(module, homes.get(module, {}), window)

    # -- backward -----------------------------------------------------------------------------------------------------

    def enter_backward(self) -> None:
        """Called by whatever happens to this model in backward, compiled or eager: see that it gets finished."""
        current = compat.backward_id()
        if current in (-1, self._backward.outer, self._backward.inner):
            return
        if self._backward.outer is None:
            self._backward.outer = current
            compat.on_backward_end(self._finish_backward)
        else:
            # A backward inside a backward (reentrant checkpointing), or after one that raised. Gradients must be there
            # when it returns; parameters without one are for the outer backward to fill.
            self._backward.inner = current
            compat.on_backward_end(self.eager.finish_reductions)

    def enter_compiled(self) -> None:
        """A compiled graph of this model is about to run."""
        if compat.in_backward():
            self.enter_backward()  # recomputing
        else:
            self.leave_backward()
            self.eager.leave_stray_reads()

    def leave_backward(self) -> None:
        """Outside of backward: forget one that raised."""
        if not compat.in_backward():
            self._backward = _BackwardIds()
            self._touched.clear()

    def touched(self, bucket: Bucket) -> None:
        """A bucket got gradients."""
        self._touched.add(bucket)
        self.enter_backward()

    def _finish_backward(self) -> None:
        self.eager.finish_backward()
        if self._touched:  # else gradients of something else were computed
            for bucket in self.buckets:
                if bucket.plan.requires_grad and bucket not in self._touched:
                    gradients.fill_missing(bucket)
        self._touched.clear()
        self._backward = _BackwardIds()

    def zero_gradients(self, set_to_none: bool) -> None:
        for bucket in self.buckets:
            for param in bucket.params:
                if set_to_none:
                    param.grad = None
                elif param.grad is not None:
                    param.grad.zero_()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModel:
        duplicate = object.__new__(ShardedModel)
        memo[id(self)] = duplicate
        duplicate.mesh = self.mesh
        duplicate._backward = _BackwardIds()
        duplicate._touched = set()
        duplicate.compiled_graphs = []
        duplicate.buckets = copy.deepcopy(self.buckets, memo)
        duplicate.eager = copy.deepcopy(self.eager, memo)
        for bucket in duplicate.buckets:
            gradients.watch(bucket, duplicate.touched)
        return duplicate


def _find_units(module: nn.Module, unit_modules: UnitClasses) -> tuple[Unit, ...]:
    params = list(module.parameters())
    _check_shardable(module)
    check_no_stray_references(module, params)
    if unit_modules is None and (blocks := repeated_blocks(module)):
        names = ", ".join(cls.__qualname__ for cls in blocks)
        warnings.warn(
            "fsdp_unit_modules is None: the whole model is one unit, so that all of its parameters are gathered at "
            f"once. Candidates for units, by repetition: {names}. Pass them, or 'auto' to use these.",
            stacklevel=4,
        )
    return find_units(module, resolve_unit_classes(module, unit_modules))


def _check_shardable(module: nn.Module) -> None:
    for name, param in module.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"Parameter {name!r} has no shape yet (a lazy module). Run the model once before fully_shard_model."
            )
        if type(param) is not nn.Parameter and type(param.data) is not torch.Tensor:
            kind = type(param.data).__name__
            sharded = " It seems to be sharded already." if kind == "RowShardedTensor" else ""
            raise ValueError(f"Parameter {name!r} is a {kind}; fully_shard_model takes ordinary parameters.{sharded}")
        if param.is_complex():
            raise NotImplementedError(
                f"Parameter {name!r} is complex, which collectives do not sum. Store torch.view_as_real(parameter)."
            )
        if param.is_meta:
            raise NotImplementedError(
                f"Parameter {name!r} is on the meta device: init_model_with_meta_device is not implemented yet. "
                "Initialise the model on a real device."
            )


def _plan_unit(
    unit: Unit, world_size: int, precision: Precision, layout_policy: LayoutPolicy | None
) -> list[BucketPlan]:
    groups: dict[tuple[torch.dtype, bool], list[ParamSpec]] = {}
    for param, sites in unit.params:
        groups.setdefault((param.dtype, param.requires_grad), []).append(ParamSpec(sites[0].name, tuple(param.shape)))
    plans: list[BucketPlan] = []
    for (dtype, requires_grad), specs in groups.items():
        for layout in plan_layouts(specs, dtype.itemsize, world_size, layout_policy):
            plans.append(BucketPlan(unit.name, unit.name, layout, dtype, precision.main_dtype(dtype), requires_grad))
    if len(plans) > 1:
        plans = [replace(plan, name=f"{unit.name}#{number}") for number, plan in enumerate(plans)]
    return plans


def _describe(module: nn.Module, plans: Sequence[tuple[Unit, Sequence[BucketPlan]]], check_values: bool) -> list[str]:
    lines = []
    for name, param in module.named_parameters():
        lines.append(f"parameter {name}: {tuple(param.shape)}, {param.dtype}, requires_grad={param.requires_grad}")
    for name, buffer in module.named_buffers():
        lines.append(f"buffer {name}: {tuple(buffer.shape)}, {buffer.dtype}")
    for _, unit_plans in plans:
        for plan in unit_plans:
            lines.append(f"bucket {plan.name}: {plan.layout.fingerprint}, main dtype {plan.main_dtype}")
    if check_values:
        lines.extend(f"values of {name}: {value_digest(param)}" for name, param in module.named_parameters())
    return lines
