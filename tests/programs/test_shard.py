"""``shard``: the same training as by ``fully_shard_model``, whose arguments become plug-ins."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import mfsdp_compile
from mfsdp_compile import (
    MegatronFSDP,
    MixedPrecisionPolicy,
    OptimizerOffloadPolicy,
    ShardedModule,
    fully_shard_model,
    fully_shard_optimizer,
    shard,
)
from mfsdp_compile.diagnostics.doctor import STRATEGIES, mesh_arguments
from mfsdp_compile.plugins import (
    HERE,
    BufferPolicy,
    ByMethod,
    ByModule,
    CommBuffers,
    Communicators,
    Experts,
    GradientPolicy,
    HostMemory,
    KeepTransposes,
    LayoutPolicy,
    ModelPlugin,
    Overlap,
    Ranks,
    Scaling,
    Setup,
    TensorParallel,
    WholeParameters,
)
from mfsdp_compile.sharding_arguments import Arguments

UNITS = [zoo.Block]


def test_few_arguments() -> None:
    assert len(inspect.signature(shard).parameters) <= 14


def trained(model: Any, mode: str, microbatches: int = 2) -> list[Tensor]:
    """Return losses, and parameters after each of two steps."""
    call = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
    optimizer = fully_shard_optimizer(parity.sgd(model.parameters()))
    found = []
    for batch in parity.batches(2 * microbatches).split(microbatches):
        for number, microbatch in enumerate(batch):
            model.is_last_microbatch = number == microbatches - 1
            loss = call(microbatch[dist.get_rank()])
            loss.backward()
            found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        found += [param.full_tensor() for param in model.parameters()]
    return found


def ranks_of(strategy: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of a strategy for ``shard`` and for ``fully_shard_model``."""
    given = mesh_arguments(strategy)
    names = {each.name for each in fields(Ranks)}
    ranks = Ranks(**{name: value for name, value in given.items() if name in names})
    return {"device_mesh": ranks, "zero_dp_strategy": given.get("zero_dp_strategy", 3)}, given


@pytest.mark.parametrize("mode", [EAGER, AOT_EAGER])
@pytest.mark.parametrize(
    "strategy", ["HSDP optim_grads_params", *(pytest.param(s, marks=pytest.mark.long) for s in STRATEGIES)]
)
@on_ranks(4)
def test_strategies(strategy: str, mode: str) -> None:
    core, face = ranks_of(strategy)
    model = shard(parity.build(zoo.Uneven), fsdp_unit_modules=UNITS, **core)
    assert type(model) is ShardedModule
    other = fully_shard_model(parity.build(zoo.Uneven), fsdp_unit_modules=UNITS, **face)
    assert isinstance(other, MegatronFSDP) and isinstance(other, ShardedModule)
    assert str(model.sharded.topology) == str(other.sharded.topology)
    assert all(torch.equal(a, b) for a, b in zip(trained(model, mode), trained(other, mode), strict=True))


def whole(name: str, param: nn.Parameter) -> bool:
    return name.endswith("weight") and param.ndim == 2


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "buffers": ({"plugins": [CommBuffers()]}, {"fsdp_double_buffer": True}),
    "largest buffers": (
        {"plugins": [CommBuffers(BufferPolicy(double=True, largest=True))]},
        {"maxpool_double_buffer": True},
    ),
    "host memory": ({"plugins": [HostMemory(CPUOffloadPolicy(False))]}, {"offload_policy": CPUOffloadPolicy(False)}),
    "optimizer in host memory, of one class": (
        {"plugins": [HostMemory({zoo.Block: OptimizerOffloadPolicy(False)})]},
        {"offload_policy": {zoo.Block: OptimizerOffloadPolicy(False)}},
    ),
    "whole": ({"plugins": [WholeParameters(whole)]}, {"whole_params": whole}),
    "by module": ({"plugins": [ByModule()]}, {"enable_fine_grained_param_gather": True}),
    "communicators": ({"plugins": [Communicators({})]}, {"communication": {}}),
    "layout": ({"layout": LayoutPolicy(bucket_bytes=256)}, {"bucket_bytes": 256}),
    "sums": ({"gradients": GradientPolicy(Scaling.SUM)}, {"calculate_per_token_loss": True}),
    "precision": (
        {"mixed_precision_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"mixed_precision_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
    ),
    "kept": ({"reshard_after_forward": False}, {"reshard_after_forward": False}),
}
"""Arguments of ``shard``, and of ``fully_shard_model``, that mean the same."""


@pytest.mark.parametrize("what", SAME)
@on_ranks(2)
def test_plugins(what: str) -> None:
    core, face = SAME[what]
    model = shard(parity.build(zoo.Uneven), fsdp_unit_modules=UNITS, **core)
    other = fully_shard_model(parity.build(zoo.Uneven), fsdp_unit_modules=UNITS, **face)
    plans = [[str(bucket.plan) for bucket in each.sharded.buckets] for each in (model, other)]
    assert plans[0] == plans[1]
    plain = shard(parity.build(zoo.Uneven), fsdp_unit_modules=UNITS)
    if what not in ("communicators", "sums"):  # which no bucket's plan shows
        assert plans[0] != [str(bucket.plan) for bucket in plain.sharded.buckets]
    assert all(torch.equal(a, b) for a, b in zip(trained(model, EAGER), trained(other, EAGER), strict=True))


def test_each_argument_has_a_place() -> None:
    """What ``shard`` does not take, it says where to find."""
    taken = {*inspect.signature(shard).parameters, "sync_model_each_microbatch", "preproc_state_dict_for_dcp_ckpt"}
    older = {"preserve_fp32_weights", "grad_reduce_in_fp32"}
    assert {"sync_model_each_microbatch", *older} <= HERE.keys()
    left = {each.name for each in fields(Arguments)} - taken - older
    assert left - HERE.keys() == set()
    for name in left:
        with pytest.raises(TypeError, match=r"mfsdp_compile\.plugins"):
            shard(nn.Linear(2, 2), **{name: 1})  # type: ignore[arg-type]


@on_ranks(1)
def test_arguments_become_plugins() -> None:
    """Each argument of the face that is none of ``shard``'s is one of a plug-in, of Ranks, or of a group of numbers."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    given = Arguments(
        tp_dim="tp",
        expt_device_mesh=mesh,
        nccl_ub=True,
        fsdp_manual_registration=True,
        communication={},
        offload_policy=CPUOffloadPolicy(),
        whole_params=whole,
        enable_fine_grained_param_gather=True,
        keep_fp8_transpose_cache=True,
    )
    assert list(given.model_plugins()) == [
        TensorParallel("tp"),
        Experts(mesh),
        CommBuffers(BufferPolicy(double=True), "later"),
        Communicators({}),
        HostMemory(CPUOffloadPolicy()),
        WholeParameters(whole),
        ByModule(),
        KeepTransposes(),
    ]
    assert not list(Arguments().model_plugins())


@dataclass(frozen=True)
class Small(ModelPlugin):
    """A plug-in that nobody here knows."""

    numel: int

    def configure(self, options: Any, setup: Setup) -> Any:
        assert isinstance(setup.module, zoo.Uneven)
        return replace(options, layout_policy=LayoutPolicy(bucket_bytes=self.numel))


@dataclass(frozen=True)
class Broken(ModelPlugin):
    returns: Any = None

    def configure(self, options: Any, setup: Setup) -> Any:
        if isinstance(self.returns, Exception):
            raise self.returns
        return self.returns


@dataclass(frozen=True)
class Changed(ModelPlugin):
    name: str
    value: Any

    def configure(self, options: Any, setup: Setup) -> Any:
        return replace(options, **{self.name: self.value})


class MoreBuffers(CommBuffers):
    pass


@dataclass(frozen=True)
class AlsoWhole(ModelPlugin):
    name: str

    def configure(self, options: Any, setup: Setup) -> Any:
        return replace(options, whole=[*options.whole, self.name])


@on_ranks(2)
def test_plugins_of_strangers_add_up() -> None:
    names = [name for name, _ in parity.build(zoo.Uneven).named_parameters() if name.endswith("weight")][:2]
    model = shard(parity.build(zoo.Uneven), fsdp_unit_modules=UNITS, plugins=[AlsoWhole(name) for name in names])
    plain = shard(parity.build(zoo.Uneven), fsdp_unit_modules=UNITS)
    assert str(model.sharded.buckets[0].plan) != str(plain.sharded.buckets[0].plan)
    trained(model, EAGER)


@on_ranks(2)
def test_a_plugin_of_a_stranger() -> None:
    count = [
        len(shard(parity.build(zoo.Uneven), fsdp_unit_modules=UNITS, plugins=plugins).sharded.buckets)
        for plugins in ([], [Small(128)])
    ]
    assert count[1] > count[0]


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "no module": (lambda model: shard("model"), TypeError, "an nn.Module, got a str"),  # type: ignore[arg-type]
    "an argument of the face": (
        lambda model: shard(model, offload_policy=None),  # type: ignore[call-arg]
        TypeError,
        "It is part of mfsdp_compile.plugins.HostMemory here",
    ),
    "a number": (lambda model: shard(model, plugins=[3]), TypeError, "plugins takes a list of plug-ins"),  # type: ignore[list-item]
    "a class": (lambda model: shard(model, plugins=[ByModule]), TypeError, "Pass an instance: ByModule"),  # type: ignore[list-item]
    "twice": (lambda model: shard(model, plugins=[ByModule(), ByModule()]), ValueError, "plugins has two ByModule"),
    "no list": (lambda model: shard(model, plugins=ByModule()), TypeError, "plugins takes a list"),  # type: ignore[arg-type]
    "a group of numbers": (lambda model: shard(model, layout=None), TypeError, "layout takes a LayoutPolicy"),  # type: ignore[arg-type]
    "a way to register": (
        lambda model: shard(model, plugins=[CommBuffers(registers="soon")]),  # type: ignore[arg-type]
        ValueError,
        "registers is 'now', 'later' or 'never'",
    ),
    "nothing to register": (
        lambda model: shard(model, plugins=[CommBuffers(BufferPolicy(), registers="now")]),
        ValueError,
        "this model has none",
    ),
    "memory for nothing": (
        lambda model: shard(model, plugins=[CommBuffers(BufferPolicy(), allocate=torch.empty)]),
        ValueError,
        "buffer_allocator allocates communication buffers",
    ),
    "means in symmetric memory": (
        lambda model: shard(
            model, gradients=GradientPolicy(Scaling.AVERAGE_IN_COLLECTIVE), plugins=[CommBuffers(registers="now")]
        ),
        ValueError,
        "NCCL only sums in symmetric memory",
    ),
    "units of modules that are joined": (
        lambda model: shard(model, layout=LayoutPolicy(unit_bytes=1000), plugins=[ByModule()]),
        ValueError,
        "divides units into modules",
    ),
    "no function": (
        lambda model: shard(model, plugins=[WholeParameters("all")]),  # type: ignore[arg-type]
        TypeError,
        "whole_params takes a function",
    ),
    "a word for a scaling": (
        lambda model: shard(model, gradients=GradientPolicy("sum")),  # type: ignore[arg-type]
        TypeError,
        "gradients: scaling takes one of",
    ),
    "a word for a flag": (
        lambda model: shard(model, gradients=GradientPolicy(decoupled="no")),  # type: ignore[arg-type]
        TypeError,
        "gradients: decoupled takes True or False",
    ),
    "half a byte": (
        lambda model: shard(model, layout=LayoutPolicy(bucket_bytes=100.5)),  # type: ignore[arg-type]
        TypeError,
        "layout: bucket_bytes takes a whole number",
    ),
    "a class derived": (
        lambda model: shard(model, plugins=[CommBuffers(), MoreBuffers()]),
        ValueError,
        "plugins has two CommBuffers",
    ),
    "nothing to initialize": (lambda model: shard(model, init_fn=ByMethod()), ValueError, "already has values"),
    "a class of initializers": (lambda model: shard(model, init_fn=ByMethod), TypeError, "Pass an instance: ByMethod"),
    "an initializer": (lambda model: shard(model, plugins=[ByMethod()]), TypeError, "is for init_fn"),
    "memory that stays": (
        lambda model: shard(model, gradients=GradientPolicy(keeps_memory=True)),
        ValueError,
        r"add CommBuffers\(\)",
    ),
    "no plug-in": (lambda model: shard(model, plugins=[ModelPlugin()]), NotImplementedError, "has no configure"),
    "no mesh": (
        lambda model: shard(model, plugins=[Experts(None)]),  # type: ignore[arg-type]
        TypeError,
        "Experts takes a DeviceMesh",
    ),
    "options without a policy": (
        lambda model: shard(model, plugins=[Changed("overlap", None)]),
        TypeError,
        "Changed.configure: overlap is a Overlap, got None",
    ),
    "an option that is no function": (
        lambda model: shard(model, plugins=[Changed("reshard_after_forward", True)]),
        TypeError,
        "reshard_after_forward is a function of a unit",
    ),
    "an unknown name": (
        lambda model: shard(model, plugins=[Changed("whole", ["nope"])]),
        ValueError,
        "whole has .*nope",
    ),
    "nothing returned": (lambda model: shard(model, plugins=[Broken()]), TypeError, "Broken.configure must return"),
    "an error inside": (lambda model: shard(model, plugins=[Broken(ValueError("no room"))]), ValueError, "no room"),
    "an unknown dimension": (
        lambda model: shard(model, plugins=[TensorParallel("tp")]),
        ValueError,
        "tp_dim='tp' needs a device_mesh",
    ),
    "dimensions without names": (
        lambda model: shard(model, init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))),
        ValueError,
        "dp_shard_dim",
    ),
    "units": (lambda model: shard(model, fsdp_unit_modules=3), TypeError, "fsdp_unit_modules takes"),  # type: ignore[arg-type]
    "strategy": (lambda model: shard(model, zero_dp_strategy=7), ValueError, "zero_dp_strategy"),
}


@pytest.mark.parametrize("what", REFUSED)
@on_ranks(2)
def test_what_is_refused(what: str) -> None:
    call, error, message = REFUSED[what]
    model = parity.build(zoo.Uneven)
    before = dict(model.named_parameters())
    with pytest.raises(error, match=message):
        call(model)
    assert all(param is before[name] for name, param in model.named_parameters())
    trained(shard(model, fsdp_unit_modules=UNITS), EAGER)
    with pytest.raises(ValueError, match="it is a ShardedModule"):
        shard(shard(parity.build(zoo.Uneven), fsdp_unit_modules=UNITS))


OTHER_ON_ONE_RANK: dict[str, dict[str, Any]] = {
    "buckets": {"plugins": [Small(128)]},
    "sums": {"gradients": GradientPolicy(Scaling.SUM)},
    "decoupled": {"gradients": GradientPolicy(decoupled=True)},
    "inspected": {"gradients": GradientPolicy(report_nan=True)},
    "overlap": {"overlap": Overlap(False, False)},
    "values": {"check_values": False},
    "transposes": {"plugins": [KeepTransposes()]},
    "buffers": {"plugins": [CommBuffers()]},
}


@pytest.mark.parametrize("what", OTHER_ON_ONE_RANK)
@on_ranks(2)
def test_ranks_with_other_options(what: str) -> None:
    with pytest.raises(RuntimeError, match="rank"):
        shard(
            parity.build(zoo.Uneven),
            fsdp_unit_modules=UNITS,
            **(OTHER_ON_ONE_RANK[what] if dist.get_rank() else {}),
        )


@on_ranks(2)
def test_what_takes_sharded_models_takes_these(tmp_path: Any) -> None:
    from mfsdp_compile import checkpoint

    model = shard(parity.build(zoo.Uneven), fsdp_unit_modules=UNITS)
    assert model.verify_step(parity.batches(1)[0, dist.get_rank()]).largest == 0
    assert "all rules hold" in str(mfsdp_compile.explain(model, parity.batches(1)[0, 0]))
    step = mfsdp_compile.compile_step(model, optimizer := fully_shard_optimizer(parity.sgd(model.parameters())))
    step(parity.batches(1)[0, dist.get_rank()])
    where = [str(tmp_path)]
    dist.broadcast_object_list(where)
    saved = checkpoint.Checkpoints(where[0]).save(1, model, optimizer)
    again = shard(parity.build(zoo.Uneven, seed=1), fsdp_unit_modules=UNITS)
    checkpoint.load(saved, again)
    pairs = zip(model.full_parameters(), again.full_parameters(), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
