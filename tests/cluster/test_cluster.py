"""A training on several machines: by each launcher's script, over a slow network, and after machines have died."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from nodes import ROOT, Node, cluster, environment, losses

from mfsdp_compile.examples import cluster as examples

HERE = Path(examples.__file__).parent
STEPS = 8
WORDS = ("--inner", "aot_eager", "--batch", "8", "--length", "64", "--save-every", "2")
ROUNDING = 2e-6
"""Printed losses have six digits after the point, and sums over other numbers of ranks round otherwise."""


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of one process that nothing disturbs."""
    folder = tmp_path_factory.mktemp("alone")
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-m", "mfsdp_compile.examples.cluster.train", "--folder", str(folder), *WORDS, "--steps", "8"],
        env=os.environ | ranks | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_PORT": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found = losses(done.stdout)
    assert [*found] == [*range(1, STEPS + 1)]
    return found


def start(
    node: Node, head: Node, folder: Path, ranks: int, nodes: str, *words: str, steps: int = STEPS, **variables: str
) -> None:
    settings = environment(node, head, folder / "run", NODES=nodes, RANKS=str(ranks), **variables)
    node.start("sh", str(HERE / "torchrun.sh"), *WORDS, "--steps", str(steps), *words, **settings)


def ended(node: Node, seconds: float) -> int:
    try:
        return node.started[-1].wait(seconds)
    except subprocess.TimeoutExpired:
        pytest.fail(f"{node.name} has not ended after {seconds} s:\n{node.text()[-4000:]}")


def first_rank(nodes: list[Node]) -> str:
    return next(node.text() for node in nodes if "loss" in node.text())


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("count", "ranks", "sharding"),
    [
        (2, 1, "hsdp"),
        (2, 2, "hsdp"),
        (2, 2, "hfsdp"),
        (4, 1, "fsdp"),
    ],
)
def test_nodes_train_like_one_process(
    count: int, ranks: int, sharding: str, alone: dict[int, float], tmp_path: Path
) -> None:
    with cluster(count, tmp_path, rate="500mbit") as nodes:
        for node in nodes:
            start(node, nodes[0], tmp_path, ranks, str(count), "--sharding", sharding)
        assert [ended(node, 180) for node in nodes] == [0] * count
        found = losses(first_rank([*nodes]))
    assert found == pytest.approx(alone, abs=ROUNDING)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("returns", [True, False], ids=["restarted", "lost"])
def test_a_node_dies(returns: bool, alone: dict[int, float], tmp_path: Path) -> None:
    """Training goes on from the last checkpoint: on all nodes if the dead one comes back, else on the others."""
    with cluster(2, tmp_path) as nodes:
        first, second = nodes
        for node in nodes:
            start(node, first, tmp_path, 2, "2" if returns else "1:2", "--sharding", "hsdp", steps=400)
        _wait_for_any([*nodes], "step 5:", 120)
        second.kill()
        killed = time.monotonic()
        if returns:
            start(second, first, tmp_path, 2, "2", "--sharding", "hsdp", steps=400)
        ranks = 4 if returns else 2
        _wait_for_any([*nodes], lambda text: _goes_on(text, ranks), 150)
        took = time.monotonic() - killed
        found = losses("\n".join(node.text() for node in nodes))
    assert {step: found[step] for step in alone} == pytest.approx(alone, abs=ROUNDING)
    assert took < 120


@pytest.mark.long
@pytest.mark.processes
def test_a_node_is_drained(alone: dict[int, float], tmp_path: Path) -> None:
    """SIGTERM to one node: all ranks save, and training goes on without it, from that very step, instead of ending."""
    with cluster(2, tmp_path) as nodes:
        first, second = nodes
        for node in nodes:
            # The journal, which this variable turns on, must leave SIGTERM to the script.
            start(node, first, tmp_path, 1, "1:2", steps=400, MFSDP_DEBUG_DIR=str(tmp_path / "debug"))
        _wait_for_any([*nodes], "step 5:", 120)
        second.started[-1].send_signal(signal.SIGTERM)
        assert ended(second, 60) != 0
        _wait_for_any([*nodes], ", 1 ranks", 120)
        text = "\n".join(node.text() for node in nodes)
    steps = sorted((int(step), int(ranks)) for step, ranks in re.findall(r"step (\d+): loss [\d.]+, (\d+) ranks", text))
    assert [step for step, _ in steps] == [*range(1, len(steps) + 1)], "a step was repeated or left out"
    assert steps[-1][1] == 1
    found = losses(text)
    early = {step: loss for step, loss in alone.items() if step in found}
    assert {step: found[step] for step in early} == pytest.approx(early, abs=ROUNDING)


def _goes_on(text: str, ranks: int) -> bool:
    """Whether a training was started again, on so many ranks, and has come further than before."""
    steps = [(int(step), int(of)) for step, of in re.findall(r"step (\d+): loss [\d.]+, (\d+) ranks", text)]
    again = next((i for i in range(1, len(steps)) if steps[i][0] <= steps[i - 1][0]), None)
    if again is None:
        return False
    begins, of = steps[again]
    assert of == ranks
    assert begins % 2 == 1, "a checkpoint was written after every second step"
    assert steps[again - 1][0] - begins < 4, "the last checkpoint was not used"
    return steps[-1][0] >= max(STEPS, steps[again - 1][0] + 2)


def _wait_for_any(nodes: list[Node], wanted: str | Callable[[str], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while True:
        text = "\n".join(node.text() for node in nodes)
        if wanted in text if isinstance(wanted, str) else wanted(text):
            return
        assert time.monotonic() < until, text[-6000:]
        time.sleep(0.1)


# -- Slurm ------------------------------------------------------------------------------------------------------------

SRUN = r"""#!/bin/bash
# Stands in for Slurm's srun: starts the tasks here, and passes signals on.
shift # --kill-on-bad-exit
pids=
for i in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & pids="$pids $!"
done
trap 'kill -USR1 $pids' USR1
status=0
for pid in $pids; do
    wait "$pid"; code=$?
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; code=$?; done
    [ $code -eq 0 ] || status=$code
done
exit $status
"""
SCONTROL = """#!/bin/sh
# Stands in for Slurm's scontrol.
case $1 in
    show) echo 127.0.0.1 ;;
    requeue) touch "$REQUEUED" ;;
esac
"""


@pytest.mark.long
@pytest.mark.processes
def test_slurm_job_is_stopped_saved_and_requeued(alone: dict[int, float], tmp_path: Path) -> None:
    """The sbatch script itself, with stand-ins for Slurm's two commands."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    requeued, log = tmp_path / "requeued", tmp_path / "log"
    settings = {
        "PATH": f"{tmp_path}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "SLURM_JOB_NODELIST": "node-a",
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "PORT": str(20000 + os.getpid() % 10000),
        "FOLDER": str(tmp_path / "run"),
        "REQUEUED": str(requeued),
    }

    def run(steps: int) -> subprocess.Popen[bytes]:
        with log.open("ab") as file:
            command = ["bash", str(HERE / "slurm.sbatch"), *WORDS]
            env = os.environ | settings | {"STEPS": str(steps)}
            return subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)

    job = run(100_000)
    try:
        until = time.monotonic() + 90
        while "step 3:" not in log.read_text():
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.05)
        (srun,) = subprocess.check_output(["pgrep", "-P", str(job.pid), "srun"], text=True).split()
        os.kill(int(srun), signal.SIGUSR1)
        assert job.wait(60) == 1
        assert requeued.exists()
        requeued.unlink()
        stopped = max(losses(log.read_text()))
        job = run(stopped + 2)
        assert job.wait(90) == 0, log.read_text()
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert not requeued.exists()
    found = [int(step) for step in re.findall(r"step (\d+): loss", log.read_text())]
    assert found == [*range(1, stopped + 3)]  # no step is repeated, none is left out
    early = {step: loss for step, loss in losses(log.read_text()).items() if step <= 3}
    assert early == pytest.approx({step: alone[step] for step in early}, abs=ROUNDING)


DIRECTIVES = {
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-task", "gpu-bind", "cpus-per-task", "time", "signal"),
    *("requeue", "open-mode", "output"),
}
"""Options of sbatch, as https://slurm.schedmd.com/sbatch.html has them."""


def test_slurm_directives() -> None:
    text = (HERE / "slurm.sbatch").read_text()
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE)
    assert {name for name, _ in found} == DIRECTIVES
    assert len(found) == text.count("#SBATCH")
    first_command = re.search(r"^[^#\n]", text, re.MULTILINE)
    assert first_command is not None
    assert text.rindex("#SBATCH") < first_command.start()  # sbatch reads none behind it


# -- others -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sbatch"])
def test_shell_scripts_parse(script: str) -> None:
    shell = "bash" if script.endswith("sbatch") else "sh"
    done = subprocess.run([shell, "-n", str(HERE / script)], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


def test_kubernetes_manifest() -> None:
    """Names and types are those of Kubeflow's PyTorchJob, kubeflow.org/v1."""
    job = yaml.safe_load((HERE / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert set(job["spec"]) == {"nprocPerNode", "elasticPolicy", "pytorchReplicaSpecs"}
    assert isinstance(job["spec"]["nprocPerNode"], str)
    elastic = job["spec"]["elasticPolicy"]
    assert set(elastic) == {"rdzvBackend", "minReplicas", "maxReplicas", "maxRestarts"}
    (worker,) = job["spec"]["pytorchReplicaSpecs"].values()
    assert set(worker) == {"replicas", "restartPolicy", "template"}
    assert elastic["minReplicas"] <= worker["replicas"] == elastic["maxReplicas"]
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"  # the operator sets variables of this container alone
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(job["spec"]["nprocPerNode"])


@pytest.mark.long
@pytest.mark.processes
def test_kubernetes_command(alone: dict[int, float], tmp_path: Path) -> None:
    """A pod's command, with the variables that the operator sets."""
    pod = yaml.safe_load((HERE / "kubernetes.yaml").read_text())["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    (container,) = pod["spec"]["containers"]
    words = [str(tmp_path) if word == "/runs/a" else word for word in container["args"]]
    operator = {"PET_NNODES": "1:1", "PET_NPROC_PER_NODE": "2", "PET_RDZV_BACKEND": "c10d", "PET_MAX_RESTARTS": "1"}
    with cluster(1, tmp_path) as (node,):
        where = {
            "PET_RDZV_ENDPOINT": f"{node.address}:29500",
            "PET_RDZV_CONF": "is_host=1",
            "PET_LOCAL_ADDR": node.address,
        }
        node.start(*container["command"], *words, *WORDS, "--steps", "8", **operator, **where)
        assert ended(node, 120) == 0
        assert losses(node.text()) == pytest.approx(alone, abs=ROUNDING)


@pytest.mark.long
@pytest.mark.processes
def test_ray_train(alone: dict[int, float], tmp_path: Path) -> None:
    pytest.importorskip("ray.train", exc_type=ImportError)
    words = [*WORDS, "--steps", "8", "--folder", str(tmp_path / "run"), "--workers", "2", "--cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "mfsdp_compile.examples.cluster.ray_train", *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout + done.stderr) == pytest.approx(alone, abs=ROUNDING)


@pytest.mark.long
@pytest.mark.processes
def test_deterministic_runs_are_equal_on_any_number_of_nodes(tmp_path: Path) -> None:
    """``deterministic()``: four ranks on one machine, two and four end with the same bits."""
    found = set()
    for count in (1, 2, 4):
        folder = tmp_path / str(count)
        folder.mkdir()
        with cluster(count, folder) as nodes:
            for place, node in enumerate(nodes):
                rendezvous = (
                    f"--nnodes={count} --node-rank={place} --master-addr={nodes[0].address} --master-port=29501"
                )
                words = ("-m", "torch.distributed.run", *rendezvous.split(), f"--nproc-per-node={4 // count}")
                node.start(sys.executable, *words, str(Path(__file__).with_name("equal_runs.py")))
            assert [ended(node, 120) for node in nodes] == [0] * count, nodes[0].text()
            found.add(re.search("digest .*", nodes[0].text()).group())  # type: ignore[union-attr]
    assert len(found) == 1, found
