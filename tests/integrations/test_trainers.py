"""Hugging Face's Trainer over sharded models: the numbers of a plain loop, and of one process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import raises_everywhere
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.data import Dataset

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

from mfsdp_compile import OptimizerOffloadPolicy
from mfsdp_compile.checkpoint import CheckpointError, full_state_dict
from mfsdp_compile.examples import hf_trainer, plain_loop
from mfsdp_compile.integrations.transformers import MfsdpTrainer, ShardingArguments, StepMetricsCallback

UNITS = ["LlamaDecoderLayer"]
BITWISE = {"inner": "aot_eager"}  # operator by operator, as the eager path and one process
EAGER = ShardingArguments(compile=False)
COMPILED = ShardingArguments(compile_options=BITWISE)

Batch = dict[str, Tensor]


@contextlib.contextmanager
def trainers() -> Iterator[None]:
    """Isolate accelerate's state, which is in classes and in the environment, from other tests in this process."""
    from accelerate.state import AcceleratorState, GradientState

    before = dict(os.environ)
    os.environ["LOCAL_RANK"] = str(dist.get_rank())  # as torchrun does
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(before)


def arguments(folder: Path, **given: Any) -> Any:
    given = {
        "per_device_train_batch_size": hf_trainer.BATCH,
        "learning_rate": 2e-3,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    } | given
    return transformers.TrainingArguments(str(folder), **given)


def train(folder: Path, data: Any, sharding: ShardingArguments = EAGER, model: Any = None, **given: Any) -> Any:
    """Return a trainer that has trained. ``resume``, ``callbacks`` and others are not part of Trainer's arguments."""
    resume = given.pop("resume", None)
    others = {
        name: given.pop(name) for name in ("callbacks", "eval_dataset", "optimizers", "data_collator") if name in given
    }
    trainer = MfsdpTrainer(
        model if model is not None else hf_trainer.build(),
        arguments(folder, **given),
        train_dataset=data,
        sharding=sharding,
        **others,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses_of(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights_of(trainer: Any) -> dict[str, Tensor]:
    return full_state_dict(trainer.sharded, rank=None)


def assert_bitwise(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert torch.equal(value, b[name]), name


def other_model() -> Any:
    """Return the same model with other values."""
    model = hf_trainer.build()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    return model


def small(build: Callable[[], Any] = hf_trainer.build) -> Any:
    """Return a model of one layer, which compiles faster."""
    model = build()
    del model.model.layers[1:]
    return model


# -- training ---------------------------------------------------------------------------------------------------------


def loss_of(call: nn.Module, batch: Batch) -> Tensor:
    """Return the loss as Trainer computes it: over the tokens of all ranks, of which gradients are the mean."""
    ranks = dist.get_world_size()
    loss: Tensor = call(**batch, num_items_in_batch=batch["labels"][:, 1:].numel() * ranks).loss
    return loss * ranks


@pytest.mark.long
@pytest.mark.parametrize("goes_on", [False, True])
@on_ranks(2)
def test_trainer_is_the_plain_loop(tmp_path: Path, goes_on: bool) -> None:
    """Trainer equals a plain loop bit for bit, operator by operator, and continues where it was.

    Both have the same model, batches, loss and optimizer.
    """
    steps, resumed = 8, str(tmp_path / "checkpoint-4")
    data = hf_trainer.windows(steps, dist.get_world_size())
    given: dict[str, Any] = {"max_steps": steps, "train_sampling_strategy": "sequential"}
    with trainers():
        trainer = train(tmp_path, data, COMPILED, small(), **given, save_strategy="steps", save_steps=4)
    plain = plain_loop.train(
        small(),
        UNITS,
        loss_of,
        plain_loop.batches(data, hf_trainer.BATCH),
        steps=steps,
        compile_options=BITWISE,
    )
    assert losses_of(trainer) == plain
    assert plain[-1] < plain[0] - 0.3
    if not goes_on:
        return
    with trainers():
        again = train(tmp_path / "again", data, COMPILED, small(other_model), **given, resume=resumed)
    assert losses_of(again)[4:] == plain[4:]
    assert_bitwise(weights_of(again), weights_of(trainer))


class StopsAt(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "stop"), [("optim_grads_params", 4), ("optim", 3)]
)  # within an epoch, and between epochs
@on_ranks(2)
def test_resumed_training_is_uninterrupted(tmp_path: Path, strategy: str, stop: int) -> None:
    """A new trainer with a new model takes the remaining steps, with shuffled data, dropout and accumulation."""
    data = hf_trainer.windows(3, 2 * dist.get_world_size())  # three steps per epoch
    sharding = ShardingArguments(compile=False, zero_dp_strategy=strategy)
    given: dict[str, Any] = {"max_steps": 8, "gradient_accumulation_steps": 2}

    def model(build: Any) -> Any:
        made = build()
        for layer in made.model.layers:
            layer.self_attn.attention_dropout = 0.1
        return made

    with trainers():
        whole = train(tmp_path / "whole", data, sharding, model(hf_trainer.build), **given)
    with trainers():
        train(tmp_path, data, sharding, model(hf_trainer.build), **given, callbacks=[StopsAt(stop)])
    with trainers():
        rest = train(tmp_path, data, sharding, model(other_model), **given, resume=True)
    assert len(losses_of(whole)) == 8
    assert losses_of(rest) == losses_of(whole)
    assert_bitwise(weights_of(rest), weights_of(whole))


@on_ranks(2)
def test_step_metrics(tmp_path: Path) -> None:
    """Logs of a resumed training have numbers of their own steps, of all microbatches, and not of the first."""
    rank, records = dist.get_rank(), []
    callback = StepMetricsCallback(flops_per_token=1e6, peak_flops=1e12, writers=[records.append])
    given: dict[str, Any] = {"max_steps": 5, "logging_steps": 2, "gradient_accumulation_steps": 2}
    with trainers():
        trainer = train(tmp_path, Uneven(12), EAGER, small(), **given, callbacks=[callback])
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [2, 4]
    assert all(entry["throughput(tps)"] > 0 and entry["mfu(%)"] > 0 for entry in logs)
    assert all(entry["tflops"] == pytest.approx(entry["throughput(tps)"] / 1e6) for entry in logs)
    assert [(record.step, record.steps) for record in records] == ([] if rank else [(1, 1), (2, 1), (4, 2)])
    tokens = 2 * 2 * hf_trainer.BATCH * 64
    assert [record.tokens for record in records] == ([] if rank else [tokens, tokens, 2 * tokens])

    plain = transformers.Trainer(
        small(), arguments(tmp_path, max_steps=1), train_dataset=Uneven(4), callbacks=[StepMetricsCallback()]
    )
    with trainers(), pytest.raises(TypeError, match="gets batches from MfsdpTrainer"):
        plain.train()


class Uneven(Dataset[Batch]):
    """Examples in which between two and all tokens count."""

    def __init__(self, count: int) -> None:
        self.windows = hf_trainer.windows(count, 1)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Batch:
        example = self.windows[index]
        counted = 2 + 62 * (index % 5) // 4
        return {"input_ids": example["input_ids"], "labels": example["labels"].where(torch.arange(64) < counted, -100)}


@pytest.mark.long
@pytest.mark.parametrize(("strategy", "averages"), [("optim_grads_params", True), ("no_shard", True), ("optim", False)])
@on_ranks(2)
def test_accumulation_over_uneven_tokens(tmp_path: Path, strategy: str, averages: bool) -> None:
    """Accumulation equals one process with all microbatches of all ranks.

    Each token counts the same, or each rank does.
    """
    steps, rows, micros, ranks = 3, 2, 2, dist.get_world_size()
    data = Uneven(rows * micros * ranks * steps // hf_trainer.BATCH)
    with trainers():
        trainer = train(
            tmp_path,
            data,
            ShardingArguments(compile=False, zero_dp_strategy=strategy),
            optim="sgd",
            max_steps=steps,
            per_device_train_batch_size=rows,
            gradient_accumulation_steps=micros,
            train_sampling_strategy="sequential",
            average_tokens_across_devices=averages,
            lr_scheduler_type="constant",
            learning_rate=0.1,
        )
    alone = hf_trainer.build()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        batches = [  # by microbatch and rank, as Trainer distributes them
            [
                torch.utils.data.default_collate(
                    [data[((step * micros + m) * ranks + r) * rows + i] for i in range(rows)]
                )
                for r in range(ranks)
            ]
            for m in range(micros)
        ]
        counts = [sum(int((b[r]["labels"][:, 1:] != -100).sum()) for b in batches) for r in range(ranks)]
        total = 0.0
        for r in range(ranks):
            tokens = sum(counts) if averages else counts[r] * ranks
            for b in batches:
                loss = alone(**b[r], num_items_in_batch=tokens).loss
                loss.backward()
                total += loss.item()
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert losses_of(trainer) == pytest.approx(losses, rel=1e-5)  # sums in another order
    expected = alone.state_dict()
    for name, value in weights_of(trainer).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.long
@on_ranks(2)
def test_bfloat16(tmp_path: Path) -> None:
    """The model computes in bfloat16 and steps in float32, from its original values."""
    data = hf_trainer.windows(3, 2)
    given: dict[str, Any] = {"max_steps": 3, "train_sampling_strategy": "sequential"}
    with trainers():
        trainer = train(tmp_path / "never", data, max_steps=1, learning_rate=0.0, bf16=True)
    assert {bucket.plan.compute_dtype for bucket in trainer.sharded.sharded.buckets} == {torch.bfloat16}
    assert_bitwise(weights_of(trainer), dict(hf_trainer.build().state_dict()))
    with trainers():
        trainer = train(tmp_path, data, bf16=True, **given)
        trainer.save_model()
    with trainers():
        exact = train(tmp_path, data, **given)
    bound = 2**-7  # half an ulp of bfloat16 each for weights and activations
    assert losses_of(trainer) == pytest.approx(losses_of(exact), rel=bound)
    assert losses_of(trainer) != losses_of(exact)
    dist.barrier()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    assert_bitwise(weights_of(trainer), dict(loaded.state_dict()))


@pytest.mark.long
@pytest.mark.parametrize("what", ["replicas", "bfloat16 model", "flat optimizer", "units", "offload"])
@on_ranks(2, 4)
def test_ways_to_shard(tmp_path: Path, what: str) -> None:
    """All ways to shard take the steps that the default takes."""
    data = hf_trainer.windows(2, dist.get_world_size())
    model = hf_trainer.build()
    sharding = {
        "bfloat16 model": EAGER,
        "replicas": ShardingArguments(compile=False, replicas=2, outer_dp_sharding_strategy="optim"),
        "flat optimizer": ShardingArguments(compile=False, flat_optimizer=True),
        "units": ShardingArguments(compile=False, units=["LlamaMLP"], sharding_options='{"unit_bytes": 65536}'),
        "offload": ShardingArguments(compile=False, offload="all"),
    }[what]
    if what == "bfloat16 model":
        model.to(torch.bfloat16)
    with trainers():
        trainer = train(tmp_path / what, data, sharding, model, max_steps=2)
        trainer.save_model()
    with trainers():
        default = train(tmp_path, data, max_steps=2)
    is_half = what == "bfloat16 model"
    assert losses_of(trainer) == pytest.approx(losses_of(default), rel=2**-7 if is_half else 1e-5)
    dist.barrier()
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / what)
    assert loaded.dtype == (torch.bfloat16 if is_half else torch.float32)
    for name, value in weights_of(trainer).items():
        assert torch.equal(value.to(loaded.dtype), loaded.state_dict()[name]), name


@pytest.mark.long
@on_ranks(2)
def test_an_optimizer_that_was_there_before(tmp_path: Path) -> None:
    data = hf_trainer.windows(3, 2)
    model = hf_trainer.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (3 - step) / 3)
    with trainers():
        given = train(tmp_path, data, model=model, optimizers=(optimizer, schedule), max_steps=3)
    with trainers():
        made = train(tmp_path, data, optim="adamw_torch", max_steps=3)
    assert losses_of(given) == losses_of(made)
    assert_bitwise(weights_of(given), weights_of(made))


@pytest.mark.long
@on_ranks(2)
def test_label_smoothing_and_activation_checkpointing(tmp_path: Path) -> None:
    """Label smoothing works. It tests the model's class; for the class of a wrapper it would not shift labels."""
    from transformers.trainer_pt_utils import LabelSmoother

    data = hf_trainer.windows(1, 2)
    with trainers():
        trainer = train(tmp_path, data, max_steps=1, label_smoothing_factor=0.1, activation_checkpointing=True)
    alone = hf_trainer.build()
    batch = torch.utils.data.default_collate([data[i] for i in range(len(data))])
    expected = LabelSmoother(0.1)(alone(input_ids=batch["input_ids"]), batch["labels"], shift_labels=True)
    assert losses_of(trainer) == pytest.approx([expected.item()], rel=1e-5)


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
@on_ranks(2)
def test_adapters(tmp_path: Path) -> None:
    """PEFT's LoRA trains beside frozen weights, is saved separately, and is resumed, compiled or not."""
    import peft

    def model() -> nn.Module:
        torch.manual_seed(0)
        return peft.get_peft_model(small(), peft.LoraConfig(r=4, task_type="CAUSAL_LM"))

    data = hf_trainer.windows(6, 2)
    given: dict[str, Any] = {"max_steps": 6, "train_sampling_strategy": "sequential", "learning_rate": 1e-2}
    with trainers():
        whole = train(tmp_path, data, COMPILED, model(), **given, save_strategy="steps", save_steps=3)
        whole.save_model()
    with trainers():
        rest = train(tmp_path / "rest", data, EAGER, model(), **given, resume=str(tmp_path / "checkpoint-3"))
    assert losses_of(rest) == losses_of(whole)
    assert losses_of(whole)[-1] < losses_of(whole)[0] - 0.05
    dist.barrier()
    assert (tmp_path / "adapter_model.safetensors").stat().st_size < 100_000
    loaded = peft.PeftModel.from_pretrained(small(), tmp_path).state_dict()
    assert_bitwise(weights_of(whole), {name: loaded[name] for name in whole.model.state_dict()})


# -- evaluation -------------------------------------------------------------------------------------------------------


class Spoils(transformers.TrainerCallback):
    """Makes evaluation worse after the second step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step >= 2:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(-3)


@pytest.mark.long
@pytest.mark.parametrize("only_model", [False, True])
@on_ranks(2)
def test_the_best_of_several(tmp_path: Path, only_model: bool) -> None:
    """The best checkpoint is kept and loaded at the end, after evaluation and early stopping by ordinary callbacks."""
    data, held_out = hf_trainer.windows(6, 2), hf_trainer.windows(1, 1)
    with trainers():
        trainer = train(
            tmp_path,
            data,
            max_steps=6,
            eval_dataset=torch.utils.data.Subset(held_out, range(3)),  # uneven between ranks
            per_device_eval_batch_size=1,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            save_total_limit=2,
            save_only_model=only_model,
            load_best_model_at_end=True,
            callbacks=[Spoils(), transformers.EarlyStoppingCallback(early_stopping_patience=2)],
        )
        evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        assert len(evaluated) == 4
        assert min(evaluated) == evaluated[1]
        dist.barrier()
        assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
        assert trainer.evaluate()["eval_loss"] == evaluated[1]
        predicted = trainer.predict(torch.utils.data.Subset(held_out, range(3)))
    best = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert_bitwise(weights_of(trainer), dict(best.state_dict()))
    batch = torch.utils.data.default_collate([held_out[i] for i in range(3)])
    with torch.no_grad():
        out = best(**batch)
    torch.testing.assert_close(torch.from_numpy(predicted.predictions), out.logits, rtol=1e-4, atol=1e-5)
    assert evaluated[1] == pytest.approx(out.loss.item(), rel=1e-5)


@pytest.mark.long
@on_ranks(2)
def test_evaluation_without_training(tmp_path: Path) -> None:
    """Evaluation works without training, compiled, and so does generation with different numbers of tokens per rank."""
    data = hf_trainer.windows(1, 1)
    with trainers():
        trainer = MfsdpTrainer(hf_trainer.build(), arguments(tmp_path), eval_dataset=data, sharding=COMPILED)
        loss = trainer.evaluate()["eval_loss"]
        prompt = data[dist.get_rank()]["input_ids"][None, :8]
        shorter = trainer.model.generate(prompt, max_new_tokens=2 + 2 * dist.get_rank(), do_sample=False)
    alone = hf_trainer.build()
    batch = torch.utils.data.default_collate([data[i] for i in range(len(data))])
    with torch.no_grad():
        assert loss == pytest.approx(alone(**batch).loss.item(), rel=1e-5)
        expected = alone.generate(prompt, max_new_tokens=2 + 2 * dist.get_rank(), do_sample=False)
    assert torch.equal(shorter, expected)


# -- saving -----------------------------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """Not a model of transformers, so its state is gathered whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = hf_trainer.build()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


class Full:
    """A tokenizer for which there is no space on the disk."""

    def save_pretrained(self, folder: str) -> None:
        raise OSError(f"no space left for {folder}")


@pytest.mark.long
@pytest.mark.parametrize("build", [hf_trainer.build, Wrapped])
@on_ranks(2, timeout=60)
def test_errors_of_the_rank_that_writes(build: Any, tmp_path: Path) -> None:
    """If the rank that writes fails, all ranks raise, none waits in a collective, and training and saving continue."""
    given: dict[str, Any] = {"max_steps": 2, "train_sampling_strategy": "sequential"}
    with trainers():
        trainer = train(tmp_path, hf_trainer.windows(2, 2), model=build(), **given)
        trainer.processing_class = Full()
        with raises_everywhere((OSError, RuntimeError), "no space left for"):
            trainer.save_model()
        trainer.processing_class = None
        trainer.train()
        trainer.save_model()
    expected = weights_of(trainer)
    dist.barrier()
    written = safetensors.load_file(tmp_path / "model.safetensors")
    assert_bitwise(written, {name: expected[name] for name in written})
    assert written


# -- unsupported arguments --------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "deepspeed": ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "DeepSpeed"),
    "fsdp": ({"fsdp": "full_shard"}, "ShardingArguments"),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, "out of memory"),
    "bf16_full_eval": ({"bf16_full_eval": True}, "evaluation"),
    "save_on_each_node": ({"save_on_each_node": True}, "first rank"),
    "torch_compile_mode": ({"torch_compile_mode": "max-autotune"}, "compile_options"),
    "torch_compile_backend": ({"torch_compile_backend": "cudagraphs"}, "inductor, aot_eager"),
    "optim": ({"optim": "lomo"}, "lomo"),
    "debug": ({"debug": ["underflow_overflow"]}, "hooks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_cannot_be_honoured(name: str, tmp_path: Path) -> None:
    """Unsupported arguments are named before anything is done, as is one process without a process group."""
    given, why = REFUSED[name]
    args = arguments(tmp_path)
    for key, value in given.items():  # Trainer's own checks want DeepSpeed installed, and so on
        setattr(args, key, value)
    with pytest.raises(ValueError, match=rf"(?s){name}=.*{why}.*torchrun"):
        MfsdpTrainer(hf_trainer.build(), args)


@on_ranks(2)
def test_settings_of_ddp_change_no_numbers(tmp_path: Path) -> None:
    """Those that would are refused: buffers that training changes are each rank's own."""
    settings: dict[str, Any] = {
        "ddp_find_unused_parameters": True,
        "ddp_bucket_cap_mb": 1,
        "ddp_broadcast_buffers": True,
        "ddp_static_graph": True,
    }
    weights = []
    with trainers():
        for given in ({}, settings):
            trainer = train(tmp_path, hf_trainer.windows(1, 2), EAGER, max_steps=1, save_strategy="no", **given)
            weights.append(weights_of(trainer))
        assert_bitwise(*weights)
        model = hf_trainer.build()
        model.register_buffer("statistics", torch.zeros(2))
        with raises_everywhere(ValueError, "ddp_broadcast_buffers=True", "its own buffers"):
            MfsdpTrainer(model, arguments(tmp_path, ddp_broadcast_buffers=True))
        MfsdpTrainer(model, arguments(tmp_path, ddp_broadcast_buffers=False))


@pytest.mark.long
@on_ranks(2)
def test_models_and_contradictions_that_are_refused(tmp_path: Path) -> None:
    with trainers():
        for args, sharding, model, fragments in [
            (
                arguments(tmp_path, torch_compile=True),
                EAGER,
                hf_trainer.build(),
                ["torch_compile=True", "compile=False"],
            ),
            (arguments(tmp_path), EAGER, torch.compile(hf_trainer.build()), ["The model is a OptimizedModule"]),
        ]:
            with raises_everywhere(ValueError, *fragments):
                MfsdpTrainer(model, args, sharding=sharding)
        with raises_everywhere(ValueError, "replicas=3", "2 ranks"):
            train(tmp_path, hf_trainer.windows(1, 2), ShardingArguments(replicas=3), max_steps=1)
        (tmp_path / "checkpoint-3").mkdir(exist_ok=True)
        with raises_everywhere(CheckpointError, "checkpoint-3", "not complete"):
            train(tmp_path, hf_trainer.windows(1, 2), max_steps=4, resume=str(tmp_path / "checkpoint-3"))


def test_arguments_on_the_command_line() -> None:
    parser = transformers.HfArgumentParser(ShardingArguments)
    words = [
        "--units",
        "A",
        "b.C",
        "--no_compile",
        "--compile_options",
        '{"prefetch": 2}',
        "--grad_comm_dtype",
        "float32",
    ]
    (parsed,) = parser.parse_args_into_dataclasses(words)
    assert parsed == ShardingArguments(
        units=["A", "b.C"], compile=False, compile_options={"prefetch": 2}, grad_comm_dtype="float32"
    )
    with pytest.raises(ValueError, match=r"main_grads_dtype takes the name of a dtype.*'half-ish'"):
        ShardingArguments(main_grads_dtype="half-ish").arguments(nn.Linear(2, 2), "cpu")
    with pytest.raises(ValueError, match=r"offload='disk' is none of 'all', 'optimizer'"):
        ShardingArguments(offload="disk").arguments(nn.Linear(2, 2), "cpu")
    given = {
        what: ShardingArguments(["Linear"], offload=what).arguments(nn.Linear(2, 2), "cpu")
        for what in ("all", "optimizer")
    }
    assert {what: type(each["offload_policy"]) for what, each in given.items()} == {
        "all": CPUOffloadPolicy,
        "optimizer": OptimizerOffloadPolicy,
    }
