"""The stores that ranks of a group agree through: a tree of two levels, where one store would serve too many.

A TCPStore serves some 30,000 requests a second, on one thread. So ranks of a large job count themselves in at the store of their
part of the group, which the first rank of the part keeps. The last one to come counts the part in at the root, the store of the
default process group, waits there for the verdict, and copies it to the part's store::

    root        rank 0's             an answer of each part
    parts       their first ranks'   one of each rank; sqrt(n) parts of sqrt(n) ranks

What is rare is at the root alone: verdicts of ranks that have failed, lines that differ, what the watchdog has to say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from . import compat

__all__ = ["PART", "Branch", "branch_of"]

PART = 64
"""Ranks of which one store serves an agreement in 10 ms. A job of no more has one store, and larger parts where the root would have
more parts than a part has ranks."""

PATIENCE = timedelta(seconds=30)
"""For a request to another rank's store."""


@dataclass(eq=False)
class Branch:
    """This rank's way to the root.

    Args:
        root: the store of the default process group.
        ranks: of the group.
        name: of the group.
        size: ranks of a part; the last one may have fewer.
        number: of this rank's part.

    Attributes:
        part: the store of this rank's part: the root, where there is one part; None until :meth:`join` or :meth:`serve`.
    """

    root: dist.Store
    ranks: Sequence[int]
    name: str
    size: int
    number: int
    part: dist.Store | None = field(default=None)

    @property
    def parts(self) -> int:
        return -(-len(self.ranks) // self.size)

    @property
    def is_tree(self) -> bool:
        return self.part is not self.root

    def members(self, number: int | None = None) -> Sequence[int]:
        """Ranks of a part; None: of this rank's."""
        begin = (self.number if number is None else number) * self.size
        return self.ranks[begin : begin + self.size]

    @property
    def keeper(self) -> int:
        """The rank that keeps the store of this rank's part."""
        return self.members()[0]

    def address_key(self, number: int | None = None) -> str:
        """Where the root says where a part's store is."""
        return f"mfsdp/stores/{self.name}/{self.number if number is None else number}"

    def serve(self) -> None:
        """On the part's first rank: its store."""
        self.part, address = _own_store(self.root)
        self.root.set(self.address_key(), json.dumps(address))

    def join(self) -> None:
        """On the others, when the root has the address."""
        self.part = self.connect(self.number)

    def connect(self, number: int) -> dist.Store:
        """To the store of a part that the root has the address of.

        Raises:
            OSError: nobody listens there any more.
        """
        host, port = json.loads(self.root.get(self.address_key(number)))
        return compat.connect_to_store(host, port, PATIENCE)


_branches: dict[str, Branch] = {}
"""By name of the group."""
_own: tuple[dist.Store, dist.Store, tuple[str, int]] | None = None
"""The store that this process keeps, for a root: it serves all groups of which this is the first rank of a part."""


def branch_of(name: str, ranks: Sequence[int]) -> Branch:
    """Of a process group with this name. No communication."""
    root = compat.default_store()
    branch = _branches.get(name)
    if branch is None or branch.root is not root:
        size = max(PART, math.isqrt(len(ranks)))
        branch = Branch(root, ranks, name, size, ranks.index(dist.get_rank()) // size)
        if dist.get_world_size() <= PART or compat.address_towards(root) is None:
            branch.size, branch.number, branch.part = len(ranks), 0, root
        _branches[name] = branch
    return branch


def _own_store(root: dist.Store) -> tuple[dist.Store, tuple[str, int]]:
    global _own
    if _own is None or _own[0] is not root:
        host = compat.address_towards(root)
        assert host is not None
        store = compat.serve_store(host, PATIENCE)
        _own = root, store, (host, store.port)
    return _own[1], _own[2]
