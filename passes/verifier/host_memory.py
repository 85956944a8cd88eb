"""The rule for host memory: what is copied between it and the device, and when."""

from __future__ import annotations

from mfsdp_compile.runtime.schedule.phase import Phase

from .. import roles
from .analysis import Analysis, Findings
from .contract import Contract, is_of_portions


def right_arena(found: Analysis, contract: Contract | None) -> Findings:
    """A shard in host memory is fetched once for each gather, unless its copy is sent, and its gradient copied back
    once.

    Both copies are between the host and the device of the exchange. The fetch comes before casts, because the device
    casts. A copy that the device keeps is neither fetched nor cast: it is in the dtype that is sent, as the shard is
    not. Everything else is on the device at all times, and so are portions, except values saved for backward.
    """
    yield from _copied_once(found)
    for launch in found.gather_launches:
        exchange = found.info(launch.bucket).exchange
        before = launch.before
        fetches = [node for node in before if node.target is roles.FETCH]
        fetched = found.info(launch.bucket).is_fetched and not is_of_portions(found, contract, launch)
        if len(fetches) != fetched:
            times = f"fetched {len(fetches)} times, not {int(fetched)}"
            yield f"it is {'sent from host memory' if fetched and not fetches else times}", launch.node, launch.bucket
        for cast in launch.casts if exchange.keeps_copy else ():
            yield f"{cast} casts what is sent from the copy on the device", cast, launch.bucket
        for fetch in fetches:
            if (to := fetch.args[1]) != exchange.offload and fetched:
                yield f"it is fetched to {to!r}, not {exchange.offload!r}", fetch, launch.bucket
            if fetch is not before[-1]:
                yield f"{fetch} fetches it after a cast", fetch, launch.bucket
    for reduction in found.reductions:
        exchange = found.info(reduction.bucket).exchange
        unreduced, reduced = reduction.before, tuple(after for _, after in reduction.returned)
        if not reduction.stages:  # no other rank holds the bucket: its gradient is complete when it is packed
            unreduced, reduced = (), unreduced
        for node in (node for passed in unreduced for node in passed if node.target is roles.OFFLOAD):
            yield f"{node} copies its gradient to the host before it is reduced", node, reduction.bucket
        for after in reduced:
            offloads = [node for node in after if node.target is roles.OFFLOAD]
            if len(offloads) != bool(exchange.offload):
                what = f"{len(offloads)} times, not {int(bool(exchange.offload))}"
                yield f"its gradient is copied to the host {what}", reduction.last, reduction.bucket
            for node in offloads:
                if node.args[1] != exchange.pins:
                    kind = "pinned" if node.args[1] else "pageable"
                    yield f"{node} copies its gradient to {kind} memory", node, reduction.bucket
                if any(later.target is not roles.DELIVER for later in after[after.index(node) + 1 :]):
                    yield f"its gradient is changed after {node}, on the host", node, reduction.bucket


def _copied_once(found: Analysis) -> Findings:
    """Check copies of saved values: forward copies to the host, backward copies back, and each awaits its copies once.

    Until a copy is awaited, nothing reads it, and its source exists and is not written to. What is in host memory is
    only returned, or fetched.
    """
    order = found.order
    starts = [node for node in order if node.target in (roles.OFFLOAD_SAVED, roles.FETCH_SAVED)]
    for start in starts:
        is_fetch, source = start.target is roles.FETCH_SAVED, start.all_input_nodes[0]
        if found.phase is not (Phase.BACKWARD if is_fetch else Phase.FORWARD):
            yield f"{start} copies a saved value in a {found.phase.value} graph", start
        waits = [user for user in start.users if user.target is roles.WAIT_SAVED and user.args[0] is start]
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
