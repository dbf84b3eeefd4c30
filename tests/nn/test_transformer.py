"""The encoder is torch's own pre-norm transformer, whatever the layout inside, and draws its weights by one rule."""

import math

import pytest

torch = pytest.importorskip("torch")
from noisy_envs.nn import transformer  # noqa: E402  torch may be missing
from noisy_envs.nn.dropout_hash import hashed_masks  # noqa: E402
from noisy_envs.nn.transformer import (  # noqa: E402
    EncoderLayer,
    TransformerEncoder,
    init_weights,
    mlp,
    score_scale,
)

WIDTHS = pytest.mark.parametrize("num_heads", [6, 3, 1], ids=["width 1", "width 2", "width 6"])
masked = pytest.mark.parametrize("padded", [False, True])


def encoders(num_heads=6, num_layers=2, **options):
    """Return encoders of width 6 in float64 with the same random weights: plain, and with tokens first."""
    made = []
    for tokens_first in (False, True):
        encoder = TransformerEncoder(6, num_layers, num_heads, 10, tokens_first=tokens_first, **options).double()
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in encoder.parameters():  # of LayerNorm and biases too
                weight.normal_(0.0, 0.5, generator=random)
        made.append(encoder)
    return made


def sets(padded, num_sets=5, num_tokens=7):
    """Draw tokens (B, N, 6), and a mask (B, N) with a different number of tokens in each set."""
    tokens = torch.randn(num_sets, num_tokens, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.arange(num_tokens) <= torch.arange(num_sets)[:, None] if padded else None
    return tokens, mask


def output_and_gradients(encoder, tokens, *rest):
    """Return the output, and the gradients of a random function of it by tokens and weights."""
    tokens = tokens.clone().requires_grad_()
    output = encoder(tokens, *rest)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), dtype=output.dtype)
    return output.detach(), torch.autograd.grad((output * direction).sum(), [tokens, *encoder.parameters()])


# one layer, by other means


@WIDTHS
@masked
def test_a_layer_is_torchs_own_pre_norm_layer(num_heads, padded):
    (encoder, _), (tokens, mask) = encoders(num_heads, num_layers=1), sets(padded)
    layer = encoder.layers[0]
    usual = torch.nn.TransformerEncoderLayer(6, num_heads, 10, 0.0, "gelu", batch_first=True, norm_first=True).double()
    weights = {
        "self_attn.in_proj_weight": layer.query_key_value.weight,
        "self_attn.out_proj.weight": layer.output.weight,
        "linear1.weight": layer.feedforward[0].weight,
        "linear1.bias": layer.feedforward[0].bias,
        "linear2.weight": layer.feedforward[2].weight,
        "linear2.bias": layer.feedforward[2].bias,
        "norm1.weight": layer.norm_attention.weight,
        "norm1.bias": layer.norm_attention.bias,
        "norm2.weight": layer.norm_feedforward.weight,
        "norm2.bias": layer.norm_feedforward.bias,
    }
    none = {name: torch.zeros_like(x) for name, x in usual.state_dict().items() if name not in weights}
    assert set(none) == {"self_attn.in_proj_bias", "self_attn.out_proj.bias"}
    usual.load_state_dict(weights | none)
    expected = usual(tokens, src_key_padding_mask=None if mask is None else ~mask)
    found = encoder(tokens, mask)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@WIDTHS
@masked
def test_attention_weights_are_those_computed_by_hand(num_heads, padded):
    (encoder, tokens_first), (tokens, mask) = encoders(num_heads, attention_scale="embed"), sets(padded)
    first, last = encoder.layers
    x = last.norm_attention(first(tokens, mask))
    query, key, value = (x @ part.T for part in last.query_key_value.weight.chunk(3))
    (embeddings, found), width, mixed = encoder.with_attention(tokens, mask), 6 // num_heads, []
    torch.testing.assert_close(embeddings, encoder(tokens, mask))
    assert found.shape == (5, num_heads, 7, 7)
    for head in range(num_heads):
        own = slice(head * width, (head + 1) * width)
        for row in range(5):
            scores = query[row, :, own] @ key[row, :, own].T / math.sqrt(6)
            if padded:
                scores[:, ~mask[row]] = -math.inf
            weights = scores.exp() / scores.exp().sum(1, keepdim=True)
            torch.testing.assert_close(found[row, head], weights)
            mixed.append(weights @ value[row, :, own])
    attended = torch.stack(mixed).view(num_heads, 5, 7, width).permute(1, 2, 0, 3).flatten(2)
    x = first(tokens, mask) + attended @ last.output.weight.T  # what the layer mixes by these weights
    torch.testing.assert_close(encoder(tokens, mask), x + last.feedforward(last.norm_feedforward(x)))
    torch.testing.assert_close(tokens_first.with_attention(tokens, mask), (embeddings, found))


@pytest.mark.parametrize(("kind", "width"), [("head", 2), ("embed", 6)])
def test_scores_are_divided_by_the_root_of_a_width(kind, width):
    assert score_scale(6, 3, kind) == pytest.approx(1 / math.sqrt(width))
    encoder, _ = encoders(3, attention_scale=kind)
    assert {layer.scale for layer in encoder.layers} == {encoder.scale} == {score_scale(6, 3, kind)}


def test_padding_changes_nothing():
    (encoder, _), (tokens, mask) = encoders(), sets(padded=True)
    moved = torch.where(mask[..., None], tokens, tokens + 5)
    found, expected = encoder(moved, mask)[mask], encoder(tokens, mask)[mask]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(encoder(tokens[2:3, :3]), encoder(tokens[2:3], mask[2:3])[:, :3])
    assert (encoder(moved)[mask] - expected).abs().max() > 1e-3


# the two layouts


@masked
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_tokens_first_is_the_same(padded, dropout):
    (plain, first), (tokens, mask) = encoders(dropout=dropout), sets(padded)
    assert first.tokens_first and {layer.token_axis for layer in first.layers} == {0}
    assert not plain.tokens_first and {layer.token_axis for layer in plain.layers} == {1}
    keep = plain.dropout_masks(5, 7, torch.Generator().manual_seed(0)) if dropout else None
    torch.testing.assert_close(
        *(output_and_gradients(encoder, tokens, mask, keep) for encoder in (plain, first)), rtol=1e-10, atol=1e-12
    )


def test_each_layer_takes_tokens_in_its_layout():
    (plain, first), (tokens, mask) = encoders(), sets(padded=True)
    for one, other in zip(plain.layers, first.layers, strict=True):
        torch.testing.assert_close(other(tokens.transpose(0, 1), mask.T).transpose(0, 1), one(tokens, mask))
        found = other.attention_weights(tokens.transpose(0, 1), mask.T)
        torch.testing.assert_close(found, one.attention_weights(tokens, mask))


@pytest.mark.parametrize(("num_heads", "inside"), [(6, True), (3, True), (2, False), (1, False)])
def test_only_narrow_heads_have_tokens_first(num_heads, inside):
    encoder = TransformerEncoder(6, 2, num_heads, 10, tokens_first=True)
    assert encoder.tokens_first == inside
    assert [layer.token_axis for layer in encoder.layers] == [0 if inside else 1] * 2


@pytest.mark.parametrize(("num_heads", "layout"), [(6, 1), (3, 0)], ids=["width 1, tokens first", "width 2, plain"])
def test_compiled_narrow_heads_are_the_same(num_heads, layout, monkeypatch):
    """The graph is traced and run without C++, which tests of `narrow_attention` and of compiled runs make."""
    used = []
    narrow = transformer.narrow_attention
    monkeypatch.setattr(transformer, "narrow_attention", lambda *given: used.append(given[4]) or narrow(*given))
    (plain, first), (tokens, mask) = encoders(num_heads, num_layers=1), sets(padded=True)
    expected = output_and_gradients(plain, tokens, mask)
    assert not used  # eager code on a CPU takes torch's attention
    compiled = torch.compile((plain, first)[layout], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(output_and_gradients(compiled, tokens, mask), expected)
    assert set(used) == {1 - layout}


# dropout


@pytest.mark.parametrize("tokens_first", [False, True])
def test_dropout_masks_lie_as_the_layers_read_them(tokens_first):
    plain, first = encoders(dropout=0.3, num_layers=3)
    keep = (first if tokens_first else plain).dropout_masks(400, 7, torch.Generator().manual_seed(0))
    assert keep.shape == (3, 400, 7, 6) and keep.dtype == torch.bool
    inside = keep.transpose(1, 2) if tokens_first else keep
    assert inside.is_contiguous()  # no layer copies it
    assert keep.float().mean().item() == pytest.approx(0.7, abs=0.01)
    again = torch.empty(inside.shape, dtype=torch.bool).bernoulli_(0.7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(inside, again)  # the numbers of the generator that is given, and of no other


@pytest.mark.parametrize("tokens_first", [False, True])
def test_each_layer_drops_by_its_own_part_of_the_mask(tokens_first):
    (plain, first), (tokens, mask) = encoders(dropout=0.5), sets(padded=True)
    keep = plain.dropout_masks(5, 7, torch.Generator().manual_seed(0))
    x = tokens
    for layer, own in zip(plain.layers, keep, strict=True):
        x = layer(x, mask, 2 * own)
    torch.testing.assert_close((first if tokens_first else plain)(tokens, mask, keep, 0.5), x)
    assert (plain(tokens, mask, keep.flip(0), 0.5) - x).abs().max() > 1e-3


@pytest.mark.parametrize("tokens_first", [False, True])
def test_keys_drop_what_their_hash_tells(tokens_first):
    (plain, first), (tokens, mask) = encoders(dropout=0.3), sets(padded=True)
    keys = torch.tensor([0x89ABCDEF, 0x01234567])
    keep = hashed_masks(keys, (len(plain.layers), *tokens.shape), 0.3)
    encoder = first if tokens_first else plain
    torch.testing.assert_close(encoder(tokens, mask, keys, 0.3), plain(tokens, mask, keep, 0.3))
    torch.testing.assert_close(encoder(tokens, mask, keys, torch.tensor(0.3)), plain(tokens, mask, keep, 0.3))


def test_a_factor_multiplies_the_change_of_the_feedforward_network():
    layer = EncoderLayer(32, 4, 64, scale=1.0, dropout=0.75).eval()
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    without = layer(x, None, torch.zeros(2, 5, 32))
    torch.testing.assert_close(layer(x, None, torch.full((2, 5, 32), 4.0)), without + 4 * (layer(x) - without))


@pytest.mark.parametrize("kind", ["dropout", "attention_dropout"])
def test_without_masks_dropout_acts_in_training_mode_alone(kind):
    encoder = TransformerEncoder(8, 1, 2, 16, **{kind: 0.5})
    x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng(devices=[]):
        assert not torch.equal(encoder(x), encoder(x))
        encoder.eval()
        assert torch.equal(encoder(x), encoder(x))


# weights


def test_weights_are_drawn_by_one_rule():
    encoder, random = TransformerEncoder(64, 8, 4, 256), torch.Generator().manual_seed(0)
    init_weights(encoder, 0.1, 8, random)
    for name, weight in encoder.named_parameters():
        if name.endswith("bias"):
            assert (weight == 0).all(), name
        elif weight.dim() == 1:
            assert "norm" in name and (weight == 1).all(), name
        else:
            std = 0.1 / math.sqrt(2 * 8) if name.endswith("output.weight") else 0.1
            assert weight.std().item() == pytest.approx(std, rel=0.05) and abs(weight.mean().item()) < std / 10, name
    other = TransformerEncoder(64, 8, 4, 256)
    init_weights(other, 0.1, 8, torch.Generator().manual_seed(0))
    assert all(torch.equal(x, y) for x, y in zip(encoder.parameters(), other.parameters(), strict=True))


def test_an_mlp_has_an_activation_between_its_layers_alone():
    network = mlp(3, 5, 5, 2)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    gelu = torch.nn.functional.gelu
    assert [type(part).__name__ for part in network] == ["Linear", "GELU", "Linear", "GELU", "Linear"]
    torch.testing.assert_close(network(x), network[4](gelu(network[2](gelu(network[0](x))))))
