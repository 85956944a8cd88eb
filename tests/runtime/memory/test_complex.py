"""Complex parameters, as in Fourier neural operators: pairs of reals in their bucket, complex everywhere else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pool
import pytest
import torch
import torch.distributed as dist
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks
from torch import Tensor, nn

import mfsdp_compile.fsdp2 as face
from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints, full_state_dict
from mfsdp_compile.runtime import compat

WIDTH, MODES, LENGTH = 4, 5, 16


class SpectralBlock(nn.Module):
    """A layer in Fourier space, with a matrix per mode, a vector and a scalar, and an ordinary one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(WIDTH, WIDTH, MODES, dtype=torch.complex64))
        self.bias = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64))
        self.gain = nn.Parameter(torch.randn((), dtype=torch.complex64))
        self.beside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(x)[..., :MODES]
        mixed = torch.einsum("bix,iox->box", modes, self.weight) + self.bias[:, None] * self.gain
        return torch.tanh(torch.fft.irfft(mixed, n=x.shape[-1]) + self.beside(x.mT).mT)


class Fno(nn.Module):
    """A Fourier neural operator whose root has a complex parameter, too."""

    block = SpectralBlock

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv1d(2, WIDTH, 1)
        self.blocks = nn.ModuleList(SpectralBlock() for _ in range(3))
        self.head = nn.Parameter(torch.randn(3, WIDTH, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return (self.head @ x.to(torch.complex64)).abs().square().mean()


def batches(steps: int = 2) -> Tensor:
    return parity.batches(steps, (3, 2, LENGTH))


def small() -> nn.Module:
    """A model that compiles faster."""
    model = Fno()
    del model.blocks[1:]
    return model


@pytest.mark.long_unless("optim_grads_params-*")
@on_ranks(2, timeout=120)
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads", "optim", "no_shard"])
def test_training_is_that_of_one_process(strategy: str) -> None:
    options: dict[str, Any] = {"sharding": {"zero_dp_strategy": strategy}}
    run = parity.train_sharded(Fno, EAGER, batches(), **options)
    alone = parity.train_alone(Fno, batches())
    parity.assert_close(run, alone)
    assert run.params["head"].dtype == run.gradients[0]["blocks.0.gain"].dtype == torch.complex64
    # Not to the bit: some gradients of real biases differ in the last place.
    parity.assert_bitwise(parity.train_sharded(Fno, AOT_EAGER, batches(), **options), run)


@on_ranks(2, timeout=120)
def test_microbatches_and_a_deferred_reduction() -> None:
    data = parity.batches(2, (4, 2, LENGTH))
    options: dict[str, Any] = {"sharding": {"zero_dp_strategy": "optim"}}
    run = parity.train_sharded(Fno, EAGER, data, parity.sgd, microbatches=2, **options)
    parity.assert_close(run, parity.train_alone(Fno, data, parity.sgd, microbatches=2))


@on_ranks(4, timeout=120)
def test_rows_over_more_ranks_than_there_are() -> None:
    run = parity.train_sharded(Fno, EAGER, batches())
    parity.assert_close(run, parity.train_alone(Fno, batches()))


@pytest.mark.long
@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_inductor() -> None:
    run = parity.train_sharded(small, INDUCTOR, batches(), units=[SpectralBlock])
    parity.assert_close(run, parity.train_alone(small, batches()), 1e-4)


@on_ranks(2, timeout=120)
def test_mixed_precision_leaves_complex_parameters_alone() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, main_grads_dtype=torch.bfloat16)
    model = fully_shard_model(nn.Linear(4, 6, dtype=torch.complex64), mixed_precision_policy=policy)
    weight = model.module.weight
    model(torch.ones(2, 4, dtype=torch.complex64)).abs().sum().backward()
    assert (weight.dtype, weight.grad.dtype) == (torch.complex64, torch.complex64)


@on_ranks(2, timeout=120)
@pytest.mark.parametrize("kind", ["flat", "by parameter", "face"])
def test_optimizers_and_clipping(kind: str) -> None:
    """The optimizer's state is complex, and norms are those of one process."""
    model, alone = parity.build(Fno), parity.build(Fno)
    if kind == "face":
        for block in model.blocks:  # type: ignore[union-attr]
            face.fully_shard(block)
        call: Any = face.fully_shard(model)
    else:
        call = fully_shard_model(model, fsdp_unit_modules=[SpectralBlock])
    optimizer = torch.optim.AdamW(call.parameters(), lr=1e-2, amsgrad=True)
    if kind != "face":
        optimizer = fully_shard_optimizer(optimizer, flat=kind == "flat")
    reference = torch.optim.AdamW(alone.parameters(), lr=1e-2, amsgrad=True)
    ranks = dist.get_world_size()
    for batch in batches(3):
        call(batch[dist.get_rank()]).backward()
        for each in batch:
            (alone(each) / ranks).backward()
        norms = [nn.utils.clip_grad_norm_(its.parameters(), 0.1) for its in (call, alone)]
        norm = norms[0].full_tensor() if hasattr(norms[0], "full_tensor") else norms[0]
        parity.close("norm", norm, norms[1])
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    for (name, mine), its in zip(model.named_parameters(), alone.parameters(), strict=True):
        parity.close(name, mine.full_tensor(), its, 1e-4)
        state = optimizer.state[mine]["exp_avg"]
        parity.close(f"exp_avg of {name}", state.full_tensor(), reference.state[its]["exp_avg"], 1e-4)


@on_ranks(2, timeout=120)
def test_a_checkpoint_and_the_whole_state_dict() -> None:
    folder = Path(pool.shared_folder()) / "checkpoint"
    run = parity.train_sharded(Fno, EAGER, batches())
    Checkpoints(folder).save(1, run.model)
    other = fully_shard_model(parity.build(Fno, seed=1), fsdp_unit_modules=[SpectralBlock])
    Checkpoints(folder).load(other)
    for name, value in full_state_dict(other, rank=None).items():
        assert torch.equal(value, run.params[name.removeprefix("module.")]), name


@on_ranks(2, timeout=120)
def test_parameters_between_steps() -> None:
    model = parity.build(Fno)
    alone = parity.build(Fno)
    sharded = fully_shard_model(model, fsdp_unit_modules=[SpectralBlock])
    for mine, its in zip(sharded.parameters(), alone.parameters(), strict=True):
        parity.close("sum", mine.sum(), its.sum(), 1e-5)
        parity.close("var", mine.var(), its.var(), 1e-5) if its.numel() > 1 else None
        parity.close("norm", mine.norm(), its.norm(), 1e-5)
        torch.manual_seed(3)
        nn.init.normal_(mine)
        torch.manual_seed(3)
        nn.init.normal_(its)
        assert torch.equal(mine.full_tensor(), its)


@pytest.mark.skipif(not compat.DTENSOR_SUBCLASSES_DISPATCH, reason="torch 2.13 and newer")
@on_ranks(2, timeout=120)
def test_a_penalty_between_steps() -> None:
    """Its gradient is the mean over ranks, also through a complex sum."""
    alone = parity.build(Fno)
    sharded = fully_shard_model(parity.build(Fno), fsdp_unit_modules=[SpectralBlock])
    penalty = [sum(p.abs().square().sum() + p.sum().abs() for p in its.parameters()) for its in (sharded, alone)]
    parity.close("penalty", *penalty)
    (penalty[0] * (1 + dist.get_rank())).backward()  # the mean over ranks
    (penalty[1] * 1.5).backward()
    for mine, its in zip(sharded.parameters(), alone.parameters(), strict=True):
        parity.close("gradient of the penalty", mine.grad.full_tensor(), its.grad)


@on_ranks(2, timeout=120)
def test_saved_views_with_lazy_conjugates() -> None:
    """Autograd saves ``weight.conj()``, whose memory does not hold its values, and imaginary parts of it."""

    class Conjugates(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            x = x.to(torch.complex64) * self.weight.conj()
            return (x.real * self.weight.conj().imag).square().sum()

    data = parity.batches(2, (6, 4))
    run = parity.train_sharded(Conjugates, EAGER, data, parity.sgd, units=[Conjugates])
    parity.assert_close(run, parity.train_alone(Conjugates, data, parity.sgd))
