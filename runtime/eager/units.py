"""Units as the eager path sees them: their buckets, what the user has set for them, and their states."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..memory.bucket import Bucket
from ..owner import ModuleRef


@dataclass(frozen=True, eq=False)
class EagerUnit:
    """A unit's modules and buckets.

    Args:
        name: Name of the unit.
        modules: Modules whose forwards are the unit's windows: one module, several that were joined, or the model for
            parts of the root.
        is_root: Whether the unit is a part of the root.
        buckets: Buckets of the unit.
        is_module: Whether it is one module of a larger unit, whose modules are gathered one by one.
    """

    name: str
    modules: tuple[ModuleRef, ...]
    is_root: bool
    buckets: tuple[Bucket, ...]
    is_module: bool = False

    @functools.cached_property
    def gathered_bytes(self) -> int:
        return sum(bucket.plan.gathered_bytes for bucket in self.buckets)


@dataclass(eq=False)
class UnitControl:
    """What the user has set for a unit. None: as the runtime does by itself.

    Args:
        forward_prefetch: Units to start gathering when this unit has been gathered in forward.
        backward_prefetch: The same for backward.
        reduced_hook: Called with each reduced gradient of the unit's buckets, ``[shard_numel]`` in the main dtype,
            before it is accumulated. It may change it in place.
    """

    forward_prefetch: tuple[EagerUnit, ...] | None = None
    backward_prefetch: tuple[EagerUnit, ...] | None = None
    reduced_hook: Callable[[Tensor], None] | None = None


class UnitState(enum.Enum):
    """What may happen to the gathered parameters of a unit.

    ===========================  =========  =====================================================================
    event                        becomes    exceptions
    ===========================  =========  =====================================================================
    a window of it opens         IN_USE     of the root's units, only when the model's own window opens
    all of its windows closed    IDLE       HELD stays
    some of its windows closed   BEGUN      HELD stays; only for joined units, whose next module may be next
    another unit is gathered     IN_USE     of IDLE units, which are released; BEGUN ones become IDLE first, unless the
                                            other is the root's, whose parameters may be read in between
    unshard()                    HELD       released by nothing but reshard(), or after its next forward
    reshard(), end of a forward  IN_USE     HELD stays at the end of a forward that has not used it
    ===========================  =========  =====================================================================
    """

    IN_USE = "gathered when it is needed, and not to be released"
    BEGUN = "some of its modules have run"
    IDLE = "its forward has run: released as soon as another unit is gathered"
    HELD = "kept gathered by unshard() until its next forward has run"


class UnitStates:
    """The states of a model's units. Those that are not IN_USE are few, and listed."""

    def __init__(self) -> None:
        self._others: dict[EagerUnit, UnitState] = {}

    def __getitem__(self, unit: EagerUnit) -> UnitState:
        return self._others.get(unit, UnitState.IN_USE)

    def use(self, unit: EagerUnit) -> None:
        """Handle a window that opens, or the release of a unit."""
        self._others.pop(unit, None)

    def ran(self, unit: EagerUnit, completely: bool) -> None:
        """Handle a window that has closed."""
        if self._others.get(unit) is not UnitState.HELD:
            self._others.pop(unit, None)  # the last one to close is the last to be released
            self._others[unit] = UnitState.IDLE if completely else UnitState.BEGUN

    def hold(self, unit: EagerUnit) -> None:
        self._others[unit] = UnitState.HELD

    def use_root(self) -> None:
        """Handle the model's own window, which opens: it uses the root's units."""
        for unit in [unit for unit, state in self._others.items() if unit.is_root and state is UnitState.HELD]:
            del self._others[unit]

    def take_idle(self, unit: EagerUnit) -> list[EagerUnit]:
        """Return the units that are to be released because ``unit`` is gathered."""
        if not self._others:
            return []
        ending = (UnitState.IDLE,) if unit.is_root else (UnitState.IDLE, UnitState.BEGUN)
        idle = [other for other, state in self._others.items() if state in ending]
        for other in idle:
            del self._others[other]
        return [other for other in idle if other is not unit]

    def end_forward(self) -> None:
        """Forget what is idle, because a forward has ended and released everything."""
        self._others = {unit: state for unit, state in self._others.items() if state is UnitState.HELD}

    def clear(self) -> None:
        self._others.clear()

    @property
    def holds_any(self) -> bool:
        return UnitState.HELD in self._others.values()
