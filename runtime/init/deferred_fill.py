"""Deferred random fills: draw only this rank's rows of a parameter.

While a module is initialized on the CPU, filling a large parameter with normal or uniform numbers is deferred. The
generator skips what the fill would draw (:mod:`.mersenne`), and once the module is done, only this rank's rows are
drawn. The values equal those of a complete fill, to the bit. Any other access to such a parameter before that (a norm,
a clamp, ``numpy()``) fills it first. One of 1,024 ranks thus initializes a model of 70 billion parameters in seconds
instead of minutes, without touching the memory of a whole parameter. On CUDA, where numbers are drawn at the speed of
memory, nothing is deferred.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import compat
from .mersenne import skipped

aten = torch.ops.aten

_BLOCK = 16  # normal numbers are computed from uniform ones in blocks; an incomplete last block is drawn again
_LEAST = 1 << 20  # elements from which on skipping is faster than drawing


@dataclass(frozen=True)
class _Fill:
    """A deferred call of ``function(tensor, *args, **kwargs)``."""

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensor: Tensor
    state: Tensor  # state of the generator before the fill

    def part(self, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of the filled tensor. The generator is left in an arbitrary state."""
        numel, dtype = self.tensor.numel(), self.tensor.dtype
        first = min(start, numel - _BLOCK) // _BLOCK * _BLOCK
        end = min(-(-stop // _BLOCK) * _BLOCK, numel)
        if end > numel - _BLOCK:
            end = numel
        torch.set_rng_state(skipped(self.state, first * (2 if dtype == torch.float64 else 1)))
        drawn = torch.empty(end - first, dtype=dtype)
        self.function(drawn, *self.args, **self.kwargs)
        return drawn[start - first : stop - first]

    def everything(self) -> None:
        torch.set_rng_state(self.state)
        self.function(self.tensor, *self.args, **self.kwargs)


class DeferredFills:
    """Context that defers fills of ``params`` where possible.

    Args:
        params: Whole parameters, in memory that nothing has been written to.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        large = (param for param in params if param.numel() >= _LEAST)
        self._watched = {address: param.dtype for param in large if (address := compat.storage_address(param))}
        self._waiting: dict[int, _Fill] = {}
        self._modes = (_Operators(self), _Reads(self))

    def __enter__(self) -> DeferredFills:
        if self._watched:
            for mode in self._modes:
                mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._watched:
            for mode in reversed(self._modes):
                mode.__exit__(*error)

    def take(self, param: Tensor, parts: Sequence[tuple[tuple[slice, ...], Tensor]]) -> None:
        """Copy parts of a parameter to other tensors. Call this after the context.

        Args:
            parts: A slice per dimension and the tensor to write to, of each part.
        """
        fill = self._waiting.pop(compat.storage_address(param) or 0, None)
        for index, into in parts:
            if fill is None or not index:
                into.copy_(param[index])
                continue
            # Draw what is contiguous: one index of dimensions of which the part has one, and a range of the next.
            split = next((dim for dim, each in enumerate(index) if each.stop - each.start != 1), len(index) - 1)
            width = param.stride(split)
            before = sum(each.start * stride for each, stride in zip(index[:split], param.stride(), strict=False))
            with _generator_kept():
                drawn = fill.part(before + index[split].start * width, before + index[split].stop * width)
            drawn = drawn.view(*[1] * split, -1, *param.shape[split + 1 :])
            into.copy_(drawn[(*[slice(None)] * (split + 1), *index[split + 1 :])])

    def put_off(self, function: Any, tensor: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Defer this fill if possible. Return whether it is deferred."""
        address = compat.storage_address(tensor) or 0
        whole = tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes()
        if self._watched.get(address) != tensor.dtype or not whole or kwargs.get("generator") is not None:
            return False
        draws = _draws(function, tensor.dtype) if tensor.device.type == "cpu" else None
        if draws is None:
            return False
        state = torch.get_rng_state()
        self._waiting[address] = _Fill(function, args, kwargs, tensor.detach(), state)
        torch.set_rng_state(skipped(state, draws(tensor.numel())))
        return True

    def fill(self, values: Any) -> None:
        """Carry out deferred fills of tensors among ``values``."""
        if self._waiting:
            for tensor in compat.tree_leaves(values):
                if isinstance(tensor, Tensor) and (address := compat.storage_address(tensor)) in self._waiting:
                    with compat.without_modes(), _generator_kept():
                        self._waiting.pop(address).everything()


class _Operators(compat.TorchDispatchMode):
    def __init__(self, drawing: DeferredFills) -> None:
        super().__init__()
        self._drawing = drawing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with compat.DisableTorchFunction():
            fills = func in (aten.normal_.default, aten.uniform_.default)
            if fills and self._drawing.put_off(func, args[0], args[1:], kwargs):
                return args[0]
            if not func.is_view:
                self._drawing.fill((args, kwargs))
            return func(*args, **kwargs)


class _Reads(compat.TorchFunctionMode):
    """Catches functions that are not operators but may read memory: ``numpy()``, ``data_ptr()``, ``tolist()``."""

    def __init__(self, drawing: DeferredFills) -> None:
        super().__init__()
        self._drawing = drawing

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _is_operator(getattr(func, "__name__", "")):
            self._drawing.fill((args, kwargs))
        return func(*args, **(kwargs or {}))


@functools.cache
def _is_operator(name: str) -> bool:
    return name == "__get__" or hasattr(aten, name)


@contextlib.contextmanager
def _generator_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


@functools.cache
def _draws(function: Any, dtype: torch.dtype) -> Callable[[int], int] | None:
    """Return a function from a fill's number of elements to the number of 32-bit words that it draws.

    None if fills cannot be split the way this module assumes. How torch makes numbers from words differs between
    versions and dtypes, so it is tested, not trusted.
    """
    words = 2 if dtype == torch.float64 else 1
    # Extra numbers for an incomplete last block: none, a whole block, or those that the block lacks.
    for again in (lambda rest: 0, lambda rest: _BLOCK if rest else 0, lambda rest: _BLOCK - rest if rest else 0):

        def draws(numel: int, again: Callable[[int], int] = again) -> int:
            return (numel + again(numel % _BLOCK)) * words

        if all(_is_parted(function, dtype, numel, draws(numel)) for numel in (8 * _BLOCK + 3, 64 * _BLOCK)):
            return draws
    return None


def _is_parted(function: Any, dtype: torch.dtype, numel: int, draws: int) -> bool:
    with compat.without_modes(), _generator_kept():
        whole = torch.empty(numel, dtype=dtype)
        fill = _Fill(function, (), {}, whole, torch.get_rng_state())
        fill.everything()
        if not torch.equal(torch.get_rng_state(), skipped(fill.state, draws)):
            return False
        parts = ((0, numel), (5, 40), (numel - 30, numel - 1), (numel - 2, numel))
        return all(torch.equal(fill.part(start, stop), whole[start:stop]) for start, stop in parts)
