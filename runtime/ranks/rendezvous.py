"""Rendezvous of the ranks of a group in the store, at which they come to one verdict.

Ranks add their digests up. The last rank to arrive checks whether all are equal, and publishes the verdict. A rank that
has failed publishes one, too, and so does the rank that has waited longest for one that does not arrive. Ranks publish
what they hold only if the verdict is that they differ. In large jobs, ranks arrive at the store of their part, whose
last rank arrives at the root (:mod:`.store_tree`).

A verdict is a dictionary. Its ``kind`` is ``"same"``, ``"compare"`` (ranks differ, and find out which), ``"differs"``,
``"missing"``, ``"failed"``, or, from the watchdog in place of ranks that never arrive, ``"lost"`` and ``"astray"``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .. import compat
from . import compared
from .collective_order import ADVICE, orders
from .failed_waits import where_they_are
from .lifeline import RankLost
from .notices import conclude_once, refusal_of
from .store_tree import branch_of
from .waits import Asking
from .watchdog import ORDER, watchdog

Verdict = dict[str, Any]

SOON = timedelta(seconds=2)
"""When ranks that wait for the verdict from the last rank of their part first look for it at the root."""

LOOK = timedelta(seconds=15)
"""How often waiting ranks check whether the ranks that they wait for were refused. A refusal is believed when it is
seen twice: a program that catches the error on all ranks arrives again in the meantime."""


def failure_of(group: dist.ProcessGroup, rank: int) -> str:
    """Return the key of the error with which a rank has stopped."""
    return f"mfsdp/failure/{group.group_name}/{rank}"


def reported_failures(group: dist.ProcessGroup, ranks: Sequence[int]) -> list[str]:
    """Return the failures that these ranks have published."""
    store = compat.default_store()
    return [
        f"rank {rank} had failed with {store.get(failure_of(group, rank)).decode()}"
        for rank in ranks
        if store.check([failure_of(group, rank)])
    ]


class Rendezvous:
    """A visit of this rank to the place in the store where the ranks of a group meet for a topic.

    Args:
        outcome: What this rank brings: a ``digest``, and an ``offer`` or the digest of a ``party``; or an ``error``.
        party_size: Number of ranks that have lines in common; 0 if there are none.

    :func:`.agreement.agree` and :func:`.agreement.conclude` explain the others.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        topic: str,
        outcome: Mapping[str, Any],
        timeout: timedelta,
        *,
        epoch: int = 0,
        combine: Callable[[Sequence[Any]], Any] | None = None,
        party_size: int = 0,
        heeds_refusals: bool = False,
        what: str,
        is_last_resort: bool = False,
    ) -> None:
        self._group, self._topic, self._outcome, self._timeout = group, topic, outcome, timeout
        self._combine, self._party_size, self._what, self._is_last_resort = combine, party_size, what, is_last_resort
        self._ranks, self._me = dist.get_process_group_ranks(group), dist.get_rank()
        self._place = f"mfsdp/agree/{group.group_name}/{topic}" + (f"/{epoch}" if epoch else "")
        self._branch = branch_of(group.group_name, self._ranks)
        self._root_store = self._branch.root
        self._visit = 1
        self._look = _Look(self._root_store, self._place) if heeds_refusals else None

    @property
    def _key(self) -> str:
        return f"{self._place}/{self._visit}"

    @property
    def _part(self) -> dist.Store:
        assert self._branch.part is not None
        return self._branch.part

    def verdict(self) -> Verdict:
        """Arrive, and return the verdict of all ranks."""
        has_arrived = False
        try:
            if self._branch.part is None and (verdict := self._join()) is not None:
                return verdict
            self._visit = self._count_visit()
            has_arrived = True
            with self._watched():
                verdict = self._meet()
                if verdict["kind"] != "compare":
                    return verdict
                self._root_store.set(f"{self._key}/{self._me}", json.dumps(self._outcome))
                if self._me == self._ranks[0]:
                    self._root_store.set(f"{self._key}/compared", json.dumps(self._compare() | {"key": self._key}))
                first = self._ranks[:1]
                return await_answer(self._root_store, f"{self._key}/compared", lambda: first, self._timeout * 1.1, None)
        except (dist.DistNetworkError, OSError) as error:
            if self._branch.part is None or not self._branch.is_tree:
                raise
            why = f"the end of its process, which kept a store ({error})"
            gone = {"kind": "failed", "ranks": [self._branch.keeper], "error": why}
            if has_arrived:
                conclude_once(self._root_store, f"{self._key}/verdict", gone)
            return gone

    def check(self, verdict: Verdict, lines: Sequence[str]) -> None:
        """Raise unless the verdict is that all ranks are the same.

        Args:
            lines: What this rank holds.
        """
        if verdict["kind"] == "lost":
            order = orders().get(self._group.group_name)
            here = f"{self._what}, on rank {self._me} {order.progress}" if order is not None else self._what
            raise RankLost(
                f"{here}: {verdict['lost']}, and cannot take part. What it printed last says why. Start the job again, "
                "from its last checkpoint."
            )
        if verdict["kind"] != "same":
            raise RuntimeError(self._explained(verdict, lines))

    def _watched(self) -> Any:
        name, is_next = self._group.group_name, self._topic == ORDER
        heeds = self._look is not None
        return watchdog.asking(
            Asking(name, self._ranks, self._place, self._visit, self._what, is_next, self._is_last_resort, heeds)
        )

    def _join(self) -> Verdict | None:
        """Create or find the store of this rank's part. Return a verdict if the rank that keeps it does not arrive."""
        branch, key, address = self._branch, f"{self._key}/verdict", self._branch.address_key()
        with self._watched():
            if self._me == branch.keeper:
                branch.serve()
                return None

            def came() -> bool:
                return self._root_store.check([address]) or self._root_store.check([key])

            verdict = _poll(came, lambda: [branch.keeper], self._timeout, self._look)
            if verdict is None and self._root_store.check([address]):
                branch.join()
                return None
            if verdict is not None and verdict["kind"] == "missing":
                conclude_once(self._root_store, key, verdict)
            return verdict or dict(json.loads(self._root_store.get(key)))

    def _count_visit(self) -> int:
        """Count this rank's visits of the place. All ranks go from place to place in order, so their numbers agree."""
        key = f"{self._place}/visits/{self._me}"
        visit = self._part.add(key, 1)
        if self._look is not None:
            if (over := self._look.given_up) and self._me in over["refused"] and visit <= over["visit"]:
                visit = self._part.add(key, over["visit"] + 1 - visit)  # the others were here once more
            self._look.visit = visit
        return visit

    def _meet(self) -> Verdict:
        """Arrive, and wait for the verdict."""
        root, branch, previous = self._root_store, self._branch, f"{self._place}/{self._visit - 1}"
        if self._combine is not None:
            self._part.set(f"{self._key}/offer/{self._me}", json.dumps(self._outcome["offer"]))
            # All ranks take part in this visit, so all have read the previous offers.
            self._part.delete_key(f"{previous}/offer/{self._me}")
        brings, verdict = self._arrive()
        if verdict is not None:
            conclude_once(root, f"{self._key}/verdict", verdict)
            if verdict["kind"] == "same":  # all ranks have arrived, so they have read the previous verdict
                for name in ("all", "verdict", "compared"):
                    root.delete_key(f"{previous}/{name}")
        if branch.is_tree and not brings and verdict is None:
            return self._await_messenger()
        found = await_answer(root, f"{self._key}/verdict", self._missing, self._timeout, self._look)
        if branch.is_tree:
            self._part.set(f"{self._key}/verdict", json.dumps(found))
        if branch.is_tree and brings:
            for name in ("all", "verdict"):
                self._part.delete_key(f"{previous}/{name}")
            root.delete_key(f"{previous}/part/{branch.number}")
        return found

    def _arrive(self) -> tuple[bool, Verdict | None]:
        """Count this rank in, and add its digest: a sum over ranks is a multiple of each digest if all are equal.

        Returns:
            Whether this rank is the last one of its part, and brings the verdict there; and the verdict, if this rank
            determines it: it is the last one to arrive, or has failed.
        """
        root, branch, key, outcome = self._root_store, self._branch, self._key, self._outcome
        if "error" in outcome:
            return False, {"kind": "failed", "ranks": [self._me], "error": outcome["error"]}
        party = self._party_size
        if party and not add(root, f"{key}/{outcome['party']}", outcome["its digest"], party)[1]:
            return False, {"kind": "compare", "ranks": []}
        is_last, are_equal = add(self._part, f"{key}/all", outcome["digest"], len(branch.members()))
        if not is_last:
            return False, None
        if branch.is_tree:
            offers = self._offers(self._part, branch.members()) if self._combine is not None else []
            root.set(f"{key}/part/{branch.number}", json.dumps(offers))
            if are_equal:
                is_last, are_equal = add(root, f"{key}/all", outcome["digest"], branch.parts)
                if not is_last:
                    return True, None
        return branch.is_tree, self._combined() if are_equal else {"kind": "compare", "ranks": []}

    def _combined(self) -> Verdict:
        """Return the verdict if all ranks are equal."""
        if self._combine is None:
            return {"kind": "same", "ranks": []}
        if self._branch.is_tree:
            parts = _read(self._root_store, [f"{self._key}/part/{number}" for number in range(self._branch.parts)])
            offers = [offer for offers in parts for offer in offers]
        else:
            offers = self._offers(self._root_store, self._ranks)
        try:
            return {"kind": "same", "ranks": [], "result": self._combine(offers)}
        except Exception as error:  # the other ranks must learn of it
            return {"kind": "failed", "ranks": [self._me], "error": f"{type(error).__name__}: {error}"}

    def _offers(self, store: dist.Store, ranks: Sequence[int]) -> list[Any]:
        return _read(store, [f"{self._key}/offer/{rank}" for rank in ranks])

    def _missing(self) -> Sequence[int]:
        """Return the ranks that have not arrived, as far as that can be determined; at least one."""
        branch, visits = self._branch, f"{self._place}/visits"

        def of_part(store: dist.Store, number: int) -> list[int]:
            return [rank for rank in branch.members(number) if store.add(f"{visits}/{rank}", 0) < self._visit]

        if (found := of_part(self._part, branch.number)) or not branch.is_tree:
            return found or self._ranks[:1]
        for number in range(branch.parts):
            if number == branch.number or self._root_store.check([f"{self._key}/part/{number}"]):
                continue
            if not self._root_store.check([branch.address_key(number)]):
                return branch.members(number)
            try:
                found = of_part(branch.connect(number), number)
            except (dist.DistNetworkError, OSError):
                return branch.members(number)[:1]
            if found:
                return found
        return self._ranks[:1]

    def _await_messenger(self) -> Verdict:
        """Wait for the verdict that the last rank of the part brings from the root.

        If ranks do not arrive or fail, no rank brings it. Therefore this looks at the root, too.
        """
        root, part, key = self._root_store, self._part, f"{self._key}/verdict"
        begun, due = time.monotonic(), SOON.total_seconds()

        def came() -> bool:
            nonlocal due
            waited = time.monotonic() - begun
            if waited >= due:
                due = min(2 * due, due + LOOK.total_seconds())
                if root.check([key]):
                    part.set(key, root.get(key))
            return part.check([key])

        verdict = _poll(came, self._missing, self._timeout, self._look)
        if verdict is None:
            return dict(json.loads(part.get(key)))
        return _concluded(root, key, verdict)

    def _compare(self) -> Verdict:
        """Find out, on the first rank, which ranks differ. Waits until all have published their outcomes."""
        store, ranks = self._root_store, self._ranks
        keys = [f"{self._key}/{rank}" for rank in ranks]
        try:
            store.wait(keys, self._timeout)
        except RuntimeError:  # DistStoreError: a rank has ended in the meantime
            gone = [rank for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
            return {"kind": "missing", "ranks": gone or ranks[:1]}
        outcomes = dict(zip(ranks, _read(store, keys), strict=True))
        parties: dict[str, list[int]] = {}  # ranks that have lines in common
        for rank, outcome in outcomes.items():
            parties.setdefault(outcome.get("party", ""), []).append(rank)
        for what, alike in (("digest", [ranks]), ("its digest", parties.values())):
            for first, *others in alike:
                if differing := [rank for rank in others if outcomes[rank].get(what) != outcomes[first].get(what)]:
                    return {"kind": "differs", "first": first, "ranks": differing}
        return {"kind": "same", "ranks": []}

    def _explained(self, verdict: Verdict, lines: Sequence[str]) -> str:
        if verdict["kind"] == "astray":
            return verdict["text"] if self._topic == ORDER else f"{verdict['text']} {ADVICE}"
        topic, of, timeout = self._topic, len(self._ranks), self._timeout
        culprits = ", ".join(map(str, verdict["ranks"][:8])) + (", ..." if len(verdict["ranks"]) > 8 else "")
        if verdict["kind"] == "missing":
            failures = reported_failures(self._group, verdict["ranks"][:4])
            reports = "".join(f" Before this, {report}." for report in failures)
            if not failures and (where := where_they_are(compat.default_store(), verdict["ranks"][:4])):
                reports = f" {where}."
            return (
                f"{topic}: rank {culprits} did not arrive within {timeout}; the other ranks of {list(self._ranks)[:8]} "
                f"did.{reports}"
            )
        if verdict["kind"] == "failed":
            return f"{topic}: rank {culprits} failed with {verdict['error']}"
        first, other = both = verdict["first"], verdict["ranks"][0]
        key, store = verdict["key"], compat.default_store()
        if self._me in both:
            store.set(f"{key}/lines/{self._me}", json.dumps(list(lines)))
        store.wait([f"{key}/lines/{rank}" for rank in both], timeout)
        of_first, of_other = (json.loads(store.get(f"{key}/lines/{rank}")) for rank in both)
        most = max(len(of_first), len(of_other))
        index = next(i for i in range(most) if of_first[i : i + 1] != of_other[i : i + 1])
        shown = [compared.shown(held[index]) if index < len(held) else "nothing more" for held in (of_first, of_other)]
        difference, hint = f"rank {first} has [{shown[0]}], rank {other} has [{shown[1]}]", ""
        if shown[0] == shown[1]:
            difference = f"both have [{shown[0]}], but different things came before"
        if shown[0].startswith("values of"):
            difference = shown[0]
            hint = (
                " Nothing was written back. Write the same values on all ranks, or pass writeback=False."
                if topic == "summon_full_params"
                else " Seed all ranks alike before the model is built, or pass check_values=False if values differ on "
                "purpose."
            )
        return f"{topic}: rank {culprits} of {of} differs from rank {first}. First difference: {difference}.{hint}"


def _read(store: dist.Store, keys: list[str]) -> list[Any]:
    """Read and decode keys, in one request if the store supports that."""
    return [json.loads(told) for told in (store.multi_get(keys) if store.has_extended_api() else map(store.get, keys))]


def add(store: dist.Store, key: str, digest: str, size: int) -> tuple[bool, bool]:
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


def await_answer(
    store: dist.Store, key: str, missing: Callable[[], Sequence[int]], timeout: timedelta, look: _Look | None
) -> Verdict:
    """Wait for the verdict, from the last rank to arrive, one that has failed, or the one that waits longest.

    Args:
        missing: Returns the ranks that have not arrived.
    """
    verdict: Verdict | None = None
    if look is not None:
        verdict = _poll(lambda: store.check([key]), missing, timeout, look)
    else:
        try:
            store.wait([key], timeout)
        except RuntimeError:  # DistStoreError
            verdict = {"kind": "missing", "ranks": missing()}
    return _concluded(store, key, verdict)


def _concluded(store: dist.Store, key: str, verdict: Verdict | None) -> Verdict:
    """Return the verdict at ``key``, which becomes ``verdict`` if that is about missing ranks and there is none yet."""
    if verdict is not None and verdict["kind"] != "missing":
        return verdict
    if verdict is not None:
        conclude_once(store, key, verdict)
    return dict(json.loads(store.get(key)))


def _poll(
    came: Callable[[], bool], missing: Callable[[], Sequence[int]], timeout: timedelta, look: _Look | None
) -> Verdict | None:
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
        self._store, self._key = store, f"{place}/given up"
        self._seen: dict[int, bytes] = {}

    @property
    def given_up(self) -> Verdict | None:
        """The verdict of the last visit that was given up."""
        return json.loads(self._store.get(self._key)) if self._store.check([self._key]) else None

    def at(self, missing: Sequence[int]) -> Verdict | None:
        """Return the verdict, if there is one."""
        self.due += LOOK.total_seconds()
        over = self.given_up
        if over is not None and over["visit"] >= self.visit:
            return over
        refused = {r: self._store.get(refusal_of(r)) for r in missing if self._store.check([refusal_of(r)])}
        refused = {rank: error for rank, error in refused.items() if error}
        certain = [rank for rank, error in refused.items() if self._seen.get(rank) == error]
        self._seen = refused
        if not certain:
            return None
        verdict = {"kind": "failed", "ranks": certain[:1], "error": refused[certain[0]].decode()}
        self._store.set(self._key, json.dumps(verdict | {"visit": self.visit, "refused": list(refused)}))
        return verdict
