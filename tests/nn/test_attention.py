"""Attention with narrow heads is scaled dot-product attention."""

import shutil
from types import SimpleNamespace

import pytest
from cases import slow

pytest.importorskip("torch")
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import noisy_envs.nn
from noisy_envs.nn import attention
from noisy_envs.nn.attention import COMPILE_OPTIONS, narrow_attention


def usual(tokens, weight, mask, scale, width=1):
    """Attend by torch's own function."""
    heads = torch.nn.functional.linear(tokens, weight).unflatten(-1, (3, -1, width)).permute(2, 0, 3, 1, 4)
    allowed = None if mask is None else mask[:, None, None]
    mixed = torch.nn.functional.scaled_dot_product_attention(*heads, allowed, scale=scale)
    return mixed.transpose(1, 2).flatten(2)


def narrow(tokens, weight, mask, scale, axis, width=1):
    """Attend by ours, tokens given as (B, N, H W) for either axis."""
    if axis == 1:
        return narrow_attention(tokens, weight, mask, scale, width=width)
    mask = None if mask is None else mask.transpose(0, 1)
    return narrow_attention(tokens.transpose(0, 1), weight, mask, scale, axis=0, width=width).transpose(0, 1)


def drawn(masked, dtype=torch.float64, size=1.0, sets=7):
    random = torch.Generator().manual_seed(0)
    tokens = size * torch.randn(sets, 9, 4, generator=random, dtype=dtype)
    weight = torch.randn(12, 4, generator=random, dtype=dtype)
    mask = torch.rand(sets, 9, generator=random) < 0.5 if masked else None
    if masked:
        mask[:, 2] = True
    return tokens.requires_grad_(), weight.requires_grad_(), mask


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients(axis, masked, width):
    tokens, weight, mask = drawn(masked)
    found, expected = narrow(tokens, weight, mask, 0.4, axis, width), usual(tokens, weight, mask, 0.4, width)
    torch.testing.assert_close(found, expected)
    into = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for one, other in zip(*(torch.autograd.grad(x, (tokens, weight), into) for x in (found, expected)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_gradcheck(axis, width):
    tokens, weight, mask = drawn(masked=True, sets=2)
    assert torch.autograd.gradcheck(lambda x, w: narrow(x, w, mask, 0.7, axis, width), (tokens, weight))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_second_derivative_is_refused(axis):
    tokens, weight, mask = drawn(masked=True)
    out = narrow(tokens, weight, mask, 0.4, axis).sum()
    with pytest.raises(NotImplementedError, match="narrow_attention has no second derivative"):
        torch.autograd.grad(out, tokens, create_graph=True)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_set_without_tokens_gives_zeros(axis, width):
    tokens, weight, mask = drawn(masked=True)
    mask[3] = False
    out = narrow(tokens, weight, mask, 0.4, axis, width)
    assert (out[3] == 0).all() and (out[0] != 0).any()
    gradients = torch.autograd.grad(out.sum(), (tokens, weight))
    assert all(torch.isfinite(gradient).all() for gradient in gradients) and (gradients[0][3] == 0).all()


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_large_scores_are_finite(axis, masked, width):
    tokens, weight, mask = drawn(masked, dtype=torch.float32, size=1000.0)
    out = narrow(tokens, weight, mask, 1.0, axis, width)
    torch.testing.assert_close(out, usual(tokens, weight, mask, 1.0, width), rtol=1e-4, atol=1e-2)
    assert all(torch.isfinite(gradient).all() for gradient in torch.autograd.grad(out.sum(), (tokens, weight)))


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_half_precision_is_as_exact_as_the_librarys(axis, masked, width):
    tokens, weight, mask = drawn(masked, dtype=torch.float32, size=3.0)
    exact = usual(tokens, weight, mask, 0.4, width)
    with torch.autocast("cpu", torch.bfloat16):
        found = narrow(tokens, weight, mask, 0.4, axis, width)
        librarys = usual(tokens, weight, mask, 0.4, width)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, librarys)
    slopes = (torch.autograd.grad(x.float().square().sum(), (tokens, weight)) for x in (found, librarys, exact))
    for one, other, true in zip(*slopes, strict=True):
        assert (one - true).norm() < 1.2 * (other - true).norm() + 0.004 * true.norm()


@pytest.mark.parametrize("half", [False, True])
def test_kernels_are_chosen_by_what_they_are_given(half, monkeypatch):
    given = []

    def attend(projected, *_):
        given.append(projected.dtype)
        return [projected.new_empty(2, 9, 4)]

    monkeypatch.setattr(attention, "TRITON_AVAILABLE", True)
    monkeypatch.setattr(noisy_envs.nn, "triton_attention", SimpleNamespace(attend=attend), raising=False)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", lambda query, *_, scale: query)
    # tensors of a GPU that is not there, and that torch's own attention, like `torch.autocast`, would look for
    with FakeTensorMode():
        tokens, weight = torch.empty(2, 9, 4, device="cuda"), torch.empty(12, 4, device="cuda")
        torch.set_autocast_enabled("cuda", half)
        try:
            out = narrow_attention(tokens, weight)
        finally:
            torch.set_autocast_enabled("cuda", False)
    assert given == ([] if half else [torch.float32])
    assert out.shape == tokens.shape and (out.dtype == torch.float16) == half


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("axis", "width"), [(0, 1), slow(1, 2)])
def test_compiled_is_the_same(axis, width):
    tokens, weight, mask = drawn(masked=True, dtype=torch.float32)
    compiled = torch.compile(narrow, fullgraph=True, options=COMPILE_OPTIONS)
    found, expected = compiled(tokens, weight, mask, 0.4, axis, width), usual(tokens, weight, mask, 0.4, width)
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        *(torch.autograd.grad(x.square().sum(), (tokens, weight)) for x in (found, expected)), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
