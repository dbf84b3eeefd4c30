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


def check(case, folder):
    """Compare loss, gradient and policy of a case, on a GPU if there is one."""
    problem = make_problem(case)
    if ON_GPU:
        problem = problem.to("cuda:0")
        given = problem.network, problem.offsets, (case.runs, case.samples), torch.device("cuda:0")
        gradient, policy = fused.FusedGradient(*given), fused.FusedPolicy(*given)
    elif shutil.which("g++"):
        lanes = dataclasses.replace(choose_lanes(problem.network), warps=2)
        kernels = emulate(problem.network, lanes, problem.offsets, folder)
        gradient, policy = kernels.gradient, kernels.forward
    else:
        pytest.skip("needs g++, which compiles the emulated kernels, or a GPU")
    grads, parts = gradient(problem.weights, problem.samples, problem.keys, problem.coefficients)
    found, own = errors(problem, grads, parts, *policy(problem.weights, problem.samples.tokens))
    name, part = worst(found, own)
    assert part <= 1, f"{name}: error {found[name]:.1e}, torch's own {own[name]:.1e}, {case}"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_loss_and_gradient_are_those_of_autograd(case, tmp_path):
    check(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_random_networks(seed, tmp_path):
    check(random_case(seed), tmp_path)
