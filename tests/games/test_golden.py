"""Trajectories recorded from the paper's own environments, replayed: start, motion, forces, tokens, rewards, length."""

from pathlib import Path

import numpy as np
import pytest

from noisy_envs.arrays import Array, as_numpy, namespace
from noisy_envs.games.particles import ParticleGame, State
from noisy_envs.games.simple_centroid import SimpleCentroid
from noisy_envs.games.simple_tag import MPE, SimpleTag

DATA = Path(__file__).parents[1] / "data"
RECORDINGS: dict[str, ParticleGame] = {
    "centroid_0.npz": SimpleCentroid(1, 3, 28),
    "centroid_2.npz": SimpleCentroid(2, 4, 6),
    "tag_0.npz": SimpleTag(1, 3, 4, collidable_obstacles=True),
    "tag_2.npz": SimpleTag(1, 3, 12, collidable_obstacles=False),
    "tag_3.npz": SimpleTag(2, 2, 2, collidable_obstacles=True, continuous_actions=True),
}
STEPS = 60
TOLERANCE = {"float64": 1e-6, "float32": 1e-5}
each_recording = pytest.mark.parametrize("name", RECORDINGS)
each_backend = pytest.mark.parametrize("backend", ["numpy", "torch"])
each_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def convert(array: np.ndarray, backend: str, dtype: str) -> Array:
    """Return the array in the given library and floating type; integers stay what they are."""
    array = array if array.dtype.kind == "i" else array.astype(dtype)
    return pytest.importorskip("torch").from_numpy(array) if backend == "torch" else array


def load(name: str, backend: str, dtype: str) -> tuple[ParticleGame, dict[str, Array]]:
    """Return a recording and the game that it is of; time is its batch axis."""
    game = RECORDINGS[name]
    with np.load(DATA / name) as recording:
        arrays = {key: recording[key] for key in ("pos", "vel", "action", "force", "reward", "tokens")}
        told = {key: recording[key].item() for key in recording.files if key not in arrays}
    if isinstance(game, SimpleTag):
        told["continuous_actions"] = told.pop("continuous")
    assert set(told) >= {kind.option for kind in game.entity_types if getattr(game, kind.option)}
    assert {option: getattr(game, option) for option in told} == told
    movers = game.num_movers
    shapes = {"pos": (STEPS + 1, game.num_entities, 2), "vel": (STEPS + 1, game.num_entities, 2)}
    shapes |= {"action": (STEPS, movers, 5) if game.continuous_actions else (STEPS, movers)}
    shapes |= {"force": (STEPS, movers, 2), "reward": (STEPS, movers)}
    shapes |= {"tokens": (STEPS + 1, movers, game.num_entities, 5)}
    assert {key: array.shape for key, array in arrays.items()} == shapes
    return game, {key: convert(array, backend, dtype) for key, array in arrays.items()}


def inject(game: ParticleGame, recording: dict[str, Array], times: slice) -> State:
    """Return the recorded states at `times`."""
    return game.arrange(recording["pos"][times], recording["vel"][times])


def play(game: ParticleGame, recording: dict[str, Array], dtype: str) -> State:
    """Return the states after each step: in float64 one free run, in float32 each step from its recorded state."""
    if dtype == "float32":
        return game.push(inject(game, recording, slice(0, STEPS)), recording["force"])
    states = [inject(game, recording, slice(0, 1))]
    for t in range(STEPS):
        states.append(game.push(states[-1], recording["force"][t : t + 1]))
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
    assert {path.name for path in DATA.glob("*_[0-9].npz")} == set(RECORDINGS)


@each_backend
@each_dtype
@each_recording
def test_motion_and_rewards(name, dtype, backend):
    game, recording = load(name, backend, dtype)
    state = play(game, recording, dtype)
    bodies = np.concatenate([as_numpy(state.mover), as_numpy(state.landmark)], axis=1)  # (T, E, 5)
    close(bodies[..., :2], recording["pos"][1:], dtype)
    close(bodies[..., 2:4], recording["vel"][1:], dtype)
    close(game.reward(state), recording["reward"][:, : game.num_agents], dtype)


@each_backend
@each_dtype
@each_recording
def test_forces_of_agents(name, dtype, backend):
    game, recording = load(name, backend, dtype)
    agents = slice(0, game.num_agents)
    force = game.control(recording["action"][:, agents], recording["pos"])
    close(force, recording["force"][:, agents], dtype)
    assert force.dtype == recording["pos"].dtype


@each_backend
@each_dtype
@each_recording
def test_tokens(name, dtype, backend):
    """Row by row in tag; their centroid has the rows behind the own in another order."""
    game, recording = load(name, backend, dtype)
    states = join([inject(game, recording, slice(0, 1)), play(game, recording, dtype)])
    ours, theirs = game.observe(states), recording["tokens"][:, : game.num_agents]
    assert ours.shape == theirs.shape
    if isinstance(game, SimpleTag):
        close(ours, theirs, dtype)
        return
    for agent in range(game.num_agents):
        close(ours[:, agent, 0], theirs[:, agent, 0], dtype)
        assert same_sets(ours[:, agent, 1:], theirs[:, agent, 1:], dtype)


@pytest.mark.parametrize("name", [name for name, game in RECORDINGS.items() if isinstance(game, SimpleTag)])
def test_catches_are_recorded(name):
    _, recording = load(name, "numpy", "float64")
    assert recording["reward"].max() == 10 and recording["reward"].min() <= -10


def one_step(game: ParticleGame, backend: str, dtype: str, action_dtype: str) -> set[str]:
    """Return the types of all that a step from a state of type `dtype` gives."""
    state = game.initial(tuple(convert(np.full((2, n), 0.5), backend, dtype) for n in game.num_reset_uniforms))
    randomness = game.sample_randomness(
        tuple(convert(np.full((2, n), 0.5), backend, dtype) for n in game.num_step_uniforms)
    )
    shape = (2, game.num_agents, 5) if game.continuous_actions else (2, game.num_agents)
    after = game.transition(state, convert(np.ones(shape, action_dtype), backend, action_dtype), randomness)
    drawn = [
        x for name, x in randomness._asdict().items() if name != "random" or game.continuous_actions
    ]  # else integers
    arrays = (*state, *drawn, *after, game.observe(after), game.reward(after), game.world_tokens(after))
    return {str(array.dtype).removeprefix("torch.") for array in arrays}


SOLID = {"num_signal": (1, 3), "num_noise": (0, 28), "collidable_agents": True, "collidable_noise": True}
each_kind = pytest.mark.parametrize(
    ("game", "action_dtype"),
    [
        (SimpleCentroid(), "float32"),
        (SimpleCentroid(continuous_actions=False, num_agents=2), "int64"),
        (SimpleCentroid(**SOLID), "float32"),
        (SimpleTag(), "int64"),
        (SimpleTag(num_obstacles=(0, 28), collidable_obstacles=True, continuous_actions=True), "float32"),
        (SimpleTag(**MPE), "int64"),
    ],
    ids=["centroid", "discrete centroid", "padded and solid centroid", "tag", "padded and solid tag", "MPE's tag"],
)


@each_backend
@each_dtype
@each_kind
def test_dtype_is_kept(game, action_dtype, dtype, backend):
    assert one_step(game, backend, dtype, action_dtype) == {dtype}


@each_backend
@pytest.mark.parametrize("game", [SimpleCentroid, SimpleTag])
def test_dtype_is_kept_whatever_the_action_is(game, backend):
    assert one_step(game(continuous_actions=True), backend, "float32", action_dtype="float64") == {"float32"}
