"""Environment steps a second with learning: an agent's file beside a plain PPO loop on MPE2, taking turns in one run.

    python benchmarks/train_speed.py [--network tag] [--threads 2] [--agent agents/ppo_avgpool.py]
        [--ours=--no-compile --ours=--compile]

The peer is what one writes without this package: 64 worlds of MPE2's simple_tag_v3 stepped one after another, torch's
own `nn.TransformerEncoder` with mean pooling, PPO in the manner of CleanRL. Ours is the agent's file, run as anybody
runs it, on the same game: one predator learns, three prey act at random, 28 obstacles collide with nothing. Batch,
minibatch, epochs, sizes of the network, dropout and threads are the same on both sides, and the KL penalty is off.
Differences: torch's attention has biases, a pooling head may have weights, MPE2 draws other starts. That the rules are
the same is shown by tests/games/test_mpe2_parity.py, that the tokens are by a check before each measurement here.

Timed are whole iterations, rollout and update, after warm-up; not the start of the process or its evaluation.
`B` worlds, `T` steps, `N` tokens, `H` width of an embedding.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from mpe2 import simple_tag_v3
from torch import Tensor, nn
from torch.nn import functional as F

from noisy_envs.training.metrics import read_metrics
from noisy_envs.training.versions import library_versions

ROOT = Path(__file__).parents[1]
ENV_ID = "noisy_envs/SimpleTag-1v3v28-v0"
NUM_PREY, NUM_OBSTACLES, NUM_ACTIONS = 3, 28, 5
NUM_ENVS, NUM_STEPS, EPOCHS = 64, 128, 16  # an episode has 128 steps: each rollout is one of every world
BATCH = NUM_ENVS * NUM_STEPS
ROLES = [0] + NUM_OBSTACLES * [1] + NUM_PREY * [3]  # own token, obstacles, prey; 2 would be another predator
AGENTS = ("adversary_0", "agent_0", "agent_1", "agent_2")
ROLE_DIM, MLP_DIM = 4, 32
# the paper's settings for SimpleTag (appendix), KL penalty aside
LEARNING_RATE, GAMMA, GAE_LAMBDA, CLIP, VF_COEF, ENT_COEF, MAX_NORM = 2.5e-3, 0.99, 0.95, 0.2, 0.0005, 0.005, 10.0


class Sizes(NamedTuple):
    """Sizes of an encoder."""

    layers: int
    heads: int
    hidden: int
    feedforward: int


NETWORKS = {"centroid": Sizes(3, 8, 8, 32), "tag": Sizes(6, 3, 3, 12)}  # of the paper's two particle experiments


def tokens_of(observation: np.ndarray) -> Tensor:
    """Turn flat observations (B, 72) of MPE2's predator into tokens (B, N, 5): x, y, vx, vy relative to it, and role.

    An observation is the own velocity and place, relative places of obstacles and prey, velocities of prey.
    """
    own = observation[:, None, :2]
    obstacles, prey, velocity = np.split(observation[:, 4:].reshape(len(own), -1, 2), (NUM_OBSTACLES, 31), axis=1)
    tokens = np.zeros((len(own), len(ROLES), 5), np.float32)
    tokens[:, 1:, :2] = np.concatenate([obstacles, prey], axis=1)
    tokens[:, 1:-NUM_PREY, 2:4] = -own
    tokens[:, -NUM_PREY:, 2:4] = velocity - own
    tokens[..., 4] = ROLES
    return torch.from_numpy(tokens)


class Worlds:
    """MPE2's worlds, stepped one after another; all episodes start and end together."""

    def __init__(self, seed: int) -> None:
        """Make the worlds; obstacles collide with nothing, as in the paper."""
        self.envs = [
            simple_tag_v3.parallel_env(
                num_good=NUM_PREY, num_adversaries=1, num_obstacles=NUM_OBSTACLES, max_cycles=NUM_STEPS,
                continuous_actions=False,
            )
            for _ in range(NUM_ENVS)
        ]  # fmt: skip
        self.prey = np.random.default_rng(seed)
        for i, env in enumerate(self.envs):
            env.reset(seed=seed + i)
            for landmark in env.unwrapped.world.landmarks:
                landmark.collide = False

    def reset(self) -> Tensor:
        """Start an episode in each world: tokens (B, N, 5)."""
        return tokens_of(np.stack([env.reset()[0][AGENTS[0]] for env in self.envs]))

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Play one step of the predators' actions (B,): tokens (B, N, 5) and rewards (B,)."""
        joint = np.column_stack([actions.numpy(), self.prey.integers(0, NUM_ACTIONS, (NUM_ENVS, NUM_PREY))])
        seen, rewards = [], []
        for env, played in zip(self.envs, joint, strict=True):
            observations, gains, *_ = env.step(dict(zip(AGENTS, played, strict=True)))
            seen.append(observations[AGENTS[0]])
            rewards.append(gains[AGENTS[0]])
        return tokens_of(np.stack(seen)), torch.tensor(rewards, dtype=torch.float32)


def mlp(dim: int, out: int) -> nn.Sequential:
    """Return a network of three layers."""
    return nn.Sequential(
        nn.Linear(dim, MLP_DIM), nn.GELU(), nn.Linear(MLP_DIM, MLP_DIM), nn.GELU(), nn.Linear(MLP_DIM, out)
    )


class Network(nn.Module):
    """torch's transformer encoder over tokens, their mean, actor and critic.

    Args:
        sizes: of the encoder.
        dropout: probability.
        everywhere: whether to drop out wherever torch's layer does, in attention and both residual branches too, or
            after the feed-forward block alone, as the paper and ours do.
    """

    def __init__(self, sizes: Sizes, dropout: float, everywhere: bool) -> None:
        """Make the network with torch's initial weights."""
        super().__init__()
        dim = sizes.hidden
        self.role = nn.Embedding(max(ROLES) + 1, ROLE_DIM)
        self.project = nn.Sequential(nn.Linear(4 + ROLE_DIM, dim), nn.GELU())
        layer = nn.TransformerEncoderLayer(
            dim, sizes.heads, sizes.feedforward, dropout, "gelu", batch_first=True, norm_first=True
        )
        if not everywhere:
            layer.self_attn.dropout = layer.dropout.p = layer.dropout1.p = 0.0
        self.encoder = nn.TransformerEncoder(layer, sizes.layers, enable_nested_tensor=False)
        self.actor, self.critic = mlp(dim, NUM_ACTIONS), mlp(dim, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (B, 5) of the actions and the values (B,) of tokens (B, N, 5)."""
        features = torch.cat([tokens[..., :4], self.role(tokens[..., 4].long())], dim=-1)
        pooled = self.encoder(self.project(features)).mean(dim=1)
        return self.actor(pooled), self.critic(pooled).squeeze(-1)


class Batch(NamedTuple):
    """A rollout, (T, B, ...) each."""

    tokens: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    rewards: Tensor


def advantages(batch: Batch, last_value: Tensor) -> Tensor:
    """Estimate generalised advantages (T, B); `last_value` (B,) is of the state at which the time limit cut."""
    result, later, next_value = torch.empty_like(batch.rewards), torch.zeros_like(last_value), last_value
    for t in reversed(range(NUM_STEPS)):
        later = batch.rewards[t] + GAMMA * next_value - batch.values[t] + GAMMA * GAE_LAMBDA * later
        result[t], next_value = later, batch.values[t]
    return result


class Peer:
    """The plain loop; `seconds` tells how long the parts of the last iteration took."""

    def __init__(self, sizes: Sizes, dropout: float, everywhere: bool, seed: int) -> None:
        """Make worlds, network and optimizer."""
        torch.manual_seed(seed)
        self.worlds = Worlds(seed)
        self.network = Network(sizes, dropout, everywhere)
        self.optimizer = torch.optim.Adam(self.network.parameters(), LEARNING_RATE, eps=1e-5)
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds spent inside to those of a part."""
        start = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def rollout(self) -> tuple[Batch, Tensor]:
        """Play an episode in each world: the batch, and the values (B,) of what it ends with."""
        steps = []
        self.network.eval()
        with self.timed("environments"):
            tokens = self.worlds.reset()
        with torch.no_grad():
            for _ in range(NUM_STEPS):
                with self.timed("rollout network"):
                    logits, values = self.network(tokens)
                    policy = torch.distributions.Categorical(logits=logits, validate_args=False)
                    actions = policy.sample()
                    log_probs = policy.log_prob(actions)
                with self.timed("environments"):
                    later, rewards = self.worlds.step(actions)
                steps.append((tokens, actions, log_probs, values, rewards))
                tokens = later
            last_value = self.network(tokens)[1]
        return Batch(*(torch.stack(column) for column in zip(*steps, strict=True))), last_value

    def update(self, batch: Batch, last_value: Tensor) -> list[float]:
        """Improve the network by PPO; the losses of all epochs.

        Raises:
            FloatingPointError: a loss is not finite.
        """
        gains = advantages(batch, last_value)
        targets = (gains + batch.values).flatten()
        gains = ((gains - gains.mean()) / (gains.std() + 1e-8)).flatten()
        tokens, actions, log_probs = (x.flatten(0, 1) for x in batch[:3])
        self.network.train()
        losses = []
        for _ in range(EPOCHS):
            rows = torch.randperm(BATCH)
            logits, values = self.network(tokens[rows])
            policy = torch.distributions.Categorical(logits=logits, validate_args=False)
            ratio = (policy.log_prob(actions[rows]) - log_probs[rows]).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            policy_loss = -torch.min(gains[rows] * ratio, gains[rows] * clipped).mean()
            value_loss = F.mse_loss(values, targets[rows])
            loss = policy_loss + VF_COEF * value_loss - ENT_COEF * policy.entropy().mean()
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.network.parameters(), MAX_NORM)
            self.optimizer.step()
            losses.append(loss.item())
        if not all(map(math.isfinite, losses)):
            raise FloatingPointError(f"the peer's losses are no longer finite: {losses}")
        return losses

    def iterate(self) -> list[float]:
        """Play and learn once: the losses of the epochs."""
        self.seconds = {}
        with self.timed("all"):
            batch, last_value = self.rollout()
            with self.timed("update"):
                return self.update(batch, last_value)


def check_tokens(worlds: Worlds) -> None:
    """Demand that our environment shows the tokens of MPE2's worlds when it is put into their states."""
    ours = gymnasium.make(ENV_ID).unwrapped
    worlds.reset()
    for _ in range(5):  # until all move
        seen, _ = worlds.step(torch.randint(NUM_ACTIONS, (NUM_ENVS,)))
    for env, tokens in zip(worlds.envs, seen.numpy(), strict=True):
        entities = [entity.state for entity in env.unwrapped.world.entities]
        state = {"position": np.array([e.p_pos for e in entities]), "velocity": np.array([e.p_vel for e in entities])}
        shown, _ = ours.reset(options={"state": state})
        np.testing.assert_allclose(tokens, shown, atol=1e-5)


@dataclass
class Side:
    """What was measured of the peer, or of a variant of ours."""

    parameters: int
    rates: list[float] = field(default_factory=list)  # environment steps a second, an iteration each
    medians: list[float] = field(default_factory=list)  # of the rates of a round


def run_ours(args: argparse.Namespace, words: str) -> tuple[list[float], int]:
    """Run the agent's file with the same settings and some words more: rates after warm-up, number of parameters."""
    sizes = NETWORKS[args.network]
    settings = {
        "env-id": ENV_ID, "num-envs": NUM_ENVS, "num-steps": NUM_STEPS, "minibatch-size": BATCH,
        "update-epochs": EPOCHS, "num-layers": sizes.layers, "num-heads": sizes.heads, "embed-dim": sizes.hidden,
        "feedforward-dim": sizes.feedforward, "mlp-dim": MLP_DIM, "role-dim": ROLE_DIM, "dropout": args.dropout,
        "kl-coef": 0, "total-timesteps": (args.warmup + args.iterations) * BATCH, "eval-episodes": 1,
        "num-threads": args.threads, "seed": args.seed,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--{name}={value}" for name, value in settings.items()]
        options += ["--no-capture-video", f"--run-dir={folder}", *shlex.split(words)]
        command = [sys.executable, str(args.agent), *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"error: {shlex.join(command)}\n{done.stdout}{done.stderr}")
        (made,) = Path(folder).iterdir()
        rows = read_metrics(made / "metrics.csv")[args.warmup :]
        parameters = json.loads((made / "summary.json").read_text(encoding="utf-8"))["parameters"]
    if len(rows) != args.iterations or not all(math.isfinite(row["losses/value_loss"]) for row in rows):
        raise SystemExit(f"error: {args.agent.name} logged {len(rows)} iterations, or losses that are not finite")
    return [row["charts/SPS"] for row in rows], parameters


def median_seconds(call: Callable[[], object], repeats: int = 3) -> float:
    """Return the median of the seconds that a call takes, after one as warm-up."""
    call()
    spent = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent)


def arithmetic(sizes: Sizes) -> int:
    """Count the operations of forward and backward of one sample in products of matrices, attention's included."""
    n, h = len(ROLES), sizes.hidden
    encoder = n * h * (4 + ROLE_DIM + sizes.layers * (4 * h + 2 * sizes.feedforward + 2 * n))
    heads = 2 * MLP_DIM * (h + MLP_DIM) + MLP_DIM * (NUM_ACTIONS + 1)
    return 3 * 2 * (encoder + heads)  # backward takes twice the forward; a product and a sum each


def limits(network: Network, sizes: Sizes, tokens: Tensor) -> str:
    """Tell what bounds learning: time and arithmetic of the gradients of tokens (BATCH, N, 5)."""
    network.train()

    def gradient() -> None:
        logits, values = network(tokens)
        (logits.mean() + values.mean()).backward()

    each = median_seconds(gradient) / BATCH
    matrix = torch.rand(1024, 1024)  # none of the network's products is as large, so none is as fast
    rate = 2 * len(matrix) ** 3 / median_seconds(lambda: matrix @ matrix)
    flop = arithmetic(sizes)
    return (
        f"Limits: forward and backward of one sample take the peer's network {each * 1e6:.1f} µs in a batch of "
        f"{BATCH:,}; {EPOCHS} epochs of nothing else allow {1 / (each * EPOCHS):,.0f} env steps/s. Their products of "
        f"matrices are {flop / 1e6:.2f} MFLOP; at the {rate / 1e9:.0f} GFLOP/s of a product of 1,024×1,024 on the "
        f"same threads, {EPOCHS} epochs allow {rate / (flop * EPOCHS):,.0f}."
    )


def machine(threads: int) -> str:
    """Name processor, threads, versions and commit."""
    info = Path("/proc/cpuinfo")
    models = (
        [line for line in info.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    names = library_versions()
    return (
        f"{models[0].split(': ')[1] if models else 'unknown processor'}, {names['machine'].split(',')[1].strip()}, "
        f"{threads} torch thread{'s' if threads > 1 else ''}; Python {names['python']}, torch {names['torch']}; "
        f"commit {names['commit']}"
    )


def spread(values: list[float], digits: int = 0) -> str:
    """Write a median and its range."""
    low, middle, high = (f"{f(values):,.{digits}f}" for f in (min, statistics.median, max))
    return f"{middle} ({low} to {high})"


def parse() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="centroid", help="whose sizes, of the paper's two")
    parser.add_argument("--agent", type=Path, default=ROOT / "agents" / "ppo_adapool.py", help="our side's file")
    parser.add_argument(
        "--ours", action="append", metavar="WORDS",
        help="further options of the agent, as --ours=--compile; once for each variant to measure",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="turns of the peer and of each variant of ours")
    parser.add_argument("--iterations", type=int, default=1, help="timed iterations in a turn")
    parser.add_argument("--warmup", type=int, default=1, help="iterations before: once of the peer, always of ours")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument(
        "--dropout-everywhere", action="store_true",
        help="leave the peer's dropout wherever torch's layer has it: four places, not one",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


class Measured(NamedTuple):
    """What a comparison gave."""

    peer: Side
    ours: dict[str, Side]
    seconds: list[dict[str, float]]  # of the peer's timed iterations, by part
    losses: list[list[float]]  # of the peer's iterations, warm-up included, an epoch each
    loads: list[float]  # average of waiting processes in the minute before each round: ours is one


def measure(args: argparse.Namespace, peer: Peer) -> Measured:
    """Let both sides take turns."""
    result = Measured(Side(sum(weight.numel() for weight in peer.network.parameters())), {}, [], [], [])
    for _ in range(args.warmup):
        result.losses.append(peer.iterate())
    for _ in range(args.rounds):
        result.loads.append(os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan)
        for _ in range(args.iterations):
            result.losses.append(peer.iterate())
            result.seconds.append(peer.seconds)
        turns = [(result.peer, [BATCH / spent["all"] for spent in result.seconds[-args.iterations :]])]
        for words in args.ours or [""]:
            rates, parameters = run_ours(args, words)
            turns.append((result.ours.setdefault(words, Side(parameters)), rates))
        for side, rates in turns:
            side.rates += rates
            side.medians.append(statistics.median(rates))
    return result


def table(args: argparse.Namespace, found: Measured) -> str:
    """Lay out rates, and ratios of the medians of each round, in Markdown."""
    sizes = NETWORKS[args.network]
    lines = [
        f"| {sizes.layers} layers, {sizes.heads} heads, width {sizes.hidden}, feed-forward {sizes.feedforward} "
        "| env steps/s with learning | times the peer's | µs a sample and epoch, all included | parameters |",
        "|---|---|---|---|---|",
    ]
    names = {"peer: MPE2 and `nn.TransformerEncoder`": found.peer}
    names |= {f"`{args.agent.stem} {words}".strip() + "`": side for words, side in found.ours.items()}
    for name, side in names.items():
        ratios = [ours / peers for ours, peers in zip(side.medians, found.peer.medians, strict=True)]
        ratio = "1" if side is found.peer else spread(ratios, 2)
        cost = 1e6 / (statistics.median(side.rates) * EPOCHS)
        lines.append(f"| {name} | {spread(side.rates)} | {ratio} | {cost:.1f} | {side.parameters:,} |")
    return "\n".join(lines)


def shares(seconds: list[dict[str, float]]) -> str:
    """Tell what the peer's time went into."""
    total = sum(spent["all"] for spent in seconds)
    parts = [f"{part} {sum(spent[part] for spent in seconds) / total:.0%}" for part in seconds[0] if part != "all"]
    return ", ".join(parts)


def main() -> None:
    """Check that the peer plays the same game, measure both sides and print a table."""
    args = parse()
    torch.set_num_threads(args.threads)
    peer = Peer(NETWORKS[args.network], args.dropout, args.dropout_everywhere, args.seed)
    check_tokens(peer.worlds)
    measured_on = machine(args.threads)  # now: files may change during the run
    found = measure(args, peer)
    layers, _, hidden, _ = NETWORKS[args.network]
    places = "everywhere in torch's layer" if args.dropout_everywhere else "after the feed-forward block"
    print(table(args, found))
    print(
        f"\n`python benchmarks/train_speed.py {shlex.join(sys.argv[1:])}`: {ENV_ID}, {NUM_ENVS} worlds × {NUM_STEPS} "
        f"steps, {EPOCHS} epochs of one minibatch of {BATCH:,}, dropout {args.dropout} ({places} of the peer); medians "
        f"(least to most) of {args.rounds} rounds of {args.iterations}. "
        f"{measured_on}; load {spread(found.loads, 1)}."
    )
    print(f"The peer's time: {shares(found.seconds)}.")
    print(f"{4 * hidden * layers:,} of the peer's parameters are biases of its attention, which ours lacks.")
    print(f"The peer's loss in each epoch of its first batch: {', '.join(f'{lost:.4f}' for lost in found.losses[0])}.")
    batch, _ = peer.rollout()
    print(limits(peer.network, NETWORKS[args.network], batch.tokens.flatten(0, 1)))


if __name__ == "__main__":
    main()
