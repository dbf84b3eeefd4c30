"""Counter-based randomness: each number is a hash of (seed, episode, counter, stream, index).

There is no generator, so no state to save, copy or share by mistake: environment i of a vector environment seeded s
draws what the single environment seeded s + i draws, and any episode can be replayed from its seed and number. The hash
works in int64 masked to 32 bits, because torch lacks full unsigned arithmetic. Both multipliers are below 2**31, so
that no product of a 32-bit word overflows: NumPy, torch, CUDA and compiled code agree bit for bit.

The mixer is a two-round xorshift-multiply with constants found by https://github.com/skeeto/hash-prospector
(bias 0.107); `tests/test_randomness.py` measures the bias here.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np

from noisy_envs.arrays import Array, namespace

MASK = 0xFFFFFFFF
WEYL = 0x1E3779B9  # odd and below 2**31: spreads neighbouring indices
STREAM = 1 << 24  # indices of one stream
SCALAR_HASH_LIMIT = 8  # up to so many numbers a loop of Python ints is faster than NumPy; equal at about 16
KEY_SALTS = (0x243F6A88, 0x05A308D3)  # of two independent chains, which make a 64-bit key
MAX_SEED = 2**63 - 1


def _mix(x: Array) -> Array:
    """Scramble 32-bit words: a bijection in which each input bit flips about half of the output bits."""
    x = x ^ (x >> 16)  # makes a new array; the other lines work in place to save memory
    x *= 0x21F0AAAD
    x &= MASK
    x ^= x >> 15
    x *= 0x735A2D97
    x &= MASK
    x ^= x >> 15
    return x


def episode_words(seed: Any, episode: Any) -> list[Any]:
    """Return the two words of an episode's key: ints or arrays, as seed and episode are."""
    later = _mix(episode >> 32)  # 0 for the first 2**32 episodes, as `_mix(0)` is 0
    chains = []
    for salt in KEY_SALTS:
        word = salt
        for part in (seed & MASK, seed >> 32 ^ later, episode & MASK):
            word = _mix(part ^ word)
        chains.append(word)
    return chains


def episode_key(seed: Array, episode: Array) -> Array:
    """Return 64-bit keys (B, 2) from seeds (B,) and episode numbers (B,), non-negative int64."""
    return namespace(seed).stack(episode_words(seed, episode), axis=-1)


def _offsets(xp: Any, counts: tuple[int, ...], device: Any) -> Array:
    """Return distinct offsets for the numbers of all streams, (sum of counts,) int64."""
    streams = [
        xp.arange(stream * STREAM, stream * STREAM + count, dtype=xp.int64, device=device)
        for stream, count in enumerate(counts)
    ]
    return xp.concat(streams) * WEYL


@lru_cache(maxsize=256)
def _cached_offsets(counts: tuple[int, ...]) -> np.ndarray:
    """Return the offsets as NumPy uint32; single environments need the same ones at every step."""
    offsets: np.ndarray = _offsets(np, counts, "cpu").astype(np.uint32)
    offsets.flags.writeable = False
    return offsets


def uniforms(key: Array, counter: Array, counts: tuple[int, ...], dtype: Any = None) -> tuple[Array, ...]:
    """Draw numbers from U[0, 1), one array for each stream.

    The plain version is the `else` branches: hash all B · sum(counts) words as int64 arrays. NumPy has two faster
    paths with equal results: for one environment Python ints, which cost less than arrays of one element, and for many
    uint32, which wraps by itself and halves the memory.

    Args:
        key: (B, 2) keys of episodes, or (1, 2) for many counters of one episode.
        counter: (B,) int64; by convention 0 for a reset and t + 1 for step t.
        counts: numbers in each stream, of at most 256 streams. A longer stream does not change the others.
        dtype: floating type, float32 by default. The numbers have 24 bits, which every floating type holds exactly.

    Returns:
        An array (B, count) for each stream.
    """
    if not counts:
        return ()
    xp = namespace(key)
    if xp is np and len(key) == len(counter) == 1:
        base = _mix(int(key[0, 0]) ^ _mix(int(counter[0])))
    else:
        base = _mix(key[:, :1] ^ _mix(counter[:, None]))  # (B, 1)
    if xp is np and not isinstance(base, int):
        base, key = base.astype(np.uint32), key.astype(np.uint32)
    offset = _cached_offsets(counts) if xp is np else _offsets(xp, counts, key.device)
    if isinstance(base, int) and sum(counts) <= SCALAR_HASH_LIMIT:
        second = int(key[0, 1])
        words = [_mix(_mix((base + x) & MASK) ^ second) for x in offset.tolist()]
        word = np.array([words], np.int64)  # the dtype matters if there are none
    else:
        word = _mix(_mix((base + offset) & MASK) ^ key[:, 1:])  # (B, sum of counts)
    drawn = xp.astype(word >> 8, dtype or xp.float32) * 2.0**-24
    streams, end = [], 0
    for count in counts:
        end += count
        streams.append(drawn[:, end - count : end])
    return tuple(streams)


class IntegerStream:
    """Random integers for scalar code, one after another; equal seeds give equal streams."""

    def __init__(self, seed: int) -> None:
        """Start the stream of a seed from 0 to 2**63 − 1."""
        self._keys = [_mix(_mix(seed & MASK ^ salt) ^ seed >> 32) for salt in KEY_SALTS]
        self._index = 0

    def below(self, count: int) -> int:
        """Draw from 0 to count − 1."""
        self._index += 1
        if count == 1:  # nothing to choose
            return 0
        word = _mix((self._keys[0] + self._index * WEYL) & MASK)
        return _mix(word ^ self._keys[1]) * count >> 32

    def between(self, low: int, high: int) -> int:
        """Draw from low to high, both included."""
        return low + self.below(high - low + 1)

    def sample(self, count: int, size: int) -> list[int]:
        """Draw `size` distinct numbers below `count`, in random order."""
        numbers = list(range(count))
        for i in range(size):
            j = self.between(i, count - 1)
            numbers[i], numbers[j] = numbers[j], numbers[i]
        return numbers[:size]

    def member(self, bits: int) -> int:
        """Draw the position of a set bit of `bits`, which must not be 0."""
        rank, place, half = self.below(bits.bit_count()), 0, 1 << bits.bit_length().bit_length()
        while half := half >> 1:  # bisect: search the lower half, or skip it
            low = bits & (1 << half) - 1
            if rank >= low.bit_count():
                rank -= low.bit_count()
                place += half
                low = bits >> half
            bits = low
        return place


def derive_seed(seed: int, purpose: str) -> int:
    """Hash a run's seed and a purpose ("train", "evaluate") to a seed of environments.

    Environment i takes this seed + i: runs seeded 1, 2, 3 would share environments if they used their own seeds.
    """
    digest = hashlib.blake2b(f"{seed} {purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2
