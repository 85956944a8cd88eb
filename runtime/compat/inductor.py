"""Inductor: its options, its scheduler, and lowerings of our operators."""

from __future__ import annotations

import functools
import heapq
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from .version import TORCH_VERSION

__all__ = [
    "InductorBucket",
    "compile_kernel",
    "compile_with_inductor",
    "graph_pass",
    "inductor_called",
    "inductor_collective",
    "inductor_config_patches",
    "inductor_in_chunks",
    "inductor_inlined",
    "inductor_joint_passes",
    "inductor_memory",
    "inductor_part",
    "inductor_quantize",
    "inductor_wait",
    "inductor_writing",
    "is_miscompiled",
    "partitioner",
    "register_lowering",
    "set_inductor_deterministic",
    "set_output_strides",
    "unknown_inductor_options",
]


def set_output_strides(output: fx.Node, position: int, strides: tuple[int, ...]) -> None:
    """Change the strides that Inductor gives an output of a graph; it would copy a tensor with others."""
    if (known := output.meta.get("original_output_strides")) is not None:  # noted before passes over the graph
        known[position] = strides


def inductor_joint_passes(joint: fx.GraphModule) -> fx.GraphModule:
    """Run Inductor's passes over a joint graph before it is partitioned: constant folding, pattern replacement."""
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    mode = detect_fake_mode([node.meta.get("val") for node in joint.graph.find_nodes(op="placeholder")])
    with V.set_fake_mode(mode):  # passes that replace random number operators need it
        return joint_graph_passes(joint)


def inductor_in_chunks(joint: fx.GraphModule, chunks: int, least_bytes: int) -> tuple[fx.GraphModule, str]:
    """Run :func:`inductor_joint_passes`, and let them compute a matrix product, and what follows from it, in chunks.

    Torch's pass for this keeps why it left a graph alone to its log.

    Args:
        chunks: Number of chunks.
        least_bytes: Bytes of the product's result, or fewer, but more than those of other products.

    Returns:
        The graph, and why nothing in it is computed in chunks; empty otherwise.
    """
    import torch._inductor.config as config

    reasons: list[str] = []

    class Reasons(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info and (error := record.exc_info[1]) is not None:
                is_told = type(error).__name__ == "CantChunk"
                reasons.append(
                    str(error) if is_told else f"torch's auto_chunker fails ({type(error).__name__}: {error})"
                )

    settings = {
        "auto_chunker.enable": True,
        "auto_chunker.num_chunk": chunks,
        "auto_chunker.output_size_threshold": least_bytes - 1,
        "auto_chunker.amplify_ratio_threshold": 0,
        "joint_custom_pre_pass": None,
        "joint_custom_post_pass": None,
    }
    log, listener = logging.getLogger("torch._inductor.fx_passes.joint_graph.__auto_chunker"), Reasons(logging.DEBUG)
    before = log.level
    log.setLevel(logging.DEBUG)
    log.addHandler(listener)
    try:
        with config.patch(settings):
            return inductor_joint_passes(joint), "; ".join(reasons)
    except Exception as error:  # of the pass, which then has changed only a copy
        return joint, f"{type(error).__name__}: {error}"
    finally:
        log.removeHandler(listener)
        log.setLevel(before)


_ORDER_KEEPING: dict[str, Any] = {
    # Would move every all-gather next to its wait to save memory. The order of the FX graph is the schedule.
    "reorder_for_peak_memory": False,
    # Would hoist all gathers of an inference graph to its top, which puts the whole model in memory at once.
    "reorder_for_locality": False,
    "reorder_for_locality_in_training": False,
    "reorder_for_compute_comm_overlap": False,
    # On by default in torch 2.15; reorders around collectives, differently on different ranks (pytorch#189454).
    "aten_distributed_optimizations.enable_simple_overlap": False,
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
}


def is_miscompiled(module: torch.nn.Module, device_type: str) -> bool:
    """Whether this version's Inductor is known to compute wrong gradients for a model, with or without this package.

    This affects router gradients of transformers' GPT-OSS on the CPU, if the auxiliary loss is among the outputs. In
    tests, gradients were correct with torch 2.11 and 2.15 and wrong with 2.13.
    """
    is_named_so = any(kind.__name__.startswith("GptOss") for kind in type(module).__mro__)
    return is_named_so and device_type == "cpu" and (2, 12) <= TORCH_VERSION < (2, 15)


def inductor_config_patches() -> dict[str, Any]:
    """Return the settings that keep Inductor from reordering collectives, without those that this torch lacks."""
    unknown = unknown_inductor_options(_ORDER_KEEPING)
    settings = {name: value for name, value in _ORDER_KEEPING.items() if name not in unknown}
    return settings | {
        "_pre_fusion_custom_pass": _scheduler_pass(_chain_collectives),
        "_post_fusion_custom_pass": _scheduler_pass(_in_order),
    }


@functools.cache
def _scheduler_pass(run: Callable[[list[Any]], list[Any]]) -> Any:
    """Wrap a function for Inductor's config. It takes and returns the scheduler's nodes, in executable order."""
    from torch._inductor import custom_graph_pass

    # Torch 2.11 has no separate class for these passes.
    base = getattr(custom_graph_pass, "CustomSchedulerPass", custom_graph_pass.CustomGraphPass)
    return _identified(base, run, lambda: f"mfsdp_compile {run.__name__} 8")  # change the number when a pass changes


def _chain_collectives(nodes: list[Any]) -> list[Any]:
    """Before fusion, make starts, waits, calls and nodes without dependencies depend on the one before.

    Inductor itself keeps only starts in order. Its fusion joins kernels of different layers, for example for an
    auxiliary loss that reads a value of each layer. Everything that either kernel needs is then computed first,
    including waits: gathers would start right before they are awaited, and all reductions would be awaited at the end.
    Fusion can also join a kernel from the beginning with one from the end that needs a constant from there. All other
    nodes without dependencies, such as the padding in gradient buckets, would then run before it. With the added
    dependencies, a fusion that would reorder collectives forms a cycle, which Inductor rejects.
    """
    from torch._inductor import ir
    from torch._inductor.dependencies import WeakDep

    def follow(node: Any, other: Any) -> None:
        # As in Inductor's own control dependencies, the name is that of an operation. With the name of a buffer,
        # Inductor would take the node for one that mutates that buffer.
        for buffer in other.get_buffer_names():
            node.add_fake_dep(WeakDep(buffer, mutating_buf=node.get_name(), is_fake=True))

    before: Any = None
    computes = {buffer: node for node in nodes for buffer in node.get_buffer_names()}
    nodes = _memory_first(nodes, computes)
    for node in nodes:
        for owner in _computed_inside_of(node):
            if (source := computes.get(owner)) is not None and source is not node:
                follow(node, source)
        is_link = isinstance(node.node, (ir._CollectiveKernel, ir.InvokeSubgraph))  # a wait is one of the former
        if before is not None and (is_link or not node.unmet_dependencies):
            follow(node, before)
        if is_link:
            before = node
        for dep in node.unmet_dependencies:
            if (source := computes.get(dep.name)) is not None:
                node.ancestors |= source.get_operation_names() | source.ancestors
    return nodes


def _memory_first(nodes: list[Any], computes: dict[str, Any]) -> list[Any]:
    """Move operators that return memory to write to in front of the first node that computes something in it.

    They were lowered together with the node that packs all of it, the last one.
    """
    first: dict[Any, Any] = {}
    for node in nodes:
        for name in _computed_inside_of(node):
            if (owner := computes.get(name)) is not None:
                first.setdefault(owner, node)
    ahead: dict[Any, list[Any]] = {}
    for owner, node in first.items():
        sources = [computes[dep.name] for dep in owner.unmet_dependencies if dep.name in computes]
        moved = [*(source for source in sources if not source.unmet_dependencies), owner]
        for offset, each in enumerate(reversed(moved), 1):
            each.min_order = node.min_order - offset / (len(moved) + 1)
        ahead.setdefault(node, []).extend(moved)
    gone = {each for moved in ahead.values() for each in moved}
    return [each for node in nodes if node not in gone for each in (*ahead.get(node, ()), node)]


def _computed_inside_of(node: Any) -> Iterator[str]:
    """Yield the names of buffers that a node computes its results in, with memory that is not Inductor's own.

    Inductor knows that the node writes there, but not that the operator that returns the memory must have run.
    """
    from torch._inductor import ir

    for part in node.get_nodes():
        layout = getattr(part.node, "layout", None)
        while isinstance(layout, ir.NonOwningLayout):
            owner = layout.view.data.data  # type: ignore[union-attr]
            if not isinstance(owner, ir.ConcatKernel):  # that one comes after its parts, and has memory before them
                yield owner.get_name()
            layout = owner.layout


def _in_order(nodes: list[Any]) -> list[Any]:
    """After fusion, run kernels in the order of the graph, and fused kernels as soon as they can run.

    Operators without tensors (``mfsdp::begin``) come first. Inductor emits the code of pending CPU kernels after such
    an operator, but at the operator it already frees buffers that only those kernels read.

    Inductor's own order is depth first. A fused kernel that begins early but needs a value computed late would run
    after everything that the value needs. A result that nothing waits for, such as gradients summed over layers, would
    be computed last, and would keep the gathered weights that it reads alive until then.
    """
    from torch._inductor import ir

    computes = {buffer: i for i, node in enumerate(nodes) for buffer in node.get_buffer_names()}
    needs = [{computes[dep.name] for dep in node.unmet_dependencies if dep.name in computes} for node in nodes]
    readers: list[list[int]] = [[] for _ in nodes]
    for i, sources in enumerate(needs):
        sources.discard(i)
        for source in sources:
            readers[source].append(i)
    place = [
        -1
        if isinstance(getattr(node.node, "layout", None), ir.NoneLayout) and node.get_device() is None
        else node.min_order
        for node in nodes
    ]
    ready = [(place[i], i) for i, sources in enumerate(needs) if not sources]
    heapq.heapify(ready)
    found = []
    while ready:
        _, i = heapq.heappop(ready)
        found.append(nodes[i])
        for reader in readers[i]:
            needs[reader].discard(i)
            if not needs[reader]:
                heapq.heappush(ready, (place[reader], reader))
    assert len(found) == len(nodes), "the scheduler's nodes depend on one another in a circle"
    return found


def set_inductor_deterministic(value: Any) -> Any:
    """Set whether times that Inductor measures may change numbers, and return what was set before."""
    import torch._inductor.config as config

    before, config.deterministic = config.deterministic, value
    return before


def unknown_inductor_options(names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that are not settings of ``torch._inductor.config``."""
    import torch._inductor.config as config

    def exists(name: str) -> bool:
        owner: Any = config
        for part in name.split("."):
            if not hasattr(owner, part):
                return False
            owner = getattr(owner, part)
        return True

    return [name for name in names if not exists(name)]


def compile_with_inductor(gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any]) -> Callable[..., Any]:
    """Run AOTAutograd and Inductor.

    A backward that calls other graphs (regions, ``torch.cond``) overwrites none of its inputs. Before torch 2.15,
    Inductor took positions among these inputs ("donated buffers") for positions among the inputs of the called graphs,
    which then overwrote what the backward still needed: gradients were silently wrong.

    Args:
        patches: Settings of Inductor. They also apply to the backward, which is compiled later.
    """
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    calls = _calls_graphs(gm)
    with functorch_config.patch(donated_buffer=functorch_config.donated_buffer and not calls):
        return compile_fx(gm, list(inputs), config_patches=patches)  # type: ignore[return-value]


def compile_kernel(gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any]) -> Callable[..., Any]:
    """Compile a graph of tensors without gradients that make_fx has traced.

    AOTAutograd's cache cannot pickle some of them, and warns. Inductor's own can.
    """
    import torch._functorch.config as functorch_config

    with functorch_config.patch(enable_autograd_cache=False):
        return compile_with_inductor(gm, inputs, patches)


def _calls_graphs(gm: fx.GraphModule) -> bool:
    """Whether compiled code of a graph calls others. Those of checkpoints and autograd functions are inlined."""
    inlined = torch.ops.higher_order.tag_activation_checkpoint, torch.ops.higher_order.autograd_function_apply
    for name, inner in gm.named_children():
        if isinstance(inner, fx.GraphModule):
            users = [user for node in gm.graph.find_nodes(op="get_attr", target=name) for user in node.users]
            if not users or any(user.target not in inlined for user in users) or _calls_graphs(inner):
                return True
    return False


def graph_pass(run: Callable[[fx.Graph], None], uuid: Callable[[], str | None]) -> Any:
    """Create a pass over an FX graph for Inductor's config.

    Args:
        run: The pass.
        uuid: Function that returns the identifier for cache keys; None: no caching. It is called whenever a key is
            made: for AOTAutograd's cache before tracing, for Inductor's own cache before a partitioned graph is
            compiled.
    """
    from torch._inductor import custom_graph_pass

    return _identified(custom_graph_pass.CustomGraphPass, run, uuid)


def partitioner(run: Callable[..., tuple[fx.GraphModule, fx.GraphModule]], uuid: Callable[[], str | None]) -> Any:
    """Create a partitioner for Inductor's config, with a ``uuid`` for its cache keys as in :func:`graph_pass`."""
    from torch._inductor import custom_graph_pass

    return _identified(custom_graph_pass.CustomPartitionerFn, run, uuid)


def _identified(base: Any, run: Callable[..., Any], uuid: Callable[[], str | None]) -> Any:
    """Wrap a function as one of Inductor's classes.

    Cache keys pickle Inductor's config, including passes, of which they get the uuid.
    """

    class Pass(base):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return run(*args, **kwargs)

        def uuid(self) -> str | None:
            return uuid()

        def __reduce__(self) -> Any:
            return _uuid, (uuid(),)

    return Pass()


def _uuid(uuid: str | None) -> str | None:
    return uuid


def register_lowering(operator: Any, lower: Callable[..., Any]) -> None:
    """Make Inductor turn ``operator`` into its IR with ``lower``, which takes and returns IR nodes."""
    from torch._inductor import lowering

    lowering.register_lowering(operator, type_promotion_kind=None)(lower)


def inductor_collective(operator: Any, *args: Any, memory_of_others: bool = False) -> Any:
    """Lower ``operator`` like Inductor's own out-of-place collectives, which keep buffers alive until the wait.

    Args:
        memory_of_others: Whether the result is in memory that Inductor may not put anything else into.
    """
    from torch._inductor import ir

    result = ir.TensorBox.create(ir._CollectiveKernel.create_out_of_place(operator, *args))
    return _never_reused(result) if memory_of_others else result


def inductor_wait(collective: Any) -> Any:
    """Lower a wait for the result of a collective."""
    from torch._inductor import lowering

    return lowering.lowerings[torch.ops._c10d_functional.wait_tensor.default](collective)


def inductor_called(operator: Any, *args: Any) -> Any:
    """Lower ``operator`` as a call of its kernel."""
    from torch._inductor import ir

    return ir.TensorBox.create(ir.FallbackKernel.create(operator, *args))


def inductor_inlined(run: Callable[..., torch.Tensor], *args: Any) -> Any:
    """Lower a function of tensors, which Inductor's values and others stand for, operator by operator."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V
    from torch.fx.experimental.proxy_tensor import make_fx

    values = [value for value in args if isinstance(value, ir.TensorBox)]

    def of_values(*tensors: torch.Tensor) -> torch.Tensor:
        given = iter(tensors)
        return run(*(next(given) if isinstance(value, ir.TensorBox) else value for value in args))

    with V.fake_mode:
        like = [torch.empty(v.get_size(), dtype=v.get_dtype(), device=v.get_device()) for v in values]
        traced = make_fx(of_values, lowering.decompositions)(*like)
    found: dict[fx.Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), values, strict=True))
    for node in traced.graph.nodes:
        if node.op == "call_function":
            given, settings = fx.map_arg((node.args, node.kwargs), found.__getitem__)
            found[node] = lowering.lowerings.get(node.target, node.target)(*given, **settings)  # or operator.getitem
    (returned,) = traced.graph.output_node().args
    return found[returned]


def inductor_part(value: Any, count: int, first: int, end: int) -> tuple[Any, int]:
    """Return the parts from ``first`` to ``end`` of a flat value that consists of ``count``, and their number."""
    from torch._inductor import lowering

    end, size = min(end, count), value.get_numel() // count
    part = lowering.lowerings[torch.ops.aten.slice.Tensor](value, 0, first * size, end * size)
    return part, end - first


def inductor_writing(operator: Any, *args: Any) -> Any:
    """Lower ``operator``, which writes to the tensors in its second argument.

    What has been read of them is computed first. Inductor itself (2.11 to 2.15) computes values that it has not stored
    yet, and that read what an operator of another library writes to, only once it has put the operator in its list of
    operations: they would read what was written.
    """
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    for written in args[1]:
        V.graph.mark_buffer_mutated(written.get_name())
    return ir.TensorBox.create(ir.FallbackKernel.create(operator, *args))


def inductor_quantize(values: Any, dims: Sequence[int], dtype: torch.dtype) -> tuple[Any, Any]:
    """Lower ``mfsdp::fp8_quantize``, operator by operator as its kernel."""
    from torch._inductor import lowering

    lowerings = lowering.lowerings
    aten, prims, limit = torch.ops.aten, torch.ops.prims, torch.finfo(dtype).max
    cast = lowerings[prims.convert_element_type.default]
    largest = cast(lowerings[aten.amax.default](lowerings[aten.abs.default](values), list(dims), True), torch.float32)
    scales = lowerings[aten.div.Tensor](largest, limit)
    is_zero = lowerings[aten.eq.Scalar](scales, 0)
    scales = lowerings[aten.add.Tensor](scales, cast(is_zero, torch.float32))  # rows of zeros have scale 1
    scaled = lowerings[aten.div.Tensor](cast(values, torch.float32), scales)
    bounded = lowerings[aten.minimum.default](lowerings[aten.maximum.default](scaled, -limit), limit)
    return cast(bounded, dtype), scales


def inductor_memory(operator: Any, *args: Any) -> Any:
    """Lower an operator that returns memory to write to. Inductor puts nothing else there."""
    from torch._inductor import ir

    return _never_reused(ir.TensorBox.create(ir.FallbackKernel.create(operator, *args)))


def _never_reused(memory: Any) -> Any:
    """Let Inductor drop a value after its last use without putting another one in its memory."""
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    if hasattr(V.graph, "never_reuse_but_free_buffers"):  # torch 2.15
        V.graph.never_reuse_but_free_buffers.add(memory.get_name())
    else:  # never_reuse_buffers would also keep it until the graph ends
        kernel = memory.data.data
        kernel.layout = ir.CommBufferLayout(kernel.layout, ir.CommBufferType.SYMM_MEM, "mfsdp")
    return memory


class InductorBucket:
    """A flat buffer in Inductor's IR whose parts are computed in place.

    It works like ``ConcatKernel``, Inductor's implementation of ``torch.cat``, with two differences: parts have given
    offsets, and a matmul is written directly into its slice even through a view (``t()``, ``reshape``).

    Args:
        memory: Result of :func:`inductor_memory` that the buffer lies in, from its beginning on. None: Inductor
            allocates it.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, numel: int, memory: Any = None) -> None:
        from torch._inductor import ir

        self._ir = ir
        self._device, self._dtype = device, dtype
        layout = ir.FixedLayout(device=device, dtype=dtype, size=[numel], stride=[1])
        self._kernel = ir.ConcatKernel(name=None, layout=layout, inputs=[])
        self._storage = ir.StorageBox(self._kernel)
        if memory is not None:
            memory.realize()
            # Parts refer to the kernel and not to its memory: the name of the whole buffer is then defined before them.
            # As the last line of a graph, Inductor would drop the definition.
            self._kernel.layout = ir.NonOwningLayout(ir.ReinterpretView(data=memory.data, layout=layout))
        self._operations: list[str] = []

    @staticmethod
    def numel(part: Any) -> int:
        numel = 1
        for size in part.get_size():
            numel *= int(size)
        return numel

    def store(self, part: Any, offset: int) -> None:
        """Compute ``part`` at ``[offset, offset + numel)``."""
        ir = self._ir
        if part.get_dtype() != self._dtype:
            from torch._inductor import lowering

            part = lowering.lowerings[torch.ops.prims.convert_element_type.default](part, self._dtype)
        size = list(part.get_size())
        strides = ir.FlexibleLayout.contiguous_strides(size)
        slice_layout = ir.FixedLayout(device=self._device, dtype=self._dtype, size=size, stride=strides, offset=offset)
        data = part.data if isinstance(part, ir.TensorBox) else part
        if isinstance(data, ir.StorageBox) and isinstance(data.data, ir.ExternKernelOut):
            # ConcatKernel copies what has a fixed layout. Inductor fixes that of a batched matmul, but not of a matmul.
            layout = data.data.layout
            if isinstance(layout, ir.FixedLayout) and list(layout.stride) == list(strides) and layout.offset == 0:
                data.data.layout = ir.FlexibleLayout(self._device, self._dtype, size)
        buffer = ir.ConcatKernel.realize_into(part, ir.ReinterpretView(data=self._storage, layout=slice_layout))
        self._kernel.inputs.append(buffer)
        data = part.data if isinstance(part, ir.TensorBox) else part
        if isinstance(data, ir.BaseView):
            data = data.unwrap_view()
        if (
            isinstance(data, ir.StorageBox)
            and data.is_input_buffer()  # otherwise a matmul or a reduction, which a foreach kernel cannot contain
            and ir.is_gpu(self._device.type)
            and not ir.is_dynamic(buffer)
        ):
            self._operations.append(buffer.get_operation_name())

    def fill(self, value: float, start: int, stop: int) -> None:
        """Write a constant to ``[start, stop)``."""
        if start >= stop:
            return
        ir, dtype = self._ir, self._dtype
        self.store(
            ir.Pointwise.create(
                device=self._device,
                dtype=dtype,
                inner_fn=lambda index: ir.ops.constant(value, dtype),
                ranges=[stop - start],
            ),
            start,
        )

    def finish(self) -> Any:
        """Return the buffer in the form that a lowering returns."""
        from torch._inductor.virtualized import V

        self._kernel.name = V.graph.register_buffer(self._kernel)
        self._kernel.inputs = self._ir.ConcatKernel.unwrap_storage(self._kernel.inputs)
        V.graph.register_operation(self._kernel)
        if len(self._operations) > 1:
            V.graph.register_operation_list(self._operations)
        return self._ir.TensorBox(self._storage)
