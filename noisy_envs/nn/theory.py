"""The paper's analysis of pooling: signal loss, optimal weights, and bounds on the weights of AdaPool.

Each token of a set is signal or noise. A good pooled vector is close to the signal tokens for any values of the noise
(Section 3). The bounds use a few distances between AdaPool's scores to limit how far its weights can be from the
optimal ones (Theorem 3.12).

Shapes: `...` are any batch dimensions, such as sets and heads; `N` tokens, `D` features. `signal` (..., N) is True
for signal tokens; `mask` (..., N) is False for padding, and None if there is none. Both have the same number of
dimensions as the tensor that they describe, and may have size 1 in batch dimensions: signal (B, 1, N) fits scores
(B, heads, N). Padding may hold NaN or infinity: these reach neither results nor gradients.

Every function raises ValueError for shapes that do not fit, a mask or signal that is not torch.bool, a set
without signal, and padding that is marked as signal.
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
        margin: M = min r_s - max r_eta, below 0 if the two ranges overlap; infinite without noise
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

    Definition 3.2 writes (x_s - x_c)^2 for vectors and calls it MSE. Here it is the mean over features, as in the
    paper's tables, and not the sum; dividing by D does not move the minimum.
    """
    _check_tokens(tokens, signal, mask)
    expected = (*tokens.shape[:-2], tokens.shape[-1])
    if pooled.shape != expected:
        raise ValueError(f"pooled: expected shape {expected}, got {tuple(pooled.shape)}")
    tokens = tokens.masked_fill(~signal.unsqueeze(-1), 0)
    errors = (tokens - pooled.unsqueeze(-2)).square().mean(dim=-1)  # (..., N)
    return (optimal_weights(signal, dtype=tokens.dtype) * errors).sum(dim=-1)


def optimal_weights(signal: Tensor, mask: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weights w* (..., N): 1/k for each of the k signal tokens, 0 for others (Corollary 3.3)."""
    _check(tuple(signal.shape), signal, mask)
    return (signal.to(_wide(dtype)) / signal.sum(dim=-1, keepdim=True)).to(dtype)


def optimal_pool(tokens: Tensor, signal: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the centroid (..., D) of the signal in tokens (..., N, D): the minimum of the loss (Corollary 3.3)."""
    _check_tokens(tokens, signal, mask)
    weights = optimal_weights(signal, dtype=tokens.dtype).unsqueeze(-1)  # (..., N, 1)
    return (weights * tokens.masked_fill(~signal.unsqueeze(-1), 0)).sum(dim=-2)


def margins(scores: Tensor, signal: Tensor, mask: Tensor | None = None) -> Margins:
    """Return the distances between the scores (..., N) of signal and noise, r in Definition 3.9.

    Only differences matter, so the logarithms of a head's weights can be used instead, if none of the weights is 0.
    """
    _check(tuple(scores.shape), signal, mask)
    noise = ~signal if mask is None else ~signal & mask
    signal_low, signal_high = _extremes(scores, signal)
    noise_low, noise_high = _extremes(scores, noise)
    pure = ~noise.any(dim=-1)  # without noise its lowest score is inf and its highest -inf: no distance
    return Margins(
        signal_high - signal_low,
        (noise_high - noise_low).masked_fill(pure, 0),
        (signal_low - noise_high).masked_fill(pure, math.inf),
        (signal_high - noise_low).masked_fill(pure, math.inf),
    )


def weight_bounds(margins: Margins, num_signal: int | Tensor, num_tokens: int | Tensor) -> Bounds:
    """Return the bounds on w* - w that follow from the margins (...) by Theorem 3.12.

    They hold up to rounding. A signal token attains its bound if all other signal tokens have one score, and all noise
    tokens have one; the same holds for a noise token. Without noise the bounds on noise are 0.

    Args:
        margins: margins of the scores of a softmax, each (...).
        num_signal: k, an integer or integers that broadcast to (...), at least 1.
        num_tokens: N without padding, an integer or integers that broadcast to (...), at least k.

    Raises:
        ValueError: k or N is out of range or does not broadcast to (...).
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
    """Return w* - w (..., N) for the weights w (..., N) of a pooling head; 0 for padding.

    The weights are those of `AdaPool.weights` (B, heads, N), or the softmax of scores over all tokens but padding.
    """
    _check(tuple(weights.shape), signal, mask)
    if mask is not None:
        weights = weights.masked_fill(~mask, 0)
    return optimal_weights(signal, dtype=weights.dtype) - weights


def average_as_adapool(dim: int) -> AdaPool:
    """Return an AdaPool with D = `dim` that equals AvgPool: W_Q = 0 makes all scores equal (Corollary 3.10)."""
    return _plain_adapool(dim, num_heads=1, sharpness=0.0)


def max_as_adapool(dim: int, sharpness: float) -> AdaPool:
    """Return an AdaPool with D = `dim` that approaches MaxPool as `sharpness` grows (Corollary 3.11).

    It has a head for each feature d, with the scores sharpness * x_q,d * x_i,d; x_q is token 0. Their softmax
    approaches the maximum only if x_q,d > 0. If x_q,d < 0 it approaches the minimum, and if x_q,d = 0 it is the
    average. The paper's proof does not treat these two cases: it assumes implicitly that the query is positive, as a
    learned query can be for all sets.

    Raises:
        ValueError: sharpness is not a finite number above 0.
    """
    if not 0 < sharpness < math.inf:
        raise ValueError(f"sharpness={sharpness}: expected a finite number above 0")
    return _plain_adapool(dim, num_heads=dim, sharpness=sharpness)


def _plain_adapool(dim: int, num_heads: int, sharpness: float) -> AdaPool:
    """Return AdaPool(X) = sum_i w_i x_i, without residual, with W_Q = sharpness * I and W_K = I."""
    head = AdaPool(dim, num_heads, residual=False)
    for linear in (head.query, head.key, head.value, head.output):
        nn.init.eye_(linear.weight)
    with torch.no_grad():
        head.query.weight.mul_(sharpness)
    return head


def _extremes(scores: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lowest and highest (...) of the chosen scores (..., N); inf and -inf if none is chosen."""
    low = scores.masked_fill(~chosen, math.inf).amin(dim=-1)
    return low, scores.masked_fill(~chosen, -math.inf).amax(dim=-1)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype for counts: float16 cannot count beyond 65,504."""
    return torch.promote_types(dtype, torch.float32)


def _weight(a: Tensor, x: Tensor, b: Tensor, y: Tensor) -> Tensor:
    """Return 1 / (1 + a e^x + b e^y) with counts a and b, as a softmax, which does not overflow for large x or y."""
    x, y = (exponent + count.to(_wide(x.dtype)).log().to(x.dtype) for exponent, count in ((x, a), (y, b)))
    infinite = (x == math.inf) | (y == math.inf)  # the softmax, and its gradient, would be NaN
    exponents = torch.stack([torch.zeros_like(x), x, y], dim=-1).masked_fill(infinite.unsqueeze(-1), 0)
    return exponents.softmax(dim=-1)[..., 0].masked_fill(infinite, 0)


def _check_tokens(tokens: Tensor, signal: Tensor, mask: Tensor | None) -> None:
    if tokens.dim() < 2:
        raise ValueError(f"tokens: expected shape (..., N, D), got {tuple(tokens.shape)}")
    _check(tuple(tokens.shape[:-1]), signal, mask)


def _check(shape: tuple[int, ...], signal: Tensor, mask: Tensor | None) -> None:
    """Raise ValueError unless signal and mask fit a tensor of the shape (..., N)."""
    for name, flags in (("signal", signal), ("mask", mask)):
        if flags is None:
            continue
        fits = shape != () and _fits(tuple(flags.shape[:-1]), shape[:-1]) and flags.shape[-1:] == shape[-1:]
        if flags.dtype != torch.bool or not fits:
            raise ValueError(f"{name}: expected torch.bool {shape}, got {flags.dtype} {tuple(flags.shape)}")
    if not signal.any(dim=-1).all():
        raise ValueError("signal: expected True for at least one token of every set")
    if mask is not None and (signal & ~mask).any():
        raise ValueError("signal: expected False where mask is False, since padding is no signal")


def _check_counts(shape: tuple[int, ...], k: Tensor, n: Tensor) -> None:
    """Raise ValueError unless the counts k and N fit margins of the shape (...)."""
    for name, count in (("num_signal", k), ("num_tokens", n)):
        if count.is_floating_point() or not (count.dim() == 0 or _fits(tuple(count.shape), shape)):
            raise ValueError(f"{name}: expected an integer or integers {shape}, got {count.dtype} {tuple(count.shape)}")
    if (k < 1).any() or (k > n).any():
        raise ValueError(f"num_signal={k.tolist()}: expected 1 to num_tokens={n.tolist()}")


def _fits(sizes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Tell whether `sizes` equal the shape, except for dimensions of size 1."""
    return len(sizes) == len(shape) and all(size in (1, full) for size, full in zip(sizes, shape, strict=True))
