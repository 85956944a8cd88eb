"""Values saved for backward in host memory, in compiled graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from parity import AOT_EAGER, EAGER, INDUCTOR, assert_bitwise, batches, train_sharded
from pool import on_ranks
from torch import nn

OFFLOADED: dict[str, Any] = {"activation_offload": True, "activation_offload_least": 1}
MODELS = [zoo.Plain, zoo.Uneven, zoo.Tied, zoo.FrozenParameters, zoo.Unused, zoo.Checkpointed]


@pytest.mark.parametrize("model", MODELS)
@on_ranks(2)
def test_same_numbers(model: type[nn.Module]) -> None:
    """Bitwise as in the eager path, which offloads nothing."""
    data = batches(2)
    plain = train_sharded(model, EAGER, data)
    for regions in (False, "auto"):
        offloaded = train_sharded(model, AOT_EAGER, data, regions=regions, **OFFLOADED)
        assert_bitwise(plain, offloaded)
        torch.compiler.reset()
        (record,) = offloaded.model.sharded.compiled_graphs
        print([str(r) for p in record.reports for r in record.reports[p] if r.name == "activations"])


@on_ranks(2)
def test_inductor() -> None:
    """Inductor rounds as it does without offload."""
    data = batches(2)
    plain = train_sharded(zoo.Plain, INDUCTOR, data, regions=False)
    torch.compiler.reset()
    assert_bitwise(plain, train_sharded(zoo.Plain, INDUCTOR, data, regions=False, **OFFLOADED))
    torch.compiler.reset()
