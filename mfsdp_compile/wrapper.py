"""The module that ``fully_shard_model`` returns."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
from torch import nn

from mfsdp_compile.runtime.model import ShardedModel

__all__ = ["MegatronFSDP"]


class MegatronFSDP(nn.Module):
    """A model whose parameters are sharded. Made by :func:`~mfsdp_compile.fully_shard_model`.

    It trains as it is, with hooks that gather and reduce, or through ``torch.compile(model, backend="mfsdp")``, with the
    same numbers. ``parameters()`` are DTensors, this rank's rows of each, at all times; inside a forward, and there
    only, ``module.weight`` is the whole parameter. After ``backward()`` every trainable parameter has its gradient, the
    mean over data-parallel ranks, summed over microbatches until it is set to None.

    Attributes that this class does not have are looked up in the wrapped module.

    Args:
        module: the sharded model; names of parameters are its own behind ``module.``.
        sharded: what owns its buckets.
    """

    def __init__(self, module: nn.Module, sharded: ShardedModel) -> None:
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
        duplicate = MegatronFSDP.__new__(MegatronFSDP)
        memo[id(self)] = duplicate
        duplicate.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return duplicate

    # -- gradients ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply every gradient by ``factor``."""
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def zero_grad_buffer(self) -> None:
        """Forget all gradients: every parameter's ``.grad`` becomes None, and the memory is free."""
        for param in self.parameters():
            param.grad = None

    def finish_grad_sync(self) -> None:
        """See that gradients are reduced. With full sharding they are when ``backward()`` returns."""

    def install_optimized_model_weights(self) -> None:
        """See that the next forward reads optimized weights. With full sharding it reads the shards themselves."""


def _later(name: str) -> Any:
    def method(self: MegatronFSDP, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"MegatronFSDP.{name} is not implemented yet: gradients are reduced after every backward, and may be "
            "accumulated over several."
        )

    method.__name__ = method.__qualname__ = name
    return method


for _name in (
    "no_sync",
    "sync",
    "set_model_auto_sync",
    "start_param_sync",
    "mixed_precision_context",
    "get_distributed_index",
):
    setattr(MegatronFSDP, _name, _later(_name))
