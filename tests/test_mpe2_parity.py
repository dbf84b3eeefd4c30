"""SimpleTag against MPE2's simple_tag_v3, from equal states by equal actions: the same game to the digit."""

import math
from itertools import product
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest

from noisy_envs import simple_tag_v0
from noisy_envs.arrays import as_numpy
from noisy_envs.cores.particles import State
from noisy_envs.cores.simple_tag import MPE, OBSTACLE_RADIUS, PREDATOR_RADIUS, PREY_RADIUS, SimpleTag
from noisy_envs.randomness import episode_key, uniforms

simple_tag_v3 = pytest.importorskip("mpe2.simple_tag_v3")

STEPS = 128
CROWD = 0.15  # half-width of the square in which all start: they meet at once
SMALL, MANY = 8, 20  # episodes; MPE2 plays 160 steps/s where 12 obstacles collide


class Play(NamedTuple):
    """Episodes of MPE2: B of them, T steps, E entities (predators, prey, obstacles), A agents."""

    position: np.ndarray  # (T + 1, B, E, 2)
    velocity: np.ndarray  # (T + 1, B, E, 2)
    action: np.ndarray  # (T, B, A), or (T, B, A, 5)
    reward: np.ndarray  # (T, B, A)


def peer(core: SimpleTag, max_cycles: int = STEPS) -> Any:
    """Return MPE2's environment of the same sizes."""
    env = simple_tag_v3.parallel_env(
        num_good=core.num_prey,
        num_adversaries=core.num_predators,
        num_obstacles=core.num_entities - core.num_agents,
        max_cycles=max_cycles,
        continuous_actions=core.continuous_actions,
    )
    env.reset(seed=0)
    solid = [core.collidable_predators] * core.num_predators + [core.collidable_prey] * core.num_prey
    solid += [core.collidable_obstacles] * (core.num_entities - core.num_agents)
    for entity, collides in zip(env.unwrapped.world.entities, solid, strict=True):
        entity.collide = collides
    return env


def place(env: Any, position: np.ndarray, velocity: np.ndarray) -> None:
    """Put the entities (E, 2) of MPE2 where they are wanted."""
    for entity, x, v in zip(env.unwrapped.world.entities, position, velocity, strict=True):
        entity.state.p_pos, entity.state.p_vel = x.copy(), v.copy()


def look(env: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and velocities (E, 2) of MPE2."""
    states = [entity.state for entity in env.unwrapped.world.entities]
    return np.array([state.p_pos for state in states]), np.array([state.p_vel for state in states])


def record(core: SimpleTag, episodes: int) -> Play:
    """Let MPE2 play episodes that begin crowded, by random actions that are held for some steps."""
    random = np.random.default_rng(0)
    env, played = peer(core), []
    for _ in range(episodes):
        env.reset()
        position = random.uniform(-CROWD, CROWD, (core.num_entities, 2))
        velocity = random.uniform(-0.5, 0.5, (core.num_entities, 2))
        velocity[core.num_agents :] = 0
        place(env, position, velocity)
        shape = (STEPS // 8, core.num_agents, *([5] if core.continuous_actions else []))
        held = random.random(shape) if core.continuous_actions else random.integers(0, 5, shape)
        actions = np.repeat(held, 8, axis=0)
        seen, rewards = [look(env)], []
        for action in actions:
            _, reward, *_ = env.step(dict(zip(env.possible_agents, action, strict=True)))
            seen.append(look(env))
            rewards.append([reward[agent] for agent in env.possible_agents])
        played.append((*map(np.array, zip(*seen, strict=True)), actions, np.array(rewards)))
    return Play(*(np.stack(field, axis=1) for field in zip(*played, strict=True)))


def to(array: np.ndarray, backend: str, dtype: str) -> Any:
    """Return an array of a library; floats as `dtype`."""
    array = array.astype(dtype) if array.dtype.kind == "f" else array
    return pytest.importorskip("torch").from_numpy(array) if backend == "torch" else array


def given(core: SimpleTag, play: Play, time: Any, backend: str, dtype: str) -> State:
    """Return MPE2's states at a time, or at several one after another, as ours."""
    shape = (-1, core.num_entities, 2)
    return core.arrange(*(to(x[time].reshape(shape), backend, dtype) for x in (play.position, play.velocity)))


def gap(core: SimpleTag, state: State, play: Play, time: Any) -> float:
    """Return how far positions or velocities of agents are from MPE2's."""
    shape = (-1, core.num_entities, 2)
    theirs = np.concatenate([x[time].reshape(shape) for x in (play.position, play.velocity)], axis=-1)
    return float(np.abs(as_numpy(state.mover)[..., :4] - theirs[:, : core.num_agents]).max())


SIZES = {"1v3v12": (1, 3, 12), "3v1v2": (3, 1, 2), "2v2v0": (2, 2, 0)}
CASES = {
    f"{name}{'-solid' * solid}-{'continuous' if continuous else 'discrete'}": (
        SimpleTag(
            *sizes, continuous_actions=continuous, collidable_obstacles=solid, reward_sharing="shared", start="mpe"
        ),
        SMALL if name == "1v3v12" and solid else MANY,
    )
    for (name, sizes), solid, continuous in product(SIZES.items(), (True, False), (True, False))
    if sizes[2] or not solid
}
GHOSTS = SimpleTag(2, 2, 2, collidable_predators=False, collidable_prey=False, reward_sharing="shared")


def reaches(core: SimpleTag) -> np.ndarray:
    """Return the sums of radii (A, E) within which agents meet others; −1 for themselves."""
    radius = np.repeat([PREDATOR_RADIUS, PREY_RADIUS, OBSTACLE_RADIUS], core.places)
    reach = radius[: core.num_agents, None] + radius
    np.fill_diagonal(reach, -1)
    return reach


def check_that_all_happens(core: SimpleTag, play: Play) -> None:
    """Demand contacts, catches and leaving the arena: otherwise equality would prove little."""
    agents = core.num_agents
    apart = play.position[:, :, :agents, None] - play.position[:, :, None]
    meets = np.hypot(apart[..., 0], apart[..., 1]) < reaches(core)  # (T + 1, B, A, E)
    assert meets[..., :agents].any(axis=(0, 2, 3)).mean() > 0.8, "agents meet in most episodes"
    if agents < core.num_entities:
        assert meets[..., agents:].any(axis=(0, 2, 3)).mean() > 0.8, "agents meet obstacles in most episodes"
    assert (play.reward[..., 0] > 0).any(axis=0).mean() > 0.3, "predators catch prey in many"
    outside = np.abs(play.position[1:, :, core.num_predators : agents]) > 0.9
    assert outside.any() and not outside.all(), "prey leave the arena"


@pytest.mark.parametrize(("core", "episodes"), CASES.values(), ids=CASES)
def test_same_motion_and_rewards(core, episodes):
    play = record(core, episodes)
    check_that_all_happens(core, play)
    for backend in ("numpy", "torch"):
        state = given(core, play, 0, backend, "float64")
        for t in range(STEPS):  # free: nothing is corrected on the way
            state = core.transition(state, to(play.action[t], backend, "float64"), None)
            assert gap(core, state, play, t + 1) < 1e-6
            np.testing.assert_allclose(as_numpy(core.reward(state)), play.reward[t], rtol=0, atol=1e-6)
        every = given(core, play, slice(0, STEPS), backend, "float32")
        actions = to(play.action.reshape(-1, *play.action.shape[2:]), backend, "float32")
        after = core.transition(every, actions, None)
        assert gap(core, after, play, slice(1, STEPS + 1)) < 1e-5


def test_same_game_where_agents_pass_through_each_other():
    play = record(GHOSTS, 5)
    assert (play.reward[..., 0] == 0).all() and play.reward[..., 2].min() < 0
    state = given(GHOSTS, play, 0, "numpy", "float64")
    for t in range(STEPS):
        state = GHOSTS.transition(state, play.action[t], None)
        assert gap(GHOSTS, state, play, t + 1) < 1e-6
        np.testing.assert_allclose(GHOSTS.reward(state), play.reward[t], rtol=0, atol=1e-6)


def test_same_start():
    """Two-sample Kolmogorov–Smirnov of each coordinate; by chance one exceeds the limit once in 10,000 runs."""
    count, core = 2000, SimpleTag(**MPE)
    zeros = np.zeros(count, np.int64)
    state = core.initial(uniforms(episode_key(np.arange(count), zeros), zeros, core.start_draws))
    ours = np.concatenate([state.mover, state.landmark], axis=1)[..., :4]
    env, theirs = peer(core), []
    for _ in range(count):
        env.reset()
        theirs.append(np.concatenate(look(env), axis=-1))
    theirs = np.array(theirs)
    assert (ours[..., 2:] == 0).all() and (theirs[..., 2:] == 0).all()
    limit = math.sqrt(-math.log(1e-4 / 12 / 2) / 2 * 2 / count)
    for entity, axis in product(range(core.num_entities), range(2)):
        a, b = np.sort(ours[:, entity, axis]), np.sort(theirs[:, entity, axis])
        steps = np.concatenate([a, b])
        distance = np.abs(np.searchsorted(a, steps, "right") - np.searchsorted(b, steps, "right")).max() / count
        assert distance < limit


def length(env: Any) -> int:
    """Return the steps of an episode of PettingZoo's parallel view, at whose end all are truncated."""
    env.reset(seed=0)
    for steps in range(1, 201):
        _, _, terminated, truncated, _ = env.step({agent: 0 for agent in env.agents})
        assert not any(terminated.values())
        if any(truncated.values()):
            assert all(truncated.values()) and not env.agents
            return steps
    raise AssertionError("no end")


@pytest.mark.parametrize("limit", [None, 1, 2, 25, 100])
def test_same_length(limit):
    theirs = length(simple_tag_v3.parallel_env(**({} if limit is None else {"max_cycles": limit})))
    options = {} if limit is None else {"max_steps": limit}
    assert length(simple_tag_v0.parallel_env(mpe=True, **options)) == theirs
    env = gymnasium.make("noisy_envs/SimpleTagMPE-v0", **options)
    env.reset(seed=0)
    assert [env.step(0)[3] for _ in range(theirs)] == [False] * (theirs - 1) + [True]


def test_same_game_through_the_public_interfaces():
    assert sum(caught_in_both(seed) > 0 for seed in range(8)) >= 3


def caught_in_both(seed: int) -> float:
    """Names and tokens are ours; the shared reward, what is seen and the sizes are MPE2's defaults."""
    ours, theirs = simple_tag_v0.parallel_env(mpe=True), simple_tag_v3.parallel_env()
    theirs.reset(seed=seed)
    names = {f"predator_{i}": f"adversary_{i}" for i in range(3)} | {"prey_0": "agent_0"}
    assert ours.possible_agents == list(names) and theirs.possible_agents == list(names.values())
    position, velocity = look(theirs)
    position *= CROWD  # or nobody would meet within 25 steps
    place(theirs, position, velocity)
    ours.reset(seed=0, options={"state": {"position": position, "velocity": velocity}})
    random, paid = np.random.default_rng(seed), 0.0
    while ours.agents:
        actions = {agent: int(random.integers(5)) for agent in names}
        observations, rewards, _, truncated, _ = ours.step(actions)
        seen, their_rewards, _, their_truncated, _ = theirs.step({names[a]: actions[a] for a in names})
        paid += rewards["predator_0"]
        for agent, name in names.items():
            assert rewards[agent] == pytest.approx(their_rewards[name], abs=1e-3)
            assert truncated[agent] == their_truncated[name]
            others = seen[name][4 : 4 + 2 * 5].reshape(5, 2)  # two obstacles, three agents, relative
            np.testing.assert_allclose(observations[agent][1:, :2], others, atol=1e-4)
    return paid
