"""``torch.compile(model, backend="mfsdp", options={...})``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from mfsdp_compile.passes.context import SchedulePolicy
from mfsdp_compile.runtime import compat

__all__ = ["CompileOptions"]

INNER_COMPILERS = ("inductor", "aot_eager")


@dataclass(frozen=True)
class CompileOptions:
    """Options of the ``mfsdp`` backend.

    Args:
        inner: the compiler that gets the scheduled graphs: ``"inductor"``, or ``"aot_eager"``, which runs them operator
            by operator with the numbers of the eager path, to the bit.
        schedule: the numbers that steer the schedule; options of the names of its fields set these.
        float32_gradients: matmuls that compute gradients write their float32 sums, unrounded, where gradients are
            reduced in float32. More exact than the eager path, and not equal to it. CUDA only.
        inductor: settings of ``torch._inductor.config`` for the inner compiler.
    """

    inner: str = "inductor"
    schedule: SchedulePolicy = field(default_factory=SchedulePolicy)
    float32_gradients: bool = False
    inductor: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def of(options: Mapping[str, Any] | None, mode: str | None) -> CompileOptions:
        """From what ``torch.compile`` was given. Raises ValueError for what is not known."""
        if mode not in (None, "default"):
            raise ValueError(
                f"torch.compile(mode={mode!r}) is not supported by the mfsdp backend. Give Inductor's settings in "
                "options, for instance options={'inductor': {'max_autotune': True}}."
            )
        given = dict(options or {})
        schedule_names = {f.name for f in fields(SchedulePolicy)}
        schedule = SchedulePolicy(**{name: given.pop(name) for name in schedule_names & given.keys()})
        inner = given.pop("inner", "inductor")
        float32_gradients = given.pop("float32_gradients", False)
        inductor = given.pop("inductor", {})
        if given:
            known = sorted(schedule_names | {"inner", "float32_gradients", "inductor"})
            raise ValueError(f"The mfsdp backend has no option {', '.join(map(repr, given))}; it has {known}.")
        if inner not in INNER_COMPILERS:
            raise ValueError(f"options['inner'] must be one of {INNER_COMPILERS}, got {inner!r}")
        if not isinstance(float32_gradients, bool):
            raise TypeError(f"options['float32_gradients'] takes True or False, got {float32_gradients!r}")
        if inductor and inner != "inductor":
            raise ValueError(f"options['inductor'] is given, but the inner compiler is {inner!r}")
        if unknown := compat.unknown_inductor_options(inductor):
            raise ValueError(f"options['inductor'] has {unknown}, which torch._inductor.config does not know")
        if inductor.get("triton.cudagraphs"):
            raise NotImplementedError(
                "CUDA graphs are not implemented yet: take 'triton.cudagraphs' out of the options"
            )
        if float32_gradients and inductor.get("triton.native_matmul"):
            raise ValueError(
                "options['float32_gradients'] does nothing with Inductor's 'triton.native_matmul', which has no out dtype: "
                "take one of them out of the options"
            )
        return CompileOptions(inner, schedule, float32_gradients, tuple(sorted(inductor.items())))

    def __str__(self) -> str:
        """What is not as it is by default, for ranks to compare."""
        default = CompileOptions()
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        changed = [f"{name}={value!r}" for name, value in given.items() if value != getattr(default, name)]
        return f"options {', '.join(changed)}" if changed else "default options"
