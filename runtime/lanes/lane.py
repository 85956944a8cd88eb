"""A lane: the way of one bucket, as lists of stages.

    part    when                               from                        to
    step    once after the shard has changed   shard, in the main dtype    what stays on this rank until the next change
    use     each use, also in backward         that                        whole bucket, in the compute dtype
    pack    each backward                      packed gradient             the same, by whoever packs: a region, too
    each    each backward                      that                        what is summed over microbatches
    due     when a reduction is due            the sum                     gradient of the shard, in the main dtype
    rest    when a reduction is due            that                        the same, where the shard rests

Graphs refer to a lane by its key, a digest of all that it says. So graphs that are shared or cached know exactly which
lane they were made for, and buckets with equal lanes share them.
"""

from __future__ import annotations

import functools
import hashlib
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ..geometry.groups import Group
from .plain import Operands, Run, Scale, chain_of, landing_of
from .stage import Call, Spec, Stage

Stages = tuple[Stage, ...]
PARTS = ("step", "use", "pack", "each", "due", "rest")
GATHERING = ("step", "use")
REDUCING = ("pack", "each", "due", "rest")

NOTHING = Operands()

_lanes: weakref.WeakValueDictionary[str, Lane] = weakref.WeakValueDictionary()
"""By key. The plans of buckets keep theirs: a stage's class may hold on to all of a user's program."""
_own_lanes: dict[str, Lane] = {}
"""Those that consist of this package's stages."""


Place = tuple[str, int]
"""A part of a lane, and the index of a stage in it."""


@dataclass(frozen=True, eq=False)
class Flight:
    """A flying stage of a reduction, with the local stages around it.

    Args:
        part: ``"each"`` or ``"due"``.
        index: Index of the flying stage in its part.
        stage: The flying stage.
        before, after: Local stages that run before its start and after its wait.
        decides: Whether it is the first one that runs only when a reduction is due: gradients accumulate in front of
            it, and in front of what is before it in its part.
        start: Runs what is in front of its operator, and starts it if it is due. What it returns must be landed.
        land: Waits for what is in flight, and runs the local stages behind it.
    """

    part: str
    index: int
    stage: Stage
    before: tuple[Place, ...]
    after: tuple[Place, ...]
    decides: bool
    start: Run
    land: Run

    @functools.cached_property
    def may_wait(self) -> bool:
        """Whether it is skipped while no reduction is due."""
        return self.part == "due"

    @functools.cached_property
    def ungated(self) -> tuple[Place, ...]:
        """Local stages that run in front of its operator."""
        return tuple(place for place in self.before if place[0] != "due")

    @functools.cached_property
    def gated(self) -> tuple[Place, ...]:
        """Local stages that run in its operator, behind the gate."""
        return tuple(place for place in self.before if place[0] == "due")


@dataclass(frozen=True)
class Lane:
    """The way of one bucket.

    Args:
        shard: The shard at rest.
        whole: The gathered bucket.
        packed: The packed gradient.
        scale: Factor of gradients, all in all.
        inspected: Whether packed gradients are inspected before they are reduced.
        step, use, pack, each, due, rest: Stages of each part. Those of ``pack`` and ``rest`` are local and this
            package's.
    """

    shard: Spec
    whole: Spec
    packed: Spec
    scale: float = 1.0
    inspected: bool = False
    step: Stages = ()
    use: Stages = ()
    pack: Stages = ()
    each: Stages = ()
    due: Stages = ()
    rest: Stages = ()

    def __getitem__(self, part: str) -> Stages:
        stages: Stages = getattr(self, part)
        return stages

    def change(self, where: Callable[[Stage], bool], put: Callable[[Stage], Sequence[Stage]], *parts: str) -> Lane:
        """Return a lane in which some stages are replaced.

        Args:
            where: Which stages are replaced.
            put: Returns the stages that replace one, such as an encoder, the stage itself and a decoder.
            parts: Parts that are changed; all but ``pack`` and ``rest``, if none is named.
        """
        parts = parts or tuple(part for part in PARTS if part not in ("pack", "rest"))
        changed: dict[str, Any] = {
            part: tuple(new for old in self[part] for new in (put(old) if where(old) else (old,))) for part in parts
        }
        return replace(self, **changed)

    # -- what travels -------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _specs(self) -> dict[str, tuple[Spec, ...]]:
        """For each part, what enters each of its stages; at the end, what leaves the part."""
        found: dict[str, tuple[Spec, ...]] = {}
        for first, parts in ((self.shard, GATHERING), (self.packed, REDUCING)):
            spec = first
            for part in parts:
                specs = [spec]
                for stage in self[part]:
                    specs.append(stage.out(specs[-1]))
                found[part], spec = tuple(specs), specs[-1]
        return found

    def spec(self, part: str, index: int = 0) -> Spec:
        """Return what enters a stage; at the index behind the last, what leaves the part."""
        return self._specs[part][index]

    @functools.cached_property
    def own_parts(self) -> frozenset[str]:
        """Parts without a stage of a user's plug-in."""
        return frozenset(part for part in PARTS if all(is_own(stage) for stage in self[part]))

    def places(self, part: str) -> list[Place]:
        """Return the places of the stages of a part."""
        return [(part, index) for index in range(len(self[part]))]

    def flight_spec(self, part: str, index: int) -> Spec:
        """Return what a flying stage has in flight."""
        return self[part][index].flight(self.spec(part, index))

    @functools.cached_property
    def reduction(self) -> tuple[Flight, ...]:
        """The flying stages that gradients pass, in order."""
        around: list[tuple[Place, list[Place], list[Place]]] = []
        waiting: list[Place] = []
        for part in ("each", "due"):
            flown = False
            for place in self.places(part):
                if self[part][place[1]].flies:
                    around.append((place, waiting, []))
                    waiting, flown = [], True
                else:
                    (around[-1][2] if flown else waiting).append(place)
        if around:
            around[-1][2].extend(waiting)  # nothing of the last part flies
        decisive = next((place for place, _, _ in around if place[0] == "due"), None)
        found = []
        for place, before, after in around:
            start, wait = self._flying(place, is_first=place == around[0][0])
            ungated = [self._local(each) for each in before if each[0] != "due"]
            found.append(
                Flight(
                    *place,
                    self[place[0]][place[1]],
                    tuple(before),
                    tuple(after),
                    place == decisive,
                    chain_of([*ungated, start]),
                    landing_of(wait, [self._local(each) for each in after]),
                )
            )
        return tuple(found)

    @functools.cached_property
    def unreduced(self) -> tuple[Place, ...]:
        """Local stages of a gradient that no flying stage reduces."""
        return () if self.reduction else (*self.places("each"), *self.places("due"))

    @functools.cached_property
    def gather(self) -> int | None:
        """Index of the flying stage of ``use``; None if there is none."""
        return next((index for index, stage in enumerate(self.use) if stage.flies), None)

    @functools.cached_property
    def start_gather(self) -> Run:
        """Runs the stages of a use up to the one that flies. What it returns must be landed."""
        assert self.gather is not None
        start, _ = self._flying(("use", self.gather))
        return chain_of([*(self._local(place) for place in self.places("use")[: self.gather]), start])

    @functools.cached_property
    def land_gather(self) -> Run | None:
        """Waits for what :attr:`start_gather` has returned, and returns the bucket. None: ``wait_tensor`` does."""
        assert self.gather is not None
        _, wait = self._flying(("use", self.gather))
        after = [self._local(place) for place in self.places("use")[self.gather + 1 :]]
        return landing_of(wait, after) if wait is not None or after else None

    @functools.cached_property
    def groups(self) -> tuple[Group | None, ...]:
        """For each flying stage of the reduction, its group."""
        return tuple(flight.stage.group for flight in self.reduction)

    @functools.cached_property
    def is_joint(self) -> bool:
        """Whether a guest begins ``step`` for all buckets of a model together."""
        return bool(self.step) and self.step[0].joint

    @functools.cached_property
    def takes_scales(self) -> bool:
        """Whether a use takes the scales of the bucket."""
        return any(stage.takes_scales for stage in self.use)

    @functools.cached_property
    def as_gathered(self) -> Lane:
        """The lane of a bucket that is used as it lands, without the stages behind its gather."""
        return self if self.gather is None else replace(self, use=self.use[: self.gather + 1])

    @functools.cached_property
    def has_local_copy(self) -> bool:
        """Whether a part of this rank alone stays between uses: ``step`` has no gather."""
        return bool(self.step) and not any(stage.flies for stage in self.step)

    @property
    def group_names(self) -> list[str]:
        return [group.name for group in self.groups if group is not None]

    @functools.cached_property
    def is_deferred(self) -> bool:
        """Whether gradients accumulate until a reduction is due."""
        return any(flight.may_wait for flight in self.reduction)

    @functools.cached_property
    def waits_whole(self) -> bool:
        """Whether whole gradients accumulate: no stage runs in each backward."""
        return bool(self.reduction) and self.reduction[0].may_wait

    @functools.cached_property
    def keeps_state(self) -> bool:
        return any(stage.keeps_state for part in PARTS for stage in self[part])

    @functools.cached_property
    def remembers_gradients(self) -> bool:
        """Whether a stage keeps something of gradients."""
        return any(stage.keeps_state for part in REDUCING for stage in self[part])

    @functools.cached_property
    def is_opaque(self) -> bool:
        """Whether graphs have stages that they find by their place."""
        return any(is_opaque(stage) for part in PARTS if part != "step" for stage in self[part])

    @functools.cached_property
    def needs_token(self) -> bool:
        """Whether graphs that train the bucket take a token, which says which bucket it is."""
        return self.inspected or self.is_deferred or self.keeps_state

    def has_token(self, trained: bool) -> bool:
        """Whether graphs take a token: of a frozen bucket only for the state of its stages."""
        return self.needs_token if trained else self.keeps_state

    @functools.cached_property
    def deferred_spec(self) -> Spec:
        """What is summed over microbatches."""
        return self.spec("due")

    @property
    def packed_scale(self) -> float:
        """Factor of gradients once they are packed."""
        return math.prod(stage.factor for stage in self.pack if isinstance(stage, Scale))

    @functools.cached_property
    def packing(self) -> Lane:
        """The lane of a bucket that another graph, or the eager path, gathers and reduces."""
        spec = self.packed
        return Lane(spec, self.whole, spec, self.packed_scale, pack=self.pack)

    # -- identity -----------------------------------------------------------------------------------------------------

    @functools.cached_property
    def key(self) -> str:
        """A digest of all that the lane says, under which :func:`lane_at` finds it."""
        flights = [
            self.flight_spec(part, index) for part in PARTS for index, stage in enumerate(self[part]) if stage.flies
        ]
        flags = ("flies", "gathers", "scatters", "sums", "keeps_state", "functional")
        kinds = [(type(s), *(getattr(s, flag) for flag in flags)) for part in PARTS for s in self[part]]
        key = hashlib.sha256(repr((self, kinds, self._specs, flights)).encode()).hexdigest()[:16]
        while (other := _lanes.get(key)) is not None and other != self:
            key = hashlib.sha256(key.encode()).hexdigest()[:16]  # a notebook cell has defined the class again
        lane = _lanes.setdefault(key, self)
        if all(is_own(stage) for part in PARTS for stage in lane[part]):
            _own_lanes[key] = lane
        return key

    @functools.cached_property
    def text(self) -> str:
        """The stages, the same on all ranks."""
        return "; ".join(f"{part}: {', '.join(stage.text for stage in self[part])}" for part in PARTS if self[part])

    def __deepcopy__(self, memo: dict[int, Any]) -> Lane:
        return self  # copies communicate over the same groups

    # -- running ------------------------------------------------------------------------------------------------------

    def _local(self, place: Place) -> Run:
        part, index = place
        stage, at, operators = self[part][index], (self.key, part, index), torch.ops.mfsdp
        if (call := stage.call(self.spec(part, index))) is not None:
            operator, arguments = call
            if stage.takes_scales:
                return lambda x, operands: operator(x, operands.scales, *arguments)
            return lambda x, operands: operator(x, *arguments)
        if stage.inlined:
            return cast(Run, stage.run)  # takes no notice of a state
        is_told = stage.keeps_state or part == "due"
        return lambda x, operands: operators.run_stage(x, operands.token if is_told else None, *at)

    def _flying(self, place: Place, is_first: bool = False) -> tuple[Run, Run | None]:
        """Return what starts a stage, and what waits for it; None: ``wait_tensor`` does."""
        part, index = place
        stage, at, operators = self[part][index], (self.key, part, index), torch.ops.mfsdp
        is_told, is_known = stage.keeps_state or part == "due", stage.call(self.spec(part, index)) is not None

        def await_stage(x: Tensor, operands: Operands) -> Tensor:
            landed: Tensor = operators.wait_stage(x, operands.token if is_told else None, *at)
            return landed

        wait = await_stage if self.has_wait(place) else None
        if part == "due" or (self.inspected and is_first):
            return lambda x, operands: operators.reduce_if_due(x, operands.token, *at), wait
        if is_known:
            return cast(Run, stage.start), wait  # takes no notice of a state
        return lambda x, operands: operators.start_stage(x, operands.token if is_told else None, *at), wait

    def has_wait(self, place: Place) -> bool:
        """Whether graphs await a stage by its place, and not with ``wait_tensor``."""
        part, index = place
        stage, lands_in_flight = self[part][index], self.flight_spec(part, index) == self.spec(part, index + 1)
        needs_none = stage.functional and type(stage).wait is Stage.wait and lands_in_flight
        return is_opaque(stage) and not needs_none

    def local_call(self, part: str, index: int) -> Call:
        """Return the operator of a local stage in graphs, and its arguments."""
        call = self[part][index].call(self.spec(part, index))
        return call if call is not None else (torch.ops.mfsdp.run_stage.default, (self.key, part, index))

    def operator(self, flight: Flight) -> Call:
        """Return the operator that starts a stage of the reduction in graphs, and its arguments."""
        place = self.key, flight.part, flight.index
        if flight.may_wait or (self.inspected and flight is self.reduction[0]):
            return torch.ops.mfsdp.reduce_if_due.default, place
        call = flight.stage.call(self.spec(flight.part, flight.index))
        return call if call is not None else (torch.ops.mfsdp.start_stage.default, place)

    def travel(self, part: str, x: Tensor, operands: Operands = NOTHING, places: slice = slice(None)) -> Tensor:
        """Run stages of a part, one after the other. Those of reductions have :attr:`reduction`."""
        for place in self.places(part)[places]:
            if not self[part][place[1]].flies:
                x = self._local(place)(x, operands)
                continue
            start, wait = self._flying(place)
            x = landing_of(wait, [])(start(x, operands), operands)
        return x

    def finish(self, x: Tensor, operands: Operands = NOTHING) -> Tensor:
        """Run the local stages of a gradient that no flying stage reduces."""
        for place in self.unreduced:
            x = self._local(place)(x, operands)
        return x

    def reduced(self, packed: Tensor, operands: Operands = NOTHING) -> Tensor:
        """Return the gradient of the shard for a packed gradient, all stages one after the other."""
        for flight in self.reduction:
            packed = flight.land(flight.start(packed, operands), operands)
        return self.travel("rest", self.finish(packed, operands), operands)


def is_opaque(stage: Stage) -> bool:
    """Whether graphs have a stage as an operator that finds it by its place."""
    return not stage.inlined and stage.call(Spec(0, torch.float32)) is None


def is_own(part: object) -> bool:
    """Whether a stage or a plug-in is one of this package's."""
    return type(part).__module__.startswith(__name__.rpartition(".lanes.")[0])


def lane_at(key: str) -> Lane:
    """Return the lane with a key.

    Raises:
        RuntimeError: No bucket of this process has such a lane.
    """
    lane = _lanes.get(key)
    if lane is None:
        raise RuntimeError(
            f"A graph refers to lane {key}, which no bucket of this process has: it was compiled for a model that was "
            "sharded with other settings or plug-ins. Shard the model as it was then, or compile again."
        )
    return lane


class Plugin(Protocol):
    """Changes lanes: what ``fully_shard_model(plugins=[...])`` takes. Immutable, and its ``repr`` says all."""

    def __call__(self, lane: Lane, ranks: Any) -> Lane:
        """Return another lane for a bucket.

        Args:
            lane: The strategy's lane, or what the plug-ins before have made of it.
            ranks: The bucket's :class:`~..geometry.topology.Topology`.
        """
