"""The last word on a scheduled graph: rules whose breach would mean wrong gradients, lost memory or a hang.

Needs: roles. Changes nothing; raises :class:`ScheduleError` that names the rule, the bucket, the node and the line of
the model.
"""

from __future__ import annotations

import re
from collections import Counter

from torch import fx

from . import roles
from .context import Context, Kind, Phase, Report, role_of

__all__ = ["ScheduleError", "apply"]


class ScheduleError(RuntimeError):
    """A graph breaks a rule of sharded training. A bug in a pass, not in the model."""


def apply(graph: fx.Graph, context: Context, phase: Phase, user_outputs: int = 0) -> Report:
    """Check a graph. ``user_outputs``: how many of a forward graph's outputs the model itself returns, first ones; it
    may return a parameter."""
    saved = set(_outputs(graph)[user_outputs:]) if phase is Phase.FORWARD else set()
    order = {node: position for position, node in enumerate(graph.nodes)}
    gathers, reductions = roles.gathers(graph), roles.reductions(graph)

    seen: set[int] = set()
    for gather in gathers:
        if gather.bucket in seen:
            raise _breach("gathered once", "its bucket is gathered twice", gather.bucket, gather.nodes[0], context)
        seen.add(gather.bucket)
        for user in gather.start.users if gather.start is not None else ():
            if user is not gather.whole:
                raise _breach("awaited before use", f"{user} reads it unawaited", gather.bucket, user, context)
        for node in gather.uses:
            if gather.whole is not None and order[node] < order[gather.whole]:
                raise _breach("awaited before use", "it is read before its wait", gather.bucket, node, context)
        for node in gather.nodes:
            if node in saved and not _is_kept(node, context):
                raise _breach("not saved", "a gathered parameter is saved for backward", gather.bucket, node, context)

    reduced: set[int] = set()
    for reduction in reductions:
        info = context.buckets[reduction.bucket]
        if phase is not Phase.BACKWARD:
            raise _breach(
                "reduced in backward", f"a {phase.value} graph reduces", reduction.bucket, reduction.pack, context
            )
        if reduction.bucket in reduced:
            raise _breach("reduced once", "its bucket is reduced twice", reduction.bucket, reduction.start, context)
        reduced.add(reduction.bucket)
        if not info.trainable:
            raise _breach("only trainable", "a frozen bucket is reduced", reduction.bucket, reduction.start, context)
        offsets = Counter(reduction.pack.args[1])  # type: ignore[arg-type]
        expected = Counter(slot.offset for slot in info.layout.slots)
        if not offsets <= expected or reduction.pack.args[2] != info.layout.numel:
            raise _breach(
                "packed in place",
                f"gradients are packed at {sorted(offsets)}",
                reduction.bucket,
                reduction.pack,
                context,
            )
        if reduction.pack.args[3] is not info.exchange.comm_dtype:
            what = f"gradients are packed in {reduction.pack.args[3]}, to be reduced in {info.exchange.comm_dtype}"
            raise _breach("packed in the dtype of reduction", what, reduction.bucket, reduction.pack, context)
        if graph.output_node() not in (reduction.after[-1] if reduction.after else reduction.wait).users:
            raise _breach(
                "gradient returned", "the reduced gradient is lost", reduction.bucket, reduction.wait, context
            )
        if len(reduction.stages) != len(info.exchange.groups):
            what = f"{len(reduction.stages)} of {len(info.exchange.groups)} stages of its reduction are there"
            raise _breach("reduced over all ranks", what, reduction.bucket, reduction.start, context)
        for stage, (start, _) in enumerate(reduction.stages):
            if info.exchange.reduce_op not in start.args or info.exchange.groups[stage] not in start.args:
                what = f"stage {stage + 1} is reduced with {start.args[1:]}"
                raise _breach("scaled right", what, reduction.bucket, start, context)

    for node in graph.nodes:
        role = role_of(node)
        if role is not None and role.kind in (Kind.SHELL,):
            raise _breach("no shells", "a shell is left in the graph", role.bucket, node, context)
    return Report("verify", [f"{phase.value}: {len(gathers)} gathers and {len(reductions)} reductions, all rules hold"])


def _outputs(graph: fx.Graph) -> list[fx.Node]:
    """What a graph returns, in order; None and constants too, so that positions count."""
    (values,) = graph.output_node().args
    return list(values) if isinstance(values, (list, tuple)) else [values]  # type: ignore[list-item]


def _is_kept(node: fx.Node, context: Context) -> bool:
    """The one bucket that a whole model's forward may hand to its backward, as a whole."""
    role = role_of(node)
    return context.whole_model and context.policy.keep_last and role is not None and role.kind is Kind.GATHERED


def _breach(rule: str, what: str, bucket: int, node: fx.Node, context: Context) -> ScheduleError:
    info = context.buckets[bucket]
    return ScheduleError(
        f"rule '{rule}': {what}. Bucket {info.name!r} of unit {info.unit!r}, node {node.format_node()}"
        f"{_source_line(node)}. This is a bug in a pass: please report it, and use options={{'inner': 'aot_eager'}} or "
        "the eager path meanwhile."
    )


def _source_line(node: fx.Node) -> str:
    trace = node.meta.get("stack_trace") or ""
    lines = re.findall(r'File "([^"]+)", line (\d+)', trace)
    return f", from {lines[-1][0]}:{lines[-1][1]}" if lines else ""
