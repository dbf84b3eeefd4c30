"""The GPU's kernels are scaled dot-product attention.

Without a GPU they can be tested where Triton is installed: `TRITON_INTERPRET=1 pytest tests/nn`.
"""

import os

import pytest

pytest.importorskip("triton")
import torch

from noisy_envs.nn import triton_attention

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
# weights of tokens that may not be seen can be infinite before they are left out, of which the interpreter warns
pytestmark = [pytest.mark.filterwarnings(f"ignore:{word}:RuntimeWarning") for word in ("invalid value", "overflow")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def drawn(tokens, heads, width, masked, sets=2):
    random = torch.Generator().manual_seed(0)
    projected = torch.randn(sets, tokens, 3 * heads * width, generator=random).to(DEVICE)
    mask = (torch.rand(sets, tokens, generator=random) < 0.5).to(DEVICE) if masked else None
    grad = torch.randn(sets, tokens, heads * width, generator=random).to(DEVICE)
    return projected.requires_grad_(), mask, grad


def usual(projected, mask, heads, scale):
    query, key, value = projected.unflatten(2, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    allowed = None if mask is None else mask[:, None, None]
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, allowed, scale=scale)
    return mixed.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (9, 3), (32, 16), (129, 8)])
def test_values_and_gradients(tokens, heads, width, masked):
    projected, mask, grad = drawn(tokens, heads, width, masked)
    if masked:
        mask[:, 0] = True
    found, _ = triton_attention.attend(projected, mask, heads, 0.4)
    expected = usual(projected, mask, heads, 0.4)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(x, projected, grad)[0] for x in (found, expected)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kind", ["columns", "every second", "one row", "expanded"])
def test_masks_of_any_layout(kind):
    projected, mask, grad = drawn(9, 4, 2, masked=True)
    mask[:, 0] = True
    spread = {
        "columns": lambda: mask.T.contiguous().T,
        "every second": lambda: torch.stack([mask, ~mask], dim=2)[:, :, 0],
        "one row": lambda: mask[:1],
        "expanded": lambda: mask[:1].expand(2, 9),
    }[kind]()
    found, _ = triton_attention.attend(projected, spread, 4, 0.4)
    expected = usual(projected, spread.expand(2, 9).clone(), 4, 0.4)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(x, projected, grad)[0] for x in (found, expected)), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_other_masks_than_bool_are_refused(dtype):
    projected, mask, _ = drawn(9, 4, 1, masked=True)
    with pytest.raises(TypeError, match=f"mask: expected torch.bool, got {dtype}"):
        triton_attention.attend(projected, mask.to(dtype), 4, 0.4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_than_float32_are_refused(dtype):
    projected, mask, _ = drawn(9, 4, 1, masked=True)
    with pytest.raises(TypeError, match=f"projected: expected torch.float32, got {dtype}"):
        triton_attention.attend(projected.to(dtype), mask, 4, 0.4)


@pytest.mark.parametrize("width", [1, 2])
def test_a_set_without_tokens_gives_zeros(width):
    projected, mask, grad = drawn(9, 4, width, masked=True)
    mask[0], mask[1] = False, True
    out, _ = triton_attention.attend(projected, mask, 4, 0.4)
    gradient = torch.autograd.grad(out, projected, grad)[0]
    assert (out[0] == 0).all() and (out[1] != 0).any()
    assert (gradient[0] == 0).all() and torch.isfinite(gradient).all()


def test_large_scores_are_finite():
    projected, mask, grad = drawn(9, 4, 2, masked=True)
    mask[:, 0] = True
    large = (1000 * projected.detach()).requires_grad_()
    out, _ = triton_attention.attend(large, mask, 4, 1.0)
    torch.testing.assert_close(out, usual(large, mask, 4, 1.0), rtol=1e-4, atol=1e-2)
    assert torch.isfinite(torch.autograd.grad(out, large, grad)[0]).all()
