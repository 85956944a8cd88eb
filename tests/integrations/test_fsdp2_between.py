"""FSDP2's interface: what a program does to modules between their ``fully_shard`` and the model's, and right after."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from test_fsdp2_list import Results, assert_same, mine, mlp, same, state, steps
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from mfsdp_compile import fsdp2, fully_shard_model
from mfsdp_compile.fsdp2.request import owners
from mfsdp_compile.runtime import compat

WIDTH = 7
"""Rows that two ranks cannot hold evenly."""


def three(api: Any, use: Callable[[Any], Any], last: Callable[[Any], Any] = lambda model: None, **kwargs: Any) -> Any:
    """Shard three blocks, each of which is used right after, and the model."""
    model = nn.Sequential(*(mlp(WIDTH) for _ in range(3)))
    for block in model:
        api.fully_shard(block, **kwargs)
        use(block)
    last(model)
    return api.fully_shard(model, **kwargs)


def freeze_bias(block: Any) -> None:
    block[0].bias.requires_grad_(False)


USES: dict[str, Callable[[Any], Any]] = {
    "parameters": lambda block: sum(param.numel() for param in block.parameters()),
    "attribute": lambda block: block[2].weight.shape,
    "state_dict": lambda block: block.state_dict(),
    "freeze": lambda block: block[0].requires_grad_(False),
    "freeze one": freeze_bias,
    "to": lambda block: block.to(torch.float32),
    "apply": lambda block: block.apply(lambda module: None),
    "values": lambda block: [param.detach().fill_(0.25) for param in block.parameters()],
    "load": lambda block: block.load_state_dict({n: p.detach().clone() for n, p in block.state_dict().items()}),
    "forward": lambda block: block(torch.ones(1, WIDTH)).detach(),
    "divide": lambda block: (block.set_force_sum_reduction_for_comms(True), block.set_gradient_divide_factor(4.0)),
    "reshard": lambda block: block.set_reshard_after_forward(False),
    "no_sync": lambda block: block.set_requires_gradient_sync(True),
}


@pytest.mark.long
@on_ranks(2)
def test_used_between_calls() -> None:
    """Same numbers as FSDP2's, to the bit, and parameters stay the objects that they were."""
    for name, use in USES.items():
        if name == "forward":  # FSDP2 makes a block that ran a root
            torch.manual_seed(0)
            expected = steps(three(fsdp, lambda block: None), mine(4, WIDTH))
            torch.manual_seed(0)
            assert_same(steps(three(fsdp2, use), mine(4, WIDTH)), expected)
            continue
        same(lambda api, use=use: steps(three(api, use), mine(4, WIDTH)))
    held: list[Any] = []
    model = three(fsdp2, lambda block: held.extend(block.parameters()))
    assert all(isinstance(param, DTensor) for param in held)
    assert all(one is other for one, other in zip(model.parameters(), held, strict=True))
    optimizer = torch.optim.SGD(held, lr=0.1)
    before = [param.full_tensor() for param in held]
    model(mine(4, WIDTH)).square().sum().backward()
    optimizer.step()
    assert not any(torch.equal(param.full_tensor(), was) for param, was in zip(held, before, strict=True))
    assert len(owners(model)) == 1


@pytest.mark.long
@on_ranks(2)
def test_kinds_of_models_used_between_calls() -> None:
    """Tied weights, nested units, lists, policies, compiled blocks."""

    def tied(api: Any) -> Results:
        model = nn.Sequential(*(mlp(WIDTH) for _ in range(3)))
        model[2][0].weight = model[0][0].weight
        api.fully_shard(model[1])
        list(model[1].parameters())
        return steps(api.fully_shard(model), mine(4, WIDTH))

    def nested(api: Any) -> Results:
        model = nn.Sequential(nn.Sequential(mlp(WIDTH), nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
        for module in (model[0][0], model[0], model):
            api.fully_shard(module)
            list(module.parameters())
        return steps(model, mine(4, WIDTH))

    def together(api: Any) -> Results:
        model = nn.Sequential(mlp(WIDTH), mlp(WIDTH), nn.Linear(WIDTH, WIDTH))
        api.fully_shard([model[0], model[1]])
        assert isinstance(model[1][0].weight, DTensor)
        return steps(api.fully_shard(model), mine(4, WIDTH))

    def policies(api: Any) -> Results:
        policy = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
        return steps(three(api, USES["parameters"], mp_policy=policy), mine(4, WIDTH))

    for program in (tied, nested, together, policies):
        same(program)

    # A weight that two blocks share, of which one was used: FSDP2 trains two weights.
    torch.manual_seed(0)
    blocks = nn.Sequential(mlp(WIDTH), mlp(WIDTH))
    blocks[1][0].weight = blocks[0][0].weight
    expected = steps(fsdp2.fully_shard(copy.deepcopy(blocks)), mine(4, WIDTH))
    fsdp2.fully_shard(blocks[0])
    list(blocks[0].parameters())
    fsdp2.fully_shard(blocks[1])
    assert_same(steps(fsdp2.fully_shard(blocks), mine(4, WIDTH)), expected)

    torch.manual_seed(0)
    expected = steps(three(fsdp, USES["parameters"]), mine(4, WIDTH))
    torch.manual_seed(0)
    model = three(fsdp2, lambda block: (list(block.parameters()), block.compile(backend="aot_eager")))
    assert_same(steps(model, mine(4, WIDTH)), expected)


@on_ranks(2)
def test_meta_between_calls() -> None:
    """Blocks get memory and values one by one, before the model is given to ``fully_shard``."""

    def by_hand(api: Any) -> Results:
        with torch.device("meta"):
            model = nn.Sequential(*(mlp(WIDTH) for _ in range(2)))
        for block in model:
            api.fully_shard(block)
            block.to_empty(device="cpu")
            with torch.no_grad():
                for param in block.parameters():
                    param.fill_(0.25)
        return steps(api.fully_shard(model), mine(4, WIDTH))

    same(by_hand)
    torch.manual_seed(0)
    values = nn.Sequential(*(mlp(WIDTH) for _ in range(2)))
    expected = steps(fsdp2.fully_shard(copy.deepcopy(values)), mine(4, WIDTH))
    with torch.device("meta"):
        model = nn.Sequential(*(mlp(WIDTH) for _ in range(2)))
    for block, its in zip(model, values, strict=True):
        fsdp2.fully_shard(block).load_state_dict(its.state_dict(), assign=True)
    assert_same(steps(fsdp2.fully_shard(model), mine(4, WIDTH)), expected)

    torch.manual_seed(0)
    with torch.device("meta"):
        model = nn.Sequential(*(mlp(WIDTH) for _ in range(2)))
    torch.manual_seed(0)
    for block in model:
        fsdp2.fully_shard(block).to_empty(device="cpu")
        block[0].reset_parameters()
        block[2].reset_parameters()
    assert_same(steps(fsdp2.fully_shard(model), mine(4, WIDTH)), expected)


@pytest.mark.long
@on_ranks(4)
def test_hybrid_between_calls() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    same(lambda api: steps(three(api, USES["parameters"], mesh=mesh), mine(4, WIDTH)), rtol=1e-5)


@on_ranks(2, timeout=60)
def test_refused_between_calls() -> None:
    model = nn.Sequential(mlp(), mlp())
    fsdp2.fully_shard(model[0])(mine(2, 8)).sum().backward()
    fsdp2.fully_shard(model)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match="have gradients from before their module became a part of a larger model"
        ):
            model(mine(2, 8))
    model[0].zero_grad()
    model(mine(2, 8))
    whole = fsdp2.fully_shard(mlp())
    list(whole.parameters())
    with pytest.raises(ValueError, match="a part of a sharded model"):
        fsdp2.fully_shard(whole[0])


@on_ranks(2)
def test_attributes_right_after() -> None:
    """An attribute is the parameter that is trained, of the model, of modules inside, and seen from a module around."""
    model = nn.Sequential(mlp(), mlp())
    around = nn.Sequential(model)
    for block in model:
        fsdp2.fully_shard(block)
    fsdp2.fully_shard(model)
    weight = around[0][1][2].weight
    assert isinstance(weight, DTensor)
    around(mine(2, 8)).sum().backward()
    assert model[1][2].weight is weight
    assert isinstance(weight.grad, DTensor)
    twin = copy.deepcopy(fsdp2.fully_shard(mlp()))
    assert isinstance(twin[0].weight, DTensor)
    assert isinstance(type(twin)(nn.Linear(2, 2))[0].weight, nn.Parameter)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(fsdp2.fully_shard(mlp()))


# -- values -----------------------------------------------------------------------------------------------------------


@on_ranks(2, timeout=60)
def test_values_that_differ() -> None:
    """They are compared before the first forward, unless they were overwritten."""
    torch.manual_seed(0)
    whole = nn.Sequential(mlp(), mlp())
    expected = whole(torch.ones(2, 8))

    def made(**kwargs: Any) -> Any:
        torch.manual_seed(dist.get_rank())
        model = nn.Sequential(mlp(), mlp())
        fsdp2.fully_shard(model[0], **kwargs)
        return fsdp2.fully_shard(model, **kwargs)

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model = made()
    set_model_state_dict(model, whole.state_dict() if not dist.get_rank() else {}, options=options)
    assert torch.equal(model(torch.ones(2, 8)), expected)

    model = made()
    list(model[0].parameters())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"differs from rank 0.*values of 0\.\d\.\w+.*check_values=False"):
            model(torch.ones(2, 8))
    state = whole.state_dict()
    del state["1.2.bias"]
    model.load_state_dict(state, strict=False)
    with pytest.raises(RuntimeError, match=r"values of 1\.2\.bias"):
        model(torch.ones(2, 8))
    model.load_state_dict(whole.state_dict())
    assert torch.equal(model(torch.ones(2, 8)), expected)

    made(check_values=False)(torch.ones(2, 8))
    with pytest.raises(ValueError, match="check_values takes True or False"):
        fsdp2.fully_shard(mlp(), check_values=1)


@on_ranks(2, timeout=60)
def test_replicas_are_given_values() -> None:
    """Replicas compare what they hold at the first forward, whatever they had before and however they got it."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))

    def program(api: Any, gives: bool = True, seeds: bool = True, overwrites: bool = True) -> Results:
        torch.manual_seed(dist.get_rank() if seeds else 0)
        model = mlp()
        for module in (model[0], model):
            api.fully_shard(module, mesh=mesh)
        for param in model.parameters():
            if dist.get_rank() and overwrites:
                param.detach().fill_(1337)
            if gives:
                dist.broadcast(param.to_local(), src=0)
        return steps(model, mine(6, 8))

    same(program)
    same(lambda api: program(api, seeds=False))
    for how in ({}, {"seeds": False}, {"overwrites": False}):
        with pytest.raises(RuntimeError, match=r"differs from rank 0.*values of 0\.weight.*check_values=False"):
            program(fsdp2, gives=False, **how)


@on_ranks(2)
def test_a_first_forward_in_a_transform() -> None:
    """``torch.func`` wraps tensors that the checks before the first forward read. FSDP2 of torch 2.11 raises there."""

    def run(model: nn.Module) -> Any:
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.5)
        return torch.func.jvp(lambda x: model(x), (mine(3, 8),), (torch.ones(3, 8),))

    with torch.device("meta"):
        model = fsdp2.fully_shard(nn.Linear(8, 6))
    assert all(map(torch.equal, run(model.to_empty(device="cpu")), run(nn.Linear(8, 6))))


@on_ranks(2)
def test_a_list_as_the_model() -> None:
    """FSDP2 wants one root; here the modules of a list are a model together."""

    def program(api: Any) -> Results:
        model = mlp()
        fsdp2.fully_shard([model[0], model[2]]) if api is fsdp2 else api.fully_shard(model)
        return steps(model, mine(6, 8))

    same(program)


@on_ranks(2)
def test_steps_leave_nothing_to_the_garbage_collector() -> None:
    """Steps make no cycles that hold tensors; what a deleted model held is freed."""
    model = three(fsdp2, lambda block: None)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    counts = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(6):
            model(mine(4, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(sum(issubclass(type(each), Tensor) for each in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[2:] == counts[2:3] * 4
    params = [weakref.ref(param) for param in model.parameters()]
    del model, optimizer
    gc.collect()
    assert not any(reference() is not None for reference in params)


@on_ranks(2)
def test_rows_over_the_mesh_of_all_ranks() -> None:
    """The mesh is torch's, without names; rows may be asked for by a negative number."""
    model = fsdp2.fully_shard(mlp(), shard_placement_fn=lambda param: Shard(-param.ndim))
    for param in model.parameters():
        assert isinstance(param, DTensor) and param.placements == (Shard(0),)
        assert param.device_mesh == init_device_mesh("cpu", (2,))


# -- inference mode ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_first_call_in_inference_mode() -> None:
    """Training goes on with what inference mode has left, which FSDP2 refuses."""
    torch.manual_seed(0)
    expected = steps(three(fsdp, lambda block: None), mine(4, WIDTH))
    torch.manual_seed(0)
    model = three(fsdp2, lambda block: None)
    with torch.inference_mode():
        assert torch.equal(model(mine(4, WIDTH)).sum(), expected[0])
    assert_same(steps(model, mine(4, WIDTH)), expected)
    for strategy, kwargs in ((3, {}), (1, {}), (0, {}), (3, {"fsdp_double_buffer": True})):
        torch.manual_seed(0)
        plain = mlp()
        expected = steps(fully_shard_model(copy.deepcopy(plain), zero_dp_strategy=strategy, **kwargs), mine(4, 8))
        with torch.inference_mode():
            model = fully_shard_model(plain, zero_dp_strategy=strategy, **kwargs)
            model(mine(4, 8))
        assert_same(steps(model, mine(4, 8)), expected)


# -- optimizer state --------------------------------------------------------------------------------------------------


def collectives_so_far() -> int:
    return sum(compat.collectives_started(group) for group in dist.distributed_c10d._world.pg_map)


@on_ranks(2)
def test_whole_optimizer_state_on_all_ranks() -> None:
    """Steps after a load communicate nothing: each rank has the state of its rows."""

    def program(api: Any) -> Results:
        model = three(api, lambda block: None)
        options = StateDictOptions(full_state_dict=True)

        def step(optimizer: Any) -> None:
            model(mine(4, WIDTH)).square().sum().backward()
            before = collectives_so_far()
            optimizer.step()
            assert collectives_so_far() == before
            optimizer.zero_grad()

        one = torch.optim.AdamW(model.parameters(), lr=0.1)
        step(one)
        two = torch.optim.AdamW(model.parameters(), lr=0.1)
        for _ in range(2):
            set_optimizer_state_dict(model, two, get_optimizer_state_dict(model, one, options=options), options=options)
            step(two)
        return state(model)

    same(program)


# -- pickles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights_only", [True, False])
@on_ranks(2)
def test_state_of_a_rank_in_a_file(weights_only: bool) -> None:
    """Model and optimizer, with ``torch.save`` and ``torch.load``, on the same ranks."""

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = three(fsdp2, lambda block: None)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: Any, optimizer: Any) -> None:
        model(mine(4, WIDTH)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    first, second = made(), made()
    train(*first)
    file = io.BytesIO()
    torch.save([each.state_dict() for each in first], file)
    file.seek(0)
    for each, held in zip(second, torch.load(file, weights_only=weights_only), strict=True):
        each.load_state_dict(held)
    for pair in (first, second):
        train(*pair)
    assert_same(state(second[0]), state(first[0]))


@on_ranks(2, timeout=60)
def test_pickles_that_are_refused() -> None:
    model = fsdp2.fully_shard(mlp(WIDTH))
    param = model[0].weight
    again = pickle.loads(pickle.dumps(param))
    assert isinstance(again, nn.Parameter)
    assert torch.equal(again.full_tensor(), param.full_tensor())
    everyones: list[Any] = [None, None]
    dist.all_gather_object(everyones, pickle.dumps(param.detach()))
    assert torch.equal(pickle.loads(everyones[dist.get_rank()]).to_local(), param.to_local())
    other = 1 - dist.get_rank()
    with pytest.raises(RuntimeError, match=f"as shard {other} of 2 ranks, but this rank holds shard {1 - other}"):
        pickle.loads(everyones[other])
    del param, again, model
    gc.collect()
    with pytest.raises(RuntimeError, match=r"no model that is sharded in this process has a parameter of this name"):
        pickle.loads(everyones[dist.get_rank()])
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    mesh = torch.distributed.device_mesh.DeviceMesh.from_group(alone, "cpu")
    model = fsdp2.fully_shard(mlp(WIDTH), mesh=mesh)
    list(model.parameters())
    with pytest.raises(RuntimeError, match="but here it is sharded over 1"):
        pickle.loads(everyones[dist.get_rank()])


# -- compiled blocks --------------------------------------------------------------------------------------------------


def wrapped(model: Any, backend: str) -> Any:
    model = nn.Sequential(*(torch.compile(block, backend=backend) for block in model))
    for block in model:
        assert fsdp2.fully_shard(block) is block
    return fsdp2.fully_shard(model)


def before(model: Any, backend: str) -> Any:
    for block in model:
        block.compile(backend=backend)
    return by_each(model)


def between(model: Any, backend: str) -> Any:
    for block in model:
        fsdp2.fully_shard(block).compile(backend=backend)
    return fsdp2.fully_shard(model)


def after(model: Any, backend: str) -> Any:
    by_each(model)
    for block in model:
        block.compile(backend=backend)
    return model


def whole_model(model: Any, backend: str) -> Any:
    by_each(model).compile(backend=backend)
    return model


def by_each(model: Any) -> Any:
    for block in model:
        fsdp2.fully_shard(block)
    return fsdp2.fully_shard(model)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["aot_eager", "inductor", "mfsdp"])
@on_ranks(2)
def test_compiled_before_between_and_after(backend: str) -> None:
    def made() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(mlp(), mlp())

    def numbers(model: Any) -> list[Tensor]:
        found = [each for each in steps(model, mine(4, 8)) if isinstance(each, Tensor)]
        return [*found, *(param.full_tensor() for param in model.parameters())]

    expected = numbers(by_each(made()))
    for how in (wrapped, before, between, after, whole_model):
        model = how(made(), backend)
        for one, other in zip(numbers(model), expected, strict=True):
            if backend == "aot_eager":
                assert torch.equal(one, other), how
            else:
                torch.testing.assert_close(one, other, msg=str(how))
        (owner,) = owners(model)
        assert owner.compiled_graphs, how
        torch.compiler.reset()
    model = by_each(made())
    list(model.parameters())
    with pytest.raises(ValueError, match="was compiled with backend='eager'"):
        model.compile(backend="eager")
    for one, other in zip(numbers(model), expected, strict=True):
        assert torch.equal(one, other)


@on_ranks(2, timeout=60)
def test_one_rank_alone_loads_what_it_has() -> None:
    """As under torchft, where each rank of a replica recovers from another one. What all ranks have noted counts."""

    def loaded(api: Any, names: str = "", seed: int = 0, **kwargs: Any) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(mlp(), mlp())
        for module in (model[0], model):
            api.fully_shard(module, **kwargs)
        if dist.get_rank() == 1:
            values = {key: value for key, value in model.state_dict().items() if key.startswith(names)}
            model.load_state_dict(values, strict=False)
        return model

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    for kwargs in ({}, {"names": "1."}, {"mesh": mesh}):
        same(lambda api, kwargs=kwargs: steps(loaded(api, **kwargs), mine(6, 8)))
    with pytest.raises(RuntimeError, match=r"differs from rank 0.*values of 0\.0\.bias.*check_values=False"):
        loaded(fsdp2, names="1.", seed=dist.get_rank())(mine(6, 8))
