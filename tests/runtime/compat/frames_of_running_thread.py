"""Reads the frames of a thread that runs, while garbage collections let that thread go on.

Usage: python frames_of_running_thread.py PATH_OF_FRAMES_PY
"""

import gc
import importlib.util
import sys
import threading
import time

SECONDS = 1.0


def work(depth: int) -> int:
    return sum(work(depth - 1) for _ in range(2)) if depth else 1


def run() -> None:
    while True:
        assert work(6) == 2**6


def let_others_run(phase: str, _: object) -> None:
    if threading.current_thread() is threading.main_thread():
        time.sleep(1e-4)


spec = importlib.util.spec_from_file_location("frames", sys.argv[1])
assert spec is not None and spec.loader is not None
frames = importlib.util.module_from_spec(spec)
spec.loader.exec_module(frames)
thread = threading.Thread(target=run, daemon=True)
thread.start()
gc.callbacks.append(let_others_run)
gc.set_threshold(1)
sys.setswitchinterval(1e-5)
deadline = time.monotonic() + SECONDS
while time.monotonic() < deadline:
    assert frames.frames_of(thread.ident)[-1].f_code.co_name == "_bootstrap"
assert thread.is_alive()
print("alive")
