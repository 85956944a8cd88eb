"""What options ask of guests: features, what decides about the schedule, a forecast. Imported when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mfsdp_compile.passes.context import Feature
from mfsdp_compile.passes.pipeline import Forecast
from mfsdp_compile.passes.producer import FromFile, Producer
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.memory.bucket import Bucket

from .fp8 import fp8_products
from .options import CompileOptions

if TYPE_CHECKING:
    from mfsdp_compile.passes.guests.solver.across_ranks import Meeting
    from mfsdp_compile.passes.guests.solver.forecast import Prediction
    from mfsdp_compile.passes.guests.solver.step_events import StepOutlines


def features(chosen: CompileOptions, buckets: Sequence[Bucket]) -> tuple[Feature, ...]:
    """Return the features that options ask for, in the order in which they run."""
    found: list[Feature] = []
    if chosen.fp8_matmul is not None:
        from mfsdp_compile.passes.guests.fp8_matmul import Fp8Matmul

        candidates = fp8_products(chosen, buckets)
        costs = _prediction(chosen, buckets).costs if chosen.fp8_matmul == "auto" else None
        found.append(Fp8Matmul(chosen.fp8_matmul, chosen.fp8_wgrad, candidates, costs))
    if chosen.loss_chunks is not None:
        from mfsdp_compile.passes.guests.loss_chunks import LossChunks

        found.append(LossChunks(chosen.loss_chunks))
    if chosen.float32_gradients:
        from mfsdp_compile.passes.guests.float32_gradients import Float32Gradients

        found.append(Float32Gradients())
    if chosen.schedule.activation_offload:
        from mfsdp_compile.passes.guests.activations import ActivationOffload

        is_auto = chosen.schedule.activation_offload == "auto"
        found.append(ActivationOffload(_prediction(chosen, buckets).costs if is_auto else None))
    return tuple(found)


def producer(
    chosen: CompileOptions,
    buckets: Sequence[Bucket],
    meeting: Meeting | None,
    explores: bool,
    plan: StepOutlines | None,
) -> Producer:
    """Return what decides about the schedule of a graph.

    Args:
        meeting: Meeting in which ranks agree on decisions; None: there are no other ranks.
        explores: Whether other schedules are looked for.
        plan: Outlines of the training graphs, if they were made with another schedule.
    """
    decides = FromFile(chosen.text) if chosen.text is not None else Producer()
    is_solved = chosen.text is None and chosen.schedule.is_solved
    if not is_solved and not explores:
        return decides
    from mfsdp_compile.passes.guests.solver.producer import Outliner, Solver

    predicted = _prediction(chosen, buckets)
    if is_solved:
        return Solver(predicted, meeting, explores)
    return Outliner(predicted, meeting, decides, plan)


def forecast(chosen: CompileOptions, buckets: Sequence[Bucket]) -> Forecast | None:
    """Return what looks at finished graphs for a report, if options ask for one."""
    if not chosen.report:
        return None
    from mfsdp_compile.passes.guests.solver import forecast

    return forecast.Forecast(_prediction(chosen, buckets))


def _prediction(chosen: CompileOptions, buckets: Sequence[Bucket]) -> Prediction:
    from .predictions import prediction

    is_real = compat.is_real_group(buckets[0].topology.every.name)
    return prediction(chosen.hardware, chosen.optimizer, chosen.fuses, buckets[0].device, is_real)
