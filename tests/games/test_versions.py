"""An id means the same forever: what each played when it came is stored, and its version rises when that changes."""

import gymnasium
import numpy as np
import pytest
from helpers import ROOT

import noisy_envs
from noisy_envs.randomness import episode_key, uniforms

FOLDER = ROOT / "tests" / "data" / "trajectories"
STORED = sorted(path.stem for path in FOLDER.glob("*.npz"))
TOLERANCE = {"rtol": 0, "atol": 1e-5}


def test_every_id_is_stored():
    """New ids come by `python tools/store_trajectories.py`; no file goes."""
    assert sorted(env_id.split("/")[1] for env_id in noisy_envs.ENVIRONMENTS) == STORED


@pytest.mark.parametrize("name", STORED)
def test_an_id_plays_as_it_did(name):
    with np.load(FOLDER / f"{name}.npz") as stored:
        env = gymnasium.make(f"noisy_envs/{name}")
        np.testing.assert_allclose(env.reset(seed=0)[0], stored["seen"][0], **TOLERANCE)
        assert len(stored["actions"]) >= 10
        for action, seen, reward in zip(stored["actions"], stored["seen"][1:], stored["rewards"], strict=True):
            found = env.step(action)
            np.testing.assert_allclose(found[0], seen, **TOLERANCE)
            assert found[1] == pytest.approx(reward, abs=1e-5)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
@pytest.mark.parametrize("name", STORED)
def test_so_does_the_first_of_many_worlds(name, backend):
    to_array = np.asarray if backend == "numpy" else pytest.importorskip("torch").from_numpy
    with np.load(FOLDER / f"{name}.npz") as stored:
        envs = gymnasium.make_vec(f"noisy_envs/{name}", 2, backend=backend)
        np.testing.assert_allclose(envs.reset(seed=0)[0][0], stored["seen"][0], **TOLERANCE)
        for action, seen, reward in zip(stored["actions"], stored["seen"][1:], stored["rewards"], strict=True):
            found = envs.step(to_array(np.stack([action, action])))
            np.testing.assert_allclose(found[0][0], seen, **TOLERANCE)
            assert float(found[1][0]) == pytest.approx(reward, abs=1e-5)


@pytest.mark.parametrize("name", STORED)
def test_the_random_numbers_are_the_same_to_the_bit(name):
    zero = np.zeros(1, np.int64)
    (drawn,) = uniforms(episode_key(zero, zero), zero, (5,))
    with np.load(FOLDER / f"{name}.npz") as stored:
        assert (drawn[0] * 2**24).astype(np.int64).tolist() == stored["words"].tolist()
