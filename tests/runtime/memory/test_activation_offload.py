"""Values saved for backward in host memory, in compiled graphs. On CPU, copies are made between two tensors."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR, assert_bitwise, batches, build, shard, train_sharded
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile.backend.options import CompileOptions
from mfsdp_compile.passes import pipeline
from mfsdp_compile.passes.guests.solver.hardware import Link, hardware
from mfsdp_compile.runtime.guests.offload import host
from mfsdp_compile.runtime.guests.offload.operators import FETCH_SAVED, OFFLOAD_SAVED, WAIT_SAVED
from mfsdp_compile.runtime.schedule.phase import Phase

OFFLOADED: dict[str, Any] = {"activation_offload": True, "activation_offload_least": 1}
MODELS = [zoo.Plain, zoo.Checkpointed, zoo.Uneven, zoo.Tied, zoo.FrozenParameters, zoo.Unused]


@pytest.mark.long_unless("*-Plain")
@pytest.mark.parametrize("model", MODELS)
@on_ranks(2)
def test_same_numbers(model: type[nn.Module]) -> None:
    """Bitwise as in the eager path, which offloads nothing: with units in the graph, and with regions."""
    data = batches(2)
    plain = train_sharded(model, EAGER, data)
    for regions in (False, True):
        with copies() as started:
            offloaded = train_sharded(model, AOT_EAGER, data, regions=regions, **OFFLOADED)
        assert_bitwise(plain, offloaded)
        assert started["offload_saved"] == started["fetch_saved"] == started["awaited"] // 2 > 0
        torch.compiler.reset()


@pytest.mark.long
@on_ranks(2)
def test_inductor() -> None:
    """Inductor rounds as it does without offload, and keeps the order of copies."""
    data = batches(2)
    plain = train_sharded(zoo.Plain, INDUCTOR, data, regions=False)
    torch.compiler.reset()
    assert_bitwise(plain, train_sharded(zoo.Plain, INDUCTOR, data, regions=False, **OFFLOADED))


@on_ranks(2)
def test_blocks_compiled_alone() -> None:
    """Each graph holds one unit: what it saves is copied when the graph ends, and fetched when its backward begins."""
    data = batches(1)[0, 0]

    def gradients(**options: Any) -> list[Tensor]:
        model, _ = shard(build(zoo.Plain), EAGER)
        for block in model.module.blocks:
            block.compile(backend="mfsdp", options={"inner": AOT_EAGER, **options})
        with copies() as started:
            model(data).backward()
        assert bool(started["offload_saved"]) == bool(options)
        return [param.grad.to_local() for param in model.parameters()]

    for plain, offloaded in zip(gradients(), gradients(**OFFLOADED), strict=True):
        assert torch.equal(plain, offloaded)


class copies:
    """Context that counts copies of saved values, which must be to memory of their own, and waits for them."""

    def __enter__(self) -> dict[str, int]:
        counts = {"offload_saved": 0, "fetch_saved": 0, "awaited": 0}
        plain = {name: getattr(host, name) for name in ("offload_saved", "fetch_saved", "await_copy")}

        def copied(name: str, source: Tensor, *args: Any) -> Tensor:
            target = plain[name](source, *args)
            assert target.data_ptr() != source.data_ptr()
            assert torch.equal(target, source)
            assert target.stride() == source.stride()
            counts[name] += 1
            return target

        def await_copy(target: Tensor) -> None:
            counts["awaited"] += 1
            plain["await_copy"](target)

        self._patch = mock.patch.multiple(
            host,
            offload_saved=lambda *args: copied("offload_saved", *args),
            fetch_saved=lambda *args: copied("fetch_saved", *args),
            await_copy=await_copy,
        )
        self._patch.start()
        return counts

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def _graphs(**options: Any) -> tuple[dict[Phase, torch.fx.Graph], Any]:
    """Return the finished graphs of a step by phase, and the record of the passes."""
    found = {}
    finish = pipeline.finish_graph

    def spy(graph: torch.fx.Graph, phase: Phase, record: Any) -> None:
        finish(graph, phase, record)
        found[phase] = copy.deepcopy(graph)

    with mock.patch.object(pipeline, "finish_graph", spy):
        model, call = shard(build(zoo.Plain), AOT_EAGER, regions=False, **options)
        call(torch.randn(6, 8)).backward()
    torch.compiler.reset()
    return found, model.sharded.compiled_graphs[-1]


def _lines(record: Any, phase: Phase) -> list[str]:
    return [line for report in record.reports[phase] if report.name == "activations" for line in report.lines]


@pytest.mark.usefixtures("fake_world")
def test_places() -> None:
    """A value leaves the device when the second unit after it begins, and is fetched one unit before its reader."""
    graphs, record = _graphs(**OFFLOADED)
    forward = [node for node in graphs[Phase.FORWARD].nodes if node.op == "call_function"]
    norms = [i for i, node in enumerate(forward) if node.target is torch.ops.aten.native_layer_norm.default]
    assert len(norms) == 4  # of three blocks and the end: the first readers of each unit's parameters
    copied = {}
    for i, node in enumerate(forward):
        if node.target is OFFLOAD_SAVED:
            assert node.args[0] is forward[i - 1] or node.prev.target is OFFLOAD_SAVED
            (wait,) = (user for user in node.users if user.target is WAIT_SAVED)
            unit = sum(norm < forward.index(node.args[0]) + 1 for norm in norms)
            copied[node.args[0].name] = unit
            assert forward.index(wait) < norms[unit + 1]
            assert forward.index(wait) > norms[unit]
    assert set(copied.values()) == {0, 1, 2}
    assert any("needed until the end of forward" in line for line in _lines(record, Phase.JOINT))
    backward = [node for node in graphs[Phase.BACKWARD].nodes if node.op == "call_function"]
    for node in backward:
        if node.target is FETCH_SAVED:
            (wait,) = (user for user in node.users if user.target is WAIT_SAVED)
            first = min(user for user in node.users if user is not wait)
            between = backward[backward.index(node) : backward.index(first)]
            assert sum(other.target is torch.ops.aten.mm.default for other in between) >= 2  # a unit's products


@pytest.mark.usefixtures("fake_world")
def test_choice() -> None:
    """A number of bytes offloads the first values that are large enough, until the number is reached."""
    _, record = _graphs(activation_offload=800, activation_offload_least="0.3KiB")
    assert _lines(record, Phase.JOINT)[0] == "1,344 B of saved values are offloaded"
    assert any(line.endswith("stay: smaller than 307 B") for line in _lines(record, Phase.JOINT))
    _, record = _graphs()
    assert not _lines(record, Phase.JOINT)


@pytest.mark.usefixtures("fake_world")
def test_auto() -> None:
    """As much as the link carries in the time of a unit: everything over a fast one, nothing over a slow one."""
    base = hardware("cpu")

    def offloaded(bandwidth: float) -> tuple[int, str]:
        machine = replace(base, host_link=Link(bandwidth, 0.0))
        _, record = _graphs(activation_offload="auto", activation_offload_least=1, hardware=machine)
        lines = _lines(record, Phase.JOINT)
        return int(lines[0].split()[0].replace(",", "")), "\n".join(lines)

    everything, _ = offloaded(1e15)
    some, lines = offloaded(20e6)
    assert "no time for a copy while the next unit computes" in lines
    assert everything == 4320
    assert 0 < some < everything
    assert offloaded(1.0)[0] == 0


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"activation_offload": "all"}, ValueError, r"options\['activation_offload'\] takes bytes"),
        ({"activation_offload": 0.5}, TypeError, "takes True, False, 'auto' or a number of bytes, got 0.5"),
        ({"activation_offload": -1}, ValueError, "activation_offload cannot be negative, got -1"),
        ({"activation_offload_least": 1}, ValueError, "activation_offload'] is not given"),
    ],
)
def test_refusals(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        CompileOptions.of(options, None)


@pytest.mark.usefixtures("fake_world")
def test_refused_for_cuda_graphs() -> None:
    """The model stays usable."""
    model, call = shard(build(zoo.Plain), AOT_EAGER, sharding={"cuda_graph_mode": True}, **OFFLOADED)
    with pytest.raises(Exception, match=r"options\['activation_offload'\] copies saved values"):
        call(torch.randn(6, 8))
    model(torch.randn(6, 8)).backward()
