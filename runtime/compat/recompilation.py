"""Code that Dynamo has compiled as often as ``torch._dynamo.config.recompile_limit`` allows."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .frames import compiling
from .pytree import tree_leaves

__all__ = ["LimitReached", "compile_beyond_limit"]


@dataclass(frozen=True)
class LimitReached:
    """Code is called with something that none of its graphs is for, and there are as many as a limit allows.

    Args:
        code: Name of the function, with file and line.
        setting: Name of the limit in ``torch._dynamo.config``.
        limit: Its value.
        reason: The guard that failed last.
        shapes: Shapes of the tensors that the code is called with.
    """

    code: str
    setting: str
    limit: int
    reason: str
    shapes: tuple[tuple[int, ...], ...]


def compile_beyond_limit(tell: Callable[[LimitReached], None]) -> None:
    """Have code compiled again once it has reached ``recompile_limit``. A backend calls this when it makes a graph.

    It holds for everything that the backend's ``torch.compile`` compiles, from the next compilation on. Dynamo would
    leave code, and what it calls, to Python from then on. Beyond the limit, sizes and numbers that vary become
    symbolic, even with ``torch.compile(dynamic=False)``, so that one or two more graphs suffice.
    ``accumulated_recompile_limit`` holds.

    Args:
        tell: Called when a limit is reached, and before each compilation beyond it.
    """
    from torch._dynamo.utils import get_hook_for_recompile_user_context, register_hook_for_recompile_user_context

    compilation = _compilation()
    if compilation is None:  # the backend was called by something else
        return
    _backends[compilation["compiler_fn"]] = tell
    if _before_compilation not in (get_hook_for_recompile_user_context() or ()):
        register_hook_for_recompile_user_context(_before_compilation)


_backends: weakref.WeakKeyDictionary[Any, Callable[[LimitReached], None]] = weakref.WeakKeyDictionary()
"""What to call, for each backend as ``torch.compile`` has wrapped it."""
_settings = contextlib.ExitStack()
"""Restores settings that were changed for the current compilation. Dynamo compiles one frame at a time."""


def _before_compilation() -> str:
    """Lift the limit for one compilation. Dynamo calls this hook just before it compares with the limit."""
    from torch._dynamo.cache_size import exceeds_recompile_limit

    _settings.close()
    compilation, config = _compilation(), torch._dynamo.config
    assert compilation is not None
    backend, code = compilation["compiler_fn"], compilation["code"]
    if backend not in _backends or config.fail_on_recompile_limit_hit:
        return ""
    is_exceeded, setting = exceeds_recompile_limit(compilation["cache_size"], compilation["compile_id"])
    if not is_exceeded:
        return ""
    tensors = [leaf for leaf in tree_leaves(list(compilation["frame"].f_locals.values())) if isinstance(leaf, Tensor)]
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    where = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
    _backends[backend](
        LimitReached(where, setting, getattr(config, setting), str(compilation["recompile_reason"]), shapes)
    )
    if setting == "recompile_limit":
        callbacks = torch._dynamo.callback_handler
        if _after_compilation not in callbacks.end_callbacks:  # torch.compiler.reset() removes it
            callbacks.register_end_callback(_after_compilation)
        varying = {"automatic_dynamic_shapes": True, "allow_unspec_int_on_nn_module": True}
        _settings.enter_context(config.patch(recompile_limit=sys.maxsize, **varying))  # type: ignore[arg-type]
    return ""


def _after_compilation(_: Any) -> None:
    _settings.close()


def _compilation() -> dict[str, Any] | None:
    """Return the local variables of the function of Dynamo that is compiling a frame in this thread, if any."""
    return next((found for frame in compiling() if "cache_size" in (found := frame.f_locals)), None)
