"""Peak memory of a step: shards, two gathered buckets and gradients in flight, and nothing else.

The process group is fake. gloo would allocate copies of its own, which the schedule is not responsible for.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp

from mfsdp_compile import fsdp2 as interface
from mfsdp_compile import fully_shard_model
from mfsdp_compile.diagnostics.measure import allocated

WIDTH, LAYERS = zoo.Wide.WIDTH, 6
ACTIVATIONS = 64 << 10
"""Bytes allowed for activations: one row of 192 float32 values per operator, and fewer than a hundred operators."""


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(zoo.Wide() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def sharded(mode: str, **options: Any) -> tuple[nn.Module, Any, Tensor]:
    model = fully_shard_model(Stack(), fsdp_unit_modules=[zoo.Wide])
    call: Any = model
    if mode != EAGER:
        call = torch.compile(model, backend="mfsdp", options={"inner": mode, **options})
    x = torch.randn(1, WIDTH)
    for _ in range(2):  # compiles, and learns the order
        call(x).backward()
        model.zero_grad()
    return model, call, x


def bucket_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of one gathered unit, and of this rank's shards of the whole model."""
    buckets = model.sharded.buckets
    assert len({b.plan.gathered_bytes for b in buckets}) == 1
    return buckets[0].plan.gathered_bytes, sum(b.plan.shard_bytes for b in buckets)


@pytest.mark.long_if("inductor")
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER, pytest.param(INDUCTOR, marks=pytest.mark.slow)])
def test_training_step(mode: str) -> None:
    model, call, x = sharded(mode)
    bucket, shards = bucket_bytes(model)
    peak = allocated(lambda: call(x).backward())[0]
    # The gradients' shards stay. In flight are the bucket that is filled and the one that is reduced. Without Inductor,
    # each gradient of the unit also exists separately before it is packed.
    in_flight = 2 * bucket if mode == INDUCTOR else 3 * bucket
    assert peak <= shards + 2 * bucket + in_flight + ACTIVATIONS, (peak - shards) / bucket
    whole = 2 * LAYERS * bucket
    assert peak < whole / 2  # of what an unsharded model's gathered parameters and gradients would take


@pytest.mark.long_if("inductor")
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER, pytest.param(INDUCTOR, marks=pytest.mark.slow)])
def test_forward_without_gradients(mode: str) -> None:
    model, call, x = sharded(mode)
    bucket, _ = bucket_bytes(model)

    def forward() -> None:
        with torch.no_grad():
            call(x)

    forward()
    assert allocated(forward)[0] <= 2 * bucket + ACTIVATIONS


@pytest.mark.long_if("inductor")
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER, pytest.param(INDUCTOR, marks=pytest.mark.slow)])
def test_forward_keeps_one_bucket_for_backward(mode: str) -> None:
    model, call, x = sharded(mode)
    bucket, shards = bucket_bytes(model)
    losses = []
    assert allocated(lambda: losses.append(call(x)))[0] <= 2 * bucket + ACTIVATIONS
    held = allocated(lambda: losses.pop().backward())[0]
    in_flight = 2 * bucket if mode == INDUCTOR else 3 * bucket
    assert held <= shards + bucket + in_flight + ACTIVATIONS  # one of the two gathered buckets existed before


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("fake_world", [2], indirect=True)
@pytest.mark.parametrize("reshards", [True, False])
def test_backward_beside_fsdp2(reshards: bool) -> None:
    """What is allocated at most in backward, with what forward leaves for it, is not above FSDP2's."""
    peaks = []
    for api in (torch_fsdp.fully_shard, interface.fully_shard):
        model = Stack()
        for block in (*model.blocks, model):
            api(block, reshard_after_forward=reshards)
        x = torch.randn(1, WIDTH)
        for _ in range(2):  # learns the order
            model(x).backward()
            model.zero_grad()
        losses: list[Tensor] = []
        left = allocated(lambda: losses.append(model(x)))[1]
        peaks.append(left + allocated(lambda: losses[0].backward())[0])
    assert peaks[1] <= peaks[0] + ACTIVATIONS, peaks


@pytest.mark.usefixtures("fake_world")
def test_no_prefetch_is_one_bucket_less() -> None:
    model, call, x = sharded(AOT_EAGER, prefetch=0)
    bucket, _ = bucket_bytes(model)

    def forward() -> None:
        with torch.no_grad():
            call(x)

    forward()
    assert allocated(forward)[0] <= bucket + ACTIVATIONS


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
def test_clearing_gradients_frees_them(mode: str) -> None:
    model, call, x = sharded(mode)
    _, shards = bucket_bytes(model)

    def step() -> None:
        call(x).backward()
        model.zero_grad()

    assert allocated(step)[1] <= 4096
    left = allocated(lambda: call(x).backward())[1]
    assert shards <= left <= shards + 4096


@pytest.mark.usefixtures("fake_world")
def test_shards_at_rest_are_what_the_layout_says() -> None:
    model, _, _ = sharded(EAGER)
    _, shards = bucket_bytes(model)
    storages = {s.data_ptr(): s for s in (p._local_tensor.untyped_storage() for p in model.parameters())}
    assert sum(storage.nbytes() for storage in storages.values()) == shards
    for bucket in model.sharded.buckets:
        assert all(shell.untyped_storage().nbytes() == 0 for shell in bucket.shells)


def test_measure_sees_what_is_there() -> None:
    """The measurement itself is correct: ten tensors of 1 MB at a time, out of twenty."""

    def work() -> None:
        kept = [torch.empty(1 << 18) for _ in range(10)]
        kept.clear()
        kept = [torch.empty(1 << 18) for _ in range(10)]

    assert abs(allocated(work)[0] - 10 * (1 << 20)) <= 4096


class Reader(nn.Module):
    """Computes with the matrices of another module, whose forward does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.held = zoo.Wide()

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.held.modules():
            if isinstance(linear, nn.Linear):
                x = torch.relu(nn.functional.linear(x, linear.weight))
        return x


class Giver(nn.Linear):
    """Returns its matrix."""

    def forward(self) -> Tensor:  # type: ignore[override]
        return self.weight


class Taker(nn.Module):
    """Computes with matrices that its children return."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Giver(WIDTH, WIDTH), Giver(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(nn.functional.linear(torch.relu(nn.functional.linear(x, self.up())), self.down()))


class Readers(Stack):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("block", [Reader, Taker])
def test_parameters_that_other_modules_read(block: type[nn.Module], frozen: bool) -> None:
    """They are not kept for the backward, except if they are returned, in the first forward, which finds out."""
    with torch.random.fork_rng():
        whole = Readers(block)
    for param in whole.blocks[1].parameters():
        param.requires_grad_(not frozen)
    model = fully_shard_model(whole, fsdp_unit_modules=[block])
    bucket = model.sharded.buckets[0].plan.gathered_bytes
    x = torch.randn(1, WIDTH, requires_grad=True)
    losses: list[Tensor] = []
    first = allocated(lambda: losses.append(model(x)))[1]
    losses.pop().backward()
    later = allocated(lambda: losses.append(model(x)))[1]
    if block is Taker:
        assert first > LAYERS / 2 * bucket
    else:
        assert first <= 2 * bucket + ACTIVATIONS
    assert later <= 2 * bucket + ACTIVATIONS


@pytest.mark.parametrize("block", [Reader, Taker])
@on_ranks(2)
def test_late_references_of_collectives_are_no_use(block: type[nn.Module]) -> None:
    """Gloo's thread may hold a result for a moment after the wait. Ranks that took it for a use would gather more."""
    torch.manual_seed(0)
    model = fully_shard_model(Readers(block), fsdp_unit_modules=[block])
    eager = model.sharded.eager
    wait, held = eager.step.wait, []  # type: ignore[var-annotated]

    def held_for_a_moment(started: Tensor, *how: Any) -> Tensor:
        result = wait(started, *how)
        held.append([result.view(-1), result.view(-1)])
        threading.Timer(0.01, held.pop).start()
        return result

    eager.step.wait = held_for_a_moment  # type: ignore[method-assign]
    model(torch.randn(1, WIDTH, requires_grad=True)).backward()
    assert eager.gathering.hooks_everywhere == (block is Taker), block


@pytest.mark.usefixtures("fake_world")
def test_only_modules_with_parameters_hook_what_autograd_saves() -> None:
    model, call, x = sharded(EAGER)
    eager, count = model.sharded.eager, 0
    pack = eager.saved.pack

    def packed(tensor: Tensor) -> Any:
        nonlocal count
        count += 1
        return pack(tensor)

    eager.saved.pack = packed
    call(x).backward()
    matrices = sum(isinstance(module, nn.Linear) for module in model.modules())
    assert count == 2 * matrices - 1  # each matrix, and what it is multiplied by; the input needs no gradient
    eager.gathering.hooks_everywhere, count = True, 0
    call(x).backward()
    assert count == 2 * matrices - 1 + matrices + 1  # also what tanh keeps after each of them, and the loss
