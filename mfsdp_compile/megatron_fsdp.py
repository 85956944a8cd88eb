"""``MegatronFSDP``: a sharded model with Megatron-FSDP's constructor and the names of its methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.plan.precision import MixedPrecisionPolicy, PolicyArgument
from mfsdp_compile.runtime.ranks.agreement import telling_others

from .distributed_index import FSDPDistributedIndex
from .sharded_module import ShardedModule

if TYPE_CHECKING:
    from .megatron.settings import DistributedDataParallelConfig


class MegatronFSDP(ShardedModule):
    """A sharded model. :func:`~mfsdp_compile.fully_shard_model` creates it, or its constructor.

    The constructor is Megatron-FSDP's: it shards ``module`` in place, by settings. Collective.
    :func:`~mfsdp_compile.fully_shard_model` has more options, and reduces gradients after every backward by default.

    Args:
        module: The unsharded model. Parameter names are its own, prefixed with ``module.``.
        dist_index: The ranks to shard over: an :class:`~mfsdp_compile.FSDPDistributedIndex`, or Megatron-FSDP's own.
        ddp_config: Megatron's ``DistributedDataParallelConfig``, or that of :mod:`mfsdp_compile.megatron`. A copy is
            checked and adjusted. None: the defaults of the latter, which shard everything.
        mixed_precision_policy: Dtypes, unless ``ddp_config`` has them.
        fsdp_unit_modules: See :func:`~mfsdp_compile.fully_shard_model`.
        disable_bucketing: Has no effect: parameters outside of units are one bucket.
        device: Device that holds the shards.
        sync_model_each_microbatch: Reduce gradients completely after every backward. If False, what can be deferred to
            the end of the step is.
        enable_fine_grained_param_gather_hook, enable_fine_grained_param_gather_backward_hook: Either is
            ``enable_fine_grained_param_gather`` of :func:`~mfsdp_compile.fully_shard_model`, in forward and backward.
        fine_grained_recurse_module_types: Not implemented.
        calculate_per_token_loss, init_model_with_meta_device: See :func:`~mfsdp_compile.fully_shard_model`.
        keep_fp8_transpose_cache, report_nan_in_param_grad: See :func:`~mfsdp_compile.fully_shard_model`.
        nccl_ub, disable_symmetric_registration: See :func:`~mfsdp_compile.fully_shard_model`.
        fsdp_double_buffer, fsdp_db_use_persist_buf_on_alloc_fail: See :func:`~mfsdp_compile.fully_shard_model`.

    Raises:
        TypeError, ValueError, RuntimeError: See :func:`~mfsdp_compile.fully_shard_model` and
            :func:`mfsdp_compile.megatron.validate`.
        NotImplementedError: If a setting is not implemented here.
    """

    def __init__(
        self,
        module: nn.Module,
        dist_index: Any,
        ddp_config: Any = None,
        mixed_precision_policy: PolicyArgument = MixedPrecisionPolicy(),
        fsdp_unit_modules: Sequence[type[nn.Module] | str] | None = None,
        disable_bucketing: bool = False,
        device: torch.device | None = None,
        calculate_per_token_loss: bool = False,
        init_model_with_meta_device: bool = False,
        sync_model_each_microbatch: bool = False,
        keep_fp8_transpose_cache: bool = False,
        nccl_ub: bool = False,
        fsdp_double_buffer: bool = False,
        fsdp_db_use_persist_buf_on_alloc_fail: bool = False,
        disable_symmetric_registration: bool = False,
        enable_fine_grained_param_gather_hook: bool = False,
        enable_fine_grained_param_gather_backward_hook: bool = False,
        fine_grained_recurse_module_types: Sequence[type[nn.Module]] | None = None,
        report_nan_in_param_grad: bool = False,
    ) -> None:
        given = dict(locals())
        del given["self"]
        from .megatron.direct import shard_by_index  # Megatron's package imports this module

        with telling_others():
            self._hold(module, *shard_by_index(**given))

    @classmethod
    def of(cls, module: nn.Module, sharded: ShardedModel, dist_index: FSDPDistributedIndex) -> MegatronFSDP:
        """Wrap a module that has been sharded."""
        model = cls.__new__(cls)
        model._hold(module, sharded, dist_index)
        return model

    def _hold(
        self, module: nn.Module, sharded: ShardedModel, dist_index: FSDPDistributedIndex, ddp_config: Any = None
    ) -> None:
        super().__init__(module, sharded)
        self.dist_index = dist_index
        self._ddp_config = ddp_config

    # -- what it was sharded with -------------------------------------------------------------------------------------

    def get_distributed_index(self) -> FSDPDistributedIndex:
        """Return the ranks that the model is sharded over."""
        return self.dist_index

    @property
    def ddp_config(self) -> DistributedDataParallelConfig:
        """The settings that the model was sharded with. A copy or a description: changes have no effect."""
        if self._ddp_config is not None:
            return self._ddp_config  # type: ignore[no-any-return]
        from .megatron.translation import ddp_config_of  # which imports this module

        return ddp_config_of(self.sharded)

    # -- gradients and parameters -------------------------------------------------------------------------------------

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

    def zero_grad_buffer(self) -> None:
        """Drop all gradients, including deferred ones: every ``.grad`` becomes None, and the memory is freed."""
        self.sharded.zero_gradients()

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
