"""Graphs as Python, the changes of passes to schedules, and what a model becomes under torch.compile."""

from __future__ import annotations

import importlib.util
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile import MixedPrecisionPolicy, explain, fully_shard_model
from mfsdp_compile.backend import compile
from mfsdp_compile.models.llama import Block as LlamaBlock
from mfsdp_compile.models.llama import Llama, LlamaConfig
from mfsdp_compile.passes.changes import Event, changes

EAGER = {"inner": "aot_eager"}


def demo_model(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return fully_shard_model(
        Llama(LlamaConfig(width=32, hidden=48, layers=layers)), fsdp_unit_modules=[LlamaBlock], zero_dp_strategy=3
    )


# -- dumps ------------------------------------------------------------------------------------------------------------


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"dump_{path.stem.replace('-', '_')}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def flat(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def assert_equal(a: list[Any], b: list[Any]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


@pytest.mark.long
@pytest.mark.parametrize("layers", [2, 3], ids=["no region", "regions"])
@on_ranks(2)
def test_every_dump_runs_to_the_same_result(layers: int) -> None:
    folder = Path(tempfile.mkdtemp())
    os.environ["MFSDP_DEBUG_DIR"] = str(folder)
    given: dict[str, Any] = {}
    exchange, inner = compile.GraphArguments.exchange, compile._compile_inner

    def watched_exchange(self: Any, args: Any) -> Any:
        given["dynamo"] = [
            a.mfsdp_handle.bucket.gather_shards()[a.mfsdp_handle.index] if hasattr(a, "mfsdp_handle") else a
            for a in args
        ]
        return exchange(self, args)

    def watched_inner(*compile_args: Any) -> Any:
        compiled = inner(*compile_args)

        def run(*args: Any) -> Any:
            given["graph"] = [a.detach() if isinstance(a, Tensor) else a for a in args]
            return compiled(*args)

        return run

    compile.GraphArguments.exchange, compile._compile_inner = watched_exchange, watched_inner  # type: ignore[method-assign]
    try:
        model = demo_model(layers)
        tokens = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(dist.get_rank()))
        loss = torch.compile(model, backend="mfsdp", options=EAGER, fullgraph=True)(tokens).pow(2).mean()
        loss.backward()
        with torch.no_grad():
            logits = model(tokens)
    finally:
        compile.GraphArguments.exchange, compile._compile_inner = exchange, inner  # type: ignore[method-assign]
        del os.environ["MFSDP_DEBUG_DIR"]
    (made,) = (folder / "graphs" / f"rank-{dist.get_rank()}").iterdir()
    names = sorted(path.stem for path in made.glob("*.py"))
    assert names == [
        "backward-0",
        "backward-1-reduce",
        "backward-2-schedule",
        "dynamo-0",
        "dynamo-1-unshard",
        "forward-0",
        "forward-1-schedule",
        "joint-0",
        "joint-1-reshard",
    ]
    dumps = {name: load(made / f"{name}.py").forward for name in names}
    detached_logits = logits.detach()
    leaf = logits.detach().clone().requires_grad_()
    leaf.pow(2).mean().backward()
    tangent = leaf.grad
    with torch.no_grad():
        assert torch.equal(flat(dumps["dynamo-0"](*given["dynamo"]))[0], detached_logits)
        assert torch.equal(flat(dumps["dynamo-1-unshard"](*given["graph"]))[0], detached_logits)
        forward = flat(dumps["forward-0"](*given["graph"]))
        assert torch.equal(forward[0], detached_logits)
        assert_equal(flat(dumps["forward-1-schedule"](*given["graph"])), forward)
        joint = flat(dumps["joint-0"](*given["graph"], tangent))
        assert_equal(flat(dumps["joint-1-reshard"](*given["graph"], tangent)), joint)
        backward = flat(dumps["backward-0"](*forward[1:], tangent))
        assert_equal(joint[1:], backward)
        for name in ("backward-1-reduce", "backward-2-schedule"):
            assert_equal(flat(dumps[name](*forward[1:], tangent)), backward)
    for bucket in model.sharded.buckets:
        of_bucket = [g.to_local().flatten() for g in bucket.gradients]  # type: ignore[union-attr]
        match = [b for b in backward if b is not None and b.shape == bucket.flat.shape]
        places = bucket.places
        assert any(
            all(torch.equal(b[p[0] : p[1]], g) for p, g in zip(places, of_bucket, strict=True)) for b in match
        ), bucket
    told = (made / "passes.txt").read_text()
    assert "moved    " in told or "shifted  " in told
    assert "forward-1-schedule.py" in told


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: Any, fake_world: int) -> None:
    (tmp_path / "graphs").write_text("a file where a folder should be")
    monkeypatch.setenv("MFSDP_DEBUG_DIR", str(tmp_path))
    model = fully_shard_model(nn.Linear(4, 4), fsdp_unit_modules=None)
    with pytest.warns(RuntimeWarning, match="MFSDP_DEBUG_DIR"):
        torch.compile(model, backend="mfsdp", options=EAGER)(torch.ones(1, 4))


# -- changes by passes ------------------------------------------------------------------------------------------------


def events(*names: str) -> list[Event]:
    """Parse events: ``"12 gather a"`` is after 12 operators."""
    return [Event(name.split(" ", 1)[1], int(name.split(" ", 1)[0])) for name in names]


def test_changes_in_words() -> None:
    before = events("0 gather a", "0 wait a", "5 gather b", "5 wait b", "9 reduce b")
    after = events("0 gather a", "0 gather b", "0 wait a", "6 wait b", "9 added c")
    assert changes(before, before) == []
    assert changes(before, after) == [
        "removed  reduce b",
        "moved    gather b before wait a (5 operators earlier)",
        "shifted  wait b: 1 operator later",
        "added    added c to the end",
    ]


def test_what_is_called_moved_is_as_little_as_possible() -> None:
    """Applied to the old order, the reported moves give the new one, and no fewer moves would."""
    rng = random.Random(0)
    for _ in range(200):
        names = [f"e{i}" for i in range(rng.randrange(1, 9))]
        shuffled = rng.sample(names, len(names))
        told = changes([Event(n, 0) for n in names], [Event(n, 0) for n in shuffled])
        moved = {line.split()[1] for line in told}
        assert all(line.startswith("moved") for line in told)
        stay = [n for n in names if n not in moved]
        assert stay == [n for n in shuffled if n not in moved]
        longest = max(
            (bin(bits).count("1"))
            for bits in range(1 << len(names))
            if [n for i, n in enumerate(names) if bits >> i & 1] == [n for n in shuffled if bits >> names.index(n) & 1]
        )
        assert len(stay) == longest


# -- explain ----------------------------------------------------------------------------------------------------------


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.alone = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()  # HERE
        return self.alone(self.second(x))


@on_ranks(2)
def test_explain() -> None:
    model = demo_model()
    tokens = torch.zeros(1, 8, dtype=torch.long)
    state = torch.get_rng_state()
    told = explain(model, tokens)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(bucket.gradients == [None] * len(bucket.params) for bucket in model.sharded.buckets)
    assert len(told.graphs) == 1
    assert told.breaks == ()
    assert told.eager == ()
    text = str(told)
    assert "1 graph, 0 graph breaks" in text
    assert "schedule: moved    gather" in text
    assert "gather  layers.0" in text
    model(tokens).sum().backward()  # as if nothing had happened


@on_ranks(2)
def test_explain_names_policies() -> None:
    policies = {
        nn.LayerNorm: MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16),
        None: MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False),
    }
    layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    model = fully_shard_model(layers, fsdp_unit_modules=[nn.Linear], mixed_precision_policy=policies)
    told = str(explain(model, torch.randn(4, 8).bfloat16()))
    assert (
        "precision: LayerNorm: param_dtype=float32, output_dtype=bfloat16; everything else: param_dtype=bfloat16, "
        "cast_forward_inputs=False"
    ) in told


@pytest.mark.long
@on_ranks(2)
def test_explain_names_breaks_and_what_is_eager() -> None:
    torch.manual_seed(0)
    model = fully_shard_model(Breaking(), fsdp_unit_modules=[nn.Linear])
    mean = model.module.alone.running_mean.clone()
    told = explain(model, torch.randn(4, 8))
    assert torch.equal(model.module.alone.running_mean, mean)
    assert len(told.graphs) == 2
    assert len(told.breaks) == 1
    assert "test_explain.py" in told.breaks[0]
    assert "HERE" in told.breaks[0]

    @torch._dynamo.disable
    def second(x: Tensor) -> Tensor:
        return nn.Linear.forward(model.module.second, x)

    model.module.second.forward = second
    assert "second" in explain(model, torch.randn(4, 8)).eager


@on_ranks(2)
def test_explain_of_a_compiled_function() -> None:
    model = demo_model()
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    compiled = torch.compile(lambda batch: 2 * model(batch, batch), backend="mfsdp", options=EAGER)
    with pytest.raises(TypeError, match=r"got a function.*explain\(function, \*inputs, sharded=model\)"):
        explain(compiled, tokens)
    found = explain(compiled, tokens, sharded=model)
    assert len(found.graphs) == 1
    assert {"layers.0", "layers.1"} <= set(found.graphs[0].units)


@pytest.mark.long
@on_ranks(2)
def test_explain_tells_recompilations() -> None:
    model = demo_model(1)
    torch._dynamo.utils.clear_compilation_metrics()
    call = torch.compile(model, backend="mfsdp", options=EAGER, dynamic=False)
    for length in (4, 6):
        call(torch.zeros(1, length, dtype=torch.long))
    told = explain(call, torch.zeros(1, 4, dtype=torch.long))
    assert any("size" in line and "4" in line for line in told.recompilations), told.recompilations


def test_explain_takes_sharded_models() -> None:
    with pytest.raises(TypeError, match="explain"):
        explain(nn.Linear(2, 2))


@pytest.mark.long
@pytest.mark.usefixtures("fake_world")
def test_many_layers_are_told_on_a_page() -> None:
    model = demo_model(layers=40)
    told = str(explain(model, torch.zeros(1, 8, dtype=torch.long)))
    assert "region_0: 40 units, layers.0 to layers.39" in told
    assert "39 times:" in told
    assert len(told.splitlines()) < 64


@pytest.mark.usefixtures("fake_world")
def test_what_is_no_region_is_told() -> None:
    told = str(explain(demo_model(layers=2), torch.zeros(1, 8, dtype=torch.long)))
    assert "no region: layers.0, layers.1: only 2 units are equal, and a region needs 3" in told
