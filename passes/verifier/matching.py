"""The rule that what goes into and out of a graph matches its buckets, and what was recorded before the passes."""

from __future__ import annotations

import operator

from torch import fx

from mfsdp_compile.runtime.lanes.plain import Cast
from mfsdp_compile.runtime.schedule.phase import Phase

from .. import roles
from ..context import NodeKind, role_of
from .analysis import Analysis, Findings, landing, tensor_of, whole_operands
from .contract import Contract, GraphOutput, calls_of, is_of_portions, reads_of, scales_of

_SOURCES = (NodeKind.SHARD, NodeKind.PORTION)


def shards_match(found: Analysis, contract: Contract | None) -> Findings:
    """The optimizer's shards match the graph: a shard and its gradient have the same position, elements and dtype.

    A bucket is gathered from its own shard, or what stays of it, in the size and dtype of its lane; or from its own
    portion if one was kept. It is dequantized with its own scales. If modules take the bytes, they take the bucket's
    own scales, those of the parameters that they read. Parameters are read at their offsets in the bucket. Gradients
    are packed in the dtype of their reduction. Every output keeps its position, shape and dtype.
    """
    for launch in found.gather_launches:
        info, value = found.info(launch.bucket), tensor_of(launch.node)
        role, of_portions = role_of(found.memory(launch.source).root), is_of_portions(found, contract, launch)
        lane = info.exchange.lane
        numel, dtype = info.layout.numel, info.exchange.held_dtype
        if lane.gather is not None and not of_portions:
            numel, dtype, _ = lane.flight_spec("use", lane.gather)
        if role is not None and role.kind in _SOURCES and role.bucket != launch.bucket:
            what = f"{role.kind.value} of {found.info(role.bucket).name!r}"
            yield f"it is gathered from the {what}", launch.node, launch.bucket
        elif role is not None and (role.kind is NodeKind.PORTION) != of_portions:
            yield f"it is gathered from its {role.kind.value}", launch.node, launch.bucket
        casts = {info.exchange.dtype, *(stage.dtype for stage in lane.use if isinstance(stage, Cast))}
        for cast in launch.casts:
            if (cast_to := tensor_of(cast)) is not None and cast_to.dtype not in casts:
                yield f"it is cast to {cast_to.dtype} before it is sent", cast, launch.bucket
        if value is not None and (value.dtype, value.numel()) != (dtype, numel):
            what = f"it is gathered as {value.numel()} elements of {value.dtype}, not {numel} of {dtype}"
            yield what, launch.node, launch.bucket
    for portion in found.portions:
        if portion.whole is None or portion.whole.bucket != portion.bucket:
            other = repr(found.info(portion.whole.bucket).name) if portion.whole is not None else "no gathered bucket"
            yield f"its portion {portion.node} is one of {other}", portion.node, portion.bucket
    if contract is not None and found.phase is Phase.FORWARD:
        saved = {portion.bucket for portion in found.portions if portion.node in found.outputs}
        for bucket in contract.portions - saved:
            yield "its portion is not saved for backward", found.graph.output_node(), bucket
    for whole in found.wholes:
        for node in filter(roles.takes_scales, landing(whole)):
            role = role_of(node.args[1])  # type: ignore[arg-type]
            if role is None or role.kind is not NodeKind.SCALES:
                yield f"{node} decodes it with {node.args[1]}, which are no scales", node, whole.bucket
            elif role.bucket != whole.bucket:
                yield f"{node} decodes it with the scales of {found.info(role.bucket).name!r}", node, whole.bucket
    yield from _scales(found, contract)
    all_reads = reads_of(found) if contract is not None else {}
    for whole in found.wholes:
        slots = {(slot.offset, slot.end): slot for slot in found.info(whole.bucket).layout.slots}
        for node, part in found.slices(whole):
            if part not in slots:
                yield f"elements {part[0]} to {part[1]} are no parameter", node, whole.bucket
        before, now = (contract.reads.get(whole.bucket) if contract else None), all_reads.get(whole.bucket)
        if before and now and before.total() == now.total() and before != now:
            lost, new = (min(changed, default=None) for changed in (before - now, now - before))
            name = slots[lost].name if lost in slots else None
            yield f"elements {new} are read in its place", whole.node, whole.bucket, name
    for reduction in found.reductions:
        if (pack := reduction.pack) is None:
            continue
        info = found.info(reduction.bucket)
        value = tensor_of(pack)
        is_inside = pack.target is operator.getitem and value is not None
        got = (value.numel(), value.dtype) if is_inside else tuple(pack.args[2:4])  # type: ignore[union-attr]
        if got != (expected := (info.layout.numel, info.exchange.comm_dtype)):
            yield f"gradients are packed into {got}, not {expected} (elements, dtype)", pack, reduction.bucket
    for call in roles.region_calls(found.graph):
        for bucket, operand in whole_operands(call):
            of = found.whole_of.get(operand)
            if of is not None and of.bucket != bucket:
                yield f"{call} reads {found.info(of.bucket).name!r} in its place", call, bucket
            elif of is not None and (value := tensor_of(operand)) is not None:
                if operand not in of.aliases and operand is not of.node:
                    yield f"{call} reads a copy of it, {operand}", call, bucket
                elif value.numel() != found.info(bucket).layout.numel:
                    yield f"{call} reads only {operand}", call, bucket
    if contract is not None:
        calls = calls_of(found.graph)
        for call in roles.region_calls(found.graph):
            if (was := contract.calls.get(call.name)) is not None and was != calls[call.name]:
                yield f"{call} runs {calls[call.name]} instead of {was}", call, *call.meta["custom"][roles.REGION][:1]
        yield from _outputs(found, contract)


def _scales(found: Analysis, contract: Contract | None) -> Findings:
    """Check the scales of parameters that modules take as they were gathered."""
    for bucket, node, part in found.scale_slices:
        role = role_of(node.all_input_nodes[0])
        if role is None or role.kind is not NodeKind.SCALES:
            yield f"{node} takes its scales from {node.all_input_nodes[0]}, which are no scales", node, bucket
        elif role.bucket != bucket:
            yield f"{node} takes the scales of {found.info(role.bucket).name!r}", node, bucket
        if part not in found.scale_parts(bucket):
            yield f"{node}: scales {part[0]} to {part[1]} are those of no parameter", node, bucket
    for call in roles.region_calls(found.graph):
        for number, position in roles.body_of(call).meta["mfsdp_scales"].items():
            bucket, scales = call.meta["custom"][roles.REGION][number], call.args[position]
            role = role_of(scales) if isinstance(scales, fx.Node) else None
            if role is None or role.kind is not NodeKind.SCALES or role.bucket != bucket:
                yield f"{call} takes {scales} for its scales", call, bucket
    now = scales_of(found) if contract is not None else {}
    for bucket, before in (contract.scales if contract is not None else {}).items():
        if (reads := now.get(bucket, before)) != before and reads.total() == before.total():
            first = next(node for of, node, part in found.scale_slices if of == bucket and part in reads - before)
            yield f"{first} takes the scales of another parameter", first, bucket


def _outputs(found: Analysis, contract: Contract) -> Findings:
    end = found.graph.output_node()
    inputs = tuple(node.name for node in found.graph.nodes if node.op == "placeholder")
    if inputs != contract.inputs:
        yield f"the graph's inputs are {', '.join(inputs)}; they were {', '.join(contract.inputs)}", end
    if len(found.outputs) != len(contract.outputs):
        yield f"the graph returns {len(found.outputs)} values; it returned {len(contract.outputs)}", end
    buckets = {position: bucket for bucket, position in contract.returned.items()}
    returned = {position: r.bucket for r in found.reductions for position, _ in r.returned}
    names = {node.name for node in found.graph.nodes}
    for position, (value, was) in enumerate(zip(found.outputs, contract.outputs, strict=False)):
        now, node = GraphOutput.of(value), value if isinstance(value, fx.Node) else end
        bucket = buckets.get(position)
        if returned.get(position) != bucket and position in returned:
            place = f"for the shard of {found.info(bucket).name!r}" if bucket is not None else f"as output {position}"
            yield f"its gradient is returned {place}", node, returned[position]
        elif position not in returned and (now.name is None) != (was.name is None):
            yield f"output {position} is {now.name}; it was {was.name}", node, bucket
        elif position not in returned and now.name != was.name and (was.name in names or bucket is not None):
            yield f"{now.name} is returned where {was.name} belongs", node, bucket
        elif now.value and was.value and not _same_value(now.value, was.value):
            yield f"output {position} is {now.value}; it was {was.value}", node, bucket


def _same_value(now: str, was: str) -> bool:
    """Whether two outputs have the same dtype and shape. Inductor finds out sizes that were unknown before."""
    (dtype, sizes), (old, old_sizes) = (text.split(" ", 1) for text in (now, was))
    lengths, before = (text.strip("[]").split(", ") for text in (sizes, old_sizes))
    return (dtype, len(lengths)) == (old, len(before)) and all(
        a == b or (a.isdigit() and not b.isdigit()) for a, b in zip(lengths, before, strict=True)
    )
