"""Checkpoints of unusual models, folders and programs: what is stored is what is loaded, or there is an error."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zoo
from parity import raises_everywhere
from pool import on_ranks, shared_folder
from test_checkpoint import make, train
from torch import Tensor, nn

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import CheckpointError, Checkpoints, load
from mfsdp_compile.checkpoint import folder as folder_module
from mfsdp_compile.checkpoint import saving as saving_module
from mfsdp_compile.checkpoint.manifest import FileRecord, Manifest, read_manifest


def fill(model: nn.Module, start: float) -> dict[str, float]:
    """Give every parameter and buffer a different value. Returns the values by name."""
    values = {}
    with torch.no_grad():
        for number, (name, value) in enumerate([*model.named_parameters(), *model.named_buffers()]):
            value.fill_(start + number)
            values[name] = start + number
    return values


def held(model: nn.Module) -> dict[str, float]:
    found = {}
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert (whole == whole.flatten()[0]).all()
        found[name] = whole.flatten()[0].item()
    return found


# -- names -------------------------------------------------------------------------------------------------------------


class Inner(nn.Module):
    """Parameter names that look like those of a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.module = nn.Linear(4, 4, bias=False)
        self.model = nn.Linear(4, 4, bias=False)
        self.extra_projection = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.extra_projection(self.model(self.module(x @ self.weight))).pow(2).mean()


@pytest.mark.parametrize("with_optimizer", [False, True])
@on_ranks(2)
def test_names_that_look_like_a_wrappers(with_optimizer: bool) -> None:
    def build() -> tuple[Any, Any]:
        model = fully_shard_model(parity.build(Inner), fsdp_unit_modules=[nn.Linear])
        optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters())) if with_optimizer else None
        return model, optimizer

    model, optimizer = build()
    if optimizer is not None:
        model(torch.randn(2, 4)).backward()
        optimizer.step()
    values = fill(model, 1)
    folder = shared_folder()
    path = Checkpoints(folder).save(0, model, optimizer)
    fresh, its = build()
    restored = load(path, fresh, its)
    assert held(fresh) == values
    assert restored.left_out == restored.kept == ()


@pytest.mark.parametrize("outer", ["", "model", "module"])
@on_ranks(2)
def test_plain_checkpoints_under_any_name(outer: str) -> None:
    plain = parity.build(Inner)
    values = {f"module.{name}": value for name, value in fill(plain, 5).items()}
    folder = shared_folder()
    state = {f"{outer}.{name}" if outer else name: value for name, value in plain.state_dict().items()}
    dcp.save(state, checkpoint_id=folder)
    model = fully_shard_model(parity.build(Inner, 1), fsdp_unit_modules=[nn.Linear])
    load(folder, model)
    assert held(model) == values


class Tied(nn.Module):
    def __init__(self, first: str, second: str, tied: bool = True) -> None:
        super().__init__()
        setattr(self, first, nn.Linear(4, 4, bias=False))
        setattr(self, second, nn.Linear(4, 4, bias=False))
        if tied:
            getattr(self, second).weight = getattr(self, first).weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)).pow(2).mean()


@on_ranks(2)
def test_tied_parameters_under_another_first_name() -> None:
    def build(*arguments: Any) -> tuple[Any, Any]:
        model = fully_shard_model(Tied(*arguments), check_values=False, fsdp_unit_modules=[])
        return model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))

    model, optimizer = build("a", "b")
    model(torch.ones(2, 4)).backward()
    optimizer.step()
    folder = shared_folder()
    path = Checkpoints(folder).save(0, model, optimizer)
    other, its = build("b", "a")
    load(path, other, its)
    (mine,), (theirs,) = optimizer.state_dict()["state"].values(), its.state_dict()["state"].values()
    assert torch.equal(mine["exp_avg"].full_tensor(), theirs["exp_avg"].full_tensor())

    untied, _ = build("a", "b", False)
    fill(untied, 1)
    path = Checkpoints(folder).save(1, untied)
    before = [param.full_tensor() for param in model.parameters()]
    with raises_everywhere(CheckpointError, "are of one parameter here", "Nothing was loaded"):
        load(path, model)
    assert all(map(torch.equal, before, [param.full_tensor() for param in model.parameters()]))
    assert load(path, model, allow_unexpected="model.b.weight").left_out == ("model.b.weight",)
    assert set(held(model).values()) == {1.0}


# -- extra state of modules --------------------------------------------------------------------------------------------


class Keeper(zoo.Plain):
    """Extra state of every kind, as in quantized layers."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.kind = "tensor"

    def get_extra_state(self) -> Any:
        return {
            "tensor": torch.full((self.count,), self.count, dtype=torch.uint8),
            "dict": {"count": self.count, "scales": [torch.full((2,), float(self.count))], "nested": {"a": 1}},
            "int": self.count,
        }[self.kind]

    def set_extra_state(self, state: Any) -> None:
        if isinstance(state, Tensor):
            assert (state == len(state)).all()
            self.count = len(state)
        elif isinstance(state, dict):
            assert state["nested"] == {"a": 1}
            assert state["scales"][0].tolist() == [state["count"]] * 2
            self.count = state["count"]
        else:
            self.count = state


@pytest.mark.parametrize("kind", ["tensor", "dict", "int"])
@on_ranks(2)
def test_extra_state_of_modules(kind: str) -> None:
    def build(count: int) -> Any:
        model = parity.build(Keeper)
        model.kind, model.count = kind, count
        return fully_shard_model(model, fsdp_unit_modules=[zoo.Block])

    folder = shared_folder()
    path = Checkpoints(folder).save(0, build(5))
    fresh = build(3)
    load(path, fresh)
    assert fresh.module.count == 5


class Hooked(nn.Module):
    """A module whose state dict differs from its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(3))
        self.register_state_dict_post_hook(self._double)

    @staticmethod
    def _double(module: Any, state: Any, prefix: str, metadata: Any) -> None:
        state[f"{prefix}mean"] = state[f"{prefix}mean"] * 2

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if f"{prefix}mean" in state:
            state[f"{prefix}mean"] = state[f"{prefix}mean"] / 2
        super()._load_from_state_dict(state, prefix, *rest)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mean()


@on_ranks(2)
def test_state_dict_hooks() -> None:
    model = fully_shard_model(Hooked(), check_values=False, fsdp_unit_modules=[])
    model.module.mean.fill_(5)
    folder = shared_folder()
    path = Checkpoints(folder).save(0, model)
    fresh = fully_shard_model(Hooked(), check_values=False, fsdp_unit_modules=[])
    load(path, fresh)
    assert fresh.module.mean.tolist() == [5, 5, 5]


# -- optimizers --------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "nadam": torch.optim.NAdam,
    "asgd": torch.optim.ASGD,
    "amsgrad": lambda params: torch.optim.AdamW(params, lr=0.01, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.long_unless("*-sgd", "*-amsgrad")
@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_any_optimizer_goes_on_exactly(name: str) -> None:
    """Any optimizer continues exactly from a checkpoint.

    The model has a parameter that is a single number, like the state of some optimizers.
    """

    def build() -> tuple[Any, Any]:
        model, _ = make()
        trainable = [param for param in model.parameters() if param.requires_grad]
        return model, fully_shard_optimizer(OPTIMIZERS[name](trainable))

    model, optimizer = build()
    train(model, optimizer, range(2))
    folder = shared_folder()
    path = Checkpoints(folder).save(2, model, optimizer)
    expected = train(model, optimizer, range(2, 4))
    fresh, its = build()
    load(path, fresh, its)
    assert train(fresh, its, range(2, 4)) == expected
    its.load_state_dict(optimizer.state_dict())
    assert train(model, optimizer, range(4, 5)) != []


@on_ranks(2)
def test_state_of_another_optimizer_is_refused() -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    folder = shared_folder()
    path = Checkpoints(folder).save(1, model, optimizer)
    fresh, _ = make()
    other = fully_shard_optimizer(torch.optim.SGD([p for p in fresh.parameters() if p.requires_grad], lr=0.5))
    with raises_everywhere(CheckpointError, "class AdamW", "class SGD", "Nothing was loaded"):
        load(path, fresh, other)
    assert other.param_groups[0]["lr"] == 0.5
    load(path, fresh, allow_unexpected="optimizer.*")


@on_ranks(2)
def test_group_settings_of_any_kind() -> None:
    def build(tag: int) -> tuple[Any, Any]:
        model, _ = make()
        groups = [{"params": [p for p in model.parameters() if p.requires_grad], "tags": {"depth": tag, "of": ["a"]}}]
        return model, fully_shard_optimizer(torch.optim.AdamW(groups))

    model, optimizer = build(1)
    train(model, optimizer, range(1))
    folder = shared_folder()
    path = Checkpoints(folder).save(1, model, optimizer)
    fresh, its = build(2)
    load(path, fresh, its)
    (group,) = its.param_groups
    assert group["tags"] == {"depth": 1, "of": ["a"]}
    assert not [key for key in group if "." in key]


# -- folders and programs ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_the_program_changes_its_directory() -> None:
    model, _ = make()
    before = Path.cwd()
    folder = shared_folder()
    try:
        os.chdir(folder)
        checkpoints = Checkpoints("runs")
        os.chdir("/")
        path = checkpoints.save(1, model)
    finally:
        os.chdir(before)
    assert path == Path(folder).absolute() / "runs" / "step-00000001"
    assert Checkpoints(Path(folder) / "runs").latest() == path


@on_ranks(2, timeout=60)
def test_ranks_that_do_not_see_one_folder() -> None:
    model, _ = make()
    saving_module.PATIENCE, before = 0.5, saving_module.PATIENCE
    try:
        folder = shared_folder()
        mine = Path(folder) / str(dist.get_rank())
        (mine / ".saving-step-00000000").mkdir(parents=True)  # as if a job on the other machine had created it
        checkpoints = Checkpoints(mine)
        with raises_everywhere(RuntimeError, "that other ranks have written", "All ranks must see the same folder"):
            if dist.get_rank():
                (mine / ".saving-step-00000000").mkdir(exist_ok=True)
            _save_to(checkpoints, mine, model)
        assert checkpoints.latest() is None
    finally:
        saving_module.PATIENCE = before


def _save_to(checkpoints: Checkpoints, mine: Path, model: Any) -> None:
    """Save to this rank's own disk. The path that ranks get from the first one leads to a different disk on each."""
    real = saving_module.PublishingWriter.__init__

    def elsewhere(self: Any, directory: Path, *rest: Any) -> None:
        real(self, mine / directory.name, *rest)

    saving_module.PublishingWriter.__init__ = elsewhere  # type: ignore[method-assign]
    try:
        checkpoints.save(0, model)
    finally:
        saving_module.PublishingWriter.__init__ = real  # type: ignore[method-assign]


@pytest.mark.parametrize("step", [-1, 2.0, "7", None])
@on_ranks(2)
def test_steps_are_whole_numbers(step: Any) -> None:
    model, _ = make()
    folder = shared_folder()
    checkpoints = Checkpoints(folder)
    with raises_everywhere((TypeError, ValueError)):  # type: ignore[arg-type]
        checkpoints.save(step, model)
    checkpoints.save(torch.tensor(3), model)  # type: ignore[arg-type]
    assert read_manifest(checkpoints.latest()).step == 3  # type: ignore[arg-type, union-attr]


@on_ranks(2, timeout=60)
def test_an_old_checkpoint_with_a_damaged_manifest() -> None:
    model, _ = make()
    folder = shared_folder()
    checkpoints = Checkpoints(folder, keep=2)
    first = checkpoints.save(1, model)
    second = checkpoints.save(2, model)
    dist.barrier()
    if dist.get_rank() == 0:
        (first / "manifest.json").write_text("{")
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert checkpoints.all() == [second]
    assert checkpoints.load(model).step == 2
    third = checkpoints.save(3, model)
    assert checkpoints.latest() == third
    assert first.is_dir()  # its content is unknown
    dist.barrier()
    if dist.get_rank() == 0:
        (third / "manifest.json").write_text("{")
    dist.barrier()
    with raises_everywhere(CheckpointError, "step-00000003", "damaged"):
        checkpoints.load(model)
    assert load(third, model, verify=False).step is None
    fourth = checkpoints.save(4, model)
    assert checkpoints.load(model).path == fourth


@on_ranks(2, timeout=60)
def test_a_manifest_that_cannot_be_read_is_an_error_on_all_ranks() -> None:
    model, _ = make()
    folder = shared_folder()
    path = Checkpoints(folder).save(1, model)
    dist.barrier()
    if dist.get_rank() == 0:
        (path / "manifest.json").unlink()
        (path / "manifest.json").mkdir()
    dist.barrier()
    with raises_everywhere(CheckpointError, "step-00000001", "is not a regular file"):
        Checkpoints(folder).load(model)


@on_ranks(2)
def test_a_published_checkpoint_is_no_failure() -> None:
    """If housekeeping fails after the rename that publishes a checkpoint, the save succeeds with a warning."""
    model, _ = make()
    folder = shared_folder()
    checkpoints = Checkpoints(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        (Path(folder) / "latest").mkdir()  # cannot be replaced by a file
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = checkpoints.save(1, model)
    with pytest.raises(CheckpointError, match=r"does not name a checkpoint: .* is not a regular file"):
        checkpoints.latest()
    dist.barrier()
    if dist.get_rank() == 0:
        (Path(folder) / "latest").rmdir()
    dist.barrier()
    assert checkpoints.latest() == path
    assert any("is complete" in str(w.message) for w in caught) == (dist.get_rank() == 0)


def test_processes_forked_while_a_folder_is_locked_do_not_keep_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a process has the file open, too, and closing it elsewhere does not end the lock."""
    monkeypatch.setattr(folder_module, "LOCK_PATIENCE", 0.5)
    with folder_module.locked(tmp_path):
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
    try:
        with folder_module.locked(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@on_ranks(2, timeout=60)
def test_processes_forked_during_a_save_do_not_keep_the_lock() -> None:
    model, _ = make()
    folder = shared_folder()
    checkpoints = Checkpoints(folder)
    done = checkpoints.save_async(1, model)
    child = os.fork()  # as a data loader forks
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        done.result()
        checkpoints.save(2, model)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@on_ranks(2)
def test_two_models_of_the_same_shapes() -> None:
    """Two models of the same shapes, in two dtypes, can be saved in turns.

    torch's cache of plans would mix them up.
    """
    models = [
        fully_shard_model(
            parity.build(zoo.Plain).to(dtype),
            fsdp_unit_modules=[zoo.Block],
            mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=main),
        )
        for dtype, main in ((torch.float32, torch.float32), (torch.bfloat16, None))
    ]
    folder = shared_folder()
    for _ in range(2):
        for number, model in enumerate(models):
            checkpoints = Checkpoints(Path(folder) / str(number))
            path = checkpoints.save(1, model)
            load(path, model)


@on_ranks(2)
def test_without_looking_at_digests() -> None:
    model, optimizer = make()
    folder = shared_folder()
    path = Checkpoints(folder).save(7, model, optimizer, extra={"a": 1} if dist.get_rank() == 0 else None)
    restored = load(path, model, optimizer, verify=False)
    assert (restored.step, restored.extra, restored.generators) == (7, {"a": 1}, True)
    dist.barrier()
    if dist.get_rank() == 0:
        body = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps({**body, "step": 8}))
    dist.barrier()
    restored = load(path, model, optimizer, verify=False)
    assert (restored.step, restored.extra, restored.generators) == (None, {"a": 1}, True)


@on_ranks(2)
def test_async_save_of_torch() -> None:
    """torch's asynchronous save stores the values from when it began.

    The parameters include some without rows on a rank, 0-d ones, and several in one flat tensor, with optimizer state.
    """

    class Summed(zoo.Bag):
        def forward(self, x: Tensor) -> Tensor:
            return sum(((getattr(self, name) * x) ** 2).sum() for name in zoo.Bag.SHAPES)  # type: ignore[return-value]

    def build(strategy: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fully_shard_model(parity.build(Summed), zero_dp_strategy=strategy)
        return model, fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.tensor(1.0 + dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()

    apart = dist.new_group()  # its thread communicates while the model trains
    for strategy in (0, 1, 3):
        model, optimizer = build(strategy)
        for _ in range(2):  # the second save reuses memory of the first
            step(model, optimizer)
            saved = {name: param.full_tensor() for name, param in model.named_parameters()}
            moments = {
                name: optimizer.state[param]["exp_avg"].full_tensor() for name, param in model.named_parameters()
            }
            folder = shared_folder()
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            pending = dcp.async_save(state, checkpoint_id=folder, process_group=apart)
            step(model, optimizer)
            pending.result()
        fresh, its_optimizer = build(strategy)
        step(fresh, its_optimizer)
        state = {"model": fresh.state_dict(), "optimizer": its_optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        fresh.load_state_dict(state["model"])
        its_optimizer.load_state_dict(state["optimizer"])
        for name, param in fresh.named_parameters():
            assert torch.equal(param.full_tensor(), saved[name]), name
            assert torch.equal(its_optimizer.state[param]["exp_avg"].full_tensor(), moments[name]), name


@on_ranks(2)
def test_a_load_waits_for_the_save_in_progress() -> None:
    root = shared_folder()
    model, optimizer = make()
    train(model, optimizer, range(1))
    checkpoints = Checkpoints(root)
    patch, write = pytest.MonkeyPatch(), saving_module.PublishingWriter.write_data

    def slow(self: Any, plan: Any, planner: Any) -> Any:
        time.sleep(1)
        return write(self, plan, planner)

    patch.setattr(saving_module.PublishingWriter, "write_data", slow)
    checkpoints.save_async(3, model, optimizer)
    restored = checkpoints.load(model, optimizer)
    patch.undo()
    assert restored is not None
    assert restored.step == 3


def test_a_file_that_is_cut_short_has_not_arrived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__1_0.distcp").write_bytes(b"half")
    record = FileRecord(8, "")
    monkeypatch.setattr(saving_module, "PATIENCE", 0.05)
    writer = saving_module.PublishingWriter(tmp_path, Manifest(0, 0, "", 2, "", "", {}, rng=False), lambda: None)
    with pytest.raises(RuntimeError, match=r"lacks __1_0\.distcp that other ranks have written"):
        writer._check_arrived({"__1_0.distcp": record})
