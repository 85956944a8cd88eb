"""Checkpoints in the layout of Megatron's 3D-parallel training, built by hand from the format's description."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import operator
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import full_state_dict, load
from mfsdp_compile.checkpoint.dcp_reader import CheckpointReader
from mfsdp_compile.checkpoint.megatron_states import PREFIX
from mfsdp_compile.runtime import compat

LAYERS, HIDDEN, FFN, VOCAB, EXPERTS = 3, 8, 12, 16, 2


@dataclass(frozen=True)
class Param:
    """A parameter.

    Args:
        shape: Global shape.
        stacked: Number of leading dimensions that count layers and experts.
        tp_dim: Dimension that tensor parallelism cuts, counted after these.
        gated: Whether the parameter joins the two halves of a gated MLP, which are cut separately.
    """

    shape: tuple[int, ...]
    stacked: int
    tp_dim: int | None = None
    gated: bool = False

    def grid(self, tp: int) -> tuple[int, ...]:
        grid = [*self.shape[: self.stacked], *([1] * (len(self.shape) - self.stacked))]
        if self.tp_dim is not None:
            grid[self.stacked + self.tp_dim] = tp * (2 if self.gated else 1)
        return tuple(grid)


def dense_params() -> dict[str, Param]:
    stack = "decoder.layers"
    return {
        "embedding.word_embeddings.weight": Param((VOCAB, HIDDEN), 0, 0),
        f"{stack}.self_attention.linear_qkv.weight": Param((LAYERS, 3 * HIDDEN, HIDDEN), 1, 0),
        f"{stack}.self_attention.linear_qkv.layer_norm_weight": Param((LAYERS, HIDDEN), 1),
        f"{stack}.self_attention.linear_proj.weight": Param((LAYERS, HIDDEN, HIDDEN), 1, 1),
        f"{stack}.mlp.linear_fc1.weight": Param((LAYERS, 2 * FFN, HIDDEN), 1, 0, gated=True),
        f"{stack}.mlp.linear_fc1.bias": Param((LAYERS, 2 * FFN), 1, 0, gated=True),
        f"{stack}.mlp.linear_fc2.weight": Param((LAYERS, HIDDEN, FFN), 1, 1),
        "decoder.final_layernorm.weight": Param((HIDDEN,), 0),
        "output_layer.weight": Param((VOCAB, HIDDEN), 0, 0),
    }


def moe_params() -> dict[str, Param]:
    """All layers have experts, so experts are stacked inside layers. There is one layer of multi-token prediction."""
    experts = "decoder.layers.mlp.experts.experts"
    return {
        "decoder.layers.mlp.router.weight": Param((LAYERS, EXPERTS, HIDDEN), 1),
        f"{experts}.linear_fc1.weight": Param((LAYERS, EXPERTS, 2 * FFN, HIDDEN), 2, 0, gated=True),
        f"{experts}.linear_fc2.weight": Param((LAYERS, EXPERTS, HIDDEN, FFN), 2, 1),
        "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight": Param((HIDDEN, HIDDEN), 0, 1),
    }


class RanksWriter:
    """Writes what ranks would write: one file each, with chunks of tensors spread over the files."""

    def __init__(self, directory: Path, ranks: int) -> None:
        directory.mkdir(parents=True)
        self.directory = directory
        self.files = [(directory / f"__{rank}_0.distcp").open("wb") for rank in range(ranks)]
        self.metadata = Metadata({}, storage_data={})
        self.metadata.mcore_data = {}  # type: ignore[attr-defined]

    def _save(self, rank: int, index: MetadataIndex, value: Any) -> None:
        file = self.files[rank]
        start = file.tell()
        torch.save(value, file)
        info = compat.storage_info(f"__{rank}_0.distcp", start, file.tell() - start, None)
        self.metadata.storage_data[index] = info

    def tensor(
        self,
        key: str,
        shape: Sequence[int],
        chunks: Sequence[tuple[int, Sequence[int], Tensor]],
        noted: dict[str, Any] | None = None,
    ) -> None:
        """Write a tensor. ``chunks`` are (rank, offsets, tensor)."""
        entry = TensorStorageMetadata(TensorProperties(chunks[0][2].dtype), torch.Size(shape), [])
        for rank, offsets, chunk in chunks:
            self._save(rank, MetadataIndex(key, offsets, len(entry.chunks)), chunk.clone())
            entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), chunk.shape))
        self.metadata.state_dict_metadata[key] = entry
        self.metadata.mcore_data[key] = noted or {}  # type: ignore[attr-defined]

    def value(self, rank: int, key: str, value: Any) -> None:
        self._save(rank, MetadataIndex(key), value)
        self.metadata.state_dict_metadata[key] = BytesStorageMetadata()

    def close(self) -> None:
        for file in self.files:
            file.close()
        with (self.directory / ".metadata").open("wb") as file:
            pickle.dump(self.metadata, file)


def blocks(tensor: Tensor, grid: Sequence[int]) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return (place in the grid, block) pairs, cut with plain slices."""
    local = [n // g for n, g in zip(tensor.shape, grid, strict=True)]
    places = itertools.product(*map(range, grid))
    return [(at, tensor[tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, local, strict=True))]) for at in places]


def write_torch_dist(
    directory: Path,
    tp: int = 1,
    params: dict[str, Param] | None = None,
    flattened: bool = True,
    swiglu: bool | None = True,
    groups: int = 2,
    steps: Sequence[int] = (5, 5),
) -> dict[str, Tensor]:
    """Write a checkpoint of ``tp`` times two data-parallel ranks. Returns the full tensors, unflattened, by key."""
    generator = torch.Generator().manual_seed(tp)
    params = params or dense_params()
    writer = RanksWriter(directory, 2 * tp)
    full: dict[str, Tensor] = {}
    for key, param in params.items():
        full[key] = torch.randn(param.shape, generator=generator).bfloat16()
        grid = param.grid(tp)
        pieces = blocks(full[key], grid)
        local = pieces[0][1].shape
        chunks = [
            (i % (2 * tp), [a * n for a, n in zip(at, local, strict=True)], b) for i, (at, b) in enumerate(pieces)
        ]
        writer.tensor(key, param.shape, chunks)
        for state in ("exp_avg", "exp_avg_sq", "fp32_param"):
            name = f"optimizer.state.{state}.{key}"
            full[name] = torch.randn(param.shape, generator=generator)
            if state == "exp_avg_sq":
                full[name].abs_()
            pieces = blocks(full[name], grid)
            if not flattened:
                writer.tensor(
                    name, param.shape, [(0, [a * n for a, n in zip(at, local, strict=True)], b) for at, b in pieces]
                )
                continue
            numel = math.prod(local)
            cut = numel // 3  # the data-parallel ranks' ranges are not even
            parts = []
            for i, (at, block) in enumerate(pieces):
                flat = block.reshape(-1)
                for dp, (start, stop) in enumerate(((0, cut), (cut, numel))):
                    if stop > start:
                        shaped = flat[start:stop].reshape(*(1,) * len(at), -1)
                        parts.append((2 * (i % tp) + dp, [*at, start], shaped))
            writer.tensor(name, (*grid, numel), parts, {"nd_reformulated_orig_global_shape": tuple(param.shape)})
    writer.value(0, "rng_state/shard_0_1", [{"random_rng_state": (3, (1, 2), None)}])
    for rank in range(2):
        writer.value(rank, f"rerun_state_machine_state/shard_{rank}_2", [{"mode": "disabled", "seen": {"count": rank}}])
    writer.value(0, "decoder.layers.self_attention.core_attention._extra_state/shard_0_1", [torch.ones(3)])
    writer.value(0, "dataset/consumed", [7])
    writer.close()
    options = [{"lr": 1e-3, "weight_decay": 0.1 * i, "step": steps[i], "params": []} for i in range(groups)]
    common = {
        "args": argparse.Namespace(num_layers=LAYERS, params_dtype=torch.bfloat16),
        "iteration": 5,
        "checkpoint_version": 3.0,
        "optimizer": {"optimizer": {"param_groups": options}, "param_state_sharding_type": "fully_sharded_model_space"},
        "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": 40},
    }
    if swiglu is not None:
        common["args"].swiglu = swiglu  # type: ignore[attr-defined]
    torch.save(common, directory / "common.pt")
    (directory / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"})
    )
    return full


class Named(nn.Module):
    """Parameters of a checkpoint's model, under its names."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module: nn.Module = self
            for step in path:
                if step not in dict(module.named_children()):
                    module.add_module(step, nn.Module())
                module = module.get_submodule(step)
            module.register_parameter(last, nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)))

    def forward(self, factor: Tensor) -> Tensor:
        params = [operator.attrgetter(name)(self) for name, _ in self.named_parameters()]  # whole, as modules read them
        return sum(((param * factor).float().square().sum() for param in params), torch.zeros(()))


def load_and_step(folder: str, steps: int, **settings: Any) -> dict[str, Any]:
    """Load a converted checkpoint into a sharded model and its AdamW, and compare a step with plain AdamW, bitwise.

    Args:
        folder: The checkpoint, in fsdp_dtensor.
        steps: Steps that the checkpoint has counted.
        settings: Settings that AdamW should get from the checkpoint.

    Returns:
        The loaded weights.
    """
    reader = CheckpointReader(folder)
    names = [key.removeprefix("model.module.") for key in reader if key.startswith("model.module.")]
    model = fully_shard_model(Named({name: reader.shape(f"model.module.{name}") for name in names}))
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    load(folder, model, optimizer)
    loaded = {name: value.clone() for name, value in full_state_dict(model).items()}
    model(torch.ones((), dtype=torch.bfloat16)).backward()
    sharded = {name: param for name, param in model.module.named_parameters() if param.numel()}
    plain = {}
    for name, param in sharded.items():
        state = {key: reader.tensor(f"optimizer.state.{PREFIX}{name}.{key}") for key in ("exp_avg", "exp_avg_sq")}
        main = next(key for key in ("param", "fp32_param") if f"optimizer.state.{PREFIX}{name}.{key}" in reader)
        plain[name] = nn.Parameter(reader.tensor(f"optimizer.state.{PREFIX}{name}.{main}"))
        plain[name].grad = param.grad.full_tensor()
        alone = torch.optim.AdamW([plain[name]], **{"lr": 0.01, **settings})
        alone.state[plain[name]] = {"step": torch.tensor(float(steps)), **state}
        alone.step()
    optimizer.step()
    stepped = full_state_dict(model, rank=None)
    for name, param in plain.items():
        assert torch.equal(stepped[name], param.detach()), name
        assert not torch.equal(stepped[name], reader.tensor(f"model.module.{name}").float()), name
    return {name: value.numpy() for name, value in loaded.items()}
