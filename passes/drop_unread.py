"""Remove unread gathers: those of parameters whose only uses were dead code.

A model may compute values that it does not return. For example, LLaVA runs its whole vision tower but uses the output
of the second-to-last layer. AOTAutograd drops the unused computation but keeps the collectives that fed it, because
collectives have side effects.

Needs: roles. Leaves: only gathers whose result is read, among those that communicate.
"""

from __future__ import annotations

from torch import fx

from mfsdp_compile.runtime.schedule.phase import Phase

from . import roles
from .context import Context, Report


def apply(graph: fx.Graph, context: Context, phase: Phase) -> Report:
    lines = []
    for gather in roles.gathers(graph):
        if gather.start is None or gather.uses:
            continue
        for node in reversed(gather.nodes):
            graph.erase_node(node)
        lines.append(f"{context.buckets[gather.bucket].name}: nothing reads it, not gathered")
    return Report("unread", lines)
