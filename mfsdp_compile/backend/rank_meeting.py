"""How ranks agree on a schedule when a graph is compiled, through the c10d key-value store."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.ranks.agreement import has_others

if TYPE_CHECKING:
    from mfsdp_compile.passes.guests.solver.across_ranks import Settled


class RankMeeting:
    """The :class:`~mfsdp_compile.passes.guests.solver.across_ranks.Meeting` of the ranks of a model.

    Compiled code holds it, so it keeps only a weak reference to the model.

    Args:
        owner: The model whose graph is compiled.
        batch: Description of the batch that it is compiled for.
        options: Description of the backend's options.
    """

    def __init__(self, owner: ShardedModel, batch: str, options: str) -> None:
        self._owner = weakref.ref(owner)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size(owner.members.agreeing)
        self.batch, self.options = batch, options

    @staticmethod
    def of(owner: ShardedModel, batch: str, options: str) -> RankMeeting | None:
        """Create a meeting, or return None if there are no other ranks: a single rank, or simulated ones."""
        return RankMeeting(owner, batch, options) if has_others(owner.members.agreeing) else None

    @property
    def _model(self) -> ShardedModel:
        owner = self._owner()
        assert owner is not None, "a graph is compiled while its model is called"
        return owner

    @property
    def known(self) -> MutableMapping[str, Settled]:
        return self._model.schedules

    def meet(
        self, topic: str, lines: Sequence[str], offer: Any, combine: Callable[[Sequence[Any]], Any], again: bool
    ) -> Any:
        if again:
            return self._model.coordinator.conclude(topic, lines, offer, combine, patience=1.0)
        try:
            return self._model.coordinator.conclude(topic, lines, offer, combine)
        except RuntimeError as error:
            raise RuntimeError(
                f"Ranks could not agree on a schedule, which they do when code is first compiled. {error} All ranks "
                "must compile the same parts of the model, with the same options."
            ) from None

    def warn(self, error: Exception) -> None:
        self._model.coordinator.warn_others(error)

    def all_came(self) -> None:
        self._model.coordinator.withdraw_warning()

    def replaced(self) -> None:
        self._model.schedule_replaced()

    def failed(self, error: Exception) -> None:
        self._model.failed(error)
