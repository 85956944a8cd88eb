"""Kernels of the operators that are listed in :mod:`.library`, and the autograd functions of gathers.

Those that reduce gradients are in :mod:`.reduce`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import compat
from ..formats import quantize
from ..geometry.exchange import Buffers, Exchange, split_sizes
from ..memory import host
from ..memory.comm_buffers import take
from ..step import graph_runs
from .library import library
from .reduce import await_stage, pack, start_stage

# -- unshard ----------------------------------------------------------------------------------------------------------


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


# -- gather -----------------------------------------------------------------------------------------------------------


class _GatherFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, token: Tensor | None, exchange: Exchange, *beside: Tensor | None
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # no zeros for unused parameters: packing fills their slots
        ctx.exchange, ctx.main_dtype = exchange, shard.dtype
        if token is not None:
            ctx.save_for_backward(token)
        full = _whole(exchange, shard, *beside)
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
        return _reduced(pack(of_parameters, exchange), exchange, token, ctx.main_dtype), *(None,) * 5


class _GatherWholeFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, shard: Tensor, token: Tensor | None, exchange: Exchange, *beside: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.exchange, ctx.main_dtype = exchange, shard.dtype
        if token is not None:
            ctx.save_for_backward(token)
        whole = _whole(exchange, shard, *beside)
        if whole is shard:  # an input that is returned would lose its place in autograd's graph
            whole = shard.view_as(shard)
        ctx.mark_non_differentiable(whole)
        return whole, anchor_like(shard, exchange)

    @staticmethod
    def backward(ctx: Any, _: None, packed: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if packed is None:
            return (None,) * 6
        token = ctx.saved_tensors[0] if ctx.saved_tensors else None
        return _reduced(packed, ctx.exchange, token, ctx.main_dtype), *(None,) * 5


def anchor_like(shard: Tensor, exchange: Exchange) -> Tensor:
    """Return a tensor without memory that stands for a bucket and receives its packed gradient."""
    nothing = shard.new_empty((), dtype=exchange.comm_dtype, device=exchange.offload or None)
    return nothing.expand(exchange.numel)


def _whole(
    exchange: Exchange,
    shard: Tensor,
    resident: Tensor | None,
    sent: Tensor | None,
    scales: Tensor | None,
) -> Tensor:
    if sent is not None and exchange.takes_quantized:
        gathered = compat.all_gather(sent, exchange.gather_size, exchange.gather_group)
        if exchange.stays_quantized:
            return compat.wait_tensor(gathered)
        return torch.ops.mfsdp.wait_quantized(gathered, scales, *exchange.quantization)
    # The runtime gathers a resident; the first graph that uses it waits for it.
    if resident is not None:
        full = compat.wait_tensor(resident)
    elif sent is not None:
        full = sent
    else:
        full = torch.ops.mfsdp.fetch(shard, exchange.offload) if exchange.offload else shard
    full = full.to(exchange.held_dtype)
    if exchange.gather_group:
        full = compat.wait_tensor(compat.all_gather(full, exchange.gather_size, exchange.gather_group))
    return full


def _reduced(packed: Tensor, exchange: Exchange, token: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Reduce a packed gradient, stage by stage. Return the gradient of the shard."""
    reduced = packed
    for stage in range(len(exchange.groups)):
        reduced = await_stage(start_stage(reduced, stage, exchange, token), stage, exchange)
    gradient = exchange.cast_and_scale(reduced, dtype)
    return torch.ops.mfsdp.offload(gradient, exchange.pins) if exchange.offload else gradient


@torch.library.impl(library, "gather", "CompositeImplicitAutograd")
def _gather(
    shard: Tensor,
    resident: Tensor | None,
    token: Tensor | None,
    sent: Tensor | None,
    scales: Tensor | None,
    *arguments: Any,
) -> list[Tensor]:
    return list(_GatherFunction.apply(shard, token, Exchange(*arguments), resident, sent, scales))


@torch.library.impl(library, "gather_whole", "CompositeImplicitAutograd")
def _gather_whole(
    shard: Tensor,
    resident: Tensor | None,
    token: Tensor | None,
    sent: Tensor | None,
    scales: Tensor | None,
    *arguments: Any,
) -> tuple[Tensor, Tensor]:
    return _GatherWholeFunction.apply(shard, token, Exchange(*arguments), resident, sent, scales)


@torch.library.impl(library, "split_scales", "CompositeImplicitAutograd")
def _split_scales(scales: Tensor, sizes: Sequence[int], ndims: Sequence[int], scaling: str) -> list[Tensor]:
    return quantize.split_scales(scales, split_sizes(sizes, ndims), scaling)


@torch.library.impl(library, "wait_quantized", "CompositeExplicitAutograd")
def wait_quantized(
    gathered: Tensor,
    scales: Tensor,
    sizes: Sequence[int],
    ndims: Sequence[int],
    offsets: Sequence[int],
    dtype: torch.dtype,
    scaling: str,
) -> Tensor:
    """The operator's kernel, which the eager path calls without torch's dispatcher."""
    shapes = split_sizes(sizes, ndims)
    places = zip(offsets, shapes, strict=True)
    return quantize.dequantize_bucket(compat.wait_tensor(gathered), scales, places, dtype, scaling)


@torch.library.register_fake("mfsdp::wait_quantized", lib=library)
def _wait_quantized_fake(
    gathered: Tensor,
    scales: Tensor,
    sizes: Sequence[int],
    ndims: Sequence[int],
    offsets: Sequence[int],
    dtype: torch.dtype,
    scaling: str,
) -> Tensor:
    return gathered.new_empty(quantize.numel_of_sent(gathered.numel(), scaling), dtype=dtype)


@torch.library.impl(library, "fetch", "CompositeExplicitAutograd")
def _fetch(shard: Tensor, device: str) -> Tensor:
    return host.fetch(shard, host.device_of(device))


@torch.library.register_fake("mfsdp::fetch", lib=library)
def _fetch_fake(shard: Tensor, device: str) -> Tensor:
    return shard.new_empty(shard.shape, device=device)  # needs no GPU


@torch.library.impl(library, "offload", "CompositeExplicitAutograd")
def _offload(gradient: Tensor, pins: bool) -> Tensor:
    return host.offload(gradient, pins)


@torch.library.register_fake("mfsdp::offload", lib=library)
def _offload_fake(gradient: Tensor, pins: bool) -> Tensor:
    return gradient.new_empty(gradient.shape, device="cpu")


@torch.library.impl(library, "offload_saved", "CompositeExplicitAutograd")
def _offload_saved(saved: Tensor) -> Tensor:
    return host.offload_saved(saved)


@torch.library.register_fake("mfsdp::offload_saved", lib=library)
def _offload_saved_fake(saved: Tensor) -> Tensor:
    return saved.new_empty_strided(saved.shape, saved.stride(), device="cpu")


@torch.library.impl(library, "fetch_saved", "CompositeExplicitAutograd")
def _fetch_saved(copy: Tensor, device: str) -> Tensor:
    return host.fetch_saved(copy, host.device_of(device))


@torch.library.register_fake("mfsdp::fetch_saved", lib=library)
def _fetch_saved_fake(copy: Tensor, device: str) -> Tensor:
    return copy.new_empty_strided(copy.shape, copy.stride(), device=device)


@torch.library.impl(library, "wait_saved", "CompositeExplicitAutograd")
def _wait_saved(copy: Tensor, source: Tensor) -> None:
    host.await_copy(copy)


@torch.library.register_fake("mfsdp::wait_saved", lib=library)
def _wait_saved_fake(copy: Tensor, source: Tensor) -> None:
    return


@torch.library.impl(library, "portion", "CompositeExplicitAutograd")
def _portion(whole: Tensor, size: int, group: str) -> Tensor:
    return whole.chunk(size)[dist.get_rank(compat.process_group(group))].clone()


@torch.library.register_fake("mfsdp::portion", lib=library)
def _portion_fake(whole: Tensor, size: int, group: str) -> Tensor:
    return whole.new_empty(whole.numel() // size)


# -- communication buffers --------------------------------------------------------------------------------------------


@torch.library.impl(library, "gather_into_buffer", "CompositeExplicitAutograd")
def gather_into_buffer(
    shard: Tensor, capacity: int, count: int, dtype: torch.dtype, group_size: int, group_name: str
) -> Tensor:
    """The operator's kernel, which the eager path calls without torch's dispatcher."""
    numel = shard.numel()
    whole = take("gather", Buffers(capacity, count), numel * group_size, dtype, shard.device)
    # The cast shard goes right to its place, from where NCCL gathers without a copy.
    mine = whole.narrow(0, dist.get_rank(compat.process_group(group_name)) * numel, numel).copy_(shard)
    compat.all_gather_out(mine, group_size, group_name, out=whole)
    return whole


@torch.library.register_fake("mfsdp::gather_into_buffer", lib=library)
def _gather_into_buffer_fake(
    shard: Tensor, capacity: int, count: int, dtype: torch.dtype, group_size: int, group_name: str
) -> Tensor:
    return shard.new_empty(shard.numel() * group_size, dtype=dtype)


@torch.library.impl(library, "gradient_buffer", "CompositeExplicitAutograd")
def _gradient_buffer(capacity: int, count: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if not capacity:
        return torch.empty(numel, dtype=dtype, device=device)
    return take("gradients", Buffers(capacity, count), numel, dtype, device)


@torch.library.register_fake("mfsdp::gradient_buffer", lib=library)
def _gradient_buffer_fake(capacity: int, count: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


# -- begin ------------------------------------------------------------------------------------------------------------


@torch.library.impl(library, "begin", "CompositeExplicitAutograd")
def _begin(phase: str, digest: str, schedule: str, used: str) -> None:
    graph_runs.begin(phase, digest, schedule, used)


@torch.library.register_fake("mfsdp::begin", lib=library)
def _begin_fake(phase: str, digest: str, schedule: str, used: str) -> None:
    """A compiler traces the graph, perhaps while the backward that it is for waits: nothing begins."""


# -- deliver ----------------------------------------------------------------------------------------------------------


@torch.library.impl(library, "deliver", "CompositeExplicitAutograd")
def _deliver(gradient: Tensor, at_rest: Sequence[Tensor], bucket: int) -> Tensor:
    graph_runs.deliver(gradient, bucket)
    return gradient.new_zeros(()).expand(gradient.shape)


@torch.library.register_fake("mfsdp::deliver", lib=library)
def _deliver_fake(gradient: Tensor, at_rest: Sequence[Tensor], bucket: int) -> Tensor:
    return gradient.new_empty(()).expand(gradient.shape)
