"""Keeps one sharded model in step with the same model on other ranks.

Everything that a model is about to do together with other ranks passes through its :class:`Coordinator` first. It
writes the journal, compares what is new with the other ranks (:mod:`.collective_order`), names collectives in profiles,
and tells other ranks about failures.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from .. import compat, digests
from ..geometry.groups import Group
from ..geometry.topology import Topology
from ..schedule.text import ScheduleLine
from . import profiling
from .agreement import agree, agree_on_order, conclude, forget_failure, has_others, report_failure
from .collective_order import STEP, Details, Order, Series, StepPhase, no_details, order_of_group
from .journal import journal
from .watchdog import watchdog

# [Note: Order of agreement and collective]
# A collective is announced before it starts, never after. ``Order.start`` compares with other ranks only what is new in
# this place, over the store, so that ranks that differ raise before any of them has started something that the others
# would match with something else. Therefore:
#   * everything that can raise on one rank alone (a user's hook, planning, a check) comes before the announcement;
#   * between announcement and start nothing may raise, or the count of this rank is one too high;
#   * a rank that fails reports it at once, and waits for nothing: the others may never arrive.


class Announcement(NamedTuple):
    """A collective of the eager path as it is announced at every step; see :meth:`Coordinator.announcement`."""

    model: str
    group: Group | None
    collective: str
    text: str
    launches: Callable[[], Sequence[tuple[str, str]]]
    series: Series


class Members(Protocol):
    """The ranks that hold a model: :class:`~..model.membership.Membership`."""

    @property
    def topology(self) -> Topology: ...

    @property
    def topologies(self) -> Sequence[Topology]: ...

    @property
    def group(self) -> dist.ProcessGroup: ...

    @property
    def agreeing(self) -> dist.ProcessGroup: ...

    @property
    def everyone(self) -> dist.ProcessGroup: ...

    @property
    def group_names(self) -> list[str]: ...

    @property
    def partition_groups(self) -> Sequence[Group]: ...


class BegunGraph(NamedTuple):
    """A compiled graph that begins.

    Args:
        phase: Phase of the graph: forward, backward or inference.
        digest: Digest of its schedule.
        schedule: Its collectives, one per line, with numbers for ``buckets``.
        buckets: Names of the buckets.
        ranks: What each communicates over: its topology, and the groups of the stages of its reduction. None: it is
            gone.
        options: Options that it was compiled with.
        unused: Trainable parameters that get no gradient in it and must be the same on all ranks, because nothing
            compares them later.
    """

    phase: str
    digest: str
    schedule: str
    buckets: Sequence[str]
    ranks: Sequence[tuple[Topology, Sequence[Group | None]] | None]
    options: str
    unused: Sequence[str]


class Coordinator:
    """Announces what one model does with other ranks.

    Args:
        members: The ranks that hold the model.
        kind: Name of the model's class.
        parameters: Names of its parameters.

    Attributes:
        name: Name of the model in messages: its class, numbered if there are several; the same on all ranks.
        order: Order of the collectives of all models of the group.
        steps: Number of optimizer steps that have changed the model's weights.
        started: Number of collectives, and compiled graphs with collectives, since the model was sharded or reset.
        failure: Name of the error after which this rank has stopped; None: there was none.
        captures: Whether the step that runs is captured by this package.
        graphs: Number of captures so far.
    """

    def __init__(self, members: Members, kind: str, parameters: Iterable[str]) -> None:
        self.members, self._kind = members, kind
        self._join(parameters)
        self.steps = self.started = self.graphs = 0
        self.failure: str | None = None
        self.captures = False
        self._copies = 0
        self._microbatch = ""
        self._toggled: dict[str, bool] = {}
        """What ``requires_grad`` now is of parameters that were frozen or unfrozen since the model was sharded."""
        self._begun: dict[tuple[str, str], tuple[str, Sequence[str]]] = {}
        self._group_names = members.group_names  # when the last forward or backward began
        self._watch()

    def of_copy(self, members: Members) -> Coordinator:
        """Return the coordinator of a copy of the model, which communicates over the same groups.

        Copies are numbered per model, not per group: one rank may make some for its own use.
        """
        self._copies += 1
        duplicate = copy.copy(self)
        duplicate.members = members
        duplicate.name = duplicate._kind = f"copy {self._copies} of {self.name}"
        duplicate.steps = duplicate.started = duplicate._copies = 0
        duplicate.captures = False
        duplicate.failure, duplicate._microbatch, duplicate._begun = None, "", {}
        duplicate._toggled = dict(self._toggled)
        duplicate._watch()
        return duplicate

    def _join(self, parameters: Iterable[str]) -> None:
        members = self.members
        self.order: Order = order_of_group(members.agreeing.group_name, members.group.group_name)
        self.order.device_type = members.topology.mesh.device_type
        self.name = self.order.join(self._kind, parameters)

    def rejoin(self, parameters: Iterable[str]) -> None:
        """Start over with the new process groups of :attr:`members`, and the order that belongs to them."""
        self._join(parameters)
        self.started, self.failure, self._copies = 0, None, 0
        self._group_names = self.members.group_names
        self._watch()

    @property
    def is_capturing(self) -> bool:
        """Whether what runs is captured in a CUDA graph, also by the program itself: no value may be read on the
        host."""
        on_gpu = torch.cuda.is_initialized()
        return self.captures or (on_gpu and torch.cuda.is_current_stream_capturing())

    # -- agreement ----------------------------------------------------------------------------------------------------

    def agree(
        self, topic: str, lines: Sequence[str], patience: float = 1.5, epoch: int = 0, is_last_resort: bool = False
    ) -> None:
        """Raise on every rank unless all ranks pass the same arguments within ``patience`` process group timeouts.

        See :func:`.agreement.agree`.
        """
        group = self.members.agreeing
        timeout = compat.timeout_of(group) * patience
        agree(group, topic, lambda: lines, timeout, epoch, is_last_resort=is_last_resort)

    def conclude(
        self,
        topic: str,
        lines: Sequence[str],
        offer: Any,
        combine: Callable[[Sequence[Any]], Any],
        patience: float = 1.5,
        is_last_resort: bool = False,
    ) -> Any:
        """Combine the offers of all ranks; see :func:`.agreement.conclude`. Timeout as in :meth:`agree`."""
        group = self.members.agreeing
        return conclude(group, topic, lines, offer, combine, compat.timeout_of(group) * patience, is_last_resort)

    def maxima(self, group: Group, topic: str, values: Sequence[int]) -> list[int]:
        """Return the largest value of any rank of ``group`` at each position, through the store. A collective."""
        process_group = compat.process_group(group.name)
        timeout = compat.timeout_of(process_group) * 1.5
        found: list[int] = conclude(process_group, topic, [], list(values), _maxima, timeout)
        return found

    def agree_on_order(self, lines: Sequence[str], epoch: int) -> None:
        agree_on_order(self.members.agreeing, lines, epoch)

    def warn_others(self, error: BaseException) -> None:
        """Announce that this rank is about to fail with ``error``: from here on, errors on other ranks quote it."""
        report_failure(self.members.agreeing, error, is_certain=False)

    def withdraw_warning(self) -> None:
        """Withdraw the announcement of :meth:`warn_others`, because all ranks have met."""
        forget_failure(self.members.agreeing)

    # -- what is about to happen --------------------------------------------------------------------------------------

    def enter_forward(self, what: str, details: Details = no_details) -> None:
        """Handle the beginning of a forward: of the model, a part of it, or compiled code."""
        kind = f"forward {'with' if torch.is_grad_enabled() else 'without'} gradients"
        self._group_names = self.members.group_names
        self.note(f"{kind} of {what}")
        if self.members.topology.gather_group is not None:  # otherwise a single rank may evaluate alone
            where = f"{what} ({self.name}){self._microbatch}{self._trained if torch.is_grad_enabled() else ''}"
            self.order.enter(StepPhase(kind, where), self.agree_on_order, details)

    def enter_backward(self, is_due: bool) -> None:
        """Handle the beginning of a backward.

        Ranks agree on it with every strategy: it reduces something, which one rank cannot do alone.
        """
        kind = "backward" if is_due else "backward that accumulates"
        self._group_names = self.members.group_names
        self.note(kind)
        self.order.enter(StepPhase(kind, f"{self.name}{self._microbatch}{self._trained}"), self.agree_on_order)

    def toggled(self, parameter: str, is_trained: bool) -> None:
        """Note that a parameter was frozen or unfrozen, which all ranks must do alike."""
        if self._toggled.pop(parameter, None) is None:  # else it is as it was
            self._toggled[parameter] = is_trained

    @property
    def _trained(self) -> str:
        """What was frozen or unfrozen, as a part of the names of phases, which ranks compare."""
        said = ""
        for is_trained in (False, True) if self._toggled else ():
            if names := sorted(name for name, value in self._toggled.items() if value is is_trained):
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                said += f" with requires_grad={is_trained} set after sharding for parameter {names[0]!r}{more}"
        return said

    def enter_step(self, optimizer: str, details: Details = no_details) -> None:
        """Handle the beginning of an optimizer's step."""
        self.order.enter(StepPhase(STEP, f"{optimizer} of {self.name}"), self.agree_on_order, details)

    def enter_replay(self, step: str) -> None:
        """Handle the replay of a captured step: one phase, whatever the step does, because it runs as a whole."""
        self.note(f"replay of {step}")
        self.order.enter(StepPhase("replay", f"{step} ({self.name})"), self.agree_on_order)

    @contextlib.contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """Attribute the forwards and backwards inside to microbatch ``number``.

        If several models take turns, the number identifies the next model, so that ranks need not agree on each turn.
        """
        self._microbatch = f", microbatch {number}"
        try:
            yield
        finally:
            self._microbatch = ""

    def start(
        self,
        collective: str,
        details: Details = no_details,
        group: Group | None = None,
        series: Series | None = None,
    ) -> None:
        """Prepare for a collective over ``group``, or for compiled code with collectives, which ``details`` lists.

        Raises:
            RuntimeError: Other ranks are doing something else.
        """
        if group is not None:
            self.note(collective, lambda: [(collective, group.name)])
            profiling.expect(lambda: self._named_launches("eagerly", [(collective, group.name)]))
        numbered = (f"{series[0]} ({self.name})", series[1]) if series is not None else None
        self.order.start(f"{collective} ({self.name})", self.agree_on_order, details, numbered)
        self.started += 1

    def announcement(self, collective: str, group: Group | None, series: Series) -> Announcement:
        """Format what :meth:`announce` needs for a collective that starts at every step.

        Args:
            group: Group that it runs over. None: it is skipped this time.
        """
        launches: Callable[[], Sequence[tuple[str, str]]] = tuple
        if group is not None:
            launched = [(collective, group.name)]
            launches = launched.copy
        numbered = f"{series[0]} ({self.name})", series[1]
        return Announcement(self.name, group, collective, f"{collective} ({self.name})", launches, numbered)

    def announce(self, announced: Announcement) -> None:
        """Like :meth:`start`, for the eager path, where time on the host matters."""
        if announced.group is not None:
            journal.note(self.steps, self.name, announced.collective, self._group_names, announced.launches)
            if profiling.interception.is_on or compat.profiler_runs():
                profiling.expect(lambda: self._named_launches("eagerly", announced.launches()))
        self.order.start(announced.text, self.agree_on_order, no_details, announced.series)
        self.started += 1

    def begin_graph(self, graph: BegunGraph, is_due: bool) -> None:
        """Prepare for a compiled graph that is about to start its collectives.

        Args:
            is_due: Whether deferred reductions run.
        """
        phase, digest, schedule, buckets, ranks, options, unused = graph
        digest = digests.digest([digest, *buckets])[:16]  # schedules number buckets: two may differ in these alone
        self._begun[phase, digest] = schedule, buckets
        # Entries of the journal must not keep the model alive.
        started = functools.partial(_launches, schedule, buckets, ranks, is_due)
        self.note(f"{phase} graph", started)
        profiling.expect(lambda: self._named_launches(f"{phase} graph", started()))
        if phase == "inference" and not started():
            return  # a single rank may run it alone: see enter_forward
        without = ""
        if unused:
            without = (
                f" without gradients of {len(unused)} parameters, such as {unused[0]!r} ({digests.digest(unused)[:8]})"
            )
        self.start(
            f"{phase} graph {digest} ({options}){without}",
            lambda: [options, *_named(schedule, buckets), *(f"no gradient of {name}" for name in unused)],
        )

    @property
    def begun_graphs(self) -> list[tuple[str, list[str]]]:
        """Phase and schedule of every compiled graph that has run, including graphs from a compile cache."""
        return [(phase, _named(schedule, buckets)) for (phase, _), (schedule, buckets) in self._begun.items()]

    def note(self, what: str, launches: Callable[[], Sequence[tuple[str, str]]] = tuple) -> None:
        """Write in the journal what is about to happen, and the collectives that it starts."""
        journal.note(self.steps, self.name, what, self.members.group_names, launches)

    def _named_launches(self, where: str, launches: Sequence[tuple[str, str]]) -> Iterator[profiling.Launch]:
        """Yield the collectives as they are named in traces."""
        counts: dict[str, int] = {}
        for what, group in launches:
            if group not in counts:
                counts[group] = compat.collectives_started(compat.process_group(group))
            counts[group] += 1
            yield profiling.Launch(self.steps, where, self.name, what, counts[group], group)

    # -- failures -----------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException, is_certain: bool = True) -> None:
        """Tell other ranks that this one has stopped with ``error``, unless it has stopped already.

        Args:
            is_certain: Whether this rank will start none of the collectives that others may be waiting for.
        """
        if self.failure is None:
            self.failure = type(error).__name__
            with contextlib.suppress(RuntimeError, ValueError, KeyError):  # a process group was destroyed
                self.note("what followed a failure")  # what a compiled graph has not started, it does not start
            report_failure(self.members.agreeing, error, is_certain=is_certain)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Context for collectives between steps. Other ranks learn of an error or interrupt that leaves it."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def forget_failure(self) -> None:
        """Continue after a failure that was the same on all ranks."""
        forget_failure(self.members.agreeing)
        self.order.restart()
        self.failure = None

    # -- what the watchdog needs; see :class:`.watchdog.Watched` -------------------------------------------------------

    def _watch(self) -> None:
        if has_others(self.members.group) or has_others(self.members.everyone):
            watchdog.watch(self)

    @property
    def scopes(self) -> set[str]:
        return {self.members.group.group_name, self.members.everyone.group_name}

    @property
    def communicators(self) -> set[str]:
        return {*self.members.group_names, *(group.name for group in self.members.partition_groups)}


def _maxima(offers: Sequence[Sequence[int]]) -> list[int]:
    return [max(values) for values in zip(*offers, strict=True)]


def _named(schedule: str, buckets: Sequence[str]) -> list[str]:
    """Return the lines of a schedule, with buckets' names in place of their numbers."""
    return _NUMBER.sub(lambda number: buckets[int(number[1])], schedule).split("\n")


def _launches(
    schedule: str, buckets: Sequence[str], ranks: Sequence[tuple[Topology, Sequence[Group | None]] | None], due: bool
) -> list[tuple[str, str]]:
    """Return the collectives that a compiled graph starts, each with the name of its process group.

    Args:
        due: Whether deferred reductions run.
    """
    found = []
    for numbered, named in zip(schedule.split("\n"), _named(schedule, buckets), strict=True):
        line, number = ScheduleLine.parse(named), _NUMBER.search(numbered)
        if line is None or number is None or (over := ranks[int(number[1])]) is None:
            continue
        (topology, of_stages), group = over, None
        if line.what == "gather" and topology.gather_group is not None:
            # Another model, whose code this one runs, may have created the group of portions.
            group = topology.portions.get(line.number) if line.is_gather_of_portions else topology.gather_group
        elif line.what == "reduce" and (due or not line.is_deferrable):
            group = of_stages[line.number - 1]
        if group is not None:
            found.append((line.label, group.name))
    return found


_NUMBER = re.compile(r"#(\d+)")
"""How schedules refer to a bucket."""
