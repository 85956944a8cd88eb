"""Every private torch symbol that mfsdp-compile uses.

Supported: torch 2.11 to 2.15. Symbols imported at the top of these modules are checked when the package is imported. If
torch lacks one of them, the import fails and names the symbol, instead of a failure in the middle of a training step.
Modules about the compiler are imported when something is first compiled. Inductor's symbols are imported inside the
functions that use them, because importing it takes seconds that others should not pay for. Each function has a test in
``tests/runtime/compat/test_compat.py``. Nothing in torch is monkeypatched, but :mod:`.gloo` overrides three of its CPU
kernels, two of them at import, :mod:`.autograd` wraps ``torch.autograd.Function.apply``, and :mod:`.aot` changes a list
of operators while a graph is partitioned.
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
    from .aot import *
    from .attention import *
    from .inductor import *
    from .pieces import *
    from .recompilation import *
    from .regions import *

_OF_LIBRARIES = ("bitsandbytes", "torchao", "torchao_nf4", "transformer_engine")
"""Modules about other libraries, which are imported when they are first asked."""
_OF_THE_COMPILER = ("regions", "aot", "recompilation", "inductor", "pieces", "attention")
"""Modules whose names are those of this package, and which are imported when one of these is missing."""


def _lacks(error: Exception) -> ImportError:
    return ImportError(
        f"torch {torch.__version__} lacks a symbol that mfsdp-compile needs ({error}). Supported: torch "
        f"{MIN_TORCH[0]}.{MIN_TORCH[1]} to {MAX_TESTED_TORCH[0]}.{MAX_TESTED_TORCH[1]}"
    )


try:
    from .autograd import *
    from .checkpoint import *
    from .dispatch import *
    from .distributed import *
    from .dynamo import *
    from .frames import *
    from .gloo import *
    from .nccl import *
    from .optim import *
    from .pytree import *
    from .stores import *
    from .tensors import *
except (ImportError, AttributeError) as error:
    raise _lacks(error) from error


def __getattr__(name: str) -> Any:
    if name in _OF_LIBRARIES:
        return importlib.import_module(f".{name}", __name__)
    for module in _OF_THE_COMPILER if not name.startswith("_") else ():
        try:
            found = importlib.import_module(f".{module}", __name__)
        except (ImportError, AttributeError) as error:
            raise _lacks(error) from error
        if name in found.__all__:
            globals()[name] = getattr(found, name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
