"""Preference training by TRL: ``dpo_program.py FOLDER one|eager|compiled`` prints its losses as JSON.

A process of its own, started with torchrun: the libraries that TRL needs start threads, which a forking
pool must not.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from mfsdp_compile.integrations.transformers import MfsdpTrainerMixin, ShardingArguments

WORDS = [f"w{i}" for i in range(60)]
STEPS, PAIRS = 4, 4  # pairs of a step, over all ranks


class ShardedDPOTrainer(MfsdpTrainerMixin, DPOTrainer):
    """DPO as docs/trainers.md shows it."""


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64
    )


def preferences() -> Dataset:
    """Pairs of different lengths, so that ranks pad differently."""
    drawn = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(drawn.choices(WORDS, k=drawn.randint(least, most)))

    rows = [
        {"prompt": text(3, 6), "chosen": " " + text(2, 9), "rejected": " " + text(2, 9)} for _ in range(STEPS * PAIRS)
    ]
    return Dataset.from_list(rows)


def prepare(folder: Path) -> None:
    """Save the model that all start from: TRL loads its reference from there."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS) + 3,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")


def main(folder: Path, mode: str) -> None:
    torch.set_num_threads(1)
    ranks = 1 if mode == "one" else 2
    arguments = DPOConfig(
        str(folder / mode),
        per_device_train_batch_size=PAIRS // ranks,
        max_steps=STEPS,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        beta=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing="checkpointed" in sys.argv,
        seed=0,
    )
    given: dict[str, Any] = {
        "model": LlamaForCausalLM.from_pretrained(folder / "model"),
        "args": arguments,
        "train_dataset": preferences(),
        "processing_class": tokenizer(),
    }
    if mode == "one":
        trainer: Any = DPOTrainer(**given)
    else:
        sharding = ShardingArguments(compile=mode == "compiled", compile_options={"inner": "aot_eager"})
        trainer = ShardedDPOTrainer(**given, sharding=sharding)
    trainer.train()
    if trainer.is_world_process_zero():
        names = ("loss", "grad_norm", "rewards/margins", "rewards/accuracies")
        logged = [{name: row[name] for name in names} for row in trainer.state.log_history if "loss" in row]
        reference = trainer.ref_model
        held = sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in reference.parameters())
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        print("RESULT", json.dumps({"logged": logged, "reference": held, "graphs": graphs}))


if __name__ == "__main__":
    if sys.argv[2] == "prepare":
        prepare(Path(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), sys.argv[2])
