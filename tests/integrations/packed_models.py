"""bitsandbytes and torchao, if they are installed, and small models with frozen weights of 4 bits and adapters."""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import torch
import torchao_models
from torch import Tensor, nn

FOLDER = os.environ.get("MFSDP_BITSANDBYTES", os.path.join(sys.prefix, "bitsandbytes"))
"""Where ``make`` puts it: transformers and peft, which look for it, are tested without."""
IS_THERE = torchao_models.IS_THERE and (
    importlib.util.find_spec("bitsandbytes") is not None or os.path.isdir(os.path.join(FOLDER, "bitsandbytes"))
)
WIDTH, HIDDEN = 128, 256


def bitsandbytes() -> Any:
    """Import bitsandbytes."""
    if importlib.util.find_spec("bitsandbytes") is None:
        sys.path.append(FOLDER)
    import bitsandbytes as bnb

    return bnb


def linear(kind: str, inputs: int, outputs: int, **settings: Any) -> nn.Module:
    """Return a frozen linear layer with a weight of 4 bits: of bitsandbytes (``"bnb"``) or torchao (``"nf4"``)."""
    layer: nn.Module
    if kind == "bnb":
        given = {"compute_dtype": torch.bfloat16, "compress_statistics": True, "quant_type": "nf4"} | settings
        layer = bitsandbytes().nn.Linear4bit(inputs, outputs, **given).to("cpu")
        return layer.requires_grad_(False)
    torchao_models.torchao()
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    layer = nn.Linear(inputs, outputs, bias=False)
    layer.weight = nn.Parameter(to_nf4(layer.weight.detach()), requires_grad=False)
    return layer


class Adapted(nn.Module):
    """A frozen layer with an adapter beside it."""

    def __init__(self, kind: str, inputs: int, outputs: int, **settings: Any) -> None:
        super().__init__()
        self.base = linear(kind, inputs, outputs, **settings)
        self.down, self.up = nn.Linear(inputs, 4, bias=False), nn.Linear(4, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    def __init__(self, kind: str, **settings: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.first, self.second = Adapted(kind, WIDTH, HIDDEN, **settings), Adapted(kind, HIDDEN, WIDTH, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(self.norm(x)).relu())


def build(kind: str, seed: int = 0, **settings: Any) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(*(Block(kind, **settings) for _ in range(2)))


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of a model's weights of 4 bits, with their statistics."""
    total = 0
    each: Any
    for each in module.parameters():
        if type(each).__name__ == "Params4bit":
            state = each.quant_state
            parts = [each, state.absmax, *([state.state2.absmax] if state.nested else [])]
        elif hasattr(each, "quantized_scalers"):
            parts = [each.quantized_data, each.quantized_scalers, each.quantization_factor]
        else:
            continue
        total += sum(part.numel() * part.element_size() for part in parts)
    return total
