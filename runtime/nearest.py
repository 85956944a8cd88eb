"""Names that a user may have meant."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def did_you_mean(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``" Did you mean 'adamw'?"``, with the known name that is most like ``name``; ``""`` if none is."""
    nearest = difflib.get_close_matches(str(name), list(known), 1, cutoff)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""


def names_arguments(what: str, others: Mapping[str, str] | None = None) -> Callable[[_F], _F]:
    """Decorate a function: an error about an argument that it does not have says which one may have been meant.

    Args:
        what: Name of the function, for messages.
        others: Arguments of like functions elsewhere, each with what to use here.
    """

    def decorate(function: _F) -> _F:
        parameters = inspect.signature(function).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if unknown := [] if takes_any else [name for name in kwargs if name not in parameters]:
                name, elsewhere = unknown[0], (others or {}).get(unknown[0])
                hint = f" {elsewhere}" if elsewhere else did_you_mean(name, parameters)
                raise TypeError(f"{what} has no argument {name!r}.{hint}")
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate
