"""What stages and plug-ins are made of, for those who write one: see docs/write_a_stage.md."""

from mfsdp_compile.runtime.geometry.groups import Group
from mfsdp_compile.runtime.lanes.check import WrongLane
from mfsdp_compile.runtime.lanes.lane import Lane, Plugin
from mfsdp_compile.runtime.lanes.plain import AllGather, AllReduce, AllToAll, Cast, ReduceScatter, Scale, Trim
from mfsdp_compile.runtime.lanes.probe import LyingStage
from mfsdp_compile.runtime.lanes.stage import Collective, Cost, Flying, Local, Spec, Stage

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Cast",
    "Collective",
    "Cost",
    "Flying",
    "Group",
    "Lane",
    "Local",
    "LyingStage",
    "Plugin",
    "ReduceScatter",
    "Scale",
    "Spec",
    "Stage",
    "Trim",
    "WrongLane",
]
