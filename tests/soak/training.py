"""What each rank of a soak runs: a training that saves now and then, and continues from what it finds on the disk.

All numbers are float64, and the batch of a step does not depend on the number of ranks. The only difference between
numbers of ranks is then the order of sums. A checkpoint holds the history of its weights: which steps were taken by how
many ranks in which mode. A training without faults that takes the same steps in the same way has the same bits.
"""

from __future__ import annotations

import faulthandler
import signal
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import (
    CheckpointError,
    Checkpoints,
    Restored,
    full_optimizer_state_dict,
    full_state_dict,
    load,
)
from mfsdp_compile.models.gpt import Gpt, GptBlock, GptConfig

BATCH = 12
"""Sequences per step, over all ranks: divisible by 2, 3 and 4."""
SIZES = GptConfig(vocabulary=64, width=32, layers=2, heads=2, length=16)
KEEP = 2

Segment = tuple[int, int, int, str]
"""Steps of a history: first step, last step (excluded), number of ranks, mode."""
Say = Callable[..., None]


@dataclass(frozen=True)
class Job:
    """What ranks are to do.

    Args:
        root: Folder of the checkpoints.
        until: Step at which the training ends.
        ranks: Number of ranks.
        mode: ``"eager"``, or the inner compiler.
        save_every: Number of steps between two checkpoints. There is one at the end too.
        timeout: Timeout of the process group, in seconds.
        result: File for the weights at the end.
    """

    root: Path
    until: int
    ranks: int
    mode: str
    save_every: int
    timeout: float
    result: Path


class Model(Gpt):
    """The loss is in float64 too."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def rank_process(job: Job, rank: int, port: int, said: Connection) -> None:
    """Entry point of a rank. The exit code is 1 after an error, which is also said."""

    def say(*what: Any) -> None:
        said.send(what)

    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    # A killed process can leave half-written entries in torch's caches, which are not what is tested.
    torch._functorch.config.enable_autograd_cache = False
    torch._inductor.config.fx_graph_cache = False
    try:
        store = dist.TCPStore("127.0.0.1", port, job.ranks, wait_for_workers=False)
        timeout = timedelta(seconds=job.timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=job.ranks, timeout=timeout)
        _train(job, rank, say)
        dist.destroy_process_group()
    except Exception as error:
        say("failed", f"{type(error).__name__}: {error}", traceback.format_exc())
        raise SystemExit(1) from None


def _train(job: Job, rank: int, say: Say) -> None:
    terminated = []
    signal.signal(signal.SIGTERM, lambda *_: terminated.append(True))
    model, optimizer, schedule = _built()
    call: Any = model if job.mode == "eager" else torch.compile(model, backend="mfsdp", options={"inner": job.mode})
    saves = _Saves(Checkpoints(job.root, keep=KEEP), say)
    history: list[Segment] = []
    start = 0
    if (restored := _restored(saves.checkpoints, model, optimizer, say)) is not None:
        assert restored.step is not None
        start = restored.step
        schedule.load_state_dict(restored.extra["schedule"])
        history = [tuple(segment) for segment in restored.extra["history"]]
    say("loaded", start)

    def extra(step: int) -> dict[str, Any]:
        taken = [*history, (start, step, job.ranks, job.mode)] if step > start else history
        return {"schedule": schedule.state_dict(), "history": taken}

    for step in range(start + 1, job.until + 1):
        tokens, targets = (part.chunk(job.ranks)[rank] for part in _batch(step))
        call(tokens, targets).backward()
        _update(model, optimizer, schedule)
        say("step", step)
        if _any_rank(bool(terminated)):
            saves.save(step, model, optimizer, extra(step))
            say("preempted", step)
            return
        if step == job.until:
            saves.save(step, model, optimizer, extra(step))
        elif step % job.save_every == 0:
            # In turn, so that both ways meet every fault.
            begin = saves.save if step // job.save_every % 2 else saves.begin
            begin(step, model, optimizer, extra(step))
        saves.look()
    saves.wait()
    state = {"model": full_state_dict(model), "optimizer": full_optimizer_state_dict(optimizer)}
    if rank == 0:
        torch.save(state | {"rng": torch.get_rng_state(), "history": extra(job.until)["history"]}, job.result)
    say("done", job.until)


def alone(steps: int, result: Path) -> None:
    """Take the same steps in one process, with torch alone."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(SIZES).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _warmup)
    for step in range(1, steps + 1):
        model(*_batch(step)).backward()
        _update(model, optimizer, schedule)
    torch.save({name: value.detach() for name, value in model.named_parameters()}, result)


def _built() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = fully_shard_model(
        Model(SIZES).double(),
        fsdp_unit_modules=[GptBlock],
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float64),
    )
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=2e-3))
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, _warmup)


def _batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(SIZES.vocabulary, (BATCH, SIZES.length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _update(model: nn.Module, optimizer: Any, schedule: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    torch.rand(3)  # moves the random number generator, which checkpoints hold


def _warmup(step: int) -> float:
    return min(1.0, (step + 1) / 10)


def _any_rank(flag: bool) -> bool:
    flags = torch.tensor(float(flag))
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


class _Saves:
    """Saves of a program that trains on if one fails."""

    def __init__(self, checkpoints: Checkpoints, say: Say) -> None:
        self.checkpoints = checkpoints
        self._say = say
        self._under_way: tuple[int, Future[Path]] | None = None

    def save(self, step: int, *what: Any) -> None:
        self.wait()
        self._try(step, lambda: self.checkpoints.save(step, *what[:2], extra=what[2]))

    def begin(self, step: int, *what: Any) -> None:
        self.wait()
        try:
            self._under_way = step, self.checkpoints.save_async(step, *what[:2], extra=what[2])
        except CheckpointError as error:
            self._say("save failed", step, str(error))

    def look(self) -> None:
        """Say what has become of the save in the background, if it has ended."""
        if self._under_way is not None and self._under_way[1].done():
            self.wait()

    def wait(self) -> None:
        if self._under_way is not None:
            (step, _), self._under_way = self._under_way, None
            self._try(step, self.checkpoints.wait)

    def _try(self, step: int, work: Callable[[], Any]) -> None:
        try:
            work()
        except CheckpointError as error:
            self._say("save failed", step, str(error))
        else:
            self._say("saved", step)


def _restored(checkpoints: Checkpoints, model: Any, optimizer: Any, say: Say) -> Restored | None:
    """Load the last checkpoint or, if it is damaged, the one before, as a person would."""
    try:
        return checkpoints.load(model, optimizer)
    except RuntimeError as error:  # not only CheckpointError: another rank may have found the damage
        say("refused", str(error))
        refusal = error
    for path in reversed(checkpoints.all()):
        try:
            return load(path, model, optimizer)
        except RuntimeError as error:
            say("refused", str(error))
    raise refusal
