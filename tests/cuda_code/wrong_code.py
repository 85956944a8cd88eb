"""Changes of generated code that make it wrong, by name: what :mod:`compute` must notice.

Each changes the wrapper of one phase, or every kernel that it fits.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_WAIT = re.compile(r"^\s+torch\.ops\._c10d_functional\.wait_tensor\.default\((\w+)\)$")
_GATHER = re.compile(
    r"^\s+(\w+) = torch\.ops\.(?:_c10d_functional\.all_gather_into_tensor|mfsdp\.gather_into_buffer)\.default\("
)
_QUANTIZED = re.compile(r" = torch\.ops\.mfsdp\.wait_quantized\.default\((\w+)")
_LAUNCH = re.compile(r"^\s+(\w+)\.run\(|^\s+extern_kernels\.")
_REUSE = re.compile(r"^\s+(\w+) = (.*?); del (\w+)  # reuse$")


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"\b{name}\b")


def _waits(lines: list[str]) -> list[tuple[int, str]]:
    """Waits for gathers: their lines and the names of the results."""
    gathered = {m[1] for line in lines if (m := _GATHER.match(line))}
    return [(n, m[1]) for n, line in enumerate(lines) if (m := _WAIT.match(line)) and m[1] in gathered]


def _late_wait(lines: list[str]) -> list[str]:
    """Move the second wait after the first launch that uses its result."""
    at, name = _waits(lines)[1]
    use = next(n for n in range(at + 1, len(lines)) if _LAUNCH.match(lines[n]) and _word(name).search(lines[n]))
    return [*lines[:at], *lines[at + 1 : use + 1], lines[at], *lines[use + 1 :]]


def _lost_wait(lines: list[str]) -> list[str]:
    """Leave the last wait out."""
    at = [n for n, line in enumerate(lines) if _WAIT.match(line)][-1]
    return [*lines[:at], *lines[at + 1 :]]


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
    raise LookupError("no buffer is used again")


def _early_release(lines: list[str]) -> list[str]:
    """Write to a gathered bucket before the last launch that reads it, as if its memory were used again."""
    _, name = _waits(lines)[0]
    last = [n for n, line in enumerate(lines) if _LAUNCH.match(line) and _word(name).search(line)][-1]
    indent = re.match(r"\s+", lines[last])
    assert indent is not None
    return [*lines[:last], f"{indent[0]}_poison_reused({name})", *lines[last:]]


def _swapped_gathers(lines: list[str]) -> list[str]:
    """Give the first two gathers of equal size each other's shard."""
    first: dict[str, int] = {}
    for at, line in enumerate(lines):
        if (gather := _GATHER.match(line)) is None:
            continue
        result = re.compile(rf"assert_size_stride\({gather[1]}, (\(.*?\))")
        size = next(m[1] for each in lines[at:] if (m := result.search(each)))
        if size in first:
            given = [re.search(r"default\((\w+)", lines[n])[1] for n in (first[size], at)]  # type: ignore[index]
            swapped = [*lines]
            for n, mine, other in ((first[size], *given), (at, *reversed(given))):
                swapped[n] = lines[n].replace(f"({mine}", f"({other}")
            return swapped
        first[size] = at
    raise LookupError("no two gathers of equal size")


def _overwritten_send(lines: list[str]) -> list[str]:
    """Write to what a reduction sends right after it has been started."""
    at = next(n for n, line in enumerate(lines) if "reduce_scatter_tensor.default(" in line)
    name = re.search(r"default\((\w+)", lines[at])[1]  # type: ignore[index]
    indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
    return [*lines[: at + 1], f"{indent}{name}[:1].add_(1.0)", *lines[at + 1 :]]


def _shifted_view(lines: list[str]) -> list[str]:
    """Let a product read its weight one element before its place in the gathered bucket."""
    view = re.compile(r"(reinterpret_tensor\(\w+, \([^)]*\), \([^)]*\), )(\d+)\)")
    for n, line in enumerate(lines):
        for m in view.finditer(line) if "extern_kernels." in line else ():
            if m[2] != "0":
                return [*lines[:n], line.replace(m[0], f"{m[1]}{int(m[2]) - 1})", 1), *lines[n + 1 :]]
    raise LookupError("no view with an offset")


def _early_scales(lines: list[str]) -> list[str]:
    """Read a quantized bucket, in which its scales are, before it has been gathered."""
    at, name = next((n, m[1]) for n, line in enumerate(lines) if (m := _QUANTIZED.search(line)))
    (wait,) = (n for n, each in _waits(lines) if each == name)
    read = lines[at].replace(f"({name}", f"({name}.clone()")  # the operator would wait
    return [*lines[:wait], *lines[wait + 1 : at], read, lines[wait], *lines[at + 1 :]]


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


_WRAPPERS: dict[str, tuple[str, Callable[[list[str]], list[str]]]] = {
    "late wait, forward": ("forward", _late_wait),
    "late wait, backward": ("backward", _late_wait),
    "lost wait": ("backward", _lost_wait),
    "early reuse": ("backward", _early_reuse),
    "early release, forward": ("forward", _early_release),
    "early release, backward": ("backward", _early_release),
    "swapped gathers": ("forward", _swapped_gathers),
    "overwritten send": ("backward", _overwritten_send),
    "shifted view": ("forward", _shifted_view),
    "early scales": ("forward", _early_scales),
}
_KERNELS: dict[str, Callable[[str], str]] = {
    "no mask": _no_mask,
    "offset": _offset,
    "unmasked reduction": _unmasked_reduction,
}
MUTANTS = [*_WRAPPERS, *_KERNELS]


def wrapper(mutant: str, phase: str, source: str) -> str:
    """Return the wrapper of a phase, changed if the mutant is about it."""
    where, change = _WRAPPERS.get(mutant, ("", None))
    return source if change is None or where != phase else "\n".join(change(source.split("\n")))


def kernel(mutant: str, source: str) -> str:
    """Return the source of a kernel, changed if the mutant is about kernels and fits this one."""
    return _KERNELS[mutant](source) if mutant in _KERNELS else source
