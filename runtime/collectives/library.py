"""The operators of mfsdp-compile, ``torch.ops.mfsdp.*``.

``unshard(shell, layout)``
    A marker. While a model is traced, ``module.weight`` returns ``unshard(shell)``; ``passes.unshard`` removes it
    again. If it is ever run, another backend has compiled the model and would read memory that does not exist, so it
    raises.
``unshard_quantized(shell, layout, scaling)``
    The same for a parameter that modules get as it was gathered in float8 (:mod:`.forms`): stands for its anchor, its
    data and its scale.
``gather(shard, resident, token, scales, ...)``
    A bucket's parameters. Composite and differentiable. For full sharding it is traced as cast, all-gather, wait and
    views, and its backward as ``pack_gradients``, reduce-scatter, wait and cast. Other strategies omit or add
    collectives; see :mod:`mfsdp_compile.runtime.lanes.strategies`. If modules get a bucket as it is gathered in float8,
    there are two results for each parameter: all anchors, and then all data.
``split_scales(scales, ...)``
    The scales of each parameter of a bucket, as views. Composite.
``gather_whole(shard, resident, token, scales, ...)``
    A bucket that a region reads: the whole bucket, and an anchor, a tensor without memory whose gradient is the packed
    gradient of the bucket (in the dtype in which gradients are reduced, which the bucket may not have). Its backward
    begins with the reduction. Inside of the region, ``gather(anchor, whole, ...)`` splits the bucket and packs
    gradients.
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
    Memory for gradients: a communication buffer, or new if ``capacity`` is 0. Only Inductor's code of
    ``pack_gradients`` has it, and :mod:`mfsdp_compile.backend.pieces`.
``pack_into(memory, gradients, offsets, gaps)``
    Gradients at their offsets in memory that there is, and zeros in the gaps: those between the gradients, or from each
    even element of ``gaps`` to the next. It returns the memory.
``reduce_if_due(gradient, token, lane, part, index)``
    Starts a stage of a reduction. It is skipped while gradients are accumulated over microbatches; see
    :mod:`mfsdp_compile.runtime.memory.deferred_gradients`. The first such stage accumulates them, and runs the local
    stages in front of it. It must be awaited like any other. Inductor treats it as a collective.
``run_stage``, ``start_stage`` and ``wait_stage(x, token, lane, part, index)``
    A stage that graphs know only by its place; see :mod:`mfsdp_compile.runtime.lanes.stage`. With a token if the stage
    keeps state, or may be skipped: then it returns zeros.
``exchange_slices(slices, group_size, group)``
    An all-to-all in which every rank sends to each other its slice of a gradient. It must be awaited like any other
    collective. Torch's own may be the model's.
``deliver(gradient, at_rest, bucket)``
    Gives the parameters of a bucket, by its index in the graph, their reduced gradient as soon as it has arrived,
    instead of when the graph returns. What is delivered may be used up at once: an optimizer's step over the bucket
    (:mod:`mfsdp_compile.runtime.guests.optimizers.in_backward`). It is therefore declared to write to what the graph
    has of the bucket at rest, its shard and its resident. Returns zeros of the gradient's shape without memory, for the
    graph to return in its place.
``begin(phase, digest, schedule, used)``
    The first node of a graph, which announces what the graph is about to do; see
    :mod:`mfsdp_compile.runtime.step.graph_runs`.

The operators take numbers and strings instead of layout and group objects. A graph that contains them therefore prints
as valid Python, and its cache key includes everything that matters.
"""

from __future__ import annotations

import torch

library = torch.library.Library("mfsdp", "DEF")

library.define("unshard(Tensor shell, str layout) -> Tensor")
library.define("unshard_quantized(Tensor shell, str layout, str scaling) -> (Tensor, Tensor, Tensor)")
library.define("split_scales(Tensor scales, int[] sizes, int[] ndims, str scaling) -> Tensor[]")
library.define(
    "gather(Tensor shard, Tensor? resident, Tensor? token, Tensor? scales, "
    "int[] sizes, int[] ndims, int[] offsets, str lane, "
    "int[] buffers, str scaling, "
    "str form) -> Tensor[]"
)
library.define(
    "gather_whole(Tensor shard, Tensor? resident, Tensor? token, Tensor? scales, "
    "int[] sizes, int[] ndims, int[] offsets, str lane, "
    "int[] buffers, str scaling, "
    "str form) -> (Tensor, Tensor)"
)
library.define("portion(Tensor whole, int size, str group) -> Tensor")
library.define(
    "gather_into_buffer(Tensor shard, int capacity, int count, ScalarType dtype, int group_size, str group_name) -> "
    "Tensor"
)
library.define(
    "pack_gradients(Tensor[] gradients, int[] offsets, int numel, ScalarType dtype, int capacity=0, int count=0) -> "
    "Tensor"
)
library.define("pack_into(Tensor memory, Tensor[] gradients, int[] offsets, int[]? gaps=None) -> Tensor")
library.define("gradient_buffer(int capacity, int count, int numel, ScalarType dtype, Device device) -> Tensor")
library.define("reduce_if_due(Tensor gradient, Tensor token, str lane, str part, int index) -> Tensor")
library.define("run_stage(Tensor x, Tensor? token, str lane, str part, int index) -> Tensor")
library.define("start_stage(Tensor x, Tensor? token, str lane, str part, int index) -> Tensor")
library.define("wait_stage(Tensor flying, Tensor? token, str lane, str part, int index) -> Tensor")
library.define("exchange_slices(Tensor slices, int group_size, str group) -> Tensor")
library.define("deliver(Tensor gradient, Tensor(a!)[] at_rest, int bucket) -> Tensor")
library.define("begin(str phase, str digest, str schedule, str used) -> ()")
torch.fx.node.has_side_effect(torch.ops.mfsdp.begin.default)
