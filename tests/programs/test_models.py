"""Models that people train, unmodified: Hugging Face's Llama and GPT-2, and the package's own Llama."""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from parity import AOT_EAGER, INDUCTOR
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile import fully_shard_model
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig
from mfsdp_compile.runtime.schedule.phase import Phase


def hf_llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


def hf_gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=256,
            n_embd=64,
            n_layer=3,
            n_head=4,
            n_positions=64,
            use_cache=False,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).eval()  # no dropout, for comparison with one process


def own_llama() -> nn.Module:
    return Llama(LlamaConfig(width=64, layers=3, heads=4, kv_heads=2, hidden=176))


class Mixer(nn.Module):
    """A model that Inductor compiles in seconds."""

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.up(x).relu())

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.layers = nn.ModuleList(self.Layer(width) for _ in range(layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + x.mean(1, keepdim=True)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


MODELS: dict[str, Callable[[], nn.Module]] = {"llama": hf_llama, "gpt2": hf_gpt2, "own": own_llama}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return (MODELS | {"mixer": Mixer})[name]()


def loss_of(call: Any, tokens: Tensor) -> Tensor:
    out = call(tokens[:, :-1])
    logits = out if isinstance(out, Tensor) else out.logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def largest_difference(model: nn.Module, alone: nn.Module) -> float:
    """Return the largest difference of any gradient, relative to the largest gradient."""
    expected = dict(alone.named_parameters())
    scale = max(p.grad.abs().max().item() for p in expected.values())
    return max(
        (p.grad.full_tensor() - expected[name].grad).abs().max().item() / scale for name, p in model.named_parameters()
    )


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2, 4)
def test_training_is_that_of_one_process(name: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    eager = fully_shard_model(make(name), fsdp_unit_modules="auto")
    compiled = fully_shard_model(make(name), fsdp_unit_modules="auto")
    alone = make(name)
    call = torch.compile(compiled, backend="mfsdp", fullgraph=True, options={"inner": AOT_EAGER})
    models = [eager, compiled, alone]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in models]
    for step in range(5):
        tokens = torch.randint(0, 256, (world_size, 2, 17), generator=torch.Generator().manual_seed(step))
        losses = loss_of(eager, tokens[rank]), loss_of(call, tokens[rank])
        for loss in losses:
            loss.backward()
        each = [loss_of(alone, part) for part in tokens]
        (sum(each) / world_size).backward()
        assert torch.equal(losses[0], losses[1])
        assert abs(losses[0] - each[rank]) <= 1e-5 * each[rank]
        for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
            assert torch.equal(a.grad.to_local(), b.grad.to_local())
        assert largest_difference(eager.module, alone) <= 1e-5
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local())
    (record,) = compiled.sharded.compiled_graphs  # one graph
    assert_one_collective_per_bucket(record, len(compiled.sharded.buckets))


@pytest.mark.long
@pytest.mark.parametrize("name", ["mixer", "llama"])
@on_ranks(2)
def test_inductor_training_is_that_of_one_process(name: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, alone = fully_shard_model(make(name), fsdp_unit_modules="auto"), make(name)
    call = torch.compile(model, backend="mfsdp", fullgraph=True, options={"inner": INDUCTOR})
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, alone)]
    for step in range(3):
        tokens = torch.randint(0, 256, (world_size, 2, 17), generator=torch.Generator().manual_seed(step))
        loss = loss_of(call, tokens[rank])
        loss.backward()
        each = [loss_of(alone, part) for part in tokens]
        (sum(each) / world_size).backward()
        assert abs(loss - each[rank]) <= 1e-5 * each[rank]
        assert largest_difference(model.module, alone) <= 1e-5
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    (record,) = model.sharded.compiled_graphs
    assert_one_collective_per_bucket(record, len(model.sharded.buckets))


def assert_one_collective_per_bucket(record: Any, buckets: int) -> None:
    forward, backward = (
        Counter(line.split()[0] for line in record.schedules[phase]) for phase in (Phase.FORWARD, Phase.BACKWARD)
    )
    assert forward["gather"] == forward["wait"] == buckets
    assert forward["reduce"] == 0
    assert backward["gather"] == backward["wait"] <= buckets - 1  # the unit that forward used last is still gathered
    assert backward["reduce"] == backward["await"] == buckets


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("name", MODELS)
def test_generated_code_computes_gradients_in_place(name: str) -> None:
    """Every matmul that computes a weight's gradient writes it into the reduced bucket, at its offset."""
    from torch._inductor.utils import run_and_get_code

    model = fully_shard_model(make(name), fsdp_unit_modules="auto")
    call = torch.compile(model, backend="mfsdp", fullgraph=True)
    tokens = torch.randint(0, 256, (2, 17))
    with fresh_compilation():
        _, (forward, backward) = run_and_get_code(lambda: loss_of(call, tokens).backward())

    buckets = model.sharded.buckets
    gather, reduction = "all_gather_into_tensor.default(", "reduce_scatter_tensor.default("
    assert forward.count(gather) == len(buckets)
    assert forward.count(reduction) == 0
    assert backward.count(gather) <= len(buckets) - 1
    assert backward.count(reduction) == len(buckets)

    # part = reinterpret_tensor(bucket, (rows, columns), (columns, 1), offset)  # alias
    # extern_kernels.mm(a, b, out=part)
    alias = r"(\w+) = reinterpret_tensor\((\w+), \((\d+), (\d+)\), \((\d+), 1\), (\d+)\)  # alias"
    parts = {
        part: (bucket, (int(rows), int(columns), int(offset)))
        for part, bucket, rows, columns, stride, offset in re.findall(alias, backward)
        if columns == stride
    }
    written: dict[str, set[tuple[int, int, int]]] = {}
    for out in re.findall(r"extern_kernels\.mm\(.*out=(\w+)\)", backward):
        if out in parts:
            bucket, place = parts[out]
            written.setdefault(bucket, set()).add(place)
    reduced = re.findall(r"reduce_scatter_tensor\.default\((\w+),", backward)
    for bucket in buckets:
        matrices = {
            (*slot.shape, slot.offset)
            for slot in bucket.plan.layout.slots
            if len(slot.shape) == 2 and not is_embedding(slot.name)
        }
        if matrices:
            places = [place for name, place in written.items() if name in reduced or name.startswith("region_")]
            assert any(matrices <= place for place in places), (bucket.plan.name, matrices, written)
    # Gathered weights are read in place.
    assert re.search(r"extern_kernels\.mm\(.*reinterpret_tensor\(\w+, \(\d+, \d+\), \(1, \d+\), \d+\)", forward)


class Routed(nn.Module):
    """Layers with an auxiliary loss: the end of the model reads a value of each."""

    class Layer(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
            self.gate = nn.Linear(width, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            inner = self.norm(x)
            logits = self.gate(inner)
            return x + self.down(self.up(inner).relu()) * logits.softmax(-1).amax(-1, keepdim=True), logits

    def __init__(self, layers: int = 3, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for layer in self.layers:
            x, logits = layer(x)
            found.append(logits)
        return x.pow(2).mean() + torch.cat(found).softmax(-1).mean(0).pow(2).sum()


class NotRunError(Exception):
    """Generated code was to be run."""


def generated(step: Callable[[], Any]) -> list[str]:
    """Return the code that Inductor generates for forward and backward, without building its kernels."""
    from torch._functorch import config
    from torch._inductor.graph import GraphLowering

    class Module:
        @staticmethod
        def call(*_: Any) -> None:
            raise NotRunError

    def keep(lowering: Any) -> type[Module]:
        codes.append(lowering.codegen()[0].value)
        return Module

    codes: list[str] = []
    with (
        config.patch(force_non_lazy_backward_lowering=True),
        mock.patch.object(GraphLowering, "compile_to_module", keep),
        pytest.raises(NotRunError),
    ):
        step()
    return codes


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("fake_world")
def test_generated_code_keeps_the_schedule() -> None:
    """Generated code keeps every start and every wait in the order of the graph.

    Inductor on its own keeps only the order of starts. Its fusion joins kernels of different layers, and each gather
    would be awaited where it starts.
    """
    model = fully_shard_model(Routed(), fsdp_unit_modules=[Routed.Layer])
    call = torch.compile(model, backend="mfsdp", fullgraph=True)
    with fresh_compilation():
        forward, backward = sorted(
            generated(lambda: call(torch.randn(8, 32))), key=lambda code: "reduce_scatter" in code
        )
    (record,) = model.sharded.compiled_graphs
    assert order_of_code(forward) == order_of_schedule(record.schedules[Phase.FORWARD])
    assert order_of_code(backward) == order_of_schedule(record.schedules[Phase.BACKWARD])


@pytest.mark.long
@on_ranks(2)
def test_generated_code_computes_the_gradients_of_one_process() -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    model = fully_shard_model(copy.deepcopy(alone), fsdp_unit_modules=[nn.Linear])
    batches = torch.randn(dist.get_world_size(), 6, 8, generator=torch.Generator().manual_seed(1))
    with fresh_compilation():
        torch.compile(model, backend="mfsdp", fullgraph=True)(batches[dist.get_rank()]).pow(2).mean().backward()
    (sum(alone(batch).pow(2).mean() for batch in batches) / len(batches)).backward()
    assert largest_difference(model.module, alone) <= 1e-5  # sums in another order


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("fake_world")
def test_inputs_that_inductor_lays_out_anew() -> None:
    """A model works if Inductor changes the layout of its input, as for a convolution on the CPU.

    This happens before the graph begins. Inductor freed the image before the kernel that reads it.
    """
    model = fully_shard_model(nn.Sequential(nn.Conv2d(3, 64, 8, 8), nn.Flatten(), nn.Linear(1024, 8)))
    call = torch.compile(model, backend="mfsdp", fullgraph=True)
    with fresh_compilation():
        call(torch.randn(2, 3, 32, 32)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def order_of_schedule(lines: Sequence[str]) -> list[tuple[str, int]]:
    """Return starts and waits, with the number of the start."""
    found: list[tuple[str, int]] = []
    started: dict[tuple[str, str], int] = {}
    for line in lines:
        word, _, name = line.strip().partition(" ")
        kind = {"gather": "gather", "wait": "gather", "reduce": "reduce", "await": "reduce"}.get(word)
        if kind is None:
            continue
        bucket = kind, name.split()[0]
        if word in ("gather", "reduce"):
            started[bucket] = len(started)
        found.append((word, started[bucket]))
    return found


def order_of_code(code: str) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    started: dict[str, tuple[str, int]] = {}
    words = {"all_gather_into_tensor": ("gather", "wait"), "reduce_scatter_tensor": ("reduce", "await")}
    collective = r"(?m)^ +(?:(\w+) = )?torch\.ops\._c10d_functional\.(\w+)\.default\((\w+)"
    for made, operator, read in re.findall(collective, code):
        if operator == "wait_tensor":
            found.append(started[read])
            continue
        start, wait = words[operator]
        started[made] = wait, len(started)
        found.append((start, started[made][1]))
    return found


def is_embedding(name: str) -> bool:
    return any(part in name for part in ("embed", "wte", "wpe"))


class fresh_compilation:
    """Disable compile caches, which would skip the code."""

    def __enter__(self) -> None:
        import torch._functorch.config as functorch_config
        import torch._inductor.config as inductor_config

        self._patches = [
            inductor_config.patch(fx_graph_cache=False),
            functorch_config.patch(enable_autograd_cache=False),
        ]
        for patch in self._patches:
            patch.__enter__()

    def __exit__(self, *exception: Any) -> None:
        for patch in self._patches:
            patch.__exit__(*exception)


@pytest.mark.usefixtures("fake_world")
def test_checkpointed_blocks_gather_once_for_recompute_and_gradient() -> None:
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Llama):
        def __init__(self) -> None:
            super().__init__(LlamaConfig(width=64, layers=3, heads=4, kv_heads=2, hidden=176))
            for layer in self.layers:
                forward = layer.forward
                layer.forward = lambda *args, forward=forward: checkpoint(forward, *args, use_reentrant=False)

    model = fully_shard_model(Checkpointed(), fsdp_unit_modules=[Block])
    call = torch.compile(model, backend="mfsdp", fullgraph=True, options={"inner": AOT_EAGER})
    loss_of(call, torch.randint(0, 256, (2, 17))).backward()
    (record,) = model.sharded.compiled_graphs
    assert_one_collective_per_bucket(record, len(model.sharded.buckets))
