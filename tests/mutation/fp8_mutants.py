"""Mutants of matrix products in float8."""

from __future__ import annotations

from .mutant import Mutant

_TESTS = "passes/test_fp8_matmul.py"

FP8 = (
    Mutant(
        "runtime/formats/fp8_linear.py",
        "dgrad lacks the scales of the weight's rows",
        "                folded = gradients.float() * scales.view(1, -1)",
        "                folded = gradients.float()",
        (f"{_TESTS} -k folded",),
    ),
    Mutant(
        "runtime/formats/fp8_linear.py",
        "values are quantized over the dimension that is not summed over",
        "[dim] if scaling ==",
        "[1 - dim] if scaling ==",
        (f"{_TESTS} -k products_and_gradients",),
    ),
    Mutant(
        "runtime/formats/fp8_linear.py",
        "a gradient with one scale has the narrower range",
        '"tensorwise": torch.float8_e5m2}',
        '"tensorwise": torch.float8_e4m3fn}',
        (f"{_TESTS} -k small_gradients",),
    ),
    Mutant(
        "passes/fp8_matmul.py",
        "layers that a filter leaves out are multiplied in float8",
        "    if not is_candidate:",
        "    if False:",
        (f"{_TESTS} -k 'filter or rewritten'",),
    ),
    Mutant(
        "passes/fp8_matmul.py",
        "layers that do not compute in bfloat16 are multiplied in float8",
        "    if result.dtype != torch.bfloat16:",
        "    if False:",
        (f"{_TESTS} -k rewritten",),
    ),
    Mutant(
        "passes/reshard.py",
        "quantized weights are saved for backward",
        "*_MAXIMA, roles.QUANTIZE):",
        "*_MAXIMA):",
        (f"{_TESTS} -k 'graphs or parity_with_the_operator'",),
    ),
    Mutant(
        "mfsdp_compile/backend/arguments.py",
        "code is shared with blocks that the filter tells apart",
        "            if found != self._fp8_expected[number]:",
        "            if False:",
        (f"{_TESTS} -k shared_between",),
    ),
    Mutant(
        "runtime/compat/inductor.py",
        "Inductor's kernels divide rows of zeros by zero",
        "    scales = lowerings[aten.add.Tensor](scales, cast(is_zero, torch.float32))  # rows of zeros have scale 1",
        "    pass",
        (f"{_TESTS} -k test_inductor",),
    ),
)
