"""A sharded model as its weights: names, and whole tensors one after the other, whichever face the model has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.memory.bucket import ParamHandle
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.owner import owner_of
from mfsdp_compile.sharded_module import ShardedModule


def inner_name(name: str) -> str:
    """Remove the parts of a name that wrappers inside the module have added."""
    for inner in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        name = name.replace(inner, "")
    return name


@dataclass(frozen=True, eq=False)
class ShardedWeights:
    """Parameters of a module, of which some or all are sharded.

    Args:
        module: The module, whose names count.
        owners: The sharded models that its parameters belong to.
    """

    module: nn.Module
    owners: tuple[ShardedModel, ...]

    @classmethod
    def of(cls, model: nn.Module, what: str) -> ShardedWeights:
        """Return the weights of a sharded model, compiled or not, or of a module inside one.

        A model of :mod:`mfsdp_compile.fsdp2` that has not been used is sharded now.

        Args:
            what: Name of the caller, for error messages.

        Raises:
            TypeError: If no parameter of ``model`` is sharded.
            ValueError: If its parts are sharded over different ranks.
        """
        module = compat.uncompiled(model)
        if isinstance(module, ShardedModule):
            module = module.module
        params = list(module.parameters()) if isinstance(module, nn.Module) else []
        found = {id(owner): owner for param in params if isinstance(owner := owner_of(param), ShardedModel)}
        if not found:
            raise TypeError(
                f"{what} takes a sharded model, of fully_shard_model or mfsdp_compile.fsdp2 (compiled or not), got a "
                f"{type(module).__name__} without sharded parameters."
            )
        if len({tuple(dist.get_process_group_ranks(owner.everyone)) for owner in found.values()}) > 1:
            raise ValueError(
                f"{what}: parts of the {type(module).__name__} are sharded over different ranks. Pass each alone."
            )
        return cls(module, tuple(found.values()))

    @property
    def everyone(self) -> dist.ProcessGroup:
        """The ranks that hold the model."""
        return self.owners[0].everyone

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, which writes."""
        return dist.get_rank(self.everyone) == 0

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Context for collectives between steps. Other ranks learn of an error or interrupt that leaves it."""
        with contextlib.ExitStack() as inside:
            for owner in self.owners:
                inside.enter_context(owner.coordinator.in_step())
            yield

    def check(self, what: str) -> None:
        """Raise NotImplementedError if ranks have parameters of different names. ``what`` needs equal names."""
        for owner in self.owners:
            owner.check_parameters_are_everyones(what)

    def parameters(self) -> list[nn.Parameter]:
        """Return each parameter once, in the order of :meth:`wholes`."""
        own = {id(param) for param in self.module.parameters()}
        known = [
            param
            for owner in self.owners
            for param in [*(param for bucket in owner.buckets for param in bucket.params), *owner.ignored.values()]
        ]
        return [param for param in known if id(param) in own] + self._others()

    def wholes(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield parameters and their whole tensors, bucket by bucket. Collective: all ranks exhaust the iterator."""
        own = {id(param) for param in self.module.parameters()}
        for owner in self.owners:
            yield from owner.wholes(own)
        for param in self._others():
            yield param, param.detach()

    def handles(self) -> Iterator[tuple[nn.Parameter, ParamHandle]]:
        """Yield the sharded parameters and their places."""
        for param in self.parameters():
            if (handle := getattr(param, "mfsdp_handle", None)) is not None:
                yield param, handle

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the dtypes that sharded parameters had before they were sharded, by each name in the module."""
        of = {id(param): handle.bucket.plan.model_dtype for param, handle in self.handles()}
        params = self.module.named_parameters(remove_duplicate=False)
        return {name: of[id(param)] for name, param in params if id(param) in of}

    def _others(self) -> list[nn.Parameter]:
        """Return the parameters that no sharded model knows, such as those around units of ``fsdp2``."""
        return [param for param in self.module.parameters() if owner_of(param) is None]
