"""Attention with heads of width one or two, as in most of the paper's networks; fast when compiled.

If a query, a key and a value are one number each, a score is a product of two numbers, and attention is a few sums over
pairs of tokens. `torch.compile` turns these into loops that store no scores: each weight is computed again when it is
needed, three times in a training step. Torch's own kernels would pad the heads to the width of a matrix unit. On a GPU
with Triton, `noisy_envs.nn.triton_attention` does the same work, compiled or not. Eager code on a CPU stores all (B, N,
N, H) weights: compile it there, or use `scaled_dot_product_attention`. Half precision, also under autocast, uses that
function too: weights computed again from rounded sums would have errors of 10%.

Shapes: `B` sets, `N` tokens, `H` heads of width `W`. Sums over the width of a head are written as sums of W tensors
(B, N, H). The work grows with W², so this is fast up to about W = 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from noisy_envs.nn.small_layers import TRITON_AVAILABLE, linear

MAX_TRITON_WIDTH = 2  # largest W that the kernels of `triton_attention` support
LOG2_E = math.log2(math.e)  # exp2 is one instruction on a GPU
# Options of `torch.compile` for W > 1: without them the compiler would store the weights, since each one depends on
# so many numbers, instead of computing them again.
COMPILE_OPTIONS = {"realize_reads_threshold": 16, "realize_acc_reads_threshold": 16}


def narrow_attention(
    tokens: Tensor,
    query_key_value: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    axis: int = 1,
    width: int = 1,
) -> Tensor:
    """Return softmax_j(scale · q_i · k_j) v_j, summed over tokens j, for H narrow heads.

    Args:
        tokens: (B, N, H W), or (N, B, H W) if `axis` is 0. The second is faster on a CPU: its vector instructions work
            on several sets at once, whose numbers then are neighbours in memory.
        query_key_value: (3 H W, H W), the rows of W_Q, W_K and W_V.
        mask: bool, (B, N) or (N, B); only tokens where it is True are attended to. If a set has none, its output is 0.
        scale: factor of the scores.
        axis: axis of the tokens of a set, 1 or 0.
        width: W, the width of a head.

    Returns:
        A tensor of the shape of `tokens`, before any output projection.

    Raises:
        NotImplementedError: in a backward pass with `create_graph`, since there is no second derivative.
    """
    if axis == 1:
        projected = linear(tokens, query_key_value)
        exact = projected.dtype == torch.float32  # not the dtype of tokens: autocast may have changed it
        if TRITON_AVAILABLE and projected.is_cuda and exact and width <= MAX_TRITON_WIDTH:
            from noisy_envs.nn import triton_attention

            return triton_attention.attend(projected, mask, tokens.shape[2] // width, scale)[0]
        heads = projected.chunk(3, dim=-1)
    else:  # three products, so that each result is contiguous
        heads = tuple(torch.nn.functional.linear(tokens, weight) for weight in query_key_value.chunk(3))
    if heads[0].dtype in (torch.float16, torch.bfloat16):
        return _torch_attention(heads, mask, scale, axis, width)
    parts = [part for head in heads for part in head.unflatten(-1, (-1, width)).unbind(-1)]
    mixed: tuple[Tensor, ...] = _Attention.apply(mask, scale, axis, *parts)
    return torch.stack(mixed, dim=-1).flatten(-2)


def _torch_attention(heads: Sequence[Tensor], mask: Tensor | None, scale: float, axis: int, width: int) -> Tensor:
    """Attend by torch's own kernels, which sum numbers of half precision in float32."""
    query, key, value = (x.unflatten(-1, (-1, width)).movedim(axis, 2) for x in heads)  # (B, H, N, W)
    allowed = None if mask is None else mask.movedim(axis, 1)[:, None, None]
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, allowed, scale=scale)
    return mixed.movedim(2, axis).flatten(2)


class _Attention(torch.autograd.Function):
    """The sums, with a gradient that computes the weights again.

    `axis` is the axis of the tokens, 0 or 1. Queries, keys and values are passed as W tensors each, and the mixtures
    of values are returned as W tensors.
    """

    @staticmethod
    def forward(ctx: Any, mask: Tensor | None, scale: float, axis: int, *parts: Tensor) -> tuple[Tensor, ...]:
        query, key, value = _thirds(parts)
        scaled = [q * (scale * LOG2_E) for q in query]
        mask = None if mask is None else mask.unsqueeze(2)
        largest = _largest_scores(scaled, key, mask, axis)
        weights = _weights(scaled, key, largest, mask, axis)  # (…, N queries, N keys, H)
        total = weights.sum(axis + 1)
        if mask is not None:
            total = total.masked_fill(total == 0, 1)
        out = [(weights * v.unsqueeze(axis)).sum(axis + 1) / total for v in value]
        ctx.save_for_backward(largest + total.log2(), mask, *scaled, *key, *value, *out)
        ctx.scale, ctx.axis = scale, axis
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # some saved tensors have no graph
            raise NotImplementedError("narrow_attention has no second derivative")
        shift, mask, *saved = ctx.saved_tensors
        scaled, key, value = _thirds(saved[: 3 * len(grad)])
        axis = ctx.axis
        weights = _weights(scaled, key, shift, mask, axis)

        # Each sum is of a product with a single tensor: the compiler would store a product of more tensors.
        def over_keys(x: Tensor) -> Tensor:
            return (weights * x.unsqueeze(axis)).sum(axis + 1)

        def over_queries(x: Tensor) -> Tensor:
            return (weights * x.unsqueeze(axis + 1)).sum(axis)

        projection = _dot(grad, saved[3 * len(grad) :])  # of the gradient on the output
        query_grad = [
            ctx.scale * (_dot(grad, [over_keys(v * k) for v in value]) - projection * over_keys(k)) for k in key
        ]
        key_grad = [
            (_dot(value, [over_queries(g * s) for g in grad]) - over_queries(projection * s)) / LOG2_E for s in scaled
        ]
        return None, None, None, *query_grad, *key_grad, *(over_queries(g) for g in grad)


def _thirds(parts: Sequence[Tensor]) -> tuple[Sequence[Tensor], ...]:
    width = len(parts) // 3
    return parts[:width], parts[width : 2 * width], parts[2 * width :]


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    return reduce(add, (x * y for x, y in zip(left, right, strict=True)))


def _scores(scaled: Sequence[Tensor], key: Sequence[Tensor], axis: int) -> Tensor:
    return _dot([s.unsqueeze(axis + 1) for s in scaled], [k.unsqueeze(axis) for k in key])


def _largest_scores(scaled: Sequence[Tensor], key: Sequence[Tensor], mask: Tensor | None, axis: int) -> Tensor:
    if len(key) > 1:
        scores = _scores(scaled, key, axis)
        return (scores if mask is None else torch.where(mask.unsqueeze(axis), scores, -math.inf)).amax(axis + 1)
    # With W = 1 the largest score of a query belongs to the largest or the smallest key: no scores are needed.
    high = key[0] if mask is None else key[0].masked_fill(~mask, -math.inf)
    low = key[0] if mask is None else key[0].masked_fill(~mask, math.inf)
    return torch.maximum(scaled[0] * high.amax(axis, keepdim=True), scaled[0] * low.amin(axis, keepdim=True))


def _weights(scaled: Sequence[Tensor], key: Sequence[Tensor], shift: Tensor, mask: Tensor | None, axis: int) -> Tensor:
    weights = (_scores(scaled, key, axis) - shift.unsqueeze(axis + 1)).exp2()
    return weights if mask is None else torch.where(mask.unsqueeze(axis), weights, 0)
