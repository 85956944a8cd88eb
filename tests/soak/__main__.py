"""``make soak``: watch what many steps leave behind, then train under random faults until the time is over.

    cd tests && python -m soak [--minutes 30] [--seed N] [--growth-steps 10000]

The seed decides kinds, order and steps of faults. Timing on the machine decides the rest, so a seed repeats a plan but
not each instruction. The exit code is 1 if weights differ, ranks hang, or something leaks.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

ROUND_STEPS = 120
ROUND_FAULTS = 16


def main() -> int:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="how long to begin new rounds")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--growth-steps", type=int, default=10_000, help="0: do not watch what grows")
    given = parser.parse_args()
    begun = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the disk is unmounted on the way out

    def say(line: str) -> None:
        print(f"{time.monotonic() - begun:7.1f} {line}", flush=True)

    with tempfile.TemporaryDirectory(prefix="mfsdp-soak-") as made:
        os.environ["MFSDP_DEBUG_DIR"] = f"{made}/debug"
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{made}/inductor"
        from .growth import GROWTH, growth
        from .rounds import Plan, Summary, run_round

        summary = Summary()
        failure = ""
        plan = Plan(steps=ROUND_STEPS, faults=ROUND_FAULTS)
        seed = given.seed
        try:
            for mode, ranks in GROWTH if given.growth_steps else ():
                if leaks := growth(mode, ranks, given.growth_steps, Path(made, f"{mode}-{ranks}"), say):
                    raise AssertionError("\n".join(leaks))
            while not summary.rounds or time.monotonic() - begun < given.minutes * 60:
                say(f"round {summary.rounds + 1}, seed {seed}")
                folder = Path(made, f"round-{summary.rounds}")
                folder.mkdir()
                run_round(plan, seed, folder, say, summary)
                seed += 1
        except AssertionError:
            failure = f"seed {seed}\n{traceback.format_exc()}"
        for line in summary.lines():
            print(line)
        print(failure or "no difference, no hang, no leak")
    return 1 if failure else 0


if __name__ == "__main__":
    sys.exit(main())
