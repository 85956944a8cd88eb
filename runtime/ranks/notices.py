"""What ranks that wait for one another publish in the store, and how messages put it in words.

The notices of a process group are under ``mfsdp/watch/<group>/``, as JSON:

    ask         a rank that waits in an agreement: the one that has begun least, or of those the first
    rest        a rank that waits in a collective of the program itself
    failed      the first rank whose forward, backward or program has failed
    end/<rank>  how a rank has ended or failed, if it could still tell
    over        the finding that ranks have diverged, for all
    abandoned   why a rank has left a guarded group
    notice      there, if there was ever one of these
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import torch.distributed as dist

from .. import compat
from ..program_lines import program_line
from .collective_order import Order

Notice = dict[str, Any]


def key_of(group: str, topic: str) -> str:
    return f"mfsdp/watch/{group}/{topic}"


def key_of_end(group: str, rank: int) -> str:
    return key_of(group, f"end/{rank}")


def refusal_of(rank: int) -> str:
    """Return the key of the error with which a rank was refused before it could arrive anywhere."""
    return f"mfsdp/refusal/{rank}"


def come_so_far(order: Order | None) -> Notice:
    """Return what each notice of this rank says. None: it has no model yet."""
    return {
        "epoch": order.epoch if order is not None else 0,
        "steps": order.steps if order is not None else 0,
        "progress": order.progress if order is not None else "before a model was sharded",
        "rank": dist.get_rank(),
        "counts": collectives_started(),
    }


def collectives_started() -> dict[str, int]:
    """Return how many collectives this rank has started in each process group, by name."""
    return {name: compat.collectives_started(compat.process_group(name)) for name in compat.known_groups()}


def found(store: dist.Store, key: str) -> Any:
    """Return a notice; None if there is none."""
    # Withdrawn values are set to null, not deleted: a get of a key that was deleted in the meantime would wait for it.
    return json.loads(store.get(key)) if store.check([key]) else None


def found_of_another(store: dist.Store, order: Order, topic: str) -> Any:
    """Return a notice of another rank in this epoch; None if there is none, or an older one, or this rank's own."""
    told = found(store, key_of(order.group, topic))
    return told if told is not None and told["rank"] != dist.get_rank() and told["epoch"] == order.epoch else None


def publish(store: dist.Store, group: str, topic: str, told: Notice) -> None:
    store.set(key_of(group, topic), json.dumps(told))
    store.set(key_of(group, "notice"), "")


def tell_end(store: dist.Store, order: Order, how: str, is_over: bool) -> None:
    """Publish that this rank starts nothing more.

    Args:
        how: How it has ended: ``"had failed with ..."``.
        is_over: Whether it has left its process group. If not, the program may handle an error, and go on.
    """
    told = come_so_far(order) | {
        "is over": is_over,
        "number": order.events,
        "how": how,
        "after": order.latest,
        "line": program_line(order.thread),
    }
    store.set(key_of_end(order.group, dist.get_rank()), json.dumps(told))
    first = found(store, key_of(order.group, "failed"))
    if first is None or (first["epoch"], -first["number"]) < (order.epoch, -order.events):  # else it is the cause
        publish(store, order.group, "failed", told)


def last_told(store: dist.Store, groups: Collection[str], rank: int) -> Notice | None:
    """Return what a rank has told of its end, or its failure, if it still could."""
    told = filter(None, (found(store, key_of_end(group, rank)) for group in groups))
    return max(told, key=lambda each: each["steps"], default=None)


def conclude_once(store: dist.Store, key: str, verdict: Notice) -> None:
    """Write the verdict of an agreement unless there is one already."""
    store.compare_set(key, "", json.dumps(verdict))


def astray(text: str, rank: int) -> Notice:
    """Return the verdict of an agreement with a rank that has diverged."""
    return {"kind": "astray", "ranks": [rank], "text": text}


# -- in words ---------------------------------------------------------------------------------------------------------


def asks(ask: Notice) -> str:
    return (
        f"rank {ask['rank']} has reached {ask['what']}, {ask['progress']}{_at(ask)}, and waits for the others to do "
        "the same"
    )


def diverged(ask: Notice, here: str) -> str:
    return f"Ranks have diverged. R{asks(ask)[1:]}; {here}."


def ended(failed: Notice) -> str:
    return f"Rank {failed['rank']} {failed['how']} ({failed['progress']}; its last: {failed['after']}{_at(failed)})"


def never_starts(failed: Notice, here: str) -> str:
    return f"{ended(failed)}, and will not start what other ranks wait for; {here}."


def rests(rest: Notice, here: str) -> str:
    return (
        f"Ranks have diverged. Rank {rest['rank']} waits {rest['progress']} in a collective of the program itself, "
        f"over process group {rest['group']}{_at(rest)}; {here}."
    )


def other_steps(told: Notice, order: Order | None) -> str:
    """Return a sentence if the other rank has begun another number of optimizer steps than this one."""
    if order is None or told["steps"] == order.steps:
        return ""
    return (
        f" Rank {told['rank']} has begun {told['steps']} optimizer steps and rank {dist.get_rank()} {order.steps}: "
        "they hold rows of different weights now. Load a checkpoint after the reset."
    )


def ranks_text(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}"


def _at(told: Notice) -> str:
    return f", at {told['line']}" if told["line"] else ""
