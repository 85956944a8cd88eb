"""Which modules are units, and which parameters are whose."""

from __future__ import annotations

import pytest
import zoo
from torch import nn

from mfsdp_compile.runtime.units import find_units, repeated_blocks, resolve_unit_classes


def owned(model: nn.Module, classes: object) -> dict[str, list[str]]:
    units = find_units(model, resolve_unit_classes(model, classes))
    return {unit.name: [sites[0].name for _, sites in unit.params] for unit in units}


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
    assert "blocks.0.up.weight" in names["root:among"]  # shared by two blocks: the root's
    assert "enter.weight" in names["root:before"]
    assert "head.weight" not in [n for owned_names in names.values() for n in owned_names]


def test_auto_takes_repeated_blocks_only() -> None:
    assert repeated_blocks(zoo.Plain()) == (zoo.Block,)
    assert repeated_blocks(zoo.Plain(layers=1)) == ()
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == ()
    assert repeated_blocks(zoo.Nested()) == (zoo.Nested.block,)  # not what is inside

    class TwoTowers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleList([nn.ModuleList([zoo.Block(), zoo.Block()]), nn.ModuleList([zoo.Block()])])

    assert repeated_blocks(TwoTowers()) == (zoo.Block,)


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
