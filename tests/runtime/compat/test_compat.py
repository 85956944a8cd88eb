"""Every private torch symbol in ``runtime/compat/`` behaves as the rest of the package expects."""

from __future__ import annotations

import ast
import contextlib
import functools
import gc
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch import Tensor, fx, nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import mfsdp_compile
from mfsdp_compile import fully_shard_model
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.collectives import kernels, ops
from mfsdp_compile.runtime.compat import gloo
from mfsdp_compile.runtime.geometry.exchange import Exchange
from mfsdp_compile.runtime.geometry.groups import Group
from mfsdp_compile.runtime.lanes.lane import Lane
from mfsdp_compile.runtime.lanes.plain import AllGather, ReduceScatter
from mfsdp_compile.runtime.lanes.stage import Spec

ROOT = Path(__file__).resolve().parents[3]


def test_torch_version() -> None:
    assert compat.TORCH_VERSION >= compat.MIN_TORCH


def test_backward_is_seen_from_inside() -> None:
    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append((compat.in_backward(), compat.backward_id())))
    assert not compat.in_backward()
    assert compat.backward_id() == -1
    y.sum().backward()
    (y2 := x * 2).register_hook(lambda _: seen.append((compat.in_backward(), compat.backward_id())))
    y2.sum().backward()
    assert [inside for inside, _ in seen] == [True, True]
    assert seen[0][1] != seen[1][1] != -1


def test_compiled_autograd_asks_nodes_first() -> None:
    from torch._dynamo import compiled_autograd

    ran = []

    class Effect(compat.Uncaptured):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            ran.append(gradient)
            return gradient

    x = torch.ones(2, requires_grad=True)
    y = Effect.apply(x)
    y.register_hook(lambda gradient: ran.append(gradient))
    with (
        compiled_autograd._enable(functools.partial(torch.compile, backend="eager")),
        pytest.raises(NotImplementedError, match="Compiled autograd"),
    ):
        y.sum().backward()
    assert not ran
    Effect.apply(x).sum().backward()
    assert len(ran) == 1


def test_callbacks_run_when_backward_ends() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: compat.on_backward_end(lambda: order.append("end")))
    x.register_hook(lambda _: order.append("leaf"))
    y.sum().backward()
    assert order == ["leaf", "end"]


def test_what_a_backward_does_with_gradients_is_known() -> None:
    x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    wanted: list[compat.GradientRequest] = []
    y = (x * weight).clone()
    leaf = next(node for node, _ in y.grad_fn.next_functions[0][0].next_functions if node.variable is weight)  # type: ignore[union-attr]
    y.grad_fn.register_prehook(lambda _: wanted.append(compat.wanted(leaf)))  # type: ignore[union-attr]
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    y.sum().backward(inputs=[x], retain_graph=True)
    torch.autograd.grad(y.sum(), weight, retain_graph=True)
    y.sum().backward(retain_graph=True)
    kinds = compat.GradientRequest
    assert wanted == [kinds.NOT, kinds.NOT, kinds.RETURNED, kinds.ADDED]


def test_guards_on_hooks_have_code_compiled_again() -> None:
    """Of modules and of all modules, when they come and when they go."""
    compiled: list[int] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        compat.guard_on_hooks()
        compiled.append(1)
        return gm.forward

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    torch.compiler.reset()
    call, x = torch.compile(lambda x: model(x), backend=backend), torch.ones(1, 2)
    handles: list[Any] = []
    counts = []
    for change in (
        lambda: None,
        lambda: handles.append(model[1].register_forward_hook(lambda *_: None)),
        lambda: handles.pop().remove(),
        lambda: handles.append(nn.modules.module.register_module_forward_pre_hook(lambda *_: None)),
        lambda: handles.pop().remove(),
    ):
        change()
        call(x)
        counts.append(len(compiled))
    assert counts == [1, 2, 2, 3, 3]


def test_hooks_that_count_tensors_are_known() -> None:
    tensors = [torch.ones(1, requires_grad=True) for _ in range(2)]
    tensors[0].register_hook(lambda gradient: None)
    torch.autograd.graph.register_multi_grad_hook(tensors, lambda gradients: None)
    torch.autograd.graph.register_multi_grad_hook(tensors, lambda gradient: None, mode="any")
    hooks = list(tensors[0]._backward_hooks.values())
    assert [compat.counts_tensors(hook) for hook in hooks] == [False, True, False]


def test_below_transforms_nothing_is_wrapped() -> None:
    inside: list[tuple[bool, bool]] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        allowed = _can_hook()
        with compat.below_function_transforms():
            constant = torch.ones(2) * 3
        inside.append((allowed, "TensorWrapper" in repr(constant)))
        return (x * constant).sum()

    assert torch.equal(torch.func.grad(f)(torch.ones(2)), torch.full((2,), 3.0))
    assert torch.equal(torch.func.vmap(f)(torch.ones(4, 2)), torch.full((4,), 6.0))
    assert inside == [(False, False), (True, False)]
    assert _can_hook()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with hooks, pytest.raises(RuntimeError) as raised:
        torch.func.grad(f)(torch.ones(2))
    assert compat.refuses_saved_tensor_hooks(raised.value)
    assert not compat.refuses_saved_tensor_hooks(RuntimeError("saved tensors"))


def test_calls_of_transforms_and_functional_call_are_seen() -> None:
    seen: list[tuple[bool, bool, bool]] = []

    class Asks(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((compat.is_called_by_transform(), compat.in_functional_call(), compat.is_called_by_autograd()))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Asks():
        x.exp()
        assert seen.pop() == (False, False, False)
        torch.func.vmap(torch.exp)(x.detach())
        assert seen.pop()[0]
        torch.func.functional_call(nn.Tanh(), {}, (x,))
        assert seen.pop()[1]
    assert not compat.in_function_transform()
    assert torch.func.vmap(lambda x: x * compat.in_function_transform())(x.detach()).all()


def test_arguments_of_functions_are_converted() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
            return x * factor

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return gradient, None

    before = torch.autograd.Function.__dict__["apply"]
    try:
        compat.convert_arguments_of_functions(lambda cls, a: a + 1 if cls is Twice and isinstance(a, float) else a)
        assert torch.equal(Twice.apply(torch.ones(2, requires_grad=True), 1.0), torch.full((2,), 2.0))
    finally:
        torch.autograd.Function.apply = before
    compiled = torch.compile(lambda x: Twice.apply(x, 3.0), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))
    torch._dynamo.reset()


def test_bits_are_compared() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int8):
        one = torch.tensor([1, 0, 3], dtype=dtype)
        assert compat.equal_bits(one, one.clone())
        assert not compat.equal_bits(one, one + 1)
    nan, zero = torch.tensor([float("nan")]), torch.zeros(1)
    assert compat.equal_bits(nan, nan.clone())
    assert not compat.equal_bits(zero, -zero)


def test_writes_are_found_in_dynamo_graphs() -> None:
    """Writes to parameters are found however they are made, and reads are not taken for writes."""

    def of_data(w: torch.Tensor) -> None:
        w[0].data.mul_(2)

    def of_a_list(w: torch.Tensor) -> None:
        with torch.no_grad():
            torch._foreach_mul_([w], 2.0)

    def of_a_row(w: torch.Tensor) -> None:
        with torch.no_grad():
            w[0] = 1

    def reading(w: torch.Tensor) -> None:
        w.data.mul(2).add_(1)

    for write in (of_data, of_a_list, of_a_row, reading):
        found: list[int] = []

        def backend(gm: fx.GraphModule, inputs: Any) -> Any:
            found.append(len(compat.written(gm, lambda node: node.target is torch.relu)))
            return gm

        def run(x: torch.Tensor) -> torch.Tensor:
            w = torch.relu(x)
            write(w)
            return w * 2

        torch._dynamo.reset()
        torch.compile(run, backend=backend, fullgraph=True)(torch.ones(3, 3))
        assert found == [0 if write is reading else 1], write


def test_what_is_finished_before_groups_are_destroyed() -> None:
    done: list[str] = []
    with compat.fake_process_group(2), compat.finishing_first(lambda: done.append("in time")):
        with compat.finishing_first(lambda: done.append("over")):
            pass
        dist.new_group([0, 1])
        dist.destroy_process_group()
        assert done == ["in time"]
        assert not dist.is_initialized()
        dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())


def test_tangents_are_known() -> None:
    seen: list[int] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        def partition(joint: fx.GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            forward, backward = compat.min_cut_partition(joint, joint_inputs, **kwargs)
            seen.append(sum(compat.is_tangent(node) for node in backward.graph.find_nodes(op="placeholder")))
            return forward, backward

        return compat.compile_with_aot_eager(gm, inputs, partition, lambda finished: None)

    outputs = torch.compile(lambda x: (x * 2, x.sin(), x.detach()), backend=backend)(torch.ones(2, requires_grad=True))
    sum(each.sum() for each in outputs).backward()
    assert seen == [2]


def test_what_a_group_communicates_stays_where_it_is(fake_world: int) -> None:
    flags = torch.tensor([1, 0], dtype=torch.uint8)
    assert compat.to_backend(flags, dist.group.WORLD.group_name) is flags  # type: ignore[union-attr]


def test_hooks_on_saved_tensors_are_only_where_there_are_none() -> None:
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.detach()

    x = torch.ones(2, requires_grad=True)
    assert compat.hook_saved_tensors(pack, lambda t: t)
    assert not compat.hook_saved_tensors(pack, lambda t: t)
    y = x * x
    compat.unhook_saved_tensors(print)  # others' hooks stay
    y.exp()
    assert len(packed) == 3  # both factors, and the result of exp
    compat.unhook_saved_tensors(pack)
    compat.unhook_saved_tensors(pack)
    x.exp()
    assert len(packed) == 3
    with torch.no_grad():
        assert not compat.hook_saved_tensors(pack, lambda t: t)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        assert not _can_hook()


def _can_hook() -> bool:
    """Whether hooks on saved tensors can be installed here."""
    if installed := compat.hook_saved_tensors(_same, _same):
        compat.unhook_saved_tensors(_same)
    return installed


def _same(tensor: Tensor) -> Tensor:
    return tensor


def test_storage_address() -> None:
    base = torch.randn(8)
    assert compat.storage_address(base[2:]) == compat.storage_address(base)
    assert compat.storage_address(base.clone()) != compat.storage_address(base)
    seen = []
    torch.func.vmap(lambda t: seen.append(compat.storage_address(t)) or t)(base)
    assert seen == [None] or isinstance(seen[0], int)


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_calls_of_modules_are_seen_on_the_stack() -> None:
    class Asks(nn.Module):
        def forward(self, modules: set[nn.Module]) -> bool:
            return compat.in_call_of(modules)

    asks, other = Asks(), Asks()
    assert asks({asks})
    assert not asks({other})
    assert not compat.in_call_of({asks})
    results: list[bool] = []
    thread = threading.Thread(target=lambda: results.append(compat.in_call_of({asks})))
    thread.start()
    thread.join(10)
    assert results == [False]
    compiled = torch.compile(asks, backend="eager")  # frames that Dynamo has rewritten also count
    assert compiled({asks})
    torch._dynamo.reset()


def test_disabled_functions_are_known() -> None:
    assert compat.is_dynamo_disabled(torch.compiler.disable(lambda: None))
    assert not compat.is_dynamo_disabled(lambda: None)


def test_functions_that_are_python_only() -> None:
    """A ``python_only`` function is traced as a part of its caller, and runs as it is when eager code calls it."""

    @compat.python_only
    def where() -> bool:
        return torch.compiler.is_compiling()

    seen: list[bool] = []

    def outer(x: Tensor) -> Tensor:
        if where():
            x = x + 1
        torch._dynamo.graph_break()
        helper()
        return x + 1

    @torch._dynamo.disable(recursive=False)
    def helper() -> None:
        seen.append(where())

    assert torch.equal(torch.compile(outer, backend="eager")(torch.zeros(1)), torch.full((1,), 2.0))
    assert seen == [False]
    torch._dynamo.reset()


@pytest.mark.usefixtures("fake_world")
def test_store_keeps_values() -> None:
    store = compat.default_store()
    assert hasattr(store, "set")
    assert hasattr(store, "wait")


def dynamo_graph(function: Any, *inputs: Any) -> tuple[fx.GraphModule, list[Any]]:
    """Return Dynamo's graph of a function, and the real arguments that its placeholders stand for."""
    caught: list[Any] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        arguments = [compat.graph_argument(node) for node in gm.graph.nodes if node.op == "placeholder"]
        caught.append((gm, arguments, compat.tracing_fake_mode(), compat.detect_fake_mode(example_inputs)))
        return gm.forward

    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    torch._dynamo.reset()
    gm, arguments, tracing, detected = caught[0]
    assert tracing is not None
    assert detected in (None, tracing)
    return gm, arguments


def test_dynamo_graphs_are_copied_with_what_compilers_need() -> None:
    from torch.utils.checkpoint import checkpoint

    linear = nn.Linear(3, 3)
    gm, arguments = dynamo_graph(lambda x: checkpoint(linear, x, use_reentrant=False), torch.randn(2, 3))
    copied = compat.copy_graph_module(gm)
    assert copied.graph is not gm.graph
    assert [n.op for n in copied.graph.nodes] == [n.op for n in gm.graph.nodes]
    children = [(dict(gm.named_children())[name], child) for name, child in copied.named_children()]
    assert children
    assert all(old is not new and old.graph is not new.graph for old, new in children)
    for old, new in zip(gm.graph.nodes, copied.graph.nodes, strict=True):
        assert old.meta.keys() == new.meta.keys()
        assert getattr(old, "_dynamo_source", None) is getattr(new, "_dynamo_source", None)
    assert any(argument is linear.weight for argument in arguments)


def test_dynamo_collects_no_garbage_where_it_should_not() -> None:
    with mock.patch("gc.collect") as collect, compat.without_collection():
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert not collect.called
    with mock.patch("gc.collect") as collect:
        torch.compile(lambda x: x + 2, backend="eager")(torch.ones(1))
    assert collect.called


def test_compiled_code_in_a_dispatch_mode() -> None:
    class Seen(compat.TorchDispatchMode):
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if isinstance(func, torch._ops.HigherOrderOperator):
                with self:
                    return compat.run_higher_order(func, args, kwargs or {})
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    compiled(torch.ones(2))
    with compat.without_compilation(), Seen():
        compiled(torch.ones(2))
        assert "aten.add.Tensor" in seen
        with pytest.raises(RuntimeError, match=r"[Rr]ecompil"):
            compiled(torch.ones(2, dtype=torch.int64))
        del seen[:]
        torch.ops.higher_order.invoke_subgraph(lambda x: [x * 2], "double", torch.ones(2))
    assert seen[-1:] == ["aten.mul.Tensor"]


def test_wrappers_follow_what_changes_shapes_in_place() -> None:
    class Wrapper(Tensor):
        inner: Tensor

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            func(args[0].inner, *args[1:])
            return compat.return_and_correct_aliasing(func, args, kwargs or {}, args[0])

    wrapper = Tensor._make_wrapper_subclass(Wrapper, (1, 3))
    wrapper.inner = torch.ones(1, 3)
    assert wrapper.squeeze_(0) is wrapper
    assert wrapper.shape == wrapper.inner.shape == (3,)


def test_parameter_placeholders() -> None:
    gm, _ = dynamo_graph(nn.Linear(3, 3), torch.randn(2, 3))
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_before(first):
        node = compat.add_parameter_placeholder(gm.graph, "shard", like=first)
    assert node.op == "placeholder"
    assert node.meta["tensor_dict"] == {"_dynamo_static_input_type": "unguarded"}


def test_order_keeping_settings_exist() -> None:
    patches = compat.inductor_config_patches()
    assert patches["reorder_for_peak_memory"] is False
    assert patches["reorder_for_locality"] is False
    if compat.TORCH_VERSION >= (2, 15):
        assert patches["aten_distributed_optimizations.enable_simple_overlap"] is False
    import torch._inductor.config as config

    with config.patch(patches):
        assert config.reorder_for_peak_memory is False


def test_passes_pickle_as_their_identity() -> None:
    import pickle

    for make in (compat.graph_pass, compat.partitioner):
        identity: str | None = None  # not known yet when the pass is created
        made = make(lambda *_: None, lambda: identity)
        assert made.uuid() is None
        identity = "identity"
        assert made.uuid() == "identity"
        assert pickle.loads(pickle.dumps(made)) == "identity"


def test_aot_eager_compiles_forward_backward_and_inference() -> None:
    finished: list[fx.GraphModule] = []
    partitions: list[dict[str, Any]] = []

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        partitions.append(kwargs)
        assert any(compat.is_backward_node(n) for n in joint.graph.nodes)
        return compat.min_cut_partition(joint, inputs, **kwargs)

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        return compat.compile_with_aot_eager(gm, inputs, partition, finished.append)

    linear = nn.Linear(3, 2)
    compiled = torch.compile(linear, backend=backend)
    compiled(torch.ones(1, 3)).sum().backward()
    with torch.no_grad():
        compiled(torch.ones(1, 3))
    torch._dynamo.reset()
    assert len(finished) == 3
    assert partitions[0]["num_fwd_outputs"] == 1
    assert torch.equal(linear.weight.grad, torch.ones(2, 3))


@pytest.mark.parametrize(("distinct", "calls"), [((), 1), ((torch.ops.aten.sin,), 2)])
def test_equal_calls_stay_apart_in_a_partition(distinct: tuple[Any, ...], calls: int) -> None:
    finished: list[fx.GraphModule] = []

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        return compat.min_cut_partition(joint, inputs, distinct=distinct, **kwargs)

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        return compat.compile_with_aot_eager(gm, inputs, partition, finished.append)

    compiled = torch.compile(lambda x: (x.sin() + 1) * (x.sin() + 2), backend=backend)
    compiled(torch.ones(3, requires_grad=True)).sum().backward()
    torch._dynamo.reset()
    sines = [node for node in finished[0].graph.nodes if node.target is torch.ops.aten.sin.default]
    assert len(sines) == calls


@pytest.mark.usefixtures("fake_world")
def test_gather_is_traced_as_collectives_that_carry_marks() -> None:
    graphs: list[fx.Graph] = []

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        for node in gm.graph.nodes:
            if node.target in (torch.ops.mfsdp.gather, torch.ops.mfsdp.gather.default):
                node.meta["custom"] = {"mark": 7}
        return compat.compile_with_aot_eager(
            gm, inputs, compat.min_cut_partition, lambda finished: graphs.append(finished.graph)
        )

    def function(shard: Tensor, x: Tensor) -> Tensor:
        weight, bias = torch.ops.mfsdp.gather(shard, None, None, None, *exchange)
        return torch.nn.functional.linear(x, weight, bias)

    whole, ranks = Spec(16, torch.float32), Group("0", 4, 0)
    lane = Lane(Spec(4, torch.float32), whole, whole, use=(AllGather(ranks),), each=(ReduceScatter(ranks, "avg"),))
    exchange = Exchange(
        sizes=[4, 2, 4],
        ndims=[2, 1],
        offsets=[0, 8],
        lane_key=lane.key,
    )
    shard = torch.randn(4, requires_grad=True)
    torch.compile(function, backend=backend, fullgraph=True)(shard, torch.randn(3, 2)).sum().backward()
    torch._dynamo.reset()
    assert shard.grad is not None
    marks = {n.target: n.meta.get("custom") for graph in graphs for n in graph.nodes}
    for target in (compat.all_gather, compat.reduce_scatter, torch.ops.mfsdp.pack_gradients.default):
        assert marks[target] == {"mark": 7}
    assert kernels is not None and ops is not None  # they define the operators


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_where_an_entry_of_a_checkpoint_lies(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.arange(4.0), "step": 3}, checkpoint_id=tmp_path, no_dist=True)
    stored = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    for info in stored.values():
        assert info == compat.storage_info(info.relative_path, info.offset, info.length, None)
        with (tmp_path / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            assert file.read(2) == b"PK"  # a torch.save archive begins there
    assert {type(info) for info in stored.values()} == {compat.StorageInfo}


def test_tensors_have_values_in_the_middle_of_a_plan() -> None:
    @compat.on_values
    def total() -> int:
        return int(torch.arange(4).sum())

    with compat.fake_mode():
        assert total() == 6


def test_torch_knows_fully_sharded_modules() -> None:
    from torch.distributed._composable.replicate import _is_fully_sharded

    module = nn.Linear(2, 2)
    assert not _is_fully_sharded(module)
    compat.register_fully_sharded(module)
    assert _is_fully_sharded(module)


@pytest.mark.usefixtures("fake_world")
def test_torchs_functions_ask_modules_before_they_divide_them() -> None:
    from torch.distributed._composable.replicate import replicate
    from torch.distributed.fsdp import fully_shard

    for apply in (fully_shard, replicate):
        module = nn.Linear(2, 2)
        compat.refuse_other_sharding(module)
        with pytest.raises(ValueError, match="Use the sharded model itself"):
            apply(module)


def test_collectives_are_called_below_autograd() -> None:
    operator = torch.ops._c10d_functional.wait_tensor.default
    values = torch.ones(2, requires_grad=True)
    called = compat.called_below_autograd(operator)
    assert "Mul" not in operator(values * 2).grad_fn.name()
    assert "Mul" in called(values * 2).grad_fn.name()  # what it is given
    assert compat.called_below_autograd(torch.ops.aten.add.Tensor) is torch.ops.aten.add.Tensor


def test_destruction_is_announced() -> None:
    done: list[bool] = []
    with compat.fake_process_group(2):
        compat.before_destruction(lambda: done.append(dist.is_initialized()))
        assert not done
    assert done == [True]


@pytest.mark.usefixtures("fake_world")
def test_process_groups_are_known_by_name() -> None:
    assert compat.known_groups() == {dist.group.WORLD.group_name: [0, 1, 2, 3]}


@on_ranks(4)
def test_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"], mesh["tp"]
    both = compat.concatenate_meshes(dp, tp)
    assert (both.mesh_dim_names, both.mesh.tolist()) == (("dp", "tp"), [[0, 1], [2, 3]])
    with pytest.raises(RuntimeError):
        compat.concatenate_meshes(dp, init_device_mesh("cpu", (4,), mesh_dim_names=("all",)))
    place = tp.get_local_rank()
    assert compat.local_shape_and_offset((5, 3), tp, [Shard(0)]) == ((3 - place, 3), (3 * place, 0))
    made = distribute_tensor(torch.arange(6.0).view(2, 3), tp, [Shard(0)], src_data_rank=None)
    again = compat.dtensor_of(made.to_local(), made._spec)
    assert torch.equal(again.full_tensor(), torch.arange(6.0).view(2, 3))
    before = tp.get_group().group_name
    compat.renew_mesh(tp)
    assert tp.get_group().group_name != before
    assert dist.get_process_group_ranks(tp.get_group()) == [dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1]
    assert torch.equal(made.full_tensor(), torch.arange(6.0).view(2, 3))  # over the new group


@on_ranks(4)
def test_groups_of_ranks_that_have_made_different_numbers_of_groups() -> None:
    rank = dist.get_rank()
    if rank < 2:
        compat.new_group([0, 1])
    whole = compat.new_group([3, 2, 1, 0], timeout=timedelta(seconds=40))
    assert dist.get_process_group_ranks(whole) == [0, 1, 2, 3]
    again = compat.new_group_like(whole.group_name)
    assert again.group_name != whole.group_name
    assert compat.timeout_of(again) == timedelta(seconds=40)
    pair = compat.new_group_like(whole.group_name, [rank % 2, rank % 2 + 2])
    for group in (whole, again, pair):
        total = compat.wait_tensor(compat.all_reduce(torch.tensor(float(rank)), "sum", group.group_name))
        assert total == sum(dist.get_process_group_ranks(group))


@on_ranks(2)
def test_rows_go_to_other_ranks_and_their_gradients_come_back() -> None:
    rank = dist.get_rank()
    # Rank 0 keeps one row and sends two. Rank 1 sends three and keeps none.
    sent, received = ([1, 2], [3, 0])[rank], ([1, 3], [2, 0])[rank]
    x = torch.arange(3.0).add(10 * rank).unsqueeze(1).expand(3, 2).contiguous().requires_grad_()
    y = compat.all_to_all_autograd(x, received, sent, dist.group.WORLD.group_name)
    assert y[:, 0].tolist() == ([0.0, 10.0, 11.0, 12.0], [1.0, 2.0])[rank]
    (y * torch.arange(1.0, len(y) + 1).unsqueeze(1)).sum().backward()
    assert x.grad[:, 0].tolist() == ([1.0, 1.0, 2.0], [2.0, 3.0, 4.0])[rank]


def test_selective_checkpointing_does_not_see_what_is_outside() -> None:
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    saved = [torch.ops.aten.mul.Tensor]
    x = torch.ones(2, requires_grad=True)
    calls: list[Tensor] = []

    def region(x: Tensor) -> Tensor:
        with compat.outside_selective_checkpoint(), torch.no_grad():
            for factor in range(len(calls)):  # not in forward, but in recomputation
                calls.append(torch.ones(2) * factor)
        calls.append(x)
        return (x * 2).sin() * 3

    contexts = functools.partial(create_selective_checkpoint_contexts, saved)
    checkpoint(region, x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert len(calls) == 3
    torch.testing.assert_close(x.grad, torch.full((2,), 2.0).cos() * 6)


def test_private_torch_is_touched_in_compat_only() -> None:
    """Outside of ``runtime/compat/``, the package uses no ``torch._something``, except for what torch documents."""
    documented = {
        "torch._foreach_mul_",
        "torch._foreach_norm",
        "torch._foreach_zero_",
        "torch._dynamo",
        "torch._ops",
        "torch.__version__",
    }
    found = []
    for folder in ("mfsdp_compile", "passes", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.parent.name == "compat":
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                    found += [
                        f"{path.name}: {n}"
                        for n in names
                        if n.startswith("torch") and "._" in n and n not in documented
                    ]
                elif isinstance(node, ast.Attribute):
                    text = ast.unparse(node)
                    private = text.startswith("torch.") and "._" in text and not text.startswith("torch.ops")
                    if private and not any(text.startswith(d) for d in documented):
                        found.append(f"{path.name}: {text}")
    assert not found


def test_nothing_in_torch_is_patched() -> None:
    """Importing the package leaves torch's functions unchanged."""
    import sys

    program = (
        "import torch, torch.nn as nn, torch.distributed.tensor as dt\n"
        "names = [(nn.Module, '__call__'), (nn.Module, '_apply'), (torch.Tensor, 'backward'), (torch, 'compile'),\n"
        "         (dt.DTensor, 'full_tensor'), (torch.optim.Optimizer, 'step')]\n"
        "before = [getattr(owner, name) for owner, name in names]\n"
        "import mfsdp_compile\n"
        "assert before == [getattr(owner, name) for owner, name in names]\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=ROOT)
    assert mfsdp_compile.__version__


def test_guards_are_told_from_modules() -> None:
    class Asks(nn.Module):
        @property
        def asked(self) -> bool:
            return compat.called_by_guards()

        def forward(self) -> bool:
            return self.asked

    assert not Asks()()


def test_inductor_options_are_known() -> None:
    assert compat.unknown_inductor_options(["max_autotune", "triton.cudagraphs", "max_autotun", "triton.x"]) == [
        "max_autotun",
        "triton.x",
    ]


def test_write_items_say_where_rows_lie() -> None:
    item = compat.shard_write_item("weight", [3, 0], torch.zeros(2, 4), torch.Size([8, 4]))
    assert item.index.offset == torch.Size([3, 0])
    assert item.tensor_data is not None
    assert item.tensor_data.chunk.sizes == torch.Size([2, 4])
    assert item.tensor_data.size == torch.Size([8, 4])


def test_hooks_on_saved_tensors_are_taken_off_and_put_back() -> None:
    def pack(t: Tensor) -> Tensor:
        return t

    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda t: t, lambda t: t), hooks(pack, lambda t: t):
        with compat.without_hook(pack), compat.without_hook(pack):
            assert not _can_hook()  # the other one is active
        with torch.autograd.graph.saved_tensors_hooks(pack, pack), compat.without_hook(print):
            assert not _can_hook()
    assert _can_hook()


# -- plans ------------------------------------------------------------------------------------------------------------


def test_fake_tensors_are_told_from_others() -> None:
    with compat.fake_mode():
        fake = torch.empty(1 << 50)  # a petabyte
    assert compat.is_fake(fake)
    assert not compat.is_fake(torch.empty(1))


def test_fake_groups_are_told_from_others_and_leave_nothing() -> None:
    with compat.fake_process_group(16):
        assert dist.get_world_size() == 16
        assert not compat.is_real_group(dist.group.WORLD.group_name)
    assert not dist.is_initialized()


def test_groups_of_several_devices() -> None:
    """A process group with several devices works; the device of the model's parameters decides which is used.

    ``init_process_group()`` creates such groups where there are GPUs.
    """
    dist.init_process_group("cpu:fake,cuda:fake", rank=0, world_size=4, store=FakeStore())
    try:
        world = dist.group.WORLD
        assert compat.is_simulated(world)
        assert not compat.is_real_group(world.group_name)
        assert compat.timeout_of(world) == dist.default_pg_timeout
        assert compat.device_types() == ["cpu"]  # no GPU here
        with compat.fake_mode():  # torch would look for a driver if it believed in a GPU
            on_gpu = nn.ParameterList([torch.empty(4, 4, device="cuda")])
        with mock.patch("torch.cuda.is_available", return_value=True):
            assert compat.device_types() == ["cuda", "cpu"]
            assert [compat.device_type(world, wanted) for wanted in ("cpu", "cuda", None, "xpu")] == [
                "cpu",
                *["cuda"] * 3,
            ]
            model = fully_shard_model(nn.Linear(4, 4))
            assert model.module.weight.device_mesh.device_type == model.module.weight.to_local().device.type == "cpu"
            asked = mock.Mock(side_effect=InterruptedError)
            for module, device in ((on_gpu, None), (nn.Linear(4, 4, device="meta"), None), (nn.Linear(4, 4), "cuda")):
                with (
                    mock.patch("mfsdp_compile.runtime.plan.meshes.init_device_mesh", asked),
                    pytest.raises(InterruptedError),
                ):
                    fully_shard_model(module, device=device, init_model_with_meta_device=True)
            assert [call.args[0] for call in asked.call_args_list] == ["cuda"] * 3
    finally:
        dist.destroy_process_group()


def test_a_group_of_some_ranks_does_not_split_the_default_communicator() -> None:
    """With a device bound, torch would call ``ncclCommSplit``, which all ranks of the default group must call."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        world, device = dist.group.WORLD, torch.device("cuda:0")
        world.bound_device_id = device
        split = mock.Mock(side_effect=AssertionError("ranks outside of the group would have to take part"))
        with mock.patch.object(distributed_c10d, "_get_split_source", split):
            group = compat.new_group([0, 2])
            with pytest.raises(RuntimeError, match="MPI"):
                compat.new_group([0, 2], backend="mpi")
        assert not split.called
        assert group.size() == 2
        assert world.bound_device_id == group.bound_device_id == device
    finally:
        dist.destroy_process_group()


@dataclass
class _NcclOptions:
    """Stands for ``ProcessGroupNCCL.Options``."""

    is_high_priority_stream: bool = False
    config: Any = None
    split_from: Any = None


def test_a_group_like_another_one_has_its_nccl_options() -> None:
    class Nccl:
        Options = _NcclOptions

    options = _NcclOptions(True, SimpleNamespace(max_ctas=8), split_from="the default communicator")
    backends = {"cpu": SimpleNamespace(), "cuda": SimpleNamespace(options=options)}
    group: Any = SimpleNamespace(
        _device_types=[torch.device("cpu"), torch.device("cuda")], _get_backend=lambda device: backends[device.type]
    )
    given: list[Any] = []

    def create(*args: Any, backend_options: Any, **kwargs: Any) -> Any:
        given.append(backend_options)
        return distributed_c10d._new_process_group_helper(*args, **kwargs)

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        world = dist.group.WORLD
        with mock.patch("mfsdp_compile.runtime.compat.distributed._new_process_group_helper", create):
            compat.new_group_like(world.group_name)
            assert given[-1] is None, "NCCL does not run the group"
            with mock.patch.object(distributed_c10d, "ProcessGroupNCCL", Nccl, create=True):
                copied = compat.nccl_options(group)
                backends["cuda"] = SimpleNamespace(wrapped_pg=backends["cuda"])
                assert compat.nccl_options(group) == copied, "TORCH_DISTRIBUTED_DEBUG=DETAIL wraps backends"
            assert copied == replace(options, split_from=None)
            assert copied is not options
            with mock.patch("mfsdp_compile.runtime.compat.distributed.nccl_options", return_value=copied):
                compat.new_group_like(world.group_name, [0, 1])
        assert given[-1] is copied
    finally:
        dist.destroy_process_group()


@on_ranks(2)
def test_training_over_a_group_of_several_devices() -> None:
    group = dist.new_group(backend="cpu:gloo,cuda:gloo", timeout=timedelta(seconds=50))
    assert compat.timeout_of(group) == timedelta(seconds=50)
    assert not compat.is_simulated(group)
    with mock.patch("torch.cuda.is_available", return_value=True):
        assert compat.device_type(group) == "cpu"  # gloo has no reduce-scatter for GPUs
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    model = fully_shard_model(nn.Linear(4, 4), device_mesh=mesh)
    before = compat.collectives_started(group)
    model(torch.ones(2, 4)).sum().backward()
    assert compat.collectives_started(group) > before, "they are counted"
    assert torch.equal(model.module.weight.grad.full_tensor(), torch.full((4, 4), 2.0))
    model.reset()
    assert compat.device_types(model.sharded.group) == ["cpu"]


def test_sizes_have_numbers() -> None:
    found = []

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        found.extend(compat.concrete(v) for v in example_inputs if not isinstance(v, torch.Tensor))
        return gm.forward

    torch.compile(lambda x: x * x.shape[0], backend=backend, dynamic=True)(torch.ones(7))
    torch._dynamo.reset()
    assert found == [7]
    assert compat.concrete(3) == 3


def test_formulas_count_products() -> None:
    formula = compat.flop_formula(torch.ops.aten.mm.default)
    assert formula is not None
    assert formula(torch.ones(2, 3), torch.ones(3, 5), out_val=torch.ones(2, 5)) == 2 * 2 * 3 * 5
    assert compat.flop_formula(torch.ops.aten.add.Tensor) is None


def test_traces_end_with_the_partition() -> None:
    """torch offers what a plan needs: a decomposed joint graph, and a way to stop before anything is compiled."""

    class Enough(BaseException):
        pass

    seen = []

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        seen.append([str(node.target) for node in joint.graph.nodes])
        raise Enough

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        return compat.trace_with_aot(gm, example_inputs, partition, decomposed=True)

    with pytest.raises(Enough):
        torch.compile(torch.nn.functional.silu, backend=backend)(torch.ones(3, requires_grad=True))
    torch._dynamo.reset()
    assert any("sigmoid" in target or "exp" in target for target in seen[0])
    assert not any("silu" in target for target in seen[0])


def test_joint_passes_replace_random_operators() -> None:
    seen: list[str] = []

    def partition(joint: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        seen.extend(str(node.target) for node in compat.inductor_joint_passes(joint).graph.nodes)
        return compat.min_cut_partition(joint, inputs, **kwargs)

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        return compat.trace_with_aot(gm, example_inputs, partition, decomposed=True)

    torch.compile(torch.nn.functional.dropout, backend=backend)(torch.ones(3, requires_grad=True))
    torch._dynamo.reset()
    assert any("inductor_random" in target for target in seen)


def test_what_a_backend_raised_is_found_again() -> None:
    def backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(compat.BackendCompilerFailed) as caught:
        torch.compile(lambda x: x + 1, backend=backend)(torch.ones(1))
    torch._dynamo.reset()
    assert isinstance(caught.value.inner_exception, KeyError)


def test_what_a_backend_was_called_with_is_known_before_anything_is_traced() -> None:
    def backend(gm: fx.GraphModule, inputs: Any, *, mode: Any = None, options: Any = None) -> Any:
        return gm

    def check(options: Any, mode: Any) -> None:
        seen.append((options, mode))
        if mode == "wrong":
            raise ValueError("no such mode")

    seen: list[Any] = []
    begin = torch.compiler.disable(lambda _: compat.check_before_tracing(backend, check))
    compat.on_compilation(begin, lambda _: None)
    try:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
        assert not seen
        torch.compile(lambda x: x + 2, backend=backend, options={"a": 1})(torch.ones(1))
        assert seen == [({"a": 1}, None)]
        with pytest.raises(compat.BackendCompilerFailed, match="no such mode"):
            torch.compile(lambda x: torch._dynamo.graph_break(), backend=backend, mode="wrong")(torch.ones(1))
        assert seen[1:] == [(None, "wrong")]
    finally:
        torch._dynamo.reset()


def test_what_cannot_be_traced_says_where() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(compat.TorchDynamoException) as caught:
        torch.compile(broken, backend="eager", fullgraph=True)(torch.ones(1))
    torch._dynamo.reset()
    assert compat.where_not_traceable(caught.value)[-1].name == "broken"
    assert not compat.where_not_traceable(ValueError())


@on_ranks(2, timeout=60)
def test_a_wait_can_be_ended_from_another_thread() -> None:
    """Another thread can end the wait in one process group.

    Other groups, the store and connections to it are not affected.
    """
    waiting = dist.new_group(timeout=timedelta(minutes=30))
    other = dist.new_group(timeout=timedelta(seconds=30))
    for group in (waiting, other):
        dist.barrier(group)
    files = len(os.listdir("/dev/fd"))
    if dist.get_rank() == 1:
        ends = threading.Timer(0.5, compat.break_connections, [waiting])
        ends.start()
    if dist.get_rank() == 0:
        compat.default_store().wait(["ended"], timedelta(seconds=30))
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        compat.wait_tensor(compat.all_reduce(torch.ones(1), "sum", waiting.group_name))
    if dist.get_rank() == 1:
        ends.join()
        compat.default_store().set("ended", "")
    dist.barrier(other)
    assert len(os.listdir("/dev/fd")) <= files + 1  # one connection to the store, until it is garbage-collected


def test_communicators_are_aborted_at_once() -> None:
    """NCCL ends an abort when kernels of other communicators have ended: the next abort must not wait for the first."""
    all_begun = threading.Barrier(3)

    class Backend:
        ended = False

        def abort(self) -> None:
            all_begun.wait(10)
            self.ended = True

    class Late(Backend):
        def abort(self) -> None:
            super().abort()
            raise RuntimeError("Future for ProcessGroup abort timed out")

    backends = [Backend(), Late(), Backend()]
    compat.abort(backends)
    assert all(backend.ended for backend in backends)


@on_ranks(2, timeout=60)
def test_a_group_is_connected_again() -> None:
    """A group keeps its identity, and can be closed and connected again four times."""
    group = dist.new_group(timeout=timedelta(seconds=30))
    name, description = group.group_name, group.group_desc
    mesh = DeviceMesh.from_group(group, "cpu")
    for number in range(5):
        dist.barrier(group)
        compat.break_connections(group)
        assert compat.broken_groups() == [group]
        with pytest.raises(RuntimeError) as closed:
            dist.barrier(group)
        assert compat.is_of_gloo(closed.value)
        assert not compat.is_timeout(closed.value)
        assert compat.reconnect(group) == (number < 4)
        assert (group.group_name, group.group_desc, compat.timeout_of(group)) == (
            name,
            description,
            timedelta(seconds=30),
        )
        if number < 4:
            assert compat.collectives_started(group) == 0
            total = compat.wait_tensor(compat.all_reduce(torch.ones(1), "sum", mesh.get_group().group_name))
            assert total.item() == 2
            assert compat.collectives_started(group) == 1
            assert not compat.broken_groups()
    assert not compat.is_own(group)
    assert compat.is_own(compat.new_group(range(2)))
    dist.destroy_process_group(group)


def test_code_is_compiled_beyond_the_limit() -> None:
    """Sizes and a number on a module that vary become symbols. The second limit holds, and settings are restored."""
    told: list[Any] = []
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        compat.compile_beyond_limit(told.append)
        graphs.append(gm)
        return gm

    class Counts(nn.Module):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x * self.count

    module, torch_default = Counts(), torch._dynamo.config.automatic_dynamic_shapes
    call: Any = torch.compile(module, backend=backend, dynamic=False, fullgraph=True)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=2):
        for size in range(2, 12):
            assert torch.equal(call(torch.ones(size)), torch.full((size,), size - 1.0))
        assert torch._dynamo.config.recompile_limit == 2
        assert len(graphs) <= 5
        assert {(each.setting, each.limit) for each in told} == {("recompile_limit", 2)}
        assert told[0].code.startswith("forward (")
        assert told[0].shapes == ((4,),)
        assert "expected" in told[0].reason
    assert torch._dynamo.config.automatic_dynamic_shapes == torch_default
    told.clear()
    torch._dynamo.reset()
    call = torch.compile(lambda x, name: x + len(name), backend=backend)
    with torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=2):
        for name in ("a", "bb", "ccc"):
            call(torch.ones(2), name)
    torch._dynamo.reset()
    assert [each.setting for each in told] == ["recompile_limit", "accumulated_recompile_limit"]
    compat.compile_beyond_limit(told.append)  # outside of a compilation


@on_ranks(2, timeout=60)
def test_where_a_thread_waits() -> None:
    group = dist.new_group()
    found: list[Any] = []
    ident = threading.get_ident()
    if dist.get_rank() == 1:
        looks = threading.Timer(0.5, lambda: found.append(compat.waits_in(ident)))
        looks.start()
        dist.barrier(group)
        assert found == [group.group_name]
    else:
        time.sleep(1)
        dist.barrier(group)
    assert compat.waits_in(threading.get_ident()) is None


def test_frames_of_a_thread_that_runs() -> None:
    """Garbage collections, which let that thread end its frames, do not start while its frames are read."""
    collected: list[str] = []
    me, ended, before = threading.get_ident(), threading.Event(), gc.get_threshold()
    enabled = gc.isenabled()

    def note(phase: str, _: Any) -> None:
        if threading.get_ident() == me:
            collected.append(phase)

    def wait(depth: int) -> None:
        wait(depth - 1) if depth else ended.wait(60)

    thread = threading.Thread(target=wait, args=(50,))
    thread.start()
    time.sleep(0.1)
    gc.callbacks.append(note)
    try:
        gc.set_threshold(1)
        found = compat.frames_of(thread.ident or 0)
        during = list(collected)
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
        ended.set()
        thread.join()
    assert len(found) > 50
    if sys.version_info < (3, 12):
        # Some may start before and after, never fifty.
        assert len(during) < 20, during
    assert gc.isenabled() == enabled


def test_addresses_are_written_as_the_system_does() -> None:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with contextlib.suppress(OSError), socket.socket(family) as listening:  # for a machine without IPv6
            listening.bind((host, 0))
            address = gloo._as_gloo_tells(family, listening.getsockname())
            assert address is not None
            assert struct.unpack("=H", address[:2]) == (family,)
            assert struct.unpack("!H", address[2:4]) == (listening.getsockname()[1],)
    assert gloo._as_gloo_tells(socket.AF_UNIX, "") is None


@on_ranks(1, timeout=60)
def test_connections_to_the_store() -> None:
    store = compat.default_store()
    another = compat.another_connection(store)
    done = threading.Timer(0.5, another.set, ["from another", "x"])
    done.start()
    store.wait(["from another"], timedelta(seconds=20))  # locks the store meanwhile
    assert store.get("from another") == b"x"


def test_a_store_that_has_gone_is_found_at_once() -> None:
    """A connection to a store that is gone fails at once.

    torch would try for five minutes, during which a program that ends would wait for its watchdog.
    """
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    store = dist.PrefixStore("outer", dist.PrefixStore("inner", client))
    assert compat.another_connection(store).check(["x"]) is False
    del server
    begun = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        compat.another_connection(store)
    assert time.monotonic() - begun < 2 * compat.CONNECT_TIMEOUT


def test_generated_code_is_known() -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    assert compat.is_generated(f"{cache_dir()}/ab/cab.py")
    assert not compat.is_generated(__file__)


@pytest.mark.long
@pytest.mark.slow
def test_inductor_writes_a_batched_matmul_into_a_bucket() -> None:
    """Its layout is fixed, other than a matmul's. Its other readers find it in the bucket."""
    from torch._inductor.utils import run_and_get_code

    from mfsdp_compile.backend.lowerings import register_lowerings

    def pack(x: torch.Tensor, y: torch.Tensor, vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = torch.bmm(x, y)
        packed = torch.ops.mfsdp.pack_gradients([product, vector * 2], [8, 179], 190, product.dtype)
        return packed, product.sin(), product.transpose(1, 2) @ product

    register_lowerings()
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(size, generator=generator, dtype=torch.float64) for size in ((4, 6, 5), (4, 5, 7), (9,))]
    torch._dynamo.reset()
    results, (code,) = run_and_get_code(torch.compile(pack), *given)
    for result, wanted in zip(results, pack(*given), strict=True):
        torch.testing.assert_close(result, wanted)
    assert re.search(
        r"(buf\d+) = reinterpret_tensor\(buf\d+, \(4, 6, 7\), [^\n]* 8\)  # alias[\s\S]*bmm\(.*out=\1\)", code
    )


def test_matrices_in_float8_are_multiplied_with_scales_of_rows_and_columns() -> None:
    assert compat.multiplies_by_rows(torch.device("cuda"))
    assert compat.multiplies_by_rows(torch.device("cpu")) == (compat.TORCH_VERSION >= (2, 13))
    if not compat.multiplies_by_rows(torch.device("cpu")):
        return
    a, b = torch.full((16, 16), 2.0).to(torch.float8_e4m3fn), torch.full((16, 16), 0.5).to(torch.float8_e4m3fn)
    rows, columns = torch.arange(16.0).view(16, 1), torch.arange(16.0).view(1, 16)
    product = compat.scaled_mm(a, b.t(), rows, columns, out_dtype=torch.bfloat16)
    assert torch.equal(product.float(), (16 * rows * columns).bfloat16().float())


def test_scales_of_torchao_are_quotients_that_are_rounded_once() -> None:
    """This is its formula, in float64. A reciprocal in float32, or a quotient in it, is another number for some."""
    largest = torch.rand(1000, generator=torch.Generator().manual_seed(0))
    expected = torch.tensor([448.0 / value for value in largest.tolist()])
    assert torch.equal(compat.torchao.scales_of(largest), expected)
    assert torch.equal(compat.torchao.scales_of(torch.zeros(1)), torch.tensor([448.0 / 1e-12]))


def test_composite_operators() -> None:
    assert compat.is_composite(torch.ops.aten.expand_as.default)
    assert not compat.is_composite(torch.ops.aten.add.Tensor)
    assert torch.equal(torch.ops.aten.expand_as.default.decompose(torch.ones(1), torch.ones(3)), torch.ones(3))


def test_sizes_that_are_multiples() -> None:
    assert compat.is_multiple(32, 16)
    assert not compat.is_multiple(24, 16)
    known = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        (size,) = [value for value in inputs if not isinstance(value, Tensor)]
        known.append((compat.is_multiple(size * 16, 16), compat.is_multiple(size, 16)))
        return gm.forward

    torch.compile(lambda x: x.sum(), backend=backend, dynamic=True)(torch.ones(32))
    assert known == [(True, False)]
