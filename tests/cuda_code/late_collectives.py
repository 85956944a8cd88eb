"""Collectives of gloo whose results arrive as late as on a GPU they may: when they are awaited.

Until then a result is NaN, and what is sent must stay as it was. All functional collectives of the process are late:
those of generated code, of the package's operators, and those that the eager path starts.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_OPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def poison(tensor: Tensor) -> Tensor:
    """Fill with NaN; float8 and integers with bytes 0x7F, which are NaN in float8."""
    with _disable_current_modes(), torch.no_grad():
        if tensor.is_floating_point() and tensor.element_size() > 1:
            return tensor.fill_(float("nan"))
        if tensor.dtype is torch.bool:
            return tensor.fill_(True)
        if tensor.is_contiguous():
            tensor.as_strided((*tensor.shape, 1), (*tensor.stride(), 1)).view(torch.uint8).fill_(0x7F)
        return tensor


@dataclass
class Traffic:
    """What a rank has started.

    Args:
        started: Each collective with its size, dtype and operation, by the ranks of its communicator, in order.
        under_way: Names of those that nothing has awaited yet.
        violations: Uses of memory that a collective was using. They are noted, not raised, so that ranks stay in step.
    """

    started: dict[str, list[str]] = field(default_factory=dict)
    under_way: dict[int, str] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    def end(self) -> None:
        """Note what has not been awaited."""
        self.violations += [f"{name} is not awaited" for name in self.under_way.values()]


class _Late(dist.Work):
    """A collective whose result arrives when it is awaited.

    Args:
        name: What it is.
        work: The collective of gloo.
        result, arrived: Where the result goes, and where gloo puts it.
        given, sent: What is sent, and a copy of it. None if the result overwrites it.
    """

    def __init__(
        self,
        name: str,
        work: dist.Work,
        result: Tensor,
        arrived: Tensor,
        given: Tensor | None,
        sent: Tensor,
        to: Traffic,
    ) -> None:
        super().__init__()
        self._name, self._work, self._traffic = name, work, to
        self._result, self._arrived, self._given, self._sent = result, arrived, given, sent
        to.under_way[id(self)] = name

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait()
        if self._traffic.under_way.pop(id(self), None) is None:
            return True
        with _disable_current_modes(), torch.no_grad():
            if self._given is not None and not same_bytes(self._given, self._sent):
                self._traffic.violations.append(f"what {self._name} sends was overwritten before it was awaited")
            if self._given is not None and not same_bytes(self._result, poison(torch.empty_like(self._result))):
                self._traffic.violations.append(f"the result of {self._name} was written to before it was awaited")
            self._result.copy_(self._arrived)
        return True


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _start(
    traffic: Traffic, name: str, given: Tensor, group: dist.ProcessGroup, arguments: tuple[Any, ...], out: Any
) -> Tensor:
    sent = given.clone().contiguous()
    if name == "all_gather_into_tensor":
        result = given.new_empty(given.shape[0] * arguments[0], *given.shape[1:]) if out is None else out
        arrived = torch.empty_like(result)
        work = dist.all_gather_into_tensor(arrived, sent, group=group, async_op=True)
    elif name == "reduce_scatter_tensor":
        result = given.new_empty(given.shape[0] // arguments[1], *given.shape[1:]) if out is None else out
        arrived = torch.empty_like(result)
        work = dist.reduce_scatter_tensor(arrived, sent.clone(), _OPS[arguments[0]], group=group, async_op=True)
    elif name == "all_reduce":
        result = torch.empty_like(given) if out is None else out
        arrived = sent.clone()
        work = dist.all_reduce(arrived, _OPS[arguments[0]], group=group, async_op=True)
    elif name == "all_to_all_single":
        outgoing, incoming = ([int(size) for size in sizes] for sizes in (arguments[1], arguments[0]))
        result = given.new_empty(sum(incoming), *given.shape[1:])
        arrived = torch.empty_like(result)
        work = dist.all_to_all_single(arrived, sent, incoming, outgoing, group=group, async_op=True)
    else:
        raise NotImplementedError(name)
    operation = f", {arguments[0]}" if isinstance(arguments[0], str) else ""
    what = f"{name} of {given.numel()} {str(given.dtype)[6:]}{operation}"
    traffic.started.setdefault(str(dist.get_process_group_ranks(group)), []).append(what)
    overlaps = result.untyped_storage()._cdata == given.untyped_storage()._cdata
    late = _Late(what, work, poison(result), arrived, None if overlaps else given, sent, traffic)
    torch._C._distributed_c10d._register_work(result, late)
    return result


@contextlib.contextmanager
def late_collectives() -> Iterator[Traffic]:
    """Context in which functional collectives of CPU tensors are late. It yields what is started."""
    traffic = Traffic()
    library = torch.library.Library("_c10d_functional", "IMPL")

    def make_late(operator: str, name: str, in_place: bool = False) -> None:
        def run(given: Tensor, *arguments: Any, out: Tensor | None = None) -> Tensor:
            *rest, group = arguments
            target = given if in_place else out
            with _disable_current_modes(), torch.no_grad():
                found = dist.distributed_c10d._resolve_process_group(group)
                return _start(traffic, name, given, found, tuple(rest), target)

        library.impl(operator, run, "CPU", allow_override=True)  # the package has its own of some versions

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that a kernel replaces another
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single"):
            make_late(name, name)
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor"):
            make_late(f"{name}_out", name)
        make_late("all_reduce_", "all_reduce", in_place=True)
    try:
        yield traffic
    finally:
        library._destroy()
