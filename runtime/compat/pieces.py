"""Inductor for graphs without collectives, and AOTAutograd around them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, detect_fake_mode

from .version import TORCH_VERSION

__all__ = [
    "CompiledCode",
    "CompiledPiece",
    "cache_entries",
    "compile_around",
    "fill_caches",
    "libraries_of_pieces",
    "picklable_operator",
    "pieces_cache",
    "prepare_piece",
    "report_strides",
    "returned_strides",
    "symbols_of",
]


def compile_around(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    patches: dict[str, Any],
    inner: Callable[[fx.GraphModule], Any],
    is_cached: bool,
) -> Callable[..., Any]:
    """Run AOTAutograd as Inductor does, with its passes over joint graphs, and ``inner`` in place of Inductor.

    Forward and backward are compiled at once: all pieces are known before the first one runs.

    Args:
        inner: Takes a forward, backward or inference graph, and returns what calls its pieces: a
            :class:`.output_code.PiecesOfGraph`.
        is_cached: Whether AOTAutograd may keep the results on the disk.
    """
    import torch._functorch.config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    from .output_code import PiecesCode

    def compiles(module: fx.GraphModule, example_inputs: Sequence[Any], **_: Any) -> Any:
        return PiecesCode(inner(module))

    settings = {
        "donated_buffer": False,  # pieces write to nothing that forward saved
        "enable_autograd_cache": is_cached and functorch_config.enable_autograd_cache,
        "bundled_autograd_cache": True,  # an entry is what ``inner`` has returned
        "force_non_lazy_backward_lowering": True,
    }
    with functorch_config.patch(settings):
        compiled: Any = compile_fx(gm, list(inputs), inner_compile=compiles, config_patches=patches)
        return compiled  # type: ignore[no-any-return]


_OF_WHOLE_GRAPHS: dict[str, Any] = {
    "custom_partitioner_fn": None,
    "joint_custom_pre_pass": None,
    "joint_custom_post_pass": None,
    "post_grad_custom_post_pass": None,
}
"""Settings of Inductor for whole graphs, which this package sets. A user's pass over graphs runs over pieces."""


@dataclass(frozen=True)
class _Entry:
    """Where Inductor keeps a compiled graph.

    Args:
        key: Its key.
        guards: What must be true of sizes; None: nothing.
    """

    key: str
    guards: str | None


@dataclass(frozen=True)
class CompiledCode:
    """What Inductor has made of a graph.

    Args:
        run, entry, launches: See :class:`CompiledPiece`.
    """

    run: Callable[[list[Any]], Any]
    entry: _Entry | None = None
    launches: int = 0

    @staticmethod
    def of(compiled: Any) -> CompiledCode:
        key = getattr(compiled, "_fx_graph_cache_key", None)
        entry = _Entry(key, compiled.guards_expr) if key is not None else None
        body = compiled.source_code.partition("def call(")[2].partition("def benchmark_compiled_module")[0]
        return CompiledCode(getattr(compiled, "current_callable", None) or compiled, entry, len(_LAUNCH.findall(body)))


_LAUNCH = re.compile(
    r"^ +(?:\w+(?:, \w+)* = )?(?:\w+\.run|cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.\w+\.\w+\.\w+)\(", re.MULTILINE
)
"""A launch in the code that Inductor generates."""


@dataclass(eq=False)
class CompiledPiece:
    """A graph without collectives that Inductor compiles.

    A pickle of it refers to the compiled code in Inductor's cache.

    Args:
        key: Its key, by which this process and others know it; None: it depends on sizes of the graph that it is in.
        strides: Strides of what it returns; None for what is no tensor.
        operators: Number of its operators.
        compiles: Compiles it, or loads it from the disk.

    Attributes:
        run: Takes a list of arguments, and returns a tuple. None: it was not compiled yet.
        entry: Where Inductor keeps it, once it was compiled.
        launches: Number of kernels and operators that a call launches, once it was compiled.
    """

    key: str | None
    strides: tuple[Any, ...]
    operators: int
    compiles: Callable[[], CompiledCode] | None
    run: Callable[[list[Any]], Any] | None = None
    entry: _Entry | None = None
    launches: int = 0

    def compile(self) -> None:
        if self.compiles is not None:
            code, self.compiles = self.compiles(), None
            self.run, self.entry, self.launches = code.run, code.entry, code.launches

    def __reduce__(self) -> Any:
        return _of_entry, (self.key, self.strides if self.key is not None else (), self.operators, self.entry)


_pieces: dict[str, CompiledPiece] = {}
"""Pieces of this process, by key."""


def prepare_piece(
    module: fx.GraphModule, inputs: Sequence[Any], settings: dict[str, Any], source: str
) -> CompiledPiece:
    """Return what compiles a graph without collectives; the one that there is, if an equal graph was prepared.

    Args:
        module: The graph, which compiling changes. What it returns has the strides that its operators give it.
        inputs: Fake tensors and sizes.
        settings: Settings of Inductor.
        source: Identifies the lowerings of operators, which are not a part of the graph, in cache keys.
    """
    from torch._inductor.codecache import BypassFxGraphCache, FxGraphCache, compiled_fx_graph_hash
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode, kwargs = detect_fake_mode(inputs) or FakeTensorMode(), _kwargs()

    def compiles() -> CompiledCode:
        try:
            with _as_pieces_are(mode, settings, source):
                compiled: Any = compile_fx_inner(module, inputs, **kwargs)  # type: ignore[arg-type]
        except BaseException:
            _pieces.pop(key or "", None)  # the graph may be changed by halves
            raise
        return CompiledCode.of(compiled)

    key = None
    with _as_pieces_are(mode, settings, source):
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


def _of_entry(key: str | None, strides: tuple[Any, ...], operators: int, entry: _Entry) -> CompiledPiece:
    """Return the piece that was pickled; the one that there is, if there is one."""
    if key in _pieces:
        return _pieces[key]

    def load() -> CompiledCode:
        from torch._functorch._aot_autograd.autograd_cache import FXGraphCacheMiss
        from torch._inductor.codecache import FxGraphCache
        from torch._inductor.output_code import CompiledFxGraphConstants
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        # Sizes were compared with the guards of the graph that the piece is in, which include those of the piece.
        constants, compares = CompiledFxGraphConstants(), lambda guards, _: guards == entry.guards
        with _as_pieces_are(FakeTensorMode(shape_env=ShapeEnv()), {}, ""):
            compiled, _ = FxGraphCache.load_with_key(entry.key, [], [], True, None, False, constants, compares)
            if compiled is None:
                raise FXGraphCacheMiss(f"Inductor's cache no longer has piece {entry.key}")
            compiled.post_compile([], constants, _kwargs())
        if key is not None:
            _pieces[key] = piece
        return replace(CompiledCode.of(compiled), entry=entry)

    piece = CompiledPiece(key, strides, operators, load)
    return piece


@contextlib.contextmanager
def _as_pieces_are(mode: Any, settings: dict[str, Any], source: str) -> Iterator[None]:
    """Context in which Inductor compiles or loads a piece, whatever it is a part of.

    Args:
        mode: Mode of its fake tensors.
        settings: Settings of Inductor.
        source: See :func:`prepare_piece`.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as config
    import torch.compiler.config as compiler_config
    from torch._guards import tracing
    from torch._inductor.virtualized import V

    with (
        config.patch({**_OF_WHOLE_GRAPHS, **settings}),
        compiler_config.patch(cache_key_tag=f"{compiler_config.cache_key_tag} {source}".strip()),
        functorch_config.patch(bundled_autograd_cache=False),  # pieces have entries of their own
        V.set_fake_mode(mode),
        tracing(TracingContext(mode)),
    ):
        yield


def _kwargs() -> dict[str, Any]:
    """Return how Inductor is called for a piece."""
    from torch._inductor.utils import BoxedBool

    return {"static_input_idxs": (), "cudagraphs": BoxedBool(False), "is_backward": False, "is_inference": False}


@dataclass(frozen=True)
class _Operator:
    """An operator, which cannot be pickled itself."""

    namespace: str
    name: str
    overload: str

    def __reduce__(self) -> Any:
        return _operator_of, (self.namespace, self.name, self.overload)


def _operator_of(namespace: str, name: str, overload: str) -> Any:
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def picklable_operator(value: Any) -> Any:
    """Return a value whose pickle is restored as ``value``, if it is an operator; else ``value``."""
    if not isinstance(value, torch._ops.OpOverload):
        return value
    return _Operator(value.namespace, value._opname, value._overloadname)


def pieces_cache() -> str | None:
    """Return the folder in which Inductor keeps compiled pieces for all processes; None: it keeps none."""
    import torch._inductor.config as config
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return cache_dir() if config.fx_graph_cache and not config.force_disable_caches else None


def cache_entries() -> tuple[bytes, int, int]:
    """Return the entries of torch's compile caches that this process has made or read, as bytes.

    ``torch.compiler.save_cache_artifacts`` appends what is new to what it returned before, and of that,
    ``load_cache_artifacts`` reads only the last part of each kind (torch 2.11 to 2.15). Here, everything is one part.

    Returns:
        The bytes, empty if there are none; numbers of graphs without collectives (pieces), and of AOTAutograd's graphs.
    """
    from torch.compiler._cache import CacheArtifactManager

    everything = list(CacheArtifactManager._seen_artifacts)
    with CacheArtifactManager.with_fresh_cache():
        for artifact in everything:
            CacheArtifactManager._new_cache_artifacts[type(artifact).type()].append(artifact)
        found = CacheArtifactManager.serialize()
    if found is None:
        return b"", 0, 0
    data, info = found
    return data, len(info.inductor_artifacts), len(info.aot_autograd_artifacts)


def fill_caches(entries: bytes) -> tuple[int, int]:
    """Write what :func:`cache_entries` has returned into the caches on the disk. Return the two numbers."""
    info = torch.compiler.load_cache_artifacts(entries)
    if info is None:
        raise ValueError("torch cannot read these entries of compile caches")
    return len(info.inductor_artifacts), len(info.aot_autograd_artifacts)


def libraries_of_pieces(folder: str) -> list[str]:
    """Return the libraries, compiled from C++ into the cache ``folder``, that this process has loaded.

    Entries of caches contain their source.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            mapped = {line.split(maxsplit=5)[5].rstrip("\n") for line in maps if line.count("/")}
    except OSError:  # not on Linux: they are compiled again
        return []
    folder = os.path.realpath(folder)
    return sorted(path for path in mapped if path.startswith(f"{folder}/") and path.endswith(".so"))


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
