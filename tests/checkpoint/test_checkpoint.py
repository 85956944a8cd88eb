"""Checkpoints: saved anywhere, loaded anywhere, complete or absent, and safe to load."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import os
import pickle
import random
import resource
import shutil
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zoo
from parity import raises_everywhere
from pool import Pools, on_ranks, shared_folder
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.testing import assert_close

import mfsdp_compile.checkpoint.folder as folder_module
from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import CheckpointError, Checkpoints, full_optimizer_state_dict, full_state_dict, load
from mfsdp_compile.checkpoint.dcp_metadata import load_metadata
from mfsdp_compile.checkpoint.manifest import read_manifest
from mfsdp_compile.checkpoint.saving import PublishingWriter
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.diagnostics.measure import collectives
from mfsdp_compile.runtime.memory.tensor import RowShardedTensor

BATCH = 12  # samples per step, over all ranks


class Model(nn.Module):
    """Uneven sizes, tied and frozen parameters, buffers, and a 0-d parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 13)
        self.blocks = nn.ModuleList(zoo.Block(13) for _ in range(3))
        self.norm = nn.BatchNorm1d(13)
        self.head = nn.Linear(13, 13, bias=False)
        self.again = nn.Linear(13, 13, bias=False)
        self.again.weight = self.head.weight
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.blocks[1].up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return (self.again(torch.tanh(self.head(x))) * self.scale).pow(2).mean()


def make(strategy: str = "optim_grads_params", seed: int = 0, **arguments: Any) -> tuple[Any, Any]:
    model = fully_shard_model(
        parity.build(Model, seed), fsdp_unit_modules=[zoo.Block], **mesh_arguments(strategy), **arguments
    )
    return model, fully_shard_optimizer(torch.optim.AdamW(groups_of(model), lr=0.01))


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trainable = [param for param in model.parameters() if param.requires_grad]
    matrices = [param for param in trainable if param.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.1, "lr": 0.02},
        {"params": [param for param in trainable if param.ndim <= 1]},
    ]


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    """Train on the same batches at every number of ranks. Returns the mean loss of each step."""
    losses = []
    for step in steps:
        batch = torch.randn(BATCH, 8, generator=torch.Generator().manual_seed(step))
        loss = model(batch.chunk(dist.get_world_size())[dist.get_rank()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append((mean / dist.get_world_size()).item())
    return losses


def whole(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return everything as NumPy arrays, which can be sent between processes; on the first rank."""
    weights = full_state_dict(model)
    state = full_optimizer_state_dict(optimizer)
    arrays = {name: value.numpy() for name, value in weights.items()}
    for name, held in state.get("state", {}).items():
        arrays.update({f"{name}.{key}": np.asarray(value) for key, value in held.items()})
    for i, group in enumerate(state.get("param_groups", [])):
        arrays[f"group {i}"] = np.asarray([group["lr"], group["weight_decay"]])
    return arrays


def assert_same(mine: Mapping[str, Any], its: Mapping[str, Any]) -> None:
    assert mine.keys() == its.keys()
    for name, value in mine.items():
        assert value.dtype == its[name].dtype, name
        assert np.array_equal(value, its[name]), name


# -- any number of ranks, any strategy --------------------------------------------------------------------------------


def train_and_save(root: str, strategy: str) -> tuple[dict[str, Any], list[float]]:
    model, optimizer = make(strategy)
    train(model, optimizer, range(5))
    Checkpoints(root).save(5, model, optimizer, extra={"data": 5})
    return whole(model, optimizer), train(model, optimizer, range(5, 7))


def resume(root: str, strategy: str) -> tuple[dict[str, Any], list[float]]:
    model, optimizer = make(strategy, seed=9)
    if strategy == "optim":  # residents that are already gathered must be gathered again
        with torch.no_grad():
            model(torch.randn(4, 8))
    restored = Checkpoints(root).load(model, optimizer)
    assert restored.step == 5
    assert restored.extra == {"data": 5}
    assert restored.generators == (dist.get_world_size() == 4)
    return whole(model, optimizer), train(model, optimizer, range(5, 7))


SAVED_BY = ("optim_grads_params", "HFSDP", "HSDP optim_grads", "no_shard")
LOADED_BY = {
    1: ("optim_grads_params", "no_shard"),
    2: ("optim", "HSDP optim"),
    3: ("optim_grads", "optim_grads_params"),
    4: ("optim_grads_params", "HFSDP", "HFSDP optim", "HSDP optim_grads", "no_shard"),
}


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("strategy", "loaded_by"),
    [
        pytest.param("HFSDP", {1: ("no_shard",), 2: ("optim",), 3: ("optim_grads_params",), 4: ("HFSDP",)}, id="HFSDP"),
        *(pytest.param(name, LOADED_BY, id=f"{name} by all") for name in SAVED_BY),
    ],
)
def test_saved_at_four_ranks_loaded_at_any_number(
    strategy: str, loaded_by: dict[int, tuple[str, ...]], pools: Pools, tmp_path: Path
) -> None:
    root = str(tmp_path)
    there, losses = pools.of(4).run(train_and_save, root=root, strategy=strategy)[0]
    for world_size, strategies in loaded_by.items():
        for other in strategies:
            here, continued = pools.of(world_size).run(resume, root=root, strategy=other)[0]
            assert_same(here, there)
            if world_size == 4 and other == strategy:
                assert continued == losses
            else:
                # Sums over ranks in another order, without BatchNorm: the rounding of float32, once or twice.
                np.testing.assert_allclose(continued, losses, rtol=2e-6)


@pytest.mark.long
@on_ranks(4)
def test_another_precision() -> None:
    """A bfloat16 checkpoint loads into float32 with ``allow_cast``, and back bit by bit."""
    root = shared_folder()
    bf16 = MixedPrecisionPolicy(main_params_dtype=torch.bfloat16)
    model, optimizer = make(mixed_precision_policy=bf16)
    train(model, optimizer, range(2))
    Checkpoints(root).save(2, model, optimizer)
    other, its_optimizer = make("HFSDP", seed=3)
    with raises_everywhere(CheckpointError, "another dtype (allow_cast)", "model.enter.weight (torch.bfloat16 there"):
        Checkpoints(root).load(other, its_optimizer)
    assert torch.equal(next(iter(other.parameters())).full_tensor(), parity.build(Model, 3).scale.detach())
    restored = Checkpoints(root).load(other, its_optimizer, allow_cast="*")
    assert "model.enter.weight" in restored.cast
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert its.dtype == torch.float32
        assert torch.equal(mine.full_tensor().float(), its.full_tensor())
    Checkpoints(root).save(3, other, its_optimizer)
    again, its_optimizer = make(seed=4, mixed_precision_policy=bf16)
    Checkpoints(root).load(again, its_optimizer, allow_cast=["model.*", "optimizer.*"])
    for mine, its in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), its.full_tensor())


# -- state dicts ------------------------------------------------------------------------------------------------------


def test_state_dicts_with_and_without_the_prefix(fake_world: int) -> None:
    """The wrapper takes the keys of either module, so that scripts need not strip ``module.``."""
    model = fully_shard_model(nn.Sequential(nn.Linear(8, 8)), fsdp_unit_modules=[nn.Linear])
    for state in (model.state_dict(), model.module.state_dict()):
        given = {key: value.clone() for key, value in state.items()}
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        assert str(model.load_state_dict(given)) == "<All keys matched successfully>"
        assert all(torch.equal(value.to_local(), given[key].to_local()) for key, value in state.items())
    with pytest.raises(RuntimeError, match=r"Missing key.*0.bias"):
        model.load_state_dict({"0.weight": given["0.weight"]})


@on_ranks(2)
def test_state_dicts_communicate_nothing() -> None:
    for strategy in ("optim_grads_params", "optim"):
        model, optimizer = make(strategy)
        train(model, optimizer, range(1))
        taken: list[Any] = []
        counts = collectives(lambda m=model, o=optimizer: taken.extend((m.state_dict(), o.state_dict())))
        assert not sum(counts.values())
        weights, state = taken
        assert set(state["state"]) == {name for name, p in model.named_parameters() if p.requires_grad}
        assert all(isinstance(weights[name], RowShardedTensor) for name, _ in model.named_parameters())
        assert [len(group["params"]) for group in state["param_groups"]] == [
            len(group["params"]) for group in optimizer.param_groups
        ]


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy", ["optim_grads_params", "optim", "no_shard", "HSDP optim_grads_params", "HFSDP", "HFSDP optim_grads"]
)
@on_ranks(4)
def test_helpers_of_torch(strategy: str) -> None:
    model, optimizer = make(strategy)
    train(model, optimizer, range(2))
    expected = whole(model, optimizer)
    for full, offload, broadcast in [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 1)]:
        options = StateDictOptions(full_state_dict=bool(full), cpu_offload=bool(offload))
        weights = get_model_state_dict(model, options=options)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        if full and (not offload or dist.get_rank() == 0):
            assert not any(isinstance(value, RowShardedTensor) for value in weights.values())
        options = StateDictOptions(full_state_dict=bool(full), broadcast_from_rank0=bool(broadcast))
        other, its_optimizer = make(strategy, seed=5)
        set_model_state_dict(other, copy.deepcopy(weights), options=options)
        set_optimizer_state_dict(other, its_optimizer, copy.deepcopy(state), options=options)
        assert_same(whole(other, its_optimizer), expected)
        train(other, its_optimizer, range(1))  # the loaded state must allow further training


def _grown(state: dict[str, Any], name: str) -> None:
    state[name] = torch.cat([state[name].view(-1, *state[name].shape[1:])] * 2)


UNFIT = {
    "another shape": (
        lambda state: _grown(state, "head.weight"),
        "head.weight has shape (26, 13) there, (13, 13) here",
    ),
    "a buffer of another shape": (lambda state: _grown(state, "norm.running_mean"), "running_mean has shape (26,)"),
    "missing": (lambda state: state.pop("blocks.2.up.weight"), "blocks.2.up.weight is missing there"),
    "unexpected": (lambda state: state.update(other=torch.ones(2)), "other is unknown here"),
}


@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2)
def test_what_rank_0_broadcasts_is_compared_first(compiled: bool) -> None:
    """A state dict that does not fit is an error on all ranks, and changes no parameter, buffer or state."""
    model, optimizer = make()
    train(model, optimizer, range(1))
    module = torch.compile(model.module, backend="mfsdp") if compiled else model.module
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    before, state_before = full_state_dict(model, rank=None), full_optimizer_state_dict(optimizer, rank=None)
    is_first = dist.get_rank() == 0
    for kind, (spoil, message) in UNFIT.items():
        if kind == "missing" and compiled:  # rank 0 looks for names without _orig_mod, and raises before it broadcasts
            continue
        state = {name: torch.full_like(value, 7) for name, value in before.items()} if is_first else {}
        if is_first:
            spoil(state)
        with raises_everywhere(RuntimeError, message, "Nothing was loaded"):
            set_model_state_dict(module, state, options=options)
        assert_close(full_state_dict(model, rank=None), before, rtol=0, atol=0)
    state = get_optimizer_state_dict(model.module, optimizer, options=StateDictOptions(full_state_dict=True))
    for held in state["state"].values():
        held["exp_avg"].fill_(7)
    _grown(state["state"]["scale"], "exp_avg_sq")
    with raises_everywhere(RuntimeError, "state.scale.exp_avg_sq has shape (2,) there, () here"):
        set_optimizer_state_dict(model.module, optimizer, state if is_first else {}, options=options)
    after = full_optimizer_state_dict(optimizer, rank=None)
    assert_close(after["state"], state_before["state"], rtol=0, atol=0)


@on_ranks(2)
def test_full_state_dict_on_one_rank() -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    weights, state = full_state_dict(model, rank=1), full_optimizer_state_dict(optimizer, rank=1)
    if dist.get_rank() == 0:
        assert weights == {}
        assert state == {}
    else:
        alone = parity.build(Model, 7)
        alone.load_state_dict(weights)  # strict: every name exists
        assert weights["head.weight"] is weights["again.weight"]
        assert alone.scale.item() == weights["scale"].item()
    everywhere, its_state = full_state_dict(model, rank=None), full_optimizer_state_dict(optimizer, rank=None)
    other, its_optimizer = make("optim", seed=3)
    other.module.load_state_dict(everywhere)
    its_optimizer.load_state_dict(its_state)
    assert_same(whole(other, its_optimizer), whole(model, optimizer))


@on_ranks(2)
def test_optimizer_state_by_name() -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    state = copy.deepcopy(optimizer.state_dict())
    # Parameter groups in another order, and the parameters in them too.
    other, _ = make(seed=3)
    params = dict(other.named_parameters())
    names = [group["params"] for group in state["param_groups"]]
    turned = fully_shard_optimizer(
        torch.optim.AdamW([{"params": [params[n] for n in reversed(g)]} for g in names[::-1]])
    )
    turned.load_state_dict(state)
    assert [group["lr"] for group in turned.param_groups] == [0.01, 0.02]
    for name, param in model.named_parameters():
        if param.requires_grad and param in optimizer.state:  # forward does not use the BatchNorm's parameters
            its = turned.state[params[name]]["exp_avg"]
            assert torch.equal(its.full_tensor(), optimizer.state[param]["exp_avg"].full_tensor())
    broken = copy.deepcopy(state)
    broken["state"]["module.ghost"] = {}
    broken["param_groups"][1]["params"].remove("module.scale")
    with raises_everywhere(ValueError, "missing are 'module.scale'", "'module.ghost'"):
        turned.load_state_dict(broken)
    one = fully_shard_optimizer(torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))
    with raises_everywhere(ValueError, "were in the groups [0, 1]"):
        one.load_state_dict(state)
    numbered = fully_shard_optimizer(torch.optim.AdamW(other.parameters()), preproc_state_dict_for_dcp_ckpt=False)
    assert numbered.state_dict()["param_groups"][0]["params"][0] == 0


@pytest.mark.long
@on_ranks(2)
def test_a_compiled_model() -> None:
    root = shared_folder()
    model, optimizer = make()
    call = torch.compile(model, backend="mfsdp", options={"inner": parity.AOT_EAGER})
    train(call, optimizer, range(1))
    path = Checkpoints(root).save(1, call, optimizer)
    assert "model.module.enter.weight" in load_metadata(path / ".metadata").state_dict_metadata
    other, its_optimizer = make(seed=3)
    its_call = torch.compile(other, backend="mfsdp", options={"inner": parity.AOT_EAGER})
    Checkpoints(root).load(its_call, its_optimizer)
    assert_same(whole(other, its_optimizer), whole(call, optimizer))
    assert train(its_call, its_optimizer, range(1, 3)) == train(call, optimizer, range(1, 3))
    with raises_everywhere(TypeError, "takes the model that fully_shard_model returned", "Model"):
        Checkpoints(root).save(2, model.module)


# -- checkpoints of others --------------------------------------------------------------------------------------------


@on_ranks(2)
def test_from_and_to_fsdp2_and_ddp() -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    def adam(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.01)

    def ours(seed: int) -> tuple[Any, Any]:
        model = fully_shard_model(parity.build(Model, seed), fsdp_unit_modules=[zoo.Block])
        return model, fully_shard_optimizer(adam(model))

    def theirs(kind: str, seed: int) -> tuple[Any, Any]:
        module: nn.Module = parity.build(Model, seed)
        module.scale = nn.Parameter(module.scale.detach().reshape(1))  # FSDP2 does not support 0-d parameters
        if kind == "FSDP2":
            for block in module.blocks:
                fully_shard(block)
            fully_shard(module)
        else:
            module = DistributedDataParallel(module, find_unused_parameters=True)
        return module, adam(module)

    for kind in ("FSDP2", "DDP"):
        its, its_optimizer = theirs(kind, 1)
        train(its, its_optimizer, range(2))
        weights, state = get_state_dict(its, its_optimizer)
        folder = shared_folder()
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
        model, optimizer = ours(2)
        with raises_everywhere(CheckpointError, "another shape", "model.scale ((1,) there, () here)"):
            load(folder, model, optimizer)
        # There, a parameter that had no gradient has no state.
        allowed = {"allow_reshaped": ["*.scale", "*.scale.*"], "allow_missing": "optimizer.norm.*"}
        restored = load(folder, model, optimizer, **allowed)
        assert restored.step is None
        assert "model.scale" in restored.kept
        full = get_model_state_dict(its, options=StateDictOptions(full_state_dict=True))
        for name, param in model.module.named_parameters():
            if name != "scale":
                assert torch.equal(param.full_tensor(), full[name]), name
        its_state = get_optimizer_state_dict(its, its_optimizer, options=StateDictOptions(full_state_dict=True))
        for name, param in model.module.named_parameters():
            if name in its_state["state"] and name != "scale":
                assert torch.equal(optimizer.state[param]["exp_avg"].full_tensor(), its_state["state"][name]["exp_avg"])
        # And back.
        train(model, optimizer, range(1))
        weights, state = get_state_dict(model.module, optimizer)
        folder = shared_folder()
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
        its, its_optimizer = theirs(kind, 3)
        weights, state = get_state_dict(its, its_optimizer)
        weights.pop("scale")
        state["state"].pop("scale")
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
        for name, param in model.module.named_parameters():
            if name != "scale":
                value = weights[name].full_tensor() if hasattr(weights[name], "full_tensor") else weights[name]
                assert torch.equal(param.full_tensor(), value), name


@on_ranks(2)
def test_dcp_by_itself() -> None:
    """``torch.distributed.checkpoint`` saves and loads state dicts, as users of Megatron-FSDP call it."""
    folder = shared_folder()
    model, optimizer = make()
    train(model, optimizer, range(2))
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    other, its_optimizer = make("HSDP optim", seed=3)
    train(other, its_optimizer, range(1))
    state = {"model": other.state_dict(), "optimizer": its_optimizer.state_dict()}
    dcp.load(state_dict=state, checkpoint_id=folder)
    other.load_state_dict(state["model"], strict=False)
    its_optimizer.load_state_dict(state["optimizer"])
    assert_same(whole(other, its_optimizer), whole(model, optimizer))
    third, its_optimizer = make("optim", seed=4)
    load(folder, third, its_optimizer)
    assert_same(whole(third, its_optimizer), whole(model, optimizer))
    fourth, its_optimizer = make(seed=5)  # in another process, before any step
    state = {"model": fourth.state_dict(), "optimizer": its_optimizer.state_dict()}
    dcp.load(state_dict=state, checkpoint_id=folder)
    fourth.load_state_dict(state["model"], strict=False)
    its_optimizer.load_state_dict(state["optimizer"])
    assert_same(whole(fourth, its_optimizer), whole(model, optimizer))
    assert train(fourth, its_optimizer, range(2, 4)) == train(model, optimizer, range(2, 4))


# -- checkpoints that do not fit --------------------------------------------------------------------------------------


class Other(Model):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 13, bias=False)
        self.blocks[0].down = nn.Linear(24, 13).double()
        self.extra_layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(7)


@on_ranks(2)
def test_what_does_not_fit_is_listed() -> None:
    root = shared_folder()
    model, optimizer = make()
    train(model, optimizer, range(1))
    Checkpoints(root).save(1, model, optimizer)
    other = fully_shard_model(
        parity.build(Other),
        fsdp_unit_modules=[zoo.Block],
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
    )
    its_optimizer = fully_shard_optimizer(torch.optim.AdamW(groups_of(other), lr=0.01))
    before = {name: param.full_tensor() for name, param in other.named_parameters()}
    with raises_everywhere(
        CheckpointError,
        "does not fit the model. Nothing was loaded",
        "missing (allow_missing): model.extra_layer.weight, model.extra_layer.bias, optimizer.extra_layer.weight",
        "unexpected (allow_unexpected): model.enter.bias, optimizer.enter.bias",
        "model.norm.weight ((13,) there, (7,) here)",
        "model.blocks.0.down.weight (torch.float32 there, torch.float64 here)",
    ):
        Checkpoints(root).load(other, its_optimizer)
    assert all(torch.equal(before[name], param.full_tensor()) for name, param in other.named_parameters())
    allowed = {
        "allow_missing": ["*.extra_layer.*"],
        "allow_unexpected": "*enter.bias*",
        "allow_reshaped": "*.norm.*",
        "allow_cast": "*blocks.0.down*",
    }
    restored = Checkpoints(root).load(other, its_optimizer, **allowed)
    assert "model.norm.weight" in restored.kept
    assert "model.enter.bias" in restored.left_out
    assert torch.equal(other.module.extra_layer.weight.full_tensor(), before["module.extra_layer.weight"])
    assert torch.equal(other.module.enter.weight.full_tensor(), model.module.enter.weight.full_tensor())


@on_ranks(2)
def test_extra_must_be_safe_to_load() -> None:
    root = shared_folder()
    model, _ = make()
    with raises_everywhere((TypeError, RuntimeError), "extra can hold tensors"):  # type: ignore[arg-type]
        Checkpoints(root).save(0, model, extra={"scheduler": torch.optim.lr_scheduler.LambdaLR})
    rank, weights = dist.get_rank(), model.state_dict()
    for extra, words in (
        ({"ema": [weights]}, r"extra['ema'][0]['module."),
        ({"a": 1, "loader": {"position": rank}}, "extra['loader'] of rank 1 is not that of the first rank"),
        ({f"loader {rank}": 0}, "extra['loader 1'] of rank 1"),
        ([torch.ones(2) * rank], "extra of rank 1"),
        ({"only": "here"} if rank else None, "extra['only'] of rank 1"),
    ):
        with raises_everywhere((TypeError, CheckpointError), words, "Nothing was written"):
            Checkpoints(root).save(0, model, extra=extra)
    with raises_everywhere(TypeError, "takes one optimizer, got a list. For several, use a folder for each"):
        Checkpoints(root).save(0, model, [torch.optim.SGD(model.parameters(), lr=1)])  # type: ignore[arg-type]
    assert Checkpoints(root).latest() is None
    assert Checkpoints(root).load(model) is None
    Checkpoints(root).save(0, model)


# -- damaged and malicious files --------------------------------------------------------------------------------------


@on_ranks(2, timeout=90)
def test_a_flipped_byte_names_the_file() -> None:
    root = shared_folder()
    model, optimizer = make()
    train(model, optimizer, range(1))
    checkpoints = Checkpoints(root)
    path = checkpoints.save(1, model, optimizer)
    names = sorted(file.name for file in path.iterdir())
    assert names == [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json"]
    expected = whole(model, optimizer)
    generator = random.Random(0)
    for name in names:
        good = (path / name).read_bytes()
        for kind in ("flip", "cut", "gone"):
            dist.barrier()
            if dist.get_rank() == 0:
                if kind == "flip":
                    at = generator.randrange(len(good))
                    (path / name).write_bytes(
                        good[:at] + bytes([good[at] ^ 1 << generator.randrange(8)]) + good[at + 1 :]
                    )
                elif kind == "cut":
                    (path / name).write_bytes(good[: len(good) // 2])
                else:
                    (path / name).unlink()
            dist.barrier()
            other, its_optimizer = make("optim", seed=3)
            if name == "manifest.json" and kind == "gone":
                with raises_everywhere(CheckpointError, "has no manifest"):
                    load(path, other, its_optimizer, verify=True)
                with raises_everywhere(CheckpointError, "it is incomplete", "There is no complete checkpoint"):
                    checkpoints.load(other, its_optimizer)
                load(path, other, its_optimizer)
            else:
                with raises_everywhere(RuntimeError, name):
                    load(path, other, its_optimizer)
            dist.barrier()
            if dist.get_rank() == 0:
                (path / name).write_bytes(good)
    dist.barrier()
    load(path, other, its_optimizer)
    assert_same(whole(other, its_optimizer), expected)


class Malice:
    def __reduce__(self) -> Any:
        return (os.mkdir, (f"{os.environ['MALICE']}/ran",))


@on_ranks(2)
def test_a_malicious_pickle_does_not_run() -> None:
    root = shared_folder()
    os.environ["MALICE"] = str(root)
    model, optimizer = make()
    train(model, optimizer, range(1))
    weights, state = model.state_dict(), optimizer.state_dict()
    state["param_groups"][0]["betas"] = Malice()
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=root / "bytes")
    (root / "ran").rmdir() if dist.get_rank() == 0 and (root / "ran").exists() else None
    state["param_groups"][0]["betas"] = (0.9, 0.99)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=root / "metadata")
    if dist.get_rank() == 0:
        (root / "metadata" / ".metadata").write_bytes(pickle.dumps(Malice()))
    dist.barrier()
    for kind in ("bytes", "metadata"):
        with raises_everywhere(RuntimeError):
            load(root / kind, model, optimizer)
    assert not (root / "ran").exists()


# -- folders of checkpoints -------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_folder_of_checkpoints() -> None:
    root = shared_folder()
    model, optimizer = make()
    checkpoints = Checkpoints(root, keep=2)
    for step in (0, 10, 20, 20):
        train(model, optimizer, range(1))
        checkpoints.save(step, model, optimizer)
    assert [path.name for path in checkpoints.all()] == ["step-00000020", "step-00000020.1"]
    assert checkpoints.latest() == root / "step-00000020.1"
    assert (root / "latest").read_text() == "step-00000020.1"
    manifest = read_manifest(root / "step-00000020")
    assert manifest is not None
    assert (manifest.step, manifest.serial, manifest.world_size) == (20, 2, 2)
    assert manifest.versions["torch"] == torch.__version__
    # The remains of a save that died do not count as a checkpoint. The next save removes them.
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(root / "step-00000020.1", root / ".saving-9")
        shutil.copytree(root / "step-00000020.1", root / "step-00000099")
        (root / "step-00000099" / "manifest.json").unlink()
    dist.barrier()
    assert checkpoints.latest() == root / "step-00000020.1"
    checkpoints.save(30, model, optimizer)
    assert not (root / ".saving-9").exists()
    with pytest.raises(ValueError, match="keep"):
        Checkpoints(root, keep=0)


@pytest.mark.long
@on_ranks(2, timeout=90)
def test_training_goes_on_while_a_checkpoint_is_written() -> None:
    root = shared_folder()
    model, optimizer = make()
    train(model, optimizer, range(2))
    expected = whole(model, optimizer)
    trained, real = threading.Event(), PublishingWriter.write_data

    def when_trained(writer: PublishingWriter, *arguments: Any) -> Any:
        assert trained.wait(60)
        return real(writer, *arguments)

    PublishingWriter.write_data = when_trained  # type: ignore[method-assign]
    try:
        with Checkpoints(root) as checkpoints:
            for step in range(3):
                trained.clear()
                future = checkpoints.save_async(step, model, optimizer, extra=step)
                assert [path.name for path in checkpoints.all()] == [f"step-{i:08}" for i in range(step)]
                losses = train(model, optimizer, range(10, 13))  # has its own collectives, before anything is written
                assert len(losses) == 3
                assert not future.done()
                trained.set()
    finally:
        PublishingWriter.write_data = real  # type: ignore[method-assign]
    assert future.result() == root / "step-00000002"
    other, its_optimizer = make("optim", seed=3)
    load(root / "step-00000000", other, its_optimizer)
    assert_same(whole(other, its_optimizer), expected)
    assert Checkpoints(root).load(other, its_optimizer).extra == 2


@on_ranks(2, timeout=60)
def test_a_save_that_fails_is_an_error_on_all_ranks() -> None:
    root = shared_folder()
    model, optimizer = make()
    checkpoints = Checkpoints(root)
    checkpoints.save(0, model, optimizer)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for save in (checkpoints.save, lambda *a: checkpoints.save_async(*a).result()):
        if dist.get_rank() == 1:  # limits the size of its file, as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limit[1]))
        try:
            with raises_everywhere(
                CheckpointError,
                "On rank 1: ",
                f"{root}/.saving-step-00000001 cannot be written to any more (EFBIG)",
                " bytes were to be written; ",
            ):
                save(1, model, optimizer)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        dist.barrier()
        assert sorted(path.name for path in root.iterdir()) == [".lock", "latest", "step-00000000"]
    with contextlib.suppress(CheckpointError):
        checkpoints.wait()  # as in a program that did not ask for the future
    checkpoints.save(1, model, optimizer)
    assert checkpoints.latest() == root / "step-00000001"


@on_ranks(2)
def test_what_is_not_sharded_is_the_first_ranks() -> None:
    """Buffers that differ between ranks are saved from the first rank, not mixed."""
    root = shared_folder()
    model, optimizer = make()
    for buffer in model.buffers():
        buffer.fill_(dist.get_rank() + 5)
    path = Checkpoints(root).save(0, model, optimizer)
    other, its_optimizer = make(seed=3)
    load(path, other, its_optimizer)
    assert all(buffer.eq(5).all() for buffer in other.buffers())
    # Only the first rank's file has them.
    files = {
        info.relative_path
        for index, info in load_metadata(path / ".metadata").storage_data.items()
        if "norm.r" in index.fqn
    }
    assert files == {"__0_0.distcp"}


@on_ranks(2)
def test_gradients_that_wait_are_not_lost_in_silence() -> None:
    root = shared_folder()
    model, optimizer = make("optim")
    with model.no_sync():
        model(torch.randn(2, 8)).backward()
    with raises_everywhere(CheckpointError, "Gradients of 1 microbatches wait"):
        Checkpoints(root).save(0, model, optimizer)
    model(torch.randn(2, 8)).backward()
    path = Checkpoints(root).save(0, model, optimizer)
    assert any(param.grad is not None for param in model.parameters())
    load(path, model)
    assert all(param.grad is None for param in model.parameters())


@on_ranks(2, timeout=90)
def test_two_jobs_save_into_one_folder() -> None:
    """Each rank is a job of its own here. No save waits for another one, and none is lost."""
    root = shared_folder()
    group = dist.new_subgroups(1)[0]
    model = fully_shard_model(parity.build(zoo.Plain), DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",)))
    checkpoints = Checkpoints(root)
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of another run's checkpoints
        saved = [checkpoints.save(step, model) for step in range(4)]
        saved += [checkpoints.save_async(step, model).result() for step in range(4)]
    everyones: list[Any] = [None] * 2
    dist.all_gather_object(everyones, saved)
    assert len({path for paths in everyones for path in paths}) == 16
    assert {path.name for path in root.iterdir()} == {
        ".lock",
        "latest",
        *(p.name for paths in everyones for p in paths),
    }
    assert len(checkpoints.all()) == 16
    assert not any((path / ".lock").exists() for path in saved)


@on_ranks(2)
def test_a_lock_that_is_never_released() -> None:
    root = shared_folder()
    model, _ = make()
    folder_module.LOCK_PATIENCE, before = 0.2, folder_module.LOCK_PATIENCE
    try:
        with open(root / ".lock", "w") as file:
            if dist.get_rank() == 0:
                fcntl.flock(file, fcntl.LOCK_EX)
            with raises_everywhere(CheckpointError, "has been locked by another process for"):
                Checkpoints(root).save(0, model)
    finally:
        folder_module.LOCK_PATIENCE = before
    dist.barrier()
    Checkpoints(root).save(0, model)


@on_ranks(2)
def test_random_numbers_go_on() -> None:
    root = shared_folder()
    model, _ = make()
    random.gauss(0, 1)
    np.random.seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    np.random.standard_normal()
    Checkpoints(root).save(0, model)
    drawn = [torch.randn(3), random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.random()]
    restored = Checkpoints(root).load(model)
    assert restored.generators
    again = [torch.randn(3), random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.random()]
    assert torch.equal(drawn[0], again[0])
    assert drawn[1:] == again[1:]
    Checkpoints(root).load(model, generators=False)
    assert not torch.equal(drawn[0], torch.randn(3))


@on_ranks(2)
def test_full_parameters_come_bucket_by_bucket() -> None:
    for strategy in ("optim_grads_params", "no_shard", "optim"):
        model, _ = make(strategy)
        alone = dict(parity.build(Model).named_parameters())
        names = []
        for name, value in model.full_parameters():
            names.append(name)
            assert torch.equal(value, alone[name])
            value.zero_()  # a copy
        assert sorted(names) == sorted(alone)
        assert torch.equal(model.module.scale.full_tensor(), alone["scale"])


@pytest.mark.long_unless("4-optim_grads_params")
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim", "HSDP optim_grads_params", "HFSDP"])
@on_ranks(4)
def test_full_optimizer_states_come_bucket_by_bucket(strategy: str) -> None:
    """One gather for each state of a bucket and each group of ranks, and the values of each parameter's state."""
    model, optimizer = make(strategy)
    train(model, optimizer, range(2))
    expected = {
        (name, key): value.full_tensor() if isinstance(value, RowShardedTensor) else value
        for name, held in optimizer.state_dict()["state"].items()
        for key, value in held.items()
    }
    found: dict[str, Any] = {}
    counts = collectives(lambda: found.update(full_optimizer_state_dict(optimizer, rank=None)))
    buckets = [bucket for bucket in model.sharded.buckets if bucket.plan.requires_grad]
    assert sum(len(bucket.params) for bucket in buckets) > 2 * len(buckets)
    assert counts["all_gather_into_tensor"] == sum(2 * len(bucket.topology.shard_groups) for bucket in buckets)
    assert {(name, key) for name, held in found["state"].items() for key in held} == expected.keys()
    for (name, key), value in expected.items():
        assert torch.equal(found["state"][name][key], value), (name, key)


# -- from Hugging Face and back ---------------------------------------------------------------------------------------


def hf_llama(tied: bool) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tied,
        )
    )


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
@on_ranks(4)
def test_hugging_face_and_back_with_a_step_between(tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    from mfsdp_compile.cli import main

    root = shared_folder()
    tokens = torch.arange(8).reshape(2, 4)
    if dist.get_rank() == 0:
        pretrained = hf_llama(tied)
        pretrained.save_pretrained(root / "pretrained")
        assert main(["convert", str(root / "pretrained"), str(root / "sharded")]) == 0
        assert main(["checkpoint", "verify", str(root / "sharded")]) == 0
    dist.barrier()
    module = hf_llama(tied)
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    model = fully_shard_model(module, fsdp_unit_modules=[LlamaDecoderLayer])
    restored = load(root / "sharded", model)
    assert (restored.step, restored.kept, restored.left_out) == (None, (), ())
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    model(input_ids=tokens).logits.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    path = Checkpoints(root / "run").save(1, model, optimizer)
    trained = full_state_dict(model)
    if dist.get_rank() == 0:
        arguments = ["convert", str(path), str(root / "exported"), "--to", "huggingface"]
        assert main([*arguments, "--files-from", str(root / "pretrained")]) == 0
        exported = transformers.AutoModelForCausalLM.from_pretrained(root / "exported")
        alone = hf_llama(tied)
        alone.load_state_dict(trained)
        assert torch.equal(exported(tokens).logits, alone(tokens).logits)
        assert not torch.equal(exported(tokens).logits, hf_llama(tied)(tokens).logits)  # there is a step in between
    dist.barrier()
