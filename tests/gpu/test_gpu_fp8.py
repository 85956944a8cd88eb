"""Products and gathers in float8 on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from gpu_models import FAKE, MODES, same_bits, tokens, whole
from torch import Tensor

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model
from mfsdp_compile.models.llama import Block
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.formats import quantize
from mfsdp_compile.runtime.formats.fp8_linear import quantize_over

pytestmark = [
    pytest.mark.skipif(
        not FAKE and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
        reason="needs a GPU that multiplies in float8 (compute capability 8.9)",
    ),
    pytest.mark.usefixtures("one_rank"),
]
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
ROWWISE = MixedPrecisionPolicy(param_comm_dtype=E4M3)
NVFP4 = MixedPrecisionPolicy(param_comm_dtype=torch.float4_e2m1fn_x2, param_comm_scaling="nvfp4")
_BY_ROWS = compat.multiplies_by_rows(torch.device("cpu"))
SCALINGS = [
    pytest.param("rowwise", marks=pytest.mark.skipif(FAKE and not _BY_ROWS, reason="needs torch 2.13 on CPUs")),
    "tensorwise",
]


def operands() -> tuple[Tensor, Tensor, Tensor]:
    """Return input, weight and the gradient of the result, on the GPU."""
    generator = torch.Generator().manual_seed(1)
    sizes = ((4, 64, 256), (512, 256), (4, 64, 512))
    x, w, g = (torch.randn(size, generator=generator).to("cuda", BF16) for size in sizes)
    return x.requires_grad_(), w.requires_grad_(), g


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("compiled", [False, True])
def test_products_and_gradients(scaling: str, compiled: bool) -> None:
    """The GPU's products are those of the exact values within the rounding of operands: 2.6 % each, 5.2 % for e5m2."""
    x, w, g = operands()
    call = torch.ops.mfsdp.fp8_linear
    result = (torch.compile(call) if compiled and not FAKE else call)(x, w, None, scaling, True)
    result.backward(g)
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    expected = F.linear(*exact)
    expected.backward(g.double())
    bound = 1.2 * (0.026**2 + (0.026 if scaling == "rowwise" else 0.052) ** 2) ** 0.5
    for mine, its in ((result, expected), (x.grad, exact[0].grad), (w.grad, exact[1].grad)):
        assert mine is not None
        assert its is not None
        assert (mine.double() - its).norm() < bound * its.norm()


def test_quantization_is_that_of_a_cpu() -> None:
    """Scales and bytes are those of the CPU, so ranks of one job may quantize on either."""
    values = operands()[0].detach().reshape(-1, 256)
    for dims in ([1], [0], [0, 1]):
        mine, its = quantize_over(values, dims, E4M3), quantize_over(values.cpu(), dims, E4M3)
        assert torch.equal(mine[1].cpu(), its[1])
        assert torch.equal(mine[0].view(torch.uint8).cpu(), its[0].view(torch.uint8))


def test_nvfp4_is_that_of_a_cpu() -> None:
    """So are records of weights that are gathered in float4, and what they are dequantized to."""
    values = operands()[0].detach().reshape(-1, 256) * torch.logspace(-6, 0, 256, device="cuda").unsqueeze(-1)
    found = []
    for on_device in (values, values.cpu()):
        parts = [(0, on_device.shape, quantize.matrix_scales_of(quantize.amax(on_device, "nvfp4")))]
        data = quantize.quantize_nvfp4(on_device.flatten(), parts)
        found.append(
            [data.cpu(), *(quantize.dequantize_nvfp4(data, parts, dtype).cpu() for dtype in (BF16, torch.float32))]
        )
    for mine, its in zip(*found, strict=True):
        assert torch.equal(mine, its)


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), ROWWISE], ids=["", "float8 gathers"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_compiled_model(scaling: str, policy: MixedPrecisionPolicy) -> None:
    model = fully_shard_model(whole().to(BF16), fsdp_unit_modules=[Block], mixed_precision_policy=policy)
    options = {"inner": MODES[-1], "fp8_matmul": scaling, "fp8_wgrad": True}
    comparison = model.verify_step(*tokens(), options=options)
    assert 1e-4 < comparison.largest < 0.35


@pytest.mark.parametrize("policy", [ROWWISE, NVFP4], ids=["float8", "float4"])
def test_gathers_eager_and_compiled(policy: MixedPrecisionPolicy) -> None:
    losses = []
    for mode in MODES:
        model = fully_shard_model(whole().to(BF16), fsdp_unit_modules=[Block], mixed_precision_policy=policy)
        call = model if mode == "eager" else torch.compile(model, backend="mfsdp", options={"inner": mode})
        with same_bits():
            losses.append(call(*tokens()))
            losses[-1].backward()
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0], rtol=1e-2, atol=0)  # Inductor rounds to bfloat16 less often
