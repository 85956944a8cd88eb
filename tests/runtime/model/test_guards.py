"""Permanent checks, and model.verify_step."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
from pool import on_ranks, shared_folder
from torch import Tensor, nn

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints
from mfsdp_compile.runtime.memory import gradients

EAGER = {"inner": "aot_eager"}


class Net(nn.Module):
    """A model with running statistics, and on request a part that no loss depends on."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.extra = nn.Linear(8, 4) if unused else None

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.dropout(self.norm(self.first(x)), 0.5, train=True))


def make(unused: bool = False, **kwargs: Any) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = fully_shard_model(Net(unused), fsdp_unit_modules=[nn.Linear], **kwargs)
    return model, fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))


def inputs(rank_matters: bool = False) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank() if rank_matters else 7))


def step(model: Any, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# -- guards -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_good_step_says_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for strategy in range(4):
            model, optimizer = make(zero_dp_strategy=strategy)
            step(model, optimizer, inputs())
            step(model, optimizer, inputs())


@on_ranks(2)
def test_parameters_without_gradient_are_named_once() -> None:
    model, optimizer = make(unused=True)
    with parity.first_rank_warns(RuntimeWarning, match=r"160 of 196 trainable elements, none of 'extra'"):
        step(model, optimizer, inputs())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer, inputs())


@on_ranks(2)
def test_buffers_that_differ_are_named() -> None:
    model, optimizer = make()
    with parity.first_rank_warns(
        RuntimeWarning, match=r"Buffers differ between ranks at the first step: 'norm.running_mean'"
    ):
        step(model, optimizer, inputs(rank_matters=True))
    with parity.first_rank_warns(RuntimeWarning, match=r"where a checkpoint is saved: 'norm.running_mean'"):
        Checkpoints(shared_folder()).save(1, model, optimizer)


@on_ranks(2)
def test_gradients_that_are_not_finite_are_named() -> None:
    model, optimizer = make()
    x = inputs()
    if dist.get_rank() == 1:
        x[0, 0] = float("inf")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(model, optimizer, x)
    told = [str(w.message) for w in caught if "not finite" in str(w.message)]
    assert len(told) == (dist.get_rank() == 0)
    assert all("'first.weight'" in each and "rank 0" in each for each in told)  # every rank has the sum


@on_ranks(2)
def test_gradients_beside_their_bucket_are_an_error() -> None:
    """Gradients that are not views of their bucket, as with views at wrong offsets, are an error on all ranks."""
    model, optimizer = make()
    model(inputs()).pow(2).mean().backward()
    before = copy.deepcopy(model.state_dict())
    bucket = model.sharded.buckets[0]
    real = gradients.flat_gradient
    if dist.get_rank() == 1:
        gradients.flat_gradient = lambda b: real(b) * 1.01 if b is bucket else real(b)  # type: ignore[operator]
    try:
        with pytest.raises(RuntimeError, match=r"On rank 1, the gradient of bucket 'first' has norm"):
            optimizer.step()
    finally:
        gradients.flat_gradient = real
    for name, value in model.state_dict().items():
        value, old = (v.to_local() if hasattr(v, "to_local") else v for v in (value, before[name]))
        assert torch.equal(value, old)


@on_ranks(2)
def test_guards_can_be_turned_off() -> None:
    import os

    os.environ["MFSDP_GUARDS"] = "0"
    try:
        model, optimizer = make(unused=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(model, optimizer, inputs(rank_matters=True))
    finally:
        del os.environ["MFSDP_GUARDS"]


# -- verify_step ------------------------------------------------------------------------------------------------------


@pytest.mark.long_if("*-3")
@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_verify_step_changes_nothing(strategy: int) -> None:
    model, optimizer = make(zero_dp_strategy=strategy)
    other, other_optimizer = make(zero_dp_strategy=strategy)
    for each in ((model, optimizer), (other, other_optimizer)):
        torch.manual_seed(1)
        step(*each, inputs())
    state = torch.get_rng_state()
    told = model.verify_step(inputs())
    assert str(told) == f"{told.tensors} tensors, equal to the bit"
    assert told.tensors == 1 + 3 + 6
    assert torch.equal(torch.get_rng_state(), state)
    for each in ((model, optimizer), (other, other_optimizer)):
        torch.manual_seed(2)
        step(*each, inputs())
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        a, b = (v.to_local() if hasattr(v, "to_local") else v for v in (a, b))
        assert torch.equal(a, b), name


@on_ranks(2)
def test_verify_step_names_the_first_tensor_that_differs() -> None:
    model, _ = make()

    def wrong(graph: Any, context: Any, phase: Any) -> None:
        """Compute something else on one rank, in a way unrelated to sharding."""
        if phase.value != "backward" or dist.get_rank() == 0:
            return
        tangent = next(n for n in graph.nodes if n.op == "placeholder" and n.name.startswith("tangents"))
        with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
            scaled = graph.call_function(torch.ops.aten.mul.Tensor, (tangent, 1.5))
        scaled.meta = dict(tangent.meta)
        tangent.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)

    with pytest.raises(RuntimeError, match=r"Compiled and eager differ\. rank 0: gradient of last\.weight: .* rank 1"):
        model.verify_step(inputs(), options={"inner": "aot_eager", "passes": [wrong]})
    assert str(model.verify_step(inputs())).endswith("equal to the bit")


@pytest.mark.long
@on_ranks(2)
def test_verify_step_with_inductor() -> None:
    model, _ = make()
    told = model.verify_step(inputs(), options={"inner": "inductor"})
    assert told.largest < 1e-3


@on_ranks(2)
def test_verify_step_between_steps_only() -> None:
    model, _ = make(zero_dp_strategy=0)
    with model.no_sync():
        model(inputs()).sum().backward()
    with pytest.raises(RuntimeError, match="were waiting to be reduced"):
        model.verify_step(inputs())
