"""A GPU whose memory is the host's: the code that Inductor generated for CUDA tensors runs on it, with real numbers.

The code allocates, views, reuses and frees memory, launches kernels and calls operators. Here

- allocations return memory of the host that is NaN until something is written to it
- a buffer that the code uses again for another is NaN again, unless a kernel computes the new one in place from the old
- operators get the CPU in place of the device; flash attention and products with another dtype of the result, which
  only a GPU has, are computed by what the CPU has

Memory that the code frees (``del buf``) is not filled: no name is left that could read it, and the collectives that
still send it are checked at their wait.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from generating import code_of
from late_collectives import poison
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

_aten = torch.ops.aten


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Stands for ``empty_strided_cuda``."""
    with _disable_current_modes():
        extent = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        return poison(torch.empty(extent, dtype=dtype)).as_strided(size, stride)


def _reinterpret(tensor: Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0) -> Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def wrapper_of(module: ModuleType) -> str:
    """Return the code of a generated module that runs after its kernels are made."""
    return code_of(module).partition("del async_compile")[2]


def prepare(module: ModuleType, wrapper: str) -> None:
    """Let a module of generated code run on the host, with what :func:`wrapper_of` returns, or with a changed one."""
    exec(compile(wrapper, f"{module.__file__}, on the host", "exec"), module.__dict__)
    module.__dict__.update(
        empty_strided_cuda=_empty,
        reinterpret_tensor=_reinterpret,
        copy_if_misaligned=lambda tensor: tensor,
        assert_alignment=lambda *_: None,
        _poison_reused=poison,
    )


_REUSE = re.compile(r"^(\s+)(\w+) = (.+?); del (\w+)  # reuse$")


def poisoning_reuse(source: str, parameters: dict[str, tuple[str, ...]]) -> str:
    """Let memory that is used again be NaN, except where the new buffer is computed in place from the old one.

    Args:
        parameters: Names of the parameters of each kernel.
    """
    lines = source.split("\n")
    found = []
    for number, line in enumerate(lines):
        found.append(line)
        if (reuse := _REUSE.match(line)) and _begins_with_write(lines[number + 1 :], reuse[2], parameters):
            found.append(f"{reuse[1]}_poison_reused({reuse[2]})")
    return "\n".join(found)


def _begins_with_write(lines: Sequence[str], name: str, parameters: dict[str, tuple[str, ...]]) -> bool:
    """Whether the first use of a name overwrites it: an ``out=``, or a pointer that a kernel only writes to."""
    word = re.compile(rf"\b{name}\b")
    for line in lines:
        if re.match(r"\s+#", line) or not word.search(line):
            continue
        if launch := re.match(r"\s+(\w+)\.run\((.*), stream=", line):
            given = zip(parameters[launch[1]], _arguments(launch[2]), strict=False)
            return all(parameter.startswith("out_ptr") for parameter, argument in given if word.search(argument))
        if re.search(rf"out=[^,]*\b{name}\b", line):
            return not word.search(line.split("out=")[0])
        return False
    return False


def _arguments(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    found, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += letter in "([{"
        depth -= letter in ")]}"
        if letter == "," and not depth:
            found.append(text[start:place].strip())
            start = place + 1
    return [*found, text[start:].strip()]


class HostDevice(TorchDispatchMode):
    """Active while generated code runs: operators of the device run on the host."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (stand_in := _STAND_INS.get(func)) is not None:
            return stand_in(*args, **kwargs)
        return func(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))


def _on_host(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return "cpu" if value in ("cuda", "cuda:0") and isinstance(value, str) else value


# -- operators that only the device has ------------------------------------------------------------------------------


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout: float = 0.0,
    is_causal: bool = False,
    *_: Any,
    scale: Any = None,
    **__: Any,
) -> Any:
    """The result has the strides of the query, which the generated code asserts."""
    found, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, is_causal, scale=scale)
    out, lengths = torch.empty_like(q).copy_(found), torch.empty(0, dtype=torch.int32)
    state = torch.zeros(2, dtype=torch.uint64)
    return out, lse.contiguous(), lengths, lengths, q.shape[2], k.shape[2], state, state.new_zeros(()), out.new_empty(0)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *rest: Any, scale: Any = None, **_: Any
) -> Any:
    *_, dropout, is_causal = rest[:6]
    backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    found = backward(grad, q, k, v, out, lse, dropout, is_causal, scale=scale)
    return tuple(torch.empty_like(of).copy_(gradient) for gradient, of in zip(found, (q, k, v), strict=True))


def _product(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """``mm`` that sums in and returns another dtype."""
    found = a.to(dtype) @ b.to(dtype)
    return found if out is None else out.copy_(found)


_STAND_INS = {
    _aten._scaled_dot_product_flash_attention.default: _flash,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten.mm.dtype: _product,
    _aten.mm.dtype_out: _product,
}
