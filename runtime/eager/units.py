"""Units as the eager path sees them: their buckets, and what the user has set for them."""

from __future__ import annotations

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
        is_module: Whether it is a part of a larger unit, whose modules are gathered one by one.
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
        forward_prefetch: Units to start gathering when this unit has been gathered in forward, if they are not larger
            than ``prefetch_bytes``.
        backward_prefetch: The same for backward.
        reduced_hook: Called with each reduced gradient of the unit's buckets, ``[shard_numel]`` in the main dtype,
            before it is accumulated. It may change it in place.
    """

    forward_prefetch: tuple[EagerUnit, ...] | None = None
    backward_prefetch: tuple[EagerUnit, ...] | None = None
    reduced_hook: Callable[[Tensor], None] | None = None
