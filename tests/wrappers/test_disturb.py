"""Noise on actions and rewards: what is played and returned, the same on single and vector, and true in evaluations."""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import assert_same, draw_actions, play, to_backend
from seen import ACTIONS, Seen

from noisy_envs import wrappers
from noisy_envs.arrays import as_numpy
from noisy_envs.wrappers import NoisyActions, NoisyRewards, vector

STACKS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "box": ("box", lambda w, env: w.NoisyActions(env, 0.5)),
    "unbounded": ("unbounded", lambda w, env: w.NoisyActions(env, 2.0)),
    "discrete": ("discrete", lambda w, env: w.NoisyActions(env, probability=0.5)),
    "several": ("several", lambda w, env: w.NoisyActions(env, probability=0.3)),
    "rewards": ("discrete", lambda w, env: w.NoisyRewards(env, 0.5, 0.3)),
    "twice": ("discrete", lambda w, env: w.NoisyRewards(w.NoisyRewards(env, drop_probability=0.5), 1.0)),
    "both": ("box", lambda w, env: w.AddNoiseTokens(w.NoisyRewards(w.NoisyActions(env, 0.5), 0.5), 2)),
}
each_stack = pytest.mark.parametrize("stack", STACKS)


def single(stack: str, **options: Any) -> Any:
    takes, wrap = STACKS[stack]
    env: Any = gymnasium.make("tests/Seen-v0", takes=takes, **options)
    return wrap(wrappers, wrappers.TokenizeObservation(env) if stack == "both" else env)


@each_stack
@pytest.mark.filterwarnings("ignore:.*is different from the unwrapped version")
@pytest.mark.filterwarnings("ignore:.*For Box action spaces, we recommend")
@pytest.mark.filterwarnings("ignore:.*A Box action space m..imum value is")
def test_gymnasium_is_content(stack: str) -> None:
    check_env(single(stack), skip_render_check=True)


@each_stack
@pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
def test_a_vector_is_its_single_environments(stack: str, mode: AutoresetMode) -> None:
    takes, wrap = STACKS[stack]
    bare: Any = SyncVectorEnv([lambda: Seen(takes=takes)] * 3, autoreset_mode=mode)
    envs = wrap(vector, vector.TokenizeObservation(bare) if stack == "both" else bare)
    singles = SyncVectorEnv([lambda: single(stack)] * 3, autoreset_mode=mode)
    for seed in (5, None):
        assert_same(*(one.reset(seed=seed)[0] for one in (envs, singles)))
        for action in draw_actions(singles.action_space, 14):  # with NEXT_STEP the last one ends an episode
            ours, theirs = envs.step(action), singles.step(action)
            assert_same(ours[:4], theirs[:4])
            assert_same(*([env.unwrapped.played for env in many.envs] for many in (bare, singles)))
            if mode is AutoresetMode.DISABLED and ours[2].any():
                assert_same(*(one.reset(options={"reset_mask": ours[2].copy()})[0] for one in (envs, singles)))


@each_stack
def test_copies_and_specs_make_the_same_again(stack: str) -> None:
    env = single(stack)
    actions = draw_actions(env.action_space, 6)
    here = play(env, actions, seed=1)
    for twin in (gymnasium.make(EnvSpec.from_json(env.spec.to_json())), copy.deepcopy(env)):
        assert_same(play(twin, actions, seed=1), here)
    assert_same(*(play(one, actions) for one in (env, pickle.loads(pickle.dumps(env)))))


@each_stack
def test_seed_and_episode_decide_all(stack: str) -> None:
    env, twin = single(stack), single(stack)
    actions = draw_actions(env.action_space, 4)

    def episode(env: Any, **reset: Any) -> Any:
        env.reset(**reset)
        rewards = [env.step(action)[1] for action in actions]
        return [np.array(env.unwrapped.played).tolist(), rewards]

    first, second = episode(env, seed=3), episode(env)
    assert episode(twin, seed=3, options={"episode": 1}) == second != first
    assert episode(twin, seed=3) == first != episode(twin, seed=4)


@each_stack
def test_an_autoreset_beneath_starts_episodes_as_a_vector_does(stack: str) -> None:
    takes, wrap = STACKS[stack]
    inner: Any = gymnasium.wrappers.Autoreset(Seen(takes=takes))
    env = wrap(wrappers, wrappers.TokenizeObservation(inner) if stack == "both" else inner)
    envs = SyncVectorEnv([lambda: single(stack)])
    for seed in (2, None):
        assert_same(env.reset(seed=seed)[0], envs.reset(seed=seed)[0][0])
        for action in draw_actions(envs.action_space, 14):
            ours, theirs = env.step(action[0]), envs.step(action)
            assert_same((ours[0], float(ours[1])), (theirs[0][0], float(theirs[1][0])))


# actions


def played(takes: str, action: Any, steps: int = 4000, **options: Any) -> np.ndarray:
    """Return what is played where the agent always takes one action."""
    env = NoisyActions(Seen(takes=takes, length=steps), **options)
    env.reset(seed=0)
    for _ in range(steps):
        env.step(action)
    return np.array(env.unwrapped.played)


def test_noise_of_boxes_is_normal_and_clipped() -> None:
    free = played("unbounded", np.array([1.0, -2.0, 5.0]), scale=0.5)
    assert abs(free.mean(axis=0) - [1, -2, 5]).max() < 5 * 0.5 / np.sqrt(4000)
    assert abs(free.std(axis=0) - 0.5).max() < 5 * 0.5 / np.sqrt(2 * 4000)
    assert abs(np.corrcoef(free.T) - np.eye(3)).max() < 5 / np.sqrt(4000)
    assert abs(np.corrcoef(free[1:, 0], free[:-1, 0])[0, 1]) < 5 / np.sqrt(4000)  # of step and step
    clipped = played("box", np.array([0.9, 0.0], np.float32), scale=0.5)
    assert clipped.max() == 1 and clipped.min() >= -1
    assert abs((clipped[:, 0] == 1).mean() - 0.42) < 0.04  # P(z > 0.2)


def test_random_actions_replace_discrete_ones() -> None:
    taken = played("discrete", 4, probability=0.4)
    shares = np.bincount(taken, minlength=7)[3:] / 4000
    assert abs(shares - [0.1, 0.7, 0.1, 0.1]).max() < 5 * np.sqrt(0.25 / 4000)
    both = played("several", np.array([1, 4]), probability=0.4)
    changed = both != [1, 4]
    assert abs(changed.mean(axis=0) - 0.4 * np.array([2 / 3, 4 / 5])).max() < 5 * np.sqrt(0.25 / 4000)
    assert abs(changed.all(axis=1).mean() - changed.mean(axis=0).prod()) < 5 * np.sqrt(0.25 / 4000)  # independent


@pytest.mark.parametrize("takes", ["box", "discrete", "several", "scalar"])
def test_without_noise_nothing_changes(takes: str) -> None:
    env, bare = NoisyRewards(NoisyActions(Seen(takes=takes))), Seen(takes=takes)
    actions = draw_actions(ACTIONS[takes], 4)
    for ours, theirs in zip(play(env, actions, seed=0), play(bare, actions, seed=0), strict=True):
        assert_same(ours[:-1], theirs[:-1])
    assert_same(play(NoisyActions(Seen(takes=takes), probability=0.0), actions, seed=0), play(bare, actions, seed=0))


@pytest.mark.parametrize(
    ("env_id", "options", "noise"),
    [
        ("SimpleCentroid-v0", {"continuous_actions": False}, {"probability": 0.5}),
        ("SimpleCentroid-v0", {"continuous_actions": True}, {"scale": 0.5}),
        ("SimpleTag-v0", {"learners": "predators"}, {"probability": 0.5}),
    ],
)
def test_our_games_on_tensors_are_those_on_arrays(env_id: str, options: dict[str, Any], noise: Any) -> None:
    pytest.importorskip("torch")
    seen = []
    for backend in ("numpy", "torch"):
        envs: Any = gymnasium.make_vec(f"noisy_envs/{env_id}", 3, backend=backend, **options)
        envs = vector.NoisyRewards(vector.NoisyActions(envs, **noise), 0.5, 0.2)
        envs.reset(seed=0)
        steps = [envs.step(to_backend(action, backend)) for action in draw_actions(envs.action_space, 40)]
        seen.append([(as_numpy(step[0]), as_numpy(step[1]), as_numpy(step[4]["true_reward"])) for step in steps])
    for ours, theirs in zip(*seen, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    assert any((ours[1] != ours[2]).any() for ours in seen[0])


# rewards


def test_rewards_are_dropped_and_noisy() -> None:
    env = NoisyRewards(Seen(length=4001), scale=0.5, drop_probability=0.3)
    env.reset(seed=0)
    found, true = [], []
    for _ in range(4000):
        _, reward, _, _, info = env.step(3)
        assert type(reward) is float
        found.append(reward)
        true.append(info["true_reward"])
    assert true == [float(t) for t in range(1, 4001)]
    dropped = abs(np.array(found)) < 4  # eight deviations
    dropped[:8] = False
    assert abs(dropped.mean() - 0.3) < 5 * np.sqrt(0.21 / 4000)
    rest = (np.array(found) - true)[~dropped][8:]
    assert abs(rest.mean()) < 0.05 and abs(rest.std() - 0.5) < 0.04


def test_the_innermost_reward_is_the_true_one() -> None:
    env = single("twice")
    env.reset(seed=0)
    assert [env.step(3)[4]["true_reward"] for _ in range(4)] == [1, 2, 3, 4]
    takes, wrap = STACKS["twice"]
    envs = wrap(vector, SyncVectorEnv([lambda: Seen(takes=takes)] * 2))
    envs.reset(seed=0)
    infos = [envs.step(np.array([3, 3]))[4] for _ in range(6)]
    assert [info["true_reward"].tolist() for info in infos] == [[t, t] for t in (1, 2, 3, 4, 0, 1)]
    assert [info["_true_reward"].tolist() for info in infos] == [[t != 4] * 2 for t in range(6)]  # 4: the reset


def test_statistics_below_the_noise_are_true() -> None:
    env = NoisyRewards(gymnasium.wrappers.RecordEpisodeStatistics(Seen()), scale=5.0)
    env.reset(seed=0)
    assert [env.step(3)[4] for _ in range(4)][-1]["episode"]["r"] == 1 + 2 + 3 + 4


@pytest.mark.parametrize("inside", [True, False])
def test_evaluations_report_true_returns(inside: bool) -> None:
    pytest.importorskip("torch")
    import torch

    from noisy_envs.training import gymnasium_envs
    from noisy_envs.training.evaluation import play_episodes

    gymnasium.register("tests/Noisy-v0", lambda length=4: NoisyRewards(Seen(length=length), 5.0, 0.5))
    try:
        game = gymnasium_envs.GymnasiumGame("tests/Noisy-v0" if inside else "tests/Seen-v0", {"length": 7})
        envs = gymnasium_envs.GymnasiumVectorEnv(game, 3)
        if not inside:
            envs._envs = vector.NoisyRewards(envs._envs, 5.0, 0.5)
        tokens, _ = envs.reset(seed=0)
        rewards = envs.step(torch.zeros(3, dtype=torch.int64))[1]
        assert (rewards != 1).all()  # training sees the noise
        tokens, _ = envs.reset(seed=0)
        returns = play_episodes(envs, tokens, lambda tokens: torch.zeros(3, dtype=torch.int64))
        assert returns.tolist() == [1 + 2 + 3 + 4 + 5 + 6 + 7] * 3
    finally:
        gymnasium.registry.pop("tests/Noisy-v0")


def test_films_report_true_returns() -> None:
    from noisy_envs.rendering.playback import make_playback

    gymnasium.register("tests/Noisy-v0", lambda **options: NoisyRewards(gymnasium.make("CartPole-v1", **options), 5.0))
    try:
        playback = make_playback("tests/Noisy-v0", {})
    finally:
        gymnasium.registry.pop("tests/Noisy-v0")
    while not playback.done:
        playback.step(np.zeros(1, np.int64))
    assert playback.total_return == playback.clock


# what Gymnasium has


def test_gymnasiums_own_disturbances_compose() -> None:
    wrap = [
        lambda env: gymnasium.wrappers.StickyAction(env, 0.5),
        lambda env: gymnasium.wrappers.DelayObservation(env, 2),
        lambda env: NoisyRewards(env, 0.1),
    ]
    envs = wrappers.noisy_tokens(gymnasium.make_vec("CartPole-v1", 2, "sync", wrappers=wrap), 3)
    tokens, _ = envs.reset(seed=0)
    assert tokens.shape == (2, 8, 2) and (tokens[:, :, 0][tokens[:, :, 1] < 5] == 0).all()
    rewards = [envs.step(np.zeros(2, np.int64))[1] for _ in range(3)]
    assert (np.array(rewards) != 1).all()


# refused


@pytest.mark.parametrize(
    ("takes", "options", "text"),
    [
        ("box", {"probability": 0.1}, "probability=0.1: expected 0 for Box(-1.0, 1.0, (2,), float32), whose noise is "
         "Gaussian: set scale"),
        ("discrete", {"scale": 0.1}, "scale=0.1: expected 0 for Discrete(4, start=3), whose noise is a random action: "
         "set probability"),
        ("discrete", {"probability": 1.5}, "probability=1.5: expected at most 1"),
        ("box", {"scale": -1.0}, "scale=-1.0: expected at least 0"),
        ("integers", {"scale": 1.0}, "Box(0, 3, (2,), int64): expected Discrete, MultiDiscrete or a Box of floats; "
         "gymnasium.wrappers.TransformAction converts others"),
        ("bits", {}, "MultiBinary(3): expected Discrete, MultiDiscrete or a Box of floats; "
         "gymnasium.wrappers.TransformAction converts others"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("module", [wrappers, vector])
def test_what_is_refused_names_a_remedy(module: Any, takes: str, options: dict[str, Any], text: str) -> None:
    env: Any = Seen(takes=takes) if module is wrappers else SyncVectorEnv([lambda: Seen(takes=takes)])
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        module.NoisyActions(env, **options)


def test_rewards_are_checked_and_kinds_of_environment_too() -> None:
    with pytest.raises(ValueError, match=r"^drop_probability=2: expected at most 1$"):
        NoisyRewards(Seen(), drop_probability=2)
    envs = SyncVectorEnv([Seen])
    for name in ("NoisyActions", "NoisyRewards"):
        with pytest.raises(TypeError, match=r"expected a gymnasium.Env; noisy_envs.wrappers.vector has the wrappers"):
            getattr(wrappers, name)(envs)
        with pytest.raises(TypeError, match=r"expected a gymnasium.vector.VectorEnv; noisy_envs.wrappers has"):
            getattr(vector, name)(Seen())
        with pytest.raises(RuntimeError, match=r"^no episode has begun: call reset\(\) first$"):
            getattr(wrappers, name)(Seen()).step(3)
