"""Conversion between torch_dist, fsdp_dtensor and Hugging Face folders, both ways, and the command line around it."""

from __future__ import annotations

import argparse
import contextlib
import doctest
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.format_utils
from hypothesis import given
from hypothesis import strategies as st
from megatron_files import (
    EXPERTS,
    FFN,
    HIDDEN,
    LAYERS,
    RanksWriter,
    blocks,
    dense_params,
    load_and_step,
    moe_params,
    write_torch_dist,
)
from pool import Pools, RankError
from torch import Tensor, nn

from mfsdp_compile import cli
from mfsdp_compile.checkpoint.dcp_reader import CheckpointReader
from mfsdp_compile.checkpoint.dcp_writer import CheckpointWriter, new_output
from mfsdp_compile.checkpoint.errors import CheckpointError
from mfsdp_compile.convert import from_torch_dist, huggingface, inspect_checkpoint, keys, param_groups
from mfsdp_compile.convert import stacked_tensors as blocks_module
from mfsdp_compile.convert.conversion_plan import ConversionPlan
from mfsdp_compile.convert.keys import Name, Prefixes, TensorPart
from mfsdp_compile.convert.to_torch_dist import plan_to_torch_dist

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

ROOT = Path(__file__).resolve().parents[2]
OPTIMIZER = "optimizer.state.module.module.module"


def carry_out(plan: ConversionPlan, out: Path) -> Path:
    with new_output(out) as partial:
        plan.write(partial, lambda _: None)
    return out


def to_fsdp(source: Path, out: Path, **options: Any) -> Path:
    return carry_out(from_torch_dist.plan_to_fsdp(source, from_torch_dist.TorchDistOptions(**options)), out)


def to_torch_dist(source: Path, out: Path, **options: Any) -> Path:
    return carry_out(plan_to_torch_dist(source, from_torch_dist.TorchDistOptions(**options)), out)


def mfsdp(*arguments: object, status: int = 0) -> str:
    """Run the command. Returns what it prints, stderr after stdout."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main([str(argument) for argument in arguments])
        except SystemExit as stopped:  # of argparse
            code = int(stopped.code or 0)
    assert code == status, out.getvalue() + err.getvalue()
    return out.getvalue() + err.getvalue()


# -- names ------------------------------------------------------------------------------------------------------------

TAILS = [
    "self_attention.linear_qkv.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.experts.experts.linear_fc1.weight",
    "mlp.experts.experts.linear_fc2.bias",
    "mlp.router.expert_bias",
]
STATES = st.sampled_from([None, "exp_avg", "exp_avg_sq", "fp32_param"])


def test_documented_examples() -> None:
    assert doctest.testmod(keys).failed == 0
    assert doctest.testmod(blocks_module, extraglobs={"torch": torch}).failed == 0


@given(
    st.sampled_from(["decoder.layers.", "vision_model.decoder.layers."]), st.sampled_from(TAILS), STATES, st.booleans()
)
def test_names_lead_there_and_back(stack: str, tail: str, state: str | None, gated: bool) -> None:
    name = stack + tail
    assert keys.parse_torch_dist(keys.torch_dist_key(Name(name, state))) == Name(name, state)
    shape = (3, 2, 4, 5)
    parts = keys.decompose(name, shape, gated)
    assert len({part.name for part in parts}) == len(parts)
    prefixes = Prefixes()
    for part in parts:
        parsed = prefixes.parse(prefixes.key(Name(part.name, state)))
        assert parsed == Name(part.name, state)
        assert keys.compose(part.name, gated) == TensorPart(name, part.index, part.half)
    elements = sum(torch.empty(shape)[part.index].numel() // (1 if part.half is None else 2) for part in parts)
    assert elements == torch.Size(shape).numel()


def test_names_as_megatron_has_them() -> None:
    parts = keys.decompose("decoder.layers.mlp.experts.experts.linear_fc1.bias", (1, 2, 4), gated=True)
    assert [part.name for part in parts] == [
        f"decoder.layers.0.mlp.experts.linear_fc1.bias{e}_{half}" for e in (0, 1) for half in "wv"
    ]
    # Where layers differ, their index stays in the name. Experts are stacked all the same.
    (part, _) = keys.decompose("decoder.layers.7.mlp.experts.experts.linear_fc2.weight", (2, 4, 4), gated=True)
    assert part == TensorPart("decoder.layers.7.mlp.experts.linear_fc2.weight0", (0,))
    local = keys.compose("decoder.layers.7.mlp.experts.local_experts.1.linear_fc1.weight_v", stack_layers=False)
    assert local == TensorPart("decoder.layers.7.mlp.experts.experts.linear_fc1.weight", (1,), 1)
    assert keys.modern_mtp("mtp.layers.0.transformer_layer.mlp.x") == "mtp.layers.0.mtp_model_layer.mlp.x"
    assert keys.modern_mtp("decoder.layers.0.transformer_layer.x") == "decoder.layers.0.transformer_layer.x"
    with pytest.raises(ValueError, match="3 rows"):
        keys.decompose("decoder.layers.mlp.linear_fc1.weight", (2, 3, 4), gated=True)


def test_options_of_groups_with_one_dot_or_two() -> None:
    prefixes = Prefixes()
    assert prefixes.parse_group(prefixes.group_key("a.weight", "lr")) == ("a.weight", "lr")
    assert prefixes.parse_group(f"{prefixes.groups}..a.weight.lr") == ("a.weight", "lr")


LEAVES = st.recursive(
    st.integers() | st.text(max_size=3) | st.none(),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.sampled_from(["lr", "a", "b_c"]), inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["args", "iteration"]), LEAVES))
def test_nested_values_lead_there_and_back(value: dict[str, Any]) -> None:
    assert keys.unflatten(dict(keys.flatten(value))) == value


@given(st.data())
def test_flattened_blocks_lead_there_and_back(data: st.DataObject) -> None:
    grid = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    shape = [g * data.draw(st.integers(1, 3)) for g in grid]
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    flat = blocks_module.flatten_blocks(tensor, grid)
    for at, block in blocks(tensor, grid):
        assert torch.equal(flat[at], block.reshape(-1))
    assert keys.grid_of(shape, flat.shape) == tuple(grid)
    assert torch.equal(blocks_module.unflatten_blocks(flat, shape, grid), tensor)


# -- torch_dist -------------------------------------------------------------------------------------------------------


def expected_fsdp(full: dict[str, Tensor], gated: bool) -> dict[str, Tensor]:
    """Return the expected fsdp_dtensor entries, computed independently of the package."""
    expected = {}
    for key, tensor in full.items():
        state = ""
        if key.startswith("optimizer.state."):
            _, _, state, key = key.split(".", 3)
        found = {key: tensor}
        if key.startswith("decoder.layers."):
            found = {key.replace("layers.", f"layers.{i}.", 1): tensor[i] for i in range(LAYERS)}
        if ".experts.experts." in key:
            found = {
                re.sub(r"experts\.experts(.*)", rf"experts\g<1>{e}", name): t[e]
                for name, t in found.items()
                for e in range(EXPERTS)
            }
        if gated and "linear_fc1" in key and "norm" not in key:
            halves = {f"{name}_w": t[:FFN] for name, t in found.items()}
            found = halves | {f"{name}_v": t[FFN:] for name, t in found.items()}
        for name, t in found.items():
            name = name.replace("transformer_layer", "mtp_model_layer")
            expected[f"{OPTIMIZER}.{name}.{state}" if state else f"model.module.{name}"] = t
    return expected


def tensors_of(directory: Path) -> dict[str, Tensor]:
    reader = CheckpointReader(directory)
    return {key: reader.tensor(key) for key in reader if reader.is_tensor(key)}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype, key
        assert torch.equal(found[key], tensor), key


@pytest.mark.long_unless("True-True-2", "False-False-1")
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("flattened", [True, False])
@pytest.mark.parametrize("moe", [False, True])
def test_torch_dist_there_and_back(tmp_path: Path, tp: int, flattened: bool, moe: bool) -> None:
    source = tmp_path / "torch_dist"
    full = write_torch_dist(source, tp, moe_params() if moe else dense_params(), flattened)
    there = to_fsdp(source, tmp_path / "fsdp")
    assert_equal(tensors_of(there), expected_fsdp(full, gated=True))
    back = to_torch_dist(there, tmp_path / "back")
    assert_equal(tensors_of(back), tensors_of(source))
    first, second = CheckpointReader(source), CheckpointReader(back)
    assert first.metadata.mcore_data == second.metadata.mcore_data  # type: ignore[attr-defined]
    assert second.value("dataset/consumed") == [7]
    assert second.value("decoder.layers.self_attention.core_attention._extra_state/shard_0_1") == [None]
    assert set(first) - set(second) == {
        "rng_state/shard_0_1",
        "rerun_state_machine_state/shard_0_2",
        "rerun_state_machine_state/shard_1_2",
    }
    for name in ("common.pt", "metadata.json"):
        assert (back / name).read_bytes() == (source / name).read_bytes()


def test_torch_loads_the_converted_checkpoint(tmp_path: Path) -> None:
    """torch's own reader and planner load a converted checkpoint into a nested dictionary, as Megatron-FSDP does."""
    full = write_torch_dist(tmp_path / "in", tp=2)
    out = to_fsdp(tmp_path / "in", tmp_path / "out")
    name = "module.decoder.layers.1.mlp.linear_fc1.weight_v"
    state: dict[str, Any] = {
        "model": {name: torch.zeros(FFN, HIDDEN, dtype=torch.bfloat16)},
        "optimizer": {"state": {f"module.module.{name}": {"exp_avg": torch.zeros(FFN, HIDDEN)}}},
        "args": None,
        "checkpoint_version": None,
        "iteration": None,
        "rerun_state_machine": {"sharded": {"seen": {"count": None}}},
    }
    dcp.load(state, checkpoint_id=out, no_dist=True)
    key = "decoder.layers.mlp.linear_fc1.weight"
    assert torch.equal(state["model"][name], full[key][1, FFN:])
    moment = state["optimizer"]["state"][f"module.module.{name}"]["exp_avg"]
    assert torch.equal(moment, full[f"optimizer.state.exp_avg.{key}"][1, FFN:])
    assert state["args"] == argparse.Namespace(num_layers=LAYERS, params_dtype=torch.bfloat16, swiglu=True)
    assert (state["checkpoint_version"], state["iteration"]) == (3.0, 5)
    assert state["rerun_state_machine"]["sharded"]["seen"]["count"] == 0


@pytest.mark.long_if("False-*", "*-options3-*", "*-options4-*")
@pytest.mark.parametrize(
    ("said", "options", "gated"),
    [
        (True, {}, True),
        (False, {}, False),
        (None, {}, True),  # derived from the shapes
        (True, {"swiglu": False}, False),
        (None, {"swiglu_modules": ("decoder",)}, True),
        (None, {"swiglu_modules": ("vision_model",)}, False),
    ],
)
def test_gated_matrices_are_known(tmp_path: Path, said: bool | None, options: dict[str, Any], gated: bool) -> None:
    full = write_torch_dist(tmp_path / "in", swiglu=said)
    out = to_fsdp(tmp_path / "in", tmp_path / "out", **options)
    assert_equal(tensors_of(out), expected_fsdp(full, gated))


def test_options_of_each_parameters_group(tmp_path: Path) -> None:
    write_torch_dist(tmp_path / "in")
    plan = from_torch_dist.plan_to_fsdp(tmp_path / "in", from_torch_dist.TorchDistOptions())
    assert "2 groups" in plan.notes[0]
    # The map knows the model's parameters: by layer, not cut into halves.
    named = [key for key in expected_fsdp({k: torch.empty(p.shape) for k, p in dense_params().items()}, False)]
    mapped = {key: int(key.endswith("weight")) for key in named}
    out = to_fsdp(tmp_path / "in", tmp_path / "out", group_map=mapped)
    reader, prefixes = CheckpointReader(out), Prefixes()
    for name, decay in (
        ("decoder.layers.2.mlp.linear_fc1.weight_v", 0.1),
        ("decoder.layers.0.mlp.linear_fc1.bias_w", 0.0),
    ):
        assert reader.value(prefixes.group_key(name, "weight_decay")) == decay
        assert reader.value(prefixes.group_key(name, "lr")) == 1e-3
    assert not [key for key in reader if ".." in key or key.endswith(".params")]
    assert reader.value("optimizer.param_groups.1.weight_decay") == 0.1
    # Without the original that was carried along, the groups are rebuilt from the parameters' options or the flattened
    # ones.
    shutil.rmtree(out / "torch_dist")
    back = to_torch_dist(out, tmp_path / "back")
    common = from_torch_dist.load_common(back / "common.pt")
    assert [group["weight_decay"] for group in param_groups.find_groups(common)] == [0.0, 0.1]
    assert common["iteration"] == 5
    with pytest.raises(CheckpointError, match=r"has no model.module.decoder.final_layernorm.weight"):
        to_fsdp(tmp_path / "in", tmp_path / "no", group_map={"model.module.x": 0})
    with pytest.raises(CheckpointError, match=r"into group 7, but the checkpoint's optimizer has 2 groups"):
        to_fsdp(tmp_path / "in", tmp_path / "no", group_map=dict.fromkeys(named, 7))


@pytest.mark.long
@pytest.mark.processes
def test_states_and_settings_are_loaded(tmp_path: Path, pools: Pools) -> None:
    """A sharded model takes main weights, states, steps and settings of groups: the next step is plain AdamW's."""
    named = expected_fsdp({key: torch.empty(param.shape) for key, param in dense_params().items()}, False)
    write_torch_dist(tmp_path / "one", groups=1)
    write_torch_dist(tmp_path / "two", steps=(4, 9))
    one = tmp_path / "one-fsdp"
    mfsdp("convert", tmp_path / "one", one)  # its only group is everyone's
    two = to_fsdp(tmp_path / "two", tmp_path / "two-fsdp", group_map=dict.fromkeys(named, 1))
    pools.of(2).run(load_and_step, folder=str(one), steps=5, lr=1e-3, weight_decay=0.0)
    pools.of(2).run(load_and_step, folder=str(two), steps=9, lr=1e-3, weight_decay=0.1)
    # Without a map, settings are the program's, and all groups must have taken the same steps.
    write_torch_dist(tmp_path / "same")
    pools.of(2).run(load_and_step, folder=str(to_fsdp(tmp_path / "same", tmp_path / "same-fsdp")), steps=5)
    unknown = to_fsdp(tmp_path / "two", tmp_path / "unknown-fsdp")
    with pytest.raises(RankError, match=r"different numbers of steps \(4, 9\).*--param-to-param-group-map-json"):
        pools.of(2).run(load_and_step, folder=str(unknown), steps=9)


def test_groups_from_parameters_alone(tmp_path: Path) -> None:
    prefixes = Prefixes()
    writer = CheckpointWriter(tmp_path / "in")
    for i in range(2):
        writer.add(f"model.module.decoder.layers.{i}.norm.weight", torch.ones(4))
        writer.add_value(f"{prefixes.groups}..decoder.layers.{i}.norm.weight.lr", 0.1 * i)  # as Megatron's tool does
    writer.close()
    back = to_torch_dist(tmp_path / "in", tmp_path / "out")
    assert param_groups.find_groups(from_torch_dist.load_common(back / "common.pt")) == [{"lr": 0.0}, {"lr": 0.1}]
    assert list(tensors_of(back)) == ["decoder.layers.norm.weight"]


@pytest.mark.long
def test_without_knowledge_of_a_former_layout(tmp_path: Path) -> None:
    """A checkpoint that was trained on, not converted, becomes stacked entries, flattened on request."""
    full = write_torch_dist(tmp_path / "in", tp=2)
    out = to_fsdp(tmp_path / "in", tmp_path / "out")
    shutil.rmtree(out / "torch_dist")
    plain = to_torch_dist(out, tmp_path / "plain")
    assert_equal(tensors_of(plain), full)
    flat = to_torch_dist(out, tmp_path / "flat", flatten_optimizer=True)
    name = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"
    assert CheckpointReader(flat).shape(name) == (LAYERS, 2, 1, FFN * HIDDEN)
    assert_equal(tensors_of(to_fsdp(flat, tmp_path / "again")), tensors_of(out))


def test_layers_that_differ_are_not_stacked(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "in")
    for i, width in enumerate((4, 4, 6)):
        writer.add(f"model.module.decoder.layers.{i}.linear.weight", torch.randn(width, 4))
    writer.close()
    with pytest.raises(CheckpointError, match=r"decoder.layers.linear.weight .*\[0\].*\[2\].*--layers indexed"):
        to_torch_dist(tmp_path / "in", tmp_path / "out")
    out = to_torch_dist(tmp_path / "in", tmp_path / "out", stack_layers=False)
    assert set(CheckpointReader(out)) == {f"decoder.layers.{i}.linear.weight" for i in range(3)}
    assert_equal(tensors_of(to_fsdp(out, tmp_path / "again", swiglu=False)), tensors_of(tmp_path / "in"))
    missing = CheckpointWriter(tmp_path / "gap")
    for i in (0, 2):
        missing.add(f"model.module.decoder.layers.{i}.linear.weight", torch.randn(4, 4))
    missing.close()
    with pytest.raises(CheckpointError, match=r"there is none for \[1\]"):
        to_torch_dist(tmp_path / "gap", tmp_path / "no")


def test_states_that_are_one_number(tmp_path: Path) -> None:
    """State that is one number per parameter is converted. Optimizers of torch count steps for each parameter."""
    writer = CheckpointWriter(tmp_path / "in")
    for i in range(2):
        for half in "wv":
            name = f"decoder.layers.{i}.mlp.linear_fc1.weight_{half}"
            writer.add(f"model.module.{name}", torch.randn(4, 4))
            writer.add(f"{OPTIMIZER}.{name}.step", torch.tensor(float(i)))
            writer.add(f"{OPTIMIZER}.{name}.exp_avg", torch.randn(4, 4))
    writer.close()
    out = to_torch_dist(tmp_path / "in", tmp_path / "out", flatten_optimizer=True)
    assert CheckpointReader(out).shape("decoder.layers.mlp.linear_fc1.weight") == (2, 8, 4)
    assert_equal(tensors_of(to_fsdp(out, tmp_path / "again", swiglu=True)), tensors_of(tmp_path / "in"))


def test_chained_optimizers_and_common_state_as_an_entry(tmp_path: Path) -> None:
    """Checkpoints with numbered optimizers of a chain, or without common.pt, are converted.

    Older versions of Megatron number the optimizers of a chain. Recent ones write no common.pt.
    """
    writer = RanksWriter(tmp_path / "in", 1)
    for prefix, key in (
        ("", "decoder.layers.norm.weight"),
        ("chained_1.optimizer.state.exp_avg.", "decoder.layers.norm.weight"),
    ):
        writer.tensor(prefix + key, (2, 4), [(0, (0, 0), torch.randn(2, 4))])
    writer.value(0, "common_state/shard_0_1", [{"iteration": 7, "optimizer": {"param_groups": [{"lr": 0.1}]}}])
    writer.close()
    (tmp_path / "in" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    mfsdp("convert", tmp_path / "in", tmp_path / "out")
    reader = CheckpointReader(tmp_path / "out")
    assert reader.value("iteration") == 7
    assert f"{OPTIMIZER}.decoder.layers.1.norm.weight.exp_avg" in reader
    mfsdp("convert", tmp_path / "out", tmp_path / "back", "--to", "torch_dist")
    assert "the same" in mfsdp("checkpoint", "compare", tmp_path / "in", tmp_path / "back")
    assert not (tmp_path / "back" / "common.pt").exists()


def test_half_a_matrix_is_an_error(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path / "in")
    writer.add("model.module.decoder.layers.0.mlp.linear_fc1.weight_w", torch.randn(4, 4))
    writer.close()
    with pytest.raises(CheckpointError, match=r"only one half .*weight_w"):
        to_torch_dist(tmp_path / "in", tmp_path / "out")


def test_an_optimizer_stored_by_buckets_is_refused(tmp_path: Path) -> None:
    writer = RanksWriter(tmp_path / "in", 1)
    writer.value(0, "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_state", [1])
    writer.close()
    with pytest.raises(CheckpointError, match="by communication buckets"):
        from_torch_dist.plan_to_fsdp(tmp_path / "in", from_torch_dist.TorchDistOptions())


def test_common_pt_of_a_stranger_runs_nothing(tmp_path: Path) -> None:
    class Malicious:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    write_torch_dist(tmp_path / "in")
    torch.save({"args": Malicious()}, tmp_path / "in" / "common.pt")
    with pytest.raises(CheckpointError, match=r"common.pt holds objects of posix.mkdir"):
        to_fsdp(tmp_path / "in", tmp_path / "out")
    for command in ("inspect", "remove"):
        arguments = [tmp_path / "in", tmp_path / "out"] if command == "remove" else [tmp_path / "in"]
        mfsdp("checkpoint", command, *arguments, status=0 if command == "remove" else 2)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["common.pt", ".metadata", "__1_0.distcp", "__0_0.distcp"])
def test_damaged_files_are_named(tmp_path: Path, name: str) -> None:
    write_torch_dist(tmp_path / "in", tp=2)
    file = tmp_path / "in" / name
    content = file.read_bytes()
    for damaged in (content[: len(content) // 2], content[: len(content) * 9 // 10], b""):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=re.escape(str(file))):
            to_fsdp(tmp_path / "in", tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_changed_byte_in_common_pt_is_noticed(tmp_path: Path) -> None:
    write_torch_dist(tmp_path / "in")
    file = tmp_path / "in" / "common.pt"
    content = bytearray(file.read_bytes())
    content[content.index(b"num_steps")] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"common.pt is damaged .*checksum"):
        to_fsdp(tmp_path / "in", tmp_path / "out")


# -- memory -----------------------------------------------------------------------------------------------------------

MEASURE = """
import sys
from pathlib import Path
from mfsdp_compile.convert import from_torch_dist, huggingface
from mfsdp_compile.convert.to_torch_dist import plan_to_torch_dist

def resident(what="VmRSS"):
    return int(next(x for x in open("/proc/self/status") if x.startswith(what)).split()[1]) * 1024

def plans(folder):
    yield "fsdp", from_torch_dist.plan_to_fsdp(folder / "torch_dist", from_torch_dist.TorchDistOptions())
    yield "back", plan_to_torch_dist(folder / "fsdp", from_torch_dist.TorchDistOptions())
    yield "hf", huggingface.plan_to_huggingface(folder / "fsdp", huggingface.HuggingFaceOptions())
    yield "again", huggingface.plan_from_huggingface(folder / "hf", huggingface.HuggingFaceOptions())

for out, plan in plans(Path(sys.argv[1])):  # what is imported and set up once
    plan.write(Path(sys.argv[1]) / out, lambda n: None)
before = resident()
for out, plan in plans(Path(sys.argv[2])):
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts over
    plan.write(Path(sys.argv[2]) / out, lambda n: None)
    print(out, plan.nbytes, resident("VmHWM") - before)
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux to measure")
def test_memory_is_bounded_by_a_few_tensors(tmp_path: Path) -> None:
    """The peak of converting 96 MiB stays below a few times the largest tensor of one layer, 4 MiB.

    The allocator adds 20.
    """
    for folder, layers, rows in (("small", 1, 8), ("large", 16, 1024)):
        writer = RanksWriter(tmp_path / folder / "torch_dist", 1)
        for name, width in (("linear_fc1", 2), ("linear_fc2", 1)):
            shape = (width * rows, rows)
            chunks = [(0, (i, 0, 0), torch.full((1, *shape), float(i), dtype=torch.bfloat16)) for i in range(layers)]
            writer.tensor(f"decoder.layers.mlp.{name}.weight", (layers, *shape), chunks)
        writer.close()
    command = [sys.executable, "-c", MEASURE, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        _, total, peak = line.split()
        assert int(total) == 96 << 20
        assert int(peak) < 48 << 20, done.stdout


# -- Hugging Face -----------------------------------------------------------------------------------------------------

transformers = pytest.importorskip("transformers")
TOKENS = torch.arange(12).reshape(2, 6)


def save_llama(folder: Path, tied: bool, shard: str = "5GB") -> nn.Module:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer_config.json").write_text("{}")
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(TOKENS).logits
    return result


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_hugging_face_there_and_back(tmp_path: Path, tied: bool, shard: str) -> None:
    model = save_llama(tmp_path / "hf", tied, shard)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 1 or shard == "20KB"
    there = carry_out(
        huggingface.plan_from_huggingface(tmp_path / "hf", huggingface.HuggingFaceOptions()), tmp_path / "fsdp"
    )
    fresh = transformers.LlamaForCausalLM(model.config).eval()
    state = {f"model.module.{name}": torch.zeros_like(value) for name, value in fresh.state_dict().items()}
    dcp.load(state, checkpoint_id=there, no_dist=True)
    fresh.load_state_dict({key.removeprefix("model.module."): value for key, value in state.items()})
    assert torch.equal(logits(fresh), logits(model))
    options = huggingface.HuggingFaceOptions(max_shard_bytes=20_000 if shard == "20KB" else 1 << 30)
    back = carry_out(huggingface.plan_to_huggingface(there, options), tmp_path / "back")
    assert (back / "model.safetensors.index.json").exists() == (shard == "20KB")
    assert (back / "tokenizer_config.json").exists()
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(back, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(loaded.eval()), logits(model))
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    from safetensors import safe_open

    names = [name for file in back.glob("*.safetensors") for name in safe_open(file, "pt").keys()]  # noqa: SIM118
    assert ("lm_head.weight" in names) == (not tied)


def test_single_file_and_dtype(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = save_llama(tmp_path / "hf", tied=False)
    source = tmp_path / "hf" / "model.safetensors"
    there = carry_out(huggingface.plan_from_huggingface(source, huggingface.HuggingFaceOptions()), tmp_path / "fsdp")
    options = huggingface.HuggingFaceOptions(dtype=torch.bfloat16)
    out = carry_out(huggingface.plan_to_huggingface(there, options, single_file=True), tmp_path / "out.safetensors")
    found = load_file(out)
    assert_equal(found, {name: tensor.bfloat16() for name, tensor in model.state_dict().items()})
    there = carry_out(
        huggingface.plan_from_huggingface(tmp_path / "hf", huggingface.HuggingFaceOptions()), tmp_path / "with"
    )
    folder = carry_out(huggingface.plan_to_huggingface(there, options), tmp_path / "folder")
    assert transformers.LlamaForCausalLM.from_pretrained(folder, dtype="auto").dtype == torch.bfloat16


def test_tied_weights_that_differ_are_an_error(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf", tied=True)
    there = carry_out(
        huggingface.plan_from_huggingface(tmp_path / "hf", huggingface.HuggingFaceOptions()), tmp_path / "fsdp"
    )
    writer, reader = CheckpointWriter(tmp_path / "apart"), CheckpointReader(there)
    for key in reader:
        writer.add(key, reader.tensor(key) + ("lm_head" in key))
    writer.close()
    shutil.copytree(there / "huggingface", tmp_path / "apart" / "huggingface")
    with pytest.raises(CheckpointError, match=r"tied, but they differ.*--no-tied"):
        huggingface.plan_to_huggingface(tmp_path / "apart", huggingface.HuggingFaceOptions())
    plan = huggingface.plan_to_huggingface(tmp_path / "apart", huggingface.HuggingFaceOptions(tied=[]))
    assert any("lm_head.weight" in move.target for move in plan.moves)


def test_damaged_safetensors_are_named(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf", tied=False, shard="20KB")
    options = huggingface.HuggingFaceOptions()
    for file in [*(tmp_path / "hf").glob("*.safetensors")][:2]:
        content = file.read_bytes()
        for damaged in (content[:-1], content[:100], b""):
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=file.name):
                huggingface.plan_from_huggingface(tmp_path / "hf", options)
        file.unlink()
        with pytest.raises(CheckpointError, match=f"{file.name} is missing"):
            huggingface.plan_from_huggingface(tmp_path / "hf", options)
        file.write_bytes(content)
    index = tmp_path / "hf" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"index.json is damaged .*outside the folder"):
        huggingface.plan_from_huggingface(tmp_path / "hf", options)


def test_without_safetensors_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path / "hf", tied=False)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(CheckpointError, match=r"pip install 'mfsdp-compile\[models\]'"):
        huggingface.plan_from_huggingface(tmp_path / "hf", huggingface.HuggingFaceOptions())


# -- groups, inspection, editing --------------------------------------------------------------------------------------


def test_map_of_a_model_and_its_optimizer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
    wrapped = torch.nn.ModuleDict({"module": model})
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
    mapped = param_groups.param_to_param_group_map(wrapped, optimizer)
    assert mapped == {f"model.module.{n}": int(n != "0.weight") for n in ("0.weight", "0.bias", "1.weight", "1.bias")}
    param_groups.write_map(mapped, tmp_path / "map.json")
    assert param_groups.read_map(tmp_path / "map.json") == mapped
    with pytest.raises(ValueError, match="bias is in no parameter group"):
        param_groups.param_to_param_group_map(wrapped, torch.optim.SGD(decayed))
    both = param_groups.param_to_param_group_map(wrapped, [torch.optim.SGD(decayed), torch.optim.SGD(others)])
    assert both == mapped


def test_map_that_megatron_dumped(tmp_path: Path) -> None:
    dumped = {"module.module.decoder.norm.weight": 1, "module.module.embedding.weight": torch.tensor(0)}
    dcp.save(dumped, checkpoint_id=tmp_path / "dump", no_dist=True)
    assert "2 parameters in 2 groups" in mfsdp("checkpoint", "param-groups", tmp_path / "dump")
    written = json.loads((tmp_path / "dump" / "param_to_param_group_map.json").read_text())
    assert written == {"model.module.decoder.norm.weight": 1, "model.module.embedding.weight": 0}


def test_inspect_and_print(tmp_path: Path) -> None:
    full = write_torch_dist(tmp_path / "in")
    out = mfsdp("checkpoint", "inspect", tmp_path / "in")
    assert "common.pt: iteration = 5" in out
    assert f"decoder.layers.mlp.linear_fc1.weight  [{LAYERS}, {2 * FFN}, {HIDDEN}] bfloat16" in out
    assert "nd_reformulated_orig_global_shape" in out
    assert "rng_state/shard_0_1  (not a tensor)" in out
    (tmp_path / "in" / "common.pt").unlink()
    (tmp_path / "in" / "metadata.json").unlink()
    assert "embedding" not in mfsdp("checkpoint", "inspect", tmp_path / "in", "--keys", "^decoder")
    key = "decoder.layers.mlp.linear_fc2.weight"
    assert repr(full[key][1, :2]) in mfsdp("checkpoint", "print", tmp_path / "in", key, "1, :2")
    assert repr(full[key][-1, 0, 3]) in mfsdp("checkpoint", "print", tmp_path / "in", key, "-1, 0, 3")
    assert "[7]" in mfsdp("checkpoint", "print", tmp_path / "in", "dataset/consumed")
    assert "It has: decoder" in mfsdp("checkpoint", "print", tmp_path / "in", "fc2", status=2)
    assert "there is no part 9" in mfsdp("checkpoint", "print", tmp_path / "in", key, "9", status=2)
    assert "is not a slice" in mfsdp("checkpoint", "print", tmp_path / "in", key, "1, x", status=2)
    assert "not a regular expression" in mfsdp("checkpoint", "inspect", tmp_path / "in", "--keys", "(", status=2)


def test_compare(tmp_path: Path) -> None:
    def save(name: str, **values: Any) -> Path:
        writer = CheckpointWriter(tmp_path / name)
        for key, value in values.items():
            writer.add_value(key, value)
        writer.close()
        return tmp_path / name

    base = {"same": torch.ones(2), "nan": torch.tensor([float("nan")]), "inf": torch.tensor([float("inf")]), "n": 1}
    first = save("a", **base, moved=torch.zeros(3), shape=torch.ones(2), dtype=torch.ones(2), gone=1, step=3)
    second = save(
        "b", **base, moved=torch.tensor([0, 0.25, 0]), shape=torch.ones(3), dtype=torch.ones(2).half(), new=1, step=4
    )
    out = mfsdp("checkpoint", "compare", first, second, status=1)
    assert out.splitlines() == [
        f"gone: only in {first}",
        f"new: only in {second}",
        "dtype: torch.float32 and torch.float16",
        "moved: 1 of 3 elements differ, by at most 0.25",
        "shape: shapes [2] and [3]",
        "step: 3 and 4",
        "6 differences",
    ]
    assert "the same" in mfsdp("checkpoint", "compare", first, first)
    # The difference is a power of two, so it is exactly the bound from which on it does not count.
    for atol, moved in ((0.25, 0), (0.25 - 2**-20, 1)):
        assert len([line for line in inspect_checkpoint.compare(first, second, atol=atol) if "moved" in line]) == moved


@pytest.mark.long
def test_rename_and_remove_copy_the_data(tmp_path: Path) -> None:
    write_torch_dist(tmp_path / "in", tp=2)
    before = tensors_of(tmp_path / "in")
    mfsdp("checkpoint", "rename", tmp_path / "in", tmp_path / "renamed", r"^decoder\.", "encoder.", "qkv", "abc")
    after = tensors_of(tmp_path / "renamed")
    assert_equal(
        after,
        {
            re.sub("^decoder", "encoder", k) if k[:7] == "decoder" else k.replace("qkv", "abc"): v
            for k, v in before.items()
        },
    )
    assert (tmp_path / "renamed" / "common.pt").exists()
    assert CheckpointReader(tmp_path / "renamed").metadata.mcore_data  # type: ignore[attr-defined]
    out = mfsdp("checkpoint", "remove", tmp_path / "in", tmp_path / "removed", r"^optimizer\.", "^rng")
    assert re.search(r"left out: optimizer\.state\.\S+ and 27 more: removed", out)
    assert_equal(tensors_of(tmp_path / "removed"), {k: v for k, v in before.items() if not k.startswith("optimizer")})
    mfsdp("checkpoint", "remove", tmp_path / "in", tmp_path / "all")  # without a pattern nothing is removed
    assert "the same" in mfsdp("checkpoint", "compare", tmp_path / "in", tmp_path / "all")
    assert "has no key" in mfsdp(
        "checkpoint", "remove", tmp_path / "in", tmp_path / "none", "nothing_like_it", status=2
    )
    clash = mfsdp("checkpoint", "rename", tmp_path / "in", tmp_path / "none", "exp_avg_sq", "exp_avg", status=2)
    assert "would both be named" in clash
    assert not (tmp_path / "none").exists()


def test_nested_dictionaries_stay_nested(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(2)}, "step": 3}, checkpoint_id=tmp_path / "in", no_dist=True)
    mfsdp("checkpoint", "remove", tmp_path / "in", tmp_path / "out", "step")
    dcp.format_utils.dcp_to_torch_save(tmp_path / "out", tmp_path / "saved.pt")
    assert torch.load(tmp_path / "saved.pt")["model"]["w"].tolist() == [1, 1]


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_convert_on_the_command_line(tmp_path: Path) -> None:
    write_torch_dist(tmp_path / "in")
    dry = mfsdp("convert", tmp_path / "in", tmp_path / "out", "--dry-run")
    assert (
        "decoder.layers.mlp.linear_fc1.weight[2] second half -> model.module.decoder.layers.2.mlp.linear_fc1.weight_v  "
        f"[{FFN}, {HIDDEN}] bfloat16" in dry
    )
    assert "rng_state/shard_0_1 -> left out" in dry
    assert not (tmp_path / "out").exists()
    mfsdp("convert", tmp_path / "in", tmp_path / "out")
    assert "exists" in mfsdp("convert", tmp_path / "in", tmp_path / "out", status=2)
    mfsdp("convert", tmp_path / "in", tmp_path / "out", "--overwrite")
    assert "is fsdp_dtensor already" in mfsdp("convert", tmp_path / "out", tmp_path / "back", status=2)
    mfsdp("convert", tmp_path / "out", tmp_path / "back", "--to", "torch_dist")
    rest = mfsdp("checkpoint", "compare", tmp_path / "in", tmp_path / "back", status=1).splitlines()
    assert all("only in" in line or "._extra_state" in line for line in rest[:-1])
    assert "4 differences" in rest
    assert "is inside the other" in mfsdp("convert", tmp_path / "in", tmp_path / "in" / "out", status=2)
    assert "does not exist" in mfsdp("convert", tmp_path / "no", tmp_path / "x", status=2)
    assert "Bridge" in mfsdp("convert", tmp_path / "in", tmp_path / "x.safetensors", status=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "in", "out"]


def test_convert_hugging_face_on_the_command_line(tmp_path: Path) -> None:
    model = save_llama(tmp_path / "hf", tied=True)
    dry = mfsdp("convert", tmp_path / "hf", tmp_path / "fsdp", "--dry-run")
    assert "model.embed_tokens.weight (tied) -> model.module.lm_head.weight" in dry
    mfsdp("convert", tmp_path / "hf", tmp_path / "fsdp")
    arguments = ["--to", "huggingface", "--max-shard-size", "20KB"]
    mfsdp("convert", tmp_path / "fsdp", tmp_path / "back", *arguments)
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "back").eval()
    assert torch.equal(logits(loaded), logits(model))
    mfsdp("convert", tmp_path / "fsdp", tmp_path / "one.safetensors", "--dtype", "bfloat16")
    tie = mfsdp("convert", tmp_path / "hf", tmp_path / "x", "--tie", "lm_head.weight=other.weight", status=2)
    assert "has no other.weight" in tie
    assert "not a floating-point dtype" in mfsdp("convert", "a", "b", "--dtype", "int8", status=2)
    other = mfsdp("convert", tmp_path / "fsdp", tmp_path / "x.safetensors", "--model-prefix", "other", status=2)
    assert "no tensor that begins with 'other'" in other


@pytest.mark.long
@pytest.mark.slow
def test_the_command_in_a_process_of_its_own(tmp_path: Path) -> None:
    """The command needs no process group and no GPU and prints no traceback.

    It reports a foreign pickle and does not run it.
    """
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / ".metadata").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    write_torch_dist(tmp_path / "good")

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "mfsdp_compile.cli", *map(str, arguments)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, env=environment)

    done = run("convert", tmp_path / "in", tmp_path / "out", "--to", "torch_dist")
    assert done.returncode == 2
    assert done.stderr.startswith(f"mfsdp: {tmp_path / 'in' / '.metadata'} asks for the class os.system")
    assert done.stderr.count("\n") == 1
    done = run("convert", tmp_path / "good", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "out ━" in done.stderr  # the progress bar
    assert "left out: rng_state/shard_0_1" in done.stdout
    done = run("convert", tmp_path / "good", tmp_path / "out")
    assert (done.returncode, done.stderr) == (
        2,
        f"mfsdp: {tmp_path / 'out'} already exists. Choose another name, or pass --overwrite to replace it.\n",
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "in", "out"]
