"""The stores through which the ranks of a group agree: a tree of two levels if one store would serve too many ranks.

A TCPStore serves some 30,000 requests per second, on one thread. In a large job, each rank therefore counts itself in
at the store of its part of the group, which the first rank of the part serves. The last rank of the part to arrive
counts the part in at the root, the store of the default process group. It waits there for the verdict and copies it to
the part's store::

    root        served by rank 0               one request per part
    parts       served by their first ranks    one request per rank; sqrt(n) parts of sqrt(n) ranks

Rare requests go to the root only: verdicts of ranks that have failed, lines that differ, messages of the watchdog.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from .. import compat

PART = 64
"""Number of ranks that one store serves an agreement in 10 ms. A job with no more ranks has one store. Parts are larger
if there would otherwise be more parts than ranks in a part."""

PATIENCE = timedelta(seconds=30)
"""Timeout of a request to another rank's store."""


@dataclass(eq=False)
class Branch:
    """This rank's path to the root.

    Args:
        root: The store of the default process group.
        ranks: Ranks of the group.
        name: Name of the group.
        size: Number of ranks in a part; the last part may have fewer.
        number: Number of this rank's part.

    Attributes:
        part: The store of this rank's part. If there is only one part, this is the root. None until :meth:`join` or
            :meth:`serve`.
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
        """Return the ranks of a part; None: of this rank's part."""
        begin = (self.number if number is None else number) * self.size
        return self.ranks[begin : begin + self.size]

    @property
    def keeper(self) -> int:
        """The rank that serves the store of this rank's part."""
        return self.members()[0]

    def address_key(self, number: int | None = None) -> str:
        """Return the key of the root under which the address of a part's store is published."""
        return f"mfsdp/stores/{self.name}/{self.number if number is None else number}"

    def serve(self) -> None:
        """Create the part's store and publish its address. Called on the part's first rank."""
        self.part, address = _own_store(self.root)
        self.root.set(self.address_key(), json.dumps(address))

    def join(self) -> None:
        """Connect to the part's store. Called on the other ranks once the root has the address."""
        self.part = self.connect(self.number)

    def connect(self, number: int) -> dist.Store:
        """Connect to the store of a part whose address the root has.

        Raises:
            OSError: The store is gone.
        """
        host, port = json.loads(self.root.get(self.address_key(number)))
        return compat.connect_to_store(host, port, PATIENCE)


_branches: dict[str, Branch] = {}
"""Branches by name of the group."""
_own: tuple[dist.Store, dist.Store, tuple[str, int]] | None = None
"""The root, the store that this process serves, and its address. The store serves all groups in which this process is
the first rank of a part."""


def branch_of(name: str, ranks: Sequence[int]) -> Branch:
    """Return the branch of a process group with this name. Does not communicate."""
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
