"""The pure step is the step of a SAME_STEP vector environment, leaves the environment alone, and has gradients."""

import gymnasium
import numpy as np
import pytest
from cases import CASES, each_case

from noisy_envs import ENVIRONMENTS
from noisy_envs.arrays import as_numpy
from noisy_envs.games.box_world import BoxWorld
from noisy_envs.games.particles import State
from noisy_envs.randomness import episode_key, uniforms
from noisy_envs.registration import GAMES

SOLID = dict.fromkeys(("collidable_agents", "collidable_signal", "collidable_noise"), True)
MOVING = [(env_id, {}) for env_id, (game, _) in ENVIRONMENTS.items() if CASES[game].policy_options]
MOVING += [
    ("noisy_envs/SimpleCentroid-v0", {"num_agents": 2, "num_signal": (1, 4), "num_noise": (0, 4)}),
    ("noisy_envs/SimpleCentroid-v0", {"num_agents": 3, "num_signal": (1, 4), "spread": 0.1, **SOLID}),
    ("noisy_envs/SimpleTag-v0", {"num_predators": 2, "num_obstacles": (0, 6), "collidable_obstacles": True}),
]
# nobody moves, at first all at one point
AT_ONE_POINT = [
    ("noisy_envs/SimpleCentroid-v0", {"num_signal": 1}),
    ("noisy_envs/SimpleCentroid-v0", {"num_signal": 1, "reward_shape": "sqrt"}),
    ("noisy_envs/SimpleCentroid-v0", {"num_agents": 3, **SOLID}),
    ("noisy_envs/SimpleTag-v0", {"collidable_predators": False, "collidable_prey": False}),
    ("noisy_envs/SimpleTag-v0", {"collidable_obstacles": True}),
]


def pair(env_id, backend, **options):
    made = [
        gymnasium.make_vec(env_id, 5, backend=backend, autoreset_mode="SameStep", max_episode_steps=9, **options)
        for _ in range(2)
    ]
    for envs in made:
        envs.reset(seed=4)
    return made


@each_case
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_pure_step_is_the_same_step(env_id, options, backend):
    if backend == "torch":
        torch = pytest.importorskip("torch")
    stepped, pure = pair(env_id, backend, **options)
    worlds = pure.batch_state
    stepped.action_space.seed(0)
    before = repr([pure.batch_state, pure.episodes])
    for _ in range(40):
        actions = stepped.action_space.sample()
        if backend == "torch":
            actions = torch.from_numpy(actions)
        tokens, reward, terminated, truncated, info = stepped.step(actions)
        worlds, outcome = pure.pure_step(worlds, actions.reshape(-1, *stepped.single_action_space.shape))
        np.testing.assert_array_equal(as_numpy(outcome.tokens), as_numpy(tokens))
        np.testing.assert_array_equal(as_numpy(outcome.reward), as_numpy(reward))
        np.testing.assert_array_equal(as_numpy(outcome.terminated), as_numpy(terminated))
        np.testing.assert_array_equal(as_numpy(outcome.truncated), as_numpy(truncated))
        final = as_numpy(outcome.final_tokens)
        for i in range(5):
            last = info["final_obs"][i] if "final_obs" in info and info["_final_obs"][i] else tokens[i]
            np.testing.assert_array_equal(final[i], as_numpy(last))
    for own, theirs in zip(worlds, stepped.batch_state, strict=True):
        for x, y in zip(
            own if isinstance(own, tuple) else [own], theirs if isinstance(own, tuple) else [theirs], strict=True
        ):
            np.testing.assert_array_equal(as_numpy(x), as_numpy(y))
    assert before == repr([pure.batch_state, pure.episodes])


def test_levels_kept_on_a_device_are_the_banks():
    game = BoxWorld(num_levels=50, start_level=7)
    words = uniforms(
        episode_key(np.arange(200), np.zeros(200, np.int64)), np.zeros(200, np.int64), game.num_reset_uniforms
    )
    asked = game.initial(words)
    game.prepare(asked.size)
    kept = game.initial(words)
    for one, other in zip(asked, kept, strict=True):
        np.testing.assert_array_equal(one, other)
    assert set(asked.level) <= set(range(7, 57)) and len(set(asked.level)) > 40


def test_too_many_levels_are_refused():
    with pytest.raises(ValueError, match="num_levels=1048576"):
        BoxWorld(num_levels=2**20).prepare(np.zeros(1))


def slopes(env_id, options, even=False, state=None):
    """Return by actions (16 n, 5) of all agents the gradients of all rewards and of what is seen, in three steps."""
    torch = pytest.importorskip("torch")
    envs = gymnasium.make_vec(
        env_id, 16, backend="torch", continuous_actions=True, learners="all", autoreset_mode="SameStep", **options
    )
    envs.reset(seed=0, options=state)
    worlds, reward, seen = envs.batch_state, 0.0, 0.0
    action = torch.rand(16 * envs.game.num_agents, 5, generator=torch.Generator().manual_seed(0))
    action = (0 * action + 0.5 if even else action).requires_grad_()
    for _ in range(3):
        worlds, outcome = envs.pure_step(worlds, action)
        reward, seen = reward + outcome.reward.sum(), seen + (1 + outcome.tokens).square().sum()
    return [as_numpy(torch.autograd.grad(total, action, retain_graph=True)[0]) for total in (reward, seen)]


@pytest.mark.parametrize(("env_id", "options"), MOVING)
def test_gradients_of_rewards_and_tokens_are_finite(env_id, options):
    for slope in slopes(env_id, options):
        assert np.isfinite(slope).all() and (slope[:, 1:] != 0).any()


@pytest.mark.parametrize(("env_id", "options"), AT_ONE_POINT)
def test_gradients_at_rest_and_at_one_point_are_finite(env_id, options):
    entities = gymnasium.make_vec(env_id, 1, **options).game.num_entities
    for slope in slopes(env_id, options, even=True, state={"state": {"position": np.full((16, entities, 2), 0.95)}}):
        assert np.isfinite(slope).all() and (slope[:, 1:] != 0).any()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("simple_centroid", {"num_agents": 2, "num_signal": (1, 4), "spread": 0.1, "reward_shape": "sqrt", **SOLID}),
        ("simple_tag", {"num_predators": 2, "num_obstacles": 3, "collidable_obstacles": True}),
    ],
)
def test_gradients_are_the_slopes(name, options):
    torch = pytest.importorskip("torch")
    game = GAMES[name](continuous_actions=True, **options)
    key, clock = episode_key(np.arange(3), np.zeros(3, np.int64)), np.zeros(3, np.int64)
    rows = game.initial(uniforms(key, clock, game.num_reset_uniforms))
    start = State(*(torch.from_numpy(field).double() for field in rows))
    randomness = game.sample_randomness(tuple(map(torch.from_numpy, uniforms(key, clock, game.num_step_uniforms))))

    def rewards(action):
        state, total = start, 0.0
        for _ in range(3):
            state = game.transition(state, action, randomness)
            total = total + game.reward(state)
        return total

    action = 0.1 + 0.8 * torch.rand(3, game.num_agents, 5, generator=torch.Generator().manual_seed(0)).double()
    assert torch.autograd.gradcheck(rewards, action.requires_grad_())


@pytest.mark.parametrize(("env_id", "options"), MOVING[-2:])
def test_use_in_inference_mode_leaves_later_gradients_alone(env_id, options):
    torch = pytest.importorskip("torch")
    envs = gymnasium.make_vec(env_id, 4, backend="torch", continuous_actions=True, learners="all", **options)
    action = torch.full((4 * envs.game.num_agents, 5), 0.3, requires_grad=True)
    with torch.inference_mode():
        envs.reset(seed=0)
        envs.step(action.detach().reshape(4, -1, 5))
    envs.reset(seed=0)
    worlds, _ = envs.pure_step(envs.batch_state, action)
    _, outcome = envs.pure_step(worlds, action)
    assert (torch.autograd.grad(outcome.reward.sum(), action)[0] != 0).any()
    kept = [part for made in envs.game._cache.values() for part in (made if isinstance(made, tuple) else [made])]
    assert len(kept) > 3 and not any(part.is_inference() for part in kept)


def test_levels_and_tables_made_in_inference_mode_are_usual_tensors():
    torch = pytest.importorskip("torch")
    game, like = BoxWorld(num_levels=5, observation="pixels"), torch.zeros(1)
    with torch.inference_mode():
        game.prepare(like)
    tables = game.tables(like)
    assert "levels" in tables and not any(table.is_inference() for table in tables.values())
