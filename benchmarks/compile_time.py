"""Time until a model is compiled: the first step of each system, by number of layers, with cold caches and with warm ones.

    python benchmarks/compile_time.py --layers 8 32 80

Each figure is the first step (forward, backward, optimizer) of a new process, less a later step. The second process
of a system finds the compile caches that the first one filled. The model is Hugging Face's Llama; with
``--simulate N`` (the default, 8), the process is rank 0 of N, and the others are fake: nothing that is measured
communicates.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SYSTEMS = (
    "mfsdp",
    "mfsdp without regions",
    "mfsdp by block",
    "FSDP2 by block",
    "torch.compile, unsharded",
)


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
    if name.startswith("mfsdp"):
        from mfsdp_compile import fully_shard_model

        model = fully_shard_model(model, fsdp_unit_modules=[LlamaDecoderLayer])
        if name == "mfsdp by block":
            for layer in model.module.model.layers if hasattr(model, "module") else model.model.layers:
                layer.compile(backend="mfsdp", fullgraph=True, options={"inner": args.inner})
            return model, model
        options: dict[str, Any] = {"inner": args.inner}
        if args.regions:
            options["regions"] = name == "mfsdp"
        return model, torch.compile(model, backend="mfsdp", fullgraph=True, options=options)
    backend = args.inner
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
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.filterwarnings("ignore")
    dist.init_process_group("fake", rank=0, world_size=args.simulate, store=FakeStore())
    torch.set_num_threads(2)
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
    phases: dict[str, float] = {}
    from torch._dynamo.utils import compilation_time_metrics

    for key, seconds in compilation_time_metrics.items():
        phases[key] = round(sum(seconds), 2)
    return {"first": first, "later": later, "compile": first - later, "phases": phases}


def main() -> None:
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[8, 32, 80])
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--simulate", type=int, default=8, metavar="N")
    parser.add_argument("--systems", nargs="*", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--inner", default="inductor")
    parser.add_argument("--regions", type=int, default=1)
    parser.add_argument("--warm", type=int, default=1)
    parser.add_argument("--out", default="")
    parser.add_argument("--measure", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args)))
        return
    results = {}
    for name in args.systems:
        for layers in args.layers:
            with tempfile.TemporaryDirectory() as cache:
                for start in ("cold", "warm")[: 1 + args.warm]:
                    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
                    command = [sys.executable, __file__, "--measure", name, "--layers", str(layers)]
                    command += ["--width", str(args.width), "--simulate", str(args.simulate), "--inner", args.inner]
                    command += ["--regions", str(args.regions)]
                    done = subprocess.run(command, env=environment, capture_output=True, text=True)
                    if done.returncode:
                        print(done.stderr[-1500:])
                        continue
                    found = json.loads(done.stdout.splitlines()[-1])
                    results[f"{name}, {layers} layers, {start}"] = found
                    print(
                        f"{name:26} {layers:3} layers {start}  {found['compile']:7.1f} s",
                        found["phases"] if args.out == "-" else "",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
