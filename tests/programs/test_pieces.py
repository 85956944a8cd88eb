"""Pieces: the numbers of whole graphs, whatever the program; compiled once for all layers and schedules."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import zoo
from parity import AOT_EAGER, INDUCTOR, MODELS
from poisoning import poisoned
from pool import on_ranks
from torch import Tensor, fx, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from mfsdp_compile import fully_shard_model
from mfsdp_compile.backend import compile as back
from mfsdp_compile.backend import shared_compiles
from mfsdp_compile.backend.shared_compiles import Claims, compile_together
from mfsdp_compile.backend.straight_line import Call, Program
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.compat import pieces as known_pieces
from mfsdp_compile.runtime.schedule.phase import Phase

WHOLE = "inductor_whole"


class Constants(zoo.Plain):
    """A constant of the graph, a buffer that changes, and one that is read after it has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(16))

    def trunk(self, x: Tensor) -> Tensor:
        before = self.seen.view(2, 8).t().sum()
        self.seen.add_(x.detach().mean(0))
        return super().trunk(x) * torch.tensor([0.5, 2.0] * 8) + before + self.seen


class Attention(zoo.Plain):
    """Operators that take graphs."""

    def trunk(self, x: Tensor) -> Tensor:
        mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 128, 128, device="cpu")
        q = (
            x.detach()
            .repeat(1, 16)
            .view(1, -1, 1, 8)
            .expand(1, -1, 16, 8)
            .reshape(1, 1, -1, 8)[:, :, :128]
            .expand(1, 2, 128, 8)
        )
        found = flex_attention(q, q, q, block_mask=mask, score_mod=lambda score, b, h, q, k: score - (q - k))
        y = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        return super().trunk(y) + found.mean()


class Rotated(zoo.Plain):
    """A product with a complex number, whose conjugate is a view of no tensor."""

    def trunk(self, x: Tensor) -> Tensor:
        return super().trunk(x) + torch.fft.irfft(torch.fft.rfft(x) * (1 + 0.5j), n=x.shape[-1])


class Normalized(zoo.Plain):
    """Running statistics are written in the middle of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(16)

    def trunk(self, x: Tensor) -> Tensor:
        return super().trunk(self.statistics(x))


PROGRAMS: dict[str, Any] = {**MODELS, **{kind.__name__: kind for kind in (Constants, Normalized, Rotated)}}
del PROGRAMS["SparseGradients"]  # which Inductor cannot compile


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
@on_ranks(2, timeout=300)
def test_numbers_of_whole_graphs(name: str) -> None:
    """Up to rounding: other kernels are fused. Products under autocast are rounded to bfloat16, of 8 bits."""
    data, relative = parity.batches(steps=2), 2**-7 if name == "Autocast" else 1e-5
    whole = parity.train_sharded(PROGRAMS[name], WHOLE, data, parity.sgd)
    for options in ({}, {"regions": False}):
        found = parity.train_sharded(PROGRAMS[name], INDUCTOR, data, parity.sgd, **options)
        parity.assert_close(found, whole, relative)


@pytest.mark.long
@on_ranks(2, timeout=300)
def test_communication_buffers() -> None:
    """A piece takes the buffer that it packs gradients into."""
    data, sharding = parity.batches(steps=3), {"fsdp_double_buffer": True}
    whole = parity.train_sharded(zoo.Plain, INDUCTOR, data, parity.sgd)
    with poisoned(late=True):
        found = parity.train_sharded(zoo.Plain, INDUCTOR, data, parity.sgd, sharding=sharding)
    parity.assert_bitwise(whole, found)
    for addresses in found.model.sharded.comm_buffers.addresses.values():
        assert len(set(addresses)) == len(addresses) <= 2


def pieces_of(layers: int, evaluates: bool = False, **options: Any) -> int:
    """Return how many pieces a model adds to those that are known."""
    torch._dynamo.reset()
    before = len(known_pieces._pieces)
    model, call = parity.shard(parity.build(lambda: zoo.Plain(layers=layers)), INDUCTOR, **options)
    loss = call(torch.ones(3, 8))
    loss.backward()
    torch.testing.assert_close(loss, parity.build(lambda: zoo.Plain(layers=layers))(torch.ones(3, 8)))
    if evaluates:
        with torch.no_grad():
            call(torch.ones(3, 8))
    (*_, record) = model.sharded.compiled_graphs
    for phase in (Phase.FORWARD, Phase.BACKWARD) if not evaluates else ():
        told = record.reports[phase][-1].lines
        calls = sum(int(re.search(r": (\d+) call", line)[1]) for line in told[1:])  # type: ignore[index]
        predicted = r", \S+ .?s by prediction" if "report" in options else ""
        assert all(re.search(rf"operators? in \d+ launch(?:es)?{predicted}; each", line) for line in told[1:])
        assert told[0] == f"{len(told) - 1} distinct pieces in {calls} calls"
        assert calls >= layers  # each layer is a piece
    return len(known_pieces._pieces) - before


@on_ranks(2, timeout=300)
def test_equal_pieces_are_compiled_once() -> None:
    """They depend neither on the number of layers nor on the schedule."""
    assert pieces_of(3) > 0
    assert pieces_of(5, prefetch=2, reductions_in_flight=2, report=True) == 0


@pytest.mark.long
@on_ranks(2, timeout=300)
def test_pieces_that_are_added() -> None:
    """What evaluates is compiled apart."""
    pieces_of(3)
    assert pieces_of(5, reshard_after_forward=False) == 0
    assert 0 < pieces_of(5, evaluates=True) <= 3


@pytest.mark.long
@on_ranks(2, timeout=300)
def test_sizes_that_change() -> None:
    """Sizes are arguments of pieces; those that are computed are computed outside."""

    class Sized(zoo.Plain):
        def trunk(self, x: Tensor) -> Tensor:
            y = super().trunk(x)
            return torch.cat([y, y[: y.shape[0] // 2 + 1]]) / y.shape[0]

    runs = {}
    for mode in (AOT_EAGER, INDUCTOR):
        model: Any = fully_shard_model(parity.build(Sized), fsdp_unit_modules=[zoo.Block])
        call: Any = torch.compile(model, backend="mfsdp", options={"inner": mode}, dynamic=True)
        losses = []
        for size in (5, 4, 9, 2):
            losses.append(call(torch.linspace(-1, 1, size * 8).view(size, 8) + dist.get_rank()))
            losses[-1].backward()
        runs[mode] = [*losses, *(param.grad.full_tensor() for param in model.parameters())]
    for mine, expected in zip(runs[INDUCTOR], runs[AOT_EAGER], strict=True):
        torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize(("dynamic", "expected"), [(None, 2), (True, 1)])
@on_ranks(1)
def test_twenty_lengths(dynamic: bool | None, expected: int) -> None:
    """The second length is compiled with a symbol for it."""
    model: Any = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
    call: Any = torch.compile(model, backend="mfsdp", options={"inner": AOT_EAGER}, dynamic=dynamic)
    for size in range(22, 2, -1):
        call(torch.ones(size, 8)).backward()
    assert len(model.sharded.compiled_graphs) == expected


@pytest.mark.long
@on_ranks(2, timeout=300)
def test_operators_that_take_graphs() -> None:
    data = parity.batches(steps=2)
    parity.assert_close(
        parity.train_sharded(Attention, AOT_EAGER, data, parity.sgd),
        parity.train_sharded(Attention, INDUCTOR, data, parity.sgd),
    )


@pytest.mark.long
@on_ranks(2, timeout=300)
def test_a_collective_inside_of_an_operator_that_takes_graphs() -> None:
    class Inside(zoo.Plain):
        def trunk(self, x: Tensor) -> Tensor:
            x = super().trunk(x)
            both = lambda x: functional.all_reduce(x.detach(), "sum", dist.group.WORLD) + x  # noqa: E731
            return torch.cond(x.sum() > 0, both, lambda x: x.cos(), (x,))

    _, call = parity.shard(parity.build(Inside), INDUCTOR)
    with parity.raises_everywhere(Exception, "a collective runs inside of an operator that takes graphs"):
        call(torch.ones(3, 8))


@pytest.mark.long
@on_ranks(2, timeout=300)
def test_another_backward() -> None:
    """What forward saved is not written to."""
    model, call = parity.shard(parity.build(zoo.Plain), INDUCTOR)
    loss = call(torch.ones(3, 8))
    loss.backward(retain_graph=True)
    once = [param.grad.full_tensor() for param in model.parameters()]
    loss.backward()
    for param, gradient in zip(model.parameters(), once, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), 2 * gradient)


def operators() -> tuple[fx.Graph, list[fx.Node]]:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("arguments")
    sine = graph.call_function(torch.ops.aten.sin.default, (x,))
    both = graph.call_function(torch.ops.aten.cat.default, ([sine, y],))
    graph.output((both, None))
    return graph, [sine, both]


def test_values_are_freed_after_their_last_use() -> None:
    graph, (sine, both) = operators()
    alive: list[Any] = []

    def run(arguments: list[Any]) -> tuple[Tensor, int]:
        first, second = arguments
        arguments.clear()
        alive.extend(map(weakref.ref, (first, second)))
        found = torch.cat([first, second])
        del first, second
        assert not any(each() is not None for each in alive)
        return found, 0

    piece = compat.CompiledPiece(None, (), 1, None, run)
    program = Program(graph, [sine, Call(piece, [sine, *both.args[0][1:]], [both, None], ())])
    found, nothing = program.code.function()([torch.zeros(2), torch.ones(3)])
    assert (found.tolist(), nothing) == ([0, 0, 1, 1, 1], None)


def test_tracebacks_have_the_line() -> None:
    graph, nodes = operators()
    with pytest.raises(RuntimeError) as error:
        Program(graph, nodes).code.function()([torch.zeros(2), torch.ones(3, 3)])
    (frame,) = (each for each in traceback.extract_tb(error.value.__traceback__) if compat.is_graph(each.filename))
    assert frame.line == "cat_default = op_cat([sin_default, arguments])"


@contextlib.contextmanager
def caching() -> Iterator[Path]:
    """Context in which torch's caches are a folder that all ranks share."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    with (
        functorch_config.patch(enable_autograd_cache=True),
        inductor_config.patch(fx_graph_cache=True),
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder[0]),
    ):
        yield Path(folder[0])
    dist.barrier()


def started(call: Callable[[], Any]) -> tuple[list[Any], dict[str, int]]:
    """Run a step as a new process would: without the pieces of this one.

    Returns:
        What it returned, and how many graphs AOTAutograd's cache had (hit), and got (saved).
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    known_pieces._pieces.clear()
    counters["aot_autograd"].clear()
    found = call()
    asked = {name: counters["aot_autograd"][f"autograd_cache_{name}"] for name in ("hit", "saved")}
    return found, {name: count for name, count in asked.items() if count}


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [False, True])
@on_ranks(2, timeout=300)
def test_a_second_start_compiles_nothing(dynamic: bool) -> None:
    """Unless a piece is gone from the disk, or an option or a static size differs."""

    from torch._dynamo.utils import counters

    def step(size: int = 3, **options: Any) -> list[Any]:
        model: Any = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
        loss = torch.compile(model, backend="mfsdp", options=options, dynamic=dynamic)(torch.ones(size, 8))
        loss.backward()
        return [loss, *(param.grad.full_tensor() for param in model.parameters())]

    def forget(what: str) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            for each in folder.glob(what):
                shutil.rmtree(each)
        dist.barrier()

    with caching() as folder:
        expected, asked = started(step)
        assert asked == {"saved": 1}
        found, asked = started(step)
        assert asked == {"hit": 1}
        assert all(map(torch.equal, found, expected))
        forget("fxgraph")
        found, asked = started(step)
        assert asked == {"saved": 1}
        assert all(map(torch.equal, found, expected))
        found, asked = started(lambda: step(prefetch=0))
        assert asked == {"saved": 1}
        assert all(map(torch.equal, found, expected))
        for missed, source in ((False, None), (True, "another version")):  # lowerings are not a part of pieces' graphs
            counters["inductor"].clear()
            with mock.patch.object(back, "source_digest", return_value=source or back.source_digest()):
                found, asked = started(lambda: step(prefetch=2))
            assert asked == {"saved": 1}
            assert bool(counters["inductor"]["fxgraph_cache_miss"]) == missed
        (loss, *_), asked = started(lambda: step(5))
        assert asked == ({"hit": 1} if dynamic else {"saved": 1})
        torch.testing.assert_close(loss, parity.build(zoo.Plain)(torch.ones(5, 8)))


@on_ranks(2, timeout=300)
def test_ranks_of_a_machine_share_the_work() -> None:
    """Each piece is compiled by one rank, and loaded by the other."""
    from torch._dynamo.utils import counters

    class Own(zoo.Plain):
        def __init__(self) -> None:
            super().__init__(width=12)  # pieces that no other test has

    counters["inductor"].clear()
    known = set(known_pieces._pieces)
    with caching():
        model: Any = fully_shard_model(parity.build(Own), fsdp_unit_modules=[zoo.Block])
        torch.compile(model, backend="mfsdp", options={"inner": INDUCTOR})(torch.ones(3, 8)).backward()
    counted: list[Any] = [None, None]
    mine = counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]
    dist.all_gather_object(counted, mine)
    pieces = len(known_pieces._pieces.keys() - known)
    assert pieces > 4
    assert sum(missed for missed, _ in counted) == sum(hit for _, hit in counted) == pieces
    assert all(0 < missed < pieces for missed, _ in counted)


@on_ranks(2, timeout=120)
def test_claims_of_ranks_that_do_not_compile() -> None:
    """One that has failed, and one that has ended, do not keep others waiting."""
    claims, other, key = Claims("shared by both"), dist.get_rank() == 1, "a piece"

    def fails() -> Any:
        raise ValueError("not for this machine")

    ran: list[str] = []

    def compiles() -> compat.CompiledCode:
        ran.append("")
        return compat.CompiledCode(list)

    piece = compat.CompiledPiece(key, (), 1, fails if not other else compiles)
    with mock.patch.object(Claims, "of_this_rank", return_value=claims):
        if not other:
            with pytest.raises(ValueError, match="not for this machine"):
                compile_together([piece], "test")
        dist.barrier()
        if other:
            compile_together([piece], "test")
            assert ran == [""]
    with mock.patch.object(shared_compiles, "PATIENCE", -1.0):
        claims._store.set(f"{claims._prefix}/gone", "0")
        claims.wait("gone")
