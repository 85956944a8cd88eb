"""What users do to models and parameters besides training: it works as in plain torch, or raises with a reason."""

from __future__ import annotations

import copy
import gc
import tempfile
import weakref
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zoo
from parity import AOT_EAGER, EAGER
from pool import on_ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from mfsdp_compile import fully_shard, fully_shard_model
from mfsdp_compile.runtime import compat

MODES = [EAGER, AOT_EAGER]


def train_step(call: Any, number: int = 0) -> None:
    """Assert that the model is usable, with the batch of step ``number``."""
    call(parity.batches(number + 1)[number][dist.get_rank()]).backward()


@on_ranks(2)
def test_apply_and_print_are_no_forwards() -> None:
    model, call = parity.shard(parity.build(zoo.Plain), EAGER)
    model.apply(lambda m: nn.init.constant_(m.weight, 0.5) if isinstance(m, nn.Linear) else None)
    assert bool((model.module.head.weight.full_tensor() == 0.5).all())
    if dist.get_rank() == 0:  # a LayerNorm's repr reads its bias
        assert "LayerNorm" in repr(model)
    dist.barrier()
    assert not model.sharded.eager.gathering.gathered
    train_step(call)


@on_ranks(2)
def test_writes_in_forward_are_refused() -> None:
    class Clamps(zoo.Plain):
        class block(zoo.Block):
            def forward(self, x: Tensor) -> Tensor:
                with torch.no_grad():
                    self.up.weight.clamp_(-0.01, 0.01)
                return super().forward(x)

    _model, call = parity.shard(parity.build(Clamps), EAGER, units=[Clamps.block])
    with torch.no_grad(), parity.raises_everywhere(RuntimeError, "wrote to a parameter", "'blocks.0'"):
        call(torch.randn(4, 8))


@on_ranks(2)
def test_shards_that_change_before_they_are_read_again() -> None:
    class Scales(zoo.Plain):
        def fast_forward(self, x: Tensor) -> Tensor:
            return self.enter(x).sum()

    model, call = parity.shard(parity.build(Scales), EAGER, units=[zoo.Block])
    model.module.forward = model.module.fast_forward  # on the instance, without this package's window
    x = torch.randn(4, 8)
    with torch.no_grad():
        before = call(x)
        for param in model.parameters():
            param.mul_(2)
        torch.testing.assert_close(call(x), 2 * before)


@pytest.mark.parametrize("mode", MODES)
@on_ranks(2, timeout=90)
def test_modules_added_after_sharding_are_refused(mode: str) -> None:
    model, call = parity.shard(parity.build(zoo.Plain), mode)
    model.module.head = nn.Linear(16, 5)
    with parity.raises_everywhere(Exception, "'head.", "fully_shard_model"):
        call(torch.randn(4, 8))


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_a_model_goes_when_nobody_holds_it(mode: str) -> None:
    model, call = parity.shard(parity.build(zoo.Plain), mode)
    train_step(call)
    gone = [weakref.ref(bucket) for bucket in model.sharded.buckets]
    del model, call
    gc.collect()
    assert all(ref() is None for ref in gone)


@on_ranks(2)
def test_random_operators_that_need_values() -> None:
    """They draw what one process would draw from the whole tensor."""
    model, _ = parity.shard(parity.build(zoo.Plain), EAGER)
    weight = model.module.head.weight.detach().abs().clamp(max=1)
    for draw in (torch.bernoulli, torch.poisson, lambda w: torch.normal(w, 1e-3)):
        torch.manual_seed(3)
        mine = draw(weight).full_tensor()
        torch.manual_seed(3)
        assert torch.equal(mine, draw(weight.full_tensor()))
    assert torch.rand_like(weight).shape == weight.shape


@on_ranks(2)
def test_results_of_other_shapes() -> None:
    class Column(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 1))

    model = fully_shard_model(Column(), fsdp_unit_modules=[Column])
    param = model.module.weight.detach()
    weight = torch.zeros_like(param).add_(param)  # as an optimizer's state
    for other in (torch.randn(6, 4), torch.randn(4)):
        assert torch.equal(weight * other, weight.full_tensor() * other)
    torch.testing.assert_close((weight * torch.ones(6, 1)).full_tensor(), weight.full_tensor())
    torch.testing.assert_close((weight + torch.tensor(1.0)).full_tensor(), weight.full_tensor() + 1)


@pytest.mark.parametrize("factory", [zoo.Recurrent, nn.LSTM])
@on_ranks(2)
def test_moving_recurrent_models(factory: Any) -> None:
    whole = factory(8, 8) if factory is nn.LSTM else factory()
    model = fully_shard_model(whole, fsdp_unit_modules=[nn.LSTM])
    model.to("cpu").float()
    for part in model.module.modules():
        part._apply(lambda t: t)
    x = torch.randn(3, 4, 8) if factory is nn.LSTM else torch.randn(4, 8)
    out = model(x)
    (out[0].sum() if factory is nn.LSTM else out).backward()


@on_ranks(2)
def test_state_of_scalars_is_carried_over() -> None:
    model, alone = parity.build(zoo.Scalars), parity.build(zoo.Scalars)
    data = parity.batches(2)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, alone)]
    for each, optimizer in zip((model, alone), optimizers, strict=True):
        sum(each(x) / 2 for x in data[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
    sharded, optimizer = fully_shard(model, optimizers[0], fsdp_unit_modules=[zoo.Scalars.block])
    sharded(data[1][dist.get_rank()]).backward()
    sum(alone(x) / 2 for x in data[1]).backward()
    optimizer.step()
    optimizers[1].step()
    for name, param in sharded.module.named_parameters():
        # Adam makes steps of about lr from gradients of any size, so the bound is 1e-3 of one step.
        torch.testing.assert_close(param.full_tensor(), alone.get_parameter(name), rtol=1e-5, atol=1e-5)


@on_ranks(2)
def test_classes_that_watch_their_subclasses() -> None:
    class Watched(zoo.Plain):
        def __init_subclass__(cls) -> None:
            raise TypeError("final")

    _model, call = parity.shard(parity.build(Watched), EAGER, units=[zoo.Block])
    train_step(call)


@on_ranks(2)
def test_the_class_of_a_sharded_module_makes_ordinary_ones() -> None:
    model = fully_shard_model(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), fsdp_unit_modules=[nn.Linear])
    linear = type(model.module[0])(8, 3)
    assert type(linear) is nn.Linear
    x = torch.randn(4, 8)
    assert model.module[:2](x).shape == (4, 8)  # a slice is a new Sequential of the same children


@on_ranks(2)
def test_inference_mode_in_a_part_of_forward() -> None:
    class Partly(zoo.Plain):
        def trunk(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                h = self.blocks[0](x)
            return self.blocks[2](self.blocks[1](h.clone()))

    _model, call = parity.shard(parity.build(Partly), EAGER, units=[zoo.Block])
    train_step(call)


@pytest.mark.skipif(
    not compat.DTENSOR_SUBCLASSES_DISPATCH,
    reason="torch before 2.13 cannot differentiate through shards at rest, and says so",
)
@on_ranks(2)
def test_penalties_next_to_the_loss() -> None:
    penalties = {
        "mean": lambda params: sum(p.mean() for p in params),
        "local": lambda params: sum((p.to_local() if hasattr(p, "to_local") else p).pow(2).sum() for p in params),
    }
    for name, penalty in penalties.items():
        model, call = parity.shard(parity.build(zoo.Uneven), EAGER)
        alone = parity.build(zoo.Uneven)
        data = parity.batches(1)[0]
        for _ in range(2):
            penalty(model.parameters()).backward()
            call(data[dist.get_rank()]).backward()
            penalty(alone.parameters()).backward()
            sum(alone(x) / len(data) for x in data).backward()
        for key, param in model.module.named_parameters():
            parity.close(f"{name}: {key}", param.grad.full_tensor(), alone.get_parameter(key).grad)
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@on_ranks(2)
def test_nan_reaches_every_rank() -> None:
    for rank in range(2):
        model, _ = parity.shard(parity.build(zoo.Plain), EAGER)
        weight = model.module.enter.weight.detach()
        if dist.get_rank() == rank and weight.to_local().numel():
            weight.to_local().view(-1)[0] = float("nan")
        # Any rank that holds rows of it.
        has = torch.tensor(float(dist.get_rank() == rank and weight.to_local().numel() > 0))
        dist.all_reduce(has)
        if has:
            assert weight.max().isnan()
            assert torch.linalg.vector_norm(weight, float("inf")).isnan()


@on_ranks(2, timeout=90)
def test_double_backward_is_refused() -> None:
    _model, call = parity.shard(parity.build(zoo.Plain), EAGER)
    with parity.raises_everywhere(RuntimeError, "create_graph=True"):
        call(torch.randn(4, 8)).backward(create_graph=True)
    train_step(call)


@on_ranks(2)
def test_a_gradient_taken_off_is_left_alone() -> None:
    model, call = parity.shard(parity.build(zoo.Plain), EAGER)
    train_step(call)
    kept, model.module.head.weight.grad = model.module.head.weight.grad, None
    before = kept.full_tensor()
    train_step(call, 1)
    assert torch.equal(kept.full_tensor(), before)
    assert not torch.equal(model.module.head.weight.grad.full_tensor(), before)


@on_ranks(2)
def test_gradients_of_two_backwards_may_be_mixed() -> None:
    model, call = parity.shard(parity.build(zoo.Plain), EAGER)
    head, enter = model.module.head.weight, model.module.enter.weight
    whole, kept = [], None
    for number in (2, 0, 1):
        model.zero_grad_buffer()
        train_step(call, number)
        kept = head.grad if number == 0 else kept
        whole.append({param: param.grad.full_tensor() for param in (head, enter)})
    head.grad = kept  # the others keep those of the last backward
    train_step(call, 2)
    for param, added in ((head, 1), (enter, 2)):
        assert torch.equal(param.grad.full_tensor(), whole[0][param] + whole[added][param])


@pytest.mark.long_unless("*-eager")
@pytest.mark.parametrize("mode", MODES)
@on_ranks(2)
def test_torch_distributed_checkpoint(mode: str) -> None:
    """``torch.distributed.checkpoint`` saves and loads rows where the layout has them, not where ``Shard(0)`` would."""
    path = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(path)
    model, call = parity.shard(parity.build(zoo.Uneven), mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_step(call)
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path[0])

    other, _ = parity.shard(parity.build(zoo.Uneven, seed=5), EAGER)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    weights, state = get_state_dict(other, other_optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=path[0])
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=state)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    for mine, its in pairs:
        assert torch.equal(mine.full_tensor(), its.full_tensor())
        assert torch.equal(
            optimizer.state[mine]["exp_avg"].full_tensor(), other_optimizer.state[its]["exp_avg"].full_tensor()
        )
    # Also into a model that is not sharded.
    alone = parity.build(zoo.Uneven, seed=6)
    whole = {f"module.{name}": param.detach() for name, param in alone.named_parameters()}
    dcp.load({"model": whole}, checkpoint_id=path[0])
    for name, param in model.module.named_parameters():
        assert torch.equal(param.full_tensor(), whole[f"module.{name}"])


@on_ranks(2)
def test_state_dict_with_copies() -> None:
    model, _call = parity.shard(parity.build(zoo.Tied), EAGER)
    saved = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(saved)
    alone = parity.build(zoo.Tied)
    for name, param in model.module.named_parameters():
        assert torch.equal(param.full_tensor(), alone.get_parameter(name))


@on_ranks(2)
def test_compiled_blocks_that_gather_for_themselves_run_without_our_hooks() -> None:
    model = fully_shard_model(parity.build(zoo.Plain), fsdp_unit_modules=[zoo.Block])
    for block in model.module.blocks:
        block.compile(backend="mfsdp", options={"inner": "aot_eager", "prefetch": 0})
    outer = model.sharded.eager.saved.for_compiled_code
    active = []
    model.sharded.eager.saved.for_compiled_code = lambda: _Watching(outer(), active)  # type: ignore[method-assign]
    train_step(model)
    assert active
    assert not any(active)


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Watching:
    """A context manager that records whether hooks are active inside."""

    def __init__(self, manager: Any, active: list[bool]) -> None:
        self._manager, self._active = manager, active

    def __enter__(self) -> None:
        self._manager.__enter__()
        self._active.append(not compat.hook_saved_tensors(_same, _same))
        compat.unhook_saved_tensors(_same)

    def __exit__(self, *error: Any) -> Any:
        return self._manager.__exit__(*error)
