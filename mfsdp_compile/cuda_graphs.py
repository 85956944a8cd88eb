"""Steps of a sharded model as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from mfsdp_compile.runtime.guests.capture.captured_step import CapturedStep
from mfsdp_compile.runtime.guests.capture.devices import CudaGraphs

from .sharded_module import unwrapped

WARM_UP = 2
"""Number of calls of each kind that run as usual before one is captured."""


def capture_step(model: nn.Module, step: Callable[..., Any], *, warm_up: int = WARM_UP) -> CapturedStep:
    """Return a function that does what ``step`` does, as CUDA graphs that are replayed.

    A replay queues all kernels and collectives of a step with one call, so that the GPU does not wait for Python. Ranks
    compare beforehand which step they replay.

    The first calls run ``step`` as usual: they compile, and agree with other ranks on what they do. Then ``step`` is
    captured, one graph for each kind of call: the arguments that are not tensors, whether reductions are due, and
    whether gradients have been accumulated.

    Args:
        model: The model that ``step`` trains, sharded with ``cuda_graph_mode=True``, or its compiled wrapper.
        step: Called as the result is. It does forward, backward and, if it is due, the optimizer's step and
            ``zero_grad``, and returns tensors in any nesting. All that decides what it does must be among its
            arguments. Tensors among them need static shapes and are copied into the graph's memory.
        warm_up: Number of calls of each kind that run as usual before one is captured.

    Returns:
        The captured step. Its ``reset()`` frees the graphs; call it before ``destroy_process_group``.

    Raises:
        TypeError: ``model`` is not a sharded model.
        ValueError: It was sharded without ``cuda_graph_mode``, or with ``report_nan_in_param_grad``, it is not on a
            GPU, or ``warm_up`` is less than 1.
    """
    return captured(model, step, getattr(step, "__qualname__", type(step).__name__), "capture_step", warm_up)


def captured(
    model: nn.Module, step: Callable[..., Any], name: str, caller: str, warm_up: int = WARM_UP
) -> CapturedStep:
    """Return a step that is captured, for ``caller``, a function of the package; see :func:`capture_step`."""
    sharded = unwrapped(model, caller).sharded
    if not sharded.keeps_gradients:
        raise ValueError(
            f"{caller} captures steps of models whose memory keeps its addresses: pass cuda_graph_mode=True to "
            "fully_shard_model."
        )
    if stateful := next((bucket for bucket in sharded.buckets if bucket.lane.keeps_state), None):
        raise NotImplementedError(
            f"Bucket {stateful.plan.name!r} travels through stages that keep state in Python ({stateful.lane.text}), "
            "which a replay of recorded kernels would not see. Take these plug-ins out, or do not record steps."
        )
    if any(bucket.plan.inspected for bucket in sharded.buckets):
        raise ValueError(
            "report_nan_in_param_grad reads values on the host after each backward, which a CUDA graph cannot do. "
            "Leave it out where steps are captured."
        )
    if warm_up < 1:
        raise ValueError(f"{caller} takes warm_up of at least 1, got {warm_up}: a first call compiles and checks.")
    return CapturedStep(sharded, step, name, CudaGraphs(sharded.buckets[0].device), warm_up)
