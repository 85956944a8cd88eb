"""``loss_chunks``: the loss in chunks of tokens has the gradients of the loss as a whole, or is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import torch.nn.functional as F
import zoo
from parity import INDUCTOR
from pool import on_ranks
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import init_device_mesh

from mfsdp_compile import MixedPrecisionPolicy, compile_step, explain, fully_shard_model
from mfsdp_compile.diagnostics.measure import allocated
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig
from mfsdp_compile.passes.guests import loss_chunks
from mfsdp_compile.passes.guests.solver.hardware import hardware
from mfsdp_compile.passes.guests.solver.simulate import OptimizerCost, resting_memory
from mfsdp_compile.planning import forecast
from mfsdp_compile.planning.trace_model import trace
from mfsdp_compile.planning.workloads import Workload
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.schedule.phase import Phase

BF16 = torch.bfloat16
WORDS, LENGTH = 97, 6


class Words(nn.Module):
    """Predicts words. Batches have integral values."""

    block = zoo.Block

    def __init__(self, bias: bool = False, tied: bool = False, adapter: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.adapter = nn.Sequential(nn.Linear(16, 1), nn.Linear(1, 90), nn.Linear(90, 16)) if adapter else None
        self.blocks = nn.ModuleList(zoo.Block() for _ in range(2))
        self.head = nn.Linear(16, WORDS, bias=bias)
        if tied:
            self.head.weight = self.embedding.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.adapter is not None:
            x = x + self.adapter(x)
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, x: Tensor, targets: Tensor) -> Any:
        return F.cross_entropy(self.head(x).flatten(0, -2).float(), targets.flatten())

    def forward(self, batch: Tensor) -> Any:
        tokens = batch.abs().mul(40).long() % WORDS
        targets = tokens.roll(-1, 1)
        return self.loss(self.hidden(tokens), torch.where(targets % 5 == 0, -100, targets))


class Auxiliary(Words):
    """A second term, of which the gradient of the loss is the gradient too; and a loss that is scaled."""

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return super().loss(x, targets) + 0.3 * x.pow(2).mean()


class Cast(Words):
    """Cast and capped before it is flattened, as in transformers."""

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(x).float() if compat.TORCH_VERSION < (2, 12) else 30 * torch.tanh(self.head(x).float() / 30)
        return F.cross_entropy(logits.view(-1, WORDS), targets.flatten())


class Broken(Words):
    """Two graphs, and the loss is in the second one."""

    def hidden(self, tokens: Tensor) -> Tensor:
        x = super().hidden(tokens)
        torch._dynamo.graph_break()
        return x


class Halved(Words):
    def forward(self, batch: Tensor) -> Tensor:
        return super().forward(batch) * 0.5


MODELS: dict[str, Callable[[], nn.Module]] = {
    "auxiliary loss, bias": functools.partial(Auxiliary, bias=True),
    "plain": Words,
    "tied": functools.partial(Words, tied=True),
    "adapter": functools.partial(Words, adapter=True),
    "cast": Cast,
    "graph break": Broken,
    "halved": Halved,
}


def told(model: Any) -> list[str]:
    reports = model.sharded.compiled_graphs[-1].reports[Phase.JOINT]
    return [line for report in reports if report.name == "loss_chunks" for line in report.lines]


def check(
    name: str, *, microbatches: int = 1, chunks: int = 4, tolerance: float = 1e-5, steps: int = 2, **options: Any
) -> Any:
    """Train with the loss in chunks, and in one process with it as a whole."""
    data = parity.batches(steps, (4 * microbatches, LENGTH))
    alone = parity.train_alone(MODELS[name], data, parity.sgd, microbatches)
    run = parity.train_sharded(
        *(MODELS[name], INDUCTOR, data, parity.sgd, microbatches), loss_chunks=chunks, report=True, **options
    )
    parity.assert_close(run, alone, tolerance, params=tolerance < 1e-3)
    (line,) = told(run.model)
    rows = -(-4 * LENGTH // chunks)
    assert line.startswith(f"the loss is computed in {-(-4 * LENGTH // rows)} chunks of {rows} tokens"), line
    return run


class Enough(BaseException):
    """What is to be known of a graph is known."""


@pytest.mark.parametrize("name", [name for name in MODELS if name != "graph break"])
def test_a_joint_graph_with_chunks_computes_the_same(name: str) -> None:
    """Loss and gradients, for a gradient of the loss other than 1, as the graph's operators compute them."""

    def compare(joint: fx.GraphModule, *_: Any, **__: Any) -> Any:
        whole = compat.copy_graph_module(joint)
        values = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
        chunked, _ = loss_chunks.apply(joint, 5)
        calls = chunked.graph.find_nodes(op="call_function", target=compat.invoke_subgraph)
        assert len(calls) == 5
        torch.manual_seed(1)
        with unset_fake_temporarily():
            given = [torch.randn([*value.shape], dtype=value.dtype) for value in values]
            for mine, its in zip(chunked(*given), whole(*given), strict=True):
                if its is not None:
                    parity.close(name, mine, its)
        raise Enough

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        return compat.trace_with_aot(gm, inputs, compare, decomposed=True)

    torch.compiler.reset()
    with pytest.raises(Enough):
        torch.compile(parity.build(MODELS[name]), backend=backend)(torch.randn(4, LENGTH))


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_models(name: str) -> None:
    check(name, **{"microbatches": 2, "verify": "each"} if "auxiliary" in name else {})


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        *({"sharding": {"zero_dp_strategy": strategy}} for strategy in (0, 1, 2)),
        {"units": [zoo.Block, nn.Linear]},
        {"chunks": 5},
        {"chunks": 23},  # 24 tokens: 12 chunks
        {"memory_budget": "1GiB"},
        {"regions": True},
        {"activation_memory_budget": 0.0},
        {"tolerance": 3e-2, "precision": MixedPrecisionPolicy(param_dtype=BF16)},
    ],
    ids=str,
)
@on_ranks(2)
def test_with_other_options(options: dict[str, Any]) -> None:
    run = check("plain", **options)
    if "regions" in options:
        assert run.model.sharded.compiled_graphs[-1].regions


@pytest.mark.long
@on_ranks(4)
def test_in_a_hybrid_of_two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    group = mesh["outer", "inner"]._flatten().get_group()
    dimensions = {"device_mesh": mesh, "dp_outer_dim": "outer", "dp_shard_dim": "inner", "hybrid_fsdp_group": group}
    check("plain", sharding=dimensions)


@pytest.mark.long
@on_ranks(2)
def test_steps_in_backward() -> None:
    data = parity.batches(2, (4, LENGTH))
    losses = []
    for options in ({}, {"loss_chunks": 4}):
        torch.compiler.reset()
        model = fully_shard_model(parity.build(Words), fsdp_unit_modules=[zoo.Block])
        step = compile_step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), backend="mfsdp", options=options)
        losses.append([step(batch[torch.distributed.get_rank()]).item() for batch in (*data, *data)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@on_ranks(2)
def test_a_model_of_transformers(dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, **sizes)

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return model(input_ids=tokens, labels=tokens, use_cache=False).loss

    tokens = torch.randint(0, WORDS, (2, 20), generator=torch.Generator().manual_seed(torch.distributed.get_rank()))
    gradients = []
    for options in ({}, {"loss_chunks": 4, "report": True}):
        torch.compiler.reset()
        build = functools.partial(transformers.LlamaForCausalLM, config)
        model = fully_shard_model(parity.build(build).to(dtype), fsdp_unit_modules=[LlamaDecoderLayer])
        (torch.compile(loss, backend="mfsdp", options=options)(model, tokens) * 0.5).backward()
        gradients.append({name: param.grad.full_tensor().float() for name, param in model.named_parameters()})
    assert told(model)
    for name, whole in gradients[0].items():
        parity.close(name, gradients[1][name], whole, 1e-5 if dtype == torch.float32 else 3e-2)


# -- what is refused --------------------------------------------------------------------------------------------------


class PerToken(Words):
    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, -2), targets.flatten(), reduction="none")


class WithLogits(Words):
    def loss(self, x: Tensor, targets: Tensor) -> Any:
        logits = self.head(x).flatten(0, -2)
        return F.cross_entropy(logits, targets.flatten()), logits


class OnlyLogits(Words):
    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.head(x)


class Argmax(Words):
    def loss(self, x: Tensor, targets: Tensor) -> Any:
        logits = self.head(x).flatten(0, -2)
        return F.cross_entropy(logits, targets.flatten()), logits.argmax(-1)


class Twice(Words):
    def loss(self, x: Tensor, targets: Tensor) -> Any:
        loss = super().loss(x, targets)
        return loss, loss * 2


class Nonlinear(Words):
    def loss(self, x: Tensor, targets: Tensor) -> Any:
        return super().loss(x, targets).exp()


class Squares(Words):
    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.head(x).flatten(0, -2).pow(2).mean()


class NoProduct(Words):
    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.embedding.weight.pow(2).mean()

    def hidden(self, tokens: Tensor) -> Any:
        return None


ELEMENTS = "the loss, or another output that depends on the logits, has several elements"
REFUSED: list[tuple[Callable[[], nn.Module], dict[str, Any], str]] = [
    (PerToken, {}, ELEMENTS),
    (WithLogits, {}, ELEMENTS),
    (OnlyLogits, {}, ELEMENTS),
    (Argmax, {}, "Missing propagation rule for target aten.argmax.default"),
    (Twice, {}, "Propagate rule for aten.add.Tensor fail"),
    (Nonlinear, {}, "Propagate rule for aten.div.Tensor fail"),
    (Squares, {}, "Missing propagation rule for target aten.pow.Tensor_Scalar"),
    (NoProduct, {}, "no matrix product in front of the loss"),
    (Words, {"dtype": torch.float16}, "it is in float16"),
    (Words, {"dynamic": True}, "symbolic sizes (dynamic shapes)"),
    (Words, {"rows": 1, "length": 1}, "the product with the largest result has 1 rows"),
    (Words, {"rows": 8, "length": 2}, "as many elements as the logits, [16, 97]"),
]


@pytest.mark.long_unless("*several elements", "*as many elements*")
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize(("factory", "how", "reason"), REFUSED, ids=lambda each: getattr(each, "__name__", None))
def test_a_loss_that_cannot_be_in_chunks_is_refused(
    factory: Callable[[], nn.Module], how: dict[str, Any], reason: str
) -> None:
    model = fully_shard_model(factory().to(how.get("dtype")), fsdp_unit_modules=[zoo.Block])
    call = torch.compile(model, backend="mfsdp", options={"loss_chunks": 4}, dynamic=how.get("dynamic"))
    with pytest.raises(compat.BackendCompilerFailed) as caught:
        call(torch.randn(how.get("rows", 4), how.get("length", LENGTH)))
    assert "options['loss_chunks'] is 4, but the loss cannot be computed in chunks: " in str(caught.value)
    assert reason in str(caught.value)


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_chunks": 1}, "at least 2, or None, got 1"),
        ({"loss_chunks": True}, "at least 2, or None, got True"),
        ({"loss_chunks": "auto"}, "at least 2, or None, got 'auto'"),
        ({"loss_chunks": 2, "inner": "aot_eager"}, "needs Inductor, not the inner compiler 'aot_eager'"),
        ({"loss_chunks": 2, "inductor": {"auto_chunker.num_chunk": 3}}, "sets too: ['auto_chunker.num_chunk']"),
        ({"loss_chunks": 2, "inductor": {"joint_custom_pre_pass": None}}, "sets too: ['joint_custom_pre_pass']"),
    ],
)
def test_values_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    model = fully_shard_model(Words(), fsdp_unit_modules=[zoo.Block])
    with pytest.raises(compat.BackendCompilerFailed) as caught:
        torch.compile(model, backend="mfsdp", options=options)(torch.randn(4, LENGTH))
    assert message in str(caught.value)


# -- what is told, and what is predicted ------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.usefixtures("fake_world")
def test_graphs_without_a_loss_stay_as_they_are() -> None:
    """Evaluation has no gradients, and a block that is compiled alone has no loss."""
    model = fully_shard_model(parity.build(Words), fsdp_unit_modules=[zoo.Block])
    whole = torch.compile(model, backend="mfsdp", options={"loss_chunks": 4, "report": True})
    with torch.no_grad():
        whole(torch.randn(4, LENGTH))
    assert model.sharded.compiled_graphs
    assert not [r for rs in model.sharded.compiled_graphs[-1].reports.values() for r in rs if r.name == "loss_chunks"]
    torch.compiler.reset()
    model = fully_shard_model(parity.build(Words), fsdp_unit_modules=[zoo.Block])
    for block in model.module.blocks:
        block.compile(backend="mfsdp", options={"loss_chunks": 4, "report": True})
    model(torch.randn(4, LENGTH)).backward()
    (line,) = told(model)
    assert line.startswith("no loss in chunks here: ")


def llama(chunks: int | None) -> Workload:
    def inputs(batch: int, length: int) -> Any:
        return torch.randint(0, CONFIG.vocabulary, (2, batch, length)).unbind(), {}

    sizes = {"batch": 2, "length": 128, "dtype": torch.float32}
    return Workload("llama", lambda: Llama(CONFIG), [Block], inputs, loss_chunks=chunks, **sizes)


CONFIG = LlamaConfig(vocabulary=4096, width=64, layers=2, heads=2, kv_heads=2, hidden=96)


@pytest.mark.slow
def test_plans_are_of_chunks() -> None:
    """No segment of the step holds the logits: the largest is that of a chunk, with the head's gradient twice."""
    rises = []
    for chunks in (None, 8):
        traced = trace(llama(chunks), hardware("cpu"), fused=True)
        rises.append(max(segment.rise for outline in traced.outlines.values() for segment in outline.segments))
    with pytest.raises(ValueError, match="llama has loss_chunks=8, which only plans for Inductor can have"):
        trace(llama(8), hardware("cpu"), fused=False)
    logits, head = 256 * CONFIG.vocabulary * 4, CONFIG.width * CONFIG.vocabulary * 4
    assert rises[0] > logits
    assert rises[1] < logits / 2 + 2 * head


@pytest.mark.long
@pytest.mark.usefixtures("fake_world")
def test_memory_is_less_and_as_predicted() -> None:
    measured = {}
    for chunks in (None, 8):
        torch.compiler.reset()
        model = fully_shard_model(Llama(CONFIG), fsdp_unit_modules=[Block])
        options = {"loss_chunks": chunks, "report": True}
        call = torch.compile(model, backend="mfsdp", options=options)
        tokens = torch.randint(0, CONFIG.vocabulary, (2, 2, 128))

        def step() -> None:
            call(*tokens).backward()
            model.zero_grad()

        for _ in range(2):
            step()
        record = model.sharded.compiled_graphs[-1]
        resting = resting_memory(record.context.buckets, OptimizerCost(), record.context.other_bytes)
        measured[chunks] = allocated(step)[0]
        if chunks:
            predicted = forecast.predicted(model).peak_bytes - sum(resting.values())
            assert predicted == pytest.approx(measured[chunks], rel=0.06)
    assert measured[8] < measured[None] - 256 * CONFIG.vocabulary * 4 / 2


@pytest.mark.long
@pytest.mark.usefixtures("fake_world")
def test_explain_says_so() -> None:
    model = fully_shard_model(Words(), fsdp_unit_modules=[zoo.Block])
    call = torch.compile(model, backend="mfsdp", options={"loss_chunks": 4, "report": True})
    text = str(explain(call, torch.randn(4, LENGTH)))
    assert "the loss is computed in 4 chunks of 6 tokens, with 2,328 B of logits each" in text
    assert "run     loss  loss_chunk_0" in text
