"""Workloads to plan: models of known shape, Hugging Face configurations, and models from a factory."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_compile.models import moe
from mfsdp_compile.models.gpt import Gpt, GptBlock, GptConfig
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig, layers_of_stage, parallelize
from mfsdp_compile.models.moe import MoeBlock, MoeConfig, MoeLlama
from mfsdp_compile.parallel.context_parallel import ContextParallel
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.nearest import did_you_mean
from mfsdp_compile.runtime.untrusted_files import read_json, safe_name, typed

Inputs = tuple[Sequence[Any], Mapping[str, Any]]


class Degrees(NamedTuple):
    """Numbers of ranks that divide a model in ways other than sharding its parameters.

    Args:
        expert: Ranks that divide experts.
        tensor: Ranks that divide all layers (tensor parallelism), except for experts.
        context: Ranks that divide sequences.
        pipeline: Ranks that divide layers among them: the stages of a pipeline.
        expert_tensor: Ranks that divide each expert (expert tensor parallelism).
    """

    expert: int = 1
    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    expert_tensor: int = 1

    @property
    def experts_apart(self) -> int:
        """Number of neighboring ranks that hold different parts of the experts."""
        return self.expert * self.expert_tensor

    @property
    def together(self) -> int:
        """Number of ranks that compute one batch together."""
        return self.tensor * self.context * self.pipeline

    def __str__(self) -> str:
        names = {
            "EP": self.expert,
            "ETP": self.expert_tensor,
            "TP": self.tensor,
            "CP": self.context,
            "PP": self.pipeline,
        }
        return ", ".join(f"{name} {size}" for name, size in names.items() if size > 1)


UNDIVIDED = Degrees()


@dataclass(frozen=True)
class ModelPart:
    """What a rank holds of a divided model, before sharding.

    Args:
        degrees: Degrees of division.
        experts: Process group of expert parallelism, if any.
        context: Division of sequences, if any.
        within_experts: Process group of expert tensor parallelism, if any.
        stage: Stage of the pipeline.
    """

    degrees: Degrees = UNDIVIDED
    experts: dist.ProcessGroup | None = None
    context: ContextParallel | None = None
    stage: int = 0
    within_experts: dist.ProcessGroup | None = None

    @property
    def is_last(self) -> bool:
        return self.stage == self.degrees.pipeline - 1


@dataclass(frozen=True)
class Divided:
    """How a model is divided in ways other than sharding.

    Args:
        by: Names of the :class:`Degrees` that the model supports.
        build: Builds this rank's part of the model, except for tensor parallelism. Called where tensors have no values.
        inputs: Returns the arguments of the part's forward, for a batch size and the length of whole sequences.
        parallelize: Divides the part over tensor-parallel ranks, in place.
        divide_experts: Makes DTensors over a mesh ``("ep", "etp")`` of the part's experts, in place. Needed for expert
            tensor parallelism.
        alike: For a number of stages, returns the number of the first stage that is like it, for each stage.
    """

    by: frozenset[str]
    build: Callable[[ModelPart], nn.Module]
    inputs: Callable[[ModelPart, int, int], Inputs] | None = None
    parallelize: Callable[[Any, DeviceMesh], nn.Module] | None = None
    alike: Callable[[int], Sequence[int]] | None = None
    divide_experts: Callable[[Any, DeviceMesh], nn.Module] | None = None


@dataclass(frozen=True)
class Workload:
    """A model, and what one rank computes with it in a step.

    Args:
        name: Name of the workload.
        build: Builds the model. Called where tensors have no values.
        unit_modules: See ``fsdp_unit_modules`` of :func:`~mfsdp_compile.fully_shard_model`.
        inputs: Returns the arguments of forward, ``(args, kwargs)``, for one rank's batch size and length.
        loss: Computes a scalar from the result of forward.
        batch, length: Number of sequences per rank, and tokens per sequence.
        dtype: Dtype that the model is built in.
        param_dtype: Dtype that it computes in; see :class:`~mfsdp_compile.MixedPrecisionPolicy`. None: ``dtype``.
        checkpoint: Activation checkpointing of units. ``"none"``. ``"full"``: save their inputs, and recompute
            everything else. ``"selective"``: also save attention and every second matrix product, which torchtitan
            calls selective op checkpointing.
        fp8_matmul, fp8_wgrad: Options of the backend: whether linear layers compute in float8.
        loss_chunks: Option of the backend: number of chunks that the loss is computed in.
        activation_offload: Option of the backend: which values saved for backward are in host memory meanwhile. True:
            all that are large enough. ``"auto"``: those for whose copies there is time.
        divided: How the model is divided by expert, tensor, context and pipeline parallelism. None: it cannot be.
    """

    name: str
    build: Callable[[], nn.Module]
    unit_modules: Any
    inputs: Callable[[int, int], Inputs]
    loss: Callable[[Any], Tensor] = lambda output: output
    batch: int = 1
    length: int = 2048
    dtype: torch.dtype = torch.bfloat16
    param_dtype: torch.dtype | None = None
    checkpoint: str = "none"
    fp8_matmul: str | None = None
    fp8_wgrad: bool = False
    loss_chunks: int | None = None
    activation_offload: bool | Literal["auto"] = False
    divided: Divided | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype that the model computes in."""
        return self.param_dtype or self.dtype


@dataclass(frozen=True)
class _Shape:
    model: type[nn.Module]
    unit: type[nn.Module]
    config: Any
    length: int = 8192
    source: str = field(default="", repr=False)


_LLAMA3 = "https://arxiv.org/abs/2407.21783, table 3"

SHAPES: Mapping[str, _Shape] = {
    "demo": _Shape(Llama, Block, LlamaConfig(), 128, "mfsdp demo"),
    "llama2-7b": _Shape(
        Llama, Block, LlamaConfig(32000, 4096, 32, 32, 32, 11008), 4096, "https://arxiv.org/abs/2307.09288"
    ),
    "llama3-8b": _Shape(Llama, Block, LlamaConfig(128256, 4096, 32, 32, 8, 14336, 500_000.0), 8192, _LLAMA3),
    "llama3-70b": _Shape(Llama, Block, LlamaConfig(128256, 8192, 80, 64, 8, 28672, 500_000.0), 8192, _LLAMA3),
    "llama3-405b": _Shape(Llama, Block, LlamaConfig(128256, 16384, 126, 128, 8, 53248, 500_000.0), 8192, _LLAMA3),
    "gpt3-175b": _Shape(Gpt, GptBlock, GptConfig(50257, 12288, 96, 96, 2048), 2048, "https://arxiv.org/abs/2005.14165"),
    "mixtral-8x7b": _Shape(
        MoeLlama,
        MoeBlock,
        MoeConfig(32000, 4096, 32, 32, 8, 14336, 1e6, experts=8, chosen=2),
        4096,
        "https://arxiv.org/abs/2401.04088",
    ),
    "deepseek-moe-16b": _Shape(
        MoeLlama,
        MoeBlock,
        MoeConfig(102400, 2048, 27, 16, 16, 1408, experts=64, chosen=6, shared=2),
        4096,
        "https://arxiv.org/abs/2401.06066; all layers with experts",
    ),
}
"""Known models by name. ``source`` says where their sizes come from."""

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
"""What names models on the Hugging Face Hub look like, and some folders."""

CHECKPOINT = ("none", "selective", "full")


def workload(
    model: str,
    *,
    batch: int = 1,
    length: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    checkpoint: str = "none",
    unit_modules: Any = None,
) -> Workload:
    """Return the workload for an argument of ``mfsdp plan --model``.

    Args:
        model: One of these: a name in :data:`SHAPES`; a folder or file with a Hugging Face
            configuration, or the Hub's name of a model whose configuration is in the local cache, after ``hf:`` or, if
            it is a folder or has the form ``owner/name``, alone; ``package.module:name``. Configurations may be of a
            language model (including encoder-decoder models) or an image classifier. ``package.module:name`` is a
            function that returns a model, which takes tokens and targets and returns a loss, or a :class:`Workload`
            with its own inputs and loss.
        batch, length: Sequences per rank, and their length. None: the model's default length, or 1 for images.
        dtype: Dtype that the model is built in.
        checkpoint: See :class:`Workload`.
        unit_modules: Overrides what is known about the model.

    Raises:
        ValueError: If there is no such model. The message lists the known ones.
    """
    if checkpoint not in CHECKPOINT:
        raise ValueError(f"checkpoint takes one of {', '.join(CHECKPOINT)}, got {checkpoint!r}")
    if batch < 1 or (length is not None and length < 1):
        raise ValueError(f"batch and length must be at least 1, got {batch} and {length}")
    given = {"batch": batch, "dtype": dtype, "checkpoint": checkpoint}
    name = model.removeprefix("hf:")
    if name in SHAPES:
        shape = SHAPES[name]
        found = Workload(name, lambda: shape.model(shape.config), [shape.unit], _tokens(shape.config.vocabulary))
        if shape.model is MoeLlama:
            found = replace(found, divided=divided_moe(shape.config))
        if shape.model is Llama:
            found = replace(found, divided=divided_llama(shape.config, dtype))
        found = replace(found, length=length or shape.length, **given)
    elif model.startswith("hf:") or _HUB_ID.fullmatch(model) or Path(model, "config.json").is_file():
        found = replace(_hugging_face(name, dtype), **given)
        found = replace(found, length=length or found.length)
    elif ":" in model:
        found = _from_factory(model, given, length)
    else:
        raise ValueError(
            f"unknown model {model!r}.{did_you_mean(model, SHAPES)} Known: {', '.join(SHAPES)}; or pass a folder with "
            "a Hugging Face config.json, the Hub's name of a model that is in the local cache (owner/name), or "
            "package.module:name of a function that builds one"
        )
    return replace(found, unit_modules=unit_modules) if unit_modules is not None else found


def divided_llama(config: LlamaConfig, dtype: torch.dtype) -> Divided:
    """Return how to divide a Llama by tensor, context and pipeline parallelism, in any combination.

    Between the layers that tensor-parallel ranks divide, activations are divided by positions.

    Args:
        dtype: Dtype of the activations between stages of a pipeline.
    """

    def build(part: ModelPart) -> nn.Module:
        attend = {"attend": part.context.attention} if part.context is not None else {}
        return Llama(config, **attend, stage=part.stage, stages=part.degrees.pipeline)

    def inputs(part: ModelPart, batch: int, length: int) -> Inputs:
        of_rank = length // part.degrees.context
        tokens = [torch.zeros(batch, of_rank, dtype=torch.int64) for _ in range(2)]
        positions = part.context.positions(length) if part.context is not None else torch.arange(length)
        shape = (batch, of_rank // part.degrees.tensor, config.width)
        first = tokens[0] if part.stage == 0 else torch.zeros(shape, dtype=dtype, requires_grad=True)
        return [first, *([tokens[1]] if part.is_last else [])], {"positions": positions}

    def alike(stages: int) -> list[int]:
        kinds = [
            (stage == 0, stage == stages - 1, len(layers_of_stage(config.layers, stage, stages)))
            for stage in range(stages)
        ]
        return [kinds.index(kind) for kind in kinds]

    parallel = functools.partial(parallelize, sequence=True)
    return Divided(frozenset({"tensor", "context", "pipeline"}), build, inputs, parallel, alike)


def divided_moe(config: MoeConfig) -> Divided:
    """Return how to divide a mixture-of-experts Llama by expert, expert tensor and tensor parallelism."""

    def build(part: ModelPart) -> nn.Module:
        return MoeLlama(config, part.experts, part.within_experts)

    def inputs(part: ModelPart, batch: int, length: int) -> Inputs:
        if length % part.degrees.tensor:
            raise ValueError(
                f"sequences of {length} tokens cannot be divided over {part.degrees.tensor} tensor-parallel ranks, "
                "each of which sends the tokens of as many positions to experts"
            )
        return _tokens(config.vocabulary)(batch, length)

    by = frozenset({"expert", "expert_tensor", "tensor"})
    return Divided(by, build, inputs, moe.parallelize, divide_experts=moe.divide_experts)


def _tokens(vocabulary: int) -> Callable[[int, int], Inputs]:
    def inputs(batch: int, length: int) -> Inputs:
        return [torch.zeros(batch, length, dtype=torch.int64) for _ in range(2)], {}

    return inputs


def _hugging_face(path: str, dtype: torch.dtype) -> Workload:
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"hf:{path} needs the package transformers: pip install 'mfsdp-compile[models]'") from error
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if _HUB_ID.fullmatch(path) and not file.is_file():
        file = _cached_config(path)
    if not file.is_file():
        raise ValueError(
            f"{path}: neither a file nor a folder with a config.json.{did_you_mean(path, SHAPES)} Models known by "
            f"name: {', '.join(SHAPES)}"
        )
    try:
        values = typed(read_json(file), dict, "it")
        kind = safe_name(values.get("model_type"), "model_type")
        names = [safe_name(name) for name in typed(values.get("architectures") or [], list, "architectures")]
        mapped = typed(values.get("auto_map") or {}, dict, "auto_map")
        code = [safe_name(mapped[kind]) for kind in mapped if kind.startswith(("AutoModel", "AutoConfig"))]
        title = safe_name(values.get("_name_or_path") or "", "_name_or_path")
        is_known = kind in transformers.CONFIG_MAPPING
        config = transformers.AutoConfig.for_model(**_without_code(values)) if is_known else None
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{file} is not a transformers configuration: {error}") from error
    named = getattr(transformers, names[0], None) if names else None
    if not (isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)):
        named = None
    if code and (named is None or config is None):
        raise ValueError(
            f"{file}: the model is defined by code that comes with it ({', '.join(sorted({*code}))}), which is never "
            "run from here. Read that code. If you trust it, import it in a module of yours, and pass "
            "package.module:name of a function that builds the model"
        )
    if config is None:
        raise ValueError(
            f"{file}: transformers {transformers.__version__} has no model of the type {kind!r}."
            f"{did_you_mean(kind, transformers.CONFIG_MAPPING)} Install a version that has it, or pass "
            "package.module:name of a function that builds the model"
        )
    config.use_cache = False
    takes_images = getattr(named, "main_input_name", "input_ids") == "pixel_values"
    if hasattr(config, "vision_config"):
        raise ValueError(
            f"{file}: where images go among tokens depends on the model, so inputs cannot be generated. Pass "
            "package.module:name of an mfsdp_compile.planning.Workload, which says what they are"
        )

    def build() -> nn.Module:
        if named is None:
            return _traceable(
                transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
            )
        return _traceable(named(config))

    def inputs(batch: int, length: int) -> Inputs:
        if takes_images:
            size = config.image_size
            height, width = (size, size) if isinstance(size, int) else size
            pixels = torch.zeros(batch, config.num_channels, height, width, dtype=dtype)
            return [], {"pixel_values": pixels, "labels": torch.zeros(batch, dtype=torch.int64)}
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        return [], {"input_ids": tokens, "labels": tokens}

    length = 1 if takes_images else min(getattr(config, "max_position_embeddings", None) or 2048, 8192)
    title = title or os.path.basename(os.path.abspath(path))
    return Workload(title, build, "auto", inputs, lambda output: output.loss, length=length)


def _without_code(values: Any) -> Any:
    """Return a configuration without what would make transformers run other code than its own.

    ``auto_map`` names modules that come with a model. ``attn_implementation`` and ``experts_implementation`` may name
    kernels on the Hugging Face Hub.
    """
    if isinstance(values, list):
        return [_without_code(value) for value in values]
    if not isinstance(values, dict):
        return values
    return {
        name: _without_code(value)
        for name, value in values.items()
        if name != "auto_map" and "_implementation" not in name
    }


def _cached_config(name: str) -> Path:
    """Return the configuration of a model of the Hub, from the cache of this machine."""
    from huggingface_hub import constants, try_to_load_from_cache  # transformers needs it, too

    if isinstance(found := try_to_load_from_cache(name, "config.json"), str):
        return Path(found)
    raise ValueError(
        f"{name}: no such folder, and its config.json is not in the cache of the Hugging Face Hub, "
        f"{constants.HF_HUB_CACHE}. Nothing is downloaded here. Get it once with `hf download {name} config.json` (no "
        f"weights are needed), or pass a folder with it.{did_you_mean(name.rpartition('/')[2].lower(), SHAPES)}"
    )


def _traceable(model: Any) -> nn.Module:
    """Remove two things from a transformers model's forward that torch.compile cannot trace.

    They are hooks for router logits and hidden states, which the model installs when it first runs, and a warning that
    the name of its class does not determine its loss.
    """
    with contextlib.suppress(ImportError):  # there are no such hooks before version 5
        from transformers.utils.output_capturing import install_all_output_capturing_hooks

        install_all_output_capturing_hooks(model)
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"
    return model


def _from_factory(path: str, given: Mapping[str, Any], length: int | None) -> Workload:
    module_name, _, attribute = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{path} cannot be imported: {error}") from error
    if isinstance(factory, Workload):
        return replace(factory, **given, length=length or factory.length)
    if not callable(factory):
        raise ValueError(f"{path} is a {type(factory).__name__}, not a function or a Workload")
    found = Workload(path, factory, "auto", _tokens(0), _sum_of_floats)
    return replace(found, **given, length=length or found.length)


def _sum_of_floats(output: Any) -> Tensor:
    """Return a loss for any output: the first scalar in it, or otherwise the sum of the means of its tensors."""
    floats = [t for t in compat.tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]
    scalars = [t for t in floats if t.dim() == 0]
    return scalars[0] if scalars else torch.stack([t.float().mean() for t in floats]).sum()
