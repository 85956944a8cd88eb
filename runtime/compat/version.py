"""The versions of torch that are supported."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["MAX_TESTED_TORCH", "MIN_TORCH", "MODULE_FILE", "TORCH_FOLDER", "TORCH_VERSION"]


MIN_TORCH = (2, 11)
MAX_TESTED_TORCH = (2, 15)


def _version() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", torch.__version__)
    return (int(match[1]), int(match[2])) if match else (0, 0)


TORCH_VERSION = _version()


if TORCH_VERSION < MIN_TORCH:
    raise ImportError(
        f"mfsdp-compile needs torch {MIN_TORCH[0]}.{MIN_TORCH[1]} or newer, found {torch.__version__}. "
        "Install a newer torch, for instance with: pip install --upgrade torch"
    )


if not dist.is_available():
    raise ImportError("mfsdp-compile needs a torch that was built with torch.distributed")


TORCH_FOLDER = str(Path(torch.__file__).parent)
"""Folder of torch's own source."""
MODULE_FILE = inspect.getfile(torch.nn.Module)
"""File with the class ``nn.Module``."""
