"""What takes long is told about on stderr, by rank 0."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Iterator
from typing import Any

import parity
import pytest
import torch
import zoo

from mfsdp_compile import progress
from mfsdp_compile.backend import compile
from mfsdp_compile.runtime import compat


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MFSDP_PROGRESS", "1")
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    monkeypatch.setattr(progress, "INTERVAL", 0.05)
    yield
    progress.end()


@pytest.mark.usefixtures("fake_world", "impatient")
def test_compiling_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    compat.on_compilation(compile._dynamo_begins, compile._dynamo_ends)  # an earlier test may have reset Dynamo
    _model, call = parity.shard(parity.build(zoo.Plain), parity.AOT_EAGER)
    x = parity.batches(1)[0, 0]
    capsys.readouterr()
    call(x).backward()
    told = capsys.readouterr()
    assert not told.out
    lines = told.err.splitlines()
    done = next(line for line in lines if "done after" in line)
    assert done.startswith("mfsdp: compiling Plain: Dynamo ")
    assert "passes and AOTAutograd" in done
    assert all(line.startswith("mfsdp: ") for line in lines)
    with torch.no_grad():
        call(x)
    assert "Plain for calls without gradients (evaluation), besides the graphs for training" in capsys.readouterr().err
    call(x)
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("fake_world", "impatient")
@pytest.mark.parametrize("how", ["option", "variable"])
def test_silence(how: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "variable":
        monkeypatch.setenv("MFSDP_PROGRESS", "0")
    else:
        monkeypatch.setattr(progress, "PATIENCE", 3.0)  # Dynamo does not know the option yet
    _, call = parity.shard(
        parity.build(zoo.Plain), parity.AOT_EAGER, **({"progress": False} if how == "option" else {})
    )
    call(parity.batches(1)[0, 0]).backward()
    assert not capsys.readouterr().err


@pytest.mark.usefixtures("impatient")
def test_a_terminal_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal: Any = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.working("sharding Net"):
        progress.step("reading")
        time.sleep(0.3)
    text = terminal.getvalue()
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert text.split("\r\x1b[2K")[-1] == "mfsdp: sharding Net: reading 0 s: done after 0 s\n"


@pytest.mark.usefixtures("impatient")
def test_work_without_steps_is_told_about(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.working("sharding Net"):
        time.sleep(0.2)
    assert "mfsdp: sharding Net: 0 s: done after 0 s" in capsys.readouterr().err.splitlines()
