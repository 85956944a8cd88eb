"""Parameters in ``ignored_params``: they are not sharded, and otherwise treated as the model's other parameters."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import raises_everywhere
from pool import on_ranks, shared_folder
from torch import Tensor, nn

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints, full_optimizer_state_dict, full_state_dict

OWN = ("own", "apart.weight", "apart.bias")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 7)
        self.apart = nn.Linear(7, 7)
        self.last = nn.Linear(7, 3)
        self.own = nn.Parameter(torch.zeros(7))
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.last(torch.tanh(self.apart(self.first(x) + self.own)))


def batch(number: int, rank: int = 0) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * number + rank))


def sharded(make: Any = torch.optim.AdamW, **arguments: Any) -> tuple[Any, Any]:
    module = Model()
    ignored = {param for name, param in module.named_parameters() if name in OWN}
    model: Any = fully_shard_model(module, fsdp_unit_modules=[nn.Linear], ignored_params=ignored)
    return model, fully_shard_optimizer(make(model.parameters(), lr=0.1), **arguments)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for number in steps:
        model(batch(number)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def reference(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer, range(steps))
    return model, optimizer


@on_ranks(2)
@pytest.mark.parametrize("flat", [False, True])
def test_they_are_stepped_saved_and_loaded(flat: bool) -> None:
    root = shared_folder()
    model, optimizer = sharded(flat=flat)
    first = optimizer.state_dict()["state"]
    assert {f"module.{name}" for name in OWN} < first.keys()
    train(model, optimizer, range(2))
    expected, its = reference(2)
    weights, wholes = full_state_dict(model, rank=None), dict(model.full_parameters())
    assert wholes.keys() == {name for name, _ in expected.named_parameters()}
    assert weights.keys() == expected.state_dict().keys()
    for name, value in expected.named_parameters():
        torch.testing.assert_close(weights[name], value.detach())
        torch.testing.assert_close(wholes[name], value.detach())
    state = full_optimizer_state_dict(optimizer, rank=None)["state"]
    for name, value in expected.named_parameters():
        for key, part in its.state[value].items():
            torch.testing.assert_close(state[f"module.{name}"][key], part)
    assert model.module.own.grad is None  # zeroed with the others
    path = Checkpoints(root).save(2, model, optimizer)
    train(model, optimizer, range(2, 3))
    after = full_state_dict(model, rank=None)
    other, its_optimizer = sharded(flat=flat)
    other(batch(9)).sum().backward()
    assert Checkpoints(root).load(other, its_optimizer).path == path
    assert other.module.own.grad is None  # it belongs to other weights
    train(other, its_optimizer, range(2, 3))
    for name, value in full_state_dict(other, rank=None).items():
        assert torch.equal(value, after[name]) or name == "count", name


@on_ranks(2)
def test_state_dicts_by_name() -> None:
    model, optimizer = sharded()
    train(model, optimizer, range(1))
    other, its_optimizer = sharded()
    other.load_state_dict(model.state_dict())
    its_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, range(1, 2))
    train(other, its_optimizer, range(1, 2))
    for (name, mine), its in zip(model.full_parameters(), dict(other.full_parameters()).values(), strict=True):
        assert torch.equal(mine, its), name
    twin = copy.deepcopy(model)
    assert twin.sharded.ignored["own"] is twin.module.own
    assert torch.equal(pickle.loads(pickle.dumps(model.module.own)), model.module.own)
    alone = fully_shard_optimizer(torch.optim.SGD([model.module.own], lr=0.1, momentum=0.9))
    model.module.own.grad = torch.ones(7)
    alone.step()
    assert [*alone.state_dict()["state"]] == ["module.own"]


@on_ranks(2)
def test_gradients_are_scaled_and_clipped() -> None:
    model, _ = sharded()
    model(batch(0)).pow(2).mean().backward()
    expected = Model()
    expected(batch(0)).pow(2).mean().backward()
    own = dict(expected.named_parameters())
    model.scale_gradients(0.5)
    torch.testing.assert_close(model.module.own.grad, own["own"].grad * 0.5)
    model.scale_gradients(2.0)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(
        getattr(norm, "full_tensor", lambda: norm)(), torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
    )
    torch.testing.assert_close(model.module.own.grad, own["own"].grad)


@on_ranks(2)
def test_optimizers_over_whole_parameters_refuse_them() -> None:
    with raises_everywhere(NotImplementedError, "'own'", "ignored_params", "an optimizer of its own"):
        sharded(whole=True)
    model: Any = fully_shard_model(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ignored_params=[])
    stranger = nn.Parameter(torch.ones(2))
    with raises_everywhere(ValueError, "is not sharded"):
        fully_shard_optimizer(torch.optim.SGD([*model.parameters(), stranger], lr=0.1))


# -- whole state dicts ------------------------------------------------------------------------------------------------


@on_ranks(2, timeout=60)
def test_a_full_state_dict_is_a_copy_and_fails_on_all_ranks() -> None:
    from mfsdp_compile.checkpoint import full_state_dict as module
    from mfsdp_compile.checkpoint.host_copies import HostCopies

    model, optimizer = sharded()
    train(model, optimizer, range(1))
    weights = full_state_dict(model, rank=None)
    train(model, optimizer, range(1, 2))
    assert weights["count"].tolist() == [1, 1]
    assert not torch.equal(weights["own"], model.module.own)
    assert module is full_state_dict
    patch, add = pytest.MonkeyPatch(), HostCopies.add

    def fails(self: Any, key: Any, tensor: Tensor) -> Any:
        if key in ("last.weight", ("module.last.weight", "exp_avg")):
            raise MemoryError("no room")
        return add(self, key, tensor)

    if dist.get_rank() == 0:
        patch.setattr(HostCopies, "add", fails)
    for what in (lambda: full_state_dict(model), lambda: full_optimizer_state_dict(optimizer)):
        with raises_everywhere(MemoryError if dist.get_rank() == 0 else RuntimeError, "no room"):
            what()
    patch.undo()
    assert full_state_dict(model, rank=None).keys() == weights.keys()
