"""Changes to a checkpoint, as an attacker or a bug would make them: digests are right afterwards."""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from mfsdp_compile.checkpoint.manifest import MANIFEST, hash_file


class Tampered:
    """A copy of a checkpoint, to be changed and then sealed.

    Args:
        original: The checkpoint.
        copy: Folder of the copy.
    """

    def __init__(self, original: Path, copy: Path) -> None:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(original, copy)
        self.path = copy
        self.metadata: Metadata = pickle.loads((copy / ".metadata").read_bytes())

    def seal(self, has_manifest: bool = True) -> Path:
        """Write the metadata, and digests that fit."""
        (self.path / ".metadata").write_bytes(pickle.dumps(self.metadata))
        if has_manifest:
            self.manifest(lambda body: None)
        else:
            (self.path / MANIFEST).unlink()
        return self.path

    def manifest(self, change: Callable[[dict[str, Any]], None], rehash: bool = True) -> Path:
        """Change the manifest, and sign it."""
        body = json.loads((self.path / MANIFEST).read_text())
        body.pop("sha256")
        for name in body["files"] if rehash else ():
            if (self.path / name).is_file():
                record = hash_file(self.path / name)
                body["files"][name] = {"bytes": record.bytes, "digest": record.digest}
        change(body)
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        (self.path / MANIFEST).write_text(json.dumps({**body, "sha256": digest}))
        return self.path

    # -- entries ------------------------------------------------------------------------------------------------------

    def entry(self, key: str) -> Any:
        return self.metadata.state_dict_metadata[key]

    def forget(self, key: str) -> None:
        del self.metadata.state_dict_metadata[key]
        for index in [index for index in self.metadata.storage_data if index.fqn == key]:
            del self.metadata.storage_data[index]

    def indices(self, key: str) -> list[MetadataIndex]:
        return [index for index in self.metadata.storage_data if index.fqn == key]

    def read(self, key: str) -> Any:
        """Return the first chunk of a tensor, or a value."""
        info = self.metadata.storage_data[self.indices(key)[0]]
        content = (self.path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        return torch.load(io.BytesIO(content), weights_only=False)

    def put(self, key: str, content: bytes) -> None:
        """Replace the archive of the first chunk of a tensor, or of a value."""
        info = self.metadata.storage_data[self.indices(key)[0]]
        if info.relative_path not in {path.name for path in self.path.glob("*.distcp")}:
            raise ValueError("the entry was moved elsewhere before")
        with (self.path / info.relative_path).open("ab") as file:
            object.__setattr__(info, "offset", file.tell())
            object.__setattr__(info, "length", len(content))
            file.write(content)

    def put_tensor(self, key: str, value: Tensor) -> None:
        """Replace a tensor of one chunk, also its description."""
        entry = self.entry(key)
        entry.size = value.shape
        object.__setattr__(entry.properties, "dtype", value.dtype)
        entry.chunks[0] = ChunkStorageMetadata(torch.Size([0] * value.ndim), value.shape)
        info = self.metadata.storage_data.pop(self.indices(key)[0])
        self.metadata.storage_data[MetadataIndex(key, entry.chunks[0].offsets, 0)] = info
        self.put(key, archive(value))

    def change(self, key: str, at: int, value: int) -> None:
        """Change one element of a tensor of one chunk."""
        tensor = self.read(key).clone()
        tensor.view(-1)[at] = value
        self.put(key, archive(tensor))


def archive(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def rewritten(content: bytes, change: Callable[[str, bytes], bytes], compressed: bool = False) -> bytes:
    """Return a ``torch.save`` archive with other parts."""
    stream = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(stream, "w", kind) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return stream.getvalue()


def bomb(size: int) -> bytes:
    """Return a compressed archive of ``size`` zeros."""
    small = archive(torch.zeros(size, dtype=torch.uint8))
    return rewritten(small, lambda name, part: part, compressed=True)
