"""Detects ranks that wait for each other forever, within seconds and whatever the process group's timeout.

A rank that diverges asks the others whether they do the same (:mod:`.collective_order`), and waits. The others do not
listen, continue as usual, and wait for it in a collective. Only a timeout would end that. Therefore each process has a
thread that wakes up twice a second. It does nothing as long as the program makes progress. If the program stands
still, the thread

*   of a rank that waits in an agreement tells the others through the store what the rank has reached, where in the
  program, and how many phases and collectives it has begun before (:mod:`.waits`). This holds for all agreements:
  those about what comes next, and those with which a save, a load, an export or a meeting begins;
*   of every rank checks whether there is such a rank, and whether this one can still come to its agreement. It cannot
  if it waits for that rank in another agreement. Nor can it if it has begun more than that rank, without having come
  to the agreement: the other one will never start what this one waits for. They have certainly diverged. A rank that
  computes, for however long, has done neither.
  A rank that waits in a collective of the program itself, such as a barrier, tells the others, too. It will never
  start what another rank waits for in the model if that one has not started the barrier.

The rank that finds this publishes it for all, answers the agreement in place of the others, and ends its own wait by
closing the connections of the model's process groups. Every rank gets an error that says which rank did what, and
where. The same happens if a rank's forward has failed before it could start what others wait for. ``model.reset()``
creates new process groups.

If a rank's process has ended (:mod:`.lifeline`), the thread of each rank that waits for it in an agreement answers in
place of the lost rank.

The thread has its own connection to the store, because a wait in the store locks the connection it uses. It costs
nothing while the program makes progress, and some requests per process every second while it stands still, or fewer in
large jobs.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

from .. import compat
from ..program_lines import is_in_package, program_line
from . import notices
from .collective_order import Order, orders
from .failed_waits import FailedWaits
from .journal import journal, on_uncaught_exceptions
from .lifeline import Lifeline
from .notices import Notice, collectives_started, conclude_once, found, found_of_another, key_of
from .outstanding import Outstanding
from .places import Places
from .waits import Asking, Waits, key_of_ask, main_order

ORDER = "Order of collectives"
"""Topic of agreements about what comes next."""

TICK = 0.5
"""Seconds between two checks for progress. Also how long a rank waits in an agreement before it tells others."""
LONGEST = 1.0
"""Maximum number of seconds between two looks at the store when nothing has moved for a while, except in large jobs."""
LOOKS = 1000
"""How often per second all ranks together look at the store at most. A look takes some ten requests."""
TOGETHER = 7.0
"""Seconds to wait for other ranks that are about to abort their communicators."""
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


Watching = dict[Order, list[Watched]]
"""The models that exist, by order."""


class Watchdog:
    """The watchdog of this process."""

    def __init__(self) -> None:
        self._models: list[weakref.ref[Watched]] = []
        self._waits = Waits()
        self.failed_waits = FailedWaits(self._live)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closing = threading.Lock()  # held while connections are closed, or made again
        self._store: dist.Store | None = None
        self._store_of: dist.Store | None = None
        self._seen: dict[Order, tuple[int, int]] = {}
        self._moved: dict[Order, float] = {}  # when each was last seen to have begun something
        self._due, self._pause = 0.0, TICK
        self._rests: dict[Order, tuple[str, int] | None] = {}
        self._places = Places()
        self._lifeline = Lifeline(lambda: self._places.said(_thread(self._live())))
        self._joined: dist.Store | None = None
        self._ends = threading.Event()

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
                compat.before_destruction(
                    lambda: self._end_models("had destroyed its process group", sys.exc_info()[1])
                )
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mfsdp-watchdog", daemon=True)
                compat.on_failed_waits(self.failed_waits.explain)
                on_uncaught_exceptions(self.failed_waits.uncaught)
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
            self._end_models("had ended its program", getattr(sys, "last_value", None))
        self._lifeline.leave()

    def _end_models(self, how: str, error: BaseException | None) -> None:
        """Publish for all models that this rank starts nothing more, and wait for what failed steps have started."""
        cause = f" with {type(error).__name__}: {error}"[:1000] if error is not None else ""
        with contextlib.suppress(RuntimeError):  # the store's process has already ended
            for order in set(orders().values()):  # others may still have models that this rank has deleted
                notices.tell_end(compat.default_store(), order, f"{how}{cause}", is_over=True)
        if left := Outstanding.of_all():
            for order, models in self._live().items():
                if not order.runs_on_nccl:  # whose waits do not block
                    self._break(set().union(*(model.communicators for model in models)))
            for each in left:
                each.settle()

    def leave(self, model: Watched) -> None:
        """Stop watching a model before it gets new process groups, which must not be closed."""
        with self._lock:
            self._models = [known for known in self._models if known() not in (None, model)]
        self.failed_waits.outstanding.settle()

    def reconnect(self, group: dist.ProcessGroup) -> bool:
        """Connect a process group again that was closed, and watch its models. Called on all its ranks.

        Returns:
            Whether that was possible.
        """
        with self._closing:  # else the thread could close the new connections for a finding of before
            if not compat.reconnect(group):
                return False
            self.failed_waits.forget(group.group_name)
            if (order := orders().get(group.group_name)) is not None:
                order.revive()
            return True

    @contextlib.contextmanager
    def asking(self, asked: Asking) -> Iterator[None]:
        """Context for a wait of this rank for others in an agreement."""
        self._start()
        with self._waits.asking(asked):
            yield

    def tell_failure(self, store: dist.Store, group: str, error: str) -> None:
        """Publish that this rank's forward or backward has failed, and that it starts nothing more."""
        if (order := orders().get(group)) is not None:
            notices.tell_end(store, order, f"had failed with {error}", is_over=False)

    def forget_failure(self, store: dist.Store, group: str) -> None:
        for key in (key_of(group, "failed"), notices.key_of_end(group, dist.get_rank())):
            store.set(key, "null")

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
        self._places.note(_threads(self._live()))
        self._waits.take_back(self._connection())
        for guarded in list(self.failed_waits.guarded):
            guarded.look(self._connection())
        asked, live = self._waits.longer_than(TICK), self._live()
        self._look_for_lost(asked)
        for order in live:
            mine = next((each for each in asked if each.order is order), None)
            if order.stalled is not None and mine is not None:  # it was begun before this rank had learned of it
                self._answer(self._connection(), _answerable(mine), notices.astray(order.stalled, dist.get_rank()))
        seen, self._seen = self._seen, {order: (order.epoch, order.events) for order in live}
        now = time.monotonic()
        self._moved = {o: self._moved.get(o, now) if seen.get(o) == self._seen[o] else now for o in live}
        if seen != self._seen:
            self._due, self._pause = now, TICK
            if not asked:
                return
        if now < self._due:
            return
        self._due = now + self._pause
        self._pause = min(self._pause * 1.5, max(LONGEST, dist.get_world_size() / LOOKS))
        mine = _in_program(asked, live)
        self._look_at_asks(live, mine)
        for order in set(orders().values()) - live.keys():  # other ranks may not have deleted its models yet
            if order.group in compat.known_groups():
                self._tell_rest(self._connection(), order)
        for order, models in live.items():
            if order.stalled is None:
                self._look_at(order, models, mine)

    def _look_for_lost(self, asked: Sequence[Asking]) -> None:
        """Answer agreements in place of ranks whose processes have ended."""
        store = self._connection()
        self._lifeline.look(store)
        for each in asked:
            if lost := self._lifeline.lost(store, each.ranks):
                told = notices.last_told(store, {order.group for order in self._live()}, lost[0].rank)
                text = str(lost[0]) if told is None else f"{lost[0]} {told['progress']}"
                self._answer(store, {each.key}, {"kind": "lost", "ranks": [lost[0].rank], "lost": text})

    def _look_at_asks(self, live: Watching, mine: Asking | None) -> None:
        """Find a rank that waits in an agreement for this one, which waits for that rank in something else."""
        store = self._connection()
        if mine is not None and self._waits.is_waiting(store, mine):
            self._waits.tell(store, mine, live)
        for ask in self._waits.of_others(store):
            is_past = any(
                order.stalled is None
                and order.epoch == ask["next"].get(order.group, (None, 0))[0]
                and order.events >= ask["next"][order.group][1]
                for order in live
            )
            is_elsewhere = (
                mine is not None
                and mine.place != ask["place"]
                and ask["rank"] in mine.ranks
                and self._waits.is_waiting(store, mine)
            )
            wait = None if is_past or is_elsewhere else _other_wait(live, ask)
            if not (is_past or is_elsewhere or wait) or self._waits.was_asked(ask):
                continue  # read last: this rank was asked before it could begin more
            order = self._order_with(live, ask)
            text = notices.diverged(ask, _here(order, mine, wait)) + notices.other_steps(ask, order)
            failed = found(store, key_of(order.group, "failed")) if order is not None else None
            if order is not None and failed is not None and failed["epoch"] == order.epoch:  # that is the cause
                text = notices.never_starts(failed, notices.asks(ask)) + notices.other_steps(ask, order)
            keys = _answerable(mine) | (set() if ask["is last resort"] else {key_of_ask(ask)})
            self._conclude(live, order, keys, text, ask["rank"], {wait} if wait else set())
            return

    def _look_at(self, order: Order, models: list[Watched], mine: Asking | None) -> None:
        """Look for what other ranks have found, and for ranks that will start nothing of what this one waits for."""
        store = self._connection()
        self._tell_rest(store, order)
        scopes = set().union(*(model.scopes for model in models)) | {order.group}
        for scope in scopes:
            if not store.check([key_of(scope, "notice")]):
                continue
            over = found(store, key_of(scope, "over"))
            if over is not None and (scope != order.group or over["epoch"] == order.epoch):
                self._end(order, over["text"], set())
                if mine is not None and over["rank"] in mine.ranks:
                    self._answer(store, _answerable(mine), notices.astray(over["text"], over["rank"]))
                return
        if not store.check([key_of(order.group, "notice")]):
            return
        live = {order: models}
        failed = found_of_another(store, order, "failed")
        is_ahead = failed is not None and self._waits_for(store, failed, order, models, mine)
        # Read again: ranks that meet after a failure withdraw it before they begin more, and begin another epoch.
        if is_ahead and (failed := found_of_another(store, order, "failed")) is not None:
            text = notices.never_starts(failed, _here(order, mine)) + notices.other_steps(failed, order)
            self._conclude(live, order, _answerable(mine), text, failed["rank"], set())
            return
        rest = found_of_another(store, order, "rest")
        if rest is not None and _cannot_meet(rest, order, models):
            text = notices.rests(rest, _here(order, mine)) + notices.other_steps(rest, order)
            self._conclude(live, order, _answerable(mine), text, rest["rank"], set())

    def _waits_for(
        self, store: dist.Store, failed: Notice, order: Order, models: Collection[Watched], mine: Asking | None
    ) -> bool:
        """Whether this rank waits for something of the models that a rank that has failed has not begun.

        Collectives of the program itself do not count. A program that handles the error may go on with them on all
        ranks, and one of them may then be late, for an agreement as well. A rank that is gone comes to nothing.

        Args:
            failed: What that rank has told.
            mine: The agreement that this rank waits in, if it does.
        """
        counts = _counts_for(models, failed)
        of_models = journal.has_started_beyond(counts, {model.name for model in models})
        if mine is not None and failed["rank"] in mine.ranks:
            # An agreement of other models is for what was told of those: these may stay usable.
            if failed["is over"] and mine.order in (None, order) and self._waits.is_waiting(store, mine):
                return True
            return of_models or order.events + (mine.is_next and mine.order is order) > failed["number"]
        # One that moves, or has only just stopped, may be on its way to an agreement.
        if is_in_package(order.thread) and self._places.stood(order.thread) >= TICK:
            return order.events > failed["number"] or _has_started_beyond(counts)
        return of_models

    def _tell_rest(self, store: dist.Store, order: Order) -> None:
        """Tell others in which collective of the program itself this rank waits, if it did when looked at before."""
        name = compat.waits_in(order.thread) if not is_in_package(order.thread) else None
        rest = (name, compat.collectives_started(compat.process_group(name))) if name is not None else None
        before, self._rests[order] = self._rests.get(order), rest
        if rest is None or rest != before:
            return
        told = notices.come_so_far(order) | {"group": name, "line": program_line(order.thread)}
        notices.publish(store, order.group, "rest", told)

    def _order_with(self, live: Collection[Order], ask: Notice) -> Order | None:
        """Return the order in which this rank and one that asks wait for each other.

        It is that of the group that asks, if models have one. Otherwise it is, of those that both ranks have, the one
        that moved last: the model that has taken the most steps may be one that the program no longer uses.
        """
        known = compat.known_groups()
        shared = [each for each in live if each.stalled is None and ask["rank"] in known.get(each.group, ())]
        return max(
            shared,
            key=lambda order: (order.group == ask["group"], self._moved.get(order, 0.0), order.steps),
            default=None,
        )

    def _conclude(
        self, live: Watching, order: Order | None, keys: set[str], text: str, rank: int, more: set[str]
    ) -> None:
        """Publish the finding for all ranks, answer in place of those that will not arrive, and end this rank's wait.

        Args:
            order: Order of the models that this rank and the other one have. None: they have none yet.
            keys: Keys of agreements that some ranks wait in.
            rank: The rank that diverged.
            more: Additional process groups that this rank waits in.
        """
        store = self._connection()
        if order is not None:
            for scope in {order.group}.union(*(model.scopes for model in live[order])):
                notices.publish(store, scope, "over", {"epoch": self._seen[order][0], "text": text, "rank": rank})
            self._end(order, text, more)
        self._answer(store, keys, notices.astray(text, rank))  # last: then the program goes on, perhaps with a reset

    def _answer(self, store: dist.Store, keys: set[str], verdict: Notice) -> None:
        for key in keys:
            for answer in ("verdict", "compared"):
                conclude_once(store, f"{key}/{answer}", verdict)

    def _end(self, order: Order, text: str, more: set[str]) -> None:
        """End the wait of this rank, unless the program has got an error in another way, and has started over."""
        with self._closing:
            if order.epoch != self._seen[order][0]:
                return
            order.stall(text)
            _log.error("Rank %d: %s", dist.get_rank(), order.standstill())
            if order.was_aborted:
                self._meet_before_abort(order)
            with self._lock:
                self._break(more.union(*(model.communicators for model in self._live().get(order, []))))

    def _break(self, names: set[str]) -> None:
        groups = []
        for name in names:
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
            self._connection().wait(keys, timedelta(seconds=TOGETHER))

    # -- what is watched ----------------------------------------------------------------------------------------------

    def _live(self) -> Watching:
        found: Watching = {}
        for reference in list(self._models):
            if (model := reference()) is not None:
                found.setdefault(model.order, []).append(model)
        return found

    def _connection(self) -> dist.Store:
        default = compat.default_store()
        if self._store is None or self._store_of is not default:
            self._store, self._store_of = compat.another_connection(default), default
        return self._store


def _in_program(asked: Sequence[Asking], live: Collection[Order]) -> Asking | None:
    """Return the agreement that the program waits in: not a thread beside it, which ends nobody's wait."""
    threads = _threads(live)
    return next((each for each in asked if each.is_next or each.thread in threads), None)


def _thread(live: Collection[Order]) -> int:
    """Return the thread that runs the program."""
    order = main_order(live)
    return order.thread if order is not None else threading.main_thread().ident or 0


def _threads(live: Collection[Order]) -> set[int]:
    """Return the threads in which models run, or that which runs the program."""
    return {order.thread for order in live} or {_thread(live)}


def _answerable(mine: Asking | None) -> set[str]:
    """Return the key of the agreement that this rank waits in, if it may be answered for others."""
    return {mine.key} if mine is not None and not mine.is_last_resort else set()


def _other_wait(live: Collection[Order], ask: Notice) -> str | None:
    """Return the process group of a collective of the program itself in which this rank waits for the asking rank.

    None if it does not wait in one, or the asking rank has started that collective.
    """
    name = compat.waits_in(_thread(live))
    if name is None or name not in ask["counts"]:
        return None
    group = compat.process_group(name)
    is_ahead = compat.collectives_started(group) > ask["counts"][name]
    return name if is_ahead and ask["rank"] in dist.get_process_group_ranks(group) else None


def _here(order: Order | None, mine: Asking | None, wait: str | None = None) -> str:
    """Describe what this rank is doing.

    It waits in an agreement, in a collective of the program itself over a process group, or in one of the model.
    """
    if mine is not None:
        what = mine.shown
    elif wait is not None:
        what = f"a collective over process group {wait}"
    else:
        what = journal.doing() or (order.latest if order is not None else "something else")
    line = program_line(mine.thread) if mine is not None else None
    line = line or program_line(_thread([order] if order is not None else []))
    at = f", at {line}" if line else ""
    come = f"has come as far as {order.latest}, {order.progress}, and " if order is not None else ""
    return f"rank {dist.get_rank()} {come}waits in {what}{at}"


def _cannot_meet(rest: Notice, order: Order, models: Collection[Watched]) -> bool:
    """Whether this rank and one that waits in a collective of the program itself wait for each other.

    The other rank waits until this one starts that collective. This one waits for a collective of the models that the
    other has not started, or that has the number of the other one.

    Args:
        rest: What the other rank has told.
    """
    started, counts, group = collectives_started(), rest["counts"], rest["group"]
    if group not in started or not is_in_package(order.thread):
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


watchdog = Watchdog()
"""The watchdog of this process."""
