"""Which fraction of communication hides behind computation, from a profiler's trace of one step.

python -m overlap RESULT.json TRACE.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return disjoint intervals, in order, that cover the same points."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def covered(these: Sequence[Interval], by: Sequence[Interval]) -> float:
    """Return the length of ``these`` inside ``by``. Both are disjoint and in order."""
    total, position = 0.0, 0
    for begin, end in these:
        while position < len(by) and by[position][1] <= begin:
            position += 1
        for other_begin, other_end in by[position:]:
            if other_begin >= end:
                break
            total += min(end, other_end) - max(begin, other_begin)
    return total


def hidden(events: Iterable[Mapping[str, Any]], fake: bool = False) -> dict[str, Any]:
    """Return seconds of communication and computation, and the fraction of communication beside which a kernel ran.

    Kernels whose names begin with ``nccl`` communicate; all others, and copies, compute. On fake GPUs, gloo's ranges
    communicate, and torch's operators compute. The fraction is None if nothing communicates: NCCL copies if there is
    one rank.
    """
    kinds, prefix = (
        (("cpu_op", "user_annotation"), "gloo:") if fake else (("kernel", "gpu_memcpy", "gpu_memset"), "nccl")
    )
    spans: dict[bool, list[Interval]] = {True: [], False: []}
    for event in events:
        if event.get("cat") in kinds and event.get("ph") == "X":
            communicates = event["name"].startswith(prefix)
            if communicates or event["cat"] != "user_annotation":
                spans[communicates].append((event["ts"], event["ts"] + event["dur"]))
    communication, computation = union(spans[True]), union(spans[False])
    total = sum(end - begin for begin, end in communication)
    return {
        "communication_s": total / 1e6,
        "computation_s": sum(end - begin for begin, end in computation) / 1e6,
        "hidden": covered(communication, computation) / total if total else None,
    }


def measure(rank: int, device: Any) -> dict[str, Any]:
    import programs
    import torch
    import torch.distributed as dist
    from gpu_models import FAKE, MODES
    from torch.profiler import ProfilerActivity, profile

    from mfsdp_compile import fully_shard_model
    from mfsdp_compile.models.llama import Block, Llama

    config, batch, length = programs.llama(small=FAKE)
    torch.manual_seed(0)
    model = fully_shard_model(Llama(config).to(device, torch.bfloat16), fsdp_unit_modules=[Block])
    call = torch.compile(model, backend="mfsdp", options={"inner": MODES[-1]})
    x, y = torch.randint(0, config.vocabulary, (2, batch, length), device=device)
    for _ in range(3):
        call(x, y).backward()
        model.zero_grad()
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CPU] + ([] if FAKE else [ProfilerActivity.CUDA])
    with profile(activities=activities) as profiled:
        call(x, y).backward()
        torch.cuda.synchronize()
    path = Path(sys.argv[2] if rank == 0 else f"{sys.argv[2]}.rank{rank}.json")
    profiled.export_chrome_trace(str(path))
    found: dict[str, Any] = hidden(json.loads(path.read_text())["traceEvents"], fake=FAKE)
    if rank:
        path.unlink()
    if found["hidden"] is None and dist.get_world_size() > 1:
        found["failed"] = ["the trace has no communication"]
    return found


if __name__ == "__main__":
    import programs

    programs.run(measure)
