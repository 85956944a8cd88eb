"""Collectives that a step has started before it failed, and whose results nothing will use.

Torch warns at the end of a program if there are some that nothing has waited for, and a later use of the same process
groups must not overtake them. A wait may take until the other ranks have failed, too. It therefore comes when the model
is reset, or when the program ends, after the connections of the group are broken.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from types import FrameType

from torch import Tensor

from .. import compat


class Outstanding:
    """Such collectives of one model."""

    def __init__(self) -> None:
        self._results: list[Tensor] = []
        _all.add(self)

    def add(self, results: Iterable[Tensor]) -> None:
        """Add what running collectives write to."""
        self._results += results

    def add_of_graphs(self, frame: FrameType | None) -> None:
        """Add those of the compiled graphs whose code is on the stack, from a frame outward.

        A wait for any other tensor does nothing.
        """
        while frame is not None:
            if compat.is_graph(frame.f_code.co_filename):
                self.add(value for value in frame.f_locals.values() if isinstance(value, Tensor))
            frame = frame.f_back

    def settle(self) -> None:
        """Wait until they have finished or failed."""
        results, self._results = self._results, []
        for result in results:
            with contextlib.suppress(RuntimeError):
                compat.wait_tensor(result)

    @staticmethod
    def of_all() -> list[Outstanding]:
        """Return those that have collectives, of all models."""
        return [each for each in list(_all) if each._results]


_all: weakref.WeakSet[Outstanding] = weakref.WeakSet()
