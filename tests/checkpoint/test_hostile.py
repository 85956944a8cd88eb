"""Checkpoints that were changed, with right digests: ``load`` refuses them on all ranks, and has changed nothing."""

from __future__ import annotations

import io
import pickle
import random
import resource
import struct
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parity import raises_everywhere
from pool import on_ranks, shared_folder
from tampering import Tampered, archive, bomb, rewritten
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints, load
from mfsdp_compile.checkpoint import loading as loading_module
from mfsdp_compile.checkpoint.archives import stored_tensor
from mfsdp_compile.checkpoint.dcp_reader import CheckpointReader
from mfsdp_compile.checkpoint.errors import CheckpointError
from mfsdp_compile.checkpoint.extra_state import check_generators, get_generators

WEIGHT = "model.module.0.weight"
MOMENT = "optimizer.state.module.0.weight.exp_avg"
STEP = "optimizer.state.module.0.weight.step"


def make() -> tuple[Any, Any]:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 3))
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    sharded = fully_shard_model(model, fsdp_unit_modules=[nn.Linear])
    return sharded, fully_shard_optimizer(torch.optim.AdamW(sharded.parameters(), lr=0.1))


def step(model: Any, optimizer: Any, number: int) -> None:
    model(torch.randn(4, 16, generator=torch.Generator().manual_seed(number))).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def everything(model: Any, optimizer: Any) -> dict[str, bytes]:
    """Return the bits of weights, buffers, the optimizer's state, and of the state of all generators."""
    state = {f"{name}.{key}": v for name, its in optimizer.state_dict()["state"].items() for key, v in its.items()}
    tensors = {**model.state_dict(), **state, **get_generators()}
    local = {
        key: getattr(value, "to_local", lambda value=value: value)()
        for key, value in tensors.items()
        if isinstance(value, Tensor)
    }
    bits = {
        key: value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for key, value in local.items()
    }
    return {**bits, "groups": repr(optimizer.state_dict()["param_groups"]).encode()}


def cut(tampered: Tampered, key: str) -> None:
    """Drop the last chunk of a tensor."""
    tampered.entry(key).chunks.pop()


def shifted(tampered: Tampered, key: str) -> None:
    """Move the second chunk of a tensor over the first: as many elements as before, rows twice, and rows never."""
    chunks = tampered.entry(key).chunks
    old, info = chunks[1], None
    chunks[1] = ChunkStorageMetadata(torch.Size([old.offsets[0] - 1, *old.offsets[1:]]), old.sizes)
    for index in tampered.indices(key):
        if index.offset == old.offsets:
            info = tampered.metadata.storage_data.pop(index)
            tampered.metadata.storage_data[type(index)(key, chunks[1].offsets, 1)] = info
    assert info is not None


def outside(tampered: Tampered, key: str) -> None:
    """Move the second chunk of a tensor so that a part of it is outside."""
    old = tampered.entry(key).chunks[1]
    chunks = tampered.entry(key).chunks
    chunks[1] = ChunkStorageMetadata(torch.Size([old.offsets[0] + 1, *old.offsets[1:]]), old.sizes)
    for index in tampered.indices(key):
        if index.offset == old.offsets:
            info = tampered.metadata.storage_data.pop(index)
            tampered.metadata.storage_data[type(index)(key, chunks[1].offsets, 1)] = info


def shared(tampered: Tampered, key: str) -> None:
    """Let both chunks of a tensor be the same bytes."""
    first, second = tampered.indices(key)
    tampered.metadata.storage_data[second] = tampered.metadata.storage_data[first]


def of_another_shape(tampered: Tampered, key: str) -> None:
    chunk = tampered.entry(key).chunks[0]
    tampered.put(key, archive(torch.ones(chunk.sizes[0] + 1, *chunk.sizes[1:])))


def of_another_dtype(tampered: Tampered, key: str) -> None:
    tampered.put(key, archive(torch.ones(tampered.entry(key).chunks[0].sizes, dtype=torch.float64)))


def with_less_values(tampered: Tampered, key: str) -> None:
    """Let the pickle of a tensor ask for more values than the archive has."""
    content = archive(tampered.read(key).clone())
    tampered.put(key, rewritten(content, lambda name, part: part[:4] if "/data/" in name else part).ljust(len(content)))


def with_more_values(tampered: Tampered, key: str) -> None:
    """Let the pickle of a tensor ask for fewer values than the archive has. torch.load refuses that."""
    content = archive(tampered.read(key).clone())
    tampered.put(key, rewritten(content, lambda name, part: part * 2 if "/data/" in name else part))


def huge(tampered: Tampered, key: str, count: int = 1 << 45) -> None:
    entry = tampered.entry(key)
    entry.size = torch.Size([count])
    entry.chunks[0] = ChunkStorageMetadata(torch.Size([0]), torch.Size([count]))


def words(tampered: Tampered, key: str, change: Callable[[bytearray], None]) -> None:
    content = bytearray(tampered.read(key).numpy().tobytes())
    change(content)
    tampered.put(key, archive(torch.frombuffer(content, dtype=torch.uint8).clone()))


def seen(where: int, kind: str, value: int) -> Callable[[bytearray], None]:
    return lambda content: struct.pack_into(kind, content, where, value)


ANY_WRITER: dict[str, Callable[[Tampered], Any]] = {
    "a weight lacks a chunk": lambda t: cut(t, WEIGHT),
    "a moment is missing": lambda t: t.forget(MOMENT),
    "a step is missing": lambda t: t.forget(STEP),
    "a moment lacks a chunk": lambda t: cut(t, MOMENT),
    "a buffer lacks a chunk": lambda t: cut(t, "model.module.1.running_mean"),
    "a step lacks a chunk": lambda t: cut(t, STEP),
    "chunks of a weight overlap": lambda t: shifted(t, WEIGHT),
    "chunks of a moment overlap": lambda t: shifted(t, MOMENT),
    "a chunk is outside": lambda t: outside(t, WEIGHT),
    "two chunks are the same bytes": lambda t: shared(t, WEIGHT),
    "a chunk has another shape": lambda t: of_another_shape(t, WEIGHT),
    "a chunk of a moment has another shape": lambda t: of_another_shape(t, MOMENT),
    "a chunk has another dtype": lambda t: of_another_dtype(t, MOMENT),
    "a chunk has less values": lambda t: with_less_values(t, WEIGHT),
    "a chunk has more values": lambda t: with_more_values(t, WEIGHT),
    "a chunk is compressed": lambda t: t.put(WEIGHT, bomb(1 << 20)),
    "a chunk is a list": lambda t: t.put(WEIGHT, archive([1.0] * 30)),
    "a step is huge": lambda t: huge(t, STEP),
    "a weight has no place": lambda t: t.metadata.storage_data.pop(t.indices(WEIGHT)[1]),
}
OURS: dict[str, Callable[[Tampered], Any]] = {
    "extra is huge": lambda t: huge(t, "extra"),
    "extra lacks its chunk": lambda t: cut(t, "extra"),
    "extra is compressed": lambda t: t.put_tensor(
        "extra", torch.frombuffer(bytearray(bomb(1 << 26)), dtype=torch.uint8)
    ),
    "extra is no archive": lambda t: t.put_tensor("extra", torch.arange(9, dtype=torch.uint8)),
    "extra has another dtype": lambda t: t.put_tensor("extra", torch.ones(9)),
    "one rank lacks a generator": lambda t: t.forget("rng.1.python"),
    "one rank lacks its generators": lambda t: [t.forget(f"rng.1.{name}") for name in get_generators()],
    "a generator is huge on one rank": lambda t: huge(t, "rng.1.torch"),
    "a generator lacks its chunk": lambda t: cut(t, "rng.0.numpy"),
    "a generator is short": lambda t: t.put_tensor("rng.1.numpy", torch.arange(600)),
    "numpy's position, after": lambda t: t.change("rng.1.numpy", -2, 10**9),
    "numpy's position, before": lambda t: t.change("rng.1.numpy", -2, -(10**9)),
    "numpy's words": lambda t: t.change("rng.0.numpy", 7, 1 << 32),
    "numpy's flag": lambda t: t.change("rng.0.numpy", -1, 2),
    "python's version": lambda t: t.change("rng.0.python", 0, 2),
    "python's words": lambda t: t.change("rng.0.python", 3, -1),
    "python's position": lambda t: t.change("rng.1.python", -1, 625),
    "python's normal number": lambda t: t.put("rng.0.python_gauss", archive(torch.tensor(float("inf")).double())),
    "torch's words left": lambda t: words(t, "rng.1.torch", seen(8, "<i", 625)),
    "torch's next word": lambda t: words(t, "rng.1.torch", seen(16, "<Q", 624)),
    "torch's seed": lambda t: words(t, "rng.1.torch", seen(12, "<i", 0)),
    "torch's words": lambda t: words(t, "rng.0.torch", seen(24, "<Q", 1 << 40)),
    "torch's normal number": lambda t: words(t, "rng.0.torch", seen(5016, "<Q", 0x7FF << 52)),
    "zeros forever": lambda t: t.put("rng.0.numpy", archive(torch.zeros(626, dtype=torch.int64))),
    "the manifest lists nothing": lambda t: t.manifest(lambda body: body.update(files={})),
    "the manifest lists no values": lambda t: t.manifest(lambda body: body["files"].pop("__1_0.distcp")),
}


@on_ranks(2, timeout=120)
def test_nothing_is_loaded_that_was_not_saved() -> None:
    root = shared_folder()
    model, optimizer = make()
    step(model, optimizer, 0)
    # Rows of both ranks, of a tensor that is cut in its first dimension.
    good = Checkpoints(root / "good").save(1, model, optimizer, extra={"data": 5})
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=root / "plain")
    step(model, optimizer, 1)
    random.seed(5)
    before = everything(model, optimizer)
    cases = [(name, good, True) for name in (*ANY_WRITER, *OURS)] + [
        (name, root / "plain", False) for name in ANY_WRITER
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, (name, source, is_ours) in enumerate(cases):
        if dist.get_rank() == 0:
            tampered = Tampered(source, root / str(number))
            if name.startswith("the manifest"):
                OURS[name](tampered)
            else:
                {**ANY_WRITER, **OURS}[name](tampered)
                if is_ours:
                    tampered.seal()
                else:
                    (tampered.path / ".metadata").write_bytes(pickle.dumps(tampered.metadata))
        dist.barrier()
        try:
            with raises_everywhere(RuntimeError, str(number)):
                load(root / str(number), model, optimizer)
        except AssertionError as error:
            raise AssertionError(f"{name}, {source.name}: {error}") from error
        assert everything(model, optimizer) == before, f"{name}, {source.name}"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    assert dist.get_rank() == 0 or grown < 64 << 10, f"{grown} KiB more"  # the first rank has made the files
    restored = load(good, model, optimizer)
    assert restored.generators
    assert restored.extra == {"data": 5}


@on_ranks(2)
def test_a_part_of_the_optimizers_state_may_start_over() -> None:
    root = shared_folder()
    model, optimizer = make()
    step(model, optimizer, 0)
    path = Checkpoints(root).save(1, model, optimizer)
    if dist.get_rank() == 0:
        tampered = Tampered(path, root / "partly")
        tampered.forget(MOMENT)
        tampered.forget(STEP)
        tampered.seal()
    dist.barrier()
    missing = r"missing \(allow_missing\): optimizer.0.weight.(step|exp_avg), optimizer.0.weight.(step|exp_avg)\n"
    with pytest.raises(RuntimeError, match=missing):
        load(root / "partly", model, optimizer)
    load(root / "partly", model, optimizer, allow_missing="optimizer.0.weight.*")
    state = optimizer.state[model.module[0].weight]
    assert state["step"] == 0
    assert not state["exp_avg"].to_local().any()
    assert state["exp_avg_sq"].full_tensor().any()
    step(model, optimizer, 1)


def test_generators_that_are_checked_draw() -> None:
    """States after any number of draws pass; and whatever passes draws."""
    for count in (0, 1, 100, 623, 624, 625, 2000):
        torch.manual_seed(count)
        np.random.seed(count)
        random.seed(count)
        [(torch.randint(9, ()), np.random.randint(9), random.getrandbits(32)) for _ in range(count)]
        check_generators(get_generators())
    torch.randn(3)
    np.random.randn()
    random.gauss()
    check_generators(get_generators())


@on_ranks(2)
def test_generators_of_another_number_of_ranks_stay() -> None:
    root = shared_folder()
    model, optimizer = make()
    path = Checkpoints(root).save(1, model, optimizer)
    if dist.get_rank() == 0:
        Tampered(path, root / "three").manifest(lambda body: body.update(world_size=3))
    dist.barrier()
    torch.manual_seed(7)
    restored = load(root / "three", model, optimizer)
    assert not restored.generators
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))


@on_ranks(2)
def test_residents_are_gathered_again_after_a_load() -> None:
    root = shared_folder()
    torch.manual_seed(0)
    model: Any = fully_shard_model(nn.Linear(5, 4), zero_dp_strategy="optim")
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    path = Checkpoints(root).save(1, model, optimizer)
    batch = torch.ones(2, 5)
    expected = model(batch).detach().clone()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.start_param_sync(force_sync=True)
    load(path, model, optimizer)
    assert not any(bucket.is_stale for bucket in model.sharded.buckets)  # their gathers run before the next forward
    assert torch.equal(model(batch), expected)


# -- errors on one rank -----------------------------------------------------------------------------------------------


class Failing(nn.Module):
    """A module that one rank cannot load."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def get_extra_state(self) -> Any:
        return {"n": 1}

    def set_extra_state(self, state: Any) -> None:
        if dist.get_rank() == 1:
            raise OSError("no such table")


@on_ranks(2, timeout=60)
@pytest.mark.parametrize("phase", ["read", "memory", "optimizer", "install", "module"])
def test_an_error_on_one_rank_is_an_error_on_all(phase: str) -> None:
    root = shared_folder()
    torch.manual_seed(0)
    model: Any = fully_shard_model(
        Failing() if phase == "module" else nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)),
        fsdp_unit_modules=[nn.Linear],
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    path = Checkpoints(root).save(1, model, optimizer)
    optimizer.step()
    before = everything(model, optimizer)
    patch = pytest.MonkeyPatch()

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no room") if phase == "memory" else OSError("no such disk")

    places: dict[str, Any] = {
        "read": (CheckpointReader, "check_stored"),
        "memory": (loading_module, "check_generators"),
        "optimizer": (type(optimizer), "load_state_dict"),
        "install": (loading_module.LoadPlan, "load_rest"),
    }
    if dist.get_rank() == 1 and phase in places:
        patch.setattr(*places[phase], fails)
    with raises_everywhere(RuntimeError if dist.get_rank() == 0 else Exception, "no "):
        load(path, model, optimizer)
    patch.undo()
    if phase in ("read", "memory", "optimizer"):
        assert everything(model, optimizer) == before
    if phase != "module":
        load(path, model, optimizer)


@pytest.mark.parametrize("what", ["save", "load"])
@on_ranks(2, timeout=60)
def test_one_ranks_error_of_the_save_before_is_an_error_on_all(what: str) -> None:
    root = shared_folder()
    model, optimizer = make()
    checkpoints = Checkpoints(root)
    checkpoints.save(1, model, optimizer)
    if dist.get_rank() == 1:
        checkpoints._under_way = Future()
        checkpoints._under_way.set_exception(OSError("no such disk"))
    begin = (
        (lambda: checkpoints.save(2, model, optimizer))
        if what == "save"
        else lambda: checkpoints.load(model, optimizer)
    )
    with raises_everywhere(RuntimeError if dist.get_rank() == 0 else OSError, "no such disk"):
        begin()
    begin()


def test_torch_can_read_what_was_found_readable() -> None:
    """Values are read straight into parameters, so nothing about the archive may be wrong that torch would see then."""
    buffer = io.BytesIO()
    torch.save(torch.randn(2, 3), buffer)
    whole, generator, seen = buffer.getvalue(), random.Random(0), Counter[bool]()
    flips = [(place, bytes([whole[place] ^ bit])) for place in range(len(whole)) for bit in (1, 0x10, 0x80)]
    flips += [(generator.randrange(len(whole)), generator.randbytes(generator.randrange(1, 40))) for _ in range(500)]
    for place, put in flips:
        changed = whole[:place] + put + whole[place + len(put) :]
        try:
            found = stored_tensor(io.BytesIO(changed), "a file")
        except CheckpointError:
            continue
        seen[found is not None] += 1
        if found is not None:
            tensor = torch.load(io.BytesIO(changed), weights_only=True)
            assert (tensor.dtype, tensor.shape) == (found.dtype, found.shape)
    assert min(seen.values()) > 100
