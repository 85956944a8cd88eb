"""The operators of :mod:`.library` that consist of others, which take their places when a graph is traced.

This module loads all other implementations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..formats import quantize
from ..geometry.exchange import Exchange, split_sizes
from ..lanes.plain import Operands
from . import fakes as fakes
from . import kernels as kernels
from .library import library
from .pack import pack


@torch.library.impl(library, "unshard", "CompositeImplicitAutograd")
def _unshard(shell: Tensor, layout: str) -> Tensor:
    # Dynamo runs this at every read of a parameter. Autograd sees only the clone, which costs half as much as a
    # backward and a fake kernel in Python.
    if compat.is_fake(shell):
        part = shell.clone()
        # isinstance(module.weight, nn.Parameter) must hold in what Dynamo traces.
        part._is_param = True  # type: ignore[attr-defined]
        return part
    raise _other_backend(shell)


@torch.library.impl(library, "unshard_quantized", "CompositeImplicitAutograd")
def _unshard_quantized(shell: Tensor, layout: str, scaling: str) -> tuple[Tensor, Tensor, Tensor]:
    if compat.is_fake(shell):
        data = shell.new_empty(shell.shape, dtype=quantize.DTYPE)
        scale = shell.new_empty(quantize.scale_shape(shell.shape, scaling), dtype=torch.float32)
        return shell.clone(), data, scale
    raise _other_backend(shell)


def _other_backend(shell: Tensor) -> RuntimeError:
    return RuntimeError(
        "A model that mfsdp-compile has sharded was compiled with another backend, which cannot gather parameters "
        f"(here one of shape {tuple(shell.shape)}). Use torch.compile(model, backend='mfsdp'); for another compiler "
        "behind it, torch.compile(model, backend='mfsdp', options={'inner': 'aot_eager'}). A method with a "
        "torch.compile of its own can read parameters while the model's forward runs; pass it those that are in float8 "
        "as arguments."
    )


class _GatherFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, token: Tensor | None, exchange: Exchange, *beside: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # no zeros for unused parameters: packing fills their slots
        ctx.exchange = exchange
        if token is not None:
            ctx.save_for_backward(token)
        full = _whole(exchange, shard, token, *beside)
        places = zip(exchange.shapes, exchange.offsets, strict=True)
        parts = [full.narrow(0, offset, math.prod(shape)).view(shape) for shape, offset in places]
        if not exchange.stays_quantized:
            return tuple(parts)
        nothing = shard.new_empty((), dtype=exchange.dtype)
        data = [part.view(quantize.DTYPE) for part in parts]
        ctx.mark_non_differentiable(*data)
        return *(nothing.expand(shape) for shape in exchange.shapes), *data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        exchange: Exchange = ctx.exchange
        token = ctx.saved_tensors[0] if ctx.saved_tensors else None
        of_parameters = gradients[: len(exchange.ndims)]  # data have none
        return _reduced(pack(of_parameters, exchange, exchange.lane), exchange, token), *(None,) * 4


class _GatherWholeFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, token: Tensor | None, exchange: Exchange, *beside: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.exchange = exchange
        if token is not None:
            ctx.save_for_backward(token)
        whole = _whole(exchange, shard, token, *beside)
        if whole is shard:  # an input that is returned would lose its place in autograd's graph
            whole = shard.view_as(shard)
        ctx.mark_non_differentiable(whole)
        return whole, anchor_like(whole, exchange)

    @staticmethod
    def backward(ctx: Any, _: None, packed: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if packed is None:
            return (None,) * 5
        token = ctx.saved_tensors[0] if ctx.saved_tensors else None
        return _reduced(packed, ctx.exchange, token), *(None,) * 4


def anchor_like(whole: Tensor, exchange: Exchange) -> Tensor:
    """Return a tensor without memory that stands for a bucket and receives its packed gradient."""
    nothing = whole.new_empty((), dtype=exchange.comm_dtype)
    return nothing.expand(exchange.numel)


def _whole(
    exchange: Exchange,
    shard: Tensor,
    token: Tensor | None,
    resident: Tensor | None,
    scales: Tensor | None,
) -> Tensor:
    if resident is None:
        full = shard
    else:  # the runtime gathers a resident; the first graph that uses it waits for it
        full = resident if exchange.lane.has_local_copy else compat.wait_tensor(resident)
    return exchange.lane.travel("use", full, Operands(token, scales))


def _reduced(packed: Tensor, exchange: Exchange, token: Tensor | None) -> Tensor:
    """Reduce a packed gradient. Return the gradient of the shard."""
    return exchange.lane.reduced(packed, Operands(token))


@torch.library.impl(library, "gather", "CompositeImplicitAutograd")
def _gather(
    shard: Tensor,
    resident: Tensor | None,
    token: Tensor | None,
    scales: Tensor | None,
    *arguments: Any,
) -> list[Tensor]:
    return list(_GatherFunction.apply(shard, token, Exchange(*arguments), resident, scales))


@torch.library.impl(library, "gather_whole", "CompositeImplicitAutograd")
def _gather_whole(
    shard: Tensor,
    resident: Tensor | None,
    token: Tensor | None,
    scales: Tensor | None,
    *arguments: Any,
) -> tuple[Tensor, Tensor]:
    return _GatherWholeFunction.apply(shard, token, Exchange(*arguments), resident, scales)


@torch.library.impl(library, "split_scales", "CompositeImplicitAutograd")
def _split_scales(scales: Tensor, sizes: Sequence[int], ndims: Sequence[int], scaling: str) -> list[Tensor]:
    return quantize.split_scales(scales, split_sizes(sizes, ndims), scaling)
