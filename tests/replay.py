"""Process replay: does a change of the product change what it does? For refactorings, which should not.

    python tests/replay.py record FOLDER [REGEX]     before the change
    python tests/replay.py compare FOLDER [REGEX]    after it: differences, and exit status 1 if there are any

For each row of ``tests/cuda_code/cuda_rows.py`` that is computed or in the table, on the CPU and with fake other ranks,
a file gets what rank 0 announces to others in two eager steps, the code that runs the compiled graphs, in which their
schedules and all arguments of collectives are, and the graphs of the pieces that it calls. Inductor compiles nothing,
and values do not count: tests compare these. The idea is tinygrad's.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "cuda_code")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MFSDP_PROGRESS", "0")

import torch
from cuda_rows import COMPUTED, RANKS, SMALL, TABLED, Row, models
from generating import codes_are_seen, compiled_with, fake_ranks, shard
from torch import fx
from torch.utils._pytree import tree_leaves

from mfsdp_compile.backend import compile as backend
from mfsdp_compile.passes.context import phase_of
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.ranks.collective_order import Order
from mfsdp_compile.runtime.ranks.journal import Journal

STEPS = 2
_REFUSED = "# not compiled"


def recorded(row: Row, ranks: int) -> str:
    """Return what a row does, as text."""
    with fake_ranks(ranks):
        lines = [*(_eager(row) if row.setting.trains else ()), *_compiled(row)]
    text = "\n".join(lines)
    text = re.sub(r" #\d+\)", ")", text)  # how many models there were before
    return re.sub(r"^\s*(#.*(File|Annotation).*)?\n", "", text, flags=re.MULTILINE) + "\n"


def _made(row: Row) -> tuple[Any, list[Any]]:
    make, units, make_inputs = models(SMALL)[row.model]
    torch.manual_seed(0)
    torch.set_default_dtype(row.setting.dtype)
    try:
        model, inputs = make(), make_inputs()
    finally:
        torch.set_default_dtype(torch.float32)
    return shard(model, units, row.setting, "cpu"), inputs


def _eager(row: Row) -> list[str]:
    """Return what is announced."""
    model, inputs = _made(row)
    announced = ["# eager"]
    start, notes = Order.start, Journal.note

    def begin(self: Any, collective: str, *given: Any, **named: Any) -> None:
        announced.append(collective)
        start(self, collective, *given, **named)

    def note(self: Any, step: int, model: str, what: str, groups: Any, launches: Any = tuple) -> None:
        announced.append(f"    {[*launches()]} of the groups {[*groups]}")
        notes(self, step, model, what, groups, launches)

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with mock.patch.object(Order, "start", begin), mock.patch.object(Journal, "note", note):
        for _ in range(STEPS):
            for microbatch in range(row.setting.microbatches):
                model.is_last_microbatch = microbatch == row.setting.microbatches - 1
                outputs = model(*inputs)
                sum(each.sum() for each in tree_leaves(outputs)).backward()
            optimizer.step()
            optimizer.zero_grad()
            announced.append("end of the step")
    return announced


def _compiled(row: Row) -> list[str]:
    """Return the code of the compiled graphs, and the graphs of their pieces."""
    model, inputs = _made(row)
    found: list[str] = []
    pieces: dict[str, int] = {}
    prepares = compat.prepare_piece

    def prepare(module: fx.GraphModule, *given: Any) -> compat.CompiledPiece:
        text = module.print_readable(print_output=False)
        number = pieces.setdefault(text, len(pieces))
        piece = prepares(module, *given)
        found.append(f"# piece {number}, strides {piece.strides}")
        return piece

    def see(graph: fx.Graph, code: Any) -> None:
        found.extend([f"# {phase_of(graph).value}", code.source])

    options = {**row.setting.options, "passes": []}
    with (
        codes_are_seen(see),
        mock.patch.object(compat, "prepare_piece", prepare),
        mock.patch.object(backend, "compile_together"),
        mock.patch.object(compat.CompiledPiece, "run", mock.Mock()),
        torch._functorch.config.patch(enable_autograd_cache=False),
        contextlib.nullcontext() if row.setting.trains else torch.no_grad(),
    ):
        try:
            compiled_with(lambda gm, examples: backend.mfsdp(gm, examples, options=options), model, inputs)
        except Exception as error:  # some settings need a GPU
            found.append(f"{_REFUSED}, {type(error).__name__}: {error}")
    for text, number in pieces.items():
        found += [f"# graph of piece {number}", text]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("only", nargs="?", default="", help="a regular expression for names of rows")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    every = [*COMPUTED.items(), (RANKS, TABLED)]
    rows = [(ranks, row) for ranks, several in every for row in several if re.search(given.only, str(row))]
    if not rows:
        parser.error(f"no row is called {given.only!r}")
    differing = refused = 0
    for ranks, row in rows:
        file = given.folder / (re.sub(r"\W+", "_", f"{row} {ranks}") + ".txt")
        text = recorded(row, ranks)
        refused += _REFUSED in text
        if given.action == "record":
            file.write_text(text)
            print(f"{len(text.splitlines())} lines: {row}", flush=True)
            continue
        before = file.read_text()
        differing += before != text
        print(f"{'same' if before == text else 'DIFFERS'}: {row}", flush=True)
        sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), text.splitlines(True), "before", "after"))
    if given.action == "compare":
        print(f"{differing} of {len(rows)} rows differ")
    print(f"{refused} rows are not compiled here, and their errors count")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
