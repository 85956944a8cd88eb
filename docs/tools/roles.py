"""Docstrings of this package say ``:class:`Name``` where they mean other objects; the site makes links of that."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc):`(?P<short>~)?(?P<target>[^`]+)`")
LITERAL = re.compile(r"^(?P<text>.*\S)?[ ]*::$", re.MULTILINE)


class Roles(griffe.Extension):
    """Turns roles into links where the site has the object, else into code; and ``::`` in front of code into a colon."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        self._walk(pkg)

    def _walk(self, obj: griffe.Object) -> None:
        if obj.docstring is not None:
            text = ROLE.sub(lambda found: self._link(obj, found), obj.docstring.value)
            obj.docstring.value = LITERAL.sub(lambda found: f"{found['text']}:" if found["text"] else "", text)
        for member in obj.members.values():
            if not member.is_alias:
                self._walk(member)  # type: ignore[arg-type]

    def _link(self, obj: griffe.Object, found: re.Match[str]) -> str:
        target = found["target"].removeprefix(".")
        shown = target.rpartition(".")[2] if found["short"] else target
        try:
            path = obj.resolve(target)
        except griffe.NameResolutionError:
            path = target
        return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'
