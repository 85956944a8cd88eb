"""``save_pretrained`` of sharded modules, which would see one rank's rows where it expects whole parameters."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..memory.tensor import RowShardedTensor
from ..owner import ModuleRef

_METHOD = "save_pretrained"


def guard_saving(root: nn.Module) -> None:
    """Let the ``save_pretrained`` of ``root``, and of modules inside, refuse to write shards."""
    for module in root.modules():
        if callable(getattr(type(module), _METHOD, None)):
            vars(module)[_METHOD] = functools.partial(_save_pretrained, ModuleRef(module))


def _save_pretrained(module: ModuleRef, *args: Any, **kwargs: Any) -> Any:
    """Call the method of the class, if parameters are whole or the caller gives whole ones.

    Raises:
        RuntimeError: The method would write shards.
    """
    self = module()
    assert self is not None
    method = getattr(type(self), _METHOD)
    given = inspect.signature(method).bind(self, *args, **kwargs).arguments
    state = given.get("state_dict", given.get("kwargs", {}).get("state_dict"))
    written = state.values() if isinstance(state, Mapping) else self.parameters()
    if any(isinstance(value, RowShardedTensor) for value in written if isinstance(value, Tensor)):
        raise RuntimeError(
            f"{type(self).__name__}.save_pretrained would write this rank's rows as if they were the model. Call "
            "mfsdp_compile.save_pretrained(model, folder) on all ranks, or pass whole weights: state = "
            "mfsdp_compile.checkpoint.full_state_dict(model) on all ranks, then save_pretrained(folder, "
            "state_dict=state) on the first one."
        )
    return method(self, *args, **kwargs)
