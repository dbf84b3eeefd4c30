"""Faults of tokens: what the wrappers that disturb, drop and duplicate tokens do to those that the agent sees."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from helpers import assert_same, draw_actions, play

from noisy_envs import wrappers
from noisy_envs.tokens import TokenSpec
from noisy_envs.wrappers import faults, noisy_tokens, vector


def tokens_around(name: str, steps: int = 30, num_envs: int = 20, **options: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    """Play SimpleTag with and without a wrapper: tokens (T, B, N, D) of both, and the wrapped environment."""
    inner = {"num_obstacles": (0, 4), "max_episode_steps": 10}
    bare, envs = (gymnasium.make_vec("noisy_envs/SimpleTag-v0", num_envs, **inner) for _ in range(2))
    envs = getattr(vector, name)(envs, **options)
    actions = draw_actions(envs.action_space, steps)
    theirs, ours = (np.stack([result[0] for result in play(env, actions, seed=0)]) for env in (bare, envs))
    return theirs, ours, envs


@pytest.mark.parametrize("kind", faults.KINDS)
@pytest.mark.parametrize("probability", [0.0, 0.4, 1.0])
def test_only_values_of_tokens_are_disturbed(kind: str, probability: float) -> None:
    theirs, ours, envs = tokens_around("DisturbTokens", kind=kind, probability=probability, scale=0.5, delay=2)
    assert_same(ours[..., -1], theirs[..., -1])  # roles, padding
    assert_same(ours[:, :, 0], theirs[:, :, 0])  # the query
    absent = theirs[..., -1] == -1
    assert absent.any() and not ours[absent][:, :-1].any()
    present = ~absent[:, :, 1:]
    changed = (ours != theirs)[:, :, 1:, :-1][present]
    assert (changed.mean() > 0) == (probability > 0)
    if kind in ("gaussian", "dead", "dropped"):
        moving = theirs[:, :, 1:, :-1][present] != 0
        assert abs(changed[moving].mean() - probability) < 0.06
    assert envs.env.single_observation_space.shape == envs.single_observation_space.shape


def test_gaussian_disturbance_is_normal() -> None:
    theirs, ours, _ = tokens_around("DisturbTokens", scale=0.5)
    error = (ours - theirs)[:, :, 1:, :-1][theirs[:, :, 1:, -1] != -1]
    assert abs(error.mean()) < 0.02 and abs(error.std(axis=0) - 0.5).max() < 0.02
    assert abs(np.corrcoef(error.T) - np.eye(4)).max() < 0.05


def test_dead_values_stay_dead_and_dropped_ones_return() -> None:
    for kind, stays in (("dead", True), ("dropped", False)):
        theirs, ours, _ = tokens_around("DisturbTokens", kind=kind, probability=0.5, steps=9)
        hit = (ours == 0) & (theirs != 0) & (theirs[..., -1:] != -1)
        comparable = (theirs[1:] != 0) & (theirs[:-1] != 0)
        assert (hit[1:] == hit[:-1])[comparable].all() == stays


def test_delayed_values_are_those_of_earlier_steps() -> None:
    theirs, ours, _ = tokens_around("DisturbTokens", kind="delayed", delay=3, steps=9)
    for t in range(10):
        expected = theirs[max(t - 3, 0), :, 1:, :-1]
        present = theirs[t, :, 1:, -1] != -1
        assert_same(ours[t, :, 1:, :-1][present], expected[present])


def test_permuted_values_are_exchanged_once_an_episode() -> None:
    theirs, ours, _ = tokens_around("DisturbTokens", kind="permuted", steps=9)
    for t in range(10):
        for world in range(20):
            present = theirs[t, world, :, -1] != -1
            a, b = ours[t, world, present, :-1][1:], theirs[t, world, present, :-1][1:]
            assert_same(np.sort(a, axis=0), np.sort(b, axis=0))
    order = (ours[:, :, 1:, None, :2] == theirs[:, :, None, 1:, :2]).astype(int)
    present = theirs[0, 0, 1:, -1] != -1
    assert_same(order[1, 0, present][:, present], order[8, 0, present][:, present])
    u = np.random.default_rng(0).random((300, 4, 2)).astype(np.float32)
    values = np.tile(np.arange(4.0)[None, :, None], (300, 1, 2))
    exchanged = faults.permuted(values, np.ones((300, 4, 2), bool), u)
    assert (abs(exchanged.mean(axis=0) - 1.5) < 0.25).all() and (exchanged[..., 0] != exchanged[..., 1]).any()


@pytest.mark.parametrize("frozen", [False, True])
def test_dropped_tokens_are_padding(frozen: bool) -> None:
    theirs, ours, envs = tokens_around("DropTokens", probability=0.3, frozen=frozen, steps=9)
    gone, was = ours[..., -1] == -1, theirs[..., -1] == -1
    assert not gone[:, :, 0].any() and gone[was].all() and not ours[gone][:, :-1].any()
    assert_same(ours[~gone], theirs[~gone])
    assert abs(gone[:, :, 1:][~was[:, :, 1:]].mean() - 0.3) < (0.1 if frozen else 0.04)
    assert (gone == gone[:1]).all() == frozen
    assert_same(envs.token_spec.mask(ours), ~gone)
    for result in play(envs, draw_actions(envs.action_space, 9), seed=0):
        present, signal = envs.token_spec.mask(result[0]), result[-1]["signal_mask"]
        assert not (signal & ~present).any() and (signal == present & (result[0][..., -1] != 1)).all()
        assert_same(result[-1]["snr"], signal.sum(axis=1) / present.sum(axis=1))


def test_noise_and_signal_are_dropped_alike() -> None:
    envs = vector.DropTokens(noisy_tokens(gymnasium.make_vec("CartPole-v1", 30), 4), 0.5)
    results = play(envs, draw_actions(envs.action_space, 50), seed=0)
    signal = np.mean([result[-1]["signal_mask"][:, 1:].sum(axis=1) for result in results])
    noise_tokens = np.mean([(result[0][..., -1] == 5).sum(axis=1) for result in results])
    assert abs(signal - 2) < 0.1 and abs(noise_tokens - 2) < 0.1


@pytest.mark.parametrize("shuffle", [False, True])
def test_duplicates_are_equal_tokens_of_the_same_kind(shuffle: bool) -> None:
    theirs, ours, envs = tokens_around("DuplicateTokens", num_copies=3, shuffle=shuffle)
    results = play(envs, draw_actions(envs.action_space, 30), seed=0)
    for (tokens, *_, info), below in zip(results, theirs, strict=True):
        signal = np.isin(tokens[..., -1], [0, 2, 3])  # obstacles are noise
        assert_same(info["signal_mask"], signal)
        for rows, known in zip(tokens, below, strict=True):
            assert {row.tobytes() for row in rows} == {row.tobytes() for row in known}
            assert (rows[:, -1] == -1).sum() == (known[:, -1] == -1).sum() and (rows[:, -1] == 0).sum() == 1
    if not shuffle:
        assert_same(ours[:, :, :-3], theirs)
        first = tokens_around("DuplicateTokens", num_copies=1, shuffle=False)[1]
        assert_same(first, ours[:, :, :-2])


def test_without_another_token_copies_are_padding() -> None:
    envs = vector.DuplicateTokens(vector.DropTokens(gymnasium.make_vec("noisy_envs/SimpleTag-v0", 2), 1.0), 2)
    tokens, info = envs.reset(seed=0)
    assert (tokens[:, 1:, -1] == -1).all() and (tokens[:, 0, -1] == 0).all() and (info["snr"] == 1).all()


def test_tokens_that_look_like_padding_are_not_dropped() -> None:
    env = gymnasium.Env[Any, Any]()
    env.observation_space, env.action_space = spaces.Box(-1, 1, (3, 2)), spaces.Discrete(2)
    env.token_spec = TokenSpec(3, ("x", "sign"), {}, padded=False)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"probability=0.5: expected tokens that may be padding, .*'sign' may be -1"):
        wrappers.DropTokens(env, 0.5)
    env.observation_space = spaces.Box(-1, 1, (1, 2))
    env.token_spec = TokenSpec(1, ("x", "sign"), {}, padded=False)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="num_copies=2: expected an environment with more tokens than the query"):
        wrappers.DuplicateTokens(env, 2)


def test_options_are_checked() -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("DisturbTokens", {"kind": "noise"}, "kind='noise': expected one of 'gaussian', 'dead'"),
        ("DisturbTokens", {"probability": 1.5}, "probability=1.5: expected at most 1"),
        ("DropTokens", {"probability": -0.1}, "probability=-0.1: expected at least 0"),
        ("DuplicateTokens", {"num_copies": -1}, "num_copies=-1: expected at least 0"),
    ]
    for name, options, error in cases:
        with pytest.raises(ValueError, match=error):
            getattr(wrappers, name)(gymnasium.make("noisy_envs/SimpleTag-v0"), **options)
        with pytest.raises(ValueError, match=error):
            getattr(vector, name)(gymnasium.make_vec("noisy_envs/SimpleTag-v0", 2), **options)
