"""Wrong input raises its error on every rank, in time, and the model stays usable. No test here may hang."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, raises_everywhere
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecision

from mfsdp_compile import (
    FSDPDistributedIndex,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
)
from mfsdp_compile.backend import compile
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.ranks import agreement

MODES = [EAGER, AOT_EAGER]


# -- arguments: one process is enough ---------------------------------------------------------------------------------


def test_no_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match=r"init_process_group.*torchrun"):
        fully_shard_model(zoo.Plain())


@pytest.mark.usefixtures("fake_world")
def test_unknown_mesh_dimension() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"'fsdp' is not a dimension.*'dp', 'tp'"):
        fully_shard_model(zoo.Plain(), device_mesh=mesh, dp_shard_dim="fsdp")
    with pytest.raises(ValueError, match=r"2 dimensions.*dp_shard_dim"):
        fully_shard_model(zoo.Plain(), device_mesh=mesh)
    model = fully_shard_model(zoo.Plain(), device_mesh=mesh, dp_shard_dim="dp", fsdp_unit_modules="auto")
    assert model.module.head.weight.device_mesh.size() == 2


@pytest.mark.usefixtures("fake_world")
def test_unit_class_that_matches_nothing_leaves_the_model_as_it_was() -> None:
    model = zoo.Plain()
    weight = model.head.weight
    with pytest.raises(ValueError, match=r"Conv2d.*zoo\.Block"):
        fully_shard_model(model, fsdp_unit_modules=[nn.Conv2d])
    assert model.head.weight is weight
    assert type(model) is zoo.Plain
    model(torch.randn(2, 8)).backward()


@pytest.mark.usefixtures("fake_world")
def test_arguments_of_methods() -> None:
    model = fully_shard_model(zoo.Plain(), fsdp_unit_modules=[zoo.Block])
    with pytest.raises(TypeError, match=r"is_last_microbatch.*'no'"):
        model.is_last_microbatch = "no"
    for budget in (-1, "-1", "lots"):
        with pytest.raises(ValueError, match=r"gathered\(budget\) takes bytes"):
            model.gathered(budget)
    model(torch.randn(2, 8)).backward()


@pytest.mark.usefixtures("fake_world")
def test_no_unit_class_warns_and_names_candidates() -> None:
    with pytest.warns(UserWarning, match=r"one unit.*Block.*'auto'"):
        fully_shard_model(zoo.Plain())


@pytest.mark.usefixtures("fake_world")
def test_what_only_fp8_parameters_have_warns() -> None:
    with pytest.warns(UserWarning, match="keep_fp8_transpose_cache has no effect"):
        fully_shard_model(zoo.Plain(), fsdp_unit_modules="auto", keep_fp8_transpose_cache=True)


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"zero_dp_strategy": True}, TypeError, "zero_dp_strategy.*bool"),
        ({"zero_dp_strategy": 3.0}, TypeError, "zero_dp_strategy.*float"),
        ({"zero_dp_strategy": 4}, ValueError, "zero_dp_strategy.*optim_grads_params.*got 4"),
        ({"zero_dp_strategy": "all"}, ValueError, "zero_dp_strategy.*'all'"),
        ({"outer_dp_sharding_strategy": "x"}, ValueError, "outer_dp_sharding_strategy"),
        ({"outer_dp_sharding_strategy": 2}, ValueError, "outer_dp_sharding_strategy='optim_grads'"),
        ({"outer_dp_sharding_strategy": 1}, ValueError, "needs dp_outer_dim"),
        ({"outer_dp_sharding_strategy": True}, TypeError, "outer_dp_sharding_strategy.*bool"),
        ({"dp_outer_dim": "outer"}, ValueError, "dp_outer_dim and hybrid_fsdp_group belong together"),
        ({"calculate_per_token_loss": True, "average_in_collective": True}, ValueError, "pass only one of them"),
        ({"device": "meta"}, ValueError, "device='meta'.*cpu"),
        ({"device": "gpu"}, ValueError, "device='gpu' is not a device"),
        (
            {"mixed_precision_policy": MixedPrecision(torch.bfloat16)},
            TypeError,
            r"torch.distributed.fsdp.*param_dtype.*grad_comm_dtype",
        ),
        ({"mixed_precision_policy": (torch.float32,)}, TypeError, "got a tuple.*main_params_dtype"),
        ({"mixed_precision_policy": None}, TypeError, "got a NoneType"),
        ({"device_mesh": 4}, TypeError, "device_mesh takes .*DeviceMesh, got a int"),
        (
            {"fsdp_unit_modules": zoo.Block()},
            TypeError,
            "fsdp_unit_modules takes a list of nn.Module classes.*a Block",
        ),
        ({"fsdp_unit_modules": [zoo.Block()]}, ValueError, "contains a Block that is not a part of the model"),
        ({"fsdp_unit_modules": [[zoo.Block(), 3]]}, TypeError, "fsdp_unit_modules takes nn.Module classes"),
        ({"ignored_params": 3}, TypeError, "ignored_params takes a collection of parameters, got 3"),
        ({"reshard_after_forward": "no"}, TypeError, "reshard_after_forward takes True, False.*got 'no'"),
        ({"reshard_after_forward": 0}, ValueError, "reshard_after_forward takes at least 1 rank"),
        ({"reshard_after_forward": {3: True}}, TypeError, "has the key 3, which is no module"),
        ({"reshard_after_forward": {zoo.Block(): True}}, ValueError, "a Block as a key that is not part"),
        ({"fsdp_unit_modules": 3}, TypeError, "fsdp_unit_modules takes a list of nn.Module classes.*a int"),
        ({"zero_dp_strategy": None}, TypeError, "zero_dp_strategy.*NoneType"),
        ({"sync_model_each_microbatch": "no"}, TypeError, "sync_model_each_microbatch takes True or False, got 'no'"),
        ({"overlap_param_gather": None}, TypeError, "overlap_param_gather takes True or False"),
        ({"preserve_fp32_weights": torch.float32}, TypeError, "preserve_fp32_weights takes True or False"),
        ({"bucket_bytes": "1GiB"}, TypeError, "bucket_bytes takes a whole number, got '1GiB'"),
        ({"optimizer_block_size": True}, TypeError, "optimizer_block_size takes a whole number"),
        ({"whole_params": ["head.weight"]}, TypeError, "whole_params takes a function"),
        (
            {
                "preserve_fp32_weights": True,
                "mixed_precision_policy": MixedPrecisionPolicy(main_params_dtype=torch.bfloat16),
            },
            ValueError,
            "preserve_fp32_weights.*main_params_dtype",
        ),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    model = zoo.Plain()
    weight = model.head.weight
    with pytest.raises(error, match=match):
        fully_shard_model(model, **({"fsdp_unit_modules": "auto"} | arguments))
    assert model.head.weight is weight
    assert type(model) is zoo.Plain


@pytest.mark.usefixtures("fake_world")
def test_the_wrapper_takes_an_index_of_ranks() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    for given in ((zoo.Plain(), mesh), (mesh, zoo.Plain())):
        with pytest.raises(TypeError, match=r"MegatronFSDP takes.*FSDPDistributedIndex.*fully_shard_model\(module"):
            MegatronFSDP(*given)
    with pytest.raises(TypeError, match="dist_index"):
        MegatronFSDP(zoo.Plain())  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"takes an nn\.Module, got a DeviceMesh"):
        MegatronFSDP(mesh, FSDPDistributedIndex(mesh))


def test_precision_policy_checks_its_fields() -> None:
    with pytest.raises(ValueError, match="main_params_dtype"):
        MixedPrecisionPolicy(main_params_dtype=torch.int32)


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize(("flag", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_older_name_of_the_main_dtype(flag: bool, dtype: torch.dtype) -> None:
    model = fully_shard_model(zoo.Plain().bfloat16(), fsdp_unit_modules="auto", preserve_fp32_weights=flag)
    assert {param.dtype for param in model.parameters()} == {dtype}


@pytest.mark.usefixtures("fake_world")
def test_models_that_cannot_be_sharded() -> None:
    with pytest.raises(TypeError, match=r"nn\.Module, got a int"):
        fully_shard_model(3)  # type: ignore[arg-type]
    model = fully_shard_model(zoo.Plain(), fsdp_unit_modules="auto")
    with pytest.raises(ValueError, match="already sharded"):
        fully_shard_model(model, fsdp_unit_modules="auto")
    with pytest.raises(ValueError, match="already sharded"):
        fully_shard_model(model.module, fsdp_unit_modules="auto")
    with pytest.raises(ValueError, match="no shape yet"):
        fully_shard_model(nn.Sequential(nn.LazyLinear(3)))
    scripted = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(NotImplementedError, match=r"Module '1' is a torch\.jit\.ScriptModule"):
        fully_shard_model(scripted)
    with pytest.raises(NotImplementedError, match=r"ScriptModule.*ignored_params"):
        fully_shard_model(nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))))
    assert [type(param) for param in scripted.parameters()] == [nn.Parameter] * 4
    for embedding in (nn.Embedding(4, 2, max_norm=1.0), nn.EmbeddingBag(4, 2, max_norm=1.0)):
        with pytest.raises(NotImplementedError, match=r"Embedding '0' has max_norm=1\.0.*Normalize its output instead"):
            fully_shard_model(nn.Sequential(embedding, nn.Linear(2, 2)))
        fully_shard_model(nn.Sequential(embedding, nn.Linear(2, 2)), ignored_params=[embedding.weight])
    with pytest.raises(ValueError, match=r"meta device.*init_model_with_meta_device=True"):
        fully_shard_model(nn.Linear(2, 2, device="meta"))

    class Stray(zoo.Plain):
        def __init__(self) -> None:
            super().__init__()
            self.decayed = [self.head.weight]

    with pytest.raises(ValueError, match=r"attribute 'decayed'.*property"):
        fully_shard_model(Stray(), fsdp_unit_modules="auto")


@pytest.mark.usefixtures("fake_world")
def test_moving_a_sharded_model() -> None:
    model = fully_shard_model(zoo.Norms(), fsdp_unit_modules="auto")
    model.to("cpu").float().to(torch.float32)  # nothing changes: allowed
    for move in (model.half, model.bfloat16, lambda: model.to(torch.float64), lambda: model.to("meta")):
        with pytest.raises(RuntimeError, match="after fully_shard_model"):
            move()
    model.apply(lambda module: None)


@pytest.mark.usefixtures("fake_world")
def test_optimizers_that_do_not_fit() -> None:
    whole = zoo.Plain()
    early = torch.optim.SGD(whole.parameters(), lr=0.1)
    fully_shard_model(whole, fsdp_unit_modules="auto")
    with pytest.raises(ValueError, match=r"group 0.*not sharded.*fully_shard_model"):
        fully_shard_optimizer(early)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"group 0.*does not belong to the model"):
        fully_shard(zoo.Plain(), other)
    model = zoo.Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(TypeError, match="in this order; got a SGD and a Plain"):
        fully_shard(optimizer, model)  # type: ignore[arg-type]
    others = {
        "scheduler.optimizer": scheduler,
        "one by one": [optimizer],
        "class, SGD": torch.optim.SGD,
        "model goes to fully_shard_model": model,
        "from the model's parameters": None,
    }
    with pytest.raises(TypeError, match=r"got no optimizer.*mfsdp_compile\.fsdp2\.fully_shard"):
        fully_shard(model)
    for words, given in others.items():
        with pytest.raises(TypeError, match=f"fully_shard takes a torch.optim.Optimizer.*{words}"):
            fully_shard(model, given)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=f"fully_shard_optimizer takes.*{words}"):
            fully_shard_optimizer(given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="flat=True: a LBFGS"):
        fully_shard(model, torch.optim.LBFGS(model.parameters()), flat_optimizer=True, fsdp_unit_modules="auto")
    assert type(model) is zoo.Plain
    with pytest.raises(TypeError, match="preproc_state_dict_for_dcp_ckpt takes True or False"):
        fully_shard_optimizer(optimizer, model)  # type: ignore[arg-type]
    fully_shard(model, optimizer, fsdp_unit_modules="auto")
    with pytest.raises(ValueError, match="already extended"):
        fully_shard_optimizer(optimizer)


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"inner": "tvm"}, ValueError, "'inner'.*inductor"),
        ({"prefetch_units": 2}, ValueError, "no option 'prefetch_units'.*prefetch"),
        ({"prefetch": -1}, ValueError, "prefetch cannot be negative"),
        ({"inner": "aot_eager", "inductor": {"max_autotune": True}}, ValueError, "inductor"),
        ({"inductor": {"max_autotun": True}}, ValueError, "max_autotun.*does not know"),
        ({"prefetch": "1"}, TypeError, "prefetch takes a whole number or 'auto'"),
        ({"reshard_after_forward": "never"}, TypeError, "takes True, False, 'auto' or a number of ranks"),
        ({"reshard_after_forward": 0}, ValueError, "takes at least 1 rank, got 0"),
        ({"memory_budget": "much"}, ValueError, r"options\['memory_budget'\] takes bytes.*'70GiB'.*'much'"),
        ({"memory_budget": 1.5}, TypeError, "takes bytes, as a number or as text"),
        ({"memory_budget": 0}, ValueError, "memory_budget must be above 0"),
        ({"budget_reserve": 1}, ValueError, "budget_reserve is a fraction below 1"),
        ({"budget_reserve": "1%"}, ValueError, "budget_reserve is a fraction below 1, got '1%'"),
        ({"keep_last": "no"}, TypeError, "keep_last takes True or False, got 'no'"),
        ({"inductor": "max_autotune"}, TypeError, r"options\['inductor'\] takes a dict of settings"),
        (["prefetch"], TypeError, "takes options as a dict"),
        ({"prefech": 2}, ValueError, "no option 'prefech'; .* Did you mean 'prefetch'"),
        ({"hardware": "h100"}, ValueError, "unknown hardware 'h100'. Did you mean 'h"),
        ({"optimizer": "adam"}, ValueError, "got 'adam'. Did you mean 'adamw'"),
        ({"budget_reserve": 0.1}, ValueError, "'budget_reserve' is part of.*which is not used here"),
        (
            {"memory_budget": "1GiB", "reductions_in_flight": 2},
            ValueError,
            "'reductions_in_flight'.*the solver decides this",
        ),
        (
            {"prefetch": "auto", "prefetch_bytes": 1, "reduction_bytes": 1},
            ValueError,
            "'prefetch_bytes', 'reduction_bytes'",
        ),
        ({"reshard_after_forward": "auto", "keep_last": False}, ValueError, "options 'keep_last'.*Leave it out"),
        ({"hardware": "abacus"}, ValueError, "unknown hardware 'abacus'. Known: a100-ib"),
        ({"hardware": 8}, TypeError, r"options\['hardware'\] takes a name or a file"),
        ({"hardware": "nowhere.json"}, ValueError, "hardware file nowhere.json"),
        ({"optimizer": "magic"}, ValueError, r"options\['optimizer'\] takes one of adamw"),
        ({"report": 1}, TypeError, r"options\['report'\] takes True or False"),
        ({"schedule": "nowhere.sched"}, ValueError, "nowhere.sched cannot be read"),
        ({"schedule": "nowhere.sched", "prefetch": 2}, ValueError, "fixes the whole schedule, and so do 'prefetch'"),
        ({"float32_gradients": 1}, TypeError, "float32_gradients.*True or False"),
        ({"float32_gradients": True, "inductor": {"triton.native_matmul": True}}, ValueError, "native_matmul"),
        ({"float32_gradients": True}, ValueError, "'cpu'.*CUDA"),
        ({"inductor": {"triton.cudagraphs": True}}, ValueError, r"triton\.cudagraphs.*capture_step"),
    ],
)
def test_wrong_compile_options(options: dict[str, Any], error: type[Exception], match: str) -> None:
    model = fully_shard_model(zoo.Plain(), fsdp_unit_modules="auto")
    compiled = torch.compile(model, backend="mfsdp", options=options)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=match) as caught:
        compiled(torch.randn(2, 8))
    assert isinstance(caught.value.inner_exception, error)


class _Untraceable(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize(
    ("given", "match"),
    [({"options": {"loss_chunk": 8}}, "Did you mean 'loss_chunks'"), ({"mode": "max-autotune"}, "mode='max-autotune'")],
)
def test_options_are_checked_before_anything_is_traced(given: dict[str, Any], match: str) -> None:
    compat.on_compilation(compile._dynamo_begins, compile._dynamo_ends)  # an earlier test may have reset Dynamo
    model = fully_shard_model(_Untraceable(8, 8))
    for compiled in (model, lambda x: model(x)):
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=match):
            torch.compile(compiled, backend="mfsdp", fullgraph=True, **given)(torch.randn(2, 8))
    with pytest.raises(torch._dynamo.exc.Unsupported):  # what tracing says
        torch.compile(model, backend="mfsdp", fullgraph=True)(torch.randn(2, 8))


@pytest.mark.usefixtures("fake_world")
def test_compile_modes_are_refused() -> None:
    model = fully_shard_model(zoo.Plain(), fsdp_unit_modules="auto")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"mode='max-autotune'.*not supported"):
        torch.compile(model, backend="mfsdp", mode="max-autotune")(torch.randn(2, 8))


@pytest.mark.long_if("inductor")
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_another_backend_says_which_one_to_use(backend: str) -> None:
    model = fully_shard_model(zoo.Plain(layers=2), fsdp_unit_modules="auto")
    with pytest.raises(RuntimeError, match=r"another backend.*backend='mfsdp'"):
        torch.compile(model, backend=backend)(torch.randn(2, 8))
    torch._dynamo.reset()
    model(torch.randn(2, 8)).backward()  # the model still works


# -- ranks that differ ------------------------------------------------------------------------------------------------


def _different(kind: str, rank: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(rank if kind == "values" else 0)
    units: dict[str, Any] = {"fsdp_unit_modules": [zoo.Block]}
    if kind == "shape" and rank:
        return zoo.Plain(width=8), units
    if kind == "layers" and rank:
        return zoo.Plain(layers=4), units
    model = zoo.Plain()
    if kind == "dtype" and rank:
        model.head.double()
    if kind == "frozen" and rank:
        model.head.requires_grad_(False)
    if kind == "units" and rank:
        units = {"fsdp_unit_modules": [nn.Linear]}
    if kind == "missing class" and rank:
        units = {"fsdp_unit_modules": [nn.Conv2d]}
    if kind == "buffers" and rank:
        model.register_buffer("more", torch.zeros(3))
    return model, units


EXPECTED = {
    "shape": ["parameter enter.weight: (16, 8)", "parameter enter.weight: (8, 8)"],
    "layers": ["First difference", "blocks.3"],
    "dtype": ["head.weight", "torch.float64"],
    "frozen": ["head.weight", "requires_grad=False"],
    "units": ["[bucket root:before", "[bucket enter"],
    "values": ["values of enter.weight"],
    "buffers": ["buffer more"],
}


@pytest.mark.parametrize("kind", EXPECTED)
@on_ranks(2, timeout=60)
def test_ranks_with_different_models(kind: str) -> None:
    model, units = _different(kind, dist.get_rank())
    before = {name: param.clone() for name, param in model.named_parameters()}
    with raises_everywhere(RuntimeError, "fully_shard_model: rank 1 of 2 differs from rank 0", *EXPECTED[kind]):
        fully_shard_model(model, **units)
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])
    # The ranks still agree afterwards.
    fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules="auto")


@on_ranks(2, timeout=60)
def test_values_may_differ_on_purpose() -> None:
    model, units = _different("values", dist.get_rank())
    fully_shard_model(model, check_values=False, **units)


@on_ranks(2, timeout=60)
def test_error_on_one_rank_is_an_error_on_all() -> None:
    model, units = _different("missing class", dist.get_rank())
    error = ValueError if dist.get_rank() else RuntimeError
    with raises_everywhere(error, "Conv2d", *([] if dist.get_rank() else ["rank 1 failed"])):
        fully_shard_model(model, **units)


@on_ranks(2, timeout=60)
def test_rank_that_does_not_come() -> None:
    """If a rank does not arrive in time, all ranks raise, also the late one, and ranks agree again afterwards."""
    if dist.get_rank() == 1:
        agreement.report_failure(dist.group.WORLD, ValueError("long over"))
        agreement.forget_failure(dist.group.WORLD)
        time.sleep(3)
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 1 did not arrive within 0:00:01") as caught:
        agreement.agree(dist.group.WORLD, "a test", lambda: ["something"], timeout=timedelta(seconds=1))
    assert "long over" not in str(caught.value)
    assert time.monotonic() - begun < 30
    agreement.agree(dist.group.WORLD, "a test", lambda: ["something"], timeout=timedelta(seconds=30))


@on_ranks(2, timeout=60)
def test_what_ranks_do_not_agree_on() -> None:
    """All ranks raise if one raises, if lines that ranks must share differ, or if offers cannot be combined."""
    rank, soon = dist.get_rank(), timedelta(seconds=20)

    def describe() -> list[str]:
        if rank == 1:
            raise ValueError("not here")
        return ["something"]

    begun = time.monotonic()
    with raises_everywhere(
        ValueError if rank else RuntimeError, "" if rank else "rank 1 failed with ValueError: not here"
    ):
        agreement.agree(dist.group.WORLD, "an error", describe, timeout=soon)
    with raises_everywhere(RuntimeError, "rank 1 of 2 differs from rank 0", "[piece 0]", "[piece 1]"):
        agreement.agree(
            dist.group.WORLD, "a part", lambda: ["same"], timeout=soon, within=lambda: ([0, 1], [f"piece {rank}"])
        )

    def combine(offers: Sequence[int]) -> int:
        raise ValueError(f"nothing to be made of {offers}")

    with raises_everywhere(RuntimeError, "failed with ValueError: nothing to be made of [0, 1]"):
        agreement.conclude(dist.group.WORLD, "a decision", ["same"], rank, combine, soon)
    assert agreement.conclude(dist.group.WORLD, "a decision", ["same"], rank, sum, soon) == 1
    assert time.monotonic() - begun < 15


# -- changes after sharding -------------------------------------------------------------------------------------------


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, timeout=90)
def test_parameters_changed_after_sharding(mode: str) -> None:
    model, call = parity.shard(parity.build(zoo.Plain), mode)
    x = torch.randn(2, 8)
    call(x).backward()
    head = model.module.head
    with raises_everywhere(RuntimeError, "'weight' of Linear is sharded and cannot be replaced"):
        head.weight = nn.Parameter(torch.zeros(5, 16))
    with raises_everywhere(RuntimeError, "new parameter 'more'"):
        head.more = nn.Parameter(torch.zeros(5))
    with raises_everywhere(AttributeError, "'weight'", "cannot be deleted"):
        del head.weight
    call(x).backward()

    kept = head._parameters["weight"]
    head._parameters["weight"] = nn.Parameter(torch.zeros(5, 16))  # bypasses the module
    with raises_everywhere(RuntimeError, "'head.weight' was replaced"):
        call(x)
    head._parameters["weight"] = kept
    call(x).backward()


CHANGES: dict[str, Any] = {
    "for": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False).step(),
    "foreach": lambda params: torch.optim.SGD(params, lr=0.1, foreach=True).step(),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True).step(),
    "data": lambda params: [p.data.mul_(2) for p in params],
    "random": lambda params: [nn.init.normal_(p) for p in params],
    "local": lambda params: [p.to_local().add_(1) for p in params],
}


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
@on_ranks(2, timeout=90)
def test_parameters_changed_between_forward_and_backward(mode: str, change: str) -> None:
    model, call = parity.shard(parity.build(zoo.Plain), mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 8)
    call(x).backward()
    loss = call(x)
    with torch.no_grad():
        CHANGES[change](list(model.parameters()))
    message = "modified in place between forward and backward" if mode == EAGER else "modified by an inplace operation"
    with raises_everywhere(RuntimeError, message):
        loss.backward()
    optimizer.zero_grad()
    call(x).backward()


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, timeout=90)
def test_backward_twice(mode: str) -> None:
    model, call = parity.shard(parity.build(zoo.Plain), mode)
    x = torch.randn(2, 8)
    loss = call(x)
    loss.backward()
    first = [param.grad.full_tensor() for param in model.parameters()]
    with raises_everywhere(RuntimeError, "backward through the graph a second time"):
        loss.backward()
    for param, gradient in zip(model.parameters(), first, strict=True):
        assert torch.equal(param.grad.full_tensor(), gradient)
    model.zero_grad()
    call(x).backward()
    for param, gradient in zip(model.parameters(), first, strict=True):
        assert torch.equal(param.grad.full_tensor(), gradient)


@on_ranks(2, timeout=90)
def test_saved_activation_changed_in_place() -> None:
    """Autograd's own check of saved tensors still works under the eager path's hooks."""

    class Clobbers(zoo.Plain):
        def trunk(self, x: Tensor) -> Tensor:
            y = torch.exp(x)
            z = y * 2
            y.add_(1)  # exp needs its result for backward
            return z

    model, _ = parity.shard(parity.build(Clobbers), EAGER, units=[zoo.Block])
    with raises_everywhere(RuntimeError, "modified by an inplace operation"):
        model(torch.randn(2, 8)).backward()


# -- exceptions, and touching parameters everywhere -------------------------------------------------------------------


class Bomb(Exception):
    pass


class _RaiseInBackward(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        if _RaiseInBackward.armed:
            raise Bomb("backward")
        return gradient


class Explosive(zoo.Plain):
    """A model that raises in the middle, on demand."""

    in_forward: type[BaseException] | None = None

    def trunk(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        x = self._middle(x)
        return self.blocks[2](self.blocks[1](x))

    @torch.compiler.disable
    def _middle(self, x: Tensor) -> Tensor:
        if self.in_forward is not None:
            raise self.in_forward("forward")
        return _RaiseInBackward.apply(x)


def touch(model: nn.Module) -> None:
    """Do what users do to parameters at rest."""
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            here = getattr(module, name)
            assert repr(here)
            assert str(param)
            (here * 2 + 1).sum()
            here.norm()
            here.full_tensor()
            copy.deepcopy(here)
            assert here.grad is None or repr(here.grad)
            assert param.data.shape == param.shape
    repr(model)
    sum(p.numel() for p in model.parameters())
    model.state_dict()


def touch_inside(module: nn.Module, *_: Any) -> None:
    """Do what users do to parameters in forward hooks, where they are whole."""
    for name, param in module.named_parameters(recurse=False):
        here = getattr(module, name)
        assert repr(here)
        assert repr(param)
        assert here.shape == param.shape
        assert torch.isfinite(here.detach().clone() + 1).all()
        assert str(param.grad)


@pytest.mark.long_unless("*-backward-eager")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["forward", "backward", "interrupt"])
@on_ranks(2, timeout=120)
def test_training_goes_on_after_an_exception(mode: str, where: str) -> None:
    model, call = parity.shard(parity.build(Explosive), mode, units=[zoo.Block])
    alone = parity.build(Explosive)
    touch(model)
    data = parity.batches(3)
    rank = dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alone_optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step, batch in enumerate(data):
        if step == 1:
            error: type[BaseException] = KeyboardInterrupt if where == "interrupt" else Bomb
            _RaiseInBackward.armed = where == "backward"
            model.module.in_forward = None if where == "backward" else error
            try:
                call(batch[rank]).backward()
            except error:
                pass
            else:
                raise AssertionError("nothing was raised")
            finally:
                _RaiseInBackward.armed, model.module.in_forward = False, None
            optimizer.zero_grad()
            touch(model)
        call(batch[rank]).backward()
        sum(alone(x) / len(batch) for x in batch).backward()
        for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), its.grad, rtol=1e-4, atol=1e-7)
        for optim in (optimizer, alone_optimizer):
            optim.step()
            optim.zero_grad()
        touch(model)


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, timeout=120)
def test_touching_parameters_in_forward_hooks(mode: str) -> None:
    whole = parity.build(zoo.Plain)
    for module in whole.modules():  # some exist before sharding, some are added after
        module.register_forward_pre_hook(touch_inside)
    model, call = parity.shard(whole, mode)
    for module in model.module.modules():
        module.register_forward_hook(touch_inside)
    alone = parity.build(zoo.Plain)
    batch = parity.batches(1)[0]
    call(batch[dist.get_rank()]).backward()
    sum(alone(x) / len(batch) for x in batch).backward()
    for mine, its in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), its.grad, rtol=1e-4, atol=1e-7)
    touch(model)


@on_ranks(2, timeout=120)
def test_a_gathered_parameter_that_is_kept_stays_valid() -> None:
    """A reference to a gathered parameter stays valid, and raises in the next forward because it is out of date.

    Nothing frees memory under a reference. Keeping a weight keeps at most its bucket in memory.
    """
    kept = []
    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
    block = model.module.blocks[0]
    block.register_forward_hook(lambda module, args, out: kept.append(module.up.weight))
    expected = parity.build(zoo.Plain).blocks[0].up.weight
    model(torch.randn(2, 8)).backward()
    assert torch.equal(kept[0], expected)
    values = kept[0].detach()
    model(torch.randn(2, 8)).backward()
    assert torch.equal(values, expected)
    with raises_everywhere(RuntimeError, "'blocks.0.up.weight' was gathered for an earlier forward"):
        kept[0] + 1
