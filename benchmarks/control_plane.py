"""What it costs ranks to agree: requests to the store of the process group, until the first step is over.

    python benchmarks/control_plane.py --ranks 8 512 4096

Two numbers are measured. How many agreements there are, of a job of two processes: sharding, a step that is clipped, a second
step. And how long one takes with many ranks, which are simulated: a TCPStore in a process of its own gets the requests of all
of them, over a few connections, one after the other. Real ranks send theirs at the same time, so that the store is the
bottleneck: its CPU time is what an agreement takes at least.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from mfsdp_compile import fully_shard_model
from mfsdp_compile.examples.gpt import Gpt, GptBlock, GptConfig
from mfsdp_compile.examples.processes import run_ranks
from mfsdp_compile.runtime import agreement, model

CONNECTIONS = 16


def count(rank: int, say: Callable[[Any], None], compiled: bool, layers: int) -> dict[str, int]:
    """Agreements of this rank."""
    found: dict[str, int] = {}
    stage = ["sharding"]
    agree = agreement.agree

    def counted(*args: Any, **kwargs: Any) -> None:
        found[stage[0]] = found.get(stage[0], 0) + 1
        agree(*args, **kwargs)

    with patch.object(agreement, "agree", counted), patch.object(model, "agree", counted):
        torch.manual_seed(0)
        sharded = fully_shard_model(Gpt(GptConfig(64, 32, layers, 2, 16)), fsdp_unit_modules=[GptBlock])
        call: Any = torch.compile(sharded, backend="mfsdp", options={"inner": "aot_eager"}) if compiled else sharded
        optimizer = torch.optim.AdamW(sharded.parameters())
        for stage[0] in ("first step", "second step"):
            tokens = torch.randint(64, (2, 16))
            call(tokens, tokens).backward()
            nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return found


def serve(said: Connection) -> None:
    """A store, and the CPU time that it has taken whenever that is asked for."""
    store = dist.TCPStore(host_name="127.0.0.1", port=0, is_master=True, wait_for_workers=False)
    said.send(store.port)
    while said.recv() is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        said.send(used.ru_utime + used.ru_stime)


class Simulation:
    """One store, many ranks."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._server, its = context.Pipe()
        self._process = context.Process(target=serve, args=(its,), daemon=True)
        self._process.start()
        port = self._server.recv()
        self._stores = [
            dist.TCPStore(
                host_name="127.0.0.1", port=port, is_master=False, wait_for_workers=False, timeout=timedelta(minutes=5)
            )
            for _ in range(CONNECTIONS)
        ]

    def close(self) -> None:
        self._server.send(None)
        self._process.join()

    def _cpu(self) -> float:
        self._server.send(0)
        return float(self._server.recv())

    def agreement(self, ranks: int) -> dict[str, float]:
        """As :func:`mfsdp_compile.runtime.agreement.agree` does it, where all ranks have the same.

        Returns:
            seconds of the clock, and of the store's CPU.
        """
        key, digest = f"{ranks}/1", hashlib.sha256(b"all").hexdigest()
        stores = [self._stores[rank % CONNECTIONS] for rank in range(ranks)]
        cpu, begun = self._cpu(), time.perf_counter()
        for rank, store in enumerate(stores):
            store.add(f"{ranks}/visits/{rank}", 1)
            is_last, _ = agreement._add(store, f"{key}/all", digest, ranks)
        assert is_last
        agreement.conclude_once(stores[-1], f"{key}/verdict", {"kind": "same", "ranks": []})
        for store in stores:
            agreement._answer(store, f"{key}/verdict", list, range(ranks), timedelta(minutes=5), None)
        return {"wall s": time.perf_counter() - begun, "store CPU s": self._cpu() - cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 512, 4096])
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16])
    arguments = parser.parse_args()
    agreements: dict[str, int] = {}
    for compiled in (False, True):
        for layers in arguments.layers:
            counting = run_ranks(count, 2, compiled, layers, backend="gloo", threads=1)
            try:
                while True:
                    next(counting)
            except StopIteration as end:
                found = end.value
            name = f"{'compiled' if compiled else 'eager'}, {layers} layers"
            print(f"{name}: agreements {json.dumps(found)}")
            agreements[name] = found["sharding"] + found["first step"]
    simulation = Simulation()
    print("\nsimulated ranks, one agreement, and all until the end of the first step:")
    for ranks in arguments.ranks:
        took = simulation.agreement(ranks)
        each = ", ".join(f"{name} {count * took['store CPU s']:.2f} s" for name, count in agreements.items())
        per_request = took["store CPU s"] / ranks / 5 * 1e6
        print(
            f"{ranks:6} ranks: {took['wall s']:.3f} s, {took['store CPU s']:.3f} s of the store's CPU "
            f"({per_request:.1f} us per request); {each}"
        )
    simulation.close()


if __name__ == "__main__":
    main()
