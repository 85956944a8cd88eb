"""Which communicators a model has, and which of NCCL's settings each of them gets, with a stand-in for NCCL.

Gloo runs the collectives here. The stand-in has the attributes of ``ProcessGroupNCCL``; where torch is built with NCCL,
settings are also applied to the real classes.
"""

from __future__ import annotations

import contextlib
import copy
import json
import socket
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER
from pool import on_ranks
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from mfsdp_compile import Communication, Communicator, fully_shard_model
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.ranks.journal import journal

UNSET = -(2**31)
"""NCCL's value for settings that it decides itself."""
FIELDS = ("min_ctas", "max_ctas", "cga_cluster_size", "collnet_enable", "cta_policy", "nvls_ctas")


class _Options:
    """Stands for ``ProcessGroupNCCL.Options``: assigning ``config`` copies it, as a struct."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._config = SimpleNamespace(**dict.fromkeys(FIELDS, UNSET))

    @property
    def config(self) -> Any:
        return self._config

    @config.setter
    def config(self, value: Any) -> None:
        self._config = copy.copy(value)

    @property
    def given(self) -> dict[str, Any]:
        found = {name: value for name, value in vars(self._config).items() if value != UNSET}
        return found | ({"high_priority": True} if self.is_high_priority_stream else {})


class _Nccl:
    """Stands for ``ProcessGroupNCCL``."""

    Options = _Options
    NCCL_CTA_POLICY_ZERO = 2


class _Created(list[tuple[list[int], dict[str, Any]]]):
    """Ranks and NCCL options of the process groups that were created, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.options: dict[str, _Options] = {}

    def of(self, name: str) -> dict[str, Any]:
        """Return the options of a process group."""
        return self.options[name].given


@contextlib.contextmanager
def on_nccl(version: tuple[int, ...] = (2, 28, 9), kind: Any = _Nccl) -> Iterator[_Created]:
    """Context in which NCCL seems to run all groups, and takes options as in torch."""
    created = _Created()
    create = distributed_c10d._new_process_group_helper

    def helper(size: int, rank: int, ranks: list[int], *args: Any, backend_options: Any, **kwargs: Any) -> Any:
        made = create(size, rank, ranks, *args, **kwargs)
        created.append((ranks, backend_options.given))
        created.options[made[0].group_name] = backend_options
        return made

    class Group:
        """A process group as :func:`compat.nccl_options` sees it."""

        def __init__(self, group: dist.ProcessGroup) -> None:
            self._device_types = [torch.device("cuda")]
            self._get_backend = lambda device: SimpleNamespace(
                options=created.options.get(group.group_name, kind.Options())
            )

    options_of: Any = compat.nccl_options
    with (
        mock.patch.object(distributed_c10d, "ProcessGroupNCCL", kind, create=True),
        mock.patch.object(compat, "nccl_backend"),
        mock.patch("mfsdp_compile.runtime.compat.distributed._new_process_group_helper", helper),
        mock.patch("mfsdp_compile.runtime.compat.distributed.nccl_options", lambda group: options_of(Group(group))),
        mock.patch("torch.cuda.nccl.version", return_value=version),
        mock.patch.object(compat, "memory_pool", contextlib.nullcontext),
        mock.patch.object(compat, "warm_up"),
    ):
        yield created


def sharded(**arguments: Any) -> Any:
    arguments = {"fsdp_unit_modules": [zoo.Block]} | arguments
    return fully_shard_model(parity.build(zoo.Plain), **arguments)


def hybrid() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    group = mesh["outer", "inner"]._flatten().get_group()
    return {"device_mesh": mesh, "dp_shard_dim": "inner", "dp_outer_dim": "outer", "hybrid_fsdp_group": group}


def everywhere(value: Any) -> list[Any]:
    """Return the values of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


@on_ranks(2)
def test_gathers_have_their_own_communicator_where_it_pays() -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"communication": {"separate_gathers": False}}, False),
        ({"overlap_param_gather": False}, False),
        ({"overlap_grad_reduce": False}, False),
        ({"zero_dp_strategy": 2}, False),
        ({"zero_dp_strategy": 2, "communication": {"separate_gathers": True}}, True),
        ({"fsdp_group_ag": dist.new_group([0, 1])}, False),
    ]
    for arguments, expected in cases:
        with on_nccl() as created:
            topology = sharded(**arguments).sharded.topology
        assert created == ([([0, 1], {})] if expected else []), arguments
        if expected:
            assert topology.inner_gathers.name in created.options
            assert (topology.gather_group or topology.resident_groups[-1]).name == topology.inner_gathers.name
        assert topology.inner_gathers is arguments.get("fsdp_group_ag") or topology.inner_gathers is not None
    alone = DeviceMesh.from_group(dist.new_group([dist.get_rank()], use_local_synchronization=True), "cpu")
    with on_nccl() as created:
        sharded(device_mesh=alone)
        assert not created, "a single rank"
    assert sharded().sharded.topology.inner_gathers is None, "gloo"
    assert sharded(communication={"separate_gathers": True}).sharded.topology.inner_gathers is not None


@on_ranks(4)
def test_each_communicator_gets_its_settings() -> None:
    """Communicators are created in one order on all ranks, and keep their options when they are created again."""
    arguments = hybrid()
    communication = Communication(
        gathers=Communicator(high_priority=True, max_ctas=8, min_ctas=4),
        reductions=Communicator(cga_cluster_size=2),
        outer=Communicator(collnet=True, nvls_ctas=16),
    )
    expected: list[dict[str, Any]] = [
        {"high_priority": True, "max_ctas": 8, "min_ctas": 4},
        {"cga_cluster_size": 2},
        {"collnet_enable": 1, "nvls_ctas": 16},
    ]
    rank = dist.get_rank()
    inner, outer = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
    with on_nccl() as created:
        model = sharded(communication=communication, **arguments)
        assert created == list(zip([inner, inner, outer], expected, strict=True))
        assert len({str([given for _, given in each]) for each in everywhere(list(created))}) == 1
        exchange = model.sharded.buckets[0].exchange
        used = [exchange.gather_group, *exchange.lane.group_names]
        assert [created.of(name) for name in used] == expected
        mesh = arguments["device_mesh"]
        own = {mesh[name].get_group().group_name for name in ("outer", "inner")}
        assert not own & {*used}, "the program's groups are left alone"
        assert model.sharded.group is arguments["hybrid_fsdp_group"]
        model(torch.randn(2, 8)).backward()
        model.reset()
        exchange = model.sharded.buckets[0].exchange
        again = [exchange.gather_group, *exchange.lane.group_names]
        assert not {*again} & {*used}
        assert [created.of(name) for name in again] == expected
        model(torch.randn(2, 8)).backward()


@on_ranks(4)
def test_gradients_of_no_shard() -> None:
    with on_nccl() as created:
        model = sharded(zero_dp_strategy=0, communication={"reductions": {"max_ctas": 2}}, **hybrid())
        assert created == [([0, 1, 2, 3], {"max_ctas": 2})]
        assert [created.of(name) for name in model.sharded.buckets[0].exchange.lane.group_names] == [{"max_ctas": 2}]
        model(torch.randn(2, 8)).backward()


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.experts = nn.Linear(8, 8), nn.Linear(8, 8)


@on_ranks(4)
def test_experts_have_communicators_of_their_own() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    with on_nccl() as created:
        model = fully_shard_model(
            _Experts(),
            dp_shard_dim="dp",
            device_mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)),
            expt_device_mesh=mesh,
            fsdp_unit_modules=[nn.Linear],
            check_values=False,
            communication={"gathers": {"high_priority": True}, "reductions": {"max_ctas": 2}},
        )
        experts = dist.get_process_group_ranks(mesh["dp"].get_group())
        both: list[dict[str, Any]] = [{"high_priority": True}, {"max_ctas": 2}]
        last = created[-4:]  # before them, the group of ranks with other experts may be created
        assert last == [(ranks, given) for ranks in ([0, 1, 2, 3], experts) for given in both]
        for bucket in model.sharded.buckets:
            used = [bucket.exchange.gather_group, *bucket.exchange.lane.group_names]
            assert [created.of(name) for name in used] == both
            assert bucket.topology.gather_group.size == (2 if bucket.plan.is_expert else 4)


@on_ranks(2)
def test_settings_start_from_those_of_a_group_that_was_passed() -> None:
    group = dist.new_group([0, 1])
    with on_nccl() as created:
        created.options[group.group_name] = passed = _Options(is_high_priority_stream=True)
        passed.config.max_ctas = 4
        passed.config.min_ctas = 2
        model = sharded(fsdp_group_ag=group, communication={"gathers": {"max_ctas": 8}})
        assert created == [([0, 1], {"high_priority": True, "max_ctas": 8, "min_ctas": 2})]
        assert passed.given == {"high_priority": True, "max_ctas": 4, "min_ctas": 2}
        exchange = model.sharded.buckets[0].exchange
        assert group.group_name not in [exchange.gather_group, *exchange.lane.group_names]
        model = sharded(fsdp_group_ag=group)
        assert model.sharded.buckets[0].exchange.gather_group == group.group_name
        sharded(communication={"gathers": {"high_priority": False}})
        assert created[-1] == ([0, 1], {})


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@on_ranks(2)
def test_separate_gathers_change_no_bit(mode: str) -> None:
    data = parity.batches(steps=3)
    plain = parity.train_sharded(zoo.Plain, mode, data)
    separate = {"communication": {"separate_gathers": True}}
    run = parity.train_sharded(zoo.Plain, mode, data, sharding=separate)
    parity.assert_bitwise(plain, run)
    exchange = run.model.sharded.buckets[0].exchange
    assert exchange.gather_group not in exchange.lane.group_names
    assert compat.collectives_started(compat.process_group(exchange.gather_group)) > 0
    assert run.model.sharded.members.group_names == list(
        dict.fromkeys([exchange.gather_group, *exchange.lane.group_names])
    )


@on_ranks(2, timeout=60)
def test_ranks_with_different_settings() -> None:
    """A difference is found before a communicator is created, which would wait for the other rank."""
    mine = [{"separate_gathers": True}, {"separate_gathers": False}][dist.get_rank()]
    with parity.raises_everywhere(RuntimeError, "rank 1 of 2 differs", "gathers separate", "gathers not separate"):
        sharded(communication=mine)
    for context in (on_nccl(), parity.first_rank_warns(UserWarning, "no effect")):
        mine = [{"gathers": {"max_ctas": 4}}, {"gathers": {"max_ctas": 8}}][dist.get_rank()]
        with context, parity.raises_everywhere(RuntimeError, "gathers: max_ctas=4", "gathers: max_ctas=8"):
            sharded(communication=mine)
    sharded()


@on_ranks(2, timeout=60)
def test_a_setting_that_one_rank_refuses() -> None:
    class Old(_Nccl):
        class Options(_Options):
            def __init__(self, is_high_priority_stream: bool = False) -> None:
                super().__init__(is_high_priority_stream)
                del self.config.collnet_enable

    error = RuntimeError if dist.get_rank() == 0 else NotImplementedError
    with on_nccl(kind=_Nccl if dist.get_rank() == 0 else Old), parity.raises_everywhere(error, "collnet_enable"):
        sharded(communication={"reductions": {"collnet": False}})


def test_settings_that_torch_or_nccl_does_not_have() -> None:
    class Old:
        Options = _Options

    zero: dict[str, Any] = {"nccl_ub": True, "communication": {"zero_cta": True}}
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with on_nccl((2, 27, 3)), pytest.raises(NotImplementedError, match=r"zero_cta needs NCCL 2\.28.* has 2\.27\.3"):
            sharded(**zero)
        with (
            on_nccl(kind=Old),
            pytest.raises(NotImplementedError, match=r"zero_cta needs NCCL 2\.28.* built with an older"),
        ):
            sharded(**zero)
    finally:
        dist.destroy_process_group()


@on_ranks(4)
def test_copy_engines() -> None:
    """Copy engines gather on one host only; ranks of the outer dimension may be elsewhere."""
    arguments = hybrid() | {"nccl_ub": True, "communication": {"zero_cta": True, "gathers": {"max_ctas": 1}}}
    rank = dist.get_rank()
    with on_nccl() as created, mock.patch.object(socket, "gethostname", return_value=f"node-{rank // 2}"):
        model = sharded(**arguments)
        assert [given for _, given in created] == [{"cta_policy": 2, "max_ctas": 1}]
        assert created.of(model.sharded.buckets[0].exchange.gather_group) == created[0][1]
    with (
        on_nccl() as created,
        mock.patch.object(socket, "gethostname", return_value=f"node-{min(rank, 1)}"),
        parity.raises_everywhere(ValueError, "zero_cta", "[0, 1] are on node-0, node-1", "dp_outer_dim"),
    ):
        sharded(**arguments)
    assert not created
    for name, value in {"nccl_ub": False, "disable_symmetric_registration": True}.items():
        with parity.raises_everywhere(ValueError, "zero_cta", "symmetric memory", "nccl_ub=True"):
            sharded(**arguments | {name: value})


@on_ranks(1)
def test_contradictions() -> None:
    group = dist.new_group([0])
    cases: list[tuple[str, dict[str, Any]]] = [
        (
            "separate_gathers=False contradicts settings for gathers",
            {"separate_gathers": False, "gathers": {"max_ctas": 1}},
        ),
        ("separate_gathers=False contradicts fsdp_group_ag", {"separate_gathers": False}),
        ("no_shard' gathers nothing", {"separate_gathers": True}),
        ("no_shard' gathers nothing", {"gathers": {"max_ctas": 1}}),
        ("zero_cta needs zero_dp_strategy='optim_grads_params', got 'optim_grads'", {"zero_cta": True}),
        ("settings for outer apply to nothing, because there is no dp_outer_dim", {"outer": {"max_ctas": 1}}),
    ]
    for fragment, communication in cases:
        arguments: dict[str, Any] = {"communication": communication, "nccl_ub": "zero_cta" in communication}
        arguments["zero_dp_strategy"] = 0 if "no_shard" in fragment else 2 if "optim_grads'" in fragment else 3
        arguments["fsdp_group_ag"] = group if "fsdp_group_ag" in fragment else None
        with parity.raises_everywhere(ValueError, fragment):
            sharded(**arguments)


@on_ranks(4)
def test_no_shard_has_no_outer_reduction() -> None:
    with parity.raises_everywhere(
        ValueError, "outer apply to nothing, because no_shard reduces over all ranks at once"
    ):
        sharded(zero_dp_strategy=0, communication={"outer": {"max_ctas": 1}}, **hybrid())


WRONG: list[tuple[type[Exception], str, Any]] = [
    (TypeError, "communication takes an mfsdp_compile.Communication or a dict", 3),
    (TypeError, "communication has no field 'max_ctas'. It has separate_gathers", {"max_ctas": 3}),
    (TypeError, "communication's gathers has no field 'priority'", {"gathers": {"priority": 3}}),
    (TypeError, "communication's outer takes an mfsdp_compile.Communicator or a dict", {"outer": 4}),
    (TypeError, "separate_gathers takes True, False or 'auto', got 'yes'", {"separate_gathers": "yes"}),
    (TypeError, "zero_cta takes True or False, got 1", {"zero_cta": 1}),
    (TypeError, "max_ctas of a communicator takes a whole number or None, got True", {"gathers": {"max_ctas": True}}),
    (TypeError, "high_priority of a communicator takes True, False or None", {"gathers": {"high_priority": 1}}),
    (ValueError, "max_ctas=0: a communicator has at least 1 thread block", {"gathers": {"max_ctas": 0}}),
    (ValueError, "cga_cluster_size=9: a cluster has 0 to 8 thread blocks", {"outer": {"cga_cluster_size": 9}}),
    (ValueError, "min_ctas=3 is more than max_ctas=2", {"reductions": {"min_ctas": 3, "max_ctas": 2}}),
]


@pytest.mark.parametrize(("error", "message", "value"), WRONG)
def test_wrong_values(error: type[Exception], message: str, value: Any) -> None:
    with pytest.raises(error) as raised:
        fully_shard_model(nn.Linear(2, 2), communication=value)
    assert message in str(raised.value)


@on_ranks(2)
def test_settings_without_nccl_are_said_to_have_no_effect() -> None:
    communication = {"gathers": {"max_ctas": 8}, "outer": {}, "zero_cta": True}
    with parity.first_rank_warns(
        UserWarning, r"gathers\.max_ctas, zero_cta: settings of NCCL have no effect.*'gloo'"
    ) as said:
        model = sharded(nccl_ub=True, communication=communication)
    assert {each.filename for each in said if "settings of NCCL" in str(each.message)} <= {__file__}
    assert model.sharded.topology.inner_gathers is None
    model(torch.randn(2, 8)).backward()


def test_settings_of_the_real_classes() -> None:
    """Settings are attributes that torch's classes have, where torch is built with NCCL."""
    kind = getattr(dist, "ProcessGroupNCCL", None)
    if kind is None:
        pytest.skip("a build of torch without NCCL")
    options = kind.Options(is_high_priority_stream=True)
    options.config.max_ctas = 8
    group: Any = SimpleNamespace(
        _device_types=[torch.device("cuda")], _get_backend=lambda device: SimpleNamespace(options=options)
    )
    config = {name: 1 for name in FIELDS if name != "cta_policy"}
    configured = compat.configured_options(group, None, config, zero_cta=True)
    assert configured.is_high_priority_stream
    assert {name: getattr(configured.config, name) for name in config} == config
    assert configured.config.cta_policy == int(kind.NCCL_CTA_POLICY_ZERO)
    assert (options.config.max_ctas, options.config.cta_policy) == (8, UNSET), "the group's own options are as before"
    assert not compat.configured_options(group, False, {}, zero_cta=False).is_high_priority_stream


@on_ranks(2)
def test_the_flight_recorder_has_the_numbers_of_the_journal() -> None:
    """Every collective in the journal is found in torch's flight recorder by its group and number."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=50))
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    model = sharded(device_mesh=mesh, communication={"separate_gathers": True})
    call = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager"})
    for run in (model, call):
        run(torch.randn(2, 8)).backward()
    recorded = {
        (entry["process_group"][0], entry["collective_seq_id"]): entry["profiling_name"]
        for entry in json.loads(torch._C._distributed_c10d._dump_fr_trace_json())["entries"]
    }
    own = model.sharded.topology.inner_gathers.name
    launches = [
        launch
        for entry in journal.state("test")["entries"]
        for launch in entry["launches"]
        if launch["group"] in (own, group.group_name)
    ]
    assert len(launches) == sum(
        compat.collectives_started(compat.process_group(name)) for name in (own, group.group_name)
    )
    operators = {"gather": "all_gather", "reduce": "reduce", "find": "all_reduce"}  # gloo reduce-scatters by all-reduce
    assert {launch["what"].split()[0] for launch in launches} == operators.keys()
    for launch in launches:
        kind = launch["what"].split()[0]
        assert launch["started"]
        assert (launch["group"] == own) == (kind == "gather")
        assert operators[kind] in recorded[launch["group"], launch["number"]], launch
