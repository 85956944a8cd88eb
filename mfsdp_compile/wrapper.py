"""The module that ``fully_shard_model`` returns."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from mfsdp_compile.runtime.model import ShardedModel
from mfsdp_compile.runtime.modules import register_forward
from mfsdp_compile.runtime.precision import MixedPrecisionPolicy
from mfsdp_compile.runtime.tensor import UnreducedGradient
from mfsdp_compile.runtime.topology import Accumulation, ShardingStrategy, Topology

from .comparing import StepComparison, compare_step
from .options import parse_bytes

__all__ = ["MegatronFSDP", "unwrapped"]


class MegatronFSDP(nn.Module):
    """A model whose parameters are sharded. Made by :func:`~mfsdp_compile.fully_shard_model`.

    It trains as it is, with hooks that gather and reduce, or through ``torch.compile(model, backend="mfsdp")``, with the
    same numbers. ``parameters()`` are DTensors, this rank's rows of each, at all times; inside a forward, and there
    only, ``module.weight`` is the whole parameter. After ``backward()`` every parameter that some rank used has its
    gradient, the mean over data-parallel ranks, summed over microbatches until it is set to None.

    Attributes that this class does not have are looked up in the wrapped module.

    Args:
        module: the sharded model; names of parameters are its own behind ``module.``.
        sharded: what owns its buckets.
    """

    def __init__(self, module: nn.Module, sharded: ShardedModel | None = None, *args: Any, **kwargs: Any) -> None:
        if not (isinstance(module, nn.Module) and isinstance(sharded, ShardedModel)) or args or kwargs:
            raise TypeError(
                "MegatronFSDP(...) shards nothing: it is what fully_shard_model returns. Call mfsdp_compile.fully_shard_model("
                "module, device_mesh=..., dp_shard_dim=..., fsdp_unit_modules=[...]); instead of a dist_index it takes the mesh, "
                "the names of its dimensions and, with two of them, hybrid_fsdp_group."
            )
        super().__init__()
        self.module = module
        self.sharded = sharded

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # not there yet
                raise
            return getattr(self.module, name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "A sharded model cannot be pickled: it holds process groups and this rank's shards only. Save "
            "model.state_dict() with torch.distributed.checkpoint instead."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> MegatronFSDP:
        """A sharded model of its own: other memory, same values, same groups. No communication."""
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return duplicate

    # -- when gradients are reduced -----------------------------------------------------------------------------------
    #
    # With optim_grads and optim_grads_params gradients are reduced over inner ranks in every backward. What can wait for
    # the last microbatch is the reduction over outer ranks, and, with no_shard and optim, or set_accumulation, all of it.

    @property
    def is_last_microbatch(self) -> bool | None:
        """Whether the backward at hand is the last one before the optimizer's step; None: not told, so that
        :attr:`model_auto_sync` decides. To be set before ``backward``."""
        return self.sharded.synchronisation.last_microbatch

    @is_last_microbatch.setter
    def is_last_microbatch(self, value: bool | None) -> None:
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"is_last_microbatch takes True, False or None, got {value!r}")
        self.sharded.synchronisation.last_microbatch = value

    @property
    def model_auto_sync(self) -> bool:
        """Whether gradients are reduced completely after every backward."""
        return self.sharded.synchronisation.automatic

    @property
    def microbatch_count(self) -> int:
        """Backwards since gradients were last reduced completely."""
        return self.sharded.synchronisation.microbatches

    def set_model_auto_sync(self, sync_model: bool = True) -> None:
        """Reduce gradients completely after every backward from now on, or not."""
        self.sharded.synchronisation.automatic = bool(sync_model)

    def sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards inside reduce gradients completely, with what waits from before."""
        return self._override(True)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards inside are not the last before the optimizer's step: what can wait, waits."""
        return self._override(False)

    @contextlib.contextmanager
    def _override(self, due: bool) -> Iterator[None]:
        synchronisation = self.sharded.synchronisation
        before, synchronisation.override = synchronisation.override, due
        try:
            yield
        finally:
            synchronisation.override = before

    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Reduce what waits for it, and give every parameter that was used its gradient. Collective; costs nothing if
        nothing waits.

        Raises:
            ValueError: ``force_all_reduce``, and the strategy shards gradients or what depends on them: a rank has no use
                for gradients of what it does not hold.
        """
        if force_all_reduce and self.sharded.topology.strategy is not ShardingStrategy.NO_SHARD:
            raise ValueError(
                "force_all_reduce=True asks for whole gradients on every rank, but with zero_dp_strategy="
                f"{self.sharded.topology.strategy.name.lower()!r} parameters and gradients are this rank's rows. Leave "
                "it out, or shard with zero_dp_strategy='no_shard'."
            )
        self.sharded.finish_synchronisation()

    def start_grad_sync(self) -> None:
        """Start to reduce what waits for it, as :meth:`finish_grad_sync` does, which has nothing left to do then: reductions
        that need not wait start in backward, and outside of it nothing runs that would hide the others."""
        self.sharded.finish_synchronisation()

    def synchronize_gradient_reduce(self) -> None:
        """Wait for reductions that have been started. When a backward is over, all have been awaited."""
        self.sharded.eager.finish_reductions()

    def set_accumulation(self, *, whole_gradients: bool = False, keep_gathered: bool = False) -> None:
        """Trade memory for communication, over the microbatches of an optimizer step. Without arguments: as it was.

        Both last until a backward that reduces: mark it, as the comment above says. Compiled code is compiled anew.

        Args:
            whole_gradients: sum gradients whole on each rank, and reduce them once per step. For strategies that shard
                gradients; the others do so in any case. Memory: all gradients, in ``main_grads_dtype``.
            keep_gathered: gather parameters once per step, and let go of them when it reduces. For
                ``optim_grads_params``; with the other strategies parameters are whole at all times. Memory: all parameters, in
                the dtype that the model computes in.

        Raises:
            RuntimeError: a step is under way.
            ValueError: ``keep_gathered`` with HFSDP.
        """
        self.sharded.set_accumulation(Accumulation(whole_gradients, keep_gathered))

    # -- gradients ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply every gradient by ``factor``, for instance one over the number of tokens, all ranks', after
        ``calculate_per_token_loss``."""
        for bucket in self.sharded.buckets:
            if bucket.pending is not None and bucket.pending.total is not None:
                bucket.pending.total.mul_(factor)
            gradients = [g for g in bucket.gradients if g is not None and not isinstance(g, UnreducedGradient)]
            if gradients:
                torch._foreach_mul_(gradients, factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``; also what ``use_decoupled_grad`` puts elsewhere."""
        super().zero_grad(set_to_none)
        self.sharded.zero_gradients(set_to_none)

    def zero_grad_buffer(self) -> None:
        """Forget all gradients, also what waits: every parameter's ``.grad`` becomes None, and the memory is free."""
        self.sharded.zero_gradients()

    def gradient_norms(self, norm_type: float = 2.0) -> dict[str, torch.Tensor]:
        """The norm of every parameter's whole gradient, by name; 0-d, equal on every rank. One all-reduce."""
        names, gradients = [], []
        for bucket in self.sharded.buckets:
            for sites, gradient in zip(bucket.sites, bucket.gradients, strict=True):
                if gradient is not None:
                    names.append(sites[0].name)
                    gradients.append(gradient)
        return dict(zip(names, torch._foreach_norm(gradients, norm_type), strict=True)) if gradients else {}

    # -- parameters ---------------------------------------------------------------------------------------------------

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter whole, with its name in :attr:`module`, in the dtype of the shards; bucket by bucket.

        For exporting weights, or sending them to where they are used. All ranks must take all of it, in the same order; a
        rank that has no use for a tensor drops it. Memory: one bucket, as long as nothing else is kept. Tied parameters come
        once, under their first name.
        """
        self.sharded.check_parameters_are_everyones("full_parameters")
        for bucket in self.sharded.buckets:
            parts = bucket.gather_shards()
            for sites, split, part in zip(bucket.sites, bucket.splits, parts, strict=True):
                yield sites[0].name, split.assemble(part)
            del parts, part

    def gathered(self, budget: int | str | None = None) -> contextlib.AbstractContextManager[None]:
        """Inside, parameters stay gathered from one forward to the next, in the dtype that the model computes in: for
        ``generate()``, and evaluations. Collective: all ranks enter and leave.

        Where all of them fit, forwards start no collective, and ranks may run different ones: sequences of other lengths. Where
        not, units that come later are gathered at each use, and ranks must run equally many forwards. A model compiled with ``backend="mfsdp"`` has code of
        its own for inside. A backward inside lets go of what is gathered, when it reduces.

        Args:
            budget: bytes, also as ``"4GiB"``, of parameters that may stay; None: all of them. Strategies other than
                ``optim_grads_params`` keep parameters at all times.

        Raises:
            RuntimeError: a step is under way.
            ValueError: HFSDP.
        """
        return self.sharded.gathered(None if budget is None else parse_bytes(budget, "gathered(budget)"))

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """``module.generate``, of a model of transformers, with ``synced_gpus=True`` where forwards gather: ranks whose sequences
        have ended then take part until all have. Inside :meth:`gathered`, with room for all parameters, each rank goes its own
        way.

        Raises:
            AttributeError: the model has no such method.
        """
        generate = self.module.generate
        if "synced_gpus" in inspect.signature(generate).parameters:
            kwargs.setdefault("synced_gpus", self.sharded.topology.gather_group is not None)
        return generate(*args, **kwargs)

    def summon_full_params(self, *, writeback: bool = True) -> contextlib.AbstractContextManager[None]:
        """Inside, :attr:`module` is the module that it was before it was sharded: its parameters are whole, in the dtype of the
        shards, and no forward communicates. Collective: all ranks enter and leave. Memory: the whole model, on every rank; see
        :meth:`full_parameters` for one bucket at a time.

        Optimizers hold the shards, which do not change before the end. Over other mesh dimensions (tensor parallelism) parameters
        are divided as the model was.

        Args:
            writeback: keep what was written to parameters (all ranks must have written the same). If False, that is lost.

        Raises:
            RuntimeError: a step is under way.
            ValueError: at the end: a parameter was exchanged for one of another shape. Values are those of before.
        """
        return self.sharded.whole_parameters(writeback)

    def register_forward_method(self, name: str, module: nn.Module | None = None) -> None:
        """Let a method of the model read whole parameters, as ``forward`` does: one that training or inference enters by, and that
        uses a parameter itself. (Methods that only call other modules need nothing.) FSDP2's ``register_fsdp_forward_method``.

        Args:
            name: of the method.
            module: a module inside; None: the model.

        Raises:
            AttributeError: it has no such method.
            ValueError: ``module`` holds no sharded parameters.
        """
        register_forward(module if module is not None else self.module, name)

    def start_param_sync(self, *, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Start to gather the parameters that the strategy keeps gathered, if they have changed; with ``force_sync``,
        wait for them. With full sharding over one dimension there are none: graphs and forwards gather for themselves.
        ``force_dispatch`` changes nothing: gathers are started in any case.
        """
        self.sharded.refresh()
        if force_sync:
            self.synchronize_param_gather()

    def synchronize_param_gather(self) -> None:
        """Wait for gathers that have been started and are not in use yet."""
        self.sharded.await_gathers()

    def broadcast_params(self) -> None:
        """Give ranks that hold the same values those of the first of them: all ranks with ``no_shard``, outer ranks with HSDP.
        Otherwise each value is on one rank only. Collective. (That a model has the same values on all ranks is checked when it
        is sharded: this is for values that were changed afterwards.)"""
        self.sharded.broadcast()

    @property
    def param_and_grad_buffer(self) -> ShardedModel:
        """What owns the buckets, for functions that want to be given it; how it looks is not for use."""
        return self.sharded

    def install_optimized_model_weights(self) -> None:
        """See that the next forward reads optimized weights. It does in any case: what this brings is that gathering,
        for strategies that keep parameters gathered, starts now."""
        self.sharded.refresh(ahead=True)

    # -- checks -------------------------------------------------------------------------------------------------------

    def verify_step(
        self,
        *args: Any,
        options: Mapping[str, Any] | None = None,
        tolerance: float | None = None,
        loss: Callable[[Any], torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> StepComparison:
        """Run forward and backward twice, as they are and compiled, from the same state and random numbers, and compare.

        Compared are outputs, buffers and the gradient of every parameter. Weights, gradients, buffers and random numbers are
        those of before when this returns. Collective: all ranks call it, between optimizer steps.

        Args:
            *args: of the model.
            **kwargs: of the model.
            options: of ``torch.compile(backend="mfsdp")``; by default ``{"inner": "aot_eager"}``, which computes operator by
                operator, so that passes and schedule are what is checked. Inductor is told to draw random numbers as torch
                does (``fallback_random``).
            tolerance: of the norm of a difference, relative to that of the tensor, or of an average one. By default 0, equal to the bit, with
                ``aot_eager``, and with Inductor, which computes in another order, the square root of the dtype's epsilon.
            loss: of the model's output; by default the output itself if it is a number, else the mean of its squares.

        Raises:
            RuntimeError: on every rank: a tensor differs on one. The first one is named: outputs come first, then gradients
                from the last parameter to the first, as backward computes them. Also while gradients wait for their
                reduction.
        """
        return compare_step(self, args, kwargs, options, tolerance, loss)

    # -- after failures -----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Start afresh after a step that failed on some ranks: every rank calls it, after its error.

        A rank that raises in forward leaves the others waiting for it; they raise when the process group's time-out has
        passed, and its process groups cannot be used any more. This makes new ones for the model (groups that you use
        yourself are yours to make anew), and clears gradients. Weights and optimizer state are those of before. Compiled
        code is compiled once more.

        Raises:
            RuntimeError: a rank did not come within four times the process group's time-out.
        """
        self.sharded.reset()

    # -- settings -----------------------------------------------------------------------------------------------------

    def get_distributed_index(self) -> Topology:
        """The ranks that the model is sharded over, and how."""
        return self.sharded.topology

    @contextlib.contextmanager
    def mixed_precision_context(self, policy: MixedPrecisionPolicy) -> Iterator[None]:
        """Reduce gradients in ``policy.grad_comm_dtype`` inside. Compiled graphs are compiled once for each dtype.

        Raises:
            TypeError: it is no policy.
            ValueError: the policy differs from the model's in something else.
        """
        policy = MixedPrecisionPolicy.of(policy, "mixed_precision_context")
        before = self.sharded.precision
        if replace(policy, grad_comm_dtype=before.grad_comm_dtype) != before:
            raise ValueError(
                f"mixed_precision_context can change grad_comm_dtype and nothing else: the model has {before}, got "
                f"{policy}."
            )
        self.sharded.set_precision(policy)
        try:
            yield
        finally:
            self.sharded.set_precision(before)


def unwrapped(model: nn.Module, what: str) -> MegatronFSDP:
    """The sharded model inside ``torch.compile``'s wrapper, if it is in one.

    Args:
        what: takes it, for the message.

    Raises:
        TypeError: it is no sharded model.
    """
    inner = model if isinstance(model, MegatronFSDP) else getattr(model, "_orig_mod", model)
    if not isinstance(inner, MegatronFSDP):
        raise TypeError(
            f"{what} takes the model that fully_shard_model returned (compiled or not), got a {type(inner).__name__}."
        )
    return inner
