"""Checkpoints that are nearly right: ``load`` refuses them and changes nothing, or loads them completely.

An attacker can write every byte, and recomputes digests. Inputs are therefore changed in their structure: metadata,
chunks and where they are stored, archives, states of generators, the program's data, the manifest.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import random
import resource
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pool import on_ranks, shared_folder
from tampering import Tampered, archive, bomb, rewritten
from test_fuzz import LEAVES, SECONDS, damaged, mutated, within
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import CheckpointError, Checkpoints, load
from mfsdp_compile.checkpoint.extra_state import get_generators

COUNTS = [pytest.param(100), pytest.param(20_000, marks=pytest.mark.long)]
MOST_BYTES = 256 << 20
"""Memory that all inputs together may add. The checkpoint has 20 KB."""

SIZES = st.sampled_from([0, 1, 2, 3, 5, 6, 30, 2**20, 2**31, 2**40, 2**62])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8, torch.bfloat16, torch.bool])
BOMB = bomb(1 << 22)
VALUES = st.one_of(
    st.sampled_from([float("nan"), float("inf"), 0.0, 1.0, 2.0**40, -1.0]),
    st.sampled_from([0, 1, -1, 2, 3, 4, 623, 624, 625, 2**31, 2**32 - 1, 2**32, 2**62, -(2**63)]),
)


def make() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = fully_shard_model(nn.Linear(3, 2))
    return model, fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


def bits(value: Any) -> Any:
    """Return a copy of nested state that can be compared."""
    if isinstance(value, dict):
        return {key: bits(held) for key, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(held) for held in value]
    if isinstance(value, torch.Tensor):
        local = getattr(value, "to_local", lambda: value)().detach().contiguous()
        return value.dtype, tuple(value.shape), local.view(-1).view(torch.uint8).numpy().tobytes()
    return repr(value)


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    groups = optimizer.param_groups
    return {
        "model": bits(model.state_dict()),
        "state": [bits(optimizer.state[param]) for group in groups for param in group["params"]],
        "groups": [bits({key: value for key, value in group.items() if key != "params"}) for group in groups],
        "generators": bits(get_generators()),
    }


def change(data: st.DataObject, tampered: Tampered) -> None:
    """Change one thing."""
    draw, metadata = data.draw, tampered.metadata
    keys = sorted(metadata.state_dict_metadata)
    tensors = [key for key in keys if not isinstance(metadata.state_dict_metadata[key], BytesStorageMetadata)]
    if not tensors:
        return
    key = draw(st.sampled_from(tensors))
    entry = metadata.state_dict_metadata[key]
    kind = draw(
        st.sampled_from(
            ["chunks", "chunks", "size", "dtype", "entry", "place", "place", "archive", "archive", "paths"]
            + ["generator"] * 3
            + ["extra", "value"]
        )
    )
    if kind == "chunks":
        how = draw(st.sampled_from(["drop", "twice", "move", "resize", "other"]))
        if how == "drop" or not entry.chunks:
            entry.chunks = entry.chunks[1:]
        elif how == "twice":
            entry.chunks.append(entry.chunks[0])
        else:
            old = entry.chunks[0]
            offsets, sizes = list(old.offsets), list(old.sizes)
            for _ in range(draw(st.integers(1, 2))):
                target = offsets if how == "move" else sizes
                if target:
                    target[draw(st.integers(0, len(target) - 1))] = draw(SIZES)
            new = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            entry.chunks = [new, *entry.chunks[1:]] if draw(st.booleans()) else [new, *entry.chunks]
            if draw(st.booleans()):
                for index in tampered.indices(key):
                    metadata.storage_data[MetadataIndex(key, new.offsets, 0)] = metadata.storage_data[index]
    elif kind == "size":
        entry.size = torch.Size(draw(st.lists(SIZES, max_size=3)))
        if draw(st.booleans()):
            entry.chunks = [ChunkStorageMetadata(torch.Size([0] * len(entry.size)), entry.size)]
            for index in tampered.indices(key):
                metadata.storage_data[MetadataIndex(key, entry.chunks[0].offsets, 0)] = metadata.storage_data[index]
    elif kind == "dtype":
        object.__setattr__(entry.properties, "dtype", draw(DTYPES))
    elif kind == "entry":
        other = draw(st.sampled_from(keys))
        how = draw(st.sampled_from(["forget", "exchange", "value", "rename"]))
        if how == "forget":
            tampered.forget(key)
        elif how == "exchange":
            metadata.state_dict_metadata[key] = copy.deepcopy(metadata.state_dict_metadata[other])
        elif how == "value":
            metadata.state_dict_metadata[key] = BytesStorageMetadata()
        else:
            metadata.state_dict_metadata[f"{key}{draw(st.sampled_from(['.x', '0', '']))}"] = entry
    elif kind == "place":
        indices = [*metadata.storage_data]
        index = draw(st.sampled_from(tampered.indices(key) or indices))
        info = metadata.storage_data[index]
        how = draw(st.sampled_from(["offset", "length", "file", "other", "none", "transform"]))
        if how in ("offset", "length"):
            base = draw(st.sampled_from([0, getattr(info, how)]))
            object.__setattr__(info, how, base + draw(st.sampled_from([-1, 0, 1, 64, 2**31, 2**62])))
        elif how == "file":
            object.__setattr__(info, "relative_path", draw(LEAVES))
        elif how == "other":
            metadata.storage_data[index] = metadata.storage_data[draw(st.sampled_from(indices))]
        elif how == "transform":
            object.__setattr__(info, "transform_descriptors", ["zstd"])
        else:
            del metadata.storage_data[index]
    elif kind == "archive" and tampered.indices(key):
        tampered.put(key, drawn_archive(data, tampered, key))
    elif kind == "paths" and metadata.planner_data:
        path = list(metadata.planner_data.get(key, ()))
        if path:
            path[draw(st.integers(0, len(path) - 1))] = draw(LEAVES)
        metadata.planner_data[draw(st.sampled_from(keys))] = tuple(path)
    elif kind == "generator":
        name = draw(st.sampled_from(["torch", "python", "python_gauss", "numpy", "numpy_gauss"]))
        if f"rng.0.{name}" in tensors and tampered.indices(f"rng.0.{name}"):
            tampered.put(f"rng.0.{name}", archive(drawn_state(data, get_generators()[name])))
    elif kind == "extra" and "extra" in tensors and tampered.indices("extra"):
        content = archive(draw(st.sampled_from([{"a": 1}, [torch.ones(3)], "text", {"n": np.int64(3)}])))
        content = draw(st.sampled_from([content, BOMB, rewritten(content, lambda n, part: part, True)]))
        value = torch.frombuffer(bytearray(damaged(data, content) or b" "), dtype=torch.uint8)
        with contextlib.suppress(IndexError):
            tampered.put_tensor("extra", value)
    elif kind == "value":
        values = [key for key in keys if key not in tensors and tampered.indices(key)]
        if values:
            tampered.put(draw(st.sampled_from(values)), archive(draw(st.one_of(LEAVES, st.lists(LEAVES, max_size=3)))))


def drawn_archive(data: st.DataObject, tampered: Tampered, key: str) -> bytes:
    draw = data.draw
    shape = draw(
        st.one_of(st.just(list(tampered.entry(key).size)), st.lists(st.sampled_from([0, 1, 2, 3]), max_size=3))
    )
    if math.prod(shape) > 1 << 20:
        shape = [1]
    tensor: Any = torch.ones(shape, dtype=draw(DTYPES))
    how = draw(st.sampled_from(["tensor", "expanded", "parameter", "list", "compressed", "pickle", "part", "bytes"]))
    if how == "expanded":
        tensor = torch.ones(1).expand(draw(st.sampled_from([2, 2**20, 2**33])))
    elif how == "parameter":
        tensor = nn.Parameter(tensor, requires_grad=False)
    elif how == "list":
        tensor = [tensor]
    content = archive(tensor)
    if how == "compressed":
        return BOMB
    if how == "pickle":  # counts, offsets, shapes and strides
        return rewritten(content, lambda name, part: damaged(data, part) if name.endswith("data.pkl") else part)
    if how == "part":
        return rewritten(content, lambda name, part: part[: len(part) // 2] if "/data/" in name else part)
    return damaged(data, content) if how == "bytes" else content


def drawn_state(data: st.DataObject, good: torch.Tensor) -> torch.Tensor:
    state = good.clone()
    for _ in range(data.draw(st.integers(1, 3))):
        value = data.draw(VALUES)
        flat = state.view(-1)
        if state.dtype == torch.uint8:
            where = data.draw(st.sampled_from([0, 8, 12, 16, 24, 5008, 5016, 5040, 5048]))
            with contextlib.suppress(struct.error, OverflowError):
                content = bytearray(state.numpy().tobytes())
                form = data.draw(st.sampled_from(["<i", "<Q", "<d"]))
                struct.pack_into(form, content, where, value if form == "<d" else int(value if value == value else 0))
                state = torch.frombuffer(content, dtype=torch.uint8).clone()
        else:
            with contextlib.suppress(RuntimeError, OverflowError, ValueError):
                at = data.draw(st.sampled_from([0, 1, -2, -1])) % flat.numel()
                flat[at] = value
    return data.draw(
        st.sampled_from([state, state, state, torch.zeros_like(good), state.view(-1)[:-1], state.double()])
    )


@on_ranks(1, timeout=3600)
@pytest.mark.parametrize("count", COUNTS)
def test_load(count: int) -> None:
    root = shared_folder()
    model, optimizer = make()
    for number in range(2):
        model(torch.randn(4, 3, generator=torch.Generator().manual_seed(number))).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    source = Checkpoints(root / "good").save(1, model, optimizer, extra={"data": 5})
    optimizer.step()
    good_groups = [dict(group) for group in optimizer.param_groups]
    kept_state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(dict(model.state_dict()))
    outcomes = {"loaded": 0, "refused": 0}

    # Shrinking would take hours in the long run.
    @settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
        database=None,
    )
    @given(st.data())
    def run(data: st.DataObject) -> None:
        tampered = Tampered(source, root / "bad")
        for _ in range(data.draw(st.integers(1, 2))):
            with contextlib.suppress(
                TypeError, ValueError, KeyError, IndexError, AttributeError, OSError, RuntimeError
            ):
                change(data, tampered)  # the second one may not fit what the first one has made
        has_manifest = data.draw(st.sampled_from([True, True, True, False]))
        try:
            tampered.seal(has_manifest)
        except Exception:  # pickle cannot write it
            return
        if has_manifest and data.draw(st.integers(0, 5)) == 0:

            def bend(body: dict[str, Any]) -> None:
                changed = mutated(data, body)
                body.clear()
                body.update(changed if isinstance(changed, dict) else {})

            with contextlib.suppress(ValueError):
                tampered.manifest(bend)
        before = state_of(model, optimizer)
        names = data.draw(st.sampled_from(["", "*"]))
        try:
            with within(SECONDS):
                load(
                    tampered.path,
                    model,
                    optimizer,
                    verify=data.draw(st.sampled_from([None, None, False])),
                    allow_missing=names,
                    allow_unexpected=names,
                    allow_reshaped=names,
                    allow_cast=names,
                )
        except CheckpointError as error:
            assert str(tampered.path) in str(error), error
            assert "MemoryError" not in str(error), error
            assert "halfway" not in str(error), error
            assert state_of(model, optimizer) == before
            outcomes["refused"] += 1
        else:
            outcomes["loaded"] += 1
            for _ in range(3):  # generators draw
                torch.randn(2), np.random.standard_normal(), random.gauss(0, 1), np.random.rand(), random.random()
            values = [*model.parameters(), *(v for its in optimizer.state.values() for v in its.values())]
            for value in values:  # memory that nothing was read into is NaN
                if isinstance(value, torch.Tensor):
                    local = getattr(value, "to_local", lambda value=value: value)()
                    assert not local.detach().isnan().any() or key_has_nan(tampered), "uninitialized memory was loaded"
            model.load_state_dict(weights)
            optimizer.load_state_dict(copy.deepcopy(kept_state))
            for group, its in zip(optimizer.param_groups, good_groups, strict=True):
                group.update({key: value for key, value in its.items() if key != "params"})

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    try:
        run()
    finally:
        torch.use_deterministic_algorithms(False)
        gc.collect()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    print(outcomes, f"{grown:,} KiB")
    assert grown << 10 < MOST_BYTES
    assert min(outcomes.values()) > count // 20, outcomes


def key_has_nan(tampered: Tampered) -> bool:
    """Whether a file has NaN. Bytes that were changed may be NaN."""
    return any(
        b"\x00\x00\xc0\x7f" in path.read_bytes() or b"\xff\xff\xff\xff" in path.read_bytes()
        for path in tampered.path.glob("*.distcp")
    )
