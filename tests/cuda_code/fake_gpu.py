"""A GPU that does not exist: Inductor and Triton generate code for it on a machine without a driver.

:func:`start` comes before torch is imported, because torch looks up CUDA's hooks once and early. It tells torch,
Inductor and Triton the properties of the device. Nothing can run on it: tensors are fake.

What code for it lacks: padding of matrix products (``pad_mm``), replacement of attention by patterns, and constant
folding, which all need real tensors. Nothing is autotuned.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What Inductor asks about a device. The names are those of ``torch.cuda.get_device_properties``."""

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    L2_cache_size: int
    shared_memory_per_block_optin: int = 232_448
    shared_memory_per_multiprocessor: int = 233_472
    shared_memory_per_block: int = 49_152
    regs_per_multiprocessor: int = 65_536
    max_threads_per_multi_processor: int = 2_048
    max_threads_per_block: int = 1_024
    warp_size: int = 32
    is_integrated: int = 0
    is_multi_gpu_board: int = 0
    gcnArchName: str = ""
    memory_clock_rate: int = 3_201_000
    memory_bus_width: int = 6_144
    clock_rate: int = 1_980_000
    uuid: str = "0"

    @property
    def capability(self) -> int:
        return 10 * self.major + self.minor


GPUS = {
    "sm_90": Gpu("NVIDIA H200", 9, 0, 132, 150_754_820_096, 62_914_560),
    "sm_100": Gpu("NVIDIA B200", 10, 0, 148, 191_514_017_792, 132_644_864),
}

_BUILT = Path(__file__).parents[2] / "build" / "cuda_guard"
_GUARD = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return c10::Device(c10::DeviceType::CUDA, 0); }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
  c10::Stream getNewStream(c10::Device, int) const override { return getStream(getDevice()); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(getDevice()); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};
static c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new Guard());

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};
// Before those of a build with CUDA, which are registered later.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}
"""


def start(architecture: str, folder: Path, **environment: str) -> None:
    """Make this process one of a GPU that does not exist. Called before torch is imported.

    Args:
        architecture: Key of :data:`GPUS`.
        folder: Where compilers put their files.
        environment: Further environment variables.
    """
    os.environ.update(
        TORCHINDUCTOR_COMPILE_THREADS="1",
        TORCHINDUCTOR_FORCE_DISABLE_CACHES="1",
        TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"),
        TRITON_CACHE_DIR=str(folder / "triton"),
    )
    os.environ.update(environment)
    _load_guard()
    import torch

    torch.set_num_threads(1)
    _install(GPUS[architecture])


def _load_guard() -> None:
    """Give torch hooks of CUDA that need no driver, and a device guard that does nothing. Autograd and copies ask them.

    The library is built once for each torch, which takes half a minute.
    """
    assert "torch" not in sys.modules, "torch looks up CUDA's hooks when it is imported"
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    torch = Path(spec.origin).parent
    key = hashlib.sha256(((torch / "version.py").read_text(encoding="utf-8") + _GUARD).encode()).hexdigest()[:12]
    library = _BUILT / f"guard_{key}.so"
    if not library.exists():
        _BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_BUILT) as folder:
            source, built = Path(folder, "guard.cpp"), Path(folder, "guard.so")
            source.write_text(_GUARD, encoding="utf-8")
            flags = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{torch / 'include'}"]
            links = [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu"]
            subprocess.run(["g++", *flags, str(source), "-o", str(built), *links], check=True, timeout=300)
            built.replace(library)
    for name in ("libtorch_global_deps.so", "libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


class _NoGuard:
    """Stands for ``torch.cuda.device`` and the guard that generated code enters."""

    def __init__(self, index: int = 0) -> None:
        self.idx = index

    def __enter__(self) -> _NoGuard:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        return None


def _install(gpu: Gpu) -> None:
    """Tell torch, Inductor and Triton that there is one device, ``gpu``. Cannot be undone: the process is for this."""
    import torch
    from torch._subclasses import fake_tensor

    torch.version.cuda = torch.version.cuda or "13.0"
    answers: dict[str, Any] = {
        "_DeviceGuard": _NoGuard,
        "_exchange_device": lambda *_: 0,
        "_is_compiled": lambda: True,
        "_lazy_init": lambda: None,
        "_maybe_exchange_device": lambda *_: 0,
        "current_device": lambda: 0,
        "device": _NoGuard,
        "device_count": lambda: 1,
        "get_arch_list": lambda: [f"sm_{gpu.capability}"],
        "get_device_capability": lambda *_: (gpu.major, gpu.minor),
        "get_device_name": lambda *_: gpu.name,
        "get_device_properties": lambda *_: gpu,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "is_initialized": lambda: False,
        "is_tf32_supported": lambda: True,
        "mem_get_info": lambda *_: (gpu.total_memory, gpu.total_memory),
        "memory_allocated": lambda *_: 0,
        "set_device": lambda *_: None,
        "set_rng_state": lambda *_: None,
        "synchronize": lambda *_: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch._C._cuda_getCurrentRawStream = lambda *_: 0
    torch._C._ensureCUDADeviceGuardSet()  # a build with CUDA has set its own since
    fake_tensor.init_gpu_context = lambda *_: None  # would allocate on the device (torch 2.11)
    _install_interface(gpu)
    _leave_out_patterns()
    _attend_by_flash()
    _install_triton_driver(gpu)


def _install_interface(gpu: Gpu) -> None:
    """Dynamo's interface copied functions of ``torch.cuda`` when its class was made."""
    import torch
    from torch._dynamo import device_interface

    interface: Any = device_interface.CudaInterface
    for place in (interface, interface.Worker):
        place.get_device_properties = staticmethod(lambda *_: gpu)
        place.current_device = staticmethod(lambda: 0)
    for name in ("device_count", "synchronize", "set_device", "is_bf16_supported", "memory_allocated"):
        setattr(interface, name, staticmethod(getattr(torch.cuda, name)))
    interface.exchange_device = staticmethod(lambda *_: 0)
    interface.maybe_exchange_device = staticmethod(lambda *_: 0)
    interface.device = _NoGuard
    interface.get_raw_stream = staticmethod(lambda *_: 0)
    device_interface.get_cuda_stream = lambda *_: 0
    for name in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(name, interface)


def _leave_out_patterns() -> None:
    """Inductor traces its patterns with example tensors on the device, which there are none of."""
    from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm

    for module, name in (
        (fuse_attention, "_sfdp_init"),
        (misc_patterns, "_misc_patterns_init"),
        (pad_mm, "_pad_mm_init"),
    ):
        assert hasattr(module, name), f"{module.__name__} has no {name}"
        setattr(module, name, lambda *_: None)


def _attend_by_flash() -> None:
    """Torch chooses a kernel for attention by asking the driver. Choose the one that it takes on this device."""
    import torch

    elsewhere = torch.nn.functional.scaled_dot_product_attention

    def attend(q: Any, k: Any, v: Any, is_causal: bool = False) -> Any:
        if q.device.type != "cuda":
            return elsewhere(q, k, v, is_causal=is_causal)
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]

    torch.nn.functional.scaled_dot_product_attention = attend  # type: ignore[assignment]


def _install_triton_driver(gpu: Gpu) -> None:
    """Triton asks its driver for a target even where it is given one."""
    import torch
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import GPUDriver
    from triton.runtime import driver

    class Nowhere(GPUDriver):  # type: ignore[misc]
        def __init__(self) -> None:
            self.utils = SimpleNamespace()

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", gpu.capability, gpu.warp_size)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _: object = None) -> int:
            return 0

        def get_device_capability(self, *_: object) -> tuple[int, int]:
            return gpu.major, gpu.minor

        def set_current_device(self, *_: object) -> None:
            pass

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        @staticmethod
        def is_active() -> bool:
            return True

        def map_python_to_cpp_type(self, kind: str) -> str:
            return kind

        def get_benchmarker(self) -> None:
            return None

    driver.set_active(Nowhere())
    triton_helpers.set_driver_to_gpu = lambda: None
