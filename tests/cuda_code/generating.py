"""Models on a GPU that does not exist, and the code that Inductor generates for them.

Tensors and other ranks are fake. :mod:`generate` records what the code would launch; :mod:`compute` runs it on memory
of the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch.distributed as dist
from cuda_rows import PRECISIONS, Setting, Sizes, models
from torch import Tensor, fx, nn
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from mfsdp_compile import MixedPrecisionPolicy, OptimizerOffloadPolicy, distributed_index, fully_shard_model, sharding
from mfsdp_compile.backend import compile as backend
from mfsdp_compile.backend.straight_line import Code
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.compat import distributed, pieces
from mfsdp_compile.runtime.guests.offload import host
from mfsdp_compile.runtime.plan.meshes import build_topology

_OFFLOADS = {"": None, "parameters": CPUOffloadPolicy, "optimizer": OptimizerOffloadPolicy}


def _build_topology(*args: Any, **kwargs: Any) -> Any:
    """Read ranks from a device mesh, which is a real tensor, although a fake mode is active."""
    with _disable_current_modes():
        return build_topology(*args, **kwargs)


@contextlib.contextmanager
def fake_ranks(count: int, rank: int = 0) -> Iterator[None]:
    """Context in which the other ranks of a group are fake."""
    forget_groups()
    dist.init_process_group("fake", rank=rank, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def forget_groups() -> None:
    """Let groups of the next process group have the names that equal ones of earlier groups have had."""
    distributed._groups_made.clear()


@contextlib.contextmanager
def on_fake_device(name: str, sizes: Sizes, dtype: torch.dtype) -> Iterator[tuple[nn.Module, list[type], list[Any]]]:
    """Context in which a model, its units and its inputs are in fake memory of a GPU."""
    make, units, make_inputs = models(sizes)[name]
    with FakeTensorMode(allow_non_fake_inputs=True), compat.quiet():
        torch.set_default_dtype(dtype)
        try:
            with torch.device("cuda:0"):
                model, inputs = make(), make_inputs()
        finally:
            torch.set_default_dtype(torch.float32)
        yield model, units, inputs


def shard(model: nn.Module, units: list[type], setting: Setting, device: str) -> Any:
    """Shard a model over all ranks, as a setting says."""
    ranks = dist.get_world_size()
    sizes = {"outer": 2, "fsdp": ranks // 2} if setting.outer else {"fsdp": ranks}
    with _disable_current_modes():
        mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        both = mesh["outer", "fsdp"]._flatten().get_group() if setting.outer else None
    policy = {
        key: getattr(torch, v, v) if isinstance(v, str) else v for key, v in PRECISIONS[setting.precision].items()
    }
    offload = _OFFLOADS[setting.offloads]
    with (
        mock.patch.object(sharding, "build_topology", _build_topology),
        mock.patch.object(distributed_index, "build_topology", _build_topology),
    ):
        sharded = fully_shard_model(
            model,
            device_mesh=mesh,
            dp_shard_dim="fsdp",
            dp_outer_dim="outer" if setting.outer else None,
            hybrid_fsdp_group=both,
            fsdp_unit_modules=units,
            zero_dp_strategy=setting.strategy,
            mixed_precision_policy=MixedPrecisionPolicy(**policy),
            offload_policy=offload and offload(),
            check_values=False,
            **setting.sharding,
        )
    if setting.offloads == "optimizer" and device == "cuda":
        with mock.patch.object(host, "fetch", _fetch):
            for bucket in sharded.sharded.buckets:
                bucket.source()  # allocates, which the backend must not do where fake modes do not reach
    return sharded


def _fetch(shard: Tensor, device: torch.device) -> Tensor:
    return torch.empty(shard.shape, dtype=shard.dtype, device=device)


def code_of(module: ModuleType) -> str:
    """Return the source of a module that Inductor has generated, without what only benchmarks it."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    return source.split("def benchmark_compiled_module")[0].split("def get_args")[0]


@contextlib.contextmanager
def modules_are_seen(see: Callable[[GraphLowering, ModuleType], None]) -> Iterator[None]:
    """Context in which ``see`` gets each graph that Inductor lowers and its module. Nothing is cached."""
    compiles = GraphLowering.compile_to_module

    def compile_to_module(self: Any) -> Any:
        module = compiles(self)
        see(self, module)
        return module

    with (
        mock.patch.object(GraphLowering, "compile_to_module", compile_to_module),
        mock.patch.dict(pieces._pieces, clear=True),
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False, joint_graph_constant_folding=False),
    ):
        yield


@contextlib.contextmanager
def codes_are_seen(see: Callable[[fx.Graph, Code], None]) -> Iterator[None]:
    """Context in which ``see`` gets each graph that is cut into pieces, and the code that calls them."""
    cuts = backend._run_in_pieces

    def run_in_pieces(*given: Any) -> Code:
        code = cuts(*given)
        see(given[-1].graph, code)
        return code

    with mock.patch.object(backend, "_run_in_pieces", run_in_pieces):
        yield


class _Compiled(BaseException):
    """Ends a call of a compiled model when its code is there."""


def compiled_with(compile_graph: Callable[..., Any], model: nn.Module, inputs: list[Any]) -> None:
    """Let Dynamo trace a model as one graph, and call ``compile_graph`` with it."""

    def compile_and_end(gm: Any, examples: Any) -> Any:
        compile_graph(gm, examples)
        raise _Compiled

    torch._dynamo.reset()
    with contextlib.suppress(_Compiled):
        torch.compile(model, backend=compile_and_end, fullgraph=True)(*inputs)
    torch._dynamo.reset()
