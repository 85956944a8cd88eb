"""Pipeline parallelism: schedules of ``torch.distributed.pipelining`` over sharded, compiled stages.

Each stage is a separate model, sharded over the ranks that hold the same stage::

    mesh = init_device_mesh("cuda", (2, 8), mesh_dim_names=("pp", "dp"))
    layers = build_stage(mesh["pp"].get_local_rank())                       # this rank's stage, an nn.Module
    model = fully_shard_model(layers, mesh["dp"], fsdp_unit_modules=[Block])
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    compiled = torch.compile(model, backend="mfsdp")
    stage = PipelineStage(compiled, mesh["pp"].get_local_rank(), 2, device, group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)

    schedule.step(tokens) if stage.is_first else schedule.step(target=targets, losses=losses)
    clip_grad_norm_([model], 1.0, mesh["pp"].get_group())
    optimizer.step()
    optimizer.zero_grad()

Several stages on one rank (interleaved schedules) are several sharded models, with one optimizer over the parameters of
all.

Cost of a step with m microbatches, per bucket:

                                gathers        reductions       in memory between microbatches
    default                     2 m            1                unsharded gradients, in ``main_grads_dtype``
    keep_gathered=True          1              1                also unsharded parameters, in the compute dtype
    reduce_each=True            2 m            m                nothing: gradients are sharded

:func:`held_memory` returns these bytes before anything runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.tensor import DTensor

from mfsdp_compile.runtime.model import settings
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.program_lines import warn

from ..runtime.geometry.topology import Accumulation, Group
from ..runtime.memory import gradients
from ..runtime.memory.bucket import Bucket
from ..sharded_module import unwrapped

__all__ = ["HeldMemory", "PipelineStage", "clip_grad_norm_", "held_memory", "state_of"]


@dataclass(frozen=True)
class HeldMemory:
    """Bytes that a rank holds for a model during a step, in addition to what it holds between steps.

    Args:
        gathered: Gathered parameters: all of them, or the two largest consecutive units.
        gradients: Sums of gradients over microbatches.
    """

    gathered: int
    gradients: int


def held_memory(model: nn.Module) -> HeldMemory:
    """Return the memory that :class:`PipelineStage` or ``model.set_accumulation`` makes the model hold during a step.

    It does not include activations, nor a unit's gradients before they are added to the sum: at most three times those
    of the largest bucket.
    """
    sharded = unwrapped(model, "held_memory").sharded
    units = [sum(bucket.plan.gathered_bytes for bucket in unit.buckets) for unit in sharded.eager.units]
    stays = [bucket.topology.releases_resident for bucket in sharded.buckets]
    gathers = sharded.topology.gather_group is not None
    in_use = max((a + b for a, b in zip(units, [*units[1:], 0], strict=True)), default=0) if gathers else 0
    return HeldMemory(
        sum(b.plan.gathered_bytes for b, stay in zip(sharded.buckets, stays, strict=True) if stay) + in_use,
        sum(_gradient_bytes(bucket) for bucket in sharded.buckets),
    )


def _gradient_bytes(bucket: Bucket) -> int:
    if not bucket.plan.requires_grad:
        return 0
    layout, waits_whole = bucket.plan.layout, bucket.lane.waits_whole
    return (layout.numel if waits_whole else layout.shard_numel) * bucket.plan.grad_dtype.itemsize


class PipelineStage(pipelining.PipelineStage):
    """``torch.distributed.pipelining.PipelineStage`` for a sharded module. Works with torch's schedules.

    Gradients are reduced in the backward of a step's last microbatch, each bucket as soon as it is complete, and are
    available when ``schedule.step`` returns. Over several steps of the schedule, they accumulate until they are set to
    None. If a schedule splits the backward into two parts (zero-bubble schedules), both run at the position of the
    first. Results are correct, but nothing is left to fill bubbles; a warning says so once.

    Args:
        submodule: The model that ``fully_shard_model`` returned, compiled or not.
        stage_index, num_stages, device: As in torch.
        *args, **kwargs: As in torch: ``input_args``, ``output_args``, ``group`` and so on.
        keep_gathered: Gather parameters once per step, and release them when gradients are reduced, or, without
            gradients, after the last microbatch. See :func:`held_memory` for the memory that this takes.
        reduce_each: Reduce gradients of every microbatch, so that sums are sharded. ``no_shard`` and ``optim`` hold
            unsharded sums anyway.

    Raises:
        TypeError: If the module is not sharded.
        ValueError: If the sharding does not support an argument (``keep_gathered`` with HFSDP), or the model is sharded
            over ranks of the pipeline's own group.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *args: Any,
        keep_gathered: bool = False,
        reduce_each: bool = False,
        **kwargs: Any,
    ) -> None:
        model = unwrapped(submodule, "PipelineStage")
        super().__init__(submodule, stage_index, num_stages, device, *args, **kwargs)
        self._model = model
        _check_ranks(
            dist.get_process_group_ranks(model.sharded.group),
            dist.get_process_group_ranks(self.group or dist.group.WORLD),
        )
        settings.set_accumulation(model.sharded, Accumulation(not reduce_each, keep_gathered, forwards_overlap=True))
        self._takes_turns = self.num_stages > self.group_size
        self._backwards = 0
        self._earlier: list[gradients.Stashed] = []

    def clear_runtime_states(self) -> None:
        """Begin a step of the schedule.

        Gradients of earlier steps are set aside, because the schedule scales the gradients of this step only.
        """
        super().clear_runtime_states()
        self._backwards = 0
        if self.has_backward:
            if self._model.microbatch_count:
                self._model.finish_grad_sync()
            self._earlier = gradients.stash(self._model.sharded.buckets)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self._microbatch(fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward and fwd_chunk_id == len(self.args_recv_info) - 1:  # the last microbatch
            self._model.sharded.let_go()
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        if not full_backward:
            warn(
                "The schedule splits the backward into two, for inputs and for weights. A sharded stage runs both "
                "where the first one stands: numbers are right, but weights are no work for bubbles. Schedule1F1B and "
                "ScheduleInterleaved1F1B do not part it.",
                RuntimeWarning,
            )
        self._backwards += 1
        last = self._backwards == self.chunks  # a split backward is flagged only on its second part
        with self._microbatch(bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=True, last_backward=last)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Do nothing: this part has already run, together with the backward for inputs."""

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        with self._model.sync() if last_backward else self._model.no_sync():
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Finish a step, after all its backwards, or, without gradients, after all its forwards.

        Without gradients, not every version of torch calls this.
        """
        if self.has_backward:
            self._model.finish_grad_sync()
            self.scale_grads(grad_scale_factor)
        else:
            self._model.sharded.let_go()

    def scale_grads(self, grad_scale_factor: int) -> None:
        if grad_scale_factor != 1:
            self._model.scale_gradients(1 / grad_scale_factor)
        earlier, self._earlier = self._earlier, []
        gradients.unstash(earlier)

    def _microbatch(self, number: int) -> contextlib.AbstractContextManager[None]:
        return self._model.sharded.coordinator.microbatch(number) if self._takes_turns else contextlib.nullcontext()


def _check_ranks(model: Sequence[int], pipeline: Sequence[int]) -> None:
    if len(both := set(model) & set(pipeline)) > 1:
        raise ValueError(
            f"A pipeline stage is sharded over ranks {list(model)}, and the pipeline goes through ranks "
            f"{list(pipeline)}: ranks {sorted(both)} cannot hold the same stage and different ones. Pass "
            "fully_shard_model the mesh dimension of ranks that hold the same stage (device_mesh=mesh['dp']), and "
            "PipelineStage the group of the other (group=mesh['pp'].get_group())."
        )


def _sum_in_order(models: Iterable[nn.Module]) -> bool:
    """Whether models sum in the order of ranks. Stages need not be sharded."""
    sharded = (getattr(model, "sharded", None) for model in models)
    return any(isinstance(each, ShardedModel) and each.topology.in_order for each in sharded)


@torch.no_grad()
def clip_grad_norm_(
    models: Iterable[nn.Module], max_norm: float, group: dist.ProcessGroup, norm_type: float = 2.0
) -> Tensor:
    """Clip gradients like ``torch.nn.utils.clip_grad_norm_``, over the parameters of all stages. Collective.

    Args:
        models: The stages of this rank, as ``fully_shard_model`` returned them, compiled or not.
        max_norm: Maximum norm of all gradients together.
        group: Process group of the pipeline.
        norm_type: Order of the norm; may be infinity.

    Returns:
        The norm of all gradients before clipping; 0-d, equal on all ranks.
    """
    models = list(models)
    params = [param for model in models for param in model.parameters()]
    norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None], norm_type)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    stages, in_order = Group.of(group), _sum_in_order(models)
    if norm_type == float("inf"):
        norm = stages.all_reduce(norm, "max", in_order)
    else:
        norm = stages.all_reduce(norm**norm_type, "sum", in_order) ** (1 / norm_type)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm


def state_of(models: Iterable[nn.Module], optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Return the state to pass to ``torch.distributed.checkpoint.save`` to write one checkpoint of a whole pipeline.

    All ranks call both, each for its own stages::

        dcp.save(state_of(models, optimizer), checkpoint_id=path)
        for model in models:        # possibly divided into another number of stages
            mfsdp_compile.checkpoint.load(path, model, optimizer, allow_unexpected="*")

    Parameter names must identify a layer's position in the whole model. Settings of the optimizer's parameter groups
    are left out, because torch would save one rank's settings and load them on all ranks.

    Args:
        models: The stages of this rank, as ``fully_shard_model`` returned them, compiled or not.
        optimizer: The optimizer of their parameters, extended by ``fully_shard_optimizer``.

    Raises:
        ValueError: If two stages of this rank have a parameter of the same name.
    """
    weights: dict[str, Any] = {}
    for model in models:
        for name, value in unwrapped(model, "state_of").state_dict().items():
            if name in weights:
                raise ValueError(
                    f"Two stages of this rank have a {name!r}: one would overwrite the other in the checkpoint. Name "
                    "layers by their number in the whole model, for example in an nn.ModuleDict."
                )
            weights[name] = value
    state: dict[str, Any] = {"model": weights}
    if optimizer is not None:
        state["optimizer"] = {"state": optimizer.state_dict()["state"]}
    return state
