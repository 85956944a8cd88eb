"""Parameters as modules read them inside of a forward or backward.

``_Attach`` puts the gathered parameters in place of their anchors (:mod:`.reducing`), those of a bucket together.

What other code keeps of an earlier forward stays in memory: what a function's ``ctx``, a closure or a module holds. It
is a :class:`OutdatedParameter`, which only a backward may use, while the shards have the values that were gathered.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import compat
from ..formats.forms import Wrapper
from ..memory.bucket import Bucket, ParamHandle
from ..memory.redistribute import as_real
from .context import StepContext, as_parameters, unseen
from .gathered_parameter import GatheredParameter, as_gathered
from .gathering import Gathered, Gathering, Planes
from .reducing import Reducing
from .saved_tensors import SavedTensors, check_version


class OutdatedParameter(nn.Parameter):
    """A gathered parameter that something has kept since an earlier forward.

    A backward may be that of the earlier forward, so it may use it: it gets its class back until the next forward.
    Anything else is an error, and so is a backward after the shard has changed.
    """

    mfsdp_name: str
    mfsdp_was: tuple[type[Tensor], weakref.ref[Parameters], weakref.ref[Bucket], int] | None
    """Its class, and where it came from, with the version of the shard. None: it is in a wrapper, without values."""

    @staticmethod
    def replace(param: Tensor, parameters: Parameters, bucket: Bucket, version: int) -> None:
        """Turn a parameter into an outdated one, in place.

        Autograd may hold it, where Python's garbage collector does not look, so it does not keep the model alive.
        """
        vars(param)["mfsdp_was"] = type(param), weakref.ref(parameters), weakref.ref(bucket), version
        param.__class__ = OutdatedParameter

    @staticmethod
    def in_wrapper(name: str) -> Tensor:
        """Return what takes the place of the data inside an outdated parameter that wraps what was gathered."""
        outdated: Tensor = as_gathered(torch.empty(0), name)
        vars(outdated)["mfsdp_was"] = None
        outdated.__class__ = OutdatedParameter
        return outdated

    def _come_back(self) -> None:
        """Become what it was.

        Raises:
            RuntimeError: No backward runs, or the shard has changed.
        """
        if self.mfsdp_was is not None and compat.in_backward():
            kind, parameters_of, bucket_of, version = self.mfsdp_was
            parameters, bucket = parameters_of(), bucket_of()
            if parameters is not None and bucket is not None:
                check_version(bucket, version)
                self.__class__ = kind  # type: ignore[assignment]
                parameters.hand_out_again(self, bucket, version)
                return
        raise RuntimeError(
            f"Parameter {self.mfsdp_name!r} was gathered for an earlier forward, and something still holds it (an "
            "attribute, a list, a cache): its values may be stale. Read it from its module in each forward, or keep "
            "parameter.detach().clone() if values of then are what you want."
        )

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for each in compat.tree_leaves((args, kwargs)):
            if isinstance(each, OutdatedParameter):
                each._come_back()
        return func(*args, **(kwargs or {}))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OutdatedParameter({self.mfsdp_name!r})"


class Parameters:
    """The parameters of one model, for whoever reads them.

    Args:
        step: The running step.
        gathering: What is gathered.
        reducing: Where gradients go.
        saved: Hooks on saved tensors, which are active from the first read of a window on.
    """

    def __init__(self, step: StepContext, gathering: Gathering, reducing: Reducing, saved: SavedTensors) -> None:
        self._step = step
        self._gathering = gathering
        self._reducing = reducing
        self._saved = saved
        self._lent = frozenset(
            bucket
            for bucket in gathering.unit_of
            if any(compat.transformer_engine.is_layer(type(module)) for _, module, _ in bucket.holders())
        )
        self._handed_out: list[tuple[weakref.ref[Tensor], Bucket, int]] = []  # with the version of the shard
        self._handed_out_wrapped: list[tuple[weakref.ref[Tensor], Wrapper, str]] = []

    def read(self, bucket: Bucket, index: int) -> Tensor:
        """Return a full parameter, connected to its shard by autograd if gradients are recorded.

        A frozen one is never connected, so that nothing computes or reduces its gradient.
        """
        state = self._gather_to_read(bucket)
        if not (bucket.trains[index] and torch.is_grad_enabled()):
            ordinary = bucket.wrappers[index] is None and bucket.extension is None
            return (self._plain if ordinary else self._wrapped)(bucket, state, index)
        param = (state.attached or self._attach(bucket, state))[index]
        if param is None:
            return self._attach_again(bucket, state, index)
        state.attached[index] = None
        return param

    def _gather_to_read(self, bucket: Bucket) -> Gathered:
        if not self._saved.hooked_at and self._step.depth:
            self._saved.hook()
        if in_backward := compat.backward_id() != -1:
            self._step.owner.grad_sync.enter_backward()  # its end releases what is gathered here
        state = self._gathering.gather(bucket, Planes.BOTH if in_backward else Planes.ROWS)  # recomputed: both are used
        self._gathering.last_read = state.unit
        return state

    def read_apart(self, handle: ParamHandle) -> Tensor:
        """Like :meth:`read`, for code that another compiler has made: the same tensor while the bucket stays gathered.

        Its storage holds nothing else, although it lies in the bucket: operators with branches refuse operands that
        share storage.
        """
        bucket, index = handle.bucket, handle.index
        state, trains = self._gather_to_read(bucket), bucket.trains[index]
        if self._step.depth and not (state.unit.is_root or compat.in_backward()):
            self._gathering.states.ran(state.unit, completely=True)  # its forward may be a part of the compiled code
        if (index, trains) not in state.apart:
            param = self._apart(bucket, state, index, trains)
            state.apart[index, trains] = param, param._version
        return state.apart[index, trains][0]

    @unseen
    @as_parameters
    def _apart(self, bucket: Bucket, state: Gathered, index: int, trains: bool) -> Tensor:
        param = compat.apart(self._presented(bucket, state, index))
        if address := compat.storage_address(param):
            self._gathering.by_storage[address] = bucket
        if trains:
            with torch.enable_grad():  # guards expect the same outside of a context that the code enters
                (param,) = _Attach.apply([param], self._reducing.anchors(bucket).params[index])
        return self._given(bucket, index, param)

    @unseen
    @as_parameters
    def _plain(self, bucket: Bucket, state: Gathered, index: int) -> Tensor:
        """Return a parameter without history."""
        assert state.full is not None
        return self._given(bucket, index, self._presented(bucket, state, index))

    @unseen
    def _wrapped(self, bucket: Bucket, state: Gathered, index: int) -> Tensor:
        """Return a parameter without history that wraps what was gathered.

        Unlike an ordinary one, it is a tensor of inference mode there: views of others, which its class makes, would
        not be.
        """
        assert state.full is not None
        with compat.below_function_transforms(), torch.no_grad():
            return self._given(bucket, index, self._presented(bucket, state, index))

    @unseen
    def _attach(self, bucket: Bucket, state: Gathered) -> list[Tensor | None]:
        """Connect all parameters of a bucket at once: an autograd node for each would cost more than what it
        computes."""
        assert state.full is not None
        with compat.below_function_transforms():  # transforms see a parameter as a constant, like an ordinary one
            anchors = self._reducing.anchors(bucket).params
            with torch.no_grad():
                views = [self._presented(bucket, state, index) for index in range(len(anchors))]
            attached = _Attach.apply(views, *anchors)
        state.attached = [self._given(bucket, index, param) for index, param in enumerate(attached)]
        return state.attached

    @unseen
    def _attach_again(self, bucket: Bucket, state: Gathered, index: int) -> Tensor:
        """Connect a parameter that was read before.

        Every read has a gradient of its own. They are added in the order in which they arrive, as in the graph that
        AOTAutograd traces: floating-point sums are equal only in equal order.
        """
        assert state.full is not None
        with compat.below_function_transforms():
            with torch.no_grad():
                view = self._presented(bucket, state, index)
            (attached,) = _Attach.apply([view], self._reducing.anchors(bucket).params[index])
        return self._given(bucket, index, attached)

    def _presented(self, bucket: Bucket, state: Gathered, index: int) -> Tensor:
        """Return what modules get for a parameter of the gathered bucket, in the bucket's form, without history.

        An ordinary parameter is a view. Those of layers that lose their weights after forward are detached, so that
        they do not keep the bucket alive.
        """
        if bucket.extension is not None:
            assert state.made is not None
            return bucket.extension.present(bucket.plan, state.made)
        full = state.full
        assert full is not None
        view = bucket.whole_view(full, index)
        if (wrapper := bucket.wrappers[index]) is not None:
            maker, others = bucket.maker, tuple[Tensor, ...]()
            assert maker is not None
            if bucket.plan.has_planes and full.numel() > bucket.plan.held_numel:
                others = maker.view(bucket, maker.plane(bucket, full, columns=True), index)
            return wrapper.wrap(*maker.view(bucket, full, index), bucket.plan.compute_dtype, *others)
        return view.detach() if bucket in self._lent else view

    def _given(self, bucket: Bucket, index: int, param: Tensor) -> Tensor:
        """Record that a forward is given a parameter, which no later forward may use."""
        name = bucket.plan.layout.slots[index].name
        if bucket.extension is not None and type(param) is not Tensor:
            vars(param).update(_is_param=True, mfsdp_name=name)  # isinstance(module.weight, nn.Parameter) holds
            self.hand_out(param, bucket)
            return param
        if (wrapper := bucket.wrappers[index]) is not None:
            self._handed_out_wrapped.append((weakref.ref(param), wrapper, name))
            return param
        param.__class__ = GatheredParameter
        vars(param)["mfsdp_name"] = name
        self.hand_out(param, bucket)
        return param

    def hand_out(self, param: Tensor, bucket: Bucket) -> None:
        """Record that a forward was given this gathered parameter, which is outdated when the next one begins."""
        self._handed_out.append((weakref.ref(param), bucket, bucket.flat._version))

    def hand_out_again(self, param: Tensor, bucket: Bucket, version: int) -> None:
        """Record that a backward uses an outdated parameter, of this version of the shard, until the next forward."""
        self._handed_out.append((weakref.ref(param), bucket, version))

    def retire(self) -> None:
        """Make what earlier forwards were given outdated, because a forward begins."""
        for state in self._gathering.gathered.values():
            # Of a unit that was read outside of forwards. The next forward gets others.
            state.attached, state.apart = [], {}
        for kept, bucket, version in self._handed_out:
            if (param := kept()) is not None:
                OutdatedParameter.replace(param, self, bucket, version)
        self._handed_out.clear()
        for wrapped, wrapper, name in self._handed_out_wrapped:
            if (tensor := wrapped()) is not None:
                wrapper.retire(tensor, OutdatedParameter.in_wrapper(name))
        self._handed_out_wrapped.clear()

    def offer_gradient(self, handle: ParamHandle, param: Tensor) -> None:
        """Let the kernels of a layer write the gradient of a gathered parameter into the packed gradient."""
        if torch.is_grad_enabled():
            self._reducing.written(handle.bucket).offer(param, handle.index)


class _Attach(compat.Function):
    """Puts gathered parameters in place of their anchors."""

    @staticmethod
    def forward(ctx: Any, params: Sequence[Tensor], *anchors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(params)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # Anchors of complex parameters are real.
        return None, *(
            as_real(gradient) if gradient is not None and gradient.is_complex() else gradient for gradient in gradients
        )
