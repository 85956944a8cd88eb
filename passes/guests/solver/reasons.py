"""Say why: why a collective is exposed, and why no schedule keeps to a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from mfsdp_compile.runtime.schedule.decisions import Decisions, Limit
from mfsdp_compile.runtime.schedule.phase import Phase

from .flow import Category
from .simulate import Exposure, Stage, Timeline

_CHOSEN = (Limit.POLICY, Limit.SIZE, Limit.IN_FLIGHT, Limit.IN_FLIGHT_SIZE, Limit.FILE)
_HELPS = {
    Category.SAVED: "activation checkpointing, or a smaller batch",
    Category.TEMPORARY: "a smaller batch",
    Category.GATHERED: "smaller units (fsdp_unit_modules)",
    Category.GRADIENTS: "smaller units (fsdp_unit_modules)",
    Category.SHARDS: "more ranks to shard over",
    Category.OPTIMIZER: "more ranks to shard over",
}
"""What helps if memory of a category is short."""


def gib(size: float) -> str:
    """Format bytes as GiB or MiB."""
    return f"{size / (1 << 30):.2f} GiB" if size >= 1 << 28 else f"{size / (1 << 20):.2f} MiB"


def excess(timeline: Timeline, budget: int) -> str:
    """Return a text such as ``"71.20 GiB in memory in the backward of layers.3 (...), 1.20 GiB too much"``."""
    made_of = ", ".join(f"{category.value} {gib(size)}" for size, category in _peak_parts(timeline))
    where = f"in the {timeline.peak_stage.value}" + (f" of {timeline.peak_at}" if timeline.peak_at else "")
    return f"{gib(timeline.peak_bytes)} in memory {where} ({made_of}), {gib(timeline.peak_bytes - budget)} too much"


def _peak_parts(timeline: Timeline) -> list[tuple[int, Category]]:
    """Return the parts of the peak, largest first."""
    return sorted(((size, category) for category, size in timeline.peak_parts.items() if size), reverse=True)


class BudgetError(ValueError):
    """No schedule keeps to the memory budget.

    Args:
        message: Error message.
        needed: Peak bytes of the smallest schedule.
        is_outgrown: Whether ranks have agreed on a schedule before, with which a new batch does not fit.
    """

    def __init__(self, message: str, needed: int, is_outgrown: bool = False) -> None:
        super().__init__(message)
        self.needed, self.is_outgrown = needed, is_outgrown


def refuse_budget(
    smallest: Timeline, budget: int, prefetch: int | None, reshard: bool | int | None, beginning: str = ""
) -> NoReturn:
    """Raise :class:`BudgetError`: no schedule keeps to a budget.

    Args:
        smallest: Timeline of the smallest schedule.
        prefetch, reshard: See :func:`.solve.solve`.
        beginning: Beginning of the message; by default it mentions ``memory_budget``.
    """
    large = [category for size, category in _peak_parts(smallest) if size * 10 > smallest.peak_bytes]
    helps = dict.fromkeys(_HELPS[category] for category in large)
    again = "what backward needs kept" if reshard is False else "every bucket gathered again"
    if not isinstance(reshard, bool) and reshard is not None:
        again = f"one of {reshard} portions of what backward needs kept"
    raise BudgetError(
        f"{beginning or f'memory_budget of {gib(budget)} cannot be kept'}: the smallest schedule, "
        f"{f'with prefetch {prefetch}' if prefetch else 'without prefetch'} and with {again}, has "
        f"{excess(smallest, budget)}. What would help: {'; '.join(helps)}.",
        smallest.peak_bytes,
    )


def explained(timeline: Timeline, decisions: Decisions, phases: Mapping[Stage, Phase]) -> Timeline:
    """Return the timeline with a reason for every exposed collective, as recorded with the decisions.

    Args:
        timeline: Simulated timeline.
        decisions: Decisions that the timeline follows.
        phases: Graphs that ran, by stage.
    """
    return replace(
        timeline,
        exposures=[replace(e, reason=_reason(e, decisions, phases)) if e.exposed else e for e in timeline.exposures],
    )


def _reason(exposure: Exposure, decisions: Decisions, phases: Mapping[Stage, Phase]) -> str:
    if exposure.what == "reduce":
        behind = decisions.reductions.get(exposure.bucket)
        why = behind.why if behind is not None else None
    else:
        aheads = decisions.gathers.get(phases[exposure.stage], {})
        ahead = aheads.get(exposure.bucket)
        why = ahead.why if ahead is not None else None
        not_kept = decisions.why_not_kept.get(exposure.bucket)
        if exposure.stage is Stage.BACKWARD and not_kept is not None and (why is None or why.limit is not Limit.BUDGET):
            why = not_kept
    if why is not None and why.limit is Limit.BUDGET:
        return f"limited by memory budget (needs {gib(why.bytes)})" if why.bytes else "limited by memory budget"
    if why is not None and why.limit is Limit.OVERLAP:
        return why.limit.value
    if exposure.queued > exposure.exposed / 2:
        return f"the network is busy: it waited {_ms(exposure.queued)} for others"
    what = "before" if exposure.what == "gather" else "after"
    if exposure.ahead < exposure.seconds / 20:
        return f"nothing is computed {what} it"
    if why is not None and why.limit in _CHOSEN:
        return f"limited by {why.limit.value}: {_ms(exposure.ahead)} of computation for {_ms(exposure.seconds)}"
    return f"bandwidth: {_ms(exposure.ahead)} of computation {what} it for {_ms(exposure.seconds)} of communication"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
