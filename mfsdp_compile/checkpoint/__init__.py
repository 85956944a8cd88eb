"""Portable checkpoints: written atomically, reloaded on any number of ranks, and safe to load."""

from .files import CheckpointError
from .full import full_optimizer_state_dict, full_state_dict
from .loading import Restored, load
from .store import Checkpoints

__all__ = ["CheckpointError", "Checkpoints", "Restored", "full_optimizer_state_dict", "full_state_dict", "load"]
