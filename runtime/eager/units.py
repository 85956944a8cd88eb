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
