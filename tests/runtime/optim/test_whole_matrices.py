"""Optimizers over whole matrices: state dicts and checkpoints, stacks of matrices, other parallelism."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
from parity import raises_everywhere
from pool import on_ranks
from test_optimizer import Mixed, params_of, set_gradients, whole_optimizer
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mfsdp_compile import declare_optimizer, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints, full_optimizer_state_dict
from mfsdp_compile.diagnostics.doctor import mesh_arguments


@declare_optimizer("per_parameter")
class Nested(torch.optim.Optimizer):
    """Momentum, and statistics of each dimension in nested lists, as SOAP and Shampoo hold them; more of it later."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state, grad = self.state[param], param.grad
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(param))
                    state["sides"] = [[torch.zeros(size, size), torch.zeros(size)] for size in param.shape]
                state["step"] += 1
                state["exp_avg"].lerp_(grad, 0.1)
                update = state["exp_avg"].clone()
                for dim, (gram, total) in enumerate(state["sides"]):
                    rows = grad.movedim(dim, 0).reshape(grad.shape[dim], -1)
                    gram.add_(rows @ rows.t())
                    total.add_(rows.sum(1))
                    update = (
                        torch.linalg.solve(
                            gram + torch.diag(total.square() + 1), update.movedim(dim, 0).reshape(len(gram), -1)
                        )
                        .view(update.movedim(dim, 0).shape)
                        .movedim(0, dim)
                    )
                if state["step"] == 2:
                    state["late"] = grad.square().sum()
                param.add_(update, alpha=-group["lr"] - float(state.get("late", 0)) / 1e3)


def optimizer_of(name: str, params: Any) -> torch.optim.Optimizer:
    return Nested(params) if name == "Nested" else whole_optimizer(name, params)


def sharded(name: str, strategy: str = "optim_grads_params", ranks: dist.ProcessGroup | None = None) -> Any:
    model = fully_shard_model(parity.build(Mixed), fsdp_unit_modules=[nn.Linear], **mesh_arguments(strategy))
    return model, fully_shard_optimizer(optimizer_of(name, model.parameters()), whole=True)


def train(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        set_gradients(params_of(model), step)
        if step == 1:
            params_of(model)["second.bias"].grad = None
        optimizer.step()
        optimizer.zero_grad()


def assert_equal(model: Any, alone: Any) -> None:
    for key, param in params_of(model).items():
        assert torch.equal(param.full_tensor(), params_of(alone)[key]), key


NAMES = ["Nested", "Preconditioned", "torch's Adafactor"]


@on_ranks(2)
def test_state_dicts_of_whole_steps() -> None:
    """Training that continues from a state dict has the bits of training that was not interrupted."""
    for name in NAMES:
        alone = parity.build(Mixed)
        train(alone, optimizer_of(name, alone.parameters()), range(4))
        model, optimizer = sharded(name)
        train(model, optimizer, range(2))
        kept, own, everything = model.state_dict(), optimizer.state_dict(), full_optimizer_state_dict(optimizer, None)
        assert 0 < len(own["state"]) < len(everything["state"]) == len(params_of(alone))
        for state in (own, everything):
            other, its = sharded(name)
            other.load_state_dict(kept)
            its.load_state_dict(state)
            train(other, its, range(2, 4))
            assert_equal(other, alone)
    wrong = {**own, "state": dict(list(own["state"].items())[1:])}
    with raises_everywhere(ValueError, "The state dict has no state of ", "whole=True"):
        its.load_state_dict(wrong)


@on_ranks(2)
def test_copies_of_whole_steps() -> None:
    """A copy steps over whole parameters, too, and each rank holds the state of what it steps."""
    alone = parity.build(Mixed)
    train(alone, Nested(alone.parameters()), range(4))
    model = fully_shard_model(parity.build(Mixed), fsdp_unit_modules=[nn.Linear])
    first, *rest = model.parameters()
    optimizer = fully_shard_optimizer(Nested([first]), whole=True)
    optimizer.add_param_group({"params": rest})  # another choice of owners than all at once
    train(model, optimizer, range(2))
    with raises_everywhere(RuntimeError, "is copied without its model"):
        copy.deepcopy(optimizer)
    twin, its = copy.deepcopy((model, optimizer))
    for each, steps in ((twin, its), (model, optimizer)):  # each has memory and state of its own
        train(each, steps, range(2, 4))
        assert_equal(each, alone)
    assert its.state_dict()["state"].keys() == optimizer.state_dict()["state"].keys()


@pytest.mark.long_if("4")
@on_ranks(2, 4)
def test_checkpoints_of_whole_steps(tmp_path: Path) -> None:
    """Checkpoints hold the state of all owners; with other strategies, owners differ."""
    strategies = {2: ("optim_grads_params", "no_shard"), 4: ("HFSDP", "HSDP optim_grads")}[dist.get_world_size()]
    for number, name in enumerate(NAMES):
        alone = parity.build(Mixed)
        train(alone, optimizer_of(name, alone.parameters()), range(4))
        for first, second in (strategies, strategies[::-1]):
            model, optimizer = sharded(name, first)
            train(model, optimizer, range(2))
            folder = Checkpoints(tmp_path / f"{number} {first}")
            folder.save(2, model, optimizer)
            other, its = sharded(name, second)
            assert folder.load(other, its) is not None
            train(other, its, range(2, 4))
            assert_equal(other, alone)


@on_ranks(2)
def test_torchs_checkpoints_of_whole_steps(tmp_path: Path) -> None:
    name = "torch's Adafactor"
    alone = parity.build(Mixed)
    train(alone, optimizer_of(name, alone.parameters()), range(4))
    for helper in (False, True):
        model, optimizer = sharded(name)
        train(model, optimizer, range(2))
        path = str(tmp_path / str(helper))

        def state(model: Any, optimizer: Any, helper: bool = helper) -> dict[str, Any]:
            held = get_optimizer_state_dict(model, optimizer) if helper else optimizer.state_dict()
            return {"model": model.state_dict(), "optimizer": held}

        dcp.save(state(model, optimizer), checkpoint_id=path)
        other, its = sharded(name)
        read = state(other, its)
        dcp.load(read, checkpoint_id=path)
        other.load_state_dict(read["model"])
        if helper:
            set_optimizer_state_dict(other, its, read["optimizer"])
        else:
            its.load_state_dict(read["optimizer"])
        train(other, its, range(2, 4))
        assert_equal(other, alone)


@on_ranks(2)
def test_whole_steps_keep_their_owners_without_a_gradient() -> None:
    """A parameter that has no gradient in one step changes nothing for the next ones: state is where it was."""

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(6, 10, bias=False) for _ in range(3)))

    model, alone = fully_shard_model(parity.build(build), fsdp_unit_modules=[nn.Linear]), parity.build(build)
    optimizers = Nested(model.parameters()), Nested(alone.parameters())
    fully_shard_optimizer(optimizers[0], whole=True)
    assert all(0 < len(param.to_local()) < 10 for param in model.parameters())
    for step in range(3):
        for params, optimizer in zip((params_of(model), params_of(alone)), optimizers, strict=True):
            set_gradients(params, step)
            params["0.weight"].grad = params["0.weight"].grad if step != 1 else None
            optimizer.step()
    assert_equal(model, alone)


@on_ranks(2)
def test_whole_steps_of_several_dtypes() -> None:
    """Parameters keep their dtypes on the way, and owners do not depend on the dtypes of gradients."""

    def build() -> Any:
        net = parity.build(Mixed)
        net.first.to(torch.bfloat16)
        return net

    model, alone = fully_shard_model(build(), preserve_fp32_weights=False), build()
    optimizers = (
        whole_optimizer("torch's Adafactor", model.parameters()),
        whole_optimizer("torch's Adafactor", alone.parameters()),
    )
    fully_shard_optimizer(optimizers[0], whole=True)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16, torch.float32}
    for step in range(3):
        for params, optimizer in zip((params_of(model), params_of(alone)), optimizers, strict=True):
            set_gradients(params, step)
            optimizer.step()
    assert_equal(model, alone)


# -- Muon -------------------------------------------------------------------------------------------------------------


class Stacks(nn.Module):
    """Stacks of wide and of tall matrices, and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 32, 48))
        self.down = nn.Parameter(torch.randn(3, 48, 16))
        self.matrix = nn.Parameter(torch.randn(80, 32))


def muon_over(params: dict[str, Any]) -> torch.optim.Muon:
    """Return a Muon that also holds stacks: its constructor takes matrices only."""
    optimizer = torch.optim.Muon([p for p in params.values() if p.ndim == 2], adjust_lr_fn="match_rms_adamw", lr=0.05)
    if stacks := [p for p in params.values() if p.ndim == 3]:
        optimizer.add_param_group({"params": stacks})
    return optimizer


def one_by_one(params: dict[str, Any], steps: int) -> dict[str, Tensor]:
    """Return parameters after steps of Muon over matrices in place of stacks."""
    for param in params.values():
        assert param.ndim in (2, 3)
    separate = {
        f"{name} {i}": nn.Parameter(matrix.detach().clone())
        for name, param in params.items()
        for i, matrix in enumerate(param if param.ndim == 3 else [param])
    }
    optimizer = muon_over(separate)
    for step in range(steps):
        set_gradients(params, step)
        for name, param in params.items():
            for i, gradient in enumerate(param.grad if param.ndim == 3 else [param.grad]):
                separate[f"{name} {i}"].grad = gradient.clone()
        optimizer.step()
    return {
        name: torch.stack([separate[f"{name} {i}"] for i in range(len(param))])
        if param.ndim == 3
        else separate[f"{name} 0"]
        for name, param in params.items()
    }


@on_ranks(2, 4)
def test_muon_over_stacks() -> None:
    """The matrices of a stack are orthogonalized like separate parameters, also where shards cut them."""
    expected = one_by_one(params_of(parity.build(Stacks)), 3)
    for strategy in {2: ("optim_grads_params", "no_shard"), 4: ("HFSDP", "optim")}[dist.get_world_size()]:
        for tight in (False, True):
            with parity.tight_layouts() if tight else parity.tight_layouts(cuts_matrices=False):
                model = fully_shard_model(parity.build(Stacks), **mesh_arguments(strategy))
            params = params_of(model)
            if tight and strategy == "optim_grads_params":
                assert any(param.row_split.row_dims == 2 for param in params.values())
            optimizer = fully_shard_optimizer(muon_over(params))
            for step in range(3):
                set_gradients(params, step)
                optimizer.step()
            for name, param in params.items():
                assert torch.equal(param.full_tensor(), expected[name]), (strategy, tight, name)


class Divided(nn.Module):
    """Matrices and a stack that tensor-parallel ranks divide, the last getting less, and a matrix that all have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(63, 48))
        self.second = nn.Parameter(torch.randn(48, 63))
        self.stack = nn.Parameter(torch.randn(3, 32, 48))
        self.everywhere = nn.Parameter(torch.randn(32, 32))


def divided(dims: tuple[int, int]) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    net = parity.build(Divided)
    for name, dim in {"first": dims[0], "second": dims[1], "stack": dims[0] + 1}.items():
        whole = getattr(net, name).detach()
        setattr(net, name, nn.Parameter(distribute_tensor(whole, mesh["tp"], [Shard(dim)])))
    return fully_shard_model(net, device_mesh=mesh, dp_shard_dim="dp", tp_dim="tp")


@on_ranks(2, 4)
def test_whole_steps_of_tensor_parallel_parameters(tmp_path: Path) -> None:
    def build(dims: tuple[int, int]) -> Any:
        model = divided(dims)
        return model, fully_shard_optimizer(torch.optim.Adafactor(model.parameters(), lr=0.1), whole=True)

    def steps(model: Any, optimizer: Any, numbers: range) -> None:
        for step in numbers:
            set_gradients(params_of(model), step)
            optimizer.step()

    alone = parity.build(Divided)
    steps(alone, torch.optim.Adafactor(alone.parameters(), lr=0.1), range(4))
    model, optimizer = build((0, 1))
    steps(model, optimizer, range(2))
    Checkpoints(tmp_path).save(2, model, optimizer)
    other, its = build((1, 0))
    assert Checkpoints(tmp_path).load(other, its) is not None
    steps(other, its, range(2, 4))
    assert_equal(other, alone)


def assert_muon_is(expected: dict[str, Tensor], params: dict[str, Any]) -> None:
    """Take three steps of Muon, and compare the whole parameters."""
    optimizer = fully_shard_optimizer(muon_over(params))
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    for name, param in params.items():
        assert torch.equal(param.full_tensor(), expected[name]), name


@pytest.mark.parametrize("dims", [(0, 1), (1, 0)])
@on_ranks(2, 4)
def test_muon_over_tensor_parallel_matrices(dims: tuple[int, int]) -> None:
    """Matrices that tensor-parallel ranks divide, by rows and by columns, are assembled from all ranks."""
    expected = one_by_one(params_of(parity.build(Divided)), 3)
    model = divided(dims)
    assert_muon_is(expected, params_of(model))


@on_ranks(4)
def test_muon_over_expert_parallel_stacks() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Module()
            self.experts.up = nn.Parameter(torch.randn(4, 32, 48))
            self.router = nn.Parameter(torch.randn(16, 32))

    expected = one_by_one(params_of(parity.build(Net)), 3)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    net = parity.build(Net)
    net.experts.up = nn.Parameter(net.experts.up.detach().chunk(2)[mesh.get_local_rank("ep")].clone())
    model = fully_shard_model(net, expt_device_mesh=mesh, dp_shard_dim="fsdp")
    assert_muon_is(expected, params_of(model))


def test_muon_refuses_what_is_no_matrix(fake_world: int) -> None:
    model = fully_shard_model(nn.Conv2d(2, 4, 3))
    optimizer = torch.optim.Muon([nn.Parameter(torch.ones(2, 2))])
    optimizer.param_groups[0]["params"] = [model.module.weight]
    with pytest.raises(
        ValueError, match=r"Muon works on matrices \[H, F\] and stacks .* 'weight' has the shape \(4, 2, 3, 3\)"
    ):
        fully_shard_optimizer(optimizer)


@on_ranks(4)
def test_experts_that_may_be_several_parameters_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "ep"))
    net = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(32, 16, bias=False)])})
    model = fully_shard_model(net, expt_device_mesh=mesh, dp_shard_dim="fsdp")
    for build, whole in ((torch.optim.Muon, False), (torch.optim.Adafactor, True)):
        optimizer = build(model.parameters())
        with raises_everywhere(
            NotImplementedError, "'experts.0.weight', [32, 32], is divided over expert-parallel ranks"
        ):
            fully_shard_optimizer(optimizer, whole=whole)


@on_ranks(4)
def test_matrices_that_are_divided_twice_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "tp", "cols"))
    net = nn.Linear(4, 4, bias=False)
    net.weight = nn.Parameter(distribute_tensor(net.weight.detach(), mesh["tp", "cols"], [Shard(0), Shard(1)]))
    model = fully_shard_model(net, device_mesh=mesh, dp_shard_dim="dp")
    for build, whole in ((torch.optim.Muon, False), (torch.optim.Adafactor, True)):
        optimizer = build(model.parameters())
        with raises_everywhere(NotImplementedError, "'weight' is divided over two mesh dimensions besides"):
            fully_shard_optimizer(optimizer, whole=whole)
