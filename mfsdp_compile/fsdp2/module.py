"""``FSDPModule``: the methods of a module that ``fully_shard`` was called on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import UnshardHandle

from mfsdp_compile.runtime.geometry.topology import Accumulation
from mfsdp_compile.runtime.model import recovery, settings

from .compiled import compile_again, settings_of
from .first_use import Generated, Pending
from .request import check_bool
from .state import SETTINGS, apply_sync, buckets_of, state_of, states, units_of

_Method = TypeVar("_Method", bound=Callable[..., None])


def _setting(method: _Method) -> _Method:
    """Repeat a call, the last one of its method, when the module's model becomes a part of a larger one."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        method(self, *args, **kwargs)
        vars(self).setdefault(SETTINGS, {})[method.__name__] = args, kwargs

    return cast(_Method, call)


class FSDPModule(Generated):
    """What :func:`~mfsdp_compile.fsdp2.fully_shard` adds to a module; see ``torch.distributed.fsdp.FSDPModule``.

    Gradients are synchronized, and the last backward is known, for the model as a whole: methods about these are called
    on the model. What concerns gathers in eager code has no effect on code compiled for the whole model, whose graph
    has a schedule of its own (options ``prefetch``, ``schedule``).
    """

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module's forward, as ``nn.Module.compile``, with ``"mfsdp"`` and the given backend behind it."""
        before = self._compiled_call_impl  # type: ignore[has-type]
        super().compile(*args, **kwargs)  # type: ignore[misc]
        if not isinstance(self, Pending):
            try:
                if (settings := settings_of(cast(nn.Module, self), type(self).__name__)) is not None:
                    compile_again(cast(nn.Module, self), settings)
            except ValueError:
                self._compiled_call_impl = before
                raise

    # -- gathered parameters ------------------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the module's own parameters, not those of units inside. A collective.

        Until the module's next forward has run, or :meth:`reshard`, its parameters can be read outside of forwards
        (``module.weight``); ``parameters()`` still returns shards.

        Args:
            async_op: Return a handle whose ``wait()`` waits for the parameters. A forward waits by itself.
        """
        state = state_of(self)
        if not state.model.eager.is_in_window:
            state.model.leave_backward()
        handle = _Unshard(state.model.eager.gathering.unshard(state.units))
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Release the module's own gathered parameters."""
        state = state_of(self)
        state.model.eager.gathering.reshard(state.units)

    @_setting
    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether parameters are released after forward and gathered again in backward. Not during a step."""
        check_bool("reshard_after_forward", reshard_after_forward)
        settings.set_reshard_after_forward(
            state_of(self).model, buckets_of(states(self, recurse)), reshard_after_forward
        )

    @_setting
    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether parameters are released after backward.

        If not, they stay gathered from their first forward until the backward that reduces the step's gradients, so
        they are not released after forward either. That backward releases them by itself: between microbatches, True
        releases them at once, and the last microbatch gathers them again.
        """
        check_bool("reshard_after_backward", reshard_after_backward)
        settings.set_reshard_after_backward(
            state_of(self).model, buckets_of(states(self, recurse)), reshard_after_backward
        )

    @_setting
    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules to start gathering when this one has been gathered in forward."""
        for unit in (state := state_of(self)).units[:1]:  # of the model's parts, the one that forward uses first
            state.model.eager.control(unit).forward_prefetch = units_of(modules)

    @_setting
    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules to start gathering when this one has been gathered in backward."""
        for unit in (state := state_of(self)).units[-1:]:
            state.model.eager.control(unit).backward_prefetch = units_of(modules)

    def set_post_optim_event(self, event: torch.Event | None) -> None:
        """Let everything that the current stream runs from now on, gathers included, wait for ``event``.

        None, which is what the CPU's stream records, is no event.
        """
        if event is not None:
            event.wait()

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Has no effect: backward gathers the parameters that it reads, and no others."""
        check_bool("unshard_in_backward", unshard_in_backward)
        state_of(self)

    # -- gradients ----------------------------------------------------------------------------------------------------

    @_setting
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether the next backwards reduce gradients. If not, each rank sums its whole gradients.

        Call it on the model, or on all of its modules: when backward runs, all must have the same setting. The first
        call with False, which must not be during a step, has graphs compiled again.
        """
        check_bool("requires_gradient_sync", requires_gradient_sync)
        state = state_of(self)
        accumulation = state.model.topology.accumulation
        if not requires_gradient_sync and not accumulation.whole_gradients:
            settings.set_accumulation(state.model, Accumulation(True, accumulation.keeps_gathered))
        for each in states(self, recurse):
            each.syncs = each.all_reduces = requires_gradient_sync
        apply_sync(state)

    @_setting
    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether the next backwards reduce gradients over the ranks that replicate shards (HSDP).

        Call it on the model, or on all of its modules: when backward runs, all must have the same setting.
        """
        check_bool("requires_all_reduce", requires_all_reduce)
        for each in states(self, recurse):
            each.all_reduces = requires_all_reduce
        apply_sync(state_of(self))

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Has no effect: every backward waits for its own reductions before it returns."""
        check_bool("is_last_backward", is_last_backward)
        state_of(self)

    @_setting
    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of this module's own gradients over ranks by ``factor``, instead of the number of ranks.

        Graphs are compiled again.
        """
        if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not factor > 0:
            raise ValueError(f"set_gradient_divide_factor takes a number above 0, got {factor!r}")
        state = state_of(self)
        settings.set_gradient_divide_factor(state.model, buckets_of([state]), float(factor))

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Has no effect: gradients are summed, and the sum is scaled."""
        check_bool("enable", enable)
        state_of(self)

    @_setting
    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Call ``hook(gradient)`` with each reduced gradient of this module's own parameters before it is accumulated.

        ``gradient`` is this rank's flat shard in the shards' dtype, already divided. The hook may change it in place;
        if it communicates, all ranks do. For eager code, and for modules that are compiled one by one; code compiled
        for the whole model is refused.

        Args:
            stream: Must be None: the hook runs on the current stream.
        """
        if stream is not None:
            raise NotImplementedError(
                "set_all_reduce_hook(stream=...): the hook runs on the current stream. Leave stream out, and switch "
                "streams in the hook."
            )
        for unit in (state := state_of(self)).units:
            state.model.eager.control(unit).reduced_hook = hook

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Has no effect: ranks may always use different parameters, and add zeros for those that they did not use."""
        check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)
        state_of(self)

    @_setting
    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many units' reductions may run in eager code before it waits for the oldest.

        The largest number that any module of the model has holds for all of them.
        """
        is_whole = isinstance(max_input_buffers, int) and not isinstance(max_input_buffers, bool)
        if not is_whole or max_input_buffers < 1:
            raise (ValueError if is_whole else TypeError)(
                f"set_reduce_scatter_max_input_buffers takes a whole number from 1 on, got {max_input_buffers!r}"
            )
        for each in states(self, recurse):
            each.reductions = max_input_buffers
        runtime, together = state_of(self).model.eager, state_of(self).together
        policy = replace(runtime.schedule.policy, reductions_in_flight=max(each.reductions for each in together))
        runtime.follow(replace(runtime.schedule, policy=policy))

    # -- after failures -----------------------------------------------------------------------------------------------

    def reset_iter_state(self) -> None:
        """Drop what is left of a step that failed: gathered parameters, and gradients. Call it on the model.

        If ranks have diverged in that step, a collective: every rank calls this after its error, within four time
        limits of the process group. The model gets new process groups, and code is compiled once more.
        """
        state = state_of(self)
        if state.name:
            raise ValueError(
                f"reset_iter_state was called on module {state.name!r}: it is for the model as a whole. Call it on the "
                "module that the last fully_shard was called on."
            )
        if state.model.coordinator.order.stalled is not None:
            recovery.reset(state.model)
            return
        state.model.leave_backward()
        state.model.eager.reset()
        state.model.zero_gradients()


_PASSES = "a pass can change the collectives of a graph (torch.compile's option passes)"
_NCCL = "shard with fully_shard_model(nccl_ub=True), which registers buffers with NCCL"
REFUSED = {
    "set_custom_all_gather": _PASSES,
    "set_custom_reduce_scatter": _PASSES,
    "set_allocate_memory_from_process_group_for_comm": _NCCL,
    "set_symm_mem_for_comm": _NCCL,
    "set_separate_reduce_scatter_group": "gathers have a communicator of their own with NCCL",
    "set_keep_unsharded_storage": "for CUDA graphs use fully_shard_model(cuda_graph_mode=True)",
    "set_manual_backward_finalization": "use fully_shard_model, and model.set_model_auto_sync(False)",
    "finalize_backward": "use fully_shard_model, and model.finish_grad_sync()",
}
"""Methods of FSDP2 that are not implemented, each with its alternative."""


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"FSDPModule.{name} is not implemented: {REFUSED[name]}.")

    refuse.__doc__ = f"Not implemented: {REFUSED[name]}."
    return refuse


for _name in REFUSED:
    setattr(FSDPModule, _name, _refusing(_name))


class _Unshard(UnshardHandle):
    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Wait until the parameters are gathered."""
        self._wait()
