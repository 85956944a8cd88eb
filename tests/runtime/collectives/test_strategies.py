"""Every strategy, accumulation and scaling gives the gradients of one process.

``pytest tests/runtime/collectives/test_strategies.py -k table -s`` prints the table: strategies x ways of accumulating
x compiled and eager x scalings, with three microbatches on four ranks. Each cell is compared with an independent
computation in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.diagnostics.doctor import (
    SCALINGS,
    STRATEGIES,
    cells,
    expected_gradients,
    mesh_arguments,
    wrong_gradients,
)
from mfsdp_compile.diagnostics.measure import collectives


def make(strategy: str, mode: str, factory: Callable[[], nn.Module] = zoo.Uneven, **arguments: Any) -> Any:
    """Return a sharded model and what to call in its place."""
    model = fully_shard_model(
        parity.build(factory), fsdp_unit_modules=[zoo.Block], **mesh_arguments(strategy), **arguments
    )
    if mode == EAGER:
        return model, model
    return model, torch.compile(model, backend="mfsdp", options={"inner": mode})


# Scalings other than the mean differ only in constants. Except for the eager sums, these rows are in the long set, and
# in mfsdp doctor --table.
SHORT = {(EAGER, "mean"), (AOT_EAGER, "mean"), (EAGER, "sum")}
ROWS = [
    pytest.param(strategy, mode, scaling, marks=[] if (mode, scaling) in SHORT else [pytest.mark.long])
    for strategy in STRATEGIES
    for mode in (EAGER, AOT_EAGER)
    for scaling in SCALINGS
]


@pytest.mark.long_unless("*-optim_grads_params-aot_eager-*", "*-HFSDP optim_grads-eager-mean")
@pytest.mark.parametrize(("strategy", "mode", "scaling"), ROWS)
@on_ranks(4)
def test_table(strategy: str, mode: str, scaling: str) -> None:
    found = cells(strategy, mode, scaling)
    if dist.get_rank() == 0:
        print()
        for cell in found:
            verdict = "WRONG " + ", ".join(cell.wrong) if cell.wrong else "ok"
            print(f"{strategy:24} {mode:9} {scaling:18} {cell.way:20} {cell.microbatches} microbatches  {verdict}")
    assert not [cell for cell in found if cell.wrong]


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_sums_that_are_reduced_twice_between_steps(mode: str) -> None:
    """What was reduced once is in ``.grad``, and in no later sum: two reductions of two microbatches each."""
    data = torch.randn(4, dist.get_world_size(), 3, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for ends in ((1, 3), (0, 1, 2, 3)):
        model, call = make("optim", mode, sync_model_each_microbatch=False)
        for number, micro in enumerate(data):
            model.is_last_microbatch = number in ends
            call(micro[dist.get_rank()]).backward()
        found.append([param.grad.full_tensor() for param in model.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)  # the same four microbatches, added in another order


# -- compiled against eager, strategies against each other ------------------------------------------------------------


def _run(strategy: str, mode: str, microbatches: int, **arguments: Any) -> list[Tensor]:
    """Return whole losses, gradients and parameters of three steps of AdamW."""
    model, call = make(strategy, mode, **arguments)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    results = []
    for step in range(3):
        data = torch.randn(microbatches, dist.get_world_size(), 3, 8, generator=torch.Generator().manual_seed(step))
        for i, micro in enumerate(data):
            model.is_last_microbatch = i == microbatches - 1
            loss = call(micro[dist.get_rank()])
            loss.backward()
            results.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        results += [param.grad.full_tensor() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return results + [param.full_tensor().detach() for param in model.parameters()]


@pytest.mark.long
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_compiled_equals_eager_bitwise(strategy: str) -> None:
    for a, b in zip(_run(strategy, EAGER, 2), _run(strategy, AOT_EAGER, 2), strict=True):
        assert torch.equal(a, b)


@pytest.mark.long
@on_ranks(4)
def test_strategies_agree_bitwise() -> None:
    """With one microbatch, all strategies that scatter gradients over the same ranks compute the same sums."""
    reference = _run("optim_grads_params", EAGER, 1)
    for strategy in ("optim", "optim_grads"):
        for a, b in zip(_run(strategy, EAGER, 1), reference, strict=True):
            assert torch.equal(a, b), strategy
    # An all-reduce sums in a different order. AdamW turns rounding into at most a step of lr; 1e-3 of one is allowed.
    for a, b in zip(_run("no_shard", EAGER, 1), reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "strategy", ["optim", "HFSDP", "HFSDP optim_grads", "no_shard", "HSDP optim", "HSDP optim_grads_params"]
)
@on_ranks(4)
def test_inductor(strategy: str) -> None:
    """Inductor's code agrees with one process up to rounding: 1e-5 of the largest gradient."""
    model, call = make(strategy, parity.INDUCTOR)
    alone = parity.build(zoo.Uneven)
    data = torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(7))
    for i, micro in enumerate(data):
        model.is_last_microbatch = i == len(data) - 1
        call(micro[dist.get_rank()]).backward()
    assert not wrong_gradients(model, expected_gradients(alone, data, "mean"))


# -- communication ----------------------------------------------------------------------------------------------------

# Collectives of a step with M microbatches over one trainable bucket that backward needs too, by when reductions are
# due: (gathers in use, gathers of what stays, reduce-scatters, all-reduces).
COUNTS: dict[str, Callable[[int, bool], tuple[int, int, int, int]]] = {
    "no_shard": lambda m, each: (0, 0, 0, m if each else 1),
    "optim": lambda m, each: (0, 1, m if each else 1, 0),
    "optim_grads": lambda m, each: (0, 1, m, 0),
    "optim_grads_params": lambda m, each: (2 * m, 0, m, 0),
    "HSDP no_shard": lambda m, each: (0, 0, 0, m if each else 1),
    "HSDP optim": lambda m, each: (0, 1, m if each else 1, m if each else 1),
    "HSDP optim_grads": lambda m, each: (0, 1, m, m if each else 1),
    "HSDP optim_grads_params": lambda m, each: (2 * m, 0, m, m if each else 1),
    "HFSDP optim": lambda m, each: (0, 2, 2 * (m if each else 1), 0),
    "HFSDP optim_grads": lambda m, each: (0, 2, m + (m if each else 1), 0),
    "HFSDP": lambda m, each: (2 * m, 1, m + (m if each else 1), 0),
}


class TwoMatrices(nn.Module):
    """One unit whose backward needs its weights, between two others, so that it is never the one that is kept."""

    class block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.weight)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoMatrices.block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()  # so that the first unit's backward also needs its weight
        for block in self.blocks:
            x = block(x)
        return x.sum()


@pytest.mark.long_unless("*-optim-eager")
@pytest.mark.parametrize(
    ("strategy", "mode"),
    [(s, m) for s in STRATEGIES for m in (EAGER, AOT_EAGER)],
)
@on_ranks(4)
def test_communication_of_a_step(strategy: str, mode: str) -> None:
    model = fully_shard_model(
        parity.build(TwoMatrices), fsdp_unit_modules=[TwoMatrices.block], **mesh_arguments(strategy)
    )
    call = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    x = torch.randn(4, 8)

    def step(microbatches: int, each: bool) -> None:
        for i in range(microbatches):
            model.is_last_microbatch = each or i == microbatches - 1
            call(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(1, True)  # compiles; gathers residents for the first time, and again after the step
    buckets = 3
    for microbatches in (1, 3):
        for each in (False, True):
            counts = collectives(lambda m=microbatches, e=each: step(m, e))
            gathers, residents, scatters, reduces = COUNTS[strategy](microbatches, each)
            # The unit that forward used last is kept for backward.
            kept = microbatches if gathers else 0
            assert counts["all_gather_into_tensor"] == gathers * buckets - kept, counts
            assert counts["all_gather_into_tensor_out"] == residents * buckets, counts
            assert counts["reduce_scatter_tensor"] == scatters * buckets, counts
            # Eager ranks find out which parameters were used whenever gradients are complete.
            often = each or strategy in ("optim_grads", "optim_grads_params")
            asks = (microbatches if often else 1) if mode == EAGER else 0
            assert counts["all_reduce"] == reduces * buckets + asks, counts


# -- details of accumulation ------------------------------------------------------------------------------------------


@on_ranks(2)
def test_context_managers_restore_what_they_found() -> None:
    model, _ = make("optim", EAGER)
    grad_sync = model.sharded.grad_sync
    for automatic in (True, False):
        model.set_model_auto_sync(automatic)
        with contextlib.suppress(ZeroDivisionError), model.no_sync():
            assert not grad_sync.is_due()
            with model.sync():
                assert grad_sync.is_due()
            assert not grad_sync.is_due()
            raise ZeroDivisionError
        assert grad_sync.is_due() == automatic
        assert model.model_auto_sync == automatic


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(4)
def test_gradients_that_wait_say_so(mode: str) -> None:
    for strategy in ("no_shard", "optim", "HSDP optim_grads_params", "HFSDP"):
        model, call = make(strategy, mode, sync_model_each_microbatch=False)
        alone = parity.build(zoo.Uneven)
        data = torch.randn(3, 4, 3, 8, generator=torch.Generator().manual_seed(7))
        call(data[0][dist.get_rank()]).backward()
        weight = model.module.head.weight
        for use in (
            lambda w=weight: w.grad + 1,
            lambda w=weight: w.grad.full_tensor(),
            lambda m=model: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0),
            lambda m=model: torch.optim.AdamW(m.parameters()).step(),
        ):
            with parity.raises_everywhere(RuntimeError, "not reduced yet", "finish_grad_sync"):
                use()
        assert "UnreducedGradient" in repr(weight.grad)
        # Dropped gradients are not part of the sum.
        for param in model.parameters():
            param.grad = None
        call(data[1][dist.get_rank()]).backward()
        for param in model.parameters():
            param.grad.zero_()
        call(data[2][dist.get_rank()]).backward()
        model.finish_grad_sync()
        assert not wrong_gradients(model, expected_gradients(alone, data[2:], "mean"))
        assert model.microbatch_count == 0


@pytest.mark.long_unless("*-False-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("to_none", [True, False])
@on_ranks(4)
def test_older_gradients_do_not_hide_that_newer_ones_wait(mode: str, to_none: bool) -> None:
    """A parameter that has a gradient already, or zeros, shows neither as the whole, nor steps with it."""
    for strategy in ("no_shard", "optim", "HSDP optim_grads_params", "HFSDP"):
        model, call = make(strategy, mode)
        alone = parity.build(zoo.Uneven)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.randn(3, 4, 3, 8, generator=torch.Generator().manual_seed(7))
        weight = model.module.head.weight
        call(data[0][dist.get_rank()]).backward()
        optimizer.zero_grad(set_to_none=False)
        call(data[1][dist.get_rank()]).backward()  # a whole gradient
        kept = data[1:]
        if to_none:
            optimizer.zero_grad()
            kept = data[2:]
        with model.no_sync():
            call(data[2][dist.get_rank()]).backward()
        before = weight.to_local().clone()
        for use in (
            lambda w=weight: w.grad.full_tensor(),
            lambda m=model: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0),
            lambda o=optimizer: o.step(),
        ):
            with parity.raises_everywhere(RuntimeError, "not reduced yet", "finish_grad_sync"):
                use()
        assert torch.equal(weight.to_local(), before)
        model.finish_grad_sync()
        assert not wrong_gradients(model, expected_gradients(alone, kept, "mean"))
        with model.no_sync():
            call(data[0][dist.get_rank()]).backward()
        optimizer.zero_grad(set_to_none=False)  # drops both parts
        call(data[2][dist.get_rank()]).backward()
        assert not wrong_gradients(model, expected_gradients(alone, data[2:], "mean"))


@on_ranks(4)
def test_no_step_is_taken_with_zeros_in_place_of_gradients_that_wait() -> None:
    """With cuda_graph_mode, parameters always show a gradient: here zeros. Weight decay would change them with it."""
    for strategy in ("no_shard", "optim", "HSDP optim_grads_params"):
        model, call = make(strategy, EAGER, cuda_graph_mode=True)
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5)
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
        call(x).backward()
        optimizer.zero_grad(set_to_none=False)
        before = [param.to_local().clone() for param in model.parameters()]
        with model.no_sync():
            call(x).backward()
        with parity.raises_everywhere(RuntimeError, "not reduced yet", "finish_grad_sync"):
            optimizer.step()
        assert all(torch.equal(param.to_local(), old) for param, old in zip(model.parameters(), before, strict=True))
        model.finish_grad_sync()
        optimizer.step()


@on_ranks(4)
def test_gradients_of_a_part_of_the_parameters_are_dropped() -> None:
    for strategy in ("optim", "HSDP optim_grads", "HFSDP"):
        model, call = make(strategy, EAGER, sync_model_each_microbatch=False)
        alone = parity.build(zoo.Uneven)
        data = torch.randn(2, 4, 3, 8, generator=torch.Generator().manual_seed(7))
        call(data[0][dist.get_rank()]).backward()
        model.module.blocks[0].up.weight.grad = None
        with model.sync():
            call(data[1][dist.get_rank()]).backward()
        expected = expected_gradients(alone, data, "mean")
        name = "blocks.0.up.weight"
        expected[name] = expected_gradients(alone, data[1:], "mean")[name]
        assert not wrong_gradients(model, expected)


@on_ranks(2)
def test_optimizer_that_is_told_not_to_synchronize() -> None:
    model, call = make("optim", EAGER, sync_model_each_microbatch=False)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    call(torch.randn(3, 8)).backward()
    with parity.raises_everywhere(RuntimeError, "not reduced yet"):
        optimizer.step(sync_grad_before_optimizer_step=False)
    optimizer.step()
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@on_ranks(4)
def test_hybrid_group_must_fit_the_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    arguments = {"device_mesh": mesh, "dp_shard_dim": "inner", "fsdp_unit_modules": [zoo.Block]}
    with parity.raises_everywhere(ValueError, "hybrid_fsdp_group has the ranks"):
        fully_shard_model(zoo.Plain(), dp_outer_dim="outer", hybrid_fsdp_group=mesh["inner"].get_group(), **arguments)
    with parity.raises_everywhere(ValueError, "not a dimension"):
        fully_shard_model(zoo.Plain(), dp_outer_dim="dp", hybrid_fsdp_group=dist.group.WORLD, **arguments)
    with parity.raises_everywhere(ValueError, "divide nothing"):
        fully_shard_model(
            zoo.Plain(),
            dp_outer_dim="outer",
            hybrid_fsdp_group=dist.group.WORLD,
            zero_dp_strategy=0,
            outer_dp_sharding_strategy="optim",
            **arguments,
        )


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["optim_grads_params", "HFSDP", "HFSDP optim", "optim", "HSDP optim_grads_params"])
@on_ranks(4)
def test_a_group_of_its_own_for_gathers(strategy: str) -> None:
    arguments = mesh_arguments(strategy)
    inner = dist.group.WORLD
    if "device_mesh" in arguments:
        inner = arguments["device_mesh"][arguments["dp_shard_dim"]].get_group()
    for_gathers, _ = dist.new_subgroups_by_enumeration(
        [[0, 1, 2, 3]] if inner is dist.group.WORLD else [[0, 1], [2, 3]]
    )
    model, _ = make(strategy, EAGER, fsdp_group_ag=for_gathers)
    topology, exchange = model.sharded.topology, model.sharded.buckets[0].exchange
    assert for_gathers.group_name not in exchange.lane.group_names
    used = [group.name for group in (*topology.resident_groups, topology.gather_group) if group is not None]
    assert for_gathers.group_name in used
    assert inner.group_name not in used
    expected = _run(strategy, EAGER, 2)
    for mode in (EAGER, AOT_EAGER):
        for a, b in zip(_run(strategy, mode, 2, fsdp_group_ag=for_gathers), expected, strict=True):
            assert torch.equal(a, b)


@on_ranks(4)
def test_a_group_for_gathers_must_have_the_same_ranks() -> None:
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    with parity.raises_everywhere(ValueError, "fsdp_group_ag has the ranks", "sharded over [0, 1, 2, 3]"):
        fully_shard_model(zoo.Plain(), fsdp_unit_modules=[zoo.Block], fsdp_group_ag=groups[dist.get_rank() // 2])


@on_ranks(2)
def test_whole_gradients_are_not_to_be_had_of_shards() -> None:
    model, _ = make("optim", EAGER)
    with parity.raises_everywhere(ValueError, "force_all_reduce", "no_shard"):
        model.finish_grad_sync(force_all_reduce=True)
    model, _ = make("no_shard", EAGER)
    model.finish_grad_sync(force_all_reduce=True)


@pytest.mark.long_unless("*-HFSDP-eager", "*-no_shard-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params", "HSDP optim_grads", "HFSDP"])
@on_ranks(4, timeout=90)
def test_weights_that_change_between_forward_and_backward(strategy: str, mode: str) -> None:
    model, call = make(strategy, mode)
    data = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(7))
    loss = call(data[dist.get_rank()])
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    with parity.raises_everywhere(RuntimeError, "in"):  # "in place" is our wording, "inplace" torch's
        loss.backward()
    # Training continues with the weights that were written.
    call(data[dist.get_rank()]).backward()
    alone = parity.build(zoo.Uneven)
    with torch.no_grad():
        for param in alone.parameters():
            param.mul_(2)
    assert not wrong_gradients(model, expected_gradients(alone, data[None], "mean"))
