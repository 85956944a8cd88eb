"""Operators on parameters between steps: those of torch's database, writes through views, gradients, and DTensors."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import sys
import unittest
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import zoo
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from parity import raises_everywhere
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mfsdp_compile import fully_shard_model
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.layout import LayoutPolicy, ParamSpec, plan_layouts
from mfsdp_compile.runtime.memory.redistribute import take_rows
from mfsdp_compile.runtime.memory.replicated import ReplicatedTensor, RowView
from mfsdp_compile.runtime.memory.rows import RowSplit
from mfsdp_compile.runtime.memory.tensor import RowShardedTensor
from mfsdp_compile.runtime.topology import Topology


def cut() -> tuple[Any, dict[str, Tensor]]:
    """Return a model whose parameters' rows are on several ranks, and whole parameters."""
    whole = {name: param.detach().clone() for name, param in zoo.Bag().named_parameters()}
    with parity.tight_layouts():
        return fully_shard_model(zoo.Bag(), disable_bucketing=True).module, whole


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def shard(whole: Tensor, topology: Topology, before: int = 0, cuts_matrices: bool = False) -> RowShardedTensor:
    """Shard a tensor, in a bucket behind ``before`` other elements."""
    policy = LayoutPolicy(free_padding_bytes=0 if cuts_matrices else 1 << 20, alignment_bytes=whole.element_size())
    specs = [ParamSpec("before", (before,)), ParamSpec("weight", tuple(whole.shape))]
    layout = next(
        layout
        for layout in plan_layouts(specs, whole.element_size(), topology.shards, policy)
        if any(slot.name == "weight" for slot in layout.slots)
    )
    index = next(i for i, slot in enumerate(layout.slots) if slot.name == "weight")
    split = RowSplit(layout, index)
    return RowShardedTensor.wrap(take_rows(whole, split, topology.shard).clone(), split, topology)


# -- torch's database of operators ------------------------------------------------------------------------------------

RANDOM = [
    "normal",
    "bernoulli",
    "multinomial",
    "dropout",
    "rrelu",
    "empty",
    "rand",
    "cauchy",
    "exponential",
    "geometric",
    "fractional",
    "lowrank",
]
NOT_OF_PARAMETERS = {
    "to_sparse",  # other layouts
    "sparse.mm",
    "to",
    "resize_",  # changes of memory
    "resize_as_",
    "set_",
    "as_strided",
    "nanquantile",  # change shapes in place
    "nn.functional.linear_cross_entropy",
    "linalg.vander",  # puts together an ordinary tensor from new_ones()
    "as_strided_scatter",
    "jiterator_unary",
}

RESHAPE_IN_PLACE = {"squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "as_strided_"}


@functools.cache
def database() -> dict[str, Any]:
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # imported, but not needed
    from torch.testing._internal.common_methods_invocations import op_db

    return {
        f"{op.name} {op.variant_test_name}".strip(): op
        for op in op_db
        if torch.float32 in op.dtypes
        and not any(word in op.name for word in RANDOM)
        and op.name not in NOT_OF_PARAMETERS
    }


def sharded_sample(sample: Any, topology: Topology) -> tuple[Any, Any]:
    """Return the arguments of a sample, with tensors that are sharded or replicated."""
    shape = sample.input.shape

    def convert(tensor: Tensor) -> Tensor:
        if tensor is sample.input or (tensor.shape == shape and tensor.is_floating_point()):
            return shard(tensor.detach(), topology, before=0 if tensor is sample.input else 3)
        return ReplicatedTensor.wrap(tensor.detach(), topology.mesh)

    return compat.tree_map_only(Tensor, convert, ((sample.input, *sample.args), sample.kwargs))


def compare(got: Any, expected: Any, about: str) -> None:
    for mine, its in zip(compat.tree_leaves(got), compat.tree_leaves(expected), strict=True):
        if isinstance(its, Tensor):
            assert isinstance(mine, DTensor), f"{about}: {type(mine)}"
            assert mine.dtype == its.dtype, f"{about}: {mine.dtype} instead of {its.dtype}"
            torch.testing.assert_close(full(mine), its, rtol=1e-4, atol=1e-4, equal_nan=True, msg=about)
        else:
            assert mine == its or its != its, about


def check(name: str, topology: Topology, samples: range) -> int:
    """Compare the chosen samples of an operator; return how many there are."""
    op, tried = database()[name], 0
    torch.manual_seed(0)
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=False), samples.start, None):
        if tried == len(samples):
            break
        if not isinstance(sample.input, Tensor) or not sample.input.is_floating_point():
            continue
        sample.input = sample.input.contiguous()  # as parameters are
        inputs = [t for t in compat.tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(t, Tensor)]
        if any(t.numel() > 1000 or t.layout is not torch.strided for t in inputs):
            continue
        for function in (op.op, op.inplace_variant):
            if function is None or getattr(function, "__name__", "") in RESHAPE_IN_PLACE:
                continue
            args, kwargs = sharded_sample(sample, topology)
            plain = compat.tree_map_only(Tensor, Tensor.clone, ((sample.input, *sample.args), sample.kwargs))
            try:
                expected = function(*plain[0], **plain[1])
            except Exception:
                continue
            if plain[0][0].shape != sample.input.shape or plain[0][0].stride() != sample.input.stride():
                continue  # changes its shape in place
            about = (
                f"{name} {getattr(function, '__name__', '')} {tuple(sample.input.shape)} {sample.args} {sample.kwargs}"
            )
            try:
                compare(function(*args, **kwargs), expected, about)
            except RuntimeError as error:
                raise AssertionError(f"{about}: {error}") from error
            compare(args[0], plain[0][0], about)
        tried += 1
    return tried


@functools.cache
def names() -> list[str]:
    return sorted(database())


@on_ranks(2)
def test_operators_of_torchs_database() -> None:
    """Every operator gives a DTensor of what it gives for whole tensors, and changes what it changes of these.

    Draws are the same on all ranks. A failure is not shrunk, because other ranks would not know of it.
    """
    model, _ = cut()
    tried: list[int] = []

    @seed(int(os.environ["MFSDP_SEED"]))
    @settings(max_examples=60, database=None, deadline=None, phases=[Phase.generate])
    @given(st.sampled_from(names()), st.integers(0, 5))
    def run(name: str, sample: int) -> None:
        tried.append(check(name, model.matrix.topology, range(sample, sample + 1)))

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()
    assert sum(tried) > 20


@pytest.mark.long
@on_ranks(2, 3)
def test_all_operators_of_torchs_database() -> None:
    model, _ = cut()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert sum(check(name, model.matrix.topology, range(5)) for name in names()) > 800


# -- reading ----------------------------------------------------------------------------------------------------------

READS: dict[str, Callable[[Any], Any]] = {
    "row norms": lambda p: p.norm(dim=1),
    "row sums": lambda p: p.sum(dim=1, keepdim=True),
    "column means": lambda p: p.mean(0),
    "column deviations": lambda p: p.std(0, keepdim=True),
    "normalized rows": lambda p: F.normalize(p, dim=1),
    "normalized columns": lambda p: F.normalize(p, dim=0),
    "argmax": lambda p: p.argmax(),
    "argmax of rows": lambda p: p.argmax(1),
    "transposed": lambda p: p.t(),
    "products": lambda p: p @ p.t() @ p,
    "row": lambda p: p[3],
    "element": lambda p: p[2, 3],
    "every other row": lambda p: p[::2],
    "columns": lambda p: p[:, 1:4],
    "masked": lambda p: p[p > 0],
    "flat": lambda p: p.flatten(),
    "other shape": lambda p: p.view(5, 7),
    "more dimensions": lambda p: p.view(7, 5, 1),
    "cat of columns": lambda p: torch.cat([p, p], 1),
    "cat of rows": lambda p: torch.cat([p, p[:2]]),
    "chunk": lambda p: p.chunk(2)[0],
    "split": lambda p: p.split(3)[1],
    "softmax": lambda p: p.softmax(-1) + p.softmax(0),
    "singular values": lambda p: torch.linalg.svdvals(p),
    "spectral norm": lambda p: torch.linalg.matrix_norm(p, 2),
    "vector": lambda p: nn.utils.parameters_to_vector([p, p]),
    "broadcast": lambda p: p * p.mean(0) - p[:, :1] + p[0],
    "vector and matrix": lambda p: p.norm(dim=1).flatten() @ p + p.sum(1) @ p,
    "rows of a list": lambda p: p[[1, 4]],
    "einsum": lambda p: torch.einsum("ij,kj->ik", p, p),
    "by norm": lambda p: torch.where(p.norm(dim=1, keepdim=True) > 2, p, 0.0),
    "list": lambda p: torch._foreach_add([p, p], [p, p.t().t()])[1],
}


@pytest.mark.parametrize("how", ["no_grad", "inference"])
@on_ranks(2, 4)
def test_values_are_those_of_whole_tensors(how: str) -> None:
    model, whole = cut()
    with torch.no_grad() if how == "no_grad" else torch.inference_mode():
        for name, read in READS.items():
            got = read(model.matrix)
            assert isinstance(got, DTensor), name
            torch.testing.assert_close(got.full_tensor(), read(whole["matrix"]), rtol=1e-5, atol=1e-5, msg=name)
        torch.testing.assert_close(full(model.cube.sum(1)), whole["cube"].sum(1))
        torch.testing.assert_close(full(model.cube.transpose(0, 2)), whole["cube"].transpose(0, 2))
        assert full(model.scalar.view(1, 1)).item() == whole["scalar"].item()
        assert full(model.vector[3:5]).tolist() == whole["vector"][3:5].tolist()


@on_ranks(2)
def test_rows_stay_where_they_are() -> None:
    """What is computed row by row communicates nothing; what is not counts the bytes that it receives."""
    model, _ = cut()
    topology, matrix = model.matrix.topology, model.matrix.detach()
    group = compat.process_group(topology.inner.name)
    before = compat.collectives_started(group)
    for read in ("row norms", "row sums", "normalized rows", "argmax of rows", "columns", "more dimensions", "by norm"):
        assert isinstance(READS[read](matrix), RowShardedTensor), read
    matrix[:, 0] = 1.0
    matrix[0] = 2.0
    matrix[matrix.norm(dim=1) > 3] = 0.5
    view = matrix.t()
    assert isinstance(view, RowView)
    assert compat.collectives_started(group) == before
    assert not topology.gathered
    matrix.cumsum(0)
    received = (7 - len(matrix.to_local())) * 5 * 4
    assert dict(topology.gathered) == {"aten.cumsum.default": received}


# -- writing ----------------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Any], Any]] = {
    "row": lambda p: p.__setitem__(0, 3.0),
    "rows": lambda p: p[1:3].fill_(0.25),
    "column": lambda p: p.__setitem__((slice(None), 0), 0.5),
    "element": lambda p: p.__setitem__((2, 3), p[2, 3] + 1),
    "mask": lambda p: p.__setitem__(p < -0.3, 0),
    "mask of rows": lambda p: p.__setitem__(p.norm(dim=1) > 2, 1.0),
    "values": lambda p: p.__setitem__(3, torch.arange(5.0)),
    "indices": lambda p: p.__setitem__(torch.tensor([1, 4]), torch.ones(5)),
    "transposed": lambda p: p.t()[0].mul_(2),
    "flat": lambda p: p.view(-1)[3:9].zero_(),
    "diagonal": lambda p: p.diagonal().add_(1),
    "row from row": lambda p: p[2].copy_(p[5]),
    "unbound": lambda p: [row.mul_(i) for i, row in enumerate(p.unbind(0))],
    "list": lambda p: torch._foreach_mul_([p[0], p[6], p.t()], 2),
    "itself": lambda p: p.copy_(p.flip(0)).cumsum_(0),
    "normalized": lambda p: p.div_(p.norm(dim=1, keepdim=True)),
    "centralized": lambda p: p.sub_(p.mean(0, keepdim=True)),
    "renorm": lambda p: p.renorm_(2, 0, 1.0),
    "vector": lambda p: nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([p]) * 0.5, [p]),
}


@on_ranks(2, 4)
def test_writes_reach_the_parameter() -> None:
    model, whole = cut()
    with torch.no_grad():
        for name, write in WRITES.items():
            expected = whole["matrix"].clone()
            model.matrix.copy_(expected)
            version = model.matrix.backing[0]._version
            write(model.matrix)
            write(expected)
            torch.testing.assert_close(model.matrix.full_tensor(), expected, rtol=1e-5, atol=1e-5, msg=name)
            assert model.matrix.backing[0]._version > version, name
        buffer = torch.zeros(7, 5)
        buffer.copy_(model.matrix)
        assert torch.equal(buffer, model.matrix.full_tensor())


@on_ranks(2)
def test_a_view_shows_later_changes() -> None:
    model, _ = cut()
    with torch.no_grad():
        view = model.matrix.t()[1:3]
        model.matrix.fill_(2.0)
        assert full(view).eq(2).all()
        view.zero_()
        assert full(model.matrix.sum()).item() == 2 * 3 * 7


@on_ranks(2)
def test_writes_that_autograd_records_are_refused() -> None:
    if not compat.DTENSOR_SUBCLASSES_DISPATCH:
        return
    model, whole = cut()
    twice = model.matrix * 2
    with raises_everywhere(RuntimeError, "'matrix'", "no_grad"):
        twice.t().mul_(3)
    with raises_everywhere(RuntimeError, "'matrix'", "no_grad"):
        twice.t()[0].mul_(3)
    assert torch.equal(twice.full_tensor(), whole["matrix"] * 2)


# -- gradients --------------------------------------------------------------------------------------------------------

PENALTIES: dict[str, Callable[[Any], Any]] = {
    "orthogonality": lambda p: (p @ p.t()).pow(2).sum(),
    "row norms": lambda p: p.norm(dim=1).pow(3).sum(),
    "indices": lambda p: p[2].pow(2).sum() + p[:, 1].sum(),
    "transposed": lambda p: (p.t() * 2).pow(2).mean(),
    "spectral": lambda p: torch.linalg.matrix_norm(p, 2),
    "columns": lambda p: (F.normalize(p, dim=0) * p).sum() + p.mean(0).pow(2).sum() * p.std(),
    "other shape": lambda p: p.view(5, 7).pow(3).sum() + p.flatten()[3:20].sum(),
    "extremes": lambda p: p.amax(0).sum() + p.max(1)[0].sum(),
    "softmax": lambda p: p.softmax(1).log().sum() + p.log_softmax(0)[1, 1],
    "cat": lambda p: torch.cat([p, p * 2]).pow(2).sum(),
    "scan": lambda p: (p.cumsum(0) * p).sum(),
    "number": lambda p: p.norm() * torch.tensor(2.0) + torch.tensor(1.0, requires_grad=True),
    "whole": lambda p: full(p.norm()) * 3,
}


@on_ranks(2, 4)
def test_gradients_of_penalties() -> None:
    """The factor differs between ranks; gradients are those of its mean."""
    if not compat.DTENSOR_SUBCLASSES_DISPATCH:
        return
    model, whole = cut()
    for name, penalty in PENALTIES.items():
        model.matrix.grad = None
        alone = whole["matrix"].clone().requires_grad_()
        (penalty(model.matrix) * (1 + 2 * dist.get_rank())).backward()
        (penalty(alone) * dist.get_world_size()).backward()
        torch.testing.assert_close(full(model.matrix.grad), alone.grad, rtol=1e-4, atol=1e-5, msg=name)


# -- other DTensors ---------------------------------------------------------------------------------------------------


@on_ranks(2, 4)
def test_arithmetic_with_torchs_dtensors() -> None:
    model, whole = cut()
    param, values = model.matrix.detach(), torch.arange(35.0).view(7, 5)
    mesh = param.device_mesh
    mine = DTensor.from_local(param.to_local() * 3, mesh, param.placements, shape=param.shape, stride=param.stride())
    assert torch.equal(full(param + mine), whole["matrix"] + whole["matrix"] * 3)
    mine.sub_(param)
    assert torch.equal(mine.to_local(), param.to_local() * 3 - param.to_local())
    for placements in (param.placements, [Shard(0)], [Shard(1)], [Replicate()]):
        theirs = distribute_tensor(values.clone(), mesh, placements)
        assert torch.equal(full(param + theirs), whole["matrix"] + values)
        assert torch.equal(full(theirs - param), values - whole["matrix"])
        theirs.lerp_(param, 0.5)  # their rows
        torch.testing.assert_close(theirs.full_tensor(), values.lerp(whole["matrix"], 0.5))
        torch._foreach_mul_([theirs, theirs], [param, param])
        torch.testing.assert_close(theirs.full_tensor(), values.lerp(whole["matrix"], 0.5) * whole["matrix"] ** 2)
        param.mul_(theirs)  # ours
        param.copy_(whole["matrix"])
        theirs.mul_(param.norm())  # a number
    with raises_everywhere(RuntimeError, "of which ranks hold"):
        param + DTensor.from_local(param.to_local()[:-1], mesh, param.placements, shape=param.shape, stride=(5, 1))


# -- ranks that hold few rows -----------------------------------------------------------------------------------------


@on_ranks(4)
def test_ranks_with_few_rows_do_as_others() -> None:
    """Torch refuses views that overlap if they are dense, as those of a single row are."""
    model, whole = cut()
    matrix, expected = model.matrix.detach(), whole["matrix"]
    for write in (
        lambda p: p[:, 1:3].mul_(p[:, 2:4]),
        lambda p: p[:, :4].copy_(p[:, 1:]),
        lambda p: torch._foreach_add_([p[:, 1:3]], [p[:, 2:4]]),
    ):
        write(matrix)
        write(expected)
        assert torch.equal(full(matrix), expected)
    row = model.row.detach()  # on one rank
    for mask in (row > -9, row < -9):
        assert [full(each).item() for each in (mask.amax(), mask.amin())] == [mask.full_tensor().any().item()] * 2
    row.fill_(-torch.inf)
    assert full(row.max()).item() == full(row.amax(0).sum()).item() == full((-row).min() * -1).item() == -torch.inf


@on_ranks(2)
def test_reductions_of_nothing() -> None:
    model, whole = cut()
    empty = model.empty.detach()
    for read in (lambda p: p.mean(), lambda p: p.mean(0), lambda p: F.mse_loss(p, p), lambda p: p.norm(dim=0)):
        torch.testing.assert_close(full(read(empty)), read(whole["empty"]), equal_nan=True)
    for read, error in ((Tensor.max, RuntimeError), (lambda p: p.amin(0), IndexError)):
        with raises_everywhere(error, "dim"):
            read(empty)
    assert full(empty.norm(torch.inf)).item() == 0  # torch raises, but clip_grad_norm_ must not


@on_ranks(2)
def test_sums_of_16_bit_numbers_are_added_in_float32() -> None:
    model, whole = cut()
    for dtype in (torch.float16, torch.bfloat16):
        for scale in (1.0, 200.0):
            param = model.cube.detach().to(dtype).mul_(scale)
            alone = whole["cube"].to(dtype).mul_(scale)
            for read in (
                lambda p: p.norm(),
                lambda p: p.norm(3, dim=0),
                lambda p: p.abs().sum(),
                lambda p: p.mean((0, 1)),
                lambda p: F.mse_loss(p, p / 2),
                lambda p: torch._foreach_norm([p])[0],
            ):
                got, expected = full(read(param)), read(alone)
                assert got.dtype == dtype
                torch.testing.assert_close(got, expected)


# -- results ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_results_are_dtensors_that_mix_with_ordinary_tensors() -> None:
    model, whole = cut()
    norm = model.matrix.detach().norm()
    assert isinstance(norm, DTensor)
    assert norm.placements == (Replicate(),)
    torch.testing.assert_close(norm.full_tensor(), whole["matrix"].norm())
    assert norm.item() == float(norm) == norm.to_local().item() == norm.tolist()
    assert f"{norm:.3f}" == f"{norm.item():.3f}"
    assert norm.numpy() == norm.item()
    assert type(norm * torch.ones(3)) is Tensor
    assert isinstance(norm * 2 + torch.tensor(1.0), DTensor)
    total = torch.zeros(())
    total += norm
    assert type(total) is Tensor
    assert total == norm
    copied = norm.clone()
    dist.all_reduce(copied)
    torch.testing.assert_close(copied.item(), norm.item() * 2)
    stacked = torch.stack([norm, norm.square()])
    assert torch.equal(stacked.redistribute(placements=[Shard(0)]).full_tensor(), stacked.full_tensor())


@on_ranks(4)
def test_meshes_of_two_dimensions() -> None:
    from mfsdp_compile.diagnostics.doctor import mesh_arguments

    whole = {name: param.detach().clone() for name, param in zoo.Bag().named_parameters()}
    for strategy in ("HSDP optim_grads_params", "HFSDP", "HSDP no_shard"):
        with parity.tight_layouts():
            model = fully_shard_model(zoo.Bag(), disable_bucketing=True, **mesh_arguments(strategy)).module
        with torch.no_grad():
            for name in ("row norms", "normalized columns", "transposed", "flat"):
                torch.testing.assert_close(full(READS[name](model.matrix)), READS[name](whole["matrix"]))
            for name in ("row", "transposed", "centralized"):
                expected = whole["matrix"].clone()
                model.matrix.copy_(expected)
                WRITES[name](model.matrix)
                WRITES[name](expected)
                torch.testing.assert_close(full(model.matrix), expected)


@on_ranks(2)
def test_stacks_whose_matrices_are_cut() -> None:
    model, _ = cut()
    whole = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    stack = shard(whole, model.matrix.topology, cuts_matrices=True)
    assert stack.row_split.row_dims == 2
    for read in (
        lambda p: p.norm(dim=2),
        lambda p: p.mean(1),
        lambda p: p.sum((0, 1), keepdim=True),
        lambda p: p.transpose(1, 2),
        lambda p: p[1, :, 2],
        lambda p: p[..., 1:3],
        lambda p: p.flatten(1),
        lambda p: p.view(3, 5, 2, 2),
        lambda p: p - p.mean(2, keepdim=True),
        lambda p: p @ p.mT,
    ):
        torch.testing.assert_close(full(read(stack)), read(whole))
    for write in (lambda p: p[1, 2:4].fill_(1.0), lambda p: p[..., 0].mul_(2), lambda p: p.mT[2].zero_()):
        write(stack)
        write(whole)
        torch.testing.assert_close(full(stack), whole)


@on_ranks(2)
def test_what_is_gathered_is_logged() -> None:
    model, _ = cut()
    lines: list[str] = []
    logger, handler = logging.getLogger("mfsdp_compile.operators"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        matrix, values = model.matrix.detach(), torch.arange(35.0).view(7, 5)
        matrix.flip(0)
        matrix.t().numpy()
        matrix.add(distribute_tensor(values, matrix.device_mesh, [Shard(1)]))
        matrix.add(shard(values, matrix.topology, before=13))
        matrix.full_tensor()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert [line.split(": ")[0] for line in lines] == [
        "aten.flip.default gathers 'matrix' (7, 5)",
        "a view gathers 'matrix' (7, 5)",
        "an operand of 'matrix' gathers 'a DTensor' (7, 5)",
        "an exchange of rows gathers 'weight' (7, 5)",
        "full_tensor() gathers 'matrix' (7, 5)",
    ]
    assert {line.split(": ")[1] for line in lines} <= {f"{size} B received" for size in range(0, 140, 4)}
    assert len(matrix.topology.gathered) >= 4
