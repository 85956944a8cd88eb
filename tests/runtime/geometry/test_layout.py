"""Bucket layouts: the promises of the module's docstring, for shapes and world sizes that hypothesis picks."""

from __future__ import annotations

import doctest
import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mfsdp_compile.runtime.geometry import layout as layouts
from mfsdp_compile.runtime.geometry.layout import BucketLayout, LayoutPolicy, ParamSpec, Slot, in_parts, plan_layouts

SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 13, 16, 31, 64, 100, 101, 128, 257])
SHAPES = st.lists(SIZES, min_size=0, max_size=3).map(tuple)
PARAMS = st.lists(st.tuples(SHAPES, st.booleans()), min_size=1, max_size=8).map(
    lambda params: [ParamSpec(f"p{i}", shape, whole=whole) for i, (shape, whole) in enumerate(params)]
)
WORLDS = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16, 63, 64, 1000])
ITEMSIZES = st.sampled_from([1, 2, 4, 8])
POLICIES = st.builds(
    LayoutPolicy,
    cuts_matrices=st.booleans(),
    alignment_bytes=st.sampled_from([1, 16, 256]),
    max_padding=st.sampled_from([0.0, 0.02, 0.5]),
    free_padding_bytes=st.sampled_from([0, 4096, 1 << 20]),
    block_numel=st.sampled_from([1, 1, 256]),
)
anything = given(PARAMS, ITEMSIZES, WORLDS, POLICIES)


def test_documented_example() -> None:
    assert doctest.testmod(layouts).failed == 0


@anything
@example([ParamSpec("a", (3, 1000003)), ParamSpec("b", (5, 1000003))], 2, 8, LayoutPolicy())
@example([ParamSpec("a", (100, 100)), ParamSpec("b", (37, 101))], 2, 64, LayoutPolicy(free_padding_bytes=0))
def test_every_parameter_has_one_place(
    params: list[ParamSpec], itemsize: int, world: int, policy: LayoutPolicy
) -> None:
    planned = plan_layouts(params, itemsize, world, policy)
    slots = [slot for layout in planned for slot in layout.slots]
    assert sorted((s.name, s.shape) for s in slots) == sorted((p.name, p.shape) for p in params)
    for layout in planned:
        end = 0
        for slot in layout.slots:
            assert slot.offset >= end  # disjoint
            assert slot.offset * itemsize % policy.alignment_bytes == 0  # aligned
            end = slot.end
        assert end <= layout.numel == world * layout.shard_numel
        covered = sum(slot.numel for slot in layout.slots) + sum(b - a for a, b in layout.gaps())
        assert covered == layout.numel  # parameters and gaps cover the bucket


@anything
def test_padding_is_bounded(params: list[ParamSpec], itemsize: int, world: int, policy: LayoutPolicy) -> None:
    for layout in plan_layouts(params, itemsize, world, policy):
        content = sum(slot.numel for slot in layout.slots) * itemsize
        longest = max(policy.indivisible(slot.row_numel) for slot in layout.slots) * itemsize
        assert layout.padding * itemsize <= policy.limit(content, longest, world)


@anything
def test_matrices_are_cut_only_to_save_padding(
    params: list[ParamSpec], itemsize: int, world: int, policy: LayoutPolicy
) -> None:
    planned = plan_layouts(params, itemsize, world, policy)
    assert all(slot.row_dims == 1 for layout in planned for slot in layout.slots if len(slot.shape) < 3)
    whole = plan_layouts(params, itemsize, world, replace(policy, cuts_matrices=False))
    assert all(slot.row_dims == 1 for layout in whole for slot in layout.slots)
    if len(whole) == 1:
        content = sum(p.numel for p in params) * itemsize
        if whole[0].padding * itemsize <= min(policy.max_padding, policy.max_stack_padding) * content:
            assert planned == whole


@anything
def test_blocks_and_what_should_stay_whole(
    params: list[ParamSpec], itemsize: int, world: int, policy: LayoutPolicy
) -> None:
    planned = plan_layouts(params, itemsize, world, policy)
    for layout in planned:
        assert layout.shard_numel % policy.block_numel == 0
        assert all(slot.offset % policy.block_numel == 0 for slot in layout.slots)
    if all(param.whole for param in params) and len(planned) == 1:
        # If possible, each parameter is on one rank, as with rows as long as the parameter.
        flat = plan_layouts([ParamSpec(p.name, (1, p.numel)) for p in params], itemsize, world, policy)
        content = sum(p.numel for p in params) * itemsize
        row = max(policy.indivisible(p.row_numel) for p in params) * itemsize
        if len(flat) == 1 and flat[0].padding * itemsize <= policy.goal(content, row, world):
            owned = [[len(planned[0].rows(i, rank)) for rank in range(world)] for i in range(len(params))]
            assert all(sum(count > 0 for count in counts) <= 1 for counts in owned)


def test_two_equal_matrices_on_two_ranks_are_owned() -> None:
    matrices = [ParamSpec("a", (64, 32), whole=True), ParamSpec("b", (64, 32), whole=True)]
    (layout,) = plan_layouts(matrices, 4, 2, LayoutPolicy(free_padding_bytes=0))
    assert layout.padding == 0
    assert [layout.rows(i, rank) for i in (0, 1) for rank in (0, 1)] == [range(64), range(0), range(0), range(64)]
    (cut,) = plan_layouts([*matrices, ParamSpec("c", (64, 32), whole=True)], 4, 2, LayoutPolicy(free_padding_bytes=0))
    assert cut.padding == 0
    assert any(0 < len(cut.rows(i, 0)) < 64 for i in range(3))


def test_matrices_that_should_stay_whole_take_padding_for_it() -> None:
    """Matrices that should stay whole may take padding. Here three on two ranks need shards of two matrices each."""
    matrices = [ParamSpec(name, (64, 32), whole=True) for name in "abc"]
    (layout,) = plan_layouts(matrices, 4, 2)
    assert layout.padding > 0
    assert [sum(layout.rows(i, rank) == range(64) for rank in (0, 1)) for i in range(3)] == [1, 1, 1]


def test_padding_that_costs_nothing_is_no_reason_for_more() -> None:
    """Padding that is allowed is not used up: a mebibyte may be wasted, but here 16 bytes per rank are enough."""
    (layout,) = plan_layouts([ParamSpec("a", (100,))], 4, 64)
    assert layout.shard_numel == 4


def test_layouts_that_differ_in_anything_but_names_have_different_signatures() -> None:
    slots = (Slot("a", (4, 4), 0), Slot("b", (4,), 64))
    layout = BucketLayout(4, 2, 64, slots)
    assert layout.signature == replace(layout, slots=(Slot("c", (4, 4), 0), slots[1])).signature
    others = [
        replace(layout, itemsize=8),
        replace(layout, world_size=4),
        replace(layout, shard_numel=128),
        replace(layout, slots=(Slot("a", (2, 8), 0), slots[1])),
        replace(layout, slots=(slots[0], Slot("b", (4,), 128)), shard_numel=128),
    ]
    assert len({layout.signature, *(other.signature for other in others)}) == 1 + len(others)


@anything
def test_ranks_own_whole_rows_and_every_row_once(
    params: list[ParamSpec], itemsize: int, world: int, policy: LayoutPolicy
) -> None:
    for layout in plan_layouts(params, itemsize, world, policy):
        for index, slot in enumerate(layout.slots):
            owned = [row for rank in range(world) for row in layout.rows(index, rank)]
            assert owned == list(range(slot.num_rows))
            for rank in range(world):
                start = layout.shard_offset(index, rank)
                assert start >= 0
                assert start + len(layout.rows(index, rank)) * slot.row_numel <= layout.shard_numel


@anything
def test_values_survive_the_round_trip(
    params: list[ParamSpec], itemsize: int, world: int, policy: LayoutPolicy
) -> None:
    """Whole parameters -> each rank's rows, placed in its shard -> shards side by side -> the same whole parameters."""
    for layout in plan_layouts(params, itemsize, world, policy):
        if layout.numel > 1 << 20:
            continue
        whole = [np.random.default_rng(i).random((s.num_rows, s.row_numel)) for i, s in enumerate(layout.slots)]
        bucket = np.full(layout.numel, np.nan)
        for rank in range(world):
            shard = bucket[rank * layout.shard_numel : (rank + 1) * layout.shard_numel]
            for index, values in enumerate(whole):
                rows = layout.rows(index, rank)
                start = layout.shard_offset(index, rank)
                part = values[rows.start : rows.stop].reshape(-1)
                shard[start : start + part.size] = part
        for slot, values in zip(layout.slots, whole, strict=True):
            np.testing.assert_array_equal(bucket[slot.offset : slot.end], values.reshape(-1))
        for start, stop in layout.gaps():
            assert np.isnan(bucket[start:stop]).all()  # nothing wrote into padding


def test_a_stack_of_one_element_fits() -> None:
    """The blocks of a quantized bucket are longer than it, and no padding is free."""
    policy = LayoutPolicy(cuts_matrices=True, alignment_bytes=1, max_padding=0.0, free_padding_bytes=0, block_numel=256)
    (layout,) = plan_layouts([ParamSpec("scale", (1, 1, 1))], 1, 1, policy)
    assert layout.shard_numel == 256


@anything
def test_layouts_are_plain_hashable_data(
    params: list[ParamSpec], itemsize: int, world: int, policy: LayoutPolicy
) -> None:
    planned, again = (plan_layouts(params, itemsize, world, policy) for _ in range(2))
    assert planned == again
    assert hash(planned) == hash(again)
    assert [p.fingerprint for p in planned] == [p.fingerprint for p in again]
    renamed = plan_layouts([replace(p, name=f"other.{p.name}") for p in params], itemsize, world, policy)
    assert [p.signature for p in planned] == [p.signature for p in renamed]
    assert [p.fingerprint for p in planned] != [p.fingerprint for p in renamed]


def llama_layer(width: int, hidden: int, kv: int) -> list[ParamSpec]:
    return [
        ParamSpec("q", (width, width)),
        ParamSpec("k", (kv, width)),
        ParamSpec("v", (kv, width)),
        ParamSpec("o", (width, width)),
        ParamSpec("gate", (hidden, width)),
        ParamSpec("up", (hidden, width)),
        ParamSpec("down", (width, hidden)),
        ParamSpec("norm1", (width,)),
        ParamSpec("norm2", (width,)),
    ]


@pytest.mark.parametrize("world", [1, 2, 3, 8, 64, 512])
def test_transformer_layers_stay_within_two_percent(world: int) -> None:
    for sizes in [(4096, 11008, 4096), (8192, 28672, 1024), (2880, 2880, 512), (768, 3072, 768)]:
        for layout in plan_layouts(llama_layer(*sizes), 2, world):
            content = layout.numel - layout.padding
            one_row_per_rank = world * max(slot.row_numel for slot in layout.slots)
            assert layout.padding <= max(0.02 * content, one_row_per_rank, (1 << 20) / 2)
            assert layout.shard_numel * 2 % 16 == 0


def mixtral_layer() -> list[ParamSpec]:
    return [
        *[ParamSpec(name, (rows, 4096)) for name, rows in (("q", 4096), ("k", 1024), ("v", 1024), ("o", 4096))],
        ParamSpec("router", (8, 4096)),
        ParamSpec("gate_up", (8, 2 * 14336, 4096)),
        ParamSpec("down", (8, 4096, 14336)),
        ParamSpec("norm1", (4096,)),
        ParamSpec("norm2", (4096,)),
    ]


def deepseek_v3_layer() -> list[ParamSpec]:
    width, latent, heads = 7168, 512, 128
    return [
        ParamSpec("q_down", (1536, width)),
        ParamSpec("q_up", (heads * 192, 1536)),
        ParamSpec("kv_down", (latent + 64, width)),
        ParamSpec("kv_up", (heads * 256, latent)),
        ParamSpec("o", (width, heads * 128)),
        ParamSpec("router", (256, width)),
        ParamSpec("gate_up", (256, 2 * 2048, width)),
        ParamSpec("down", (256, width, 2048)),
        ParamSpec("shared_gate_up", (2 * 2048, width)),
        ParamSpec("shared_down", (width, 2048)),
        *[ParamSpec(f"norm{i}", (numel,)) for i, numel in enumerate((width, width, 1536, latent))],
    ]


def padding_of(layer: list[ParamSpec], world: int) -> float:
    content = sum(param.numel for param in layer)
    return sum(layout.numel for layout in plan_layouts(layer, 2, world)) / content - 1


@pytest.mark.parametrize(
    "world", [2, 3, 7, 8, 12, 16, 31, 32, 63, 64, 96, 100, 255, 256, 500, 512, 768, 1024, 2048, 4096]
)
@pytest.mark.parametrize("layer", [mixtral_layer, deepseek_v3_layer])
def test_experts_pad_one_percent(layer: Callable[[], list[ParamSpec]], world: int) -> None:
    assert padding_of(layer(), world) <= 0.01


def test_experts_pad_more_where_ranks_have_few_rows() -> None:
    """What the documentation says about Mixtral on 3,072 ranks, and what whole experts would pad on 64."""
    assert 0.018 < padding_of(mixtral_layer(), 3072) < 0.0195
    whole = plan_layouts(mixtral_layer(), 2, 64, LayoutPolicy(cuts_matrices=False))
    assert sum(layout.numel for layout in whole) > 5 * sum(param.numel for param in mixtral_layer())


def test_rows_of_a_stack_that_is_cut() -> None:
    (layout,) = plan_layouts([ParamSpec("a", (3, 5, 4))], 4, 4, LayoutPolicy(free_padding_bytes=0, alignment_bytes=16))
    assert layout.slots[0].row_dims == 2
    assert layout.slots[0].num_rows == 15
    assert [layout.rows(0, rank) for rank in range(4)] == [range(4), range(4, 8), range(8, 12), range(12, 15)]
    as_matrix = replace(layout, slots=(Slot("a", (15, 4), 0),))
    assert layout.signature != as_matrix.signature


def test_rows_that_do_not_fit_together_get_separate_buckets() -> None:
    """Rows that do not fit together get separate buckets, as rows of 18432, 16384 and 7168 in DeepSeek-V3.

    Their least common multiple is 1,032,192 elements.
    """
    params = [ParamSpec("a", (7168, 18432)), ParamSpec("b", (7168, 16384)), ParamSpec("c", (16384, 7168))]
    (together,) = plan_layouts(params, 2, world_size=2)
    assert together.padding <= 0.02 * together.numel
    apart = plan_layouts(params, 2, world_size=256)
    assert len(apart) > 1
    for layout in apart:
        assert layout.padding <= 0.02 * (layout.numel - layout.padding)


def test_world_of_65536_ranks_is_planned_in_milliseconds() -> None:
    params = llama_layer(8192, 28672, 1024)
    begun = time.process_time()
    planned = plan_layouts(params, 2, world_size=65536)
    for layout in planned:
        for rank in (0, 1, 32768, 65535):
            for index in range(len(layout.slots)):
                layout.rows(index, rank)
    assert time.process_time() - begun < 0.05  # measured: 0.3 ms
    for index, slot in enumerate(planned[0].slots):
        assert sum(len(planned[0].rows(index, rank)) for rank in range(65536)) == slot.num_rows


@pytest.mark.parametrize(
    ("slots", "shard_numel"),
    [
        ([Slot("a", (4, 4), 0), Slot("b", (4,), 8)], 64),  # overlap
        ([Slot("a", (4,), 3)], 64),  # not aligned
        ([Slot("a", (4, 4), 0)], 6),  # a boundary cuts a row
        ([Slot("a", (8, 3), 4)], 10),  # the second boundary does, not the first
        ([Slot("a", (64,), 0)], 16),  # ends beyond the bucket
    ],
)
def test_impossible_layouts_are_refused(slots: list[Slot], shard_numel: int) -> None:
    with pytest.raises(ValueError, match=r"overlaps|cuts|beyond"):
        BucketLayout(4, 3, shard_numel, tuple(slots), alignment_bytes=16)


@given(
    st.integers(0, 200), st.integers(1, 9), st.integers(1, 12), st.integers(1, 64), st.sampled_from([1, 2, 4, 8, 16])
)
@example(start=21, count=1, atom=7, shard_numel=24, align=4)  # does not fit in the first possible shard
@example(start=0, count=2, atom=4, shard_numel=5, align=4)  # fits only in the fourth shard, which is not searched
@example(start=1, count=1, atom=5, shard_numel=10, align=8)  # fits at 24; 40 is after the first shard
def test_a_parameter_is_placed_as_early_as_possible(
    start: int, count: int, atom: int, shard_numel: int, align: int
) -> None:
    def fits(offset: int) -> bool:
        boundaries = range((offset // shard_numel + 1) * shard_numel, offset + count * atom, shard_numel)
        return offset % align == 0 and all((boundary - offset) % atom == 0 for boundary in boundaries)

    placed = layouts._place(start, count * atom, atom, shard_numel, align)
    first = next(filter(fits, range(start, (start // shard_numel + 3) * shard_numel)), None)
    if first is not None:
        assert placed == first
    elif placed is not None:
        assert fits(placed)


@given(PARAMS, ITEMSIZES, st.sampled_from([None, 1, 100, 4096, 1 << 30]))
def test_parts_keep_order_and_are_no_larger_than_asked(
    params: list[ParamSpec], itemsize: int, most: int | None
) -> None:
    parts = in_parts(params, itemsize, most)
    assert [param for part in parts for param in part] == params
    sizes = [sum(param.numel for param in part) * itemsize for part in parts]
    assert most is not None or len(parts) == 1
    for part, size in zip(parts, sizes, strict=True):
        assert most is None or size <= most or len([p for p in part if p.numel]) == 1
    if most is not None:  # nothing that fits together is split
        for part, after in itertools.pairwise(parts):
            assert sum(p.numel for p in (*part, after[0])) * itemsize > most


def test_names_must_be_unique() -> None:
    with pytest.raises(ValueError, match="unique"):
        plan_layouts([ParamSpec("a", (1,)), ParamSpec("a", (2,))], 4, 2)


@pytest.mark.parametrize(
    "bad",
    [
        {"alignment_bytes": 3},
        {"block_numel": 100},
        {"max_padding": -1.0},
        {"free_padding_bytes": -1},
        {"max_stack_padding": -0.1},
    ],
)
def test_impossible_policies_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"power of two|negative"):
        LayoutPolicy(**bad)
