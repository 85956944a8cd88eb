"""Kernels that do an optimizer's step over flat shards, generated from the code of the optimizer.

    optimizer.step() over one run -> FX graph -> numbers, such as bias corrections -> Python, in float64
                                              -> elements                          -> Inductor, one kernel

The step is traced once for a flat tensor of any length. Runs whose groups have the same settings share a kernel, except
for the learning rate, which is an input. torch's fused kernels exist for five optimizers. A generated one reads and
writes each element of parameter, gradient and state once, for every optimizer that works element by element.

The trace is of the plain form of the step (``foreach=False, fused=False``). Its results are those of
``optimizer.step()``, up to the rounding of a kernel that keeps intermediate values in registers. The state stays where
it is: the kernel writes to the optimizer's own tensors.

torch.compile traces optimizers likewise (https://pytorch.org/tutorials/recipes/compiling_optimizer.html), with the
numbers computed in float32 tensors on the device. Here Python computes them, as in a step that is not compiled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from .. import compat

_LENGTH = 1 << 20
"""Length of the tensors that a step is traced with. The kernel takes any; the compiler tunes it for such a length."""
_MOST = 3
"""With how many settings a group's step is compiled. If they change more often, it is no longer compiled."""
_NO_CONSTANTS = frozenset({"params", "param_names", "lr", "initial_lr"})

Step = Callable[[torch.optim.Optimizer], Any]
aten = torch.ops.aten


class CannotCompile(Exception):
    """A step cannot be compiled; says why."""


class UpdateKernel:
    """The compiled step over a run.

    Args:
        numbers: ``(lr, *counters) -> numbers``. Advances the counters, 0-dimensional tensors in host memory.
        kernel: ``(numel, flat, gradient, scale, *state, *numbers)``. Writes to ``flat`` and to the state.
        counters, tensors: Names of the state that each of them takes.
    """

    def __init__(
        self,
        numbers: Callable[..., Sequence[Any]],
        kernel: Callable[..., Any],
        counters: Sequence[str],
        tensors: Sequence[str],
    ) -> None:
        self._numbers, self._kernel, self._counters, self._tensors = numbers, kernel, counters, tensors
        self._last: tuple[float, ...] = ()  # what the next two were computed of
        self._given: Sequence[Tensor] = ()
        self._counted: Sequence[float] = ()

    def __call__(self, flat: Tensor, gradient: Tensor, scale: Tensor | None, lr: Any, state: Mapping[str, Any]) -> None:
        """Step.

        Args:
            flat: Parameters, ``[numel]``.
            gradient: Their gradient, ``[numel]``.
            scale: What the gradient is multiplied by, a 0-dimensional tensor on the same device. None: nothing, if the
                kernel was compiled without.
            lr: The learning rate.
            state: The optimizer's state for ``flat``.
        """
        counters = [state[name] for name in self._counters]
        found = (float(lr), *(counter.item() for counter in counters))
        if found == self._last:  # as in the other runs of this step
            for counter, value in zip(counters, self._counted, strict=True):
                counter.fill_(value)
        else:
            numbers = self._numbers(torch.tensor(found[0], dtype=torch.float64), *counters)
            self._given = torch.tensor(numbers, dtype=torch.float32).unbind() if numbers else ()
            self._last, self._counted = found, [counter.item() for counter in counters]
        scales = () if scale is None else (scale,)
        self._kernel(flat.numel(), flat, gradient, *scales, *(state[name] for name in self._tensors), *self._given)


class UpdateKernels:
    """The compiled steps of one optimizer.

    Args:
        optimizer: Its settings and class are read; it is not changed.
        step: The optimizer's own step, without hooks.
        settings: Settings of Inductor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, step: Step, settings: Mapping[str, Any]) -> None:
        self._optimizer, self._step = optimizer, step
        self._settings = {"size_asserts": False, **settings}  # sizes are known, and looking costs a quarter of a call
        self._kernels: dict[tuple[Any, ...], UpdateKernel | str] = {}
        self._constants: dict[int, list[tuple[dict[str, Any], str]]] = {}  # of each group, the last ones last

    def find(
        self, flat: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], scaled: bool
    ) -> UpdateKernel | str:
        """Return the kernel for a run, compiled if it is the first of its kind; a string says why there is none.

        Args:
            flat: The run's parameters, ``[numel]``.
            group: Its parameter group.
            state: The optimizer's state for ``flat``, after a first step.
            scaled: Whether gradients are multiplied by a tensor first.
        """
        constants = self.constants_of(group)
        if why := _refused(flat, group, state) or ("" if constants else _SETTINGS_CHANGE):
            return why
        kinds = tuple((name, value.dtype, value.device, value.ndim) for name, value in state.items())
        key = flat.dtype, flat.device, scaled, kinds, constants
        if key not in self._kernels:
            try:
                self._kernels[key] = self._compile(flat, group, state, scaled)
            except CannotCompile as why:
                self._kernels[key] = str(why)
        return self._kernels[key]

    @property
    def count(self) -> int:
        """How many kernels there are."""
        return sum(isinstance(kernel, UpdateKernel) for kernel in self._kernels.values())

    def constants_of(self, group: Mapping[str, Any]) -> str:
        """Return the settings of a group that a trace holds as constants; empty if they change too often."""
        known = self._constants.setdefault(id(group), [])
        if known and all(group.get(name) is value for name, value in known[-1][0].items()):
            return known[-1][1]
        found = {name: value for name, value in group.items() if name not in _NO_CONSTANTS}
        text = repr(sorted(found.items()))
        before = [each for each in known if each[1] != text]
        self._constants[id(group)] = [*before, (found, text)]
        return text if len(before) < _MOST else ""

    @torch.no_grad()
    def _compile(
        self,
        flat: Tensor,
        group: Mapping[str, Any],
        state: Mapping[str, Any],
        scaled: bool,
    ) -> UpdateKernel:
        counters = tuple(name for name, value in state.items() if _is_counter(value))
        tensors = tuple(name for name in state if name not in counters)
        given = [torch.empty(()), *(_like(state[name]) for name in counters)]
        elements = [_like(flat), _like(flat), *[torch.empty((), device=flat.device)] * scaled]
        elements += [_like(state[name]) for name in tensors]
        settings = dict(group)
        settings |= {name: False for name in ("foreach", "fused") if name in settings}
        if "capturable" in settings:  # otherwise the host would read counters that are on the device
            settings["capturable"] = any(state[name].ndim == 0 for name in tensors)

        def run(lr: Tensor, *values: Tensor) -> None:
            counted, (param, gradient, *rest) = values[: len(counters)], values[len(counters) :]
            if scaled:
                gradient = gradient * rest.pop(0)
            held = dict(zip((*counters, *tensors), (*counted, *rest), strict=True))
            param.grad = gradient
            self._step_twin({**settings, "lr": lr.item(), "params": [param]}, {name: held[name] for name in state})

        numbers, kernel = _split(_trace(run, *given, *elements), len(given))
        elements += [torch.empty(()) for _ in _inputs(kernel)[len(elements) :]]
        # Traced again, because AOTAutograd refuses graphs with fake tensors of which a number was read.
        kernel = _trace(kernel, *elements)
        inputs = [node.meta["val"] for node in _inputs(kernel)]
        with kernel.graph.inserting_before(_inputs(kernel)[0]):
            kernel.graph.placeholder("numel")
        kernel.recompile()
        compiled = compat.compile_with_inductor(kernel, [inputs[0].numel(), *inputs], self._settings)
        return UpdateKernel(numbers.forward, compiled, counters, tensors)

    def _step_twin(self, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Step over one parameter, by a copy of the optimizer.

        Raises:
            CannotCompile: The step does something else than to write to the parameter and its state.
        """
        twin: Any = object.__new__(type(self._optimizer))
        (param,) = group["params"]
        vars(twin).update(vars(self._optimizer), param_groups=[group], state=defaultdict(dict, {param: dict(state)}))
        owned, given = dict(vars(twin)), dict(group)
        self._step(twin)
        param.grad = None
        for what, now, before in (
            ("in itself", vars(twin), owned),
            ("in its groups", group, given),
            ("in other tensors of its state", twin.state[param], state),
        ):
            if now.keys() != before.keys() or any(now[name] is not before[name] for name in before):
                raise CannotCompile(f"the optimizer keeps something {what}")


_SETTINGS_CHANGE = "settings of its parameter group, other than the learning rate, keep changing"


def _refused(flat: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """Return why a step is not traced; "": it may be."""
    if flat.dtype == torch.float64 or flat.dtype.is_complex:
        return f"its parameters are in {flat.dtype}, and numbers for kernels in torch.float32"
    for name, value in group.items():
        if isinstance(value, Tensor) and (name != "lr" or not _is_counter(value)):
            return f"its setting {name!r} is a tensor"
    for name, value in state.items():
        if type(value) is not Tensor:
            return f"its state {name!r} is a {type(value).__name__}, and not a tensor"
        if value.ndim and (value.shape != flat.shape or not value.is_contiguous()):
            return f"its state {name!r} has another shape"
        if _is_counter(value) and value.dtype in (torch.int64, torch.float64):
            return f"its state {name!r} counts in {value.dtype}"  # a trace would take its number for a constant
    memory = [value.data_ptr() for value in (flat, *state.values()) if value.numel()]
    if flat.device.type != "cpu" and any(address % 16 for address in memory[:1]):
        return "its parameters do not begin at 16 bytes, as kernels that are compiled once for many runs assume"
    return "its state shares memory" if len(set(memory)) < len(memory) else ""


def _is_counter(value: Tensor) -> bool:
    return value.ndim == 0 and value.device.type == "cpu"


def _like(value: Tensor) -> Tensor:
    return torch.empty((_LENGTH,) * value.ndim, dtype=value.dtype, device=value.device)


# -- graphs -----------------------------------------------------------------------------------------------------------


def _trace(run: Callable[..., Any], *given: Tensor) -> fx.GraphModule:
    """Trace a function that writes to its arguments, for tensors of any length.

    Raises:
        CannotCompile: It cannot be traced.
    """
    try:
        graph = make_fx(run, tracing_mode="symbolic")(*given)
    except CannotCompile:
        raise
    except Exception as error:  # whatever an optimizer does that a trace cannot follow, such as a branch on values
        reason = str(error).split("\n")[0].split(" (unhinted")[0]
        raise CannotCompile(f"its step cannot be traced: {type(error).__name__}: {reason}") from None
    graph.graph.eliminate_dead_code(is_impure_node=_has_effects)
    return graph


def _has_effects(node: fx.Node) -> bool:
    writes = isinstance(node.target, OpOverload) and node.target._schema.is_mutable
    return writes or node.op in ("placeholder", "output")


def _inputs(graph: fx.GraphModule) -> Sequence[fx.Node]:
    return list(graph.graph.find_nodes(op="placeholder"))


def _split(traced: fx.GraphModule, given: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Separate what is computed of the first ``given`` inputs, which are numbers, from what is computed of elements.

    Returns:
        The two graphs; see :class:`UpdateKernel`.

    Raises:
        CannotCompile: A number is read from the device, or an operator takes it in a way that is not known here.
    """
    inputs = _inputs(traced)
    on_host, kernel = fx.Graph(), fx.Graph()
    host = {node: on_host.node_copy(node) for node in inputs[:given]}
    body = [node for node in traced.graph.nodes if node.op not in ("placeholder", "output")]
    for node in body:
        if _is_number(node.meta.get("val")) and host.keys() >= set(node.all_input_nodes):
            host[node] = on_host.node_copy(node, host.__getitem__)
    rest = [node for node in body if node not in host]
    read = list(dict.fromkeys(used for node in rest for used in node.all_input_nodes if used in host))
    on_host.output([host[node] for node in read])

    copies = {node: kernel.node_copy(node) for node in inputs[given:]} | {n: kernel.placeholder(n.name) for n in read}
    for node in rest:
        copies[node] = _copied(node, kernel, copies, read)
    kernel.output(())
    return fx.GraphModule(traced, on_host), fx.GraphModule(traced, kernel)


def _is_number(value: Any) -> bool:
    return isinstance(value, (torch.SymFloat, torch.SymBool)) or (isinstance(value, Tensor) and _is_counter(value))


def _copied(
    node: fx.Node, kernel: fx.Graph, copies: Mapping[fx.Node, fx.Node], numbers: Collection[fx.Node]
) -> fx.Node:
    """Copy a node to the kernel's graph, where numbers are tensors."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
    kwargs = dict(kwargs)
    for name in {"alpha", "value"} & kwargs.keys():  # x + alpha * y, x + value * y / z
        if node.kwargs[name] in numbers:
            args = (args[0], kernel.call_function(aten.mul.Tensor, (args[1], kwargs.pop(name))), *args[2:])
    kinds = {a.name: str(a.type) for a in node.target._schema.arguments} if isinstance(node.target, OpOverload) else {}
    left = {**dict(zip(kinds, args, strict=False)), **kwargs}
    taken = {copies[number] for number in numbers}
    if node.target is aten._local_scalar_dense.default or any(
        value in taken and kinds[name] != "Tensor" for name, value in left.items() if isinstance(value, fx.Node)
    ):
        raise CannotCompile(f"{node.target} takes or gives a number that changes from step to step")
    return kernel.create_node(node.op, node.target, args, kwargs, node.name)
