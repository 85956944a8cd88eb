"""Memory, time and gradients of a step with the logits and the loss in chunks (``options={"loss_chunks": n}``).

    python benchmarks/loss_chunks.py
    python benchmarks/loss_chunks.py --vocabulary 131072 --chunks 0 16

Peak: the most bytes allocated during a step beyond what is held before it, as torch's profiler counts them,
of one rank. Steps are medians, in turns. Error: that of the head's gradient, as a part of its norm, against the float32
gradient of the same rounded weights without chunks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from mfsdp_compile import fully_shard_model
from mfsdp_compile.diagnostics.measure import allocated
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig
from mfsdp_compile.runtime import compat

MIB = 1 << 20


def stepping(config: LlamaConfig, dtype: torch.dtype, chunks: int, data: Tensor) -> Callable[[], Tensor]:
    """Return a step that returns the head's gradient."""
    torch.manual_seed(0)
    model = fully_shard_model(Llama(config).bfloat16().to(dtype), fsdp_unit_modules=[Block])
    call = torch.compile(model, backend="mfsdp", options={"loss_chunks": chunks or None})

    def step() -> Tensor:
        call(data[:, :-1], data[:, 1:]).backward()
        gradient = model.module.head.weight.grad.to_local().float()
        model.zero_grad()
        return gradient

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 2, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    config = LlamaConfig(vocabulary=given.vocabulary, layers=given.layers)
    data = torch.randint(0, given.vocabulary, (given.tokens // 256, 257), generator=torch.Generator().manual_seed(0))
    with compat.fake_process_group(1):
        exact = stepping(config, torch.float32, 0, data)()
        for dtype in (torch.float32, torch.bfloat16):
            steps = {chunks: stepping(config, dtype, chunks, data) for chunks in given.chunks}
            seconds: dict[int, list[float]] = {chunks: [] for chunks in steps}
            for step in steps.values():
                step()
            for _ in range(given.rounds):
                for chunks, step in steps.items():
                    begun = time.perf_counter()
                    step()
                    seconds[chunks].append(time.perf_counter() - begun)
            for chunks, step in steps.items():
                error = (step() - exact).norm() / exact.norm()
                peak, duration = allocated(step)[0] / MIB, statistics.median(seconds[chunks])
                print(f"{dtype}, {chunks:3} chunks: {peak:8.1f} MiB, {duration * 1e3:6.0f} ms, error {error:.1e}")


if __name__ == "__main__":
    main()
