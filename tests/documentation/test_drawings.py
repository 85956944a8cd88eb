"""Drawings in docs/drawings equal what ``docs/tools/drawings.py`` generates.

``MFSDP_WRITE_DRAWINGS=1`` regenerates them.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[2] / "docs" / "tools"
NUMBER = re.compile(r"\d+(?:\.\d+)?")
NEAR = 1.5
"""Pixels by which positions may differ under other versions of torch than the one that drew.

Some versions trace one operator more into a unit, which moves a border by a few microseconds. A pixel is a hundred.
"""


def _drawings() -> ModuleType:
    spec = importlib.util.spec_from_file_location("drawings", TOOLS / "drawings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


drawings = _drawings()
MEASURED = {"step_time": 9, "host_overhead": 6, "checkpoints": 3}
"""Drawings of ratios on the page of measurements, and how many bars each has."""
QUICK = ("units", "bucket", *MEASURED)
OPERATORS = ("regions",)
"""Drawings of operators, whose numbers differ between versions of torch."""


def alike(drawn: str, kept: str, near: float) -> bool:
    """Whether two drawings have the same parts at the same places, up to ``near`` pixels."""
    if NUMBER.sub("0", drawn) != NUMBER.sub("0", kept):
        return False
    pairs = zip(NUMBER.findall(drawn), NUMBER.findall(kept), strict=True)
    return all(abs(float(a) - float(b)) <= near for a, b in pairs)


@pytest.mark.long_if("memory", "regions", "timeline", "strategies")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in drawings.DRAWINGS]
)
def test_drawing(name: str) -> None:
    drawn, file = drawings.DRAWINGS[name](), drawings.FOLDER / f"{name}.svg"
    if os.environ.get("MFSDP_WRITE_DRAWINGS") == "1":
        file.write_text(drawn, encoding="utf-8")
    kept = file.read_text(encoding="utf-8")
    exact = torch.__version__.startswith("2.13.")
    alike_enough = alike(drawn, kept, 0.0 if exact else NEAR) or (name in OPERATORS and not exact)
    assert alike_enough, f"{file} is old: MFSDP_WRITE_DRAWINGS=1 pytest {__file__}"
    ET.fromstring(kept)


@pytest.mark.parametrize("name", MEASURED)
def test_bars_are_the_ratios_of_the_tables(name: str) -> None:
    """Each bar has its name and number in a row of the page, and all bars of a drawing have one scale."""
    page = (TOOLS.parent / "performance.md").read_text(encoding="utf-8").replace("`", "")
    above = page.partition(f"](drawings/{name}.svg)")[0].rpartition("\n## ")[2]
    kept = ET.parse(drawings.FOLDER / f"{name}.svg").getroot()
    bars = [rect for rect in kept if rect.tag.endswith("rect")]
    numbers = [part.text for part in kept if part.tag.endswith("text") and part.get("class") == "small"]
    assert len(bars) == len(numbers) == MEASURED[name]
    scales = []
    for bar, number in zip(bars, numbers, strict=True):
        assert number is not None
        system = "".join(bar.itertext())
        row = rf"^\| {re.escape(system)} \|.* {float(number):g}0* (\(.*\) )?\|"
        assert re.search(row, above, re.MULTILINE), (system, number)
        scales.append(float(bar.attrib["width"]) / float(number))
    assert max(scales) - min(scales) < 1.0
    lines = [float(part.attrib["x1"]) - 300 for part in kept if part.tag.endswith("line")]
    assert lines == pytest.approx([scales[0]] * len(lines), abs=1.0)


def test_every_drawing_is_shown_on_a_page() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in TOOLS.parent.rglob("*.md"))
    assert set(re.findall(r"drawings/(\w+)\.svg", pages)) == set(drawings.DRAWINGS)
    assert {file.stem for file in drawings.FOLDER.iterdir()} == set(drawings.DRAWINGS)


def test_drawings_that_differ_are_told_apart() -> None:
    kept = '<rect x="10.0"/><text>3 ms</text>'
    assert alike(kept, kept, 0.0)
    assert alike(kept.replace("10.0", "11.0"), kept, NEAR)
    assert not alike(kept.replace("10.0", "11.0"), kept, 0.0)
    assert not alike(kept.replace("10.0", "13.0"), kept, NEAR)
    assert not alike(kept.replace("text", "line"), kept, NEAR)
