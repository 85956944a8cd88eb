"""Which run of a program a model belongs to, and which earlier runs it has taken up: what checkpoints are told apart by."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["Lineage"]


@dataclass
class Lineage:
    """Of one sharded model.

    Args:
        run: of its own, fresh with every model that is sharded. The first rank's goes into checkpoints.
        continues: runs whose checkpoints it has loaded, and those that these had.
    """

    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    continues: tuple[str, ...] = ()

    def take_up(self, runs: Iterable[str]) -> None:
        """After a checkpoint was loaded."""
        self.continues = tuple(dict.fromkeys((*self.continues, *(run for run in runs if run not in ("", self.run)))))

    def has(self, run: str) -> bool:
        return run == self.run or run in self.continues
