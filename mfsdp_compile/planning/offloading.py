"""Which units a plan keeps in host memory.

Units are offloaded in the model's order, from the first on. With more of them, a rank's device needs less memory, and
the link and the CPU have more to do:

    0              n              2 n     steps for n units
    |- optimizer --|-- shards too --|

Up to ``n``, gradients and optimizer state of one more unit rest in host memory at each step
(``OptimizerOffloadPolicy``). From there on, the shards of one more unit do too, which are fetched before each gather
(``CPUOffloadPolicy``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mfsdp_compile.passes.context import BucketInfo
from mfsdp_compile.runtime.geometry.topology import Topology
from mfsdp_compile.runtime.guests.offload.stages import HostMemory

EVERY = 1 << 31
"""More units than any model has."""


@dataclass(frozen=True)
class OffloadedUnits:
    """Units in host memory.

    Args:
        whole: Number of units, from the first on, with ``CPUOffloadPolicy``.
        optimizer: Number of the units after them with ``OptimizerOffloadPolicy``.
    """

    whole: int = 0
    optimizer: int = 0

    def of(self, modules: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return those of ``modules`` whose shards are in host memory too, and those of which only the optimizer is."""
        rest = list(modules[self.whole :])
        return list(modules[: self.whole]), rest[: self.optimizer]


NOTHING = OffloadedUnits()


def modules_of(buckets: Sequence[BucketInfo]) -> list[str]:
    """Return the names of the modules that units belong to, in the order of forward. The root's units are one."""
    return list(dict.fromkeys(_module_of(info) for info in buckets))


def _module_of(info: BucketInfo) -> str:
    return info.unit.partition(":")[0]


def steps(buckets: Sequence[BucketInfo], topology: Topology) -> int:
    """Return the number of steps that offload more and more of a model. Shards stay where residents are gathered."""
    units = len(modules_of(buckets))
    return 2 * units if topology.gathers_shards else units


def step_of(number: int, buckets: Sequence[BucketInfo]) -> OffloadedUnits:
    """Return what is offloaded after a number of steps."""
    units = len(modules_of(buckets))
    whole = max(0, number - units)
    return OffloadedUnits(whole, min(number, units) - whole)


def offload(buckets: Sequence[BucketInfo], units: OffloadedUnits) -> list[BucketInfo]:
    """Return the buckets with these units in host memory.

    Where a unit has buckets without gathers, such as experts that no other rank shares, all of its shards stay.
    """
    whole, optimizer = units.of(modules_of(buckets))
    without_gather = {_module_of(info) for info in buckets if not info.exchange.gather_group}
    fetched = {*whole} - without_gather
    offloaded, found = {*whole, *optimizer}, []
    for info in buckets:
        if _module_of(info) in offloaded:
            rest = HostMemory(optimizer_only=_module_of(info) not in fetched)
            lane = rest.around(info.exchange.lane, "cuda")
            info = replace(info, exchange=info.exchange._replace(lane_key=lane.key), has_resident=bool(lane.step))
        found.append(info)
    return found
