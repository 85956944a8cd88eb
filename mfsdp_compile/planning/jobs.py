"""What to plan for, and the plan for one way to shard."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from mfsdp_compile.backend.predictions import OPTIMIZERS
from mfsdp_compile.passes.context import Context, SchedulePolicy
from mfsdp_compile.passes.guests.solver.hardware import Hardware
from mfsdp_compile.passes.guests.solver.reasons import gib
from mfsdp_compile.passes.guests.solver.simulate import OptimizerCost, Timeline
from mfsdp_compile.passes.guests.solver.solve import Solution, solve
from mfsdp_compile.passes.guests.solver.step_events import StepOutlines
from mfsdp_compile.runtime.geometry.exchange import Overlap
from mfsdp_compile.runtime.memory.comm_buffers import BufferPolicy
from mfsdp_compile.runtime.plan.precision import MixedPrecisionPolicy
from mfsdp_compile.runtime.schedule.decisions import Decisions

from . import published
from .candidates import Candidate
from .offloading import NOTHING, OffloadedUnits
from .workloads import Workload


@dataclass(frozen=True)
class Job:
    """What to plan for.

    Args:
        work: The model and one rank's batch.
        hardware: Hardware of the machines.
        budget: Bytes that a rank's tensors may take. None: the device's memory, except for ``reserve``.
        optimizer: The optimizer whose state and step are counted.
        precision: Dtypes of shards and gradients. ``param_dtype`` is the workload's.
        prefetch, reshard: Fixed values for the options ``prefetch`` and ``reshard_after_forward``. None: the planner
            chooses. A number of ranks to reshard over means True for candidates whose ranks it does not divide.
        fused: Whether the inner compiler fuses kernels. False: every operator by itself, without regions. (With
            ``"aot_eager"``, these hold one more gathered bucket: the graph keeps their operands until they return.)
        overlap: Kinds of collectives that may overlap with computation.
        solved: Use the solver. False: the schedule of a model without a budget, with each gather one unit ahead.
        bucket_bytes: Split larger units into several buckets; see :func:`~mfsdp_compile.fully_shard_model`. None: one
            bucket per unit.
        unit_bytes: Join smaller neighboring units up to this size; see :func:`~mfsdp_compile.fully_shard_model`. None:
            units are not joined.
        by_module: Gather the modules of a unit one by one: ``enable_fine_grained_param_gather``.
        by_parameter: One bucket per parameter: ``disable_bucketing``.
        buffers: Which buckets use communication buffers: ``fsdp_double_buffer``, ``maxpool_double_buffer``.
        microbatches: Microbatches per step of a pipeline, each with the workload's batch. None: four times the number
            of stages. Without a pipeline, a step has one.
        offload: Units in host memory. ``"auto"``: as many as a way to shard needs to fit, or more if that is faster.
        reserve: Fraction of the device's memory that schedules leave free if there is no ``budget``. What does not fit
            so is planned again with the least reserve that was enough in a published run, and then *may not fit*; see
            :mod:`.published`.
        step_in_backward: The optimizer steps over each bucket in backward, as :func:`~mfsdp_compile.compile_step` does.

    Raises:
        ValueError: If units are offloaded that are gathered quantized.
    """

    work: Workload
    hardware: Hardware
    budget: int | None = None
    optimizer: OptimizerCost = OPTIMIZERS["adamw"]
    precision: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    prefetch: int | None = None
    reshard: bool | int | None = None
    fused: bool = True
    overlap: Overlap = field(default_factory=Overlap)
    solved: bool = True
    bucket_bytes: int | None = None
    unit_bytes: int | None = None
    by_module: bool = False
    by_parameter: bool = False
    buffers: BufferPolicy = field(default_factory=BufferPolicy)
    microbatches: int | None = None
    offload: OffloadedUnits | Literal["auto"] = NOTHING
    reserve: float = published.MOST_RESERVED
    step_in_backward: bool = False

    def __post_init__(self) -> None:
        if self.precision.grad_sum_within is not None:
            raise ValueError(
                "a plan tries sums in one level and in two, and says which is faster: leave grad_sum_within out"
            )
        if self.offload != NOTHING and self.precision.param_comm_dtype is not None:
            raise ValueError(
                "units in host memory cannot be gathered in float8 or float4, from a shard on the device: leave out "
                "--offload or --gather-fp8 (--gather-fp4)"
            )

    def microbatches_of(self, candidate: Candidate) -> int:
        """Return the number of microbatches in a step.

        Raises:
            ValueError: If there are fewer microbatches than stages.
        """
        stages = candidate.degrees.pipeline
        if stages == 1:
            return 1
        count = self.microbatches if self.microbatches is not None else 4 * stages
        if count < stages:
            raise ValueError(f"a pipeline of {stages} stages takes at least {stages} microbatches, got {count}")
        return count

    @property
    def usable(self) -> int:
        """Bytes that schedules may use."""
        reserve = SchedulePolicy().budget_reserve if self.budget is not None else self.reserve
        return int((self.budget or self.hardware.memory_bytes) * (1 - reserve))

    @property
    def tightest(self) -> Job | None:
        """The same job with all memory that a published run could use. None if this one has it, or a ``budget``."""
        if self.budget is not None or self.reserve <= published.LEAST_RESERVED:
            return None
        return replace(self, reserve=published.LEAST_RESERVED)

    def solve(self, problem: StepOutlines, usable: int, reshard: bool | int | None) -> Solution:
        """Return the best schedule within ``usable`` bytes.

        Raises:
            BudgetError: If there is none.
        """
        return solve(
            problem,
            self.optimizer,
            usable,
            prefetch=self.prefetch,
            reshard=reshard,
            bounds=0,
            up_to_budget=True,
            refusal="" if self.budget is not None else self._too_small(),
        )

    def _too_small(self) -> str:
        machine = self.hardware
        share = f"{1 - self.reserve:.0%} of what {machine.name} has ({gib(machine.memory_bytes)})"
        return f"{gib(self.usable)}, {share}, are not enough"


@dataclass(frozen=True)
class Planned:
    """The plan for one candidate.

    Args:
        candidate: The way to shard.
        context: Buckets on these ranks.
        timeline: Timeline of one rank's step. None if it does not fit.
        decisions: Decisions about the schedule. None if it does not fit.
        needed: Bytes at the peak. If it does not fit, those of the smallest schedule.
        refusal: Why it does not fit.
        stage: Stage of a pipeline that these results describe, except for the step time; the one that needs most
            memory.
        idle: Seconds that this stage waits for other stages.
        offload: Units in host memory.
        is_close: Whether it needs more than the job's ``reserve`` leaves, and less than published runs could use.
    """

    candidate: Candidate
    context: Context
    timeline: Timeline | None
    decisions: Decisions | None
    needed: int
    refusal: str = ""
    stage: int = 0
    idle: float = 0.0
    offload: OffloadedUnits = NOTHING
    is_close: bool = False

    @property
    def fits(self) -> bool:
        return self.timeline is not None and not self.is_close

    @property
    def verdict(self) -> Literal["fits", "may not fit", "does not fit"]:
        if self.timeline is None:
            return "does not fit"
        return "may not fit" if self.is_close else "fits"

    @property
    def portion_size(self) -> int:
        """Number of ranks that the backward gathers portions over. 0: it gathers none."""
        return max(info.portion_size for info in self.context.buckets)
