"""The schedule of a model: the policy, and a schedule file if one is followed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .decisions import Decisions
from .policy import SchedulePolicy

if TYPE_CHECKING:
    from .file import ScheduleText


@dataclass(frozen=True)
class Schedule:
    """How early a model's units are gathered, and how late reductions are awaited. The same eagerly and compiled.

    Args:
        policy: The numbers that decide.
        text: Decides what it has lines for; None: the policy decides everything.
    """

    policy: SchedulePolicy = field(default_factory=SchedulePolicy)
    text: ScheduleText | None = None

    def decisions(self, names: Sequence[str], units: Sequence[str]) -> Decisions:
        """Return what the text decides for these buckets of a whole model; see :meth:`.ScheduleText.decisions`."""
        return Decisions() if self.text is None else self.text.decisions(names, units, keepable=True)

    @property
    def label(self) -> str:
        """What compiled code that depends on the schedule is told apart by; empty for the default."""
        return "" if self == Schedule() else hashlib.sha256(str(self).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.policy}" if self.text is None else f"{self.policy}\n{self.text}"
