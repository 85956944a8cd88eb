"""The rule for local stages: those of a bucket's lane, and copies of saved values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mfsdp_compile.runtime.lanes.lane import Lane, Place
from mfsdp_compile.runtime.lanes.stage import Call

from .. import roles
from .analysis import Analysis, CollectiveNode, Findings, ReductionFlow
from .contract import Contract, is_of_portions

_aten = torch.ops.aten
_INLINED = (*roles.CASTS, _aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar)


def right_stages(found: Analysis, contract: Contract | None) -> Findings:
    """Local stages are those of the bucket's lane, in its order, such as encoders, and copies from and to host memory.

    Casts and scales, which are operators of torch, stand between the right neighbors; other rules say which they are.
    Portions pass none. Copies of saved values are awaited once; see :mod:`.host_memory`.
    """
    if found.context.policy.activation_offload:
        from .host_memory import copied_once

        yield from copied_once(found)
    for launch in found.gather_launches:
        lane, front = found.info(launch.bucket).exchange.lane, launch.node.all_input_nodes[:1]
        places, at = lane.places("use"), lane.gather
        if is_of_portions(found, contract, launch):
            places, at = [], None
        yield from _of_gather(front, launch, lane, places[:at])
        if at is not None:
            wholes = [whole.node for whole in found.wholes if whole.launch is launch]
            yield from _of_gather(wholes, launch, lane, places[at + 1 :])
    for reduction in found.reductions:
        lane = found.info(reduction.bucket).exchange.lane
        if len(reduction.stages) == len(lane.reduction):  # otherwise another rule says so
            yield from _of_reduction(reduction, lane)


def _of_gather(ends: Sequence[fx.Node], launch: CollectiveNode, lane: Lane, places: Sequence[Place]) -> Findings:
    """Check what is between nodes and the wait, or the graph's input, that they are made from."""
    for node in ends:
        passed: list[fx.Node] = []
        while node.op == "call_function" and node.target not in roles.WAITS and node.all_input_nodes:
            passed.insert(0, node)
            node = node.all_input_nodes[0]
        if (problem := _difference(lane, places, passed, (*_INLINED, _aten.clone.default))) is not None:
            side = "in front of" if launch.node in ends[0].users else "behind"
            yield f"{side} its gather, {problem}", launch.node, launch.bucket


def _of_reduction(reduction: ReductionFlow, lane: Lane) -> Findings:
    ways = [(*reduction.before, after) for _, after in reduction.returned] if reduction.stages else []
    for way in ways or [reduction.before]:
        for number, passed in enumerate(way):
            places = [*(lane.reduction[number - 1].after if number else lane.places("pack"))]
            if number < len(lane.reduction):
                places += lane.reduction[number].ungated
            else:
                places += [*lane.unreduced, *lane.places("rest")]
            if (problem := _difference(lane, places, passed, _INLINED)) is not None:
                node = next((node for node in passed if roles.is_local_stage(node)), reduction.last)
                where = f"behind collective {number}" if number else "in front of the first collective"
                yield f"{where}, {problem}", node, reduction.bucket


def _difference(lane: Lane, places: Sequence[Place], nodes: Sequence[fx.Node], computing: Sequence[Any]) -> str | None:
    """Say how nodes differ from local stages of a lane; None: they do not.

    Args:
        computing: Operators that are found only where the lane has inlined stages.
    """
    right, inlined = list[Call](), [False]
    for part, index in places:
        if lane[part][index].inlined:
            inlined[-1] = True
        else:
            right.append(lane.local_call(part, index))
            inlined.append(False)
    if (got := [_run(node) for node in nodes if roles.is_local_stage(node)]) != right:
        return f"the stages {_texts(got)} run, not {_texts(right)}"
    passed = 0
    for node in nodes:
        if roles.is_local_stage(node):
            passed += 1
        elif (node.target in computing or (passed and node.target is _aten.clone.default)) and not inlined[passed]:
            return f"{node} computes where its lane does not"
    return None


def _run(node: fx.Node) -> Call:
    """Return the operator with which a node runs a local stage, and its arguments."""
    return node.target, tuple(node.args[2 if node.target is roles.RUN_STAGE or roles.takes_scales(node) else 1 :])


def _texts(calls: Sequence[Call]) -> str:
    return ", ".join(f"{operator._opname}{arguments}" for operator, arguments in calls) or "(none)"
