"""A compact Llama (https://arxiv.org/abs/2302.13971): RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

__all__ = ["Attend", "Block", "Llama", "LlamaConfig", "layers_of_stage", "parallelize"]

Attend = Callable[..., Tensor]
"""An attention function.

Takes queries ``[batch, heads, length, width]``, keys and values (with ``kv_heads``), and ``is_causal=True``.
"""


def _attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    if repeat > 1:
        k, v = k.repeat_interleave(repeat, dim=1), v.repeat_interleave(repeat, dim=1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes. ``hidden`` is the width inside the feed-forward part; ``heads`` is a multiple of ``kv_heads``."""

    vocabulary: int = 256
    width: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 688
    rope_base: float = 10_000.0


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig, attend: Attend = _attend) -> None:
        super().__init__()
        self.attend = attend
        self.head_width = config.width // config.heads
        kv_width = config.kv_heads * self.head_width
        self.q = nn.Linear(config.width, config.width, bias=False)
        self.k = nn.Linear(config.width, kv_width, bias=False)
        self.v = nn.Linear(config.width, kv_width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        # Uses the width of a head and not the number of heads: a tensor-parallel rank has only some of them.
        batch, length, _ = x.shape
        q = _rotate(self.q(x).view(batch, length, -1, self.head_width).transpose(1, 2), rotation)
        k = _rotate(self.k(x).view(batch, length, -1, self.head_width).transpose(1, 2), rotation)
        v = self.v(x).view(batch, length, -1, self.head_width).transpose(1, 2)
        y = self.attend(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden, bias=False)
        self.up = nn.Linear(config.width, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One layer; the unit to shard by."""

    def __init__(self, config: LlamaConfig, attend: Attend = _attend) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config, attend)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """Next-token prediction.

    ``forward(tokens)`` returns logits ``[batch, length, vocabulary]``. ``forward(tokens, targets)``, both
    ``[batch, length]`` of int64, returns the mean cross entropy in nats, a float32 scalar.

    Args:
        config: Sizes.
        attend: Computes attention. If sequences are divided over ranks, pass
            :meth:`mfsdp_compile.parallel.context_parallel.ContextParallel.attention`; each call of ``forward`` then
            takes the ``positions`` of its tokens, int64 ``[length]``.
        stage, stages: Stage of a pipeline, and number of stages. The model has the layers :func:`layers_of_stage`. All
            stages except the first take the output of the previous one, ``[batch, length, width]``; all except the last
            return such a tensor.
    """

    def __init__(self, config: LlamaConfig, attend: Attend = _attend, stage: int = 0, stages: int = 1) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width) if stage == 0 else None
        self.layers = nn.ModuleList(Block(config, attend) for _ in layers_of_stage(config.layers, stage, stages))
        is_last = stage == stages - 1
        self.norm = nn.RMSNorm(config.width, eps=1e-5) if is_last else None
        self.head = nn.Linear(config.width, config.vocabulary, bias=False) if is_last else None
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        rotation = _rotation(positions, self.config.width // self.config.heads, self.config.rope_base)
        x = self.embedding(tokens) if self.embedding is not None else tokens
        for layer in self.layers:
            x = layer(x, rotation)
        if self.norm is None or self.head is None:
            return x
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def layers_of_stage(layers: int, stage: int, stages: int) -> range:
    """Return the layers of a stage of a pipeline.

    If the layers do not divide evenly, the middle stages have one more, because the first and last stages also have the
    embedding and the head.

    Raises:
        ValueError: If there are more stages than layers.
    """
    if stages > layers:
        raise ValueError(f"{layers} layers cannot be divided into {stages} pipeline stages")
    each, more = divmod(layers, stages)
    first = (stages - more + 1) // 2  # first stage with one more layer
    begins = [each * number + min(max(number - first, 0), more) for number in (stage, stage + 1)]
    return range(*begins)


def parallelize(model: Llama, mesh: DeviceMesh, sequence: bool = False) -> Llama:
    """Divide the model over tensor-parallel ranks, in place: heads, the feed-forward part, and the vocabulary.

    Args:
        mesh: A mesh with one dimension, whose size divides the numbers of heads.
        sequence: Also divide the activations between these layers, by positions. The length of a batch must be a
            multiple of the size of the mesh.
    """
    between = Shard(1) if sequence else Replicate()
    ends: dict[str, ParallelStyle] = {}
    if model.embedding is not None:
        ends["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    if model.head is not None:
        ends["head"] = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
        if sequence:
            ends["norm"] = SequenceParallel()
    parallelize_module(model, mesh, ends, src_data_rank=None)  # all ranks have the same model
    for layer in model.layers:
        plan: dict[str, ParallelStyle] = {
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.out": RowwiseParallel(output_layouts=between),
            "feed_forward.gate": ColwiseParallel(),
            "feed_forward.up": ColwiseParallel(),
            "feed_forward.down": RowwiseParallel(output_layouts=between),
        }
        if sequence:
            whole = {"input_layouts": (Shard(1), None), "desired_input_layouts": (Replicate(), None)}
            plan |= {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(**whole),
                "feed_forward_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            }
        parallelize_module(layer, mesh, plan, src_data_rank=None)
    return model


def _rotation(positions: Tensor, head_width: int, base: float) -> tuple[Tensor, Tensor]:
    exponents = -torch.arange(0, head_width, 2, device=positions.device, dtype=torch.float32) / head_width
    frequencies = base**exponents
    angles = positions.to(torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate pairs of features, ``[batch, heads, length, head_width]``, by their position."""
    cos, sin = (part.to(x.dtype) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
