"""What a lane must be, whatever plug-ins have made of it: rules that need no rank and no run."""

from __future__ import annotations

import math
from dataclasses import fields
from fractions import Fraction
from typing import Any, cast

from .lane import PARTS, REDUCING, Lane, is_own
from .plain import Scale, is_plain
from .stage import Spec, Stage


class WrongLane(ValueError):
    """A plug-in has made a lane that does not carry a bucket to where it belongs."""


def check(lane: Lane, plain: Lane, bucket: str, plugin: object) -> None:
    """Check a lane that a plug-in has returned.

    Args:
        plain: The strategy's lane.
        bucket: Name of the bucket, for messages.
        plugin: The plug-in, for messages.

    Raises:
        WrongLane: It is none, or means something else than the strategy's.
    """
    if (problem := _problem(lane, plain)) is not None:
        raise WrongLane(f"Plug-in {plugin!r} cannot be used for bucket {bucket!r}: {problem}")


def _problem(lane: Lane, plain: Lane) -> str | None:
    if not isinstance(lane, Lane):
        return f"it returned {type(lane).__name__}, not a Lane."
    for part in PARTS:
        for stage in lane[part]:
            if not isinstance(stage, Stage):
                return f"part {part!r} has {stage!r}, which is no stage."
            made = vars(type(stage))
            if "__dataclass_fields__" not in made or not made["__dataclass_params__"].frozen:
                return f"{type(stage).__name__} is no frozen dataclass: decorate it with @dataclass(frozen=True)."
            if hidden := [field.name for field in fields(cast(Any, stage)) if not field.repr]:
                return f"the repr of {type(stage).__name__} leaves out {hidden}: compiled code is told apart by it."
            if (stage.inlined or stage.call(Spec(0, lane.shard.dtype)) is not None) and not is_own(stage):
                return f"{stage.text!r} is inlined in graphs, or has an operator there. Only plain stages may."
            if (stage.joint or stage.takes_scales) and not is_own(stage):
                return f"{stage.text!r} is joint or takes scales, which only stages of this package may."
    if not all(is_plain(stage) for stage in lane.pack):
        return "part 'pack' has stages that are not plain. Put them at the beginning of 'each' or 'due'."
    if (lane.shard, lane.whole, lane.packed) != (plain.shard, plain.whole, plain.packed):
        return "it changes what the lane begins or ends with. Change only its stages."
    if plain.is_joint and lane.step[:1] != plain.step[:1]:
        return f"its part 'step' does not begin with {plain.step[0].text!r}, which runs for all buckets together."
    if sum(stage.flies for stage in lane.use) > 1:
        return "more than one stage of 'use' flies. Put the others into 'step', or make one stage of them."
    for what, got, right in (
        ("a gathered bucket is", lane.spec("use", len(lane.use)), plain.spec("use", len(plain.use))),
        ("the gradient of the shard is", lane.spec("due", len(lane.due)), lane.shard),
    ):
        if got != right:
            return f"{what} [{got.numel}] in {got.dtype} at its end, not [{right.numel}] in {right.dtype}."
    for part in PARTS:
        for what in ("sums", "parts"):  # what one stage of a reduction scatters, another may gather again
            got_ranks, ranks = _ranks(lane, part, what), _ranks(plain, part, what)
            if got_ranks != ranks:
                does = "adds what is on ranks:" if what == "sums" else "divides what ranks have by"
                return (
                    f"its part {part!r} {does} {got_ranks}, and the strategy's {ranks}. Say with gathers, scatters and "
                    "sums what each stage means."
                )
    scale = math.prod(stage.factor for part in REDUCING for stage in lane[part] if isinstance(stage, Scale))
    if not math.isclose(scale, lane.scale, rel_tol=1e-6):
        return f"it scales gradients by {scale}, not {lane.scale}."
    if lane.is_deferred != plain.is_deferred:
        return "it changes whether gradients accumulate until a reduction is due."
    return None


def _ranks(lane: Lane, part: str, what: str) -> Fraction:
    """Return how many ranks are added, or how many parts there are of what each rank has: fewer than one if it has
    gathered them."""
    found = Fraction(1)
    for stage in lane[part]:
        if what == "sums":
            found *= stage.ranks if stage.sums else 1
        else:
            found *= Fraction(stage.ranks if stage.scatters else 1, stage.ranks if stage.gathers else 1)
    return found
