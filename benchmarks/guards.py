"""Cost of guards and names: steps with them and without them, in turns, of one model.

    python benchmarks/guards.py --rounds 200

Without them, nothing is recorded for hang reports, no name is prepared for traces, and optimizer steps are not checked
before they run. A round is one step of each kind, one after the other, and its ratio compares these two. A step varies
by more than the cost that is measured. The time spent in these functions is therefore also added up, in other steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from common import Config, batch_of, build, median, run, synchronize

from mfsdp_compile import fully_shard_optimizer
from mfsdp_compile.runtime.ranks import profiling
from mfsdp_compile.runtime.ranks.journal import Journal
from mfsdp_compile.runtime.step.grad_sync import GradSync

SYSTEMS = ("mfsdp compiled", "mfsdp eager")
WATCHED = ((Journal, "note"), (profiling, "expect"), (GradSync, "before_step"))


def measure(config: Config, rank: int, device: torch.device) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in SYSTEMS:
        if name not in config.systems:
            continue
        system = build(name, config, device)
        if isinstance(system, str):
            raise SystemExit(f"{name}: {system}")
        fully_shard_optimizer(system.optimizer)
        batch = batch_of(config, rank, device)

        def timed(system: Any = system, batch: Any = batch) -> float:
            synchronize(config, device)
            begun = time.perf_counter()
            system.step(*batch)
            synchronize(config, device)
            return time.perf_counter() - begun

        for _ in range(3):  # compilation, and the checks of the first step
            timed()
        with_: list[float] = []
        without: list[float] = []
        inside: list[float] = []
        for round_ in range(config.rounds):
            for plain in (True, False) if round_ % 2 else (False, True):
                with ExitStack() as stack:
                    if plain:
                        for owner, function in WATCHED:
                            stack.enter_context(patch.object(owner, function, lambda *args, **kwargs: None))
                    (without if plain else with_).append(timed())
        for _ in range(config.rounds):
            spent = [0.0]
            with ExitStack() as stack:
                for owner, function in WATCHED:
                    stack.enter_context(patch.object(owner, function, _added_up(getattr(owner, function), spent)))
                seconds = timed()
            inside.append(spent[0] / seconds)
        results[name] = {"with": with_, "without": without, "inside": inside}
    return results


def _added_up(function: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[0] += time.perf_counter() - begun

    return call


def show(config: Config, results: dict[str, Any]) -> None:
    print(f"\n{'median of rounds':18} {'with, ms':>10} {'without, ms':>12} {'ratio':>8} {'in these functions':>20}")
    for name, result in results.items():
        ratios = [a / b for a, b in zip(result["with"], result["without"], strict=True)]
        result["ratio"] = median(ratios)
        times = [median(result[kind]) * 1e3 for kind in ("with", "without")]
        print(
            f"{name:18} {times[0]:10.2f} {times[1]:12.2f} {result['ratio']:8.4f} "
            f"{median(result['inside']) * 100:18.2f} %"
        )


if __name__ == "__main__":
    run(__doc__, 200, measure, show)
