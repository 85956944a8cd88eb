"""What is about to communicate, for those who observe it or prepare for it.

Whoever moves rows of parameters between ranks says so here, and knows no observer. :mod:`.ranks.agreement` is one: it
compares what ranks are about to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from .geometry.topology import Group


class StartsCollectives(Protocol):
    """Prepares for a collective that is about to start."""

    def start(self, collective: str, *, group: Group | None = None) -> None: ...


Observer = Callable[[str, str, "str | None", str], None]
"""Takes the arguments of :func:`operation_begins`."""

T = TypeVar("T", bound=Observer)

_observers: list[Observer] = []


def observe(observer: T) -> T:
    """Decorate a function that is to be called before each operation. What it raises ends the operation."""
    _observers.append(observer)
    return observer


def operation_begins(what: str, group: str, parameter: str | None = None, computed: str = "") -> None:
    """Tell observers that an operation on parameters at rest is about to communicate, on all ranks of a group or none.

    Args:
        what: The operation, including the name of the parameter if it is one of many.
        group: Name of the group.
        parameter: Name of that parameter.
        computed: How its operand was computed, including Python numbers, if it must be the same on all ranks.

    Raises:
        Exception: What an observer raises, such as RuntimeError if other ranks are doing something else.
    """
    for observer in _observers:
        observer(what, group, parameter, computed)
