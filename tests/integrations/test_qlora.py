"""Frozen weights of 4 bits, of bitsandbytes and torchao: the bits of one process, a part of the bytes on each rank."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import packed_models
import parity
import pytest
import torch
import torch.distributed as dist
from documents import ROOT
from packed_models import WIDTH, Block, build
from parity import AOT_EAGER, EAGER, INDUCTOR
from pool import on_ranks, shared_folder
from torch import Tensor, fx, nn

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import Checkpoints, full_state_dict
from mfsdp_compile.diagnostics.doctor import mesh_arguments
from mfsdp_compile.passes.context import Context
from mfsdp_compile.runtime.schedule.phase import Phase

pytestmark = pytest.mark.skipif(not packed_models.IS_THERE, reason="needs bitsandbytes and torchao")

BF16 = torch.bfloat16
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("bnb", {"quant_storage": BF16}),
    ("bnb", {"compress_statistics": False, "quant_type": "fp4", "compute_dtype": None}),
    ("nf4", {}),
]


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def alone(model: nn.Module, steps: int = 2) -> list[Tensor]:
    """Return this rank's losses, and the adapters, after training with the batches of all ranks in one process."""
    optimizer, losses, ranks = parity.sgd(trained(model)), [], dist.get_world_size()
    for step in range(steps):
        found = [model(batch(step, rank)).float().square().mean() for rank in range(ranks)]
        for loss in found:
            loss.backward()
        for param in trained(model):
            assert param.grad is not None
            param.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found[dist.get_rank()].detach())
    return [*losses, *trained(model)]


def sharded(model: nn.Module, mode: str, options: Any = None, **arguments: Any) -> tuple[Any, Callable[..., Tensor]]:
    model = fully_shard_model(model, fsdp_unit_modules=[Block], **arguments)
    chosen = {"inner": mode, "verify": "each", **(options or {})}
    return model, model if mode == EAGER else torch.compile(model, backend="mfsdp", fullgraph=True, options=chosen)


def train(model: Any, call: Callable[..., Tensor], steps: int = 2) -> list[Tensor]:
    optimizer, losses = fully_shard_optimizer(parity.sgd(trained(model))), []
    for step in range(steps):
        loss = call(batch(step, dist.get_rank())).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(param.full_tensor() for param in trained(model))]  # type: ignore[attr-defined]


def assert_equal(mine: list[Tensor], its: list[Tensor]) -> None:
    assert len(mine) == len(its)
    for a, b in zip(mine, its, strict=True):
        assert torch.equal(a, b)


@on_ranks(2)
def test_numbers_and_memory() -> None:
    """Forward, gradients and memory, whatever the strategy; shards have no copy in another dtype."""
    for kind, settings in KINDS:
        whole = packed_models.weight_bytes(build(kind, **settings))
        expected = alone(build(kind, **settings))
        for strategy in ("optim_grads_params", "optim_grads", "no_shard"):
            model, call = sharded(build(kind, **settings), EAGER, zero_dp_strategy=strategy)
            assert_equal(train(model, call), expected)
            if strategy != "optim_grads_params":
                continue
            held = [bucket.flat for bucket in model.sharded.buckets if not bucket.flat.is_floating_point()]
            assert {flat.dtype for flat in held} == {torch.uint8}
            assert whole / 2 <= sum(flat.numel() for flat in held) <= 1.1 * whole / 2
            assert not any(vars(module).get("quant_state") for module in model.modules())
            buffers = sum(buffer.numel() for buffer in model.buffers())
            assert buffers <= 4 * (16 + 256 + 1)  # of each of four weights


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        {"fsdp_double_buffer": True},
        {"disable_bucketing": True},
        {"enable_fine_grained_param_gather": True},
        {"mixed_precision_policy": MixedPrecisionPolicy(main_params_dtype=torch.float64)},
    ],
    ids=lambda given: next(iter(given)),
)
@on_ranks(2)
def test_options(arguments: dict[str, Any]) -> None:
    for kind, settings in KINDS:
        model, call = sharded(build(kind, **settings), EAGER, **arguments)
        losses = train(model, call)[:2]
        assert_equal(losses, alone(build(kind, **settings))[:2])


@pytest.mark.long
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(4)
def test_replicas(mode: str) -> None:
    for kind, settings in KINDS:
        found = []
        for strategy in ("optim_grads_params", "HSDP optim_grads_params"):
            arguments = mesh_arguments(strategy)
            found.append(train(*sharded(build(kind, **settings), mode, **arguments))[:2])
        assert_equal(*found)


@pytest.mark.long_if("*-inductor-*")
@pytest.mark.parametrize("number", range(len(KINDS)), ids=["bnb", "bnb fp4", "nf4"])
@pytest.mark.parametrize("mode", [AOT_EAGER, INDUCTOR])
@on_ranks(2)
def test_compiled(mode: str, number: int) -> None:
    """One graph; backward gathers again, and no dequantized weight is saved for it."""
    kind, settings = KINDS[number]
    saved: list[tuple[int, ...]] = []

    def look(graph: fx.Graph, context: Context, phase: Phase) -> None:
        if phase is Phase.FORWARD:
            nodes: Any = graph.output_node().args[0]
            saved.extend(tuple(node.meta["val"].shape) for node in nodes if isinstance(node, fx.Node))

    mine = train(*sharded(build(kind, **settings), mode, {"passes": [look]}))
    expected = alone(build(kind, **settings))
    if mode == AOT_EAGER:
        assert_equal(mine, expected)
    else:
        for a, b in zip(mine, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    shapes = {(packed_models.HIDDEN, WIDTH), (WIDTH, packed_models.HIDDEN)}
    assert saved
    assert not shapes & set(saved)


@on_ranks(2)
def test_no_weight_is_held_from_forward_to_backward() -> None:
    for kind, settings in KINDS:
        model, call = sharded(build(kind, **settings), EAGER)
        train(model, call, steps=1)
        parameters, held = model.sharded.eager.parameters, []
        read = parameters.read

        def record(bucket: Any, index: int, read: Any = read, held: Any = held) -> Any:
            param = read(bucket, index)
            if bucket.plan.unit == "0" and bucket.flat.dtype == torch.uint8:
                held.append(weakref.ref(param.untyped_storage()))
            return param

        with mock.patch.object(parameters, "read", record):
            loss = call(batch(0, 0)).square().mean()
        assert len(held) >= 4
        assert not any(storage() for storage in held)
        loss.backward()


@on_ranks(2)
def test_checkpoints_have_the_bytes() -> None:
    for kind, settings in KINDS:
        model, call = sharded(build(kind, **settings), EAGER)
        expected, folder = call(batch(0, 0)).detach(), shared_folder()
        Checkpoints(folder).save(1, model)
        other, its_call = sharded(build(kind, seed=1, **settings), EAGER)
        assert not torch.equal(its_call(batch(0, 0)).detach(), expected)
        Checkpoints(folder).load(other)
        assert torch.equal(its_call(batch(0, 0)).detach(), expected), (kind, settings)
        mine, its = full_state_dict(model), full_state_dict(other)
        assert mine.keys() == its.keys()
        assert all(torch.equal(mine[name], its[name]) for name in mine)


@pytest.mark.usefixtures("fake_world")
def test_refusals() -> None:
    """By name, and the model is what it was."""
    bnb = packed_models.bitsandbytes()

    def refused(model: nn.Module, error: str) -> None:
        before = [*model.named_parameters(), *model.named_buffers()], [vars(m).keys() for m in model.modules()]
        with pytest.raises(NotImplementedError, match=error):
            fully_shard_model(model, fsdp_unit_modules=[Block])
        after = [*model.named_parameters(), *model.named_buffers()], [vars(m).keys() for m in model.modules()]
        assert [(n, id(p)) for n, p in before[0]] == [(n, id(p)) for n, p in after[0]]
        assert before[1] == after[1]
        model(torch.ones(1, WIDTH))

    for kind, name in (("bnb", "Params4bit"), ("nf4", "NF4Tensor")):
        tied = build(kind)
        tied[1].first.base.weight = tied[0].first.base.weight
        refused(tied, rf"'1.first.base.weight' is also '0.first.base.weight': a {name} that is tied")
        unfrozen = build(kind, **({"quant_storage": BF16} if kind == "bnb" else {}))
        unfrozen[0].second.base.weight.requires_grad_()
        refused(unfrozen, rf"'0.second.base.weight' is a {name} that requires grad")
        clashing = build(kind)
        clashing[1].second.base.register_buffer("weight_nf4", torch.zeros(1))
        refused(clashing, "has an attribute 'weight_nf4', which is the name that a part of its weight of 4 bits")
    packed = build("bnb")
    packed[0].first.base.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(NotImplementedError, match=r"'0.first.base.weight' was packed for inference on this CPU"):
        fully_shard_model(packed)
    raw = nn.Sequential(bnb.nn.Linear4bit(WIDTH, WIDTH))
    with pytest.raises(NotImplementedError, match=r"'0.weight' is a Params4bit that is not quantized yet"):
        fully_shard_model(raw)
    of_8_bits = nn.Sequential(bnb.nn.Linear8bitLt(WIDTH, WIDTH, has_fp16_weights=False).to("cpu"))
    with pytest.raises(NotImplementedError, match=r"'0.weight' is a Int8Params, .*pass them in ignored_params"):
        fully_shard_model(of_8_bits)
    model = fully_shard_model(build("bnb"), fsdp_unit_modules=[Block])
    with pytest.raises(RuntimeError, match="floating point dtype can require gradients"):
        model.requires_grad_(True)


@on_ranks(2)
def test_code_that_reads_weights() -> None:
    """In eager mode, reading a weight gives what the library has made, also to layers with a forward of their own."""
    bnb = packed_models.bitsandbytes()
    torch.manual_seed(0)
    model = nn.Sequential(bnb.nn.Embedding4bit(64, WIDTH).to("cpu"), nn.Linear(WIDTH, 2))
    x = torch.arange(8)
    expected = model(x)
    model = fully_shard_model(model)
    assert torch.equal(model(x), expected)
    assert type(model.module[0].weight).__name__ == "RowShardedTensor"
    call = torch.compile(model, backend="mfsdp", options={"inner": AOT_EAGER})
    assert torch.equal(call(x), expected)
    for kind in ("bnb", "nf4"):
        alone, model = build(kind), fully_shard_model(build(kind), fsdp_unit_modules=[Block])
        original, layer = alone[1].first.base, model.module[1].first.base
        values = _dequantized(original.weight)
        with model.summon_full_params():
            assert type(layer.weight).__name__ == type(original.weight).__name__
            assert torch.equal(_dequantized(layer.weight), values)
            assert model.module.state_dict().keys() == alone.state_dict().keys()
            torch.testing.assert_close(model.module(batch(0, 0)), alone(batch(0, 0)))
        names = [name for name, _ in model.named_parameters()]
        with (
            parity.raises_everywhere(ValueError, "Parameter '1.first.base.weight', a weight of 4 bits, was replaced"),
            model.summon_full_params(),
        ):
            layer.weight = original.weight
        assert names == [name for name, _ in model.named_parameters()]
        torch.testing.assert_close(model(batch(0, 0)), alone(batch(0, 0)))
        weight = layer.weight
        for compute in (lambda: weight.float(), lambda: weight**2, lambda: weight[1:].sum(), lambda: weight + x):
            with pytest.raises(RuntimeError, match=r"computes with '1\.first\.base\.weight', a part of a"):
                compute()
        assert torch.equal(weight.clone(), weight.detach())


def _dequantized(weight: Any) -> Tensor:
    if hasattr(weight, "get_original_weight"):
        return weight.get_original_weight()  # type: ignore[no-any-return]
    bnb = packed_models.bitsandbytes()
    return bnb.functional.dequantize_4bit(weight.data, weight.quant_state)  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.parametrize("library", ["bitsandbytes", "torchao"])
@on_ranks(2)
def test_the_programs_of_the_page(library: str) -> None:
    pytest.importorskip("peft")
    packed_models.bitsandbytes()
    packed_models.linear("nf4", WIDTH, WIDTH)
    page = (ROOT / "docs" / "guides" / "qlora.md").read_text()
    program = page.partition(f"## With {library}\n")[2].partition("```python\n")[2].partition("```")[0]
    program = program.replace('backend="mfsdp"', 'backend="mfsdp", options={"inner": "aot_eager"}')
    variables: dict[str, Any] = {}
    before, folder = os.getcwd(), shared_folder()
    os.chdir(folder)
    try:
        with mock.patch.object(dist, "init_process_group"):
            exec(compile(program, "docs/guides/qlora.md", "exec"), variables)
    finally:
        os.chdir(before)
    assert torch.uint8 in {param.dtype for param in variables["model"].parameters()}
    assert variables["loss"].isfinite()


class Remembered(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def pretrained(folder: Path) -> Any:
    """Load a small Llama in 4 bits, with LoRA."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    settings = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    config = transformers.BitsAndBytesConfig(**settings, bnb_4bit_quant_storage=BF16, bnb_4bit_compute_dtype=BF16)
    model = transformers.LlamaForCausalLM.from_pretrained(folder, quantization_config=config, dtype=BF16)
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0, init_lora_weights=False)
    return peft.get_peft_model(peft.prepare_model_for_kbit_training(model), lora)


@pytest.mark.long
@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@on_ranks(2)
def test_trainer(compiles: bool) -> None:
    """``BitsAndBytesConfig(load_in_4bit=True)`` with peft: losses of a plain loop, and a folder of adapters."""
    pytest.importorskip("accelerate")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    packed_models.bitsandbytes()
    from test_trainers import BITWISE, arguments, trainers

    from mfsdp_compile.integrations.transformers import MfsdpTrainer, ShardingArguments

    folder = shared_folder()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64}
    if dist.get_rank() == 0:
        small = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
        transformers.LlamaForCausalLM(small).save_pretrained(folder / "base")
    dist.barrier()
    plain = pretrained(folder / "base").train()
    expected = plain(**{k: v[None] for k, v in Remembered()[0].items()}).loss.item()
    model = pretrained(folder / "base")
    with trainers():
        given = arguments(folder / "out", max_steps=2, bf16=True, gradient_checkpointing=False)
        sharding = ShardingArguments(compile=compiles, compile_options=BITWISE)
        trainer = MfsdpTrainer(model, given, train_dataset=Remembered(), sharding=sharding)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        trainer.save_model(str(folder / "adapters"))
        dist.barrier()
    assert len(losses) == 2
    assert abs(losses[0] - expected) < 0.2
    whole = full_state_dict(trainer.sharded)
    if dist.get_rank() == 0:
        saved = safetensors.load_file(folder / "adapters" / "adapter_model.safetensors")
        adapters = peft.get_peft_model_state_dict(model, state_dict=whole)
        assert saved.keys() == adapters.keys()
        assert len(saved) == 8
        assert all(torch.equal(adapters[name].to(value.dtype), value) for name, value in saved.items())
