"""How heavy the core is: what imports load, and how far guests reach into it.

    python tests/package/weight.py

A guest is a feature that the core need not know: quantized gathers, portions, offload, wire formats, communication
buffers, capture, ranks in step. Counted are the files of the core, besides a guest's own, and their lines of code that
have one of its words; and the conditions that ask for a flag of how a bucket travels.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ("runtime/**/*.py", "passes/**/*.py", "mfsdp_compile/backend/**/*.py")
CORE_FILES = ("mfsdp_compile/sharded_module.py", "mfsdp_compile/sharding.py")
GUESTS = {
    "quantized": (
        r"quantized|quantize[sd]?\b|dequantiz|\bscaling\b(?!\s*=\s*Scaling)|Planes|has_planes|sends_planes"
        r"|stays_quantized|scale_count|QUANTIZ|SCALES",
        r"guests/quantized|formats/(quantize|forms|extension|fp8)|transformer_engine|torchao|fp8",
    ),
    "portions": (r"portion", r"passes/portions"),
    "offload": (
        r"\boffload|host\.(fetch|offload|settle|empty|on_device)",
        r"guests/offload|activations|host_memory",
    ),
    "wire": (
        r"\bwire\b|sums_exactly|exchanges?_slices|wait_summed|sums_within|in_order\b",
        r"guests/sums_in_order|determinism",
    ),
    "buffers": (
        r"comm_buffers|gather_buffers|gradient_buffers|enter_pool|NO_BUFFERS",
        r"comm_buffers|registration|allocation|communicators",
    ),
    "capture": (
        r"is_capturing|captured_step|CapturedStep|keeps_memory|free_kept|kept_memory|captures\b|cuda_graph",
        r"runtime/guests/capture|cuda_graphs",
    ),
    "ranks": (
        r"coordinator|watchdog|journal|\bannounce|\bagree\(|conclude\(|lifeline",
        r"runtime/ranks|compat/(gloo|nccl|stores)|model/recovery",
    ),
}
"""Words of each guest, and its own files."""
FLAGS = frozenset(
    re.findall(
        r"\w+",
        """stays_quantized takes_scales is_joint needs_token has_token may_wait
        scales_first sums_exactly is_copied has_planes sends_planes is_extension extension portions has_resident
        releases_resident is_stale is_made_stale made_columns scaling form offload capacity
        is_expert decoupled inspected keeps_memory is_complex gather_group pending resident wrappers is_from_portions
        made sent planes plane""",
    )
)
"""Attributes that say how a bucket travels."""
IMPORTS = {
    "eager": "from mfsdp_compile import shard",
    "eager and compiled": "from mfsdp_compile import shard; import mfsdp_compile.backend.compile",
    "verifier": "import mfsdp_compile.passes.verifier.verify",
}


@cache
def core() -> tuple[Path, ...]:
    """Return the core's files. Guests that are not apart yet are among them."""
    files = {path for pattern in (*CORE, *CORE_FILES) for path in ROOT.glob(pattern)}
    return tuple(sorted(path for path in files if "guests" not in path.parts))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _code(path: Path) -> tuple[str, ...]:
    """Return the lines of code: without comments, strings that are statements, and imports."""
    skipped: set[int] = set()
    for node in ast.walk(_tree(path)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, (ast.Import, ast.ImportFrom)):
            assert isinstance(node, ast.stmt) and node.end_lineno is not None
            skipped.update(range(node.lineno, node.end_lineno + 1))
    with path.open("rb") as file:
        comments = {t.start[0]: t.start[1] for t in tokenize.tokenize(file.readline) if t.type == tokenize.COMMENT}
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    return tuple(line[: comments.get(number, len(line))] for number, line in lines if number not in skipped)


def reach(guest: str) -> tuple[int, int]:
    """Return the number of the core's files, and of their lines, that name a guest."""
    words, own = GUESTS[guest]
    counts = Counter[Path]()
    for path in core():
        if not re.search(own, path.relative_to(ROOT).as_posix()):
            counts[path] = sum(bool(re.search(words, line)) for line in _code(path))
    return len(+counts), counts.total()


def _conditions(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield node.test
    elif isinstance(node, ast.comprehension):
        yield from node.ifs


def branches() -> tuple[int, int]:
    """Return the number of conditions that ask for a flag, and of files that have one."""
    counts = Counter[Path]()
    for path in core():
        for condition in (each for node in ast.walk(_tree(path)) for each in _conditions(node)):
            names = {getattr(node, "attr", getattr(node, "id", None)) for node in ast.walk(condition)}
            counts[path] += bool(names & FLAGS)
    return counts.total(), len(+counts)


@cache
def _loaded() -> dict[str, int]:
    """Return the number of lines of this package that each import loads, in a process of its own."""
    code = f"""
import os, sys, torch

for number, what in enumerate({list(IMPORTS.values())}):
    if os.fork() == 0:
        exec(what)
        for name in list(sys.modules):
            print(number, name, getattr(sys.modules[name], "__file__", ""), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""
    command, paths = [sys.executable, "-W", "ignore", "-c", code], os.environ | {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, env=paths, capture_output=True, text=True, check=True)
    found: dict[str, set[str]] = {what: set() for what in IMPORTS}
    for line in ran.stdout.splitlines():
        number, name, path = line.split(" ", 2)
        if name.partition(".")[0] == "mfsdp_compile" and path.endswith(".py"):
            found[list(IMPORTS)[int(number)]].add(path)
    return {
        what: sum(len(Path(path).read_text(encoding="utf-8").splitlines()) for path in of) for what, of in found.items()
    }


def loaded(what: str) -> int:
    """Return the number of lines of this package that an import loads."""
    return _loaded()[what]


if __name__ == "__main__":
    for guest in GUESTS:
        print("{}: {} files of the core, {} lines".format(guest, *reach(guest)))
    print("branches on flags: {} in {} files".format(*branches()))
    for what in IMPORTS:
        print(f"lines loaded, {what}: {loaded(what)}")
