"""The learning loop on a game that anyone can judge: each head finds the one marked token within seconds."""

from typing import NamedTuple

import gymnasium
import pytest

pytest.importorskip("torch")
pytest.importorskip("tyro")
import torch
from cases import HEADS
from helpers import load_agent
from torch import Tensor

from noisy_envs.interfaces.functional import StepResult
from noisy_envs.randomness import derive_seed, episode_key, uniforms
from noisy_envs.tokens import TokenSpec
from noisy_envs.training.envs import Envs
from noisy_envs.training.main import main
from noisy_envs.training.run import Run
from noisy_envs.training.settings import parse


class Marked(NamedTuple):
    """`B` worlds."""

    tokens: Tensor  # (B, 8, 3)
    clock: Tensor  # (B,) int64, steps since the worlds were made
    right: Tensor  # (B,) whether the answer of this episode was


class MarkedSign:
    """Is the value of the marked token positive? The first action answers, the last of three steps pays.

    Only advantages that reach back two steps credit the answer. Which of the 8 tokens is marked is drawn: it is token
    0, AdaPool's query, once in 8 times; none is in the two steps of waiting.
    """

    token_spec = TokenSpec(8, ("value", "other", "marked"), {}, padded=False)
    single_action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs

    def reset(self, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
        zeros = torch.zeros(self.num_envs, dtype=torch.int64)
        self.key = episode_key(seed + torch.arange(self.num_envs), zeros)
        self.batch_state = Marked(self.show(zeros), zeros, zeros > 0)
        return self.batch_state.tokens, {}

    def show(self, clock: Tensor) -> Tensor:
        values, place = uniforms(self.key, clock, (16, 1))
        marked = torch.nn.functional.one_hot((8 * place).long(), 8).movedim(1, 2)  # (B, 8, 1)
        return torch.cat([2 * values.view(-1, 8, 2) - 1, marked * (clock % 3 == 0)[:, None, None]], dim=2)

    def answer(self, tokens: Tensor) -> Tensor:
        return ((tokens[..., 0] * tokens[..., 2]).sum(1) > 0).long()

    def pure_step(self, worlds: Marked, actions: Tensor) -> tuple[Marked, StepResult]:
        clock = worlds.clock + 1
        right = torch.where(worlds.clock % 3 == 0, actions == self.answer(worlds.tokens), worlds.right)
        over, tokens = clock % 3 == 0, self.show(clock)
        return Marked(tokens, clock, right), StepResult(tokens, tokens, (right & over).float(), over, over & ~over)


WORDS = ["--total-timesteps", "32768", "--num-envs", "256", "--num-steps", "8", "--minibatch-size", "512"]
WORDS += ["--update-epochs", "4", "--num-layers", "1", "--learning-rate", "5e-3"]
SLOW = [pytest.param(head, marks=pytest.mark.slow) for head in HEADS if head not in ("adapool", "maxpool")]


class MarkedRun(Run):
    """A run that evaluates nothing, but keeps its agent."""

    def make_envs(self) -> Envs:
        return Envs(self.args, MarkedSign(self.args.num_envs), 0)

    def finish(self, agent):
        return agent


@pytest.mark.parametrize("head", ["adapool", "maxpool", *SLOW])
def test_each_head_finds_the_marked_token(head, tmp_path):
    ppo = load_agent(head)
    args = parse(ppo, [*WORDS, "--run-dir", str(tmp_path)])
    run = MarkedRun(ppo, args)
    agent = ppo.train(args, run)
    run.close()
    envs = MarkedSign(1000)
    tokens, _ = envs.reset(seed=derive_seed(args.seed, "evaluate"))
    found = agent.distribution.mode(agent(tokens)[0])
    share = float((found == envs.answer(tokens)).float().mean())
    assert share >= 0.95


# the project's own environments, minutes each


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_demo_learns(tmp_path, seed):
    words = ["--seed", str(seed), "--run-dir", str(tmp_path), "--no-capture-video"]
    assert main(load_agent("adapool"), words)["score"] >= 0.7


@pytest.mark.slow
def test_box_world_is_learned_slowly(tmp_path):
    words = ["--env-id", "noisy_envs/BoxWorld-v0", "--total-timesteps", "524288", "--eval-episodes", "1000"]
    words += ["--run-dir", str(tmp_path), "--no-capture-video"]
    assert main(load_agent("adapool"), words)["return"] >= 1.5  # random play: 0.46


@pytest.mark.slow
def test_the_predator_learns(tmp_path):
    words = ["--env-id", "noisy_envs/SimpleTag-v0", "--seed", "2", "--run-dir", str(tmp_path), "--no-capture-video"]
    assert main(load_agent("adapool"), words)["score"] >= 0.7
