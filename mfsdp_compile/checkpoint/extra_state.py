"""Contents of a checkpoint other than weights: random number generators, and the program's own data.

They are stored as tensors, which checkpoint formats carry between programs without pickles.
"""

from __future__ import annotations

import hashlib
import io
import math
import pickle
import random
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mfsdp_compile.runtime.digests import digest, value_digest
from mfsdp_compile.runtime.init.mersenne import words_of

from .archives import check_archive
from .errors import CheckpointError

WORDS = 624
"""Words of a Mersenne Twister."""

MOST_DIGESTS = 100
"""Entries of ``extra`` up to which each has a digest of its own, which ranks send to each other."""

GENERATORS: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] = {
    "torch": (torch.uint8, tuple(torch.get_rng_state().shape)),
    "python": (torch.int64, (1 + WORDS + 1,)),
    "python_gauss": (torch.float64, ()),
    "numpy": (torch.int64, (WORDS + 2,)),
    "numpy_gauss": (torch.float64, ()),
}
"""Dtype and shape of each part of :func:`get_generators`, except for the state of the GPU's generator."""


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


def check_generators(state: Mapping[str, Tensor]) -> None:
    """Check that generators with this state draw random numbers. They read memory at positions that the state names.

    Raises:
        ValueError: If they do not. The message names the part.
    """
    for name, (dtype, shape) in GENERATORS.items():
        found = state.get(name)
        if found is None:
            raise ValueError(f"the state of {name!r} is missing")
        if found.dtype != dtype or tuple(found.shape) != shape:
            raise ValueError(f"{name!r} is {tuple(found.shape)} {found.dtype} instead of {shape} {dtype}")
    version, *words, index = state["python"].tolist()
    if version != random.getstate()[0]:
        raise ValueError(f"'python' has an unknown version, {version}")
    _check_twister("python", words, index)
    *words, position, has_gauss = state["numpy"].tolist()
    _check_twister("numpy", words, position)
    if has_gauss not in (0, 1) or not math.isfinite(state["numpy_gauss"].item()):
        raise ValueError("'numpy' has no normal number that was drawn before")
    if math.isinf(state["python_gauss"].item()):
        raise ValueError("'python_gauss' is infinite")
    _check_twister("torch", *words_of(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.Generator("cuda").set_state(state["cuda"])


def _check_twister(name: str, words: Sequence[int], position: int) -> None:
    if not 0 <= position <= WORDS:
        raise ValueError(f"{name!r} continues at word {position} of {WORDS}")
    if not all(0 <= word < 1 << 32 for word in words):
        raise ValueError(f"{name!r} has words of more than 32 bits")
    if not any([words[0] >> 31, *words[1:]]):
        raise ValueError(f"{name!r} would return only zeros")


def set_generators(state: Mapping[str, Tensor]) -> None:
    """Restore the state from :func:`get_generators`, after checking it. GPU state is ignored if there is no GPU.

    Raises:
        ValueError: See :func:`check_generators`. Nothing has changed.
    """
    check_generators(state)
    torch.set_rng_state(state["torch"])
    version, *internal = state["python"].tolist()
    gauss = state["python_gauss"].item()
    random.setstate((version, tuple(internal), None if gauss != gauss else gauss))
    *keys, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, state["numpy_gauss"].item()))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def check_extra(extra: Any, name: str = "extra") -> None:
    """Check that ``extra`` has no distributed tensors: each rank would pickle its own rows, and one rank's are saved.

    Args:
        name: What the message calls it.

    Raises:
        TypeError: It has. The message names one.
    """
    if (found := next(_distributed(extra, name), None)) is not None:
        raise TypeError(
            f"{found} is a DTensor, of which a rank has its rows only, and the first rank's are saved. Save whole "
            "tensors (value.full_tensor(), on all ranks), or save what it belongs to, a model or another optimizer, "
            "with Checkpoints in another folder. Nothing was written."
        )


def _distributed(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, DTensor):
        yield name
    for key, each in _entries(value):
        yield from _distributed(each, f"{name}[{key!r}]")


def _entries(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)


def digests_of(extra: Any) -> dict[str, str]:
    """Return a digest of each entry of ``extra``, by name; those of equal data are equal on all ranks."""
    if isinstance(extra, Mapping) and 0 < len(extra) <= MOST_DIGESTS:
        return {f"extra[{key!r}]": digest(list(_lines(value, ""))) for key, value in extra.items()}
    return {"extra": digest(list(_lines(extra, "")))}


def _lines(value: Any, name: str) -> Iterator[str]:
    """Yield lines that say what a value is. Not its pickle, which depends on which of its parts are one object."""
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
        yield f"{name}: {value.dtype} {tuple(value.shape)} {value_digest(value)}"
    elif isinstance(value, (Mapping, list, tuple)):
        yield f"{name}: {type(value).__name__} of {len(value)}"
        for key, each in _entries(value):
            yield from _lines(each, f"{name}[{key!r}]")
    elif isinstance(value, Set):
        yield f"{name}: {sorted(map(repr, value))}"
    elif isinstance(value, (bool, int, float, complex, str, bytes, bytearray, type(None), np.generic)):
        yield f"{name}: {value!r}"
    else:
        stream = io.BytesIO()
        torch.save(value, stream)
        yield f"{name}: {hashlib.sha256(stream.getbuffer()).hexdigest()}"


def only_of_some(offers: Sequence[Mapping[str, str] | None]) -> str:
    """Return what the ranks' digests of ``extra`` say is not in the first rank's, which is saved; "": nothing.

    Args:
        offers: :func:`digests_of` each rank's, in the order of ranks; None: it has passed none.
    """
    first = offers[0] or {}
    for rank, offer in enumerate(offers):
        if offer is not None and (names := [n for n in {**offer, **first} if offer.get(n) != first.get(n)]):
            return f"{names[0]} of rank {rank} is not that of the first rank"
    return ""


def extra_to_tensor(extra: Any) -> Tensor:
    """Serialize ``extra`` to bytes, as a ``uint8`` tensor.

    Raises:
        TypeError: If it contains something that cannot be loaded without running code from the file.
    """
    stream = io.BytesIO()
    torch.save(extra, stream)
    tensor = torch.frombuffer(bytearray(stream.getbuffer()), dtype=torch.uint8)
    try:
        extra_from_tensor(tensor, "extra")
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise TypeError(
            "extra can hold tensors, numbers, strings, and lists, tuples and dicts of them; what it holds could not be "
            f"loaded without running code ({reason})."
        ) from None
    return tensor


def extra_from_tensor(tensor: Tensor, where: str) -> Any:
    """Return the data in a result of :func:`extra_to_tensor`.

    Args:
        where: Where it comes from, for messages.

    Raises:
        CheckpointError: If it would unpack to more than its size.
        pickle.UnpicklingError: If it contains something else than tensors, numbers, strings and collections of them.
    """
    if tensor.dtype != torch.uint8 or tensor.ndim != 1:
        raise CheckpointError(f"{where} is {tuple(tensor.shape)} {tensor.dtype}, not a row of bytes.")
    stream = io.BytesIO(tensor.numpy())
    check_archive(stream, where)
    return torch.load(stream, weights_only=True, map_location="cpu")
