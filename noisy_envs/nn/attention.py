"""Attention with heads of one or a few numbers, as most of the paper's networks have it, fast when compiled.

With one number for each query, key and value, a score is a product of two numbers, and attention is sums over
pairs of tokens. `torch.compile` makes them loops that keep no score in memory: each weight is computed again where
it is needed, three times in a step of learning. The library's kernels instead pad such heads to the width of a
matrix unit. On a GPU with Triton, kernels of ours do the same, compiled or not. Eager code on a CPU would store all
(B, N, N, H) weights: use it compiled there, or `scaled_dot_product_attention`. That is also what computes in half
precision, under autocast too: weights that are computed again from rounded sums would be wrong by a tenth.

Shapes: `B` sets, `N` tokens, `H` heads, each of width `W`. Sums over a head's width are written out, of W tensors
(B, N, H): the work grows as W², which pays off to W = 2 or so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from noisy_envs.nn.small_layers import linear

try:
    from noisy_envs.nn import triton_attention
except ImportError:  # torch for a CPU brings no Triton
    HAS_KERNELS = False
else:
    HAS_KERNELS = True

LOG2_E = math.log2(math.e)  # exp2 is one instruction on a GPU
# Options of `torch.compile` for W > 1: so many numbers go into a weight that it would be stored, not computed again.
OPTIONS = {"realize_reads_threshold": 16, "realize_acc_reads_threshold": 16}


def narrow_attention(
    tokens: Tensor,
    query_key_value: Tensor,
    mask: Tensor | None = None,
    scale: float = 1.0,
    axis: int = 1,
    width: int = 1,
) -> Tensor:
    """Attend with H heads of a small width: softmax_j(scale · q_i · k_j) v_j, summed over tokens j.

    Args:
        tokens: (B, N, H W), or (N, B, H W) with `axis` 0, which suits a CPU: it works on sets side by side, and so
            finds the numbers of neighbouring sets next to each other.
        query_key_value: (3 H W, H W), rows of W_Q, W_K and W_V.
        mask: bool, as tokens without H W, True where one may be attended to; a set without any gives zeros.
        scale: of the scores.
        axis: of the tokens in a set.
        width: W, of a head.

    Returns:
        As tokens, without an output projection.

    Raises:
        NotImplementedError: in a backward pass with `create_graph`, as there is no second derivative.
    """
    if axis == 1:
        projected = linear(tokens, query_key_value)
        exact = projected.dtype == torch.float32  # which autocast may decide, not tokens
        if HAS_KERNELS and projected.is_cuda and exact and width <= triton_attention.WIDEST:
            return triton_attention.attend(projected, mask, tokens.shape[2] // width, scale)[0]
        heads = projected.chunk(3, dim=-1)
    else:  # three products, so that each result is in one piece
        heads = tuple(torch.nn.functional.linear(tokens, weight) for weight in query_key_value.chunk(3))
    if heads[0].dtype in (torch.float16, torch.bfloat16):
        return _by_library(heads, mask, scale, axis, width)
    parts = [part for whole in heads for part in whole.unflatten(-1, (-1, width)).unbind(-1)]
    mixed: tuple[Tensor, ...] = _Attention.apply(mask, scale, axis, *parts)
    return torch.stack(mixed, dim=-1).flatten(-2)


def _by_library(heads: Sequence[Tensor], mask: Tensor | None, scale: float, axis: int, width: int) -> Tensor:
    """Attend by torch's own kernels, which sum up half precision in float32."""
    query, key, value = (whole.unflatten(-1, (-1, width)).movedim(axis, 2) for whole in heads)  # (B, H, N, W)
    allowed = None if mask is None else mask.movedim(axis, 1)[:, None, None]
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, allowed, scale=scale)
    return mixed.movedim(2, axis).flatten(2)


class _Attention(torch.autograd.Function):
    """The sums, with a gradient that computes the weights again.

    `axis` is that of the tokens, 0 or 1. Queries, keys and values are given, and mixtures returned, in W parts each.
    """

    @staticmethod
    def forward(ctx: Any, mask: Tensor | None, scale: float, axis: int, *parts: Tensor) -> tuple[Tensor, ...]:
        query, key, value = _thirds(parts)
        scaled = [q * (scale * LOG2_E) for q in query]
        mask = None if mask is None else mask.unsqueeze(2)
        top = _largest(scaled, key, mask, axis)
        weights = _weights(scaled, key, top, mask, axis)  # (…, N queries, N keys, H)
        total = weights.sum(axis + 1)
        if mask is not None:
            total = total.masked_fill(total == 0, 1)
        out = [(weights * v.unsqueeze(axis)).sum(axis + 1) / total for v in value]
        ctx.save_for_backward(top + total.log2(), mask, *scaled, *key, *value, *out)
        ctx.scale, ctx.axis = scale, axis
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # part of what is saved has no graph
            raise NotImplementedError("narrow_attention has no second derivative")
        shift, mask, *saved = ctx.saved_tensors
        scaled, key, value = _thirds(saved[: 3 * len(grad)])
        axis = ctx.axis
        weights = _weights(scaled, key, shift, mask, axis)

        # sums of products with one array each: an array of more inputs would be stored, not computed again
        def over_keys(x: Tensor) -> Tensor:
            return (weights * x.unsqueeze(axis)).sum(axis + 1)

        def over_queries(x: Tensor) -> Tensor:
            return (weights * x.unsqueeze(axis + 1)).sum(axis)

        along = _dot(grad, saved[3 * len(grad) :])  # of the gradient, on what came out
        query_grad = [ctx.scale * (_dot(grad, [over_keys(v * k) for v in value]) - along * over_keys(k)) for k in key]
        key_grad = [
            (_dot(value, [over_queries(g * s) for g in grad]) - over_queries(along * s)) / LOG2_E for s in scaled
        ]
        return None, None, None, *query_grad, *key_grad, *(over_queries(g) for g in grad)


def _thirds(parts: Sequence[Tensor]) -> tuple[Sequence[Tensor], ...]:
    width = len(parts) // 3
    return parts[:width], parts[width : 2 * width], parts[2 * width :]


def _dot(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    return reduce(add, (x * y for x, y in zip(left, right, strict=True)))


def _scores(scaled: Sequence[Tensor], key: Sequence[Tensor], axis: int) -> Tensor:
    return _dot([s.unsqueeze(axis + 1) for s in scaled], [k.unsqueeze(axis) for k in key])


def _largest(scaled: Sequence[Tensor], key: Sequence[Tensor], mask: Tensor | None, axis: int) -> Tensor:
    if len(key) > 1:
        scores = _scores(scaled, key, axis)
        return (scores if mask is None else torch.where(mask.unsqueeze(axis), scores, -math.inf)).amax(axis + 1)
    # the largest score of a row is that of the largest or of the smallest key
    high = key[0] if mask is None else key[0].masked_fill(~mask, -math.inf)
    low = key[0] if mask is None else key[0].masked_fill(~mask, math.inf)
    return torch.maximum(scaled[0] * high.amax(axis, keepdim=True), scaled[0] * low.amin(axis, keepdim=True))


def _weights(scaled: Sequence[Tensor], key: Sequence[Tensor], shift: Tensor, mask: Tensor | None, axis: int) -> Tensor:
    weights = (_scores(scaled, key, axis) - shift.unsqueeze(axis + 1)).exp2()
    return weights if mask is None else torch.where(mask.unsqueeze(axis), weights, 0)
