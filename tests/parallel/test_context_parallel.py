"""Context parallelism: parts of sequences on ranks, compared with whole sequences in one process."""

from __future__ import annotations

import warnings
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity import AOT_EAGER, EAGER, INDUCTOR, raises_everywhere
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import Schedule1F1B
from torch.utils.checkpoint import checkpoint

from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.diagnostics.measure import collectives
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig
from mfsdp_compile.parallel.context_parallel import ContextParallel
from mfsdp_compile.parallel.pipeline_parallel import PipelineStage
from mfsdp_compile.runtime import compat

CONFIG = LlamaConfig(vocabulary=32, width=32, layers=2, heads=4, kv_heads=2, hidden=48)
LENGTH, BATCH = 16, 3


def mesh_of(dp: int, cp: int) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (dp, cp), mesh_dim_names=("dp", "cp"))
    mesh["dp", "cp"]._flatten("dp_cp")
    return mesh


class Checkpointed(nn.Module):
    """A Llama whose layers are recomputed in backward."""

    def __init__(self, *args: Any) -> None:
        super().__init__()
        self.llama = Llama(*args)
        for layer in self.llama.layers:
            forward = layer.forward
            layer.forward = lambda *inputs, forward=forward: checkpoint(forward, *inputs, use_reentrant=False)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.llama(*args, **kwargs)


def build(checkpointed: bool, *args: Any) -> nn.Module:
    return parity.build(lambda: (Checkpointed if checkpointed else Llama)(CONFIG, *args))


def tokens(steps: int, replicas: int) -> Tensor:
    """Return tokens of shape ``[steps, replicas, batch, length + 1]``."""
    return torch.randint(0, 32, (steps, replicas, BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))


def assert_close(model: nn.Module, alone: nn.Module) -> None:
    """Assert that gradients agree up to 1e-5 of each tensor's largest element.

    Attention in parts and sums over ranks add up in a different order.
    """
    for (name, param), its in zip(model.named_parameters(), alone.parameters(), strict=True):
        mine, expected = param.grad.full_tensor(), its.grad  # type: ignore[union-attr]
        assert expected is not None
        difference = (mine - expected).abs().max().item()
        assert difference <= 1e-5 * expected.abs().max().item(), f"{name}: {difference}"


def train(
    mode: str, checkpointed: bool, balanced: bool = True, steps: int = 3, rotate: str = "allgather", **sharding: Any
) -> None:
    mesh = sharding.pop("mesh", None) or mesh_of(2, 2)
    context = ContextParallel(mesh["cp"], balanced, rotate)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = fully_shard_model(
            build(checkpointed, context.attention),
            **({"device_mesh": mesh, "dp_shard_dim": "dp_cp"} | sharding),
            tp_dim=None,
            fsdp_unit_modules=[Block],
        )
    call: Any = model
    if mode != EAGER:
        call = torch.compile(model, backend="mfsdp", fullgraph=True, options={"inner": mode})
    alone = build(checkpointed)
    optimizers = [fully_shard_optimizer(parity.sgd(model.parameters())), parity.sgd(alone.parameters())]
    replica = 0
    for name in mesh.mesh_dim_names or ():
        if name != "cp":
            replica = replica * mesh[name].size() + mesh[name].get_local_rank()
    for batch in tokens(steps, mesh.size() // context.size):
        mine = batch[replica]
        loss = call(context.shard(mine[:, :-1]), context.shard(mine[:, 1:]), context.positions(LENGTH))
        loss.backward()
        expected = torch.stack([alone(each[:, :-1], each[:, 1:]) for each in batch]).mean()
        expected.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        assert abs(mean / dist.get_world_size() - expected) <= 1e-5 * expected
        assert_close(model, alone)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.long_unless("*-eager-")
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(4)
def test_data_and_context(mode: str, checkpointed: bool) -> None:
    train(mode, checkpointed)


@pytest.mark.long
@pytest.mark.slow
@on_ranks(4)
def test_inductor() -> None:
    train(INDUCTOR, checkpointed=False, steps=2)


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(4)
def test_parts_in_order(mode: str) -> None:
    train(mode, checkpointed=False, balanced=False, steps=2)


@pytest.mark.long
@on_ranks(4)
def test_four_ranks_of_one_sequence() -> None:
    train(AOT_EAGER, checkpointed=False, steps=2, mesh=mesh_of(1, 4))


@pytest.mark.long
@pytest.mark.parametrize(("mode", "balanced"), [(EAGER, True), (AOT_EAGER, True), (AOT_EAGER, False)])
@on_ranks(4)
def test_ring(mode: str, balanced: bool) -> None:
    """Keys and values travel around a ring of four ranks."""
    train(mode, checkpointed=False, balanced=balanced, steps=2, rotate="alltoall", mesh=mesh_of(1, 4))


@pytest.mark.long_unless("*-eager")
@pytest.mark.slow
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER, INDUCTOR])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@on_ranks(4)
def test_ring_and_data(mode: str, checkpointed: bool) -> None:
    train(mode, checkpointed, steps=2, rotate="alltoall")


@pytest.mark.long
@on_ranks(4)
def test_replicas_outside() -> None:
    """HSDP replicates over data-parallel ranks and shards over context-parallel ranks."""
    mesh = mesh_of(2, 2)
    train(
        AOT_EAGER,
        checkpointed=False,
        steps=2,
        mesh=mesh,
        dp_shard_dim="cp",
        dp_outer_dim="dp",
        hybrid_fsdp_group=mesh["dp", "cp"]._flatten("dp_cp").get_group(),
    )


@on_ranks(8)
def test_four_dimensions() -> None:
    """A model can be replicated over the outermost dimension and sharded over two flattened ones.

    The last is unused.
    """
    mesh = init_device_mesh("cpu", (2, 2, 2, 1), mesh_dim_names=("dp_outer", "dp_shard", "cp", "tp"))
    mesh["dp_shard", "cp"]._flatten("dp_shard_cp")
    train(
        AOT_EAGER,
        checkpointed=False,
        steps=2,
        mesh=mesh,
        dp_shard_dim="dp_shard_cp",
        dp_outer_dim="dp_outer",
        hybrid_fsdp_group=mesh["dp_outer", "dp_shard", "cp"]._flatten("dp").get_group(),
    )


@on_ranks(4)
def test_a_flattened_mesh_by_itself() -> None:
    mesh = mesh_of(2, 2)
    train(
        EAGER,
        checkpointed=False,
        steps=1,
        mesh=mesh,
        device_mesh=mesh["dp", "cp"]._flatten("dp_cp"),
        dp_shard_dim=None,
    )


# -- attention --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("balanced", [True, False])
@on_ranks(4)
def test_attention(balanced: bool) -> None:
    """Outputs and gradients of queries, keys and values are correct, with shared keys and values of another width."""
    context = ContextParallel(mesh_of(1, 4)["cp"], balanced)
    generator = torch.Generator().manual_seed(2)
    shapes = [(2, 4, 24, 6), (2, 2, 24, 6), (2, 2, 24, 5)]
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    weight = torch.randn(2, 4, 24, 5, generator=generator, dtype=torch.float64)
    for is_causal in (True, False):
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        expected = F.scaled_dot_product_attention(*whole, is_causal=is_causal, scale=0.3, enable_gqa=True)
        (expected * weight).sum().backward()
        parts = [context.shard(x, 2).requires_grad_() for x in (q, k, v)]
        found = context.attention(*parts, is_causal=is_causal, scale=0.3)
        (found * context.shard(weight, 2)).sum().backward()
        torch.testing.assert_close(context.unshard(found, 2), expected)
        for part, x in zip(parts, whole, strict=True):
            torch.testing.assert_close(context.unshard(part.grad, 2), x.grad)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("balanced", [True, False])
@on_ranks(4)
def test_ring_attention(balanced: bool, ranks: int) -> None:
    """Outputs and gradients are those of one process, and compiled code has the bits of eager code."""
    context = ContextParallel(mesh_of(4 // ranks, ranks)["cp"], balanced, rotate_method="alltoall")
    compiled = torch.compile(context.attention, backend="aot_eager", fullgraph=True)
    generator = torch.Generator().manual_seed(2)
    shapes = [(2, 4, 24, 8), (2, 2, 24, 8), (2, 2, 24, 8), (2, 4, 24, 8)]
    q, k, v, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    # Outputs are rounded to bfloat16 (2^-9 of each) in every block and once more when they are merged. Gradients are
    # sums over up to 24 positions of products of values that were rounded like this, of size 1 to 4 here.
    for dtype, limits in ((torch.float64, {}), (torch.bfloat16, {"rtol": 2**-6, "atol": 2**-5})):
        for is_causal in (True, False):
            whole = [x.to(dtype).double().clone().requires_grad_() for x in (q, k, v)]
            expected = F.scaled_dot_product_attention(*whole, is_causal=is_causal, scale=0.3, enable_gqa=True)
            (expected * weight.to(dtype)).sum().backward()
            results = []
            for attention in (context.attention, compiled):
                parts = [context.shard(x.detach().to(dtype), 2).requires_grad_() for x in whole]
                found = attention(*parts, is_causal=is_causal, scale=0.3)
                assert found.dtype == dtype
                (found * context.shard(weight.to(dtype), 2)).sum().backward()
                results.append([found.detach(), *(part.grad for part in parts)])
            assert all(map(torch.equal, *results))
            for part, x in zip(results[0], [expected, *(x.grad for x in whole)], strict=True):
                torch.testing.assert_close(context.unshard(part, 2).double(), x.detach(), **limits)


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(4)
def test_a_ring_saves_its_own_keys_and_values(mode: str) -> None:
    """Saved for backward are a rank's queries, keys, values, output, and one float64 per row of scores.

    The partitioner also saves the copy of the half of the queries that sees the keys of later ranks.
    """
    context = ContextParallel(mesh_of(1, 4)["cp"], rotate_method="alltoall")
    attention = context.attention
    if mode != EAGER:
        attention = torch.compile(attention, backend=mode, fullgraph=True)
    context.positions(32)
    parts = [torch.randn(1, 2, 8, 8, dtype=torch.float64).requires_grad_() for _ in range(3)]
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        attention(*parts, is_causal=True)
    own, half = 8 * (4 * 2 * 8 * 8 + 2 * 8), 8 * 2 * 4 * 8
    assert sum(saved.values()) <= own + (half if mode != EAGER else 0)


@on_ranks(2)
def test_parts_and_wholes() -> None:
    mesh = mesh_of(1, 2)["cp"]
    whole = torch.arange(8)
    assert ContextParallel(mesh).positions(8).tolist() == ([0, 1, 6, 7] if dist.get_rank() == 0 else [2, 3, 4, 5])
    in_order = ContextParallel(mesh, balanced=False)
    assert in_order.positions(8).tolist() == ([0, 1, 2, 3] if dist.get_rank() == 0 else [4, 5, 6, 7])
    for context in (ContextParallel(mesh), in_order):
        assert torch.equal(context.unshard(context.shard(whole, 0), 0), whole)


@on_ranks(1)
def test_one_rank_is_plain_attention() -> None:
    context = ContextParallel(mesh_of(1, 1)["cp"])
    q, k, v = torch.randn(3, 2, 4, 8, 6).unbind(0)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(context.attention(q, k, v, is_causal=True), expected)


# -- communication ----------------------------------------------------------------------------------------------------


COUNTS = {"as it is": (2, 1, 1, 1), "checkpointed layers": (2, 1, 2, 1)}
"""Collectives of a step: gathers and reduce-scatters of a bucket, then of keys and values of a layer."""


@pytest.mark.long
@pytest.mark.parametrize("layers", COUNTS)
@on_ranks(4)
def test_collectives(layers: str) -> None:
    """A compiled step runs exactly the expected number of collectives.

    The last unit's bucket stays for the backward, and the first one's is not needed there.
    """
    mesh = mesh_of(2, 2)
    context = ContextParallel(mesh["cp"])
    module = build(layers == "checkpointed layers", context.attention)
    model = fully_shard_model(module, mesh, dp_shard_dim="dp_cp", fsdp_unit_modules=[Block])
    call = torch.compile(model, backend="mfsdp", fullgraph=True, options={"inner": "aot_eager"})
    (batch,) = tokens(1, 2)

    def step() -> None:
        mine = batch[0]
        call(context.shard(mine[:, :-1]), context.shard(mine[:, 1:]), context.positions(LENGTH)).backward()

    step()
    model.zero_grad()
    counts = collectives(step)
    gathers, reductions, key_gathers, key_reductions = COUNTS[layers]
    if compat.TORCH_VERSION < (2, 13):
        key_gathers = 1  # its partitioner saves results of collectives even in checkpointed layers
    buckets = len(model.sharded.buckets)
    assert counts["all_gather_into_tensor"] == gathers * buckets - 2 + key_gathers * CONFIG.layers, counts
    assert counts["reduce_scatter_tensor"] == reductions * buckets + key_reductions * CONFIG.layers, counts
    assert counts["all_reduce"] == 0, counts


# -- with a pipeline --------------------------------------------------------------------------------------------------


class Part(nn.Module):
    """One of two stages of a Llama with two layers."""

    def __init__(self, llama: Llama, last: bool, context: ContextParallel | None = None) -> None:
        super().__init__()
        self.enter = nn.Identity() if last else llama.embedding
        self.layer = llama.layers[1 if last else 0]
        self.leave = nn.Sequential(llama.norm, llama.head) if last else nn.Identity()
        self.register_buffer("positions", context.positions(LENGTH) if context else torch.arange(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        from mfsdp_compile.models.llama import _rotation

        return self.leave(self.layer(self.enter(x), _rotation(self.positions, 8, CONFIG.rope_base)))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def pipeline_counts(m: int) -> tuple[int, int, int, int]:
    """Collectives of a step of m microbatches: gathers and reduce-scatters of a bucket, then of keys and values."""
    return 2 * m, 1, m, m


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(8)
def test_pipeline_data_and_context(mode: str) -> None:
    """Pipeline, data and context parallelism combine on 2 x 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "cp"))
    shared = mesh["dp", "cp"]._flatten("dp_cp")
    context = ContextParallel(mesh["cp"])
    last = mesh["pp"].get_local_rank() == 1
    llama = build(False, context.attention)
    model = fully_shard_model(Part(llama, last, context), shared, fsdp_unit_modules=[Block])  # type: ignore[arg-type]
    call: Any = model
    if mode != EAGER:
        call = torch.compile(model, backend="mfsdp", fullgraph=True, options={"inner": mode})
    stage = PipelineStage(call, int(last), 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, BATCH, loss_fn=cross_entropy)
    optimizer = fully_shard_optimizer(parity.sgd(model.parameters()))
    alone = build(False)
    first, second = Part(alone, False), Part(alone, True)  # type: ignore[arg-type]
    sgd = parity.sgd(alone.parameters())

    def step(batch: Tensor) -> None:
        mine = batch[mesh["dp"].get_local_rank()]
        inputs, targets = context.shard(mine[:, :-1]), context.shard(mine[:, 1:])
        schedule.step(target=targets) if last else schedule.step(inputs)

    for batch in tokens(3, 2):
        step(batch)
        for each in batch:
            (cross_entropy(second(first(each[:, :-1])), each[:, 1:]) / len(batch)).backward()
        assert_close(model, second if last else first)
        for each in (optimizer, sgd):
            each.step()
            each.zero_grad()
    if mode == EAGER:
        return
    counts = collectives(lambda: step(batch))
    gathers, reductions, key_gathers, key_reductions = pipeline_counts(BATCH)
    buckets = len(model.sharded.buckets)
    unneeded = 0 if last else BATCH  # those of the embedding, in backward
    assert counts["all_gather_into_tensor"] == gathers * buckets - unneeded + key_gathers, counts
    assert counts["reduce_scatter_tensor"] == reductions * buckets + key_reductions, counts


# -- mistakes ---------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_mistakes_are_explained() -> None:
    mesh = mesh_of(2, 2)
    with raises_everywhere(ValueError, "dimension 'cp' of 2 ranks", "would not be reduced over it", "_flatten"):
        fully_shard_model(build(False), mesh, dp_shard_dim="dp", fsdp_unit_modules=[Block])
    with raises_everywhere(ValueError, "dp_shard_dim='dpcp' is not a dimension", "('dp', 'cp')", "_flatten('dpcp')"):
        fully_shard_model(build(False), mesh, dp_shard_dim="dpcp", fsdp_unit_modules=[Block])
    with raises_everywhere(ValueError, "has 2 dimensions", "dp_shard_dim"):
        fully_shard_model(build(False), mesh, fsdp_unit_modules=[Block])
    with raises_everywhere(ValueError, "ContextParallel takes one mesh dimension", "mesh['cp']"):
        ContextParallel(mesh)
    with raises_everywhere(ValueError, "rotate_method='p2p'", "'allgather'", "'alltoall'"):
        ContextParallel(mesh["cp"], rotate_method="p2p")
    with raises_everywhere(RuntimeError, "rotate_method='alltoall'", "rotate_method='allgather'"):
        ContextParallel(mesh["cp"], rotate_method=("allgather", "alltoall")[mesh["cp"].get_local_rank()])
    half = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    if dist.get_rank() in (2, 3):
        with raises_everywhere(ValueError, "a device mesh that it is not part of", "[0, 1]"):
            fully_shard_model(build(False), half, fsdp_unit_modules=[Block])

    context = ContextParallel(mesh["cp"])
    with raises_everywhere(ValueError, "A sequence of 14 tokens", "pad it to a multiple of 4"):
        context.shard(torch.zeros(1, 14))
    q = torch.randn(1, 4, 4, 8)
    with raises_everywhere(ValueError, "of equal lengths"):
        context.attention(q, q[:, :, :2], q[:, :, :2], is_causal=True)
    ring = ContextParallel(mesh["cp"], rotate_method="alltoall")
    with raises_everywhere(NotImplementedError, "Ring attention", "dropout_p=0.1", "rotate_method='allgather'"):
        ring.attention(q, q, q, dropout_p=0.1)
    with raises_everywhere(NotImplementedError, "of widths [8, 8, 6]"):
        ring.attention(q, q, q[..., :6])
    with raises_everywhere(RuntimeError, "is compiled for chunks of 2 tokens", "shard() or positions()"):
        torch.compile(lambda q: context.attention(q, q, q, is_causal=True), backend="eager", fullgraph=True)(q)
