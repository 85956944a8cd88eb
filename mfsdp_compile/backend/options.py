"""Options of ``torch.compile(model, backend="mfsdp", options={...})``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from mfsdp_compile.passes.pipeline import UserPass, name_of
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.formats.fp8_linear import SCALINGS
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.nearest import did_you_mean
from mfsdp_compile.runtime.schedule.file import ScheduleText
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy

from ..byte_sizes import parse_bytes

if TYPE_CHECKING:
    from mfsdp_compile.passes.guests.solver.hardware import Hardware
    from mfsdp_compile.passes.guests.solver.simulate import OptimizerCost

INNER_COMPILERS = ("inductor", "aot_eager", "inductor_whole")
VERIFY = ("once", "each")


_OF_MODELS = ("prefetch", "prefetch_bytes", "reductions_in_flight", "reduction_bytes", "keep_last")
"""Options whose defaults are the model's, see :meth:`~mfsdp_compile.ShardedModule.set_schedule`."""

Fp8Filter = Callable[[str, torch.Size], bool]


@dataclass(frozen=True)
class CompileOptions:
    """Options of the ``mfsdp`` backend.

    Args:
        inner: Compiler for the scheduled graphs. ``"inductor"`` compiles what lies between collectives, each distinct
            piece once for all layers, schedules and ranks of a machine. ``"aot_eager"`` runs operator by operator, and
            gives bitwise the same numbers as the eager path. ``"inductor_whole"`` gives Inductor whole graphs: for
            those that cannot be cut at their collectives.
        schedule: Numbers that control the schedule; options with the names of its fields set them. ``memory_budget``
            takes bytes, as a number or as text such as ``"70GiB"``.
        text: A schedule to follow, from ``options={"schedule": path}``: a file that :meth:`ScheduleText.save` wrote,
            possibly edited.
        hardware: The machine that times are predicted for, from ``options={"hardware": name}``: the name of a machine
            that this package knows, or a file that ``mfsdp calibrate`` wrote. Default: the known machine closest to the
            current device.
        optimizer: The optimizer whose state and step are counted in predictions; None: AdamW.
        regions: Whether equal units are compiled once, as regions that the graph calls. ``"auto"``: if at least three
            units are equal. True: if at least two are. False: every unit is part of the graph. :func:`explain` says
            which units are regions, and why others are not.
        report: Keep what :func:`mfsdp_compile.planning.forecast.report` needs. Graphs are then not read from compile
            caches.
        float32_gradients: Let matmuls that compute gradients write their float32 sums unrounded, where gradients are
            reduced in float32. The result is more exact than that of the eager path and not equal to it. CUDA only.
        step_in_backward: Whether backwards deliver each gradient as soon as it has arrived, so that
            :func:`mfsdp_compile.compile_step`, which sets this, can step over it there.
        fp8_matmul: Compute matrix products of linear layers in float8: ``"rowwise"``, with a scale per row or column of
            each operand; ``"tensorwise"``, with one per matrix; ``"auto"``: rowwise, for layers that are large enough
            to be faster on ``hardware``. None: in the model's dtype. Layers must compute in bfloat16, and sizes of
            their weights be multiples of 16; :func:`explain` says which were left, and why. See
            :mod:`mfsdp_compile.passes.guests.fp8_matmul`.
        fp8_wgrad: Whether gradients of weights are computed in float8 too. It costs accuracy.
        fp8_filter: ``(name, shape) -> bool``, asked for each weight of two dimensions. None: weights of FSDP units. It
            must answer the same on all ranks.
        loss_chunks: Number of chunks of tokens that the logits and the loss are computed in, one after the other with
            their gradients, so that no tensor holds all logits. The model must return only the loss. None: not in
            chunks. Inductor only. See :mod:`mfsdp_compile.passes.guests.loss_chunks`.
        inductor: Settings of ``torch._inductor.config`` for the inner compiler.
        passes: Your own passes, ``pass(graph, context, phase) -> Report | None``. They run after the built-in ones on
            forward, backward and inference graphs, and the graph is verified after each. Compile caches identify a pass
            by its ``uuid()``, as in ``torch._inductor.custom_graph_pass``. If a pass is a plain function, or its uuid
            is None, nothing is cached.
        verify: ``"once"``: verify graphs after all built-in passes have run. ``"each"``: after each pass. The
            environment variable ``MFSDP_VERIFY`` sets the default.
        tune: Try several schedules in the first steps of training, at most 30, and keep the fastest one; see
            :mod:`.tuning`. Rank 0 writes it to a file, with what was tried: the given path, or
            ``"mfsdp_schedule.txt"`` for True. Numbers for the schedule that are given stay as they are. Off with
            :func:`mfsdp_compile.deterministic`.
        progress: Whether rank 0 tells on stderr about compilations that take longer than 5 s.
        given: Names of the options for the schedule that were given.
    """

    inner: str = "inductor"
    schedule: SchedulePolicy = field(default_factory=SchedulePolicy)
    text: ScheduleText | None = None
    hardware: Hardware | None = None
    optimizer: OptimizerCost | None = None
    regions: bool | str = "auto"
    report: bool = False
    float32_gradients: bool = False
    step_in_backward: bool = False
    fp8_matmul: str | None = None
    fp8_wgrad: bool = False
    fp8_filter: Fp8Filter | None = field(default=None, repr=False)  # graphs show what it chooses
    loss_chunks: int | None = None
    inductor: tuple[tuple[str, Any], ...] = ()
    passes: tuple[UserPass, ...] = field(default=(), repr=False)  # the cache key has their uuids
    verify: str = "once"
    tune: bool | str = False
    progress: bool = True
    given: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    @property
    def fuses(self) -> bool:
        """Whether Inductor compiles what runs."""
        return self.inner != "aot_eager"

    @property
    def cuts(self) -> bool:
        """Whether graphs are cut into pieces."""
        return self.inner == "inductor"

    @property
    def steers_schedule(self) -> bool:
        """Whether anything is asked of graphs that needs their gathers and reductions to be inside."""
        needs_graph = self.text is not None or self.report or bool(self.passes) or bool(self.tune)
        return self.schedule != SchedulePolicy() or needs_graph

    @staticmethod
    def names() -> set[str]:
        """Return the names of all options."""
        return {f.name for f in (*fields(CompileOptions), *fields(SchedulePolicy))} - {"text", "given"}

    def with_defaults_of(self, models: Sequence[ShardedModel], holds_all: bool) -> CompileOptions:
        """Return options whose numbers for the schedule, where they were not given, are those of the models.

        If none was given, and the graph holds all of the models (``holds_all``), their schedule file holds, too.

        Raises:
            ValueError: Models in one graph have different schedules.
        """
        if self.schedule.is_solved or self.text is not None:
            return self
        names = [name for name in _OF_MODELS if name not in self.given]
        first, *others = [{name: getattr(model.schedule.policy, name) for name in names} for model in models]
        follows = holds_all and all(name.startswith("activation_") for name in self.given)
        texts = [model.schedule.text if follows else None for model in models]
        if any(other != first for other in others) or any(text != texts[0] for text in texts):
            raise ValueError(
                "Two models in one compiled graph have different schedules (set_schedule). Give them the same one, or "
                "compile them apart."
            )
        return replace(self, schedule=replace(self.schedule, **first), text=texts[0])

    def contradict(self, models: Sequence[ShardedModel]) -> bool:
        """Whether numbers for the schedule were given that the models, whose eager path serves blocks, do not have."""
        names = self.given.intersection(_OF_MODELS)
        return any(
            getattr(self.schedule, name) != getattr(model.schedule.policy, name) for model in models for name in names
        )

    def pass_identities(self) -> list[Any] | None:
        """Return the uuids of the user's passes, or None if one of them has none."""
        found = [uuid() if callable(uuid := getattr(p, "uuid", None)) else None for p in self.passes]
        return None if None in found else found

    @staticmethod
    def of(options: Mapping[str, Any] | None, mode: str | None) -> CompileOptions:
        """Parse the arguments of ``torch.compile``. Raises ValueError for unknown options and unsupported values."""
        if mode in ("reduce-overhead", "max-autotune"):
            raise ValueError(
                f"torch.compile(mode={mode!r}) is not supported: it makes CUDA graphs of compiled code alone. {_GRAPHS}"
                + (" Autotuning: options={'inductor': {'max_autotune': True}}." if mode == "max-autotune" else "")
            )
        if mode not in (None, "default"):
            raise ValueError(
                f"torch.compile(mode={mode!r}) is not supported by the mfsdp backend. Pass Inductor's settings in "
                "options, for instance options={'inductor': {'max_autotune': True}}."
            )
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(f"torch.compile takes options as a dict, such as {{'prefetch': 2}}, got {options!r}")
        given = dict(options or {})
        numbers = {f.name: given.pop(f.name) for f in fields(SchedulePolicy) if f.name in given}
        if numbers.get("memory_budget") is not None:
            numbers["memory_budget"] = parse_bytes(numbers["memory_budget"], "options['memory_budget']")
            numbers = dict.fromkeys(("prefetch", "reshard_after_forward", "activation_memory_budget"), "auto") | numbers
        for name in ("activation_offload", "activation_offload_least"):
            if isinstance(value := numbers.get(name), str) and value != "auto":
                numbers[name] = parse_bytes(value, f"options['{name}']")
        schedule = SchedulePolicy(**numbers)
        _refuse_idle(schedule, numbers)
        scheduled = {name: value for name, value in numbers.items() if not name.startswith("activation_")}
        text = _schedule_text(given.pop("schedule", None), scheduled)
        if text is not None and text.portions:
            schedule = replace(schedule, reshard_after_forward=text.portions)
        if given.get("hardware") is not None or "optimizer" in given:
            from .predictions import hardware_of, optimizer_of

            given["hardware"] = hardware_of(given["hardware"]) if given.get("hardware") is not None else None
            given["optimizer"] = optimizer_of(given.get("optimizer", "adamw"))
        known = sorted(CompileOptions.names())
        if unknown := [name for name in given if name not in known]:
            raise ValueError(
                f"The mfsdp backend has no option {', '.join(map(repr, unknown))}; it has {known}."
                f"{did_you_mean(unknown[0], known)}"
            )
        given.setdefault("verify", os.environ.get("MFSDP_VERIFY") or "once")
        given.setdefault("inductor", {})
        found = CompileOptions(**given, schedule=schedule, text=text, given=frozenset(numbers))
        found._check()
        return replace(found, inductor=tuple(sorted(given["inductor"].items())), passes=tuple(found.passes))

    def _check(self) -> None:
        """Raise TypeError or ValueError for unsupported values of options other than the schedule's."""
        if self.inner not in INNER_COMPILERS:
            raise ValueError(f"options['inner'] must be one of {INNER_COMPILERS}, got {self.inner!r}")
        for name in ("float32_gradients", "step_in_backward", "fp8_wgrad", "report", "progress"):
            if not isinstance(value := getattr(self, name), bool):
                raise TypeError(f"options['{name}'] takes True or False, got {value!r}")
        _check_fp8(self.fp8_matmul, self.fp8_wgrad, self.fp8_filter)
        if not isinstance(self.tune, (bool, str)) or self.tune == "":
            raise TypeError(f"options['tune'] takes True, False or the path of a file to write, got {self.tune!r}")
        if isinstance(self.tune, str) and os.path.isdir(self.tune):
            raise ValueError(f"options['tune'] is the path of a file to write, and {self.tune} is a folder")
        if self.tune and self.inner == "inductor_whole":
            raise ValueError(
                "options['tune'] tries several schedules, and with options['inner'] 'inductor_whole' the model would "
                "be compiled again for each. Use 'inductor', which compiles pieces, or 'aot_eager'."
            )
        if self.tune and self.text is not None:
            raise ValueError("options['tune'] looks for a schedule, and options['schedule'] is one: pass only one.")
        if not isinstance(self.regions, bool) and self.regions != "auto":
            raise TypeError(f"options['regions'] takes True, False or 'auto', got {self.regions!r}")
        if self.verify not in VERIFY:
            raise ValueError(f"options['verify'], or MFSDP_VERIFY, must be one of {VERIFY}, got {self.verify!r}")
        if not isinstance(self.passes, (list, tuple)):
            raise TypeError(f"options['passes'] takes a list of passes, got {self.passes!r}")
        for user_pass in self.passes:
            if not callable(user_pass) or isinstance(user_pass, type):
                raise TypeError(
                    f"options['passes'] takes callables (graph, context, phase) -> Report, got {user_pass!r}"
                )
        inductor: Any = self.inductor
        if not isinstance(inductor, Mapping):
            raise TypeError(f"options['inductor'] takes a dict of settings of torch._inductor.config, got {inductor!r}")
        if inductor and not self.fuses:
            raise ValueError(f"options['inductor'] is given, but the inner compiler is {self.inner!r}")
        if unknown := compat.unknown_inductor_options(inductor):
            raise ValueError(f"options['inductor'] has {unknown}, which torch._inductor.config does not know")
        if inductor.get("triton.cudagraphs"):
            raise ValueError(f"options['inductor'] has 'triton.cudagraphs'. {_GRAPHS}")
        if self.loss_chunks is not None:
            _check_loss_chunks(self.loss_chunks, self.inner, inductor)
        if self.float32_gradients and inductor.get("triton.native_matmul"):
            raise ValueError(
                "options['float32_gradients'] has no effect with Inductor's 'triton.native_matmul', which has no out "
                "dtype: remove one of the two options"
            )

    def __str__(self) -> str:
        """List the options that differ from their defaults, for ranks to compare. Omits those that change no graph."""
        default = CompileOptions()
        silent = ("verify", "report", "progress", "given")
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in silent}
        given["passes"] = tuple(map(name_of, self.passes))
        given["fp8_filter"] = name_of(self.fp8_filter) if self.fp8_filter is not None else None
        changed = [f"{name}={value!r}" for name, value in given.items() if value != getattr(default, name)]
        return f"options {', '.join(changed)}" if changed else "default options"


def _check_fp8(fp8_matmul: Any, fp8_wgrad: Any, fp8_filter: Any) -> None:
    """Raise for values of the options for products in float8 that mean nothing."""
    allowed = (*SCALINGS, "auto", None)
    if fp8_matmul not in allowed:
        raise ValueError(f"options['fp8_matmul'] must be one of {allowed}, got {fp8_matmul!r}")
    if fp8_filter is not None and not callable(fp8_filter):
        raise TypeError(f"options['fp8_filter'] takes a function (name, shape) -> bool, got {fp8_filter!r}")
    if fp8_matmul is None and (fp8_wgrad or fp8_filter is not None):
        raise ValueError(
            "options['fp8_wgrad'] and options['fp8_filter'] say what is computed in float8, but options['fp8_matmul'] "
            f"is not given, so nothing is. Add it: one of {', '.join(map(repr, allowed[:-1]))}."
        )


def _check_loss_chunks(chunks: Any, inner: str, inductor: Mapping[str, Any]) -> None:
    """Raise for values of the option ``loss_chunks``, and for others that it does not work with."""
    if not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 2:
        raise ValueError(f"options['loss_chunks'] takes a number of chunks, at least 2, or None, got {chunks!r}")
    if inner == "aot_eager":
        raise ValueError(f"options['loss_chunks'] is {chunks}, which needs Inductor, not the inner compiler {inner!r}")
    if same := [name for name in inductor if name.startswith("auto_chunker.") or name == "joint_custom_pre_pass"]:
        raise ValueError(f"options['loss_chunks'] sets what options['inductor'] sets too: {same}. Give one of them.")


_GRAPHS = (
    "Inductor's graphs give gathered parameters and gradients memory that they reuse while collectives of other ranks "
    "still read it, and replay without the host's part of a step. Capture the whole step instead, collectives "
    "included: mfsdp_compile.capture_step(model, step)."
)


def _refuse_idle(schedule: SchedulePolicy, given: Mapping[str, Any]) -> None:
    """Raise ValueError for options that have no effect in combination with the others."""
    if "activation_offload_least" in given and not schedule.activation_offload:
        raise ValueError(
            "options['activation_offload_least'] says which values saved for backward are too small for a copy to host "
            "memory, but options['activation_offload'] is not given, so none is copied. Give both, or leave it out."
        )
    rules = ["prefetch_bytes", "reductions_in_flight", "reduction_bytes"]
    if schedule.reshard_after_forward == "auto":
        rules.append("keep_last")
    if schedule.is_solved and (idle := [name for name in rules if name in given]):
        raise ValueError(
            f"options {', '.join(map(repr, idle))}: with a memory_budget, or 'auto', the solver decides this; the "
            "option is for schedules that are set by numbers. Leave it out, or give numbers for prefetch and "
            "reshard_after_forward and no memory_budget."
        )
    if schedule.activation_memory_budget == "auto" and schedule.memory_budget is None:
        raise ValueError(
            "options['activation_memory_budget'] is 'auto', which saves as much as options['memory_budget'] leaves "
            "room for, but there is none. Give both, or a fraction from 0 to 1."
        )
    if not schedule.is_solved and "budget_reserve" in given:
        raise ValueError(
            "option 'budget_reserve' is part of a memory budget for the solver, which is not used here: give "
            "memory_budget too, or prefetch='auto', or leave it out."
        )


def _schedule_text(given: Any, numbers: Mapping[str, Any]) -> ScheduleText | None:
    if given is None:
        return None
    if numbers:
        raise ValueError(
            f"options['schedule'] fixes the whole schedule, and so do {', '.join(map(repr, sorted(numbers)))}: pass "
            "only one of them."
        )
    return given if isinstance(given, ScheduleText) else ScheduleText.load(given)
