"""What the ranks along one dimension of data parallelism share, as data: ZeRO's strategies are rows of a table.

                          optimizer state    gradients                         parameters in use
    no_shard              replicated         all-reduced, once per step        always there
    optim                 flat               reduce-scattered, once per step   gathered once per step
    optim_grads           flat               reduce-scattered each time        gathered once per step
    optim_grads_params    flat               reduce-scattered each time        gathered at each use

Everything else derives from these three columns, for inner and outer ranks alike; nothing asks for a strategy's name.
(Megatron-FSDP 2 describes its buffers by ``Placements`` of this kind.)
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple

from ..nearest import did_you_mean


class Placement(Enum):
    """Where the elements of a bucket are, along one dimension of ranks."""

    REPLICATED = "every rank has all of them"
    FLAT = "each rank has one slice of the flat bucket"


class Placements(NamedTuple):
    """What ranks along one dimension hold between microbatches.

    Args:
        optimizer: Main weights and the optimizer's state.
        gradient: Accumulated gradients. Replicated ones are reduced once per step.
        parameter: What is gathered for use. If it is replicated and main weights are not, it stays gathered.
    """

    optimizer: Placement
    gradient: Placement
    parameter: Placement

    @property
    def shards(self) -> bool:
        """Whether ranks hold different main weights."""
        return self.optimizer is Placement.FLAT

    @property
    def gathers_each_use(self) -> bool:
        """Whether parameters are gathered at each use."""
        return self.parameter is Placement.FLAT

    @property
    def gathers_once(self) -> bool:
        """Whether parameters are gathered once after each change of the main weights, and stay."""
        return self.shards and not self.gathers_each_use

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are reduced once per step, however many microbatches it has."""
        return self.gradient is Placement.REPLICATED


class ShardingStrategy(IntEnum):
    """What is sharded over data-parallel ranks, in ZeRO's terms (https://arxiv.org/abs/1910.02054).

    Each strategy shards more than the one before it, and costs more communication.
    """

    NO_SHARD = 0
    OPTIM = 1
    OPTIM_GRADS = 2
    OPTIM_GRADS_PARAMS = 3

    @property
    def placements(self) -> Placements:
        """What the strategy means."""
        return _TABLE[self]

    @staticmethod
    def of(value: object, argument: str) -> ShardingStrategy:
        """Convert a strategy, its number or its name (``"optim_grads_params"``).

        Raises:
            TypeError: ``value`` is a bool or a float. These compare equal to numbers, but are mistakes.
            ValueError: There is no such strategy.
        """
        if isinstance(value, ShardingStrategy):
            return value
        choices = ", ".join(f"{s.value} or {s.name.lower()!r}" for s in ShardingStrategy)
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise TypeError(f"{argument} takes {choices}; got {value!r}, a {type(value).__name__}")
        for strategy in ShardingStrategy:
            if value == strategy.value or value == strategy.name.lower():
                return strategy
        nearest = did_you_mean(value, [strategy.name.lower() for strategy in ShardingStrategy])
        raise ValueError(f"{argument} takes {choices}; got {value!r}.{nearest}")


_ALL, _CUT = Placement.REPLICATED, Placement.FLAT
_TABLE = {
    ShardingStrategy.NO_SHARD: Placements(optimizer=_ALL, gradient=_ALL, parameter=_ALL),
    ShardingStrategy.OPTIM: Placements(optimizer=_CUT, gradient=_ALL, parameter=_ALL),
    ShardingStrategy.OPTIM_GRADS: Placements(optimizer=_CUT, gradient=_CUT, parameter=_ALL),
    ShardingStrategy.OPTIM_GRADS_PARAMS: Placements(optimizer=_CUT, gradient=_CUT, parameter=_CUT),
}
