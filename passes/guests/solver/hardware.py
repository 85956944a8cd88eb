"""Performance numbers of machines, for predictions. They come from data files that name the source of each number.

    >>> hardware("h100-ib").flops_of("bfloat16")
    989500000000000.0

The numbers are plain data. ``mfsdp calibrate`` measures the current machine and writes such a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from mfsdp_compile.runtime.nearest import did_you_mean
from mfsdp_compile.runtime.untrusted_files import FileRefused, parse_json, read_text, safe_name, typed, whole

__all__ = ["Hardware", "Link", "hardware", "known_gpu", "known_hardware"]


def _finite(value: Any, what: str) -> None:
    if not math.isfinite(typed(value, (int, float), what)):
        raise FileRefused(f"{what} is {value}, but must be finite")


@dataclass(frozen=True)
class Link:
    """Connection between ranks.

    Args:
        bandwidth: Bytes per second that a rank sends in large collectives, while it receives at the same rate.
        latency: Seconds from one rank to the next.
    """

    bandwidth: float
    latency: float

    def __post_init__(self) -> None:
        _finite(self.bandwidth, "bandwidth")
        _finite(self.latency, "latency")


@dataclass(frozen=True)
class Hardware:
    """One kind of machine.

    Args:
        name: Name of the machine.
        flops: Peak floating-point operations per second of dense matrix products, by dtype (``"bfloat16"``).
        matmul_efficiency: Fraction of the peak that large matrix products reach.
        attention_efficiency: Fraction of the peak that fused attention reaches.
        memory_bandwidth: Peak bytes per second of the device's memory.
        memory_efficiency: Fraction of the peak bandwidth that kernels reach which only move data.
        memory_bytes: Bytes of the device's memory, as torch reports them.
        kernel_seconds: Time of the smallest kernel.
        collective_seconds: Time of the smallest collective between two ranks of a node, without the latency of links.
        ranks_per_node: Number of ranks that the fast link connects.
        intra_node: Link between ranks of a node.
        inter_node: Link of one rank to other nodes.
        host_link: Link between a rank's device and host memory. It carries ``bandwidth`` in each direction at a time;
            ``latency`` is that of a copy.
        host_memory_bandwidth: Bytes per second that a rank's part of the CPU reads and writes in host memory, while the
            other ranks do the same.
        compute_slowdown: Fraction by which computation slows down while a collective runs, because NCCL's kernels
            occupy multiprocessors.
        multiprocessors: Number of multiprocessors, which compute tiles of matrix products in waves. 0: products of all
            shapes reach ``matmul_efficiency``.
        sustained_clock: Fraction of the rate of products in short measurements that is left in training, where power
            and heat limit the clock. Scales products and attention. Where it was fitted to published training runs, it
            also holds what else makes their computation slower, such as gaps between kernels.
        power_watts: Power limit of a device, in watts, for which these numbers hold. 0: not known.
        sources: Where the numbers come from, by field; "measured" for those of ``mfsdp calibrate``.
    """

    name: str
    flops: Mapping[str, float] = field(hash=False)
    matmul_efficiency: float
    attention_efficiency: float
    memory_bandwidth: float
    memory_efficiency: float
    memory_bytes: int
    kernel_seconds: float
    collective_seconds: float
    ranks_per_node: int
    intra_node: Link
    inter_node: Link
    host_link: Link
    host_memory_bandwidth: float
    compute_slowdown: float = 0.0
    multiprocessors: int = 0
    sustained_clock: float = 1.0
    power_watts: float = 0.0
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        safe_name(self.name, "name")
        for name in (
            *("matmul_efficiency", "attention_efficiency", "memory_efficiency", "memory_bandwidth", "kernel_seconds"),
            *("collective_seconds", "compute_slowdown", "host_memory_bandwidth", "sustained_clock", "power_watts"),
        ):
            _finite(getattr(self, name), f"{self.name}: {name}")
        for name in ("memory_bytes", "ranks_per_node", "multiprocessors"):
            whole(getattr(self, name), f"{self.name}: {name}", low=-(1 << 63))
        for name, value in typed(self.flops, Mapping, "flops").items():  # type: ignore[type-abstract]
            _finite(value, f"{self.name}: flops of {safe_name(name)}")
        for name, text in typed(self.sources, Mapping, "sources").items():  # type: ignore[type-abstract]
            safe_name(name), safe_name(text, f"the source of {name}")
        for name in ("matmul_efficiency", "attention_efficiency", "memory_efficiency", "sustained_clock"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{self.name}: {name} must be above 0 and at most 1, got {getattr(self, name)}")
        for name in ("memory_bandwidth", "memory_bytes", "ranks_per_node", "host_memory_bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{self.name}: {name} must be above 0, got {getattr(self, name)}")
        for name in ("kernel_seconds", "collective_seconds", "compute_slowdown", "multiprocessors", "power_watts"):
            if getattr(self, name) < 0:
                raise ValueError(f"{self.name}: {name} cannot be negative, got {getattr(self, name)}")
        for link in (self.intra_node, self.inter_node, self.host_link):
            if link.bandwidth <= 0 or link.latency < 0:
                raise ValueError(f"{self.name}: not a link: {link}")
        if "float32" not in self.flops or min(self.flops.values()) <= 0:
            raise ValueError(f"{self.name}: flops must be positive numbers, and include float32: {self.flops}")

    def flops_of(self, dtype: str) -> float:
        """Return the peak of a dtype, or float32's if the table lacks the dtype."""
        return self.flops.get(dtype, self.flops["float32"])

    def to_json(self) -> str:
        """Return the text of a data file."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @staticmethod
    def from_json(text: str, where: str) -> Hardware:
        """Parse the text of a data file.

        Args:
            text: Text of the file.
            where: Source of the text, for error messages.

        Raises:
            ValueError: The text does not describe hardware.
        """
        try:
            given = dict(typed(parse_json(text), dict, "it"))
            links: dict[str, Any] = {
                name: Link(**typed(given.pop(name), dict, name)) for name in ("intra_node", "inter_node", "host_link")
            }
            return Hardware(**given, **links)
        except (ValueError, TypeError, KeyError) as error:
            expected = ", ".join(f.name for f in fields(Hardware))
            raise ValueError(f"{where} does not describe hardware: {error}. It takes {expected}.") from error


def known_hardware() -> list[str]:
    """Return the names of the machines that ship with this package."""
    folder = resources.files(__package__) / "machines"
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json"))


_GPUS = {"GB200": "gb200-nvl72", "B200": "b200-ib", "H200": "h200-ib", "H100": "h100-ib", "A100": "a100-ib"}


def known_gpu(device: str) -> str | None:
    """Return the name of the machine that has a GPU, by the name that torch gives the GPU; None if there is none."""
    return next((machine for part, machine in _GPUS.items() if part in device), None)


def hardware(name: str) -> Hardware:
    """Return a machine by its name, or from a file whose name ends in ``.json``.

    Raises:
        ValueError: The name is unknown, or the file cannot be read.
    """
    if name.endswith(".json"):
        try:
            return Hardware.from_json(read_text(Path(name)), name)
        except (OSError, FileRefused) as error:
            raise ValueError(f"hardware file {name}: {error}") from error
    if name not in known_hardware():
        raise ValueError(
            f"unknown hardware {name!r}.{did_you_mean(name, known_hardware())} Known: {', '.join(known_hardware())}; "
            "or pass a .json file written by `mfsdp calibrate`"
        )
    text = (resources.files(__package__) / "machines" / f"{name}.json").read_text()
    return Hardware.from_json(text, name)
