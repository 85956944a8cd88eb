"""Ways to break a graph: for each rule of the verifier several kinds of mutant, each with the reason why it is wrong.

A kind looks at a graph and yields all changes that it could make there, as functions. A test calls one of them. The
docstring of a kind is the reason, which the report of mutants prints.
"""

from __future__ import annotations

import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from mfsdp_compile.passes import roles
from mfsdp_compile.passes.context import BucketInfo, Context, NodeKind, role_of
from mfsdp_compile.passes.verifier.analysis import (
    RELEASE,
    WAIT,
    Analysis,
    CollectiveNode,
    ReductionFlow,
    Whole,
    tensor_of,
)
from mfsdp_compile.runtime.guests.offload.operators import FETCH, FETCH_SAVED, OFFLOAD, OFFLOAD_SAVED, WAIT_SAVED
from mfsdp_compile.runtime.guests.offload.stages import Fetch
from mfsdp_compile.runtime.guests.quantized.operators import DEQUANTIZE
from mfsdp_compile.runtime.lanes.lane import lane_at
from mfsdp_compile.runtime.schedule.phase import Phase

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
PACK = torch.ops.mfsdp.pack_gradients.default
GATHER_INTO = c10d.all_gather_into_tensor_out.default
Change = Callable[[], Any]


class Subject(Analysis):
    """A graph to be broken, and its contents."""

    def __init__(self, graph: fx.Graph, context: Context, phase: Phase) -> None:
        super().__init__(graph, context, phase)
        self.gathers = [launch for launch in self.launches if launch.gathers and launch.waits]
        self.gathered = [whole for whole in self.wholes if whole.launch is not None]
        self.every_pack = [r for r in self.reductions if r.pack is not None and r.pack.target is PACK]
        self.reductions = [r for r in self.reductions if r.stages]  # a region packs, and does not reduce
        self.packs = [r for r in self.reductions if r.pack is not None and r.pack.target is PACK]
        self.calls = roles.region_calls(graph)
        self.output = graph.output_node()

    def first_read(self, whole: Whole) -> fx.Node:
        return min(whole.reads, key=self.order.__getitem__)

    def last_read(self, whole: Whole) -> fx.Node:
        return max(whole.reads, key=self.order.__getitem__)

    def ranges(self, whole: Whole) -> list[fx.Node]:
        return [node for node, _ in self.slices(whole)]

    def used_together(self) -> Iterator[tuple[Whole, Whole]]:
        """Yield pairs of gathered buckets that are in use together, the one that starts earlier first."""
        for a, b in itertools.permutations(self.gathered, 2):
            (start, end), (other_start, other_end) = self.occupied(a), self.occupied(b)
            if start < other_start <= end and other_start < other_end:
                yield a, b

    def occupied(self, whole: Whole) -> tuple[int, int]:
        """Return the positions between which the memory that a bucket is gathered into must not change."""
        if roles.is_local_stage(whole.node):
            return self.order[whole.launch.node], self.order[whole.node]
        return self.live(whole)

    def return_(self, position: int, value: Any) -> None:
        values = list(self.output.args[0])  # type: ignore[arg-type]
        values[position] = value
        self.output.args = (tuple(values),)

    def save(self, node: fx.Node) -> None:
        self.output.args = ((*self.output.args[0], node),)  # type: ignore[misc]


def call(
    at: fx.Node, target: Any, *args: Any, before: bool = False, bucket: int | None = None, **kwargs: Any
) -> fx.Node:
    """Insert a node next to ``at`` and compute its value."""
    graph = at.graph
    with graph.inserting_before(at) if before else graph.inserting_after(at):
        node = graph.call_function(target, args, kwargs)
    if bucket is not None:
        node.meta["custom"] = {roles.MARK: bucket}
    revalue(node)
    return node


def revalue(node: fx.Node) -> None:
    given = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    mode = next(v.fake_mode for n in node.graph.nodes if hasattr(v := n.meta.get("val"), "fake_mode"))
    if node.target is not RELEASE:
        with mode:
            node.meta["val"] = node.target(*given[0], **given[1])  # type: ignore[operator]


def replace_in(user: fx.Node, old: fx.Node, new: fx.Node) -> Change:
    return lambda: user.replace_input_with(old, new)


def set_arg(node: fx.Node, index: int, value: Any) -> Change:
    return lambda: node.update_arg(index, value)


def release(at: fx.Node, what: fx.Node) -> fx.Node:
    return call(at, RELEASE, what, 0)


def renamed(node: fx.Node) -> fx.Node:
    """Insert a copy directly after a node, with its roles."""
    with node.graph.inserting_after(node):
        return node.graph.node_copy(node)


# -- V1: awaited before use -------------------------------------------------------------------------------------------


def view_reads_start(s: Subject) -> Iterator[Change]:
    """Reads memory that is still being received."""
    for whole in s.gathered:
        for view in s.ranges(whole):
            yield replace_in(view, whole.node, whole.launch.node)


def region_reads_start(s: Subject) -> Iterator[Change]:
    """A region computes with memory that is still being received."""
    for whole in s.gathered:
        for call_ in s.calls:
            if whole.node in call_.all_input_nodes:
                yield replace_in(call_, whole.node, whole.launch.node)


def wait_is_lost(s: Subject) -> Iterator[Change]:
    """Nothing waits for the gather."""
    for whole in s.gathered:
        yield lambda w=whole: w.node.replace_all_uses_with(w.launch.node)


def wait_comes_late(s: Subject) -> Iterator[Change]:
    """A parameter is read before its wait."""
    for whole in s.gathered:
        for read in whole.reads:
            if read.op != "output":
                yield lambda w=whole, r=read: r.append(w.node)


def wait_comes_early(s: Subject) -> Iterator[Change]:
    """There is nothing to wait for yet."""
    for whole in s.gathered:
        yield lambda w=whole: w.launch.node.prepend(w.node)


def view_of_another_bucket(s: Subject) -> Iterator[Change]:
    """Another unit's weights are read."""
    for whole, other in itertools.permutations(s.wholes, 2):
        for view in s.ranges(whole):
            yield replace_in(view, whole.node, other.node)


def another_gather_awaited(s: Subject) -> Iterator[Change]:
    """Another unit's weights are read, and nothing waits for this unit's."""
    for whole, other in itertools.permutations(s.gathered, 2):
        for wait in whole.launch.waits:
            yield replace_in(wait, whole.launch.node, other.launch.node)


def shard_read(s: Subject) -> Iterator[Change]:
    """A shard is not the whole parameter."""
    for whole in s.gathered:
        for view in s.ranges(whole):
            yield replace_in(view, whole.node, whole.launch.input)


def portion_reads_start(s: Subject) -> Iterator[Change]:
    """Copies a portion of memory that is still being received."""
    for portion in s.portions:
        yield replace_in(portion.node, portion.whole.node, portion.whole.launch.node)


def resident_unawaited(s: Subject) -> Iterator[Change]:
    """The runtime's gather of the resident may still be in flight."""
    for whole in s.wholes:
        if whole.node.target is WAIT and whole.launch is None:
            for view in s.ranges(whole):
                yield replace_in(view, whole.node, whole.node.args[0])


# -- V2: released after use -------------------------------------------------------------------------------------------


def _gather_again(whole: Whole) -> fx.Node:
    start = renamed(whole.launch.node)
    with start.graph.inserting_after(whole.node):
        return start.graph.node_copy(whole.node, lambda node: start if node is whole.launch.node else node)


def gathered_twice(s: Subject) -> Iterator[Change]:
    """Two copies of a bucket are in memory."""
    for whole in s.gathered:
        for view in s.ranges(whole):
            yield lambda w=whole, v=view: v.replace_input_with(w.node, _gather_again(w))


def gathered_for_nobody(s: Subject) -> Iterator[Change]:
    """Nothing reads the bucket or releases it."""
    for whole in s.gathered:
        yield lambda w=whole: _gather_again(w)


def released_early(s: Subject) -> Iterator[Change]:
    """Reads freed memory."""
    for whole in s.gathered:
        for read in whole.reads:
            if read is not s.last_read(whole):
                yield lambda w=whole, r=read: release(r, w.node)


def released_through_a_view(s: Subject) -> Iterator[Change]:
    """A view shares its bucket's memory, so other views read freed memory."""
    for whole in s.gathered:
        for view in s.ranges(whole):
            if view is not s.last_read(whole):
                yield lambda v=view: release(v, v)


def released_twice(s: Subject) -> Iterator[Change]:
    """The memory may belong to another tensor by then."""
    for whole in s.gathered:
        if (last := s.last_read(whole)).op != "output":
            yield lambda w=whole, at=last: release(release(at, w.node), w.node)


def released_in_flight(s: Subject) -> Iterator[Change]:
    """The collective writes to freed memory."""
    for launch in s.gathers:
        yield lambda at=launch.node: release(at, at)


def resident_released(s: Subject) -> Iterator[Change]:
    """The next graph reads the resident."""
    for whole in s.wholes:
        if s.memory(whole.node).root.op == "placeholder" and (last := s.last_read(whole)).op != "output":
            yield lambda w=whole, at=last: release(at, w.node)


# -- V3: memory apart -------------------------------------------------------------------------------------------------


def gather_into(launch: CollectiveNode, out: fx.Node) -> None:
    node = launch.node
    if node.target is roles.GATHER_INTO_BUFFER:
        source, _, _, dtype, size, group = node.args
        if tensor_of(source).dtype != dtype:
            source = call(node, roles.CASTS[0], source, dtype, before=True, bucket=launch.bucket)
        node.args = (source, size, group)
    node.target, node.kwargs = GATHER_INTO, {"out": out}


def buffer(s: Subject, numel: int) -> fx.Node:
    """Allocate memory at the top of a graph."""
    first = next(node for node in s.graph.nodes if node.op != "placeholder")
    dtype = tensor_of(s.gathers[0].node).dtype
    return call(first, aten.empty.memory_format, [numel], before=True, dtype=dtype)


def part(of: fx.Node, start: int, stop: int) -> fx.Node:
    return call(of, aten.slice.Tensor, of, 0, start, stop)


def numel(s: Subject, whole: Whole) -> int:
    return s.info(whole.bucket).layout.numel


def buffer_shared(s: Subject) -> Iterator[Change]:
    """The second gather overwrites the first, which is still read."""
    for a, b in s.used_together():

        def change(a: Whole = a, b: Whole = b) -> None:
            size = max(numel(s, a), numel(s, b))
            memory = buffer(s, size)
            for whole in (a, b):
                gather_into(whole.launch, part(memory, 0, numel(s, whole)))

        yield change


def buffer_parts_overlap(s: Subject) -> Iterator[Change]:
    """The two gathers share one element."""
    for a, b in s.used_together():

        def change(a: Whole = a, b: Whole = b) -> None:
            end = numel(s, a)
            memory = buffer(s, end + numel(s, b))
            gather_into(a.launch, part(memory, 0, end))
            gather_into(b.launch, part(memory, end - 1, end - 1 + numel(s, b)))

        yield change


def into_another_bucket(s: Subject) -> Iterator[Change]:
    """The gather overwrites weights that are still read."""
    for a, b in s.used_together():
        if s.order[a.node] < s.order[b.launch.node]:
            yield lambda a=a, b=b: gather_into(b.launch, a.node)


def into_a_shard(s: Subject) -> Iterator[Change]:
    """The gather overwrites what the optimizer holds."""
    shards = [n for n in s.graph.find_nodes(op="placeholder") if (r := role_of(n)) and r.kind is NodeKind.SHARD]
    for launch, shard in itertools.product(s.gathers, shards):
        yield lambda launch=launch, shard=shard: gather_into(launch, shard)


def buffer_of_another_size(s: Subject) -> Iterator[Change]:
    """Registered buffers of the size that ranks agreed on are not used, or hold less than the bucket."""
    for launch in s.gathers:
        if launch.node.target is roles.GATHER_INTO_BUFFER:
            for capacity in (launch.node.args[1] // 2, 2 * launch.node.args[1], 0):
                yield set_arg(launch.node, 1, capacity)


def gradients_in_another_buffer(s: Subject) -> Iterator[Change]:
    """As above, for the buffers that gradients are packed in."""
    for reduction in s.every_pack:
        if len(reduction.pack.args) > 4:
            for capacity in (reduction.pack.args[4] // 2, reduction.pack.args[4] + 64):
                yield set_arg(reduction.pack, 4, capacity)


def weight_written(s: Subject) -> Iterator[Change]:
    """The rest of the unit computes with a weight other than that of the shards."""
    for whole in s.wholes:
        for view in s.ranges(whole):
            if s.order[view] < s.order[s.last_read(whole)]:
                yield lambda v=view: call(v, aten.mul_.Scalar, v, 2)


def bucket_zeroed(s: Subject) -> Iterator[Change]:
    """Later reads find zeros, as if the bucket were released too early."""
    for whole in s.wholes:
        for read in whole.reads:
            if s.order[whole.node] < s.order[read] < s.order[s.last_read(whole)]:
                yield lambda w=whole, r=read: call(r, aten.zero_.default, w.node)


def weight_copied_over(s: Subject) -> Iterator[Change]:
    """One parameter takes the place of another."""
    for whole in s.wholes:
        for a, b in itertools.permutations(s.ranges(whole), 2):
            if s.order[a] < s.order[b] and tensor_of(a).shape == tensor_of(b).shape:
                yield lambda a=a, b=b: call(b, aten.copy_.default, a, b)


def portion_written(s: Subject) -> Iterator[Change]:
    """Backward computes with a weight other than forward's, on this rank and its neighbors."""
    for portion in s.portions:
        yield lambda p=portion.node: call(p, aten.mul_.Scalar, p, 2)
    for launch in s.gathers:
        if roles.has_kind(launch.input, NodeKind.PORTION):
            yield lambda at=launch.node: call(at, aten.zero_.default, at.args[0], before=True)


# -- V4: reduced once -------------------------------------------------------------------------------------------------


def reduced_twice(s: Subject) -> Iterator[Change]:
    """Other ranks do not run the second collective, and it is unclear which gradient is returned."""
    for reduction in s.packs:

        def change(r: ReductionFlow = reduction) -> None:
            start, wait = renamed(r.stages[0].node), renamed(r.stages[0].waits[0])
            wait.update_arg(0, start)
            s.save(wait)

        yield change


def gradient_dropped(s: Subject) -> Iterator[Change]:
    """A parameter trains with a gradient of zero."""
    for reduction in s.every_pack:
        gradients, offsets = (list(reduction.pack.args[i]) for i in (0, 1))
        for i in range(len(gradients) if len(gradients) > 1 else 0):
            kept = [gradients[:i] + gradients[i + 1 :], offsets[:i] + offsets[i + 1 :]]
            yield lambda r=reduction, kept=kept: setattr(r.pack, "args", (*kept, *r.pack.args[2:]))


def gradients_swapped(s: Subject) -> Iterator[Change]:
    """Each gradient goes to the other parameter."""
    for reduction in s.every_pack:
        gradients = reduction.pack.args[0]
        for i, j in itertools.combinations(range(len(gradients)), 2):
            swapped = list(gradients)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            if tensor_of(swapped[i]).numel() > 0 and gradients[i] is not gradients[j]:
                yield set_arg(reduction.pack, 0, swapped)


def gradient_packed_twice(s: Subject) -> Iterator[Change]:
    """One parameter gets another one's gradient."""
    for reduction in s.every_pack:
        gradients = reduction.pack.args[0]
        for i, j in itertools.permutations(range(len(gradients)), 2):
            if gradients[i] is not gradients[j] and tensor_of(gradients[j]).numel() > 0:
                yield set_arg(reduction.pack, 0, [gradients[i] if k == j else g for k, g in enumerate(gradients)])


def gradient_moved(s: Subject) -> Iterator[Change]:
    """The gradient overlaps padding or its neighbor."""
    for reduction in s.every_pack:
        offsets = reduction.pack.args[1]
        for i in range(len(offsets)):
            yield set_arg(reduction.pack, 1, [o + (k == i) for k, o in enumerate(offsets)])


def reduction_lost(s: Subject) -> Iterator[Change]:
    """A unit does not train."""
    for reduction in s.reductions:
        for position, _ in reduction.returned:
            yield lambda p=position: s.return_(p, None)


def frozen_reduced(s: Subject) -> Iterator[Change]:
    """A useless collective, and a gradient where there must be none."""
    for bucket, info in enumerate(s.context.buckets):
        if not info.trainable and s.phase is Phase.BACKWARD:
            for reduction in s.packs:
                for gradient in reduction.pack.args[0]:
                    value = tensor_of(gradient)
                    if value is not None and value.numel() == info.layout.slots[0].numel:  # nothing else is wrong
                        yield lambda b=bucket, i=info, r=reduction, g=gradient: _reduce(s, b, i, r, g)


def _reduce(s: Subject, bucket: int, info: BucketInfo, near: ReductionFlow, source: fx.Node) -> None:
    exchange = info.exchange
    pack = call(near.pack, PACK, [source], [0], info.layout.numel, exchange.comm_dtype, bucket=bucket)
    group = exchange.lane.groups[0]
    start = call(pack, c10d.reduce_scatter_tensor.default, pack, "avg", group.size, group.name, bucket=bucket)
    s.save(call(start, WAIT, start, bucket=bucket))


# -- V5: reduced complete ---------------------------------------------------------------------------------------------


def _sums(s: Subject) -> Iterator[tuple[ReductionFlow, int, fx.Node]]:
    for reduction in s.every_pack:
        for i, gradient in enumerate(reduction.pack.args[0]):
            if gradient.target is aten.add.Tensor and all(isinstance(a, fx.Node) for a in gradient.args):
                yield reduction, i, gradient


def term_dropped(s: Subject) -> Iterator[Change]:
    """The gradient of one use of a tied parameter is lost."""
    for reduction, i, gradient in _sums(s):
        for term in gradient.args:
            terms = [term if k == i else g for k, g in enumerate(reduction.pack.args[0])]
            yield set_arg(reduction.pack, 0, terms)


def term_counted_twice(s: Subject) -> Iterator[Change]:
    """The gradient of one use of a tied parameter replaces that of another use."""
    for _, _, gradient in _sums(s):
        a, b = gradient.args
        yield set_arg(gradient, 0, b)
        yield set_arg(gradient, 1, a)


def packed_early(s: Subject) -> Iterator[Change]:
    """Reads gradients that are not computed yet."""
    for reduction in s.every_pack:
        for gradient in reduction.pack.args[0]:
            if gradient.op == "call_function":
                yield lambda r=reduction, g=gradient: g.prepend(r.pack)


def reduced_early(s: Subject) -> Iterator[Change]:
    """Reads a bucket that is not packed yet."""
    for reduction in s.packs:
        yield lambda r=reduction: r.pack.prepend(r.stages[0].node)


def another_pack_reduced(s: Subject) -> Iterator[Change]:
    """A unit gets another one's gradients."""
    for a, b in itertools.permutations(s.packs, 2):
        yield replace_in(a.stages[0].node, a.stages[0].input, b.pack)


def unpacked_reduced(s: Subject) -> Iterator[Change]:
    """One gradient, or none at all, is reduced in place of the bucket."""
    for reduction in s.packs:
        start, source = reduction.stages[0].node, reduction.stages[0].input
        yield replace_in(start, source, next(n for n in s.graph.nodes if n.op == "placeholder"))


def gradient_replaced(s: Subject) -> Iterator[Change]:
    """A gradient of zeros trains nothing."""
    for reduction in s.every_pack:
        for i, gradient in enumerate(reduction.pack.args[0]):
            value = tensor_of(gradient)

            def change(r: ReductionFlow = reduction, i: int = i, value: Any = value) -> None:
                zeros = call(r.pack, aten.zeros.default, list(value.shape), before=True, dtype=value.dtype)
                r.pack.update_arg(0, [zeros if k == i else g for k, g in enumerate(r.pack.args[0])])

            if value.numel():
                yield change


# -- V6: one order ----------------------------------------------------------------------------------------------------


def _group_argument(node: fx.Node) -> int:
    names = [argument.name for argument in node.target._schema.arguments]
    return names.index(next(name for name in ("group_name", "group", "lane") if name in names))


def other_group(s: Subject) -> Iterator[Change]:
    """Ranks wait for others that never arrive."""
    for launch in s.launches:
        yield set_arg(launch.node, _group_argument(launch.node), "another group")


def other_size(s: Subject) -> Iterator[Change]:
    """The message is divided for a different number of ranks than the group has."""
    for launch in s.launches:
        names = [argument.name for argument in launch.node.target._schema.arguments]
        if "group_size" in names:
            index = names.index("group_size")
            yield set_arg(launch.node, index, 2 * launch.node.args[index])


def portion_of_another_group(s: Subject) -> Iterator[Change]:
    """This rank has another position in that group."""
    for portion in s.portions:
        yield set_arg(portion.node, 2, "another group")


def portion_of_another_size(s: Subject) -> Iterator[Change]:
    """Elements are missing or duplicated."""
    for portion in s.portions:
        yield set_arg(portion.node, 1, 2 * portion.node.args[1])


def portion_gathered_from_all(s: Subject) -> Iterator[Change]:
    """The portions of all ranks overlap."""
    for launch in s.gathers:
        if roles.has_kind(launch.input, NodeKind.PORTION):
            exchange = s.info(launch.bucket).exchange
            whole = (launch.input, exchange.gather_size, exchange.gather_group)
            yield lambda node=launch.node, whole=whole: setattr(node, "args", whole)


def other_operator(s: Subject) -> Iterator[Change]:
    """One rank scatters, the others do not."""
    for reduction in s.packs:
        for launch in reduction.stages:
            node = launch.node
            if node.target is torch.ops.mfsdp.reduce_if_due.default:
                yield set_arg(node, 3, "each" if node.args[3] == "due" else "due")
            elif node.target is c10d.reduce_scatter_tensor.default:

                def change(node: fx.Node = node) -> None:
                    node.target, node.args = c10d.all_reduce.default, (node.args[0], node.args[1], node.args[3])

                yield change
            elif node.target is roles.EXCHANGE_SLICES:

                def gather(node: fx.Node = node) -> None:
                    node.target = c10d.all_gather_into_tensor.default

                yield gather


def stage_lost(s: Subject) -> Iterator[Change]:
    """Outer ranks wait for this one, which trains without them."""
    for reduction in s.packs:
        if len(reduction.stages) > 1:
            first, second = reduction.stages[-2:]

            def change(first: CollectiveNode = first, second: CollectiveNode = second) -> None:
                second.waits[0].replace_all_uses_with(first.waits[0])
                for node in (second.waits[0], second.node):
                    s.graph.erase_node(node)

            yield change


def stages_exchanged(s: Subject) -> Iterator[Change]:
    """Inner ranks meet outer ranks in a collective."""
    for reduction in s.packs:
        if len(reduction.stages) > 1:

            def change(r: ReductionFlow = reduction) -> None:
                a, b = r.stages[0].node, r.stages[1].node
                i, j = (4 if n.target is roles.REDUCE_IF_DUE else _group_argument(n) for n in (a, b))
                of_a, of_b = a.args[i], b.args[j]
                a.update_arg(i, of_b)
                b.update_arg(j, of_a)

            yield change


def stage_added(s: Subject) -> Iterator[Change]:
    """A collective that other ranks do not run."""
    for reduction in s.packs:

        def change(r: ReductionFlow = reduction) -> None:
            last, group = r.stages[-1].waits[0], s.info(r.bucket).exchange.lane.group_names[-1]
            start = call(last, c10d.all_reduce.default, last, "sum", group, bucket=r.bucket)
            wait = call(start, WAIT, start, bucket=r.bucket)
            last.replace_all_uses_with(wait, lambda user: user is not start)

        yield change


def in_a_branch(s: Subject) -> Iterator[Change]:
    """Ranks whose data take the other branch do not gather."""
    for launch in s.gathers:

        def change(launch: CollectiveNode = launch) -> None:
            body = fx.Graph()
            inner = body.create_node(
                "call_function", c10d.all_gather_into_tensor.default, (body.placeholder("x"), 4, "0")
            )
            inner.meta["custom"] = {roles.MARK: launch.bucket}
            body.output(inner)
            s.graph.owning_module = nn.Module()
            s.graph.owning_module.branch = fx.GraphModule(nn.Module(), body)
            with s.graph.inserting_before(launch.node):
                s.graph.create_node("get_attr", "branch")

        yield change


# -- V7: untouched in flight ------------------------------------------------------------------------------------------


def reduction_unawaited(s: Subject) -> Iterator[Change]:
    """Returns memory that is still being received."""
    for reduction in s.packs:
        for stage in reduction.stages:
            yield lambda launch=stage: launch.waits[0].replace_all_uses_with(launch.node)


def reduction_awaited_early(s: Subject) -> Iterator[Change]:
    """There is nothing to wait for yet."""
    for reduction in s.packs:
        for stage in reduction.stages:
            yield lambda launch=stage: launch.node.prepend(launch.waits[0])


def gradients_written_in_flight(s: Subject) -> Iterator[Change]:
    """Ranks may send the values from before or after the write."""
    for reduction in s.packs:
        yield lambda r=reduction: call(r.stages[0].node, aten.mul_.Scalar, r.stages[0].input, 2)


def result_written_in_flight(s: Subject) -> Iterator[Change]:
    """The result that arrives later overwrites the write."""
    for launch in s.launches:
        yield lambda launch=launch: call(launch.node, aten.zero_.default, launch.node)


def shard_written_in_flight(s: Subject) -> Iterator[Change]:
    """Ranks get some of its values from before the write and some from after it."""
    for launch in s.gathers:
        yield lambda launch=launch: call(launch.node, aten.mul_.Scalar, launch.input, 2)


def gradients_released_in_flight(s: Subject) -> Iterator[Change]:
    """The collective sends freed memory."""
    for reduction in s.packs:
        yield lambda r=reduction: release(r.stages[0].node, r.stages[0].input)


def another_reduction_awaited(s: Subject) -> Iterator[Change]:
    """Nothing waits for this reduction."""
    for a, b in itertools.permutations(s.packs, 2):
        yield replace_in(a.stages[-1].waits[0], a.stages[-1].node, b.stages[-1].node)


# -- V8: not saved ----------------------------------------------------------------------------------------------------


def view_saved(s: Subject) -> Iterator[Change]:
    """Keeps the whole bucket in memory until backward."""
    for whole in s.wholes if s.phase is Phase.FORWARD else ():
        yield from ((lambda v=view: s.save(v)) for view in s.ranges(whole))


def bucket_saved(s: Subject) -> Iterator[Change]:
    """The model stays gathered, bucket by bucket."""
    for whole in s.wholes if s.phase is Phase.FORWARD else ():
        if whole.node not in s.outputs and whole.node.op != "placeholder":
            yield lambda w=whole: s.save(w.node)


def cast_saved(s: Subject) -> Iterator[Change]:
    """A copy of a weight stays in memory until backward."""
    for whole in s.wholes if s.phase is Phase.FORWARD else ():
        for view in s.ranges(whole):
            yield lambda v=view: s.save(call(v, aten._to_copy.default, v, dtype=torch.float64))


def transpose_saved(s: Subject) -> Iterator[Change]:
    """A view of a view shares the memory of its bucket."""
    for whole in s.wholes if s.phase is Phase.FORWARD else ():
        for alias in whole.aliases:
            if (value := tensor_of(alias)) is not None and value.dim() == 2:
                yield lambda a=alias: s.save(call(a, aten.t.default, a))


def clone_saved(s: Subject) -> Iterator[Change]:
    """A copy of a weight that the model does not ask for."""
    for whole in s.wholes if s.phase is Phase.FORWARD else ():
        for view in s.ranges(whole):
            yield lambda v=view: s.save(call(v, aten.clone.default, v))


def activation_replaced(s: Subject) -> Iterator[Change]:
    """A weight is saved in place of what backward needs."""
    for whole in s.wholes if s.phase is Phase.FORWARD else ():
        for position in range(1, len(s.outputs)):
            yield from ((lambda p=position, v=view: s.return_(p, v)) for view in s.ranges(whole)[:1])


def landed_saved(s: Subject) -> Iterator[Change]:
    """What was gathered stays in memory, encoded."""
    for whole in s.gathered if s.phase is Phase.FORWARD else ():
        for wait in whole.launch.waits:
            if wait is not whole.node:
                yield lambda wait=wait: s.save(wait)


def gather_saved(s: Subject) -> Iterator[Change]:
    """An unawaited gather is saved."""
    for launch in s.gathers:
        yield lambda launch=launch: s.save(launch.node)


def weight_returned(s: Subject) -> Iterator[Change]:
    """The caller keeps the bucket in memory."""
    for whole in s.wholes if s.phase is not Phase.FORWARD else ():
        yield from ((lambda v=view: s.save(v)) for view in s.ranges(whole))


def portion_not_copied(s: Subject) -> Iterator[Change]:
    """A view keeps the whole bucket in memory."""
    for portion in s.portions:

        def change(node: fx.Node = portion.node, whole: fx.Node = portion.whole.node) -> None:
            s.return_(s.outputs.index(node), part(whole, 0, tensor_of(node).numel()))

        yield change


def portion_of_what_is_kept(s: Subject) -> Iterator[Change]:
    """Wastes memory, because backward does not gather it."""
    for whole in s.gathered if s.phase is Phase.FORWARD else ():
        info = s.info(whole.bucket)
        if info.portion_size and whole.bucket not in {portion.bucket for portion in s.portions}:
            arguments = (whole.node, info.portion_size, info.portion_group)
            yield lambda w=whole, a=arguments: s.save(call(w.node, roles.PORTION, *a, bucket=w.bucket))


def portion_returned(s: Subject) -> Iterator[Change]:
    """A portion is returned in place of a loss."""
    for portion in s.portions:
        yield lambda p=portion.node: s.return_(0, p)


# -- V9: scaled right -------------------------------------------------------------------------------------------------


def _stages(s: Subject) -> Iterator[tuple[ReductionFlow, CollectiveNode]]:
    return ((reduction, stage) for reduction in s.packs for stage in reduction.stages)


def mean_for_sum(s: Subject) -> Iterator[Change]:
    """The result is wrong by a factor of the number of ranks."""
    for _, stage in _stages(s):
        for index, argument in enumerate(stage.node.args):
            if argument in ("sum", "avg"):
                yield set_arg(stage.node, index, "avg" if argument == "sum" else "sum")


def _scales(s: Subject) -> Iterator[fx.Node]:
    for reduction in s.packs:
        for node in (*reduction.before[0], *(n for _, after in reduction.returned for n in after)):
            if node.target is aten.mul.Tensor:
                yield node


def factor_lost(s: Subject) -> Iterator[Change]:
    """Gradients of all ranks are summed, not averaged."""
    for node in _scales(s):
        yield lambda n=node: n.replace_all_uses_with(n.args[0])


def factor_changed(s: Subject) -> Iterator[Change]:
    """Any other factor is wrong."""
    for node in _scales(s):
        for factor in (2.0, 0.5):
            yield set_arg(node, 1, node.args[1] * factor)


def scaled_again(s: Subject) -> Iterator[Change]:
    """Gradients are scaled twice."""
    for reduction in s.packs:
        last = reduction.stages[-1].waits[0]

        def change(last: fx.Node = last) -> None:
            scaled = call(last, aten.mul.Tensor, last, 0.25)
            last.replace_all_uses_with(scaled, lambda user: user is not scaled)

        yield change


def scaled_in_front(s: Subject) -> Iterator[Change]:
    """Gradients are also scaled in the packed bucket."""
    for reduction in s.packs:

        def change(stage: CollectiveNode = reduction.stages[0]) -> None:
            stage.node.update_arg(0, call(stage.input, aten.div.Scalar, stage.input, 4))

        yield change


def gradient_scaled(s: Subject) -> Iterator[Change]:
    """One parameter trains at another rate."""
    for reduction in s.every_pack:
        for i, gradient in enumerate(reduction.pack.args[0]):

            def change(r: ReductionFlow = reduction, i: int = i, gradient: fx.Node = gradient) -> None:
                scaled = call(r.pack, aten.mul.Scalar, gradient, 2, before=True)
                r.pack.update_arg(0, [scaled if k == i else g for k, g in enumerate(r.pack.args[0])])

            yield change


def never_waits(s: Subject) -> Iterator[Change]:
    """Gradients that were reduced are reduced again with the next microbatch."""
    for reduction, stage in _stages(s):
        if stage.node.target is torch.ops.mfsdp.reduce_if_due.default:
            lane, (part, index) = s.info(reduction.bucket).exchange.lane, stage.node.args[3:]
            known = lane[part][index].call(lane.spec(part, index))

            def change(node: fx.Node = stage.node, known: Any = known) -> None:
                if known is None:
                    node.target = roles.START_STAGE
                else:
                    node.target, node.args = known[0], (node.args[0], *known[1])

            yield change


def another_sum_reduced(s: Subject) -> Iterator[Change]:
    """The microbatches of another bucket are added."""
    tokens = [n for n in s.graph.find_nodes(op="placeholder") if (r := role_of(n)) and r.kind is NodeKind.TOKEN]
    for reduction, stage in _stages(s):
        for token in tokens if stage.node.target is torch.ops.mfsdp.reduce_if_due.default else ():
            if role_of(token).bucket != reduction.bucket:
                yield set_arg(stage.node, 1, token)


def _local(s: Subject, name: str) -> list[fx.Node]:
    """Return the nodes of an operator of a local stage."""
    return list(s.graph.find_nodes(op="call_function", target=getattr(torch.ops.mfsdp, name).default))


def slices_summed_otherwise(s: Subject) -> Iterator[Change]:
    """Slices of fewer ranks are summed, each of them of two ranks."""
    for node in _local(s, "sum_slices"):
        yield set_arg(node, 1, 1)


def slices_not_summed(s: Subject) -> Iterator[Change]:
    """The slices themselves are the gradient."""
    for node in _local(s, "sum_slices"):
        yield lambda node=node: node.replace_all_uses_with(node.args[0])


def slices_sent_in_another_format(s: Subject) -> Iterator[Change]:
    """Other ranks decode what they were not sent."""
    for node in _local(s, "encode_slices"):
        if node.args[2]:
            yield set_arg(node, 2, "float8_e5m2")


def slices_in_another_order(s: Subject) -> Iterator[Change]:
    """Ranks get slices of others, as those of one level in two."""
    for node in _local(s, "encode_slices"):
        yield set_arg(node, 3, 1 if node.args[3] > 1 else 2)


def slices_in_another_format(s: Subject) -> Iterator[Change]:
    """Slices are decoded in another format, or as another number of values."""
    for node in _local(s, "sum_slices"):
        if node.args[2]:
            yield set_arg(node, 2, "float8_e5m2")
            yield set_arg(node, 3, node.args[3] - 1)


def _stage_nodes(s: Subject, gathers: bool, *names: str) -> list[fx.Node]:
    """Return the nodes of stages that graphs know by their place, on the way of parameters or of gradients."""
    nodes = [node for name in names for node in _local(s, name)]
    return [node for node in nodes if (node.args[-2] == "use") == gathers]


def gather_of_another_lane(s: Subject) -> Iterator[Change]:
    """What ranks send one another has another format."""
    for node in _stage_nodes(s, True, "start_stage"):
        yield set_arg(node, 2, "another lane")


def gather_unencoded(s: Subject) -> Iterator[Change]:
    """Other ranks decode what was never encoded."""
    for node in _stage_nodes(s, True, "run_stage"):
        if node.args[4] < lane_at(node.args[2]).gather:
            yield lambda node=node: node.replace_all_uses_with(node.args[0])


def gather_undecoded(s: Subject) -> Iterator[Change]:
    """Parameters are read as they were sent."""
    for node in _stage_nodes(s, True, "run_stage"):
        if node.args[4] > lane_at(node.args[2]).gather:
            yield lambda node=node: node.replace_all_uses_with(node.args[0])


def gather_with_another_stage(s: Subject) -> Iterator[Change]:
    """What was encoded is encoded again."""
    for node in _stage_nodes(s, True, "run_stage"):
        yield set_arg(node, 4, 0 if node.args[4] else 1)


def gather_awaited_otherwise(s: Subject) -> Iterator[Change]:
    """Parameters are what has arrived, and not what the stage makes of it."""
    for node in _stage_nodes(s, True, "wait_stage"):

        def change(node: fx.Node = node) -> None:
            node.target, node.args = WAIT, node.args[:1]

        yield change


def reduction_with_another_stage(s: Subject) -> Iterator[Change]:
    """Gradients pass another stage than those of other ranks."""
    for node in _stage_nodes(s, False, "run_stage"):
        yield set_arg(node, 4, node.args[4] + 1)


def reduction_awaited_otherwise(s: Subject) -> Iterator[Change]:
    """What has arrived is not the sum."""
    for node in _stage_nodes(s, False, "wait_stage"):

        def change(node: fx.Node = node) -> None:
            node.target, node.args = WAIT, node.args[:1]

        yield change


def scaled_too_late(s: Subject) -> Iterator[Change]:
    """The sum of float16 gradients may overflow."""
    for reduction in s.packs:
        if reduction.before[0] and s.info(reduction.bucket).exchange.lane.pack:

            def change(r: ReductionFlow = reduction) -> None:
                scale, last = r.before[0][0], r.stages[-1].waits[0]
                factor = scale.args[1]
                scale.replace_all_uses_with(scale.args[0])
                scaled = call(last, aten.mul.Tensor, last, factor)
                last.replace_all_uses_with(scaled, lambda user: user is not scaled)

            yield change


# -- V10: shards match ------------------------------------------------------------------------------------------------


def gradients_exchanged(s: Subject) -> Iterator[Change]:
    """Each shard gets the other's gradient."""
    positions = [p for reduction in s.reductions for p, _ in reduction.returned]
    for a, b in itertools.combinations(positions, 2):
        yield lambda a=a, b=b: (s.return_(a, s.outputs[b]), s.return_(b, s.outputs[a]))


def gradient_of_other_dtype(s: Subject) -> Iterator[Change]:
    """The optimizer's fused kernels read its bits as another dtype."""
    for reduction in s.reductions:
        for position, _ in reduction.returned:
            value = s.outputs[position]
            yield lambda p=position, v=value: s.return_(p, call(v, aten._to_copy.default, v, dtype=torch.float64))


def part_of_a_gradient(s: Subject) -> Iterator[Change]:
    """The last element of the shard has no gradient."""
    for reduction in s.reductions:
        for position, _ in reduction.returned:
            value = s.outputs[position]
            length = tensor_of(value).numel() - 1
            yield lambda p=position, v=value, n=length: s.return_(p, part(v, 0, n))


def another_shard_gathered(s: Subject) -> Iterator[Change]:
    """Another unit's weights are gathered from this rank."""
    shards = [n for n in s.graph.find_nodes(op="placeholder") if (r := role_of(n)) and r.kind is NodeKind.SHARD]
    for launch in s.gathers:
        source = s.memory(launch.input).root
        reader = launch.node if source in launch.node.all_input_nodes else launch.input
        for shard in shards:
            if role_of(shard).bucket != launch.bucket and source in reader.all_input_nodes:
                yield replace_in(reader, source, shard)


def portion_of_another_bucket(s: Subject) -> Iterator[Change]:
    """Backward computes with another unit's weights."""
    for portion in s.portions:
        for whole in s.gathered:
            if whole.bucket != portion.bucket:
                yield replace_in(portion.node, portion.whole.node, whole.node)


def portion_of_a_view(s: Subject) -> Iterator[Change]:
    """The portion is a part of one parameter only."""
    for portion in s.portions:
        for view in s.ranges(portion.whole):
            yield replace_in(portion.node, portion.whole.node, view)


def portion_lost(s: Subject) -> Iterator[Change]:
    """Backward gets something else."""
    for portion in s.portions:
        yield lambda p=portion.node: s.return_(s.outputs.index(p), s.outputs[0])


def another_portion_gathered(s: Subject) -> Iterator[Change]:
    """Another unit's weights are gathered."""
    of_portions = [launch for launch in s.gathers if roles.has_kind(launch.input, NodeKind.PORTION)]
    for launch, other in itertools.permutations(of_portions, 2):
        yield replace_in(launch.node, launch.input, other.input)


def gathered_in_other_dtype(s: Subject) -> Iterator[Change]:
    """Twice the bytes, in a dtype that ranks did not agree on."""
    for launch in s.gathers:

        def change(launch: CollectiveNode = launch) -> None:
            other = torch.float64 if tensor_of(launch.node).dtype != torch.float64 else torch.float32
            launch.node.update_arg(0, call(launch.input, aten._to_copy.default, launch.input, dtype=other))
            revalue(launch.node)

        yield change


def _dequantized(s: Subject) -> Iterator[Whole]:
    return (whole for whole in s.gathered if whole.node.target is DEQUANTIZE)


def shard_sent_for_quantized(s: Subject) -> Iterator[Change]:
    """Ranks send bytes of the main weights, or the shard of another bucket."""
    for whole in _dequantized(s):
        launch = whole.launch
        for source in s.graph.find_nodes(op="placeholder"):
            value = tensor_of(source)
            if source is not launch.input and value is not None and value.dtype == torch.uint8:
                yield replace_in(launch.node, launch.input, source)

        def change(launch: CollectiveNode = launch) -> None:
            launch.node.update_arg(0, call(launch.input, aten.view.dtype, launch.input, torch.int8))
            revalue(launch.node)

        yield change


def quantized_made_in_graph(s: Subject) -> Iterator[Change]:
    """What is sent is not what scales were made for."""
    for whole in _dequantized(s):
        launch = whole.launch
        yield lambda launch=launch: launch.node.update_arg(0, call(launch.input, aten.clone.default, launch.input))


def scales_of_another_bucket(s: Subject) -> Iterator[Change]:
    """Every weight is wrong by a factor."""
    for whole, other in itertools.permutations(_dequantized(s), 2):
        yield set_arg(whole.node, 1, other.node.args[1])


def scales_replaced(s: Subject) -> Iterator[Change]:
    """The scales are no scales."""
    for whole in _dequantized(s):
        scales = whole.node.args[1]
        yield lambda w=whole, n=scales: w.node.update_arg(1, call(n, aten.mul.Tensor, n, 2.0))


def dequantized_otherwise(s: Subject) -> Iterator[Change]:
    """Scales belong to other rows, or the result has another dtype."""
    for whole in _dequantized(s):
        *_, offsets, dtype, scaling = whole.node.args
        yield set_arg(whole.node, 4, [offset + 1 for offset in offsets])
        yield set_arg(whole.node, 5, torch.float64 if dtype != torch.float64 else torch.float32)
        yield set_arg(whole.node, 6, "tensorwise" if scaling == "rowwise" else "rowwise")


def bytes_read_as_weights(s: Subject) -> Iterator[Change]:
    """Nothing dequantizes what was gathered."""
    for whole in _dequantized(s):

        def change(w: Whole = whole) -> None:
            w.node.replace_all_uses_with(w.node.args[0])
            s.graph.erase_node(w.node)

        yield change


def parameter_moved(s: Subject) -> Iterator[Change]:
    """Reads its neighbor's elements, or padding."""
    for whole in s.wholes:
        for view in s.ranges(whole):
            yield lambda v=view: setattr(v, "args", (v.args[0], 0, v.args[2] + 1, v.args[3] + 1))


def parameter_confused(s: Subject) -> Iterator[Change]:
    """Reads another parameter of the same shape."""
    for whole in s.wholes:
        for a, b in itertools.permutations(s.ranges(whole), 2):
            if a.args[3] - a.args[2] == b.args[3] - b.args[2] and a.args[2] != b.args[2]:
                yield lambda a=a, b=b: setattr(a, "args", (a.args[0], *b.args[1:]))


def packed_in_other_dtype(s: Subject) -> Iterator[Change]:
    """Ranks send messages of different lengths, or gradients are rounded."""
    for reduction in s.every_pack:
        yield set_arg(reduction.pack, 3, torch.float64)


def packed_too_long(s: Subject) -> Iterator[Change]:
    """Shards of the gradient are not where the parameters' shards are."""
    for reduction in s.every_pack:
        yield set_arg(reduction.pack, 2, 2 * reduction.pack.args[2])


def saved_exchanged(s: Subject) -> Iterator[Change]:
    """Backward takes one saved tensor for the other."""
    for a, b in itertools.combinations(range(len(s.outputs)), 2):
        if s.phase is Phase.FORWARD and s.outputs[a] is not s.outputs[b]:
            yield lambda a=a, b=b: (s.return_(a, s.outputs[b]), s.return_(b, s.outputs[a]))


def output_dropped(s: Subject) -> Iterator[Change]:
    """All later outputs move up."""
    for position in range(len(s.outputs)):
        yield lambda p=position: setattr(s.output, "args", (tuple(s.outputs[:p] + s.outputs[p + 1 :]),))


# -- regions ----------------------------------------------------------------------------------------------------------


def regions_gradients_exchanged(s: Subject) -> Iterator[Change]:
    """What one unit's region has packed is reduced for another unit."""
    inside = [r for r in s.reductions if r.pack is not None and r.pack.target is operator.getitem and r.stages]
    for one, other in itertools.permutations(inside, 2):
        yield replace_in(one.stages[0].node, one.stages[0].input, other.pack)


def region_reads_another_bucket(s: Subject) -> Iterator[Change]:
    """A region computes with another unit's weights."""
    for whole, other in itertools.permutations(s.gathered, 2):
        for call_ in s.calls:
            if whole.node in call_.all_input_nodes and s.order[other.node] < s.order[call_]:
                yield replace_in(call_, whole.node, other.node)


def another_region_called(s: Subject) -> Iterator[Change]:
    """A call runs a graph that computes something else."""
    for call_ in s.calls:
        body = roles.body_of(call_)
        other = types.SimpleNamespace(graph=body.graph, meta=body.meta | {"mfsdp_region_name": "another"})
        yield lambda c=call_, o=other: c.meta.update(mfsdp_body=o)


# -- V11: products in float8 ------------------------------------------------------------------------------------------


def _products(s: Subject) -> list[fx.Node]:
    found = s.graph.find_nodes(op="call_function", target=aten._scaled_mm.default)
    return [node for node in found if (node.meta.get("custom") or {}).get(roles.FP8)]


def _quantized(node: Any) -> fx.Node | None:
    """Return the quantization that an operand comes from."""
    while isinstance(node, fx.Node) and node.target is not roles.QUANTIZE:
        node = node.args[0] if node.args else None
    return node if isinstance(node, fx.Node) else None


def scales_of_another_matrix(s: Subject) -> Iterator[Change]:
    """Rows are wrong by a factor."""
    for a, b in itertools.permutations(_products(s), 2):
        for at in (2, 3):
            mine, its = a.args[at], b.args[at]
            if roles.has_kind(mine, NodeKind.SCALES) and roles.has_kind(its, NodeKind.SCALES) and mine is not its:
                yield set_arg(a, at, its)
                continue
            if s.order[its] < s.order[a] and _quantized(mine) not in (None, _quantized(its)) and _quantized(its):
                yield set_arg(a, at, its)


def scales_scaled(s: Subject) -> Iterator[Change]:
    """The product is twice as large."""
    for node in _products(s):
        scales = node.args[3]
        if _quantized(node.args[1]) is not None:
            yield lambda n=node, of=scales: n.update_arg(3, call(of, aten.mul.Tensor, of, 2.0))


def scales_not_folded(s: Subject) -> Iterator[Change]:
    """The gradient lacks the scales of the weight's rows."""
    for node in _products(s):
        quantized = _quantized(node.args[0])
        folded = quantized.args[0] if quantized is not None else None
        if isinstance(folded, fx.Node) and folded.target is aten.mul.Tensor and _quantized(node.args[3]) is None:
            yield set_arg(quantized, 0, folded.args[0])


def multiplied_row_major(s: Subject) -> Iterator[Change]:
    """GPUs refuse it, and CPUs compute it."""
    for node in _products(s):
        if _quantized(right := node.args[1]) is not None:
            yield lambda n=node, of=right: n.update_arg(
                1, call(of, aten.clone.default, of, memory_format=torch.contiguous_format)
            )


def quantized_over_the_other_dimension(s: Subject) -> Iterator[Change]:
    """Scales cannot be factored out of the sum."""
    for node in _products(s):
        if (quantized := _quantized(node.args[0])) is not None and quantized.args[1] == [1]:

            def change(of: fx.Node = quantized, product: fx.Node = node) -> None:
                of.update_arg(1, [0])
                revalue(of)

            yield change


def not_quantized(s: Subject) -> Iterator[Change]:
    """Values are cut off at 448."""
    for node in _products(s):
        if (quantized := _quantized(node.args[0])) is not None and node.args[0].target is operator.getitem:
            source = quantized.args[0]
            yield lambda n=node, of=source: n.update_arg(
                0, call(of, aten._to_copy.default, of, dtype=torch.float8_e4m3fn)
            )


def quantized_weight_saved(s: Subject) -> Iterator[Change]:
    """Half of a gathered weight stays in memory until backward."""
    for node in _products(s) if s.phase is Phase.FORWARD else ():
        if (quantized := _quantized(node.args[1])) is not None:
            yield lambda of=quantized: s.save(next(iter(of.users)))


# -- V12: right stages -------------------------------------------------------------------------------------------------


def _of(s: Subject, target: Any) -> list[fx.Node]:
    return s.graph.find_nodes(op="call_function", target=target)


def sent_from_the_host(s: Subject) -> Iterator[Change]:
    """NCCL is given host memory."""
    for fetch in _of(s, FETCH):
        yield lambda n=fetch: n.replace_all_uses_with(n.args[0])


def fetched_twice(s: Subject) -> Iterator[Change]:
    """What is on the device is copied once more."""
    for fetch in _of(s, FETCH):
        for user in fetch.users:
            again = functools.partial(call, fetch, FETCH, fetch, fetch.args[1], bucket=role_of(fetch).bucket)
            yield lambda u=user, n=fetch, make=again: u.replace_input_with(n, make())


def fetched_from_the_device(s: Subject) -> Iterator[Change]:
    """A shard that is on the device is copied."""
    for launch in s.gathers:
        is_fetched = any(isinstance(stage, Fetch) for stage in s.info(launch.bucket).exchange.lane.use)
        if not is_fetched and role_of(launch.input) is not None:
            fetch = functools.partial(call, launch.node, FETCH, launch.input, "cpu", before=True)
            yield lambda n=launch, make=fetch: n.node.replace_input_with(n.input, make(bucket=n.bucket))


def fetched_to_another_device(s: Subject) -> Iterator[Change]:
    """The other operands are not there."""
    for fetch in _of(s, FETCH):
        yield set_arg(fetch, 1, "meta")


def cast_on_the_host(s: Subject) -> Iterator[Change]:
    """The cast runs on the thread that launches kernels."""
    for fetch in _of(s, FETCH):
        for cast in fetch.users:
            if cast.target in roles.CASTS:
                yield lambda f=fetch, c=cast: (
                    c.replace_all_uses_with(moved := call(c, FETCH, c, f.args[1], bucket=role_of(f).bucket)),
                    moved.replace_input_with(moved, c),
                    c.replace_input_with(f, f.args[0]),
                )


def copy_cast(s: Subject) -> Iterator[Change]:
    """What is cast for each gather is not the copy that the device keeps in the dtype that is sent."""
    for launch in s.gathers:
        exchange = s.info(launch.bucket).exchange
        if any(isinstance(stage, Fetch) for stage in exchange.lane.step) and launch.input.op == "placeholder":
            cast = functools.partial(call, launch.node, roles.CASTS[0], launch.input, exchange.dtype, before=True)
            yield lambda n=launch, make=cast: n.node.replace_input_with(n.input, make(bucket=n.bucket))


def gradient_left_on_the_device(s: Subject) -> Iterator[Change]:
    """The optimizer finds the parameter and its gradient on different devices."""
    for copy in _of(s, OFFLOAD):
        yield lambda n=copy: n.replace_all_uses_with(n.args[0])


def gradient_copied_twice(s: Subject) -> Iterator[Change]:
    """The second copy reads what has not arrived."""
    for copy in _of(s, OFFLOAD):
        again = functools.partial(call, copy, OFFLOAD, copy, copy.args[1], bucket=role_of(copy).bucket)
        yield lambda n=copy, to=next(iter(copy.users)), make=again: to.replace_input_with(n, make())


def gradient_copied_to_other_memory(s: Subject) -> Iterator[Change]:
    """The host has less pinned memory than was asked for, or more."""
    for copy in _of(s, OFFLOAD):
        yield set_arg(copy, 1, not copy.args[1])


def gradient_reduced_on_the_host(s: Subject) -> Iterator[Change]:
    """NCCL is given host memory."""
    for reduction in s.packs:
        node = reduction.stages[0].node
        early = functools.partial(call, node, OFFLOAD, node.args[0], False, before=True)
        yield lambda n=node, make=early: n.replace_input_with(n.args[0], make())


def gradient_changed_on_the_host(s: Subject) -> Iterator[Change]:
    """The CPU reads what has not arrived."""
    for copy in _of(s, OFFLOAD):
        to = next(iter(copy.users))  # the output, or what delivers it
        yield lambda n=copy, to=to: to.replace_input_with(n, call(n, aten.clone.default, n))


def _waits(s: Subject) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield copies of saved values, each with what awaits it."""
    for start in (*_of(s, OFFLOAD_SAVED), *_of(s, FETCH_SAVED)):
        yield start, next(user for user in start.users if user.target is WAIT_SAVED and user.args[0] is start)


def saved_read_in_flight(s: Subject) -> Iterator[Change]:
    """Backward computes with what has not arrived."""
    for start, wait in _waits(s):
        readers = [user for user in start.users if user is not wait and user.op != "output"]
        if readers:
            yield lambda w=wait, last=max(readers): last.append(w)


def saved_never_awaited(s: Subject) -> Iterator[Change]:
    """The memory of the source is used again while it is copied, or the copy is read."""
    for _, wait in _waits(s):
        yield lambda w=wait: s.graph.erase_node(w)


def saved_awaited_twice(s: Subject) -> Iterator[Change]:
    """The second wait finds no copy, or another one at the same address."""
    for start, wait in _waits(s):
        yield lambda w=wait, of=start: call(w, WAIT_SAVED, of, of.args[0])


def saved_source_lost(s: Subject) -> Iterator[Change]:
    """The memory of the source is free before it has been copied."""
    for start, wait in _waits(s):
        yield lambda w=wait, of=start: setattr(w, "args", (of, of))


def saved_source_written(s: Subject) -> Iterator[Change]:
    """The copy has parts of another value."""
    for start in _of(s, OFFLOAD_SAVED):
        yield lambda n=start: call(n, aten.zero_.default, n.args[0])


def saved_read_on_the_host(s: Subject) -> Iterator[Change]:
    """The other operands are on the device."""
    for start, wait in _waits(s):
        for user in [user for user in start.users if user is not wait] if start.target is FETCH_SAVED else ():
            yield lambda u=user, of=start: u.replace_input_with(of, of.args[0])


def saved_stays_on_the_device(s: Subject) -> Iterator[Change]:
    """What is copied is not what backward gets."""
    for start in _of(s, OFFLOAD_SAVED):
        yield lambda n=start: s.output.replace_input_with(n, n.args[0])


def delivered_twice(s: Subject) -> Iterator[Change]:
    """The optimizer takes two steps over the bucket."""
    for node in _of(s, roles.DELIVER):
        yield lambda n=node: call(n, n.target, *n.args, before=True)


def delivered_to_another_bucket(s: Subject) -> Iterator[Change]:
    """The step changes another bucket's shard, by a gradient that is not its own."""
    nodes = _of(s, roles.DELIVER)
    for node, other in itertools.permutations(nodes, 2):
        yield set_arg(node, 2, other.args[2])


def gradients_delivered_exchanged(s: Subject) -> Iterator[Change]:
    """Two buckets of the same size get each other's gradients."""
    for one, other in itertools.combinations(_of(s, roles.DELIVER), 2):
        if tensor_of(one.args[0]).shape == tensor_of(other.args[0]).shape:

            def change(one: fx.Node = one, other: fx.Node = other) -> None:
                first, second = one.args[0], other.args[0]
                one.args, other.args = (second, *one.args[1:]), (first, *other.args[1:])

            yield change


def returned_undelivered(s: Subject) -> Iterator[Change]:
    """No step is taken over the bucket in backward, and its gradient stays in memory."""
    for node in _of(s, roles.DELIVER):
        yield lambda n=node: s.output.replace_input_with(n, n.args[0])


def read_after_delivery(s: Subject) -> Iterator[Change]:
    """What reads the shard after the step gets the next step's weights."""
    for node in _of(s, roles.DELIVER):
        for rest in node.args[1]:  # type: ignore[union-attr]
            yield lambda n=node, of=rest: call(n, aten.clone.default, of)


def step_undeclared(s: Subject) -> Iterator[Change]:
    """Nothing tells compilers that the shard changes here, and they may move its readers behind."""
    for node in _of(s, roles.DELIVER):
        if node.args[1]:
            yield set_arg(node, 1, [])


KINDS: dict[str, Sequence[Callable[[Subject], Iterator[Change]]]] = {
    "V1": (
        *(view_reads_start, wait_is_lost, wait_comes_late, wait_comes_early, view_of_another_bucket),
        *(another_gather_awaited, shard_read, portion_reads_start, resident_unawaited, region_reads_start),
        bytes_read_as_weights,
    ),
    "V2": (
        *(gathered_twice, gathered_for_nobody, released_early, released_through_a_view, released_twice),
        *(released_in_flight, resident_released, gather_undecoded),
    ),
    "V3": (
        *(buffer_shared, buffer_parts_overlap, into_another_bucket, into_a_shard, weight_written),
        *(bucket_zeroed, weight_copied_over, portion_written, buffer_of_another_size, gradients_in_another_buffer),
    ),
    "V4": (
        *(reduced_twice, gradient_dropped, gradients_swapped, gradient_packed_twice, gradient_moved),
        *(reduction_lost, frozen_reduced),
    ),
    "V5": (
        *(term_dropped, term_counted_twice, packed_early, reduced_early, another_pack_reduced),
        *(unpacked_reduced, gradient_replaced, regions_gradients_exchanged),
    ),
    "V6": (
        *(other_group, other_size, other_operator, stage_lost, stages_exchanged, stage_added, in_a_branch),
        *(portion_of_another_group, portion_of_another_size, portion_gathered_from_all, gather_of_another_lane),
        gather_awaited_otherwise,
    ),
    "V7": (
        *(reduction_unawaited, reduction_awaited_early, gradients_written_in_flight, result_written_in_flight),
        *(shard_written_in_flight, gradients_released_in_flight, another_reduction_awaited),
    ),
    "V8": (
        *(view_saved, bucket_saved, cast_saved, transpose_saved, clone_saved, activation_replaced, gather_saved),
        landed_saved,
        *(weight_returned, portion_not_copied, portion_of_what_is_kept, portion_returned, quantized_weight_saved),
    ),
    "V9": (
        *(mean_for_sum, factor_lost, factor_changed, scaled_again, scaled_in_front, gradient_scaled, never_waits),
        *(another_sum_reduced, scaled_too_late, reduction_awaited_otherwise),
    ),
    "V10": (
        *(gradients_exchanged, gradient_of_other_dtype, part_of_a_gradient, another_shard_gathered),
        *(gathered_in_other_dtype, parameter_moved, parameter_confused, packed_in_other_dtype, packed_too_long),
        *(saved_exchanged, output_dropped, portion_of_another_bucket, portion_of_a_view, portion_lost),
        *(another_portion_gathered, region_reads_another_bucket, another_region_called),
        *(shard_sent_for_quantized, scales_of_another_bucket, scales_replaced),
    ),
    "V11": (
        *(scales_of_another_matrix, scales_scaled, scales_not_folded, multiplied_row_major, not_quantized),
        quantized_over_the_other_dimension,
    ),
    "V12": (
        *(gather_unencoded, gather_with_another_stage, slices_summed_otherwise, slices_not_summed),
        *(slices_in_another_format, slices_sent_in_another_format, slices_in_another_order),
        *(reduction_with_another_stage, sent_from_the_host, fetched_twice, fetched_from_the_device),
        *(fetched_to_another_device, cast_on_the_host, copy_cast, quantized_made_in_graph),
        dequantized_otherwise,
        *(gradient_left_on_the_device, gradient_copied_twice, gradient_copied_to_other_memory),
        *(gradient_reduced_on_the_host, gradient_changed_on_the_host, saved_read_in_flight, saved_never_awaited),
        *(saved_awaited_twice, saved_source_lost, saved_source_written, saved_read_on_the_host),
        saved_stays_on_the_device,
    ),
    "V13": (
        *(delivered_twice, delivered_to_another_bucket, gradients_delivered_exchanged, returned_undelivered),
        *(read_after_delivery, step_undeclared),
    ),
}
