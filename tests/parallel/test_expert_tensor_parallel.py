"""Expert tensor parallelism: experts divided over (ep, etp) ranks, compared with one process."""

from __future__ import annotations

from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
from parity import AOT_EAGER, EAGER
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.runtime.collectives import differentiable as differentiable_collectives

EXPERTS, WIDTH, HIDDEN, TOKENS = 4, 6, 8, 5


class Experts(nn.Module):
    """Soft mixture of all experts: every token goes through each, weighted by the router.

    Args:
        mesh: ``("ep", "etp")``, the ranks that divide experts, and the hidden dimension inside of each. None: one rank.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        up, down = torch.randn(EXPERTS, WIDTH, HIDDEN) / 3, torch.randn(EXPERTS, HIDDEN, WIDTH) / 3
        self.mesh = mesh
        self.up, self.down = nn.Parameter(self._part(up, 2)), nn.Parameter(self._part(down, 1))
        if mesh is not None:
            whole = mesh._flatten("ep_etp") if mesh.ndim > 1 else mesh
            self.ranks, self.group = whole.size(), whole.get_group().group_name
            self.first = mesh.get_coordinate()[0] * (EXPERTS // mesh.size(0))

    def _part(self, whole: Tensor, dim: int) -> Tensor:
        if self.mesh is None:
            return whole
        ep, etp = self.mesh.get_coordinate()
        part = whole.chunk(self.mesh.size(0), 0)[ep].chunk(self.mesh.size(1), dim)[etp].contiguous()
        return DTensor.from_local(part, self.mesh, [Shard(0), Shard(dim)], run_check=False)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        if self.mesh is None:
            return self._mixed(x, weights, self.up, self.down)
        # Tokens of all ranks that hold parts of the experts, and sums over these parts.
        x, weights = (differentiable_collectives.gather(t, self.ranks, self.group) for t in (x, weights))
        up, down = self.up.to_local(), self.down.to_local()
        y = self._mixed(x, weights[:, self.first : self.first + up.shape[0]], up, down)
        return differentiable_collectives.scatter(y, self.ranks, self.group)

    @staticmethod
    def _mixed(x: Tensor, weights: Tensor, up: Tensor, down: Tensor) -> Tensor:
        hidden = torch.einsum("tw,ewh->teh", x, up).relu()
        return torch.einsum("teh,ehw,te->tw", hidden, down, weights)


class Layer(nn.Module):
    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(mesh)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(x, self.router(x).softmax(-1))


class Model(nn.Module):
    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.Sequential(Layer(mesh), Layer(mesh))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.enter(x)).pow(2).mean()


def sharded(shape: tuple[int, int, int], **more: Any) -> Any:
    """Return a model over ``(expert data parallel, ep, etp)`` ranks."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("fsdp", "ep", "etp"))
    return fully_shard_model(
        Model(mesh["ep", "etp"]), fsdp_unit_modules=[Layer], dp_shard_dim="fsdp", expt_device_mesh=mesh, **more
    )


def batch(step: int) -> Tensor:
    return torch.randn(dist.get_world_size(), TOKENS, WIDTH, generator=torch.Generator().manual_seed(step))


@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2)])
@on_ranks(4)
def test_training_of_one_process(shape: tuple[int, int, int]) -> None:
    """Losses, gradients, norms and weights of two steps are those of one process; eager and compiled agree exactly.

    Sums over ranks and over parts of the hidden dimension add up in another order: 1e-5 relative, in float32.
    """
    found = []
    for mode in (EAGER, AOT_EAGER):
        model, alone = sharded(shape), Model(None)
        call = (
            model if mode == EAGER else torch.compile(model, backend="mfsdp", fullgraph=True, options={"inner": mode})
        )
        optimizers = [fully_shard_optimizer(parity.sgd(model.parameters())), parity.sgd(alone.parameters())]
        for step in range(2):
            data = batch(step)
            loss = call(data[dist.get_rank()])
            loss.backward()
            expected = torch.stack([alone(x) for x in data])
            expected.mean().backward()
            torch.testing.assert_close(loss, expected[dist.get_rank()], rtol=1e-5, atol=0)
            norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, alone)]
            mine = norms[0].full_tensor() if isinstance(norms[0], DTensor) else norms[0]
            torch.testing.assert_close(mine, norms[1], rtol=1e-5, atol=0)
            for (name, param), its in zip(model.module.named_parameters(), alone.parameters(), strict=True):
                assert param.shape == its.shape, name
                torch.testing.assert_close(param.grad.full_tensor(), its.grad, rtol=1e-5, atol=1e-7, msg=name)
                found.append(param.grad.to_local().clone())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for (name, param), its in zip(model.module.named_parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(param.full_tensor(), its, rtol=1e-5, atol=1e-7, msg=name)
    half = len(found) // 2
    assert all(torch.equal(a, b) for a, b in zip(found[:half], found[half:], strict=True)), "eager, compiled differ"
