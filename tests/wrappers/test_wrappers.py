"""Wrappers: tokens and noise for any environment, single or vector, the same to the bit in both."""

import copy
import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import gymnasium
import numpy as np
import pytest
from cases import by_default, slow
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from helpers import assert_same, draw_actions, play, still, to_backend

from noisy_envs import wrappers
from noisy_envs.arrays import as_numpy
from noisy_envs.tokens import TokenSpec
from noisy_envs.wrappers import noisy_tokens, spec_of, vector
from noisy_envs.wrappers.noise import DISTRIBUTIONS, SAMPLED

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*A Box observation space m..imum value is"),  # CartPole's own
    pytest.mark.filterwarnings("ignore:.*For Box action spaces, we recommend"),  # Pendulum's
    pytest.mark.filterwarnings("ignore:.*is different from the unwrapped version"),  # as a wrapped one should be
]
OLD = tuple(map(int, gymnasium.__version__.split(".")[:2])) < (1, 4)
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED


class Walk(gymnasium.Env[dict[str, Any], Any]):
    """A walk on a line that ends at ±1, seen as a dictionary with discrete parts, in float64."""

    def __init__(self) -> None:
        self.action_space = spaces.Discrete(3)
        inner = spaces.Dict({"speed": spaces.Box(-np.inf, np.inf, (), np.float64)})
        place = spaces.Box(-2.0, 2.0, (2,), np.float64)
        self.observation_space = spaces.Dict({"inner": inner, "mode": spaces.Discrete(3, start=5), "place": place})

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        super().reset(seed=seed)
        self.place, self.last = self.np_random.uniform(-0.5, 0.5, 2), 0
        return self._see(), {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.last = int(action)
        self.place = self.place + 0.2 * (self.last - 1) + self.np_random.uniform(-0.1, 0.1, 2)
        ended = bool((abs(self.place) > 1).any())
        return self._see(), 1.0, ended, False, {}

    def _see(self) -> dict[str, Any]:
        speed = {"speed": np.array(self.place.sum())}
        return {"inner": speed, "mode": np.int64(5 + self.last), "place": self.place.copy()}


gymnasium.register("tests/Walk-v0", "test_wrappers:Walk")

FLAT = {"cartpole": "CartPole-v1", "pendulum": "Pendulum-v1", "dict": "tests/Walk-v0"}
TAG = "noisy_envs/SimpleTag-1v3v4-v0"
BASES = FLAT | {"tag": TAG}

# what is put around tokens, given the module of wrappers
STACKS: dict[str, Callable[[Any, Any], Any]] = {
    "tokens": lambda _, env: env,
    "gaussian": lambda w, env: w.AddNoiseTokens(env, 4),
    "range": lambda w, env: w.AddNoiseTokens(env, (0, 5), "uniform", 2.0),
    "unshuffled": lambda w, env: w.AddNoiseTokens(env, (2, 4), "gaussian", 0.1, shuffle=False),
    "frozen": lambda w, env: w.AddNoiseTokens(env, (1, 4), frozen=True),
    "marginal": lambda w, env: w.AddNoiseTokens(env, 5, "marginal"),
    "marginal-frozen": lambda w, env: w.AddNoiseTokens(env, (1, 6), "marginal", 0.5, frozen=True),
    "shuffle": lambda w, env: w.ShuffleTokens(env),
    "mask": lambda w, env: w.TokensAndMask(w.AddNoiseTokens(env, (0, 3))),
    "flatten": lambda w, env: w.FlattenTokens(w.AddNoiseTokens(env, (0, 3), "marginal")),
    "twice": lambda w, env: w.ShuffleTokens(w.AddNoiseTokens(w.AddNoiseTokens(env, (0, 2)), 2, "marginal")),
    "role": lambda w, env: w.AddNoiseTokens(env, (0, 5), "uniform", noise_role="signal"),
    "marginal-role": lambda w, env: w.AddNoiseTokens(env, 5, "marginal", noise_role="signal", correlation="action"),
    "replay": lambda w, env: w.AddNoiseTokens(env, 5, "replay", noise_role="signal"),
    "replay-frozen": lambda w, env: w.AddNoiseTokens(env, (0, 4), "replay", 2.0, frozen=True, schedule="reversed"),
    "copy": lambda w, env: w.AddNoiseTokens(env, (1, 6), "copy", 0.1, delay=2, schedule="fluctuating"),
    "reward": lambda w, env: w.AddNoiseTokens(env, 3, correlation="reward"),
    "uncorrelated": lambda w, env: w.AddNoiseTokens(env, (0, 3), correlation="reward", correlated=False),
    "disturbed": lambda w, env: w.DisturbTokens(w.DisturbTokens(env, "dropped", 0.2), scale=0.1),
    "permuted": lambda w, env: w.DisturbTokens(w.DisturbTokens(env, "permuted", 0.7), "dead", 0.1),
    "delayed": lambda w, env: w.ShuffleTokens(w.DisturbTokens(env, "delayed", 0.5, delay=3)),
    "dropped": lambda w, env: w.DropTokens(w.AddNoiseTokens(env, 4), 0.3),
    "duplicated": lambda w, env: w.DuplicateTokens(w.DropTokens(w.AddNoiseTokens(env, 4), 0.3, frozen=True), 3),
}
NAMES = {
    "TokenizeObservation": {}, "AddNoiseTokens": {"num_noise": 1}, "DisturbTokens": {},
    "DropTokens": {"probability": 0.5}, "DuplicateTokens": {"num_copies": 1}, "ShuffleTokens": {}, "TokensAndMask": {},
    "FlattenTokens": {},
}  # fmt: skip
# by default each stack is put around one environment, in vectors of one mode; all others are tested in slow runs
DEFAULTS = {
    "tokens": ("dict", DISABLED),
    "gaussian": ("cartpole", NEXT_STEP),
    "range": ("pendulum", SAME_STEP),
    "unshuffled": ("dict", NEXT_STEP),
    "frozen": ("tag", SAME_STEP),
    "marginal": ("cartpole", DISABLED),
    "marginal-frozen": ("pendulum", NEXT_STEP),
    "shuffle": ("tag", DISABLED),
    "mask": ("dict", SAME_STEP),
    "flatten": ("cartpole", SAME_STEP),
    "twice": ("tag", NEXT_STEP),
    "role": ("dict", SAME_STEP),
    "marginal-role": ("tag", NEXT_STEP),
    "replay": ("cartpole", SAME_STEP),
    "replay-frozen": ("tag", NEXT_STEP),
    "copy": ("pendulum", SAME_STEP),
    "reward": ("pendulum", NEXT_STEP),
    "uncorrelated": ("pendulum", DISABLED),
    "disturbed": ("tag", SAME_STEP),
    "permuted": ("cartpole", NEXT_STEP),
    "delayed": ("dict", SAME_STEP),
    "dropped": ("tag", DISABLED),
    "duplicated": ("cartpole", NEXT_STEP),
}
CASES = [
    pytest.param(base, stack, marks=() if base == DEFAULTS[stack][0] else pytest.mark.slow)
    for base in BASES
    for stack in STACKS
    if (base, stack) != ("tag", "tokens")  # no wrapper at all
]
each_case = pytest.mark.parametrize(("base", "stack"), CASES)
each_drawing_case = pytest.mark.parametrize(("base", "stack"), [case for case in CASES if case.values[1] != "tokens"])
each_case_and_mode = pytest.mark.parametrize(
    ("base", "stack", "mode"),
    [
        pytest.param(*case.values, mode, marks=() if (base, mode) == DEFAULTS[stack] else pytest.mark.slow)
        for case in CASES
        for base, stack in [case.values]
        for mode in AutoresetMode
    ],
)
each_base = pytest.mark.parametrize("base", BASES)
each_mode = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
each_seed = pytest.mark.parametrize("seed", [0, slow(1)])


def tokens_of(module: Any, base: str, env: Any) -> Any:
    """Make an environment one of tokens, where it is not."""
    return env if base == "tag" else module.TokenizeObservation(env)


def single(base: str, stack: str = "tokens", **options: Any) -> Any:
    return STACKS[stack](wrappers, tokens_of(wrappers, base, gymnasium.make(BASES[base], **options)))


def around(base: str, stack: str, envs: Any) -> Any:
    """Put the vector wrappers of a stack around vector environments."""
    return STACKS[stack](vector, tokens_of(vector, base, envs))


def sync(base: str, num_envs: int = 3, mode: AutoresetMode = NEXT_STEP, steps: int = 9, kind: str = "sync") -> Any:
    given: dict[str, Any] = {"vector_kwargs": {"autoreset_mode": mode}} if kind != "vector_entry_point" else {}
    return gymnasium.make_vec(BASES[base], num_envs, kind, max_episode_steps=steps, **given)


def of_singles(base: str, stack: str, num_envs: int = 3, mode: AutoresetMode = NEXT_STEP, steps: int = 9) -> Any:
    """Make Gymnasium's vector of single environments, each wrapped for itself."""
    makes = [lambda: single(base, stack, max_episode_steps=steps)] * num_envs
    return gymnasium.vector.SyncVectorEnv(makes, autoreset_mode=mode)


def playing(envs: Any, steps: int, seed: Any = 0, backend: str = "numpy") -> Iterator[Any]:
    """Play vector environments; in mode DISABLED reset those that ended, and now and then another."""
    yield envs.reset(seed=seed)
    chance = np.random.default_rng(5)
    for action in draw_actions(envs.action_space, steps, 3):
        result = envs.step(to_backend(action, backend))
        yield result
        if envs.metadata["autoreset_mode"] is DISABLED:
            mask = as_numpy(result[2]) | as_numpy(result[3]) | (chance.random(envs.num_envs) < 0.05)
            if mask.any():
                yield envs.reset(options={"reset_mask": mask})


def arrays_in(result: Any) -> list[np.ndarray]:
    """Return the arrays in nested containers."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (list, tuple)):
        return [array for item in result for array in arrays_in(item)]
    if getattr(result, "dtype", None) == np.object_:
        return [result, *arrays_in(result.tolist())]
    return [result] if isinstance(result, np.ndarray) else []


def noise_of(env: Any, tokens: np.ndarray) -> np.ndarray:
    """Return the noise among tokens (N, D)."""
    return tokens[tokens[:, -1] == env.token_spec.roles["noise"]]


def noise_over(env: Any, steps: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Play, and return the values of noise and of signal, but the query's, (n, V) each."""
    seen = [result[0] for result in play(env, draw_actions(env.action_space, steps), seed=seed)]
    rows = np.concatenate([tokens[1:] for tokens in seen])
    is_noise = rows[:, -1] == env.token_spec.roles["noise"]
    return rows[is_noise, :-1], rows[~is_noise & (rows[:, -1] != env.token_spec.padding), :-1]


def chi_square(counts: np.ndarray) -> float:
    """Return how far counts are from equal ones; about as much as there are, less one, where chance alone rules."""
    return float(((counts - counts.mean()) ** 2 / counts.mean()).sum())


# episodes are as long as without the wrappers


@each_case
def test_episodes_end_at_the_limit(base: str, stack: str) -> None:
    limits = {"dict": (1, 2), "cartpole": (1, 2, 7)}.get(base, (1, 2, 25, 100, 200))  # the walk and the pole may fall
    options: list[dict[str, Any]] = [{"max_episode_steps": limit} for limit in limits]
    if base == "tag":  # the game's own keyword, and the smaller of two
        options = [{"max_steps": 200} | option for option in options] + [{"max_steps": limit} for limit in limits]
    for option in options:
        env, limit = single(base, stack, **option), min(option.values())
        for seed in (0, None):
            env.reset(seed=seed)
            ends = [env.step(action)[2:4] for action in draw_actions(env.action_space, limit)]
            assert ends == [(False, False)] * (limit - 1) + [(False, True)]


@pytest.mark.parametrize("kind", ["sync", "async", "vector_entry_point"])
@pytest.mark.parametrize(("base", "stack"), [("cartpole", "marginal"), ("tag", "twice"), ("dict", "mask")])
def test_vectors_truncate_at_the_limit(base: str, stack: str, kind: str) -> None:
    if base == "dict" and kind == "vector_entry_point":
        pytest.skip("it has none")
    envs = around(base, stack, sync(base, 2, steps=3, kind=kind))
    envs.reset(seed=0)
    middle = np.ones_like(envs.action_space.sample())
    ends = [envs.step(middle)[3].tolist() for _ in range(8)]
    assert ends == [[i % 4 == 2] * 2 for i in range(8)]
    envs.close()


# spaces


@each_case
def test_gymnasium_is_content(base: str, stack: str) -> None:
    check_env(single(base, stack), skip_render_check=True)


@each_case
def test_spaces_hold_what_is_shown(base: str, stack: str) -> None:
    env = single(base, stack)
    spec = env.token_spec
    roles = {spec.padding} | set(map(float, spec.roles.values())) if spec.padded else set(spec.roles.values())
    for result in play(env, draw_actions(env.action_space, 300), seed=0):
        observation, info = result[0], result[-1]
        assert observation in env.observation_space
        tokens = observation["tokens"] if stack == "mask" else observation.reshape(spec.num_tokens, spec.num_features)
        assert tokens.dtype == np.float32 and set(tokens[:, -1].tolist()) <= roles
        if len(result) == 5:
            assert isinstance(result[1], (float, np.floating)) and type(result[2]) is type(result[3]) is bool
        mask, present = info["signal_mask"], spec.mask(tokens)
        assert mask.dtype == np.bool_ and mask.shape == (spec.num_tokens,)
        assert not (mask & ~present).any() and mask[spec.query_index]
        assert type(info["snr"]) is float and info["snr"] == mask.sum() / present.sum()
        if stack == "mask":
            assert_same(observation["mask"], present)
        if base != "tag" and "noise" in spec.roles:
            assert_same(mask, present & (tokens[:, -1] != spec.roles["noise"]))


@each_case_and_mode
def test_vector_spaces_hold_what_is_shown(base: str, stack: str, mode: AutoresetMode) -> None:
    envs = around(base, stack, sync(base, 2, mode))
    assert envs.observation_space == gymnasium.vector.utils.batch_space(envs.single_observation_space, 2)
    assert envs.single_observation_space == single(base, stack).observation_space
    assert envs.token_spec == single(base, stack).token_spec
    finals = 0
    for result in playing(envs, 30):
        assert result[0] in envs.observation_space
        info = result[-1]
        for i in np.flatnonzero(info.get("_final_obs", [])):
            finals += 1
            assert info["final_obs"][i] in envs.single_observation_space
        if len(result) == 5:
            assert info["signal_mask"].shape == (2, envs.token_spec.num_tokens)
            assert info["signal_mask"].dtype == np.bool_ and info["snr"].dtype == np.float64
            assert info["_signal_mask"].tolist() == info["_snr"].tolist() == [True, True]
    assert (finals > 0) == (mode is SAME_STEP)


def test_only_what_was_unbounded_is_unbounded() -> None:
    env = wrappers.AddNoiseTokens(wrappers.TokenizeObservation(gymnasium.make("CartPole-v1")), 1, shuffle=False)
    base = env.unwrapped.observation_space
    box = env.observation_space
    assert_same(box.low[1:5, 0], base.low)
    assert_same(box.high[1:5, 0], base.high)
    assert box.low[0].tolist() == [-1, 0] and box.high[0].tolist() == [1, 4]
    assert not box.low[:, 1].any() and box.high[1:, 1].tolist() == [4, 4, 4, 4, 5]
    assert 5.7 < box.high[5, 0] == -box.low[5, 0] < 5.8


# seeds, and what is left over


@each_seed
@each_case
def test_a_seed_decides_all_that_follows(base: str, stack: str, seed: int) -> None:
    a, b = single(base, stack), single(base, stack)
    actions = draw_actions(a.action_space, 3)
    for given in (seed, None, None, None):
        assert_same(play(a, actions, seed=given), play(b, actions, seed=given))


@each_seed
@each_case
def test_nothing_is_left_over(base: str, stack: str, seed: int) -> None:
    used, new = single(base, stack), single(base, stack)
    play(used, draw_actions(used.action_space, 17), seed=seed + 5)
    actions = draw_actions(new.action_space, 30, 1)
    assert_same(play(used, actions, seed=seed), play(new, actions, seed=seed))
    envs, others = (around(base, stack, sync(base)) for _ in range(2))
    list(playing(envs, 17, seed=seed + 5))
    assert_same(list(playing(envs, 20, seed=seed)), list(playing(others, 20, seed=seed)))


@each_drawing_case
def test_seeds_and_episodes_draw_differently(base: str, stack: str) -> None:
    env = single(base, stack)
    first = [env.reset(seed=0)[0], *(env.reset()[0] for _ in range(9))]
    first += [env.reset(seed=seed)[0] for seed in range(1, 10)]
    assert len({b"".join(x.tobytes() for x in arrays_in([tokens])) for tokens in first}) == 19


@each_case
def test_fifty_resets_begin_fifty_times(base: str, stack: str) -> None:
    def starts() -> list[bytes]:
        env = single(base, stack)
        seen = [env.reset(seed=5 if i == 0 else None)[0] for i in range(50)]
        return [b"".join(x.tobytes() for x in arrays_in([tokens])) for tokens in seen]

    once, again = starts(), starts()
    assert once == again and len(set(once)) == 50


def test_noise_of_fifty_resets_differs() -> None:
    env = single("cartpole", "gaussian")
    assert len({noise_of(env, env.reset(seed=5 if i == 0 else None)[0]).tobytes() for i in range(50)}) == 50


def test_stored_noise() -> None:
    """What a seed draws stays; a change here changes everybody's results, and is one for the changelog.

    Gaussian and marginal noise changed once: each of their two numbers has a stream of its own since, so that more
    tokens do not move the first.
    """
    stored = {"gaussian": [-0.3062742, -0.01091215, -0.45840332], "uniform": [-0.77891386, 0.59417558, -0.74566984]}
    for distribution, values in stored.items():
        envs = noisy_tokens(sync("cartpole", 2), 3, distribution, shuffle=False)
        envs.reset(seed=2, options={"episode": 4})
        tokens, *_ = envs.step(np.array([0, 1]))
        np.testing.assert_allclose(tokens[1, 5:, 0], values, rtol=1e-5)
    tokens, _ = single("cartpole", "gaussian").reset(seed=2**40)
    assert tokens[:, 1].tolist() == [0, 5, 4, 2, 3, 5, 5, 5, 1]


def test_without_a_seed_no_two_are_alike() -> None:
    env = single("tag", "gaussian")
    assert len({noise_of(env, single("tag", "gaussian").reset()[0]).tobytes() for _ in range(3)}) == 3


@each_drawing_case
def test_global_generators_are_left_alone(base: str, stack: str) -> None:
    seen = []
    for global_seed in (0, 1):
        random.seed(global_seed)
        np.random.seed(global_seed)  # noqa: NPY002  the generator that must not matter
        before = random.getstate(), np.random.get_state()  # noqa: NPY002
        env, envs = single(base, stack), around(base, stack, sync(base, 2))
        seen.append([play(env, draw_actions(env.action_space, 5), seed=0), list(playing(envs, 5))])
        assert_same(before, (random.getstate(), np.random.get_state()))  # noqa: NPY002
    assert_same(*seen)


@each_case
def test_copies_go_on_alike(base: str, stack: str) -> None:
    env, envs = single(base, stack), around(base, stack, sync(base, 2))
    play(env, draw_actions(env.action_space, 5), seed=0)
    list(playing(envs, 12))
    for one in (env,) if OLD else (env, envs):  # the older vectors of Gymnasium cannot be copied
        copies = [copy.deepcopy(one), *([pickle.loads(pickle.dumps(one))] if one is env else [])]
        actions = draw_actions(one.action_space, 20, 4)
        there = [play(twin, actions) for twin in copies]
        here = play(one, actions)
        for twin in there:
            assert_same(twin, here)
        assert_same(*(twin.reset()[0] for twin in (one, copies[0])))


@pytest.mark.parametrize("stack", [stack for stack in STACKS if stack != "tokens"])
def test_copies_go_on_alike_after_a_picture(stack: str) -> None:
    env = single("tag", stack, render_mode="rgb_array")
    play(env, draw_actions(env.action_space, 5), seed=0)
    env.render()
    actions = draw_actions(env.action_space, 20, 4)
    twins = [copy.deepcopy(env), pickle.loads(pickle.dumps(env))]
    here = play(env, actions)
    for twin in twins:
        assert_same(play(twin, actions), here)
        assert_same(twin.render(), env.render())


def test_vectors_of_ours_are_pickled() -> None:
    envs = around("tag", "twice", gymnasium.make_vec(TAG, 2))
    list(playing(envs, 5))
    twin = pickle.loads(pickle.dumps(envs))
    actions = draw_actions(envs.action_space, 20, 4)
    assert_same(play(twin, actions), play(envs, actions))


def test_an_episode_is_named_by_its_number() -> None:
    env, twin = single("tag", "twice"), single("tag", "range")
    for one in (single("tag", "range"), single("cartpole", "gaussian")):
        one.reset(seed=3)
        following = [one.reset()[0] for _ in range(4)][-1]
        jumped = one.reset(seed=3, options={"episode": 4})[0]
        assert_same(noise_of(one, jumped), noise_of(one, following))
    assert_same(env.reset(seed=0)[0], env.reset(seed=0, options={"episode": 0})[0])
    envs = vector.AddNoiseTokens(gymnasium.make_vec(TAG, 2), (0, 5), "uniform", 2.0)
    tokens = envs.reset(seed=7, options={"episode": 2})[0]
    assert_same(tokens[1], twin.reset(seed=8, options={"episode": 2})[0])


# a vector is its worlds


@each_case_and_mode
def test_vector_is_gymnasiums_vector_of_wrapped_singles(base: str, stack: str, mode: AutoresetMode) -> None:
    natives = [sync(base, 3, mode)]
    if base == "tag":
        natives.append(gymnasium.make_vec(TAG, 3, max_episode_steps=9, autoreset_mode=mode))
    for native in natives:
        ours, theirs = around(base, stack, native), of_singles(base, stack, 3, mode)
        ends = 0
        for a, b in zip(playing(ours, 36), playing(theirs, 36), strict=True):
            assert_same(a[:-1], b[:-1])
            assert_same(dict(sorted(a[-1].items())), dict(sorted(b[-1].items())))
            ends += 0 if len(a) == 2 else int((a[2] | a[3]).sum())
        assert ends >= 6


@by_default(
    ("base", "stack", "mode"),
    [("cartpole", "marginal-frozen", NEXT_STEP), ("tag", "twice", SAME_STEP)],
    product(BASES, ["marginal-frozen", "twice"], [NEXT_STEP, SAME_STEP]),
)
def test_vector_is_its_worlds_for_long(base: str, stack: str, mode: AutoresetMode) -> None:
    ours = around(base, stack, sync(base, 2, mode, steps=60))
    theirs = of_singles(base, stack, 2, mode, steps=60)
    ends = 0
    for a, b in zip(playing(ours, 250, seed=1), playing(theirs, 250, seed=1), strict=True):
        assert_same(a[:-1], b[:-1])
        assert_same(a[-1]["signal_mask"], b[-1]["signal_mask"])
        ends += 0 if len(a) == 2 else int((a[2] | a[3]).sum())
    assert ends >= 6


@each_base
def test_each_world_is_a_single_environment(base: str) -> None:
    envs = around(base, "twice", sync(base, 3, steps=50))
    for seed, seeds in ((4, (4, 5, 6)), ([7, 0, 7], (7, 0, 7))):
        worlds = [play(single(base, "twice"), [still(envs.single_action_space)] * 5, seed=one) for one in seeds]
        together = play(envs, [still(envs.action_space)] * 5, seed=seed)
        for t, result in enumerate(together):
            for i, world in enumerate(worlds):
                assert_same(result[0][i], world[t][0])
                assert_same(result[-1]["signal_mask"][i], world[t][-1]["signal_mask"])
                assert result[-1]["snr"][i] == world[t][-1]["snr"]


@pytest.mark.parametrize("base", ["cartpole", "tag"])
def test_seeds_may_be_an_array(base: str) -> None:
    envs = around(base, "range", sync(base))
    assert_same(envs.reset(seed=np.array([7, 0, 3])), envs.reset(seed=[7, 0, 3]))


def test_a_list_may_leave_seeds_out() -> None:
    envs = around("cartpole", "gaussian", sync("cartpole", 2))
    env = single("cartpole", "gaussian")
    envs.reset(seed=[3, 8])
    tokens = envs.reset(seed=[None, 2])[0]
    env.reset(seed=3)
    assert_same(noise_of(env, tokens[0]), noise_of(env, env.reset()[0]))
    assert_same(noise_of(env, tokens[1]), noise_of(env, env.reset(seed=2)[0]))


@each_mode
def test_no_world_depends_on_another(mode: AutoresetMode) -> None:
    alone, pushed = (around("tag", "twice", gymnasium.make_vec(TAG, 2, autoreset_mode=mode)) for _ in range(2))
    actions = draw_actions(alone.action_space, 12)
    for envs in (alone, pushed):
        envs.reset(seed=0)
    for t, action in enumerate(actions):
        a, b = alone.step(action)[0], pushed.step(action)[0]
        assert_same(a[0], b[0])
        if t % 4 == 3:
            again, info = pushed.reset(options={"reset_mask": np.array([False, True])})
            assert_same(again[0], b[0])  # shown again, noise and all
            assert (again[1] != b[1]).any()
            assert info["_signal_mask"].tolist() == info["_snr"].tolist() == [False, True]
            assert not info["signal_mask"][0].any() and info["snr"][0] == 0 < info["snr"][1]


@pytest.mark.parametrize("stack", ["gaussian", "marginal-frozen"])
def test_a_world_that_ended_and_is_reset_by_its_mask_is_not_reset_again(stack: str) -> None:
    ours, theirs = around("cartpole", stack, sync("cartpole", steps=3)), of_singles("cartpole", stack, steps=3)
    results = []
    for envs in (ours, theirs):
        seen = play(envs, [np.zeros(3, int)] * 3, seed=0)
        seen.append(envs.reset(options={"reset_mask": np.array([True, False, True])}))
        results.append([result[:-1] for result in seen + play(envs, [np.ones(3, int)] * 5)])
    assert_same(*results)


class Quiet(gymnasium.vector.VectorWrapper):
    """Somebody's vector environment of tokens, that does not tell which are signal."""

    @property
    def token_spec(self) -> Any:
        return self.env.token_spec

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.env.reset(seed=seed, options=options)[0], {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        return *self.env.step(actions)[:4], {}


def test_what_is_shown_again_is_not_remembered_twice() -> None:
    for stack in ("marginal", "marginal-frozen"):
        alone, pushed = (around("tag", stack, Quiet(gymnasium.make_vec(TAG, 2))) for _ in range(2))
        for envs in (alone, pushed):
            envs.reset(seed=0)
        for action in draw_actions(alone.action_space, 8):
            assert_same(alone.step(action)[0][0], pushed.step(action)[0][0])
            for _ in range(3):
                pushed.reset(options={"reset_mask": np.array([False, True])})


def test_all_tokens_but_padding_count_as_signal_where_none_is_named() -> None:
    envs = vector.AddNoiseTokens(Quiet(gymnasium.make_vec("noisy_envs/SimpleTag-v0", 4, num_obstacles=(0, 9))), 3)
    tokens, info = envs.reset(seed=0)
    present = envs.token_spec.mask(tokens)
    assert not present.all()
    assert_same(info["signal_mask"], present & (tokens[..., -1] != 4))
    assert_same(info["snr"], (present.sum(axis=1) - 3) / present.sum(axis=1))


def test_gymnasiums_own_vector_environment_is_followed_through_its_episodes() -> None:
    envs = around("cartpole", "gaussian", gymnasium.make_vec("CartPole-v1", 2, "vector_entry_point"))
    twins = [single("cartpole", "gaussian") for _ in range(2)]
    numbers, ended = [0, 0], np.zeros(2, bool)

    def check(tokens: np.ndarray) -> None:
        for i, twin in enumerate(twins):
            assert_same(noise_of(twin, tokens[i]), noise_of(twin, latest[i]))

    tokens, _ = envs.reset(seed=0)
    latest = [twin.reset(seed=i)[0] for i, twin in enumerate(twins)]
    check(tokens)
    for action in draw_actions(envs.action_space, 100):
        tokens, _, terminated, truncated, _ = envs.step(action)
        for i, twin in enumerate(twins):
            numbers[i] += int(ended[i])
            # the world of the twin itself is of no interest: it is kept from ending
            twin.unwrapped.state, twin.unwrapped.steps_beyond_terminated = np.zeros(4), None
            latest[i] = twin.reset(seed=i, options={"episode": numbers[i]})[0] if ended[i] else twin.step(0)[0]
        check(tokens)
        ended = terminated | truncated
    assert min(numbers) >= 2


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("frozen", [False, True])
def test_an_autoreset_beneath_begins_episodes_as_one_outside(distribution: str, frozen: bool) -> None:
    def noise(env: Any) -> Any:
        return wrappers.AddNoiseTokens(env, (0, 28), distribution, frozen=frozen)

    autoreset = gymnasium.wrappers.Autoreset
    beneath, outside = autoreset(gymnasium.make(TAG, max_steps=3)), autoreset(noise(gymnasium.make(TAG, max_steps=3)))
    beneath = noise(beneath)
    actions = draw_actions(beneath.action_space, 18)
    for env in (beneath, outside):
        env.reset(seed=3)
        play(env, actions[:3])  # a reset after an end begins one episode, not two
    seen = [[env.reset(), *map(env.step, actions)] for env in (beneath, outside)]
    assert_same(*seen)
    assert len({result[-1]["snr"] for result in seen[0]}) > 3


def test_async_is_sync() -> None:
    for base, stack in (("cartpole", "marginal-frozen"), ("dict", "twice")):
        results = []
        for kind in ("sync", "async"):
            envs = around(base, stack, sync(base, 2, SAME_STEP, kind=kind))
            results.append(list(playing(envs, 25)))
            envs.close()
        assert_same(*results)


@pytest.mark.parametrize("kind", [gymnasium.vector.SyncVectorEnv, gymnasium.vector.AsyncVectorEnv])
def test_layers_inside_a_vector_are_found(kind: Any) -> None:
    inside = kind([lambda: single("cartpole", "gaussian")] * 2)
    envs = vector.AddNoiseTokens(inside, 4)
    twin = wrappers.AddNoiseTokens(single("cartpole", "gaussian"), 4)
    assert envs.token_spec == twin.token_spec and envs.num_random_layers == twin.num_random_layers == 2
    assert_same(envs.reset(seed=0)[0][1], twin.reset(seed=1)[0])
    envs.close()


@pytest.mark.parametrize(
    ("kind", "mode"), [("sync", NEXT_STEP), ("sync", SAME_STEP), ("vector_entry_point", NEXT_STEP)]
)
@pytest.mark.parametrize("stack", STACKS)
def test_episode_statistics_are_right(stack: str, mode: AutoresetMode, kind: str) -> None:
    if mode is SAME_STEP and OLD:
        pytest.skip("Gymnasium counted wrongly before 1.4")
    envs = RecordEpisodeStatistics(around("cartpole", stack, sync("cartpole", 2, mode, 3, kind)))
    envs.reset(seed=0)
    told = []
    for _ in range(16 if mode is NEXT_STEP else 12):
        info = envs.step(np.array([0, 1]))[-1]
        told += info["episode"]["l"][info["_episode"]].tolist() if "episode" in info else []
    assert list(envs.length_queue) == told == [3] * 8 and list(envs.return_queue) == [3.0] * 8


STATISTICS = [(TAG, {}), (TAG, {"learners": "all"}), ("noisy_envs/SimpleCentroid-v0", {})]


def told_by(envs: Any, steps: int) -> list[dict[str, Any]]:
    """Return what an environment with statistics told of its episodes, as NumPy, and let queues and info agree."""
    told = []
    for result in playing(envs, steps, backend=envs.unwrapped.backend):
        if len(result) == 2:
            continue
        _, reward, terminated, truncated, info = result
        ended = as_numpy(terminated) | as_numpy(truncated)
        assert ended.any() == ("episode" in info) == ("_episode" in info)
        if ended.any():
            assert {type(x) for x in (*info["episode"].values(), info["_episode"])} == {type(reward)}
            found = {name: as_numpy(x) for name, x in info["episode"].items()}
            assert found["r"].dtype == as_numpy(reward).dtype and (as_numpy(info["_episode"]) == ended).all()
            assert found["r"].shape == tuple(reward.shape) and not any(x[~ended].any() for x in found.values())
            told.append({name: x[ended] for name, x in found.items()})
    assert envs.episode_count == sum(len(x["l"]) for x in told)
    for name, queue in (("r", envs.return_queue), ("l", envs.length_queue), ("t", envs.time_queue)):
        last = [one for x in told for one in x[name]][-queue.maxlen :]
        np.testing.assert_allclose(np.array(queue), np.array(last), rtol=1e-6)
    return told


@each_mode
@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize(("env_id", "options"), STATISTICS)
def test_our_statistics_are_right_with_any_learners_and_library(
    env_id: str, options: dict[str, Any], backend: str, mode: AutoresetMode
) -> None:
    """They are Gymnasium's where that works: of one learner, in NumPy."""
    if backend == "torch":
        pytest.importorskip("torch")

    def made(backend: str) -> Any:
        return gymnasium.make_vec(env_id, 3, backend=backend, autoreset_mode=mode, max_steps=5, **options)

    envs = vector.RecordEpisodeStatistics(made(backend), buffer_length=7)
    told = told_by(envs, 40)
    assert len(told) > 5
    rewards, sums, idle = np.zeros((3, *told[0]["r"].shape[1:])), [], np.zeros(3, np.bool_)
    for result in playing(made("numpy"), 40):  # by hand
        if len(result) == 2:
            _, where = result
            fresh = where["_snr"]
            rewards[fresh], idle[fresh] = 0, False
            continue
        _, reward, terminated, truncated, _ = result
        ended = terminated | truncated
        rewards[idle] = 0
        rewards[~idle] += reward[~idle]
        if ended.any():
            sums.append(rewards[ended].copy())
        idle = ended.copy()
        if mode is SAME_STEP:
            rewards[ended], idle[:] = 0, False
    for ours, theirs in zip(told, sums, strict=True):
        np.testing.assert_allclose(ours["r"], theirs, rtol=1e-5, atol=1e-5)
        assert (ours["l"] <= 5).all() and (ours["t"] >= 0).all()
    if not options and backend == "numpy" and (mode is not SAME_STEP or not OLD):
        gymnasiums = told_by(RecordEpisodeStatistics(made("numpy"), 7), 40)
        for ours, theirs in zip(told, gymnasiums, strict=True):
            assert_same({name: ours[name] for name in "rl"}, {name: theirs[name] for name in "rl"})


def test_our_statistics_fit_around_others_and_say_what_they_cannot_do() -> None:
    envs = vector.RecordEpisodeStatistics(around("cartpole", "range", sync("cartpole", 2, steps=3)), stats_key="sum")
    assert spec_of(envs) == envs.env.token_spec
    results = list(playing(envs, 8))
    assert results[3][-1]["sum"]["l"].tolist() == [3, 3] and list(envs.length_queue) == [3] * 4
    twice = vector.RecordEpisodeStatistics(vector.RecordEpisodeStatistics(gymnasium.make_vec(TAG, 2, max_steps=1)))
    twice.reset(seed=0)
    with pytest.raises(ValueError, match="stats_key='episode': expected a key that info does not have yet"):
        twice.step(still(twice.action_space))
    with pytest.raises(ValueError, match="buffer_length=-1: expected at least 0"):
        vector.RecordEpisodeStatistics(gymnasium.make_vec(TAG, 2), buffer_length=-1)
    with pytest.raises(TypeError, match=r"expected a gymnasium.vector.VectorEnv; noisy_envs.wrappers has the wrappers"):
        vector.RecordEpisodeStatistics(gymnasium.make(TAG))  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize("stack", STACKS)
def test_episode_statistics_of_one_environment_are_right(stack: str) -> None:
    env = gymnasium.wrappers.RecordEpisodeStatistics(single("cartpole", stack, max_episode_steps=3))
    play(env, [0, 1, 1] * 4, seed=0)
    assert list(env.length_queue) == [3] * 4 and list(env.return_queue) == [3.0] * 4


@each_case
def test_one_world_keeps_its_axis(base: str, stack: str) -> None:
    envs = around(base, stack, sync(base, 1))
    for result in playing(envs, 12):
        for array in arrays_in(result):
            assert array.shape[:1] == (1,)


# purity


@each_case
def test_what_was_returned_stays(base: str, stack: str) -> None:
    same = {"vector_kwargs": {"autoreset_mode": SAME_STEP, "copy": False}}
    inner = gymnasium.make_vec(BASES[base], 2, "sync", max_episode_steps=5, **same)
    for env in (single(base, stack), around(base, stack, inner)):
        kept, copies = [], []
        for result in play(env, draw_actions(env.action_space, 15), seed=0):
            assert not any(
                np.shares_memory(a, b) for old in kept for a in arrays_in(old) for b in arrays_in([result[0]])
            )
            kept.append((result[0], result[-1]))
            copies.append(copy.deepcopy(kept[-1]))
        assert_same(kept, copies)
    env = single(base, stack)
    spoilt, fresh = env, single(base, stack)
    for action in draw_actions(env.action_space, 8):
        for result in (spoilt.reset(seed=1), spoilt.step(action)):
            for array in arrays_in([result[0], result[-1]["signal_mask"]]):
                array[...] = 1
        fresh.reset(seed=1)
        fresh.step(action)
        assert_same(spoilt.step(action)[0], fresh.step(action)[0])


@pytest.mark.parametrize("name", ["FlattenTokens", "TokensAndMask", "ShuffleTokens"])
def test_what_the_environment_overwrites_is_copied(name: str) -> None:
    inner = gymnasium.make_vec(TAG, 2, "sync", vector_kwargs={"copy": False})
    envs = getattr(vector, name)(inner)
    first = envs.reset(seed=0)[0]
    kept = copy.deepcopy(first)
    envs.step(draw_actions(envs.action_space, 1)[0])
    assert_same(first, kept)


def test_given_options_are_left_alone() -> None:
    envs = around("cartpole", "gaussian", sync("cartpole", 2, DISABLED))
    envs.reset(seed=0)
    options = {"reset_mask": np.array([True, False])}
    envs.reset(options=options)
    assert list(options) == ["reset_mask"]


# TokenizeObservation


@each_seed
def test_tokens_hold_the_features(seed: int) -> None:
    env, bare = single("cartpole"), gymnasium.make("CartPole-v1")
    tokens, values = env.reset(seed=seed)[0], bare.reset(seed=seed)[0]
    assert_same(tokens, np.stack([np.append(np.float32(0), values), np.arange(5, dtype=np.float32)], axis=1))
    roles = {"query": 0, "feature[0]": 1, "feature[1]": 2, "feature[2]": 3, "feature[3]": 4}
    spec = env.token_spec
    assert (spec.num_tokens, spec.features, spec.roles) == (5, ("value", "role"), roles)
    assert (spec.query_index, spec.padded) == (0, False)


def test_dictionaries_are_flattened_as_gymnasium_does() -> None:
    env, bare = single("dict"), Walk()
    names = ["query", "inner.speed[0]", "mode[0]", "mode[1]", "mode[2]", "place[0]", "place[1]"]
    assert env.token_spec.roles == {name: number for number, name in enumerate(names)}
    env.reset(seed=2)
    bare.reset(seed=2)
    for action in (2, 1, 0):
        tokens, observation = env.step(action)[0], bare.step(action)[0]
        flat = spaces.flatten(bare.observation_space, observation)
        assert_same(tokens[1:, 0], flat.astype(np.float32))
        assert tokens[2:5, 0].tolist() == [float(action == i) for i in range(3)]


@pytest.mark.parametrize(
    ("space", "count"),
    [
        (spaces.Discrete(4), 4),
        (spaces.MultiDiscrete([2, 3]), 5),
        (spaces.MultiBinary(3), 3),
        (spaces.Box(-(2**40), 2**40, (), np.int64), 1),
        (spaces.Box(-1e300, 1e300, (2,), np.float64), 2),
        (spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 1, (2,)))), 4),
    ],
    ids=str,
)
def test_other_flat_spaces(space: spaces.Space[Any], count: int) -> None:
    class Sampled(gymnasium.Env[Any, Any]):
        observation_space, action_space = copy.deepcopy(space), spaces.Discrete(2)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            self.observation_space.seed(seed)
            return self.observation_space.sample(), {}

    env = wrappers.TokenizeObservation(Sampled())
    assert env.token_spec.num_tokens == 1 + count == len(env.token_spec.roles)
    envs = vector.TokenizeObservation(gymnasium.vector.SyncVectorEnv([Sampled, Sampled]))
    tokens, _ = envs.reset(seed=0)
    for i in range(2):
        one, _ = env.reset(seed=i)
        assert one in env.observation_space
        assert_same(tokens[i], one)
        flat: Any = spaces.flatten(space, env.unwrapped.reset(seed=i)[0])
        with np.errstate(over="ignore"):
            assert_same(one[1:, 0], flat.astype(np.float32))


def test_noise_of_features_bounded_by_the_largest_number() -> None:
    """Many environments name it where they know no bound."""
    most = float(np.finfo(np.float32).max)
    bounded = gymnasium.make("CartPole-v1")
    bounded.observation_space = spaces.Box(-most, most, (4,), np.float32)
    env = wrappers.noisy_tokens(bounded, 3, "marginal", scale=2.0)
    assert env.observation_space.high[-1, 0] == np.inf
    assert env.reset(seed=0)[0] in env.observation_space


def test_unbounded_features_are_squashed_on_request() -> None:
    env = wrappers.TokenizeObservation(gymnasium.make("CartPole-v1"), squash=True)
    base = env.unwrapped.observation_space
    assert env.observation_space.low[1:, 0].tolist() == [base.low[0], -1, base.low[2], -1]
    assert env.observation_space.high[1:, 0].tolist() == [base.high[0], 1, base.high[2], 1]
    env.reset(seed=0)
    env.unwrapped.state = np.array([0.1, 50.0, 0.01, -1.0])
    values = env.step(0)[0][1:, 0]
    state = np.array(env.unwrapped.state, np.float32)
    assert values[[0, 2]].tolist() == state[[0, 2]].tolist()
    np.testing.assert_allclose(values[[1, 3]], np.tanh(state[[1, 3]]), rtol=1e-6)
    envs = vector.TokenizeObservation(sync("cartpole", 2), squash=True)
    twin = wrappers.TokenizeObservation(gymnasium.make("CartPole-v1"), squash=True)
    assert_same(envs.reset(seed=0)[0][1], twin.reset(seed=1)[0])


# AddNoiseTokens


def test_gaussian_noise_is_normal() -> None:
    env = wrappers.AddNoiseTokens(gymnasium.make(TAG), 12, scale=3.0)
    values = noise_over(env, 400)[0]
    assert len(values) > 4800
    assert abs(values.mean(axis=0)).max() < 0.15
    assert abs(values.std(axis=0) / 3 - 1).max() < 0.04
    assert abs(np.corrcoef(values.T) - np.eye(4)).max() < 0.05
    inside = [(abs(values) < 3 * k).mean() for k in (0.6745, 1, 2)]
    np.testing.assert_allclose(inside, [0.5, 0.6827, 0.9545], atol=0.012)
    assert len(np.unique(values)) > 0.99 * values.size


def test_uniform_noise_is_uniform() -> None:
    env = wrappers.AddNoiseTokens(gymnasium.make(TAG), 12, "uniform", 0.5)
    values = noise_over(env, 400)[0]
    assert abs(values).max() <= 0.5
    for column in values.T:
        counts = np.histogram(column, 10, (-0.5, 0.5))[0]
        assert chi_square(counts) < 28  # with 9: above in 0.1%


@each_base
def test_marginal_noise_is_of_the_signals_distribution(base: str) -> None:
    inner = gymnasium.make_vec("noisy_envs/SimpleTag-1v3v0-v0", 16, max_steps=30)
    inner = inner if base == "tag" else sync(base, 16, steps=30)
    envs = around(base, "marginal", inner)
    seen = np.stack([result[0] for result in play(envs, draw_actions(envs.action_space, 400), seed=0)])[:, :, 1:]
    is_noise = seen[..., -1] == envs.token_spec.roles["noise"]
    noise, signal = seen[is_noise][:, :-1], seen[~is_noise][:, :-1]
    for ours, theirs in zip(np.sort(noise.T), np.sort(signal.T), strict=True):
        assert abs(ours.std() / theirs.std() - 1) < 0.06
        points = np.quantile(theirs, np.linspace(0.02, 0.98, 49))
        apart = np.searchsorted(ours, points) / len(ours) - np.searchsorted(theirs, points) / len(theirs)
        assert abs(apart).max() < 0.03  # Kolmogorov and Smirnov's distance
    for world in range(16):  # a row of noise is a row that was signal there
        was = {row.tobytes() for row in seen[:, world][~is_noise[:, world]][:, :-1]}
        assert {row.tobytes() for row in seen[:, world][is_noise[:, world]][:, :-1]} <= was


def test_marginal_noise_is_of_the_past_of_its_own_world() -> None:
    env = single("cartpole", "marginal")
    seen: set[float] = set()
    gone, late = 0, 0
    for t, result in enumerate(play(env, draw_actions(env.action_space, 1200), seed=0)):
        tokens = result[0]
        is_noise = tokens[:, 1] == 5
        seen |= set(tokens[~is_noise & (tokens[:, 1] != 0), 0].tolist())
        assert set(tokens[is_noise, 0].tolist()) <= seen
        if t == 0:
            early = set(seen)
        if t > 1000:
            late += int(is_noise.sum())
            gone += sum(value in early for value in tokens[is_noise, 0].tolist())
    assert gone < 0.1 * late  # what was seen at first does not stay


class Blank(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Tokens of which none but the query carries signal at a reset."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        tokens, info = self.env.reset(seed=seed, options=options)
        return tokens, info | {"signal_mask": np.arange(len(tokens)) == 0}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("num_envs", [0, 2])
def test_a_seed_forgets_what_was_seen_before_it(num_envs: int, frozen: bool) -> None:
    def make() -> Any:
        return Blank(wrappers.TokenizeObservation(gymnasium.make("CartPole-v1")))

    module, base = (vector, gymnasium.vector.SyncVectorEnv([make] * num_envs)) if num_envs else (wrappers, make())
    env: Any = module.AddNoiseTokens(base, 3, "marginal", frozen=frozen, shuffle=False)
    first, *_, last = play(env, draw_actions(env.action_space, 3), seed=0)
    assert not first[0][..., 5:, 0].any() and last[0][..., 5:, 0].any() != frozen
    assert_same(env.reset(seed=0)[0], first[0])


def test_signal_that_is_padding_or_noise_is_no_source() -> None:
    base = gymnasium.make("noisy_envs/SimpleTag-v0", num_obstacles=(0, 6))
    env = wrappers.AddNoiseTokens(base, 6, "marginal")
    signal = set()
    for result in play(env, draw_actions(env.action_space, 300), seed=0):
        tokens, mask = result[0], result[-1]["signal_mask"]
        signal |= {row.tobytes() for row in tokens[1:][mask[1:], :-1]}
        assert {row.tobytes() for row in noise_of(env, tokens)[:, :-1]} <= signal


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_a_range_is_drawn_once_an_episode(distribution: str) -> None:
    env = wrappers.AddNoiseTokens(single("cartpole"), (2, 5), distribution)
    counts = []
    for i in range(400):
        tokens, info = env.reset(seed=0 if i == 0 else None)
        counts.append(len(noise_of(env, tokens)))
        padding = tokens[tokens[:, 1] == -1]
        assert len(padding) == 5 - counts[-1] and not padding[:, 0].any()
        assert_same(env.token_spec.mask(tokens), tokens[:, 1] >= 0)
        assert info["snr"] == 5 / (5 + counts[-1]) and info["signal_mask"].sum() == 5
        if i < 20:
            for _ in range(5):
                assert len(noise_of(env, env.step(0)[0])) == counts[-1]
    tally = Counter(counts)
    assert set(tally) == {2, 3, 4, 5} and min(tally.values()) > 70


def test_signal_to_noise_ratio() -> None:
    env = wrappers.AddNoiseTokens(single("cartpole"), 28)
    assert env.reset(seed=0)[1]["snr"] == 5 / 33
    env = wrappers.AddNoiseTokens(gymnasium.make(TAG), 28)  # predator, 3 prey; 4 obstacles are noise already
    tokens, info = env.reset(seed=0)
    assert info["snr"] == 4 / 36
    assert_same(info["signal_mask"], np.isin(tokens[:, -1], [0, 2, 3]))
    assert wrappers.AddNoiseTokens(single("cartpole"), 0).reset(seed=0)[1]["snr"] == 1.0


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_bounds_of_marginal_noise_are_scaled(scale: float) -> None:
    for base in ("pendulum", "tag", "cartpole"):
        bare = single(base)
        env = wrappers.AddNoiseTokens(bare, 4, "marginal", scale, shuffle=False)
        box, inner = env.observation_space, bare.observation_space
        assert_same(box.high[-4:, :-1], np.tile(inner.high[1:, :-1].max(axis=0) * np.float32(scale), (4, 1)))
        assert_same(box.low[-4:, :-1], np.tile(inner.low[1:, :-1].min(axis=0) * np.float32(scale), (4, 1)))


def test_noise_is_named() -> None:
    tag = wrappers.AddNoiseTokens(gymnasium.make(TAG), (1, 2)).token_spec
    assert tag.roles == {"self": 0, "obstacle": 1, "predator": 2, "prey": 3, "noise": 4} and tag.padded
    centroid = wrappers.AddNoiseTokens(gymnasium.make("noisy_envs/SimpleCentroid-1v3v28-v0"), 2)
    assert centroid.token_spec.roles == centroid.unwrapped.token_spec.roles and not centroid.token_spec.padded
    twice = wrappers.AddNoiseTokens(wrappers.AddNoiseTokens(gymnasium.make(TAG), 3), 2)
    assert twice.token_spec.roles == tag.roles and twice.token_spec.num_tokens == 8 + 5
    tokens, info = twice.reset(seed=0)
    assert (tokens[:, -1] == 4).sum() == 5 and info["signal_mask"].sum() == 4


@pytest.mark.parametrize("noise_role", ["own", "signal"])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("backend", ["single", "numpy", "torch"])
def test_more_noise_leaves_the_first_as_they_are(
    distribution: str, frozen: bool, backend: str, noise_role: str
) -> None:
    if backend == "torch":
        pytest.importorskip("torch")

    def shown(count: Any, shuffle: bool) -> list[np.ndarray]:
        env: Any = gymnasium.make(TAG) if backend == "single" else gymnasium.make_vec(TAG, 3, backend=backend)
        env = noisy_tokens(env, count, distribution, frozen=frozen, shuffle=shuffle, noise_role=noise_role)
        env.reset(seed=0)
        action = to_backend(still(env.action_space), backend)
        return [as_numpy(env.step(action)[0]).reshape(-1, env.token_spec.num_tokens, 5) for _ in range(4)]

    for few, many in ((1, 8), (8, 64), ((8, 8), (8, 64))):
        for a, b in zip(shown(few, False), shown(many, False), strict=True):
            assert_same(a, b[:, : a.shape[1]])
        for a, b in zip(shown(few, True), shown(many, True), strict=True):  # the same values, at other places
            for ours, theirs in zip(a, b, strict=True):
                assert {row.tobytes() for row in ours} <= {row.tobytes() for row in theirs}


@each_base
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_frozen_noise_is_drawn_once_an_episode(base: str, distribution: str) -> None:
    env = wrappers.AddNoiseTokens(tokens_of(wrappers, base, gymnasium.make(BASES[base])), 6, distribution, frozen=True)
    episodes = []
    for i in range(3):
        tokens = env.reset(seed=0 if i == 0 else None)[0]
        episodes.append(noise_of(env, tokens).tobytes())
        for _ in range(4):
            later, _, terminated, truncated, _ = env.step(still(env.action_space))
            assert_same(later[:, -1], tokens[:, -1])  # the places too
            assert noise_of(env, later).tobytes() == episodes[-1]
            if terminated or truncated:
                break
    assert len(set(episodes)) == 3


@each_base
@pytest.mark.parametrize("distribution", ["gaussian", "uniform", "marginal"])
def test_other_noise_is_drawn_in_each_step(base: str, distribution: str) -> None:
    env = wrappers.AddNoiseTokens(
        tokens_of(wrappers, base, gymnasium.make(BASES[base])), 6, distribution, shuffle=False
    )
    env.reset(seed=0)
    seen = [noise_of(env, env.step(still(env.action_space))[0]).tobytes() for _ in range(5)]
    assert len(set(seen)) == 5


@each_base
def test_without_shuffling_the_signal_is_left_in_place(base: str) -> None:
    env, bare = single(base, "unshuffled"), single(base)
    count = bare.get_wrapper_attr("token_spec").num_tokens
    actions = draw_actions(env.action_space, 20)
    for ours, theirs in zip(play(env, actions, seed=0), play(bare, actions, seed=0), strict=True):
        assert_same(ours[0][:count], theirs[0])
        assert_same(ours[-1]["signal_mask"][:count], theirs[-1]["signal_mask"])
        assert not ours[-1]["signal_mask"][count:].any()


def test_noise_is_not_of_the_games_chance_nor_of_another_layers() -> None:
    inner = wrappers.AddNoiseTokens(gymnasium.make(TAG), 8, "uniform", shuffle=False)
    env = wrappers.AddNoiseTokens(inner, 8, "uniform", shuffle=False)
    rows = np.array([env.reset(seed=seed)[0] for seed in range(300)])[..., :4]  # (300, 24, 4)
    drawn = rows.reshape(300, -1)
    drawn = drawn[:, drawn.std(axis=0) > 0]
    related = abs(np.corrcoef(drawn.T) - np.eye(drawn.shape[1]))
    game = np.arange(drawn.shape[1]) < drawn.shape[1] - 64
    assert related[~game].max() < 0.35  # 64 columns of noise with all others: chance gives at most about 0.25
    assert (related[game][:, game] > 0.35).sum() < related.size  # shapes alone


@pytest.mark.parametrize("marker", [0, -2, 2])
def test_roles_are_the_last_column(marker: int) -> None:
    features, roles = ("role", "x"), {"self": 0, "thing": 1}
    with pytest.raises(ValueError, match=f"feature={marker}: expected -1 or 1, as there are roles"):
        TokenSpec(3, features, roles, padding_feature=marker)
    for last in (-1, 1):
        assert TokenSpec(3, features, roles, padding_feature=last).mask(np.zeros((3, 2))).all()
    assert TokenSpec(3, features, {}, padding_feature=0).mask(np.zeros((3, 2))).all()


def test_games_without_roles() -> None:
    for noise in (4, (1, 4)):
        for distribution in ("uniform", "marginal"):
            env = wrappers.AddNoiseTokens(gymnasium.make("noisy_envs/BoxWorldEntities-v0"), noise, distribution)
            spec = env.token_spec
            assert spec.roles == {} and spec.padded and spec.padding_feature == 0
            for result in play(env, draw_actions(env.action_space, 40), seed=0):
                tokens, info = result[0], result[-1]
                assert tokens in env.observation_space
                present, signal = spec.mask(tokens), info["signal_mask"]
                assert info["snr"] == signal.sum() / present.sum() and not (signal & ~present).any()
                if noise == 4:
                    assert (present & ~signal).sum() >= 4
                assert (tokens[~present] == -1).all()


def test_noise_without_role_is_never_taken_for_padding() -> None:
    from noisy_envs.wrappers import noise as rules

    env = gymnasium.make("noisy_envs/BoxWorldEntities-v0")
    rule = rules.AddNoise(
        env.observation_space,
        env.unwrapped.token_spec,
        env.action_space,
        1,
        rules.NoiseOptions(2, "uniform", shuffle=False),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            rules, "draw_uniforms", lambda moment, counts, like: [np.zeros((1, n), np.float32) for n in counts]
        )
        moment = rules.Moment(*(np.zeros(size, np.int64) for size in (1, 1, 1, (1, 2), 1)))
        shown, _ = rule.apply(env.reset(seed=0)[0][None], np.ones((1, 8), bool), moment)
    assert rule.spec.mask(shown[0, 8:]).all() and (shown[0, 8:, 1:] == -1).all()


def test_gaussian_noise_stays_within_its_bounds() -> None:
    from noisy_envs.wrappers import transforms as rules

    most = np.float32(1 - 2.0**-24)
    u = np.array([[most, most, 0.0, 0.5, 0.0, 0.5]], np.float32)[:, [0, 1, 4, 2, 3, 2]]
    values = rules.box_muller(u[:, :3], u[:, 3:])
    assert np.isfinite(values).all() and abs(values).max() > 5.7
    for scale in (1.0, 0.3, 7e3):
        env = wrappers.AddNoiseTokens(single("cartpole"), 1, scale=scale, shuffle=False)
        high = env.observation_space.high[-1, 0]
        assert abs(values * scale).max() <= high < 5.78 * scale


# ShuffleTokens


@pytest.mark.parametrize("stack", ["shuffle", "gaussian", "range", "frozen"])
def test_places_are_uniform_and_the_query_fixed(stack: str) -> None:
    envs = around("cartpole", stack, sync("cartpole", 64, steps=1))
    seen = [result[0][..., 1] for result in play(envs, draw_actions(envs.action_space, 100), seed=0)]
    roles = np.array(seen[::2])  # of two steps one is a reset
    count = envs.token_spec.num_tokens
    assert not roles[..., 0].any()
    places = np.stack([(roles == role).argmax(axis=-1) for role in range(1, 5)], axis=-1).reshape(-1, 4)
    for column in places.T:
        counts = np.bincount(column, minlength=count)[1:]
        assert chi_square(counts) < 26  # with at most 8: above in 0.1%
    pairs = Counter(map(tuple, places[:, :2].tolist()))
    assert len(pairs) == (count - 1) * (count - 2)
    assert chi_square(np.array(list(pairs.values()))) < 105  # with at most 71: above in 0.5%
    again = (roles[1:] == roles[:-1]).all(axis=-1).mean()
    assert again < 0.1


def test_shuffling_moves_rows_whole_and_in_each_step() -> None:
    env, bare = single("tag", "shuffle"), single("tag")
    actions = draw_actions(env.action_space, 40)
    orders = set()
    for ours, theirs in zip(play(env, actions, seed=0), play(bare, actions, seed=0), strict=True):
        a, b = ours[0], theirs[0]
        order = [int(np.flatnonzero((b == row).all(axis=1))[0]) for row in a]
        assert sorted(order) == list(range(8)) and order[0] == 0
        assert_same(ours[-1]["signal_mask"], theirs[-1]["signal_mask"][order])
        assert ours[-1]["snr"] == theirs[-1]["snr"]
        orders.add(tuple(order))
    assert len(orders) > 38


def test_each_world_has_its_own_order() -> None:
    envs = vector.ShuffleTokens(vector.TokenizeObservation(sync("cartpole", 8)))
    tokens, _ = envs.reset(seed=0)
    assert len({tuple(row) for row in tokens[..., 1].tolist()}) > 5


@pytest.mark.parametrize("query", [0, 2, 7])
def test_any_row_can_be_the_query(query: int) -> None:
    from noisy_envs.wrappers.transforms import random_order

    u = np.random.default_rng(0).random((500, 7))
    order = random_order(u, query)
    assert (order[:, query] == query).all()
    assert (np.sort(order, axis=1) == np.arange(8)).all()
    assert len(np.unique(order[:, (query + 1) % 8])) == 7


# TokensAndMask, FlattenTokens


@each_base
def test_mask_and_flat_tokens_are_those_below(base: str) -> None:
    below, masked, flat = (single(base, "range") for _ in range(3))
    masked, flat = wrappers.TokensAndMask(masked), wrappers.FlattenTokens(flat)
    actions = draw_actions(below.action_space, 30)
    results = (play(env, actions, seed=0) for env in (below, masked, flat))
    for plain, both, line in zip(*results, strict=True):
        assert_same(both[0]["tokens"], plain[0])
        assert_same(both[0]["mask"], plain[0][:, -1] != -1)
        assert_same(line[0], plain[0].ravel())
        assert_same(both[1:], plain[1:])
    assert flat.token_spec == masked.token_spec == below.token_spec
    space = masked.observation_space
    assert space["mask"].shape == (below.token_spec.num_tokens,) and space["mask"].dtype == np.bool_


def test_where_nothing_is_padded_no_token_is_masked() -> None:
    env = wrappers.TokensAndMask(gymnasium.make("noisy_envs/BoxWorldPixels-v0"))
    assert env.reset(seed=0)[0]["mask"].all() and not env.token_spec.padded


# torch


@each_mode
@pytest.mark.parametrize("stack", [stack for stack in STACKS if stack != "tokens"])
def test_tensors_are_as_arrays(stack: str, mode: AutoresetMode) -> None:
    torch = pytest.importorskip("torch")
    options: dict[str, Any] = {"max_episode_steps": 9, "autoreset_mode": mode}
    numpy, tensors = (
        around("tag", stack, gymnasium.make_vec(TAG, 3, backend=one, **options)) for one in ("numpy", "torch")
    )
    finals = 0
    for a, b in zip(playing(numpy, 25), playing(tensors, 25, backend="torch"), strict=True):
        pairs = [(a[0], b[0]), (a[-1]["signal_mask"], b[-1]["signal_mask"]), (a[-1]["snr"], b[-1]["snr"])]
        pairs.append((a[-1]["_signal_mask"], b[-1]["_signal_mask"]))
        if "final_obs" in a[-1]:
            finals += 1
            rows = np.flatnonzero(a[-1]["_final_obs"])
            assert_same(as_numpy(b[-1]["_final_obs"]), a[-1]["_final_obs"])
            pairs += [(a[-1]["final_obs"][i], _row(b[-1]["final_obs"], i)) for i in rows]
            pairs += [(a[-1]["final_info"][name], b[-1]["final_info"][name]) for name in ("signal_mask", "snr")]
        for x, y in pairs:
            for left, right in zip(arrays_in([x]), _tensors(y), strict=True):
                assert isinstance(right, torch.Tensor) and right.shape == left.shape
                assert right.dtype == {"f": torch.float32, "b": torch.bool}[left.dtype.kind]
                np.testing.assert_allclose(as_numpy(right), left, atol=2e-5)
    assert (finals > 0) == (mode is SAME_STEP)


@pytest.mark.parametrize("distribution", SAMPLED)
@pytest.mark.parametrize("frozen", [False, True])
def test_use_in_inference_mode_does_not_bar_later_use(frozen: bool, distribution: str) -> None:
    torch = pytest.importorskip("torch")
    envs = gymnasium.make_vec(TAG, 2, backend="torch")
    noisy = vector.AddNoiseTokens(envs, 3, distribution, frozen=frozen, noise_role="signal")
    action = torch.zeros(envs.action_space.shape, dtype=torch.int64)
    with torch.inference_mode():
        noisy.reset(seed=0)
        noisy.step(action)
    noisy.reset(seed=0)
    for _ in range(3):
        noisy.step(action)


def _row(batch: Any, i: int) -> Any:
    return {name: part[i] for name, part in batch.items()} if isinstance(batch, dict) else batch[i]


def _tensors(result: Any) -> list[Any]:
    return list(result.values()) if isinstance(result, dict) else [result]


# all in one call


NOISES: list[dict[str, Any]] = [
    {"num_noise": 28},
    {"num_noise": 0},
    {"num_noise": (0, 5), "distribution": "marginal", "scale": 0.5, "frozen": True, "shuffle": False},
    {"num_noise": 2, "distribution": "uniform", "squash": True},
]


@pytest.mark.parametrize("options", NOISES, ids=str)
@each_base
def test_one_call_makes_an_environment_noisy(base: str, options: dict[str, Any]) -> None:
    outer = {name: value for name, value in options.items() if name != "squash"}
    squash = options.get("squash", False)

    def by_hand(module: Any, env: Any) -> Any:
        return module.AddNoiseTokens(env if base == "tag" else module.TokenizeObservation(env, squash), **outer)

    made = [(wrappers, gymnasium.make(BASES[base]), gymnasium.make(BASES[base]))]
    kinds = ["sync"] if base in ("dict", "pendulum") else ["sync", "vector_entry_point"]
    made += [(vector, sync(base, kind=kind), sync(base, kind=kind)) for kind in kinds]
    for module, env, twin in made:
        ours, theirs = noisy_tokens(env, **options), by_hand(module, twin)
        assert type(ours) is type(theirs) and ours.observation_space == theirs.observation_space
        actions = draw_actions(ours.action_space, 20)
        assert_same(play(ours, actions, seed=0), play(theirs, actions, seed=0))


def test_one_call_makes_tensors_noisy(backend: str) -> None:
    envs = noisy_tokens(gymnasium.make_vec(TAG, 2, backend=backend), 28)
    tokens, info = envs.reset(seed=0)
    assert tokens.shape == (2, 36, 5) and info["signal_mask"].shape == (2, 36)
    assert as_numpy(info["snr"]).tolist() == pytest.approx([4 / 36] * 2)


def test_meaning_is_found_below_the_wrappers_of_others() -> None:
    for noise in (0, 28):
        env = noisy_tokens(gymnasium.make("CartPole-v1"), noise)
        envs = noisy_tokens(gymnasium.make_vec("CartPole-v1", 2), noise)
        spec = env.token_spec
        assert spec.num_tokens == 5 + noise and list(spec.roles)[-1] == "noise"
        assert spec_of(gymnasium.wrappers.RecordEpisodeStatistics(env)) == spec
        assert spec_of(RecordEpisodeStatistics(envs)) == spec_of(envs) == spec
    ours = gymnasium.make(TAG)
    assert spec_of(gymnasium.make_vec(TAG, 2)) == spec_of(ours) == ours.unwrapped.token_spec
    with pytest.raises(ValueError, match=r"CartPole.*expected an environment with a token_spec"):
        spec_of(gymnasium.make_vec("CartPole-v1", 2))


@pytest.mark.parametrize("name", [*NAMES, "noisy_tokens"])
def test_what_is_no_environment_of_the_kind_is_refused(name: str) -> None:
    options = NAMES.get(name, {"num_noise": 1})
    env, envs = gymnasium.make(TAG), gymnasium.make_vec(TAG, 2)
    with pytest.raises(TypeError, match=r"'CartPole-v1': expected a gymnasium.Env$"):
        getattr(wrappers, name)("CartPole-v1", **options)
    if name == "noisy_tokens":
        return
    with pytest.raises(
        TypeError, match=r"expected a gymnasium.Env; noisy_envs.wrappers.vector has the wrappers of vec"
    ):
        getattr(wrappers, name)(envs, **options)
    with pytest.raises(TypeError, match=r"expected a gymnasium.vector.VectorEnv; noisy_envs.wrappers has the wrappers"):
        getattr(vector, name)(env, **options)
    with pytest.raises(TypeError, match=r"'CartPole-v1': expected a gymnasium.vector.VectorEnv$"):
        getattr(vector, name)("CartPole-v1", **options)


# specs


@each_case
def test_a_spec_makes_the_same_again(base: str, stack: str) -> None:
    env = single(base, stack)
    written = EnvSpec.from_json(env.spec.to_json())
    actions = draw_actions(env.action_space, 5)
    here = play(env, actions, seed=0)
    for spec in (env.spec, written):
        assert_same(play(gymnasium.make(spec), actions, seed=0), here)


def test_vector_environments_can_be_made_with_wrappers() -> None:
    wrap = [wrappers.TokenizeObservation, lambda env: wrappers.AddNoiseTokens(env, 3)]
    envs = gymnasium.make_vec("CartPole-v1", 2, "sync", wrappers=wrap)
    assert envs.reset(seed=0)[0].shape == (2, 8, 2)
    noisy = around("cartpole", "gaussian", sync("cartpole"))
    assert noisy._saved_kwargs["num_noise"] == 4


# errors


@pytest.mark.parametrize(
    ("space", "error"),
    [
        (spaces.Sequence(spaces.Discrete(2)), r"Sequence\(Discrete\(2\).*expected a space that can be flattened"),
        (
            spaces.Dict({"a.b": spaces.Discrete(2), "a": spaces.Dict({"b": spaces.Discrete(2)})}),
            "features with different names",
        ),
    ],
    ids=["sequence", "names"],
)
def test_what_is_not_flat_is_refused(space: spaces.Space[Any], error: str) -> None:
    env = gymnasium.Env[Any, Any]()
    env.observation_space, env.action_space = space, spaces.Discrete(2)
    with pytest.raises(ValueError, match=error):
        wrappers.TokenizeObservation(env)


@pytest.mark.parametrize("module", [wrappers, vector])
def test_options_are_checked(module: Any) -> None:
    env = tokens_of(module, "cartpole", gymnasium.make("CartPole-v1") if module is wrappers else sync("cartpole"))
    for options, error in (
        ({"num_noise": -1}, "num_noise=-1: expected at least 0"),
        ({"num_noise": (3, 1)}, r"num_noise=\(3, 1\).*low <= high"),
        ({"num_noise": 1, "distribution": "gausian"}, "distribution='gausian': expected one of 'gaussian', 'uniform'"),
        ({"num_noise": 1, "scale": 0}, "scale=0: expected a number above 0"),
        ({"num_noise": 1, "scale": float("nan")}, "scale=nan: expected a finite number"),
    ):
        with pytest.raises(ValueError, match=error):
            module.AddNoiseTokens(env, **options)
    for options, error in (
        ({"num_noise": 1.5}, "num_noise=1.5: expected an integer or a range"),
        ({"num_noise": 1, "frozen": 1}, "frozen=1: expected True or False"),
        ({"num_noise": 1, "shuffle": None}, "shuffle=None: expected True or False"),
    ):
        with pytest.raises(TypeError, match=error):
            module.AddNoiseTokens(env, **options)
    with pytest.raises(TypeError, match="squash='yes': expected True or False"):
        module.TokenizeObservation(env.env, squash="yes")


@pytest.mark.parametrize("num_envs", [0, 2])
def test_numpys_numbers_are_taken_as_pythons(num_envs: int) -> None:
    def made(**options: Any) -> Any:
        env: Any = gymnasium.make_vec("CartPole-v1", num_envs) if num_envs else gymnasium.make("CartPole-v1")
        return noisy_tokens(env, **options)

    ours = made(num_noise=np.int64(2), scale=np.float32(0.5), frozen=np.True_, shuffle=np.False_, squash=np.array(True))
    theirs = made(num_noise=2, scale=0.5, frozen=True, shuffle=False, squash=True)
    assert ours.observation_space == theirs.observation_space
    assert_same(*(play(env, draw_actions(env.action_space, 3), seed=0) for env in (ours, theirs)))


SCALED = {
    "normalized": gymnasium.wrappers.NormalizeObservation,
    "rescaled": lambda env: gymnasium.wrappers.RescaleObservation(env, np.float32(0), np.float32(1)),
    "transformed": lambda env: gymnasium.wrappers.TransformObservation(env, np.positive, spaces.Box(-9, 9, (8, 5))),
}


@pytest.mark.parametrize("name", SCALED)
def test_tokens_that_a_wrapper_scaled_are_refused(name: str) -> None:
    """Their roles would be numbers that no spec knows, and padding would count as tokens."""
    scaled = SCALED[name](gymnasium.make(TAG))
    for env in (scaled, gymnasium.vector.SyncVectorEnv([lambda: scaled] * 2)):
        with pytest.raises(ValueError, match="expected unchanged bounds of the token feature 'role'"):
            noisy_tokens(env, 2)
        with pytest.raises(ValueError, match="scale features before they become tokens, or not at all"):
            spec_of(env)
    kept = gymnasium.wrappers.TransformObservation(
        gymnasium.make(TAG), np.positive, gymnasium.make(TAG).observation_space
    )
    assert noisy_tokens(kept, 2).reset(seed=0)[0].shape == (10, 5)


def test_vectors_that_a_wrapper_scaled_are_refused() -> None:
    plain = gymnasium.make_vec(TAG, 2)
    envs = gymnasium.wrappers.vector.NormalizeObservation(plain)
    if envs.single_observation_space == plain.single_observation_space:
        pytest.skip("this Gymnasium's wrapper does not tell that it changes the bounds")
    for ask in (spec_of, lambda env: noisy_tokens(env, 2)):
        with pytest.raises(ValueError, match="expected unchanged bounds of the token feature 'role'"):
            ask(envs)


def test_flat_and_stacked_tokens_are_refused_where_they_are_scaled() -> None:
    """What keeps the bounds is not: it shows the same tokens in another shape."""
    spec = gymnasium.make(TAG).unwrapped.token_spec
    shapes: list[Callable[[Any], Any]] = [
        gymnasium.wrappers.FlattenObservation,
        wrappers.FlattenTokens,
        lambda env: gymnasium.wrappers.FrameStackObservation(env, 3),
        lambda env: gymnasium.wrappers.FrameStackObservation(wrappers.FlattenTokens(env), 3),
        wrappers.TokensAndMask,
    ]
    for shape in shapes:
        env = shape(gymnasium.make(TAG))
        assert spec_of(env) == spec
        if env.observation_space.shape is not None:
            with pytest.raises(ValueError, match="expected unchanged bounds of the token feature 'role'"):
                spec_of(gymnasium.wrappers.NormalizeObservation(env))
    envs = gymnasium.make_vec(TAG, 2, learners="all")
    assert spec_of(envs) == spec
    normalized = gymnasium.wrappers.vector.NormalizeObservation(envs)
    if normalized.single_observation_space != envs.single_observation_space:  # older ones of Gymnasium do not tell
        with pytest.raises(ValueError, match="expected unchanged bounds of the token feature 'role'"):
            spec_of(normalized)


def test_features_are_normalized_before_they_become_tokens() -> None:
    env = noisy_tokens(gymnasium.wrappers.NormalizeObservation(gymnasium.make("CartPole-v1")), (0, 4))
    spec = spec_of(env)
    for tokens, *_ in play(env, draw_actions(env.action_space, 20), seed=0):
        spec.check(tokens)
        assert spec.mask(tokens).sum() >= 5


def test_a_library_that_scales_roles_is_told() -> None:
    """As Stable-Baselines3's VecNormalize does, whose bounds stay: nothing but what it shows betrays it."""
    for env in (single("tag", "range"), single("cartpole", "range")):
        spec, (tokens, _) = spec_of(env), env.reset(seed=0)
        spec.check(tokens)
        for scaled in (tokens * np.float32(0.5), tokens - np.float32(0.1), tokens * np.float32("nan"), tokens + 9):
            with pytest.raises(ValueError, match=r"tokens: expected padding or a role .* as feature 'role', got"):
                spec.check(scaled)
    gymnasium.make("noisy_envs/BoxWorldPixels-v0").unwrapped.token_spec.check(tokens)  # it has no roles


@pytest.mark.parametrize("stack", ["mask", "range"])
def test_stable_baselines_scales_neither_masks_nor_roles_unseen(stack: str) -> None:
    vec_env = pytest.importorskip("stable_baselines3.common.vec_env")
    envs = vec_env.DummyVecEnv([lambda: single("cartpole", stack)] * 3)
    if stack == "mask":
        with pytest.raises(ValueError, match="but mask is of type MultiBinary"):
            vec_env.VecNormalize(envs)
    tokens = vec_env.VecNormalize(envs, norm_obs_keys=["tokens"] if stack == "mask" else None).reset()
    spec, rewards_alone = envs.get_attr("token_spec")[0], vec_env.VecNormalize(envs, norm_obs=False).reset()
    with pytest.raises(ValueError, match="scale features before they become tokens, or not at all"):
        spec.check(tokens["tokens"] if stack == "mask" else tokens)
    spec.check(rewards_alone["tokens"] if stack == "mask" else rewards_alone)
    if stack == "mask":
        assert rewards_alone["mask"].dtype == np.bool_


class Signs(gymnasium.Env[Any, Any]):
    """Tokens without roles or padding, the last of whose numbers is −1."""

    observation_space, action_space = spaces.Box(-1, 1, (3, 2)), spaces.Discrete(2)
    token_spec = TokenSpec(3, ("x", "sign"), {}, padded=False)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.float32([[0.5, -1]] * 3), {}


def test_tokens_that_look_like_padding_get_no_noise_of_a_range() -> None:
    with pytest.raises(
        ValueError, match=r"num_noise=\(2, 3\): expected one number, or .*'sign' may be -1 without being"
    ):
        noisy_tokens(Signs(), (2, 3))
    pixels = noisy_tokens(gymnasium.make("noisy_envs/BoxWorldPixels-v0"), (2, 3))  # whose colours are from 0 to 1
    for result in play(pixels, draw_actions(pixels.action_space, 9), seed=0):
        assert result[0] in pixels.observation_space and pixels.token_spec.mask(result[0]).sum() in (52, 53)
    noisy = noisy_tokens(Signs(), 2, "marginal", shuffle=False)
    noisy.reset(seed=0)
    tokens, info = noisy.reset(options={"episode": 1})
    assert info["snr"] == 0.6 and noisy.token_spec.mask(tokens).all()
    assert (tokens[3:] == tokens[0]).all()  # drawn as they are, not as if −1 were padding


@pytest.mark.parametrize("name", [name for name in NAMES if name != "TokenizeObservation"])
def test_what_is_no_token_is_refused(name: str) -> None:
    options: dict[str, Any] = NAMES[name]
    for module, plain in ((wrappers, gymnasium.make("CartPole-v1")), (vector, sync("cartpole"))):
        with pytest.raises(ValueError, match="expected an environment with a token_spec; TokenizeObservation adds one"):
            getattr(module, name)(plain, **options)
        flat = module.FlattenTokens(module.TokenizeObservation(plain))
        with pytest.raises(
            ValueError, match=r"expected a float32 Box of one agent's tokens \(5, 2\), got float32 Box \(10,\)$"
        ):
            getattr(module, name)(flat, **options)
    with pytest.raises(ValueError, match="expected an environment with a token_spec"):
        getattr(wrappers, name)(gymnasium.make("noisy_envs/BoxWorld-v0", observation="rgb"), **options)
    team = gymnasium.make_vec(TAG, 2, learners="prey")
    with pytest.raises(ValueError, match=r"expected a float32 Box of one agent's tokens \(8, 5\)"):
        getattr(vector, name)(team, **options)


@pytest.mark.parametrize("base", ["cartpole", "tag"])
def test_options_must_be_a_dictionary(base: str) -> None:
    told = r"^options=\[1\]: expected a dictionary, for example {'episode': 0}$"
    for env in (
        single(base, "gaussian"),
        gymnasium.make(TAG),
        around(base, "gaussian", sync(base)),
        gymnasium.make_vec(TAG, 2),
    ):
        with pytest.raises(TypeError, match=told):
            env.reset(options=[1])


@pytest.mark.parametrize("space", [spaces.Dict(), spaces.Box(-1, 1, (0,)), spaces.Dict(a=spaces.Tuple(()))], ids=str)
def test_a_space_without_a_number_has_no_tokens(space: spaces.Space[Any]) -> None:
    env = gymnasium.make("CartPole-v1").unwrapped
    env.observation_space = space
    with pytest.raises(ValueError, match="expected at least one number"):
        noisy_tokens(env, 2)


def test_the_signal_of_others_may_be_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.zeros((3, 2), np.float32)
    info = {"signal_mask": [True, False, True]}
    monkeypatch.setattr(Signs, "reset", lambda self, *, seed=None, options=None: (tokens, info))
    assert noisy_tokens(Signs(), 2).reset(seed=0)[1]["snr"] == 0.4
    assert wrappers.ShuffleTokens(Signs()).reset(seed=0)[1]["signal_mask"].sum() == 2
    info["signal_mask"] = [True, False]
    told = r"info\['signal_mask'\]: expected shape \(3,\), a bool for each token, got \(2,\)"
    for wrap in (wrappers.ShuffleTokens, lambda env: noisy_tokens(env, 2)):
        with pytest.raises(ValueError, match=told):
            wrap(Signs()).reset(seed=0)


def test_seeds_are_checked_before_anything_changes() -> None:
    for seed, error in ((-1, ValueError), (1.5, TypeError), (2**63, ValueError)):
        env, twin = single("cartpole", "marginal"), single("cartpole", "marginal")
        for one in (env, twin):
            one.reset(seed=0)
        with pytest.raises(error, match="seed="):
            env.reset(seed=seed)
        assert_same(env.step(0), twin.step(0))
        assert_same(env.reset(), twin.reset())
    single("cartpole", "gaussian").reset(seed=2**63 - 1)
    envs = around("cartpole", "gaussian", sync("cartpole"))
    with pytest.raises(ValueError, match="seed: expected 3 seeds, one for each environment, got 2"):
        envs.reset(seed=[1, 2])
    with pytest.raises(RuntimeError, match="the first reset must be of all environments"):
        envs.reset(options={"reset_mask": np.array([True, False, False])})
    envs.reset(seed=0)
    with pytest.raises(ValueError, match=r"reset_mask.*expected bool"):
        envs.reset(options={"reset_mask": np.array([1, 0, 0])})


@pytest.mark.parametrize("base", ["cartpole", "tag"])
def test_a_step_before_the_first_reset_is_refused(base: str) -> None:
    for env in (single(base, "gaussian"), around(base, "gaussian", sync(base))):
        with pytest.raises(RuntimeError, match=r"call reset\(\) first"):
            env.step(env.action_space.sample())


def test_vectors_must_tell_their_mode() -> None:
    envs = sync("cartpole")
    envs.metadata = {}
    with pytest.raises(ValueError, match=r"metadata\['autoreset_mode'\]=None: expected an AutoresetMode"):
        vector.TokenizeObservation(envs)
