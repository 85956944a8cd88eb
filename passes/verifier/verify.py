"""The last word on a graph: rules whose breach would mean wrong gradients, lost memory or a hang.

The rules are those that any sharded training keeps to, in the words of this package:

====  =====================  ===========================================================================================
V1    awaited before use     every gather is awaited before the first read of the bucket or of a view of it
V2    released after use     a bucket is gathered once in a graph, and released at most once, after its last read. Memory
                             is released by the last read, or by a pass's ``resize_storage_bytes_``
V3    memory apart           gathers that are in use at a time never share memory. There is no ring of buffers: collectives
                             allocate, unless a pass gives them buffers, which are looked at
V4    reduced once           each trainable element is in exactly one reduction of a backward; frozen elements in none
V5    reduced complete       a reduction starts after all that contributes to its gradients: for tied parameters, all uses
V6    one order              each process group gets the collectives of the buckets' exchanges, stage after stage, with
                             their operators, groups and sizes; backward gathers over the ranks that have portions, of
                             buckets that forward has left portions of. Ranks agree on the order at run time: :mod:`.announce`
V7    untouched in flight    between the start of a collective and its wait nobody writes to, or reads, what it works on,
                             and all are awaited. Streams are the runtime's; waits are the order that a graph can give
V8    not saved              no gathered bucket, view or cast of one is saved for backward or returned, but for those
                             buckets, and portions of others, that were decided to stay
V9    scaled right           the operations of the stages, the factor, and what is summed over microbatches first, are
                             those of the bucket's exchange
V10   shards match           what is returned for a shard, which the optimizer applies to it, has its place, elements and
                             dtype; parameters are read, and gradients packed, at their offsets of the bucket
====  =====================  ===========================================================================================

All hold wherever passes run: none speaks of how good a schedule is. Some need to know what the graph was when it came to
the passes (:class:`.Contract`); of graphs made by hand, for which that is not known, they check the rest.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import fx

from mfsdp_compile.runtime import compat

from ..context import Context, Phase, Report
from .analysis import Analysis
from .contract import contract_of
from .rules import RULES, Breach

__all__ = ["ScheduleError", "breaches", "verify"]

_SHOWN = 5
_NOT_OF_MODELS = tuple(str(Path(inspect.getfile(module)).parent) for module in (torch, compat))


class ScheduleError(RuntimeError):
    """A graph breaks rules of sharded training: a bug in a pass, not in the model.

    Args:
        breaches: all of them, not empty.
        context, phase: of the graph.
        after: name of the pass that was applied last; empty if that is not known.
    """

    def __init__(self, breaches: Sequence[Breach], context: Context, phase: Phase, after: str = "") -> None:
        self.breaches = tuple(breaches)
        lines = [_describe(breach, context) for breach in self.breaches[:_SHOWN]]
        more = len(self.breaches) - len(lines)
        lines += [f"... and {more} more"] * (more > 0)
        where = f"The {phase.value} graph{f' after pass {after!r}' if after else ''}"
        super().__init__(
            f"{where} breaks {'a rule' if len(self.breaches) == 1 else 'rules'} of sharded training:\n    "
            + "\n    ".join(lines)
            + "\nThis is a bug in a pass, not in the model. If the pass is not yours, please report it, and run the model "
            "without torch.compile meanwhile."
        )


def verify(graph: fx.Graph, context: Context, phase: Phase, *, after: str = "") -> Report:
    """Check a graph with sharded parameters against the rules V1 to V10. Changes nothing.

    What a pass of your own is given is what this takes; it runs after every such pass anyway.

    Args:
        graph: a forward, backward or inference graph on its way through the passes.
        context: of the graph.
        phase: which of these it is.
        after: name of the pass that was applied last, for the message.

    Raises:
        ScheduleError: it names every rule that is broken, the unit, the bucket, the parameter if one is concerned, the
            node, and the line of the model that this comes from.
    """
    found = Analysis(graph, context, phase)
    if broken := _check(found):
        raise ScheduleError(broken, context, phase, after)
    gathers = sum(launch.gathers for launch in found.launches)
    return Report(
        "verify", [f"{phase.value}: {gathers} gathers and {len(found.reductions)} reductions, all rules hold"]
    )


def breaches(graph: fx.Graph, context: Context, phase: Phase) -> list[Breach]:
    """What breaks rules, in their order; empty if nothing does."""
    return _check(Analysis(graph, context, phase))


def _check(found: Analysis) -> list[Breach]:
    contract = contract_of(found.graph)
    return [breach for rule in RULES for breach in rule.breaches(found, contract)]


def _describe(breach: Breach, context: Context) -> str:
    (rule,) = (rule for rule in RULES if rule.number == breach.rule)
    where = []
    if breach.bucket is not None:
        info = context.buckets[breach.bucket]
        where += [f"unit {info.unit!r}", f"bucket {info.name!r}"]
    if breach.parameter is not None:
        where.append(f"parameter {breach.parameter!r}")
    where.append(f"node {breach.node.format_node() if breach.node.op != 'output' else breach.node}")
    return f"{rule.number} ({rule.name}): {breach.what}; {', '.join(where)}{_source_line(breach.node)}"


def _source_line(node: fx.Node) -> str:
    """The line of the model that a node, or else what is computed next of it, comes from."""
    pending, seen = [node], {node}
    while pending and len(seen) < 100:
        at = pending.pop(0)
        lines = re.findall(r'File "([^"]+)", line (\d+)', at.meta.get("stack_trace") or "")
        if lines := [(file, line) for file, line in lines if not file.startswith(_NOT_OF_MODELS)]:
            return f", from {lines[-1][0]}:{lines[-1][1]}"
        following = [other for other in (*at.users, *at.all_input_nodes) if other not in seen]
        seen.update(following)
        pending += following
    return ""
