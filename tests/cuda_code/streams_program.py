"""Runs rows of ``streams_rows.py`` on fake GPUs under the checker, in processes of its own. Prints JSON.

streams_program.py RANKS ROW:MODE[:MUTANT] ...
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing as mp
import os
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS)]

os.environ["OMP_NUM_THREADS"] = "1"

import timeline
import torch
import torch._dynamo
import torch._functorch.aot_autograd
import torch.distributed as dist
from nccl_rules import differences
from pool import join
from stream_mutants import MUTANTS, applied
from streams import checked
from streams_rows import ROWS, train

from mfsdp_compile.runtime import compat


def run(asked: str) -> tuple[list[str], list[str], dict[str, int], list[str]]:
    """Run a row. Return digests, violations, counts, and where the package waited after the first step."""
    name, mode, *mutants = asked.split(":")
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        for each in mutants:
            if MUTANTS[each].rank in (None, dist.get_rank()):
                stack.enter_context(applied(MUTANTS[each]))
        checker = stack.enter_context(checked())
        if ROWS[name].registers:
            stack.enter_context(mock.patch.object(compat, "nccl_backend", checker.nccl_backend))
        digests = train(ROWS[name], mode, timeline.waits.clear)
    waited = [line for line in timeline.waits if not line.startswith("tests/")]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (checker.calls, checker.groups))
    torch.compiler.reset()
    gc.collect()
    return digests, [*checker.violations, *differences(everyones)], dict(checker.counts), waited


def work(connection: Connection, rank: int, ranks: int, asked: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    join(connection, rank, ranks, timedelta(seconds=100))
    found = {}
    for each in asked:
        print(f"rank {rank}: {each}", file=sys.stderr, flush=True)
        try:
            found[each] = run(each)
        except BaseException:
            found[each] = ([], [traceback.format_exc()], {}, [])
            break
    connection.send(found)


def main() -> None:
    ranks, asked = int(sys.argv[1]), sys.argv[2:]
    gc.collect()
    gc.freeze()  # else each collection scans a million objects of modules
    context = mp.get_context("fork")
    workers = []
    for rank in range(ranks):
        mine, its = context.Pipe()
        process = context.Process(target=work, args=(its, rank, ranks, asked), daemon=True)
        process.start()
        workers.append((process, mine))
    port = workers[0][1].recv()
    for _, connection in workers:
        connection.send(port)
    found = [connection.recv() if connection.poll(200) else {} for _, connection in workers]
    for process, _ in workers:
        process.kill()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
