"""Cost of agreement between ranks: requests to the store of the process group until the first step is over.

    python benchmarks/control_plane.py --ranks 8 512 4096 65536

Two numbers are measured. The first is the number of agreements in a job of two processes: sharding, a step with
gradient clipping, a second step. The second is the time of one agreement among many ranks, which are simulated. A
TCPStore in a separate process acts as the root and as the store of one part. It gets the requests that all of its ranks
would send, over a few connections, one after the other. Real ranks send theirs at the same time, so stores are the
bottleneck: an agreement takes at least their CPU time. Stores of other parts work at the same time, on other machines.
The time on the network is not counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import multiprocessing
import resource
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from mfsdp_compile import fully_shard_model
from mfsdp_compile.models.gpt import Gpt, GptBlock, GptConfig
from mfsdp_compile.processes import run_ranks
from mfsdp_compile.runtime.ranks import notices, rendezvous, store_tree

CONNECTIONS = 16


def count(rank: int, say: Callable[[Any], None], compiled: bool, layers: int) -> dict[str, int]:
    """Count the agreements of this rank."""
    found: dict[str, int] = {}
    stage = ["sharding"]
    verdict = rendezvous.Rendezvous.verdict

    def counted(visit: rendezvous.Rendezvous) -> rendezvous.Verdict:
        found[stage[0]] = found.get(stage[0], 0) + 1
        return verdict(visit)

    with patch.object(rendezvous.Rendezvous, "verdict", counted):
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
    """Run a store, and report the CPU time that it has used whenever asked."""
    store = dist.TCPStore(host_name="127.0.0.1", port=0, is_master=True, wait_for_workers=False)
    said.send(store.port)
    while said.recv() is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        said.send(used.ru_utime + used.ru_stime)


class Server:
    """A store in its own process, and connections to it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, its = context.Pipe()
        self._process = context.Process(target=serve, args=(its,), daemon=True)
        self._process.start()
        self._port = self._pipe.recv()
        before = self.cpu()
        self.stores = [self._connect() for _ in range(CONNECTIONS)]
        self.connecting = (self.cpu() - before) / CONNECTIONS
        """CPU seconds of the store per connection."""

    def _connect(self) -> dist.TCPStore:
        timeout = timedelta(minutes=5)
        return dist.TCPStore("127.0.0.1", self._port, is_master=False, wait_for_workers=False, timeout=timeout)

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join()

    def cpu(self) -> float:
        """Return the CPU seconds used so far."""
        self._pipe.send(0)
        return float(self._pipe.recv())

    def of(self, number: int) -> dist.Store:
        return self.stores[number % CONNECTIONS]


LOOKS = 3
"""How often a rank of a part asks for a verdict that takes 20 ms: after 1, 2, 3, ... ms, then a tenth of its wait."""


class Simulation:
    """The root's store, the store of one part, and the requests of any number of ranks."""

    def __init__(self) -> None:
        self.root, self.part = Server(), Server()

    def close(self) -> None:
        self.root.close()
        self.part.close()

    def one_store(self, ranks: int) -> float:
        """Simulate an agreement through one store, as in jobs of up to 64 ranks. Returns CPU seconds of the store."""
        key, digest, before = f"one/{ranks}", hashlib.sha256(b"all").hexdigest(), self.root.cpu()
        for rank in range(ranks):
            store = self.root.of(rank)
            store.add(f"{key}/visits/{rank}", 1)
            is_last, _ = rendezvous.add(store, f"{key}/all", digest, ranks)
        assert is_last
        notices.conclude_once(store, f"{key}/verdict", {"kind": "same", "ranks": []})
        for rank in range(ranks):
            rendezvous.await_answer(self.root.of(rank), f"{key}/verdict", list, timedelta(minutes=5), None)
        return self.root.cpu() - before

    def tree(self, ranks: int) -> tuple[float, float]:
        """Simulate an agreement through the stores of parts. Returns CPU seconds of a part's store and of the root's.

        The two add up, because one waits for the other.
        """
        size = max(store_tree.PART, math.isqrt(ranks))
        parts = -(-ranks // size)
        key, digest, begun = f"tree/{ranks}", hashlib.sha256(b"all").hexdigest(), self.part.cpu()
        for rank in range(size):
            store = self.part.of(rank)
            store.add(f"{key}/visits/{rank}", 1)
            rendezvous.add(store, f"{key}/all", digest, size)
            for _ in range(LOOKS):
                store.check([f"{key}/verdict"])
        store.set(f"{key}/verdict", "{}")
        for name in ("all", "verdict"):
            store.delete_key(f"{key}/before/{name}")
        for rank in range(size):
            self.part.of(rank).check([f"{key}/verdict"])
            self.part.of(rank).get(f"{key}/verdict")
        of_part, begun = self.part.cpu() - begun, self.root.cpu()
        for number in range(parts):
            store = self.root.of(number)
            store.set(f"{key}/part/{number}", "[]")
            rendezvous.add(store, f"{key}/all", digest, parts)
        notices.conclude_once(store, f"{key}/verdict", {"kind": "same", "ranks": []})
        for number in range(parts):
            rendezvous.await_answer(self.root.of(number), f"{key}/verdict", list, timedelta(minutes=5), None)
            self.root.of(number).delete_key(f"{key}/before/part/{number}")
        return of_part, self.root.cpu() - begun

    def joining(self, ranks: int) -> float:
        """Simulate the requests before the first agreement. Returns CPU seconds of both stores.

        Each rank takes back its refusal and asks the root's store for the address of its part's store. Each rank of a
        part opens a connection to that store.
        """
        size = max(store_tree.PART, math.isqrt(ranks))
        before = self.root.cpu()
        for number in range(ranks):
            store = self.root.of(number)
            store.set(f"refusal/{number}", "")
            if number % size == 0:
                store.set(f"{ranks}/address/{number // size}", '["127.0.0.1", 12345]')
            else:
                store.check([f"{ranks}/address/{number // size}"])
                store.get(f"{ranks}/address/{number // size}")
        return self.root.cpu() - before + size * self.part.connecting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 512, 4096, 65536])
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
    print("\nsimulated ranks: seconds of stores' CPU until the end of the first step")
    print("| ranks | an agreement | joining | " + " | ".join(agreements) + " | through one store |")
    for ranks in arguments.ranks:
        alone = simulation.one_store(ranks)
        if ranks <= store_tree.PART:
            joining, each, shown = 0.0, alone, f"{alone * 1e3:.2f} ms"
        else:
            joining, took = simulation.joining(ranks), simulation.tree(ranks)
            each, shown = sum(took), f"{took[0] * 1e3:.1f} + {took[1] * 1e3:.1f} ms"
        totals = " | ".join(f"{joining + count * each:.2f} s" for count in agreements.values())
        before = " to ".join(f"{count * alone:.1f} s" for count in sorted({*agreements.values()}))
        print(f"| {ranks:,} | {shown} | {joining:.2f} s | {totals} | {before} |", flush=True)
    simulation.close()


if __name__ == "__main__":
    main()
