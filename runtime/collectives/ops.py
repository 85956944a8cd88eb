"""The operators of mfsdp-compile, ``torch.ops.mfsdp.*``.

``unshard(shell, layout)``
    A marker. While a model is traced, ``module.weight`` returns ``unshard(shell)``; ``passes.unshard`` removes it
    again. If it is ever run, another backend has compiled the model and would read memory that does not exist, so it
    raises.
``unshard_quantized(shell, layout, scaling)``
    The same for a parameter that modules get as it was gathered in float8 (:mod:`.forms`): stands for its anchor, its
    data and its scale.
``gather(shard, resident, token, sent, scales, ...)``
    A bucket's parameters. Composite and differentiable. For full sharding it is traced as cast, all-gather, wait and
    views, and its backward as ``pack_gradients``, reduce-scatter, wait and cast. Other strategies omit or add
    collectives; see :class:`~mfsdp_compile.runtime.geometry.exchange.Exchange`. A bucket that is gathered in float8 is
    traced as all-gather of its quantized shard (``sent``), ``wait_quantized`` and views. If modules get it as it is,
    there is a plain wait, and two results for each parameter: all anchors, and then all data. If the shard is in host
    memory and the device keeps a copy, ``sent`` is this copy, and is neither cast nor fetched.
``split_scales(scales, ...)``
    The scales of each parameter of a bucket, as views. Composite.
``wait_quantized(gathered, scales, ...)``
    Waits for a bucket that is gathered in float8, and dequantizes it. One operator for both, so that the gathered bytes
    are no value of the graph that anything else could read or save.
``gather_whole(shard, resident, token, sent, scales, ...)``
    A bucket that a region reads: the whole bucket, and an anchor, a tensor without memory whose gradient is the packed
    gradient of the bucket (in the dtype in which gradients are reduced, which the bucket may not have). Its backward
    begins with the reduction. Inside of the region, ``gather(anchor, whole, ...)`` splits the bucket and packs
    gradients.
``fetch(shard, device)``
    A copy of a shard that rests in host memory on this rank's device of a type (:mod:`.memory.host`), in the main
    dtype.
``offload(gradient, pins)``
    A copy of a reduced gradient in host memory. It may still be arriving: the runtime waits before it is read.
``offload_saved(saved)``, ``fetch_saved(copy, device)``
    Start a copy of a value that forward saves for backward to host memory, and back.
``wait_saved(copy, source)``
    Waits for such a copy. It is declared to write to the copy, so that compilers keep it before the readers, and it
    takes the source, which thereby exists until the copy has been made.
``portion(whole, size, group)``
    A copy of this rank's part of a gathered bucket. It is kept from forward to backward if backward gathers parameters
    over ``size`` ranks only. Which part it is depends on the rank's place in the group. That is looked up at run time,
    so that graphs are the same on all ranks.
``pack_gradients(gradients, offsets, numel, dtype)``
    Gradients at their offsets in one flat bucket, and zeros elsewhere. Inductor gets a lowering for it that lets a
    matmul write its result directly into the bucket (``mfsdp_compile.backend.lowerings``). With a ``capacity``, the
    bucket is in a communication buffer.
``gather_into_buffer(shard, capacity, count, ...)``
    Cast and all-gather into a communication buffer (:mod:`mfsdp_compile.runtime.memory.comm_buffers`). It must be
    awaited like any other collective.
``gradient_buffer(capacity, count, numel, dtype, device)``
    A communication buffer, for Inductor's code of ``pack_gradients``. It is in no FX graph.
``reduce_if_due(gradient, token, ...)``
    A collective that is skipped while gradients are accumulated over microbatches; see
    :mod:`mfsdp_compile.runtime.memory.deferred_gradients`. It must be awaited like any other. Inductor treats it as a
    collective.
``exchange_slices(gradient, group_size, group)``
    An all-to-all in which every rank sends to each other its slice of a packed gradient, padded to equal slices. It
    must be awaited by ``wait_summed``.
``wait_summed(slices, group_size)``
    Waits for the slices and sums them in float32, in the order of ranks. One operator for both, as
    ``wait_quantized``. Inductor gets a lowering that adds them in one kernel with what follows.
``begin(phase, digest, schedule, used)``
    The first node of a graph, which announces what the graph is about to do; see
    :mod:`mfsdp_compile.runtime.step.graph_runs`.

The operators take numbers and strings instead of layout and group objects. A graph that contains them therefore prints
as valid Python, and its cache key includes everything that matters.
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
from ..geometry.exchange import Buffers, Exchange, When, split_sizes
from ..geometry.rows import contiguous_strides
from ..memory import host
from ..memory.comm_buffers import take
from ..memory.deferred_gradients import bucket_of
from ..memory.gradients import defer_unless_due
from ..ranks import profiling
from ..step import graph_runs

_library = torch.library.Library("mfsdp", "DEF")

_library.define("unshard(Tensor shell, str layout) -> Tensor")
_library.define("unshard_quantized(Tensor shell, str layout, str scaling) -> (Tensor, Tensor, Tensor)")
_library.define("split_scales(Tensor scales, int[] sizes, int[] ndims, str scaling) -> Tensor[]")
_library.define(
    "gather(Tensor shard, Tensor? resident, Tensor? token, Tensor? sent, Tensor? scales, "
    "int[] sizes, int[] ndims, int[] offsets, int numel, "
    "ScalarType dtype, int gather_size, str gather_group, ScalarType comm_dtype, str reduce_op, float scale, "
    "str[] collectives, str[] when, int[] group_sizes, str[] groups, bool inspected, int[] buffers, str scaling, "
    "str form, str offload, bool pins, bool keeps_copy) -> Tensor[]"
)
_library.define(
    "gather_whole(Tensor shard, Tensor? resident, Tensor? token, Tensor? sent, Tensor? scales, "
    "int[] sizes, int[] ndims, int[] offsets, int numel, "
    "ScalarType dtype, int gather_size, str gather_group, ScalarType comm_dtype, str reduce_op, float scale, "
    "str[] collectives, str[] when, int[] group_sizes, str[] groups, bool inspected, int[] buffers, str scaling, "
    "str form, str offload, bool pins, bool keeps_copy) -> (Tensor, Tensor)"
)
_library.define(
    "wait_quantized(Tensor gathered, Tensor scales, int[] sizes, int[] ndims, int[] offsets, ScalarType dtype, "
    "str scaling) -> Tensor"
)
_library.define("fetch(Tensor shard, str device) -> Tensor")
_library.define("offload(Tensor gradient, bool pins) -> Tensor")
_library.define("offload_saved(Tensor saved) -> Tensor")
_library.define("fetch_saved(Tensor copy, str device) -> Tensor")
_library.define("wait_saved(Tensor(a!) copy, Tensor source) -> ()")
_library.define("portion(Tensor whole, int size, str group) -> Tensor")
_library.define(
    "gather_into_buffer(Tensor shard, int capacity, int count, ScalarType dtype, int group_size, str group_name) -> "
    "Tensor"
)
_library.define(
    "pack_gradients(Tensor[] gradients, int[] offsets, int numel, ScalarType dtype, int capacity=0, int count=0) -> "
    "Tensor"
)
_library.define("gradient_buffer(int capacity, int count, int numel, ScalarType dtype, Device device) -> Tensor")
_library.define(
    "reduce_if_due(Tensor gradient, Tensor token, str collective, str when, str reduce_op, int group_size, str group, "
    "bool inspected) -> Tensor"
)
_library.define("exchange_slices(Tensor gradient, int group_size, str group) -> Tensor")
_library.define("wait_summed(Tensor slices, int group_size) -> Tensor")
_library.define("begin(str phase, str digest, str schedule, str used) -> ()")
torch.fx.node.has_side_effect(torch.ops.mfsdp.begin.default)


# -- unshard ----------------------------------------------------------------------------------------------------------


@torch.library.impl(_library, "unshard", "CompositeImplicitAutograd")
def _unshard(shell: Tensor, layout: str) -> Tensor:
    # Dynamo runs this at every read of a parameter. Autograd sees only the clone, which costs half as much as a
    # backward and a fake kernel in Python.
    if compat.is_fake(shell):
        part = shell.clone()
        # isinstance(module.weight, nn.Parameter) must hold in what Dynamo traces.
        part._is_param = True  # type: ignore[attr-defined]
        return part
    raise _other_backend(shell)


@torch.library.impl(_library, "unshard_quantized", "CompositeImplicitAutograd")
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


@torch.library.impl(_library, "gather", "CompositeImplicitAutograd")
def _gather(
    shard: Tensor,
    resident: Tensor | None,
    token: Tensor | None,
    sent: Tensor | None,
    scales: Tensor | None,
    *arguments: Any,
) -> list[Tensor]:
    return list(_GatherFunction.apply(shard, token, Exchange(*arguments), resident, sent, scales))


@torch.library.impl(_library, "gather_whole", "CompositeImplicitAutograd")
def _gather_whole(
    shard: Tensor,
    resident: Tensor | None,
    token: Tensor | None,
    sent: Tensor | None,
    scales: Tensor | None,
    *arguments: Any,
) -> tuple[Tensor, Tensor]:
    return _GatherWholeFunction.apply(shard, token, Exchange(*arguments), resident, sent, scales)


@torch.library.impl(_library, "split_scales", "CompositeImplicitAutograd")
def _split_scales(scales: Tensor, sizes: Sequence[int], ndims: Sequence[int], scaling: str) -> list[Tensor]:
    return quantize.split_scales(scales, split_sizes(sizes, ndims), scaling)


@torch.library.impl(_library, "wait_quantized", "CompositeExplicitAutograd")
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


@torch.library.register_fake("mfsdp::wait_quantized", lib=_library)
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


@torch.library.impl(_library, "fetch", "CompositeExplicitAutograd")
def _fetch(shard: Tensor, device: str) -> Tensor:
    return host.fetch(shard, host.device_of(device))


@torch.library.register_fake("mfsdp::fetch", lib=_library)
def _fetch_fake(shard: Tensor, device: str) -> Tensor:
    return shard.new_empty(shard.shape, device=device)  # needs no GPU


@torch.library.impl(_library, "offload", "CompositeExplicitAutograd")
def _offload(gradient: Tensor, pins: bool) -> Tensor:
    return host.offload(gradient, pins)


@torch.library.register_fake("mfsdp::offload", lib=_library)
def _offload_fake(gradient: Tensor, pins: bool) -> Tensor:
    return gradient.new_empty(gradient.shape, device="cpu")


@torch.library.impl(_library, "offload_saved", "CompositeExplicitAutograd")
def _offload_saved(saved: Tensor) -> Tensor:
    return host.offload_saved(saved)


@torch.library.register_fake("mfsdp::offload_saved", lib=_library)
def _offload_saved_fake(saved: Tensor) -> Tensor:
    return saved.new_empty_strided(saved.shape, saved.stride(), device="cpu")


@torch.library.impl(_library, "fetch_saved", "CompositeExplicitAutograd")
def _fetch_saved(copy: Tensor, device: str) -> Tensor:
    return host.fetch_saved(copy, host.device_of(device))


@torch.library.register_fake("mfsdp::fetch_saved", lib=_library)
def _fetch_saved_fake(copy: Tensor, device: str) -> Tensor:
    return copy.new_empty_strided(copy.shape, copy.stride(), device=device)


@torch.library.impl(_library, "wait_saved", "CompositeExplicitAutograd")
def _wait_saved(copy: Tensor, source: Tensor) -> None:
    host.await_copy(copy)


@torch.library.register_fake("mfsdp::wait_saved", lib=_library)
def _wait_saved_fake(copy: Tensor, source: Tensor) -> None:
    return


@torch.library.impl(_library, "portion", "CompositeExplicitAutograd")
def _portion(whole: Tensor, size: int, group: str) -> Tensor:
    return whole.chunk(size)[dist.get_rank(compat.process_group(group))].clone()


@torch.library.register_fake("mfsdp::portion", lib=_library)
def _portion_fake(whole: Tensor, size: int, group: str) -> Tensor:
    return whole.new_empty(whole.numel() // size)


# -- gradients --------------------------------------------------------------------------------------------------------


def pack(gradients: Sequence[Tensor | None], exchange: Exchange, is_traced: bool = True) -> Tensor:
    """Pack gradients into a bucket, ``[numel]`` in the communication dtype.

    Args:
        gradients: One per parameter of the bucket; None means zeros. At least one is a tensor.
        is_traced: Whether this may be traced. If not, the kernel is called without torch's dispatcher.
    """
    # An embedding with sparse=True has sparse gradients; a bucket is dense.
    present = [
        (g.to_dense() if g.is_sparse else g, o)
        for g, o in zip(gradients, exchange.offsets, strict=True)
        if g is not None
    ]
    packed = (torch.ops.mfsdp.pack_gradients if is_traced else _pack_gradients)(
        [g for g, _ in present],
        [o for _, o in present],
        exchange.numel,
        exchange.comm_dtype,
        *exchange.gradient_buffers,
    )
    return packed * exchange.scale if exchange.scales_first else packed


def start_stage(gradient: Tensor, stage: int, exchange: Exchange, token: Tensor | None) -> Tensor:
    """Start one stage of a reduction. Return its result, which must be awaited.

    Args:
        gradient: The packed bucket, or the result of the previous stage.
        token: Token of the bucket's :class:`~mfsdp_compile.runtime.memory.deferred_gradients.DeferredGradient`, if it
            has one.
    """
    inspected = exchange.inspected and stage == 0
    if exchange.when[stage] == When.ALWAYS.value and not inspected:
        return start_collective(gradient, stage, exchange)
    assert token is not None
    return torch.ops.mfsdp.reduce_if_due(
        gradient,
        token,
        exchange.collectives[stage],
        exchange.when[stage],
        exchange.reduce_op,
        exchange.group_sizes[stage],
        exchange.groups[stage],
        inspected,
    )


def start_collective(gradient: Tensor, stage: int, exchange: Exchange) -> Tensor:
    """Start the collective of a stage, whether or not it is due."""
    size, group = exchange.group_sizes[stage], exchange.groups[stage]
    return _start(gradient, exchange.collectives[stage], exchange.reduce_op, size, group)


def _start(gradient: Tensor, collective: str, op: str, size: int, group: str) -> Tensor:
    if collective == "all_reduce":
        return compat.all_reduce(gradient, op, group)
    if collective == "all_gather":
        return compat.all_gather(gradient, size, group)
    if collective == "all_to_all":
        return torch.ops.mfsdp.exchange_slices(gradient, size, group)
    return compat.reduce_scatter(gradient, op, size, group)


def await_stage(started: Tensor, stage: int, exchange: Exchange) -> Tensor:
    """Return the result of a stage of a reduction."""
    if exchange.collectives[stage] == "all_to_all":
        return torch.ops.mfsdp.wait_summed(started, exchange.group_sizes[stage])
    return compat.wait_tensor(started)


@torch.library.impl(_library, "exchange_slices", "CompositeExplicitAutograd")
def _exchange_slices(gradient: Tensor, group_size: int, group: str) -> Tensor:
    slice_numel = math.ceil(gradient.numel() / group_size)
    if padding := slice_numel * group_size - gradient.numel():
        gradient = torch.nn.functional.pad(gradient, (0, padding))
    slices = [slice_numel] * group_size
    with profiling.exchanging_slices():
        return compat.all_to_all(gradient, slices, slices, group)


@torch.library.register_fake("mfsdp::exchange_slices", lib=_library)
def _exchange_slices_fake(gradient: Tensor, group_size: int, group: str) -> Tensor:
    return gradient.new_empty(_started_numel(gradient, "all_to_all", group_size))


@torch.library.impl(_library, "wait_summed", "CompositeExplicitAutograd")
def _wait_summed(slices: Tensor, group_size: int) -> Tensor:
    first, *others = compat.wait_tensor(slices).chunk(group_size)
    total = first.to(torch.float32, copy=True)
    for other in others:
        total.add_(other)
    return total


@torch.library.register_fake("mfsdp::wait_summed", lib=_library)
def _wait_summed_fake(slices: Tensor, group_size: int) -> Tensor:
    return slices.new_empty(slices.numel() // group_size, dtype=torch.float32)


@torch.library.impl(_library, "reduce_if_due", "CompositeExplicitAutograd")
def _reduce_if_due(
    gradient: Tensor,
    token: Tensor,
    collective: str,
    when: str,
    reduce_op: str,
    group_size: int,
    group: str,
    inspected: bool,
) -> Tensor:
    to_reduce: Tensor | None = gradient
    if inspected:
        bucket_of(token).inspect(gradient)
    if when == When.IF_DUE.value:
        to_reduce = defer_unless_due(token, gradient)
    elif when == When.FOLLOWS.value and bucket_of(token).gradient_waits:
        to_reduce = None
    if to_reduce is None:
        return gradient.new_zeros(_started_numel(gradient, collective, group_size))
    if group_size == 1:
        return to_reduce.clone()
    return _start(to_reduce, collective, reduce_op, group_size, group)


@torch.library.register_fake("mfsdp::reduce_if_due", lib=_library)
def _reduce_if_due_fake(
    gradient: Tensor,
    token: Tensor,
    collective: str,
    when: str,
    reduce_op: str,
    group_size: int,
    group: str,
    inspected: bool,
) -> Tensor:
    return gradient.new_empty(_started_numel(gradient, collective, group_size))


def _started_numel(gradient: Tensor, collective: str, group_size: int) -> int:
    """Return the number of elements of what a collective returns."""
    if collective == "reduce_scatter":
        return gradient.numel() // group_size
    if collective == "all_to_all":
        return math.ceil(gradient.numel() / group_size) * group_size
    return gradient.numel() * (group_size if collective == "all_gather" else 1)


@torch.library.impl(_library, "pack_gradients", "CompositeExplicitAutograd")
def _pack_gradients(
    gradients: Sequence[Tensor],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    capacity: int = 0,
    count: int = 0,
) -> Tensor:
    device = gradients[0].device
    if capacity:
        flat = take("gradients", Buffers(capacity, count), numel, dtype, device)
    else:
        flat = torch.empty(numel, dtype=dtype, device=device)
    places, end = [], 0
    for gradient, offset in zip(gradients, offsets, strict=True):
        if offset > end:
            flat[end:offset].zero_()
        end = offset + gradient.numel()
        places.append(flat.as_strided(gradient.shape, contiguous_strides(gradient.shape), offset))
    if end < numel:
        flat[end:].zero_()
    compat.copy_each(places, list(gradients))
    return flat


@torch.library.register_fake("mfsdp::pack_gradients", lib=_library)
def _pack_gradients_fake(
    gradients: Sequence[Tensor],
    offsets: Sequence[int],
    numel: int,
    dtype: torch.dtype,
    capacity: int = 0,
    count: int = 0,
) -> Tensor:
    return gradients[0].new_empty(numel, dtype=dtype)


# -- communication buffers --------------------------------------------------------------------------------------------


@torch.library.impl(_library, "gather_into_buffer", "CompositeExplicitAutograd")
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


@torch.library.register_fake("mfsdp::gather_into_buffer", lib=_library)
def _gather_into_buffer_fake(
    shard: Tensor, capacity: int, count: int, dtype: torch.dtype, group_size: int, group_name: str
) -> Tensor:
    return shard.new_empty(shard.numel() * group_size, dtype=dtype)


@torch.library.impl(_library, "gradient_buffer", "CompositeExplicitAutograd")
def _gradient_buffer(capacity: int, count: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return take("gradients", Buffers(capacity, count), numel, dtype, device)


@torch.library.register_fake("mfsdp::gradient_buffer", lib=_library)
def _gradient_buffer_fake(capacity: int, count: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(numel, dtype=dtype, device=device)


# -- begin ------------------------------------------------------------------------------------------------------------


@torch.library.impl(_library, "begin", "CompositeExplicitAutograd")
def _begin(phase: str, digest: str, schedule: str, used: str) -> None:
    graph_runs.begin(phase, digest, schedule, used)
