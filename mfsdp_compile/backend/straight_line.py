"""Straight-line Python that runs a graph whose computation is compiled in pieces.

Each name is deleted after its last use; what a piece takes last, before the call. Pieces take their arguments out of a
list.
"""

from __future__ import annotations

import functools
import itertools
import linecache
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import fx

from mfsdp_compile.passes import roles
from mfsdp_compile.quantities import bytes_text, seconds_text
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.collectives import ops as ops  # the operators that are called

Runner = Callable[[list[Any]], Any]
"""Takes its arguments out of a list, and returns a tuple."""

_numbers = itertools.count()


@dataclass(eq=False)
class Code:
    """Source of a function, and the globals that it refers to. It can be pickled, without the code of its pieces.

    Args:
        source: Defines ``call``, which is a :data:`Runner`.
        constants: Operators, and values that are no literals, by name.
        callees: Pieces and other graphs, by name.
    """

    source: str
    constants: dict[str, Any]
    callees: dict[str, compat.CompiledPiece | Code]
    _function: Runner | None = field(default=None, repr=False)

    def pieces(self) -> list[compat.CompiledPiece]:
        """Return the distinct pieces of this graph and of those that it calls, in the order of their first calls."""
        found: dict[compat.CompiledPiece, None] = {}
        for callee in self.callees.values():
            found.update(dict.fromkeys(callee.pieces() if isinstance(callee, Code) else [callee]))
        return list(found)

    def function(self) -> Runner:
        """Return the function. All pieces must have been compiled."""
        if self._function is None:
            file = f"{compat.PIECES_FILE}{next(_numbers)}>"
            lines = self.source.splitlines(keepends=True)
            linecache.cache[file] = (len(self.source), None, lines, file)  # for tracebacks
            scope = _GLOBALS | {name: compat.called_below_autograd(value) for name, value in self.constants.items()}
            for name, callee in self.callees.items():
                scope[name] = callee.function() if isinstance(callee, Code) else callee.run
            exec(compile(self.source, file, "exec"), scope)
            self._function = scope["call"]
        return self._function

    def not_picklable(self) -> str | None:
        """Return the type of a constant that cannot be pickled, here or in a graph that is called, if there is one."""
        others = (callee.not_picklable() for callee in self.callees.values() if isinstance(callee, Code))
        mine = (type(value).__name__ for value in self.constants.values() if not isinstance(value, _PICKLABLE))
        return next((kind for kind in (*mine, *others) if kind is not None), None)

    def __getstate__(self) -> dict[str, Any]:
        constants = {name: compat.picklable_operator(value) for name, value in self.constants.items()}
        return {"source": self.source, "constants": constants, "callees": self.callees, "_function": None}


@dataclass(frozen=True, eq=False)
class Call:
    """A call of a piece, or of another graph.

    Args:
        callee: What is called: a piece, or another graph.
        takes: Arguments: nodes, or plain values.
        returns: Nodes that stand for the elements of its result; None: nothing reads the element.
        memory: Arguments of the operator that returns a communication buffer, for each that follows the arguments.
    """

    callee: compat.CompiledPiece | Program
    takes: Sequence[Any]
    returns: Sequence[fx.Node | None]
    memory: tuple[tuple[Any, ...], ...]


Step: TypeAlias = fx.Node | Call
"""A node runs as the operator that it is."""


class Program:
    """The steps of a graph, in order.

    Args:
        graph: The graph. It has the inputs and outputs.
    """

    def __init__(self, graph: fx.Graph, steps: Sequence[Step]) -> None:
        self.graph, self._steps = graph, steps
        self._taken = {node.name for node in graph.nodes} | _GLOBALS.keys()
        self._named: dict[int, str] = {}
        self._constants: dict[str, Any] = {}
        self._callees: dict[str, compat.CompiledPiece | Code] = {}

    def described(self, seconds: Mapping[compat.CompiledPiece, float]) -> list[str]:
        """Return a line about all pieces, and one about each: how often it is called, and what a call takes.

        Args:
            seconds: Predicted seconds of a call of each piece; empty: nothing was predicted.
        """
        of_piece: dict[compat.CompiledPiece, list[Call]] = {}
        for call in self._calls():
            if isinstance(call.callee, compat.CompiledPiece):
                of_piece.setdefault(call.callee, []).append(call)
        lines = [f"{len(of_piece)} distinct pieces in {sum(map(len, of_piece.values()))} calls"]
        for number, (piece, calls) in enumerate(of_piece.items(), 1):
            times = _count(len(calls), "call")
            moved = f"takes {bytes_text(_size(calls[0].takes))} and returns {bytes_text(_size(calls[0].returns))}"
            inside = f"{_count(piece.operators, 'operator')} in {_count(piece.launches, 'launch')}"
            told = f", {seconds_text(seconds[piece])} by prediction" if seconds else ""
            lines.append(f"piece {number}: {times} of {inside}{told}; each {moved}")
        return lines

    def _calls(self) -> list[Call]:
        """Return the calls of this graph and of those that it calls, in order."""
        found: list[Call] = []
        for step in self._steps:
            if isinstance(step, Call):
                found += step.callee._calls() if isinstance(step.callee, Program) else [step]
        return found

    @functools.cached_property
    def code(self) -> Code:
        """The code that runs the steps."""
        source = "\n".join(self._lines()) + "\n"
        return Code(source, self._constants, self._callees)

    def _lines(self) -> list[str]:
        placeholders, (outputs,) = self.graph.find_nodes(op="placeholder"), self.graph.output_node().args
        dies = self._last_uses(list(placeholders))
        arguments = self._local("arguments")
        lines = [
            "def call(args):",
            *([f"    {', '.join(n.name for n in placeholders)}, = args"] if placeholders else []),
        ]
        lines += ["    args.clear()", *self._delete(dies[-1])]
        for number, step in enumerate(self._steps):
            gone = dies[number]
            if isinstance(step, fx.Node):
                given = [self._text(value) for value in step.args]
                given += [f"{key}={self._text(value)}" for key, value in step.kwargs.items()]
                result = f"{step.name} = " if step.users else ""
                lines.append(f"    {result}{self._constant(step.target, 'op')}({', '.join(given)})")
                lines += self._delete([node for node in gone if node is not step or step.users])
                continue
            given = [self._text(value) for value in step.takes]
            given += [f"{self._constant(_GRADIENT_BUFFER, 'op')}{self._text(each)}" for each in step.memory]
            taken = {node for node in step.takes if isinstance(node, fx.Node)}
            lines.append(f"    {arguments} = [{', '.join(given)}]")
            lines += self._delete([node for node in gone if node in taken])
            names = [node.name if node is not None else self._local("unread") for node in step.returns]
            result = f"{', '.join(names)}, = " if names else ""
            lines.append(f"    {result}{self._callee(step.callee)}({arguments})")
            lines += self._delete([node for node in gone if node not in taken])
            if None in step.returns:
                lines.append(f"    del {self._local('unread')}")
        return [*lines, f"    return {self._text(tuple(outputs))}"]  # type: ignore[arg-type]

    def _last_uses(self, placeholders: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """Return the nodes that nothing reads after each step; at the end, those that nothing reads at all."""
        last: dict[fx.Node, int] = dict.fromkeys(placeholders, -1)
        for number, step in enumerate(self._steps):
            if isinstance(step, fx.Node):
                touched: list[Any] = [step, *step.all_input_nodes]
            else:
                touched = [*step.takes, *step.returns]
            last |= {node: number for node in touched if isinstance(node, fx.Node) and node.op != "get_attr"}
        for node in self.graph.output_node().all_input_nodes:
            last.pop(node, None)
        dies: list[list[fx.Node]] = [[] for _ in range(len(self._steps) + 1)]
        for node, number in last.items():
            dies[number].append(node)
        return dies

    @staticmethod
    def _delete(nodes: Sequence[fx.Node]) -> list[str]:
        return [f"    del {', '.join(node.name for node in nodes)}"] if nodes else []

    def _text(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return value.name if value.op != "get_attr" else self._constant(roles.attribute_of(value), value.name)
        if isinstance(value, (list, tuple)):
            inner = ", ".join(map(self._text, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if value is None or isinstance(value, (bool, int, float, str, torch.dtype, torch.layout, torch.memory_format)):
            return repr(value)
        return self._constant(value, "constant")

    def _constant(self, value: Any, prefix: str) -> str:
        """Return the name of a global that is ``value``."""
        if id(value) not in self._named:
            about = str(value).split(".")[1] if isinstance(value, torch._ops.OpOverload) else str(len(self._named))
            self._constants[self._name(value, f"{prefix}_{about}")] = value
        return self._named[id(value)]

    def _callee(self, callee: compat.CompiledPiece | Program) -> str:
        """Return the name of a global that calls a piece, or another graph."""
        if id(callee) not in self._named:
            name = self._name(callee, f"piece_{len(self._callees)}")
            self._callees[name] = callee.code if isinstance(callee, Program) else callee
        return self._named[id(callee)]

    def _name(self, value: Any, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        self._named[id(value)] = name
        return name

    def _local(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        return name


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('ch') else 's'}"


def _size(nodes: Sequence[Any]) -> int:
    """Return the bytes of nodes' values."""
    values = [node.meta.get("val") for node in nodes if isinstance(node, fx.Node)]
    return sum(int(compat.concrete(v.numel())) * v.element_size() for v in values if isinstance(v, torch.Tensor))


_PICKLABLE = (
    torch._ops.OpOverload,
    types.BuiltinFunctionType,
    types.FunctionType,
    torch.Tensor,
    torch.device,
    complex,
    slice,
)
"""Types of constants that can be pickled."""
_GLOBALS: dict[str, Any] = {"torch": torch, "inf": float("inf"), "nan": float("nan")}
_GRADIENT_BUFFER = torch.ops.mfsdp.gradient_buffer.default
