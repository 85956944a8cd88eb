"""Steps as CUDA graphs: the bits of ordinary steps, and refusals that leave the model and the device usable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from gpu_models import FAKE, MODES, same_bits, tokens, whole

from mfsdp_compile import capture_step, compile_step, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.models.llama import Block

STEPS = 4


@contextlib.contextmanager
def on_any_device() -> Iterator[None]:
    """Context in which torch takes capturable optimizers on fake GPUs, too, and in which these are still known."""
    with contextlib.ExitStack() as stack:
        if FAKE:
            stack.enter_context(mock.patch("torch.optim.adam._get_capturable_supported_devices", return_value=["cpu"]))
            stack.enter_context(
                mock.patch("mfsdp_compile.runtime.optim.kinds._is_of_torch_or_python", return_value=True)
            )
        yield


def train(mode: str, strategy: int, captures: bool, microbatches: int) -> list[torch.Tensor]:
    """Return losses and weights."""
    model: Any = fully_shard_model(
        whole(),
        fsdp_unit_modules=[Block],
        zero_dp_strategy=strategy,
        cuda_graph_mode=True,
        sync_model_each_microbatch=False,
    )
    call = model
    if mode != "eager":
        call = torch.compile(model, backend="mfsdp", fullgraph=True, options={"inner": mode})
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device="cuda"), capturable=True)
    fully_shard_optimizer(optimizer)

    def step(x: torch.Tensor, y: torch.Tensor, last: bool) -> torch.Tensor:
        model.is_last_microbatch = last
        loss = call(x, y)
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    run = capture_step(call, step, warm_up=1) if captures else step
    found = []
    for number in range(STEPS):
        for micro in range(microbatches):
            loss = run(*tokens(number * microbatches + micro), micro == microbatches - 1)
            found.append(loss.detach().clone())
    found += [param.to_local().detach().clone() for param in model.parameters()]
    if captures:
        assert run.graphs
        run.reset()
    return found


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("strategy", "microbatches"), [(3, 1), (1, 2)])
def test_captured_steps_have_the_bits_of_ordinary_ones(mode: str, strategy: int, microbatches: int) -> None:
    with on_any_device(), same_bits():
        mine = train(mode, strategy, True, microbatches)
        torch._dynamo.reset()
        its = train(mode, strategy, False, microbatches)
    for number, (a, b) in enumerate(zip(mine, its, strict=True)):
        assert torch.equal(a, b), number


def train_in_steps(mode: str, captures: bool, **arguments: Any) -> tuple[list[torch.Tensor], Any]:
    """Return losses and weights of ``compile_step``, and the step."""
    model: Any = fully_shard_model(whole(), fsdp_unit_modules=[Block], cuda_graph_mode=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device="cuda"), capturable=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=STEPS)
    how: dict[str, Any] = {"backend": None} if mode == "eager" else {"options": {"inner": mode}}
    step = compile_step(model, optimizer, cuda_graphs=captures, **how, **arguments)
    found = []
    for number in range(STEPS + 2):
        found.append(step(*tokens(number)).clone())
        if step.grad_norm is not None:
            found.append(step.grad_norm.clone())
        schedule.step()
    found += [param.to_local().detach().clone() for param in model.parameters()]
    return found, step


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("arguments", [{}, {"max_norm": 0.5}, {"compile_optimizer": True}], ids=str)
def test_captured_train_steps_have_the_bits_of_ordinary_ones(mode: str, arguments: dict[str, Any]) -> None:
    if mode != "inductor" and "max_norm" in arguments:
        pytest.skip("as with Inductor")
    if FAKE and "compile_optimizer" in arguments:
        pytest.skip("nothing compiles for fake GPUs")
    with on_any_device(), same_bits():
        mine, captured = train_in_steps(mode, True, **arguments)
        torch._dynamo.reset()
        its, _ = train_in_steps(mode, False, **arguments)
        is_compiled = mode == "inductor" or "compile_optimizer" in arguments
        explained = captured.explain()
        assert ("the optimizer's step is compiled, as 1 kernel" in explained) is is_compiled, explained
    captured.reset()
    for number, (a, b) in enumerate(zip(mine, its, strict=True)):
        assert torch.equal(a, b), number


@pytest.mark.usefixtures("one_rank")
def test_a_refused_step_can_be_run() -> None:
    model: Any = fully_shard_model(whole(), fsdp_unit_modules=[Block], cuda_graph_mode=True)
    reads = True

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = model(x, y)
        if reads:
            loss.item()
        loss.backward()
        model.zero_grad()
        return loss

    run = capture_step(model, step)
    losses = [run(*tokens()).clone() for _ in range(3)]
    with pytest.raises(RuntimeError, match=r"reads values.*test_gpu_graphs\.py:\d+ in step: loss\.item\(\)"):
        run(*tokens())
    losses.append(step(*tokens()).detach())
    reads = False
    losses += [run(*tokens()).clone() for _ in range(2)]
    assert run.graphs
    torch.cuda.synchronize()
    for loss in losses[1:]:
        assert torch.allclose(loss, losses[0])
    run.reset()
