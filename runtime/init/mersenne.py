"""Skipping random numbers: the state of torch's CPU generator after n more draws, without drawing them.

The generator is MT19937 (Matsumoto and Nishimura, "Mersenne Twister", 1998), whose words satisfy a linear recurrence
over the field of two elements with characteristic polynomial p. Skipping n words multiplies by x^n mod p, a polynomial
of up to 19937 terms that stands for a sum (exclusive or) of as many of the following words (Haramoto et al., "Efficient
Jump Ahead for F2-Linear Random Number Generators", 2008). This takes about ten milliseconds, however large n is.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_N, _M, _R = 624, 397, 31  # words of state; distance of the recurrence; bits of a word that are not part of the state
_MATRIX = 0x9908B0DF
_DEGREE = 32 * _N - _R

# torch.get_rng_state(): uint64 seed, int32 left, int32 seeded, uint64 next, uint64 words[624], cached normal samples:
# three doubles, int32 whether they are valid, and after a gap a float, and whether it is valid.
_LEFT, _SEEDED, _NEXT, _WORDS = 8, 12, 16, 24
_NORMALS = _WORDS + 8 * _N

_Words = npt.NDArray[np.uint32]


def skipped(state: Tensor, draws: int) -> Tensor:
    """Return a CPU generator's state, in the format of ``torch.get_rng_state()``, after ``draws`` more 32-bit words."""
    if not draws:
        return state  # before the first draw, the state encodes its position differently
    raw = state.numpy().copy()
    left, following = (raw[at : at + size].view(kind) for at, size, kind in ((_LEFT, 4, "<i4"), (_NEXT, 8, "<u8")))
    stored = raw[_WORDS : _WORDS + 8 * _N].view("<u8")
    position = _N - int(left[0]) + 1 + draws  # of the next word to be drawn, in the words of the state
    if position > _N:
        words = stored.astype(np.uint32)
        blocks = (position - 1) // _N
        whole = draws // _N  # blocks to skip depend only on the number of draws, so that polynomials can be cached
        if whole > 64:
            words = _jumped(_following_block(words), _N * (whole - 1))
            blocks -= whole
        for _ in range(blocks):
            words = _following_block(words)
        position = (position - 1) % _N + 1
        stored[:] = words
    left[0], following[0] = _N + 1 - position, position
    return torch.from_numpy(raw)


def words_of(state: Tensor) -> tuple[list[int], int]:
    """Return the words in a CPU generator's state, and the position of the word to draw next.

    Raises:
        ValueError: torch would draw from memory beyond the words, or return normal samples that are no numbers.
    """
    raw = state.numpy()
    left, seeded = raw[_LEFT : _SEEDED + 4].view("<i4").tolist()
    (following,) = raw[_NEXT : _NEXT + 8].view("<u8").tolist()
    if not 1 <= left <= _N or seeded != 1 or left + following > _N + 1:
        raise ValueError(f"torch's generator has {left:,} of {_N} words left after {following:,}")
    normals = [*raw[_NORMALS : _NORMALS + 24].view("<f8"), *raw[_NORMALS + 32 : _NORMALS + 36].view("<f4")]
    if not np.isfinite(normals).all():
        raise ValueError(f"the next normal samples of torch's generator are {normals}")
    return raw[_WORDS:_NORMALS].view("<u8").tolist(), following


def _following_block(words: _Words) -> _Words:
    """Return the next 624 words, before tempering."""
    new = np.concatenate([words, np.empty(_N, np.uint32)])
    step = _N - _M
    for start in range(0, _N, step):  # each word depends on the one 227 words before it
        stop = min(start + step, _N)
        upper, lower = new[start:stop] & np.uint32(0x80000000), new[start + 1 : stop + 1] & np.uint32(0x7FFFFFFF)
        mixed = upper | lower
        twisted = (mixed >> np.uint32(1)) ^ np.where(mixed & np.uint32(1), np.uint32(_MATRIX), np.uint32(0))
        new[start + _N : stop + _N] = new[start + _M : stop + _M] ^ twisted
    return new[_N:]


def _jumped(words: _Words, steps: int) -> _Words:
    """Return the 624 words that begin ``steps`` later. ``words`` must come from the recurrence, not from seeding."""
    blocks = [words]
    while len(blocks) * _N < _DEGREE + _N:
        blocks.append(_following_block(blocks[-1]))
    windows = np.lib.stride_tricks.sliding_window_view(np.concatenate(blocks), _N)
    total = np.zeros(_N, np.uint32)
    for some in np.array_split(_terms(steps), 16):  # a copy each: 1.5 MB
        total ^= np.bitwise_xor.reduce(windows[some], axis=0)
    return total


@functools.lru_cache(maxsize=256)
def _terms(steps: int) -> npt.NDArray[np.intp]:
    """Return the exponents of ``x ** steps`` modulo the characteristic polynomial."""
    power = 1
    for bit in bin(steps)[2:]:
        power = _reduced(int(bin(power)[2:], 4) << int(bit))  # square by spreading the bits apart; times x
    bits = np.frombuffer(power.to_bytes(_DEGREE // 8 + 1, "little"), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little"))


def _reduced(polynomial: int) -> int:
    low_part, exponents = (1 << _DEGREE) - 1, _characteristic()[:-1]
    while excess := polynomial >> _DEGREE:
        polynomial &= low_part
        for exponent in exponents:
            polynomial ^= excess << exponent
    return polynomial


@functools.cache
def _characteristic() -> tuple[int, ...]:
    """Return the characteristic polynomial's exponents, increasing (Matsumoto and Nishimura, appendix)."""

    def times(a: int, b: int) -> int:
        product = 0
        while b:
            product ^= a << ((b & -b).bit_length() - 1)
            b &= b - 1
        return product

    def power(a: int, n: int) -> int:
        return functools.reduce(times, [a] * n, 1)

    long, short = 1 << _N | 1 << _M, 1 << (_N - 1) | 1 << (_M - 1)
    total = times(power(long, 32 - _R), power(short, _R))
    for i in range(32):
        if _MATRIX >> i & 1:
            total ^= times(power(long, 32 - _R), power(short, _R - 1 - i)) if i < _R else power(long, 31 - i)
    return tuple(i for i in range(total.bit_length()) if total >> i & 1)
