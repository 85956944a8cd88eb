"""Reports: the same numbers in every format, complete in one file, rendered by a real browser."""

from __future__ import annotations

import contextlib
import html.parser
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import pytest
import torch

from mfsdp_compile.metrics import StepRecord
from mfsdp_compile.passes.context import BucketInfo, Context
from mfsdp_compile.passes.guests.solver.costs import CostModel
from mfsdp_compile.passes.guests.solver.flow import Category, Collective
from mfsdp_compile.passes.guests.solver.hardware import hardware
from mfsdp_compile.passes.guests.solver.simulate import (
    Allocate,
    Compute,
    Enter,
    Event,
    Free,
    OptimizerCost,
    Span,
    Stage,
    Start,
    Timeline,
    Wait,
    resting_memory,
    simulate,
)
from mfsdp_compile.quantities import change_text
from mfsdp_compile.report import (
    PassRow,
    StepReport,
    Table,
    UnitTime,
    bytes_text,
    exposure_text,
    headline,
    peak_text,
    percent_text,
    seconds_text,
    tables,
    to_chrome_trace,
    to_html,
    to_text,
    write,
)
from mfsdp_compile.report.timeline import points
from mfsdp_compile.runtime.geometry.exchange import Exchange
from mfsdp_compile.runtime.geometry.groups import Group
from mfsdp_compile.runtime.geometry.layout import ParamSpec, plan_layouts
from mfsdp_compile.runtime.lanes.lane import Lane
from mfsdp_compile.runtime.lanes.plain import AllGather, Cast
from mfsdp_compile.runtime.lanes.stage import Spec
from mfsdp_compile.runtime.schedule.policy import SchedulePolicy
from mfsdp_compile.runtime.untrusted_files import new_file

MIB = 1 << 20
REASON = "limited by memory budget (needs 0.6 GiB)"
COSTS = CostModel(hardware("h100-ib"), fused=True)

# -- steps made by hand -----------------------------------------------------------------------------------------------


def bucket(unit: str, width: int, ranks: int = 8) -> BucketInfo:
    names = ("attention.weight", "mlp.weight", "norm.weight")
    shapes = ((4 * width, width), (8 * width, width), (width,))
    prefix = f"{unit}." if unit else ""
    specs = [ParamSpec(prefix + name, shape) for name, shape in zip(names, shapes, strict=True)]
    (layout,) = plan_layouts(specs, 2, ranks)
    whole, packed = (Spec(layout.numel, dtype) for dtype in (torch.bfloat16, torch.float32))
    gathers = (Cast(torch.bfloat16), AllGather(Group("g", ranks, 0)))
    lane = Lane(Spec(layout.shard_numel, torch.float32), whole, packed, use=gathers)
    exchange = Exchange([], [], [], lane.key)
    return BucketInfo(unit or "root", unit, layout, exchange, 2 * layout.numel, trainable=True)


def events(context: Context, order: Sequence[int], compute: float, gather: float, reduce: float | None) -> list[Event]:
    """Return one stage, in which each unit's gather starts while the unit before computes.

    Every fourth gather takes three times as long.
    """
    gathers = {
        number: Collective("gather", number, 0, 2e-5, gather * (3 if number % 4 == 3 else 1), "g") for number in order
    }
    reductions: list[Collective] = []
    found: list[Event] = []
    for position, number in enumerate(order):
        info = context.buckets[number]
        whole, gradients = info.gathered_bytes, 2 * info.gathered_bytes
        if position == 0:
            found += [Allocate(Category.GATHERED, whole), Start(gathers[number])]
        found.append(Enter(number))
        if position + 1 < len(order):
            following = order[position + 1]
            found.append(Allocate(Category.GATHERED, context.buckets[following].gathered_bytes))
            found.append(Start(gathers[following]))
        found += [Wait(gathers[number]), Allocate(Category.TEMPORARY, 96 * MIB), Compute(compute, 1e12)]
        if reduce is None:
            found += [Allocate(Category.SAVED, 128 * MIB), Free(Category.TEMPORARY, 96 * MIB)]
        else:
            found += [Allocate(Category.GRADIENTS, gradients), Compute(compute, 2e12)]
            found += [Free(Category.TEMPORARY, 96 * MIB), Free(Category.SAVED, 128 * MIB)]
            reductions.append(Collective("reduce", number, 0, 1e-5, reduce, "r"))
            if position:
                found += [Wait(reductions[-2]), Free(Category.GRADIENTS, gradients)]
            found.append(Start(reductions[-1]))
        found.append(Free(Category.GATHERED, whole))
    return [*found, Wait(reductions[-1])] if reductions else found


def step(layers: int = 4, prefix: str = "layers.", width: int = 64, compute: float = 1e-3) -> tuple[Context, Timeline]:
    """Return a step of a model of this many layers, in which every fourth gather is exposed."""
    buckets = tuple(bucket(unit, width) for unit in ("embed", *(f"{prefix}{i}" for i in range(layers)), "head"))
    context = Context(buckets, SchedulePolicy(), whole_model=True)
    adamw = OptimizerCost(extra_bytes=2)
    timeline = simulate(
        {
            Stage.FORWARD: events(context, range(layers + 2), compute, 0.7 * compute, None),
            Stage.BACKWARD: events(context, range(layers + 1, -1, -1), compute, 0.7 * compute, 1.2 * compute),
        },
        context,
        COSTS,
        resting_memory(buckets, adamw),
        adamw,
    )
    reasons = [replace(e, reason=REASON) if e.exposed and e.what == "gather" else e for e in timeline.exposures]
    return context, replace(timeline, exposures=reasons)


def report(layers: int = 4, **changes: Any) -> StepReport:
    made_for = {name: changes.pop(name) for name in ("prefix", "width", "compute") if name in changes}
    context, timeline = step(layers, **made_for)
    names = [info.name for info in context.buckets]
    lines = [
        f"{name}: {info.gathered_bytes:,} B, started {i} before its use"
        for i, (name, info) in enumerate(zip(names, context.buckets, strict=True))
    ]
    given: dict[str, Any] = {
        "title": "Llama 7B on 8 ranks of h100-ib",
        "budget_bytes": int(timeline.peak_bytes * 1.05),
        "buckets": context.buckets,
        "schedule": {
            graph: [line for name in order for line in (f"gather {name}", "        31 operators", f"wait {name}")]
            for graph, order in (("forward", names), ("backward", names[::-1]))
        },
        "passes": [
            PassRow(
                "forward",
                "schedule",
                0.0123,
                lines,
                [f"moved  gather {names[2]} before wait {names[1]} (12 operators earlier)"],
            ),
            PassRow("forward", "verify", 0.0021, ["V1 to V10 hold"], []),
            PassRow("backward", "reduce", 0.0044, [f"{name}: awaited when the next has started" for name in names], []),
        ],
        "verdicts": ["forward: V1 to V10 hold", "backward: V1 to V10 hold"],
        "environment": {"torch": torch.__version__, "hardware": "h100-ib", "inner": "inductor"},
        "notes": ["The simulation knows nothing of kernels that wait for the host."],
    }
    given["headline"] = [
        *headline(timeline, given["budget_bytes"]),
        ("tokens", "1,024,000 a step, 8 sequences of a rank"),
    ]
    return StepReport(timeline=timeline, **(given | changes))


def words(text: str) -> str:
    """Normalize to single spaces, because formats break lines at different places."""
    return " ".join(text.split())


class Page(html.parser.HTMLParser):
    """Texts of cells, and other facts that a test asks about a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.attributes: dict[str, list[dict[str, str | None]]] = {}
        self._open: list[str] = []
        self.feed(text)
        self.cells = [cell for cell in self.cells if cell]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes.setdefault(tag, []).append(dict(attributes))
        if tag in ("td", "th", "dt", "dd", "li"):
            self.cells.append("")
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1] == tag:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open:
            self.cells[-1] += data


def cells(found: Sequence[Table]) -> list[str]:
    return [cell for table in found for row in (table.header, *table.rows) for cell in row if cell]


def table(title: str, of: StepReport) -> Table:
    return next(table for table in tables(of) if table.title == title)


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_numbers_in_words() -> None:
    assert [seconds_text(s) for s in (0.0, 1.23e-6, 1.9e-3, 0.0007, 0.4123, 1.5, 0.99999, 99.996e-6)] == [
        *("0 s", "1.2 us", "1.90 ms", "0.70 ms", "412.3 ms", "1.500 s", "1.000 s", "0.10 ms")
    ]
    assert [bytes_text(size) for size in (0, 512, 1536, 2**20 - 1, 5 * 2**20, 1.125 * 2**30)] == [
        *("0 B", "512 B", "1.50 KiB", "1.00 MiB", "5.00 MiB", "1.13 GiB")
    ]
    assert [percent_text(part, 100) for part in (0, 0.001, 0.5, 12.34, 100)] == [
        "0.0%",
        "<0.01%",
        "0.50%",
        "12.3%",
        "100.0%",
    ]
    assert percent_text(1, 0) == "-"


def test_an_exposed_collective_has_a_line_and_hidden_ones_share_one() -> None:
    made = report(8)
    exposures = made.timeline.exposures
    exposed = [e for e in exposures if e.exposed]
    assert exposed
    assert len(exposed) < len(exposures)
    *rows, total = table("exposed communication", made).rows
    for e in exposed:
        reason = (
            REASON if e.what == "gather" else f"{seconds_text(e.ahead)} of computation between its start and its wait"
        )
        times = (seconds_text(e.seconds), seconds_text(e.seconds - e.exposed), seconds_text(e.exposed))
        assert (f"{e.name} {e.what}", e.stage.value, *times, reason) in rows
    kinds = Counter((e.what, e.stage) for e in exposures if not e.exposed)
    assert len(rows) == len(exposed) + len(kinds)
    assert {row[0].split()[0] for row in rows[len(exposed) :]} == {str(count) for count in kinds.values()}
    assert total[4] == seconds_text(made.timeline.exposed_seconds)
    assert float(rows[0][4].split()[0]) == max(float(row[4].split()[0]) for row in rows)
    sentence = exposure_text(next(e for e in exposed if e.name == "layers.2"))
    assert re.fullmatch(
        r"layers\.2 gather 2\.10 ms, hidden [\d.]+ ms, exposed 0\.\d\d ms: " + re.escape(REASON), sentence
    )


def test_what_a_wait_says_without_a_reason() -> None:
    (exposure, *_) = [e for e in report().timeline.exposures if e.exposed and e.what == "gather"]
    said = exposure_text(replace(exposure, reason="", queued=2e-3))
    assert said.endswith(
        "of computation between its start and its wait, and it queued for 2.00 ms behind others of its group"
    )


def test_measured_times_are_compared() -> None:
    plain = report()
    assert table("time by unit", plain).header == ("unit", "stage", "predicted")
    predicted = {("layers.1", Stage.FORWARD): 2e-3, ("layers.2", Stage.FORWARD): 1e-3}
    times = [UnitTime(stage, unit, seconds, 1.25e-3) for (unit, stage), seconds in predicted.items()]
    compared = table("time by unit", report(measured=times))
    assert ("layers.1", "forward", "2.00 ms", "1.25 ms", "+60.0%") in compared.rows
    assert ("layers.2", "forward", "1.00 ms", "1.25 ms", "-20.0%") in compared.rows
    assert compared.rows[-1] == ("total of what was measured", "", "3.00 ms", "2.50 ms", "+20.0%")
    assert "off by +20.0%" in compared.about


STEPS = [
    StepRecord(1, 1, 8, 800, 30.0, 0.0, 5.0),
    StepRecord(2, 1, 8, 800, 0.5, 0.1, 4.0),
    StepRecord(10, 8, 8, 6400, 0.02, 0.004, 3.0),
]


def test_training_is_compared_with_the_prediction() -> None:
    """The step time is the median over steps without the first, in the headline as in the table."""
    made = report(steps=STEPS)
    predicted = made.timeline.seconds
    rows = {name: cells for name, *cells in table("training (measured)", made).rows}
    assert rows == {
        "step time": ["20.00 ms", seconds_text(predicted), change_text(predicted, 0.02)],
        "tokens/s": ["40,000", f"{800 / predicted:,.0f}", change_text(0.02, predicted)],
        "first step": ["30.000 s", "", ""],
        "waiting for data": ["4.00 ms", "", ""],
        "loss of step 1": ["5.000", "", ""],
        "loss of step 10": ["3.000", "", ""],
    }
    shown = dict(headline(made.timeline, steps=STEPS))
    assert shown["step time"] == f"20.00 ms (measured; {seconds_text(predicted)} predicted)"
    assert shown["tokens/s"] == f"40,000 (measured; {800 / predicted:,.0f} predicted)"
    curves = [curve.split(" ") for (curve,) in (each.values() for each in Page(to_html(made)).attributes["polyline"])]
    assert [len(curve) for curve in curves] == [3, 2]
    assert "predicted" in re.findall(r"<svg class=.curve.*?</svg>", to_html(made))[1]
    alone = report(steps=[replace(STEPS[0], tokens=0, loss=float("nan"))])
    assert table("training (measured)", alone).rows[0][1] == "30.000 s"
    assert "tokens/s" not in to_text(alone)


def test_times_of_units_add_up_to_the_step() -> None:
    made = report(6)
    *rows, total = table("time by unit", made).rows
    assert rows[-1][:2] == ("optimizer", "optimizer")
    assert total == ("total", "", seconds_text(made.timeline.seconds))


def test_layouts_of_buckets() -> None:
    made = report()
    layout = made.buckets[0].layout
    first, total = table("buckets", made).rows
    assert first[0] == "embed to head, 6 alike"
    assert first[1:5] == (
        *("3", f"{layout.numel - layout.padding:,}", f"{layout.padding:,}"),
        percent_text(layout.padding, layout.numel - layout.padding),
    )
    assert first[5:7] == (bytes_text(4 * layout.shard_numel), bytes_text(2 * layout.numel))
    assert first[7].split(", ") == ["attention.weight", "mlp.weight", "norm.weight"]
    assert total[0] == "all 6"
    assert total[6] == bytes_text(6 * 2 * layout.numel)


def test_a_budget_that_is_exceeded() -> None:
    made = report(budget_bytes=100 * MIB)
    over = bytes_text(made.timeline.peak_bytes - 100 * MIB)
    assert f"The budget is 100.00 MiB: exceeded by {over}." in table("peak memory", made).about
    with pytest.raises(ValueError, match="a budget must be a positive number of bytes, got 0"):
        report(budget_bytes=0)


# -- formats ----------------------------------------------------------------------------------------------------------


def test_all_forms_show_the_same() -> None:
    times = [UnitTime(Stage.FORWARD, "layers.1", 2e-3, 1.25e-3)]
    made = report(12, measured=times, steps=STEPS)
    expected = cells(tables(made))
    assert Page(to_html(made)).cells == expected
    text = words(to_text(made))
    assert [cell for cell in expected if words(cell) not in text] == []
    for title in ("summary", "peak memory", "exposed communication", "time by unit", "buckets", "passes", "verifier"):
        assert table(title, made).rows


def test_a_terminal_sees_streams_and_memory() -> None:
    made = report(12, width=512)
    lines = to_text(made, width=80).splitlines()
    rows = {
        line.split()[0]: line.split()[1] for line in lines if re.match(r"  (compute|gather|reduce) +[FBO!gr.]+$", line)
    }
    assert set(rows["compute"]) <= set("FBO!.")
    assert {"F", "B", "!"} <= set(rows["compute"])
    assert "g" in rows["gather"]
    assert rows["reduce"].index("r") >= rows["compute"].index("B")
    assert len({len(row) for row in rows.values()}) == 1
    curve = next(line for line in lines if line.lstrip().startswith(bytes_text(made.timeline.peak_bytes)))
    assert "█" in curve
    assert words(peak_text(made.timeline)) in words("\n".join(lines))
    with pytest.raises(ValueError, match="at least 60 columns, got 20"):
        to_text(made, width=20)


def test_a_step_without_details_has_no_drawing() -> None:
    context, _ = step()
    timeline = simulate({Stage.FORWARD: [Enter(0), Compute(1.0, 0.0)]}, context, COSTS, {}, None, details=False)
    made = StepReport("sums alone", headline(timeline), timeline)
    assert "<svg" not in to_html(made)
    assert "timeline" not in to_text(made)
    assert Page(to_html(made)).cells == cells(tables(made))
    assert to_chrome_trace(timeline)["traceEvents"][1:] == []


def test_a_page_loads_nothing_from_elsewhere() -> None:
    text = to_html(report())
    assert re.findall(r"https?://|\bsrc\s*=|@import|url\(|<link|<iframe", text) == []
    assert "default-src 'none'" in text


def test_names_are_escaped() -> None:
    evil = "<script>alert('x')</script>&\"."
    made = report(3, prefix=evil, title=evil, notes=[evil], environment={evil: evil})
    text = to_html(made)
    assert "<script>alert" not in text
    assert len(Page(text).attributes["script"]) == 3
    assert Page(text).cells == cells(tables(made))
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert f"{evil}1" in json.loads(data)["units"]


def test_a_wait_names_what_it_waits_for() -> None:
    made = report(8)
    (text,) = re.findall(r'id="data">(.*?)</script>', to_html(made), re.DOTALL)
    hovers = [span[4] for lane in json.loads(text)["lanes"] for span in lane["spans"] if span[3] == "wait"]
    exposed = [exposure_text(e) for e in made.timeline.exposures if e.exposed]
    assert sorted(hover.split("\n")[2] for hover in hovers) == sorted(f"for {text}" for text in exposed)


# -- traces -----------------------------------------------------------------------------------------------------------


def test_a_trace_has_every_span_and_all_memory() -> None:
    timeline = report(6).timeline
    trace = json.loads(json.dumps(to_chrome_trace(timeline)))
    events_by_kind: dict[str, list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        events_by_kind.setdefault(event["ph"], []).append(event)
    assert set(events_by_kind) == {"M", "X", "C"}
    threads = {e["tid"]: e["args"]["name"] for e in events_by_kind["M"] if e["name"] == "thread_name"}
    assert sorted(threads.values()) == ["compute", "gather", "reduce"]
    for stream in threads.values():
        expected = sum(span.end - span.begin for span in timeline.spans if span.stream == stream)
        found = sum(event["dur"] for event in events_by_kind["X"] if threads[event["tid"]] == stream)
        assert found == pytest.approx(expected * 1e6)
    assert len(events_by_kind["X"]) == len(timeline.spans)
    totals = [sum(event["args"].values()) for event in events_by_kind["C"]]
    assert max(totals) == timeline.peak_bytes
    assert timeline.memory is not None
    assert totals[-1] == timeline.memory.totals[-1]
    assert set(events_by_kind["C"][0]["args"]) == {category.value for category in Category}


def test_collectives_that_overlap_get_lanes_of_their_own() -> None:
    timeline = report().timeline
    first = next(span for span in timeline.spans if span.kind == "gather")
    overlapping = Span("gather", "gather", "experts", first.stage, first.begin, first.end)
    timeline = replace(timeline, spans=[*timeline.spans, overlapping])
    events_of_trace = to_chrome_trace(timeline)["traceEvents"]
    names = [event["args"]["name"] for event in events_of_trace if event["name"] == "thread_name"]
    assert names == ["compute", "gather", "gather 2", "reduce"]
    for thread in range(1, 5):
        spans = sorted((e["ts"], e["dur"]) for e in events_of_trace if e["ph"] == "X" and e["tid"] == thread)
        assert all(a[0] + a[1] <= b[0] + 1e-6 for a, b in pairwise(spans))


def test_memory_in_few_points_keeps_its_peak() -> None:
    timeline = report(12).timeline
    assert timeline.memory is not None
    all_points, few = points(timeline.memory), points(timeline.memory, most=20)
    assert len(few) <= 22 < len(all_points)
    for found in (all_points, few):
        assert max(point.total for point in found) == timeline.peak_bytes
        assert found[-1].total == timeline.memory.totals[-1]
        assert [point.seconds for point in found] == sorted(point.seconds for point in found)


# -- files ------------------------------------------------------------------------------------------------------------


def test_files_of_a_report(tmp_path: Path) -> None:
    made = report()
    paths = write(made, tmp_path / "new" / "folder", "step")
    assert {form: path.name for form, path in paths.items()} == {
        "html": "step.html",
        "text": "step.txt",
        "trace": "step.trace.json",
    }
    assert paths["html"].read_text() == to_html(made)
    assert paths["text"].read_text() == to_text(made)
    assert json.loads(paths["trace"].read_text()) == json.loads(json.dumps(to_chrome_trace(made.timeline)))
    assert len(list(paths["html"].parent.iterdir())) == 3


def test_files_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"the report 'step' cannot be written to .*file: "):
        write(report(), tmp_path / "file", "step")
    for name in ("", "a/b"):
        with pytest.raises(ValueError, match="without a folder"):
            write(report(), tmp_path, name)

    paths = write(report(), tmp_path, "step")
    before = {path: path.read_text() for path in paths.values()}

    @contextlib.contextmanager
    def full(folder: Path, name: str) -> Iterator[IO[bytes]]:
        with new_file(folder, name) as file:
            if ".trace.json" in name:
                raise OSError(28, "No space left on device")
            yield file

    monkeypatch.setattr("mfsdp_compile.report.write_files.new_file", full)
    with pytest.raises(OSError, match="No space left on device"):
        write(report(5), tmp_path, "step")
    assert {path: path.read_text() for path in paths.values()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "step.html", "step.trace.json", "step.txt"]


# -- in a browser -----------------------------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH")

ASKING = """<script>
const root = document.documentElement;
const under = (element) => {
  if (!element) return "";
  const frame = element.getBoundingClientRect();
  const at = { clientX: frame.left + frame.width / 2, clientY: frame.top + frame.height / 2, pointerId: 1 };
  document.getElementById("drawing").dispatchEvent(new PointerEvent("pointermove", at));
  return document.getElementById("tip").innerText;
};
root.dataset.sideways = root.scrollWidth - innerWidth;
root.dataset.shapes = document.querySelectorAll("#drawing *").length;
root.dataset.peak = under(document.querySelector("#drawing .dot"));
root.dataset.span = under(document.querySelector("g[data-stream=compute] text.unit"));
root.dataset.same = document.querySelector("#drawing .same")?.getAttribute("d").match(/M/g).length;
const labels = () => document.querySelectorAll("g[data-stream=compute] text.unit").length;
root.dataset.labels = labels();
document.querySelector("button[data-view='0']").click();
root.dataset.zoomed = labels();
</script></body>"""


def in_browser(text: str, folder: Path) -> Page:
    """Return a report's page after its scripts have run, and with a script that queries and clicks."""
    path = folder / "page.html"
    path.write_text(text.replace("</body>", ASKING), encoding="utf-8")
    quiet = "--disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update"
    done = subprocess.run(
        [
            *(str(BROWSER), "--headless", "--no-sandbox", *quiet.split(), "--disable-sync"),
            *(f"--user-data-dir={folder / 'profile'}", "--window-size=1280,900", "--virtual-time-budget=2000"),
            *("--dump-dom", f"file://{path}"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"HOME": str(folder)},
    )
    assert done.returncode == 0, done.stderr
    return Page(done.stdout)


@needs_browser
def test_a_browser_shows_what_the_text_says(tmp_path: Path) -> None:
    made = report(12, width=512, prefix="<b>&layers.")
    page = in_browser(to_html(made), tmp_path)
    (root,) = page.attributes["html"]
    assert root.get("data-error") is None
    assert page.cells == cells(tables(made))
    text = words(to_text(made))
    assert [cell for cell in page.cells if words(cell) not in text] == []
    streams = [group["data-stream"] for group in page.attributes["g"] if "data-stream" in group]
    assert streams == ["compute", "gather", "reduce"]
    drawn = [path["data-category"] for path in page.attributes["path"] if "data-category" in path]
    assert sorted(map(str, drawn)) == sorted(category.value for category in Category)
    assert int(root["data-sideways"] or 0) <= 0
    # What is shown under the pointer is rounded as in the tables.
    peak = words(root["data-peak"] or "")
    assert peak.startswith(f"{bytes_text(made.timeline.peak_bytes)} at ")
    assert all(f"{c.value} {bytes_text(size)}" in peak for c, size in made.timeline.peak_parts.items())
    spans = [span for span in made.timeline.spans if (span.kind, span.name) == ("compute", "<b>&layers.0")]
    first = max((span for span in spans if span.stage is Stage.FORWARD), key=lambda span: span.end - span.begin)
    told = f"<b>&layers.0 {seconds_text(first.end - first.begin)} forward, {seconds_text(first.begin)} to "
    assert words(root["data-span"] or "").startswith(told)
    assert root["data-same"] == "5"  # one unit: computation and a gather in both stages, and a reduction
    assert int(root["data-labels"] or 0) > len(made.buckets)
    assert int(root["data-zoomed"] or 0) == len(made.buckets)  # only the forward


@needs_browser
def test_a_browser_draws_thousands_of_spans_as_few_shapes(tmp_path: Path) -> None:
    made = report(1000)
    assert len(made.timeline.spans) > 4000
    (root,) = in_browser(to_html(made), tmp_path).attributes["html"]
    assert root.get("data-error") is None
    assert int(root["data-shapes"] or 0) < 1000


@pytest.mark.long
@needs_browser
@pytest.mark.processes
def test_the_demo_s_report_in_a_browser_is_its_text(tmp_path: Path) -> None:
    arguments = ["demo", "--steps", "2", "--batch", "2", "--length", "32", "--parity-steps", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "mfsdp_compile.cli", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"COLUMNS": "200"},
    )
    folder = tmp_path / "demo-out"
    assert "report: demo-out/report.html" in done.stdout, done.stderr  # a loss need not fall in two steps
    text = (folder / "report.txt").read_text()
    page = in_browser((folder / "report.html").read_text(), tmp_path)
    (root,) = page.attributes["html"]
    assert root.get("data-error") is None
    assert [cell for cell in page.cells if words(cell) not in words(text)] == []
    assert len(page.cells) > 200
    assert "measured" in page.cells
    assert "not compared" not in text
    assert json.loads((folder / "report.trace.json").read_text())["traceEvents"]
