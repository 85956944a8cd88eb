"""Shared parts of the benchmarks: the compared systems, the processes they run in, and how results are written."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import logging
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from mfsdp_compile import MixedPrecisionPolicy, compile_step, fully_shard_model
from mfsdp_compile.models.llama import Block, Llama, LlamaConfig
from mfsdp_compile.processes import join, open_store

__all__ = ["Config", "System", "batch_of", "build", "median", "rows", "run", "synchronize"]


@dataclass(frozen=True)
class Config:
    """One run of a benchmark; the same model, data, seed and optimizer for every system.

    Args:
        ranks: Size of the process group.
        simulate: Whether all ranks but this one are fake. Their collectives return at once, with undefined content.
            Computation and memory are real, communication takes no time. Results are labeled as simulated.
        batch, length: Sequences per rank and step, and tokens per sequence.
        rounds: Number of rounds. In each round, every system does one step.
        cache: Folder of compile caches. Empty for a new one, so that first steps include all of compilation.
        dtype: Dtype that the model computes in. Parameters, gradients and AdamW's moments are kept in float32, except
            by systems that cannot do so. Their results say so.
    """

    ranks: int
    simulate: bool
    systems: tuple[str, ...]
    width: int
    layers: int
    heads: int
    hidden: int
    vocabulary: int
    batch: int
    length: int
    rounds: int
    dtype: str
    seed: int
    cache: str
    out: str

    @property
    def model(self) -> LlamaConfig:
        return LlamaConfig(self.vocabulary, self.width, self.layers, self.heads, self.heads, self.hidden)


@dataclass
class System:
    """A model under one system: what to call, and what holds its parameters."""

    name: str
    model: nn.Module
    call: Callable[..., Tensor]
    optimizer: torch.optim.Optimizer

    train_step: Callable[..., Tensor] | None = None

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.train_step is not None:
            return self.train_step(tokens, targets)
        loss = self.call(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def _whole(config: Config, device: torch.device) -> nn.Module:
    torch.manual_seed(config.seed)
    return Llama(config.model).to(device, getattr(torch, config.dtype))


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)


def _ours(
    config: Config,
    device: torch.device,
    compiled: bool,
    double_buffer: bool = False,
    precision: MixedPrecisionPolicy | None = None,
    cuda_graphs: bool = False,
    **options: Any,
) -> System:
    model = fully_shard_model(
        _whole(config, device),
        fsdp_unit_modules=[Block],
        mixed_precision_policy=precision or MixedPrecisionPolicy(),
        fsdp_double_buffer=double_buffer or cuda_graphs,
        cuda_graph_mode=cuda_graphs,
    )
    call = torch.compile(model, backend="mfsdp", options=options) if compiled else model
    return System("", model, call, _adamw(model))


def _ours_stepped(
    config: Config,
    device: torch.device,
    backend: str | None,
    fused: bool = False,
    double_buffer: bool = False,
    cuda_graphs: bool = False,
    **options: Any,
) -> System:
    """Build a model that is stepped in backward: by AdamW's fused kernels, or by what is generated of ``foreach``."""
    system = _ours(config, device, compiled=False, double_buffer=double_buffer, cuda_graphs=cuda_graphs)
    how: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
    if cuda_graphs:
        how |= {"capturable": True, "lr": torch.tensor(1e-3, device=device)}
    system.optimizer = torch.optim.AdamW(system.model.parameters(), **{"lr": 1e-3, **how})
    system.train_step = compile_step(
        system.model, system.optimizer, cuda_graphs=cuda_graphs, backend=backend, options=options
    )
    return system


def _fused(system: System) -> System:
    """Step with torch's fused AdamW."""
    system.optimizer = torch.optim.AdamW(system.model.parameters(), lr=1e-3, fused=True)
    return system


def _ours_by_block(config: Config, device: torch.device) -> System:
    system = _ours(config, device, compiled=False)
    for block in system.model.modules():
        if isinstance(block, Block):
            block.compile(backend="mfsdp", fullgraph=True)
    return system


def _fsdp2(config: Config, device: torch.device, compiled: bool) -> System:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Precision
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (config.ranks,))
    policy = Fsdp2Precision(param_dtype=getattr(torch, config.dtype))
    torch.manual_seed(config.seed)
    model = Llama(config.model).to(device)  # FSDP2 keeps parameters in their dtype and casts for computation
    for name, layer in list(model.layers.named_children()):
        if compiled:  # as in torchtitan: compile the block, then shard it
            layer = torch.compile(layer, fullgraph=True)
            model.layers.register_module(name, layer)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return System("", model, model, _adamw(model))


def _ddp(config: Config, device: torch.device) -> System:
    model = nn.parallel.DistributedDataParallel(_whole(config, device))
    return System("", model, torch.compile(model), _adamw(model))


def _megatron_fsdp(config: Config, device: torch.device) -> System:
    import megatron_fsdp

    model = megatron_fsdp.fully_shard_model(
        _whole(config, device), fsdp_unit_modules=[Block], zero_dp_strategy=3, device=device
    )
    optimizer = megatron_fsdp.fully_shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    return System("", model, model, optimizer)


def _simple_fsdp(config: Config, device: torch.device) -> System:
    """Build torchtitan's SimpleFSDP: parametrizations that gather, compiled as one graph."""
    from torch.distributed.device_mesh import init_device_mesh

    simple_fsdp = _simple_fsdp_module()
    assert simple_fsdp is not None
    precision = simple_fsdp.MixedPrecisionPolicy(param_dtype=getattr(torch, config.dtype), reduce_dtype=torch.float32)
    torch.manual_seed(config.seed)
    model = simple_fsdp.data_parallel(
        Llama(config.model).to(device),  # it casts for computation, as FSDP2 does
        init_device_mesh(device.type, (config.ranks,)),
        mode="fully_shard",
        mp_policy=precision,
    )
    return System("", model, torch.compile(model, fullgraph=True), _adamw(model))


def _simple_fsdp_module() -> Any:
    """Return torchtitan's module, which has been in two folders, or None."""
    for folder in ("graph_trainer", "simple_fsdp"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"torchtitan.experiments.{folder}.simple_fsdp")
    return None


REDUCTIONS = {
    "bfloat16 gradients": MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16),
    "bfloat16 gradients added in float32": MixedPrecisionPolicy(
        grad_comm_dtype=torch.bfloat16, grad_sum_dtype=torch.float32
    ),
    "float32 gradients": MixedPrecisionPolicy(grad_comm_dtype=torch.float32),
}
"""Ways to reduce gradients, for the systems "mfsdp eager, ..." and "mfsdp compiled, ..."."""

SYSTEMS: dict[str, Callable[[Config, torch.device], System]] = {
    "mfsdp compiled": lambda c, d: _ours(c, d, compiled=True),
    "mfsdp compiled whole": lambda c, d: _ours(c, d, compiled=True, inner="inductor_whole"),
    "mfsdp compiled whole, without regions": lambda c, d: _ours(
        c, d, compiled=True, inner="inductor_whole", regions=False
    ),
    "mfsdp without regions": lambda c, d: _ours(c, d, compiled=True, regions=False),
    "mfsdp with double buffers": lambda c, d: _ours(c, d, compiled=True, double_buffer=True),
    "mfsdp eager with double buffers": lambda c, d: _ours(c, d, compiled=False, double_buffer=True),
    "mfsdp compiled by block": _ours_by_block,
    "mfsdp eager": lambda c, d: _ours(c, d, compiled=False),
    "mfsdp compiled, fused AdamW": lambda c, d: _fused(_ours(c, d, compiled=True)),
    "mfsdp compile_step": lambda c, d: _ours_stepped(c, d, "mfsdp"),
    "mfsdp compile_step, double buffers": functools.partial(_ours_stepped, backend="mfsdp", double_buffer=True),
    "mfsdp compile_step, CUDA graphs": functools.partial(_ours_stepped, backend="mfsdp", cuda_graphs=True),
    "mfsdp compile_step, fused AdamW": lambda c, d: _ours_stepped(c, d, "mfsdp", fused=True),
    **{
        f"mfsdp compile_step, fused AdamW, activations {saved}": functools.partial(
            _ours_stepped, backend="mfsdp", fused=True, activation_memory_budget=saved
        )
        for saved in (0.5, 0.25, 0.0)
    },
    "mfsdp compile_step, fused AdamW, least memory": functools.partial(
        _ours_stepped,
        backend="mfsdp",
        fused=True,
        activation_memory_budget=0.0,
        prefetch=0,
        reductions_in_flight=0,
    ),
    "mfsdp compile_step, eager": lambda c, d: _ours_stepped(c, d, None),
    "FSDP2 eager": lambda c, d: _fsdp2(c, d, compiled=False),
    "FSDP2 compiled by block": lambda c, d: _fsdp2(c, d, compiled=True),
    "FSDP2 compiled by block, fused AdamW": lambda c, d: _fused(_fsdp2(c, d, compiled=True)),
    "DDP compiled": _ddp,
    "Megatron-FSDP": _megatron_fsdp,
    "SimpleFSDP": _simple_fsdp,
    **{
        f"mfsdp {way}, {name}": functools.partial(_ours, compiled=way == "compiled", precision=policy)
        for name, policy in REDUCTIONS.items()
        for way in ("eager", "compiled")
    },
}
"""Systems in the order in which they are shown. Megatron-FSDP and CUDA graphs need a GPU."""


def build(name: str, config: Config, device: torch.device) -> System | str:
    """Build a system, or return the reason why it cannot run here."""
    if name == "Megatron-FSDP":
        if device.type != "cuda":
            return "needs a GPU"
        try:
            import megatron_fsdp  # noqa: F401
        except ImportError:
            return "megatron-fsdp is not installed"
    if name.endswith("CUDA graphs") and device.type != "cuda":
        return "needs a GPU"
    if name == "SimpleFSDP" and _simple_fsdp_module() is None:
        return "torchtitan with SimpleFSDP is not installed"
    if name == "DDP compiled" and config.simulate:
        return "its gradient hooks check what a fake group returns"
    try:
        system = SYSTEMS[name](config, device)
    except Exception as error:  # the benchmark of the other systems continues
        return f"{type(error).__name__}: {error}"
    system.name = name
    return system


def batch_of(config: Config, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(config.seed * 1000 + rank)
    tokens = torch.randint(0, config.vocabulary, (config.batch, config.length + 1), generator=generator).to(device)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def synchronize(config: Config, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    if not config.simulate:
        dist.barrier()


# -- processes --------------------------------------------------------------------------------------------------------


def launch(work: Callable[[Config, int, torch.device], Any], config: Config) -> Any:
    """Run ``work`` on every rank (one, if the others are simulated) and return what rank 0 returns."""
    store = open_store()
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    real = 1 if config.simulate else config.ranks
    with tempfile.TemporaryDirectory() as new:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = config.cache or new
        processes = [
            context.Process(target=_process, args=(work, config, rank, store.port, queue)) for rank in range(real)
        ]
        for process in processes:
            process.start()
        while queue.empty() and not any(process.exitcode for process in processes):
            time.sleep(0.1)
        result = None if queue.empty() else queue.get()
        for process in processes:
            process.join(60)
            process.kill()
    if result is None:
        raise SystemExit(f"a rank failed; exit codes: {[process.exitcode for process in processes]}")
    return result


def _process(work: Callable[..., Any], config: Config, rank: int, port: int, queue: Any) -> None:
    warnings.filterwarnings("ignore")
    torch._logging.set_logs(dynamo=logging.ERROR, inductor=logging.ERROR)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.ranks) if not config.simulate else 1)
    if config.simulate:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=config.ranks, store=FakeStore())
    else:
        join("nccl" if device.type == "cuda" else "gloo", rank, config.ranks, port)
    result = work(config, rank, device)
    if rank == 0:
        queue.put(result)
    if not config.simulate:
        dist.barrier()
    dist.destroy_process_group()


# -- command line and results -----------------------------------------------------------------------------------------


def run(
    documentation: str,
    rounds: int,
    measure: Callable[[Config, int, torch.device], dict[str, Any]],
    show: Callable[[Config, dict[str, Any]], None],
    simulate: bool = False,
    **defaults: int,
) -> None:
    """Run a benchmark as a program.

    Args:
        documentation: Docstring of the benchmark. Its first line describes it.
        rounds: Default number of rounds.
        measure: Measures every system. Runs on each rank.
        show: Prints the results of rank 0.
        simulate: Always simulate the other ranks.
        **defaults: Other defaults of the arguments.
    """
    config, bounds = parse(documentation.splitlines()[0], rounds, simulate, defaults)
    facts = describe(config)
    print("\n".join(facts), flush=True)
    results = launch(measure, config)
    show(config, results)
    write(config, facts, results)
    if missed := above(results, bounds):
        raise SystemExit("\n".join(missed))


def above(results: Mapping[str, Any], bounds: Mapping[str, float]) -> list[str]:
    """Return a line for each system whose ratio to the baseline in this run is above its bound, or not measured."""
    missed = []
    for name, bound in bounds.items():
        ratio = results.get(name, {}).get("ratio")
        if ratio is None:
            missed.append(f"{name}: no ratio was measured, to be at most {bound:g}")
        elif ratio > bound:
            missed.append(f"{name}: {ratio:.3f} is above {bound:g}")
    return missed


def rows(results: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield results in the order of :data:`SYSTEMS`, and print the reasons of systems that did not run."""
    for name in SYSTEMS:
        result = results.get(name)
        if result is None:
            continue
        if "skipped" in result:
            print(f"{name:26} not run: {result['skipped']}")
        else:
            yield name, result


def _bound(text: str) -> tuple[str, float]:
    name, _, bound = text.rpartition("=")
    if name not in SYSTEMS:
        raise argparse.ArgumentTypeError(f"{text!r} is not SYSTEM=RATIO with one of {', '.join(SYSTEMS)}")
    return name, float(bound)


def parse(
    description: str, rounds: int, simulate: bool, defaults: Mapping[str, int]
) -> tuple[Config, Mapping[str, float]]:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--ranks", type=int, default=gpus or 2)
    parser.add_argument("--simulate", type=int, metavar="N", help="one process as rank 0 of N; the others are fake")
    usual = [name for name in SYSTEMS if ", " not in name]  # without ways to reduce gradients
    parser.add_argument("--systems", nargs="*", default=usual, choices=list(SYSTEMS))
    parser.add_argument("--width", type=int, default=2048 if gpus else 512)
    parser.add_argument("--layers", type=int, default=16 if gpus else 8)
    parser.add_argument("--heads", type=int, default=16 if gpus else 8)
    parser.add_argument("--hidden", type=int, default=5504 if gpus else 1376)
    parser.add_argument("--vocabulary", type=int, default=32768 if gpus else 2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048 if gpus else 64)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--dtype", default="bfloat16" if gpus else "float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", default="", help="folder of compile caches; a new one if not given")
    parser.add_argument("--out", default="", help="a JSON file to write")
    parser.add_argument(
        "--at-most", nargs="*", type=_bound, default=[], metavar="SYSTEM=RATIO", help="fail if a ratio is above this"
    )
    parser.set_defaults(**defaults)
    given = vars(parser.parse_args())
    bounds = dict(given.pop("at_most"))
    given["ranks"] = given["simulate"] or given["ranks"]
    given |= {"systems": tuple(given["systems"]), "simulate": simulate or bool(given["simulate"])}
    return Config(**given), bounds


def describe(config: Config) -> list[str]:
    """Return what a reader must know about a result: machine, versions, command, model."""
    if torch.cuda.is_available():
        machine = f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    else:
        machine = f"{platform.machine()} CPU, {os.cpu_count()} cores, {torch.get_num_threads()} threads by default"
    parameters = sum(p.numel() for p in _meta(config).parameters())
    how = f"SIMULATED: rank 0 of {config.ranks}, the others fake" if config.simulate else f"{config.ranks} ranks"
    return [
        f"machine: {machine}",
        f"versions: torch {torch.__version__}, Python {platform.python_version()}",
        f"command: {' '.join([Path(sys.executable).name, *sys.argv])}",
        f"group: {how}",
        f"model: Llama, {parameters / 1e6:.1f} M parameters, {config.layers} layers of width {config.width}, "
        f"computing in {config.dtype}; {config.batch} x {config.length} tokens per rank; AdamW (foreach)",
        f"date: {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC",
    ]


def _meta(config: Config) -> nn.Module:
    with torch.device("meta"):
        return Llama(config.model)


def write(config: Config, facts: Sequence[str], results: Any) -> None:
    if config.out:
        Path(config.out).parent.mkdir(parents=True, exist_ok=True)
        Path(config.out).write_text(
            json.dumps({"about": facts, "config": asdict(config), "results": results}, indent=1)
        )
        print(f"written to {config.out}")


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
