"""Rules for gradients: reduced once, complete, and scaled right."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping

import torch
from torch import fx

from mfsdp_compile.runtime.schedule.phase import Phase

from .. import roles
from ..context import role_of
from ..deliver import bucket_at_rest, readers_at_rest
from .analysis import Analysis, Findings, ReductionFlow, tensor_of
from .collectives import other_waits
from .contract import Contract, Gradient, gradients_of, packed

_aten = torch.ops.aten


def reduced_once(found: Analysis, contract: Contract | None) -> Findings:
    """Each trainable element is reduced exactly once in a backward and returned; frozen elements never are."""
    seen: set[int] = set()
    for reduction in found.reductions:
        bucket, node, info = reduction.bucket, reduction.first, found.info(reduction.bucket)
        if found.phase not in (Phase.BACKWARD, Phase.JOINT):
            yield f"the {found.phase.value} graph reduces gradients", node, bucket
        if not info.trainable:
            yield "it is frozen, and is reduced", node, bucket
        if bucket in seen:
            yield "it is reduced twice", node, bucket
        seen.add(bucket)
        if not reduction.returned:
            yield "its reduced gradient is lost", reduction.last, bucket
        if reduction.pack is not None:
            yield from _places(found, contract, reduction.pack, bucket)
    for bucket in (contract.gradients if contract is not None else {}).keys() - seen:
        yield "its gradients are not reduced any more", found.graph.output_node(), bucket


def _expected(contract: Contract | None, bucket: int) -> Mapping[int, Gradient]:
    """Return a bucket's gradients before the passes, by index of the parameter; empty for graphs without a contract."""
    return contract.gradients.get(bucket, {}) if contract is not None else {}


def _places(found: Analysis, contract: Contract | None, pack: fx.Node, bucket: int) -> Findings:
    """Check that each gradient is packed in its parameter's slot, and in no other slot.

    What a region packs is checked in the region's own graph.
    """
    if pack.target is operator.getitem:
        return
    slots = found.info(bucket).layout.slots
    expected = _expected(contract, bucket)
    index_of = {gradient.name: index for index, gradient in expected.items()}
    there: set[int] = set()
    offsets: list[int] = list(pack.args[1])  # type: ignore[arg-type]
    for (gradient, index), offset in zip(packed(pack, found.info(bucket).layout), offsets, strict=False):
        if index is None:
            yield f"{gradient} is packed at {offset}, where no parameter is that lacks a gradient", pack, bucket
            continue
        there.add(index)
        name, value = slots[index].name, tensor_of(gradient)
        if value is not None and value.numel() != slots[index].numel:
            yield f"{gradient}, packed for it, has {value.numel()} elements", pack, bucket, name
        elif gradient.name in index_of and expected.get(index) != expected[index_of[gradient.name]]:
            of = slots[index_of[gradient.name]].name
            yield f"{gradient}, the gradient of {of}, is packed for it", pack, bucket, name
    if offsets != sorted(offsets):
        yield "gradients are not packed in order", pack, bucket
    for index in expected.keys() - there:
        yield "its gradient is lost", pack, bucket, slots[index].name


def reduced_complete(found: Analysis, contract: Contract | None) -> Findings:
    """A reduction starts from the packed gradients of its bucket, after all contributions to them.

    Each gradient is the same as before the passes: a sum of at least as many terms (one per use of a tied parameter)
    that depends on at least the same inputs.
    """
    order = found.order
    now, names = (gradients_of(found), {node.name for node in order}) if contract is not None else ({}, set())
    for reduction in found.reductions:
        first, bucket, slots = reduction.first, reduction.bucket, found.info(reduction.bucket).layout.slots
        if reduction.pack is None:
            yield f"the reduction reads {reduction.stages[0].input}, which is not packed", first, bucket
            continue
        role = role_of(reduction.pack)
        if role is not None and role.bucket != bucket:
            yield f"the gradients of {found.info(role.bucket).name!r} are reduced for it", first, bucket
            continue
        for node in (reduction.pack, *reduction.before[0], first):
            for source in node.all_input_nodes:
                if order[source] > order[node]:
                    yield f"{node} does not wait for {source}", node, bucket
        expected = _expected(contract, bucket)
        for index, gradient in now.get(bucket, {}).items():
            was, name = expected.get(index), slots[index].name
            if was is None or gradient.name in {other.name for other in expected.values()} - {was.name}:
                continue  # covered by rule V4
            if gradient.terms < was.terms:
                what = f"{gradient.name} is the sum of {gradient.terms} terms, of {was.terms} that there were"
                yield what, reduction.pack, bucket, name
            elif lost := was.inputs & ~gradient.inputs:
                source = contract.inputs[lost.bit_length() - 1] if contract is not None else ""
                yield f"{gradient.name} does not depend on {source} any more", reduction.pack, bucket, name
            elif was.name in names and was.name not in {gradient.name, *gradient.made_of}:
                yield f"{gradient.name} is packed where {was.name} belongs", reduction.pack, bucket, name


def scaled_right(found: Analysis, contract: Contract | None) -> Findings:
    """Each bucket is summed over all its ranks and microbatches, and scaled once by the factor of its lane.

    Stages that are deferred run only in the last microbatch, with the accumulated sum of this bucket. Gradients in
    float16 are scaled before they are summed in it.
    """
    for reduction in found.reductions:
        bucket, lane = reduction.bucket, found.info(reduction.bucket).exchange.lane
        for i, (launch, flight) in enumerate(zip(reduction.stages, lane.reduction, strict=False)):
            operator, expected = lane.operator(flight)
            if (launch.node.target is roles.REDUCE_IF_DUE) != (operator is roles.REDUCE_IF_DUE):
                when = ("in each backward", "if due")
                runs = when[launch.node.target is roles.REDUCE_IF_DUE], when[operator is roles.REDUCE_IF_DUE]
                yield f"stage {i + 1} runs {runs[0]}, not {runs[1]}", launch.node, bucket
            ops = [[given for given in given_ if given in ("sum", "avg")] for given_ in (launch.node.args, expected)]
            if ops[0] != ops[1]:
                yield f"stage {i + 1} is of {ops[0]}, not {ops[1]}", launch.node, bucket
            token = roles.token_of(launch.node)
            role = role_of(token) if token is not None else None
            if role is not None and role.bucket != bucket:
                yield f"the sum over microbatches of {found.info(role.bucket).name!r} is reduced", launch.node, bucket
        for launch, flight in zip(reduction.stages, lane.reduction, strict=False):
            what = f"stage {flight.index} of {flight.part!r}"
            yield from other_waits(what, launch, lane, flight.part, flight.index)
        for _, after in reduction.returned:
            yield from _factors(found, reduction, after)
        names = {gradient.name for gradient in _expected(contract, bucket).values()}
        layout = found.info(bucket).layout
        for gradient, index in packed(reduction.pack, layout) if reduction.pack is not None else ():
            node, factor = gradient, 1.0
            while node.name not in names and len(node.all_input_nodes) == 1:
                factor *= _factor(node) or 1.0
                node = node.all_input_nodes[0]
            if node.name in names and not math.isclose(factor, 1, rel_tol=1e-6):
                name = layout.slots[index].name if index is not None else None
                yield f"{gradient} is {factor} times the gradient {node}", gradient, bucket, name


def delivered_after_use(found: Analysis, contract: Contract | None) -> Findings:
    """A backward that delivers gradients early delivers each once, whole and scaled, to its own bucket.

    A step over the bucket may follow at once, so nothing reads the bucket at rest afterwards.
    """
    if not found.context.delivers_early or found.phase is not Phase.BACKWARD:
        return
    seen: set[int] = set()
    for node in found.graph.find_nodes(op="call_function", target=roles.DELIVER):
        bucket = node.args[2]
        if bucket in seen:
            yield "its gradient is delivered twice", node, bucket
        seen.add(bucket)
        rests = [n for n in found.graph.find_nodes(op="placeholder") if bucket_at_rest(n) == bucket]
        if list(node.args[1]) != rests:
            yield f"{node} is declared to write to {node.args[1]}, not to {rests}", node, bucket
        for reader in [reader for rest in rests for reader in readers_at_rest(rest) if reader is not node]:
            if found.order[reader] > found.order[node]:
                yield f"{reader} reads it at rest after its gradient was delivered by {node}", reader, bucket
    for reduction in found.reductions:
        for _, after in reduction.returned if reduction.stages else [(0, reduction.before[0])]:
            last = after[-1] if after else reduction.last
            if last.target is not roles.DELIVER:
                yield "its gradient is not delivered before the graph returns", reduction.last, reduction.bucket
            elif (to := last.args[2]) != reduction.bucket:
                yield f"its gradient is delivered to {found.info(to).name!r}", last, reduction.bucket


def _factors(found: Analysis, reduction: ReductionFlow, after: tuple[fx.Node, ...]) -> Findings:
    lane = found.info(reduction.bucket).exchange.lane
    inside = reduction.pack is not None and reduction.pack.target is operator.getitem  # a region has scaled it
    first = total = lane.packed_scale if inside else 1.0
    for node in (*reduction.before[0], None, *(n for nodes in reduction.before[1:] for n in nodes), *after):
        factor = _factor(node) if node is not None else 1.0
        if node is None:
            first = total
        elif factor is None:
            yield f"{node} changes the gradient", node, reduction.bucket
        else:
            total *= factor
    if not math.isclose(total, lane.scale, rel_tol=1e-6):
        yield f"the gradient is scaled by {total}, not {lane.scale}", reduction.last, reduction.bucket
    elif lane.pack and not math.isclose(first, lane.packed_scale, rel_tol=1e-6):
        what = f"{lane.packed.dtype} is summed before it is scaled, and may overflow"
        yield what, reduction.first, reduction.bucket


def _factor(node: fx.Node) -> float | None:
    """Return the factor by which a single-input operator scales its input; None if it does something else."""
    if (
        roles.is_view(node)
        or roles.is_local_stage(node)
        or node.target in (*roles.CASTS, _aten.clone.default, roles.DELIVER)
    ):
        return 1.0
    if node.target in (_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar) and len(node.args) == 2:
        number = next((value for value in node.args if isinstance(value, (int, float))), None)
        divides = node.target in (_aten.div.Tensor, _aten.div.Scalar)
        if number and not (divides and number is node.args[0]):
            return 1 / number if divides else float(number)
    return None
