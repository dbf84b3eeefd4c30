"""The array namespace of a core: NumPy on the CPU, torch on any device, the same lines for both.

NumPy 2 follows the Array API standard by itself; torch does so through array-api-compat, which is imported
only when the first tensor comes (`import noisy_envs` needs no torch).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

Array = Any  # a numpy.ndarray or a torch.Tensor: the standard has no common type


def namespace(array: Array) -> Any:
    """Return the Array API namespace to which `array` belongs."""
    if isinstance(array, np.ndarray):
        return np
    import array_api_compat.torch as torch_namespace

    return torch_namespace


def outside_inference_mode(like: Array) -> AbstractContextManager[Any]:
    """Return a context in which to make, beside `like`, arrays that are kept and used in later calls.

    Tensors made in torch's inference mode would have no part in gradients for good.
    """
    if isinstance(like, np.ndarray):
        return nullcontext()
    import torch

    return torch.inference_mode(False)


def gather_rows(array: Array, rows: Array) -> Array:
    """Return the rows of `array` (B, ...) that integers name, (*rows.shape, ...): on NumPy faster than by brackets."""
    return array.take(rows, axis=0) if isinstance(array, np.ndarray) else array[rows]


def scatter_rows(array: Array, rows: Array, values: Array) -> Array:
    """Return a copy of `array` (B, ...) in which `rows` (R,) hold `values` (R, ...)."""
    out = namespace(array).asarray(array, copy=True)
    out[rows] = values
    return out


def as_numpy(array: Array) -> np.ndarray:
    """Return `array`, a tensor on any device or anything that NumPy takes, as a NumPy array."""
    return np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)
