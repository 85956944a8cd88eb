"""Parameters whose class gathers itself, by FSDP2's protocol: equal to FSDP2, or refused by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchao_models
from parity import AOT_EAGER, EAGER
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as fsdp2

from mfsdp_compile import fsdp2 as interface
from mfsdp_compile import fully_shard_model, fully_shard_optimizer
from mfsdp_compile.diagnostics.doctor import mesh_arguments

needs_torchao = pytest.mark.skipif(not torchao_models.IS_THERE, reason="needs torchao")


class Wrapping(Tensor):
    """A tensor around an ordinary one, which operators see in its place."""

    @staticmethod
    def __new__(cls, data: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, data.shape, data.stride(), dtype=data.dtype, device=data.device)

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, *_: Any) -> Any:
        return cls(inner["_data"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrapped(value: Any) -> Any:
            return value._data if isinstance(value, cls) else value

        out = func(*map(unwrapped, args), **{key: unwrapped(value) for key, value in (kwargs or {}).items()})
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return tuple(map(cls, out)) if isinstance(out, (tuple, list)) else cls(out)


class InBFloat16(Wrapping):
    """Gathers in bfloat16 and hands ordinary tensors to modules, like a class in torch's own tests."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        assert mesh.ndim == 1
        assert outer_stride == (outer_size[1], 1)
        assert isinstance(module, nn.Linear)
        most = math.ceil(outer_size[0] / mesh.size())
        padded = torch.empty(most, *outer_size[1:], dtype=torch.bfloat16)
        padded[: self._data.shape[0]].copy_(self._data)
        return (padded,), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        (tensor,) = outputs
        assert tensor.dtype == torch.bfloat16
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(tensor[: len(out)])
            return None
        upcast = tensor.to(param_dtype)
        return upcast, (tensor, upcast)


class InTwoHalves(Wrapping):
    """Gathers two tensors of different dtypes, and hands a tensor of its own class to modules; the older signature."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        high = self._data.to(torch.bfloat16)
        return (high, self._data - high), 3

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        high, low = outputs
        assert metadata == 3
        whole = high.float() + low
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out._data):
                out._data.copy_(whole)
            return None
        return type(self)(whole), (high, low, whole)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return Linear.apply(*args)
        return super().__torch_function__(func, types, args, kwargs or {})


class Linear(torch.autograd.Function):
    """A layer whose weight is wrapped, and whose gradient is ordinary."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Tensor) -> Tensor:
        weight = weight._data
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x, gradient.sum(0)


def wrap(model: nn.Module, kind: Callable[[Tensor], Tensor]) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind(module.weight.detach()))
    return model


def mlp(rows: int = 8) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, rows), nn.Tanh(), nn.Linear(rows, 8)) for _ in range(2)]
    return nn.Sequential(*blocks)


def train(call: Any, optimizer: Any, steps: int = 4) -> list[float]:
    torch.manual_seed(7 + dist.get_rank())
    losses = []
    for _ in range(steps):
        loss = call(torch.randn(5, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def of_fsdp2(model: nn.Module, **arguments: Any) -> list[float]:
    for block in model:  # type: ignore[attr-defined]
        fsdp2(block, **arguments)
    fsdp2(model, **arguments)
    return train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def mine(model: nn.Module, mode: str = EAGER, **arguments: Any) -> tuple[list[float], nn.Module]:
    units = [nn.Sequential]
    sharded = fully_shard_model(model, fsdp_unit_modules=units, disable_bucketing=True, **arguments)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(sharded.parameters(), lr=1e-2))
    call = (
        sharded if mode == EAGER else torch.compile(sharded, backend="mfsdp", options={"inner": mode, "verify": "each"})
    )
    return train(call, optimizer), sharded


@pytest.mark.long_if("7-*")
@on_ranks(2, timeout=60)
@pytest.mark.parametrize("kind", [InBFloat16, InTwoHalves])
@pytest.mark.parametrize("rows", [8, 7])
def test_losses_are_those_of_fsdp2(kind: Any, rows: int) -> None:
    if (
        rows == 8 or kind is InBFloat16
    ):  # FSDP2 takes uneven rows only from the newer method, and without a padded result
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        expected = of_fsdp2(wrap(mlp(rows), kind), mesh=mesh, reshard_after_forward=rows == 8)
    else:
        expected = mine(mlp(rows))[0]
    for mode in (EAGER, AOT_EAGER):
        assert mine(wrap(mlp(rows), kind), mode)[0] == expected, mode


@needs_torchao
@on_ranks(2, timeout=90)
@pytest.mark.parametrize("config", ["Int8MixedPrecisionTrainingConfig", "bitnet_training"])
def test_losses_of_torchao(config: str) -> None:
    """torchao's weights for products in int8, and those of BitNet, which are gathered with 2 bits."""
    torchao_models.torchao()
    from torchao.prototype import quantized_training
    from torchao.quantization import quantize_

    def quantized() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(2)])
        quantize_(model, getattr(quantized_training, config)())
        return model

    def run(model: Any, call: Any) -> list[float]:
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        torch.manual_seed(7 + dist.get_rank())
        for _ in range(3):
            loss = call(torch.randn(32, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    reference, mesh = quantized(), init_device_mesh("cpu", (2,))
    policy = TorchPolicy(param_dtype=torch.float32)  # these classes ask for it
    for block in reference:  # type: ignore[attr-defined]
        fsdp2(block, mesh=mesh, mp_policy=policy)
    expected = run(fsdp2(reference, mesh=mesh, mp_policy=policy), reference)
    for mode in (EAGER, AOT_EAGER):
        model = fully_shard_model(quantized(), fsdp_unit_modules=[nn.Sequential], disable_bucketing=True)
        call = model if mode == EAGER else torch.compile(model, backend="mfsdp", options={"inner": mode})
        assert run(model, call) == expected, mode


@pytest.mark.long
@on_ranks(4, timeout=60)
def test_hsdp_and_portions() -> None:
    expected = mine(mlp(), **mesh_arguments("HSDP optim_grads_params"))[0]
    assert mine(wrap(mlp(), InTwoHalves), **mesh_arguments("HSDP optim_grads_params"))[0] == expected
    assert mine(wrap(mlp(), InTwoHalves), reshard_after_forward=2)[0] == mine(mlp(), reshard_after_forward=2)[0]


@on_ranks(2, timeout=60)
def test_copies_and_state_dicts() -> None:
    _, model = mine(wrap(mlp(), InTwoHalves))
    _, plain = mine(mlp())
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        next(iter(model.parameters())).zero_()
        assert torch.equal(twin(x), plain(x))
        assert not torch.equal(model(x), plain(x))
    for (name, mine_value), (its_name, its) in zip(twin.state_dict().items(), plain.state_dict().items(), strict=True):
        assert (name, type(mine_value.to_local())) == (its_name, Tensor)
        assert torch.equal(mine_value.full_tensor(), its.full_tensor())


@on_ranks(2, timeout=60)
def test_parameters_of_earlier_forwards_are_outdated() -> None:
    kept = []

    class Keeping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            kept.append(self.weight)
            return super().forward(x)

    model = wrap(nn.Sequential(Keeping(6, 6)), InTwoHalves)
    model = fully_shard_model(model, fsdp_unit_modules=[Keeping])
    assert isinstance(model(torch.ones(2, 6)), Tensor)
    assert isinstance(kept[0], (InTwoHalves, nn.Parameter))
    model(torch.ones(2, 6))
    with pytest.raises(RuntimeError, match=r"'0.weight' was gathered for an earlier forward"):
        kept[0].sum()


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "HFSDP"])
def test_other_strategies_are_refused(strategy: str) -> None:
    model = wrap(mlp(), InBFloat16)
    with pytest.raises(NotImplementedError, match=r"'0.0.weight' gathers itself \(fsdp_pre_all_gather\) at each use"):
        fully_shard_model(model, **mesh_arguments(strategy))


@pytest.mark.usefixtures("fake_world")
def test_what_cannot_be_right_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"needs rows on each rank"):
        fully_shard_model(wrap(nn.Linear(4, 1), InBFloat16))
    model = fully_shard_model(wrap(nn.Sequential(nn.Linear(6, 8)), InBFloat16))
    with pytest.raises(ValueError, match=r"keep_gathered=True is not supported for '0.weight'"):
        model.set_accumulation(keep_gathered=True)


@needs_torchao
@pytest.mark.usefixtures("fake_world")
def test_ignored_weights_of_four_bits_stay_whole() -> None:
    torchao_models.torchao()
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Parameter(to_nf4(torch.randn(64, 512)), requires_grad=False)
            self.down, self.up = nn.Linear(512, 4), nn.Linear(4, 64)

        def forward(self, x: Tensor) -> Tensor:
            return linear_nf4(x, self.base) + self.up(self.down(x))

    model = Adapted()
    sharded = fully_shard_model(model, ignored_params=[model.base])
    sharded(torch.ones(2, 512)).sum().backward()
    assert type(model.down.weight.grad).__name__ == "RowShardedTensor"


class OfTwo(InBFloat16):
    """Wraps two tensors."""

    def __init__(self, data: Tensor) -> None:
        super().__init__(data)
        self._other = data

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data", "_other"], None


@pytest.mark.usefixtures("fake_world")
def test_fsdp2s_interface_refuses_a_tensor_of_two() -> None:
    """It compares values, without the class's operators, before it looks at classes."""
    model = interface.fully_shard(wrap(nn.Linear(6, 8), OfTwo))
    with pytest.raises(NotImplementedError, match=r"'weight' is a OfTwo .* must wrap one ordinary tensor"):
        list(model.parameters())


class Reading(nn.Module):
    """Reads the weight of its child."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.child(x) @ self.child.weight


@on_ranks(2, timeout=90)
def test_compiled_code_that_reads_them_elsewhere() -> None:
    """It is not in the graph: the forward that reads it runs eagerly. In one graph, it is refused."""
    torch.manual_seed(0)
    model = fully_shard_model(wrap(Reading(), InBFloat16))
    x = torch.randn(2, 8)
    expected = model(x)
    options = {"inner": AOT_EAGER}
    with pytest.raises(RuntimeError, match=r"torch\.compiler\.disable"):  # first: what is skipped, is skipped for good
        torch.compile(model, backend="mfsdp", fullgraph=True, options=options)(x)
    model.reset()
    assert torch.equal(torch.compile(model, backend="mfsdp", options=options)(x), expected)


@on_ranks(2)
def test_what_the_methods_get() -> None:
    """FSDP2's policy as it was passed, the dtype of shards, and the dtype to compute in."""

    def calls(api: Any, policy: TorchPolicy, dtype: torch.dtype) -> list[Any]:
        seen: list[Any] = []

        class Noting(InBFloat16):
            def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, mp_policy: Any) -> Any:
                seen.append((self._data.dtype, mp_policy))
                return (self._data.to(torch.bfloat16),), None

            def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
                seen.append(param_dtype)
                return super().fsdp_post_all_gather(outputs, metadata, param_dtype, out=out)

        torch.manual_seed(0)
        model = api(wrap(nn.Sequential(nn.Linear(8, 8)).to(dtype), Noting), mp_policy=policy)
        loss = model(torch.ones(2, 8, dtype=dtype)).sum()
        loss.backward()
        return [loss.item(), *seen]

    bfloat16, float32 = torch.bfloat16, torch.float32
    for policy in (
        TorchPolicy(),
        TorchPolicy(param_dtype=bfloat16),
        TorchPolicy(param_dtype=bfloat16, reduce_dtype=float32),
        TorchPolicy(output_dtype=float32, cast_forward_inputs=False),
    ):
        assert calls(interface.fully_shard, policy, float32) == calls(fsdp2, policy, float32), policy
    assert calls(interface.fully_shard, TorchPolicy(), bfloat16) == calls(fsdp2, TorchPolicy(), bfloat16)


@on_ranks(2)
def test_methods_set_on_local_tensors_are_refused() -> None:
    """FSDP2 calls them. Here a forward, eager or compiled, raises before it gathers anything."""
    model = interface.fully_shard(mlp())
    model(torch.ones(2, 8)).sum().backward()
    local = model[0][0].weight._local_tensor
    local.fsdp_pre_all_gather = lambda *args: None
    message = r"fsdp_pre_all_gather was set on the local tensor of parameter '0.0.weight'"
    with pytest.raises(NotImplementedError, match=message):
        model(torch.ones(2, 8))
    call = torch.compile(model, backend="mfsdp", options={"inner": "aot_eager"})
    with pytest.raises(Exception, match=message):
        call(torch.ones(2, 8))
    del local.fsdp_pre_all_gather
    model(torch.ones(2, 8)).sum().backward()
