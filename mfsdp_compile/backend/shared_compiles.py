"""Ranks of a machine share the work of compiling pieces: each piece is compiled by the rank that first claims it.

Pieces have no rank, group or address in them, and Inductor keeps what it has compiled on the disk. A rank claims pieces
in the store, one after the other, and compiles those that no other rank has claimed. It then loads the others, as soon
as they are there. A rank never waits while it has a claim, so none waits for another in a circle. If a rank has ended,
or has failed to compile what it had claimed, others compile it themselves: claims save time, and nothing depends on
them.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import torch.distributed as dist

from mfsdp_compile import progress
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.digests import digest
from mfsdp_compile.runtime.ranks.lifeline import ask

LOOK = 0.05
"""Seconds between two looks whether another rank has compiled a piece."""
ALIVE = 5.0
"""Seconds between two questions whether the process of that rank exists."""
PATIENCE = 600.0
"""Seconds after which a rank compiles what another one has claimed."""
DONE = "done"


class Claims:
    """Claims of the ranks of a machine that keep compiled pieces in the same folder.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: str) -> None:
        self._store = compat.default_store()
        self._prefix = f"mfsdp/pieces/{digest([socket.gethostname(), folder])[:16]}"

    @staticmethod
    def of_this_rank() -> Claims | None:
        """Return those of this rank; None if it can share with no other."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return None
        folder = compat.pieces_cache()
        if folder is None or compat.address_towards(compat.default_store()) is None:
            return None
        return Claims(folder)

    def claim(self, key: str) -> bool:
        """Claim a piece. Return whether this rank compiles it: none was faster."""
        mine = str(dist.get_rank())
        return self._store.compare_set(f"{self._prefix}/{key}", "", mine).decode() == mine

    def release(self, key: str) -> None:
        """Let others load a piece, or find that it is not there."""
        self._store.set(f"{self._prefix}/{key}", DONE)

    def wait(self, key: str) -> None:
        """Wait until a claimed piece was released, its rank has ended, or :data:`PATIENCE` is over."""
        begun = due = time.monotonic()
        while (owner := self._store.get(f"{self._prefix}/{key}").decode()) != DONE:
            time.sleep(LOOK)
            if time.monotonic() > due:
                if due > begun + PATIENCE or ask(self._store, [int(owner)], 0).ended:
                    return
                due = time.monotonic() + ALIVE


def compile_together(pieces: Sequence[compat.CompiledPiece], what: str) -> None:
    """Compile pieces, unless they are compiled, together with the other ranks of this machine.

    Args:
        what: What is being compiled, for the progress.
    """
    missing = [piece for piece in pieces if piece.run is None]
    claims = Claims.of_this_rank() if missing else None
    of_others: list[tuple[str, compat.CompiledPiece]] = []
    for number, piece in enumerate(missing, 1):
        progress.step(what, f"piece {number} of {len(missing)}")
        if claims is None or piece.key is None:
            piece.compile()
        elif not claims.claim(piece.key):
            of_others.append((piece.key, piece))
        else:
            try:
                piece.compile()
            finally:
                claims.release(piece.key)
    for number, (key, piece) in enumerate(of_others, 1):
        progress.step(what, f"{number} of {len(of_others)} pieces that other ranks compile")
        assert claims is not None
        claims.wait(key)
        piece.compile()
