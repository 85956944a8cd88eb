"""Mutants of what the product knows about Transformer Engine."""

from __future__ import annotations

from .mutant import Mutant

LAYERS = "runtime/compat/transformer_engine.py"
WRITTEN = "runtime/memory/written_gradients.py"
TESTS = "te/test_transformer_engine.py -k"

TRANSFORMER_ENGINE = (
    Mutant(
        LAYERS,
        "marks of tensor parallelism count in layers that are whole",
        'return is_layer(type(module)) and getattr(module, "tp_size", None) == 1',
        "return False",
        (f"{TESTS} test_gradients_are_the_mean_over_ranks",),
    ),
    Mutant(
        LAYERS,
        "an input of another dtype than the parameters is accepted",
        "dtypes <= {input.dtype}:",
        "dtypes:",
        (f"{TESTS} test_what_is_refused",),
    ),
    Mutant(
        LAYERS,
        "layers keep quantized weights from forward to backward",
        '"is_fsdp2": True}',
        '"is_fsdp2": False}',
        (f"{TESTS} 'test_no_weight_outlives_its_unit and Linear and False'",),
    ),
    Mutant(
        LAYERS,
        "weight gradients may be computed after their reduction",
        "    if is_delayed(module):",
        "    if False:",
        (f"{TESTS} test_what_is_refused",),
    ),
    Mutant(
        LAYERS,
        "operations give autograd the shards",
        "or self._mfsdp_window.runtime.in_forward():",
        "or False:",
        (f"{TESTS} test_gradients_are_the_mean_over_ranks",),
    ),
    Mutant(
        LAYERS,
        "weights that a layer still refers to keep their memory",
        "        torch._C.TensorBase.data.__set__(param, nothing)  # type: ignore[attr-defined]",
        "        del nothing",
        (f"{TESTS} test_no_weight_outlives_its_unit",),
    ),
    Mutant(
        WRITTEN,
        "what autograd has computed replaces what layers have written",
        "place.add_(",
        "place.copy_(",
        (f"{TESTS} 'test_gradients_written_into_the_bucket and 2-2'",),
    ),
    Mutant(
        WRITTEN,
        "gradients that layers write are in the place of the first parameter",
        "lambda: self._place(index)",
        "lambda: self._place(0)",
        (f"{TESTS} test_gradients_are_the_mean_over_ranks",),
    ),
)
