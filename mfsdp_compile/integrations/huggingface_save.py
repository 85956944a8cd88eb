"""Writes weights of sharded models as ``save_pretrained`` does, without the whole model in one place."""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mfsdp_compile.checkpoint.host_copies import HostCopies
from mfsdp_compile.checkpoint.weights import ShardedWeights, inner_name
from mfsdp_compile.convert.huggingface import MAX_SHARD_BYTES
from mfsdp_compile.convert.safetensors_files import INDEX, SINGLE, Layout, split_into_files, write_file, write_index
from mfsdp_compile.runtime.ranks.agreement import errors_for_all

WRITING = ("Writing weights", timedelta(hours=2))
"""What ranks wait for while the first rank writes, and the timeout."""


def is_of_transformers(module: nn.Module) -> bool:
    """Whether a module is a ``PreTrainedModel`` of transformers."""
    if "transformers" not in sys.modules:  # otherwise there can be none
        return False
    from transformers import PreTrainedModel

    return isinstance(module, PreTrainedModel)


def can_stream(module: nn.Module) -> bool:
    """Whether the tensors of a model can be written one at a time. Those of modules that are not transformers' can.

    The tensors that transformers stores may differ from those of the model. They must each be made from a single one,
    as experts are from stacked experts, and not from several.
    """
    state = _meta(module, {})
    return _layouts(_converted(module, dict(state))) == _layouts(_converted_apart(module, state))


def save_weights(
    model: nn.Module,
    folder: Path,
    dtypes: Mapping[str, torch.dtype],
    *,
    beside: Callable[[], None] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write ``.safetensors`` files for ``from_pretrained`` to a folder. Collective.

    The first rank writes tensors one at a time, as they are gathered. Memory: one bucket, or two, as
    for :meth:`.ShardedModule.full_parameters`.

    Args:
        model: A sharded model for whose module :func:`can_stream` is true.
        folder: Folder to write to.
        dtypes: Dtypes to write tensors in, by their names in the module. Others keep their dtypes.
        beside: Called on the first rank before weights are written, to write the other files of the folder.
        max_shard_bytes: Maximum size of a file, unless a single tensor is larger.

    Raises:
        RuntimeError, OSError: On every rank, if the first one could not write.
    """
    weights = ShardedWeights.of(model, "save_weights")
    weights.check("save_weights")
    wholes = weights.wholes()
    with errors_for_all(weights.everyone, *WRITING):
        try:
            if weights.is_first:
                if beside is not None:
                    beside()
                _write(weights, folder, dtypes, max_shard_bytes, wholes)
        finally:
            deque(wholes, maxlen=0)  # every rank must take part in every gather


def write_whole(module: nn.Module, folder: Path, state: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    """Write ``.safetensors`` files of a state dict that is whole in this process's CPU memory.

    For modules for which :func:`can_stream` is false.
    """
    saved = _meta(module, {})
    stored = _converted(module, {name: state[given] for given in state if (name := inner_name(given)) in saved})
    layouts = _layouts(stored)
    files = split_into_files(layouts, max_shard_bytes)
    for file, names in files.items():
        write_file(folder / file, layouts, names, stored.__getitem__)
    write_index(folder, layouts, files)


def write_config(module: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Write what a ``PreTrainedModel``'s folder has beside weights: config, generation config and custom code.

    Transformers' own method writes on global rank 0 only.

    Args:
        module: The model.
        folder: Folder to write to; exists.
        dtype: Dtype for the config. None: the one that it has.
    """
    config = copy.deepcopy(module.config)
    config.dtype = dtype or config.dtype
    name = type(module).__name__.removeprefix("FSDP")
    config.architectures = [name]
    if module._auto_class is not None:
        from transformers.dynamic_module_utils import custom_object_save

        written = next(cls for cls in type(module).__mro__ if cls.__name__ == name)
        custom_object_save(object.__new__(written), folder, config=config)  # looks at the class only
    config.save_pretrained(folder)
    if module.can_generate():
        module.generation_config.save_pretrained(folder)


def _write(
    weights: ShardedWeights,
    folder: Path,
    dtypes: Mapping[str, torch.dtype],
    max_shard_bytes: int,
    wholes: Iterator[tuple[nn.Parameter, Tensor]],
) -> None:
    state = _meta(weights.module, dtypes)
    ordered = {name: state[name] for name in (*_gathered_names(weights, state).values(), *state)}
    layouts = _layouts(_converted_apart(weights.module, ordered))
    files = split_into_files(layouts, max_shard_bytes)
    tensors = _tensors(weights, state, wholes)

    def read(expected: str) -> Tensor:
        name, tensor = next(tensors)
        assert name == expected, (name, expected)
        return tensor

    folder.mkdir(parents=True, exist_ok=True)
    for stale in (INDEX, SINGLE):
        (folder / stale).unlink(missing_ok=True)
    for file, names in files.items():
        write_file(folder / file, layouts, names, read)
    write_index(folder, layouts, files)


def _tensors(
    weights: ShardedWeights, state: Mapping[str, Tensor], wholes: Iterator[tuple[nn.Parameter, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield what is written, with its name in the files: parameters as they are gathered, then buffers."""
    module = weights.module
    names = _gathered_names(weights, state)
    copies: HostCopies[str] = HostCopies()
    for param, whole in wholes:
        if (name := names.get(id(param))) is not None:
            for done, copy in copies.add(name, whole.to(state[name].dtype)):
                yield from _converted(module, {done: copy}).items()
        del whole  # frees its bucket before the next one is gathered
    for done, copy in copies.rest():
        yield from _converted(module, {done: copy}).items()
    parameters = set(names.values())
    values = {inner_name(name): value for name, value in module.state_dict().items()}
    for name, like in state.items():
        if name not in parameters:
            yield from _converted(module, {name: values[name].to("cpu", like.dtype)}).items()


def _meta(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Return the module's state without values, by the names that are saved: each tied parameter once."""
    held = {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    state = {
        name: torch.empty(value.shape, dtype=dtypes.get(name, value.dtype), device="meta")
        for name, value in held.items()
    }
    if is_of_transformers(module):
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        for name in module._keys_to_ignore_on_save or ():
            state.pop(name, None)
        state = remove_tied_weights_from_state_dict(state, module)
    else:
        first = {id(value): name for name, value in reversed(held.items())}
        state = {name: value for name, value in state.items() if first[id(held[name])] == name}
    return {inner_name(name): value for name, value in state.items()}


def _gathered_names(weights: ShardedWeights, state: Mapping[str, Tensor]) -> dict[int, str]:
    """Return the names in ``state`` of parameters, by ``id``, in the order in which they are gathered."""
    params = weights.module.named_parameters(remove_duplicate=False)
    saved_as = {id(param): inner_name(name) for name, param in params if inner_name(name) in state}
    return {id(param): saved_as[id(param)] for param in weights.parameters() if id(param) in saved_as}


def _converted(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that are stored for some of a module's."""
    if not is_of_transformers(module):
        return state
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(module, state)
    return converted


def _converted_apart(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for name, tensor in state.items() for key, value in _converted(module, {name: tensor}).items()}


def _layouts(tensors: Mapping[str, Any]) -> dict[str, Layout]:
    return {name: Layout(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
