"""Any options together: a clear error when the environment is made, or steps inside its spaces, seeded, copyable."""

import copy
import dataclasses
import inspect
import math
import pickle
import re
from itertools import product

import gymnasium
import numpy as np
import pytest
from cases import each_pettingzoo
from helpers import module
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from noisy_envs import wrappers
from noisy_envs.arrays import as_numpy
from noisy_envs.interfaces.gymnasium_env import TokenEnv
from noisy_envs.interfaces.pettingzoo_env import ParallelTokenEnv
from noisy_envs.interfaces.vector_env import TokenVectorEnv
from noisy_envs.randomness import STREAM
from noisy_envs.registration import GAMES
from noisy_envs.validation import MAX_NUMBER, MIN_NUMBER
from noisy_envs.wrappers import faults, noisy_tokens
from noisy_envs.wrappers.noise import DISTRIBUTIONS


def idle(tokens, u):
    """Return the first action of either kind, for uniforms (B, 5) or (B,): a user's policy."""
    return 0 * u if u.ndim > 1 else 0 * (u < 0)


IDS = {"simple_centroid": "SimpleCentroid", "simple_tag": "SimpleTag", "box_world": "BoxWorld"}
STEPS = 140  # more than an episode
WORDS = {  # what the options that are words may be, beside nonsense
    "other_policy": ["random", "still", "oracle", "mean", idle], "prey_policy": ["random", "still", "flee", idle],
    "predator_policy": ["random", "still", "chase", "chase_any", idle], "reward_shape": ["sqrt", "linear", "square"],
    "reward_sharing": ["own", "shared", "team"], "start": ["paper", "mpe"],
    "noise_role": ["own", "signal", "other"], "noise_motion": ["still", "wander", "follow", "orbit", "fly"],
    "observation": ["entities", "pixels", "rgb"],
}  # fmt: skip
SIZES = st.integers(0, 9) | st.tuples(st.integers(0, 5), st.integers(0, 9))
ODD = st.sampled_from([None, -1, 1.5, "nonsense", "", True, (1,), (3, 1), (1, 2, 3), [], math.nan, math.inf, 10**20])
REALS = st.floats(-1, 5) | st.sampled_from([0.0, 1e-300, 1e-18, 1e-9, 1e9, 1e18, 1e30, 1e38])
NOISE = {
    "num_noise": SIZES, "distribution": st.sampled_from(DISTRIBUTIONS), "scale": REALS,
    "frozen": st.booleans(), "shuffle": st.booleans(), "squash": st.booleans(),
    "noise_role": st.sampled_from(["own", "signal"]), "delay": st.integers(0, 9),
    "correlation": st.sampled_from(["none", "reward", "action"]), "correlated": st.booleans(),
    "schedule": st.sampled_from(["constant", "growing", "reversed", "fluctuating"]),
    "schedule_episodes": st.integers(1, 5), "patch_size": st.integers(1, 9),
}  # fmt: skip
FAULTS = {
    "DisturbTokens": {
        "kind": st.sampled_from(faults.KINDS), "probability": st.floats(0, 1), "scale": REALS,
        "delay": st.integers(0, 9),
    },
    "DropTokens": {"probability": st.floats(0, 1), "frozen": st.booleans()},
    "DuplicateTokens": {"num_copies": st.integers(0, 9), "frozen": st.booleans(), "shuffle": st.booleans()},
}  # fmt: skip
REQUIRED = {"DisturbTokens": {}, "DropTokens": {"probability": 0.5}, "DuplicateTokens": {"num_copies": 2}}


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


OPTIONS = {name: {field.name: values(field) for field in dataclasses.fields(game)} for name, game in GAMES.items()}
PARALLEL = {
    "render_mode": st.sampled_from([None, "rgb_array"]),
    "learners": st.sampled_from(["first", "all", "predators", "prey"]),
}
VECTOR = PARALLEL | {
    "num_envs": st.integers(1, 4), "max_episode_steps": st.integers(1, 40), "render_envs": st.integers(1, 3),
    "backend": st.sampled_from(["numpy", "torch", "jax"]), "device": st.sampled_from([None, "cpu", "nowhere"]),
    "autoreset_mode": st.sampled_from(["NextStep", "SameStep", "Disabled"]), "copy": st.booleans(),
    "compile": st.just(False), "check_actions": st.booleans() | st.none(),  # compiling takes seconds each
}  # fmt: skip
COUNTS = [
    pytest.param(20, id="few"),
    pytest.param(2000, id="many", marks=pytest.mark.slow),
]


def made(make, *args, **options):
    """Make an environment, or return None if a clear error refuses it: one line that names an option."""
    try:
        return make(*args, **options)
    except (ValueError, TypeError) as error:
        text = str(error)
        assert "\n" not in text and re.search(r"expected|must|allowed|only|at most|at least|too|cannot", text), text
        assert any(name in text for name in [*options, "level", "world", "learners"]), (text, options)
        return None


def check_inside(space, observation):
    assert space.contains(observation), observation
    assert np.isfinite(observation).all()


def play(env, actions):
    """Play actions through ends of episodes, and return what was seen and gained."""
    seen = []
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        check_inside(env.observation_space, observation)
        assert math.isfinite(reward) and 0 < info["snr"] <= 1
        seen += [observation, reward]
        if terminated or truncated:
            seen.append(env.reset()[0])
    return seen


def play_vector(envs, actions):
    """Do the same with vector environments, and reset worlds that ended if they do not do so themselves."""
    seen = []
    for action in actions:
        tokens, reward, terminated, truncated, info = envs.step(action)
        check_inside(envs.observation_space, as_numpy(tokens))
        snr = as_numpy(info["snr"])
        assert np.isfinite(as_numpy(reward)).all() and ((snr > 0) & (snr <= 1)).all()
        seen += [as_numpy(tokens).copy(), as_numpy(reward).copy()]
        ended = as_numpy(terminated) | as_numpy(truncated)
        if ended.any() and envs.metadata["autoreset_mode"].value == "Disabled":
            seen.append(as_numpy(envs.reset(options={"reset_mask": ended})[0]).copy())
    return seen


def play_parallel(env, actions):
    """Do the same with agents that are driven together."""
    seen = []
    for action in actions:
        observations, rewards, _, _, infos = env.step({agent: action[agent] for agent in env.agents})
        for agent, observation in observations.items():
            check_inside(env.observation_space(agent), observation)
            assert math.isfinite(rewards[agent]) and 0 < infos[agent]["snr"] <= 1
        seen += [*observations.values(), *rewards.values()]
        if not env.agents:
            seen += env.reset()[0].values()
    return seen


def assert_same(first, second):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


def check_seeded(play, env, actions):
    """Play twice from one seed, and from copies amid an episode."""
    seen = []
    for _ in range(2):
        env.reset(seed=3)
        seen.append(play(env, actions))
    assert_same(*seen)
    env.reset(seed=3)
    play(env, actions[:3])
    twins = copies(env)
    expected = play(env, actions[3:20])
    for twin in twins:
        assert_same(play(twin, actions[3:20]), expected)


def copies(env):
    """Return copies, as far as Gymnasium's own vectors let: they hold local functions, older ones a generator."""
    if not isinstance(env.unwrapped, gymnasium.vector.SyncVectorEnv):
        return [copy.deepcopy(env), pickle.loads(pickle.dumps(env))]
    try:
        copy.deepcopy(env.unwrapped)
    except TypeError:
        return []
    return [copy.deepcopy(env)]


def check_single(env):
    env.action_space.seed(0)
    check_seeded(play, env, [env.action_space.sample() for _ in range(STEPS)])
    if env.render_mode is not None:
        assert isinstance(env.render(), str) if env.render_mode == "ansi" else env.render().ndim == 3
    env.close()


def check_vector(envs, backend="numpy"):
    to_array = np.asarray
    if backend == "torch":
        to_array = pytest.importorskip("torch").from_numpy
    envs.action_space.seed(0)
    check_seeded(play_vector, envs, [to_array(envs.action_space.sample()) for _ in range(STEPS // 4)])
    first = envs.reset(seed=3)[0]
    assert_same(envs.reset(seed=[3 + i for i in range(envs.num_envs)])[0], first)
    if envs.render_mode is not None:
        assert len(envs.render()) == min(envs.num_envs, envs.unwrapped.render_envs)
    envs.close()


def check_parallel(env):
    spaces = [env.action_space(agent) for agent in env.possible_agents]
    for i, space in enumerate(spaces):
        space.seed(i)
    agents = env.possible_agents
    actions = [dict(zip(agents, (space.sample() for space in spaces), strict=True)) for _ in range(STEPS // 4)]
    check_seeded(play_parallel, env, actions)
    if env.render_mode is not None:
        assert env.render().ndim == 3
    env.close()


def each_example(count, check, *options):
    """Check a number of examples, always the same."""
    chosen = settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=HealthCheck
    )
    chosen(given(*options)(check))()


def test_every_option_is_tried():
    for maker, tried in ((TokenEnv, ["render_mode"]), (TokenVectorEnv, VECTOR), (ParallelTokenEnv, PARALLEL)):
        assert set(inspect.signature(maker).parameters) - {"game", "options"} == set(tried)
    for maker, tried in ((noisy_tokens, NOISE), *((getattr(wrappers, name), FAULTS[name]) for name in FAULTS)):
        assert set(inspect.signature(maker).parameters) - {"env"} == set(tried)


@pytest.mark.parametrize("extremes", list(product([MIN_NUMBER, MAX_NUMBER], repeat=4)))
@pytest.mark.parametrize("shape", ["sqrt", "linear"])
def test_extreme_numbers(extremes, shape):
    """A square of what is larger, or a quotient by what is smaller, would leave float32."""
    names = "spread", "noise_spread", "reward_scale", "observation_scale"
    solid = dict.fromkeys(("collidable_agents", "collidable_signal", "collidable_noise"), True)
    options = dict(zip(names, extremes, strict=True)) | solid | {"reward_shape": shape, "noise_offset": MAX_NUMBER}
    env = TokenEnv("simple_centroid", **options)
    env.reset(seed=0)
    play(env, [env.action_space.sample() for _ in range(3)])


def test_too_many_entities_are_told():
    """Of more, one stream of chance would run into the next."""
    for name in ("simple_centroid", "simple_tag"):
        counts = {kind.option: 2**20 for kind in GAMES[name]().entity_types}
        game = GAMES[name](**counts, continuous_actions=True)
        assert max(game.num_reset_uniforms + game.num_step_uniforms) <= STREAM
        for option in counts:
            with pytest.raises(ValueError, match=f"{option}=1048577: expected at most 1048576"):
                TokenEnv(name, **{option: 2**20 + 1})


@pytest.mark.parametrize("value", [1e-19, 1e-308, 1.1e18, 1e30])
def test_too_extreme_numbers_are_told(value):
    for options in ({"spread": value}, {"noise_offset": value}, {"observation_scale": value}):
        with pytest.raises(
            ValueError, match=r"=.*: expected (a finite number, at most 1e\+18|0 or a number of at least 1e-18)"
        ):
            TokenEnv("simple_centroid", **options)
    with pytest.raises(ValueError, match=r"scale=.*expected"):
        noisy_tokens(gymnasium.make("CartPole-v1"), 3, "marginal", value)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("game", GAMES)
def test_single(game, count):
    def check(options, drawn):
        env = made(gymnasium.make, f"noisy_envs/{IDS[game]}-v0", disable_env_checker=True, **options, **drawn)
        if env is not None:
            check_single(env)

    modes = [mode for mode in (None, "rgb_array", "ansi") if mode in (None, *GAMES[game].render_modes)]
    each_example(count, check, some(OPTIONS[game]), st.fixed_dictionaries({"render_mode": st.sampled_from(modes)}))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("game", GAMES)
def test_vector(game, count):
    pytest.importorskip("torch")

    def check(options, vector):
        vector = {"num_envs": 2} | vector
        envs = made(gymnasium.make_vec, f"noisy_envs/{IDS[game]}-v0", **vector, **options)
        if envs is not None:
            check_vector(envs, envs.backend)

    each_example(count, check, some(OPTIONS[game]), some(VECTOR))


@pytest.mark.parametrize("count", COUNTS)
@each_pettingzoo
def test_parallel(game, count):
    def check(options):
        env = made(module(game).parallel_env, **options)
        if env is not None:
            check_parallel(env)

    each_example(count, check, some(OPTIONS[game] | PARALLEL))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("env_id", ["CartPole-v1", "noisy_envs/SimpleTag-v0"])
def test_noise(env_id, count):
    def check(options):
        env = made(noisy_tokens, gymnasium.make(env_id, disable_env_checker=True), **({"num_noise": 3} | options))
        if env is not None:
            check_single(env)

    each_example(count, check, some(NOISE))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("backend", ["sync", "numpy", "torch"])
def test_noise_of_vectors(backend, count):
    def check(options):
        if backend == "sync":
            envs = gymnasium.make_vec("CartPole-v1", 2, "sync")
        else:
            envs = gymnasium.make_vec("noisy_envs/BoxWorld-v0", 2, backend=backend)
        envs = made(noisy_tokens, envs, **({"num_noise": 3} | options))
        if envs is not None:
            check_vector(envs, backend)

    each_example(count, check, some(NOISE))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize("env_id", ["noisy_envs/SimpleTag-v0", "noisy_envs/BoxWorldEntities-v0"])
def test_faults(env_id, name, count):
    def check(options):
        env = gymnasium.make(env_id, disable_env_checker=True)
        env = made(getattr(wrappers, name), env, **(REQUIRED[name] | options))
        if env is not None:
            check_single(env)

    each_example(count, check, some(FAULTS[name]))


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_vectors(name, count):
    pytest.importorskip("torch")

    def check(options):
        envs = gymnasium.make_vec("noisy_envs/SimpleTag-v0", 2, backend="torch", num_obstacles=(0, 3))
        envs = made(getattr(wrappers.vector, name), envs, **(REQUIRED[name] | options))
        if envs is not None:
            check_vector(envs, "torch")

    each_example(count, check, some(FAULTS[name]))
