"""Ranks of Megatron itself, on the CPU: they train a small GPT, save and load with ``megatron.training``.

A process of its own, because Megatron has to be told that there is a GPU. It reads a :class:`Job` per line of standard
input as JSON, runs it on two forked ranks, and prints a line: ``done``, or the ranks' errors.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import traceback
import typing
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import typing_extensions
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

RANKS, LAYERS, HIDDEN, FFN, HEADS, VOCABULARY, LENGTH, EXPERTS = 2, 2, 16, 24, 4, 32, 8, 2
STEPS = 3
"""Steps before a checkpoint is saved."""


@dataclass(frozen=True)
class Job:
    """What the ranks do: train and save, or load; then one more step.

    Args:
        folder: What ``--save`` or ``--load`` names. The full state of every rank goes next to it, before and after
            the last step.
        load: Whether to load a checkpoint, rather than to train and save one.
        tp: Ranks of tensor parallelism.
        ep: Ranks of expert parallelism.
        experts: Whether MLPs have experts.
        sharding: Megatron's name of the format of optimizer states.
        parallel: ``--ckpt-fully-parallel-save`` and ``-load``.
    """

    folder: str
    load: bool = False
    tp: int = 1
    ep: int = 1
    experts: bool = False
    sharding: str = "fully_reshardable"
    parallel: bool = True


class _OnCpu(TorchFunctionMode):
    """Puts on the CPU what is asked for on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        if func is Tensor.cuda:
            return args[0]
        out = func(*args, **kwargs)
        # Megatron's distributed optimizer looks for this name among its parameters' types.
        return out.replace("torch.", "torch.cuda.", 1) if func is Tensor.type and isinstance(out, str) else out


@contextlib.contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let Megatron run on the CPU."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.tensor_parallel import random

    values = {
        "current_device": lambda: torch.device("cpu"),
        "current_stream": mock.MagicMock(),
        "synchronize": lambda *_: None,
        "get_rng_state": torch.get_rng_state,
        "set_rng_state": lambda *_: None,
        "empty_cache": lambda: None,
    }
    states, set_states = (
        DistributedOptimizer._get_main_param_and_optimizer_states,
        DistributedOptimizer._set_main_param_and_optimizer_states,
    )

    def set_without_step(self: Any, param: Any, tensors: Any) -> None:
        # Without Apex, its optimizer is torch's Adam, whose states have a step, which Megatron sets, but
        # looks for here.
        set_states(self, param, {"step": states(self, param)["step"], **tensors})

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(DistributedOptimizer, set_states.__name__, set_without_step))
        for name, value in values.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        no_fork = {"return_value": contextlib.nullcontext()}
        stack.enter_context(mock.patch.object(random.CudaRNGStatesTracker, "fork", **no_fork))
        stack.enter_context(_OnCpu())
        yield


def arguments(job: Job) -> argparse.Namespace:
    """Return the arguments of a training run, as ``pretrain_gpt.py`` has them after it has checked them."""
    from megatron.training.arguments import add_megatron_arguments

    given = [
        "--swiglu",
        "--bf16",
        "--use-distributed-optimizer",
        "--disable-bias-linear",
        "--ckpt-format",
        "torch_dist",
    ]
    sizes = {
        "num-layers": LAYERS,
        "hidden-size": HIDDEN,
        "ffn-hidden-size": FFN,
        "num-attention-heads": HEADS,
        "max-position-embeddings": LENGTH,
        "position-embedding-type": "rope",
        "tensor-model-parallel-size": job.tp,
        "expert-model-parallel-size": job.ep,
        "load" if job.load else "save": job.folder,
    }
    given += [str(x) for name, size in sizes.items() for x in (f"--{name}", size)]
    given += ["--no-load-rng"] if job.load else []
    given += ["--num-experts", str(EXPERTS)] if job.experts else []
    given += ["--dist-ckpt-optim-fully-reshardable"] if job.sharding == "fully_reshardable" else []
    args = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(given)
    args.rank, args.world_size = dist.get_rank(), RANKS
    args.data_parallel_size = RANKS // job.tp
    args.use_dist_ckpt, args.padded_vocab_size, args.params_dtype = True, VOCABULARY, torch.bfloat16
    args.ckpt_fully_parallel_save = args.ckpt_fully_parallel_load = job.parallel
    args.consumed_train_samples = args.skipped_train_samples = args.consumed_valid_samples = 0
    return args


class Training:
    """A model of Megatron, its optimizer and its learning rate's schedule."""

    def __init__(self, job: Job) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.transformer import TransformerConfig

        experts: dict[str, Any] = (
            {"num_moe_experts": EXPERTS, "moe_router_topk": 1, "moe_router_pre_softmax": True} if job.experts else {}
        )
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            ffn_hidden_size=FFN,
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=nn.functional.silu,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            bf16=True,
            tensor_model_parallel_size=job.tp,
            expert_model_parallel_size=job.ep,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            use_cpu_initialization=True,
            gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
            **experts,
        )
        layers = get_gpt_layer_local_spec(num_experts=EXPERTS if job.experts else None, normalization="LayerNorm")
        model = GPTModel(config, layers, VOCABULARY, LENGTH, position_embedding_type="rope").bfloat16()
        sharding = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(config, sharding, model)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                min_lr=0.0,
                bf16=True,
                use_distributed_optimizer=True,
                clip_grad=1.0,
                weight_decay=0.1,
            ),
            [self.model],
        )
        self.schedule = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=1e-2,
            min_lr=0.0,
            lr_warmup_steps=0,
            lr_decay_steps=10,
            lr_decay_style="linear",
            start_wd=0.1,
            end_wd=0.1,
            wd_incr_steps=10,
            wd_incr_style="constant",
        )

    def step(self, number: int, schedule: bool = True) -> float:
        """Train on a batch, whose sequences are spread over data-parallel ranks. Return this rank's loss."""
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        rank = parallel_state.get_data_parallel_rank()
        sequences = (torch.arange(2 * LENGTH).view(2, LENGTH) * (3 + number) + 5 * rank) % VOCABULARY
        places = torch.arange(LENGTH).expand(2, LENGTH)
        loss = self.model(sequences, places, None, labels=(sequences + 1) % VOCABULARY).mean()
        loss.backward()
        finalize_model_grads([self.model])
        assert self.optimizer.step()[0]
        if schedule:
            self.schedule.step(increment=1)
        return loss.item()

    def inner_states(self) -> Iterator[dict[str, Tensor]]:
        """Yield the states of torch's Adam."""
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            yield from optimizer.optimizer.state.values()

    def held(self) -> dict[str, Any]:
        """Return what this rank holds: its part of every parameter, of every state, and the groups' options."""
        optimizers = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        model = self.model.module
        names = {param: name for name, param in model.named_parameters()}
        params = {
            name: {
                "value": param.detach().clone(),
                "dim": param.partition_dim if getattr(param, "tensor_model_parallel", False) else None,
            }
            for name, param in model.named_parameters()
        }
        for optimizer in optimizers:
            for ranges in optimizer.gbuf_ranges:
                for buckets in ranges.values():
                    for param, at in ((p, at) for bucket in buckets for p, at in bucket["param_map"].items()):
                        states = optimizer._get_main_param_and_optimizer_states(param)
                        params[names[param]]["range"] = (at["param"].start, at["param"].end)
                        params[names[param]]["states"] = {k: v.detach().clone() for k, v in states.items()}
        options = [
            [
                {k: v for k, v in group.items() if k not in ("params", "step")}
                for group in optimizer.optimizer.param_groups
            ]
            for optimizer in optimizers
        ]
        return {"params": params, "options": options, "schedule": self.schedule.state_dict()}


def run(job: Job) -> None:
    """Run a job on this rank."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training import checkpointing, global_vars

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=job.tp, expert_model_parallel_size=job.ep, expert_tensor_parallel_size=1
    )
    init_num_microbatches_calculator(dist.get_rank(), None, 4, 2, RANKS // job.tp)
    args = arguments(job)
    global_vars.set_args(args)
    model_parallel_cuda_manual_seed(5)
    torch.manual_seed(7 if job.load else 3)
    training = Training(job)
    if job.load:
        training.step(
            9, schedule=False
        )  # torch's Adam, which Megatron uses without Apex, has no state to load into before
        iteration, _ = checkpointing.load_checkpoint(
            [training.model], training.optimizer, training.schedule, strict=True
        )
        for state in training.inner_states():  # Megatron has given all of them one tensor, which each would count up
            state["step"] = state["step"].clone()
    else:
        losses = [training.step(number) for number in range(STEPS)]
        iteration = args.iteration = STEPS
        args.consumed_train_samples = 4 * STEPS
        checkpointing.save_checkpoint(iteration, [training.model], training.optimizer, training.schedule, 0)
    held = {"iteration": iteration, "before": training.held()}
    if not job.load:
        held["losses"] = losses
    held["loss"] = training.step(iteration)
    held["after"] = training.held()
    torch.save(held, f"{job.folder}.{'loaded' if job.load else 'saved'}.{dist.get_rank()}")


def _forked(job: Job, rank: int, port: int) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_RANK": str(rank)}
    with as_on_gpu():
        run(job)
    dist.barrier()


def main() -> None:
    warnings.filterwarnings("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Megatron prints
    typing.override = typing_extensions.override  # type: ignore[attr-defined]  # Python 3.12's, which Megatron wants
    with as_on_gpu():
        import megatron.training.checkpointing  # noqa: F401
    for line in sys.stdin:
        job = Job(**json.loads(line))
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(RANKS):
            if not (child := os.fork()):
                status = 1
                try:
                    _forked(job, rank, port)
                    status = 0
                except BaseException:
                    Path(f"{job.folder}.error.{rank}").write_text(traceback.format_exc())
                finally:
                    os._exit(status)
            children.append(child)
        failed = [rank for rank, child in enumerate(children) if os.waitpid(child, 0)[1]]
        answers.write(f"failed: {failed}\n" if failed else "done\n")
        answers.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
