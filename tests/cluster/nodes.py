"""Machines of a cluster: network namespaces with one cable each to a switch, or, where these cannot be made, loopback
addresses.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "MFSDP_TEST_NODE"


@dataclass
class Node:
    """A machine.

    Args:
        name: Of its network namespace; with loopback addresses, any name.
        address: Of this machine in the cluster's network.
        device: Network device with that address.
        log: What its programs print.
    """

    name: str
    address: str
    device: str
    isolated: bool
    log: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a program on this machine."""
        own = {
            "PYTHONPATH": str(ROOT),
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self.device,
            "TP_SOCKET_IFNAME": self.device,
            MARK: self.name,
        }
        inside = ["ip", "netns", "exec", self.name] if self.isolated else []
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [*inside, *command],
                env=os.environ | own | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_for(self, text: str, seconds: float) -> None:
        """Wait until a program has printed ``text``.

        Raises:
            AssertionError: It has not, after ``seconds``, or all programs have ended.
        """
        until = time.monotonic() + seconds
        while text not in self.text():
            running = any(process.poll() is None for process in self.started)
            assert running and time.monotonic() < until, f"{self.name} has not printed {text!r}:\n{self.text()[-4000:]}"
            time.sleep(0.05)

    def kill(self) -> None:
        """End every program of this machine at once, as a power failure does."""
        for process in _processes(self.name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        for process in self.started:
            process.wait(10)


def _processes(name: str) -> Iterator[int]:
    wanted = f"{MARK}={name}".encode()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)


@contextlib.contextmanager
def cluster(count: int, folder: Path, rate: str = "1gbit") -> Iterator[Sequence[Node]]:
    """Make machines, and end everything on them afterwards.

    Args:
        rate: What a machine's cable carries, as ``tc`` takes it. Loopback addresses have no limit.
    """
    name = f"mfsdp{os.getpid()}"
    isolated = have_namespaces()
    addresses = [f"10.77.{os.getpid() % 250}.{i + 1}" if isolated else f"127.0.77.{i + 1}" for i in range(count)]
    device = "eth0" if isolated else "lo"
    nodes = [
        Node(f"{name}n{i}", address, device, isolated, folder / f"node-{i}.log") for i, address in enumerate(addresses)
    ]
    made = []
    try:
        if isolated:
            made = [name, *(node.name for node in nodes)]
            for each in made:
                _ip("netns", "add", each)
            _ip("-n", name, "link", "add", "switch", "type", "bridge")
            _ip("-n", name, "link", "set", "switch", "up")
            for i, node in enumerate(nodes):
                _ip(
                    "link", "add", f"port{i}", "netns", name, "type", "veth", "peer", "name", "eth0", "netns", node.name
                )
                _ip("-n", name, "link", "set", f"port{i}", "master", "switch", "up")
                _ip("-n", node.name, "address", "add", f"{node.address}/24", "dev", "eth0")
                _ip("-n", node.name, "link", "set", "eth0", "up")
                _ip("-n", node.name, "link", "set", "lo", "up")
                _run(
                    "tc", "-n", node.name, *f"qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 50ms".split()
                )
        yield nodes
    finally:
        for node in nodes:
            node.kill()
        for each in made:
            subprocess.run(["ip", "netns", "delete", each], capture_output=True, check=False)


@functools.cache
def have_namespaces() -> bool:
    """Whether this process may make network namespaces with bandwidth limits."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    name = f"mfsdp{os.getpid()}t"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "switch", "type", "bridge")
        _ip("-n", name, "link", "add", "end0", "type", "veth", "peer", "name", "end1")
        _run(
            "tc",
            "-n",
            name,
            *["qdisc", "add", "dev", "end0", "root", "tbf", "rate", "1gbit", "burst", "256kb", "latency", "50ms"],
        )
        _run("ip", "netns", "exec", name, "true")
    except subprocess.CalledProcessError:
        return False
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return True


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=20)


def losses(text: str) -> dict[int, float]:
    """Return the loss of each step from what a training has printed; of a step that was repeated, the last one."""
    found: dict[int, float] = {}
    for line in text.splitlines():
        if "loss" in line and "step" in line:
            words = line[line.index("step") :].replace(":", "").replace(",", "").split()
            found[int(words[1])] = float(words[3])
    return found


def environment(node: Node, head: Node, folder: Path, **more: str) -> Mapping[str, str]:
    """Return what torchrun.sh takes on a machine."""
    keep_alive = "keep_alive_interval=1,keep_alive_max_attempt=3"
    conf = f"is_host={int(node is head)},last_call_timeout=3,join_timeout=60,{keep_alive}"
    return {
        "HEAD": head.address,
        "ADDRESS": node.address,
        "FOLDER": str(folder),
        "RDZV_CONF": conf,
    } | more
