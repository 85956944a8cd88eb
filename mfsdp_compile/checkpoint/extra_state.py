"""Contents of a checkpoint other than weights: random number generators, and the program's own data.

They are stored as tensors, which checkpoint formats carry between programs without pickles.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["extra_from_tensor", "extra_to_tensor", "get_generators", "set_generators"]


def get_generators() -> dict[str, Tensor]:
    """Return the state of the generators of torch (on the CPU and the current GPU), Python and NumPy."""
    version, internal, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # type: ignore[misc]
    assert kind == "MT19937"
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *internal]),
        "python_gauss": torch.tensor(float("nan") if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), int(position), int(has_gauss)]),
        "numpy_gauss": torch.tensor(float(cached), dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_generators(state: Mapping[str, Tensor]) -> None:
    """Restore the state from :func:`get_generators`. GPU state is ignored if there is no GPU."""
    torch.set_rng_state(state["torch"])
    version, *internal = state["python"].tolist()
    gauss = state["python_gauss"].item()
    random.setstate((version, tuple(internal), None if gauss != gauss else gauss))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, state["numpy_gauss"].item()))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def extra_to_tensor(extra: Any) -> Tensor:
    """Serialize ``extra`` to bytes, as a ``uint8`` tensor.

    Raises:
        TypeError: If it contains something that cannot be loaded without running code from the file.
    """
    stream = io.BytesIO()
    torch.save(extra, stream)
    tensor = torch.frombuffer(bytearray(stream.getbuffer()), dtype=torch.uint8)
    try:
        extra_from_tensor(tensor)
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise TypeError(
            f"extra can hold tensors, numbers, strings, and lists, tuples and dicts of them; what it holds could not be "
            f"loaded without running code ({reason})."
        ) from None
    return tensor


def extra_from_tensor(tensor: Tensor) -> Any:
    return torch.load(io.BytesIO(tensor.numpy().tobytes()), weights_only=True, map_location="cpu")
