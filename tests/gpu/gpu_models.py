"""What the GPU tests train: a Llama, whole or sharded. On fake GPUs it is smaller."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig

FAKE = "MFSDP_FAKE_GPUS" in os.environ
"""Whether the GPUs are fake (``fake/fake_gpu.py``). Code then runs, but there is nothing to measure."""
CONFIG = (
    LlamaConfig(vocabulary=256, width=64, layers=2, heads=4, kv_heads=2, hidden=96)
    if FAKE
    else LlamaConfig(vocabulary=1024, width=512, layers=4, heads=8, kv_heads=4, hidden=1408)
)
MODES = ["eager", "aot_eager"] if FAKE else ["eager", "aot_eager", "inductor"]


def whole(dtype: torch.dtype = torch.float32) -> Llama:
    torch.manual_seed(0)
    return Llama(CONFIG).to("cuda", dtype)


def tokens(step: int = 0, batch: int = 4, length: int = 16 if FAKE else 128) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    windows = torch.randint(0, CONFIG.vocabulary, (batch, length + 1), generator=generator).cuda()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def sharded(
    mode: str,
    dtype: torch.dtype = torch.float32,
    reduced_in: torch.dtype | None = None,
    offload_policy: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Return a sharded model, and what to call in its place in the given mode."""
    precision = MixedPrecisionPolicy(grad_comm_dtype=reduced_in)
    model = fully_shard_model(
        whole(dtype), fsdp_unit_modules=[Block], mixed_precision_policy=precision, offload_policy=offload_policy
    )
    if mode == "eager":
        return model, model
    return model, torch.compile(model, backend="mfsdp", fullgraph=True, options={"inner": mode, **options})


@contextmanager
def same_bits() -> Iterator[None]:
    """Context in which kernels give the same bits twice: attention by plain products, no atomic additions.

    What has no such kernel warns. Code that Inductor compiles there draws the numbers that eager code draws, and takes
    no configuration because it was faster.
    """
    import torch._inductor.config as inductor_config

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings = {"fallback_random": True, "deterministic": True}
    try:
        with sdpa_kernel(SDPBackend.MATH), inductor_config.patch(settings):
            yield
    finally:
        torch.use_deterministic_algorithms(before)


def cublas_workspaces() -> int:
    """Free the workspaces of cuBLAS, which stay allocated, and return how many bytes they had."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


def skip_what_is_measured() -> None:
    """On fake GPUs, end the test here: it ran everything, and what follows are assertions about measurements."""
    if FAKE:
        pytest.skip("FAKE GPU: ran, but nothing was measured")
