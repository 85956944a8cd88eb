"""Communicators of a model: which of its collectives have one of their own, and NCCL's settings for each.

    communicator    its collectives                                         created if
    gathers         parameters over ``dp_shard_dim``                        ``separate_gathers``, or it has settings
    reductions      gradients over ``dp_shard_dim`` (all with ``no_shard``) it has settings
    outer           over ``dp_outer_dim``: HSDP, HFSDP                      it has settings

NCCL runs the collectives of a communicator one after the other, on one stream. Options belong to a communicator and
cannot be changed later. Process groups that the program has passed are therefore left alone: settings go to a new
communicator of the same ranks, which starts from the options of the group it replaces. The group that ranks agree over
and DTensors communicate over stays the program's.
"""

from __future__ import annotations

import reprlib
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from .. import compat
from ..geometry.exchange import Overlap
from ..geometry.groups import Group
from ..geometry.topology import Topology
from ..program_lines import warn
from ..ranks.agreement import everyones


@dataclass(frozen=True)
class Communicator:
    """NCCL's settings for one communicator. None: as for the process group of the same ranks that the program passed.

    Args:
        high_priority: Whether its stream has high priority: its kernels are scheduled before the model's.
        min_ctas, max_ctas: Fewest and most thread blocks of its kernels, each of which occupies a multiprocessor.
            Fewer leave more of the GPU to computation, and may not saturate the network. NCCL 2.17.
        cga_cluster_size: Thread blocks per cluster, 0 to 8, on Hopper and later. NCCL 2.17.
        nvls_ctas: Thread blocks of its kernels that reduce in NVLink switches. NCCL 2.27.
        collnet: Whether switches of the network may reduce (SHARP), where the CollNet plugin is installed. NCCL 2.27.

    Raises:
        TypeError: A field has the wrong type.
        ValueError: A number is out of range.
    """

    high_priority: bool | None = None
    min_ctas: int | None = None
    max_ctas: int | None = None
    cga_cluster_size: int | None = None
    nvls_ctas: int | None = None
    collnet: bool | None = None

    def __post_init__(self) -> None:
        for name, value in self.given.items():
            if name in ("high_priority", "collnet"):
                if not isinstance(value, bool):
                    raise TypeError(f"{name} of a communicator takes True, False or None, got {reprlib.repr(value)}")
            elif isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} of a communicator takes a whole number or None, got {reprlib.repr(value)}")
            elif name == "cga_cluster_size" and not 0 <= value <= 8:
                raise ValueError(f"cga_cluster_size={value}: a cluster has 0 to 8 thread blocks")
            elif name != "cga_cluster_size" and value < 1:
                raise ValueError(f"{name}={value}: a communicator has at least 1 thread block")
        if self.min_ctas is not None and self.max_ctas is not None and self.min_ctas > self.max_ctas:
            raise ValueError(f"min_ctas={self.min_ctas} is more than max_ctas={self.max_ctas}")

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.given.items())


@dataclass(frozen=True)
class Communication:
    """Which collectives of a model have a communicator of their own, and NCCL's settings for each.

    Args:
        separate_gathers: Whether parameters are gathered over a communicator of their own, so that gathers do not queue
            behind reductions. ``"auto"``: if NCCL runs more than one rank, the strategy is ``optim_grads_params``, and
            both gathers and reductions overlap with computation; also if ``gathers`` has settings. ``fsdp_group_ag``
            is such a communicator.
        zero_cta: Whether GPUs gather with their copy engines instead of kernels. Needs NCCL 2.28, ``nccl_ub`` with
            symmetric memory, ``optim_grads_params``, and the ranks of ``dp_shard_dim`` on one host.
        gathers: Settings for gathers over ``dp_shard_dim``. Experts have a communicator of their own with the same
            settings, here and below.
        reductions: Settings for reductions over ``dp_shard_dim``; with ``no_shard``, over all data-parallel ranks.
        outer: Settings for collectives over ``dp_outer_dim``.

    Raises:
        TypeError: A field has the wrong type.
    """

    separate_gathers: bool | Literal["auto"] = "auto"
    zero_cta: bool = False
    gathers: Communicator = field(default_factory=Communicator)
    reductions: Communicator = field(default_factory=Communicator)
    outer: Communicator = field(default_factory=Communicator)

    def __post_init__(self) -> None:
        if not isinstance(self.separate_gathers, bool) and self.separate_gathers != "auto":
            raise TypeError(f"separate_gathers takes True, False or 'auto', got {reprlib.repr(self.separate_gathers)}")
        if not isinstance(self.zero_cta, bool):
            raise TypeError(f"zero_cta takes True or False, got {reprlib.repr(self.zero_cta)}")
        for name in ("gathers", "reductions", "outer"):
            object.__setattr__(self, name, _built(Communicator, getattr(self, name), f"communication's {name}"))

    @staticmethod
    def of(value: object) -> Communication:
        """Convert the argument of ``fully_shard_model``: None, a :class:`Communication`, or a dict of its fields.

        Raises:
            TypeError: It is something else, or a field is unknown or has the wrong type.
            ValueError: A number is out of range.
        """
        return Communication() if value is None else _built(Communication, value, "communication")

    @property
    def for_nccl(self) -> list[str]:
        """Names of the settings that were given and that only NCCL has."""
        names = [f"{name}.{key}" for name in _PARTS for key in getattr(self, name).given]
        return [*names, "zero_cta"] if self.zero_cta else names


_PARTS = ("gathers", "reductions", "outer")


def _built(kind: Any, value: object, what: str) -> Any:
    if isinstance(value, kind):
        return value
    known = [of.name for of in fields(kind)]
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{what} takes an mfsdp_compile.{kind.__name__} or a dict of its fields ({', '.join(known)}), got "
            f"{reprlib.repr(value)}, a {type(value).__name__}"
        )
    if unknown := [name for name in value if name not in known]:
        raise TypeError(f"{what} has no field {unknown[0]!r}. It has {', '.join(known)}.")
    return kind(**value)


def describe(topology: Topology, communication: Communication, overlap: Overlap) -> str:
    """Check settings, and describe the communicators that :func:`make` would create, to compare between ranks.

    Raises:
        ValueError: Settings contradict each other, or have no collectives that they could apply to.
        NotImplementedError: This build of torch, or its NCCL, does not have a setting.
    """
    _refuse_contradictions(topology, communication)
    separate = _separates_gathers(topology, communication, overlap)
    gathers = "separate" if separate else "over the group for gathers" if topology.inner_gathers else "not separate"
    lines = [f"communicators of {topology.every.size} ranks: gathers {gathers}"]
    for name in _PARTS:
        settings = getattr(communication, name)
        zero_cta = name == "gathers" and communication.zero_cta
        if settings.given or zero_cta:
            lines.append(f"{name}: {settings}{' zero_cta' if zero_cta else ''}")
            if _is_nccl(topology):
                _options(_base(topology, name), settings, zero_cta)
    return "; ".join(lines)


def warn_of_idle_settings(topology: Topology, communication: Communication) -> None:
    """Warn if there are settings that only NCCL has, and NCCL does not run the collectives."""
    if (idle := communication.for_nccl) and not _is_nccl(topology):
        backend = dist.get_backend(compat.process_group(topology.inner.name))
        warn(
            f"communication: {', '.join(idle)}: settings of NCCL have no effect with the backend {backend!r}.",
        )


def check_zero_cta(topology: Topology, every: dist.ProcessGroup, communication: Communication) -> None:
    """Raise ValueError, on all ranks of ``every``, if copy engines would gather from other hosts. A collective."""
    if not communication.zero_cta or not _is_nccl(topology):
        return
    ranks = dist.get_process_group_ranks(compat.process_group(topology.inner.name))
    hosts = dict(everyones((dist.get_rank(), (socket.gethostname(), ranks)), every, "hosts of ranks"))
    for _, sharers in hosts.values():
        if len(named := sorted({hosts[rank][0] for rank in sharers})) > 1:
            raise ValueError(
                f"communication: zero_cta gathers with copy engines, which reach only GPUs of the same host, but the "
                f"ranks of dp_shard_dim {list(sharers)[:8]} are on {', '.join(named[:4])}. Shard within a host and "
                "replicate over hosts (dp_outer_dim), or leave zero_cta out."
            )


def make(topology: Topology, communication: Communication, overlap: Overlap) -> Topology:
    """Return a topology with the communicators that :func:`describe` has described. All ranks must call this."""
    is_nccl = _is_nccl(topology)

    def made(name: str, is_needed: bool) -> Group | None:
        settings, zero_cta = getattr(communication, name), name == "gathers" and communication.zero_cta
        if not is_needed and not (is_nccl and (settings.given or zero_cta)):
            return None
        base = _base(topology, name)
        options = _options(base, settings, zero_cta) if is_nccl else None
        return Group.of(compat.new_group_like(base.name, options=options))

    gathers = made("gathers", _separates_gathers(topology, communication, overlap))
    reductions, outer = made("reductions", False), made("outer", False)
    return replace(
        topology,
        inner_gathers=gathers or topology.inner_gathers,
        reductions=reductions,
        outer=outer or topology.outer,
    )


def _is_nccl(topology: Topology) -> bool:
    device = torch.device(topology.mesh.device_type)
    return compat.nccl_backend(topology.inner.name, device) is not None


def _separates_gathers(topology: Topology, communication: Communication, overlap: Overlap) -> bool:
    """Whether gathers get a new communicator, apart from its settings."""
    if topology.inner_gathers is not None or communication.separate_gathers is False:
        return False
    if communication.separate_gathers is True:
        return True
    return (
        topology.over_inner.gathers_each_use
        and topology.inner.size > 1
        and overlap.gathers
        and overlap.reductions
        and _is_nccl(topology)
    )


def _refuse_contradictions(topology: Topology, communication: Communication) -> None:
    own = "zero_cta" if communication.zero_cta else "settings for gathers" if communication.gathers.given else None
    if communication.separate_gathers is False and (own is not None or topology.inner_gathers is not None):
        raise ValueError(
            f"communication: separate_gathers=False contradicts {own or 'fsdp_group_ag'}: gathers would have a "
            "communicator of their own. Leave one of them out."
        )
    if not topology.over_inner.shards and (own is not None or communication.separate_gathers is True):
        raise ValueError(
            "communication: zero_dp_strategy='no_shard' gathers nothing. Leave out separate_gathers, zero_cta and the "
            "settings for gathers."
        )
    if communication.zero_cta and not topology.over_inner.gathers_each_use:
        raise ValueError(
            "communication: zero_cta needs zero_dp_strategy='optim_grads_params', got "
            f"{topology.strategy.name.lower()!r}: other strategies do not gather into registered buffers."
        )
    if communication.outer.given and (topology.outer is None or not topology.over_inner.shards):
        reason = "there is no dp_outer_dim" if topology.outer is None else "no_shard reduces over all ranks at once"
        raise ValueError(f"communication: the settings for outer apply to nothing, because {reason}. Leave them out.")


def _base(topology: Topology, name: str) -> Group:
    """Return the group whose ranks, and options, a communicator starts from."""
    if name == "gathers":
        return topology.inner_gathers or topology.inner
    if name == "outer":
        assert topology.outer is not None
        return topology.outer
    return topology.inner if topology.over_inner.shards else topology.every


def _options(base: Group, settings: Communicator, zero_cta: bool) -> Any:
    config = {_CONFIG.get(key, key): int(value) for key, value in settings.given.items() if key != "high_priority"}
    return compat.configured_options(compat.process_group(base.name), settings.high_priority, config, zero_cta)


_CONFIG: Mapping[str, str] = {"collnet": "collnet_enable"}
"""Names of settings in ``ProcessGroupNCCL.Options.config``, where they differ."""
