"""What compiling one of Dynamo's graphs gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mfsdp_compile.passes.pipeline import CompileRecord

from .arguments import GraphArguments


class NeedsOtherPieces(Exception):
    """A schedule divides graphs into other pieces. Their numbers would differ by rounding."""


@dataclass(frozen=True, eq=False)
class CompiledGraph:
    """One of Dynamo's graphs, compiled with a schedule.

    Args:
        record: The passes' record.
        call: Converts the arguments of Dynamo's graph.
        run: Runs it.
        refused: Units that are in no region, each with the reason, which was found while they were traced.
    """

    record: CompileRecord
    call: GraphArguments
    run: Callable[..., Any]
    refused: Mapping[str, str]
