"""Planning a training run without the machine: ``mfsdp plan`` and :func:`mfsdp_compile.plan`."""


from .shapes import SHAPES, Workload, workload

__all__ = ["SHAPES", "Workload", "workload"]
