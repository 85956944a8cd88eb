"""What an optimizer's step depends on: known of torch's own classes, declared for others, and never tried out.

A step over something else than single whole parameters is right for some optimizers only. Small trials cannot tell
which: a step may treat convolutions, large matrices, or parameters with an attribute differently, and it may change
what the program holds. What is neither known nor declared is therefore stepped by its own ``step()``, over parameters.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from .. import compat

Kind = Literal["elementwise", "blockwise", "per_parameter"]
"""See :func:`declare_optimizer`."""
OptimizerClass = TypeVar("OptimizerClass", bound=type[torch.optim.Optimizer])

_KINDS = ("elementwise", "blockwise", "per_parameter")
_DECLARED = "mfsdp_optimizer_kind"
"""Attribute of declared classes. Derived classes do not inherit it: :func:`kind_of` reads it in the class itself."""
_OF_TORCH: dict[type[torch.optim.Optimizer], str] = {
    **dict.fromkeys(
        (
            *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax, torch.optim.AdamW),
            *(torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
            torch.optim.SGD,
        ),
        "elementwise",
    ),
    torch.optim.Adafactor: "per_parameter",
    torch.optim.LBFGS: "together",
    torch.optim.Muon: "matrices",
    torch.optim.SparseAdam: "sparse",
}
_OF_LIBRARIES = {
    "transformers.optimization.Adafactor": "per_parameter",
    "torchao.optim.adam.Adam8bit": "blockwise",
    "torchao.optim.adam.AdamW8bit": "blockwise",
}
"""Classes by their full name, so that no library is imported."""
_HARMLESS = frozenset({"step", "zero_grad", "state_dict", "load_state_dict", "add_param_group"})
"""Methods that a program may replace in an optimizer without changing the step of its class. ``step`` is looked at by
:func:`is_wrapped`, ``zero_grad`` by :func:`has_own_zero_grad`."""
_LANGUAGE = ("builtins", "collections", "types", "typing", "typing_extensions")
"""Modules of the types of callable objects that torch's modules hold, besides functions."""

EXTENDED = "mfsdp_extended"
"""Attribute of extended optimizers, with the ``step`` that they have got."""
EXTENDED_ZERO_GRAD = "mfsdp_extended_zero_grad"
"""Attribute of extended optimizers: the ``zero_grad`` that they have got, and whether the program had set one."""


def declare_optimizer(kind: Kind, *classes: type[torch.optim.Optimizer]) -> Callable[[OptimizerClass], OptimizerClass]:
    """Declare what the ``step`` of optimizer classes depends on. Needed for classes that are not torch's own.

    Works as a decorator, ``@declare_optimizer("elementwise")``, and for classes of a library,
    ``declare_optimizer("elementwise", Lion)``. It holds for exactly these classes: a derived class may do anything.

    A declaration promises that ``step()`` reads nothing but the settings of groups, attributes of the optimizer and its
    class, and, for each parameter, its values, gradient and ``optimizer.state[parameter]``; and that it counts steps in
    this state only, so that it can be called for some parameters at a time.

    Args:
        kind: What an element's step depends on.

            - ``"elementwise"``: nothing but this element of parameter, gradient and state, and numbers in the state
              that are the same for all parameters with the same past (``state["step"]``). Not on shape, name, identity
              or attributes of the parameter.
            - ``"blockwise"``: on a block of neighbors, as in 8-bit optimizers.
            - ``"per_parameter"``: on this parameter only, and its shape, as in Adafactor, Shampoo and LAMB.
        classes: The classes. None: the result is used as a decorator.

    Returns:
        A decorator that declares a class and returns it.

    Raises:
        ValueError: There is no such kind.
        TypeError: Something is not a class of optimizers.
    """
    if kind not in _KINDS:
        raise ValueError(f"declare_optimizer takes the kind {', '.join(map(repr, _KINDS))}, got {kind!r}")

    def declare(cls: OptimizerClass) -> OptimizerClass:
        if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
            raise TypeError(f"declare_optimizer takes classes derived from torch.optim.Optimizer, got {cls!r}")
        setattr(cls, _DECLARED, kind)
        return cls

    for each in classes:
        declare(each)
    return declare


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return what is known of the class of an optimizer; "": nothing."""
    cls = type(optimizer)
    if (declared := vars(cls).get(_DECLARED)) is not None:
        return str(declared)
    if cls in _OF_TORCH:
        return _OF_TORCH[cls] if is_of_torch(optimizer) else ""
    return _OF_LIBRARIES.get(f"{cls.__module__}.{cls.__qualname__}", "")


def is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer is one of torch's, not of a derived class, and nothing has replaced a part of its code."""
    cls = type(optimizer)
    return cls in _OF_TORCH and _code_of_torch.check(cls) and not _replaced_method(optimizer)


def why_not_flat(optimizer: torch.optim.Optimizer) -> str:
    """Return why an optimizer must not step over flat tensors; "": it may."""
    kind = kind_of(optimizer)
    if kind == "per_parameter":
        return f"a {type(optimizer).__name__} does not work element by element; it needs whole parameters"
    known = kind in ("elementwise", "blockwise")
    return _why_not(optimizer, kind, known, "work element by element", "elementwise")


def why_not_whole(optimizer: torch.optim.Optimizer) -> str:
    """Return why an optimizer must not step over some whole parameters on each rank; "": it may."""
    kind = kind_of(optimizer)
    known = kind in ("elementwise", "per_parameter")
    return _why_not(optimizer, kind, known, "step each parameter by itself", "per_parameter")


def _why_not(optimizer: torch.optim.Optimizer, kind: str, known: bool, what: str, declared: str) -> str:
    name = type(optimizer).__name__
    if kind and not known:
        return f"a {name} does not {what}"
    if type(optimizer) in _OF_TORCH:
        replaced = "" if known else _replaced_method(optimizer) or "code of its class"
        return replaced and f"this {name} is not known to {what}: the program has replaced {replaced}"
    if not known:
        return (
            f"a {name} is not known to {what}. If it does, declare it: "
            f"mfsdp_compile.declare_optimizer({declared!r}, {name})"
        )
    if any(held_by(optimizer)):
        return f"this {name} holds another optimizer, which keeps state of its own"
    replaced = _replaced_method(optimizer)
    return replaced and f"this {name} is not known to {what}: the program has replaced {replaced}"


def is_wrapped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the program has put a function around the optimizer's ``step``. Those of schedulers only count."""
    step = vars(optimizer).get("step")
    while compat.is_of_scheduler(step):
        step = step.__wrapped__
    extended = vars(optimizer).get(EXTENDED)
    ours = (None, type(optimizer).step, extended, getattr(extended, "__func__", None))
    return not any(step is each for each in ours)


def has_own_zero_grad(optimizer: torch.optim.Optimizer, beneath: bool = False) -> bool:
    """Whether ``zero_grad`` is code of the program, on the optimizer or in a class: it may read or keep gradients.

    Args:
        beneath: Look only at what an extended optimizer's ``zero_grad`` calls, not at what was put around it.
    """
    here = vars(optimizer).get("zero_grad")
    extended, was_set = vars(optimizer).get(EXTENDED_ZERO_GRAD, (None, False))
    is_set = was_set if beneath or here is extended else here is not None
    return is_set or not _is_of_torch_or_python(type(optimizer).zero_grad)


def may_count_calls(optimizer: torch.optim.Optimizer) -> str:
    """Return what may count calls of ``step`` without showing in :func:`kept_outside`; "": nothing."""
    if is_of_torch(optimizer):
        return ""
    for name, value in _outside(optimizer):
        if not isinstance(value, (Tensor, type, FunctionType)) and not is_plain(value):
            return f"its {name} is a {type(value).__name__}, which may count calls of step()"
    return ""


def kept_outside(optimizer: torch.optim.Optimizer) -> str:
    """Return, as text, what an optimizer keeps in itself and in its groups: a step that changes it counts calls."""
    if is_of_torch(optimizer):
        return ""  # torch's own count in each parameter's state
    return repr(
        [
            (
                name,
                (id(value), value._version) if isinstance(value, Tensor) else value if is_plain(value) else id(value),
            )
            for name, value in _outside(optimizer)
        ]
    )


def is_plain(value: Any) -> bool:
    """Whether a value consists of constants, in lists, tuples and dicts: its text says everything about it."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(each) for key, each in value.items())
    return is_constant(value)


def is_constant(value: Any) -> bool:
    """Whether a value is a number, text, a dtype or a device, or a tuple of such: nothing can change it in place."""
    if isinstance(value, tuple):
        return all(map(is_constant, value))
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device))


def _outside(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    for name, value in vars(optimizer).items():
        is_of_all = name in ("state", "param_groups", "_opt_called", *_HARMLESS)
        if not is_of_all and not name.endswith("_hooks") and "mfsdp" not in name and name != "_zero_grad_profile_name":
            yield f"attribute {name!r}", value
    for group in optimizer.param_groups:
        for name, value in group.items():
            if name != "params":
                yield f"setting {name!r}", value


def _replaced_method(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of a method of its class that the program has replaced in an optimizer; "": none."""
    cls = type(optimizer)
    replaced = (n for n, value in vars(optimizer).items() if callable(value) and callable(getattr(cls, n, None)))
    return next((f"{name}()" for name in replaced if name not in _HARMLESS), "")


def held_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers that an optimizer holds in attributes."""
    return (found for value in vars(optimizer).values() for found in _optimizers_in(value) if found is not optimizer)


def _optimizers_in(value: Any) -> Iterator[torch.optim.Optimizer]:
    if isinstance(value, torch.optim.Optimizer):
        yield value
    elif isinstance(value, (dict, list, tuple, set)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _optimizers_in(each)


class _Code:
    """Whether classes of torch, and what their modules define, are as torch has defined them."""

    def __init__(self) -> None:
        self._verified: dict[type, tuple[Any, ...]] = {}

    def check(self, cls: type) -> bool:
        kinds = cls.__mro__[: cls.__mro__.index(torch.optim.Optimizer)]
        places = [torch.optim.Optimizer, *kinds, *(sys.modules[kind.__module__] for kind in kinds)]
        values = tuple(itertools.chain.from_iterable(vars(place).values() for place in places))
        if self._verified.get(cls) == values:  # the same objects as before
            return True
        if not all(map(_is_of_torch_or_python, values)):
            return False
        self._verified[cls] = values
        return True


def _is_of_torch_or_python(value: Any) -> bool:
    if not callable(value) or isinstance(value, type):
        return True
    if not isinstance(value, FunctionType):
        return type(value).__module__.split(".")[0] in ("torch", *_LANGUAGE)
    defined_in = str(value.__globals__.get("__name__")).split(".")[0]  # functools.wraps copies __module__
    is_known = defined_in in ("torch", "typing_extensions") or defined_in in sys.stdlib_module_names
    inner = getattr(value, "__wrapped__", None)
    return is_known and (inner is None or _is_of_torch_or_python(inner))


_code_of_torch = _Code()
