"""More programs that people write, each compared with one process. They are small, so a test has several."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from parity import AOT_EAGER, EAGER
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from mfsdp_compile import MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.memory import gradients
from mfsdp_compile.runtime.memory.deferred_gradients import DeferredGradient, RequestedGradients
from mfsdp_compile.runtime.memory.gradients import defer_unless_due
from mfsdp_compile.runtime.step import graph_runs
from mfsdp_compile.runtime.step.graph_runs import GraphRun


class Heads(zoo.Plain):
    """Tasks 0 and 1 have one head each, task 2 uses both, and nothing uses the pooler."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.other, self.pooler = nn.Linear(16, 5), nn.Linear(16, 16)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(self.trunk(self.enter(x)))

    def forward(self, x: Tensor, task: int = 2) -> Tensor:  # type: ignore[override]
        h = self.features(x)
        if task == 2:
            return self.head(h).pow(2).mean() + self.other(h).abs().mean()
        return (self.head if task == 0 else self.other)(h).pow(2).mean()


class Pair:
    """A sharded model, and the same model in one process."""

    def __init__(
        self, factory: Callable[[], nn.Module], mode: str, optimizer: Any = parity.sgd, **options: Any
    ) -> None:
        self.model = fully_shard_model(parity.build(factory), fsdp_unit_modules=[zoo.Block], **options)
        compiled = functools.partial(torch.compile, backend="mfsdp", options={"inner": mode})
        self.call: Any = self.model if mode == EAGER else compiled(self.model)
        self.alone = parity.build(factory)
        self.optimizers = [optimizer(each.parameters()) for each in (self.model, self.alone)]

    def each(self, change: Callable[[Any], Any]) -> None:
        change(self.model.module)
        change(self.alone)

    def backward(self, loss: Callable[[Any, Tensor, int], Tensor], batch: Tensor, last: bool = True) -> None:
        with self.model.sync() if last else self.model.no_sync():
            loss(self.call, batch[dist.get_rank()], dist.get_rank()).backward()
        for rank in range(2):
            (loss(self.alone, batch[rank], rank) / 2).backward()

    def check_gradients(self) -> None:
        for name, param in self.model.module.named_parameters():
            expected = self.alone.get_parameter(name).grad
            assert (param.grad is None) == (expected is None), name
            if expected is not None:
                torch.testing.assert_close(param.grad.full_tensor(), expected, rtol=1e-4, atol=1e-6, msg=name)

    def step(self, **options: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(**options)

    def check_parameters(self, tolerance: float = 1e-5) -> None:
        for name, param in self.model.module.named_parameters():
            its = self.alone.get_parameter(name)
            torch.testing.assert_close(param.full_tensor(), its, rtol=1e-4, atol=tolerance, msg=name)


def decayed(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.3)


@pytest.mark.long
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_frozen_in_the_middle_of_accumulation(mode: str) -> None:
    """A unit, or a part of a bucket, may be frozen for one of several microbatches. Accumulated gradients stay."""
    parts: list[Callable[[Any], Any]] = [
        lambda m: m.blocks[0],
        lambda m: m.enter.weight,
        lambda m: m.blocks[1].up.bias,
        lambda m: m.head,
    ]
    for strategy in (0, 1, 2, 3) if mode == EAGER else (1, 3):
        pair = Pair(Heads, mode, decayed, zero_dp_strategy=strategy)
        for part, batch in zip(parts, parity.batches(4), strict=True):
            for number in range(3):
                pair.each(lambda m: part(m).requires_grad_(number != 1))
                pair.backward(lambda m, x, _: m(x[2 * number : 2 * number + 2]), batch, last=number == 2)
            pair.check_gradients()
            pair.step()


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_frozen_between_forward_and_backward(mode: str) -> None:
    """What a forward recorded gets gradients, except for parameters that are frozen when their gradient arrives."""
    pair = Pair(zoo.Plain, mode)
    for number, batch in enumerate(parity.batches(3)):
        pair.each(lambda m: m.blocks[1].requires_grad_(number != 1))
        mine, theirs = pair.call(batch[dist.get_rank()]), sum(pair.alone(x) for x in batch) / 2
        pair.each(lambda m: m.requires_grad_(True))
        if number == 2:
            pair.each(lambda m: m.blocks[1].requires_grad_(False))
            pair.each(lambda m: m.enter.weight.requires_grad_(False))
        mine.backward()
        theirs.backward()
        pair.check_gradients()
        pair.step()
    pair.check_parameters()


@on_ranks(2)
def test_other_heads_in_every_microbatch() -> None:
    """Ranks may use different heads, drop gradients between microbatches, and zero them in place after some steps."""
    plans = [(0, 1, 0), (0, 0, 0), (1, 2, 1), (1, 1, 0)]
    for strategy in range(4):
        pair = Pair(Heads, EAGER, decayed, zero_dp_strategy=strategy)
        for step, (batch, tasks) in enumerate(zip(parity.batches(4), plans, strict=True)):
            for number, task in enumerate(tasks):

                def loss(m: Any, x: Tensor, rank: int) -> Tensor:
                    of_rank = (task + rank * (step % 2)) % 2 if task < 2 else 2
                    return m(x[2 * number : 2 * number + 2], of_rank)

                pair.backward(loss, batch, last=number == 2)
                if (step, number) == (2, 0):
                    pair.each(lambda m: setattr(m.blocks[0].up.weight, "grad", None))
                    pair.each(lambda m: setattr(m.other.bias, "grad", None))
            pair.check_gradients()
            for optimizer in pair.optimizers:
                optimizer.step()
            pair.each(lambda m: m.zero_grad(set_to_none=step % 2 == 0))


@on_ranks(2)
def test_heads_of_which_each_rank_uses_another_one() -> None:
    """If each rank uses another head, hooks run on both ranks for both heads.

    Two optimizers clear their own gradients, also while gradients of microbatches are deferred.
    """
    for strategy in (1, 3):
        pair = Pair(Heads, EAGER, zero_dp_strategy=strategy)
        seen: list[str] = []
        for name, param in pair.model.module.named_parameters():
            param.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
        heads = [[p for n, p in m.named_parameters() if n.startswith("head")] for m in (pair.model.module, pair.alone)]
        cleared = [torch.optim.SGD(params) for params in heads]
        cleared[0] = fully_shard_optimizer(cleared[0])
        for number, batch in enumerate(parity.batches(3)):
            seen.clear()
            pair.backward(lambda m, x, rank: m(x, rank), batch, last=number == 2)
            if number < 2:
                for optimizer in cleared:
                    optimizer.zero_grad()
        pair.check_gradients()
        assert {"head.weight", "other.weight", "enter.weight"} <= set(seen)
        assert not any(name.startswith("pooler") for name in seen)


@on_ranks(2)
def test_gradients_that_are_put_aside() -> None:
    pair = Pair(Heads, EAGER)
    first, second = parity.batches(2)
    pair.backward(lambda m, x, _: m(x), first)
    aside = gradients.stash(pair.model.sharded.buckets)
    assert all(param.grad is None for param in pair.model.parameters())
    pair.backward(lambda m, x, _: m(x), second)
    gradients.unstash(aside)
    pair.check_gradients()


class StubBucket:
    """The part of a bucket that a deferred gradient uses. Its first parameter has two elements."""

    def __init__(self, is_due: bool) -> None:
        self.owner = SimpleNamespace(grad_sync=SimpleNamespace(is_due=lambda: is_due))
        self.plan = SimpleNamespace(keeps_memory=False)
        self.pending: DeferredGradient | None = None

    def keep(self, use: str, values: Tensor) -> Tensor:
        return values

    def show_unreduced(self) -> None:
        pass

    def zero_slices(self, gradient: Tensor, indices: Any) -> None:
        assert set(indices) == {0}
        gradient[:2] = 0


def test_a_gradient_that_waits_is_a_copy() -> None:
    """A deferred gradient is a copy, because compiled code reuses its memory."""
    bucket = StubBucket(is_due=False)
    pending = bucket.pending = DeferredGradient(bucket, torch.float32)
    gradient = torch.ones(4)
    assert defer_unless_due(pending.token, gradient) is None
    gradient.zero_()
    assert torch.equal(pending.total, torch.ones(4))


def test_a_reduction_writes_nothing_into_its_input() -> None:
    """``backward(inputs=...)`` leaves out a parameter: compiled code may read the packed gradients elsewhere too."""
    bucket = StubBucket(is_due=True)
    pending = bucket.pending = DeferredGradient(bucket, torch.float32)
    pending.requested = RequestedGradients(returned=frozenset(), added=frozenset({1}), left_out=frozenset({0}), count=2)
    gradient = torch.ones(4)
    reduced = defer_unless_due(pending.token, gradient)
    assert torch.equal(reduced, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    assert torch.equal(gradient, torch.ones(4))


def test_what_is_gathered_counts_no_more_after_a_failure(fake_world: int) -> None:
    model = fully_shard_model(parity.build(zoo.Plain), zero_dp_strategy=1)
    model(torch.ones(2, 8)).backward()
    (bucket,) = model.sharded.buckets
    assert not bucket.is_stale
    bucket.forget_resident()
    assert bucket.is_stale


@on_ranks(2)
def test_weights_that_change_after_they_were_gathered_early() -> None:
    """If a hook of one block changes the next block, whose gather has started, the next block uses the new weights."""
    pair = Pair(lambda: zoo.Plain(layers=3), EAGER)

    def grow(module: Any) -> None:
        weight = module.blocks[1].up.weight  # at rest

        def hook(*_: Any) -> None:
            with torch.no_grad():
                weight.mul_(2)

        module.blocks[0].register_forward_hook(hook)

    for number, batch in enumerate(parity.batches(3)):
        if number == 1:  # by then the order of units is known
            pair.each(grow)
        with torch.no_grad():
            mine = pair.call(batch[0])
            torch.testing.assert_close(mine, pair.alone(batch[0]))


def test_what_is_gathered_in_a_step(fake_world: int) -> None:
    """In a step, the next unit is in flight, and a frozen unit is released when another one is gathered.

    Nothing shows when the gradients of a frozen unit would be complete.
    """
    model = fully_shard_model(parity.build(zoo.FrozenUnit), fsdp_unit_modules=[zoo.Block])
    seen: list[set[str]] = []

    def look(*_: Any) -> None:
        seen.append({bucket.plan.unit for bucket in model.sharded.eager.gathering.gathered})

    model.module.blocks[0].register_forward_hook(look)
    for _ in range(2):
        seen.clear()
        x = torch.ones(2, 8, requires_grad=True)
        x.register_hook(look)
        model(x).backward()
    forward, backward = seen
    assert {"blocks.0", "blocks.1"} <= forward
    assert "blocks.2" not in forward
    assert "blocks.1" not in backward


def test_what_follows_on_what_is_forgotten_with_a_step(fake_world: int) -> None:
    """The order of units that an abandoned step learned is forgotten. Ranks may have learned different orders."""
    model = fully_shard_model(parity.build(Heads), fsdp_unit_modules=[zoo.Block, nn.Linear])
    eager = model.sharded.eager
    before = dict(eager.gathering._next)
    model(torch.ones(2, 8), 1)
    assert eager.gathering._next != before
    eager.abandon()
    assert eager.gathering._next == before


@on_ranks(2, timeout=60)
def test_gradients_of_gradients_are_refused_in_compiled_code() -> None:
    pair = Pair(zoo.Plain, AOT_EAGER)
    x = parity.batches(1)[0][dist.get_rank()]
    with parity.raises_everywhere(RuntimeError, "create_graph=True", "not supported"):
        pair.call(x).backward(create_graph=True)
    pair.call(x).backward()


@on_ranks(2, timeout=90)
def test_gradient_penalties() -> None:
    """They need gradients of gradients of inputs: in eager forwards, also of a model that is compiled otherwise."""

    def penalized(call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        loss = call(x.requires_grad_())
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.norm(dim=1).sub(1).square().mean()

    for whole in (True, False):
        pair = Pair(zoo.Plain, AOT_EAGER if whole else EAGER)
        if not whole:
            for block in pair.model.module.blocks:
                block.compile(backend="mfsdp", options={"inner": AOT_EAGER})
        batch = parity.batches(1)[0]
        with parity.raises_everywhere(RuntimeError, "create_graph=True", "set_stance('force_eager')"):
            penalized(pair.call, batch[dist.get_rank()].clone())
        pair.model.zero_grad()
        with torch.compiler.set_stance("force_eager"):
            penalized(pair.call, batch[dist.get_rank()].clone()).backward()
        for each in batch:
            (penalized(pair.alone, each.clone()) / dist.get_world_size()).backward()
        for (name, mine), its in zip(pair.model.module.named_parameters(), pair.alone.parameters(), strict=True):
            parity.close(name, mine.grad.full_tensor(), its.grad)


@on_ranks(2)
def test_a_changed_gradient_is_what_is_added_to() -> None:
    """The next backward adds to a gradient that the user changed, also where the sum is in another dtype."""
    policy = MixedPrecisionPolicy(main_params_dtype=torch.bfloat16, main_grads_dtype=torch.float32)
    model = fully_shard_model(nn.Linear(4, 8).bfloat16(), mixed_precision_policy=policy)
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    for _ in range(2):
        model(x).sum().backward()
        model.module.weight.grad.mul_(0.5)
    assert torch.equal(model.module.weight.grad.full_tensor(), torch.full((8, 4), 1.5, dtype=torch.bfloat16))


@on_ranks(2)
def test_projected_gradients_and_sharpness() -> None:
    """PCGrad (gradients by task, minus the conflicting part) and SAM (two backwards, weights moved in between) work."""

    class Tasks(Heads):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            h = self.features(x)
            return self.head(h).pow(2).mean(), -self.other(h).abs().mean()

    pair = Pair(Tasks, EAGER)
    for batch in parity.batches(2):
        each = [pair.alone(x) for x in batch]
        means = [sum(losses) / len(each) for losses in zip(*each, strict=True)]
        for model, losses in ((pair.model, pair.call(batch[dist.get_rank()])), (pair.alone, means)):
            params = list(model.parameters())
            first, second = (torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True) for loss in losses)
            both = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
            dot, norm = sum((a * b).sum() for a, b in both), sum((b * b).sum() for _, b in both)
            part = torch.where(dot < 0, dot / norm, 0.0)  # type: ignore[operator, call-overload]
            for param, a, b in zip(params, first, second, strict=True):
                param.grad = a - b * part + b if a is not None and b is not None else (a if b is None else b)
        pair.check_gradients()
        pair.step()
    pair.check_parameters()

    pair = Pair(zoo.Plain, EAGER)
    for batch in parity.batches(2):
        pair.backward(lambda m, x, _: m(x), batch)
        moved = []
        for model in (pair.model, pair.alone):
            with torch.no_grad():
                norm = torch.stack([param.grad.norm() for param in model.parameters()]).norm()
                for param in model.parameters():
                    moved.append((param, param.grad * (0.05 / norm)))
                    param.add_(moved[-1][1])
            model.zero_grad()
        pair.backward(lambda m, x, _: m(x), batch)
        with torch.no_grad():
            for param, by in moved:
                param.sub_(by)
        pair.check_gradients()
        pair.step()
    pair.check_parameters()


class MyLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x, gradient.sum(0)


class OddReads(zoo.Plain):
    """Weights under vmap, einsum, transposed, standardized, via ``.data``, in a custom function and in checkpoints."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.stack = nn.Parameter(torch.randn(3, 16, 16) * 0.2)
        self.conv, self.temperature = nn.Conv1d(1, 2, 3, padding=1), nn.Parameter(torch.tensor(0.5))
        self.bilinear, self.bag = nn.Bilinear(16, 16, 16), nn.EmbeddingBag(7, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(self.enter(x))
        if not isinstance(self.stack, nn.Parameter):  # it is a parameter, as without sharding
            return h.sum() * 0
        h = h + torch.vmap(lambda w: torch.tanh(h @ w))(self.stack).mean(0)
        h = h + torch.einsum("bi,kij->bj", h, self.stack) * self.temperature.exp()
        weight = self.head.weight
        h = h + F.linear(F.linear(h, weight), weight.t()) / (1 + weight.data.norm())
        conv = self.conv.weight
        conv = (conv - conv.mean((1, 2), keepdim=True)) / (conv.std((1, 2), keepdim=True) + 1e-5)
        h = h + F.conv1d(h[:, None], conv, self.conv.bias, padding=1).sum(1)
        h = h + self.bilinear(h, h) + self.bag(torch.arange(6).view(len(x), -1) % 7)
        block = self.blocks[0]
        h = h + checkpoint(
            lambda h, w, v: F.gelu(h @ w.t()) @ v.t(), h, block.up.weight, block.down.weight, use_reentrant=False
        )
        return MyLinear.apply(self.norm(h), weight, self.head.bias).pow(2).mean()


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_weights_read_in_odd_ways(mode: str) -> None:
    pair = Pair(OddReads, mode)
    for batch in parity.batches(2, (3, 8)):
        pair.backward(lambda m, x, _: m(x), batch)
        pair.check_gradients()
        pair.step()
    pair.check_parameters()


@on_ranks(2)
def test_optimizers_of_different_frequencies() -> None:
    """Optimizers over one bucket may step at different frequencies.

    The trunk steps after every backward, heads after every second. Each optimizer clears its own gradients.
    """
    for strategy in (1, 3):
        pair = Pair(Heads, EAGER, zero_dp_strategy=strategy)
        both = []
        for model in (pair.model.module, pair.alone):
            heads = [p for name, p in model.named_parameters() if name.startswith(("head", "other"))]
            trunk = [p for name, p in model.named_parameters() if not name.startswith(("head", "other"))]
            both.append((parity.sgd(trunk), torch.optim.AdamW(heads, lr=1e-2)))
        for step, batch in enumerate(parity.batches(4)):
            pair.backward(lambda m, x, _: m(x, (step // 2) % 2), batch)
            pair.check_gradients()
            for trunk, heads in both:
                for optimizer in (trunk, heads) if step % 2 else (trunk,):
                    optimizer.step()
                    optimizer.zero_grad()
        pair.check_parameters(1e-3)


@on_ranks(2)
def test_momentum_contrast() -> None:
    """MoCo works: the key encoder has another layout, and follows by mul_().add_() and through ``.data``."""

    class Encoder(zoo.Plain):
        def __init__(self) -> None:
            super().__init__(layers=2)
            self.register_buffer("queue", F.normalize(torch.randn(5, 12), dim=0))

        def forward(self, x: Tensor) -> Tensor:
            return F.normalize(self.head(self.norm(self.trunk(self.enter(x)))), dim=1)

    pair = Pair(Encoder, EAGER)
    its_keys = parity.build(Encoder).requires_grad_(False)
    keys = fully_shard_model(parity.build(Encoder).requires_grad_(False), fsdp_unit_modules=[nn.Linear])

    def loss(model: Any, x: Tensor, _: int) -> Tensor:
        ours = model is pair.call
        with torch.no_grad():
            key = (keys if ours else its_keys)(x + 0.1)
        query, queue = model(x), (pair.model.module if ours else pair.alone).queue
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ queue], 1)
        return F.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))

    for step, batch in enumerate(parity.batches(3)):
        with torch.no_grad():
            for of, model in ((keys, pair.model), (its_keys, pair.alone)):
                for k, q in zip(of.parameters(), model.parameters(), strict=True):
                    if step % 2:
                        k.mul_(0.9).add_(q, alpha=0.1)
                    else:
                        k.data = k.data * 0.9 + q.data * 0.1
        pair.backward(loss, batch)
        pair.check_gradients()
        pair.step()
    for k, expected in zip(keys.parameters(), its_keys.parameters(), strict=True):
        torch.testing.assert_close(k.full_tensor(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@on_ranks(2)
def test_towers_in_one_compiled_function() -> None:
    """CLIP works: two models, dicts as outputs, one of them frozen in turn, an auxiliary output in the loss once."""

    class Tower(zoo.Plain):
        def __init__(self) -> None:
            super().__init__(layers=1)

        def forward(self, x: Tensor) -> dict[str, Any]:  # type: ignore[override]
            h = self.norm(self.trunk(self.enter(x)))
            return {"features": F.normalize(self.head(h), dim=-1), "auxiliary": self.enter(x).sum(), "nothing": None}

    def scores(a: nn.Module, b: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        u, v = a(x), b(x * 0.5)
        return F.cross_entropy(u["features"] @ v["features"].t(), torch.arange(len(x))), u

    towers = [Pair(Tower, EAGER) for _ in range(2)]
    compiled = torch.compile(scores, backend="mfsdp", options={"inner": AOT_EAGER})
    for step, batch in enumerate(parity.batches(4)):
        for number, pair in enumerate(towers):
            pair.each(lambda m: m.requires_grad_(step != number + 1))
        extra = 0.1 * (step == 3)
        loss, u = compiled(towers[0].model, towers[1].model, batch[dist.get_rank()])
        (loss + extra * u["auxiliary"] if extra else loss).backward()
        for x in batch:
            loss, u = scores(towers[0].alone, towers[1].alone, x)
            ((loss + extra * u["auxiliary"] if extra else loss) / 2).backward()
        for pair in towers:
            pair.check_gradients()
            pair.step()
    for pair in towers:
        pair.check_parameters()


@on_ranks(2)
def test_steps_in_backward_every_second_time() -> None:
    """Hooks run on all ranks for what one rank used, also if a gradient from before exists."""
    pair = Pair(Heads, EAGER)
    count = 0

    def step(param: Any) -> None:
        if count % 2 and param.grad is not None:
            with torch.no_grad():
                param.sub_(param.grad, alpha=0.05)
                param.grad = None

    for param in pair.model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for batch in parity.batches(4):
        pair.backward(lambda m, x, rank: m(x, 2 if rank == 0 else 0), batch)
        for param in pair.alone.parameters():
            step(param)
        count += 1
    pair.check_parameters()


@on_ranks(2, timeout=60)
def test_parameters_kept_from_an_earlier_forward_are_refused() -> None:
    class Caches(zoo.Plain):
        def __init__(self) -> None:
            super().__init__(layers=1)
            self.cache: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            if not self.cache:
                self.cache.append(self.head.weight)
            return F.linear(self.norm(self.trunk(self.enter(x))), self.cache[0]).pow(2).mean()

    model = fully_shard_model(parity.build(Caches), fsdp_unit_modules=[zoo.Block])
    model(torch.ones(2, 8)).backward()
    with parity.raises_everywhere(RuntimeError, "'head.weight' was gathered for an earlier forward"):
        model(torch.ones(2, 8))
    assert "head.weight" in repr(model.module.cache[0])
    model.module.cache.clear()
    model(torch.ones(2, 8)).backward()


@on_ranks(2, timeout=60)
def test_writes_without_a_trace_are_found_in_any_forward() -> None:
    class Writes(zoo.Plain):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            if self.count == 3:
                for weight in (self.blocks[0].up.weight, self.blocks[0].down.weight):  # rows on both ranks
                    weight[:].data.mul_(2)
            return super().forward(x)

    model = fully_shard_model(parity.build(functools.partial(Writes, layers=1)), fsdp_unit_modules=[zoo.Block])
    for _ in range(2):
        model(torch.ones(2, 8)).backward()
    with parity.raises_everywhere(RuntimeError, "wrote to a parameter"):
        model(torch.ones(2, 8))


@pytest.mark.long_unless("*-eager")
@pytest.mark.skipif(not compat.DTENSOR_SUBCLASSES_DISPATCH, reason="torch cannot differentiate parameters at rest")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_penalties_on_parameters_that_forward_does_not_use(mode: str) -> None:
    """Parameters that forward does not use get the gradient of a penalty, computed outside of every forward."""
    pair = Pair(Heads, mode)
    for batch in parity.batches(2):
        pair.backward(lambda m, x, rank: m(x, 0), batch)
        for model in (pair.model.module, pair.alone):
            (0.1 * model.pooler.weight.pow(2).sum()).backward()
        pair.check_gradients()
        pair.step()
    loss = pair.call(parity.batches(1)[0][dist.get_rank()], 0) + 0.1 * pair.model.module.pooler.weight.pow(2).sum()
    loss.backward()
    its = pair.alone.pooler.weight
    torch.testing.assert_close(pair.model.module.pooler.weight.grad.full_tensor(), 0.2 * its.detach())


PENALTIES: dict[str, Callable[[Any], Tensor]] = {
    "squares": lambda params: sum(p.pow(2).sum() for p in params),
    "norms": lambda params: torch.stack([torch.linalg.vector_norm(p) for p in params]).mean(),
    "foreach norms": lambda params: torch.stack(torch._foreach_norm(list(params))).square().sum(),
    "extremes": lambda params: sum(p.abs().max() for p in params),
    "variances": lambda params: sum(p.std(correction=0) for p in params),
    "distances": lambda params: sum(F.mse_loss(p, p.detach() * 0.5) for p in params),
    "in place": lambda params: functools.reduce(lambda total, p: total.add_(p.mean()), params, torch.zeros(())),
    "means of both": lambda params: sum(m * v for v, m in (torch.var_mean(p, correction=0) for p in params)),
}


@pytest.mark.long_if("*-eager")
@pytest.mark.skipif(not compat.DTENSOR_SUBCLASSES_DISPATCH, reason="torch cannot differentiate parameters at rest")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_penalties_times_what_differs_between_ranks(mode: str) -> None:
    """A factor that differs between ranks applies to the rows of all ranks."""
    names = list(PENALTIES) if mode == EAGER else ["squares"]
    for name in names:
        pair = Pair(zoo.Uneven, mode)

        def loss(call: Any, x: Tensor, rank: int, penalty: Any = PENALTIES[name]) -> Tensor:
            return call(x) + (0.01 + rank) * penalty(getattr(call, "module", call).parameters())

        for batch in parity.batches(2):
            pair.backward(loss, batch, last=False)
            pair.backward(lambda *a: -loss(*a).sigmoid(), batch)
            pair.check_gradients()
            pair.step()
        pair.check_parameters()


@pytest.mark.skipif(not compat.DTENSOR_SUBCLASSES_DISPATCH, reason="torch cannot differentiate parameters at rest")
@on_ranks(4)
def test_penalties_times_what_differs_between_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    both = {"dp_outer_dim": "outer", "hybrid_fsdp_group": dist.group.WORLD}
    hybrid = {"device_mesh": mesh, "dp_shard_dim": "inner", **both}
    for options in ({"zero_dp_strategy": 0}, hybrid, hybrid | {"outer_dp_sharding_strategy": "optim"}):
        model, alone = fully_shard_model(parity.build(zoo.Plain), **options), parity.build(zoo.Plain)
        penalty = PENALTIES["squares"]
        (dist.get_rank() * penalty(model.parameters())).backward()
        (1.5 * penalty(alone.parameters())).backward()
        for name, param in model.module.named_parameters():
            torch.testing.assert_close(param.grad.full_tensor(), alone.get_parameter(name).grad, msg=name)


@pytest.mark.skipif(not compat.DTENSOR_SUBCLASSES_DISPATCH, reason="torch cannot differentiate parameters at rest")
@on_ranks(2)
def test_penalties_in_compiled_code() -> None:
    pair = Pair(zoo.Plain, EAGER)

    def loss(model: nn.Module, x: Tensor, factor: Tensor) -> Tensor:
        penalty = sum(p.pow(2).sum() for p in model.parameters())
        return model(x) + factor * penalty.sqrt()

    compiled = torch.compile(loss, backend="mfsdp", options={"inner": AOT_EAGER})
    for batch in parity.batches(2):
        for each, call, ranks in ((pair.model, compiled, [dist.get_rank()]), (pair.alone, loss, [0, 1])):
            for rank in ranks:
                (call(each, batch[rank], torch.tensor(0.1 + rank)) / len(ranks)).backward()
        pair.check_gradients()
        pair.step()


@pytest.mark.skipif(not compat.DTENSOR_SUBCLASSES_DISPATCH, reason="torch cannot differentiate parameters at rest")
@on_ranks(2, timeout=60)
def test_a_penalty_in_the_loss_of_one_rank() -> None:
    """If all ranks compute a penalty and one goes backward through it, both ranks raise, and neither waits."""
    model = fully_shard_model(parity.build(zoo.Plain))
    loss = model(torch.ones(2, 8))
    penalty = model.module.head.weight.pow(2).sum()
    with parity.raises_everywhere(RuntimeError, "head.weight"):
        (loss + penalty if dist.get_rank() == 0 else loss).backward()


@pytest.mark.skipif(not compat.DTENSOR_SUBCLASSES_DISPATCH, reason="torch cannot differentiate parameters at rest")
@on_ranks(2)
def test_penalties_are_ordinary_numbers() -> None:
    pair = Pair(zoo.Plain, EAGER)

    def penalty(model: nn.Module) -> Tensor:
        return model.head.weight.pow(2).sum()

    mine, its = penalty(pair.model.module), penalty(pair.alone)
    assert mine.requires_grad and not mine.is_leaf and mine.item() == pytest.approx(its.item()) and repr(mine)
    with torch.no_grad():
        assert not (mine * 2).requires_grad and not penalty(pair.model.module).requires_grad
    mine.retain_grad()
    (mine * (1 + dist.get_rank())).backward(retain_graph=True)
    assert mine.grad is not None and mine.grad.item() == 1 + dist.get_rank()  # this rank's gradient, as for any loss
    (gradient,) = torch.autograd.grad(mine * dist.get_rank(), pair.model.module.head.weight)
    torch.testing.assert_close(gradient.full_tensor(), pair.alone.head.weight.detach())
    mine = penalty(pair.model.module)
    mine *= 2
    assert mine.detach().item() == pytest.approx(2 * its.item())
    (first,) = torch.autograd.grad(mine * dist.get_rank(), pair.model.module.head.weight, create_graph=True)
    (dist.get_rank() * first.pow(2).sum()).backward()
    torch.testing.assert_close(pair.model.module.head.weight.grad.full_tensor(), 7 * pair.alone.head.weight.detach())


def test_a_backward_belongs_to_the_graph_that_computed_its_input() -> None:
    """A graph that returns a view of its input does not take the backward of the graph before it for its own."""
    first, second = GraphRun([], "first"), GraphRun([], "second")
    x = torch.randn(3, 4, requires_grad=True)
    y = torch.compile(lambda x: x.sin() * 2, backend="aot_eager")(x)
    first.watch_backward(y)
    z = torch.compile(lambda y: y.view(-1), backend="aot_eager")(y)
    second.watch_backward(z)
    with mock.patch.object(graph_runs, "_thread", SimpleNamespace(expected=None)) as thread:
        z.sum().backward()
        assert thread.expected is first
