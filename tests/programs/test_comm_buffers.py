"""Communication buffers change no number: whatever the program, nothing is overwritten while it is needed."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR, MODELS, Run
from poisoning import patient, poisoned
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from mfsdp_compile import fully_shard_model
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.geometry.exchange import Buffers
from mfsdp_compile.runtime.memory.allocation import Allocator
from mfsdp_compile.runtime.memory.comm_buffers import BufferKind, BufferPolicy, BufferPool, assign_buffers
from mfsdp_compile.runtime.schedule.phase import Phase

DOUBLE = {"fsdp_double_buffer": True}
LARGEST = {"maxpool_double_buffer": True}
ALL = {"fsdp_double_buffer": True, "fsdp_db_use_persist_buf_on_alloc_fail": True}


def train(factory: Any, mode: str, late: bool = True, microbatches: int = 1, **options: Any) -> Run:
    with poisoned(late):
        return parity.train_sharded(factory, mode, parity.batches(steps=3), parity.sgd, microbatches, **options)


def pool_of(run: Run) -> BufferPool:
    return run.model.sharded.comm_buffers


def assert_few(run: Run) -> None:
    for kind, addresses in pool_of(run).addresses.items():
        assert len(set(addresses)) == len(addresses) <= 2, kind


@pytest.mark.long_unless("*-Stacked")
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_every_feature(name: str) -> None:
    plain = parity.train_sharded(MODELS[name], EAGER, parity.batches(steps=3), parity.sgd)
    assert not pool_of(plain).addresses
    for mode, sharding in ((EAGER, DOUBLE), (AOT_EAGER, LARGEST)):
        run = train(MODELS[name], mode, sharding=sharding)
        parity.assert_bitwise(plain, run)
        assert_few(run)


@pytest.mark.long
@pytest.mark.parametrize("strategy", [0, 1, 2, 3, "hsdp", "hfsdp"])
@on_ranks(4)
def test_every_strategy(strategy: Any) -> None:
    sharding: dict[str, Any] = {"zero_dp_strategy": strategy}
    if isinstance(strategy, str):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        sharding = {
            "device_mesh": mesh,
            "dp_outer_dim": "outer",
            "dp_shard_dim": "inner",
            "hybrid_fsdp_group": mesh["outer", "inner"]._flatten().get_group(),
            "outer_dp_sharding_strategy": int(strategy == "hfsdp"),
        }
    data = parity.batches(steps=3)
    plain = parity.train_sharded(zoo.Plain, EAGER, data, parity.sgd, microbatches=2, sharding=sharding)
    for mode in (EAGER, AOT_EAGER):
        # Residents are gathered with the same operator, into memory that the shard is a part of.
        late = strategy in (3, "hsdp")
        run = train(zoo.Plain, mode, late, microbatches=2, sharding={**sharding, **ALL})
        parity.assert_bitwise(plain, run)
        assert_few(run)
        uses = {kind.use for kind in pool_of(run).addresses}
        gathers = {"gather"} if strategy in (3, "hsdp", "hfsdp") else set()
        # Gradients that wait for a reduction stay in memory of their own.
        assert uses == gathers | ({"gradients"} if strategy in (2, 3) else set())


class SmallLlama(Llama):
    def __init__(self, width: int = 16, hidden: int = 24) -> None:
        super().__init__(LlamaConfig(vocabulary=64, width=width, layers=4, heads=2, kv_heads=2, hidden=hidden))

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        tokens = x.abs().mul(8).long() % 64
        return super().forward(tokens[:, :-1], tokens[:, 1:])


@pytest.mark.long
@pytest.mark.parametrize(
    ("regions", "sizes"),
    [(False, (16, 24)), (True, (16, 24)), (True, (64, 128))],
    ids=["graph", "regions", "regions without padding"],
)
@pytest.mark.slow
@on_ranks(2)
def test_inductor(regions: bool, sizes: tuple[int, int]) -> None:
    options = {"units": [Block], "regions": regions}
    factory = functools.partial(SmallLlama, *sizes)
    plain = parity.train_sharded(factory, INDUCTOR, parity.batches(steps=3), parity.sgd, **options)
    for sharding in (DOUBLE, ALL):
        with patient():
            run = train(factory, INDUCTOR, sharding=sharding, **options)
        parity.assert_bitwise(plain, run)
        assert_few(run)
        assert {kind.use for kind in pool_of(run).addresses} == {"gather", "gradients"}
        assert pool_of(run).fresh <= 1, "while Inductor compiles, it holds what the first backward saved"


@on_ranks(2)
def test_addresses_stay() -> None:
    """Steps use the same buffers, and eager code uses as few as compiled code."""
    model: Any = fully_shard_model(parity.build(SmallLlama), fsdp_unit_modules=[Block], **ALL)
    call = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager"})
    found = []
    with patient():
        for step in (call, call, model, model):
            step(torch.randn(2, 8)).backward()
            model.zero_grad()
            found.append(model.sharded.comm_buffers.addresses)
    pool = model.sharded.comm_buffers
    for before, after in itertools.pairwise(found):
        for kind, addresses in before.items():
            assert after[kind][: len(addresses)] == addresses
    assert pool.fresh == 0
    assert pool.nbytes <= model.sharded.comm_buffer_bytes()


class Keeps(zoo.Plain):
    """Keeps gathered parameters."""

    def trunk(self, x: Tensor) -> Tensor:
        self.kept = []
        for block in self.blocks:
            x = block(x)
            self.kept.append(block.up.weight)
        return x


@on_ranks(2)
def test_what_a_program_keeps_is_not_overwritten() -> None:
    """A parameter that the program keeps keeps its buffer: other units get memory of their own."""
    with poisoned():
        model, call = parity.shard(parity.build(Keeps), EAGER, sharding=DOUBLE)
        call(parity.batches(1)[0, dist.get_rank()]).backward()
    pool = model.sharded.comm_buffers
    assert pool.fresh > 0
    for block, kept in zip(model.module.blocks, model.module.kept, strict=True):
        assert torch.equal(kept.detach(), block.up.weight.full_tensor())


@pytest.mark.long
@on_ranks(2)
def test_more_buffers_where_more_is_prefetched() -> None:
    data = parity.batches(steps=2)
    options = {"units": [zoo.Block], "fullgraph": True, "prefetch": 2, "report": True}
    factory = lambda: zoo.Plain(layers=5)  # noqa: E731
    plain = parity.train_sharded(factory, AOT_EAGER, data, parity.sgd, **options)
    with poisoned(), patient():
        run = parity.train_sharded(factory, AOT_EAGER, data, parity.sgd, sharding=DOUBLE, **options)
    parity.assert_bitwise(plain, run)
    counts = {kind.use: len(addresses) for kind, addresses in pool_of(run).addresses.items()}
    assert counts["gather"] == 3
    assert pool_of(run).fresh == 0
    (record,) = run.model.sharded.compiled_graphs
    (report,) = (r for r in record.reports[Phase.FORWARD] if r.name == "comm_buffers")
    assert any("gathered into one of 3 buffers" in line for line in report.lines)


@on_ranks(2)
def test_a_failed_step_leaves_no_buffer_behind() -> None:
    model, call = parity.shard(parity.build(zoo.Plain), EAGER, sharding=DOUBLE)
    x = torch.randn(6, 8)
    with pytest.raises(RuntimeError, match="shapes"):
        call(torch.randn(6, 9))
    assert not model.sharded.comm_buffers.addresses
    model.reset()
    call(x).backward()
    assert model.sharded.comm_buffers.addresses


# -- without ranks ----------------------------------------------------------------------------------------------------


def test_which_buckets_have_buffers() -> None:
    half, single = torch.bfloat16, torch.float32
    sizes = [(8, half), (4, half), (4, half), (4, single), (4, half), (16, single)]
    assert assign_buffers(sizes, BufferPolicy()) == [Buffers()] * 6
    two = Buffers(4, 2)
    assert assign_buffers(sizes, BufferPolicy(True)) == [Buffers(), two, two, Buffers(), two, Buffers()]
    singles = assign_buffers(sizes, BufferPolicy(True, singles=True))
    assert singles == [Buffers(8, 1), two, two, Buffers(4, 1), two, Buffers(16, 1)]
    largest = assign_buffers(sizes, BufferPolicy(True, largest=True))
    assert largest == [Buffers(8, 2)] * 3 + [Buffers(16, 2), Buffers(8, 2), Buffers(16, 2)]


def test_memory_that_stays() -> None:
    """The formulas of docs/moving/megatron_fsdp.md are bounds, which a step reaches but for a buffer for gradients."""
    with compat.fake_process_group(4):
        for sharding, singles in ((DOUBLE, 0), (ALL, 2), (LARGEST, 0)):
            model: Any = fully_shard_model(parity.build(SmallLlama), fsdp_unit_modules=[Block], **sharding)
            sizes = {bucket.plan.name: 4 * bucket.plan.layout.numel for bucket in model.sharded.buckets}
            layer = sizes["layers.0"]
            alone = sum(size for name, size in sizes.items() if not name.startswith("layers."))
            largest = max(sizes.values())
            most = 4 * largest if sharding is LARGEST else 4 * layer + singles * alone
            assert model.sharded.comm_buffer_bytes() == most
            model(torch.randn(2, 8)).backward()
            least = most - (largest if sharding is LARGEST else layer)
            assert least <= model.sharded.comm_buffers.nbytes <= most


KIND = BufferKind("gather", 8, torch.float32, torch.device("cpu"))


def test_a_buffer_is_free_when_nothing_refers_to_it() -> None:
    pool = BufferPool()
    first = pool.take(KIND, 2, 6)
    assert first.shape == (6,)
    view, address = first[2:4].view(2, 1), first.data_ptr()
    del first
    second = pool.take(KIND, 2, 8)
    assert second.data_ptr() != address, "the view refers to it"
    third = pool.take(KIND, 2, 8)
    assert pool.fresh == 1
    assert third.data_ptr() not in pool.addresses[KIND]
    del view
    assert pool.take(KIND, 2, 8).data_ptr() == address
    assert pool.nbytes == 2 * 8 * 4


def test_what_autograd_saved_keeps_a_buffer() -> None:
    pool = BufferPool()
    weight = pool.take(KIND, 1, 8).fill_(3.0)
    x = torch.ones(8, requires_grad=True)
    y = (x * weight).sum()
    del weight
    pool.take(KIND, 1, 8).fill_(7.0)
    assert pool.fresh == 1
    y.backward()
    assert torch.equal(x.grad, torch.full((8,), 3.0))
    del y
    pool.take(KIND, 1, 8)
    assert pool.fresh == 1


def test_a_strict_pool_takes_turns_or_refuses() -> None:
    pool = BufferPool(is_strict=True)
    addresses = [pool.take(KIND, 2, 8).data_ptr() for _ in range(4)]
    assert addresses[:2] == addresses[2:]
    assert len(set(addresses)) == 2
    kept = pool.take(KIND, 2, 8)
    pool.take(KIND, 2, 8)
    with pytest.raises(RuntimeError, match=r"gather, 8 elements in float32 on cpu.*still referred to"):
        pool.take(KIND, 2, 8)
    del kept
    pool.take(KIND, 2, 8)


def test_a_users_allocator() -> None:
    asked: list[tuple[int, torch.dtype, torch.device]] = []

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        asked.append((numel, dtype, device))
        return torch.zeros(numel, dtype=dtype, device=device)

    pool = BufferPool(allocate)
    assert pool.take(KIND, 2, 3).tolist() == [0.0] * 3
    assert asked == [KIND[1:]]
    pool.drop()
    assert pool.nbytes == 0


@pytest.mark.parametrize("name", [*DOUBLE, *LARGEST, "fsdp_db_use_persist_buf_on_alloc_fail"])
def test_arguments_take_true_or_false(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} takes True or False"):
        fully_shard_model(nn.Linear(2, 2), **{name: 2})


# -- allocators of the user -------------------------------------------------------------------------------------------


class Arena:
    """Allocates from one piece of memory, in the order of the calls."""

    def __init__(self, size: int = 1 << 20) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8).numpy()
        self.used = 0

    def __call__(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        buffer = torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=self.used)
        self.used += -(-buffer.nbytes // 64) * 64
        return buffer

    def __contains__(self, address: int) -> bool:
        return 0 <= address - self.memory.ctypes.data < self.memory.size


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_buffers_in_memory_of_the_user(mode: str) -> None:
    plain = parity.train_sharded(zoo.Plain, mode, parity.batches(steps=3), parity.sgd)
    for policy in (DOUBLE, LARGEST, ALL):
        arena = Arena()
        with patient():
            run = train(zoo.Plain, mode, sharding={**policy, "buffer_allocator": arena})
        parity.assert_bitwise(plain, run)
        assert_few(run)
        uses = {kind.use: addresses for kind, addresses in pool_of(run).addresses.items()}
        assert uses.keys() == {"gather", "gradients"}
        assert all(address in arena for addresses in uses.values() for address in addresses)
        assert pool_of(run).fresh == 0


@on_ranks(2)
def test_copies_have_buffers_of_their_own() -> None:
    x = torch.randn(6, 8)
    model = parity.shard(parity.build(zoo.Plain), EAGER, sharding={**DOUBLE, "buffer_allocator": Arena()})[0]
    model(x).backward()
    duplicate = copy.deepcopy(model)
    assert not duplicate.sharded.comm_buffers.addresses
    duplicate(x).backward()
    own, its = (
        {address for addresses in each.sharded.comm_buffers.addresses.values() for address in addresses}
        for each in (model, duplicate)
    )
    assert len(own) == len(its)
    assert not own & its


def _shares(numel: int, dtype: torch.dtype, device: torch.device, whole: Tensor = torch.empty(1 << 16)) -> Tensor:
    return whole.view(dtype)[:numel]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda n, dtype, device: [0.0] * n, "returned a list. Return a torch.Tensor"),
        (lambda n, dtype, device: nn.Parameter(torch.empty(n, dtype=dtype)), "returned a Parameter"),
        (lambda n, dtype, device: torch.empty(n, dtype=torch.float64), "returned torch.float64"),
        (lambda n, dtype, device: torch.empty(n, dtype=dtype, device="meta"), "returned memory on meta"),
        (lambda n, dtype, device: torch.empty(1, n, dtype=dtype), r"returned a tensor of shape \(1, 8\)"),
        (lambda n, dtype, device: torch.empty(n + 8, dtype=dtype), r"returned a tensor of shape \(16,\)"),
        (lambda n, dtype, device: torch.empty(2 * n, dtype=dtype)[::2], r"returned a tensor of stride \(2,\)"),
        (lambda n, dtype, device: torch.empty(n, requires_grad=True), "returned a tensor that requires gradients"),
        (lambda n, dtype, device: torch.empty(n + 4)[4:], "returned a tensor that begins at element 4 of its storage"),
        (
            lambda n, dtype, device: torch.frombuffer(torch.empty(64).numpy(), dtype=dtype, count=n, offset=4),
            "returned memory at an address that is not a multiple of 16 bytes",
        ),
        (_shares, "returned a view of memory that other tensors refer to"),
    ],
)
def test_an_allocators_memory_is_checked(wrong: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"asked for 8 elements in torch.float32 on cpu, and {message}"):
        Allocator(wrong)(*KIND[1:])


def test_an_allocators_buffers_do_not_overlap() -> None:
    memory = torch.empty(64).numpy()
    places = iter([0, 64, 32, 0, 0])
    allocator = Allocator(lambda n, dtype, device: torch.frombuffer(memory, dtype=dtype, count=n, offset=next(places)))
    first, second = (allocator(*KIND[1:]) for _ in range(2))
    for _ in range(2):  # the second time, all of the first buffer
        with pytest.raises(ValueError, match="memory that overlaps with a buffer it has returned before"):
            allocator(16, torch.float32, torch.device("cpu"))
    view = first[2:]
    del first
    assert view.untyped_storage().nbytes() == 32, "still in use"
    del view
    assert allocator(*KIND[1:]).data_ptr() < second.data_ptr()


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_a_wrong_allocator_leaves_the_model_usable(mode: str) -> None:
    """The error is one of the step, in forward and in backward. The next step is right if the allocator is."""
    data = parity.batches(steps=1)[0, dist.get_rank()]
    plain, plain_call = parity.shard(parity.build(zoo.Plain), mode)
    plain_call(data).backward()
    calls, wrong = 0, 0

    def allocate(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.empty(numel + (calls == wrong), dtype=dtype, device=device)

    model, call = parity.shard(parity.build(zoo.Plain), mode, sharding={**DOUBLE, "buffer_allocator": allocate})
    for wrong in (1, 2, 3):  # the buffers for gathers, and one for gradients
        calls = 0
        with pytest.raises(ValueError, match="buffer_allocator was asked for"):
            call(data).backward()
        assert calls == wrong
        model.reset()
        model.zero_grad()
    calls = 4
    call(data).backward()
    for (name, mine), its in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), its.grad.to_local()), name
    assert model.sharded.comm_buffers.addresses


def test_allocators_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    with monkeypatch.context() as patched:
        patched.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:512")
        with pytest.raises(ValueError, match=r"nccl_ub: PYTORCH_ALLOC_CONF has 'expandable"):
            fully_shard_model(model, nccl_ub=True)
    with pytest.raises(
        TypeError, match=r"buffer_allocator takes a function.*what models without fsdp_double_buffer use"
    ):
        fully_shard_model(model, buffer_allocator="storage_resize", **DOUBLE)
    with pytest.raises(ValueError, match=r"buffer_allocator: NCCL allocates the buffers of nccl_ub"):
        fully_shard_model(model, buffer_allocator=Arena(), nccl_ub=True)
    with (
        pytest.raises(ValueError, match=r"this model has none: pass fsdp_double_buffer=True or maxpool"),
        compat.fake_process_group(2),
    ):
        fully_shard_model(model, buffer_allocator=Arena())


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_what_inference_allocated_serves_training(mode: str) -> None:
    model, call = parity.shard(parity.build(zoo.Plain), mode, sharding=DOUBLE)
    with torch.inference_mode():
        call(torch.randn(6, 8))
    addresses = model.sharded.comm_buffers.addresses
    call(torch.randn(6, 8)).backward()
    assert addresses.items() <= model.sharded.comm_buffers.addresses.items()


# -- registration with NCCL -------------------------------------------------------------------------------------------


class _Nccl:
    """Stands for ``ProcessGroupNCCL``, and records what it is asked for."""

    def __init__(self, group: str, log: list[Any]) -> None:
        self.group, self._log = group, log
        self.mem_allocator = f"allocator of {group}"

    def register_mem_pool(self, pool: Any, symm: bool = False) -> None:
        self._log.append(("register", self.group, pool, symm))

    def deregister_mem_pool(self, pool: Any) -> None:
        self._log.append(("deregister", self.group, pool))


@contextlib.contextmanager
def on_nccl(version: tuple[int, ...] = (2, 28, 9)) -> Iterator[list[Any]]:
    """Context in which NCCL seems to run all groups. Gives a list of what is asked of it."""
    log: list[Any] = []

    class MemPool:
        def __init__(self, allocator: str) -> None:
            self.allocator = allocator
            log.append(("pool", allocator))

    @contextlib.contextmanager
    def use(pool: MemPool) -> Iterator[None]:
        log.append("allocate")
        yield
        log.append("allocated")

    with (
        mock.patch.object(compat, "nccl_backend", lambda group, device: _Nccl(group, log)),
        mock.patch.object(compat, "warm_up", lambda group, device: log.append(("warm up", group))),
        mock.patch("torch.cuda.MemPool", MemPool),
        mock.patch("torch.cuda.use_mem_pool", use),
        mock.patch("torch.cuda.nccl.version", return_value=version),
        patient(),
    ):
        yield log


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_registered_buffers(mode: str) -> None:
    """All buffers are allocated at once in NCCL's memory, registered once per communicator, and used in turn."""
    data = parity.batches(steps=3)
    plain = parity.train_sharded(zoo.Plain, mode, data, parity.sgd)
    with on_nccl() as log, poisoned():
        run = parity.train_sharded(zoo.Plain, mode, data, parity.sgd, sharding={"nccl_ub": True})
    parity.assert_bitwise(plain, run)
    sharded = run.model.sharded
    groups = _groups_of(run)
    assert len(groups) == 2, "gathers have a communicator of their own"
    allocated = [("pool", f"allocator of {groups[0]}"), "allocate", "allocated"]
    pool = log[-1][2]
    assert log == allocated + [
        entry for group in groups for entry in (("warm up", group), ("register", group, pool, True))
    ]
    assert pool_of(run).is_strict
    assert pool_of(run).nbytes == sharded.comm_buffer_bytes()
    assert all(len(addresses) == 2 for addresses in pool_of(run).addresses.values())
    assert pool_of(run).fresh == 0
    del log[:]
    with on_nccl() as log_of_reset:
        run.model.reset()
    assert log == [("deregister", group, pool) for group in reversed(groups)]
    now = _groups_of(run)
    assert not {*now} & {*groups}
    assert [entry[:2] for entry in log_of_reset if entry[0] == "register"] == [("register", group) for group in now]
    del log_of_reset[:]
    sharded.registration = None
    assert [entry[:2] for entry in log_of_reset] == [("deregister", group) for group in reversed(now)]


def _groups_of(run: Run) -> list[str]:
    """Return the names of the groups that buckets are gathered and reduced over, in the order of registration."""
    exchange = run.model.sharded.buckets[0].exchange
    return list(dict.fromkeys([exchange.gather_group, *exchange.lane.group_names]))


@pytest.mark.parametrize(("mode", "asks"), [(EAGER, True), (EAGER, False), (AOT_EAGER, False)])
@on_ranks(2)
def test_a_copy_is_registered_when_it_is_used(mode: str, asks: bool) -> None:
    """Registering is a collective, but a rank may copy a model alone: ranks register when they use the copy, or ask."""
    with on_nccl() as log:
        model, _ = parity.shard(parity.build(zoo.Plain), EAGER, sharding={"nccl_ub": True})
        del log[:]
        twin = copy.deepcopy(copy.deepcopy(model) if not asks else model)
        assert not log
        assert not twin.sharded.comm_buffers.is_strict
        if asks:
            assert twin.manual_buffer_registration()
        else:
            call = twin if mode == EAGER else torch.compile(twin, backend="mfsdp", options={"inner": "aot_eager"})
            with torch.no_grad():
                call(torch.randn(6, 8))
        assert twin.sharded.comm_buffers.is_strict
        registered = [entry for entry in log if entry[0] == "register"]
        assert [(group, symmetric) for _, group, _, symmetric in registered] == [
            (group, True) for group in model.sharded.members.group_names
        ]
        data = torch.randn(6, 8)
        for each in (model, twin):
            each(data).backward()
        for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad.to_local(), its.grad.to_local())
        assert len([entry for entry in log if entry[0] == "register"]) == len(registered), "once"
        addresses = [
            {a for kind in each.sharded.comm_buffers.addresses.values() for a in kind} for each in (model, twin)
        ]
        assert not addresses[0] & addresses[1]
        del log[:]
        twin.sharded.registration.end()
        assert [entry[:2] for entry in log] == [
            ("deregister", group) for group in reversed([g for _, g, *_ in registered])
        ]
        assert model.sharded.registration.is_active


@pytest.mark.parametrize(
    ("version", "disabled", "symmetric"),
    [((2, 26, 2), False, False), ((2, 27, 3), True, False), ((2, 27, 3), False, True)],
)
@on_ranks(2)
def test_symmetric_memory(version: tuple[int, ...], disabled: bool, symmetric: bool) -> None:
    with on_nccl(version) as log:
        model = parity.shard(
            parity.build(zoo.Plain),
            EAGER,
            sharding={"nccl_ub": True, "disable_symmetric_registration": disabled, "fsdp_manual_registration": True},
        )[0]
        assert not log
        assert model.manual_buffer_registration()
    assert [entry[3] for entry in log if entry[0] == "register"] == [symmetric] * 2
    assert model.sharded.comm_buffers.is_strict == symmetric


@on_ranks(2)
def test_without_nccl_nothing_is_registered() -> None:
    model, call = parity.shard(parity.build(zoo.Plain), EAGER, sharding={"nccl_ub": True})
    assert not model.manual_buffer_registration()
    call(torch.randn(6, 8)).backward()
    assert not model.sharded.comm_buffers.is_strict
    assert model.sharded.comm_buffers.addresses
    with pytest.raises(ValueError, match="sharded with nccl_ub=True"):
        parity.shard(parity.build(zoo.Plain), EAGER)[0].manual_buffer_registration()
    with pytest.raises(ValueError, match="average_in_collective: NCCL only sums in symmetric memory"):
        fully_shard_model(nn.Linear(2, 2), nccl_ub=True, average_in_collective=True)


@on_ranks(2)
def test_memory_that_torch_does_not_have() -> None:
    """Without multicast, torch refuses to allocate with NCCL. So does sharding, which leaves the model as it was."""

    class Refusing(_Nccl):
        @property
        def mem_allocator(self) -> str:
            raise RuntimeError("NCCL mem allocator is not supported in this NCCL version")

        @mem_allocator.setter
        def mem_allocator(self, value: str) -> None: ...

    model = parity.build(zoo.Plain)
    with (
        on_nccl() as log,
        mock.patch.object(compat, "nccl_backend", lambda group, device: Refusing(group, log)),
        mock.patch("torch.cuda.get_device_name", return_value="NVIDIA A10"),
        pytest.raises(
            RuntimeError, match=r"supports multicast, which NVLink switches do, and NVIDIA A10.*Leave nccl_ub"
        ),
    ):
        fully_shard_model(model, fsdp_unit_modules=[zoo.Block], nccl_ub=True)
    assert not log
    sharded, call = parity.shard(model, EAGER, sharding=DOUBLE)
    call(torch.randn(6, 8)).backward()
    assert sharded.sharded.comm_buffers.addresses


def test_torch_registers_pools_as_it_is_called_here() -> None:
    """The stand-in above has the signatures of torch's class, where torch has it: in builds for CUDA."""
    kind = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:
        pytest.skip("a build of torch without NCCL")
    assert "pool: torch._C._MemPool, symm: bool = False) -> None" in kind.register_mem_pool.__doc__
    assert "torch._C._MemPool) -> None" in kind.deregister_mem_pool.__doc__
    options = kind.Options(is_high_priority_stream=True)
    options.config.max_ctas = 8
    device = torch.device("cuda")
    group: Any = SimpleNamespace(_device_types=[device], _get_backend=lambda device: SimpleNamespace(options=options))
    copied = compat.nccl_options(group)
    assert copied is not options
    assert copied.is_high_priority_stream
    assert copied.config.max_ctas == 8
