"""Agreement between ranks: whether all of them hold the same model, or are about to do the same thing.

Ranks compare digests through the c10d key-value store, with a timeout. They add their digests up. The last rank to
arrive checks whether all are equal and publishes a verdict. A rank that has met an error publishes one too. Ranks
publish what they hold only if they differ. So an error on one rank is an error on every rank, and no rank is left
waiting in a collective. Traffic: five small requests per rank; in large jobs these go to the store of the rank's part
(:mod:`.store_tree`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import compat
from . import compared
from .collective_order import AT_REST, StepPhase, orders
from .lifeline import RankLost
from .store_tree import Branch, branch_of
from .watchdog import ORDER, conclude_once, watchdog

__all__ = [
    "Deferred",
    "Within",
    "agree",
    "agree_on_order",
    "announce",
    "conclude",
    "errors_for_all",
    "everyones",
    "forget_failure",
    "has_others",
    "report_failure",
    "telling_others",
    "value_digest",
]

Within = Callable[[], tuple[Sequence[int], Sequence[str]]]
"""Returns global ranks, and lines that are the same on these."""

TIMEOUT = timedelta(minutes=10)
"""How much later than the first rank another one may arrive. Loading a large model from a slow disk takes minutes."""

SOON = timedelta(seconds=2)
"""When ranks that wait for the verdict from the last rank of their part first look for it at the root."""

LOOK = timedelta(seconds=15)
"""How often waiting ranks check whether the ranks that they wait for were refused. A refusal is believed when it is
seen twice: a program that catches the error on all ranks arrives again in the meantime."""


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
    ranks = dist.get_process_group_ranks(group)
    if has_others(group):
        party = _digest([str(rank) for rank in some[0]])
        outcome = {"digest": _digest(lines), "party": party, "its digest": _digest(some[1])}
        if failure is not None:
            outcome = {"error": f"{type(failure).__name__}: {failure}"}
        place = f"{topic}/{epoch}" if epoch else topic
        loss = _reaching_store(what or topic) if failure is None else contextlib.suppress(dist.DistNetworkError)
        with loss:
            verdict = _verdict(
                group,
                ranks,
                place,
                outcome,
                timeout,
                party_size=len(some[0]),
                heeds_refusals=heeds_refusals,
                what=what or topic,
                is_next=topic == ORDER,
                is_last_resort=is_last_resort,
            )
            if failure is None and verdict["kind"] != "same":
                _check_not_lost(verdict, group, what or topic)
                raise RuntimeError(_explain(verdict, group, topic, [*lines, *some[1]], timeout))
    if failure is not None:
        raise failure


def agree_on_order(group: dist.ProcessGroup, lines: Sequence[str], epoch: int) -> None:
    """Agree that all ranks do the same thing next, which the last line names. See :func:`agree`."""
    agree(group, ORDER, lambda: lines, compat.timeout_of(group) * 1.5, epoch, what=compared.shown(lines[-1]))


def announce(what: str, group: str, parameter: str | None = None) -> None:
    """Announce that an operation on parameters at rest is about to communicate, on all ranks of ``group`` or on none.

    Does nothing for a group that no sharded model uses.

    Args:
        what: The operation, including the name of the parameter if it is one of many.
        parameter: Name of that parameter.

    Raises:
        RuntimeError: Other ranks are doing something else.
    """
    if (order := orders().get(group)) is None:
        return
    number = order.numbers.get(parameter) if parameter is not None else None
    order.enter(
        StepPhase(AT_REST, what),
        lambda lines, epoch: agree_on_order(compat.process_group(group), lines, epoch),
        series=(what.replace(repr(parameter), "one"), number) if number is not None else None,
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
    ranks = dist.get_process_group_ranks(group)
    outcome = {"digest": _digest(lines), "offer": offer}
    with _reaching_store(topic):
        verdict = _verdict(group, ranks, topic, outcome, timeout, combine, what=topic, is_last_resort=is_last_resort)
        if verdict["kind"] == "same":
            return verdict["result"]
        _check_not_lost(verdict, group, topic)
        raise RuntimeError(_explain(verdict, group, topic, lines, timeout))


@contextlib.contextmanager
def _reaching_store(what: str) -> Iterator[None]:
    """Context for requests to the store. Its loss means that a process has ended."""
    try:
        yield
    except dist.DistNetworkError as error:
        raise RankLost(
            f"{what}: the store through which ranks agree cannot be reached ({error}). The process that keeps it, rank 0 or "
            "its launcher, has ended."
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
    store, refusal = compat.default_store(), _refusal_of(dist.get_rank())
    store.set(refusal, "")  # an earlier refusal does not count: this is another attempt
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the store's process is gone; the current error matters more
            store.set(refusal, f"{type(error).__name__}: {error}"[:2000])
        raise


def _refusal_of(rank: int) -> str:
    return f"mfsdp/refusal/{rank}"


def everyones(value: Any, group: dist.ProcessGroup, what: str) -> list[Any]:
    """Return the values that all ranks of ``group`` pass, in the order of the ranks. A collective; values are pickled.

    Args:
        what: What is compared, for error messages on ranks that do something else.
    """
    announce(f"a comparison of {what}", group.group_name)
    found: list[Any] = [None] * dist.get_world_size(group)
    with watchdog.explaining(f"a comparison of {what}"):
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
        reports = _reports(group, [rank for rank in dist.get_process_group_ranks(group) if rank != me])
        store, told = compat.default_store(), f"{type(error).__name__}: {error}"[:1000]
        store.set(_failure_of(group, me), told)
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
        store.delete_key(_failure_of(group, dist.get_rank()))
        watchdog.forget_failure(store, group.group_name)


def _failure_of(group: dist.ProcessGroup, rank: int) -> str:
    return f"mfsdp/failure/{group.group_name}/{rank}"


def _reports(group: dist.ProcessGroup, ranks: Sequence[int]) -> list[str]:
    """Return the failures that these ranks have published."""
    store = compat.default_store()
    return [
        f"rank {rank} had failed with {store.get(_failure_of(group, rank)).decode()}"
        for rank in ranks
        if store.check([_failure_of(group, rank)])
    ]


def has_others(group: dist.ProcessGroup) -> bool:
    """Whether there are other ranks to agree with: not in a group of one rank, nor if the others are simulated."""
    return dist.get_world_size(group) > 1 and not compat.is_simulated(group)


def _verdict(
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    topic: str,
    outcome: dict[str, Any],
    timeout: timedelta,
    combine: Callable[[Sequence[Any]], Any] | None = None,
    party_size: int = 0,
    heeds_refusals: bool = False,
    what: str = "",
    is_next: bool = False,
    is_last_resort: bool = False,
) -> dict[str, Any]:
    place = f"mfsdp/agree/{group.group_name}/{topic}"
    branch, me = branch_of(group.group_name, ranks), dist.get_rank()
    look = _Look(branch.root, place) if heeds_refusals else None
    if branch.part is None:
        with watchdog.asking(group, ranks, place, 1, what, is_next, is_last_resort):
            verdict = _join(branch, f"{place}/1/verdict", timeout, look)
        if verdict is not None:
            return verdict
    part, key = branch.part, None
    assert part is not None
    try:
        # Number of times this rank has arrived here. All ranks shard the same models in order, so they agree on it.
        visit = part.add(f"{place}/visits/{me}", 1)
        if (
            heeds_refusals
            and (over := _given_up(branch.root, place))
            and me in over["refused"]
            and visit <= over["visit"]
        ):
            visit = part.add(f"{place}/visits/{me}", over["visit"] + 1 - visit)  # the others were here once more
        key = f"{place}/{visit}"
        if look is not None:
            look.visit = visit
        with watchdog.asking(group, ranks, place, visit, what, is_next, is_last_resort):
            verdict = _meet(branch, place, visit, outcome, timeout, combine, party_size, look)
            if verdict["kind"] != "compare":
                return verdict
            branch.root.set(f"{key}/{me}", json.dumps(outcome))
            if me == ranks[0]:
                compared = _compare(branch.root, key, ranks, timeout) | {"key": key}
                branch.root.set(f"{key}/compared", json.dumps(compared))
            return _await_answer(branch.root, f"{key}/compared", lambda: ranks[:1], timeout * 1.1, None)
    except (dist.DistNetworkError, OSError) as error:
        if not branch.is_tree:
            raise
        gone = {
            "kind": "failed",
            "ranks": [branch.keeper],
            "error": f"the end of its process, which kept a store ({error})",
        }
        if key is not None:
            conclude_once(branch.root, f"{key}/verdict", gone)
        return gone


def _join(branch: Branch, verdict_key: str, timeout: timedelta, look: _Look | None) -> dict[str, Any] | None:
    """Create or find the store of this rank's part. Return a verdict if the rank that keeps it does not arrive."""
    if dist.get_rank() == branch.keeper:
        branch.serve()
        return None
    address = branch.address_key()

    def came() -> bool:
        return branch.root.check([address]) or branch.root.check([verdict_key])

    verdict = _poll(came, lambda: [branch.keeper], timeout, look)
    if verdict is None and branch.root.check([address]):
        branch.join()
        return None
    if verdict is not None and verdict["kind"] == "missing":
        conclude_once(branch.root, verdict_key, verdict)
    return verdict or dict(json.loads(branch.root.get(verdict_key)))


def _meet(
    branch: Branch,
    place: str,
    visit: int,
    outcome: dict[str, Any],
    timeout: timedelta,
    combine: Callable[[Sequence[Any]], Any] | None,
    party_size: int,
    look: _Look | None,
) -> dict[str, Any]:
    """Arrive, and wait for the verdict."""
    root, part, me, key = branch.root, branch.part, dist.get_rank(), f"{place}/{visit}"
    assert part is not None
    if combine is not None:
        part.set(f"{key}/offer/{me}", json.dumps(outcome["offer"]))
        part.delete_key(f"{place}/{visit - 1}/offer/{me}")  # all ranks take part in this visit, so all have read it

    def missing() -> Sequence[int]:
        return _missing(branch, place, visit) or branch.ranks[:1]

    brings, verdict = _arrive(branch, key, outcome, party_size, combine)
    if verdict is not None:
        conclude_once(root, f"{key}/verdict", verdict)
        if verdict["kind"] in ("same", "compare"):  # all ranks have arrived, so they have read the previous verdict
            for name in ("all", "verdict", "compared"):
                root.delete_key(f"{place}/{visit - 1}/{name}")
    if branch.is_tree and not brings and verdict is None:
        return _await_messenger(branch, f"{key}/verdict", missing, timeout, look)
    found = _await_answer(root, f"{key}/verdict", missing, timeout, look)
    if branch.is_tree:
        part.set(f"{key}/verdict", json.dumps(found))
    if branch.is_tree and brings:
        for name in ("all", "verdict"):
            part.delete_key(f"{place}/{visit - 1}/{name}")
        root.delete_key(f"{place}/{visit - 1}/part/{branch.number}")
    return found


def _missing(branch: Branch, place: str, visit: int) -> list[int]:
    """Return the ranks that have not arrived, as far as that can be determined."""

    def of_part(store: dist.Store, number: int) -> list[int]:
        return [rank for rank in branch.members(number) if store.add(f"{place}/visits/{rank}", 0) < visit]

    assert branch.part is not None
    if (found := of_part(branch.part, branch.number)) or not branch.is_tree:
        return found
    for number in range(branch.parts):
        if number == branch.number or branch.root.check([f"{place}/{visit}/part/{number}"]):
            continue
        if not branch.root.check([branch.address_key(number)]):
            return list(branch.members(number))
        try:
            found = of_part(branch.connect(number), number)
        except (dist.DistNetworkError, OSError):
            return list(branch.members(number)[:1])
        if found:
            return found
    return []


def _arrive(
    branch: Branch,
    key: str,
    outcome: dict[str, Any],
    party_size: int,
    combine: Callable[[Sequence[Any]], Any] | None,
) -> tuple[bool, dict[str, Any] | None]:
    """Count this rank in, and add its digest: a sum over ranks is a multiple of each digest if all are equal.

    Returns:
        Whether this rank is the last one of its part, and brings the verdict there; and the verdict, if this rank
        determines it: it is the last one to arrive, or has failed.
    """
    root, part = branch.root, branch.part
    assert part is not None
    if "error" in outcome:
        return False, {"kind": "failed", "ranks": [dist.get_rank()], "error": outcome["error"]}
    if party_size and not _add(root, f"{key}/{outcome['party']}", outcome["its digest"], party_size)[1]:
        return False, {"kind": "compare", "ranks": []}
    is_last, are_equal = _add(part, f"{key}/all", outcome["digest"], len(branch.members()))
    if not is_last:
        return False, None
    if branch.is_tree:
        told = _offers(part, key, branch.members()) if combine is not None else []
        root.set(f"{key}/part/{branch.number}", json.dumps(told))
        if are_equal:
            is_last, are_equal = _add(root, f"{key}/all", outcome["digest"], branch.parts)
            if not is_last:
                return True, None
    if not are_equal:
        return branch.is_tree, {"kind": "compare", "ranks": []}
    return branch.is_tree, _combined(branch, key, combine)


def _combined(branch: Branch, key: str, combine: Callable[[Sequence[Any]], Any] | None) -> dict[str, Any]:
    """Return the verdict if all ranks are equal."""
    if combine is None:
        return {"kind": "same", "ranks": []}
    if branch.is_tree:
        parts = _read(branch.root, [f"{key}/part/{number}" for number in range(branch.parts)])
        offers = [offer for offers in parts for offer in offers]
    else:
        offers = _offers(branch.root, key, branch.ranks)
    try:
        return {"kind": "same", "ranks": [], "result": combine(offers)}
    except Exception as error:  # the other ranks must learn of it
        return {"kind": "failed", "ranks": [dist.get_rank()], "error": f"{type(error).__name__}: {error}"}


def _offers(store: dist.Store, key: str, ranks: Sequence[int]) -> list[Any]:
    return _read(store, [f"{key}/offer/{rank}" for rank in ranks])


def _read(store: dist.Store, keys: list[str]) -> list[Any]:
    """Read and decode keys, in one request if the store supports that."""
    return [json.loads(told) for told in (store.multi_get(keys) if store.has_extended_api() else map(store.get, keys))]


def _add(store: dist.Store, key: str, digest: str, size: int) -> tuple[bool, bool]:
    """Add this rank and its digest to a counter.

    Both fit into one number of 62 bits, so that one request suffices. With 65,536 ranks, 28 bits of the digest are
    left.

    Returns:
        Whether this was the last of ``size`` ranks, and whether all had the same digest, as far as that is known.
    """
    counted = size.bit_length()
    token = int(digest, 16) % (1 << (62 - 2 * counted))
    total = store.add(key, (token << counted) + 1)
    is_last = total % (1 << counted) == size
    return is_last, not is_last or total >> counted == token * size


def _await_answer(
    store: dist.Store, key: str, missing: Callable[[], Sequence[int]], timeout: timedelta, look: _Look | None
) -> dict[str, Any]:
    """Wait for the verdict, from the last rank to arrive, one that has failed, or the one that waits longest.

    Args:
        missing: Returns the ranks that have not arrived.
    """
    if look is None:
        try:
            store.wait([key], timeout)
        except RuntimeError:  # DistStoreError
            conclude_once(store, key, {"kind": "missing", "ranks": missing()})
        return dict(json.loads(store.get(key)))
    verdict = _poll(lambda: store.check([key]), missing, timeout, look)
    if verdict is not None and verdict["kind"] != "missing":
        return verdict
    if verdict is not None:
        conclude_once(store, key, verdict)
    return dict(json.loads(store.get(key)))


def _await_messenger(
    branch: Branch, key: str, missing: Callable[[], Sequence[int]], timeout: timedelta, look: _Look | None
) -> dict[str, Any]:
    """Wait for the verdict that the last rank of the part brings from the root.

    If ranks do not arrive or fail, no rank brings it. Therefore this looks at the root, too.
    """
    root, part = branch.root, branch.part
    assert part is not None
    begun, due = time.monotonic(), SOON.total_seconds()

    def came() -> bool:
        nonlocal due
        waited = time.monotonic() - begun
        if waited >= due:
            due = min(2 * due, due + LOOK.total_seconds())
            if root.check([key]):
                part.set(key, root.get(key))
        return part.check([key])

    verdict = _poll(came, missing, timeout, look)
    if verdict is not None and verdict["kind"] != "missing":
        return verdict
    if verdict is not None:
        conclude_once(root, key, verdict)
    return dict(json.loads(root.get(key) if verdict is not None else part.get(key)))


def _poll(
    came: Callable[[], bool], missing: Callable[[], Sequence[int]], timeout: timedelta, look: _Look | None
) -> dict[str, Any] | None:
    """Poll until ``came()`` is true. A store's wait, split into pieces, would log a warning at the end of each.

    Returns:
        None if ``came()`` became true, else a verdict on the missing ranks.
    """
    begun = time.monotonic()
    while not came():
        waited = time.monotonic() - begun
        if look is not None and waited >= look.due and (verdict := look.at(missing())) is not None:
            return verdict
        if waited >= timeout.total_seconds():
            return {"kind": "missing", "ranks": missing()}
        time.sleep(min(max(waited / 10, 1e-3), 1.0, LOOK.total_seconds()))
    return None


class _Look:
    """Checks whether ranks that others wait for were refused.

    The rank that finds this gives up the visit for all: for ranks that look later, and for the refused ranks when they
    arrive again, having been here one time less.

    Attributes:
        due: Seconds of waiting after which to look the next time.
        visit: Number of the visit at this place.
    """

    def __init__(self, store: dist.Store, place: str) -> None:
        self.due = LOOK.total_seconds()
        self.visit = 1
        self._store, self._place = store, place
        self._seen: dict[int, bytes] = {}

    def at(self, missing: Sequence[int]) -> dict[str, Any] | None:
        """Return the verdict, if there is one."""
        self.due += LOOK.total_seconds()
        over = _given_up(self._store, self._place)
        if over is not None and over["visit"] >= self.visit:
            return over
        refused = {r: self._store.get(_refusal_of(r)) for r in missing if self._store.check([_refusal_of(r)])}
        refused = {rank: error for rank, error in refused.items() if error}
        certain = [rank for rank, error in refused.items() if self._seen.get(rank) == error]
        self._seen = refused
        if not certain:
            return None
        verdict = {"kind": "failed", "ranks": certain[:1], "error": refused[certain[0]].decode()}
        given_up = verdict | {"visit": self.visit, "refused": list(refused)}
        self._store.set(f"{self._place}/given up", json.dumps(given_up))
        return verdict


def _given_up(store: dist.Store, place: str) -> dict[str, Any] | None:
    key = f"{place}/given up"
    return json.loads(store.get(key)) if store.check([key]) else None


def _compare(store: dist.Store, key: str, ranks: Sequence[int], timeout: timedelta) -> dict[str, Any]:
    """Find out, on the first rank, which ranks differ. Waits until all have published their outcomes."""
    keys = [f"{key}/{rank}" for rank in ranks]
    try:
        store.wait(keys, timeout)
    except RuntimeError:  # DistStoreError: a rank has ended in the meantime
        return {"kind": "missing", "ranks": [rank for rank in ranks if not store.check([f"{key}/{rank}"])] or ranks[:1]}
    outcomes = dict(zip(ranks, _read(store, keys), strict=True))
    for what, alike in (("digest", [ranks]), ("its digest", _parties(outcomes))):
        for first, *others in alike:
            if differing := [rank for rank in others if outcomes[rank].get(what) != outcomes[first].get(what)]:
                return {"kind": "differs", "first": first, "ranks": differing}
    return {"kind": "same", "ranks": []}


def _parties(outcomes: Mapping[int, Mapping[str, Any]]) -> list[list[int]]:
    """Group the ranks that have lines in common."""
    found: dict[str, list[int]] = {}
    for rank, outcome in outcomes.items():
        found.setdefault(outcome.get("party", ""), []).append(rank)
    return list(found.values())


def _check_not_lost(verdict: dict[str, Any], group: dist.ProcessGroup, what: str) -> None:
    if verdict["kind"] == "lost":
        order = orders().get(group.group_name)
        here = f"{what}, on rank {dist.get_rank()} {order.progress}" if order is not None else what
        raise RankLost(
            f"{here}: {verdict['lost']}, and cannot take part. What it printed last says why. Start the job again, "
            "from its last checkpoint."
        )


def _explain(
    verdict: dict[str, Any], group: dist.ProcessGroup, topic: str, lines: Sequence[str], timeout: timedelta
) -> str:
    if verdict["kind"] == "astray":
        return str(verdict["text"])
    ranks = dist.get_process_group_ranks(group)
    culprits = ", ".join(map(str, verdict["ranks"][:8])) + (", ..." if len(verdict["ranks"]) > 8 else "")
    if verdict["kind"] == "missing":
        reports = "".join(f" Before this, {report}." for report in _reports(group, verdict["ranks"][:4]))
        return (
            f"{topic}: rank {culprits} did not arrive within {timeout}; the other ranks of {list(ranks)[:8]} "
            f"did.{reports}"
        )
    if verdict["kind"] == "failed":
        return f"{topic}: rank {culprits} failed with {verdict['error']}"
    first, other = verdict["first"], verdict["ranks"][0]
    key, store, me = verdict["key"], compat.default_store(), dist.get_rank()
    if me in (first, other):
        store.set(f"{key}/lines/{me}", json.dumps(list(lines)))
    store.wait([f"{key}/lines/{rank}" for rank in (first, other)], timeout)
    mine, its = (json.loads(store.get(f"{key}/lines/{rank}")) for rank in (first, other))
    index = next(i for i in range(max(len(mine), len(its))) if mine[i : i + 1] != its[i : i + 1])
    show = [compared.shown(held[index]) if index < len(held) else "nothing more" for held in (mine, its)]
    difference, hint = f"rank {first} has [{show[0]}], rank {other} has [{show[1]}]", ""
    if show[0] == show[1]:
        difference = f"both have [{show[0]}], but different things came before"
    if show[0].startswith("values of"):
        difference = show[0]
        hint = (
            " Seed all ranks alike before the model is built, or pass check_values=False if values differ on purpose."
        )
    return f"{topic}: rank {culprits} of {len(ranks)} differs from rank {first}. First difference: {difference}.{hint}"


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


PIECE_ROWS = {"cpu": 512}
"""Number of rows, of 8 KiB, to process at once. On the CPU, products stay in its cache. Elsewhere :data:`MANY_ROWS`."""

MANY_ROWS = 1 << 13


@torch.no_grad()
def value_digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's bits and their order, in one pass over its memory and with one copy to the CPU.

    ::

        row 1       | word | word | ... |      2,048 words of 4 bytes, times a weight of the row's own
        row 2       | word | word | ... |
        ...
        sums        | 64 bits | ...     |      hashed with SHA-256, together with what does not fill a row

    No weight is 0, and no two rows have the same weight (up to 2**31 rows, 16 TiB). A product stays below 2**63.
    Therefore any single changed word, and any exchange of two rows or words, changes a sum. Other changes do so except
    for coincidences modulo 2**64. The digest of a tensor that wraps others is one of their digests.
    """
    if tensor.is_meta:
        return "meta"
    if inner := compat.inner_tensors(tensor):
        return _digest([f"{name} {value_digest(each)}" for name, each in inner.items()])[:16]
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    height = data.numel() // 8192
    if data.storage_offset() % 4:
        data = data.clone()
    body = data[: height * 8192].view(torch.int32).view(height, 2048)
    step = PIECE_ROWS.get(data.device.type, MANY_ROWS)
    sums = torch.zeros(2048, dtype=torch.int64, device=data.device)
    products = torch.empty(min(step, height), 2048, dtype=torch.int64, device=data.device)
    for first in range(0, height, step):
        piece = body[first : first + step]
        held = products[: len(piece)]
        torch.mul(piece, _weights(first, len(piece), data.device), out=held)
        sums += held.sum(0)
    tail = data[height * 8192 :]
    return hashlib.sha256(torch.cat([sums.view(torch.uint8), tail]).cpu().numpy().tobytes()).hexdigest()[:16]


def _weights(first: int, count: int, device: torch.device) -> Tensor:
    """Return the weights of rows, [count, 1]: their mixed numbers, a permutation of 1 to 2**31 - 1."""
    low = (1 << 31) - 1
    number = torch.arange(first + 1, first + count + 1, dtype=torch.int64, device=device).bitwise_and_(low)
    for factor in (0x2C1B3C6D, 0x297A2D39):
        number ^= number >> 15
        number = (number * factor) & low
    return (number ^ (number >> 16)).view(-1, 1)
