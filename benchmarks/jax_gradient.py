"""The agents' loss and its gradient in JAX, as a peer in `learning_speed.py`: AdaPool, heads of width one, a Gaussian.

    python benchmarks/jax_gradient.py [--samples 8192]

XLA compiles it as it does any JAX program, and multiplies matrices in its default precision, which on a GPU is below
float32. Dropout and the KL penalty are left out, which costs JAX least. The program checks the gradient against that of
the agent's own loss, times it on JAX's default device, and prints a line of JSON. Compilation is not timed.

Shapes: `M` samples, `N` tokens, `H` width of an embedding and number of heads.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other processes need the GPU's memory, too

import fused_check
import jax
import jax.numpy as jnp
import numpy as np
import torch

Weights = dict[str, Any]


def linear(weights: Weights, name: str, x: Any) -> Any:
    """Apply a linear layer."""
    bias = weights.get(f"{name}.bias")
    y = x @ weights[f"{name}.weight"].T
    return y if bias is None else y + bias


def gelu(x: Any) -> Any:
    """Return the exact GELU."""
    return jax.nn.gelu(x, approximate=False)


def layer_norm(weights: Weights, name: str, x: Any) -> Any:
    """Normalise embeddings (..., H)."""
    centered = x - x.mean(-1, keepdims=True)
    normed = centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5)
    return normed * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def attend(query: Any, key: Any, value: Any, scale: float) -> Any:
    """Mix values (M, N, H) of heads of width one by queries (M, Q, H) and keys: (M, Q, H)."""
    scores = scale * query[:, :, None] * key[:, None]
    return (jax.nn.softmax(scores, axis=2) * value[:, None]).sum(2)


def mlp(weights: Weights, name: str, x: Any) -> Any:
    """Apply actor or critic."""
    return linear(weights, f"{name}.4", gelu(linear(weights, f"{name}.2", gelu(linear(weights, f"{name}.0", x)))))


def network(weights: Weights, tokens: Any, num_layers: int, scale: float, query_index: int) -> tuple[Any, Any]:
    """Return parameters of the action distribution and values of tokens (M, N, D)."""
    role = weights["role.weight"][tokens[..., -1].astype(jnp.int32)]
    x = gelu(linear(weights, "project.0", jnp.concatenate([tokens[..., :-1], role], -1)))
    for number in range(num_layers):
        layer = f"encoder.layers.{number}"
        heads = linear(weights, f"{layer}.query_key_value", layer_norm(weights, f"{layer}.norm_attention", x))
        query, key, value = jnp.split(heads, 3, -1)
        x = x + linear(weights, f"{layer}.output", attend(query, key, value, scale))
        hidden = linear(weights, f"{layer}.feedforward.0", layer_norm(weights, f"{layer}.norm_feedforward", x))
        x = x + linear(weights, f"{layer}.feedforward.2", gelu(hidden))
    own = x[:, query_index : query_index + 1]
    query, key, value = (
        linear(weights, "pool.query", own),
        linear(weights, "pool.key", x),
        linear(weights, "pool.value", x),
    )
    pooled = (linear(weights, "pool.output", attend(query, key, value, scale)) + own)[:, 0]
    return mlp(weights, "actor", pooled), mlp(weights, "critic", pooled)[:, 0]


def make_loss(args: Any, agent: Any) -> Callable[[Weights, Any], Any]:
    """Return PPO's loss of weights and samples, as `ppo_loss` of the agent computes it, without the KL penalty."""
    low, high = agent.distribution.log_std_min, agent.distribution.log_std_max

    def loss(weights: Weights, samples: Any) -> Any:
        parameters, value = network(
            weights, samples.tokens, args.num_layers, agent.encoder.scale, agent.spec.query_index
        )
        mean, log_std = jnp.split(parameters, 2, -1)
        log_std = jnp.clip(log_std, low, high)
        squares = jnp.square((samples.action - mean) * jnp.exp(-log_std))
        log_prob = -(0.5 * squares + log_std + 0.5 * math.log(2 * math.pi)).sum(-1)
        ratio = jnp.exp(log_prob - samples.log_prob)
        clipped = jnp.clip(ratio, 1 - args.clip_coef, 1 + args.clip_coef)
        policy_loss = -jnp.minimum(samples.advantage * ratio, samples.advantage * clipped).mean()
        entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1).mean()
        return policy_loss + args.vf_coef * jnp.square(value - samples.target).mean() - args.ent_coef * entropy

    return loss


def weights_of(agent: torch.nn.Module) -> Weights:
    """Return the weights of an agent as JAX arrays."""
    return {name: jnp.asarray(weight.detach().cpu().numpy()) for name, weight in agent.named_parameters()}


def samples_of(samples: Any) -> Any:
    """Return samples, a named tuple of tensors, as JAX arrays."""
    return type(samples)(*(jnp.asarray(x.cpu().numpy()) for x in samples))


def check(agent: Any, gradient: Weights) -> float:
    """Return the largest difference of a gradient from that in an agent's weights, relative to its largest number."""
    own = {name: weight.grad.cpu().numpy() for name, weight in agent.named_parameters()}
    largest = max(np.abs(x).max() for x in own.values())
    return float(max(np.abs(np.asarray(gradient[name]) - x).max() for name, x in own.items()) / largest)


def error(problem: Any, count: int = 64) -> float:
    """Return the error of the gradient of a problem's first samples, see `check`."""
    agent, args = problem.agents[0], problem.args
    samples = type(problem.samples)(*(x[0, :count] for x in problem.samples))
    value, _ = problem.module.ppo_loss(args, agent, samples, None, 0.0)
    agent.zero_grad()
    value.backward()
    return check(agent, jax.jit(jax.grad(make_loss(args, agent)))(weights_of(agent), samples_of(samples)))


def nanoseconds(problem: Any, repeats: int, calls: int = 5) -> list[float]:
    """Return times of a gradient per sample, each over several calls with several sets of samples."""
    agent, count = problem.agents[0], problem.case.samples
    gradient, weights = jax.jit(jax.grad(make_loss(problem.args, agent))), weights_of(agent)
    sets = []
    for number in range(fused_check.SETS):
        order = torch.from_numpy(np.random.default_rng(number).permutation(count))
        sets.append(samples_of(type(problem.samples)(*(x[0, order] for x in problem.samples))))
    for samples in sets:
        jax.block_until_ready(gradient(weights, samples))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            results = [gradient(weights, samples) for samples in sets]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) * 1e9 / (calls * len(sets) * count))
    return times


def main() -> None:
    """Check and time the gradient."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=fused_check.SAMPLES)
    parser.add_argument("--repeats", type=int, default=fused_check.REPEATS)
    args = parser.parse_args()
    problem = fused_check.problem_of(fused_check.SIZES["centroid, AdaPool"], 1, args.samples)
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    print(json.dumps({"device": device, "error": error(problem), "times": nanoseconds(problem, args.repeats)}))


if __name__ == "__main__":
    main()
