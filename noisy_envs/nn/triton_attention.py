"""Attention with heads of width 1 or 2 on a GPU, as Triton kernels: each thread owns tokens and reads all others.

Matrix units need heads of width 16 or more, and code of `torch.compile` reads memory once for each product. Here a
thread keeps the numbers of its few tokens in registers, and reads each other token once for all of them. No sums go
across threads. Each weight is computed three times, by one `exp2` each. Importing this module requires Triton.

Shapes: `B` sets, `N` tokens, `H` heads of width `W`. A program handles P heads and R tokens of a set.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

LOG2_E = math.log2(math.e)  # exp2 is one instruction, exp is not
PROGRAM_SIZE = 128  # tokens times heads of a program, if there are as many: one warp, four for each thread


@triton_op("noisy_envs::narrow_attention", mutates_args=())
def attend(projected: Tensor, mask: Tensor | None, heads: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return softmax_j(scale · q_i · k_j) v_j, summed over tokens j.

    Args:
        projected: queries, keys and values (B, N, 3 H W), float32, contiguous.
        mask: bool (B, N) or broadcastable to it; only tokens where it is True are attended to. If a set has none, its
            output is 0.
        heads: H.
        scale: factor of the scores.

    Returns:
        The mixtures (B, N, H W), and two numbers (B, N, H, 2) about the weights before normalisation: the binary
        logarithm of their sum, and their sum divided by the largest weight.

    Raises:
        TypeError: `projected` is not float32, the only dtype of the kernels, or the mask is not bool.
    """
    if projected.dtype != torch.float32:
        raise TypeError(f"projected: expected torch.float32, got {projected.dtype}")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask: expected torch.bool, got {mask.dtype}")
    sets, tokens, features = projected.shape
    mask = _contiguous(mask, sets, tokens)
    out, shift = projected.new_empty(sets, tokens, features // 3), projected.new_empty(sets, tokens, heads, 2)
    grid, sizes = _launch(sets, tokens, heads, features // 3 // heads)
    wrap_triton(_forward)[grid](projected, mask, out, shift, scale * LOG2_E, *sizes, mask is not None, num_warps=1)
    return out, shift


@triton_op("noisy_envs::narrow_attention_gradient", mutates_args=())
def gradient(
    projected: Tensor, mask: Tensor | None, out: Tensor, shift: Tensor, grad: Tensor, heads: int, scale: float
) -> Tensor:
    """Return the gradient with respect to `projected` (B, N, 3 H W).

    `grad` is the gradient with respect to the mixtures, contiguous (B, N, H W).
    """
    sets, tokens, features = projected.shape
    mask = _contiguous(mask, sets, tokens)
    projected_grad, shift_along = torch.empty_like(projected), torch.empty_like(shift)
    grid, sizes = _launch(sets, tokens, heads, features // 3 // heads)
    wrap_triton(_backward_queries)[grid](
        projected, mask, out, shift, grad, projected_grad, shift_along, scale, LOG2_E, *sizes, mask is not None,
        num_warps=1,
    )  # fmt: skip
    wrap_triton(_backward_keys)[grid](
        projected, mask, shift_along, grad, projected_grad, scale, LOG2_E, *sizes, mask is not None, num_warps=1
    )
    return projected_grad


def _contiguous(mask: Tensor | None, sets: int, tokens: int) -> Tensor | None:
    """Return the mask as the kernels read it: (B, N), contiguous."""
    return None if mask is None else mask.expand(sets, tokens).contiguous()


def _launch(sets: int, tokens: int, heads: int, width: int) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return the grid, and the sizes N, H, W, P, R that the kernels are compiled for."""
    rows = min(PROGRAM_SIZE, max(32, triton.next_power_of_2(tokens)))
    program_heads = math.gcd(heads, PROGRAM_SIZE // rows)
    grid = sets * (heads // program_heads), triton.cdiv(tokens, rows)
    return grid, (tokens, heads, width, program_heads, rows)


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    projected, mask, ctx.heads, ctx.scale = inputs
    ctx.save_for_backward(projected, mask, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    projected, mask, out, shift = ctx.saved_tensors
    return gradient(projected, mask, out, shift, grad.contiguous(), ctx.heads, ctx.scale), None, None, None


attend.register_autograd(_differentiate, setup_context=_set_up)


@triton.jit
def _groups(pointer: tl.tensor, W: tl.constexpr) -> tl.tensor:
    """Return a pointer to groups of W numbers: a pair is read and written as one number of 64 bits."""
    return pointer if W == 1 else pointer.to(tl.pointer_type(tl.uint64), bitcast=True)


@triton.jit
def _load(pointer: tl.tensor, real: tl.tensor | None, W: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return both numbers of each group, or the only one twice; 0 where not `real`."""
    both = tl.load(pointer, real, 0 if real is not None else None)
    if W == 1:
        x0, x1 = both, both
    else:
        x0 = (both & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
        x1 = (both >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return x0, x1


@triton.jit
def _store(pointer: tl.tensor, x0: tl.tensor, x1: tl.tensor, real: tl.tensor, W: tl.constexpr) -> None:
    """Store the numbers of each group, only the first if W is 1, where `real`."""
    if W == 1:
        tl.store(pointer, x0, real)
    else:
        low, high = x0.to(tl.uint32, bitcast=True).to(tl.uint64), x1.to(tl.uint32, bitcast=True).to(tl.uint64)
        tl.store(pointer, low | (high << 32), real)


@triton.jit
def _program_rows(
    N: tl.constexpr, H: tl.constexpr, P: tl.constexpr, R: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the first row of a program's set, its heads (1, P), its tokens (R, 1), and which of these exist."""
    group = (tl.program_id(0) // (H // P)).to(tl.int64)
    head = tl.program_id(0) % (H // P) * P + tl.arange(0, P)[None, :]
    row = tl.program_id(1) * R + tl.arange(0, R)[:, None]
    return group * N, head, row, row < N


@triton.jit
def _forward(
    projected: tl.tensor, mask: tl.tensor, out: tl.tensor, shift: tl.tensor, scale: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, R: tl.constexpr, MASKED: tl.constexpr,
) -> None:  # fmt: skip
    first, head, row, real = _program_rows(N, H, P, R)
    query = _groups(projected, W) + first * 3 * H + head
    key, value = query + H, query + 2 * H
    q0, q1 = _load(query + row * 3 * H, real, W)
    q0, q1 = q0 * scale, q1 * scale
    largest = tl.full([R, P], -float("inf"), tl.float32)
    for j in tl.range(0, N, loop_unroll_factor=8):
        k0, k1 = _load(key + j * 3 * H, None, W)
        score = q0 * k0
        if W == 2:
            score += q1 * k1
        if MASKED:
            score = tl.where(tl.load(mask + first + j), score, -float("inf"))
        largest = tl.maximum(largest, score)
    total, o0, o1 = tl.zeros([R, P], tl.float32), tl.zeros([R, P], tl.float32), tl.zeros([R, P], tl.float32)
    for j in range(N):
        k0, k1 = _load(key + j * 3 * H, None, W)
        v0, v1 = _load(value + j * 3 * H, None, W)
        score = q0 * k0 - largest
        if W == 2:
            score += q1 * k1
        weight = tl.exp2(score)
        if MASKED:
            weight = tl.where(tl.load(mask + first + j), weight, 0.0)
        total += weight
        o0 += weight * v0
        if W == 2:
            o1 += weight * v1
    total = tl.where(total == 0, 1.0, total)
    place = (first + row) * H + head
    _store(_groups(out, W) + place, o0 / total, o1 / total, real, W)
    _store(_groups(shift, 2) + place, largest + tl.log2(total), total, real, 2)


@triton.jit
def _backward_queries(
    projected: tl.tensor, mask: tl.tensor, out: tl.tensor, shift: tl.tensor, grad: tl.tensor,
    projected_grad: tl.tensor, shift_along: tl.tensor, scale: tl.constexpr, log2_e: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, R: tl.constexpr, MASKED: tl.constexpr,
) -> None:  # fmt: skip
    first, head, row, real = _program_rows(N, H, P, R)
    query = _groups(projected, W) + first * 3 * H + head
    key, value = query + H, query + 2 * H
    place = (first + row) * H + head
    q0, q1 = _load(query + row * 3 * H, real, W)
    q0, q1 = q0 * (scale * log2_e), q1 * (scale * log2_e)
    g0, g1 = _load(_groups(grad, W) + place, real, W)
    o0, o1 = _load(_groups(out, W) + place, real, W)
    along = g0 * o0  # projection of the gradient on the output
    if W == 2:
        along += g1 * o1
    own_shift, _ = _load(_groups(shift, 2) + place, real, 2)
    d0, d1 = tl.zeros([R, P], tl.float32), tl.zeros([R, P], tl.float32)
    for j in range(N):
        k0, k1 = _load(key + j * 3 * H, None, W)
        v0, v1 = _load(value + j * 3 * H, None, W)
        score = q0 * k0 - own_shift
        slope = g0 * v0 - along
        if W == 2:
            score += q1 * k1
            slope += g1 * v1
        weight = tl.exp2(score)
        if MASKED:
            weight = tl.where(tl.load(mask + first + j), weight, 0.0)
        slope *= weight
        d0 += slope * k0
        if W == 2:
            d1 += slope * k1
    _store(_groups(projected_grad, W) + (first + row) * 3 * H + head, d0 * scale, d1 * scale, real, W)
    _store(_groups(shift_along, 2) + place, own_shift, along, real, 2)


@triton.jit
def _backward_keys(
    projected: tl.tensor, mask: tl.tensor, shift_along: tl.tensor, grad: tl.tensor, projected_grad: tl.tensor,
    scale: tl.constexpr, log2_e: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, R: tl.constexpr, MASKED: tl.constexpr,
) -> None:  # fmt: skip
    first, head, row, real = _program_rows(N, H, P, R)
    query = _groups(projected, W) + first * 3 * H + head
    slopes = _groups(grad, W) + first * H + head
    others = _groups(shift_along, 2) + first * H + head
    k0, k1 = _load(query + H + row * 3 * H, real, W)
    k0, k1 = k0 * (scale * log2_e), k1 * (scale * log2_e)
    v0, v1 = _load(query + 2 * H + row * 3 * H, real, W)
    d0, d1 = tl.zeros([R, P], tl.float32), tl.zeros([R, P], tl.float32)
    e0, e1 = tl.zeros([R, P], tl.float32), tl.zeros([R, P], tl.float32)
    for i in range(N):
        q0, q1 = _load(query + i * 3 * H, None, W)
        g0, g1 = _load(slopes + i * H, None, W)
        shift, along = _load(others + i * H, None, 2)
        score = k0 * q0 - shift
        slope = v0 * g0 - along
        if W == 2:
            score += k1 * q1
            slope += v1 * g1
        weight = tl.exp2(score)
        slope *= weight
        d0 += slope * q0
        e0 += weight * g0
        if W == 2:
            d1 += slope * q1
            e1 += weight * g1
    if MASKED:  # masked tokens had no weight
        attended = tl.load(mask + first + row, real, 0) != 0
        d0, e0 = tl.where(attended, d0, 0.0), tl.where(attended, e0, 0.0)
        d1, e1 = tl.where(attended, d1, 0.0), tl.where(attended, e1, 0.0)
    key_grad = _groups(projected_grad, W) + (first + row) * 3 * H + H + head
    _store(key_grad, d0 * scale, d1 * scale, real, W)
    _store(key_grad + H, e0, e1, real, W)
