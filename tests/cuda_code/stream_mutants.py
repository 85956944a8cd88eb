"""Changes of the package's CUDA branches that only a GPU would show. The checker must name what each does."""

from __future__ import annotations

import ast
import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from mutation.mutant import ROOT, Change


@dataclass(frozen=True)
class Mutant:
    """A change of a file (:class:`mutation.mutant.Change`), and what finds it.

    Args:
        row: Name and mode of the row that runs.
        seen: What one violation says.
        rank: The rank that is changed. None: all.
    """

    file: str
    old: str
    new: str
    row: str
    seen: str
    rank: int | None = None


HOST = "runtime/guests/offload/host.py"
REDUCING = "runtime/eager/reducing.py"
MUTANTS = {
    "no wait for what is copied": Mutant(
        HOST, "        stream.wait_stream(current)  # which computes it\n", "", "offload:eager", "not ordered"
    ),
    "no wait for a copy": Mutant(HOST, "        current.wait_stream(stream)\n", "", "offload:eager", "not ordered"),
    "no record_stream of a source": Mutant(
        HOST, "        source.record_stream(stream)\n", "", "offload:eager", "missing record_stream"
    ),
    "no record_stream of a target": Mutant(
        HOST, "        target.record_stream(current)\n", "", "offload:eager", "missing record_stream"
    ),
    "event before its copy": Mutant(
        HOST,
        "        target.copy_(source, non_blocking=True)\n"
        "        _in_flight[target.data_ptr()] = _Copy(stream.record_event(), device, source, target)\n",
        "        _in_flight[target.data_ptr()] = _Copy(stream.record_event(), device, source, target)\n"
        "        target.copy_(source, non_blocking=True)\n",
        "activation offload:aot_eager",
        "not ordered",
    ),
    "wait on another stream": Mutant(
        HOST,
        "torch.cuda.current_stream(started.device).wait_event(started.event)",
        "_stream_of(started.device, True).wait_event(started.event)",
        "activation offload:aot_eager",
        "not ordered",
    ),
    "memory of a copy is not awaited": Mutant(
        HOST,
        "    stream.wait_stream(current)  # which computes the source, or has",
        "    #",
        "activation offload:aot_eager",
        "not ordered",
    ),
    "memory of a copy is freed": Mutant(
        HOST,
        "_Copy(stream.record_event(), device, source, target)",
        "_Copy(stream.record_event(), device, None, None)",
        "dropped:eager",
        "missing record_stream",
    ),
    "no settle before gradients are added": Mutant(
        "runtime/memory/gradients.py",
        "        bucket.plan.rest.settle(bucket.device)\n    given, gradient = gradient, _run_tensor_hooks(",
        "        pass\n    given, gradient = gradient, _run_tensor_hooks(",
        "offload, accumulation:eager",
        "not ordered",
    ),
    "no settle before shards are written": Mutant(
        "runtime/memory/tensor.py",
        "            backing.settle()\n        torch.autograd",
        "            pass\n        torch.autograd",
        "offload, written:eager",
        "not ordered",
    ),
    "reduction awaited after its use": Mutant(
        REDUCING,
        "            result = self._step.wait(reduction.result, flight.land, bucket.operands)\n",
        "            result = reduction.result.clone()\n            self._step.wait(reduction.result)\n",
        "full:eager",
        "not ordered",
    ),
    "sent gradients overwritten": Mutant(
        REDUCING,
        "            started = flight.start(gradient, bucket.operands)\n",
        "            started = flight.start(gradient, bucket.operands)\n            gradient.zero_()\n",
        "full:eager",
        "not ordered",
    ),
    "buffer handed out early": Mutant(
        "runtime/memory/comm_buffers.py",
        "            if buffers[index].is_free or (",
        '            if buffers[index].is_free or kind.use == "gradients" or (',
        "double_buffer:eager",
        "not ordered",
    ),
    "not registered with one communicator": Mutant(
        "runtime/memory/registration.py",
        "        for group, backend in backends:\n            compat.warm_up",
        "        for group, backend in backends[:-1]:\n            compat.warm_up",
        "nccl_ub:eager",
        "before it is registered",
    ),
    "registered twice": Mutant(
        "runtime/memory/registration.py",
        "            compat.register_memory(backend, memory, symmetric)\n",
        "            compat.register_memory(backend, memory, symmetric)\n" * 2,
        "nccl_ub:eager",
        "registered twice",
    ),
    "a reduction of another kind on one rank": Mutant(
        "runtime/lanes/plain.py",
        "        return compat.reduce_scatter(x, self.op, self.group.size, self.group.name)\n",
        '        return compat.reduce_scatter(x, "max", self.group.size, self.group.name)\n',
        "full:eager",
        "rank 1 starts reduce_scatter_tensor",
        rank=1,
    ),
    "warm-up of a capture does not wait": Mutant(
        "runtime/guests/capture/devices.py",
        "        self._stream.wait_stream(current)\n",
        "",
        "captured:eager",
        "not ordered",
    ),
    "nothing waits for the warm-up": Mutant(
        "runtime/guests/capture/devices.py",
        "        current.wait_stream(self._stream)\n",
        "",
        "captured:eager",
        "not ordered",
    ),
    "host copies are read early": Mutant(
        "mfsdp_compile/checkpoint/host_copies.py",
        "        event.synchronize()\n",
        "",
        "state dict:eager",
        "not ordered",
    ),
    "event of host copies on another stream": Mutant(
        "mfsdp_compile/checkpoint/host_copies.py",
        "        event.record(torch.cuda.current_stream(self._device))\n",
        "        event.record(torch.cuda.Stream(self._device))\n",
        "state dict:eager",
        "not ordered",
    ),
    "staged copies are read early": Mutant(
        "mfsdp_compile/checkpoint/saving.py",
        "            torch.cuda.current_stream(device).synchronize()\n",
        "            pass\n",
        "staged:eager",
        "not ordered",
    ),
}


@contextlib.contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Context in which the functions that a mutant changes are those of the changed source, wherever they are held."""
    import fake_gpu

    from mfsdp_compile.runtime.lanes import lane

    file, text = Change(mutant.file, mutant.old, mutant.new).apply()
    module = importlib.import_module(f"mfsdp_compile.{_import_name(file)}")
    path = ROOT / file
    plain = path.read_text(encoding="utf-8")
    changed = _changed(ast.parse(fake_gpu.words(plain)), ast.parse(fake_gpu.words(text)))
    assert changed, "the mutant changes no function"
    with contextlib.ExitStack() as stack:
        for forget in (lane._own_lanes.clear, lane._lanes.clear):  # lanes keep methods of their stages
            forget()
            stack.callback(forget)
        for owner, function in changed:
            holder = module if owner is None else getattr(module, owner)
            made: dict[str, Any] = {}
            # The calls of torch.library would register an operator again.
            function.decorator_list = [d for d in function.decorator_list if "library" not in ast.unparse(d)]
            exec(compile(ast.Module([function], []), str(path), "exec", dont_inherit=True), vars(module), made)
            before = vars(holder)[function.name]
            holders = [(holder, function.name)]
            if owner is None:
                holders += [
                    (other, name)
                    for other_name, other in list(sys.modules.items())
                    if other_name.startswith("mfsdp_compile.") and other is not module
                    for name, value in list(vars(other).items())
                    if value is before
                ]
            for place, name in holders:
                stack.enter_context(mock.patch.object(place, name, made[function.name]))
        yield


def _import_name(file: str) -> str:
    return ".".join(Path(file.removeprefix("mfsdp_compile/")).with_suffix("").parts)


def _changed(before: ast.Module, after: ast.Module) -> list[tuple[str | None, Any]]:
    """Return the functions of a module, and methods with their classes, that differ."""
    found: list[tuple[str | None, Any]] = []
    for a, b in zip(before.body, after.body, strict=True):
        if ast.dump(a) == ast.dump(b):
            continue
        if isinstance(b, ast.ClassDef) and isinstance(a, ast.ClassDef):
            found += [(b.name, y) for x, y in zip(a.body, b.body, strict=True) if ast.dump(x) != ast.dump(y)]
        else:
            found.append((None, b))
    return found
