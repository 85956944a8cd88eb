"""Attention that also returns the logarithm of the sum of exponentials, from which partial results can be merged."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["partial_attention", "partial_attention_backward"]


_aten = torch.ops.aten
_cpu = _aten._scaled_dot_product_flash_attention_for_cpu.default
_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_flash = _aten._scaled_dot_product_flash_attention.default
_flash_backward = _aten._scaled_dot_product_flash_attention_backward.default


def partial_attention(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Compute attention to some of the keys, by flash attention.

    Args:
        query: ``[batch, heads, rows, width]``; bfloat16 or float16, on the CPU also float32 and float64.
        key, value: ``[batch, heads, columns, width]``.
        causal: Whether row i sees columns 0 to i.
        scale: Factor of the scores. None: ``1 / sqrt(width)``.

    Returns:
        The output, shaped like ``query``, and the logarithm of the sum of exponentials of the scores,
        ``[batch, heads, rows]``, float32 (float64 for float64).
    """
    if query.device.type == "cpu":
        output, log_sum = _cpu(query, key, value, 0.0, causal, attn_mask=None, scale=scale)
        if query.dtype == torch.float64 != log_sum.dtype:  # the fake kernel of torch 2.11 says float32
            log_sum = log_sum.to(torch.float64)
    else:
        output, log_sum = _flash(query, key, value, 0.0, causal, False, scale=scale)[:2]
    return output, log_sum


def partial_attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of ``query``, ``key`` and ``value`` from the scores between them.

    Args:
        gradient, output, log_sum: Gradient of the output, output, and logarithm of the sum of exponentials of the
            attention to *all* keys. The gradients of its parts then add up.
    """
    if query.device.type == "cpu":
        found = _cpu_backward(gradient, query, key, value, output, log_sum, 0.0, causal, attn_mask=None, scale=scale)
        return found[0], found[1], found[2]
    # Without dropout, the state of the random number generator is not read.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    found = _flash_backward(
        gradient, query, key, value, output, log_sum, None, None, query.shape[2], key.shape[2], 0.0, causal, state,
        unused, scale=scale,
    )  # fmt: skip
    return found[0], found[1], found[2]
