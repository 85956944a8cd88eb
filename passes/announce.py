"""A graph says what it is about to do before it does it.

The first thing that a graph with collectives runs is ``mfsdp::begin(phase, digest, schedule, used)``. That is part of the
graph, so code that comes out of a compile cache says it too, of whatever process it came from. What is made of it at run time
(agreement between ranks, a record for reports of hangs) is :mod:`mfsdp_compile.runtime.running`'s. ``used`` lists the
parameters that a backward has gradients for, ``"0,1;;0,2"`` for three buckets: the others have none, on any rank.

Runs last. Changes nothing that is computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import fx

from .context import Context, Phase
from .roles import reductions

__all__ = ["apply"]


def apply(graph: fx.Graph, phase: Phase, collectives: Sequence[str], context: Context) -> None:
    """``collectives``: starts and ends, in order, with numbers for buckets."""
    if not collectives:
        return
    schedule = "\n".join(collectives)
    digest = hashlib.sha256(schedule.encode()).hexdigest()[:16]
    used = ";".join(",".join(map(str, indices)) for indices in _used(graph, context)) if phase is Phase.BACKWARD else ""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        graph.call_function(torch.ops.mfsdp.begin.default, (phase.value, digest, schedule, used))


def _used(graph: fx.Graph, context: Context) -> list[list[int]]:
    """For each bucket, the indices of parameters whose gradients a backward graph packs."""
    found: list[set[int]] = [set() for _ in context.buckets]
    for reduction in reductions(graph):
        gradients, offsets = reduction.pack.args[:2]
        slots = context.buckets[reduction.bucket].layout.slots
        for gradient, offset in zip(gradients, offsets, strict=True):  # type: ignore[arg-type]
            # Parameters without elements have the place of the next one.
            shape = tuple(gradient.meta["val"].shape)
            found[reduction.bucket] |= {i for i, slot in enumerate(slots) if (slot.offset, slot.shape) == (offset, shape)}
    return [sorted(indices) for indices in found]
