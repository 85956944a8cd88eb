"""A model whose parameters are sharded: what :func:`~mfsdp_compile.shard` returns."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.eager.modules import register_forward
from mfsdp_compile.runtime.geometry.topology import Accumulation
from mfsdp_compile.runtime.memory.tensor import UnreducedGradient
from mfsdp_compile.runtime.model import recovery, settings
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.owner import name_of
from mfsdp_compile.runtime.plan.precision import MixedPrecisionPolicy, Policies, PolicyArgument
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy
from mfsdp_compile.runtime.schedule.schedule import Schedule

from .byte_sizes import parse_bytes

if TYPE_CHECKING:
    from mfsdp_compile.runtime.schedule.file import ScheduleText

    from .backend.verify_step import StepComparison


class ShardedModule(nn.Module):
    """A model whose parameters are sharded. :func:`~mfsdp_compile.shard` creates it.

    It trains eagerly, with hooks that gather and reduce, or through ``torch.compile(model, backend="mfsdp")``, with the
    same numbers. ``parameters()`` are DTensors that hold this rank's rows of each parameter at all times. Inside a
    forward, and only there, ``module.weight`` is the unsharded parameter. After ``backward()``, every parameter that
    some rank used has its gradient: the mean over data-parallel ranks, summed over microbatches until it is set to
    None.

    Attributes that this class does not define are looked up in the wrapped module.

    Args:
        module: The module, which has been sharded in place. Names of parameters are its own, prefixed with ``module.``.
        sharded: What owns its buckets.
    """

    def __init__(self, module: nn.Module, sharded: ShardedModel) -> None:
        super().__init__()
        self.module = module
        compat.refuse_other_sharding(self)
        self.sharded = sharded

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not set yet
                raise
            return getattr(self.module, name)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict with the keys of this module, or with those of :attr:`module`, which lack ``module.``."""
        inner = bool(state_dict) and not any(key.startswith("module.") for key in state_dict)
        load = self.module.load_state_dict if inner else super().load_state_dict
        return load(state_dict, *args, **kwargs)

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """Read by DistributedDataParallel when it is built, before anything else of a module."""
        raise ValueError(
            "DistributedDataParallel got a model that is already data-parallel: fully_shard_model has sharded it, and "
            "its backward reduces gradients. Use the sharded model itself."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "A sharded model cannot be pickled: it holds process groups and this rank's shards only. Save "
            "model.state_dict() with torch.distributed.checkpoint instead."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        """Return an independent sharded model: separate memory, same values, same process groups. No communication."""
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return duplicate

    # -- when gradients are reduced -----------------------------------------------------------------------------------
    #
    # With optim_grads and optim_grads_params, every backward reduces gradients over inner ranks. What can be deferred
    # to the last microbatch is the reduction over outer ranks; with no_shard, optim, or
    # set_accumulation(whole_gradients=True), all of it.

    @property
    def is_last_microbatch(self) -> bool | None:
        """Whether the next backward is the last one before the optimizer step. Set it before ``backward``.

        None (the default) leaves the decision to :attr:`model_auto_sync`.
        """
        return self.sharded.grad_sync.settings.last_microbatch

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool | None) -> None:
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"is_last_microbatch takes True, False or None, got {value!r}")
        self.sharded.grad_sync.settings.last_microbatch = value

    @property
    def model_auto_sync(self) -> bool:
        """Whether gradients are reduced completely after every backward."""
        return self.sharded.grad_sync.settings.automatic

    @property
    def microbatch_count(self) -> int:
        """Number of backwards since gradients were last reduced completely."""
        return self.sharded.grad_sync.microbatches

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Set whether gradients are reduced completely after every backward from now on."""
        self.sharded.grad_sync.settings.automatic = bool(sync_model)

    def sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which every backward reduces gradients completely, including deferred ones."""
        return self._override(True)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for backwards that are not the last before the optimizer step.

        Reductions that the strategy can defer are deferred.
        """
        return self._override(False)

    @contextlib.contextmanager
    def _override(self, due: bool) -> Iterator[None]:
        settings = self.sharded.grad_sync.settings
        before, settings.override = settings.override, due
        try:
            yield
        finally:
            settings.override = before

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Reduce deferred gradients, and give every parameter that was used its gradient. Collective.

        Costs nothing if no reduction is deferred.

        Raises:
            ValueError: If ``force_all_reduce`` is True and the strategy shards anything: a rank has no use for
                gradients of rows that it does not hold.
        """
        if force_all_reduce and self.sharded.topology.over_inner.shards:
            raise ValueError(
                "force_all_reduce=True asks for full gradients on every rank, but with "
                f"zero_dp_strategy={self.sharded.topology.strategy.name.lower()!r} each rank holds only its own rows "
                "of parameters and gradients. Leave it out, or shard with zero_dp_strategy='no_shard'."
            )
        self.sharded.grad_sync.finish()

    def set_accumulation(self, *, whole_gradients: bool = False, keep_gathered: bool = False) -> None:
        """Trade memory for communication over the microbatches of an optimizer step.

        Call without arguments to restore the default. Gradients and parameters stay whole until the backward that
        reduces, so mark the last microbatch with :attr:`is_last_microbatch`, :meth:`sync` or :meth:`no_sync`. Compiled
        code is recompiled.

        Args:
            whole_gradients: Sum unsharded gradients on each rank, and reduce them once per step. For strategies that
                shard gradients; the others always do so. Memory: all gradients, in ``main_grads_dtype``.
            keep_gathered: Gather parameters once per step, and release them when the step's gradients are reduced. For
                ``optim_grads_params``; the other strategies always keep parameters gathered. Memory: all parameters, in
                the dtype that the model computes in.

        Raises:
            RuntimeError: If a step is in progress.
            ValueError: If ``keep_gathered`` is combined with HFSDP.
        """
        settings.set_accumulation(self.sharded, Accumulation(whole_gradients, keep_gathered))

    # -- their values -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply every gradient by ``factor``.

        For example, with ``calculate_per_token_loss``, by one over the number of tokens on all ranks.
        """
        for bucket in self.sharded.buckets:
            if (total := bucket.deferred_total) is not None:
                total.mul_(factor)
            gradients = [g for g in bucket.gradients if g is not None and not isinstance(g, UnreducedGradient)]
            if gradients:
                torch._foreach_mul_(gradients, factor)
        for param in self.sharded.ignored.values():
            if param.grad is not None:
                param.grad.mul_(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients as ``nn.Module.zero_grad`` does, including those in ``decoupled_grad``."""
        super().zero_grad(set_to_none and not self.sharded.keeps_gradients)
        self.sharded.zero_gradients(set_to_none)

    def gradient_norms(self, norm_type: float = 2.0) -> dict[str, torch.Tensor]:
        """Return the norm of every parameter's full gradient, by name. One all-reduce.

        Norms are 0-d tensors, equal on every rank.
        """
        names, gradients = [], []
        for bucket in self.sharded.buckets:
            for locations, gradient in zip(bucket.locations, bucket.gradients, strict=True):
                if gradient is not None:
                    names.append(locations[0].name)
                    gradients.append(gradient)
        return dict(zip(names, torch._foreach_norm(gradients, norm_type), strict=True)) if gradients else {}

    # -- parameters between forwards ----------------------------------------------------------------------------------

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the full tensor of every parameter, bucket by bucket.

        For exporting weights, for example to an inference engine. Names are those in :attr:`module`; tensors have the
        dtype of the shards. Tied parameters appear once, under their first name. ``ignored_params`` come last: a copy
        of what this rank has.

        Collective: all ranks must exhaust the iterator, in the same order; a rank that does not need a tensor drops it.
        Memory: one bucket, or two if the caller still holds a tensor of the last one while the next one is gathered, as
        the variable of a loop does without ``del``. Gloo takes another bucket meanwhile, for copies of its own.

        Other ranks learn within seconds of an error inside of a gather, whichever rank has it; then ``model.reset()``.
        """
        self.sharded.check_parameters_are_everyones("full_parameters")
        for param, whole in self.sharded.wholes():
            yield name_of(param), whole
            del whole  # frees its bucket before the next one is gathered

    def gathered(self, budget: int | str | None = None) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which parameters stay gathered between forwards.

        For ``generate()`` and evaluation. Collective: all ranks enter and leave. Parameters have the dtype that the
        model computes in. If all of them fit, forwards start no collective, and ranks may run different forwards, such
        as sequences of different lengths. If not, units later in the model are gathered at each use, and all ranks must
        run the same number of forwards. A model compiled with ``backend="mfsdp"`` compiles separate code for the
        inside. A backward inside releases what is gathered when it reduces.

        Args:
            budget: Bytes of parameters that may stay gathered, as a number or as text such as ``"4GiB"``. None: all of
                them. Strategies other than ``optim_grads_params`` always keep parameters gathered.

        Raises:
            RuntimeError: If a step is in progress.
            ValueError: With HFSDP.
        """
        return settings.gathered(self.sharded, None if budget is None else parse_bytes(budget, "gathered(budget)"))

    def set_schedule(
        self,
        *,
        prefetch: int = 1,
        prefetch_bytes: int | str = 4 << 30,
        reductions_in_flight: int = 1,
        reduction_bytes: int | str = 8 << 30,
        keep_last: bool = True,
        schedule: str | Path | ScheduleText | None = None,
    ) -> None:
        """Set how early units are gathered and how late reductions are awaited: the same numbers in every way to run.

        The eager path follows them, and so do modules that are compiled one by one. They are the defaults of the
        options of these names where the whole model is compiled. No number changes a result. Collective, between
        steps; code is compiled again. Call without arguments to restore the defaults.

        Args:
            prefetch: Number of units before its first use at which a unit's gather starts; 0: right at its use. Memory:
                that many units more.
            prefetch_bytes: Largest unit, in gathered bytes, that is gathered ahead; text such as ``"4GiB"``, too.
            reductions_in_flight: Number of units whose reductions may be under way while backward goes on.
            reduction_bytes: Largest total bytes of reductions under way.
            keep_last: Whether the unit that forward uses last stays for the backward, which needs it first.
            schedule: A schedule to follow, or its file: what :func:`.schedule_of` returned for a compiled model, such
                as one that was compiled with a ``memory_budget``, or what ``mfsdp plan --schedule`` wrote. It decides
                which buckets stay gathered, which gathers start how early, and which reductions are awaited how late;
                the numbers hold for what it has no lines for. Places are relative to other units, so a step that uses
                units in another order follows it, too.

        Raises:
            TypeError, ValueError: If a number is not a whole number, or negative; the file cannot be read, names
                unknown buckets, or its order is impossible.
            RuntimeError: If a step is in progress, or ranks ask for different schedules. Nothing has changed.
        """
        if prefetch == "auto":
            raise TypeError(
                "set_schedule takes numbers: prefetch='auto' is found from a compiled graph. Pass it in the options of "
                "torch.compile."
            )
        policy = SchedulePolicy(
            prefetch=prefetch,
            prefetch_bytes=parse_bytes(prefetch_bytes, "set_schedule(prefetch_bytes)"),
            reductions_in_flight=reductions_in_flight,
            reduction_bytes=parse_bytes(reduction_bytes, "set_schedule(reduction_bytes)"),
            keep_last=keep_last,
        )
        if isinstance(schedule, (str, Path)):
            from mfsdp_compile.runtime.schedule.file import ScheduleText

            schedule = ScheduleText.load(schedule)
        settings.set_schedule(self.sharded, Schedule(policy, schedule))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``generate`` of the wrapped transformers model, with ``synced_gpus=True`` if forwards gather.

        Ranks whose sequences have ended then keep running forwards until all ranks are done. Inside :meth:`gathered`,
        with room for all parameters, each rank generates independently.

        Raises:
            AttributeError: If the model has no such method.
        """
        generate = self.module.generate
        if "synced_gpus" in inspect.signature(generate).parameters:
            kwargs.setdefault("synced_gpus", self.sharded.topology.gather_group is not None)
        return generate(*args, **kwargs)

    def summon_full_params(self, *, writeback: bool = True) -> contextlib.AbstractContextManager[None]:
        """Return a context manager in which :attr:`module` is the original, unsharded module.

        Inside, its parameters are unsharded, in the dtype of the shards, and no forward communicates. Collective: all
        ranks enter and leave. Memory: the whole model on every rank; :meth:`full_parameters` needs one or two buckets.

        Optimizers keep the shards, which do not change before the exit. Over other mesh dimensions (tensor
        parallelism), parameters are divided as they were in the original model. Weights of 4 bits are their library's
        own tensors, which can be dequantized, and written to in place.

        Args:
            writeback: Keep what was written to parameters. All ranks must write the same values, which they compare at
                the exit. If False, changes are lost.

        Raises:
            RuntimeError: If a step is in progress. At the exit, if ranks have written different values, or one has
                failed. All parameters then keep their previous values.
            ValueError: At the exit, if a parameter was replaced by one of another shape, names that share a parameter
                were given different values, or a weight of 4 bits was replaced. All parameters then keep their
                previous values.
        """
        return self.sharded.whole_parameters(writeback)

    def register_forward_method(self, name: str, module: nn.Module | None = None) -> None:
        """Let a method of the model read unsharded parameters, as ``forward`` does.

        Needed for methods other than ``forward`` that a training or inference loop calls directly and that use a
        parameter themselves. Methods that only call other modules need nothing. Equivalent to FSDP2's
        ``register_fsdp_forward_method``.

        Args:
            name: Name of the method.
            module: The submodule that has the method. None: the model itself.

        Raises:
            AttributeError: If the module has no such method.
            ValueError: If ``module`` holds no sharded parameters.
        """
        register_forward(module if module is not None else self.module, name)

    def manual_buffer_registration(self) -> bool:
        """Register the communication buffers with NCCL, for ``nccl_ub`` with ``fsdp_manual_registration``. Collective.

        Call it between steps. The buffers of a copy (``copy.deepcopy``) of a model that is registered are registered
        when the copy uses the first one.

        Returns:
            Whether NCCL runs the model's collectives. Otherwise nothing is registered.

        Raises:
            ValueError: If the model was sharded without ``nccl_ub``.
        """
        return self.sharded.manual_buffer_registration()

    # -- checks -------------------------------------------------------------------------------------------------------

    def verify_step(
        self,
        *args: Any,
        options: Mapping[str, Any] | None = None,
        tolerance: float | None = None,
        loss: Callable[[Any], torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> StepComparison:
        """Run a step eagerly and compiled, from the same state and random numbers, and compare the results.

        It compares outputs, buffers and the gradient of every parameter. Weights, gradients, buffers and random state
        are restored before it returns. Collective: all ranks call it, between optimizer steps.

        Args:
            *args: Positional arguments of the model.
            **kwargs: Keyword arguments of the model.
            options: Options for ``torch.compile(backend="mfsdp")``. Default: ``{"inner": "aot_eager"}``, which runs
                operator by operator, so that only the passes and the schedule are under test. Inductor is set to draw
                random numbers as torch does (``fallback_random``).
            tolerance: Upper bound for the norm of a difference, relative to the norm of the tensor or that of an
                average tensor of its kind, whichever is larger. Default: 0 (bitwise equality) with ``aot_eager``, and
                the square root of the dtype's epsilon with Inductor, which computes in another order.
            loss: Computes the loss from the model's output. Default: the output itself if it is a scalar, otherwise the
                sum of the mean squares of its tensors.

        Raises:
            RuntimeError: On every rank, if a tensor differs on any rank. The message names the first one: outputs
                first, then gradients from the last parameter to the first, which is the order in which backward
                computes them. Also if gradients wait for their reduction.
        """
        from .backend.verify_step import compare_step

        return compare_step(self, args, kwargs, options, tolerance, loss)

    # -- after failures -----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Recover from a step that failed on some ranks. Every rank calls it, after its error.

        A rank that raises in forward leaves the others waiting for it. They raise after the process group's timeout,
        and its process groups are unusable from then on. This method creates new ones for the model and clears
        gradients. Weights and optimizer state are those before the step. Process groups that you use yourself are yours
        to recreate. Code is compiled once more.

        Raises:
            RuntimeError: If a rank does not arrive within four times the process group's timeout.
        """
        recovery.reset(self.sharded)

    # -- settings -----------------------------------------------------------------------------------------------------

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The mixed-precision policy; if classes of modules have policies of their own, that of everything else."""
        return self.sharded.precision.default

    @contextlib.contextmanager
    def mixed_precision_context(self, policy: PolicyArgument) -> Iterator[None]:
        """Reduce gradients in ``policy.grad_comm_dtype`` inside. Graphs are compiled once for each dtype.

        Args:
            policy: As for :meth:`reset_mixed_precision_policy`.

        Raises:
            TypeError, ValueError: See :meth:`reset_mixed_precision_policy`.
        """
        before = self.sharded.precision
        self.reset_mixed_precision_policy(policy)
        try:
            yield
        finally:
            settings.set_precision(self.sharded, before)

    def reset_mixed_precision_policy(self, policy: PolicyArgument) -> None:
        """Reduce gradients in ``policy.grad_comm_dtype`` from now on.

        Args:
            policy: As for :func:`~mfsdp_compile.fully_shard_model`: a policy, or a mapping of classes to policies if
                the model has one. A policy for the whole model may leave its other fields at their defaults.

        Raises:
            TypeError: If ``policy`` is not a policy.
            ValueError: If another field is neither at its default nor the model's.
        """
        before = self.sharded.precision
        if isinstance(policy, MixedPrecisionPolicy) and not before.own:
            policy = policy.filled_from(before.default)
        given = Policies.of(policy, "mixed_precision_context")
        if given.reducing_like(before) != before:
            raise ValueError(
                f"mixed_precision_context can only change grad_comm_dtype: the model has {before}, got {given}."
            )
        settings.set_precision(self.sharded, given)


def unwrapped(model: nn.Module, what: str) -> ShardedModule:
    """Return the sharded model inside ``torch.compile``'s wrapper, or the model itself if it is not wrapped.

    Args:
        what: Name of the caller, for the error message.

    Raises:
        TypeError: If ``model`` is not a sharded model.
    """
    inner = model if isinstance(model, ShardedModule) else getattr(model, "_orig_mod", model)
    if not isinstance(inner, ShardedModule):
        raise TypeError(
            f"{what} takes the model that fully_shard_model returned (compiled or not), got a {type(inner).__name__}."
        )
    return inner
