"""How the parameters of one unit lie in one flat bucket, and which rows of them each rank owns.

Plain data: no torch, no process group. Everything here is a closed form of (rank, world size), so that a plan for
65,536 ranks costs what a plan for 8 does, and every rank computes the same layout without talking to another.

Words
    bucket      one flat tensor of ``world_size * shard_numel`` elements
    slot        the place of one parameter in its bucket
    row         one index of dimension 0 of a parameter; a vector's rows are its elements, a scalar has one row
    shard       a rank's slice ``[rank * shard_numel, (rank + 1) * shard_numel)`` of the bucket

Promises, checked when a layout is made
    * every parameter is contiguous in its bucket and starts on a multiple of ``ALIGNMENT_BYTES``,
      so that compute reads it in place, at full vector width;
    * a shard boundary never cuts a row, so that every rank's part of a parameter is an ordinary tensor;
    * padding is at most ``LayoutPolicy.limit`` (parameters whose rows do not fit together get separate buckets,
      where Megatron-FSDP pads to the least common multiple of their rows: 1,032,192 elements per rank for DeepSeek-V3).

A worked example: a ``Linear(8, 6)`` in float32 on two ranks, with the alignment lowered to 16 bytes (4 elements) ::

    >>> policy = LayoutPolicy(alignment_bytes=16)
    >>> (layout,) = plan_layouts([ParamSpec("weight", (6, 8)), ParamSpec("bias", (6,))], 4, world_size=2, policy=policy)
    >>> layout.shard_numel, layout.numel, layout.padding
    (32, 64, 10)
    >>> [(slot.name, slot.offset) for slot in layout.slots]     # 48 weights, then 6 biases
    [('weight', 0), ('bias', 48)]
    >>> layout.rows(0, rank=0), layout.rows(0, rank=1)          # 32 elements are 4 whole rows of 8
    (range(0, 4), range(4, 6))
    >>> layout.rows(1, rank=0), layout.rows(1, rank=1)          # the bias lies in rank 1's half
    (range(0, 0), range(0, 6))

27 elements per rank would hold the 54 elements without padding, but would cut the fourth row of the weight.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

__all__ = ["ALIGNMENT_BYTES", "BucketLayout", "LayoutPolicy", "ParamSpec", "Slot", "in_parts", "plan_layouts"]

ALIGNMENT_BYTES = 256
"""Start of a parameter inside its bucket. 256 bytes is what the CUDA allocator gives a tensor of its own: kernels that
look at pointers (cuBLAS wants 16 bytes, TMA 128) cannot tell a bucketed parameter from an ordinary one."""


@dataclass(frozen=True)
class LayoutPolicy:
    """The numbers that steer bucket layouts.

    Args:
        alignment_bytes: parameters start at multiples of this many bytes in their bucket. A power of two.
        max_padding: padding should stay below this fraction of a bucket's contents, or below one row (at least 16
            bytes) per rank, whichever is more.
        free_padding_bytes: parameters that cannot meet this goal together are split into several buckets, unless the
            padding is below this. The default, 1 MiB, is what a 50 GB/s link moves in the 20 us that launching
            another collective costs: below it, a second bucket is dearer than the padding it saves.
        block_numel: parameters and shards start at multiples of this many elements, so that no block of an optimizer
            that quantises its state in blocks is parted. A power of two.
        bucket_bytes: a unit that is larger than this, gathered, is parted into several buckets, in the order in which its
            modules were made. None: a unit is one bucket, as far as padding allows.
        unit_bytes: units that are smaller than this, gathered, are joined with their neighbours until they are as large; see
            :func:`.units.join`. None: each is a unit by itself.
    """

    alignment_bytes: int = ALIGNMENT_BYTES
    max_padding: float = 0.02
    free_padding_bytes: int = 1 << 20
    block_numel: int = 1
    bucket_bytes: int | None = None
    unit_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "unit_bytes"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        for name in ("alignment_bytes", "block_numel"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if self.max_padding < 0 or self.free_padding_bytes < 0:
            raise ValueError(f"a padding bound cannot be negative: {self}")

    def indivisible(self, row_numel: int) -> int:
        """The fewest elements that are whole rows and whole blocks."""
        return math.lcm(max(row_numel, 1), self.block_numel)

    def goal(self, content_bytes: int, row_bytes: int, world_size: int) -> int:
        """Bytes of padding that a bucket should have at most; ``row_bytes`` is the largest of what is indivisible."""
        return max(int(self.max_padding * content_bytes), world_size * max(row_bytes, _MIN_SHARD_ALIGNMENT_BYTES))

    def limit(self, content_bytes: int, row_bytes: int, world_size: int) -> int:
        """Bytes of padding above which a bucket is split."""
        return max(self.goal(content_bytes, row_bytes, world_size), self.free_padding_bytes)


_MIN_SHARD_ALIGNMENT_BYTES = 16  # below this, collectives fall off a cliff (NCCL: 13.4 -> 1.1 GB/s, nccl#413)


@dataclass(frozen=True)
class ParamSpec:
    """A parameter that wants a place.

    Args:
        name: unique in its unit.
        shape: global.
        whole: one rank should own all of it, if the padding bound allows: an optimizer (Muon) works on whole matrices.
    """

    name: str
    shape: tuple[int, ...]
    whole: bool = field(default=False, kw_only=True)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_numel(self) -> int:
        """Elements of one row; 0 where a dimension other than the first is 0."""
        return math.prod(self.shape[1:])

    @property
    def atom_numel(self) -> int:
        """Elements that no shard boundary may part."""
        return self.numel if self.whole else self.row_numel


@dataclass(frozen=True)
class Slot(ParamSpec):
    """A parameter at ``[offset, offset + numel)`` of its bucket, in elements."""

    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class BucketLayout:
    """Where each parameter of a bucket lies, and how the bucket is cut into equal shards.

    Args:
        itemsize: bytes per element of the compute dtype. Offsets are in elements, so the same layout serves the
            shards in the main dtype.
        world_size: ranks that the bucket is sharded over.
        shard_numel: elements of one rank's shard.
        slots: one per parameter, in order of their offsets.
        alignment_bytes: every slot starts at a multiple of this.

    Raises:
        ValueError: the slots overlap, are not aligned, leave the bucket, or a shard boundary cuts a row.
    """

    itemsize: int
    world_size: int
    shard_numel: int
    slots: tuple[Slot, ...]
    alignment_bytes: int = ALIGNMENT_BYTES
    signature: str = field(init=False, compare=False, repr=False)
    """A digest of everything but the names: buckets of equal signature can share compiled code."""
    fingerprint: str = field(init=False, compare=False, repr=False)
    """A digest of everything, for checkpoints and for agreement between ranks."""

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.itemsize < 1 or self.shard_numel < 0:
            raise ValueError(f"not a bucket: {self}")
        end = 0
        for slot in self.slots:
            if slot.offset < end or slot.offset * self.itemsize % self.alignment_bytes:
                raise ValueError(f"{slot} overlaps the slot before it or is not aligned to {self.alignment_bytes} B")
            if _cuts_a_row(slot.offset, slot.numel, slot.row_numel, self.shard_numel):
                raise ValueError(f"a boundary between shards of {self.shard_numel} elements cuts a row of {slot}")
            end = slot.end
        if end > self.numel:
            raise ValueError(f"{self.slots[-1]} ends beyond the bucket's {self.numel} elements")
        geometry = (self.itemsize, self.world_size, self.shard_numel, [(s.shape, s.offset) for s in self.slots])
        object.__setattr__(self, "signature", _digest(geometry))
        object.__setattr__(self, "fingerprint", _digest((geometry, [s.name for s in self.slots])))

    @property
    def numel(self) -> int:
        """Elements of the gathered bucket, padding included."""
        return self.world_size * self.shard_numel

    @property
    def padding(self) -> int:
        """Elements of the bucket that belong to no parameter."""
        return self.numel - sum(slot.numel for slot in self.slots)

    def rows(self, index: int, rank: int) -> range:
        """The rows of parameter ``index`` that ``rank`` owns; an empty range where it owns none."""
        slot = self.slots[index]
        if not slot.row_numel:  # no elements: any owner will do, as long as there is one
            return range(slot.num_rows if rank == 0 else 0)
        start, stop = (
            min(max(boundary * self.shard_numel - slot.offset, 0), slot.numel) // slot.row_numel
            for boundary in (rank, rank + 1)
        )
        return range(start, stop)

    def shard_offset(self, index: int, rank: int) -> int:
        """Where parameter ``index`` begins in the shard of ``rank``, in elements (0 where the rank has none of it)."""
        if not self.slots[index].row_numel or not self.rows(index, rank):
            return 0
        return max(self.slots[index].offset - rank * self.shard_numel, 0)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """The ``(start, stop)`` ranges of the bucket that belong to no parameter, in elements."""
        end = 0
        for slot in self.slots:
            if slot.offset > end:
                yield end, slot.offset
            end = slot.end
        if end < self.numel:
            yield end, self.numel

    def __str__(self) -> str:
        content = self.numel - self.padding
        share = self.padding / content if content else 0.0
        return (
            f"{len(self.slots)} parameters, {content:,} elements of {self.itemsize} B over {self.world_size} ranks: "
            f"{self.shard_numel:,} each, padding {self.padding:,} ({share:.2%})"
        )


def in_parts(params: Sequence[ParamSpec], itemsize: int, most: int | None) -> list[Sequence[ParamSpec]]:
    """Parameters that follow on one another, in parts of at most ``most`` bytes; one that is larger is a part by itself.

    Args:
        itemsize: bytes per element.
        most: None: all are one part.
    """
    if most is None:
        return [params]
    parts: list[list[ParamSpec]] = []
    size = 0
    for param in params:
        own = param.numel * itemsize
        if not parts or size + own > most:
            parts.append([])
            size = 0
        parts[-1].append(param)
        size += own
    return list(parts)


def plan_layouts(
    params: Sequence[ParamSpec], itemsize: int, world_size: int, policy: LayoutPolicy | None = None
) -> tuple[BucketLayout, ...]:
    """Lay parameters out in as few buckets as the padding bound allows; usually one.

    What cannot be cut for longest comes first (it is the hardest to place), otherwise the order given is kept. A pure function of
    its arguments: every rank, and every later run, finds the same layout.

    Args:
        params: parameters that share a dtype, ``requires_grad`` and a data-parallel group.
        itemsize: bytes per element of the compute dtype.
        world_size: number of ranks to shard over.
        policy: padding bound and alignment.

    Returns:
        Layouts that hold every parameter exactly once; ``()`` for no parameters.

    Time: O(parameters x log padding), independent of ``world_size``.
    """
    policy = policy or LayoutPolicy()
    if not params:
        return ()
    names = [p.name for p in params]
    if len(set(names)) < len(names):
        raise ValueError(f"parameter names must be unique in a bucket, got {names}")
    ordered = sorted(params, key=lambda p: -p.atom_numel)
    return tuple(_plan(ordered, itemsize, world_size, policy))


def _plan(params: Sequence[ParamSpec], itemsize: int, world_size: int, policy: LayoutPolicy) -> Iterator[BucketLayout]:
    layout = _fit(params, itemsize, world_size, policy)
    if layout is None and any(p.whole for p in params):
        params = sorted((replace(p, whole=False) for p in params), key=lambda p: -p.row_numel)
        layout = _fit(params, itemsize, world_size, policy)
    if layout is not None:
        yield layout
        return
    for part in _split(params):
        yield from _plan(part, itemsize, world_size, policy)


def _split(params: Sequence[ParamSpec]) -> tuple[Sequence[ParamSpec], Sequence[ParamSpec]]:
    """Part the row length that holds the most elements, and vectors with it, from the rest; else halve."""
    weight: dict[int, int] = {}
    for p in params:
        if p.row_numel > 1:
            weight[p.row_numel] = weight.get(p.row_numel, 0) + p.numel
    if len(weight) > 1:
        heaviest = max(weight, key=lambda row: (weight[row], row))
        together = [p for p in params if p.row_numel in (heaviest, 1, 0)]
        return together, [p for p in params if p.row_numel not in (heaviest, 1, 0)]
    return params[: len(params) // 2], params[len(params) // 2 :]


def _fit(params: Sequence[ParamSpec], itemsize: int, world_size: int, policy: LayoutPolicy) -> BucketLayout | None:
    """One bucket for all of ``params`` within the padding bound, or None (never None for a single parameter)."""
    content = sum(p.numel for p in params)
    longest = max(policy.indivisible(p.row_numel) for p in params)
    size = (content * itemsize, longest * itemsize, world_size)
    align = max(policy.alignment_bytes // itemsize, policy.block_numel)
    for limit in (policy.goal(*size), policy.limit(*size)):
        # Shards start on the same alignment as parameters if the bound allows, else on less, down to one block.
        shard_align = align
        while shard_align >= policy.block_numel:
            found = _fit_shards(params, world_size, content, align, shard_align, limit // itemsize)
            if found is not None:
                shard_numel, offsets = found
                slots = tuple(Slot(p.name, p.shape, o) for p, o in zip(params, offsets, strict=True))
                return BucketLayout(itemsize, world_size, shard_numel, slots, policy.alignment_bytes)
            shard_align //= 2
    return None


def _fit_shards(
    params: Sequence[ParamSpec], world_size: int, content: int, align: int, shard_align: int, limit: int
) -> tuple[int, list[int]] | None:
    """The first shard length, among multiples of ``shard_align``, for which everything fits within the bound."""
    target = -(-content // world_size)
    growth = 1
    while True:
        target = -(-target // shard_align) * shard_align
        # A parameter longer than a shard can meet two boundaries or more: these are a shard apart, so that
        # its rows must divide the shard.
        step = math.lcm(shard_align, *{p.atom_numel for p in params if p.numel > target and p.atom_numel})
        shard_numel = -(-target // step) * step
        if shard_numel * world_size - content > limit:
            return None
        offsets = _place_all(params, shard_numel, align)
        if offsets is not None and (not offsets or offsets[-1] + params[-1].numel <= shard_numel * world_size):
            return shard_numel, offsets
        target = shard_numel + growth * step
        growth *= 2


def _place_all(params: Sequence[ParamSpec], shard_numel: int, align: int) -> list[int] | None:
    offsets, end = [], 0
    for p in params:
        offset = _place(end, p.numel, p.atom_numel, shard_numel, align)
        if offset is None:
            return None
        offsets.append(offset)
        end = offset + p.numel
    return offsets


def _place(start: int, numel: int, atom: int, shard_numel: int, align: int) -> int | None:
    """The first aligned offset at or after ``start`` where no shard boundary cuts an atom; None if there is none in three shards.

    Offsets with an atom's border on boundary ``b`` solve ``offset = b (mod atom)``; the Chinese remainder theorem joins
    that with ``offset = 0 (mod align)``. Three shards are looked at: the one that ``start`` is in, and two that begin afresh. Later
    ones have other places only where shards are no multiple of ``align``, and longer shards are tried then.
    """
    offset = -(-start // align) * align
    if atom <= 1 or numel == 0:
        return offset
    for _ in range(3):
        boundary = (offset // shard_numel + 1) * shard_numel
        if offset + numel <= boundary:
            return offset
        on_border = _first_congruent(offset, align, boundary, atom)
        if on_border is not None and on_border <= boundary and not _cuts_a_row(on_border, numel, atom, shard_numel):
            return on_border
        offset = -(-boundary // align) * align
    return None


def _first_congruent(start: int, align: int, remainder: int, modulus: int) -> int | None:
    """The least ``x >= start`` with ``x = 0 (mod align)`` and ``x = remainder (mod modulus)``."""
    common = math.gcd(align, modulus)
    if remainder % common:
        return None
    reduced = modulus // common
    first = align * (remainder // common * pow(align // common, -1, reduced) % reduced)
    period = align * reduced
    return first + max(-(-(start - first) // period), 0) * period


def _cuts_a_row(offset: int, numel: int, row: int, shard_numel: int) -> bool:
    if row <= 1 or not shard_numel:
        return False
    first = (offset // shard_numel + 1) * shard_numel
    end = offset + numel
    if first >= end:
        return False
    meets_two = first + shard_numel < end
    return (first - offset) % row != 0 or (meets_two and shard_numel % row != 0)


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
