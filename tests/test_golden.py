"""Trajectories recorded from the paper's own environments, replayed: start, motion, forces, tokens, rewards, length."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from noisy_envs.arrays import Array, as_numpy, namespace
from noisy_envs.cores.simple_centroid import SimpleCentroid, State

DATA = Path(__file__).parent / "data"
RECORDINGS = {"centroid_0.npz": (1, 3, 28), "centroid_2.npz": (2, 4, 6)}  # agents, signal, noise
STEPS = 60
TOLERANCE = {"float64": 1e-6, "float32": 1e-5}
each_recording = pytest.mark.parametrize("name", RECORDINGS)
each_backend = pytest.mark.parametrize("backend", ["numpy", "torch"])
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def convert(array: np.ndarray, backend: str, dtype: str) -> Array:
    """Return the array in the given library and floating type."""
    array = array.astype(dtype)
    return pytest.importorskip("torch").from_numpy(array) if backend == "torch" else array


def load(name: str, backend: str, dtype: str) -> tuple[SimpleCentroid, dict[str, Array]]:
    """Return a recording and the game that it is of; time is its batch axis."""
    with np.load(DATA / name) as recording:
        sizes = tuple(int(recording[f"num_{kind}"]) for kind in ("agents", "signal", "noise"))
        arrays = {key: recording[key] for key in ("pos", "vel", "action", "force", "reward", "tokens")}
    assert sizes == RECORDINGS[name]
    core = SimpleCentroid(*sizes)
    shapes = {"pos": (STEPS + 1, core.num_entities, 2), "vel": (STEPS + 1, core.num_entities, 2)}
    shapes |= {"action": (STEPS, core.num_movers, 5), "force": (STEPS, core.num_movers, 2)}
    shapes |= {"reward": (STEPS, core.num_movers), "tokens": (STEPS + 1, core.num_movers, core.num_entities, 5)}
    assert {key: array.shape for key, array in arrays.items()} == shapes
    return core, {key: convert(array, backend, dtype) for key, array in arrays.items()}


def inject(core: SimpleCentroid, recording: dict[str, Array], times: slice) -> State:
    """Return the recorded states at `times`."""
    position, velocity = recording["pos"][times], recording["vel"][times]
    return core.arrange(position, velocity, core.num_signal, core.num_noise)


def play(core: SimpleCentroid, recording: dict[str, Array], dtype: str) -> State:
    """Return the states after each step: in float64 one free run, in float32 each step from its recorded state."""
    if dtype == "float32":
        return core.push(inject(core, recording, slice(0, STEPS)), recording["force"])
    states = [inject(core, recording, slice(0, 1))]
    for t in range(STEPS):
        states.append(core.push(states[-1], recording["force"][t : t + 1]))
    return join(states[1:])


def join(states: list[State]) -> State:
    """Put states one after another in the batch."""
    concat = namespace(states[0].mover).concat
    return State(*(concat(fields) for fields in zip(*states, strict=True)))


def close(ours: Array, theirs: Array, dtype: str) -> None:
    np.testing.assert_allclose(as_numpy(ours), as_numpy(theirs), rtol=0, atol=TOLERANCE[dtype])


def same_sets(ours: Array, theirs: Array, dtype: str) -> bool:
    """Tell whether the rows (B, N, D) of both are the same in some order."""
    gap = np.abs(as_numpy(ours)[:, :, None] - as_numpy(theirs)[:, None]).max(axis=-1)  # (B, N, N)
    partner = np.argsort(gap.argmin(axis=-1), axis=-1)
    one_to_one = (np.take_along_axis(gap.argmin(axis=-1), partner, -1) == np.arange(gap.shape[-1])).all()
    return bool(one_to_one and gap.min(axis=-1).max() <= TOLERANCE[dtype])


def test_recordings_are_all_replayed():
    assert {path.name for path in DATA.glob("centroid_*.npz")} == set(RECORDINGS)


@each_backend
@each_dtype
@each_recording
def test_motion_and_rewards(name, dtype, backend):
    core, recording = load(name, backend, dtype)
    state = play(core, recording, dtype)
    bodies = np.concatenate([as_numpy(state.mover), as_numpy(state.landmark)], axis=1)  # (T, E, 4)
    close(bodies[..., :2], recording["pos"][1:], dtype)
    close(bodies[..., 2:], recording["vel"][1:], dtype)
    close(core.reward(state), recording["reward"][:, : core.num_agents], dtype)


@each_backend
@each_dtype
@each_recording
def test_forces_of_learners(name, dtype, backend):
    core, recording = load(name, backend, dtype)
    learners = slice(0, core.num_agents)
    close(core.control(recording["action"][:, learners]), recording["force"][:, learners], dtype)


@each_backend
@each_dtype
@each_recording
def test_tokens(name, dtype, backend):
    core, recording = load(name, backend, dtype)
    states = join([inject(core, recording, slice(0, 1)), play(core, recording, dtype)])
    for agent in range(core.num_agents):
        ours, theirs = core.observation(states, agent), recording["tokens"][:, agent]
        close(ours[:, 0], theirs[:, 0], dtype)
        assert same_sets(ours[:, 1:], theirs[:, 1:], dtype)


def one_step(options: dict[str, Any], backend: str, dtype: str, action_dtype: str) -> set[str]:
    """Return the types of all that a step from a state of type `dtype` gives."""
    core = SimpleCentroid(**options)
    state = core.initial(tuple(convert(np.full((2, n), 0.5), backend, dtype) for n in core.start_draws))
    chance = core.chance(tuple(convert(np.full((2, n), 0.5), backend, dtype) for n in core.step_draws))
    shape = (2, core.num_agents, 5) if core.continuous_actions else (2, core.num_agents)
    after = core.transition(state, convert(np.ones(shape), backend, action_dtype), chance)
    arrays = (*state, *chance, *after, core.observation(after), core.reward(after), core.world_tokens(after))
    return {str(array.dtype).removeprefix("torch.") for array in arrays}


SOLID = {"num_signal": (1, 3), "num_noise": (0, 28), "collidable_agents": True, "collidable_noise": True}


@each_backend
@each_dtype
@pytest.mark.parametrize(
    ("options", "action_dtype"),
    [({}, "float32"), ({"continuous_actions": False, "num_agents": 2}, "int64"), (SOLID, "float32")],
    ids=["plain", "discrete", "padded and solid"],
)
def test_dtype_is_kept(options, action_dtype, dtype, backend):
    assert one_step(options, backend, dtype, action_dtype) == {dtype}


@each_backend
def test_dtype_is_kept_whatever_the_action_is(backend):
    assert one_step({}, backend, "float32", action_dtype="float64") == {"float32"}
