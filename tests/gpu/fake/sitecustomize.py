"""Installs the fake GPUs in every Python process that has this folder in ``PYTHONPATH``, also in spawned ones."""

import fake_gpu

fake_gpu.install()
