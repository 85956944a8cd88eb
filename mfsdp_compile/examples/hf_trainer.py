"""Hugging Face's ``Trainer`` over a sharded, compiled model.

    torchrun --nproc-per-node=2 -m mfsdp_compile.examples.hf_trainer --max_steps 20 --save_steps 10
    torchrun --nproc-per-node=2 -m mfsdp_compile.examples.hf_trainer --resume_from_checkpoint trainer-out/checkpoint-10

Runs on GPUs if there are any, with one process per GPU, otherwise on the CPU. Accepts all of Trainer's arguments, and
those of :class:`~mfsdp_compile.integrations.transformers.ShardingArguments`; ``--help`` lists them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, TrainingArguments

from mfsdp_compile.integrations.transformers import MfsdpTrainer, ShardingArguments
from mfsdp_compile.runtime.untrusted_files import write_text

from ..demo.corpus import Windows, standard_library

__all__ = ["build", "main", "windows"]

BATCH = 4


def build() -> LlamaForCausalLM:
    """Build a small Llama with the same values on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,  # Trainer sets this too
    )
    return LlamaForCausalLM(config)


def windows(steps: int, ranks: int) -> Windows:
    """Return the text that ``steps`` steps read."""
    return Windows(standard_library(), length=64, count=BATCH * ranks * steps)


def main(words: Sequence[str] | None = None) -> None:
    parser = HfArgumentParser((TrainingArguments, ShardingArguments))
    on_cpu = not torch.cuda.is_available()
    parser.set_defaults(
        output_dir="trainer-out",
        max_steps=20,
        per_device_train_batch_size=BATCH,
        learning_rate=2e-3,
        logging_steps=1,
        save_steps=10,
        train_sampling_strategy="sequential",  # windows are already random
        report_to="none",
        use_cpu=on_cpu,
    )
    args, sharding = parser.parse_args_into_dataclasses(words)
    data = windows(args.max_steps, args.world_size)
    trainer = MfsdpTrainer(build(), args, train_dataset=data, sharding=sharding)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()  # a folder for from_pretrained
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        write_text(Path(args.output_dir, "losses.json"), json.dumps(losses))
    trainer.end()


if __name__ == "__main__":
    main()
