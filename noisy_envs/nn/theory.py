"""The paper's analysis of pooling: signal loss, optimal weights, and bounds on the weights of AdaPool.

A set's tokens are signal or noise. Its pool is good if it is near the signal tokens, whatever the noise
holds (Section 3). The bounds tell from a few distances between AdaPool's scores how far its weights can be
from the optimal ones (Theorem 3.12).

Shapes: `...` are any batch dimensions, as sets and heads; `N` tokens, `D` features. `signal` (..., N) is True
where a token is signal, `mask` (..., N) where it is real, everywhere if None. Both have as many dimensions
as what they describe, and may have size 1 in those of the batch: signal (B, 1, N) serves scores
(B, heads, N). Padding may hold NaN or infinity: it reaches neither results nor gradients.

Every function raises ValueError for shapes that do not fit, a mask or signal that is not torch.bool, a set
without signal, and signal on a padded token.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from noisy_envs.nn.pooling import AdaPool

__all__ = [
    "Bounds",
    "Margins",
    "average_as_adapool",
    "margins",
    "max_as_adapool",
    "optimal_pool",
    "optimal_weights",
    "signal_loss",
    "weight_bounds",
    "weight_errors",
]


class Margins(NamedTuple):
    """Distances between the scores of a set (equations 8 and 9), each (...).

    Attributes:
        signal_width: epsilon_s = max r_s - min r_s
        noise_width: epsilon_eta = max r_eta - min r_eta; 0 without noise
        margin: M = min r_s - max r_eta, below 0 where they overlap; infinite without noise
        distance: D = max r_s - min r_eta = M + epsilon_s + epsilon_eta; infinite without noise
    """

    signal_width: Tensor
    noise_width: Tensor
    margin: Tensor
    distance: Tensor


class Bounds(NamedTuple):
    """Bounds on the errors w* - w of a set's weights (Theorem 3.12), each (...).

    Attributes:
        signal_low: L_s
        signal_high: U_s
        noise_low: L_eta
        noise_high: U_eta
    """

    signal_low: Tensor
    signal_high: Tensor
    noise_low: Tensor
    noise_high: Tensor


def signal_loss(tokens: Tensor, signal: Tensor, pooled: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the squared error (...) of `pooled` (..., D), averaged over the signal of tokens (..., N, D).

    Definition 3.2 writes (x_s - x_c)^2 of vectors and calls it MSE. Here that is the mean over features, as
    in the paper's tables, not the sum: divided by D, which moves no minimum.
    """
    _check_tokens(tokens, signal, mask)
    expected = (*tokens.shape[:-2], tokens.shape[-1])
    if pooled.shape != expected:
        raise ValueError(f"pooled must be {expected}, got {tuple(pooled.shape)}")
    tokens = tokens.masked_fill(~signal.unsqueeze(-1), 0)
    errors = (tokens - pooled.unsqueeze(-2)).square().mean(dim=-1)  # (..., N)
    return (optimal_weights(signal, dtype=tokens.dtype) * errors).sum(dim=-1)


def optimal_weights(signal: Tensor, mask: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weights w* (..., N): 1/k for each of the k signal tokens, else 0 (Corollary 3.3)."""
    _check(tuple(signal.shape), signal, mask)
    return (signal.to(_wide(dtype)) / signal.sum(dim=-1, keepdim=True)).to(dtype)


def optimal_pool(tokens: Tensor, signal: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the centroid (..., D) of the signal of tokens (..., N, D): the least signal loss (Corollary 3.3)."""
    _check_tokens(tokens, signal, mask)
    weights = optimal_weights(signal, dtype=tokens.dtype).unsqueeze(-1)  # (..., N, 1)
    return (weights * tokens.masked_fill(~signal.unsqueeze(-1), 0)).sum(dim=-2)


def margins(scores: Tensor, signal: Tensor, mask: Tensor | None = None) -> Margins:
    """Return the distances between the scores (..., N), r in Definition 3.9, of signal and of noise.

    Only differences count, so the logarithm of a head's weights serves as well, where none of them is 0.
    """
    _check(tuple(scores.shape), signal, mask)
    noise = ~signal if mask is None else ~signal & mask
    signal_low, signal_high = _extremes(scores, signal)
    noise_low, noise_high = _extremes(scores, noise)
    pure = ~noise.any(dim=-1)  # no noise: its extremes are -inf and inf, the wrong way round for a distance
    return Margins(
        signal_high - signal_low,
        (noise_high - noise_low).masked_fill(pure, 0),
        (signal_low - noise_high).masked_fill(pure, math.inf),
        (signal_high - noise_low).masked_fill(pure, math.inf),
    )


def weight_bounds(margins: Margins, num_signal: int | Tensor, num_tokens: int | Tensor) -> Bounds:
    """Return the bounds on w* - w that Theorem 3.12 draws from the margins (...).

    They hold up to rounding. One signal token (one of noise) attains its bound if the others of its kind
    share one score, and the other kind too. Without noise its bounds are 0: there is no weight to bound.

    Args:
        margins: of a softmax's scores, each (...).
        num_signal: k, an integer or integers that broadcast to (...), at least 1.
        num_tokens: N, likewise, at least k; padding does not count.

    Raises:
        ValueError: if k or N is out of range or does not broadcast to (...).
    """
    signal_width, noise_width, margin, distance = margins
    k, n = (torch.as_tensor(count, device=margin.device) for count in (num_signal, num_tokens))
    _check_counts(tuple(margin.shape), k, n)
    others, noise = k - 1, n - k
    noise_others = (noise - 1).clamp(min=0)
    margin, distance = (gap.masked_fill(noise == 0, math.inf) for gap in (margin, distance))
    optimal = (1 / k.to(_wide(margin.dtype))).to(margin.dtype)
    return Bounds(
        optimal - _weight(others, -signal_width, noise, -distance),
        optimal - _weight(others, signal_width, noise, -margin),
        -_weight(k, margin, noise_others, -noise_width),
        -_weight(k, distance, noise_others, noise_width),
    )


def weight_errors(weights: Tensor, signal: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return w* - w (..., N) of a pool's weights w (..., N), 0 where padded.

    Those of `AdaPool.weights` are (B, heads, N); of scores they are the softmax over the real tokens.
    """
    _check(tuple(weights.shape), signal, mask)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0)
    return optimal_weights(signal, dtype=weights.dtype) - weights


def average_as_adapool(dim: int) -> AdaPool:
    """Return an AdaPool of D = `dim` that is AvgPool: W_Q = 0 makes all scores equal (Corollary 3.10)."""
    return _plain_adapool(dim, num_heads=1, sharpness=0.0)


def max_as_adapool(dim: int, sharpness: float) -> AdaPool:
    """Return an AdaPool of D = `dim` that nears MaxPool as `sharpness` grows (Corollary 3.11).

    There is a head for each feature d, with the scores sharpness * x_q,d * x_i,d, of which the softmax nears
    the maximum only if x_q,d > 0; x_q is token 0. Where x_q,d < 0 it nears the minimum, where x_q,d = 0 it is
    the average. The paper's proof leaves these two out; it asks, unsaid, for a query above zero, which a
    learned one can be for all sets.

    Raises:
        ValueError: if sharpness is not a finite number above 0.
    """
    if not 0 < sharpness < math.inf:
        raise ValueError(f"sharpness must be finite and above 0, got {sharpness}")
    return _plain_adapool(dim, num_heads=dim, sharpness=sharpness)


def _plain_adapool(dim: int, num_heads: int, sharpness: float) -> AdaPool:
    """Return AdaPool(X) = sum_i w_i x_i, no residual, with W_Q = sharpness * I and W_K = I."""
    head = AdaPool(dim, num_heads, residual=False)
    for linear in (head.query, head.key, head.value, head.output):
        nn.init.eye_(linear.weight)
    with torch.no_grad():
        head.query.weight.mul_(sharpness)
    return head


def _extremes(scores: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the largest (...) of the chosen scores (..., N); inf and -inf if there are none."""
    low = scores.masked_fill(~chosen, math.inf).amin(dim=-1)
    return low, scores.masked_fill(~chosen, -math.inf).amax(dim=-1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a type to count in, as float16 cannot beyond 65,504."""
    return torch.promote_types(dtype, torch.float32)


def _weight(a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Return 1 / (1 + a e^x + b e^y), with counts a and b: a softmax, which no large x or y overflows."""
    x, y = (exponent + count.to(_wide(x.dtype)).log().to(x.dtype) for exponent, count in ((x, a), (y, b)))
    infinite = (x == math.inf) | (y == math.inf)  # the softmax, and its gradient, would be NaN
    exponents = torch.stack([torch.zeros_like(x), x, y], dim=-1).masked_fill(infinite.unsqueeze(-1), 0)
    return exponents.softmax(dim=-1)[..., 0].masked_fill(infinite, 0)


def _check_tokens(tokens: Tensor, signal: Tensor, mask: Tensor | None) -> None:
    if tokens.dim() < 2:
        raise ValueError(f"tokens must be (..., N, D), got {tuple(tokens.shape)}")
    _check(tuple(tokens.shape[:-1]), signal, mask)


def _check(shape: tuple[int, ...], signal: Tensor, mask: Tensor | None) -> None:
    """Check signal and mask beside what has the shape (..., N)."""
    for name, marks in (("signal", signal), ("mask", mask)):
        if marks is None:
            continue
        fits = shape != () and _fits(tuple(marks.shape[:-1]), shape[:-1]) and marks.shape[-1:] == shape[-1:]
        if marks.dtype != torch.bool or not fits:
            raise ValueError(f"{name} must be torch.bool {shape}, got {marks.dtype} {tuple(marks.shape)}")
    if not signal.any(dim=-1).all():
        raise ValueError("signal must be True for at least one token of every set")
    if mask is not None and (signal & ~mask).any():
        raise ValueError("signal must be False where mask is False, a padded token")


def _check_counts(shape: tuple[int, ...], k: Tensor, n: Tensor) -> None:
    """Check the counts k and N beside margins of the shape (...)."""
    for name, count in (("num_signal", k), ("num_tokens", n)):
        if count.is_floating_point() or not (count.dim() == 0 or _fits(tuple(count.shape), shape)):
            raise ValueError(f"{name} must be an integer, or integers {shape}, got {count.dtype} {tuple(count.shape)}")
    if (k < 1).any() or (k > n).any():
        raise ValueError(f"num_signal must be from 1 to num_tokens, got {k.tolist()} of {n.tolist()}")


def _fits(found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether `found` is the shape, or has 1 where that has more."""
    return len(found) == len(shape) and all(size in (1, full) for size, full in zip(found, shape, strict=True))
