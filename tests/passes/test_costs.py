"""The cost model: times of kernels on graphs made by hand, and of collectives in closed form."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from outlines import COSTS, MACHINE, bucket, context
from torch import fx

from mfsdp_compile.passes.guests.solver.costs import CostModel, Ring, collective_seconds, tile_efficiency
from mfsdp_compile.passes.guests.solver.flow import Category, flow_of
from mfsdp_compile.passes.kernels import Kernel, kernels, value_bytes
from mfsdp_compile.runtime.geometry.groups import Group
from mfsdp_compile.runtime.lanes.plain import AllReduce, Cast, ReduceScatter, Scale

aten = torch.ops.aten
US = 1e-6


class Made:
    """A graph whose nodes have values on the meta device."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        node.meta["val"] = torch.empty(*shape, dtype=dtype, device="meta")
        return node

    def __call__(self, target: Any, *args: Any, val: Any = None) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["val"] = val if val is not None else target(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node

    def kernels(self, *outputs: fx.Node, fused: bool = True) -> list[Kernel]:
        self.graph.output(outputs)
        return kernels(self.graph, fused)


def name(node: fx.Node) -> str:
    return node.target._opname  # type: ignore[union-attr]


def names(found: list[Kernel]) -> list[list[str]]:
    return [[name(node) for node in kernel.nodes] for kernel in found]


# -- the roofline -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "inner", "dtype", "seconds"),
    [
        (1000, 1000, torch.float32, 2e9 / 1e12),  # bound by operations: the bytes would take 0.12 ms
        (1000, 1000, torch.bfloat16, 2e9 / 2e12),
        (1000, 1, torch.float32, (2 * 1000 + 1000 * 1000) * 4 / 1e11),  # bound by bytes: operations take 2 us
        (1000, 1, torch.bfloat16, (2 * 1000 + 1000 * 1000) * 2 / 1e11),
    ],
)
def test_matrix_products_take_the_longer_of_operations_and_bytes(
    rows: int, inner: int, dtype: torch.dtype, seconds: float
) -> None:
    made = Made()
    out = made(aten.mm.default, made.input(rows, inner, dtype=dtype), made.input(inner, rows, dtype=dtype))
    (kernel,) = made.kernels(out)
    assert kernel.flops == 2 * rows * rows * inner
    assert COSTS.kernel(kernel) == pytest.approx(seconds)
    slow_start = CostModel(replace(MACHINE, kernel_seconds=7e-6), fused=True)
    assert slow_start.kernel(kernel) == pytest.approx(seconds + 7e-6)


def test_efficiencies_are_of_what_runs() -> None:
    half = CostModel(replace(MACHINE, matmul_efficiency=0.5, memory_efficiency=0.25), fused=True)
    made = Made()
    x = made.input(1000, 1000)
    product, shifted = made.kernels(made(aten.add.Tensor, made(aten.mm.default, x, x), 1.0))
    assert half.kernel(product) == pytest.approx(2 * COSTS.kernel(product))
    assert half.kernel(shifted) == pytest.approx(4 * COSTS.kernel(shifted))


@pytest.mark.parametrize(
    ("batch", "rows", "columns", "multiprocessors", "efficiency"),
    [
        (1, 8192, 4096, 0, 1.0),  # no multiprocessors: all shapes are alike
        (1, 1024, 1024, 32, 1.0),  # 32 tiles of 256 x 128 are one wave
        (1, 1024, 1152, 32, 144 / 160),  # 144 tiles of 64 x 128 are five waves; two waves of 36 large ones fit worse
        (32, 1024, 1024, 32, 1.0),  # products in a batch fill waves together
        (1, 16, 4096, 132, 16 / 64),  # most rows of the smallest tile do not exist; the inner dimension is split
        (1, 1024, 1000, 32, 1000 / 1024),
    ],
)
def test_waves_of_tiles(batch: int, rows: int, columns: int, multiprocessors: int, efficiency: float) -> None:
    assert tile_efficiency(batch, rows, columns, multiprocessors) == pytest.approx(efficiency)


def test_products_know_their_shape_and_the_clock() -> None:
    made = Made()
    x, y = made.input(4, 16, 64, dtype=torch.bfloat16), made.input(4, 64, 4096, dtype=torch.bfloat16)
    (kernel,) = made.kernels(made(aten.bmm.default, x, y))
    assert kernel.product == (4, 16, 4096)
    fast = replace(MACHINE, memory_bandwidth=1e15)  # bound by operations
    alone = CostModel(fast, fused=True).kernel(kernel)
    assert CostModel(replace(fast, multiprocessors=132), fused=True).kernel(kernel) == pytest.approx(4 * alone)
    assert CostModel(replace(fast, sustained_clock=0.8), fused=True).kernel(kernel) == pytest.approx(alone / 0.8)
    slow = CostModel(replace(fast, sustained_clock=0.8), fused=True)
    assert slow.moved(1000) == CostModel(fast, fused=True).moved(1000)
    assert slow.compute(1e9, 0, torch.float32, attention=True) == pytest.approx(2e-3 / 0.8)


def attention(causal: bool, backward: bool) -> Kernel:
    made = Made()
    query, key, value, out = (made.input(2, 8, length, 64) for length in (128, 256, 256, 128))
    if not backward:
        target, args = aten._scaled_dot_product_flash_attention_for_cpu.default, (query, key, value, 0.0, causal)
        return made.kernels(made(target, *args, val=(out.meta["val"], torch.empty(2, 8, 128, device="meta"))))[0]
    sums = made.input(2, 8, 128)
    target = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    gradients = tuple(node.meta["val"] for node in (query, key, value))
    return made.kernels(made(target, out, query, key, value, out, sums, 0.0, causal, val=gradients))[0]


def test_attention_skips_what_is_masked_and_computes_again_in_backward() -> None:
    full = attention(causal=False, backward=False)
    assert full.attention
    assert full.flops == 2 * (2 * 2 * 8 * 128 * 256 * 64)  # two matrix products
    assert attention(causal=True, backward=False).flops == full.flops / 2
    assert attention(causal=False, backward=True).flops == 2.5 * full.flops
    assert attention(causal=True, backward=True).flops == 2.5 * full.flops / 2
    assert COSTS.compute(1e9, 0, torch.float32, attention=True) == pytest.approx(
        2 * COSTS.compute(1e9, 0, torch.float32, attention=False)
    )


# -- kernels ----------------------------------------------------------------------------------------------------------

SIZE = 100 * 100 * 4


def test_a_chain_is_one_kernel_that_reads_and_writes_once() -> None:
    made = Made()
    x, bias = made.input(100, 100), made.input(100)
    out = made(aten.exp.default, made(aten.mul.Tensor, made(aten.add.Tensor, x, bias), x))
    found = made.kernels(out)
    assert names(found) == [["add", "mul", "exp"]]
    assert found[0].bytes == SIZE + 100 * 4 + SIZE  # x counts once, though two of them read it
    assert [name(node) for node in found[0].inner] == ["add", "mul"]
    assert COSTS.kernel(found[0]) == pytest.approx((2 * SIZE + 400) / 1e11)


def test_without_fusion_every_operator_is_a_kernel() -> None:
    made = Made()
    x = made.input(100, 100)
    found = made.kernels(made(aten.exp.default, made(aten.relu.default, x)), fused=False)
    assert names(found) == [["relu"], ["exp"]]
    assert [kernel.bytes for kernel in found] == [2 * SIZE, 2 * SIZE]


@pytest.mark.parametrize("flat", [[10000], [50, 200]])
def test_views_inside_a_kernel_cost_nothing(flat: list[int]) -> None:
    made = Made()
    viewed = made(aten.view.default, made(aten.relu.default, made.input(100, 100)), flat)
    found = made.kernels(made(aten.exp.default, viewed))
    assert names(found) == [["relu", "exp"]]
    assert found[0].bytes == 2 * SIZE
    assert [name(node) for node in found[0].inner] == ["relu"]


def test_statistics_are_in_the_kernel_of_what_reads_them() -> None:
    """Statistics of a normalization are fused with what reads them.

    Inductor splits it into several values of one operator.
    """
    made = Made()
    x = made.input(100, 100)
    both = made(aten.var_mean.correction, made(aten.relu.default, x), [1], val=(empty(100, 1), empty(100, 1)))
    mean = made(operator.getitem, both, 1)
    relu = both.args[0]
    found = made.kernels(made(aten.sub.Tensor, relu, mean))
    assert names(found) == [["relu", "var_mean", "sub"]]
    assert found[0].bytes == 2 * SIZE


def test_sums_of_rows_are_not_in_the_kernel_of_sums_within_rows() -> None:
    """Sums over rows, as in a bias gradient, are not fused with sums within rows, as in the backward of a norm.

    They need another loop.
    """
    made = Made()
    x = made.input(100, 100)
    centered = made(aten.sub.Tensor, x, made(aten.mean.dim, x, [1], True))
    bias, total = made(aten.sum.dim_IntList, centered, [0]), made(aten.sum.default, centered)
    assert names(made.kernels(centered, bias, total)) == [["mean", "sub", "sum"], ["sum"]]


def test_constants_are_computed_wherever_they_are_needed() -> None:
    """Constants are computed wherever they are needed, and stored only if something reads them that cannot be fused."""
    made = Made()
    x, w = made.input(100, 100), made.input(100, 100)
    zeros, ones = (made(aten.full.default, [100, 100], value, val=empty(100, 100)) for value in (0.0, 1.0))
    product = made(aten.mm.default, made(aten.maximum.default, x, zeros), w)
    last = made(aten.mm.default, made(aten.maximum.default, product, zeros), ones)
    found = made.kernels(last)
    assert names(found) == [["full"], ["maximum"], ["mm"], ["maximum"], ["mm"]]
    assert [kernel.bytes for kernel in found] == [SIZE, 2 * SIZE, 3 * SIZE, 2 * SIZE, 3 * SIZE]
    stored = [s.bytes for s in flow_of(made.graph, context([bucket("a")]), CostModel(MACHINE, fused=True)).storages]
    assert stored == [SIZE] * 5  # six values, one of which is never stored


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, device="meta")


def test_two_views_of_a_value_are_read_once() -> None:
    made = Made()
    x, w = made.input(100, 100), made.input(100, 100)
    product = made(aten.mm.default, x, w)
    one, other = (made(aten.view.default, product, shape) for shape in ([10000], [10000]))
    found = made.kernels(made(aten.mul.Tensor, made(aten.exp.default, one), other))
    assert found[1].bytes == 2 * SIZE


def test_matrix_products_part_kernels_and_what_both_read_is_written() -> None:
    made = Made()
    x, w = made.input(100, 100), made.input(100, 100)
    relu = made(aten.relu.default, x)
    product = made(aten.mm.default, made(aten.exp.default, relu), w)
    again = made(aten.add.Tensor, product, relu)  # after the product, so no kernel before it can include it
    found = made.kernels(again)
    assert names(found) == [["relu", "exp"], ["mm"], ["add"]]
    assert [kernel.bytes for kernel in found] == [3 * SIZE, 3 * SIZE, 3 * SIZE]
    assert found[0].inner == ()
    assert [kernel.flops > 0 for kernel in found] == [False, True, False]
    assert [kernel.place for kernel in found] == sorted(kernel.place for kernel in found)


def test_a_kernel_runs_before_what_reads_it() -> None:
    """A kernel runs before what reads it, even if operators that joined it stand behind the reader in the graph."""
    made = Made()
    x, w = made.input(100, 100), made.input(100, 100)
    relu = made(aten.relu.default, x)
    product = made(aten.mm.default, relu, w)
    late = made(aten.exp.default, relu)
    found = made.kernels(product, late)
    assert names(found) == [["relu", "exp"], ["mm"]]


def test_masks_of_dropout_are_drawn_where_they_are_used() -> None:
    """Dropout masks are drawn where they are used.

    Inductor draws the seeds of all dropouts at once, but not the masks.
    """
    from torch._inductor import inductor_prims as prims

    made = Made()
    x, w = made.input(100, 100), made.input(100, 100)
    seeds = made(prims.seeds, 2, "cpu", val=torch.empty(2, dtype=torch.int64, device="meta"))
    for index in (0, 1):
        seed = made(prims.lookup_seed, seeds, index, val=torch.empty((), device="meta"))
        drawn = made(prims.random, [100, 100], seed, "rand", val=empty(100, 100))
        x = made(aten.mm.default, made(aten.mul.Tensor, made(aten.gt.Scalar, drawn, 0.1), x), w)
    mask = ["inductor_lookup_seed", "inductor_random", "gt"]
    assert names(made.kernels(x)) == [["inductor_seeds"], [*mask, "mul"], ["mm"], mask, ["mul"], ["mm"]]


def test_what_is_expanded_counts_once_and_views_are_no_kernels() -> None:
    made = Made()
    row = made.input(1, 100)
    wide = made(aten.expand.default, row, [100, 100])
    assert value_bytes(wide) == 400
    found = made.kernels(made(aten.view.default, made.input(100, 100), [10000]), wide)
    assert found == []


@pytest.mark.parametrize(
    ("operator", "arguments", "out", "kind", "payload"),
    [
        ("all_reduce", ("sum", "tp"), 100, "all_reduce", 400),
        ("all_gather_into_tensor", (4, "tp"), 400, "all_gather", 1600),
        ("reduce_scatter_tensor", ("sum", 4, "tp"), 25, "reduce_scatter", 400),
        ("all_to_all_single", ([25] * 4, [25] * 4, "tp"), 100, "all_to_all", 400),
    ],
)
def test_the_models_own_collectives(
    operator: str, arguments: tuple[Any, ...], out: int, kind: str, payload: int
) -> None:
    """The model's own collectives are timed among its kernels, because it waits for them.

    Nothing is fused across them.
    """
    made = Made()
    c10d = torch.ops._c10d_functional
    before = made(aten.exp.default, made.input(100))
    started = made(getattr(c10d, operator).default, before, *arguments, val=empty(out))
    after = made(aten.exp.default, made(c10d.wait_tensor.default, started, val=empty(out)))
    found = made.kernels(after)
    assert names(found) == [["exp"], [operator], ["exp"]]
    assert found[1].collective == (kind, payload, "tp")
    costs = replace(COSTS, groups={"tp": Ring(4)})
    assert costs.kernel(found[1]) == collective_seconds(kind, payload, Ring(4), MACHINE)
    assert costs.kernel(found[0]) == COSTS.kernel(found[0])


def test_rings_of_ranks() -> None:
    assert Ring.of([4, 5, 6, 7]) == Ring(4, 1)
    assert Ring.of([1, 9, 17]) == Ring(3, 8)
    assert Ring.of([3]) == Ring(1, 1)


# -- collectives ------------------------------------------------------------------------------------------------------

MB = 10**6


@pytest.mark.parametrize(
    ("kind", "ring", "seconds"),
    [
        ("all_gather", Ring(1), 2 * MB / 1e11),  # a copy, which reads and writes
        ("all_reduce", Ring(1), 2 * MB / 1e11),
        ("all_gather", Ring(2), 10 * US + 1 * US + MB / 2 / 100e9),
        ("reduce_scatter", Ring(4), 10 * US + 3 * US + MB * 3 / 4 / 100e9),
        # Two nodes: six steps inside a node, one between nodes, and four network cards.
        ("all_gather", Ring(8), 10 * US + (6 * 1 + 1 * 20) * US + MB * 7 / 8 / 40e9),
        # Not a multiple of the node size.
        ("all_gather", Ring(6), 10 * US + (4 * 1 + 1 * 20) * US + MB * 5 / 6 / 40e9),
        # Outer groups of HSDP: one rank in each node, two ranks in each node, all ranks in one node.
        ("all_gather", Ring(4, stride=4), 10 * US + 3 * 20 * US + MB * 3 / 4 / 10e9),
        ("all_gather", Ring(4, stride=8), 10 * US + 3 * 20 * US + MB * 3 / 4 / 10e9),
        ("all_gather", Ring(4, stride=2), 10 * US + (2 * 1 + 1 * 20) * US + MB * 3 / 4 / 20e9),
        ("all_gather", Ring(2, stride=2), 10 * US + 1 * US + MB / 2 / 100e9),
        # All-reduce: twice the data. Inside a node, a ring and a tree take equally long.
        ("all_reduce", Ring(4), 10 * US + 2 * 3 * US + 2 * MB * 3 / 4 / 100e9),
        ("all_reduce", Ring(8), 10 * US + 2 * (3 * 1 + 1 * 20) * US + 2 * MB * 7 / 8 / 40e9),
        # Over 64 nodes a ring would pass 2 * 63 links, a tree passes 2 * 6.
        ("all_reduce", Ring(64, stride=4), 10 * US + 2 * 6 * 20 * US + 2 * MB * 63 / 64 / 10e9),
        ("all_gather", Ring(64, stride=4), 10 * US + 63 * 20 * US + MB * 63 / 64 / 10e9),
    ],
)
def test_closed_forms(kind: str, ring: Ring, seconds: float) -> None:
    assert collective_seconds(kind, MB, ring, MACHINE) == pytest.approx(seconds, rel=1e-12)


def test_an_all_reduce_takes_the_faster_of_ring_and_tree() -> None:
    far = replace(MACHINE, ranks_per_node=1, inter_node=replace(MACHINE.inter_node, latency=1e-3))
    for nodes, steps in ((2, 1), (3, 1.585), (4, 2), (1024, 10)):
        found = collective_seconds("all_reduce", 0, Ring(nodes), far)
        assert found == pytest.approx(10 * US + 2 * steps * 1e-3, rel=1e-3)
        assert found <= 10 * US + 2 * (nodes - 1) * 1e-3 + 1e-12


@given(
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    st.integers(0, 10**10),
    st.integers(0, 10**10),
    st.integers(1, 5000),
    st.sampled_from([1, 2, 3, 4, 8, 64]),
)
def test_more_bytes_never_take_less_time(kind: str, size: int, more: int, ranks: int, stride: int) -> None:
    ring = Ring(ranks, stride)
    one, other = (collective_seconds(kind, payload, ring, MACHINE) for payload in (size, size + more))
    assert 0 <= one <= other
    local = ring.in_node(MACHINE.ranks_per_node)
    assert 1 <= local <= min(ranks, MACHINE.ranks_per_node)


# -- buckets ----------------------------------------------------------------------------------------------------------

HSDP: dict[str, Any] = {
    "each": (ReduceScatter(Group("inner", 4, 0), "avg"), AllReduce(Group("outer", 8, 0, 4), "avg")),
}


def test_the_second_stage_reduces_what_the_first_has_scattered() -> None:
    info = bucket("a", MB, **HSDP)
    assert COSTS.reduction(info, 0) == collective_seconds("reduce_scatter", 4 * MB, Ring(4), MACHINE)
    assert COSTS.reduction(info, 1) == collective_seconds("all_reduce", MB, Ring(8, 4), MACHINE)
    assert COSTS.gather(info) == collective_seconds("all_gather", 4 * MB, Ring(4), MACHINE)
    whole = bucket("a", MB, use=())
    assert COSTS.gather(whole) == 0.0


REDUCED, WIDENED = ReduceScatter(Group("reductions", 4, 0), "avg"), Cast(torch.float32)


@pytest.mark.parametrize(
    ("changes", "bytes_per_element"),
    [
        ({}, 0),
        ({"each": (REDUCED, Scale(0.25))}, 4 + 4),
        ({"comm_dtype": torch.bfloat16, "each": (REDUCED, WIDENED)}, 2 + 4),
        # one kernel where kernels are fused
        ({"comm_dtype": torch.bfloat16, "each": (REDUCED, WIDENED, Scale(0.25))}, 2 + 4),
        ({"comm_dtype": torch.float16, "pack": (Scale(0.25),), "each": (REDUCED, WIDENED)}, 2 + 4),
    ],
)
def test_reduced_gradients_are_cast_and_scaled(changes: dict[str, Any], bytes_per_element: int) -> None:
    info = bucket("a", MB, **changes)
    assert COSTS.finish(info) == pytest.approx(MB / 4 * bytes_per_element / 1e11)


def test_casts_are_of_shards() -> None:
    assert COSTS.cast(bucket("a", MB)) == 0.0
    info = bucket("a", MB, dtype=torch.bfloat16)
    assert COSTS.cast(info) == pytest.approx(MB / 4 * 6 / 1e11)


# -- lifetimes of storages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [(True, True, True), (False, True, True), (False, False, True)])
def test_values_of_one_operator_have_lives_of_their_own(mask: tuple[bool, ...]) -> None:
    """The values of one operator have separate lives, also in a backward that computes no gradient for its input."""
    made = Made()
    x, mean, weight = made.input(16, 40), made.input(16, 1), made.input(40)
    sizes = ((16, 40), (40,), (40,))
    values = tuple(empty(*size) if wanted else None for size, wanted in zip(sizes, mask, strict=True))
    target = aten.native_layer_norm_backward.default
    gradients = made(target, x, x, [40], mean, mean, weight, weight, list(mask), val=values)
    last = made(operator.getitem, gradients, 2, val=values[2])
    one = made(aten.relu.default, last)
    two = made(aten.exp.default, one)
    made.graph.output((two,))
    flow = flow_of(made.graph, context([bucket("a")]), CostModel(MACHINE, fused=False))
    place = {node: float(i) for i, node in enumerate(made.graph.nodes)}
    lives = {(s.bytes, s.begin, s.end) for s in flow.storages}
    assert (160, place[gradients], place[one]) in lives  # the last value lives up to its reader
    assert len(flow.storages) == sum(mask) + 2
    others = [s for s in flow.storages if s.begin == place[gradients] and s.end != place[one]]
    assert all(s.end == place[gradients] for s in others)


def test_a_fused_kernel_stores_what_others_read() -> None:
    made = Made()
    x, w = made.input(100, 100), made.input(100, 100)
    inside = made(aten.relu.default, x)
    product = made(aten.mm.default, made(aten.exp.default, inside), w)
    made.graph.output((product,))
    info = context([bucket("a")])
    for fused, stored in ((True, [SIZE, SIZE]), (False, [SIZE, SIZE, SIZE])):
        assert [s.bytes for s in flow_of(made.graph, info, CostModel(MACHINE, fused)).storages] == stored


def test_fused_convolutions_have_channels_last() -> None:
    """The model's input is converted to channels-last once and saved for backward.

    A weight is converted at each use.
    """
    made = Made()
    image, weight = made.input(8, 3, 32, 32), made.input(16, 3, 3, 3)
    pointwise = made.input(16, 16, 1, 1)  # has the same layout in both formats
    first = made(aten.convolution.default, image, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    second = made(aten.convolution.default, first, pointwise, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    made.graph.output((second, image))
    sizes = {"image": 8 * 3 * 32 * 32 * 4, "weight": 16 * 3 * 9 * 4, "result": 8 * 16 * 32 * 32 * 4}
    info = context([bucket("a")])
    flow = flow_of(made.graph, info, CostModel(MACHINE, fused=True), user_outputs=1)
    assert sorted(s.bytes for s in flow.storages) == sorted([*sizes.values(), sizes["result"]])
    copy = flow.saved[image.name]
    assert copy is not None
    assert (copy.bytes, copy.category, copy.end) == (sizes["image"], Category.SAVED, None)
    (of_weight,) = (s for s in flow.storages if s.bytes == sizes["weight"])
    assert of_weight.begin == of_weight.end
    plain = flow_of(made.graph, info, CostModel(MACHINE, fused=False), user_outputs=1)
    assert [s.bytes for s in plain.storages] == [sizes["result"]] * 2
