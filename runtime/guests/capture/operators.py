"""The operators of a step that is captured. Those that a graph cannot repeat are refused, with the program's line."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ... import compat
from ...memory.operators.arguments import leaves_of, written_to
from ...program_lines import program_line, program_line_here

aten = torch.ops.aten

_COPIES = {aten.copy_.default, aten._to_copy.default}
_BY_MASK = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}


WRITES_TO_ARGUMENT = (
    "it writes to its argument, of which a graph has a copy: the program would not see it. Clone the argument first, "
    "or return what was written"
)


class CaptureRefused(RuntimeError):
    """A step does something that a graph cannot repeat. The message is the reason, and where it happens."""


class CapturedOperators(compat.TorchDispatchMode):
    """Looks at every operator of a step that is captured.

    A graph repeats kernels with the addresses of the capture, and no Python. It would therefore repeat wrongly a value
    that the host reads (and decides by), and a tensor that the program replaces from call to call. Reads are refused
    before they reach the device: afterwards, CUDA would have lost the capture, and says neither what nor where.

    Args:
        module: The model, to name its tensors.
        static: Tensors whose addresses are checked before each replay: everything that the step may read. Other tensors
            that exist already are refused.
        inputs: The arguments of the step. They are copies of what the program passes, and must not be written to.

    Attributes:
        reason: Why the step was refused; None: it was not. The program may have caught the error.
        is_optimizer: Whether an optimizer steps, which may read tensors of its own.
    """

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module, static: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        super().__init__()
        self.reason: str | None = None
        self.is_optimizer = False
        self._module = module
        self._thread = threading.get_ident()
        self._inputs = {*map(_address, inputs)} - {0}
        known = {0, *self._inputs, *map(_address, static)}
        # Held until the capture ends: memory that is freed meanwhile could be given to a tensor of the step.
        self._held = [tensor for tensor in _all_tensors() if _address(tensor) not in known]
        self._foreign = set(map(_address, self._held))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind is not Tensor for kind in types):
            return NotImplemented  # a DTensor's operators on its local tensors come next
        if isinstance(func, torch._ops.HigherOrderOperator):
            with self:
                return compat.run_higher_order(func, args, kwargs)
        self._check(func, args, kwargs)
        return func(*args, **kwargs)

    def _check(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = leaves_of(args, kwargs)
        if _reads_values(func, args, kwargs) and tensors:
            self.refuse(
                f"it reads values of a tensor on the host ({func}), as .item(), .tolist(), bool(tensor), printing, "
                "masks and nonzero() do: a replay would go on with the values of the capture"
            )
        if func in _COPIES:
            to = args[1].device if func is aten.copy_.default else kwargs.get("device") or args[0].device
            if (args[0].device.type == "cpu") != (to.type == "cpu"):
                self.refuse(
                    "it copies between host and device: a replay would not wait for the host. Copy before or after "
                    "the step, and pass the tensor as an argument"
                )
        written = () if func is aten.record_stream.default else written_to(func, args, kwargs)
        if any(_address(tensor) in self._inputs for tensor in written):
            self.refuse(WRITES_TO_ARGUMENT)
        if not self.is_optimizer:
            self.check_read(tensors)

    def check_read(self, tensors: Iterable[Tensor]) -> None:
        """Raise if the step reads a tensor whose address is not checked before replays."""
        for tensor in tensors:
            if _address(tensor) in self._foreign:
                self.refuse(
                    f"it reads {self._named(tensor)} that is neither its argument nor the model's, so that a replay "
                    "would read the memory of the capture, whatever the program puts in its place. Pass it as an "
                    "argument, or register it as a buffer"
                )

    def refuse(self, why: str) -> None:
        """Raise an error that says why the step cannot be captured, and where."""
        # Autograd runs a backward on a thread of its own, behind the program's line in this one.
        line = program_line_here() or program_line(self._thread)
        self.reason = self.reason or (f"{why}. At {line}" if line is not None else why)
        raise CaptureRefused(f"A step that is captured in a CUDA graph cannot go on here: {self.reason}")

    def _named(self, tensor: Tensor) -> str:
        what = f"a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}"
        for prefix, module in self._module.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and _address(value) == _address(tensor):
                    return f"{what} ({f'{prefix}.{name}' if prefix else name!r} of the model)"
        return what


def _reads_values(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if func in _BY_MASK:  # tagged for the masks among indices
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, or of its local tensor's; 0 if it has no memory."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return (compat.storage_address(local) or 0) if local.numel() else 0


def _all_tensors() -> Iterator[Tensor]:
    """Return all tensors that Python code holds."""
    for found in gc.get_objects():
        if issubclass(type(found), Tensor) and not compat.is_fake(found):
            yield found
