"""Facts about the machine, as JSON: ``python -m facts RESULT.json``. Exits with 1 if there are GPUs that torch cannot
use.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

NEEDED = ("torch", "numpy", "rich", "pytest")
WELCOME = ("triton", "transformers", "megatron_fsdp", "torchtitan")


def facts() -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "modules": {name: find_spec(name) is not None for name in (*NEEDED, *WELCOME)},
        "driver": _nvidia_smi(),
        "torch": None,
        "gpus": [],
    }
    missing = [name for name in NEEDED if not found["modules"][name]]
    problems = [f"{name} is not installed" for name in missing]
    if "torch" not in missing:
        import torch

        found |= {"torch": torch.__version__, "cuda": torch.version.cuda}
        found["gpus"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        if torch.cuda.is_available():
            torch.ones(1, device="cuda").add(1).item()
            found |= {
                "nccl": ".".join(map(str, torch.cuda.nccl.version())),
                "capability": torch.cuda.get_device_capability(),
            }
    if found["driver"] and not found["gpus"]:
        problems.append(f"the driver has {found['driver'].splitlines()[0]}, but torch finds no GPU")
    return found | {"problems": problems}


def _nvidia_smi() -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi: {error}"


if __name__ == "__main__":
    made = facts()
    Path(sys.argv[1]).write_text(json.dumps(made, indent=1))
    print(json.dumps(made, indent=1))
    raise SystemExit(1 if made["problems"] else 0)
