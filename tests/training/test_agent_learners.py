"""Several learners share one network: each sees its own tokens, acts on them alone, and adds its own experience."""

import numpy as np
import pytest
from cases import GAME_IDS
from helpers import TINY, load_agent, train_tiny

pytest.importorskip("torch")
pytest.importorskip("tyro")
import torch

from noisy_envs.interfaces.pettingzoo_env import ParallelTokenEnv
from noisy_envs.randomness import derive_seed
from noisy_envs.training.metrics import read_metrics

TAG = ["--env-id", GAME_IDS["simple_tag"]]
SHORT = ["--options", "max_steps=5"]
# words, and how many learn
TEAMS = {
    "agents": (["--num-agents", "3"], 3),
    "predators": ([*TAG, "--num-agents", "2"], 2),
    "continuous predators": ([*TAG, "--num-agents", "2", "--options", "continuous_actions=True", "max_steps=5"], 2),
    "all of tag": (["--parallel-env", "simple_tag_v0"], 4),
    "two predators, three prey": (["--parallel-env", "simple_tag_v0", "--num-agents", "2"], 5),
    "parallel agents": (["--parallel-env", "simple_centroid_v0", "--num-agents", "2"], 2),
}
teams = pytest.mark.parametrize(("words", "learners"), TEAMS.values(), ids=TEAMS)


@pytest.fixture(scope="module")
def ppo():
    return load_agent("adapool")


@pytest.fixture
def trainer(ppo, words, tmp_path):
    options = [] if "--options" in words else SHORT
    trainer = ppo.Trainer(ppo.parse([*TINY, *words, *options, "--run-dir", str(tmp_path)]))
    yield trainer
    trainer.close()


def play(ppo, trainer):
    """Play a rollout: the batch (T, R, ...)."""
    noise = trainer.agent.noise((16, len(trainer.play.tokens)), "cpu", torch.Generator().manual_seed(0))

    def step(play, row):
        return ppo.play_step(trainer.agent, trainer.agent, trainer.envs.pure_step, play, row)

    with torch.no_grad():
        return ppo.rollout(step, trainer.play, noise)[1]


@teams
def test_a_batch_holds_the_experience_of_all(ppo, trainer, learners):
    batch, spec = play(ppo, trainer), trainer.envs.token_spec
    rows = 4 * learners
    assert ppo.num_learners(trainer.args) == learners
    assert batch.tokens.shape == batch.final_tokens.shape == (16, rows, spec.num_tokens, spec.num_features)
    assert all(x.shape == (16, rows) for x in batch[3:5] + batch[6:])
    assert batch.actions.shape[:2] == batch.parameters.shape[:2] == (16, rows)
    if not trainer.agent.continuous:
        assert set(batch.actions.flatten().tolist()) == {0, 1, 2, 3, 4}
    ended = (batch.terminated | batch.truncated).view(16, 4, learners)
    assert ended.any() and (ended == ended[..., :1]).all()  # a world ends for all
    assert trainer.size == 16 * rows
    log = trainer.iterate()
    assert trainer.step == 16 * rows and log["charts/episodic_length"] == 5  # steps of agents, episodes of a learner


@teams
def test_each_row_is_what_that_learner_sees_in_a_game_of_its_own(ppo, trainer, learners):
    """PettingZoo's view, which shares no step with the learning loop, is played with the same actions."""
    args, batch = trainer.args, play(ppo, trainer)
    game, parameters = ppo.registration.find(args.env_id)
    views = batch.tokens.unflatten(1, (4, learners)).numpy()
    actions = batch.actions.unflatten(1, (4, learners)).numpy()
    rewards = batch.rewards.unflatten(1, (4, learners)).numpy()
    for world in range(4):
        env = ParallelTokenEnv(game, None, ppo.team(args), **parameters | ppo.env_options(args))
        seen, _ = env.reset(seed=derive_seed(args.seed, "train") + world)
        assert len(env.agents) == learners
        for t in range(5):
            assert not np.array_equal(views[t, world, 0], views[t, world, 1])
            for i, agent in enumerate(env.agents):
                np.testing.assert_allclose(views[t, world, i], seen[agent], atol=1e-5)
            seen, paid, *_ = env.step(dict(zip(env.agents, actions[t, world], strict=True)))
            np.testing.assert_allclose(rewards[t, world], list(paid.values()), atol=1e-5)


@teams
def test_an_action_depends_on_the_learners_own_tokens_alone(ppo, trainer, learners):
    tokens, agent = trainer.play.tokens, trainer.agent
    noise = agent.noise((len(tokens),), "cpu", torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = agent.sample(agent(tokens)[0], noise)
        own = torch.arange(len(tokens)) % learners == 1
        others_moved = torch.where(own[:, None, None], tokens, tokens.flip(0) + 0.5 * (tokens > 0))
        after = agent.sample(agent(others_moved)[0], noise)
        alone = agent.sample(agent(tokens[own])[0], noise[own])
    torch.testing.assert_close(after[own], before[own])
    torch.testing.assert_close(alone, before[own])


@teams
def test_they_train_are_evaluated_and_filmed(ppo, words, learners, tmp_path):
    options = [] if "--options" in words else SHORT
    length = ["--total-timesteps", str(2 * 64 * learners)]
    summary, run = train_tiny(ppo, tmp_path / "run", *words, *options, *length, "--gif")
    assert summary["steps"] == 2 * 64 * learners and np.isfinite(summary["return"])
    assert np.isnan(summary["score"]) == ("simple_tag_v0" in words)
    steps = [row["global_step"] for row in read_metrics(run / "metrics.csv")]
    assert steps == [64 * learners, 2 * 64 * learners]
    assert {path.name for path in run.iterdir()} >= {"curve.png", "episode.gif", "summary.json"}
    (row,) = ppo.main(["--evaluate", str(run), "--run-dir", str(tmp_path), "--record", str(tmp_path / "x.gif")])
    assert row["return"] == summary["return"] and (tmp_path / "x.gif").stat().st_size > 1000
    noises = ppo.main(["--evaluate", str(run), "--num-noise", "0", "9", "--run-dir", str(tmp_path / "noises")])
    assert [row["evaluated"] for row in noises] == [0, 9]


@teams
def test_they_resume_exactly(ppo, words, learners, tmp_path):
    options = [] if "--options" in words else SHORT
    size = 64 * learners
    whole, folder = train_tiny(ppo, tmp_path / "whole", *words, *options, "--total-timesteps", str(4 * size))
    _, half = train_tiny(ppo, tmp_path / "half", *words, *options, "--total-timesteps", str(2 * size))
    resumed = ppo.main(["--resume", str(half), "--total-timesteps", str(4 * size)])
    assert resumed["return"] == whole["return"]
    weights = [torch.load(path / "checkpoint.pt")["agent"] for path in (folder, half)]
    assert all(torch.equal(a, b) for a, b in zip(*(x.values() for x in weights), strict=True))
