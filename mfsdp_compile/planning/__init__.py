"""Planning a training run without the machine: ``mfsdp plan`` and :func:`plan`."""

from .planner import Candidate, Forecast, Job, Planned, plan
from .workloads import SHAPES, Workload, workload

__all__ = ["SHAPES", "Candidate", "Forecast", "Job", "Planned", "Workload", "plan", "workload"]
