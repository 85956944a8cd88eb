"""How much of the product one eager step of one unit runs, which is what its reader has to follow."""

from __future__ import annotations

from pathlib import Path

import pytest
import step_trace
import zoo

AT_MOST = {"functions": 100, "files": 25, "changes of file": 62}
"""What ``python tests/step_trace.py`` prints, with the torch that gives the most. These numbers may only become
smaller."""


@pytest.mark.usefixtures("fake_world")
def test_one_unit_is_followed() -> None:
    """The followed unit's functions, and nobody else's: an unsharded model calls one function of its own in it."""
    found = step_trace.trace(lambda model: model, {str(Path(zoo.__file__)): "zoo"})
    assert [(call.phase, call.function.rpartition(".")[2]) for call in found.calls] == [("forward", "forward")]


@pytest.mark.usefixtures("fake_world")
def test_an_eager_step_of_a_unit_can_be_followed() -> None:
    traces = {"mfsdp-compile": step_trace.trace_ours(), "FSDP2": step_trace.trace_fsdp2()}
    print(step_trace.table(traces))
    for found in traces.values():
        assert {call.phase for call in found.functions} == {"forward", "backward"}
    ours = traces["mfsdp-compile"]
    read = f"{step_trace.by_file(ours)}\n{step_trace.listing(ours.functions)}"
    for (what, bound), count in zip(AT_MOST.items(), ours.counts, strict=True):
        assert count <= bound, f"{what}: {count}, not {bound}\n{read}"
