"""The module that ``fully_shard_model`` returns."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.model import recovery, settings
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.plan.precision import MixedPrecisionPolicy, Policies, PolicyArgument
from mfsdp_compile.runtime.ranks.agreement import telling_others

from .distributed_index import FSDPDistributedIndex
from .gradient_methods import GradientMethods
from .parameter_methods import ParameterMethods

if TYPE_CHECKING:
    from .backend.verify_step import StepComparison
    from .megatron.settings import DistributedDataParallelConfig


class MegatronFSDP(GradientMethods, ParameterMethods):
    """A model whose parameters are sharded. :func:`~mfsdp_compile.fully_shard_model` creates it, or its constructor.

    It trains eagerly, with hooks that gather and reduce, or through ``torch.compile(model, backend="mfsdp")``, with the
    same numbers. ``parameters()`` are DTensors that hold this rank's rows of each parameter at all times. Inside a
    forward, and only there, ``module.weight`` is the unsharded parameter. After ``backward()``, every parameter that
    some rank used has its gradient: the mean over data-parallel ranks, summed over microbatches until it is set to
    None.

    Attributes that this class does not define are looked up in the wrapped module.

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
        super().__init__()
        self.module = module
        compat.refuse_other_sharding(self)
        self.sharded = sharded
        self.dist_index = dist_index
        self._ddp_config = ddp_config

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

    def __deepcopy__(self, memo: dict[int, Any]) -> MegatronFSDP:
        """Return an independent sharded model: separate memory, same values, same process groups. No communication."""
        duplicate = type(self).__new__(type(self))
        memo[id(self)] = duplicate
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return duplicate

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


def unwrapped(model: nn.Module, what: str) -> MegatronFSDP:
    """Return the sharded model inside ``torch.compile``'s wrapper, or the model itself if it is not wrapped.

    Args:
        what: Name of the caller, for the error message.

    Raises:
        TypeError: If ``model`` is not a sharded model.
    """
    inner = model if isinstance(model, MegatronFSDP) else getattr(model, "_orig_mod", model)
    if not isinstance(inner, MegatronFSDP):
        raise TypeError(
            f"{what} takes the model that fully_shard_model returned (compiled or not), got a {type(inner).__name__}."
        )
    return inner
