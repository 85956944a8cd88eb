"""Stacks of matrices whose matrices are cut: at rest, in training, in checkpoints, and on the way there."""

from __future__ import annotations

import copy
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import parity
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import zoo
from hypothesis import given
from hypothesis import strategies as st
from parity import AOT_EAGER, EAGER, INDUCTOR, raises_everywhere
from pool import Pools, on_ranks, shared_folder
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints, full_optimizer_state_dict, full_state_dict, load
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.runtime.geometry.layout import LayoutPolicy, ParamSpec, plan_layouts
from mfsdp_compile.runtime.geometry.rows import RowSplit

ALONE = {"disable_bucketing": True}
"""Every parameter has a bucket of its own."""


def make(seed: int = 0, strategy: str = "optim_grads_params", **arguments: Any) -> tuple[Any, Any]:
    with parity.tight_layouts():
        model = fully_shard_model(
            parity.build(zoo.Stacked, seed), fsdp_unit_modules=[zoo.Experts], **mesh_arguments(strategy), **arguments
        )
    return model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))
        loss = model(batch.chunk(dist.get_world_size())[dist.get_rank()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        losses.append(loss.item() / dist.get_world_size())
    return losses


def whole(model: Any, optimizer: Any) -> dict[str, Any]:
    arrays = {name: value.numpy() for name, value in full_state_dict(model).items()}
    for name, held in full_optimizer_state_dict(optimizer).get("state", {}).items():
        arrays.update({f"{name}.{key}": np.asarray(value) for key, value in held.items()})
    return arrays


def stacks(model: nn.Module) -> list[Any]:
    return [param for param in model.parameters() if param.ndim == 3]


# -- boxes ------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(1, 9), st.sampled_from([0, 1 << 20]))
def test_boxes_are_the_rows_of_a_rank(sizes: list[int], ranks: int, free: int) -> None:
    shape = tuple(sizes)
    policy = LayoutPolicy(free_padding_bytes=free, alignment_bytes=4)
    (layout,) = plan_layouts([ParamSpec("weight", shape)], 4, ranks, policy)
    split, whole = RowSplit(layout, 0), torch.arange(math.prod(shape)).view(shape)
    seen = []
    for rank in range(ranks):
        rows = torch.full(split.local_shape(rank), -1)
        boxes = split.boxes(rank)
        assert len(boxes) <= max(2 * split.row_dims - 1, 1)
        for box in boxes:
            part = whole[box.slices]
            assert part.shape == box.shape
            box.of(rows).copy_(part)
        assert rows.flatten().tolist() == list(split.elements(rank))
        seen += rows.flatten().tolist()
    assert seen == list(range(math.prod(shape)))


def test_the_end_of_a_matrix_whole_ones_and_the_start_of_one() -> None:
    (layout,) = plan_layouts([ParamSpec("w", (5, 6, 4))], 4, 3, LayoutPolicy(free_padding_bytes=0, alignment_bytes=16))
    boxes = [(box.offsets, box.shape, box.rows) for box in RowSplit(layout, 0).boxes(1)]
    assert boxes == [
        ((1, 4, 0), (1, 2, 4), range(2)),
        ((2, 0, 0), (1, 6, 4), range(2, 8)),
        ((3, 0, 0), (1, 2, 4), range(8, 10)),
    ]


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.long_unless("2-aot_eager")
@pytest.mark.parametrize("mode", [AOT_EAGER, INDUCTOR])
@on_ranks(2, 4)
def test_training_is_that_of_whole_matrices(mode: str) -> None:
    data = parity.batches(2)
    with parity.tight_layouts():
        eager, compiled = (parity.train_sharded(zoo.Stacked, each, data, parity.sgd) for each in (EAGER, mode))
    with parity.tight_layouts(cuts_matrices=False):
        plain = parity.train_sharded(zoo.Stacked, EAGER, data, parity.sgd)
    assert any(param.row_split.row_dims == 2 for param in stacks(eager.model))
    assert all(param.row_split.row_dims == 1 for param in stacks(plain.model))
    alone = parity.train_alone(zoo.Stacked, data, parity.sgd)
    if mode == AOT_EAGER:
        parity.assert_bitwise(eager, compiled)
    for run in (eager, compiled, plain):
        parity.assert_close(run, alone)


@on_ranks(2)
def test_steps_are_those_of_whole_matrices() -> None:
    """Sums over two ranks have one order, so where rows lie changes nothing."""
    data = parity.batches(2)
    with parity.tight_layouts():
        cut = parity.train_sharded(zoo.Stacked, EAGER, data)
    with parity.tight_layouts(cuts_matrices=False):
        plain = parity.train_sharded(zoo.Stacked, EAGER, data)
    assert any(param.row_split.row_dims == 2 for param in stacks(cut.model))
    for mine, its in zip([cut.params, *cut.gradients], [plain.params, *plain.gradients], strict=True):
        for name, value in mine.items():
            assert torch.equal(value, its[name]), name


class OneStack(nn.Module):
    """Three experts of more than 1 MiB, which are cut by default."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 331)
        self.experts = nn.Parameter(torch.randn(3, 803, 331) / 20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return (F.gelu(x @ self.experts.mT) @ self.experts).square().mean()


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_steps_are_those_of_fsdp2(mode: str) -> None:
    """FSDP2 gives two experts to one rank and one to the other."""
    from torch.distributed.fsdp import fully_shard

    data = parity.batches(2)
    mine = parity.train_sharded(OneStack, mode, data, units=[])
    (experts,) = stacks(mine.model)
    assert 803 < len(experts.row_split.rows(0)) < 2 * 803  # FSDP2 has 2 * 803 there
    its = parity.build(OneStack)
    fully_shard(its)
    optimizer = torch.optim.AdamW(its.parameters(), lr=1e-2)
    for step, batch in enumerate(data):
        loss = its(batch[dist.get_rank()])
        loss.backward()
        assert torch.equal(mine.losses[step], loss.detach())
        for name, param in its.named_parameters():
            assert torch.equal(mine.gradients[step][name], param.grad.full_tensor()), name
        optimizer.step()
        optimizer.zero_grad()
    for name, param in its.named_parameters():
        assert torch.equal(mine.params[name], param.full_tensor()), name


class Wide(zoo.Plain):
    """Sizes that quantize in blocks of 32."""

    block = functools.partial(zoo.Experts, hidden=96)  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(width=32, layers=1)


@pytest.mark.long_if("*-modes1")
@pytest.mark.parametrize("modes", [(EAGER,), (EAGER, AOT_EAGER)])
@on_ranks(2)
def test_gathers_in_float8(modes: tuple[str, ...]) -> None:
    """Rows with scales of their own may be cut from their matrix; matrices with one scale stay whole."""
    data = parity.batches(2)
    for scaling in ("rowwise", "mxfp8", "tensorwise"):
        precision = MixedPrecisionPolicy(
            param_comm_dtype=torch.float8_e4m3fn, param_comm_scaling=scaling, param_comm_filter=lambda _, p: p.ndim == 3
        )
        arguments: Any = {"units": [zoo.Experts], "precision": precision}
        with parity.tight_layouts():
            runs = [parity.train_sharded(Wide, m, data, **arguments, sharding=ALONE) for m in modes]
        with parity.tight_layouts(cuts_matrices=False):
            plain = parity.train_sharded(Wide, EAGER, data, **arguments, sharding=ALONE)
        assert {param.row_split.row_dims for param in stacks(runs[0].model)} == {1 if scaling == "tensorwise" else 2}
        for run in runs[1:]:
            parity.assert_bitwise(runs[0], run)
        for name, value in runs[0].params.items():
            assert torch.equal(value, plain.params[name]), (scaling, name)


# -- at rest ----------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_parameters_at_rest() -> None:
    model, _ = make()
    alone = dict(parity.build(zoo.Stacked).named_parameters())
    param = next(p for p in stacks(model) if p.row_split.row_dims == 2)
    name = param.row_split.name
    expected = alone[name].detach()
    assert param.shape == expected.shape
    assert param.to_local().shape == (len(param.row_split.rows(dist.get_rank())), param.shape[2])
    assert "of dimensions 0 to 1 taken together" in repr(param)
    assert "of dimensions 0 to 1 taken together" in repr(param.placements)
    generator = torch.Generator().manual_seed(5)
    operands = [
        torch.randn(shape, generator=generator)
        for shape in [
            param.shape,
            (3, 1, 1),
            (1, param.shape[1], 1),
            (param.shape[1], 1),
            (1, 1, 1),
            param.shape[2:],
            (),
        ]
    ]
    with torch.no_grad():
        assert torch.equal(param.full_tensor(), expected)
        for other in operands:
            assert torch.equal(param * other, expected * other)
            assert torch.equal(param.detach().clone().add_(other).full_tensor(), expected + other)
        assert torch.equal((param > 0).any(), (expected > 0).any())
        assert torch.equal(param.amax(), expected.amax())
        torch.testing.assert_close(param.sum().full_tensor(), expected.sum())
        torch.testing.assert_close(param.norm().full_tensor(), expected.norm())
        assert torch.equal(copy.deepcopy(param).full_tensor(), expected)
        torch.manual_seed(7)
        drawn = torch.empty_like(param).normal_()
        torch.manual_seed(7)
        assert torch.equal(drawn.full_tensor(), torch.empty_like(expected).normal_())
        even = param.redistribute(placements=param.redistribute().placements)
        assert type(even) is DTensor
        assert torch.equal(even.full_tensor(), expected)
        param.detach().copy_(expected + 1)
        assert torch.equal(param.full_tensor(), expected + 1)
        assert param.equal(param.full_tensor())
    with torch.no_grad():
        assert torch.equal(param[0].full_tensor(), expected[0] + 1)


@on_ranks(4)
def test_whole_parameters_and_back() -> None:
    model, _ = make()
    alone = parity.build(zoo.Stacked)
    expected = {name: param.detach() for name, param in alone.named_parameters()}
    for name, value in model.full_parameters():
        assert torch.equal(value, expected[name]), name
    with model.summon_full_params(), torch.no_grad():
        for name, param in model.module.named_parameters():
            assert torch.equal(param, expected[name]), name
            param.mul_(2)
    duplicate = copy.deepcopy(model)
    for each in (model, duplicate):
        for name, param in each.module.named_parameters():
            assert torch.equal(param.full_tensor(), 2 * expected[name]), name
    batch = torch.ones(2, 8)
    with torch.no_grad():
        for param in alone.parameters():
            param.mul_(2)
    assert torch.equal(duplicate(batch), alone(batch))


@pytest.mark.parametrize("flat", [False, True])
@on_ranks(4)
def test_optimizers(flat: bool) -> None:
    """Every kind of step, over parameters or over flat shards, is the same for cut matrices and for whole ones."""
    for optimizer, options in (
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
    ):
        models, found = [make()[0], parity.build(zoo.Stacked)], []
        for model in models:
            optim = optimizer(model.parameters(), lr=0.1, **options)
            if model is models[0]:
                optim = fully_shard_optimizer(optim, flat=flat)
            for step in range(2):
                for number, param in enumerate(model.parameters()):
                    whole = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * step + number))
                    param.grad = torch.zeros_like(param).copy_(whole)
                optim.step()
            found.append([getattr(p, "full_tensor", p.detach)() for p in model.parameters()])
        for mine, its in zip(*found, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-7)  # vector instructions round differently


@on_ranks(2)
def test_rows_move_between_layouts() -> None:
    """Two models of the same values, one of which cuts matrices."""
    model, _ = make()
    with parity.tight_layouts(cuts_matrices=False):
        other = fully_shard_model(parity.build(zoo.Stacked, 4), fsdp_unit_modules=[zoo.Experts])
    with torch.no_grad():
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            expected = its.full_tensor().lerp(mine.full_tensor(), 0.25)
            its.lerp_(mine, 0.25)
            assert torch.equal(its.full_tensor(), expected)
            mine.copy_(its)
            assert torch.equal(mine.full_tensor(), expected)


@on_ranks(2)
def test_clipping_counts_all_rows() -> None:
    model, _ = make()
    alone = parity.build(zoo.Stacked)
    batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    model(batch).backward()
    alone(batch).backward()
    mine, its = (torch.nn.utils.clip_grad_norm_(each.parameters(), 1e-3) for each in (model, alone))
    torch.testing.assert_close(mine.full_tensor(), its)
    for param, same in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), same.grad)


@pytest.mark.long_unless("*-optim_grads_params")
@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard", "HFSDP"])
@on_ranks(4)
def test_values_made_by_rank_are_those_of_one_process(strategy: str) -> None:
    with torch.device("meta"):
        model = zoo.Stacked()
    torch.manual_seed(3)
    with parity.tight_layouts():
        model = fully_shard_model(
            model, fsdp_unit_modules=[zoo.Experts], init_model_with_meta_device=True, **mesh_arguments(strategy)
        )
    with torch.device("meta"):
        alone = zoo.Stacked()
    alone = alone.to_empty(device="cpu")
    torch.manual_seed(3)
    for module in alone.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for (name, param), value in zip(model.module.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), value), name


# -- checkpoints ------------------------------------------------------------------------------------------------------


def train_and_save(root: str) -> dict[str, Any]:
    model, optimizer = make()
    train(model, optimizer, range(2))
    Checkpoints(root).save(2, model, optimizer)
    return whole(model, optimizer)


def resume(root: str) -> dict[str, Any]:
    model, optimizer = make(seed=9)
    Checkpoints(root).load(model, optimizer)
    found = whole(model, optimizer)
    train(model, optimizer, range(1))
    return found


@pytest.mark.long_unless("4-loaded_by0")
@pytest.mark.processes
@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [(4, (3,)), *((n, (1, 2, 3, 4)) for n in (1, 2, 3, 4))],
)
def test_saved_by_any_ranks_loaded_by_any(
    saved_by: int, loaded_by: tuple[int, ...], pools: Pools, tmp_path: Path
) -> None:
    root = str(tmp_path)
    there = pools.of(saved_by).run(train_and_save, root=root)[0]
    assert there["blocks.0.up"].shape == (3, 23, 16)
    for ranks in loaded_by:
        here = pools.of(ranks).run(resume, root=root)[0]
        assert here.keys() == there.keys()
        for name, value in there.items():
            assert np.array_equal(here[name], value), name


@on_ranks(3)
def test_checkpoints_of_fsdp2_and_for_it() -> None:
    from torch.distributed.fsdp import fully_shard

    def theirs(seed: int) -> tuple[Any, Any]:
        model: Any = parity.build(zoo.Stacked, seed)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    its, its_optimizer = theirs(1)
    train(its, its_optimizer, range(2))
    folder = shared_folder()
    weights, state = get_state_dict(its, its_optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    model, optimizer = make(2)
    load(folder, model, optimizer)
    for param, same in zip(model.parameters(), its.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), same.full_tensor())
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[param][key].full_tensor(), its_optimizer.state[same][key].full_tensor())
    train(model, optimizer, range(1))
    folder = shared_folder()
    weights, state = get_state_dict(model.module, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
    its, its_optimizer = theirs(3)
    weights, state = get_state_dict(its, its_optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    for name, param in model.module.named_parameters():
        assert torch.equal(param.full_tensor(), weights[name].full_tensor()), name
        assert torch.equal(
            optimizer.state[param]["exp_avg"].full_tensor(), state["state"][name]["exp_avg"].full_tensor()
        )


@on_ranks(3)
def test_state_dicts() -> None:
    model, _ = make()
    expected = {name: param.full_tensor() for name, param in model.module.named_parameters()}
    whole = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(model.module, options=whole)
    for name, value in expected.items():
        assert torch.equal(full[name], value), name
    other, _ = make(6)
    other.module.load_state_dict(full)
    for name, param in other.module.named_parameters():
        assert torch.equal(param.full_tensor(), expected[name]), name
    third, _ = make(7)
    set_model_state_dict(third.module, dict(full), options=whole)
    for name, param in third.module.named_parameters():
        assert torch.equal(param.full_tensor(), expected[name]), name
    cut = {param.row_split.name for param in stacks(third) if param.row_split.row_dims == 2}
    assert cut
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with raises_everywhere(RuntimeError, "begin or end inside a matrix of the stack", "load_state_dict"):
        set_model_state_dict(third.module, full, options=options)
    assert torch.isfinite(third(torch.ones(2, 8)))
