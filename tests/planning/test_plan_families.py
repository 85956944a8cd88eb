"""Plans of model families, compared with the memory of a step: the table "memory" in docs/models.md."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from doc_tables import DOCS, check_rows
from families import BATCH, FAMILIES, LENGTH, Family, ready, text, tokens, transformers
from test_plan_parallel import nothing_held
from torch import nn

from mfsdp_compile import fully_shard_model
from mfsdp_compile.diagnostics.measure import allocated
from mfsdp_compile.passes.guests.solver.hardware import hardware
from mfsdp_compile.planning import Candidate, Job, Workload, workload
from mfsdp_compile.planning.planner import planned
from mfsdp_compile.planning.trace_model import trace
from mfsdp_compile.planning.workloads import Inputs
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.geometry.placements import ShardingStrategy

pytestmark = pytest.mark.slow
CPU, RANKS, LAYERS = hardware("cpu"), 4, 7
BOUND = 0.05
"""Bound on the error, relative to the measured peak.

Not predicted are workspaces of kernels (backwards of convolutions on CPU copy what they compute), and some of
Inductor's fusions, which are a large part of the memory of small models.
"""
HEADER = ("model", "inner compiler", "planned, KiB", "measured, KiB", "off by")
PLANNED = [
    "llama",
    "gpt2",
    "qwen3-moe",
    "qwen3-moe-batched",
    "mixtral",
    "t5",
    "vit",
    "mamba",
    "llava",
    "llava-frozen",
    "resnet",
]


def work_of(name: str, family: Family, **options: Any) -> Workload:
    def inputs(batch: int, length: int) -> Inputs:
        return (), family.batch(torch.Generator())

    def build() -> nn.Module:
        return ready(family.make(**options))

    return Workload(name, build, "auto", inputs, family.loss, batch=BATCH, length=LENGTH, dtype=torch.float32)


@pytest.mark.long
@pytest.mark.parametrize(("name", "inner"), [(name, inner) for inner in ("aot_eager", "inductor") for name in PLANNED])
def test_memory_is_as_planned(name: str, inner: str, request: pytest.FixtureRequest) -> None:
    """A step takes the planned memory.

    The planner traces four or five of several equal layers; the measurement runs all.
    """
    if name.startswith("llava") and compat.TORCH_VERSION < (2, 12):
        pytest.skip("this torch cannot trace how many tokens are images")
    family, fused = FAMILIES[name], inner == "inductor"
    if not fused:  # Inductor's code keeps a collective's input anyway
        request.getfixturevalue(nothing_held.__name__)
    work = work_of(name, family, layers=LAYERS)
    job = Job(work, CPU, solved=False, fused=fused)
    row = planned(job, trace(work, CPU, fused), Candidate(ShardingStrategy.OPTIM_GRADS_PARAMS, RANKS))
    measured = measured_peak(family, inner)
    off = abs(row.needed / measured - 1)
    assert off <= BOUND, (row.needed, measured)
    sizes = (f"{size / 1024:.0f}" for size in (row.needed, measured))
    bounds = dict(zip(HEADER[2:], (float("inf"), float("inf"), BOUND), strict=True))
    check_rows(
        DOCS / "models.md", "memory", HEADER, [(family.title, inner, *sizes, f"{off:.3f}")], keys=2, bounds=bounds
    )


def measured_peak(family: Family, inner: str) -> int:
    """Return bytes on one of four ranks: forward and backward of a step, shards, AdamW's moments and buffers.

    A plan of operators by themselves has no regions, see :class:`~mfsdp_compile.planning.Job`.
    """
    batch = family.batch_of(0)
    with compat.fake_process_group(RANKS):
        model = fully_shard_model(ready(family.make(layers=LAYERS)), fsdp_unit_modules="auto")
        call = torch.compile(
            model, backend="mfsdp", fullgraph=True, options={"inner": inner, "regions": inner == "inductor"}
        )

        def step() -> None:
            family.loss(call(**batch)).backward()

        for _ in range(2):
            step()
            model.zero_grad()
        at_rest = sum(
            (3 if bucket.plan.requires_grad else 1) * bucket.plan.shard_bytes for bucket in model.sharded.buckets
        )
        return allocated(step)[0] + at_rest + sum(buffer.nbytes for buffer in model.buffers())


def test_a_model_that_cannot_be_one_graph() -> None:
    work = work_of("loop", FAMILIES["qwen3-moe-loop"])
    with pytest.raises(RuntimeError, match=r"cannot make one graph of loop, .*modeling_qwen3_moe\.py:.* in forward"):
        trace(work, CPU, False)


@pytest.mark.long
def test_a_batch_that_leaves_units_out() -> None:
    work = work_of("llava", FAMILIES["llava-text"])
    with pytest.raises(RuntimeError, match=r"does not use .*vision_tower\.encoder\.layers\.0.*batch with images"):
        trace(work, CPU, False)


# -- values of --model ------------------------------------------------------------------------------------------------

RESNET = work_of("resnet", FAMILIES["resnet"])
"""Workload for ``--model test_plan_families:RESNET``."""


@pytest.mark.long
def test_command_plans_a_workload() -> None:
    """The command plans a workload in a process that has compiled nothing before."""
    arguments = ["plan", "--model", f"{__name__}:RESNET", "--world", "4", "--dtype", "float32", "--hardware", "cpu"]
    code = f"from mfsdp_compile.cli import main; raise SystemExit(main({arguments}))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "ZeRO-3" in done.stdout


@functools.cache
def configurations() -> dict[str, Any]:
    t = transformers()
    small = {"num_hidden_layers": 6, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    t5 = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 6, "num_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return {
        "T5ForConditionalGeneration": t.T5Config(decoder_start_token_id=0, **t5),
        "GPT2LMHeadModel": t.GPT2Config(vocab_size=128, n_embd=64, n_layer=6, n_head=4),
        "Qwen3MoeForCausalLM": t.Qwen3MoeConfig(vocab_size=128, num_key_value_heads=2, head_dim=16, **small, **experts),
        "ViTForImageClassification": t.ViTConfig(image_size=32, patch_size=8, **small),
    }


@pytest.mark.long
@pytest.mark.parametrize("architecture", configurations())
def test_architectures_of_transformers(architecture: str, tmp_path: Path) -> None:
    config = configurations()[architecture]
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    found = trace(workload(f"hf:{tmp_path}", batch=2, length=16), CPU, fused=True)
    model = getattr(transformers(), architecture)(config)
    assert found.parameters == sum(param.numel() for param in model.parameters())
    assert len(found.units) < len(found.order)


@pytest.mark.long
def test_a_configuration_is_as_it_was() -> None:
    """The planner leaves the configuration of a model unchanged.

    Models ask it how many layers there are, and of which kind each is.
    """
    config = transformers().Qwen3Config(
        **text(9), head_dim=16, use_sliding_window=True, sliding_window=4, max_window_layers=2
    )
    kinds = ["full_attention"] * 2 + ["sliding_attention"] * 7
    assert config.layer_types == kinds

    def build() -> nn.Module:
        return transformers().Qwen3ForCausalLM(config)

    work = Workload(
        "qwen3",
        build,
        "auto",
        lambda *_: ((), tokens(torch.Generator())),
        lambda output: output.loss,
        batch=BATCH,
        length=LENGTH,
    )
    found = trace(work, CPU, False)
    assert (len(found.units), len(found.order)) == (8, 11)  # two layers and seven layers
    assert (config.num_hidden_layers, config.layer_types) == (9, kinds)


def test_a_configuration_with_images_among_tokens(tmp_path: Path) -> None:
    transformers().LlavaConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"where images go among tokens.*planning\.Workload"):
        workload(f"hf:{tmp_path}")
