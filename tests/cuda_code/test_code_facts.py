"""What reads generated code finds what it looks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from code_facts import facts
from recording import Event, Recording, Span, record
from torch._subclasses.fake_tensor import FakeTensorMode
from triton_text import read_kernel

_c10d = "_c10d_functional"


def kernel(body: str, parameters: str = "in_ptr0, in_ptr1, out_ptr0, xnumel, XBLOCK : tl.constexpr") -> Any:
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    return read_kernel("named", f"import triton.language as tl\ndef named({parameters}):\n{lines}\n")


@pytest.mark.parametrize(
    ("body", "moves", "fills"),
    [
        ("tmp0 = tl.load(in_ptr0 + (x0), None).to(tl.float32)\ntl.store(out_ptr0 + (x0), tmp0, None)", True, False),
        ("tmp0 = 0.0\ntl.store(out_ptr0 + (x0), tmp0, None)", True, True),
        ("tmp0 = tl.load(in_ptr0 + (x0))\ntmp1 = tmp0 * tmp0\ntl.store(out_ptr0 + (x0), tmp1)", False, False),
        (
            "tmp0 = tl.load(in_ptr0 + (x0))\ntmp1 = x0 < 4\ntmp2 = tl.where(tmp1, tmp0, 0.0)\n"
            "tl.store(out_ptr0 + (x0), tmp2)",
            True,
            False,
        ),
        (
            "tmp0 = tl.load(in_ptr0 + (x0))\ntmp1 = tmp0 < 4\ntmp2 = tl.where(tmp1, tmp0, 0.0)\n"
            "tl.store(out_ptr0 + (x0), tmp2)",
            False,
            False,
        ),
        (
            "tmp0 = tl.load(in_ptr0 + (x0))\ntmp1 = tl.load(in_ptr1 + (tmp0))\ntl.store(out_ptr0 + (x0), tmp1)",
            False,
            False,
        ),
        ("tmp0 = tl.load(in_ptr0 + (x0))\ntl.atomic_add(out_ptr0 + (x0), tmp0, None)", False, False),
    ],
    ids=["cast", "fill", "product", "choice by position", "choice by value", "lookup", "atomic"],
)
def test_kernels_that_compute_nothing(body: str, moves: bool, fills: bool) -> None:
    found = kernel(body)
    assert (found.moves, found.fills) == (moves, fills)
    assert set(found.stores) == {"out_ptr0"}


def test_equal_kernels_have_equal_sources() -> None:
    source = "def {0}(out_ptr0, xnumel):\n    tl.store(out_ptr0 + (x0), 0.0)\n"
    first, second = (read_kernel(name, source.format(name)) for name in ("triton_1", "triton_2"))
    assert first.source == second.source


def span(storage: int, start: int = 0, stop: int = 8) -> Span:
    return Span(storage, start, stop)


def races(*events: Event) -> list[str]:
    recording = Recording("forward", "", events=list(events))
    (phase,) = facts([recording], {"forward": _NOTHING})["phases"].values()
    return phase["races"]


class _Nothing:
    points: tuple[()] = ()
    buckets: dict[str, str] = {}  # noqa: RUF012
    slots: dict[int, Any] = {}  # noqa: RUF012
    padding = casts = 0


_NOTHING: Any = _Nothing()
START = Event(f"{_c10d}.all_gather_into_tensor.default", (span(0),), (span(1, 0, 64),))
WAIT = Event(f"{_c10d}.wait_tensor.default", (span(1, 0, 64),), ())
READ = Event("aten.mm.out", (span(1, 8, 16),), (span(2),))


def test_races() -> None:
    assert races(START, WAIT, READ) == []
    assert races(START, READ, WAIT) == [f"aten.mm.out uses the result of {START.name} before it is awaited"]
    assert races(START, Event("aten.mm.out", (), (span(0, 4, 12),)), WAIT) == [
        f"aten.mm.out writes to what {START.name} sends"
    ]
    assert races(START, Event("aten.mm.out", (), (span(0, 8, 16),)), WAIT) == []  # beside it
    assert races(START) == [f"{START.name} is not awaited"]


def test_syncs() -> None:
    """An operator that waits is found when it is called, and a call in the code by its text."""

    class Module:
        pass

    def call(args: list[Any]) -> tuple[Any, ...]:
        return (args[0].cpu(),)

    source = "def call(args):\n    # .cpu()\n    return (args[0].cpu(),)\n"
    with FakeTensorMode(allow_non_fake_inputs=True):
        recording = record("forward", source, Module(), call, [torch.empty(2, device="meta")])  # type: ignore[arg-type]
    (phase,) = facts([recording], {"forward": _NOTHING})["phases"].values()
    assert phase["syncs"] == ["aten._to_copy.default from the device to the host", "return (args[0].cpu(),)"]
