"""The class of gathered parameters, as modules get them, and writes to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from .. import compat


def refuse_write(unit: str, names: Sequence[str]) -> NoReturn:
    """Raise RuntimeError because forward or backward has written to a parameter of ``unit``, one of ``names``."""
    raise RuntimeError(
        f"Forward or backward wrote to a parameter of {unit!r} "
        f"({', '.join(names[:4])}{', ...' if len(names) > 4 else ''}): what it wrote to was a gathered copy, and is "
        "lost. Write to parameters between steps (under torch.no_grad()), or hold what they write to in a buffer. An "
        "nn.Embedding with max_norm writes too."
    )


class GatheredParameter(nn.Parameter):
    """The value of ``module.weight`` inside a forward or backward: an ordinary tensor, except that writes through
    ``.data`` raise.

    A tensor's own ``.data`` does not share its version counter, so that writes through it would go unnoticed.
    """

    __torch_function__ = compat.no_torch_function
    mfsdp_name: str

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, values: Tensor) -> None:
        refuse_write(self.mfsdp_name.rpartition(".")[0], [self.mfsdp_name])


def as_gathered(tensor: Tensor, name: str) -> Any:
    """Turn ``tensor`` into a :class:`GatheredParameter` in place."""
    tensor.__class__ = GatheredParameter
    vars(tensor)["mfsdp_name"] = name
    return tensor


ORDINARY = (Tensor, nn.Parameter, GatheredParameter)
"""Types that wrap no other tensors: most of what autograd saves."""
