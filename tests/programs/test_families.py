"""Model families, unmodified, compared with one process. The tables in docs/models.md show what these tests measure.

``MFSDP_WRITE_TABLES=1 pytest tests/programs/test_families.py`` rewrites them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from doc_tables import DOCS, check_rows
from failing import short_mesh
from families import FAMILIES, IMAGE_TOKENS, LENGTH, Family, tokens, with_image_tokens
from parity import AOT_EAGER, EAGER, INDUCTOR
from poisoning import poisoned
from pool import Pools, on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mfsdp_compile import explain, fully_shard_model
from mfsdp_compile.diagnostics.measure import collectives
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.memory.comm_buffers import BufferPool

BOUND = 1e-5
"""Bound on gradients, for float32 sums in another order.

It is relative to the parameter's largest gradient, or to 1 % of the model's where that is more. Where gradients cancel,
it is relative to the model's largest.
"""
STEPS = 3
HEADER = ("model", "mode", "units", "graphs", "graph breaks", "gathers", "reduce-scatters", "gradients differ by")
BREAKS = ("model", "why torch.compile breaks the graph", "in")

LONG = {"mixtral", "qwen3-moe-batched", "qwen3-moe-loop", "qwen2-vl", "llava-text", "llava-frozen"}
LONG |= {"gemma2", "phi3", "falcon", "mamba2", "jamba", "bert", "clip", "dinov2", "swin", "segformer"}
"""Families that resemble one with a shorter test, or that take long to compile in parts."""
WRONG_IN_TORCH = {"gpt-oss"} if (2, 12) <= compat.TORCH_VERSION < (2, 15) else set[str]()
"""Families that torch miscompiles; see compat.is_miscompiled."""
CHECKPOINTED = ("llama", "gpt2", "qwen3-moe", "t5", "vit", "mamba", "llava")
BREAKS_WHEN_CHECKPOINTED = ("t5",)  # its forward sets requires_grad of a tensor
SENSITIVE = ("resnet",)  # in float32, a change of 1e-6 flips a ReLU, which changes gradients by 0.3 in three steps


def families(*, long: set[str] = LONG) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.long] if name in long else []) for name in FAMILIES]


# -- training ---------------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """Results of one mode.

    Args:
        units: Units that the model is sharded by.
        graphs: Number of Dynamo's graphs.
        breaks: Reasons of graph breaks, with their functions.
        counts: Collectives of a step.
        difference: Largest difference of any gradient from that of one process.
    """

    units: int
    graphs: int = 0
    breaks: list[tuple[str, str]] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    difference: float = 0.0


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("name", families())
def test_training_is_that_of_one_process(name: str, pools: Pools) -> None:
    outcomes: dict[str, Outcome] = pools.of(2).run(train, name=name, modes=(EAGER, AOT_EAGER))[0]
    family = FAMILIES[name]
    for mode, outcome in outcomes.items():
        assert outcome.difference <= BOUND, (mode, outcome.difference)
        if family.fullgraph and mode != EAGER:
            assert (outcome.graphs, outcome.breaks) == (1, [])
    check_rows(DOCS / "models.md", "models", HEADER, rows(family, outcomes), keys=2, bounds={HEADER[-1]: BOUND})
    if not family.fullgraph:
        reasons = [(family.title, *reason) for reason in dict.fromkeys(outcomes[AOT_EAGER].breaks)]
        check_rows(DOCS / "models.md", "graph breaks", BREAKS, reasons, keys=3)


def rows(family: Family, outcomes: dict[str, Outcome]) -> list[tuple[object, ...]]:
    found = []
    for mode, of in outcomes.items():
        graphs = (of.graphs, len(of.breaks)) if mode != EAGER else ("", "")
        counts = of.counts["all_gather_into_tensor"], of.counts["reduce_scatter_tensor"]
        found.append(
            (family.title, "compiled" if graphs[0] else "eager", of.units, *graphs, *counts, f"{of.difference:.0e}")
        )
    return found


def make(family: Family, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return family.make(**options)


def train(
    name: str, modes: tuple[str, ...], checkpointed: bool = False, dtype: torch.dtype = torch.float32
) -> dict[str, Outcome]:
    """Run three steps of AdamW sharded, with different batches on each rank, and in one process with all batches."""
    rank, world_size, family = dist.get_rank(), dist.get_world_size(), FAMILIES[name]
    fullgraph = family.fullgraph and not (checkpointed and name in BREAKS_WHEN_CHECKPOINTED)

    def batch_of(seed: int) -> dict[str, Any]:
        return cast(family.batch_of(seed), dtype)

    alone = make(family).to(dtype)
    models, calls, outcomes = [], [], {}
    for mode in modes:
        module = make(family).to(dtype)
        if checkpointed:
            module.gradient_checkpointing_enable()
        model = fully_shard_model(module, fsdp_unit_modules="auto")
        with torch.no_grad():
            model(**batch_of(rank))  # the first forward of transformers models cannot be traced
        outcomes[mode] = Outcome(len(model.sharded.eager.units))
        call: Any = model
        if mode != EAGER:
            call = torch.compile(model, backend="mfsdp", fullgraph=fullgraph, options={"inner": mode})
            if not fullgraph:
                outcomes[mode].breaks = breaks_of(call, batch_of(rank))
        models.append(model)
        calls.append(call)
    optimizers = [adamw(m) for m in (alone, *models)]
    for step in range(STEPS):
        batches = [batch_of(100 * step + r) for r in range(world_size)]
        losses = [family.loss(alone(**batch)) for batch in batches]
        (sum(losses) / world_size).backward()
        expected = gradients_of(alone)
        for model, call, outcome in zip(models, calls, outcomes.values(), strict=True):
            outcome.counts = dict(collectives(lambda call=call: step_of(family, call, batches[rank], losses[rank])))
            outcome.graphs = len(model.sharded.compiled_graphs)
            outcome.difference = max(outcome.difference, largest_difference(family, model.module, expected))
            leave_out_the_same(alone, model.module)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return outcomes


def cast(batch: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in batch.items()}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with a large eps.

    With torch's default, rounding in gradients near zero becomes steps as long as lr. Then even one process in float64
    differs from itself by 3e-5 (in BERT's second step).
    """
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)


def step_of(family: Family, call: Any, batch: dict[str, Any], expected: Tensor) -> None:
    loss = family.loss(call(**batch))
    assert abs(loss - expected) <= BOUND * abs(expected), (loss, expected)
    loss.backward()


def gradients_of(alone: nn.Module) -> dict[str, Tensor]:
    """Return the gradients by name. None counts as zeros."""
    return {name: gradient_of(param) for name, param in alone.named_parameters() if param.requires_grad}


def gradient_of(param: Tensor) -> Tensor:
    """Return the whole gradient, also of a sharded parameter."""
    if param.grad is None:
        return torch.zeros(param.shape)
    return param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad


def leave_out_the_same(alone: nn.Module, sharded: nn.Module) -> None:
    """Set gradients of zeros where the sharded model has them. AdamW decays parameters with a gradient of zeros."""
    for mine, its in zip(sharded.parameters(), alone.parameters(), strict=True):
        if its.grad is None and mine.grad is not None:
            its.grad = torch.zeros_like(its)


def largest_difference(family: Family, module: nn.Module, expected: dict[str, Tensor]) -> float:
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    found = []
    for name, param in module.named_parameters():
        if not param.requires_grad:
            assert param.grad is None
            continue
        difference = (gradient_of(param) - expected[name]).abs().max().item()
        scale = largest if family.cancels(name) else max(expected[name].abs().max().item(), 1e-2 * largest)
        found.append(difference / scale)
    assert len(found) == len(expected)
    return max(found)


def breaks_of(call: Any, batch: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the reasons of graph breaks, each with its function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        told = explain(call, **batch).breaks
    found = []
    for line in told:
        reason, _, place = line.partition(" -- ")
        found.append((reason, place.partition(" in ")[2].partition(":")[0]))
    return found


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.cancelling])
def test_gradients_that_cancel_are_rounding(name: str) -> None:
    """Gradients that cancel are smaller in float64, so the bound on them hides no error."""
    family = FAMILIES[name]
    model = make(family).double()
    family.loss(model(**cast(family.batch_of(0), torch.float64))).backward()
    found = gradients_of(model)
    largest = max(gradient.abs().max().item() for gradient in found.values())
    cancelling = [gradient for name, gradient in found.items() if family.cancels(name)]
    assert cancelling
    assert all(gradient.abs().max().item() <= 1e-12 * largest for gradient in cancelling)


@pytest.mark.long
@pytest.mark.usefixtures("fake_world")
def test_what_torch_compiles_wrongly_is_said() -> None:
    """A model that torch miscompiles gets a warning, before anything is compiled."""

    class Stop(Exception):
        pass

    def stop(*_: Any) -> None:
        raise Stop

    for name in ("gpt-oss", "llama"):
        model = fully_shard_model(make(FAMILIES[name], layers=1), fsdp_unit_modules=[nn.Linear])
        compiled = torch.compile(model, backend="mfsdp", options={"passes": [stop]})
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            with pytest.raises(Exception, match="Stop"):
                compiled(**FAMILIES[name].batch_of(0))
        told = [w for w in found if "routers of GPT-OSS" in str(w.message)]
        assert bool(told) == (name in WRONG_IN_TORCH)


@pytest.mark.long
@pytest.mark.parametrize("name", [n for n, family in FAMILIES.items() if family.fullgraph and n not in WRONG_IN_TORCH])
@on_ranks(2, timeout=480)
def test_inductor_training_is_that_of_one_process(name: str) -> None:
    dtype = torch.float64 if name in SENSITIVE else torch.float32
    (outcome,) = train(name, (INDUCTOR,), dtype=dtype).values()
    assert outcome.difference <= BOUND, outcome.difference
    assert outcome.graphs == 1


@pytest.mark.long
@pytest.mark.parametrize("name", CHECKPOINTED)
@on_ranks(2)
def test_checkpointed_training_is_that_of_one_process(name: str) -> None:
    for mode, outcome in train(name, (EAGER, AOT_EAGER), checkpointed=True).items():
        assert outcome.difference <= BOUND, (mode, outcome.difference)
        if mode == EAGER:
            assert outcome.graphs == 0
        elif name in BREAKS_WHEN_CHECKPOINTED:
            assert any("requires_grad" in reason for reason, _ in outcome.breaks)
        else:
            assert outcome.graphs == 1


# -- communication buffers --------------------------------------------------------------------------------------------


def with_buffers(name: str, mode: str, microbatches: int = 1, **sharding: Any) -> tuple[list[Tensor], BufferPool]:
    """Train for three steps. Returns losses, gradients and parameters of this rank, and the model's buffers."""
    rank, family = dist.get_rank(), FAMILIES[name]
    model = fully_shard_model(make(family), fsdp_unit_modules="auto", **sharding)
    with torch.no_grad():
        model(**family.batch_of(rank))
    call: Any = model
    if mode != EAGER:
        call = torch.compile(model, backend="mfsdp", fullgraph=family.fullgraph, options={"inner": mode})
    optimizer, found = adamw(model), []
    for step in range(STEPS):
        for micro in range(microbatches):
            loss = family.loss(call(**family.batch_of(100 * step + 10 * micro + rank)))
            loss.backward()
            found.append(loss.detach())
        found += [param.grad.to_local().clone() for param in model.parameters() if param.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found + [param.to_local().detach().clone() for param in model.parameters()], model.sharded.comm_buffers


POLICIES: tuple[dict[str, Any], ...] = (
    {"fsdp_double_buffer": True, "fsdp_db_use_persist_buf_on_alloc_fail": True},
    {"maxpool_double_buffer": True},
)


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("name", families(long={*FAMILIES}))
@on_ranks(2)
def test_communication_buffers_change_no_number(name: str, mode: str) -> None:
    """Numbers are those of memory of their own, to the bit, although memory is poisoned and gathers arrive late."""
    plain, _ = with_buffers(name, mode)
    for policy in POLICIES if mode == EAGER else POLICIES[:1]:
        with poisoned():
            found, pool = with_buffers(name, mode, **policy)
        assert_equal_bits(plain, found)
        assert {kind.use for kind in pool.addresses} == {"gather", "gradients"}
        for kind, addresses in pool.addresses.items():
            assert len(set(addresses)) == len(addresses) <= 2, kind


@pytest.mark.long
@pytest.mark.parametrize("strategy", [2, 3])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "t5", "resnet"])
@on_ranks(4)
def test_communication_buffers_on_four_ranks(name: str, strategy: int) -> None:
    for mode in (EAGER, AOT_EAGER):
        plain, _ = with_buffers(name, mode, 2, zero_dp_strategy=strategy)
        for policy in POLICIES:
            with poisoned(late=strategy == 3):
                found, pool = with_buffers(name, mode, 2, zero_dp_strategy=strategy, **policy)
            assert_equal_bits(plain, found)
            assert pool.addresses


def assert_equal_bits(expected: list[Tensor], found: list[Tensor]) -> None:
    assert len(expected) == len(found)
    assert all(compat.equal_bits(a, b) for a, b in zip(expected, found, strict=True))
    assert all(x.isfinite().all() for x in found)


# -- batches with and without images ----------------------------------------------------------------------------------


def llavas(*modes: str) -> tuple[nn.Module, list[Any], list[Any]]:
    """Return a model in one process, sharded models, and what to call in place of the latter."""
    family = FAMILIES["llava"]
    models = [fully_shard_model(make(family), short_mesh(), fsdp_unit_modules="auto") for _ in modes]
    calls = []
    for mode, model in zip(modes, models, strict=True):
        with torch.no_grad():
            model(**family.batch_of(0))
        compiled = torch.compile(model, backend="mfsdp", fullgraph=True, options={"inner": mode})
        calls.append(model if mode == EAGER else compiled)
    return make(family), models, calls


@pytest.mark.long
@on_ranks(2)
def test_batches_of_all_ranks_skip_the_tower_at_times() -> None:
    """Parameters that no rank's batch uses get no gradient, or zeros, and the optimizer steps as in one process."""
    rank, (alone, models, calls) = dist.get_rank(), llavas(EAGER, AOT_EAGER)
    optimizers = [adamw(m) for m in (alone, *models)]
    for step, name in enumerate(("llava", "llava-text", "llava-text", "llava", "llava-text")):
        batches = [FAMILIES[name].batch_of(100 * step + r) for r in range(2)]
        (sum(alone(**batch).loss for batch in batches) / 2).backward()
        expected = gradients_of(alone)
        for model, call in zip(models, calls, strict=True):
            call(**batches[rank]).loss.backward()
            assert largest_difference(FAMILIES["llava"], model.module, expected) <= BOUND
            for param, gradient in ((p, expected[n]) for n, p in model.module.named_parameters() if "vision" in n):
                assert name == "llava" or not gradient.any()
                assert name == "llava" or not gradient_of(param).any()
            leave_out_the_same(alone, model.module)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert [len(model.sharded.compiled_graphs) for model in models] == [0, 2]


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("known", [False, True])
@on_ranks(2, timeout=90)
def test_a_batch_of_one_rank_skips_the_tower(mode: str, known: bool) -> None:
    """If one rank's batch skips the tower, all ranks raise, without a hang or wrong weights, and training continues."""
    _, (model,), (call,) = llavas(mode)
    family, rank = FAMILIES["llava"], dist.get_rank()
    for each in ("llava", "llava-text") if known else ("llava",):
        call(**FAMILIES[each].batch_of(rank)).loss.backward()
    model.zero_grad_buffer()
    messages = [""] * 2
    try:
        call(**(family.batch_of(0) if rank == 0 else FAMILIES["llava-text"].batch_of(1))).loss.backward()
        call(**family.batch_of(rank)).loss.backward()
    except RuntimeError as error:
        mine = str(error)
    else:
        raise AssertionError("this rank noticed nothing")
    model.reset()
    dist.all_gather_object(messages, mine)
    assert any("All ranks must go through the model in the same way" in message for message in messages), messages
    call(**family.batch_of(rank)).loss.backward()


@pytest.mark.long
@on_ranks(2)
def test_a_blank_image_takes_the_place_of_none() -> None:
    """A blank image after the text gives the gradients of a batch without images. No trained token attends to it."""
    rank, (alone, models, calls) = dist.get_rank(), llavas(EAGER, AOT_EAGER)
    with_images, without = FAMILIES["llava"].batch_of(0), tokens(torch.Generator().manual_seed(1))
    (sum(alone(**batch).loss for batch in (with_images, without)) / 2).backward()
    blank = {name: torch.cat([ids, torch.zeros_like(ids[:, :IMAGE_TOKENS])], 1) for name, ids in without.items()}
    blank = with_image_tokens(blank, first=LENGTH) | {"pixel_values": torch.zeros_like(with_images["pixel_values"])}
    for model, call in zip(models, calls, strict=True):
        call(**(with_images if rank == 0 else blank)).loss.backward()
        assert largest_difference(FAMILIES["llava"], model.module, gradients_of(alone)) <= BOUND
