"""Docstrings of this package, made ready for the site: roles such as ``:class:`Name``` become links, ``a, b: of both``
a line for each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`(?P<short>~)?(?P<target>[^`]+)`")
LITERAL = re.compile(r"^(?P<text>.*\S)?[ ]*::$", re.MULTILINE)
SEVERAL = re.compile(r"    (?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)+):(?P<text>.*)")


class Roles(griffe.Extension):
    """Changes docstrings after the package is loaded, and before they are parsed."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        self._walk(pkg)

    def _walk(self, obj: griffe.Object) -> None:
        if obj.docstring is not None:
            text = ROLE.sub(lambda found: self._link(obj, found), obj.docstring.value)
            text = LITERAL.sub(lambda found: f"{found['text']}:" if found["text"] else "", text)
            if isinstance(obj, griffe.Class) and "NamedTuple" in map(str, obj.bases):
                text = text.replace("\nArgs:\n", "\nAttributes:\n")  # it has no __init__ to look at
            obj.docstring.value = "\n".join(_one_by_one(text.split("\n")))
        for member in obj.members.values():
            if not member.is_alias:
                self._walk(member)  # type: ignore[arg-type]

    def _link(self, obj: griffe.Object, found: re.Match[str]) -> str:
        """A link where the site has the object, else code."""
        target = found["target"].removeprefix(".")
        shown = target.rpartition(".")[2] if found["short"] else target
        return f'<autoref identifier="{_path(obj, target)}" optional><code>{shown}</code></autoref>'


def _path(obj: griffe.Object, name: str) -> str:
    """Where an object is defined that a docstring calls ``name``."""
    first, _, rest = name.partition(".")
    try:
        path = obj.resolve(first) + (f".{rest}" if rest else "")
        return obj.modules_collection[path].canonical_path
    except (griffe.NameResolutionError, griffe.AliasResolutionError, KeyError):
        return name


def _one_by_one(lines: list[str]) -> Iterator[str]:
    """With ``a, b: of both`` said of ``a``, and of ``b``."""
    section, at = "", 0
    while at < len(lines):
        line = lines[at]
        at += 1
        if line and not line.startswith(" "):
            section = line
        several = SEVERAL.fullmatch(line) if section in ("Args:", "Attributes:") else None
        if several is None:
            yield line
            continue
        more = []
        while at < len(lines) and lines[at].startswith("        "):
            more.append(lines[at])
            at += 1
        for name in several["names"].split(", "):
            yield f"    {name}:{several['text']}"
            yield from more
