"""AOTAutograd: graphs of forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._C import _current_autograd_node
from torch._C._autograd import _get_current_graph_task_keep_graph  # type: ignore[attr-defined]
from torch.utils.checkpoint import CheckpointPolicy

from .dynamo import copy_graph_module

__all__ = [
    "allow_another_backward",
    "compile_with_aot_eager",
    "flop_formula",
    "is_backward_node",
    "is_forward_input",
    "is_tangent",
    "min_cut_partition",
    "trace_with_aot",
]


def trace_with_aot(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    decomposed: bool,
    compiler: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Run AOTAutograd for graphs that are inspected and not compiled. The result can be called.

    Args:
        gm: Graph module from Dynamo.
        inputs: Example inputs of the graph.
        partition: Function that partitions the joint graph.
        decomposed: Whether to apply Inductor's decompositions.
        compiler: Compiler of forward, backward and inference graphs; None: they run as they are.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop
    from torch._inductor import lowering  # noqa: F401 -- the decomposition of max_pool2d uses it without importing it
    from torch._inductor.decomposition import select_decomp_table

    decompositions = select_decomp_table() if decomposed else None
    trace = aot_autograd(
        fw_compiler=compiler or boxed_nop,
        bw_compiler=compiler or boxed_nop,
        partition_fn=partition,
        decompositions=decompositions,
    )
    return trace(gm, list(inputs))


def flop_formula(operator: torch._ops.OpOverload) -> Callable[..., int] | None:
    """Return the function that counts an operator's floating-point operations; None if torch registers none.

    It is called as ``formula(*args, **kwargs, out_val=result)``, with tensors.
    """
    from torch.utils.flop_counter import flop_registry

    return flop_registry.get(operator.overloadpacket)


def is_tangent(node: fx.Node) -> bool:
    """Whether a placeholder of a backward graph is the gradient of an output of the forward."""
    return "tangents" in str(node.target)  # the same test as in torch's partitioner


def is_forward_input(node: fx.Node) -> bool:
    """Whether a placeholder of a backward graph is an input of the forward, and not a value that forward has saved."""
    return str(node.target).startswith("primals")


def is_backward_node(node: fx.Node) -> bool:
    """Whether a node of a joint or backward graph was created by autograd's backward."""
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward")


def compile_with_aot_eager(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]],
    finish: Callable[[fx.GraphModule], None],
) -> Callable[..., Any]:
    """Run AOTAutograd; the resulting graphs run op by op. ``finish`` rewrites forward, backward and inference graphs.

    The graphs take their arguments out of a list, so that tensors saved for backward are freed after their last use.
    """
    import torch._functorch.config as functorch_config
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    def compiler(graph_module: fx.GraphModule, arguments: Sequence[Any]) -> Callable[..., Any]:
        finish(graph_module)
        return boxed_nop(graph_module, arguments)  # type: ignore[arg-type]

    with functorch_config.patch(donated_buffer=False):  # operators write to nothing that forward saved
        return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)(gm, list(inputs))


_DONATED, _COPIES = "_mfsdp_donated", "_mfsdp_copies"


def allow_another_backward() -> None:
    """Let compiled code run its backward again, if the backward that begins is to retain the graph.

    To be called by a hook in front of the autograd node of compiled code. Inductor's backward writes to tensors that
    forward saved ("donated buffers"), and torch refuses to retain the graph of such code, unless its first backward
    retains: then it compiles the backward without such writes. Here, a backward that retains copies these tensors
    first, and the next one restores them.
    """
    node: Any = _current_autograd_node()
    copies: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] | None = vars(node).pop(_COPIES, None)
    for storage, copy in copies or ():
        storage.copy_(copy)
    code = node._forward_cls
    if not _get_current_graph_task_keep_graph() or code.compiled_bw is None:
        return
    metadata = code.metadata
    if metadata.bw_donated_idxs != []:
        setattr(code, _DONATED, metadata.bw_donated_idxs or [])  # None: there are none either
        metadata.bw_donated_idxs = []  # else torch raises
    if copies is None:
        saved, symbols = [*node.saved_tensors, *node._tensors_no_vc_check], metadata.num_symints_saved_for_bw
        donated = [saved[index - symbols].untyped_storage() for index in getattr(code, _DONATED, ())]
        copies = [(storage, storage.clone()) for storage in {each.data_ptr(): each for each in donated}.values()]
    setattr(node, _COPIES, copies)


def min_cut_partition(
    joint: fx.GraphModule,
    joint_inputs: Any,
    *,
    distinct: Sequence[Any] = (),
    activation_memory_budget: float = 1.0,
    without_memory: Sequence[fx.Node] = (),
    **kwargs: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Partition a joint graph as Inductor does.

    Args:
        joint: The joint graph.
        joint_inputs: Its inputs, which torch ignores.
        distinct: Operators (overload packets and higher-order operators) whose calls stay apart even if they have equal
            arguments.
        activation_memory_budget: Which part of the bytes that forward would save it may save; 1: as the program has set
            it. Random numbers, and results of operators that are not torch's own, are saved in any case.
        without_memory: Placeholders whose size says nothing about memory. Torch takes the sum of all for the least that
            can be saved.
        **kwargs: Other arguments of torch's partitioner.
    """
    from functorch.compile import config, min_cut_rematerialization_partition

    with _never_merging(distinct):
        if activation_memory_budget == 1:
            return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
        usual = copy_graph_module(joint)
        _keep_from_recomputation(joint.graph)
        # At 0, torch looks at nothing else, and would draw random numbers again.
        budget = max(activation_memory_budget, 1e-6)
        patch = config.patch(activation_memory_budget=budget)
        sizes = {node.name: node.meta["val"] for node in without_memory}
        with patch, _sized_as_nothing(without_memory), contextlib.suppress(AssertionError):
            found = min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)
            for placeholder in found[0].graph.find_nodes(op="placeholder"):
                if placeholder.name in sizes:
                    placeholder.meta["val"] = sizes[placeholder.name]
            if not any(isinstance(node.meta.get("val"), (tuple, list)) for node in _results(found[0])):
                return found
        # Torch wants to save operators of several results as they are, if nothing else could be computed again.
        return min_cut_rematerialization_partition(usual, joint_inputs, **kwargs)


def _results(module: fx.GraphModule) -> list[fx.Node]:
    (results,) = module.graph.output_node().args
    return [node for node in results if isinstance(node, fx.Node)]  # type: ignore[union-attr]


@contextlib.contextmanager
def _sized_as_nothing(placeholders: Sequence[fx.Node]) -> Iterator[None]:
    values = [node.meta["val"] for node in placeholders]
    for node, value in zip(placeholders, values, strict=True):
        node.meta["val"] = value.new_empty(0)
    try:
        yield
    finally:
        for node, value in zip(placeholders, values, strict=True):
            node.meta["val"] = value


def _keep_from_recomputation(graph: fx.Graph) -> None:
    """Mark what must not be computed twice: random numbers, and operators of which torch does not know what they do.

    What checkpointing is to compute again, it does: its random numbers are drawn from the same state.
    """
    again = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    for node in graph.nodes:
        target = node.target
        if not isinstance(target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
            continue
        is_known = isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "prims")
        if is_known and torch.Tag.nondeterministic_seeded not in target.tags:
            continue
        if node.meta.get("recompute") not in again:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


@contextlib.contextmanager
def _never_merging(operators: Sequence[Any]) -> Iterator[None]:
    """Context in which torch treats calls of these operators as it treats random ones: equal calls are not one."""
    from torch._functorch import compile_utils

    own = compile_utils.rand_ops
    compile_utils.rand_ops = [*own, *operators]
    try:
        yield
    finally:
        compile_utils.rand_ops = own
