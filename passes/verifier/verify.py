"""Verify a graph: check rules whose breach would mean wrong gradients, lost memory or a hang.

The rules apply to any sharded training; the functions in :data:`.rules.RULES` say what each demands, with V1 to V13 as
their stable numbers.

All rules hold before and after every pass. None judges the quality of a schedule. Some compare the graph with its state
before the passes (:class:`.Contract`). For hand-made graphs without a contract, those comparisons are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from torch import fx

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.schedule.phase import Phase

from ..context import Context, Report
from .analysis import Analysis
from .contract import contract_of
from .rules import RULES, Breach

_SHOWN = 5
_NOT_OF_MODELS = str(Path(compat.TORCH_FOLDER)), str(Path(compat.__file__).parents[1])


class ScheduleError(RuntimeError):
    """A graph breaks rules of sharded training. This is a bug in a pass, not in the model.

    Args:
        breaches: All breaches; not empty.
        context, phase: Context and phase of the graph.
        after: Name of the pass that was applied last; empty if unknown.
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
            + "\nThis is a bug in a pass, not in the model. If the pass is not yours, please report it, and run the "
            "model without torch.compile meanwhile."
        )


def verify(graph: fx.Graph, context: Context, phase: Phase, *, after: str = "") -> Report:
    """Check a graph with sharded parameters against the rules V1 to V13, without changing it.

    It takes the arguments of a pass, so a user pass can call it. It also runs after every user pass.

    Args:
        graph: A forward, backward or inference graph, before or after any pass.
        context: Context of the graph.
        phase: Phase of the graph.
        after: Name of the pass that was applied last, for the message.

    Raises:
        ScheduleError: The graph breaks a rule. The message names the broken rules with the unit, the bucket, the
            parameter if there is one, the node, and the line of the model that the node comes from.
    """
    found = Analysis(graph, context, phase)
    if broken := _check(found):
        raise ScheduleError(broken, context, phase, after)
    gathers = sum(launch.gathers for launch in found.launches)
    return Report(
        "verify", [f"{phase.value}: {gathers} gathers and {len(found.reductions)} reductions, all rules hold"]
    )


def breaches(graph: fx.Graph, context: Context, phase: Phase) -> list[Breach]:
    """Return all breaches, in the order of the rules; empty if there are none."""
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
    """Return the line of the model that a node comes from, or that the nearest node with a line comes from."""
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
