"""What a sharded model does with parameters between forwards: gathers them, yields them whole, lets them be read."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mfsdp_compile.runtime.eager.modules import register_forward
from mfsdp_compile.runtime.model import settings
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.owner import name_of
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy
from mfsdp_compile.runtime.schedule.schedule import Schedule

from .byte_sizes import parse_bytes

if TYPE_CHECKING:
    from mfsdp_compile.runtime.schedule.file import ScheduleText


class ParameterMethods(nn.Module):
    """Methods of :class:`~mfsdp_compile.MegatronFSDP` that concern parameters."""

    module: nn.Module
    sharded: ShardedModel

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

    def start_param_sync(self, *, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Start gathering parameters that the strategy keeps gathered, if they have changed.

        With full sharding over one dimension there are none: graphs and forwards gather their own.

        Args:
            force_sync: Also wait for these gathers.
            force_dispatch: Has no effect: gathers are always started.
        """
        self.sharded.refresh()
        if force_sync:
            self.synchronize_param_gather()

    def synchronize_param_gather(self) -> None:
        """Wait for gathers that have been started and are not in use yet."""
        self.sharded.await_gathers()

    def all_gather_and_wait_parameters_ready(
        self,
        params: Iterable[nn.Parameter],
        prefetch: bool = True,
        prefetch_order: Any = None,
        wait_bucket_ready: bool = True,
        bwd: bool = False,
    ) -> None:
        """Gather the units that hold these parameters, so that they can be read outside of forwards. Collective.

        They stay gathered until their next forward has run. ``module.weight`` is then the whole parameter;
        ``parameters()`` are still shards. Forwards and backwards gather by themselves.

        Args:
            params: Parameters of the model, such as ``layer.parameters()``.
            prefetch, prefetch_order: Have no effect: nothing else is gathered.
            wait_bucket_ready: Wait until they are gathered. If False, their first use waits.
            bwd: Must be False: what backward needs, it gathers.

        Raises:
            ValueError: If a parameter is not the model's, or ``bwd`` is True.
        """
        if bwd:
            raise ValueError(
                "all_gather_and_wait_parameters_ready(bwd=True): backward gathers what it needs by itself, and "
                "releases it. Leave the call out."
            )
        ids = {id(param) for param in params}
        buckets = {bucket for bucket in self.sharded.buckets if ids & {id(param) for param in bucket.params}}
        if unknown := ids - {id(param) for bucket in buckets for param in bucket.params}:
            raise ValueError(
                f"all_gather_and_wait_parameters_ready: {len(unknown)} of the parameters are not sharded parameters of "
                "this model. Pass those of model.parameters(), or of modules inside of it."
            )
        if not self.sharded.eager.is_in_window:
            self.sharded.leave_backward()
        wait = self.sharded.eager.gathering.unshard(
            [unit for unit in self.sharded.eager.units if buckets & {*unit.buckets}]
        )
        if wait_bucket_ready:
            wait()

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

    def broadcast_params(self) -> None:
        """Copy parameters from the first rank to the ranks that replicate them. Collective.

        With ``no_shard`` these are all ranks, with HSDP the outer ranks; otherwise each value is on one rank only.
        Sharding already checks that ranks hold the same values; this method is for values that were changed afterwards.
        """
        self.sharded.broadcast()

    @property
    def param_and_grad_buffer(self) -> ShardedModel:
        """The object that owns the buckets, for functions that take it as an argument.

        Treat it as opaque, but for ``manual_buffer_registration()``, which is :meth:`manual_buffer_registration`.
        """
        return self.sharded

    @property
    def raw_param(self) -> dict[str, nn.Parameter]:
        """Parameters by their names in :attr:`module`. They are shards: only modules in forward get whole ones."""
        return dict(self.module.named_parameters())

    @property
    def param_to_name(self) -> dict[nn.Parameter, str]:
        """Names in :attr:`module` by parameter."""
        return {param: name for name, param in self.module.named_parameters()}

    def install_optimized_model_weights(self) -> None:
        """Prefetch updated parameters. Optional; the next forward is correct without it.

        For strategies that keep parameters gathered, it starts the gathers now.
        """
        self.sharded.refresh(ahead=True)
