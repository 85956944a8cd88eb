"""Schedule files: the starts and waits of collectives in order, one per line, in the format of all reports ::

    # mfsdp schedule
    [forward]
    gather  layers.0
    gather  layers.1
    wait    layers.0
    gather  layers.2
    wait    layers.1
    wait    layers.2
    [backward]
    gather  layers.1
    wait    layers.1
    reduce  layers.2
    await   layers.2
    reduce  layers.1
    await   layers.1

A bucket that the backward does not gather stays gathered from the forward (here ``layers.2``). Lines can be moved. A
gather moved before the wait of an earlier unit starts sooner. A reduction may be awaited after later reductions have
started. ``gather  layers.1, portions of 8`` in the backward gathers, over eight ranks, the portions that their forwards
have kept.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..untrusted_files import FileRefused, read_text, write_text
from .decisions import Ahead, Behind, Decisions, Limit, Why
from .phase import Phase
from .text import ScheduleLine

MOST_BYTES = 16 << 20
"""Maximum size of a schedule file. A model of 10,000 buckets has less than 2 MiB."""

_HEAD = "# mfsdp schedule"
_COMMENT = re.compile(r"(^|\s)#.*")  # not "layers.0#1", the second bucket of a unit
_NO_DECISION = re.compile(r"\d+ operators|\w+\s+of the model itself|run\s+\S+\s+\w+, \d+ operators")


@dataclass(frozen=True)
class ScheduleText:
    """A schedule as text.

    Args:
        lines: Starts and ends of collectives in order, by phase, without details.
        where: Source of the text, for error messages.
    """

    lines: Mapping[Phase, Sequence[ScheduleLine]] = field(hash=False)
    where: str = field(default="schedule", compare=False)

    @staticmethod
    def load(path: str | Path) -> ScheduleText:
        """Read a schedule file.

        Raises:
            ValueError: The file cannot be read, is no regular file, or has more than :data:`MOST_BYTES`; or a line is
                not understood. The message names file and line.
        """
        try:
            text = read_text(Path(path), MOST_BYTES)
        except (OSError, FileRefused) as error:
            raise ValueError(f"The schedule {path} cannot be read: {error}") from error
        return ScheduleText.parse(text, str(path))

    @staticmethod
    def parse(text: str, where: str) -> ScheduleText:
        found: dict[Phase, list[ScheduleLine]] = {}
        current: list[ScheduleLine] | None = None
        for number, raw in enumerate(text.split("\n"), 1):
            line = _COMMENT.sub("", raw).strip()
            if not line or _NO_DECISION.fullmatch(line):
                continue
            if section := re.fullmatch(r"\[(\w+)\]", line):
                names = {phase.value: phase for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.INFERENCE)}
                if section[1] not in names:
                    raise ValueError(
                        f"{where}:{number}: there is no graph {section[1]!r:.200}; there are {', '.join(names)}"
                    )
                current = found.setdefault(names[section[1]], [])
                continue
            read = ScheduleLine.parse(line)
            if read is None or current is None:
                what = "comes before the first section, such as [forward]" if read else "is no start or wait"
                raise ValueError(
                    f"{where}:{number}: {line!r:.200} {what}. A line is gather, wait, cast, reduce or await and the "
                    "name of a bucket."
                )
            current.append(read.decision)
        return ScheduleText(found, where)

    @property
    def portions(self) -> int:
        """Number of ranks that the backward gathers portions over; 0: it gathers no portions.

        Raises:
            ValueError: The numbers differ, or another graph gathers portions.
        """
        found = {
            phase: {line.number for line in lines if line.is_gather_of_portions} for phase, lines in self.lines.items()
        }
        wrong = [phase.value for phase, numbers in found.items() if numbers and phase is not Phase.BACKWARD]
        if wrong:
            raise ValueError(
                f"{self.where}: [{wrong[0]}] gathers portions, but only [backward] can: the forward keeps them for it"
            )
        numbers = found.get(Phase.BACKWARD, set())
        if len(numbers) > 1:
            raise ValueError(
                f"{self.where}: [backward] gathers portions of {sorted(numbers)} ranks, but all portions must be of "
                "the same number of ranks"
            )
        return next(iter(numbers), 0)

    @staticmethod
    def of(schedules: Mapping[Phase, Sequence[str]]) -> ScheduleText:
        """Make a text from the lines of schedules, as :func:`~mfsdp_compile.passes.listing.describe` returns them."""
        text = "\n".join(f"[{phase.value}]\n" + "\n".join(lines) for phase, lines in schedules.items())
        return ScheduleText.parse(text, "schedule")

    def __str__(self) -> str:
        parts = [_HEAD]
        for phase, lines in self.lines.items():
            parts += ["", f"[{phase.value}]"]
            parts += map(str, lines)
        return "\n".join(parts) + "\n"

    def save(self, path: str | Path) -> None:
        """Write the schedule to a file, which can be edited and passed as ``options={"schedule": path}``, or to
        ``model.set_schedule(schedule=path)``."""
        write_text(Path(path), str(self))

    def decisions(self, names: Sequence[str], units: Sequence[str], keepable: bool) -> Decisions:
        """Return the decisions that the text expresses.

        Args:
            names, units: Names and units of the buckets, in the context's order.
            keepable: Whether the graphs hold the whole model, so that the backward directly follows its forward.

        Raises:
            ValueError: The text names unknown buckets, or its order is impossible.
        """
        index = {name: number for number, name in enumerate(names)}
        unit_of = dict(zip(names, units, strict=True))
        gathers: dict[Phase, dict[int, Ahead]] = {}
        reductions: dict[int, Behind] = {}
        for phase, lines in self.lines.items():
            if unknown := next((line.bucket for line in lines if line.bucket not in index), None):
                raise ValueError(
                    f"{self.where}: [{phase.value}] names the bucket {unknown!r:.200}, but the graph has "
                    f"{', '.join(names)}"
                )
            gathers[phase] = {
                index[name]: Ahead(count, Why(Limit.FILE), index[before] if before is not None else None)
                for name, (count, before) in self._ahead(phase, unit_of).items()
            }
            reductions |= {index[name]: behind for name, behind in self._behind(phase).items()}
        kept: frozenset[int] = frozenset()
        if keepable and Phase.FORWARD in gathers and Phase.BACKWARD in gathers:
            # This includes buckets that the backward does not need; nothing is saved for those.
            kept = frozenset(gathers[Phase.FORWARD]) - frozenset(gathers[Phase.BACKWARD])
        backward = self.lines.get(Phase.BACKWARD, ())
        portions = frozenset(index[line.bucket] for line in backward if line.is_gather_of_portions)
        return Decisions(kept, gathers, reductions, portions=portions)

    def _ahead(self, phase: Phase, unit_of: Mapping[str, str]) -> dict[str, tuple[int, str | None]]:
        """Return how early each gather starts, by bucket.

        Returns:
            The number of other units awaited between the start of the gather and its wait; and the bucket whose
            reduction starts next, if it starts before any wait, else None.
        """
        lines = self.lines[phase]
        waited = [unit_of[line.bucket] for line in lines if line.what == "wait"]
        found: dict[str, tuple[int, str | None]] = {}
        started: dict[str, tuple[int, bool]] = {}
        turns: Counter[str] = Counter()  # by unit: how often the waits so far have turned to it
        turned, passed, is_beginning = 0, 0, True
        for line, following in zip(lines, _following(lines), strict=True):
            name, unit = line.bucket, unit_of[line.bucket]
            others = turned - turns[unit]
            last = waited[passed - 1] if passed else None
            if line.what == "gather":
                if name in found:
                    raise ValueError(f"{self.where}: [{phase.value}] gathers {name!r} twice")
                found[name] = 0, following.bucket if following is not None and following.what == "reduce" else None
                # The waits after this gather may go on with the unit of the last one before it, which then counts.
                goes_on = last is not None and last != unit and waited[passed : passed + 1] == [last]
                started[name] = others - goes_on, is_beginning
            elif line.what == "wait":
                if name in started:
                    before, begins = started.pop(name)
                    units = others - before
                    if begins and not units:  # starts with the graph, not at its use
                        found[name] = 1, None
                    else:
                        found[name] = units, found[name][1]
                turns[unit] += unit != last
                turned += unit != last
                passed += 1
            is_beginning = is_beginning and line.what == "gather"
        for name in started:
            raise ValueError(
                f"{self.where}: [{phase.value}] has no 'wait {name}' after 'gather {name}': every gather must be "
                "awaited"
            )
        return found

    def _behind(self, phase: Phase) -> dict[str, Behind]:
        """Return how late each reduction is awaited, by bucket, from the reductions that start before its wait."""
        found: dict[str, Behind] = {}
        started: dict[str, int] = {}
        lines = [line for line in self.lines[phase] if line.number == 1]
        total = sum(line.what == "reduce" for line in lines)
        end = max((position for position, line in enumerate(lines, 1) if line.what != "await"), default=0)
        for position, line in enumerate(lines):
            name = line.bucket
            if line.what == "reduce":
                if name in started:
                    raise ValueError(f"{self.where}: [{phase.value}] reduces {name!r} twice")
                started[name] = len(started)
            elif line.what == "await":
                if name not in started:
                    raise ValueError(f"{self.where}: [{phase.value}] awaits the reduction of {name!r} before it starts")
                later = len(started) - started[name] - 1
                at_end = position >= end
                # A wait between two starts goes to the latest place that has these lines: right before the second
                # start, or, if a gather or its wait would then come first, at once.
                at_once = lines[position - 1] == replace(line, what="reduce") and not at_end
                at_once = at_once and lines[position + 1].what in ("gather", "wait")
                count = 0 if at_once else total if at_end else later or 1
                found[name] = Behind(count, Why(Limit.FILE), packed=not (at_end or later or at_once))
        for name in started.keys() - found.keys():
            raise ValueError(f"{self.where}: [{phase.value}] never awaits the reduction of {name!r}")
        return found


def _following(lines: Sequence[ScheduleLine]) -> list[ScheduleLine | None]:
    """Return the next wait or start of a reduction from each line on, itself included."""
    found: list[ScheduleLine | None] = []
    following = None
    for line in reversed(lines):
        following = line if line.what in ("wait", "reduce") else following
        found.append(following)
    return found[::-1]
