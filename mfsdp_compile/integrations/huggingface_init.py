"""Hugging Face transformers models, initialized from scratch or loaded from a folder, directly into shards.

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model = fully_shard_model(
        model, fsdp_unit_modules="auto", init_model_with_meta_device=True, init_fn=huggingface_init.Pretrained(folder)
    )

Tested with transformers 5. Names are mapped by transformers' own checkpoint conversion.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mfsdp_compile.checkpoint.errors import CheckpointError
from mfsdp_compile.checkpoint.weights import inner_name
from mfsdp_compile.convert.safetensors_files import SafetensorsReader
from mfsdp_compile.runtime.init.meta import ByMethod, Initializer


class Initialization(Initializer):
    """Initializes transformers models with their own ``_init_weights``; for ``init_fn`` of ``fully_shard_model``.

    The values are those that ``model.to_empty(device=...)`` and ``model.init_weights()`` give in one process, from the
    same seed. Modules outside of any transformers model are initialized by their ``reset_parameters()``.
    """

    all_modules = True

    def __init__(self) -> None:
        self._by_method = ByMethod()
        self._model_of: dict[nn.Module, Any] = {}
        self._names: dict[nn.Module, str] = {}
        self._tied: frozenset[str] = frozenset()

    def prepare(self, module: nn.Module) -> None:
        """Find the transformers models in ``module``.

        Raises:
            TypeError: If there is none.
            ImportError: If transformers is not installed, or too old.
        """
        self._look_at(module)
        if not self._model_of:
            raise TypeError(
                f"{type(self).__name__} initializes transformers models, and this {type(module).__name__} contains "
                "none. Remove init_fn (modules then use their reset_parameters()), or pass a function."
            )

    def _look_at(self, module: nn.Module) -> None:
        self._names = {owner: name for name, owner in module.named_modules()}
        self._model_of = {}
        if "transformers" in sys.modules:  # otherwise there can be no transformers model
            pretrained = _library("modeling_utils").PreTrainedModel
            for model in module.modules():
                if isinstance(model, pretrained):  # outer models come first
                    self._model_of |= dict.fromkeys(model.modules(), model)
        self._tied = frozenset(
            f"{self._names[model]}.{name}".lstrip(".")
            for model in dict.fromkeys(self._model_of.values())
            for name in model.all_tied_weights_keys
        )

    def order(self, module: nn.Module) -> Iterable[nn.Module]:
        """Return all modules, children first: a parent may change what its children have initialized."""
        return dict.fromkeys(_children_first(module))

    def __call__(self, owner: nn.Module) -> None:
        model = self._model_of.get(owner)
        if model is None:
            if owner._parameters or owner._buffers:
                self._by_method(owner)
            return
        tensors: Iterable[tuple[str, Any]] = [*owner._parameters.items(), *owner._buffers.items()]
        for name, tensor in tensors:
            if tensor is not None:
                tensor._is_hf_initialized = self.has(f"{self._names[owner]}.{name}".lstrip("."))
        with _library("initialization").guard_torch_init_functions():
            model._init_weights(owner)

    def decides(self, name: str) -> bool:
        return name not in self._tied


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


class Pretrained(Initialization):
    """Loads weights from a ``save_pretrained`` folder or a ``.safetensors`` file; pass it as ``init_fn``.

    Each rank reads only its own rows. Where transformers builds a parameter from several tensors (stacked experts), it
    reads only the tensors that it needs. Values are converted to the dtype of the shards, and rounded at most once.
    Buffers that no file contains, and parameters that may be missing, are initialized as :class:`Initialization` does.
    Tied parameters are read once, under the name in the folder. A module that is not a transformers model gets the
    tensors that have its names.

    Args:
        folder: Folder with ``model.safetensors``, or with an index and several files; or one file.
        allow_missing: Patterns (``lm_head.*``) of parameters that may be missing from the folder, in addition to those
            that the model's class declares.
        allow_unexpected: Patterns of tensors that may be in the folder but not in the model.

    Raises:
        CheckpointError: When the model is sharded, if the folder is damaged, or its tensors do not match the model's
            names or shapes.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        allow_missing: str | Sequence[str] = (),
        allow_unexpected: str | Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._folder = Path(folder)
        self._allow_missing = [allow_missing] if isinstance(allow_missing, str) else list(allow_missing)
        self._allow_unexpected = [allow_unexpected] if isinstance(allow_unexpected, str) else list(allow_unexpected)
        self._sources: dict[str, _Source] = {}
        self._made: tuple[_Conversion, Mapping[str, Tensor]] | None = None

    def prepare(self, module: nn.Module) -> None:
        targets, _ = self.compare(module, "initialized")
        read = {id(tensor) for name, tensor in targets.items() if self.has(name)}
        self.draws = any(id(param) not in read for param in module.parameters())
        for name, tensor in targets.items():
            if self.has(name):
                # For parents that initialize their children's.
                tensor._is_hf_initialized = True  # type: ignore[attr-defined]

    def compare(self, module: nn.Module, otherwise: str) -> tuple[dict[str, Tensor], list[str]]:
        """Find what to read for each parameter and buffer of ``module``. Reads no values.

        Args:
            otherwise: What happens to tensors that are missing from the folder, for messages.

        Returns:
            The module's tensors by their names without those of wrappers inside, and the tensors that are left out.

        Raises:
            CheckpointError: If the folder is damaged or does not match.
        """
        self._look_at(module)
        self._reader = SafetensorsReader(self._folder)
        targets = {
            inner_name(name): t for name, t in module.state_dict(keep_vars=True).items() if isinstance(t, Tensor)
        }
        model = next(iter(self._model_of.values()), None)
        if model is not module and not targets.keys().isdisjoint(self._reader.layouts):
            model = None  # the folder belongs to what is around the transformers model
        if model is not None:
            self._sources, unexpected = _converted_sources(model, inner_name(self._names[model]), self._reader)
        else:
            self._sources = {
                name: _StoredParameter(name, layout.shape) for name, layout in self._reader.layouts.items()
            }
            unexpected = []
        unexpected += [name for name in self._sources if name not in targets]
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        problems = [
            *self._missing(targets, getattr(model, "_keys_to_ignore_on_load_missing", None) or ()),
            *self._misshapen(targets),
            *self._unexpected(unexpected, ignored),
        ]
        if problems:
            listed = "\n  ".join([*problems[:20], *([f"and {len(problems) - 20} more"] if len(problems) > 20 else [])])
            raise CheckpointError(
                f"{self._folder} does not fit the model, a {type(model or module).__name__}:\n  {listed}\nMake the "
                f"model as the folder's config.json says, or say with allow_missing=... (then {otherwise}) and "
                "allow_unexpected=... (then left out) what is meant."
            )
        return targets, unexpected

    def _missing(self, targets: Mapping[str, Tensor], ignored: Sequence[str]) -> Iterator[str]:
        there = {id(tensor) for name, tensor in targets.items() if self.has(name)}  # tied ones may have another name
        for name, tensor in targets.items():
            is_excused = id(tensor) in there or any(re.search(pattern, name) for pattern in ignored)
            if not is_excused and not _matches(name, self._allow_missing):
                yield f"missing: {name} {tuple(tensor.shape)}"

    def _unexpected(self, names: Sequence[str], ignored: Sequence[str]) -> Iterator[str]:
        for name in names:
            if not any(re.search(pattern, name) for pattern in ignored) and not _matches(name, self._allow_unexpected):
                yield f"unexpected: {name}"

    def _misshapen(self, targets: Mapping[str, Tensor]) -> Iterator[str]:
        for name, source in self._sources.items():
            if name not in targets:
                continue
            shape = source.shape if isinstance(source, _StoredParameter) else self._made_shape(source, name)
            if shape is not None and shape != tuple(targets[name].shape):
                yield f"another shape: {name} is {tuple(targets[name].shape)}, the folder has {shape}"

    def _made_shape(self, conversion: _Conversion, name: str) -> tuple[int, ...] | None:
        """Return the shape of what a conversion makes; None if only its result can tell."""
        try:
            made = self._convert(conversion, self._without_values)
        except Exception:  # an operation that looks at values; reading finds what does not fit
            return None
        return tuple(made[name].shape)

    def _without_values(self, key: str) -> Tensor:
        layout = self._reader.layouts[key]
        return torch.empty(layout.shape, dtype=layout.dtype, device="meta")

    def has(self, name: str) -> bool:
        return inner_name(name) in self._sources

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        name = inner_name(name)
        source = self._sources[name]
        if isinstance(source, _StoredParameter):
            return self._reader.part(source.key, index)
        if index and (some := source.only(index[0])) is not None:
            return self._convert(some)[name][(slice(None), *index[1:])]
        # Conversions that make several parameters are kept, because the other parameters are read next.
        if self._made is None or self._made[0] is not source:
            self._made = (source, self._convert(source))
        return self._made[1][name][index]

    def _convert(self, conversion: _Conversion, tensor: Callable[[str], Tensor] | None = None) -> Mapping[str, Tensor]:
        """Return what a conversion makes of the folder's tensors, or of others, by name."""
        tensor = tensor or self._reader.tensor
        converter = copy.deepcopy(conversion.converter)
        for pattern, key in conversion.keys:
            converter.add_tensor(conversion.target, key, pattern, functools.partial(tensor, key))
        made = converter.convert(conversion.target, model=conversion.model, config=conversion.model.config)
        return {
            conversion.prefix + name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


@dataclass(frozen=True)
class _StoredParameter:
    """A parameter that the folder stores unchanged, as ``key``."""

    key: str
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Conversion:
    """Parameters that transformers builds from other tensors of the folder.

    Args:
        converter: A ``transformers.WeightConverter``.
        target: Name of the first of these parameters in the transformers model.
        keys: Pairs of a matched pattern and a tensor's name, in order.
        model: The transformers model.
        prefix: What precedes its names in the sharded module.
    """

    converter: Any
    target: str
    keys: tuple[tuple[str, str], ...]
    model: Any
    prefix: str

    def only(self, rows: slice) -> _Conversion | None:
        """Return a conversion that makes only these rows, or None if all tensors are needed.

        Rows are experts if a list of tensors is stacked first and later operations leave that dimension alone.
        """
        operations = self.converter.operations
        kinds = [type(operation).__name__ for operation in operations]
        dims = [getattr(operation, "dim", None) for operation in operations]
        if kinds[0] != "MergeModulelist" or dims[0] != 0 or any(kind != "Concatenate" for kind in kinds[1:]):
            return None
        if any(dim is None or dim == 0 for dim in dims[1:]):
            return None
        by_pattern: dict[str, list[str]] = {}
        for pattern, key in self.keys:
            by_pattern.setdefault(pattern, []).append(key)
        keys = [(pattern, key) for pattern, found in by_pattern.items() for key in found[rows]]
        return _Conversion(self.converter, self.target, tuple(keys), self.model, self.prefix)


_Source = _StoredParameter | _Conversion


def _converted_sources(model: Any, path: str, reader: SafetensorsReader) -> tuple[dict[str, _Source], list[str]]:
    """Return the source of each parameter and buffer of a transformers model, by name, and the unused tensors.

    Args:
        path: Path of the model inside the sharded module, which the returned names refer to.
    """
    loading, mapping = _library("core_model_loading"), _library("conversion_mapping")
    prefix = f"{path}." if path else ""
    targets = {inner_name(name): value for name, value in model.state_dict().items()}
    transforms = mapping.get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: dict[str, _Source] = {}
    converted: dict[str, list[tuple[str, str]]] = {}
    unexpected = []
    for key in sorted(reader.layouts, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, model.base_model_prefix, targets)
        if name not in targets and key in targets:
            name, pattern = key, None
        if name not in targets:
            unexpected.append(key)
        elif pattern is None:
            sources[prefix + name] = _StoredParameter(key, reader.layouts[key].shape)
        else:
            converted.setdefault(name, []).append((pattern, key))
    for name, keys in converted.items():
        converter = converter_of[keys[0][0]]
        conversion = _Conversion(converter, name, tuple(keys), model, prefix)
        for target in converter.target_patterns:
            sources[prefix + name.replace(converter.target_patterns[0], target)] = conversion
    return sources, unexpected


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


@functools.cache
def _library(part: str) -> Any:
    """Import a module of transformers. The modules used here exist since version 5."""
    try:
        return importlib.import_module(f"transformers.{part}")
    except ImportError as error:
        raise ImportError(
            f"mfsdp_compile.integrations.huggingface_init needs transformers 5 ({error}): pip install "
            "'mfsdp-compile[models]'"
        ) from error
