"""The policy: the numbers that steer schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mfsdp_compile.runtime.program_lines import warn


@dataclass(frozen=True)
class SchedulePolicy:
    """The numbers that steer the schedules of compiled graphs and of the eager path.

    The eager path follows ``prefetch`` (``"auto"`` is 1), ``prefetch_bytes``, ``reductions_in_flight``,
    ``reduction_bytes`` and ``keep_last``. What is gathered again for its backward, a bucket's plan says.

    If anything is left to the solver (:attr:`is_solved`), the solver schedules gathers and reductions by time and
    memory alone. ``prefetch_bytes``, ``reductions_in_flight`` and ``reduction_bytes`` apply only when the solver is
    off.

    Args:
        memory_budget: Peak bytes that a training step may use on this rank, including parameters, gradients and
            optimizer state; None: no bound. With a budget, ``prefetch`` and ``reshard_after_forward`` default to
            ``"auto"``.
        prefetch: Number of units before its first use at which a unit's gather starts; 0: right at its use; ``"auto"``:
            as early as needed to hide it, within the budget.
        prefetch_bytes: Largest unit, in gathered bytes, that is prefetched when ``prefetch`` is a number. Two larger
            units might not fit in memory.
        reshard_after_forward: True: the backward gathers every unit again, except the unit that forward used last if
            ``keep_last`` is set, and units for which the model says otherwise. False: gathered parameters stay for the
            backward. ``"auto"``: those parameters stay that fit in memory, if that saves time. A number n: as True, but
            each rank keeps one of n portions of each gathered bucket, and the backward gathers over n neighboring ranks
            only, for example those of a node. It must divide the number of ranks that parameters are sharded over. 1
            means False and that number of ranks means True, as in FSDP2.
        reductions_in_flight: Number of units whose reductions may be in flight. A reduction is awaited when the
            reduction of the unit this many units later has started, or before the graph ends.
        reduction_bytes: Largest total bytes of reductions in flight. A reduction is awaited earlier if it and the
            reductions started since exceed this.
        keep_last: Whether a graph that holds the whole model keeps the bucket that forward uses last for the backward,
            which needs it first.
        activation_offload: Which values saved for backward wait for it in host memory. False: none. True: all that are
            worth a copy. ``"auto"``: the largest of each unit, as far as the link can copy them while the next unit
            computes. A number: the first ones, up to about that many bytes. See :mod:`.activations`.
        activation_offload_least: Values of fewer bytes stay on the device.
        activation_memory_budget: Which part of the bytes that forward would save for backward may be saved. The rest is
            computed again in backward, what takes the fewest operations per byte first. It is torch's setting of this
            name, for each region by itself; where there are no regions, for the whole graph. 1: as torch chooses to be
            fast. 0: a region saves what it is given, as with activation checkpointing. ``"auto"``: the largest of 1,
            3/4, 1/2, 1/4 and 0 with which a schedule keeps to ``memory_budget``, and the default with one.
        budget_reserve: Fraction of the budget left free for memory that a prediction does not see: kernel workspaces
            and allocator rounding.
    """

    memory_budget: int | None = None
    prefetch: int | Literal["auto"] = 1
    prefetch_bytes: int = 4 << 30
    reshard_after_forward: bool | int | Literal["auto"] = True
    reductions_in_flight: int = 1
    reduction_bytes: int = 8 << 30
    keep_last: bool = True
    budget_reserve: float = 0.01
    activation_offload: bool | int | Literal["auto"] = False
    activation_offload_least: int = 1 << 20
    activation_memory_budget: float | Literal["auto"] = 1.0

    def __post_init__(self) -> None:
        for name in (
            "prefetch",
            "prefetch_bytes",
            "reductions_in_flight",
            "reduction_bytes",
            "activation_offload_least",
        ):
            value, may_be_auto = getattr(self, name), name == "prefetch"
            if may_be_auto and value == "auto":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                also = " or 'auto'" if may_be_auto else ""
                raise TypeError(f"{name} takes a whole number{also}, got {value!r}")
            if value < 0:
                raise ValueError(f"{name} cannot be negative, got {value}")
        again, offload = self.reshard_after_forward, self.activation_offload
        if not isinstance(again, int) and again != "auto":
            raise TypeError(f"reshard_after_forward takes True, False, 'auto' or a number of ranks, got {again!r}")
        if not isinstance(again, (bool, str)) and again < 2:
            if again < 1:
                raise ValueError(f"reshard_after_forward takes at least 1 rank, got {again}")
            warn(
                "reshard_after_forward=1 keeps what forward has gathered, which is the same as False. Say True to "
                "gather it again in backward.",
            )
            object.__setattr__(self, "reshard_after_forward", False)
        if not isinstance(offload, int) and offload != "auto":
            raise TypeError(f"activation_offload takes True, False, 'auto' or a number of bytes, got {offload!r}")
        if offload != "auto" and offload < 0:
            raise ValueError(f"activation_offload cannot be negative, got {offload}")
        saved = self.activation_memory_budget
        if saved != "auto" and (isinstance(saved, (bool, str)) or not 0 <= saved <= 1):
            raise ValueError(f"activation_memory_budget takes a fraction from 0 to 1 or 'auto', got {saved!r}")
        if self.memory_budget is not None and self.memory_budget <= 0:
            raise ValueError(f"memory_budget must be above 0, got {self.memory_budget}")
        if not isinstance(self.keep_last, bool):
            raise TypeError(f"keep_last takes True or False, got {self.keep_last!r}")
        if not isinstance(self.budget_reserve, (int, float)) or not 0 <= self.budget_reserve < 1:
            raise ValueError(f"budget_reserve is a fraction below 1, got {self.budget_reserve!r}")

    @property
    def portions(self) -> int:
        """Number of ranks that each keep a portion for the backward to gather; 0: no portions are kept."""
        again = self.reshard_after_forward
        return 0 if isinstance(again, (bool, str)) else again

    @property
    def activation_budgets(self) -> tuple[float, ...]:
        """The values of ``activation_memory_budget`` to try, one after the other."""
        return (
            (1.0, 0.75, 0.5, 0.25, 0.0) if self.activation_memory_budget == "auto" else (self.activation_memory_budget,)
        )

    @property
    def is_solved(self) -> bool:
        """Whether any decision is left to the solver."""
        return "auto" in (self.prefetch, self.reshard_after_forward) or self.memory_budget is not None
