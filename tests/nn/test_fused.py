"""The fused kernels, on an emulated GPU and on a real one, are the agents' own loss and its gradient."""

import dataclasses
import shutil

import pytest
import torch
from fused_cases import Case, errors, make_problem, random_case, worst
from fused_emulation import emulate

from noisy_envs.nn import cuda_program, fused
from noisy_envs.nn.fused_source import choose_lanes

CASES = {
    "AdaPool, two runs, roles, dual clipping, tanh": Case(runs=2, dual_clip=True, tanh=True),
    "AvgPool, padding, width 6, discrete": Case(
        pool="AvgPool", padded=True, roles=0, width=6, continuous=False, actions=4, tokens=9
    ),
    "MaxPool, padding and roles, width 3": Case(pool="MaxPool", padded=True, width=3, layers=6, scale="head"),
    "ClsToken, 33 tokens, query vectors": Case(pool="ClsToken", tokens=32, query=2, query_vector=True, samples=5),
    "MaxPool, equal tokens": Case(pool="MaxPool", repeated=True, dropout=0.0, samples=5),
    "AdaPool, large scores": Case(sharpness=10, tokens=16, samples=5, layers=1),
    "AdaPool, padding, 50 tokens": Case(tokens=50, padded=True, query=3, roles=0, dropout=0.0, samples=5, layers=1),
}


ON_GPU = torch.cuda.is_available() and cuda_program.missing() is None


@pytest.fixture
def device(monkeypatch, tmp_path):
    """Return the device that computes: a GPU, or an emulated one, whose writes are checked in the end."""
    if ON_GPU:
        yield torch.device("cuda:0")
    elif shutil.which("g++"):
        check_guards = emulate(monkeypatch, tmp_path)
        yield torch.device("cpu")
        check_guards()
    else:
        pytest.skip("needs g++, which compiles the emulated kernels, or a GPU")


def kernels_of(problem, device):
    """Return a problem's gradient and policy."""
    lanes = None if device.type == "cuda" else dataclasses.replace(choose_lanes(problem.network), warps=2)
    given, shape = (problem.network, problem.offsets), tuple(problem.samples.target.shape)
    gradient = fused.FusedGradient(*given, shape, device, lanes)
    with pytest.MonkeyPatch.context() as patch:
        if device.type == "cpu":  # the same source needs no second compilation
            patch.setattr(fused.cuda_program, "load", lambda *_: gradient._kernels.program)
        return gradient, fused.FusedPolicy(*given, shape[0], device, lanes)


def check(case, device):
    """Compare loss, gradient and policy of a case."""
    problem = make_problem(case).to(device)
    gradient, policy = kernels_of(problem, device)
    grads, parts = gradient(problem.weights, problem.samples, problem.keys, problem.coefficients)
    found, own = errors(problem, grads, parts, *policy(problem.weights, problem.samples.tokens))
    name, part = worst(found, own)
    assert part <= 1, f"{name}: error {found[name]:.1e}, torch's own {own[name]:.1e}, {case}"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_loss_and_gradient_are_those_of_autograd(case, device):
    check(case, device)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_random_networks(seed, device):
    check(random_case(seed), device)
