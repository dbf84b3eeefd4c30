"""Counter-based randomness: each number is a hash of (seed, episode, counter, stream, index).

There is no generator and so no state to save, to copy or to share by mistake: world i of a vector environment
seeded s draws what the single environment seeded s + i draws, and any episode can be replayed from its seed
and number. The hash works in int64 masked to 32 bits, because torch lacks full unsigned arithmetic. Both
multipliers are below 2**31, so that no product of a 32-bit word overflows: NumPy, torch, CUDA and compiled
code then agree bit for bit.

The mixer is the two-round xorshift-multiply with constants found by the search of
https://github.com/skeeto/hash-prospector (bias 0.107); `tests/test_randomness.py` measures ours.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np

from noisy_envs.arrays import Array, namespace

MASK = 0xFFFFFFFF
WEYL = 0x1E3779B9  # odd and below 2**31: neighbouring indices land far apart
STREAM = 1 << 24  # indices in one stream
SCALAR_HASH_LIMIT = 8  # numbers that cost less to hash one by one than as an array of NumPy; about equal at 16
KEY_SALTS = (0x243F6A88, 0x05A308D3)  # two independent chains make a key of 64 bits
MAX_SEED = 2**63 - 1


def _mix(x: Array) -> Array:
    """Scramble 32-bit words: a bijection on 0 … 2**32 − 1 in which each input bit moves half of the output."""
    x = x ^ (x >> 16)  # a new array; the rest changes it in place, which spares NumPy memory
    x *= 0x21F0AAAD
    x &= MASK
    x ^= x >> 15
    x *= 0x735A2D97
    x &= MASK
    x ^= x >> 15
    return x


def episode_words(seed: Any, episode: Any) -> list[Any]:
    """Return the two words of an episode's key, whole numbers or arrays as seed and episode are."""
    later = _mix(episode >> 32)  # 0 of the first 2**32 episodes, as `_mix` leaves 0 alone
    chains = []
    for salt in KEY_SALTS:
        word = salt
        for part in (seed & MASK, seed >> 32 ^ later, episode & MASK):
            word = _mix(part ^ word)
        chains.append(word)
    return chains


def episode_key(seed: Array, episode: Array) -> Array:
    """Return the keys (B, 2), 64 bits each, of the episodes `episode` (B,) under the seeds `seed` (B,).

    Both are int64 and not negative.
    """
    return namespace(seed).stack(episode_words(seed, episode), axis=-1)


def _offsets(xp: Any, counts: tuple[int, ...], device: Any) -> Array:
    """Return what sets the numbers of all streams apart, (sum of counts,) int64."""
    streams = [
        xp.arange(stream * STREAM, stream * STREAM + count, dtype=xp.int64, device=device)
        for stream, count in enumerate(counts)
    ]
    return xp.concat(streams) * WEYL


@lru_cache(maxsize=256)
def _kept_offsets(counts: tuple[int, ...]) -> np.ndarray:
    """Return the offsets on NumPy, which a single world asks for again and again, as words of 32 bits."""
    offsets: np.ndarray = _offsets(np, counts, "cpu").astype(np.uint32)
    offsets.flags.writeable = False
    return offsets


def uniforms(key: Array, counter: Array, counts: tuple[int, ...], dtype: Any = None) -> tuple[Array, ...]:
    """Draw numbers from U[0, 1), one array for each stream.

    Args:
        key: (B, 2) keys of episodes, or (1, 2) for many counters of one episode.
        counter: (B,) int64; by convention 0 is the start of an episode and t + 1 its step t.
        counts: how many numbers each stream gives, of at most 256 streams; asking one for more never moves the
            numbers of another.
        dtype: a floating type, float32 by default. The numbers have 24 bits and are exact in each.

    Returns:
        For each stream an array (B, count).
    """
    if not counts:
        return ()
    xp = namespace(key)
    if xp is np and len(key) == len(counter) == 1:  # whole numbers cost less than arrays of one
        base = _mix(int(key[0, 0]) ^ _mix(int(counter[0])))
    else:
        base = _mix(key[:, :1] ^ _mix(counter[:, None]))  # (B, 1)
    if xp is np and not isinstance(base, int):  # words of NumPy's own, which wrap alike: half the memory of int64
        base, key = base.astype(np.uint32), key.astype(np.uint32)
    offset = _kept_offsets(counts) if xp is np else _offsets(xp, counts, key.device)
    if isinstance(base, int) and sum(counts) <= SCALAR_HASH_LIMIT:
        second = int(key[0, 1])
        word = np.array([[_mix(_mix((base + x) & MASK) ^ second) for x in offset.tolist()]], np.int64)  # also of none
    else:
        word = _mix(_mix((base + offset) & MASK) ^ key[:, 1:])  # (B, sum of counts)
    drawn = xp.astype(word >> 8, dtype or xp.float32) * 2.0**-24
    streams, end = [], 0
    for count in counts:
        end += count
        streams.append(drawn[:, end - count : end])
    return tuple(streams)


class IntegerStream:
    """Whole numbers for scalar code, one after another; the same seed always draws the same."""

    def __init__(self, seed: int) -> None:
        """Begin with a seed from 0 to 2**63 − 1."""
        self._keys = [_mix(_mix(seed & MASK ^ salt) ^ seed >> 32) for salt in KEY_SALTS]
        self._index = 0

    def below(self, count: int) -> int:
        """Draw from 0 to count − 1."""
        self._index += 1
        if count == 1:  # no choice: nothing to hash
            return 0
        word = _mix((self._keys[0] + self._index * WEYL) & MASK)
        return _mix(word ^ self._keys[1]) * count >> 32

    def between(self, low: int, high: int) -> int:
        """Draw from low to high, both included."""
        return low + self.below(high - low + 1)

    def sample(self, count: int, size: int) -> list[int]:
        """Draw `size` different numbers below `count`, in random order."""
        numbers = list(range(count))
        for i in range(size):
            j = self.between(i, count - 1)
            numbers[i], numbers[j] = numbers[j], numbers[i]
        return numbers[:size]

    def member(self, bits: int) -> int:
        """Draw the place of one of the bits that are set, which must not be none."""
        rank, place, half = self.below(bits.bit_count()), 0, 1 << bits.bit_length().bit_length()
        while half := half >> 1:  # look in the lower half, or skip it
            low = bits & (1 << half) - 1
            if rank >= low.bit_count():
                rank -= low.bit_count()
                place += half
                low = bits >> half
            bits = low
        return place


def derive_seed(seed: int, purpose: str) -> int:
    """Hash a run's seed and a purpose ("train", "evaluate") to a seed of environments.

    World i takes this seed + i: runs seeded 1, 2, 3 would share worlds if they used their seeds as they are.
    """
    digest = hashlib.blake2b(f"{seed} {purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2
