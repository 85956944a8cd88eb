"""Names of tensors in torch_dist and in fsdp_dtensor, as plain data: no torch, no files.

Terms
    name        name of a parameter, without prefix: ``decoder.layers.3.mlp.linear_fc1.weight``
    state       name of an optimizer state of a parameter (``exp_avg``); None is the parameter itself
    stacked     a torch_dist name without the index of the layer, or of the expert: the tensors of all layers (and
                experts) are one tensor, with the layer (and expert) as the first dimension (and second)
    half        torch_dist stores the two matrices of a gated MLP as one, gate above up; fsdp_dtensor calls them
                ``..._w`` (half 0) and ``..._v`` (half 1)

Example: a parameter of a model with 2 layers, and its optimizer state ::

    torch_dist                                              fsdp_dtensor, i is 0 and 1
    decoder.layers.mlp.linear_fc1.weight [2, 2f, h]         model.module.decoder.layers.i.mlp.linear_fc1.weight_w [f, h]
                                                            model.module.decoder.layers.i.mlp.linear_fc1.weight_v [f, h]
    optimizer.state.exp_avg.decoder.layers.mlp.linear_...
    optimizer.state.module.module.module.decoder.layers.i....exp_avg

    >>> decompose("decoder.layers.mlp.linear_fc1.weight", (2, 8, 3), gated=True)[1]
    TensorPart(name='decoder.layers.0.mlp.linear_fc1.weight_v', index=(0,), half=1)
    >>> compose("decoder.layers.0.mlp.linear_fc1.weight_v")
    TensorPart(name='decoder.layers.mlp.linear_fc1.weight', index=(0,), half=1)
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Name:
    """A parameter (``state`` None), or an optimizer state of it."""

    name: str
    state: str | None = None


@dataclass(frozen=True)
class TensorPart:
    """``tensor[index]``, or the first or second half of its rows, and the name of this part."""

    name: str
    index: tuple[int, ...] = ()
    half: int | None = None


@dataclass(frozen=True)
class Prefixes:
    """Prefixes of names in fsdp_dtensor. The defaults are Megatron-LM's."""

    model: str = "model.module"
    optimizer: str = "optimizer.state.module.module.module"
    groups: str = "optimizer.param_to_group_meta.module.module.module"

    def __post_init__(self) -> None:
        for field in ("model", "optimizer", "groups"):
            if not getattr(self, field) or getattr(self, field).endswith("."):
                raise ValueError(f"a prefix must be words separated by dots, got {field}={getattr(self, field)!r}")

    def key(self, name: Name) -> str:
        """Return the key in fsdp_dtensor."""
        if name.state is None:
            return f"{self.model}.{name.name}"
        return f"{self.optimizer}.{name.name}.{name.state}"

    def parse(self, key: str) -> Name | None:
        """Return what an fsdp_dtensor key stands for, or None if it is neither a parameter nor a state."""
        if key.startswith(self.optimizer + "."):
            name, _, state = key[len(self.optimizer) + 1 :].rpartition(".")
            return Name(name, state) if name else None
        if key.startswith(self.model + "."):
            return Name(key[len(self.model) + 1 :])
        return None

    def group_key(self, name: str, field: str) -> str:
        """Return the fsdp_dtensor key of an option (``lr``) of a parameter's group."""
        return f"{self.groups}.{name}.{field}"

    def parse_group(self, key: str) -> tuple[str, str] | None:
        """Return parameter and option of such a key. Megatron's converter writes two dots after the prefix."""
        if not key.startswith(self.groups + "."):
            return None
        name, _, field = key[len(self.groups) + 1 :].removeprefix(".").rpartition(".")
        return (name, field) if name else None


# -- torch_dist -------------------------------------------------------------------------------------------------------

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
_STACKED_LAYERS = re.compile(r"(^|\.)layers\.(?!\d+(\.|$))")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")
_STACKED_EXPERTS = ".experts.experts."
_EXPERT = re.compile(r"(.*\.experts)\.(linear_fc[12])\.(weight|bias)(\d+)$")
_LOCAL_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$")
_GATED = re.compile(
    r"\.(mlp|shared_experts)\.linear_fc1\.(weight|bias)$"
    r"|\.experts\.linear_fc1\.(weight|bias)\d+$"
    r"|\.experts\.local_experts\.\d+\.linear_fc1\.(weight|bias)$"
)
_MTP = re.compile(r"((?:^|\.)mtp\.layers\.(?:\d+\.)?)(transformer_layer|mtp_model_layer)\.")


def parse_torch_dist(key: str) -> Name:
    """Return what a tensor of a torch_dist checkpoint is. Its name may be stacked."""
    match = _STATE.fullmatch(key)
    return Name(match[2], match[1]) if match else Name(key)


def torch_dist_key(name: Name) -> str:
    """Return the key in torch_dist, without the number that older versions give an optimizer of a chain.

    Otherwise the inverse of :func:`parse_torch_dist`.
    """
    return name.name if name.state is None else f"optimizer.state.{name.state}.{name.name}"


def is_gated(name: str, modules: Sequence[str] = ()) -> bool:
    """Return whether a parameter of one layer and expert is two joined matrices if its MLP is gated.

    ``modules``: Only names with one of these among their dotted parts count (``--swiglu-modules``).
    """
    if not _GATED.search("." + name):
        return False
    return not modules or any(f".{module}." in f".{name}." for module in modules)


def is_extra_state(key: str) -> bool:
    """Return whether an entry of torch_dist is the extra state of a module, such as Transformer Engine's."""
    return "._extra_state" in f".{key}"


def is_layer_stacked(name: str) -> bool:
    """Return whether a torch_dist name leaves out the index of a layer."""
    return _STACKED_LAYERS.search(name) is not None


def stacked_dimensions(name: str) -> int:
    """Return the number of leading dimensions of a torch_dist tensor that index layers and experts."""
    return is_layer_stacked(name) + (_STACKED_EXPERTS in name)


def decompose(name: str, shape: Sequence[int], gated: bool, modules: Sequence[str] = ()) -> list[TensorPart]:
    """Return the fsdp_dtensor parameters that a torch_dist tensor contains, in the order in which it stores them.

    Args:
        name: Name in torch_dist, stacked or not.
        shape: Shape of the tensor before Megatron flattens it.
        gated: Whether MLPs are gated (SwiGLU).
        modules: See :func:`is_gated`.

    Raises:
        ValueError: If the shape has fewer dimensions than the name has stacks, or a gated matrix has an odd number of
            rows.
    """
    depth = stacked_dimensions(name)
    if len(shape) < depth:
        raise ValueError(
            f"{name} should have {depth} dimensions for layers and experts, but its shape is {tuple(shape)}"
        )
    parts = []
    for index in itertools.product(*map(range, shape[:depth])):
        rest, single = list(index), name
        if is_layer_stacked(single):
            single = _STACKED_LAYERS.sub(rf"\g<1>layers.{rest.pop(0)}.", single, count=1)
        if _STACKED_EXPERTS in single:
            single = single.replace(_STACKED_EXPERTS, ".experts.", 1) + str(rest.pop(0))
        if gated and is_gated(single, modules) and len(shape) > depth:
            if shape[depth] % 2:
                raise ValueError(
                    f"{name} cannot be split into two halves: it has {shape[depth]} rows, shape {tuple(shape)}"
                )
            parts += [TensorPart(f"{single}_w", index, 0), TensorPart(f"{single}_v", index, 1)]
        else:
            parts.append(TensorPart(single, index))
    return parts


def compose(name: str, gated: bool = True, stack_layers: bool = True) -> TensorPart:
    """Return an fsdp_dtensor parameter's location in torch_dist: the (stacked) name, the index in it, and which half.

    Args:
        name: Name in fsdp_dtensor.
        gated: Treat ``_w`` and ``_v`` after a name for which :func:`is_gated` holds as halves.
        stack_layers: False keeps the index of the layer in the name, as Megatron does for models whose layers differ.
    """
    index: list[int] = []
    half = None
    if gated and name.endswith(("_w", "_v")) and is_gated(name[:-2]):
        half = "wv".index(name[-1])
        name = name[:-2]
    if match := _EXPERT.fullmatch(name):
        index = [int(match[4])]
        name = f"{match[1]}.experts.{match[2]}.{match[3]}"
    elif match := _LOCAL_EXPERT.fullmatch(name):
        index = [int(match[2])]
        name = f"{match[1]}.experts.{match[3]}.{match[4]}"
    if stack_layers and (match := _LAYER.search(name)):
        index.insert(0, int(match[2]))
        name = _LAYER.sub(r"\1layers.", name, count=1)
    return TensorPart(name, tuple(index), half)


def layer_stack(name: str) -> str | None:
    """Return the list of layers that contains an fsdp_dtensor parameter (``decoder.layers``), or None."""
    match = _LAYER.search(name)
    return name[: match.end(2) - len(match[2]) - 1] if match else None


def modern_mtp(name: str, new: bool = True) -> str:
    """Rename a multi-token-prediction layer's inner layer to ``mtp_model_layer``, from the old ``transformer_layer``.

    ``new=False`` does the opposite.
    """
    return _MTP.sub(rf"\1{'mtp_model_layer' if new else 'transformer_layer'}.", name)


def grid_of(shape: Sequence[int], flattened: Sequence[int]) -> tuple[int, ...]:
    """Return the number of blocks along each dimension that a tensor was cut into before Megatron flattened the blocks.

    A tensor of shape [X, Y] that tensor parallelism cuts into blocks of [x, y] is stored as [X/x, Y/y, x*y]. ::

        >>> grid_of((6, 8), (1, 2, 24))     # two blocks of [6, 4]: a row-parallel weight on two ranks
        (1, 2)

    Raises:
        ValueError: If the shapes do not match.
    """
    *grid, block = flattened or (0,)
    fits = len(grid) == len(shape) and all(g > 0 and n % g == 0 for n, g in zip(shape, grid, strict=True))
    if not fits or math.prod(n // g for n, g in zip(shape, grid, strict=True)) != block:
        raise ValueError(f"shape {tuple(flattened)} does not consist of blocks of a tensor of shape {tuple(shape)}")
    return tuple(grid)


# -- values that are not parameters -----------------------------------------------------------------------------------


def flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and leaves of nested dictionaries and lists. Empty ones have no leaves, and are lost."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from flatten(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from flatten(inner, f"{key}.{number}" if key else str(number))
    else:
        yield key, value


class _Node(dict[str, Any]):
    """A dictionary that :func:`unflatten` has created; leaves can be dictionaries too."""


def unflatten(leaves: Mapping[str, Any]) -> Any:
    """Rebuild nested dictionaries and lists from dotted keys. Keys 0, 1, ... make a list. Inverse of :func:`flatten`.

    Raises:
        ValueError: If a key has both a value and keys below it.
    """
    root = _Node()
    for key, leaf in leaves.items():
        *path, last = key.split(".")
        node = root
        for step in path:
            node = node.setdefault(step, _Node())
            if not isinstance(node, _Node):
                raise ValueError(f"{key} lies below a key that has a value")
        if last in node:
            raise ValueError(f"{key} has a value and also keys below it")
        node[last] = leaf
    return _with_lists(root)


def _with_lists(node: Any) -> Any:
    if not isinstance(node, _Node):
        return node
    inner = {key: _with_lists(value) for key, value in node.items()}
    if inner and set(inner) == {str(number) for number in range(len(inner))}:
        return [inner[str(number)] for number in range(len(inner))]
    return inner
