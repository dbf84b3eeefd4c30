"""Networks and samples that the fused kernels are compared on, with the agents' own loss by autograd in float64."""

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from helpers import load_agent

from noisy_envs.nn.dropout_hash import hashed_masks
from noisy_envs.nn.fused_source import PARTS, Network, network_of, unsupported, weight_offsets
from noisy_envs.tokens import TokenSpec

POOLS = {"AdaPool": "adapool", "AvgPool": "avgpool", "MaxPool": "maxpool", "ClsToken": "clstoken"}
DUAL_CLIP = 1.5
DRAWS = 4  # of torch's own error


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
    normalize: bool = False
    dual_clip: bool = False
    dropout: float = 0.1
    query_vector: bool = False
    runs: int = 1
    samples: int = 11  # no multiple of what a block takes at a time
    repeated: bool = False  # whether tokens occur twice, so that several have the largest number
    sharpness: float = 1.0  # factor of queries and keys
    seed: int = 0


def make_agents(case):
    """Return the agent's module, its settings and an agent of random weights for each run, in float64."""
    module = load_agent(POOLS[case.pool])
    args = module.Args(
        num_layers=case.layers, num_heads=case.width, embed_dim=case.width, feedforward_dim=4 * case.width, role_dim=3,
        dropout=case.dropout, attention_scale=case.scale, log_std_min=-1.0, log_std_max=0.3,
        bounded_means=case.tanh, normalize_actions=case.normalize, query_vector="all" if case.query_vector else "none",
        dual_clip=DUAL_CLIP if case.dual_clip else 0.0,
    )  # fmt: skip
    names = [f"feature {i}" for i in range(case.features)]
    roles = {f"role {i}": i for i in range(case.roles)}
    marker = -1 if roles else case.features // 2
    spec = TokenSpec(case.tokens, tuple(names), roles, case.query, marker, padded=case.padded)
    space = spaces.Box(-1, 4, (case.actions,)) if case.continuous else spaces.Discrete(case.actions)
    agents = []
    for run in range(case.runs):
        agent = module.Agent(args, spec, space)
        generator = torch.Generator().manual_seed(100 * case.seed + run)
        with torch.no_grad():
            for name, weight in agent.named_parameters():
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.2)
                if "query_key_value" in name:
                    weight[: 2 * case.width] *= case.sharpness
                elif name in ("pool.query.weight", "pool.key.weight"):
                    weight.mul_(case.sharpness)
        agents.append(agent.eval())
    return module, args, agents


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


def loss_of(module, args, agent, samples, keep, coefficients):
    """Return the agents' loss and its parts."""
    clip, entropy, value, kl, *_ = coefficients.tolist()
    return module.ppo_loss(
        dataclasses.replace(args, clip_coef=clip, ent_coef=entropy, vf_coef=value), agent, samples, keep, kl
    )


def as_double(samples):
    return type(samples)(*(x.double() if x.is_floating_point() else x for x in samples))


@dataclass
class Problem:
    """A case with its agents, in float32, and what the kernels are given."""

    case: Case
    module: Any
    args: Any
    agents: list[Any]
    network: Network
    offsets: dict[str, int]
    weights: torch.Tensor
    samples: Any
    keys: torch.Tensor
    coefficients: torch.Tensor

    def to(self, device):
        """Move all tensors to a device."""
        agents = [agent.to(device) for agent in self.agents]
        moved = [x.to(device) for x in (self.weights, self.keys, self.coefficients)]
        samples = type(self.samples)(*(x.to(device).contiguous() for x in self.samples))
        weights, keys, coefficients = moved
        return dataclasses.replace(
            self, agents=agents, weights=weights, samples=samples, keys=keys, coefficients=coefficients
        )


def make_problem(case, made=None):
    """Draw samples, coefficients and weights, unless `made` holds what `make_agents` would return."""
    module, args, agents = made or make_agents(case)
    network = network_of(agents[0], case.pool, dropout=case.dropout > 0, dual_clip=case.dual_clip)
    assert unsupported(agents[0], network) is None
    offsets = weight_offsets(network, agents[0].named_parameters())
    samples = make_samples(case, module, agents)
    random = np.random.default_rng(case.seed)
    keys = torch.from_numpy(random.integers(2**32, size=(case.runs, 2)))
    coefficients = torch.tensor([[0.2, 0.03, 0.5, 0.4, case.dropout, DUAL_CLIP]] * case.runs)
    coefficients[1:, :4] *= torch.from_numpy(random.uniform(0.5, 2, (case.runs - 1, 4))).float()
    weights = torch.stack([torch.cat([x.detach().flatten() for x in agent.parameters()]) for agent in agents])
    return Problem(case, module, args, agents, network, offsets, weights, samples, keys, coefficients)


def errors(problem, grads, parts, parameters, values):
    """Return the errors of all results, as parts of the largest number that each should have, and torch's own ones.

    The first are those of the kernels, the second those of the agents in float32: names to numbers. Some networks
    amplify rounding, and then any float32 error is a matter of chance. So torch's own error is the largest of several,
    each with weights that are changed by some units in the last place.
    """
    case, found, own = problem.case, {}, {}

    def compare(errors, name, result, expected):
        error = ((result.double() - expected).abs().max() / expected.abs().max().clamp(min=1e-6)).item()
        errors[name] = max(errors.get(name, 0.0), error if np.isfinite(error) else np.inf)

    for run, agent in enumerate(problem.agents):
        sizes = case.layers, case.samples, problem.network.encoder_tokens, case.width
        keep = hashed_masks(problem.keys[run], sizes, case.dropout) if case.dropout else None
        batch = type(problem.samples)(*(x[run] for x in problem.samples))
        kernel = {"parameters": parameters[run], "values": values[run]}
        kernel |= dict(zip(PARTS, parts[run], strict=True))
        for name, weight in agent.named_parameters():
            begin = problem.offsets[name]
            kernel[name] = grads[run, begin : begin + weight.numel()].view(weight.shape)
        for draw in range(DRAWS):
            moved = copy.deepcopy(agent)
            with torch.no_grad():
                for weight in moved.parameters():
                    weight.mul_(1 + draw * 2**-21)
            plain = evaluate(problem, moved, batch, keep, run)
            right = evaluate(problem, moved.double(), as_double(batch), keep, run)
            for name, expected in right.items():
                compare(own, name, plain[name], expected)
                if draw == 0:
                    compare(found, name, kernel[name], expected)
    return found, own


def evaluate(problem, agent, batch, keep, run):
    """Return the agent's own results by name: gradients, parts of the loss, parameters and values."""
    agent.zero_grad()
    coefficients = problem.coefficients[run]
    loss, parts = loss_of(problem.module, problem.args, agent, batch, keep, coefficients)
    loss.backward()
    with torch.no_grad():
        parameters, values = agent(batch.tokens)
    results = {name: part.detach() for name, part in parts.items()} | {"parameters": parameters, "values": values}
    return results | {name: weight.grad.clone() for name, weight in agent.named_parameters()}


def worst(found, own, allowed=1e-5):
    """Return the name of the result with the largest error, and that error as a part of what is allowed.

    More is allowed where float32 loses more digits, as in layers of width 3: five times torch's own largest error.
    """
    name = max(found, key=found.get)
    return name, found[name] / max(allowed, 5 * max(own.values()))


def random_case(seed):
    """Draw a case."""
    random = np.random.default_rng(seed)

    def one_of(*choices):
        return choices[random.integers(len(choices))]

    padded, roles = one_of(True, False), one_of(0, 1, 4)
    tokens = int(random.integers(4, 65))
    continuous = one_of(True, False)
    return Case(
        pool=one_of(*POOLS),
        tokens=tokens,
        features=int(random.integers(2, 9)),
        roles=roles,
        padded=padded,
        query=int(random.integers(tokens)),
        width=one_of(3, 6, 8),
        layers=int(random.integers(1, 7)),
        scale=one_of("head", "embed"),
        continuous=continuous,
        actions=int(random.integers(1 if continuous else 2, 9)),
        tanh=continuous and one_of(True, False),
        normalize=continuous and one_of(True, False),
        dual_clip=one_of(True, False),
        dropout=one_of(0.0, 0.1, 0.5),
        query_vector=one_of(True, False),
        runs=one_of(1, 2),
        samples=int(random.integers(1, 14)),
        sharpness=one_of(1.0, 1.0, 3.0),
        seed=seed,
    )
