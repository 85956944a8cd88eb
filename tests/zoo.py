"""Small models, one feature each."""

from __future__ import annotations

import functools
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts


class Block(nn.Module):
    """A residual MLP, the unit that tests shard by."""

    def __init__(self, width: int = 16, hidden: int = 24) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Plain(nn.Module):
    """An embedding-like input layer, blocks, and a head."""

    block: type[nn.Module] = Block

    def __init__(self, width: int = 16, layers: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.blocks = nn.ModuleList(self.block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 5)

    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.trunk(self.enter(x)))).pow(2).mean()


class AlignedBlock(Block):
    """Sizes that products in float8 can have."""

    def __init__(self, width: int = 16) -> None:
        super().__init__(width, hidden=32)


class Aligned(Plain):
    block = AlignedBlock


class Uneven(Plain):
    """Prime sizes, so that rows, shards and alignment do not fit together."""

    def __init__(self) -> None:
        super().__init__(width=13, layers=2)


class Experts(nn.Module):
    """A residual mixture of stacked experts, all of which compute every row."""

    def __init__(self, width: int = 16, experts: int = 3, hidden: int = 23) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.empty(experts, hidden, width))
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up, std=0.3)
        nn.init.uniform_(self.down, -0.3, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        each = F.gelu(x @ self.up.mT) @ self.down.mT  # [experts, rows, width]
        return x + (self.router(x).softmax(-1).T.unsqueeze(-1) * each).sum(0)


class Stacked(Plain):
    """Stacks of matrices, whose matrices are cut where several ranks share few of them."""

    block = Experts

    def __init__(self) -> None:
        super().__init__(layers=2)


class Tied(Plain):
    """The head shares the input layer's weight, and two blocks share a matrix across units."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 16, bias=False)
        self.enter = nn.Linear(16, 16)
        self.head.weight = self.enter.weight
        self.blocks[2].up.weight = self.blocks[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x, x], dim=-1))


class FrozenParameters(Plain):
    """Frozen biases: two buckets per unit."""

    def __init__(self) -> None:
        super().__init__()
        for name, param in self.named_parameters():
            param.requires_grad_(not name.endswith("bias"))


class FrozenUnit(Plain):
    """Frozen blocks, one of them between trainable ones."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.enter.requires_grad_(False)


class Unused(Plain):
    """Parameters, and a whole unit, that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].spare = nn.Parameter(torch.randn(3, 5))
        self.spare_block = Block()


class DeadEnd(Plain):
    """A last block whose output is not used.

    LLaVA, for example, takes the output of a vision tower's last layer but one.
    """

    def trunk(self, x: Tensor) -> Tensor:
        *blocks, last = self.blocks
        for block in blocks:
            x = block(x)
        last(x)
        return x


class Norms(Plain):
    """BatchNorm, whose buffers change in forward."""

    class block(Block):
        def __init__(self, width: int = 16) -> None:
            super().__init__(width)
            self.norm = nn.BatchNorm1d(width)


class Dropout(Plain):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.3, self.training)


class CalledTwice(Plain):
    """Every block runs twice, and the first one again at the end."""

    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(block(x))
        return self.blocks[0](x)


class Checkpointed(Plain):
    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class CheckpointedReentrant(Plain):
    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class SelectivelyCheckpointed(Plain):
    """Selective checkpointing that saves matrix products, and gathered parameters if these are visible to it."""

    def trunk(self, x: Tensor) -> Tensor:
        saved = [
            torch.ops.aten.addmm.default,
            torch.ops._c10d_functional.all_gather_into_tensor.default,
            torch.ops._c10d_functional.wait_tensor.default,
        ]
        for block in self.blocks:
            contexts = functools.partial(create_selective_checkpoint_contexts, saved)
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x


class Autocast(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


class Scalars(Plain):
    """0-d, single-row and empty parameters."""

    class block(Block):
        def __init__(self, width: int = 16) -> None:
            super().__init__(width)
            self.gain = nn.Parameter(torch.tensor(1.5))
            self.row = nn.Parameter(torch.randn(1, width))
            self.empty = nn.Parameter(torch.empty(0, width))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gain + self.row + self.empty.sum()


class MixedTypes(Plain):
    """Norms in float64 among float32 parameters: two dtypes in one unit."""

    class block(Block):
        def __init__(self, width: int = 16) -> None:
            super().__init__(width)
            self.norm.double()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x.double()).to(x.dtype))))


class Nested(Plain):
    """Units inside units, and a parameter of the outer unit that is used before and after the inner ones."""

    class block(nn.Module):
        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self.before = nn.Linear(width, width)
            self.inner = Block(width)
            self.after = nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            return self.after(self.inner(self.before(x)))


class ReadsChild(Plain):
    """A parent that uses its child's weight without calling the child, as Mamba does."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + F.linear(F.gelu(F.linear(self.norm(x), self.up.weight)), self.down.weight, self.down.bias)


class RootParameter(Plain):
    """A parameter of the model itself, used between the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(16))

    def trunk(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x + self.position)
        return x


class Detached(Plain):
    """A weight that is also used without gradient, after its own gradient is complete."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.linear(x, self.down.weight.detach() @ self.up.weight.detach())


class Recurrent(Plain):
    class block(nn.Module):
        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self.rnn = nn.LSTM(width, width, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.rnn(x[:, None])[0][:, 0]


class GraphBreaks(Plain):
    """Python that Dynamo cannot trace, in the middle of a unit."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.up(self.norm(x))
            torch._dynamo.graph_break()
            return x + self.down(F.gelu(y))


class DisabledChild(Plain):
    """A submodule of a unit that must run eagerly, as Transformer Engine's do."""

    class block(Block):
        def __init__(self, width: int = 16) -> None:
            super().__init__(width)
            self.down = _Disabled(24, width)


class _Disabled(nn.Linear):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Parametrized(Plain):
    """Parameters that forward computes from others: weight_norm keeps ``original0`` and ``original1``."""

    class block(Block):
        def __init__(self, width: int = 16) -> None:
            super().__init__(width)
            nn.utils.parametrizations.weight_norm(self.up)


class TransformerLayer(Plain):
    """torch's transformer layer, which passes its weights to fused kernels by name."""

    class block(nn.TransformerEncoderLayer):
        def __init__(self, width: int = 16) -> None:
            super().__init__(width, nhead=2, dim_feedforward=24, dropout=0.0, batch_first=True)

    def trunk(self, x: Tensor) -> Tensor:
        return super().trunk(x[:, None])[:, 0]


class SparseGradients(Plain):
    """An embedding that asks for sparse gradients, although buckets are dense."""

    class block(Block):
        def __init__(self, width: int = 16) -> None:
            super().__init__(width)
            self.table = nn.Embedding(7, width, sparse=True)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.table((x[:, 0].detach().abs() * 3).long() % 7)


class AsksForParameters(Plain):
    """``hasattr`` and ``getattr`` on parameters: Dynamo guards on the results."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            if hasattr(self.up, "bias") and self.up.bias is not None and not hasattr(self.up, "scale"):
                x = x + 1
            return super().forward(x) + getattr(self.norm, "weight", 0)


class Wide(nn.Module):
    """A unit of four matrices: parameters are all of the memory."""

    WIDTH = 192

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = torch.tanh(linear(x))
        return x


class Bag(nn.Module):
    """Parameters of many shapes, without a forward."""

    SHAPES: ClassVar = {
        "matrix": (7, 5),
        "vector": (11,),
        "scalar": (),
        "row": (1, 6),
        "empty": (0, 3),
        "cube": (3, 4, 2),
    }

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, shape in self.SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))
