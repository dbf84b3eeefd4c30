"""Layers with few features, which compiled code on a GPU computes by `noisy_envs.nn.triton_layers`.

The results are those of torch's layers, up to rounding; forward and backward passes are faster. Without compilation
most of the time is spent in Python, and torch's own layers spend less there. So eager code uses torch's layers, and so
do wide layers and half precision.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor, nn

# The CPU-only build of torch comes without Triton. Only its users import it: with torch's compiler, that takes seconds.
TRITON_AVAILABLE = find_spec("triton") is not None
MAX_WIDTH = 64  # inputs and outputs of a layer that the kernels take: a program keeps its weights in registers


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Map inputs (..., I) by a weight (O, I) and a bias (O,) to (..., O), as `torch.nn.functional.linear` does.

    Raises:
        RuntimeError: for second derivatives in compiled code, which torch does not support either.
    """
    fits = inputs.shape[-1] == weight.shape[-1] and (bias is None or bias.shape == weight.shape[:1])
    if fits and _use_kernels(inputs, weight, bias):  # shapes that do not fit get torch's own error
        from noisy_envs.nn import triton_layers

        result: Tensor = triton_layers.Linear.apply(inputs, weight, bias)
        return result
    return nn.functional.linear(inputs, weight, bias)


def _use_kernels(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    tensors = [inputs, weight] if bias is None else [inputs, weight, bias]
    exact = all(x.is_cuda and x.dtype == torch.float32 for x in tensors) and not torch.is_autocast_enabled("cuda")
    return TRITON_AVAILABLE and torch.compiler.is_compiling() and exact and max(weight.shape) <= MAX_WIDTH


class Linear(nn.Linear):
    """`torch.nn.Linear`, computed by `linear`."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs (..., I) to outputs (..., O)."""
        return linear(inputs, self.weight, self.bias)


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, computed by a kernel if it normalises the last axis and has weight and bias."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalise inputs (..., I)."""
        supported = self.weight is not None and self.bias is not None and inputs.shape[-1:] == self.normalized_shape
        if supported and _use_kernels(inputs, self.weight, self.bias):
            from noisy_envs.nn import triton_layers

            result: Tensor = triton_layers.LayerNorm.apply(inputs, self.weight, self.bias, self.eps)
            return result
        return super().forward(inputs)
