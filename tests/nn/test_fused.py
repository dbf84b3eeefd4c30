"""The fused kernels, on an emulated GPU, are the agents' own loss and its gradient by autograd in float64."""

import dataclasses
import random
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from fused_emulation import emulate
from gymnasium import spaces
from helpers import load_agent
from torch import nn

from noisy_envs.nn.distributions import Gaussian
from noisy_envs.nn.dropout_hash import hashed_masks
from noisy_envs.nn.fused_source import COEFFICIENTS, PARTS, choose_lanes, network_of, unsupported, weight_offsets
from noisy_envs.tokens import TokenSpec

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which compiles the emulated kernels")
POOLS = {"AdaPool": "adapool", "AvgPool": "avgpool", "MaxPool": "maxpool", "ClsToken": "clstoken"}
DUAL_CLIP = 1.5


@dataclass(frozen=True)
class Case:
    """A network, and samples to learn from; the fields are those of `Args` and `TokenSpec`."""

    pool: str = "AdaPool"
    tokens: int = 7
    features: int = 5
    roles: int = 4
    padded: bool = False
    query: int = 0
    width: int = 8
    layers: int = 2
    scale: str = "embed"
    continuous: bool = True
    actions: int = 3
    tanh: bool = False
    dual_clip: bool = False
    dropout: float = 0.1
    query_vector: bool = False
    runs: int = 1
    samples: int = 11  # no multiple of what a block takes at a time
    repeated: bool = False  # whether tokens occur twice, so that several have the largest number
    sharpness: float = 1.0  # factor of queries and keys
    seed: int = 0


class TanhGaussian(Gaussian):
    """Means are hyperbolic tangents of the parameters."""

    def split(self, parameters):
        mean, log_std = super().split(parameters)
        return mean.tanh(), log_std


def make_agents(case):
    """Return the agent's module, its settings and an agent of random weights for each run, in float64."""
    module = load_agent(POOLS[case.pool])
    args = module.Args(
        num_layers=case.layers, num_heads=case.width, embed_dim=case.width, feedforward_dim=4 * case.width, role_dim=3,
        dropout=case.dropout, attention_scale=case.scale, log_std_min=-1.0, log_std_max=0.3,
    )  # fmt: skip
    names = [f"feature {i}" for i in range(case.features)]
    roles = {f"role {i}": i for i in range(case.roles)}
    marker = -1 if roles else case.features // 2
    spec = TokenSpec(case.tokens, tuple(names), roles, case.query, marker, padded=case.padded)
    space = spaces.Box(0, 1, (case.actions,)) if case.continuous else spaces.Discrete(case.actions)
    agents = []
    for run in range(case.runs):
        agent = (WithVectors(module.Agent) if case.query_vector else module.Agent)(args, spec, space)
        if case.tanh:
            agent.distribution = TanhGaussian(case.actions, -1.0, 0.3)
        generator = torch.Generator().manual_seed(100 * case.seed + run)
        with torch.no_grad():
            for name, weight in agent.named_parameters():
                weight += 0.2 * torch.randn(weight.shape, generator=generator)
                if "query_key_value" in name:
                    weight[: 2 * case.width] *= case.sharpness
                elif name in ("pool.query.weight", "pool.key.weight"):
                    weight *= case.sharpness
        agents.append(agent.eval())
    return module, args, agents


def WithVectors(kind):
    """Return a kind of agent that adds learned vectors to the query's token and to all others."""

    class Agent(kind):
        def __init__(self, *given):
            super().__init__(*given)
            self.query_vector = nn.Parameter(torch.zeros(2, given[0].embed_dim))

        def embed(self, tokens):
            extend, self.pool.extend = self.pool.extend, lambda x, mask: (x, mask)
            x, mask = super().embed(tokens)
            self.pool.extend = extend
            x = x + self.query_vector[(torch.arange(x.shape[1]) != self.spec.query_index).long()]
            return extend(x, mask)

    return Agent


def make_samples(case, module, agents):
    """Return samples (S, M, ...) as the kernels take them, in float32."""
    random = torch.Generator().manual_seed(case.seed)
    spec, shape = agents[0].spec, (case.runs, case.samples)
    tokens = torch.randn(*shape, case.tokens, case.features, generator=random)
    if case.roles:
        tokens[..., -1] = torch.randint(case.roles, tokens.shape[:-1], generator=random).float()
    if case.padded:
        padding = torch.rand(tokens.shape[:-1], generator=random) < 0.4
        padding[..., 1 if case.query == 0 else 0] = False  # a set of padding alone has no result
        tokens[padding] = torch.nan
        tokens[..., spec.padding_feature][padding] = spec.padding
    if case.repeated:
        tokens[..., 2:4, :] = tokens[..., 4:6, :]
    with torch.no_grad():
        parameters = torch.stack([agent(x)[0] for agent, x in zip(agents, tokens, strict=True)])
    parameters = parameters + 0.3 * torch.randn(parameters.shape, generator=random)
    distribution = agents[0].distribution
    action = distribution.sample(parameters, distribution.noise(shape, "cpu", random))
    log_prob = distribution.log_prob(parameters, action)
    advantage, target = torch.randn(2, *shape, generator=random)
    return module.Samples(tokens, action, parameters, log_prob, advantage, target)


def loss_of(module, args, agent, samples, keep, coefficients, dual_clip):
    """Return the agents' loss and its parts; with dual clipping the plain formula, as no agent has it."""
    clip, entropy, value, kl, _, bound = coefficients.tolist()
    args = dataclasses.replace(args, clip_coef=clip, ent_coef=entropy, vf_coef=value)
    loss, parts = module.ppo_loss(args, agent, samples, keep, kl)
    if dual_clip:
        parameters, _ = agent(samples.tokens, keep)
        ratio = (agent.distribution.log_prob(parameters, samples.action) - samples.log_prob).exp()
        objective = torch.min(samples.advantage * ratio, samples.advantage * ratio.clamp(1 - clip, 1 + clip))
        bounded = torch.where(samples.advantage < 0, objective.maximum(bound * samples.advantage), objective)
        loss = loss - parts["policy_loss"] - bounded.mean()
        parts["policy_loss"] = -bounded.mean()
    return loss, parts


def as_double(samples):
    return type(samples)(*(x.double() if x.is_floating_point() else x for x in samples))


def check_equal(name, found, expected, tolerance):
    error = (found.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-6)
    assert error <= tolerance, f"{name}: error {error:.1e} of the largest number"


def check(case, folder):
    """Compare loss, gradient and policy of a case."""
    tolerance = 1e-5 if case.sharpness == 1 else 1e-4  # torch's own float32 has 3e-5 then
    module, args, agents = make_agents(case)
    network = network_of(
        agents[0], case.pool, dropout=case.dropout > 0, dual_clip=case.dual_clip, tanh=case.tanh,
        query_vector=case.query_vector,
    )  # fmt: skip
    assert unsupported(agents[0], network) is None
    offsets = weight_offsets(network, agents[0].named_parameters())
    lanes = dataclasses.replace(choose_lanes(network), warps=2)
    kernels = emulate(network, lanes, offsets, folder)
    samples = make_samples(case, module, agents)
    random = np.random.default_rng(case.seed)
    keys = torch.from_numpy(random.integers(2**32, size=(case.runs, 2)))
    coefficients = torch.tensor([[0.2, 0.03, 0.5, 0.4, case.dropout, DUAL_CLIP]] * case.runs)
    coefficients[1:, :4] *= torch.from_numpy(random.uniform(0.5, 2, (case.runs - 1, 4))).float()
    weights = torch.stack([torch.cat([x.detach().flatten() for x in agent.parameters()]) for agent in agents])
    grads, parts = kernels.gradient(weights, samples, keys, coefficients)
    acted, values = kernels.forward(weights, samples.tokens)

    for run, agent in enumerate(agents):
        agent.double()
        sizes = case.layers, case.samples, network.encoder_tokens, case.width
        keep = hashed_masks(keys[run], sizes, case.dropout) if case.dropout else None
        batch = as_double(type(samples)(*(x[run] for x in samples)))
        loss, expected = loss_of(module, args, agent, batch, keep, coefficients[run], case.dual_clip)
        loss.backward()
        for i, name in enumerate(PARTS):
            check_equal(name, parts[run, i], expected[name].detach(), tolerance)
        for name, weight in agent.named_parameters():
            begin = offsets[name]
            check_equal(name, grads[run, begin : begin + weight.numel()].view(weight.shape), weight.grad, tolerance)
        with torch.no_grad():
            for name, found, right in zip(("parameters", "values"), (acted, values), agent(batch.tokens), strict=True):
                check_equal(name, found[run], right, tolerance)


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


@needs_compiler
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_loss_and_gradient_are_those_of_autograd(case, tmp_path):
    check(case, tmp_path)
