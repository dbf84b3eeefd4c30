"""Layers of a few features, which `torch.compile` on a GPU with Triton computes by kernels of ours.

They give what torch's layers give, up to rounding, and are faster to learn: see `layer_kernels`. Without compiling the
time is Python's, and torch's own layers take less of it. They also do what is wide or in half precision.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

try:
    from noisy_envs.nn import triton_layers
except ImportError:  # torch for a CPU brings no Triton
    HAS_KERNELS = False
else:
    HAS_KERNELS = True


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map inputs (..., I) by a weight (O, I) and a bias (O,) to (..., O), as `torch.nn.functional.linear`.

    Raises:
        RuntimeError: in a backward pass through a compiled backward pass, which torch does not have either.
    """
    fits = inputs.shape[-1] == weight.shape[-1] and (bias is None or bias.shape == weight.shape[:1])
    if fits and _by_kernels(inputs, weight, bias):  # else torch tells what does not fit
        result: Tensor = triton_layers.Linear.apply(inputs, weight, bias)
        return result
    return nn.functional.linear(inputs, weight, bias)


def _by_kernels(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    given = [inputs, weight] if bias is None else [inputs, weight, bias]
    exact = all(x.is_cuda and x.dtype == torch.float32 for x in given) and not torch.is_autocast_enabled("cuda")
    return HAS_KERNELS and torch.compiler.is_compiling() and exact and max(weight.shape) <= triton_layers.WIDEST


class Linear(nn.Linear):
    """`torch.nn.Linear` by `linear`."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (..., I) to outputs (..., O)."""
        return linear(inputs, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, by a kernel over the last axis with weight and bias."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalise inputs (..., I)."""
        whole = self.weight is not None and self.bias is not None and inputs.shape[-1:] == self.normalized_shape
        if whole and _by_kernels(inputs, self.weight, self.bias):
            result: Tensor = triton_layers.LayerNorm.apply(inputs, self.weight, self.bias, self.eps)
            return result
        return super().forward(inputs)
