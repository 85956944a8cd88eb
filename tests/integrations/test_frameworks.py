"""Programs of other frameworks over sharded models: Lightning, diffusers, and policy gradients with generation.

Each test needs the library of its name, and is skipped without it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
from parity import AOT_EAGER, EAGER
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile import fully_shard_model, fully_shard_optimizer


def needs(*libraries: str) -> Any:
    """Mark a test that is skipped where these are not installed."""
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


def train_both(
    factory: Callable[[], nn.Module], loss_of: Callable[[Any, Tensor], Tensor], data: Tensor, units: Any, mode: str
) -> None:
    """Train sharded, and in one process on the batches of all ranks, and compare losses and parameters."""
    torch.compiler.reset()
    model, call = parity.shard(parity.build(factory), mode, units)
    alone = parity.build(factory)
    optimizer = fully_shard_optimizer(parity.sgd(model.parameters()))
    reference = parity.sgd(alone.parameters())
    for batch in data:
        loss = loss_of(call, batch[dist.get_rank()])
        loss.backward()
        for rank, each in enumerate(batch):
            its = loss_of(alone, each)
            (its / len(batch)).backward()
            if rank == dist.get_rank():
                parity.close("loss", loss, its)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    for (name, mine), its in zip(model.module.named_parameters(), alone.parameters(), strict=True):
        parity.close(name, mine.full_tensor(), its, 1e-4)


# -- diffusers --------------------------------------------------------------------------------------------------------


@needs("diffusers")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2, timeout=300)
def test_diffusers_unet(mode: str) -> None:
    import diffusers

    noise = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(7))
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=20)

    def unet() -> nn.Module:
        model: nn.Module = diffusers.UNet2DModel(
            sample_size=8,
            in_channels=3,
            out_channels=3,
            layers_per_block=1,
            block_out_channels=(8, 16),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=4,
            attention_head_dim=4,
        )
        return model

    def loss_of(call: Any, images: Tensor) -> Tensor:
        steps = torch.tensor([1, 5, 9, 13])
        noisy = scheduler.add_noise(images, noise, steps)
        return nn.functional.mse_loss(call(noisy, steps, return_dict=False)[0], noise)

    train_both(unet, loss_of, parity.batches(2, (4, 3, 8, 8)), ["ResnetBlock2D", "Attention"], mode)


# -- Lightning --------------------------------------------------------------------------------------------------------


@needs("lightning")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2, timeout=120)
def test_lightning_module(mode: str) -> None:
    """A LightningModule in a loop of one's own. Its training_step runs in the window of the model."""
    import lightning.pytorch as lightning

    class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self(batch)

        def forward(self, x: Tensor) -> Tensor:
            return self.body(x).square().mean()

        def configure_optimizers(self) -> Any:
            return parity.sgd(self.parameters())

    def loss_of(call: Any, x: Tensor) -> Tensor:
        return call(x)  # type: ignore[no-any-return]

    train_both(Lit, loss_of, parity.batches(2), [nn.Linear], mode)
    model = fully_shard_model(parity.build(Lit), fsdp_unit_modules=[nn.Linear])
    optimizer = fully_shard_optimizer(model.module.configure_optimizers())
    batch = parity.batches(1)[0]
    model.module.training_step(batch[dist.get_rank()], 0).backward()
    alone = parity.build(Lit)
    for each in batch:
        (alone.training_step(each, 0) / len(batch)).backward()
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        parity.close("gradient", mine.grad.full_tensor(), its.grad)
    optimizer.step()


# -- policy gradients -------------------------------------------------------------------------------------------------


@pytest.mark.long_unless("*-eager")
@needs("transformers")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2, timeout=240)
def test_generate_then_train_on_it(mode: str) -> None:
    """As GRPO does: sample with the sharded model, score, and follow the gradient of the samples' likelihood."""
    from mfsdp_compile.examples import hf_trainer

    torch.compiler.reset()
    model, call = parity.shard(parity.build(hf_trainer.build), mode, ["LlamaDecoderLayer"])
    alone = parity.build(hf_trainer.build)
    optimizer, reference = fully_shard_optimizer(parity.sgd(model.parameters())), parity.sgd(alone.parameters())
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def sample(module: Any, seed: int) -> Tensor:
        torch.manual_seed(seed)
        prompts = torch.randint(3, 20, (4, 5))
        return module.generate(  # type: ignore[no-any-return]
            prompts, max_new_tokens=6, min_new_tokens=6, do_sample=True, pad_token_id=0, use_cache=True
        )

    def loss_of(policy: Any, tokens: Tensor) -> Tensor:
        rewards = tokens[:, 5:].float().mean(dim=1)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        logits = policy(input_ids=tokens).logits[:, 4:-1]
        chosen = logits.log_softmax(-1).gather(-1, tokens[:, 5:, None]).squeeze(-1)
        return -(advantages[:, None] * chosen).mean()

    for step in range(2):
        with model.gathered():
            tokens = sample(model.module, 10 * step + rank)
        for other in range(ranks):
            its = sample(alone, 10 * step + other)
            if other == rank:
                assert torch.equal(tokens, its)
            (loss_of(alone, its) / ranks).backward()
        loss_of(call, tokens).backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    for (name, mine), whole in zip(model.module.named_parameters(), alone.parameters(), strict=True):
        parity.close(name, mine.full_tensor(), whole, 1e-4)
