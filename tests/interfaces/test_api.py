"""The foreign APIs, over the whole registry: Gymnasium's and PettingZoo's checkers, and what those do not check."""

import copy
import importlib
import pickle
import random
import subprocess
import sys
import warnings
from itertools import pairwise

import gymnasium
import numpy as np
import pytest
from cases import (
    CASES,
    GAME_IDS,
    IDS,
    PETTINGZOO,
    each_case,
    each_case_and,
    each_control,
    each_game,
    each_pettingzoo,
    steer,
)
from gymnasium.utils.env_checker import check_env
from helpers import assert_same, draw_actions, make, module, play, play_parallel, still, to_backend

import noisy_envs
from noisy_envs import ENVIRONMENTS
from noisy_envs.interfaces.gymnasium_env import TokenEnv
from noisy_envs.interfaces.pettingzoo_env import ParallelTokenEnv
from noisy_envs.interfaces.vector_env import TokenVectorEnv

with warnings.catch_warnings():
    # importing pettingzoo.test 1.27 makes an environment of its own by an API that PettingZoo has deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test

LENGTHS = (1, 2, 25, 100, 200)
each_length = pytest.mark.parametrize("length", LENGTHS)
each_count = pytest.mark.parametrize("count", ["one_agent", "three_agents"])
WAYS = {"copy": copy.deepcopy, "pickle": lambda env: pickle.loads(pickle.dumps(env))}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
each_continuous = pytest.mark.parametrize("continuous", [True, False], ids=("continuous", "discrete"))


def fresh(code: str) -> str:
    """Run code in a new interpreter, warnings being errors, and return what it prints."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def joint(env: ParallelTokenEnv, count: int, seed: int = 0) -> list[dict[str, object]]:
    """Sample actions of all agents."""
    drawn = {a: draw_actions(env.action_space(a), count, seed + i) for i, a in enumerate(env.possible_agents)}
    return [{agent: acts[t] for agent, acts in drawn.items()} for t in range(count)]


@each_game
def test_gymnasium_checker(env_id, dummy_display):
    check_env(make(env_id, max_steps=4))


@each_case
def test_gymnasium_checker_with_options(env_id, options):
    check_env(make(env_id, **options), skip_render_check=True)


@each_pettingzoo
@each_count
@each_continuous
def test_pettingzoo_checkers(game, count, continuous):
    options = {**getattr(CASES[game], count), "continuous_actions": continuous, "max_steps": 6}
    parallel_api_test(module(game).parallel_env(**options), num_cycles=10)
    parallel_seed_test(lambda: module(game).parallel_env(**options), num_cycles=10)
    turns = module(game).env(**options)
    api_test(turns, num_cycles=20)
    assert turns.unwrapped.token_spec == module(game).parallel_env(**options).token_spec  # as the page on agents says


def length_of(env: gymnasium.Env) -> int:
    """Play one episode to its end, which must be its time limit."""
    env.reset(seed=0)
    action = still(env.action_space)
    for steps in range(1, 1001):
        _, _, terminated, truncated, _ = env.step(action)
        assert not terminated
        if truncated:
            return steps
    raise AssertionError("no end")


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
def test_no_limit_of_gymnasiums_lengthens_an_episode(env_id):
    wish = {"max_steps": 4, "max_episode_steps": 7}
    with pytest.raises(ValueError, match=r"^max_episode_steps=7: expected at most max_steps=4; .*set max_steps=7$"):
        gymnasium.make_vec(env_id, 2, **wish)
    assert gymnasium.make_vec(env_id, 2, max_steps=4, max_episode_steps=4).max_steps == 4
    assert length_of(gymnasium.make(env_id, **wish)) == 4  # as the pages say
    assert "`max_episode_steps` can only shorten it" in " ".join(type(make(env_id).game).__doc__.split())


@each_game
@pytest.mark.parametrize("options", [{}, {"max_steps": 6}], ids=["default", "shorter"])
def test_the_spec_tells_the_limit_that_the_environment_keeps(env_id, options):
    limit = make(env_id, **options).game.max_steps
    env, envs = gymnasium.make(env_id, **options), gymnasium.make_vec(env_id, 2, **options)
    assert "TimeLimit" not in str(env) and gymnasium.spec(env_id).max_episode_steps is None
    for each in (env, env.unwrapped, envs, copy.deepcopy(env), pickle.loads(pickle.dumps(envs))):
        assert each.spec.max_episode_steps == limit
    for shorter in (gymnasium.make(env_id, max_episode_steps=3), gymnasium.make_vec(env_id, 2, max_episode_steps=3)):
        assert shorter.spec.max_episode_steps == 3
    tokens, _ = gymnasium.wrappers.TimeAwareObservation(env, normalize_time=False).reset(seed=0)
    assert tokens["time"].tolist() == [0] if isinstance(tokens, dict) else tokens[-1] == 0


@each_game
def test_what_a_spec_makes_plays_alike(env_id):
    env = gymnasium.make(env_id, max_steps=9)
    twin, sequel = gymnasium.make(env.spec), gymnasium.make(gymnasium.make(env.spec).spec)
    assert env.spec == twin.spec == sequel.spec == type(env.spec).from_json(env.spec.to_json())
    actions = draw_actions(env.action_space, 20)
    assert_same(play(twin, actions, seed=0), play(env, actions, seed=0))
    for limit in ({}, {"max_episode_steps": 5}):
        envs = gymnasium.make_vec(env_id, 3, max_steps=9, **limit)
        others = gymnasium.make_vec(envs.spec)
        assert envs.spec == others.spec and others.num_envs == 3
        assert envs._params == others._params  # whose limit, and so what an end in the last step is called


@each_pettingzoo
@each_length
def test_episode_length_parallel(game, length):
    env = module(game).parallel_env(max_steps=length, **CASES[game].three_agents)
    env.reset(seed=0)
    for t in range(1, length + 1):
        _, _, terminated, truncated, _ = env.step({agent: still(env.action_space(agent)) for agent in env.agents})
        assert set(terminated.values()) == {False} and set(truncated.values()) == {t == length}


@each_pettingzoo
def test_agents_leave_and_return(game):
    env = module(game).parallel_env(max_steps=2, **CASES[game].three_agents)
    everyone = env.possible_agents.copy()
    assert env.agents == [] and len(everyone) == 3
    for _ in range(2):
        env.reset(seed=0)
        assert env.agents == everyone and env.agents is not env.possible_agents
        for action in joint(env, 2):
            assert set(env.step(action)[0]) == set(everyone)
        assert env.agents == [] and env.possible_agents == everyone
        assert env.step({}) == ({}, {}, {}, {}, {})
    for agent in everyone:
        assert env.observation_space(agent) is env.observation_space(agent)
        assert env.action_space(agent) is env.action_space(agent)
    assert len({id(env.action_space(agent)) for agent in everyone}) == 3  # each has a generator of its own


@each_pettingzoo
@pytest.mark.parametrize("seed", [0, 1])
def test_return_equal_in_every_view(game, seed, dense_rewards):
    options = {**CASES[game].three_agents, "continuous_actions": True, "max_steps": 7}

    def act(tokens):
        return np.asarray(steer(tokens[None], np.zeros((1, 5), np.float32))[0])

    parallel = module(game).parallel_env(**options)
    observations, _ = parallel.reset(seed=seed)
    expected = dict.fromkeys(parallel.possible_agents, 0.0)
    for _ in range(7):
        observations, rewards, *_ = parallel.step({agent: act(seen) for agent, seen in observations.items()})
        for agent, reward in rewards.items():
            expected[agent] += reward

    aec = module(game).env(**options)
    aec.reset(seed=seed)
    total = dict.fromkeys(aec.possible_agents, 0.0)
    for agent in aec.agent_iter(max_iter=100):
        tokens, reward, terminated, truncated, _ = aec.last()
        total[agent] += reward
        aec.step(None if terminated or truncated else act(tokens))
    assert total == expected

    single = make(GAME_IDS[game], **options, **CASES[game].follow(steer))
    tokens, _ = single.reset(seed=seed)
    total_return = 0.0
    for _ in range(7):
        tokens, reward, *_ = single.step(act(tokens))
        total_return += reward
    assert total_return == expected[parallel.possible_agents[0]] != 0


@each_case
def test_contained_for_a_thousand_steps(env_id, options):
    env = make(env_id, **options, max_steps=500)
    space = env.observation_space
    hold = draw_actions(env.action_space, 20)  # each is held for 50 steps, which leads far away
    tokens, info = env.reset(seed=0)
    for t in range(1000):
        assert tokens.dtype == space.dtype and tokens in space
        assert info["signal_mask"].dtype == np.bool_ and info["signal_mask"].shape == space.shape[:-1]
        assert type(info["snr"]) is float and 0 < info["snr"] <= 1
        tokens, reward, terminated, truncated, info = env.step(hold[t // 50])
        assert type(reward) is float and type(terminated) is bool and type(truncated) is bool
        if terminated or truncated:
            assert tokens in space
            tokens, info = env.reset()


@each_pettingzoo
def test_parallel_contained(game):
    env = module(game).parallel_env(max_steps=50, **CASES[game].three_agents)
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
    env = module(game).parallel_env(**CASES[game].three_agents)
    observations, _ = env.reset(seed=0)
    state = env.state()
    assert not any(np.array_equal(state, tokens) for tokens in observations.values())
    state[:] = 0
    assert env.state().any()


def global_states():
    """Return the states of the global generators."""
    import torch

    return [repr(random.getstate()), repr(np.random.get_state()), torch.random.get_rng_state()]  # noqa: NPY002


def every_view(game, unseeded=False):
    """Play each view of a game and return what it gave."""
    seen = []
    seed = None if unseeded else 3
    single = make(GAME_IDS[game], max_steps=5)
    seen.append(play(single, draw_actions(single.action_space, 12), seed=seed))
    for backend in ("numpy", "torch"):
        envs = gymnasium.make_vec(GAME_IDS[game], 2, backend=backend, max_steps=5)
        acts = [to_backend(action, backend) for action in draw_actions(envs.action_space, 12)]
        seen.append(play(envs, acts, seed=seed))
    if game in PETTINGZOO:
        parallel = module(game).parallel_env(max_steps=5, **CASES[game].three_agents)
        seen.append(play_parallel(parallel, joint(parallel, 12), seed=seed))
    return seen


@pytest.mark.parametrize("game", GAME_IDS)
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


@each_case_and("kind", ["single", "wrapped", "numpy", "torch"])
def test_copies_play_on_alike(env_id, options, kind):
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
    twins = [way(env) for way in WAYS.values()]
    env.render()
    twins += [way(env) for way in WAYS.values()]
    expected = play(env, actions[5:]), env.render()
    for twin in twins:
        assert_same((play(twin, actions[5:]), twin.render()), expected)


@each_pettingzoo
@each_way
def test_copies_of_parallel_play_on_alike(game, way):
    env = module(game).parallel_env("rgb_array", max_steps=12, **CASES[game].three_agents)
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
@pytest.mark.parametrize("seed", [0, 1])
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


@each_game
def test_refused_reset_changes_nothing(env_id):
    env, untouched = make(env_id), make(env_id)
    actions = draw_actions(env.action_space, 8)
    for each in (env, untouched):
        play(each, actions[:3], seed=0)
    for wrong in ({"episode": -1}, {"episode": 2**62}, {"state": {"what": 1}}):
        with pytest.raises(ValueError, match=r"expected|unknown"):
            env.reset(seed=9, options=wrong)
    assert_same(play(env, actions[3:]), play(untouched, actions[3:]))
    assert_same(env.reset(), untouched.reset())


@each_pettingzoo
def test_parallel_takes_the_state_of_single(game):
    options = CASES[game].three_agents
    single, parallel = make(GAME_IDS[game], **options), module(game).parallel_env(**options)
    tokens, _ = single.reset(seed=4)
    assert_same(parallel.reset(seed=9, options={"state": single.state})[0][parallel.agents[0]], tokens)


@each_case
@pytest.mark.parametrize("seed", [0, 1])
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
    env = module(game).parallel_env(**CASES[game].three_agents)
    starts = [env.reset(seed=1 if n == 0 else None) for n in range(3)]
    assert_same(env.reset(seed=1, options={"episode": 2}), starts[2])


@each_game
def test_unknown_reset_options_are_ignored(env_id):
    env = make(env_id)
    assert_same(env.reset(seed=1, options={"what": 1}), env.reset(seed=1))
    envs = gymnasium.make_vec(env_id, 2)
    assert_same(envs.reset(seed=1, options={"what": 1}), envs.reset(seed=1))


BAD = {
    "continuous": [[np.nan] * 5, [0, 0, 0, 0, np.inf], np.zeros(4), np.zeros((1, 5)), 1, "left"],
    "discrete": [-1, 5, 1.0, np.nan, [1], True, None, "left"],
}


def bad_actions(game):
    return BAD["continuous" if game.continuous_actions else "discrete"]


@each_control
def test_bad_action_is_refused_and_changes_nothing(env_id, options):
    env, untouched = make(env_id, **options), make(env_id, **options)
    actions = draw_actions(env.action_space, 3)
    play(env, actions, seed=0)
    play(untouched, actions, seed=0)
    for bad in bad_actions(env.game):
        with pytest.raises((ValueError, TypeError), match=r"expected|could not convert"):
            env.step(bad)
    assert_same(play(env, actions), play(untouched, actions))


@each_pettingzoo
@each_continuous
def test_bad_action_in_parallel(game, continuous):
    env = module(game).parallel_env(continuous_actions=continuous, **CASES[game].three_agents)
    env.reset(seed=0)
    state = env.state()
    (good,) = joint(env, 1)
    for bad in bad_actions(env.game):
        with pytest.raises((ValueError, TypeError), match=r"expected|could not convert"):
            env.step({**good, env.agents[1]: bad})
    lacking = {agent: good[agent] for agent in env.agents[1:]}
    for wrong in (lacking, {**good, "nobody": good[env.agents[0]]}, {}):
        with pytest.raises(ValueError, match=r"missing .* unknown"):
            env.step(wrong)
    assert_same(env.state(), state)


@each_control
def test_bad_actions_in_numpy_vector(env_id, options):
    envs = gymnasium.make_vec(env_id, 3, **options)
    envs.reset(seed=0)
    good = envs.action_space.sample()
    wrong = [good[:2], good[None], good[0]]
    for value in (np.nan, -np.inf) if envs.game.continuous_actions else (-1, envs.game.num_actions):
        wrong.append(good.copy())
        wrong[-1][2, ...] = value
    if not envs.game.continuous_actions:
        wrong += [good.astype(float), good == 1]
    for bad in wrong:
        with pytest.raises(ValueError, match="expected"):
            envs.step(bad)
    untouched = gymnasium.make_vec(env_id, 3, **options)
    untouched.reset(seed=0)
    assert_same(envs.step(good), untouched.step(good))


@each_control
def test_bad_actions_in_torch_vector(env_id, options):
    torch = pytest.importorskip("torch")
    envs = gymnasium.make_vec(env_id, 3, backend="torch", check_actions=True, **options)
    trusting = gymnasium.make_vec(env_id, 3, backend="torch", **options)
    envs.reset(seed=0)
    trusting.reset(seed=0)
    array = envs.action_space.sample()
    good = torch.from_numpy(array)
    other_type = good.long() if envs.game.continuous_actions else good.float()
    for bad in (good[:2], good[None], good[0], other_type, good.to("meta"), array, array.tolist()):
        for each in (envs, trusting):
            with pytest.raises(ValueError, match="expected"):
                each.step(bad)
    for value in (np.nan, np.inf) if envs.game.continuous_actions else (-1, envs.game.num_actions):
        bad = good.clone()
        bad[1, ...] = value
        with pytest.raises(ValueError, match="in environment 1"):
            envs.step(bad)
    assert_same(envs.step(good), trusting.step(good))
    trusting.step(bad)  # unless asked, nobody waits for the device


@each_control
def test_bool_is_no_action(env_id, options, backend):
    envs = gymnasium.make_vec(env_id, 3, backend=backend, **options)
    envs.reset(seed=0)
    if envs.game.continuous_actions and backend == "numpy":
        pytest.skip("NumPy turns any numbers into floats")
    with pytest.raises(ValueError, match="expected"):
        envs.step(to_backend(envs.action_space.sample() > 0, backend))


@each_control
def test_out_of_range_is_clipped(env_id, options, backend):
    extreme = np.array([9.0, -3.0, 10.0, 0.25, -0.5], np.float32)
    env = make(env_id, **options)
    if not env.game.continuous_actions:
        pytest.skip("discrete")
    results = []
    for one in (extreme, extreme.clip(0, 1)):
        env.reset(seed=0)
        envs = gymnasium.make_vec(env_id, 2, backend=backend, **options)
        envs.reset(seed=0)
        results.append([env.step(one), env.step(one), envs.step(to_backend(np.stack([one, one]), backend)), envs.state])
    assert_same(*results)


@each_game
def test_kinds_of_integers_are_equal(env_id):
    env = make(env_id)
    if env.game.continuous_actions:
        env = make(env_id, continuous_actions=False)
    results = []
    for three in (3, np.int64(3), np.uint8(3), np.uint64(3), np.array(3), np.array(3, np.int32)):
        env.reset(seed=0)
        results.append([env.step(three), env.step(three)])
        assert_same(results[-1], results[0])


@each_control
def test_lists_and_doubles_are_actions(env_id, options):
    env = make(env_id, **options)
    if not env.game.continuous_actions:
        pytest.skip("discrete")
    results = []
    for kind in (np.asarray, list, lambda one: one.astype(np.float64)):
        env.reset(seed=0)
        results.append(env.step(kind(np.float32([0, 0, 1, 0.5, 0]))))
        assert_same(results[-1], results[0])


@each_game
@pytest.mark.parametrize("kind", ["single", "vector", "parallel"])
def test_wrong_options_are_named(env_id, kind):
    game, _ = ENVIRONMENTS[env_id]
    cls = {"single": TokenEnv, "vector": TokenVectorEnv, "parallel": ParallelTokenEnv}[kind]
    with pytest.raises(
        TypeError,
        match=r"unexpected keyword argument 'max_step': did you mean 'max_steps'\? expected one of .*max_steps",
    ):
        cls(game, max_step=3)
    with pytest.raises(ValueError, match=r"render_mode='video': expected one of None, .*'rgb_array'"):
        cls(game, render_mode="video")
    for bad in (0, -1):
        with pytest.raises(ValueError, match=f"max_steps={bad}: expected at least 1"):
            cls(game, max_steps=bad)
    with pytest.raises(TypeError, match=r"max_steps=2\.5: expected an integer"):
        cls(game, max_steps=2.5)


@each_game
def test_wrong_options_of_vector(env_id):
    for wrong, error, message in (
        ({"backend": "jax"}, ValueError, "backend='jax': expected one of 'numpy', 'torch'"),
        ({"device": "cpu"}, ValueError, "device='cpu'.* expected backend='torch'"),
        ({"compile": True}, ValueError, "compile=True.* expected backend='torch'"),
        ({"max_episode_steps": 0}, ValueError, "max_episode_steps=0: expected at least 1"),
        ({"render_envs": 0}, ValueError, "render_envs=0: expected at least 1"),
        ({"autoreset_mode": "never"}, ValueError, "never"),
    ):
        with pytest.raises(error, match=message):
            gymnasium.make_vec(env_id, 2, **wrong)
    with pytest.raises(ValueError, match="num_envs=0: expected at least 1"):
        gymnasium.make_vec(env_id, 0)


@each_game
def test_use_out_of_turn(env_id):
    env, envs = make(env_id, max_steps=1, render_mode="rgb_array"), gymnasium.make_vec(env_id, 2)
    for each in (env, envs):
        for use in (lambda each=each: each.step(still(each.action_space)), each.render, lambda each=each: each.state):
            with pytest.raises(RuntimeError, match="call reset"):
                use()
    play(env, [], seed=0)
    env.step(still(env.action_space))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ended after 1 steps: call reset"):
            env.step(still(env.action_space))
    env.reset()
    for each in (env, envs):
        each.reset()
        each.close()
        each.close()
        for use in (lambda each=each: each.step(still(each.action_space)), each.reset, each.render):
            with pytest.raises(RuntimeError, match="closed"):
                use()


@each_pettingzoo
def test_use_out_of_turn_parallel(game):
    env = module(game).parallel_env()
    (actions,) = joint(env, 1)
    for use in (lambda: env.step(actions), env.render, env.state):
        with pytest.raises(RuntimeError, match="call reset"):
            use()
    env.reset()
    env.close()
    env.close()
    for use in (lambda: env.step(actions), env.reset, env.render, env.state):
        with pytest.raises(RuntimeError, match="closed"):
            use()


@each_game
@pytest.mark.parametrize(
    ("seed", "error"),
    [(-1, (ValueError, gymnasium.error.Error)), (2**63, ValueError), (1.5, (TypeError, gymnasium.error.Error))],
)
def test_wrong_seed(env_id, seed, error):
    for env in (make(env_id), gymnasium.make_vec(env_id, 2)):
        with pytest.raises(error, match=r"[Ss]eed"):
            env.reset(seed=seed)


@each_game
def test_fresh_process_needs_no_import(env_id):
    fresh(f"import gymnasium; gymnasium.make('noisy_envs:{env_id}').reset(seed=0)")


def test_import_is_light_and_quick():
    code = (
        "import sys, time; start = time.process_time(); import noisy_envs; took = time.process_time() - start;"
        "print(took, *sys.modules)"
    )
    runs = [fresh(code).split() for _ in range(3)]
    assert not {"torch", "pygame", "pettingzoo"} & set(runs[0])
    assert min(float(run[0]) for run in runs) < 2  # of the processor; 0.4 where nothing else runs


def test_import_twice_warns_nothing():
    known = {env_id: gymnasium.registry[env_id] for env_id in IDS}
    importlib.reload(noisy_envs)
    assert all(gymnasium.registry[env_id] is spec for env_id, spec in known.items())


def test_pygame_sleeps_unless_something_is_drawn():
    code = f"""
import sys, gymnasium, importlib
for env_id in {list(GAME_IDS.values())}:
    for env in (gymnasium.make("noisy_envs:" + env_id), gymnasium.make_vec(env_id, 2)):
        env.reset(seed=0)
        env.step(env.action_space.sample())
        env.close()
for game in {PETTINGZOO}:
    env = importlib.import_module(f"noisy_envs.{{game}}_v0").parallel_env()
    env.reset(seed=0)
    env.step({{agent: env.action_space(agent).sample() for agent in env.agents}})
    env.close()
print([name for name in sys.modules if name.startswith("pygame")])
"""
    assert fresh(code).strip() == "[]"


@each_game
def test_render_needs_a_mode(env_id):
    env, envs = make(env_id), gymnasium.make_vec(env_id, 2)
    env.reset()
    with pytest.warns(UserWarning, match="does nothing without a render_mode"):
        assert env.render() is None
    envs.reset()
    with pytest.raises(RuntimeError, match=r"render_mode='rgb_array'"):
        envs.render()


@each_game
def test_recorded_video(env_id, tmp_path, monkeypatch):
    pytest.importorskip("moviepy")
    from gymnasium.wrappers import RecordVideo

    folder, videos = tmp_path / "videos", []
    save = RecordVideo.stop_recording
    monkeypatch.setattr(RecordVideo, "stop_recording", lambda self: (videos.append(self.recorded_frames), save(self)))
    env = RecordVideo(
        gymnasium.make(env_id, render_mode="rgb_array", max_steps=4), str(folder), episode_trigger=lambda _: True
    )
    firsts = []
    for episode in range(3):
        env.reset(seed=0 if episode == 0 else None)
        firsts.append(env.render())
        for action in draw_actions(env.action_space, 4):
            env.step(action)
    env.close()
    assert [len(frames) for frames in videos] == [5, 5, 5]
    for frames, first in zip(videos, firsts, strict=True):
        np.testing.assert_array_equal(frames[0], first)
        assert all((a != b).any() for a, b in pairwise(frames))
    assert not np.array_equal(firsts[0], firsts[1])
    assert len(list(folder.glob("*.mp4"))) == 3


@each_game
def test_vector_frames_are_those_of_single(env_id, backend):
    envs = gymnasium.make_vec(env_id, 5, backend=backend, render_mode="rgb_array", render_envs=3, max_steps=4)
    envs.reset(seed=7)
    singles = [make(env_id, render_mode="rgb_array", max_steps=4) for _ in range(3)]
    for i, env in enumerate(singles):
        env.reset(seed=7 + i)
    actions = draw_actions(envs.action_space, 8)
    for t, batch in enumerate(actions):
        if t in (0, 1, 4, 5, 7):  # first, second and last frame of the first episode, and of the second
            frames = envs.render()
            assert len(frames) == 3
            for env, frame in zip(singles, frames, strict=True):
                # on torch a particle may lie a last digit beside, which shades a pixel
                alike = np.isclose(frame.astype(int), env.render().astype(int), atol=0 if backend == "numpy" else 8)
                assert frame.dtype == np.uint8 and alike.mean() >= (1 if backend == "numpy" else 0.999)
        envs.step(to_backend(batch, backend))
        for env, action in zip(singles, batch, strict=False):
            if env._episode.truncated:
                env.reset()
            else:
                env.step(action)


@each_game
def test_close_leaves_other_windows_open(env_id, dummy_display):
    first, second = (make(env_id, render_mode="human") for _ in range(2))
    for env in (first, second):
        env.reset(seed=0)
    import pygame

    same = second._episode._renderer._window
    window, _ = same.opened
    first.close()
    first.close()
    assert pygame.display.get_init()
    second.step(still(second.action_space))
    assert same.opened[0] is window
    window.get_surface()
    array = make(env_id, render_mode="rgb_array")
    array.reset()
    array.render()
    array.close()
    second.step(still(second.action_space))
    assert same.opened[0] is window
    second.close()


@each_game
@pytest.mark.parametrize("view", ["single", "parallel", "turns"])
def test_play_goes_on_when_the_person_closes_the_window(env_id, view, dummy_display, monkeypatch):
    import pygame

    game, parameters = ENVIRONMENTS[env_id]
    if view == "single":
        env = make(env_id, render_mode="human")
        actions = draw_actions(env.action_space, 6)
    elif view == "parallel":
        env = ParallelTokenEnv(game, "human", **parameters)
        actions = joint(env, 6)
    else:
        if game not in PETTINGZOO:
            pytest.skip("one agent needs no turns")
        env = module(game).env("human", **parameters)
        actions = [still(env.action_space(env.possible_agents[0]))] * 6
    env.reset(seed=0)
    window, shown = env.unwrapped._episode._renderer._window, []
    monkeypatch.setattr(window, "show", lambda picture, show=window.show: (shown.append(picture), show(picture)))
    env.step(actions[0])
    while not shown:  # agents in turn are drawn once all have acted
        env.step(actions[0])
    pygame.event.post(pygame.event.Event(pygame.WINDOWCLOSE, window=window.opened[0]))
    for action in actions[1:]:
        env.step(action)
    assert window.opened is None
    env.reset()
    assert env.render() is None and len(shown) == 2  # the one that met the event is the last
    assert pygame.event.get(pygame.WINDOWCLOSE), "the program hears it too"
    env.close()


@each_game
def test_stable_baselines_learns_from_flat_observations(env_id):
    sb3 = pytest.importorskip("stable_baselines3")
    env = gymnasium.wrappers.FlattenObservation(gymnasium.make(env_id, max_steps=8))
    agent = sb3.PPO("MlpPolicy", env, n_steps=16, batch_size=16, n_epochs=1, seed=0, device="cpu")
    before = [weight.detach().clone() for weight in agent.policy.parameters()]
    agent.learn(16)
    assert any((new != old).any() for new, old in zip(agent.policy.parameters(), before, strict=True))
