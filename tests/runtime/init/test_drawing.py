"""Deferred random fills: each rank draws only its own numbers."""

from __future__ import annotations

import copy
import ctypes
import math
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mfsdp_compile.runtime.geometry.layout import ParamSpec, plan_layouts
from mfsdp_compile.runtime.geometry.rows import RowSplit
from mfsdp_compile.runtime.init import deferred_fill
from mfsdp_compile.runtime.init.deferred_fill import DeferredFills
from mfsdp_compile.runtime.init.mersenne import skipped

RANKS = 3


@given(seed=st.integers(0, 2**31), before=st.integers(0, 1300), draws=st.integers(0, 1 << 20))
@settings(deadline=None, max_examples=40)
def test_skipping_is_drawing(seed: int, before: int, draws: int) -> None:
    torch.manual_seed(seed)
    torch.empty(before).uniform_()
    state = torch.get_rng_state()
    torch.empty(draws).uniform_()
    assert torch.equal(skipped(state, draws), torch.get_rng_state())


def test_skipping_adds_up() -> None:
    """Skipping a trillion numbers at once equals skipping them in two steps. So many cannot be drawn."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert torch.equal(skipped(skipped(state, 123_456_789_012), 876_543_210_988), skipped(state, 10**12))


def filled(
    fill: Callable[[Tensor], object], shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return each rank's rows of a parameter, the parameter of one process, and the next random number there.

    The next random number is the same on all ranks.
    """
    layout = plan_layouts([ParamSpec("weight", shape)], dtype.itemsize, RANKS, None)[0]
    torch.manual_seed(3)
    torch.rand(5)
    state = torch.get_rng_state()
    whole = torch.empty(shape, dtype=dtype)
    fill(whole)
    following = torch.rand(1)
    parts = []
    for rank in range(RANKS):
        torch.set_rng_state(state)
        param = nn.Parameter(torch.empty(shape, dtype=dtype).fill_(math.nan))
        split = RowSplit(layout, 0)
        part = torch.empty(split.local_shape(rank), dtype=dtype)
        taking = DeferredFills([param])
        with torch.no_grad(), taking:
            fill(param)
        with torch.no_grad():
            taking.take(param, [(box.slices, box.of(part)) for box in split.boxes(rank)])
        assert torch.equal(torch.rand(1), following)
        parts.append(part)
    return parts, whole, following


FILLS: dict[str, Callable[[Tensor], object]] = {
    "normal": lambda p: nn.init.normal_(p, 0.5, 0.02),
    "uniform": lambda p: p.data.uniform_(-1, 1),
    "kaiming": lambda p: nn.init.kaiming_uniform_(p, a=math.sqrt(5)),
    "twice": lambda p: (nn.init.normal_(p), nn.init.uniform_(p)),
    "truncated": lambda p: nn.init.trunc_normal_(p, std=0.02),
    "scaled": lambda p: nn.init.normal_(p).mul_(2),
    "normalized": lambda p: nn.init.normal_(p).div_(p.norm()),
    "a row": lambda p: (nn.init.normal_(p), p[1].zero_()),
    "a part": lambda p: (p.zero_(), p[:700].normal_()),
    "numpy": lambda p: (nn.init.normal_(p), p.detach().copy_(torch.from_numpy(np.flip(p.detach().numpy(), 0).copy()))),
    "list": lambda p: (nn.init.normal_(p), p.detach().add_(sum(p.detach()[0].tolist()))),
    "address": lambda p: (nn.init.normal_(p), p.detach().add_(ctypes.c_float.from_address(p.data_ptr()).value)),
    "copy": lambda p: (nn.init.normal_(p), p.detach().copy_(copy.deepcopy(p).detach().flip(0))),
    "pickle": lambda p: (nn.init.normal_(p), p.detach().add_(pickle.loads(pickle.dumps(p.detach())).sum())),
    "another": lambda p: p.copy_(torch.empty_like(p).normal_()),
    "own generator": lambda p: p.normal_(generator=torch.Generator().manual_seed(4)),
    "constant": nn.init.ones_,
}


@pytest.mark.parametrize("name", FILLS)
def test_rows_are_those_of_the_whole(name: str) -> None:
    parts, whole, _ = filled(FILLS[name], (1031, 1021), torch.float32)
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("name", ["normal", "scaled"])
def test_rows_of_a_stack_are_those_of_the_whole(name: str) -> None:
    parts, whole, _ = filled(FILLS[name], (2, 1201, 503), torch.float32)
    assert all(part.shape[1:] == (503,) for part in parts)  # matrices are cut
    assert torch.equal(torch.cat(parts).view(whole.shape), whole)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["normal", "uniform"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    parts, whole, _ = filled(FILLS[name], (1031, 1021), dtype)
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("shape", [(2048, 1024), (2, 1201, 503)])
def test_only_what_is_taken_is_drawn(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    deferred_fill._draws(torch.ops.aten.normal_.default, torch.float32)  # known from now on
    drawn: list[int] = []
    part = deferred_fill._Fill.part

    def counted(fill: deferred_fill._Fill, start: int, stop: int) -> Tensor:
        found = part(fill, start, stop)
        drawn.append(found.untyped_storage().nbytes() // 4)
        return found

    monkeypatch.setattr(deferred_fill._Fill, "part", counted)
    monkeypatch.setattr(deferred_fill._Fill, "everything", lambda fill: pytest.fail("a whole parameter was drawn"))
    filled(FILLS["normal"], shape, torch.float32)
    assert RANKS <= len(drawn) <= (2 * len(shape) - 3) * RANKS  # one part of a matrix per rank, up to three of a stack
    assert sum(drawn) < math.prod(shape) + 2 * len(drawn) * 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("function", [torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default])
def test_this_torch_makes_numbers_of_words_as_we_think(function: object, dtype: torch.dtype) -> None:
    """This torch turns random words into numbers as the package expects.

    If it did not, whole parameters would be drawn, which is correct but slow.
    """
    assert deferred_fill._draws(function, dtype) is not None
