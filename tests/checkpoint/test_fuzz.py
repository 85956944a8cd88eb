"""Readers of untrusted files, on files that are nearly valid.

None of them hangs, opens a file outside the folder, or raises an error that is not the package's own.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_strangers import NAMES, SMALL, STATE, checkpoint, opened_inside, write_safetensors

from mfsdp_compile.checkpoint.dcp_reader import CheckpointReader
from mfsdp_compile.checkpoint.errors import CheckpointError
from mfsdp_compile.checkpoint.manifest import damaged_files, read_manifest
from mfsdp_compile.convert import huggingface
from mfsdp_compile.convert.param_groups import read_map
from mfsdp_compile.convert.safetensors_files import INDEX, SafetensorsReader
from mfsdp_compile.diagnostics import hang
from mfsdp_compile.passes.guests.solver.hardware import hardware

SECONDS = 20
"""Time limit for one input. Most take a millisecond or two."""

COUNTS = [pytest.param(40), pytest.param(3_400, marks=pytest.mark.long)]
"""Inputs of each of three kinds: 10,200 in the long run."""

Draw = Callable[[st.SearchStrategy[Any]], Any]

LEAVES = st.one_of(
    st.sampled_from([*NAMES, "manifest.json", "__0_0.distcp", "t", "v", "\x1b[2J", "a" * 5000]),
    st.sampled_from([0, 1, -1, 8, 2**31, 2**33, 2**63 - 1, 2**63, 2**80, -(2**63), 10**9]),
    st.sampled_from([None, True, False, 0.5, float("nan"), float("inf"), -0.0, 1e300]),
    st.text(max_size=6),
    st.integers(-3, 20),
)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    def expire(*_: Any) -> None:
        raise AssertionError(f"it takes longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def fuzz(count: int, one: Callable[[st.DataObject], None]) -> None:
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def run(data: st.DataObject) -> None:
        one(data)

    run()


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths to everything in nested lists and dictionaries."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, held in items:
        yield from places(held, (*at, key))


def mutated(data: st.DataObject, value: Any) -> Any:
    """Return a copy with a few parts replaced, removed or moved."""
    value = copy.deepcopy(value)
    for _ in range(data.draw(st.integers(0, 3))):
        *path, last = data.draw(st.sampled_from([*places(value)])) or (None,)
        if last is None:
            return data.draw(JSON)
        owner = value
        for step in path:
            owner = owner[step]
        kind = data.draw(st.sampled_from(["replace", "replace", "remove", "rename", "deepen"]))
        if kind == "replace":
            owner[last] = data.draw(JSON)
        elif kind == "remove":
            del owner[last]
        elif kind == "rename" and isinstance(owner, dict):
            owner[str(data.draw(LEAVES))] = owner.pop(last)
        else:
            for _ in range(data.draw(st.sampled_from([1, 70]))):
                owner[last] = [owner[last]]
    return value


def damaged(data: st.DataObject, content: bytes) -> bytes:
    """Return the content with some bytes changed, cut out or repeated; half of the time none."""
    for _ in range(data.draw(st.sampled_from([0, 0, 0, 1, 2, 8]))):
        a = data.draw(st.integers(0, max(len(content) - 1, 0)))
        b = data.draw(st.integers(a, min(a + 40, len(content))))
        middle = data.draw(
            st.sampled_from([b"", content[a:b] * 2, b"\xff" * 4, b"\x00", b"{", b'"', b"r\xff\xff\xff\xff"])
        )
        content = content[:a] + middle + content[b:]
    return content


def text_of(value: Any) -> bytes:
    return json.dumps(value).encode()


# -- JSON -------------------------------------------------------------------------------------------------------------


def read_all(directory: Path) -> None:
    reader = CheckpointReader(directory)
    for key in reader:
        with contextlib.suppress(CheckpointError):
            reader.tensor(key) if reader.is_tensor(key) else reader.value(key)
            if reader.is_tensor(key) and reader.shape(key)[:1] > (0,):
                reader.tensor(key, (0,))


@pytest.mark.parametrize("count", COUNTS)
def test_json(count: int, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "in")
    manifest = json.loads((folder / "manifest.json").read_text())
    header = '{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    write_safetensors(tmp_path / "model-1.safetensors", header)
    config = {"architectures": ["XForCausalLM"], "tie_word_embeddings": True, "text_config": {"a": 1}}

    def read(path: str) -> None:
        if path == "manifest.json":
            found = read_manifest(folder)
            assert found is not None
            damaged_files(folder, found.files, sorted(found.files))
        elif path == INDEX:
            SafetensorsReader(tmp_path)
        elif path == "rank-0.json":
            states = hang.read(tmp_path)
            assert all(finding.text.isprintable() for finding in hang.analyze(states))
        elif path == "hardware.json":
            hardware(str(tmp_path / path))
        elif path == "map.json":
            read_map(tmp_path / path)
        else:
            huggingface.plan_from_huggingface(tmp_path, huggingface.HuggingFaceOptions())

    good: dict[str, Any] = {
        "manifest.json": manifest,
        INDEX: {"metadata": {"total_size": 16}, "weight_map": {"a": "model-1.safetensors"}},
        "rank-0.json": [STATE],
        "hardware.json": json.loads(SMALL),
        "map.json": {"model.module.a": 0, "model.module.b": 1},
        "config.json": config,
    }

    def one(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([*good]))
        changed = mutated(data, good[name])
        if name == "manifest.json" and isinstance(changed, dict) and data.draw(st.booleans()):  # forge the checksum
            changed.pop("sha256", None)
            changed["sha256"] = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()
        path = (folder if name == "manifest.json" else tmp_path) / name
        path.write_bytes(damaged(data, text_of(changed)))
        refused: tuple[type[Exception], ...] = (CheckpointError,)
        if name in ("rank-0.json", "hardware.json"):
            refused = (ValueError,)
        try:
            with opened_inside(tmp_path), within(SECONDS):
                read(name)
        except refused as error:
            assert str(path) in str(error) or str(tmp_path) in str(error), error
            assert error.__class__ in (CheckpointError, ValueError)
        finally:
            path.write_bytes(text_of(good[name]))

    fuzz(count, one)


# -- safetensors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
def test_safetensors(count: int, tmp_path: Path) -> None:
    good = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [3], "data_offsets": [16, 22]},
    }
    path = tmp_path / "model.safetensors"

    def one(data: st.DataObject) -> None:
        header = text_of(mutated(data, good))
        if data.draw(st.integers(0, 4)) == 0 and header.startswith(b'{"'):  # a duplicate name
            header = header.replace(b'{"', b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"', 1)
        length = data.draw(st.sampled_from([len(header)] * 6 + [0, 1, len(header) - 1, 2**31, 2**64 - 1]))
        content = length.to_bytes(8, "little") + header + bytes(data.draw(st.sampled_from([22, 22, 22, 0, 16, 100])))
        path.write_bytes(damaged(data, content))
        try:
            with opened_inside(tmp_path), within(SECONDS):
                reader = SafetensorsReader(tmp_path)
                for name in reader.layouts:
                    assert name.isprintable()
                    reader.tensor(name)
                    reader.part(name, ())
                huggingface.plan_from_huggingface(tmp_path, huggingface.HuggingFaceOptions())
        except CheckpointError as error:
            assert str(tmp_path) in str(error)

    fuzz(count, one)


# -- pickles ----------------------------------------------------------------------------------------------------------

METADATA = "torch.distributed.checkpoint.metadata"
GLOBALS = st.sampled_from(
    [
        *(f"{METADATA} {name}" for name in ("Metadata", "MetadataIndex", "TensorProperties", "x.y")),
        *("torch.distributed.checkpoint.filesystem _StorageInfo", "torch Size", "torch float32", "torch load"),
        *("builtins list", "builtins set", "builtins tuple", "builtins eval", "os system", "pathlib PosixPath"),
        *("collections OrderedDict", "torch.serialization _get_layout"),
    ]
)
NUMBERS = st.sampled_from([0, 1, 2, 255, 2**31 - 1, 2**32 - 1])


def operation(draw: Draw) -> bytes:
    kind = draw(
        st.sampled_from(
            ["global", "text", "int", "small", "big", "tuple", "build", "reduce", "put", "get", "mark", "length", "raw"]
        )
    )
    if kind == "global":
        module, name = draw(GLOBALS).split()
        return f"c{module}\n{name}\n".encode()
    if kind == "text":
        word = draw(
            st.sampled_from([*filter(lambda n: isinstance(n, str), NAMES), "fqn", "state_dict_metadata"])
        ).encode()
        return pickle.BINUNICODE + len(word).to_bytes(4, "little") + word
    if kind == "int":
        return b"J" + draw(NUMBERS).to_bytes(4, "little")
    if kind == "small":
        return b"K" + bytes([draw(st.integers(0, 255))])
    if kind == "big":
        count = draw(st.sampled_from([0, 1, 20, 255]))
        return b"\x8a" + bytes([count]) + b"\x7f" * count
    if kind == "put":
        return draw(
            st.sampled_from([b"q\x00", b"q\xff", b"\x94", b"r\xff\xff\xff\xff", b"r\x00\x00\x00\x10", b"p9999999999\n"])
        )
    if kind == "get":
        return draw(st.sampled_from([b"h\x00", b"h\xff", b"j\x00\x00\x00\x00", b"g0\n"]))
    if kind == "length":  # length of what follows
        code = draw(st.sampled_from([b"\x8d", b"\x8e", b"\x95", b"\x96"]))
        return code + draw(st.sampled_from([0, 3, 2**31, 2**36, 2**62, 2**64 - 1])).to_bytes(8, "little")
    if kind == "raw":
        return draw(st.binary(min_size=1, max_size=3))
    choices = {
        "tuple": [b")", b"\x85", b"\x86", b"\x87", b"t", b"]", b"}", b"l", b"d", b"\x8f", b"\x90", b"\x91"],
        "build": [b"b", b"s", b"u", b"a", b"e"],
        "reduce": [b"R", b"\x81", b"\x92", b"o", b"i", b"Q", b"\x93", b"\x82\x01"],
        "mark": [b"(", b"0", b"1", b"2", b"N"],
    }
    return draw(st.sampled_from(choices[kind]))


def bent_metadata(data: st.DataObject, path: Path) -> bytes:
    """Return real metadata, with values of its records replaced."""
    metadata = pickle.loads(path.read_bytes())
    owners: list[tuple[Any, str]] = [
        (metadata, name) for name in ("planner_data", "state_dict_metadata", "storage_data")
    ]
    for entry in metadata.state_dict_metadata.values():
        if hasattr(entry, "chunks"):
            owners += [(entry, "size"), (entry, "chunks"), (entry, "properties")]
            owners += [(chunk, name) for chunk in entry.chunks for name in ("offsets", "sizes")]
    for info in metadata.storage_data.values():
        owners += [(info, name) for name in ("relative_path", "offset", "length", "transform_descriptors")]
    sizes = st.lists(st.sampled_from([0, 1, 2, 3, 2**31, 2**40, 2**62]), max_size=4).map(torch.Size)
    values = st.one_of(LEAVES, sizes, sizes, sizes, JSON, st.just({"t": ("a", 2**33)}))
    for _ in range(data.draw(st.integers(1, 3))):
        owner, name = data.draw(st.sampled_from(owners))
        with contextlib.suppress(AttributeError, TypeError):
            object.__setattr__(owner, name, data.draw(values))
    try:
        return pickle.dumps(metadata, protocol=data.draw(st.sampled_from([2, 4])))
    except Exception:  # torch does not write it
        return path.read_bytes()


@pytest.mark.parametrize("count", COUNTS)
def test_pickles(count: int, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "in")
    good, values = (folder / ".metadata").read_bytes(), (folder / "__0_0.distcp").read_bytes()
    spare = tmp_path / "good"
    spare.write_bytes(good)
    classes = (type(tmp_path), Path, list, dict, torch.dtype)
    before = [dict(vars(kind)) for kind in classes]

    def one(data: st.DataObject) -> None:
        how = data.draw(st.sampled_from(["operations", "records", "bytes", "values"]))
        if how == "operations":
            parts = [operation(data.draw) for _ in range(data.draw(st.integers(1, 40)))]
            content = b"\x80\x04" + b"".join(parts) + b"."
        else:
            content = bent_metadata(data, spare) if how == "records" else good
        (folder / ".metadata").write_bytes(damaged(data, content) if how == "bytes" else content)
        (folder / "__0_0.distcp").write_bytes(damaged(data, values) if how == "values" else values)
        try:
            with opened_inside(tmp_path), within(SECONDS):
                read_all(folder)
        except CheckpointError as error:
            assert str(folder) in str(error)
        assert before == [dict(vars(kind)) for kind in classes]

    fuzz(count, one)
