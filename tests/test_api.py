"""The foreign APIs, over the whole registry: Gymnasium's and PettingZoo's checkers, and what those do not check."""

import copy
import importlib
import pickle
import random
import subprocess
import sys
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from conftest import (
    GAMES,
    IDS,
    ONE_AND_THREE,
    PETTINGZOO,
    assert_same,
    draw_actions,
    each_case,
    each_game,
    each_id,
    each_pettingzoo,
    make,
    module,
    play,
    play_parallel,
    steer,
    still,
    to_backend,
)
from gymnasium.utils.env_checker import check_env

import noisy_envs
from noisy_envs import ENVIRONMENTS
from noisy_envs.shells.parallel import ParallelTokenEnv
from noisy_envs.shells.single import TokenEnv
from noisy_envs.shells.vector import TokenVectorEnv

with warnings.catch_warnings():
    # importing pettingzoo.test 1.27 makes an environment of its own by an API that PettingZoo has deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test

LENGTHS = (1, 2, 25, 100, 200)
each_length = pytest.mark.parametrize("length", LENGTHS)
each_count = pytest.mark.parametrize("index", (0, 1), ids=("one", "three"))
each_control = pytest.mark.parametrize("continuous", (True, False), ids=("continuous", "discrete"))


def fresh(code: str) -> str:
    """Run code in a new interpreter, warnings being errors, and return what it prints."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def joint(env: ParallelTokenEnv, count: int, seed: int = 0) -> list[dict[str, object]]:
    """Sample actions of all agents."""
    drawn = {a: draw_actions(env.action_space(a), count, seed + i) for i, a in enumerate(env.possible_agents)}
    return [{agent: acts[t] for agent, acts in drawn.items()} for t in range(count)]


# ---------------------------------------------------------------------------------------------------------------


@each_id
def test_gymnasium_checker(env_id, dummy_display):
    check_env(make(env_id, max_steps=4))


@each_case
def test_gymnasium_checker_with_options(env_id, options):
    check_env(make(env_id, **options), skip_render_check=True)


@each_pettingzoo
@each_count
@each_control
def test_pettingzoo_checkers(game, index, continuous):
    options = {**ONE_AND_THREE[game][index], "continuous_actions": continuous, "max_steps": 6}
    parallel_api_test(module(game).parallel_env(**options), num_cycles=10)
    parallel_seed_test(lambda: module(game).parallel_env(**options), num_cycles=10)
    api_test(module(game).env(**options), num_cycles=20)


# Episodes ----------------------------------------------------------------------------------------------------


def length_of(env: gymnasium.Env) -> int:
    """Play one episode to its end, which must be its time limit."""
    env.reset(seed=0)
    action, steps, truncated = still(env.action_space), 0, False
    while not truncated:
        _, _, terminated, truncated, _ = env.step(action)
        assert not terminated
        steps += 1
    return steps


def ends_of(envs: gymnasium.vector.VectorEnv, steps: int) -> list[int]:
    """Return the steps, counted from 1, at which world 0 was truncated; the others must be with it."""
    envs.reset(seed=0)
    ends = []
    for t in range(1, steps + 1):
        _, _, terminated, truncated, _ = envs.step(still(envs.action_space))
        assert not terminated.any() and (truncated == truncated[0]).all()
        if truncated[0]:
            ends.append(t)
    return ends


@each_game
@each_length
def test_episode_length(env_id, length):
    assert length_of(make(env_id, max_steps=length)) == length
    assert length_of(gymnasium.make(env_id, max_steps=1000, max_episode_steps=length)) == length
    twice = [length, 2 * length + 1]  # the step after an end resets
    for options in ({"max_steps": length}, {"max_steps": 1000, "max_episode_steps": length}):
        assert ends_of(gymnasium.make_vec(env_id, 2, **options), 2 * length + 1) == twice
        assert ends_of(gymnasium.make_vec(env_id, 2, "sync", **options), 2 * length + 1) == twice


@each_game
def test_smaller_limit_counts(env_id):
    assert ends_of(gymnasium.make_vec(env_id, 2, max_steps=4, max_episode_steps=7), 6) == [4]


@each_game
def test_episode_length_async(env_id):
    # forking a process in which torch has threads draws a warning
    envs = gymnasium.make_vec(env_id, 2, "async", vector_kwargs={"context": "forkserver"}, max_episode_steps=5)
    assert ends_of(envs, 11) == [5, 11]
    envs.close()


@each_pettingzoo
@each_length
def test_episode_length_parallel(game, length):
    env = module(game).parallel_env(max_steps=length, **ONE_AND_THREE[game][1])
    env.reset(seed=0)
    for t in range(1, length + 1):
        _, _, terminated, truncated, _ = env.step({agent: still(env.action_space(agent)) for agent in env.agents})
        assert set(terminated.values()) == {False} and set(truncated.values()) == {t == length}


@each_pettingzoo
def test_agents_leave_and_return(game):
    env = module(game).parallel_env(max_steps=2, **ONE_AND_THREE[game][1])
    everyone = env.possible_agents.copy()
    assert env.agents == [] and len(everyone) == 3
    for _ in range(2):
        env.reset(seed=0)
        assert env.agents == everyone
        for action in joint(env, 2):
            assert set(env.step(action)[0]) == set(everyone)
        assert env.agents == [] and env.possible_agents == everyone
        assert env.step({}) == ({}, {}, {}, {}, {})
    for agent in everyone:
        assert env.observation_space(agent) is env.observation_space(agent)
        assert env.action_space(agent) is env.action_space(agent)
    assert len({id(env.action_space(agent)) for agent in everyone}) == 3  # each has a generator of its own


@each_pettingzoo
@pytest.mark.parametrize("seed", (0, 1))
def test_return_equal_in_every_view(game, seed):
    options = {**ONE_AND_THREE[game][1], "max_steps": 7}

    def act(tokens):
        return np.asarray(steer(tokens[None], np.zeros((1, 5), np.float32))[0])

    parallel = module(game).parallel_env(**options)
    observations, _ = parallel.reset(seed=seed)
    expected = dict.fromkeys(parallel.possible_agents, 0.0)
    while parallel.agents:
        observations, rewards, *_ = parallel.step({agent: act(seen) for agent, seen in observations.items()})
        for agent, reward in rewards.items():
            expected[agent] += reward

    aec = module(game).env(**options)
    aec.reset(seed=seed)
    total = dict.fromkeys(aec.possible_agents, 0.0)
    for agent in aec.agent_iter():
        tokens, reward, terminated, truncated, _ = aec.last()
        total[agent] += reward
        aec.step(None if terminated or truncated else act(tokens))
    assert total == expected

    single = make(GAMES[game], **options, other_policy=steer)
    tokens, _ = single.reset(seed=seed)
    total_return, truncated = 0.0, False
    while not truncated:
        tokens, reward, _, truncated, _ = single.step(act(tokens))
        total_return += reward
    assert total_return == expected[parallel.possible_agents[0]] != 0


# What is returned --------------------------------------------------------------------------------------------


@each_case
def test_contained_for_a_thousand_steps(env_id, options):
    env = make(env_id, **options, max_steps=500)
    space = env.observation_space
    hold = draw_actions(env.action_space, 20)  # each is held for 50 steps, which leads far away
    tokens, info = env.reset(seed=0)
    for t in range(1000):
        assert tokens.dtype == np.float32 and tokens in space
        assert info["signal_mask"].dtype == np.bool_ and info["signal_mask"].shape == space.shape[:1]
        assert type(info["snr"]) is float and 0 < info["snr"] <= 1
        tokens, reward, terminated, truncated, info = env.step(hold[t // 50])
        assert type(reward) is float and type(terminated) is bool and type(truncated) is bool
        if terminated or truncated:
            assert tokens in space
            tokens, info = env.reset()


@each_pettingzoo
def test_parallel_contained(game):
    env = module(game).parallel_env(max_steps=50, **ONE_AND_THREE[game][1])
    for reset in range(2):
        observations, _ = env.reset(seed=reset)
        for action in joint(env, 50):
            assert env.state() in env.state_space and env.state().dtype == np.float32
            assert all(observations[agent] in env.observation_space(agent) for agent in env.agents)
            observations, rewards, terminated, truncated, infos = env.step(action)
            assert {type(reward) for reward in rewards.values()} == {float}
            assert {type(flag) for flags in (terminated, truncated) for flag in flags.values()} == {bool}
            assert all(infos[agent]["signal_mask"].dtype == np.bool_ for agent in infos)
        assert env.state() in env.state_space


@each_pettingzoo
def test_state_is_of_the_world_not_of_an_agent(game):
    env = module(game).parallel_env(**ONE_AND_THREE[game][1])
    observations, _ = env.reset(seed=0)
    state = env.state()
    assert not any(np.array_equal(state, tokens) for tokens in observations.values())
    state[:] = 0
    assert env.state().any()


# Seeds, copies, states ---------------------------------------------------------------------------------------


def global_states():
    """Return the states of the global generators."""
    import torch

    return [repr(random.getstate()), repr(np.random.get_state()), torch.random.get_rng_state()]  # noqa: NPY002


def every_view(game, unseeded=False):
    """Play each view of a game and return what it gave."""
    seen = []
    seed = None if unseeded else 3
    single = make(GAMES[game], max_steps=5)
    seen.append(play(single, draw_actions(single.action_space, 12), seed=seed))
    for backend in ("numpy", "torch"):
        envs = gymnasium.make_vec(GAMES[game], 2, backend=backend, max_steps=5)
        acts = [to_backend(action, backend) for action in draw_actions(envs.action_space, 12)]
        seen.append(play(envs, acts, seed=seed))
    if game in PETTINGZOO:
        parallel = module(game).parallel_env(max_steps=5, **ONE_AND_THREE[game][1])
        seen.append(play_parallel(parallel, joint(parallel, 12), seed=seed))
    return seen


@pytest.mark.parametrize("game", GAMES)
def test_global_generators_neither_used_nor_touched(game):
    torch = pytest.importorskip("torch")
    before = global_states()
    first = every_view(game)
    every_view(game, unseeded=True)
    assert_same(global_states(), before)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    assert_same(every_view(game), first)


@each_case
@pytest.mark.parametrize("way", (copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))), ids=("copy", "pickle"))
@pytest.mark.parametrize("kind", ("single", "wrapped", "numpy", "torch"))
def test_copies_play_on_alike(env_id, options, way, kind):
    options = {**options, "max_steps": 12}
    if kind in ("single", "wrapped"):
        env = (make if kind == "single" else gymnasium.make)(env_id, render_mode="rgb_array", **options)
        actions = draw_actions(env.action_space, 25)
    else:
        if kind == "torch":
            pytest.importorskip("torch")
        env = gymnasium.make_vec(env_id, 3, backend=kind, render_mode="rgb_array", **options)
        actions = [to_backend(action, kind) for action in draw_actions(env.action_space, 25)]
    play(env, actions[:5], seed=None)
    twins = [way(env)]
    env.render()
    twins.append(way(env))
    expected = play(env, actions[5:]), env.render()
    for twin in twins:
        assert_same((play(twin, actions[5:]), twin.render()), expected)


@each_pettingzoo
@pytest.mark.parametrize("way", (copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))), ids=("copy", "pickle"))
def test_copies_of_parallel_play_on_alike(game, way):
    env = module(game).parallel_env("rgb_array", max_steps=12, **ONE_AND_THREE[game][1])
    actions = joint(env, 25)
    play_parallel(env, actions[:5], seed=None)
    env.render()
    twin = way(env)
    assert_same(play_parallel(twin, actions[5:]), play_parallel(env, actions[5:]))
    assert_same(twin.render(), env.render())


@each_game
def test_copy_of_a_window_plays_on(env_id, dummy_display):
    env = make(env_id, render_mode="human")
    env.reset(seed=0)
    twin = copy.deepcopy(env)
    action = still(env.action_space)
    assert_same(twin.step(action), env.step(action))
    twin.close()
    env.render()
    env.close()


@each_case
@pytest.mark.parametrize("seed", (0, 1))
def test_state_round_trip(env_id, options, seed):
    source, target = make(env_id, **options), make(env_id, **options)
    actions = draw_actions(source.action_space, 10)
    play(source, actions, seed=seed)
    state = source.state
    target.reset(seed=seed + 9, options={"state": state})
    assert_same(target.state, state)
    assert_same(source.state, state)  # still the same after being read
    for field in state:
        field[...] = 0
    assert any(field.any() for field in source.state), "a copy, not the state itself"


@each_pettingzoo
def test_parallel_takes_the_state_of_single(game):
    options = ONE_AND_THREE[game][1]
    single, parallel = make(GAMES[game], **options), module(game).parallel_env(**options)
    tokens, _ = single.reset(seed=4)
    assert_same(parallel.reset(seed=9, options={"state": single.state})[0][parallel.agents[0]], tokens)


@each_case
@pytest.mark.parametrize("seed", (0, 1))
def test_replay_by_number(env_id, options, seed):
    env, again = make(env_id, **options, max_steps=6), make(env_id, **options, max_steps=6)
    actions = draw_actions(env.action_space, 6)
    played = [(env.reset(seed=seed if n == 0 else None), [env.step(a) for a in actions]) for n in range(4)]
    assert env.episode == (seed, 3)
    for n in (3, 0, 2):
        replayed = again.reset(seed=seed, options={"episode": n}), [again.step(a) for a in actions]
        assert_same(replayed, played[n])
    assert_same(again.reset(), played[3][0])  # and on from there


@each_pettingzoo
def test_replay_by_number_parallel(game):
    env = module(game).parallel_env(**ONE_AND_THREE[game][1])
    starts = [env.reset(seed=1 if n == 0 else None) for n in range(3)]
    assert_same(env.reset(seed=1, options={"episode": 2}), starts[2])


@each_game
def test_unknown_reset_options_are_ignored(env_id):
    env = make(env_id)
    assert_same(env.reset(seed=1, options={"what": 1}), env.reset(seed=1))
    envs = gymnasium.make_vec(env_id, 2)
    assert_same(envs.reset(seed=1, options={"what": 1}), envs.reset(seed=1))


# Actions -----------------------------------------------------------------------------------------------------

BAD_CONTINUOUS = [[np.nan] * 5, [0, 0, 0, 0, np.inf], np.zeros(4), np.zeros((1, 5)), 1, None, "left"]
BAD_DISCRETE = [-1, 5, 1.0, np.nan, [1], True, None, "left"]
CONTROLS = {
    game: [c for c in (True, False) if {"continuous_actions": c}.items() <= _options(game).items()]
    for game in GAMES
} if False else dict.fromkeys(GAMES, (True, False))
