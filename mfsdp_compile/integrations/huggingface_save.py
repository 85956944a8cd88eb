"""Writes weights of sharded Hugging Face models as ``save_pretrained`` does, without the whole model in one place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from mfsdp_compile.checkpoint.host_copies import HostCopies
from mfsdp_compile.convert.huggingface import MAX_SHARD_BYTES
from mfsdp_compile.convert.safetensors_files import INDEX, SINGLE, Layout, split_into_files, write_file, write_index
from mfsdp_compile.runtime.ranks.agreement import errors_for_all
from mfsdp_compile.wrapper import MegatronFSDP

__all__ = ["WRITING", "can_stream", "save_weights"]

WRITING = ("Writing weights", timedelta(hours=2))
"""What ranks wait for while the first rank writes, and the timeout."""


def can_stream(module: nn.Module) -> bool:
    """Return whether the tensors of a model can be written one at a time.

    The tensors that transformers stores may differ from those of the model. They must each be made from a single one,
    as experts are from stacked experts, and not from several.
    """
    state = _meta(module, {})
    together = revert_weight_conversion(module, dict(state))
    return _layouts(together) == _layouts(_converted_apart(module, state))


def save_weights(
    model: MegatronFSDP,
    folder: Path,
    dtypes: Mapping[str, torch.dtype],
    *,
    beside: Callable[[], None] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write ``.safetensors`` files for ``from_pretrained`` to a folder. Collective.

    The first rank writes tensors one at a time, as they are gathered. Memory: one bucket, or two, as
    for :meth:`.MegatronFSDP.full_parameters`.

    Args:
        model: A model whose module is a ``PreTrainedModel`` for which :func:`can_stream` is true.
        folder: Folder to write to.
        dtypes: Dtypes to write parameters in, by their names in ``model.module``. Others keep their dtypes.
        beside: Called on the first rank before weights are written, to write the other files of the folder.
        max_shard_bytes: Maximum size of a file, unless a single tensor is larger.

    Raises:
        RuntimeError, OSError: On every rank, if the first one could not write.
    """
    wholes = model.full_parameters()
    with errors_for_all(model.sharded.everyone, *WRITING):
        try:
            if dist.get_rank(model.sharded.everyone) == 0:
                if beside is not None:
                    beside()
                _write(model, folder, dtypes, max_shard_bytes, wholes)
        finally:
            deque(wholes, maxlen=0)  # every rank must take part in every gather


def _write(
    model: MegatronFSDP,
    folder: Path,
    dtypes: Mapping[str, torch.dtype],
    max_shard_bytes: int,
    wholes: Iterator[tuple[str, Tensor]],
) -> None:
    state = _meta(model.module, dtypes)
    ordered = {name: state[name] for name in (*_gathered_names(model, state).values(), *state)}
    layouts = _layouts(_converted_apart(model.module, ordered))
    files = split_into_files(layouts, max_shard_bytes)
    tensors = _tensors(model, dtypes, wholes)

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
    model: MegatronFSDP, dtypes: Mapping[str, torch.dtype], wholes: Iterator[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield what is written, with its name in the files: parameters as they are gathered, then buffers."""
    module = model.module
    state = _meta(module, dtypes)
    names = _gathered_names(model, state)
    copies: HostCopies[str] = HostCopies()
    for name, whole in wholes:
        if name in names:
            for done, copy in copies.add(names[name], whole.to(dtypes.get(name, whole.dtype))):
                yield from _convert(module, done, copy).items()
        del whole  # frees its bucket before the next one is gathered
    for done, copy in copies.rest():
        yield from _convert(module, done, copy).items()
    parameters = set(names.values())
    values = module.state_dict()
    for name in state:
        if name not in parameters:
            yield from _convert(module, name, values[name].to("cpu")).items()


def _meta(module: nn.Module, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Return the module's state without values, by the names that are saved: each tied parameter once."""
    state = {
        name: torch.empty(value.shape, dtype=dtypes.get(name, value.dtype), device="meta")
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor) and name not in (module._keys_to_ignore_on_save or ())
    }
    kept: dict[str, Tensor] = remove_tied_weights_from_state_dict(state, module)
    return kept


def _gathered_names(model: MegatronFSDP, state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of parameters in the order in which they are gathered, mapped to their names in ``state``."""
    saved_as = {
        id(param): name for name, param in model.module.named_parameters(remove_duplicate=False) if name in state
    }
    gathered = (sites[0].name for bucket in model.sharded.buckets for sites in bucket.sites)
    params = dict(model.module.named_parameters(remove_duplicate=False))
    return {name: saved_as[id(params[name])] for name in gathered if id(params[name]) in saved_as}


def _convert(module: nn.Module, name: str, tensor: Tensor) -> dict[str, Tensor]:
    converted: dict[str, Tensor] = revert_weight_conversion(module, {name: tensor})
    return converted


def _converted_apart(module: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for name, tensor in state.items() for key, value in _convert(module, name, tensor).items()}


def _layouts(tensors: Mapping[str, Any]) -> dict[str, Layout]:
    return {name: Layout(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
