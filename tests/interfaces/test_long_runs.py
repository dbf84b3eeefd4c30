"""Long runs: a world is the same on each path, and its counters pass 31 and 32 bits."""

import gymnasium
import numpy as np
import pytest
from cases import GAME_IDS, IDS, OPTION_SETS, each_game
from helpers import make, still, to_backend

from noisy_envs.arrays import as_numpy
from noisy_envs.randomness import MASK, episode_key

CHUNK = 125  # steps between two comparisons: no divisor of an episode and its reset
FACTS = ("tokens", "reward", "terminated", "truncated", "signal_mask", "snr", "is_success")
WORLDS = {env_id.partition("/")[2]: (env_id, {}) for env_id in IDS}
WORLDS |= {case.id: case.values for case in OPTION_SETS if case.values[1]}
LONG = {
    **{name: 20_000 for name in WORLDS},
    **{env_id.partition("/")[2]: 1_000_000 for env_id in GAME_IDS.values()},
}


def few_and_many(few, names):
    """Parametrise over worlds, with a few steps in each run of the tests, and with many in slow ones."""
    quick = [pytest.param(*WORLDS[name], few, id=f"{name}-few") for name in names]
    slow = [pytest.param(*WORLDS[name], LONG[name], id=f"{name}-many", marks=pytest.mark.slow) for name in WORLDS]
    return pytest.mark.parametrize(("env_id", "options", "count"), quick + slow)


def facts(result):
    """Return all that a step, or a reset, tells of it, in the order of `FACTS`."""
    tokens, *rest, info = result
    return [tokens, *(rest or [0.0, False, False]), *(info[name] for name in FACTS[4:] if name in info)]


def play_single(env, actions, ended):
    """Play actions (T, ...), and reset where an episode ended; return arrays (T, ...), and whether the last ended."""
    rows = []
    for action in actions:
        result = env.reset() if ended else env.step(action)
        ended = not ended and (result[2] or result[3])
        rows.append(facts(result))
    return [np.array(column) for column in zip(*rows, strict=True)], ended


@few_and_many(300, [env_id.partition("/")[2] for env_id in IDS])
def test_a_vectors_world_is_the_single_one(env_id, options, count):
    worlds = 6 if count < 10_000 else 50
    envs = gymnasium.make_vec(env_id, worlds, **options)
    singles = [gymnasium.make(env_id, disable_env_checker=True, **options) for _ in range(worlds)]
    first = [facts(env.reset(seed=7 + i)) for i, env in enumerate(singles)]
    together = facts(envs.reset(seed=7))
    for i, own in enumerate(first):
        for name, one, other in zip(FACTS, own, together, strict=False):
            np.testing.assert_array_equal(one, other[i] if np.ndim(other) else other, name)
    envs.action_space.seed(0)
    ended, ends = [False] * worlds, 0
    for _ in range(-(-count // (worlds * CHUNK))):
        actions = np.stack([envs.action_space.sample() for _ in range(CHUNK)])
        shown = zip(*(facts(envs.step(action)) for action in actions), strict=True)
        seen = [np.stack(column) for column in shown]
        for i, env in enumerate(singles):
            own, ended[i] = play_single(env, actions[:, i], ended[i])
            for name, one, other in zip(FACTS, own, seen, strict=False):
                assert one.dtype == other.dtype, name
                assert np.array_equal(one, other[:, i]), f"{name} of world {i}"
        ends += int((seen[2] | seen[3]).sum())
    assert ends >= count // (envs.max_steps + 1) - worlds
    assert [env.unwrapped.episode for env in singles] == list(zip(*(x.tolist() for x in envs.episodes), strict=True))


def differences(ours, theirs):
    """Return the largest difference of each fact of two results, and demand the same types of facts."""
    pairs = zip(FACTS, facts(ours), facts(theirs), strict=False)
    return {
        name: float(np.abs(as_numpy(one).astype(np.float64) - as_numpy(other).astype(np.float64)).max())
        for name, one, other in pairs
    }


@few_and_many(300, WORLDS)
def test_torch_steps_every_world_as_numpy(env_id, options, count):
    """From the same worlds in each step, since contacts part two paths that differ by a rounding; BoxWorld at a run."""
    pytest.importorskip("torch")
    worlds = 10 if count < 10_000 else 50
    ours, theirs = (gymnasium.make_vec(env_id, worlds, backend=name, **options) for name in ("torch", "numpy"))
    exact = theirs.game.name == "box_world"
    largest = differences(ours.reset(seed=5), theirs.reset(seed=5))
    theirs.action_space.seed(0)
    for _ in range(-(-count // worlds)):
        if not exact:
            state = type(theirs.state)(*(to_backend(field, "torch") for field in theirs.state))
            ours._batch = ours._batch._replace(state=state)
        action = theirs.action_space.sample()
        found = differences(ours.step(to_backend(action, "torch")), theirs.step(action))
        largest = {name: max(value, found[name]) for name, value in largest.items()}
    print(env_id, options, largest)
    for one, other in zip(
        (*ours.episodes, ours.batch_state.clock), (*theirs.episodes, theirs.batch_state.clock), strict=True
    ):
        np.testing.assert_array_equal(as_numpy(one), other)
    allowed = dict.fromkeys(FACTS, 0.0) | {"snr": 1e-7} | ({} if exact else {"tokens": 1e-5, "reward": 1e-5})
    assert all(value <= allowed[name] for name, value in largest.items()), largest


each_width = pytest.mark.parametrize("last", [2**31 - 1, 2**32 - 1, 2**33 - 1])


@each_game
@each_width
def test_episodes_go_on_past_a_width(env_id, last, backend):
    envs = gymnasium.make_vec(env_id, 2, backend=backend, max_episode_steps=3)
    single = make(env_id)
    tokens, _ = envs.reset(seed=3, options={"episode": last - 1})
    action = to_backend(still(envs.action_space), backend)
    for number in range(last - 1, last + 3):
        expected, _ = single.reset(seed=4, options={"episode": number})
        np.testing.assert_allclose(as_numpy(tokens)[1], expected, rtol=0, atol=1e-6)
        assert envs.episodes[1].tolist() == [number] * 2 and single.episode == (4, number)
        earlier = episode_key(*envs.episodes[:1], np.arange(2) * 0 + (number & MASK))
        assert (as_numpy(envs.batch_state.key) == earlier).all() == (number <= MASK)
        ended = [as_numpy(envs.step(action)[3]).all() for _ in range(3)]
        assert ended == [False, False, True]
        tokens = envs.step(action)[0]


@each_game
@each_width
def test_steps_go_on_past_a_width(env_id, last, backend):
    limit = last + 3
    single, envs = make(env_id, max_steps=limit), gymnasium.make_vec(env_id, 2, backend=backend, max_steps=limit)
    single.reset(seed=4)
    single._episode.clock = last + 1 - 128  # where the single world draws the chance of the next 128 steps
    for _ in range(124):
        single.step(still(single.action_space))
    envs.reset(seed=3)
    state = type(single.state)(*(to_backend(np.stack([field, field]), backend) for field in single.state))
    envs._batch = envs._batch._replace(state=state, clock=envs._batch.clock + last - 3)
    envs._steps_to_end -= last - 3
    for clock in range(last - 2, limit + 1):
        tokens, reward, _, truncated, _ = envs.step(to_backend(still(envs.action_space), backend))
        expected, paid, _, cut, _ = single.step(still(single.action_space))
        np.testing.assert_allclose(as_numpy(tokens)[1], expected, rtol=0, atol=0 if backend == "numpy" else 1e-5)
        assert float(reward[1]) == pytest.approx(paid, rel=1e-5)
        assert as_numpy(truncated).tolist() == [cut, cut] == [clock == limit] * 2
        assert as_numpy(envs.batch_state.clock).tolist() == [clock] * 2
