"""The site builds without a network or a warning, has every public name, and loads nothing from other hosts."""

from __future__ import annotations

import html.parser
import importlib
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the site is built with the extra 'docs', which needs Python 3.11")

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = (
    "mfsdp_compile",
    "mfsdp_compile.checkpoint",
    "mfsdp_compile.metrics",
    "mfsdp_compile.parallel.context_parallel",
    "mfsdp_compile.planning.forecast",
    "mfsdp_compile.parallel.pipeline_parallel",
)
"""Modules whose public names must all be in the reference."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | nowhere | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr[-4000:]
    return folder


class Tags(html.parser.HTMLParser):
    """What a page loads when it is shown, and its text without code."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.asks: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self._code = 0
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag in ("script", "img", "iframe", "source", "object", "embed") and "src" in values:
            self.asks.append(values["src"])
        if tag == "link" and values.get("rel") not in ("prev", "next", "canonical"):
            self.asks.append(values.get("href", ""))
        if tag == "a":
            self.links.append(values.get("href", ""))
        self._code += tag in ("code", "pre", "script", "style", "svg")

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in ("code", "pre", "script", "style", "svg")

    def handle_data(self, data: str) -> None:
        if not self._code:
            self.text.append(data)


def pages(site: Path) -> list[Path]:
    return sorted(site.rglob("*.html"))


@pytest.mark.long
def test_it_asks_no_other_host(site: Path) -> None:
    asked = {(page.name, url) for page in pages(site) for url in Tags(page).asks if "//" in url}
    assert not asked
    for sheet in site.rglob("*.css"):
        outside = [
            url for url in re.findall(r"url\(([^)]*)\)", sheet.read_text("utf-8")) if "//" in url and "data:" not in url
        ]
        assert not outside, sheet


@pytest.mark.long
def test_every_page_is_in_the_navigation(site: Path) -> None:
    links = set(Tags(site / "index.html").links)
    for page in (ROOT / "docs").rglob("*.md"):
        assert str(page.relative_to(ROOT / "docs").with_suffix(".html")) in links, f"{page} is not in nav of mkdocs.yml"


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    data = (site / "objects.inv").read_bytes()
    names = {line.split()[0] for line in zlib.decompress(data.split(b"\n", 4)[4]).decode().splitlines()}
    for module in PUBLIC:
        public = importlib.import_module(module).__all__
        missing = [f"{module}.{name}" for name in public if f"{module}.{name}" not in names and name != "__version__"]
        assert not missing


def test_docstrings_came_out_as_they_were_meant(site: Path) -> None:
    """No foreign markup is left in the text: roles, literal blocks, headers of sections that were not recognized."""
    for page in (site / "reference").glob("*.html"):
        text = " ".join("".join(Tags(page).text).split())
        left = re.findall(r":(?:class|func|meth|mod):|\w::|``|\b(?:Args|Returns|Raises):(?! )|autoref|====", text)
        assert not left, f"{page.name}: {left[:5]}"


def test_drawings_are_in_the_page(site: Path) -> None:
    text = (site / "concepts.html").read_text(encoding="utf-8")
    assert (
        text.count('<figure class="drawing"')
        == (ROOT / "docs" / "concepts.md").read_text("utf-8").count("drawings/")
        > 3
    )
