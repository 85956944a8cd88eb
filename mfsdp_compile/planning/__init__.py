"""Planning a training run without the machine: ``mfsdp plan`` and :func:`plan`."""

from .candidates import Candidate
from .jobs import Job, Planned
from .planner import Forecast, plan
from .workloads import SHAPES, Workload, workload

__all__ = ["SHAPES", "Candidate", "Forecast", "Job", "Planned", "Workload", "plan", "workload"]
