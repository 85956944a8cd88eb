"""Data files of machines, what is rejected in them, and how ``mfsdp calibrate`` derives such a file from times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfsdp_compile.cli import main
from mfsdp_compile.passes.guests.solver.hardware import Hardware, Link, hardware, known_hardware
from mfsdp_compile.planning import calibration
from mfsdp_compile.planning.calibration import calibrate, describe, fit_link
from mfsdp_compile.planning.measuring import Effort, Measured, Timing

FOLDER = Path(__file__).parents[2] / "passes" / "guests" / "solver" / "machines"
SOURCED = {field.name for field in fields(Hardware)} - {"name", "sources"}
OPTIONAL = {"compute_slowdown", "multiprocessors", "sustained_clock", "power_watts"}
GPUS = ["a100-ib", "b200-ib", "gb200-nvl72", "h100-eth", "h100-ib", "h200-ib"]

# -- data files -------------------------------------------------------------------------------------------------------


def test_the_machines_that_are_promised() -> None:
    assert known_hardware() == sorted([*GPUS, "cpu"])


@pytest.mark.parametrize("name", [*GPUS, "cpu"])
def test_a_data_file(name: str) -> None:
    """A data file gives every number with its source, in the order of the class."""
    machine = hardware(name)
    assert machine.name == name
    assert set(machine.sources) == SOURCED
    assert all(len(source) > 10 for source in machine.sources.values())
    text = (FOLDER / f"{name}.json").read_text()
    assert list(json.loads(text)) == [field.name for field in fields(Hardware)]
    assert json.loads(text) == json.loads(machine.to_json())


@pytest.mark.parametrize("name", GPUS)
def test_peaks_and_units_of_gpus(name: str) -> None:
    machine = hardware(name)
    flops = machine.flops
    assert flops["float64"] <= flops["float32"] < flops["tfloat32"]
    assert flops["bfloat16"] == flops["float16"] == pytest.approx(2 * flops["tfloat32"], rel=0.01)
    if name != "a100-ib":
        assert flops["float8_e4m3fn"] == pytest.approx(2 * flops["bfloat16"], rel=0.01)
    assert 1e14 < flops["bfloat16"] < 1e16
    assert 1e12 < machine.memory_bandwidth < 1e13
    assert 70 * 2**30 < machine.memory_bytes < 200 * 2**30
    assert machine.memory_bandwidth > machine.intra_node.bandwidth > 5 * machine.inter_node.bandwidth
    assert 5e9 < machine.inter_node.bandwidth < 100e9
    assert 1e-6 <= machine.intra_node.latency < machine.inter_node.latency < machine.collective_seconds < 1e-4
    assert 1e-6 < machine.kernel_seconds < 1e-5
    assert 20e9 < machine.host_link.bandwidth < machine.intra_node.bandwidth
    assert 40e9 < machine.host_memory_bandwidth < machine.memory_bandwidth / 10
    assert 0.1 < machine.compute_slowdown < 0.4
    assert machine.attention_efficiency < machine.matmul_efficiency


def test_newer_machines_are_faster() -> None:
    names = ("a100-ib", "h100-ib", "h200-ib", "b200-ib", "gb200-nvl72")
    a100, h100, h200, b200, gb200 = map(hardware, names)

    def usable(machine: Hardware) -> float:
        return machine.flops_of("bfloat16") * machine.matmul_efficiency

    assert usable(a100) < usable(h100) == usable(h200) < usable(b200) < usable(gb200)
    bandwidths = [machine.memory_bandwidth for machine in (a100, h100, h200, b200, gb200)]
    assert bandwidths == sorted(set(bandwidths))
    assert gb200.ranks_per_node == 72
    assert {machine.ranks_per_node for machine in (a100, h100, h200, b200)} == {8}


def test_ethernet_differs_in_the_network_alone() -> None:
    other, ours = hardware("h100-eth"), hardware("h100-ib")
    assert other.inter_node.bandwidth < ours.inter_node.bandwidth / 3
    assert other.sustained_clock == ours.sustained_clock < 1
    assert replace(other, name=ours.name, inter_node=ours.inter_node) == ours


def test_peak_of_a_dtype() -> None:
    machine = hardware("h100-ib")
    assert machine.flops_of("bfloat16") == 989500000000000.0
    assert machine.flops_of("float8_e5m2") == machine.flops_of("float32") == 67e12


# -- reading and writing ----------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "name": "small",
    "flops": {"float32": 1e9},
    "matmul_efficiency": 0.5,
    "attention_efficiency": 0.25,
    "memory_bandwidth": 1e9,
    "memory_efficiency": 1.0,
    "memory_bytes": 1000,
    "kernel_seconds": 0.0,
    "collective_seconds": 1e-6,
    "ranks_per_node": 2,
    "intra_node": {"bandwidth": 1e9, "latency": 1e-6},
    "inter_node": {"bandwidth": 1e8, "latency": 1e-5},
    "host_link": {"bandwidth": 1e7, "latency": 1e-4},
    "host_memory_bandwidth": 1e8,
    "compute_slowdown": 0.5,
    "sources": {"flops": "made up"},
}


def test_there_and_back(tmp_path: Path) -> None:
    machine = Hardware.from_json(json.dumps(SMALL), "here")
    assert machine.inter_node == Link(bandwidth=1e8, latency=1e-5)
    again = Hardware.from_json(machine.to_json(), "here")
    assert again == machine
    assert again.sources == {"flops": "made up"}
    (tmp_path / "small.json").write_text(machine.to_json())
    assert hardware(str(tmp_path / "small.json")) == machine


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"matmul_efficiency": 1.5}, "matmul_efficiency must be above 0 and at most 1, got 1.5"),
    ({"attention_efficiency": 0}, "attention_efficiency must be above 0 and at most 1, got 0"),
    ({"memory_efficiency": -1}, "memory_efficiency must be above 0 and at most 1, got -1"),
    ({"memory_bandwidth": 0}, "memory_bandwidth must be above 0"),
    ({"memory_bytes": -5}, "memory_bytes must be above 0"),
    ({"ranks_per_node": 0}, "ranks_per_node must be above 0"),
    ({"kernel_seconds": -1e-6}, "kernel_seconds cannot be negative"),
    ({"collective_seconds": -1e-6}, "collective_seconds cannot be negative"),
    ({"compute_slowdown": -0.1}, "compute_slowdown cannot be negative"),
    ({"multiprocessors": -1}, "multiprocessors cannot be negative"),
    ({"multiprocessors": 1.5}, "multiprocessors"),
    ({"power_watts": -1}, "power_watts cannot be negative"),
    ({"sustained_clock": 0}, "sustained_clock must be above 0 and at most 1, got 0"),
    ({"intra_node": {"bandwidth": 0, "latency": 0}}, "not a link"),
    ({"inter_node": {"bandwidth": 1e9, "latency": -1e-6}}, "not a link"),
    ({"inter_node": {"bandwidth": 1e9}}, "latency"),
    ({"host_link": {"bandwidth": -1.0, "latency": 0}}, "not a link"),
    ({"host_memory_bandwidth": 0}, "host_memory_bandwidth must be above 0"),
    ({"flops": {"bfloat16": 1e12}}, "include float32"),
    ({"flops": {"float32": -1e12}}, "flops must be positive numbers"),
    ({"flops": 1e12}, "does not describe hardware"),
    ({"speed": 3}, "'speed'.*It takes name, flops, "),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Hardware.from_json(json.dumps(SMALL | change), "that file")
    assert str(caught.value).startswith("that file does not describe hardware: ")


@pytest.mark.parametrize("text", ["", "[1, 2]", "3", '{"name": "x"}'])
def test_files_of_something_else(text: str) -> None:
    with pytest.raises(ValueError, match=r"^that file does not describe hardware: .* It takes name, flops, "):
        Hardware.from_json(text, "that file")


def test_missing_numbers_are_named() -> None:
    for name in SOURCED - OPTIONAL:
        with pytest.raises(ValueError, match=name):
            Hardware.from_json(json.dumps({key: value for key, value in SMALL.items() if key != name}), "that file")


def test_names_that_nothing_has(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown hardware 'h101'\. Known: a100-ib, .*mfsdp calibrate") as caught:
        hardware("h101")
    assert all(name in str(caught.value) for name in known_hardware())
    with pytest.raises(ValueError, match=r"hardware file .*gone\.json: .*No such file"):
        hardware(str(tmp_path / "gone.json"))


# -- fitting ----------------------------------------------------------------------------------------------------------

SIZES = (2**10, 2**14, 2**20, 2**26)


def times(
    launch: float, latency: float, bandwidth: float, groups: tuple[int, ...]
) -> Iterator[tuple[float, float, int]]:
    for ranks in groups:
        for size in SIZES:
            yield size, launch + (ranks - 1) * latency + (ranks - 1) / ranks * size / bandwidth, ranks


@given(
    launch=st.floats(1e-6, 1e-3),
    latency=st.floats(1e-7, 1e-3),
    bandwidth=st.floats(1e8, 1e12),
    groups=st.sampled_from([(1, 2), (1, 3), (2, 4), (4, 8), (8, 16)]),
)
def test_fit_finds_what_times_were_made_of(
    launch: float, latency: float, bandwidth: float, groups: tuple[int, ...]
) -> None:
    fitted, link = fit_link(*zip(*times(launch, latency, bandwidth, groups), strict=True))  # type: ignore[arg-type]
    assert fitted == pytest.approx(launch, rel=1e-5)
    assert link.latency == pytest.approx(latency, rel=1e-5)
    assert link.bandwidth == pytest.approx(bandwidth, rel=1e-5)


@given(noise=st.lists(st.floats(0.9, 1.1), min_size=8, max_size=8))
def test_fit_of_times_that_vary(noise: list[float]) -> None:
    sizes, seconds, ranks = zip(*times(20e-6, 10e-6, 10e9, (4, 8)), strict=True)
    fitted, link = fit_link(sizes, [second * factor for second, factor in zip(seconds, noise, strict=True)], ranks)
    assert link.bandwidth == pytest.approx(10e9, rel=0.2)
    assert fitted + 7 * link.latency == pytest.approx(20e-6 + 7 * 10e-6, rel=0.3)
    assert fitted >= 0
    assert link.latency >= 0


def test_one_group_has_no_latency_of_its_own() -> None:
    fitted, link = fit_link(*zip(*times(20e-6, 10e-6, 10e9, (4,)), strict=True))  # type: ignore[arg-type]
    assert fitted == pytest.approx(50e-6)
    assert link.latency == 0
    assert link.bandwidth == pytest.approx(10e9)


def test_no_number_is_negative() -> None:
    """If the fitted launch time would be negative, it is zero, and the other numbers compensate."""
    sizes, seconds, ranks = zip(*times(0.0, 10e-6, 10e9, (2, 4)), strict=True)
    fitted, link = fit_link(sizes, [t * (0.8 if n == 2 else 1.0) for t, n in zip(seconds, ranks, strict=True)], ranks)
    assert fitted == 0
    assert 8e-6 < link.latency < 10e-6


@pytest.mark.parametrize(
    ("sizes", "seconds", "ranks"),
    [((1024, 2048), (1e-3, 1e-3), (2, 2)), ((1024, 2048), (2e-3, 1e-3), (2, 2)), ((1024, 2048), (1e-3, 2e-3), (1, 1))],
)
def test_times_without_a_bandwidth(sizes: tuple[int, ...], seconds: tuple[float, ...], ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="no bandwidth"):
        fit_link(sizes, seconds, ranks)


# -- mfsdp calibrate --------------------------------------------------------------------------------------------------

MEASURED = Measured(
    device="a box",
    matmul={"float32": (1e9, 2e9, 4e9), "bfloat16": (8e9,)},
    dtype="float32",
    attention=1e9,
    memory={"copy": 8e9, "add": 10e9, "scale": 7e9},
    memory_bytes=12345,
    kernel_seconds=2e-6,
    host_link=Link(2.71828e9, 12.3456e-6),
    host_memory={"copy": 5e9, "add": 6e9},
    timings=tuple(Timing("all_gather", n, int(size), t) for size, t, n in times(20e-6, 10e-6, 3.14159e9, (2, 4))),
    slowdown=0.25,
)


def test_description_of_what_was_measured() -> None:
    machine = describe(MEASURED, "box", 4)
    assert set(machine.sources) == SOURCED
    assert replace(machine, sources={}) == Hardware(
        name="box",
        flops={"float32": 4e9, "bfloat16": 8e9},
        matmul_efficiency=0.5,
        attention_efficiency=0.25,
        memory_bandwidth=10e9,
        memory_efficiency=0.8,
        memory_bytes=12345,
        kernel_seconds=2e-6,
        collective_seconds=20e-6,
        ranks_per_node=4,
        intra_node=Link(3.14e9, 10e-6),
        inter_node=Link(3.14e9, 10e-6),
        host_link=Link(2.72e9, 12.3e-6),
        host_memory_bandwidth=6e9,
        compute_slowdown=0.25,
    )
    assert machine.sources["inter_node"] == "not measured: as inside a node"
    assert "a box" in machine.sources["intra_node"]


def test_attention_is_no_faster_than_products() -> None:
    assert describe(replace(MEASURED, attention=5e9), "box", 4).attention_efficiency == 1.0


def test_description_of_one_rank() -> None:
    machine = describe(replace(MEASURED, timings=(), slowdown=0.0), "box", 1)
    assert machine.intra_node == Link(5e9, 0.0)
    assert set(machine.sources) == SOURCED
    assert all("not measured" in machine.sources[name] for name in ("intra_node", "inter_node", "collective_seconds"))


@pytest.mark.parametrize(
    ("out", "message"), [("gone/box.json", "no folder gone"), ("box.txt", "end in .json"), ("here.json", "a folder")]
)
def test_what_cannot_be_written_is_not_measured(
    out: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.json").mkdir()
    monkeypatch.setattr(calibration, "run_ranks", lambda *args, **kwargs: pytest.fail("measured"))
    assert main(["calibrate", "--out", out]) == 2
    assert message in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["here.json"]


def test_more_ranks_than_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration.torch.cuda, "device_count", lambda: 2)
    assert calibrate(str(tmp_path / "box.json"), 3, "box") == 2
    assert "give --ranks 2" in capsys.readouterr().out


def test_times_that_make_no_sense_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = replace(MEASURED, timings=tuple(replace(timing, seconds=1e-3) for timing in MEASURED.timings))
    monkeypatch.setattr(calibration, "run_ranks", lambda *args, **kwargs: iter([flat]))
    assert calibrate(str(tmp_path / "box.json"), 4, "box") == 2
    assert "no bandwidth" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


SHORT = Effort(
    matmul=((64, 64, 64), (128, 64, 64), (256, 256, 256)),
    matmul_seconds=0.1,
    attention=(1, 2, 64, 16),
    memory_bytes=2**22,
    collective_bytes=(2**10, 2**16, 2**24),
    round_seconds=0.002,
    rounds=2,
)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("ranks", [2, 1])
def test_calibration(ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "box.json"
    assert calibrate(str(out), ranks, "box", SHORT) == 0
    machine = hardware(str(out))
    assert (machine.name, machine.ranks_per_node) == ("box", ranks)
    assert set(machine.sources) == SOURCED
    # Any machine that runs this test is within these bounds, even one that does other work at the same time.
    assert 1e6 < machine.flops["float32"] < 1e13
    assert 1e6 < machine.memory_bandwidth < 1e13
    assert 1e-8 < machine.kernel_seconds < 1e-2
    assert 1e5 < machine.intra_node.bandwidth < 1e12
    assert machine.memory_bytes > 2**27
    printed = capsys.readouterr().out
    assert f'options={{"hardware": "{out}"}}' in printed
    assert f"mfsdp plan --hardware {out}" in printed
    assert ("links are not measured" in printed) == (ranks == 1)
    assert ("16 MiB, 2 ranks" in printed) == (ranks == 2)
