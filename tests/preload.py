"""Imports for the server that test processes are forked from: everything slow to import that starts no thread."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"

import torch

torch.set_num_threads(1)

MODULES = (
    "pytest",
    "hypothesis",
    "functorch",
    "torch._dynamo",
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",
    "torch._inductor.codegen.cpp",
    "torch._inductor.codegen.cpp_wrapper_cpu",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "mfsdp_compile",
    "mfsdp_compile.backend.compile",
    "transformers",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "accelerate",
    "peft",
)
for module in MODULES:
    with contextlib.suppress(ImportError):  # not installed
        importlib.import_module(module)

# A million permanent objects. Without this, each collection in each process scans them, which takes a third of a
# second.
gc.collect()
gc.freeze()

_threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
_server = os.getpid()


def check_fork() -> None:
    """Check, in a forked process, that it is not the server and that the server had one thread."""
    if os.getpid() == _server or _threads != 1:
        raise RuntimeError(f"test processes were to be forked from a server with one thread; it had {_threads}")
