"""``MFSDP_DEBUG_DIR``: write every graph, before the first pass and after each pass, as runnable Python.

``graphs/rank-0/00/dynamo-0.py``          Dynamo's graph, before the first pass
``graphs/rank-0/00/dynamo-1-unshard.py``  after the pass of this name
``graphs/rank-0/00/joint-...``            forward and backward, before the partition
``graphs/rank-0/00/forward-...``, ``backward-...``, ``inference-...``
``graphs/rank-0/00/passes.txt``           what each pass reported, and how it changed the schedule

Each module defines ``forward``, which takes the inputs of the graph. Its collectives are real, so all ranks must run
the same module.
"""

from __future__ import annotations

import io
import itertools
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx

from mfsdp_compile.passes import readable, unshard
from mfsdp_compile.passes.context import Report
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.program_lines import warn
from mfsdp_compile.runtime.schedule.phase import Phase
from mfsdp_compile.runtime.untrusted_files import new_file

_numbers = itertools.count()


class GraphFolder:
    """Writes one of Dynamo's graphs, and the graphs that are made from it, to a folder.

    Args:
        root: The folder that ``MFSDP_DEBUG_DIR`` names.
        path: The folder in it for these graphs; created at the first write.
        subject: Human-readable description of the graphs.
    """

    def __init__(self, root: Path, path: str, subject: str) -> None:
        self._debug_folder = root
        self._path = path
        self._subject = subject
        self._passes = ""
        self._counts: dict[str, int] = {}

    @staticmethod
    def from_environment(subject: str) -> GraphFolder | None:
        """Create a folder if ``MFSDP_DEBUG_DIR`` is set, otherwise return None."""
        folder = os.environ.get("MFSDP_DEBUG_DIR")
        if not folder:
            return None
        rank = dist.get_rank() if dist.is_initialized() else 0
        return GraphFolder(Path(folder), f"graphs/rank-{rank}/{next(_numbers):02}", subject)

    def __call__(self, phase: Phase | None, graph: fx.Graph, report: Report | None) -> None:
        """Write a graph. A failure is only a warning, because training must go on."""
        try:
            self._write(phase, graph, report)
        except Exception as error:
            folder = self._debug_folder / self._path
            warn(f"MFSDP_DEBUG_DIR: a graph could not be written to {folder}: {error}", RuntimeWarning, by=None)

    def _write(self, phase: Phase | None, graph: fx.Graph, report: Report | None) -> None:
        kind = phase.value if phase is not None else "dynamo"
        if report is None:
            self._counts[kind] = 0  # compiled again
        number = self._counts[kind]
        self._counts[kind] += 1
        name = f"{kind}-{number}" + (re.sub(r"[^\w-]", "_", f"-{report.name}") if report is not None else "")
        what = f"after pass {report.name!r}" if report is not None else "before the passes"
        lines = _lines_of(report) if report is not None else []
        if phase is None and report is None:  # only the built-in passes use markers; parameters are whole here
            marked = compat.copy_graph_module(graph.owning_module)
            lines = [f"{unshard.erase_markers(marked)} markers of parameters are left out."]
            graph = marked.graph
        text, constants = readable.source(graph, [f"{kind.capitalize()} graph of {self._subject}, {what}.", "", *lines])
        self._put(f"{name}.py", text.encode())
        if constants:
            stream = io.BytesIO()
            torch.save(constants, stream)
            self._put(f"{name}.pt", stream.getvalue())
        self._passes += "\n".join([f"{name}.py", *(f"    {line}" for line in lines), "", ""])
        self._put("passes.txt", self._passes.encode())

    def _put(self, name: str, content: bytes) -> None:
        with new_file(self._debug_folder, f"{self._path}/{name}") as file:
            file.write(content)


def _lines_of(report: Report) -> list[str]:
    lines = [f"{report.name}, {report.seconds * 1e3:.1f} ms", *(f"    {line}" for line in report.lines)]
    if report.changes:
        lines += ["Schedule:", *(f"    {line}" for line in report.changes)]
    return lines
