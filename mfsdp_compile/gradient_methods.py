"""What a sharded model does with gradients: when they are reduced, their scale, and their norms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from mfsdp_compile.runtime.geometry.topology import Accumulation
from mfsdp_compile.runtime.memory.tensor import UnreducedGradient
from mfsdp_compile.runtime.model import settings
from mfsdp_compile.runtime.model.sharded_model import ShardedModel


class GradientMethods(nn.Module):
    """Methods of :class:`~mfsdp_compile.MegatronFSDP` that concern gradients."""

    sharded: ShardedModel

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

    def start_grad_sync(self) -> None:
        """Reduce deferred gradients now; a later :meth:`finish_grad_sync` is a no-op.

        Reductions that are not deferred start during backward. Outside of backward no computation runs that could hide
        the others, so this method waits for them.
        """
        self.sharded.grad_sync.finish()

    def synchronize_gradient_reduce(self) -> None:
        """Wait for reductions in flight. After a backward has finished there are none."""
        self.sharded.eager.finish_reductions()

    def attach_grad_to_optimizer_state(self) -> None:
        """Give every parameter that was used its gradient, where a deferred reduction has not done so yet."""
        self.sharded.grad_sync.finish_if_needed()

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
            if bucket.pending is not None and bucket.pending.total is not None:
                bucket.pending.total.mul_(factor)
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

    def zero_grad_buffer(self) -> None:
        """Drop all gradients, including deferred ones: every ``.grad`` becomes None, and the memory is freed."""
        self.sharded.zero_gradients()

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
