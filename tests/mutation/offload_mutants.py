"""Mutants of what concerns shards, gradients and optimizer state in host memory."""

from __future__ import annotations

from .mutant import Mutant

REJECTED = ("passes/test_verify.py -k test_every_mutant_is_rejected",)
REFUSED = ("runtime/test_offload.py -k test_refusals",)
ARENAS = ("runtime/test_arenas.py -k test_arenas_meet_in_copies",)

OFFLOAD = (
    Mutant(
        "runtime/memory/host.py",
        "both arenas are the same memory on a CPU",
        "        return allocate().copy_(source)\n    stream, current = _stream_of(device, source.device == device), torch.cuda.current_stream(device)\n    if",
        "        return source\n    stream, current = _stream_of(device, source.device == device), torch.cuda.current_stream(device)\n    if",
        ("runtime/test_offload.py -k test_copies",),
    ),
    Mutant(
        "runtime/plan/model_plan.py",
        "ranks may keep their shards in different places",
        """    more += f", in {bucket.offload}" if bucket.offload is not None else ""\n""",
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
        "passes/verifier/host_memory.py",
        "shards that are sent from host memory pass",
        "        if len(fetches) != fetched:\n",
        "        if False:\n",
        REJECTED,
    ),
    Mutant(
        "passes/verifier/host_memory.py",
        "gradients that stay on the device pass",
        "            if len(offloads) != bool(exchange.offload):\n",
        "            if False:\n",
        REJECTED,
    ),
    Mutant(
        "passes/verifier/host_memory.py",
        "a copy that is cast for each gather passes",
        "        for cast in launch.casts if exchange.keeps_copy else ():\n",
        "        for cast in ():\n",
        REJECTED,
    ),
    Mutant(
        "runtime/memory/flat_shard.py",
        "the device's copy of a shard is never copied again",
        "        if self._on_device_of != self.flat._version:\n",
        "        if self._on_device is None:\n",
        ("runtime/test_offload_combinations.py -k test_loaded_weights",),
    ),
    Mutant(
        "runtime/memory/flat_shard.py",
        "the device's copy of a shard is copied at each use",
        "            self._on_device_of = self.flat._version\n",
        "            self._on_device_of = -1\n",
        ("runtime/test_optimizer_offload.py -k test_copies",),
    ),
    Mutant(
        "runtime/memory/flat_shard.py",
        "collectives are given host memory",
        "        return self.fetched() if at_rest else self.source()\n",
        "        return self.source()\n",
        ARENAS,
    ),
    Mutant(
        "runtime/memory/flat_shard.py",
        "shards in host memory are a part of the resident",
        "            if plan.main_dtype == plan.held_dtype and plan.offload is None:\n",
        "            if plan.main_dtype == plan.held_dtype:\n",
        ("runtime/test_arenas.py -k test_residents",),
    ),
    Mutant(
        "passes/solver/simulate.py",
        "gradients in host memory are not counted",
        "            info.layout.shard_numel * info.grad_dtype.itemsize for info in offloaded if info.trainable\n",
        "            0 for info in offloaded if info.trainable\n",
        ("runtime/test_optimizer_offload.py -k test_by_unit",),
    ),
    Mutant(
        "passes/verifier/host_memory.py",
        "saved values may be read before they are fetched",
        '            if user not in waits and (order[user] < until or (not is_fetch and user.op != "output")):\n',
        "            if False:\n",
        REJECTED,
    ),
    Mutant(
        "passes/verifier/host_memory.py",
        "copies of saved values need not be awaited once",
        '        if len(waits) != 1:\n            yield f"the copy',
        '        if False:\n            yield f"the copy',
        REJECTED,
    ),
    Mutant(
        "passes/activations.py",
        "saved values stay on the device until forward ends",
        "            free.prepend(wait)\n",
        "            pass\n",
        ("runtime/test_activation_offload.py -k test_places",),
    ),
    Mutant(
        "passes/activations.py",
        "values of the last units are offloaded",
        "        elif context.whole_model and (free",
        "        elif False and (free",
        ("runtime/test_activation_offload.py -k test_places",),
    ),
    Mutant(
        "passes/activations.py",
        "small values are offloaded",
        "        if size < context.policy.activation_offload_least:\n",
        "        if False:\n",
        ("runtime/test_activation_offload.py -k test_choice",),
    ),
    Mutant(
        "passes/solver/flow.py",
        "offloaded values count as memory of the device",
        "        if node.target is roles.OFFLOAD_SAVED:  # in host memory\n",
        "        if False:\n",
        ("planning/test_forecast.py -k test_memory_with_activation_offload",),
    ),
)
