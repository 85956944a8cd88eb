"""What FSDP2's own tests check and test_fsdp2.py does not, in torch and here (docs/moving/fsdp2_tests.md)."""

from __future__ import annotations

import collections
import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import on_ranks
from test_fsdp2 import APIS, Net, built, shard
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed._composable import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from mfsdp_compile import fsdp2
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.eager.gathering import Gathering

Results = list[Any]

SEVERAL_FORWARDS = 1e-6
"""Relative bound where parts of gradients are added in another order: FSDP2 adds those of several forwards and reduces
the sum, or the other way around.
"""


def whole(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def state(model: nn.Module) -> Results:
    """Return the names of parameters, their values and gradients, whole."""
    return [(name, whole(param), whole(param.grad)) for name, param in model.named_parameters()]


def assert_same(found: Any, expected: Any, rtol: float = 0.0, path: str = "") -> None:
    """Bitwise, or within ``rtol`` of the largest number of a tensor."""
    assert type(found) is type(expected), f"{path}: {found} and {expected}"
    if isinstance(expected, Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), path
        furthest = (found.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
        largest = expected.double().abs().max().item() if expected.numel() else 0.0
        assert furthest <= rtol * largest, f"{path}: {furthest} apart, of {largest}"
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), path
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            name = f".{other[0]}" if isinstance(other, tuple) and other and isinstance(other[0], str) else ""
            assert_same(one, other, rtol, f"{path}[{number}{name}]")
    else:
        assert found == expected, f"{path}: {found} and {expected}"


newer_fsdp2 = pytest.mark.skipif(
    compat.TORCH_VERSION < (2, 12), reason="the FSDP2 of torch 2.11, which is the reference, fails in this program"
)


def same(program: Callable[[Any], Results], rtol: float = 0.0) -> None:
    """Assert that a program has the same results with torch's FSDP2 and with ours.

    Each gets the same random numbers.
    """
    results = []
    for api in APIS:
        torch.manual_seed(0)
        results.append(program(api))
    assert_same(results[1], results[0], rtol)


def mine(*shape: int) -> Tensor:
    """Return inputs that differ between ranks."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(dist.get_rank()))


def steps(model: nn.Module, batch: Any, call: Callable[[Any], Tensor] | None = None, count: int = 2) -> Results:
    """Train, and return losses, gradients and weights of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    results: Results = []
    for step in range(count):
        loss = (call or (lambda x: model(x).sum()))(batch)
        loss.backward()
        results += [loss.detach().clone(), state(model)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return [*results, state(model)]


def mlp(width: int = 8, **kwargs: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 2 * width, **kwargs), nn.ReLU(), nn.Linear(2 * width, width, **kwargs))


# -- modules and inputs -----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_root_without_inputs() -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self) -> Tensor:
            return self.weight @ self.weight

    same(lambda api: steps(model := api.fully_shard(Square()), None, lambda _: model().sum()))


@pytest.mark.long_unless("*-True")
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_a_module_used_several_times(reshard: bool) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(self.inner(x) + self.inner(x))

    def program(api: Any) -> Results:
        model = Twice()
        api.fully_shard(model.inner, reshard_after_forward=reshard)
        return steps(api.fully_shard(model, reshard_after_forward=reshard), mine(6, 4))

    same(program)


@on_ranks(2)
def test_a_module_that_stands_in_two_places() -> None:
    def program(api: Any) -> Results:
        block = mlp()
        model = nn.Sequential(block, mlp(), block)
        model[1][0].weight = block[0].weight
        api.fully_shard(model)
        return [len(list(model.parameters())), *steps(model, mine(6, 8))]

    same(program)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        return x, self.second(x)


@pytest.mark.long_unless("*-True")
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_outputs_that_no_loss_uses(reshard: bool) -> None:
    def program(api: Any) -> Results:
        model = Heads()
        for module in (model.first, model.second, model.never, model):
            api.fully_shard(module, reshard_after_forward=reshard)
        results = steps(model, mine(6, 8), lambda x: (lambda a, b: (a * b).sum())(*model(x)))
        return results + steps(model, mine(6, 8), lambda x: model(x)[0].sum())

    same(program)


@on_ranks(2)
def test_a_module_of_a_list_that_forward_does_not_use() -> None:
    def program(api: Any) -> Results:
        model = nn.Sequential(Heads(), nn.Identity())
        api.fully_shard([model[0].first, model[0].never])
        api.fully_shard(model)
        return steps(model, mine(6, 8), lambda x: model(x)[1].sum())

    same(program)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Data:
    x: Tensor
    y: Tensor


@dataclass
class Nested:
    inner: Data
    z: Tensor


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "list": (lambda x: [x], lambda box: box[0]),
    "tuple": (lambda x: (x,), lambda box: box[0]),
    "dict": (lambda x: {"x": x}, lambda box: box["x"]),
    "named tuple": (lambda x: Pair(x, torch.ones_like(x)), lambda box: box.x + box.y),
    "dataclass": (lambda x: Data(x, x.clone()), lambda box: box.x + box.y),
    "nested": (lambda x: Nested(Data(x, x.clone()), x.clone()), lambda box: box.inner.x + box.inner.y + box.z),
}


class Boxed(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, mlp()

    def forward(self, box: Any) -> Any:
        into, out = CONTAINERS[self.kind]
        return into(self.layer(out(box)))


class Inside(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layers = kind, nn.Sequential(Boxed(kind), Boxed(kind))

    def forward(self, x: Tensor) -> Tensor:
        into, out = CONTAINERS[self.kind]
        return out(self.layers(into(x)))


@pytest.mark.long_unless("*-dtypes0")
@newer_fsdp2
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.float32),
        None,
        (torch.bfloat16, None),
    ],
)
@on_ranks(2)
def test_structures_between_units(dtypes: Any) -> None:
    for kind in CONTAINERS:

        def program(api: Any, kind: str = kind) -> Results:
            model = Inside(kind)
            policy = api.MixedPrecisionPolicy(*(dtypes or (None, None)))
            for module in (*model.layers, model.layers, model):
                api.fully_shard(module, mp_policy=policy)
            return steps(model, mine(6, 8), count=2)

        same(program)


@on_ranks(2)
def test_registered_method_of_a_unit() -> None:
    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 8, kernel_size=4, stride=4)

        def features(self, x: Tensor) -> Tensor:
            return self.patches(x).flatten(2).transpose(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.features(x).sum(dim=1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision, self.projector = Vision(), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.projector(self.vision.features(x))

    def program(api: Any) -> Results:
        model = Model()
        for module in (model.vision, model.projector, model):
            api.fully_shard(module)
        api.register_fsdp_forward_method(model.vision, "features")
        return steps(model, mine(2, 3, 8, 8))

    same(program)


@on_ranks(2)
def test_root_then_a_part() -> None:
    def program(api: Any) -> Results:
        model = nn.Sequential(mlp(), mlp(), mlp())
        for module in (*model, model):
            api.fully_shard(module)
        return (
            steps(model, mine(6, 8)) + steps(model, mine(6, 8), lambda x: model[0](x).sum()) + steps(model, mine(6, 8))
        )

    same(program)


@on_ranks(2)
def test_a_part_before_the_root() -> None:
    """FSDP2 refuses it: the first forward makes a module a root. Here the outermost module is."""
    torch.manual_seed(0)
    model = nn.Sequential(mlp(), mlp())
    expected = copy.deepcopy(model)
    for module in (*model, model):
        fsdp2.fully_shard(module)
    assert torch.equal(model[0](torch.ones(2, 8)), expected[0](torch.ones(2, 8)))
    assert torch.equal(model(torch.ones(2, 8)), expected(torch.ones(2, 8)))


# -- several forwards and backwards in a step --------------------------------------------------------------------------


class Chunked(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(21, 8)
        self.body = nn.Linear(8, 8, bias=False)
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 21, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, skip_head: bool = False) -> Tensor:
        x = self.norm(self.body(self.embed(tokens)))
        return x if skip_head else self.head(x)


def chunked(api: Any, tied: bool, **kwargs: Any) -> Chunked:
    model = Chunked(tied)
    api.fully_shard(model.body, **kwargs)
    api.fully_shard([model.embed, model.norm, model.head] if tied else [model.norm, model.head], **kwargs)
    return api.fully_shard(model, **kwargs)


def tokens() -> Tensor:
    return torch.randint(0, 21, (2, 12), generator=torch.Generator().manual_seed(dist.get_rank()))


def in_chunks(model: Chunked, batch: Tensor) -> Tensor:
    """The head runs by itself, forward and backward, on parts of a sequence; then the rest goes backward."""
    hidden = model(batch, skip_head=True)
    grads, total = [], torch.zeros(())
    for chunk in hidden.detach().float().chunk(3, dim=1):
        part = chunk.contiguous().requires_grad_()
        loss = model.head(part).float().square().sum()
        loss.backward()
        total += loss.detach()
        grads.append(part.grad)
    hidden.backward(torch.cat(grads, dim=1).to(hidden.dtype))
    return total


def chunk_steps(model: Chunked, count: int = 3) -> Results:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    results: Results = []
    for _ in range(count):
        results += [in_chunks(model, tokens()), state(model)]
        optimizer.step()
        optimizer.zero_grad()
    return results


@pytest.mark.long_if("*-True-False", "*-False-True")
@newer_fsdp2
@pytest.mark.parametrize(
    ("reshard", "tied"),
    [
        (True, True),
        (False, False),
        (True, False),
        (False, True),
    ],
)
@on_ranks(2)
def test_a_head_in_chunks(reshard: bool, tied: bool) -> None:
    same(lambda api: chunk_steps(chunked(api, tied, reshard_after_forward=reshard)))


@newer_fsdp2
@on_ranks(2)
def test_a_head_in_chunks_bfloat16() -> None:
    # FSDP2 of torch 2.15 asks autograd for gradients in the dtype of the reduction (Tensor.grad_dtype), so that the
    # norm's, which is summed in float32, is not rounded to bfloat16 (8 bits) before it is reduced. Then all differs.
    rounds = compat.TORCH_VERSION < (2, 14)

    def program(api: Any) -> Results:
        model = chunked(api, False, mp_policy=api.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        return chunk_steps(model, count=3 if rounds else 1)

    same(program, rtol=0.0 if rounds else 2**-8)


@newer_fsdp2
@on_ranks(2)
def test_a_head_in_chunks_and_microbatches() -> None:
    def program(api: Any) -> Results:
        model = chunked(api, False)
        for number in range(3):
            model.set_requires_gradient_sync(number == 2)
            model.set_is_last_backward(number == 2)
            in_chunks(model, tokens())
        return state(model)

    same(program, SEVERAL_FORWARDS)


@newer_fsdp2
@on_ranks(2)
def test_a_head_that_stays_for_its_chunks() -> None:
    def program(api: Any) -> Results:
        model = chunked(api, False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        results: Results = []
        for _ in range(3):
            hidden = model(tokens(), skip_head=True)
            model.head.set_reshard_after_forward(False)
            model.head.set_reshard_after_backward(False)
            grads = []
            for chunk in hidden.detach().chunk(3, dim=1):
                part = chunk.contiguous().requires_grad_()
                model.head(part).square().sum().backward()
                grads.append(part.grad)
            model.head.set_reshard_after_forward(True)
            model.head.set_reshard_after_backward(True)
            model.head.reshard()
            hidden.backward(torch.cat(grads, dim=1))
            results.append(state(model))
            optimizer.step()
            optimizer.zero_grad()
        return results

    same(program)


@pytest.mark.long_unless("*-composable")
@pytest.mark.parametrize("how", ["composable", "utils", None])
@on_ranks(2)
def test_two_forwards_one_backward(how: str | None) -> None:
    """As in preference learning; units inside units, recomputed."""

    def program(api: Any) -> Results:
        model = built()
        for layer in model.layers:
            if how == "composable":
                composable_checkpoint(layer)
            elif how == "utils":
                forward = layer.forward
                layer.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
            api.fully_shard(layer.up)
            api.fully_shard(layer.down)
            api.fully_shard(layer)
        api.fully_shard(model)
        return steps(model, mine(6, 8), lambda x: (model(x).sum() - model(x.flip(0) * 2).sum()).square(), count=1)

    same(program, SEVERAL_FORWARDS)


@on_ranks(2)
def test_two_forwards_without_the_head() -> None:
    def program(api: Any) -> Results:
        model = chunked(api, False)
        (model(tokens(), skip_head=True).sum() + model(tokens().flip(0), skip_head=True).square().sum()).backward()
        return state(model)

    same(program, SEVERAL_FORWARDS)


@pytest.mark.long_unless("*-True-True")
@pytest.mark.parametrize(
    ("stay", "explicit"),
    [
        (True, True),
        (True, False),
        (False, True),
        (False, False),
    ],
)
@on_ranks(2)
def test_microbatches_of_a_pipeline(stay: bool, explicit: bool) -> None:
    def program(api: Any) -> Results:
        model = shard(api, built(), reshard_after_forward=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results: Results = []
        for _ in range(2):
            if explicit:
                for module in (model, *model.layers, model.head):
                    module.unshard(async_op=True)
            for number in range(3):
                model.set_requires_gradient_sync(number == 2)
                model.set_is_last_backward(number == 2)
                if stay:
                    model.set_reshard_after_backward(number == 2)
                loss = model(mine(6, 8) + number).square().sum()
                loss.backward()
                results.append(loss.detach())
            results.append(state(model))
            optimizer.step()
            optimizer.zero_grad()
        return results

    same(program)


@on_ranks(2)
def test_released_by_hand_before_backward() -> None:
    def program(api: Any) -> Results:
        model = shard(api, built(), reshard_after_forward=False)
        loss = model(mine(6, 8)).square().sum()
        for module in model.modules():
            if isinstance(module, api.FSDPModule):
                module.reshard()
        loss.backward()
        return [loss.detach(), state(model)]

    same(program)


@on_ranks(2)
@pytest.mark.long
def test_released_between_microbatches_of_compiled_code() -> None:
    """``set_reshard_after_backward`` with each microbatch, as scripts for FSDP2 have it."""

    def program(api: Any) -> Results:
        model = shard(api, built(), reshard_after_forward=False)
        call = model if api is fsdp else torch.compile(model, backend="mfsdp", options={"inner": "aot_eager"})
        for _ in range(2):
            for number in range(3):
                model.set_requires_gradient_sync(number == 2)
                model.set_reshard_after_backward(number == 2)
                call(mine(6, 8) + number).square().sum().backward()
        return state(model)

    same(program)
    torch.compiler.reset()
    model = fsdp2.fully_shard(mlp())
    model[0].register_forward_hook(lambda *_: model.set_reshard_after_backward(False))
    with pytest.raises(RuntimeError, match="was changed while a forward is running"):
        model(mine(2, 8))


@on_ranks(2)
def test_gathers_that_a_parent_starts() -> None:
    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(mlp() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            sums = []
            for part in self.parts:
                sums.append(dist.all_reduce(y := x.detach().clone(), async_op=True))
                part.unshard(async_op=True)
                sums[-1].wait()
                x = x + part(y)
            return x

    def program(api: Any) -> Results:
        model = Parent()
        for part in model.parts:
            api.fully_shard(part, reshard_after_forward=False)
        return steps(api.fully_shard(model), mine(6, 8))

    same(program)


@pytest.mark.parametrize("recompute", [False, True])
@on_ranks(2)
def test_backward_gathers_ahead(recompute: bool) -> None:
    """By default, backward gathers the next unit before the current one has run."""
    model = built()
    for layer in model.layers:
        if recompute:
            composable_checkpoint(layer)
    shard(fsdp2, model, reshard_after_forward=True)
    events: list[str] = []
    start = Gathering.start_bucket

    def recorded(self: Any, unit: Any, bucket: Any, plane: Any) -> None:
        events.append(f"gather {unit.name}")
        start(self, unit, bucket, plane)

    for name, layer in enumerate(model.layers):
        layer.register_full_backward_hook(lambda *_, name=name: events.append(f"ran layers.{name}"))
    loss = model(mine(6, 8)).sum()
    with mock.patch.object(Gathering, "start_bucket", recorded):
        loss.backward()
    layers = [event for event in events if "layers" in event]
    for number in (2, 1):
        assert layers.index(f"gather layers.{number - 1}") < layers.index(f"ran layers.{number}"), events
    assert [event for event in layers if event.startswith("gather")] == [f"gather layers.{n}" for n in (2, 1, 0)]


@on_ranks(2)
def test_prefetch_inside_recomputation() -> None:
    """Layers that are recomputed, with units inside that are recomputed too, and gathers that are asked for."""

    def program(api: Any) -> Results:
        model = built()
        for number, layer in enumerate(model.layers):
            layer.up = checkpoint_wrapper(layer.up)
            model.layers[number] = checkpoint_wrapper(layer)
        for layer in model.layers:
            api.fully_shard(layer.up)
            api.fully_shard(layer)
        api.fully_shard([model.norm, model.head])
        api.fully_shard(model)
        model.head.set_modules_to_backward_prefetch([model.layers[2]])
        for number in (2, 1):
            before = model.layers[number - 1]
            model.layers[number].set_modules_to_backward_prefetch([before, before.up])
        return steps(model, mine(6, 8))

    same(program)


@on_ranks(2)
def test_layers_in_pairs() -> None:
    def program(api: Any) -> Results:
        torch.manual_seed(0)
        model = Net(layers=5)
        for layer in model.layers:
            composable_checkpoint(layer)
        api.fully_shard(model.layers[0])
        for number in (1, 3):
            api.fully_shard([model.layers[number], model.layers[number + 1]])
        api.fully_shard([model.norm, model.head], reshard_after_forward=False)
        return steps(api.fully_shard(model), mine(6, 8))

    same(program)


@on_ranks(2)
def test_layers_made_one_by_one() -> None:
    """Each layer is sharded before the next one is made; FSDP2 then frees the whole one."""

    def program(api: Any) -> Results:
        model = nn.Sequential()
        for _ in range(4):
            model.append(api.fully_shard(mlp()))
            gc.collect()
        return steps(api.fully_shard(model), mine(6, 8))

    same(program)


@on_ranks(2)
def test_reset_after_a_failure() -> None:
    class Fails(nn.Module):
        armed = True

        def forward(self, x: Tensor) -> Tensor:
            if self.armed:
                raise ArithmeticError("on all ranks")
            return x

    def program(api: Any) -> Results:
        model = nn.Sequential(mlp(), Fails(), mlp())
        api.fully_shard([model[0], model[2]])
        api.fully_shard(model)
        with pytest.raises(ArithmeticError):
            model(mine(6, 8))
        model[1].armed = False
        if hasattr(api.FSDPModule, "reset_iter_state"):
            model.reset_iter_state()
            return steps(model, mine(6, 8))
        return []  # torch 2.11

    if hasattr(fsdp.FSDPModule, "reset_iter_state"):
        same(program)
    else:
        program(fsdp2)


@on_ranks(2)
def test_nothing_to_gather() -> None:
    for api in APIS:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for module in (*model, model):
            api.fully_shard(module)
        model.unshard(async_op=True).wait()
        model.reshard()


@on_ranks(2)
def test_wrong_prefetch() -> None:
    """A gather that backward does not need changes no number."""

    def program(api: Any) -> Results:
        model = mlp()
        for module in (model[0], model[2], model):
            api.fully_shard(module)
        model[0].set_modules_to_backward_prefetch([model[2]])
        return steps(model, mine(6, 8))

    same(program)


# -- freezing ---------------------------------------------------------------------------------------------------------


@pytest.mark.long_if("*-False-True", "*-True-False")
@pytest.mark.parametrize(
    ("later", "recompute"),
    [
        (False, False),
        (True, True),
        (False, True),
        (True, False),
    ],
)
@on_ranks(2)
def test_biases_alone(later: bool, recompute: bool) -> None:
    """Frozen and trained parameters in one unit."""

    def freeze(model: nn.Module) -> None:
        for name, param in model.named_parameters():
            param.requires_grad_("bias" in name)

    def program(api: Any) -> Results:
        model = nn.Sequential(mlp(), mlp(), mlp())
        if not later:
            freeze(model)
        for block in model:
            if recompute:
                composable_checkpoint(block)
            api.fully_shard(block)
        api.fully_shard(model)
        if later:
            freeze(model)
        return steps(model, mine(6, 8))

    same(program)


@on_ranks(2)
def test_layers_are_unfrozen() -> None:
    def program(api: Any) -> Results:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        for module in (*model, model):
            api.fully_shard(module)

        def train_even(on: bool) -> None:
            for layer in model[::2]:
                layer.requires_grad_(on)

        train_even(False)
        results = steps(model, mine(6, 8))
        with torch.no_grad():
            results.append(model(mine(6, 8)))
        train_even(True)
        return results + steps(model, mine(6, 8))

    same(program)


@on_ranks(2)
def test_layers_are_unfrozen_in_a_module_that_is_not_sharded() -> None:
    """As FSDP2's own test: each layer is a model of its own, and the optimizer is made from the module around them."""

    def program(api: Any) -> Results:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
        for layer in model:
            api.fully_shard(layer)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        results: Results = []
        for step in range(6):
            for layer in model[::2]:
                layer.requires_grad_(step >= 3)
            loss = model(mine(6, 8)).sum()
            loss.backward()
            results += [loss.detach(), [whole(param.grad) for layer in model[1::2] for param in layer.parameters()]]
            optimizer.step()
            optimizer.zero_grad()
        return results

    same(program)


@pytest.mark.long_unless("*-True")
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_frozen_modules_used_several_times(reshard: bool) -> None:
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.frozen, self.trained = (nn.Linear(5, 5) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            x = self.enter(x)
            for _ in range(3):
                x = self.frozen(torch.relu(self.trained(x)))
                with torch.no_grad():
                    extra = torch.relu(self.trained(x))
                x = x + extra
            return x

    def program(api: Any) -> Results:
        model = Loop()
        for module in (model.enter, model.frozen, model.trained, model):
            api.fully_shard(module, reshard_after_forward=reshard)
        return steps(model, mine(6, 5))

    same(program)


# -- gradients and optimizers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("overflow", [False, True])
@on_ranks(2)
def test_gradient_scaler(overflow: bool) -> None:
    """An infinite gradient in the shard of one rank is found on all, and the step is left out."""

    def program(api: Any) -> Results:
        policy = api.MixedPrecisionPolicy(torch.float16)
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        for module in (*model, model):
            api.fully_shard(module, mp_policy=policy)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scaler.scale(model(mine(4, 64)).sum().float()).backward()
        if overflow:
            shards = [param.grad.to_local() for param in model.parameters()]
            next(shard for shard in shards if shard.numel())[0, 0] = float("inf") if dist.get_rank() else 1.0
        scaler.unscale_(optimizer)
        results = [] if overflow else [state(model)]
        scaler.step(optimizer)
        scaler.update()
        return [*results, scaler.get_scale(), len(optimizer.state), [whole(param) for param in model.parameters()]]

    same(program)


@on_ranks(2)
def test_hooks_of_gradients() -> None:
    def program(api: Any) -> Results:
        model = shard(api, built())
        runs: collections.Counter[str] = collections.Counter()
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(lambda param, name=name: runs.update([name]))
        model(mine(6, 8)).sum().backward()
        return [dict(runs)]

    same(program)


@on_ranks(2)
def test_optimizer_in_hooks_of_gradients() -> None:
    def program(api: Any) -> Results:
        model = shard(api, built())
        optimizers = {param: torch.optim.AdamW([param], lr=0.01, foreach=False) for param in model.parameters()}

        def step(param: Tensor) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(step)
        for _ in range(3):
            model(mine(6, 8)).square().sum().backward()
        return state(model)

    same(program)


@on_ranks(2)
def test_clipping() -> None:
    for norm_type in (2, 1, float("inf")):

        def program(api: Any, norm_type: float = norm_type) -> Results:
            model = shard(api, built())
            model(mine(6, 8)).square().sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type, foreach=True)
            return [whole(norm), state(model)]

        torch.manual_seed(0)
        expected = program(fsdp)
        torch.manual_seed(0)
        found = program(fsdp2)
        # Parts of a norm are summed in another order, as ranks hold other rows.
        torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
        for (name, _, ours), (_, _, theirs) in zip(found[1], expected[1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7, msg=name)


@on_ranks(2)
def test_share_comm_ctx() -> None:
    def program(api: Any) -> Results:
        model = nn.Sequential(mlp(), mlp())
        for module in (*model, model):
            api.fully_shard(module)
        model(mine(2, 8))
        api.share_comm_ctx(list(model))
        return steps(model, mine(6, 8))

    same(program)


@pytest.mark.parametrize("factor", [None, 1.0, 2.0])
@on_ranks(1)
def test_one_rank(factor: float | None) -> None:
    def program(api: Any) -> Results:
        model = nn.Sequential(nn.Linear(7, 15), nn.ReLU(), nn.Linear(15, 3))
        api.fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        return steps(model, mine(6, 7))

    same(program)


# -- parameters -------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_float64_after_fully_shard() -> None:
    def program(api: Any) -> Results:
        model = mlp(4)
        for module in (model[0], model[2], model):
            api.fully_shard(module)
        model.to(torch.float64)
        assert {param.to_local().dtype for param in model.parameters()} == {torch.float64}
        return steps(model, mine(2, 4).double())

    same(program)


@pytest.mark.parametrize("reshard", [True, False, None])
@on_ranks(2)
def test_parameters_are_shards_between_steps(reshard: bool | None) -> None:
    model = shard(fsdp2, built(), reshard_after_forward=reshard)
    values = {name: param for name, param in built().named_parameters()}
    for use in (lambda: None, lambda: model(mine(6, 8)), lambda: model(mine(6, 8)).sum().backward(), model.reshard):
        use()
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor), name
            assert torch.equal(param.full_tensor(), values[name]), name


@on_ranks(2)
def test_units_in_a_module_that_is_not_sharded() -> None:
    """Only blocks are given to ``fully_shard``, and everything else is done with the module around them."""

    def program(api: Any) -> Results:
        model = nn.Sequential(mlp(), nn.LayerNorm(8), mlp())
        saved = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
        api.fully_shard(model[0][2])
        api.fully_shard(model[0])
        api.fully_shard(model[2])
        results = [type(value).__name__ != "Parameter" for value in model.parameters()]
        if api is fsdp2:
            model.load_state_dict(saved)
        else:
            shards = model.state_dict()
            placed = {
                name: distribute_tensor(value, there.device_mesh, there.placements)
                if isinstance(there := shards[name], DTensor)
                else value
                for name, value in saved.items()
            }
            model.load_state_dict(placed)
        return [*results, *steps(model, mine(6, 8))]

    same(program)
    with torch.device("meta"):
        model = nn.Sequential(mlp(), mlp())
    for block in model:
        fsdp2.fully_shard(block)
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    torch.optim.AdamW(model.parameters())


@on_ranks(2)
def test_inside_replicate() -> None:
    """torch's composable ``replicate`` leaves out what was given to ``fully_shard``."""

    def program(api: Any) -> Results:
        model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        api.fully_shard(model[1][0])
        api.fully_shard(model[1])
        replicate(model.cpu())
        return steps(model, mine(6, 8))

    same(program)
    with pytest.raises(ValueError, match="Use the sharded model itself"):
        replicate(fsdp2.fully_shard(mlp()))


class Sum(nn.Module):
    def forward(self, x: Tensor, others: list[Tensor]) -> Tensor:
        return x + others[0]


@on_ranks(2)
def test_models_without_parameters() -> None:
    """A module that has none, or whose parameters are all ignored: every method works, and inputs are cast."""

    def program(api: Any) -> Results:
        policy = api.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
        model = api.fully_shard(Sum(), mp_policy=policy)
        ignored = mlp()
        api.fully_shard(ignored, ignored_params=set(ignored.parameters()))
        results: Results = []
        for each in (model, ignored):
            each.unshard()
            each.reshard()
            for value in (False, True):
                each.set_requires_gradient_sync(value)
                each.set_reshard_after_forward(value)
                each.set_reshard_after_backward(value)
                each.set_unshard_in_backward(value)
            each.set_modules_to_forward_prefetch([])
        x = mine(6, 8).requires_grad_()
        loss = model(x, [x]).sum()
        loss.backward()
        return [*results, loss.detach(), x.grad, len(model.state_dict()), *steps(ignored, mine(6, 8))]

    same(program)
    model = fsdp2.fully_shard(Sum())
    compiled = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager"})
    assert torch.equal(compiled(torch.ones(2), [torch.ones(2)]), torch.full((2,), 2.0))


@on_ranks(2)
def test_parameters_of_odd_kinds() -> None:
    """Scalars and parameters that are not contiguous, which FSDP2 refuses."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))
            self.conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x) * self.scale

    torch.manual_seed(0)
    plain = Odd()
    model = fsdp2.fully_shard(copy.deepcopy(plain))
    batch = torch.randn(2, 4, 5, 5)
    plain(batch).sum().backward()
    model(batch).sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert ours.dtype == theirs.dtype
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=name)


@on_ranks(2)
def test_mixed_dtypes_of_a_frozen_parameter() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small = nn.Parameter(torch.zeros((16, 16), dtype=torch.float8_e4m3fn), requires_grad=False)
            self.large = nn.Parameter(torch.zeros(16, 16))

        def forward(self, x: Any) -> None:
            return None

    for api in APIS:
        api.fully_shard(Model())(0)


# -- state dicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [2, 3, 5])
@on_ranks(2)
def test_state_dict_is_kept_and_written(width: int) -> None:
    """A state dict shares memory with the parameters, now and after steps, and values can be written to it."""
    model = nn.Sequential(mlp(width), mlp(width))
    for module in (*model, model):
        fsdp2.fully_shard(module, reshard_after_forward=False)
    kept = model.state_dict()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model(mine(3, width)).sum().backward()
        assert all(isinstance(value, DTensor) for value in model.state_dict().values())
        optimizer.step()
        optimizer.zero_grad()
        for name, param in model.named_parameters():
            assert kept[name].to_local().data_ptr() == param.to_local().data_ptr(), name
            assert torch.equal(kept[name].to_local(), param.to_local())
    model.load_state_dict({name: value.detach().clone().fill_(42 + dist.get_rank()) for name, value in kept.items()})
    assert all((param.to_local() == 42 + dist.get_rank()).all() for param in model.parameters())


@on_ranks(2)
def test_full_state_dict_on_one_rank() -> None:
    torch.manual_seed(0)
    plain = mlp()
    model = fsdp2.fully_shard(copy.deepcopy(plain))
    full = {}
    for name, value in model.state_dict().items():
        tensor = value.full_tensor()
        if dist.get_rank() == 0:
            full[name] = tensor.cpu()
    expected = plain.state_dict() if dist.get_rank() == 0 else {}
    assert list(full) == list(expected)
    assert all(torch.equal(full[name], value) for name, value in expected.items())


@newer_fsdp2
@on_ranks(2)
def test_whole_values_of_one_rank_into_a_model_on_meta() -> None:
    def program(api: Any) -> Results:
        torch.manual_seed(dist.get_rank())  # the values of rank 0 count
        values = mlp().state_dict()
        with torch.device("meta"):
            model = mlp()
        for module in (model[0], model[2], model):
            api.fully_shard(module)
        loaded = {}
        for name, there in model.state_dict().items():
            value = values[name]
            dist.broadcast(value, src=0)
            loaded[name] = nn.Parameter(distribute_tensor(value, there.device_mesh, there.placements))
        model.load_state_dict(loaded, assign=True)
        return steps(model, mine(6, 8))

    same(program)
    torch.manual_seed(0)
    model = fsdp2.fully_shard(mlp())
    with pytest.raises(RuntimeError, match=r"change parameter '0.weight' from torch.float32 to torch.bfloat16"):
        model.load_state_dict({name: value.bfloat16() for name, value in model.state_dict().items()}, assign=True)


# -- the meta device --------------------------------------------------------------------------------------------------


class Buffered(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)
        self.register_buffer("shift", torch.randn(width))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shift


@pytest.mark.parametrize("width", [8, 3, 1])
@on_ranks(2)
def test_meta_device(width: int) -> None:
    """Even and uneven rows, and a rank without any."""

    def program(api: Any) -> Results:
        policy = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        with torch.device("meta"):
            model = nn.Sequential(Buffered(width), Buffered(width))
            for module in (*model, model):
                api.fully_shard(module, mp_policy=policy)
        model.to_empty(device="cpu")
        for value in (*model.parameters(), *model.buffers()):
            assert value.device.type == "cpu"
            value.detach().fill_(1337)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        assert not any((param.to_local() == 1337).any() for param in model.parameters())
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.5)
        return steps(model, mine(4, width), lambda x: model(x).float().sum())

    same(program)


@pytest.mark.parametrize("compiled", [False, True])
@on_ranks(2, timeout=60)
def test_values_that_were_not_given(compiled: bool) -> None:
    """Parameters from the meta device without values are named at the first forward, on every rank."""
    with torch.device("meta"):
        model = nn.Sequential(mlp(), mlp())
    for module in (*model, model):
        fsdp2.fully_shard(module)
    call = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager"}) if compiled else model
    for _ in range(2):
        with pytest.raises(RuntimeError, match="parameters from the meta device have no values yet"):
            call(torch.randn(2, 8))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name != "1.2.bias":
                param.fill_(0.5)
    # The bias is in rows of both ranks.
    with pytest.raises(RuntimeError, match=r"1 parameters .* have no values yet: '1\.2\.bias'"):
        call(torch.randn(2, 8))
    with torch.no_grad():
        model[1][2].bias.fill_(0.5)
    assert call(torch.randn(2, 8)).isfinite().all()


@on_ranks(2)
def test_modules_leave_the_meta_device_one_by_one() -> None:
    def program(api: Any) -> Results:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        for module in (*model, model):
            api.fully_shard(module)
        for module in model:
            module.to_empty(device="cpu")
            with torch.no_grad():
                module.weight.fill_(0.25)
        return steps(model, mine(3, 3))

    same(program)


# -- meshes -----------------------------------------------------------------------------------------------------------


@on_ranks(2, timeout=60)
def test_settings_that_are_refused() -> None:
    with pytest.raises(TypeError, match="takes CPUOffloadPolicy or OffloadPolicy"):
        fsdp2.fully_shard(mlp(), offload_policy="cpu")
    model = shard(fsdp2, built())
    with pytest.raises(NotImplementedError, match="the hook runs on the current stream"):
        model.set_all_reduce_hook(lambda gradient: None, stream=object())
    for number, error in ((0, ValueError), (2.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match="takes a whole number from 1 on"):
            model.set_reduce_scatter_max_input_buffers(number)
    with pytest.raises(ValueError, match=r"reset_iter_state was called on module 'layers\.0'"):
        model.layers[0].reset_iter_state()
    runtime = model._mfsdp_window.runtime
    for number, module, largest in ((3, model.layers[0], 3), (2, model.layers[1], 3), (2, model, 2)):
        module.set_reduce_scatter_max_input_buffers(number)
        assert runtime.schedule.policy.reductions_in_flight == largest
    same(lambda api: steps(shard(api, built()), mine(6, 8), count=1))


@on_ranks(2, timeout=60)
def test_meshes_that_are_refused() -> None:
    for shape in ((2, 1, 1), (1, 2)):
        with pytest.raises(ValueError, match="a mesh of one dimension, or of two with names"):
            fsdp2.fully_shard(mlp(), mesh=init_device_mesh("cpu", shape))


@on_ranks(2)
def test_a_mesh_of_a_group() -> None:
    group = dist.new_group([0, 1])

    def program(api: Any) -> Results:
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
        return steps(shard(api, built(), mesh=mesh), mine(6, 8))

    same(program)


@pytest.mark.skipif(compat.TORCH_VERSION < (2, 12), reason="torch 2.11 has no DataParallelMeshDims")
@pytest.mark.parametrize(
    ("shape", "shards", "replicates"),
    [
        ((2, 1), ("a", "b"), None),
        ((1, 2), None, ("a", "b")),
        ((1, 2, 1), ("b", "c"), "a"),
        ((1, 2, 1), "c", ("a", "b")),
    ],
)
@on_ranks(2)
def test_named_dimensions(shape: tuple[int, ...], shards: Any, replicates: Any) -> None:
    """Several dimensions of a mesh to shard or to replicate over."""
    dims = fsdp2.DataParallelMeshDims(shard=shards, replicate=replicates)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple("abc"[: len(shape)]))
    model = shard(fsdp2, built(), mesh=mesh, dp_mesh_dims=dims)
    assert_same(steps(model, mine(6, 8)), steps(shard(fsdp2, built()), mine(6, 8)))
    assert next(model.parameters()).placements[-1].is_replicate() == (shards is None)


@on_ranks(2)
def test_inside_ddp() -> None:
    """DDP around a model of which a part is sharded, and a part of that is not."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.own = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.own(x))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.shift = Part(), nn.Parameter(torch.randn(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.part(x) + self.shift

    def program(api: Any) -> Results:
        model = Model()
        ignored = set(model.part.own.parameters())
        api.fully_shard(model.part.layer, ignored_params=ignored)
        api.fully_shard(model.part, ignored_params=ignored)
        list(model.part.parameters())  # sharded now: a module around it does not ask
        names = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
        assert names == ["part.layer.weight", "part.layer.bias"]
        ddp = nn.parallel.DistributedDataParallel
        ddp._set_params_and_buffers_to_ignore_for_model(model, names)
        outer = ddp(model, broadcast_buffers=False)
        results: Results = []
        for _ in range(2):
            loss = outer(mine(6, 8)).sum()
            loss.backward()
            results += [loss.detach(), state(model)]
            with torch.no_grad():
                for param in model.parameters():
                    param.sub_(param.grad, alpha=0.1)
            model.zero_grad()
        return results

    same(program)


# -- four ranks -------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_a_group_of_two_and_a_hook_for_the_others() -> None:
    """Replicas outside of the mesh: a hook sums over them. Then what replicas are given by one of them."""
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def program(api: Any) -> Results:
        mesh = DeviceMesh.from_group(world.get_group("shard"), "cpu", mesh_dim_names=("shard",))
        model = api.fully_shard(mlp(10, bias=False), mesh=mesh)
        model.set_all_reduce_hook(lambda gradient: dist.all_reduce(gradient, group=world.get_group("replicate")))
        return steps(model, mine(6, 10))

    same(program)

    def replicas(api: Any) -> Results:
        model = api.fully_shard(mlp(), mesh=world)
        shards = [param.to_local() for param in model.parameters()]
        with torch.no_grad():
            for shard in shards:
                if world.get_local_rank("replicate"):
                    shard.fill_(1337)
                source = dist.get_process_group_ranks(world.get_group("replicate"))[0]
                dist.broadcast(shard, src=source, group=world.get_group("replicate"))
        model.unshard(async_op=True)
        return steps(model, mine(6, 8), count=1)

    same(replicas, SEVERAL_FORWARDS)
    ours = fsdp2.fully_shard(built(), mesh=world)
    groups = [world.get_group("replicate"), world.get_group("shard")]
    mesh = DeviceMesh.from_group(groups, "cpu", mesh=world.mesh, mesh_dim_names=("replicate", "shard"))
    assert_same(steps(fsdp2.fully_shard(built(), mesh=mesh), mine(6, 8)), steps(ours, mine(6, 8)))


PLAN = {f"{n}.{i}": style for n in range(2) for i, style in ((0, ColwiseParallel()), (2, RowwiseParallel()))}


def two_dimensions(api: Any, mesh: DeviceMesh, width: int, meta: bool = False, **kwargs: Any) -> nn.Sequential:
    with torch.device("meta" if meta else "cpu"):
        model = nn.Sequential(mlp(width), mlp(width))
    parallelize_module(model, mesh["tp"], PLAN)
    for module in (*model, model):
        api.fully_shard(module, mesh=mesh["dp"], **kwargs)
    return model


@pytest.mark.long
@on_ranks(4)
def test_two_dimensions() -> None:
    """Tensor parallelism inside: training, norms, state dicts, gradient scaling, the meta device."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batch = torch.randn(6, 8, generator=torch.Generator().manual_seed(mesh.get_local_rank("dp")))

    for reshard in (True, False):
        same(
            lambda api, reshard=reshard: steps(
                two_dimensions(api, mesh, 8, reshard_after_forward=reshard), batch, count=2
            ),
            SEVERAL_FORWARDS,
        )
    for norm_type in (2, float("inf")):

        def norms(api: Any, norm_type: float = norm_type) -> Results:
            model = two_dimensions(api, mesh, 8)
            model(batch).square().sum().backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type, foreach=True)
            return [whole(norm), state(model)]

        same(norms, SEVERAL_FORWARDS)

    def states(api: Any) -> Results:
        model = two_dimensions(api, mesh, 6)
        saved = {name: value.detach().clone().fill_(7) for name, value in model.state_dict().items()}
        results = [(name, whole(value)) for name, value in model.state_dict().items()]
        model.load_state_dict(saved)
        return [*results, state(model)]

    same(states)

    def scaled(api: Any) -> Results:
        model = two_dimensions(api, mesh, 64)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scaler.scale(model(torch.ones(2, 64)).sum()).backward()
        if dist.get_rank() == 1:
            shards = [param.grad.to_local() for param in model.parameters()]
            next(shard for shard in shards if shard.numel()).fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        return [scaler.get_scale(), len(optimizer.state)]

    same(scaled)

    def from_meta(api: Any) -> Results:
        model = two_dimensions(api, mesh, 6, meta=True)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.25)
        return steps(model, torch.ones(2, 6), count=1)

    same(from_meta, SEVERAL_FORWARDS)

    def in_float64(api: Any) -> Results:
        return steps(two_dimensions(api, mesh, 8).double(), batch.double(), count=1)

    same(in_float64, SEVERAL_FORWARDS)
