"""Modules that a program compiled with another backend: they are compiled with ours, and that one behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from mfsdp_compile.backend.options import INNER_COMPILERS
from mfsdp_compile.runtime import compat


def compiled_modules(root: nn.Module, wrappers: Sequence[nn.Module]) -> dict[nn.Module, compat.CompileSettings]:
    """Return what :func:`settings_of` does for modules inside, and for what ``torch.compile`` has made of others."""
    named = [*root.named_modules(), *(("", wrapper) for wrapper in wrappers)]
    return {module: settings for name, module in named if (settings := settings_of(module, name)) is not None}


def settings_of(module: nn.Module, name: str) -> compat.CompileSettings | None:
    """Return how a module was compiled, if it was compiled with another backend than ours.

    Raises:
        ValueError: The backend cannot be the compiler behind ours.
    """
    settings = compat.module_settings(module)
    if settings is None or settings.backend == "mfsdp":
        return None
    if settings.backend not in INNER_COMPILERS:
        raise ValueError(
            f"Module {name!r} was compiled with backend={settings.backend!r}, which does not know how to gather "
            f"parameters. Compile it with backend='mfsdp', or one of {INNER_COMPILERS}, which is then the compiler "
            "behind it."
        )
    return settings


def compile_again(module: nn.Module, settings: compat.CompileSettings) -> None:
    options: dict[str, Any] = {"inner": settings.backend}
    if settings.inductor:
        options["inductor"] = settings.inductor
    compat.compile_module(module, "mfsdp", settings, options)
