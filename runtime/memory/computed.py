"""By which operators, and from which Python numbers, a function was computed from parameters at rest.

What stays sharded is computed row by row, each row on the rank that holds it. So all ranks must compute the same: with
a number of this rank's batch (``p * loss.item()``), rows of different ranks would be combined with numbers of different
ranks. Results have a text that says how they were computed, and ranks compare it where they communicate
(:meth:`.Order.enter`): nothing is exchanged as long as it stays the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ..digests import digest

_TEXT = "mfsdp_computed"
_LONGEST = 200


class _Running(threading.local):
    text = ""


_running = _Running()


def running() -> str:
    """Return how what is about to communicate in this thread is computed; "": nothing is to be compared."""
    return _running.text


@contextlib.contextmanager
def computing(text: str) -> Iterator[None]:
    """Context in which ``text`` is computed."""
    before, _running.text = _running.text, text
    try:
        yield
    finally:
        _running.text = before


def text_of(tensor: Tensor) -> str:
    """Return how a tensor was computed; "" if this is not known, and of parameters."""
    text: str = vars(tensor).get(_TEXT, "")
    return text


def describe(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the text of a result: ``mul('weight', 0.5)``."""
    text = f"{name}({', '.join([*map(_shown, args), *(f'{key}={_shown(value)}' for key, value in kwargs.items())])})"
    return text if len(text) <= _LONGEST else f"{digest([text])[:16]}...{text[-_LONGEST // 2 :]}"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        split = getattr(value, "row_split", None)
        return text_of(value) or ("tensor" if split is None else repr(split.name))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    return repr(value)


def note(text: str, result: Any) -> None:
    """Note how the tensors in nested results were computed."""
    if isinstance(result, (list, tuple)):
        for number, each in enumerate(result):
            note(f"{text}[{number}]", each)
    elif isinstance(result, Tensor):
        result.__dict__[_TEXT] = text
