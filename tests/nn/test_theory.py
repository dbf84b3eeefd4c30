"""The paper's analysis of pooling: losses, optimal weights, margins, bounds, special cases, padding, errors."""

import math
import re
from collections.abc import Callable
from decimal import Decimal, localcontext
from typing import Any

import pytest

pytest.importorskip("torch")  # an extra: without it these tests do not apply
import torch
from torch import Tensor

from noisy_envs.nn.pooling import AdaPool, AvgPool, MaxPool
from noisy_envs.nn.theory import (
    Bounds,
    Margins,
    average_as_adapool,
    margins,
    max_as_adapool,
    optimal_pool,
    optimal_weights,
    signal_loss,
    weight_bounds,
    weight_errors,
)

B, N, DIM = 4, 7, 5
LONGEST = 40
NAN, INF = math.nan, math.inf
EXACT = {"rtol": 0.0, "atol": 1e-12}


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(*shape: int, seed: int = 1) -> Tensor:
    """Float64 numbers from Normal(0, 1)."""
    out: Tensor = torch.randn(shape, dtype=torch.float64, generator=generator(seed))
    return out


def bools(rows: list[list[int]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.bool)


# Sets of every kind: signal first and last, alone, everywhere; padding at the end, in between, nowhere
MASK = bools([[1] * 7, [1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 0, 1, 0, 1], [1] * 7])
SIGNAL = bools([[1, 0, 0, 1, 0, 0, 1], [0, 1, 0, 0, 0, 0, 0], [0, 1, 1, 0, 1, 0, 1], [1] * 7])


def rubbish(values: Tensor, mask: Tensor) -> Tensor:
    """The values, (..., N) or (..., N, D), with NaN and infinities where masked."""
    held = torch.tensor([NAN, INF, -INF], dtype=values.dtype)[torch.arange(values.numel()) % 3].view(values.shape)
    return torch.where(mask if mask.dim() == values.dim() else mask[..., None], values, held)


def softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(~mask, -INF).softmax(-1)


def bounds_of(scores: Tensor, signal: Tensor, mask: Tensor) -> Bounds:
    """The bounds (...) of scores (..., N)."""
    return weight_bounds(margins(scores, signal, mask), signal.sum(-1), mask.sum(-1))


def assert_inside(scores: Tensor, signal: Tensor, mask: Tensor) -> None:
    """The theorem holds for every token of scores (..., N)."""
    errors = weight_errors(softmax(scores, mask), signal, mask)
    low_s, high_s, low_n, high_n = (bound.unsqueeze(-1) for bound in bounds_of(scores, signal, mask))
    assert (low_s <= high_s + 1e-12).all() and (low_n <= high_n + 1e-12).all()
    excess = torch.where(
        signal, torch.maximum(low_s - errors, errors - high_s), torch.maximum(low_n - errors, errors - high_n)
    )
    assert excess.masked_fill(~mask, 0).max() <= 1e-12


# Bounds

SCORES: dict[str, Callable[[Tensor], Tensor]] = {  # of numbers from Normal(0, 1)
    "normal": lambda x: x,
    "close": lambda x: 1e-3 * x,
    "wide": lambda x: 20 * x,
    "700": lambda x: 700 * x.sign(),
    "huge": lambda x: 1e6 * x,
    "overflowing": lambda x: 1.5e308 * x.sign(),
    "ties": lambda x: x.round(),
    "equal": lambda x: torch.full_like(x, 3),
    "mixed": lambda x: x * 10 ** (4 * torch.rand(len(x), 1, dtype=x.dtype, generator=generator(5)) - 2),
}


def random_sets(count: int) -> tuple[Tensor, Tensor]:
    """Signal and mask (count, LONGEST): N from 1 to 40, k from 1 to N; k = 1 and k = N in a fifth each."""
    uniform = torch.rand(3, count, dtype=torch.float64, generator=generator(2))
    n = 1 + (LONGEST * uniform[0]).long()
    k = 1 + (n * uniform[1]).long()
    k = k.where(uniform[2] > 0.2, 1).where(uniform[2] < 0.8, n)
    mask = torch.arange(LONGEST) < n[:, None]
    order = torch.rand(count, LONGEST, generator=generator(3)).masked_fill(~mask, 2).argsort(-1).argsort(-1)
    return order < k[:, None], mask


@pytest.mark.parametrize("kind", SCORES)
def test_weights_are_inside_the_bounds(kind: str) -> None:
    """1,200 sets of each kind, in each the signal's scores raised or lowered: all arrangements occur."""
    signal, mask = random_sets(1200)
    numbers, shifts = draw(1200, LONGEST), 3 * draw(1200, 1, seed=4)
    scores = SCORES[kind](numbers + shifts * signal)
    assert_inside(rubbish(scores, mask), signal, mask)
    k, n = signal.sum(-1), mask.sum(-1)
    assert all(case.sum() > 20 for case in (k == 1, k == n, k == n - 1, n == 1))
    if kind != "equal":
        margin = margins(scores, signal, mask).margin
        assert (margin > 0).sum() > 300 and (margin < 0).sum() > 300


def bounds_by_hand(scores: list[float], signal: list[bool]) -> list[float]:
    """Theorem 3.12 word for word, in Decimal, whose exponents do not overflow here."""
    r_s = [Decimal(r) for r, is_signal in zip(scores, signal, strict=True) if is_signal]
    r_n = [Decimal(r) for r, is_signal in zip(scores, signal, strict=True) if not is_signal]
    k, n = len(r_s), len(scores)
    eps_s, eps_n = max(r_s) - min(r_s), max(r_n) - min(r_n) if r_n else Decimal(0)
    margin, distance = (min(r_s) - max(r_n), max(r_s) - min(r_n)) if r_n else (Decimal("inf"), Decimal("inf"))
    low_s = 1 / Decimal(k) - 1 / (1 + (k - 1) * (-eps_s).exp() + (n - k) * (-distance).exp())
    high_s = 1 / Decimal(k) - 1 / (1 + (k - 1) * eps_s.exp() + (n - k) * (-margin).exp())
    low_n = -1 / (k * margin.exp() + 1 + (n - k - 1) * (-eps_n).exp())
    high_n = -1 / (k * distance.exp() + 1 + (n - k - 1) * eps_n.exp())
    return [float(bound) for bound in (low_s, high_s, low_n, high_n)]


@pytest.mark.parametrize("kind", [kind for kind in SCORES if kind != "overflowing"])
def test_bounds_are_the_theorems(kind: str) -> None:
    """Formula by formula: that the weights are inside would leave them too wide."""
    signal, mask = random_sets(60)
    numbers = draw(60, LONGEST) + draw(60, 1, seed=4) * signal
    scores = SCORES[kind](numbers)
    found = torch.stack(bounds_of(rubbish(scores, mask), signal, mask), -1)  # (60, 4)
    with localcontext(prec=40, Emax=10**9, Emin=-(10**9)):
        by_hand = [bounds_by_hand(r[m].tolist(), s[m].tolist()) for r, s, m in zip(scores, signal, mask, strict=True)]
    torch.testing.assert_close(found, torch.tensor(by_hand, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("offset", [-30.0, -1.0, 0.0, 0.3, 4.0])
@pytest.mark.parametrize("width", [0.0, 0.7, 12.0])
@pytest.mark.parametrize(("k", "noise"), [(1, 1), (1, 4), (2, 1), (5, 3), (3, 9)])
def test_bounds_are_attained(k: int, noise: int, width: float, offset: float) -> None:
    """By one token apart from the others of its kind, while the other kind shares one score."""
    signal, mask = torch.arange(k + noise) < k, torch.ones(k + noise, dtype=torch.bool)
    for name, token, away in [
        ("signal_low", 0, width),
        ("signal_high", 0, -width),
        ("noise_low", k, width),
        ("noise_high", k, -width),
    ]:
        scores = torch.where(signal, offset, 0.0).double()
        scores[token] += away
        error = weight_errors(softmax(scores, mask), signal)[token]
        bound = getattr(bounds_of(scores, signal, mask), name)
        torch.testing.assert_close(error, bound, **EXACT)


@pytest.mark.parametrize(("k", "n"), [(1, 1), (1, 2), (2, 2), (3, 5), (1, 40), (40, 40)])
@pytest.mark.parametrize("gap", [0.0, 1.0, -1.0, 800.0, -800.0])
def test_without_widths_the_bounds_are_the_error(k: int, n: int, gap: float) -> None:
    signal, mask = torch.arange(n) < k, torch.ones(n, dtype=torch.bool)
    scores = torch.where(signal, gap, 0.0).double()
    errors = weight_errors(softmax(scores, mask), signal)
    low_s, high_s, low_n, high_n = bounds_of(scores, signal, mask)
    torch.testing.assert_close(torch.stack([low_s, high_s]), errors[:1].expand(2), **EXACT)
    torch.testing.assert_close(
        torch.stack([low_n, high_n]), errors[-1:].expand(2) if k < n else torch.zeros(2).double(), **EXACT
    )
    if gap == 0:
        assert abs(low_s - (1 / k - 1 / n)) < 1e-15


def test_a_margin_and_even_signal_squeeze_the_bounds() -> None:
    """Remark 3.13, but for the noise's width, which may stay; without even signal no margin is enough."""
    one = torch.ones((), dtype=torch.float64)
    even = weight_bounds(Margins(1e-12 * one, 9 * one, 50 * one, 59 * one), 5, 20)
    assert all(abs(bound) < 1e-12 for bound in even)
    uneven = weight_bounds(Margins(one, 0 * one, 1e6 * one, 1e6 * one + 1), 5, 20)
    assert uneven.signal_low < -0.1 and uneven.signal_high > 0.1


def test_margins() -> None:
    """By hand, overlap and lack of noise included."""
    scores = torch.tensor([[4.0, 1, 6, -2, 3, 5, NAN], [1, 2, 0, 3, 7, 2, 4]]).double()
    signal = bools([[1, 0, 1, 0, 0, 1, 0], [1, 1, 0, 0, 0, 1, 0]])
    found = torch.stack(margins(scores, signal, ~scores.isnan()), -1)
    assert found.tolist() == [[2, 5, 1, 8], [1, 7, -6, 2]]
    assert (found[:, 3] == found[:, 2] + found[:, 0] + found[:, 1]).all()
    pure = torch.stack(margins(scores[0], signal[0], signal[0]))
    assert pure.tolist() == [2, 0, INF, INF]
    for pair in (margins(scores[0], signal[0], signal[0]), Margins(*torch.tensor([2.0, 1, 1, 4]))):
        assert [bound.item() for bound in weight_bounds(pair, 3, 3)][2:] == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [1.0, 30.0, 700.0, 6e4, 1.5e308])
def test_gradients_are_finite(dtype: torch.dtype, size: float) -> None:
    """And the results; sizes end at the greatest finite number of the type."""
    size = min(size, torch.finfo(dtype).max)
    held = rubbish((size * draw(B, N).sign()).to(dtype), MASK).requires_grad_()
    with torch.autograd.set_detect_anomaly(True):
        bounds = torch.stack(bounds_of(held, SIGNAL, MASK))
        (slope,) = torch.autograd.grad(bounds.sum(), held)
    assert bounds.dtype == dtype and bounds.isfinite().all() and (bounds.abs() <= 1).all()
    assert slope.isfinite().all() and (slope[~MASK] == 0).all()


def test_gradients_are_right() -> None:
    """Beside differences."""
    scores = rubbish(draw(B, N), MASK)[MASK].requires_grad_()

    def bounds(real: Tensor) -> tuple[Tensor, ...]:
        return bounds_of(torch.full((B, N), NAN).double().masked_scatter(MASK, real), SIGNAL, MASK)

    assert torch.autograd.gradcheck(bounds, scores)


@pytest.mark.parametrize("num_heads", [1, 5])
def test_the_theorem_holds_for_each_head_of_adapool(num_heads: int) -> None:
    """The heads are an axis; scores are known but for a constant from the weights."""
    head = AdaPool(DIM, num_heads, query=1, init_std=1).double()
    signal, mask = SIGNAL[:, None], MASK[:, None]  # (B, 1, N)
    weights = head.weights(rubbish(2 * draw(B, N, DIM), MASK), MASK).detach()  # (B, heads, N)
    assert_inside(weights.log(), signal, mask)
    errors = weight_errors(weights, signal, mask)
    assert errors.shape == (B, num_heads, N) and (errors.sum(-1).abs() < 1e-12).all()


# Loss and optimum


def test_signal_loss_by_hand() -> None:
    """The mean over signal and features; a case for each dimension of the batch."""
    tokens = torch.tensor([[0.0, 0], [2, 4], [9, -9], [NAN, INF]])
    signal, mask = bools([[1, 1, 0, 0]])[0], bools([[1, 1, 1, 0]])[0]
    pooled = torch.tensor([1.0, 1])
    assert signal_loss(tokens, signal, pooled, mask) == ((1 + 1) / 2 + (1 + 9) / 2) / 2
    assert optimal_pool(tokens, signal, mask).tolist() == [1, 2]
    batch = signal_loss(tokens.expand(3, 2, 4, 2), signal.expand(3, 2, 4), pooled.expand(3, 2, 2), mask.expand(3, 2, 4))
    assert batch.tolist() == [[3, 3]] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_optimal_weights(dtype: torch.dtype) -> None:
    weights = optimal_weights(SIGNAL, MASK, dtype)
    third = 1 / 3
    rows = [[third, 0, 0, third, 0, 0, third], [0, 1, 0, 0, 0, 0, 0], [0, 0.25, 0.25, 0, 0.25, 0, 0.25], [1 / 7] * 7]
    torch.testing.assert_close(weights, torch.tensor(rows, dtype=dtype), rtol=torch.finfo(dtype).eps, atol=0)
    assert (weight_errors(weights, SIGNAL, MASK) == 0).all()
    assert optimal_weights(SIGNAL).dtype == torch.float32


def test_weights_of_more_signal_than_float16_can_count() -> None:
    weights = optimal_weights(torch.ones(2, 70_000, dtype=torch.bool), dtype=torch.float16)
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 70_000), rtol=0.01, atol=0)


def test_bounds_of_more_tokens_than_float16_can_count() -> None:
    half, exact = (
        torch.stack(weight_bounds(Margins(*torch.zeros(4, dtype=dtype)), 70_000, 140_000))
        for dtype in (torch.float16, torch.float64)
    )
    torch.testing.assert_close(half.double(), exact, rtol=0.03, atol=0)


def test_the_centroid_has_the_least_loss() -> None:
    """Corollary 3.3: another point at a distance d loses mean(d^2) more, which leaves slope 0 at the optimum."""
    tokens = rubbish(draw(B, N, DIM), MASK)
    best = optimal_pool(tokens, SIGNAL, MASK).requires_grad_()
    least = signal_loss(tokens, SIGNAL, best, MASK)
    (slope,) = torch.autograd.grad(least.sum(), best)
    assert slope.abs().max() < 1e-15
    for seed in range(50):
        step = 10 ** (seed % 5 - 3) * draw(B, DIM, seed=seed)
        more = signal_loss(tokens, SIGNAL, best + step, MASK) - least
        assert (more > 0).all()
        torch.testing.assert_close(more, step.square().mean(-1), rtol=1e-6, atol=1e-14)


def test_the_optimal_weights_have_the_least_loss() -> None:
    """Among all pools of the set: weights and steps at random."""
    tokens = rubbish(draw(B, N, DIM), MASK)
    real, best = tokens.masked_fill(~MASK[..., None], 0), optimal_weights(SIGNAL, MASK, torch.float64)

    def loss(weights: Tensor) -> Tensor:
        return signal_loss(tokens, SIGNAL, (weights[..., None] * real).sum(-2), MASK)

    torch.testing.assert_close((best[..., None] * real).sum(-2), optimal_pool(tokens, SIGNAL, MASK), **EXACT)
    for seed in range(50):
        step = draw(B, N, seed=seed) * MASK
        assert (loss(best + 1e-3 * step) > loss(best)).all()
        assert (loss(softmax(3 * step, MASK)) > loss(best)).all()
    slope = torch.autograd.functional.jacobian(lambda weights: loss(weights).sum(), best)
    assert slope.abs().max() < 1e-14


def test_when_avgpool_is_optimal() -> None:
    """Corollaries 3.5 and 3.6: without noise, or if noise has the centroid of the signal."""
    tokens, average = draw(B, N, DIM), AvgPool()
    mask = torch.ones(B, N, dtype=torch.bool)
    torch.testing.assert_close(average(tokens, MASK & SIGNAL), optimal_pool(tokens, SIGNAL, MASK), **EXACT)
    assert (average(tokens) - optimal_pool(tokens, SIGNAL)).abs().amax(-1)[:3].min() > 0.01
    for row in range(3):
        signal, noise = SIGNAL[row], ~SIGNAL[row]
        tokens[row, noise] += tokens[row, signal].mean(0) - tokens[row, noise].mean(0)
    torch.testing.assert_close(average(tokens, mask), optimal_pool(tokens, SIGNAL), **EXACT)


# Special cases


@pytest.mark.parametrize("dim", [1, 5])
def test_corollary_3_10_average_as_adapool(dim: int) -> None:
    """Output, weights and gradient of AvgPool, whatever the query."""
    head, average = average_as_adapool(dim).double(), AvgPool()
    tokens = rubbish(draw(B, N, dim), MASK).requires_grad_()
    found, expected = head(tokens, MASK), average(tokens, MASK)
    torch.testing.assert_close(found, expected, **EXACT)
    torch.testing.assert_close(head.weights(tokens, MASK)[:, 0], average.weights(tokens, MASK), **EXACT)
    slopes = [torch.autograd.grad((out * draw(B, dim, seed=3)).sum(), tokens)[0] for out in (found, expected)]
    torch.testing.assert_close(*slopes, **EXACT)


@pytest.mark.parametrize("sign", [1, -1, 0], ids=["maximum", "minimum", "average"])
def test_corollary_3_11_max_as_adapool(sign: int) -> None:
    """The maximum needs a query above 0; below it is the minimum, at 0 the average."""
    tokens, maximum = draw(B, N, DIM), MaxPool()
    tokens[:, 0] = sign * (0.1 + tokens[:, 0].abs())
    tokens[:, 5] = tokens[:, 3]  # ties
    mask = MASK.index_fill(1, torch.tensor([0]), True)
    expected = {1: maximum(tokens, mask), -1: -maximum(-tokens, mask), 0: AvgPool()(tokens, mask)}[sign]
    errors = []
    for sharpness in (1.0, 10.0, 1e7):
        head = max_as_adapool(DIM, sharpness).double()
        errors.append((head(rubbish(tokens, mask), mask) - expected).abs().max().item())
    assert errors[2] < 1e-12
    if sign:
        assert errors[0] > errors[1] > errors[2] and errors[0] > 0.1
        weights = maximum.weights(sign * tokens, mask).mT  # 1/m for m ties
        torch.testing.assert_close(head.weights(rubbish(tokens, mask), mask), weights, **EXACT)


# Padding, batches


Function = Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
FUNCTIONS: dict[str, Function] = {
    "loss": lambda tokens, signal, mask, pooled: signal_loss(tokens, signal, pooled, mask),
    "pool": lambda tokens, signal, mask, pooled: optimal_pool(tokens, signal, mask),
    "errors": lambda tokens, signal, mask, pooled: weight_errors(tokens[..., 0], signal, mask),
    "margins": lambda tokens, signal, mask, pooled: torch.stack(margins(tokens[..., 0], signal, mask), -1),
    "bounds": lambda tokens, signal, mask, pooled: torch.stack(
        bounds_of(tokens[..., 0], signal, torch.ones_like(signal) if mask is None else mask), -1
    ),
}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def with_slopes(name: str, tokens: Tensor, signal: Tensor, mask: Tensor | None, pooled: Tensor) -> list[Tensor]:
    """The result, and the gradients of tokens and pooled."""
    tokens, pooled = tokens.detach().requires_grad_(), pooled.detach().requires_grad_()
    out = FUNCTIONS[name](tokens, signal, mask, pooled)
    slopes = torch.autograd.grad(out.sum(), [tokens, pooled], allow_unused=True, materialize_grads=True)
    return [out.detach(), *slopes]


@each_function
def test_what_padding_holds_changes_nothing(name: str) -> None:
    """To the last bit, in value and gradient."""
    tokens, pooled = draw(B, N, DIM), draw(B, DIM, seed=2)
    expected = with_slopes(name, tokens, SIGNAL, MASK, pooled)
    found = with_slopes(name, rubbish(tokens, MASK), SIGNAL, MASK, pooled)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert not any(result.isnan().any() for result in found)
    assert (found[1][~MASK] == 0).all() and (found[1] != 0).any()


@each_function
@pytest.mark.parametrize("row", range(B))
def test_alone_equals_batched(name: str, row: int) -> None:
    """A set by itself, without its padding, without batch dimensions."""
    tokens, pooled, real = draw(B, N, DIM), draw(B, DIM, seed=2), MASK[row]
    among = [result[row] for result in with_slopes(name, rubbish(tokens, MASK), SIGNAL, MASK, pooled)]
    alone = with_slopes(name, tokens[row, real], SIGNAL[row, real], None, pooled[row])
    if name == "errors":
        assert (among[0][~real] == 0).all()
        among[0] = among[0][real]
    among[1] = among[1][real]
    torch.testing.assert_close(among, alone, **EXACT)


@each_function
def test_one_signal_serves_all_sets(name: str) -> None:
    """Size 1 stands for all sets, of which the padding may differ."""
    signal, mask = SIGNAL[1:2], MASK.index_fill(1, torch.tensor([1]), True)
    tokens, pooled = rubbish(draw(B, N, DIM), mask), draw(B, DIM, seed=2)
    expected = with_slopes(name, tokens, signal.expand(B, N), mask, pooled)
    torch.testing.assert_close(with_slopes(name, tokens, signal, mask, pooled), expected, rtol=0, atol=0)


# Errors

ONES, SOME = torch.ones(2, 3, dtype=torch.bool), bools([[1, 0, 1], [0, 1, 0]])
X, R = torch.zeros(2, 3, 4), torch.zeros(2, 3)
FLAT = Margins(*torch.zeros(4, 2))
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "pooled": (lambda: signal_loss(X, SOME, torch.zeros(2, 3)), "pooled: expected shape (2, 4), got (2, 3)"),
    "tokens": (lambda: optimal_pool(torch.zeros(3), SOME), "tokens: expected shape (..., N, D), got (3,)"),
    "signal's shape": (
        lambda: optimal_pool(X, SOME[:, :2]),
        "signal: expected torch.bool (2, 3), got torch.bool (2, 2)",
    ),
    "signal's sets": (lambda: margins(R, SOME[0]), "signal: expected torch.bool (2, 3), got torch.bool (3,)"),
    "one for all": (lambda: margins(R, SOME[:, :1]), "signal: expected torch.bool (2, 3), got torch.bool (2, 1)"),
    "no token axis": (lambda: optimal_weights(ONES[0, 0]), "signal: expected torch.bool (), got torch.bool ()"),
    "signal's dtype": (lambda: optimal_weights(R), "signal: expected torch.bool (2, 3), got torch.float32 (2, 3)"),
    "mask's dtype": (lambda: margins(R, SOME, R), "mask: expected torch.bool (2, 3), got torch.float32 (2, 3)"),
    "mask's shape": (
        lambda: weight_errors(R, SOME, ONES[:, :2]),
        "mask: expected torch.bool (2, 3), got torch.bool (2, 2)",
    ),
    "no signal": (
        lambda: optimal_weights(bools([[1, 1], [0, 0]])),
        "signal: expected True for at least one token of every",
    ),
    "padded signal": (lambda: signal_loss(X, ONES, X[:, 0], SOME), "signal: expected False where mask is False"),
    "no k": (lambda: weight_bounds(FLAT, 0, 3), "num_signal=0: expected 1 to num_tokens=3"),
    "k above N": (
        lambda: weight_bounds(FLAT, torch.tensor([1, 4]), 3),
        "num_signal=[1, 4]: expected 1 to num_tokens=3",
    ),
    "k's dtype": (
        lambda: weight_bounds(FLAT, torch.ones(2), 3),
        "num_signal: expected an integer or integers (2,), got",
    ),
    "N's shape": (
        lambda: weight_bounds(FLAT, 1, torch.tensor([3, 3, 3])),
        "num_tokens: expected an integer or integers (2,)",
    ),
    "sharpness": (lambda: max_as_adapool(4, 0.0), "sharpness=0.0: expected a finite number above 0"),
    "no sharpness": (lambda: max_as_adapool(4, INF), "sharpness=inf: expected a finite number above 0"),
    "dim": (lambda: average_as_adapool(0), "dim=0: expected a multiple"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors(case: str) -> None:
    call, message = BAD[case]
    with pytest.raises(ValueError, match=re.escape(message)):
        call()
