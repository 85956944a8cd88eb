"""The parameters that a model was sharded with: those that it shards, and those that it ignores."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from ..owner import ignore, stop_ignoring


class KnownParameters:
    """The parameters of a model's module.

    Ignored parameters (``ignored_params``) are the program's own: it may replace one, and what is in its place is then
    ignored, too.

    Args:
        owner: The sharded model. Not kept alive.
        module: Its module. Not kept alive.
        sharded: Parameters that are sharded.
        ignored: Those that are not, by name.
        places: All names of ignored parameters. None: they are looked up in ``module``. One that is being copied has
            no parameters yet, and takes those of the original.
    """

    def __init__(
        self,
        owner: object,
        module: nn.Module,
        sharded: Iterable[nn.Parameter],
        ignored: Mapping[str, nn.Parameter],
        places: Sequence[str] | None = None,
    ) -> None:
        self._owner = weakref.ref(owner)
        self._sharded = frozenset(map(id, sharded))
        alike = frozenset(map(id, ignored.values()))
        if places is None:
            named = module.named_parameters(remove_duplicate=False) if alike else ()
            places = tuple(name for name, param in named if id(param) in alike)
        self.places = places
        # Keeps them alive: nothing else may have their id.
        self._ignored = {param: name for name, param in ignored.items()}
        self._known = self._sharded | alike
        ignore(owner, ignored)

    def ignored(self, module: nn.Module | None) -> dict[str, nn.Parameter]:
        """Return the parameters that are now in the places of ignored ones, each once, by name."""
        found: dict[nn.Parameter, str] = {}
        for place in self.places:
            with contextlib.suppress(AttributeError):  # the program has removed it
                if module is not None:
                    found.setdefault(module.get_parameter(place), place)
        if module is not None and found != self._ignored:
            stop_ignoring(self._ignored)
            self._ignored, self._known = found, self._sharded.union(map(id, found))
            ignore(self._owner(), {name: param for param, name in found.items()})
        return {name: param for param, name in self._ignored.items()}

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
        self.ignored(module)
        if id(holder._parameters[name]) in self._known:
            return
        path = ".".join(filter(None, (next(path for path, held in module.named_modules() if held is holder), name)))
        raise RuntimeError(
            f"Parameter {path!r} came after fully_shard_model: it is not sharded and its gradient would "
            "not be reduced. Change the model before sharding it."
        )
