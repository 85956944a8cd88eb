"""Configurations in the style of torchtitan: sections of a TOML file, and ``--section.key value`` on the command line.

Names and defaults are those of torchtitan's sections, for all keys that :mod:`~mfsdp_compile.examples.torchtitan_style`
uses. No key is ignored: a key that is not defined here is an error.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from mfsdp_compile.runtime.nearest import did_you_mean
from mfsdp_compile.runtime.untrusted_files import FileRefused, read_text

MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class JobSection:
    """``dump_folder``: where everything is written."""

    dump_folder: str = "outputs"


@dataclass(frozen=True)
class ModelSection:
    """``flavor``: name of a set of sizes."""

    flavor: str = "debugmodel"


@dataclass(frozen=True)
class Optimizer:
    """``name``: name of a class in ``torch.optim``."""

    name: str = "AdamW"
    lr: float = 8e-4
    weight_decay: float = 0.1


@dataclass(frozen=True)
class LRScheduler:
    """Warmup, a stable part, and decay over ``decay_ratio`` of all steps (None: all steps after warmup)."""

    warmup_steps: int = 200
    decay_ratio: float | None = None
    decay_type: str = "linear"
    min_lr_factor: float = 0.0


@dataclass(frozen=True)
class Training:
    """``global_batch_size``: -1 means one microbatch of ``local_batch_size`` on each data-parallel rank."""

    steps: int = 10000
    seq_len: int = 2048
    local_batch_size: int = 8
    global_batch_size: int = -1
    max_norm: float = 1.0
    mixed_precision_param: str = "bfloat16"
    mixed_precision_reduce: str = "float32"


@dataclass(frozen=True)
class Parallelism:
    """``data_parallel_shard_degree``: -1 means all ranks that the other degrees leave."""

    data_parallel_replicate_degree: int = 1
    data_parallel_shard_degree: int = -1
    tensor_parallel_degree: int = 1
    enable_sequence_parallel: bool = True
    fsdp_reshard_after_forward: str = "default"


@dataclass(frozen=True)
class ActivationCheckpoint:
    """``mode``: ``"none"``; ``"full"``, all layers; ``"selective"``, one of every ``selective_ac_option`` layers."""

    mode: str = "selective"
    selective_ac_option: int = 2


@dataclass(frozen=True)
class Compile:
    """``backend``: the inner compiler."""

    enable: bool = False
    backend: str = "inductor"


@dataclass(frozen=True)
class Checkpoint:
    """``folder``: name inside the job's folder. If it contains checkpoints, training resumes from the last one."""

    enable: bool = False
    folder: str = "checkpoint"
    interval: int = 500
    keep_latest_k: int = 10


@dataclass(frozen=True)
class JobConfig:
    """All sections."""

    job: JobSection = field(default_factory=JobSection)
    model: ModelSection = field(default_factory=ModelSection)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


def load(path: Path, overrides: Mapping[str, str] | None = None) -> JobConfig:
    """Read a TOML file.

    Args:
        overrides: Values by ``"section.key"``, as TOML, or as plain text for keys that take text.

    Raises:
        ValueError: If a section or a key is unknown, or a value has the wrong type.
    """
    try:
        values: dict[str, Any] = tomllib.loads(read_text(path, MOST_BYTES))
    except (FileRefused, tomllib.TOMLDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no configuration: {error}") from None
    for name, text in (overrides or {}).items():
        section, _, key = name.partition(".")
        if not isinstance(values.setdefault(section, {}), dict):
            raise ValueError(f"[{section}] in {path} is {values[section]!r:.80}; it takes keys with values")
        values[section][key] = _value(text)
    sections = get_type_hints(JobConfig)
    for section in values:
        _check_known(section, sections, f"[{section}] in {path}")
    return JobConfig(**{name: _section(sections[name], given, f"[{name}] in {path}") for name, given in values.items()})


def parse(words: Sequence[str], default: Path) -> JobConfig:
    """Read the command line: ``--job.config_file path`` and any ``--section.key value``.

    Raises:
        ValueError: See :func:`load`; also if a word has another form.
    """
    given: dict[str, str] = {}
    for flag, value in zip(words[::2], [*words[1::2], None], strict=False):
        if not flag.startswith("--") or "." not in flag or value is None:
            raise ValueError(f"The command line takes --section.key value, and so on; got {' '.join(words)!r}")
        given[flag.removeprefix("--")] = value
    return load(Path(given.pop("job.config_file", default)), given)


def _section(kind: type[Any], given: Any, where: str) -> Any:
    if not isinstance(given, dict):
        raise ValueError(f"{where} is {given!r:.80}; it takes keys with values")
    types = get_type_hints(kind)
    for key, value in given.items():
        _check_known(key, types, f"{where}: {key}")
        wanted = types[key]
        is_right = isinstance(value, wanted) or (isinstance(value, int) and isinstance(1.0, wanted))
        if not is_right or (isinstance(value, bool) and wanted is not bool):
            raise ValueError(f"{where}: {key} takes {getattr(wanted, '__name__', wanted)}, got {value!r:.80}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{where}: {key} is {value}")
    return kind(**given)


def _check_known(name: str, known: Mapping[str, Any], where: str) -> None:
    if name not in known:
        raise ValueError(f"{where} is not known here.{did_you_mean(name, known)} There are: {', '.join(known)}.")


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
