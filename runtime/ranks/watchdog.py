"""Detects ranks that wait for each other forever, within seconds and whatever the process group's timeout.

A rank that diverges asks the others whether they do the same (:mod:`.collective_order`), and waits. The others do not
listen, continue as usual, and wait for it in a collective. Only a timeout would end that. Therefore each process has a
thread that wakes up every second. It does nothing as long as the program makes progress. If the program stands still,
the thread

*   of a rank that waits in an agreement tells the others through the store what the rank has reached, where in the
  program, and how many phases and collectives it has begun before;
*   of any other rank checks whether there is such a rank. If this rank has begun more than the asking rank, and was not
  asked the same question, the asking rank will never start what this rank waits for: they have certainly diverged.
  A rank that waits in a collective of the program itself, such as a barrier, tells the others, too. It will never
  start what another rank waits for in the model if that one has not started the barrier.

The rank that finds this publishes it for all, answers the agreement in place of the others, and ends its own wait by
closing the connections of the model's process groups. Every rank gets an error that says which rank did what, and
where. The same happens if a rank's forward has failed before it could start what others wait for. ``model.reset()``
creates new process groups.

If a rank's process has ended (:mod:`.lifeline`), the thread of each rank that waits for it in an agreement answers in
place of the lost rank.

The thread has its own connection to the store, because a wait in the store locks the connection it uses. It costs
nothing while the program makes progress, and a request per process every few seconds while it stands still.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from .. import compat
from ..program_lines import is_in_package, program_line
from . import notices
from .collective_order import AFTER_ABORT, KEPT, Order, orders
from .failed_waits import Guarded, why_failed
from .journal import journal, on_uncaught_exceptions
from .lifeline import Lifeline
from .notices import Notice, collectives_started, conclude_once, found, found_of_another, key_of

ORDER = "Order of collectives"
"""Topic of agreements about what comes next."""

TICK = 1.0
"""Seconds between two checks for progress. Also how long a rank waits in an agreement before it tells others."""
LONGEST = 5.0
"""Maximum number of seconds between two requests to the store when nothing has moved for a while."""
EXIT_TIMEOUT = 10.0
"""Seconds that an ending program waits for its watchdog, which may be connecting to a store that is gone."""

_log = logging.getLogger("mfsdp_compile")


class Watched(Protocol):
    """The view of a sharded model that the watchdog needs."""

    name: str
    """Name of the model on all ranks."""

    @property
    def order(self) -> Order: ...

    @property
    def scopes(self) -> set[str]:
        """Names of the process groups whose ranks must learn that this model has come to a standstill."""

    @property
    def communicators(self) -> set[str]:
        """Names of all process groups that the model communicates over."""


@dataclass(eq=False)
class Asking:
    """A wait of this rank for others in an agreement.

    Args:
        group: Name of the process group.
        ranks: Ranks of the group.
        place: Where in the store ranks meet, for this topic.
        visit: Number of the visit at this place.
        what: What is to be agreed on.
        is_next: Whether that is the next step in the order of collectives.
        is_last_resort: Whether diverged ranks meet again here. Such an agreement is never answered for others.

    Attributes:
        order: Order of the group, if it has one.
    """

    group: str
    ranks: Sequence[int]
    place: str
    visit: int
    what: str
    is_next: bool
    is_last_resort: bool
    order: Order | None = field(init=False)
    thread: int = field(default_factory=threading.get_ident)
    since: float = field(default_factory=time.monotonic)
    was_told: bool = False

    def __post_init__(self) -> None:
        self.order = orders().get(self.group)

    @property
    def key(self) -> str:
        return f"{self.place}/{self.visit}"


class Watchdog:
    """The watchdog of this process."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[Watched]] = []
        self._asking: dict[int, Asking] = {}  # by thread
        self._visits: Counter[str] = Counter()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._store: dist.Store | None = None
        self._store_of: dist.Store | None = None
        self._seen: dict[Order, tuple[int, int]] = {}
        self._due: dict[Order, tuple[float, float]] = {}
        self._explained: set[str] = set()
        self._done: list[Asking] = []
        self._rests: dict[Order, tuple[str, int] | None] = {}
        self._lifeline = Lifeline()
        self._joined: dist.Store | None = None
        self._ends = threading.Event()
        self._guarded: list[Guarded] = []

    # -- the program's threads ----------------------------------------------------------------------------------------

    def watch(self, model: Watched) -> None:
        """Watch a model, so that no rank waits forever for another rank of the same model."""
        with self._lock:
            self._models = [known for known in self._models if known() is not None]
            self._models.append(weakref.ref(model))
        self._start()

    def _start(self) -> None:
        with self._lock:
            if (store := compat.default_store()) is not self._joined:
                self._joined = store
                self._lifeline.join(store)
                compat.before_destruction(lambda: self._tell_ends("had destroyed its process group", sys.exc_info()[1]))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mfsdp-watchdog", daemon=True)
                compat.on_failed_waits(self.explain)
                on_uncaught_exceptions(self._log_why_failed)
                self._thread.start()
                atexit.register(self.end)

    def end(self) -> None:
        """End the thread with the program.

        A thread that returns from the store while Python is being shut down would abort the process.
        """
        self._ends.set()
        if self._thread is not None:
            self._thread.join(EXIT_TIMEOUT)
        if dist.is_initialized():
            self._tell_ends("had ended its program", getattr(sys, "last_value", None))
        self._lifeline.leave()

    def _tell_ends(self, how: str, error: BaseException | None) -> None:
        """Publish for all models that this rank starts nothing more."""
        cause = f" with {type(error).__name__}: {error}"[:1000] if error is not None else ""
        with contextlib.suppress(RuntimeError):  # the store's process has already ended
            for order in self._live():
                notices.tell_end(compat.default_store(), order, f"{how}{cause}")

    def leave(self, model: Watched) -> None:
        """Stop watching a model before it gets new process groups, which must not be closed."""
        with self._lock:
            self._models = [known for known in self._models if known() not in (None, model)]

    def revive(self, group: str) -> None:
        """Watch models of a process group that was closed, and is connected again. Called on all its ranks."""
        self._explained.discard(group)
        if (order := orders().get(group)) is not None:
            order.revive()

    @contextlib.contextmanager
    def asking(self, asked: Asking) -> Iterator[None]:
        """Context for a wait of this rank for others in an agreement."""
        self._start()
        self._visits[asked.place] = asked.visit
        before = self._asking.get(asked.thread)
        self._asking[asked.thread] = asked
        try:
            yield
        finally:
            if asked.was_told:
                self._done.append(asked)
            if before is None:
                del self._asking[asked.thread]
            else:
                self._asking[asked.thread] = before

    @contextlib.contextmanager
    def guarding(self, group: dist.ProcessGroup, patience: float) -> Iterator[None]:
        """Context in which waits in a process group end if a rank's process does not answer for ``patience`` seconds.

        For waits that may take longer than that while all processes run, such as for a slow disk.
        """
        guarded = Guarded(group, patience)
        self._guarded.append(guarded)
        try:
            yield
        finally:
            self._guarded.remove(guarded)

    def abandon(self, group: dist.ProcessGroup, error: BaseException) -> None:
        """Leave a guarded group in which ranks wait for this one: publish why, and end all waits in it."""
        with contextlib.suppress(RuntimeError, OSError):  # the store's process is gone
            told = f"Rank {dist.get_rank()} had failed with {type(error).__name__}: {error}"[:1000]
            conclude_once(compat.default_store(), key_of(group.group_name, "abandoned"), {"text": told})
            compat.break_connections(group)

    def tell_failure(self, store: dist.Store, group: str, error: str) -> None:
        """Publish that this rank's forward or backward has failed, and that it starts nothing more."""
        if (order := orders().get(group)) is not None:
            notices.tell_end(store, order, f"had failed with {error}")

    def forget_failure(self, store: dist.Store, group: str) -> None:
        for key in (key_of(group, "failed"), notices.key_of_end(group, dist.get_rank())):
            store.set(key, "null")

    def explain(self, error: RuntimeError, what: str | None = None) -> None:
        """Raise an error that says more than the one with which a wait for a collective has ended.

        Other ranks may have ended the wait before the thread of this one has looked.

        Args:
            what: What the collective belongs to. None: what the journal says.
        """
        live = self._live()
        for order in live:
            if order.stalled is None and dist.is_initialized():
                with contextlib.suppress(RuntimeError):  # the store's process is gone
                    store = compat.default_store()
                    if (over := found(store, key_of(order.group, "over"))) and over["epoch"] == order.epoch:
                        order.stall(over["text"])
            if order.stalled is not None and order.group not in self._explained:
                self._explained.add(order.group)
                raise order.standstill() from error
        if not live or any(order.stalled is not None for order in live):
            return
        order = _main(live)
        what = what or journal.doing() or order.latest
        raise RuntimeError(
            f"A collective failed on rank {dist.get_rank()}, in {what}, {order.progress}. "
            f"{why_failed(live, self._guarded, error)} {AFTER_ABORT if order.runs_on_nccl else KEPT} where all ranks "
            f"live. The backend's error: {error}"
        ) from error

    def explain_nccl(self, error: BaseException) -> None:
        """Do the same for an error of NCCL's, which compiled code and the eager path get where they start something."""
        if isinstance(error, RuntimeError) and compat.is_of_nccl(error):
            self.explain(error)

    @contextlib.contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """Context for collectives of ``torch.distributed``; see :meth:`explain`."""
        try:
            yield
        except RuntimeError as error:
            if error.__cause__ is None:  # it was not explained yet, where it was raised
                self.explain(error, what)
            raise

    def _log_why_failed(self, error: BaseException, _: Any) -> None:
        """Say more than an error of a collective of the program itself that ends the program."""
        if (
            isinstance(error, RuntimeError)
            and compat.is_of_gloo(error)
            and dist.is_initialized()
            and (live := self._live())
        ):
            _log.error("Rank %d, %s: %s", dist.get_rank(), _main(live).progress, why_failed(live, self._guarded, error))

    # -- the watching thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # Connecting may take seconds, because torch's client sometimes retries. Do it before there is work to do.
        look = self._connection
        while True:
            try:
                look()
            except (dist.DistNetworkError, OSError):  # the store's process is gone, or this connection
                self._store = self._store_of = None
            except (RuntimeError, ValueError, KeyError):  # a process group was destroyed
                pass
            look = self.look
            if self._ends.wait(TICK):
                return

    def look(self) -> None:
        """Check once whether the program stands still, and if so, why."""
        if not dist.is_initialized():
            return
        while self._done:
            self._take_back(self._done.pop())
        for guarded in list(self._guarded):
            guarded.look(self._connection())
        now = time.monotonic()
        asked = [each for each in list(self._asking.values()) if now - each.since >= TICK]
        self._look_for_lost(asked)
        for order, models in self._live().items():
            mine = next((each for each in asked if each.order is order), None)
            if order.stalled is not None:
                if mine is not None and not mine.is_last_resort:  # it was begun before this rank had learned of it
                    self._answer(self._connection(), {mine.key}, notices.astray(order.stalled, dist.get_rank()))
                continue
            state = order.epoch, order.events
            if self._seen.get(order) != state:
                self._seen[order] = state
                self._due[order] = now, TICK
                if mine is None:
                    continue
            due, pause = self._due.get(order, (now, TICK))
            if now < due and mine is None:
                continue
            self._due[order] = now + pause, min(pause * 1.5, LONGEST)
            self._look_at(order, models, mine, next((each for each in asked if each.thread == order.thread), None))

    def _look_for_lost(self, asked: Sequence[Asking]) -> None:
        """Answer agreements in place of ranks whose processes have ended."""
        store = self._connection()
        self._lifeline.look(store)
        for each in asked:
            if lost := self._lifeline.lost(store, each.ranks):
                told = notices.last_told(store, {order.group for order in self._live()}, lost[0].rank)
                text = str(lost[0]) if told is None else f"{lost[0]} {told['progress']}"
                self._answer(store, {each.key}, {"kind": "lost", "ranks": [lost[0].rank], "lost": text})

    def _look_at(self, order: Order, models: list[Watched], mine: Asking | None, any_of_mine: Asking | None) -> None:
        store = self._connection()
        if mine is not None and (mine.is_next or mine.thread == order.thread):
            self._tell(store, order, mine)
        self._tell_rest(store, order)
        own = {mine.key} if mine is not None and not mine.is_last_resort else set[str]()
        scopes = set().union(*(model.scopes for model in models)) | {order.group}
        for scope in scopes:
            if not store.check([key_of(scope, "notice")]):
                continue
            over = found(store, key_of(scope, "over"))
            if over is not None and (scope != order.group or over["epoch"] == order.epoch):
                self._answer(store, own, notices.astray(over["text"], over["rank"]))
                self._end(order, over["text"], set())
                return
        if not store.check([key_of(order.group, "notice")]):
            return
        begun = order.events + (mine is not None and mine.is_next)
        failed = found_of_another(store, order, "failed")
        if failed is not None and _waits_for(failed, order, models, begun, mine is not None):
            # Ranks that have met since the failure have begun another epoch.
            text = notices.never_starts(failed, _here(order, any_of_mine)) + notices.other_steps(failed, order.steps)
            self._conclude(store, order, models, own, text, failed["rank"], set())
            return
        rest = found_of_another(store, order, "rest")
        if rest is not None and _cannot_meet(rest, order, models):
            text = notices.rests(rest, _here(order, any_of_mine)) + notices.other_steps(rest, order.steps)
            self._conclude(store, order, models, own, text, rest["rank"], set())
            return
        ask = found_of_another(store, order, "ask")
        if ask is None:
            return
        is_past = order.events >= ask["number"]
        is_elsewhere = (
            any_of_mine is not None and any_of_mine.place != ask["place"] and ask["rank"] in any_of_mine.ranks
        )
        wait = None if is_past or is_elsewhere else self._other_wait(order, ask)
        if not (is_past or is_elsewhere or wait) or self._visits[ask["place"]] >= ask["visit"]:
            return  # read the visits last: this rank was asked before it could begin more
        keys = own if ask["is last resort"] else own | {f"{ask['place']}/{ask['visit']}"}
        text = notices.diverged(ask, _here(order, any_of_mine, wait)) + notices.other_steps(ask, order.steps)
        self._conclude(store, order, models, keys, text, ask["rank"], {wait} if wait else set())

    def _tell(self, store: dist.Store, order: Order, mine: Asking) -> None:
        """Tell other ranks that this one is waiting."""
        frames = sys._current_frames()
        told = notices.come_so_far(order) | {
            "number": order.events + 1,
            "what": mine.what,
            "after": order.latest,
            "line": program_line(frames.get(mine.thread)) or program_line(frames.get(order.thread)),
            "place": mine.place,
            "visit": mine.visit,
            "is last resort": mine.is_last_resort,
        }
        notices.offer(store, order.group, "ask", told)
        mine.was_told = True

    def _take_back(self, asked: Asking) -> None:
        """Withdraw what others were told about a wait that has ended."""
        store, key = self._connection(), key_of(asked.group, "ask")
        ask = found(store, key)
        if ask is not None and (ask["rank"], ask["place"], ask["visit"]) == (dist.get_rank(), asked.place, asked.visit):
            store.set(key, "null")

    def _tell_rest(self, store: dist.Store, order: Order) -> None:
        """Tell others in which collective of the program itself this rank waits, if it did when looked at before."""
        frame = sys._current_frames().get(order.thread)
        name = compat.waits_in(frame) if not is_in_package(frame) else None
        rest = (name, compat.collectives_started(compat.process_group(name))) if name is not None else None
        before, self._rests[order] = self._rests.get(order), rest
        if rest is None or rest != before:
            return
        told = notices.come_so_far(order) | {"group": name, "line": program_line(frame)}
        notices.publish(store, order.group, "rest", told)

    def _other_wait(self, order: Order, ask: Notice) -> str | None:
        """Return the process group of a collective of the program itself in which this rank waits for the asking rank.

        None if it does not wait in one, or the asking rank has started that collective.
        """
        name = compat.waits_in(sys._current_frames().get(order.thread))
        if name is None or name not in ask["counts"]:
            return None
        group = compat.process_group(name)
        is_ahead = compat.collectives_started(group) > ask["counts"][name]
        return name if is_ahead and ask["rank"] in dist.get_process_group_ranks(group) else None

    def _conclude(
        self,
        store: dist.Store,
        order: Order,
        models: list[Watched],
        keys: set[str],
        text: str,
        rank: int,
        more: set[str],
    ) -> None:
        """Publish the finding for all ranks, answer in place of those that will not arrive, and end this rank's wait.

        Args:
            keys: Keys of agreements that some ranks wait in.
            rank: The rank that diverged.
            more: Additional process groups that this rank waits in.
        """
        for scope in {order.group}.union(*(model.scopes for model in models)):
            notices.publish(store, scope, "over", {"epoch": order.epoch, "text": text, "rank": rank})
        self._answer(store, keys, notices.astray(text, rank))
        self._end(order, text, more)

    def _answer(self, store: dist.Store, keys: set[str], verdict: Notice) -> None:
        for key in keys:
            for answer in ("verdict", "compared"):
                conclude_once(store, f"{key}/{answer}", verdict)

    def _end(self, order: Order, text: str, more: set[str]) -> None:
        """End the wait of this rank."""
        order.stall(text)
        _log.error("Rank %d: %s", dist.get_rank(), order.standstill())
        if order.was_aborted:
            self._meet_before_abort(order)
        with self._lock:
            groups = []
            for name in more.union(*(model.communicators for model in self._live().get(order, []))):
                with contextlib.suppress(RuntimeError, ValueError, KeyError):  # it was destroyed
                    groups.append(compat.process_group(name))
            compat.break_connections(*groups)

    def _meet_before_abort(self, order: Order) -> None:
        """Wait until all ranks that live are about to abort their communicators.

        A rank whose peer aborts long before has an error of NCCL's, at which torch ends the process, unless
        ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` is 0.
        """
        with contextlib.suppress(RuntimeError, KeyError, OSError):  # a group, a rank or the store is gone
            prefix = key_of(order.group, f"aborts/{order.epoch}")
            self._connection().set(f"{prefix}/{dist.get_rank()}", "")
            keys = [f"{prefix}/{rank}" for rank in compat.known_groups()[order.group]]
            self._connection().wait(keys, timedelta(seconds=LONGEST + 2 * TICK))

    # -- what is watched ----------------------------------------------------------------------------------------------

    def _live(self) -> dict[Order, list[Watched]]:
        found: dict[Order, list[Watched]] = {}
        for reference in list(self._models):
            if (model := reference()) is not None:
                found.setdefault(model.order, []).append(model)
        return found

    def _connection(self) -> dist.Store:
        default = compat.default_store()
        if self._store is None or self._store_of is not default:
            self._store, self._store_of = compat.another_connection(default), default
        return self._store


def _here(order: Order, mine: Asking | None, wait: str | None = None) -> str:
    """Describe what this rank is doing.

    It waits in an agreement, in a collective of the program itself over a process group, or in one of the model.
    """
    if mine is not None:
        what = mine.what if mine.is_next else repr(mine.what)
    elif wait is not None:
        what = f"a collective over process group {wait}"
    else:
        what = journal.doing() or order.latest
    line = program_line(sys._current_frames().get(order.thread))
    at = f", at {line}" if line else ""
    return f"rank {dist.get_rank()} has come as far as {order.latest}, {order.progress}, and waits in {what}{at}"


def _waits_for(failed: Notice, order: Order, models: Collection[Watched], begun: int, asks: bool) -> bool:
    """Whether this rank waits for something of the models that a rank that has failed has not begun.

    Collectives of the program itself do not count. A program that handles the error may go on with them on all ranks.

    Args:
        failed: What that rank has told.
        begun: Number of events that this rank has begun.
        asks: Whether this rank waits in an agreement.
    """
    counts = _counts_for(models, failed)
    if asks or is_in_package(sys._current_frames().get(order.thread)):
        return begun > failed["number"] or _has_started_beyond(counts)
    return journal.has_started_beyond(counts, {model.name for model in models})


def _cannot_meet(rest: Notice, order: Order, models: Collection[Watched]) -> bool:
    """Whether this rank and one that waits in a collective of the program itself wait for each other.

    The other rank waits until this one starts that collective. This one waits for a collective of the models that the
    other has not started, or that has the number of the other one.

    Args:
        rest: What the other rank has told.
    """
    started, counts, group = collectives_started(), rest["counts"], rest["group"]
    if group not in started or not is_in_package(sys._current_frames().get(order.thread)):
        return False
    if started[group] >= counts[group]:
        return journal.began_with(group, counts[group], {model.name for model in models})
    return _has_started_beyond(_counts_for(models, rest))


def _counts_for(models: Collection[Watched], told: Notice) -> dict[str, int]:
    """Return how many collectives another rank has told of, in each process group of the models that it is in."""
    known, groups = compat.known_groups(), set().union(*(model.communicators for model in models))
    counts: dict[str, int] = told["counts"]
    return {name: counts[name] for name in groups & counts.keys() if told["rank"] in known.get(name, ())}


def _has_started_beyond(counts: dict[str, int]) -> bool:
    """Whether this rank has started more collectives in a process group than ``counts`` has for it."""
    started = collectives_started()
    return any(started[name] > count for name, count in counts.items())


def _main(live: Collection[Order]) -> Order:
    """Return the order of the model that is trained."""
    return max(live, key=lambda order: order.steps)


watchdog = Watchdog()
"""The watchdog of this process."""
