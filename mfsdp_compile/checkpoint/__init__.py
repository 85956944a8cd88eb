"""Portable checkpoints: written atomically, reloaded on any number of ranks, and safe to load."""

from .checkpoints import Checkpoints
from .errors import CheckpointError
from .full_state_dict import full_optimizer_state_dict, full_state_dict
from .loading import Restored, load

__all__ = ["CheckpointError", "Checkpoints", "Restored", "full_optimizer_state_dict", "full_state_dict", "load"]
