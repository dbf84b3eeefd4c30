"""Kinds of noise: what tells them from signal, to a classifier that sees what the agent sees, and what they are."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers import assert_same, draw_actions, play, to_backend

from noisy_envs import wrappers
from noisy_envs.arrays import as_numpy
from noisy_envs.tokens import TokenSpec
from noisy_envs.wrappers import noise, noisy_tokens, vector

BASES: dict[str, Any] = {
    "CartPole-v1": {"vectorization_mode": "sync"},
    "Pendulum-v1": {"vectorization_mode": "sync", "max_episode_steps": 30},
    "noisy_envs/SimpleTag-1v3v0-v0": {"max_episode_steps": 30},
}
each_base = pytest.mark.parametrize("base", BASES)
COPY = {"distribution": "copy", "scale": 0.0}  # exact copies
each_lookalike = pytest.mark.parametrize(
    "options", [{"distribution": "marginal"}, {"distribution": "replay"}, COPY], ids=lambda o: o["distribution"]
)


def make_vec(base: str, num_envs: int, **options: Any) -> Any:
    return noisy_tokens(gymnasium.make_vec(base, num_envs, **BASES[base]), **options)


def collect(base: str, steps: int = 260, unseen: int = 100, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Play 16 environments: pairs of successive tokens (T, B, N, 2 · D) and their mask of signal, without the query.

    The first steps are not returned: replayed noise needs earlier episodes.
    """
    envs = make_vec(base, 16, num_noise=6, **options)
    actions = draw_actions(envs.action_space, steps)
    results = play(envs, actions, seed=0)
    pairs = [np.concatenate([before[0], after[0]], axis=-1)[:, 1:] for before, after in pairwise(results[unseen:])]
    masks = [result[-1]["signal_mask"][:, 1:] for result in results[unseen + 1 :]]
    return np.stack(pairs), np.stack(masks)


def accuracy(rows: np.ndarray, is_signal: np.ndarray) -> float:
    """Return how often 15 nearest neighbours from the other half of the environments tell signal from noise.

    Rows (T, B, N, F), whose last feature is a role, and labels (T, B, N) are drawn at random, as much signal as noise:
    chance is 0.5.
    """
    chance = np.random.default_rng(0)
    halves = []
    for half in (slice(0, None, 2), slice(1, None, 2)):
        x, y = rows[:, half].reshape(-1, rows.shape[-1]), is_signal[:, half].ravel()
        count = min(1200, y.sum(), (~y).sum())
        drawn = np.concatenate([chance.choice(np.flatnonzero(y == kind), count, False) for kind in (True, False)])
        halves.append((x[drawn], y[drawn]))
    (known, labels), (asked, truth) = halves
    scale = known.std(axis=0) + 1e-9
    scale[-1] = 0.05  # another role is farther than any value
    known, asked = known / scale, asked / scale
    distance = (asked**2).sum(axis=1)[:, None] + (known**2).sum(axis=1) - 2 * asked @ known.T
    nearest = np.argpartition(distance, 15, axis=1)[:, :15]
    return float(((labels[nearest].mean(axis=1) > 0.5) == truth).mean())


def seen(tokens: np.ndarray) -> np.ndarray:
    """Return features of single tokens (..., D): values, how many bits at the end of each are 0, and the role."""
    values = np.ascontiguousarray(tokens[..., :-1], np.float32)
    zeros = sum((values.view(np.int32) & (1 << bits) - 1) == 0 for bits in (1, 4, 8, 12, 16))
    return np.concatenate([values, np.where(values == 0, 0, zeros), tokens[..., -1:]], axis=-1).astype(np.float64)


def latest(pairs: np.ndarray) -> np.ndarray:
    return pairs[..., pairs.shape[-1] // 2 :]


# which cue tells noise from signal


@each_base
@each_lookalike
def test_no_single_token_tells_noise_with_the_role_of_signal(base: str, options: dict[str, Any]) -> None:
    pairs, is_signal = collect(base, noise_role="signal", **options)
    assert 0.44 < accuracy(seen(latest(pairs)), is_signal) < 0.56


@pytest.mark.parametrize("distribution", noise.DISTRIBUTIONS)
def test_a_role_of_its_own_tells_noise(distribution: str) -> None:
    pairs, is_signal = collect("CartPole-v1", distribution=distribution)
    assert accuracy(seen(latest(pairs)), is_signal) > 0.99


@each_base
@pytest.mark.parametrize("distribution", ["gaussian", "uniform"])
def test_values_tell_noise_that_is_not_drawn_from_signal(base: str, distribution: str) -> None:
    pairs, is_signal = collect(base, distribution=distribution, noise_role="signal")
    assert 0.6 < accuracy(seen(latest(pairs)), is_signal) < 0.95
    is_noise, role = ~is_signal, latest(pairs)[..., -1:]
    assert 0.44 < accuracy(role.astype(np.float64), is_signal) < 0.56 and is_noise.any()  # but not the role


def test_the_classifier_sees_rounded_numbers() -> None:
    pairs, is_signal = collect("CartPole-v1", distribution="marginal", noise_role="signal")
    tokens = latest(pairs).copy()
    tokens[~is_signal] = tokens[~is_signal].astype(np.float16)
    assert accuracy(seen(tokens), is_signal) > 0.95


@each_base
def test_two_steps_tell_noise_that_jumps_but_not_what_is_replayed(base: str) -> None:
    found = {}
    for distribution in ("marginal", "replay"):
        pairs, is_signal = collect(base, distribution=distribution, noise_role="signal", shuffle=False)
        before, after = np.split(pairs.astype(np.float64), 2, axis=-1)
        found[distribution] = accuracy(np.concatenate([after - before, after], axis=-1), is_signal)
    assert found["marginal"] > 0.75 and 0.43 < found["replay"] < 0.57


@each_lookalike
def test_neither_place_nor_bounds_tell_noise(options: dict[str, Any]) -> None:
    envs = make_vec("CartPole-v1", 64, num_noise=(2, 6), noise_role="signal", **options)
    low, high = envs.single_observation_space.low, envs.single_observation_space.high
    assert (low[1:] == low[1]).all() and (high[1:] == high[1]).all()
    results = play(envs, draw_actions(envs.action_space, 60), seed=0)
    share = np.mean([result[-1]["signal_mask"][:, 1:] for result in results], axis=(0, 1))
    assert abs(share - 0.4).max() < 0.04  # 4 of 10 at each place
    padding = np.concatenate([result[0][result[0][..., -1] == -1] for result in results])
    assert not padding[:, 0].any()


# roles


@each_base
@pytest.mark.parametrize("distribution", noise.DISTRIBUTIONS)
@pytest.mark.parametrize("frozen", [False, True])
def test_noise_has_roles_of_signal_but_is_no_signal(base: str, distribution: str, frozen: bool) -> None:
    bare = gymnasium.make_vec(base, 3, **BASES[base])
    envs = make_vec(base, 3, num_noise=5, distribution=distribution, frozen=frozen, noise_role="signal", shuffle=False)
    inner = vector.TokenizeObservation(bare) if "Tag" not in base else bare
    spec = envs.token_spec
    assert spec.roles == inner.token_spec.roles and spec.num_tokens == inner.token_spec.num_tokens + 5
    results = play(envs, draw_actions(envs.action_space, 70), seed=0)
    for before, after in pairwise(results):
        tokens, info = after[0], after[-1]
        roles = tokens[:, -5:, -1]
        assert np.isin(roles, tokens[:, 1:-5, -1]).all()
        assert not info["signal_mask"][:, -5:].any() and info["signal_mask"][:, :-5].all()
        assert (info["snr"] == (spec.num_tokens - 5) / spec.num_tokens).all()
        spec.check(tokens)
        ended = before[2] | before[3] if len(before) == 5 else np.zeros(3, bool)
        if distribution != "marginal" or frozen:
            kept = (roles == before[0][:, -5:, -1]).all(axis=1)
            assert kept[~ended].all() or distribution == "replay"  # there another episode may go on


def test_roles_are_drawn_alike_for_each_token() -> None:
    envs = make_vec("CartPole-v1", 400, num_noise=3, noise_role="signal", shuffle=False)
    roles = envs.reset(seed=0)[0][:, -3:, -1]
    assert (abs(np.stack([(roles == role).mean(axis=0) for role in (1, 2, 3, 4)]) - 0.25) < 0.08).all()
    assert abs(np.corrcoef(roles.T) - np.eye(3)).max() < 0.2


def test_drawn_roles_are_kept_all_the_episode() -> None:
    """Even where the rows below are in another order in each step."""
    inner = wrappers.ShuffleTokens(wrappers.TokenizeObservation(gymnasium.make("Pendulum-v1", max_episode_steps=9)))
    env = wrappers.AddNoiseTokens(inner, 6, noise_role="signal", shuffle=False)
    first, *others = play(env, draw_actions(env.action_space, 20), seed=0)
    for t, result in enumerate(others, start=1):
        assert (result[0][-6:, 1] == first[0][-6:, 1]).all() or t >= 10
    assert (others[-1][0][-6:, 1] != first[0][-6:, 1]).any()


def test_before_any_signal_noise_has_the_role_of_the_query() -> None:
    class Silent(gymnasium.Env[Any, Any]):
        observation_space, action_space = spaces.Box(0, 9, (3, 2)), spaces.Discrete(2)
        token_spec = TokenSpec(3, ("x", "role"), {"self": 7, "thing": 2}, padded=False)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            tokens = np.float32([[0.5, 7], [3, 2], [4, 2]])
            return tokens, {"signal_mask": np.array([True, False, False])}

    for distribution in noise.SAMPLED:
        env = wrappers.AddNoiseTokens(Silent(), 2, distribution, 0.5, noise_role="signal", shuffle=False)
        tokens, _ = env.reset(seed=0)
        assert (tokens[3:, 1] == 7).all() and ((tokens[3:, 0] == 0).all() or distribution == "copy")
    env = wrappers.AddNoiseTokens(Silent(), 2, noise_role="signal", shuffle=False)
    assert (env.reset(seed=0)[0][3:, 1] == 7).all()


# replayed and copied tokens


class Count(gymnasium.Env[Any, Any]):
    """Observations are (100 · episode + step, its negative); the lengths of episodes repeat."""

    observation_space, action_space = spaces.Box(-1e6, 1e6, (2,)), spaces.Discrete(3, start=-1)

    def __init__(self, lengths: tuple[int, ...] = (6,)) -> None:
        self.lengths, self.episode = lengths, -1

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = 0 if seed is not None else self.episode + 1, 0
        return self._see(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        reward = self.np_random.normal()
        return self._see(), reward, self.t >= self.lengths[self.episode % len(self.lengths)], False, {}

    def _see(self) -> np.ndarray:
        return np.float32([1, -1]) * (100 * self.episode + self.t)


def episodes(env: Any, count: int, action: int = 0) -> Iterator[list[np.ndarray]]:
    """Play episodes, and yield the tokens of each."""
    for episode in range(count):
        tokens = [env.reset(seed=0 if episode == 0 else None)[0]]
        ended = False
        while not ended:
            token, _, ended, _, _ = env.step(action)
            tokens.append(token)
        yield tokens


def test_earlier_episodes_are_replayed_step_by_step() -> None:
    env = noisy_tokens(Count(), 8, "replay", noise_role="signal", shuffle=False)
    for episode, tokens in enumerate(episodes(env, 40)):
        for t, rows in enumerate(tokens):
            values, roles = rows[3:, 0], rows[3:, 1]
            assert (values * np.where(roles == 1, 1, -1) >= 0).all() and np.isin(roles, [1, 2]).all()
            if episode == 0:
                assert (abs(values) <= max(t - 1, 0)).all()
                continue
            assert (abs(values) % 100 == t).all()
            source = abs(values) // 100
            assert (source < episode).all() and (source >= episode - noise.REPLAY_EPISODES).all()
            assert t == 0 or (source == abs(tokens[t - 1][3:, 0]) // 100).all()  # the same one in all steps
            if episode >= 4:  # 4 episodes of 2 tokens are as many as noise tokens
                assert len({tuple(row) for row in rows[3:].tolist()}) == 8


def test_a_longer_episode_goes_on_when_the_replayed_one_ends() -> None:
    env = noisy_tokens(Count((2, 9, 4)), 8, "replay", noise_role="signal", shuffle=False)
    for episode, tokens in enumerate(episodes(env, 12)):
        for t, rows in enumerate(tokens):
            values = abs(rows[3:, 0])
            longest = max((env.unwrapped.lengths[i % 3] for i in range(episode)), default=99)
            if t <= longest and episode:
                assert (values % 100 == t).all()
    lonely = noisy_tokens(Count((2, 9)), 4, "replay", noise_role="signal", shuffle=False)
    *_, second = episodes(lonely, 2)
    assert [int(abs(rows[3, 0])) for rows in second] == [0, 1, 2] * 3 + [0]


@pytest.mark.parametrize("limit", [4, 5])
def test_only_the_last_steps_of_long_episodes_are_kept(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "REPLAY_STEPS", limit)
    env = noisy_tokens(Count((11,)), 3, "replay", noise_role="signal", shuffle=False)
    for episode, tokens in enumerate(episodes(env, 4)):
        assert env.unwrapped.episode == episode
        for rows in tokens[1:] if episode else []:
            assert (abs(rows[3:, 0]) % 100 > 11 - limit).all()
    assert env.get_wrapper_attr("_transform").store.values.shape[2] == limit


def test_large_tokens_leave_room_for_fewer_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "REPLAY_NUMBERS", 3 * noise.REPLAY_STEPS * 6)  # 3 episodes of 3 tokens (2,)
    env = noisy_tokens(Count(), 6, "replay", noise_role="signal", shuffle=False)
    for episode, tokens in enumerate(episodes(env, 9)):
        sources = {int(abs(value)) // 100 for rows in tokens for value in rows[3:, 0]}
        assert sources == ({0} if episode == 0 else set(range(max(0, episode - 3), episode)))


@pytest.mark.parametrize("delay", [0, 1, 3])
def test_copies_are_of_earlier_steps_of_the_episode(delay: int) -> None:
    env = noisy_tokens(Count(), 2, "copy", 0, noise_role="signal", delay=delay, shuffle=False)
    for episode, tokens in enumerate(episodes(env, 3)):
        for t, rows in enumerate(tokens):
            assert (abs(rows[3:, 0]) == 100 * episode + max(t - delay, 0)).all()
            assert sorted(rows[3:, 1]) == [1, 2]  # each signal token once


def test_copies_are_perturbed() -> None:
    envs = noisy_tokens(
        gymnasium.vector.SyncVectorEnv([Count] * 50), 2, "copy", 0.5, noise_role="signal", shuffle=False
    )
    results = play(envs, [np.zeros(50, int)] * 40, seed=0)
    errors = []
    for before, after in pairwise(results):
        rows = after[0][:, 3:]
        sign = np.where(rows[..., 1] == 1, 1, -1)
        errors.append(
            (rows[..., 0] * sign) - np.where(after[0][:, 1:2, 0] % 100 > 0, before[0][:, 1:2, 0], after[0][:, 1:2, 0])
        )
    assert abs(np.mean(errors)) < 0.03 and abs(np.std(errors) - 0.5) < 0.03


# correlation


@pytest.mark.parametrize("backend", ["single", "numpy", "torch"])
@pytest.mark.parametrize("correlation", ["reward", "action"])
def test_noise_follows_the_last_reward_or_action(correlation: str, backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    base = "noisy_envs/SimpleTag-v0"
    env: Any = gymnasium.make(base) if backend == "single" else gymnasium.make_vec(base, 3, backend=backend)
    options: dict[str, Any] = {"num_noise": 2, "scale": 0.3, "shuffle": False}
    env = noisy_tokens(env, **options, correlation=correlation)
    plain: Any = gymnasium.make(base) if backend == "single" else gymnasium.make_vec(base, 3, backend=backend)
    plain = noisy_tokens(plain, **options)
    assert_same(as_numpy(env.reset(seed=0)[0]), as_numpy(plain.reset(seed=0)[0]))
    for action in draw_actions(env.action_space, 60):
        given = action if backend == "single" else to_backend(action, backend)
        ours, reward, *_ = env.step(given)
        theirs = plain.step(given)[0]
        added = as_numpy(ours)[..., -2:, :] - as_numpy(theirs)[..., -2:, :]
        expected = as_numpy(reward if correlation == "reward" else action)
        np.testing.assert_allclose(added[..., 0], np.stack([expected] * 2, axis=-1), atol=1e-5)
        assert not added[..., 1:].any()


def following(correlated: bool, correlation: str, mode: str) -> tuple[np.ndarray, ...]:
    """Return the noise of 20 environments, (T, 20), rewards or actions before it, and the same but 0 at starts."""
    envs = gymnasium.vector.SyncVectorEnv([Count] * 20, autoreset_mode=gymnasium.vector.AutoresetMode(mode))
    envs = noisy_tokens(envs, 1, scale=1e-3, correlation=correlation, correlated=correlated, shuffle=False)
    shown, numbers, expected = [], [], []
    actions = draw_actions(envs.action_space, 200)
    for action, (tokens, reward, *_, _) in zip(actions, play(envs, actions, seed=0)[1:], strict=True):
        is_start = tokens[:, 1, 0] % 100 == 0
        shown.append(tokens[:, -1, 0])
        numbers.append(reward if correlation == "reward" else action)
        expected.append(np.where(is_start, 0, numbers[-1]))
    return np.array(shown), np.array(numbers), np.array(expected)


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("correlation", ["reward", "action"])
def test_the_correlation_can_be_broken_and_the_distribution_stays(correlation: str, mode: str) -> None:
    held, numbers, expected = following(True, correlation, mode)
    np.testing.assert_allclose(held, expected, atol=0.01)
    broken, *_ = following(False, correlation, mode)
    assert abs(np.corrcoef(broken[30:].ravel(), expected[30:].ravel())[0, 1]) < 0.1
    assert abs(broken[30:].std() / held.std() - 1) < 0.1 and abs(broken.mean() - held.mean()) < 0.1
    known = np.sort(np.append(numbers, 0))
    nearest = known[np.clip(np.searchsorted(known, broken - 0.01), 0, known.size - 1)]
    assert (nearest <= broken + 0.01).all()  # numbers that were there


def test_actions_out_of_bounds_are_the_bound() -> None:
    env = noisy_tokens(gymnasium.make("Pendulum-v1"), 1, scale=1e-6, correlation="action", shuffle=False)
    env.reset(seed=0)
    assert env.step(np.float32([7]))[0][-1, 0] == pytest.approx(2, abs=1e-4)
    assert env.observation_space.high[-1, 0] == pytest.approx(2, abs=1e-4)
    bare = gymnasium.make("CartPole-v1")
    bare.action_space = spaces.MultiDiscrete([2, 2])  # type: ignore[assignment]  # what is tested
    with pytest.raises(ValueError, match=r"action_space=MultiDiscrete.*expected Discrete or a Box of numbers"):
        noisy_tokens(bare, 1, correlation="action")


def test_the_agents_environment_follows_and_is_evaluated_without_correlation() -> None:
    torch = pytest.importorskip("torch")
    from noisy_envs.training.gymnasium_envs import GymnasiumGame, GymnasiumVectorEnv

    options = {"num_noise": 3, "noise_role": "signal", "distribution": "replay", "correlation": "action"}
    trained, evaluated = (GymnasiumGame("CartPole-v1", options | {"correlated": x}) for x in (True, False))
    assert trained.token_spec == evaluated.token_spec and "noise" not in trained.token_spec.roles
    envs = [GymnasiumVectorEnv(game, 2) for game in (trained, evaluated)]
    starts = [env.reset(seed=0)[0] for env in envs]
    assert torch.equal(*starts)
    differ = [not torch.equal(*(env.step(torch.tensor([t % 2, 1]))[0] for env in envs)) for t in range(9)]
    assert any(differ)


# schedules


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("growing", [1, 1, 2, 3, 4, 5, 5, 5, 5]),
        ("reversed", [5, 5, 4, 3, 2, 1, 1, 1, 1]),
        ("fluctuating", [1, 2, 4, 4, 2, 1, 2, 4, 4]),
    ],
)
@pytest.mark.parametrize("backend", ["single", "numpy", "torch"])
def test_the_number_of_noise_tokens_follows_a_schedule(schedule: str, expected: list[int], backend: str) -> None:
    if backend == "torch":
        pytest.importorskip("torch")
    base = "noisy_envs/SimpleTag-v0"
    env: Any = gymnasium.make(base) if backend == "single" else gymnasium.make_vec(base, 2, backend=backend)
    env = noisy_tokens(env, (1, 5), schedule=schedule, schedule_episodes=5)
    counts = []
    for episode in range(9):
        tokens, _ = env.reset(seed=0 if episode == 0 else None)
        counts.append((as_numpy(tokens).reshape(-1, 13, 5)[-1, :, -1] == 4).sum())
    assert counts == expected
    assert (as_numpy(env.reset(options={"episode": 10**12})[0])[..., -1] == 4).any()  # without an overflow


def test_one_number_needs_no_schedule() -> None:
    env = noisy_tokens(gymnasium.make("CartPole-v1"), 3, schedule="growing")
    assert not env.token_spec.padded and env.reset(seed=0)[1]["snr"] == 5 / 8


# options


def test_options_are_checked() -> None:
    tag, envs = gymnasium.make("noisy_envs/SimpleTag-v0"), gymnasium.make_vec("noisy_envs/SimpleTag-v0", 2)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"noise_role": "none"}, "noise_role='none': expected one of 'own', 'signal'"),
        ({"correlation": "r"}, "correlation='r': expected one of 'none', 'reward'"),
        ({"schedule": "up"}, "schedule='up': expected one of 'constant', 'growing'"),
        ({"schedule_episodes": 0}, "schedule_episodes=0: expected at least 1"),
        ({"delay": -1}, "delay=-1: expected at least 0"),
        ({"delay": 1001}, "delay=1001: expected at most 1000"),
        ({"distribution": "replay", "scale": 0}, "scale=0: expected a number above 0"),
        ({"distribution": "copy", "scale": -1}, "scale=-1: expected at least 0"),
    ]
    for options, error in cases:
        with pytest.raises(ValueError, match=error):
            wrappers.AddNoiseTokens(tag, 1, **options)
        with pytest.raises(ValueError, match=error):
            vector.AddNoiseTokens(envs, 1, **options)
    with pytest.raises(TypeError, match="correlated=1: expected True or False"):
        wrappers.AddNoiseTokens(tag, 1, correlated=1)  # type: ignore[arg-type]  # what is tested
