"""Checkpoints hold everything that was saved: a load restores it, or is refused by name and has changed nothing."""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from parity import raises_everywhere
from pool import on_ranks, shared_folder
from tampering import Tampered
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from mfsdp_compile import compile_step, declare_optimizer, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.checkpoint import CheckpointError, Checkpoints, full_optimizer_state_dict, full_state_dict, load
from mfsdp_compile.checkpoint.manifest import MANIFEST
from mfsdp_compile.runtime.memory.tensor import RowShardedTensor

Build = Callable[..., torch.optim.Optimizer]


class Net(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(10, 6, bias=False)
        if tied:
            self.c.weight = self.b.weight

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return (self.b(h) * self.c(h).sigmoid()).pow(2).mean()


EXTENDED: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "nothing": lambda optimizer: None,
    "names": lambda optimizer: fully_shard_optimizer(optimizer),
    "numbers": lambda optimizer: fully_shard_optimizer(optimizer, preproc_state_dict_for_dcp_ckpt=False),
    "flat": lambda optimizer: fully_shard_optimizer(optimizer, flat=True),
    "whole": lambda optimizer: fully_shard_optimizer(optimizer, whole=True),
    "compile_step": lambda optimizer: None,
}


def make(
    build: Build, by: str = "names", seed: int = 0, tied: bool = False, net: Callable[[bool], nn.Module] = Net
) -> tuple[Any, torch.optim.Optimizer, Callable[[int], Any]]:
    """Return a model, an optimizer that ``by`` has extended, and a function that takes a step."""
    torch.manual_seed(seed)
    model = fully_shard_model(net(tied), fsdp_unit_modules=[nn.Linear])
    optimizer = build(model.parameters())
    EXTENDED[by](optimizer)
    whole = compile_step(model, optimizer, backend=None) if by == "compile_step" else None

    def step(number: int) -> None:
        batch = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(number))[dist.get_rank() % 2]
        if whole is not None:
            whole(batch)
        else:
            model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    return model, optimizer, step


def adamw(params: Any, lr: float = 0.05) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=lr)


def two_groups(params: Any, cls: Any = torch.optim.SGD, turned: bool = False, **settings: Any) -> torch.optim.Optimizer:
    params = list(params)
    groups = [{"params": [p for p in params if (p.ndim > 1) == matrices], "lr": 0.1 + matrices} for matrices in (0, 1)]
    return cls(groups[::-1] if turned else groups, **settings)  # type: ignore[no-any-return]


def bits(model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """Return weights, state and settings of this rank, to be compared."""

    def plain(value: Any) -> Any:
        value = value.to_local() if hasattr(value, "to_local") else value
        return value.tolist() if isinstance(value, Tensor) else value

    state = [{key: plain(value) for key, value in optimizer.state.get(p, {}).items()} for p in model.parameters()]
    groups = [{key: plain(value) for key, value in g.items() if key != "params"} for g in optimizer.param_groups]
    return [plain(p.detach()) for p in model.parameters()], state, groups  # type: ignore[return-value]


def refuses(path: Path, model: Any, optimizer: Any, *fragments: str, **arguments: Any) -> None:
    """Assert that a load is refused on this rank with these words, and changes nothing."""
    before = bits(model, optimizer)
    with raises_everywhere(RuntimeError, *fragments):
        load(path, model, optimizer, **arguments)
    assert bits(model, optimizer) == before


def on_first(change: Callable[[], Any]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        change()
    dist.barrier()


# -- whoever extended the optimizer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_by", ["compile_step", "nothing", "numbers", "whole"])
@on_ranks(2, timeout=120)
def test_a_checkpoint_does_not_depend_on_what_extended_the_optimizer(saved_by: str) -> None:
    checkpoints = Checkpoints(shared_folder())
    model, optimizer, step = make(adamw, saved_by)
    for number in range(3):
        step(number)
    path = checkpoints.save_async(3, model, optimizer).result()
    entries = [key for key in pickle.loads((path / ".metadata").read_bytes()).state_dict_metadata if "exp_avg" in key]
    assert all(key.startswith("optimizer.state.module.") for key in entries)
    assert len(entries) == 10
    for number in range(3, 5):
        step(number)
    after = full_state_dict(model, rank=None)
    for loaded_by in EXTENDED:
        other, its_optimizer, its_step = make(lambda params: adamw(params, lr=0.5), loaded_by, seed=1)
        restored = checkpoints.load(other, its_optimizer)
        assert restored is not None and not restored.kept and not restored.left_out
        assert its_optimizer.param_groups[0]["lr"] == 0.05
        for number in range(3, 5):
            its_step(number)
        torch.testing.assert_close(full_state_dict(other, rank=None), after, rtol=1e-6, atol=1e-7)


@on_ranks(2)
def test_state_dicts_name_parameters_after_compile_step() -> None:
    """``torch.distributed.checkpoint`` alone loads what it saved; names also fit groups in another order."""
    folder = shared_folder()
    model, optimizer, step = make(lambda params: two_groups(params, torch.optim.AdamW), "compile_step")
    step(0)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    saved = copy.deepcopy(optimizer.state_dict())
    step(1)
    after = full_state_dict(model, rank=None)
    for by in ("compile_step", "names"):
        other, its, its_step = make(lambda params: two_groups(params, torch.optim.AdamW), by, seed=1)
        state = {"model": other.state_dict(), "optimizer": its.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state["model"])
        its.load_state_dict(state["optimizer"])
        its_step(1)
        torch.testing.assert_close(full_state_dict(other, rank=None), after, rtol=0, atol=0)
    for by in ("compile_step", "numbers"):
        other, its, _ = make(lambda params: two_groups(params, torch.optim.AdamW, turned=True), by)
        its.load_state_dict(copy.deepcopy(saved))
        assert [group["lr"] for group in its.param_groups] == [1.1, 0.1]
        assert all(its.state[p]["exp_avg"].shape == p.shape for p in other.parameters())


@on_ranks(2)
def test_numbers_are_refused() -> None:
    """Which parameter a number means depends on the program that saved it."""
    folder = shared_folder()
    model, optimizer, step = make(adamw, "nothing")
    step(0)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    refuses(Path(folder), model, optimizer, "numbers the optimizer's parameters")
    load(folder, model)


# -- settings of groups ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_settings_of_optimizers_without_state_are_restored() -> None:
    checkpoints = Checkpoints(shared_folder())
    model, optimizer, step = make(lambda params: two_groups(params, momentum=0.0))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step(0)
    schedule.step()
    path = checkpoints.save(1, model, optimizer)
    for by in ("nothing", "names", "compile_step"):
        other, its, _ = make(lambda params: two_groups(params, lr=9.0, turned=True), by)
        load(path, other, its)
        assert [(group["lr"], group["initial_lr"]) for group in its.param_groups] == [(0.55, 1.1), (0.05, 0.1)]
    other, its, _ = make(lambda params: torch.optim.SGD(params, lr=9.0))
    refuses(path, other, its, "holds parameters of the groups [0, 1]")
    other, its, _ = make(lambda params: torch.optim.SGD([p for p in params if p.ndim > 1], lr=9.0))
    refuses(path, other, its, "unexpected", "optimizer.a.bias")
    on_first(lambda: (path / MANIFEST).unlink())
    other, its, _ = make(adamw)
    refuses(path, other, its, "missing (allow_missing): optimizer.a.weight")


@on_ranks(2)
def test_settings_by_parameter_are_restored() -> None:
    """torch's helper writes them with ``flatten_optimizer_state_dict=True``."""
    folder = shared_folder()
    model, optimizer, step = make(lambda params: two_groups(params, torch.optim.AdamW), "nothing")
    step(0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model.module, optimizer, options=options)
    dcp.save({"model": model.module.state_dict(), "optimizer": state}, checkpoint_id=folder)
    other, its, _ = make(lambda params: two_groups(params, torch.optim.AdamW, lr=3.0, turned=True), seed=1)
    load(folder, other, its)
    assert [group["lr"] for group in its.param_groups] == [1.1, 0.1]
    other, its, _ = make(adamw)
    refuses(Path(folder), other, its, "so it has no single learning rate")


# -- state of another shape --------------------------------------------------------------------------------------------

STATE = "optimizer.state.module.a.weight."


def adafactor(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(params, lr=0.05)


OTHER_SHAPES: dict[str, tuple[Build, Callable[[Tampered], Any], str]] = {
    "empty": (adamw, lambda t: t.put_tensor(STATE + "step", torch.zeros(0)), "a.weight.step ((0,) there, () here)"),
    "step": (adamw, lambda t: t.put_tensor(STATE + "step", torch.ones(10, 6)), "step ((10, 6) there, () here)"),
    "row": (adafactor, lambda t: t.put_tensor(STATE + "row_var", torch.ones(5, 1)), "((5, 1) there, (10, 1) here)"),
    "turned": (adafactor, lambda t: t.put_tensor(STATE + "col_var", torch.ones(6, 1)), "((6, 1) there, (1, 6) here)"),
    "number": (adafactor, lambda t: t.put_tensor(STATE + "col_var", torch.ones(())), "(() there, (1, 6) here)"),
}


@on_ranks(2, timeout=120)
def test_state_of_another_shape_is_refused() -> None:
    root = shared_folder()
    for build in (adamw, adafactor):
        model, optimizer, step = make(build)
        step(0)
        path = Checkpoints(Path(root) / build.__name__).save(1, model, optimizer)
        load(path, model, optimizer)
        for kind, (its, change, words) in OTHER_SHAPES.items():
            if its is not build:
                continue
            copied = Path(root) / f"{kind}-copy"

            def tamper(change: Any = change, copied: Path = copied, path: Path = path) -> None:
                tampered = Tampered(path, copied)
                change(tampered)
                tampered.seal()

            on_first(tamper)
            refuses(copied, model, optimizer, "of another shape (allow_reshaped)", words)
            for fresh in ("nothing", "compile_step"):
                other, its_optimizer, _ = make(build, fresh, seed=1)
                refuses(copied, other, its_optimizer, words)
    restored = load(copied, model, optimizer, allow_reshaped="optimizer.a.weight.*")
    assert not optimizer.state.get(model.module.a.weight)  # starts over
    assert "optimizer.a.weight.col_var" in restored.kept
    step(1)


@on_ranks(2)
def test_state_dicts_of_another_shape_are_refused() -> None:
    model, optimizer, step = make(adamw)
    step(0)
    before, state = bits(model, optimizer), optimizer.state_dict()
    for name, key, value in (("a.weight", "exp_avg", torch.ones(6)), ("b.bias", "step", torch.ones(3))):
        spoilt = copy.deepcopy(state)
        spoilt["state"][f"module.{name}"][key] = value
        with raises_everywhere(ValueError, f"state {key!r} of shape", name):
            optimizer.load_state_dict(spoilt)
        assert bits(model, optimizer) == before


# -- ties --------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_weights_and_moments_of_tied_parameters_come_from_one_name() -> None:
    root = shared_folder()
    model, optimizer, step = make(adamw)
    step(0)
    path = Checkpoints(root).save(1, model, optimizer)
    tied, its, its_step = make(adamw, tied=True)
    refuses(path, tied, its, "'model.b.weight' and 'model.c.weight'", "different values", "Nothing was loaded")
    refuses(path, tied, its, "optimizer.b.weight.exp_avg", "different", allow_unexpected="model.c.weight")
    restored = load(path, tied, its, allow_unexpected=["model.c.weight", "optimizer.c.weight.*"])
    assert "optimizer.c.weight.exp_avg" in restored.left_out
    for key, there in (("exp_avg", optimizer), ("exp_avg_sq", optimizer)):
        mine, original = its.state[tied.module.b.weight][key], there.state[model.module.b.weight][key]
        assert torch.equal(mine.full_tensor(), original.full_tensor())
    assert torch.equal(tied.module.b.weight.full_tensor(), model.module.b.weight.full_tensor())
    its_step(1)
    path = Checkpoints(root).save(2, tied, its)
    refuses(path, model, optimizer, "missing (allow_missing): optimizer.c.weight")  # tied there, not here


# -- before the first step ---------------------------------------------------------------------------------------------


class Averaged(torch.optim.Optimizer):
    """Its state begins with the parameter's values."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["slow"] = p.detach().clone()
                state["slow"].add_(p.grad, alpha=-group["lr"])
                p.lerp_(state["slow"], 0.5)


def transformers_adafactor(params: Any) -> torch.optim.Optimizer:
    transformers = pytest.importorskip("transformers")
    return transformers.Adafactor(params, lr=0.05, scale_parameter=False, relative_step=False)  # type: ignore[no-any-return]


def dampened(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5)


@on_ranks(2, timeout=120)
def test_state_before_the_first_step_loads_as_none() -> None:
    """accelerate loads ``optimizer.state_dict()`` back before the first step, and step 0 can be saved."""
    root = Path(shared_folder())
    for build in (adafactor, transformers_adafactor, Averaged, dampened):
        ends = []
        for way in ("nothing", "reload", "copy", "checkpoint", "dcp"):
            model, optimizer, step = make(build)
            if way in ("reload", "copy"):
                state = optimizer.state_dict()
                optimizer.load_state_dict(copy.deepcopy(state) if way == "copy" else state)
            elif way == "checkpoint":
                load(Checkpoints(root / build.__name__).save(0, model, optimizer), model, optimizer)
            elif way == "dcp":
                dcp.save({"o": optimizer.state_dict()}, checkpoint_id=root / f"{build.__name__}-dcp")
                state = {"o": optimizer.state_dict()}
                dcp.load(state, checkpoint_id=root / f"{build.__name__}-dcp")
                optimizer.load_state_dict(state["o"])
            assert not any(optimizer.state.values()), (build.__name__, way)
            for number in range(2):
                step(number)
            ends.append(full_state_dict(model, rank=None))
        for end in ends[1:]:
            torch.testing.assert_close(end, ends[0], rtol=0, atol=0)


@declare_optimizer("elementwise")
class Sums(torch.optim.Optimizer):
    """Keeps one sum of gradients for each element, and counts no steps."""

    def __init__(self, params: Any, key: str = "sums") -> None:
        super().__init__(params, {"lr": 0.1})
        self.key = key

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            sums = self.state[param].setdefault(self.key, torch.zeros_like(param))
            param.sub_(sums.mul_(0.9).add_(param.grad), alpha=0.1)


class Spare(Net):
    """Has a part that no forward uses."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__(tied)
        self.spare = nn.Linear(6, 5)


def frozen(tied: bool) -> nn.Module:
    net = Spare(tied)
    net.spare.requires_grad_(False)
    return net


@on_ranks(2, timeout=120)
def test_state_that_counts_no_steps_is_that_of_the_same_parameters_on_all_ranks() -> None:
    """Also where a rank has no rows of a parameter, and no matter how the state is called."""
    root = Path(shared_folder())
    for number, (build, by) in enumerate(STEPLESS):
        model, optimizer, step = make(build, by, net=Spare)
        step(0)
        path = Checkpoints(root / str(number)).save(1, model, optimizer)
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=root / f"{number}-dcp")
        saved = copy.deepcopy(optimizer.state_dict())
        step(1)
        after = full_state_dict(model, rank=None)
        for way in ("checkpoint", "dcp", "copy"):
            other, its, its_step = make(build, by, seed=1, net=Spare)
            load(path, other, its if way == "checkpoint" else None)
            if way == "copy":
                its.load_state_dict(saved)
            elif way == "dcp":
                state = {"optimizer": its.state_dict()}
                dcp.load(state, checkpoint_id=root / f"{number}-dcp")
                its.load_state_dict(state["optimizer"])
            full_optimizer_state_dict(its)  # which gathers the same state on all ranks
            its_step(1)
            torch.testing.assert_close(full_state_dict(other, rank=None), after, rtol=0, atol=0)
    model, optimizer, step = make(Sums, "whole", net=frozen)
    step(0)
    path = Checkpoints(root / "frozen").save(1, model, optimizer)
    other, its, _ = make(Sums, "whole", net=Spare)
    refuses(path, other, its, "missing (allow_missing): optimizer.spare")


class Several(torch.optim.Optimizer):
    """Holds two optimizers, and saves the state of neither."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        self.parts = [adamw(params[:2]), adamw(params[2:])]
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for part in self.parts:
            part.step()


@on_ranks(2)
def test_state_of_optimizers_inside_of_another_is_not_lost() -> None:
    root = shared_folder()
    model, optimizer, step = make(adamw)
    step(0)
    path = Checkpoints(root).save(1, model, optimizer)
    on_first(lambda: (path / MANIFEST).unlink())  # which has the name of the class
    for by in ("nothing", "names"):
        other, its, its_step = make(Several, by)
        with raises_everywhere(ValueError, "The Several holds another optimizer, a AdamW", "Define both in the class"):
            load(path, other, its)
        its_step(0)
        with raises_everywhere(ValueError, "The Several holds another optimizer, a AdamW", "Define both in the class"):
            Checkpoints(root).save(2, other, its)


STEPLESS: list[tuple[Build, str]] = [
    *((dampened, "names"), (dampened, "flat"), (Sums, "whole")),
    *((lambda params: Sums(params, "mu"), "flat"), (lambda params: Sums(params, "step"), "whole")),
]


@on_ranks(2)
def test_factored_state_before_the_first_step_has_the_shapes_of_whole_parameters() -> None:
    for build in (adafactor, transformers_adafactor):
        _, optimizer, step = make(build)
        shapes = []
        for _ in range(2):
            state = optimizer.state_dict()["state"]
            tensors = {name: {k: v for k, v in held.items() if isinstance(v, Tensor)} for name, held in state.items()}
            shapes.append(
                {n: {k: (v.shape, isinstance(v, RowShardedTensor)) for k, v in h.items()} for n, h in tensors.items()}
            )
            step(0)
        assert shapes[0] == shapes[1]


# -- the last checkpoint -----------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    path.write_text(path.read_text()[:-40])


NOT_THERE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "gone": (lambda root: shutil.rmtree(root / "step-00000002"), "latest names step-00000002, which is gone"),
    "incomplete": (lambda root: (root / "step-00000002" / MANIFEST).unlink(), "has no manifest: it is incomplete"),
    "damaged": (lambda root: _cut(root / "step-00000002" / MANIFEST), "is damaged"),
    "unnamed": (
        lambda root: (_cut(root / "step-00000002" / MANIFEST), (root / "latest").unlink()),
        "has no file 'latest'",
    ),
    "unreadable": (lambda root: (root / "latest").write_text("../elsewhere"), "not the name of a checkpoint"),
}


@on_ranks(2, timeout=120)
def test_an_older_checkpoint_is_not_loaded_in_place_of_the_last() -> None:
    model, optimizer, step = make(adamw)
    original = Path(shared_folder())
    for number in (1, 2):
        step(number)
        Checkpoints(original).save(number, model, optimizer)
    for kind, (change, words) in NOT_THERE.items():
        root = original.with_name(f"{original.name}-{kind}")
        on_first(lambda root=root, change=change: (shutil.copytree(original, root), change(root)))
        before = bits(model, optimizer)
        with raises_everywhere(
            CheckpointError, words, "step-00000001 (saved ", "load it by name", "Nothing was loaded"
        ):
            Checkpoints(root).load(model, optimizer)
        assert bits(model, optimizer) == before
        assert load(root / "step-00000001", model, optimizer).step == 1
        Checkpoints(root).save(3, model, optimizer)
        assert Checkpoints(root).load(model, optimizer).step == 3  # type: ignore[union-attr]
    # A save that died after it had published its checkpoint, and before it named it.
    first = (original / "step-00000001" / MANIFEST).stat().st_mtime
    on_first(lambda: ((original / "latest").write_text("step-00000001"), os.utime(original / "latest", (first, first))))
    assert Checkpoints(original).load(model, optimizer).step == 2  # type: ignore[union-attr]
    on_first(lambda: (original / "latest").unlink())
    assert Checkpoints(original).load(model, optimizer).step == 2  # type: ignore[union-attr]
    on_first(lambda: [shutil.rmtree(path) for path in original.glob("step-*")])
    assert Checkpoints(original).load(model, optimizer) is None
    on_first(lambda: (original / "latest").write_text("step-00000002"))
    with raises_everywhere(CheckpointError, "which is gone", "There is no complete checkpoint"):
        Checkpoints(original).load(model, optimizer)


@on_ranks(2, timeout=120)
def test_going_back_to_the_checkpoint_that_latest_names() -> None:
    """What is written into it after the last save counts, and what was left behind is not preferred later."""
    model, optimizer, step = make(adamw)
    root = Path(shared_folder())
    checkpoints = Checkpoints(root, keep=3)
    for number in (1, 2, 3):
        step(number)
        checkpoints.save(number, model, optimizer)
    copied = root.with_name(f"{root.name}-copied")
    on_first(lambda: (root / "latest").write_text("step-00000001\n"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert checkpoints.load(model, optimizer).step == 1  # type: ignore[union-attr]
    said = [str(each.message) for each in caught]
    assert any("names step-00000001 and was written after step-00000003" in each for each in said) == (
        dist.get_rank() == 0
    )
    # A copy without times, in which files were copied in another order, and a second or more after they were written.
    edited = (root / "latest").stat().st_mtime + 2
    on_first(lambda: (shutil.copytree(root, copied), os.utime(copied / "latest", (edited, edited))))
    on_first(lambda: os.utime(copied / "step-00000003" / MANIFEST, (edited + 1, edited + 1)))
    for folder, keep, left in (
        (root, 3, ["step-00000001", "step-00000002.1", "step-00000003"]),
        (copied, 2, ["step-00000001", "step-00000002.1"]),
    ):
        again = Checkpoints(folder, keep=keep)
        assert again.load(model, optimizer).step == 1  # type: ignore[union-attr]
        saved = again.save(2, model, optimizer)
        assert sorted(path.name for path in again.all()) == left
        assert again.latest() == saved
        assert Checkpoints(folder).load(model, optimizer).path == saved  # type: ignore[union-attr]


# -- without a manifest ------------------------------------------------------------------------------------------------


@on_ranks(2, timeout=120)
def test_flipped_bits_are_found_without_a_manifest() -> None:
    root = Path(shared_folder())
    model, optimizer, step = make(adamw)
    step(0)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=root / "plain")
    storage = pickle.loads((root / "plain" / ".metadata").read_bytes()).storage_data
    for name in ("model.module.b.weight", STATE + "exp_avg", STATE + "step"):
        info = next(info for index, info in storage.items() if index.fqn == name)
        copied = root / name

        def flip(info: Any = info, copied: Path = copied, name: str = name) -> None:
            shutil.copytree(root / "plain", copied)
            content = bytearray((copied / info.relative_path).read_bytes())
            inside = content.index(b"data/0", info.offset)  # the values follow, aligned to 64 bytes
            content[(inside + 128) // 64 * 64] ^= 4
            (copied / info.relative_path).write_bytes(content)

        on_first(flip)
        refuses(copied, model, optimizer, copied.name)
    load(root / "plain", model, optimizer)


@on_ranks(2)
def test_the_rest_is_loaded_without_a_manifest_or_named() -> None:
    root = Path(shared_folder())
    model, optimizer, step = make(adamw)
    step(0)
    path = Checkpoints(root).save(1, model, optimizer, extra={"a": 1} if dist.get_rank() == 0 else None)
    on_first(lambda: (path / MANIFEST).unlink())
    torch.manual_seed(5)
    restored = load(path, model, optimizer)
    assert (restored.step, restored.extra, restored.generators) == (None, {"a": 1}, True)
    dcp.save({"model": model.state_dict(), "schedule": {"epoch": 3}}, checkpoint_id=root / "more")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        restored = load(root / "more", model)
    assert restored.left_out == ("schedule.epoch",)
    assert any("schedule.epoch" in str(w.message) for w in caught) == (dist.get_rank() == 0)


# -- files that were changed -------------------------------------------------------------------------------------------

GROUP = "optimizer.param_groups.0."
CHANGED: dict[str, tuple[Callable[[Tampered], Any], str]] = {
    "a text for a number": (lambda t: t.put(GROUP + "lr", _saved("fast")), "the setting 'lr'"),
    "one beta": (lambda t: t.put(GROUP + "betas", _saved((0.9,))), "the setting 'betas'"),
    "no learning rate": (lambda t: t.forget(GROUP + "lr"), "has no learning rate"),
    "no state": (lambda t: [t.forget(k) for k in _states(t)], "missing (allow_missing): optimizer.a.weight"),
    "no state of one": (lambda t: [t.forget(k) for k in _states(t, "module.b.bias.")], "optimizer.b.bias"),
    "no names": (lambda t: t.forget(GROUP + "params"), "does not say which parameters"),
    "numbers for names": (lambda t: t.put(GROUP + "params", _saved([0, 1, 2, 3, 4])), "numbers the optimizer's"),
    "a name twice": (lambda t: t.put(GROUP + "params", _saved(["module.a.weight"] * 2)), "is in two parameter groups"),
    "other names": (lambda t: t.put(GROUP + "params", _saved(["module.z"])), "unexpected"),
    "a path that leads elsewhere": (lambda t: _exchange(t, STATE + "exp_avg", STATE + "exp_avg_sq"), "is damaged"),
    "more of the optimizer": (lambda t: _rename(t, STATE + "step", "optimizer.scale"), "optimizer.scale"),
}


def _states(tampered: Tampered, of: str = "") -> list[str]:
    return [key for key in tampered.metadata.state_dict_metadata if key.startswith(f"optimizer.state.{of}")]


def _saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def _exchange(tampered: Tampered, one: str, other: str) -> None:
    paths = tampered.metadata.planner_data
    paths[one], paths[other] = paths[other], paths[one]


def _rename(tampered: Tampered, key: str, name: str) -> None:
    metadata = tampered.metadata
    metadata.state_dict_metadata[name] = metadata.state_dict_metadata.pop(key)
    for index in tampered.indices(key):
        metadata.storage_data[type(index)(name, index.offset, index.index)] = metadata.storage_data.pop(index)
    metadata.planner_data[name] = tuple(name.split("."))
    del metadata.planner_data[key]


@on_ranks(2, timeout=120)
def test_changed_files_are_refused() -> None:
    root = Path(shared_folder())
    model, optimizer, step = make(adamw)
    step(0)
    path = Checkpoints(root).save(1, model, optimizer)
    for kind, (change, words) in CHANGED.items():
        copied = root / kind.replace(" ", "-")

        def tamper(change: Any = change, copied: Path = copied) -> None:
            tampered = Tampered(path, copied)
            change(tampered)
            tampered.seal()

        on_first(tamper)
        refuses(copied, model, optimizer, words)
