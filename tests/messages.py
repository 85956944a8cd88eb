"""Messages of the package's errors and warnings, read from its sources, with ``…`` in place of values."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mfsdp_compile", "passes", "runtime")
VALUE = "…"
SHORTEST = 8
"""Minimum number of letters of a text that can be recognized. Shorter ones are parts of others."""


@dataclass(frozen=True)
class Message:
    """Message of a ``raise`` or a ``warn``.

    Args:
        place: File and line, as ``runtime/model/sharded_model.py:120``.
        kind: Name of the exception, or ``"warning"``.
        texts: One text if the message is written where it is raised. If a function creates the message, all its texts.
    """

    place: str
    kind: str
    texts: tuple[str, ...]


class Module:
    """One source file."""

    def __init__(self, path: Path) -> None:
        self.name = path.relative_to(ROOT).as_posix()
        self.tree = ast.parse(path.read_text(encoding="utf-8"))

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}

    @cached_property
    def imported(self) -> dict[str, str]:
        """Names that other files of the package define, functions and modules with functions, by the name here."""
        found = (node for node in ast.walk(self.tree) if isinstance(node, ast.ImportFrom))
        own = (node for node in found if node.level or str(node.module).startswith("mfsdp_compile"))
        return {alias.asname or alias.name: alias.name for node in own for alias in node.names}

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)}

    def messages(self) -> Iterator[Message]:
        for function in [self.tree, *(node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef))]:
            for node in _own(function):
                if isinstance(node, ast.Raise) and node.exc is not None:
                    yield from self._raised(node, function)
                elif isinstance(node, ast.Call) and ast.unparse(node.func) == "warn":
                    yield self._message(node, "warning", [node.args[0]], function)

    def _raised(self, node: ast.Raise, function: ast.AST) -> Iterator[Message]:
        what = node.exc
        if not isinstance(what, ast.Call):
            return  # raised again
        name = ast.unparse(what.func).rpartition(".")[2]
        if (own := self.classes.get(name)) is not None and what.args:  # its constructor may write the message
            yield self._message(node, name, [*what.args, *_constructed(own)], function)
        else:
            yield self._message(node, name, [what] if name in self.functions else what.args, function)

    def _message(self, node: ast.AST, kind: str, said: list[ast.expr], function: ast.AST) -> Message:
        found: list[str] = []
        for part in said:
            found += self._texts(part, function, depth=3)
        texts = tuple(dict.fromkeys(" ".join(text.split()) for text in found if _letters(text) >= SHORTEST))
        return Message(f"{self.name}:{node.lineno}", kind, texts)  # type: ignore[attr-defined]

    def _texts(self, node: ast.expr, function: ast.AST, depth: int) -> Iterator[str]:
        """Yield the possible texts of an expression."""
        if (text := _text(node)) is not None and _letters(text) >= SHORTEST:
            yield text
        for inner in ast.walk(node):
            if depth == 0:
                return
            if isinstance(inner, ast.Call):
                owner, _, called = ast.unparse(inner.func).rpartition(".")
                if called in self.functions and self.functions[called] is not function:
                    yield from _all_texts(self.functions[called])
                elif (owner or called) in self.imported:
                    for other in _functions_of_package().get(self.imported.get(called, called), ()):
                        yield from _all_texts(other)
            elif isinstance(inner, ast.Name):
                for assigned in _assigned(function, inner.id):
                    yield from self._texts(assigned, function, depth - 1)


@cache
def _functions_of_package() -> dict[str, list[ast.FunctionDef]]:
    """Return the functions of all files by name."""
    found: dict[str, list[ast.FunctionDef]] = {}
    for package in PACKAGES:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef):
                    found.setdefault(node.name, []).append(node)
    return found


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of nested functions."""
    pending = list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop()
        if not isinstance(node, ast.FunctionDef):
            yield node
            pending += ast.iter_child_nodes(node)


def _assigned(function: ast.AST, name: str) -> Iterator[ast.expr]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            yield node.value


def _constructed(kind: ast.ClassDef) -> list[ast.expr]:
    """Return what an exception class passes to ``super().__init__``."""
    calls = (node for node in ast.walk(kind) if isinstance(node, ast.Call))
    return [argument for call in calls if ast.unparse(call.func) == "super().__init__" for argument in call.args]


def _all_texts(function: ast.FunctionDef) -> Iterator[str]:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    pending: list[ast.AST] = list(reversed(body))
    while pending:
        node = pending.pop()
        text = _text(node) if isinstance(node, ast.expr) else None
        if text is not None and _letters(text) >= SHORTEST:
            yield text
        if isinstance(node, ast.JoinedStr):  # skip its parts, visit its values
            pending += [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        else:
            pending += ast.iter_child_nodes(node)


def _text(node: ast.expr) -> str | None:
    """Return the text of a string, an f-string, or a sum of several; None for other expressions."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else VALUE for part in node.values]
        return "".join(map(str, parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [_text(side) for side in (node.left, node.right)]
        return "".join(VALUE if part is None else part for part in parts) if any(parts) else None
    return None


def _letters(text: str) -> int:
    return sum(character.isalpha() for character in text)


def messages(*left_out: str) -> list[Message]:
    """Return the messages of the package, without files whose paths begin with one of ``left_out``."""
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    modules = [Module(file) for file in files if not file.relative_to(ROOT).as_posix().startswith(left_out)]
    return [message for module in modules for message in module.messages()]


def said_in(page: Path) -> dict[str, int]:
    """Return the messages that a page covers, and their lines: code in headings and bullets, and after ``Also:``."""
    found = {}
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if re.match(r"#{2,} `|#{2,} ``|Also: `|- `", line):
            for _, text in re.findall(r"(`+)(.+?)\1(?!`)", line):
                found[text.strip()] = number
    return found
