"""A folder of checkpoints, of which the last complete one is always to be found."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import operator
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.agreement import agree
from mfsdp_compile.runtime.files import FileRefused, inside, read_text, remove
from mfsdp_compile.runtime.lineage import Lineage
from mfsdp_compile.runtime.model import ShardedModel
from mfsdp_compile.runtime.optimizer_state import optimizer_name
from mfsdp_compile.wrapper import unwrapped

from .contents import extra_to_tensor, get_generators
from .files import CheckpointError
from .loading import Restored, as_checkpoint_error, load
from .manifest import Manifest, now, read_manifest, versions, write_durably
from .saving import PublishingWriter, sharded_part, sync_directory

__all__ = ["Checkpoints"]

_LATEST = "latest"
_NAME = re.compile(r"step-(\d{8,})(\.\d+)?")


class Checkpoints:
    """Checkpoints of one training, in a folder that all its ranks see.

    ::

        checkpoints = Checkpoints("runs/a", keep=3)
        checkpoints.save(step, model, optimizer, extra={"schedule": schedule.state_dict()})
        ...
        restored = checkpoints.load(model, optimizer)     # the last one, at any number of ranks

    A checkpoint is the folder ``step-00000100``, in the format of ``torch.distributed.checkpoint``, with a manifest. It gets
    this name when it is complete and on the disk; a save that dies leaves no trace that matters. The file ``latest`` holds
    the name of the last one, for other programs; :meth:`latest` looks for itself. All methods are collective but for
    :meth:`latest` and :meth:`all`.

    One folder is for one training. Every sharded model is a run, whose id is in its checkpoints; loading a checkpoint takes up
    the runs that it comes from. Where another run saves into the folder too (two jobs by mistake, or one that was begun anew),
    saving goes on, as a mistake in one job must not cost the work of another; but ``keep`` counts and removes only checkpoints
    of this run and of those that it took up, and a warning names the others.

    Args:
        root: the folder; it is made if need be. Several machines must share it.
        keep: how many to keep of this run, counted from the last; None: all.
    """

    def __init__(self, root: str | os.PathLike[str], keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be at least 1, or None for all; got {keep}")
        self.root = Path(root).absolute()  # saves go on in the background while the program may change its directory
        self.keep = keep
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._under_way: Future[Any] | None = None
        self._told: set[str] = set()  # runs that a warning has named

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()

    # -- what is there ------------------------------------------------------------------------------------------------

    def all(self) -> list[Path]:
        """The complete ones, in the order in which they were written. One with a damaged manifest is left out, with a
        warning."""
        complete, damaged = self._find()
        for _, error in damaged:
            warnings.warn(f"A checkpoint is left out: {error}", stacklevel=2)
        return [path for _, path in complete]

    def latest(self) -> Path | None:
        """The one that was written last; None: there is none.

        Raises:
            CheckpointError: its manifest is damaged.
        """
        complete, damaged = self._find()
        if damaged:
            with contextlib.suppress(OSError, FileRefused):
                name = read_text(inside(self.root, _LATEST))
                for path, what in damaged:
                    if path.name == name:
                        raise what
        return complete[-1][1] if complete else None

    def _find(self) -> tuple[list[tuple[Manifest, Path]], list[tuple[Path, CheckpointError]]]:
        """The complete ones with their manifests, in the order of their serial numbers; the damaged ones with what is wrong."""
        complete: list[tuple[Manifest, Path]] = []
        damaged: list[tuple[Path, CheckpointError]] = []
        for path in self.root.iterdir() if self.root.is_dir() else ():
            if not _NAME.fullmatch(path.name):
                continue
            try:
                if (manifest := read_manifest(path)) is not None:
                    complete.append((manifest, path))
            except CheckpointError as error:
                damaged.append((path, error))
            except OSError as error:
                damaged.append((path, CheckpointError(f"{path} cannot be read ({error}).")))
        return sorted(complete, key=lambda held: (held[0].serial, held[1])), damaged

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Any = None,
    ) -> Path:
        """Write a checkpoint and wait until it is complete.

        Args:
            step: of the training, not negative.
            model, optimizer: extended by ``fully_shard_optimizer``.
            extra: of the first rank: tensors, numbers, strings, and lists, tuples and dicts of them; a scheduler's or a
                data loader's ``state_dict()``. Random number generators are saved for each rank without being asked.

        Returns:
            The checkpoint's folder, on all ranks.

        Raises:
            TypeError, ValueError: the step is no whole number, or negative.
            RuntimeError: a rank could not write. Earlier checkpoints are as they were.
        """
        save = self._begin(step, model, optimizer, extra)
        try:
            dcp.save(save.state, storage_writer=save.writer, process_group=save.group)
        except CheckpointException as error:
            raise save.failed(error) from error
        finally:
            save.lock.close()
        return save.path

    def save_async(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Any = None,
    ) -> Future[Path]:
        """As :meth:`save`, but training can go on when this returns: everything has been copied to the CPU's memory then,
        and a thread writes it. The next save waits for it; :meth:`wait` does too, and must be called before the process
        group is destroyed.

        Returns:
            A future of the folder; its exception is what :meth:`save` would raise.
        """
        save = self._begin(step, model, optimizer, extra)
        done: Future[Path] = Future()

        def finish(written: Any) -> None:
            save.lock.close()
            error = written.exception()
            if isinstance(error, CheckpointException):
                error = save.failed(error)
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(save.path)

        try:
            written = dcp.async_save(save.state, storage_writer=save.writer, process_group=save.group)
        except BaseException:
            save.lock.close()
            raise
        self._under_way = done
        written.add_done_callback(finish)  # type: ignore[union-attr]
        return done

    def wait(self) -> None:
        """For the save under way, if any. Raises what it has raised."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _begin(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any) -> _Save:
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        self.wait()
        model = unwrapped(model, "Checkpoints.save")
        model.sharded.check_parameters_are_everyones("Checkpoints")
        sharded = model.sharded
        is_first = dist.get_rank(sharded.everyone) == 0
        state: dict[str, Any] = {}

        def contents() -> list[str]:
            if waiting := sharded.synchronisation.microbatches:
                raise CheckpointError(
                    f"Gradients of {waiting} microbatches wait to be reduced, and gradients are not saved. Save after the "
                    "optimizer's step, or drop them with model.zero_grad_buffer()."
                )
            state["model"] = model.state_dict()
            if optimizer is not None:
                state["optimizer"] = optimizer.state_dict()
            if extra is not None:
                state["extra"] = extra_to_tensor(extra)
            if not is_first:  # what is not sharded (buffers, steps) is the first rank's, all of it
                state.update({key: sharded_part(value) for key, value in state.items()})
            state["rng"] = {str(dist.get_rank(sharded.everyone)): get_generators()}
            return [f"step {step}", f"optimizer: {type(optimizer).__name__}"]

        agree(sharded.everyone, "Saving a checkpoint", contents, compat.timeout_of(sharded.everyone) * 1.5)
        group = self._group(sharded)  # which waits for all ranks: not before they have come
        sharded.compare_buffers("where a checkpoint is saved", group)
        chosen: list[Any] = [None]
        lock = contextlib.ExitStack()
        if is_first:
            try:
                lock.enter_context(_locked(self.root))
                chosen = [(*self._prepare(step, sharded.lineage), None)]
            except Exception as error:  # the other ranks wait for it
                lock.close()
                chosen = [(None, None, 0, f"{type(error).__name__}: {error}")]
        dist.broadcast_object_list(chosen, group=group, group_src=0)
        directory, final, serial, refusal = chosen[0]
        if refusal is not None:
            raise CheckpointError(f"The first rank cannot write to {self.root}: {refusal}")

        def publish() -> None:
            os.rename(directory, final)
            sync_directory(self.root)
            try:
                write_durably(self.root / _LATEST, final.name)
                self._remove_old(sharded.lineage)
            except OSError as error:  # the checkpoint is there
                warnings.warn(
                    f"{final} is complete, but what is around it could not be kept in order: {error}", stacklevel=2
                )

        manifest = _manifest(step, serial, sharded, dist.get_world_size(group), optimizer)
        writer = PublishingWriter(directory, manifest, publish)
        return _Save(state, writer, group, final, directory, lock)

    def _prepare(self, step: int, lineage: Lineage) -> tuple[Path, Path, int]:
        """On the first rank: where to write, what to call it then, and its serial number."""
        for pattern in (
            ".saving-*",
            ".removing-*",
        ):  # by a process that died; none is at work, as this one has the lock
            for left in self.root.glob(pattern):
                remove(left)
        complete, _ = self._find()
        self._warn_of_others(complete, lineage)
        serial = complete[-1][0].serial + 1 if complete else 0
        final, number = self.root / f"step-{step:08}", 0
        while final.exists():  # from a run that was taken up again further back; it stays
            number += 1
            final = self.root / f"step-{step:08}.{number}"
        directory = self.root / f".saving-{serial}"
        directory.mkdir()
        return directory, final, serial

    def _warn_of_others(self, complete: Sequence[tuple[Manifest, Path]], lineage: Lineage) -> None:
        others = {manifest.run: (manifest, path) for manifest, path in complete if not lineage.has(manifest.run)}
        for run, (manifest, path) in others.items():
            if run in self._told:
                continue
            self._told.add(run)
            warnings.warn(
                f"{self.root} holds checkpoints of another run, {run or 'of a conversion'}: the last is {path.name}, made "
                f"{manifest.created}. This run, {lineage.run}, has not loaded it, saves beside it, and does not remove it. If "
                "another job is at work, give each a folder of its own: loading takes the last checkpoint of all. If this "
                "training was begun anew, remove the old checkpoints; if it should go on from them, load first.",
                stacklevel=4,
            )

    def _remove_old(self, lineage: Lineage) -> None:
        if self.keep is None:
            return
        own = [path for manifest, path in self._find()[0] if lineage.has(manifest.run)]
        for path in own[: -self.keep]:
            doomed = self.root / f".removing-{path.name}"
            os.rename(path, doomed)  # at once, so that nobody takes the half for the whole
            remove(doomed)

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **arguments: Any
    ) -> Restored | None:
        """Load the last complete checkpoint; see :func:`load` for the other arguments.

        Returns:
            None, on all ranks, if there is none.
        """
        self.wait()
        model = unwrapped(model, "Checkpoints.load")
        group = self._group(model.sharded)
        chosen: list[Any] = [None]
        if dist.get_rank(group) == 0:
            try:
                chosen = [self.latest()]
            except Exception as error:  # the other ranks wait for it
                chosen = [
                    error if isinstance(error, CheckpointError) else CheckpointError(f"{type(error).__name__}: {error}")
                ]
        dist.broadcast_object_list(chosen, group=group, group_src=0)
        if isinstance(chosen[0], CheckpointError):
            raise chosen[0]
        return load(chosen[0], model, optimizer, **arguments) if chosen[0] is not None else None

    def _group(self, sharded: ShardedModel) -> dist.ProcessGroup:
        """Of the model's ranks, on the CPU, and used by nobody else: saves in the background communicate. With torch's
        time-out for gloo, as a slow disk takes longer than a collective of the model may."""
        ranks = tuple(dist.get_process_group_ranks(sharded.everyone))
        if ranks not in self._groups:
            self._groups[ranks] = compat.new_group(ranks, backend="gloo")
        return self._groups[ranks]


@dataclass(frozen=True)
class _Save:
    """One that has begun."""

    state: dict[str, Any]
    writer: PublishingWriter
    group: dist.ProcessGroup
    path: Path
    directory: Path
    lock: contextlib.ExitStack

    def failed(self, error: CheckpointException) -> CheckpointError:
        """On every rank. The first one removes what was written, as it takes room; under this name it is not
        published."""
        if dist.get_rank(self.group) == 0:
            with contextlib.suppress(OSError):  # the next save removes what could not be removed now
                remove(self.directory)
        return as_checkpoint_error(error, f"Saving {self.path} failed; earlier checkpoints are as they were")


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """One process writes at a time. The system lets go of the lock of a process that dies."""
    root.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BlockingIOError(f"{root} is being saved into, by another process or another Checkpoints") from None
        try:
            yield
        finally:  # closing is not enough: a process that was forked meanwhile has the file too
            fcntl.flock(file, fcntl.LOCK_UN)


def _manifest(
    step: int, serial: int, sharded: ShardedModel, world_size: int, optimizer: torch.optim.Optimizer | None
) -> Manifest:
    layouts = "\n".join(f"{bucket.plan.name}: {bucket.plan.layout.fingerprint}" for bucket in sharded.buckets)
    return Manifest(
        step=step,
        serial=serial,
        created=now(),
        world_size=world_size,
        sharding=str(sharded.topology),
        layout=hashlib.sha256(layouts.encode()).hexdigest(),
        versions=versions(),
        rng=True,
        run=sharded.lineage.run,
        continues=sharded.lineage.continues,
        optimizer=optimizer_name(optimizer) if optimizer is not None else None,
    )
