"""Simple tag: each rule by values worked out by hand, at both ends of each option, on both backends."""

import copy
import dataclasses
import itertools
import math
import pickle
from itertools import product
from typing import Any

import gymnasium
import numpy as np
import pytest
from cases import by_default

from noisy_envs import simple_tag_v0
from noisy_envs.arrays import Array, as_numpy
from noisy_envs.games import physics
from noisy_envs.games.particles import ABSENT, SELF, State
from noisy_envs.games.simple_tag import MPE, OBSTACLE, PREDATOR, PREY, SimpleTag, StepRandomness
from noisy_envs.interfaces import episode as episode_shell
from noisy_envs.interfaces.functional import EnvParams, play
from noisy_envs.interfaces.scripted import assign_policies, clip_action
from noisy_envs.interfaces.spaces import observation_box
from noisy_envs.randomness import episode_key, uniforms
from noisy_envs.validation import build

SOLID = ("collidable_predators", "collidable_prey", "collidable_obstacles")
EVERY_KIND: dict[str, dict[str, Any]] = {
    "plain": {},
    "mpe": MPE,
    "continuous": {"continuous_actions": True, "num_predators": 2, "reward_sharing": "shared"},
    "ranges": {"num_obstacles": (0, 9), "num_predators": 2, "predator_policy": "chase", "prey_policy": "flee"},
    "solid ranges": {"num_obstacles": (1, 9), "collidable_obstacles": True, "prey_policy": "still"},
    "ghosts": {"collidable_predators": False, "collidable_prey": False, "collidable_obstacles": True},
    "noise": {"num_noise": 6, "noise_motion": "still"},
    "hidden noise": {"num_noise": (1, 6), "noise_role": "signal", "num_predators": 2},
    "continuous noise": {"num_noise": 3, "noise_role": "signal", "continuous_actions": True},
    "following noise": {"num_noise": 3, "noise_motion": "follow", "num_obstacles": (0, 3)},
    "orbiting noise": {"num_noise": 3, "noise_motion": "orbit", "start": "mpe"},
    "half ghosts": {"collidable_predators": False, "num_predators": 3, "collidable_obstacles": True},
}
every_kind = pytest.mark.parametrize("options", EVERY_KIND.values(), ids=list(EVERY_KIND))
DEFAULT = SimpleTag()
LEFT, RIGHT, DOWN, UP = 1, 2, 3, 4


def worlds(game: SimpleTag, count: int, seed: int = 0) -> tuple[State, np.ndarray]:
    """Return the starts of `count` episodes and their keys."""
    key = episode_key(seed + np.arange(count), np.zeros(count, np.int64))
    return game.initial(uniforms(key, np.zeros(count, np.int64), game.num_reset_uniforms)), key


def chance(game: SimpleTag, key: np.ndarray, t: int) -> StepRandomness:
    """Return the random variables of step t."""
    return game.sample_randomness(uniforms(key, np.full(len(key), t + 1), game.num_step_uniforms))


def joint(game: SimpleTag, key: np.ndarray, t: int) -> np.ndarray:
    """Return random actions of all agents at step t."""
    return chance(game, key, t).random


def arranged(game: SimpleTag, position: Any, velocity: Any = 0.0) -> State:
    """Return one world, whole, in float64: predators, prey, obstacles."""
    position = np.array([position], dtype=np.float64)
    velocity = np.broadcast_to(np.array(velocity, dtype=np.float64), position.shape)
    return game.arrange(position, velocity)


def coast(game: SimpleTag, state: State) -> np.ndarray:
    """Play a step in which nobody pushes: the movers (A, 5)."""
    return game.push(state, np.zeros_like(state.mover[..., 2:4])).mover[0]


def departure(u: np.ndarray) -> float:
    """Kolmogorov and Smirnov's distance from U(0, 1), times √n: above 2.2 once in 10,000 by chance."""
    u = np.sort(u.ravel().astype(np.float64))
    return float(np.abs(u - (np.arange(u.size) + 0.5) / u.size).max() * math.sqrt(u.size))


def to(array: np.ndarray, backend: str) -> Array:
    """Return the array in the given library."""
    return array if backend == "numpy" else pytest.importorskip("torch").from_numpy(array)


# --- actions and motion ---


def test_positions_move_with_the_old_velocity():
    game = SimpleTag(num_prey=1, num_obstacles=0)
    state = arranged(game, [[0, 5], [0, -5]])
    seen = [state.mover[0, :, [0, 2]]]
    for _ in range(5):
        state = game.transition(state, np.array([[RIGHT, RIGHT]]), None)
        seen.append(state.mover[0, :, [0, 2]])
    x, v = np.array(seen).transpose(1, 2, 0)  # each (2, 6): predator, prey
    np.testing.assert_allclose(x[0], [0, 0, 0.03, 0.0825, 0.151875, 0.23390625])
    np.testing.assert_allclose(v[0], [0, 0.3, 0.525, 0.69375, 0.8203125, 0.915234375])
    np.testing.assert_allclose(x[1], [0, 0, 0.04, 0.11, 0.2025, 0.311875])
    np.testing.assert_allclose(v[1], [0, 0.4, 0.7, 0.925, 1.09375, 1.2203125])
    prey = game.transition(state, np.array([[0, RIGHT]]), None).mover[0, 1]
    np.testing.assert_allclose(prey[[0, 2]], [0.43390625, 1.3])


@pytest.mark.parametrize("speed", [1.0, 1.3, 2.0])
def test_speed_limits(speed):
    game = SimpleTag(num_prey=1, num_obstacles=0)
    after = coast(game, arranged(game, [[-5, 0], [5, 0]], [[0.6 * speed / 0.75, 0.8 * speed / 0.75]] * 2))
    for body, limit in zip(after, (1.0, 1.3), strict=True):
        np.testing.assert_allclose(body[2:4], min(speed, limit) * np.array([0.6, 0.8]))


@pytest.mark.parametrize("action", range(5))
def test_discrete_actions_are_the_one_hot_ones(action):
    continuous = dataclasses.replace(DEFAULT, continuous_actions=True)
    state, _ = worlds(DEFAULT, 16)
    discrete = np.full((16, 4), action)
    one_hot = np.eye(5, dtype=np.float32)[discrete]
    moved, same = DEFAULT.transition(state, discrete, None), continuous.transition(state, one_hot, None)
    np.testing.assert_array_equal(moved.mover, same.mover)
    rest = arranged(DEFAULT, 10.0 * np.arange(16).reshape(8, 2))
    pushed = DEFAULT.transition(rest, np.full((1, 4), action), None).mover[0, :, 2:4]
    direction = [[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]][action]
    np.testing.assert_allclose(pushed, 0.1 * np.outer([3, 4, 4, 4], direction), atol=1e-15)


@pytest.mark.parametrize(
    ("action", "force"),
    [
        ([1, 0, 0, 0, 0], [0, 0]),  # slot 0 does nothing
        ([0, 1, 1, 1, 1], [0, 0]),  # opposite slots cancel
        ([0, 0.25, 1, 0, 0.5], [2.25, 1.5]),
        ([10, 0, 10, 10, 0], [3, -3]),  # clipped: ten times the slot is not ten times the force
        ([0, -3, 0.5, 0, -1], [1.5, 0]),
    ],
)
def test_continuous_actions(action, force):
    game = SimpleTag(continuous_actions=True)
    given = clip_action(game, np.array([[action] * 4], np.float32))
    forces = game.control(given, np.zeros(1, np.float32))
    np.testing.assert_allclose(forces[0], np.array(force) * np.array([[1], [4 / 3], [4 / 3], [4 / 3]]), rtol=1e-6)


# --- contacts ---


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("obstacle", [False, True])
def test_bodies_at_one_point(obstacle, dtype):
    game = SimpleTag(collidable_obstacles=obstacle)
    state = State(*(field.astype(dtype) for field in arranged(game, np.ones((8, 2)))))
    np.testing.assert_array_equal(coast(game, state)[:, :4], np.tile([1, 1, 0, 0], (4, 1)))


CONTACTS = {  # who, and at which distance, with which force in newton
    "prey and obstacle": (1, 2, 0.2, 5.0),
    "predator and obstacle": (0, 2, 0.275, 0.0693147),
    "predator and prey": (0, 1, 0.125, 0.0693147),
    "predator and prey, deep": (0, 1, 0.0625, 6.25),
    "predators": (0, 3, 0.14, 1.0),
    "prey": (1, 4, 0.09, 1.0),
}


@pytest.mark.parametrize(("one", "other", "apart", "force"), CONTACTS.values(), ids=list(CONTACTS))
def test_contact_forces(one, other, apart, force):
    """Five bodies: predator 0, prey 1, obstacle 2, predator 3, prey 4."""
    game = SimpleTag(num_predators=2, num_prey=2, num_obstacles=1, collidable_obstacles=True)
    row = {0: 0, 3: 1, 1: 2, 4: 3, 2: 4}
    position = np.arange(5)[:, None] * [10.0, 0.0]
    position[row[other]] = position[row[one]] + apart * np.array([0.6, 0.8])
    velocity = coast(game, arranged(game, position))[:, 2:4]
    expected = np.zeros((5, 2))
    expected[row[one]] = -0.1 * force * np.array([0.6, 0.8])
    expected[row[other]] = -expected[row[one]]
    np.testing.assert_allclose(velocity, expected[:4], rtol=0, atol=1e-6)  # an obstacle does not move


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=3)))
def test_contact_only_between_kinds_that_collide(flags):
    game = SimpleTag(num_predators=2, num_prey=2, num_obstacles=1, **dict(zip(SOLID, flags, strict=True)))
    kind = [0, 0, 1, 1, 2]
    for one, other in itertools.combinations(range(5), 2):
        position = np.arange(5)[:, None] * [10.0, 0.0]
        position[other] = position[one] + [0.05, 0.0]
        moved = (coast(game, arranged(game, position))[:, 2:4] != 0).any(axis=1)
        touch = flags[kind[one]] and flags[kind[other]]
        assert moved.tolist() == [touch and i in (one, other) for i in range(4)]


def test_nobody_touches_itself():
    game = SimpleTag(num_predators=4, num_prey=4, num_obstacles=8, collidable_obstacles=True)
    state = arranged(game, list(itertools.product(range(4), range(4))))
    assert (coast(game, state)[:, 2:4] == 0).all()
    assert not game.touching(state).any()
    assert (game.reward(state)[:, :4] == 0).all()


def test_one_mover_alone_feels_obstacles():
    game = SimpleTag(num_prey=1, num_obstacles=1, collidable_predators=False, collidable_obstacles=True)
    np.testing.assert_allclose(coast(game, arranged(game, [[0, 0], [0.2, 0], [0, 0]]))[:, 2], [0, 0.5])


def test_absent_obstacles_do_not_push():
    game = SimpleTag(num_obstacles=(0, 2), collidable_obstacles=True)
    position = np.array([[[0.03, 0], [9, 9], [9, -9], [-9, 9], [0, 0], [0, 0]]])
    state = game.arrange(position, np.zeros_like(position), 0)
    assert (coast(game, state)[:, 2:4] == 0).all()
    assert (coast(game, game.arrange(position, np.zeros_like(position), 1))[0, 2:4] != 0).any()


@pytest.mark.parametrize(
    ("flags", "pairs"),
    [
        ((True, True, False), 5 * 5),
        ((True, True, True), 5 * 33),
        ((True, False, False), 2 * 2),
        ((False, True, True), 3 * 31),
        ((False, False, True), 0),  # obstacles alone: nothing would move
    ],
)
def test_only_colliding_kinds_are_paired(flags, pairs, monkeypatch):
    seen = []

    def counted(position, others, *rest):
        seen.append(position.shape[1] * others.shape[1])
        return add_contacts(position, others, *rest)

    add_contacts = physics.add_contacts
    monkeypatch.setattr(physics, "add_contacts", counted)
    game = SimpleTag(2, 3, 28, **dict(zip(SOLID, flags, strict=True)))
    coast(game, worlds(game, 1)[0])
    assert sum(seen) == pairs


# --- noise is noise ---

NOISES = [0, 4, 28, (0, 28), (28, 60)]


@pytest.mark.parametrize("prey_policy", ["random", "still", "flee", "chase"])
def test_noise_changes_nothing(prey_policy):
    """Positions, velocities and rewards of whole episodes, to the bit, for any number of obstacles."""
    seen = []
    for noise in NOISES:
        envs = gymnasium.make_vec("noisy_envs/SimpleTag-v0", 8, num_obstacles=noise, prey_policy=prey_policy)
        envs.reset(seed=5)
        envs.action_space.seed(0)
        rewards, movers = [], []
        for _ in range(300):  # over the ends of episodes, too
            _, reward, *_ = envs.step(envs.action_space.sample())
            rewards.append(reward)
            movers.append(envs.state.mover)
        seen.append((np.array(rewards), np.array(movers)))
    assert seen[0][0].any()
    for rewards, movers in seen[1:]:
        np.testing.assert_array_equal(rewards, seen[0][0])
        np.testing.assert_array_equal(movers, seen[0][1])


def test_noise_changes_nothing_for_all_learners():
    seen = []
    for noise in NOISES:
        env = simple_tag_v0.parallel_env(num_obstacles=noise, num_predators=2)
        env.reset(seed=1)
        random = np.random.default_rng(0)
        paid = [env.step({agent: int(random.integers(5)) for agent in env.agents})[1] for _ in range(128)]
        seen.append([list(rewards.values()) for rewards in paid])
    assert all(rewards == seen[0] for rewards in seen)


def test_places_of_noise_change_nothing():
    """To the bit as if all were 100 units away, even with obstacles on top of the agents."""
    game = SimpleTag(num_obstacles=28)
    near, key = worlds(game, 64)
    near.landmark[..., :2] = near.mover[:, :1, :2] + 0.1 * near.landmark[..., :2]
    far = State(near.mover, near.landmark + np.array([100, 100, 0, 0, 0], np.float32))
    for t in range(60):
        near, far = (game.transition(state, joint(game, key, t), None) for state in (near, far))
        np.testing.assert_array_equal(near.mover, far.mover)
        np.testing.assert_array_equal(game.reward(near), game.reward(far))


# --- rewards ---


@pytest.mark.parametrize("flags", list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize(
    ("toucher", "own", "shared", "prey"),
    [([0], [10, 0, 0], 10, -10), ([1, 2], [0, 10, 10], 20, -20), ([], [0, 0, 0], 0, 0)],
)
def test_who_is_paid(toucher, own, shared, prey, flags):
    position = [[0.5, 0.5], [0.5, -0.5], [-0.5, 0.5], [0, 0]]
    for i in toucher:
        position[i] = [0.12 * math.cos(i), 0.12 * math.sin(i)]
    for sharing, gains in (("own", own), ("shared", [shared] * 3)):
        options = dict(zip(SOLID, flags, strict=False))
        game = SimpleTag(num_predators=3, num_prey=1, num_obstacles=0, reward_sharing=sharing, **options)
        expected = [*gains, prey] if all(flags) else [0] * 4
        np.testing.assert_array_equal(game.reward(arranged(game, position)), [expected])


def test_a_predator_is_paid_for_each_prey():
    game = SimpleTag(num_obstacles=0)
    state = arranged(game, [[0, 0], [0.1, 0], [0, 0.1249], [0, -0.1251]])
    np.testing.assert_array_equal(game.reward(state), [[20, -10, -10, 0]])
    np.testing.assert_array_equal(game.reward(state, slice(0, 1)), [[20]])
    np.testing.assert_array_equal(game.reward(state, slice(1, 3)), [[-10, -10]])


@pytest.mark.parametrize(
    ("x", "penalty"),
    [(0, 0), (0.9, 0), (0.95, 0.5), (1, 1), (1.5, 2.718282), (2, 7.389056), (2.151293, 10), (2.2, 10), (100, 10)],
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_penalty_of_the_arena(x, penalty, dtype):
    for px, py, times in ((x, 0, 1), (-x, 0, 1), (0, x, 1), (0, -x, 1), (x, -x, 2)):
        found = DEFAULT.penalty(np.array([[[px, py]]], dtype))
        np.testing.assert_allclose(found, [[times * penalty]], rtol=0, atol=5e-6)
    game = SimpleTag(num_prey=1, num_obstacles=0)
    reward = game.reward(arranged(game, [[x, x], [x, -x - 5]]))
    np.testing.assert_allclose(reward, [[0, -penalty - 10]], atol=5e-6)  # predators may go where they like


# --- start ---


@pytest.mark.parametrize(("predators", "prey", "scale"), [(1, 1, 0.5), (1, 3, 1.0), (6, 10, 2.0)])
def test_paper_start_of_agents(predators, prey, scale):
    game = SimpleTag(predators, prey, 0)
    agents = predators + prey
    rest = np.zeros((1, 0)), np.zeros((1, 1)), np.zeros((1, 0))  # obstacles, number of noise, noise
    lowest, highest = (
        game.initial((np.zeros((1, 1)), np.full((1, 1), u), np.zeros((1, 4 * agents)), *rest)) for u in (0.0, 1.0)
    )
    np.testing.assert_allclose(lowest.mover[0, :, :4], np.tile([-0.1, -0.1, -0.5, -0.5], (agents, 1)))
    np.testing.assert_allclose(highest.mover[0, :, :4], np.tile([-scale, -scale, -0.5, -0.5], (agents, 1)))
    state, key = worlds(game, 4096)
    u_scale = uniforms(key, np.zeros(4096, np.int64), game.num_reset_uniforms)[1]
    assert departure(u_scale) < 2.2
    unit = state.mover[..., :2] / (0.1 + (scale - 0.1) * u_scale)[..., None]  # one scale for all of a world
    numbers = np.concatenate([unit, 2 * state.mover[..., 2:4]], axis=-1).reshape(4096, -1)
    for number in numbers.T:
        assert departure(number / 2 + 0.5) < 2.2
    between = np.corrcoef(np.concatenate([numbers, u_scale], axis=1).T) - np.eye(4 * agents + 1)
    assert np.abs(between).max() < 5.5 / math.sqrt(4096)


@pytest.mark.parametrize(
    ("num_obstacles", "u_count", "present", "spread"),
    [(4, 0, 4, 2), (64, 0, 64, 3), (256, 0, 256, 4), ((16, 256), 0, 16, 2), ((16, 256), 0.9999, 256, 4)],
)
def test_paper_start_of_obstacles(num_obstacles, u_count, present, spread):
    game = SimpleTag(num_obstacles=num_obstacles)
    u = [np.zeros((1, count)) for count in game.num_reset_uniforms]
    u[0][:] = u_count
    state = game.initial(tuple(u))
    here = state.landmark[0, :, 4] == OBSTACLE
    assert here.sum() == present and here[:present].all()  # absent ones come last, and do not count
    np.testing.assert_allclose(state.landmark[0, here, :4], np.tile([-spread, -spread, 0, 0], (present, 1)))
    assert (state.landmark[0, ~here] == [0, 0, 0, 0, ABSENT]).all()
    few = worlds(SimpleTag(), 4096)[0].landmark
    for body, axis in itertools.product(range(4), range(2)):
        assert departure(few[:, body, axis] / 4 + 0.5) < 2.2


def test_start_of_mpe():
    state, _ = worlds(SimpleTag(**MPE), 4096)
    assert state.mover.shape == (4096, 4, 5) and state.landmark.shape == (4096, 2, 5)
    assert (state.mover[..., 2:4] == 0).all()
    for rows, reach in ((state.mover, 1.0), (state.landmark, 0.9)):
        for body, axis in itertools.product(range(rows.shape[1]), range(2)):
            assert departure(rows[:, body, axis] / reach / 2 + 0.5) < 2.2


def test_counts_cover_their_range():
    present = (worlds(SimpleTag(num_obstacles=(2, 9)), 8192)[0].landmark[..., 4] != ABSENT).sum(axis=1)
    values, times = np.unique(present, return_counts=True)
    assert values.tolist() == list(range(2, 10)) and np.abs(times - 1024).max() < 5 * 32


@pytest.mark.parametrize("start", ["paper", "mpe"])
def test_a_crowd_starts_without_a_placement_loop(start, monkeypatch):
    drawn = []

    def counted(key, counter, counts):
        drawn.append(sum(counts))
        return uniforms(key, counter, counts)

    monkeypatch.setattr(episode_shell, "uniforms", counted)
    env = gymnasium.make("noisy_envs/SimpleTag-v0", num_obstacles=500, collidable_obstacles=True, start=start)
    tokens, _ = env.reset(seed=0)
    assert tokens.shape == (504, 5) and env.observation_space.contains(tokens)
    assert drawn == [1 + 1 + 4 * 4 + 2 * 500 + 1]  # number, scale, agents, obstacles, number of noise


# --- tokens ---


def test_tokens_of_each_agent():
    game = SimpleTag(num_predators=2, num_prey=2, num_obstacles=(0, 2))
    position = np.array([[[1, 2], [3, 5], [-1, 0], [0, 1], [0.5, 0.5], [9, 9]]])
    velocity = np.array([[[1, 0], [0, -1], [0.5, 0.5], [-1, 1], [0, 0], [0, 0]]])
    tokens = game.observe(game.arrange(position, velocity, 1))[0]
    bodies = np.concatenate([position, velocity], axis=-1)[0]
    roles = np.array([PREDATOR, PREDATOR, PREY, PREY, OBSTACLE])
    for agent in range(4):
        others = [i for i in range(4) if i != agent]
        assert (tokens[agent, 0] == [0, 0, 0, 0, SELF]).all()
        np.testing.assert_allclose(tokens[agent, 1], [*bodies[4] - bodies[agent], OBSTACLE])
        assert (tokens[agent, 2] == [0, 0, 0, 0, ABSENT]).all()
        np.testing.assert_allclose(tokens[agent, 3:, :4], bodies[others] - bodies[agent])
        assert tokens[agent, 3:, 4].tolist() == roles[others].tolist()
        np.testing.assert_array_equal(
            game.observe(game.arrange(position, velocity, 1), slice(agent, agent + 1))[0, 0], tokens[agent]
        )
    assert game.token_spec.mask(tokens).sum(axis=1).tolist() == [5] * 4
    assert game.token_spec.roles == {"self": 0, "obstacle": 1, "predator": 2, "prey": 3}


@pytest.mark.parametrize(("noise", "tokens"), [(0, 4), (4, 8), (12, 16), (28, 32)])
def test_signal_of_the_papers_experiments(noise, tokens):
    _, info = gymnasium.make(f"noisy_envs/SimpleTag-1v3v{noise}-v0").reset(seed=0)
    assert info["signal_mask"].shape == (tokens,) and info["signal_mask"].sum() == 4
    assert info["snr"] == 4 / tokens


@pytest.mark.parametrize(
    ("flags", "signal"),
    [((True, True, False), 4), ((True, True, True), 6), ((False, True, True), 6), ((False, False, True), 4)],
)
def test_obstacles_that_collide_are_signal(flags, signal):
    game = SimpleTag(num_obstacles=(0, 3), **dict(zip(SOLID, flags, strict=True)))
    position = np.zeros((1, 7, 2))
    mask = game.signal_mask(game.observe(game.arrange(position, position, 2)))
    assert mask.sum(axis=-1).tolist() == [[signal] * 4]
    assert not mask[..., 3].any()  # padding


# --- policies ---


@every_kind
@pytest.mark.parametrize("policy", DEFAULT.policies)
def test_policies_act_within_the_action_space(options, policy):
    game = SimpleTag(**options)
    state, _ = worlds(game, 256)
    shape = (256, game.num_agents, 5) if game.continuous_actions else (256, game.num_agents)
    u = np.random.default_rng(0).random(shape, dtype=np.float32)
    action = game.policy(policy, state, u)
    assert action.shape == shape and action.dtype == (np.float32 if game.continuous_actions else np.int64)
    assert action.min() >= 0 and action.max() <= (1 if game.continuous_actions else 4)
    assert game.control(action, state.mover).any() == (policy != "still")
    if policy == "random":
        assert np.unique(action).size > 1000 if game.continuous_actions else (np.bincount(action.ravel()) > 150).all()
    for first, end in itertools.combinations(range(game.num_agents + 1), 2):
        some = slice(first, end)
        np.testing.assert_array_equal(game.policy(policy, state, u[:, some], some), action[:, some])


@pytest.mark.parametrize("continuous", [False, True])
def test_chase_and_flee(continuous):
    """A predator at rest left of the prey: who chases goes right, or left, towards the other; who flees goes away."""
    game = SimpleTag(num_prey=1, num_obstacles=0, continuous_actions=continuous)
    state = arranged(game, [[-1, 0], [1, 0]])
    u = np.zeros((1, 2, 5) if continuous else (1, 2))

    def forces(policy):
        return game.control(game.policy(policy, state, u), state.mover)[0, :, 0].tolist()

    assert forces("chase") == [3, -4] and forces("flee") == [-3, 4] and forces("oracle") == [3, 4]


def test_the_nearest_is_the_nearest_by_its_next_place():
    game = SimpleTag(num_prey=2, num_obstacles=0)
    u = np.zeros((1, 3))
    still = arranged(game, [[0, 0], [0.5, 0], [0, 0.55]])
    passing = arranged(game, [[0, 0], [0.5, 0], [0, 0.55]], [[0, 0], [1.2, 0], [0, -1.2]])
    assert game.policy("chase", still, u)[0, 0] == RIGHT and game.policy("chase", passing, u)[0, 0] == UP
    assert game.policy("flee", still, u)[0, 0] == LEFT and game.policy("flee", passing, u)[0, 0] == DOWN


def test_chase_brakes():
    """The prey is where the predator will be after this step: whatever speed is left after it leads away."""
    game = SimpleTag(num_prey=1, num_obstacles=0)
    state = arranged(game, [[0, 0], [0.1, 0]], [[1, 0], [0, 0]])
    assert game.policy("chase", state, np.zeros((1, 1)), slice(0, 1)).tolist() == [[LEFT]]


@pytest.mark.parametrize(("policy", "low", "high"), [("random", 19, 26), ("oracle", 265, 285)])
def test_returns_of_the_references(policy, low, high):
    game = SimpleTag(num_obstacles=0)
    state, key = worlds(game, 500)
    total = np.zeros(500)
    for t in range(game.max_steps):
        u = uniforms(key, np.full(500, t + 1), game.num_step_uniforms)[0]
        action = game.policy("random", state, u)
        if policy == "oracle":
            action[:, :1] = game.policy(policy, state, u[:, :1], slice(0, 1))
        state = game.transition(state, action, None)
        total += game.reward(state)[:, 0]
    assert low < total.mean() < high


# --- the observation space, and states that users hand over ---


@pytest.mark.parametrize(
    "options",
    [{}, {"max_steps": 1}, {"num_obstacles": (0, 300)}, MPE, {"continuous_actions": True, "num_predators": 9}],
)
def test_bounds_hold_the_worst_that_can_be_injected(options):
    """All at opposite corners, at full speed and driven on outwards to the end of the episode."""
    game = SimpleTag(**options)
    box, limit = observation_box(game), game.start_reach + game.travel
    corner = np.full((game.num_entities, 2), limit)
    corner[: game.num_predators] *= -1
    state = game.validate_state({"position": corner, "velocity": np.sign(corner) * 1.3 / math.sqrt(2)}, ())
    if game.continuous_actions:
        outwards = np.zeros((1, game.num_agents, 5), np.float32)
        outwards[:, : game.num_predators, 1::2] = outwards[:, game.num_predators :, 2::2] = 1
    else:
        outwards = np.full((1, game.num_agents), RIGHT)
        outwards[:, : game.num_predators] = LEFT
    for _ in range(game.max_steps):
        state = game.transition(state, outwards, None)
        assert all(box.contains(tokens) for tokens in game.observe(state)[0])
        assert box.contains(game.world_tokens(state)[0])


@every_kind
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_state_is_admitted_as_it_was(options, backend):
    game = SimpleTag(**options)
    state, key = worlds(game, 5)
    for t in range(9):
        state = game.transition(state, joint(game, key, t), chance(game, key, t))
    given = State(*(to(x, backend) for x in state))
    for again in (game.validate_state(given, (5,)), game.validate_state(State(*(x[0] for x in given)), ())):
        for ours, theirs in zip(state, again, strict=True):
            assert theirs.dtype == np.float32
            np.testing.assert_array_equal(ours[: len(theirs)], theirs)


GOOD = np.zeros((8, 2))


@pytest.mark.parametrize(
    ("options", "given", "error", "message"),
    [
        ({}, 3, TypeError, "state=3.*position, velocity, num_obstacles"),
        ({}, {}, ValueError, r"missing keys \['position'\]"),
        ({}, {"position": GOOD, "num_prey": 3}, ValueError, r"unknown keys \['num_prey'\].*num_obstacles"),
        ({}, {"position": GOOD[1:]}, ValueError, r"position: expected shape \(8, 2\), got \(7, 2\)"),
        ({}, {"position": GOOD + np.inf}, ValueError, "position: expected numbers from .* got inf"),
        ({}, {"position": GOOD + 18.7}, ValueError, "position: expected numbers from -18.69 to 18.69, got 18.7"),
        (MPE, {"position": GOOD[:6] + 4.31}, ValueError, "position: expected numbers from -4.3 to 4.3, got 4.31"),
        (
            {},
            {"position": GOOD, "velocity": GOOD + 1.31},
            ValueError,
            "velocity: expected numbers from -1.3 to 1.3, got 1.31",
        ),
        ({"num_obstacles": (2, 4)}, {"position": GOOD, "num_obstacles": 1}, ValueError, "num_obstacles=1: expected"),
    ],
)
def test_what_is_not_admitted(options, given, error, message):
    with pytest.raises(error, match=message):
        SimpleTag(**options).validate_state(given, ())


def test_the_lowest_integer_is_not_within_the_limit():
    with pytest.raises(ValueError, match=r"position: expected numbers from .* got -9223372036854775808"):
        DEFAULT.validate_state({"position": np.full((8, 2), -(2**63))}, ())


def test_a_network_may_be_a_policy():
    torch = pytest.importorskip("torch")
    weight = torch.ones(5, requires_grad=True)
    options = {"continuous_actions": True, "prey_policy": lambda tokens, u: u * weight}
    envs = gymnasium.make_vec("noisy_envs/SimpleTag-v0", 2, backend="torch", **options)
    envs.reset(seed=0)
    assert not envs.step(torch.zeros(2, 5))[0].requires_grad


@pytest.mark.parametrize("row", [0, 3, 4])
def test_roles_out_of_order_are_not_admitted(row):
    game = SimpleTag(num_obstacles=(0, 4))
    state = game.arrange(np.zeros((1, 8, 2)), np.zeros((1, 8, 2)))
    rows = np.concatenate(state, axis=1)
    rows[0, row, 4] = ABSENT
    with pytest.raises(ValueError, match=r"role=.* absent ones .* last in each"):
        game.validate_state(State(rows[:, :4], rows[:, 4:]), (1,))


# --- options ---

BAD: dict[str, list[tuple[Any, type[Exception]]]] = {
    "num_predators": [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError), ((1, 2), TypeError)],
    "num_obstacles": [(-1, ValueError), ((4, 0), ValueError), ("4", TypeError), ((0, 4.0), TypeError)],
    "continuous_actions": [(1, TypeError), ("yes", TypeError), (None, TypeError)],
    "prey_policy": [("greedy", ValueError), (None, ValueError), (3, ValueError)],
    "reward_sharing": [("both", ValueError), (None, ValueError)],
    "start": [("MPE", ValueError), (None, ValueError)],
    "noise_role": [("prey", ValueError), (None, ValueError)],
    "noise_motion": [("chase", ValueError), (0, ValueError)],
}
BAD["num_noise"] = BAD["num_obstacles"]
BAD |= {name: BAD["num_predators"] for name in ("num_prey", "max_steps")}
BAD |= {name: BAD["continuous_actions"] for name in SOLID} | {"predator_policy": BAD["prey_policy"]}


@pytest.mark.parametrize(
    ("option", "value", "error"), [(option, value, error) for option, bad in BAD.items() for value, error in bad]
)
def test_bad_options_are_named(option, value, error):
    assert set(BAD) == {field.name for field in dataclasses.fields(SimpleTag)}
    with pytest.raises(error) as raised:
        build(SimpleTag, {option: value})
    assert f"{option}={value!r}: expected" in str(raised.value)


def test_parameters_are_frozen_hashable_and_copied():
    game = SimpleTag(num_obstacles=(0, 28))
    game.observe(worlds(game, 1)[0])  # fills what is cached
    with pytest.raises(dataclasses.FrozenInstanceError):
        game.num_prey = 2
    for twin in (copy.deepcopy(game), pickle.loads(pickle.dumps(game)), build(SimpleTag, {"num_obstacles": [0, 28]})):
        assert twin == game and hash(twin) == hash(game) and twin.num_entities == 32
    assert game != DEFAULT


# --- torch ---


@every_kind
def test_torch_agrees_step_by_step(options):
    """Each step from one state, NumPy's; all in float32."""
    game = SimpleTag(**options)
    state, key = worlds(game, 64)
    start = game.initial(uniforms(to(key, "torch"), to(np.zeros(64, np.int64), "torch"), game.num_reset_uniforms))
    for array, tensor in zip(state, start, strict=True):
        np.testing.assert_allclose(array, tensor.numpy(), rtol=0, atol=1e-6)
    for t in range(40):
        u = uniforms(key, np.full(64, t + 1), game.num_step_uniforms)
        randomness = game.sample_randomness(u)
        name = game.policies[t % len(game.policies)]
        action = game.policy(name, state, randomness.policy)
        same, same_randomness = (
            State(*(to(x, "torch") for x in state)),
            game.sample_randomness(tuple(to(x, "torch") for x in u)),
        )
        np.testing.assert_allclose(game.policy(name, same, same_randomness.policy).numpy(), action, rtol=0, atol=2e-4)
        after, tensors = (
            game.transition(state, action, randomness),
            game.transition(same, to(action, "torch"), same_randomness),
        )
        pairs = [*zip(after, tensors, strict=True)]
        pairs += [(show(after), show(tensors)) for show in (game.observe, game.world_tokens)]
        for array, tensor in pairs:
            assert array.dtype == tensor.numpy().dtype
            np.testing.assert_allclose(array, tensor.numpy(), rtol=0, atol=1e-5)
        both = State(*(to(x, "torch") for x in after))  # of one state: a touch is all or nothing
        np.testing.assert_allclose(game.reward(after), game.reward(both).numpy(), rtol=0, atol=1e-4)
        state = after


@by_default(
    ("kind", "team"),
    [
        *(("ghosts", "all"), ("mpe", "predators"), ("ranges", "predators")),
        *(("continuous", "prey"), ("solid ranges", "prey"), ("half ghosts", "prey")),
    ],
    product(EVERY_KIND, ["all", "predators", "prey"]),
)
def test_a_step_compiles_whole(kind, team):
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    game = SimpleTag(**EVERY_KIND[kind])
    learners = game.teams[team]
    state, key = worlds(game, 4)
    rules = EnvParams(game, learners, assign_policies(game, learners), game.max_steps, None)
    inputs = rules, State(*map(torch.from_numpy, state)), torch.from_numpy(key)
    count = learners.stop - learners.start
    action = torch.ones((4, count, 5)) if game.continuous_actions else torch.ones((4, count), dtype=torch.int64)
    expected = play(*inputs, torch.zeros(4, dtype=torch.int64), action)
    step = torch.compile(play, fullgraph=True, backend="eager")
    compiled = step(*inputs, torch.zeros(4, dtype=torch.int64), action)
    for ours, theirs in zip((*expected[0], *expected[1:]), (*compiled[0], *compiled[1:]), strict=True):
        np.testing.assert_array_equal(as_numpy(ours), as_numpy(theirs))
