"""What the backend refuses, or warns of, before it compiles a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from mfsdp_compile.passes.unshard import MARKERS
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.eager.gathered_parameter import refuse_write
from mfsdp_compile.runtime.memory.bucket import Bucket, ParamHandle
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.program_lines import warn
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy

from .options import CompileOptions

_SHOWN = 4
"""Maximum number of tensors that a message names."""


def check(chosen: CompileOptions, owners: Sequence[ShardedModel], buckets: Sequence[Bucket], served: bool) -> None:
    """Raise an error if the options are not supported for these models.

    Args:
        served: Whether the eager path gathers and reduces.
    """
    if chosen.float32_gradients:
        check_float32_gradients(buckets)
    if chosen.schedule.activation_offload and any(owner.keeps_gradients for owner in owners):
        raise ValueError(
            "options['activation_offload'] copies saved values to host memory that each step allocates, which a CUDA "
            "graph cannot do (cuda_graph_mode). Use only one of them."
        )
    opaque = next((bucket for bucket in buckets if bucket.lane.is_opaque), None)
    if chosen.inner == "inductor_whole" and opaque is not None and not served:
        raise NotImplementedError(
            f"Bucket {opaque.plan.name!r} travels through stages of plug-ins ({opaque.lane.text}), which run between "
            "the pieces that options={'inner': 'inductor'} compiles. In a whole graph, Inductor would use memory again "
            "that a stage keeps."
        )
    if not served:
        _refuse_hooks(owners, buckets)
    if chosen.fuses and any(owner.is_miscompiled() for owner in owners):
        warn(
            f"The Inductor of torch {torch.__version__} computes wrong gradients for the routers of GPT-OSS on the "
            "CPU when the auxiliary loss is part of the outputs, with or without this package. Use torch 2.15, "
            "options={'inner': 'aot_eager'}, or output_router_logits=False, and compare gradients with eager ones.",
        )


def refuse_writes(gm: fx.GraphModule, shells: Mapping[int, ParamHandle]) -> None:
    """Raise RuntimeError if forward writes to a parameter."""
    if not (written := compat.written(gm, lambda node: node.target in MARKERS)):
        return
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    sources = [placeholders.index(node.args[0]) for node in written if node.args[0] in placeholders]
    handles = [shells[position] for position in sources or shells]  # in a region, the written parameter is unknown
    refuse_write(handles[0].bucket.plan.unit, [handle.bucket.splits[handle.index].name for handle in handles])


def _refuse_hooks(owners: Sequence[ShardedModel], buckets: Sequence[Bucket]) -> None:
    """Raise NotImplementedError if reduced gradients are to be shown to a hook: graphs do not call it."""
    hooked = [
        unit for owner in owners for unit in owner.eager.units if owner.eager.control(unit).reduced_hook is not None
    ]
    for unit in hooked:
        if not set(buckets).isdisjoint(unit.buckets):
            raise NotImplementedError(
                f"set_all_reduce_hook was called for {unit.name!r}, whose gradients a graph of the whole model would "
                "reduce without calling the hook. Compile layer by layer (layer.compile(backend='mfsdp')), where the "
                "hook is called, or change gradients after backward."
            )


def policy_for(given: SchedulePolicy, buckets: Sequence[Bucket]) -> SchedulePolicy:
    """Return the schedule policy for a graph.

    If several forwards run before the first backward, no forward keeps gathered parameters.

    Raises:
        ValueError: If the options ask it to keep them.
    """
    topologies = [bucket.topology for bucket in buckets]
    if not any(of.accumulation.forwards_overlap and of.gather_group is not None for of in topologies):
        return given
    if given.reshard_after_forward is False:
        raise ValueError(
            "options['reshard_after_forward'] is False, but the model is a stage of a pipeline: each forward in "
            "flight would keep its own gathered parameters. Take it out, and give PipelineStage keep_gathered=True, "
            "which keeps them once."
        )
    keeps = True if given.reshard_after_forward == "auto" else given.reshard_after_forward
    return replace(given, keep_last=False, reshard_after_forward=keeps)


def check_float32_gradients(buckets: Sequence[Bucket]) -> None:
    """Raise ValueError if ``options={"float32_gradients": True}`` is not supported."""
    for bucket in buckets:
        plan, device = bucket.plan, bucket.device.type
        if not plan.requires_grad:
            continue
        where = f"options['float32_gradients'] is given, but bucket {plan.name!r} of unit {plan.unit!r}"
        if device != "cuda" or torch.version.hip is not None:
            on = "a ROCm device" if device == "cuda" else f"device {device!r}"
            raise ValueError(
                f"{where} is on {on}: matrix products in bfloat16 or float16 that give float32 need CUDA. Take the "
                "option out."
            )
        if plan.comm_dtype != torch.float32:
            raise ValueError(
                f"{where} reduces gradients in {plan.comm_dtype}: a float32 gradient would be rounded when it is "
                "packed. Give MixedPrecisionPolicy(grad_comm_dtype=torch.float32), or take the option out."
            )
        if plan.compute_dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation:
            raise ValueError(
                f"{where} computes in float16 with torch.backends.cuda.matmul.allow_fp16_accumulation, for which torch "
                "has no float32 output. Set that to False, or take the option out."
            )


def warn_of_limit(reached: compat.LimitReached) -> None:
    """Warn of code that was compiled as often as a setting allows.

    A rank that ran it eagerly would start other collectives than ranks that run its graphs. Ranks reach the limit at
    different times, and find graphs for different inputs afterwards.
    """
    shapes = ", ".join(str(list(shape)) for shape in reached.shapes[:_SHOWN])
    called = f"it is called with now, tensors of {shapes or 'no shape'}"
    why = f"{reached.limit} graphs of {reached.code} are not for what {called}"
    if reached.setting == "recompile_limit":
        warn(
            f"{why}, and torch._dynamo.config.recompile_limit is {reached.limit}. It is compiled again, for sizes and "
            "numbers that vary: if this rank ran it eagerly, it would start other collectives than ranks that run its "
            f"graphs. Pass torch.compile(dynamic=True), or raise the limit. Last guard that failed: {reached.reason}",
            by=None,
        )
    else:
        warn(
            f"{why}, and torch._dynamo.config.{reached.setting} is {reached.limit}. It runs eagerly from now on, which "
            "is an error on all ranks if others run its graphs. Keep what varies constant or the same on all ranks, or "
            f"raise the limit. Last guard that failed: {reached.reason}",
            by=None,
        )
