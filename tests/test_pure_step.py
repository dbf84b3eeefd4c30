"""The pure step is the step of a SAME_STEP vector environment, and leaves the environment alone."""

import gymnasium
import numpy as np
import pytest
from conftest import each_case

from noisy_envs.arrays import as_numpy
from noisy_envs.cores.box_world import BoxWorld
from noisy_envs.randomness import episode_key, uniforms


def pair(env_id, backend, **options):
    made = [
        gymnasium.make_vec(env_id, 5, backend=backend, autoreset_mode="SameStep", max_episode_steps=9, **options)
        for _ in range(2)
    ]
    for envs in made:
        envs.reset(seed=4)
    return made


@each_case
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_pure_step_is_the_same_step(env_id, options, backend):
    if backend == "torch":
        torch = pytest.importorskip("torch")
    stepped, pure = pair(env_id, backend, **options)
    worlds = pure.worlds
    stepped.action_space.seed(0)
    before = pure.snapshot()
    for _ in range(40):
        actions = stepped.action_space.sample()
        if backend == "torch":
            actions = torch.from_numpy(actions)
        tokens, reward, terminated, truncated, info = stepped.step(actions)
        worlds, outcome = pure.pure_step(worlds, actions.reshape(-1, *stepped.single_action_space.shape))
        np.testing.assert_array_equal(as_numpy(outcome.tokens), as_numpy(tokens))
        np.testing.assert_array_equal(as_numpy(outcome.reward), as_numpy(reward))
        np.testing.assert_array_equal(as_numpy(outcome.terminated), as_numpy(terminated))
        np.testing.assert_array_equal(as_numpy(outcome.truncated), as_numpy(truncated))
        final = as_numpy(outcome.final_tokens)
        for i in range(5):
            last = info["final_obs"][i] if "final_obs" in info and info["_final_obs"][i] else tokens[i]
            np.testing.assert_array_equal(final[i], as_numpy(last))
    for own, theirs in zip(worlds, stepped.worlds, strict=True):
        for x, y in zip(
            own if isinstance(own, tuple) else [own], theirs if isinstance(own, tuple) else [theirs], strict=True
        ):
            np.testing.assert_array_equal(as_numpy(x), as_numpy(y))
    assert repr(before) == repr(pure.snapshot())


def test_levels_kept_on_a_device_are_the_banks():
    game = BoxWorld(num_levels=50, start_level=7)
    words = uniforms(episode_key(np.arange(200), np.zeros(200, np.int64)), np.zeros(200, np.int64), game.start_draws)
    asked = game.initial(words)
    game.prepare(asked.size)
    kept = game.initial(words)
    for one, other in zip(asked, kept, strict=True):
        np.testing.assert_array_equal(one, other)
    assert set(asked.level) <= set(range(7, 57)) and len(set(asked.level)) > 40


def test_too_many_levels_are_refused():
    with pytest.raises(ValueError, match="num_levels=1048576"):
        BoxWorld(num_levels=2**20).prepare(np.zeros(1))
