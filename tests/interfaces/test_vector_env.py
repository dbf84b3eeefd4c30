"""Vector environments: equal to Gymnasium's own vector of single worlds, in both backends, from any seed."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import gymnasium
import numpy as np
import pytest
from cases import (
    CASES,
    GAME_IDS,
    PETTINGZOO,
    TEAMS,
    by_default,
    each_case,
    each_case_and,
    each_game,
    each_id,
    each_pettingzoo,
    each_policed_control,
    each_team,
    slow,
    steer,
)
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from helpers import assert_same, draw_actions, make, module, play, still, to_backend

from noisy_envs import ENVIRONMENTS
from noisy_envs.arrays import as_numpy
from noisy_envs.interfaces.vector_env import TokenVectorEnv
from noisy_envs.registration import GAMES

NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
each_case_and_mode = each_case_and("mode", AutoresetMode)
each_team_and_mode = each_case_and("mode", AutoresetMode, TEAMS)
each_auto_mode = pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP], ids=lambda mode: mode.name)
each_seed = pytest.mark.parametrize("seed", [0, 1])
a_seed = pytest.mark.parametrize("seed", [0, slow(1)])
# where other tests hold torch to the numbers, shapes and types of NumPy
numpy_by_default = pytest.mark.parametrize("backend", ["numpy", slow("torch")], indirect=True)


def native(env_id: str, num_envs: int, mode: AutoresetMode = NEXT_STEP, **options: Any) -> gymnasium.vector.VectorEnv:
    return gymnasium.make_vec(env_id, num_envs, autoreset_mode=mode, **options)


def sync(env_id: str, num_envs: int, mode: AutoresetMode = NEXT_STEP, **options: Any) -> gymnasium.vector.VectorEnv:
    return gymnasium.make_vec(env_id, num_envs, "sync", vector_kwargs={"autoreset_mode": mode}, **options)


def staggered(envs: gymnasium.vector.VectorEnv, steps: int, seed: int = 0, backend: str = "numpy") -> Iterator[Any]:
    """Play worlds that end at different times, because some were reset early; yield all that is returned.

    World 0 is never reset early. Where the mode is DISABLED, those that ended are reset by their mask.
    """
    yield envs.reset(seed=seed)
    early = np.random.default_rng(seed).random((steps, envs.num_envs)) < 0.01
    early[:, 0] = False
    disabled = envs.metadata["autoreset_mode"] is DISABLED
    for action, chosen in zip(draw_actions(envs.action_space, steps, seed), early, strict=True):
        result = envs.step(to_backend(action, backend))
        yield result
        mask = chosen | as_numpy(result[2] | result[3]) if disabled else chosen
        if mask.any():
            yield envs.reset(options={"reset_mask": mask})


def arrays_in(result: Any) -> list[Any]:
    """Return the arrays in nested containers."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (list, tuple)):
        return [array for item in result for array in arrays_in(item)]
    if getattr(result, "dtype", None) == np.object_:
        return [result, *arrays_in(result.tolist())]
    return [result] if hasattr(result, "dtype") else []


@each_case_and_mode
def test_equals_vector_of_singles(env_id, options, mode):
    both = [maker(env_id, 4, mode, **options, max_steps=20) for maker in (native, sync)]
    ends = np.zeros(4, int)
    for t, (ours, theirs) in enumerate(zip(*(staggered(envs, 250) for envs in both), strict=True)):
        assert_same(ours, theirs, f"result {t}")
        ends += (ours[2] | ours[3]) if len(ours) == 5 else 0
    assert ends.min() >= 5 and len(set(ends)) > 1


@each_id
@pytest.mark.parametrize("mode", [NEXT_STEP, slow(SAME_STEP)])
@a_seed
def test_every_id_equals_vector_of_singles(env_id, mode, seed):
    both = [maker(env_id, 3, mode, max_steps=9) for maker in (native, sync)]
    assert_same(*(list(staggered(envs, 40, seed)) for envs in both))


@each_case
def test_reset_step_ignores_the_action(env_id, options, backend, dense_rewards):
    envs = native(env_id, 3, **options, max_steps=3, backend=backend, check_actions=True)
    twin = native(env_id, 3, **options, max_steps=3, backend=backend)
    actions = [to_backend(action, backend) for action in draw_actions(envs.action_space, 7)]
    mask = np.array([True, False, True])
    for each in (envs, twin):  # world 1 ends a step before the others
        each.reset(seed=0)
        each.step(actions[0])
        each.reset(options={"reset_mask": mask})
    senseless = to_backend(as_numpy(actions[3]).copy(), backend)
    senseless[1, ...] = np.nan if envs.game.continuous_actions else -7
    for each, third in ((envs, senseless), (twin, actions[3])):
        for action in actions[1:3]:
            _, _, _, truncated, _ = each.step(action)
        assert as_numpy(truncated).tolist() == [False, True, False]
        _, reward, terminated, truncated, _ = each.step(third)
        assert as_numpy(reward)[1] == 0 and as_numpy(reward)[0] != 0
        assert not as_numpy(terminated).any() and as_numpy(truncated).tolist() == [True, False, True]
    assert_same(play(envs, actions[4:]), play(twin, actions[4:]))


@each_case
@each_auto_mode
def test_episode_statistics(env_id, options, mode, dense_rewards):
    if mode is SAME_STEP and tuple(map(int, gymnasium.__version__.split(".")[:2])) < (1, 4):
        pytest.skip("Gymnasium counted wrongly before 1.4")
    envs = RecordEpisodeStatistics(native(env_id, 2, mode, **options, max_steps=3))
    singles = [make(env_id, **options, max_steps=3) for _ in range(2)]
    actions = draw_actions(envs.action_space, 16 if mode is NEXT_STEP else 12)
    play(envs, actions, seed=0)
    counted = [action for t, action in enumerate(actions) if mode is SAME_STEP or t % 4 != 3]
    totals = np.zeros((4, 2))
    for i, env in enumerate(singles):
        env.reset(seed=i)
        for t, action in enumerate(counted):
            totals[t // 3, i] += env.step(action[i])[1]
            if t % 3 == 2:
                env.reset()
    assert list(envs.length_queue) == [3] * 8
    np.testing.assert_allclose(envs.return_queue, totals.ravel())


@each_game
@each_auto_mode
def test_final_observation(env_id, mode, backend):
    envs = native(env_id, 3, mode, max_steps=4, backend=backend)
    names = {"final_obs", "_final_obs", "final_info", "_final_info"}
    ordinary = {"signal_mask", "_signal_mask", "snr", "_snr"}
    if envs.game.terminates:
        ordinary |= {"is_success", "_is_success"}
    numpy_twin = native(env_id, 3, mode, max_steps=4)
    ends = 0
    for ours, reference in zip(staggered(envs, 60, backend=backend), staggered(numpy_twin, 60), strict=True):
        info, over = ours[-1], ours[2] | ours[3] if len(ours) == 5 else None
        ended = mode is SAME_STEP and over is not None and bool(over.any())
        assert set(info) == (names | ordinary if ended else ordinary)
        if not ended:
            continue
        ends += 1
        for told in (info["_final_obs"], info["_final_info"], info["final_info"]["_snr"]):
            assert_same(told, over)
        if backend == "torch":
            assert info["final_obs"].shape == ours[0].shape and info["final_obs"].dtype == ours[0].dtype
        for i in np.flatnonzero(as_numpy(over)):
            last = as_numpy(info["final_obs"][i])
            np.testing.assert_allclose(last, reference[-1]["final_obs"][i], atol=1e-5)
            assert (last != as_numpy(ours[0][i])).any()
    assert ends > 10 or mode is NEXT_STEP


@each_game
@pytest.mark.parametrize("maker", ["native", "sync", "async"])
def test_step_limit_in_make_vec(env_id, maker):
    kwargs = {
        "native": {},
        "sync": {"vectorization_mode": "sync"},
        # as on Windows; forking a process in which torch has threads draws a warning
        "async": {"vectorization_mode": "async", "vector_kwargs": {"context": "spawn"}},
    }[maker]
    envs = gymnasium.make_vec(env_id, 2, max_episode_steps=5, **kwargs)
    played = play(envs, [still(envs.action_space)] * 11, seed=0)[1:]
    assert [t + 1 for t, (_, _, _, truncated, _) in enumerate(played) if truncated.all()] == [5, 11]
    assert not any(terminated.any() for _, _, terminated, _, _ in played)
    envs.close()


def test_closing_what_could_not_be_made_is_no_error():
    TokenVectorEnv.__new__(TokenVectorEnv).close()


@each_case
def test_disabled_needs_the_mask(env_id, options, backend):
    envs = native(env_id, 3, DISABLED, **options, max_steps=2, backend=backend)
    action = to_backend(still(envs.action_space), backend)
    one = np.array([False, True, False])
    with pytest.raises(RuntimeError, match="first reset must be of all environments"):
        envs.reset(seed=0, options={"reset_mask": one})
    before, _ = envs.reset(seed=0)
    envs.step(action)
    tokens, info = envs.reset(seed=0, options={"reset_mask": to_backend(one, backend)})
    assert_same(tokens[1], before[1])
    assert as_numpy(info["_snr"]).tolist() == one.tolist() and as_numpy(info["snr"] > 0).tolist() == one.tolist()
    _, _, _, truncated, _ = envs.step(action)
    assert as_numpy(truncated).tolist() == [True, False, True]
    state = envs.state
    with pytest.raises(RuntimeError, match=r"environments \[0, 2\] have ended"):
        envs.step(action)
    for bad in (one[:2], one.astype(int), one & False):
        with pytest.raises(ValueError, match=r"expected bool \(3,\) with at least one True"):
            envs.reset(options={"reset_mask": bad})
    assert_same(envs.state, state)
    envs.reset(options={"reset_mask": ~one})
    _, _, _, truncated, _ = envs.step(action)
    assert as_numpy(truncated).tolist() == one.tolist()


@each_case
@each_seed
def test_integer_seed_is_one_more_for_each_world(env_id, options, seed):
    envs = native(env_id, 3, SAME_STEP, **options, max_steps=4)
    actions = draw_actions(envs.action_space, 10)
    played = play(envs, actions, seed=seed)
    for i in range(3):
        env = make(env_id, **options, max_steps=4)
        tokens, _ = env.reset(seed=seed + i)
        np.testing.assert_array_equal(played[0][0][i], tokens)
        for action, (batch, rewards, *_) in zip(actions, played[1:], strict=True):
            tokens, reward, _, truncated, _ = env.step(action[i])
            tokens = env.reset()[0] if truncated else tokens
            np.testing.assert_array_equal(batch[i], tokens)
            assert rewards[i] == reward


@each_game
def test_list_of_seeds(env_id, backend):
    envs = native(env_id, 3, backend=backend)
    starts = [envs.reset(seed=seeds)[0] for seeds in ([7, 0, 3], [7, None, 1], None, (1, 1, 7))]
    assert [numbers.tolist() for numbers in envs.episodes] == [[1, 1, 7], [0, 0, 0]]

    def start(seed, number):
        return native(env_id, 1, backend=backend).reset(seed=seed, options={"episode": number})[0][0]

    expected = [
        [(7, 0), (0, 0), (3, 0)],
        [(7, 0), (0, 1), (1, 0)],
        [(7, 1), (0, 2), (1, 1)],
        [(1, 0), (1, 0), (7, 0)],
    ]
    for tokens, names in zip(starts, expected, strict=True):
        for i, name in enumerate(names):
            assert_same(tokens[i], start(*name), f"{name}")
    for seeds in (np.array([7, 0, 3]), to_backend(np.array([7, 0, 3]), backend)):
        assert_same(envs.reset(seed=seeds)[0], starts[0])
    for wrong in ([1, 2], [1, 2, 3, 4], [], np.arange(2)):
        with pytest.raises(ValueError, match="expected 3 seeds"):
            envs.reset(seed=wrong)
    no_seeds = (([1, -1, 2], ValueError), ([1, 2.5, 3], TypeError), ([1, True, 3], TypeError))
    for wrong, error in (*no_seeds, (np.array([1, 2.5, 3]), TypeError), (np.zeros((3, 1), int), TypeError)):
        with pytest.raises(error, match="seed="):
            envs.reset(seed=wrong)


@each_game
def test_without_seed_worlds_differ(env_id, backend):
    envs = [native(env_id, 4, backend=backend) for _ in range(2)]
    starts = [as_numpy(one).tobytes() for each in envs for one in each.reset()[0]]
    starts += [as_numpy(one).tobytes() for one in envs[0].reset()[0]]
    assert len(set(starts)) == 12


@each_case_and_mode
def test_world_does_not_depend_on_resets_of_others(env_id, options, mode):
    calm, busy = (native(env_id, 3, mode, **options, max_steps=7) for _ in range(2))
    calm.reset(seed=0)
    busy.reset(seed=0)
    for t, action in enumerate(draw_actions(calm.action_space, 40)):
        alone, among = calm.step(action), busy.step(action)
        assert_same([field[0] for field in alone[:4]], [field[0] for field in among[:4]], f"step {t}")
        if mode is DISABLED and (ended := alone[2] | alone[3]).any():
            calm.reset(options={"reset_mask": ended})
        mask = (among[2] | among[3]) & (mode is DISABLED)
        mask[1 + t % 2] |= t % 5 == 0
        if mask.any():
            busy.reset(seed=[None, 5, t], options={"reset_mask": mask})
    assert calm.episodes[1][0] == busy.episodes[1][0] > 3


@each_case
@each_auto_mode
def test_one_world_keeps_its_axis(env_id, options, mode, backend):
    envs = native(env_id, 1, mode, **options, max_steps=2, backend=backend, render_mode="rgb_array")
    shape = envs.single_observation_space.shape
    actions = [to_backend(action, backend) for action in draw_actions(envs.action_space, 6)]
    for result in play(envs, actions, seed=0):
        assert result[0].shape == (1, *shape)
        for array in result[1:-1]:
            assert array.shape == (1,)
        info = result[-1]
        for part in [info, info["final_info"]] if "final_info" in info else [info]:
            assert part["signal_mask"].shape == (1, *shape[:-1])
            for name in ("_signal_mask", "snr", "_snr"):
                assert part[name].shape == (1,)
        assert as_numpy(result[0]) in envs.observation_space
    assert len(envs.render()) == 1


def seeded_play(kind: str, env_id: str, options: dict[str, Any]) -> tuple[Any, list[Any]]:
    """Make an environment and 17 actions."""
    if kind == "single":
        env = make(env_id, **options, max_steps=15)
        return env, draw_actions(env.action_space, 17)
    if kind == "torch":
        pytest.importorskip("torch")
    env = native(env_id, 3, **options, max_steps=15, backend=kind)
    return env, [to_backend(action, kind) for action in draw_actions(env.action_space, 17)]


each_case_and_kind = each_case_and("kind", ["single", "numpy", "torch"])


@each_case_and_kind
@a_seed
def test_seed_reaches_later_resets(env_id, options, kind, seed):
    runs = []
    for _ in range(2):
        env, _ = seeded_play(kind, env_id, options)
        runs.append([env.reset(seed=seed), *(env.reset() for _ in range(4))])
    assert_same(*runs)
    other, _ = seeded_play(kind, env_id, options)
    first = as_numpy(runs[0][0][0])
    assert (first != as_numpy(other.reset(seed=seed + 42)[0])).any()


@each_case_and_kind
@a_seed
def test_seed_leaves_nothing_of_the_past(env_id, options, kind, seed):
    used, actions = seeded_play(kind, env_id, options)
    fresh, _ = seeded_play(kind, env_id, options)
    play(used, actions, seed=99)
    assert_same(play(used, actions, seed=seed), play(fresh, actions, seed=seed))


@each_case_and_kind
def test_episodes_differ(env_id, options, kind):
    lists = []
    for _ in range(2):
        env, _ = seeded_play(kind, env_id, options)
        resets = [env.reset(seed=5), *(env.reset() for _ in range(49))]
        lists.append([as_numpy(tokens).tobytes() for tokens, _ in resets])
    assert lists[0] == lists[1] and len(set(lists[0])) >= 49


@each_pettingzoo
@each_seed
def test_parallel_view_plays_the_episode_of_single(game, seed, dense_rewards):
    options = {**CASES[game].three_agents, "continuous_actions": True, "max_steps": 20}
    single, parallel = (
        make(GAME_IDS[game], **options, **CASES[game].follow(steer)),
        module(game).parallel_env(**options),
    )
    actions = draw_actions(single.action_space, 20)
    learner = parallel.possible_agents[0]
    for episode in range(2):
        ours, seen = (env.reset(seed=None if episode else seed) for env in (single, parallel))
        assert_same([ours[0], ours[1]], [part[learner] for part in seen])
        for action in actions:
            joint = {agent: steer(tokens[None], 0)[0] for agent, tokens in seen[0].items()}
            ours, seen = single.step(action), parallel.step({**joint, learner: action})
            assert_same(list(ours), [part[learner] for part in seen])
        for field, other in zip(single.state, parallel._episode.state, strict=True):
            np.testing.assert_array_equal(field, other[0])


@each_pettingzoo
@each_seed
def test_function_gets_the_chance_of_its_agent(game, seed):
    options = {**CASES[game].three_agents, "continuous_actions": True, "max_steps": 6}
    runs = []
    for policy in ("random", lambda tokens, u: u):
        envs = native(GAME_IDS[game], 3, **options, **CASES[game].follow(policy))
        runs.append((play(envs, draw_actions(envs.action_space, 10), seed=seed), envs.state))
    assert_same(*runs)


@each_case
def test_state_round_trip(env_id, options, backend):
    source, target = (native(env_id, 3, **options, backend=backend) for _ in range(2))
    actions = [to_backend(action, backend) for action in draw_actions(source.action_space, 10)]
    play(source, actions, seed=0)
    state = source.state
    given = type(state)._make(to_backend(as_numpy(field).copy(), backend) for field in state)
    target.reset(seed=9, options={"state": given})
    for field in given:
        field[...] = 0
    assert_same(target.state, state)
    masked = np.array([False, True, False])
    before = source.state
    source.reset(seed=3)
    other = source.state
    source.reset(options={"state": before, "reset_mask": masked})
    for field, old, new in zip(source.state, before, other, strict=True):
        assert_same(field[1], old[1])
        assert_same(field[0], new[0])
        assert_same(field[2], new[2])


@each_game
def test_replay_by_number(env_id, backend):
    envs = native(env_id, 3, backend=backend)
    starts = [envs.reset(seed=0 if n == 0 else None) for n in range(4)]
    for n in (3, 0, 2):
        assert_same(envs.reset(seed=0, options={"episode": n}), starts[n])
    assert_same(envs.reset(), starts[3])
    assert [one.tolist() for one in envs.episodes] == [[0, 1, 2], [3, 3, 3]]


@each_game
@pytest.mark.parametrize("kind", ["single", "vector"])
def test_integers_of_numpy_are_seeds(env_id, kind):
    env, twin = (make(env_id) if kind == "single" else native(env_id, 2) for _ in range(2))
    for seed in (np.int64(3), np.uint8(4)):
        assert_same(env.reset(seed=seed), twin.reset(seed=int(seed)))
        assert_same(env.unwrapped.np_random.random(), twin.unwrapped.np_random.random())


@each_case
def test_refused_reset_changes_nothing(env_id, options, backend):
    envs, untouched = (native(env_id, 3, **options, max_steps=7, backend=backend) for _ in range(2))
    actions = [to_backend(action, backend) for action in draw_actions(envs.action_space, 20)]
    for each in (envs, untouched):
        play(each, actions[:3], seed=0)
    for wrong in ({"seed": 9, "options": {"episode": -1}}, {"options": {"state": {"what": 1}}}, {"seed": [5, 6, -1]}):
        with pytest.raises((ValueError, TypeError)):
            envs.reset(**wrong)
    assert_same(play(envs, actions[3:]), play(untouched, actions[3:]))


@each_case_and("mode", [NEXT_STEP, SAME_STEP])
def test_returned_arrays_are_the_callers(env_id, options, mode, backend):
    kept, wiped = (native(env_id, 3, mode, **options, max_steps=4, backend=backend) for _ in range(2))
    runs = (staggered(kept, 40, backend=backend), staggered(wiped, 40, backend=backend))
    for t, (ours, other) in enumerate(zip(*runs, strict=True)):
        assert_same(other, ours, f"result {t}")
        for array in arrays_in([other, tuple(wiped.state), wiped.episodes]):
            array[...] = None if array.dtype == object else 1


@each_case
@each_auto_mode
def test_returned_arrays_share_no_memory(env_id, options, mode, backend):
    envs = native(env_id, 3, mode, **options, max_steps=2, backend=backend)
    for result in staggered(envs, 8, backend=backend):
        arrays = [as_numpy(array) for array in arrays_in(result)]
        for i, one in enumerate(arrays):
            assert not any(np.may_share_memory(one, other) for other in arrays[:i])


@each_game
@pytest.mark.parametrize("kind", ["single", "parallel"])
def test_returned_arrays_of_one_world_are_the_callers(env_id, kind):
    def run(wipe):
        if kind == "single":
            env = make(env_id, max_steps=4)
            step = env.step
        else:
            game, _ = ENVIRONMENTS[env_id]
            if game not in PETTINGZOO:
                pytest.skip("no view of PettingZoo")
            env = module(game).parallel_env(max_steps=4, **CASES[game].one_agent)
            (agent,) = env.possible_agents
            step = lambda action: env.step({agent: action})  # noqa: E731
        space = env.action_space if kind == "single" else env.action_space(agent)
        for t, action in enumerate([None, *draw_actions(space, 4), None, *draw_actions(space, 4)]):
            result = env.reset(seed=0 if t == 0 else None) if action is None else step(action)
            yield result
            if wipe:
                for array in arrays_in(result):
                    array[...] = 1

    for ours, other in zip(run(False), run(True), strict=True):
        assert_same(other, ours)


@each_case
@numpy_by_default
def test_many_worlds(env_id, options, backend):
    envs = native(env_id, 4096, SAME_STEP, **options, max_steps=2, backend=backend)
    action = to_backend(envs.action_space.sample(), backend)
    tokens, _ = envs.reset(seed=0)
    assert len({row.tobytes() for row in as_numpy(tokens)}) > 3950  # of 100,000 levels, some come twice
    for _ in range(3):
        tokens, reward, _, _, _ = envs.step(action)
        assert as_numpy(tokens) in envs.observation_space and as_numpy(reward).shape == (4096,)


# What torch gives beside NumPy.


@each_case
@each_seed
def test_torch_draws_the_same_numbers(env_id, options, seed):
    pytest.importorskip("torch")
    ours, reference = (native(env_id, 40, **options, backend=name) for name in ("torch", "numpy"))
    for episode in range(3):
        results = [envs.reset(seed=None if episode else seed) for envs in (ours, reference)]
        (tokens, info), (expected, told) = results
        for field, same in zip(ours.state, reference.state, strict=True):
            np.testing.assert_allclose(as_numpy(field), same, rtol=0, atol=1e-6)
        if hasattr(ours, "token_spec"):
            marker = ours.token_spec.padding_feature
            np.testing.assert_array_equal(as_numpy(tokens[..., marker]), expected[..., marker])  # roles, so counts too
        np.testing.assert_array_equal(as_numpy(info["signal_mask"]), told["signal_mask"])
        np.testing.assert_allclose(as_numpy(info["snr"]), told["snr"], rtol=1e-6)


@each_case
@a_seed
def test_torch_steps_as_numpy(env_id, options, seed):
    pytest.importorskip("torch")
    ours, reference = (native(env_id, 20, **options, backend=name) for name in ("torch", "numpy"))
    reference.reset(seed=seed)
    for t, action in enumerate(draw_actions(reference.action_space, 30)):
        for envs in (ours, reference):  # the number of the episode varies the chance of its first step
            envs.reset(seed=seed, options={"state": reference.state, "episode": t})
        for field, same in zip(ours.state, reference.state, strict=True):
            np.testing.assert_array_equal(as_numpy(field), same)
        results = ours.step(to_backend(action, "torch")), reference.step(action)
        for field, same in zip(results[0][:4], results[1][:4], strict=True):
            np.testing.assert_allclose(as_numpy(field), same, rtol=0, atol=1e-5)


def devices() -> list[str]:
    try:
        import torch
    except ModuleNotFoundError:
        return []
    return ["cpu", "cpu:0", *(["cuda", "cuda:0"] if torch.cuda.is_available() else [])]


@each_case
@pytest.mark.parametrize("device", devices())
def test_torch_types_and_devices(env_id, options, device):
    torch = pytest.importorskip("torch")
    envs = native(env_id, 2, SAME_STEP, **options, max_steps=2, backend="torch", device=device)
    tokens, info = envs.reset(seed=0)
    assert tokens.device.type == torch.device(device).type
    actions = [to_backend(action, "torch").to(device) for action in draw_actions(envs.action_space, 4)]
    for action in actions:
        tokens, reward, terminated, truncated, info = envs.step(action)
        assert tokens.dtype == (torch.float32 if hasattr(envs, "token_spec") else torch.uint8)
        assert reward.dtype == info["snr"].dtype == torch.float32
        assert terminated.dtype == truncated.dtype == info["signal_mask"].dtype == info["_snr"].dtype == torch.bool
        given = arrays_in([tokens, reward, terminated, truncated, info, tuple(envs.state)])
        assert {array.device for array in given} == {tokens.device}


@each_case
def test_torch_builds_no_graph(env_id, options):
    torch = pytest.importorskip("torch")
    envs = native(env_id, 2, **options, backend="torch")
    if not envs.game.continuous_actions:
        pytest.skip("integers have no gradient")
    envs.reset(seed=0)
    tokens, reward, *_ = envs.step(torch.full((2, 5), 0.5, requires_grad=True))
    assert not tokens.requires_grad and not reward.requires_grad


@each_case
def test_torch_keeps_its_types_whatever_the_action(env_id, options):
    torch = pytest.importorskip("torch")
    envs = native(env_id, 2, **options, backend="torch")
    kinds = ("float64", "float16") if envs.game.continuous_actions else ("int32", "uint8")
    for kind in kinds:
        first, _ = envs.reset(seed=0)
        before = [array.dtype for array in (*envs.state, first)]
        for _ in range(2):
            tokens, reward, *_ = envs.step(to_backend(envs.action_space.sample(), "torch").to(getattr(torch, kind)))
            assert [array.dtype for array in (*envs.state, tokens)] == before and reward.dtype == torch.float32


@by_default(
    ("env_id", "learners"),
    [(GAME_IDS["simple_centroid"], "first"), (GAME_IDS["simple_tag"], "all"), (GAME_IDS["box_world"], "first")],
    product(GAME_IDS.values(), ["first", "all"]),
)
def test_a_fresh_core_compiles_whole(env_id, learners, monkeypatch):
    torch = pytest.importorskip("torch")
    compiler = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda function, fullgraph: compiler(function, backend="eager", fullgraph=fullgraph)
    )
    plain, compiled = (
        native(env_id, 3, backend="torch", compile=flag, learners=learners, max_steps=113) for flag in (False, True)
    )
    for envs in (plain, compiled):
        envs.reset(seed=0)
    (action,) = draw_actions(plain.action_space, 1)
    actions = torch.from_numpy(action)
    for one, other in zip(plain.step(actions)[:4], compiled.step(actions)[:4], strict=True):
        assert torch.equal(one, other)


# --- several learners: an axis of agents ---

INFO = ("signal_mask", "snr")


def team_of(envs: gymnasium.vector.VectorEnv, team: str) -> tuple[int, tuple[int, ...]]:
    """Return how many agents a team has, and the shape of what each sees."""
    return len(envs.game.agents[envs.game.teams[team]]), envs.game.observation_bounds[0].shape


@each_team_and_mode
def test_agent_axis(env_id, options, team, mode, backend):
    envs = native(env_id, 3, mode, **options, max_steps=4, learners=team, backend=backend)
    n, shape = team_of(envs, team)
    assert envs.single_observation_space.shape == (n, *shape)
    assert envs.action_space.shape == ((3, n, 5) if envs.game.continuous_actions else (3, n))
    resets = 0
    for result in staggered(envs, 30, backend=backend):
        info = result[-1]
        finals = [info["final_info"]] if "final_info" in info else []
        resets += "final_info" in info or len(result) == 2
        assert as_numpy(result[0]) in envs.observation_space
        for part in (info, *finals):
            assert part["signal_mask"].shape == (3, n, *shape[:-1]) and part["snr"].shape == (3, n)
            assert part["_signal_mask"].shape == part["_snr"].shape == (3,)
            here = as_numpy(part["_snr"])
            assert (as_numpy(part["snr"])[here] > 0).all() and not as_numpy(part["snr"])[~here].any()
        if finals:
            last = info["final_obs"]
            for i in np.flatnonzero(as_numpy(info["_final_obs"])):
                assert as_numpy(last[i]) in envs.single_observation_space
        if len(result) == 5:
            assert result[1].shape == (3, n) and result[2].shape == result[3].shape == (3,)
            assert str(result[1].dtype) == {"numpy": "float64", "torch": "torch.float32"}[backend]
        arrays = [as_numpy(array) for array in arrays_in(result)]
        for i, one in enumerate(arrays):
            assert not any(np.may_share_memory(one, other) for other in arrays[:i])
    assert resets > 2 or mode is NEXT_STEP


def world_of_team(env: Any, actions: list[Any], mode: AutoresetMode, seed: int) -> Iterator[Any]:
    """Play PettingZoo's view as one world of a vector environment: what it shows, stacked over agents, at each step."""

    def shown(observations: dict[str, Any], infos: dict[str, Any]) -> list[np.ndarray]:
        seen = [[observations[agent] for agent in infos], *([info[k] for info in infos.values()] for k in INFO)]
        return [np.array(field) for field in seen]

    yield shown(*env.reset(seed=seed))
    for action in actions:
        if not env.agents:  # NEXT_STEP: the action is ignored
            yield shown(*env.reset()), np.zeros(len(action)), False, None
            continue
        tokens, reward, _, truncated, infos = env.step(dict(zip(env.agents, action, strict=True)))
        seen, ended = shown(tokens, infos), all(truncated.values())
        last = seen if ended and mode is SAME_STEP else None
        if ended and mode is not NEXT_STEP:
            following = shown(*env.reset())
            seen = following if mode is SAME_STEP else seen
            last = following if mode is DISABLED else last
        yield seen, np.array(list(reward.values())), ended, last


@each_team_and_mode
@a_seed
def test_rows_of_a_team_are_those_of_the_parallel_view(env_id, options, team, mode, seed, dense_rewards):
    game, _ = ENVIRONMENTS[env_id]
    if game not in PETTINGZOO:
        pytest.skip("no view of PettingZoo")
    envs = native(env_id, 3, mode, **options, max_steps=6, learners=team)
    actions = draw_actions(envs.action_space, 20, seed)
    worlds = [
        world_of_team(
            module(game).parallel_env(**options, max_steps=6, learners=team), [a[i] for a in actions], mode, seed + i
        )
        for i in range(3)
    ]

    def same(i: int, tokens: Any, info: dict[str, Any], expected: list[np.ndarray]) -> None:
        assert_same([tokens[i], *(info[name][i] for name in INFO)], expected)

    tokens, info = envs.reset(seed=seed)
    for i, world in enumerate(worlds):
        same(i, tokens, info, next(world))
    paid = []
    for action in actions:
        tokens, reward, _, truncated, info = envs.step(action)
        paid.append(reward)
        again = envs.reset(options={"reset_mask": truncated}) if mode is DISABLED and truncated.any() else None
        for i, world in enumerate(worlds):
            seen, rewards, ended, last = next(world)
            same(i, tokens, info, seen)
            assert_same([reward[i], bool(truncated[i])], [rewards, ended])
            if ended and mode is SAME_STEP:
                same(i, info["final_obs"], info["final_info"], last)
            elif ended and mode is DISABLED:
                same(i, *again, last)
    assert np.ptp(np.array(paid), axis=0).all()


@each_pettingzoo
@each_seed
def test_the_undriven_follow_the_policy_of_their_kind(game, seed, dense_rewards):
    """As if all were driven by the functions that those follow, each from its own tokens and chance."""
    (options,) = (dict(options) for options in CASES[game].options.values() if any(map(callable, options.values())))
    for team, learners in GAMES[game](**options).teams.items():
        everyone = module(game).parallel_env(**options)
        some = module(game).parallel_env(**options, learners=team)
        names = everyone.possible_agents
        assert some.possible_agents == names[learners]
        seen, ours = everyone.reset(seed=seed), some.reset(seed=seed)
        for t in range(20):
            assert_same(list(ours), [{agent: part[agent] for agent in some.possible_agents} for part in seen])
            u = everyone._episode.step_randomness().policy
            acts = {
                agent: options[CASES[game].policy_options[agent.split("_")[0]]](seen[0][agent][None], u[:, i])[0]
                for i, agent in enumerate(names)
            }
            driven = {agent: draw_actions(some.action_space(agent), 1, t)[0] for agent in some.possible_agents}
            seen, ours = everyone.step({**acts, **driven}), some.step(driven)


@each_case
def test_a_team_is_paid_and_sees_as_if_with_all(env_id, options, backend):
    envs = native(env_id, 300, **options, learners="all", backend=backend)
    play(envs, [to_backend(action, backend) for action in draw_actions(envs.action_space, 5)], seed=0)
    game, state = envs.game, envs.state
    assert np.ptp(as_numpy(game.reward(state)), axis=0).all()
    for agents in (*game.teams.values(), *(slice(i, i + 1) for i in range(len(game.agents)))):
        for what in (game.reward, game.observe):
            np.testing.assert_array_equal(as_numpy(what(state, agents)), as_numpy(what(state)[:, agents]))


@each_team
@a_seed
def test_torch_steps_a_team_as_numpy(env_id, options, team, seed):
    pytest.importorskip("torch")
    ours, reference = (native(env_id, 20, **options, learners=team, backend=name) for name in ("torch", "numpy"))
    reference.reset(seed=seed)
    for t, action in enumerate(draw_actions(reference.action_space, 20)):
        starts = [envs.reset(seed=seed, options={"state": reference.state, "episode": t}) for envs in (ours, reference)]
        results = ours.step(to_backend(action, "torch")), reference.step(action)
        for one, other in (starts, results):
            fields = [*one[:-1], *(one[-1][name] for name in INFO)], [*other[:-1], *(other[-1][name] for name in INFO)]
            for field, same in zip(*fields, strict=True):
                np.testing.assert_allclose(as_numpy(field), same, rtol=0, atol=1e-5)


def without_agent_axis(value: Any) -> Any:
    """Take the only agent out of all that a reset or a step returns."""
    if isinstance(value, dict):
        return {key: without_agent_axis(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(without_agent_axis, value))
    if value.dtype == object:  # final observations of some worlds
        for i, item in enumerate(value):
            value[i] = item if item is None else item[0]
        return value
    return value[:, 0] if value.ndim > 1 else value


@each_case_and_mode
@numpy_by_default
def test_first_is_a_team_of_one_without_its_axis(env_id, options, mode, backend, dense_rewards):
    game = CASES[ENVIRONMENTS[env_id][0]]
    options = {**options, **game.first_alone, "max_steps": 5, "backend": backend}
    both = [native(env_id, 3, mode, **options, learners=learners) for learners in ("first", game.first_team)]
    for ours, theirs in zip(*(staggered(envs, 30, backend=backend) for envs in both), strict=True):
        assert theirs[0].shape[1] == 1
        assert_same(ours, without_agent_axis(theirs))
    assert_same(both[0].state, both[1].state)


@each_team
@numpy_by_default
def test_a_team_is_drawn_as_in_the_parallel_view(env_id, options, team, backend):
    game, _ = ENVIRONMENTS[env_id]
    if game not in PETTINGZOO:
        pytest.skip("no view of PettingZoo")
    options = {**options, "learners": team, "render_mode": "rgb_array", "max_steps": 4}
    envs, parallel = native(env_id, 2, **options, backend=backend), module(game).parallel_env(**options)
    envs.reset(seed=3)
    parallel.reset(seed=4)
    for action in draw_actions(envs.action_space, 3):
        frame = envs.render()[1]
        # on torch a particle may lie a last digit beside, which shades a pixel
        alike = np.isclose(frame.astype(int), parallel.render().astype(int), atol=0 if backend == "numpy" else 8)
        assert frame.dtype == np.uint8 and alike.mean() >= (1 if backend == "numpy" else 0.999)
        envs.step(to_backend(action, backend))
        parallel.step(dict(zip(parallel.agents, action[1], strict=True)))


@each_team
def test_bad_actions_of_a_team(env_id, options, team, backend):
    envs, untouched = (
        native(env_id, 3, **options, learners=team, backend=backend, check_actions=True) for _ in range(2)
    )
    trusting = native(env_id, 3, **options, learners=team, backend=backend, check_actions=False)
    for each in (envs, untouched, trusting):
        each.reset(seed=0)
    (array,) = draw_actions(envs.action_space, 1)
    for bad in (array[:2], array[:, :1, None], array[None], array[0], array[:, 0], array[:, [0] * 9]):
        for each in (envs, trusting):
            with pytest.raises(ValueError, match=r"actions: expected .* \(3, .*, got "):
                each.step(to_backend(bad, backend))
    for value in (np.nan, np.inf) if envs.game.continuous_actions else (-1, envs.game.num_actions):
        bad = array.copy()
        bad[1, -1, ...] = value
        with pytest.raises(ValueError, match=r"actions: expected .* in environment 1"):
            envs.step(to_backend(bad, backend))
    good = to_backend(array, backend)
    expected = untouched.step(good)
    assert_same(envs.step(good), expected)
    assert_same(trusting.step(good), expected)


@each_game
@pytest.mark.parametrize("wrong", ["wolves", "First", None, 0, ""])
def test_a_wrong_team_is_named(env_id, wrong):
    game, _ = ENVIRONMENTS[env_id]
    teams = ", ".join(map(repr, GAMES[game]().teams))
    with pytest.raises(ValueError, match=rf"^learners={wrong!r}: expected one of 'first', {teams}$"):
        native(env_id, 2, learners=wrong)
    if game in PETTINGZOO:
        with pytest.raises(ValueError, match=rf"^learners={wrong!r}: expected one of 'first', {teams}$"):
            module(game).parallel_env(learners=wrong)


def test_the_first_agent_may_be_driven_alone():
    env = module("simple_tag").parallel_env(learners="first")
    observations, _ = env.reset(seed=3)
    single = make(GAME_IDS["simple_tag"])
    tokens, _ = single.reset(seed=3)
    assert env.agents == ["predator_0"]
    while env.agents:
        np.testing.assert_array_equal(observations["predator_0"], tokens)
        observations, rewards, *_ = env.step({"predator_0": 2})
        tokens, reward, *_ = single.step(2)
        assert rewards["predator_0"] == reward


# --- policies that users write ---

WRONG_ANSWERS = {
    "nothing": lambda good: None,
    "a list": lambda good: good.tolist(),
    "too few": lambda good: good[:-1],
    "an axis too many": lambda good: good[..., None],
    "bool": lambda good: good > 0,
    "another kind of number": lambda good: (good > 0.5) * 1 if "float" in str(good.dtype) else good * 1.0,
    "another library": lambda good: to_backend(good, "torch") if isinstance(good, np.ndarray) else as_numpy(good),
}


@each_policed_control
@pytest.mark.parametrize("answer", WRONG_ANSWERS.values(), ids=list(WRONG_ANSWERS))
@pytest.mark.parametrize("kind", ["single", "numpy", "torch", "parallel"])
def test_a_wrong_answer_of_a_policy_is_named(env_id, options, kind, answer):
    pytest.importorskip("torch")
    game, _ = ENVIRONMENTS[env_id]

    def misguided(tokens: Any, u: Any) -> Any:
        return answer(u if env.game.continuous_actions else (u > 0.5) * 1)

    options = {**options, **CASES[game].three_agents, **CASES[game].follow(misguided)}
    *_, team = GAMES[game](**options).teams
    if kind == "parallel" and (team == "all" or game not in PETTINGZOO):
        pytest.skip("all agents are driven")
    if kind == "parallel":
        env = module(game).parallel_env(**options, learners=team)
        action = {agent: env.action_space(agent).sample() for agent in env.possible_agents}
    else:
        env = make(env_id, **options) if kind == "single" else native(env_id, 3, **options, backend=kind)
        (action,) = draw_actions(env.action_space, 1)
        action = action if kind == "single" else to_backend(action, kind)
    shape = r"\(\d, 5\)" if env.game.continuous_actions else r"\(\d,\)"
    allowed = f"a {'real floating' if env.game.continuous_actions else 'integral'} .* {shape}"
    env.reset(seed=0)
    with pytest.raises(ValueError, match=rf"policy <function .*misguided.*>: expected {allowed}, got "):
        env.step(action)


@each_policed_control
@pytest.mark.parametrize("value", [-1, 5, np.nan, np.inf])
def test_a_policy_that_answers_with_no_action_is_named(env_id, options, value):
    game, _ = ENVIRONMENTS[env_id]
    continuous = make(env_id, **options).game.continuous_actions
    if continuous == bool(np.isfinite(value)):
        pytest.skip("integers are finite, and numbers are clipped")
    options = {**options, **CASES[game].three_agents}
    env = make(
        env_id, **options, **CASES[game].follow(lambda _, u: u * 0 + value if continuous else np.full(u.shape, value))
    )
    (action,) = draw_actions(env.action_space, 1)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=rf"policy .*: expected (finite numbers|0 to 4), got .*{value}"):
        env.step(action)


@pytest.mark.parametrize("game", [slow(game) if game == "simple_tag" else game for game in GAME_IDS])
def test_any_number_of_compiled_environments(game, monkeypatch):
    """Dynamo refuses the ninth variant of one function, here the second."""
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(cache_size_limit=1):  # by the name that torch 2.6 has too
        for options in list(CASES[game].options.values())[:2]:
            envs = native(GAME_IDS[game], 2, backend="torch", compile=True, **options)
            envs.reset(seed=0)
            envs.step(to_backend(still(envs.action_space), "torch"))


@pytest.mark.parametrize(
    ("options", "told"),
    [({"autoreset_mode": "Never"}, "autoreset_mode='Never': expected one of 'NextStep', 'SameStep', 'Disabled'"),
     ({"autoreset_mode": None}, "autoreset_mode=None: expected one of 'NextStep'"),
     ({"backend": "torch", "device": "nope"}, "device='nope': expected a device of torch"),
     ({"backend": "torch", "device": "meta"}, "device='meta': expected a device of torch")],
)  # fmt: skip
def test_a_wrong_mode_or_device_is_told(options, told):
    if "device" in options:
        pytest.importorskip("torch")
    with pytest.raises(ValueError, match=told):
        gymnasium.make_vec("noisy_envs/SimpleTag-v0", 2, **options)
