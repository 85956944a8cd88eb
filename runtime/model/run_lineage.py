"""The run that a model belongs to, and the earlier runs that it continues.

Checkpoints of different runs are told apart by this.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass
class Lineage:
    """The lineage of one sharded model.

    Args:
        run: Id of this run, new for every model that is sharded. The first rank's id is saved in checkpoints.
        continues: Runs whose checkpoints the model has loaded, and the runs that these continued.
        refused: What was wrong with checkpoints of other runs that could not be loaded, by run.
    """

    run: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    continues: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)

    def take_up(self, runs: Iterable[str], refused: Mapping[str, str]) -> None:
        """Record the runs of a checkpoint that was loaded, and what they had refused."""
        self.refused = {**refused, **self.refused}
        self.continues = tuple(dict.fromkeys((*self.continues, *(run for run in runs if run not in ("", self.run)))))

    def has(self, run: str) -> bool:
        return run == self.run or run in self.continues
