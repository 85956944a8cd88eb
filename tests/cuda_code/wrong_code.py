"""Changes of generated code that make it wrong, by name: what :mod:`compute` must notice.

Each changes the code of one phase that calls pieces, or the first piece that it fits, or every kernel that it fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_WAIT = re.compile(r"^    (\w+) = op_wait_tensor\((\w+)\)$")
_GATHER = re.compile(r"^    (\w+) = op_(?:all_gather_into_tensor|gather_into_buffer)\((\w+)")
_REDUCTION = re.compile(r"^    \w+ = op_reduce_scatter_tensor\((\w+)")
_QUANTIZED = re.compile(r"^    \w+ = op_dequantize\((\w+)")
_LAUNCH = re.compile(r"^\s+(\w+)\.run\(|^\s+extern_kernels\.")
_REUSE = re.compile(r"^\s+(\w+) = (.*?); del (\w+)  # reuse$")


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"\b{name}\b")


def _waits(lines: list[str]) -> list[tuple[int, str, str]]:
    """Waits for gathers: their lines, and the names of what they return and of what they await."""
    gathered = {m[1] for line in lines if (m := _GATHER.match(line))}
    return [(n, m[1], m[2]) for n, line in enumerate(lines) if (m := _WAIT.match(line)) and m[2] in gathered]


def _pieces_with(lines: list[str], name: str) -> list[tuple[int, int]]:
    """Calls of pieces that take ``name``: where their arguments are listed, and the calls."""
    listed = [n for n, line in enumerate(lines) if line.startswith("    arguments = [") and _word(name).search(line)]
    return [(n, next(at for at in range(n, len(lines)) if lines[at].endswith("(arguments)"))) for n in listed]


def _late_wait(lines: list[str]) -> list[str]:
    """Move the second wait after the first piece that uses its result."""
    at, name, gathered = _waits(lines)[1]
    _, call = _pieces_with(lines, name)[0]
    late = [f"    {name} = late = {gathered}", *lines[at + 1 : call + 1], "    op_wait_tensor(late)"]
    return [*lines[:at], *late, *lines[call + 1 :]]


def _lost_wait(lines: list[str]) -> list[str]:
    """Leave the last wait out."""
    at, wait = [(n, m) for n, line in enumerate(lines) if (m := _WAIT.match(line))][-1]
    return [*lines[:at], f"    {wait[1]} = {wait[2]}", *lines[at + 1 :]]


def _early_release(lines: list[str]) -> list[str]:
    """Write to a gathered bucket before the last piece that reads it, as if its memory were used again."""
    _, name, _ = _waits(lines)[0]
    at, _ = _pieces_with(lines, name)[-1]
    return [*lines[:at], f"    _poison_reused({name})", *lines[at:]]


def _swapped_gathers(lines: list[str]) -> list[str]:
    """Give the gathers of the two layers each other's shard. The first gather and the last are of the root."""
    first, second = [(n, m[2]) for n, line in enumerate(lines) if (m := _GATHER.match(line))][1:3]
    swapped = [*lines]
    for (at, mine), (_, other) in ((first, second), (second, first)):
        swapped[at] = lines[at].replace(f"({mine}", f"({other}")
    return swapped


def _overwritten_send(lines: list[str]) -> list[str]:
    """Write to what a reduction sends right after it has been started."""
    at, name = next((n, m[1]) for n, line in enumerate(lines) if (m := _REDUCTION.match(line)))
    return [*lines[: at + 1], f"    {name}[:1].add_(1.0)", *lines[at + 1 :]]


def _early_scales(lines: list[str]) -> list[str]:
    """Read a quantized bucket, in which its scales are, before it has been gathered."""
    at, name = next((n, m[1]) for n, line in enumerate(lines) if (m := _QUANTIZED.match(line)))
    read = lines[at].replace(f"({name}", f"({name}.clone()")  # the operator would wait
    return [*lines[:at], read, f"    op_wait_tensor({name})", *lines[at + 1 :]]


def _early_reuse(lines: list[str]) -> list[str]:
    """Use a buffer again before the last launch that reads it, which then reads it by its new name."""
    for at, line in enumerate(lines):
        m = _REUSE.match(line)
        if m is None or "_poison_reused" not in lines[at + 1]:
            continue  # computed in place
        new, old = m[1], m[3]
        uses = [n for n in range(at) if _word(old).search(lines[n]) and _LAUNCH.match(lines[n])]
        if len(uses) < 2 or f"out={old}" in lines[uses[-1]]:
            continue
        renamed = [_word(old).sub(new, each) for each in lines[uses[-1] : at]]
        return [*lines[: uses[-1]], line, lines[at + 1], *renamed, *lines[at + 2 :]]
    return lines


def _shifted_view(lines: list[str]) -> list[str]:
    """Let a product read its weight one element before its place in the gathered bucket."""
    view = re.compile(r"(reinterpret_tensor\(\w+, \([^)]*\), \([^)]*\), )(\d+)\)")
    for n, line in enumerate(lines):
        for m in view.finditer(line) if "extern_kernels." in line else ():
            if m[2] != "0":
                return [*lines[:n], line.replace(m[0], f"{m[1]}{int(m[2]) - 1})", 1), *lines[n + 1 :]]
    return lines


def _no_mask(source: str) -> str:
    """Drop the mask of the first store that has one."""
    store = re.compile(r"(tl\.store\(.*), (?:\w*mask\b(?: & \w*mask\b)*)\)$", re.MULTILINE)
    return store.sub(r"\1, None)", source, count=1)


def _offset(source: str) -> str:
    """Read the last load's value one element further."""
    loads = list(re.finditer(r"tl\.load\((\w+) \+ \(", source))
    if not loads:
        return source
    place = loads[-1].end()
    return f"{source[:place]}1 + {source[place:]}"


def _unmasked_reduction(source: str) -> str:
    """Let a reduction count the lanes beyond its end: give them, and all others, another value."""
    return re.sub(r"= tl\.where\(r0_mask[^,]*, (\w+), 0(?:\.0)?\)", r"= \1 + 1.0", source)


_GRAPHS: dict[str, tuple[str, Callable[[list[str]], list[str]]]] = {
    "late wait, forward": ("forward", _late_wait),
    "late wait, backward": ("backward", _late_wait),
    "lost wait": ("backward", _lost_wait),
    "early release, forward": ("forward", _early_release),
    "early release, backward": ("backward", _early_release),
    "swapped gathers": ("forward", _swapped_gathers),
    "overwritten send": ("backward", _overwritten_send),
    "early scales": ("forward", _early_scales),
}
_PIECES: dict[str, Callable[[list[str]], list[str]]] = {
    "early reuse": _early_reuse,
    "shifted view": _shifted_view,
}
_KERNELS: dict[str, Callable[[str], str]] = {
    "no mask": _no_mask,
    "offset": _offset,
    "unmasked reduction": _unmasked_reduction,
}
MUTANTS = [*_GRAPHS, *_PIECES, *_KERNELS]


def graph(mutant: str, phase: str, source: str) -> str:
    """Return the code of a phase that calls pieces, changed if the mutant is about it."""
    where, change = _GRAPHS.get(mutant, ("", None))
    return source if change is None or where != phase else "\n".join(change(source.split("\n")))


def piece(mutant: str, source: str) -> str:
    """Return the code of a piece that launches kernels, changed if the mutant is about pieces and fits this one."""
    return "\n".join(_PIECES[mutant](source.split("\n"))) if mutant in _PIECES else source


def kernel(mutant: str, source: str) -> str:
    """Return the source of a kernel, changed if the mutant is about kernels and fits this one."""
    return _KERNELS[mutant](source) if mutant in _KERNELS else source
