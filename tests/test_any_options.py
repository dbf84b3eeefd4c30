"""Any options together: a clear error when the environment is made, or steps inside its spaces, seeded, copyable."""

import copy
import dataclasses
import math
import re

import gymnasium
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from noisy_envs.arrays import as_numpy
from noisy_envs.registry import CORES
from noisy_envs.wrappers import noisy_tokens

IDS = {"simple_centroid": "SimpleCentroid", "simple_tag": "SimpleTag", "box_world": "BoxWorld"}
STEPS = 200
WORDS = {  # what the options that are words may be, beside nonsense
    "other_policy": ["random", "still", "oracle"], "prey_policy": ["random", "still", "flee"],
    "predator_policy": ["random", "still", "chase", "oracle"], "reward_shape": ["sqrt", "linear", "square"],
    "reward_sharing": ["own", "team"], "start": ["paper", "mpe"], "observation": ["entities", "pixels", "rgb"],
}  # fmt: skip
SIZES = st.integers(0, 9) | st.tuples(st.integers(0, 5), st.integers(0, 9))
ODD = st.sampled_from([None, -1, 1.5, "nonsense", "", True, (1,), (3, 1), (1, 2, 3), [], math.nan, math.inf, 10**20])
REALS = st.floats(-1, 5) | st.sampled_from([0.0, 1e-9, 1e9, 1e38])
NOISE = {
    "num_noise": SIZES, "distribution": st.sampled_from(["gaussian", "uniform", "marginal"]), "scale": REALS,
    "frozen": st.booleans(), "shuffle": st.booleans(),
}  # fmt: skip


def values(field):
    """Return what to try for a field of a core."""
    kinds = {"bool": st.booleans(), "int": st.integers(0, 12), "Count": SIZES, "float": REALS, "float | None": REALS}
    if field.name == "num_levels":
        return st.integers(0, 300)
    return st.sampled_from(WORDS[field.name]) if field.name in WORDS else kinds[field.type]


def some(options):
    """Return dictionaries of a few of the options, one in four with one value that is odd."""
    good = st.fixed_dictionaries({}, optional=options)
    odd = st.builds(lambda given, name, value: given | {name: value}, good, st.sampled_from(sorted(options)), ODD)
    return st.one_of(good, good, good, odd)


GAME_OPTIONS = {name: some({x.name: values(x) for x in dataclasses.fields(core)}) for name, core in CORES.items()}
VECTOR_OPTIONS = some({
    "num_envs": st.integers(1, 4), "max_episode_steps": st.integers(1, 40),
    "backend": st.sampled_from(["numpy", "torch", "jax"]), "learners": st.sampled_from(["first", "all", "predators"]),
    "autoreset_mode": st.sampled_from(["NextStep", "SameStep"]), "copy": st.booleans(),
    "check_actions": st.booleans() | st.none(),
})  # fmt: skip
COUNTS = [
    pytest.param(60, id="few"),
    pytest.param(2000, id="many", marks=pytest.mark.slow),
]


def made(make, *args, **options):
    """Make an environment, or return None if a clear error refuses it: one line that names an option."""
    try:
        return make(*args, **options)
    except (ValueError, TypeError) as error:
        text = str(error)
        assert "\n" not in text and re.search(r"must|allowed|only|at most|at least|too|cannot", text), text
        assert any(name in text for name in [*options, "level", "world", "learners"]), (text, options)
        return None


def check_inside(space, observation):
    assert space.contains(observation), observation
    assert np.isfinite(observation).all()


def play(env, actions):
    """Play actions through ends of episodes, and return what was seen and gained."""
    seen = [env.reset(seed=3)[0]]
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        check_inside(env.observation_space, observation)
        assert math.isfinite(reward) and 0 < info["snr"] <= 1
        seen += [observation, reward]
        if terminated or truncated:
            seen.append(env.reset()[0])
    return seen


def assert_same(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def check_single(env):
    """Play, the same again from the seed, and from a copy amid an episode."""
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(STEPS)]
    seen = play(env, actions)
    assert_same(play(env, actions), seen)
    env.reset(seed=3)
    twin = copy.deepcopy(env)
    for action in actions:
        found, other = env.step(action), twin.step(action)
        assert_same(found[:4], other[:4])
        if found[2] or found[3]:
            break


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("game", CORES)
def test_single(game, count):
    @given(GAME_OPTIONS[game])
    @settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=HealthCheck)
    def check(options):
        env = made(gymnasium.make, f"noisy_envs/{IDS[game]}-v0", disable_env_checker=True, **options)
        if env is not None:
            check_single(env)
            env.close()

    check()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("game", CORES)
def test_vector(game, count):
    torch = pytest.importorskip("torch")

    @given(GAME_OPTIONS[game], VECTOR_OPTIONS)
    @settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=HealthCheck)
    def check(options, vector):
        vector = {"num_envs": 2} | vector
        envs = made(gymnasium.make_vec, f"noisy_envs/{IDS[game]}-v0", **vector, **options)
        if envs is None:
            return
        to_array = torch.from_numpy if vector.get("backend") == "torch" else np.asarray
        envs.action_space.seed(0)
        actions = [envs.action_space.sample() for _ in range(STEPS // 4)]
        seen = []
        for _ in range(2):
            run = [as_numpy(envs.reset(seed=3)[0]).copy()]
            for action in actions:
                tokens, reward, *_ = envs.step(to_array(action))
                check_inside(envs.observation_space, as_numpy(tokens))
                assert np.isfinite(as_numpy(reward)).all()
                run += [as_numpy(tokens).copy(), as_numpy(reward).copy()]
            seen.append(run)
        assert_same(*seen)
        envs.close()

    check()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "noisy_envs/SimpleTag-v0"])
def test_noise(env_id, count):
    @given(some(NOISE))
    @settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=HealthCheck)
    def check(options):
        options = {"num_noise": 3} | options
        env = made(noisy_tokens, gymnasium.make(env_id, disable_env_checker=True), **options)
        if env is not None:
            check_single(env)

    check()
