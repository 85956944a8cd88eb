"""Transformer Engine's own layers, sharded."""

from __future__ import annotations

import copy
import functools
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import reference_tex
import te_models
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pool import on_ranks, shared_folder
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mfsdp_compile import MixedPrecisionPolicy, megatron
from mfsdp_compile.runtime import compat

pytestmark = pytest.mark.skipif(not reference_tex.IS_THERE, reason="needs transformer_engine")

KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer", "GroupedLinear")


@pytest.mark.long_unless("2-Linear", "2-LayerNormMLP")
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 4)
def test_sharded_equals_alone(kind: str) -> None:
    te_models.compare(kind, te_models.BITWISE)


@pytest.mark.long
@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_gradients_are_the_mean_over_ranks(fused: bool) -> None:
    """Of different data, for every parameter: a gradient that is not reduced would differ."""
    for kind in KINDS:
        alone, x = te_models.build(kind), te_models.batch(kind, dist.get_rank())
        alone(x).float().square().mean().backward()
        model = te_models.shard(te_models.build(kind, fuse_wgrad_accumulation=fused))
        model(x).float().square().mean().backward()
        for (name, mine), its in zip(model.module.named_parameters(), alone.parameters(), strict=True):
            dist.all_reduce(its.grad)
            assert torch.equal(mine.grad.full_tensor(), (its.grad / 2).float()), (kind, name)


@on_ranks(2)
def test_delayed_scaling_quantizes_again_in_backward() -> None:
    """With the scale that forward has updated. Equal to Transformer Engine under FSDP2, and close to one process."""
    for kind in ("LayerNormLinear", "LayerNormMLP"):
        alone = te_models.train_alone(te_models.build(kind), kind, "delayed")
        like_fsdp2 = te_models.build(kind)
        for layer in like_fsdp2.modules():
            layer._is_fsdp2 = True
        expected = te_models.train_alone(like_fsdp2, kind, "delayed")
        sharded = te_models.train_sharded(te_models.shard(te_models.build(kind)), kind, "delayed")
        assert sharded.losses == expected.losses and sharded.distance(expected) == 0
        assert sharded.losses[0] == alone.losses[0]
        first, its = (te_models.Trained([], trained.gradients[:1]) for trained in (sharded, alone))
        assert first.distance(its) < DELAYED


DELAYED = 0.2
"""Bound on the relative distance of the first gradients: one quantizes weights at scale 1, the other at their own."""


@pytest.mark.parametrize("first", [False, True])
@on_ranks(2)
def test_accumulation(first: bool) -> None:
    """``is_first_microbatch`` says when weights have changed; nothing is kept quantized that could be outdated."""
    for kind in ("LayerNormMLP", "GroupedLinear"):
        te_models.compare(kind, ["current"], micro=2, first=first)


@pytest.mark.long_if("*-LayerNormLinear-*", "*-TransformerLayer-*", "*-2-1", "*-Linear-1-2")
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(("kind", "uses"), [*((kind, 1) for kind in KINDS), *((kind, 2) for kind in KINDS[:3])])
@on_ranks(2)
def test_gradients_written_into_the_bucket(kind: str, uses: int, micro: int) -> None:
    """``fuse_wgrad_accumulation``: equal to one process that accumulates in main_grad of the same dtype."""
    for first in {False, micro == 2 and uses == 1}:
        alone = te_models.build(kind, uses=uses, fuse_wgrad_accumulation=True)
        expected = te_models.train_alone(alone, kind, "current", micro, first, fused=torch.bfloat16)
        model = te_models.shard(te_models.build(kind, uses=uses, fuse_wgrad_accumulation=True))
        trained = te_models.train_sharded(model, kind, "current", micro, first)
        assert trained.losses[0] == expected.losses[0]
        assert trained.distance(expected) <= (0 if uses == micro == 1 else ROUNDING)


ROUNDING = 0.01
"""The sum of two gradients in bfloat16 is rounded once in one process, elsewhere here."""


@pytest.mark.long_unless("*-Linear-*")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer", "RMSNorm"])
@on_ranks(2)
def test_no_weight_outlives_its_unit(kind: str, fused: bool) -> None:
    """Between forward and backward, nothing is alive that is as large as a weight, in whatever form."""
    if not te_models.has_is_fsdp2():
        return  # these versions keep quantized weights
    width = 512  # weights are larger than any activation
    for recipe in te_models.BITWISE:
        model = te_models.shard(te_models.build(kind, width=width, fuse_wgrad_accumulation=fused))
        te_models.check_that_no_weight_stays(model, kind, width, recipe)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"zero_dp_strategy": 0},
        {"zero_dp_strategy": 1},
        {"zero_dp_strategy": 2},
        {"fsdp_double_buffer": True},
        {"sync_model_each_microbatch": False},
        {"hsdp": True},
    ],
    ids=lambda options: next(iter(options)) + str(next(iter(options.values()))),
)
@on_ranks(4)
def test_strategies(options: dict[str, Any]) -> None:
    """Each works, also with gradients that layers write themselves."""
    kind, fused = "LayerNormMLP", {"fuse_wgrad_accumulation": True}
    if options.pop("hsdp", False):
        options = te_models.two_levels()
    alone = te_models.train_alone(te_models.build(kind), kind, "current", micro=2)
    trained = te_models.train_sharded(te_models.shard(te_models.build(kind), **options), kind, "current", micro=2)
    assert trained.losses == alone.losses and trained.distance(alone) == 0
    expected = te_models.train_alone(te_models.build(kind, **fused), kind, "current", micro=2, fused=torch.bfloat16)
    written = te_models.train_sharded(
        te_models.shard(te_models.build(kind, **fused), **options), kind, "current", micro=2
    )
    assert written.losses[0] == expected.losses[0] and written.distance(expected) <= ROUNDING


@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_frozen_weights(fused: bool) -> None:
    frozen = {"Linear": "blocks.0", "LayerNormMLP": "blocks.1.inner.fc1_weight"}
    for kind, prefix in frozen.items():

        def build(kind: str = kind, prefix: str = prefix) -> Any:
            model = te_models.build(kind, fuse_wgrad_accumulation=fused)
            for name, param in model.named_parameters():
                param.requires_grad_(not name.startswith(prefix))
            return model

        alone = te_models.train_alone(build(), kind, "current", fused=torch.bfloat16 if fused else None)
        trained = te_models.train_sharded(te_models.shard(build()), kind, "current")
        assert trained.losses == alone.losses and trained.distance(alone) == 0


@on_ranks(2)
def test_gradients_that_are_asked_for() -> None:
    """``backward(inputs=...)`` and ``torch.autograd.grad`` get theirs, and the others stay None."""
    model = te_models.shard(te_models.build("Linear", fuse_wgrad_accumulation=True))
    named = dict(model.module.named_parameters())
    asked, other = named["blocks.1.inner.weight"], named["blocks.1.inner.bias"]
    x = te_models.batch("Linear", 0)
    model(x).float().sum().backward(inputs=[asked])
    assert other.grad is None and all(p.grad is None for n, p in named.items() if p is not asked)
    first = asked.grad.full_tensor().clone()
    (again,) = torch.autograd.grad(model(x).float().sum(), [asked])
    assert torch.equal(again.full_tensor(), first)
    model(x).float().sum().backward(inputs=[other])
    assert torch.equal(asked.grad.full_tensor(), first)
    assert other.grad is not None


@on_ranks(2)
def test_checkpointed_blocks() -> None:
    """Layers recomputed in backward write gradients, too. In fp8, they need Transformer Engine's checkpoint."""
    kind, results = "LayerNormMLP", []
    for checkpointed in (False, True):
        model = te_models.build(kind, fuse_wgrad_accumulation=True)
        if checkpointed:
            for block in model.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        results.append(te_models.train_sharded(te_models.shard(model), kind, "bf16"))
    assert results[0].losses == results[1].losses and results[0].distance(results[1]) == 0


@pytest.mark.long
@on_ranks(2)
def test_initialization_on_meta() -> None:
    """Values are those that one process draws, and training goes on from them."""
    kind = "TransformerLayer"
    alone = te_models.build(kind, device="meta")
    alone.to_empty(device=te_models.DEVICE)
    torch.manual_seed(3)
    for module in alone.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    meta = te_models.build(kind, device="meta")
    torch.manual_seed(3)
    model = te_models.shard(meta, init_model_with_meta_device=True)
    for (name, mine), (_, its) in zip(model.module.named_parameters(), alone.named_parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), its.float()), name
    expected = te_models.train_alone(alone, kind, "current")
    trained = te_models.train_sharded(model, kind, "current")
    assert trained.losses == expected.losses and trained.distance(expected) == 0


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@on_ranks(2)
def test_checkpoints(recipe: str) -> None:
    """Main weights and ``_extra_state`` are saved; a run that loads them goes on as if it had not stopped."""
    kind = "LayerNormLinear"
    folder = shared_folder()
    model = te_models.shard(te_models.build(kind))
    te_models.train_sharded(model, kind, recipe)
    state = model.state_dict()
    extra = {name: value for name, value in state.items() if name.endswith("_extra_state")}
    assert extra and all(type(value) is Tensor for value in extra.values())
    if te_models.has_is_fsdp2():  # before, it has the recipe, too
        assert any(value.numel() for value in extra.values()) == (recipe == "delayed")
    dcp.save({"model": state}, checkpoint_id=folder)
    went_on = te_models.train_sharded(model, kind, recipe)
    other = te_models.shard(te_models.build(kind))
    with mock.patch.dict(os.environ, NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE="1"):
        loaded = {"model": other.state_dict()}
        for name, value in extra.items():
            loaded["model"][name] = torch.empty_like(value)
        dcp.load(loaded, checkpoint_id=folder)
        other.load_state_dict(loaded["model"])
    resumed = te_models.train_sharded(other, kind, recipe)
    assert (resumed.losses, resumed.distance(went_on)) == (went_on.losses, 0)


@on_ranks(2)
def test_checkpoints_of_megatron() -> None:
    """They have no ``_extra_state``: neither is it saved, nor asked for."""
    config = megatron.DistributedDataParallelConfig(use_megatron_fsdp=True)
    models = [
        megatron.FullyShardedDataParallel(
            megatron.TransformerConfig(),
            config,
            te_models.build("LayerNormLinear"),
            fsdp_unit_modules=[te_models.Block],
        )
        for _ in range(2)
    ]
    assert any(name.endswith("_extra_state") for name in models[0].state_dict())
    state = models[0].sharded_state_dict()
    assert not any(name.endswith("_extra_state") for name in state)
    assert models[0].state_dict_for_save_checkpoint("a.").keys() == {f"a.{name}" for name in state}
    folder = shared_folder()
    dcp.save({"model": state}, checkpoint_id=folder)
    loaded = {"model": models[1].sharded_state_dict()}
    dcp.load(loaded, checkpoint_id=folder)
    assert models[1].load_state_dict(loaded["model"]).missing_keys == []
    state.pop(next(iter(state)))
    with pytest.raises(RuntimeError, match="Missing key"):
        models[1].load_state_dict(state)


@on_ranks(2)
def test_a_copy_trains_as_the_original() -> None:
    model = te_models.shard(te_models.build("LayerNormMLP", fuse_wgrad_accumulation=True))
    duplicate = copy.deepcopy(model)
    first = te_models.train_sharded(model, "LayerNormMLP", "current")
    second = te_models.train_sharded(duplicate, "LayerNormMLP", "current")
    assert first.losses == second.losses and first.distance(second) == 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
@on_ranks(2)
def test_compiled(kind: str) -> None:
    """Graphs break at layers that Dynamo cannot trace; eager windows serve those. Equal to the eager path."""
    whole = kind == "Linear" and compat.TORCH_VERSION >= (2, 14)  # which can register te.Linear as an operator

    def build() -> Any:
        model = te_models.build(kind)
        if whole:
            model.norm = torch.nn.Identity()
        return te_models.shard(model)

    for recipe in te_models.BITWISE:
        if recipe == "nvfp4":  # its layers shift a bool to the left, which torch cannot trace (2.11 to 2.15)
            continue
        eager = te_models.train_sharded(build(), kind, recipe)
        model = build()
        call = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager"}, fullgraph=whole)
        compiled = te_models.train_sharded(model, kind, recipe, call=call)
        torch._dynamo.reset()
        assert compiled.losses == eager.losses and compiled.distance(eager) == 0


@on_ranks(2)
def test_what_is_refused() -> None:
    te = te_models.te()

    def refused(error: type[Exception], says: str, model: torch.nn.Module) -> None:
        before = list(model.parameters())
        with pytest.raises(error, match=says):
            te_models.shard(model, init_model_with_meta_device=True)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))

    refused(
        NotImplementedError,
        r"Module 'blocks.0.inner', a Linear of Transformer Engine, was built with delay_wgrad_compute=True",
        te_models.build("Linear", delay_wgrad_compute=True),
    )
    split = te_models.build("Linear", fuse_wgrad_accumulation=True, parameters_split=("a_", "b_"))
    refused(NotImplementedError, r"has its weight in 2 parameters \(a_weight, b_weight\)", split)
    scattered = te_models.build("Linear")
    scattered.head.fsdp_group = dist.group.WORLD
    refused(ValueError, "Module 'head', .* is prepared for torch's FullyShardedDataParallel", scattered)
    sequence = te.ops.Sequential(te.ops.RMSNorm(64, device=te_models.DEVICE))
    refused(NotImplementedError, "a Sequential of Transformer Engine, keeps the parameters", sequence)
    operation = torch.nn.Sequential(
        te.ops.Linear(64, 64, bias=False, device=te_models.DEVICE, accumulate_into_main_grad=True)
    )
    refused(NotImplementedError, "accumulate_into_main_grad=True, which is not implemented", operation)

    model = te_models.shard(te_models.build("Linear"))
    with pytest.raises(TypeError, match=r"the input is torch.float32, the parameters are torch.bfloat16"):
        model(te_models.batch("Linear", 0).float())
    layer = model.module.blocks[0].inner
    layer.wgrad_store = SimpleNamespace(delay_wgrad_compute=lambda: True)
    with pytest.raises(RuntimeError, match="delay_wgrad_compute was enabled after fully_shard_model"):
        layer.backward_dw()


@pytest.mark.long_unless("*-Linear")
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_param_dtype(kind: str) -> None:
    """Float32 layers with ``param_dtype`` compute what bfloat16 layers of the same weights do."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for name in ("bf16", "current"):
        alone = te_models.train_sharded(te_models.shard(te_models.build(kind)), kind, name)
        model = te_models.shard(te_models.build(kind).float(), mixed_precision_policy=policy)
        sharded = te_models.train_sharded(model, kind, name)
        assert sharded.losses == alone.losses and sharded.distance(alone) == 0
