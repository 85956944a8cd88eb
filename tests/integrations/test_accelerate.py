"""accelerate over sharded models, and weights written for ``from_pretrained``."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from parity import raises_everywhere
from pool import on_ranks
from test_trainers import BITWISE, UNITS, assert_bitwise, other_model, trainers, transformers
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.multiprocessing.reductions import StorageWeakRef

from mfsdp_compile import MixedPrecisionPolicy, OptimizerOffloadPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import CheckpointError, full_state_dict
from mfsdp_compile.examples import hf_trainer, plain_loop
from mfsdp_compile.runtime.memory.bucket import Bucket

accelerate = pytest.importorskip("accelerate")

from mfsdp_compile.integrations.accelerate import MfsdpAccelerator
from mfsdp_compile.integrations.huggingface_save import can_stream, save_weights

MICROS = 2


class Job:
    """A program that trains with an Accelerator, or without one."""

    def __init__(
        self,
        accelerator: Any = None,
        strategy: str = "optim",
        model: Any = None,
        compiled: bool = False,
        offload: Any = None,
    ) -> None:
        self.accelerator = accelerator
        model = model if model is not None else hf_trainer.build()
        self.model = fully_shard_model(
            model, fsdp_unit_modules=UNITS, zero_dp_strategy=strategy, offload_policy=offload
        )
        self.optimizer = fully_shard_optimizer(torch.optim.AdamW(self.model.parameters(), lr=2e-3))
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.call = torch.compile(self.model, backend="mfsdp", options=BITWISE) if compiled else self.model
        data = hf_trainer.windows(12, dist.get_world_size())
        if accelerator is None:
            self.loader = plain_loop.batches(data, hf_trainer.BATCH)
        else:
            self.loader = accelerator.prepare(torch.utils.data.DataLoader(data, hf_trainer.BATCH))
            self.optimizer, self.schedule = accelerator.prepare(self.optimizer, self.schedule)
            if isinstance(accelerator, MfsdpAccelerator):
                assert accelerator.prepare(self.call) is self.call

    def train(self, batches: slice) -> list[Tensor]:
        losses = []
        for number, batch in enumerate(self.loader):
            if not batches.start <= number < batches.stop:
                continue
            if self.accelerator is not None:
                with self.accelerator.accumulate(self.call):
                    loss = self.call(**batch).loss
                    self.accelerator.backward(loss)
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
            else:
                self.model.is_last_microbatch = (number + 1) % MICROS == 0
                loss = self.call(**batch).loss
                (loss / MICROS).backward()
                if self.model.is_last_microbatch:
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                    self.optimizer.step()
                    for _ in range(dist.get_world_size()):  # accelerate advances the schedule once per process
                        self.schedule.step()
                    self.optimizer.zero_grad()
            losses.append(loss.detach())
        return losses


def assert_same(losses: list[Tensor], others: list[Tensor]) -> None:
    assert len(losses) == len(others) > 0
    assert torch.equal(torch.stack(losses), torch.stack(others))


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "strategy", "compiled"),
    [
        (accelerate.Accelerator, "optim", False),
        (MfsdpAccelerator, "optim", False),
        (MfsdpAccelerator, "optim_grads_params", True),
    ],
)
@on_ranks(2)
def test_accumulate_is_the_plain_loop(kind: type, strategy: str, compiled: bool) -> None:
    """Training with ``accumulate`` equals the plain loop, with accelerate's own Accelerator and with this package's.

    accelerate's own one prepares everything except the model.
    """
    with trainers():
        job = Job(kind(cpu=True, gradient_accumulation_steps=MICROS), strategy, compiled=compiled)
        losses = job.train(slice(0, 6))
    plain = Job(strategy=strategy, compiled=compiled)
    assert_same(losses, plain.train(slice(0, 6)))
    assert_bitwise(full_state_dict(job.model), full_state_dict(plain.model))


@pytest.mark.long
@pytest.mark.parametrize("policy", [CPUOffloadPolicy(), OptimizerOffloadPolicy()], ids=["everything", "optimizer"])
@on_ranks(2)
def test_offload(policy: Any, tmp_path: Path) -> None:
    """Accumulation, clipping and saved states of a model in host memory are those of one on the device."""
    strategy = "optim_grads_params"
    with trainers():
        job = Job(MfsdpAccelerator(cpu=True, gradient_accumulation_steps=MICROS), strategy, offload=policy)
        losses = job.train(slice(0, 4))
        folder = job.accelerator.save_state(str(tmp_path / "state"))
        after = job.train(slice(4, 6))
    plain = Job(strategy=strategy)
    assert_same(losses, plain.train(slice(0, 4)))
    assert_same(after, plain.train(slice(4, 6)))
    assert_bitwise(full_state_dict(job.model), full_state_dict(plain.model))
    with trainers():
        again = Job(MfsdpAccelerator(cpu=True, gradient_accumulation_steps=MICROS), strategy, offload=policy)
        again.accelerator.load_state(folder)
        assert_same(again.train(slice(4, 6)), after)


@pytest.mark.parametrize("offload", [False, True])
@on_ranks(2)
def test_configuration_of_fsdp2(offload: bool) -> None:
    """What accelerate's plugin asks for is what ``fully_shard_model`` gets, offload too."""
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_offload=offload, reshard_after_forward=False, transformer_cls_names_to_wrap=list(UNITS)
    )
    with trainers():
        accelerator = MfsdpAccelerator(cpu=True, fsdp_plugin=plugin)
        model = fully_shard_model(hf_trainer.build(), **accelerator.sharding_arguments())
        assert {bucket.lane.shard.in_host_memory for bucket in model.sharded.buckets} == {offload}
        assert accelerator.prepare(model) is model
        loss = model(**next(iter(plain_loop.batches(hf_trainer.windows(1, 2), hf_trainer.BATCH)))).loss
        accelerator.backward(loss)
        assert torch.isfinite(accelerator.clip_grad_norm_(model.parameters(), 1.0))
        other = fully_shard_model(
            hf_trainer.build(), fsdp_unit_modules=UNITS, offload_policy=None if offload else CPUOffloadPolicy()
        )
        with raises_everywhere(ValueError, "cpu_offload=", "accelerator.sharding_arguments()"):
            accelerator.prepare(other)
    first = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
    with trainers(), raises_everywhere(ValueError, "activation_checkpointing=True"):
        MfsdpAccelerator(cpu=True, fsdp_plugin=first).sharding_arguments()
    with trainers():
        assert MfsdpAccelerator(cpu=True).sharding_arguments() == {}


@on_ranks(2)
def test_fsdp_of_accelerate_does_not_shard() -> None:
    """Where accelerate would shard with torch's FSDP, which it does not do on CPUs, the model stays as it is."""
    init = accelerate.Accelerator.__init__

    def on_gpu(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.state.distributed_type = accelerate.DistributedType.FSDP
        self.state.fsdp_plugin = kwargs["fsdp_plugin"]

    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)
    with trainers(), mock.patch.object(accelerate.Accelerator, "__init__", on_gpu):
        accelerator = MfsdpAccelerator(cpu=True, fsdp_plugin=plugin)
        assert accelerator.distributed_type == accelerate.DistributedType.MULTI_GPU
        model = fully_shard_model(hf_trainer.build(), **accelerator.sharding_arguments())
        assert accelerator.prepare(model) is model


@pytest.mark.long
@on_ranks(2)
def test_state_is_saved_and_loaded(tmp_path: Path) -> None:
    with trainers():
        job = Job(MfsdpAccelerator(cpu=True, gradient_accumulation_steps=MICROS))
        job.train(slice(0, 4))
        folder = job.accelerator.save_state(str(tmp_path / "state"))
        job.accelerator.save_model(job.call, str(tmp_path / "model"))
        saved = full_state_dict(job.model, rank=None)
        assert_bitwise(saved, {**torch_weights(tmp_path / "model")})
        losses = job.train(slice(4, 8))
    with trainers():
        rest = Job(MfsdpAccelerator(cpu=True, gradient_accumulation_steps=MICROS), model=other_model())
        rest.accelerator.load_state(str(folder))
        assert_bitwise(full_state_dict(rest.model, rank=None), saved)
        assert_same(rest.train(slice(4, 8)), losses)
        assert rest.accelerator.unwrap_model(rest.call) is rest.model.module
    with trainers():
        accelerator = MfsdpAccelerator(cpu=True)
        accelerator.save_state(str(tmp_path / "empty"))
        job = Job(accelerator)
        for file in ("optimizer.bin", "scheduler.bin"):
            (tmp_path / "empty" / file).write_bytes((tmp_path / "state" / "scheduler.bin").read_bytes())
        with raises_everywhere(CheckpointError, "empty", "save_state of an MfsdpAccelerator"):
            accelerator.load_state(str(tmp_path / "empty"))


def torch_weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    dist.barrier()
    return load_file(folder / "model.safetensors")


@on_ranks(2)
def test_what_a_sharded_model_cannot_be_prepared_for() -> None:
    model = fully_shard_model(hf_trainer.build(), fsdp_unit_modules=UNITS)
    with (
        trainers(),
        raises_everywhere(ValueError, "mixed_precision='bf16'", "torch.float32", "param_dtype="),
    ):
        MfsdpAccelerator(cpu=True, mixed_precision="bf16").prepare(model)
    with trainers(), raises_everywhere(ValueError, "'INDUCTOR'", "dynamo_backend"):
        MfsdpAccelerator(cpu=True, dynamo_backend="inductor").prepare(model)
    with trainers():
        accelerator = MfsdpAccelerator(cpu=True)
        accelerator.register_for_checkpointing(model.module)
        with raises_everywhere(TypeError, "state_dict() of the registered", "] is a DTensor"):
            accelerator.save_state("nowhere")
        assert not Path("nowhere").exists()
    with trainers():
        accelerator = MfsdpAccelerator(cpu=True)
        accelerator.prepare(model)
        accelerator.prepare(fully_shard_model(hf_trainer.build(), fsdp_unit_modules=UNITS))
        with raises_everywhere(ValueError, "2 sharded models"):
            accelerator.save_state("nowhere")
        assert not Path("nowhere").exists()


# -- weights for from_pretrained --------------------------------------------------------------------------------------


SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "tied": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)),
    # Stacked experts, which are stored one by one.
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4)),
    # Has buffers, and a parameter tied over four names.
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=99, d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8)
    ),
}


@pytest.mark.parametrize("max_bytes", [5 * 10**9, 20_000])
@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(2)
def test_weights_are_those_that_save_pretrained_writes(family: str, max_bytes: int, tmp_path: Path) -> None:
    """Written weights equal those of ``save_pretrained`` bit for bit, under the same names.

    Shards are in float32, the files in the model's dtype.
    """
    from safetensors.torch import load_file

    def files(folder: Path) -> dict[str, Tensor]:
        return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}

    torch.manual_seed(0)
    model = FAMILIES[family]().to(torch.bfloat16)
    dtypes = {name: param.dtype for name, param in model.named_parameters(remove_duplicate=False)}
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path / "alone")
        model.save_pretrained(tmp_path / "sharded", max_shard_size=50_000)  # files of an earlier save
    dist.barrier()
    sharded = fully_shard_model(model, fsdp_unit_modules="auto", mixed_precision_policy=MixedPrecisionPolicy())
    assert can_stream(model)
    if dist.get_rank() == 0:
        model.save_pretrained(tmp_path / "sharded", state_dict={})  # as Trainer does
    save_weights(sharded, tmp_path / "sharded", dtypes, max_shard_bytes=max_bytes)
    written, expected = files(tmp_path / "sharded"), files(tmp_path / "alone")
    assert_bitwise(written, expected)
    index = tmp_path / "sharded" / "model.safetensors.index.json"
    assert index.is_file() == (max_bytes < 10**9)
    if index.is_file():
        assert json.loads(index.read_text())["weight_map"].keys() == expected.keys()
        assert all(
            file.stat().st_size < max_bytes + 5_000 or len(load_file(file)) == 1
            for file in (tmp_path / "sharded").glob("*.safetensors")
        )
    loaded, info = type(FAMILIES[family]()).from_pretrained(tmp_path / "sharded", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for name, value in full_state_dict(sharded, rank=None).items():
        assert torch.equal(loaded.state_dict()[name].to(value.dtype), value), name


@on_ranks(2)
def test_weights_are_written_as_they_are_gathered(tmp_path: Path) -> None:
    """When a bucket is gathered to be written, nothing of the bucket before it is left in memory."""
    model = fully_shard_model(hf_trainer.build(), fsdp_unit_modules=UNITS)
    gather, gathered, left = Bucket.gather_shards, [], []

    def watched(bucket: Bucket) -> list[Tensor]:
        deadline = time.monotonic() + 2  # gloo's threads release it a little later
        while not all(storage.expired() for storage in gathered) and time.monotonic() < deadline:
            time.sleep(0.01)
        left.append(sum(not storage.expired() for storage in gathered))
        parts = gather(bucket)
        gathered.append(StorageWeakRef(parts[0].untyped_storage()))
        return parts

    with mock.patch.object(Bucket, "gather_shards", watched):
        save_weights(model, tmp_path, {})
    assert left == [0] * len(model.sharded.buckets)


@on_ranks(2, timeout=90)
def test_a_first_rank_that_cannot_write(tmp_path: Path) -> None:
    """If the first rank cannot write, all ranks raise, and the model is unchanged."""
    model = fully_shard_model(hf_trainer.build(), fsdp_unit_modules=UNITS)
    (tmp_path / "file").touch()
    with raises_everywhere((OSError, RuntimeError), "file"):
        save_weights(model, tmp_path / "file", {})
    save_weights(model, tmp_path, {})
    assert_bitwise(torch_weights(tmp_path), full_state_dict(model, rank=None))
