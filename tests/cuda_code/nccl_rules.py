"""Rules of NCCL for the collectives of all ranks, checked on what each rank has started.

- All ranks of a communicator start the same collectives in the same order: kind, sizes, dtype and operation.
- Two ranks create the communicators that they share in the same order: with its first collective.
- Collectives of different communicators that may run at the same time are started in the same order by all ranks that
  take part in both. They run at the same time unless a stream orders one behind the other: then two ranks could each
  wait, on a full GPU, for what the other has not started.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """One collective, as other ranks must see it too.

    Args:
        group: Name of the group.
        ranks: Its ranks.
        what: Kind, sizes, dtype and operation.
        beside: Collectives of other groups that no stream orders before it, by place among the calls of this rank.
    """

    group: str
    ranks: tuple[int, ...]
    what: str
    beside: tuple[int, ...]
    where: str


def differences(everyones: Sequence[tuple[Sequence[Call], Sequence[tuple[str, tuple[int, ...]]]]]) -> Iterator[str]:
    """Return how collectives of ranks break NCCL's rules, in words.

    Args:
        everyones: Calls and groups of each rank.
    """
    for rank, (calls, groups) in enumerate(everyones):
        for other, (others_calls, others_groups) in enumerate(everyones[:rank]):
            for group, ranks in groups:
                if other not in ranks:
                    continue
                mine = [call for call in calls if call.group == group]
                others = [call for call in others_calls if call.group == group]
                for place in range(max(len(mine), len(others))):
                    a, b = (each[place] if place < len(each) else None for each in (mine, others))
                    if a is None or b is None or a.what != b.what:
                        yield (
                            f"collective {place} of group {group}: rank {rank} starts {_told(a)}, "
                            f"rank {other} {_told(b)}"
                        )
                        break
            shared = [name for name, ranks in groups if other in ranks]
            if shared != [name for name, ranks in others_groups if rank in ranks]:
                yield f"ranks {rank} and {other} create their communicators in another order"
            places = [_places(each, set(shared)) for each in (calls, others_calls)]
            for here, there, their_calls in ((places[0], places[1], calls), (places[1], places[0], others_calls)):
                for key, place in here.items():
                    for before in their_calls[place].beside:
                        earlier = next((k for k, p in here.items() if p == before), None)
                        if earlier is None or key not in there or earlier not in there:
                            continue
                        if there[earlier] > there[key]:
                            yield (
                                f"no stream orders {their_calls[before].what} of group {earlier[0]} before "
                                f"{their_calls[place].what} of group {key[0]}, and ranks {rank} and {other} start "
                                "them in "
                                "another order"
                            )


def _told(call: Call | None) -> str:
    return f"{call.what} ({call.where})" if call is not None else "nothing"


def _places(calls: Iterable[Call], groups: set[str]) -> dict[tuple[str, int], int]:
    """Return the place of each call among all, by group and number in the group."""
    counts: dict[str, int] = defaultdict(int)
    found = {}
    for place, call in enumerate(calls):
        if call.group in groups:
            found[call.group, counts[call.group]] = place
            counts[call.group] += 1
    return found
