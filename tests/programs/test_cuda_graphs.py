"""Captured steps do what ordinary ones do, to the bit, and refuse what a graph cannot repeat."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from graph_recorder import Recorder, recordable_kernels
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mfsdp_compile import MixedPrecisionPolicy, capture_step, cuda_graphs, fully_shard_optimizer

STEPS = 7


def recorded(model: Any, step: Callable[..., Any], warm_up: int = 2) -> tuple[Any, Recorder]:
    """Return the captured step, and what stands in for CUDA graphs."""
    recorder = Recorder()
    with mock.patch.object(cuda_graphs, "CudaGraphs", return_value=recorder):
        return capture_step(model, step, warm_up=warm_up), recorder


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=torch.tensor(1e-2), capturable=True)


@contextlib.contextmanager
def capturable() -> Iterator[None]:
    """Context in which torch takes capturable optimizers on the CPU, and is still known."""
    with (
        mock.patch("torch.optim.adam._get_capturable_supported_devices", return_value=["cpu", "cuda"]),
        mock.patch("mfsdp_compile.runtime.optim.kinds._is_of_torch_or_python", return_value=True),
    ):
        yield


def train(
    mode: str,
    optimizer: Any,
    captures: bool,
    microbatches: int,
    flat: bool = False,
    accumulation: Any = None,
    dtype: torch.dtype = torch.float32,
    **arguments: Any,
) -> tuple[list[Tensor], list[Tensor], Any]:
    """Return losses, shards with optimizer state, and the recorder."""
    precision = {"precision": arguments.pop("precision")} if "precision" in arguments else {}
    model, call = parity.shard(
        parity.build(zoo.Plain).to(dtype),
        mode,
        sharding={"cuda_graph_mode": True, **arguments},
        **precision,
        **({} if mode == EAGER else {"fullgraph": True}),
    )
    optim = fully_shard_optimizer(optimizer(model.parameters()), flat=flat)
    model.set_model_auto_sync(microbatches == 1)
    if accumulation is not None:
        model.set_accumulation(**accumulation)

    def step(x: Tensor, last: bool) -> Tensor:
        model.is_last_microbatch = last
        loss = call(x)
        loss.backward()
        if last:
            optim.step()
            optim.zero_grad()
        return loss

    run, recorder = recorded(call, step) if captures else (step, None)
    losses = []
    for batch in parity.batches(steps=STEPS)[:, dist.get_rank()].to(dtype):
        for micro in range(microbatches):
            loss = run(batch.chunk(microbatches)[micro], micro == microbatches - 1)
            losses.append(loss.detach().clone())
    found = [param.to_local().detach().clone() for param in model.parameters()]
    for state in optim.state.values():
        found += [
            (v.to_local() if hasattr(v, "to_local") else v).clone() for v in state.values() if isinstance(v, Tensor)
        ]
    return losses, found, recorder


@pytest.mark.long_unless("*-sgd-eager-2")
@pytest.mark.parametrize("strategy", [1, 2, 3])
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize(("optimizer", "microbatches"), [(sgd, 1), (adamw, 3)], ids=["sgd", "adamw"])
@on_ranks(2, timeout=120)
def test_captured_steps_equal_ordinary_ones(mode: str, strategy: int, optimizer: Any, microbatches: int) -> None:
    compare(mode, optimizer, microbatches, zero_dp_strategy=strategy)


def compare(mode: str, optimizer: Any, microbatches: int, **arguments: Any) -> Recorder:
    """Compare captured steps with ordinary ones; return what has recorded them."""
    with capturable():
        losses, shards, recorder = train(mode, optimizer, True, microbatches, **arguments)
        expected, its, _ = train(mode, optimizer, False, microbatches, **arguments)
    assert_equal(losses, expected)
    assert_equal(shards, its)
    assert len(recorder.recordings) == min(microbatches, 3), [r.replays for r in recorder.recordings]
    assert sum(r.replays for r in recorder.recordings) >= 4 * microbatches
    return recorder


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "microbatches"), [(3, 1), (1, 2)])
@pytest.mark.slow
@on_ranks(2, timeout=200)
def test_inductor(strategy: int, microbatches: int) -> None:
    with recordable_kernels():
        recorder = compare(INDUCTOR, adamw, microbatches, zero_dp_strategy=strategy)
    for recording in recorder.recordings:
        assert any(not isinstance(recorded.func, torch._ops.OpOverload) for recorded in recording.operators)


HALF = {"dtype": torch.bfloat16, "precision": MixedPrecisionPolicy(grad_comm_dtype=torch.float32)}
WAYS: dict[str, dict[str, Any]] = {
    "flat optimizer": {"flat": True},
    "float32 weights": HALF,
    "float32 sums of bfloat16": {
        "dtype": torch.bfloat16,
        "precision": MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32),
    },
    "whole gradients": {"accumulation": {"whole_gradients": True}},
    "kept gathered": {"accumulation": {"keep_gathered": True}},
    "nothing sharded": {"zero_dp_strategy": 0},
    "quantized gathers": {"precision": MixedPrecisionPolicy(param_comm_dtype=torch.float8_e4m3fn)},
    "nvfp4": {"precision": MixedPrecisionPolicy(param_comm_dtype=torch.float4_e2m1fn_x2, param_comm_scaling="nvfp4")},
}


@pytest.mark.long_unless("*-flat optimizer")
@pytest.mark.parametrize(
    ("mode", "way"),
    [
        *((EAGER, way) for way in WAYS),
        (AOT_EAGER, "float32 weights"),
        (AOT_EAGER, "kept gathered"),
        (AOT_EAGER, "quantized gathers"),
    ],
)
@on_ranks(2, timeout=120)
def test_ways_to_train(mode: str, way: str) -> None:
    compare(mode, adamw, 2, **WAYS[way])


@pytest.mark.long
@pytest.mark.parametrize("outer", [0, 1], ids=["hsdp", "hfsdp"])
@on_ranks(4, timeout=120)
def test_two_dimensions(outer: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    group = mesh["outer", "inner"]._flatten().get_group()
    dimensions = {"device_mesh": mesh, "dp_outer_dim": "outer", "dp_shard_dim": "inner", "hybrid_fsdp_group": group}
    for mode in (EAGER, AOT_EAGER):
        compare(mode, adamw, 2, outer_dp_sharding_strategy=outer, **dimensions)


class Noisy(zoo.Plain):
    """Has buffers that forward writes to, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.5)

    def trunk(self, x: Tensor) -> Tensor:
        return self.dropout(super().trunk(self.norm(x)))


def sharded(mode: str = EAGER, factory: Any = zoo.Plain, **sharding: Any) -> tuple[Any, Any]:
    options = {} if mode == EAGER else {"fullgraph": True}
    return parity.shard(parity.build(factory), mode, sharding={"cuda_graph_mode": True, **sharding}, **options)


def values_of(model: Any) -> list[Tensor]:
    return [*(param.to_local().detach().clone() for param in model.parameters()), *(b.clone() for b in model.buffers())]


def assert_equal(mine: list[Tensor], other: list[Tensor]) -> None:
    for number, (a, b) in enumerate(zip(mine, other, strict=True)):
        assert torch.equal(a, b), number


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2, timeout=120)
def test_forward_and_backward_around_an_ordinary_optimizer(mode: str) -> None:
    """What the host decides outside the step (``no_sync``, ``zero_grad``, clipping, the step) goes on as it would."""

    def run(captures: bool) -> list[Tensor]:
        model, call = sharded(mode, Noisy, zero_dp_strategy=1)
        optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

        def forward_backward(x: Tensor) -> dict[str, Tensor]:
            loss = call(x)
            loss.backward()
            return {"loss": loss}

        do = recorded(call, forward_backward)[0] if captures else forward_backward
        found: list[Tensor] = []
        for number, batch in enumerate(parity.batches(steps=6)[:, dist.get_rank()]):
            torch.manual_seed(number)
            with model.no_sync():
                found.append(do(batch[:3])["loss"].detach().clone())
            found.append(do(batch[3:])["loss"].detach().clone())
            found += [param.grad.to_local().clone() for param in model.parameters()]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optim.step()
            optim.zero_grad()
            found += values_of(model)
            assert model.microbatch_count == 0
        if captures:
            assert len(do.graphs) == 2, do.graphs
        return [*found, *values_of(model)]

    assert_equal(run(True), run(False))


@on_ranks(2, timeout=120)
def test_ordinary_steps_after_a_replay() -> None:
    """A replay changes weights: what was gathered before it must not be used after it."""

    def run(captures: bool) -> list[Tensor]:
        model, call = sharded(zero_dp_strategy=1)
        optim = fully_shard_optimizer(sgd(model.parameters()))

        def step(x: Tensor) -> Tensor:
            loss = call(x)
            loss.backward()
            optim.step(install_optimized_model_weights=False)
            optim.zero_grad()
            return loss

        do = recorded(call, step)[0] if captures else step
        found = []
        for batch in parity.batches(steps=6)[:, dist.get_rank()]:
            found.append(do(batch).detach().clone())
            with torch.no_grad():
                found.append(call(batch))  # gathers
                found.append(call(batch))
        loss = call(batch)
        do(batch)
        with pytest.raises(RuntimeError, match="modified in place between forward and backward"):
            loss.backward()
        return [*found, *values_of(model)]

    assert_equal(run(True), run(False))


@pytest.mark.long_unless("*-eager-caught")
@pytest.mark.parametrize("how", ["item", "tolist", "bool", "caught"])
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2, timeout=120)
def test_a_step_that_reads_values_is_refused(mode: str, how: str) -> None:
    """The message has the line, and the model goes on as if nothing had happened."""
    model, call = sharded(mode)
    optim = fully_shard_optimizer(sgd(model.parameters()))

    def step(x: Tensor, reads: bool) -> Tensor:
        loss = call(x)
        loss.backward()
        optim.step()
        optim.zero_grad()
        if reads:
            if how == "item":
                loss.item()  # this line
            elif how == "tolist":
                loss.detach().tolist()  # this line
            elif how == "bool":
                assert loss > 0  # this line
            else:
                with contextlib.suppress(RuntimeError):
                    loss.item()  # this line
        return loss

    run, recorder = recorded(call, step)
    losses, expected = [], []
    for batch in parity.batches(steps=8)[:, dist.get_rank()]:
        try:
            losses.append(run(batch, True).clone())
        except RuntimeError as error:
            # Only the recorder sees tolist() on the CPU; on a GPU it copies.
            expects = "not permitted when stream is capturing" if how == "tolist" else "this line"
            assert expects in str(error), error
            losses.append(step(batch, len(losses) % 2 == 0).detach())
    assert not run.graphs
    assert len(recorder.recordings) == 5
    assert model.sharded.coordinator.steps == 8
    plain, call = sharded(mode)
    optim = fully_shard_optimizer(sgd(plain.parameters()))
    for batch in parity.batches(steps=8)[:, dist.get_rank()]:
        expected.append(step(batch, True).detach())
    assert_equal(losses, expected)
    assert_equal(values_of(model), values_of(plain))


@pytest.mark.long_if("*-step")
@pytest.mark.parametrize("where", ["forward", "backward", "step"])
@on_ranks(2, timeout=120)
def test_refused_anywhere(where: str) -> None:
    """In the middle of a forward, a backward and an optimizer's step, collectives are under way."""
    switched_on = False

    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            if switched_on and where == "forward":
                x.sum().item()
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            if switched_on and where == "backward":
                gradient.sum().item()
            return gradient

    class Model(zoo.Plain):
        def trunk(self, x: Tensor) -> Tensor:
            for number, block in enumerate(self.blocks):
                x = block(x)
                if number == 1:
                    x = Reads.apply(x)
            return x

    def run(captures: bool) -> list[Tensor]:
        nonlocal switched_on
        switched_on = False
        model, call = sharded(EAGER, Model)
        optim = fully_shard_optimizer(sgd(model.parameters()))

        def step(x: Tensor) -> Tensor:
            loss = call(x)
            loss.backward()
            if switched_on and where == "step":
                next(iter(model.parameters())).grad.to_local().sum().item()
            optim.step()
            optim.zero_grad()
            return loss

        do = recorded(call, step)[0] if captures else step
        losses = []
        for number, batch in enumerate(parity.batches(steps=9)[:, dist.get_rank()]):
            switched_on = captures and number in (3, 4)
            if switched_on:
                with pytest.raises(RuntimeError, match="reads values"):
                    do(batch)
                switched_on = False
                losses.append((step if number == 3 else do)(batch).detach().clone())
            else:
                losses.append(do(batch).detach().clone())
        return [*losses, *values_of(model)]

    assert_equal(run(True), run(False))


@pytest.mark.long
@on_ranks(2, timeout=120)
def test_what_changes_behind_a_graph_is_refused() -> None:
    with capturable():
        model, call = sharded(EAGER, Noisy)
        optim = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True))

        def step(x: Tensor) -> Tensor:
            loss = call(x)
            loss.backward()
            optim.step()
            optim.zero_grad()
            return loss

        run, _ = recorded(call, step)
        x = parity.batches(steps=1)[0, dist.get_rank()]
        for _ in range(5):
            run(x)
        assert len(run.graphs) == 1

        def refused(match: str) -> None:
            before = values_of(model)
            with pytest.raises(RuntimeError, match=match):
                run(x)
            assert_equal(values_of(model), before)

        (group,) = optim.param_groups
        group["lr"] = 1e-3
        refused(r"AdamW's hyperparameter, in group 0, 'lr'.*was 0\.01.*torch\.tensor")
        group["lr"] = 1e-2
        run(x)
        norm = model.module.norm
        kept, norm.running_mean = norm.running_mean, norm.running_mean.clone()
        refused(r"buffer 'norm\.running_mean'")
        norm.running_mean = kept
        state = optim.state[next(iter(model.parameters()))]
        kept, state["exp_avg"] = state["exp_avg"], state["exp_avg"].clone()
        refused("AdamW's state 'exp_avg' of")
        state["exp_avg"] = kept
        param = next(iter(model.parameters()))
        kept, param.grad = param.grad, param.grad.clone()
        refused("gradient of")
        param.grad = kept
        run(x)
        optim.load_state_dict(copy.deepcopy(optim.state_dict()))
        refused("AdamW's state")
        run.reset()
        assert not run.graphs
        for _ in range(4):
            run(x)
        assert len(run.graphs) == 1
        model.reset()
        assert not run.graphs
        for _ in range(4):
            run(x)
        with pytest.raises(ValueError, match=r"Tensor 0 among.*shape \(3, 8\).*it had \(6, 8\)"):
            run(x[:3])
        with pytest.raises(ValueError, match="requires gradients"):
            run(x.clone().requires_grad_())
        with pytest.raises(TypeError, match=r"hashed.*set"):
            run({1, 2})


class Holds(zoo.Plain):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.ones(16)  # not a buffer

    def trunk(self, x: Tensor) -> Tensor:
        return super().trunk(x) * self.factor


@on_ranks(2, timeout=120)
def test_tensors_from_elsewhere_are_refused() -> None:
    x = parity.batches(steps=1)[0, dist.get_rank()]
    for mode in (EAGER, AOT_EAGER):
        _, call = sharded(mode, Holds)
        run, _ = recorded(call, lambda x: call(x).backward())
        for _ in range(3):
            run(x)
        with pytest.raises(RuntimeError, match=r"neither its argument nor the model's.*as a buffer"):
            run(x)
    _, call = sharded()
    weight = torch.ones(())
    run, _ = recorded(call, lambda x: (call(x) * weight).backward())
    for _ in range(3):
        run(x)
    with pytest.raises(RuntimeError, match=r"shape \(\).*neither its argument"):
        run(x)


@on_ranks(2, timeout=120)
def test_optimizers_that_count_on_the_host_are_refused() -> None:
    model, call = sharded()
    optim = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))

    def step(x: Tensor) -> None:
        call(x).backward()
        optim.step()
        optim.zero_grad()

    run, recorder = recorded(call, step)
    x = parity.batches(steps=1)[0, dist.get_rank()]
    for _ in range(3):
        run(x)
    with pytest.raises(RuntimeError, match=r"AdamW counts its steps on the host.*capturable=True"):
        run(x)
    assert not recorder.recordings
    step(x)


@pytest.mark.long_if("*-steps ordinarily")
@pytest.mark.parametrize("what", ["evaluates", "steps ordinarily", "other argument"])
@on_ranks(2, timeout=100)
def test_a_rank_that_does_something_else_is_named(what: str) -> None:
    group = dist.new_group(timeout=timedelta(minutes=30))  # no test can wait for it
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    model, call = sharded(device_mesh=mesh)

    def step(x: Tensor, twice: bool = False) -> Tensor:
        loss = call(x) * (2 if twice else 1)
        loss.backward()
        model.zero_grad()
        return loss

    run, _ = recorded(call, step)
    x = parity.batches(steps=1)[0, dist.get_rank()]
    for _ in range(6):
        run(x)

    def diverge() -> None:
        if dist.get_rank() == 0:
            run(x)
            run(x)
        elif what == "evaluates":
            with torch.no_grad():
                call(x)
        elif what == "steps ordinarily":
            step(x)
        else:
            run(x, twice=True)

    with pytest.raises(RuntimeError) as raised:
        diverge()
    for part in ("a replay of", "step, graph 1", "test_cuda_graphs.py:", "model.reset()"):
        assert part in str(raised.value), part
    model.reset()
    assert not run.graphs
    for _ in range(4):
        run(x)
    assert len(run.graphs) == 1


@on_ranks(2)
def test_gradients_stay_where_they_are() -> None:
    """As Megatron-FSDP does: the program may capture forward and backward itself, and step outside."""
    model, call = sharded(zero_dp_strategy=2)
    optim = fully_shard_optimizer(sgd(model.parameters()))
    plain, other = parity.shard(parity.build(zoo.Plain), EAGER, sharding={"zero_dp_strategy": 2})
    its = fully_shard_optimizer(sgd(plain.parameters()))
    found = set()
    for batch in parity.batches(steps=3)[:, dist.get_rank()]:
        for run, optimizer in ((call, optim), (other, its)):
            run(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.add(tuple(param.grad.to_local().data_ptr() for param in model.parameters()))
        assert all(not param.grad.to_local().any() for param in model.parameters())
        assert all(param.grad is None for param in plain.parameters())
    assert len(found) == 1
    assert_equal(values_of(model), values_of(plain))
    model.zero_grad()
    model.zero_grad_buffer()
    assert all(param.grad is not None for param in model.parameters())
    assert {kind.use for kind in model.sharded.comm_buffers.addresses} == {"gradients"}
