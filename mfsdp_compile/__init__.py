"""Sharded data-parallel training done by a compiler. See the README, and :func:`fully_shard_model`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

if importlib.util.find_spec("mfsdp_compile.runtime") is None:
    # A checkout that is imported as it lies, without an editable installation: the folders ``passes`` and ``runtime``
    # are beside this one, where pyproject.toml maps them from.
    _checkout = Path(__file__).resolve().parent.parent
    if not (_checkout / "runtime" / "layout.py").is_file():
        raise ImportError(
            f"mfsdp_compile at {Path(__file__).parent} lacks its subpackages mfsdp_compile.passes and "
            "mfsdp_compile.runtime: reinstall it, for instance with pip install --force-reinstall mfsdp-compile"
        )
    __path__.append(str(_checkout))

from .api import fully_shard, fully_shard_model, fully_shard_optimizer
from .explaining import explain
from .megatron import DistributedDataParallelConfig, DistributedOptimizer, FullyShardedDataParallel
from .passes.verify import ScheduleError, verify
from .policy import MixedPrecisionPolicy, ShardingStrategy
from .wrapper import MegatronFSDP

__all__ = [
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "FullyShardedDataParallel",
    "MegatronFSDP",
    "MixedPrecisionPolicy",
    "ScheduleError",
    "ShardingStrategy",
    "__version__",
    "explain",
    "fully_shard",
    "fully_shard_model",
    "fully_shard_optimizer",
    "verify",
]

try:
    __version__ = importlib.metadata.version("mfsdp-compile")
except importlib.metadata.PackageNotFoundError:
    __version__ = "0+checkout"


def _register_backend() -> None:
    """Make ``backend="mfsdp"`` known. An installed package is known by its entry point, without being imported."""
    if any(point.name == "mfsdp" for point in importlib.metadata.entry_points(group="torch_dynamo_backends")):
        return
    import torch._dynamo

    from .backend import mfsdp

    torch._dynamo.register_backend(mfsdp, name="mfsdp")


_register_backend()
