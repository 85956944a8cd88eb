"""A bucket: the parameters of one unit that share dtype, ``requires_grad`` and group, as one flat shard per rank.

originals     weight [6, 8]                          bias [6]
              |                                      |
bucket        |<- rank 0's shard ->|<- rank 1's shard ->|      never whole in memory, except while it is gathered
                                   |
flat          this rank's slice, a leaf that autograd knows; main dtype
params        DTensors, views of ``flat``: what ``model.parameters()`` and the optimizer hold
shells        full-shape parameters without storage: what Dynamo traces. Never handed to a user
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .layout import BucketLayout
from .ops import gather_arguments
from .tensor import RowShardedTensor, RowSplit

__all__ = ["Bucket", "BucketPlan", "Home", "Site"]


@dataclass(frozen=True)
class Site:
    """A place where a module holds a parameter: ``module.<attribute>``. Tied parameters have several."""

    module: nn.Module
    module_name: str
    attribute: str

    @property
    def name(self) -> str:
        return f"{self.module_name}.{self.attribute}" if self.module_name else self.attribute


@dataclass(frozen=True)
class BucketPlan:
    """What is decided about a bucket before any memory is touched; plain data, equal on all ranks.

    Args:
        name: of the bucket, unique in the model: the unit's name, with a number where a unit has several buckets.
        unit: name of the unit.
        layout: whose slot names are fully qualified parameter names.
        compute_dtype: of the gathered parameters; the dtype that the model was built with.
        main_dtype: of the shard, its gradients and the optimizer's state.
        requires_grad: of all its parameters.
        reduce_op: over the data-parallel group, ``"avg"`` or ``"sum"``.
    """

    name: str
    unit: str
    layout: BucketLayout
    compute_dtype: torch.dtype
    main_dtype: torch.dtype
    requires_grad: bool
    reduce_op: str = "avg"

    @property
    def gathered_bytes(self) -> int:
        return self.layout.numel * self.compute_dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        return self.layout.shard_numel * self.main_dtype.itemsize


@dataclass(frozen=True, eq=False)
class Home:
    """Where a shell or a sharded parameter belongs: parameter ``index`` of ``bucket``."""

    bucket: Bucket
    index: int


class Place(NamedTuple):
    """The part ``[start, stop)`` of a rank's shard that holds its rows of one parameter, and their shape."""

    start: int
    stop: int
    shape: tuple[int, ...]


class Bucket:
    """The memory of one bucket on this rank.

    Args:
        plan: layout and dtypes.
        originals: the whole parameters, in the order of the layout's slots. Their rows are copied; they are not kept.
        sites: for each parameter, every place where a module holds it.
        mesh: one-dimensional, the data-parallel ranks.
        device: of the shard.
    """

    owner: Any
    """The sharded model; set by it."""

    def __init__(
        self,
        plan: BucketPlan,
        originals: Sequence[nn.Parameter],
        sites: Sequence[Sequence[Site]],
        mesh: DeviceMesh,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self.sites = tuple(tuple(s) for s in sites)
        self.mesh = mesh
        self.group_name: str = mesh.get_group().group_name
        self.rank = mesh.get_local_rank()
        layout = plan.layout
        self.splits = tuple(RowSplit(layout, index) for index in range(len(layout.slots)))
        self.places = tuple(self._place(index) for index in range(len(layout.slots)))
        flat = torch.zeros(layout.shard_numel, dtype=plan.main_dtype, device=device)
        for original, view, split in zip(originals, self.views(flat), self.splits, strict=True):
            whole = original.detach()
            rows = split.rows(self.rank)
            if rows:
                view.copy_(whole[rows.start : rows.stop] if split.shape else whole)
        self._make(flat, originals)

    def _make(self, flat: Tensor, like: Sequence[nn.Parameter]) -> None:
        """Shard, parameters and shells over the values of ``flat``; Python attributes of ``like`` are kept."""
        plan = self.plan
        self.flat = flat.requires_grad_(plan.requires_grad)
        # Views of the detached shard: they share its memory and version, not its place in autograd graphs.
        views = self.views(flat.detach())
        self.params = tuple(
            nn.Parameter(RowShardedTensor.wrap(view, split, self.mesh, backing=flat), requires_grad=plan.requires_grad)
            for view, split in zip(views, self.splits, strict=True)
        )
        for param, view in zip(self.params, views, strict=True):
            param._local_tensor = view  # making a Parameter detached it, from the version too
        self.shells = tuple(
            _shell(split.shape, plan.compute_dtype, flat.device, plan.requires_grad) for split in self.splits
        )
        for index, original in enumerate(like):
            kept = {k: v for k, v in vars(original).items() if k not in _OWN_ATTRIBUTES}
            home = Home(self, index)
            vars(self.params[index]).update(kept, mfsdp_home=home)
            vars(self.shells[index]).update(kept, mfsdp_home=home)
        self.gather_arguments = gather_arguments(plan.layout, self.group_name, plan.compute_dtype, plan.reduce_op)
        # Buckets whose signatures are equal can run each other's compiled graphs.
        self.signature = (
            f"{plan.layout.signature}:{plan.compute_dtype}:{plan.main_dtype}:{plan.requires_grad}:"
            f"{plan.reduce_op}:{self.group_name}"
        )

    def _place(self, index: int) -> Place:
        layout = self.plan.layout
        start = layout.shard_offset(index, self.rank)
        numel = len(layout.rows(index, self.rank)) * layout.slots[index].row_numel
        return Place(start, start + numel, self.splits[index].local_shape(self.rank))

    def views(self, flat: Tensor) -> list[Tensor]:
        """The parts of a flat shard (or of its gradient), ``[shard_numel]``, that belong to each parameter."""
        return [flat[start:stop].view(shape) for start, stop, shape in self.places]

    def local_views(self, flat: Tensor) -> list[RowShardedTensor]:
        """The same as DTensors."""
        return [
            RowShardedTensor.wrap(view, split, self.mesh)
            for view, split in zip(self.views(flat), self.splits, strict=True)
        ]

    def check_unchanged(self) -> None:
        """Raise if somebody exchanged a parameter, or froze or thawed one, since the model was sharded."""
        wanted = self.plan.requires_grad
        for param, sites in zip(self.params, self.sites, strict=True):
            if param.requires_grad != wanted:
                now = "trainable" if param.requires_grad else "frozen"
                raise RuntimeError(
                    f"Parameter {sites[0].name!r} was made {now} after fully_shard_model: its bucket {self.plan.name!r} "
                    f"was laid out for {'trainable' if wanted else 'frozen'} parameters. Call requires_grad_() before "
                    "fully_shard_model, or shard the model anew."
                )
            for site in sites:
                if site.module._parameters.get(site.attribute) is not param:
                    raise RuntimeError(
                        f"Parameter {site.name!r} was replaced after fully_shard_model; the new one is not sharded and "
                        "would not be trained. Copy values into the old one instead (parameter.copy_(values) under "
                        "torch.no_grad()), use load_state_dict without assign=True, or replace it before sharding."
                    )

    def __deepcopy__(self, memo: dict[int, Any]) -> Bucket:
        """A bucket of its own memory. Its parameters and shells are entered in ``memo``, so that modules copied
        with the same memo hold them."""
        copy = object.__new__(Bucket)  # before its modules, which hold it again
        memo[id(self)] = copy
        vars(copy).update(vars(self))
        copy._make(self.flat.detach().clone(), self.params)
        for mine, its in zip((*self.params, *self.shells), (*copy.params, *copy.shells), strict=True):
            memo[id(mine)] = its
        for mine_param, its_param in zip(self.params, copy.params, strict=True):
            if mine_param.grad is not None:
                its_param.grad = mine_param.grad.clone()
        copy.owner = deepcopy(self.owner, memo)
        copy.sites = tuple(
            tuple(replace(site, module=deepcopy(site.module, memo)) for site in sites) for sites in self.sites
        )
        return copy

    def __repr__(self) -> str:
        return f"Bucket({self.plan.name!r}: {self.plan.layout})"


_OWN_ATTRIBUTES = {"_local_tensor", "_spec", "split", "backing", "_is_param", "mfsdp_home"}


def _shell(shape: Sequence[int], dtype: torch.dtype, device: torch.device, requires_grad: bool) -> nn.Parameter:
    """A parameter of the right shape, strides and dtype, and no memory. Reading its values is a segfault on CPU."""
    whole = torch.empty(shape, dtype=dtype, device=device)
    whole.untyped_storage().resize_(0)
    return nn.Parameter(whole, requires_grad=requires_grad)
