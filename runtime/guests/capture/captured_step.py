"""A step that runs as usual at first, is captured in graphs, and is replayed from then on."""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ... import compat
from ...model.sharded_model import ShardedModel
from ...program_lines import program_line_of
from ...ranks.agreement import has_others
from .addresses import Baked, Fact, difference, is_address, refuse_optimizers, static_tensors
from .devices import Graph, GraphDevice
from .host_state import HostState, OptimizerHostState
from .operators import WRITES_TO_ARGUMENT, CapturedOperators

MOST_GRAPHS = 16
"""Most graphs of one step. A step that needs more has an argument, or a state, that differs from call to call."""
_MOST_KINDS = 4 * MOST_GRAPHS
"""Most kinds of calls, with those that were not captured."""
_MOST_AGAIN = 3
"""How often a kind of call runs as usual once more, because something has changed since the last time."""

_AS_CAPTURED = "A replay uses what the step used when it was captured."


@dataclass(frozen=True)
class _Captured:
    """A captured step.

    Args:
        name: Its name, the same on all ranks.
        graph: Its work on the device.
        inputs: The tensors that arguments are copied into.
        outputs: What it returns; replays write there.
        optimizers: The optimizers that step in it.
        facts: What is baked into it.
        before, after: State of the model at its beginning and its end.
        buffers: The communication buffers that it uses, which the model drops after a failure.
    """

    name: str
    graph: Graph
    inputs: Sequence[Tensor]
    outputs: Any
    optimizers: Sequence[torch.optim.Optimizer]
    facts: Sequence[Fact]
    before: HostState
    after: HostState
    buffers: Sequence[Tensor]


class CapturedStep:
    """A function that does one step, or one microbatch, of one model's training, as graphs.

    Args:
        model: The model.
        step: The function; see :func:`~mfsdp_compile.capture_step`.
        name: Its name in errors.
        device: What captures.
        warm_up: Number of calls of each kind that run as usual before one is captured.
    """

    def __init__(
        self, model: ShardedModel, step: Callable[..., Any], name: str, device: GraphDevice, warm_up: int
    ) -> None:
        self._model = model
        self._step, self._name = step, name
        self._device = device
        self._warm_up = warm_up
        assert model.module is not None
        self._baked = Baked(model)
        self._modules = tuple(model.module.modules())
        self._calls: Counter[Hashable] = Counter()
        self._optimizers: dict[Hashable, list[torch.optim.Optimizer]] = {}
        self._facts: dict[Hashable, Sequence[Fact]] = {}
        self._graphs: dict[Hashable, _Captured] = {}
        self._forms: dict[Hashable, list[tuple[torch.Size, torch.dtype]]] = {}
        self._inputs: dict[Hashable, list[Tensor]] = {}
        model.captured_steps.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Do the step: as usual, by capturing it and replaying that, or by a replay.

        Returns:
            What the step returns, with detached tensors. The next replay overwrites them: clone what is kept longer.

        Raises:
            RuntimeError: The step cannot be captured, or a replay would not do what the step would.
            ValueError, TypeError: An argument cannot be an input of a graph.
        """
        model = self._model
        model.leave_backward()
        model.eager.leave_stray_reads()
        model.await_gathers()
        leaves, structure = compat.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        kind = structure, tuple(None if isinstance(leaf, Tensor) else _plain(leaf) for leaf in leaves)
        self._check_inputs(kind, tensors)
        state = HostState.of(model)
        key = kind, state.key, self._settings()
        captured = self._graphs.get(key)
        if captured is None:
            if self._runs_as_usual(key):
                return self._run(key, args, kwargs)
            captured = self._graphs[key] = self._capture(key, kind, state, leaves, structure, tensors)
        self._check_facts(captured)
        return self._replay(captured, tensors)

    def reset(self) -> None:
        """Free all graphs. The next calls run as usual and capture again."""
        for captured in self._graphs.values():
            captured.graph.reset()
        for known in (self._graphs, self._calls, self._optimizers, self._facts, self._forms, self._inputs):
            known.clear()

    @property
    def graphs(self) -> list[str]:
        """Names of the graphs that were captured."""
        return [captured.name for captured in self._graphs.values()]

    # -- which graph --------------------------------------------------------------------------------------------------

    def _settings(self) -> Hashable:
        """What decides which operators a step runs, besides its arguments and the model's state."""
        model, device = self._model, self._model.buckets[0].device.type
        return (
            tuple(bucket.signature for bucket in model.buckets),
            tuple(module.training for module in self._modules),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
        )

    def _check_inputs(self, kind: Hashable, tensors: Sequence[Tensor]) -> None:
        device = self._model.buckets[0].device
        for number, tensor in enumerate(tensors):
            if tensor.requires_grad or tensor.device != device:
                what = "requires gradients" if tensor.requires_grad else f"is on {tensor.device}"
                raise ValueError(
                    f"Tensor {number} among the arguments of the captured step {self._name} {what}. Arguments are "
                    f"copied into memory of the graph: pass tensors on {device} that need no gradients."
                )
        for number, ((shape, dtype), given) in enumerate(zip(self._forms.get(kind, ()), tensors, strict=False)):
            if (shape, dtype) != (given.shape, given.dtype):
                raise ValueError(
                    f"Tensor {number} among the arguments of the captured step {self._name} has shape "
                    f"{tuple(given.shape)} and {given.dtype}; in its first call it had {tuple(shape)} and "
                    f"{dtype}. Graphs have static shapes: pad the batch, or capture the step again for these "
                    "(another capture_step)."
                )
        if kind not in self._forms:
            if len(self._forms) == _MOST_KINDS:
                raise RuntimeError(
                    f"The step {self._name} was called in {_MOST_KINDS} ways, and this is another: an argument that "
                    "is not a tensor differs from call to call. Pass what differs as a tensor."
                )
            self._forms[kind] = [(tensor.shape, tensor.dtype) for tensor in tensors]

    # -- as usual -----------------------------------------------------------------------------------------------------

    def _runs_as_usual(self, key: Hashable) -> bool:
        """Whether a call is not captured yet. Ranks agree.

        One that would find another optimizer state than the last call has left, such as a checkpoint's, has to arrange
        it first, which a graph would repeat.
        """
        if (calls := self._calls[key]) < self._warm_up:
            return True
        if calls == self._warm_up + _MOST_AGAIN:
            return False
        changed = difference(self._facts[key], self._baked.facts(self._optimizers[key], gradients=False)) is not None
        if has_others(self._model.group):
            return any(self._model.coordinator.conclude("preparing a capture", [self._name], changed, list))
        return changed

    def _run(self, key: Hashable, args: Any, kwargs: Any) -> Any:
        found: list[torch.optim.Optimizer] = []
        with self._device.warm_up(), _watching_optimizers(found):
            outputs = self._step(*args, **kwargs)
        self._calls[key] += 1
        self._optimizers[key] = found
        self._facts[key] = self._baked.facts(found, gradients=False)
        return _detached(outputs)

    # -- capture ------------------------------------------------------------------------------------------------------

    def _capture(
        self,
        key: Hashable,
        kind: Hashable,
        before: HostState,
        leaves: Sequence[Any],
        structure: Any,
        tensors: Sequence[Tensor],
    ) -> _Captured:
        """Capture the step. All ranks do, or none of them.

        Raises:
            RuntimeError: On every rank: it cannot be captured. The model is as before.
        """
        model, coordinator = self._model, self._model.coordinator
        if len(self._graphs) == MOST_GRAPHS:
            raise RuntimeError(
                f"The step {self._name} was captured {MOST_GRAPHS} times, and this call is none of them: an argument "
                "that is not a tensor, or what the model is left with, differs from call to call. Pass what differs as "
                "a tensor."
            )
        optimizers = self._optimizers[key]
        coordinator.graphs += 1  # all steps of a model count: ranks compare the names of what they replay
        name = f"{self._name}, graph {coordinator.graphs}"
        shapes = [f"argument {tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors]
        due = "reductions due" if model.grad_sync.is_due() else "reductions deferred"
        coordinator.agree("Capturing a step", [name, due, *shapes])
        if kind not in self._inputs:
            self._inputs[kind] = [torch.empty_like(tensor) for tensor in tensors]
        inputs = self._inputs[kind]
        for static, given in zip(inputs, tensors, strict=True):
            static.copy_(given)
        facts = self._baked.facts(optimizers)
        at_rest = self._baked.facts(optimizers, gradients=False)
        statics = iter(inputs)
        args, kwargs = compat.tree_unflatten(
            [next(statics) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
        )
        known = {id(optimizer): OptimizerHostState(optimizer) for optimizer in optimizers}
        versions = [static._version for static in inputs]
        outputs, graph, reason = None, None, refuse_optimizers(optimizers, model.buckets[0].device)
        if reason is None:
            outputs, graph, reason = self._record(optimizers, known, inputs, args, kwargs)
        if reason is None and versions != [static._version for static in inputs]:  # by compiled code
            reason = WRITES_TO_ARGUMENT
        if (
            reason is None
            and (moved := difference(at_rest, self._baked.facts(optimizers, gradients=False))) is not None
        ):
            reason = f"it replaces or changes on the host: {moved[0]} {moved[1]!r}. Write into tensors in place"
        after = HostState.of(model)
        before.restore(model)
        reasons = [reason]
        if has_others(model.group):
            reasons = coordinator.conclude("capturing a step", [name], reason, list)
        if any(reasons):
            for each in known.values():
                each.restore()
            if graph is not None:
                graph.reset()
            coordinator.forget_failure()
            rank, why = next((rank, why) for rank, why in enumerate(reasons) if why)
            raise RuntimeError(
                f"The step {self._name} cannot be captured{f' (on rank {rank})' if len(reasons) > 1 else ''}: {why}. "
                "The model is as before the call, which has done nothing; the step itself still trains it."
            )
        assert graph is not None
        return _Captured(name, graph, inputs, outputs, optimizers, facts, before, after, model.comm_buffers.memory)

    def _record(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        known: dict[int, OptimizerHostState],
        inputs: Sequence[Tensor],
        args: Any,
        kwargs: Any,
    ) -> tuple[Any, Graph | None, str | None]:
        """Record the step. Return its outputs and its graph, or why there is none.

        Args:
            known: Gets the state of other optimizers before they step.
        """
        model, coordinator = self._model, self._model.coordinator
        assert model.module is not None
        operators = CapturedOperators(model.module, static_tensors(model, optimizers), inputs)
        found: list[torch.optim.Optimizer] = []
        outputs, graph, failure, steps = None, None, None, model.step_tracker.progress
        coordinator.captures = True
        try:
            with self._device.capture() as graph:
                try:
                    with operators, _watching_optimizers(found, operators, known), compat.without_compilation():
                        outputs = _detached(self._step(*args, **kwargs))
                except Exception as error:
                    failure = error
                # Within the capture: a collective must be awaited in the graph that starts it.
                model.await_gathers()
                model.eager.abandon()
                model.eager.settle()
        except Exception as error:
            failure = failure or error
        finally:
            coordinator.captures = False
        reason = operators.reason
        if reason is None and failure is not None:
            reason = _described(failure)
        if reason is None and set(map(id, found)) != set(map(id, optimizers)):
            reason = "other optimizers step in it than in the call before, whose arguments were alike"
        if reason is not None:
            model.grad_sync.forget_backward()
            model.step_tracker.progress = steps
            for bucket in model.buckets:
                bucket.set_plan(bucket.plan)
            return None, graph, reason
        return outputs, graph, None

    # -- replay -------------------------------------------------------------------------------------------------------

    def _check_facts(self, captured: _Captured) -> None:
        changed = difference(captured.facts, self._baked.facts(captured.optimizers))
        if changed is None:
            return
        what, name, value = changed
        if "hyperparameter" in what and not is_address(value):
            advice = (
                f"it was {value!r}. Pass a tensor that is changed in place (lr=torch.tensor(1e-3), with "
                "capturable=True), as schedulers do, or call reset() of the captured step after each change"
            )
        elif "hooks" in what:
            advice = (
                "some were registered or removed since, and a replay runs none. Register hooks before the first call, "
                "or call reset() of the captured step on all ranks"
            )
        else:
            advice = "it was replaced. Write into it in place, or call reset() of the captured step"
        raise RuntimeError(
            f"The {what} {name!r} is not that of the capture of {captured.name}: {advice}. {_AS_CAPTURED}"
        )

    def _replay(self, captured: _Captured, tensors: Sequence[Tensor]) -> Any:
        model = self._model
        model.coordinator.enter_replay(captured.name)
        try:
            for static, given in zip(captured.inputs, tensors, strict=True):
                static.copy_(given, non_blocking=True)
            captured.graph.replay()
        except Exception as error:
            model.failed(error)
            raise
        captured.after.restore(model, since=captured.before)
        return captured.outputs


@contextlib.contextmanager
def _watching_optimizers(
    found: list[torch.optim.Optimizer],
    operators: CapturedOperators | None = None,
    known: dict[int, OptimizerHostState] | None = None,
) -> Iterator[None]:
    """Context that adds every optimizer that steps to ``found``, and its state before that to ``known``."""

    def begin(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if known is not None and id(optimizer) not in known:
            known[id(optimizer)] = OptimizerHostState(optimizer)
        if not any(optimizer is known for known in found):
            found.append(optimizer)
        if operators is not None:
            operators.is_optimizer = True

    def end(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if operators is not None:
            operators.is_optimizer = False

    hooks = register_optimizer_step_pre_hook(begin), register_optimizer_step_post_hook(end)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _plain(leaf: Any) -> Hashable:
    try:
        hash(leaf)
    except TypeError:
        raise TypeError(
            "A captured step takes tensors, and values that can be hashed (a graph is captured for each of them); got "
            f"a {type(leaf).__name__}"
        ) from None
    return type(leaf), leaf


def _detached(outputs: Any) -> Any:
    return compat.tree_map_only(Tensor, lambda tensor: tensor.detach(), outputs)


def _described(error: Exception) -> str:
    line = program_line_of(error)
    last = traceback.format_exception_only(error)[-1].strip().splitlines()[0].rstrip(".")
    return f"{last}. At {line}" if line is not None else last
