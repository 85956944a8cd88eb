"""Folders for ``from_pretrained``, saved from sharded models and loaded into them."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity import AOT_EAGER, raises_everywhere
from pool import on_ranks
from test_accelerate import FAMILIES
from torch import Tensor, nn

import mfsdp_compile
from mfsdp_compile import fsdp2, fully_shard_model
from mfsdp_compile.checkpoint import CheckpointError, full_state_dict
from mfsdp_compile.convert.safetensors_files import SafetensorsReader

transformers = pytest.importorskip("transformers", minversion="5")


class Words:
    """A tokenizer of one file."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def save_pretrained(self, folder: Path) -> None:
        if self.fails:
            raise OSError("no space left for words")
        (folder / "words.json").write_text("{}")


class Plain(nn.Module):
    """A module that transformers does not know, with a buffer and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def by_wrapper(model: nn.Module) -> Any:
    return fully_shard_model(model, fsdp_unit_modules="auto", zero_dp_strategy="optim")


def by_compiler(model: nn.Module) -> Any:
    sharded = fully_shard_model(model, fsdp_unit_modules="auto")
    return torch.compile(sharded, backend="mfsdp", options={"inner": AOT_EAGER})


def by_fsdp2(model: nn.Module) -> Any:
    for block in model.model.layers:
        fsdp2.fully_shard(block)
    return fsdp2.fully_shard(model)


def by_fsdp2_in_part(model: nn.Module) -> Any:
    """Return a model of which most is in two sharded models, and the rest in none."""
    for block in model.model.layers:
        fsdp2.fully_shard(block)
    return model


FACES: dict[str, Callable[[nn.Module], Any]] = {
    "wrapper": by_wrapper,
    "compiled": by_compiler,
    "fsdp2": by_fsdp2,
    "fsdp2 in part": by_fsdp2_in_part,
}


def llama(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return FAMILIES["llama"]()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def nothing_left_beside(folder: Path) -> bool:
    return not [path.name for path in folder.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("face", FACES)
@on_ranks(2)
def test_what_is_saved_is_loaded(face: str, tmp_path: Path) -> None:
    """``from_pretrained`` and ``load_pretrained`` have the bits that were saved, from and into any face."""
    alone, model = llama().eval(), FACES[face](llama())
    folder = mfsdp_compile.save_pretrained(model, tmp_path / "a", tokenizer=Words(), max_shard_bytes=20_000)
    assert folder == tmp_path / "a"
    assert {"config.json", "generation_config.json", "words.json", "model.safetensors.index.json"} <= {
        path.name for path in folder.iterdir()
    }
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(loaded(tokens).logits, alone(tokens).logits)
    assert_same(loaded.state_dict(), alone.state_dict())
    other = FACES[face](llama(1))
    if face != "compiled":
        other(input_ids=tokens)  # what it gathers is stale after the load
    assert mfsdp_compile.load_pretrained(other, folder) == ((), ())
    assert_same(full_state_dict(other, rank=None), alone.state_dict())
    if face != "compiled":
        torch.testing.assert_close(other(input_ids=tokens).logits, alone(tokens).logits)
    dist.barrier()
    assert nothing_left_beside(folder)


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(2)
def test_families(family: str, streams: bool, tmp_path: Path) -> None:
    """Tied weights, buffers and stacked experts. Files have the dtype from before sharding, or another one."""
    torch.manual_seed(0)
    alone = FAMILIES[family]().to(torch.bfloat16)
    expected = {name: value.float() for name, value in alone.state_dict().items()}
    model = fully_shard_model(alone, fsdp_unit_modules="auto")
    with mock.patch("mfsdp_compile.pretrained.can_stream", return_value=streams):
        for dtype in (torch.float32, None):  # the second replaces the first
            folder = mfsdp_compile.save_pretrained(model, tmp_path / "a", dtype=dtype)
            written = dtype or torch.bfloat16
            assert json.loads((folder / "config.json").read_text())["dtype"] == str(written).removeprefix("torch.")
            loaded = type(alone).__mro__[2].from_pretrained(folder)
            assert {value.dtype for value in loaded.parameters()} == {written}
            assert_same({name: value.float() for name, value in loaded.state_dict().items()}, expected)
            dist.barrier()
    torch.manual_seed(1)
    other = fully_shard_model(FAMILIES[family](), fsdp_unit_modules="auto")
    assert mfsdp_compile.load_pretrained(other, folder) == ((), ())
    assert_same(full_state_dict(other, rank=None), expected)


@on_ranks(1, 2)
def test_other_modules_have_weights_only(tmp_path: Path) -> None:
    torch.manual_seed(0)
    alone = Plain()
    expected = {name: value.clone() for name, value in alone.state_dict().items()}
    model = fully_shard_model(alone, fsdp_unit_modules=[nn.Linear])
    model(torch.randn(4, 6))  # changes buffers
    folder = mfsdp_compile.save_pretrained(model, tmp_path / "plain")
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    torch.manual_seed(1)
    other = fully_shard_model(Plain(), fsdp_unit_modules=[nn.Linear])
    mfsdp_compile.load_pretrained(other, folder)
    found = full_state_dict(other, rank=None)
    assert_same(found, full_state_dict(model, rank=None) | {"last.weight": expected["first.weight"]})
    assert found["norm.num_batches_tracked"] == 1
    # A module around a transformers model is not one of transformers, a module inside is one.
    pair = nn.ModuleDict({"policy": FAMILIES["mixtral"](), "value": nn.Linear(3, 3)})
    before = {name: value.clone() for name, value in pair.state_dict().items()}
    sharded = fully_shard_model(pair, fsdp_unit_modules="auto")
    whole = mfsdp_compile.save_pretrained(sharded, tmp_path / "pair")
    inner = mfsdp_compile.save_pretrained(sharded.module["policy"], tmp_path / "inner")
    assert not (whole / "config.json").exists()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(inner)
    assert_same(
        {f"policy.{name}": v for name, v in loaded.state_dict().items()}
        | {name: value for name, value in before.items() if name.startswith("value")},
        before,
    )
    for folder, module in ((whole, sharded), (inner, sharded.module["policy"])):
        with torch.no_grad():
            for param in sharded.parameters():
                param.zero_()
        mfsdp_compile.load_pretrained(module, folder)
        found = full_state_dict(module, rank=None)
        assert_same(
            {name if module is sharded else f"policy.{name}": v for name, v in found.items()},
            {name: v for name, v in before.items() if module is sharded or name.startswith("policy")},
        )


@pytest.mark.parametrize("is_meta", [False, True])
@on_ranks(2)
def test_models_without_values(is_meta: bool, tmp_path: Path) -> None:
    """A model of ``fsdp2`` from the meta device gets its weights, and buffers that no file has."""
    alone = llama().eval()
    folder = mfsdp_compile.save_pretrained(fully_shard_model(llama(), fsdp_unit_modules="auto"), tmp_path / "a")
    with torch.device("meta" if is_meta else "cpu"):
        model = by_fsdp2(llama(1)).eval()
    mfsdp_compile.load_pretrained(model, folder)
    with torch.device("meta"):
        part = by_fsdp2_in_part(llama(1))
    with raises_everywhere(CheckpointError, "load_pretrained: model.embed_tokens.weight is on the meta device"):
        mfsdp_compile.load_pretrained(part, folder)
    tokens = torch.arange(12).view(2, 6)
    torch.testing.assert_close(model(input_ids=tokens).logits, alone(tokens).logits)


@on_ranks(2, timeout=60)
def test_saves_that_fail(tmp_path: Path) -> None:
    """If one rank fails, all raise, and the earlier folder is as it was.

    A save replaces weights, and keeps other files.
    """
    model, folder = fully_shard_model(llama(), fsdp_unit_modules="auto"), tmp_path / "a"
    mfsdp_compile.save_pretrained(model, folder, max_shard_bytes=20_000)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    with raises_everywhere((OSError, RuntimeError), "no space left for words"):
        mfsdp_compile.save_pretrained(model, folder, processing_class=Words(fails=True))
    dtype = torch.int8 if dist.get_rank() == 1 else None
    with raises_everywhere((TypeError, RuntimeError), "floating-point dtype, got torch.int8"):
        mfsdp_compile.save_pretrained(model, folder, dtype=dtype)
    dist.barrier()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert nothing_left_beside(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "README.md").write_text("mine")
        folder.rename(tmp_path / ".replaced-a")  # a save died between its two renames
        (tmp_path / ".saving-a").mkdir()
        (tmp_path / ".saving-a" / "half").touch()
    dist.barrier()
    with raises_everywhere((OSError, RuntimeError), "no space left for words"):
        mfsdp_compile.save_pretrained(model, folder, processing_class=Words(fails=True))
    assert {path.name for path in folder.iterdir()} == {*before, "README.md"}
    mfsdp_compile.save_pretrained(model, folder)
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
    }
    assert nothing_left_beside(folder)
    file = tmp_path / "file"
    file.touch()
    with raises_everywhere((OSError, RuntimeError), "is not a folder"):
        mfsdp_compile.save_pretrained(model, file)
    with raises_everywhere(TypeError, "save_pretrained takes a sharded model", "Linear"):
        mfsdp_compile.save_pretrained(nn.Linear(2, 2), folder)


@on_ranks(2, timeout=60)
def test_loads_that_fail(tmp_path: Path) -> None:
    """If a folder does not match on one rank, all raise, and nothing has changed."""
    folder = mfsdp_compile.save_pretrained(fully_shard_model(llama(), fsdp_unit_modules="auto"), tmp_path / "a")
    rank, config = (
        dist.get_rank(),
        transformers.LlamaConfig(**FAMILIES["llama"]().config.to_dict() | {"num_hidden_layers": 3}),
    )
    large = fully_shard_model(transformers.LlamaForCausalLM(config), fsdp_unit_modules="auto")
    before = full_state_dict(large, rank=None)
    with raises_everywhere(CheckpointError, "missing: model.layers.2.", "then unchanged"):
        mfsdp_compile.load_pretrained(large, folder)
    model = fully_shard_model(llama(1), fsdp_unit_modules="auto")
    with raises_everywhere((CheckpointError, RuntimeError), "nowhere"):
        mfsdp_compile.load_pretrained(model, folder if rank == 0 else tmp_path / "nowhere")
    assert_same(full_state_dict(model, rank=None), llama(1).state_dict())
    assert_same(full_state_dict(large, rank=None), before)
    missing, unexpected = mfsdp_compile.load_pretrained(large, folder, allow_missing="model.layers.2.*")
    assert {name.split(".")[2] for name in missing} == {"2"}
    assert not unexpected
    after = full_state_dict(large, rank=None)
    assert_same({name: after[name] for name in missing}, {name: before[name] for name in missing})
    experts = transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**llama().config.to_dict(), num_local_experts=2)
    )
    with raises_everywhere(CheckpointError, "unexpected", "mlp"):
        mfsdp_compile.load_pretrained(fully_shard_model(experts, fsdp_unit_modules="auto"), folder)


@pytest.mark.parametrize("face", ["wrapper", "fsdp2"])
@on_ranks(2, timeout=60)
def test_the_own_method_writes_no_shards(face: str, tmp_path: Path) -> None:
    """``model.save_pretrained`` says what to call instead; it works with whole weights."""
    model = FACES[face](llama())
    folder, is_first = tmp_path / "own", dist.get_rank() == 0  # transformers writes on rank 0 only
    for each in (model, model.model):
        with pytest.raises(RuntimeError, match=r"mfsdp_compile\.save_pretrained\(model, folder\) on all ranks"):
            each.save_pretrained(folder)
    with pytest.raises(RuntimeError, match=r"LlamaForCausalLM\.save_pretrained would"):
        model.save_pretrained(folder, state_dict=model.state_dict())
    assert not folder.exists()
    dist.barrier()
    expected = llama().state_dict()
    model.save_pretrained(folder, state_dict=full_state_dict(model, rank=None))
    if is_first:
        assert_same(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict(), expected)
    if face == "wrapper":
        with model.summon_full_params():
            model.save_pretrained(folder)
        if is_first:
            assert_same(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict(), expected)


@pytest.mark.usefixtures("fake_world")
def test_a_rank_reads_what_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    for method in ("tensor", "part"):
        original = getattr(SafetensorsReader, method)

        def counted(*args: Any, original: Any = original) -> Tensor:
            read.append(original(*args))
            return read[-1]

        monkeypatch.setattr(SafetensorsReader, method, counted)
    FAMILIES["mixtral"]().save_pretrained(tmp_path)
    model = fully_shard_model(FAMILIES["mixtral"](), fsdp_unit_modules="auto")
    assert mfsdp_compile.load_pretrained(model, tmp_path) == ((), ())
    assert sum(tensor.nbytes for tensor in read) == sum(param.to_local().nbytes for param in model.parameters())


@pytest.mark.usefixtures("fake_world")
def test_the_guard_is_copied_and_keeps_no_model_alive() -> None:
    model = by_wrapper(llama())
    copied = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"mfsdp_compile\.save_pretrained"):
        copied.save_pretrained("nowhere")
    gone = weakref.ref(model.module)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
