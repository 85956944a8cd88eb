"""``mfsdp hang DIR``: find the rank that keeps a job waiting, the collective it is missing from, and where it is.

Reads the files that ranks have written (:mod:`mfsdp_compile.runtime.ranks.journal`). The collectives of a process group
are numbered in the order in which a rank starts them. A collective that all ranks have started is finished or running.
The job waits in the first collective that some ranks have not started: the ranks that have started it wait for these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mfsdp_compile.runtime.untrusted_files import FileRefused, inside, members, printable, read_json, typed, whole

MOST_RANKS = 1 << 22
"""Largest number of ranks that a file may claim for its job. Absent ranks are counted one by one, so it is bounded."""


@dataclass(frozen=True)
class Finding:
    """An explanation of why ranks wait.

    Args:
        ranks: The ranks that cause it.
        text: Message for the user.
    """

    ranks: tuple[int, ...]
    text: str


def run(folder: str) -> int:
    """Print the analysis of ``folder``. Returns 2 if there is nothing to analyze, otherwise 0."""
    try:
        states = read(Path(folder))
    except ValueError as error:
        print(error)
        return 2
    if not states:
        print(
            f"{folder} holds no rank-N.json, nor does {folder}/hang. Ranks write these if MFSDP_DEBUG_DIR is set to a "
            "folder: when they fail, when nothing happens for most of the process group's timeout, and on SIGUSR1."
        )
        return 2
    for finding in analyze(states):
        print(finding.text)
    print()
    for rank, state in sorted(states.items()):
        print(f"rank {rank} on {state['host']}, written for {state['why']}: {_last(state)}")
        if state["place"]:
            print(f"    at {state['place']}")
    return 0


def read(folder: Path) -> dict[int, dict[str, Any]]:
    """Read the ranks' states from ``folder`` or its subfolder ``hang``.

    Returns:
        By rank, the first state of the last incident.

    Raises:
        ValueError: If a file is not one that a rank has written.
    """

    def written(folder: Path) -> list[Path]:
        return [path for path in members(folder) if path.match("rank-*.json")]

    if not written(folder):
        folder = folder / "hang"
    states: dict[int, dict[str, Any]] = {}
    for path in written(folder):
        try:
            incidents = typed(read_json(inside(folder, path.name)), list, "the file")
            if not incidents:
                raise FileRefused("it is an empty list")
            state = _checked(incidents[0])
            if path.name != f"rank-{state['rank']}.json":
                raise FileRefused(f"it says that it is of rank {state['rank']}")
            states[state["rank"]] = state
        except (FileRefused, OSError) as error:
            raise ValueError(f"{path} was not written by a rank: {error}") from None
    if len({state["world_size"] for state in states.values()}) > 1:
        raise ValueError(f"{folder} holds files of jobs of different sizes. Remove those of the other job.")
    return states


_LAUNCH = {"what": str, "group": str, "number": int, "started": bool}
_ENTRY = {"step": int, "model": str, "what": str, "launches": [_LAUNCH]}
_STATE = {"rank": int, "world_size": int, "host": str, "why": str, "entries": [_ENTRY]}
"""The parts of a rank's state that the analysis uses."""


def _checked(state: Any) -> dict[str, Any]:
    """Return the parts of a rank's state that the analysis uses, with control characters escaped.

    Raises:
        FileRefused: If something is missing or has another type, or a number is out of range.
    """
    found: dict[str, Any] = _read(state, _STATE, "a state")
    world = whole(found["world_size"], "world_size", 1, MOST_RANKS)
    whole(found["rank"], "rank", 0, world - 1)
    found["place"] = None if state.get("place") is None else _read(state["place"], str, "place")
    found["groups"] = {}
    for name, held in typed(state.get("groups"), dict, "groups").items():
        group = found["groups"][printable(name)] = _read(held, {"ranks": [int], "started": int}, "a group")
        for rank in group["ranks"]:
            whole(rank, "a rank of a group", 0, world - 1)
    return found


def _read(held: Any, form: Any, what: str) -> Any:
    if isinstance(form, dict):
        return {name: _read(typed(held, dict, what).get(name), each, name) for name, each in form.items()}
    if isinstance(form, list):
        return [_read(each, form[0], f"an element of {what}") for each in typed(held, list, what)]
    return whole(held, what) if form is int else printable(typed(held, form, what))


def analyze(states: Mapping[int, Mapping[str, Any]]) -> list[Finding]:
    """Find what keeps ranks waiting. The first finding is the most likely cause."""
    world = max(state["world_size"] for state in states.values())
    findings = []
    if absent := sorted(set(range(world)) - set(states)):
        text = (
            f"{_ranks(absent)} left no file: killed, on a machine that is gone, or writing to another folder. "
            f"{_waiting_for(states, absent)}"
        )
        findings.append(Finding(tuple(absent), text.strip()))
    for group in dict.fromkeys(name for state in states.values() for name in state["groups"]):
        findings += _of_group(states, group)
    if not findings:
        findings.append(
            Finding((), f"{_ranks(states)} have started the same collectives: what keeps them waiting is none of ours.")
        )
    return findings


def _of_group(states: Mapping[int, Mapping[str, Any]], group: str) -> list[Finding]:
    members = {rank: state for rank, state in states.items() if group in state["groups"]}
    names = {rank: _names(state, group) for rank, state in members.items()}
    numbers = sorted(set().union(*names.values()))
    for number in numbers:
        here = {rank: known[number] for rank, known in names.items() if number in known}
        if len(set(here.values())) > 1:
            kinds = [f"{what} on {_ranks(r for r in here if here[r] == what)}" for what in dict.fromkeys(here.values())]
            fewest = min(set(here.values()), key=list(here.values()).count)
            culprits = tuple(rank for rank in here if here[rank] == fewest)
            text = f"Collective {number} of group {group} is {', '.join(kinds)}: these have met, and are not the same."
            return [Finding(culprits, text)]
    started = {rank: state["groups"][group]["started"] for rank, state in members.items()}
    behind = [rank for rank in started if started[rank] == min(started.values())]
    if len(behind) == len(started):
        return []
    number = min(started.values()) + 1
    ahead = [rank for rank in started if started[rank] >= number]
    what = next((names[rank][number] for rank in ahead if number in names[rank]), "one that is not of the model")
    text = (
        f"{_ranks(behind)} {'has' if len(behind) == 1 else 'have'} not started collective {number} of group {group}, "
        f"{what}; {_ranks(ahead)} {'has, and waits' if len(ahead) == 1 else 'have, and wait'}."
    )
    return [Finding(tuple(behind), text)]


def _names(state: Mapping[str, Any], group: str) -> dict[int, str]:
    """Return descriptions of the collectives of a group that a rank has started, by their numbers."""
    return {
        launch["number"]: f"{launch['what']!r} of {entry['model']}, {entry['what']}, step {entry['step']}"
        for entry in state["entries"]
        for launch in entry["launches"]
        if launch["group"] == group and launch["started"]
    }


def _waiting_for(states: Mapping[int, Mapping[str, Any]], absent: Sequence[int]) -> str:
    """Describe the last collective that the other ranks have started with ranks that left no file."""
    for group in dict.fromkeys(name for state in states.values() for name in state["groups"]):
        for rank, state in states.items():
            held = state["groups"].get(group)
            if held is None or not set(absent) & set(held["ranks"]):
                continue
            names = _names(state, group)
            if names:
                them = "it" if len(absent) == 1 else "them"
                return f"The last that rank {rank} has started with {them} is {names[max(names)]}."
    return ""


def _last(state: Mapping[str, Any]) -> str:
    if not state["entries"]:
        return "it has not run a model yet"
    entry = state["entries"][-1]
    done = [launch["what"] for launch in entry["launches"] if launch["started"]]
    left = [launch["what"] for launch in entry["launches"] if not launch["started"]]
    parts = [f"last in {entry['what']} of {entry['model']}, step {entry['step']}"]
    if done:
        parts.append(f"has started {done[-1]}")
    if left:
        parts.append(f"next is {left[0]}")
    return ", ".join(parts)


def _ranks(ranks: Iterable[int]) -> str:
    known = sorted(ranks)
    shown = ", ".join(map(str, known[:8])) + (", ..." if len(known) > 8 else "")
    return f"rank {shown}" if len(known) == 1 else f"ranks {shown}"
