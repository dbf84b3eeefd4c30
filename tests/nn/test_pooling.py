"""The pooling heads: masks, weights, the paper's special cases, generators, compilation."""

import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from cases import slow

pytest.importorskip("torch")  # an extra: without it these tests do not apply
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from noisy_envs.nn.pooling import AdaPool, AvgPool, ClsToken, MaxPool

Head = AvgPool | MaxPool | ClsToken | AdaPool
B, N, DIM = 4, 7, 16
NAN, INF = math.nan, math.inf
# std 0.25 keeps the size of a vector; the default 0.02 gives weights so even that a wrong one hardly shows
ADAPOOLS: dict[str, Callable[[], AdaPool]] = {
    "ada": lambda: AdaPool(DIM, 4, init_std=0.25),
    "ada-set": lambda: AdaPool(DIM, 2, query=(0, 2), init_std=0.25),
    "ada-mean": lambda: AdaPool(DIM, 1, query="mean", init_std=0.25),
    "ada-learned": lambda: AdaPool(DIM, 8, query="learned", init_std=0.25),
}
HEADS: dict[str, Callable[[], Head]] = {
    "avg": AvgPool,
    "max": MaxPool,
    "cls": lambda: ClsToken(DIM, 0.25),
    **ADAPOOLS,
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3}
each_head = pytest.mark.parametrize("name", HEADS)
each_adapool = pytest.mark.parametrize("name", ADAPOOLS)
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


def draw(*shape: int, seed: int = 1) -> Tensor:
    """Float64 numbers from Normal(0, 1)."""
    out: Tensor = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return out


def masked_tokens() -> tuple[Tensor, Tensor]:
    """Tokens (B, N, DIM), rubbish where masked: row 0 is whole, row 1 empty, row 2 lacks its first token."""
    mask = torch.tensor([[1] * 7, [0] * 7, [0, 1, 1, 0, 1, 0, 1], [1, 1, 1, 1, 0, 0, 0]], dtype=torch.bool)
    rubbish = torch.tensor([NAN, INF, -INF], dtype=torch.float64)[torch.arange(N * DIM) % 3].view(N, DIM)
    return torch.where(mask[..., None], draw(B, N, DIM), rubbish), mask


def encode(tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """One layer of two-headed self-attention that obeys the mask; masked embeddings come out as NaN."""
    real = torch.ones_like(tokens[..., 0], dtype=torch.bool) if mask is None else mask
    tokens = tokens.masked_fill(~real[..., None], 0)
    heads = tokens.view(*tokens.shape[:2], 2, DIM // 2).transpose(1, 2)  # (B, 2, N, DIM / 2)
    scores = heads @ heads.mT / 4
    attention = scores.masked_fill(~real[:, None, None], torch.finfo(scores.dtype).min).softmax(-1)
    embeddings = tokens + (attention @ heads).transpose(1, 2).flatten(2)
    return embeddings.masked_fill(~real[..., None], NAN), attention


def pool(head: Head, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """The whole way of a set: extended, encoded, pooled."""
    tokens, mask = head.extend(tokens, mask)
    out: Tensor = head(encode(tokens, mask)[0], mask)
    return out


def gradients(head: Head, tokens: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, gradient of the tokens, gradients of the parameters."""
    tokens = tokens.detach().requires_grad_()
    out = pool(head, tokens, mask)
    found = torch.autograd.grad((out * draw(*out.shape, seed=2)).sum(), [tokens, *head.parameters()])
    return out.detach(), found[0], list(found[1:])


def weights_of(head: Head, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """The weights over the tokens of a set that goes the whole way."""
    tokens, mask = head.extend(tokens, mask)
    embeddings, attention = encode(tokens, mask)
    return head.weights(embeddings, mask, attention)


# Masks


@each_head
@each_dtype
def test_an_empty_set_gives_zeros_and_finite_gradients(name: str, dtype: torch.dtype) -> None:
    """Nothing else changes, and no gradient reaches what is masked."""
    tokens, mask = masked_tokens()
    head, tokens = HEADS[name]().to(dtype), tokens.to(dtype)
    with torch.autograd.set_detect_anomaly(True):  # which stumbles over a NaN that a later step would hide
        out, slope, slopes = gradients(head, tokens, mask)
    assert out.dtype == dtype and out.shape == (B, DIM)
    assert (out[1] == 0).all() and (out[[0, 2, 3]] != 0).all()
    assert all(found.isfinite().all() for found in [out, slope, *slopes])
    assert (slope[~mask] == 0).all()
    assert all((found != 0).any() for found in slopes)
    others = [0, 2, 3]
    torch.testing.assert_close(
        pool(head, tokens[others], mask[others]), out[others], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@each_head
@pytest.mark.parametrize("value", [0.0, 1e30, INF, NAN])
def test_what_a_masked_token_holds_changes_nothing(name: str, value: float) -> None:
    """Not output, weights or gradients, to the last bit."""
    tokens, mask = masked_tokens()
    head = HEADS[name]().double()
    expected = gradients(head, tokens, mask)
    found = gradients(head, tokens.masked_fill(~mask[..., None], value), mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    # the head by itself: an encoder could have hidden what its tokens held
    embeddings = draw(B, N + 1, DIM)
    mask = torch.cat([torch.ones(B, 1, dtype=torch.bool), mask], dim=1)
    held = embeddings.masked_fill(~mask[..., None], value)
    torch.testing.assert_close(head(held, mask), head(embeddings, mask), rtol=0, atol=0)
    attention = torch.ones(B, 1, N + 1, N + 1, dtype=torch.float64)
    torch.testing.assert_close(
        head.weights(held, mask, attention), head.weights(embeddings, mask, attention), rtol=0, atol=0
    )


@each_head
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_alone_equals_padded(name: str, dtype: torch.dtype) -> None:
    """Padding changes nothing, nor does a mask that is True everywhere."""
    head, tokens = HEADS[name]().to(dtype), draw(B, 5, DIM).to(dtype)
    padded = torch.cat([tokens, torch.full((B, 4, DIM), NAN, dtype=dtype)], dim=1)
    mask = (torch.arange(9) < 5).expand(B, 9)
    alone, among, whole = (gradients(head, *args) for args in [(tokens,), (padded, mask), (tokens, mask[:, :5])])
    torch.testing.assert_close(among[0], alone[0], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    slopes = among[1][:, :5], among[2]
    torch.testing.assert_close(slopes, alone[1:], rtol=10 * TOLERANCE[dtype], atol=10 * TOLERANCE[dtype])
    torch.testing.assert_close(whole, alone, rtol=0, atol=0)
    weights, all_real = weights_of(head, tokens), weights_of(head, tokens, mask[:, :5])
    torch.testing.assert_close(weights, all_real, rtol=0, atol=0)


@each_head
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_has_no_mask_constant(name: str, dtype: torch.dtype) -> None:
    """Finite sums, exact zeros, and real values below any constant."""
    head = HEADS[name]().to(dtype)
    mask = torch.arange(1025).expand(B, -1) < 900
    embeddings = torch.where(mask[..., None], -100 - draw(B, 1025, DIM).abs(), NAN).to(dtype)
    attention = torch.full((B, 2, 1025, 1025), 1 / 1025, dtype=dtype)
    out, weights = head(embeddings, mask), head.weights(embeddings, mask, attention)
    assert out.isfinite().all() and weights.isfinite().all() and (weights >= 0).all()
    others = mask[:, 1:] if name == "cls" else mask
    over_tokens = weights.movedim(1, -1) if name == "max" else weights.view(B, -1, others.shape[1])
    assert (over_tokens.masked_select(~others[:, None]) == 0).all()
    sums = over_tokens.double().sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0.01, atol=0)
    if name in ("avg", "max"):  # below every constant that could stand for "masked", above -65504
        torch.testing.assert_close(out.double(), torch.full_like(out, -100).double(), rtol=0.02, atol=0)
        assert (MaxPool()(torch.full_like(embeddings, -6e4), mask) < -5e4).all()


@each_head
def test_a_batch_of_no_sets(name: str) -> None:
    """As the last minibatch may be."""
    assert pool(HEADS[name]().double(), draw(0, N, DIM), torch.ones(0, N, dtype=torch.bool)).shape == (0, DIM)


# Weights


@each_head
def test_weights_are_shares_of_the_real_tokens(name: str) -> None:
    """They sum to 1 over the tokens, to 0 in an empty set."""
    tokens, mask = masked_tokens()
    head = HEADS[name]().double()
    weights = weights_of(head, tokens, mask)
    heads = {"ada": 4, "ada-set": 2, "ada-mean": 1, "ada-learned": 8, "cls": 2}
    shape = {"avg": (B, N), "max": (B, N, DIM)}.get(name) or (B, heads[name], N)
    assert weights.shape == shape and weights.dtype == torch.float64
    over_tokens = weights.movedim(1, -1) if name == "max" else weights.view(B, -1, N)
    assert (over_tokens.masked_select(~mask[:, None]) == 0).all() and (weights >= 0).all()
    sums = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64)[:, None].expand(over_tokens.shape[:2])
    torch.testing.assert_close(over_tokens.sum(-1), sums, rtol=0, atol=1e-12)


@each_adapool
@pytest.mark.parametrize("masked", [False, True])
def test_adapool_is_its_weights_times_the_values(name: str, masked: bool) -> None:
    """Definition 3.9, value by value."""
    head = ADAPOOLS[name]().double()
    embeddings, mask = masked_tokens() if masked else (draw(B, N, DIM), None)
    weights = head.weights(embeddings, mask)
    values = (embeddings.nan_to_num(0, 0, 0) @ head.value.weight.T).view(B, N, head.num_heads, -1)
    by_hand = torch.einsum("bhn,bnhe->bhe", weights, values).flatten(1) @ head.output.weight.T
    head.residual = False
    torch.testing.assert_close(head(embeddings, mask), by_hand, rtol=0, atol=1e-12)


@each_adapool
def test_queries_and_keys_learn(name: str) -> None:
    """A softmax over an axis of length 1 would leave them without gradient."""
    head, (tokens, mask) = ADAPOOLS[name]().double(), masked_tokens()
    head(tokens, mask).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in head.parameters())


@pytest.mark.parametrize("name", ["avg", "max"])
def test_weights_are_the_gradient_and_give_the_output(name: str) -> None:
    """Definitions 3.4 and 3.7, ties included."""
    head, (embeddings, mask) = HEADS[name](), masked_tokens()
    embeddings[0, 4] = embeddings[0, 2] = embeddings[0].amax(0)  # ties: 1/m each, as in the paper
    embeddings[0, 5, 3] = embeddings[0, 4, 3]
    embeddings.requires_grad_()
    weights, out = head.weights(embeddings, mask), head(embeddings, mask)
    by_feature = weights[..., None].expand(B, N, DIM) if name == "avg" else weights
    real = embeddings.masked_fill(~mask[..., None], 0)
    torch.testing.assert_close((by_feature * real).sum(1), out, rtol=0, atol=1e-12)
    (slope,) = torch.autograd.grad(out.sum(), embeddings)
    torch.testing.assert_close(slope, by_feature, rtol=0, atol=1e-15)
    if name == "max":
        tied = (embeddings[0] == embeddings[0].amax(0)).sum(0)
        assert tied[3] >= 3 and (tied >= 2).all()
        torch.testing.assert_close(weights[0, 4], 1 / tied.double(), rtol=0, atol=1e-15)


def test_clstoken_weights_are_its_row_without_itself() -> None:
    """Row 0 of the attention, rescaled; zeros where nothing is left."""
    head, mask = ClsToken(DIM), torch.tensor([[True, True, False, True], [True, False, False, False]])
    attention = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(3)).softmax(-1)
    attention[1] = NAN  # what softmax gives when everything is masked
    weights = head.weights(draw(2, 4, DIM), mask, attention)
    first, third = attention[0, :, 0, 1], attention[0, :, 0, 3]
    expected = torch.stack([first / (first + third), torch.zeros(3), third / (first + third)], dim=1)
    torch.testing.assert_close(weights[0], expected)
    assert (weights[1] == 0).all()
    alone = torch.zeros(1, 2, 4, 4)
    alone[..., 0] = 1  # all of its attention is on itself
    assert (head.weights(draw(1, 4, DIM), None, alone) == 0).all()
    assert (head(torch.full((2, 4, DIM), NAN), mask)[1] == 0).all()  # an encoder may give NaN there


# AdaPool beside its definition, and the paper's corollaries


@pytest.mark.parametrize("num_heads", [1, 2, 8])
@pytest.mark.parametrize("scale", [None, 1 / math.sqrt(512)])
def test_adapool_is_scaled_dot_product_attention(num_heads: int, scale: float | None) -> None:
    """The folded form is the usual attention of one query."""
    head = AdaPool(512, num_heads, residual=False, scale=scale, init_std=0.05).double()
    embeddings, mask = draw(3, 9, 512), torch.rand(3, 9, generator=torch.Generator().manual_seed(0)) < 0.7

    def split(x: Tensor) -> Tensor:
        return x.view(3, -1, num_heads, 512 // num_heads).transpose(1, 2)  # (3, heads, N, 512 / heads)

    mask[:, 0] = True
    query, key, value = head.query(embeddings[:, :1]), head.key(embeddings), head.value(embeddings)
    attended = F.scaled_dot_product_attention(
        split(query), split(key), split(value), attn_mask=mask[:, None, None], scale=scale
    )
    expected = head.output(attended.transpose(1, 2).flatten(1))
    torch.testing.assert_close(head(embeddings, mask), expected, rtol=0, atol=1e-10)


def test_the_scale_counts_a_head() -> None:
    """By default 1/sqrt(64) for 8 heads of width 512."""
    assert AdaPool(512, 8).scale == 1 / 8
    assert AdaPool(512, 8, scale=0.25).scale == 0.25


@pytest.mark.parametrize("zero", ["query", "key"])
@pytest.mark.parametrize("num_heads", [1, 4])
def test_corollary_3_10_adapool_can_be_avgpool(zero: str, num_heads: int) -> None:
    """W_Q (or W_K) = 0 and W_V = I."""
    head, (embeddings, mask) = AdaPool(DIM, num_heads, residual=False).double(), masked_tokens()
    with torch.no_grad():
        {"query": head.query, "key": head.key}[zero].weight.zero_()
        for linear in (head.value, head.output):
            linear.weight.copy_(torch.eye(DIM))
    average = AvgPool()
    expected = average.weights(embeddings, mask)[:, None].expand(B, num_heads, N)
    torch.testing.assert_close(head.weights(embeddings, mask), expected, rtol=0, atol=1e-15)
    torch.testing.assert_close(head(embeddings, mask), average(embeddings, mask), rtol=0, atol=1e-12)


def test_corollary_3_11_adapool_nears_maxpool() -> None:
    """As many heads as features, W_K = W_V = I and W_Q = a I with a growing."""
    head, (embeddings, mask) = AdaPool(DIM, DIM, query="learned", residual=False).double(), masked_tokens()
    maximum, errors = MaxPool(), []
    for sharpness in (1.0, 10.0, 1e6):
        with torch.no_grad():
            head.learned.fill_(1)  # the proof asks for a query above zero
            for linear in (head.query, head.key, head.value, head.output):
                linear.weight.copy_(torch.eye(DIM))
            head.query.weight.mul_(sharpness)
        errors.append((head(embeddings, mask) - maximum(embeddings, mask)).abs().max().item())
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-12
    found = head.weights(embeddings, mask).mT  # a head a feature: (B, N, DIM)
    torch.testing.assert_close(found, maximum.weights(embeddings, mask), rtol=0, atol=1e-12)


# Queries


def query_of(query: int | Sequence[int] | str, embeddings: Tensor, mask: Tensor | None) -> Tensor:
    """What the residual adds: the query."""
    plain, added = (AdaPool(DIM, 2, query, residual=on, init_std=0.25).double() for on in (False, True))
    query_vector: Tensor = added(embeddings, mask) - plain(embeddings, mask)
    return query_vector.detach()


def test_queries() -> None:
    """An index, several, the mean, a learned one."""
    embeddings = draw(B, N, DIM)
    cases: list[tuple[int | Sequence[int] | str, Tensor]] = [
        (0, embeddings[:, 0]),
        (3, embeddings[:, 3]),
        ([3], embeddings[:, 3]),
        (range(2, 5), embeddings[:, 2:5].mean(1)),
        ((6, 0), embeddings[:, [0, 6]].mean(1)),
        ("mean", embeddings.mean(1)),
        ("learned", AdaPool(DIM, 2, "learned", init_std=0.25).double().learned.detach().expand(B, DIM)),
    ]
    for query, expected in cases:
        found = query_of(query, embeddings, None)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12, msg=str(query))


def test_masked_queries() -> None:
    """Means leave masked tokens out; a query of none is zero, with even weights."""
    embeddings, mask = masked_tokens()
    zero = torch.zeros(DIM, dtype=torch.float64)
    row = embeddings[2]  # lacks tokens 0, 3 and 5
    cases: list[tuple[int | Sequence[int] | str, Tensor]] = [
        (0, zero),
        ((0, 3), zero),
        ((0, 1, 4), row[[1, 4]].mean(0)),
        ("mean", row[mask[2]].mean(0)),
    ]
    for query, expected in cases:
        found = query_of(query, embeddings, mask)
        torch.testing.assert_close(found[2], expected, rtol=0, atol=1e-12, msg=str(query))
        assert (found[1] == 0).all()
    uniform = mask[2].double() / 4
    weights = AdaPool(DIM, 2, 0, init_std=0.25).double().weights(embeddings, mask)
    torch.testing.assert_close(weights[2], uniform.expand(2, N), rtol=0, atol=1e-15)
    assert (weights[3, :, :4] - 0.25).abs().max() > 0.01


@each_head
def test_only_the_places_of_the_query_matter(name: str) -> None:
    """Invariant in the other tokens, and the query's place counts."""
    head, tokens = HEADS[name]().double(), draw(B, N, DIM)
    mask = torch.tensor([True, True, True, False, True, True, False]).expand(B, N)
    out = pool(head, tokens, mask)
    for order, same in [
        ([0, 1, 2, 6, 3, 5, 4], True),
        ([5, 6, 2, 1, 4, 3, 0], name not in ("ada", "ada-set")),
    ]:
        moved = pool(head, tokens[:, order], mask[:, order])
        assert torch.allclose(moved, out, rtol=0, atol=1e-12) == same


# The class token


@pytest.mark.parametrize("name", [name for name in HEADS if name != "cls"])
def test_other_heads_have_no_class_token(name: str) -> None:
    """The arguments come back as they are."""
    tokens, mask = masked_tokens()
    extended = HEADS[name]().extend(tokens, mask)
    assert extended[0] is tokens and extended[1] is mask


def test_the_class_token_comes_first_and_hears_every_token() -> None:
    """The output is index 0, and real tokens have gradients."""
    head, tokens = ClsToken(DIM, 0.25).double(), draw(B, N, DIM)
    mask = torch.arange(N).expand(B, N) != 3
    extended, longer = head.extend(tokens, mask)
    assert (extended[:, 0] == head.token).all() and extended[:, 1:].equal(tokens)
    assert longer is not None and longer.dtype == torch.bool
    assert longer[:, 0].all() and longer[:, 1:].equal(mask)
    assert head.extend(tokens)[1] is None
    assert head(extended, longer).equal(extended[:, 0]) and head(extended).equal(extended[:, 0])
    _, slope, (of_token,) = gradients(head, tokens, mask)
    assert ((slope != 0).any(-1) == mask).all() and (of_token != 0).all()


# Weights at the start


@pytest.mark.parametrize("kind", [ClsToken, AdaPool])
@pytest.mark.parametrize("seed", [None, 5])
def test_the_global_random_state_is_neither_read_nor_changed(kind: Callable[..., nn.Module], seed: int | None) -> None:
    """One seed, one head; None stands for seed 0."""

    def draw_with(generator: torch.Generator | None) -> Tensor:
        return nn.utils.parameters_to_vector(kind(DIM, generator=generator).parameters())

    def make(seed: int | None) -> Tensor:
        return draw_with(None if seed is None else torch.Generator().manual_seed(seed))

    before = torch.get_rng_state()
    first = make(seed)
    assert torch.get_rng_state().equal(before)
    torch.rand(3)
    assert make(seed).equal(first) and not make(6).equal(first)
    assert make(0).equal(make(None))
    shared = torch.Generator().manual_seed(5)
    assert not draw_with(shared).equal(draw_with(shared))


def test_the_spread_of_the_weights() -> None:
    """Normal(0, init_std), the output projection Normal(0, output_std)."""

    def spread(output_std: float | None) -> list[float]:
        head = AdaPool(256, query="learned", init_std=0.2, output_std=output_std)
        return [parameter.std().item() for parameter in head.parameters()]

    names = [name for name, _ in AdaPool(4, query="learned").named_parameters()]
    assert names == ["learned", "query.weight", "key.weight", "value.weight", "output.weight"]
    assert spread(None) == pytest.approx([0.2] * 5, rel=0.1)
    assert spread(0.01) == pytest.approx([0.2, 0.2, 0.2, 0.2, 0.01], rel=0.1)
    assert ClsToken(4096, 0.3).token.std().item() == pytest.approx(0.3, rel=0.05)
    assert ClsToken(4096).token.std().item() == pytest.approx(0.02, rel=0.05)


@each_head
def test_state_dict_round_trip(name: str) -> None:
    """Nothing but parameters is kept, and they say everything."""
    tokens, mask = masked_tokens()
    head, other = HEADS[name]().double(), HEADS[name]().double()
    for parameter in other.parameters():
        nn.init.constant_(parameter, 7)
    other.load_state_dict(head.state_dict())
    assert pool(other, tokens, mask).equal(pool(head, tokens, mask))
    assert set(head.state_dict()) == {key for key, _ in head.named_parameters()}


# Errors

ERRORS: list[tuple[Callable[[], object], str]] = [
    (lambda: AdaPool(16, 3), "dim=16: expected a multiple of num_heads=3, both at least 1"),
    (lambda: AdaPool(16, 0), "dim=16: expected a multiple of num_heads=0, both at least 1"),
    (lambda: AdaPool(0), "dim=0: expected a multiple of num_heads=1, both at least 1"),
    (lambda: ClsToken(0), "dim=0: expected at least 1"),
    (
        lambda: AdaPool(16, query="median"),
        "query='median': expected an index >= 0, several of them, 'mean' or 'learned'",
    ),
    (lambda: AdaPool(16, query=""), "query='': expected an index >= 0, several"),
    (lambda: AdaPool(16, query=-1), "query=-1: expected an index >= 0, several of them, 'mean' or 'learned'"),
    (lambda: AdaPool(16, query=(0, -2)), "query=(0, -2): expected an index >= 0, several"),
    (lambda: AdaPool(16, query=()), "query=(): expected an index >= 0, several"),
    (lambda: AdaPool(16, query=1.5), "query=1.5: expected an index >= 0, several"),  # type: ignore[arg-type]  # what is tested
    (lambda: AdaPool(16, query=True), "query=True: expected an index >= 0, several"),
    (lambda: AdaPool(16, query=7)(torch.zeros(B, N, 16)), "query=7: expected an index below 7, the number of tokens"),
    (lambda: AdaPool(16, query=(0, 9)).weights(torch.zeros(B, N, 16)), "query=9: expected an index below 7"),
    (lambda: AdaPool(16)(torch.zeros(B, N, 8)), "embeddings: expected shape (B, N, 16) with N >= 1, got (4, 7, 8)"),
    (lambda: ClsToken(16)(torch.zeros(B, N, 8)), "embeddings: expected shape (B, N, 16) with N >= 1, got (4, 7, 8)"),
    (lambda: ClsToken(16).extend(torch.zeros(B, N, 8)), "tokens: expected shape (B, N, 16) with N >= 1, got (4, 7,"),
    (lambda: ClsToken(16).weights(torch.zeros(B, 8, 16)), "attention: expected shape (4, heads, 8, 8), got None"),
    (
        lambda: ClsToken(16).weights(torch.zeros(B, 8, 16), None, torch.zeros(B, 2, 7, 7)),
        "attention: expected shape (4, heads, 8, 8), got (4, 2, 7, 7)",
    ),
    (
        lambda: ClsToken(16).weights(torch.zeros(B, 8, 16), None, torch.zeros(B, 8, 8)),
        "attention: expected shape (4, heads, 8, 8), got (4, 8, 8)",
    ),
]


@pytest.mark.parametrize(("call", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_errors_name_the_value_and_what_is_allowed(call: Callable[[], object], message: str) -> None:
    """So that a typo is found from the message alone."""
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


@each_head
@pytest.mark.parametrize("method", ["forward", "weights"])
def test_shapes_are_checked(name: str, method: str) -> None:
    """In both methods of each head."""
    call = getattr(HEADS[name](), method)
    embeddings = torch.zeros(B, N, DIM)
    for wrong in (embeddings[0], embeddings[:, :0]):
        with pytest.raises(ValueError, match=re.escape(f"with N >= 1, got {tuple(wrong.shape)}")):
            call(wrong)
    for wrong in (torch.ones(B, N - 1, dtype=torch.bool), torch.ones(B, N), torch.ones(N, dtype=torch.bool)):
        message = f"mask: expected torch.bool (4, 7), got {wrong.dtype} {tuple(wrong.shape)}"
        with pytest.raises(ValueError, match=re.escape(message)):
            call(embeddings, wrong)


# Compilation, and the copies in agents/


@each_head
@pytest.mark.parametrize("masked", [True, slow(False)])
def test_compiles_without_a_graph_break(name: str, masked: bool) -> None:
    """`fullgraph=True` raises at a break."""
    tokens, mask = masked_tokens() if masked else (draw(B, N, DIM), None)
    head = HEADS[name]().double()
    torch._dynamo.reset()
    for function in (pool, weights_of):
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        expected = function(head, tokens, mask)
        torch.testing.assert_close(compiled(head, tokens, mask), expected, rtol=0, atol=1e-12)


@each_head
def test_no_value_is_read_by_the_host(name: str) -> None:
    """A tensor on "meta" has none: a sync raises."""
    tokens, mask = (x.to("meta") for x in masked_tokens())
    head = HEADS[name]().double().to("meta")
    assert pool(head, tokens, mask).shape == (B, DIM)
    assert weights_of(head, tokens, mask).shape[0] == B


class Model(nn.Module):
    """A layer and a head, to export."""

    def __init__(self, name: str) -> None:
        """Make both."""
        super().__init__()
        self.layer, self.head = nn.Linear(DIM, DIM), HEADS[name]()

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Pool tokens (B, N, DIM) to (B, DIM)."""
        tokens, mask = self.head.extend(tokens, mask)
        pooled: Tensor = self.head(self.layer(tokens).tanh(), mask)
        return pooled


def inputs(batch: int, length: int, masked: bool) -> tuple[Tensor, ...]:
    """Tokens and, if masked, a mask: all of the last set is masked."""
    mask = draw(batch, length, seed=batch) > -0.5
    mask[-1] = False
    return (draw(batch, length, DIM, seed=length).float(), mask)[: 1 + masked]


def check_sizes(exported: Callable[..., Tensor], model: nn.Module, masked: bool) -> None:
    """Demand the model's numbers at other sizes."""
    for sizes in ((1, 5), (2, 9), (9, 3)):
        given = inputs(*sizes, masked)
        torch.testing.assert_close(exported(*given), model(*given))


def free_axes(name: str, masked: bool) -> Any:
    """Name the axes of both inputs; of an index in a query there must be a token."""
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", min=3 if name == "ada-set" else 1)
    return ({0: batch, 1: length},) * (1 + masked)


each_mask = pytest.mark.parametrize("masked", [False, True])
ignore_deprecated = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*are deprecated:UserWarning")


@each_head
@pytest.mark.parametrize("masked", [False, slow(True)])
def test_exports_with_free_axes(name: str, masked: bool) -> None:
    """A program of any number of sets and tokens."""
    model = Model(name).eval()
    program = torch.export.export(
        model, inputs(4, 7, masked), dynamic_shapes=free_axes(name, masked), strict=False
    ).module()
    check_sizes(program, model, masked)


def test_a_class_token_among_any_number_exports() -> None:
    """The head alone, whose tokens another program has extended."""
    head, free = ClsToken(8), ({0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2)},) * 2
    given = torch.randn(4, 7, 8), torch.arange(7) < torch.tensor([7, 1, 2, 3])[:, None]
    program = torch.export.export(head, given, dynamic_shapes=free, strict=False).module()
    for length in (2, 7):
        some = [x[:, :length] for x in given]
        torch.testing.assert_close(program(*some), head(*some))


@ignore_deprecated
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # that the checks of shapes are not in the program
@each_head
@each_mask
def test_traces_with_free_axes(name: str, masked: bool) -> None:
    """As older tools ask for."""
    model = Model(name).eval()
    check_sizes(torch.jit.trace(model, inputs(4, 7, masked)), model, masked)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the exporter's own
@each_head
@each_mask
def test_onnx_with_free_axes(name: str, masked: bool) -> None:
    """By torch's exporter, run by ONNX Runtime."""
    for needed in ("onnx", "onnxscript"):
        pytest.importorskip(needed)
    runtime, model = pytest.importorskip("onnxruntime"), Model(name).eval()
    axes = free_axes(name, masked)
    program = torch.onnx.export(model, inputs(4, 7, masked), dynamo=True, dynamic_shapes=axes, verbose=False)
    session = runtime.InferenceSession(program.model_proto.SerializeToString())

    def run(*given: Tensor) -> Tensor:
        names = [one.name for one in session.get_inputs()]
        (out,) = session.run(None, {name: one.numpy() for name, one in zip(names, given, strict=True)})
        return torch.from_numpy(out)

    check_sizes(run, model, masked)


@ignore_deprecated
@each_adapool
def test_dynamic_quantization(name: str) -> None:
    """What is called is quantized; keys and values, of which the weights alone are used, stay as they are."""
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("torch has no engine for quantized layers here")
    head, given = ADAPOOLS[name](), inputs(4, 7, masked=True)
    quantized = torch.ao.quantization.quantize_dynamic(head)
    assert type(quantized.query) is type(quantized.output) is not nn.Linear
    expected = head(*given)
    torch.testing.assert_close(quantized(*given), expected, rtol=0, atol=0.03 * expected.abs().max().item())
    assert quantized.weights(*given).shape == head.weights(*given).shape


def test_hooks_on_keys_and_values_never_fire() -> None:
    """As the docstring says."""
    head, fired = AdaPool(DIM, 4), []
    for name in ("query", "key", "value", "output"):
        getattr(head, name).register_forward_hook(lambda *_, name=name: fired.append(name))
    head(*inputs(4, 7, masked=True))
    assert fired == ["query", "output"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@each_head
def test_cuda_graph(name: str) -> None:
    """A host sync or a copy from the host raises during capture."""
    tokens, mask = (x.cuda() for x in masked_tokens())
    head = HEADS[name]().double().cuda()
    expected = pool(head, tokens, mask)
    static, static_mask = tokens.flip(0), mask.flip(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        pool(head, static, static_mask)  # warm up
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        out = pool(head, static, static_mask)
    static.copy_(tokens)
    static_mask.copy_(mask)
    graph.replay()
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [AvgPool, MaxPool, ClsToken, AdaPool])
def test_a_class_can_be_copied_alone(kind: Callable[..., Head]) -> None:
    """The single-file agents hold copies."""
    names: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "Tensor": Tensor}
    names |= {"math": math, "Sequence": Sequence}
    exec(inspect.getsource(kind), names)
    tokens, mask = masked_tokens()
    options = () if kind in (AvgPool, MaxPool) else (DIM,)
    copy, head = names[kind.__name__](*options).double(), kind(*options).double()
    assert pool(copy, tokens, mask).equal(pool(head, tokens, mask))
    assert weights_of(copy, tokens, mask).equal(weights_of(head, tokens, mask))
