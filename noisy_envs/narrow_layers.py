"""Layers of a few features, which on a GPU with Triton are computed by kernels of ours, and else by torch.

They give what torch's give, up to rounding, and are faster to learn: see `layer_kernels`. Half precision, autocast and
wide layers go to torch.
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
        NotImplementedError: in a backward pass through a backward pass, as the kernels have no second derivative.
    """
    if _by_kernels(inputs, weight):
        result: Tensor = layer_kernels.Linear.apply(inputs, weight, bias)
        return result
    return nn.functional.linear(inputs, weight, bias)


def _by_kernels(inputs: Tensor, weight: Tensor) -> bool:
    exact = inputs.dtype == weight.dtype == torch.float32 and not torch.is_autocast_enabled("cuda")
    return HAS_KERNELS and inputs.is_cuda and exact and max(weight.shape) <= layer_kernels.WIDEST


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
