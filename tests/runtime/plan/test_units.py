"""Which modules are units, and which unit each parameter belongs to."""

from __future__ import annotations

import doctest
import itertools
from collections.abc import Callable

import pytest
import zoo
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mfsdp_compile.runtime.plan import units as units_module
from mfsdp_compile.runtime.plan.precision import Policies
from mfsdp_compile.runtime.plan.precision_plan import PrecisionPlan
from mfsdp_compile.runtime.plan.units import (
    find_units,
    group_by_size,
    join,
    neighbors,
    repeated_blocks,
    resolve_unit_classes,
)


def owned(model: nn.Module, classes: object) -> dict[str, list[str]]:
    units = find_units(model, resolve_unit_classes(model, classes))
    return {unit.name: [locations[0].name for _, locations in unit.params] for unit in units}


def test_units_by_class() -> None:
    names = owned(zoo.Plain(layers=2), [zoo.Block])
    assert list(names) == ["root:before", "blocks.0", "blocks.1", "root:after"]
    assert names["root:before"] == ["enter.weight", "enter.bias"]
    assert names["blocks.1"][0] == "blocks.1.norm.weight"
    assert names["root:after"] == ["norm.weight", "norm.bias", "head.weight", "head.bias"]


@pytest.mark.parametrize(
    "classes", ["zoo.Block", ["zoo.Block"], zoo.Block, [zoo.Block, "zoo.Block"], "auto", ["auto", zoo.Block], "Block"]
)
def test_every_way_of_naming_units(classes: object) -> None:
    assert owned(zoo.Plain(), classes) == owned(zoo.Plain(), [zoo.Block])


def test_nested_class_by_path() -> None:
    assert resolve_unit_classes(zoo.Nested(), "zoo.Nested.block") == (zoo.Nested.block,)


def test_no_units_is_one_unit() -> None:
    assert list(owned(zoo.Plain(), None)) == ["root:all"]


def test_parameters_belong_to_the_innermost_unit() -> None:
    names = owned(zoo.Nested(), [zoo.Nested.block, zoo.Block])
    assert all(".inner." in name for name in names["blocks.0.inner"])
    assert names["blocks.0"] == [
        "blocks.0.before.weight",
        "blocks.0.before.bias",
        "blocks.0.after.weight",
        "blocks.0.after.bias",
    ]


def test_tied_parameters_belong_to_what_contains_all_their_places() -> None:
    names = owned(zoo.Tied(), [zoo.Block])
    assert "blocks.0.up.weight" in names["root:among"]  # shared by two blocks, so the root's
    assert "enter.weight" in names["root:before"]
    assert "head.weight" not in [n for owned_names in names.values() for n in owned_names]


def test_auto_takes_repeated_blocks_only() -> None:
    assert repeated_blocks(zoo.Plain()) == (zoo.Block,)
    assert repeated_blocks(zoo.Plain(layers=1)) == ()
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == ()
    assert repeated_blocks(zoo.Nested()) == (zoo.Nested.block,)  # not the modules inside

    class TwoTowers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList([nn.ModuleList([zoo.Block(), zoo.Block()]), nn.ModuleList([zoo.Block()])])

    assert repeated_blocks(TwoTowers()) == (zoo.Block,)


def test_auto_takes_blocks_and_not_what_holds_them() -> None:
    class Stage(nn.Module):
        """T5 has two stacks of one class: an encoder and a decoder."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([zoo.Nested.block(), zoo.Nested.block()])

    class Sides(nn.Module):
        def __init__(self, side: Callable[[], nn.Module]) -> None:
            super().__init__()
            self.encoder, self.decoder = side(), side()

    assert repeated_blocks(Sides(Stage)) == (zoo.Nested.block,)
    assert repeated_blocks(Sides(zoo.Block)) == (zoo.Block,)
    # Torchvision's ResNet. Where blocks are of a class of their own, a sequence of them is not searched inside.
    stage = nn.Sequential(zoo.Block(), zoo.Block())
    assert repeated_blocks(Sides(lambda: nn.Sequential(zoo.Block(), zoo.Block()))) == (zoo.Block,)
    assert repeated_blocks(nn.Sequential(stage, nn.Sequential(zoo.Block(), zoo.Block()))) == (zoo.Block,)
    layer = nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.GELU()), nn.Sequential(nn.Linear(2, 2), nn.GELU())])
    assert repeated_blocks(layer) == (nn.Sequential,)

    class Layer(nn.Module):
        """A layer of experts."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([zoo.Block(), zoo.Block()])

    assert repeated_blocks(nn.ModuleList([Layer(), Layer()])) == (Layer,)


@pytest.mark.parametrize(
    ("classes", "error", "fragments"),
    [
        ([nn.Conv2d], ValueError, ["Conv2d", "Classes in the model", "zoo.Block"]),
        (["zoo.Missing"], ValueError, ["zoo.Missing", "no 'Missing'"]),
        (["no.such.module.Block"], ValueError, ["no.such.module.Block", "cannot be imported"]),
        (["Blok"], ValueError, ["'Blok'", "no such class", "import path", "zoo.Block"]),
        ([3], TypeError, ["3"]),
        ([int], TypeError, ["int"]),
    ],
)
def test_wrong_classes(classes: object, error: type[Exception], fragments: list[str]) -> None:
    with pytest.raises(error) as caught:
        owned(zoo.Plain(), classes)
    assert all(fragment in str(caught.value) for fragment in fragments), caught.value


def test_auto_without_blocks_says_so() -> None:
    with pytest.raises(ValueError, match="found no repeated block"):
        owned(nn.Linear(2, 2), "auto")


def test_auto_finds_a_single_layer() -> None:
    assert owned(zoo.Plain(layers=1), "auto").keys() == owned(zoo.Plain(layers=1), [zoo.Block]).keys()


# -- joined units -----------------------------------------------------------------------------------------------------


class Stack(nn.Module):
    """An encoder and a decoder in separate lists, then two heads side by side, one of them in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (
            nn.ModuleDict({"layers": nn.ModuleList(zoo.Block() for _ in range(3))}) for _ in range(2)
        )
        self.stages = nn.Sequential(nn.Sequential(zoo.Block(), zoo.Block()), nn.Sequential(zoo.Block()))
        self.left, self.right = zoo.Block(), zoo.Block()


def runs(model: nn.Module, classes: object) -> list[list[str]]:
    found = find_units(model, resolve_unit_classes(model, classes))
    return [[unit.name for unit in run] for run in neighbors(model, found)]


def test_documented_examples() -> None:
    result = doctest.testmod(units_module)
    assert result.attempted
    assert result.failed == 0


def test_neighbors_are_of_one_list_or_parent() -> None:
    assert runs(Stack(), zoo.Block) == [
        ["encoder.layers.0", "encoder.layers.1", "encoder.layers.2"],
        ["decoder.layers.0", "decoder.layers.1", "decoder.layers.2"],
        ["stages.0.0", "stages.0.1", "stages.1.0"],
        ["left", "right"],
    ]
    # For each block norm, up and down, through the list of blocks.
    linears = runs(zoo.Plain(layers=2), nn.Linear)
    assert linears == [["blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down"]]


def test_units_that_hold_others_are_no_neighbors() -> None:
    """Units inside one unit can be joined, units inside two cannot."""
    nested = zoo.Nested.block
    assert runs(zoo.Nested(), [nested, zoo.Block]) == []
    inner = [[f"blocks.{i}.inner.up", f"blocks.{i}.inner.down"] for i in range(3)]
    assert runs(zoo.Nested(), [nested, nn.Linear]) == inner
    across = [[f"blocks.{i}.after", f"blocks.{i + 1}.before"] for i in range(2)]
    assert runs(zoo.Nested(), nn.Linear) == [inner[0], across[0], inner[1], across[1], inner[2]]


def test_joined_units_hold_what_their_members_held() -> None:
    model = zoo.Tied()
    apart = find_units(model, (zoo.Block,))
    of = {unit.name: unit for unit in apart}
    # The first shares its matrix with the last, so the root owns it.
    size = PrecisionPlan(Policies()).gathered_bytes
    joined = join(model, apart, size(of["blocks.1"]) + 1, size)
    assert [unit.name for unit in joined] == ["root:before", "blocks.0-1", "root:among", "blocks.2", "root:after"]
    assert joined[1].params == of["blocks.0"].params + of["blocks.1"].params
    assert joined[1].modules == (model.blocks[0], model.blocks[1])
    assert join(model, apart, 1, size) == apart
    (_, everything, *_) = join(model, apart, 10**9, size)
    assert everything.modules == tuple(model.blocks)


@given(st.lists(st.integers(1, 20), max_size=12), st.integers(1, 40))
def test_groups_reach_the_size_and_no_more_than_that_takes(sizes: list[int], least: int) -> None:
    groups = group_by_size(sizes, least)
    for one, other in itertools.pairwise(groups):
        assert one.stop <= other.start
    for group in groups:
        own = sizes[group.start : group.stop]
        assert len(own) > 1
        assert sum(own[:-1]) < least
        assert max(own) < least
        follows = sizes[group.stop] if group.stop < len(sizes) else least
        assert sum(own) >= least or follows >= least  # nothing is left to join
    # A unit that is alone is large enough, or has no neighbor to be joined with.
    grouped = {i for group in groups for i in group}
    for i, size in enumerate(sizes):
        if i not in grouped and size < least:
            around = [j for j in (i - 1, i + 1) if 0 <= j < len(sizes)]
            assert all(j in grouped or sizes[j] >= least for j in around)
