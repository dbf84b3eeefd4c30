"""Attention with heads of width 1 or 2 on a GPU, as Triton kernels: each thread owns tokens and looks at all others.

A matrix unit wants heads of width 16 or more, and code of `torch.compile` reads a number for each product. Here a
thread keeps the numbers of its own few tokens in registers, and reads those of the others once for all of them;
nothing is summed over threads. A weight is computed three times, by one `exp2` each. Importing this module needs
Triton.

Shapes: `B` sets, `N` tokens, `H` heads of width `W`. A program takes one set, one head and R tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

LOG2_E = math.log2(math.e)  # exp2 is one instruction
WIDEST = 2  # W that the kernels are written for
ROWS = 128  # tokens of a program, which is one warp: four of a thread


@triton_op("noisy_envs::narrow_attention", mutates_args=())
def attend(projected: Tensor, mask: Tensor | None, heads: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attend, softmax_j(scale · q_i · k_j) v_j.

    Args:
        projected: (B, N, 3 H W), float32, contiguous.
        mask: bool (B, N), True where one may be attended to; a set without any gives zeros.
        heads: H.
        scale: of the scores.

    Returns:
        The mixtures (B, N, H W), and the logarithms of the sums of weights (B, H, N), to base 2.
    """
    sets, tokens, features = projected.shape
    out = projected.new_empty(sets, tokens, features // 3)
    shift = projected.new_empty(sets, heads, tokens)
    wrap_triton(_forward)[_grid(sets, tokens, heads)](
        projected, mask, out, shift, scale * LOG2_E,
        tokens, heads, features // 3 // heads, _rows(tokens), mask is not None, num_warps=1,
    )  # fmt: skip
    return out, shift


@triton_op("noisy_envs::narrow_attention_gradient", mutates_args=())
def gradient(
    projected: Tensor, mask: Tensor | None, out: Tensor, shift: Tensor, grad: Tensor, heads: int, scale: float
) -> Tensor:
    """Return the gradient by `projected` (B, N, 3 H W), of the gradient by the mixtures, contiguous (B, N, H W)."""
    sets, tokens, features = projected.shape
    found, shift_along = torch.empty_like(projected), shift.new_empty(*shift.shape, 2)
    numbers = (tokens, heads, features // 3 // heads, _rows(tokens), mask is not None)
    wrap_triton(_backward_queries)[_grid(sets, tokens, heads)](
        projected, mask, out, shift, grad, found, shift_along, scale, LOG2_E, *numbers, num_warps=1
    )
    wrap_triton(_backward_keys)[_grid(sets, tokens, heads)](
        projected, mask, shift_along, grad, found, scale, LOG2_E, *numbers, num_warps=1
    )
    return found


def _grid(sets: int, tokens: int, heads: int) -> tuple[int, int]:
    return sets * heads, triton.cdiv(tokens, _rows(tokens))


def _rows(tokens: int) -> int:
    return min(ROWS, max(32, triton.next_power_of_2(tokens)))


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    projected, mask, ctx.heads, ctx.scale = inputs
    ctx.save_for_backward(projected, mask, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    projected, mask, out, shift = ctx.saved_tensors
    return gradient(projected, mask, out, shift, grad.contiguous(), ctx.heads, ctx.scale), None, None, None


attend.register_autograd(_differentiate, setup_context=_set_up)


@triton.jit
def _load(place: tl.tensor, real: tl.tensor | None, W: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return one number twice, or two that are neighbours by one load; 0 where not `real`."""
    if W == 1:
        one = tl.load(place, real, 0.0 if real is not None else None)
        return one, one
    both = tl.load(place.to(tl.pointer_type(tl.uint64), bitcast=True), real, 0 if real is not None else None)
    low, high = (both & 0xFFFFFFFF).to(tl.uint32), (both >> 32).to(tl.uint32)
    return low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)


@triton.jit
def _store(place: tl.tensor, x0: tl.tensor, x1: tl.tensor, real: tl.tensor, W: tl.constexpr) -> None:
    """Store the first number, or two that are neighbours at once, where `real`."""
    if W == 1:
        tl.store(place, x0, real)
    else:
        low, high = x0.to(tl.uint32, bitcast=True).to(tl.uint64), x1.to(tl.uint32, bitcast=True).to(tl.uint64)
        tl.store(place.to(tl.pointer_type(tl.uint64), bitcast=True), low | (high << 32), real)


@triton.jit
def _forward(
    projected: tl.tensor, mask: tl.tensor, out: tl.tensor, shift: tl.tensor, scale: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr, MASKED: tl.constexpr,
) -> None:  # fmt: skip
    group, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    row = tl.program_id(1) * R + tl.arange(0, R)
    real = row < N
    step: tl.constexpr = 3 * H * W  # from a token to the next
    query = projected + group * N * step + head * W
    key, value = query + H * W, query + 2 * H * W
    if MASKED:
        mask += group * N
    q0, q1 = _load(query + row * step, real, W)
    q0, q1 = q0 * scale, q1 * scale
    top = tl.full([R], -float("inf"), tl.float32)
    for j in tl.range(0, N, loop_unroll_factor=8):
        k0, k1 = _load(key + j * step, None, W)
        score = q0 * k0
        if W == 2:
            score += q1 * k1
        if MASKED:
            score = tl.where(tl.load(mask + j), score, -float("inf"))
        top = tl.maximum(top, score)
    total, o0, o1 = tl.zeros([R], tl.float32), tl.zeros([R], tl.float32), tl.zeros([R], tl.float32)
    for j in range(N):
        k0, k1 = _load(key + j * step, None, W)
        v0, v1 = _load(value + j * step, None, W)
        score = q0 * k0 - top
        if W == 2:
            score += q1 * k1
        weight = tl.exp2(score)
        if MASKED:
            weight = tl.where(tl.load(mask + j), weight, 0.0)
        total += weight
        o0 += weight * v0
        if W == 2:
            o1 += weight * v1
    total = tl.where(total == 0, 1.0, total)
    _store(out + (group * N + row) * H * W + head * W, o0 / total, o1 / total, real, W)
    tl.store(shift + (group * H + head) * N + row, top + tl.log2(total), real)


@triton.jit
def _backward_queries(
    projected: tl.tensor, mask: tl.tensor, out: tl.tensor, shift: tl.tensor, grad: tl.tensor, found: tl.tensor,
    shift_along: tl.tensor, scale: tl.constexpr, log2_e: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr, MASKED: tl.constexpr,
) -> None:  # fmt: skip
    group, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    row = tl.program_id(1) * R + tl.arange(0, R)
    real = row < N
    step: tl.constexpr = 3 * H * W
    start = group * N * step + head * W
    query = projected + start
    key, value = query + H * W, query + 2 * H * W
    if MASKED:
        mask += group * N
    own = (group * N + row) * H * W + head * W
    q0, q1 = _load(query + row * step, real, W)
    q0, q1 = q0 * (scale * log2_e), q1 * (scale * log2_e)
    g0, g1 = _load(grad + own, real, W)
    o0, o1 = _load(out + own, real, W)
    along = g0 * o0  # the part of the gradient along what came out
    if W == 2:
        along += g1 * o1
    place = (group * H + head) * N + row
    own_shift = tl.load(shift + place, real, 0.0)
    d0, d1 = tl.zeros([R], tl.float32), tl.zeros([R], tl.float32)
    for j in range(N):
        k0, k1 = _load(key + j * step, None, W)
        v0, v1 = _load(value + j * step, None, W)
        score = q0 * k0 - own_shift
        slope = g0 * v0 - along
        if W == 2:
            score += q1 * k1
            slope += g1 * v1
        weight = tl.exp2(score)
        if MASKED:
            weight = tl.where(tl.load(mask + j), weight, 0.0)
        slope *= weight
        d0 += slope * k0
        if W == 2:
            d1 += slope * k1
    _store(found + start + row * step, d0 * scale, d1 * scale, real, W)
    _store(shift_along + 2 * place, own_shift, along, real, 2)


@triton.jit
def _backward_keys(
    projected: tl.tensor, mask: tl.tensor, shift_along: tl.tensor, grad: tl.tensor, found: tl.tensor,
    scale: tl.constexpr, log2_e: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, W: tl.constexpr, R: tl.constexpr, MASKED: tl.constexpr,
) -> None:  # fmt: skip
    group, head = (tl.program_id(0) // H).to(tl.int64), tl.program_id(0) % H
    row = tl.program_id(1) * R + tl.arange(0, R)
    real = row < N
    step: tl.constexpr = 3 * H * W
    start = group * N * step + head * W
    query = projected + start
    key, value = query + H * W, query + 2 * H * W
    grad += group * N * H * W + head * W
    shift_along += 2 * (group * H + head) * N
    k0, k1 = _load(key + row * step, real, W)
    k0, k1 = k0 * (scale * log2_e), k1 * (scale * log2_e)
    v0, v1 = _load(value + row * step, real, W)
    d0, d1 = tl.zeros([R], tl.float32), tl.zeros([R], tl.float32)
    e0, e1 = tl.zeros([R], tl.float32), tl.zeros([R], tl.float32)
    for i in range(N):
        q0, q1 = _load(query + i * step, None, W)
        g0, g1 = _load(grad + i * H * W, None, W)
        other_shift, along = _load(shift_along + 2 * i, None, 2)
        score = k0 * q0 - other_shift
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
    if MASKED:  # nobody looked at these
        seen = tl.load(mask + group * N + row, real, 0) != 0
        d0, e0 = tl.where(seen, d0, 0.0), tl.where(seen, e0, 0.0)
        d1, e1 = tl.where(seen, d1, 0.0), tl.where(seen, e1, 0.0)
    place = found + start + H * W + row * step
    _store(place, d0 * scale, d1 * scale, real, W)
    _store(place + H * W, e0, e1, real, W)
