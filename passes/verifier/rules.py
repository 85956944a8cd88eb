"""Rules for graphs with sharded parameters. Each rule inspects an :class:`Analysis` and yields what breaks it.

The rules only concern wrong results, lost memory and hangs. A slow schedule breaks none of them. Therefore they hold
before and after every pass.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from mfsdp_compile.runtime.formats import quantize
from mfsdp_compile.runtime.formats.fp8_linear import ALIGNMENT
from mfsdp_compile.runtime.geometry.exchange import When

from .. import roles
from ..context import NodeKind, region_of, role_of
from ..phase import Phase
from .analysis import RELEASE, Analysis, CollectiveNode, ReductionFlow, StorageRange, arguments, tensor_of
from .contract import Contract, GraphOutput, calls_of, gradients_of, packed, reads_of, scales_of

__all__ = ["RULES", "Breach", "Rule"]

_aten, _mfsdp = torch.ops.aten, torch.ops.mfsdp
_OPERATORS = {
    torch.ops._c10d_functional.reduce_scatter_tensor.default: "reduce_scatter",
    torch.ops._c10d_functional.all_reduce.default: "all_reduce",
}


@dataclass(frozen=True, eq=False)
class Breach:
    """A breach of a rule.

    Args:
        rule: Number of the rule, such as ``"V1"``.
        what: Description in one clause.
        node: Node that breaks the rule.
        bucket: Index of the affected bucket, if there is one.
        parameter: Name of the affected parameter, if there is one.
    """

    rule: str
    what: str
    node: fx.Node
    bucket: int | None = None
    parameter: str | None = None


Findings = Iterator[tuple[Any, ...]]
"""Findings of a rule: the arguments of :class:`Breach` after the first; bucket and parameter may be missing."""


@dataclass(frozen=True)
class Rule:
    """One of the rules.

    Args:
        number: Stable number such as ``"V1"``.
        name: Stable short name.
        check: Function that inspects a graph and yields findings.
    """

    number: str
    name: str
    check: Callable[[Analysis, Contract | None], Findings]

    def breaches(self, found: Analysis, contract: Contract | None) -> Iterator[Breach]:
        for finding in self.check(found, contract):
            yield Breach(self.number, *finding)


def _gathers(found: Analysis) -> Iterator[CollectiveNode]:
    return (launch for launch in found.launches if launch.gathers)


# -- parameters -------------------------------------------------------------------------------------------------------


def _awaited(found: Analysis, _: Contract | None) -> Findings:
    """A gathered bucket is awaited before anything reads it or a view of it.

    Residents, which stay gathered between uses, are awaited too. Shards are not read as parameters. No shell is left in
    the graph, because shells have no memory.
    """
    order = found.order
    for launch in _gathers(found):
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
            if partial or (not kept and (exchange.gather_group or found.info(bucket).has_resident)):
                yield f"views are taken of {whole.node} itself", whole.node, bucket
            continue
        if whole.launch is None and exchange.gather_group:
            yield f"{whole.node} is read, which no gather has made whole", whole.node, bucket
        for node in (*whole.aliases, *whole.casts, *whole.copies, *whole.uses):
            if node is not whole.node and order[node] < order[whole.node]:
                yield f"{node} reads it before its wait", node, bucket, found.parameter(bucket, node)
    for call in roles.region_calls(found.graph):
        for bucket, operand in _whole_operands(call):
            if operand not in found.whole_of:
                yield f"{call} reads {operand}, which is not gathered", call, bucket
    for node in found.graph.nodes:
        if (role := role_of(node)) is None:
            continue
        if role.kind is NodeKind.SHELL:
            yield "a shell is left in the graph", node, role.bucket
        if role.kind is NodeKind.SHARD and found.info(role.bucket).has_resident:
            for user in node.users:
                if roles.is_view(user) and user not in found.whole_of:
                    yield f"{user} reads what stays gathered unawaited", user, role.bucket
        if role.kind is NodeKind.VIEW:
            source = node.all_input_nodes[0]
            of, its = found.whole_of.get(source), role_of(source)
            if of is None and its is not None and its.kind in (NodeKind.VIEW, NodeKind.START_GATHER):
                continue  # already reported
            if of is None:
                yield f"{node} is a view of {source}, which is not gathered", node, role.bucket
            elif of.bucket != role.bucket:
                name = found.parameter(of.bucket, node)
                yield f"{node} is a view of {found.info(of.bucket).name!r} instead", node, role.bucket, name


def _whole_operands(call: fx.Node) -> Iterator[tuple[int, Any]]:
    """Yield the buckets that a region reads, each with the operand that must be it."""
    for number, position in roles.body_of(call).meta["mfsdp_wholes"].items():
        yield call.meta["custom"][roles.REGION][number], call.args[position]


def _released(found: Analysis, _: Contract | None) -> Findings:
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


def _apart(found: Analysis, _: Contract | None) -> Findings:
    """Gathered buckets that are in use at the same time never share memory, and nothing else is written there.

    This matters for collectives that write into buffers provided by a pass (``all_gather_into_tensor_out``), and for
    operators that write in place. A communication buffer is handed out only while nothing refers to it, so any two
    gathers into buffers are apart, but a bucket must not go into buffers of another size. Portions are not written to either until the backward has gathered them.
    """
    places = [(found.memory(whole.node), *found.live(whole), whole) for whole in found.wholes]
    for whole in found.wholes:
        if (
            whole.launch is not None and whole.node.target is roles.WAIT_QUANTIZED
        ):  # its bytes are in memory of their own
            flight = found.order[whole.launch.node], found.order[whole.node]
            places.append((found.memory(whole.launch.node), *flight, whole))
    by_root: dict[fx.Node, list[Any]] = {}
    for place in places:
        by_root.setdefault(place[0].root, []).append(place)
    for sharing in by_root.values():
        for i, (memory, start, end, whole) in enumerate(sharing):
            for other_memory, other_start, other_end, other in sharing[:i]:
                if memory.overlaps(other_memory) and start <= other_end and other_start <= end:
                    what = f"it is gathered into memory where {found.info(other.bucket).name!r} is still in use"
                    yield what, whole.node, whole.bucket
    for launch in _gathers(found):
        out = arguments(launch.node).get("out")
        role = role_of(found.memory(out).root) if out is not None else None
        if role is not None and role.kind in (NodeKind.SHARD, NodeKind.QUANTIZED, NodeKind.SCALES):
            yield "it is gathered into memory of the runtime", launch.node, launch.bucket
        if launch.node.target is roles.GATHER_INTO_BUFFER:
            capacity, wanted = launch.node.args[1], found.info(launch.bucket).exchange.gather_buffers.capacity
            if capacity != wanted:
                what = f"it is gathered into a communication buffer of {capacity} elements, not {wanted}"
                yield what, launch.node, launch.bucket
    for pack, bucket in roles.packs(found.graph):
        capacity = pack.args[4] if pack.target is not operator.getitem and len(pack.args) > 4 else None
        if capacity is not None and capacity != (wanted := found.info(bucket).exchange.gradient_buffers.capacity):
            what = f"its gradients are packed in a communication buffer of {capacity} elements, not {wanted}"
            yield what, pack, bucket
    for node, memory in found.writes:
        at = found.order[node]
        role = role_of(memory.root)
        if role is not None and role.kind is NodeKind.PORTION and at < found.needed_until(memory.root):
            yield f"{node} writes to the portion of it", node, role.bucket
        for place in by_root.get(memory.root, ()):
            if place[0].overlaps(memory) and found.order[place[3].node] < at and at <= place[2]:
                yield f"{node} writes to it while it is in use", node, place[3].bucket


# -- gradients --------------------------------------------------------------------------------------------------------


def _once(found: Analysis, contract: Contract | None) -> Findings:
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


def _places(found: Analysis, contract: Contract | None, pack: fx.Node, bucket: int) -> Findings:
    """Check that each gradient is packed in its parameter's slot, and in no other slot.

    What a region packs is checked in the region's own graph.
    """
    if pack.target is operator.getitem:
        return
    slots = found.info(bucket).layout.slots
    expected = contract.gradients.get(bucket, {}) if contract is not None else {}
    index_of = {gradient.name: index for index, gradient in expected.items()}
    there: set[int] = set()
    for (gradient, index), offset in zip(packed(pack, found.info(bucket).layout), pack.args[1], strict=False):  # type: ignore[arg-type]
        if index is None:
            yield f"{gradient} is packed at {offset}, where no parameter is that lacks a gradient", pack, bucket
            continue
        there.add(index)
        name, value = slots[index].name, tensor_of(gradient)
        if value is not None and value.numel() != slots[index].numel:
            yield f"{gradient}, packed for it, has {value.numel()} elements", pack, bucket, name
        elif gradient.name in index_of and expected.get(index) != expected[index_of[gradient.name]]:
            yield (
                f"{gradient}, the gradient of {slots[index_of[gradient.name]].name}, is packed for it",
                pack,
                bucket,
                name,
            )
    if list(pack.args[1]) != sorted(pack.args[1]):  # type: ignore[type-var, arg-type]
        yield "gradients are not packed in order", pack, bucket
    for index in expected.keys() - there:
        yield "its gradient is lost", pack, bucket, slots[index].name


def _complete(found: Analysis, contract: Contract | None) -> Findings:
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
        expected = contract.gradients.get(bucket, {}) if contract is not None else {}
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
                yield f"{gradient.name} is packed in the place of {was.name}", reduction.pack, bucket, name


# -- collectives ------------------------------------------------------------------------------------------------------


def _ordered(found: Analysis, contract: Contract | None) -> Findings:
    """Every rank starts the same collectives on the same process groups, in the same order.

    The collectives are those of each bucket's exchange, stage by stage, with its operators, groups and sizes. None is
    in the body of a branch. Portions are shared by fewer ranks, and gathered over those. The digest of the schedule
    checks at run time that the order is the same on all ranks.
    """
    for launch in _gathers(found):
        info, given = found.info(launch.bucket), arguments(launch.node)
        wanted = info.exchange.gather_size, info.exchange.gather_group
        if _of_portions(found, contract, launch):
            wanted = info.portion_size, info.portion_group
        if (got := (given.get("group_size"), given.get("group_name"))) != wanted:
            yield f"it is gathered over {_group(*got)}, not {_group(*wanted)}", launch.node, launch.bucket
    for portion in found.portions:
        info, (_, *ranks) = found.info(portion.bucket), portion.node.args
        if tuple(ranks) != (wanted := (info.portion_size, info.portion_group)):
            yield f"its portion is one of {_group(*ranks)}, not {_group(*wanted)}", portion.node, portion.bucket
    for reduction in found.reductions:
        exchange = found.info(reduction.bucket).exchange
        if len(reduction.stages) != len(exchange.groups):
            what = f"{len(reduction.stages)} collectives reduce it, not {len(exchange.groups)}"
            yield what, reduction.first, reduction.bucket
        stages = zip(reduction.stages, exchange.collectives, exchange.group_sizes, exchange.groups, strict=False)
        for i, (launch, collective, size, group) in enumerate(stages):
            given = arguments(launch.node)
            operator = _OPERATORS.get(launch.node.target) or given.get("collective")  # type: ignore[arg-type]
            its_size = given.get("group_size", size)  # an all-reduce has no size argument
            its_group = given.get("group_name", given.get("group"))
            if (operator, its_size, its_group) != (collective, size, group):
                its = f"{operator} over {_group(its_size, its_group)}"
                what = f"stage {i + 1} is {its}, not {collective} over {_group(size, group)}"
                yield what, launch.node, reduction.bucket
    for node in found.graph.find_nodes(op="get_attr"):
        for inner in _inner_nodes(node):
            if region_of(inner.graph) is not None:
                break  # a region is verified on its own
            role, bucket = role_of(inner), (inner.meta.get("custom") or {}).get(roles.MARK)
            if role is not None or bucket is not None:
                yield f"{inner} is in the body of a branch, {node}", node, role.bucket if role is not None else bucket
                break


def _of_portions(found: Analysis, contract: Contract | None, launch: CollectiveNode) -> bool:
    """Whether a bucket must be gathered from portions; for graphs without a contract, whether it is."""
    if contract is not None:
        return found.phase is Phase.BACKWARD and launch.bucket in contract.portions
    return launch.input is not None and roles.has_kind(launch.input, NodeKind.PORTION)


def _group(size: Any, name: Any) -> str:
    return f"{size} ranks (group {name!r})"


def _inner_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes of the graph that an attribute holds, if it holds one, and of the graphs inside it."""
    body: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        body = getattr(body, part, None)
    if isinstance(body, fx.GraphModule):
        for inner in body.graph.nodes:
            yield inner
            if inner.op == "get_attr":
                yield from _inner_nodes(inner)


def _in_step(found: Analysis, _: Contract | None) -> Findings:
    """Nothing touches the memory of a collective in flight, and every collective is awaited before the graph ends.

    Collectives run on their own streams. Only their waits order them relative to computation and to each other. A
    reduction does not read the unawaited result of another reduction.
    """
    flights: dict[fx.Node, list[tuple[StorageRange, CollectiveNode, tuple[int, int]]]] = {}
    for launch in found.launches:
        flight = found.in_flight(launch)
        for node in (launch.input, launch.node):
            if node is not None:
                memory = found.memory(node)
                flights.setdefault(memory.root, []).append((memory, launch, flight))
        if launch.gathers:
            continue  # rule V1 covers the rest
        for reader in launch.readers:
            yield f"{reader} reads the reduction unawaited", reader, launch.bucket
        if not launch.waits:
            yield "nothing awaits the reduction", launch.node, launch.bucket
        if flight[1] < flight[0]:
            yield "the reduction is awaited before it starts", launch.waits[0], launch.bucket
    releases = found.graph.find_nodes(op="call_function", target=RELEASE)
    for node, memory in (*found.writes, *((node, found.memory(node.all_input_nodes[0])) for node in releases)):
        for place, launch, (start, end) in flights.get(memory.root, ()):
            if place.overlaps(memory) and start < found.order[node] < end:
                yield f"{node} changes memory that {launch.node} works on", node, launch.bucket


# -- what goes in and out ---------------------------------------------------------------------------------------------


def _not_saved(found: Analysis, contract: Contract | None) -> Findings:
    """No gathered bucket, view or cast of one is saved for backward or returned, unless the model itself returns it.

    Whole buckets may be saved if they were chosen to stay gathered, and portions if they were chosen to be kept.
    """
    before: set[str | None] = {output.name for output in contract.outputs} if contract is not None else set()
    own = contract.user_outputs if contract is not None else 0
    policy = found.context.policy
    may_keep = (
        policy.keep_last or policy.reshard_after_forward is not True or any(b.stays for b in found.context.buckets)
    )
    started = {launch.node: launch for launch in found.launches if launch.gathers}
    for position, value in enumerate(found.outputs):
        whole = found.whole_of.get(value)
        saved = found.phase is Phase.FORWARD and position >= own
        if (launch := started.get(value)) is not None:
            yield f"output {position} is its unawaited gather", value, launch.bucket
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


def _scaled(found: Analysis, contract: Contract | None) -> Findings:
    """Each bucket is summed over all its ranks and microbatches, and scaled once by the factor of its exchange.

    Stages use the exchange's operation. If the exchange says so, they run only in the last microbatch, with the
    accumulated sum of this bucket. Gradients in float16 are scaled before they are summed.
    """
    for reduction in found.reductions:
        bucket, exchange = reduction.bucket, found.info(reduction.bucket).exchange
        for i, launch in enumerate(reduction.stages[: len(exchange.groups)]):
            given, inspected = arguments(launch.node), exchange.inspected and i == 0
            if given.get("reduce_op") != exchange.reduce_op:
                yield f"stage {i + 1} is a {given.get('reduce_op')}, not a {exchange.reduce_op}", launch.node, bucket
            got = given.get("when", When.ALWAYS.value), given.get("inspected", False)
            if got != (exchange.when[i], inspected):
                what = f"stage {i + 1} runs {got[0]!r}, inspected: {got[1]}, not {exchange.when[i]!r}, {inspected}"
                yield what, launch.node, bucket
            role = role_of(given["token"]) if "token" in given else None
            if role is not None and role.bucket != bucket:
                yield f"the sum over microbatches of {found.info(role.bucket).name!r} is reduced", launch.node, bucket
        for _, after in reduction.returned:
            yield from _factors(found, reduction, after)
        before = contract.gradients.get(bucket, {}) if contract is not None else {}
        names = {gradient.name for gradient in before.values()}
        layout = found.info(bucket).layout
        for gradient, index in packed(reduction.pack, layout) if reduction.pack is not None else ():
            node, factor = gradient, 1.0
            while node.name not in names and len(node.all_input_nodes) == 1:
                factor *= _factor(node) or 1.0
                node = node.all_input_nodes[0]
            if node.name in names and not math.isclose(factor, 1, rel_tol=1e-6):
                name = layout.slots[index].name if index is not None else None
                yield f"{gradient} is {factor} times the gradient {node}", gradient, bucket, name


def _factors(found: Analysis, reduction: ReductionFlow, after: tuple[fx.Node, ...]) -> Findings:
    exchange = found.info(reduction.bucket).exchange
    inside = reduction.pack is not None and reduction.pack.target is operator.getitem  # a region has scaled it
    first = total = exchange.scale if inside and exchange.scales_first else 1.0
    for node in (*reduction.before[0], None, *(n for nodes in reduction.before[1:] for n in nodes), *after):
        factor = _factor(node) if node is not None else 1.0
        if node is None:
            first = total
        elif factor is None:
            yield f"{node} changes the gradient", node, reduction.bucket
        else:
            total *= factor
    if not math.isclose(total, exchange.scale, rel_tol=1e-6):
        yield f"the gradient is scaled by {total}, not {exchange.scale}", reduction.last, reduction.bucket
    elif exchange.scales_first and not math.isclose(first, exchange.scale, rel_tol=1e-6):
        what = f"{exchange.comm_dtype} is summed before it is scaled, and may overflow"
        yield what, reduction.first, reduction.bucket


def _factor(node: fx.Node) -> float | None:
    """Return the factor by which a single-input operator scales its input; None if it does something else."""
    if roles.is_view(node) or node.target in (*roles.CASTS, _aten.clone.default, roles.OFFLOAD):
        return 1.0
    if node.target in (_aten.mul.Tensor, _aten.mul.Scalar, _aten.div.Tensor, _aten.div.Scalar) and len(node.args) == 2:
        number = next((value for value in node.args if isinstance(value, (int, float))), None)
        divides = node.target in (_aten.div.Tensor, _aten.div.Scalar)
        if number and not (divides and number is node.args[0]):
            return 1 / number if divides else float(number)
    return None


def _matching(found: Analysis, contract: Contract | None) -> Findings:
    """The optimizer's shards match the graph: a shard and its gradient have the same position, elements and dtype.

    A bucket is gathered in the compute dtype from its own shard, or from its own portion if one was kept; or in float8
    from its own quantized shard, and dequantized with its own scales unless modules take the bytes. They take the bucket's
    own scales then, those of the parameters that they read. Parameters are read at their offsets in the
    bucket. Gradients are packed in the dtype of their reduction. Every output keeps its position, shape and dtype.
    """
    for launch in _gathers(found):
        info, value = found.info(launch.bucket), tensor_of(launch.node)
        role, of_portions = role_of(found.memory(_source(launch)).root), _of_portions(found, contract, launch)
        quantized = info.exchange.is_quantized and not of_portions
        dtype = info.exchange.sent_dtype if quantized else info.exchange.held_dtype
        if role is not None and role.kind in _SOURCES and role.bucket != launch.bucket:
            what = f"{role.kind.value} of {found.info(role.bucket).name!r}"
            yield f"it is gathered from the {what}", launch.node, launch.bucket
        elif role is not None and (role.kind is NodeKind.PORTION) != of_portions:
            yield f"it is gathered from its {role.kind.value}", launch.node, launch.bucket
        elif quantized != (role is not None and role.kind is NodeKind.QUANTIZED):
            source = f"its {role.kind.value}" if role is not None else str(_source(launch))
            yield f"it is gathered from {source}", launch.node, launch.bucket
        for cast in _casts(launch):
            if (cast_to := tensor_of(cast)) is not None and cast_to.dtype != info.exchange.dtype:
                yield f"it is cast to {cast_to.dtype} before it is sent", cast, launch.bucket
        numel = info.exchange.sent_numel if quantized else info.layout.numel
        if value is not None and (value.dtype, value.numel()) != (dtype, numel):
            what = f"it is gathered as {value.numel()} elements of {value.dtype}, not {numel} of {dtype}"
            yield what, launch.node, launch.bucket
        for wait in launch.waits:
            yield from _dequantized(found, wait, launch.bucket, quantized and info.exchange.dequantizes)
    for portion in found.portions:
        if portion.whole is None or portion.whole.bucket != portion.bucket:
            of = (
                f"of {found.info(portion.whole.bucket).name!r}"
                if portion.whole is not None
                else "of no gathered bucket"
            )
            yield f"its portion {portion.node} is one {of}", portion.node, portion.bucket
    if contract is not None and found.phase is Phase.FORWARD:
        saved = {portion.bucket for portion in found.portions if portion.node in found.outputs}
        for bucket in contract.portions - saved:
            yield "its portion is not saved for backward", found.graph.output_node(), bucket
    yield from _scales(found, contract)
    reads = reads_of(found) if contract is not None else {}
    for whole in found.wholes:
        slots = {(slot.offset, slot.end): slot for slot in found.info(whole.bucket).layout.slots}
        for node, part in found.slices(whole):
            if part not in slots:
                yield f"elements {part[0]} to {part[1]} are no parameter", node, whole.bucket
        before, now = (contract.reads.get(whole.bucket) if contract else None), reads.get(whole.bucket)
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
        if got != (wanted := (info.layout.numel, info.exchange.comm_dtype)):
            yield f"gradients are packed into {got}, not {wanted} (elements, dtype)", pack, reduction.bucket
    for call in roles.region_calls(found.graph):
        for bucket, operand in _whole_operands(call):
            its = found.whole_of.get(operand)
            if its is not None and its.bucket != bucket:
                yield f"{call} reads {found.info(its.bucket).name!r} in its place", call, bucket
            elif its is not None and (value := tensor_of(operand)) is not None:
                if operand not in its.aliases and operand is not its.node:
                    yield f"{call} reads a copy of it, {operand}", call, bucket
                elif value.numel() != found.info(bucket).layout.numel:
                    yield f"{call} reads only {operand}", call, bucket
    if contract is not None:
        calls = calls_of(found.graph)
        for call in roles.region_calls(found.graph):
            if (was := contract.calls.get(call.name)) is not None and was != calls[call.name]:
                yield (
                    f"{call} runs {calls[call.name]} instead of {was}",
                    call,
                    call.meta["custom"][roles.REGION][0],
                )
        yield from _outputs(found, contract)


_SOURCES = (NodeKind.SHARD, NodeKind.QUANTIZED, NodeKind.PORTION)


def _dequantized(found: Analysis, wait: fx.Node, bucket: int, quantized: bool) -> Findings:
    """Check that a wait dequantizes what is quantized, with the bucket's own scales and layout."""
    if (wait.target is roles.WAIT_QUANTIZED) != quantized:
        yield f"{wait} {'does not dequantize it' if quantized else 'dequantizes it'}", wait, bucket
    if wait.target is not roles.WAIT_QUANTIZED or not quantized:
        return
    scales, *given = wait.args[1:]
    role, wanted = role_of(scales), found.info(bucket).exchange.quantization  # type: ignore[arg-type]
    if role is None or role.kind is not NodeKind.SCALES:
        yield f"{wait} dequantizes it with {scales}, which are no scales", wait, bucket
    elif role.bucket != bucket:
        yield f"{wait} dequantizes it with the scales of {found.info(role.bucket).name!r}", wait, bucket
    for name, got, its in zip(("sizes", "ndims", "offsets", "dtype", "scaling"), given, wanted, strict=True):
        if got != its:
            yield f"{wait} dequantizes it with {name} {got}, not {its}", wait, bucket


def _scales(found: Analysis, contract: Contract | None) -> Findings:
    """Check the scales of parameters that modules take as they were gathered."""
    for bucket, node, part in found.scale_slices:
        role, slots = role_of(node.all_input_nodes[0]), found.info(bucket).layout.slots
        if role is None or role.kind is not NodeKind.SCALES:
            yield f"{node} takes its scales from {node.all_input_nodes[0]}, which are no scales", node, bucket
        elif role.bucket != bucket:
            yield f"{node} takes the scales of {found.info(role.bucket).name!r}", node, bucket
        counts = [quantize.scale_count(slot.shape, found.info(bucket).exchange.scaling) for slot in slots]
        starts = itertools.accumulate(counts, initial=0)
        if part not in [(start, start + count) for start, count in zip(starts, counts, strict=False)]:
            yield f"{node}: scales {part[0]} to {part[1]} are those of no parameter", node, bucket
    for call in roles.region_calls(found.graph):
        for number, position in roles.body_of(call).meta["mfsdp_scales"].items():
            bucket, scales = call.meta["custom"][roles.REGION][number], call.args[position]
            role = role_of(scales) if isinstance(scales, fx.Node) else None
            if role is None or role.kind is not NodeKind.SCALES or role.bucket != bucket:
                yield f"{call} takes {scales} for its scales", call, bucket
    now = scales_of(found) if contract is not None else {}
    for bucket, before in (contract.scales if contract is not None else {}).items():
        if (its := now.get(bucket, before)) != before and its.total() == before.total():
            first = next(node for of, node, part in found.scale_slices if of == bucket and part in its - before)
            yield f"{first} takes the scales of another parameter", first, bucket


def _source(launch: CollectiveNode) -> fx.Node:
    """Return the node that a gather fetches, casts and sends."""
    *_, first = launch.node, *_before(launch)
    return first.all_input_nodes[0] if first.all_input_nodes else first


def _before(launch: CollectiveNode) -> list[fx.Node]:
    """Return the casts and fetches between a shard and its gather, the last one first."""
    found: list[fx.Node] = []
    node = launch.input
    while node is not None and node.op == "call_function" and node.target in (*roles.CASTS, roles.FETCH):
        found.append(node)
        node = node.all_input_nodes[0]
    return found


def _casts(launch: CollectiveNode) -> list[fx.Node]:
    """Return the casts between a shard and its gather, the last one first."""
    return [node for node in _before(launch) if node.target is not roles.FETCH]


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
            yield f"{now.name} is returned in the place of {was.name}", node, bucket
        elif now.value and was.value and not _same_value(now.value, was.value):
            yield f"output {position} is {now.value}; it was {was.value}", node, bucket


def _same_value(now: str, was: str) -> bool:
    """Whether two outputs have the same dtype and shape. Inductor finds out sizes that were unknown before."""
    (dtype, sizes), (old, old_sizes) = (text.split(" ", 1) for text in (now, was))
    lengths, before = (text.strip("[]").split(", ") for text in (sizes, old_sizes))
    return (dtype, len(lengths)) == (old, len(before)) and all(
        a == b or (a.isdigit() and not b.isdigit()) for a, b in zip(lengths, before, strict=True)
    )


def _multiplied(found: Analysis, _: Contract | None) -> Findings:
    """A product in float8 that a pass has made runs on a GPU too, and each operand is divided by its own scales.

    The first operand is row-major and the second column-major, and their rows are multiples of 16 bytes. Data and scales
    of an operand come from one quantization, over the dimension that is summed over or over the whole matrix. Scales over
    the other dimension are folded into the other operand, and ones in the product. What forward has quantized and saved
    is not followed.
    """
    for node in found.graph.find_nodes(op="call_function", target=_SCALED_MM):
        if not (node.meta.get("custom") or {}).get(roles.FP8):
            continue  # the model's own
        given = arguments(node)
        left, right = given["self"], given["mat2"]
        at = (node, *_weight_of(found, left, right))
        for side, operand, scales, summed in (
            ("left", left, given["scale_a"], 1),
            ("right", right, given["scale_b"], 0),
        ):
            value, sizes = tensor_of(operand), tensor_of(scales)
            if value is None or sizes is None:
                continue
            if isinstance(value.shape[summed], int) and value.shape[summed] % ALIGNMENT:
                yield f"the {side} operand of {node} is {list(value.shape)}, no multiple of {ALIGNMENT} bytes", *at
            if value.stride(summed) != 1:
                yield f"the {side} operand of {node}, {operand}, is not {('column', 'row')[summed]}-major", *at
            (quantized, transposed), of = _quantization(found, operand), _quantization(found, scales)[0]
            if quantized is None:
                if not _is_saved(operand):
                    yield f"the {side} operand of {node}, {operand}, is not quantized", *at
                continue
            over, dims = [summed ^ transposed], _dims(found, quantized)
            if of == quantized:
                if dims not in (over, [0, 1]):
                    what = f"the {side} operand of {node} is quantized over {dims}, and the product sums over {over}"
                    yield what, *at
            elif not (side == "right" and _is_folded(found, left, scales, quantized)):
                yield f"the scales of {node}'s {side} operand are {scales}, not its own", *at
            expected = [value.shape[0], 1] if summed else [1, value.shape[1]]
            if list(sizes.shape) not in (expected, [1, 1]) or not sizes.is_contiguous():
                got = f"{list(sizes.shape)}, strides {list(sizes.stride())}"
                yield f"the scales of {node}'s {side} operand are {got}, not a contiguous {expected}", *at


def _in_its_arena(found: Analysis, contract: Contract | None) -> Findings:
    """A shard in host memory is fetched once for each gather, unless its copy is sent, and its gradient copied back once.

    Both copies are between the host and the device of the exchange. The fetch comes before casts, because the device
    casts. A copy that the device keeps is neither fetched nor cast: it is in the dtype that is sent, as the shard is not.
    Everything else is on the device at all times, and so are portions, except values
    saved for backward.
    """
    yield from _copied_once(found)
    for launch in _gathers(found):
        exchange = found.info(launch.bucket).exchange
        before = _before(launch)
        fetches = [node for node in before if node.target is roles.FETCH]
        wanted = found.info(launch.bucket).is_fetched and not _of_portions(found, contract, launch)
        if len(fetches) != wanted:
            what = (
                "sent from host memory"
                if wanted and not fetches
                else f"fetched {len(fetches)} times, not {int(wanted)}"
            )
            yield f"it is {what}", launch.node, launch.bucket
        for cast in _casts(launch) if exchange.keeps_copy else ():
            yield f"{cast} casts what is sent from the copy on the device", cast, launch.bucket
        for fetch in fetches:
            if (to := fetch.args[1]) != exchange.offload and wanted:
                yield f"it is fetched to {to!r}, not {exchange.offload!r}", fetch, launch.bucket
            if fetch is not before[-1]:
                yield f"{fetch} fetches it after a cast", fetch, launch.bucket
    for reduction in found.reductions:
        exchange = found.info(reduction.bucket).exchange
        unreduced: tuple[tuple[fx.Node, ...], ...] = reduction.before
        reduced: tuple[tuple[fx.Node, ...], ...] = tuple(after for _, after in reduction.returned)
        if not reduction.stages:  # no other rank holds the bucket: its gradient is complete when it is packed
            unreduced, reduced = (), unreduced
        for node in (node for passed in unreduced for node in passed if node.target is roles.OFFLOAD):
            yield f"{node} copies its gradient to the host before it is reduced", node, reduction.bucket
        for after in reduced:
            offloads = [node for node in after if node.target is roles.OFFLOAD]
            if len(offloads) != bool(exchange.offload):
                what = f"{len(offloads)} times, not {int(bool(exchange.offload))}"
                yield f"its gradient is copied to the host {what}", reduction.last, reduction.bucket
            for node in offloads:
                if node.args[1] != exchange.pins:
                    yield f"{node} copies its gradient to {_memory(node.args[1])} memory", node, reduction.bucket
                if node is not after[-1]:
                    yield f"its gradient is changed after {node}, on the host", node, reduction.bucket


def _copied_once(found: Analysis) -> Findings:
    """Check copies of saved values: forward copies to the host, backward copies back, and each awaits its copies once.

    Until a copy is awaited, nothing reads it, and its source exists and is not written to. What is in host memory is
    only returned, or fetched.
    """
    order = found.order
    starts = [node for node in order if node.target in (roles.OFFLOAD_SAVED, roles.FETCH_SAVED)]
    for start in starts:
        is_fetch, source = start.target is roles.FETCH_SAVED, start.all_input_nodes[0]
        if found.phase is not (Phase.BACKWARD if is_fetch else Phase.FORWARD):
            yield f"{start} copies a saved value in a {found.phase.value} graph", start
        waits = [user for user in start.users if user.target is roles.WAIT_SAVED and user.args[0] is start]
        if len(waits) != 1:
            yield f"the copy {start} is awaited {len(waits)} times, not once", start
        until = min((order[wait] for wait in waits), default=len(order))
        for wait in waits:
            if wait.args[1] is not source:
                yield f"{wait} does not keep {source}, which {start} copies", wait
        for user in start.users:
            if user not in waits and (order[user] < until or (not is_fetch and user.op != "output")):
                yield f"{user} reads {start} {'before it is awaited' if is_fetch else 'in host memory'}", user
        for node, memory in found.writes:
            if order[start] < order[node] < until and memory.overlaps(found.memory(source)):
                yield f"{node} writes to {source} while {start} copies it", node
        if not is_fetch and (times := found.outputs.count(start)) != 1:
            yield f"the copy {start} is returned {times} times, not once", start
        if is_fetch:
            for user in source.users:
                if user is not start and user not in waits:
                    yield f"{user} reads {source}, which is in host memory", user


def _memory(pins: Any) -> str:
    return "pinned" if pins else "pageable"


class _Sent(NamedTuple):
    """A parameter whose bytes and scales were gathered."""

    bucket: int
    name: str | None


def _quantization(found: Analysis, node: Any) -> tuple[fx.Node | _Sent | None, int]:
    """Return what data or scales come from, through views and copies in another layout: a quantization, or a gather.

    Returns:
        It, and 1 if the value is its transpose, else 0. None and 0 if there is none.
    """
    transposed = 0
    while isinstance(node, fx.Node) and node.target is not roles.QUANTIZE:
        whole = found.whole_of.get(node)
        if whole is not None and node in (whole.node, *whole.aliases) and node.target not in _TRANSPOSES:
            sent = found.info(whole.bucket).exchange.stays_quantized
            return (_Sent(whole.bucket, found.parameter(whole.bucket, node)), transposed) if sent else (None, 0)
        if (role := role_of(node)) is not None and role.kind is NodeKind.SCALES:
            return _Sent(role.bucket, found.scaled_parameter(node)), transposed
        if not (roles.is_view(node) or node.target is _aten.clone.default or roles.is_of_quantized(node)):
            return None, 0
        transposed ^= node.target in _TRANSPOSES
        node = node.args[0]
    return (node, transposed) if isinstance(node, fx.Node) else (None, 0)


def _dims(found: Analysis, quantized: fx.Node | _Sent) -> Any:
    """Return the dimensions that scales are made over."""
    if isinstance(quantized, fx.Node):
        return quantized.args[1]
    return [1] if found.info(quantized.bucket).exchange.scaling == "rowwise" else [0, 1]


def _is_saved(node: Any) -> bool:
    """Whether a value is an input of the graph, or a view or a copy of one."""
    while isinstance(node, fx.Node) and (roles.is_view(node) or node.target is _aten.clone.default):
        node = node.all_input_nodes[0]
    return isinstance(node, fx.Node) and node.op == "placeholder"


def _is_folded(found: Analysis, left: Any, scales: Any, weight: fx.Node | _Sent) -> bool:
    """Whether a weight's scales are a factor of the left operand before it was quantized, and ones in the product."""
    if not isinstance(scales, fx.Node) or not (
        scales.target is _aten.ones.default or (scales.target is _aten.full.default and scales.args[1] == 1)
    ):
        return False
    quantized, _ = _quantization(found, left)
    product = quantized.args[0] if isinstance(quantized, fx.Node) else None
    if not isinstance(product, fx.Node) or product.target is not _aten.mul.Tensor:
        return False
    return any(_quantization(found, factor)[0] == weight for factor in product.all_input_nodes)


def _weight_of(found: Analysis, *operands: Any) -> tuple[int | None, str | None]:
    """Return the bucket and the name of the parameter that is an operand of a product."""
    for operand in operands:
        quantized, _ = _quantization(found, operand)
        if isinstance(quantized, _Sent):
            return quantized
        source = quantized.args[0] if quantized is not None else None
        whole = found.whole_of.get(source) if isinstance(source, fx.Node) else None
        if whole is not None:
            return whole.bucket, found.parameter(whole.bucket, source)  # type: ignore[arg-type]
    return None, None


_TRANSPOSES = (_aten.t.default, _aten.permute.default, _aten.transpose.int)
_SCALED_MM = _aten._scaled_mm.default


RULES = (
    Rule("V1", "awaited before use", _awaited),
    Rule("V2", "released after use", _released),
    Rule("V3", "memory apart", _apart),
    Rule("V4", "reduced once", _once),
    Rule("V5", "reduced complete", _complete),
    Rule("V6", "one order", _ordered),
    Rule("V7", "untouched in flight", _in_step),
    Rule("V8", "not saved", _not_saved),
    Rule("V9", "scaled right", _scaled),
    Rule("V10", "shards match", _matching),
    Rule("V11", "products in float8", _multiplied),
    Rule("V12", "right arena", _in_its_arena),
)
