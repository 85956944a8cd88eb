"""FSDP2's interface: parameters that some calls of ``fully_shard`` ignore, beside FSDP2."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import raises_everywhere
from pool import on_ranks
from test_fsdp2_list import Results, assert_same, mine, mlp, same, state, steps
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from mfsdp_compile import fsdp2, fully_shard_model
from mfsdp_compile.runtime import compat


def two() -> nn.Sequential:
    return nn.Sequential(mlp(), mlp())


def kinds(model: nn.Module) -> list[bool]:
    return [isinstance(param, DTensor) for param in model.parameters()]


def train(model: nn.Module, call: Any = None) -> Results:
    """Train with plain SGD, which needs no mixture of kinds in one foreach list."""
    results: Results = [kinds(model)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
    for _ in range(2):
        loss = (call or model)(mine(4, 8)).square().mean()
        loss.backward()
        results += [loss.detach().clone(), state(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, state(model)]


def only_the_root(api: Any) -> nn.Module:
    model = two()
    ignored = {model[0][0].weight, model[1][0].bias}
    api.fully_shard(model[0])
    return api.fully_shard(model, ignored_params=ignored)


def only_the_root_by_sharded_parameters(api: Any) -> nn.Module:
    model = two()
    api.fully_shard(model[0])
    return api.fully_shard(model, ignored_params={model[0][0].weight, model[1][0].bias})


def only_a_unit(api: Any) -> nn.Module:
    model = two()
    api.fully_shard(model[0], ignored_params={model[0][0].weight})
    return api.fully_shard(model)


def one_set_and_no_root(api: Any) -> nn.Module:
    model = two()
    ignored = {model[0][0].weight, model[1][2].bias}
    for block in model:
        api.fully_shard(block, ignored_params=ignored)
    return model


def a_part_of_a_plain_model(api: Any) -> nn.Module:
    model = two()
    api.fully_shard(model[0], ignored_params={model[0][0].weight, model[1][0].weight})
    return model


def tied_and_ignored_everywhere(api: Any) -> nn.Module:
    model = two()
    model[1][0].weight = model[0][0].weight
    for block in model:
        api.fully_shard(block, ignored_params={model[0][0].weight})
    return api.fully_shard(model)


def replaced(api: Any, last: bool = True, whole: bool = False, steps_first: bool = False) -> nn.Module:
    """Replace an ignored parameter, of a module that has others or none, before or after the model is sharded."""
    model = two()
    ignored = set(model[0].parameters()) if whole else {model[0][0].weight}
    api.fully_shard(model[0], ignored_params=ignored)
    if last:
        api.fully_shard(model, ignored_params=ignored)
    if steps_first:
        steps(model, mine(4, 8), count=1)
    model[0][0].weight = nn.Parameter(torch.full((16, 8), 0.1))
    return model if last else api.fully_shard(model)


WAYS: list[Callable[[Any], nn.Module]] = [
    only_the_root,
    only_the_root_by_sharded_parameters,
    only_a_unit,
    one_set_and_no_root,
    a_part_of_a_plain_model,
    tied_and_ignored_everywhere,
    replaced,
    lambda api: replaced(api, last=False),
    lambda api: replaced(api, whole=True),
    lambda api: replaced(api, steps_first=True),
]


@on_ranks(2)
def test_each_call_ignores_parameters_of_its_own_modules() -> None:
    """The innermost ``fully_shard`` around a parameter decides; what replaces an ignored one is ignored, too."""
    for way in WAYS:
        same(lambda api, way=way: train(way(api)), rtol=1e-6)


@on_ranks(2)
def test_replaced_and_compiled() -> None:
    torch.manual_seed(0)
    expected = train(replaced(fsdp2))
    torch.manual_seed(0)
    model = replaced(fsdp2)
    call = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager"})
    assert_same(train(model, call), expected, rtol=1e-6)
    before = call(mine(4, 8)).detach()
    model[0][0].weight = nn.Parameter(torch.full((16, 8), 0.3))
    assert not torch.equal(call(mine(4, 8)), before)


@on_ranks(2)
def test_replaced_in_a_model_of_fully_shard_model() -> None:
    model = two()
    sharded = fully_shard_model(model, fsdp_unit_modules=[nn.Sequential], ignored_params={model[0][0].weight})
    sharded(mine(4, 8)).sum().backward()
    model[0][0].weight = nn.Parameter(torch.zeros(16, 8))
    sharded(mine(4, 8)).sum().backward()
    assert model[0][0].weight.grad is not None
    assert sharded.sharded.ignored == {"0.0.weight": model[0][0].weight}
    with raises_everywhere(RuntimeError, "'weight' of Linear is sharded and cannot be replaced"):
        model[1][0].weight = nn.Parameter(torch.zeros(16, 8))
    model.more = nn.Linear(8, 8)
    with raises_everywhere(RuntimeError, "'more.weight' came after fully_shard_model"):
        sharded(mine(4, 8))


@on_ranks(2)
def test_tied_and_ignored_in_one_place() -> None:
    """FSDP2 unties such a parameter in silence. Nothing has changed after the error."""
    for first, second in ((True, False), (False, True)):
        model = two()
        model[1][0].weight = model[0][0].weight
        ignored = {model[0][0].weight}
        fsdp2.fully_shard(model[0], ignored_params=ignored if first else None)
        fsdp2.fully_shard(model[1], ignored_params=ignored if second else None)
        fsdp2.fully_shard(model)
        with pytest.raises(ValueError, match=r"are tied, and only the first one is ignored"):
            model(mine(4, 8))
        with pytest.raises(ValueError, match=r"'0.0.weight'.*'1.0.weight'|'1.0.weight'.*'0.0.weight'"):
            list(model.parameters())


NORMS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "foreach": lambda gradients: torch.stack(torch._foreach_norm(gradients)).norm(),
    "stack": lambda gradients: torch.stack([g.norm() for g in gradients]).norm(),
    "cat": lambda gradients: torch.cat([g.norm(3)[None] for g in gradients]).norm(3),
    "sum": lambda gradients: sum(g.pow(2).sum() for g in gradients).sqrt(),  # type: ignore[union-attr]
    "stacked sums": lambda gradients: torch.stack([g.pow(2).sum() for g in gradients]).sum().sqrt(),
    "maximum": lambda gradients: torch.stack([g.abs().max() for g in gradients]).max(),
}
APART = "sum" if compat.TORCH_VERSION < (2, 13) else "cat" if compat.TORCH_VERSION >= (2, 14) else ""
COMPARED = [name for name in NORMS if name != APART]
"""FSDP2 gives each rank a norm of its own by ``sum`` in torch 2.11, and by ``cat`` in torch 2.15, which makes whole
norms of all before it joins them."""


@on_ranks(2)
def test_norms_with_gradients_of_ignored_parameters() -> None:
    """Their gradients are this rank's own. All ranks have one norm, FSDP2's, and scale all rows by the same factor."""

    def norms(api: Any) -> Results:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        api.fully_shard(model, ignored_params={model[0].bias, model[1].weight})
        results: Results = []
        for norm in (*(NORMS[name] for name in COMPARED), 2.0, 3.0, math.inf):
            model.zero_grad()
            (model(mine(2, 8)) * (1 + 9 * dist.get_rank())).sum().backward()
            with implicit_replication(), torch.no_grad():
                if isinstance(norm, float):
                    found = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm)
                else:
                    found = norm([param.grad for param in model.parameters()])
                results += [found.full_tensor() if isinstance(found, DTensor) else found, state(model)]
        return results

    same(norms, rtol=1e-5)
    model = fsdp2.fully_shard(layer := nn.Linear(8, 8), ignored_params={layer.bias})
    (model(mine(2, 8)) * (1 + 9 * dist.get_rank())).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).full_tensor()  # FSDP2 raises here
    others = [torch.empty_like(norm) for _ in range(2)]
    dist.all_gather(others, norm)
    assert torch.equal(*others)
    loss = model(mine(2, 8)).sum()
    penalty = model.weight.sum()
    assert torch.equal(loss + penalty, loss + penalty.full_tensor())  # a loss stays this rank's
