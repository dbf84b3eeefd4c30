"""Linear layers and layer norms with few features on a GPU, as Triton kernels.

A batch has many rows, one for each token, and few columns. For such shapes torch's matrix products leave most of a GPU
idle, in particular in the gradient of the weights, a sum over all rows. And `torch.compile` chooses its kernels for
norms by timings too short to measure reliably: some choices are seven times too slow. Here a fixed rule divides the
rows among programs, each program sums its rows in order, and torch adds the sums of the programs. Importing this module
requires Triton.

`len` makes M a number for `torch.compile`, not a symbol: code is compiled for each M separately.

Shapes: M rows of I inputs (`IN` in kernels) or O outputs (`OUT`), both at most `small_layers.MAX_WIDTH`. A program
handles R rows at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

LINEAR, NORM = (64, 4), (64, 4)  # R and number of warps of a program
LINEAR_SUM, NORM_SUM = (32, 2), (128, 4)  # the same for kernels that sum over rows
MAX_SUM_PROGRAMS = 264  # programs of a kernel that sums over rows: two for each multiprocessor of an H100 or H200


@triton_op("noisy_envs::linear", mutates_args=())
def apply_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, tf32: bool) -> Tensor:
    """Return inputs weightᵀ + bias (M, O) for contiguous inputs (M, I) and a weight (O, I) of any layout.

    `tf32` rounds factors to TensorFloat-32, here and in the other functions.
    """
    rows, outputs = len(inputs), len(weight)
    out = inputs.new_empty(rows, outputs)
    wrap_triton(_linear)[triton.cdiv(rows, LINEAR[0]),](
        inputs, weight, bias, out, rows, *weight.shape, *weight.stride(), *map(_tile_width, weight.shape), LINEAR[0],
        "tf32" if tf32 else _float32_precision(), bias is not None, num_warps=LINEAR[1],
    )  # fmt: skip
    return out


@triton_op("noisy_envs::sum_of_products", mutates_args=())
def sum_of_products(left: Tensor, right: Tensor, tf32: bool) -> tuple[Tensor, Tensor]:
    """Return leftᵀ right (O, I), and left summed over rows (O,), for contiguous left (M, O) and right (M, I)."""
    rows, sizes = len(left), (left.shape[1], right.shape[1])
    programs, steps = _split_rows(rows, LINEAR_SUM[0])
    products, sums = left.new_empty(programs, *sizes), left.new_empty(programs, sizes[0])
    wrap_triton(_sum_of_products)[programs,](
        left, right, products, sums, rows, *sizes, *map(_tile_width, sizes), steps, LINEAR_SUM[0],
        "tf32" if tf32 else "ieee", num_warps=LINEAR_SUM[1],
    )  # fmt: skip
    return products.sum(0), sums.sum(0)


@triton_op("noisy_envs::layer_norm", mutates_args=())
def apply_norm(inputs: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return normalised inputs (M, I), and the mean and reciprocal standard deviation of each row (2, M)."""
    rows, features = inputs.shape
    out, moments = torch.empty_like(inputs), inputs.new_empty(2, rows)
    wrap_triton(_norm)[triton.cdiv(rows, NORM[0]),](
        inputs, weight, bias, out, moments, eps, rows, features, _tile_width(features), NORM[0], num_warps=NORM[1]
    )
    return out, moments


@triton_op("noisy_envs::layer_norm_gradient", mutates_args=())
def norm_gradient(grad: Tensor, inputs: Tensor, weight: Tensor, moments: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to inputs (M, I), weight (I,) and bias (I,)."""
    rows, features = inputs.shape
    programs, steps = _split_rows(rows, NORM_SUM[0])
    input_grad, sums = torch.empty_like(inputs), inputs.new_empty(programs, 2, features)
    wrap_triton(_norm_gradient)[programs,](
        grad, inputs, weight, moments, input_grad, sums, rows, features, _tile_width(features), steps, NORM_SUM[0],
        num_warps=NORM_SUM[1],
    )  # fmt: skip
    weight_grad, bias_grad = sums.sum(0).unbind()
    return input_grad, weight_grad, bias_grad.clone()  # the results of an operator must not share memory


def _tile_width(size: int) -> int:
    """Return the width of a tile: a power of two, at least the minimum of `tl.dot`."""
    return max(16, triton.next_power_of_2(size))


def _float32_precision() -> str:
    """Return how `tl.dot` multiplies float32: on NVIDIA's tensor cores, by three products of halves of the numbers."""
    return "ieee" if torch.version.hip else "tf32x3"


def _split_rows(rows: int, block: int) -> tuple[int, int]:
    """Return the number of programs that sum over rows, and the number of blocks that each handles."""
    programs = max(1, min(MAX_SUM_PROGRAMS, triton.cdiv(rows, block)))
    return programs, triton.cdiv(rows, programs * block)


class Linear(torch.autograd.Function):
    """A linear layer of float32 inputs (..., I)."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return inputs weightᵀ + bias (..., O)."""
        rows = inputs.reshape(-1, inputs.shape[-1]).contiguous()
        ctx.save_for_backward(rows, weight)
        ctx.tf32 = torch.backends.cuda.matmul.allow_tf32
        return apply_linear(rows, weight, bias, ctx.tf32).view(*inputs.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None]:
        """Return the gradients with respect to inputs, weight and bias."""
        rows, weight = ctx.saved_tensors
        grads = grad.reshape(-1, grad.shape[-1]).contiguous()
        weight_grad, bias_grad = sum_of_products(grads, rows, ctx.tf32)
        input_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = apply_linear(grads, weight.t(), None, ctx.tf32).view(*grad.shape[:-1], rows.shape[1])
        return input_grad, weight_grad, bias_grad if ctx.needs_input_grad[2] else None


class LayerNorm(torch.autograd.Function):
    """A layer norm of float32 inputs (..., I)."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Return normalised inputs (..., I)."""
        rows = inputs.reshape(-1, inputs.shape[-1]).contiguous()
        out, moments = apply_norm(rows, weight, bias, eps)
        ctx.save_for_backward(rows, weight, moments)
        return out.view(inputs.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Return the gradients with respect to inputs, weight and bias."""
        grads = grad.reshape(-1, grad.shape[-1]).contiguous()
        input_grad, weight_grad, bias_grad = norm_gradient(grads, *ctx.saved_tensors)
        return input_grad.view(grad.shape), weight_grad, bias_grad, None


@triton.jit
def _linear(
    inputs: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, rows: int,
    OUT: tl.constexpr, IN: tl.constexpr, ALONG_OUT: tl.constexpr, ALONG_IN: tl.constexpr,
    WIDE_OUT: tl.constexpr, WIDE_IN: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr, BIASED: tl.constexpr,
) -> None:  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * R
    row, i, o = tl.arange(0, R)[:, None], tl.arange(0, WIDE_IN)[None, :], tl.arange(0, WIDE_OUT)
    x = tl.load(inputs + first * IN + row * IN + i, (row < rows - first) & (i < IN), 0.0)
    w = tl.load(weight + o[:, None] * ALONG_OUT + i * ALONG_IN, (o[:, None] < OUT) & (i < IN), 0.0)
    y = tl.dot(x, tl.trans(w), input_precision=PRECISION)
    if BIASED:
        y += tl.load(bias + o, o < OUT, 0.0)[None, :]
    tl.store(out + first * OUT + row * OUT + o[None, :], y, (row < rows - first) & (o[None, :] < OUT))


@triton.jit
def _sum_of_products(
    left: tl.tensor, right: tl.tensor, products: tl.tensor, sums: tl.tensor, rows: int,
    OUT: tl.constexpr, IN: tl.constexpr, WIDE_OUT: tl.constexpr, WIDE_IN: tl.constexpr,
    STEPS: tl.constexpr, R: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    first = program.to(tl.int64) * STEPS * R
    o, i = tl.arange(0, WIDE_OUT), tl.arange(0, WIDE_IN)[None, :]
    product, total = tl.zeros([WIDE_OUT, WIDE_IN], tl.float32), tl.zeros([R, WIDE_OUT], tl.float32)
    for step in range(STEPS):
        row = step * R + tl.arange(0, R)[:, None]
        x = tl.load(left + first * OUT + row * OUT + o[None, :], (row < rows - first) & (o[None, :] < OUT), 0.0)
        y = tl.load(right + first * IN + row * IN + i, (row < rows - first) & (i < IN), 0.0)
        product = tl.dot(tl.trans(x), y, product, input_precision=PRECISION)
        total += x
    tl.store(products + (program * OUT + o[:, None]) * IN + i, product, (o[:, None] < OUT) & (i < IN))
    tl.store(sums + program * OUT + o, tl.sum(total, 0), o < OUT)


@triton.jit
def _norm(
    inputs: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, moments: tl.tensor, eps: tl.constexpr,
    rows: int, IN: tl.constexpr, WIDE_IN: tl.constexpr, R: tl.constexpr,
) -> None:  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * R
    row, i = tl.arange(0, R), tl.arange(0, WIDE_IN)[None, :]
    place, real = row[:, None] * IN + i, (row[:, None] < rows - first) & (i < IN)
    x = tl.load(inputs + first * IN + place, real, 0.0)
    mean = tl.sum(x, 1) / IN
    x = tl.where(real, x - mean[:, None], 0.0)
    scale = 1 / tl.sqrt(tl.sum(x * x, 1) / IN + eps)
    gain, shift = tl.load(weight + i, i < IN, 0.0), tl.load(bias + i, i < IN, 0.0)
    tl.store(out + first * IN + place, x * scale[:, None] * gain + shift, real)
    tl.store(moments + first + row, mean, row < rows - first)
    tl.store(moments + first + rows + row, scale, row < rows - first)


@triton.jit
def _norm_gradient(
    grad: tl.tensor, inputs: tl.tensor, weight: tl.tensor, moments: tl.tensor, input_grad: tl.tensor, sums: tl.tensor,
    rows: int, IN: tl.constexpr, WIDE_IN: tl.constexpr, STEPS: tl.constexpr, R: tl.constexpr,
) -> None:  # fmt: skip
    program = tl.program_id(0)
    first = program.to(tl.int64) * STEPS * R
    i = tl.arange(0, WIDE_IN)
    gain = tl.load(weight + i, i < IN, 0.0)[None, :]
    weight_grad, bias_grad = tl.zeros([R, WIDE_IN], tl.float32), tl.zeros([R, WIDE_IN], tl.float32)
    for step in range(STEPS):
        row = step * R + tl.arange(0, R)[:, None]
        valid = row < rows - first
        place, real = first * IN + (row * IN + i[None, :]), valid & (i[None, :] < IN)
        g = tl.load(grad + place, real, 0.0)
        mean = tl.load(moments + first + row, valid, 0.0)
        scale = tl.load(moments + first + rows + row, valid, 0.0)
        x = tl.where(real, (tl.load(inputs + place, real, 0.0) - mean) * scale, 0.0)
        weight_grad += g * x
        bias_grad += g
        g *= gain
        of_mean, of_scale = tl.sum(g, 1, keep_dims=True) / IN, tl.sum(g * x, 1, keep_dims=True) / IN
        tl.store(input_grad + place, (g - of_mean - x * of_scale) * scale, real)
    place = program * 2 * IN + i
    tl.store(sums + place, tl.sum(weight_grad, 0), i < IN)
    tl.store(sums + place + IN, tl.sum(bias_grad, 0), i < IN)
