"""A whole training step: forward, loss, backward, and the optimizer's step inside of the backward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.guests.capture.captured_step import CapturedStep
from mfsdp_compile.runtime.guests.optimizers.flat_step import flat_step_of
from mfsdp_compile.runtime.guests.optimizers.in_backward import StepInBackward
from mfsdp_compile.runtime.guests.optimizers.update_kernel import UpdateKernels
from mfsdp_compile.runtime.optim.extend import check, extend, is_extended, models_of_optimizer, uses_of_gradients
from mfsdp_compile.runtime.optim.kinds import is_wrapped, kind_of, why_not_flat

from .cuda_graphs import captured

LossFunction = Callable[..., Any]
"""Called as ``loss_fn(model, *batch)``. Returns the loss, or a tuple that begins with it."""


def compile_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fn: LossFunction | None = None,
    *,
    max_norm: float | None = None,
    accumulation: int = 1,
    divide_loss: bool = False,
    scaler: torch.amp.GradScaler | None = None,
    compile_optimizer: bool | None = None,
    cuda_graphs: bool = False,
    backend: str | None = "mfsdp",
    options: Mapping[str, Any] | None = None,
    **compile_arguments: Any,
) -> TrainStep:
    """Return a function that takes a whole training step: forward, loss, backward, the optimizer's step, ``zero_grad``.

    The optimizer steps over each bucket in the backward, as soon as the bucket's gradient has been reduced, and the
    gradient's memory is free at once: between steps, and at the peak, there are no gradients. Parameters have no
    ``.grad`` that could be looked at; write the step out (``loss.backward(); optimizer.step()``) where that is needed.
    Both ways have the same numbers, to the bit, and can alternate.

    With ``max_norm``, gradients are clipped before the step, which therefore follows the backward: the norm needs all
    of them. So does a ``scaler``, which skips the step if any of them is infinite. Optimizers that are not known to
    work element by element (those of torch are, others can be declared with
    :func:`~mfsdp_compile.declare_optimizer`) take their own ``step()`` once, after the backward. So do all whose
    ``step`` has hooks, or whose ``step`` or ``zero_grad`` was wrapped, and single buckets for reasons that
    :meth:`TrainStep.explain` lists.

    Args:
        model: A sharded model; not compiled before.
        optimizer: Optimizer over its parameters. One that was not extended is extended here, with ``flat=True`` if it
            is known to work element by element. If it was, it steps in backward only if that was done with
            ``flat=True``.
        loss_fn: See :data:`LossFunction`. None: the model returns the loss.
        max_norm: Largest norm of all gradients together; None: they are not clipped.
        accumulation: Number of microbatches of each step. Call :meth:`TrainStep.accumulate` for all but the last one.
            Gradients are summed, as in a loop of ``loss.backward()``. :meth:`TrainStep.finish` takes a step of fewer.
        divide_loss: Whether each loss is divided by ``accumulation`` before its backward, for gradients that are the
            mean of the microbatches'. False: losses are taken as they are, and ``loss_fn`` may divide them, for
            instance by the tokens of all microbatches. What is returned is not divided in either case.
        scaler: Scales losses, for training in float16; it unscales gradients before they are clipped, decides whether
            the step is taken, and is updated.
        compile_optimizer: Whether the optimizer's step is compiled, as kernels that read and write each element once
            (:mod:`mfsdp_compile.runtime.guests.optimizers.update_kernel`). Steps then differ from ``optimizer.step()``
            by rounding. None: where the model is compiled with Inductor, unless the optimizer was made with
            ``fused=True``.
        cuda_graphs: Whether steps are captured as CUDA graphs and replayed, one graph for each kind: a step, and a
            microbatch that is not its last (:func:`~mfsdp_compile.capture_step` says what can be captured). The model
            must have been sharded with ``cuda_graph_mode=True``, and the optimizer made with ``capturable=True`` if it
            has that argument. Call :meth:`TrainStep.reset` before ``destroy_process_group``.
        backend: Backend of ``torch.compile`` for ``loss_fn`` with the model; None: run it eagerly.
        options: Options of the backend.
        compile_arguments: Further arguments of ``torch.compile``.

    Raises:
        TypeError, ValueError: An argument is of another kind, the optimizer holds no parameters of a sharded model, or
            steps cannot be captured.
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
        kind = "compiled module" if isinstance(model, nn.Module) else type(model).__name__
        raise TypeError(f"compile_step takes a model as fully_shard_model returned it, and compiles it; got a {kind}.")
    if isinstance(accumulation, bool) or not isinstance(accumulation, int) or accumulation < 1:
        raise ValueError(f"compile_step takes accumulation as a number of microbatches, got {accumulation!r}")
    if max_norm is not None and not max_norm > 0:
        raise ValueError(f"compile_step takes max_norm above 0, or None for gradients as they are, got {max_norm!r}")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"compile_step takes scaler as a torch.amp.GradScaler, got a {type(scaler).__name__}")
    if cuda_graphs and scaler is not None and scaler.is_enabled():
        raise ValueError(
            "compile_step got cuda_graphs=True and a scaler, which reads on the host whether a step is skipped. Train "
            "in bfloat16 without a scaler, or leave cuda_graphs out."
        )
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)  # which does nothing
    return TrainStep(
        model,
        optimizer,
        loss_fn,
        max_norm,
        accumulation,
        divide_loss,
        scaler,
        compile_optimizer,
        cuda_graphs,
        backend,
        dict(options or {}),
        compile_arguments,
    )


class TrainStep:
    """A training step of one model and one optimizer; :func:`compile_step` makes it.

    Attributes:
        grad_norm: The norm of the last step's gradients before they were clipped, a 0-dimensional tensor. None without
            ``max_norm``, and before the first step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction | None,
        max_norm: float | None,
        accumulation: int,
        divide_loss: bool,
        scaler: torch.amp.GradScaler,
        compile_optimizer: bool | None,
        cuda_graphs: bool,
        backend: str | None,
        options: dict[str, Any],
        compile_arguments: dict[str, Any],
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._max_norm, self._accumulation, self._scaler = max_norm, accumulation, scaler
        self._divisor = accumulation if divide_loss else 1
        extended = isinstance(optimizer, torch.optim.Optimizer) and is_extended(optimizer)
        self._why_not_flat = f"the {type(optimizer).__name__} does not step over flat shards (flat=True)"
        if not extended:
            check(optimizer, "compile_step", flat=False)
        self._models = models_of_optimizer(optimizer)
        if not extended:
            self._why_not_flat = _why_not_flat(optimizer)
            extend(optimizer, flat=not self._why_not_flat, by_name=len(self._models) == 1)
        if max_norm is not None and any(b.plan.decoupled for model in self._models for b in model.buckets):
            raise ValueError(
                "compile_step clips parameter.grad, and this model's gradients are parameter.decoupled_grad "
                "(use_decoupled_grad=True). Leave max_norm out, and write steps out that clip."
            )
        flat = self._flat = flat_step_of(optimizer)
        self._in_backward = StepInBackward(optimizer, flat, self._models) if flat is not None else None
        is_fused = any(group.get("fused") for group in optimizer.param_groups)
        if compile_optimizer is None:
            with_inductor = backend == "mfsdp" and options.get("inner", "inductor") != "aot_eager"
            compile_optimizer = with_inductor and flat is not None and not is_fused
        elif compile_optimizer and scaler.is_enabled() and is_fused:
            raise ValueError(
                "compile_step got compile_optimizer=True and a scaler, which leaves gradients as they are for a fused "
                "optimizer. Make the optimizer without fused=True."
            )
        elif compile_optimizer and flat is None:
            raise ValueError(
                "compile_step compiles the step of an optimizer over flat shards, and the "
                f"{type(optimizer).__name__} steps over parameters: {self._why_not_flat}. Leave compile_optimizer "
                "out."
            )
        self._kernels: UpdateKernels | None = None
        if compile_optimizer:
            step = compat.step_without_hooks(type(optimizer))
            self._kernels = UpdateKernels(optimizer, step, options.get("inductor", {}))
        self._accumulated = 0
        self._accumulated_in = self._window
        self._loss_fn: LossFunction = loss_fn or (lambda model, *batch, **more: model(*batch, **more))
        if backend is not None:
            if self._steps_in_backward and backend == "mfsdp":
                options["step_in_backward"] = True
            self._loss_fn = torch.compile(self._loss_fn, backend=backend, options=options, **compile_arguments)
        self.grad_norm: Tensor | None = None
        self._microbatch: Callable[..., tuple[Any, Tensor | None]] = self._run
        self._graphs: CapturedStep | None = None
        if cuda_graphs:
            self._microbatch = self._graphs = self._captured()

    def _captured(self) -> CapturedStep:
        if len(self._models) > 1:
            raise ValueError(
                f"compile_step captures steps of one model (cuda_graphs=True), and the optimizer steps "
                f"{len(self._models)}. Leave cuda_graphs out."
            )
        return captured(self._model, self._run, "compile_step", "compile_step")

    @property
    def _steps_in_backward(self) -> bool:
        return self._in_backward is not None and self._max_norm is None and not self._scaler.is_enabled()

    def __call__(self, *batch: Any, **more: Any) -> Any:
        """Take a step: forward, backward, the optimizer's step and ``zero_grad``. A collective.

        Returns:
            What the loss function returned, detached. With ``cuda_graphs``, the next step overwrites tensors that have
            dimensions; a loss stays.

        Raises:
            RuntimeError: There were not as many calls of :meth:`accumulate` before as ``accumulation`` says.
        """
        if (count := self._microbatches) != self._accumulation - 1:
            raise RuntimeError(
                f"compile_step was told of {self._accumulation} microbatches (accumulation), and this call would be "
                f"number {count + 1}, the last one. Call step.accumulate(...) for all before the last, and step(...) "
                "for the last. For a step of fewer, as at the end of an epoch, call step.accumulate(...) for each, "
                "and then step.finish()."
            )
        with self._guarded():
            is_first = self._in_backward is None or self._in_backward.is_first
            found, self.grad_norm = self._kept(self._microbatch(True, is_first, batch, more))
            self._accumulated = 0
            return found

    def accumulate(self, *batch: Any, **more: Any) -> Any:
        """Run forward and backward of a microbatch that is not the step's last. A collective.

        Reductions that the strategy can defer are deferred. Returns what the loss function returned, detached.
        """
        if (count := self._microbatches) == self._accumulation - 1:
            raise RuntimeError(
                f"compile_step was told of {self._accumulation} microbatches (accumulation), and this is the last one: "
                "call step(...) for it, or pass a larger number to compile_step. To take a step without it, call "
                "step.finish() first."
            )
        with self._guarded():
            found, _ = self._kept(self._microbatch(False, False, batch, more))
            self._accumulated, self._accumulated_in = count + 1, self._window
            return found

    def finish(self) -> None:
        """Take a step of fewer microbatches than ``accumulation``, as at the end of an epoch, after all of them.

        A collective. Does nothing if there are none. With ``divide_loss``, gradients are the mean of these.
        """
        if not (count := self._microbatches):
            return
        with self._guarded():
            for model in self._models:
                model.grad_sync.finish_if_needed()
            if self._divisor > 1:
                self._multiply_gradients(self._divisor / count)
            is_first = self._in_backward is None or self._in_backward.is_first
            self.grad_norm = self._step(None if is_first else self._kernels)
            if self._in_backward is not None:
                self._in_backward.end_step()
            self._accumulated = 0

    @property
    def _window(self) -> tuple[int, ...]:
        """What changes if something else than a step of this object uses or drops the gradients of microbatches."""
        return uses_of_gradients(self._optimizer), *(model.grad_sync.drops for model in self._models)

    @property
    def _microbatches(self) -> int:
        """Number of microbatches whose gradients wait for the step."""
        return self._accumulated if self._accumulated_in == self._window else 0

    @torch.no_grad()
    def _multiply_gradients(self, by: float) -> None:
        held = [param for group in self._optimizer.param_groups for param in group["params"]]
        found = [param.grad for param in held if not hasattr(param, "mfsdp_handle")]  # of ignored_params
        found += [each for model in self._models for bucket in model.buckets for each in bucket.gradients]
        for gradient in found:
            if gradient is not None:
                gradient.mul_(by)

    def _kept(self, found: Any) -> Any:
        """Return what a microbatch has returned, with numbers in memory that the next replay does not write to."""
        if self._graphs is None:
            return found
        return compat.tree_map_only(Tensor, lambda value: value if value.ndim else value.clone(), found)

    def reset(self) -> None:
        """Start over: drop the gradients of microbatches whose step was not taken, and free the CUDA graphs.

        The next steps run as usual, and are captured again.
        """
        if self._microbatches:
            self._forget_microbatches()
        if self._graphs is not None:
            self._graphs.reset()

    def _run(
        self, is_last: bool, is_first: bool, batch: Sequence[Any], more: Mapping[str, Any]
    ) -> tuple[Any, Tensor | None]:
        """Run a microbatch.

        Args:
            is_last: Whether it is the last one of a step, which is then taken.
            is_first: Whether that is the first step.

        Returns:
            What the loss function returned, detached, and the norm of the gradients if they are clipped.
        """
        with self._syncing(is_last):
            found = self._loss_fn(self._model, *batch, **more)
            if not is_last:
                self._backward(found, None)
                return _detached(found), None
        with self._stepping() as ahead:
            with self._syncing(True):
                self._backward(found, ahead)
            if ahead is not None:
                ahead.end_backward()
            elif self._in_backward is not None:
                self._in_backward.note_sources()
            norm = self._step(None if is_first else self._kernels)
        if self._in_backward is not None:
            self._in_backward.end_step()
            if is_first and self._steps_in_backward:
                self._in_backward.release_gradients()
        return _detached(found), norm

    def explain(self) -> str:
        """Describe where buckets are stepped, in backward or after it, and which steps are compiled; and why not."""
        return "\n".join([self._explain_order(), *self._explain_kernels()])

    def _explain_order(self) -> str:
        if self._max_norm is not None:
            return f"all buckets are stepped after the backward: max_norm={self._max_norm} needs all gradients first"
        if self._scaler.is_enabled():
            return "all buckets are stepped after the backward: the scaler looks at all gradients first"
        if self._in_backward is None:
            return f"all buckets are stepped after the backward: {self._why_not_flat}"
        later = self._in_backward.later()
        lines = [f"{name}: after the backward; {why}" for name, why in later.items()]
        total = sum(bucket.plan.requires_grad for model in self._models for bucket in model.buckets)
        return "\n".join([f"{total - len(later)} of {total} buckets are stepped in backward", *lines])

    def _explain_kernels(self) -> list[str]:
        if self._kernels is None or self._flat is None:
            return []
        if self._in_backward is None or self._in_backward.is_first:
            return ["the optimizer's step is compiled after the first one, which creates its state"]
        if self._flat.has_hooks:
            return ["the optimizer's step is not compiled: code of the program runs before and after a step"]
        scaled, lines = self._max_norm is not None, []
        for bucket, runs in self._flat.runs_by_bucket().items():
            found = {self._flat.kernel_of(run, self._kernels, scaled) for run in runs}
            lines += [f"{bucket.plan.name}: not compiled; {why}" for why in found if isinstance(why, str)]
        count = self._kernels.count
        return [f"the optimizer's step is compiled, as {count} kernel{'s' * (count != 1)}", *lines]

    def _stepping(self) -> contextlib.AbstractContextManager[StepInBackward | None]:
        """Return the context of the last backward and of the step. It gives what steps in backward; None: nothing."""
        if self._in_backward is None or not self._steps_in_backward or self._in_backward.is_first:
            return contextlib.nullcontext()
        return self._in_backward.stepping(self._kernels)

    def _backward(self, found: Any, ahead: StepInBackward | None) -> None:
        loss = found[0] if isinstance(found, (tuple, list)) else found
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise TypeError(
                "compile_step: the loss function returns the loss, a tensor that depends on the model's parameters, or "
                f"a tuple that begins with it; got {_described(loss)}."
            )
        loss = loss / self._divisor if self._divisor > 1 else loss
        loss = self._scaler.scale(loss)
        if ahead is not None and loss.grad_fn is not None:
            loss.grad_fn.register_prehook(lambda _: ahead.begin_backward())
        loss.backward()

    def _step(self, kernels: UpdateKernels | None) -> Tensor | None:
        """Clip gradients, step and zero gradients. Return the norm that gradients had, if they are clipped."""
        norm, scale = None, None
        if self._flat is not None and self._flat.has_hooks:
            kernels = None  # code of the program sees gradients that were clipped
        if self._max_norm is not None:
            self._scaler.unscale_(self._optimizer)
            params = [param for group in self._optimizer.param_groups for param in group["params"]]
            if kernels is not None:
                norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
                norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # kernels take no DTensor
                scale = (self._max_norm / (norm + 1e-6)).clamp(max=1.0)  # as clip_grad_norm_ does
            else:
                norm = torch.nn.utils.clip_grad_norm_(params, self._max_norm)
        with self._flat.compiled(kernels, scale) if self._flat is not None else contextlib.nullcontext():
            self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        return norm

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Run a microbatch inside. After an error, drop the gradients of the step, which then starts over."""
        try:
            yield
        except BaseException:
            self._forget_microbatches()
            raise

    def _forget_microbatches(self) -> None:
        self._accumulated = 0
        for model in self._models:
            model.zero_gradients(set_to_none=True, kept=None)

    @contextlib.contextmanager
    def _syncing(self, due: bool) -> Iterator[None]:
        settings = [model.grad_sync.settings for model in self._models]
        before = [each.override for each in settings]
        for each in settings:
            each.override = due
        try:
            yield
        finally:
            for each, override in zip(settings, before, strict=True):
                each.override = override


def _why_not_flat(optimizer: torch.optim.Optimizer) -> str:
    """Return why an optimizer is not stepped over flat shards unless the program asks for that; "": it is."""
    if is_wrapped(optimizer):
        return f"the program has put a function around step() of the {type(optimizer).__name__}"
    if kind_of(optimizer) == "blockwise":
        return f"a {type(optimizer).__name__} steps blocks, and is extended with flat=True by the program only"
    return why_not_flat(optimizer)


def _described(loss: Any) -> str:
    return "a tensor that needs no gradient" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"


def _detached(found: Any) -> Any:
    return compat.tree_map_only(Tensor, Tensor.detach, found)
