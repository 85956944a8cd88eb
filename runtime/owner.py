"""The sharded model, as its buckets, its eager path, its compiled graphs and its optimizers see it.

References go one way, so that the memory of a model is freed with the last reference to it, without Python's garbage
collector::

    sharded modules, optimizers that were extended, graphs of autograd
        -> the sharded model -> its eager path -> its units -> their buckets -> memory

What points the other way is weak: from a bucket to its model (:class:`Owned`), from a parameter to its bucket
(:class:`~.memory.bucket.Home`), from anything to a module (:class:`ModuleRef`).
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from .eager.engine import EagerRuntime
    from .grad_sync import GradSync
    from .memory.bucket import Bucket
    from .memory.comm_buffers import BufferPool
    from .optim.step_tracker import StepTracker
    from .optim.tracking import Optimizers
    from .ranks.conduct import Conduct

__all__ = [
    "ModuleRef",
    "Owned",
    "Owner",
    "ignore",
    "name_of",
    "owner_of",
    "owners_of",
    "refuse_dropped",
    "stop_ignoring",
]


class Owner(Protocol):
    """The object that owns buckets: a :class:`~mfsdp_compile.runtime.model.ShardedModel`.

    Attributes:
        buckets: The buckets, in the order of their units.
        conduct: Announces collectives and compares them with those of other ranks.
        grad_sync: Decides when gradients are reduced, and keeps track of the running backward.
        step_tracker: Notices optimizer steps that a rank skips or does not finish.
        optimizers: The optimizers that hold its parameters.
        comm_buffers: Its communication buffers.
        eager: Its eager path.
    """

    buckets: tuple[Bucket, ...]
    conduct: Conduct
    grad_sync: GradSync
    step_tracker: StepTracker
    optimizers: Optimizers
    comm_buffers: BufferPool
    eager: EagerRuntime

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients are zeroed where they would be dropped."""

    def leave_backward(self) -> None:
        """A forward begins: a backward that was entered and not finished must have raised.

        After a failure, raises unless all ranks have failed in the same place.
        """

    def failed(self, error: BaseException) -> None:
        """A forward, or a collective in backward, has raised."""

    def check_complete(self) -> None:
        """Raise if the model has parameters that are in no bucket."""

    def refresh(self, ahead: bool = False) -> None:
        """Start gathering stale residents, possibly ahead of the forward that uses them."""

    def await_gathers(self) -> None:
        """Wait for the gathers that :meth:`refresh` has started."""

    def zero_gradients(self, set_to_none: bool, kept: Collection[int] | None) -> None:
        """Zero or drop gradients of parameters whose ``id`` is not in ``kept``."""

    def shared_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that all ranks have, by name."""

    def begin_graph(self, phase: str, digest: str, schedule: str, buckets: Sequence[str], options: str) -> None:
        """A compiled graph is about to start its collectives; see :meth:`.Conduct.begin_graph`."""

    def label_modules_of(self, *buckets: Bucket) -> None:
        """Make changes of buckets visible to Dynamo's guards."""


class Owned:
    """A part of a sharded model, which the model keeps alive, and not the other way round."""

    _owner: weakref.ref[Owner]

    @property
    def owner(self) -> Owner:
        """The sharded model, which sets this attribute.

        Raises:
            RuntimeError: It no longer exists.
        """
        owner = self._owner()
        return refuse_dropped() if owner is None else owner

    @owner.setter
    def owner(self, owner: Owner) -> None:
        self._owner = weakref.ref(owner)


def refuse_dropped() -> NoReturn:
    """Raise RuntimeError because something of a model is used that no longer exists."""
    raise RuntimeError(
        "A sharded model no longer exists, and a parameter of it, or a backward through it, needs it. Keep a reference to "
        "the model, or to one of its modules, as long as its parameters are trained."
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


def owners_of(buckets: Iterable[Bucket]) -> list[Owner]:
    """Return the owners of ``buckets``, each once, in order."""
    return list({id(bucket.owner): bucket.owner for bucket in buckets}.values())


class _Ignored(NamedTuple):
    """The model that ignores a parameter (``ignored_params``), and the parameter's name there."""

    owner: weakref.ref[Owner]
    name: str


_ignored: Any = WeakIdKeyDictionary()
"""Parameters that models ignore. They are the program's objects, which may be copied and pickled, so nothing is noted on them."""


def ignore(owner: Owner, params: Mapping[str, nn.Parameter]) -> None:
    """Record that ``owner`` has these parameters, by name, but does not shard them."""
    for name, param in params.items():
        _ignored[param] = _Ignored(weakref.ref(owner), name)


def stop_ignoring(params: Iterable[nn.Parameter]) -> None:
    """Forget the model of these parameters."""
    for param in params:
        _ignored.pop(param, None)


def owner_of(param: Any) -> Owner | None:
    """Return the model that shards or ignores a parameter; None: there is none."""
    if (home := getattr(param, "mfsdp_home", None)) is not None:
        owner: Owner = home.bucket.owner
        return owner
    ignored = _ignored.get(param)
    return ignored.owner() if ignored is not None else None


def name_of(param: Any) -> str:
    """Return the name of a parameter that a model shards or ignores, in the model's module."""
    if (home := getattr(param, "mfsdp_home", None)) is not None:
        name: str = home.bucket.sites[home.index][0].name
        return name
    return str(_ignored[param].name)
