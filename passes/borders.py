"""Move cheap computation across what communicates, so that pieces exchange less memory.

Pieces are compiled one by one (:mod:`.stretches`): a value that another piece reads is written to memory, and read from
there. Inductor would not write what is cheap to compute where it is read. Therefore this pass

*   computes elementwise values again in each piece that reads them, where what they are computed from is no more to
  read: casts of saved activations to float32, products with a weight;
*   computes elementwise values and sums as late as possible, at the beginning of the next stretch, if only later ones
  read them: the norm in front of a layer, whose weight is still being gathered.

Products, attention and what communicates stay where the schedule has them, and so do reads of memory that is written
later, or that would have to be kept for longer: whole buckets, and tensors that are larger than what is computed.

As a partitioner's recomputation between forward and backward (min-cut rematerialization), between pieces.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.schedule.phase import Phase

from . import roles
from .context import Context, Report, role_of
from .stretches import Stretch, divide

SMALL = 16
"""How many times larger a value is than a part of a whole bucket that is copied, so that the value can be computed
after the bucket was freed."""
DEPTH = 32
"""How many elementwise operators in a row are computed again at most."""
AT_MOST = 2
"""How many times more memory may cross the next border so that values are computed behind it."""


def apply(graph: fx.Graph, context: Context, phase: Phase) -> Report:
    earlier = _Borders(graph).rise()
    later = _Borders(graph).sink()
    again = _Borders(graph).copy()
    told = f"computed later, where they are read first: {later} values; earlier: {earlier}; again: {again}"
    return Report("borders", [told])


def _bytes(node: fx.Node) -> float:
    """Return the size of a value: infinite, if it depends on symbols."""
    value = node.meta.get("val")
    tensors = [each for each in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(each, Tensor)]
    if any(not isinstance(size, int) for tensor in tensors for size in tensor.shape):
        return math.inf
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _is_elementwise(node: fx.Node) -> bool:
    """Whether a node is elementwise, and gives the same whenever it is computed."""
    return _has_tag(node, torch.Tag.pointwise) or node.target is torch.ops.aten.embedding.default


def _is_fused(node: fx.Node) -> bool:
    """Whether a node is elementwise or sums up, and gives the same whenever it is computed."""
    return _is_elementwise(node) or _has_tag(node, torch.Tag.reduction)


def _has_tag(node: fx.Node, tag: torch.Tag) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or role_of(node) is not None or _writes(node):
        return False
    return tag in node.target.tags and torch.Tag.nondeterministic_seeded not in node.target.tags


def _writes(node: fx.Node) -> bool:
    """Whether a node writes to what it takes, or may: an operator that takes graphs, other than regions."""
    if isinstance(node.target, torch._ops.OpOverload):
        return bool(node.target._schema.is_mutable)
    is_known = roles.is_region_call(node) or node.target is compat.invoke_subgraph
    return isinstance(node.target, torch._ops.HigherOrderOperator) and not is_known


class _Borders:
    """A graph in stretches, and what its nodes read.

    Attributes:
        position: Positions of nodes in the graph.
        last: Position of the last node that reads memory, by the node whose memory it is.
        written: Nodes whose memory another node writes to.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.divided = divided = divide(graph)
        self.stretch_of, self.free, self.stretches = divided.stretch_of, divided.free, divided.stretches
        self.number = {stretch: number for number, stretch in enumerate(self.stretches)}
        self.position = {node: position for position, node in enumerate(graph.nodes)}
        self.last: dict[fx.Node, int] = {}
        self.written: set[fx.Node] = set()
        for node, position in self.position.items():
            for source in roles.tensor_inputs(node):
                self.last[self._memory_of(source)] = position
            if _writes(node):
                self.written.update(map(self._memory_of, roles.tensor_inputs(node)))
        self._copies: dict[fx.Node, fx.Node] = {}
        self._calls_before: dict[Stretch, int] = {}
        calls = 0
        for item in divided.plan:
            if isinstance(item, Stretch):
                self._calls_before[item] = calls
            else:
                calls += roles.is_region_call(item)

    def _memory_of(self, node: fx.Node) -> fx.Node:
        """Return the node whose memory a node is in."""
        while roles.is_view(node) or node.target is torch.ops.aten._unsafe_view.default:
            node = roles.tensor_inputs(node)[0]
        return node

    def _is_written(self, root: fx.Node) -> bool:
        while root.target is torch.ops._c10d_functional.wait_tensor.default:  # which returns what it is given
            root = self._memory_of(root.all_input_nodes[0])
        return root in self.written

    def _readers(self, node: fx.Node) -> list[fx.Node]:
        """Return what reads a node: itself, a view of it, or an element of what it returns."""
        found: dict[fx.Node, None] = {}
        seen, pending = {node}, [node]
        while pending:
            for user in pending.pop().users:
                if user in seen:
                    continue
                seen.add(user)
                if user in self.free or user.target is operator.getitem:
                    pending.append(user)
                else:
                    found[user] = None
        return list(found)

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        """Return the tensors that a node reads, behind views and numbers."""
        return [
            leaf
            for leaf in self._leaves_before(node)
            if not isinstance(leaf.meta.get("val"), roles.NUMBERS) and roles.nested_graph(leaf) is None
        ]

    def _leaves_before(self, node: fx.Node) -> list[fx.Node]:
        """Return all that a node reads, behind views and numbers."""
        return list(dict.fromkeys(leaf for given in node.all_input_nodes for leaf in self.divided.leaves(given)))

    def _free_before(self, node: fx.Node) -> list[fx.Node]:
        """Return the views and numbers that a node reads, in order."""
        found: set[fx.Node] = set()
        pending = [node]
        while pending:
            for source in pending.pop().all_input_nodes:
                if source in self.free and source not in found:
                    found.add(source)
                    pending.append(source)
        return sorted(found, key=self.position.__getitem__)

    def _kept(self, until: Mapping[fx.Node, int]) -> float | None:
        """Return the bytes that are kept for longer if values are read until a position.

        None: they cannot be. They are written to before, are in a communication buffer, or are a whole bucket.
        """
        last: dict[fx.Node, int] = {}
        for source, position in until.items():
            root = self._memory_of(source)
            last[root] = max(last.get(root, 0), position)
        kept = 0.0
        for root, position in last.items():
            if self._is_written(root):
                return None
            if self.last[root] >= position:
                continue
            call: Any = root.args[0] if root.target is operator.getitem else None
            is_output_of_region = call is not None and roles.is_region_call(call)
            if role_of(root) is not None or not (
                root in self.stretch_of or root.op == "placeholder" or is_output_of_region
            ):
                return None
            kept += _bytes(root)
        return kept

    # -- earlier ------------------------------------------------------------------------------------------------------

    def rise(self) -> int:
        """Move elementwise outputs that nothing else reads to the stretch of what they read. Return how many.

        Torch's partitioner leaves masks that backward needs at the end of forward.
        """
        moved = 0
        for stretch in self.stretches:
            for node in stretch.nodes:
                sources = self._sources(node)
                if (
                    not _is_elementwise(node)
                    or any(reader.op != "output" for reader in self._readers(node))
                    or not all(source in self.stretch_of for source in sources)
                    or not all(each in sources or each.op == "placeholder" for each in self._leaves_before(node))
                ):
                    continue
                there = max((self.stretch_of[source] for source in sources), key=self.number.__getitem__, default=None)
                if there is None or there is stretch or _bytes(node) > sum(map(_bytes, sources)):
                    continue
                last = end = there.nodes[-1]
                for each in self._free_before(node):
                    if self.position[each] > self.position[end]:
                        last.append(each)
                        last = each
                last.append(node)
                moved += 1
        return moved

    # -- later --------------------------------------------------------------------------------------------------------

    def sink(self) -> int:
        """Move values to the stretch that reads them first. Return how many."""
        targets: dict[fx.Node, Stretch] = {}
        for stretch in reversed(self.stretches):
            stay: set[fx.Node] = set()
            while True:
                found = self._targets(stretch, targets, stay)
                refused = {
                    node for part in self._connected(found) if not self._may_move(part, stretch) for node in part
                }
                if not refused:
                    break
                stay |= refused
            targets |= found
        moved: dict[Stretch, set[fx.Node]] = {}
        for node, there in targets.items():
            moved.setdefault(there, set()).add(node)
        for there, nodes in moved.items():
            first = next(node for node in there.nodes if _computing(node) not in targets)  # one of their readers stays
            pending = list(nodes)
            while pending:  # views and elements of what has moved follow it
                for user in pending.pop().users:
                    follows = user in self.free or user.target is operator.getitem
                    if follows and user not in nodes and self.position[user] < self.position[first]:
                        nodes.add(user)
                        pending.append(user)
            for node in sorted(nodes, key=self.position.__getitem__):
                first.prepend(node)
        return len(targets)

    def _targets(self, stretch: Stretch, targets: dict[fx.Node, Stretch], stay: set[fx.Node]) -> dict[fx.Node, Stretch]:
        """Return the later stretch that reads each node of a stretch first, of those that only later ones read."""
        found: dict[fx.Node, Stretch] = {}
        for node in reversed(stretch.nodes):
            if node in stay or not _is_fused(node):
                continue
            readers = [reader for reader in self._readers(node) if reader.op != "output"]
            places = [found.get(each) or targets.get(each) or self.stretch_of.get(each) for each in readers]
            numbers = [self.number[place] if place is not None else -1 for place in places]
            if numbers and min(numbers) > self.number[stretch]:
                found[node] = self.stretches[min(numbers)]
        return found

    def _connected(self, targets: dict[fx.Node, Stretch]) -> list[dict[fx.Node, Stretch]]:
        """Return groups of nodes that read each other, directly or behind others of the group."""
        left, groups = dict(targets), []
        while left:
            pending, group = [next(iter(left))], dict[fx.Node, Stretch]()
            while pending:
                node = pending.pop()
                if node in left:
                    group[node] = left.pop(node)
                    pending += [*self._readers(node), *map(_computing, self._sources(node))]
            groups.append(group)
        return groups

    def _may_move(self, part: dict[fx.Node, Stretch], stretch: Stretch) -> bool:
        """Whether values may be computed in later stretches: no more memory crosses borders, or little more the next.

        Args:
            part: The values, connected, with the stretch that each moves to.
        """
        until: dict[fx.Node, int] = {}
        for node, there in part.items():
            for source in self._sources(node):
                if _computing(source) not in part:
                    until[source] = max(until.get(source, 0), self.position[there.nodes[0]])
        kept = self._kept(until)
        if kept is None or kept == math.inf:
            return False
        read = [node for node in part if any(reader not in part for reader in self._readers(node))]
        freed = sum(_bytes(node) for node in read if all(reader.op != "output" for reader in self._readers(node)))
        here = self.number[stretch], self._calls_before[stretch]
        is_next = {(self.number[there] - 1, self._calls_before[there]) for there in part.values()} == {here}
        return kept <= freed * (AT_MOST if is_next else 1)

    # -- again --------------------------------------------------------------------------------------------------------

    def copy(self) -> int:
        """Compute values again in stretches that read those of others. Return how many."""
        copied = 0
        for stretch in self.stretches:
            first = stretch.nodes[0]
            at = self.position[first]
            read = {source for node in stretch.nodes for source in self._sources(node)} - set(stretch.nodes)
            made: dict[fx.Node, fx.Node] = {}
            for value in sorted(read, key=self.position.__getitem__):
                leaves = self._leaves(value, read, at, {}, DEPTH)
                if value in leaves or not leaves:  # what is made of constants alone is small, and is read
                    continue
                kept = self._kept({leaf: at for leaf in leaves if leaf not in self.free})
                is_kept_itself = any(reader.op == "output" for reader in self._readers(value))
                if kept is None or kept > (0 if is_kept_itself else _bytes(value)):
                    continue
                self._again(value, leaves, made, first)
                read |= leaves
            for node in stretch.nodes if made else ():
                for source in list(node.all_input_nodes):
                    node.replace_input_with(source, self._again(source, set(), made, first))
            copied += sum(node not in self.free for node in made)
        for node in reversed(self.position):  # what only copies have replaced
            if not node.users and node in self.stretch_of and _is_elementwise(node):
                self.graph.erase_node(node)
        return copied

    def _leaves(
        self, node: fx.Node, read: set[fx.Node], at: int, known: dict[fx.Node, set[fx.Node]], depth: int
    ) -> set[fx.Node]:
        """Return what a value is best computed from again at a position: itself, if it is best read.

        Views among them are of memory that is freed before. Copies of them are small.

        Args:
            read: What is read there in any case.
        """
        if not depth or node not in self.stretch_of or not _is_elementwise(node) or _bytes(node) == math.inf:
            return {node}
        if node in known:
            return known[node]
        leaves: set[fx.Node] = set()
        for given in node.all_input_nodes:
            if isinstance(given.meta.get("val"), roles.NUMBERS):
                if any(self.position[each] >= at for each in (*self._free_before(given), given)):
                    return {node}
            elif given in self.free and self._is_copied(given, node, at):
                leaves.add(given)
            else:
                for source in self._sources(given) if given in self.free else [given]:
                    leaves |= {source} if source in read else self._leaves(source, read, at, known, depth - 1)
        moved = sum(_bytes(leaf) * (1 if self._is_in_memory(leaf) else 2) for leaf in leaves - read)
        is_better = moved <= 2 * _bytes(node) and sum(map(_bytes, leaves - read)) <= _bytes(node)
        known[node] = leaves if is_better else {node}
        return known[node]

    def _is_copied(self, view: fx.Node, node: fx.Node, at: int) -> bool:
        """Whether a copy of a view is made so that ``node`` can be computed again: its memory is freed before."""
        is_small = SMALL * _bytes(view) <= _bytes(node)
        return is_small and not self._is_written(self._memory_of(view)) and self._kept({view: at}) is None

    def _is_in_memory(self, node: fx.Node) -> bool:
        """Whether a value is written to memory in any case."""
        if node in self.free:
            return False  # it is copied
        if node not in self.stretch_of or not _is_elementwise(node):
            return True
        return any(self.stretch_of.get(reader) is not self.stretch_of[node] for reader in self._readers(node))

    def _again(self, node: fx.Node, leaves: set[fx.Node], made: dict[fx.Node, fx.Node], first: fx.Node) -> fx.Node:
        """Return a node that computes a value again from ``leaves``, in front of a stretch's first node.

        It is the value itself if that is a leaf, or depends on nothing that was computed again.

        Args:
            made: What was computed again there, by what it replaces.
        """
        if node in made:
            return made[node]
        if node in leaves:
            return self._copied(node) if node in self.free else node
        if node not in self.free and (node not in self.stretch_of or not leaves):
            return node
        sources = {source: self._again(source, leaves, made, first) for source in node.all_input_nodes}
        is_same = all(source is its for source, its in sources.items())
        if node in self.free and is_same and (not leaves or self.position[node] < self.position[first]):
            return node
        with self.graph.inserting_before(first):
            again = made[node] = self.graph.node_copy(node, sources.__getitem__)
        self.position[again] = self.position[first]
        if node in self.free:
            self.free.add(again)
        else:
            self.stretch_of[again] = self.stretch_of[first]
            self.last[again] = self.position[self.stretch_of[first].nodes[-1]]
        for source in roles.tensor_inputs(again):
            root = self._memory_of(source)
            self.last[root] = max(self.last.get(root, 0), self.position[first])
        return again

    def _copied(self, view: fx.Node) -> fx.Node:
        """Return a copy of a view, made where the view is."""
        if view not in self._copies:
            with self.graph.inserting_after(view):
                copy = self.graph.call_function(torch.ops.aten.clone.default, (view,))
            copy.meta = {key: view.meta[key] for key in view.meta.keys() & {"val", "tensor_meta", "stack_trace"}}
            self._copies[view] = copy
            self.position[copy] = self.position[view]
        return self._copies[view]


def _computing(node: fx.Node) -> fx.Node:
    """Return the node that computes a value: of an element, the one that returns the elements."""
    while node.target is operator.getitem:
        node = node.args[0]  # type: ignore[assignment]
    return node
