"""docs/troubleshooting.md and docs/messages.md have every message of the package, and no outdated ones."""

from __future__ import annotations

import functools
from collections import Counter

import messages
import pytest
from messages import ROOT, SHORTEST, Message

TROUBLESHOOTING, THE_REST = ROOT / "docs" / "troubleshooting.md", ROOT / "docs" / "messages.md"

NOT_OURS = tuple(f"mfsdp_compile/{name}" for name in ("demo", "examples", "models", "processes.py"))
"""Example programs, whose messages are about themselves."""

PASSED_ON = {
    "mfsdp_compile/backend/region_graphs.py",
    "mfsdp_compile/checkpoint/checkpoints.py",
    "mfsdp_compile/checkpoint/dcp_reader.py",
    "mfsdp_compile/checkpoint/loading.py",
    "mfsdp_compile/checkpoint/optimizer_plan.py",
    "mfsdp_compile/convert/stacked_tensors.py",
    "mfsdp_compile/convert/commands.py",
    "mfsdp_compile/convert/inspect_checkpoint.py",
    "mfsdp_compile/convert/to_torch_dist.py",
    "mfsdp_compile/convert/from_torch_dist.py",
    "passes/guests/solver/across_ranks.py",
    "runtime/compat/dynamo.py",
    "runtime/compat/regions.py",
    "runtime/memory/operators/whole.py",
    "runtime/ranks/failed_waits.py",
}
"""Files that raise an error with another error's text, under a name."""


@functools.cache
def everything() -> list[Message]:
    return [message for message in messages.messages(*NOT_OURS) if message.kind != "SystemExit"]


EXPLAINED, LISTED = messages.said_in(TROUBLESHOOTING), messages.said_in(THE_REST)


def without_a_place(said: set[str]) -> list[Message]:
    """Return the messages that contain no fragment of ``said``."""
    return [m for m in everything() if m.texts and not any(fragment in text for fragment in said for text in m.texts)]


def test_every_message_is_on_a_page() -> None:
    lost = [
        f"{message.place}: {message.kind}: {message.texts[0]}" for message in without_a_place({*EXPLAINED, *LISTED})
    ]
    assert not lost, (
        f"explain it under a heading of {TROUBLESHOOTING.name}, or, if it says itself what is wrong and what to do, "
        "add it to "
        f"{THE_REST.name}:\n" + "\n".join(lost)
    )


@pytest.mark.parametrize(("page", "said"), [(TROUBLESHOOTING, EXPLAINED), (THE_REST, LISTED)])
def test_every_message_on_a_page_is_real(page: object, said: dict[str, int]) -> None:
    texts = [text for message in everything() for text in message.texts]
    unreal = [f"{page}:{line}: {fragment}" for fragment, line in said.items() if not any(fragment in t for t in texts)]
    assert not unreal, "no message of the package has these words (… stands for values):\n" + "\n".join(unreal)


def test_they_say_enough_to_be_found() -> None:
    said = [*EXPLAINED, *LISTED]
    assert not [fragment for fragment in said if sum(map(str.isalpha, fragment)) < SHORTEST]
    twice = [fragment for fragment, count in Counter(said).items() if count > 1]
    assert not twice


def test_what_has_no_words_of_its_own() -> None:
    assert {message.place.partition(":")[0] for message in everything() if not message.texts} == PASSED_ON


def test_a_message_without_a_place_is_noticed() -> None:
    some = {fragment for fragment in EXPLAINED if not fragment.startswith("fully_shard_model needs a process group")}
    (lost,) = without_a_place({*some, *LISTED})
    assert lost.place.startswith("runtime/plan/meshes.py")


def test_messages_are_read_from_sources() -> None:
    """For each way to write a message, a known one is found."""
    by_words = {text: message for message in everything() for text in message.texts}
    plain = "fully_shard_model takes an nn.Module, got a …"
    assert by_words[plain].kind == "TypeError"
    made_by_a_function = next(text for text in by_words if text.startswith("The gradient of … is not reduced yet"))
    assert by_words[made_by_a_function].place.startswith("runtime/memory/tensor.py")
    in_a_constructor = next(text for text in by_words if "breaks … of sharded training" in text)
    assert by_words[in_a_constructor].kind == "ScheduleError"
    assert any(
        message.kind == "warning" and "Buffers differ between ranks" in message.texts[0] for message in everything()
    )
