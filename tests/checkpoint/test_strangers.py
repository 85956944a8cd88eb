"""Untrusted files: each known attack is one clear error, at once, and touches nothing outside its folder."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from megatron_files import RanksWriter

from mfsdp_compile.checkpoint.archives import load_object
from mfsdp_compile.checkpoint.dcp_metadata import load_metadata
from mfsdp_compile.checkpoint.dcp_reader import CheckpointReader, SafeLoadPlanner, SafeReader
from mfsdp_compile.checkpoint.dcp_writer import CheckpointWriter, new_output
from mfsdp_compile.checkpoint.errors import CheckpointError
from mfsdp_compile.checkpoint.manifest import BLOCK_BYTES, Manifest, damaged_files, hash_file, read_manifest, seal
from mfsdp_compile.convert import huggingface, inspect_checkpoint
from mfsdp_compile.convert.param_groups import read_map
from mfsdp_compile.convert.safetensors_files import INDEX, SafetensorsReader
from mfsdp_compile.diagnostics import hang
from mfsdp_compile.examples import job_config
from mfsdp_compile.examples.torchtitan_style import optimizer_class
from mfsdp_compile.passes.guests.solver.hardware import hardware
from mfsdp_compile.planning.workloads import _hugging_face
from mfsdp_compile.runtime.digests import value_digest
from mfsdp_compile.runtime.untrusted_files import FileRefused, inside, parse_json, read_json

DEEP = "[" * 100_000 + "]" * 100_000


@contextmanager
def opened_inside(*folders: Path) -> Iterator[None]:
    """Assert that the block opens nothing outside these folders for reading, except for the interpreter's own files."""
    OPENED.clear()
    WATCHING.append(True)
    try:
        yield
    finally:
        WATCHING.clear()
    allowed = [
        *map(str, folders),
        sys.prefix,
        sys.base_prefix,
        "/proc/self",
        "/usr/lib",
        str(Path(__file__).parents[2]),
    ]
    assert not [path for path in OPENED if not path.startswith(tuple(map(os.path.realpath, allowed)))]


OPENED: list[str] = []
WATCHING: list[bool] = []


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if WATCHING and event == "open" and isinstance(arguments[0], str | os.PathLike):
        OPENED.append(os.path.realpath(arguments[0]))


sys.addaudithook(_watch)


def checkpoint(directory: Path) -> Path:
    writer = CheckpointWriter(directory)
    writer.add("t", torch.arange(6.0).view(3, 2))
    writer.add_value("v", {"lr": 0.1})
    writer.close()
    seal(directory)
    return directory


# -- digests ----------------------------------------------------------------------------------------------------------


def test_digests_of_files_know_every_byte_and_every_order(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    content = bytearray(torch.randint(256, (2 * BLOCK_BYTES + 12_345,), generator=generator, dtype=torch.uint8).numpy())
    path = tmp_path / "file"
    path.write_bytes(content)
    record = hash_file(path)
    assert record.bytes == len(content)
    blocks = [hashlib.sha256(content[i : i + BLOCK_BYTES]).digest() for i in range(0, len(content), BLOCK_BYTES)]
    assert record.digest == hashlib.sha256(b"".join(blocks)).hexdigest()

    def exchanged(a: int, b: int, length: int) -> bytes:
        other = bytearray(content)
        other[a : a + length], other[b : b + length] = content[b : b + length], content[a : a + length]
        return bytes(other)

    def changed(at: int) -> bytes:
        other = bytearray(content)
        other[at] ^= 1
        return bytes(other)

    wrong = {
        "rows of 8 KiB": exchanged(0, 8192, 8192),
        "rows far apart": exchanged(8192, 900_000, 8192),
        "blocks": exchanged(0, BLOCK_BYTES, BLOCK_BYTES),
        "second block": changed(BLOCK_BYTES + 5),
        "last byte": changed(len(content) - 1),
        "first byte": changed(0),
    }
    for name, damaged in wrong.items():
        path.write_bytes(damaged)
        assert damaged_files(tmp_path, {"file": record}, ["file"]) == ["file has other contents than were written"], (
            name
        )
    path.write_bytes(content[:-1])
    assert damaged_files(tmp_path, {"file": record}, ["file"]) == [
        f"file has {len(content) - 1:,} bytes instead of {len(content):,}"
    ]
    path.write_bytes(b"")
    assert hash_file(path) == type(record)(0, hashlib.sha256().hexdigest())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_digests_of_values_know_the_order(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 100, (700, 8192), generator=torch.Generator().manual_seed(1)).to(dtype)
    digests = {value_digest(tensor)}
    assert value_digest(tensor.clone()) in digests
    assert value_digest(tensor.t().contiguous().t()) in digests
    for a, b in ((0, 1), (3, 699), (127, 128), (511, 512), (1, 513)):
        rows = list(range(700))
        rows[a], rows[b] = b, a
        digests.add(value_digest(tensor[rows]))
    one, sign = tensor.clone(), torch.zeros(700, 8192, dtype=dtype)
    one[5, 7] += 1
    digests.add(value_digest(one))
    for row in (2, 3):  # words that differ only in their highest bit, which sums with odd weights lose
        words = sign.clone()
        words.view(-1).view(torch.uint8).view(700, -1)[row, 7] = 0x80
        digests.add(value_digest(words))
    digests.add(value_digest(tensor.roll(1, 0)))
    assert len(digests) == 10


# -- names ------------------------------------------------------------------------------------------------------------

NAMES = ["../outside", "/etc/hostname", "a/../../outside", "", ".", "..", "C:\\x", "..\\x", "a\x1b[2J", "x\0", 7, None]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_elsewhere(name: Any, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises(FileRefused):
        inside(tmp_path / "in", name)


def pipes_and_links(folder: Path, name: str) -> Iterator[str]:
    """Replace a file by pipes and links, and yield the expected part of the error for each."""
    path = folder / name

    def cleared() -> None:
        path.unlink(missing_ok=True)

    cleared()
    os.mkfifo(path)
    yield "is not a regular file"
    cleared()
    path.symlink_to("/dev/zero")
    yield "outside of the folder"
    cleared()
    path.symlink_to("/etc/hostname")
    yield "outside of the folder"
    cleared()
    os.mkfifo(folder / "pipe")
    path.symlink_to("pipe")
    yield "is not a regular file"
    (folder / "pipe").unlink()
    cleared()


def test_the_cache_of_the_hub_consists_of_links(tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / "hash").write_text("{}")
    revision = repository / "snapshots" / "main"
    revision.mkdir(parents=True)
    (revision / "config.json").symlink_to("../../blobs/hash")
    assert read_json(inside(revision, "config.json")) == {}
    (tmp_path / "secret").write_text("{}")
    (revision / "other.json").symlink_to("../../../secret")
    with pytest.raises(FileRefused, match=r"outside of the folder.*replace the link"):
        inside(revision, "other.json")
    (repository / "blobs").rename(repository / "moved")
    (repository / "blobs").symlink_to("/etc")
    (revision / "hosts").symlink_to("../../blobs/hostname")
    with pytest.raises(FileRefused, match="outside of the folder"):
        inside(revision, "hosts")


# -- JSON -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", "{", DEEP, '{"a":' * 5000, '{"a": 1, "a": 2}', '{"a": NaN}', "[Infinity]", "[1e999]", "1" * 5000, '["\ud800'],
)
def test_json_that_is_refused(text: str) -> None:
    with pytest.raises(FileRefused):
        parse_json(text)


def test_json_that_is_read() -> None:
    text = json.dumps({"a": ['"', "\\", '\\"[[[[', "[" * 1000, 1.5, -0.0, None], "ü": {}})
    assert parse_json(text) == json.loads(text)


def test_json_without_end(tmp_path: Path) -> None:
    with (tmp_path / "x.json").open("wb") as file:
        file.truncate(16 << 30)
    with pytest.raises(FileRefused, match=r"17,179,869,184 bytes, more than the 67,108,864 allowed"):
        read_json(tmp_path / "x.json")


# -- manifests --------------------------------------------------------------------------------------------------------


def forge(directory: Path, **changes: Any) -> None:
    """Write a manifest whose own hash is valid."""
    body = json.loads((directory / "manifest.json").read_text())
    body.pop("sha256")
    body |= changes
    body = {key: value for key, value in body.items() if value is not ...}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (directory / "manifest.json").write_text(json.dumps({**body, "sha256": digest}))


@pytest.mark.parametrize(
    "changes",
    [
        *({"serial": serial} for serial in ("7", -1, 1.5, True, None, 1 << 70)),
        *({"step": step} for step in ("7", -1, [])),
        *({"files": files} for files in ({"a": 1}, {"a": {"bytes": -1, "digest": ""}}, [], {"a": {"bytes": 1}})),
        *({"files": {name: {"bytes": 1, "digest": "0"}}} for name in NAMES if isinstance(name, str)),
        {"created": "\x1b[31m"},
        {"run": 3},
        {"run": ...},
        {"continues": "abc"},
        {"versions": {"torch": 2}},
        {"other": 1},
        {"world_size": 0},
    ],
)
def test_manifests_that_make_no_sense(changes: dict[str, Any], tmp_path: Path) -> None:
    forge(checkpoint(tmp_path), **changes)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged \("):
        read_manifest(tmp_path)


def test_a_manifest_that_was_changed(tmp_path: Path) -> None:
    body = json.loads((checkpoint(tmp_path) / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**body, "serial": 8}))
    with pytest.raises(CheckpointError, match="its hash differs"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(("version", "which"), [(1, "an earlier"), (3, "a later")])
def test_manifests_of_other_formats(version: int, which: str, tmp_path: Path) -> None:
    forge(checkpoint(tmp_path), format=version)
    with pytest.raises(CheckpointError, match=f"has format {version}, and this .* reads format 2. .* {which} version"):
        read_manifest(tmp_path)


def test_files_of_a_manifest_that_are_none(tmp_path: Path) -> None:
    manifest = read_manifest(checkpoint(tmp_path))
    assert isinstance(manifest, Manifest)
    assert not damaged_files(tmp_path, manifest.files, sorted(manifest.files))
    with opened_inside(tmp_path):
        for message in pipes_and_links(tmp_path, "__0_0.distcp"):
            (line,) = damaged_files(tmp_path, manifest.files, ["__0_0.distcp"])
            assert message in line
        for message in pipes_and_links(tmp_path, "manifest.json"):
            with pytest.raises(CheckpointError, match=f"damaged .*{message}"):
                read_manifest(tmp_path)


# -- .metadata --------------------------------------------------------------------------------------------------------


def pickled(*operations: bytes) -> bytes:
    return b"\x80\x02" + b"".join(operations) + b"."


def text(value: str) -> bytes:
    return pickle.BINUNICODE + len(value.encode()).to_bytes(4, "little") + value.encode()


PATH = b"cpathlib\nPosixPath\n"
PURE = b"cpathlib\nPurePosixPath\n"
RECORD = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
HOSTILE = {
    "state of a class": pickled(PATH, b"N}", text("__truediv__"), b"cbuiltins\nlist\n", b"s\x86b"),
    "state of a class of its own": pickled(RECORD, b"N}", text("x"), b"K\x01s\x86b"),
    "state of a path": pickled(PURE, b")R", b"N}", text("is_absolute"), b"cbuiltins\ntuple\n", b"s\x86b"),
    "state of a builtin": pickled(b"cbuiltins\nlist\n", b"N}", text("append"), b"K\x01s\x86b"),
    "state of a dtype": pickled(b"ctorch\nfloat32\n", b"}", text("x"), b"K\x01sb"),
    "call of a dtype": pickled(b"ctorch\nfloat32\n", b")R"),
    "call of a string": pickled(text("x"), b")R"),
    "high memo": pickled(b"Kr", b"r\xff\xff\xff\xff"),
    "higher memo": pickled(b"K\x01", b"p99999999999999999999\n"),
    "deep key": pickled(b"}", b")" + b"\x85" * 1_000_000, b"K\x01s"),
    "deep element": pickled(b"cbuiltins\nset\n](" + b")" + b"\x85" * 1_000_000 + b"e\x85R"),
    "deep state": pickled(RECORD, b")\x81", b"(" * 100_000 + b"l" * 100_000, b"b"),
    "great bytes": pickled(b"\x8e" + (1 << 50).to_bytes(8, "little")),
    "great bytearray": pickled(b"\x96" + (1 << 36).to_bytes(8, "little")),
    "great frame": pickled(b"\x95" + (1 << 60).to_bytes(8, "little")),
    "great number": pickled(b"L" + b"9" * 100_000 + b"L\n"),
    "instance": pickled(b"(ios\nsystem\n"),
    "persistent": pickled(b"Px\n"),
    "extension": pickled(b"\x82\x01"),
    "not closed": b"\x80\x04" + b"(" * 1_000_000,
    "empty": b"",
    "stack": pickled(b"0000"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles(name: str, tmp_path: Path) -> None:
    before = dict(vars(Path)), dict(vars(type(Path()))), dict(vars(list))
    (tmp_path / ".metadata").write_bytes(HOSTILE[name])
    with opened_inside(tmp_path), pytest.raises(CheckpointError, match=r"\.metadata"):
        load_metadata(tmp_path / ".metadata")
    assert before == (dict(vars(Path)), dict(vars(type(Path()))), dict(vars(list)))
    assert Path("a") / "b" == Path("a/b")


def changed_metadata(directory: Path, change: Callable[[Any], None]) -> Path:
    writer = RanksWriter(directory, 1)
    writer.tensor("t", (3, 2), [(0, (0, 0), torch.ones(3, 2))])
    writer.value(0, "v", 1)
    change(writer.metadata)
    writer.close()
    return directory


def _storage(name: str, value: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            setattr(info, name, value)

    return change


def _chunk(sizes: tuple[int, ...], shape: tuple[int, ...]) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        entry = metadata.state_dict_metadata["t"]
        entry.size, entry.chunks[0].sizes = torch.Size(shape), torch.Size(sizes)

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata: setattr(metadata, "planner_data", {"t": ("a", 1 << 33), "v": ("b",)}),
        lambda metadata: setattr(metadata, "planner_data", {"t": ("a", -1), "v": ("b",)}),
        lambda metadata: metadata.state_dict_metadata.update({"a\x1b[2J": metadata.state_dict_metadata["v"]}),
        lambda metadata: metadata.state_dict_metadata.update({"x" * 100_000: metadata.state_dict_metadata["v"]}),
        lambda metadata: metadata.mcore_data.update({"t": {"a": {1}}}),
        _storage("offset", -1),
        _storage("offset", 1 << 62),
        _storage("length", 1 << 80),
        _storage("relative_path", "__0_0.distcp\0"),
        _chunk((1 << 40,), (1 << 40,)),
        _chunk((1 << 40, 1), (1 << 40, 1)),
        _chunk((1 << 40, 2, 1), (1 << 40, 2)),
    ],
)
def test_metadata_that_makes_no_sense(change: Callable[[Any], None], tmp_path: Path) -> None:
    directory = changed_metadata(tmp_path / "in", change)
    with opened_inside(tmp_path), pytest.raises(CheckpointError, match=r"in/"):
        CheckpointReader(directory).tensor("t", (1,))


def test_a_tensor_without_elements_has_rows_without_end(tmp_path: Path) -> None:
    directory = changed_metadata(tmp_path / "in", _chunk((1 << 60, 0), (1 << 60, 0)))
    assert CheckpointReader(directory).tensor("t", (1 << 40,)).shape == (0,)


def test_parts_of_metadata_that_are_no_files(tmp_path: Path) -> None:
    directory = changed_metadata(tmp_path / "in", lambda metadata: None)
    reader = CheckpointReader(directory)
    with opened_inside(tmp_path):
        for message in pipes_and_links(directory, "__0_0.distcp"):
            with pytest.raises(CheckpointError, match=message):
                reader.tensor("t")
            with pytest.raises(CheckpointError, match=message):
                reader.value("v")
        for _ in pipes_and_links(directory, ".metadata"):
            with pytest.raises(CheckpointError, match="metadata"):
                load_metadata(directory / ".metadata")


def test_archives_that_grow(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1 << 16)}, tmp_path / "plain.pt")
    with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "bomb.pt", "w", 8) as bomb:
        for name in plain.namelist():
            bomb.writestr(name, plain.read(name))
    assert (tmp_path / "bomb.pt").stat().st_size < 10_000
    with (tmp_path / "bomb.pt").open("rb") as file, pytest.raises(CheckpointError, match="it is compressed"):
        load_object(file, "bomb.pt")
    writer = RanksWriter(tmp_path / "in", 1)
    writer.tensor("a", (4,), [(0, (0,), torch.ones(4))])
    for info in writer.metadata.storage_data.values():
        info.offset, info.length = 0, (tmp_path / "bomb.pt").stat().st_size
    writer.close()
    (tmp_path / "in" / "__0_0.distcp").write_bytes((tmp_path / "bomb.pt").read_bytes())
    state = {"a": torch.zeros(4)}
    with pytest.raises(dcp.api.CheckpointException, match="it is compressed"):
        dcp.load(state, storage_reader=SafeReader(tmp_path / "in"), planner=SafeLoadPlanner(), no_dist=True)


# -- other readers ----------------------------------------------------------------------------------------------------


def write_safetensors(path: Path, header: str) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(16))


@pytest.mark.parametrize(
    "header",
    [
        '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}',
        '{"\\u001b[2Ja":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}',
        '{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,1600]}}',
        DEEP,
        "[]",
        "",
    ],
)
def test_hostile_safetensors(header: str, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", header)
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with opened_inside(tmp_path), pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
            SafetensorsReader(path)


def test_hostile_folders_of_hugging_face(tmp_path: Path) -> None:
    source, secret = tmp_path / "in", tmp_path / "secret"
    source.mkdir()
    secret.mkdir()
    (secret / "key.json").write_text("secret")
    write_safetensors(source / "model.safetensors", '{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}')
    write_safetensors(secret / "model.safetensors", '{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}')
    options = huggingface.HuggingFaceOptions()
    huggingface.plan_from_huggingface(source, options)
    for name in ("tokenizer.json", "config.json", "model.safetensors", INDEX):
        kept = (source / name).read_bytes() if (source / name).exists() else None
        for message in pipes_and_links(source, name):
            with opened_inside(source), pytest.raises(CheckpointError, match=message):
                huggingface.plan_from_huggingface(source, options)
        if kept is not None:
            (source / name).write_bytes(kept)
    for text in ("[]", DEEP, '{"architectures": 3}', '{"architectures": ["\\u001b"]}', '{"text_config": 3}', "{"):
        (source / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"config\.json is damaged"):
            huggingface.plan_from_huggingface(source, options)
    (source / "config.json").unlink()
    fsdp = tmp_path / "fsdp"
    with new_output(fsdp) as partial:
        huggingface.plan_from_huggingface(source, options).write(partial, lambda count: None)
    (fsdp / "huggingface").rmdir()
    (fsdp / "huggingface").symlink_to(secret)
    with pytest.raises(CheckpointError, match="a link to a folder outside"):
        huggingface.plan_to_huggingface(fsdp, options)
    with pytest.raises(CheckpointError, match="a link to another folder"):
        inspect_checkpoint.plan_edit(fsdp, [], [])
    (fsdp / "huggingface").unlink()
    (fsdp / "key").symlink_to(secret / "key.json")
    with pytest.raises(CheckpointError, match="outside of the folder"):
        inspect_checkpoint.plan_edit(fsdp, [], [])


STATE: dict[str, Any] = {
    "rank": 0,
    "world_size": 2,
    "host": "a",
    "why": "SIGUSR1",
    "place": None,
    "groups": {"g": {"ranks": [0, 1], "started": 1}},
    "entries": [
        {
            "step": 1,
            "model": "m",
            "what": "forward",
            "launches": [{"what": "gather", "group": "g", "number": 1, "started": True}],
        }
    ],
}


@pytest.mark.parametrize(
    "text",
    [
        *(
            json.dumps([{key: value for key, value in STATE.items() if key != gone}])
            for gone in STATE
            if gone != "place"
        ),
        *(json.dumps([STATE | {"world_size": size}]) for size in (10**9, 0, "2", 10**30)),
        json.dumps([STATE | {"rank": 5}]),
        json.dumps([STATE | {"rank": 1}]),
        json.dumps([STATE | {"groups": {"g": {"ranks": "x", "started": 1}}}]),
        json.dumps([STATE | {"entries": [{}]}]),
        json.dumps([STATE | {"entries": [STATE["entries"][0] | {"launches": [{"what": 3}]}]}]),
        json.dumps(STATE),
        "[]",
        "3",
        "[3]",
        DEEP,
    ],
)
def test_hostile_dumps_of_hangs(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.json").write_text(text)
    assert hang.run(str(tmp_path)) == 2
    assert "rank-0.json was not written by a rank: " in capsys.readouterr().out


def test_dumps_do_not_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.json").write_text(
        json.dumps([STATE | {"host": "\x1b[2Jhost", "why": "\u202e", "place": "a\nb"}])
    )
    assert hang.run(str(tmp_path)) == 0
    said = capsys.readouterr().out
    assert "rank 0 on \\x1b[2Jhost, written for \\u202e" in said
    assert "at a\\nb" in said
    assert "rank 1 left no file" in said
    for message in pipes_and_links(tmp_path, "rank-1.json"):
        assert hang.run(str(tmp_path)) == 2
        assert message in capsys.readouterr().out


SMALL = (Path(__file__).parents[2] / "passes" / "guests" / "solver" / "machines" / "h100-ib.json").read_text()


@pytest.mark.parametrize(
    "change",
    [
        *(
            {name: float("nan")}
            for name in ("memory_bandwidth", "matmul_efficiency", "kernel_seconds", "compute_slowdown")
        ),
        *({name: float("inf")} for name in ("memory_bandwidth", "memory_bytes", "collective_seconds")),
        {"flops": {"float32": float("nan")}},
        {"flops": {"float32": True}},
        {"flops": {"float32": "1"}},
        {"intra_node": {"bandwidth": float("nan"), "latency": 0}},
        {"intra_node": 3},
        {"name": "\x1b[2J"},
        {"name": 3},
        {"sources": {"flops": "\x1b"}},
        {"memory_bytes": "1"},
        {"ranks_per_node": 1.5},
    ],
)
def test_hostile_hardware(change: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps(json.loads(SMALL) | change))
    with pytest.raises(ValueError, match="does not describe hardware"):
        hardware(str(tmp_path / "x.json"))


def test_hardware_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(DEEP)
    with pytest.raises(ValueError, match="nested"):
        hardware(str(tmp_path / "x.json"))
    for path in ("pipe.json", "zero.json"):
        os.mkfifo(tmp_path / path) if path == "pipe.json" else (tmp_path / path).symlink_to("/dev/zero")
        with pytest.raises(ValueError, match=r"hardware file .*is not a regular file"):
            hardware(str(tmp_path / path))


@pytest.mark.parametrize(
    "text",
    ["[optimizer]\nlr = nan", "training = 3", "x = " + "[" * 50_000, "a = 1\na = 2", "\x00", "[optimizer]\nlr = '1'"],
)
def test_hostile_job_configurations(text: str, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(ValueError, match=r"job\.toml"):
        job_config.load(tmp_path / "job.toml", {"training.steps": "3"})


@pytest.mark.parametrize("name", ["lr_scheduler", "Optimizer", "__name__", "swa_utils", "x"])
def test_optimizers_that_are_none(name: str) -> None:
    with pytest.raises(ValueError, match=r"where one of .*AdamW"):
        optimizer_class(name)
    assert optimizer_class("SGD") is torch.optim.SGD


@pytest.mark.parametrize(
    "text", [DEEP, "[]", "{}", '{"model_type": 3}', '{"model_type": "llama", "architectures": "x"}']
)
def test_hostile_models_of_hugging_face(text: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="not a transformers configuration"):
        _hugging_face(str(tmp_path), torch.float32)


@pytest.mark.parametrize("text", [DEEP, "[]", '{"a": 1.5}', '{"a": true}', '{"a": -1}', '{"\\u001b": 1}'])
def test_hostile_maps_of_groups(text: str, tmp_path: Path) -> None:
    (tmp_path / "map.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"map\.json"):
        read_map(tmp_path / "map.json")


# -- full disks -------------------------------------------------------------------------------------------------------


def test_a_conversion_to_a_full_disk(tmp_path: Path) -> None:
    def write() -> None:
        with new_output(tmp_path / "out", needed=4000) as partial:
            partial.mkdir()
            (partial / "__0_0.distcp").symlink_to("/dev/full")
            writer = CheckpointWriter(partial)
            writer.add("t", torch.ones(1000))
            writer.close()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pytest.PytestUnraisableExceptionWarning)
        with pytest.raises(
            CheckpointError, match=r"the disk is full: .* \(ENOSPC\)\. 4,000 bytes were to be written; "
        ):
            write()
    assert not list(tmp_path.iterdir())


def test_paths_in_metadata_do_not_grow(tmp_path: Path) -> None:
    """A path that is joined with itself is twice as long, and 30 times are a gigabyte, from 300 bytes of a pickle."""
    start = b"\x80\x04cpathlib\nPosixPath\nq\x00X\x01\x00\x00\x00aq\x01"
    (tmp_path / ".metadata").write_bytes(start + b"h\x00h\x01h\x01\x86Rq\x01" * 20 + b".")
    with pytest.raises(CheckpointError, match="a name has 8,191 characters"):
        load_metadata(tmp_path / ".metadata")
