"""Slices of gradients in pieces: encoded in front of the collective, decoded and added behind the wait.

``exchange_slices`` and ``wait_summed`` communicate and compute. Before a graph is cut into pieces, the computation
becomes nodes of its own, which Inductor compiles with what is around them::

    sent = exchange_slices(packed, 8, "0", "int8")     encoded = encode_slices(packed, 8, "int8")
                                                       sent = exchange_slices(encoded, 8, "0")
    ...                                                ...
    total = wait_summed(sent, 8, "int8", 512)          received = wait_tensor(sent)
                                                       total = sum_slices(received, 8, "int8", 512)

Collectives and waits stay where they are in the order. What computes is one operator with a lowering each, and not the
operators of :mod:`~mfsdp_compile.runtime.formats.wire`: of these, Inductor would write values of all slices to memory.
"""

from __future__ import annotations

import torch
from torch import fx

from mfsdp_compile.passes import roles
from mfsdp_compile.runtime.formats import wire


def has_kernels(format: str, device: torch.device) -> bool:
    """Whether Triton can compute with a format on the device. Before Ada, it has no float8_e4m3fn."""
    is_float8 = bool(format) and wire.FORMATS[format].dtype is torch.float8_e4m3fn
    return not (is_float8 and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9))


def compute_slices(graph: fx.Graph) -> None:
    """Split what exchanges slices, and what awaits them, into communication and computation."""
    for exchange in graph.find_nodes(op="call_function", target=roles.EXCHANGE_SLICES):
        gradient, ranks, group, *encoding = exchange.args  # format and pieces, unless they are the defaults
        if not any(encoding[:1]) or not has_kernels(encoding[0], exchange.meta["val"].device):
            continue
        with graph.inserting_before(exchange):
            encoded = graph.call_function(roles.ENCODE_SLICES, (gradient, ranks, *encoding))
        encoded.meta["val"] = exchange.meta["val"]  # ranks receive as many bytes as they send
        exchange.args = (encoded, ranks, group)
    for summed in graph.find_nodes(op="call_function", target=roles.WAIT_SUMMED):
        slices, ranks, format, numel = summed.args
        if not has_kernels(format, summed.meta["val"].device):
            continue
        with graph.inserting_before(summed):
            received = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (slices,))
        received.meta["val"] = slices.meta["val"]
        summed.target, summed.args = roles.SUM_SLICES, (received, ranks, format, numel)
