"""Copies of saved values between the device and host memory, and when."""

from __future__ import annotations

from mfsdp_compile.runtime.guests.offload.operators import FETCH_SAVED, OFFLOAD_SAVED, WAIT_SAVED
from mfsdp_compile.runtime.schedule.phase import Phase

from .analysis import Analysis, Findings


def copied_once(found: Analysis) -> Findings:
    """Check copies of saved values: forward copies to the host, backward copies back, and each awaits its copies once.

    Until a copy is awaited, nothing reads it, and its source exists and is not written to. What is in host memory is
    only returned, or fetched.
    """
    order = found.order
    starts = [node for node in order if node.target in (OFFLOAD_SAVED, FETCH_SAVED)]
    for start in starts:
        is_fetch, source = start.target is FETCH_SAVED, start.all_input_nodes[0]
        if found.phase is not (Phase.BACKWARD if is_fetch else Phase.FORWARD):
            yield f"{start} copies a saved value in a {found.phase.value} graph", start
        waits = [user for user in start.users if user.target is WAIT_SAVED and user.args[0] is start]
        if len(waits) != 1:
            yield f"the copy {start} is awaited {len(waits)} times, not once", start
        until = min((order[wait] for wait in waits), default=len(order))
        for wait in waits:
            if wait.args[1] is not source:
                yield f"{wait} does not keep {source}, which {start} copies", wait
        for user in start.users:
            if user not in waits and (order[user] < until or (not is_fetch and user.op != "output")):
                yield f"{user} reads {start} {'before it is awaited' if is_fetch else 'in host memory'}", user
        for node, memory in found.writes:
            if order[start] < order[node] < until and memory.overlaps(found.memory(source)):
                yield f"{node} writes to {source} while {start} copies it", node
        if not is_fetch and (times := found.outputs.count(start)) != 1:
            yield f"the copy {start} is returned {times} times, not once", start
        if is_fetch:
            for user in source.users:
                if user is not start and user not in waits:
                    yield f"{user} reads {source}, which is in host memory", user
