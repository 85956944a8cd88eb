"""``torch.compile(model, backend="mfsdp", options={...})``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from mfsdp_compile.passes.context import SchedulePolicy
from mfsdp_compile.passes.pipeline import UserPass, name_of
from mfsdp_compile.runtime import compat

__all__ = ["CompileOptions"]

INNER_COMPILERS = ("inductor", "aot_eager")
VERIFY = ("once", "each")


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
        passes: of your own, ``pass(graph, context, phase) -> Report | None``, to run after ours on forward, backward and
            inference graphs, each verified afterwards. Compile caches know a pass by its ``uuid()``, as in
            ``torch._inductor.custom_graph_pass``; with a plain function, or a uuid of None, nothing is cached.
        verify: ``"once"``: graphs are verified when all passes of ours have run; ``"each"``: after each. The environment
            variable ``MFSDP_VERIFY`` is the default.
    """

    inner: str = "inductor"
    schedule: SchedulePolicy = field(default_factory=SchedulePolicy)
    float32_gradients: bool = False
    inductor: tuple[tuple[str, Any], ...] = ()
    passes: tuple[UserPass, ...] = field(default=(), repr=False)  # the cache key has their uuids
    verify: str = "once"

    def pass_identities(self) -> list[Any] | None:
        """The uuids of passes of the user's; None if one has none."""
        found = [uuid() if callable(uuid := getattr(p, "uuid", None)) else None for p in self.passes]
        return None if None in found else found

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
        passes = given.pop("passes", ())
        verify = given.pop("verify", os.environ.get("MFSDP_VERIFY") or "once")
        if given:
            known = sorted(schedule_names | {"inner", "float32_gradients", "inductor", "passes", "verify"})
            raise ValueError(f"The mfsdp backend has no option {', '.join(map(repr, given))}; it has {known}.")
        if inner not in INNER_COMPILERS:
            raise ValueError(f"options['inner'] must be one of {INNER_COMPILERS}, got {inner!r}")
        if not isinstance(float32_gradients, bool):
            raise TypeError(f"options['float32_gradients'] takes True or False, got {float32_gradients!r}")
        if verify not in VERIFY:
            raise ValueError(f"options['verify'], or MFSDP_VERIFY, must be one of {VERIFY}, got {verify!r}")
        if not isinstance(passes, (list, tuple)):
            raise TypeError(f"options['passes'] takes a list of passes, got {passes!r}")
        for user_pass in passes:
            if not callable(user_pass) or isinstance(user_pass, type):
                raise TypeError(
                    f"options['passes'] takes functions or objects to be called with (graph, context, phase), got "
                    f"{user_pass!r}"
                )
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
        return CompileOptions(
            inner, schedule, float32_gradients, tuple(sorted(inductor.items())), tuple(passes), verify
        )

    def __str__(self) -> str:
        """What is not as it is by default, for ranks to compare; without ``verify``, which changes no graph."""
        default = CompileOptions()
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "verify"}
        given["passes"] = tuple(map(name_of, self.passes))
        changed = [f"{name}={value!r}" for name, value in given.items() if value != getattr(default, name)]
        return f"options {', '.join(changed)}" if changed else "default options"
