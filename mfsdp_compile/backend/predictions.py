"""Predictions of a step, for options that need them. Only those import this module, and with it the solver."""

from __future__ import annotations

from typing import Any

import torch

from mfsdp_compile.passes.guests.solver.costs import CostModel, Ring
from mfsdp_compile.passes.guests.solver.forecast import Prediction
from mfsdp_compile.passes.guests.solver.hardware import Hardware, hardware, known_gpu
from mfsdp_compile.passes.guests.solver.simulate import OptimizerCost
from mfsdp_compile.runtime import compat
from mfsdp_compile.runtime.nearest import did_you_mean

OPTIMIZERS = {
    optimizer.name: optimizer
    for optimizer in (
        OptimizerCost("adamw", 8, 28, 0),
        OptimizerCost("adamw-foreach", 8, 60, 4),  # one pass over memory per operation; a copy of the parameters
        OptimizerCost("adamw-8bit", 2, 18, 0),
        OptimizerCost("sgd", 0, 12, 0),
        OptimizerCost("sgd-momentum", 4, 20, 0),
        OptimizerCost("muon", 4, 20, 4),
    )
}


def optimizer_of(given: Any) -> OptimizerCost:
    """Return the cost of an optimizer by its name. Raises ValueError if it is unknown."""
    if isinstance(given, OptimizerCost):
        return given
    if given not in OPTIMIZERS:
        raise ValueError(
            f"options['optimizer'] takes one of {', '.join(OPTIMIZERS)}, or an OptimizerCost; got {given!r}."
            f"{did_you_mean(given, OPTIMIZERS)}"
        )
    return OPTIMIZERS[given]


def hardware_of(given: Any) -> Hardware:
    """Return a machine by its name or file. Raises TypeError or ValueError if there is none."""
    if isinstance(given, Hardware):
        return given
    if not isinstance(given, str):
        raise TypeError(f"options['hardware'] takes a name or a file, got {given!r}")
    return hardware(given)


def known_rings() -> dict[str, Ring]:
    """Return this rank's process groups by name: a model's own collectives may run over any of them."""
    return {name: Ring.of(ranks) for name, ranks in compat.known_groups().items()}


def default_hardware(device: torch.device) -> str:
    """Return the name of the known machine that is most like the current one."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "cpu"
    return known_gpu(torch.cuda.get_device_name(device)) or "h100-ib"


def prediction(
    machine: Hardware | None, optimizer: OptimizerCost | None, fused: bool, device: torch.device, holds_inputs: bool
) -> Prediction:
    """Return what predicts times and memory for tensors on ``device``.

    Args:
        machine: The machine; None: the known one that is most like the current one.
        optimizer: The optimizer; None: AdamW.
        fused: Whether Inductor compiles what runs.
        holds_inputs: Whether the process group keeps the input of a collective until the collective has been awaited.
    """
    costs = CostModel(machine or hardware(default_hardware(device)), fused, fused or holds_inputs, known_rings())
    return Prediction(costs, optimizer or OPTIMIZERS["adamw"])
