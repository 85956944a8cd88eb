"""Simulate a training step: when everything runs, how much memory is in use, and what computation waits for.

Computation runs in the order of the graphs. A collective begins when computation reaches its start and the earlier
collectives of its group have finished, as on NCCL's streams and gloo's threads. A wait blocks computation until the
collective has finished. Memory depends only on the order of the graphs, because that is how torch's allocators see it.
One step is a forward, a backward and the optimizer's step. Parameters that stay gathered between uses are gathered
again when the step begins.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from mfsdp_compile.runtime.lanes.plain import AllGather

from ...context import BucketInfo, Context
from .costs import CostModel, Ring, collective_seconds
from .flow import Category, Collective, Flow, SavedCopy
from .outline import Copies


class Stage(str, Enum):
    """A part of a training step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class OptimizerCost:
    """Cost of an optimizer, per element of this rank's trainable shards.

    Args:
        name: Name of the optimizer.
        state_bytes: Bytes of its state. AdamW: two moments in float32.
        moved_bytes: Bytes that its step reads and writes.
        extra_bytes: Bytes that its step allocates temporarily. Torch's ``foreach`` implementations take one copy of the
            parameters, fused ones nothing.
    """

    name: str = "adamw"
    state_bytes: int = 8
    moved_bytes: int = 28
    extra_bytes: int = 0


@dataclass(frozen=True)
class Span:
    """An interval of activity on a stream.

    Args:
        stream: ``"compute"``, ``"gather"`` or ``"reduce"``.
        kind: ``"compute"``, ``"gather"``, ``"reduce"``, ``"wait"`` (computation is blocked) or ``"optimizer"``.
        name: Name of the unit or bucket.
        stage: Stage of the step.
        begin, end: Seconds from the beginning of the step.
    """

    stream: str
    kind: str
    name: str
    stage: Stage
    begin: float
    end: float


@dataclass(slots=True)
class Exposure:
    """A collective, and how long computation waits for it.

    Args:
        what: ``"gather"`` or ``"reduce"``.
        bucket, name: Index of the bucket in the context, and its name.
        unit: Unit of the bucket.
        stage: Stage of the step.
        seconds: Time of the collective.
        exposed: Seconds that computation is blocked by it.
        queued: Seconds that it waited for other collectives of its group before it could begin.
        ahead: Seconds of computation between its start and its wait.
        issued, begin: Time when it is started, and when it begins to run.
        during: Unit that computes when it is started.
        reason: Why it is exposed, in words; empty if it is not. The module that made the schedule fills it in.
    """

    what: str
    bucket: int
    name: str
    unit: str
    stage: Stage
    seconds: float
    exposed: float
    queued: float
    ahead: float
    issued: float = 0.0
    begin: float = 0.0
    during: str = ""
    reason: str = ""

    @property
    def hidden(self) -> float:
        return max(0.0, self.seconds - self.exposed)


@dataclass(frozen=True)
class MemoryCurve:
    """Memory over a step, recorded after each change.

    Args:
        seconds: Times of the changes.
        parts: Bytes by category, at each of these times.
    """

    seconds: Sequence[float]
    parts: Mapping[Category, Sequence[int]]

    @property
    def totals(self) -> list[int]:
        return [sum(values) for values in zip(*self.parts.values(), strict=True)]


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    Args:
        seconds: Time of the whole step.
        compute_seconds: Time of computation, including the optimizer's step.
        flops: Floating-point operations of this rank's matrix products.
        spans: Intervals of activity; empty without details.
        exposures: All collectives, in order of their starts.
        memory: Memory over time; None without details.
        peak_bytes: Peak memory in bytes.
        peak_parts: Bytes at the peak, by category.
        peak_stage, peak_at: Stage and unit of the peak.
        units: Seconds by stage and unit, including time blocked on collectives.
        turns: Begin and end of each forward and backward, in seconds from the beginning of the step.
    """

    seconds: float
    compute_seconds: float
    flops: float
    spans: Sequence[Span]
    exposures: Sequence[Exposure]
    memory: MemoryCurve | None
    peak_bytes: int
    peak_parts: Mapping[Category, int]
    peak_stage: Stage
    peak_at: str
    units: Mapping[tuple[Stage, str], float] = field(default_factory=dict)
    turns: Sequence[tuple[float, float]] = ()

    @property
    def exposed_seconds(self) -> float:
        return sum(exposure.exposed for exposure in self.exposures)


def resting_memory(buckets: Iterable[BucketInfo], optimizer: OptimizerCost, other: int = 0) -> dict[Category, int]:
    """Return the bytes that a rank's device holds between steps, without gradients, by category.

    Args:
        other: Bytes of buffers and other memory outside the buckets.
    """
    shards = residents = state = 0
    for info in buckets:
        shard = info.layout.shard_numel
        step = info.exchange.lane.step
        is_part = step and all(isinstance(stage, AllGather) for stage in step) and not info.releases_resident
        if not is_part:  # a shard that is part of the resident needs no memory of its own
            shards += info.device_shard_bytes
        shards += info.made_bytes
        residents += info.resident_bytes
        if not info.rests_in_host_memory:
            state += shard * optimizer.state_bytes * info.trainable
    return {Category.SHARDS: shards + other, Category.OPTIMIZER: state, Category.GATHERED: residents}


def host_memory(buckets: Iterable[BucketInfo], optimizer: OptimizerCost, saved: int = 0) -> dict[Category, int]:
    """Return the bytes of a rank in host memory, by category; empty if nothing is offloaded.

    Args:
        saved: Bytes of values that are saved for backward there.
    """
    offloaded = [info for info in buckets if info.rests_in_host_memory]
    found = {Category.SAVED: saved} if saved else {}
    if not offloaded:
        return found
    trained = sum(info.layout.shard_numel for info in offloaded if info.trainable)
    return found | {
        Category.SHARDS: sum(info.shard_bytes for info in offloaded),
        Category.GRADIENTS: sum(info.sum_bytes for info in offloaded),
        Category.OPTIMIZER: trained * optimizer.state_bytes,
    }


class Allocate(NamedTuple):
    """Memory is allocated."""

    category: Category
    bytes: int


class Free(NamedTuple):
    """Memory is released."""

    category: Category
    bytes: int


class Compute(NamedTuple):
    """Computation. ``flops`` counts the floating-point operations of its matrix products."""

    seconds: float
    flops: float


class Enter(NamedTuple):
    """The first use of a bucket."""

    bucket: int


class Start(NamedTuple):
    """A collective is started."""

    collective: Collective


class Wait(NamedTuple):
    """A collective is awaited."""

    collective: Collective


class StartCopy(NamedTuple):
    """A copy of a saved value to or from host memory is started, or several are."""

    copy: SavedCopy | Copies


class WaitCopy(NamedTuple):
    """They are awaited."""

    copy: SavedCopy | Copies


class StepBucket(NamedTuple):
    """The optimizer steps over a bucket, in backward."""

    bucket: int


Event = Allocate | Free | Compute | Enter | Start | Wait | StartCopy | WaitCopy | StepBucket


class Turn(NamedTuple):
    """The forward or the backward of one microbatch.

    Args:
        stage: Forward or backward.
        events: Events in order.
        begin: Earliest start in seconds from the beginning of the step, if it depends on work outside this rank.
    """

    stage: Stage
    events: Iterable[Event]
    begin: float = 0.0


def simulate(
    turns: Mapping[Stage, Iterable[Event]] | Iterable[Turn],
    context: Context,
    costs: CostModel,
    resting: Mapping[Category, int],
    optimizer: OptimizerCost | None,
    *,
    details: bool = True,
) -> Timeline:
    """Simulate one step.

    Args:
        turns: Events of the forward, and of the backward if there is one; or forwards and backwards of several
            microbatches, in order.
        resting: Bytes held between steps, by category.
        optimizer: Cost of the optimizer; None: the step ends before the optimizer's step.
        details: Whether to record spans and memory over time, not only sums.
    """
    clock = _Clock(context, costs, resting, optimizer, details)
    clock.quantize_shards()
    clock.gather_residents()
    if isinstance(turns, Mapping):
        turns = [Turn(stage, events) for stage, events in turns.items()]
    for turn in turns:
        clock.idle_until(turn.stage, "", turn.begin)
        begun = clock.now
        clock.run(turn.stage, turn.events)
        clock.turns.append((begun, clock.now))
    if optimizer is not None:
        clock.step()
    return clock.timeline()


def events_of(flow: Flow) -> list[Event]:
    """Return the events of a graph in order. At each place memory is allocated first and freed last."""
    found: list[tuple[float, int, Event]] = []
    for storage in flow.storages:
        if storage.begin >= 0:
            found.append((storage.begin, 2, Allocate(storage.category, storage.bytes)))
        if storage.end is not None:
            order = 0 if storage.handed_on else 4
            found.append((max(storage.end, storage.begin), order, Free(storage.category, storage.bytes)))
    for kernel, seconds in zip(flow.kernels, flow.seconds, strict=True):
        found.append((kernel.place, 3, Compute(seconds, kernel.flops)))
    for placed in flow.collectives:
        found.append((placed.start, 3, Start(placed.collective)))
        found.append((placed.wait, 3, Wait(placed.collective)))
    for copy in flow.copies:
        found.append((copy.start, 3, StartCopy(copy)))
        found.append((copy.wait, 3, WaitCopy(copy)))
    found += [(place, 3, StepBucket(bucket)) for place, bucket in flow.delivered]
    found += [(place, 1, Enter(bucket)) for place, bucket in flow.uses]
    found.sort(key=lambda entry: entry[:2])
    return [event for _, _, event in found]


_Running = tuple[float, float, Exposure]
"""A collective in flight: when it ends, and the seconds of computation done when it was started."""


class _Clock:
    def __init__(
        self,
        context: Context,
        costs: CostModel,
        resting: Mapping[Category, int],
        optimizer: OptimizerCost | None,
        details: bool,
    ) -> None:
        self.context, self.costs, self.details = context, costs, details
        self.optimizer = optimizer or OptimizerCost("none", 0, 0, 0)
        self.stepped: set[int] = set()
        self.arrived: dict[int, float] = {}  # when gradients of buckets are in host memory
        self._slower = 1 + costs.hardware.compute_slowdown
        self.now = 0.0
        self.computed = 0.0
        self.flops = 0.0
        self.free_at: dict[str, float] = {}  # by group
        self.busy: list[tuple[float, float]] = []  # intervals in which collectives slow computation down, in order
        self.residents: dict[int, _Running] = {}
        self.spans: list[Span] = []
        self._computing = -1  # position of the last span of computation
        self.exposures: list[Exposure] = []
        self.units: dict[tuple[Stage, str], float] = {}
        self.turns: list[tuple[float, float]] = []
        self.live = dict.fromkeys(Category, 0)
        self.live.update(resting)
        self.times: list[float] = []
        self.parts: dict[Category, list[int]] = {category: [] for category in Category}
        self.total = sum(self.live.values())
        self.peak, self.peak_parts, self.peak_stage, self.peak_at = self.total, dict(self.live), Stage.FORWARD, ""
        if details:
            self.note()

    # -- memory -------------------------------------------------------------------------------------------------------

    def allocate(self, category: Category, size: int, stage: Stage, unit: str) -> None:
        self.live[category] += size
        self.total += size
        if self.total > self.peak:
            self.peak, self.peak_parts, self.peak_stage, self.peak_at = self.total, dict(self.live), stage, unit
        if self.details:
            self.note()

    def free(self, category: Category, size: int) -> None:
        self.live[category] -= size
        self.total -= size
        if self.details:
            self.note()

    def note(self) -> None:
        self.times.append(self.now)
        for category, size in self.live.items():
            self.parts[category].append(size)

    # -- time ---------------------------------------------------------------------------------------------------------

    def compute(self, seconds: float) -> None:
        """Run computation, slower while collectives run."""
        self.computed += seconds
        now, slower = self.now, self._slower
        for begin, end in self.busy:
            if end <= now:
                continue
            if begin > now:
                if seconds <= begin - now:
                    break
                seconds -= begin - now
                now = begin
            beside = (end - now) / slower
            if seconds <= beside:
                self.now = now + seconds * slower
                return
            seconds -= beside
            now = end
        self.now = now + seconds

    def launch(self, collective: Collective, stage: Stage, unit: str) -> _Running:
        """Start a collective now."""
        begin = max(self.now, self.free_at.get(collective.group, 0.0))
        end = begin + collective.seconds
        self.free_at[collective.group] = end
        if self._slower > 1:
            while self.busy and self.busy[0][1] <= self.now:
                del self.busy[0]
            insort(self.busy, (begin, end))
        info = self.context.buckets[collective.bucket]
        what, seconds, queued = collective.what, collective.seconds, begin - self.now
        if self.details:
            self.span(what, what, info.name, stage, begin, end)
        exposure = Exposure(
            what, collective.bucket, info.name, info.unit, stage, seconds, 0.0, queued, 0.0, self.now, begin, unit
        )
        self.exposures.append(exposure)
        return end, self.computed, exposure

    def quantize_shards(self) -> None:
        """Run joint stages, such as the quantization of shards: their scales must be known first."""
        for info in self.context.buckets:
            self.work(Stage.FORWARD, info.unit, self.costs.joint(info))
        self.idle_until(Stage.FORWARD, "", self.now + self.costs.reduce_scales(self.context.buckets))

    def gather_residents(self) -> None:
        for number, info in enumerate(self.context.buckets):
            if info.resident_groups:
                seconds, nbytes = 0.0, info.resident_bytes
                for group in reversed(info.resident_groups):
                    ring = Ring(group.size, group.stride)
                    seconds += collective_seconds("all_gather", nbytes, ring, self.costs.hardware)
                    nbytes //= group.size
                self.work(Stage.FORWARD, info.unit, self.costs.cast(info))
                collective = Collective("gather", number, 0, 0.0, seconds, "residents")
                self.residents[number] = self.launch(collective, Stage.FORWARD, "")

    def span(self, stream: str, kind: str, name: str, stage: Stage, begin: float, end: float) -> None:
        if end <= begin:
            return
        if stream == "compute":
            last = self.spans[self._computing] if self._computing >= 0 else None
            if last is not None and (last.kind, last.name, last.stage, last.end) == (kind, name, stage, begin):
                self.spans[self._computing] = replace(last, end=end)
                return
            self._computing = len(self.spans)
        self.spans.append(Span(stream, kind, name, stage, begin, end))

    def _end_piece(self) -> None:
        """Begin another span, if what runs between collectives is a piece."""
        if self.context.in_pieces:
            self._computing = -1

    def run(self, stage: Stage, events: Iterable[Event]) -> None:
        buckets = self.context.buckets
        running: dict[Collective, _Running] = {}
        copied: dict[SavedCopy | Copies, float] = {}
        unit = ""
        for event in events:  # the most frequent kinds first: a plan simulates a million events
            if isinstance(event, Allocate):
                self.allocate(event.category, event.bytes, stage, unit)
            elif isinstance(event, Free):
                self.free(event.category, event.bytes)
            elif isinstance(event, Start):
                collective = event.collective
                self._end_piece()
                self.work(stage, unit or buckets[collective.bucket].unit, collective.before)
                running[collective] = self.launch(collective, stage, unit)
            elif isinstance(event, Wait):
                collective = event.collective
                self._end_piece()
                self.await_(stage, unit, running.pop(collective))
                info = buckets[collective.bucket]
                self.work(stage, unit or info.unit, collective.after)
                lane = info.exchange.lane
                if lane.rest and collective.what == "reduce" and collective.stage == len(lane.reduction) - 1:
                    seconds = self.costs.local(info, lane.places("rest"))
                    self.arrived[collective.bucket] = self.copy(True, seconds)
            elif isinstance(event, Compute):
                self.work(stage, unit, event.seconds)
                self.flops += event.flops
            elif isinstance(event, StartCopy):
                copied[event.copy] = self.copy(event.copy.outward, event.copy.seconds)
            elif isinstance(event, WaitCopy):
                self.idle_until(stage, unit, copied.pop(event.copy))
            elif isinstance(event, StepBucket):
                self.step_over([event.bucket], stage)
            else:
                unit = buckets[event.bucket].unit
                if (resident := self.residents.pop(event.bucket, None)) is not None:
                    self.await_(stage, unit, resident)

    def copy(self, outward: bool, seconds: float) -> float:
        """Start a copy between device and host now, and return when it ends. Directions do not share the link."""
        link = "to the host" if outward else "from the host"
        self.free_at[link] = max(self.now, self.free_at.get(link, 0.0)) + seconds
        return self.free_at[link]

    def work(self, stage: Stage, unit: str, seconds: float) -> None:
        if not seconds:
            return
        begun = self.now
        self.compute(seconds)
        if self.details:
            self.span("compute", "compute", unit, stage, begun, self.now)
        self.units[stage, unit] = self.units.get((stage, unit), 0.0) + self.now - begun

    def await_(self, stage: Stage, unit: str, running: _Running) -> None:
        end, computed, exposure = running
        exposure.exposed = self.idle_until(stage, unit, end)
        exposure.ahead = self.computed - computed

    def idle_until(self, stage: Stage, unit: str, until: float) -> float:
        if until <= self.now:
            return 0.0
        begun, self.now = self.now, until
        if self.details:
            self.span("compute", "wait", unit, stage, begun, until)
        self.units[stage, unit] = self.units.get((stage, unit), 0.0) + until - begun
        return until - begun

    def step(self) -> None:
        """Step over the buckets that backward has left."""
        trained = [number for number, info in enumerate(self.context.buckets) if info.trainable]
        self.step_over([number for number in trained if number not in self.stepped], Stage.OPTIMIZER)
        for info in (self.context.buckets[number] for number in trained):
            # What is copied to the device, and stays there, is there before the next forward begins.
            lane = info.exchange.lane
            copied = sum(stage.cost(lane.spec("step", index)).copied for index, stage in enumerate(lane.step))
            if copied:
                self.idle_until(Stage.OPTIMIZER, "optimizer", self.now + self.costs.host_copy(copied))

    def step_over(self, numbers: Sequence[int], stage: Stage) -> None:
        """Step over buckets: on the device, and on the CPU over those in host memory."""
        optimizer, begun = self.optimizer, self.now
        trained = [self.context.buckets[number] for number in numbers]
        on_host = sum(info.layout.shard_numel for info in trained if info.rests_in_host_memory)
        elements = sum(info.layout.shard_numel for info in trained) - on_host
        self.stepped.update(numbers)
        self.allocate(Category.TEMPORARY, elements * optimizer.extra_bytes, stage, "")
        self.compute(self.costs.moved(elements * optimizer.moved_bytes))
        if on_host:  # the CPU begins when the last gradient is there. What the device has queued goes on meanwhile.
            arrived = max(self.arrived.get(number, begun) for number in numbers)
            begin = max(arrived, self.free_at.get("optimizer on the host", 0.0))
            end = begin + self.costs.host_moved(on_host * optimizer.moved_bytes)
            self.now = max(self.now, end)
            self.free_at["optimizer on the host"] = end
        if self.details:
            self.span("compute", "optimizer", "optimizer", stage, begun, self.now)
        self.units[stage, "optimizer"] = self.units.get((stage, "optimizer"), 0.0) + self.now - begun
        self.free(Category.TEMPORARY, elements * optimizer.extra_bytes)

    def timeline(self) -> Timeline:
        memory = MemoryCurve(self.times, self.parts) if self.details else None
        return Timeline(
            self.now,
            self.computed,
            self.flops,
            self.spans,
            self.exposures,
            memory,
            self.peak,
            self.peak_parts,
            self.peak_stage,
            self.peak_at,
            self.units,
            self.turns,
        )
