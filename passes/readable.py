"""Write a graph as a Python module that can be read, imported and run.

``torch.fx`` generates the code of ``forward``. This module adds the imports, constants and nested graphs that the code
needs.
"""

from __future__ import annotations

import operator
import textwrap
import types
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx


def source(graph: fx.Graph, head: Sequence[str]) -> tuple[str, dict[str, Tensor]]:
    """Return the text of a module with a function ``forward`` that takes the graph's inputs.

    Args:
        head: Lines of the module's docstring.

    Returns:
        The text, and constants by name. The module loads the constants from a file of its own name with the suffix
        ``.pt``.
    """
    imports: dict[str, None] = {"import torch": None, "import mfsdp_compile": None}
    constants: dict[str, Tensor] = {}
    classes: list[str] = []
    _class("Graph", graph, imports, classes, constants)
    docstring = "\n".join(head).replace("\\", "\\\\").replace('"""', "'''")
    parts = [f'"""{docstring}\n"""', "\n".join(sorted(imports, key=lambda line: (line.startswith("from"), line)))]
    if constants:
        parts.append(
            'from pathlib import Path\n\nCONSTANTS = torch.load(Path(__file__).with_suffix(".pt"), weights_only=True)'
        )
    parts += [*classes, "forward = Graph().forward"]
    return "\n\n\n".join(parts) + "\n", constants


def _class(
    name: str, graph: fx.Graph, imports: dict[str, None], classes: list[str], constants: dict[str, Tensor]
) -> None:
    """Append the source of a module class that computes ``graph``. Classes of nested graphs come first."""
    owner = graph.owning_module
    fields = []
    for target in dict.fromkeys(str(n.target) for n in graph.nodes if n.op in ("get_attr", "call_module")):
        value = operator.attrgetter(target)(owner)
        if isinstance(value, fx.GraphModule):
            inner = f"{name}_{target.replace('.', '_')}"
            _class(inner, value.graph, imports, classes, constants)
            fields.append(f"{target} = {inner}()")
        elif isinstance(value, Tensor):
            key = f"{name}.{target}"
            constants[key] = value.detach()
            fields.append(f"{target} = CONSTANTS[{key!r}]")
        else:
            fields.append(f"{target} = {value!r}")
    codegen = graph._codegen
    graph.set_codegen(fx.graph.CodeGen())  # AOTAutograd's codegen unpacks lists; these arguments are the placeholders
    try:
        code = graph.python_code("self")
    finally:
        graph.set_codegen(codegen)
    for global_name, value in code.globals.items():
        imports[_import(global_name, value)] = None
    body = textwrap.indent(_with_shapes(code.src, graph), "    ")
    attributes = "".join(f"    {field}\n" for field in fields)
    classes.append(f"class {name}(torch.nn.Module):\n{attributes}{body}".rstrip())


def _import(name: str, value: Any) -> str:
    """Return the line of source that binds ``name`` to ``value``."""
    if isinstance(value, types.ModuleType):
        return f"import {name}" if value.__name__ == name else f"import {value.__name__} as {name}"
    if isinstance(value, float):
        return f"{name} = float({str(value)!r})"
    if value is type(None):
        return f"{name} = type(None)"
    module, attribute = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module and attribute and "." not in attribute and "<" not in attribute:
        return f"from {module} import {attribute}" + (f" as {name}" if attribute != name else "")
    return f"{name} = {value!r}"


def _with_shapes(src: str, graph: fx.Graph) -> str:
    """Add comments with the shapes of the inputs of ``forward``."""
    shapes = [f"    # {n.name}: {_described(n.meta)}" for n in graph.nodes if n.op == "placeholder"]
    lines = src.strip("\n").split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith("def forward"))
    return "\n".join([*lines[: first + 1], *shapes, *lines[first + 1 :]])


def _described(meta: Mapping[str, Any]) -> str:
    value = meta.get("val", meta.get("example_value"))
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}, strides {list(value.stride())}"
    return "not known" if value is None else f"{type(value).__name__} {value}"
