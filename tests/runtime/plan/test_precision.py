"""Dtypes of parameters, gradients and communication; gradient scalers; exact bytes of storage."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER
from pool import on_ranks
from test_strategies import make
from torch import Tensor, nn

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.diagnostics.doctor import STRATEGIES, mesh_arguments
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

POLICIES: dict[str, tuple[torch.dtype, MixedPrecisionPolicy]] = {
    "bf16": (BF16, MixedPrecisionPolicy()),
    "bf16, reduced in fp32": (BF16, MixedPrecisionPolicy(grad_comm_dtype=F32)),
    "bf16, gradients in fp32": (BF16, MixedPrecisionPolicy(main_grads_dtype=F32)),
    "bf16, gradients in bf16": (BF16, MixedPrecisionPolicy(main_grads_dtype=BF16)),
    "bf16 throughout": (BF16, MixedPrecisionPolicy(main_params_dtype=None)),
    "bf16, sums in fp32": (BF16, MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=F32)),
    "fp32, reduced in bf16": (F32, MixedPrecisionPolicy(grad_comm_dtype=BF16)),
    "fp32 with fp64 parameters": (F32, MixedPrecisionPolicy(main_params_dtype=F64)),
    "fp32 with bf16 parameters": (F32, MixedPrecisionPolicy(main_params_dtype=BF16)),
    "fp16": (F16, MixedPrecisionPolicy()),
    "fp16 throughout": (F16, MixedPrecisionPolicy(main_params_dtype=None)),
}


def build(dtype: torch.dtype) -> nn.Module:
    return parity.build(zoo.Plain).to(dtype)


def shard(dtype: torch.dtype, strategy: str, mode: str, policy: MixedPrecisionPolicy, **arguments: Any) -> Any:
    return make(strategy, mode, lambda: zoo.Plain().to(dtype), mixed_precision_policy=policy, **arguments)


def batches(steps: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(steps, 2, dist.get_world_size(), 3, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


def train(call: Any, model: Any, dtype: torch.dtype) -> list[Tensor]:
    """Run two steps of two microbatches. Returns this rank's losses, gradients and parameters."""
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    results = []
    for step in batches(2, dtype):
        for i, micro in enumerate(step):
            model.is_last_microbatch = i == 1
            loss = call(micro[dist.get_rank()])
            loss.backward()
            results.append(loss.detach())
        results += [param.grad.to_local().clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return results + [param.to_local().detach().clone() for param in model.parameters()]


def reference(dtype: torch.dtype, policy: MixedPrecisionPolicy) -> list[nn.Parameter]:
    """Train in one process: main parameters in the main dtype, compute in the model's, gradients summed in float64.

    The sum is over ranks and microbatches.
    """
    model = build(dtype)
    main = [nn.Parameter(p.detach().to(policy.main_params_dtype or dtype)) for p in model.parameters()]
    optimizer = torch.optim.SGD(main, lr=0.05, momentum=0.9)
    ranks = dist.get_world_size()
    for step in batches(2, dtype):
        sums = [torch.zeros(p.shape, dtype=F64) for p in main]
        for micro in step:
            for x in micro:
                model(x).backward()
                for total, param in zip(sums, model.parameters(), strict=True):
                    total += param.grad.double() / ranks
                model.zero_grad()
        for param, total in zip(main, sums, strict=True):
            param.grad = total.to(param.dtype)
        optimizer.step()
        for own, param in zip(model.parameters(), main, strict=True):
            own.data.copy_(param)
    return main


CELLS = [(name, "optim_grads_params") for name in POLICIES]
CELLS += [(name, strategy) for name in ("bf16", "bf16, sums in fp32") for strategy in ("no_shard", "optim", "HFSDP")]


@pytest.mark.long
@pytest.mark.parametrize(("name", "strategy"), CELLS)
@on_ranks(4)
def test_policies(name: str, strategy: str) -> None:
    dtype, policy = POLICIES[name]
    main = policy.main_params_dtype or dtype
    model, call = shard(dtype, strategy, EAGER, policy)
    eager = train(call, model, dtype)
    assert {param.dtype for param in model.parameters()} == {main}
    compiled_model, compiled_call = shard(dtype, strategy, AOT_EAGER, policy)
    for a, b in zip(eager, train(compiled_call, compiled_model, dtype), strict=True):
        assert torch.equal(a, b)
    # The coarsest dtype that a gradient or a weight goes through, times a few roundings.
    coarsest = max(
        torch.finfo(t).eps for t in (dtype, main, policy.main_grads_dtype or main, policy.grad_comm_dtype or dtype)
    )
    for param, whole in zip(model.parameters(), reference(dtype, policy), strict=True):
        difference = (param.full_tensor().double() - whole.double()).abs().max()
        assert difference <= 8 * coarsest * whole.abs().max().double(), (difference, whole.abs().max())


@pytest.mark.long
@on_ranks(2)
def test_gradients_are_summed_in_the_dtype_that_was_asked_for() -> None:
    """Gradients are summed in the requested dtype: 256 times 1/256 of an ulp is lost in bfloat16, kept in float32."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4, dtype=BF16))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sum()

    for dtype, expected in ((F32, 1 + 256 * 2.0**-12), (BF16, 1.0)):
        for attribute, decoupled in (("grad", False), ("decoupled_grad", True)):
            model = fully_shard_model(
                Linear(),
                fsdp_unit_modules=[Linear],
                mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=dtype),
                use_decoupled_grad=decoupled,
            )
            model(torch.tensor(1.0, dtype=BF16)).backward()
            for _ in range(256):
                model(torch.tensor(2.0**-12, dtype=BF16)).backward()
            gradient = getattr(model.module.weight, attribute).full_tensor()
            assert gradient.dtype == (dtype if decoupled else BF16)
            assert bool((gradient.double() == torch.tensor(expected, dtype=dtype).to(gradient.dtype).double()).all())
            if decoupled:
                assert model.module.weight.grad is None
            # Users may change a visible gradient.
            model.scale_gradients(0.0)
            model(torch.tensor(1.0, dtype=BF16)).backward()
            assert bool((getattr(model.module.weight, attribute).full_tensor() == 1).all())
            for zero in (model.zero_grad_buffer, model.zero_grad):
                model(torch.tensor(1.0, dtype=BF16)).backward()
                zero()
                assert getattr(model.module.weight, attribute) is None


@pytest.mark.long
@on_ranks(4)
def test_memory_is_what_layouts_predict() -> None:
    """Shards take exactly the predicted bytes, and nothing is stored twice where dtypes agree."""
    for strategy in STRATEGIES:
        for dtype in (F32, BF16):
            model, call = shard(dtype, strategy, EAGER, MixedPrecisionPolicy())
            for bucket in model.sharded.buckets:
                plan = bucket.plan
                assert bucket.flat.nbytes == plan.layout.shard_numel * 4
                if bucket.resident is None:
                    continue
                whole = plan.layout.numel // (2 if strategy == "HFSDP" else 1)
                assert bucket.resident.nbytes == whole * dtype.itemsize
                same = bucket.flat.untyped_storage().data_ptr() == bucket.resident.untyped_storage().data_ptr()
                assert same == (dtype == F32)
            call(torch.randn(3, 8, dtype=dtype)).backward()
            model.finish_grad_sync()
            for bucket in model.sharded.buckets:
                held = {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in _local_gradients(bucket)}
                assert not held or sum(held.values()) == bucket.plan.layout.shard_numel * 4


def _local_gradients(bucket: Any) -> list[Tensor]:
    return [param.grad._local_tensor for param in bucket.params if param.grad._local_tensor.numel()]


# -- float16 and scalers ----------------------------------------------------------------------------------------------


@pytest.mark.long_unless("*-HFSDP0")
@pytest.mark.parametrize(
    ("mode", "strategy"),
    [
        (EAGER, "no_shard"),
        (EAGER, "HFSDP"),
        (AOT_EAGER, "optim"),
        (AOT_EAGER, "optim_grads_params"),
        *(
            (mode, strategy)
            for mode in (EAGER, AOT_EAGER)
            for strategy in ("no_shard", "optim", "optim_grads_params", "HSDP optim_grads_params", "HFSDP")
        ),
    ],
)
@on_ranks(4)
def test_scaler_skips_a_step_on_all_ranks(mode: str, strategy: str) -> None:
    model, call = shard(F16, strategy, mode, MixedPrecisionPolicy())
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    skipped = []
    for step in range(3):
        before = [param.to_local().clone() for param in model.parameters()]
        x = torch.randn(3, 8, dtype=F16)
        if step == 1 and dist.get_rank() == 2:
            x[0, 0] = float("inf")
        scaler.scale(call(x).float()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        after = [param.to_local() for param in model.parameters()]
        unchanged = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        everyone: list[Any] = [None] * 4
        dist.all_gather_object(everyone, (unchanged or not any(t.numel() for t in after), scaler.get_scale()))
        assert len(set(everyone)) == 1, everyone
        skipped.append(everyone[0][0])
    assert skipped == [False, True, False]
    assert scaler.get_scale() == 2.0**7


@on_ranks(4)
def test_float16_sums_do_not_overflow() -> None:
    """Gradients of 30,000 on each of four ranks do not overflow: their sum is beyond float16, their mean is not."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4, dtype=F16))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sum()

    for strategy in STRATEGIES:
        model = fully_shard_model(Linear(), fsdp_unit_modules=[Linear], **mesh_arguments(strategy))
        model(torch.tensor(30000.0, dtype=F16)).backward()
        assert bool((model.module.weight.grad.full_tensor() == 30000).all()), strategy


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_float64_keeps_its_digits(mode: str) -> None:
    """Steps in float64 are those of one process up to float64's rounding, also beside float32 parameters."""

    def made(is_mixed: bool) -> nn.Module:
        torch.manual_seed(0)
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        model = nn.Sequential(first, second) if is_mixed else nn.Sequential(first, nn.GELU(), second)
        (second if is_mixed else model).double()
        if is_mixed:
            first.register_forward_hook(lambda module, args, output: output.double())
        return model

    def stepped(model: nn.Module, call: Any, batches: list[Tensor], ranks: list[int]) -> list[Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        for step in range(3):
            (sum(call(batches[2 * step + rank]).square().mean() for rank in ranks) / len(ranks)).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        return [getattr(param, "full_tensor", lambda p=param: p)().detach().clone() for param in model.parameters()]

    for is_mixed in (False, True):
        batches = [*torch.randn(6, 3, 4, dtype=F64, generator=torch.Generator().manual_seed(1))]
        if is_mixed:
            batches = [batch.float() for batch in batches]
        plain = made(is_mixed)
        expected = stepped(plain, plain, batches, [0, 1])
        for strategy in ("no_shard", "optim", "optim_grads", "optim_grads_params"):
            model = fully_shard_model(made(is_mixed), fsdp_unit_modules=[nn.Linear], zero_dp_strategy=strategy)
            call = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
            found = stepped(model, call, batches, [dist.get_rank()])
            assert [p.dtype for p in found] == [p.dtype for p in expected]
            for mine, other in zip(found, expected, strict=True):
                bound = 1e-6 if mine.dtype == F32 or is_mixed else 1e-13
                assert (mine - other).abs().max() <= bound, (strategy, is_mixed, (mine - other).abs().max())


# -- communication dtype ----------------------------------------------------------------------------------------------


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_communication_dtype_changes_between_steps(mode: str) -> None:
    model, call = make("optim_grads_params", mode)
    x = torch.randn(3, 8)

    def gradient() -> Tensor:
        call(x).backward()
        found = model.module.head.weight.grad.full_tensor()
        model.zero_grad_buffer()
        return found

    fine = gradient()
    for _ in range(2):
        with model.mixed_precision_context(MixedPrecisionPolicy(grad_comm_dtype=BF16)):
            coarse = gradient()
        assert not torch.equal(coarse, fine)
        torch.testing.assert_close(coarse, fine, rtol=2**-7, atol=1e-6)
        assert torch.equal(gradient(), fine)
    if mode != EAGER:
        assert len(model.sharded.compiled_graphs) == 2  # one per dtype, not one per change
    other = model.mixed_precision_context(MixedPrecisionPolicy(main_params_dtype=BF16))
    with parity.raises_everywhere(ValueError, "can only change grad_comm_dtype"), other:
        pass


# -- NaN --------------------------------------------------------------------------------------------------------------


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(4, timeout=120)
def test_nan_is_reported_on_all_ranks(mode: str) -> None:
    class Fragile(zoo.Plain):
        class block(zoo.Block):
            def __init__(self, width: int = 16) -> None:
                super().__init__(width)
                self.gain = nn.Parameter(torch.ones(width))

        def forward(self, x: Tensor) -> Tensor:
            # The derivative of the square root at zero is infinite. Times zero, it is NaN.
            return super().forward(x) + (self.blocks[1].gain * 0 + x[0, 0]).sqrt().sum()

    for strategy in ("no_shard", "optim", "optim_grads_params", "HFSDP"):
        model = fully_shard_model(
            parity.build(Fragile),
            fsdp_unit_modules=[Fragile.block],
            report_nan_in_param_grad=True,
            **mesh_arguments(strategy),
        )
        call = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
        before = [param.to_local().clone() for param in model.parameters()]
        with parity.raises_everywhere(RuntimeError, "NaN", "rank 3", "unit 'blocks.1'", "'blocks.1.gain'"):
            x = torch.ones(3, 8)
            x[0, 0] = float(dist.get_rank() != 3)
            call(x).backward()
        assert all(param.grad is None for param in model.parameters())
        assert all(torch.equal(a, b.to_local()) for a, b in zip(before, model.parameters(), strict=True))


# -- twenty steps of a real model -------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.slow
@on_ranks(2)
def test_bfloat16_training_matches_one_process() -> None:
    """The loss of 20 steps of AdamW, with bf16 compute and fp32 main parameters, is within 1e-3 of one process."""
    config = LlamaConfig(layers=2, width=64, hidden=128, heads=4, kv_heads=2)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocabulary, (20, 2, 4, 33), generator=generator)

    torch.manual_seed(0)
    model = fully_shard_model(Llama(config).to(BF16), fsdp_unit_modules=[Block])
    compiled = torch.compile(model, backend="mfsdp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(0)
    alone = Llama(config).to(BF16)
    main = [nn.Parameter(p.detach().float()) for p in alone.parameters()]
    own = torch.optim.AdamW(main, lr=1e-3)
    for batch in tokens:
        mine = batch[dist.get_rank()]
        loss = compiled(mine[:, :-1], mine[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        dist.all_reduce(mean)

        losses = []
        for param in main:
            param.grad = torch.zeros_like(param)
        for part in batch:
            each = alone(part[:, :-1], part[:, 1:])
            each.backward()
            losses.append(each.detach().float())
            for param, whole in zip(main, alone.parameters(), strict=True):
                param.grad += whole.grad.float() / 2
            alone.zero_grad()
        own.step()
        for param, whole in zip(main, alone.parameters(), strict=True):
            whole.data.copy_(param)
        expected = sum(losses) / 2
        assert abs(mean / 2 - expected) <= 1e-3 * expected
