"""Narrow layers are torch's, and go to the GPU's kernels where those are faster and exact."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import noisy_envs.nn
from noisy_envs.nn import small_layers
from noisy_envs.nn.small_layers import LayerNorm, Linear, linear

NORMS = {"whole": {}, "without bias": {"bias": False}, "without both": {"elementwise_affine": False}}


def test_without_kernels_a_linear_layer_is_torchs():
    x, own, usual = (
        torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0)),
        Linear(4, 3),
        torch.nn.Linear(4, 3),
    )
    usual.load_state_dict(own.state_dict())
    assert torch.equal(own(x), usual(x))
    assert torch.equal(linear(x, own.weight), F.linear(x, own.weight))


@pytest.mark.parametrize("options", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize("shape", [(4,), (9, 4)])
def test_without_kernels_a_norm_is_torchs(shape, options):
    x = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(LayerNorm(shape, **options)(x), torch.nn.LayerNorm(shape, **options)(x))


def compile_here(monkeypatch, compiling):
    """Tell this module alone: torch 2.6 would remember for good a function that stood in for its own."""
    seen = {name: getattr(torch, name) for name in ("float32", "is_autocast_enabled")}
    compiler = SimpleNamespace(is_compiling=lambda: compiling)
    monkeypatch.setattr(small_layers, "torch", SimpleNamespace(compiler=compiler, **seen))


@pytest.fixture
def used(monkeypatch):
    """Pretend that there are kernels and that code is compiled; returns what they, and torch, are asked for."""
    used = []

    def kernel(name):
        return SimpleNamespace(apply=lambda inputs, *_: used.append(name) or inputs)

    kernels = SimpleNamespace(Linear=kernel("linear"), LayerNorm=kernel("norm"))
    monkeypatch.setattr(small_layers, "TRITON_AVAILABLE", True)
    monkeypatch.setattr(noisy_envs.nn, "triton_layers", kernels, raising=False)
    compile_here(monkeypatch, True)
    # torch's own would look for the GPU that is not there
    monkeypatch.setattr(F, "linear", lambda inputs, *_: used.append("torch's linear") or inputs)
    monkeypatch.setattr(torch.nn.LayerNorm, "forward", lambda _, inputs: used.append("torch's norm") or inputs)
    return used


def ask(inputs=(2, 9, 8), weight=(8, 8), bias=(8,), types=(torch.float32,) * 3, devices=("cuda",) * 3, half=False):
    """Ask for a linear layer, and for a norm with the bias as its two."""
    with FakeTensorMode():
        shapes = inputs, weight, bias
        x, w, b = (torch.empty(*y, dtype=z, device=d) for y, z, d in zip(shapes, types, devices, strict=True))
        norm = LayerNorm(bias[0])
        norm.weight = norm.bias = torch.nn.Parameter(b)
        torch.set_autocast_enabled("cuda", half)
        try:
            linear(x, w, b)
            norm(x)
        finally:
            torch.set_autocast_enabled("cuda", False)


def test_kernels_are_chosen(used):
    ask()
    assert used == ["linear", "norm"]
    with FakeTensorMode():
        linear(torch.empty(2, 8, device="cuda"), torch.empty(64, 8, device="cuda"))
    assert used[2:] == ["linear"]


FLOAT, DOUBLE = torch.float32, torch.float64
OTHERS = {
    "half precision": {"half": True},
    "inputs of other numbers": {"types": (DOUBLE, FLOAT, FLOAT)},
    "all of other numbers": {"types": (DOUBLE,) * 3},
    "inputs elsewhere": {"devices": ("cpu", "cuda", "cuda")},
    "wide inputs": {"inputs": (2, 65), "weight": (65, 65), "bias": (65,)},
}
LINEAR_OTHERS = {
    "wide outputs": {"weight": (65, 8), "bias": (65,)},
    "a weight of other inputs": {"weight": (8, 7)},
    "a bias that torch would stretch": {"bias": (1,)},
    "a weight of other numbers": {"types": (FLOAT, DOUBLE, FLOAT)},
}


@pytest.mark.parametrize("given", OTHERS.values(), ids=OTHERS)
def test_else_it_is_torchs(given, used):
    ask(**given)
    assert used == ["torch's linear", "torch's norm"]


@pytest.mark.parametrize("given", LINEAR_OTHERS.values(), ids=LINEAR_OTHERS)
def test_else_a_linear_layer_is_torchs(given, used):
    ask(**given)
    assert used[0] == "torch's linear"


@pytest.mark.parametrize("options", [{"bias": False}, {"elementwise_affine": False}])
def test_else_a_norm_is_torchs(options, used):
    with FakeTensorMode():
        x, gain = (torch.empty(*shape, device="cuda") for shape in ((2, 9, 8), (9, 8)))
        LayerNorm(8, **options)(x)
        over_two = LayerNorm((9, 8))
        over_two.weight = over_two.bias = torch.nn.Parameter(gain)
        over_two(x)
    assert used == ["torch's norm"] * 2


def test_what_is_not_compiled_is_torchs(used, monkeypatch):
    compile_here(monkeypatch, False)
    ask()
    assert used == ["torch's linear", "torch's norm"]
