"""Agreement between ranks: whether all of them hold the same model, or are about to do the same thing.

Ranks compare digests through the c10d key-value store, with a timeout. They add their digests up. The last rank to
arrive checks whether all are equal and publishes a verdict. A rank that has met an error publishes one too. Ranks
publish what they hold only if they differ. So an error on one rank is an error on every rank, and no rank is left
waiting in a collective. Traffic: five small requests per rank; in large jobs these go to the store of the rank's part
(:mod:`.store_tree`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .. import compat
from ..digests import digest
from ..observers import observe
from . import compared
from .collective_order import AT_REST, StepPhase, orders
from .lifeline import RankLost
from .notices import refusal_of
from .rendezvous import Rendezvous, failure_of, reported_failures
from .watchdog import ORDER, watchdog

Within = Callable[[], tuple[Sequence[int], Sequence[str]]]
"""Returns global ranks, and lines that are the same on these."""

TIMEOUT = timedelta(minutes=10)
"""How much later than the first rank another one may arrive. Loading a large model from a slow disk takes minutes."""


def agree(
    group: dist.ProcessGroup,
    topic: str,
    describe: Callable[[], Sequence[str]],
    timeout: timedelta | None = None,
    epoch: int = 0,
    within: Within | None = None,
    heeds_refusals: bool = False,
    what: str | None = None,
    is_last_resort: bool = False,
) -> None:
    """Raise on every rank of ``group`` unless ``describe()`` returns the same lines on all of them.

    Args:
        group: The ranks that take part; every one must call this.
        topic: What is compared, for messages.
        describe: Returns lines that describe what this rank holds. It may raise: this rank then raises that error, and
            the others quote it.
        timeout: How long to wait for ranks that do not arrive.
        epoch: Ranks meet only if they pass the same number.
        within: What only some ranks have in common, called after ``describe`` has returned: some of the group's ranks,
            and lines that must be the same on those. None: nothing.
        heeds_refusals: Do not wait for ranks that have failed in :func:`telling_others`; quote their error.
        what: Description of this agreement for messages about ranks that do not arrive. None: the topic.
        is_last_resort: Never let the watchdog answer for ranks that have diverged: they will arrive once they have
            failed.

    Raises:
        RuntimeError: A rank differs (the message shows the first differing line of both ranks), has failed, or did not
            arrive in time.
    """
    timeout = timeout or TIMEOUT
    failure: BaseException | None = None
    lines: Sequence[str] = ()
    some: tuple[Sequence[int], Sequence[str]] = ((), ())
    try:
        lines = describe()
        if within is not None:
            some = within()
    except BaseException as error:  # the other ranks must learn of it before it is raised here, also of an interrupt
        failure = error
    if has_others(group):
        outcome = {"digest": digest(lines), "party": digest(list(map(str, some[0]))), "its digest": digest(some[1])}
        if failure is not None:
            outcome = {"error": f"{type(failure).__name__}: {failure}"}
        rendezvous = Rendezvous(
            group,
            topic,
            outcome,
            timeout,
            epoch=epoch,
            party_size=len(some[0]),
            heeds_refusals=heeds_refusals,
            what=what or topic,
            is_last_resort=is_last_resort,
        )
        with _reaching_store(what or topic) if failure is None else contextlib.suppress(dist.DistNetworkError):
            verdict = rendezvous.verdict()
            if failure is None:
                rendezvous.check(verdict, [*lines, *some[1]])
    if failure is not None:
        raise failure


def agree_on_order(group: dist.ProcessGroup, lines: Sequence[str], epoch: int) -> None:
    """Agree that all ranks do the same thing next, which the last line names. See :func:`agree`."""
    agree(group, ORDER, lambda: lines, compat.timeout_of(group) * 1.5, epoch, what=compared.shown(lines[-1]))


@observe
def compare_operation(what: str, group: str, parameter: str | None = None, computed: str = "") -> None:
    """Compare an operation on parameters at rest that is about to communicate; see :func:`.observers.operation_begins`.

    Does nothing for a group that no sharded model uses.
    """
    if (order := orders().get(group)) is None:
        return
    number = order.numbers.get(parameter) if parameter is not None else None
    order.enter(
        StepPhase(AT_REST, what),
        lambda lines, epoch: agree_on_order(compat.process_group(group), lines, epoch),
        series=(what.replace(repr(parameter), "one"), number) if number is not None else None,
        computed=computed.replace(repr(parameter), "parameter"),
    )


def conclude(
    group: dist.ProcessGroup,
    topic: str,
    lines: Sequence[str],
    offer: Any,
    combine: Callable[[Sequence[Any]], Any],
    timeout: timedelta,
    is_last_resort: bool = False,
) -> Any:
    """Return the result of combining all ranks' offers on one rank of ``group``; the same on every rank.

    Args:
        group: The ranks that take part, more than one; every one must call this.
        topic: What is concluded, for messages.
        lines: Lines that must be equal on all ranks.
        offer: This rank's offer; plain JSON data.
        combine: Called with all offers, in the order of the ranks, on the rank that arrives last. Returns plain data.
        timeout: How long to wait for ranks that do not arrive.
        is_last_resort: See :func:`agree`.

    Raises:
        RuntimeError: On every rank: lines differ, ``combine`` failed, a rank did not arrive in time, or the store is
            gone.
    """
    outcome = {"digest": digest(lines), "offer": offer}
    rendezvous = Rendezvous(group, topic, outcome, timeout, combine=combine, what=topic, is_last_resort=is_last_resort)
    with _reaching_store(topic):
        verdict = rendezvous.verdict()
        rendezvous.check(verdict, lines)
        return verdict["result"]


@contextlib.contextmanager
def _reaching_store(what: str) -> Iterator[None]:
    """Context for requests to the store. Its loss means that a process has ended."""
    try:
        yield
    except dist.DistNetworkError as error:
        raise RankLost(
            f"{what}: the store through which ranks agree cannot be reached ({error}). The process that keeps it, rank "
            "0 or its launcher, has ended."
        ) from error


class Deferred:
    """Errors in work beside collectives. This rank still takes part in these, so that others need not wait for it.

    Attributes:
        error: The first error.
    """

    error: Exception | None = None

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Keep an error from inside the context for the end."""
        try:
            yield
        except Exception as error:
            self.error = self.error or error


@contextlib.contextmanager
def errors_for_all(group: dist.ProcessGroup, topic: str, timeout: timedelta | None = None) -> Iterator[Deferred]:
    """Raise an error from inside the context, on any rank of ``group``, on every rank. The other ranks quote it.

    A collective: all ranks leave the context together.

    Args:
        group: The ranks that take part.
        topic: What is done inside, for messages.
        timeout: How long to wait for slower ranks. None: one and a half times the group's time limit.

    Yields:
        What keeps errors for the end of the context.
    """
    failure: BaseException | None = None
    deferred = Deferred()
    try:
        yield deferred
    except BaseException as error:  # the other ranks must learn of it before it is raised here
        failure = error
    failure = failure or deferred.error

    def outcome() -> list[str]:
        if failure is not None:
            raise failure
        return []

    agree(group, topic, outcome, timeout or compat.timeout_of(group) * 1.5)


@contextlib.contextmanager
def telling_others() -> Iterator[None]:
    """Publish errors from inside the context to ranks that wait for this one in an :func:`agree` that heeds refusals.

    This is for errors that occur before it is known which ranks to agree with, such as wrong arguments that determine
    them.
    """
    if not (dist.is_initialized() and has_others(dist.group.WORLD)):
        yield
        return
    store, refusal = compat.default_store(), refusal_of(dist.get_rank())
    store.set(refusal, "")  # an earlier refusal does not count: this is another attempt
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the store's process is gone; the current error matters more
            store.set(refusal, f"{type(error).__name__}: {error}"[:2000])
        raise


def everyones(value: Any, group: dist.ProcessGroup, what: str) -> list[Any]:
    """Return the values that all ranks of ``group`` pass, in the order of the ranks. A collective; values are pickled.

    Args:
        what: What is compared, for error messages on ranks that do something else.
    """
    compare_operation(f"a comparison of {what}", group.group_name)
    found: list[Any] = [None] * dist.get_world_size(group)
    with watchdog.failed_waits.explaining(f"a comparison of {what}"):
        dist.all_gather_object(found, value, group=group)
    return found


def report_failure(group: dist.ProcessGroup, error: BaseException, is_certain: bool = True) -> None:
    """Publish that this rank has failed, and add to ``error`` what other ranks have published, which may be the cause.

    Args:
        is_certain: Whether the failure is final. If not, ranks that wait for this one keep waiting.
    """
    if not has_others(group):
        return
    try:
        me = dist.get_rank()
        reports = reported_failures(group, [rank for rank in dist.get_process_group_ranks(group) if rank != me])
        store, told = compat.default_store(), f"{type(error).__name__}: {error}"[:1000]
        store.set(failure_of(group, me), told)
        if is_certain:
            watchdog.tell_failure(store, group.group_name, told)
    except RuntimeError:  # the store's process is gone; the current error matters more
        return
    if reports and hasattr(error, "add_note"):  # Python 3.11
        error.add_note(f"Before this, {'; '.join(reports[:4])}{', and more ranks' if len(reports) > 4 else ''}.")


def forget_failure(group: dist.ProcessGroup) -> None:
    """Withdraw the failure that this rank has published."""
    if has_others(group):
        store = compat.default_store()
        store.delete_key(failure_of(group, dist.get_rank()))
        watchdog.forget_failure(store, group.group_name)


def has_others(group: dist.ProcessGroup) -> bool:
    """Whether there are other ranks to agree with: not in a group of one rank, nor if the others are simulated."""
    return dist.get_world_size(group) > 1 and not compat.is_simulated(group)
