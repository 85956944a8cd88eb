"""Every private torch symbol that mfsdp-compile uses.

Supported: torch 2.11 to 2.15. Symbols imported at the top of these modules are checked when the package is imported. If
torch lacks one of them, the import fails and names the symbol, instead of a failure in the middle of a training step.
Symbols of the compiler are imported inside the functions that use them, because importing Inductor takes seconds that
eager users should not pay for. Each function has a test in ``tests/runtime/compat/test_compat.py``. Nothing in torch is
monkeypatched, but :mod:`.gloo` overrides three of its CPU kernels, two of them at import, :mod:`.autograd` wraps
``torch.autograd.Function.apply``, and :mod:`.aot` changes a list of operators while a graph is partitioned.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch

from .version import *

if TYPE_CHECKING:
    from . import bitsandbytes as bitsandbytes
    from . import torchao as torchao
    from . import torchao_nf4 as torchao_nf4
    from . import transformer_engine as transformer_engine

_OF_LIBRARIES = ("bitsandbytes", "torchao", "torchao_nf4", "transformer_engine")
"""Modules about other libraries, which are imported when they are first asked."""

try:
    from .aot import *
    from .attention import *
    from .autograd import *
    from .checkpoint import *
    from .dispatch import *
    from .distributed import *
    from .dynamo import *
    from .frames import *
    from .gloo import *
    from .inductor import *
    from .nccl import *
    from .optim import *
    from .pieces import *
    from .pytree import *
    from .recompilation import *
    from .regions import *
    from .stores import *
    from .tensors import *
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"torch {torch.__version__} lacks a symbol that mfsdp-compile needs ({error}). Supported: torch "
        f"{MIN_TORCH[0]}.{MIN_TORCH[1]} to {MAX_TESTED_TORCH[0]}.{MAX_TESTED_TORCH[1]}"
    ) from error


def __getattr__(name: str) -> Any:
    if name in _OF_LIBRARIES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
