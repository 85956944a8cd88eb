"""Forms in which modules get parameters that are gathered in float8.

A form says how parameters are quantized, and what modules get of what was gathered:

``"dequantized"``
    An ordinary tensor in the compute dtype, for every module.
``"dequantized, with powers of two as scales"``
    The same, for modules that quantize their weights again with powers of two as scales, as ``Float8Linear`` does with
    torchao's rowwise recipes. What they get is then exact in their float8 too, by rows, columns or matrices; otherwise
    it would be rounded twice, to another grid each time.
``"torchao"``
    A ``Float8TrainingTensor`` of torchao: a view of the gathered bytes where they arrived, and their scale. Its
    ``Float8Linear`` multiplies with it as it is.
``"te"``, and others that begin with it
    A ``Float8Tensor`` of Transformer Engine, the same: what its layers hold that were built under
    ``quantized_model_init`` with ``Float8CurrentScaling``.
``"te, mxfp8"``
    An ``MXFP8Tensor`` of Transformer Engine, with the plane of rows in forward and that of columns in backward.

``"multiplied"``
    What compiled code with ``fp8_matmul`` takes in place of the first: data and scales, for products in float8. No
    bucket is planned in this form; see :mod:`mfsdp_compile.passes.guests.fp8_matmul`.

With other forms, a bucket is never dequantized: it is uint8 in memory, also where it stays gathered between
uses. A module gets what the form's wrapper makes of three tensors:

    anchor      the parameter's shape in the compute dtype, without memory: what gradients go to
    data        float8, the parameter's shape: a view of the gathered bucket
    scale       float32, :func:`.quantize.scale_shape`: a view of the scales of the bucket

Compiled code goes through the marker ``mfsdp::unshard_quantized``, which stands for the three. In the graphs that
result, the wrapper is gone: tensor subclasses exist while graphs are traced, not in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from .. import compat
from . import quantize


class Wrapper(Protocol):
    """Makes the tensors that modules get for one parameter. Dynamo reads it: it is plain data, equal in equal
    modules."""

    def wrap(self, data: Any, scale: Any, dtype: Any, *columns: Any) -> Tensor:
        """Wrap a parameter, without history. It refers to the memory of ``data`` once.

        In a form with planes, ``columns`` are data and scale of the plane of columns, and those of the other may be
        None.
        """

    def connect(self, anchor: Tensor, data: Tensor, scale: Tensor) -> Tensor:
        """Wrap a parameter whose gradient goes to ``anchor``. Dynamo traces it."""

    def retire(self, wrapped: Tensor, outdated: Tensor) -> None:
        """Make any use of a wrapped parameter fail, by putting a tensor into it that refuses to be used."""


@dataclass(frozen=True)
class Form:
    """A form.

    Args:
        scales_of: Maps the largest absolute values, in float32, to scales.
        quantize: Maps values, and scales that broadcast to their shape, to bytes.
        wrapper_of: Maps a parameter as it was when the model was sharded, and the modules that hold it, to its wrapper.
            None: modules get views of the gathered bucket.
        casts: Whether values are rounded to the compute dtype first. Otherwise, they are quantized from the main dtype.
        planes: Whether modules get one plane in forward and another in backward; see :mod:`..guests.quantized.planes`.
    """

    scales_of: Callable[[Tensor], Tensor]
    quantize: Callable[[Tensor, Tensor], Tensor]
    wrapper_of: Callable[[nn.Parameter, Sequence[nn.Module]], Wrapper | None]
    casts: bool = False
    planes: bool = False


def _no_wrapper(original: nn.Parameter, modules: Sequence[nn.Module]) -> None:
    return None


def _of_transformer_engine(form: str) -> Form:
    layers: Any = compat.transformer_engine

    wrapper: Any = layers.FORMS[form]
    planes = form == layers.MXFP8
    scales_of = layers.scales_of if planes or not wrapper.powers_of_2 else layers.scales_of_powers_of_2
    return Form(scales_of, quantize.quantize_by_factors, lambda original, modules: wrapper, casts=True, planes=planes)


FORMS: Mapping[str, Form] = {
    quantize.DEQUANTIZED: Form(quantize.scales_of, quantize.quantize, _no_wrapper),
    quantize.ROUNDED: Form(quantize.rounded_scales_of, quantize.quantize, _no_wrapper),
    compat.torchao.FORM: Form(compat.torchao.scales_of, quantize.quantize_by_factors, compat.torchao.wrapper_of),
    **{form: _of_transformer_engine(form) for form in compat.transformer_engine.FORMS},
}
