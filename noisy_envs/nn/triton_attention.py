"""Attention with heads of width 1 or 2 on a GPU, as Triton kernels: each thread owns tokens and looks at all others.

A matrix unit wants heads of width 16 or more, and code of `torch.compile` reads a number for each product. Here a
thread keeps the numbers of its own few tokens in registers, and reads those of the others once for all of them;
nothing is summed over threads. A weight is computed three times, by one `exp2` each. Importing this module needs
Triton.

Shapes: `B` sets, `N` tokens, `H` heads of width `W`. A program takes P heads and R tokens of a set.
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
UNITS = 128  # of a program, tokens times heads, where there are so many: one warp, four of a thread


@triton_op("noisy_envs::narrow_attention", mutates_args=())
def attend(projected: Tensor, mask: Tensor | None, heads: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attend, softmax_j(scale · q_i · k_j) v_j.

    Args:
        projected: (B, N, 3 H W), queries, keys and values, float32, contiguous.
        mask: bool (B, N) or what broadcasts to it, True where one may be attended to; a set without any gives zeros.
        heads: H.
        scale: of the scores.

    Returns:
        The mixtures (B, N, H W), and of the weights before they are divided (B, N, H, 2), to base 2: the logarithm of
        their sum, and their sum relative to the largest.

    Raises:
        TypeError: if `projected` is not float32, as the kernels write so many bytes, or the mask is not bool.
    """
    if projected.dtype != torch.float32:
        raise TypeError(f"projected is {projected.dtype}: must be torch.float32")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask is {mask.dtype}: must be torch.bool")
    sets, tokens, features = projected.shape
    mask = _in_one_piece(mask, sets, tokens)
    out, shift = projected.new_empty(sets, tokens, features // 3), projected.new_empty(sets, tokens, heads, 2)
    grid, numbers = _launch(sets, tokens, heads, features // 3 // heads)
    wrap_triton(_forward)[grid](projected, mask, out, shift, scale * LOG2_E, *numbers, mask is not None, num_warps=1)
    return out, shift


@triton_op("noisy_envs::narrow_attention_gradient", mutates_args=())
def gradient(
    projected: Tensor, mask: Tensor | None, out: Tensor, shift: Tensor, grad: Tensor, heads: int, scale: float
) -> Tensor:
    """Return the gradient by `projected` (B, N, 3 H W), of the gradient by the mixtures, contiguous (B, N, H W)."""
    sets, tokens, features = projected.shape
    mask = _in_one_piece(mask, sets, tokens)
    found, shift_along = torch.empty_like(projected), torch.empty_like(shift)
    grid, numbers = _launch(sets, tokens, heads, features // 3 // heads)
    wrap_triton(_backward_queries)[grid](
        projected, mask, out, shift, grad, found, shift_along, scale, LOG2_E, *numbers, mask is not None,
        num_warps=1,
    )  # fmt: skip
    wrap_triton(_backward_keys)[grid](
        projected, mask, shift_along, grad, found, scale, LOG2_E, *numbers, mask is not None, num_warps=1
    )
    return found


def _in_one_piece(mask: Tensor | None, sets: int, tokens: int) -> Tensor | None:
    """Return the mask as the kernels read it, (B, N) without gaps."""
    return None if mask is None else mask.expand(sets, tokens).contiguous()


def _launch(sets: int, tokens: int, heads: int, width: int) -> tuple[tuple[int, int], tuple[int, ...]]:
    """Return the grid, and the kernels' numbers N, H, W, P, R."""
    rows = min(UNITS, max(32, triton.next_power_of_2(tokens)))
    side_by_side = math.gcd(heads, UNITS // rows)
    grid = sets * (heads // side_by_side), triton.cdiv(tokens, rows)
    return grid, (tokens, heads, width, side_by_side, rows)


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    projected, mask, ctx.heads, ctx.scale = inputs
    ctx.save_for_backward(projected, mask, *output)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    projected, mask, out, shift = ctx.saved_tensors
    return gradient(projected, mask, out, shift, grad.contiguous(), ctx.heads, ctx.scale), None, None, None


attend.register_autograd(_differentiate, setup_context=_set_up)


@triton.jit
def _units(place: tl.tensor, W: tl.constexpr) -> tl.tensor:
    """Return a pointer to units of W numbers: pairs are read and written as one number of 64 bits."""
    return place if W == 1 else place.to(tl.pointer_type(tl.uint64), bitcast=True)


@triton.jit
def _load(place: tl.tensor, real: tl.tensor | None, W: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return the numbers of units, a single one twice; 0 where not `real`."""
    both = tl.load(place, real, 0 if real is not None else None)
    if W == 1:
        x0, x1 = both, both
    else:
        x0 = (both & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
        x1 = (both >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return x0, x1


@triton.jit
def _store(place: tl.tensor, x0: tl.tensor, x1: tl.tensor, real: tl.tensor, W: tl.constexpr) -> None:
    """Store the numbers of units, the first only if W is 1, where `real`."""
    if W == 1:
        tl.store(place, x0, real)
    else:
        low, high = x0.to(tl.uint32, bitcast=True).to(tl.uint64), x1.to(tl.uint32, bitcast=True).to(tl.uint64)
        tl.store(place, low | (high << 32), real)


@triton.jit
def _places(
    N: tl.constexpr, H: tl.constexpr, P: tl.constexpr, R: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return the set, its first token's place among all, heads (1, P) and rows (R, 1) of a program."""
    group = (tl.program_id(0) // (H // P)).to(tl.int64)
    head = tl.program_id(0) % (H // P) * P + tl.arange(0, P)[None, :]
    row = tl.program_id(1) * R + tl.arange(0, R)[:, None]
    return group * N, head, row, row < N


@triton.jit
def _forward(
    projected: tl.tensor, mask: tl.tensor, out: tl.tensor, shift: tl.tensor, scale: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, R: tl.constexpr, MASKED: tl.constexpr,
) -> None:  # fmt: skip
    first, head, row, real = _places(N, H, P, R)
    query = _units(projected, W) + first * 3 * H + head
    key, value = query + H, query + 2 * H
    q0, q1 = _load(query + row * 3 * H, real, W)
    q0, q1 = q0 * scale, q1 * scale
    top = tl.full([R, P], -float("inf"), tl.float32)
    for j in tl.range(0, N, loop_unroll_factor=8):
        k0, k1 = _load(key + j * 3 * H, None, W)
        score = q0 * k0
        if W == 2:
            score += q1 * k1
        if MASKED:
            score = tl.where(tl.load(mask + first + j), score, -float("inf"))
        top = tl.maximum(top, score)
    total, o0, o1 = tl.zeros([R, P], tl.float32), tl.zeros([R, P], tl.float32), tl.zeros([R, P], tl.float32)
    for j in range(N):
        k0, k1 = _load(key + j * 3 * H, None, W)
        v0, v1 = _load(value + j * 3 * H, None, W)
        score = q0 * k0 - top
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
    _store(_units(out, W) + place, o0 / total, o1 / total, real, W)
    _store(_units(shift, 2) + place, top + tl.log2(total), total, real, 2)


@triton.jit
def _backward_queries(
    projected: tl.tensor, mask: tl.tensor, out: tl.tensor, shift: tl.tensor, grad: tl.tensor, found: tl.tensor,
    shift_along: tl.tensor, scale: tl.constexpr, log2_e: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, R: tl.constexpr, MASKED: tl.constexpr,
) -> None:  # fmt: skip
    first, head, row, real = _places(N, H, P, R)
    query = _units(projected, W) + first * 3 * H + head
    key, value = query + H, query + 2 * H
    place = (first + row) * H + head
    q0, q1 = _load(query + row * 3 * H, real, W)
    q0, q1 = q0 * (scale * log2_e), q1 * (scale * log2_e)
    g0, g1 = _load(_units(grad, W) + place, real, W)
    o0, o1 = _load(_units(out, W) + place, real, W)
    along = g0 * o0  # the part of the gradient along what came out
    if W == 2:
        along += g1 * o1
    own_shift, _ = _load(_units(shift, 2) + place, real, 2)
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
    _store(_units(found, W) + (first + row) * 3 * H + head, d0 * scale, d1 * scale, real, W)
    _store(_units(shift_along, 2) + place, own_shift, along, real, 2)


@triton.jit
def _backward_keys(
    projected: tl.tensor, mask: tl.tensor, shift_along: tl.tensor, grad: tl.tensor, found: tl.tensor,
    scale: tl.constexpr, log2_e: tl.constexpr,
    N: tl.constexpr, H: tl.constexpr, W: tl.constexpr, P: tl.constexpr, R: tl.constexpr, MASKED: tl.constexpr,
) -> None:  # fmt: skip
    first, head, row, real = _places(N, H, P, R)
    query = _units(projected, W) + first * 3 * H + head
    slopes = _units(grad, W) + first * H + head
    others = _units(shift_along, 2) + first * H + head
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
    if MASKED:  # nobody looked at these
        seen = tl.load(mask + first + row, real, 0) != 0
        d0, e0 = tl.where(seen, d0, 0.0), tl.where(seen, e0, 0.0)
        d1, e1 = tl.where(seen, d1, 0.0), tl.where(seen, e1, 0.0)
    place = _units(found, W) + (first + row) * 3 * H + H + head
    _store(place, d0 * scale, d1 * scale, real, W)
    _store(place + H, e0, e1, real, W)
