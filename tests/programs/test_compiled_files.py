"""Compiled code is saved to files, from which a job starts with empty caches."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch._inductor.config as inductor_config

from mfsdp_compile import load_compiled, save_compiled
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.untrusted_files import FileRefused

pytestmark = pytest.mark.slow

PROGRAM = """
import json, sys
import torch, torch.distributed as dist
from torch._dynamo.utils import counters
import mfsdp_compile

torch.manual_seed(0)
torch.set_num_threads(1)
how, folder, rank, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[5], size), rank=rank, world_size=size)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(4)))
model = mfsdp_compile.fully_shard_model(model, fsdp_unit_modules=[torch.nn.Sequential])
refused = ""
if how == "load":
    try:
        print(mfsdp_compile.load_compiled(folder), file=sys.stderr)
    except ValueError as error:
        refused = str(error)
call = torch.compile(model, backend="mfsdp", options={"regions": True, **json.loads(sys.argv[6])})
loss = call(torch.ones(2, 8)).sum()
loss.backward()
if how == "save":
    mfsdp_compile.save_compiled(folder)
    with torch.no_grad():
        call(torch.ones(2, 8))
    print(mfsdp_compile.save_compiled(folder), file=sys.stderr)  # what was saved before is still there
gradients = [float(p.grad.to_local().sum()) for p in model.parameters()]
asked = {**counters["aot_autograd"], **{"fx_" + k: v for k, v in counters["inductor"].items()}}
counts = {name: count for name, count in asked.items() if "cache" in name}
print(json.dumps([loss.item(), gradients, counts, refused]))
dist.barrier()
"""


def run(how: str, saved: Path, cache: Path, ranks: int = 2, options: str = "{}") -> list[Any]:
    """Train a step in new processes. Return each rank's loss, gradients, uses of caches, and why nothing was loaded."""
    cache.mkdir(exist_ok=True)
    if how == "save":  # libraries are found behind a link, too
        (cache.parent / "link").symlink_to(cache)
        cache = cache.parent / "link"
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    store = cache / f"store of {how} {len(list(cache.glob('store*')))}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how, str(saved), str(rank), str(ranks), str(store), options],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    found = []
    for process in processes:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 0, err
        found.append(json.loads(out.splitlines()[-1]))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    folder = tmp_path_factory.mktemp("saved")
    return folder / "code", run("save", folder / "code", folder / "cache")


def test_what_is_saved(saved: tuple[Path, list[Any]]) -> None:
    manifest = json.loads((saved[0] / "rank1.json").read_text())
    assert manifest["graphs"] == 2
    assert len(manifest["libraries"]) > 2


@pytest.mark.long
def test_a_job_starts_with_empty_caches(saved: tuple[Path, list[Any]], tmp_path: Path) -> None:
    """It traces with Dynamo, and compiles nothing."""
    folder, before = saved
    after = run("load", folder, tmp_path / "same")
    for (loss, gradients, counts, refused), (expected, theirs, *_) in zip(after, before, strict=True):
        assert refused == ""
        assert (loss, gradients) == (expected, theirs)
        assert counts.get("autograd_cache_hit") == 1
        assert "autograd_cache_miss" not in counts
        assert "fx_fxgraph_cache_miss" not in counts


@pytest.mark.long
def test_another_schedule_or_number_of_ranks(saved: tuple[Path, list[Any]], tmp_path: Path) -> None:
    for _, _, counts, refused in run("load", saved[0], tmp_path / "other", options='{"prefetch": 3}'):
        assert refused == ""
        assert counts["autograd_cache_miss"] == 1
        assert "fx_fxgraph_cache_miss" not in counts
    for _, _, counts, refused in run("load", saved[0], tmp_path / "cache", ranks=3):
        assert refused == ""
        assert counts["autograd_cache_miss"] == 1


def damaged(folder: Path, name: str) -> None:
    path = folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def changed(folder: Path, **values: Any) -> None:
    manifest = json.loads((folder / "rank0.json").read_text())
    manifest.update(values)
    (folder / "rank0.json").write_text(json.dumps(manifest))


def test_what_is_refused(saved: tuple[Path, list[Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written into caches then."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))

    def other_torch(folder: Path) -> None:
        (folder / "rank1.json").unlink()
        changed(folder, **{"made with": made | {"torch": "2.0"}})

    library = next(iter((saved[0] / "libraries").iterdir())).name
    made = json.loads((saved[0] / "rank0.json").read_text())["made with"]
    for number, (change, message) in enumerate(
        [
            (lambda folder: damaged(folder, "rank0.entries"), r"rank0\.entries is damaged"),
            (lambda folder: damaged(folder, f"libraries/{library}"), f"{library} is damaged"),
            (lambda folder: changed(folder, format="other"), "was not written by save_compiled"),
            (other_torch, r"torch '2\.0', and this installation has '2"),
            (lambda folder: changed(folder, **{"made with": made | {"processor": "an old one"}}), "'an old one'"),
            (lambda folder: changed(folder, libraries={"../../out.so": library}), "outside the folder"),
            (lambda folder: changed(folder, libraries={"a/b.py": library}), "libraries end with .so"),
            (lambda folder: changed(folder, pieces=-1), "pieces is -1"),
            (lambda folder: (folder / "rank0.json").write_text("{"), r"rank0\.json does not hold .* it is not JSON"),
        ]
    ):
        folder = tmp_path / str(number)
        shutil.copytree(saved[0], folder)
        change(folder)
        with pytest.raises(FileRefused, match=message):
            load_compiled(folder)
    with pytest.raises(FileNotFoundError, match="Nothing was saved in"):
        load_compiled(tmp_path / "nothing")
    assert not list(cache.rglob("*.so"))
    assert not (cache / "fxgraph").exists()
    count = json.loads((saved[0] / "rank0.json").read_text())["pieces"]
    changed(folder := Path(shutil.copytree(saved[0], tmp_path / "more")), pieces=count + 1)
    with pytest.raises(FileRefused, match=r"rank0\.entries holds other entries than .*rank0\.json says"):
        load_compiled(folder)
    shutil.rmtree(cache)
    changed(folder := Path(shutil.copytree(saved[0], tmp_path / "one")), **{"made with": made | {"torch": "2.0"}})
    assert load_compiled(folder).pieces == count  # as another rank has saved them
    assert list(cache.rglob("*.so"))


def test_nothing_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "cache_entries", lambda: (b"", 0, 0))
    with pytest.raises(RuntimeError, match="nothing was compiled so far"):
        save_compiled(tmp_path)
    with inductor_config.patch(fx_graph_cache=False):
        for function in (save_compiled, load_compiled):
            with pytest.raises(RuntimeError, match="cache is switched off"):
                function(tmp_path)
