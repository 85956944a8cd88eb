#!/bin/sh
# GPU tests and GPU benchmarks, on a machine with one NVIDIA GPU, torch 2.11 or newer, pytest and rich, and no network.
# Nothing is installed. Results go to the folder given, or to benchmarks/results.
set -u
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1
PYTHON="${PYTHON:-python3}"
OUT="${1:-benchmarks/results}"
mkdir -p "$OUT"
failed=0

"$PYTHON" -c 'import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())' || exit 1
"$PYTHON" -m pytest -q -p no:cacheprovider tests/gpu || failed=1
"$PYTHON" -m mfsdp_compile.cli calibrate --ranks 1 --out "$OUT/hardware_gpu.json" || failed=1
"$PYTHON" -m mfsdp_compile.cli demo --ranks 1 --steps 30 --out "$OUT/gpu-demo" || failed=1
"$PYTHON" benchmarks/step_time.py --ranks 1 --out "$OUT/step_time_gpu_1rank.json" || failed=1
"$PYTHON" benchmarks/step_time.py --simulate 8 --out "$OUT/step_time_gpu_simulated_8ranks.json" || failed=1
"$PYTHON" benchmarks/memory.py --simulate 8 --out "$OUT/memory_gpu_simulated_8ranks.json" || failed=1
"$PYTHON" benchmarks/memory.py --simulate 64 --out "$OUT/memory_gpu_simulated_64ranks.json" || failed=1
"$PYTHON" benchmarks/optimizer_step.py --simulate 8 --out "$OUT/optimizer_step_gpu_simulated_8ranks.json" || failed=1
exit $failed
