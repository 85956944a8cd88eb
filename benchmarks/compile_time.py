"""Time until a model is compiled, by system and number of layers, with cold caches and with warm ones.

    python benchmarks/compile_time.py --layers 8 32 80

Each figure is the first step (forward, backward, optimizer) of a new process, less the fastest of three later steps.
The second process of a system finds the compile caches that the first one filled. The model is Hugging Face's Llama.
The process is rank 0 of N, and the other ranks are fake: nothing that is measured communicates. The columns of phases
are torch's own metrics.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SYSTEMS = (
    "mfsdp",
    "mfsdp without regions",
    "mfsdp whole",
    "mfsdp by block",
    "FSDP2 by block",
    "torch.compile, unsharded",
)
PHASES = {
    "Dynamo": ("bytecode_tracing", "build_guards"),
    "AOTAutograd": ("aot_collect_metadata", "aot_trace_joint_graph", "Partitioner"),
    "Inductor": ("compile_fx_inner",),
}
"""torch's metrics of each phase that is shown. Compiling C++ is part of Inductor."""


def build(name: str, args: argparse.Namespace) -> tuple[nn.Module, Callable[..., Any]]:
    """Return a system's model, and what to call."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=args.width,
        intermediate_size=args.width * 4,
        num_hidden_layers=args.layers[0],
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    backend = args.inner
    if name.startswith("mfsdp"):
        from mfsdp_compile import fully_shard_model

        model = fully_shard_model(model, fsdp_unit_modules=[LlamaDecoderLayer])
        options = {"inner": "inductor_whole" if name == "mfsdp whole" else args.inner}
        if name == "mfsdp by block":
            for layer in model.modules():
                if isinstance(layer, LlamaDecoderLayer):
                    layer.compile(backend="mfsdp", fullgraph=True, options=options)
            return model, model
        if name.endswith("without regions"):
            options["regions"] = False
        return model, torch.compile(model, backend="mfsdp", fullgraph=True, options=options)
    if name == "FSDP2 by block":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (args.simulate,))
        for layer in model.model.layers:
            layer.compile(backend=backend, fullgraph=True)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, model
    return model, torch.compile(model, backend=backend, fullgraph=True)


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one system with one number of layers, in this process."""
    from torch._dynamo.utils import compilation_time_metrics
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.filterwarnings("ignore")
    dist.init_process_group("fake", rank=0, world_size=args.simulate, store=FakeStore())
    torch.set_num_threads(1)
    model, call = build(name, args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    tokens = torch.randint(0, 1024, (2, 64))

    def step() -> float:
        begun = time.perf_counter()
        loss: Tensor = call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - begun

    first = step()
    later = min(step() for _ in range(3))
    spent = {key: sum(seconds) for key, seconds in compilation_time_metrics.items()}
    phases = {phase: sum(spent.get(key, 0.0) for key in keys) for phase, keys in PHASES.items()}
    return {"first_s": first, "later_s": later, "compile_s": first - later, "phases_s": phases}


def run(name: str, layers: int, cache: str, args: argparse.Namespace) -> dict[str, Any] | str:
    """Measure in a new process. Return the result, or the end of what the process wrote if it failed."""
    command = [sys.executable, __file__, "--measure", name, "--layers", str(layers), "--inner", args.inner]
    command += ["--width", str(args.width), "--simulate", str(args.simulate)]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return json.loads(done.stdout.splitlines()[-1]) if not done.returncode else done.stderr[-800:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="*", default=[8, 32, 80])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--simulate", type=int, default=8, metavar="N", help="number of ranks; all but one are fake")
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--inner", default="inductor", choices=["inductor", "aot_eager", "inductor_whole"])
    parser.add_argument("--out", default="", help="a JSON file to write")
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args)))
        return
    facts = [
        f"machine: {platform.machine()} CPU, {os.cpu_count()} cores",
        f"versions: torch {torch.__version__}, Python {platform.python_version()}",
        f"command: {' '.join([Path(sys.executable).name, *sys.argv])}",
        f"group: SIMULATED, rank 0 of {args.simulate}, the others fake",
        f"model: Hugging Face's Llama, width {args.width}, 2 x 64 tokens; {args.inner}; AdamW (foreach); one thread",
        f"date: {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    ]
    print("\n".join(facts))
    print(f"\n{'system':26} {'layers':>6} {'caches':6} {'compile':>9}  " + "".join(f"{phase:>13}" for phase in PHASES))
    results: list[dict[str, Any]] = []
    for layers in args.layers:
        for name in args.systems:
            with tempfile.TemporaryDirectory() as cache:
                for caches in ("cold", "warm"):
                    found = run(name, layers, cache, args)
                    if isinstance(found, str):
                        print(f"{name:26} {layers:6} {caches:6} failed: {found}")
                        break
                    results.append({"system": name, "layers": layers, "caches": caches} | found)
                    phases = "".join(f"{seconds:11.1f} s" for seconds in found["phases_s"].values())
                    print(f"{name:26} {layers:6} {caches:6} {found['compile_s']:7.1f} s  {phases}", flush=True)
            if args.out:
                Path(args.out).write_text(json.dumps({"about": facts, "results": results}, indent=1))


if __name__ == "__main__":
    main()
