"""Rules for graphs with sharded parameters. Each rule inspects an :class:`Analysis` and yields what breaks it.

The rules only concern wrong results, lost memory and hangs. A slow schedule breaks none of them. Therefore they hold
before and after every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import fx

from . import collectives, gradients, parameters
from .analysis import Analysis, Findings
from .contract import Contract
from .fp8_products import products_in_float8
from .local_stages import right_stages
from .matching import shards_match


@dataclass(frozen=True, eq=False)
class Breach:
    """A breach of a rule.

    Args:
        rule: Number of the rule, such as ``"V1"``.
        what: Description in one clause.
        node: Node that breaks the rule.
        bucket: Index of the affected bucket, if there is one.
        parameter: Name of the affected parameter, if there is one.
    """

    rule: str
    what: str
    node: fx.Node
    bucket: int | None = None
    parameter: str | None = None


@dataclass(frozen=True)
class Rule:
    """One of the rules.

    Args:
        number: Stable number such as ``"V1"``.
        check: Function that inspects a graph and yields findings. Its name is that of the rule, and stable too.
    """

    number: str
    check: Callable[[Analysis, Contract | None], Findings]

    @property
    def name(self) -> str:
        return self.check.__name__.replace("_", " ")

    def breaches(self, found: Analysis, contract: Contract | None) -> Iterator[Breach]:
        for finding in self.check(found, contract):
            yield Breach(self.number, *finding)


RULES = tuple(
    Rule(f"V{number}", check)
    for number, check in enumerate(
        (
            parameters.awaited_before_use,
            parameters.released_after_use,
            parameters.memory_apart,
            gradients.reduced_once,
            gradients.reduced_complete,
            collectives.one_order,
            collectives.untouched_in_flight,
            parameters.not_saved,
            gradients.scaled_right,
            shards_match,
            products_in_float8,
            right_stages,
            gradients.delivered_after_use,
        ),
        1,
    )
)
