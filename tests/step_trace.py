"""Which functions run in one eager step of one unit, in which files, and how often their reader changes the file.

    python tests/step_trace.py              of this package and of FSDP2: the table, and functions in order
    python tests/step_trace.py --calls      all calls in order, too

One unit in the middle of a model is followed through forward and backward, some steps after the first. Counted are the
product's Python functions that are called in that time; FSDP2's are those of ``torch/distributed/fsdp``. Functions are
read in the order of their first calls, each once, so that the number of a unit's parameters does not matter.
Comprehensions belong to the function around them.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import CO_GENERATOR
from itertools import groupby, pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import zoo
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from mfsdp_compile import fsdp2, fully_shard_model, passes, runtime
from mfsdp_compile.runtime import compat

LAYERS, FOLLOWED = 6, 3
"""How many units the model has, and which is followed: there are units to prefetch on both sides of it."""
STEPS = 5
"""The last is traced: what is learned or checked at first has happened by then."""
OURS = {runtime.__path__[0]: "runtime", passes.__path__[0]: "passes", str(Path(fsdp2.__file__).parent): "mfsdp_compile"}
FSDP2 = {fsdp.__path__[0]: "fsdp"}
_INNER = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}


@dataclass(frozen=True)
class Call:
    """A call of a function of the product.

    Args:
        phase: ``"forward"`` or ``"backward"``.
        depth: How many calls of the product it is inside of.
        file: Its file, from the product's folder on.
        function: Its qualified name.
        line: Its first line.
    """

    phase: str
    depth: int
    file: str
    function: str
    line: int


@dataclass(frozen=True)
class Trace:
    """The calls of one step of one unit, in order."""

    calls: Sequence[Call]

    @functools.cached_property
    def functions(self) -> list[Call]:
        """The first call of each function, in order."""
        first: dict[tuple[str, int], Call] = {}
        for call in self.calls:
            first.setdefault((call.file, call.line), call)
        return list(first.values())

    @functools.cached_property
    def files(self) -> list[str]:
        """The files, in the order of their first calls."""
        return list(dict.fromkeys(call.file for call in self.calls))

    @property
    def changes(self) -> int:
        """How often the next function that has not been read is in another file than the one before it."""
        return sum(one.file != following.file for one, following in pairwise(self.functions))

    @property
    def counts(self) -> tuple[int, int, int]:
        """Numbers of functions, of files, and of changes of file."""
        return len(self.functions), len(self.files), self.changes


def runs(calls: Sequence[Call]) -> list[list[Call]]:
    """Return calls in order, those of a phase that follow one another in one file together."""
    return [list(group) for _, group in groupby(calls, key=lambda call: (call.phase, call.file))]


class _Boundary(compat.Function):
    """Stands before or after a unit, and says when forward or backward gets there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[str], None], backward: Callable[[str], None]) -> Tensor:
        ctx.reached = backward
        forward("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.reached("backward")
        return gradient, None, None


class Followed(zoo.Plain):
    """A model that says when forward or backward gets to one of its units, and when it leaves it."""

    def __init__(self) -> None:
        super().__init__(layers=LAYERS)
        self.entered: Callable[[str], None] = _ignore
        self.left: Callable[[str], None] = _ignore

    def trunk(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if number == FOLLOWED:
                x = _Boundary.apply(x, self.entered, self.left)
                x = block(x)
                x = _Boundary.apply(x, self.left, self.entered)
            else:
                x = block(x)
        return x


def _ignore(phase: str) -> None:
    pass


class _Recorder:
    """Records calls of functions in ``folders`` from :meth:`start` to :meth:`stop`."""

    def __init__(self, folders: Mapping[str, str]) -> None:
        self.calls: list[Call] = []
        self._folders = folders
        self._phase, self._depth = "", 0
        self._generators: set[FrameType] = set()  # that have been called
        self._files: dict[str, str | None] = {}  # by their paths

    def start(self, phase: str) -> None:
        self._phase, self._depth = phase, 0
        sys.setprofile(self._event)

    def stop(self, phase: str) -> None:
        assert phase == self._phase
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or code.co_name in _INNER:
            return
        if (file := self._file(code.co_filename)) is None:
            return
        self._depth = max(self._depth + (1 if event == "call" else -1), 0)
        if event == "return" or frame in self._generators:
            return
        if code.co_flags & CO_GENERATOR:
            self._generators.add(frame)
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no qualified names
        self.calls.append(Call(self._phase, self._depth - 1, file, name, code.co_firstlineno))

    def _file(self, path: str) -> str | None:
        if path not in self._files:
            folder = next((each for each in self._folders if path.startswith(each)), None)
            self._files[path] = None if folder is None else self._folders[folder] + path.removeprefix(folder)
        return self._files[path]


def trace(shard: Callable[[nn.Module], nn.Module], folders: Mapping[str, str]) -> Trace:
    """Return the calls of one step of one unit of a model, sharded by ``shard``. Needs a process group."""
    torch.manual_seed(0)
    model = Followed()
    sharded = shard(model)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    recorder = _Recorder(folders)
    for step in range(STEPS):
        if step == STEPS - 1:
            model.entered, model.left = recorder.start, recorder.stop
        sharded(torch.randn(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Trace(recorder.calls)


def trace_ours() -> Trace:
    return trace(lambda model: fully_shard_model(model, fsdp_unit_modules=[zoo.Block]), OURS)


def trace_fsdp2() -> Trace:
    def shard(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fsdp.fully_shard(block, mesh=mesh)
        return fsdp.fully_shard(model, mesh=mesh)

    return trace(shard, FSDP2)


def table(traces: Mapping[str, Trace]) -> str:
    lines = ["| | functions | files | changes of file | calls |", "|---|---|---|---|---|"]
    for name, found in traces.items():
        lines.append("| " + " | ".join(map(str, (name, *found.counts, len(found.calls)))) + " |")
    return "\n".join(lines)


def by_file(found: Trace) -> str:
    """Return functions, runs of functions that are read one after the other, and calls of each file, in order."""
    functions, calls = Counter(call.file for call in found.functions), Counter(call.file for call in found.calls)
    read = Counter(run[0].file for run in runs(found.functions))
    lines = ["functions, runs, calls"]
    return "\n".join([*lines, *(f"{functions[file]:6}{read[file]:6}{calls[file]:7}  {file}" for file in found.files)])


def listing(calls: Sequence[Call]) -> str:
    """Return calls in order, a line for each run in one file, indented by the depth of its first."""
    lines, phase = [], ""
    for number, run in enumerate(runs(calls)):
        if run[0].phase != phase:
            lines.append(phase := run[0].phase)
        names = ", ".join(call.function.replace(".<locals>", "") for call in run)
        lines.append(f"{number:4} {'  ' * run[0].depth}{run[0].file}: {names}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", action="store_true", help="print all calls, too")
    arguments = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    traces = {"mfsdp-compile": trace_ours(), "FSDP2": trace_fsdp2()}
    print(table(traces))
    for name, found in traces.items():
        print(f"\n{name}, by file:\n{by_file(found)}\n\n{name}, functions as they are first called:")
        print(listing(found.functions))
    for name, found in traces.items() if arguments.calls else ():
        print(f"\n{name}, all calls:\n{listing(found.calls)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
