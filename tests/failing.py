"""A model that fails where it is told to, and process groups whose timeout a test can wait for."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
import zoo
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

SECONDS = 3.0
"""Timeout of the process group. Ranks may need longer on a machine that does other work."""
PATIENCE = 30.0
"""Seconds until every rank must have its error on such a machine, far below the timeout of the default group."""


def short_mesh() -> DeviceMesh:
    """Return a mesh of all ranks, with a timeout that a test can wait for."""
    group = dist.new_group(timeout=timedelta(seconds=SECONDS))
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))


def values(model: nn.Module) -> list[Tensor]:
    return [param.to_local().clone() for param in model.parameters()]


@torch.library.custom_op("mfsdp_tests::may_fail", mutates_args=())
def may_fail(x: Tensor, number: int) -> Tensor:
    """Return ``x + 1``, unless this rank is supposed to fail here."""
    if Failing.where == number:
        raise ValueError("a bad batch")
    return x + 1


@may_fail.register_fake
def _(x: Tensor, number: int) -> Tensor:
    return torch.empty_like(x)


may_fail.register_autograd(lambda ctx, gradient: (gradient, None))


class Failing(nn.Module):
    """Three equal blocks, so that the size would not reveal a wrong gather."""

    where = -1

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(zoo.Block(8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = torch.ops.mfsdp_tests.may_fail(x, number)
            x = block(x)
        return torch.ops.mfsdp_tests.may_fail(x, 3).pow(2).mean()
