"""The parameters that a model was sharded with: those that it shards, and those that it ignores."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Mapping

from torch import nn

from .. import compat
from ..owner import ignore, stop_ignoring


class KnownParameters:
    """The parameters of a model's module.

    Ignored parameters (``ignored_params``) are the program's own: it may replace one, and what is in its place is then
    ignored, too.

    Args:
        owner: The sharded model. Not kept alive.
        sharded: Parameters that are sharded.
        ignored: Those that are not, by the name of each place where a module holds one.
    """

    def __init__(self, owner: object, sharded: Iterable[nn.Parameter], ignored: Mapping[str, nn.Parameter]) -> None:
        self._owner = weakref.ref(owner)
        self._sharded = frozenset(map(id, sharded))
        self._places = tuple(ignored)
        self._ignored: dict[str, nn.Parameter] = {}  # keeps them alive: nothing else may have their id
        self._know(ignored)

    def _know(self, ignored: Mapping[str, nn.Parameter]) -> None:
        stop_ignoring(self._ignored.values())
        self._ignored = dict(ignored)
        self._known = self._sharded.union(map(id, ignored.values()))
        ignore(self._owner(), _each_once(ignored))

    def places(self, module: nn.Module | None) -> dict[str, nn.Parameter]:
        """Return the parameters that are now in the places of ignored ones, by the names of the places."""
        found: dict[str, nn.Parameter] = {}
        for place in self._places if module is not None else ():
            with contextlib.suppress(AttributeError):  # the program has removed it
                found[place] = module.get_parameter(place)  # type: ignore[union-attr]
        if module is not None and [*map(id, found.values())] != [*map(id, self._ignored.values())]:
            self._know(found)
        return self._ignored

    def ignored(self, module: nn.Module | None) -> dict[str, nn.Parameter]:
        """Return the parameters that are now in the places of ignored ones, each once, by name."""
        return _each_once(self.places(module))

    def check(self, module: nn.Module) -> None:
        """Raise RuntimeError if the module has got another parameter: each rank would train it alone."""
        waiting, seen = [module], {module}
        while waiting:  # at every forward: module.modules() takes four times as long
            holder = waiting.pop()
            for child in holder._modules.values():
                if child is not None and child not in seen:
                    seen.add(child)
                    waiting.append(child)
            for name, param in holder._parameters.items():
                if param is not None and id(param) not in self._known:
                    self._refuse(module, holder, name)

    def _refuse(self, module: nn.Module, holder: nn.Module, name: str) -> None:
        """Raise because of a parameter that is not known, unless it is in the place of one that is ignored."""
        self.places(module)
        if id(holder._parameters[name]) in self._known or compat.in_functional_call():
            return
        path = ".".join(filter(None, (next(path for path, held in module.named_modules() if held is holder), name)))
        raise RuntimeError(
            f"Parameter {path!r} came after fully_shard_model: it is not sharded and its gradient would "
            "not be reduced. Change the model before sharding it."
        )


def _each_once(params: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return parameters under their first names."""
    first: dict[nn.Parameter, str] = {}
    for name, param in params.items():
        first.setdefault(param, name)
    return {name: param for param, name in first.items()}
