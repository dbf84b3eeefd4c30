"""Several learners share one network: each sees its own tokens, acts on them alone, and adds its own experience."""

import numpy as np
import pytest
from cases import GAME_IDS
from helpers import train_tiny

pytest.importorskip("torch")
pytest.importorskip("tyro")
import torch
from training_helpers import begin, noise_for, ppo, rollout

from noisy_envs import registration
from noisy_envs.interfaces.pettingzoo_env import ParallelTokenEnv
from noisy_envs.randomness import derive_seed
from noisy_envs.training.envs import env_kwargs, num_learners
from noisy_envs.training.main import main
from noisy_envs.training.metrics import read_metrics

TAG, SHORT = ["--env-id", GAME_IDS["simple_tag"]], ["--num-layers", "1", "--env-kwargs", "max_steps=5"]
# arguments, which end with the environment's, and how many learn
TEAMS = {
    "agents": (["--learners", "all", *SHORT, "num_agents=3"], 3),
    "predators": ([*TAG, "--learners", "predators", *SHORT, "num_predators=2"], 2),
    "continuous predators": (
        [*TAG, "--learners", "predators", *SHORT, "num_predators=2", "continuous_actions=True"],
        2,
    ),
    "prey": ([*TAG, "--learners", "prey", *SHORT, "num_prey=2"], 2),
    "all of tag": ([*TAG, "--learners", "all", *SHORT], 4),
    "two predators, three prey": ([*TAG, "--learners", "all", *SHORT, "num_predators=2", "num_prey=3"], 5),
}
teams = pytest.mark.parametrize(("words", "learners"), TEAMS.values(), ids=TEAMS)


@teams
def test_a_batch_holds_the_experience_of_all(words, learners):
    args, envs, agent, start = begin(words)
    _, batch, samples, _ = rollout(args, envs, agent, start)
    spec, rows = envs.token_spec, 4 * learners
    assert num_learners(args) == learners and envs.num_learners == rows
    assert batch.tokens.shape == batch.final_tokens.shape == (16, rows, spec.num_tokens, spec.num_features)
    assert all(x.shape == (16, rows) for x in batch[3:5] + batch[6:])
    assert batch.action.shape[:2] == batch.parameters.shape[:2] == (16, rows)
    if "continuous" not in "".join(words) and words[:2] == TAG:
        assert set(batch.action.flatten().tolist()) == {0, 1, 2, 3, 4}
    else:
        assert batch.action.shape == (16, rows, 5)
    ended = (batch.terminated | batch.truncated).view(16, 4, learners)
    assert ended.any() and (ended == ended[..., :1]).all()  # an environment ends for all
    assert all(len(x) == 16 * rows for x in samples)


@teams
def test_each_row_is_what_that_learner_sees_in_a_game_of_its_own(words, learners):
    """PettingZoo's view, which shares no step with the learning loop, is played with the same actions."""
    args, envs, agent, start = begin(words)
    _, batch, _, _ = rollout(args, envs, agent, start)
    game, parameters = registration.find(args.env_id)
    views, actions, rewards = (
        x.unflatten(1, (4, learners)).numpy() for x in (batch.tokens, batch.action, batch.reward)
    )
    for world in range(4):
        env = ParallelTokenEnv(game, None, args.learners, **parameters | env_kwargs(args))
        seen, _ = env.reset(seed=derive_seed(args.seed, "train") + world)
        assert len(env.agents) == learners
        for t in range(5):
            assert not np.array_equal(views[t, world, 0], views[t, world, 1])
            for i, name in enumerate(env.agents):
                np.testing.assert_allclose(views[t, world, i], seen[name], atol=1e-5)
            seen, paid, *_ = env.step(dict(zip(env.agents, actions[t, world], strict=True)))
            np.testing.assert_allclose(rewards[t, world], list(paid.values()), atol=1e-5)


@teams
def test_an_action_depends_on_the_learners_own_tokens_alone(words, learners):
    _, envs, agent, start = begin(words)
    tokens, noise = start.tokens, noise_for(agent, (envs.num_learners,))

    def act(tokens, noise):
        return agent.distribution.sample(agent(tokens)[0], noise)

    with torch.no_grad():
        before = act(tokens, noise)
        own = torch.arange(len(tokens)) % learners == 1
        others_moved = torch.where(own[:, None, None], tokens, tokens.flip(0) + 0.5 * (tokens > 0))
        after, alone = act(others_moved, noise), act(tokens[own], noise[own])
    torch.testing.assert_close(after[own], before[own])
    torch.testing.assert_close(alone, before[own])


@teams
def test_they_train_are_evaluated_and_filmed(words, learners, tmp_path):
    length = ["--total-timesteps", str(2 * 64 * learners)]
    summary, run = train_tiny(ppo, tmp_path / "run", *length, "--capture-video", *words)
    assert summary["steps"] == 2 * 64 * learners and np.isfinite(summary["return"])
    assert np.isnan(summary["score"]) == (words[:4] == [*TAG, "--learners", "all"])
    rows = read_metrics(run / "metrics.csv")
    assert [row["global_step"] for row in rows] == [64 * learners, 2 * 64 * learners]  # steps of agents
    assert {row["charts/episodic_length"] for row in rows} == {5}  # episodes of a learner
    assert {path.name for path in run.iterdir()} >= {"curve.png", "episode.gif", "summary.json"}
    (row,) = main(ppo, ["--evaluate", str(run), "--run-dir", str(tmp_path), "--record", str(tmp_path / "x.gif")])
    assert row["return"] == summary["return"] and (tmp_path / "x.gif").stat().st_size > 1000
    noises = main(ppo, ["--evaluate", str(run), "--num-noise", "0", "9", "--run-dir", str(tmp_path / "noises")])
    assert [row["evaluated"] for row in noises] == [0, 9]


@teams
def test_they_resume_exactly(words, learners, tmp_path):
    size = 64 * learners
    whole, folder = train_tiny(ppo, tmp_path / "whole", "--total-timesteps", str(4 * size), *words)
    _, half = train_tiny(ppo, tmp_path / "half", "--total-timesteps", str(2 * size), *words)
    resumed = main(ppo, ["--resume", str(half), "--total-timesteps", str(4 * size)])
    assert resumed["return"] == whole["return"]
    weights = [torch.load(path / "checkpoint.pt")["agent"] for path in (folder, half)]
    assert all(torch.equal(a, b) for a, b in zip(*(x.values() for x in weights), strict=True))
