"""The drawings of the documentation, made from what the package does: layouts of buckets, collectives of steps,
simulated timelines, graphs; and from the tables of measurements.

``tests/documentation/test_drawings.py`` compares them with the files in ``docs/drawings``; with
``MFSDP_WRITE_DRAWINGS=1`` it writes these.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from mfsdp_compile import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.diagnostics import doctor
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig
from mfsdp_compile.passes import roles
from mfsdp_compile.passes.context import Context
from mfsdp_compile.passes.guests.solver.flow import Category
from mfsdp_compile.passes.guests.solver.hardware import hardware
from mfsdp_compile.passes.guests.solver.simulate import Timeline
from mfsdp_compile.planning import Candidate, Job, Workload
from mfsdp_compile.planning.planner import planned, traced_stages
from mfsdp_compile.report import bytes_text, seconds_text
from mfsdp_compile.report.timeline import lanes, points, stages
from mfsdp_compile.runtime.geometry.exchange import Overlap
from mfsdp_compile.runtime.geometry.layout import BucketLayout
from mfsdp_compile.runtime.geometry.placements import ShardingStrategy
from mfsdp_compile.runtime.ranks import profiling
from mfsdp_compile.runtime.schedule.phase import Phase
from mfsdp_compile.runtime.schedule.text import ScheduleLine

__all__ = ["DRAWINGS", "FOLDER"]

FOLDER = Path(__file__).resolve().parents[1] / "drawings"
STYLE = (FOLDER.parent / "stylesheets" / "drawings.css").read_text(encoding="utf-8")
WIDTH = 720
RANKS = 4


@dataclass
class Drawing:
    """An SVG that grows downwards.

    Attributes:
        height: of what is drawn so far.
    """

    height: float = 0.0
    _parts: list[str] = field(default_factory=list)

    def box(self, x: float, y: float, width: float, height: float, kind: str, about: str = "") -> None:
        """A rectangle of the color of ``kind``; ``about`` is shown where the pointer rests on it."""
        title = f"<title>{escape(about)}</title>" if about else ""
        at = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.4):.1f}" height="{height:.1f}"'
        self._parts.append(f'<rect class="{kind}" {at}>{title}</rect>' if title else f'<rect class="{kind}" {at}/>')
        self._reach(y + height)

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """A line whose baseline is at ``y``."""
        classes = f' class="{kind}"' if kind else ""
        self._parts.append(f'<text{classes} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>')
        self._reach(y + 4)

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str = "line") -> None:
        self._parts.append(f'<line class="{kind}" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>')
        self._reach(max(y, to_y))

    def area(self, corners: Sequence[tuple[float, float]], kind: str) -> None:
        """A filled polygon."""
        at = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self._parts.append(f'<polygon class="{kind}" points="{at}"/>')
        self._reach(max(y for _, y in corners))

    def legend(self, y: float, kinds: Mapping[str, str]) -> None:
        """Names of colors, in a row."""
        x = 0.0
        for kind, name in kinds.items():
            self.box(x, y, 11, 11, kind)
            self.text(x + 16, y + 10, name, "soft small")
            x += 16 + 5.8 * len(name) + 14

    def _reach(self, y: float) -> None:
        self.height = max(self.height, y)

    def __str__(self) -> str:
        size = f'viewBox="0 0 {WIDTH} {self.height + 2:.0f}" width="{WIDTH}" height="{self.height + 2:.0f}"'
        body = "\n".join(self._parts)
        svg = f'svg xmlns="http://www.w3.org/2000/svg" class="drawing" {size}'
        return f"<{svg}>\n<style>\n{STYLE}</style>\n{body}\n</svg>\n"


@contextlib.contextmanager
def ranks(count: int) -> Iterator[None]:
    """This process as the first of ranks that do not exist: collectives return at once, with undefined content."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


def small_llama(**arguments: object) -> MegatronFSDP:
    torch.manual_seed(0)
    model = Llama(LlamaConfig(vocabulary=200, width=32, layers=3, heads=4, kv_heads=2, hidden=80))
    return fully_shard_model(model, fsdp_unit_modules=[Block], **arguments)  # type: ignore[arg-type]


# -- units and buckets ------------------------------------------------------------------------------------------------

SHADES = ("one", "two", "three", "four")


def units() -> str:
    """A model's modules, its units, and their buckets."""
    drawing = Drawing()
    with ranks(RANKS):
        model = small_llama()
        owned = {unit.name: unit for unit in model.sharded.eager.units}
        for x, title in ((0, "modules and their parameters"), (370, "unit"), (520, f"bucket, over {RANKS} ranks")):
            drawing.text(x, 12, title, "head")
        y = 24.0
        for name, unit in owned.items():
            for bucket in unit.buckets:
                slots = bucket.plan.layout.slots
                lines = [f"{slot.name}  {list(slot.shape)}" for slot in slots]
                if len(lines) > 4:
                    lines = [*lines[:2], "...", lines[-1]]
                height = 17 * len(lines) + 9
                drawing.box(0, y, 350, height, "track")
                for number, line in enumerate(lines):
                    drawing.text(8, y + 17 * (number + 1), line, "code")
                middle = y + height / 2
                drawing.text(370, middle + 4, name, "code")
                drawing.line(352, middle, 366, middle)
                drawing.line(496, middle, 514, middle)
                _shares(drawing, bucket.plan.layout, 520, middle - 17, WIDTH - 520, 14)
                count = f"{len(slots)} parameter{'s' if len(slots) > 1 else ''}"
                size = f"{count}, {bytes_text(bucket.plan.gathered_bytes)}"
                drawing.text(520, middle + 14, size, "soft")
                y += height + 8
    return str(drawing)


def _shares(drawing: Drawing, layout: BucketLayout, x: float, y: float, width: float, height: float) -> None:
    """A bucket as a bar, its parameters in alternating colors, with the borders of shards."""
    drawing.box(x, y, width, height, "padding")
    for number, slot in enumerate(layout.slots):
        left = x + width * slot.offset / layout.numel
        drawing.box(left, y, width * slot.numel / layout.numel, height, SHADES[number % len(SHADES)], slot.name)
    for rank in range(layout.world_size + 1):
        border = x + width * rank / layout.world_size
        drawing.line(border, y - 3, border, y + height + 3, "border")


def bucket() -> str:
    """The layout of a bucket, and which rows each rank owns."""
    drawing = Drawing()
    with ranks(RANKS):
        model = small_llama()
        plan = next(b.plan for b in model.sharded.buckets if b.plan.name == "layers.0")
    layout = plan.layout
    drawing.text(0, 12, f"bucket {plan.name}: {layout.numel:,} elements, {layout.padding:,} of them padding", "head")
    for rank in range(RANKS):
        drawing.text(WIDTH * (rank + 0.5) / RANKS, 32, f"shard of rank {rank}", "soft", "middle")
    _shares(drawing, layout, 0, 40, WIDTH, 26)
    columns = (0, 220, 320)
    y = 92.0
    for x, title in zip(columns, ("parameter", "shape", "rows on each rank"), strict=True):
        drawing.text(x, y, title, "head")
    for index, slot in enumerate(layout.slots):
        y += 18
        drawing.box(columns[0], y - 10, 11, 11, SHADES[index % len(SHADES)])
        drawing.text(columns[0] + 18, y, slot.name.removeprefix(f"{plan.unit}."), "code")
        drawing.text(columns[1], y, " x ".join(map(str, slot.shape)), "code")
        for rank in range(RANKS):
            rows = layout.rows(index, rank)
            text = f"{rows.start} - {rows.stop - 1}" if rows else "none"
            drawing.text(columns[2] + rank * 100, y, text, "code" if rows else "code soft")
    return str(drawing)


# -- collectives of a step --------------------------------------------------------------------------------------------

STRATEGIES = {
    "no_shard": "no_shard (0)",
    "optim": "optim (1)",
    "optim_grads": "optim_grads (2)",
    "optim_grads_params": "optim_grads_params (3)",
    "HSDP optim_grads_params": "HSDP, 2 x 2 ranks",
    "HFSDP": "HFSDP, 2 x 2 ranks",
    "once": "3, set_accumulation",
}
MICROBATCHES = 3


def strategies() -> str:
    """What each strategy communicates in an optimizer step of three microbatches."""
    drawing = Drawing()
    names = [f"{way} {number + 1}" for number in range(MICROBATCHES) for way in ("forward", "backward")] + ["step"]
    left, cell = 180, (WIDTH - 180) / len(names)
    for number, name in enumerate(names):
        drawing.text(left + number * cell + 2, 12, name, "soft")
    y = 20.0
    for strategy, title in STRATEGIES.items():
        launches = _launches(strategy)
        drawing.text(0, y + 20, title, "code")
        for number, name in enumerate(names):
            drawing.box(left + number * cell, y, cell - 3, 30, "track")
            for position, what in enumerate(launches.get(name, ())):
                across, down = position % 8, position // 8
                x = left + number * cell + 4 + across * 8.4
                drawing.box(x, y + 4 + 12 * down, 6.4, 9, "gather" if what.startswith("gather") else "reduce", what)
        y += 36
    drawing.legend(y + 6, {"gather": "gather of a bucket", "reduce": "reduction of a bucket"})
    return str(drawing)


def _launches(strategy: str) -> Mapping[str, Sequence[str]]:
    """Collectives of the second step, by the part in which they start: in the first step there is more to gather."""
    found: dict[str, list[str]] = {}
    with ranks(RANKS):
        sharding = doctor.mesh_arguments("optim_grads_params" if strategy == "once" else strategy)
        torch.manual_seed(0)
        model = fully_shard_model(doctor.ResidualModel(), fsdp_unit_modules=[doctor.ResidualBlock], **sharding)
        if strategy == "once":
            model.set_accumulation(whole_gradients=True, keep_gathered=True)
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
        compiled = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager"})

        def step(into: dict[str, list[str]]) -> None:
            at = ""
            with profiling.listening(lambda launch: into.setdefault(at, []).append(launch.what)):
                for number in range(MICROBATCHES):
                    model.is_last_microbatch = number == MICROBATCHES - 1
                    at = f"forward {number + 1}"
                    loss = compiled(torch.zeros(2, 8))
                    at = f"backward {number + 1}"
                    loss.backward()
                at = "step"
                optimizer.step()
                optimizer.zero_grad()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of undefined gradients that are not finite
            step({})
            step(found)
    return found


# -- time and memory --------------------------------------------------------------------------------------------------

HARDWARE = "h100-ib"
WORLD = 64
CONFIG = LlamaConfig(32_000, 4096, 4, 32, 8, 14336)


def _tokens(batch: int, length: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    return [torch.zeros(batch, length, dtype=torch.int64) for _ in range(2)], {}


@functools.cache
def _timelines() -> Mapping[str, Timeline]:
    """A step of four layers as large as Llama-3-8B's, simulated, under several schedules."""
    machine = hardware(HARDWARE)
    work = Workload("four layers", lambda: Llama(CONFIG), [Block], _tokens, batch=1, length=4096)
    traced = traced_stages(work, machine, True)
    jobs = {
        "no overlap": Job(work, machine, solved=False, overlap=Overlap(False, False)),
        "one unit ahead": Job(work, machine, solved=False),
        "kept for the backward": Job(work, machine, reshard=False),
    }
    found = {}
    for name, job in jobs.items():
        timeline = planned(job, traced, Candidate(ShardingStrategy.OPTIM_GRADS_PARAMS, WORLD), details=True).timeline
        assert timeline is not None
        found[name] = timeline
    return found


def timeline() -> str:
    """The same step with no overlap and with the schedule that there is by default."""
    drawing = Drawing()
    shown = {name: _timelines()[name] for name in ("no overlap", "one unit ahead")}
    left = 64
    scale = (WIDTH - left) / max(each.seconds for each in shown.values())
    y = 0.0
    for name, each in shown.items():
        exposed = f"{seconds_text(each.seconds)}, of which computation waits {seconds_text(each.exposed_seconds)}"
        drawing.text(0, y + 12, f"{name}: {exposed}", "head")
        y += 20
        for stage, begin, end in stages(each):
            _stage(drawing, left + (begin + end) / 2 * scale, y + 10, stage.value)
            drawing.line(left + begin * scale, y + 14, left + begin * scale, y + 14 + 3 * 26, "grid")
        y += 16
        for lane in lanes(each):
            drawing.text(0, y + 15, lane.name, "soft")
            drawing.box(left, y, WIDTH - left, 22, "track")
            for span in lane.spans:
                width = (span.end - span.begin) * scale
                about = f"{span.kind} {span.name}, {span.stage.value}, {seconds_text(span.end - span.begin)}"
                drawing.box(left + span.begin * scale, y, width, 22, span.kind, about)
                short = span.name.removeprefix("layers.").removeprefix("root:")
                if width > 6.4 * len(short) + 4:
                    drawing.text(left + (span.begin + span.end) / 2 * scale, y + 15, short, "label", "middle")
            y += 26
        y += 14
    kinds = {"compute": "computation", "gather": "gather", "reduce": "reduction"}
    drawing.legend(y, kinds | {"wait": "computation waits", "optimizer": "optimizer"})
    return str(drawing)


def _stage(drawing: Drawing, x: float, y: float, name: str) -> None:
    """The name of a stage around ``x``, inside of the drawing."""
    drawing.text(min(x, WIDTH - 3.2 * len(name)), y, name, "soft", "middle")


MEMORY = {
    Category.SHARDS: "shards",
    Category.OPTIMIZER: "optimizer",
    Category.GATHERED: "gather",
    Category.GRADIENTS: "reduce",
    Category.SAVED: "compute",
    Category.TEMPORARY: "temporary",
}


def memory() -> str:
    """Memory over a step, when gathered parameters are let go of and when they are kept."""
    drawing = Drawing()
    shown = {name: _timelines()[name] for name in ("one unit ahead", "kept for the backward")}
    most = max(each.peak_bytes for each in shown.values())
    longest = max(each.seconds for each in shown.values())
    height, y = 110.0, 0.0
    for name, each in shown.items():
        assert each.memory is not None
        drawing.text(0, y + 12, f"{name}: at most {bytes_text(each.peak_bytes)}, {seconds_text(each.seconds)}", "head")
        top, bottom = y + 22, y + 22 + height
        drawing.box(0, top, WIDTH, height, "track")
        moments = points(each.memory, most=220)
        below = [0] * len(moments)
        for position, category in enumerate(Category):
            above = [low + point.parts[position] for low, point in zip(below, moments, strict=True)]
            times = [point.seconds / longest * WIDTH for point in moments] + [each.seconds / longest * WIDTH]
            upper, lower = [], []
            for begin, end, low, high in zip(times, times[1:], below, above, strict=False):
                upper += [(x, bottom - high / most * height) for x in (begin, end)]
                lower += [(x, bottom - low / most * height) for x in (begin, end)]
            drawing.area([*upper, *reversed(lower)], MEMORY[category])
            below = above
        for stage, begin, end in stages(each):
            _stage(drawing, (begin + end) / 2 / longest * WIDTH, bottom + 14, stage.value)
        y = bottom + 28
    drawing.legend(y, {kind: category.value for category, kind in MEMORY.items()})
    return str(drawing)


# -- regions ----------------------------------------------------------------------------------------------------------

LAYERS, FEWER, MANY = 8, 3, 80
"""Layers of the model that is drawn, of a smaller one, and of one whose size follows: all layers add the same nodes."""
LEFT, MIDDLE, RIGHT = (0, 188), (238, 474), (524, 720)
"""Left and right edges of the columns."""
ROW = 17
EXPLAINED = (
    "Equal layers share these graphs:",
    'each line "run" is a call of one.',
    "Gathers and reductions stay outside,",
    "where they overlap with the calls.",
)
CALL = re.compile(r"run\s+(\S+)")
PRODUCTS = re.compile(r"mm|bmm|addmm|_scaled_dot_product_\w+")


@dataclass(frozen=True)
class Compiled:
    """Graphs of a Llama.

    Attributes:
        schedules: of the model's graphs.
        calls: of the region, each with the graph that it calls. One of each phase.
        outputs: Number of values that the region's forward returns to the model.
        nodes: in the model's graphs.
    """

    schedules: Mapping[Phase, Sequence[str]]
    calls: Mapping[Phase, tuple[fx.Node, fx.GraphModule]]
    outputs: int
    nodes: int

    @property
    def region_nodes(self) -> int:
        return sum(len(body.graph.nodes) for _, body in self.calls.values())


def _compiled(layers: int, regions: bool | str) -> Compiled:
    calls: dict[Phase, tuple[fx.Node, fx.GraphModule]] = {}
    nodes: dict[Phase, int] = {}

    def look(graph: fx.Graph, context: Context, phase: Phase) -> None:
        nodes[phase] = len(graph.nodes)
        for call in roles.region_calls(graph):
            calls[phase] = call, roles.body_of(call)

    with ranks(RANKS):
        torch.manual_seed(0)
        model = Llama(LlamaConfig(vocabulary=64, width=16, layers=layers, heads=4, kv_heads=2, hidden=32))
        sharded = fully_shard_model(model, fsdp_unit_modules=[Block])
        options = {"inner": "aot_eager", "regions": regions, "passes": [look]}
        tokens = torch.zeros(2, 8, dtype=torch.int64)
        torch.compile(sharded, backend="mfsdp", options=options)(tokens, tokens).backward()
        (record,) = sharded.sharded.compiled_graphs
        outputs = len(record.regions[0].differentiable) if record.regions else 0
        return Compiled(dict(record.schedules), calls, outputs, sum(nodes.values()))


def regions() -> str:
    """A model's graphs, the graphs of the region that they call, and how many nodes all of these have."""
    drawing = Drawing()
    drawn = _compiled(LAYERS, "auto")
    for (x, _), title, about in (
        (LEFT, "forward graph", f"{LAYERS} layers"),
        (MIDDLE, "region", "compiled once"),
        (RIGHT, "backward graph", f"{LAYERS} layers"),
    ):
        drawing.text(x, 12, title, "head")
        drawing.text(x + 8 * len(title) + 6, 12, about, "soft")
    top = 26.0
    y = top + ROW
    for phase, x, edge, to in (
        (Phase.FORWARD, LEFT[0], LEFT[1], MIDDLE[0]),
        (Phase.BACKWARD, RIGHT[0], RIGHT[0], MIDDLE[1]),
    ):
        rows = _top_level(drawing, drawn.schedules[phase], x, top)
        for number, row in enumerate(rows):
            drawing.line(edge, row, to, y + 14 + 10 * number)
        y = _region(drawing, drawn, phase, y) + 2 * ROW
    for number, text in enumerate(EXPLAINED):
        drawing.text(MIDDLE[0], y + 16 * number, text, "soft")
    kinds = {"gather": "gather in flight", "reduce": "reduction in flight"}
    y = drawing.height + 18
    drawing.legend(y, kinds | {"compute": "operator, or call of a region", "four": "matrix product or attention"})
    _sizes(drawing, drawn, y + 44)
    return str(drawing)


def _top_level(drawing: Drawing, lines: Sequence[str], x: float, y: float) -> list[float]:
    """Lines of a schedule up to those of the second call, and from those of the last one.

    Returns:
        The middle of each call that is drawn.
    """
    called = [at for at, line in enumerate(lines) if CALL.match(line)]
    cuts = [called[1] + 1, called[-2] + 1]
    for number, cut in enumerate(cuts):
        while not lines[cut].startswith(("gather", "wait")):  # a reduction that follows the call
            cut += 1
        cuts[number] = cut
    rows = {at: y + ROW * number for number, at in enumerate(range(cuts[0]))}
    gap = y + ROW * cuts[0]
    rows |= {at: gap + ROW * (number + 1) for number, at in enumerate(range(cuts[1], len(lines)))}
    text = 9 * (1 + max(lane for lane, *_ in _flights(lines))) + 6
    drawing.text(x + text, gap + 12, f"... {len(lines) - len(rows)} lines", "soft")
    for lane, kind, begin, end in _flights(lines):
        if begin in rows or end in rows:
            upper = rows[begin] + 2 if begin in rows else gap + 10
            lower = rows[end] + ROW - 5 if end in rows else gap + 5
            drawing.box(x + 9 * lane, upper, 7, lower - upper, kind, lines[begin])
    for at, row in rows.items():
        line = lines[at].strip()
        if called_unit := CALL.match(line):
            drawing.box(x + text - 4, row, LEFT[1] - text + 4, ROW - 3, "compute", line)
            drawing.text(x + text, row + 11, f"run    {called_unit[1]}", "code")
        elif found := ScheduleLine.parse(line):
            drawing.text(x + text, row + 11, f"{found.what:6} {found.bucket}", "code")
        else:
            drawing.text(x + text, row + 11, line.replace("1 operators", "1 operator"), "soft small")
    return [rows[at] + (ROW - 3) / 2 for at in called if at in rows]


def _flights(lines: Sequence[str]) -> Iterator[tuple[int, str, int, int]]:
    """Collectives of a schedule: a lane that is free, the kind, and the lines of start and end."""
    lanes: list[int] = []
    for begin, text in enumerate(lines):
        line = ScheduleLine.parse(text)
        if line is None or line.what not in ("gather", "reduce"):
            continue
        closing = f"{'wait' if line.what == 'gather' else 'await':7} {line.bucket}"
        end = next(at for at in range(begin, len(lines)) if lines[at].startswith(closing))
        lane = next((lane for lane, until in enumerate(lanes) if until < begin), len(lanes))
        lanes[lane : lane + 1] = [end]
        yield lane, line.what, begin, end


def _region(drawing: Drawing, drawn: Compiled, phase: Phase, y: float) -> float:
    """The graph that calls of a region run. Returns its lower edge."""
    call, body = drawn.calls[phase]
    x, width = MIDDLE[0] + 8, MIDDLE[1] - MIDDLE[0]
    operators = [node for node in body.graph.nodes if node.op == "call_function" and not roles.is_view(node)]
    (line,) = {line.split()[-2] for line in drawn.schedules[phase] if CALL.match(line)}
    assert len(operators) == int(line)
    returned, buckets = len(body.graph.output_node().args[0]), len(body.meta["mfsdp_wholes"])  # type: ignore[arg-type]
    taken = len(call.args) - 2 - buckets
    if phase is Phase.FORWARD:
        gives = f"returns {drawn.outputs} output, {returned - drawn.outputs} saved values"
    else:
        packed = len(body.meta["mfsdp_packs"])
        gives = f"returns {packed} packed and {returned - packed} other gradient"
    across = 19
    height = 67 + 11 * -(-len(operators) // across)
    drawing.box(MIDDLE[0], y, width, height, "track")
    drawing.text(x, y + 17, body.meta["mfsdp_region_name"], "code")
    drawing.text(x, y + 34, f"takes {buckets} gathered bucket, {taken} values", "soft small")
    for number, node in enumerate(operators):
        name = node.target.__name__.partition(".")[0]  # type: ignore[union-attr]
        kind = "four" if PRODUCTS.fullmatch(name) else "compute"
        drawing.box(x + 11.3 * (number % across), y + 43 + 11 * (number // across), 9, 9, kind, name)
    drawing.text(x, y + height - 8, gives, "soft small")
    drawing.text(MIDDLE[1] - 8, y + 17, f"{len(operators)} operators", "soft small", "end")
    return y + height


def _sizes(drawing: Drawing, drawn: Compiled, y: float) -> None:
    """How many nodes the graphs of a model have, with and without regions."""
    fewer, alone, fewer_alone = _compiled(FEWER, "auto"), _compiled(LAYERS, False), _compiled(FEWER, False)
    assert fewer.region_nodes == drawn.region_nodes
    left, unit = 140, (WIDTH - 140) / _reckoned(fewer_alone.nodes, alone.nodes)
    drawing.text(0, y, "nodes, forward and backward", "head")
    drawing.legend(y + 10, {"shards": "in the model's graphs", "compute": "in the region's graphs"})
    y += 32
    for layers, with_regions, without in (
        (LAYERS, drawn.nodes, alone.nodes),
        (MANY, _reckoned(fewer.nodes, drawn.nodes), _reckoned(fewer_alone.nodes, alone.nodes)),
    ):
        for name, parts in (
            ("", {"shards": with_regions, "compute": drawn.region_nodes}),
            (", no regions", {"shards": without}),
        ):
            drawing.text(0, y + 11, f"{layers} layers{name}", "soft")
            at: float = left
            for kind, count in parts.items():
                drawing.box(at, y, count * unit, 14, kind, f"{count:,} nodes")
                at += count * unit
            total = " + ".join(f"{count:,}" for count in parts.values())
            if at + 6.2 * len(total) < WIDTH:
                drawing.text(at + 6, y + 11, total, "soft small")
            else:
                drawing.text(at - 6, y + 11, total, "label", "end")
            y += 19


def _reckoned(fewer: int, some: int) -> int:
    """Number of nodes with ``MANY`` layers, from those with ``FEWER`` and with ``LAYERS``."""
    each, rest = divmod(some - fewer, LAYERS - FEWER)
    assert rest == 0, "layers differ"
    return some + each * (MANY - LAYERS)


# -- measurements -----------------------------------------------------------------------------------------------------

MEASUREMENTS = FOLDER.parent / "performance.md"
RELATIVE = re.compile(r"(against|relative to) FSDP2")


@dataclass(frozen=True)
class Ratios:
    """A table's column of times in relation to FSDP2's.

    Attributes:
        title: Heading of the column.
        rows: Name and ratio of each system that has one.
    """

    title: str
    rows: Sequence[tuple[str, float]]


def measured(section: str) -> list[Ratios]:
    """Return what the tables in a section of the page of measurements say."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", MEASUREMENTS.read_text(encoding="utf-8"), re.M | re.S)
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.M):
        header, _, *rows = ([cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines())
        for at, title in enumerate(header):
            if RELATIVE.search(title):
                named = ((row[0].replace("`", ""), row[at].partition(" ")[0]) for row in rows)
                found.append(Ratios(title, [(name, float(ratio)) for name, ratio in named if ratio]))
    return found


def ratios(section: str) -> str:
    """The ratios of a section's tables as bars, with a line where FSDP2 is."""
    drawing = Drawing()
    left, y = 300, 0.0
    tables = measured(section)
    unit = (WIDTH - left - 40) / max(ratio for table in tables for _, ratio in table.rows)
    for table in tables:
        drawing.text(0, y + 12, table.title, "head")
        y += 20
        top = y
        for name, ratio in table.rows:
            drawing.text(0, y + 12, name, "soft")
            drawing.box(left, y, ratio * unit, 16, "gather" if name.startswith("mfsdp") else "shards", name)
            drawing.text(WIDTH, y + 12, f"{ratio:.2f}", "small", "end")
            y += 20
        drawing.line(left + unit, top - 4, left + unit, y, "border")
        y += 10
    return str(drawing)


DRAWINGS: Mapping[str, Callable[[], str]] = {
    "units": units,
    "bucket": bucket,
    "strategies": strategies,
    "timeline": timeline,
    "memory": memory,
    "regions": regions,
    "step_time": functools.partial(ratios, "Step time"),
    "host_overhead": functools.partial(ratios, "Host overhead"),
    "checkpoints": functools.partial(ratios, "Checkpoints"),
}
