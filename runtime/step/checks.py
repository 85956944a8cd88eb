"""Checks that are always on: they look for silent training errors where this costs almost nothing.

Before every optimizer step, without communication: whether the backward reduced gradients of every trainable element.
Before the first step, with one exchange of a few hundred bytes per rank: whether parameters show their bucket's flat
gradient, whether gradients are finite, whether ranks reduced the same buckets, and whether buffers are equal on all
ranks. Saving a checkpoint compares buffers again, because only one rank's are saved.

``MFSDP_GUARDS=0`` turns the checks off.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..digests import value_digest
from ..memory import gradients
from ..memory.bucket import Bucket
from ..memory.redistribute import as_real
from ..memory.tensor import UnreducedGradient
from ..program_lines import warn
from ..ranks.agreement import everyones

NORM_TOLERANCE = 1e-3
"""Relative tolerance between two sums of the same squares in float32, in different orders. The worst case is n *
2**-24; about 1e-6 is observed. Elements that are in no parameter, or in two, make a far larger difference."""

_SHOWN = 4


def enabled() -> bool:
    return os.environ.get("MFSDP_GUARDS", "1") != "0"


def missing(buckets: Sequence[Bucket], reduced: Iterable[Bucket]) -> str | None:
    """Describe which trainable elements have been reduced and which have not; None if all have been."""
    known = set(reduced)
    trainable = [bucket for bucket in buckets if bucket.plan.requires_grad]
    absent = [bucket for bucket in trainable if bucket not in known]
    if not absent:
        return None
    total = sum(_elements(bucket) for bucket in trainable)
    count = total - sum(_elements(bucket) for bucket in absent)
    return f"{count:,} of {total:,} trainable elements, none of {_listed([b.plan.name for b in absent])}"


def check_first_step(
    buffers: Mapping[str, Tensor], buckets: Sequence[Bucket], reduced: Iterable[Bucket], group: dist.ProcessGroup
) -> None:
    """Check gradients and buffers. A collective that every rank calls before its first optimizer step.

    Args:
        buffers: Buffers that should be equal on all ranks.

    Raises:
        RuntimeError: On every rank, if on any rank the gradients that parameters show are not those of their buckets,
            or ranks have reduced gradients of different buckets.

    Warns:
        RuntimeWarning: Gradients are not finite, or buffers differ between ranks.
    """
    trainable = [bucket for bucket in buckets if bucket.plan.requires_grad]
    known = set(reduced)
    torn, not_finite = _look_at_gradients(trainable)
    mine = {
        "reduced": sorted(bucket.plan.name for bucket in known),
        "torn": torn,
        "not finite": not_finite,
        "buffers": _digests(buffers),
    }
    everyone = everyones(mine, group, "gradients and buffers before the first step")
    ranks = dist.get_process_group_ranks(group)
    for rank, its in zip(ranks, everyone, strict=True):
        if its["torn"]:
            raise RuntimeError(
                f"On rank {rank}, {its['torn']}. The gradients that the optimizer would use are not the reduced ones; "
                "please report this. Weights and optimizer state are those of before."
            )
        if its["reduced"] != everyone[0]["reduced"]:
            apart = sorted(set(its["reduced"]) ^ set(everyone[0]["reduced"]))
            raise RuntimeError(
                f"Ranks {ranks[0]} and {rank} reduced gradients of different buckets in their first step: only one of "
                f"them those of {_listed(apart)}. Please report this. Weights and optimizer state are those of before."
            )
    if bad := [
        f"{_listed(its['not finite'])} on rank {r}" for r, its in zip(ranks, everyone, strict=True) if its["not finite"]
    ]:
        warn(
            f"The first step's gradients are not finite: {'; '.join(bad[:_SHOWN])}. A scaled loss that overflows is no "
            "harm, the scaler skips the step; report_nan_in_param_grad=True looks at every step.",
            RuntimeWarning,
            by=ranks[0],
        )
    _warn_of_buffers([its["buffers"] for its in everyone], ranks, "at the first step")


def compare_buffers(buffers: Mapping[str, Tensor], group: dist.ProcessGroup, when: str) -> None:
    """Warn if buffers differ between ranks. A collective."""
    if enabled() and buffers:
        _warn_of_buffers(everyones(_digests(buffers), group, "buffers"), dist.get_process_group_ranks(group), when)


def _look_at_gradients(buckets: Sequence[Bucket]) -> tuple[str, list[str]]:
    """Return what is inconsistent between buckets and parameters, and names of non-finite gradients."""
    torn, not_finite = "", []
    for bucket in buckets:
        attached = bucket.gradients
        if any(gradient is None or isinstance(gradient, UnreducedGradient) for gradient in attached):
            continue
        flat = gradients.flat_gradient(bucket)
        assert flat is not None
        rows = zip(attached, bucket.views(flat), strict=True)  # a tensor that the program has assigned may be whole
        locals_ = [as_real(own.to_local() if isinstance(own, DTensor) else view) for own, view in rows]
        # Sum in float32 at least: half precision gives only three digits of a norm.
        summed_in = torch.float32 if flat.dtype.itemsize < 4 else flat.dtype
        all_norms = torch._foreach_norm([*locals_, flat], 2.0, summed_in)
        *norms, of_bucket = torch.stack(all_norms).tolist()
        not_finite += [
            locations[0].name for locations, n in zip(bucket.locations, norms, strict=True) if not math.isfinite(n)
        ]
        norm = math.hypot(*norms)
        if math.isfinite(norm) and abs(norm - of_bucket) > NORM_TOLERANCE * max(norm, of_bucket) and not torn:
            torn = f"the gradient of bucket {bucket.plan.name!r} has norm {of_bucket:.7g}, its parameters' {norm:.7g}"
    return torn, not_finite


def _digests(buffers: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: value_digest(buffer) for name, buffer in buffers.items() if not buffer.is_meta}


def _warn_of_buffers(everyone: Sequence[dict[str, str]], ranks: Sequence[int], when: str) -> None:
    names = [name for name in everyone[0] if len({its.get(name) for its in everyone}) > 1]
    if names:
        rank = next(r for r, its in zip(ranks, everyone, strict=True) if its.get(names[0]) != everyone[0][names[0]])
        warn(
            f"Buffers differ between ranks {when}: {_listed(names)} (ranks {ranks[0]} and {rank}). Each rank goes on "
            "with its own, and checkpoints have the first rank's. If they should be equal, as running statistics "
            "mostly should: torch.nn.SyncBatchNorm, or broadcast them.",
            RuntimeWarning,
            by=ranks[0],
        )


def _elements(bucket: Bucket) -> int:
    return sum(math.prod(slot.shape) for slot in bucket.plan.layout.slots)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
