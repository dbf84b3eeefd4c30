"""The example that puts heads on other models, and the benchmark of the heads."""

import importlib.util
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from cases import by_default

pytest.importorskip("torch")  # an extra: without it these tests do not apply
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from noisy_envs.nn.pooling import AdaPool

ROOT = Path(__file__).parents[2]
POOLS = ("avg", "max", "cls", "ada")


def load(path: str) -> Any:
    """Import a file that belongs to no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


EXAMPLE, SPEED = load("examples/pooling_heads.py"), load("benchmarks/pooling_speed.py")
each_pool = pytest.mark.parametrize("pool", POOLS)


def make_model(pool: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        head = EXAMPLE.make_head(pool, "mean", torch.Generator().manual_seed(3))
        return EXAMPLE.Model(nn.Linear(4, EXAMPLE.DIM), head, outputs=3)


@by_default(
    ("model", "pool"), [("set", "ada"), ("set", "avg"), ("vit", "cls"), ("vit", "max")], product(["set", "vit"], POOLS)
)
def test_loss_falls_and_a_seed_repeats_it(pool, model, capsys):
    words = ["--model", model, "--pool", pool, "--steps", "20", "--seed", "4"]
    before, after = EXAMPLE.main(words)
    assert after < 0.8 * before
    shown = capsys.readouterr().out.splitlines()
    assert all(f"loss {loss:.3f}" in line for loss, line in zip((before, after), shown, strict=True))
    if model == "set":
        assert EXAMPLE.main(words) == (before, after)


@each_pool
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_padding_reaches_neither_outputs_nor_gradients(pool, value):
    model = make_model(pool)
    inputs, mask, *_ = EXAMPLE.draw_sets(torch.Generator().manual_seed(0), 8)

    def learned(tokens):
        model.zero_grad()
        output = model(tokens, mask)
        output.square().sum().backward()
        return [output, model.weights(tokens, mask), *(weight.grad for weight in model.parameters())]

    held = learned(inputs.masked_fill(~mask.unsqueeze(2), value))
    assert all(torch.equal(found, expected) for found, expected in zip(held, learned(inputs), strict=True))


@pytest.mark.parametrize("query", ["corner", "centre", "mean", "learned"])
def test_every_query_fits_pictures(query):
    assert EXAMPLE.main(["--model", "vit", "--query", query, "--steps", "0"])[0] > 0


@each_pool
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])  # torch has another path for `eval`
def test_padding_does_not_matter(pool, training):
    tokens, mask, _, _ = EXAMPLE.draw_sets(torch.Generator().manual_seed(5), 6)
    mask[:, 12:] = False  # no set is as long as the batch: nested tensors would cut it
    model = make_model(pool).train(training)
    with torch.no_grad():
        padded = model(tokens.masked_fill(~mask.unsqueeze(2), 50.0), mask)
        alone = torch.cat([model(row[real].unsqueeze(0)) for row, real in zip(tokens, mask, strict=True)])
    torch.testing.assert_close(padded, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(padded, model(tokens), atol=1e-3)


@each_pool
def test_weights_are_those_of_the_output(pool):
    tokens, mask, _, _ = EXAMPLE.draw_sets(torch.Generator().manual_seed(6), 6)
    model = make_model(pool)
    weights = model.weights(tokens, mask)  # (B, N)
    assert weights.shape == mask.shape
    assert (weights[~mask] == 0).all()
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(6))
    # a token with a weight of its own reaches the output, in the gradient of the pool by the embeddings
    seen: list[torch.Tensor] = []
    model.encoder.register_forward_hook(lambda _, __, out: (out.retain_grad(), seen.append(out))[0])
    model(tokens, mask).sum().backward()
    reached = seen[0].grad.abs().sum(dim=2)  # (B, N), N + 1 with a class token
    if pool == "cls":
        assert (reached[:, 1:] == 0).all()
    else:
        assert ((reached > 0) == (weights > 0)).all()


def test_class_token_is_weighed_by_the_last_layer():
    """What torch's own layer computes, caught in its last attention."""
    tokens, mask, _, _ = EXAMPLE.draw_sets(torch.Generator().manual_seed(7), 6)
    model = make_model("cls")
    caught = []
    last = model.encoder.layers[-1].self_attn
    last.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    model(tokens, mask)
    padding = torch.cat([torch.zeros(6, 1, dtype=torch.bool), ~mask], dim=1)
    attention = last(*3 * caught[:1], key_padding_mask=padding, average_attn_weights=False)[1]  # (B, heads, N+1, N+1)
    row = attention[:, :, 0, 1:]
    torch.testing.assert_close(model.weights(tokens, mask), (row / row.sum(dim=2, keepdim=True)).mean(dim=1))


def test_sets_are_as_told():
    tokens, mask, target, signal = EXAMPLE.draw_sets(torch.Generator().manual_seed(8), 50)
    for row, real, expected, is_signal in zip(tokens, mask, target, signal, strict=True):
        chosen = row[real & (row[:, 0] > 0)]
        assert len(chosen) == is_signal.sum() > 0
        torch.testing.assert_close(expected, chosen[:, 1:].mean(dim=0))


def test_pictures_are_as_told():
    pictures, mask, target, signal = EXAMPLE.draw_pictures(torch.Generator().manual_seed(9), 50)
    assert mask is None
    assert signal.nonzero()[:4, 1].tolist() == [27, 28, 35, 36]
    torch.testing.assert_close(pictures[:, 12:20, 12:20].mean(dim=(1, 2)), target[:, 0], rtol=0, atol=0.06)


def test_projecting_every_token_gives_the_same_numbers():
    ours, projected = AdaPool(16, SPEED.HEADS, init_std=0.3), SPEED.Projected(16)
    with torch.no_grad():
        projected.attention.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
        projected.attention.out_proj.weight.copy_(ours.output.weight)
    tokens = torch.randn(3, 9, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(ours(tokens), projected(tokens))


def test_benchmark_tells_each_head_and_size(monkeypatch, capsys, tmp_path):
    out = tmp_path / "speed.png"
    words = f"pooling_speed.py --n 4 8 --d 8 12 --fixed-n 4 --fixed-d 8 --batch 2 --repeats 1 --out {out}"
    monkeypatch.setattr(sys, "argv", words.split())
    threads = torch.get_num_threads()
    SPEED.main()
    torch.set_num_threads(threads)
    shown = capsys.readouterr().out
    rows = [line.strip("| ").split(" | ") for line in shown.splitlines() if re.match(r"\| \w+ \| \d", line)]
    expected = [(pool, n, d) for n, d in (("4", "8"), ("8", "8"), ("4", "12")) for pool in SPEED.POOLS]
    assert [tuple(row[:3]) for row in rows] == expected
    assert all(float(cell.replace(",", "")) >= 0 for row in rows for cell in row[3:])
    assert {len(row) for row in rows} == {9}
    assert "'commit'" in shown
    assert out.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("n", [6, 40])
@pytest.mark.parametrize("d", [8, 64])
def test_products_are_those_that_torch_counts(n, d):
    make, products = SPEED.POOLS["AdaPool"]
    head, tokens = make(d), torch.ones(3, n, d)
    with FlopCounterMode(display=False) as counter:
        head(tokens)
    assert counter.get_total_flops() == 3 * 2 * products(n, d)  # a product and a sum
