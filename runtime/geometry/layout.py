"""Layout of a unit's parameters in one flat bucket, and the rows of each parameter that every rank owns.

Plain data: no torch, no process group. Everything here is a closed form of (rank, world size). A plan for 65,536 ranks
costs the same as a plan for 8, and every rank computes the same layout without communication.

Words
    bucket      one flat tensor of ``world_size * shard_numel`` elements
    slot        the place of one parameter in its bucket
    row         one index of dimension 0 of a parameter; a vector's rows are its elements, a scalar has one row.
                If rows of a stack of matrices (experts ``[E, H, F]``) would take too much padding, one index of its
                first dimensions together: E * H rows of F elements, so that a shard may begin and end inside an expert
    shard       a rank's slice ``[rank * shard_numel, (rank + 1) * shard_numel)`` of the bucket

Invariants, checked when a layout is constructed
    * every parameter is contiguous in its bucket and starts on a multiple of ``ALIGNMENT_BYTES``,
      so that compute reads it in place, at full vector width;
    * a shard boundary never cuts a row, so that every rank's part of a parameter is an ordinary tensor;
    * padding is at most ``LayoutPolicy.limit``. Parameters whose rows do not fit together get separate buckets
      (Megatron-FSDP pads to the least common multiple of their rows: 1,032,192 elements per rank for DeepSeek-V3).

A worked example: a ``Linear(8, 6)`` in float32 on two ranks, with the alignment lowered to 16 bytes (4 elements) ::

    >>> policy = LayoutPolicy(alignment_bytes=16)
    >>> (layout,) = plan_layouts([ParamSpec("weight", (6, 8)), ParamSpec("bias", (6,))], 4, world_size=2, policy=policy)
    >>> layout.shard_numel, layout.numel, layout.padding
    (32, 64, 10)
    >>> [(slot.name, slot.offset) for slot in layout.slots]     # 48 weights, then 6 biases
    [('weight', 0), ('bias', 48)]
    >>> layout.rows(0, rank=0), layout.rows(0, rank=1)          # 32 elements are 4 whole rows of 8
    (range(0, 4), range(4, 6))
    >>> layout.rows(1, rank=0), layout.rows(1, rank=1)          # the bias lies in rank 1's shard
    (range(0, 0), range(0, 6))

27 elements per rank would hold the 54 elements without padding, but would cut the fourth row of the weight.

Two experts of 6 rows on three ranks: an expert on each of two ranks would leave the third one empty, and pad by half ::

    >>> policy = LayoutPolicy(alignment_bytes=16, free_padding_bytes=0)
    >>> (layout,) = plan_layouts([ParamSpec("experts", (2, 6, 8))], 4, world_size=3, policy=policy)
    >>> layout.slots[0].row_dims, layout.slots[0].num_rows, layout.padding
    (2, 12, 0)
    >>> layout.rows(0, rank=1)                                  # the end of the first expert, the start of the second
    range(4, 8)
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

ALIGNMENT_BYTES = 256
"""Alignment of a parameter inside its bucket, in bytes. The CUDA allocator aligns separate tensors to 256 bytes, so
kernels that check pointers (cuBLAS wants 16 bytes, TMA 128) cannot tell a bucketed parameter from an ordinary one."""


@dataclass(frozen=True)
class LayoutPolicy:
    """The numbers that control bucket layouts.

    Args:
        alignment_bytes: Parameters start at multiples of this many bytes in their bucket. A power of two.
        max_padding: Goal for the padding of a bucket, as a fraction of its contents. One row (at least 16 bytes) per
            rank is always allowed.
        max_stack_padding: The same for buckets that hold stacks of matrices, if that is less. They are large, so that
            more collectives are less of a cost.
        free_padding_bytes: Parameters that miss this goal together are split into several buckets, unless the padding
            is below this many bytes. The default, 1 MiB, is what a 50 GB/s link moves in the 20 us that launching
            another collective costs. Below it, a second bucket costs more than the padding it saves.
        cuts_matrices: Whether a shard may begin and end inside a matrix of a stack ``[E, H, F]``, if less padding is
            needed then.
        block_numel: Parameters and shards start at multiples of this many elements, so that shard boundaries never cut
            a block of an optimizer that quantizes its state in blocks. A power of two.
        bucket_bytes: A unit whose gathered size exceeds this is split into several buckets, in the order in which its
            modules were constructed. None: a unit is one bucket, as far as padding allows.
        unit_bytes: Units whose gathered size is below this are joined with their neighbors until they reach it; see
            :func:`.units.join`. None: units are not joined.
        by_parameter: Every parameter has a bucket of its own.
    """

    alignment_bytes: int = ALIGNMENT_BYTES
    max_padding: float = 0.02
    max_stack_padding: float = 0.01
    free_padding_bytes: int = 1 << 20
    cuts_matrices: bool = True
    block_numel: int = 1
    bucket_bytes: int | None = None
    unit_bytes: int | None = None
    by_parameter: bool = False

    def __post_init__(self) -> None:
        for name in ("bucket_bytes", "unit_bytes"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        for name in ("alignment_bytes", "block_numel"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if min(self.max_padding, self.max_stack_padding, self.free_padding_bytes) < 0:
            raise ValueError(f"a padding bound cannot be negative: {self}")

    def indivisible(self, row_numel: int) -> int:
        """Fewest elements that are both whole rows and whole blocks."""
        return math.lcm(max(row_numel, 1), self.block_numel)

    def goal(self, content_bytes: int, row_bytes: int, world_size: int) -> int:
        """Goal for a bucket's padding, in bytes; ``row_bytes`` is the size of the largest indivisible run."""
        return max(int(self.max_padding * content_bytes), world_size * max(row_bytes, _MIN_SHARD_ALIGNMENT_BYTES))

    def limit(self, content_bytes: int, row_bytes: int, world_size: int) -> int:
        """Padding above which a bucket is split, in bytes."""
        return max(self.goal(content_bytes, row_bytes, world_size), self.free_padding_bytes)


_MIN_SHARD_ALIGNMENT_BYTES = 16  # below this, collectives fall off a cliff (NCCL: 13.4 -> 1.1 GB/s, nccl#413)


@dataclass(frozen=True)
class ParamSpec:
    """A parameter to be placed in a bucket.

    Args:
        name: Name, unique in its unit.
        shape: Global shape.
        whole: Whether one rank should own the whole parameter, if the padding bound allows. Muon needs whole matrices.
        row_dims: Number of leading dimensions whose indices, taken together, are rows. A scalar has one row all the
            same.
        is_complex: Whether it is a complex parameter, whose elements are pairs of real ones: the last dimension of
            ``shape``.
    """

    name: str
    shape: tuple[int, ...]
    whole: bool = field(default=False, kw_only=True)
    row_dims: int = field(default=1, kw_only=True)
    is_complex: bool = field(default=False, kw_only=True)

    @property
    def param_shape(self) -> tuple[int, ...]:
        """Global shape of the parameter, in elements of its own dtype."""
        return self.shape[:-1] if self.is_complex else self.shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[: self.row_dims])

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row."""
        return self.shape[self.row_dims :]

    @property
    def row_numel(self) -> int:
        """Elements of one row; 0 if one of its dimensions is 0."""
        return math.prod(self.row_shape)

    @property
    def shortest_row(self) -> int:
        """Elements of the shortest row that the parameter can have: one index of all dimensions but the last."""
        return self.row_numel if len(self.shape) < 3 or not self.numel else self.shape[-1]

    @property
    def atom_numel(self) -> int:
        """Elements of the largest run that no shard boundary may cut."""
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
    """The place of each parameter in a bucket, and the division of the bucket into equal shards.

    Args:
        itemsize: Bytes per element of the compute dtype. Offsets are in elements, so the same layout serves the shards
            in the main dtype.
        world_size: Number of ranks that the bucket is sharded over.
        shard_numel: Elements of one rank's shard.
        slots: One slot per parameter, sorted by offset.
        alignment_bytes: Every slot starts at a multiple of this many bytes.

    Raises:
        ValueError: The slots overlap, are misaligned or extend beyond the bucket, or a shard boundary cuts a row.
    """

    itemsize: int
    world_size: int
    shard_numel: int
    slots: tuple[Slot, ...]
    alignment_bytes: int = ALIGNMENT_BYTES
    signature: str = field(init=False, compare=False, repr=False)
    """A digest of everything but the names. Buckets with equal signatures can share compiled code."""
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
        slots = [(slot.shape, slot.row_dims, slot.offset) for slot in self.slots]
        geometry = (self.itemsize, self.world_size, self.shard_numel, slots)
        object.__setattr__(self, "signature", _digest(geometry))
        object.__setattr__(self, "fingerprint", _digest((geometry, [s.name for s in self.slots])))

    @functools.cached_property
    def numel(self) -> int:
        """Elements of the gathered bucket, padding included."""
        return self.world_size * self.shard_numel

    @property
    def padding(self) -> int:
        """Elements of the bucket that belong to no parameter."""
        return self.numel - sum(slot.numel for slot in self.slots)

    def rows(self, index: int, rank: int) -> range:
        """The rows of parameter ``index`` that ``rank`` owns; an empty range if it owns none."""
        slot = self.slots[index]
        if not slot.row_numel:  # no elements: rank 0 owns all rows, so that exactly one rank does
            return range(slot.num_rows if rank == 0 else 0)
        start, stop = (
            min(max(boundary * self.shard_numel - slot.offset, 0), slot.numel) // slot.row_numel
            for boundary in (rank, rank + 1)
        )
        return range(start, stop)

    def shard_offset(self, index: int, rank: int) -> int:
        """Offset of parameter ``index`` in the shard of ``rank``, in elements; 0 if the rank owns none of it."""
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
    """Split consecutive parameters into parts of at most ``most`` bytes; a larger parameter is a part of its own.

    Args:
        itemsize: Bytes per element.
        most: Size limit of a part, in bytes. None: all parameters form one part.
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


def row_by_row(param: ParamSpec, itemsize: int, world_size: int) -> BucketLayout:
    """Lay out a parameter alone, with ``ceil(rows / ranks)`` rows per rank, as ``torch.chunk`` cuts it."""
    slot = Slot(param.name, param.shape, 0)
    return BucketLayout(itemsize, world_size, -(-param.num_rows // world_size) * param.row_numel, (slot,))


def plan_layouts(
    params: Sequence[ParamSpec], itemsize: int, world_size: int, policy: LayoutPolicy | None = None
) -> tuple[BucketLayout, ...]:
    """Lay out parameters in as few buckets as the padding bound allows; usually one.

    Parameters with the largest atoms come first, because they are the hardest to place. Otherwise the given order is
    kept. The result is a pure function of the arguments: every rank, and every later run, computes the same layout.

    Args:
        params: Parameters that share a dtype, ``requires_grad`` and a data-parallel group.
        itemsize: Bytes per element of the compute dtype.
        world_size: Number of ranks to shard over.
        policy: Padding bound and alignment.

    Returns:
        Layouts that together hold every parameter exactly once; ``()`` for no parameters.

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
    for attempt in _attempts(params, policy):
        layout = _fit(attempt, itemsize, world_size, policy, _limits(attempt, itemsize, world_size, policy))
        if layout is not None:
            yield layout
            return
    for part in _split(params):
        yield from _plan(part, itemsize, world_size, policy)


def _limits(params: Sequence[ParamSpec], itemsize: int, world_size: int, policy: LayoutPolicy) -> tuple[int, int]:
    """Goal and limit for the padding of one bucket of these parameters, in elements."""
    cut = [p for p in params if policy.cuts_matrices and len(p.shape) > 2 and not p.whole]
    row = max(policy.indivisible(p.shortest_row if p in cut else p.row_numel) for p in params)
    if cut:
        policy = replace(policy, max_padding=min(policy.max_padding, policy.max_stack_padding))
        lengths = {p.shortest_row for p in params if p.shortest_row > 1}
        row = row if len(lengths) <= 1 else 1  # separate buckets may do without a row per rank
    size = (sum(p.numel for p in params) * itemsize, row * itemsize, world_size)
    return policy.goal(*size) // itemsize, policy.limit(*size) // itemsize


def _attempts(params: Sequence[ParamSpec], policy: LayoutPolicy) -> Iterator[Sequence[ParamSpec]]:
    """Yield the parameters as they are to be divided if possible, then with ever smaller atoms."""
    yield params
    if any(p.whole for p in params):
        params = [replace(p, whole=False) for p in params]
        yield sorted(params, key=lambda p: -p.row_numel)
    if not policy.cuts_matrices:
        return
    longest = max(p.shortest_row for p in params)
    for row_dims in range(2, max(len(p.shape) for p in params)):
        # Shorter rows than another parameter's, whose rows are not cut, would not help.
        params = [
            replace(p, row_dims=row_dims) if p.row_numel > longest and row_dims < len(p.shape) else p for p in params
        ]
        yield sorted(params, key=lambda p: -p.row_numel)


def _split(params: Sequence[ParamSpec]) -> tuple[Sequence[ParamSpec], Sequence[ParamSpec]]:
    """Separate the row length that holds the most elements, together with all vectors, from the rest; else halve."""
    weight: dict[int, int] = {}
    for p in params:
        if p.shortest_row > 1:
            weight[p.shortest_row] = weight.get(p.shortest_row, 0) + p.numel
    if len(weight) > 1:
        heaviest = max(weight, key=lambda row: (weight[row], row))
        together = [p for p in params if p.shortest_row in (heaviest, 1, 0)]
        return together, [p for p in params if p.shortest_row not in (heaviest, 1, 0)]
    return params[: len(params) // 2], params[len(params) // 2 :]


def _fit(
    params: Sequence[ParamSpec], itemsize: int, world_size: int, policy: LayoutPolicy, limits: Sequence[int]
) -> BucketLayout | None:
    """One bucket for all of ``params`` within the first limit for its padding that can be kept, or None.

    Never None for a single parameter with its shortest rows.
    """
    content = sum(p.numel for p in params)
    align = max(policy.alignment_bytes // itemsize, policy.block_numel)
    for limit in limits:
        # Shards get the same alignment as parameters if the bound allows, else a smaller one, down to one block.
        shard_align = align
        while shard_align >= policy.block_numel:
            found = _fit_shards(params, world_size, content, align, shard_align, limit)
            if found is not None:
                shard_numel, offsets = found
                slots = tuple(
                    Slot(p.name, p.shape, o, row_dims=p.row_dims, is_complex=p.is_complex)
                    for p, o in zip(params, offsets, strict=True)
                )
                return BucketLayout(itemsize, world_size, shard_numel, slots, policy.alignment_bytes)
            shard_align //= 2
    return None


def _fit_shards(
    params: Sequence[ParamSpec], world_size: int, content: int, align: int, shard_align: int, limit: int
) -> tuple[int, list[int]] | None:
    """Find the first shard length, among multiples of ``shard_align``, for which everything fits within the bound."""
    target = -(-content // world_size)
    growth = 1
    while True:
        target = -(-target // shard_align) * shard_align
        # A parameter longer than a shard can cross two or more boundaries. These are one shard apart, so its rows
        # must divide the shard.
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
    """Find the first aligned offset at or after ``start`` where no shard boundary cuts an atom; None if three shards
    have none.

    Offsets that put an atom's border on boundary ``b`` solve ``offset = b (mod atom)``. The Chinese remainder theorem
    joins this with ``offset = 0 (mod align)``. The search covers three shards: the one that contains ``start`` and the
    two after it, which start empty. Later shards offer other offsets only if the shard size is not a multiple of
    ``align``; the caller then tries longer shards.
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
