"""Triton kernels that Inductor generated for a GPU, computed on CPU tensors by Triton's interpreter.

``TRITON_INTERPRET=1`` must be in the environment before triton is imported. :func:`install` then makes generated code
launch :class:`InterpretedKernel`. The interpreter runs the programs of a grid one after the other on numpy arrays. It
is repaired where it differs from a GPU:

- it cuts bfloat16 off where a GPU rounds, rounds float8 wrong, and gives ``tl.dot`` the bits of bfloat16 as integers
- it reduces with functions of a kernel's own (Welford, online softmax) one element at a time, which takes seconds
- it has no libdevice: torch computes its functions
- an address outside of the arguments' memory would break the heap: it is left out, and a violation

Not interpreted as a GPU would: arithmetic on bfloat16 without a cast to float32 (Inductor casts), random numbers (equal
to neither the GPU's nor the CPU's generator), ``tl.device_assert``, and anything about time.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

launches: Counter[str] = Counter()
"""Launches of each kernel of this process, by its source without its name: equal kernels count as one."""
violations: list[str] = []
"""What kernels have done that a GPU might punish."""
_LANES = ("XBLOCK", "YBLOCK", "ZBLOCK", "R0_BLOCK", "R1_BLOCK")


class InterpretedKernel:
    """Stands for a compiled kernel in generated code.

    Args:
        name: Name of the kernel in the code.
        source: The module that defines it.
    """

    def __init__(self, name: str, source: str) -> None:
        from torch._inductor.codecache import PyCodeCache

        self.name, self.source = name, source
        self.anonymous = re.sub(rf"\b{name}\b", "kernel", source)
        self.tuner = getattr(PyCodeCache.load(source), name)
        self.configs = [dict(config.kwargs) for config in self.tuner.configs]
        names = [name for name in self.tuner.fn.arg_names if name not in self.configs[0]]
        self.parameters = tuple(names)

    def run(self, *args: Any, stream: int = 0, **more: Any) -> None:
        """Evaluate the grid as a launcher does, and run each program of it.

        Of a kernel's configurations, the one is taken that is quickest to interpret.
        """
        from torch._inductor.runtime.triton_heuristics import GridExpr
        from torch.utils._python_dispatch import _disable_current_modes

        bound = dict(zip(self.parameters, args, strict=False)) | more
        for name, value in bound.items():
            assert not hasattr(value, "device") or value.device.type == "cpu", f"{self.name}: {name} on {value.device}"
        meta = self.tuner.inductor_meta
        grids = [GridExpr.from_meta(meta, blocks).eval_slow({**bound, **blocks}) for blocks in self.configs]
        costs = [math.prod(g) * (10_000 + _lanes(blocks)) for g, blocks in zip(grids, self.configs, strict=True)]
        chosen = costs.index(min(costs))
        _memory[:] = {_extent(value) for value in bound.values() if hasattr(value, "untyped_storage")}
        with _disable_current_modes():
            self.tuner.fn[grids[chosen]](**bound, **self.configs[chosen])
        launches[self.anonymous] += 1


def _lanes(blocks: dict[str, int]) -> int:
    return math.prod(value for name, value in blocks.items() if name in _LANES)


_memory: list[tuple[int, int]] = []
"""Addresses that the running kernel may use: the storages of its arguments."""


def _extent(tensor: Any) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def install() -> None:
    """Let generated code launch interpreted kernels. Cannot be undone: the process is for this."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime import triton_helpers
    from triton.runtime.interpreter import ReduceOps

    ReduceOps.generic_reduce = _reduce_by_halves
    _repair_types()
    _check_addresses()
    _compute_libdevice()
    AsyncCompile.triton = lambda _, name, source, *__, **___: InterpretedKernel(name, source)  # type: ignore[method-assign]
    triton_helpers.set_driver_to_cpu = triton_helpers.set_driver_to_gpu = lambda: None


def _check_addresses() -> None:
    """Leave loads and stores outside of the arguments' memory out, and note them."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def checked(plain: Callable[..., Any], position_of_mask: int) -> Callable[..., Any]:
        def run(self: Any, pointers: Any, *more: Any) -> Any:
            size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
            mask = more[position_of_mask]
            inside = np.zeros(pointers.data.shape, dtype=bool)
            for start, stop in _memory:
                inside |= (pointers.data >= start) & (pointers.data + size <= stop)
            outside = mask.data.astype(bool) & ~inside
            if outside.any():
                violations.append(f"{int(outside.sum())} lanes are outside of the memory of the kernel's arguments")
                given = [*more]
                given[position_of_mask] = TensorHandle(mask.data & inside, mask.dtype)
                return plain(self, pointers, *given)
            return plain(self, pointers, *more)

        return run

    for name, position_of_mask in (("create_masked_load", 0), ("create_masked_store", 1)):
        setattr(InterpreterBuilder, name, checked(getattr(InterpreterBuilder, name), position_of_mask))


def _reduce_by_halves(self: Any, given: Any) -> list[Any]:
    """Reduce with a function of the kernel's own, as a tree."""
    import numpy as np

    original = self.axis
    values, axis = self.unravel(given, self.axis)
    dtypes, rank = [value.dtype for value in values], len(values[0].handle.data.shape)
    while (size := values[0].handle.data.shape[axis]) > 1:
        parts = [np.split(value.handle.data, [size // 2], axis) for value in values]
        halves = [[self.to_tensor(p[side], d) for p, d in zip(parts, dtypes, strict=True)] for side in (0, 1)]
        found = self.combine_fn.fn(*halves[0], *halves[1])
        values = list(found) if isinstance(found, tuple) else [found]
    results = []
    for value, dtype in zip(values, dtypes, strict=True):
        data = value.handle.data
        if not self.keep_dims:
            data = np.squeeze(data, axis) if original is not None else data.item()
        elif original is None:
            data = data.reshape((1,) * rank)
        results.append(self.to_tensor(data, dtype))
    return results


def _repair_types() -> None:
    """Let casts round to nearest even, as torch does, and products multiply numbers."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    types = {
        tl.float64: (torch.float64, np.uint64),
        tl.float32: (torch.float32, np.uint32),
        tl.float16: (torch.float16, np.uint16),
        tl.bfloat16: (torch.bfloat16, np.uint16),
        tl.float8e4nv: (torch.float8_e4m3fn, np.uint8),
        tl.float8e5: (torch.float8_e5m2, np.uint8),
    }
    signed = {np.uint8: torch.uint8, np.uint16: torch.int16, np.uint32: torch.int32, np.uint64: torch.int64}

    def convert(data: Any, given: Any, wanted: Any, _: object = None) -> Any:
        (source, bits), (result, result_bits) = types[given], types[wanted]
        whole = np.dtype(bits if bits is np.uint8 else f"i{np.dtype(bits).itemsize}")
        flat = np.ascontiguousarray(data).reshape(-1).view(whole)
        values = torch.from_numpy(flat.copy()).view(source).to(result)
        return values.view(signed[result_bits]).numpy().view(result_bits).reshape(data.shape)

    dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        data = convert(handle.data, tl.bfloat16, tl.float32).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *more: dot(self, widened(a), widened(b), *more)


_SAME_IN_TORCH = (
    "abs acos asin atan atan2 ceil copysign cos cosh erf erfc erfinv exp exp2 expm1 floor fmod hypot isinf isnan log "
    "log10 log1p log2 nextafter pow rsqrt signbit sin sinh sqrt tan tanh trunc"
)


def _compute_libdevice() -> None:
    import numpy as np
    import torch
    import triton.language as tl
    from torch._inductor.runtime import triton_helpers
    from triton.language.extra import libdevice
    from triton.runtime.interpreter import TensorHandle

    def by_torch(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*values: Any, **_: Any) -> Any:
            found = function(*(torch.from_numpy(np.ascontiguousarray(v.handle.data)) for v in values)).numpy()
            like = values[0]
            kind = tl.block_type(like.type.scalar, list(found.shape)) if found.ndim else like.type.scalar
            return tl.tensor(TensorHandle(found.astype(like.handle.data.dtype), like.handle.dtype), kind)

        return run

    for name in _SAME_IN_TORCH.split():
        setattr(libdevice, name, by_torch(getattr(torch, name)))
    libdevice.nearbyint = libdevice.rint = by_torch(torch.round)
    libdevice.mul_rn = by_torch(torch.mul)
    triton_helpers.libdevice = libdevice
