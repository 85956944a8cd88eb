"""Does options={"tune": True} find the fastest schedule? It is compared with an exhaustive search over its whole grid.

    python benchmarks/schedule_tuning.py --ranks 2

A model is trained until its schedule is tuned. Then a copy of it is trained with every schedule of the grid in turn,
for --rounds steps each, by the same code without its rounds and bounds. The best of 41 schedules by a few noisy steps
is partly the luckiest one. Therefore the tuned schedule, the best ones (by shortest step and by median) and the one
that trains without tuning then run by turns for --duel steps each, and these steps are compared.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mfsdp_compile import fully_shard_model
from mfsdp_compile.backend import tuning
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig


def train(given: argparse.Namespace, rank: int, path: Path) -> tuning.Tuning:
    """Train until the schedule is tuned."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    config = LlamaConfig(given.vocabulary, given.width, given.layers, 4, 4, given.width * 3)
    model = fully_shard_model(Llama(config), fsdp_unit_modules=[Block])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    call = torch.compile(model, backend="mfsdp", options={"tune": str(path), "inner": given.inner})
    generator = torch.Generator().manual_seed(rank)
    while (found := tuning.Tuning.of(model.sharded)) is None or found.chosen is None:
        tokens = torch.randint(0, given.vocabulary, (2, given.length), generator=generator)
        call(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def train_all(given: argparse.Namespace, rank: int, path: Path, steps: int) -> Mapping[str, Sequence[float]]:
    """Train with all candidates in turn. Return the seconds of each one's steps."""
    with (
        mock.patch.object(tuning, "MOST", 1000),
        mock.patch.object(tuning, "ROUNDS", ((1000, steps),)),
        mock.patch.object(tuning, "RETRIES", 0),
    ):
        return train(given, rank, path).times


def run(rank: int, given: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", given.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=given.ranks)
    found = train(given, rank, Path(folder) / "tuned.txt").lines
    times = train_all(given, rank, Path(folder) / "all.txt", given.rounds)
    tuned = found[1].partition(" s: ")[2]
    best = {of: min(times, key=lambda label: of(times[label])) for of in (min, statistics.median)}
    if rank == 0:
        print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}")
        print(found[0])
        report(times, tuned)
    among, candidates = {tuned, *best.values()}, tuning.candidates
    with mock.patch.object(
        tuning, "candidates", lambda *given: [c for c in candidates(*given) if tuning.label_of(c.policy) in among]
    ):
        duel = train_all(given, rank, Path(folder) / "duel.txt", given.duel)
    if rank == 0:
        report(duel, tuned)
        for what, label in (("shortest step", best[min]), ("median", best[statistics.median])):
            paired = statistics.median(mine / theirs for mine, theirs in zip(duel[tuned], duel[label], strict=True))
            print(f"tuned / best by {what}: {paired:.4f} (median of {len(duel[tuned])} pairs)")
    dist.destroy_process_group()


def report(times: Mapping[str, Sequence[float]], tuned: str) -> None:
    print(f"{len(times)} schedules, {len(next(iter(times.values())))} steps each:")
    for label in sorted(times, key=lambda label: min(times[label])):
        mark = "  <- tuned" if label == tuned else ""
        print(f"  shortest {min(times[label]):.4f} s, median {statistics.median(times[label]):.4f} s: {label}{mark}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--duel", type=int, default=40)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--inner", default="inductor")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run, (given, folder), given.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
