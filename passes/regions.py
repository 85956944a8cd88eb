"""Dynamo's graph: move equal units into regions, which are traced and compiled once and called once per unit.

Before                                              After
    q = mfsdp.unshard(L_layers_0_q)                     region_0 = <graph>
    linear = linear(x, q)                               layers_0 = mfsdp_region(region_0, bucket, bucket, x)
    ...                                                 getitem = layers_0[0]
    q_1 = mfsdp.unshard(L_layers_1_q)                   layers_1 = mfsdp_region(region_0, bucket, bucket, getitem)
    linear_7 = linear(add, q_1)                         getitem_1 = layers_1[0]

A region takes, for each of the unit's buckets, the gathered bucket and an anchor, a tensor without memory that receives
the packed gradient; then the scales of buckets that stay in float8; then the values that it reads. To the passes, its
graph looks like one that the eager path serves: its buckets are whole at all times and on one rank. Everything that
communicates stays outside.

Units are equal if they do the same operations, in the same order, with the same constants, on values of the same kind,
with parameters at the same places of equal buckets. If autograd would sum several gradients of a value that is read
outside too, the region takes the value once per use: gradients are then added in the same order as without regions.

Needs: shell placeholders with their roles. Leaves: calls whose first operands are shells, one of each bucket, twice,
and one of each bucket that stays in float8; :mod:`.unshard` replaces them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.formats.quantize import MULTIPLIED

from . import unshard
from .context import BucketInfo, Context, NodeKind, role_of
from .roles import MARK, REGION, attribute_of, nested_graph

LEAST = 3
"""With ``options={"regions": "auto"}``, units become a region if at least this many of them are equal."""


@dataclass(frozen=True, eq=False)
class RegionBody:
    """The body of a region.

    Args:
        name: Name of the region, which is that of the attribute that holds its graph.
        module: Graph of one unit. It takes an anchor and a whole bucket for each bucket, and then what the unit reads.
        units: Units that the region stands for, in order.
        buckets: Buckets as the region sees them.
        differentiable: Whether each output needs a gradient.
    """

    name: str
    module: fx.GraphModule
    units: tuple[str, ...]
    buckets: tuple[BucketInfo, ...]
    differentiable: tuple[bool, ...]


@dataclass(eq=False)
class _Run:
    """Nodes of one forward of a unit, in order.

    Args:
        unit: Name of the unit.
        nodes: The nodes.
        buckets: Indices of the buckets whose parameters it reads.
        shells: Shells that it reads.
        inputs: Values that it reads, one entry for each operand of the call.
        repeated: Inputs that have an operand for each use.
        outputs: Values that others read.
        around: Nodes that enter the contexts which surround it.
    """

    unit: str
    nodes: list[fx.Node]
    buckets: list[int] = field(default_factory=list)
    shells: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    repeated: set[fx.Node] = field(default_factory=set)
    outputs: list[fx.Node] = field(default_factory=list)
    around: tuple[fx.Node, ...] = ()


def outline(
    graph: fx.Graph,
    context: Context,
    units: Mapping[str, str],
    served: Sequence[BucketInfo],
    least: int,
    refused: Mapping[str, str],
) -> tuple[list[RegionBody], dict[str, str]]:
    """Move equal units into regions.

    Args:
        units: Names of units by the key of their modules in ``meta["nn_module_stack"]``.
        served: The context's buckets as regions see them.
        least: Number of equal units from which on they become a region.
        refused: Units that cannot be regions, each with the reason.

    Returns:
        The regions, and why other units are none.
    """
    owner = graph.owning_module
    assert owner is not None
    why_not = dict(refused)
    runs = []
    shells: dict[int, list[fx.Node]] = {}
    for node in graph.find_nodes(op="placeholder"):
        if (role := role_of(node)) is not None and role.kind is NodeKind.SHELL:
            shells.setdefault(role.bucket, []).append(node)
    for run in _runs(graph, units):
        reason = _examine(run, shells, context)
        if run.unit in why_not or reason:
            why_not.setdefault(run.unit, reason)
        else:
            runs.append(run)
    kinds: dict[Any, list[_Run]] = {}
    for run in runs:
        kinds.setdefault(_key(run, context, served), []).append(run)
    bodies: list[tuple[RegionBody, list[_Run]]] = []
    for same in kinds.values():
        if len(same) >= least:
            bodies.append((_body(f"region_{len(bodies)}", same, context, served), same))
            continue
        count = f"only {len(same)} units are equal" if len(same) > 1 else "no other unit is equal to it"
        why_not |= {run.unit: f"{count}, and a region needs {least}" for run in same}
    now: dict[fx.Node, fx.Node] = {}
    for body, same in bodies:
        setattr(owner, body.name, body.module)
        for run in same:
            _replace(run, graph, body, now)
    graph.lint()
    return [body for body, _ in bodies], why_not


# -- runs -------------------------------------------------------------------------------------------------------------


def unit_of(node: fx.Node, units: Mapping[str, str]) -> str | None:
    """Return the innermost unit in whose forward a node was traced.

    For a node with nested graphs, it may also be the unit that all nodes of these belong to.
    """
    stack = node.meta.get("nn_module_stack") or {}
    for key in reversed(list(stack)):
        if (unit := units.get(str(key).partition("@")[0])) is not None:
            return unit
    for body in _nested(node):
        found = {unit_of(inner, units) for inner in body.graph.nodes if inner.op not in ("placeholder", "output")}
        if len(found) == 1:
            return found.pop()
    return None


def _units_of(graph: fx.Graph, units: Mapping[str, str]) -> dict[fx.Node, str | None]:
    """Return the unit of each node that computes, None for none.

    An element of what a unit's operator returns belongs to the unit, and so does a context that is entered and left in
    one forward of it: torch does not say where these come from.
    """
    found: dict[fx.Node, str | None] = {}
    inside: dict[fx.Node, set[str | None]] = {}  # contexts that are entered: the units of the nodes in them
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        source = node.args[0] if node.target is operator.getitem else None
        is_element = isinstance(source, fx.Node) and isinstance(source.meta.get("example_value"), (tuple, list))
        found[node] = found.get(source) if is_element else unit_of(node, units)  # type: ignore[arg-type]
        if compat.enters_context(node):
            inside[node] = set()
            continue
        opened = compat.exits_context(node)
        for seen in inside.values() if opened is None else ():
            seen.add(found[node])
        if opened in inside and len(seen := inside.pop(opened)) == 1:
            found[opened] = found[node] = seen.pop()
    return found


def _nested(node: fx.Node) -> list[fx.GraphModule]:
    """Return the graphs that an operator takes, such as the body of a checkpoint."""
    found = map(nested_graph, node.all_input_nodes if node.op == "call_function" else ())
    return [body for body in found if body is not None]


def _runs(graph: fx.Graph, units: Mapping[str, str]) -> Iterator[_Run]:
    entered: list[fx.Node] = []
    run: _Run | None = None
    found = _units_of(graph, units)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            continue
        unit = found.get(node)
        if run is not None and unit != run.unit:
            yield run
            run = None
        if unit is not None and run is None:
            run = _Run(unit, [], around=tuple(entered))
        if run is not None:
            run.nodes.append(node)
        if compat.enters_context(node):
            entered.append(node)
        elif (opened := compat.exits_context(node)) in entered:
            entered.remove(opened)


def _examine(run: _Run, shells: Mapping[int, Sequence[fx.Node]], context: Context) -> str:
    """Fill in what a run reads and returns. Return why it cannot be a region, or an empty string.

    Args:
        shells: The graph's shells, by bucket.
    """
    for info in context.buckets:
        wrapped = info.exchange.stays_quantized and info.exchange.form != MULTIPLIED  # modules get tensor subclasses
        if info.unit == run.unit and wrapped:
            return f"its parameters in {info.name} are used as they are gathered in float8"
    own = set(run.nodes)
    places: dict[fx.Node, int] = {}
    for node in run.nodes:
        for source in _reads(node):
            if source in own or source.op == "get_attr":
                continue
            role = role_of(source)
            if role is not None and role.kind is NodeKind.SHELL:
                if source not in run.shells:
                    run.shells.append(source)
                    if role.bucket not in run.buckets:
                        run.buckets.append(role.bucket)
            else:
                places[source] = places.get(source, 0) + 1
        if not own.issuperset(node.users):
            run.outputs.append(node)
    if reason := _imbalance(run):
        return reason
    for bucket in run.buckets:
        name = context.buckets[bucket].name
        if context.buckets[bucket].unit != run.unit:
            return f"it reads parameters of {name}"
        if not all(own.issuperset(shell.users) for shell in shells[bucket]):
            return f"its parameters in {name} are read elsewhere too, or in another call of it"
    if not run.buckets:
        return "it reads no parameters"
    for node in (*run.outputs, *places):
        value = node.meta.get("example_value")
        if not isinstance(value, Tensor):
            return f"{node.name} is passed across its border, which is a {type(value).__name__} and no tensor"
        if type(value) is not compat.FakeTensor:
            return f"{node.name} is passed across its border, which is a {type(value).__name__}"
        if not all(isinstance(size, int) for size in (*value.shape, *value.stride())):
            return f"the shape of {node.name} is dynamic"
    for source, count in places.items():
        if count > 1 and source.meta["example_value"].requires_grad and not own.issuperset(source.users):
            run.repeated.add(source)
            run.inputs += [source] * count
        else:
            run.inputs.append(source)
    return ""


def _reads(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that a node reads, once for each time that it reads them."""
    found: list[fx.Node] = []

    def read(source: fx.Node) -> fx.Node:
        found.append(source)
        return source

    fx.map_arg((node.args, node.kwargs), read)
    return found


def _imbalance(run: _Run) -> str:
    """Return why a run changes the state of the program around it, or an empty string."""
    entered: list[fx.Node] = []
    for node in run.nodes:
        if compat.enters_context(node):
            entered.append(node)
        elif compat.exits_context(node):
            if compat.exits_context(node) not in entered:
                return f"{node.name} leaves a context that was entered outside"
            entered.remove(compat.exits_context(node))
        elif compat.sets_state(node):
            return f"{node.name} changes the state of torch"
    return f"{entered[0].name} enters a context that is left outside" if entered else ""


# -- equality ---------------------------------------------------------------------------------------------------------


def _key(run: _Run, context: Context, served: Sequence[BucketInfo]) -> Any:
    """Return a value that is equal for equal units."""
    names: dict[fx.Node, Any] = {node: ("node", i) for i, node in enumerate(run.nodes)}
    for shell in run.shells:
        role = role_of(shell)
        assert role is not None
        names[shell] = ("parameter", run.buckets.index(role.bucket), role.index, compat.requires_grad(shell))
    for i, source in enumerate(dict.fromkeys(run.inputs)):
        names[source] = ("input", i, source in run.repeated, _described(source.meta.get("example_value")))
    return (
        tuple(served[bucket].signature for bucket in run.buckets),
        tuple(context.buckets[bucket].signature for bucket in run.buckets),
        tuple(_line(node, names) for node in (*run.around, *run.nodes)),
        tuple(names[node] for node in run.outputs),
    )


def _line(node: fx.Node, names: Mapping[fx.Node, Any]) -> Any:
    args = node.args[:1] if node.target in unshard.MARKERS else node.args
    if node.op == "output":
        return "output", _plain(args, names)
    described = _described(node.meta.get("example_value"))
    target = None if node.op == "placeholder" else node.target
    return node.op, target, _plain(args, names), _plain(node.kwargs, names), described


def _policy(body: fx.GraphModule) -> Any:
    """Return the policy of a checkpoint, in a form that is equal for equal policies; None for other bodies."""
    policy = compat.checkpoint_policy(body)
    if not isinstance(policy, functools.partial):
        return policy
    return policy.func, _plain(policy.args, {}), _plain(policy.keywords, {})


def _plain(value: Any, names: Mapping[fx.Node, Any]) -> Any:
    """Return a hashable value that is equal for equal arguments."""
    if isinstance(value, fx.Node):
        if value in names:
            return names[value]
        if value.op == "get_attr":
            return _of_attribute(attribute_of(value))
        return "around", value.name
    if isinstance(value, (tuple, list)):
        return type(value).__name__, tuple(_plain(item, names) for item in value)
    if isinstance(value, dict):
        return "dict", tuple((key, _plain(item, names)) for key, item in value.items())
    if isinstance(value, slice):
        return "slice", _plain((value.start, value.stop, value.step), names)
    try:
        hash(value)
    except TypeError:
        return type(value), repr(value)
    return type(value), value  # True, 1 and 1.0 are equal


def _of_attribute(value: Any) -> Any:
    if not isinstance(value, fx.GraphModule):
        return "constant", id(value)
    names: dict[fx.Node, Any] = {}
    lines = []
    for i, node in enumerate(value.graph.nodes):
        names[node] = ("nested", i)
        lines.append(_line(node, names))
    return "graph", _policy(value), tuple(lines)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        sizes = (tuple(n if isinstance(n, int) else str(n) for n in each) for each in (value.shape, value.stride()))
        return *sizes, value.dtype, value.device, value.requires_grad  # a size that is an expression has no hash
    if isinstance(value, (tuple, list)):
        return tuple(_described(item) for item in value)
    return type(value)


# -- rewriting --------------------------------------------------------------------------------------------------------


def _body(name: str, runs: Sequence[_Run], context: Context, served: Sequence[BucketInfo]) -> RegionBody:
    run = runs[0]
    owner = run.nodes[0].graph.owning_module
    assert owner is not None
    graph = fx.Graph()
    made = fx.GraphModule({}, graph)
    values: dict[fx.Node, fx.Node] = {}
    infos = tuple(served[bucket] for bucket in run.buckets)
    pairs = []
    for number in range(len(infos)):
        pairs.append((graph.placeholder(f"anchor_{number}"), graph.placeholder(f"bucket_{number}")))
    scales = {n: graph.placeholder(f"scales_{n}") for n, info in enumerate(infos) if info.exchange.stays_quantized}
    operands: dict[fx.Node, list[fx.Node]] = {}
    for number, source in enumerate(run.inputs):
        placeholder = graph.placeholder(f"operand_{number}")
        placeholder.meta["example_value"] = source.meta["example_value"]
        operands.setdefault(source, []).append(placeholder)
    gathered = []
    for number, ((anchor, whole), info) in enumerate(zip(pairs, infos, strict=True)):
        gathered.append(
            graph.call_function(torch.ops.mfsdp.gather.default, (anchor, whole, None, None, *info.exchange))
        )
        gathered[-1].meta["custom"] = {MARK: number}
    split = {number: unshard.split_scales(graph, of, number, infos[number]) for number, of in scales.items()}
    quantized: dict[fx.Node, tuple[fx.Node, fx.Node, fx.Node]] = {}
    for shell in run.shells:
        role = role_of(shell)
        assert role is not None
        number = run.buckets.index(role.bucket)
        parameter = graph.call_function(operator.getitem, (gathered[number], role.index))
        parameter.meta["custom"] = {MARK: number}
        if infos[number].trainable and not compat.requires_grad(shell):  # frozen since the model was sharded
            parameter = graph.call_method("detach", (parameter,))
            parameter.meta["custom"] = {MARK: number}
        if number in split:
            # Takes the place of the shell until its markers are known.
            values[shell] = graph.placeholder(shell.name)
            quantized[values[shell]] = unshard.parts_of(
                parameter, gathered[number], split[number], role.index, infos[number]
            )
        else:
            values[shell] = parameter

    def of(source: fx.Node) -> fx.Node:
        """Return what stands for a value in the region. Later uses take earlier operands."""
        if source in operands:
            return operands[source].pop() if source in run.repeated else operands[source][0]
        if source.op == "get_attr" and source not in values:
            copied = attribute_of(source)
            if isinstance(copied, fx.GraphModule):
                copied = compat.copy_graph_module(copied)
            setattr(made, str(source.target).replace(".", "_"), copied)
            values[source] = graph.get_attr(str(source.target).replace(".", "_"))
        return values[source]

    for node in (*run.around, *run.nodes):
        if node.target in unshard.PLAIN_MARKERS:
            values[node] = of(node.args[0])  # type: ignore[arg-type]
            continue
        values[node] = graph.node_copy(node, of)
    for node in reversed(run.around):
        graph.call_function(compat.exit_of(node), (values[node],))
    graph.output(tuple(values[node] for node in run.outputs))
    for placeholder, parts in quantized.items():
        unshard.hand_out(placeholder, parts)
        graph.erase_node(placeholder)
    unshard.erase_markers(made)
    graph.lint()
    made.recompile()
    differentiable = tuple(bool(node.meta["example_value"].requires_grad) for node in run.outputs)
    return RegionBody(name, made, tuple(run.unit for run in runs), infos, differentiable)


def _replace(run: _Run, graph: fx.Graph, body: RegionBody, now: dict[fx.Node, fx.Node]) -> None:
    """Replace a run by a call.

    Args:
        now: What stands for the outputs of the runs that have been replaced.
    """
    last = run.nodes[-1]
    shell_of: dict[int, fx.Node] = {}
    for shell in run.shells:
        role = role_of(shell)
        assert role is not None
        shell_of.setdefault(role.bucket, shell)
    buckets = [shell_of[bucket] for bucket in run.buckets for _ in range(2)]
    buckets += [
        shell_of[bucket]
        for bucket, info in zip(run.buckets, body.buckets, strict=True)
        if info.exchange.stays_quantized
    ]
    with graph.inserting_after(last):
        attribute = graph.get_attr(body.name)
    with graph.inserting_after(attribute):
        call = graph.create_node(
            "call_function",
            compat.region_call,
            (attribute, *buckets, *(now.get(v, v) for v in run.inputs)),
            name=run.unit.replace(".", "_"),
        )
    call.meta = {k: last.meta[k] for k in ("nn_module_stack", "stack_trace") if k in last.meta}
    call.meta["custom"] = {REGION: tuple(run.buckets)}
    call.meta["example_value"] = tuple(node.meta["example_value"] for node in run.outputs)
    after, own = call, set(run.nodes)
    for number, node in enumerate(run.outputs):
        with graph.inserting_after(after):
            after = graph.call_function(operator.getitem, (call, number))
        after.meta["example_value"] = node.meta["example_value"]
        node.replace_all_uses_with(after, delete_user_cb=lambda user: user not in own)
        now[node] = after
    for node in reversed(run.nodes):
        graph.erase_node(node)
