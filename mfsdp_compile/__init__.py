"""Sharded data-parallel training done by a compiler. See the README and :func:`fully_shard_model`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import TYPE_CHECKING, Any

from ._package_paths import CHECKOUT, PACKAGE, elsewhere
from ._quick_imports import quick_imports

if elsewhere() is not None:
    # This is a checkout that is imported in place: the package is not installed, or the installed one is an editable
    # installation of another checkout, which would supply its ``passes`` and ``runtime`` to this package. The right
    # ones are next to this folder, where pyproject.toml maps them from.
    if (CHECKOUT / "runtime" / "owner.py").is_file():
        __path__.append(str(CHECKOUT))
    if (_other := elsewhere()) is not None:
        raise ImportError(
            f"mfsdp_compile at {PACKAGE} lacks its subpackages mfsdp_compile.passes and mfsdp_compile.runtime, and "
            f"Python finds them {_other}: reinstall it, for instance with pip install --force-reinstall mfsdp-compile"
        )

if TYPE_CHECKING:
    from .api import fully_shard, fully_shard_model, fully_shard_optimizer
    from .compiled_files import load_compiled, save_compiled
    from .cuda_graphs import capture_step
    from .diagnostics.explain import explain
    from .distributed_index import FSDPDistributedIndex
    from .megatron import DistributedDataParallelConfig, DistributedOptimizer, FullyShardedDataParallel
    from .megatron_fsdp import MegatronFSDP
    from .passes.verifier.verify import ScheduleError, verify
    from .pretrained import load_pretrained, save_pretrained
    from .runtime.determinism import deterministic, seed_step
    from .runtime.geometry.placements import ShardingStrategy
    from .runtime.guests.offload.policy import OptimizerOffloadPolicy
    from .runtime.optim.kinds import declare_optimizer
    from .runtime.plan.communicators import Communication, Communicator
    from .runtime.plan.precision import MixedPrecisionPolicy
    from .sharded_module import ShardedModule
    from .sharding import shard
    from .train_step import TrainStep, compile_step

_PLACES = {
    "api": "fully_shard fully_shard_model fully_shard_optimizer",
    "compiled_files": "load_compiled save_compiled",
    "cuda_graphs": "capture_step",
    "diagnostics.explain": "explain",
    "distributed_index": "FSDPDistributedIndex",
    "megatron": "DistributedDataParallelConfig DistributedOptimizer FullyShardedDataParallel",
    "passes.verifier.verify": "ScheduleError verify",
    "pretrained": "load_pretrained save_pretrained",
    "runtime.determinism": "deterministic seed_step",
    "runtime.geometry.placements": "ShardingStrategy",
    "runtime.optim.kinds": "declare_optimizer",
    "runtime.plan.communicators": "Communication Communicator",
    "runtime.guests.offload.policy": "OptimizerOffloadPolicy",
    "runtime.plan.precision": "MixedPrecisionPolicy",
    "sharded_module": "ShardedModule",
    "sharding": "shard",
    "train_step": "TrainStep compile_step",
    "megatron_fsdp": "MegatronFSDP",
}
"""Modules, and the public names that they define, imported at first use: the command line starts without torch."""

__all__ = [
    "Communication",
    "Communicator",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "FSDPDistributedIndex",
    "FullyShardedDataParallel",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "OptimizerOffloadPolicy",
    "ScheduleError",
    "ShardedModule",
    "ShardingStrategy",
    "TrainStep",
    "__version__",
    "capture_step",
    "compile_step",
    "declare_optimizer",
    "deterministic",
    "explain",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "load_compiled",
    "load_pretrained",
    "save_compiled",
    "save_pretrained",
    "seed_step",
    "shard",
    "verify",
]

try:
    __version__ = importlib.metadata.version("mfsdp-compile")
except importlib.metadata.PackageNotFoundError:
    __version__ = "0+checkout"


def __getattr__(name: str) -> Any:
    with quick_imports():
        place = next((place for place, names in _PLACES.items() if name in names.split()), None)
        if place is None:
            if name.startswith("__") or importlib.util.find_spec(f"{__name__}.{name}") is None:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
            return importlib.import_module(f"{__name__}.{name}")
        value = getattr(importlib.import_module(f"{__name__}.{place}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _register_backend() -> None:
    """Register ``backend="mfsdp"``. An installed package is found through its entry point, without an import."""
    if any(point.name == "mfsdp" for point in importlib.metadata.entry_points(group="torch_dynamo_backends")):
        return
    import torch._dynamo

    from .backend.compile import mfsdp

    torch._dynamo.register_backend(mfsdp, name="mfsdp")


_register_backend()
