"""Inspecting checkpoints, comparing two, and copying one with entries renamed or removed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from mfsdp_compile.checkpoint.dcp_reader import CheckpointReader
from mfsdp_compile.checkpoint.dcp_writer import CheckpointWriter
from mfsdp_compile.checkpoint.errors import CheckpointError
from mfsdp_compile.checkpoint.manifest import MANIFEST
from mfsdp_compile.runtime.untrusted_files import FileRefused, copy_inside, inside, links_inside, read_json

from .conversion_plan import ConversionPlan, OutputEntry
from .from_torch_dist import load_common

GROUP_OPTIONS = "optimizer.param_to_group_meta."
"""Prefix of numerous, similar keys, which :func:`describe` only counts."""

_COMPARED_ELEMENTS = 1 << 22
"""Elements to compare at a time, in double precision: 32 MiB for each of a few temporaries."""


def describe(directory: Path, pattern: str = "", show_groups: bool = False) -> Iterator[str]:
    """Describe a checkpoint line by line: format, common state, tensors with shape and dtype, and Megatron's notes.

    Args:
        directory: A DCP directory. ``metadata.json`` and ``common.pt`` are optional.
        pattern: A regular expression. Only keys that match it anywhere are listed.
        show_groups: Also list the options of parameters' groups, which are otherwise only counted.
    """
    reader = CheckpointReader(directory)
    if (directory / "metadata.json").is_file():
        yield f"metadata.json: {_json(directory / 'metadata.json')}"
    for key, value in load_common(directory / "common.pt").items():
        yield f"common.pt: {key} = {_short(value)}"
    try:
        matches = re.compile(pattern).search
    except re.error as error:
        raise CheckpointError(f"{pattern!r} is not a regular expression: {error}") from error
    tensors = [key for key in reader if reader.is_tensor(key)]
    total = sum(reader.numel(key) for key in tensors)
    nbytes = sum(reader.numel(key) * reader.dtype(key).itemsize for key in tensors)
    others = len(reader.keys()) - len(tensors)
    yield f"{len(tensors)} tensors, {total:,} elements, {nbytes:,} bytes; {others} other values"
    counted = 0
    for key in reader:
        if not matches(key):
            continue
        if key.startswith(GROUP_OPTIONS) and not show_groups:
            counted += 1
        elif reader.is_tensor(key):
            notes = f"  {reader.mcore_data(key)}" if reader.mcore_data(key) else ""
            yield f"{key}  {list(reader.shape(key))} {str(reader.dtype(key)).removeprefix('torch.')}{notes}"
        else:
            yield f"{key}  (not a tensor)"
    if counted:
        yield f"{counted} options of parameters' groups (--groups lists them)"


def parse_index(text: str) -> tuple[int | slice, ...]:
    """Parse text such as ``0, :3, 5:`` into an index of a tensor.

    Raises:
        ValueError: If the text does not have this form.
    """
    if not re.fullmatch(r"\[?\s*(-?\d+|-?\d*:-?\d*(:\d*)?)(\s*,\s*(-?\d+|-?\d*:-?\d*(:\d*)?))*\s*\]?", text.strip()):
        raise ValueError(f"{text!r} is not a slice such as '0, :3'")
    parts: list[int | slice] = []
    for part in text.strip("[] ").split(","):
        numbers = [int(n) if n.strip() else None for n in part.split(":")]
        parts.append(slice(*numbers) if len(numbers) > 1 else int(part))
    return tuple(parts)


def show(directory: Path, key: str, index: str | None = None) -> str:
    """Return an entry, or a part of it, as text.

    Raises:
        CheckpointError: If there is no such entry, or no such part.
    """
    reader = CheckpointReader(directory)
    if key not in reader:
        near = [other for other in reader if key in other][:3]
        raise CheckpointError(f"{directory} has no {key!r}." + (f" It has: {', '.join(near)}" if near else ""))
    if not reader.is_tensor(key):
        if index is not None:
            raise CheckpointError(f"{key} is not a tensor: it has no part {index}")
        return f"{key}:\n{reader.value(key)!r}"
    try:
        wanted = parse_index(index) if index is not None else ()
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    leading = []
    for step in wanted:  # entries excluded by leading numbers need not be read
        if not isinstance(step, int) or step < 0:
            break
        leading.append(step)
    try:
        tensor = reader.tensor(key, leading)[wanted[len(leading) :]]
    except IndexError as error:
        raise CheckpointError(
            f"{key} has shape {list(reader.shape(key))}, so there is no part {index}: {error}"
        ) from error
    return f"{key}  {list(reader.shape(key))} {reader.dtype(key)}\n{tensor!r}"


def compare(
    first: Path, second: Path, atol: float = 0.0, rtol: float = 0.0, advance: Callable[[int], None] = lambda _: None
) -> list[str]:
    """Compare two checkpoints. Returns a line for each key that differs.

    Tensors are equal if all elements are within ``atol + rtol * |second|``. With the defaults, they must be identical,
    and NaNs at the same positions are equal.
    """
    a, b = CheckpointReader(first), CheckpointReader(second)
    lines = [f"{key}: only in {first}" for key in a if key not in b]
    lines += [f"{key}: only in {second}" for key in b if key not in a]
    for key in a:
        if key in b:
            lines += _difference(a, b, key, atol, rtol)
            advance(a.numel(key) * a.dtype(key).itemsize if a.is_tensor(key) else 0)
    return lines


def _difference(a: CheckpointReader, b: CheckpointReader, key: str, atol: float, rtol: float) -> Iterator[str]:
    if a.is_tensor(key) != b.is_tensor(key):
        yield f"{key}: a tensor in {(a if a.is_tensor(key) else b).directory} only"
        return
    if not a.is_tensor(key):
        if a.raw(key) != b.raw(key) and repr(x := a.value(key)) != repr(y := b.value(key)):
            yield f"{key}: {_short(x)} and {_short(y)}"
        return
    if a.shape(key) != b.shape(key):
        yield f"{key}: shapes {list(a.shape(key))} and {list(b.shape(key))}"
        return
    if a.dtype(key) != b.dtype(key):
        yield f"{key}: {a.dtype(key)} and {b.dtype(key)}"
        return
    x, y = a.tensor(key).reshape(-1), b.tensor(key).reshape(-1)
    if torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
        return
    wide = torch.complex128 if x.dtype.is_complex else torch.float64
    many, odd, largest = 0, 0, 0.0
    for p, q in zip(x.split(_COMPARED_ELEMENTS), y.split(_COMPARED_ELEMENTS), strict=True):
        p, q = p.to(wide), q.to(wide)
        many += int((~torch.isclose(p, q, rtol=rtol, atol=atol, equal_nan=True)).sum())
        odd += int((p.isnan() != q.isnan()).sum())
        # The distance of equal infinities is 0, that of other infinities is infinite.
        distance = torch.where(p == q, 0.0, (p - q).abs()).nan_to_num(0.0, posinf=float("inf"))
        largest = max(largest, float(distance.max()))
    if many:
        nans = f"; {odd} are NaN in one of them" if odd else ""
        yield f"{key}: {many} of {x.numel()} elements differ, by at most {largest:.6g}{nans}"


def plan_edit(source: Path, rename: Sequence[tuple[str, str]] = (), remove: Sequence[str] = ()) -> ConversionPlan:
    """Plan a copy of a checkpoint with keys renamed or entries removed. Data is copied chunk by chunk, as it is stored.

    Args:
        source: A DCP directory.
        rename: Pairs of regular expression and replacement. The first one that matches a key is applied to it.
        remove: Regular expressions. Entries whose keys match one are left out. Empty: nothing is removed.

    Raises:
        CheckpointError: If two keys would become the same, or a pattern is not a regular expression or matches no key.
    """
    reader, plan = CheckpointReader(source), ConversionPlan()
    try:
        removing = [re.compile(pattern) for pattern in remove]
        renaming = [(re.compile(pattern), replacement) for pattern, replacement in rename]
        for pattern in [*removing, *(pattern for pattern, _ in renaming)]:
            if not any(pattern.search(key) for key in reader):
                raise CheckpointError(f"{source} has no key in which {pattern.pattern!r} is found.")
        kept: dict[str, str] = {}
        for key in reader:
            if any(pattern.search(key) for pattern in removing):
                plan.left_out.append((key, "removed"))
                continue
            new = next((pattern.sub(text, key) for pattern, text in renaming if pattern.search(key)), key)
            if new in kept:
                raise CheckpointError(f"{source}: {kept[new]} and {key} would both be named {new!r}.")
            kept[new] = key
    except re.error as error:
        raise CheckpointError(f"not a regular expression: {error.pattern!r}: {error}") from error
    for new, key in kept.items():
        tensor = reader.is_tensor(key)
        shape, dtype = (tuple(reader.shape(key)), reader.dtype(key)) if tensor else (None, None)
        plan.moves.append(OutputEntry(new, (key,), shape, dtype))

    try:
        extras = {
            path.relative_to(source).as_posix(): path
            for path in links_inside(source)
            if path.parent != source
            or not (path.suffix == ".distcp" or path.name.startswith(".") or path.name == MANIFEST)
        }
    except FileRefused as error:
        raise CheckpointError(f"{source} cannot be copied: {error}.") from None

    def write(out: Path, advance: Callable[[int], None]) -> None:
        writer = CheckpointWriter(out)
        paths = reader.metadata.planner_data or {}
        for new, key in kept.items():
            if new == key in paths:
                writer.paths[key] = paths[key]
            if not reader.is_tensor(key):
                writer.add_bytes(new, reader.raw(key))
                continue
            writer.add_chunks(new, reader.shape(key), reader.dtype(key), reader.chunks(key))
            if key in reader.metadata.mcore_data:  # type: ignore[attr-defined]
                writer.mcore_data[new] = reader.mcore_data(key)
            advance(reader.numel(key) * reader.dtype(key).itemsize)
        copy_inside(source, extras, out)
        writer.close()

    plan.write = write
    return plan


def _json(path: Path) -> str:
    try:
        return json.dumps(read_json(inside(path.parent, path.name)))
    except FileRefused as error:
        raise CheckpointError(f"{path} is damaged ({error}). Copy it again.") from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text):,} characters)"
