"""Checkpoints of a training: saved and loaded by all ranks together, in a folder."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import operator
import os
from collections.abc import Iterator
from concurrent.futures import Future, wait
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
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.optim.own_steps import whole_step_of
from mfsdp_compile.runtime.optim.state import named_state_dict, optimizer_name
from mfsdp_compile.runtime.ranks.agreement import agree, conclude, errors_for_all, has_others
from mfsdp_compile.runtime.ranks.watchdog import watchdog
from mfsdp_compile.runtime.untrusted_files import remove
from mfsdp_compile.sharded_module import unwrapped

from .errors import CheckpointError, as_checkpoint_error
from .extra_state import check_extra, digests_of, extra_to_tensor, get_generators, only_of_some
from .folder import Folder, locked
from .loading import PATIENCE, Restored, check_is_one_optimizer, load
from .manifest import Manifest, now, versions
from .saving import PublishingWriter, sharded_part

_SAVE = "a save of a checkpoint"
_log = logging.getLogger("mfsdp_compile")


class Checkpoints:
    """Checkpoints of one training, in a folder that all its ranks can access.

    ::

        checkpoints = Checkpoints("runs/a", keep=3)
        checkpoints.save(step, model, optimizer, extra={"schedule": schedule.state_dict()})
        ...
        restored = checkpoints.load(model, optimizer)     # the last one, on any number of ranks

    A checkpoint is the folder ``step-00000100``, in the format of ``torch.distributed.checkpoint``, with a manifest. It
    gets this name when it is complete and on disk; a save that dies leaves nothing that later saves or loads use. The
    file ``latest`` holds the name of the last one. If that is gone or damaged, loading the last one is an error:
    an earlier one would lose training in silence. To go back, write the name of an earlier one into it: loading takes
    that one, with a warning, the next save is the last one then, and ``keep`` removes what was left behind first. All
    methods are collective except :meth:`latest` and :meth:`all`.

    Use one folder per training. Each sharded model is a run, and its checkpoints contain the run's id; loading a
    checkpoint continues the runs that it comes from. If another run saves into the same folder (two jobs by mistake, or
    a training that was restarted from scratch), saving goes on, also at the same time, because a mistake in one job
    must not cost the work of another. ``keep`` then counts and removes only checkpoints of this run and of those that
    it continues, and a warning names the others.

    Args:
        root: The folder; created if necessary. All machines must share it.
        keep: How many of this run's checkpoints to keep, counted from the last. None: all.
    """

    def __init__(self, root: str | os.PathLike[str], keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"keep must be at least 1, or None for all; got {keep}")
        self.root = Path(root).absolute()  # background saves continue even if the program changes its working directory
        self.keep = keep
        self._folder = Folder(self.root, keep)
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._under_way: Future[Any] | None = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()

    # -- finding checkpoints ------------------------------------------------------------------------------------------

    def all(self) -> list[Path]:
        """Return the complete checkpoints, in the order in which they were written.

        Others are left out, with a warning.
        """
        return self._folder.all()

    def latest(self) -> Path | None:
        """Return the checkpoint that was written last, or None if there is none. If the file ``latest`` was written
        after it and names an earlier one, that one, with a warning.

        Raises:
            CheckpointError: The one that the file ``latest`` names is gone, incomplete or damaged. Without that file:
                one of the folder is. The message says which others there are, and how to load one.
        """
        return self._folder.latest()

    # -- saving -------------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Any = None,
    ) -> Path:
        """Write a checkpoint, and wait until it is complete.

        Args:
            step: Training step; not negative.
            model: The sharded model.
            optimizer: Optimizer over the model's parameters, extended or not; its state is saved by name of parameter.
                None: no optimizer state is saved.
            extra: Data of the program, such as ``state_dict()`` of a scheduler or a data loader: tensors, numbers,
                strings, and lists, tuples and dicts of them; no DTensors. The first rank's is saved, and others pass
                the same, or None. Random number generators are always saved, for each rank.

        Returns:
            The checkpoint's folder, on all ranks.

        Raises:
            TypeError, ValueError: If the step is not an integer, or negative, or an argument is of another kind.
            CheckpointError: If ranks pass different ``extra``. Nothing was written.
            RuntimeError: If a rank could not write. Earlier checkpoints are unchanged.
        """
        save = self._begin(step, model, optimizer, extra)
        try:
            with _in_step(save.group), watchdog.failed_waits.explaining(_SAVE):
                dcp.save(save.state, storage_writer=save.writer, process_group=save.group)
        except (CheckpointException, RuntimeError) as error:
            failed, mine = save.failed(error), getattr(error, "failures", {}).get(dist.get_rank(save.group))
            if mine is not None and not isinstance(mine[0], Exception):  # an interrupt, which torch keeps as a failure
                raise mine[0] from error
            raise failed from error
        finally:
            save.until_done.close()
        return save.path

    def save_async(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        extra: Any = None,
    ) -> Future[Path]:
        """Like :meth:`save`, but return as soon as everything has been copied to CPU memory; a thread writes it.

        The next save waits for this one, and so do :meth:`wait`, ``destroy_process_group()`` and the end of the
        program. A failure is logged as an error when it happens, whether or not anybody asks for it.

        Returns:
            A future of the folder. Its exception is the one that :meth:`save` would raise.
        """
        save = self._begin(step, model, optimizer, extra)
        rank = dist.get_rank()
        done: Future[Path] = Future()

        def finish(written: Any) -> None:
            error = written.exception()
            try:
                if isinstance(error, RuntimeError):
                    watchdog.failed_waits.explain(error, _SAVE)
            except RuntimeError as explained:
                error = explained
            try:
                if isinstance(error, (CheckpointException, RuntimeError)):
                    error = save.failed(error)
                save.until_done.close()
            except Exception as other:  # whoever waits for this save must not wait forever
                error = error or other
            if error is not None:
                _log.error(
                    "Rank %d: the save of step %d in the background failed, and %s was not written: %s",
                    rank,
                    step,
                    save.path,
                    error,
                )
                done.set_exception(error)
            else:
                done.set_result(save.path)

        save.until_done.enter_context(compat.finishing_first(lambda: wait([done])))
        try:
            with _in_step(save.group):
                written = dcp.async_save(save.state, storage_writer=save.writer, process_group=save.group)
        except BaseException:
            save.until_done.close()
            raise
        self._under_way = done
        written.add_done_callback(finish)  # type: ignore[union-attr]
        return done

    def wait(self) -> None:
        """Wait for the save in progress, if any. Raises its exception."""
        under_way = self._under_way
        if under_way is not None:
            wait([under_way])  # an interrupt leaves it under way
            self._under_way = None
            under_way.result()

    def _begin(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer | None, extra: Any) -> _Save:
        model = unwrapped(model, "Checkpoints.save")
        model.sharded.check_parameters_are_everyones("Checkpoints")
        sharded = model.sharded
        is_first = dist.get_rank(sharded.everyone) == 0
        state: dict[str, Any] = {}
        digests: dict[str, str] = {}

        def contents() -> list[str]:
            if operator.index(step) < 0:
                raise ValueError(f"step must not be negative, got {step}")
            check_is_one_optimizer(optimizer, "Checkpoints.save")
            check_extra(extra)
            self.wait()
            if waiting := sharded.grad_sync.microbatches:
                raise CheckpointError(
                    f"Gradients of {waiting} microbatches wait to be reduced, and gradients are not saved. Save after "
                    "the optimizer's step, or drop them with model.zero_grad() (of FSDP2's face: "
                    "model.reset_iter_state())."
                )
            state["model"] = model.state_dict()
            if optimizer is not None:
                state["optimizer"] = named_state_dict(optimizer)
            if extra is not None:
                state["extra"] = extra_to_tensor(extra)
                digests.update(digests_of(extra))
            if not is_first:  # everything that is not sharded (buffers, steps) is saved by the first rank
                parts = {key: sharded_part(value) for key, value in state.items()}
                if optimizer is not None and whole_step_of(optimizer) is not None:  # of what this rank steps
                    parts["optimizer"] = {"state": state["optimizer"]["state"]}
                state.update(parts)
            state["rng"] = {str(dist.get_rank(sharded.everyone)): get_generators()}
            return [f"step {operator.index(step)}", f"optimizer: {type(optimizer).__name__}"]

        patience = compat.timeout_of(sharded.everyone) * 1.5
        agree(sharded.everyone, "Saving a checkpoint", contents, patience)
        if has_others(sharded.everyone):
            mine = None if extra is None else digests
            if other := conclude(sharded.everyone, "Extra of a checkpoint", [], mine, only_of_some, patience):
                raise CheckpointError(
                    f"{other}, which is saved, so it would be lost. Save what each rank has as one list, the same on "
                    "all: parts = [None] * dist.get_world_size(); dist.all_gather_object(parts, part). Or pass extra "
                    "on the first rank, and None on the others. Nothing was written."
                )
        group = self._group(sharded)  # waits for all ranks, so only after they have all arrived
        with contextlib.ExitStack() as until_done, _in_step(group):
            until_done.enter_context(
                watchdog.failed_waits.guarding(group, compat.timeout_of(sharded.everyone).total_seconds())
            )
            return self._prepared(operator.index(step), sharded, optimizer, state, group, until_done)

    def _prepared(
        self,
        step: int,
        sharded: ShardedModel,
        optimizer: torch.optim.Optimizer | None,
        state: dict[str, Any],
        group: dist.ProcessGroup,
        until_done: contextlib.ExitStack,
    ) -> _Save:
        """Agree on the folder to write to.

        Args:
            until_done: What must be closed when the save is done. The result takes it over.
        """
        sharded.compare_buffers("where a checkpoint is saved", group)
        chosen: list[Any] = [None]
        lock = until_done.enter_context(contextlib.ExitStack())
        if dist.get_rank(group) == 0:
            try:
                with locked(self.root):
                    chosen = [(*self._folder.prepare(step, sharded.lineage, lock), None)]
            except Exception as error:  # the other ranks wait for it
                lock.close()
                chosen = [(None, None, 0, f"{type(error).__name__}: {error}")]
        with watchdog.failed_waits.explaining(_SAVE):
            dist.broadcast_object_list(chosen, group=group, group_src=0)
        directory, final, serial, refusal = chosen[0]
        if refusal is not None:
            raise CheckpointError(f"The first rank cannot write to {self.root}: {refusal}")

        manifest = _manifest(step, serial, sharded, dist.get_world_size(group), optimizer)
        writer = PublishingWriter(directory, manifest, lambda: self._folder.publish(directory, final, sharded.lineage))
        return _Save(state, writer, group, final, directory, until_done.pop_all())

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **arguments: Any
    ) -> Restored | None:
        """Load the last complete checkpoint; see :func:`load` for the other arguments.

        Returns:
            What was loaded, or None on all ranks if there is no checkpoint.
        """
        model = unwrapped(model, "Checkpoints.load")
        everyone = model.sharded.everyone
        with errors_for_all(everyone, "A save before a load", PATIENCE):
            self.wait()
        found: dict[str, str | None] = {}
        interrupt: BaseException | None = None
        if dist.get_rank(everyone) == 0:
            try:
                found = {"path": os.fspath(latest) if (latest := self._folder.latest()) is not None else None}
            except CheckpointError as error:
                found = {"error": str(error)}
            except BaseException as error:  # the other ranks wait for it
                found, interrupt = {"error": f"{type(error).__name__}: {error}"}, error
        if has_others(everyone):
            found = conclude(everyone, f"Loading from {self.root}", [], found, operator.itemgetter(0), PATIENCE)
        if interrupt is not None and not isinstance(interrupt, Exception):
            raise interrupt
        if "error" in found:
            raise CheckpointError(found["error"])
        if found["path"] is None:
            return None
        restored = load(found["path"], model, optimizer, **arguments)
        if dist.get_rank(everyone) == 0:
            self._folder.loaded(restored.path)
        return restored

    def _group(self, sharded: ShardedModel) -> dist.ProcessGroup:
        """Return a CPU process group of the model's ranks, used by nothing else because background saves communicate.

        It has torch's timeout for gloo, because a slow disk can take longer than a collective of the model may. Waits
        end within the model's timeout if a process does not answer.
        """
        ranks = tuple(dist.get_process_group_ranks(sharded.everyone))
        works = ranks in self._groups and self._groups[ranks] not in compat.broken_groups()
        if has_others(sharded.everyone):  # a rank that has left an earlier save has broken its connections
            works = conclude(
                sharded.everyone, "Connections of saves", [], works, all, compat.timeout_of(sharded.everyone)
            )
        if not works:
            self._groups[ranks] = compat.new_group(ranks, backend="gloo")
        return self._groups[ranks]


@dataclass(frozen=True)
class _Save:
    """A save in progress."""

    state: dict[str, Any]
    writer: PublishingWriter
    group: dist.ProcessGroup
    path: Path
    directory: Path
    until_done: contextlib.ExitStack

    def failed(self, error: CheckpointException | RuntimeError) -> CheckpointError:
        """Return the error to raise, on every rank. The first rank removes what was written, to free the space."""
        if dist.get_rank(self.group) == 0:
            with contextlib.suppress(OSError):  # the next save removes what cannot be removed now
                remove(self.directory)
        what = f"Saving {self.path} failed; earlier checkpoints are as they were"
        if isinstance(error, CheckpointException):
            return as_checkpoint_error(error, what)
        return CheckpointError(f"{what}. {error}")


@contextlib.contextmanager
def _in_step(group: dist.ProcessGroup) -> Iterator[None]:
    """Context for collectives of a save. An error or interrupt of this rank alone ends the waits of the others."""
    try:
        yield
    except (CheckpointException, CheckpointError):  # of all ranks
        raise
    except BaseException as error:
        if has_others(group):
            watchdog.failed_waits.abandon(group, error)
        raise


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
        refused=sharded.lineage.refused,
        optimizer=optimizer_name(optimizer) if optimizer is not None else None,
    )
