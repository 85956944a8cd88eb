"""What a layer of Llama-3-8B costs on a GPU, by its generated code: as it is, sharded by this package, and by FSDP2.

    python traffic.py sm_90 FOLDER > facts

Costs of a layer are those of five layers less those of three, halved, forward and backward. FSDP2 compiles each block:
its code for one block is generated in the same way, and what its hooks copy is recorded on eight simulated ranks of the
CPU, where they copy the same bytes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import fake_gpu

fake_gpu.start(sys.argv[1], Path(sys.argv[2]))

import torch
from code_facts import GATHERS, PRODUCTS, REDUCTIONS
from cuda_rows import RANKS, Setting, Sizes, models
from generating import fake_ranks, on_fake_device, shard
from recording import Event, Recording, recordings_of
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from mfsdp_compile.backend.compile import mfsdp
from mfsdp_compile.models.llama import _rotation

SIZES = Sizes(4096, 4096, 32, 8, 14336, batch=1, length=8192)
"""Sizes of Llama-3-8B. The vocabulary is small: it does not affect a layer."""
_PRODUCTS = PRODUCTS | {"_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward"}
_COLLECTIVES = GATHERS | REDUCTIONS | {"wait_tensor"}


@dataclass(frozen=True)
class Cost:
    """Cost of a forward and backward.

    Args:
        products: Matrix products and attention.
        launches: Launches of Triton kernels, and of operators that copy.
        bytes: Bytes that these read and write.
    """

    products: float
    launches: float
    bytes: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.products + other.products, self.launches + other.launches, self.bytes + other.bytes)

    def __sub__(self, other: Cost) -> Cost:
        return self + other.times(-1)

    def times(self, factor: float) -> Cost:
        return Cost(factor * self.products, factor * self.launches, factor * self.bytes)


def cost(recordings: Sequence[Recording]) -> Cost:
    events = [event for recording in recordings for event in recording.events]
    products = sum(event.operator in _PRODUCTS for event in events)
    others = [event for event in events if event.operator not in _PRODUCTS | _COLLECTIVES]
    return Cost(products, len(others), sum(map(_bytes, others)))


def _bytes(event: Event) -> int:
    return event.bytes or sum(span.stop - span.start for span in (*event.reads, *event.writes))


def of_layers(layers: int, options: dict[str, Any] | None, precision: str) -> Cost:
    """Return the cost of a model; ``options`` are those of the backend, None: it is not sharded."""
    setting = Setting(precision=precision, options=options or {})
    with on_fake_device("Llama", replace(SIZES, layers=layers), setting.dtype) as (model, units, inputs):
        if options is None:
            return cost(recordings_of(model, inputs, compile_fx, True))
        with fake_ranks(RANKS):
            model = shard(model, units, setting, "cuda")
            return cost(recordings_of(model, inputs, lambda *graph: mfsdp(*graph, options=options), True))


def layer(options: dict[str, Any] | None, precision: str = "mixed") -> Cost:
    return (of_layers(5, options, precision) - of_layers(3, options, precision)).times(0.5)


class _Copies(TorchDispatchMode):
    """Counts what the hooks of FSDP2 launch, and the bytes that it moves."""

    def __init__(self) -> None:
        super().__init__()
        self.cost = Cost(0, 0, 0)
        self.by_operator: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        namespace, name, *_ = str(func).split(".")
        if name == "all_gather_copy_in":
            moved = 2 * _size(args[0])
        elif namespace == "fsdp":  # split_with_sizes_copy, chunk_cat
            moved = _size(args[0]) + _size(kwargs["out"])
        elif name in ("copy_", "_foreach_copy_"):
            moved = _size(args[0]) + _size(args[1])
        elif name in ("_to_copy", "clone", "cat"):
            moved = _size(args) + _size(result)
        elif name in ("div_", "mul_"):
            moved = 2 * _size(args[0])
        else:
            return result
        self.cost += Cost(0, 1, moved)
        self.by_operator[f"{namespace}.{name}"] = self.by_operator.get(f"{namespace}.{name}", 0) + moved
        return result


def _size(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


class _Nothing(torch.autograd.Function):
    """Uses parameters and computes nothing, so that all that is recorded comes from hooks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.shapes = [parameter.shape for parameter in parameters]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient, *(torch.empty(shape, dtype=gradient.dtype) for shape in ctx.shapes)


class _Idle(nn.Module):
    """Has the parameters of another module."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.of_other = nn.ParameterList(nn.Parameter(torch.empty(p.shape)) for p in other.parameters())

    def forward(self, x: Tensor) -> Tensor:
        return _Nothing.apply(x, *self.of_other)


def copies_of_fsdp2(block: nn.Module) -> tuple[Cost, dict[str, int]]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with fake_ranks(RANKS):
        mesh = init_device_mesh("cpu", (RANKS,))
        inner = fully_shard(_Idle(block), mesh=mesh, mp_policy=policy)
        model = fully_shard(
            nn.Sequential(inner), mesh=mesh, mp_policy=policy
        )  # the last unit of a model is not resharded
        x = torch.zeros(1, dtype=torch.bfloat16, requires_grad=True)
        with _Copies() as copies:
            model(x).sum().backward()
    return copies.cost, copies.by_operator


def main() -> None:
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    make, _, _ = models(replace(SIZES, layers=1))["Llama"]
    with FakeTensorMode(), torch.device("cuda:0"):
        torch.set_default_dtype(torch.bfloat16)
        block = make().layers[0]
        x = torch.empty(SIZES.batch, SIZES.length, SIZES.width, requires_grad=True)
        rotation = _rotation(torch.arange(SIZES.length), SIZES.width // SIZES.heads, 1e4)
        torch.set_default_dtype(torch.float32)
        with FlopCounterMode(display=False) as flops:
            block(x, rotation).sum().backward()
        of_block = cost(recordings_of(block, [x, rotation], compile_fx, True))
    copies, by_operator = copies_of_fsdp2(make().layers[0])
    ways = {
        "regions auto": ("auto", "mixed"),
        "regions False": (False, "mixed"),
        "gradients in int8": ("auto", "gradients in int8"),
    }
    models_of_3 = {
        f"{inner}, {name}": asdict(of_layers(3, {"inner": inner, "regions": regions}, precision))
        for inner in ("inductor_whole", "inductor")
        for name, (regions, precision) in ways.items()
    }
    costs = {
        "not sharded": layer(None),
        "mfsdp compiled": layer({}),
        "mfsdp compiled, `regions` False": layer({"regions": False}),
        "FSDP2 compiled by block": of_block + copies,
        "FSDP2's hooks alone": copies,
    }
    facts = {
        "costs": {name: asdict(each) for name, each in costs.items()},
        "models": models_of_3,
        "hooks": by_operator,
        "flops": flops.get_total_flops(),
        "reductions": {
            name: asdict(layer({"regions": False}, name))
            for name in ("mixed", "sums in float32", "gradients in int8", "gradients in int4, stochastic")
        },
        "parameters": sum(p.numel() for p in block.parameters()),
    }
    print(json.dumps(facts), file=results, flush=True)


if __name__ == "__main__":
    main()
