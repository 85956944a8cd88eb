"""Models of Transformer Engine's layers, sharded and in one process: on a CPU with the reference, or on GPUs."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import reference_tex
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mfsdp_compile import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.formats import quantize

WIDTH, ROWS = 64, 32
DEVICE = "cuda" if reference_tex.HAS_EXTENSION else "cpu"
BLOCKS = ("blockwise", "nvfp4") if reference_tex.HAS_NVFP4 else ("blockwise",)
BITWISE = ("bf16", "current", "mxfp8", *BLOCKS)
"""Recipes whose results depend on nothing but the values at hand."""


def two_levels() -> dict[str, Any]:
    """Return the arguments of ``fully_shard_model`` for two groups of two ranks."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("outer", "dp"))
    names = {"dp_shard_dim": "dp", "dp_outer_dim": "outer"}
    return {"device_mesh": mesh, "hybrid_fsdp_group": dist.group.WORLD, **names}


def te() -> Any:
    if reference_tex.HAS_EXTENSION:
        import transformer_engine.pytorch as real

        return real
    return reference_tex.install()


def recipe(name: str) -> Any:
    """Return a recipe by its name, which ``", <backward_override>"`` may follow."""
    te()
    from transformer_engine.common import recipe as recipes

    if name == "bf16":
        return None
    name, _, override = name.partition(", ")
    options: dict[str, Any] = {"backward_override": override} if override else {}
    kinds = {"current": "Float8CurrentScaling", "delayed": "DelayedScaling", "mxfp8": "MXFP8BlockScaling"}
    kinds |= {"blockwise": "Float8BlockScaling", "nvfp4": "NVFP4BlockScaling"}
    if name == "nvfp4":
        options["disable_stochastic_rounding"] = True  # gradients would be rounded by random numbers
    return getattr(recipes, kinds[name])(**options)


def has_is_fsdp2() -> bool:
    """Whether layers can quantize their weights again in backward: since 2.15."""
    return hasattr(te().Linear, "is_fsdp2")


def gathers_in_fp8() -> bool:
    """Whether quantized tensors say what is inside, without which weights in fp8 are gathered in bfloat16."""
    te()
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    return hasattr(Float8Tensor, "__tensor_flatten__")


def layer(kind: str, number: int = 0, width: int = WIDTH, **options: Any) -> nn.Module:
    options = {"params_dtype": torch.bfloat16, "device": DEVICE, **options}
    if kind == "Linear":
        return te().Linear(width, width, **options)
    if kind == "LayerNormLinear":
        return te().LayerNormLinear(width, width, **options)
    if kind == "LayerNormMLP":
        return te().LayerNormMLP(width, 2 * width, normalization="RMSNorm", activation="swiglu", bias=False, **options)
    if kind == "RMSNorm":
        return Normed(width, **options)
    if kind == "GroupedLinear":
        return Grouped(width, **options)
    assert kind == "TransformerLayer"
    attention = {"self_attn_mask_type": "causal", "attn_input_format": "sbhd", "fuse_qkv_params": True}
    dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return te().TransformerLayer(width, 2 * width, 4, layer_number=number + 1, **attention, **dropout, **options)


class Normed(nn.Module):
    """A norm, which is an operation, in the same bucket as a Linear."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__()
        self.norm = te().RMSNorm(width, dtype=options["params_dtype"], device=options["device"])
        self.linear = te().Linear(width, width, **options)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return self.linear(self.norm(x), **options)


class Grouped(nn.Module):
    """A GroupedLinear of two experts, each of which gets half of the rows."""

    def __init__(self, width: int, **options: Any) -> None:
        super().__init__()
        self.experts = te().GroupedLinear(2, width, width, **options)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return self.experts(x, [x.shape[0] // 2] * 2, **options)


class Block(nn.Module):
    """A unit: one layer. ``uses`` is how often it runs in a forward."""

    def __init__(self, inner: nn.Module, uses: int) -> None:
        super().__init__()
        self.inner, self.uses = inner, uses

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        for _ in range(self.uses):
            x = self.inner(x, **options)
        return x


class Model(nn.Module):
    """Two blocks, and a norm and a Linear outside of them."""

    def __init__(self, kind: str, uses: int = 1, width: int = WIDTH, device: str = "", **options: Any) -> None:
        super().__init__()
        options["device"] = device or DEVICE
        blocks = (Block(layer(kind, number, width, **options), uses) for number in range(2))
        self.blocks = nn.ModuleList(blocks)
        self.norm = te().RMSNorm(width, dtype=torch.bfloat16, device=options["device"])
        self.head = te().Linear(width, width, params_dtype=torch.bfloat16, device=options["device"])

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        for block in self.blocks:
            x = block(x, **options)
        return self.head(self.norm(x))


def build(kind: str, primary: str = "", **options: Any) -> Model:
    """Build a model.

    Args:
        primary: Recipe of the weights of layers that are quantized when the model is built. "": none are.
    """
    te()
    for module in ("quantization", "fp8"):  # since 2.9, and before
        with contextlib.suppress(ModuleNotFoundError):
            state = importlib.import_module(f"transformer_engine.pytorch.{module}").FP8GlobalStateManager
            break
    state.reset()  # delayed scaling keeps the state of all layers of the process
    torch.manual_seed(0)
    if not primary:
        return Model(kind, **options)
    with te().quantized_model_init(enabled=True, recipe=recipe(primary), preserve_high_precision_init_val=True):
        return Model(kind, **options)


def is_quantized(param: Tensor) -> bool:
    return hasattr(param, "get_high_precision_init_val")


def batch(kind: str, seed: int, width: int = WIDTH) -> Tensor:
    shape = (ROWS // 2, 2, width) if kind == "TransformerLayer" else (2 * ROWS, width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def shard(model: nn.Module, **options: Any) -> MegatronFSDP:
    return fully_shard_model(model, fsdp_unit_modules=[Block], **options)


@dataclass
class Trained:
    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    """Of each step: whole gradients in float32, by name."""

    def distance(self, other: Trained) -> float:
        """Return the largest difference of losses, and of gradients by their norm, relative to their own size."""
        losses = zip(self.losses, other.losses, strict=True)
        apart = [abs(mine - its) / abs(its) for mine, its in losses]
        for mine, its in zip(self.gradients, other.gradients, strict=True):
            assert mine.keys() == its.keys()
            apart += [float((mine[n] - its[n]).norm() / its[n].norm().clamp(min=1e-12)) for n in its]
        return max(apart)


Call = Callable[..., Tensor]


def train(
    call: Call,
    kind: str,
    recipe_name: str,
    step: Callable[[], dict[str, Tensor]],
    micro: int,
    first: bool,
    width: int = WIDTH,
) -> Trained:
    chosen, trained = recipe(recipe_name), Trained()
    for number in range(3):
        for part in range(micro):
            marks = {"is_first_microbatch": part == 0} if first else {}
            with te().autocast(enabled=chosen is not None, recipe=chosen):
                out = call(batch(kind, 10 * number + part, width), **marks)
            loss = (out.float() - 1).square().mean() / micro
            loss.backward()
            trained.losses.append(loss.item())
        trained.gradients.append(step())
    return trained


def train_alone(
    model: nn.Module, kind: str, recipe_name: str, micro: int = 1, first: bool = False, fused: torch.dtype | None = None
) -> Trained:
    """Train in one process, with float32 main weights.

    Args:
        fused: Dtype of the ``main_grad`` that layers add gradients to themselves; None: they do not.
    """
    mains = {
        name: (param.get_high_precision_init_val().to(DEVICE) if is_quantized(param) else param.detach()).float()
        for name, param in model.named_parameters()
        if param.requires_grad
    }
    sums = {name: torch.zeros_like(main) for name, main in mains.items()}
    optimizer = torch.optim.AdamW(mains.values(), lr=1e-2)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if fused is not None:
        for param in params.values():
            param.main_grad = torch.zeros_like(param, dtype=fused)

    def collect() -> None:
        for name, param in params.items():
            if fused is not None:
                sums[name] += param.main_grad.float()
                param.main_grad.zero_()
            if param.grad is not None:
                sums[name] += param.grad.float()
                param.grad = None

    def call(*args: Any, **kwargs: Any) -> Tensor:
        collect()  # what the microbatch before has left
        return model(*args, **kwargs)

    def step() -> dict[str, Tensor]:
        collect()
        gradients = {name: total.clone() for name, total in sums.items()}
        for name, main in mains.items():
            main.grad = sums[name]
        optimizer.step()
        with torch.no_grad():
            for name, param in params.items():
                if is_quantized(param):
                    param.quantize_(mains[name].to(param.dtype))
                else:
                    param.copy_(mains[name])
        for total in sums.values():
            total.zero_()
        return gradients

    return train(call, kind, recipe_name, step, micro, first)


def train_sharded(
    model: MegatronFSDP,
    kind: str,
    recipe_name: str,
    micro: int = 1,
    first: bool = False,
    call: Call | None = None,
    width: int = WIDTH,
) -> Trained:
    trainable = [param for param in model.parameters() if param.requires_grad]
    optimizer = fully_shard_optimizer(torch.optim.AdamW(trainable, lr=1e-2))

    def step() -> dict[str, Tensor]:
        model.finish_grad_sync()
        named = model.module.named_parameters()
        gradients = {n: p.grad.full_tensor().clone() for n, p in named if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        return gradients

    return train(model if call is None else call, kind, recipe_name, step, micro, first, width)


def compare(
    kind: str,
    recipes: Sequence[str],
    micro: int = 1,
    first: bool = False,
    primary: bool = False,
    spread: bool = False,
    **options: Any,
) -> None:
    """Train sharded and alone, on equal data, and compare bit by bit.

    Args:
        primary: Whether the weights of layers are quantized when the model is built.
        spread: Whether rows of weights differ by orders of magnitude. With powers of 2 as scales, what is quantized
            hardly depends on what shares a scale otherwise.
    """
    for name in recipes:
        how: dict[str, Any] = {"primary": name} if primary else {}
        if spread:
            how["init_method"] = spread_rows
        alone = train_alone(build(kind, **how), kind, name, micro, first)
        sharded = train_sharded(shard(build(kind, **how), **options), kind, name, micro, first)
        assert sharded.losses == alone.losses, name
        assert sharded.distance(alone) == 0, name


def spread_rows(weight: Tensor) -> Tensor:
    """Initialize a weight with rows between 1e-6 and 1."""
    with torch.no_grad():
        return weight.normal_().mul_(torch.logspace(-6, 0, len(weight), device=weight.device).unsqueeze(1))


def compare_quantizers() -> None:
    """Compare scales and bytes of weights with those of Transformer Engine's quantizers, bit by bit."""
    te()
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
    from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

    values, layers = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)), compat.transformer_engine
    for magnitude in (1.0, 0.02, 0.0, 1e-38, 1e38, float("inf")):
        for powers_of_2 in (False, True):
            weight = (values * magnitude).bfloat16().to(DEVICE)
            dtype = reference_tex.e4m3()
            quantizer = Float8CurrentScalingQuantizer(dtype, torch.device(DEVICE), force_pow_2_scales=powers_of_2)
            expected = quantizer(weight)
            scale = (layers.scales_of_powers_of_2 if powers_of_2 else layers.scales_of)(weight.abs().amax().float())
            assert torch.equal(expected._scale_inv, scale.reciprocal().reshape(1)), (magnitude, powers_of_2)
            assert torch.equal(expected._data, quantize.quantize_by_factors(weight, scale)), (magnitude, powers_of_2)
        weight = (values * magnitude).bfloat16().to(DEVICE)
        expected = MXFP8Quantizer(reference_tex.e4m3(), rowwise=True, columnwise=False)(weight)
        plane = quantize.from_records(quantize.quantize_mx(weight.flatten()))
        assert torch.equal(expected._rowwise_data.flatten(), plane[: weight.numel()]), magnitude
        scales = expected._rowwise_scale_inv[: len(weight), : weight.shape[1] // 32]
        assert torch.equal(scales.flatten(), plane[weight.numel() :]), magnitude


def compare_nvfp4() -> None:
    """Compare scales and bytes of ``param_comm_scaling="nvfp4"`` with those of Transformer Engine's own reference.

    It multiplies by reciprocal scales. That rounds three times, where a division rounds once, so that values may go to
    the other side if they are that close to the middle between two.
    """
    te()
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    reference: Any = importlib.import_module("transformer_engine.pytorch.custom_recipes.reference_nvfp4")
    values = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    for spread in (0, 3, 8):
        weight = (values * torch.logspace(-spread, 1, 64).unsqueeze(-1)).bfloat16()
        weight[3], weight[4, :16] = 0, 1e-9
        data, scales = reference.NVFP4QuantizerRef._quantize_blockwise_reference(
            weight, weight.abs().max().float(), 16, 1, pow_2_scales=False, eps=0.0
        )
        of_matrix = quantize.matrix_scales_of(quantize.amax(weight, "nvfp4"))
        records = quantize.quantize_nvfp4(weight.flatten(), [(0, weight.shape, of_matrix)]).view(64, 6, 9)
        assert torch.equal(records[..., 8], scales.view(torch.uint8)), spread
        exact = weight.double().view(64, 6, 8, 2) / (scales.double() * of_matrix.double()).view(64, 6, 1, 1)
        distances = (exact.abs().unsqueeze(-1) / middles - 1).abs()
        close = (distances < 4 * 2.0**-24).any(-1).any(-1)
        assert torch.equal(records[..., :8][~close], data.view(64, 6, 8)[~close]), spread
        assert close.float().mean() < 0.01


def check_that_no_weight_stays(model: MegatronFSDP, kind: str, width: int, recipe_name: str) -> None:
    """Train with weights that are larger than any activation. None may be alive between forward and backward."""
    chosen = recipe(recipe_name)
    for first in (True, False):  # the second forward could use what the first has left
        with Storages() as storages, te().autocast(enabled=chosen is not None, recipe=chosen):
            # MXFP8 takes multiples of 32 rows for each expert.
            rows = 2 * ROWS if kind == "GroupedLinear" else ROWS
            loss = model(batch(kind, 0, width)[:rows], is_first_microbatch=first).float().sum()
        gathered = [state.full for state in model.sharded.eager.gathering.gathered.values() if state.full is not None]
        buckets = model.sharded.buckets
        at_rest = [each for b in buckets for each in (b.flat, b.made, b.made_columns)]
        stay = {key_of(each) for each in [*gathered, *at_rest] if each is not None}
        for _ in range(100):
            kept = {key: size for key, size in storages.alive() if key not in stay}
            weights = sum(size for size in kept.values() if size >= width * width)
            if not weights:
                break
            time.sleep(0.05)  # gloo's thread may still hold what it has sent
        assert weights <= 0.01 * sum(kept.values()), (recipe_name, weights, sorted(kept.values()))
        loss.backward()


def key_of(tensor: Tensor) -> int:
    return StorageWeakRef(tensor.untyped_storage()).cdata


class Storages(TorchDispatchMode):
    """The storages of everything that is computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self._all: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in compat.tree_leaves(out):
            if type(each) is Tensor and not each.is_meta:
                reference = StorageWeakRef(each.untyped_storage())
                self._all[reference.cdata] = reference, each.untyped_storage().nbytes()
        return out

    def alive(self) -> Iterator[tuple[int, int]]:
        """Return the keys and sizes, in bytes, of those that something still refers to."""
        return ((key, size) for key, (reference, size) in self._all.items() if not reference.expired())
