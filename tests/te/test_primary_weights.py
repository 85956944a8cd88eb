"""Models of Transformer Engine whose weights are quantized when they are built, sharded."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import reference_tex
import te_models
import torch
import torch.distributed.checkpoint as dcp
from pool import on_ranks, shared_folder
from torch.distributed.device_mesh import init_device_mesh

from mfsdp_compile import MixedPrecisionPolicy
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.geometry.layout import LayoutPolicy, ParamSpec, plan_layouts
from mfsdp_compile.runtime.guests.quantized import planes

pytestmark = pytest.mark.skipif(not reference_tex.IS_THERE, reason="needs transformer_engine")

KINDS = ("Linear", "LayerNormLinear", "LayerNormMLP", "TransformerLayer", "GroupedLinear")
RECIPES = ("current", "mxfp8", *te_models.BLOCKS)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, 4)
def test_sharded_equals_alone(kind: str) -> None:
    """One process keeps main weights beside, and quantizes them after each step."""
    te_models.compare(kind, RECIPES, primary=True)


@contextlib.contextmanager
def counted() -> Iterator[Counter[str]]:
    """Context that counts the bytes of gathers that this rank starts, and its maxima over ranks."""
    counts: Counter[str] = Counter()
    gather, reduce = compat.all_gather, compat.all_reduce

    def all_gather(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        counts["bytes"] += tensor.nbytes if tensor.dtype != torch.float32 else 0  # of main weights and gradients
        return gather(tensor, *args)

    def all_reduce(tensor: torch.Tensor, op: str, *args: Any) -> torch.Tensor:
        counts["maxima"] += op == "max"
        return reduce(tensor, op, *args)

    with mock.patch.object(compat, "all_gather", all_gather), mock.patch.object(compat, "all_reduce", all_reduce):
        yield counts


@pytest.mark.long_if("*-3")
@pytest.mark.parametrize("micro", [1, 3])
@on_ranks(2)
def test_what_is_sent(micro: int) -> None:
    """Half of the bytes, and the scales of all weights in one collective per step."""
    if not te_models.gathers_in_fp8():
        return
    kind, width = "LayerNormMLP", 256
    sent = {}
    for primary in ("", "current", "mxfp8"):
        model = te_models.shard(te_models.build(kind, primary, width=width))
        with counted() as counts:
            te_models.train_sharded(model, kind, primary or "current", micro, width=width)
        sent[primary] = counts
    assert sent["current"]["bytes"] <= 0.51 * sent[""]["bytes"], sent
    assert sent["current"]["maxima"] - sent[""]["maxima"] == 3  # steps
    # The last unit, which otherwise stays gathered from forward to backward, is gathered in both: one more
    # of 14.
    assert sent["mxfp8"]["bytes"] <= 1.05 * 33 / 32 * sent["current"]["bytes"], sent
    assert sent["mxfp8"]["maxima"] == sent[""]["maxima"]  # shard borders cut no 32 rows


@pytest.mark.long
@pytest.mark.parametrize("micro", [1, 3])
@on_ranks(4)
def test_scales_of_cut_blocks(micro: int) -> None:
    """Shard borders cut each 32 rows of a matrix of 64. One collective per step makes their scales whole."""
    if not te_models.gathers_in_fp8():
        return
    model = te_models.shard(te_models.build("Linear", "mxfp8"))
    plans = [bucket.plan for bucket in model.sharded.buckets if bucket.made_columns is not None]
    cut = [planes.cut_blocks(slot, plan.layout.shard_numel) for plan in plans for slot in plan.layout.slots]
    assert cut == [[0, 1]] * 3
    sizes = []

    def all_reduce(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return compat.all_reduce(tensor, *args)

    with mock.patch.object(planes, "compat", mock.Mock(wraps=compat, all_reduce=all_reduce)):
        te_models.train_sharded(model, "Linear", "mxfp8", micro)
    assert sizes == [3 * 2 * 64] * 3
    te_models.compare("Linear", ["mxfp8"], micro, primary=True, spread=True)


@pytest.mark.long
@on_ranks(2)
def test_backward_that_dequantizes() -> None:
    """With ``backward_override``, it reads the plane of forward."""
    if not te_models.gathers_in_fp8():
        return
    for kind in ("Linear", "LayerNormLinear"):  # others refuse it
        te_models.compare(kind, ["mxfp8, dequantized", "mxfp8, high_precision"], primary=True, spread=True)


def test_which_blocks_are_cut() -> None:
    """Compared with the rows that each rank has, in layouts of odd shapes and numbers of ranks."""
    for ranks in (1, 2, 3, 5, 8, 33):
        shapes = {"a": (96, 64), "b": (32, 32), "c": (640, 96), "d": (64, 128)}
        specs = [ParamSpec(name, shape) for name, shape in shapes.items()]
        for layout in plan_layouts(specs, 1, ranks, LayoutPolicy(block_numel=32)):
            for index, slot in enumerate(layout.slots):
                owners: dict[int, set[int]] = {}
                for rank in range(ranks):
                    for row in layout.rows(index, rank):
                        owners.setdefault(row // 32, set()).add(rank)
                shared = [block for block, its in sorted(owners.items()) if len(its) > 1]
                assert planes.cut_blocks(slot, layout.shard_numel) == shared


@pytest.mark.long_if("*-mxfp8", "*-GroupedLinear-*", "*-TransformerLayer-*")
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_no_quantized_weight_outlives_its_unit(kind: str, recipe: str) -> None:
    if not te_models.gathers_in_fp8():
        return  # these versions keep weights that they have quantized
    for fused in (False, True):
        model = te_models.shard(te_models.build(kind, recipe, width=512, fuse_wgrad_accumulation=fused))
        te_models.check_that_no_weight_stays(model, kind, 512, recipe)


@pytest.mark.long_if("*-mxfp8")
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@on_ranks(2)
def test_accumulation_and_frozen_weights(recipe: str) -> None:
    for micro, first in ((2, False), (2, True)):
        te_models.compare("LayerNormMLP", [recipe], micro=micro, first=first, primary=True)

    def build() -> Any:
        model = te_models.build("LayerNormMLP", recipe)
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith("blocks.1.inner.fc1_weight"))
        return model

    alone = te_models.train_alone(build(), "LayerNormMLP", recipe)
    trained = te_models.train_sharded(te_models.shard(build()), "LayerNormMLP", recipe)
    assert trained.losses == alone.losses and trained.distance(alone) == 0


@pytest.mark.long_if("*-mxfp8")
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@on_ranks(2)
def test_gradients_written_into_the_bucket(recipe: str) -> None:
    for kind in ("Linear", "LayerNormMLP", "GroupedLinear"):
        fused = {"primary": recipe, "fuse_wgrad_accumulation": True}
        expected = te_models.train_alone(te_models.build(kind, **fused), kind, recipe, fused=torch.bfloat16)
        trained = te_models.train_sharded(te_models.shard(te_models.build(kind, **fused)), kind, recipe)
        assert trained.losses == expected.losses and trained.distance(expected) == 0


@on_ranks(2)
def test_transposed_planes() -> None:
    """``keep_fp8_transpose_cache``: a layer makes them once, in forward, at one byte per element."""
    if not te_models.gathers_in_fp8():
        return
    kind, made = "LayerNormMLP", Counter()
    transpose = reference_tex.tex.fp8_transpose

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        made[compat.in_backward()] += 1
        return transpose(*args, **kwargs)

    results, totals = [], set()
    for keeps in (False, True):
        model = te_models.shard(te_models.build(kind, "current"), keep_fp8_transpose_cache=keeps)
        made.clear()
        with mock.patch.object(reference_tex.tex, "fp8_transpose", counting):
            results.append(te_models.train_sharded(model, kind, "current"))
        assert made[False] == (3 * 5 if keeps else 0)  # in three steps: two in each block, and one in the model
        totals.add(sum(made.values()))  # some are of gradients
    assert len(totals) == 1
    assert results[0].losses == results[1].losses and results[0].distance(results[1]) == 0


@on_ranks(2)
def test_delayed_scaling() -> None:
    """Weights are gathered in bfloat16 and quantized at each use, as those of a model with ordinary weights."""
    for kind in ("Linear", "LayerNormMLP"):
        ordinary = te_models.train_sharded(te_models.shard(te_models.build(kind)), kind, "delayed")
        model = te_models.shard(te_models.build(kind, "delayed"))
        trained = te_models.train_sharded(model, kind, "delayed")
        assert trained.losses == ordinary.losses and trained.distance(ordinary) == 0


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"zero_dp_strategy": 0},
        {"zero_dp_strategy": 1},
        {"zero_dp_strategy": 2},
        {"fsdp_double_buffer": True},
        {"outer": "no_shard"},
        {"outer": "optim"},
    ],
    ids=lambda options: "-".join(map(str, *options.items())),
)
@on_ranks(4)
def test_strategies(options: dict[str, Any]) -> None:
    """Weights that stay gathered between uses are in bfloat16, and layers quantize them at each use."""
    kind = "LayerNormMLP"
    if outer := options.pop("outer", None):
        options = te_models.two_levels() | {"outer_dp_sharding_strategy": outer}
    te_models.compare(kind, ["current", "mxfp8"], micro=2, primary=True, **options)


@pytest.mark.long_unless("*-mxfp8")
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@on_ranks(2)
def test_checkpointed_blocks(recipe: str) -> None:
    """Layers are recomputed in backward, by Transformer Engine, which then gathers again."""
    for primary in ("", recipe):
        results = []
        for checkpointed in (False, True):
            model = te_models.build("LayerNormMLP", primary)
            for block in model.blocks if checkpointed else ():
                block.forward = functools.partial(te_models.te().checkpoint, block.inner, use_reentrant=False)
            results.append(te_models.train_sharded(te_models.shard(model), "LayerNormMLP", recipe))
        assert results[0].losses == results[1].losses and results[0].distance(results[1]) == 0


@pytest.mark.long_if("*-mxfp8")
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@on_ranks(2)
def test_initialization_on_meta(recipe: str) -> None:
    """Layers on the meta device draw the same values, and quantize none of them."""
    kind = "LayerNormMLP"
    alone = te_models.build(kind, device="meta")
    alone.to_empty(device=te_models.DEVICE)
    torch.manual_seed(3)
    for module in alone.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    expected = te_models.train_alone(alone, kind, recipe)
    meta = te_models.build(kind, recipe, device="meta")
    torch.manual_seed(3)
    model = te_models.shard(meta, init_model_with_meta_device=True)
    in_fp8 = any(bucket.plan.form in compat.transformer_engine.FORMS for bucket in model.sharded.buckets)
    assert in_fp8 == te_models.gathers_in_fp8()
    trained = te_models.train_sharded(model, kind, recipe)
    assert trained.losses == expected.losses and trained.distance(expected) == 0


@on_ranks(2)
def test_checkpoints() -> None:
    """A checkpoint has main weights only. A run without fp8 continues from one with, and the other way around."""
    kind, folder = "LayerNormMLP", shared_folder()
    models = {primary: te_models.shard(te_models.build(kind, primary)) for primary in ("current", "")}
    te_models.train_sharded(models["current"], kind, "current")
    state = models["current"].state_dict()
    other = models[""].state_dict()
    values = {name for name in state if not name.endswith("_extra_state")}
    assert state.keys() == other.keys() and all(state[name].dtype == torch.float32 for name in values)
    dcp.save({"model": state}, checkpoint_id=folder)
    loaded = {"model": {name: other[name] for name in values}}
    dcp.load(loaded, checkpoint_id=folder)
    models[""].load_state_dict(loaded["model"], strict=False)
    results = [te_models.train_sharded(model, kind, "current") for model in models.values()]
    assert results[0].losses == results[1].losses and results[0].distance(results[1]) == 0
    models["current"].load_state_dict(models[""].state_dict())
    again = [te_models.train_sharded(model, kind, "current") for model in models.values()]
    assert again[0].losses == again[1].losses


@pytest.mark.long
@on_ranks(4)
def test_a_checkpoint_of_four_ranks_loads_on_two() -> None:
    kind, folder = "Linear", shared_folder()
    model = te_models.shard(te_models.build(kind, "current"))
    te_models.train_sharded(model, kind, "current")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    expected = te_models.train_sharded(model, kind, "current")
    mesh = init_device_mesh(te_models.DEVICE, (2, 2), mesh_dim_names=("copy", "dp"))["dp"]
    other = te_models.shard(te_models.build(kind, "current"), device_mesh=mesh, dp_shard_dim="dp")
    loaded = {"model": other.state_dict()}
    dcp.load(loaded, checkpoint_id=folder)
    other.load_state_dict(loaded["model"])
    trained = te_models.train_sharded(other, kind, "current")
    assert trained.losses == expected.losses


class Regularized(torch.nn.Module):
    """Reads a weight outside of its layer."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return self.model(x, **options) + self.model.head.weight.sum()


@pytest.mark.long
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
@on_ranks(2)
def test_compiled(kind: str, recipe: str) -> None:
    """Graphs break at layers, and at code that reads a layer's weight. Equal to the eager path."""

    def build() -> Any:
        model = te_models.build(kind, recipe)
        return te_models.shard(Regularized(model) if kind == "Linear" else model)

    eager = te_models.train_sharded(build(), kind, recipe)
    model = build()
    call = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager"})
    compiled = te_models.train_sharded(model, kind, recipe, call=call)
    torch._dynamo.reset()
    assert compiled.losses == eager.losses and compiled.distance(eager) == 0


@on_ranks(1)
def test_scales_and_bytes() -> None:
    te_models.compare_quantizers()


@pytest.mark.skipif(not reference_tex.HAS_NVFP4, reason="needs a Transformer Engine with a reference of NVFP4")
@on_ranks(1)
def test_nvfp4_is_that_of_the_reference() -> None:
    te_models.compare_nvfp4()


@pytest.mark.long_if("*-mxfp8-*")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@on_ranks(2)
def test_two_forwards_before_their_backwards(fused: bool, recipe: str) -> None:
    kind, chosen, gradients = "LayerNormMLP", te_models.recipe(recipe), []
    for primary in ("", recipe):
        model = te_models.shard(te_models.build(kind, primary, fuse_wgrad_accumulation=fused))
        with te_models.te().autocast(enabled=True, recipe=chosen):
            losses = [model(te_models.batch(kind, seed)).float().square().mean() for seed in (0, 1)]
        for loss in reversed(losses):
            loss.backward()
        gradients.append([param.grad.full_tensor() for param in model.parameters()])
    assert all(torch.equal(mine, its) for mine, its in zip(*gradients, strict=True))


@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@on_ranks(2)
def test_other_ways_to_run(recipe: str) -> None:
    """Copies, evaluation, and parameters that stay gathered."""
    kind = "LayerNormMLP"
    model = te_models.shard(te_models.build(kind, recipe))
    duplicate = copy.deepcopy(model)
    results = [te_models.train_sharded(each, kind, recipe) for each in (model, duplicate)]
    assert results[0].losses == results[1].losses and results[0].distance(results[1]) == 0
    x, chosen = te_models.batch(kind, 0), te_models.recipe(recipe)
    with te_models.te().autocast(enabled=True, recipe=chosen):
        expected = model(x)
        for context in (torch.no_grad(), torch.inference_mode(), model.gathered()):
            with context:
                assert torch.equal(model(x), expected)
    with model.gathered():
        kept = te_models.train_sharded(model, kind, recipe)
    again = te_models.train_sharded(duplicate, kind, recipe)
    assert kept.losses == again.losses and kept.distance(again) == 0


@on_ranks(2)
def test_what_is_refused() -> None:
    te = te_models.te()
    fp8 = te_models.recipe("current")

    def refused(error: type[Exception], says: str, model: torch.nn.Module) -> None:
        before = list(model.parameters())
        with pytest.raises(error, match=says):
            te_models.shard(model)
        assert all(a is b for a, b in zip(before, model.parameters(), strict=True))

    cleared = te_models.build("Linear", "current")
    cleared.head.weight.clear_high_precision_init_val()
    refused(ValueError, "'head.weight' is a Float8Tensor .* without its value in high precision", cleared)
    for recipe in (*RECIPES, "delayed"):
        changed = te_models.build("Linear", recipe)
        with torch.no_grad():
            changed.head.weight.quantize_(-changed.head.weight.get_high_precision_init_val())
        refused(ValueError, "'head.weight', .*, has been changed since its value", changed)
    with te.quantized_model_init(enabled=True, recipe=fp8):
        operation = torch.nn.Sequential(te.ops.Linear(64, 64, bias=False, device=te_models.DEVICE))
    refused(NotImplementedError, "implemented for layers, not for operations", operation)
    model = te_models.shard(te_models.build("Linear", "current"))
    assert not any(
        map(te_models.is_quantized, (*model.parameters(), *(s for b in model.sharded.buckets for s in b.shells)))
    )


@pytest.mark.long
@on_ranks(4)
def test_tensor_parallel_and_expert_parallel() -> None:
    """A rank's part of a matrix has a scale of its own, as in layers that quantize at each use."""
    mesh = init_device_mesh(te_models.DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))
    experts = init_device_mesh(te_models.DEVICE, (2, 2), mesh_dim_names=("dp", "ep"))
    tensor_parallel = {"tp_group": mesh["tp"].get_group(), "tp_size": 2, "set_parallel_mode": True}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("LayerNormMLP", tensor_parallel, {"device_mesh": mesh["dp", "tp"], "tp_dim": "tp", "dp_shard_dim": "dp"}),
        ("GroupedLinear", {}, {"expt_device_mesh": experts, "dp_shard_dim": "dp"}),
    ]
    for (kind, built, options), recipe in itertools.product(cases, ("current", "mxfp8")):
        results = []
        for primary in ("", recipe):
            model = te_models.shard(te_models.build(kind, primary, **built), **options)
            results.append(te_models.train_sharded(model, kind, recipe))
        forms = {bucket.plan.form for bucket in model.sharded.buckets if bucket.plan.name.startswith("blocks")}
        assert forms & compat.transformer_engine.FORMS.keys()
        assert results[0].losses == results[1].losses and results[0].distance(results[1]) == 0, kind


@pytest.mark.long_unless("*-Linear")
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks(2)
def test_param_dtype(kind: str, recipe: str) -> None:
    """Layers that are built in float32 compute in ``param_dtype`` with weights that were quantized from it."""

    @torch.no_grad()
    def values(weight: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())) / 8
        return weight.copy_(drawn.bfloat16())

    found = []
    for dtype, policy in ((torch.bfloat16, {}), (torch.float32, {"param_dtype": torch.bfloat16})):
        options = {"primary": recipe, "init_method": values, "params_dtype": dtype}
        if kind == "LayerNormMLP":
            options["output_layer_init_method"] = values
        model = te_models.build(kind, **options)
        sharded = te_models.shard(model, mixed_precision_policy=MixedPrecisionPolicy(**policy))
        found.append(te_models.train_sharded(sharded, kind, recipe))
    assert found[0].losses == found[1].losses and found[0].distance(found[1]) == 0
