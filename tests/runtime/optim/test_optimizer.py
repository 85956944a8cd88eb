"""Optimizers over shards compute the same as over whole parameters."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from types import SimpleNamespace
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, raises_everywhere
from pool import on_ranks
from torch import Tensor, nn

from mfsdp_compile import declare_optimizer, fully_shard, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.diagnostics.doctor import STRATEGIES, mesh_arguments
from mfsdp_compile.runtime.geometry.groups import Group
from mfsdp_compile.runtime.geometry.layout import ParamSpec, plan_layouts
from mfsdp_compile.runtime.geometry.rows import RowSplit
from mfsdp_compile.runtime.guests.optimizers.flat_step import FlatStep, flat_step_of
from mfsdp_compile.runtime.guests.optimizers.muon import legs_of, owners, whole_item
from mfsdp_compile.runtime.memory.tensor import RowShardedTensor
from mfsdp_compile.runtime.optim.state import shard_state

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
}
FUSED = {"SGD", "Adam", "AdamW", "Adagrad"}
VARIANTS = [
    (name, how) for name in OPTIMIZERS for how in ("for", "foreach", "fused") if how != "fused" or name in FUSED
]


def set_gradients(params: dict[str, Any], seed: int) -> None:
    """Set the same whole gradients for sharded and for whole parameters."""
    generator = torch.Generator().manual_seed(seed)
    for param in params.values():
        whole = torch.randn(param.shape, generator=generator)
        param.grad = torch.zeros_like(param).copy_(whole)


def params_of(model: nn.Module) -> dict[str, Any]:
    return dict(getattr(model, "module", model).named_parameters())


def assert_same(sharded: dict[str, Any], alone: dict[str, Any]) -> None:
    """Assert equality up to fused multiply-adds.

    The arithmetic is the same for each element. Kernels use fused multiply-adds for whole vectors and not for the rest
    at an end, and ends are at different places. That is one rounding each; 1e-6 is a dozen.
    """
    for name, param in sharded.items():
        torch.testing.assert_close(param.full_tensor(), alone[name].detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.long_if("*-for")
@pytest.mark.parametrize(("name", "how"), VARIANTS)
@on_ranks(2)
def test_elementwise_optimizers(name: str, how: str) -> None:
    cls, settings = OPTIMIZERS[name]
    settings = settings | {"foreach": how == "foreach"} | ({"fused": True} if how == "fused" else {})
    if how == "fused":
        settings.pop("foreach")
    sharded = params_of(fully_shard_model(parity.build(zoo.Uneven), fsdp_unit_modules="auto"))
    alone = params_of(parity.build(zoo.Uneven))
    optimizers = cls(sharded.values(), **settings), cls(alone.values(), **settings)
    for step in range(4):
        for params, optimizer in zip((sharded, alone), optimizers, strict=True):
            set_gradients(params, step)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(sharded, alone)
    for param in sharded.values():
        for value in optimizers[0].state[param].values():
            if isinstance(value, Tensor) and value.ndim:
                assert isinstance(value, RowShardedTensor)


COUPLED: dict[str, Any] = {
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.5, max_iter=3),
    "LBFGS with line search": lambda params: torch.optim.LBFGS(
        params, lr=0.5, max_iter=3, line_search_fn="strong_wolfe"
    ),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "transformers' Adafactor": lambda params: pytest.importorskip("transformers").Adafactor(params),
    "Muon": lambda params: torch.optim.Muon([param for param in params if param.ndim == 2], lr=0.05),
}


@pytest.mark.filterwarnings("ignore:Muon's step gathers every matrix")
@pytest.mark.parametrize("is_extended", [False, True])
@pytest.mark.parametrize("name", COUPLED)
@on_ranks(2)
def test_optimizers_that_couple_elements(name: str, is_extended: bool) -> None:
    """Without ``whole=True``, they gather what they look at: norms, means of rows, directions over all parameters."""
    data = parity.batches(3, shape=(4, 7))

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5))

    def train(model: Any, optimizer: torch.optim.Optimizer, loss: Any) -> dict[str, Tensor]:
        for batch in data:

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                with torch.enable_grad():
                    return loss(model, batch)

            optimizer.step(closure)
        return {
            name: param.full_tensor() if isinstance(param, RowShardedTensor) else param
            for name, param in params_of(model).items()
        }

    def of_this_rank(model: Any, batch: Tensor) -> Tensor:
        loss = model(batch[dist.get_rank()]).pow(2).mean()
        loss.backward()
        value = loss.detach().clone()
        dist.all_reduce(value)
        return value / 2

    def of_all(model: Any, batch: Tensor) -> Tensor:
        loss = torch.stack([model(each).pow(2).mean() for each in batch]).mean()
        loss.backward()
        return loss.detach()

    model, alone = fully_shard_model(build(), fsdp_unit_modules=[nn.Linear]), build()
    optimizer = COUPLED[name](list(model.parameters()))
    if is_extended:
        optimizer = fully_shard_optimizer(optimizer)
    found, expected = (
        train(model, optimizer, of_this_rank),
        train(alone, COUPLED[name](list(alone.parameters())), of_all),
    )
    before = params_of(build())
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value.detach(), rtol=1e-5, atol=1e-6)
        assert name == "Muon" or not torch.equal(value, before[key])


class Matrices(nn.Module):
    """Matrices: wide, tall, square, one that one rank can own, one of another unit.

    Row lengths are multiples of 16, so that no kernel computes the end of a row differently from its middle.
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(32, 80)
            self.down = nn.Linear(80, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.tanh(self.up(x)))

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(16, 32, bias=False)
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))
        self.square = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.small(x)
        for block in self.blocks:
            x = block(x)
        return self.square(x).pow(2).mean()


def muon(model: nn.Module, **settings: Any) -> torch.optim.Muon:
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.05, **settings)


MUON_STRATEGIES = {
    2: ["optim_grads_params", "optim", "no_shard"],
    4: ["HSDP optim_grads", "HFSDP", "HFSDP optim_grads"],
}


@pytest.mark.parametrize("nesterov", [True, False])
@on_ranks(2, 4)
def test_muon(nesterov: bool) -> None:
    """Muon computes bit by bit the same as over whole matrices."""
    for strategy in MUON_STRATEGIES[dist.get_world_size()]:
        settings = {"nesterov": nesterov, "adjust_lr_fn": "match_rms_adamw" if nesterov else "original"}
        whole, alone = parity.build(Matrices), parity.build(Matrices)
        optimizers = muon(whole, **settings), muon(alone, **settings)
        model, _ = fully_shard(whole, optimizers[0], fsdp_unit_modules=[Matrices.Block], **mesh_arguments(strategy))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, 0.5)
        alone_scheduler = torch.optim.lr_scheduler.StepLR(optimizers[1], 2, 0.5)
        for step in range(4):
            for params, optimizer in zip((params_of(model), params_of(alone)), optimizers, strict=True):
                set_gradients(params, step)
                optimizer.step()
            scheduler.step()
            alone_scheduler.step()
        for name, param in params_of(model).items():
            expected = params_of(alone)[name]
            assert torch.equal(param.full_tensor(), expected), (strategy, name)
            if expected.ndim == 2:
                buffer = optimizers[0].state[param]["momentum_buffer"]
                assert torch.equal(buffer.full_tensor(), optimizers[1].state[expected]["momentum_buffer"])


@on_ranks(4)
def test_muon_with_more_ranks_than_matrices() -> None:
    """Muon works with more ranks than matrices. With HFSDP, some ranks have nothing to do in the second stage."""
    for chunk_bytes in (256 << 20, 1024):
        whole, alone = (nn.Sequential(parity.build(Matrices).square) for _ in range(2))
        optimizers = muon(whole), muon(alone)
        model, _ = fully_shard(whole, optimizers[0], fsdp_unit_modules=[nn.Linear], **mesh_arguments("HFSDP"))
        with mock.patch("mfsdp_compile.runtime.guests.optimizers.muon.CHUNK_BYTES", chunk_bytes):
            for params, optimizer in zip((params_of(model), params_of(alone)), optimizers, strict=True):
                set_gradients(params, 0)
                optimizer.step()
        assert torch.equal(model.module[0].weight.full_tensor(), alone[0].weight)


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_muon_trains(mode: str) -> None:
    """Muon trains after use before sharding, with a closure, hooks, and matrices that arrive in several chunks."""
    data = parity.batches(4, (6, 16))
    whole, alone = parity.build(Matrices), parity.build(Matrices)
    optimizer, alone_optimizer = muon(whole), muon(alone)
    for model, its in ((whole, optimizer), (alone, alone_optimizer)):
        model(data[0].flatten(0, 1)).backward()
        its.step()
        model.zero_grad()  # also clears parameters that Muon does not hold
    model, optimizer = fully_shard(whole, optimizer, fsdp_unit_modules=[Matrices.Block])
    call = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    for step in range(1, 4):

        def closure(batch: Tensor = data[step][dist.get_rank()]) -> Tensor:
            optimizer.zero_grad()
            loss = call(batch)
            loss.backward()
            return loss

        with mock.patch("mfsdp_compile.runtime.guests.optimizers.muon.CHUNK_BYTES", 4096):
            assert optimizer.step(closure).item() > 0
        alone_optimizer.zero_grad()
        sum(alone(batch) for batch in data[step]).div(2).backward()
        alone_optimizer.step()
    assert len(steps) == 3
    for name, param in params_of(model).items():
        # Sums over ranks in another order change the momentum by 1e-7, and in places bfloat16 by a unit in its last
        # place, 4e-3. A step moves weights by at most 0.05.
        torch.testing.assert_close(param.full_tensor(), params_of(alone)[name].detach(), rtol=0, atol=2e-3)
    with raises_everywhere(ValueError, "scheduler", "fully_shard_optimizer"):
        late = muon(model.module)
        torch.optim.lr_scheduler.StepLR(late, 2)
        fully_shard_optimizer(late)


@on_ranks(2)
def test_muon_owns_what_costs_no_padding() -> None:
    """Two equal matrices on two ranks are owned by one rank each, without communication.

    Three large ones are cut between the ranks, because whole ones would take padding.
    """

    class Pair(nn.Module):
        def __init__(self, width: int = 512, count: int = 2) -> None:
            super().__init__()
            self.linears = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    pair, three = Pair(), Pair(2048, 3)
    model, _ = fully_shard(pair, muon(pair), fsdp_unit_modules=[Pair])
    assert [len(model.module.linears[i].weight.to_local()) for i in (0, 1)] == (
        [512, 0] if dist.get_rank() == 0 else [0, 512]
    )
    model, _ = fully_shard(three, muon(three), fsdp_unit_modules=[Pair])
    held = [len(linear.weight.to_local()) for linear in model.module.linears]
    assert sum(held) == 3 * 1024
    items = [whole_item(linear.weight.row_split) for linear in model.module.linears]
    assert sorted(owner.shard for owner in owners(items, 2)) in ([0, 0, 1], [0, 1, 1])


def test_muon_shares_out_work() -> None:
    """A rank works on the matrices that it owns. The others go to the ranks with the least work, inner and outer."""
    whole = [ParamSpec(f"whole{i}", (64, 32), whole=True) for i in range(4)]
    cut = [ParamSpec(f"cut{i}", (128, 32)) for i in range(7)]
    layouts = [*plan_layouts(whole, 4, 4), *plan_layouts(cut, 4, 4)]
    splits = [RowSplit(layout, index) for layout in layouts for index in range(len(layout.slots))]
    items = [whole_item(split) for split in splits]
    found = [owner.shard for owner in owners(items, 4)]
    homes = [[len(split.rows(piece)) == split.shape[0] for piece in range(4)] for split in splits]
    assert 4 <= sum(map(any, homes)) < 9
    assert all(homes[i][owner] for i, owner in enumerate(found) if any(homes[i]))
    work = [split.shape[0] for split in splits]
    loads = [sum(w for w, owner in zip(work, found, strict=True) if owner == piece) for piece in range(4)]
    assert max(loads) - min(loads) <= 128
    for inner, outer in itertools.product(range(2), range(2)):
        groups = (Group("outer", 2, outer), Group("inner", 2, inner))
        topology = SimpleNamespace(shards=4, shard=inner * 2 + outer, shard_groups=groups)
        first, second = legs_of(items, topology)  # type: ignore[arg-type]
        here = {k for k, to in second.goes_to.items() if to == inner}
        assert here == {k for k, owner in enumerate(found) if owner == inner * 2 + outer}
        assert second.goes_to.keys() == {k for k, to in first.goes_to.items() if to == outer}


def test_loaded_state_is_a_copy(fake_world: int) -> None:
    model = fully_shard_model(nn.Linear(4, 8))
    whole = torch.ones(8, 4)
    loaded = shard_state(torch.optim.Adam(model.parameters()), "exp_avg", whole, model.module.weight)
    loaded.to_local().zero_()
    assert torch.equal(whole, torch.ones(8, 4))


def test_a_method_does_not_outlive_its_optimizer(fake_world: int) -> None:
    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
    step = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)).step
    with pytest.raises(ReferenceError, match=r"step\(\) of an optimizer that was deleted"):
        step()


def test_state_dicts_of_other_parameters_are_refused(fake_world: int) -> None:
    model = fully_shard_model(nn.Linear(4, 8))
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for change in (lambda names: names[:1], lambda names: [*names, "module.other"]):
        state_dict = optimizer.state_dict()
        state_dict["param_groups"][0]["params"] = change(state_dict["param_groups"][0]["params"])
        with pytest.raises(ValueError, match=r"does not fit the SGD: missing are .*; not held by it are"):
            optimizer.load_state_dict(state_dict)


def test_models_with_the_same_names_have_optimizers_of_their_own(fake_world: int) -> None:
    models = [fully_shard_model(nn.Linear(4, 8)) for _ in range(2)]
    params = [param for model in models for param in model.parameters()]
    optimizer = fully_shard_optimizer(torch.optim.SGD(params, lr=0.1))
    with pytest.raises(ValueError, match=r"two parameters named 'module.weight' of two models"):
        optimizer.state_dict()


# -- over flat shards -------------------------------------------------------------------------------------------------


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the usual groups: weights decay, biases and norms do not."""
    params = list(model.parameters())
    return [{"params": [p for p in params if p.ndim > 1]}, {"params": [p for p in params if p.ndim <= 1], "lr": 0.003}]


def flat_pair(factory: Any, cls: Any, settings: dict[str, Any], **arguments: Any) -> list[tuple[Any, Any]]:
    """Return the same model and optimizer twice: over flat shards and by parameter."""
    pair = []
    for flat in (True, False):
        model = fully_shard_model(parity.build(factory), fsdp_unit_modules="auto", **arguments)
        pair.append((model, fully_shard_optimizer(cls(decay_groups(model), **settings), flat=flat)))
    return pair


def assert_same_state(pair: list[tuple[Any, Any]], exactly: bool) -> None:
    (flat, flat_optimizer), (plain, optimizer) = pair
    bound = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-6, "atol": 1e-7}  # see assert_same
    for (name, mine), its in zip(params_of(flat).items(), params_of(plain).values(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), its.full_tensor(), **bound, msg=name)
        assert flat_optimizer.state[mine].keys() == optimizer.state[its].keys()
        for key, value in flat_optimizer.state[mine].items():
            expected = optimizer.state[its][key]
            if isinstance(value, RowShardedTensor):
                torch.testing.assert_close(value.full_tensor(), expected.full_tensor(), **bound)
            else:
                assert value == expected, (name, key)


@pytest.mark.long_if("*-for")
@pytest.mark.parametrize(
    ("name", "how"), [(n, h) for n, h in VARIANTS if h == "for" or n == "AdamW" or (n, h) == ("SGD", "fused")]
)
@on_ranks(2)
def test_flat_steps(name: str, how: str) -> None:
    cls, settings = OPTIMIZERS[name]
    settings = settings | ({"fused": True} if how == "fused" else {"foreach": how == "foreach"})
    pair = flat_pair(zoo.Uneven, cls, settings)
    for batch in parity.batches(4, (3, 8)):
        for model, optimizer in pair:
            model(batch[dist.get_rank()]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert all(isinstance(p, RowShardedTensor) for g in pair[0][1].param_groups for p in g["params"])
    assert_same_state(pair, exactly=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "strategies"),
    [
        pytest.param("foreach", ("optim_grads", "HFSDP"), id="foreach"),
        *(pytest.param(how, tuple(STRATEGIES), id=f"all-{how}") for how in ("for", "foreach", "fused")),
    ],
)
@on_ranks(4)
def test_flat_steps_with_every_strategy(how: str, strategies: tuple[str, ...]) -> None:
    """Flat steps give the same bits if rows are multiples of the elements that kernels process at a time."""
    for strategy in strategies:
        settings = {"lr": 0.01} | ({"fused": True} if how == "fused" else {"foreach": how == "foreach"})
        pair = flat_pair(Matrices, torch.optim.AdamW, settings, **mesh_arguments(strategy))
        seen: list[Any] = []
        pair[0][1].register_step_pre_hook(
            lambda o, *_, s=seen: s.extend(p for g in o.param_groups for p in g["params"])
        )
        with mock.patch.object(FlatStep, "_give_up", side_effect=AssertionError("parameters are stepped one by one")):
            for batch in parity.batches(3, (6, 16)):
                for model, optimizer in pair:
                    model(batch[dist.get_rank()]).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        assert_same_state(pair, exactly=True)
        assert seen
        assert all(isinstance(tensor, RowShardedTensor) for tensor in seen), "hooks see parameters"
        flat = flat_step_of(pair[0][1])
        assert flat is not None
        assert all(len(runs) <= 2 for runs in flat.runs_by_bucket().values()), "at most two groups in each bucket"


@on_ranks(2)
def test_flat_steps_of_groups_that_take_turns_in_a_bucket() -> None:
    """Flat steps work if every other matrix of a bucket is in another group.

    Fused kernels do not report their writes, so gathered parameters are stale afterwards.
    """
    for arguments in ({"zero_dp_strategy": "optim"}, {}):
        pair = []
        for flat in (True, False):
            model = fully_shard_model(parity.build(Matrices), **arguments)
            params = list(model.parameters())
            groups = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.003}]
            pair.append((model, fully_shard_optimizer(torch.optim.AdamW(groups, lr=0.01, fused=True), flat=flat)))
        for batch in parity.batches(3, (6, 16)):
            losses = []
            for model, optimizer in pair:
                losses.append(model(batch[dist.get_rank()]))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            assert torch.equal(*losses)
        assert_same_state(pair, exactly=True)


@on_ranks(2)
def test_flat_steps_with_a_closure() -> None:
    pair = flat_pair(Matrices, torch.optim.AdamW, {"lr": 0.01})
    for batch in parity.batches(2, (6, 16)):
        for model, optimizer in pair:

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = model(batch[dist.get_rank()])
                loss.backward()
                return loss

            optimizer.step(closure)
    assert_same_state(pair, exactly=True)


@on_ranks(2)
def test_flat_steps_see_whole_blocks() -> None:
    """Flat tensors include the padding behind a parameter, down to the last block of a shard."""
    model = fully_shard_model(parity.build(zoo.Uneven), optimizer_block_size=64)
    sizes: list[int] = []

    @declare_optimizer("elementwise")
    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            sizes.extend(p.numel() for group in self.param_groups for p in group["params"] if p.numel() > 1)

    optimizer = fully_shard_optimizer(Watched(decay_groups(model), lr=0.1), flat=True)
    set_gradients(params_of(model), 0)
    optimizer.step()
    assert sizes
    assert not any(size % 64 for size in sizes)


@on_ranks(2)
def test_flat_steps_where_gradients_or_state_are_changed() -> None:
    pair = flat_pair(Matrices, torch.optim.AdamW, {"lr": 0.01})
    for i, batch in enumerate(parity.batches(8, (6, 16))):
        for model, optimizer in pair:
            model(batch[dist.get_rank()]).backward()
            weight = model.module.blocks[0].up.weight
            if i == 2:
                weight.grad = None  # it stays, and its step is not counted
            if i == 4:
                weight.grad = weight.grad * 2
            if i == 5:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer.load_state_dict(saved)
            if i == 6:
                optimizer.state[weight]["exp_avg"].zero_()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_state(pair, exactly=True)
    assert pair[0][1].state[pair[0][0].module.blocks[0].up.weight]["step"] == 7
    model, optimizer = pair[0]
    optimizer.state.clear()
    model(torch.randn(6, 16)).backward()
    optimizer.step(lambda: model(torch.randn(6, 16)))
    assert all(state["step"] == 1 for state in optimizer.state.values())
    with raises_everywhere(ValueError, "LBFGS", "flat"):
        fully_shard_optimizer(torch.optim.LBFGS(model.parameters()), flat=True)


def test_flat_steps_leave_a_loaded_state_dict_as_it_is(fake_world: int) -> None:
    model = fully_shard_model(parity.build(Matrices), fsdp_unit_modules="auto")
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01), flat=True)
    set_gradients(params_of(model), 0)
    optimizer.step()
    loaded = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(loaded)
    optimizer.step()
    assert {float(held["step"]) for held in optimizer.state.values()} == {2.0}
    assert {float(held["step"]) for held in loaded["state"].values()} == {1.0}


@declare_optimizer("blockwise")
class BlockwiseAdam(torch.optim.Optimizer):
    """An Adam with 8-bit momentum and a scale per 256 elements.

    Works on ordinary tensors only, as such optimizers do.
    """

    BLOCK = 256

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                assert not isinstance(param, RowShardedTensor)
                state, count = self.state[param], -(-param.numel() // self.BLOCK)
                if not state:
                    state["codes"] = torch.zeros(count, self.BLOCK, dtype=torch.int8)
                    state["scales"] = torch.zeros(count, 1)
                padded = torch.zeros(count * self.BLOCK)
                padded[: param.numel()] = param.grad.reshape(-1)
                momentum = state["codes"] * state["scales"] * 0.9 + padded.view(count, -1) * 0.1
                state["scales"] = momentum.abs().amax(1, keepdim=True) / 127
                state["codes"] = (momentum / state["scales"].clamp(min=1e-30)).round().to(torch.int8)
                update = (state["codes"] * state["scales"]).reshape(-1)[: param.numel()]
                param.sub_(group["lr"] * update.view(param.shape))


@on_ranks(2, 3)
def test_blocks_of_an_8_bit_optimizer_stay_whole() -> None:
    """Over flat shards, an 8-bit optimizer computes the same as in one process, if shards respect its blocks.

    The test also checks that it does not otherwise.
    """

    def train(block: int) -> list[bool]:
        model = fully_shard_model(parity.build(zoo.Uneven), fsdp_unit_modules="auto", optimizer_block_size=block)
        alone = parity.build(zoo.Uneven)
        optimizer = fully_shard_optimizer(BlockwiseAdam(decay_groups(model), 0.1), flat=True)
        alone_optimizer = BlockwiseAdam(decay_groups(alone), 0.1)
        for step in range(3):
            set_gradients(params_of(model), step)
            set_gradients(params_of(alone), step)
            optimizer.step()
            alone_optimizer.step()
        with raises_everywhere(RuntimeError, "BlockwiseAdam", "codes", "checkpoint"):
            optimizer.state_dict()
        return [torch.equal(p.full_tensor(), params_of(alone)[n]) for n, p in params_of(model).items()]

    assert all(train(BlockwiseAdam.BLOCK))
    assert not all(train(1))


@pytest.mark.long_if("*-LBFGS")
@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon"])
@on_ranks(2)
def test_optimizers_that_look_at_whole_matrices(name: str) -> None:
    """They gather what they look at, and step as in one process."""

    def train(module: nn.Module) -> Any:
        optimizer = getattr(torch.optim, name)(module.parameters(), lr=0.1)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = module(torch.ones(2, 4)).pow(2).mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        (param,) = module.parameters()
        return param.detach()

    with parity.tight_layouts():
        model = fully_shard_model(parity.build(lambda: nn.Linear(4, 6, bias=False)))
    alone = train(parity.build(lambda: nn.Linear(4, 6, bias=False)))
    torch.testing.assert_close(train(model).full_tensor(), alone, rtol=1e-4, atol=1e-4)


# -- whole parameters -------------------------------------------------------------------------------------------------


@declare_optimizer("per_parameter")
class Preconditioned(torch.optim.Optimizer):
    """Like Shampoo, on one side: needs whole matrices, and keeps a state of another shape. Begins after 25 steps."""

    def __init__(self, params: Any, lr: float, start_steps: int = 25) -> None:
        super().__init__(params, {"lr": lr, "start_steps": start_steps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state, gradient = self.state[param], param.grad.reshape(len(param), -1) if param.ndim else param.grad
                state["step"] = state.get("step", 0) + 1
                if state["step"] > group["start_steps"] and param.ndim == 2:
                    state["outer"] = state.get("outer", torch.eye(len(param))) + gradient @ gradient.t()
                    gradient = torch.linalg.solve(state["outer"], gradient)
                param.add_(gradient.view(param.shape), alpha=-group["lr"])


def whole_optimizer(name: str, params: Any) -> torch.optim.Optimizer:
    if name == "Preconditioned":
        return Preconditioned(params, lr=0.1, start_steps=1)
    if name == "torch's Adafactor":
        return torch.optim.Adafactor(params, lr=0.1)
    from transformers.optimization import Adafactor

    return Adafactor(params, lr=0.1, relative_step=False, weight_decay=0.01)


WHOLE = ["Preconditioned", "torch's Adafactor", "transformers' Adafactor"]


class Mixed(nn.Module):
    """Matrices that are cut and some that are not, a vector, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 3)
        self.temperature = nn.Parameter(torch.tensor(2.0))


@pytest.mark.parametrize("name", WHOLE)
@on_ranks(2, 4)
def test_steps_over_whole_parameters(name: str) -> None:
    """Steps have the bits of one process: nothing is computed in another way."""
    for strategy in MUON_STRATEGIES[dist.get_world_size()]:
        whole, alone = parity.build(Mixed), parity.build(Mixed)
        model = fully_shard_model(whole, fsdp_unit_modules=[nn.Linear], **mesh_arguments(strategy))
        optimizers = [whole_optimizer(name, each.parameters()) for each in (model, alone)]
        fully_shard_optimizer(optimizers[0], whole=True)
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in optimizers]
        for step in range(4):
            for params, optimizer, scheduler in zip(
                (params_of(model), params_of(alone)), optimizers, schedulers, strict=True
            ):
                set_gradients(params, step)
                if step == 1:
                    params["second.bias"].grad = None
                optimizer.step()
                scheduler.step()
        for key, param in params_of(model).items():
            assert torch.equal(param.full_tensor(), params_of(alone)[key]), (strategy, key)
        if strategy == "optim_grads_params":
            held = sum(map(bool, optimizers[0].state.values()))
            assert 0 < held < len(params_of(alone))


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_training_over_whole_parameters(mode: str) -> None:
    losses = []
    for sharded in (True, False):
        model = parity.build(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)))
        if sharded:
            model = fully_shard_model(model, fsdp_unit_modules=[nn.Linear])
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        call = torch.compile(model, backend="mfsdp", options={"inner": mode}) if sharded and mode != EAGER else model
        if sharded:
            fully_shard_optimizer(optimizer, whole=True)
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
        found = []
        for _ in range(3):
            loss = call(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        losses.append(found)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", WHOLE)
def test_flat_steps_of_what_needs_whole_parameters_are_refused(name: str, fake_world: int) -> None:
    model = fully_shard_model(nn.Linear(4, 6))
    with pytest.raises(ValueError, match=r"flat=True: a \w+ does not work element by element.*whole=True"):
        fully_shard_optimizer(whole_optimizer(name, model.parameters()), flat=True)
    with pytest.raises(ValueError, match="flat=True: a Preconditioned"):  # it behaves as SGD for 25 steps
        fully_shard_optimizer(Preconditioned(model.parameters(), lr=0.1), flat=True)


class Together(torch.optim.SGD):
    """Divides by a norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for group in self.param_groups for param in group["params"]]
        norm = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            param.sub_(param.grad / norm, alpha=0.1)


def test_whole_steps_that_depend_on_other_parameters_are_refused(fake_world: int) -> None:
    model = fully_shard_model(nn.Linear(4, 6))
    for optimizer, words in (
        (Together(model.parameters()), "a Together is not known to step each parameter by itself.*declare_optimizer"),
        (torch.optim.LBFGS(model.parameters()), "a LBFGS does not step each parameter by itself"),
        (torch.optim.Muon([model.module.weight]), "steps over whole matrices without it"),
    ):
        with pytest.raises(ValueError, match=f"whole=True: .*{words}"):
            fully_shard_optimizer(optimizer, whole=True)
    with pytest.raises(ValueError, match="flat=True: a Together"):
        fully_shard_optimizer(Together(model.parameters()), flat=True)
    with pytest.raises(ValueError, match="flat=True and whole=True contradict"):
        fully_shard_optimizer(torch.optim.SGD(model.parameters()), flat=True, whole=True)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("foreach", [True, False])
@on_ranks(2, 3)
def test_clip_grad_norm(norm_type: float, foreach: bool) -> None:
    sharded = params_of(fully_shard_model(parity.build(zoo.Scalars), fsdp_unit_modules=[zoo.Scalars.block]))
    alone = params_of(parity.build(zoo.Scalars))
    for params in (sharded, alone):
        set_gradients(params, 0)
    norms = [
        torch.nn.utils.clip_grad_norm_(params.values(), 0.5, norm_type, foreach=foreach)
        for params in (sharded, {n: p for n, p in alone.items() if p.numel()})  # inf-norm of an empty tensor fails
    ]
    torch.testing.assert_close(norms[0].full_tensor(), norms[1], rtol=1e-5, atol=1e-6)
    for name, param in sharded.items():
        torch.testing.assert_close(param.grad.full_tensor(), alone[name].grad, rtol=1e-5, atol=1e-7)


@on_ranks(2)
def test_clip_grad_value_and_total_norm() -> None:
    sharded = params_of(fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules="auto"))
    alone = params_of(parity.build(zoo.Plain))
    for params in (sharded, alone):
        set_gradients(params, 0)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in params.values()]) for params in (sharded, alone)]
    torch.testing.assert_close(norms[0].full_tensor(), norms[1], rtol=1e-6, atol=1e-6)
    for params in (sharded, alone):
        torch.nn.utils.clip_grad_value_(params.values(), 0.3)
    for name, param in sharded.items():
        assert torch.equal(param.grad.full_tensor(), alone[name].grad)


def two_groups(model: nn.Module) -> torch.optim.AdamW:
    """Return an optimizer in which weights decay, biases and norms do not, and the head learns more slowly."""
    head = list(model.head.parameters())
    rest = [p for p in model.parameters() if all(p is not h for h in head)]
    return torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.3, "note": "matrices"},
            {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0},
            {"params": head, "lr": 1e-4},
        ],
        lr=1e-2,
    )


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_fully_shard_keeps_groups_and_state(mode: str) -> None:
    """An optimizer that was used before sharding continues as if nothing had happened."""
    data = parity.batches(4)
    whole, alone = parity.build(zoo.Plain), parity.build(zoo.Plain)
    optimizer, alone_optimizer = two_groups(whole), two_groups(alone)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    alone_scheduler = torch.optim.lr_scheduler.ExponentialLR(alone_optimizer, 0.5)
    for model, optim in ((whole, optimizer), (alone, alone_optimizer)):  # two unsharded steps
        for batch in data[:2]:
            sum(model(x) / len(batch) for x in batch).backward()
            optim.step()
            optim.zero_grad()
    settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]

    model, same = fully_shard(whole, optimizer, fsdp_unit_modules=[zoo.Block])
    assert same is optimizer
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == settings
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(model.parameters()))
    for name, param in params_of(model).items():
        state, expected = optimizer.state[param], alone_optimizer.state[params_of(alone)[name]]
        assert state["step"] == expected["step"] == 2
        assert torch.equal(state["exp_avg"].full_tensor(), expected["exp_avg"])
        assert torch.equal(state["exp_avg_sq"].full_tensor(), expected["exp_avg_sq"])

    call: Any = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
    for batch in data[2:]:
        call(batch[dist.get_rank()]).backward()
        sum(alone(x) / len(batch) for x in batch).backward()
        for optim, sched in ((optimizer, scheduler), (alone_optimizer, alone_scheduler)):
            optim.step()
            sched.step()
            optim.zero_grad()
    assert optimizer.param_groups[0]["lr"] == alone_optimizer.param_groups[0]["lr"] == 1e-2 * 0.25
    for name, param in params_of(model).items():
        # AdamW divides by the size of the gradient. Rounding of small gradients moves parameters by up to lr * 1e-3.
        torch.testing.assert_close(param.full_tensor(), params_of(alone)[name].detach(), rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_fully_shard_refuses_state_of_other_shapes() -> None:
    model = parity.build(zoo.Plain)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
    model(torch.randn(2, 8)).backward()
    optimizer.step()
    with raises_everywhere(ValueError, "Adafactor", "row_var", "elementwise"):
        fully_shard(model, optimizer, fsdp_unit_modules="auto")
    model(torch.randn(2, 8)).backward()  # unchanged
    optimizer.step()


@on_ranks(2)
def test_extended_step_and_zero_grad() -> None:
    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules="auto")
    head = list(model.module.head.parameters())
    optimizer = fully_shard_optimizer(torch.optim.SGD(head, lr=0.1))
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    x = torch.randn(2, 8)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        return loss

    before = model.module.head.weight.full_tensor()
    expected = model(x).item()
    assert optimizer.step(closure).item() == expected
    assert calls == ["hook"]
    assert not torch.equal(before, model.module.head.weight.full_tensor())
    optimizer.step(sync_grad_before_optimizer_step=False, install_optimized_model_weights=False)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05

    model(x).backward()
    optimizer.zero_grad(zero_grad_buffer=False)  # clears only what the optimizer holds
    assert model.module.head.weight.grad is None
    assert model.module.enter.weight.grad is not None
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    model(x).backward()
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.full_tensor().any() for p in model.parameters())
    with raises_everywhere(TypeError):
        optimizer.step(no_such_argument=1)  # type: ignore[call-arg]


@on_ranks(2)
def test_learning_rate_scheduler_before_or_after() -> None:
    for before in (True, False):
        model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules="auto")
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if before:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        fully_shard_optimizer(optimizer)
        if not before:
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        model(torch.randn(2, 8)).backward()
        optimizer.step(sync_grad_before_optimizer_step=True)
        scheduler.step()  # warns, and counts wrong, if it missed the step
        assert optimizer.param_groups[0]["lr"] == 0.5


@on_ranks(2)
def test_optimizer_in_backward() -> None:
    """Hooks can step parameter by parameter while backward continues."""
    for mode, prepared in itertools.product((EAGER, AOT_EAGER), (lambda optimizer: optimizer, fully_shard_optimizer)):
        model, call = parity.shard(parity.build(zoo.Plain), mode)
        alone = parity.build(zoo.Plain)
        for param in model.parameters():
            optimizer = prepared(torch.optim.SGD([param], lr=0.1))

            def step(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            param.register_post_accumulate_grad_hook(step)
        data = parity.batches(2)
        optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
        for batch in data:
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)  # such as one of gradients that are still to come
                call(batch[dist.get_rank()]).backward()
            sum(alone(x) / len(batch) for x in batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, param in params_of(model).items():
            torch.testing.assert_close(param.full_tensor(), params_of(alone)[name].detach(), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_optimizer_state_dict_round_trip() -> None:
    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules="auto")
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    x = torch.randn(2, 8)
    model(x).backward()
    optimizer.step()
    saved_model = {name: value.clone() for name, value in model.state_dict().items()}
    saved = copy.deepcopy(optimizer.state_dict())
    after: list[Tensor] = []
    for _ in range(2):  # the same step, twice from the same state
        model.load_state_dict(saved_model)
        optimizer.load_state_dict(copy.deepcopy(saved))
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        after.append(torch.cat([p.full_tensor().flatten() for p in model.parameters()]))
    assert torch.equal(after[0], after[1])


@pytest.mark.long
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("SGD", "AdamW", "NAdam", "ASGD", "Adagrad", "Muon"), id="some"),
        pytest.param(("Adam", "Adamax", "RAdam", "Adadelta", "RMSprop", "Rprop"), id="like them"),
    ],
)
@on_ranks(2)
def test_state_before_the_first_step_is_what_that_step_begins_with(names: tuple[str, ...]) -> None:
    """Loading state from before the first step changes nothing. It has a place for everything in a later checkpoint."""
    matrices = {"Muon": (torch.optim.Muon, {"lr": 0.01})}
    for name in names:
        cls, settings = (OPTIMIZERS | matrices)[name]
        for flat in (False, True) if name == "AdamW" else (False,):
            ends, keys = [], []
            for loads in (False, True):
                whole = parity.build(zoo.Scalars if name in ("AdamW", "NAdam") else zoo.Uneven)
                model = fully_shard_model(whole, fsdp_unit_modules="auto")
                held = {key: p for key, p in params_of(model).items() if name != "Muon" or p.ndim == 2}
                optimizer = fully_shard_optimizer(cls(held.values(), **settings), flat=flat)
                before = {key: param.full_tensor() for key, param in held.items()}
                first = optimizer.state_dict()
                assert all(torch.equal(param.full_tensor(), before[key]) for key, param in held.items())
                assert not any(optimizer.state.values()) or name == "Adagrad"  # Adagrad has state from the beginning
                if loads:
                    optimizer.load_state_dict(first)
                for step in range(2):
                    set_gradients(held, step)
                    optimizer.step()
                    optimizer.zero_grad()
                ends.append({key: param.full_tensor() for key, param in held.items()})
                keys = [{key: held.keys() for key, held in d["state"].items()} for d in (first, optimizer.state_dict())]
            assert keys[0] == keys[1], name
            assert all(torch.equal(end, ends[1][key]) for key, end in ends[0].items()), name
    stateless = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert stateless.state_dict()["state"] == {}


@on_ranks(2)
def test_numbers_in_the_state_of_a_parameter_that_is_a_number() -> None:
    """After a load, every rank has them, also one that has no rows of the parameter."""
    model = fully_shard_model(parity.build(zoo.Scalars), fsdp_unit_modules="auto")
    for cls in (torch.optim.AdamW, torch.optim.NAdam):
        optimizer = fully_shard_optimizer(cls(model.parameters(), lr=0.01))
        saved = optimizer.state_dict()
        for held in saved["state"].values():
            held["step"].fill_(1)
        optimizer.load_state_dict(saved)
        assert len(optimizer.state) == len(list(model.parameters()))
        for held in optimizer.state.values():
            assert isinstance(held["exp_avg"], RowShardedTensor)
            for key in held.keys() - {"exp_avg", "exp_avg_sq"}:
                assert type(held[key]) is Tensor, key
                assert held[key].item() == 1


@on_ranks(2)
def test_state_that_nobody_can_tell_before_the_first_step() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise KeyError("something that only real parameters have")

    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules="auto")
    optimizer = fully_shard_optimizer(Own(model.parameters(), lr=0.1))
    with parity.first_rank_warns(RuntimeWarning, "state of the Own cannot be created before its first step .KeyError"):
        assert optimizer.state_dict()["state"] == {}


@pytest.mark.long
@on_ranks(2)
def test_gradients_exist_on_every_rank_also_for_empty_shards() -> None:
    for mode in (EAGER, AOT_EAGER):
        model, call = parity.shard(parity.build(zoo.Unused), mode, units=[zoo.Block])
        call(torch.randn(2, 8)).backward()
        empty = 0
        for name, param in model.module.named_parameters():
            if "spare" in name:
                assert param.grad is None
                continue
            assert isinstance(param.grad, RowShardedTensor)
            assert param.grad.to_local().shape == param.to_local().shape
            assert param.grad.dtype == param.dtype
            empty += not param.to_local().numel()
        assert empty > 0  # such states exist


@pytest.mark.long
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_two_optimizers_over_one_model(mode: str) -> None:
    """Two optimizers over shared buckets work if one clears its gradients before the other steps, every other time."""
    cells = ((0, 2, True), (0, 1, False), (1, 1, True), (1, 2, False), (2, 2, True), (3, 1, False))
    for strategy, extended, marked in cells:
        data = parity.batches(4, (2, 6, 8))
        alone = parity.build(zoo.Plain)
        mine = two_optimizers(alone)
        for step, batch in enumerate(data):
            for micro in batch.transpose(0, 1):
                (sum(alone(each) for each in micro) / dist.get_world_size()).backward()
            step_in_turn(mine, step)
        model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block], zero_dp_strategy=strategy)
        model.set_model_auto_sync(not marked)
        call = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
        its = two_optimizers(model.module)
        for optimizer in its[:extended]:
            fully_shard_optimizer(optimizer)
        for step, batch in enumerate(data):
            for i, micro in enumerate(batch[dist.get_rank()]):
                if marked:
                    model.is_last_microbatch = i == 1 if step else False  # the first step reduces automatically
                call(micro).backward()
            step_in_turn(its, step)
        for name, param in params_of(model).items():
            # Sums over ranks and microbatches are in another order.
            torch.testing.assert_close(param.full_tensor(), params_of(alone)[name].detach(), rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_writes_between_an_extended_step_and_the_next_forward() -> None:
    """Writes to shards after a step wait for the gathers of that step.

    With ``optim``, the step starts gathers into memory that contains the shards.
    """
    for name in ("in place", "to_local", "flat"):
        model = fully_shard_model(nn.Linear(512, 2048), zero_dp_strategy="optim")
        first = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
        second = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1.0), flat=True)
        for value in range(8):
            model(torch.ones(2, 512)).sum().backward()
            for param in model.parameters():
                param.grad.copy_(param - value)
            first.step()
            with torch.no_grad():
                for param in model.parameters():
                    if name == "in place":
                        param.fill_(value)
                    elif name == "to_local":
                        param.to_local().fill_(value)
            if name == "flat":
                second.step()
            first.zero_grad()
            second.zero_grad()
            assert all((param - value).abs().max() < 1e-6 for param in model.parameters()), (name, value)


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    weights, others = ([p for p in model.parameters() if (p.ndim == 2) == matrix] for matrix in (True, False))
    return [torch.optim.SGD(weights, lr=0.05, momentum=0.9), torch.optim.SGD(others, lr=0.05, momentum=0.9)]


def step_in_turn(optimizers: list[torch.optim.Optimizer], step: int) -> None:
    optimizers[0].step()
    optimizers[0].zero_grad()
    if step % 2:
        optimizers[1].step()
        optimizers[1].zero_grad()


@on_ranks(2)
def test_what_one_optimizer_clears() -> None:
    """An optimizer clears its own gradients, and those of parameters that no optimizer holds at the time."""
    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules="auto")
    head, norm, enter = (list(getattr(model.module, name).parameters()) for name in ("head", "norm", "enter"))

    def cleared(optimizer: torch.optim.Optimizer) -> list[bool]:
        model(torch.randn(2, 8)).backward()
        optimizer.zero_grad()
        return [params[0].grad is None for params in (head, norm, enter)]

    first = fully_shard_optimizer(torch.optim.SGD(head, lr=0.1))
    assert cleared(first) == [True, True, True]
    second = fully_shard_optimizer(torch.optim.SGD(norm, lr=0.1))
    assert cleared(first) == [True, False, True]
    assert cleared(second) == [False, True, True]
    plain = torch.optim.SGD(enter, lr=0.1)
    assert cleared(first) == [True, False, False]
    del plain
    assert cleared(first) == [True, False, True]
    second = fully_shard_optimizer(torch.optim.SGD(enter, lr=0.1))  # replaces the previous optimizer
    assert cleared(first) == [True, True, False]
    assert cleared(second) == [False, True, True]
    model.zero_grad_buffer()
    assert all(param.grad is None for param in model.parameters())
