"""Finding gathers and reductions in the graphs that AOTAutograd makes.

    shard -> [cast] -> all_gather -> wait -> view -> view ...         one :class:`Gather`
                                         \\-> view -> compute

    gradients -> pack_gradients -> reduce_scatter -> wait -> [cast] -> output         one :class:`Reduction`

``passes.unshard`` marks the ``gather`` call in Dynamo's graph with the number of its bucket, in ``meta["custom"]``,
which AOTAutograd copies to all nodes that come of it, forward and backward. This module turns marks into roles.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from .context import Kind, Role, role_of, set_role

__all__ = ["MARK", "Gather", "Reduction", "assign", "gathers", "is_view", "reductions"]

MARK = "mfsdp_bucket"

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Gather:
    """The nodes that gather one bucket.

    Args:
        bucket: its number in the context.
        before: the shard's cast, if any.
        start, wait: of the all-gather.
        views: of the gathered bucket, also views of views, in graph order.
        uses: nodes that read the gathered values.
    """

    bucket: int
    before: tuple[fx.Node, ...]
    start: fx.Node
    wait: fx.Node
    views: tuple[fx.Node, ...]
    uses: tuple[fx.Node, ...]


@dataclass(frozen=True)
class Reduction:
    """The nodes that reduce one bucket's gradients; ``after`` is what turns the result into the graph's output."""

    bucket: int
    pack: fx.Node
    start: fx.Node
    wait: fx.Node
    after: tuple[fx.Node, ...]


def is_view(node: fx.Node) -> bool:
    """Whether a node aliases its first input without changing it."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return isinstance(node.args[0], fx.Node) and is_view(node.args[0])
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def assign(graph: fx.Graph) -> None:
    """Give every node that gathers or reduces a bucket its role."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        role = role_of(source) if source is not None else None
        bucket = (node.meta.get("custom") or {}).get(MARK)
        if node.target is _c10d.all_gather_into_tensor.default and bucket is not None:
            assert source is not None
            set_role(node, Role(Kind.START_GATHER, bucket))
            if source.op == "placeholder":
                set_role(source, Role(Kind.SHARD, bucket))
            else:
                set_role(source, Role(Kind.CAST, bucket))
                set_role(source.all_input_nodes[0], Role(Kind.SHARD, bucket))
        elif node.target is torch.ops.mfsdp.pack_gradients.default and bucket is not None:
            set_role(node, Role(Kind.PACK, bucket))
        elif role is None:
            continue
        elif node.target is _c10d.reduce_scatter_tensor.default and role.kind is Kind.PACK:
            set_role(node, Role(Kind.START_REDUCE, role.bucket))
        elif node.target is _c10d.wait_tensor.default and role.kind is Kind.START_GATHER:
            set_role(node, Role(Kind.GATHERED, role.bucket))
        elif node.target is _c10d.wait_tensor.default and role.kind is Kind.START_REDUCE:
            set_role(node, Role(Kind.REDUCED, role.bucket))
        elif role.kind in (Kind.GATHERED, Kind.VIEW) and is_view(node):
            set_role(node, Role(Kind.VIEW, role.bucket))


def _of_kind(graph: fx.Graph, kind: Kind) -> Iterator[tuple[fx.Node, Role]]:
    for node in graph.nodes:
        role = role_of(node)
        if role is not None and role.kind is kind:
            yield node, role


def gathers(graph: fx.Graph) -> list[Gather]:
    """All gathers of a graph with roles, in graph order."""
    return [_gather(node, role) for node, role in _of_kind(graph, Kind.START_GATHER)]


def _gather(start: fx.Node, role: Role) -> Gather:
    source = start.all_input_nodes[0]
    source_role = role_of(source)
    before = (source,) if source_role is not None and source_role.kind is Kind.CAST else ()
    (wait,) = (user for user in start.users if (r := role_of(user)) and r.kind is Kind.GATHERED)
    views: list[fx.Node] = []
    uses: dict[fx.Node, None] = {}
    pending = [wait]
    while pending:
        for user in pending.pop().users:
            user_role = role_of(user)
            if user_role is not None and user_role.kind is Kind.VIEW:
                if user not in views:
                    views.append(user)
                    pending.append(user)
            else:
                uses[user] = None
    return Gather(role.bucket, before, start, wait, tuple(sorted(views)), tuple(sorted(uses)))


def reductions(graph: fx.Graph) -> list[Reduction]:
    """All reductions of a graph with roles, in graph order."""
    found = []
    for start, role in _of_kind(graph, Kind.START_REDUCE):
        (wait,) = (user for user in start.users if (r := role_of(user)) and r.kind is Kind.REDUCED)
        after: list[fx.Node] = []
        pending = [wait]
        while pending:
            for user in pending.pop().users:
                if user.op != "output" and user not in after:
                    after.append(user)
                    pending.append(user)
        found.append(Reduction(role.bucket, start.all_input_nodes[0], start, wait, tuple(sorted(after))))
    return found
