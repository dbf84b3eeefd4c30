"""Compare the training speed of an agent with a plain PPO loop on MPE2, in environment steps per second.

    python benchmarks/train_speed.py [--network tag] [--threads 2] [--agent agents/ppo_avgpool.py]
        [--ours=--no-compile --ours=--compile]

The peer is a loop written without this package: 64 MPE2 environments (simple_tag_v3) stepped one after another, torch's
`nn.TransformerEncoder` with mean pooling, and PPO in the style of CleanRL. Our side runs the agent's file on the same
game: one predator learns, three prey act at random, and 28 obstacles collide with nothing. Both sides have equal batch
and minibatch sizes, epochs, network sizes, dropout and threads, and no KL penalty. They differ in three ways: torch's
attention has biases, a pooling head may have weights, and MPE2 draws different initial states. The test
tests/games/test_mpe2_parity.py compares the rules; a check before each measurement here compares the tokens.

Both sides take turns. The time covers whole iterations (rollout and update) after a warm-up, without process start and
evaluation. `B` environments, `T` steps, `N` tokens.
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
NUM_ENVS, NUM_STEPS, EPOCHS = 64, 128, 16  # episodes have 128 steps: a rollout is one per environment
BATCH = NUM_ENVS * NUM_STEPS
ROLES = [0] + NUM_OBSTACLES * [1] + NUM_PREY * [3]  # own token, obstacles, prey; 2 is another predator
AGENTS = ("adversary_0", "agent_0", "agent_1", "agent_2")
ROLE_DIM, MLP_DIM = 4, 32
# the paper's settings for SimpleTag (appendix), except the KL penalty
LEARNING_RATE, GAMMA, GAE_LAMBDA, CLIP, VF_COEF, ENT_COEF, MAX_NORM = 2.5e-3, 0.99, 0.95, 0.2, 0.0005, 0.005, 10.0


class Sizes(NamedTuple):
    """Sizes of an encoder."""

    layers: int
    heads: int
    hidden: int
    feedforward: int


NETWORKS = {"centroid": Sizes(3, 8, 8, 32), "tag": Sizes(6, 3, 3, 12)}  # the paper's two particle experiments


def tokens_of(observation: np.ndarray) -> Tensor:
    """Convert observations (B, 72) of MPE2's predator to tokens (B, N, 5): relative x, y, vx and vy, and role.

    An observation holds own velocity and position, relative positions of obstacles and prey, and velocities of prey.
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
    """MPE2 environments, stepped one after another; all episodes start and end together."""

    def __init__(self, seed: int) -> None:
        """Create the environments; obstacles collide with nothing, as in the paper."""
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
        """Start an episode in each environment and return tokens (B, N, 5)."""
        return tokens_of(np.stack([env.reset()[0][AGENTS[0]] for env in self.envs]))

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Step with the predators' actions (B,) and return tokens (B, N, 5) and rewards (B,)."""
        joint = np.column_stack([actions.numpy(), self.prey.integers(0, NUM_ACTIONS, (NUM_ENVS, NUM_PREY))])
        seen, rewards = [], []
        for env, played in zip(self.envs, joint, strict=True):
            observations, gains, *_ = env.step(dict(zip(AGENTS, played, strict=True)))
            seen.append(observations[AGENTS[0]])
            rewards.append(gains[AGENTS[0]])
        return tokens_of(np.stack(seen)), torch.tensor(rewards, dtype=torch.float32)


def mlp(dim: int, out: int) -> nn.Sequential:
    """Return a perceptron of three layers."""
    return nn.Sequential(
        nn.Linear(dim, MLP_DIM), nn.GELU(), nn.Linear(MLP_DIM, MLP_DIM), nn.GELU(), nn.Linear(MLP_DIM, out)
    )


class Network(nn.Module):
    """torch's transformer encoder over tokens, mean pooling, actor and critic.

    Args:
        sizes: sizes of the encoder.
        dropout: dropout probability.
        everywhere: whether to apply dropout in all places of torch's layer (attention and both residual branches too)
            or only after the feed-forward block, as the paper and our agents do.
    """

    def __init__(self, sizes: Sizes, dropout: float, everywhere: bool) -> None:
        """Create the network with torch's initial weights."""
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
        """Return action logits (B, 5) and values (B,) for tokens (B, N, 5)."""
        features = torch.cat([tokens[..., :4], self.role(tokens[..., 4].long())], dim=-1)
        pooled = self.encoder(self.project(features)).mean(dim=1)
        return self.actor(pooled), self.critic(pooled).squeeze(-1)


class Batch(NamedTuple):
    """A rollout, with arrays (T, B, ...)."""

    tokens: Tensor
    actions: Tensor
    log_probs: Tensor
    values: Tensor
    rewards: Tensor


def advantages(batch: Batch, last_value: Tensor) -> Tensor:
    """Return advantages (T, B) by GAE; `last_value` (B,) is the value of the truncated state."""
    result, later, next_value = torch.empty_like(batch.rewards), torch.zeros_like(last_value), last_value
    for t in reversed(range(NUM_STEPS)):
        later = batch.rewards[t] + GAMMA * next_value - batch.values[t] + GAMMA * GAE_LAMBDA * later
        result[t], next_value = later, batch.values[t]
    return result


class Peer:
    """The plain loop; `seconds` holds the time of each part of the last iteration."""

    def __init__(self, sizes: Sizes, dropout: float, everywhere: bool, seed: int) -> None:
        """Create environments, network and optimizer."""
        torch.manual_seed(seed)
        self.worlds = Worlds(seed)
        self.network = Network(sizes, dropout, everywhere)
        self.optimizer = torch.optim.Adam(self.network.parameters(), LEARNING_RATE, eps=1e-5)
        self.seconds: dict[str, float] = {}

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds spent in the context to a part."""
        start = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def rollout(self) -> tuple[Batch, Tensor]:
        """Play an episode in each environment and return the batch and the values (B,) of the last states."""
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
        """Update the network by PPO and return the losses of all epochs.

        Raises:
            FloatingPointError: if a loss is not finite.
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
            raise FloatingPointError(f"losses={losses}: expected finite losses of the peer")
        return losses

    def iterate(self) -> list[float]:
        """Run one iteration and return the losses of its epochs."""
        self.seconds = {}
        with self.timed("all"):
            batch, last_value = self.rollout()
            with self.timed("update"):
                return self.update(batch, last_value)


def check_tokens(worlds: Worlds) -> None:
    """Assert that our environment, set to MPE2's states, returns the tokens converted from MPE2."""
    ours = gymnasium.make(ENV_ID).unwrapped
    worlds.reset()
    for _ in range(5):  # until all agents move
        seen, _ = worlds.step(torch.randint(NUM_ACTIONS, (NUM_ENVS,)))
    for env, tokens in zip(worlds.envs, seen.numpy(), strict=True):
        entities = [entity.state for entity in env.unwrapped.world.entities]
        state = {"position": np.array([e.p_pos for e in entities]), "velocity": np.array([e.p_vel for e in entities])}
        shown, _ = ours.reset(options={"state": state})
        np.testing.assert_allclose(tokens, shown, atol=1e-5)


@dataclass
class Side:
    """Measurements of the peer or of a variant of ours."""

    parameters: int
    rates: list[float] = field(default_factory=list)  # environment steps per second of each iteration
    medians: list[float] = field(default_factory=list)  # median rate of each round


def run_ours(args: argparse.Namespace, options: str) -> tuple[list[float], int]:
    """Run the agent with equal settings and further options; return rates after warm-up and number of parameters."""
    sizes = NETWORKS[args.network]
    settings = {
        "env-id": ENV_ID, "num-envs": NUM_ENVS, "num-steps": NUM_STEPS, "minibatch-size": BATCH,
        "update-epochs": EPOCHS, "num-layers": sizes.layers, "num-heads": sizes.heads, "embed-dim": sizes.hidden,
        "feedforward-dim": sizes.feedforward, "mlp-dim": MLP_DIM, "role-dim": ROLE_DIM, "dropout": args.dropout,
        "kl-coef": 0, "total-timesteps": (args.warmup + args.iterations) * BATCH, "eval-episodes": 1,
        "num-threads": args.threads, "seed": args.seed,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        arguments += ["--no-capture-video", f"--run-dir={folder}", *shlex.split(options)]
        command = [sys.executable, str(args.agent), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"error: {shlex.join(command)}\n{done.stdout}{done.stderr}")
        (run_dir,) = Path(folder).iterdir()
        rows = read_metrics(run_dir / "metrics.csv")[args.warmup :]
        parameters = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["parameters"]
    if len(rows) != args.iterations or not all(math.isfinite(row["losses/value_loss"]) for row in rows):
        raise SystemExit(f"error: {args.agent.name}: expected {args.iterations} finite iterations, got {len(rows)}")
    return [row["charts/SPS"] for row in rows], parameters


def median_seconds(call: Callable[[], object], repeats: int = 3) -> float:
    """Return the median seconds of a call, after a warm-up call."""
    call()
    timings = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        timings.append(time.perf_counter() - start)
    return statistics.median(timings)


def arithmetic(sizes: Sizes) -> int:
    """Count the floating-point operations of matrix products, forward and backward, for one sample."""
    n, h = len(ROLES), sizes.hidden
    encoder = n * h * (4 + ROLE_DIM + sizes.layers * (4 * h + 2 * sizes.feedforward + 2 * n))
    heads = 2 * MLP_DIM * (h + MLP_DIM) + MLP_DIM * (NUM_ACTIONS + 1)
    return 3 * 2 * (encoder + heads)  # backward costs twice the forward; 2: multiply and add


def limits(network: Network, sizes: Sizes, tokens: Tensor) -> str:
    """Describe the upper limits of the training speed: time and arithmetic of gradients for tokens (BATCH, N, 5)."""
    network.train()

    def gradient() -> None:
        logits, values = network(tokens)
        (logits.mean() + values.mean()).backward()

    each = median_seconds(gradient) / BATCH
    matrix = torch.rand(1024, 1024)  # larger, so faster, than any product in the network
    rate = 2 * len(matrix) ** 3 / median_seconds(lambda: matrix @ matrix)
    flop = arithmetic(sizes)
    return (
        f"Limits: the peer's network takes {each * 1e6:.1f} µs per sample, forward and backward, at batch {BATCH:,}; "
        f"{EPOCHS} epochs alone allow {1 / (each * EPOCHS):,.0f} env steps/s. A sample needs {flop / 1e6:.2f} MFLOP of "
        f"matrix products. At {rate / 1e9:.0f} GFLOP/s, the rate of a 1,024×1,024 product on the same threads, "
        f"{EPOCHS} epochs allow {rate / (flop * EPOCHS):,.0f} env steps/s."
    )


def machine(threads: int) -> str:
    """Describe processor, threads, versions and commit."""
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
    """Format a median and its range."""
    low, middle, high = (f"{f(values):,.{digits}f}" for f in (min, statistics.median, max))
    return f"{middle} ({low} to {high})"


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="centroid", help="sizes of the network")
    parser.add_argument("--agent", type=Path, default=ROOT / "agents" / "ppo_adapool.py", help="file of our agent")
    parser.add_argument(
        "--ours", action="append", metavar="OPTIONS",
        help="further options of the agent, such as --ours=--compile; repeat for more variants",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="rounds, in which the peer and each variant take turns")
    parser.add_argument("--iterations", type=int, default=1, help="timed iterations per turn")
    parser.add_argument("--warmup", type=int, default=1, help="untimed iterations, of ours in each round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument(
        "--dropout-everywhere", action="store_true",
        help="apply the peer's dropout in all four places of torch's layer instead of one",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


class Measured(NamedTuple):
    """The results of a comparison."""

    peer: Side
    ours: dict[str, Side]
    seconds: list[dict[str, float]]  # seconds of the peer's timed iterations, by part
    losses: list[list[float]]  # losses of the epochs in the peer's iterations, with warm-up
    loads: list[float]  # load average in the minute before each round, which includes this process


def measure(args: argparse.Namespace, peer: Peer) -> Measured:
    """Measure both sides in turns."""
    result = Measured(Side(sum(weight.numel() for weight in peer.network.parameters())), {}, [], [], [])
    for _ in range(args.warmup):
        result.losses.append(peer.iterate())
    for _ in range(args.rounds):
        result.loads.append(os.getloadavg()[0] if hasattr(os, "getloadavg") else math.nan)
        for _ in range(args.iterations):
            result.losses.append(peer.iterate())
            result.seconds.append(peer.seconds)
        turns = [(result.peer, [BATCH / spent["all"] for spent in result.seconds[-args.iterations :]])]
        for options in args.ours or [""]:
            rates, parameters = run_ours(args, options)
            turns.append((result.ours.setdefault(options, Side(parameters)), rates))
        for side, rates in turns:
            side.rates += rates
            side.medians.append(statistics.median(rates))
    return result


def table(args: argparse.Namespace, measured: Measured) -> str:
    """Format the rates, and the ratios of each round's medians, in Markdown."""
    sizes = NETWORKS[args.network]
    lines = [
        f"| {sizes.layers} layers, {sizes.heads} heads, width {sizes.hidden}, feed-forward {sizes.feedforward} "
        "| env steps/s with learning | ratio to the peer | µs per sample and epoch, in total | parameters |",
        "|---|---|---|---|---|",
    ]
    names = {"peer: MPE2 and `nn.TransformerEncoder`": measured.peer}
    names |= {f"`{args.agent.stem} {options}".strip() + "`": side for options, side in measured.ours.items()}
    for name, side in names.items():
        ratios = [ours / peers for ours, peers in zip(side.medians, measured.peer.medians, strict=True)]
        ratio = "1" if side is measured.peer else spread(ratios, 2)
        cost = 1e6 / (statistics.median(side.rates) * EPOCHS)
        lines.append(f"| {name} | {spread(side.rates)} | {ratio} | {cost:.1f} | {side.parameters:,} |")
    return "\n".join(lines)


def shares(seconds: list[dict[str, float]]) -> str:
    """Format the share of each part in the peer's time."""
    total = sum(spent["all"] for spent in seconds)
    parts = [f"{part} {sum(spent[part] for spent in seconds) / total:.0%}" for part in seconds[0] if part != "all"]
    return ", ".join(parts)


def main() -> None:
    """Check that both sides play the same game, measure them and print a table."""
    args = parse()
    torch.set_num_threads(args.threads)
    peer = Peer(NETWORKS[args.network], args.dropout, args.dropout_everywhere, args.seed)
    check_tokens(peer.worlds)
    setup = machine(args.threads)  # now, because files may change during the run
    measured = measure(args, peer)
    layers, _, hidden, _ = NETWORKS[args.network]
    places = "everywhere in torch's layer" if args.dropout_everywhere else "after the feed-forward block"
    print(table(args, measured))
    print(
        f"\n`python benchmarks/train_speed.py {shlex.join(sys.argv[1:])}`: {ENV_ID}, {NUM_ENVS} environments × "
        f"{NUM_STEPS} steps, {EPOCHS} epochs of one minibatch of {BATCH:,}, dropout {args.dropout} (peer: {places}); "
        f"medians (lowest to highest) of {args.rounds} rounds of {args.iterations}. "
        f"{setup}; load {spread(measured.loads, 1)}."
    )
    print(f"The peer's time: {shares(measured.seconds)}.")
    print(f"{4 * hidden * layers:,} of the peer's parameters are attention biases, which our agents do not have.")
    print(f"The peer's loss in each epoch of its first batch: {', '.join(f'{x:.4f}' for x in measured.losses[0])}.")
    batch, _ = peer.rollout()
    print(limits(peer.network, NETWORKS[args.network], batch.tokens.flatten(0, 1)))


if __name__ == "__main__":
    main()
