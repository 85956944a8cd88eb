"""What MkDocs is told about this repository: where the package's sources are, what lies outside of docs/, and drawings
that follow the page's colors.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\((?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")
DRAWING = re.compile(r'<p><img alt="(?P<text>[^"]*)" src="(?P<path>[^"]*drawings/(?P<name>\w+)\.svg)" /></p>')
LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "bash", ".json": "json"}


@event_priority(100)  # before mkdocstrings reads its options
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Give mkdocstrings the package as it is installed: pyproject.toml maps two folders of the checkout into it."""
    tree = Path(tempfile.mkdtemp(prefix="mfsdp-docs-"))
    atexit.register(shutil.rmtree, tree, ignore_errors=True)
    bytecode = shutil.ignore_patterns("__pycache__")
    package = shutil.copytree(ROOT / "mfsdp_compile", tree / "mfsdp_compile", ignore=bytecode)
    for name in ("passes", "runtime"):
        shutil.copytree(ROOT / name, package / name, ignore=bytecode)
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = [str(tree)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Make a page of every file of the repository that a page links to and that lies outside of docs/."""
    outside: set[Path] = set()
    for file in files.documentation_pages():
        outside |= {path for _, path in _outside(file.content_string, Path(file.src_uri))}
    for path in sorted(outside):
        language = LANGUAGES.get(path.suffix, "text")
        content = f"# {path.name}\n\n`{path}`\n\n````{language}\n{(ROOT / path).read_text(encoding='utf-8')}````\n"
        if path.suffix == ".md":
            content = _with_pages(path)
        files.append(File.generated(config, _page_of(path), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links out of docs/ to the pages of :func:`on_files`."""
    source = Path(page.file.src_uri)
    for link, path in list(_outside(markdown, source)):
        target = os.path.relpath(_page_of(path), source.parent)
        markdown = markdown.replace(f"]({link}", f"]({target}")
    return markdown


def _outside(markdown: str, page: Path) -> Iterator[tuple[str, Path]]:
    """Links of a page that leave docs/, and the files of the repository that they point to."""
    for found in LINK.finditer(markdown):
        path = Path(os.path.normpath(Path("docs") / page.parent / found["target"]))
        if path.parts[0] != "docs" and not path.is_absolute() and (ROOT / path).is_file():
            yield found["target"], path


def _with_pages(path: Path) -> str:
    """Return the text of a file outside of docs/, whose links to pages of docs/ lead there from the file's own page."""

    def moved(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(path.parent / found["target"]))
        if target.parts[0] != "docs" or target.suffix != ".md":
            return found[0]
        page = os.path.relpath(target.relative_to("docs"), Path(_page_of(path)).parent)
        return f"]({page}{found['anchor'] or ''})"

    return LINK.sub(moved, (ROOT / path).read_text(encoding="utf-8"))


def _page_of(path: Path) -> str:
    return f"source/{path.as_posix()}.md" if path.suffix != ".md" else f"source/{path.as_posix()}"


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put drawings into the page itself, where they take the colors of its scheme, light or dark."""

    def inline(found: re.Match[str]) -> str:
        svg = (Path(config.docs_dir) / "drawings" / f"{found['name']}.svg").read_text(encoding="utf-8")
        return f'<figure class="drawing" role="img" aria-label="{found["text"]}">{svg}</figure>'

    return DRAWING.sub(inline, html)
