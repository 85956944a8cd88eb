"""Memory that contains NaN until its data arrives, which is as late as possible; and buffers that are free on time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.memory.comm_buffers import BufferKind, BufferPool


class _Late(dist.Work):
    """A gather whose data arrives when it is awaited, and never before."""

    def __init__(self, work: dist.Work, arrived: Tensor, buffer: Tensor) -> None:
        super().__init__()
        self._given = work, arrived, buffer

    def wait(self, timeout: Any = None) -> bool:
        work, arrived, buffer = self._given
        work.wait()
        buffer.copy_(arrived)
        return True


def _gather_late(mine: Tensor, size: int, group: str, *, out: Tensor) -> Tensor:
    sent, arrived = mine.clone(), torch.empty_like(out)
    out.fill_(float("nan"))
    work = dist.all_gather_into_tensor(arrived, sent, group=compat.process_group(group), async_op=True)
    torch._C._distributed_c10d._register_work(out, _Late(work, arrived, out))
    return out


@contextlib.contextmanager
def poisoned(late: bool = True) -> Iterator[None]:
    """Context in which a buffer that is handed out contains NaN, and a gathered one until its gather is awaited."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, MFSDP_POISON="1"))
        if late:
            stack.enter_context(mock.patch.object(compat, "all_gather_out", _gather_late))
        yield


@contextlib.contextmanager
def patient(seconds: float = 2.0) -> Iterator[None]:
    """Context in which communication buffers count as used only if something refers to all of them for some time.

    A thread of gloo drops its reference to a collective's tensors after it has woken up those who wait for it. On a
    busy machine that can be later than the next use of the buffer, which then gets fresh memory. Tests that count how
    often that happens would count the thread's delays.
    """

    plain = BufferPool.take

    def take(pool: BufferPool, kind: BufferKind, count: int, numel: int) -> Tensor:
        buffers, deadline = pool._buffers.get(kind, []), time.monotonic() + seconds
        if len(buffers) >= count or pool.is_complete:
            asked = [buffers[pool._turn.get(kind, 0)]] if pool.is_strict else buffers
            while not any(buffer.is_free for buffer in asked) and time.monotonic() < deadline:
                time.sleep(0.001)
        return plain(pool, kind, count, numel)

    with mock.patch.object(BufferPool, "take", take):
        yield
