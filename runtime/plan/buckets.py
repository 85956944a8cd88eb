"""Buckets of a unit: which parameters share one flat tensor, and in which dtypes it is held and reduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from .. import compat
from ..formats import extension, quantize
from ..geometry.bucket_plan import BucketPlan, ParamLocation
from ..geometry.layout import BucketLayout, LayoutPolicy, ParamSpec, in_parts, plan_layouts, row_by_row
from ..geometry.partition import local_shape
from ..geometry.topology import Topology
from ..lanes.lane import Plugin
from .experts import ExpertPlacement
from .precision import GradientPolicy, Scaling
from .precision_plan import PrecisionPlan
from .units import Unit


class Dtypes(NamedTuple):
    """Dtypes of parameters that may share a bucket: when the model is sharded, and gathered; and their policy's
    position."""

    model: torch.dtype
    compute: torch.dtype
    position: int


@dataclass(frozen=True)
class BucketPlanner:
    """Plans buckets as plain data, equal on all ranks.

    Args:
        topology: Topology of all parameters but experts.
        precision: Dtypes of gathered parameters, shards and gradients.
        gradient_policy: How gradients are combined.
        layout_policy: Limits for bucket layouts.
        whole: Names of parameters that should each be kept on one rank.
        experts: Which parameters are experts. None: none are.
        keeps_transposes: Whether the transposed planes of weights in fp8, which some devices need in backward, are made
            in forward and kept.
        plugins: What changes the lanes of all buckets.
    """

    topology: Topology
    precision: PrecisionPlan
    gradient_policy: GradientPolicy
    layout_policy: LayoutPolicy
    whole: frozenset[str]
    experts: ExpertPlacement | None = None
    keeps_transposes: bool = False
    plugins: tuple[Plugin, ...] = ()

    def unit(self, unit: Unit) -> list[BucketPlan]:
        """Plan the buckets of a unit: one for each policy, dtype, ``requires_grad``, topology and way to be quantized,
        or more if padding, ``bucket_bytes`` or ``by_parameter`` demand it."""
        groups: dict[tuple[Dtypes, bool, bool, str, str], list[ParamSpec]] = {}
        for param, locations in unit.params:
            shape, whole = tuple(local_shape(param)), any(location.name in self.whole for location in locations)
            spec = ParamSpec(locations[0].name, shape, whole=whole)
            if param.is_complex():
                spec = replace(spec, shape=(*shape, 2), is_complex=True, row_dims=min(len(shape), 1))
            is_expert = self.experts is not None and self.experts.of_locations(
                [location.name for location in locations], param
            )
            scaling, form = self._scaling(unit, param, locations, is_expert), quantize.DEQUANTIZED
            if compat.torchao.is_weight(param):
                scaling, form = "tensorwise", compat.torchao.FORM
            elif extension.is_extended(param) and not compat.transformer_engine.is_weight(param):
                scaling, form = "", extension.FORM
            elif self.topology_of(is_expert).gathers_shards and (of_layers := self._form_of_layers(locations)):
                scaling, form = compat.transformer_engine.scaling_of(of_layers), of_layers
            elif scaling and all(compat.torchao.rounds_scales(location.module) for location in locations):
                # Products of values and scales of nvfp4 have more bits than float8, whatever the scales.
                form = quantize.DEQUANTIZED if scaling == quantize.NVFP4 else quantize.ROUNDED
            dtypes = self._dtypes(param, locations)
            groups.setdefault((dtypes, param.requires_grad, is_expert, scaling, form), []).append(spec)
        plans: list[BucketPlan] = []
        for (dtypes, requires_grad, is_expert, scaling, form), specs in groups.items():
            itemsize = quantize.SENT_DTYPE.itemsize if scaling else dtypes.compute.itemsize
            most = self.layout_policy.bucket_bytes
            shards = self.topology_of(is_expert).shards
            if form == extension.FORM:
                for spec in specs:
                    bucket = self._bucket(unit, row_by_row(spec, itemsize, shards), dtypes, requires_grad, is_expert)
                    plans.append(replace(bucket, form=form))
                continue
            if scaling and most is not None:
                most = quantize.numel_of_sent(most, scaling)
            alone = self.layout_policy.by_parameter
            for part in [[spec] for spec in specs] if alone else in_parts(specs, itemsize, most):
                for layout in plan_layouts(part, itemsize, shards, self._policy(scaling, part[0].is_complex)):
                    bucket = self._bucket(unit, layout, dtypes, requires_grad, is_expert)
                    plans.append(_quantized(replace(bucket, scaling=scaling, form=form)))
        if len(plans) > 1:
            plans = [replace(plan, name=f"{unit.name}#{number}") for number, plan in enumerate(plans)]
        return plans

    def topology_of(self, is_expert: bool) -> Topology:
        """Return the topology of a bucket of experts, or of a bucket of other parameters."""
        return self.experts.topology if is_expert and self.experts is not None else self.topology

    def _dtypes(self, param: nn.Parameter, locations: Sequence[ParamLocation]) -> Dtypes:
        return Dtypes(param.dtype, self.precision.compute_dtype(param, locations), self.precision.position(locations))

    def _scaling(self, unit: Unit, param: nn.Parameter, locations: Sequence[ParamLocation], is_expert: bool) -> str:
        """Return the scaling of a parameter that is quantized to be gathered; "" for others."""
        topology, ndim = self.topology_of(is_expert), param.dim()
        policy = self.precision.policy_at(self.precision.position(locations))
        if policy.param_comm_dtype is None or not topology.gathers_shards or ndim not in (2, 3):
            return ""
        if not param.dtype.is_floating_point or param.dtype.itemsize < 2:
            return ""
        asked, scaling = policy.param_comm_filter, policy.param_comm_scaling
        block = quantize.block_numel(scaling)
        fits = local_shape(param)[-1] % block == 0
        if asked is None:
            embeds = any(isinstance(location.module, nn.Embedding) for location in locations)
            return scaling if fits and not unit.is_root and not embeds and (ndim == 2 or is_expert) else ""
        if not asked(locations[0].name, param):
            return ""
        if not fits:
            raise ValueError(
                f"param_comm_scaling={scaling!r} scales {block} neighbors in a row together, but rows of "
                f"{locations[0].name!r}, which param_comm_filter has chosen, have {local_shape(param)[-1]:,} elements, "
                f"which is no multiple of {block}. Leave it out with the filter, or use another scaling."
            )
        return scaling

    def _policy(self, scaling: str, is_complex: bool) -> LayoutPolicy:
        """Return the limits for layouts whose shards must not cut blocks of a scaling, or complex numbers."""
        policy, block = self.layout_policy, max(quantize.block_numel(scaling), 1 + is_complex)
        block = max(block, *(getattr(plugin, "block_numel", 1) for plugin in self.plugins), 1)
        cuts = policy.cuts_matrices and quantize.cuts_matrices(scaling)
        return replace(policy, block_numel=max(policy.block_numel, block), cuts_matrices=cuts)  # powers of two

    def _form_of_layers(self, locations: Sequence[ParamLocation]) -> str:
        """Return the form in which layers of Transformer Engine get a parameter that they have quantized; "" for
        others."""
        modules, attributes = (
            [location.module for location in locations],
            [location.attribute for location in locations],
        )
        return compat.transformer_engine.form_of(modules, attributes, self.keeps_transposes)

    def _scale(self, is_expert: bool, averages: bool) -> float:
        """Return the factor for a bucket's gradients after their sum or average over the bucket's ranks.

        Gradients of experts are already sums over the tokens of all data-parallel ranks. The factor turns them into
        means over these ranks.

        Args:
            averages: Whether the collectives average.
        """
        ranks = self.topology.every.size
        if averages:
            return self.topology_of(is_expert).every.size / ranks
        return 1.0 if self.gradient_policy.scaling is Scaling.SUM else 1 / ranks

    def _bucket(
        self, unit: Unit, layout: BucketLayout, dtypes: Dtypes, requires_grad: bool, is_expert: bool
    ) -> BucketPlan:
        policy = self.precision.policy_at(dtypes.position)
        own = policy.plugins(self.topology, within=not is_expert)
        averages = self.gradient_policy.scaling is Scaling.AVERAGE_IN_COLLECTIVE and not own
        return BucketPlan(
            name=unit.name,
            unit=unit.name,
            layout=layout,
            model_dtype=dtypes.model,
            compute_dtype=dtypes.compute,
            main_dtype=policy.main_dtype(dtypes.model, requires_grad),
            requires_grad=requires_grad,
            grad_dtype=policy.grad_dtype(dtypes.model),
            comm_dtype=policy.comm_dtype(dtypes.model, dtypes.compute),
            plugins=(*own, *self.plugins),
            policy=dtypes.position,
            reduce_op="avg" if averages else "sum",
            scale=self._scale(is_expert, averages),
            decoupled=self.gradient_policy.decoupled,
            inspected=self.gradient_policy.report_nan,
            is_expert=is_expert,
            keeps_memory=self.gradient_policy.keeps_memory,
        )


def _quantized(bucket: BucketPlan) -> BucketPlan:
    """Return a plan with the stages that quantize it, if it is to be."""
    if not bucket.scaling:
        return bucket
    from ..guests.quantized.stages import Quantized

    return replace(bucket, plugins=(Quantized.of(bucket), *bucket.plugins))
