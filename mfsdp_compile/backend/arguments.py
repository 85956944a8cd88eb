"""The arguments of graphs: shells become shards, or gathered buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mfsdp_compile.runtime.memory import gradients
from mfsdp_compile.runtime.memory.bucket import Bucket, ParamHandle
from mfsdp_compile.runtime.model.sharded_model import models_of


class GraphArguments:
    """Converts the arguments of Dynamo's graph into those of the rewritten graph.

    It holds no bucket, because Dynamo keeps compiled code longer than users keep models.

    Args:
        shells: The shells, by position among the graph's arguments.
        buckets: The buckets they belong to, in the order of the graph.
        fp8_candidates: Returns the indices of a bucket's weights that may be multiplied in float8. None: no weight is.
    """

    def __init__(
        self,
        shells: Mapping[int, ParamHandle],
        buckets: Sequence[Bucket],
        fp8_candidates: Callable[[Bucket], frozenset[int]] | None = None,
    ) -> None:
        self._names = [bucket.plan.name for bucket in buckets]
        self._signatures = [bucket.signature for bucket in buckets]
        self._shells = [(position, buckets.index(h.bucket), h.index) for position, h in shells.items()]
        self._first_of = [next(p for p, b, _ in self._shells if b == number) for number in range(len(buckets))]
        self._positions = frozenset(shells)
        self._fp8_candidates = fp8_candidates
        self._fp8 = WeakKeyDictionary({b: fp8_candidates(b) for b in buckets}) if fp8_candidates is not None else None
        self._fp8_expected = list(self._fp8.values()) if self._fp8 is not None else []

    def exchange(self, args: Sequence[Any]) -> tuple[list[Bucket], list[gradients.Backward], list[Tensor], list[Any]]:
        """Convert the arguments of Dynamo's graph.

        Returns:
            The buckets of the shells in ``args``, the upcoming backward through each, the tensors that the graph takes
            for them (each bucket's shard, and what :func:`beside_shard` adds), and the other arguments.
        """
        buckets = self._buckets(args)
        for owner in models_of(buckets):
            owner.enter_compiled([bucket for bucket in buckets if bucket.owner is owner])
            owner.refresh()
        backwards = [gradients.Backward.through(bucket) for bucket in buckets]
        shards = gradients.shards_of(buckets, backwards)
        tensors = [
            tensor for bucket, shard in zip(buckets, shards, strict=True) for tensor in (shard, *beside_shard(bucket))
        ]
        return buckets, backwards, tensors, self._rest(args)

    def handles(self, args: Sequence[Any]) -> list[ParamHandle]:
        """Return the handles of the shells in ``args``. Raise RuntimeError if the code is not for them."""
        self._buckets(args)
        return [args[position].mfsdp_handle for position, _, _ in self._shells]

    def serve(self, args: Sequence[Any]) -> tuple[list[gradients.Backward], list[Tensor], list[Any]]:
        """Convert the arguments of Dynamo's graph for a graph that is served. Gathers, and waits for it.

        Returns:
            The upcoming backward through each bucket, the tensors for each bucket (see :meth:`.EagerRuntime.serve`),
            and the other arguments.
        """
        buckets = [args[position].mfsdp_handle.bucket for position in self._first_of]
        backwards = [gradients.Backward.through(bucket) for bucket in buckets]
        tensors: list[Tensor] = []
        for bucket, backward in zip(buckets, backwards, strict=True):
            (owner,) = models_of([bucket])
            tensors += owner.eager.serve(backward, bucket)
        return backwards, tensors, self._rest(args)

    def _rest(self, args: Sequence[Any]) -> list[Any]:
        return [value for position, value in enumerate(args) if position not in self._positions]

    def _buckets(self, args: Sequence[Any]) -> list[Bucket]:
        """Return the buckets of the shells in ``args``. Raise RuntimeError if the code is not for them."""
        buckets = [args[position].mfsdp_handle.bucket for position in self._first_of]
        for position, number, index in self._shells:
            handle: ParamHandle = args[position].mfsdp_handle
            if handle.bucket is not buckets[number] or handle.index != index:
                raise RuntimeError(
                    f"Compiled code for {self._names[number]!r} was given parameters that are bucketed differently "
                    f"({handle.bucket.splits[handle.index].name!r}): torch.compile shared code between modules whose "
                    "parameters are grouped into units differently. Compile these modules apart, with "
                    "module.compile(backend='mfsdp') on each."
                )
        for bucket, signature in zip(buckets, self._signatures, strict=True):
            if bucket.signature != signature:
                raise RuntimeError(
                    f"Compiled code for a bucket {signature} was given {bucket.plan.name!r}, {bucket.signature}. "
                    "Please report this; torch._dynamo.reset() makes torch compile again."
                )
            bucket.check_unchanged(is_compiled=True)
        self._check_fp8(buckets)
        return buckets

    def _check_fp8(self, buckets: Sequence[Bucket]) -> None:
        """Raise RuntimeError if the code multiplies weights in float8 that are not to be, or the other way round."""
        if self._fp8 is None or self._fp8_candidates is None:
            return
        for number, bucket in enumerate(buckets):
            if (found := self._fp8.get(bucket)) is None:
                found = self._fp8[bucket] = self._fp8_candidates(bucket)
            if found != self._fp8_expected[number]:
                raise RuntimeError(
                    f"Compiled code for {self._names[number]!r} was given {bucket.plan.name!r}, of which "
                    "options['fp8_filter'] chooses other weights: torch.compile shared code between equal modules. "
                    "Compile the whole model at once, or let the filter answer the same for all modules of a class."
                )


def beside_shard(bucket: Bucket) -> list[Tensor]:
    """Return what a graph takes for a bucket after its shard, in the order of :mod:`~mfsdp_compile.passes.unshard`."""
    tensors = []
    if bucket.has_resident:
        tensors.append(bucket.hold_resident())
    if bucket.has_token:
        assert bucket.pending is not None
        tensors.append(bucket.pending.token)
    if bucket.exchange.takes_scales:
        assert bucket.scales is not None
        tensors.append(bucket.scales)
    return tensors


def like_served(bucket: Bucket) -> tuple[Tensor, ...]:
    """Return tensors like those that :meth:`.EagerRuntime.serve` returns."""
    plan, device = bucket.plan, bucket.device
    anchor = torch.empty((), dtype=plan.comm_dtype, device=device).expand(plan.layout.numel)
    full = torch.empty(plan.layout.numel, dtype=plan.held_dtype, device=device)
    scales = [torch.empty_like(bucket.scales)] if plan.stays_quantized and bucket.scales is not None else []
    return anchor.detach().requires_grad_(plan.requires_grad), full, *scales
