"""Parameters at rest: everything that users do to one gives the right value or a helpful error, and nothing crashes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import parity
import pytest
import torch
import torch.nn.functional as F
import zoo
from parity import raises_everywhere
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.memory.redistribute import same_ranks
from mfsdp_compile.runtime.memory.tensor import RowShardedTensor


def bag() -> tuple[nn.Module, dict[str, Tensor]]:
    whole = {name: param.detach().clone() for name, param in zoo.Bag().named_parameters()}
    return fully_shard_model(zoo.Bag()).module, whole


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
    "scalar tensor": lambda p: torch.zeros_like(p) * torch.tensor(3.0),
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
    "all dims": lambda p: p.sum(dim=tuple(range(p.ndim))),
    "negative dims": lambda p: p.mean(dim=tuple(range(-p.ndim, 0)), keepdim=True),
    "norm over all dims": lambda p: torch.linalg.vector_norm(p, dim=tuple(range(p.ndim)), keepdim=True),
    "amax over all dims": lambda p: p.amax(dim=tuple(range(p.ndim))),
    "any over all dims": lambda p: (p > 1.5).any(dim=tuple(range(p.ndim))),
    "std": lambda p: p.std(),
    "var": lambda p: (p + 1000).var(correction=0),
    "var_mean": lambda p: torch.stack(torch.var_mean(p.double())),
    "half": lambda p: p.bfloat16().std().float(),
    "count_nonzero": lambda p: torch.count_nonzero(p > 0),
    "nansum": lambda p: torch.where(p > 0, p, float("nan")).nansum(),
    "mse_loss": lambda p: F.mse_loss(p, p * 2),
    "l1_loss": lambda p: F.l1_loss(p, p * 2, reduction="sum"),
    "smooth_l1_loss": lambda p: F.smooth_l1_loss(p, p * 3, beta=0.5),
    "huber_loss": lambda p: F.huber_loss(p, p * 3, delta=0.5),
    "difference": lambda p: (p - p * 2).abs().max(),
    "dist": lambda p: torch.dist(p, p * 3, 3),
    "isclose": lambda p: torch.isclose(p, p + 1e-9).all(),
    "total norm": lambda p: nn.utils.get_total_norm([p, p * 2]),
}
NOT_OF_NOTHING = {"mean", "inf-norm", "max", "min", "amax", "negative dims", "amax over all dims", "difference"}


@pytest.mark.parametrize("name", REDUCTIONS)
@on_ranks(2, 3)
def test_reductions(name: str) -> None:
    model, whole = bag()
    with torch.no_grad():
        for key, param in model.named_parameters():
            if not param.numel() and (name in NOT_OF_NOTHING or "norm" in name):
                continue  # not defined for empty tensors
            got, expected = REDUCTIONS[name](param), REDUCTIONS[name](whole[key])
            assert isinstance(got, DTensor)
            assert all(placement.is_replicate() for placement in got.placements)
            # Partial sums by rank: float32 sums of at most 35 elements.
            torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-6, atol=1e-6, equal_nan=True)


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
            param.copy_(whole[name])  # whole values, of which each rank takes its rows
            assert torch.equal(param.full_tensor(), whole[name])
            param.data = param.data + 1
            assert torch.equal(param.full_tensor(), whole[name] + 1)
            param.zero_()
            assert not param.full_tensor().any()


ROW_WRITES: dict[str, Callable[[Any], Any]] = {
    "to_local": lambda p: p.to_local().mul_(1.5),
    "detached": lambda p: p.detach().to_local().mul_(1.5),
    "data": lambda p: p.data.to_local().detach().mul_(1.5),
    "foreach": lambda p: torch._foreach_mul_([p.data.to_local()], 1.5),
    "data of an ordinary tensor": lambda p: p.to_local().data.mul_(1.5),
    "numpy": lambda p: np.multiply(array := p.detach().to_local().numpy(), 1.5, out=array),
}


@on_ranks(2)
def test_writes_to_rows_are_seen_by_the_next_forward() -> None:
    """Also with strategies that keep parameters gathered."""
    for strategy in (0, 1, 2, 3):
        model, alone, x = fully_shard_model(_linear(), zero_dp_strategy=strategy), _linear(), torch.ones(2, 5)
        for name, write in ROW_WRITES.items():
            model(x).sum().backward()
            model.zero_grad()
            with torch.no_grad():
                for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
                    write(mine)
                    its.mul_(1.5)
            torch.testing.assert_close(model(x), alone(x), msg=f"{name}, {strategy}")
        # Arrays and tensors that outlive steps, and gathers that the optimizer starts ahead of the next forward.
        optimizer, arrays = fully_shard_optimizer(SGD(model.parameters(), 0.1)), _arrays(model)
        theirs, rows = SGD(alone.parameters(), 0.1), [param._local_tensor for param in model.parameters()]
        for kept in (arrays, rows):
            for _ in range(2):
                for mine, step in ((model, optimizer), (alone, theirs)):
                    mine(x).sum().backward()
                    step.step()
                    step.zero_grad()
                with torch.no_grad():
                    for each in kept:
                        each *= 1.5
                    for its in alone.parameters():
                        its.mul_(1.5)
                torch.testing.assert_close(model(x), alone(x), msg=f"kept, {strategy}")


def _arrays(model: nn.Module) -> list[Any]:
    return [param.detach().to_local().numpy() for param in model.parameters()]


@on_ranks(2)
def test_former_values_outlive_an_assignment_of_data() -> None:
    """As in torch: what refers to a parameter's memory keeps its values, and the new values refer to the parameter."""
    for strategy in (1, 3):
        for build in (_linear, lambda: parity.build(lambda: nn.Linear(5, 1, bias=False))):  # one row
            _assign_data(fully_shard_model(build(), zero_dp_strategy=strategy), build())


def _assign_data(model: nn.Module, alone: nn.Module) -> None:
    def both(what: Callable[[Any], Any]) -> None:
        for mine, its in zip(map(what, model.parameters()), map(what, alone.parameters()), strict=True):
            for one, other in zip(mine, its, strict=True):
                whole = one.full_tensor() if isinstance(one, DTensor) else one
                torch.testing.assert_close(whole, other)

    kept: dict[Any, Any] = {}

    def back_up(param: Any) -> None:
        rows = param.detach()
        kept[param] = [param.data, rows, param.data.view(-1), rows[0], rows.t() if rows.ndim > 1 else rows, param[-1]]

    def assign(param: Any) -> None:
        param.data = param.data * 1.5
        param.data -= 0.1 * param.data

    def restore(param: Any) -> None:
        param.data = kept[param][0]

    def swap(param: Any) -> None:
        kept[param][0], param.data = param.data, kept[param][0].clone() * 3

    def write_to_what_was_assigned(param: Any) -> None:
        values = param.detach().clone()
        param.data = values
        values.mul_(0.5)
        alias = param.detach()
        alias.data = values * 7

    with torch.no_grad():
        for change in (back_up, assign, restore, assign, assign, restore, swap, restore, write_to_what_was_assigned):
            both(lambda param, change=change: (change(param), param, *kept[param])[1:])
            torch.testing.assert_close(model(torch.ones(2, 5)), alone(torch.ones(2, 5)))
        for param in model.parameters():
            before, rows = param.full_tensor(), param.to_local()
            values = rows.clone()
            param.data = param.data + 1
            assert torch.equal(rows, values)
            array, name = param.to_local().numpy(), param.row_split.name
            with pytest.raises(RuntimeError, match=rf"The .data of .{name}. is assigned while a tensor or array"):
                param.data = param.data + 1
            assert torch.equal(param.full_tensor(), before + 1)
            del array
            with pytest.raises(RuntimeError, match="weakref"):
                torch.utils.swap_tensors(param, nn.Parameter(param.detach().clone()))


@on_ranks(2, 3)
def test_random_initialization_draws_what_one_process_draws() -> None:
    model, whole = bag()

    def initialize(tensors: dict[str, Any]) -> None:
        torch.manual_seed(5)
        for tensor in tensors.values():
            nn.init.normal_(tensor, std=0.3)
        for tensor in tensors.values():
            nn.init.trunc_normal_(tensor)
        nn.init.kaiming_uniform_(tensors["matrix"])
        nn.init.xavier_normal_(tensors["cube"])

    params = dict(model.named_parameters())
    initialize(params)
    initialize(whole)
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
        again = pickle.loads(pickle.dumps(param))
        assert isinstance(again, nn.Parameter)
        assert torch.equal(again.full_tensor(), whole[name])
    with raises_everywhere(TypeError, "cannot be pickled", "state_dict"):
        pickle.dumps(model)


MIXED: dict[str, Callable[[Any], Any]] = {
    "matmul": lambda p: p @ torch.randn(5, 2),
    "transposed": lambda p: p.t() @ torch.randn(7, 2),
    "other tensor": lambda p: torch.cat([p, torch.randn(2, 5)]),
    "shape": lambda p: p.t_(),
}


@pytest.mark.parametrize("name", MIXED)
@on_ranks(2)
def test_what_cannot_be_computed_says_so(name: str) -> None:
    model, whole = bag()
    state = torch.zeros_like(model.matrix.detach())
    with torch.no_grad(), raises_everywhere(RuntimeError, "'matrix'", "full_tensor()"):
        MIXED[name](state)
    assert torch.equal(model.matrix.full_tensor(), whole["matrix"])


class Teacher(nn.Module):
    """A trained and a frozen module of the same shapes, which are in different buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = zoo.Bag(), zoo.Bag()
        self.head = nn.Linear(5, 13)
        self.teacher.requires_grad_(False)
        with torch.no_grad():
            for number, param in enumerate(self.teacher.parameters()):
                param.add_(number + 1)


AVERAGES: dict[str, Callable[[list[Any], list[Any]], None]] = {
    "each": lambda mine, its: [k.mul_(0.9).add_(q, alpha=0.1) for k, q in zip(mine, its, strict=True)],
    "foreach": lambda mine, its: (torch._foreach_mul_(mine, 0.9), torch._foreach_add_(mine, its, alpha=0.1)),
    "lerp": lambda mine, its: [k.lerp_(q, 0.1) for k, q in zip(mine, its, strict=True)],
    "foreach lerp": lambda mine, its: torch._foreach_lerp_(mine, its, 0.1),
    "copy": lambda mine, its: [k.copy_(q * 2 - k) for k, q in zip(mine, its, strict=True)],
    "foreach copy": lambda mine, its: torch._foreach_copy_(mine, its),
    "data": lambda mine, its: [setattr(k, "data", 0.9 * k.data + 0.1 * q.data) for k, q in zip(mine, its, strict=True)],
    "three": lambda mine, its: [k.addcmul_(q, q).where(q > 0, k) for k, q in zip(mine, its, strict=True)],
    "to whole": lambda mine, its: [k.sub_(q.detach().double() ** 2) for k, q in zip(mine, its, strict=True)],
}


@on_ranks(2, 3)
def test_parameters_whose_rows_lie_on_different_ranks() -> None:
    """Operations on parameters whose rows are on different ranks give the same bits as on whole tensors.

    The parameters are in one model, or in two that are sharded in different ways.
    """
    other = {"zero_dp_strategy": 0}, {"zero_dp_strategy": 3, "optimizer_block_size": 64}
    for arguments in ({"zero_dp_strategy": 3}, {"zero_dp_strategy": 1}, *other):
        model = fully_shard_model(Teacher(), **arguments).module
        peer = fully_shard_model(Teacher(), zero_dp_strategy=3).module
        pairs = [(model.teacher, model.student), (model.teacher, peer.student), (peer.student, model.teacher)]
        pairs.append((model.student, model.teacher))  # rows of ranks other than the first move too
        todo = [(pair, "foreach lerp") for pair in pairs]
        if arguments == {"zero_dp_strategy": 3}:
            todo += [(pairs[0], name) for name in AVERAGES]
        for (mine, its), name in todo:
            pair = [[p.full_tensor() for p in each.parameters()] for each in (mine, its)]
            with torch.no_grad():
                AVERAGES[name](list(mine.parameters()), list(its.parameters()))
                AVERAGES[name](*pair)
            for got, expected in zip(mine.parameters(), pair[0], strict=True):
                assert torch.equal(got.full_tensor(), expected), (arguments, name)
        model.teacher.load_state_dict(model.student.state_dict())
        assert all(map(torch.equal, model.teacher.parameters(), model.student.parameters()))
        assert all(map(torch.allclose, model.teacher.parameters(), model.student.parameters()))
        peer.load_state_dict(model.state_dict())
        assert all(map(torch.equal, peer.parameters(), model.parameters()))
    with raises_everywhere(RuntimeError, "must match the size"):
        model.student.matrix + model.head.weight


@on_ranks(2)
def test_rows_of_several_dtypes_move_at_once() -> None:
    module = Teacher()
    # These are in front of the student's parameters, so that all of these have other places than the teacher's.
    module.head, module.other = module.head.bfloat16(), nn.Linear(9, 9)
    for each in (module.student, module.teacher):
        each.matrix = nn.Parameter(each.matrix.detach().bfloat16(), requires_grad=each.matrix.requires_grad)
    policy = MixedPrecisionPolicy(main_params_dtype=None)  # the dtype of each parameter
    model = fully_shard_model(module, mixed_precision_policy=policy).module
    mine, its = list(model.teacher.parameters()), list(model.student.parameters())
    with torch.no_grad():
        torch._foreach_lerp_(mine, its, 1.0)  # the two tensors of a pair must have the same dtype
    for got, expected in zip(mine, its, strict=True):
        assert torch.equal(got.full_tensor(), expected.full_tensor())
    assert [each.dtype for each in torch._foreach_add(mine, its)] == [each.dtype for each in its]


@on_ranks(2)
def test_rows_from_the_middle_of_a_parameter_move() -> None:
    """Rows from the middle of a parameter move between two models in which ranks cut a matrix at different rows."""

    def build(before: int) -> Any:
        module = nn.Module()
        module.before, module.matrix = nn.Parameter(torch.randn(before, 64)), nn.Parameter(torch.randn(60, 64))
        return fully_shard_model(module).module

    torch.manual_seed(0)
    short, long = build(8), build(20)
    cuts = [len(model.matrix.to_local()) for model in (short, long)]
    assert 0 < min(cuts) < max(cuts) < 60, cuts
    whole = [model.matrix.full_tensor() for model in (short, long)]
    with torch.no_grad():
        short.matrix.add_(long.matrix)
        long.matrix.sub_(short.matrix * 2)
    assert torch.equal(short.matrix.full_tensor(), whole[0] + whole[1])
    assert torch.equal(long.matrix.full_tensor(), whole[1] - (whole[0] + whole[1]) * 2)


def test_ranks_are_told_apart_by_their_strides() -> None:
    """Groups of the same size and rank are distinguished by their stride.

    Of four ranks, rank 0 is the first of ranks 0 and 1, and of ranks 0 and 2.
    """
    inner, outer, same = (
        SimpleNamespace(shard_groups=[SimpleNamespace(size=2, rank=0, stride=stride)]) for stride in (1, 2, 1)
    )
    assert same_ranks(inner, same)  # type: ignore[arg-type]
    assert not same_ranks(inner, outer)  # type: ignore[arg-type]


@on_ranks(2)
def test_collectives_of_rows_that_move() -> None:
    model = fully_shard_model(Teacher())
    group = compat.process_group(model.sharded.topology.inner.name)
    mine, its = list(model.module.teacher.parameters()), list(model.module.student.parameters())
    before = compat.collectives_started(group)
    with torch.no_grad():
        torch._foreach_lerp_(mine, [param.detach().clone() for param in mine], 0.1)
        assert compat.collectives_started(group) == before
        torch._foreach_lerp_(mine, its, 0.1)
        assert compat.collectives_started(group) == before + 1
        mine[0].add_(its[0])
        assert compat.collectives_started(group) == before + 2


@on_ranks(2)
def test_penalty_between_parameters_on_different_ranks() -> None:
    """Gradients of a penalty between parameters on different ranks return to the ranks of the rows."""
    if not compat.DTENSOR_SUBCLASSES_DISPATCH:
        return

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(4, 64), nn.Linear(4, 64)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).sum() - self.b(x).sum() * 2

    model, alone = fully_shard_model(Two()), Two()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone)]
    for _ in range(3):
        for each, optimizer in zip((model, alone), optimizers, strict=True):
            module = getattr(each, "module", each)
            loss = each(torch.ones(2, 4)) + (module.a.weight - module.b.weight).pow(2).sum()
            (loss + F.mse_loss(module.a.bias, module.b.bias)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), its, rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_regularisation_through_parameters() -> None:
    """The gradient of a penalty on the shards adds to the gradients of the forward."""

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
    """Users can read, clear and set ``.grad``, and the next backward adds to it."""
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
    kept = bias.grad
    before = kept.full_tensor()
    for factor in (1, 2):  # bias.grad is dropped, weight.grad stays
        assert torch.equal(weight.grad.full_tensor(), alone.weight.grad)
        assert torch.equal(bias.grad.full_tensor(), alone.bias.grad)
        bias.grad = alone.bias.grad = None
        for each in (model, alone):
            (factor * each(x)).sum().backward()
    assert torch.equal(kept.full_tensor(), before)  # the dropped gradient is unchanged for those that hold it
    with raises_everywhere(RuntimeError):
        weight.grad = torch.zeros(2, 2)


@on_ranks(2)
def test_gradients_that_change_places() -> None:
    """Gradients can be swapped between parameters. Of a whole tensor as a gradient, each rank takes its rows."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(5, 7), nn.Linear(5, 7)

        def forward(self, x: Tensor) -> Tensor:
            return (self.one(x) * self.other(2 * x)).sum()

    alone = parity.build(Two)
    model = fully_shard_model(parity.build(Two))
    x, rows = torch.arange(15.0).view(3, 5), torch.arange(35.0).view(7, 5)
    for each in (model, alone):
        each(x).backward()
    for each in (model.module, alone):
        each.one.weight.grad, each.other.weight.grad = each.other.weight.grad, each.one.weight.grad
    for each in (model, alone):
        each(x).backward()
    alone.one.bias.grad.mul_(3)
    gradient = model.module.one.bias.grad
    gradient._local_tensor = gradient._local_tensor * 3  # as in programs that know DTensors
    for each in (model, alone):
        each(x).backward()
    model.module.one.weight.grad = rows
    alone.one.weight.grad = rows
    for each in (model, alone):
        each(x).backward()
    for name, param in model.module.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), alone.get_parameter(name).grad)
        param.grad = alone.get_parameter(name).grad / 100
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    optimizer.step()
    for param, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(param.full_tensor(), its - its.grad / 100)


@on_ranks(2)
def test_statistics_of_two_tensors() -> None:
    """Comparisons and losses between two parameters, sharded or whole, give correct values and gradients."""
    model, whole = bag()
    assert torch.allclose(model.matrix, whole["matrix"] + 1e-9)
    assert not torch.allclose(model.matrix, whole["matrix"] + 1)
    vector = model.vector.detach()
    torch.testing.assert_close(torch.dot(vector, whole["vector"]), whole["vector"].square().sum())
    torch.testing.assert_close(torch.linalg.norm(vector).full_tensor(), torch.linalg.norm(whole["vector"]))
    assert torch.isfinite(model.matrix).all()
    assert model.matrix.numel() == 35
    if not compat.DTENSOR_SUBCLASSES_DISPATCH:
        return
    alone = zoo.Bag()
    for loss in (
        F.mse_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.l1_loss,
        torch.dist,
        lambda p, q: (p - q).var() + p.std(),
    ):
        for name in ("matrix", "vector", "cube"):
            mine, its, target = getattr(model, name), getattr(alone, name), torch.full(zoo.Bag.SHAPES[name], 0.2)
            mine.grad = its.grad = None
            loss(mine, target).backward()
            loss(its, target).backward()
            torch.testing.assert_close(mine.grad.full_tensor(), its.grad)


@on_ranks(2)
def test_torchs_tools() -> None:
    """torch's tools that watch operators see those of a sharded model."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    functional = torch.ops.c10d_functional
    for mode in (parity.EAGER, parity.AOT_EAGER):
        model, call = parity.shard(parity.build(zoo.Plain), mode)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
        for tool in (CommDebugMode(), FlopCounterMode(display=False), MemTracker(), Watch()):
            if isinstance(tool, MemTracker):
                tool.track_external(model, optimizer)
            with tool:
                call(torch.ones(2, 8)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            optimizer.zero_grad()
            if isinstance(tool, CommDebugMode):
                units = len(model.sharded.buckets)
                counts = tool.get_comm_counts()
                # The last unit of the forward is not gathered again.
                assert counts[functional.reduce_scatter_tensor] == units
                assert counts[functional.all_gather_into_tensor] == 2 * units - 1
            if isinstance(tool, FlopCounterMode):
                assert tool.get_total_flops() > 0
