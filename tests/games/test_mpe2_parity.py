"""SimpleTag beside the game that it re-writes, MPE2's simple_tag_v3: starts, motion, rewards, length, public views."""

from functools import cache
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import pytest
from cases import slow
from helpers import make, to_backend

from noisy_envs import simple_tag_v0
from noisy_envs.arrays import as_numpy
from noisy_envs.games.particles import State
from noisy_envs.games.simple_tag import SimpleTag

simple_tag_v3 = pytest.importorskip("mpe2.simple_tag_v3")

EPISODES, STEPS = 4, 128
HELD = 4  # steps for which an action is held, so that speed limits and the far outside are reached
SIZES: dict[str, dict[str, Any]] = {
    "1v3v12": {"num_predators": 1, "num_prey": 3, "num_obstacles": 12},
    "3v1v2": {"num_predators": 3, "num_prey": 1, "num_obstacles": 2},
    "2v2v0": {"num_predators": 2, "num_prey": 2, "num_obstacles": 0},
}
GHOSTS = {"collidable_predators": False, "collidable_prey": False}
PAID: dict[str, dict[str, Any]] = {  # cases in which MPE's rewards mean what ours do
    **SIZES,
    "1v3v12 solid": {**SIZES["1v3v12"], "collidable_obstacles": True},
    "3v1v2 solid": {**SIZES["3v1v2"], "collidable_obstacles": True},
    "3v1v2 ghosts": {**SIZES["3v1v2"], "collidable_obstacles": True, **GHOSTS},
}
# MPE asks of each agent alone whether it collides, and would pay one side of a touch
PLAYED = {
    **PAID,
    "3v1v2 ghost predators": {**SIZES["3v1v2"], "collidable_obstacles": True, "collidable_predators": False},
    "1v3v12 ghost prey": {**SIZES["1v3v12"], "collidable_obstacles": True, "collidable_prey": False},
}

each_played = pytest.mark.parametrize("case", PLAYED)
each_paid = pytest.mark.parametrize("case", PAID)
each_action = pytest.mark.parametrize("continuous", [False, True], ids=["discrete", "continuous"])


class Recording(NamedTuple):
    """Episodes of MPE, entities in the order of ours."""

    action: np.ndarray  # (E, T, A), or (E, T, A, 5) when continuous
    body: np.ndarray  # (E, T + 1, N, 4): x, y, vx, vy
    reward: np.ndarray  # (E, T, A)


def build(case: str, continuous: bool) -> SimpleTag:
    return SimpleTag(**PLAYED[case], continuous_actions=continuous, reward_sharing="shared", start="mpe")


def reference(game: SimpleTag) -> Any:
    """Make MPE's environment with our options."""
    env = simple_tag_v3.parallel_env(
        num_good=game.num_prey,
        num_adversaries=game.num_predators,
        num_obstacles=game.num_obstacles,
        max_cycles=game.max_steps,
        continuous_actions=game.continuous_actions,
    )
    solid = [game.collidable_predators] * game.num_predators + [game.collidable_prey] * game.num_prey
    solid += [game.collidable_obstacles] * game.num_obstacles
    for entity, collide in zip(env.unwrapped.world.entities, solid, strict=True):
        entity.collide = collide
    return env


def inject(env: Any, position: np.ndarray, velocity: np.ndarray) -> None:
    """Put MPE's entities at places (N, 2) with velocities (N, 2)."""
    for entity, place, speed in zip(env.unwrapped.world.entities, position, velocity, strict=True):
        entity.state.p_pos, entity.state.p_vel = place.astype(np.float64), speed.astype(np.float64)


def bodies(env: Any) -> np.ndarray:
    """Return places and velocities (N, 4) of MPE's entities."""
    return np.array([[*entity.state.p_pos, *entity.state.p_vel] for entity in env.unwrapped.world.entities])


def draw_joint_actions(game: SimpleTag, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Draw joint actions (*shape, A), or (*shape, A, 5), steps being the last axis of `shape`, each held."""
    rng = np.random.default_rng(seed)
    drawn = (*shape[:-1], -(-shape[-1] // HELD), game.num_agents)
    if game.continuous_actions:  # multiples of 1/256, whose differences are exact in float32 and float64
        actions = (rng.integers(0, 257, (*drawn, 5)) / 256).astype(np.float32)
    else:
        actions = rng.integers(0, 5, drawn)
    return np.repeat(actions, HELD, axis=len(shape) - 1)


@cache
def record(case: str, continuous: bool) -> Recording:
    """Play MPE from a crowd."""
    game = build(case, continuous)
    env = reference(game)
    rng = np.random.default_rng(1)
    position = rng.uniform(-0.3, 0.3, (EPISODES, game.num_entities, 2))
    velocity = rng.uniform(-0.5, 0.5, position.shape)
    velocity[:, game.num_agents :] = 0.0
    actions = draw_joint_actions(game, (EPISODES, STEPS), seed=2)
    body, reward = np.empty((EPISODES, STEPS + 1, game.num_entities, 4)), np.empty((EPISODES, STEPS, game.num_agents))
    for i in range(EPISODES):
        env.reset(seed=0)
        inject(env, position[i], velocity[i])
        body[i, 0] = bodies(env)
        for t in range(STEPS):
            rewards = env.step(dict(zip(env.possible_agents, actions[i, t], strict=True)))[1]
            reward[i, t] = [rewards[name] for name in env.possible_agents]
            body[i, t + 1] = bodies(env)
    check_events(game, body[:, 1:], reward, np.array([entity.size for entity in env.unwrapped.world.entities]))
    return Recording(actions, body, reward)


def check_events(game: SimpleTag, body: np.ndarray, reward: np.ndarray, radius: np.ndarray) -> None:
    """Demand that episodes hold what there is to compare: contacts, catches, top speeds, each part of the penalty."""
    predators, prey = game.teams["predators"], game.teams["prey"]
    gap = np.linalg.norm(body[:, :, :, None, :2] - body[:, :, None, :, :2], axis=-1) - radius[:, None] - radius
    met = (gap < 0).any((0, 1)) & ~np.eye(game.num_entities, dtype=bool)  # (N, N)
    assert met[predators, prey].any()
    assert (reward[..., predators] > 0).any() == game.collidable_predators
    for team, limit in ((predators, 1.0), (prey, 1.3)):
        assert met[team, team].any() or team.stop - team.start == 1
        assert met[team, game.num_agents :].any() or game.num_obstacles == 0
        assert (np.linalg.norm(body[:, :, team, 2:], axis=-1) > limit - 1e-9).any()
    outside, full = np.abs(body[:, :, prey, :2]), 1 + np.log(10) / 2
    for low, high in ((0.9, 1.0), (1.0, full), (full, np.inf)):
        assert ((outside > low) & (outside < high)).any()


def recorded_states(game: SimpleTag, body: np.ndarray, backend: str) -> State:
    """Return recorded bodies (..., N, 4) as one batch of ours."""
    body = to_backend(body.reshape(-1, game.num_entities, 4), backend)
    return game.arrange(body[..., :2], body[..., 2:])


# --- one state, the same actions ---


@each_action
@each_played
@pytest.mark.parametrize("backend", ["numpy", slow("torch")], indirect=True)
def test_motion_over_an_episode(case, continuous, backend):
    game, recording = build(case, continuous), record(case, continuous)
    state = recorded_states(game, recording.body[:, 0], backend)
    for t in range(STEPS):
        state = game.transition(state, to_backend(recording.action[:, t], backend), None)
        ours = np.concatenate([as_numpy(rows)[..., :4] for rows in state], axis=1)
        # contacts amplify rounding, here to 1e-11
        np.testing.assert_allclose(ours, recording.body[:, t + 1], rtol=0, atol=1e-6, err_msg=f"step {t}")


@each_action
@each_played
def test_each_step_in_float32(case, continuous, backend):
    game, recording = build(case, continuous), record(case, continuous)
    state = recorded_states(game, recording.body[:, :-1].astype(np.float32), backend)
    action = to_backend(recording.action.reshape(-1, *recording.action.shape[2:]), backend)
    mover = as_numpy(game.transition(state, action, None).mover)[..., :4]
    assert mover.dtype == np.float32
    expected = recording.body[:, 1:, : game.num_agents].reshape(mover.shape)
    np.testing.assert_allclose(mover, expected, rtol=0, atol=1e-5)


@each_action
@each_paid
def test_rewards(case, continuous, backend):
    game, recording = build(case, continuous), record(case, continuous)
    body = recording.body[:, 1:]
    reward = as_numpy(game.reward(recorded_states(game, body, backend))).reshape(recording.reward.shape)
    free = (np.abs(body[:, :, : game.num_agents, :2]) < 0.9).all(-1)
    free[..., : game.num_predators] = True  # they may leave the arena
    np.testing.assert_array_equal(reward[free], recording.reward[free])
    np.testing.assert_allclose(reward, recording.reward, rtol=0, atol=1e-9)


# --- start ---


def departure(a: np.ndarray, b: np.ndarray) -> float:
    """Kolmogorov and Smirnov's distance of two samples of n numbers, times √(n/2).

    Above c by chance with probability 2 exp(−2 c²) at most.
    """
    a, b = np.sort(a), np.sort(b)
    below = [np.searchsorted(sample, np.concatenate([a, b]), side="right") for sample in (a, b)]
    return float(np.abs(below[0] - below[1]).max() / a.size * np.sqrt(a.size / 2))


def measures(body: np.ndarray) -> list[np.ndarray]:
    """Return x and y of each entity and the distance of each pair, which shows draws that hang together."""
    place = body[..., :2]
    apart = [place[:, i] - place[:, j] for i in range(place.shape[1]) for j in range(i)]
    return [*place.reshape(len(place), -1).T, *np.linalg.norm(apart, axis=-1)]


def test_start(backend):
    count = 2000
    envs = gymnasium.make_vec("noisy_envs/SimpleTagMPE-v0", count, backend=backend)
    envs.reset(seed=0)
    ours = np.concatenate([as_numpy(rows)[..., :4] for rows in envs.unwrapped.state], axis=1)  # (B, N, 4)
    env = simple_tag_v3.parallel_env()
    theirs = np.empty((count, 6, 4))
    for i in range(count):
        env.reset(seed=None if i else 0)
        theirs[i] = bodies(env)
    assert ours.shape == theirs.shape
    assert not ours[..., 2:].any() and not theirs[..., 2:].any()
    for one, other in zip(measures(ours), measures(theirs), strict=True):
        assert departure(one, other) < 2.5  # above it by chance: 7e-6 each, 2e-4 for one of 27
    for kind in (slice(0, 4), slice(4, 6)):
        # of 8,000 numbers the largest lies in the outermost 0.2%; if not by chance, 1e-7
        reach = [np.abs(body[:, kind, :2]).max() for body in (ours, theirs)]
        assert reach[0] == pytest.approx(reach[1], rel=0.002)


# --- length ---


def length(env: Any) -> int:
    """Play an episode of PettingZoo's parallel view, of which all agents see the end at once: its steps."""
    env.reset(seed=0)
    agents = env.possible_agents
    for step in range(1, 200):
        _, _, terminated, truncated, _ = env.step(dict.fromkeys(agents, 0))
        assert terminated == dict.fromkeys(agents, False)
        assert truncated == dict.fromkeys(agents, not env.agents)
        if not env.agents:
            return step
    raise AssertionError("no end")


@pytest.mark.parametrize("limit", [None, 1, 2, 25, 100])
def test_length(limit):
    theirs = length(simple_tag_v3.parallel_env(**({} if limit is None else {"max_cycles": limit})))
    assert theirs == (limit or 25)
    options = {} if limit is None else {"max_steps": limit}
    assert length(simple_tag_v0.parallel_env(mpe=True, **options)) == theirs
    env = make("noisy_envs/SimpleTagMPE-v0", **options)
    env.reset(seed=0)
    assert [env.step(0)[2:4] for _ in range(theirs)] == [(False, False)] * (theirs - 1) + [(False, True)]


# --- public views ---


@each_action
@pytest.mark.parametrize("sizes", [{}, {"num_predators": 1, "num_prey": 3}], ids=["defaults", "1v3v2"])
def test_public_views(sizes, continuous):
    ours = simple_tag_v0.parallel_env(mpe=True, continuous_actions=continuous, **sizes)
    game = ours.game
    theirs = simple_tag_v3.parallel_env(continuous_actions=continuous) if not sizes else reference(game)
    names = {name: name.replace("agent", "prey").replace("adversary", "predator") for name in theirs.possible_agents}
    assert list(names.values()) == ours.possible_agents
    rng = np.random.default_rng(3)
    actions = draw_joint_actions(game, (EPISODES, game.max_steps), seed=4)
    caught = paid = False
    for i in range(EPISODES):
        position = rng.uniform(-1.0, 1.0, (game.num_entities, 2)).astype(np.float32)
        velocity = rng.uniform(-0.5, 0.5, position.shape).astype(np.float32)
        velocity[game.num_agents :] = 0.0
        theirs.reset(seed=0)
        inject(theirs, position, velocity)
        ours.reset(seed=0, options={"state": {"position": position, "velocity": velocity}})
        for t in range(game.max_steps):
            seen, rewards, *_ = theirs.step(dict(zip(names, actions[i, t], strict=True)))
            tokens, ours_rewards, *_ = ours.step(dict(zip(names.values(), actions[i, t], strict=True)))
            assert rewards.keys() == names.keys() and list(ours_rewards) == list(names.values())
            for name, our_name in names.items():
                slack = 1e-4 if "agent" in name else 0.0  # the arena's penalty follows the rounding of float32
                assert ours_rewards[our_name] == pytest.approx(rewards[name], rel=0, abs=slack), (i, t, name)
                compare_view(seen[name], tokens[our_name], ours.state()[ours.possible_agents.index(our_name)])
            caught |= rewards["adversary_0"] > 0
            paid |= rewards["agent_0"] % 10 != 0
    assert caught and paid


def compare_view(seen: np.ndarray, tokens: np.ndarray, own: np.ndarray) -> None:
    """Compare what an agent sees in MPE with our tokens (N, 5) and its own row (5,) in the frame of the world."""
    others = len(tokens) - 1
    velocity, place, relative, running = np.split(seen, [2, 4, 4 + 2 * others])  # running: velocities of other prey
    prey = tokens[1:][tokens[1:, 4] == 3]
    np.testing.assert_allclose(own[:2], place, rtol=0, atol=1e-5)
    np.testing.assert_allclose(tokens[1:, :2], relative.reshape(-1, 2), rtol=0, atol=1e-5)
    # each step of a contact adds ten times the error of the overlap, that of float32 here, to the velocity
    np.testing.assert_allclose(own[2:4], velocity, rtol=0, atol=1e-4)
    np.testing.assert_allclose(prey[:, 2:4] + velocity, running.reshape(-1, 2), rtol=0, atol=1e-4)
