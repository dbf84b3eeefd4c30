"""What padding holds, be it NaN, changes nothing; a token that is not finite stops training, scores and films."""

import dataclasses
import math

import gymnasium
import numpy as np
import pytest
from cases import HEADS
from gymnasium import spaces
from helpers import load_agent, train_tiny

pytest.importorskip("torch")
pytest.importorskip("tyro")
import torch

from noisy_envs import __main__ as program
from noisy_envs.tokens import TokenSpec
from noisy_envs.training.envs import make_envs, make_eval_envs
from noisy_envs.training.evaluation import evaluate, make_eval_agent, record_episode, token_weights
from noisy_envs.training.main import main
from noisy_envs.training.settings import parse

VALUES = (math.nan, math.inf, -math.inf, 1e30)
PADDED = {
    "simple_tag": ["--env-id", "noisy_envs/SimpleTag-v0", "--env-kwargs", "num_obstacles=(0,9)"],
    "box_world": [
        "--env-id",
        "noisy_envs/BoxWorldEntities-v0",
        "--preset",
        "fast",
        "--env-kwargs",
        "num_distractors=(0,2)",
    ],
}


class Hollow(gymnasium.Env):
    """Tokens of which the last is padding, with NaN in it; or NaN in a token or a reward, from a step on, as asked."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  as Gymnasium has it
    token_spec = TokenSpec(4, ("x", "role"), {"self": 0, "thing": 1})
    observation_space = spaces.Box(-2.0, 2.0, (4, 2), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, render_mode=None, shows=0.5, pays=1.0, first=2):
        self.render_mode, self.shows, self.pays, self.first = render_mode, float(shows), float(pays), first

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.clock = 0
        return self.see(), {}

    def step(self, action):
        self.clock += 1
        return self.see(), self.pays if self.clock >= self.first else 1.0, False, self.clock == 5, {}

    def see(self):
        x = self.shows if self.clock >= self.first else 0.5
        return np.array([[0, 0], [x, 1], [-0.5, 1], [np.nan, -1]], np.float32)

    def render(self):
        return np.zeros((40, 40, 3), np.uint8)


class Late(Hollow):
    """Of a first episode the seed tells the length; in later ones, which an evaluation does not count, it pays NaN."""

    def reset(self, *, seed=None, options=None):
        self.last, self.later = (9, True) if seed is None else (1 + seed % 5, False)
        return super().reset(seed=seed)

    def step(self, action):
        self.clock += 1
        return self.see(), np.nan if self.later else 1.0, False, self.clock == self.last, {}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    gymnasium.register("Hollow-v0", Hollow, max_episode_steps=9, disable_env_checker=True)


@pytest.fixture(scope="module")
def ppo():
    return load_agent("adapool")


def eval_agent(ppo, args):
    """Make an agent to evaluate."""
    envs, _ = make_eval_envs(args, 1)
    return make_eval_agent(ppo, args, envs.token_spec, envs.single_action_space)


def learned(agent, tokens):
    """Return outputs, weights in the pool, and the gradients of a loss."""
    agent.zero_grad()
    parameters, values = agent(tokens)
    (parameters.square().mean() + values.square().mean()).backward()
    return [parameters, values, token_weights(agent, tokens), *(weight.grad for weight in agent.parameters())]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("game", PADDED)
@pytest.mark.parametrize("head", HEADS)
def test_padding_reaches_neither_outputs_nor_gradients(head, game, value):
    ppo = load_agent(head)
    args = parse(ppo, [*PADDED[game], "--device", "cpu"])
    envs = make_envs(dataclasses.replace(args, num_envs=8))
    tokens = envs.start.tokens
    agent = ppo.Agent(args, envs.token_spec, envs.action_space)
    padding = ~agent.spec.mask(tokens)
    assert padding.any() and not padding.all(dim=0).all()
    held = tokens.masked_fill(padding.unsqueeze(-1), value)
    held[..., agent.spec.padding_feature] = tokens[..., agent.spec.padding_feature]
    for found, expected in zip(learned(agent, held), learned(agent, tokens), strict=True):
        assert torch.equal(found, expected) and found.isfinite().all()
    assert agent.spec.finite(held) and agent.spec.finite(held.numpy())


@pytest.mark.parametrize("value", VALUES[:3])
@pytest.mark.parametrize("padded", [True, False])
def test_finite_are_tokens_whose_numbers_are_all_finite(value, padded):
    spec = TokenSpec(3, ("x", "role"), {"self": 0, "thing": 1}, padded=padded)
    tokens = np.array([[[0, 0], [1, 1], [0, -1 if padded else 1]]] * 2, np.float32)
    assert spec.finite(tokens) and spec.finite(torch.from_numpy(tokens))
    tokens[1, 2, 0] = value
    assert bool(spec.finite(tokens)) == bool(spec.finite(torch.from_numpy(tokens))) == padded
    tokens[0, 1, 0] = value
    assert not spec.finite(tokens) and not spec.finite(torch.from_numpy(tokens))


def test_a_run_learns_and_is_scored_where_padding_is_not_finite(ppo, tmp_path):
    summary, run = train_tiny(ppo, tmp_path, "--env-id", "Hollow-v0", "--num-noise", "2")
    assert summary["return"] == 5
    assert all(weight.isfinite().all() for weight in torch.load(run / "checkpoint.pt")["agent"].values())


def test_an_evaluation_and_a_film_stop_on_what_is_not_finite(ppo, tmp_path):
    _, run = train_tiny(ppo, tmp_path / "run", "--env-id", "Hollow-v0")
    words = ["--evaluate", str(run), "--run-dir", str(tmp_path / "found"), "--env-kwargs"]
    for value in ("nan", "inf"):
        with pytest.raises(SystemExit, match=r"^error: Hollow-v0 returned an observation that is not finite$"):
            main(ppo, [*words, f"shows={value}"])
        with pytest.raises(SystemExit, match=r"^error: Hollow-v0 returned rewards that are not finite$"):
            main(ppo, [*words, f"pays={value}"])
        args = parse(ppo, [*words, f"shows={value}"])
        agent = eval_agent(ppo, args)
        with pytest.raises(FloatingPointError, match="Hollow-v0 returned an observation that is not finite"):
            record_episode(agent, args)


def test_what_comes_after_the_episode_that_counts_may_be_anything(ppo):
    gymnasium.register("Late-v0", Late, disable_env_checker=True)
    args = parse(ppo, ["--env-id", "Late-v0"])
    agent = eval_agent(ppo, args)
    assert set(evaluate(agent, args, 10)) == {1, 2, 3, 4, 5}


def test_training_stops_where_the_last_observation_alone_is_not_finite(ppo, tmp_path):
    with pytest.raises(SystemExit, match=r"^error: Hollow-v0 returned an observation that is not finite$"):
        train_tiny(ppo, tmp_path, "--env-id", "Hollow-v0", "--env-kwargs", "shows=nan", "first=5")


def test_a_trained_player_stops_on_what_is_not_finite(ppo, tmp_path, monkeypatch):
    _, run = train_tiny(ppo, tmp_path / "run", "--env-id", "Hollow-v0")
    monkeypatch.setattr(Hollow, "see", lambda env: np.full((4, 2), np.nan, np.float32))
    with pytest.raises(SystemExit, match=r"^error: Hollow-v0 returned an observation that is not finite$"):
        program.main(["--policy", str(run), "--out", str(tmp_path / "x.gif")])
