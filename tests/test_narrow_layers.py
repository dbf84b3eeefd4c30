"""Narrow layers are torch's, and go to the GPU's kernels where those are faster and exact."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

from noisy_envs import narrow_layers
from noisy_envs.narrow_layers import LayerNorm, Linear, linear


def test_without_kernels_they_are_torchs():
    x = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    for own, usual in ((Linear(4, 3), torch.nn.Linear(4, 3)), (LayerNorm(4), torch.nn.LayerNorm(4))):
        usual.load_state_dict(own.state_dict())
        assert torch.equal(own(x), usual(x))
    weight = torch.ones(3, 4)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


@pytest.mark.parametrize(
    ("compiling", "dtype", "half", "features", "expected"),
    [
        (True, torch.float32, False, 64, True),
        (False, torch.float32, False, 64, False),
        (True, torch.float64, False, 64, False),
        (True, torch.float32, True, 64, False),
        (True, torch.float32, False, 65, False),
    ],
)
def test_kernels_are_chosen_by_what_they_are_given(compiling, dtype, half, features, expected, monkeypatch):
    used = []

    def kernel(name):
        return SimpleNamespace(apply=lambda inputs, *_: used.append(name) or inputs)

    kernels = SimpleNamespace(WIDEST=64, Linear=kernel("linear"), LayerNorm=kernel("norm"))
    monkeypatch.setattr(narrow_layers, "HAS_KERNELS", True)
    monkeypatch.setattr(narrow_layers, "layer_kernels", kernels, raising=False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    # layers of a GPU that is not there: what torch's own would compute is not asked for
    monkeypatch.setattr(F, "linear", lambda inputs, *_: inputs)
    monkeypatch.setattr(torch.nn.LayerNorm, "forward", lambda _, inputs: inputs)
    with FakeTensorMode():
        shapes = (2, 9, features), (8, features), (features,)
        x, weight, gain = (torch.empty(*shape, device="cuda", dtype=dtype) for shape in shapes)
        norm = LayerNorm(features)
        norm.weight = torch.nn.Parameter(gain)
        torch.set_autocast_enabled("cuda", half)
        try:
            linear(x, weight)
            norm(x)
        finally:
            torch.set_autocast_enabled("cuda", False)
    assert used == ["linear", "norm"] * expected
