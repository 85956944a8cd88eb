"""Options that decide dtypes, and how gradients are combined."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy

from .. import compat
from ..formats import quantize
from ..formats.casts import Casts
from ..geometry.topology import Topology
from ..lanes.lane import Plugin, is_own
from ..nearest import names_arguments
from ..owner import ModuleRef


def _wire() -> Any:
    """The formats, which are loaded when a policy asks for one."""
    from ..guests.sums_in_order import wire

    return wire


def _is_format(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.itemsize < 2 and dtype in _wire().DTYPES


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of parameters, gradients, inputs and outputs.

    A parameter computes in ``param_dtype``, or in the dtype that it has when the model is sharded. Complex parameters
    keep their dtype, and their gradients are summed in it; they are sent as pairs of real numbers, gradients in
    ``grad_comm_dtype``.

    Args:
        main_params_dtype: Dtype of shards and optimizer state. The default, float32, trains a bfloat16 model with
            float32 weights: each gather casts to bfloat16 first. If the dtypes agree, nothing is stored twice.
            Parameters in float64 keep float64, because float32 would drop more than half of their digits. None: the
            dtype that each parameter has when the model is sharded.
        main_grads_dtype: Dtype in which gradients are accumulated over microbatches; ``parameter.grad`` shows the sum
            in the parameter's dtype. None: ``main_params_dtype``.
        grad_comm_dtype: Dtype in which gradients are reduced over ranks. ``"main"``: the dtype of shards. None:
            ``main_grads_dtype`` if given, else the dtype that parameters compute in. ``torch.float8_e4m3fn``,
            ``torch.float8_e5m2`` or ``torch.int8``, with ``grad_sum_dtype``: slices are sent in 8 bits, 128 values with
            a scale, about half of bfloat16's bytes, and each gradient is rounded to them once.
            ``torch.float4_e2m1fn_x2`` or ``torch.int4``: in 4 bits, 32 values with a scale, 28 % of its bytes. It costs
            accuracy.
        grad_sum_dtype: ``torch.float32``: each rank sends every other rank the slice of its gradients that the other
            one holds, in ``grad_comm_dtype`` (an all-to-all, as many bytes as a reduce-scatter), and adds what it
            receives in float32, in the order of ranks. Sums then depend on the ranks' values alone: not on the network,
            NCCL's algorithm or other buckets. After Megatron Core's
            ``reduce_scatter_with_fp32_accumulation``. None: the backend sums, in ``grad_comm_dtype``, unless
            :func:`~mfsdp_compile.deterministic` was called. Gradients that are sent in float64 are added in float64.
        grad_sum_within: With ``grad_sum_dtype``, sum in two levels: first over that many neighbors of the sharding
            ranks, then over their peers in other such groups. Each rank then sends ``1 / grad_sum_within`` of the bytes
            to other groups, in larger messages. ``"node"``: the ranks of a node, if the sharding ranks are on several
            ones (by torchrun's ``LOCAL_WORLD_SIZE``); bits of sums then depend on the ranks per node. Not for experts.
            None: one level.
        grad_outer_comm_dtype: Dtype in which sums are sent to be summed again: over HSDP's and HFSDP's outer ranks, and
            in the second of two levels. bfloat16, or one of the formats of 8 and 4 bits. None: they are not
            rounded.
        grad_comm_rounding: How the formats of 8 and 4 bits round: ``"nearest"``, or ``"stochastic"``, where errors
            cancel on average. Random numbers are made from the values, so equal gradients are rounded alike.
        param_comm_dtype: ``torch.float8_e4m3fn``: gather weights in float8, which is half of the bytes of bfloat16.
            ``torch.float4_e2m1fn_x2``: in float4, 28 % of its bytes, with ``param_comm_scaling="nvfp4"``. It costs
            accuracy. Modules get them dequantized, in the dtype that they compute in, so it works with every module.
            Each rank keeps what it sends beside its shards: one byte per element, or 9/16. Only with
            ``zero_dp_strategy="optim_grads_params"``. None: gather in the dtype that parameters compute in.
        param_comm_scaling: What shares a scale in quantized parameters: ``"rowwise"`` a row, ``"tensorwise"`` a matrix,
            ``"blockwise"`` a block of 128 x 128, ``"mxfp8"`` 32 neighbors in a row, ``"nvfp4"`` 16 neighbors in a row,
            with one more scale per matrix.
        param_comm_filter: ``(name, parameter) -> bool``, asked for each parameter of two or three dimensions: whether
            to quantize it. One of three dimensions is a stack of matrices, each with scales of its own. None: quantize
            matrices of units and stacked matrices of experts, but neither embeddings nor parameters outside of units,
            such as the output layer. A tied parameter is asked for once, with its first name.

    Raises:
        ValueError: A dtype is none of those allowed, ``param_comm_scaling`` is unknown or of another dtype, or a
            scaling or filter is given without ``param_comm_dtype``.
        TypeError: ``param_comm_filter`` is no function.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | Literal["main"] | None = None
    param_comm_dtype: torch.dtype | None = None
    param_comm_scaling: Literal["rowwise", "tensorwise", "blockwise", "mxfp8", "nvfp4"] = "rowwise"
    param_comm_filter: Callable[[str, Any], bool] | None = None
    param_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None
    grad_sum_dtype: torch.dtype | None = None
    grad_sum_within: int | Literal["node"] | None = None
    grad_outer_comm_dtype: torch.dtype | None = None
    grad_comm_rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        for name in ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype", "param_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if name == "grad_comm_dtype" and ((isinstance(dtype, str) and dtype == _MAIN) or _is_format(dtype)):
                continue
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                or_main = ", 'main'" if name == "grad_comm_dtype" else ""
                raise ValueError(f"{name} takes a floating-point torch.dtype{or_main} or None, got {dtype!r}")
        if self.grad_sum_dtype not in (None, torch.float32):
            raise ValueError(f"grad_sum_dtype takes torch.float32 or None, got {self.grad_sum_dtype!r}")
        sent = self.grad_comm_dtype
        if isinstance(sent, torch.dtype) and sent.itemsize < 2 and not _is_format(sent):
            raise ValueError(
                f"grad_comm_dtype={sent}: of the dtypes below 16 bits, gradients can be sent in "
                f"{', '.join(map(str, _wire().DTYPES))}"
            )
        within, outer = self.grad_sum_within, self.grad_outer_comm_dtype
        if not (within is None or within == "node" or (type(within) is int and within > 0)):
            raise ValueError(f"grad_sum_within takes a number of ranks, 'node' or None, got {within!r}")
        if outer is not None and outer not in _wire().OUTER_DTYPES:
            raise ValueError(
                f"grad_outer_comm_dtype takes {', '.join(map(str, _wire().OUTER_DTYPES))} or None, got {outer!r}"
            )
        if self.grad_comm_rounding not in ("nearest", "stochastic"):
            raise ValueError(f"grad_comm_rounding takes 'nearest' or 'stochastic', got {self.grad_comm_rounding!r}")
        for name in ("param_dtype", "output_dtype"):
            if (dtype := getattr(self, name)) is not None and dtype.itemsize < 2:
                raise ValueError(
                    f"{name} takes a dtype that modules compute in, of at least 16 bits, got {dtype}. To gather in "
                    "float8, use param_comm_dtype."
                )
        if not isinstance(self.cast_forward_inputs, bool):
            raise TypeError(f"cast_forward_inputs takes True or False, got {self.cast_forward_inputs!r}")
        override = self.param_dtype_override_fn
        if override is not None and not callable(override):
            raise TypeError(f"param_dtype_override_fn takes a function or None, got {override!r}")
        fp4 = quantize.dtype_of(quantize.NVFP4)
        if self.param_comm_dtype not in (None, quantize.DTYPE, fp4):
            raise ValueError(
                f"param_comm_dtype takes {quantize.DTYPE}, {fp4} or None, got {self.param_comm_dtype!r}. To gather and "
                "compute in another dtype than the model's, use param_dtype."
            )
        if self.param_comm_scaling not in quantize.SCALINGS:
            raise ValueError(
                f"param_comm_scaling takes one of {', '.join(quantize.SCALINGS)}, got {self.param_comm_scaling!r}"
            )
        if self.param_comm_filter is not None and not callable(self.param_comm_filter):
            raise TypeError(f"param_comm_filter takes a function or None, got {self.param_comm_filter!r}")
        if self.param_comm_dtype is None and (
            self.param_comm_filter is not None or self.param_comm_scaling != "rowwise"
        ):
            raise ValueError(
                "param_comm_scaling and param_comm_filter say how parameters are quantized, but param_comm_dtype is "
                f"None, so none is. Give param_comm_dtype={quantize.dtype_of(self.param_comm_scaling)}."
            )
        if self.param_comm_dtype not in (None, quantize.dtype_of(self.param_comm_scaling)):
            raise ValueError(
                f"param_comm_scaling={self.param_comm_scaling!r} is for {quantize.dtype_of(self.param_comm_scaling)}, "
                f"but param_comm_dtype is {self.param_comm_dtype}. Of the scalings, 'nvfp4' is for {fp4}, and the "
                f"others are for {quantize.DTYPE}."
            )

    def check_sums(self, sums_exactly: bool) -> None:
        """Raise ValueError if a setting is without effect, or for sums in the order of ranks, and there are none.

        Args:
            sums_exactly: Whether there are.
        """
        sent = (self.grad_comm_dtype, self.grad_outer_comm_dtype)
        if self.grad_comm_rounding != "nearest" and not any(map(_is_format, sent)):
            raise ValueError(
                f"grad_comm_rounding={self.grad_comm_rounding!r} is for gradients in 8 and 4 bits: give "
                "grad_comm_dtype or grad_outer_comm_dtype."
            )
        if sums_exactly:
            return
        if self.wire:
            raise ValueError(
                f"grad_comm_dtype={self.grad_comm_dtype} sends gradients in a format in which no sum would fit: add "
                "grad_sum_dtype=torch.float32, so that ranks sum what they receive in float32."
            )
        for name in ("grad_sum_within", "grad_outer_comm_dtype"):
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{name}={value} is for sums in the order of ranks: add grad_sum_dtype=torch.float32.")

    def sums_within(self, topology: Topology) -> int:
        """Return the number of neighbors that sum first; 0: there is one level.

        Raises:
            ValueError: They do not divide the ranks, or these do not shard.
        """
        within, ranks = self.grad_sum_within, topology.inner
        if within is None or (within == "node" and not topology.over_inner.shards):
            return 0
        if within == "node":
            if topology.in_order:
                raise ValueError(
                    "grad_sum_within='node' makes sums depend on the ranks per node, which deterministic() rules out: "
                    "give their number."
                )
            if (local := os.environ.get("LOCAL_WORLD_SIZE")) is None:
                raise ValueError(
                    "grad_sum_within='node' needs the number of ranks per node, LOCAL_WORLD_SIZE, which torchrun sets. "
                    "Set it, or give the number."
                )
            neighbors = int(local) // ranks.stride
            return neighbors if topology.has_levels_of(neighbors) else 0
        if not topology.over_inner.shards or ranks.size % within:
            raise ValueError(
                f"grad_sum_within={within} must divide the ranks that gradients are scattered over, but with "
                f"{topology} {'no gradient is' if not topology.over_inner.shards else f'these are {ranks.size}'}. "
                "Give a divisor, or leave it out."
            )
        return within if topology.has_levels_of(within) else 0

    def plugins(self, topology: Topology, within: bool = True) -> tuple[Plugin, ...]:
        """Return what changes lanes: sums in the order of ranks, if the policy or the program asks for them.

        Args:
            within: Whether neighbors may sum first.

        Raises:
            ValueError: A setting is without effect.
        """
        sums_exactly = self.grad_sum_dtype is not None or topology.in_order
        self.check_sums(sums_exactly)
        if not sums_exactly:
            return ()
        from ..guests.sums_in_order.stages import SumsInOrder

        return (SumsInOrder(self.wire, self.outer_wire, self.sums_within(topology) if within else 0),)

    def formatted(self, plugins: tuple[Plugin, ...]) -> tuple[Plugin, ...]:
        """Return plug-ins of a bucket that send gradients in this policy's formats.

        Raises:
            ValueError: There is a format, but no sums for which something could be sent in it.
        """
        sums = [plugin for plugin in plugins if is_own(plugin) and hasattr(plugin, "outer_wire")]
        if self.wire:
            self.check_sums(bool(sums))
        formats: dict[str, Any] = {"wire": self.wire, "outer_wire": self.outer_wire}
        return tuple(replace(cast(Any, plugin), **formats) if plugin in sums else plugin for plugin in plugins)

    def compute_dtype(self, name: str, param: Tensor) -> torch.dtype:
        """Dtype of a gathered parameter, or of the two numbers that a complex one consists of.

        Raises:
            ValueError: ``param_dtype_override_fn`` returned something else than is allowed.
        """
        if not param.dtype.is_floating_point:
            return param.dtype.to_real()
        if self.param_dtype_override_fn is not None:
            chosen = self.param_dtype_override_fn(param)  # type: ignore[arg-type]
            if chosen is not None and not (
                isinstance(chosen, torch.dtype) and chosen in (self.param_dtype, param.dtype)
            ):
                raise ValueError(
                    f"param_dtype_override_fn returned {chosen!r} for parameter {name!r}. It returns the dtype that "
                    f"the parameter has ({param.dtype}), to compute in it, or None for param_dtype "
                    f"({self.param_dtype}). For another dtype, give the module's class a policy of its own."
                )
            return chosen or self.param_dtype or param.dtype
        return self.param_dtype or param.dtype

    def main_dtype(self, model_dtype: torch.dtype, is_trained: bool = True) -> torch.dtype:
        """Dtype of shards and optimizer state, for a parameter that has ``model_dtype`` when the model is sharded.

        Frozen parameters in float8 keep their dtype: they are quantized. Parameters in float64 keep theirs unless 16
        bits are asked for: ``main_params_dtype=torch.float32`` is the default, and means at least float32.
        """
        is_quantized = not is_trained and model_dtype.itemsize < 2
        is_finer = model_dtype == torch.float64 and self.main_params_dtype == torch.float32
        if self.main_params_dtype is None or not model_dtype.is_floating_point or is_quantized or is_finer:
            return model_dtype.to_real()
        return self.main_params_dtype

    def grad_dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Dtype in which gradients are accumulated."""
        main = self.main_dtype(model_dtype)
        return main if model_dtype.is_complex else self.main_grads_dtype or main

    def comm_dtype(self, model_dtype: torch.dtype, compute_dtype: torch.dtype) -> torch.dtype:
        """Dtype in which gradients are packed, and reduced if they are not sent in a format."""
        if isinstance(self.grad_comm_dtype, str):
            return self.main_dtype(model_dtype)
        if self.wire:
            return self.main_grads_dtype or compute_dtype
        return self.grad_comm_dtype or self.main_grads_dtype or compute_dtype

    @property
    def wire(self) -> str:
        """Format in which gradients are sent; see :mod:`..guests.sums_in_order.wire`. "": none."""
        return self._format(self.grad_comm_dtype) if _is_format(self.grad_comm_dtype) else ""

    @property
    def outer_wire(self) -> str:
        """Format in which sums are sent. "": none."""
        return self._format(self.grad_outer_comm_dtype) if self.grad_outer_comm_dtype is not None else ""

    def _format(self, dtype: object) -> str:
        return _wire().name_of(dtype, _is_format(dtype) and self.grad_comm_rounding == "stochastic")

    def filled_from(self, other: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
        """Return this policy with another one's values for fields that are at their defaults, but for
        ``grad_comm_dtype``."""
        plain = MixedPrecisionPolicy()
        left = {name for name, value in vars(self).items() if value == getattr(plain, name)} - {"grad_comm_dtype"}
        return replace(self, **{name: getattr(other, name) for name in left})

    @property
    def casts(self) -> Casts:
        """What the forward of a unit, of the model, or of a module with a policy of its own casts."""
        return Casts(self.param_dtype if self.cast_forward_inputs else None, self.output_dtype)

    @staticmethod
    def of(value: object, argument: str) -> MixedPrecisionPolicy:
        """Check the type of a policy, and return it as ours. FSDP2's and Megatron-FSDP's have the same meaning as
        there.

        Raises:
            TypeError: The value is something else. Policies of torch's first FSDP have other fields.
        """
        if isinstance(value, MixedPrecisionPolicy):
            return value
        if isinstance(value, TorchPolicy):
            return MixedPrecisionPolicy(
                main_params_dtype=None,
                grad_comm_dtype=value.reduce_dtype or (_MAIN if compat.FSDP2_REDUCES_IN_OWN_DTYPE else None),
                param_dtype=value.param_dtype,
                output_dtype=value.output_dtype,
                cast_forward_inputs=value.cast_forward_inputs,
                param_dtype_override_fn=getattr(value, "param_dtype_override_fn", None),  # after torch 2.13
            )
        if all(hasattr(value, name) for name in _MEGATRONS):
            return MixedPrecisionPolicy(**{name: getattr(value, name) for name in _MEGATRONS})
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        hint = (
            "It has param_dtype (that modules compute in), main_params_dtype (of shards), main_grads_dtype (of sums "
            "over microbatches), grad_comm_dtype and param_comm_dtype (of gathers). FSDP2's MixedPrecisionPolicy is "
            "taken too."
        )
        if kind.startswith("torch.distributed.fsdp."):
            hint = (
                "Its param_dtype is ours, its reduce_dtype is grad_comm_dtype, and its cast_root_forward_inputs is "
                "cast_forward_inputs. Buffers are not cast: register them in the dtype that they are used in."
            )
        raise TypeError(f"{argument} takes an mfsdp_compile.MixedPrecisionPolicy, got a {kind}. {hint}")

    @property
    def as_fsdp2s(self) -> TorchPolicy:
        """FSDP2's policy of the same meaning: of one that :meth:`of` has taken, an equal one."""
        reduced = self.grad_comm_dtype
        more = {"param_dtype_override_fn": self.param_dtype_override_fn} if self.param_dtype_override_fn else {}
        return TorchPolicy(
            param_dtype=self.param_dtype,
            reduce_dtype=reduced if isinstance(reduced, torch.dtype) else None,
            output_dtype=self.output_dtype,
            cast_forward_inputs=self.cast_forward_inputs,
            **more,  # type: ignore[arg-type]
        )

    def __str__(self) -> str:
        """The dtypes that are not the default's."""
        defaults = MixedPrecisionPolicy()
        said = [
            f"{name}={str(value).removeprefix('torch.')}"
            for name, value in vars(self).items()
            if value != getattr(defaults, name) and not callable(value)
        ]
        said += [f"{name}=a function" for name, value in vars(self).items() if callable(value)]
        return ", ".join(said) or "the default"


_MAIN: Literal["main"] = "main"
_MEGATRONS = ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype")
"""Fields of Megatron-FSDP's class of this name."""

MixedPrecisionPolicy.__init__ = names_arguments(  # type: ignore[method-assign]
    "MixedPrecisionPolicy",
    {
        "reduce_dtype": "It is called grad_comm_dtype here. FSDP2's own policy, "
        "torch.distributed.fsdp.MixedPrecisionPolicy, can be passed as it is.",
        "buffer_dtype": "Buffers keep their dtype: change it before sharding.",
        "grad_reduce_in_fp32": "It is grad_comm_dtype=torch.float32 here.",
    },
)(MixedPrecisionPolicy.__init__)


PolicyKey: TypeAlias = "nn.Module | type[nn.Module] | str"
PolicyArgument: TypeAlias = (
    "MixedPrecisionPolicy | TorchPolicy | Mapping[PolicyKey | None, MixedPrecisionPolicy | TorchPolicy]"
)


@dataclass(frozen=True)
class Policies:
    """The policies of a model.

    Args:
        default: Policy of everything that has none of its own.
        own: Policies of modules, which are not kept alive, and of modules of classes, given as in
            ``fsdp_unit_modules``.
    """

    default: MixedPrecisionPolicy = MixedPrecisionPolicy()
    own: tuple[tuple[ModuleRef | type[nn.Module] | str, MixedPrecisionPolicy], ...] = ()

    @classmethod
    def of(cls, value: object, argument: str) -> Policies:
        """Return policies from one policy, or a mapping of classes to policies, with the default under None.

        Raises:
            TypeError: The value is something else, or a key is neither a class of modules, nor a string, nor None.
        """
        if not isinstance(value, Mapping):
            return cls(MixedPrecisionPolicy.of(value, argument))
        for key in value:
            is_class = isinstance(key, type) and issubclass(key, nn.Module)
            if not (key is None or isinstance(key, (str, nn.Module)) or is_class):
                raise TypeError(
                    f"{argument} maps modules, or classes of modules (or their names, or import paths), to policies, "
                    f"and None to the policy of everything else; got the key {key!r}"
                )
        policies = {key: MixedPrecisionPolicy.of(policy, f"{argument}[{_key(key)}]") for key, policy in value.items()}
        default = policies.pop(None, MixedPrecisionPolicy())
        its = ((ModuleRef(key) if isinstance(key, nn.Module) else key, policy) for key, policy in policies.items())
        return cls(default, tuple(its))

    def __iter__(self) -> Iterator[MixedPrecisionPolicy]:
        """Iterate over the default and the policies of classes. Buckets refer to them by position."""
        yield self.default
        yield from (policy for _, policy in self.own)

    def map(self, change: Callable[[MixedPrecisionPolicy], MixedPrecisionPolicy]) -> Policies:
        """Return the policies, each changed."""
        return Policies(change(self.default), tuple((key, change(policy)) for key, policy in self.own))

    def reducing_like(self, other: Policies) -> Policies:
        """Return these policies with ``grad_comm_dtype`` of others. Policies that only one has stay."""
        theirs = dict(other.own)
        own = tuple(
            (key, replace(policy, grad_comm_dtype=theirs.get(key, policy).grad_comm_dtype)) for key, policy in self.own
        )
        return Policies(replace(self.default, grad_comm_dtype=other.default.grad_comm_dtype), own)

    def __str__(self) -> str:
        if not self.own:
            return str(self.default)
        named = [f"{_key(key)}: {policy}" for key, policy in self.own]
        return "; ".join([*named, f"everything else: {self.default}"])


def _key(key: ModuleRef | PolicyKey | None) -> str:
    if isinstance(key, ModuleRef):
        key = key()
    if isinstance(key, nn.Module):
        return f"one {type(key).__name__}"
    return key.__qualname__ if isinstance(key, type) else repr(key)


class Scaling(str, Enum):
    """How gradients are combined over data-parallel ranks."""

    SUM_THEN_SCALE = "sum, then scale"
    AVERAGE_IN_COLLECTIVE = "average in the collective"
    SUM = "sum"


@dataclass(frozen=True)
class GradientPolicy:
    """Options for gradients.

    Args:
        scaling: How gradients are combined over data-parallel ranks: one of two ways to compute their mean, or their
            sum.
        decoupled: Whether gradients go to ``parameter.decoupled_grad``.
        report_nan: Whether to look for NaN in gradients before they are reduced.
        keeps_memory: Whether gradients stay at one address; see :class:`~..geometry.bucket_plan.BucketPlan`.
    """

    scaling: Scaling = Scaling.SUM_THEN_SCALE
    decoupled: bool = False
    report_nan: bool = False
    keeps_memory: bool = False
