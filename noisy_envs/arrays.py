"""One array interface for the games: the same code runs on NumPy arrays and on torch tensors of any device.

NumPy 2 follows the Array API standard; torch does so through array-api-compat, which is imported with the first
tensor, so that `import noisy_envs` works without torch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

Array = Any  # a numpy.ndarray or a torch.Tensor: the standard has no common type


def namespace(array: Array) -> Any:
    """Return the Array API namespace of an array."""
    if isinstance(array, np.ndarray):
        return np
    import array_api_compat.torch as torch_namespace

    return torch_namespace


def outside_inference_mode(like: Array) -> AbstractContextManager[Any]:
    """Return a context for making arrays of the library of `like` that are cached for later calls.

    Tensors made in torch's inference mode can never take part in gradients.
    """
    if isinstance(like, np.ndarray):
        return nullcontext()
    import torch

    return torch.inference_mode(False)


def gather_rows(array: Array, rows: Array) -> Array:
    """Return rows of `array` (B, ...) by integer indices: (*rows.shape, ...)."""
    # NumPy's `take` is faster than its indexing
    return array.take(rows, axis=0) if isinstance(array, np.ndarray) else array[rows]


def scatter_rows(array: Array, rows: Array, values: Array) -> Array:
    """Return a copy of `array` (B, ...) in which `rows` (R,) hold `values` (R, ...)."""
    out = namespace(array).asarray(array, copy=True)
    out[rows] = values
    return out


def as_numpy(array: Array) -> np.ndarray:
    """Return a tensor on any device, or anything that NumPy converts, as a NumPy array."""
    return np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)
