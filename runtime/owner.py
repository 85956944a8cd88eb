"""Who owns what: references between a sharded model, its parts, its parameters and modules.

[Note: Who keeps what alive]

References go one way, so that the memory of a model is freed with the last reference to it, without Python's garbage
collector::

    sharded modules, optimizers that were extended, graphs of autograd
        -> the sharded model -> its eager path -> its units -> their buckets -> memory

What points the other way is weak: from a bucket to its model (:class:`Owned`), from a parameter to its bucket
(:class:`~.memory.bucket.ParamHandle`), from anything to a module (:class:`ModuleRef`). What a part needs of its model
is a protocol beside the part (``BucketOwner``, ``EagerOwner``): parts do not know the model's class.

Autograd's graph is the exception that needs care, because Python's garbage collector does not look into it. Its nodes
hold buckets weakly (``_Reduce``, :class:`~.memory.gradients.Backward`). What must live until a backward has run is held
on purpose: the hook that unpacks saved tensors holds the model, and so does a compiled run (``GraphRun``).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

OwnerT = TypeVar("OwnerT")


class Owned(Generic[OwnerT]):
    """A part of a sharded model, which the model keeps alive, and not the other way round."""

    _owner: weakref.ref[OwnerT]

    @property
    def owner(self) -> OwnerT:
        """The sharded model, which sets this attribute.

        Raises:
            RuntimeError: It no longer exists.
        """
        owner = self._owner()
        return refuse_dropped() if owner is None else owner

    @owner.setter
    def owner(self, owner: OwnerT) -> None:
        self._owner = weakref.ref(owner)


def refuse_dropped() -> NoReturn:
    """Raise RuntimeError because something of a model is used that no longer exists."""
    raise RuntimeError(
        "A sharded model no longer exists, and a parameter of it, or a backward through it, needs it. Keep a reference "
        "to the model, or to one of its modules, as long as its parameters are trained."
    )


class ModuleRef:
    """A weak reference to a module, equal to others to the same one. Its deep copy refers to the module's copy."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self) -> nn.Module | None:
        """Return the module; None if it no longer exists."""
        return self._module()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModuleRef) and self._module == other._module

    def __hash__(self) -> int:
        return hash(self._module)

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleRef:
        module = self()
        return self if module is None else ModuleRef(copy.deepcopy(module, memo))


def owners_of(buckets: Iterable[Owned[Any]]) -> list[Any]:
    """Return the models that own ``buckets``, each once, in order. What the caller needs of them is its own
    protocol."""
    return list({id(bucket.owner): bucket.owner for bucket in buckets}.values())


class _Ignored(NamedTuple):
    """The model that ignores a parameter (``ignored_params``), and the parameter's name there."""

    owner: weakref.ref[Any]
    name: str


_ignored: Any = WeakIdKeyDictionary()
"""Parameters that models ignore. They are the program's objects, which may be copied and pickled, so nothing is
noted on them."""


def ignore(owner: object, params: Mapping[str, nn.Parameter]) -> None:
    """Record that ``owner`` has these parameters, by name, but does not shard them."""
    for name, param in params.items():
        _ignored[param] = _Ignored(weakref.ref(owner), name)


def stop_ignoring(params: Iterable[nn.Parameter]) -> None:
    """Forget the model of these parameters."""
    for param in params:
        _ignored.pop(param, None)


def is_ignored(param: nn.Parameter | None) -> bool:
    """Whether a model ignores a parameter."""
    return param in _ignored


def owner_of(param: Any) -> Any:
    """Return the model that shards or ignores a parameter; None: there is none."""
    if (handle := getattr(param, "mfsdp_handle", None)) is not None:
        return handle.bucket.owner
    ignored = _ignored.get(param)
    return ignored.owner() if ignored is not None else None


def name_of(param: Any) -> str:
    """Return the name of a parameter that a model shards or ignores, in the model's module."""
    if (handle := getattr(param, "mfsdp_handle", None)) is not None:
        name: str = handle.bucket.locations[handle.index][0].name
        return name
    return str(_ignored[param].name)
