"""The examples run, as they are started and as docs/trainers.md shows them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import documents
import pytest
import torch
import torch.distributed as dist
from pool import on_ranks

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from test_trainers import trainers

from mfsdp_compile.examples import job_config, torchtitan_style

ROOT = Path(__file__).resolve().parents[2]
JOB = Path(torchtitan_style.__file__).with_suffix(".toml")


def torchrun(module: str, *words: str, cwd: Path, ranks: int = 2) -> str:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    done = subprocess.run(
        [*launcher, f"mfsdp_compile.examples.{module}", *words],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.processes
def test_trainer_example(tmp_path: Path) -> None:
    """The Trainer example trains, saves, and resumes with the same losses."""
    words = ["--max_steps", "4", "--torch_compile_backend", "aot_eager", "--disable_tqdm", "true"]
    torchrun("hf_trainer", *words, "--save_steps", "2", cwd=tmp_path)
    losses = json.loads((tmp_path / "trainer-out" / "losses.json").read_text())
    resume = ["--resume_from_checkpoint", "trainer-out/checkpoint-2", "--output_dir", "again", "--save_strategy", "no"]
    torchrun("hf_trainer", *words, *resume, cwd=tmp_path)
    assert len(losses) == 4
    assert json.loads((tmp_path / "again" / "losses.json").read_text()) == losses
    again, first = (
        transformers.LlamaForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("again", "trainer-out")
    )
    assert all(torch.equal(again[name], value) for name, value in first.items())


def printed(text: str) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", text)}


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("module", "words", "to_stop", "to_go_on"),
    [
        ("plain_loop", ["--inner", "aot_eager", "--folder", "saved"], ["--steps", "2"], ["--steps", "4"]),
        (
            "torchtitan_style",
            ["--compile.backend", "aot_eager", "--checkpoint.enable", "true"],
            ["--training.steps", "2"],
            ["--training.steps", "4"],
        ),
    ],
)
def test_other_examples(module: str, words: list[str], to_stop: list[str], to_go_on: list[str], tmp_path: Path) -> None:
    assert [*printed(torchrun(module, *words, *to_stop, cwd=tmp_path))] == [1, 2]
    assert [*printed(torchrun(module, *words, *to_go_on, cwd=tmp_path))] == [3, 4]


# -- docs/trainers.md -------------------------------------------------------------------------------------------------


BLOCKS = re.findall(
    r"## ([^\n]*)\n(?:(?!\n## ).)*?<!-- not run: here, but by tests/integrations/test_examples\.py -->\n"
    r"```python\n(.*?)```",
    (ROOT / "docs/trainers.md").read_text(),
    re.DOTALL,
)


def test_the_page_shows_four_ways() -> None:
    assert [title for title, _ in BLOCKS] == ["A plain loop", "Hugging Face's Trainer", "accelerate", "torchtitan"]


@pytest.mark.long
@pytest.mark.parametrize("number", range(4))
@on_ranks(2)
def test_blocks_of_the_page(number: int, tmp_path: Path) -> None:
    """Code blocks of the page run unchanged, except that they run operator by operator, which compiles faster."""
    _, block = BLOCKS[number]
    block = block.replace("compile_options={", 'compile_options={"inner": "aot_eager", ')
    block = block.replace('"--training.steps"', '"--compile.backend", "aot_eager", "--training.steps"')
    with trainers():
        documents.run_python("docs/trainers.md", [(block, "")], str(tmp_path))
    dist.barrier()
    assert any(tmp_path.iterdir())


# -- a job in torchtitan's style --------------------------------------------------------------------------------------


def job(folder: Path, **changes: dict[str, Any]) -> job_config.JobConfig:
    config = job_config.load(JOB)
    small: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": str(folder)},
        "training": {"steps": 3, "seq_len": 32, "local_batch_size": 1, "global_batch_size": 8},
        "compile": {"enable": False},
    }
    for section in small.keys() | changes.keys():
        values = small.get(section, {}) | changes.get(section, {})
        config = replace(config, **{section: replace(getattr(config, section), **values)})
    return config


JOBS: dict[str, dict[str, dict[str, Any]]] = {
    "replicas": {"parallelism": {"data_parallel_replicate_degree": 2}},
    "tensor parallel": {
        "parallelism": {"tensor_parallel_degree": 2},
        "training": {"local_batch_size": 2},
        "activation_checkpoint": {"mode": "full"},
    },
    "compiled": {
        "parallelism": {"fsdp_reshard_after_forward": "always"},
        "compile": {"enable": True, "backend": "aot_eager"},
        "activation_checkpoint": {"mode": "selective"},
    },
}


@pytest.mark.long
@pytest.mark.parametrize("name", JOBS)
@on_ranks(4)
def test_jobs_take_the_same_steps(name: str, tmp_path: Path) -> None:
    """Jobs take the same steps however the model is divided, and continue from where they were saved."""
    losses = torchtitan_style.train(job(tmp_path))
    assert torchtitan_style.train(job(tmp_path, **JOBS[name])) == pytest.approx(
        losses, rel=1e-5
    )  # sums in another order
    saving = {"checkpoint": {"enable": True, "interval": 2}}
    saved = torchtitan_style.train(job(tmp_path, **JOBS[name], **saving))
    folder = tmp_path / "checkpoint"
    if dist.get_rank() == 0:
        (folder / "step-00000003").rename(tmp_path / "aside")
    dist.barrier()
    assert torchtitan_style.train(job(tmp_path, **JOBS[name], **saving)) == saved[2:]


def write(folder: Path, text: str) -> Path:
    path = folder / "job.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[trainning]\nsteps = 3", r"\[trainning\] in .* Did you mean 'training'\? There are: job, model"),
        ("[training]\nstep = 3", r"step is not known here. Did you mean 'steps'\?"),
        ("[training]\nsteps = 3.5", r"steps takes int, got 3.5"),
        ("[training]\nsteps = true", r"steps takes int, got True"),
        ("[compile]\nenable = 1", r"enable takes bool, got 1"),
        ("training = 3", r"it takes keys with values"),
    ],
    ids=["section", "key", "float", "bool for int", "int for bool", "no section"],
)
def test_configurations_with_mistakes(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        job_config.load(write(tmp_path, text))


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "[optimizer]\nlr = 1\n[training]\nsteps = 3")
    words = ["--job.config_file", str(path), "--training.steps", "4", "--optimizer.name", "SGD"]
    config = job_config.parse(words, JOB)
    assert (config.training.steps, config.optimizer.name, config.optimizer.lr) == (4, "SGD", 1)
    assert job_config.parse([], JOB) == job_config.load(JOB)
    with pytest.raises(ValueError, match=r"takes --section.key value.*got '--training.steps'"):
        job_config.parse(["--training.steps"], JOB)
    with pytest.raises(ValueError, match=r"pipeline_parallel_degree is not known"):
        job_config.parse(["--parallelism.pipeline_parallel_degree", "2"], JOB)


@pytest.mark.parametrize("fake_world", [2], indirect=True)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallelism": {"tensor_parallel_degree": 3}}, r"do not multiply to 2 ranks"),
        ({"training": {"global_batch_size": 3}}, r"global_batch_size=3 is no multiple of local_batch_size=1 times 2"),
        ({"model": {"flavor": "8B"}}, r"'8B'.*debugmodel"),
        ({"activation_checkpoint": {"mode": "some"}}, r"'some'.*none, full, selective"),
        ({"parallelism": {"fsdp_reshard_after_forward": "never"}}, r"'never' takes \[compile\]"),
    ],
    ids=["degrees", "batch", "flavor", "checkpointing", "resharding"],
)
def test_jobs_that_cannot_be(changes: dict[str, Any], message: str, fake_world: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        torchtitan_style.train(job(tmp_path, **changes))
