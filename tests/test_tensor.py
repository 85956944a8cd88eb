"""Parameters at rest: every way a user touches one gives the right value or an error that helps, and none crashes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity import raises_everywhere
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from mfsdp_compile import fully_shard_model
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.tensor import RowShardedTensor

SHAPES = {"matrix": (7, 5), "vector": (11,), "scalar": (), "row": (1, 6), "empty": (0, 3), "cube": (3, 4, 2)}


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))


def bag() -> tuple[nn.Module, dict[str, Tensor]]:
    whole = {name: param.detach().clone() for name, param in Bag().named_parameters()}
    return fully_shard_model(Bag()).module, whole


@on_ranks(2, 3)
def test_parameters_are_sharded_dtensors() -> None:
    model, whole = bag()
    for name, param in model.named_parameters():
        assert isinstance(param, (DTensor, RowShardedTensor))
        assert isinstance(param, nn.Parameter)
        assert param.placements == (Shard(0),)
        assert param.shape == whole[name].shape
        assert param.stride() == whole[name].stride()
        assert param.is_leaf
        assert param.requires_grad
        assert torch.equal(param.full_tensor(), whole[name])
        assert torch.equal(param.redistribute(placements=[Replicate()]).to_local(), whole[name])
        assert getattr(model, name) is param


ELEMENTWISE: dict[str, Callable[[Any], Any]] = {
    "scale": lambda p: p * 2 + 1,
    "itself": lambda p: p + p * p,
    "functions": lambda p: torch.sigmoid(p).clamp(0.3, 0.7),
    "compare": lambda p: (p > 0).float(),
    "where": lambda p: torch.where(p > 0, p, torch.zeros_like(p)),
    "like": lambda p: torch.full_like(p, 3.0) - torch.ones_like(p),
    "dtype": lambda p: p.double().sqrt().nan_to_num(),
    "to": lambda p: p.to(torch.bfloat16).float(),
    "clone": lambda p: p.detach().clone(),
    "data": lambda p: p.data - 1,
    "scalar tensor": lambda p: p * torch.tensor(3.0),
    "new": lambda p: p + p.new_zeros(p.shape),
    "addcmul": lambda p: torch.addcmul(p, p, p, value=0.5),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@on_ranks(2, 3)
def test_elementwise(name: str) -> None:
    model, whole = bag()
    for key, param in model.named_parameters():
        got = ELEMENTWISE[name](param)
        expected = ELEMENTWISE[name](whole[key])
        assert isinstance(got, RowShardedTensor)
        assert got.dtype == expected.dtype
        assert torch.equal(got.full_tensor(), expected), key


REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda p: p.sum(),
    "double sum": lambda p: p.sum(dtype=torch.float64),
    "mean": lambda p: p.mean(),
    "norm": lambda p: p.norm(),
    "1-norm": lambda p: torch.linalg.vector_norm(p, 1),
    "inf-norm": lambda p: torch.linalg.vector_norm(p, float("inf")),
    "max": lambda p: p.max(),
    "min": lambda p: p.min(),
    "amax": lambda p: p.amax(),
    "any": lambda p: (p > 1.5).any(),
    "all": lambda p: torch.isfinite(p).all(),
    "foreach": lambda p: torch._foreach_norm([p])[0],
}


@pytest.mark.parametrize("name", REDUCTIONS)
@on_ranks(2, 3)
def test_reductions(name: str) -> None:
    model, whole = bag()
    with torch.no_grad():
        for key, param in model.named_parameters():
            if not param.numel() and name in ("mean", "inf-norm", "max", "min", "amax"):
                continue  # not defined for nothing
            got, expected = REDUCTIONS[name](param), REDUCTIONS[name](whole[key])
            assert not isinstance(got, DTensor)
            # Partial sums by rank: float32 sums of at most 35 elements.
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_equal() -> None:
    model, whole = bag()
    for name, param in model.named_parameters():
        assert torch.equal(param, whole[name])
        assert torch.equal(param, param.detach().clone())
        if param.numel():
            assert not torch.equal(param, whole[name] + 1)


@on_ranks(2, 3)
def test_in_place_changes_reach_the_bucket() -> None:
    model, whole = bag()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.mul_(2).add_(1)
            param.data.sub_(0.5)
            param += param
            assert torch.equal(param.full_tensor(), (whole[name] * 2 + 1 - 0.5) * 2)
            param.copy_(whole[name])  # whole values: each rank takes its rows
            assert torch.equal(param.full_tensor(), whole[name])
            param.data = param.data + 1
            assert torch.equal(param.full_tensor(), whole[name] + 1)
            param.zero_()
            assert not param.full_tensor().any()


@on_ranks(2, 3)
def test_random_initialisation_draws_what_one_process_draws() -> None:
    model, whole = bag()

    def initialise(tensors: dict[str, Any]) -> None:
        torch.manual_seed(5)
        for tensor in tensors.values():
            nn.init.normal_(tensor, std=0.3)
        for tensor in tensors.values():
            nn.init.trunc_normal_(tensor)
        nn.init.kaiming_uniform_(tensors["matrix"])
        nn.init.xavier_normal_(tensors["cube"])

    params = dict(model.named_parameters())
    initialise(params)
    initialise(whole)
    for name, param in params.items():
        assert torch.equal(param.full_tensor(), whole[name]), name
    torch.manual_seed(6)
    noisy = params["vector"] + torch.rand_like(params["vector"])
    torch.manual_seed(6)
    assert torch.equal(noisy.full_tensor(), whole["vector"] + torch.rand_like(whole["vector"]))


@on_ranks(2)
def test_printing() -> None:
    model, _ = bag()
    text = repr(model.matrix)
    assert "'matrix'" in text
    assert "shape=(7, 5)" in text
    assert "of 2 holds" in text
    for param in model.parameters():
        assert str(param)
        assert f"{param}"
    assert "Bag" in repr(model)
    assert "holds no rows" in "".join(map(repr, model.parameters()))


@on_ranks(2)
def test_copies_and_pickles() -> None:
    model, whole = bag()
    for name, param in model.named_parameters():
        twin = copy.deepcopy(param)
        assert isinstance(twin, nn.Parameter)
        assert twin.to_local().data_ptr() != param.to_local().data_ptr() or not param.to_local().numel()
        assert torch.equal(twin.full_tensor(), whole[name])
        with raises_everywhere(TypeError, "sharded over 2 ranks", "full_tensor"):
            pickle.dumps(param)
    with raises_everywhere(TypeError, "cannot be pickled", "state_dict"):
        pickle.dumps(model)


UNSUPPORTED: dict[str, Callable[[Any], Any]] = {
    "matmul": lambda p: p @ torch.randn(5, 2),
    "transpose": lambda p: p.t(),
    "index": lambda p: p[0],
    "flatten": lambda p: p.view(-1),
    "row sums": lambda p: p.sum(0),
    "row norms": lambda p: p.norm(dim=1),
    "other tensor": lambda p: p + torch.randn(2, 7, 5),
    "other rows": lambda p: p + torch.randn(3, 5),
    "item": lambda p: p.sum(dim=(0,), keepdim=True).item(),
    "sort": lambda p: torch.sort(p),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
@on_ranks(2)
def test_what_needs_other_ranks_rows_says_so(name: str) -> None:
    model, _ = bag()
    with raises_everywhere(RuntimeError, "'matrix'", "full_tensor()"):
        UNSUPPORTED[name](model.matrix)


@on_ranks(2)
def test_parameters_with_other_rows_do_not_mix() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(64, 4))
            self.b = nn.Parameter(torch.randn(64, 4))

    model = fully_shard_model(Two()).module
    with raises_everywhere(RuntimeError, "'a'", "'b'", "different ranks"):
        model.a + model.b
    assert torch.equal(model.a.full_tensor() + model.b.full_tensor(), model.b.full_tensor() + model.a.full_tensor())


@on_ranks(2)
def test_regularisation_through_parameters() -> None:
    """A penalty computed from the shards adds to the gradients from the forward."""

    def loss(model: nn.Module, params: Any) -> Tensor:
        return model(torch.ones(3, 5)).sum() + sum(p.pow(2).sum() for p in params) * 0.5

    model = fully_shard_model(_linear())
    alone = _linear()
    if not compat.DTENSOR_SUBCLASSES_DISPATCH:
        with raises_everywhere(RuntimeError, "torch 2.13"):
            loss(model, model.parameters()).backward()
        return
    loss(model, model.parameters()).backward()
    loss(alone, alone.parameters()).backward()
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), its.grad)


def _linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 9)


@on_ranks(2)
def test_assigned_gradients() -> None:
    """``.grad`` is the user's to read, clear and set; the next backward adds to what is there."""
    model, alone = fully_shard_model(_linear()), _linear()
    x = torch.ones(3, 5)
    for each in (model, alone):
        each(x).sum().backward()
    weight, bias = model.module.weight, model.module.bias
    weight.grad = weight.grad * 3
    alone.weight.grad = alone.weight.grad * 3
    bias.grad = alone.bias.grad = None
    for each in (model, alone):
        each(x).sum().backward()
    assert torch.equal(weight.grad.full_tensor(), alone.weight.grad)
    assert torch.equal(bias.grad.full_tensor(), alone.bias.grad)
    with raises_everywhere(RuntimeError):
        weight.grad = torch.zeros(2, 2)
