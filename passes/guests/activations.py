"""Forward and backward graph: keep values that forward saves for backward in host memory meanwhile.

    forward     h = gelu(x)  copy = offload_saved(h)   unit i ... unit i + 1   wait_saved(copy, h)   unit i + 2 ...

    backward    unit i + 2   h = fetch_saved(copy)   unit i + 1   wait_saved(h, copy)   unit i reads h ...

A copy has the time of one unit at least. The memory of a value is free when the second unit after the one that computes
it begins, and is needed again one unit before the one that reads it, so that the values of two or three units are on
the device at any time. Peers: torch's ``_activation_offloading``, whose operators have the same form, and torchtitan's
``cpu_offload`` pass.

What is worth a copy: a value that a forward graph computes and returns only for the backward, if its memory is then
free and stays so for a while. These stay on the device: inputs, parameters, gathered buckets, what shares memory with
them or with an output of the model, small values, values that are not dense (a copy would have other strides), and, if
the graph holds a whole model, values of the last two units, which the backward reads at once.

:func:`apply` runs after the partition, and inserts the copies at the end of the forward graph and at the beginning of
the backward graph: there they are in the way of no pattern that the inner compiler looks for. :func:`place` moves them
apart when gathers have their places. Places are relative to units, and no collective moves.

Needs: the forward and backward graphs of one joint graph, with roles. Leaves: a forward graph that returns copies on
the host instead of the chosen values, and a backward graph that takes these copies as inputs.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor, fx

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.guests.offload.operators import FETCH_SAVED, OFFLOAD_SAVED, WAIT_SAVED
from mfsdp_compile.runtime.schedule.phase import Phase

from .. import roles
from ..context import Context, Feature, Report, role_of
from ..kernels import base, readers
from .solver.costs import CostModel
from .solver.flow import flow_of

roles.saved_copies.update({OFFLOAD_SAVED: "out", FETCH_SAVED: "back", WAIT_SAVED: "wait"})


@dataclass(frozen=True)
class _Value:
    """A value that forward saves.

    Args:
        node: The value, among forward's outputs.
        bytes: Its size.
        why_not: Why it stays on the device; empty: it may be offloaded, or is.
    """

    node: fx.Node
    bytes: int
    why_not: str = ""


def apply(
    forward: fx.Graph, backward: fx.Graph, context: Context, user_outputs: int, costs: CostModel | None
) -> Report:
    """Insert copies of saved values. This changes two graphs at once, as :mod:`.portions` does.

    Args:
        user_outputs: Number of outputs of the forward graph before those that are saved for backward.
        costs: Costs on the machine. Only ``"auto"`` needs them.
    """
    for graph in (forward, backward):
        roles.assign(graph)
    values = _choose(_examine(forward, context, user_outputs), forward, context, user_outputs, costs)
    chosen = [value for value in values if not value.why_not]
    lines = []
    for number, value in enumerate(chosen):
        _offload(value.node, backward, number, user_outputs)
        lines.append(f"{value.node.name}: {value.bytes:,} B in host memory from forward to backward")
    done = sum(value.bytes for value in chosen)
    stay: dict[str, int] = {}
    for value in values:
        if value.why_not:
            stay[value.why_not] = stay.get(value.why_not, 0) + value.bytes
    total = f"{done:,} B of saved values are offloaded"
    return Report("activations", [total, *lines, *(f"{size:,} B stay: {why}" for why, size in stay.items())])


def place(graph: fx.Graph, context: Context, phase: Phase) -> Report:
    """Move starts and waits of copies to their places."""
    turns = _turns(graph, context)
    lines = []
    for start in graph.find_nodes(op="call_function", target=OFFLOAD_SAVED):
        source, wait = start.all_input_nodes[0], _wait_of(start)
        source.append(start)
        last = _last_read(source, graph)
        free = _after(source, turns, 2)
        if free is not None and last < free:
            free.prepend(wait)
        elif free is not None:
            last.append(wait)
        lines.append(f"{source.name}: offloaded, on the device until {'the end' if free is None else wait.next.name}")
    order = {node: position for position, node in enumerate(graph.nodes)}
    top = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    starts = graph.find_nodes(op="call_function", target=FETCH_SAVED)
    first_reads = {start: min(user for user in start.users if user.target is not WAIT_SAVED) for start in starts}
    for start in sorted(starts, key=lambda start: order[first_reads[start]]):
        first, wait = first_reads[start], _wait_of(start)
        turn = bisect_right([order[node] for node in turns], order[first]) - 1
        before = turns[turn - 1] if turn >= 1 else None
        if before is not None:
            before.prepend(start)
        elif top.target is not FETCH_SAVED:
            top.prepend(start)
        first.prepend(wait)
        lines.append(f"{start.name}: fetched {'at once' if before is None else f'before {before.name}'}")
    return Report("activations", lines)


def _wait_of(start: fx.Node) -> fx.Node:
    (wait,) = (user for user in start.users if user.target is WAIT_SAVED and user.args[0] is start)
    return wait


def _turns(graph: fx.Graph, context: Context) -> list[fx.Node]:
    """Return the first node of each unit that reads the unit's parameters, in graph order."""
    uses = sorted((min(gather.uses), gather.bucket) for gather in roles.gathers(graph) if gather.uses)
    by_unit = itertools.groupby(uses, key=lambda use: context.buckets[use[1]].unit)
    return [next(group)[0] for _, group in by_unit]


def _after(node: fx.Node, turns: list[fx.Node], count: int) -> fx.Node | None:
    """Return the first node of the unit ``count`` units after the one that computes ``node``; None: there is none."""
    later = [turn for turn in turns if node < turn][count - 1 :]
    return later[0] if later else None


def _last_read(node: fx.Node, graph: fx.Graph) -> fx.Node:
    """Return the last node that reads a value's memory before the graph ends."""
    copies = (OFFLOAD_SAVED, WAIT_SAVED)
    return max([node, *(r for r in readers(base(node)) if r.op != "output" and r.target not in copies)])


def _examine(forward: fx.Graph, context: Context, user_outputs: int) -> list[_Value]:
    """Return the values that a forward graph saves, in graph order."""
    (outputs,) = forward.output_node().args
    saved = [value for value in outputs[user_outputs:] if isinstance(value, fx.Node)]  # type: ignore[index]
    returned = {base(value) for value in outputs[:user_outputs] if isinstance(value, fx.Node)}  # type: ignore[index]
    of_root: dict[fx.Node, int] = {}
    for node in saved:
        of_root[base(node)] = of_root.get(base(node), 0) + 1
    turns = _turns(forward, context)
    found = []
    for node in sorted(saved):
        value, root = node.meta.get("val"), base(node)
        if not isinstance(value, Tensor) or root.op != "call_function" or role_of(root) is not None:
            continue  # a size, an input of the graph, or something gathered
        size = compat.concrete(value.numel()) * value.dtype.itemsize
        free = _after(node, turns, 2)
        if size < context.policy.activation_offload_least:
            why_not = f"smaller than {context.policy.activation_offload_least:,} B"
        elif root in returned:
            why_not = "an output of the model has the same memory"
        elif of_root[root] > 1:
            why_not = "other saved values have the same memory"
        elif roles.is_collective(root) or not _is_dense(value):
            why_not = "not dense"
        elif context.whole_model and (free is None or _last_read(node, forward) > turns[-1]):
            why_not = "needed until the end of forward, or at the beginning of backward"
        else:
            why_not = ""
        found.append(_Value(node, size, why_not))
    return found


def _choose(
    values: list[_Value], forward: fx.Graph, context: Context, user_outputs: int, costs: CostModel | None
) -> list[_Value]:
    """Return the values with a reason for those that may be offloaded and are not to be."""
    limit = context.policy.activation_offload
    possible = [value for value in values if not value.why_not]
    why_not = dict.fromkeys(possible, "")
    if limit == "auto":
        assert costs is not None
        for copied, seconds in _by_time(possible, forward, context, user_outputs, costs):
            left = seconds
            for value in sorted(copied, key=lambda value: -value.bytes):
                left -= (needed := costs.host_copy(value.bytes))
                if left < 0:
                    left += needed
                    why_not[value] = "no time for a copy while the next unit computes"
    elif limit is not True:
        done = 0
        for value in possible:
            why_not[value] = "" if done < limit else "more than is asked for"
            done += value.bytes if done < limit else 0
    return [replace(value, why_not=value.why_not or why_not[value]) for value in values]


def _by_time(
    values: list[_Value], forward: fx.Graph, context: Context, user_outputs: int, costs: CostModel
) -> Iterator[tuple[list[_Value], float]]:
    """Yield the values that each unit computes, with the seconds that the next unit computes for."""
    flow = flow_of(forward, context, costs, user_outputs=user_outputs)
    place = {node: float(position) for position, node in enumerate(forward.nodes)}
    turns = [place[node] for node in _turns(forward, context)]
    seconds = [0.0] * (len(turns) + 1)
    for kernel, needed in zip(flow.kernels, flow.seconds, strict=True):
        seconds[bisect_right(turns, kernel.place)] += needed
    for turn in range(len(turns) + 1):
        of_turn = [value for value in values if bisect_right(turns, place[value.node]) == turn]
        yield of_turn, seconds[min(turn + 1, len(turns))]


def _is_dense(value: Tensor) -> bool:
    """Whether the elements of a tensor fill their memory without gaps, and none is in it twice."""
    sizes = [
        (compat.concrete(stride), compat.concrete(size))
        for stride, size in zip(value.stride(), value.shape, strict=True)
    ]
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in sizes if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _offload(value: fx.Node, backward: fx.Graph, number: int, user_outputs: int) -> None:
    """Save a copy of a value in its place, and let the backward fetch it."""
    forward = value.graph
    saved = next(node for node in backward.find_nodes(op="placeholder") if node.name == value.name)
    example, name = value.meta["val"], f"mfsdp_saved_{number}"  # a saved value has the same name in both graphs
    on_host = example.new_empty_strided(example.shape, example.stride(), device="cpu")
    output = forward.output_node()
    with forward.inserting_before(output):
        copy = forward.create_node("call_function", OFFLOAD_SAVED, (value,), name=name)
        forward.call_function(WAIT_SAVED, (copy, value))
    (values,) = output.args
    kept = (copy if i >= user_outputs and v is value else v for i, v in enumerate(values))  # type: ignore[arg-type]
    output.args = (tuple(kept),)
    with backward.inserting_before(saved):
        placeholder = backward.placeholder(name)
    top = next(node for node in backward.nodes if node.op not in ("placeholder", "get_attr"))
    with backward.inserting_before(top):
        fetched = backward.call_function(FETCH_SAVED, (placeholder, example.device.type))
        backward.call_function(WAIT_SAVED, (fetched, placeholder))
    copy.meta["val"] = placeholder.meta["val"] = on_host
    fetched.meta["val"] = example
    saved.replace_all_uses_with(fetched)
    backward.erase_node(saved)


@dataclass(frozen=True)
class ActivationOffload(Feature):
    """Keeps values that forward saves for backward in host memory.

    Args:
        costs: Costs on the machine. Only ``"auto"`` needs them.
    """

    costs: CostModel | None = field(default=None, repr=False)

    runs_late: ClassVar = {Phase.FORWARD: (place,), Phase.BACKWARD: (place,)}

    def rewrite_both(self, forward: fx.Graph, backward: fx.Graph, context: Context, user_outputs: int) -> Report:
        return apply(forward, backward, context, user_outputs, self.costs)
