"""Inductor for graphs without collectives, and AOTAutograd around them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, detect_fake_mode

from .version import TORCH_VERSION

__all__ = [
    "CompiledPiece",
    "compile_around",
    "pieces_cache",
    "prepare_piece",
    "report_strides",
    "returned_strides",
    "symbols_of",
]


def compile_around(
    gm: fx.GraphModule, inputs: Sequence[Any], patches: dict[str, Any], inner: Callable[[fx.GraphModule], Any]
) -> Callable[..., Any]:
    """Run AOTAutograd as Inductor does, with its passes over joint graphs, and ``inner`` in place of Inductor.

    Args:
        inner: Takes a forward, backward or inference graph, and returns a function that takes a list of arguments.
    """
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    def compiles(module: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Any:
        function = inner(module)
        function._boxed_call = True  # it takes a list
        return function

    # Pieces write to nothing that forward saved. AOTAutograd caches results of Inductor only.
    with functorch_config.patch(donated_buffer=False, enable_autograd_cache=False):
        compiled: Any = compile_fx(gm, list(inputs), inner_compile=compiles, config_patches=patches)
        return compiled  # type: ignore[no-any-return]


_OF_WHOLE_GRAPHS: dict[str, Any] = {
    "custom_partitioner_fn": None,
    "joint_custom_pre_pass": None,
    "joint_custom_post_pass": None,
    "post_grad_custom_pre_pass": None,
    "post_grad_custom_post_pass": None,
}
"""Settings of Inductor that say nothing about pieces, and would make their cache keys those of one graph."""


@dataclass(eq=False)
class CompiledPiece:
    """A graph without collectives that Inductor compiles.

    Args:
        key: Its key in Inductor's cache, in memory and on the disk; None: it cannot be cached.
        strides: Strides of what it returns; None for what is no tensor.
        operators: Number of its operators.
        compiles: Compiles it, or loads it from the disk.

    Attributes:
        run: Takes a list of arguments, and returns a tuple. None: it was not compiled yet.
    """

    key: str | None
    strides: tuple[Any, ...]
    operators: int
    compiles: Callable[[], Callable[[list[Any]], Any]] | None
    run: Callable[[list[Any]], Any] | None = None

    def compile(self) -> None:
        if self.compiles is not None:
            self.run, self.compiles = self.compiles(), None


_pieces: dict[str, CompiledPiece] = {}
"""Pieces of this process, by key."""


def prepare_piece(module: fx.GraphModule, inputs: Sequence[Any], settings: dict[str, Any]) -> CompiledPiece:
    """Return what compiles a graph without collectives; the one that there is, if an equal graph was prepared.

    Args:
        module: The graph, which compiling changes. What it returns has the strides that its operators give it.
        inputs: Fake tensors and sizes.
        settings: Settings of Inductor.
    """
    import torch._inductor.config as config
    from torch._guards import tracing
    from torch._inductor.codecache import BypassFxGraphCache, FxGraphCache, compiled_fx_graph_hash
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = detect_fake_mode(inputs) or FakeTensorMode()
    kwargs: dict[str, Any] = {
        "static_input_idxs": (),
        "cudagraphs": BoxedBool(False),
        "is_backward": False,
        "is_inference": False,
    }

    @contextlib.contextmanager
    def as_pieces_are() -> Iterator[None]:
        with config.patch({**_OF_WHOLE_GRAPHS, **settings}), V.set_fake_mode(mode), tracing(TracingContext(mode)):
            yield

    def compiles() -> Callable[[list[Any]], Any]:
        try:
            with as_pieces_are():
                compiled: Any = compile_fx_inner(module, inputs, **kwargs)  # type: ignore[arg-type]
        except BaseException:
            _pieces.pop(key or "", None)  # the graph may be changed by halves
            raise
        run: Callable[[list[Any]], Any] = getattr(compiled, "current_callable", None) or compiled
        return run

    key = None
    with as_pieces_are():
        if not any(_is_symbolic(value) for value in inputs):  # else guards belong to the graph that is being compiled
            with contextlib.suppress(BypassFxGraphCache):
                FxGraphCache._check_can_cache(module, *((inputs, kwargs) if TORCH_VERSION >= (2, 13) else ()))
                key, _ = compiled_fx_graph_hash(module, inputs, kwargs, ())  # type: ignore[arg-type]
        if key in _pieces:
            return _pieces[key]
        with torch.no_grad(), mode:
            returns = fx.Interpreter(module).run(*inputs)
    strides = _strides_of(returns)
    output = module.graph.output_node()
    output.meta["user_visible_output_idxs"] = [i for i, its in enumerate(strides) if its is not None]
    output.meta["original_output_strides"] = list(strides)
    operators = sum(node.op == "call_function" for node in module.graph.nodes)
    piece = CompiledPiece(key, strides, operators, compiles)
    if key is not None:
        _pieces[key] = piece
    return piece


def pieces_cache() -> str | None:
    """Return the folder in which Inductor keeps compiled pieces for all processes; None: it keeps none."""
    import torch._inductor.config as config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir() if config.fx_graph_cache and not config.force_disable_caches else None


def report_strides(graph: fx.Graph) -> None:
    """Tell AOTAutograd the strides of what a graph returns, for which it then compiles the backward."""
    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None:
        context.output_strides.extend(returned_strides(graph))


def returned_strides(graph: fx.Graph) -> tuple[Any, ...]:
    """Return the strides of what a graph returns; None for what is no tensor."""
    returns: Any = graph.output_node().args[0]
    values = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in returns]
    return _strides_of(values)


def _strides_of(values: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(value.stride() if isinstance(value, torch.Tensor) else None for value in values)


def symbols_of(value: Any, alone: bool = False) -> list[Any]:
    """Return the symbols in the sizes, strides and offset of a tensor, or in a number.

    Args:
        alone: Only those that are a size or number by themselves, and not a part of an expression.
    """
    if isinstance(value, torch.Tensor):
        numbers = [*value.shape, *([] if alone else [*value.stride(), value.storage_offset()])]
    else:
        numbers = [value]
    expressions = [number.node.expr for number in numbers if isinstance(number, torch.SymInt)]
    if alone:
        found = [each for each in expressions if each.is_Symbol]
    else:
        found = [symbol for each in expressions for symbol in each.free_symbols]
    return sorted(set(found), key=str)


def _is_symbolic(value: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import has_free_symbols

    return bool(has_free_symbols(value))
