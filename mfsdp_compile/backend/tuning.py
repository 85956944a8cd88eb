"""``options={"tune": True}``: choose among schedules by measuring them, in the first steps of training itself.

A schedule changes no bits and, in pieces, compiles nothing. Therefore several are made at once and tried one after the
other, each for steps that count. All ranks run the same schedule in the same step; after each round they exchange what
they have measured.

1. Candidates: the schedule that trains without tuning; the solver's; and others of a grid of prefetch, reductions in
   flight and what stays gathered, as different as possible, of those that fit in memory by their prediction.
2. Rounds: all candidates run for one step each, then the better ones again, and so on. A candidate's time is the
   shortest of its steps, each on its slowest rank: whatever else runs on a machine only makes steps longer. This is
   successive halving (Jamieson and Talwalkar, https://arxiv.org/abs/1502.07943).
3. The fastest one stays, and is written to a file for ``options={"schedule": path}``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mfsdp_compile import progress
from mfsdp_compile.passes.context import Report
from mfsdp_compile.passes.guests.solver.forecast import Prediction
from mfsdp_compile.passes.guests.solver.producer import Predicting, usable_budget
from mfsdp_compile.passes.guests.solver.solve import solve
from mfsdp_compile.passes.guests.solver.step_events import StepOutlines
from mfsdp_compile.passes.pipeline import CompileRecord
from mfsdp_compile.runtime.digests import digest
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.program_lines import warn
from mfsdp_compile.runtime.ranks.agreement import has_others
from mfsdp_compile.runtime.schedule.file import ScheduleText
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy
from mfsdp_compile.runtime.untrusted_files import FileRefused, write_text

from .compiled_graph import CompiledGraph, NeedsOtherPieces
from .options import CompileOptions

FILE = "mfsdp_schedule.txt"
"""The file that ``options={"tune": True}`` writes, in the current folder."""
MOST = 8
"""Maximum number of candidates."""
ROUNDS = ((MOST, 1), (5, 2), (3, 3))
"""How many candidates are in each round, and how many steps each of them runs: 27 in all. The first one is in every
round, since others are compared with it."""
RETRIES = 2
"""Maximum number of steps that are measured again because they took :data:`OUTLIER` times as long as most."""
OUTLIER = 3.0
PREFETCH = (0, 1, 2, 3, 4)
IN_FLIGHT = (1, 2, 3, 4)


@dataclass(frozen=True)
class Candidate:
    """Numbers of a schedule to try.

    Args:
        seconds: Predicted seconds of a step.
    """

    policy: SchedulePolicy
    seconds: float


def label_of(policy: SchedulePolicy) -> str:
    if policy.is_solved:
        return "the solver's"
    reshard = policy.reshard_after_forward
    stays = f"portions of {reshard}" if policy.portions else "gathered again" if reshard else "all stays"
    return f"prefetch {policy.prefetch}, {policy.reductions_in_flight} in flight, {stays}"


def candidates(
    record: CompileRecord, producer: Predicting, given: Iterable[str], reshards: Sequence[bool | int]
) -> list[Candidate]:
    """Return the schedules to try besides the one that was compiled. A collective.

    Args:
        record: Of the schedule that was compiled.
        producer: What decided about it.
        given: Names of the numbers that the user has set. They stay as they are.
        reshards: Values of ``reshard_after_forward`` to try.
    """
    plan = producer.plan
    assert plan is not None
    grid = list(_grid(record.context.policy, frozenset(given), reshards))
    mine = _offers(plan, producer.prediction, grid)
    first = digest(_effect(plan, record.decisions))

    def combine(offers: Sequence[Any]) -> list[tuple[int, float]]:
        """Take what fits on all ranks, at the time of the slowest one."""
        seen, found = {first}, []
        for number, theirs in enumerate(zip(*offers, strict=True)):
            if all(each is not None for each in theirs) and theirs[0][1] not in seen:
                seen.add(theirs[0][1])
                found.append((number, max(seconds for seconds, _ in theirs)))
        return found

    if producer.meeting is None:
        fitting = combine([mine])
    else:
        fitting = producer.meeting.meet("schedules to try", [str(len(mine))], mine, combine, again=False)
    return _spread([Candidate(grid[number], seconds) for number, seconds in fitting])[: MOST - 1]


def _grid(policy: SchedulePolicy, given: frozenset[str], reshards: Sequence[bool | int]) -> Iterable[SchedulePolicy]:
    def values(name: str, several: Sequence[Any]) -> Sequence[Any]:
        value = getattr(policy, name)
        return (value,) if name in given and value != "auto" else several

    if not policy.is_solved and not given & {"prefetch", "reshard_after_forward"}:
        yield replace(policy, prefetch="auto", reshard_after_forward="auto")
    for reshard, prefetch, in_flight in itertools.product(
        values("reshard_after_forward", reshards),
        values("prefetch", PREFETCH),
        values("reductions_in_flight", IN_FLIGHT),
    ):
        yield replace(
            policy,
            memory_budget=None,
            reshard_after_forward=reshard,
            prefetch=prefetch,
            reductions_in_flight=in_flight,
        )


def _offers(
    plan: StepOutlines, prediction: Prediction, grid: Sequence[SchedulePolicy]
) -> list[tuple[float, str] | None]:
    """Predict a step with each schedule: its seconds, and a digest of what it decides; None: it does not fit."""
    budget = usable_budget(plan.context.policy, prediction.costs.hardware.memory_bytes)
    found: list[tuple[float, str] | None] = []
    for policy in grid:
        other = StepOutlines(plan.outlines, replace(plan.context, policy=policy), plan.costs)
        if policy.is_solved:
            decisions = solve(other, prediction.optimizer, budget).decisions
        else:
            decisions = other.decisions_by_policy()
        timeline = other.timeline(decisions, prediction.optimizer)
        fits = timeline.peak_bytes <= budget
        found.append((timeline.seconds, digest(_effect(other, decisions))) if fits else None)
    return found


def _effect(plan: StepOutlines, decisions: Any) -> list[str]:
    return [line for phase, lines in plan.lines(decisions).items() for line in (phase.value, *lines)]


def _spread(found: Sequence[Candidate]) -> list[Candidate]:
    """Order candidates so that the first ones differ most, those that are predicted to be fast before others.

    First comes the fastest for each value of each number, then all others.
    """
    ordered = sorted(found, key=lambda each: (not each.policy.is_solved, each.seconds))
    first: dict[Any, Candidate] = {}
    for each in ordered:
        policy = each.policy
        for value in (
            ("stays", policy.reshard_after_forward),
            ("prefetch", policy.prefetch),
            ("in flight", policy.reductions_in_flight),
        ):
            first.setdefault(value, each)
    leading = sorted(set(first.values()), key=ordered.index)
    return [*leading, *(each for each in ordered if each not in leading)]


@dataclass
class Race:
    """Which candidate runs in each step, and which one is fastest.

    Args:
        count: Number of candidates. The first one runs before the race begins.

    Attributes:
        times: Seconds of the steps of each candidate on its slowest rank.
        queue: Candidates that are still to run in this round, one step each.
    """

    count: int
    times: list[list[float]] = field(default_factory=list)
    queue: list[int] = field(default_factory=list)
    _mine: list[tuple[int, float]] = field(default_factory=list)
    _round: int = 0
    _retries: int = RETRIES

    def __post_init__(self) -> None:
        self.times = [[] for _ in range(self.count)]
        self._fill()

    def _fill(self) -> None:
        most, steps = ROUNDS[self._round]
        kept = self.ranking()[:most]
        self.queue = (kept if 0 in kept else [*kept[:-1], 0]) * steps

    def ranking(self) -> list[int]:
        """Return the candidates, the fastest first; those that were dropped in earlier rounds last."""
        return sorted(range(self.count), key=lambda n: (-len(self.times[n]), min(self.times[n], default=0.0), n))

    def note(self, seconds: float) -> None:
        """Note the seconds of a step of the first candidate of the queue on this rank."""
        self._mine.append((self.queue.pop(0), seconds))

    def end_round(self, exchange: Callable[[list[float]], list[float]]) -> bool:
        """End a round, when the queue is empty. Return whether the race is over.

        Args:
            exchange: Takes this rank's seconds, and returns those of the slowest rank, which are the same on all ranks.
        """
        numbers = [number for number, _ in self._mine]
        slowest, self._mine = exchange([seconds for _, seconds in self._mine]), []
        usual = statistics.median([*itertools.chain(*self.times), *slowest])
        for number, seconds in zip(numbers, slowest, strict=True):
            if seconds > OUTLIER * usual and self._retries:
                self._retries -= 1
                self.queue.append(number)
            else:
                self.times[number].append(seconds)
        if not self.queue:
            self._round += 1
            if self._round == len(ROUNDS) or self.count == 1:
                return True
            self._fill()
        return False


class Tuning:
    """Which of its schedules a model runs: each in turn, until the fastest one is known.

    Args:
        owner: The model. Compiled code holds this object, which therefore keeps only a weak reference to it.
        schedules: The candidates. The first one trains without tuning.
        left_out: What was not tried, in words.
        where: The file that the first rank writes.
        tells: Whether the first rank tells on stderr what was found.

    Attributes:
        chosen: Number of the fastest one; None: it is not known yet.
        lines: What was found, and what was tried.
        times: Seconds of the steps of each schedule on its slowest rank, by label.
        graphs: The model's graphs that follow it.
    """

    def __init__(
        self, owner: ShardedModel, schedules: Sequence[Candidate], left_out: Sequence[str], where: Path, tells: bool
    ) -> None:
        self.schedules = schedules
        self._owner, self._left_out, self._where, self._tells = weakref.ref(owner), left_out, where, tells
        self._race = Race(len(schedules))
        self._running, self._step, self._steps = 0, -1, -1
        self._begun = 0.0
        self.chosen: int | None = None if len(schedules) > 1 else 0
        self.graphs: weakref.WeakSet[TunedGraph] = weakref.WeakSet()
        self.lines: Sequence[str] = ()
        self.times: Mapping[str, Sequence[float]] = {}
        _tunings[owner] = self

    @staticmethod
    def of(owner: ShardedModel) -> Tuning | None:
        """Return that of a model, if its schedule is or was tuned."""
        return _tunings.get(owner)

    def current(self) -> int:
        """Return the number of the schedule that runs now. Called before each forward.

        Raises:
            RuntimeError: A step is being captured; or ranks cannot exchange what they have measured.
        """
        owner = self._owner()
        if self.chosen is not None or owner is None:
            return self.chosen or 0
        coordinator, device = owner.coordinator, owner.buckets[0].device
        if coordinator.is_capturing:
            raise RuntimeError(
                f"options['tune'] is measuring schedules (step {self._steps + 1}), and a step is being captured, which "
                "would keep one of them for good. Train without capturing until the schedule is found, and give the "
                f"file that is then written: options={{'schedule': '{self._where}'}}."
            )
        if coordinator.steps == self._step:
            return self._running  # another microbatch of the same step
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds, follows = time.perf_counter() - self._begun, coordinator.steps == self._step + 1
        self._step, self._steps = coordinator.steps, self._steps + 1
        if self._steps > 1 and follows:  # the first step has first calls in it
            self._race.note(seconds)
            if not self._race.queue and self._end_round(owner):
                self.chosen = self._running = self._race.ranking()[0]
                self._report()
                return self.chosen
        if self._steps:
            self._running = self._race.queue[0]
        self._begun = time.perf_counter()
        return self._running

    def _end_round(self, owner: ShardedModel) -> bool:
        def exchange(seconds: list[float]) -> list[float]:
            if not has_others(owner.members.agreeing):
                return seconds
            lines = [f"options['tune']: {len(seconds)} steps were measured before step {self._step}"]
            slowest: list[float] = owner.coordinator.conclude("measured schedules", lines, seconds, _slowest)
            return slowest

        try:
            return self._race.end_round(exchange)
        except BaseException:
            self.chosen = 0
            raise

    def _report(self) -> None:
        ranking = self._race.ranking()
        best = {number: min(self._race.times[number]) for number in ranking}
        predicted = min(ranking, key=lambda n: (self.schedules[n].seconds, not self.schedules[n].policy.is_solved))
        label = {number: label_of(self.schedules[number].policy) for number in ranking}
        found = [f"tuned the schedule in {self._steps} steps: {best[ranking[0]]:.4g} s with {label[ranking[0]]}"]
        for number, what in ((0, "that trains without tuning"), (predicted, "predicted to be fastest")):
            if number == ranking[0]:
                found.append(f"it is the one {what}")
            else:
                more = best[number] / best[ranking[0]] - 1
                found.append(f"{best[number]:.4g} s ({more:+.1%}) with the one {what}")
        lines = ["; ".join(found)]
        for number in ranking:
            told = f"{best[number]:.4g} s (shortest of {len(self._race.times[number])})"
            lines.append(f"{told}, predicted {self.schedules[number].seconds:.4g} s: {label[number]}")
        self.lines = [*lines, *self._left_out]
        self.times = {label[number]: self._race.times[number] for number in ranking}

    def write(self, schedule: ScheduleText) -> None:
        """Write the schedule that was found to the file, and tell about it, on the first rank."""
        if dist.is_initialized() and dist.get_rank() != 0:
            return
        text = str(schedule) + "".join(f"# {line}\n" for line in self.lines)
        try:
            write_text(self._where, text)
        except (OSError, FileRefused) as error:  # the training goes on
            warn(f"The schedule that options['tune'] has found cannot be written to {self._where} ({error}):\n{text}")
            return
        if self._tells:
            progress.tell(f"{self.lines[0]}. Written to {self._where}.")


_tunings: weakref.WeakKeyDictionary[ShardedModel, Tuning] = weakref.WeakKeyDictionary()


class TunedGraph:
    """One of Dynamo's graphs, compiled with each schedule that its model tries.

    Ranks can have different graphs, for batches of different shapes: all follow the same schedule in the same step.

    Args:
        tuning: Decides.
        graphs: By the numbers of the schedules.
    """

    def __init__(self, tuning: Tuning, graphs: Sequence[CompiledGraph]) -> None:
        self._tuning, self._graphs = tuning, list(graphs)
        self._chosen: CompiledGraph | None = None
        tuning.graphs.add(self)

    def current(self, owner: ShardedModel) -> CompiledGraph:
        """Return what runs now for a model. Another instance than the one that is tuned runs the first schedule."""
        if self._chosen is not None:
            return self._chosen
        if Tuning.of(owner) is not self._tuning:
            return self._graphs[0]
        number = self._tuning.current()
        if self._tuning.chosen is None:
            return self._graphs[number]
        kept = [graph._keep(number, owner) for graph in self._tuning.graphs]
        if self._tuning.lines:  # with aot_eager, a backward that has not run was not compiled
            self._tuning.write(ScheduleText.of(max((each.record.schedules for each in kept), key=len)))
        assert self._chosen is not None
        return self._chosen

    def _keep(self, number: int, owner: ShardedModel) -> CompiledGraph:
        """Keep one of the graphs; the memory of the others is free."""
        first, self._chosen = self._graphs[0].record, self._graphs[number]
        records = owner.compiled_graphs
        records[:] = [self._chosen.record if each is first else each for each in records]
        self._chosen.record.reports.setdefault(None, []).append(Report("tune", self._tuning.lines))
        self._graphs.clear()
        return self._chosen


def tuned_graph(
    first: CompiledGraph,
    compiles: Callable[..., CompiledGraph],
    chosen: CompileOptions,
    owner: ShardedModel,
    tuning: Tuning | None,
) -> TunedGraph | None:
    """Compile a graph with all schedules that its model tries.

    Args:
        tuning: That of the model, if another graph was compiled before.

    Returns:
        None if there is nothing to tune: the graph has no backward.
    """
    record, producer = first.record, first.record.producer
    if not isinstance(producer, Predicting) or producer.plan is None:
        return None
    if tuning is not None:
        others = [replace(chosen, schedule=each.policy) for each in tuning.schedules[1:]]
        return TunedGraph(tuning, [first, *(compiles(options, explores=True, first=first) for options in others)])
    where = Path(chosen.tune if isinstance(chosen.tune, str) else FILE)
    found = candidates(record, producer, chosen.given, _reshards(owner))
    is_dynamic = any(piece.key is None for piece in record.pieces)
    compiled: dict[int, CompiledGraph] = {}
    for number, each in enumerate(found if not is_dynamic else ()):
        with (
            progress.one_step("schedules to try", f"{number + 1} of {len(found)}"),
            contextlib.suppress(NeedsOtherPieces),
        ):
            options = replace(chosen, schedule=each.policy)
            compiled[number] = compiles(options, explores=True, first=first, known=set(record.pieces))
    kept = sorted(compiled)
    if producer.meeting is not None:
        kept = producer.meeting.meet("schedules of the same pieces", [], kept, _in_all, again=False)
    seconds = producer.plan.timeline(record.decisions, producer.prediction.optimizer).seconds
    schedules = [Candidate(chosen.schedule, seconds), *(found[number] for number in kept)]
    left = len(found) - len(kept)
    told = f"{left} more were not tried: they need other pieces, whose numbers would differ by rounding"
    if is_dynamic:
        told = f"{left} more were not tried: whether they consist of the same pieces is not known where sizes change"
    if not kept and chosen.progress:
        progress.tell(f"there is no schedule to tune; {told}")
    tuning = Tuning(owner, schedules, [told] if left else [], where, chosen.progress)
    return TunedGraph(tuning, [first, *(compiled[number] for number in kept)])


def _reshards(owner: ShardedModel) -> list[bool | int]:
    """Return the values of ``reshard_after_forward`` to try."""
    portions, group = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), owner.topology.gather_group
    of_nodes = group is not None and 1 < portions < group.size and group.size % portions == 0
    return [True, False, portions] if of_nodes else [True, False]


def _in_all(offers: Sequence[Sequence[int]]) -> list[int]:
    return sorted(set.intersection(*map(set, offers)))


def _slowest(offers: Sequence[Sequence[float]]) -> list[float]:
    return [max(each) for each in zip(*offers, strict=True)]
