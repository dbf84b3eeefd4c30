"""Dropout by a hash: which numbers are kept follows from two words, so that a kernel need not read a mask.

`noisy_envs/nn/cuda/encoder.cuh` computes the same bits.

Shapes: L layers, M samples, T tokens with a class token, H width of an embedding.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from noisy_envs.randomness import MASK, WEYL, _mix

STEPS = 1 << 16  # a number is dropped with a probability of a multiple of 1 / STEPS


def hashed_masks(keys: Tensor, shape: tuple[int, ...], rate: float | Tensor) -> Tensor:
    """Return which numbers dropout keeps, bool (L, M, T, H), on the device of the keys, without waiting for a GPU.

    Two neighbouring features of a token share a 32-bit word, which is the hash of the keys and of the word's index
    ((sample · L + layer) · T + token) · ceil(H / 2) + feature // 2. A number is kept if its half of the word, the
    lower one of even features, is at least `rate` · 2**16, rounded.

    Args:
        keys: (2,) int64, words of 32 bits.
        shape: (L, M, T, H).
        rate: probability of dropping a number.
    """
    layers, samples, tokens, width = shape
    words = (width + 1) // 2
    sizes = samples, layers, tokens, words
    index = torch.arange(samples * layers * tokens * words, device=keys.device)
    word = _mix(_mix(keys[0] + index * WEYL & MASK) ^ keys[1]).view(sizes).transpose(0, 1)
    halves = torch.stack([word & STEPS - 1, word >> 16], dim=-1).flatten(-2)[..., :width]
    dropped = torch.round(rate.float() * STEPS) if isinstance(rate, Tensor) else round(float(np.float32(rate)) * STEPS)
    kept: Tensor = halves >= dropped
    return kept
