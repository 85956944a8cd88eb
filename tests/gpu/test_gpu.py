"""Tests of what only a GPU shows: NCCL, Triton's code, streams and the CUDA allocator. Skipped without one."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import CONFIG, FAKE, MODES, cublas_workspaces, same_bits, sharded, skip_what_is_measured, tokens, whole
from torch import Tensor, nn

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig
from mfsdp_compile.planning import forecast


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", MODES)
def test_one_rank_trains_as_without_sharding(mode: str) -> None:
    model, call = sharded(mode)
    alone = whole()
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    alone_optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3, fused=True)
    for step in range(5):
        losses = []
        for each, optim in ((call, optimizer), (alone, alone_optimizer)):
            loss = each(*tokens(step))
            loss.backward()
            optim.step()
            optim.zero_grad()
            losses.append(loss.item())
        # float32 matmuls with kernels of other shapes: 1e-6 per step, which AdamW amplifies.
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True, "capturable": not FAKE}, {"foreach": False}])
@pytest.mark.parametrize("flat", [True, False])
def test_optimizer_kernels(settings: dict[str, bool], flat: bool) -> None:
    """Optimizer kernels give the same bits for the same elements in tensors of any length."""
    model, alone = fully_shard_model(whole(), fsdp_unit_modules=[Block]), whole()
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, **settings), flat=flat)
    alone_optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3, **settings)
    for _ in range(3):
        model(*tokens()).backward()
        for param, its in zip(alone.parameters(), model.parameters(), strict=True):
            param.grad = its.grad.full_tensor()
        optimizer.step()
        alone_optimizer.step()
        optimizer.zero_grad()
    for param, its in zip(alone.parameters(), model.parameters(), strict=True):
        assert torch.equal(its.full_tensor(), param)


@pytest.mark.usefixtures("one_rank")
def test_eager_and_compiled_agree_to_the_bit() -> None:
    runs = []
    for mode in ("eager", "aot_eager"):
        model, call = sharded(mode, torch.bfloat16)
        with same_bits():
            loss = call(*tokens())
            loss.backward()
        runs.append((loss, [p.grad.to_local() for p in model.parameters()]))
    assert torch.equal(runs[0][0], runs[1][0])
    for a, b in zip(runs[0][1], runs[1][1], strict=True):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_with_float32_shards(mode: str) -> None:
    model, call = sharded(mode, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses = []
    for _ in range(10):
        loss = call(*tokens())
        loss.backward()
        assert torch.isfinite(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert losses[-1] < losses[0]


@pytest.mark.usefixtures("fake_ranks")
@pytest.mark.parametrize("mode", MODES)
def test_peak_memory(mode: str) -> None:
    """Peak memory is the shards' gradients, two gathered units, gradients in flight, and one batch's activations."""
    model, call = sharded(mode, torch.bfloat16)
    x, y = tokens(batch=1, length=16)
    for _ in range(3):
        call(x, y).backward()
        model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call(x, y).backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before  # cuBLAS allocated its workspaces earlier
    skip_what_is_measured()
    buckets = model.sharded.buckets
    unit = max(b.plan.gathered_bytes for b in buckets)
    gradients = sum(b.plan.shard_bytes for b in buckets)
    in_flight = 2 * unit if mode == "inductor" else 3 * unit
    casts = sum(sorted(b.plan.shard_bytes for b in buckets)[-2:])  # shards in bfloat16, and results of reductions
    activations = 8 << 20
    assert peak <= gradients + 2 * unit + in_flight + casts + activations


@pytest.mark.skipif(FAKE, reason="FAKE GPU: other tests look at Inductor's code for CPUs")
@pytest.mark.usefixtures("fake_ranks")
@pytest.mark.parametrize("float32_gradients", [False, True])
@pytest.mark.parametrize("regions", [False, True])
def test_generated_code_computes_gradients_in_place(float32_gradients: bool, regions: bool) -> None:
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config
    from torch._inductor.utils import run_and_get_code

    reduced_in = torch.float32 if float32_gradients else torch.bfloat16
    options = {"float32_gradients": float32_gradients, "regions": regions}
    model, call = sharded("inductor", torch.bfloat16, reduced_in, **options)
    with inductor_config.patch(fx_graph_cache=False), functorch_config.patch(enable_autograd_cache=False):
        _, (forward, backward) = run_and_get_code(lambda: call(*tokens()).backward())
    alias = r"(\w+) = reinterpret_tensor\((\w+), \((\d+), (\d+)\), \(\d+, 1\), (\d+)\)  # alias"
    parts = {part: bucket for part, bucket, *_ in re.findall(alias, backward)}
    kernel = "mm_dtype" if float32_gradients else "mm"
    outs = re.findall(rf"extern_kernels\.{kernel}\(.*out=(\w+)\)", backward)
    matrices = sum(len(slot.shape) == 2 for b in model.sharded.buckets for slot in b.plan.layout.slots)
    blocks = 1 if regions else CONFIG.layers  # a region's code is there once
    own = (matrices - 2) // CONFIG.layers * blocks
    assert sum(out in parts for out in outs) == own + 1  # and the head's; the embedding's is no product
    assert forward.count("all_gather_into_tensor.default(") == len(model.sharded.buckets)


@pytest.mark.usefixtures("one_rank")
def test_training_makes_no_host_synchronization() -> None:
    """Training never waits for the GPU unless the user asks for it."""
    model, call = sharded(MODES[-1], torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        call(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    batch = tokens()
    for _ in range(3):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Product(nn.Module):
    """The gradient of ``linear.weight`` is the matrix product of two inputs that are exact in half precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Embedding(2048, 256)
        self.linear = nn.Linear(256, 512, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        self.to("cuda", dtype)

    def forward(self, tokens: Tensor, slope: Tensor) -> Tensor:
        return (self.linear(self.embedding(tokens)) * slope).float().sum()


@pytest.mark.skipif(FAKE, reason="FAKE GPU: CPUs have no product in half precision that gives float32")
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("mode", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_gradients_are_more_exact(mode: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randperm(2048, generator=generator).view(4, 512).cuda()
    slope = torch.randn(4, 512, 512, generator=generator).to("cuda", dtype)
    found: dict[bool, dict[str, Tensor]] = {}
    for float32_gradients in (False, True):
        precision = MixedPrecisionPolicy(grad_comm_dtype=torch.float32)
        model = fully_shard_model(Product(dtype), fsdp_unit_modules=None, mixed_precision_policy=precision)
        options = {"inner": mode, "float32_gradients": float32_gradients}
        torch.compile(model, backend="mfsdp", fullgraph=True, options=options)(tokens, slope).backward()
        found[float32_gradients] = {n: p.grad.full_tensor() for n, p in model.module.named_parameters()}
        torch._dynamo.reset()
    inputs = Product(dtype).embedding(tokens).flatten(0, 1).double()
    exact = slope.flatten(0, 1).double().T @ inputs
    errors = {
        asked: (g["linear.weight"].double() - exact).abs().max() / exact.abs().max() for asked, g in found.items()
    }
    assert errors[True] < 1e-5  # a float32 sum of 2048 products
    assert errors[True] < errors[False] / 20  # float16 rounds to 2^-11, bfloat16 to 2^-8
    assert torch.equal(found[True]["embedding.weight"], found[False]["embedding.weight"])  # cast as before


# -- predictions ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("budget", [None, "40GiB"])
def test_memory_and_time_are_as_predicted(budget: str | None) -> None:
    """Memory and time are within the project's bounds of the prediction.

    The model is larger than in the other tests, so that kernels take longer than their launches.
    """
    torch.manual_seed(0)
    config = LlamaConfig(vocabulary=32000, width=2048, layers=8, heads=16, kv_heads=8, hidden=5632)
    batch = (4, 2048)
    if FAKE:
        config, batch = CONFIG, (2, 16)
    model = fully_shard_model(Llama(config).to("cuda", torch.bfloat16), fsdp_unit_modules=[Block])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    options: dict[str, Any] = {"report": True, "inner": MODES[-1]} | ({"memory_budget": budget} if budget else {})
    if (hardware := Path(os.environ.get("MFSDP_GPU_HARDWARE", ""))).is_file():  # calibrated, unlike the package's files
        options["hardware"] = str(hardware)
    call = torch.compile(model, backend="mfsdp", options=options)
    x, y = torch.randint(0, config.vocabulary, (2, *batch), device="cuda")

    def compute() -> None:
        call(x, y).backward()
        model.zero_grad()

    for _ in range(3):
        call(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    compute()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - cublas_workspaces()
    timeline = forecast.predicted(model)
    made = forecast.report(model, measured=forecast.measure(model, compute))
    predicted, measured = (sum(getattr(unit, name) for unit in made.measured) for name in ("predicted", "measured"))
    assert predicted > 0
    assert measured > 0
    skip_what_is_measured()
    assert timeline.peak_bytes == pytest.approx(peak, rel=0.05)
    assert predicted == pytest.approx(measured, rel=0.15)
