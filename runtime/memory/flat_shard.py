"""The shard of a bucket: one flat tensor on each rank, and what is gathered from it or sent.

flat          this rank's slice, an autograd leaf, in the main dtype
resident      what the part ``step`` of its lane makes of it, which stays between uses. It is gathered, for strategies
              that keep parameters whole, or for HFSDP, which keeps them whole over outer ranks; or it is a copy on the
              device of a shard that rests elsewhere. ``flat`` is a slice of it if it is gathered in the same dtype
made          what a guest makes of it for all buckets together, such as the shard in float8; ``step`` begins with it
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import compat
from ..digests import value_digest
from ..formats import quantize
from ..geometry.bucket_plan import BucketPlan
from ..geometry.exchange import Exchange
from ..geometry.partition import Partition
from ..geometry.rows import RowSplit, contiguous_strides
from ..geometry.topology import Topology
from ..lanes.lane import Lane
from ..lanes.plain import AllGather, Operands
from .deferred_gradients import DeferredGradient


class FlatRange(NamedTuple):
    """The part ``[start, stop)`` of a flat tensor that holds a parameter, or rows of it, of this shape."""

    start: int
    stop: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def at(cls, start: int, numel: int, shape: tuple[int, ...]) -> FlatRange:
        return cls(start, start + numel, shape, contiguous_strides(shape))


# [Note: Version counters]
#
# flat._version stands for the values of a shard. Whatever is made of them notes it, and is stale when it differs: the
# resident, what a guest has made of it, gathered buckets, portions, and tensors that autograd saved.
#
# - Operators on parameters run below autograd, where no version is incremented: tensor.before_write does that, for each
#   tensor in the Backing.
# - A flat shard that is a slice of its resident has a version counter of its own (.data), because gathers write to the
#   resident at any time.
# - nn.Parameter(view) detaches the view from the counter, so Bucket._make puts the view back.
# - What is derived from to_local() may have a counter of its own, or none (.data, NumPy). As long as it lives, values
#   are compared before each forward: FlatShard.notice_writes.
# - Of a gathered bucket, the version right after the gather (Gathered.content) tells writes. NumPy and .data of a view
#   write without a trace: Gathering._check_content compares values.


class Maker(Protocol):
    """A guest that runs a joint stage."""

    def own_part(self, bucket: Any, columns: bool) -> Tensor:
        """See :meth:`FlatShard.own_part`."""

    def plane(self, bucket: Any, full: Tensor, columns: bool) -> Tensor:
        """Return one of two planes of a gathered bucket."""

    def view(self, bucket: Any, full: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Return data and scales of a parameter in a gathered bucket, or in a plane of it."""


class FlatShard:
    """The memory of a bucket's shard on this rank.

    Args:
        plan: Layout and dtypes.
        topology: Ranks and what each of them holds.
        device: Device that the bucket is used on. The shard is on the host if the plan says so.
        partitions: For each parameter, how it is divided over ranks other than those of the topology.

    Attributes:
        flat: The shard, ``[shard_numel]`` in the main dtype.
        lane: How the bucket travels.
        exchange: The same, for graphs.
        splits: Which rows of each parameter each rank holds.
        places: Where the rows of each parameter are in ``flat``.
    """

    flat: Tensor
    lane: Lane
    exchange: Exchange

    def __init__(
        self, plan: BucketPlan, topology: Topology, device: torch.device, partitions: Sequence[Partition | None]
    ) -> None:
        self.plan = plan
        self.topology = topology
        self.device = device
        self.lane = plan.lane(topology)
        layout = plan.layout
        self.splits = tuple(RowSplit(layout, index, partition) for index, partition in enumerate(partitions))
        self.places = tuple(self._place(index) for index in range(len(layout.slots)))
        self._whole_places = tuple(
            FlatRange.at(slot.offset // self._width, math.prod(slot.param_shape), slot.param_shape)
            for slot in layout.slots
        )

    def _at_rest(self, numel: int) -> Tensor:
        """Return uninitialized memory where the shard rests, ``[numel]`` in the main dtype."""
        return self.plan.rest.empty(numel, self.plan.main_dtype, self.device)

    def _allocate(self, flat: Tensor) -> None:
        """Adopt the shard, and allocate what stays gathered between uses; see :attr:`flat`."""
        plan = self.plan
        self.pending: DeferredGradient | None = None
        self.resident: Tensor | None = None
        self._unused_gather: weakref.finalize | None = None
        self._resident_of = -1  # version of the shard from which the resident was gathered
        self._resident_awaited = True
        self.maker: Maker | None = None
        """A guest that makes what ``step`` begins with, for all buckets of a model together."""
        self.made: Tensor | None = None
        """What it has made of the shard."""
        self.made_columns: Tensor | None = None
        """The same of a second plane, which backward gathers; see :mod:`..guests.quantized.planes`."""
        self._made_of = -1  # version of the shard that it was made of
        self.operands = Operands()
        """What the bucket has for its stages besides what travels."""
        self._watched = -1, ""  # version of the shard, and a digest of the values
        lane, stays = self.lane, not self.topology.releases_resident
        if self.has_resident and stays and not (lane.is_joint or lane.has_local_copy):  # which refer to other memory
            resident = self._new_resident()
            # Local stages make something else of the shard.
            if plan.main_dtype == plan.held_dtype and all(isinstance(stage, AllGather) for stage in lane.step):
                mine = self._parts_of(resident)[0]
                # Same memory, but a separate version counter: gathers may write to the resident at any time.
                flat = mine.copy_(flat).data
            self._hold(resident)
        self.flat = flat

    @property
    def _width(self) -> int:
        """Elements of the bucket in one element of its parameters."""
        return 1 + self.plan.is_complex

    def _place(self, index: int) -> FlatRange:
        layout = self.plan.layout
        start = layout.shard_offset(index, self.topology.shard) // self._width
        numel = len(self.splits[index].elements(self.topology.shard))
        return FlatRange.at(start, numel, self.splits[index].local_shape(self.topology.shard))

    def elements(self, flat: Tensor) -> Tensor:
        """View memory of the bucket, or of its shard, as elements of its parameters: complex numbers if they are
        complex."""
        if not self.plan.is_complex or flat.is_complex():
            return flat
        return torch.view_as_complex(flat.view(-1, 2))

    def views(self, flat: Tensor) -> list[Tensor]:
        """Views of each parameter's rows in a flat shard (or in its gradient), ``[shard_numel]``."""
        flat = self.elements(flat)
        first = flat.storage_offset()
        # One operator per view; a slice with a view of it would be two, at every step.
        return [flat.as_strided(shape, strides, first + start) for start, _, shape, strides in self.places]

    def whole_view(self, full: Tensor, index: int) -> Tensor:
        """View of a parameter in the gathered bucket, ``[numel]``."""
        start, _, shape, strides = self._whole_places[index]
        full = self.elements(full)
        return full.as_strided(shape, strides, full.storage_offset() + start)

    # -- residents ----------------------------------------------------------------------------------------------------

    @property
    def has_resident(self) -> bool:
        """Whether what ``step`` makes stays between uses, even if only within a step."""
        return bool(self.lane.step)

    def _new_resident(self) -> Tensor:
        """Return memory for what ``step`` makes, or for both of two planes."""
        numel, dtype, _ = self.lane.spec("use")
        if self.plan.has_planes:
            numel = 2 * self.plan.held_numel
        with torch.inference_mode(False):  # a tensor of inference mode could not be written to later
            return torch.empty(numel, dtype=dtype, device=self.device)

    @property
    def is_used_at_rest(self) -> bool:
        """Whether modules get views of the shard's own memory, so that a step changes what they got."""
        if self.exchange.gather_group:
            return False
        if not self.has_resident:
            return self.plan.compute_dtype == self.plan.main_dtype
        held = self.resident
        return held is not None and held.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr()

    def _parts_of(self, resident: Tensor) -> list[Tensor]:
        """Return this rank's shard in a resident, and what it holds after the gather over each group."""
        parts = [resident]
        for group in reversed(self.topology.resident_groups):
            parts.insert(0, parts[0].chunk(group.size)[group.rank])
        return parts

    @property
    def is_stale(self) -> bool:
        """Whether the resident was released, or gathered before the shard last changed."""
        return self.has_resident and self._resident_of != self.flat._version

    @property
    def is_overwritten_by_gathers(self) -> bool:
        """Whether a gather of the resident writes this rank's shard, too: Gloo copies all that it has received.

        Between steps it must not run: what a program writes to its rows meanwhile would be lost.
        """
        return self.device.type == "cpu" and self.plan.main_dtype == self.plan.held_dtype

    def hold_resident(self) -> Tensor:
        """Return the resident; allocate it if it was released."""
        if self.resident is None:
            own = self.made if len(self.lane.step) == 1 else None
            self._hold(own if own is not None else self._new_resident())
        assert self.resident is not None
        return self.resident

    def _hold(self, resident: Tensor) -> None:
        self.resident = resident
        self._unused_gather = weakref.finalize(self, compat.wait_tensor_when_dropped, resident)

    def let_go(self) -> None:
        """Release a resident that stays only within a step. Its memory is freed when no other reference remains."""
        if self.topology.releases_resident and self.resident is not None:
            self.await_resident()
            if self.plan.keeps_memory:
                self.mark_resident(stale=True)
            else:
                self._drop_resident()

    def mark_resident(self, stale: bool) -> None:
        """Set whether the resident must be gathered before it is used."""
        self._resident_of = -1 if stale else self.flat._version

    def _drop_resident(self) -> None:
        assert self._unused_gather is not None
        self._unused_gather.detach()  # it references the memory
        self.resident, self._resident_of = None, -1

    @torch.no_grad()
    def start_refresh(self) -> None:
        """Start gathering the resident again. A collective: every rank must call it.

        With several groups, the gather over the last one runs when this returns.
        """
        resident = self.hold_resident()
        self.await_resident()
        begun, step, groups = int(self.made is not None), self.lane.step, self.topology.resident_groups
        shard = self.flat.detach() if self.made is None else self.made
        first = next((index for index, stage in enumerate(step) if stage.flies), len(step))
        if self.made_columns is not None and groups:
            for made, plane in zip((self.made, self.made_columns), resident.chunk(2), strict=True):
                plane.copy_(quantize.from_records(self.lane.travel("step", made, self.operands, slice(1, None))))
        elif not all(type(stage) is AllGather for stage in step[first:]):
            resident.copy_(self.lane.travel("step", shard, self.operands, slice(begun, None)))
        elif shard is not resident:  # gathered in the resident's own memory
            shard = self.lane.travel("step", shard, self.operands, slice(begun, first))
            if not groups:
                resident.copy_(shard)
            _, *parts = self._parts_of(resident)
            for group, part in zip(groups, parts, strict=True):
                self.await_resident()
                if group.size == 1:
                    part.copy_(shard)
                else:
                    compat.all_gather_out(shard, group.size, group.name, out=part)
                self._resident_awaited = group.size == 1
                shard = part
        self._resident_of = self.flat._version

    def await_gather(self) -> None:
        """Wait for a running gather before the shard is written to: the shard may be a slice of the resident."""
        if self.resident is not None:
            self.await_resident()
        self.plan.rest.settle(self.device)

    def await_resident(self) -> Tensor:
        assert self.resident is not None
        if not self._resident_awaited:
            compat.wait_tensor(self.resident)
            self._resident_awaited = True
        return self.resident

    def forget_resident(self) -> None:
        """Mark the resident as stale after a failure: its gather may have failed."""
        if self.resident is not None:
            with contextlib.suppress(RuntimeError):
                self.await_resident()
            self._resident_of, self._resident_awaited = -1, True
            if self.topology.releases_resident:
                self._drop_resident()

    # -- writes that leave no trace -----------------------------------------------------------------------------------

    def watch(self) -> None:
        """Note the values, of which there are copies, before an ordinary tensor refers to the shard."""
        of_copies = self._resident_of, self._made_of
        if (version := self.flat._version) in of_copies and self._watched[0] != version:
            self._watched = version, value_digest(self.flat)

    def notice_writes(self, are_referred_to: bool) -> None:
        """Increment the version if the values have changed without.

        Args:
            are_referred_to: Whether ordinary tensors still refer to the shard.
        """
        (version, before), now = self._watched, None
        if version == self.flat._version and (now := value_digest(self.flat)) != before:
            torch.autograd.graph.increment_version(self.flat)
        if are_referred_to and self.has_resident:
            self._watched = self.flat._version, now or value_digest(self.flat)
        else:
            self._watched = -1, ""

    # -- what is sent -------------------------------------------------------------------------------------------------

    def fetched(self) -> Tensor:
        """Return the shard on the device that uses it, without autograd: a copy if it rests elsewhere."""
        return self.plan.rest.fetch(self.flat.detach(), self.device)

    def source(self) -> Tensor:
        """The tensor that a use begins with on this rank, without autograd: the resident, or the shard."""
        return self.await_resident() if self.has_resident else self.flat.detach()

    def sent(self) -> Tensor:
        """The tensor that this rank sends, without autograd: :meth:`source`, on the device."""
        return self.fetched() if self.lane.shard.in_host_memory and not self.has_resident else self.source()

    def own_part(self, columns: bool = False) -> Tensor:
        """Return what a gather delivers of this rank's source, in the dtype of the gathered bucket.

        Args:
            columns: Whether to return the plane of columns. Of planes, the data are returned, without scales.
        """
        if self.maker is not None:
            return self.maker.own_part(self, columns)
        return self.source().to(self.device, self.plan.held_dtype)

    # -- what a guest makes -------------------------------------------------------------------------------------------

    @property
    def scales(self) -> Tensor | None:
        """Scales of the whole bucket, in the order of its parameters."""
        return self.operands.scales

    @property
    def is_made_stale(self) -> bool:
        """Whether the shard has changed since the guest has made something of it."""
        return self.made is not None and self._made_of != self.flat._version

    def mark_made(self, stale: bool) -> None:
        """Set whether the guest must make it again before the bucket is used."""
        self._made_of = -1 if stale else self.flat._version

    def of_maker(self) -> list[Tensor]:
        """Return all that the guest has made of the bucket."""
        return [each for each in (self.made, self.made_columns, self.scales) if each is not None]

    @property
    def sends_planes(self) -> bool:
        """Whether a gather brings one of two planes. Otherwise there is one, or both stay gathered."""
        return self.made_columns is not None and self.topology.gather_group is not None
