"""torchtitan's trainer on CPUs, over its own FSDP2 or over this package: a program for torchrun.

    python -m torch.distributed.run --nproc-per-node=2 torchtitan_job.py \\
        fsdp2|mfsdp folder steps spmd_backend replicas offload

torchtitan looks for accelerators when it is imported, and later for their memory. With gloo, FSDP2's reductions without
division must be requested in a different way. This program replaces these parts. The first rank writes losses and
gradient norms to ``folder/metrics.json``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._utils
from torch import Tensor
from torch.distributed.tensor import distribute_tensor
from torch.utils.data import IterableDataset

torch._utils._get_available_device_type = lambda: "cpu"

import torchtitan.components.metrics as metrics
import torchtitan.distributed.fsdp as their_fsdp
import torchtitan.distributed.utils as their_utils
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import DebugConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from mfsdp_compile.demo.corpus import ByteText, standard_library


class NoMemory:
    """Replaces torchtitan's query of GPU memory."""

    device_name = "cpu"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def sum_gradients(model: torch.nn.Module) -> None:
    """Make FSDP2 sum gradients. Otherwise it multiplies in the collective, which gloo cannot."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


metrics.build_device_memory_monitor = NoMemory
their_fsdp.disable_fsdp_gradient_division = sum_gradients
their_utils.set_pg_timeouts = lambda **_: None
their_init = their_utils.init_distributed
# For offload, torchtitan adds a backend for CPUs, which is the only one here.
their_utils.init_distributed = lambda *args, **given: their_init(*args, **given | {"enable_cpu_backend": False})


class Windows(IterableDataset):
    def __init__(self, seq_len: int, rank: int, ranks: int) -> None:
        self.text = ByteText(standard_library(1 << 20), seq_len)
        self.rank, self.ranks = rank, ranks
        self.taken = 0

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens, targets = self.text.batch(self.taken, self.ranks)
            self.taken += 1
            yield {"input": tokens[self.rank]}, targets[self.rank]

    def state_dict(self) -> dict[str, int]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.taken = state["taken"]


class Loader(ParallelAwareDataloader):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any):
        data = Windows(seq_len, dp_rank, dp_world_size)
        super().__init__(data, dp_rank, dp_world_size, batch_size=local_batch_size)


class Bytes(BaseTokenizer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode()

    def get_vocab_size(self) -> int:
        return 256


def config_of(system: str, folder: Path, steps: int, spmd_backend: str, replicas: int, offload: bool) -> Trainer.Config:
    spec = model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:  # flex attention has no backward on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if system == "mfsdp":
        from mfsdp_compile.integrations.torchtitan import parallelize

        spec = dataclasses.replace(spec, parallelize_fn=parallelize)
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(),
        tokenizer=Bytes.Config(),
        dataloader=Loader.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=1,
            global_batch_size=8,
            seq_len=64,
            steps=steps,
            disable_cuda_graphs=True,
            enable_cpu_offload=offload,
            mixed_precision_param="float32",
        ),
        metrics=metrics.MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(spmd_backend=spmd_backend, data_parallel_replicate_degree=replicas),
        checkpoint=CheckpointManager.Config(enable=True, interval=2, last_save_model_only=False),
        activation_checkpoint=SelectiveAC.Config(),
        compile=CompileConfig(enable=system == "mfsdp", backend="aot_eager", components=["model"]),
        debug=DebugConfig(seed=0, enable_structured_logging=False),
        dump_folder=str(folder),
    )


@torch.no_grad()
def set_weights(model: torch.nn.Module) -> None:
    """Set the same weights for both. FSDP2's random numbers depend on the number of ranks where there is no GPU."""
    for number, param in enumerate(model.parameters()):
        whole = torch.randn(param.shape, generator=torch.Generator().manual_seed(number)) * 0.02 + (param.ndim == 1)
        is_ours = type(param.data).__module__.startswith("mfsdp_compile")
        param.copy_(whole if is_ours else distribute_tensor(whole, param.device_mesh, param.placements))


def main() -> None:
    system, folder, steps, spmd_backend, replicas, offload = sys.argv[1:]
    trainer = config_of(system, Path(folder), int(steps), spmd_backend, int(replicas), bool(int(offload))).build()
    set_weights(trainer.model_parts[0])
    logged: list[tuple[float, float]] = []
    log = trainer.metrics_processor.log
    trainer.metrics_processor.log = lambda step, loss, largest, norm, **more: (
        logged.append((loss, norm)),
        log(step, loss, largest, norm, **more),
    )
    trainer.train()
    trainer.close()
    if torch.distributed.get_rank() == 0:
        Path(folder, "metrics.json").write_text(json.dumps(logged))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
