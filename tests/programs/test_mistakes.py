"""Mistakes that end a program: what it prints has the program's own lines and our message, and little else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST = 15
"""Lines of a rank that are not the program's own."""

BEGIN = """
import warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from mfsdp_compile import fully_shard, fully_shard_model, fully_shard_optimizer
dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
x = torch.ones(2, 8)
aot = {"inner": "aot_eager"}
def sharded(**given):
    return fully_shard_model(net, fsdp_unit_modules=[nn.Linear], **given)
def compiled(**options):
    return torch.compile(sharded(), backend="mfsdp", options=aot | options)
"""

TORCHS = "from torch.distributed.fsdp import fully_shard as torchs"

MISTAKES = {
    "option": ("compiled(prefech=2)(x)", "The mfsdp backend has no option 'prefech'; it has"),
    "value of an option": ("compiled(regions='yes')(x)", "takes True, False or 'auto', got 'yes'"),
    "option that needs CUDA": ("compiled(float32_gradients=True)(x)", "Take the option out."),
    "mode": ("torch.compile(sharded(), backend='mfsdp', mode='max-autotune')(x)", "Capture the whole step instead"),
    "no backend": ("torch.compile(sharded(), backend='aot_eager')(x)", "Use torch.compile(model, backend='mfsdp')"),
    "DDP around it": ("nn.parallel.DistributedDataParallel(sharded())", "Use the sharded model itself."),
    "torch's fully_shard around it": (f"{TORCHS}; torchs(sharded())", "Use the sharded model itself"),
    "torch's fully_shard around a part": (f"{TORCHS}; sharded(); torchs(net[1])", "mfsdp_compile.fsdp2.fully_shard"),
    "torch's fully_shard after FSDP2's face": (
        f"{TORCHS}; from mfsdp_compile.fsdp2 import fully_shard as face; face(net[0]); face(net); torchs(net)",
        "Use the sharded model itself",
    ),
    "torch's replicate around a part": (
        "from torch.distributed._composable.replicate import replicate; sharded(); replicate(net[1])",
        "Use the sharded model itself",
    ),
    "sharded twice": (
        "fully_shard_model(sharded(), fsdp_unit_modules=[nn.Linear])",
        "Pass the module that is inside only once.",
    ),
    "no unit": ("fully_shard_model(net, fsdp_unit_modules=[nn.LSTM])", "fsdp_unit_modules"),
    "unknown strategy": ("sharded(zero_dp_strategy=4)", "zero_dp_strategy"),
    "unknown mesh dimension": (
        "sharded(device_mesh=dist.init_device_mesh('cpu', (2, 1), mesh_dim_names=('a', 'b')), dp_shard_dim='nope')",
        "nope",
    ),
    "no module": ("fully_shard_model([net])", "takes an nn.Module, got a list"),
    "optimizer from before": (
        "optimizer = torch.optim.SGD(net.parameters()); model = sharded(); fully_shard_optimizer(optimizer)",
        "after",
    ),
    "pickled": ("import pickle; pickle.dumps(sharded())", "Save model.state_dict()"),
    "moved": ("sharded().to('meta')", "meta"),
    "changed dtype": ("sharded().half()", "mixed_precision_policy"),
    "too many dtypes": ("sharded(mixed_precision_policy=torch.float16)", "MixedPrecisionPolicy"),
    "backward twice": ("loss = sharded()(x).sum(); loss.backward(); loss.backward()", "retain_graph"),
    "eager error": ("raise RuntimeError('mine')", "mine"),
    "shapes, eager": ("sharded()(torch.ones(2, 9))", "cannot be multiplied"),
    "wrong state dict": ("sharded().load_state_dict({'a': x})", "Unexpected key(s) in state_dict"),
    "own loss in backward": ("sharded()(x).sum().backward(create_graph=True)", "create_graph"),
    "save of one model": (
        "from mfsdp_compile.checkpoint import Checkpoints; Checkpoints('/tmp/x').save(-1, sharded())",
        "step",
    ),
    "not sharded": ("from mfsdp_compile.checkpoint import full_state_dict; full_state_dict(net)", "fully_shard_model"),
    "no process group": ("dist.destroy_process_group(); sharded()", "process group"),
}


RUNNER = """
import os, sys, torch, torch._dynamo
import mfsdp_compile.fsdp2, mfsdp_compile.backend.compile
for path in sys.argv[1:]:
    child = os.fork()
    if not child:
        os.dup2(os.open(path + ".err", os.O_CREAT | os.O_WRONLY), 2)
        status = 0
        try:
            exec(compile(open(path).read(), path, "exec"), {"__name__": "__main__"})
        except BaseException as error:  # as the interpreter ends a program
            sys.excepthook(type(error), error.with_traceback(error.__traceback__.tb_next), error.__traceback__)
            status = 1
        sys.stderr.flush()
        os._exit(status)
    with open(path + ".status", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Run every mistake as a program of its own. Return exit status and what it printed on stderr."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "runner.py").write_text(RUNNER)
    paths = {}
    for number, (name, (line, _)) in enumerate(MISTAKES.items()):
        paths[name] = folder / f"train{number}.py"
        paths[name].write_text(f"{BEGIN}\ndef main():\n    {line}\nmain()\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MFSDP_")}
    subprocess.run(
        [sys.executable, str(folder / "runner.py"), *map(str, paths.values())],
        env=environment | {"PYTHONPATH": str(ROOT)},
        timeout=240,
        check=True,
        stderr=subprocess.DEVNULL,
    )
    return {
        name: (int(Path(f"{path}.status").read_text()), Path(f"{path}.err").read_text()) for name, path in paths.items()
    }


@pytest.mark.long_if("option")
@pytest.mark.parametrize("name", MISTAKES)
def test_what_a_mistake_prints(name: str, printed: dict[str, tuple[int, str]]) -> None:
    status, text = printed[name]
    assert status == 1, text
    told = text.splitlines()
    own = {i for i, line in enumerate(told) if re.search(r"train\d+\.py", line)}
    own |= {i + 1 for i in own}  # the line itself
    others = [line for i, line in enumerate(told) if line.strip() and i not in own]
    assert len(others) <= MOST, text
    assert MISTAKES[name][1] in text, text
