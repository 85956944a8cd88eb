"""A graph says what it is about to do before it does it.

The first thing that a graph with collectives runs is ``mfsdp::begin(phase, digest, schedule)``. That is part of the graph,
so code that comes out of a compile cache says it too, of whatever process it came from. What is made of it at run time
(agreement between ranks, a record for reports of hangs) is :mod:`mfsdp_compile.runtime.running`'s.

Runs last. Changes nothing that is computed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import fx

from .context import Phase

__all__ = ["apply"]


def apply(graph: fx.Graph, phase: Phase, collectives: Sequence[str]) -> None:
    """``collectives``: starts and ends, in order, with numbers for buckets."""
    if not collectives:
        return
    schedule = "\n".join(collectives)
    digest = hashlib.sha256(schedule.encode()).hexdigest()[:16]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        graph.call_function(torch.ops.mfsdp.begin.default, (phase.value, digest, schedule))
