"""Plans with small units joined, and with large units split into several buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mfsdp_compile.passes.guests.solver.costs import Ring, collective_seconds
from mfsdp_compile.passes.guests.solver.hardware import Hardware

from .candidates import Candidate
from .jobs import Job, Planned
from .planner import communication, planned
from .trace_model import Trace


@dataclass(frozen=True)
class Sizes:
    """The plan for given sizes of units and buckets.

    Args:
        unit_bytes, bucket_bytes: As in :class:`Job`.
        planned: The plan.
    """

    unit_bytes: int | None
    bucket_bytes: int | None
    planned: Planned


def sizes(job: Job, traced: Trace | Sequence[Trace], candidate: Candidate) -> list[Sizes]:
    """Plan with small units joined, and with large units split.

    If units are below the knee of the network (:func:`knee_bytes`), two, four and so on are joined, until they are
    above it. Units are split into buckets of a half, a quarter and so on of the largest one, as long as these are above
    the knee.

    Args:
        traced: Traced with ``parts``.

    Returns:
        First the plan without either, then with growing units, then with shrinking buckets.
    """
    job = replace(job, unit_bytes=None, bucket_bytes=None)
    knee = knee_bytes(candidate, job.hardware)
    rows = [Sizes(None, None, planned(job, traced, candidate))]
    runs = [run for stage in ([traced] if isinstance(traced, Trace) else traced) for run in stage.neighbors]
    small = max((size for run in runs for size in run.values() if size < knee), default=0)
    longest = max((sum(run.values()) for run in runs), default=0)
    together = small
    for _ in range(_DOUBLINGS if small else 0):
        if together >= min(knee, longest):
            break
        together *= 2
        least = together - small // 2  # one neighbor fewer does not reach it
        rows.append(Sizes(least, None, planned(replace(job, unit_bytes=least), traced, candidate)))
    most = max(info.gathered_bytes for info in rows[0].planned.context.buckets) // 2
    for _ in range(_HALVINGS):
        if most < knee:
            break
        rows.append(Sizes(None, most, planned(replace(job, bucket_bytes=most), traced, candidate)))
        most //= 2
    return rows


_DOUBLINGS = _HALVINGS = 4


def best_size(rows: Sequence[Sizes]) -> Sizes | None:
    """Return the sizes with the fastest step, of those that fit if any do. Ties go to the least communication, then to
    the least memory."""

    def preference(row: Sizes) -> tuple[bool, float, float, int]:
        timeline = row.planned.timeline
        assert timeline is not None
        shown = float(f"{timeline.seconds:.4g}")
        return row.planned.is_close, shown, communication(row.planned), timeline.peak_bytes

    return min((row for row in rows if row.planned.timeline is not None), key=preference, default=None)


def knee_bytes(candidate: Candidate, hardware: Hardware) -> int:
    """Return the bytes from which on a gather reaches nine tenths of the network's bandwidth.

    Units below this knee are better joined. Far above it, splitting them costs little.
    """
    ring = Ring(candidate.inner)
    fixed = collective_seconds("all_gather", 0, ring, hardware)
    by_byte = (collective_seconds("all_gather", 1 << 30, ring, hardware) - fixed) / (1 << 30)
    return int(9 * fixed / by_byte)
