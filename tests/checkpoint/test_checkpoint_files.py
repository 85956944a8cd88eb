"""Checkpoint folders: torch reads what is written, files of many ranks are read, and nothing in them runs code."""

from __future__ import annotations

import argparse
import enum
import io
import itertools
import os
import pickle
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from megatron_files import RanksWriter
from torch import Tensor

from mfsdp_compile.checkpoint.archives import Foreign, dump_object, load_object
from mfsdp_compile.checkpoint.dcp_metadata import load_metadata
from mfsdp_compile.checkpoint.dcp_reader import CheckpointReader, SafeLoadPlanner, SafeReader
from mfsdp_compile.checkpoint.dcp_writer import CheckpointWriter, new_output
from mfsdp_compile.checkpoint.errors import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

TENSORS = {
    "matrix": torch.arange(12.0).reshape(3, 4),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "view": torch.arange(100.0)[43:47],
    "scalar": torch.tensor(3, dtype=torch.int64),
    "empty": torch.empty(0, 3),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "eighth": torch.ones(5).to(torch.float8_e4m3fn),
}
VALUES: dict[str, Any] = {"step": 3, "options": {"lr": 0.1, "betas": (0.9, 0.95)}, "nothing": None}


def write(directory: Path, **options: Any) -> Path:
    writer = CheckpointWriter(directory, **options)
    for key, tensor in TENSORS.items():
        writer.add(key, tensor)
    for key, value in VALUES.items():
        writer.add_value(key, value)
    writer.close()
    return directory


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("max_file_bytes", [1, 1 << 30])
def test_torch_loads_what_is_written(tmp_path: Path, max_file_bytes: int) -> None:
    write(tmp_path / "out", max_file_bytes=max_file_bytes)
    files = list((tmp_path / "out").glob("*.distcp"))
    assert len(files) == (len(TENSORS) + len(VALUES) if max_file_bytes == 1 else 1)
    state: dict[str, Any] = {key: torch.full_like(tensor, 9) for key, tensor in TENSORS.items()} | dict.fromkeys(VALUES)
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(bits(state[key]) == bits(tensor) for key, tensor in TENSORS.items())
    assert {key: state[key] for key in VALUES} == VALUES


@pytest.mark.parametrize("safe", [False, True])
def test_torch_loads_nested_dictionaries(tmp_path: Path, safe: bool) -> None:
    saved = {"model": {"w": torch.randn(4)}, "optimizer": {"lr": 0.1, "list": [1, torch.ones(2)]}}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    state = {"model": {"w": torch.zeros(4)}, "optimizer": {"lr": None, "list": [None, torch.zeros(2)]}}
    if safe:
        dcp.load(state, storage_reader=SafeReader(tmp_path), planner=SafeLoadPlanner(), no_dist=True)
    else:
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(state["model"]["w"], saved["model"]["w"])
    assert state["optimizer"]["lr"] == 0.1
    assert state["optimizer"]["list"][0] == 1
    reader = CheckpointReader(tmp_path)
    assert torch.equal(reader.tensor("model.w"), saved["model"]["w"])
    assert reader.value("optimizer.lr") == 0.1


def test_reader_gives_back_what_was_written(tmp_path: Path) -> None:
    reader = CheckpointReader(write(tmp_path / "out"))
    assert reader.keys() == sorted({**TENSORS, **VALUES})
    for key, tensor in TENSORS.items():
        assert reader.is_tensor(key)
        assert reader.shape(key) == tensor.shape
        assert reader.dtype(key) == tensor.dtype
        assert bits(reader.tensor(key)) == bits(tensor)
    assert {key: reader.value(key) for key in VALUES} == VALUES
    with pytest.raises(KeyError, match="no entry 'other'"):
        reader.tensor("other")
    with pytest.raises(CheckpointError, match="step is not a tensor"):
        reader.tensor("step")


@given(st.data())
def test_chunks_of_any_sizes_in_any_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """A tensor cut at random places, with chunks spread over ranks, is read whole and by its first dimensions."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    directory = tmp_path_factory.mktemp("chunks") / "in"
    writer = RanksWriter(directory, 3)
    chunks: list[tuple[tuple[int, ...], Tensor]] = [((), whole)]
    for dim, cut in enumerate(cuts):
        pieces = list(itertools.pairwise(cut))
        chunks = [((*at, a), t.narrow(dim, a, b - a)) for at, t in chunks for a, b in pieces]
    writer.tensor("t", shape, [(data.draw(st.integers(0, 2)), at, chunk.contiguous()) for at, chunk in chunks])
    writer.close()
    reader = CheckpointReader(directory)
    index = [data.draw(st.integers(0, n - 1)) for n in shape[: data.draw(st.integers(0, len(shape)))]]
    assert torch.equal(reader.tensor("t", index), whole[tuple(index)])
    state = {"t": torch.zeros_like(whole)}
    dcp.load(state, storage_reader=SafeReader(directory), planner=SafeLoadPlanner(), no_dist=True)
    assert torch.equal(state["t"], whole)


def test_chunks_that_are_missing_are_noticed(tmp_path: Path) -> None:
    writer = RanksWriter(tmp_path / "in", 1)
    writer.tensor("t", (4, 2), [(0, (0, 0), torch.ones(3, 2))])
    writer.close()
    with pytest.raises(CheckpointError, match=r"chunks of t have 6 elements, its shape \(4, 2\) 8"):
        CheckpointReader(tmp_path / "in").tensor("t")


def test_two_names_of_one_entry(tmp_path: Path) -> None:
    writer = CheckpointWriter(tmp_path)
    writer.add("a", torch.arange(1000.0))
    writer.add_alias("b", "a")
    writer.close()
    assert sum(file.stat().st_size for file in tmp_path.glob("*.distcp")) < 6000
    state = {"a": torch.zeros(1000), "b": torch.zeros(1000)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(state["a"], state["b"])
    assert state["b"][-1] == 999
    reader = CheckpointReader(tmp_path)
    assert reader.stored_as("a") == reader.stored_as("b")


# -- strangers --------------------------------------------------------------------------------------------------------

RAN: list[str] = []


def intrude(where: str) -> None:
    RAN.append(where)


class Malicious:
    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        return intrude, (self.where,)


@pytest.mark.parametrize("where", [".metadata", "planner_data", "value"])
def test_checkpoint_of_a_stranger_runs_nothing(tmp_path: Path, where: str) -> None:
    writer = RanksWriter(tmp_path / "in", 1)
    writer.tensor("t", (2,), [(0, (0,), torch.ones(2))])
    writer.value(0, "v", Malicious(where) if where == "value" else 1)
    if where == "planner_data":
        writer.metadata.planner_data = {"t": Malicious(where)}
    writer.close()
    if where == ".metadata":
        (tmp_path / "in" / ".metadata").write_bytes(pickle.dumps(Malicious(where)))
    if where == "value":
        with pytest.raises(CheckpointError, match=r"__0_0.distcp \(v\) holds objects of .*intrude"):
            CheckpointReader(tmp_path / "in").value("v")
        with pytest.raises(
            dcp.api.CheckpointException, match=r"__0_0.distcp: entry 'v' holds objects of .*intrude"
        ):  # torch wraps it
            dcp.load({"v": 0}, storage_reader=SafeReader(tmp_path / "in"), planner=SafeLoadPlanner(), no_dist=True)
    else:
        with pytest.raises(CheckpointError, match=r"\.metadata asks for the class .*intrude"):
            load_metadata(tmp_path / "in" / ".metadata")
        with pytest.raises(dcp.api.CheckpointException):  # torch 2.11 gives no details
            dcp.load({"v": 0}, storage_reader=SafeReader(tmp_path / "in"), planner=SafeLoadPlanner(), no_dist=True)
    assert not RAN


@pytest.mark.parametrize(
    "call", [(os.system, ("true",)), (eval, ("1",)), (getattr, (argparse.Namespace, "mro")), (exec, ("",))]
)
def test_metadata_admits_no_functions(tmp_path: Path, call: Any) -> None:
    class Calls:
        def __reduce__(self) -> Any:
            return call

    (tmp_path / ".metadata").write_bytes(pickle.dumps(Calls()))
    with pytest.raises(CheckpointError, match="asks for the class"):
        load_metadata(tmp_path / ".metadata")


def test_metadata_cannot_change_classes(tmp_path: Path) -> None:
    """A pickle that sets attributes of the classes that it names does not change classes that anything else uses."""
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    (tmp_path / ".metadata").write_bytes(b"\x80\x02" + name + b"(N}X\x01\x00\x00\x00xK\x01st\x62.")
    with pytest.raises(CheckpointError, match="damaged"):
        load_metadata(tmp_path / ".metadata")
    assert not hasattr(dcp.metadata.Metadata, "x")


@pytest.mark.parametrize("path", ["../outside.distcp", "/etc/passwd", "a/../../b"])
def test_metadata_leads_nowhere_else(tmp_path: Path, path: str) -> None:
    writer = RanksWriter(tmp_path / "in", 1)
    writer.value(0, "v", 1)
    for info in writer.metadata.storage_data.values():
        info.relative_path = path
    writer.close()
    with pytest.raises(CheckpointError, match="is outside the folder"):
        load_metadata(tmp_path / "in" / ".metadata")


def test_plans_in_metadata_are_not_read(tmp_path: Path) -> None:
    """Megatron 0.19 appends what each rank has written."""
    writer = RanksWriter(tmp_path / "in", 1)
    writer.tensor("t", (2,), [(0, (0,), torch.ones(2))])
    entry = writer.metadata.state_dict_metadata["t"]
    plan = dcp.DefaultSavePlanner()
    plan.set_up_planner({"t": torch.ones(2), "v": 1}, is_coordinator=True)
    writer.metadata.all_local_plans = [plan.create_local_plan()]  # type: ignore[attr-defined]
    writer.close()
    reader = CheckpointReader(tmp_path / "in")
    assert reader.tensor("t").tolist() == [1, 1]
    assert reader.metadata.state_dict_metadata["t"].size == entry.size  # type: ignore[union-attr]
    assert not hasattr(reader.metadata, "all_local_plans")


def test_metadata_of_newer_torch_is_read(tmp_path: Path) -> None:
    """Metadata of torch 2.15, which appends strides to a tensor's properties, is read.

    Older versions of torch fail on it.
    """

    class Properties:
        def __reduce__(self) -> Any:
            from torch.distributed.checkpoint.metadata import TensorProperties

            old = TensorProperties(torch.float16).__getstate__()
            return TensorProperties, (), (*old[:5], (1,))

    writer = RanksWriter(tmp_path / "in", 1)
    writer.tensor("t", (2,), [(0, (0,), torch.ones(2, dtype=torch.float16))])
    writer.metadata.state_dict_metadata["t"].properties = Properties()  # type: ignore[union-attr,assignment]
    writer.close()
    assert CheckpointReader(tmp_path / "in").tensor("t").tolist() == [1, 1]


@pytest.fixture
def megatron_module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Create a class of Megatron's, as it exists where a checkpoint is written."""
    module = types.ModuleType("megatron.core.enums")

    class Backend(enum.Enum):
        auto = 5

    class Config:
        pass

    for cls in (Backend, Config):
        cls.__module__, cls.__qualname__ = module.__name__, cls.__name__
        setattr(module, cls.__name__, cls)
    packages = {name: types.ModuleType(name) for name in ("megatron", "megatron.core")} | {module.__name__: module}
    for name, package in packages.items():
        monkeypatch.setitem(sys.modules, name, package)
    return module


def test_classes_of_megatron_pass_through(megatron_module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = megatron_module.Config()
    config.layers = 3
    args = argparse.Namespace(
        backend=megatron_module.Backend.auto, config=config, dtype=torch.bfloat16, path=Path("/a")
    )
    written = dump_object({"args": args})
    monkeypatch.delitem(sys.modules, "megatron.core.enums")
    loaded = load_object(io.BytesIO(written), "common.pt")["args"]
    assert isinstance(loaded.backend, Foreign)
    assert repr(loaded.backend) == "megatron.core.enums.Backend(5)"
    assert (loaded.dtype, loaded.path) == (torch.bfloat16, Path("/a"))
    again = dump_object({"args": loaded})
    assert load_object(io.BytesIO(again), "common.pt")["args"] == loaded
    monkeypatch.setitem(sys.modules, "megatron.core.enums", megatron_module)
    real = torch.load(io.BytesIO(again), weights_only=False)["args"]
    assert real.backend is megatron_module.Backend.auto
    assert real.config.layers == 3


# -- damage -----------------------------------------------------------------------------------------------------------


def test_cut_files_are_named(tmp_path: Path) -> None:
    for name in (".metadata", "__0_0.distcp"):
        size = (write(tmp_path / f"of{name}") / name).stat().st_size
        for keep in (0, 1, size // 2, size - 1):
            directory = write(tmp_path / f"{name[-5:]}-{keep}")
            os.truncate(directory / name, keep)
            with pytest.raises(CheckpointError, match=name):
                read_all(directory)


def read_all(directory: Path) -> None:
    reader = CheckpointReader(directory)
    for key in reader:
        reader.tensor(key) if reader.is_tensor(key) else reader.value(key)


def test_missing_files_are_named(tmp_path: Path) -> None:
    directory = write(tmp_path / "out")
    (directory / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__0_0.distcp is missing"):
        read_all(directory)
    (directory / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"has no \.metadata"):
        read_all(directory)


def test_a_changed_byte_of_data_is_noticed(tmp_path: Path) -> None:
    """A changed byte is detected by torch's checksums, which torch writes but does not check when it loads."""
    directory = write(tmp_path / "out")
    file = directory / "__0_0.distcp"
    content = file.read_bytes()
    for key in ("matrix", "view", "transposed"):
        at = content.index(bits(TENSORS[key])) + 5
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(CheckpointError, match=rf"__0_0.distcp \({key}\) is damaged .*checksum"):
            read_all(directory)


@given(st.data())
def test_a_changed_byte_anywhere_is_an_error_with_a_name_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = write(tmp_path_factory.mktemp("flip") / "out")
    file = directory / data.draw(st.sampled_from([".metadata", "__0_0.distcp"]))
    content = bytearray(file.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(content)
    try:
        reader = CheckpointReader(directory)
        read = {key: reader.tensor(key) if reader.is_tensor(key) else reader.value(key) for key in reader}
    except CheckpointError as error:
        assert str(directory) in str(error)
        return
    if file.name != ".metadata":  # bytes that checksums do not cover do not change what is read
        assert all(bits(read[key]) == bits(tensor) for key, tensor in TENSORS.items())
        assert {key: read[key] for key in VALUES} == VALUES


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        directory = write(tmp_path / "out")
    finally:
        torch.serialization.set_crc32_options(True)
    with (directory / "__0_0.distcp").open("rb") as file:
        assert zipfile.is_zipfile(file)
    read_all(directory)


# -- publishing -------------------------------------------------------------------------------------------------------


def test_nothing_is_left_of_what_fails(tmp_path: Path) -> None:
    def fail() -> None:
        with new_output(tmp_path / "out") as partial:
            write(partial)
            assert partial.parent.stat().st_mode & 0o777 == 0o700
            assert not (tmp_path / "out").exists()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list(tmp_path.iterdir())


def test_checkpoints_are_overwritten_only_when_asked(tmp_path: Path) -> None:
    write(tmp_path / "out")
    with pytest.raises(CheckpointError, match="--overwrite"), new_output(tmp_path / "out"):
        pass
    with pytest.raises(ZeroDivisionError), new_output(tmp_path / "out", overwrite=True):
        raise ZeroDivisionError
    read_all(tmp_path / "out")
    with new_output(tmp_path / "out", overwrite=True) as partial:
        CheckpointWriter(partial).close()
    assert CheckpointReader(tmp_path / "out").keys() == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_other_directories_are_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="not a checkpoint"), new_output(tmp_path / "home", overwrite=True):
        pass
    assert (tmp_path / "home" / "letter.txt").read_text() == "dear"
