"""Attention with heads of width 1, as the paper's reinforcement-learning networks have it, fast when compiled.

With one number for each query, key and value, a score is a product of two numbers, and attention is sums over
pairs of tokens. `torch.compile` makes them loops that keep no score in memory: each weight is computed again where
it is needed, three times in a step of learning. The library's kernels instead pad such heads to the width of a
matrix unit. Eager code would store all (B, N, N, H) weights: use it compiled, or `scaled_dot_product_attention`.

Shapes: `B` sets, `N` tokens, `H` heads, each of width 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)  # exp2 is one instruction on a GPU


def narrow_attention(
    tokens: Tensor, query_key_value: Tensor, mask: Tensor | None = None, scale: float = 1.0, axis: int = 1
) -> Tensor:
    """Attend with H heads of width 1: softmax_j(scale · q_i k_j) v_j, summed over tokens j.

    Args:
        tokens: (B, N, H), or (N, B, H) with `axis` 0, which suits a CPU: it works on sets side by side, and so finds
            the numbers of neighbouring sets next to each other.
        query_key_value: (3H, H), rows of W_Q, W_K and W_V.
        mask: bool, as tokens without H, True where one may be attended to; a set without any gives zeros.
        scale: of the scores.
        axis: of the tokens in a set.

    Returns:
        As tokens, without an output projection.
    """
    if axis == 1:
        heads = torch.nn.functional.linear(tokens, query_key_value).chunk(3, dim=-1)
    else:  # three products, so that each result is in one piece
        heads = tuple(torch.nn.functional.linear(tokens, weight) for weight in query_key_value.chunk(3))
    mixed: Tensor = _Attention.apply(*heads, mask, scale, axis)
    return mixed


class _Attention(torch.autograd.Function):
    """The sums, with a gradient that computes the weights again; `axis` is that of the tokens, 0 or 1."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, axis: int
    ) -> Tensor:
        scaled, high, low = query * (scale * LOG2_E), key, key
        if mask is not None:
            mask = mask.unsqueeze(2)
            high, low = key.masked_fill(~mask, -math.inf), key.masked_fill(~mask, math.inf)
        # the largest score of a row is that of the largest or of the smallest key
        top = torch.maximum(scaled * high.amax(axis, keepdim=True), scaled * low.amin(axis, keepdim=True))
        weights = _weights(scaled, key, top, mask, axis)  # (…, N queries, N keys, H)
        total = weights.sum(axis + 1)
        if mask is not None:
            total = total.masked_fill(total == 0, 1)
        out = (weights * value.unsqueeze(axis)).sum(axis + 1) / total
        ctx.save_for_backward(scaled, key, value, out, top + total.log2(), mask)
        ctx.scale, ctx.axis = scale, axis
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled, key, value, out, shift, mask = ctx.saved_tensors
        axis = ctx.axis
        weights = _weights(scaled, key, shift, mask, axis)

        # sums of products with one array each: an array of more inputs would be stored, not computed again
        def over_keys(x: Tensor) -> Tensor:
            return (weights * x.unsqueeze(axis)).sum(axis + 1)

        def over_queries(x: Tensor) -> Tensor:
            return (weights * x.unsqueeze(axis + 1)).sum(axis)

        query_grad = grad * (over_keys(value * key) - out * over_keys(key)) * ctx.scale
        key_grad = (value * over_queries(grad * scaled) - over_queries(grad * out * scaled)) / LOG2_E
        return query_grad, key_grad, over_queries(grad), None, None, None


def _weights(scaled: Tensor, key: Tensor, shift: Tensor, mask: Tensor | None, axis: int) -> Tensor:
    weights = (scaled.unsqueeze(axis + 1) * key.unsqueeze(axis) - shift.unsqueeze(axis + 1)).exp2()
    return weights if mask is None else torch.where(mask.unsqueeze(axis), weights, 0)
