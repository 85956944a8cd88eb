"""What Dynamo traces, the graphs it hands over, and their fake tensors."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException, Unsupported
from torch._dynamo.utils import get_compilation_metrics as compilation_metrics
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import is_fake as _is_fake
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import _disable_current_modes

from .frames import collector_off, compiling
from .version import MODULE_FILE

__all__ = [
    "BackendCompilerFailed",
    "CompileSettings",
    "FakeTensor",
    "TorchDynamoException",
    "add_parameter_placeholder",
    "before_compiled_call",
    "called_by_guards",
    "check_before_tracing",
    "checkpoint_policy",
    "compilation_metrics",
    "compile_module",
    "concrete",
    "copy_graph_module",
    "detect_fake_mode",
    "dynamo_traces",
    "enters_context",
    "exit_of",
    "exits_context",
    "fake_mode",
    "fake_mode_of",
    "graph_argument",
    "graph_break",
    "graph_break_reasons",
    "guard_on_hooks",
    "hooks_of_all_modules",
    "is_caught_by_dynamo",
    "is_dynamo_disabled",
    "is_fake",
    "is_multiple",
    "module_settings",
    "on_compilation",
    "on_values",
    "python_only",
    "quiet",
    "read_not_traced",
    "requires_grad",
    "sets_state",
    "traces_for_others",
    "tracing_fake_mode",
    "uncompiled",
    "wants_full_tracebacks",
    "where_not_traceable",
    "without_collection",
    "without_compilation",
    "written",
]


_eval_frame: Any = torch._C._dynamo.eval_frame
_run_as_is = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)
_F = TypeVar("_F", bound=Callable[..., Any])
_DYNAMO_FOLDER = str(Path(torch.__file__).parent / "_dynamo")


def called_by_guards() -> bool:
    """Whether the property that calls this function is read by Dynamo's guards instead of a module's code.

    ``hasattr(self, "weight")`` in a forward creates such a guard.
    """
    reader = sys._getframe(2).f_code.co_filename
    return reader == MODULE_FILE or reader.startswith(_DYNAMO_FOLDER)


def graph_break(message: str) -> Exception:
    """Return an exception that makes Dynamo leave the current code to Python; with ``fullgraph``, it is an error."""
    return Unsupported(message, "mfsdp_compile: a sharded parameter")


_GLOBAL_HOOKS = (
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
)
"""Hooks of all modules of the process, in ``torch.nn.modules.module``."""


def hooks_of_all_modules() -> list[Any]:
    """Return the hooks that run for every module of the process."""
    return [hook for name in _GLOBAL_HOOKS for hook in vars(torch.nn.modules.module)[name].values()]


def guard_on_hooks() -> None:
    """Have the code that is being compiled compiled again when hooks of its modules are registered or removed.

    By default, Dynamo does not guard on modules that have no hooks
    (``torch._dynamo.config.skip_nnmodule_hook_guards``): hooks that are registered after the first call would not run.
    To be called by a backend.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard

    assumed = []
    for guard in TracingContext.get().guards_context.dynamo_guards:
        source = guard.originating_source
        is_global = getattr(source, "member", None) in _GLOBAL_HOOKS
        if is_global or guard.create_fn is GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT:
            assumed.append(source)
    install_guard(*(source.make_guard(GuardBuilder.SEQUENCE_LENGTH) for source in assumed))


def dynamo_traces() -> bool:
    """Whether this thread is compiling."""
    return TracingContext.try_get() is not None


def python_only(function: Any) -> Any:
    """Decorate ``function`` so that Dynamo does not compile it or its callees when eager code calls it.

    This is for calls between two graphs. Compiled code may still inline the function.
    """
    _eval_frame.set_code_exec_strategy(function.__code__, _run_as_is)
    return function


def read_not_traced(getter: Callable[[Any], Any]) -> property:
    """Return a property that Dynamo reads, again at each call of the compiled code, instead of tracing its getter.

    Dynamo takes a property for data if its getter is built in, as in extension modules. A dictionary's ``__getitem__``
    is, and it calls ``__missing__``.
    """
    return property(_Getter(getter).__getitem__)


class _Getter(dict[Any, Any]):
    def __init__(self, getter: Callable[[Any], Any]) -> None:
        super().__init__()
        self._getter = python_only(getter)

    def __missing__(self, instance: Any) -> Any:
        return self._getter(instance)


python_only(_Getter.__missing__)


@torch._dynamo.assume_constant_result
def traces_for_others() -> bool:
    """Whether Dynamo traces for another backend than this package's; a constant to the code that it traces."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    for attribute in ("_torchdynamo_orig_backend", "compiler_fn", "func"):
        while (inner := getattr(backend, attribute, None)) is not None:
            backend = inner
    return not str(getattr(backend, "__module__", "")).startswith("mfsdp_compile.")


def without_compilation() -> contextlib.AbstractContextManager[Any]:
    """Context in which compiled functions run their code as it is: what would have to be compiled again raises.

    Guards are not evaluated. They would fail in dispatch modes, though these change nothing about compiled code.
    """
    stance = torch.compiler.set_stance("fail_on_recompile", skip_guard_eval_unsafe=True)
    return cast("contextlib.AbstractContextManager[Any]", stance)


def is_dynamo_disabled(function: Any) -> bool:
    """Whether ``torch.compiler.disable`` was applied to a function."""
    return bool(getattr(function, "_torchdynamo_disable", False))


def graph_argument(placeholder: fx.Node) -> Any:
    """Return the real object that a placeholder of a Dynamo graph stands for; None for symbolic sizes."""
    argument = placeholder.meta.get("grapharg")
    return argument.example if argument is not None else None


def _storage_of(value: Tensor) -> int:
    """Return a number that identifies a storage; 0 for a value without one, inside a transform of ``torch.func``."""
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:
        return 0


def written(gm: fx.GraphModule, marks: Callable[[fx.Node], bool]) -> list[fx.Node]:
    """Find the nodes in a Dynamo graph and its regions that ``marks`` selects and whose value is written to.

    This includes in-place writes, and writes through a view or through ``.data``.
    """
    found: list[fx.Node] = []
    values = {node: node.meta.get("example_value") for node in gm.graph.nodes}
    storages: dict[int, fx.Node] = {}
    for node, value in values.items():
        if isinstance(value, Tensor) and marks(node):
            storages[_storage_of(value)] = node
    changed = [value for value in values.values() if isinstance(value, Tensor) and value._version]
    for node in gm.graph.nodes if storages else ():
        # Operators on lists do not increment the versions of fake tensors.
        name = getattr(node.target, "__name__", "")
        if node.op == "call_function" and name.startswith("_foreach_") and name.endswith("_") and node.args:
            changed += [values[each] for each in node.args[0] if isinstance(values.get(each), Tensor)]
    for value in changed:
        if (node := storages.get(_storage_of(value))) is not None and node not in found:
            found.append(node)
    for child in gm.children():
        if isinstance(child, fx.GraphModule):
            found += written(child, marks)
    return found


def requires_grad(placeholder: fx.Node) -> bool:
    """Whether a placeholder of a Dynamo graph requires a gradient. True if it stands for no real tensor."""
    argument = graph_argument(placeholder)
    return argument is None or bool(argument.requires_grad)


_EXITS: dict[Any, Any] = {
    torch.amp._enter_autocast: torch.amp._exit_autocast,  # type: ignore[attr-defined]
    torch.autograd.grad_mode._enter_inference_mode: torch.autograd.grad_mode._exit_inference_mode,
}


def enters_context(node: fx.Node) -> bool:
    """Whether a node of a Dynamo graph enters a context, such as autocast, for the nodes after it."""
    return node.target in _EXITS


def exits_context(node: fx.Node) -> fx.Node | None:
    """Return the node that entered the context that a node leaves; None if it leaves none."""
    leaves = node.op == "call_function" and node.target in _EXITS.values()
    return cast("fx.Node", node.args[0]) if leaves else None


def exit_of(node: fx.Node) -> Callable[..., Any]:
    """Return the function that leaves the context that a node enters. It takes the node's value."""
    return _EXITS[node.target]


def sets_state(node: fx.Node) -> bool:
    """Whether a node of a Dynamo graph changes a setting of torch for the nodes after it, other than by a context."""
    if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):
        return False
    name = getattr(node.target, "__name__", "")
    return name.startswith(("_set_", "set_", "_enter_", "_exit_")) or "nesting" in name


def copy_graph_module(gm: fx.GraphModule) -> fx.GraphModule:
    """Copy a graph module for passes to rewrite: Dynamo keeps reading its own graph after the backend has returned.

    Submodules that hold graphs (bodies of checkpoint regions and of control flow) are copied too.
    """
    mapping: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, mapping)
    for old, new in mapping.items():
        new.meta = dict(old.meta)
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]
    graph.output(output).meta = dict(gm.graph.output_node().meta)
    copied = _LazyGraphModule(gm, graph)  # the code of a large graph takes seconds to generate, and is not needed
    copied.meta.update(gm.meta)
    if hasattr(gm, "_param_name_to_source"):
        copied._param_name_to_source = gm._param_name_to_source  # type: ignore[assignment]
    for name, child in gm.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, copy_graph_module(child))
    return copied


def add_parameter_placeholder(graph: fx.Graph, name: str, like: fx.Node | None) -> fx.Node:
    """Add a placeholder that AOTAutograd treats as a parameter: static address, no guards.

    Args:
        like: Placeholder whose source the new one takes over. AOTAutograd and Inductor look up sources for messages.
            None if the placeholder stands for nothing in the user's program.
    """
    node = graph.placeholder(name)
    if like is None:
        node._dynamo_source = None  # type: ignore[attr-defined]
    elif hasattr(like, "_dynamo_source"):
        node._dynamo_source = like._dynamo_source  # type: ignore[attr-defined]
    node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
    return node


def concrete(size: Any) -> int:
    """Return a size as a number; for a symbolic size, the number it had when the graph was traced.

    A size that is no number, such as that of the lengths in a jagged tensor, counts as 1.
    """
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return hint if isinstance(hint, int) else 1


def is_multiple(size: Any, of: int) -> bool:
    """Whether a size is known to be a multiple of ``of``. For a symbolic size, asking does not specialize the graph."""
    if isinstance(size, int):
        return size % of == 0
    return statically_known_true(size % of == 0)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no values, because the model is planned or traced; also inside a transform of torch.func."""
    return isinstance(tensor, FakeTensor) or (type(tensor) in (Tensor, nn.Parameter) and _is_fake(tensor))


def on_values(function: _F) -> _F:
    """Decorate ``function`` so that its tensors have values (such as ranks) even while a model is only planned."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def checkpoint_policy(body: fx.GraphModule) -> Any:
    """Return the ``context_fn`` of a checkpoint, given the graph of what it recomputes; None if it has none."""
    return body.meta.get("_checkpoint_context_fn")


def fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors have shapes and devices, but no values."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def wants_full_tracebacks() -> bool:
    """Whether the user has asked Dynamo for the whole stack of errors."""
    return bool(torch._dynamo.config.verbose)


def where_not_traceable(error: Exception) -> Sequence[traceback.FrameSummary]:
    """Return the calls that led to the line at which Dynamo gave up; empty if unknown."""
    return getattr(error, "real_stack", None) or ()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Context that silences torch's warnings through ``logging``, which would be repeated for code that never runs."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Context in which no garbage is collected, neither by Python nor by Dynamo after each graph.

    Compiling makes millions of objects, nearly all of which are needed until its end. Looking for garbage among them
    takes up to a tenth of the time.
    """
    with collector_off(), torch._dynamo.config.patch(run_gc_after_compile=False):
        yield


def fake_mode_of(graph: fx.Graph) -> Any:
    """Return the mode of the fake tensors of a graph."""
    return detect_fake_mode([node.meta.get("val") for node in graph.nodes])


def tracing_fake_mode() -> Any:
    """Return the fake mode of the current compilation."""
    return TracingContext.get().fake_mode


def graph_break_reasons() -> Sequence[Any]:
    """Return all graph breaks since the last reset, each with ``reason``, ``user_stack`` and ``graph_break``."""
    from torch._dynamo.utils import graph_break_reasons

    return graph_break_reasons


@dataclass(frozen=True)
class CompileSettings:
    """How ``torch.compile`` was called.

    Args:
        backend: Name of the backend.
        fullgraph, dynamic: Its arguments.
        inductor: Settings of Inductor from ``mode`` and ``options``.
    """

    backend: str
    fullgraph: bool
    dynamic: bool | None
    inductor: dict[str, Any]


def module_settings(module: nn.Module) -> CompileSettings | None:
    """Return how a module was compiled, with ``module.compile()`` or ``torch.compile(module)``; None if it was not."""
    if isinstance(module, OptimizedModule):
        context = module.dynamo_ctx
    elif module._compiled_call_impl is not None:  # Dynamo keeps it in the closure of what it returns
        call = module._compiled_call_impl
        context = inspect.getclosurevars(call).nonlocals.get("self") if inspect.isfunction(call) else None
    else:
        return None
    if not hasattr(context, "callback"):
        return None
    backend = context.callback
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    name = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", type(backend).__name__)
    config = getattr(backend, "config", {}) if name == "inductor" else {}
    return CompileSettings(str(name), bool(context.fullgraph), context._dynamic, dict(config))


def compile_module(module: nn.Module, backend: str, settings: CompileSettings, options: dict[str, Any]) -> None:
    """Compile a module again, in place, with another backend, and its ``fullgraph`` and ``dynamic``."""
    kwargs: dict[str, Any] = {"fullgraph": settings.fullgraph, "dynamic": settings.dynamic, "options": options}
    if not isinstance(module, OptimizedModule):
        nn.Module.compile(module, backend=backend, **kwargs)
        return
    compiled = torch.compile(module._orig_mod, backend=backend, **kwargs)
    vars(module).update({name: vars(compiled)[name] for name in ("forward", "dynamo_ctx")})


def uncompiled(module: Any) -> Any:
    """Return the module that ``torch.compile`` was given; anything else unchanged."""
    while isinstance(module, OptimizedModule):
        module = module._orig_mod
    return module


def before_compiled_call(module: nn.Module, prepare: Callable[[], Any]) -> None:
    """Call ``prepare``, which may compile again, before the first call of the result of ``torch.compile(module)``."""
    compiled = vars(module)["forward"]

    def forward(*args: Any, **kwargs: Any) -> Any:
        prepare()
        if vars(module)["forward"] is forward:
            vars(module)["forward"] = compiled
        return vars(module)["forward"](*args, **kwargs)

    vars(module)["forward"] = forward


def on_compilation(begin: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Call functions when Dynamo begins and ends to trace and compile something, for any backend.

    ``torch._dynamo.reset()`` forgets them.
    """
    handler = torch._dynamo.callback_handler
    if begin not in handler.start_callbacks:
        handler.register_start_callback(begin)
        handler.register_end_callback(end)


def check_before_tracing(backend: Callable[..., Any], check: Callable[[Any, Any], Any]) -> None:
    """Call ``check(options, mode)`` with what ``torch.compile(backend=backend)`` was called with, as Dynamo begins.

    Dynamo says nothing there of whom it compiles for; the frame that does it knows.

    Raises:
        BackendCompilerFailed: ``check`` has raised, as if the backend had.
    """
    # No other frame is looked into: before Python 3.13, f_locals of a running function keeps its variables alive.
    frame = next(compiling(), None)
    found = frame.f_locals["compiler_fn"] if frame is not None else None
    compiler = getattr(found, "_torchdynamo_orig_backend", None)
    if getattr(compiler, "compiler_fn", None) is not backend:
        return  # it is for another backend
    given = compiler.kwargs  # type: ignore[union-attr]
    try:
        check(given.get("options"), given.get("mode"))
    except Exception as error:
        raise BackendCompilerFailed(backend, error, None).with_traceback(error.__traceback__) from None  # type: ignore[arg-type]


def is_caught_by_dynamo(error: BaseException) -> bool:
    """Whether Dynamo catches an error of a backend: it traces the frame again, or runs it without the backend."""
    if isinstance(error, BackendCompilerFailed):
        return bool(torch._dynamo.config.suppress_errors)
    if isinstance(error, TorchDynamoException) or type(error).__module__ == FakeTensor.__module__:
        return True
    return isinstance(error, Exception) and bool(torch._dynamo.config.suppress_errors)
