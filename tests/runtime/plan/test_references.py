"""Other references to a model's parameters or classes: they work after sharding, or raise with the parameter's name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR, raises_everywhere
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrizations, parametrize, prune

from mfsdp_compile import fully_shard_model
from mfsdp_compile.runtime import compat

MODES = [EAGER, AOT_EAGER]


# -- parameters from before sharding ----------------------------------------------------------------------------------


@on_ranks(2, timeout=120)
def test_what_was_made_before_sharding_says_so() -> None:
    whole = parity.build(zoo.Plain)
    weight, params = whole.head.weight, list(whole.parameters())
    optimizer, values = torch.optim.AdamW(params), whole.state_dict()["head.weight"]
    expected, outside = values.clone(), nn.Linear(16, 5)
    outside.weight = weight
    model, call = parity.shard(whole, EAGER)
    uses: dict[str, Callable[[], Any]] = {
        "zero_grad": optimizer.zero_grad,
        "step": optimizer.step,
        "clip": lambda: nn.utils.clip_grad_norm_(params, 1.0),
        "penalty": lambda: weight.pow(2).sum(),
        "list": lambda: torch._foreach_norm(params),
        "freeze": lambda: [param.requires_grad_(False) for param in params],
        "values": lambda: weight.data,
        "copy": lambda: copy.deepcopy(weight),
        "elsewhere": lambda: outside(torch.randn(2, 16)),
        "compiled": lambda: torch.compile(lambda x: x + weight.sum(), backend="eager")(torch.ones(2)),
        "compiled step": lambda: torch.compile(optimizer.step, backend="eager")(),
    }
    for what, use in uses.items():
        with raises_everywhere(Exception, "'head.weight'" if what in ("penalty", "values", "copy") else "Parameter '"):
            use()
    with raises_everywhere(ValueError, "'0.weight' is parameter 'head.weight' of another model"):
        fully_shard_model(nn.Sequential(outside))
    assert "'head.weight'" in f"{weight}"
    assert (weight.shape, weight.numel(), len({weight})) == ((5, 16), 80, 1)
    with compat.DisableTorchFunctionSubclass():
        assert weight.untyped_storage().nbytes() == weight.element_size()  # a view of its old storage keeps the values:
    assert torch.equal(values, expected)
    call(torch.randn(4, 8)).backward()
    torch.optim.AdamW(model.parameters()).step()


@on_ranks(2, timeout=120)
def test_dtensors_from_before_sharding_say_so() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))

    def build() -> zoo.Plain:
        model = parity.build(zoo.Plain)
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model

    whole = build()
    weight = whole.blocks[0].up.weight
    model = fully_shard_model(whole, mesh, "dp", fsdp_unit_modules=[zoo.Block])
    for use in (weight.to_local, weight.full_tensor, weight.detach, lambda: weight * 2):
        with raises_everywhere(RuntimeError, "'blocks.0.up.weight' was sharded"):
            use()
    assert "'blocks.0.up.weight'" in repr(weight)
    model(torch.randn(4, 8)).backward()

    whole = build()
    whole.blocks[1].up.weight = nn.Parameter(whole.blocks[0].up.weight.data)
    with raises_everywhere(ValueError, "'blocks.0.up.weight'", "'blocks.1.up.weight'", "same nn.Parameter"):
        fully_shard_model(whole, mesh, "dp", fsdp_unit_modules=[zoo.Block])


# -- references in the model itself -----------------------------------------------------------------------------------


def _two_parameters(model: zoo.Plain) -> None:
    model.blocks[1].up.weight = nn.Parameter(model.blocks[0].up.weight.data)


def _a_column(model: zoo.Plain) -> None:
    model.head.bias = nn.Parameter(model.head.weight.data[:, 3])


def _an_attribute(model: zoo.Plain) -> None:
    model.kept = {"head": model.head.weight.t()}


def _multi_grad_hook(model: zoo.Plain) -> None:
    torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), print)


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_two_parameters, r"'blocks.0.up.weight' and parameter 'blocks.1.up.weight' share memory.*same nn.Parameter"),
        (_a_column, r"'head.weight' and parameter 'head.bias' share memory"),
        (_an_attribute, r"attribute 'kept' of module 'model' is a view of parameter 'head.weight'"),
        (
            lambda m: m.register_buffer("b", m.head.weight.detach()[1:]),
            r"buffer 'b' is a view.*'head.weight'.*property",
        ),
        (lambda m: m.register_buffer("b", m.head.weight), r"buffer 'b' is a view of parameter 'head.weight'"),
        (lambda m: m(torch.randn(2, 8)).backward(), r"'enter.weight' has a gradient.*zero_grad"),
        (_multi_grad_hook, r"'enter.weight' has a hook.*register_multi_grad_hook"),
    ],
)
def test_references_that_sharding_would_break_are_refused(change: Callable[[zoo.Plain], Any], message: str) -> None:
    model = parity.build(zoo.Plain)
    change(model)
    before = {name: id(param) for name, param in model.named_parameters()}
    with pytest.raises(ValueError, match=message):
        fully_shard_model(model, fsdp_unit_modules=[zoo.Block])
    assert {name: id(param) for name, param in model.named_parameters()} == before
    assert type(model.head) is nn.Linear
    model(torch.randn(2, 8)).backward()


@pytest.mark.usefixtures("fake_world")
def test_parameters_side_by_side_in_memory() -> None:
    model = parity.build(zoo.Plain)
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()), model.parameters())
    both = torch.randn(16, 48)
    model.left, model.right = nn.Parameter(both[:, :24]), nn.Parameter(both[:, 24:])
    model.register_buffer("copy", model.head.weight.detach().clone())
    model.register_buffer("none", None)
    model.register_buffer("empty", torch.zeros(0))
    model.constant = nn.Parameter(torch.zeros(1).expand(6))
    fully_shard_model(model, fsdp_unit_modules=[zoo.Block])


@on_ranks(2, timeout=90)
def test_a_view_on_one_rank_is_refused_on_all() -> None:
    model = parity.build(zoo.Plain)
    if dist.get_rank() == 1:
        model.register_buffer("view", model.head.weight.data)
    with raises_everywhere(Exception, "buffer 'view' is a view of parameter 'head.weight'"):
        fully_shard_model(model, fsdp_unit_modules=[zoo.Block])
    if dist.get_rank() == 1:
        del model.view
    _, call = parity.shard(model, EAGER)
    call(torch.randn(4, 8)).backward()


# -- hooks and utilities of torch -------------------------------------------------------------------------------------


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_hooks_from_before_sharding_run(mode: str) -> None:
    seen: list[tuple[int, ...]] = []
    handles: list[Any] = []

    def hooked() -> zoo.Plain:
        model = zoo.Plain()
        handles.append(model.head.weight.register_hook(lambda gradient: gradient * 2))
        model.enter.weight.register_post_accumulate_grad_hook(lambda param: seen.append(tuple(param.grad.shape)))
        return model

    data = parity.batches(2)
    run = parity.train_sharded(hooked, mode, data, parity.sgd)
    assert seen == [(16, 8)] * 2
    parity.assert_close(run, parity.train_alone(hooked, data, parity.sgd))
    handles[0].remove()
    run.model(data[0][dist.get_rank()]).backward()
    halved = run.model.module.head.weight.grad.full_tensor()
    run.model.zero_grad()
    run.model.module.head.weight.register_hook(lambda gradient: gradient * 2)
    run.model(data[0][dist.get_rank()]).backward()
    assert torch.equal(run.model.module.head.weight.grad.full_tensor(), 2 * halved)


class Square(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * weight.sigmoid()


class Adorned(zoo.Plain):
    """Ways in which torch replaces a parameter by a computed tensor."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        parametrize.register_parametrization(self.blocks[0].up, "weight", Square())
        nn.utils.weight_norm(self.blocks[1].up)
        nn.utils.spectral_norm(self.enter)  # until the first forward, ``weight`` is a view of ``weight_orig``
        prune.l1_unstructured(self.head, "weight", amount=0.3)
        self.listed = nn.ParameterList([torch.ones(16), torch.zeros(16)])
        self.named = nn.ParameterDict({"scale": torch.ones(16)})

    def trunk(self, x: Tensor) -> Tensor:
        return super().trunk(x) * self.listed[0] * self.named["scale"] + self.listed[1]


class MoreAdorned(Adorned):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.blocks[0].down)
        parametrizations.orthogonal(self.blocks[1].down)
        parametrizations.spectral_norm(self.blocks[0].up)


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize(
    ("factory", "mode"),
    [(MoreAdorned, EAGER), (Adorned, AOT_EAGER), pytest.param(Adorned, INDUCTOR, marks=pytest.mark.slow)],
)
@on_ranks(2)
def test_computed_weights_train(factory: type[nn.Module], mode: str) -> None:
    data = parity.batches(2)
    run = parity.train_sharded(factory, mode, data, parity.sgd)
    parity.assert_close(run, parity.train_alone(factory, data, parity.sgd), relative=1e-4)


@on_ranks(2, timeout=90)
def test_utilities_after_sharding() -> None:
    model, call = parity.shard(parity.build(zoo.Plain), EAGER)
    head = model.module.head
    refused: dict[str, Callable[[], Any]] = {
        "Cannot swap t1 because it has weakref": lambda: parametrize.register_parametrization(head, "weight", Square()),
        "gets a new parameter 'weight_orig'": lambda: prune.l1_unstructured(head, "weight", amount=0.3),
        "part of a bucket": lambda: parametrizations.weight_norm(head),
        "Change the model before": lambda: nn.utils.spectral_norm(head),
        "'weight' of Linear is sharded and cannot be replaced": lambda: setattr(head, "weight", None),
    }
    for message, use in refused.items():
        with raises_everywhere(Exception, message):
            use()
        call(torch.randn(4, 8)).backward()
    assert model.module.get_parameter("head.weight") is head.weight
    assert copy.copy(head).weight is head.weight
    vector = nn.utils.parameters_to_vector(model.parameters())
    assert torch.equal(vector.full_tensor(), torch.cat([p.full_tensor().flatten() for p in model.parameters()]))
    values = torch.arange(float(sum(param.numel() for param in model.parameters())))
    nn.utils.vector_to_parameters(values, model.parameters())
    assert torch.equal(torch.cat([param.full_tensor().flatten() for param in model.parameters()]), values)

    model.module.head = parity.shard(parity.build(zoo.Plain), EAGER)[0].module.head
    with raises_everywhere(RuntimeError, "'head.weight' came after fully_shard_model"):
        call(torch.randn(4, 8))
    model.module.head = head
    call(torch.randn(4, 8)).backward()


# -- classes ----------------------------------------------------------------------------------------------------------


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_apply_finds_the_classes_that_were_written(mode: str) -> None:
    def initialize(module: nn.Module) -> None:
        if type(module) is nn.Linear:
            nn.init.normal_(module.weight, std=0.1)
            nn.init.zeros_(module.bias)
        elif type(module) is nn.LSTM:
            for weight in module._flat_weights:
                nn.init.constant_(weight, 0.01)

    alone = parity.build(zoo.Recurrent)
    model, call = parity.shard(parity.build(zoo.Recurrent), mode)
    x = parity.batches(1)[0][dist.get_rank()]
    call(x).backward()
    for of in (lambda m: m, lambda m: m.blocks[1]):
        for each in (model, alone):
            torch.manual_seed(3)
            part = of(getattr(each, "module", each))
            assert part.apply(initialize) is part
    for name, param in model.module.named_parameters():
        assert torch.equal(param.full_tensor(), alone.get_parameter(name)), name
    assert isinstance(model.module.head, nn.Linear)
    torch.testing.assert_close(call(x), alone(x))


@on_ranks(2, timeout=90)
def test_apply_cannot_exchange_parameters() -> None:
    model, call = parity.shard(parity.build(zoo.Plain), EAGER)
    head = model.module.head
    before, classes = dict(head._parameters), [type(module) for module in model.modules()]

    def new_weight(module: nn.Module) -> None:
        if type(module) is nn.Linear:
            module.weight = nn.Parameter(torch.zeros(module.weight.shape))

    def parametrized(module: nn.Module) -> None:
        if type(module) is nn.Linear:
            parametrize.register_parametrization(module, "weight", Square())

    def one_more(module: nn.Module) -> None:
        module.more = nn.Parameter(torch.zeros(3))

    replaced = "apply() replaced or added parameters of", "Linear"
    for change, fragments in ((new_weight, replaced), (parametrized, ("Cannot swap t1",)), (one_more, replaced)):
        with raises_everywhere(RuntimeError, *fragments):
            model.apply(change)
        call(torch.randn(4, 8)).backward()
    with raises_everywhere(ZeroDivisionError):
        model.apply(lambda module: 1 // 0)
    assert [type(module) for module in model.modules()] == classes
    assert all(head._parameters[name] is param for name, param in before.items())
    assert not list(head.children())


@on_ranks(2)
def test_recurrent_layers_read_whole_parameters() -> None:
    """An RNN's own list of weights contains the current parameters."""
    model, call = parity.shard(parity.build(zoo.Recurrent), EAGER)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    x = torch.ones(4, 8)
    sharded = call(x)
    with model.summon_full_params():
        assert torch.equal(model.module(x), sharded)
        assert all(weight.shape for weight in model.module.blocks[0].rnn._flat_weights)
