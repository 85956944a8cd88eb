"""What AOTAutograd's cache keeps of a graph that was compiled in pieces. Imports Inductor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch._functorch._aot_autograd.autograd_cache import FXGraphCacheMiss
from torch._inductor.output_code import OutputCode


class PiecesOfGraph(Protocol):
    """Code that calls the pieces of a graph. It can be pickled, without the code of the pieces."""

    def pieces(self) -> Sequence[Any]:
        """Return the pieces; see :class:`.pieces.CompiledPiece`."""

    def not_picklable(self) -> str | None:
        """Return the type of a constant that cannot be pickled, if there is one."""

    def function(self) -> Callable[[list[Any]], Any]:
        """Return the function. All pieces must have been compiled."""


class PiecesCode(OutputCode):
    """Calls the pieces of a graph.

    An entry of the cache holds the code, and the keys of its pieces in Inductor's cache. It is not used if one of them
    is no longer there.
    """

    def __init__(self, code: PiecesOfGraph) -> None:
        super().__init__()
        self._code = code
        self._run: Callable[[list[Any]], Any] | None = code.function()
        self._boxed_call = True

    def __call__(self, inputs: Any) -> Any:
        assert self._run is not None
        return self._run(inputs)

    def prepare_for_serialization(self) -> None:
        """Leave what can be pickled. Called for a copy. Where that is not possible, there is no entry."""
        if any(piece.entry is None for piece in self._code.pieces()):
            raise FXGraphCacheMiss("Inductor keeps no code of one of the pieces")
        if (kind := self._code.not_picklable()) is not None:
            raise FXGraphCacheMiss(f"the graph has a constant that is a {kind}")
        self._run = None

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        """Load the pieces of a copy that was read from the cache."""
        for piece in self._code.pieces():
            piece.compile()
        self._run = self._code.function()

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Pieces have bundles of their own."""
