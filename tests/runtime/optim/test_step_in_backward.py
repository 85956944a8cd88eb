"""``compile_step``: the optimizer steps over buckets in backward, with the numbers of a step that is written out."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from failing import values
from parity import AOT_EAGER, EAGER, INDUCTOR, raises_everywhere
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint

from mfsdp_compile import (
    MegatronFSDP,
    MixedPrecisionPolicy,
    OptimizerOffloadPolicy,
    compile_step,
    declare_optimizer,
    fully_shard_model,
    fully_shard_optimizer,
)
from mfsdp_compile.checkpoint import Checkpoints
from mfsdp_compile.diagnostics.doctor import STRATEGIES, mesh_arguments
from mfsdp_compile.passes import roles
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.guests.offload.operators import OFFLOAD
from mfsdp_compile.runtime.guests.optimizers.flat_step import FlatStep
from mfsdp_compile.runtime.memory import gradients
from mfsdp_compile.runtime.schedule.phase import Phase


@declare_optimizer("elementwise")
class Lion(torch.optim.Optimizer):
    """Lion (https://arxiv.org/abs/2302.06675), as programs write it."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                param.add_((0.9 * mean + 0.1 * param.grad).sign_(), alpha=-group["lr"])
                mean.lerp_(param.grad, 0.01)


@declare_optimizer("elementwise")
class CountsInGroups(Lion):
    """Counts steps in its groups, as Apex's and DeepSpeed's fused optimizers do."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["lr"] = 1e-2 / group["step"]
        super().step()


@declare_optimizer("elementwise")
class KeepsGradients(torch.optim.Optimizer):
    """Keeps the last gradient, and not a copy."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    param.sub_(param.grad - 0.5 * state.get("previous", param.grad), alpha=group["lr"])
                    state["previous"] = param.grad


@declare_optimizer("elementwise")
class FailsAfterBackward(Lion):
    """Fails in its second step, when the buckets have been stepped."""

    def step(self, closure: None = None) -> None:
        super().step()
        if self.state and not any(group["params"] for group in self.param_groups):
            raise ValueError("after the backward")


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "AdamW lr tensor": lambda params: torch.optim.AdamW(params, lr=torch.tensor(1e-2), foreach=False),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "Lion": Lion,
    "CountsInGroups": CountsInGroups,
    "KeepsGradients": KeepsGradients,
    "Muon": lambda params: torch.optim.Muon([p for p in params if p.ndim == 2], lr=1e-2),
}


class Trained:
    """A model after some steps.

    Args:
        how: ``"written out"``, or ``"compile_step"``.
        factory: Makes the model.
        sharding: Further arguments of ``fully_shard_model``.
        max_norm, accumulation, compile_optimizer: See :func:`compile_step`.

    Attributes:
        stepped: For each step over a bucket in backward, whether a compiled graph has made it.
    """

    def __init__(
        self,
        how: str,
        mode: str,
        factory: Callable[[], nn.Module] = zoo.Uneven,
        optimizer: str = "AdamW",
        steps: int = 4,
        max_norm: float | None = None,
        accumulation: int = 1,
        flat: bool = True,
        compile_optimizer: bool = False,
        **sharding: Any,
    ) -> None:
        self.model = fully_shard_model(
            parity.build(factory), **({"fsdp_unit_modules": [getattr(factory, "block", zoo.Block)]} | sharding)
        )
        is_muon = optimizer == "Muon"
        self.optimizer = fully_shard_optimizer(
            OPTIMIZERS[optimizer](self.model.parameters()), flat=flat and not is_muon
        )
        # It sets a number for each group at each step: not constant in the graph.
        self.schedule = None
        if optimizer not in ("CountsInGroups", "AdamW lr tensor"):
            self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=10)
        self.how, self.max_norm, self.accumulation = how, max_norm, accumulation
        options = {} if mode == EAGER else {"inner": mode}
        self.losses: list[Tensor] = []
        self.stepped: list[bool] = []
        if how == "compile_step":
            backend = None if mode == EAGER else "mfsdp"
            self.step = compile_step(
                self.model,
                self.optimizer,
                max_norm=max_norm,
                accumulation=accumulation,
                divide_loss=True,
                compile_optimizer=compile_optimizer,
                backend=backend,
                options=options,
            )
        else:
            self.call: Any = self.model
            if mode != EAGER:
                self.call = torch.compile(self.model, backend="mfsdp", options=options)
        self.train(parity.batches(steps * accumulation, shape=(3, 8)))

    def train(self, data: Tensor) -> None:
        with _counting(self.stepped):
            for first in range(0, len(data), self.accumulation):
                torch.manual_seed(first + dist.get_rank())
                micros = data[first : first + self.accumulation, dist.get_rank()]
                self._step(micros) if self.how == "compile_step" else self._step_written_out(micros)
                if self.schedule is not None:
                    self.schedule.step()

    def _step(self, micros: Tensor) -> None:
        for micro in micros[:-1]:
            self.losses.append(self.step.accumulate(micro))
        self.losses.append(self.step(micros[-1]))
        assert all(param.grad is None for param in self.model.parameters())

    def _step_written_out(self, micros: Tensor) -> None:
        for number, micro in enumerate(micros):
            with self.model.sync() if number == len(micros) - 1 else self.model.no_sync():
                loss = self.call(micro)
                (loss / self.accumulation if self.accumulation > 1 else loss).backward()
            self.losses.append(loss.detach())
        if self.max_norm is not None:
            params = [param for group in self.optimizer.param_groups for param in group["params"]]
            torch.nn.utils.clip_grad_norm_(params, self.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Losses, rows of parameters, and the optimizer's state for them."""
        found = {f"loss {number}": loss for number, loss in enumerate(self.losses)}
        for name, param in self.model.named_parameters():
            found[name] = param.to_local().detach()
            for key, value in self.optimizer.state[param].items():
                found[f"{name}, {key}"] = value.to_local() if hasattr(value, "to_local") else torch.as_tensor(value)
        return found


@contextlib.contextmanager
def _counting(stepped: list[bool]) -> Iterator[None]:
    def step_bucket(flat: FlatStep, *args: Any) -> bool:
        frame, in_graph = sys._getframe(), False
        while (frame := frame.f_back) is not None:  # type: ignore[assignment]
            in_graph |= frame.f_code.co_name == "_deliver"
        stepped.append(in_graph)
        return original(flat, *args)

    original = FlatStep.step_bucket
    with mock.patch.object(FlatStep, "step_bucket", step_bucket):
        yield


def check(mode: str, ahead: bool = True, **arguments: Any) -> Trained:
    """Compare both ways of training.

    Args:
        ahead: Whether buckets are stepped in backward: all of them, or none.
    """
    one, other = (Trained(how, mode, **arguments) for how in ("written out", "compile_step"))
    assert one.tensors.keys() == other.tensors.keys()
    for name, value in one.tensors.items():
        assert torch.equal(value, other.tensors[name]), name
    assert one.stepped == []
    trained = sum(bucket.plan.requires_grad for bucket in other.model.sharded.buckets)
    steps = len(other.losses) // other.accumulation
    assert len(other.stepped) == (trained * (steps - 1) if ahead else 0)  # the first step follows its checks
    assert all(in_graph == (mode != EAGER) for in_graph in other.stepped)
    return other


# -- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.long_unless("4-optim_grads_params-aot_eager", "4-HSDP optim-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_strategies(strategy: str, mode: str) -> None:
    """With float32 everywhere, parameters that stay whole are used where they rest: autograd may still need them, and
    only a graph knows when it does not."""
    at_rest = STRATEGIES[strategy]["zero_dp_strategy"] != 3
    check(mode, ahead=mode != EAGER or not at_rest, accumulation=2, **mesh_arguments(strategy))


@pytest.mark.long
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_strategies_in_mixed_precision(strategy: str, mode: str) -> None:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, main_params_dtype=torch.float32, main_grads_dtype=torch.float32
    )
    check(mode, accumulation=2, mixed_precision_policy=policy, **mesh_arguments(strategy))


@pytest.mark.long_unless("2-eager-AdamW", "2-eager-Counts*", "2-aot_eager-SGD")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_optimizers(mode: str, optimizer: str) -> None:
    check(mode, ahead=optimizer not in ("Muon", "CountsInGroups"), optimizer=optimizer)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Muon"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@on_ranks(4)
def test_twenty_steps(strategy: str, optimizer: str) -> None:
    for max_norm in (None, 0.01):
        check(
            AOT_EAGER,
            ahead=max_norm is None and optimizer != "Muon",
            optimizer=optimizer,
            steps=20,
            max_norm=max_norm,
            accumulation=2,
            **mesh_arguments(strategy),
        )


@pytest.mark.long_if("*-1")
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_clipping(mode: str, accumulation: int) -> None:
    trained = check(mode, ahead=False, max_norm=0.01, accumulation=accumulation)
    assert trained.step.grad_norm is not None
    assert trained.step.grad_norm.item() > 0.01


@pytest.mark.long_if("2-aot_eager-*")
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_scaled_losses(mode: str, max_norm: float | None) -> None:
    """A step whose gradients are infinite on one rank is skipped on both, and the scale is halved."""

    def run(whole: bool) -> tuple[MegatronFSDP, list[Tensor], list[float]]:
        model = fully_shard_model(parity.build(zoo.Uneven), fsdp_unit_modules=[zoo.Block])
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), flat=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
        how: dict[str, Any] = {"backend": None} if mode == EAGER else {"options": {"inner": mode}}
        call: Any = model if mode == EAGER else torch.compile(model, backend="mfsdp", options=how["options"])
        step = compile_step(model, optimizer, max_norm=max_norm, scaler=scaler, **how) if whole else None
        losses, scales = [], []
        for number, batch in enumerate(parity.batches(6, shape=(3, 8))[:, dist.get_rank()]):
            batch = batch * (torch.inf if number == 2 and dist.get_rank() == 1 else 1)
            if step is not None:
                losses.append(step(batch))
            else:
                loss = call(batch)
                scaler.scale(loss).backward()
                if max_norm is not None:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                losses.append(loss.detach())
            scales.append(scaler.get_scale())
        if step is not None:
            assert "scaler" in step.explain() or max_norm is not None
        return model, losses, scales

    (model, losses, scales), (other, others, other_scales) = run(False), run(True)
    assert scales == other_scales
    assert min(scales) < 2.0**8, "a step was skipped"
    assert all(
        torch.equal(
            a,
            b,
        )
        or (a.isnan() and b.isnan())
        for a, b in zip(losses, others, strict=True)
    )
    assert all(map(torch.equal, values(model), values(other)))
    assert all(value.isfinite().all() for value in values(other))


@pytest.mark.long
@on_ranks(2)
def test_inductor() -> None:
    """What the graph returns in place of gradients has no memory: no kernel fills it."""
    trained = check(INDUCTOR, steps=3)
    (record,) = [each for each in trained.model.sharded.compiled_graphs if Phase.BACKWARD in each.reports]
    assert record.context.delivers_early
    outputs: list[Tensor] = []
    begin = gradients._receive

    def receive(backward: Any, gradient: Any, *args: Any, **more: Any) -> Any:
        outputs.extend([gradient] if not more else [])
        return begin(backward, gradient, *args, **more)

    with mock.patch.object(gradients, "_receive", receive):
        trained.train(parity.batches(1, shape=(3, 8)))
    assert len(outputs) == len(trained.model.sharded.buckets)
    assert all(output.untyped_storage().nbytes() == output.dtype.itemsize for output in outputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@on_ranks(2)
def test_gradients_in_another_dtype(dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=dtype)
    check(EAGER, mixed_precision_policy=policy, accumulation=2)


# -- what is stepped after the backward -------------------------------------------------------------------------------


class _CheckpointedReentrantTied(zoo.Plain):
    """One block many times, each in a backward of its own: reentrant checkpointing."""

    def trunk(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = checkpoint(self.blocks[0], x, use_reentrant=True)
        return x


PARTLY: dict[str, type[nn.Module]] = {
    "Unused": zoo.Unused,
    "FrozenParameters": zoo.FrozenParameters,
    "FrozenUnit": zoo.FrozenUnit,
    "Tied": zoo.Tied,
    "Detached": zoo.Detached,
    "CalledTwice": zoo.CalledTwice,
    "Checkpointed": zoo.Checkpointed,
    "GraphBreaks": zoo.GraphBreaks,
    "DisabledChild": zoo.DisabledChild,
    "RootParameter": zoo.RootParameter,
    "MixedTypes": zoo.MixedTypes,
    "Scalars": zoo.Scalars,
    "CheckpointedReentrant": zoo.CheckpointedReentrant,
    "CheckpointedReentrantTied": _CheckpointedReentrantTied,
}


@pytest.mark.long_unless(
    "2-eager-Unused",
    "2-eager-Detached",
    "2-eager-CheckpointedReentrantTied",
    "2-aot_eager-GraphBreaks",
)
@pytest.mark.parametrize("name", PARTLY)
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_models(mode: str, name: str) -> None:
    """Some buckets cannot be stepped in backward. Numbers are the same in any case."""
    one, other = (Trained(how, mode, PARTLY[name]) for how in ("written out", "compile_step"))
    for key, value in one.tensors.items():
        assert torch.equal(value, other.tensors[key]), key


class _ExtraOnOneRank(zoo.Plain):
    """A parameter of each block that only the last rank uses."""

    class block(zoo.Block):
        def __init__(self, width: int = 16) -> None:
            super().__init__(width)
            self.extra = nn.Parameter(torch.ones(width))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * self.extra if dist.get_rank() == dist.get_world_size() - 1 else x)


class _UsedInTurns(zoo.Plain):
    """A parameter of each block that only every other forward uses."""

    class block(zoo.Block):
        def __init__(self, width: int = 16) -> None:
            super().__init__(width)
            self.extra, self.calls = nn.Parameter(torch.ones(width)), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x * self.extra if self.calls % 2 else x)


@on_ranks(2)
def test_parameters_that_are_used_in_turns() -> None:
    one, other = (Trained(how, EAGER, _UsedInTurns, steps=6) for how in ("written out", "compile_step"))
    assert other.stepped
    for key, value in one.tensors.items():
        assert torch.equal(value, other.tensors[key]), key


@on_ranks(2)
def test_ranks_that_use_other_parameters() -> None:
    one, other = (Trained(how, EAGER, _ExtraOnOneRank) for how in ("written out", "compile_step"))
    for key, value in one.tensors.items():
        assert torch.equal(value, other.tensors[key]), key


@on_ranks(2)
def test_hooks_on_one_rank_run_for_what_another_rank_has_stepped_over() -> None:
    trained = Trained("compile_step", EAGER, _ExtraOnOneRank, steps=1)
    seen: list[Tensor] = []
    if dist.get_rank() == 0:  # does not use it, and so leaves its bucket to the optimizer's step
        extra = trained.model.get_parameter("blocks.0.extra")
        extra.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
    trained.stepped.clear()
    trained.train(parity.batches(1, shape=(3, 8)))
    assert len(seen) == (dist.get_rank() == 0)
    assert len(trained.stepped) == len(trained.model.sharded.buckets) - (3 if dist.get_rank() == 0 else 0)


def _with_penalty(model: Any, x: Tensor) -> Tensor:
    return model(x) + 0.01 * sum(param.square().sum() for param in model.parameters())


def _penalty_first(model: Any, x: Tensor) -> Tensor:
    return 0.01 * sum(param.square().sum() for param in model.parameters()) + model(x)


needs_penalties = pytest.mark.skipif(
    not compat.DTENSOR_SUBCLASSES_DISPATCH, reason="torch cannot differentiate parameters at rest"
)


@on_ranks(2)
def test_a_gradient_that_keeps_its_memory_is_copied_where_it_is_state() -> None:
    """With ``cuda_graph_mode``, the next gradient is written to the same memory."""
    one = Trained("written out", EAGER, optimizer="KeepsGradients", flat=False)
    for how in ("written out", "compile_step"):
        other = Trained(how, EAGER, optimizer="KeepsGradients", cuda_graph_mode=True)
        for key, value in one.tensors.items():
            torch.testing.assert_close(other.tensors[key], value, msg=f"{how}, {key}")


@needs_penalties
@pytest.mark.long_if("2-aot_eager-*")
@pytest.mark.parametrize("loss", [_with_penalty, _penalty_first])
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_penalties_on_weights(mode: str, loss: Any) -> None:
    """Gradients that do not come from the forward: if they arrive later, the first step finds out."""
    found = []
    for how in ("written out", "compile_step"):
        model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), flat=True)
        options = {"inner": AOT_EAGER}
        step = compile_step(model, optimizer, loss, backend=None if mode == EAGER else "mfsdp", options=options)
        call = model if mode == EAGER else torch.compile(model, backend="mfsdp", options=options)
        for batch in parity.batches(3, shape=(3, 8)):
            x = batch[dist.get_rank()]
            if how == "compile_step":
                step(x)
                assert mode == EAGER or "penalty" in step.explain()
            else:
                loss(call, x).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([param.to_local().clone() for param in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)  # the penalty is summed in one more graph


@needs_penalties
@on_ranks(2)
def test_a_penalty_that_begins_later_is_refused() -> None:
    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model: Any, x: Tensor, penalized: bool) -> Tensor:
        return _with_penalty(model, x) if penalized else model(x)

    step = compile_step(model, optimizer, loss, options={"inner": AOT_EAGER})
    x = parity.batches(1, shape=(3, 8))[0, dist.get_rank()]
    step(x, False)
    step(x, False)
    with raises_everywhere(RuntimeError, "such as a penalty in the loss", "load a checkpoint"):
        step(x, True)
    with raises_everywhere(RuntimeError, "had been stepped in part", "model.reset()"):
        step(x, False)
    with parity.first_rank_warns(RuntimeWarning, "its rows come from different steps"):
        model.reset()
    step(x, False)


@on_ranks(2)
def test_hooks_and_other_reasons() -> None:
    trained = Trained("compile_step", EAGER, steps=1)
    count = len(trained.model.sharded.buckets)
    assert trained.step.explain() == f"{count} of {count} buckets are stepped in backward"
    seen: list[Tensor] = []
    weight = trained.model.get_parameter("blocks.0.up.weight")
    handle = weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad))
    assert "blocks.0: after the backward; hooks of its parameters look at .grad" in trained.step.explain()
    trained.train(parity.batches(1, shape=(3, 8)))
    assert len(seen) == 1
    assert seen[0].full_tensor().abs().sum() > 0
    handle.remove()
    with_hook = trained.optimizer.register_step_post_hook(lambda *_: None)
    assert trained.step.explain().startswith(f"0 of {count} buckets")
    with_hook.remove()
    trained.stepped.clear()
    trained.train(parity.batches(1, shape=(3, 8)))
    assert len(trained.stepped) == count


@pytest.mark.long_unless("*-aot_eager-CPUOffloadPolicy", "*-eager-OptimizerOffloadPolicy")
@pytest.mark.parametrize("policy", [CPUOffloadPolicy, OptimizerOffloadPolicy])
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_buckets_in_host_memory(mode: str, policy: Any) -> None:
    """The CPU steps over them."""
    check(mode, offload_policy=policy(pin_memory=False))


@pytest.mark.long
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_ways_to_train_in_host_memory(mode: str) -> None:
    policy = OptimizerOffloadPolicy(pin_memory=False)
    for strategy in (1, 2, 3):
        check(mode, accumulation=2, zero_dp_strategy=strategy, offload_policy=policy)
    half = MixedPrecisionPolicy(torch.bfloat16)
    check(mode, offload_policy=policy, mixed_precision_policy=half)
    check(mode, ahead=False, offload_policy=policy, max_norm=0.01)
    check(mode, factory=zoo.Plain, offload_policy={zoo.Block: policy})  # and the root's on the device


@pytest.mark.long
@on_ranks(2)
def test_compiled_steps_in_host_memory() -> None:
    one, other = (
        Trained(
            how, INDUCTOR, offload_policy=CPUOffloadPolicy(pin_memory=False), compile_optimizer=how == "compile_step"
        )
        for how in ("written out", "compile_step")
    )
    assert "as 1 kernel" in other.step.explain()
    for name, value in one.tensors.items():  # a kernel rounds less often
        torch.testing.assert_close(value, other.tensors[name], rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_optimizers_without_flat_steps() -> None:
    trained = check(EAGER, ahead=False, flat=False)
    assert "flat=True" in trained.step.explain()


# -- between steps ----------------------------------------------------------------------------------------------------


@pytest.mark.long_if("*aot_eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_alternating_with_steps_that_are_written_out(mode: str, tmp_path: Any) -> None:
    """Gradients can be looked at in the steps between; evaluation and checkpoints see the weights of the last step."""
    trained, other = Trained("compile_step", mode), Trained("written out", mode)
    data = parity.batches(3, shape=(3, 8), seed=5)
    for step, batch in enumerate(data):
        for each in (trained, other):
            each.how = "written out" if step == 1 or each is other else "compile_step"
            each.call = getattr(each, "call", each.model)
            each.train(batch[None])
        with torch.no_grad():
            assert torch.equal(trained.model(batch[0]), other.model(batch[0]))
    for key, value in other.tensors.items():
        assert torch.equal(value, trained.tensors[key]), key
    Checkpoints(tmp_path).save(1, trained.model, trained.optimizer)
    saved = {name: value.clone() for name, value in trained.tensors.items()}
    trained.train(data[:1])
    Checkpoints(tmp_path).load(trained.model, trained.optimizer)
    for key, value in trained.tensors.items():
        if key in saved:
            assert torch.equal(value, saved[key]), key


@pytest.mark.long_if("*aot_eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_gradients_that_the_loss_computes(mode: str) -> None:
    """``torch.autograd.grad`` of weights inside of the loss function takes no step."""

    def loss(model: Any, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return model(x)

    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
    optimizer = torch.optim.AdamW(model.parameters())
    step = compile_step(
        model, optimizer, loss, backend=None if mode == EAGER else "mfsdp", options={"inner": AOT_EAGER}
    )
    batch = parity.batches(1, shape=(3, 8))[0, dist.get_rank()]
    step(batch)
    before = [param.to_local().clone() for param in model.parameters()]
    found = torch.autograd.grad(step._loss_fn(model, batch), list(model.parameters()))
    expected = torch.autograd.grad(model(batch), list(model.parameters()))
    for gradient, right in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient.to_local(), right.to_local())
    for param, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.to_local(), was)


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_gradients_are_gone_when_they_were_used(mode: str) -> None:
    """While one bucket is stepped, the reduced gradients of the buckets before it no longer exist."""
    alive: list[int] = []
    references: list[weakref.ref[Any]] = []

    def step_bucket(flat: FlatStep, runs: Any, gradient: Tensor, *args: Any) -> bool:
        alive.append(sum(reference() is not None for reference in references))
        references.append(weakref.ref(gradient.untyped_storage()))
        return original(flat, runs, gradient, *args)

    original = FlatStep.step_bucket
    with mock.patch.object(FlatStep, "step_bucket", step_bucket):
        trained = Trained("compile_step", mode, steps=2)
    assert len(alive) == len(trained.model.sharded.buckets) > 3
    assert max(alive) == 0


@on_ranks(2)
def test_a_forward_after_a_change_gathers_again() -> None:
    """What a step has gathered early is not used if the program changes parameters."""
    changed = []
    for how in ("written out", "compile_step"):
        trained = Trained(how, AOT_EAGER, steps=2, zero_dp_strategy=1)
        with torch.no_grad():
            for param in trained.model.parameters():
                param.mul_(0.5)
            evaluated = trained.model(parity.batches(1, shape=(3, 8))[0, dist.get_rank()])
        trained.train(parity.batches(2, shape=(3, 8)))
        changed.append([evaluated, *trained.tensors.values()])
    assert all(map(torch.equal, *changed))


# -- what goes wrong --------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_an_error_in_the_middle_of_the_backward() -> None:
    """Buckets that were stepped have changed. The model says that a checkpoint must be loaded."""
    trained = Trained("compile_step", EAGER)
    before = [param.to_local().clone() for param in trained.model.parameters()]

    def fail(gradient: Tensor) -> None:
        raise ValueError("in the middle")

    x = parity.batches(1, shape=(3, 8))[0, dist.get_rank()].requires_grad_()
    handle = trained.model.get_parameter("blocks.0.up.weight").register_hook(fail)
    with pytest.raises(ValueError, match="in the middle"):
        trained.step(x)
    handle.remove()
    assert any(not torch.equal(p.to_local(), was) for p, was in zip(trained.model.parameters(), before, strict=True))
    assert all(bucket.consumer is None for bucket in trained.model.sharded.buckets)
    with raises_everywhere(RuntimeError, "had been stepped in part", "model.reset()"):
        trained.model(x)
    with parity.first_rank_warns(RuntimeWarning, "its rows come from different steps"):
        trained.model.reset()
    trained.train(parity.batches(1, shape=(3, 8)))


@on_ranks(2)
def test_an_error_after_the_buckets_were_stepped() -> None:
    """The step that fails changes nothing itself: the backward has."""
    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
    step = compile_step(model, FailsAfterBackward(model.parameters()), backend=None)
    x = parity.batches(1, shape=(3, 8))[0, dist.get_rank()]
    step(x)
    with pytest.raises(ValueError, match="after the backward"):
        step(x)
    with raises_everywhere(RuntimeError, "had been stepped in part", "model.reset()"):
        step(x)
    with parity.first_rank_warns(RuntimeWarning, "1 and a part of one"):
        model.reset()


@on_ranks(2)
def test_wrong_arguments() -> None:
    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="compiles it; got a compiled module"):
        compile_step(torch.compile(model, backend="mfsdp"), optimizer)
    with pytest.raises(
        TypeError, match=r"takes a torch\.optim\.Optimizer, got a Plain|takes a torch\.optim\.Optimizer"
    ):
        compile_step(model, model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_norm above 0"):
        compile_step(model, optimizer, max_norm=0.0)
    with pytest.raises(ValueError, match="a number of microbatches, got 0"):
        compile_step(model, optimizer, accumulation=0)
    with pytest.raises(ValueError, match="holds a parameter of shape"):
        compile_step(model, torch.optim.SGD(nn.Linear(2, 2).parameters()))
    step = compile_step(model, optimizer, accumulation=2, backend=None)
    batch = parity.batches(1, shape=(3, 8))[0, dist.get_rank()]
    with raises_everywhere(RuntimeError, "2 microbatches", "this call would be number 1"):
        step(batch)
    step.accumulate(batch)
    with raises_everywhere(RuntimeError, "2 microbatches", "this is the last one"):
        step.accumulate(batch)
    step(batch)
    no_loss = compile_step(model, optimizer, lambda model, x: {"loss": model(x)}, backend=None)
    with raises_everywhere(TypeError, "or a tuple that begins with it; got a dict"):
        no_loss(batch)


# -- graphs -----------------------------------------------------------------------------------------------------------


def _backward(**sharding: Any) -> list[torch.fx.Node]:
    """Return the nodes of the backward graph of a step, in order."""
    graphs: list[list[Any]] = []

    def note(graph: torch.fx.Graph, context: Any, phase: Any) -> None:
        if phase.value == "backward":
            graphs.append(list(graph.nodes))

    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block], **sharding)
    step = compile_step(
        model, torch.optim.SGD(model.parameters()), options={"inner": AOT_EAGER, "passes": [note], "regions": False}
    )
    step(parity.batches(1, shape=(3, 8))[0, dist.get_rank()])
    (nodes,) = graphs
    return nodes


@on_ranks(2)
def test_gradients_are_delivered_behind_their_waits() -> None:
    """Right behind the wait, which itself comes after the next bucket's reduction has started."""
    nodes = _backward()
    delivers = [number for number, node in enumerate(nodes) if node.target is roles.DELIVER]
    starts = [number for number, node in enumerate(nodes) if node.target in roles.REDUCES]
    assert len(delivers) == len(starts) == 5
    for deliver, following, after in zip(delivers[:-2], starts[1:], starts[2:], strict=False):
        assert following < deliver < after


@on_ranks(2)
def test_gradients_in_host_memory_are_delivered_before_the_next_copy() -> None:
    """The host waits for a copy when it has queued the backward of another unit."""
    nodes = _backward(offload_policy=OptimizerOffloadPolicy(pin_memory=False))
    where = {node: number for number, node in enumerate(nodes)}
    delivers = [node for node in nodes if node.target is roles.DELIVER]
    copies = [deliver.args[0] for deliver in delivers]
    assert [copy.target for copy in copies] == [OFFLOAD] * 5
    for deliver, following in zip(delivers, [*copies[1:], nodes[-1]], strict=True):
        between = nodes[where[deliver.args[0]] + 1 : where[deliver]]
        assert where[deliver] == where[following] - 1
        assert deliver is delivers[-1] or any(node.target in roles.WAITS for node in between)


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(1)
def test_one_rank(mode: str) -> None:
    """Nothing is reduced. Graphs deliver gradients; eager backwards leave parameters alone that they still use."""
    check(mode, ahead=mode != EAGER)


@pytest.mark.long
@on_ranks(2)
def test_reductions_that_are_awaited_at_once() -> None:
    """A gradient may arrive before the last reader of the shard."""
    check(AOT_EAGER, overlap_grad_reduce=False, zero_dp_strategy=2)
    check(INDUCTOR, steps=3, overlap_grad_reduce=False, zero_dp_strategy=2)
