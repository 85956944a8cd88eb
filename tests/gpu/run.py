"""First contact with a GPU: tests, benchmarks and predictions, part by part, in ten minutes at most.

    make gpu                    one GPU
    make gpu RANKS=8            a node: NCCL, one rank per GPU
    python tests/gpu/run.py --only training overlap

Parts that measure nothing run first, several at once; the others then run alone. Nothing is installed and no network
is needed: torch, numpy, rich and pytest must be there. Where torch finds no GPU, the same parts run on fake GPUs,
quickly, and nothing that they print is a measurement. A part that fails, crashes or hangs does not stop the others.
Without its folder ``cache``, the folder of results is small. The exit status is 1 if a part failed or ran into its
limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import parts
from parts import ROOT, Part

LABEL = "FAKE GPU: nothing here is a measurement"
FOLDERS = [ROOT, ROOT / "tests" / "gpu", ROOT / "tests"]
IN_ALL = 600.0
"""Seconds for all parts together."""
GRACE = 3.0
"""Seconds in which a part that is ended writes where it was."""
SHOWN = 30
"""Lines of a log that are printed."""
BAD = ("failed", "too long")


@dataclass(frozen=True)
class Outcome:
    """What became of a part.

    Args:
        outcome: ``"passed"``, ``"slower"`` than predicted, ``"skipped"``, ``"failed"``, or ``"too long"``: it was ended
            at its limit.
        exit: Exit status; negative if a signal ended it.
        note: What the result says, or why there is none.
        result: Content of the file of results.
    """

    name: str
    outcome: str
    seconds: float
    exit: int | None = None
    note: str = ""
    command: str = ""
    log: str = ""
    result: Any = None


def main(given: Sequence[str] | None = None) -> int:
    options = _parse(given)
    out = Path(options.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    gpus = _gpus()
    ranks = options.ranks or 1
    fake = options.fake or gpus == 0
    if not fake and ranks > gpus:
        print(f"RANKS={ranks}, but there are {gpus} GPUs: NCCL needs one per rank.")
        return 2
    environment = _environment(out, ranks, fake)
    chosen = parts.many_gpus(ranks, fake) if options.ranks else parts.one_gpu(fake)
    if options.parts:
        chosen = [Part(**{**each, "command": tuple(each["command"])}) for each in parts.read(Path(options.parts))]
    if options.only:
        chosen = [part for part in chosen if any(word in part.name for word in options.only)]
        if not chosen:
            print(f"no part has one of {options.only} in its name")
            return 2
    if fake:
        print(LABEL, flush=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # parts that crash leave no core files
    deadline = time.monotonic() + options.seconds
    outcomes: dict[int, Outcome] = {}

    def one(number: int) -> None:
        print(f"[{number + 1}/{len(chosen)}] {chosen[number].name} ...", flush=True)
        few = {} if fake or chosen[number].measures else {"TORCHINDUCTOR_COMPILE_THREADS": "4"}  # several compile
        made = run(chosen[number], number + 1, out, environment | few, deadline - time.monotonic())
        with writing:
            outcomes[number] = made
            print(f"    {made.name}: {made.outcome} after {made.seconds:.0f} s: {made.note}", flush=True)
            write(out, fake, ranks, [outcomes[key] for key in sorted(outcomes)])

    writing = threading.Lock()
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(one, (number for number, part in enumerate(chosen) if not part.measures)))
    for number, part in enumerate(chosen):
        if part.measures:
            one(number)
    found = [outcomes[key] for key in sorted(outcomes)]
    for outcome in found:
        show_end(outcome, out)
    show(found, fake, out, time.monotonic() - deadline + options.seconds)
    return 1 if any(outcome.outcome in BAD for outcome in found) else 0


def _parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, help="a node: one rank per GPU (default: the parts for one GPU)")
    parser.add_argument("--out", default="gpu-results", help="folder of results (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="parts with one of these in their names")
    parser.add_argument(
        "--jobs",
        type=int,
        default=max(1, (os.cpu_count() or 1) // 2),
        help="parts that run at once, of those that measure nothing (default: half of the cores, %(default)s)",
    )
    parser.add_argument("--seconds", type=float, default=IN_ALL, help="for all parts (default: %(default)s)")
    parser.add_argument("--fake", action="store_true", help="fake GPUs even where there are real ones")
    parser.add_argument("--parts", help="a JSON file of other parts, to test this program with")
    return parser.parse_args(given)


def _gpus() -> int:
    """Return how many GPUs torch finds, asked in another process, which may crash or hang."""
    program = "import torch; print('gpus', torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    try:
        found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return 0
    lines = [line for line in found.stdout.splitlines() if line.startswith("gpus ")]
    return int(lines[-1].split()[1]) if lines else 0


def _environment(out: Path, ranks: int, fake: bool) -> dict[str, str]:
    """Return the environment of all parts: one machine, no network, caches of their own."""
    folders = [*([ROOT / "tests" / "gpu" / "fake"] if fake else []), *FOLDERS]
    cache = out / "cache"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "MFSDP_GPU_HARDWARE": str(out / "hardware.json"),
    }
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        environment.pop(name, None)
    if fake:
        environment |= {"MFSDP_FAKE_GPUS": str(ranks), "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        environment["PYTEST_ADDOPTS"] = "--assert=plain"  # else pytest reads the sources, instead of fake_gpu.py
    return environment


# -- one part ---------------------------------------------------------------------------------------------------------


def run(part: Part, number: int, out: Path, environment: Mapping[str, str], left: float) -> Outcome:
    """Run a part in processes of its own, and end all of them at its limit, or when ``left`` seconds are over."""
    if left < 1:
        return Outcome(part.name, "skipped", 0.0, note="no time was left")
    log = out / "logs" / f"{number:02d}-{''.join(c if c.isalnum() else '-' for c in part.name)}.txt"
    log.parent.mkdir(exist_ok=True)
    command = [sys.executable, *(argument.replace("{out}", str(out)) for argument in part.command)]
    result_file = out / part.result if part.result else None
    if result_file is not None:
        result_file.unlink(missing_ok=True)  # of an earlier run
    limit = min(part.limit, left)
    begun = time.monotonic()
    with log.open("w") as written:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        except BaseException:
            _end(process, 0.0)
            raise
        _end(process, GRACE if code is None else 0.0)
    seconds = time.monotonic() - begun
    result = parts.read(result_file) if result_file is not None else None
    outcome, note = _judge(part, code, limit, result, log.read_text(errors="replace"))
    return Outcome(part.name, outcome, seconds, code, note, " ".join(command), str(log.relative_to(out)), result)


def _judge(part: Part, code: int | None, limit: float, result: Any, log: str) -> tuple[str, str]:
    note = parts.summary_of_tests(log) if "pytest" in part.command else ""
    if code is None:
        return "too long", f"ended after {limit:.0f} s; the log says where each process was"
    if result is not None and part.note is not None:
        try:
            note = part.note(result)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            return "failed", f"{part.result} is not what was expected: {error!r}"
    if code != 0:
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return "failed", note or f"exit status {code}: {(errors[:1] or lines[-1:] or ['no output'])[0]}"
    if part.result and result is None:
        return "failed", f"wrote no {part.result}"
    if note and "pytest" in part.command and "passed" not in note:
        return "skipped", note
    return ("slower" if parts.slower_by(result) > parts.SLOWER else "passed"), note


def _end(process: subprocess.Popen[Any], grace: float) -> None:
    """End a process and everything that it started, also in other sessions (torchrun's ranks).

    Python processes first get a signal at which they write their stacks.
    """
    started = _descendants(process.pid)
    if grace:
        deadline = time.monotonic() + grace
        for pid in sorted(started):  # one after the other, so that their stacks do not mix
            _signal(pid, signal.SIGABRT)
            until = min(deadline, time.monotonic() + 1)
            while _runs(pid) and time.monotonic() < until:
                time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in started - {process.pid}:
        _signal(pid, signal.SIGKILL)
    process.wait()


def _descendants(root: int) -> set[int]:
    """Return a process and all below it, as long as the processes between them live."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # it ended meanwhile
            continue
    found = {root} if root in parents else set()
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return False


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


# -- results ----------------------------------------------------------------------------------------------------------


def write(out: Path, fake: bool, ranks: int, outcomes: Sequence[Outcome]) -> None:
    """Write ``summary.json``, after each part, so that what ran is known whatever happens later."""
    environment = parts.read(out / "environment.json") if any(o.name == "environment" for o in outcomes) else None
    about = {
        "label": LABEL if fake else "measured on GPUs",
        "fake": fake,
        "ranks": ranks,
        "machine": environment or {"system": platform.platform(), "cores": os.cpu_count()},
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    }
    summary = {"about": about, "parts": [asdict(outcome) for outcome in outcomes]}
    (out / "summary.json").write_text(json.dumps(summary, indent=1))


def show_end(outcome: Outcome, out: Path) -> None:
    """Print the end of the log of a part that measured something or went wrong.

    What is printed is then enough, where the folder of results is lost with the machine.
    """
    if outcome.log and (outcome.result is not None or outcome.outcome in BAD):
        lines = (out / outcome.log).read_text(errors="replace").splitlines()
        print(f"\n-- {outcome.name}: {outcome.outcome}", *(line[:300] for line in lines[-SHOWN:]), sep="\n")


def show(outcomes: Sequence[Outcome], fake: bool, out: Path, seconds: float) -> None:
    """Print the table."""
    counts = {kind: sum(o.outcome == kind for o in outcomes) for kind in ("passed", "slower", "skipped", *BAD)}
    verdict = ", ".join(f"{count} {kind}" for kind, count in counts.items() if count)
    end = f"{verdict}; {seconds:.0f} s in all; results, logs and summary.json in {out}"
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        rows = [f"{o.name:40} {o.outcome:10} {o.seconds:6.0f} s  {o.note}" for o in outcomes]
        print("\n".join([*([LABEL] if fake else []), *rows, end]))
        return
    colors = {"passed": "green", "slower": "yellow", "skipped": "dim", "failed": "bold red", "too long": "bold red"}
    table = Table("part", "outcome", "seconds", "what it says", title=LABEL if fake else None, title_style="bold red")
    for o in outcomes:
        table.add_row(o.name, Text(o.outcome, colors[o.outcome]), f"{o.seconds:.0f}", Text(o.note))
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    console.print(end, markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    raise SystemExit(main())
