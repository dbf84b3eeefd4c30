"""Tests of the installed wheel, run from outside the checkout by `make wheel`; not collected by plain pytest."""

import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import noisy_envs
from noisy_envs.baselines import baseline_returns


def test_the_wheel_is_what_is_tested():
    assert "site-packages" in Path(noisy_envs.__file__).parts


def test_typing_marker_and_kernels_are_shipped():
    package = Path(noisy_envs.__file__).parent
    assert (package / "py.typed").exists() and (package / "nn" / "cuda" / "kernels.cu").exists()


@pytest.mark.parametrize("env_id", noisy_envs.ENVIRONMENTS)
def test_every_id_plays_and_has_references(env_id):
    env = gymnasium.make(env_id, render_mode="rgb_array")
    env.reset(seed=0)
    assert env.step(env.action_space.sample())[0].dtype == np.float32
    assert env.render().dtype == np.uint8
    env.close()
    random, oracle = baseline_returns(env_id)
    assert random < oracle


def test_an_id_needs_no_import():
    code = "import gymnasium; gymnasium.make('noisy_envs:noisy_envs/SimpleCentroid-v0').reset(seed=0)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_command_lists_the_ids():
    told = subprocess.run(
        [sys.executable, "-W", "error", "-m", "noisy_envs"], check=True, capture_output=True, text=True
    ).stdout
    assert all(env_id in told for env_id in noisy_envs.ENVIRONMENTS)


def test_pettingzoo_view():
    from noisy_envs import simple_centroid_v0, simple_tag_v0

    observations, _ = simple_centroid_v0.parallel_env(num_agents=2).reset(seed=0)
    assert list(observations) == ["agent_0", "agent_1"]
    observations, _ = simple_tag_v0.parallel_env(mpe=True).reset(seed=0)
    assert list(observations) == ["predator_0", "predator_1", "predator_2", "prey_0"]
