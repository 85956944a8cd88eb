"""Units: which modules are gathered and released together, and which unit each parameter belongs to.

A unit is an instance of a class in ``fsdp_unit_modules``, a module given there, or a list of modules. A parameter
belongs to the innermost unit around all the places that hold it. Parameters in no unit belong to the root, in up to
three parts: parameters before, among and after the units (in a language model: embedding, nothing, norm and head). A
single root unit would keep the embedding gathered until the head has run.

Small units can be joined (:func:`join`): on many ranks, a message must be large to be worth its latency.
"""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from ..geometry.bucket_plan import ParamLocation
from ..owner import ModuleRef

UnitModules: TypeAlias = (
    Sequence[type[nn.Module] | str | nn.Module | Sequence[nn.Module]] | type[nn.Module] | str | None
)
"""Classes and import paths of classes whose instances are units, modules that are units, and lists of modules that are
one unit together."""

ROOT_PARTS = ("before", "among", "after")


@dataclass(frozen=True)
class Unit:
    """A unit and the parameters it owns.

    Args:
        name: Name of the module in the model; ``"layers.0-3"`` for four that were joined; ``"root:before"`` etc. for
            parts of the root, or ``"root:all"`` if the model has no other unit.
        modules: Modules whose forwards are the unit's windows: one module; several that were joined, in registration
            order; or the model itself for parts of the root.
        params: Each parameter once, with every place that holds it, in registration order.
        is_module: Whether it is one module of a larger unit, see ``by_module`` of :func:`find_units`.
    """

    name: str
    modules: tuple[nn.Module, ...]
    params: tuple[tuple[nn.Parameter, tuple[ParamLocation, ...]], ...]
    is_root: bool
    is_module: bool = False


def resolve_units(
    model: nn.Module, unit_modules: UnitModules
) -> tuple[tuple[type[nn.Module], ...], tuple[tuple[nn.Module, ...], ...]]:
    """Return the classes whose instances are units, and the groups of modules that are one unit each.

    Raises:
        TypeError: An entry is neither a class of modules, nor a string, nor modules.
        ValueError: See :func:`resolve_unit_classes`; or a module is not inside the model, or in two groups.
    """
    entries: list[Any] = (
        [unit_modules] if isinstance(unit_modules, (str, type)) else [] if unit_modules is None else list(unit_modules)
    )
    groups: list[tuple[nn.Module, ...]] = []
    names = {module: name for name, module in model.named_modules()}
    for entry in entries:
        if isinstance(entry, nn.Module):
            groups.append((entry,))
        elif isinstance(entry, (list, tuple)) and entry and all(isinstance(each, nn.Module) for each in entry):
            groups.append(tuple(entry))
    grouped = [module for group in groups for module in group]
    for module in grouped:
        if not names.get(module):
            where = "is the model itself" if module in names else "is not a part of the model"
            raise ValueError(
                f"fsdp_unit_modules contains a {type(module).__name__} that {where}. Pass modules inside the model, or "
                "their classes."
            )
        if grouped.count(module) > 1:
            raise ValueError(
                f"fsdp_unit_modules contains module {names[module]!r} twice: a module belongs to one unit only."
            )
    rest = [entry for entry in entries if not isinstance(entry, (nn.Module, list, tuple))]
    rest += [entry for entry in entries if isinstance(entry, (list, tuple)) and tuple(entry) not in groups]
    return resolve_unit_classes(model, rest or None), tuple(groups)


def resolve_unit_classes(model: nn.Module, unit_modules: UnitModules) -> tuple[type[nn.Module], ...]:
    """Resolve unit classes, given as classes, import paths, names of classes in the model, ``"auto"``, or a mixture.

    Import paths look like ``"package.module.Class"``.

    Raises:
        TypeError: An entry is neither a class of modules nor a string.
        ValueError: A path cannot be imported, or no module of the model is an instance of a class.
    """
    return resolve_classes(model, unit_modules, "fsdp_unit_modules")


def resolve_classes(model: nn.Module, given: UnitModules, argument: str) -> tuple[type[nn.Module], ...]:
    """Like :func:`resolve_unit_classes`, for the argument of this name."""
    if given is None:
        return ()
    entries = [given] if isinstance(given, (str, type)) else list(given)
    classes: list[type[nn.Module]] = []
    for entry in entries:
        if entry == "auto":
            found = repeated_blocks(model) or _listed_blocks(model)
            if not found:
                raise ValueError(
                    f"{argument}='auto' found no repeated block in the model: no class of modules with children "
                    "occurs twice side by side, or in a ModuleList. Name the classes to shard by, or pass None to make "
                    "the model one unit."
                )
            classes.extend(found)
            continue
        cls = _find_class(model, entry, argument) if isinstance(entry, str) else entry
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"{argument} takes nn.Module classes and their import paths, got {entry!r}")
        if not any(isinstance(module, cls) for module in model.modules()):
            raise ValueError(
                f"No module of the model is a {cls.__module__}.{cls.__qualname__}, which {argument} names. "
                f"Classes in the model: {_class_list(model)}."
            )
        classes.append(cls)
    return tuple(dict.fromkeys(classes))


def repeated_blocks(model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the classes of repeated blocks, such as a transformer's layers.

    A block's class occurs at least twice among the children of one module, has children and parameters of its own, and
    is not inside another such block. An encoder and a decoder of one class, or the stages of a ResNet, are not blocks;
    the layers that they contain are.
    """
    found: list[type[nn.Module]] = []
    repeated = _repeated(model)
    for cls, blocks in repeated.items():
        are_layers = isinstance(model, (*_CONTAINERS, nn.Sequential)) and cls is not nn.Sequential
        inner = [inside for block in blocks for inside in repeated_blocks(block)] if not are_layers else []
        found.extend(inner or [cls])
    for child in model.children():
        if type(child) not in repeated:
            found.extend(repeated_blocks(child))
    return tuple(dict.fromkeys(found))


def _listed_blocks(module: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the classes of blocks in the outermost lists: those of a model that has been cut to one layer."""
    found = (
        [type(child) for child in module.children() if _is_block(child)] if isinstance(module, nn.ModuleList) else []
    )
    return tuple(dict.fromkeys(found or (cls for child in module.children() for cls in _listed_blocks(child))))


def _repeated(module: nn.Module) -> dict[type[nn.Module], list[nn.Module]]:
    """Return the children that are blocks and of whose class there are several, by class."""
    children: dict[type[nn.Module], list[nn.Module]] = {}
    for child in module.children():
        if _is_block(child):
            children.setdefault(type(child), []).append(child)
    return {cls: blocks for cls, blocks in children.items() if len(blocks) >= 2}


def find_units(
    model: nn.Module,
    classes: Sequence[type[nn.Module]],
    by_module: bool = False,
    groups: Sequence[Sequence[nn.Module]] = (),
    ignored: Collection[nn.Parameter] = (),
) -> tuple[Unit, ...]:
    """Return all units that own parameters, in registration order of their first parameter.

    Args:
        classes: Classes whose instances are units.
        by_module: Whether each module inside a unit that holds parameters is a unit of its own.
        groups: Modules that are one unit together, even if they are instances of ``classes``.
        ignored: Parameters that belong to no unit.
    """
    grouped = {module for group in groups for module in group}
    unit_modules: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if name and (module in grouped or isinstance(module, tuple(classes)))
    }
    names = {module: name for name, module in unit_modules.items()}
    group_of = {
        names[module]: (joined_name([names[each] for each in group]), tuple(group))
        for group in groups
        for module in group
    }
    if by_module:
        holders = {f"{name}.{inner}": m for name in unit_modules for inner, m in _holders(unit_modules[name])}
        unit_modules |= {name: module for name, module in holders.items() if name not in unit_modules}
    locations = {param: places for param, places in _locations(model).items() if param not in ignored}
    owners = {param: _innermost([s.module_name for s in places], unit_modules) for param, places in locations.items()}
    owners = {param: _group_name(owner, param, group_of, locations[param]) for param, owner in owners.items()}
    modules_of = {name: (module,) for name, module in unit_modules.items()} | dict(group_of.values())

    owned: dict[str, list[nn.Parameter]] = {}
    positions = [i for i, param in enumerate(locations) if owners[param]]
    for i, param in enumerate(locations):
        name = owners[param]
        if not name:
            name = "root:all" if not positions else f"root:{_root_part(i, positions[0], positions[-1])}"
        owned.setdefault(name, []).append(param)
    return tuple(
        Unit(
            name,
            modules_of.get(name, (model,)),
            tuple((param, tuple(locations[param])) for param in params),
            is_root=name not in modules_of,
            is_module=by_module and name in modules_of,
        )
        for name, params in owned.items()
    )


def _holders(unit: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules inside a unit that hold parameters, with their names in it."""
    return [(name, module) for name, module in unit.named_modules() if name and module._parameters]


def join(model: nn.Module, units: Sequence[Unit], least: int, size: Callable[[Unit], int]) -> tuple[Unit, ...]:
    """Join neighbors to units whose gathered size is at least ``least`` bytes. The last unit of a run may be smaller.

    Args:
        units: Units from :func:`find_units`.
        size: Returns the gathered size of a unit in bytes.
    """
    joined: dict[str, Unit | None] = {}  # by name; None: joined to the unit before
    for run in neighbors(model, units):
        for group in group_by_size([size(unit) for unit in run], least):
            members = [run[i] for i in group]
            names = [unit.name for unit in members]
            modules = tuple(module for unit in members for module in unit.modules)
            params = tuple(param for unit in members for param in unit.params)
            joined |= dict.fromkeys(names)
            joined[names[0]] = Unit(joined_name(names), modules, params, is_root=False)
    return tuple(found for unit in units if (found := joined.get(unit.name, unit)) is not None)


def neighbors(model: nn.Module, units: Sequence[Unit]) -> list[list[Unit]]:
    """Return the units that may be joined, in runs of consecutive units.

    A unit that holds other units is not joined, because it is in use as long as they are. Units inside different units
    are not joined. Neither are units from different parts of a model (an encoder's last layer and a decoder's first),
    because one part may run without the other: the units must be children of one module, or in one list of modules.
    """
    own = [unit for unit in units if not unit.is_root]
    names = {unit.name for unit in own}
    holders = {name: [prefix for prefix in _prefixes(name) if prefix in names and prefix != name] for name in names}
    holding = {holder for of in holders.values() for holder in of}
    runs: list[list[Unit]] = [[]]
    for unit in own:
        last = runs[-1][-1] if runs[-1] else None
        if last is None or holders[last.name] != holders[unit.name] or not _are_side_by_side(model, last, unit):
            runs.append([])
        if unit.name in holding:
            runs.append([])
        else:
            runs[-1].append(unit)
    return [run for run in runs if len(run) > 1]


def _are_side_by_side(model: nn.Module, one: Unit, other: Unit) -> bool:
    common, *depths = _parted([one.name, other.name])
    return max(map(len, depths)) == 1 or isinstance(
        model.get_submodule(".".join(common)), (nn.ModuleList, nn.Sequential)
    )


def group_by_size(sizes: Sequence[int], least: int) -> list[range]:
    """Group neighbors, by position, into the smallest groups with at least ``least`` bytes.

    An element that is large enough stays alone. Groups of one are omitted.

    >>> group_by_size([3, 3, 3, 9, 3, 3], least=5)
    [range(0, 2), range(4, 6)]
    """
    groups: list[range] = []
    start = total = 0
    for position, size in enumerate([*sizes, least]):
        if size >= least or total >= least:
            groups.append(range(start, position))
            start, total = position, 0
        total += size
    return [group for group in groups if len(group) > 1]


def joined_name(names: Sequence[str]) -> str:
    """Return the name of a joined unit, from its first to its last member.

    >>> joined_name(["layers.0", "layers.1", "layers.2"])
    'layers.0-2'
    """
    common, first, last = _parted([names[0], names[-1]])
    return ".".join([*common, f"{'.'.join(first)}-{'.'.join(last)}"]) if len(names) > 1 else names[0]


def _parted(names: Sequence[str]) -> list[list[str]]:
    """Return the common path of names, and the rest of each."""
    paths = [name.split(".") for name in names]
    common = len(list(itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))))
    return [paths[0][:common], *(path[common:] for path in paths)]


def _locations(model: nn.Module) -> dict[nn.Parameter, list[ParamLocation]]:
    locations: dict[nn.Parameter, list[ParamLocation]] = {}
    for name, module in model.named_modules():
        for attribute, param in module._parameters.items():
            if param is not None:
                locations.setdefault(param, []).append(ParamLocation(ModuleRef(module), name, attribute))
    return locations


def _group_name(
    owner: str,
    param: nn.Parameter,
    group_of: Mapping[str, tuple[str, tuple[nn.Module, ...]]],
    locations: Sequence[ParamLocation],
) -> str:
    """Return the name of the group that owns a parameter, whose innermost common unit is ``owner``.

    A parameter that is tied between modules of one group belongs to the group.
    """
    if owner in group_of:
        return group_of[owner][0]
    holders = [[name for name in _prefixes(location.module_name) if name in group_of] for location in locations]
    common = {group_of[names[-1]][0] if names else "" for names in holders}
    return common.pop() if len(common) == 1 and "" not in common else owner


def _innermost(module_names: Iterable[str], unit_modules: dict[str, nn.Module]) -> str:
    """Return the name of the innermost unit that contains all of the modules; "" for the root."""
    chains = [{part for part in _prefixes(name) if part in unit_modules} for name in module_names]
    common = set.intersection(*chains)
    return max(common, key=len, default="")


def _prefixes(name: str) -> Iterable[str]:
    parts = name.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def _root_part(position: int, first: int, last: int) -> str:
    before, among, after = ROOT_PARTS
    return before if position < first else after if position > last else among


def _is_block(module: nn.Module) -> bool:
    has_children = next(module.children(), None) is not None
    return has_children and next(module.parameters(), None) is not None and not isinstance(module, _CONTAINERS)


_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def _find_class(model: nn.Module, name: str, argument: str) -> type[nn.Module]:
    """Find a class by import path, or by its name in the model, as in Hugging Face's ``_no_split_modules``."""
    if "." in name:
        return _import_class(name, argument)
    found = dict.fromkeys(type(module) for module in model.modules() if type(module).__name__ == name)
    if len(found) != 1:
        what = "several classes of this name" if found else "no such class"
        raise ValueError(
            f"{argument} contains {name!r}, but the model has {what}. Give the import path, as in "
            f"'package.module.Class', or the class itself. Classes in the model: {_class_list(model)}."
        )
    return next(iter(found))


def _import_class(path: str, argument: str) -> type[nn.Module]:
    module_name, _, class_name = path.rpartition(".")
    try:
        owner = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        # A class nested in another one: "package.module.Outer.Inner".
        if module_name.rpartition(".")[0] and module_name.rpartition(".")[2][:1].isupper():
            owner = _import_class(module_name, argument)  # type: ignore[assignment]
        else:
            raise ValueError(
                f"{argument} names {path!r}, but {module_name or path!r} cannot be imported ({error}). "
                "Give the full import path, as in 'package.module.Class', or the class itself."
            ) from error
    if not hasattr(owner, class_name):
        raise ValueError(f"{argument} names {path!r}, but {module_name!r} has no {class_name!r}.")
    return getattr(owner, class_name)


def _class_list(model: nn.Module) -> str:
    counts = Counter(f"{type(m).__module__}.{type(m).__qualname__}" for m in model.modules())
    shown = [f"{name} ({count}x)" for name, count in counts.most_common(12)]
    return ", ".join(shown) + (", ..." if len(counts) > 12 else "")
