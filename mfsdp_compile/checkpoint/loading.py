"""Reading a checkpoint into a sharded model and its optimizer, from any program and any number of ranks.

A load has phases. An error on any rank, in any of them, is an error on all ranks::

    plan       compare names, shapes and dtypes; every tensor is covered exactly once, by files that are long enough
    read       what is not read in place: the optimizer's state, the program's data, generators
    check      that what is read in place can be read, as what it is
    agree      all ranks have come this far
    optimizer  takes the new state, and keeps the old one until all ranks have done so
    agree
    install    read weights in place
    agree
    finish     drop gradients, set generators

Before weights are installed, an error leaves weights, optimizer and generators as they were. After that, only
the machine can fail, or code of the program (hooks and ``set_extra_state`` of modules): the error then says that the
load ended halfway.

Memory: as much as the optimizer's new state on this rank, beside its old one, and one chunk of a tensor. Weights take
none.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from mfsdp_compile.runtime.optim.state import check_holds_own_state, load_named, optimizer_name
from mfsdp_compile.runtime.ranks.agreement import agree, errors_for_all
from mfsdp_compile.sharded_module import ShardedModule, unwrapped

from .dcp_reader import CheckpointReader, SafeLoadPlanner, SafeReader
from .errors import CheckpointError, as_causes
from .extra_state import GENERATORS, check_generators, extra_from_tensor, set_generators
from .load_plan import LoadPlan
from .manifest import Manifest, damaged_files, read_manifest

MOST_CHARACTERS = 400
"""Characters of an error that are kept for later warnings."""

PATIENCE = timedelta(hours=1)
"""Time for the slowest rank to check its share of the files."""


@dataclass(frozen=True)
class Restored:
    """What was loaded.

    Args:
        path: The checkpoint.
        step: Training step. None: the checkpoint has no manifest.
        extra: The program's data, as given to the save.
        generators: Whether random number generators were restored. They are if the number of ranks is the same.
        world_size: Number of ranks that wrote it. None: the checkpoint has no manifest.
        left_out: Names in the checkpoint that were not loaded.
        kept: Names that kept their values, because the checkpoint does not have them, or has them in another shape.
        cast: Names with a different dtype here.
    """

    path: Path
    step: int | None
    extra: Any
    generators: bool
    world_size: int | None
    left_out: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()


def check_is_one_optimizer(optimizer: object, caller: str) -> None:
    """Check that ``optimizer`` has the interface of an optimizer, or is None.

    Raises:
        TypeError: It has not.
    """
    if optimizer is not None and not (hasattr(optimizer, "param_groups") and hasattr(optimizer, "state_dict")):
        raise TypeError(
            f"{caller} takes one optimizer, got a {type(optimizer).__name__}. For several, use a folder for each: "
            "Checkpoints('runs/a-muon') with the model and the first, Checkpoints('runs/a-adamw') with the model and "
            "the second."
        )


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    verify: bool | None = None,
    allow_missing: str | Sequence[str] = (),
    allow_unexpected: str | Sequence[str] = (),
    allow_reshaped: str | Sequence[str] = (),
    allow_cast: str | Sequence[str] = (),
    generators: bool = True,
) -> Restored:
    """Load a checkpoint of any world size, strategy and mesh shape. Collective.

    Accepts checkpoints of this package, and those that FSDP2, DDP or a plain model wrote with
    ``torch.distributed.checkpoint``. Runs no code that the checkpoint may contain.

    Args:
        path: Folder with a ``.metadata`` file.
        model: Model to load into, in place. Its gradients are dropped.
        optimizer: Optimizer to load into, in place, extended or not; it may be new. None: the checkpoint's optimizer
            state is ignored.
        verify: Read every file first, and compare it with the manifest. None: if there is a manifest, or else compare
            what is loaded with the checksums of its archives.
        allow_missing: Patterns (``*`` and ``?``) of names that may be missing and then keep their values:
            ``"model.head.*"``, ``"optimizer.head.*"``.
        allow_unexpected: Patterns of names in the checkpoint that may be ignored.
        allow_reshaped: Patterns of names that may have another shape; they keep their values.
        allow_cast: Patterns of names that may have another dtype; their values are rounded.
        generators: Also set the random number generators, if the number of ranks is the same.

    Returns:
        The step and everything else that was loaded.

    Raises:
        CheckpointError: If, on this rank, something is missing, damaged or does not match. The message lists all of it.
            Nothing is loaded.
        RuntimeError: If another rank failed.
        ValueError: If the optimizer holds others whose state it does not load. Nothing is loaded.
    """
    directory = Path(path)
    model = unwrapped(model, "load")
    everyone = model.sharded.everyone
    loads: list[_Load] = []

    def prepare() -> list[str]:
        check_is_one_optimizer(optimizer, "load")
        given = {
            "missing": allow_missing,
            "unexpected": allow_unexpected,
            "reshaped": allow_reshaped,
            "cast": allow_cast,
        }
        allowed = {kind: [held] if isinstance(held, str) else list(held) for kind, held in given.items()}
        if optimizer is not None:
            check_holds_own_state(optimizer)
        manifest = _manifest_of(directory, verify)
        _check_files(directory, manifest, verify, everyone)
        try:
            loads.append(_Load(directory, model, optimizer, allowed, manifest, generators, verify))
            return loads[0].prepare()
        except CheckpointError:
            raise
        except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            raise CheckpointError(
                f"{directory} does not match its .metadata ({type(error).__name__}: {error}). Nothing was loaded."
            ) from error

    try:
        agree(everyone, f"Loading {directory}", prepare, PATIENCE)
    except Exception as error:
        with contextlib.suppress(CheckpointError):
            lineage = model.sharded.lineage
            if (refused := read_manifest(directory)) is not None and not lineage.has(refused.run):
                in_words = "".join(filter(str.isprintable, " ".join(str(error).split())))[:MOST_CHARACTERS]
                lineage.refused[refused.run] = f"{directory.name}: {in_words}"
        raise
    (found,) = loads
    try:
        with errors_for_all(everyone, f"Loading {directory}: the optimizer's state", PATIENCE):
            found.fill_optimizer()
    except BaseException:
        found.restore_optimizer()
        raise
    with errors_for_all(everyone, f"Loading {directory}: weights", PATIENCE):
        found.install()
    return found.finish()


def _check_files(directory: Path, manifest: Manifest | None, verify: bool | None, everyone: dist.ProcessGroup) -> None:
    """Compare this rank's share of the files with the manifest.

    Raises:
        CheckpointError: If they differ, or there is no manifest to verify them with.
    """
    if manifest is not None and verify is not False:
        share = sorted(manifest.files)[dist.get_rank(everyone) :: dist.get_world_size(everyone)]
        if found := damaged_files(directory, manifest.files, share):
            raise CheckpointError(
                f"{directory} is damaged: {'; '.join(found)}. Copy it again, or use an earlier one. Nothing was loaded."
            )
    elif verify:
        raise CheckpointError(f"{directory} has no manifest, so it cannot be verified.")


def _manifest_of(directory: Path, verify: bool | None) -> Manifest | None:
    try:
        return read_manifest(directory)
    except CheckpointError:
        if verify is False:
            return None
        raise


class _Load:
    """A load, in its phases. The first ones need no communication.

    Raises:
        CheckpointError: If the checkpoint does not match.
    """

    def __init__(
        self,
        directory: Path,
        model: ShardedModule,
        optimizer: torch.optim.Optimizer | None,
        allowed: Mapping[str, Sequence[str]],
        manifest: Manifest | None,
        generators: bool,
        verify: bool | None,
    ) -> None:
        self._directory = directory
        self._sharded = model.sharded
        self._optimizer = optimizer
        self._manifest = manifest
        self._reader = CheckpointReader(directory)
        self._generators: dict[str, Tensor] = {}
        self._extra: Any = None
        self._state: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        if manifest is not None and verify is not False:
            self._check_is_complete(manifest)
        if (
            optimizer is not None
            and manifest is not None
            and manifest.optimizer not in (None, optimizer_name(optimizer))
        ):
            raise CheckpointError(
                f"{directory} has the state of an optimizer of class {manifest.optimizer}, and cannot be loaded into "
                f"one of class {optimizer_name(optimizer)}. Load it without an optimizer, which then starts over. "
                "Nothing was loaded."
            )
        is_of_class = manifest is not None and manifest.optimizer is not None
        self._plan = LoadPlan(self._reader, model, optimizer, allowed, is_of_class)
        self._sums = manifest is None and verify is None
        ranks = dist.get_world_size(self._sharded.everyone)
        saved_by = manifest.world_size if manifest is not None else len(self._plan.ranks_with_generators)
        self._with_generators = generators and saved_by == ranks

    def _check_is_complete(self, manifest: Manifest) -> None:
        """Raise CheckpointError if the manifest does not list every file that the metadata needs."""
        needed = {".metadata", *(info.relative_path for info in self._reader.metadata.storage_data.values())}
        if unlisted := sorted(needed - set(manifest.files)):
            raise CheckpointError(
                f"{self._directory}: the manifest does not list {', '.join(unlisted[:4])}, so it proves nothing about "
                "the values there. Use another checkpoint; verify=False loads it unverified."
            )

    def prepare(self) -> list[str]:
        """Read everything that is not read in place, and check everything else. Changes nothing.

        Returns:
            Descriptions of what is read, here or on other ranks.
        """
        self._read(self._plan.staged)
        self._plan.check_read()
        self._state = self._plan.optimizer_state()
        self._prepare_extra()
        self._read(self._plan.in_place, only_checks=True)
        return [f"{name}: {key}" for name, key in self._plan.described()]

    def _prepare_extra(self) -> None:
        """Read what belongs neither to the model nor to the optimizer."""
        reader, where = self._reader, f"{self._directory} (extra)"
        if self._plan.has_extra:
            try:
                self._extra = extra_from_tensor(reader.tensor("extra"), where)
            except CheckpointError:
                raise
            except Exception as error:  # torch does not document what damaged archives raise
                raise CheckpointError(
                    f"{where} could not be read ({type(error).__name__}: {error}). Nothing was loaded."
                ) from error
        if not self._with_generators or not any(key.startswith("rng.") for key in reader):
            return
        prefix = f"rng.{dist.get_rank(self._sharded.everyone)}."
        found = {key.removeprefix(prefix): key for key in reader if key.startswith(prefix)}
        try:
            for name in (*GENERATORS, *(("cuda",) if "cuda" in found else ())):
                expected = GENERATORS.get(name)
                if name not in found or not reader.is_tensor(found[name]):
                    raise ValueError(f"the state of {name!r} is missing")
                stored = reader.dtype(found[name]), tuple(reader.shape(found[name]))
                if stored != (expected or (torch.uint8, stored[1])):
                    raise ValueError(f"the state of {name!r} is {stored[1]} {stored[0]}")
                self._generators[name] = reader.tensor(found[name])
            check_generators(self._generators)
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{self._directory}: the random number generators in {prefix}* cannot be restored: {error}. "
                "generators=False loads the rest. Nothing was loaded."
            ) from error

    def fill_optimizer(self) -> None:
        """Load the optimizer's state, without dropping the old one."""
        if self._optimizer is not None:
            self._before = {"state": self._optimizer.state, "param_groups": self._optimizer.param_groups}
            try:
                load_named(self._optimizer, self._state)
            except Exception as error:
                raise CheckpointError(
                    f"{self._directory} has state that the {type(self._optimizer).__name__} does not take "
                    f"({type(error).__name__}: {error}). Nothing was loaded."
                ) from error
            self._state = {}

    def restore_optimizer(self) -> None:
        """Restore the optimizer's old state."""
        if self._optimizer is not None:
            vars(self._optimizer).update(self._before)

    def install(self) -> None:
        """Change the weights."""
        self._before = {}
        self._sums = False  # compared before
        try:
            self._plan.load_rest()
            self._read(self._plan.in_place)
        except Exception as error:
            raise CheckpointError(
                f"Loading {self._directory} failed halfway: load another checkpoint. {type(error).__name__}: {error}"
            ) from error

    def finish(self) -> Restored:
        """Continue with the new weights. All ranks have them."""
        sharded, manifest = self._sharded, self._manifest
        names = self._plan.differences.names
        sharded.zero_gradients()  # they belong to other weights
        sharded.grad_sync.microbatches = 0
        if manifest is not None:
            sharded.lineage.take_up((manifest.run, *manifest.continues), manifest.refused)
        sharded.refresh()
        if self._generators:
            set_generators(self._generators)
        return Restored(
            self._directory,
            manifest.step if manifest is not None else None,
            self._extra,
            bool(self._generators),
            manifest.world_size if manifest is not None else None,
            left_out=(*names("unexpected"), *self._plan.others),
            kept=(*names("missing"), *names("reshaped")),
            cast=tuple(names("cast")),
        )

    def _read(self, targets: dict[str, Any], only_checks: bool = False) -> None:
        """Read into ``targets``, by stored key."""
        if not targets:
            return
        reader = SafeReader(self._directory, self._reader, only_checks, sums=self._sums)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*load in a single process")
            try:
                # Every rank knows what it needs; consulting the other ranks takes longer than reading.
                dcp.load(targets, storage_reader=reader, planner=SafeLoadPlanner(), no_dist=True)
            except CheckpointException as error:
                raise CheckpointError("; ".join(as_causes(error))) from error
