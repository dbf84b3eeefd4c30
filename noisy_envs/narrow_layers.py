"""Layers of a few features, which `torch.compile` on a GPU with Triton computes by kernels of ours.

They give what torch's layers give, up to rounding, and are faster to learn: see `layer_kernels`. Without compiling the
time is Python's, and torch's own layers take less of it. They also do what is wide or in half precision.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

try:
    from noisy_envs import layer_kernels
except ImportError:  # torch for a CPU brings no Triton
    HAS_KERNELS = False
else:
    HAS_KERNELS = True


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map inputs (..., I) by a weight (O, I) and a bias (O,) to (..., O), as `torch.nn.functional.linear`.

    Raises:
        RuntimeError: in a backward pass through a compiled backward pass, which torch does not have either.
    """
    if _by_kernels(inputs, weight):
        result: Tensor = layer_kernels.Linear.apply(inputs, weight, bias)
        return result
    return nn.functional.linear(inputs, weight, bias)


def _by_kernels(inputs: Tensor, weight: Tensor) -> bool:
    exact = inputs.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
    fits = exact and inputs.is_cuda and HAS_KERNELS and max(weight.shape) <= layer_kernels.WIDEST
    return fits and torch.compiler.is_compiling()


class Linear(nn.Linear):
    """`torch.nn.Linear` by `linear`."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (..., I) to outputs (..., O)."""
        return linear(inputs, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm` over the last axis, with weight and bias."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalise inputs (..., I)."""
        if _by_kernels(inputs, self.weight):
            result: Tensor = layer_kernels.LayerNorm.apply(inputs, self.weight, self.bias, self.eps)
            return result
        return super().forward(inputs)
