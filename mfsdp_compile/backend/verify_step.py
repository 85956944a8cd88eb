"""``model.verify_step``: run one step eagerly and compiled, from the same state, and compare."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.memory.redistribute import as_real
from mfsdp_compile.runtime.model.sharded_model import ShardedModel
from mfsdp_compile.runtime.ranks.agreement import everyones


@dataclass(frozen=True)
class StepComparison:
    """Result of :meth:`.ShardedModule.verify_step`. All compared tensors are equal, or within the tolerance.

    Args:
        tensors: Number of compared tensors.
        largest: Largest difference on this rank, as a norm relative to the tensor's norm.
        where: Name of the tensor with the largest difference. Empty if all tensors are bitwise equal.
    """

    tensors: int
    largest: float
    where: str

    def __str__(self) -> str:
        if not self.where:
            return f"{self.tensors} tensors, equal to the bit"
        return f"{self.tensors} tensors, largest relative difference {self.largest:.2g} ({self.where})"


class Steps(Protocol):
    """What a comparison needs of a sharded module."""

    sharded: ShardedModel

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def sync(self) -> contextlib.AbstractContextManager[None]: ...

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]: ...


def compare_step(
    model: Steps,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Mapping[str, Any] | None,
    tolerance: float | None,
    loss: Callable[[Any], Tensor] | None,
) -> StepComparison:
    """See :meth:`.ShardedModule.verify_step`."""
    sharded = model.sharded
    if sharded.grad_sync.microbatches:
        raise RuntimeError(
            "verify_step was called while gradients were waiting to be reduced. Call it after optimizer.step() and "
            "zero_grad(), before the next backward."
        )
    options = dict(options) if options is not None else {"inner": "aot_eager"}
    in_fp8 = options.get("fp8_matmul") is not None
    exact = options.get("inner", "inductor") == "aot_eager" and not in_fp8
    if tolerance is None and in_fp8:  # only compiled code multiplies in float8
        tolerance = _epsilon(torch.float8_e4m3fn) ** 0.5
    if options.get("inner", "inductor") != "aot_eager":  # otherwise it draws random numbers in its own way
        options["inductor"] = {"fallback_random": True, **options.get("inductor", {})}
    compiled = torch.compile(model, backend="mfsdp", options=options)
    runs = []
    for call in (model, compiled):
        with unchanged(model):
            runs.append(_tensors_of_step(model, call, args, kwargs, loss))
    differences = list(_differences(*runs, tolerance=tolerance, exact=exact))
    failure = next((text for _, _, text in differences if text), None)
    everyone = everyones(failure, sharded.group, "steps")
    ranks = dist.get_process_group_ranks(sharded.group)
    if failures := [f"rank {rank}: {text}" for rank, text in zip(ranks, everyone, strict=True) if text]:
        more = f" and {len(failures) - 4} more ranks" if len(failures) > 4 else ""
        raise RuntimeError(
            f"Compiled and eager differ. {'; '.join(failures[:4])}{more}. Weights, gradients and buffers are those of "
            "before."
        )
    largest, where = max(((difference, name) for name, difference, _ in differences), default=(0.0, ""))
    return StepComparison(len(differences), largest, where if largest else "")


@contextlib.contextmanager
def unchanged(model: Steps) -> Iterator[None]:
    """Restore gradients, buffers and random state on exit. Inside, there are no gradients."""
    buckets = model.sharded.buckets
    attached = [list(bucket.gradients) for bucket in buckets]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.sharded.zero_gradients()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        model.sharded.zero_gradients()
        model.sharded.grad_sync.forget_reduced()
        for bucket, gradients in zip(buckets, attached, strict=True):
            for param, gradient in zip(bucket.params, gradients, strict=True):
                setattr(param, bucket.plan.grad_attribute, gradient)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])


def _tensors_of_step(
    model: Steps,
    call: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], Tensor] | None,
) -> dict[str, Tensor | None]:
    """Run one step, and return its tensors by name, in the order in which they are computed where that is known."""
    with model.sync():
        outputs = call(*args, **kwargs)
        (loss or _loss)(outputs).backward()
    found: dict[str, Tensor | None] = {
        f"output{compat.keystr(path)}": leaf.detach().clone()
        for path, leaf in compat.tree_flatten_with_path(outputs)[0]
        if isinstance(leaf, Tensor)
    }
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    for bucket in reversed(model.sharded.buckets):
        if bucket.plan.requires_grad:
            for locations, gradient in zip(reversed(bucket.locations), reversed(bucket.gradients), strict=True):
                local = gradient.to_local().clone() if gradient is not None else None  # type: ignore[attr-defined]
                found[f"gradient of {locations[0].name}"] = local
    return found


def _loss(outputs: Any) -> Tensor:
    leaves = [
        leaf for _, leaf in compat.tree_flatten_with_path(outputs)[0] if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not leaves:
        raise ValueError(
            "verify_step: no output of the model depends on its parameters. Pass a function that computes a loss from "
            "the output: loss=..."
        )
    if len(leaves) == 1 and leaves[0].ndim == 0:
        return leaves[0]
    return torch.stack([leaf.float().pow(2).mean() for leaf in leaves]).sum()


def _differences(
    eager: Mapping[str, Tensor | None], compiled: Mapping[str, Tensor | None], *, tolerance: float | None, exact: bool
) -> Iterator[tuple[str, float, str]]:
    """Yield the name of each tensor, its relative difference, and a description of the error (empty if there is none).

    Differences are relative to the norm of the tensor, or to the norm that it would have if its elements had the
    average size for its kind, whichever is larger. Some gradients are zero except for rounding, such as that of a bias
    before a normalization.
    """
    sizes = {kind: _root_mean_square(eager, kind) for kind in map(_kind, eager)}
    for name in dict.fromkeys([*eager, *compiled]):
        a, b = eager.get(name), compiled.get(name)
        if a is None or b is None:
            yield name, 0.0, "" if a is b else f"{name} is {'missing' if b is None else 'there'} in compiled code only"
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            kinds = [f"{t.dtype} {list(t.shape)}" for t in (a, b)]
            yield name, float("inf"), f"{name} is {kinds[0]} eagerly and {kinds[1]} compiled"
            continue
        a, b = as_real(a), as_real(b)
        if bool(((a == b) | (a.isnan() & b.isnan())).all()):
            yield name, 0.0, ""
            continue
        apart, own = (torch.linalg.vector_norm(t.double()).item() for t in (a.double() - b.double(), a))
        norm = max(own, sizes[_kind(name)] * a.numel() ** 0.5)
        difference = apart / norm if norm else float("inf")
        allowed = tolerance if tolerance is not None else 0.0 if exact else _epsilon(a.dtype) ** 0.5
        worst = int((a.double() - b.double()).abs().flatten().nan_to_num(float("inf")).argmax())
        text = (
            f"{name}: {a.flatten()[worst].item():.9g} eagerly and {b.flatten()[worst].item():.9g} compiled at element "
            f"{worst} (relative difference {difference:.2g}, allowed {allowed:.2g})"
        )
        yield name, difference, "" if difference <= allowed else text


def _kind(name: str) -> str:
    return name.split(" ")[0]


def _root_mean_square(tensors: Mapping[str, Tensor | None], kind: str) -> float:
    held = [as_real(t).double() for name, t in tensors.items() if t is not None and _kind(name) == kind and t.numel()]
    count = sum(t.numel() for t in held)
    return (sum(t.pow(2).sum().item() for t in held) / count) ** 0.5 if count else 0.0


def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
