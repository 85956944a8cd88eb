"""Seconds that one forward and backward is predicted to take, and those it takes, on a machine that was calibrated.

python -m step_prediction RESULT.json HARDWARE.json
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

import programs
import torch
from gpu_models import FAKE, MODES

from mfsdp_compile import fully_shard_model
from mfsdp_compile.models.llama import Block, Llama
from mfsdp_compile.passes.guests.solver.simulate import Stage
from mfsdp_compile.planning import forecast


def measure(rank: int, device: torch.device) -> dict[str, Any]:
    config, batch, length = programs.llama(small=FAKE)
    torch.manual_seed(0)
    model = fully_shard_model(Llama(config).to(device, torch.bfloat16), fsdp_unit_modules=[Block])
    calibrated = len(sys.argv) > 2 and Path(sys.argv[2]).is_file()
    options: dict[str, Any] = {"report": True, "inner": MODES[-1]} | ({"hardware": sys.argv[2]} if calibrated else {})
    call = torch.compile(model, backend="mfsdp", options=options)
    x, y = torch.randint(0, config.vocabulary, (2, batch, length), device=device)

    def compute() -> None:
        call(x, y).backward()
        model.zero_grad()

    compute()
    torch.cuda.synchronize()
    timeline = forecast.predicted(model)
    optimizer = sum(seconds for (stage, _), seconds in timeline.units.items() if stage is Stage.OPTIMIZER)
    measured = median(one.seconds for one in forecast.measure(model, compute))
    return {
        "predicted_s": timeline.seconds - optimizer,
        "measured_s": measured,
        "hardware": sys.argv[2] if calibrated else "not calibrated: the nearest machine that is known",
    }


if __name__ == "__main__":
    programs.run(measure)
