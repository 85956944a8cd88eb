"""Runs of equal units, of which only a few are traced: shortening a model, and extending outlines afterwards."""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from mfsdp_compile.passes.guests.solver.outline import Copies, Gradients, Outline, Use
from mfsdp_compile.runtime.schedule.phase import Phase


@dataclass(frozen=True)
class TracedBucket:
    """A bucket of the traced model, or of a unit that a traced one represents.

    Args:
        unit: Name of the unit.
        like: Name of the traced unit.
        parameters: Names of the parameters in the traced unit.
    """

    unit: str
    like: str
    parameters: frozenset[str]


@dataclass(frozen=True)
class EqualUnits:
    """Consecutive equal units.

    Args:
        names: Names of the units in the middle, in order. The first one was traced, and represents all of them.
        before, after: Names of the units before and after these, which were traced.
    """

    names: tuple[str, ...]
    before: str
    after: str


AROUND = ((1, 1), (2, 1), (2, 2))
"""Numbers of units to trace before and after the representative of a run, tried in order until one works.

1, 1: The representative must have an equal unit on both sides.
2, 1: Without checkpointing, the partitioner saves other values of a unit if the first one comes before it. Not tried
before this, as a trace in vain takes longer than one more unit.
2, 2: The rest of the model may use the output of the second-to-last unit.

If none works, because a unit in the middle differs from the others, all units are traced.
"""


class NotAlikeError(RuntimeError):
    """A unit cannot represent others."""


def shorten(
    model: nn.Module, classes: Sequence[type[nn.Module]], around: tuple[int, int], stack: contextlib.ExitStack
) -> tuple[list[EqualUnits], dict[str, str]]:
    """Remove equal units from lists of modules, so that of each run one and those ``around`` it remain.

    Args:
        around: Numbers of units to keep before and after it.
        stack: Restores changed configurations.

    Returns:
        The runs, and the original names of the remaining units, by their current names.
    """
    runs: list[EqualUnits] = []
    names: dict[str, str] = {}
    for name, owner in list(model.named_modules()):
        if not isinstance(owner, nn.ModuleList):
            continue
        children = list(owner)
        if not all(isinstance(child, tuple(classes)) for child in children):
            continue
        kept: list[int] = []
        for start, stop in _equal(children):
            first, after = start + around[0], stop - around[1]
            if after - first > 1:
                middle = tuple(f"{name}.{i}" for i in range(first, after))
                runs.append(EqualUnits(middle, f"{name}.{first - 1}", f"{name}.{after}"))
                kept += [*range(start, first + 1), *range(after, stop)]
            else:
                kept += range(start, stop)
        names |= {f"{name}.{now}": f"{name}.{before}" for now, before in enumerate(kept)}
        if len(kept) < len(children):
            del owner[:]
            owner.extend(children[i] for i in kept)
            _adapt_config(model, name, len(children), kept, stack)
    return runs, names


def _adapt_config(model: nn.Module, name: str, count: int, kept: Sequence[int], stack: contextlib.ExitStack) -> None:
    """Adapt a transformers configuration, which models query for the number of layers and the kind of each.

    The configuration is that of the innermost module around the layers.
    """
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        config: Any = getattr(model.get_submodule(".".join(parts[:depth])), "config", None)
        if getattr(config, "num_hidden_layers", None) == count and hasattr(config, "to_dict"):
            of_layers = {
                key: value for key, value in vars(config).items() if isinstance(value, list) and len(value) == count
            }
            shortened = {"num_hidden_layers": len(kept)} | {
                key: [value[i] for i in kept] for key, value in of_layers.items()
            }
            for key, value in shortened.items():
                stack.callback(setattr, config, key, getattr(config, key))
                setattr(config, key, value)
            return


def _equal(children: Sequence[nn.Module]) -> Iterator[tuple[int, int]]:
    """Yield runs ``[start, stop)`` of modules that are equal except for their values and their position."""
    kinds = [_kind(child) for child in children]
    # Settings that only number the modules do not count as differences.
    counting = (
        {key for key in kinds[0][1] if all(kind[1].get(key) == i for i, kind in enumerate(kinds))} if kinds else ()
    )
    for _, settings in kinds:
        for key in counting:
            settings.pop(key)
    start = 0
    for index in range(1, len(children) + 1):
        if index == len(children) or kinds[index] != kinds[start]:
            yield start, index
            start = index


def _kind(module: nn.Module) -> tuple[Any, dict[tuple[str, str], Any]]:
    """Return what a module is, and its settings."""
    tensors = [(name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()]
    tensors += [(name, b.shape, b.dtype, False) for name, b in module.named_buffers()]
    settings = {
        (name, key): value
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, (bool, int, float, str))
    }
    return (str(module), tensors), settings


def stretch(
    outlines: Mapping[Phase, Outline], buckets: Sequence[TracedBucket], run: EqualUnits
) -> tuple[dict[Phase, Outline], list[TracedBucket]]:
    """Extend outlines as if all units of a run had been traced."""
    own = [number for number, bucket in enumerate(buckets) if bucket.unit == run.names[0]]
    numbers = {(number, 0): number for number in own}  # the first copy keeps them, others are appended
    found = list(buckets)
    for copy, name in enumerate(run.names[1:], 1):
        for number in own:
            numbers[number, copy] = len(found)
            found.append(replace(buckets[number], unit=name))
    stretched = {phase: _repeat(outline, run, numbers, phase is Phase.BACKWARD) for phase, outline in outlines.items()}
    if _left(stretched) != _left(outlines):
        raise NotAlikeError(f"{run.names[0]} saves for backward what others release")
    return stretched, found


def _left(outlines: Mapping[Phase, Outline]) -> int:
    """Return the bytes in memory after a step, excluding gradients."""
    segments = sum(segment.saved + segment.temporary for outline in outlines.values() for segment in outline.segments)
    return segments - sum(gradients.elsewhere for outline in outlines.values() for gradients in outline.gradients)


def _repeat(outline: Outline, run: EqualUnits, numbers: Mapping[tuple[int, int], int], backwards: bool) -> Outline:
    """Repeat the segments of the representative for each unit of the run. In a backward, the last unit comes first."""
    places = [i for i, unit in enumerate(outline.units) if unit == run.names[0]]
    if not places:
        return outline  # the backward of a model with this part frozen
    begin, end = places[0], places[-1] + 1
    if places != list(range(begin, end)):
        raise NotAlikeError(f"{run.names[0]} uses the parameters of another unit in between")
    count, length = len(run.names), end - begin
    own = {number for number, _ in numbers}

    def moved(place: int, last: int) -> int:
        """Move a place of another unit's bucket. What lives on behind the run begins, if inside, in its last unit."""
        return place + (count - 1) * length if last >= end and place >= begin else place

    def lives_of(bucket: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield number and life of a bucket: one for each unit of the run if it is the representative's."""
        if bucket not in own:
            yield bucket, moved(start, stop), moved(stop, stop)
            return
        for copy in range(count):
            which = count - 1 - copy if backwards else copy
            yield numbers[bucket, which], start + copy * length, stop + copy * length

    segments = [*outline.segments[:begin], *outline.segments[begin:end] * count, *outline.segments[end:]]
    order = run.names[::-1] if backwards else run.names
    labels = [*outline.units[:begin], *(name for name in order for _ in range(length)), *outline.units[end:]]
    uses: list[Use] = []
    for use in outline.uses:
        for lives in zip(*itertools.starmap(lives_of, use.lives), strict=True):
            buckets, waits, last = zip(*lives, strict=True)
            uses.append(Use(buckets, min(waits), last, waits))
    gradients: list[Gradients] = []
    for g in outline.gradients:
        for bucket, start, ready in lives_of(g.bucket, g.ready if g.begin is None else g.begin, g.ready):
            gradients.append(Gradients(bucket, None if g.begin is None else start, ready, g.elsewhere))
    wholes = {
        bucket: (start, stop) for of, life in outline.wholes.items() for bucket, start, stop in lives_of(of, *life)
    }
    return Outline(
        tuple(segments),
        tuple(labels),
        tuple(sorted(uses, key=lambda use: use.first)),
        wholes,
        tuple(sorted(gradients, key=lambda g: g.ready)),
        tuple(sorted(_copies(outline, labels, begin, count), key=lambda copies: (copies.start, copies.wait))),
    )


def _copies(outline: Outline, labels: Sequence[str], begin: int, count: int) -> Iterator[Copies]:
    """Yield the copies of an outline in which ``count`` units replace the one that begins with segment ``begin``.

    A copy's start and wait are up to two units apart: one is where the unit computes or reads the values, the other one
    at the turn of a unit before or after it. They are as far apart everywhere.

    Args:
        labels: Unit of each segment of the result.
    """
    traced, result = _Turns(outline.units), _Turns(labels)
    run = traced.of(begin)
    found = []
    for copies in outline.copies:
        at, other = (copies.start, copies.wait) if copies.outward else (copies.wait, copies.start)
        found.append((copies, at, other, traced.of(other) - traced.of(at)))
    # Where the turn of a unit of the run begins, as copies tell that start or end there.
    turn = {apart: traced.within(other) for _, _, other, apart in found if abs(traced.of(other) - run) <= 1}
    for copies, at, other, apart in found:
        unit = traced.of(at)
        for copy in range(count) if unit == run else [count - 1 if unit > run else 0]:
            there = unit + copy + apart
            in_run = abs(traced.of(other) - run) <= 1 or not run - 1 <= there <= run + count
            within = traced.within(other) if in_run else turn.get(apart, 0)
            places = result.place(unit + copy, traced.within(at)), result.place(there, within)
            start, wait = places if copies.outward else places[::-1]
            yield replace(copies, start=start, wait=wait)


class _Turns:
    """Segments by the position of their unit: consecutive segments of one unit have the same."""

    def __init__(self, units: Sequence[str]) -> None:
        self.begins = [i for i, unit in enumerate(units) if i == 0 or unit != units[i - 1]]
        self.count = len(units)

    def of(self, segment: int) -> int:
        """Return the position of a segment's unit; at the end, one more than that of the last unit."""
        return bisect.bisect_right(self.begins, segment) - 1 + (segment == self.count)

    def within(self, segment: int) -> int:
        """Return the number of segments between the beginning of the segment's unit and it."""
        return 0 if segment == self.count else segment - self.begins[self.of(segment)]

    def place(self, unit: int, within: int) -> int:
        """Return a segment.

        Raises:
            NotAlikeError: The unit has fewer segments.
        """
        begins = [*self.begins, self.count]
        if unit + 1 < len(begins) and within >= begins[unit + 1] - begins[unit]:
            raise NotAlikeError("values go to host memory while units of other sizes compute")
        return begins[unit] + within
