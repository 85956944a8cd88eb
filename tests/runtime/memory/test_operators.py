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
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
import zoo
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from parity import raises_everywhere
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from mfsdp_compile import fully_shard_model
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.geometry.layout import LayoutPolicy, ParamSpec, plan_layouts
from mfsdp_compile.runtime.geometry.rows import RowSplit
from mfsdp_compile.runtime.geometry.topology import Topology
from mfsdp_compile.runtime.memory.redistribute import take_rows
from mfsdp_compile.runtime.memory.replicated import ReplicatedTensor, RowView
from mfsdp_compile.runtime.memory.tensor import RowShardedTensor


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

UNDEFINED = ("empty", "lowrank")
"""Words in the names of operators of which only shapes are compared: values say nothing, or vectors may have either
sign, depending on rounding."""

IN_PLACE = "would change the shape of a parameter in place"
REFUSED = {
    "addbmm": IN_PLACE,
    "as_strided": IN_PLACE,
    "as_strided partial_views": IN_PLACE,
    "resize_": IN_PLACE,
    "resize_as_": IN_PLACE,
    "squeeze": IN_PLACE,
    "squeeze multiple": IN_PLACE,
    "t": IN_PLACE,
    "transpose": IN_PLACE,
    "unsqueeze": IN_PLACE,
    "linalg.matrix_rank": "makes an ordinary tensor for its result",
    "linalg.matrix_rank hermitian": "makes an ordinary tensor for its result",
    "nn.functional.dropout2d": "changes the shape of a result in place",
    "nn.functional.dropout3d": "changes the shape of a result in place",
    "nn.functional.fractional_max_pool2d": "multiplies by an ordinary tensor that it draws",
    "nn.functional.fractional_max_pool3d": "multiplies by an ordinary tensor that it draws",
    "nn.functional.scaled_dot_product_attention": "adds an ordinary mask that it makes, so the result is ordinary",
    "pca_lowrank": "multiplies by an ordinary tensor that it draws",
    "svd_lowrank": "multiplies by an ordinary tensor that it draws",
    "tensor_split": "reads the memory of indices, which DTensors do not show",
    "to_sparse": "gives another layout",
}
"""Operators of which some samples are refused, or give ordinary tensors, and the reasons."""

FSDP2_CHANGES_SHAPES = {"squeeze_"}
"""What FSDP2's parameters do and ours refuse: their shapes would no longer be those that the model is sharded by."""

FSDP2_GIVES_DTENSORS = {"linalg.matrix_rank", "linalg.matrix_rank hermitian"}
"""Operators whose result is a DTensor with FSDP2 of torch 2.15, and an ordinary tensor of the same values here."""
if torch.__version__.startswith("2.11."):
    FSDP2_GIVES_DTENSORS.add("tensordot")  # of an ordinary tensor, over all dimensions


@functools.cache
def database() -> dict[str, Any]:
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))  # imported, but not needed
    from torch.testing._internal.common_methods_invocations import op_db

    return {f"{op.name} {op.variant_test_name}".strip(): op for op in op_db if torch.float32 in op.dtypes}


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Case:
    """A sample of an operator: its first tensor, and others of that shape, are parameters.

    Args:
        ordinary: Whether its other tensors are ordinary ones; otherwise they are replicated.
    """

    def __init__(self, sample: Any, ordinary: bool) -> None:
        self.arguments = ((sample.input, *sample.args), sample.kwargs)
        self.ordinary = ordinary
        tensors = tensors_of(self.arguments)
        self.params = [t for t in tensors if t.shape == tensors[0].shape and t.is_floating_point()]
        self.has_others = len(self.params) < len(tensors)

    def convert(self, param: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor]) -> Arguments:
        params = {id(t) for t in self.params}
        other = Tensor.clone if self.ordinary else other
        return compat.tree_map_only(Tensor, lambda t: (param if id(t) in params else other)(t.detach()), self.arguments)

    def whole(self) -> Arguments:
        return self.convert(Tensor.clone, Tensor.clone)

    def sharded(self, topology: Topology) -> Arguments:
        before = itertools.chain([0], itertools.repeat(3))
        return self.convert(
            lambda t: shard(t, topology, next(before)), lambda t: ReplicatedTensor.wrap(t.clone(), topology.mesh)
        )

    def fsdp2(self, mesh: DeviceMesh) -> Arguments:
        module = nn.ParameterList([nn.Parameter(t.detach().clone()) for t in self.params])
        params = iter(list(fully_shard(module, mesh=mesh).parameters()))
        return self.convert(
            lambda t: next(params).detach(), lambda t: distribute_tensor(t.clone(), mesh, [Replicate()])
        )


def tensors_of(values: Any) -> list[Tensor]:
    return [leaf for leaf in compat.tree_leaves(values) if isinstance(leaf, Tensor)]


def difference(got: Any, expected: Any, is_defined: bool) -> str:
    """Return what is wrong with a result of whole tensors, or "" if nothing is."""
    for mine, its in zip(compat.tree_leaves(got), compat.tree_leaves(expected), strict=True):
        if not isinstance(its, Tensor):
            if mine != its and its == its:
                return f"{mine} instead of {its}"
        elif (mine.dtype, mine.shape) != (its.dtype, its.shape):
            return f"{mine.dtype}, {tuple(mine.shape)} instead of {its.dtype}, {tuple(its.shape)}"
        elif its.layout is not torch.strided:
            if why := difference(mine.to_dense(), its.to_dense(), is_defined):
                return why
        elif is_defined:
            numbers = its.abs().nan_to_num(0, 0, 0) if its.is_floating_point() and its.numel() else torch.ones(1)
            close = 1e-4 * max(1.0, numbers.max().item())  # sums of large numbers may cancel out
            if not torch.allclose(mine, its, rtol=1e-4, atol=close, equal_nan=True):
                return "other values"
    return ""


def run_case(function: Any, arguments: Arguments) -> Any:
    torch.manual_seed(1)
    return function(*arguments[0], **arguments[1])


class Outcome(IntEnum):
    """What an operator does, the same on all ranks."""

    RIGHT = 0
    ORDINARY = 1
    """As right, but not in a DTensor."""
    ERROR = 2
    WRONG = 3


def on_all_ranks(found: Outcome) -> Outcome:
    most = torch.tensor(int(found))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return Outcome(int(most))


def outcome(function: Any, arguments: Arguments, expected: Any, changed: Any, is_defined: bool) -> tuple[Outcome, str]:
    """Run an operator; return what comes of it on any rank, and what is wrong on this one."""
    found, why, got = Outcome.RIGHT, "", None
    try:
        got = run_case(function, arguments)
    except Exception as error:
        found, why = Outcome.ERROR, str(error)
    if on_all_ranks(found) is Outcome.ERROR:  # FSDP2 has convolutions that fail on one rank
        return Outcome.ERROR, why
    if not all(isinstance(mine, DTensor) for mine in tensors_of(got)):
        found, why = Outcome.ORDINARY, "an ordinary tensor"
    wholes = compat.tree_map_only(DTensor, full, (got, arguments[0][0]))
    if wrong := difference(wholes, (expected, changed), is_defined):
        found, why = Outcome.WRONG, wrong
    return on_all_ranks(found), why


def works_with_fsdp2(
    function: Any, case: Case, mesh: DeviceMesh, expected: Any, changed: Any, is_defined: bool
) -> bool:
    if any(not param.ndim for param in case.params):  # FSDP2 does not shard scalars
        return False
    return outcome(function, case.fsdp2(mesh), expected, changed, is_defined)[0] is Outcome.RIGHT


def check_case(name: str, function: Any, case: Case, topology: Topology) -> bool:
    """Compare an operator with itself on whole tensors; what is refused must not work with FSDP2 either."""
    about = (
        f"{name} {getattr(function, '__name__', '')}, {'ordinary' if case.ordinary else 'replicated'}: {case.arguments}"
    )
    plain = case.whole()
    try:
        expected = run_case(function, plain)
    except Exception:
        return False
    its = expected, plain[0][0], not any(word in name for word in UNDEFINED)
    found, why = outcome(function, case.sharded(topology), *its)
    assert found is not Outcome.WRONG, f"{about}: {why}"
    if found is not Outcome.RIGHT:
        assert case.ordinary or name in REFUSED, f"{about}: {why}"
        if getattr(function, "__name__", "") not in FSDP2_CHANGES_SHAPES and name not in FSDP2_GIVES_DTENSORS:
            assert not works_with_fsdp2(function, case, topology.mesh, *its), (
                f"{about}: works with FSDP2, and here: {why}"
            )
    return True


def check(name: str, topology: Topology, samples: range) -> int:
    """Check the chosen samples of an operator; return how many there are."""
    op, tried = database()[name], 0
    torch.manual_seed(0)
    made = op.sample_inputs("cpu", torch.float32, requires_grad=False)
    for sample in list(itertools.islice(made, samples.start, samples.start + 100)):  # before operators draw
        if tried == len(samples):
            break
        inputs = tensors_of((sample.input, sample.args, sample.kwargs))
        if any(t.numel() > 1000 or t.layout is not torch.strided for t in inputs):
            continue
        if not tensors_of(sample.input) or not inputs[0].is_floating_point():
            continue
        if isinstance(sample.input, Tensor):
            sample.input = sample.input.contiguous()  # as parameters are
        cases = [Case(sample, ordinary) for ordinary in (False, True)]
        functions = [function for function in (op.op, op.inplace_variant) if function is not None]
        each = [(function, case) for function in functions for case in cases[: 1 + cases[0].has_others]]
        tried += any([check_case(name, function, case, topology) for function, case in each])
    return tried


@functools.cache
def names() -> list[str]:
    return sorted(database())


@on_ranks(2)
def test_operators_of_torchs_database() -> None:
    """Every operator gives what it gives for whole tensors, in a DTensor, and changes what it changes of these.

    What does not is listed, and does not work with FSDP2's parameters either. Draws are the same on all ranks. A
    failure is not shrunk, because other ranks would not know of it.
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
@pytest.mark.parametrize("part", range(4))
@on_ranks(2, 3, timeout=900)
def test_all_operators_of_torchs_database(part: int) -> None:
    model, _ = cut()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = names()[part::4]
        tried = [check(name, model.matrix.topology, range(6)) for name in chosen]
    print(f"{len(chosen)} names, of which {sum(map(bool, tried))} have samples: {sum(tried)}")
    assert sum(tried) > 600


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
    "new tensor": lambda p: p.new_ones(2, 3),
    "numbers of one element": lambda p: torch.addmm(torch.ones(1), p, p.t()),
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
    for read in ("row norms", "row sums", "normalized rows", "argmax of rows", "more dimensions", "by norm"):
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
    scalar, alone = model.scalar.detach(), whole["scalar"]  # on one rank
    for write in (lambda p: p.fill_(p * 2), lambda p: p.masked_fill_(torch.tensor(True), p + 1)):
        write(scalar)
        write(alone)
        assert torch.equal(full(scalar), alone)
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
    for sparse in (model.matrix.detach().sum(0).to_sparse(), model.matrix.detach().to_sparse()):
        assert sparse.full_tensor().layout is torch.sparse_coo and sparse.to_local().layout is torch.sparse_coo
    torch.testing.assert_close(sparse.full_tensor().to_dense(), whole["matrix"])
    stacked = torch.stack([norm, norm.square()])
    assert torch.equal(stacked.redistribute(placements=[Shard(0)]).full_tensor(), stacked.full_tensor())


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "all_reduce": dist.all_reduce,
    "async": lambda t: dist.all_reduce(t, async_op=True),
    "coalesced": lambda t: dist.all_reduce_coalesced([t, t]),
    "broadcast": lambda t: dist.broadcast(t, 0),
    "reduce": lambda t: dist.reduce(t, 0),
    "all_gather": lambda t: dist.all_gather([torch.empty(t.shape) for _ in range(2)], t),
    "all_gather_into": lambda t: dist.all_gather_into_tensor(torch.empty(2 * t.numel()), t),
    "reduce_scatter": lambda t: dist.reduce_scatter_tensor(t, torch.ones(2 * t.numel())),
    "all_to_all": lambda t: dist.all_to_all([torch.empty(t.shape) for _ in range(2)], [t, t]),
    "functional": lambda t: functional.all_reduce(t, "sum", dist.group.WORLD),
}


@on_ranks(2)
def test_collectives_of_torch_are_refused() -> None:
    for strategy in (0, 3):
        model = fully_shard_model(nn.Linear(3, 5), zero_dp_strategy=strategy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        weight = model.module.weight
        moment = optimizer.state[weight]["momentum_buffer"]
        tensors = {"values": weight.data, "parameter": weight.detach(), "gradient": weight.grad, "moment": moment}
        if strategy:
            tensors["view"] = weight.detach()[0]
        before = {name: full(t).clone() for name, t in tensors.items()}
        ours = "collective of torch.distributed", "'weight'", "to_local()"
        fragments = ours if compat.DTENSOR_SUBCLASSES_DISPATCH else ()  # before, DTensor refuses some itself
        for collective in COLLECTIVES.values():
            for tensor in tensors.values():
                with raises_everywhere(RuntimeError, *fragments):
                    collective(tensor)
        for name, tensor in tensors.items():
            assert torch.equal(full(tensor), before[name]), name


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
