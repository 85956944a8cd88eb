"""Runs that are equal to the bit: torch's settings for it, and a process-wide default for sums over ranks.

Why such sums need a way of their own: [Note: Sums in the order of ranks] in :mod:`.geometry.exchange`.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from . import compat


class _Before(NamedTuple):
    """What :func:`deterministic` has changed, as it was."""

    algorithms: bool
    warn_only: bool
    benchmark: bool
    inductor: Any
    fill: bool


_before: _Before | None = None


def deterministic(enabled: bool = True) -> None:
    """Make training runs equal to the bit, also on another number of machines. Call it before models are sharded.

    Two runs of one program are equal then, if they have the same versions, kind of device, data-parallel ranks in the
    same order, and threads per rank. Models that are sharded from now on add gradients and norms in the order of ranks,
    as with ``MixedPrecisionPolicy(grad_sum_dtype=torch.float32)``. In torch, this sets
    ``torch.use_deterministic_algorithms(True)``, without the filling of fresh memory, which nothing here reads;
    ``torch.backends.cudnn.benchmark = False``; Inductor's ``deterministic``, so that no choice by measured time changes
    numbers; and, if it is not set, ``CUBLAS_WORKSPACE_CONFIG=:4096:8``.

    What torch's own collectives add (tensor and context parallelism) depends on the backend.

    Args:
        enabled: False puts torch's settings back. Models that are sharded keep their sums.
    """
    global _before
    if enabled and _before is None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        _before = _Before(
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.benchmark,
            compat.set_inductor_deterministic(True),
            torch.utils.deterministic.fill_uninitialized_memory,
        )
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.use_deterministic_algorithms(True)
        _set_benchmark(False)
    elif not enabled and _before is not None:
        torch.use_deterministic_algorithms(_before.algorithms, warn_only=_before.warn_only)
        _set_benchmark(_before.benchmark)
        compat.set_inductor_deterministic(_before.inductor)
        torch.utils.deterministic.fill_uninitialized_memory = _before.fill
        _before = None


def _set_benchmark(value: bool) -> None:
    if torch.backends.cudnn.benchmark != value:  # torch.backends.disable_global_flags forbids to set what it is, too
        torch.backends.cudnn.benchmark = value


def is_deterministic() -> bool:
    """Return whether models that are sharded now add in the order of ranks."""
    return _before is not None


def seed_step(seed: int, step: int, rank: int | None = None) -> None:
    """Seed torch's generators for one step: what it draws, as for dropout, depends on seed, rank and step alone.

    A run that is resumed at a step then draws what the uninterrupted run drew, and no two ranks draw the same.

    Args:
        rank: None: the rank of this process. Ranks that compute parts of the same activations, as with tensor
            parallelism, give their data-parallel rank.
    """
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    digest = hashlib.blake2b(f"{seed} {rank} {step}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "little") >> 1)
