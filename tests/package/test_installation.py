"""The package as users meet it: installed or not, through the entry point, from caches, on the command line."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from mfsdp_compile.cli import main
from mfsdp_compile.diagnostics import checkup
from mfsdp_compile.report import seconds_text
from mfsdp_compile.runtime import compat

ROOT = Path(__file__).resolve().parents[2]

COMPILES = """
import json, sys, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
{imports}
options = json.loads(sys.argv[1])
dist.init_process_group("fake", rank=0, world_size=options.pop("world", 2), store=FakeStore())
from mfsdp_compile import fully_shard_model
torch.manual_seed(0)
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
    def forward(self, x):
        return torch.tanh(self.linear(x))
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.Sequential(Block(), Block())
    def forward(self, x):
        return self.blocks(x).sum()
model = fully_shard_model(Model(), fsdp_unit_modules=[Block])
torch.compile(model, backend="mfsdp", options=options)(torch.ones(2, 16)).backward()
from torch._dynamo.utils import counters
print(json.dumps(dict(counters["aot_autograd"])))
"""


def run(program: str, *arguments: str, cwd: Path = ROOT, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return a function that runs the demo in this process, and returns what it prints. Its files are in ``folder``."""
    monkeypatch.setenv("COLUMNS", "200")

    def start(*arguments: str, folder: Path = tmp_path) -> str:
        monkeypatch.chdir(folder)
        assert main(["demo", "--eager", "--batch", "2", "--length", "32", *arguments]) == 0
        return capsys.readouterr().out

    return start


@pytest.mark.long
def test_backend_is_known_without_importing_anything(tmp_path: Path) -> None:
    out = run(
        "import torch, sys; print('mfsdp' in torch._dynamo.list_backends(), 'mfsdp_compile' in sys.modules)",
        cwd=tmp_path,
    )
    assert out.split() == ["True", "False"]


@pytest.mark.long
def test_finalizers_import_nothing() -> None:
    """Finalizers import nothing, because garbage collection may run them in the middle of an import.

    There, Python 3.11 takes the wrong lock for its own (``KeyError`` in ``importlib._bootstrap``).
    """
    program = """
import sys, torch
from mfsdp_compile.runtime import compat
before = set(sys.modules)
compat.wait_tensor_when_dropped(torch.empty(1))
print(sorted(set(sys.modules) - before))
"""
    assert run(program).split() == ["[]"]


@pytest.mark.long
@pytest.mark.slow
def test_checkout_is_importable_as_it_lies(tmp_path: Path) -> None:
    """The checkout is importable with ``PYTHONPATH=.``, without an installation, as on machines without a network."""
    program = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in repr(f).lower()]
sys.path[:] = [p for p in sys.path if "editable" not in p]
import mfsdp_compile, mfsdp_compile.passes.unshard, mfsdp_compile.runtime.geometry.layout, torch
print(mfsdp_compile.passes.unshard.__file__)
print(mfsdp_compile.runtime.geometry.layout.__file__)
print("mfsdp" in torch._dynamo.list_backends())
"""
    out = run(program, cwd=tmp_path, PYTHONPATH=str(ROOT)).split()
    assert out == [str(ROOT / "passes" / "unshard.py"), str(ROOT / "runtime" / "geometry" / "layout.py"), "True"]


EDITABLE = f"""
import sys
from importlib.util import spec_from_file_location
class Finder:  # as setuptools writes it for pip install -e of a package whose folders are mapped
    @staticmethod
    def find_spec(name, path=None, target=None):
        folder = {{"mfsdp_compile.passes": "passes", "mfsdp_compile.runtime": "runtime"}}.get(name)
        return folder and spec_from_file_location(name, f"{ROOT}/{{folder}}/__init__.py")
sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f).lower()] + [Finder]
import mfsdp_compile, mfsdp_compile.passes.unshard, mfsdp_compile.runtime.geometry.layout
for module in (mfsdp_compile, mfsdp_compile.passes.unshard, mfsdp_compile.runtime.geometry.layout):
    print(module.__file__)
"""


@pytest.mark.long
def test_a_checkout_on_the_path_wins_over_one_that_is_installed(tmp_path: Path) -> None:
    """All modules come from the checkout on the path, never from a mixture of two checkouts."""
    ours = tmp_path.resolve() / "checkout"
    names = ("mfsdp_compile", "passes", "runtime")
    for name in names:
        shutil.copytree(ROOT / name, ours / name, ignore=shutil.ignore_patterns("__pycache__"))
    files = map(Path, run(EDITABLE, cwd=tmp_path, PYTHONPATH=str(ours)).split())
    assert [file.relative_to(ours).parts[0] for file in files] == list(names)
    for name in ("passes", "runtime"):
        shutil.rmtree(ours / name)
    with pytest.raises(
        AssertionError, match=rf"ImportError: mfsdp_compile at {ours}/mfsdp_compile .*in {ROOT}/runtime"
    ):
        run(EDITABLE, cwd=tmp_path, PYTHONPATH=str(ours))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that has the package installed: from a wheel, made from an sdist, made from the checkout."""
    made, target = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("installed")
    build = [
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--skip-dependency-check",
        "--outdir",
        str(made),
        str(ROOT),
    ]
    subprocess.run(build, check=True, timeout=300, stdout=subprocess.DEVNULL)
    (sdist,), (wheel,) = made.glob("*.tar.gz"), made.glob("*.whl")
    with tarfile.open(sdist) as archive:
        assert {
            f"{sdist.name.removesuffix('.tar.gz')}/{name}" for name in ("README.md", "LICENSE", "CHANGELOG.md")
        } <= set(archive.getnames())
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel)]
    subprocess.run(install, check=True, timeout=300)
    return target


@pytest.mark.slow
def test_wheel_holds_everything_in_one_namespace(installed: Path) -> None:
    top = {p.name for p in installed.iterdir() if p.suffix != ".dist-info"}
    assert top <= {"mfsdp_compile", "bin"}
    for part in (
        "passes/unshard.py",
        "runtime/geometry/layout.py",
        "models/llama.py",
        "megatron/settings.py",
        "py.typed",
    ):
        assert (installed / "mfsdp_compile" / part).is_file()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("command", ["doctor", "demo"])
def test_an_installation_runs_outside_of_a_checkout(installed: Path, tmp_path: Path, command: str) -> None:
    environment = {"PYTHONPATH": str(installed), "COLUMNS": "200"}
    where = "import mfsdp_compile.runtime.geometry.layout as layout; print(layout.__file__)"
    assert run(where, cwd=tmp_path, **environment).startswith(str(installed))
    options = ["--eager", "--batch", "2", "--length", "32", "--steps", "4", "--parity-steps", "2"]
    done = subprocess.run(
        [sys.executable, str(installed / "bin" / "mfsdp"), command, *(options if command == "demo" else [])],
        cwd=tmp_path,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    if command == "doctor":
        assert re.search(r"mfsdp-compile +│ +0\.2", done.stdout)
    else:
        assert ": holds" in done.stdout
        assert json.loads((tmp_path / "demo-out" / "summary.json").read_text())["collectives"]["reductions"] == 8


@pytest.mark.long
def test_checkout_root_with_a_plain_installation(installed: Path) -> None:
    """The package works if it is run from the root of a checkout, where the local folder has no ``passes`` inside."""
    out = run(
        "import mfsdp_compile, mfsdp_compile.passes.unshard as u; print(mfsdp_compile.__file__, u.__file__)",
        PYTHONPATH=str(installed),
    ).split()
    assert out[0] == str(ROOT / "mfsdp_compile" / "__init__.py")
    assert Path(out[1]).is_file()


def start(folder: Path, **options: object) -> dict[str, int]:
    """Compile in a separate process. Returns AOTAutograd's counters."""
    out = run(COMPILES.format(imports=""), json.dumps(options), TORCHINDUCTOR_CACHE_DIR=str(folder / "cache"))
    return json.loads(out.splitlines()[-1])


@pytest.mark.long
@pytest.mark.slow
def test_second_start_compiles_from_the_cache(tmp_path: Path) -> None:
    """A second start compiles from the cache, but never from an entry made under other options."""
    assert start(tmp_path).get("autograd_cache_miss") == 1
    again = start(tmp_path)
    assert again.get("autograd_cache_hit") == 1
    assert "autograd_cache_miss" not in again
    assert start(tmp_path, prefetch=0).get("autograd_cache_miss") == 1


@pytest.mark.slow
@pytest.mark.long
def test_a_cache_entry_is_for_a_number_of_ranks(tmp_path: Path) -> None:
    assert start(tmp_path).get("autograd_cache_miss") == 1
    assert start(tmp_path, world=4).get("autograd_cache_miss") == 1
    assert start(tmp_path).get("autograd_cache_hit") == 1


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("mfsdp-compile ")
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["doctr"])
    assert "there is no command 'doctr'. Did you mean 'doctor'?" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    code = "import sys; from mfsdp_compile import cli; sys.argv = ['mfsdp', '--help']; cli.command()"
    check = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); "
    done = subprocess.run([sys.executable, "-c", check + code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stdout.endswith("False\n")
    assert "calibrate" in done.stdout


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("model", ["llama", "hf-llama"])
def test_demo_with_hooks(tmp_path: Path, demo: Callable[..., str], model: str) -> None:
    """The whole demo runs eagerly. ``make demo`` and its users run it compiled."""
    out = demo("--steps", "4", "--parity-steps", "2", "--model", model)
    assert ": holds" in out
    assert "50.0%" in out
    summary = json.loads((tmp_path / "demo-out" / "summary.json").read_text())
    assert len(summary["losses"]) == 4
    assert summary["losses"][-1] < summary["losses"][0]
    assert summary["collectives"]["reductions"] == 8
    assert [step["tokens"] for step in summary["steps"]] == [2 * 2 * 32] * 4
    seconds = median(step["seconds"] for step in summary["steps"][1:])
    assert summary["step_seconds"] == seconds
    assert f"then {seconds_text(seconds)} each (median), {128 / seconds:,.0f} tokens/s" in out  # one step time


@pytest.mark.long
@pytest.mark.processes
def test_demo_goes_on_from_its_checkpoint(tmp_path: Path, demo: Callable[..., str]) -> None:
    """Interrupted training has exactly the losses of uninterrupted training, to the last bit."""

    def losses(folder: str, *arguments: str) -> list[float]:
        (tmp_path / folder).mkdir(exist_ok=True)
        demo("--parity-steps", "0", *arguments, folder=tmp_path / folder)
        return json.loads((tmp_path / folder / "demo-out" / "summary.json").read_text())["losses"]

    whole = losses("whole", "--steps", "5")
    assert losses("parts", "--steps", "3") + losses("parts", "--steps", "2", "--resume") == whole
    rows = (tmp_path / "parts" / "demo-out" / "loss.csv").read_text().splitlines()[1:]
    assert [float(row.split(",")[1]) for row in rows] == whole


@pytest.mark.long
@pytest.mark.processes
def test_demo_reports_a_rank_that_fails(demo: Callable[..., str]) -> None:
    with pytest.raises(RuntimeError, match="a rank failed"):
        demo("--length", "9000000")


@pytest.mark.slow
def test_doctor_looks_at_the_installation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out
    assert "mfsdp_compile.backend.compile:mfsdp" in out


@pytest.mark.long
@pytest.mark.processes
def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs real collectives, and ends with a verdict."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert re.search(
        r"gloo, 2 ranks +│ right: all-gather [\d.]+ ms, reduce-scatter [\d.]+ ms, all-reduce [\d.]+ ms", told
    )
    assert "NCCL_DEBUG=INFO" in told
    assert "Ready to train on the CPU; no GPU was found." in told


def test_doctor_finds_what_is_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(checkup.shutil, "which", lambda name: None)
    monkeypatch.setattr(compat, "TORCH_VERSION", (9, 9))

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a rank failed:\nrank 1:\nRuntimeError: no route to host")

    monkeypatch.setattr(checkup, "run_ranks", broken)
    assert main(["doctor"]) == 1
    told = capsys.readouterr().out
    assert "wrong C++ compiler: Inductor needs one to compile for the CPU. Install g++" in told
    assert "wrong gloo, 2 ranks: RuntimeError: no route to host." in told
    assert "3 of these must change before training." in told
