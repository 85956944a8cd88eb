"""Text that every machine has: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset


def standard_library(max_bytes: int = 4 << 20) -> Tensor:
    """Return the modules of the standard library, concatenated in order of name: ``[n]`` of uint8, ``n <= max_bytes``.

    Raises:
        FileNotFoundError: If this Python was installed without sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    size = 0
    for path in sorted(root.rglob("*.py")):
        folders = path.relative_to(root).parts[:-1]
        if {"site-packages", "dist-packages", "test", "tests", "__pycache__"} & set(folders):
            continue
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= max_bytes:
            break
    if not parts:
        raise FileNotFoundError(f"no Python sources below {root}: this Python was installed without them")
    return torch.frombuffer(bytearray(b"".join(parts)[:max_bytes]), dtype=torch.uint8)


@dataclass(frozen=True)
class ByteText:
    """Batches of random windows, determined by the seed and the step alone.

    Args:
        data: Bytes, ``[n]`` of uint8.
        length: Bytes per window.
        seed: Seed for the choice of windows.
    """

    data: Tensor
    length: int
    seed: int = 0

    def batch(self, step: int, size: int) -> tuple[Tensor, Tensor]:
        """Return tokens and next tokens, each ``[size, length]`` of int64."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        starts = torch.randint(0, len(self.data) - self.length, (size,), generator=generator)
        windows = self.data[starts[:, None] + torch.arange(self.length + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@dataclass(frozen=True)
class Windows(Dataset[dict[str, Tensor]]):
    """Random windows as single examples, for data loaders. Sequential order is as good as shuffled.

    Args:
        data: Bytes, ``[n]`` of uint8.
        length: Bytes per window.
        count: Number of examples.
        seed: Seed for the choice of windows.
    """

    data: Tensor
    length: int
    count: int
    seed: int = 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return ``input_ids`` and ``labels``, the same ``[length]`` of int64, as transformers models take them."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        start = int(torch.randint(0, len(self.data) - self.length + 1, (), generator=generator))
        tokens = self.data[start : start + self.length].long()
        return {"input_ids": tokens, "labels": tokens}
