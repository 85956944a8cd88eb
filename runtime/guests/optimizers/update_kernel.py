"""Kernels that do an optimizer's step over flat shards, generated from the code of the optimizer.

    optimizer.step() over one run -> FX graph -> numbers, such as bias corrections -> Python, in float64
                                              -> elements                          -> Inductor, one kernel

The step is traced once for a flat tensor of any length. Runs whose groups have the same settings share a kernel, except
for the learning rate, which is an input. torch's fused kernels exist for five optimizers. A generated one reads and
writes each element of parameter, gradient and state once, for every optimizer that works element by element.

An optimizer made with ``capturable=True`` counts its steps on the device, and its learning rate may be a tensor there.
Its kernel computes the numbers itself. Python computes nothing then, so that a CUDA graph can repeat the step.

The trace is of the plain form of the step (``foreach=False, fused=False``). Its results are those of
``optimizer.step()``, up to the rounding of a kernel that keeps intermediate values in registers. The state stays where
it is: the kernel writes to the optimizer's own tensors.

A trace does not see everything that a step may depend on. Therefore settings, plain attributes, and plain variables
that the code of the step reads are part of the key of a kernel, and other objects are refused (:mod:`.constants`). What
is refused, the optimizer steps by itself. The generated code is compared with the optimizer's own step on small tensors
before it is used, by a copy that shares nothing with the optimizer that a step could change.

torch.compile traces optimizers likewise (https://pytorch.org/tutorials/recipes/compiling_optimizer.html), with the
numbers computed in float32 tensors on the device. Here Python computes them, as in a step that is not compiled.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

from ... import compat
from ...optim.kinds import is_of_torch, is_plain
from .constants import CHANGING, OF_ALL, OF_SCHEDULERS, CannotCompile, plain_attributes, plain_settings, settings

_LENGTH = 1 << 20
"""Length of the tensors that a step is traced with. The kernel takes any; the compiler tunes it for such a length."""
_TRIED = 1000
"""Length of the tensors that a kernel is tried with."""
_MOST = 3
"""With how many settings a group's step is compiled. If they change more often, it is no longer compiled."""

_RATES = itertools.count(1)
"""Learning rates of groups whose parameters are not stepped."""

Step = Callable[[torch.optim.Optimizer], Any]
aten = torch.ops.aten


class UpdateKernel:
    """The compiled step over a run.

    Args:
        numbers: ``(lr, *counters) -> numbers``. Advances the counters, 0-dimensional tensors in host memory.
        kernel: ``(numel, flat, gradient, scale, lr, *state, *numbers)``. Writes to ``flat`` and to the state.
        counters, tensors: Names of the state that each of them takes.
        takes_lr: Whether the kernel takes the learning rate, a tensor on the device. There are no numbers then.
    """

    def __init__(
        self,
        numbers: Callable[..., Sequence[Any]],
        kernel: Callable[..., Any],
        counters: Sequence[str],
        tensors: Sequence[str],
        takes_lr: bool,
    ) -> None:
        self._numbers, self._kernel, self._counters, self._tensors = numbers, kernel, counters, tensors
        self._takes_lr = takes_lr
        self._last: tuple[float, ...] = ()  # what the next two were computed of
        self._given: Sequence[Tensor] = ()
        self._counted: Sequence[float] = ()

    def __call__(self, flat: Tensor, gradient: Tensor, scale: Tensor | None, lr: Any, state: Mapping[str, Any]) -> None:
        """Step.

        Args:
            flat: Parameters, ``[numel]``.
            gradient: Their gradient, ``[numel]``.
            scale: What the gradient is multiplied by, 0-dimensional, in float32 on the same device. None: nothing, if
                the kernel was compiled without.
            lr: The learning rate.
            state: The optimizer's state for ``flat``.
        """
        inputs = [*(() if scale is None else (scale,)), *((lr,) if self._takes_lr else ())]
        inputs += (state[name] for name in self._tensors)
        self._kernel(flat.numel(), flat, gradient, *inputs, *self._count(lr, state))

    def _count(self, lr: Any, state: Mapping[str, Any]) -> Sequence[Tensor]:
        """Advance the counters in host memory. Return what Python computes of them and of the learning rate."""
        if self._takes_lr:
            return ()
        counters = [state[name] for name in self._counters]
        found = (float(lr), *(counter.item() for counter in counters))
        if found == self._last:  # as in the other runs of this step
            for counter, value in zip(counters, self._counted, strict=True):
                counter.fill_(value)
        else:
            numbers = self._numbers(torch.tensor(found[0], dtype=torch.float64, device="cpu"), *counters)
            self._given = torch.tensor(numbers, dtype=torch.float32, device="cpu").unbind() if numbers else ()
            self._last, self._counted = found, [counter.item() for counter in counters]
        return self._given


class UpdateKernels:
    """The compiled steps of one optimizer.

    Args:
        optimizer: Its class, attributes and groups are read.
        step: The optimizer's own step, without hooks.
        settings: Settings of Inductor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, step: Step, settings: Mapping[str, Any]) -> None:
        self._reference, self._step = weakref.ref(optimizer), step
        self._settings = {"size_asserts": False, **settings}  # sizes are known, and looking costs a quarter of a call
        self._kernels: dict[tuple[Any, ...], UpdateKernel | str] = {}
        self._seen: dict[int, set[str]] = {}
        self._now: dict[int, str] = {}

    @property
    def _optimizer(self) -> Any:
        optimizer = self._reference()
        assert optimizer is not None
        return optimizer

    @property
    def count(self) -> int:
        """How many kernels there are."""
        return sum(isinstance(kernel, UpdateKernel) for kernel in self._kernels.values())

    def begin_step(self) -> None:
        """Read settings and attributes again."""
        self._now.clear()

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
        if why := _refused(flat, group, state):
            return why
        kinds = tuple((name, value.dtype, value.device, value.ndim) for name, value in state.items())
        rate = group["lr"].dtype if takes_lr(flat, group) else None
        try:
            key = flat.dtype, flat.device, scaled, rate, kinds, self._constants_of(group)
        except CannotCompile as error:
            return str(error)
        if key not in self._kernels:
            try:
                self._kernels[key] = self._compile(flat, group, state, scaled)
            except CannotCompile as error:
                self._kernels[key] = str(error)
            except Exception as error:  # of Inductor, or of the optimizer, for tensors that it is tried with
                self._kernels[key] = f"compiling its step fails: {type(error).__name__}: {_first_line(error)}"
        return self._kernels[key]

    def _constants_of(self, group: Mapping[str, Any]) -> str:
        """Return what a trace over parameters of a group holds as constants, as text."""
        if (text := self._now.get(id(group))) is None:
            optimizer = self._optimizer
            constants = [plain_settings(group)]
            if not is_of_torch(optimizer):  # those read nothing else
                if held := [name for name in OF_SCHEDULERS if isinstance(group.get(name), Tensor)]:
                    raise CannotCompile(f"its setting {held[0]!r} is a {type(group[held[0]]).__name__}")
                constants += [plain_attributes(optimizer), *map(plain_settings, optimizer.param_groups)]
                if not all(isinstance(key, Tensor) for key in optimizer.state):
                    raise CannotCompile("the optimizer keeps state that belongs to no parameter")
            text = self._now[id(group)] = repr(constants)
        seen = self._seen.setdefault(id(group), set())
        if len(seen) <= _MOST:
            seen.add(text)
        if len(seen) > _MOST:
            raise CannotCompile("settings of its parameter group, other than the learning rate, keep changing")
        return text

    @torch.no_grad()
    def _compile(self, flat: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], scaled: bool) -> UpdateKernel:
        on_device, lr_is_input = bool(group.get("capturable")), takes_lr(flat, group)
        counters = tuple(name for name, value in state.items() if _is_counter(value) and not on_device)
        tensors = tuple(name for name in state if name not in counters)
        given = [*([] if lr_is_input else [_number()]), *(_like(state[name]) for name in counters)]
        elements = [
            _like(flat),
            _like(flat),
            *[_number(flat.device)] * scaled,
            *([_like(group["lr"])] if lr_is_input else []),
            *(_like(state[name]) for name in tensors),
        ]
        forms = {name: False for name in ("foreach", "fused") if name in group}
        if "capturable" in group:  # otherwise the host would read counters that are on the device
            forms["capturable"] = any(state[name].ndim == 0 for name in tensors)

        def run(*values: Tensor) -> None:
            counted, (param, gradient, *rest) = list(values[: len(given)]), values[len(given) :]
            if scaled:
                gradient = gradient * rest.pop(0)
            lr = rest.pop(0) if lr_is_input else counted.pop(0).item()
            held = dict(zip((*counters, *tensors), (*counted, *rest), strict=True))
            changed = forms | ({"lr": lr} if "lr" in group else {})
            param.requires_grad_().grad = gradient
            self._step_twin(group, changed, param, {name: held[name] for name in state})

        numbers, kernel = _split(_trace(run, *given, *elements), len(given))
        if lr_is_input and len(_inputs(kernel)) > len(elements):
            raise CannotCompile("it computes numbers on the host, although it is capturable")
        elements += [_number() for _ in _inputs(kernel)[len(elements) :]]
        # Traced again, because AOTAutograd refuses graphs with fake tensors of which a number was read.
        kernel = _trace(kernel, *elements)
        inputs = [node.meta["val"] for node in _inputs(kernel)]
        with kernel.graph.inserting_before(_inputs(kernel)[0]):
            kernel.graph.placeholder("numel")
        kernel.recompile()
        compiled = compat.compile_kernel(kernel, [inputs[0].numel(), *inputs], self._settings)
        found = UpdateKernel(numbers.forward, compiled, counters, tensors, lr_is_input)
        self._try(found, flat, group, state, scaled)
        return found

    def _step_twin(
        self, group: Mapping[str, Any], changed: Mapping[str, Any], param: Tensor, state: Mapping[str, Any]
    ) -> None:
        """Step over one parameter by a copy of the optimizer, which has copies of all groups.

        Args:
            group: The parameter's group.
            changed: Other settings for it.
            state: The parameter's state.

        Raises:
            CannotCompile: The step does something else than to write to the parameter and its state.
        """
        optimizer = self._optimizer
        twin: Any = object.__new__(type(optimizer))
        others = {"params": [], "lr": next(_RATES)}  # a step that reads them was traced with another number
        groups = [
            _copy(each) | ({"params": [param], **changed} if each is group else others)
            for each in optimizer.param_groups
        ]
        attributes = {name: value if name in OF_ALL else _copy(value) for name, value in vars(optimizer).items()}
        held: dict[Tensor, dict[str, Any]] = defaultdict(dict, {param: dict(state)})
        vars(twin).update(attributes, param_groups=groups, state=held)
        before = repr((plain_attributes(twin), [*map(settings, groups)]))
        self._step(twin)
        param.grad = None
        if repr((plain_attributes(twin), [*map(settings, groups)])) != before:
            raise CannotCompile("the optimizer keeps something outside of its state")
        if held.keys() - {param}:
            raise CannotCompile("the optimizer keeps state that belongs to no parameter")
        now = held[param]
        if now.keys() != state.keys() or any(now[name] is not state[name] for name in state):
            raise CannotCompile("the optimizer puts other tensors into its state")

    def _try(
        self, kernel: UpdateKernel, flat: Tensor, group: Mapping[str, Any], state: Mapping[str, Any], scaled: bool
    ) -> None:
        """Compare steps by the kernel with the optimizer's own, over small tensors.

        Raises:
            CannotCompile: They differ.
        """
        generator = torch.Generator().manual_seed(0)

        def draw(dtype: torch.dtype) -> Tensor:
            drawn = torch.randn(_TRIED, generator=generator, dtype=torch.float32, device="cpu")
            return drawn.to(flat.device, dtype)

        devices = [flat.device] if flat.device.type == "cuda" else []
        param = draw(flat.dtype).requires_grad_()
        own = {n: draw(torch.float32).abs().to(v.dtype) if v.ndim else v.clone() for n, v in state.items()}
        begun, mine = param.detach().clone(), param.detach().clone()
        held = {name: value.clone() for name, value in own.items()}
        scale = torch.tensor(0.7, dtype=torch.float32, device=flat.device) if scaled else None
        with torch.random.fork_rng(devices=devices), torch.compiler.set_stance("force_eager"):
            self._step_twin(group, {"params": []}, param, {})  # what remains to do if kernels step over all parameters
            for rate in (1e-2, 3e-3):
                lr = torch.full_like(group["lr"], rate) if takes_lr(flat, group) else rate
                gradient = draw(flat.dtype)
                param.grad = gradient if scale is None else gradient * scale
                self._step_twin(group, {"lr": lr} if "lr" in group else {}, param, own)
                kernel(mine, gradient, scale, lr, held)
        moved = _largest(param.detach() - begun)
        for right, got in ((param.detach(), mine), *((own[name], held[name]) for name in own)):
            # Two steps, each rounded otherwise: some units in the last place, of the largest value and of what changed.
            eps = torch.finfo(right.dtype).eps if right.is_floating_point() else 0.0
            allowed = 30 * eps * _largest(right) + 1e-3 * moved * (eps > 0 and right.shape == mine.shape)
            differs = not right.isnan().equal(got.isnan()) or _largest(right.float() - got.float()) > allowed
            if differs:
                raise CannotCompile("compiled, its step differs from the optimizer's: it depends on something else")


def _largest(value: Tensor) -> float:
    return value.float().nan_to_num(0.0).abs().max().item()  # the root of a variance is NaN for some random state


def takes_lr(flat: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether a compiled step takes the learning rate from the device, so that Python computes no numbers for it."""
    lr = group.get("lr")
    return bool(group.get("capturable")) and isinstance(lr, Tensor) and lr.ndim == 0 and lr.device == flat.device


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: each if name in CHANGING else _copy(each) for name, each in value.items()}
    return copy.deepcopy(value) if is_plain(value) else value


def _refused(flat: Tensor, group: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """Return why a step is not traced; "": it may be."""
    if flat.dtype == torch.float64 or flat.dtype.is_complex:
        return f"its parameters are in {flat.dtype}, and numbers for kernels in torch.float32"
    lr = group.get("lr", 0.0)
    is_tensor = isinstance(lr, Tensor) and (_is_counter(lr) or takes_lr(flat, group))
    if not isinstance(lr, (int, float)) and not is_tensor:
        return f"its learning rate is a {type(lr).__name__} that is not in host memory"
    for name, value in state.items():
        if type(value) is not Tensor:
            return f"its state {name!r} is a {type(value).__name__}, and not a tensor"
        if value.ndim and (value.shape != flat.shape or not value.is_contiguous()):
            return f"its state {name!r} has another shape"
        if group.get("capturable") and value.device != flat.device:
            return f"its state {name!r} is in host memory, although it is capturable"
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


def _number(device: torch.device | str = "cpu") -> Tensor:
    return torch.empty((), dtype=torch.float32, device=device)


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
        raise CannotCompile(f"its step cannot be traced: {type(error).__name__}: {_first_line(error)}") from None
    fakes: list[Any] = [node.meta["val"] for node in _inputs(graph)]
    if any(fake.fake_mode.shape_env.guards for fake in fakes):
        raise CannotCompile("its step depends on the number of elements")
    graph.graph.eliminate_dead_code(is_impure_node=_has_effects)
    return graph


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0].split(" (unhinted")[0]


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _has_effects(node: fx.Node) -> bool:
    return _writes(node) or node.op in ("placeholder", "output")


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
    copies = {node: kernel.node_copy(node) for node in inputs[given:]}
    numbers: dict[fx.Node, fx.Node] = {}  # further inputs of the kernel, and what the host passes
    last = copies[inputs[-1]]
    for node in traced.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise CannotCompile(f"{node.target} draws random numbers")
        if _is_number(node.meta.get("val")) and host.keys() >= set(node.all_input_nodes):
            host[node] = on_host.node_copy(node, host.__getitem__)
            continue
        for number in node.all_input_nodes:
            if number not in copies:
                value = host[number]
                if isinstance(number.meta.get("val"), Tensor):  # its value here: the host may write to it later
                    value = on_host.call_function(aten._local_scalar_dense.default, (value,))
                with kernel.inserting_after(last):
                    last = copies[number] = kernel.placeholder(f"number_{len(numbers)}")
                numbers[last] = value
        copies[node] = _copied(node, kernel, copies, numbers)
    on_host.output(list(numbers.values()))
    kernel.output(())
    return fx.GraphModule(traced, on_host), fx.GraphModule(traced, kernel)


def _is_number(value: Any) -> bool:
    return isinstance(value, (torch.SymFloat, torch.SymBool)) or (isinstance(value, Tensor) and _is_counter(value))


_SCALED = (
    *(aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor),
    *(aten.addcmul.default, aten.addcmul_.default, aten.addcdiv.default, aten.addcdiv_.default),
)
"""Operators that multiply their second argument by ``alpha`` or ``value``."""


def _copied(
    node: fx.Node, kernel: fx.Graph, copies: Mapping[fx.Node, fx.Node], numbers: Collection[fx.Node]
) -> fx.Node:
    """Copy a node to the kernel's graph, where numbers are tensors."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), copies.__getitem__)
    kwargs = dict(kwargs)
    for name in {"alpha", "value"} & kwargs.keys():  # x + alpha * y, x + value * y / z
        if kwargs[name] in numbers and node.target in _SCALED:
            args = (args[0], kernel.call_function(aten.mul.Tensor, (args[1], kwargs.pop(name))), *args[2:])
    kinds = {a.name: a for a in node.target._schema.arguments} if isinstance(node.target, OpOverload) else {}
    for name, value in {**dict(zip(kinds, args, strict=False)), **kwargs}.items():
        is_number = isinstance(value, fx.Node) and value in numbers
        if is_number and (str(kinds[name].type) != "Tensor" or kinds[name].alias_info is not None):
            raise CannotCompile(f"{node.target} takes or changes a number that is not the same in each step")
    if node.target is aten._local_scalar_dense.default:
        raise CannotCompile("it reads a number from the device")
    return kernel.create_node(node.op, node.target, args, kwargs, node.name)
