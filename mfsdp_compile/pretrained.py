"""Folders for ``from_pretrained``, written from a sharded model and read into one.

A save writes beside the folder, and renames::

    .saving-NAME     weights and the other files are written here
    .replaced-NAME   an earlier folder of that name, for the moment between two renames
    NAME             the new folder; files of the earlier one that are not weights are moved here
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mfsdp_compile.checkpoint.errors import CheckpointError
from mfsdp_compile.checkpoint.folder import LOCK, locked
from mfsdp_compile.checkpoint.full_state_dict import full_state_dict
from mfsdp_compile.checkpoint.loading import PATIENCE
from mfsdp_compile.checkpoint.saving import sync_directory
from mfsdp_compile.checkpoint.weights import ShardedWeights
from mfsdp_compile.convert.huggingface import MAX_SHARD_BYTES
from mfsdp_compile.convert.safetensors_files import INDEX
from mfsdp_compile.integrations.huggingface_init import Pretrained
from mfsdp_compile.integrations.huggingface_save import (
    WRITING,
    can_stream,
    is_of_transformers,
    save_weights,
    write_config,
    write_whole,
)
from mfsdp_compile.runtime.init.meta import read_rows
from mfsdp_compile.runtime.ranks.agreement import agree, errors_for_all
from mfsdp_compile.runtime.untrusted_files import remove

_WEIGHTS = ("model.safetensors", "model-*-of-*.safetensors", INDEX)


class LoadedPretrained(NamedTuple):
    """What :func:`load_pretrained` did not load.

    Attributes:
        missing: Parameters and buffers that the folder does not have. They keep their values.
        unexpected: Tensors of the folder that the model does not have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    processing_class: Any = None,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a folder that transformers' ``from_pretrained`` reads. Collective.

    The first rank writes tensors one at a time, as they are gathered: no rank ever holds the whole model, except for
    models whose stored tensors transformers makes of several of the model's. These are whole in the first rank's CPU
    memory.

    The folder is complete or absent. One that exists is replaced when the new one is complete; its files that are not
    weights stay.

    Args:
        model: A sharded model, of ``fully_shard_model`` or :mod:`mfsdp_compile.fsdp2`, compiled or not; or a module
            inside one. Of a ``PreTrainedModel``, config, generation config and custom code are written too. Of other
            modules only weights are: parameters and buffers that are in ``state_dict()``. Tied parameters are written
            once.
        folder: The folder. The first rank creates it, with its parents.
        processing_class, tokenizer: Objects whose files are written too, with their ``save_pretrained(folder)``.
        dtype: Dtype to write floating-point tensors in. None: the dtypes that parameters had before they were sharded,
            and those of buffers.
        max_shard_bytes: Maximum size of a file, unless a single tensor is larger.

    Returns:
        The folder's absolute path.

    Raises:
        TypeError: If no parameter of ``model`` is sharded, or ``dtype`` is not a floating-point dtype.
        NotImplementedError: If ranks have experts of different names, or a ``PreTrainedModel`` is quantized or has
            adapters.
        RuntimeError, OSError: On every rank, if one could not do its part. An earlier folder is unchanged.
    """
    weights = ShardedWeights.of(model, "save_pretrained")
    module, path = weights.module, Path(os.path.realpath(folder))

    def check() -> list[str]:
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"save_pretrained(dtype) takes a floating-point dtype, got {dtype!r}")
        weights.check("save_pretrained")
        if is_of_transformers(module):
            _check_is_plain(module)
        return [f"save_pretrained in dtype {dtype}"]

    agree(weights.everyone, "save_pretrained", check)
    dtypes = _dtypes(weights, dtype)
    staging = path.with_name(f".saving-{path.name}")
    others = [each for each in (processing_class, tokenizer) if each is not None]
    with contextlib.ExitStack() as until_done:
        with errors_for_all(weights.everyone, "save_pretrained: the folder"):
            if weights.is_first:
                until_done.enter_context(_prepared(path, staging))
        beside = functools.partial(_write_beside, module, staging, dtypes, others)
        try:
            if can_stream(module):
                save_weights(model, staging, dtypes, beside=beside, max_shard_bytes=max_shard_bytes)
            else:
                whole = full_state_dict(model)
                with errors_for_all(weights.everyone, *WRITING):
                    if weights.is_first:
                        state = {name: value.to(dtypes.get(name, value.dtype)) for name, value in whole.items()}
                        write_whole(module, staging, state, max_shard_bytes)
                        beside()
            with errors_for_all(weights.everyone, "save_pretrained: the folder"):
                if weights.is_first:
                    _publish(path, staging)
        except BaseException:
            if weights.is_first:
                with contextlib.suppress(OSError):  # the next save removes what cannot be removed now
                    remove(staging)
            raise
    return path


def _check_is_plain(module: Any) -> None:
    """Raise NotImplementedError unless a ``PreTrainedModel``'s own tensors are what its folder holds."""
    if getattr(module, "_hf_peft_config_loaded", False):
        raise NotImplementedError(
            "save_pretrained: the model has adapters, which transformers saves in another form. Call state = "
            "full_state_dict(model) on all ranks, and model.save_pretrained(folder, state_dict=state) on the first one."
        )
    if getattr(module, "hf_quantizer", None) is not None:
        raise NotImplementedError("save_pretrained: the model is quantized by transformers, which is not supported.")


def _dtypes(weights: ShardedWeights, dtype: torch.dtype | None) -> dict[str, torch.dtype]:
    """Return the dtypes to write in, by name. Tensors that are not in it keep their dtypes."""
    if dtype is None:
        return weights.dtypes()
    state = weights.module.state_dict()
    return {name: dtype for name, value in state.items() if isinstance(value, Tensor) and value.is_floating_point()}


@contextlib.contextmanager
def _prepared(path: Path, staging: Path) -> Iterator[None]:
    """Hold the folder to write to, which is empty. What saves that died have left is put in order."""
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"save_pretrained: {path} is not a folder.")
    for left in (staging, _replaced(path)):
        if left.is_symlink():  # what it leads to is not ours
            remove(left)
    with locked(staging):
        for left in staging.iterdir():
            if left.name != LOCK:
                remove(left)
        _take_over(path, _replaced(path))
        yield


def _replaced(path: Path) -> Path:
    return path.with_name(f".replaced-{path.name}")


def _take_over(path: Path, replaced: Path) -> None:
    """Move the files of a replaced folder that are not weights to the new one, unless it has others of their names."""
    if not replaced.is_dir():
        return
    if not path.exists():
        os.rename(replaced, path)
        return
    for left in replaced.iterdir():
        target = path / left.name
        if not os.path.lexists(target) and not any(fnmatch.fnmatchcase(left.name, pattern) for pattern in _WEIGHTS):
            os.rename(left, target)
    remove(replaced)


def _write_beside(module: nn.Module, folder: Path, dtypes: Mapping[str, torch.dtype], others: Sequence[Any]) -> None:
    """Write everything but the weights."""
    if is_of_transformers(module):
        write_config(module, folder, next((dtype for dtype in dtypes.values() if dtype.is_floating_point), None))
    for each in others:
        each.save_pretrained(folder)


def _publish(path: Path, staging: Path) -> None:
    """Give a complete folder its name."""
    for file in staging.rglob("*"):
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    (staging / LOCK).unlink()
    sync_directory(staging)
    replaced = _replaced(path)
    if path.exists():
        os.rename(path, replaced)
    os.rename(staging, path)
    sync_directory(path.parent)
    _take_over(path, replaced)


def load_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    allow_missing: str | Sequence[str] = (),
    allow_unexpected: str | Sequence[str] = (),
) -> LoadedPretrained:
    """Fill a sharded model from a folder that ``save_pretrained`` wrote, this package's or transformers'. Collective.

    Each rank reads only its rows, and converts them to the dtype of its shards. Names and shapes are compared before
    anything changes; an error on any rank is an error on all. Gradients are dropped; optimizers keep their state.

    Args:
        model: A sharded model of any strategy, of ``fully_shard_model`` or :mod:`mfsdp_compile.fsdp2`, compiled or not;
            or a module inside one. Its parameters may have no values yet. Tensors are matched as transformers does for
            a ``PreTrainedModel``, and by name for other modules. Buffers that no folder holds keep their values; if the
            model comes from the meta device and awaits its values, a ``PreTrainedModel`` initializes them.
        folder: Folder with ``model.safetensors``, or with an index and several files; or one file.
        allow_missing: Patterns (``lm_head.*``) of names that may be missing from the folder, in addition to those that
            the model's class declares.
        allow_unexpected: Patterns of tensors that may be in the folder but not in the model.

    Returns:
        What was not loaded.

    Raises:
        CheckpointError: On this rank, if the folder is damaged, or does not match the model's names or shapes.
        RuntimeError: If another rank failed.
    """
    weights = ShardedWeights.of(model, "load_pretrained")
    source = Pretrained(folder, allow_missing=allow_missing, allow_unexpected=allow_unexpected)
    targets: dict[str, Tensor] = {}
    unexpected: list[str] = []

    def compare() -> list[str]:
        weights.check("load_pretrained")
        found, left_out = source.compare(weights.module, "unchanged")
        sharded = {id(param) for param, _ in weights.handles()}
        if empty := [name for name, tensor in found.items() if tensor.is_meta and id(tensor) not in sharded]:
            raise CheckpointError(
                f"load_pretrained: {empty[0]} is on the meta device and not sharded, so it has no memory to read into. "
                "Shard the model as a whole, or call to_empty() on the modules around its units."
            )
        targets.update(found)
        unexpected.extend(left_out)
        return [f"{name} {tuple(tensor.shape)}, {source.has(name)}" for name, tensor in found.items()]

    agree(weights.everyone, "Loading weights", compare, PATIENCE)
    with errors_for_all(weights.everyone, "Loading weights: values", PATIENCE):
        try:
            _install(weights, source, targets)
        except Exception as error:
            raise CheckpointError(
                f"Loading {folder} failed halfway: load another folder or checkpoint. {type(error).__name__}: {error}"
            ) from error
    for owner in weights.owners:
        owner.zero_gradients()  # they belong to other weights
        owner.grad_sync.microbatches = 0
        owner.refresh()
    read = {id(tensor) for name, tensor in targets.items() if source.has(name)}
    return LoadedPretrained(
        tuple(name for name, tensor in targets.items() if id(tensor) not in read), tuple(sorted(unexpected))
    )


@torch.no_grad()
def _install(weights: ShardedWeights, source: Pretrained, targets: Mapping[str, Tensor]) -> None:
    """Read values in place."""
    if is_of_transformers(weights.module) and any(owner.awaits_values for owner in weights.owners):
        for inner in weights.module.modules():
            if inner._non_persistent_buffers_set:
                source(inner)
    name_of = {id(tensor): name for name, tensor in targets.items() if source.has(name)}  # one name of tied ones
    tensors = {id(tensor): tensor for tensor in targets.values()}
    handles = {id(param): handle for param, handle in weights.handles()}
    for key, name in name_of.items():
        if key in handles:
            read_rows(handles[key], name, source)
        else:
            tensors[key].copy_(source.read(name, tuple(slice(0, size) for size in tensors[key].shape)))
