"""The GPU's kernels of narrow layers are torch's layers.

Without a GPU they can be tested where Triton is installed: `TRITON_INTERPRET=1 python -m pytest
tests/nn/test_triton_layers.py`.
"""

import os

import pytest

pytest.importorskip("triton")
import torch
from torch.nn import functional as F

from noisy_envs.nn import triton_layers
from noisy_envs.nn.small_layers import LayerNorm, Linear

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [
    ((1, 1), 1),
    ((3, 9, 8), 12),
    ((0, 9, 8), 12),
    ((8,), 3),
    ((33, 16), 48),
    ((2, 10_007, 16), 64),
    ((70, 64), 64),
]


def drawn(*shapes):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=random).to(DEVICE).requires_grad_() for shape in shapes]


def same(found, expected, given):
    """Compare values and gradients; those by weights are sums over rows, whose order differs."""
    torch.testing.assert_close(found, expected)
    grad = drawn(found.shape)[0].detach()
    slopes = (torch.autograd.grad(y, given, grad) for y in (found, expected))
    for one, other in zip(*slopes, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * max(1, found[..., 0].numel()) ** 0.5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("shape", "outputs"), SIZES)
def test_linear(shape, outputs, bias):
    given = drawn(shape, (outputs, shape[-1]), *[(outputs,)] * bias)
    same(triton_layers.Linear.apply(*given, *[None] * (not bias)), F.linear(*given), given)


@pytest.mark.parametrize("shape", [shape for shape, _ in SIZES[1:]])
def test_layer_norm(shape):
    given = drawn(shape, shape[-1:], shape[-1:])
    same(triton_layers.LayerNorm.apply(*given, 1e-5), F.layer_norm(given[0], shape[-1:], *given[1:]), given)


def test_programs_that_sum_over_rows_take_several_turns(monkeypatch):
    monkeypatch.setattr(triton_layers, "MAX_SUM_PROGRAMS", 2)
    x, weight, bias = drawn((700, 16), (12, 16), (16,))
    assert triton_layers._split_rows(700, triton_layers.NORM_SUM[0]) == (2, 3)
    same(triton_layers.LayerNorm.apply(x, bias, bias, 1e-5), F.layer_norm(x, (16,), bias, bias), [x, bias])
    same(triton_layers.Linear.apply(x, weight, None), F.linear(x, weight), [x, weight])


def test_rows_that_do_not_lie_one_after_another():
    x, weight, bias = drawn((5, 8, 7), (12, 8), (12,))
    x = x.transpose(1, 2)
    same(triton_layers.Linear.apply(x, weight, bias), F.linear(x, weight, bias), [x, weight, bias])
    same(triton_layers.LayerNorm.apply(x, *weight[:2], 1e-5), F.layer_norm(x, (8,), *weight[:2]), [x, weight])


def test_tensorfloat_rounds_factors_to_ten_bits():
    x, weight = drawn((1000, 16), (48, 16))
    for found, expected in (
        (triton_layers.apply_linear(x, weight, None, True), x @ weight.T),
        (triton_layers.sum_of_products(x, x, True)[0], x.T @ x),
    ):
        difference = (found - expected).norm() / expected.norm()
        assert difference < 1e-3
        assert difference > 1e-5 or DEVICE == "cpu"  # the interpreter does not round


LAYERS = {
    "linear": triton_layers.Linear.apply,
    "layer norm": lambda x, weight, bias: triton_layers.LayerNorm.apply(x, bias, bias, 1e-5),
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_the_same_bits_each_time(layer):
    given = drawn((3, 10_007, 8), (8, 8), (8,))
    slopes = [torch.autograd.grad(layer(*given).square().sum(), [given[0], given[2]]) for _ in range(3)]
    assert all(torch.equal(one, other) for others in slopes for one, other in zip(slopes[0], others, strict=True))


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_a_second_derivative_is_an_error(layer):
    given = drawn((3, 8), (8, 8), (8,))
    (slope,) = torch.autograd.grad(layer(*given).square().sum(), given[0], create_graph=True)
    with pytest.raises(RuntimeError, match="noisy_envs"):
        slope.sum().backward()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("sets", [[7], [7, 5, 3]])
def test_compiled_layers_are_torchs(sets):
    own = torch.nn.Sequential(Linear(16, 48), LayerNorm(48)).to(DEVICE)
    usual = torch.nn.Sequential(torch.nn.Linear(16, 48), torch.nn.LayerNorm(48)).to(DEVICE)
    usual.load_state_dict(own.state_dict())
    compiled = torch.compile(own)
    for size in sets:
        (x,) = drawn((size, 9, 16))
        found, expected = compiled(x), usual(x)
        torch.testing.assert_close(found, expected)
        slopes = (
            torch.autograd.grad(y.square().sum(), [x, *net.parameters()])
            for y, net in ((found, own), (expected, usual))
        )
        for one, other in zip(*slopes, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
