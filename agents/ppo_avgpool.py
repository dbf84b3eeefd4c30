"""PPO with a transformer encoder and average pooling (AvgPool: Brothers 2025, section 3).

    python agents/ppo_adapool.py                                                # SimpleCentroid: minutes on a CPU
    python agents/ppo_adapool.py --env-id noisy_envs/SimpleTag-1v3v28-v0        # the paper's network and settings
    python agents/ppo_adapool.py --env-id noisy_envs/BoxWorldEntities-v0 --preset fast    # our own settings
    python agents/ppo_adapool.py --env-id CartPole-v1 --num-noise 28            # any Gymnasium environment, with noise
    python agents/ppo_adapool.py --learners all --env-kwargs num_agents=3       # three agents share one network
    python agents/ppo_adapool.py --device cuda                                  # environments and network on a GPU
    torchrun --nproc-per-node 2 agents/ppo_adapool.py --device cuda             # one run on several GPUs
    python agents/ppo_adapool.py --resume runs/NAME                             # continue a run that was stopped
    python agents/ppo_adapool.py --evaluate runs/NAME --num-noise 0 4 28 60 --record episode.mp4

The four files `ppo_*.py` take the same options and differ in `PoolingHead` only. `presets.toml` holds the
hyperparameters of each environment; `noisy_envs.training` does everything else: environments, checkpoints, metrics,
evaluation, videos, several GPUs.

Shapes: T steps, R controlled agents in all environments together, N tokens, D features, H embedding width, A actions,
P parameters of an action distribution, M samples.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from noisy_envs.nn.distributions import make_distribution
from noisy_envs.nn.transformer import AttentionScale, TransformerEncoder, init_weights, mlp
from noisy_envs.tokens import TokenSpec
from noisy_envs.training import distributed
from noisy_envs.training.accelerate import Gradient, flatten, minibatches
from noisy_envs.training.envs import Envs, EnvState
from noisy_envs.training.main import main
from noisy_envs.training.run import Run, rollout_stats
from noisy_envs.training.settings import RunArgs


@dataclass
class Args(RunArgs):
    """Settings of a run. The defaults shown are those of the chosen --env-id and --preset."""

    num_layers: int = 2
    """layers of the transformer encoder"""
    num_heads: int = 4
    """attention heads, in the encoder and in the pooling head"""
    embed_dim: int = 32
    """embedding width, H"""
    feedforward_dim: int = 64
    """width of the feed-forward networks"""
    mlp_dim: int = 32
    """width of the hidden layers of actor and critic"""
    role_dim: int = 4
    """width of the learned role embedding"""
    dropout: float = 0.0
    """dropout after each feed-forward network, in updates only"""
    init_std: float = 0.1
    """standard deviation of the initial weights"""
    scale_residuals: bool = True
    """initial weights that end a residual branch are smaller by the root of twice the number of layers, as in GPT-2"""
    class_token_init: Literal["normal", "uniform"] = "normal"
    """initial class token: Normal(0, init_std), or uniform between 0 and 1"""
    query_vector: Literal["none", "adapool", "all"] = "none"
    """heads with two learned vectors before the encoder: one added to the agent's own token, one to all others"""
    attention_scale: AttentionScale = "head"
    """divide attention scores by the root of the "head" width, or of the "embed" width as in the authors' code"""
    log_std_min: float = -2.0
    """lower bound of the log standard deviation of continuous actions"""
    log_std_max: float = 0.5
    """upper bound of the log standard deviation of continuous actions"""
    bounded_means: bool = False
    """means of continuous actions pass through tanh"""
    normalize_actions: bool = False
    """the policy's -1 and 1 stand for the bounds of continuous actions"""

    total_timesteps: int = 262_144
    """environment steps of all controlled agents; may grow with --resume unless the learning rate is annealed"""
    num_envs: int = 64
    """number of parallel environments"""
    num_steps: int = 128
    """steps per environment in each rollout, T"""
    learning_rate: float = 4e-3
    """initial learning rate of Adam"""
    anneal_lr: bool = True
    """decay the learning rate linearly to zero"""
    adam_eps: float = 1e-5
    """Adam's epsilon"""
    gamma: float = 0.9
    """discount factor"""
    gae_lambda: float = 0.9
    """lambda of generalised advantage estimation"""
    update_epochs: int = 6
    """passes over the samples of a rollout"""
    minibatch_size: int = 2048
    """samples per gradient step; must divide the samples of a rollout"""
    clip_coef: float = 0.2
    """clipping range of the probability ratio"""
    dual_clip: float = 0.0
    """bound of the ratio where the advantage is negative (Ye et al. 2020), above 1; 0 for none"""
    ent_coef: float = 0.0
    """coefficient of the entropy"""
    vf_coef: float = 0.5
    """coefficient of the value loss"""
    kl_coef: float = 0.0
    """initial coefficient of the adaptive KL penalty; 0 disables it"""
    kl_target: float = 0.01
    """target of the KL divergence of an update"""
    max_kl: float = 0.0
    """KL divergence at which an update takes no further gradient step; 0 for none"""
    max_grad_norm: float = 1.0
    """maximum norm of the gradient"""


class PoolingHead(nn.Module):
    """AvgPool: the mean over all tokens (Definition 3.4, equations 2 and 3).

    `noisy_envs.nn.pooling.AvgPool` is the general version.
    """

    num_extra_tokens, has_query = 0, False

    def __init__(self, args: Args, query_index: int, generator: torch.Generator) -> None:
        """Make the head, which has no weights."""
        super().__init__()

    def extend(self, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return what the encoder reads: tokens (R, N, H) and mask (R, N), here unchanged."""
        return tokens, mask

    def weights(self, x: Tensor, mask: Tensor | None, attention: Tensor | None = None) -> Tensor:
        """Return the weight of each token, (R, N): 1 / N, N counting those that are not padding."""
        present = torch.ones_like(x[..., 0]) if mask is None else mask.to(x.dtype)
        return present / present.sum(1, keepdim=True)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Pool embeddings (R, N, H) to (R, H)."""
        return (self.weights(x, mask).unsqueeze(2) * x).sum(1)


class Agent(nn.Module):
    """Token embedding, transformer encoder, pooling head, actor and critic."""

    def __init__(self, args: Args, spec: TokenSpec, action_space: Any) -> None:
        """Make the network for the tokens and actions of an environment, on the CPU."""
        super().__init__()
        self.spec, dim, features = spec, args.embed_dim, spec.num_features
        self.distribution = make_distribution(
            action_space, args.log_std_min, args.log_std_max,
            bounded=args.bounded_means, normalize=args.normalize_actions,
        )  # fmt: skip
        if spec.roles:  # the last feature is a category
            self.role = nn.Embedding(1 + max(spec.roles.values()), args.role_dim)
            features += args.role_dim - 1
        self.project = nn.Sequential(nn.Linear(features, dim), nn.GELU())
        self.encoder = TransformerEncoder(
            dim, args.num_layers, args.num_heads, args.feedforward_dim, attention_scale=args.attention_scale,
            dropout=args.dropout, tokens_first=args.compile and args.device.startswith("cpu"),
        )  # fmt: skip
        self.actor = mlp(dim, args.mlp_dim, args.mlp_dim, self.distribution.num_parameters)
        self.critic = mlp(dim, args.mlp_dim, args.mlp_dim, 1)
        generator = torch.Generator().manual_seed(args.seed)
        init_weights(self, args.init_std, args.num_layers if args.scale_residuals else None, generator)
        self.query_vector: nn.Parameter | None = None
        if args.query_vector == "all" or (args.query_vector == "adapool" and PoolingHead.has_query):
            self.query_vector = nn.Parameter(torch.empty(2, dim).normal_(0.0, args.init_std, generator=generator))
        self.pool = PoolingHead(args, spec.query_index, generator)  # last: agents of one seed share all other weights

    def embed(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Map tokens (R, N, D) to the encoder's input (R, N, H) and the mask (R, N), None if nothing is padding."""
        mask = self.spec.mask(tokens) if self.spec.padded else None
        if mask is not None:  # attention gives padding the weight 0, and 0 times NaN is NaN
            tokens = tokens.masked_fill(~mask.unsqueeze(-1), 0)
        if self.spec.roles:
            role = self.role(tokens[..., -1].long().clamp(min=0))
            tokens = torch.cat([tokens[..., :-1], role], dim=-1)
        x = self.project(tokens)
        if self.query_vector is not None:
            other = torch.arange(x.shape[1], device=x.device) != self.spec.query_index
            x = x + torch.where(other[:, None], self.query_vector[1], self.query_vector[0])
        extended: tuple[Tensor, Tensor | None] = self.pool.extend(x, mask)
        return extended

    def forward(
        self, tokens: Tensor, keep: Tensor | None = None, dropout: float | Tensor = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return the parameters of the action distribution (R, P), and the values (R,).

        In updates dropout keeps what `keep` tells, see `dropout_masks`.
        """
        x, mask = self.embed(tokens)
        pooled = self.pool(self.encoder(x, mask, keep, dropout), mask)
        return self.actor(pooled), self.critic(pooled).squeeze(-1)

    def dropout_masks(self, num_samples: int, generator: torch.Generator) -> Tensor:
        """Draw which numbers dropout keeps in an update: bool (layers, M, N, H), or keys (2,) of a hash."""
        return self.encoder.dropout_masks(num_samples, self.spec.num_tokens + self.pool.num_extra_tokens, generator)


Policy = Callable[[Tensor], tuple[Tensor, Tensor]]  # the agent, which may be compiled


class Transition(NamedTuple):
    """A step of all controlled agents, (R, ...), or a rollout of T of them, (T, R, ...)."""

    tokens: Tensor
    action: Tensor
    parameters: Tensor  # of the distribution that the action was sampled from
    value: Tensor
    reward: Tensor
    final_tokens: Tensor  # after the step, before any reset
    terminated: Tensor
    truncated: Tensor
    episode_return: Tensor  # up to and including the step
    episode_length: Tensor


class Samples(NamedTuple):
    """What a gradient step learns from, (M, ...)."""

    tokens: Tensor
    action: Tensor
    parameters: Tensor
    log_prob: Tensor
    advantage: Tensor  # normalised
    target: Tensor  # of the value


def rollout(agent: Agent, policy: Policy, envs: Envs, state: EnvState, noise: Tensor) -> tuple[EnvState, Transition]:
    """Play T steps with action noise (T, R, A)."""
    transitions = []
    for step_noise in noise:
        parameters, value = policy(state.tokens)
        action = agent.distribution.sample(parameters, step_noise)
        next_state, step = envs.step(state, action)
        transitions.append(Transition(state.tokens, action, parameters, value, *step))
        state = next_state
    return state, Transition(*(torch.stack(column) for column in zip(*transitions, strict=True)))


def next_values(policy: Policy, batch: Transition, last_tokens: Tensor) -> Tensor:
    """Return the values (T, R) of the states that the steps led to, before any reset.

    After termination the value is 0. A truncated episode could go on, so its last state has a value.
    """
    following = torch.cat([batch.value[1:], policy(last_tokens)[1][None]])
    truncated = batch.truncated & ~batch.terminated
    if truncated.is_cuda:  # counting the truncated episodes would wait for the GPU
        final_value = policy(batch.final_tokens.flatten(0, 1))[1].unflatten(0, truncated.shape)
        return torch.where(truncated, final_value, following) * ~batch.terminated
    order, rows = truncated.cumsum(0), torch.arange(truncated.shape[1])
    for number in range(1, int(order.max()) + 1):  # of the truncated episodes of an agent
        cut = truncated & (order == number)
        final_value = policy(batch.final_tokens[cut.long().argmax(0), rows])[1]
        following = torch.where(cut, final_value, following)
    return following * ~batch.terminated


def advantages(batch: Transition, next_value: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Estimate generalised advantages (T, R) (Schulman et al. 2016); nothing flows back over the end of an episode."""
    result, later = [], torch.zeros_like(batch.reward[0])
    deltas = batch.reward + gamma * next_value - batch.value
    ongoing = (~(batch.terminated | batch.truncated)).to(batch.reward.dtype)
    for t in reversed(range(len(deltas))):
        later = deltas[t] + gamma * gae_lambda * ongoing[t] * later
        result.append(later)
    return torch.stack(result[::-1])


def prepare(args: Args, agent: Agent, batch: Transition, next_value: Tensor) -> tuple[Samples, dict[str, Tensor]]:
    """Return what is learned from a rollout, T·R samples, and statistics to log."""
    advantage = advantages(batch, next_value, args.gamma, args.gae_lambda)
    target = advantage + batch.value
    log_prob = agent.distribution.log_prob(batch.parameters, batch.action)
    samples = Samples(batch.tokens, batch.action, batch.parameters, log_prob, distributed.normalize(advantage), target)
    unexplained = distributed.mean((target - batch.value).var()) / distributed.mean(target.var())  # of all processes
    stats = rollout_stats(batch, agent.spec) | {"explained_variance": 1 - unexplained}
    return Samples(*(x.flatten(0, 1) for x in samples)), stats


def collect(
    args: Args, agent: Agent, policy: Policy, envs: Envs, state: EnvState, noise: Tensor
) -> tuple[EnvState, Samples, dict[str, Tensor]]:
    """Play a rollout: return the next state, and what `prepare` returns."""
    state, batch = rollout(agent, policy, envs, state, noise)
    return state, *prepare(args, agent, batch, next_values(policy, batch, state.tokens))


def ppo_loss(
    args: Args, agent: Agent, samples: Samples, keep: Tensor | None, kl_coef: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return PPO's clipped loss and its parts (Schulman et al. 2017)."""
    parameters, value = agent(samples.tokens, keep, args.dropout)
    ratio = (agent.distribution.log_prob(parameters, samples.action) - samples.log_prob).exp()
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    objective = torch.min(samples.advantage * ratio, samples.advantage * clipped)
    if args.dual_clip:
        bound = args.dual_clip * samples.advantage
        objective = torch.where(samples.advantage < 0, torch.max(objective, bound), objective)
    policy_loss = -objective.mean()
    value_loss = (value - samples.target).square().mean()
    entropy = agent.distribution.entropy(parameters).mean()
    kl = agent.distribution.kl(samples.parameters, parameters).mean()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy + kl_coef * kl
    parts = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "approx_kl": kl}
    return loss, parts | {"clipfrac": (ratio != clipped).float().mean()}


def update(
    args: Args, agent: Agent, optimizer: torch.optim.Optimizer, gradient: Gradient, samples: Samples, kl_coef: float,
    generator: torch.Generator,
) -> dict[str, Tensor]:  # fmt: skip
    """Learn from the samples for several epochs; return means of the parts of the loss, and of the gradient norm."""
    log, coefficient = [], samples.target.new_full((), kl_coef)
    weights = flatten(agent)
    batches = (x for _ in range(args.update_epochs) for x in minibatches(samples, args.minibatch_size, generator))
    for batch in batches:
        keep = agent.dropout_masks(args.minibatch_size, generator) if args.dropout else None
        losses = gradient(batch, keep, coefficient)  # leaves the gradients in the weights' `grad`
        norm = nn.utils.clip_grad_norm_(weights, args.max_grad_norm)
        log.append(torch.stack([*losses.values(), norm]))
        if args.max_kl and distributed.mean(losses["approx_kl"]) > args.max_kl:
            break
        optimizer.step()
    return dict(zip((*losses, "grad_norm"), torch.stack(log).mean(0), strict=True))


def make_optimizer(args: Args, agent: Agent) -> torch.optim.Adam:
    """Make the optimizer of all weights as one tensor; `update` uses one learning rate for them."""
    return torch.optim.Adam([flatten(agent)], args.learning_rate, eps=args.adam_eps, fused=True)


def learning_rate(args: Args, done: float) -> float:
    """Return the learning rate after the share `done` of training."""
    return args.learning_rate * (1 - done) if args.anneal_lr else args.learning_rate


def adapt(args: Args, kl_coef: float, kl: float) -> float:
    """Return the KL coefficient of the next update, to reach the target, as in the PPO paper."""
    kl_coef *= 1.5 if kl > 2 * args.kl_target else 1.0
    return kl_coef * (0.5 if kl < args.kl_target / 2 else 1.0)


def train(args: Args, run: Run) -> dict[str, Any]:
    """Train an agent and return the summary; `run` keeps checkpoints, metrics, and the signals that stop it."""
    envs = run.make_envs()
    agent = Agent(args, envs.token_spec, envs.action_space).to(args.device).eval()  # `update` draws dropout itself
    optimizer, generator = make_optimizer(args, agent), run.generator()
    gradient = run.gradient(agent, lambda samples, keep, kl_coef: ppo_loss(args, agent, samples, keep, kl_coef))
    policy: Policy = run.policy(agent)
    collect_rollout = run.record(lambda state, noise: collect(args, agent, policy, envs, state, noise))

    state, kl_coef = run.begin(agent, optimizer, generator, envs, args.kl_coef)  # restores a run that is resumed
    for iteration in run.iterations():
        rate = optimizer.param_groups[0]["lr"] = learning_rate(args, iteration / run.num_iterations)
        noise = agent.distribution.noise((args.num_steps, envs.num_learners), args.device, generator)
        state, samples, stats = collect_rollout(state, noise)
        losses = update(args, agent, optimizer, gradient, samples, kl_coef, generator)
        values = run.log(rate, losses, stats)
        kl_coef = adapt(args, kl_coef, values["approx_kl"])
        run.checkpoint(agent, optimizer, generator, state, kl_coef)
    return run.finish(agent)


if __name__ == "__main__":
    main(sys.modules[__name__])
