"""Trains a model sharded, and the same model in one process on the data of all ranks, and compares the results."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import zoo
from torch import Tensor, nn

from mfsdp_compile import MegatronFSDP, MixedPrecisionPolicy, fsdp2, fully_shard_model
from mfsdp_compile.runtime.geometry.layout import LayoutPolicy

EAGER, AOT_EAGER, INDUCTOR = "eager", "aot_eager", "inductor"
FACE = "fsdp2"


@dataclass
class Run:
    """Results of a training run: whole tensors, by parameter name."""

    losses: list[Tensor] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    shards: list[Tensor] = field(default_factory=list)  # every local gradient and parameter, for bitwise comparison
    model: Any = None


def build(factory: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return factory()


def batches(steps: int, shape: Sequence[int] = (6, 8), seed: int = 1) -> Tensor:
    """Return batches of shape ``[steps, world_size, *shape]``, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, dist.get_world_size(), *shape, generator=generator)


def shard(model: nn.Module, mode: str, units: Any = None, **options: Any) -> tuple[MegatronFSDP, Callable[..., Any]]:
    """Return a sharded model, and what to call in its place in the given mode."""
    units = units if units is not None else [type(model).block] if hasattr(type(model), "block") else "auto"
    sharded = fully_shard_model(
        model,
        fsdp_unit_modules=units,
        mixed_precision_policy=options.pop("precision", MixedPrecisionPolicy()),
        bucket_bytes=options.pop("bucket_bytes", None),
        unit_bytes=options.pop("unit_bytes", None),
        **options.pop("sharding", {}),
    )
    if mode == EAGER:
        return sharded, sharded
    fullgraph = options.pop("fullgraph", False)
    return sharded, torch.compile(sharded, backend="mfsdp", fullgraph=fullgraph, options={"inner": mode, **options})


def shard_by(mode: str, model: nn.Module) -> tuple[Any, Any]:
    """Return a model that is sharded by FSDP2's face or the wrapper, with a unit per block, and what to call."""
    blocks: Any = model.blocks
    if mode == FACE:
        for module in (*blocks, model):
            fsdp2.fully_shard(module)
        return model, model
    wrapped, call = shard(model, mode, [type(blocks[0])])
    return wrapped.module, call


@contextlib.contextmanager
def layouts(**policy: Any) -> Iterator[None]:
    """Make layouts by another policy than the default."""
    with mock.patch("mfsdp_compile.sharding_arguments.LayoutPolicy", functools.partial(LayoutPolicy, **policy)):
        yield


tight_layouts = functools.partial(layouts, free_padding_bytes=0, alignment_bytes=16)
"""Layouts of small models that are padded as little as those of large ones."""


def train_sharded(
    factory: Callable[[], nn.Module],
    mode: str,
    data: Tensor,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    microbatches: int = 1,
    **options: Any,
) -> Run:
    model, call = shard(build(factory), mode, **options)
    rank = dist.get_rank()
    optimizer = optimizer or _adamw
    optim = optimizer(model.parameters())
    run = Run(model=model)
    for step, batch in enumerate(data):
        for micro in range(microbatches):
            torch.manual_seed(1000 * step + 10 * micro + rank)
            loss = call(_micro(batch[rank], micro, microbatches))
            loss.backward()
            run.losses.append(loss.detach())
        gradients = {}
        for name, param in model.module.named_parameters():
            if param.grad is not None:
                gradients[name] = param.grad.full_tensor()
                run.shards.append(param.grad.to_local().clone())
        run.gradients.append(gradients)
        optim.step()
        optim.zero_grad()
    run.params = {name: param.full_tensor().detach() for name, param in model.module.named_parameters()}
    run.shards += [param.to_local().detach().clone() for param in model.parameters()]
    return run


def train_alone(
    factory: Callable[[], nn.Module],
    data: Tensor,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    microbatches: int = 1,
) -> Run:
    """Train in one process on the batches of all ranks.

    Gradients are the mean over ranks of the sum over microbatches.
    """
    model = build(factory)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    optim = (optimizer or _adamw)(model.parameters())
    run = Run(model=model)
    buffers = [copy.deepcopy(dict(model.named_buffers())) for _ in range(world_size)]  # each rank has its own
    for step, batch in enumerate(data):
        mine = []
        for other in range(world_size):
            _set_buffers(model, buffers[other])
            for micro in range(microbatches):
                torch.manual_seed(1000 * step + 10 * micro + other)
                loss = model(_micro(batch[other], micro, microbatches))
                (loss / world_size).backward()
                if other == rank:
                    mine.append(loss.detach())
            buffers[other] = copy.deepcopy(dict(model.named_buffers()))
        run.losses += mine
        for param in model.parameters():
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.to_dense()
        run.gradients.append(
            {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
        )
        optim.step()
        optim.zero_grad()
    _set_buffers(model, buffers[rank])
    run.params = {name: param.detach() for name, param in model.named_parameters()}
    return run


def _set_buffers(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        buffer.copy_(values[name])


def _micro(batch: Tensor, micro: int, microbatches: int) -> Tensor:
    return batch.chunk(microbatches)[micro]


def _adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def sgd(params: Any) -> torch.optim.Optimizer:
    """Return an optimizer for comparisons of parameters.

    Adam would turn rounding of tiny gradients into steps of size lr.
    """
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def train_both_ways(
    factory: Callable[[], nn.Module], data: Tensor, optimizer: Any = sgd, alone: Run | None = None, **options: Any
) -> Run:
    """Train eagerly and compiled. Assert that both agree, bit for bit, and with one process, if it is given."""
    eager = train_sharded(factory, EAGER, data, optimizer, **options)
    assert_bitwise(eager, train_sharded(factory, AOT_EAGER, data, optimizer, **options))
    if alone is not None:
        assert_close(eager, alone)
    return eager


def assert_bitwise(a: Run, b: Run) -> None:
    for x, y in zip(a.losses, b.losses, strict=True):
        assert torch.equal(x, y), f"losses {a.losses} and {b.losses}"
    for i, (x, y) in enumerate(zip(a.shards, b.shards, strict=True)):
        assert torch.equal(x, y), f"shard {i} differs by {(x - y).abs().max().item() if x.numel() else 0}"


def assert_same_by_name(a: Run, b: Run) -> None:
    """Assert bitwise equality by parameter, where shards are at different places."""
    assert all(torch.equal(x, y) for x, y in zip(a.losses, b.losses, strict=True))
    for mine, its in zip([*a.gradients, a.params], [*b.gradients, b.params], strict=True):
        assert mine.keys() == its.keys()
        for name, value in mine.items():
            assert torch.equal(value, its[name]), name


def assert_close(run: Run, alone: Run, relative: float = 1e-5, params: bool = True) -> None:
    """Assert equality up to ``relative`` of the largest element of each tensor.

    Sums in another order round differently.
    """
    for x, y in zip(run.losses, alone.losses, strict=True):
        assert abs(x - y) <= relative * max(abs(y), 1e-3), f"losses {run.losses} and {alone.losses}"
    for step, (mine, its) in enumerate(zip(run.gradients, alone.gradients, strict=True)):
        assert mine.keys() == its.keys(), (
            f"step {step}: gradients of {sorted(mine.keys() ^ its.keys())} on one side only"
        )
        largest = max((g.abs().max().item() for g in its.values() if g.numel()), default=0.0)
        for name, gradient in its.items():
            close(f"gradient of {name}, step {step}", mine[name], gradient, relative, largest)
    if params:
        for name, param in alone.params.items():
            close(name, run.params[name], param, relative)


def close(what: str, mine: Tensor, its: Tensor, relative: float = 1e-5, scale: float = 0.0) -> None:
    """Assert equality up to ``relative`` of the largest element.

    The bound covers the rounding of float32 sums of some hundred terms in another order.
    """
    assert mine.shape == its.shape, f"{what}: shapes {tuple(mine.shape)} and {tuple(its.shape)}"
    if not its.numel():
        return
    bound = relative * max(its.abs().max().item(), scale * 1e-2, 1e-12)
    difference = (mine - its).abs().max().item()
    assert difference <= bound, f"{what}: differs by {difference}, allowed {bound}"


@contextlib.contextmanager
def first_rank_warns(category: type[Warning], match: str) -> Iterator[list[warnings.WarningMessage]]:
    """Context in which rank 0 gives a warning, and no other rank does."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught
    said = [each for each in caught if issubclass(each.category, category) and re.search(match, str(each.message))]
    assert bool(said) == (dist.get_rank() == 0), [str(each.message) for each in caught]


@contextlib.contextmanager
def raises_everywhere(error: type[BaseException], *fragments: str) -> Any:
    """Assert that the block raises on this rank, with a message that contains all fragments."""
    try:
        yield
    except error as caught:
        for fragment in fragments:
            assert fragment in str(caught), f"{fragment!r} is not in the message: {caught}"
    else:
        raise AssertionError(f"no {error.__name__} was raised")


MODELS = {
    name: cls
    for name, cls in vars(zoo).items()
    if isinstance(cls, type) and issubclass(cls, zoo.Plain) and not name.startswith("_")
}
