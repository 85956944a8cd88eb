"""What else refers to the memory of rows: ``p.data``, ``p.detach()``, views of these, ``p.to_local()``.

``p.data = values`` in torch gives ``p`` other memory, and whoever refers to the former memory keeps the former values:
backups of weights depend on it. The memory of a shard belongs to its bucket, so that ``values`` are copied into it.
Before that, :func:`keep_values` gives what refers to it a copy of the former values.

What :meth:`.RowShardedTensor.to_local` returns is an ordinary tensor. It has a storage of its own in the same memory,
so that the references to this storage tell whether something was derived from it: ``.data``, a view, an array of
NumPy's. Writes to these increment no version (see "Version counters" in :mod:`.flat_shard`), so that
:class:`.FlatShard` compares values.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compat


class _Lent(NamedTuple):
    tensor: weakref.ref[Tensor]
    storage: compat.StorageWeakRef
    name: str
    place: range


class Aliases:
    """Tensors that refer to one memory, as long as they live."""

    def __init__(self) -> None:
        # By id: tensors compare element by element.
        self._sharded: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._views: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._ordinary: list[_Lent] = []
        self._prune_at = 64

    def add(self, tensor: Tensor) -> None:
        """Note a sharded tensor."""
        self._sharded[id(tensor)] = tensor

    def add_view(self, view: Tensor) -> None:
        """Note a view that keeps no values, and reads those of its ``base``."""
        self._views[id(view)] = view

    def lend(self, rows: Tensor, name: str) -> None:
        """Note an ordinary tensor of a parameter's rows, and give it a storage of its own."""
        place = _place(rows)
        rows.data = compat.apart(rows.detach())
        if len(self._ordinary) >= self._prune_at:
            self.any_ordinary()
            self._prune_at = max(64, 2 * len(self._ordinary))
        self._ordinary.append(_Lent(weakref.ref(rows), compat.StorageWeakRef(rows.untyped_storage()), name, place))

    def any_ordinary(self) -> bool:
        """Whether ordinary tensors or arrays refer to this memory."""
        self._ordinary = [lent for lent in self._ordinary if not lent.storage.expired()]
        return bool(self._ordinary)

    def of(self, tensor: Any) -> tuple[list[Any], list[Any], list[Tensor]]:
        """Return what refers to the rows of ``tensor``: sharded tensors, views, ordinary tensors.

        Raises:
            RuntimeError: What refers to them cannot be changed.
        """
        place, name = _place(tensor._local_tensor), tensor.row_split.name

        def meets(other: range, its_name: str) -> bool:
            # Ranks without rows do as the others: they go by names.
            return _overlap(other, place) if place and other else its_name == name

        others = [alias for alias in list(self._sharded.values()) if alias is not tensor]
        sharded = [alias for alias in others if meets(_place(alias._local_tensor), alias.row_split.name)]
        views = [view for view in list(self._views.values()) if view.base is tensor]
        ordinary = []
        for lent in self._ordinary:
            if lent.storage.expired() or not meets(lent.place, lent.name):
                continue
            alias = lent.tensor()
            if alias is None or compat.references_to(alias.untyped_storage()) > compat.references_of_one_tensor():
                raise RuntimeError(
                    f"The .data of {name!r} is assigned while a tensor or array refers to its rows "
                    "that was derived from to_local(), such as to_local().numpy(), .data or a view. In torch it would "
                    "keep the former values; here it cannot. Copy it instead (to_local().clone()), delete it before "
                    "the assignment, or write values in place: parameter.data.copy_(values). Nothing was changed."
                )
            ordinary.append(alias)
        return sharded, views, ordinary


class Backing(tuple[Tensor, ...]):
    """The flat tensors whose memory contains some rows: a parameter's shard, and the resident around it.

    Copied rows have their own memory, so that copies of this object are empty.
    """

    @functools.cached_property
    def noted(self) -> dict[str, str]:
        """Digests of whole values, by name of the parameter, that are to be compared with those of other ranks.

        What is overwritten need not be compared.
        """
        return {}

    @functools.cached_property
    def aliases(self) -> Aliases:
        """What refers to the rows."""
        return Aliases()

    watch: Callable[[], None] | None = None
    """Called before ``to_local()`` returns an ordinary tensor of a shard, because writes to it may leave no trace."""
    settle: Callable[[], None] | None = None
    """Called before the CPU reads or writes rows, which may still be copied from or to; None: they never are."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Backing:
        return Backing()


def keep_values(tensor: Any) -> None:
    """Before the rows of ``tensor`` are overwritten, move what else refers to them to a copy of them.

    Raises:
        RuntimeError: See :meth:`Aliases.of`. Nothing has changed.
    """
    sharded, views, ordinary = tensor.backing.aliases.of(tensor)
    if not (sharded or views or ordinary):
        return
    rows, kept, before = tensor._local_tensor, tensor._local_tensor.clone(), tensor.detach()
    backing = Backing()
    for alias in (before, *sharded):
        _move(alias, rows, kept, backing)
    for view in views:
        view.base = before
    for alias in ordinary:
        alias.data = _in(kept, rows, alias)
        backing.aliases.lend(alias, tensor.row_split.name)


def follow(values: Any, tensor: Any) -> None:
    """Let ``values``, and what refers to their memory, refer to that of ``tensor``, which has the same rows."""
    rows, (sharded, _, ordinary) = values._local_tensor, values.backing.aliases.of(values)
    for alias in (values, *sharded):
        _move(alias, rows, tensor._local_tensor, tensor.backing)
    for alias in ordinary:
        alias.data = _in(tensor._local_tensor, rows, alias)
        tensor.backing.aliases.lend(alias, tensor.row_split.name)


def _move(alias: Any, before: Tensor, now: Tensor, backing: Backing) -> None:
    """Let a sharded tensor that refers to memory of ``before`` refer to the same place in ``now``."""
    alias._local_tensor = _in(now, before, alias._local_tensor)
    alias.backing = backing
    backing.aliases.add(alias)


def _in(now: Tensor, before: Tensor, alias: Tensor) -> Tensor:
    if now.is_complex() and not alias.is_complex():
        now = torch.view_as_real(now)
    distance = (alias.data_ptr() - before.data_ptr()) // now.element_size() if alias.numel() else 0
    return now.as_strided(alias.shape, alias.stride(), now.storage_offset() + distance)


def _place(rows: Tensor) -> range:
    """Return the addresses of the bytes between the first and the last element."""
    return range(rows.data_ptr(), rows.data_ptr() + compat.span(rows)) if rows.numel() else range(0)


def _overlap(a: range, b: range) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)
