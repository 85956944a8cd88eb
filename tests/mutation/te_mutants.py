"""Mutants of what the product knows about Transformer Engine."""

from __future__ import annotations

from .mutant import Mutant

LAYERS = "runtime/compat/transformer_engine.py"
WRITTEN = "runtime/memory/written_gradients.py"
PLANES = "runtime/memory/planes.py"
TESTS = "te/test_transformer_engine.py -k"
QUANTIZED = "te/test_primary_weights.py -k"

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
        "layers write every gradient where the first parameter's belongs",
        "lambda: self._place(index)",
        "lambda: self._place(0)",
        (f"{TESTS} test_gradients_are_the_mean_over_ranks",),
    ),
    # -- quantized parameters -----------------------------------------------------------------------------------------
    Mutant(
        LAYERS,
        "main weights begin with the rounding errors of fp8",
        "return tensor.get_high_precision_init_val() if is_weight(tensor) else tensor",
        "return tensor.dequantize() if is_weight(tensor) else tensor",
        (f"{QUANTIZED} 'test_sharded_equals_alone and 2-Linear'",),
    ),
    Mutant(
        LAYERS,
        "a changed weight is replaced by its first value",
        "    if not same:",
        "    if False:",
        (f"{QUANTIZED} test_what_is_refused",),
    ),
    Mutant(
        LAYERS,
        "sharded parameters keep their values on the CPU alive",
        '    return {name for name in vars(tensor) if name.startswith("_") or name in kept}',
        "    return set()",
        (f"{QUANTIZED} test_what_is_refused",),
    ),
    Mutant(
        LAYERS,
        "quantized weights that a layer still refers to keep their memory",
        "            discard_weight(param)\n            continue",
        "            continue",
        (f"{QUANTIZED} test_no_quantized_weight_outlives_its_unit",),
    ),
    Mutant(
        LAYERS,
        "no transposed planes are made in forward",
        "columnwise=wrapper.transposed",
        "columnwise=False",
        (f"{QUANTIZED} test_transposed_planes",),
    ),
    Mutant(
        LAYERS,
        "layers quantize what they are initialized with",
        '    if quantizes:\n        vars(module)["primary_weights_in_fp8"] = False',
        '    if False:\n        vars(module)["primary_weights_in_fp8"] = False',
        (f"{QUANTIZED} test_initialization_on_meta",),
    ),
    Mutant(
        "runtime/formats/forms.py",
        "Transformer Engine's scales are those of float32 weights",
        "casts=True",
        "casts=False",
        (f"{QUANTIZED} 'test_sharded_equals_alone and 2-Linear'",),
    ),
    Mutant(
        PLANES,
        "ranks that share 32 rows have different scales for them",
        "        if self._count and group.size > 1:",
        "        if group.size < 1:",
        (f"{QUANTIZED} test_scales_of_cut_blocks",),
    ),
    Mutant(
        PLANES,
        "blocks that begin with a shard count as cut",
        "for row in rows if row % MX_BLOCK})",
        "for row in rows})",
        (f"{QUANTIZED} test_which_blocks_are_cut",),
    ),
    Mutant(
        LAYERS,
        "a backward that dequantizes reads another plane than forward",
        "            return recipe is None or",
        "            return recipe is None and",
        (f"{QUANTIZED} test_backward_that_dequantizes",),
    ),
    Mutant(
        "runtime/eager/parameters.py",
        "recomputed layers get only the plane of forward",
        "Planes.BOTH if in_backward else Planes.ROWS)  # recomputed",
        "Planes.ROWS)  # recomputed",
        (f"{QUANTIZED} 'test_checkpointed_blocks and mxfp8'",),
    ),
)
