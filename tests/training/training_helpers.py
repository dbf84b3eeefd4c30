"""What tests of agents share: runs that stop after some updates, and rollouts without a run."""

import os
import subprocess
import sys
from contextlib import suppress

import torch
from helpers import ROOT, load_agent

from noisy_envs.training.envs import make_envs
from noisy_envs.training.main import main
from noisy_envs.training.run import Run
from noisy_envs.training.settings import parse

ppo = load_agent("adapool")
BOX = ["--env-id", "noisy_envs/BoxWorld-v0"]
SMALL = ["--num-envs", "4", "--num-steps", "16", "--minibatch-size", "32", "--update-epochs", "2", "--num-layers", "1"]
SMALL += ["--env-kwargs", "max_steps=5", "--eval-episodes", "3", "--no-capture-video"]


def run(folder, *words, agent=ppo):
    """Train a small agent: the run's summary and folder."""
    summary = main(agent, [*SMALL, "--run-dir", str(folder), *words])
    return summary, max(folder.iterdir(), key=lambda path: path.stat().st_mtime)


def start(*words, **options):
    """Start an agent in a process of its own."""
    command = [sys.executable, str(ROOT / "agents" / "ppo_adapool.py"), *map(str, words)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, **options
    )


class StoppedRun(Run):
    """A run that a signal stops in its update number `last`; it keeps what its agent's loop handed over."""

    def __init__(self, module, args, last):
        super().__init__(module, args)
        self.last = last

    def record(self, function):
        self.collect = super().record(function)
        return self.collect

    def begin(self, agent, optimizer, generator, envs, kl_coef):
        self.agent, self.optimizer = agent, optimizer
        return super().begin(agent, optimizer, generator, envs, kl_coef)

    def log(self, *given):
        if self.updates + 1 == self.last:
            self.stop()
        return super().log(*given)

    def checkpoint(self, agent, optimizer, generator, state, kl_coef):
        self.state = state
        super().checkpoint(agent, optimizer, generator, state, kl_coef)


def train_until(last, words, agent=ppo):
    """Train up to update `last` of a longer run, and its checkpoint; the run is still to be closed."""
    stopped = StoppedRun(agent, parse(agent, words), last)
    with suppress(KeyboardInterrupt):
        agent.train(stopped.local_args, stopped)
    assert stopped.updates == last
    return stopped


def begin(words=(), agent=ppo):
    """Return settings, environments, network, and where the environments stand: nothing is written."""
    args = parse(agent, [*SMALL, *words])
    envs = make_envs(args)
    return args, envs, agent.Agent(args, envs.token_spec, envs.action_space).eval(), envs.start


def noise_for(network, shape, seed=0):
    """Draw action noise (*shape, A)."""
    return network.distribution.noise(shape, "cpu", torch.Generator().manual_seed(seed))


def rollout(args, envs, network, state, agent=ppo):
    """Play a rollout: the next state, the batch (T, R, ...), samples, and what is logged."""
    noise = noise_for(network, (args.num_steps, envs.num_learners))
    with torch.no_grad():
        end, batch = agent.rollout(network, network, envs, state, noise)
        _, samples, stats = agent.collect(args, network, network, envs, state, noise)
    return end, batch, samples, stats
