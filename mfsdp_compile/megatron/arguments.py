"""The flags of Megatron-LM's command line that concern sharded data parallelism."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from .settings import Setting, known, setting_of
from .validation import SECTIONS, ConfigContainer


def add_megatron_fsdp_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add a group of flags to a parser. Flags that the parser already has are left unchanged.

    Returns:
        The parser.
    """
    group = parser.add_argument_group("Megatron FSDP")
    flags: dict[str, tuple[Setting, str]] = {}
    for section in SECTIONS.values():
        for each in known(section).values():
            if (setting := setting_of(each)).flag is not None:
                flags.setdefault(setting.flag, (setting, f"{each.name}: {setting.meaning}"))
    for flag, (setting, meaning) in flags.items():
        how: dict[str, Any] = {"dest": setting.dest, "default": None, "help": meaning.replace("%", "%%")}
        if setting.type is None:
            how["action"] = "store_const"
            how["const"] = not flag.startswith("--no-")
        else:
            how.update(type=setting.type, choices=setting.choices, nargs=setting.nargs)
        with contextlib.suppress(argparse.ArgumentError):
            group.add_argument(flag, **how)
    return parser


def config_from_arguments(arguments: argparse.Namespace) -> ConfigContainer:
    """Return the settings of a command line, checked and adjusted by :func:`~.validation.validate`.

    Args:
        arguments: Parsed with :func:`add_megatron_fsdp_arguments`, or by Megatron-LM. Settings whose attributes are
            missing or None keep their defaults.

    Raises:
        ValueError, NotImplementedError: See :func:`~.validation.validate`.
    """
    sections = {}
    for section, cls in SECTIONS.items():
        values: dict[str, Any] = {}
        for name, each in known(cls).items():
            setting = setting_of(each)
            value = getattr(arguments, name if setting.flag is None else setting.dest, None)
            if value is None:
                value = setting.absent
            elif setting.opposite:
                value = not value
            if value is not None:
                values[name] = value
        sections[section] = cls(**values)
    ddp = sections["ddp"]
    if ddp.megatron_fsdp_main_grads_dtype is not None or ddp.megatron_fsdp_grad_comm_dtype is not None:
        ddp.grad_reduce_in_fp32 = False  # not requested explicitly, and these dtypes take precedence
    config = ConfigContainer(**sections)
    config.validate()
    return config
