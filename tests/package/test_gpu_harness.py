"""``make gpu`` on fake GPUs: its table, its exit status, and parts that fail, crash or hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from doc_tables import DOCS, check_table

ROOT = Path(__file__).parents[2]
GPU = ROOT / "tests" / "gpu"
LABEL = "FAKE GPU: nothing here is a measurement"

FAILING = "import sys; print('a reason'); sys.exit(3)"
CRASHING = "import os; os.abort()"
# Like torchrun, it starts a process in another session, and it hangs.
HANGING = """
import subprocess, sys, time
other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)
open(sys.argv[1], 'w').write(str(other.pid))
def here():
    time.sleep(600)
here()
"""
SLOW = "import sys; open(sys.argv[1], 'w').write('{\"predicted_s\": 1.0, \"measured_s\": 2.0}')"


def harness(out: Path, *arguments: str, timeout: float = 100) -> tuple[int, str, dict[str, Any]]:
    """Run the harness, and return its exit status, output and summary."""
    command = [sys.executable, str(GPU / "run.py"), "--fake", "--out", str(out), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
    assert (out / "summary.json").exists(), ran.stdout + ran.stderr
    return ran.returncode, ran.stdout, json.loads((out / "summary.json").read_text())


def part(name: str, code: str, *arguments: str, limit: float = 30, result: str = "") -> dict[str, Any]:
    return {"name": name, "command": ["-c", code, *arguments], "limit": limit, "result": result}


def lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_bad_parts_do_not_stop_others(tmp_path: Path) -> None:
    out = tmp_path / "out"
    parts = [
        part("first", "print('well')"),
        part("fails", FAILING),
        part("crashes", CRASHING),
        part("hangs", HANGING, "{out}/pid", limit=3),
        part("slow", SLOW, "{out}/slow.json", result="slow.json"),
        part("silent", "pass", result="nothing.json"),
        part("last", "print('well')"),
    ]
    (tmp_path / "parts.json").write_text(json.dumps(parts))
    begun = time.monotonic()
    code, printed, summary = harness(out, "--parts", str(tmp_path / "parts.json"))
    assert time.monotonic() - begun < 60
    found = {each["name"]: each for each in summary["parts"]}
    assert {name: each["outcome"] for name, each in found.items()} == {
        "first": "passed",
        "fails": "failed",
        "crashes": "failed",
        "hangs": "too long",
        "slow": "slower",
        "silent": "failed",
        "last": "passed",
    }
    assert code == 1
    assert found["fails"]["exit"] == 3 and found["crashes"]["exit"] < 0
    assert "a reason" in found["fails"]["note"]
    assert "in here" in (out / found["hangs"]["log"]).read_text()  # its stack
    assert not lives(int((out / "pid").read_text()))
    assert LABEL in printed and summary["about"]["label"] == LABEL and summary["about"]["fake"]
    assert all(name in printed for name in found)


@pytest.mark.long
def test_time_that_is_over_skips_parts(tmp_path: Path) -> None:
    parts = [part("first", "import time; time.sleep(30)"), part("second", "pass")]
    (tmp_path / "parts.json").write_text(json.dumps(parts))
    code, _, summary = harness(tmp_path / "out", "--parts", str(tmp_path / "parts.json"), "--seconds", "2")
    assert [each["outcome"] for each in summary["parts"]] == ["too long", "skipped"]
    assert code == 1


@pytest.mark.long
def test_real_parts_on_fake_gpus(tmp_path: Path) -> None:
    """Facts, and a program that measures, the way ``make gpu`` starts them."""
    code, printed, summary = harness(tmp_path / "out", "--only", "environment", "overlap", timeout=200)
    assert code == 0, printed
    assert [each["name"] for each in summary["parts"]] == ["environment", "overlap"]
    environment, overlap = (each["result"] for each in summary["parts"])
    assert environment["torch"] == summary["about"]["machine"]["torch"]
    assert overlap["hidden"] is None  # one GPU communicates with no other
    assert (tmp_path / "out" / "overlap.trace.json").stat().st_size > 1000


def test_fraction_that_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))
    from overlap import hidden

    def kernel(name: str, begin: float, end: float) -> dict[str, Any]:
        return {"ph": "X", "cat": "kernel", "name": name, "ts": begin, "dur": end - begin}

    gathers = [kernel("ncclDevKernel_AllGather", 0, 10), kernel("ncclDevKernel_ReduceScatter", 5, 20)]
    products = [kernel("gemm", 8, 12), kernel("gemm", 11, 14), kernel("gemm", 19, 30)]
    found = hidden([*gathers, *products, {"ph": "i", "name": "mark"}])
    assert found["hidden"] == pytest.approx((6 + 1) / 20)
    assert found["computation_s"] == pytest.approx((6 + 11) / 1e6)
    assert hidden(products)["hidden"] is None


def test_what_only_a_gpu_shows_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))
    import parts

    environment, *names = (part.name for part in parts.one_gpu(fake=False))
    first = list(dict.fromkeys(part for *_, part in parts.UNPROVEN))
    assert environment == "environment"
    assert names[: len(first)] == first
    header = ("only a GPU shows", "in its place without one", "part of `make gpu`")
    check_table(DOCS / "performance.md", "needs a GPU", header, parts.UNPROVEN)


def test_every_gpu_test_is_in_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GPU))
    import parts

    for fake in (True, False):
        commands = [each.command for each in parts.one_gpu(fake) if "pytest" in each.command]
        for file in GPU.glob("test_*.py"):
            chosen = [command for command in commands if str(file) in command]
            assert chosen, f"no part runs {file.name}"
            words = [command[command.index("-k") + 1] for command in chosen if "-k" in command]
            if words:  # several parts share the file: one of them takes what the others leave
                others = [each for each in words if not each.startswith("not ")]
                assert f"not ({' or '.join(others)})" in words
