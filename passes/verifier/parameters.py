"""Rules for gathered parameters: awaited, released, apart from one another, and not saved."""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from mfsdp_compile.runtime.schedule.phase import Phase

from .. import roles
from ..context import NodeKind, role_of
from .analysis import RELEASE, Analysis, Findings, arguments, landing, tensor_of, whole_operands
from .contract import Contract


def awaited_before_use(found: Analysis, _: Contract | None) -> Findings:
    """A gathered bucket is awaited before anything reads it or a view of it.

    Residents, which stay gathered between uses, are awaited too. Shards are not read as parameters. No shell is left in
    the graph, because shells have no memory.
    """
    order = found.order
    for launch in found.gather_launches:
        for reader in launch.readers:
            yield f"{reader} reads it unawaited", reader, launch.bucket, found.parameter(launch.bucket, reader)
        if not launch.waits and not launch.readers:
            yield "nothing awaits its gather", launch.node, launch.bucket
        for wait in launch.waits:
            if order[wait] < order[launch.node]:
                yield "it is awaited before its gather starts", wait, launch.bucket
    for whole in found.wholes:
        bucket, exchange = whole.bucket, found.info(whole.bucket).exchange
        if whole.launch is not None and whole.launch.bucket != bucket:
            other = found.info(whole.launch.bucket).name
            yield f"what is awaited for it is the gather of {other!r}", whole.node, bucket
        if whole.node.op == "placeholder":
            # A bucket that forward kept is an input of the backward.
            value, numel = tensor_of(whole.node), found.info(bucket).layout.numel
            partial = value is not None and value.numel() != numel
            kept = found.phase is Phase.BACKWARD and bool(exchange.gather_group)
            is_awaited = found.info(bucket).has_resident and not exchange.lane.has_local_copy
            if partial or (not kept and (exchange.gather_group or is_awaited)):
                yield f"views are taken of {whole.node} itself", whole.node, bucket
            continue
        for node in landing(whole):
            if order[node] < max(order[source] for source in node.all_input_nodes):
                yield f"{node} runs before what it reads", node, bucket
        if whole.launch is None and exchange.gather_group:
            yield f"{whole.node} is read, which no gather has made whole", whole.node, bucket
        for node in (*whole.aliases, *whole.casts, *whole.copies, *whole.uses):
            if node is not whole.node and order[node] < order[whole.node]:
                yield f"{node} reads it before its wait", node, bucket, found.parameter(bucket, node)
    for call in roles.region_calls(found.graph):
        for bucket, operand in whole_operands(call):
            if operand not in found.whole_of:
                yield f"{call} reads {operand}, which is not gathered", call, bucket
    for node in found.graph.nodes:
        if (role := role_of(node)) is None:
            continue
        if role.kind is NodeKind.SHELL:
            yield "a shell is left in the graph", node, role.bucket
        info = found.info(role.bucket)
        if role.kind is NodeKind.SHARD and info.has_resident and not info.exchange.lane.has_local_copy:
            for user in node.users:
                if roles.is_view(user) and user not in found.whole_of:
                    yield f"{user} reads what stays gathered unawaited", user, role.bucket
        if role.kind is NodeKind.VIEW:
            source = node.all_input_nodes[0]
            of, source_role = found.whole_of.get(source), role_of(source)
            if of is None and source_role and source_role.kind in (NodeKind.VIEW, NodeKind.START_GATHER):
                continue  # already reported
            if of is None:
                yield f"{node} is a view of {source}, which is not gathered", node, role.bucket
            elif of.bucket != role.bucket:
                name = found.parameter(of.bucket, node)
                yield f"{node} is a view of {found.info(of.bucket).name!r} instead", node, role.bucket, name


def released_after_use(found: Analysis, _: Contract | None) -> Findings:
    """A bucket is gathered once in a graph and read, and its memory is released at most once, after its last read.

    The last read of a gathered bucket releases it. A pass may release it explicitly with ``resize_storage_bytes_``, but
    not before its wait, and not if the memory belongs to the runtime (residents, and buckets that forward kept).
    """
    seen: set[int] = set()
    for whole in found.wholes:
        if whole.bucket in seen:
            yield "it is gathered twice, and two of it are in memory", whole.node, whole.bucket
        seen.add(whole.bucket)
        if whole.launch is not None and not whole.uses:
            yield "it is gathered and never read", whole.node, whole.bucket
    places = [(found.memory(whole.node), whole) for whole in found.wholes]
    released: set[fx.Node] = set()
    for node in found.graph.find_nodes(op="call_function", target=RELEASE):
        memory, at = found.memory(node.all_input_nodes[0]), found.order[node]
        for whole in found.wholes:
            received = whole.launch.node if whole.launch is not None else whole.node
            if at < found.order[whole.node] and found.memory(received).overlaps(memory):
                yield "it is released before it is awaited", node, whole.bucket
        for place, whole in places:
            if not place.overlaps(memory):
                continue
            if memory.root in released:
                yield "it is released a second time", node, whole.bucket
            if memory.root.op == "placeholder":
                yield "what is released is not the graph's own", node, whole.bucket
            for read in whole.reads:
                if found.order[read] > at and read is not node and read.target is not RELEASE:
                    yield f"{read} reads it after its release", read, whole.bucket, found.parameter(whole.bucket, read)
                    break
        released.add(memory.root)


def memory_apart(found: Analysis, _: Contract | None) -> Findings:
    """Gathered buckets that are in use at the same time never share memory, and nothing else is written there.

    This matters for collectives that write into buffers provided by a pass (``all_gather_into_tensor_out``), and for
    operators that write in place. A communication buffer is handed out only while nothing refers to it, so any two
    gathers into buffers are apart, but a bucket must not go into buffers of another size. Portions are not written to
    either until the backward has gathered them.
    """
    places = [(found.memory(whole.node), *found.live(whole), whole) for whole in found.wholes]
    for whole in found.wholes:
        # What a bucket is made from is in memory of its own.
        received = found.memory(whole.launch.node) if whole.launch is not None else None
        if whole.launch is not None and received is not None and received.root is not found.memory(whole.node).root:
            places.append((received, found.order[whole.launch.node], found.order[whole.node], whole))
    by_root: dict[fx.Node, list[Any]] = {}
    for place in places:
        by_root.setdefault(place[0].root, []).append(place)
    for sharing in by_root.values():
        for i, (memory, start, end, whole) in enumerate(sharing):
            for other_memory, other_start, other_end, other in sharing[:i]:
                if memory.overlaps(other_memory) and start <= other_end and other_start <= end:
                    what = f"it is gathered into memory where {found.info(other.bucket).name!r} is still in use"
                    yield what, whole.node, whole.bucket
    for launch in found.gather_launches:
        out = arguments(launch.node).get("out")
        role = role_of(found.memory(out).root) if out is not None else None
        if role is not None and role.kind in (NodeKind.SHARD, NodeKind.SCALES):
            yield "it is gathered into memory of the runtime", launch.node, launch.bucket
        if launch.node.target is roles.GATHER_INTO_BUFFER:
            capacity, right = launch.node.args[1], found.info(launch.bucket).exchange.gather_buffers.capacity
            if capacity != right:
                what = f"it is gathered into a communication buffer of {capacity} elements, not {right}"
                yield what, launch.node, launch.bucket
    for pack, bucket in roles.packs(found.graph):
        capacity = pack.args[4] if pack.target is not operator.getitem and len(pack.args) > 4 else None
        if capacity is not None and capacity != (right := found.info(bucket).exchange.gradient_buffers.capacity):
            what = f"its gradients are packed in a communication buffer of {capacity} elements, not {right}"
            yield what, pack, bucket
    for node, memory in found.writes:
        at = found.order[node]
        role = role_of(memory.root)
        if role is not None and role.kind is NodeKind.PORTION and at < found.needed_until(memory.root):
            yield f"{node} writes to the portion of it", node, role.bucket
        for place in by_root.get(memory.root, ()):
            if place[0].overlaps(memory) and found.order[place[3].node] < at and at <= place[2]:
                yield f"{node} writes to it while it is in use", node, place[3].bucket


def not_saved(found: Analysis, contract: Contract | None) -> Findings:
    """No gathered bucket, view or cast of one is saved for backward or returned, unless the model itself returns it.

    Whole buckets may be saved if they were chosen to stay gathered, and portions if they were chosen to be kept.
    """
    before: set[str | None] = {output.name for output in contract.outputs} if contract is not None else set()
    own = contract.user_outputs if contract is not None else 0
    policy, buckets = found.context.policy, found.context.buckets
    may_keep = policy.keep_last or policy.reshard_after_forward is not True or any(info.stays for info in buckets)
    started = {launch.node: launch for launch in found.launches if launch.gathers}
    gathered = [whole for whole in found.wholes if whole.launch is not None]
    landed = {
        node: whole.bucket
        for whole in gathered
        for node in (*whole.launch.waits, *landing(whole))  # type: ignore[union-attr]
        if node is not whole.node
    }
    for position, value in enumerate(found.outputs):
        whole = found.whole_of.get(value)
        saved = found.phase is Phase.FORWARD and position >= own
        if (launch := started.get(value)) is not None:
            yield f"output {position} is its unawaited gather", value, launch.bucket
        if (bucket := landed.get(value)) is not None:
            yield f"{value}, from which it is made, is {'saved for backward' if saved else 'returned'}", value, bucket
        portion = found.portion_of.get(value)
        if portion is not None and not (saved and contract is not None and portion.bucket in contract.portions):
            yield f"its portion {value} is {'saved for backward' if saved else 'returned'}", value, portion.bucket
        if whole is None or value.op == "placeholder" or not (saved or contract is None or value.name not in before):
            continue
        if value in whole.copies and value.name in before:
            continue  # a copy made by the model
        decided = may_keep if contract is None else whole.bucket in contract.kept and value.name in before
        if not (saved and decided and value is whole.node and whole.launch is not None and found.context.whole_model):
            what = "saved for backward" if saved else "returned"
            yield f"{value} is {what}", value, whole.bucket, found.parameter(whole.bucket, value)
