"""Who may import whom, and which private attributes of torch the package reads. Both lists may only shrink."""

from __future__ import annotations

import ast
import functools
import operator
from collections import defaultdict
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import weight
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

ROOT = Path(__file__).parents[2]
FOLDERS = {"mfsdp_compile": "mfsdp_compile", "passes": "mfsdp_compile.passes", "runtime": "mfsdp_compile.runtime"}

LAYERS = [
    {"mfsdp_compile.runtime.compat"},
    {
        f"mfsdp_compile.runtime.{name}"
        for name in (
            *("digests", "formats", "geometry", "lanes", "memory", "nearest", "observers", "owner", "program_lines"),
            *("schedule", "untrusted_files"),
        )
    },
    {"mfsdp_compile.runtime"},
    {"mfsdp_compile.passes"},
    {"mfsdp_compile"},
]
"""A file may import files of its own layer and of earlier ones. The longest matching prefix gives a file's layer."""

READ_BY_PASSES = {
    *(
        "collectives.fakes",
        "formats.fp8_linear",
        "formats.quantize",
        "geometry.exchange",
        "geometry.layout",
        "geometry.groups",
        "guests.offload.operators",
        "guests.quantized.stages",
        "lanes.lane",
        "lanes.plain",
        "lanes.stage",
    ),
    *("nearest", "schedule.decisions", "schedule.file", "schedule.phase", "schedule.policy", "schedule.text"),
    "untrusted_files",
}
"""Files of ``runtime`` that passes import, but ``compat``'s, which is imported as a package."""

CIRCLES: list[set[str]] = []
"""Files that import one another in a circle, imports for types included."""

PRIVATE = {
    "_apply": "fsdp2's module has nn.Module's methods, and hands them on",
    "_backward_hooks": "whether a hook of the user would be lost",
    "_buffers": "buffers are replaced in place: there is no public setter that keeps persistence",
    "_c10d_functional": "the namespace of functional collectives in graphs",
    "_codegen": "how a graph prints itself",
    "_compiled_call_impl": "whether Module.compile was called",
    "_destroy": "ends a torch.library.Library",
    "_dynamo": "Dynamo's package: documented, and private by name",
    "_flat_weights_names": "nn.RNN keeps its weights in a list of its own",
    "_flatten": "one mesh dimension for two: documented, and private by name",
    "_forward_pre_hooks": "whether a hook of the user would be lost",
    "_load_from_state_dict": "an override, as torch's documentation advises",
    "_local_tensor": "a DTensor's local part without autograd; to_local() records an operation",
    "_modules": "children are replaced in place",
    "_non_persistent_buffers_set": "which buffers a checkpoint leaves out",
    "_opname": "an operator's name without its namespace",
    "_ops": "the classes of operators",
    "_parameters": "parameters are replaced in place, as FSDP2 does",
    "_patch_step_function": "what an optimizer does for the profiler when it is made",
    "_post_accumulate_grad_hooks": "whether a hook of the user would be lost",
    "_schema": "which arguments an operator writes to",
    "_spec": "a DTensor's mesh and placements, as its constructor takes them",
    "_version": "whether a tensor was written to: documented, and private by name",
}
"""Private attributes of torch's objects that are read outside of ``runtime/compat``, and why."""
OTHERS = {
    "_asdict",
    "_auto_class",
    "_current_frames",
    "_custom_objects",
    "_exit",
    "_getframe",
    "_init_weights",
    "_keys_to_ignore_on_save",
}
"""Private attributes of objects of Python, transformers and accelerate."""

MOST_IN_COMPAT = 115
"""How many private names of torch ``runtime/compat`` uses. Fifteen compile pieces, and keep them in caches and files.
Those of the scheduler go once pieces were measured on a GPU."""


@functools.cache
def files() -> dict[str, Path]:
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if parts[-1] != "__init__":  # those hand names on
                found[".".join((package, *parts))] = path
    return found


@functools.cache
def imported() -> dict[str, set[str]]:
    """Return the files that each file imports, anywhere in it."""
    found = {}
    for name, path in files().items():
        mine: set[str] = set()
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Import):
                mine |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                parts = name.split(".")[: -node.level] if node.level else []
                base = ".".join([*parts, node.module] if node.module else parts)
                mine |= {each if (each := f"{base}.{alias.name}") in files() else base for alias in node.names}
        found[name] = mine & files().keys() - {name}
    return found


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def layer_of(name: str) -> int:
    prefixes = [
        (len(prefix), place) for place, names in enumerate(LAYERS) for prefix in names if name.startswith(prefix)
    ]
    return max(prefixes)[1]


def test_lower_layers_import_no_higher_ones() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in imported().items()
        for other in others
        if layer_of(other) > layer_of(name)
    ]
    assert not wrong


def test_passes_read_plain_data_of_the_runtime() -> None:
    found = {
        other for name, others in imported().items() for other in others if name.startswith("mfsdp_compile.passes")
    }
    prefix = "mfsdp_compile.runtime."
    assert {name.removeprefix(prefix) for name in found if name.startswith(prefix)} == READ_BY_PASSES


def _reached(name: str) -> set[str]:
    found: set[str] = set()
    new = {name}
    while new:
        new = {other for each in new for other in imported()[each]} - found
        found |= new
    return found


def test_no_more_files_are_in_circles() -> None:
    """If a circle became smaller: take what left it out of the list."""
    reached = {name: _reached(name) for name in files()}
    circles = {frozenset(other for other in reached[name] if name in reached[other]) for name in files()}
    found = {frozenset(name.removeprefix("mfsdp_compile.") for name in circle) for circle in circles if len(circle) > 1}
    assert found == set(map(frozenset, CIRCLES))


def _private_attributes() -> Iterator[tuple[str, str]]:
    for path in files().values():
        for node in ast.walk(_tree(path)) if path.parent.name != "compat" else ():
            if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
                continue
            is_operator = node.attr.startswith("_foreach_") or ast.unparse(node.value).endswith("aten")
            if not is_operator:
                yield node.attr, f"{path.relative_to(ROOT)}:{node.lineno}"


def _own_names() -> set[str]:
    found: set[str] = set()
    for path in files().values():
        for node in ast.walk(_tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
    return found


def _names_of_torch() -> set[str]:
    module = nn.Linear(1, 1)
    objects = [
        *(torch.Tensor, module.weight, module, DTensor, DeviceMesh, torch.optim.SGD(module.parameters()), fx.Graph()),
        *(fx.GraphModule(nn.Module(), fx.Graph()), fx.Node, dist.ProcessGroup, dist.Work, torch.UntypedStorage),
        *(torch._ops.OpOverload, torch.library.Library),
    ]
    return {name for each in objects for name in dir(each)}


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="other versions of torch have other private names"
)
def test_private_attributes_of_torch() -> None:
    """Names that only torch has, or that torch's objects have too."""
    own, of_torch = _own_names(), _names_of_torch()
    same = {"_device", "_indices", "_next", "_to"}  # of this package's own objects only
    uses: dict[str, str] = defaultdict(str)
    for name, place in _private_attributes():
        if (name not in own or name in of_torch) and not name.startswith("_mfsdp") and name not in same | OTHERS:
            uses[name] += f" {place}"
    new = {name: places for name, places in uses.items() if name not in PRIVATE}
    assert not new, "move these to runtime/compat"
    gone = PRIVATE.keys() - uses.keys()
    assert not gone, "nothing reads these any more: take them out of the list"


LIBRARIES = ("bitsandbytes", "torchao", "torchao_nf4", "transformer_engine")
"""Modules of compat about libraries other than torch."""


def test_no_more_private_names_in_compat() -> None:
    """Names that are imported from private modules, and private attributes of torch's modules and objects."""
    used = set()
    for path in files().values():
        if path.parent.name != "compat" or path.stem in LIBRARIES:
            continue
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                used |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                is_own = ast.unparse(node.value) in ("self", "sys", "_aten")
                is_module = node.attr in ("_C", "_dynamo", "_ops")
                if not (is_own or is_module or node.attr.startswith("_foreach_")):
                    used.add(f"torch.{node.attr}")
    found = sorted(each for each in used if "._" in each)
    assert len(found) <= MOST_IN_COMPAT, f"{len(found)}: {found}"


MOST_REACHED = {
    "quantized": (32, 189),
    "portions": (29, 116),
    "offload": (2, 6),
    "wire": (22, 55),
    "buffers": (15, 33),
    "capture": (16, 30),
    "ranks": (23, 117),
}
"""Files of the core that name a guest, and lines. These numbers only fall, and so do those below."""
MOST_BRANCHES = 224, 73
"""Conditions on flags of how buckets travel, and files that have one."""
MOST_LOADED = {"eager": 29_550, "eager and compiled": 39_550, "verifier": 8_650}
"""Lines of the package that imports load. The verifier reads lanes, and formats until these are lanes, too."""


def test_guests_reach_no_further_into_the_core() -> None:
    found = {guest: weight.reach(guest) for guest in weight.GUESTS}
    further = {guest: now for guest, now in found.items() if any(map(operator.gt, now, MOST_REACHED[guest]))}
    assert not further, f"more than {MOST_REACHED}"


def test_no_more_branches_on_flags() -> None:
    branches, files_with_one = weight.branches()
    assert branches <= MOST_BRANCHES[0] and files_with_one <= MOST_BRANCHES[1]


@pytest.mark.skipif(
    not any(point.name == "mfsdp" for point in entry_points(group="torch_dynamo_backends")),
    reason="the package is not installed: importing it registers the backend, which loads the compiler",
)
@pytest.mark.parametrize("what", weight.IMPORTS)
def test_imports_load_no_more(what: str) -> None:
    assert weight.loaded(what) <= MOST_LOADED[what]
