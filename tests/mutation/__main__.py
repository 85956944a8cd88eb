"""``make mutants``: find the mutants that no test notices.

    cd tests && python -m mutation [REGEX] [--jobs 2] [--write]

Each mutant is one changed file in a copy of the checkout. Its tests run there until one fails. First, all tests run
without a change, and none may fail. Processes are forked from this one, which has imported torch but not the package.

The exit code is 1 if less than 95 % of the mutants are killed.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing.util
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import MUTANTS
from .mutant import ROOT, Mutant

NO_TESTS = 5
"""Exit status of pytest that has selected no tests."""

WANTED = 0.95
SECONDS = 400
"""Time limit for one test run of a mutant. A run that hangs is ended by the test's own timeout or by this limit."""

IMPORTS = (
    "pytest",
    "torch",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor",
    "transformers",
    "transformers.trainer",
    "accelerate",
)


@dataclass
class Job:
    """Tests that run in a copy of the checkout, with a mutant or without one.

    Args:
        tests: Lines of arguments. Each is one run of pytest, until one fails.
    """

    tests: Sequence[str]
    mutant: Mutant | None = None
    pid: int = 0
    begun: float = 0.0
    seconds: float = 0.0
    copy: Path = field(default_factory=Path)
    log: Path = field(default_factory=Path)
    status: int | None = None
    """Exit code of pytest, or the negative number of a signal."""

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    @property
    def failed(self) -> str:
        """Name of the failed test, or what happened instead."""
        if self.status == -signal.SIGKILL:
            return f"no end after {SECONDS} s"
        found = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", self.output, flags=re.MULTILINE)
        return found[1] if found else f"exit code {self.status}"

    def start(self, copy: Path) -> None:
        self.copy, self.log, self.begun = copy, copy.with_suffix(".log"), time.monotonic()
        if self.mutant is not None:
            (copy / self.mutant.file).write_text(self.mutant.source(), encoding="utf-8")
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            self._run()

    def _run(self) -> None:
        """Run the tests in the child process."""
        status = 70
        try:
            descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            os.chdir(self.copy)
            os.environ["PYTHONPATH"] = str(self.copy)
            sys.path[:] = [str(self.copy), *(path for path in sys.path if Path(path or ".").resolve() not in _OWN)]

            for tests in self.tests:
                file, *more = shlex.split(tests)
                for which in ("not long", "long"):  # long tests only where there are no others
                    command = ["-q", "-x", "-m", which, "-p", "no:cacheprovider", f"tests/{file}", *more]
                    status = _in_a_child(lambda command=command: _run_pytest(command))
                    if status != NO_TESTS:
                        break
                if status:
                    break
        finally:
            sys.stdout.flush()
            os._exit(status)

    def has_ended(self) -> bool:
        late = time.monotonic() - self.begun > SECONDS
        if late:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        pid, status = os.waitpid(self.pid, 0 if late else os.WNOHANG)
        if pid == 0:
            return False
        self.status, self.seconds = os.waitstatus_to_exitcode(status), time.monotonic() - self.begun
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # processes that it may have left
        if self.mutant is not None:
            shutil.copyfile(ROOT / self.mutant.file, self.copy / self.mutant.file)
        return True


_OWN = {ROOT, ROOT / "tests"}


def _run_pytest(command: Sequence[str]) -> int:
    import pytest

    # The server that pools of ranks are forked from would import torch again, which takes ten seconds of CPU time for
    # each mutant. Fork it from this process instead, before there is a thread.
    multiprocessing.util.spawnv_passfds = _fork_instead  # type: ignore[attr-defined]
    sys.path.insert(0, "tests")
    from pool import server

    server()
    return int(pytest.main(list(command)))


def _fork_instead(executable: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            exec(arguments[-1], {})  # forkserver.main(...)
        finally:
            os._exit(1)
    return pid


def _in_a_child(run: Callable[[], int]) -> int:
    """Run in a child process. pytest cannot run twice in one process, because test modules stay imported."""
    pid = os.fork()
    if pid == 0:
        os._exit(run())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(jobs: Iterable[Job], copies: Sequence[Path]) -> Iterator[Job]:
    """Run jobs, one at a time in each copy, and yield them as they end."""
    waiting, free, running = list(jobs), list(copies), list[Job]()
    while waiting or running:
        while waiting and free:
            job = waiting.pop(0)
            job.start(free.pop())
            running.append(job)
        for job in list(running):
            if job.has_ended():
                running.remove(job)
                yield job  # before the log is written again
                free.append(job.copy)
        time.sleep(0.05)


@contextlib.contextmanager
def copies_of_checkout(count: int) -> Iterator[list[Path]]:
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    # A TemporaryDirectory would be removed by programs that tests fork and that end in order: they run its finalizer.
    folder = tempfile.mkdtemp(prefix="mfsdp-mutants-")
    try:
        made = []
        for number in range(count):
            copy = Path(folder) / str(number)
            for name in filter(None, names.stdout.decode().split("\0")):
                if (source := ROOT / name).is_file():
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, copy / name)
            made.append(copy)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("only", nargs="?", default="", help="a regular expression: of files, and of what breaks")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write the table of docs/mutants.md")
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    for module in IMPORTS:
        __import__(module)
    if any(name.partition(".")[0] in ("mfsdp_compile", "passes", "runtime") for name in sys.modules):
        raise SystemExit("the package is imported already: mutants would have no effect")
    chosen = [m for m in MUTANTS if re.search(arguments.only, str(m)) and not m.equivalent]
    begun = time.monotonic()
    killed: list[Job] = []
    survived: list[Job] = []
    with copies_of_checkout(arguments.jobs) as copies:
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        print(f"{len(tests)} selections of tests, without a change", flush=True)
        broken = set()
        for job in run([Job([test]) for test in tests], copies):
            if job.status:
                broken.add(job.tests[0])
                print(f"{job.tests[0]}: {job.failed}\n{job.output[-1500:]}", flush=True)
        for job in run([Job([t for t in m.tests if t not in broken], m) for m in chosen], copies):
            (killed if job.status not in (0, 70) else survived).append(job)
            word = "killed" if job in killed else "SURVIVED"
            detail = f" ({job.failed})" if job in killed else ""
            print(f"{word:8} {job.seconds:6.1f} s  {job.mutant}{detail}", flush=True)
    score = len(killed) / max(1, len(killed) + len(survived))
    minutes = (time.monotonic() - begun) / 60
    print(f"\n{len(killed)} of {len(chosen)} mutants killed: {score:.1%}, in {minutes:.0f} minutes")
    for job in survived:
        print(f"survived: {job.mutant}")
    if arguments.write and not arguments.only:
        _write(killed, survived, minutes)
    return int(score < WANTED or bool(broken))


def _write(killed: Sequence[Job], survived: Sequence[Job], minutes: float) -> None:
    import torch

    os.environ["MFSDP_WRITE_TABLES"] = "1"
    from doc_tables import check_table

    docs = ROOT / "docs" / "mutants.md"
    rooms = sorted({mutant.room for mutant in MUTANTS})
    rows: list[list[object]] = []
    for room in [*rooms, ""]:
        of = [[job for job in jobs if job.mutant and room in ("", job.mutant.room)] for jobs in (killed, survived)]
        equivalent = sum(bool(m.equivalent) for m in MUTANTS if room in ("", m.room))
        rows.append([f"`{room}/`" if room else "all", len(of[0]) + len(of[1]), len(of[0]), equivalent])
    check_table(docs, "mutants", ["of", "mutants", "killed", "equivalent, not counted"], rows)
    where = [["torch", torch.__version__], ["Python", platform.python_version()], ["cores", os.cpu_count()]]
    left = [["survived", str(job.mutant)] for job in survived]
    check_table(docs, "mutants run", ["", ""], [*where, ["minutes", f"{minutes:.0f}"], *left])


if __name__ == "__main__":
    sys.exit(main())
