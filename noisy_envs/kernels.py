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
    projected: Tensor, mask: Tensor | None, shift: Tensor, along: Tensor, grad: Tensor, heads: int, scale: float
) -> Tensor:
    """Return the gradient by projected (B, N, 3 H W).

    Args:
        projected, mask, heads, scale: as `attend` has them.
        shift: (B, H, N), what it returned.
        along: (B, H, N), products of gradient and mixture, summed over W.
        grad: the gradient by the mixtures (B, N, H W), contiguous.
    """
    sets, tokens, features = projected.shape
    found = torch.empty_like(projected)
    for kernel in (_backward_queries, _backward_keys):
        wrap_triton(kernel)[_grid(sets, tokens, heads)](
            projected, mask, shift, along, grad, found, scale, LOG2_E,
            tokens, heads, features // 3 // heads, _rows(tokens), mask is not None, num_warps=1,
        )  # fmt: skip
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
    along = (grad * out).unflatten(2, (ctx.heads, -1)).sum(3).transpose(1, 2).contiguous()
    found = gradient(projected, mask, shift, along, grad.contiguous(), ctx.heads, ctx.scale)
    return found, None, None, None


attend.register_autograd(_differentiate, setup_context=_set_up)


@triton.jit
def _forward(
    projected: tl.tensor, mask: tl.tensor, out: tl.tensor, shift: tl.tensor, scale: tl.tensor,
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
    q0 = tl.load(query + row * step, real, 0.0) * scale
    if W == 2:
        q1 = tl.load(query + row * step + 1, real, 0.0) * scale
    top = tl.full([R], -float("inf"), tl.float32)
    for j in range(N):
        score = q0 * tl.load(key + j * step)
        if W == 2:
            score += q1 * tl.load(key + j * step + 1)
        if MASKED:
            score = tl.where(tl.load(mask + j), score, -float("inf"))
        top = tl.maximum(top, score)
    total, o0, o1 = tl.zeros([R], tl.float32), tl.zeros([R], tl.float32), tl.zeros([R], tl.float32)
    for j in range(N):
        score = q0 * tl.load(key + j * step) - top
        if W == 2:
            score += q1 * tl.load(key + j * step + 1)
        weight = tl.exp2(score)
        if MASKED:
            weight = tl.where(tl.load(mask + j), weight, 0.0)
        total += weight
        o0 += weight * tl.load(value + j * step)
        if W == 2:
            o1 += weight * tl.load(value + j * step + 1)
    total = tl.where(total == 0, 1.0, total)
    place = out + (group * N + row) * H * W + head * W
    tl.store(place, o0 / total, real)
    if W == 2:
        tl.store(place + 1, o1 / total, real)
    tl.store(shift + (group * H + head) * N + row, top + tl.log2(total), real)


@triton.jit
def _backward_queries(
    projected: tl.tensor, mask: tl.tensor, shift: tl.tensor, along: tl.tensor, grad: tl.tensor, found: tl.tensor,
    scale: tl.tensor, log2_e: tl.tensor,
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
    own = grad + (group * N + row) * H * W + head * W
    q0, g0 = tl.load(query + row * step, real, 0.0) * (scale * log2_e), tl.load(own, real, 0.0)
    if W == 2:
        q1, g1 = tl.load(query + row * step + 1, real, 0.0) * (scale * log2_e), tl.load(own + 1, real, 0.0)
    place = (group * H + head) * N + row
    own_shift, own_along = tl.load(shift + place, real, 0.0), tl.load(along + place, real, 0.0)
    d0, d1 = tl.zeros([R], tl.float32), tl.zeros([R], tl.float32)
    for j in range(N):
        k0 = tl.load(key + j * step)
        score = q0 * k0 - own_shift
        slope = g0 * tl.load(value + j * step) - own_along
        if W == 2:
            k1 = tl.load(key + j * step + 1)
            score += q1 * k1
            slope += g1 * tl.load(value + j * step + 1)
        weight = tl.exp2(score)
        if MASKED:
            weight = tl.where(tl.load(mask + j), weight, 0.0)
        slope *= weight
        d0 += slope * k0
        if W == 2:
            d1 += slope * k1
    tl.store(found + start + row * step, d0 * scale, real)
    if W == 2:
        tl.store(found + start + row * step + 1, d1 * scale, real)


@triton.jit
def _backward_keys(
    projected: tl.tensor, mask: tl.tensor, shift: tl.tensor, along: tl.tensor, grad: tl.tensor, found: tl.tensor,
    scale: tl.tensor, log2_e: tl.tensor,
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
    shift += (group * H + head) * N
    along += (group * H + head) * N
    k0, v0 = tl.load(key + row * step, real, 0.0) * (scale * log2_e), tl.load(value + row * step, real, 0.0)
    if W == 2:
        k1 = tl.load(key + row * step + 1, real, 0.0) * (scale * log2_e)
        v1 = tl.load(value + row * step + 1, real, 0.0)
    d0, d1, e0, e1 = (
        tl.zeros([R], tl.float32), tl.zeros([R], tl.float32), tl.zeros([R], tl.float32), tl.zeros([R], tl.float32)
    )  # fmt: skip
    for i in range(N):
        q0, g0 = tl.load(query + i * step), tl.load(grad + i * H * W)
        score = k0 * q0 - tl.load(shift + i)
        slope = v0 * g0 - tl.load(along + i)
        if W == 2:
            q1, g1 = tl.load(query + i * step + 1), tl.load(grad + i * H * W + 1)
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
    tl.store(place, d0 * scale, real)
    tl.store(place + H * W, e0, real)
    if W == 2:
        tl.store(place + 1, d1 * scale, real)
        tl.store(place + H * W + 1, e1, real)
