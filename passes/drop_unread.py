"""Gathers that nobody reads: of parameters whose only uses were dead code.

A model may compute what it does not return: LLaVA runs a vision tower to the end and takes the output of the last layer but
one. AOTAutograd drops that computation, and leaves the collectives that it read, because they have side effects.

Needs: roles. Leaves: of each gather that communicates, one that something reads.
"""

from __future__ import annotations

from torch import fx

from . import roles
from .context import Context, Phase, Report

__all__ = ["apply"]


def apply(graph: fx.Graph, context: Context, phase: Phase) -> Report:
    lines = []
    for gather in roles.gathers(graph):
        if gather.start is None or gather.uses:
            continue
        for node in reversed(gather.nodes):
            graph.erase_node(node)
        lines.append(f"{context.buckets[gather.bucket].name}: nothing reads it, not gathered")
    return Report("unread", lines)
