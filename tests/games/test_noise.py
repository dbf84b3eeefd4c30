"""Noise in the particle games: by which cue it can be told from signal, and that signal does not depend on it."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from noisy_envs.arrays import as_numpy
from noisy_envs.games import physics
from noisy_envs.games.particles import NOISE_MOTIONS, ORBIT_ANGLE, State
from noisy_envs.games.simple_centroid import SimpleCentroid
from noisy_envs.games.simple_tag import SimpleTag
from noisy_envs.interfaces.vector_env import TokenVectorEnv
from noisy_envs.registration import GAMES
from noisy_envs.tokens import NOISE_ROLES

KINDS = list(product(NOISE_ROLES, NOISE_MOTIONS))
each_kind = pytest.mark.parametrize(("role", "motion"), KINDS, ids=["-".join(kind) for kind in KINDS])
each_motion = pytest.mark.parametrize("motion", NOISE_MOTIONS)
each_backend = pytest.mark.parametrize("backend", ["numpy", "torch"])
COUNT = 8  # signal tokens besides the agent's own, and as many noise tokens, so that guesses are right half of the time
OPTIONS: dict[str, dict[str, Any]] = {
    "simple_centroid": {"num_signal": COUNT, "num_noise": COUNT, "noise_offset": 0.0},
    "simple_tag": {"num_prey": COUNT, "num_noise": COUNT, "num_obstacles": 0, "collidable_prey": False},
}
LENGTH, ENVS = 30, 200
CHANCE, SURE = 0.56, 0.85  # accuracies: at most, and at least


def watch(name: str, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Play at random; return the tokens but the own ones (T, B, n, 5), shuffled, and which of them are signal."""
    envs = TokenVectorEnv(name, ENVS, **{**OPTIONS[name], **options})
    tokens, info = envs.reset(seed=5)
    seen, masks = [tokens.copy()], [info["signal_mask"].copy()]
    rng = np.random.default_rng(0)
    for _ in range(LENGTH):
        u = rng.random((ENVS, 5), np.float32)
        action = u if envs.game.continuous_actions else np.floor(5 * u[:, 0]).astype(np.int64)
        tokens, *_, info = envs.step(action)
        seen.append(tokens.copy())
        masks.append(info["signal_mask"].copy())
    order = 1 + np.argsort(rng.random((ENVS, 2 * COUNT)), axis=1)
    signal = np.take_along_axis(masks[0], order, axis=1)
    for mask in masks:
        np.testing.assert_array_equal(np.take_along_axis(mask, order, axis=1), signal)
    assert (signal.sum(axis=1) == COUNT).all()
    return np.stack([np.take_along_axis(x, order[..., None], axis=1) for x in seen]), signal


def views(seen: np.ndarray) -> dict[str, np.ndarray]:
    """Return features (B, n, F) of each token that may tell noise: of a token alone, one step, two, and an episode."""
    place, velocity = seen[..., :2], seen[..., 2:4]
    apart = np.linalg.norm(velocity[:, :, :, None] - velocity[:, :, None], axis=-1) + 9 * np.eye(2 * COUNT)
    turn = np.linalg.norm(np.diff(velocity, axis=0), axis=-1)  # (T, B, n)
    step = np.linalg.norm(np.diff(place, axis=0), axis=-1)
    speed, shared = np.linalg.norm(velocity, axis=-1), apart.min(axis=-1)  # 0 if another token moves alike
    bits = np.ascontiguousarray(seen[..., :4]).view(np.int32)
    trailing = np.log2((bits & -bits).astype(np.float64) + 1)  # what float32 reveals of how a number was made
    return {
        "role": seen[LENGTH // 2, ..., 4:],
        "token": seen[LENGTH // 2],
        "start": seen[0],
        "bits": np.concatenate([trailing[0], trailing[LENGTH // 2]], axis=-1),
        "step": np.concatenate([seen[LENGTH // 2], np.log(shared[LENGTH // 2] + 1e-6)[..., None]], axis=-1),
        "two steps": np.log(np.stack([turn[LENGTH // 2], step[LENGTH // 2]], axis=-1) + 1e-6),
        "episode": np.log(np.stack([x.mean(axis=0) for x in (turn, step, speed, shared)], axis=-1) + 1e-6),
    }


def accuracy(features: np.ndarray, signal: np.ndarray) -> float:
    """Return how often the 25 nearest tokens of half of the environments tell the class of tokens of the others."""
    features = (features - features.mean(axis=(0, 1))) / (features.std(axis=(0, 1)) + 1e-9)
    half = ENVS // 2
    known, asked = features[:half].reshape(-1, features.shape[-1]), features[half:].reshape(-1, features.shape[-1])
    rng = np.random.default_rng(1)  # equal distances in random order
    distance = (known**2).sum(-1) - 2 * asked @ known.T + 1e-6 * rng.random((len(asked), len(known)))
    nearest = np.argpartition(distance, 25, axis=1)[:, :25]
    votes = signal[:half].ravel()[nearest].mean(axis=1) > 0.5
    return float((votes == signal[half:].ravel()).mean())


# views in which the kind shows, with noise of the role of signal; in all others it must not
CUES = {
    ("simple_centroid", "still"): {"step", "episode"},
    ("simple_centroid", "wander"): set(),
    ("simple_centroid", "follow"): {"step", "two steps", "episode"},
    ("simple_centroid", "orbit"): {"token", "step", "two steps", "episode"},
    ("simple_tag", "wander"): set(),
    ("simple_tag", "still"): {"step", "episode"},
    ("simple_tag", "follow"): {"step", "two steps", "episode"},
    ("simple_tag", "orbit"): {"episode"},
}


@pytest.mark.parametrize(("name", "motion"), CUES, ids=["-".join(kind) for kind in CUES])
def test_cues(name, motion):
    seen, signal = watch(name, noise_role="signal", noise_motion=motion)
    found = {view: accuracy(x, signal) for view, x in views(seen).items()}
    for view, value in found.items():
        if view in CUES[name, motion]:
            assert value > SURE, found
        elif not CUES[name, motion] or view == "role":
            assert value < CHANCE, found


@pytest.mark.parametrize(("name", "motion"), list(product(OPTIONS, NOISE_MOTIONS)))
def test_a_role_of_its_own_tells_noise(name, motion):
    seen, signal = watch(name, noise_motion=motion)
    assert accuracy(views(seen)["role"], signal) == 1.0


# --- rules ---


def run(name: str, backend: str, steps: int = 12, **options: Any) -> list[State]:
    """Return the states of four environments that are played at random."""
    envs = TokenVectorEnv(name, 4, backend=backend, **options)
    envs.reset(seed=3)
    rng, states = np.random.default_rng(0), [State(*map(as_numpy, envs.state))]
    for _ in range(steps):
        u = rng.random((4, 5), np.float32)
        action = u if envs.game.continuous_actions else np.floor(5 * u[:, 0]).astype(np.int64)
        envs.step(action if backend == "numpy" else torch.from_numpy(action))
        states.append(State(*map(as_numpy, envs.state)))
    return states


@each_backend
@each_kind
@pytest.mark.parametrize("name", OPTIONS)
def test_noise_does_not_change_signal(name, role, motion, backend):
    fixed = {"spread": 2.0} if name == "simple_centroid" else {}
    plain = run(name, backend, num_noise=0, **fixed)
    noisy = run(name, backend, num_noise=(2, 5), noise_role=role, noise_motion=motion, **fixed)
    more = run(name, backend, num_noise=(2, 9), noise_role=role, noise_motion=motion, **fixed)
    game = GAMES[name](num_noise=5, noise_motion=motion)
    signal = game.num_movers - 5 * game.noise_moves
    for one, other, third in zip(plain, noisy, more, strict=True):
        np.testing.assert_array_equal(one.mover, other.mover[:, :signal])
        np.testing.assert_array_equal(one.mover, third.mover[:, :signal])
        first = slice(signal, signal + 2) if game.noise_moves else slice(-5, -3)
        again = first if game.noise_moves else slice(-9, -7)
        rows = ("mover", "landmark")[not game.noise_moves]
        np.testing.assert_array_equal(getattr(other, rows)[:, first], getattr(third, rows)[:, again])


@each_backend
def test_orbits_close(backend):
    turns = round(2 * np.pi / ORBIT_ANGLE)
    states = run("simple_centroid", backend, steps=turns + 1, noise_motion="orbit", num_noise=5)
    noise = np.stack([state.mover[:, 4:] for state in states[1:]])  # speeds are limited in the first step
    speed = physics.length(noise[..., 2:4])
    np.testing.assert_allclose(speed, np.broadcast_to(speed[:1], speed.shape), rtol=1e-4)
    radius = speed[0] * 0.1 / ORBIT_ANGLE
    away = physics.length(noise[..., :2] - noise[:1, ..., :2])[..., 0]
    assert (np.abs(away.max(axis=0) / (2 * radius[..., 0]) - 1) < 0.02).all()
    assert (away[-1] < 0.2 * radius[..., 0]).all()


@each_backend
@pytest.mark.parametrize("name", OPTIONS)
def test_noise_follows_the_first_agent(name, backend):
    states = run(
        name, backend, noise_motion="follow", num_noise=3, **({"num_agents": 2} if name == "simple_centroid" else {})
    )
    before, after = states[4], states[5]
    agent = after.mover[:, 0, 2:4] - 0.75 * before.mover[:, 0, 2:4]
    noise = after.mover[:, -3:, 2:4] - 0.75 * before.mover[:, -3:, 2:4]
    slow = physics.length(after.mover[:, -3:, 2:4])[..., 0] < (1.9 if name == "simple_centroid" else 1.2)
    assert slow.any()
    np.testing.assert_allclose(noise[slow], np.broadcast_to(agent[:, None], noise.shape)[slow], atol=1e-5)


@pytest.mark.parametrize("motion", NOISE_MOTIONS)
def test_absent_noise_stays_away(motion):
    for name in OPTIONS:
        for state in run(name, "numpy", num_noise=(0, 6), noise_motion=motion):
            rows = np.concatenate(state, axis=1)
            absent = rows[..., 4] == -1
            assert absent.any() and (rows[absent, :4] == 0).all()


def test_decoys_are_not_caught():
    game = SimpleTag(num_obstacles=0, num_noise=4, noise_role="signal")
    position = np.zeros((1, 8, 2))
    position[0, 1:4] = 9.0  # all prey are far away, all decoys on the predator
    state = game.arrange(position, position)
    assert not game.touching(state).any() and game.reward(state, slice(0, 1)) == 0
    u = np.zeros((1, 1))
    right = game.policy("oracle", state, u, slice(0, 1)), game.policy("chase_any", state, u, slice(0, 1))
    assert right[0] in (2, 4) and right[1] == 0


def test_mean_aims_at_all_alike():
    game = SimpleCentroid(num_signal=1, num_noise=3)
    position = np.array([[[0, 0], [1, 0], [-1, 0], [-1, 0], [-1, 0]]], np.float64)
    state, u = game.arrange(position, 0 * position), np.zeros((1, 1, 5))
    assert game.policy("oracle", state, u)[0, 0, 2] > 0 and game.policy("mean", state, u)[0, 0, 1] > 0


def test_only_what_collides_is_pushed():
    game = SimpleCentroid(1, 1, 2, noise_motion="wander", collidable_agents=True, collidable_noise=True)
    position = np.array([[[0, 0], [0.05, 0], [0.05, 0.05], [9, 9]]])  # signal, between the two types, does not collide
    after = game.push(game.arrange(position, 0 * position), 0 * position).mover[0, :, 2:4]
    pushed = (after != 0).any(axis=1)
    assert pushed.tolist() == [True, False, True, False]
    np.testing.assert_allclose(after[0], -after[2])


def test_absent_decoys_are_not_chased():
    game = SimpleTag(num_obstacles=0, num_noise=(0, 2), noise_role="signal")
    position = np.zeros((1, 6, 2))
    position[0, 1:4] = [5.0, 0.0]
    state = game.arrange(position, 0 * position, 0)  # absent decoys have the place of the predator
    assert game.policy("chase_any", state, np.zeros((1, 1)), slice(0, 1)) == 2


@pytest.mark.parametrize(("name", "role"), list(product(OPTIONS, NOISE_ROLES)))
def test_the_spec_says_what_roles_tell(name, role):
    envs = TokenVectorEnv(name, 4, **OPTIONS[name], noise_role=role)
    tokens, info = envs.reset(seed=0)
    spec, numbers = envs.game.token_spec, tokens[..., -1]
    for number in np.unique(numbers):
        kind = spec.kinds[next(name for name, value in spec.roles.items() if value == number)]
        marked = set(info["signal_mask"][numbers == number].tolist())
        assert marked == {"own": {True}, "signal": {True}, "noise": {False}, "signal or noise": {True, False}}[kind]
    unseen = set(spec.roles.values()) - set(np.unique(numbers).tolist())
    assert len(unseen) == {"simple_centroid": 1, "simple_tag": 2}[name]  # other agents; obstacles, other predators
