"""Fine-tuning with peft: adapters train, the frozen model is the reference, and numbers equal those of one process."""

from __future__ import annotations

from typing import Any

import families
import parity
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity import AOT_EAGER, EAGER
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile import fully_shard_model, fully_shard_optimizer

peft = pytest.importorskip("peft")


def adapted(**settings: Any) -> nn.Module:
    """Return a small Llama with LoRA on its projections. Half of the adapters start away from zero."""
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0, **settings)
    model = peft.get_peft_model(families.ready(families.llama()), config)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.1)
    return model


def log_probabilities(model: Any, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits[:, :-1]
    return F.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).sum((-1, -2))


def preference_loss(model: Any, adapters: Any, chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the loss of DPO. The reference policy is the model without its adapters."""
    with torch.no_grad(), adapters.disable_adapter():
        reference = log_probabilities(model, chosen) - log_probabilities(model, rejected)
    margin = log_probabilities(model, chosen) - log_probabilities(model, rejected)
    return -F.logsigmoid(0.5 * (margin - reference)).mean()


def sharded(mode: str) -> tuple[Any, Any, Any, Any]:
    """Return a model with adapters that is sharded, its wrapper, what to call, and the same model in one process."""
    whole, alone = adapted(), adapted()
    model = fully_shard_model(whole, fsdp_unit_modules=[type(whole.base_model.model.model.layers[0])])
    call = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
    return whole, model, call, alone


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_preferences_with_adapters(mode: str) -> None:
    """LoRA trains with DPO: every step freezes the adapters, runs without gradients, and makes them trainable again."""
    whole, model, call, alone = sharded(mode)
    optimizer = fully_shard_optimizer(parity.sgd([p for p in model.parameters() if p.requires_grad]))
    its = parity.sgd([p for p in alone.parameters() if p.requires_grad])
    for step in range(3):
        tokens = torch.randint(0, 100, (2, 2, 2, 8), generator=torch.Generator().manual_seed(step))
        preference_loss(call, whole, *tokens[dist.get_rank()]).backward()
        (sum(preference_loss(alone, alone, *each) for each in tokens) / 2).backward()  # type: ignore[union-attr]
        for name, param in whole.named_parameters():
            expected = alone.get_parameter(name)
            assert param.requires_grad == expected.requires_grad, name
            assert (param.grad is None) == (expected.grad is None), name
            if param.grad is not None:
                torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=1e-4, atol=1e-6)
        for each in (optimizer, its):
            each.step()
            each.zero_grad()
    for name, param in whole.named_parameters():
        torch.testing.assert_close(param.full_tensor(), alone.get_parameter(name), rtol=1e-4, atol=1e-5)


class Quantised(nn.Module):
    """A frozen linear layer of 8-bit integers that is dequantized when it runs, as QLoRA's base, with LoRA beside it.

    The integers are in a buffer, the scales in a parameter. With ``float8``, values are in a parameter, too.
    """

    def __init__(self, width: int, rank: int = 4, float8: bool = False) -> None:
        super().__init__()
        whole = torch.randn(width, width)
        scale = whole.abs().amax(1, keepdim=True) / 127
        if float8:
            self.codes = nn.Parameter((whole / scale).to(torch.float8_e4m3fn), requires_grad=False)
        else:
            self.register_buffer("codes", (whole / scale).round().to(torch.int8))
        self.scale = nn.Parameter(scale, requires_grad=False)
        self.codes_of_bias = nn.Parameter(torch.randint(-9, 9, (width,), dtype=torch.int8), requires_grad=False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.codes.to(x.dtype) * self.scale
        return F.linear(x, weight, self.codes_of_bias.to(x.dtype) * 0.01) + self.up(self.down(x))


@pytest.mark.long_if("*-aot_eager")
@pytest.mark.parametrize(
    ("mode", "float8", "sharding"),
    [
        (EAGER, False, {}),
        (AOT_EAGER, False, {}),
        (EAGER, True, {"fsdp_double_buffer": True}),
        (EAGER, True, {"zero_dp_strategy": "optim"}),
        (AOT_EAGER, True, {}),
        (AOT_EAGER, True, {"fsdp_double_buffer": True}),
    ],
    ids=[
        "eager",
        "aot_eager",
        "float8 eager buffers",
        "float8 eager resident",
        "float8 aot_eager",
        "float8 aot_eager buffers",
    ],
)
@on_ranks(2)
def test_adapters_on_a_quantised_model(mode: str, float8: bool, sharding: dict[str, Any]) -> None:
    """Gloo does not know float8: its values are gathered as bytes."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Quantised(12, float8=float8) for _ in range(3)))

    model, alone = fully_shard_model(build(), fsdp_unit_modules=[Quantised], **sharding), build()
    call = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
    optimizers = [parity.sgd([p for p in each.parameters() if p.requires_grad]) for each in (model, alone)]
    for batch in parity.batches(2, shape=(4, 12)):
        call(batch[dist.get_rank()]).pow(2).mean().backward()
        (sum(alone(x).pow(2).mean() for x in batch) / 2).backward()  # type: ignore[union-attr]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, param in model.module.named_parameters():
        expected = alone.get_parameter(name)
        assert param.dtype == expected.dtype
        torch.testing.assert_close(param.full_tensor().float(), expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_adapters_are_merged_and_taken_out_between_steps(mode: str) -> None:
    """Steps after a merge and its reversal are those of one process; the merged model is left without adapters."""
    whole, model, call, alone = sharded(mode)
    optimizers = [parity.sgd([p for p in each.parameters() if p.requires_grad]) for each in (model, alone)]

    def compare_weights(mine: nn.Module, its: nn.Module) -> None:
        expected = dict(its.named_parameters())
        for name, param in mine.named_parameters():
            torch.testing.assert_close(param.full_tensor(), expected.pop(name), rtol=1e-4, atol=1e-5, msg=name)
        assert not expected

    def step(number: int) -> None:
        tokens = torch.randint(0, 100, (2, 2, 8), generator=torch.Generator().manual_seed(number))
        log_probabilities(call, tokens[dist.get_rank()]).mean().backward()
        log_probabilities(alone, tokens.flatten(0, 1)).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compare_weights(whole, alone)

    tokens = torch.arange(8)[None]
    for number in range(2):
        step(number)
        for each in (whole, alone):
            each.merge_adapter()
        compare_weights(whole, alone)
        with torch.no_grad():
            expected = log_probabilities(alone, tokens)
            torch.testing.assert_close(log_probabilities(call, tokens), expected, rtol=1e-4, atol=1e-4)
        for each in (whole, alone):
            each.unmerge_adapter()
        compare_weights(whole, alone)
    step(2)
    mine, its = whole.merge_and_unload(), alone.merge_and_unload()
    compare_weights(mine, its)
    with torch.no_grad():
        torch.testing.assert_close(
            log_probabilities(mine, tokens), log_probabilities(its, tokens), rtol=1e-4, atol=1e-4
        )
    for each in (mine, its):
        each.requires_grad_()
        log_probabilities(each, tokens).mean().backward()
    for name, param in mine.named_parameters():
        torch.testing.assert_close(
            param.grad.full_tensor(), its.get_parameter(name).grad, rtol=1e-4, atol=1e-5, msg=name
        )
