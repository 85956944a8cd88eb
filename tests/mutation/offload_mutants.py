"""Mutants of what concerns shards, gradients and optimizer state in host memory."""

from __future__ import annotations

from .mutant import Mutant

REJECTED = ("passes/test_verify.py -k test_every_mutant_is_rejected",)
REFUSED = ("runtime/test_offload.py -k test_refusals",)

OFFLOAD = (
    Mutant(
        "runtime/memory/host.py",
        "both arenas are the same memory on a CPU",
        "        return allocate().copy_(source)\n",
        "        return source\n",
        ("runtime/test_offload.py -k test_copies",),
    ),
    Mutant(
        "runtime/plan/model_plan.py",
        "ranks may keep their shards in different places",
        """            more += f", in {bucket.offload}" if bucket.offload is not None else ""\n""",
        "",
        REFUSED,
    ),
    Mutant(
        "runtime/plan/offload.py",
        "quantized shards are offloaded",
        "    if bucket.scaling:\n",
        "    if False:\n",
        REFUSED,
    ),
    Mutant(
        "passes/solver/simulate.py",
        "optimizer state in host memory is on the device",
        "        if not info.exchange.offload:\n",
        "        if True:\n",
        ("runtime/test_offload.py -k test_memory_by_arena",),
    ),
    Mutant(
        "passes/verifier/rules.py",
        "shards that are sent from host memory pass",
        "        if len(fetches) != wanted:\n",
        "        if False:\n",
        REJECTED,
    ),
    Mutant(
        "passes/verifier/rules.py",
        "gradients that stay on the device pass",
        "            if len(offloads) != bool(exchange.offload):\n",
        "            if False:\n",
        REJECTED,
    ),
)
