"""Simple centroid: each rule by values worked out by hand, at both ends of each option, on both backends."""

import dataclasses
import itertools
import math
from typing import Any

import gymnasium
import numpy as np
import pytest
from cases import slow

from noisy_envs import ENVIRONMENTS, registration
from noisy_envs.arrays import Array, as_numpy
from noisy_envs.baselines import play_baseline
from noisy_envs.games import physics
from noisy_envs.games.particles import ABSENT, SELF, State
from noisy_envs.games.simple_centroid import AGENT, NOISE, SIGNAL, SimpleCentroid, StepRandomness
from noisy_envs.interfaces import episode as episode_shell
from noisy_envs.interfaces.functional import EnvParams, play
from noisy_envs.interfaces.scripted import assign_policies, clip_action
from noisy_envs.interfaces.spaces import observation_box
from noisy_envs.interfaces.vector_env import TokenVectorEnv
from noisy_envs.randomness import episode_key, uniforms
from noisy_envs.validation import build

ALL_SOLID = dict.fromkeys(("collidable_agents", "collidable_signal", "collidable_noise"), True)
EVERY_KIND = {
    "plain": {},
    "linear": {"reward_shape": "linear"},
    "agents": {"num_agents": 3},
    "ranges": {"num_agents": 2, "num_signal": (1, 5), "num_noise": (0, 9)},
    "solid": {"num_agents": 2, "num_noise": 12, "spread": 0.3, **ALL_SOLID},
    "solid ranges": {"num_signal": (1, 5), "num_noise": (0, 9), "spread": 0.3, **ALL_SOLID},
    "hidden noise": {"noise_role": "signal", "num_agents": 2},
    "wandering noise": {"noise_role": "signal", "noise_motion": "wander", "num_noise": (0, 9), "noise_offset": 0.0},
    "following noise": {"noise_motion": "follow", "num_agents": 2},
    "orbiting noise": {"noise_motion": "orbit", "num_signal": (1, 4), "continuous_actions": False},
    "solid moving noise": {"noise_motion": "wander", "spread": 0.3} | dict.fromkeys(list(ALL_SOLID)[::2], True),
    "discrete": {"num_agents": 2, "continuous_actions": False},
}
every_kind = pytest.mark.parametrize("options", EVERY_KIND.values(), ids=list(EVERY_KIND))
DEFAULT = SimpleCentroid()
FLOAT32 = np.zeros(0, np.float32)


def worlds(game: SimpleCentroid, count: int, seed: int = 0) -> tuple[State, np.ndarray]:
    """Return the starts of `count` episodes and their keys."""
    key = episode_key(seed + np.arange(count), np.zeros(count, np.int64))
    return game.initial(uniforms(key, np.zeros(count, np.int64), game.num_reset_uniforms)), key


def draw_step(game: SimpleCentroid, key: np.ndarray, t: int) -> tuple[StepRandomness, np.ndarray]:
    """Return the chance of step t, and uniforms of the shape of a joint action, from a stream of their own."""
    *step, u = uniforms(key, np.full(len(key), t + 1), (*game.num_step_uniforms, game.num_agents * game.num_actions))
    u = u.reshape(len(key), game.num_agents, -1)
    return game.sample_randomness(tuple(step)), u if game.continuous_actions else u[..., 0]


def arranged(game: SimpleCentroid, position: Any, velocity: Any = 0.0) -> State:
    """Return one world, whole, with entities at the given places."""
    position = np.array([position], dtype=np.float64)
    velocity = np.broadcast_to(np.array(velocity, dtype=np.float64), position.shape)
    return game.arrange(position, velocity, game.num_movers - game.num_agents, game.num_entities - game.num_movers)


def coast(game: SimpleCentroid, state: State) -> np.ndarray:
    """Play a step in which nobody pushes: the movers (M, 4)."""
    return game.push(state, np.zeros_like(state.mover[..., 2:4])).mover[0, :, :4]


def seen(game: SimpleCentroid, state: State, agent: int = 0) -> Array:
    """Return the tokens (B, N, 5) of one agent."""
    return game.observe(state, slice(agent, agent + 1))[:, 0]


def wandering(game: SimpleCentroid, wander: np.ndarray) -> StepRandomness:
    """Return the chance of a step in which the signal pushes itself so, (1, S, 2)."""
    return game.sample_randomness(
        tuple(np.zeros((1, count), wander.dtype) for count in game.num_step_uniforms)
    )._replace(wander=wander)


def departure(u: np.ndarray) -> float:
    """Kolmogorov and Smirnov's distance from U(0, 1), times √n: above 2.2 once in 10,000 by chance."""
    u = np.sort(u.ravel().astype(np.float64))
    return float(np.abs(u - (np.arange(u.size) + 0.5) / u.size).max() * math.sqrt(u.size))


# --- actions and motion ---


@pytest.mark.parametrize(
    ("action", "force"),
    [
        ([1, 0, 0, 0, 0], [0, 0]),  # slot 0 does nothing
        ([0, 1, 0, 0, 0], [-5, 0]),
        ([0, 0, 1, 0, 0], [5, 0]),
        ([0, 0, 0, 1, 0], [0, -5]),
        ([0, 0, 0, 0, 1], [0, 5]),
        ([0, 1, 1, 1, 1], [0, 0]),  # opposite slots cancel
        ([1, 0.25, 1, 0, 0.5], [3.75, 2.5]),
        ([10, 0, 10, 10, 0], [5, -5]),  # clipped: ten times the slot is not ten times the force
        ([0, -3, 0.5, 0, -1], [2.5, 0]),
    ],
)
def test_continuous_actions(action, force):
    given = clip_action(DEFAULT, np.array([[action]], np.float32))
    np.testing.assert_array_equal(DEFAULT.control(given, FLOAT32), [[force]])


def test_discrete_actions_are_the_one_hot_ones():
    discrete = dataclasses.replace(DEFAULT, continuous_actions=False)
    one_hot = DEFAULT.control(np.eye(5, dtype=np.float32)[None], FLOAT32)
    np.testing.assert_array_equal(discrete.control(np.arange(5)[None], FLOAT32), one_hot)
    np.testing.assert_array_equal(one_hot, [[[0, 0], [-5, 0], [5, 0], [0, -5], [0, 5]]])


def test_positions_move_with_the_old_velocity():
    state = arranged(DEFAULT, np.zeros((8, 2)))
    randomness = wandering(DEFAULT, np.zeros((1, 3, 2)))
    path = []
    for _ in range(4):
        state = DEFAULT.transition(state, np.array([[[0, 0, 1, 0, 0]]], np.float32), randomness)
        path.append(state.mover[0, 0].tolist())
    x, v = [0, 0.05, 0.1375, 0.253125], [0.5, 0.875, 1.15625, 1.3671875]
    np.testing.assert_allclose(path, [[a, 0, b, 0, AGENT] for a, b in zip(x, v, strict=True)], atol=1e-12)


def test_speed_limits():
    state = arranged(DEFAULT, np.zeros((8, 2)), [[8, 6], [4, 3], [0, 2], *[[0, 0]] * 5])
    expected = [[0.8, 0.6, 4, 3], [0.4, 0.3, 1.6, 1.2], [0, 0.2, 0, 1.5], [0, 0, 0, 0]]  # agent 5, signal 2
    np.testing.assert_allclose(coast(DEFAULT, state), expected, atol=1e-12)


def test_signal_wanders():
    u = np.array([[0, 0.25, 0.5]])
    randomness = DEFAULT.sample_randomness((u, np.zeros((1, 0))))
    np.testing.assert_allclose(randomness.wander, [[[1, 0], [0, 1], [-1, 0]]], atol=1e-15)
    state = DEFAULT.transition(arranged(DEFAULT, np.zeros((8, 2))), np.zeros((1, 1, 5), np.float32), randomness)
    np.testing.assert_allclose(state.mover[0, 1:, 2:4], [[0.1, 0], [0, 0.1], [-0.1, 0]], atol=1e-15)
    everywhere = DEFAULT.sample_randomness(uniforms(worlds(DEFAULT, 1)[1], np.arange(999), DEFAULT.num_step_uniforms))
    np.testing.assert_allclose(physics.length(everywhere.wander), 1, atol=1e-6)


# --- contacts ---

# agents 0 and 1, signal 2 and 3, noise 4: which pair, which kinds collide, the sum of radii
PAIRS = {
    "agent-agent": (0, 1, ["agents"], 0.150),
    "agent-signal": (0, 2, ["agents", "signal"], 0.125),
    "signal-signal": (2, 3, ["signal"], 0.100),
    "agent-noise": (1, 4, ["agents", "noise"], 0.125),
    "signal-noise": (3, 4, ["signal", "noise"], 0.100),
}
each_pair = pytest.mark.parametrize(("one", "other", "kinds", "reach"), PAIRS.values(), ids=list(PAIRS))
AWAY = np.arange(5)[:, None] * [10.0, 0.0]


def five(kinds: list[str]) -> SimpleCentroid:
    return SimpleCentroid(2, 2, 1, **{f"collidable_{kind}": True for kind in kinds})


@each_pair
@pytest.mark.parametrize(
    ("gap", "force"),
    [(0, 0.0693147), (0.001, 0.0313262), (-0.02, 2.0), ("half", None), (1, 0)],
)
def test_contact_forces(one, other, kinds, reach, gap, force):
    """100 · k · log(1 + exp(−gap / k)) apart, k = 0.001; hence 100 newton for each unit of overlap."""
    gap, force = (-reach / 2, 50 * reach) if gap == "half" else (gap, force)
    game, position = five(kinds), AWAY.copy()
    position[other] = position[one] + (reach + gap) * np.array([0.6, 0.8])
    velocity = coast(game, arranged(game, position))[:, 2:]
    expected = np.zeros((5, 2))
    expected[one] = -0.1 * force * np.array([0.6, 0.8])  # dt = 0.1, mass 1
    expected[other] = -expected[one]
    np.testing.assert_allclose(velocity, expected[:4], atol=1e-7)  # noise does not move


@each_pair
def test_no_contact_unless_both_collide(one, other, kinds, reach):
    for some in itertools.chain.from_iterable(itertools.combinations(kinds, n) for n in range(len(kinds))):
        game, position = five(list(some)), AWAY.copy()
        position[other] = position[one] + reach / 2
        assert (coast(game, arranged(game, position))[:, 2:] == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("options", [{}, ALL_SOLID], ids=["no contacts", "all solid"])
def test_bodies_at_one_point(options, dtype):
    game = SimpleCentroid(num_agents=2, **options)
    state = State(*(field.astype(dtype) for field in arranged(game, np.ones((9, 2)))))
    np.testing.assert_array_equal(coast(game, state), np.tile([1, 1, 0, 0], (5, 1)))


def test_bodies_almost_at_one_point():
    game = five(["agents"])
    position = AWAY.copy()
    position[:2] = [[1e-30, 0], [0, 0]]
    np.testing.assert_allclose(coast(game, arranged(game, position))[:2, 2], [1.5, -1.5])


def test_a_body_does_not_push_itself():
    """Everything collides but all is 1 apart, each body alone at its own point: no force at all."""
    game = SimpleCentroid(num_agents=2, **ALL_SOLID)
    places = np.array(list(itertools.product(range(3), range(3))), np.float64)
    np.testing.assert_array_equal(coast(game, arranged(game, places))[:, 2:], 0)


def test_absent_entities_neither_push_nor_move():
    game = SimpleCentroid(num_signal=(1, 3), num_noise=(0, 2), **ALL_SOLID)
    position = np.array([[[0.03, 0.0], [10, 10], *[[0, 0]] * 4]])  # absent ones lie at the origin, near the agent
    state = game.arrange(position, np.zeros_like(position), np.array([[1]]), np.array([[0]]))
    np.testing.assert_array_equal(coast(game, state), [[0.03, 0, 0, 0], [10, 10, 0, 0], [0] * 4, [0] * 4])
    randomness = wandering(game, np.ones((1, 3, 2)))
    moved = game.transition(state, np.zeros((1, 1, 5)), randomness).mover[0]
    np.testing.assert_allclose(moved[1:, 2:4], [[0.1, 0.1], [0, 0], [0, 0]])


@pytest.mark.parametrize("options", [{}, {"collidable_agents": True, "collidable_signal": True}])
def test_noise_is_driven_through(options):
    """To the bit as if it were 100 units away."""
    game = SimpleCentroid(num_noise=28, **options)
    near, key = worlds(game, 64)
    near.landmark[..., :2] = near.mover[:, :1, :2] + 0.1 * near.landmark[..., :2]
    far = near._replace(landmark=near.landmark + np.array([100, 100, 0, 0, 0], np.float32))
    for t in range(30):
        randomness, u = draw_step(game, key, t)
        near, far = (game.transition(state, u, randomness) for state in (near, far))
        np.testing.assert_array_equal(near.mover, far.mover)
        np.testing.assert_array_equal(game.reward(near), game.reward(far))


@pytest.mark.parametrize(
    ("kinds", "pairs"),
    [
        ([], 0),
        (["noise"], 0),  # fixed: nothing would move
        (["agents"], 2 * 2),
        (["signal"], 3 * 3),
        (["agents", "noise"], 2 * (2 + 28)),
        (["agents", "signal"], (2 + 3) * (2 + 3)),
        (["agents", "signal", "noise"], (2 + 3) * (2 + 3 + 28)),
    ],
)
def test_only_colliding_kinds_are_paired(kinds, pairs, monkeypatch):
    counts = []

    def counted(position, others, *rest):
        counts.append(position.shape[1] * others.shape[1])
        return add_contacts(position, others, *rest)

    add_contacts = physics.add_contacts
    monkeypatch.setattr(physics, "add_contacts", counted)
    game = SimpleCentroid(2, 3, 28, **{f"collidable_{kind}": True for kind in kinds})
    coast(game, worlds(game, 1)[0])
    assert sum(counts) == pairs


# --- start ---


@pytest.mark.parametrize(
    ("num_noise", "u_count", "entities", "spread"),
    [
        (4, 0.0, 8, 2),
        (12, 0.0, 16, 2),
        (60, 0.0, 64, 3),
        (252, 0.0, 256, 4),
        ((60, 252), 0.0, 64, 3),  # places of absent entities do not count
        ((60, 252), 0.999, 256, 4),
        ((0, 252), 0.0, 4, 2),
    ],
)
def test_spread(num_noise, u_count, entities, spread):
    game = SimpleCentroid(num_noise=num_noise)
    u = [np.zeros((1, count)) for count in game.num_reset_uniforms]  # counts, agent, signal, offset, noise
    u[0][:] = u_count
    plain = game.initial(tuple(u))
    u[3][:] = 0.75, 0.25  # an offset of length 0.75, a quarter of a turn from x
    shifted = game.initial(tuple(u))
    noise = plain.role[0, 4:] == NOISE
    assert (plain.role != ABSENT).sum() == entities and noise.sum() == entities - 4
    np.testing.assert_allclose(plain.mover[0, :, :4], np.tile([-spread, -spread, -2, -2], (4, 1)))
    np.testing.assert_allclose(plain.landmark[0, noise, :4], np.tile([-spread, -spread, 0, 0], (noise.sum(), 1)))
    np.testing.assert_allclose(
        shifted.landmark[0, noise, :2] + spread, np.tile([0, 0.75], (noise.sum(), 1)), atol=1e-12
    )
    np.testing.assert_array_equal(shifted.mover, plain.mover)


@pytest.mark.parametrize(
    ("options", "spread", "noise_spread"),
    [({}, 2, 2), ({"spread": 0.5}, 0.5, 0.5), ({"noise_spread": 7.0}, 2, 7), ({"spread": 3, "noise_spread": 1}, 3, 1)],
)
def test_start_is_uniform(options, spread, noise_spread):
    game = SimpleCentroid(num_agents=2, noise_offset=0.0, **options)
    state, _ = worlds(game, 4096)
    scales = (spread, spread, 2, 2)
    for body, axis in itertools.product(range(game.num_movers), range(4)):
        assert departure(state.mover[:, body, axis] / scales[axis] / 2 + 0.5) < 2.2
    for body, axis in itertools.product(range(4), range(2)):
        assert departure(state.landmark[:, body, axis] / noise_spread / 2 + 0.5) < 2.2
    assert (state.landmark[..., 2:4] == 0).all()
    numbers = np.concatenate(
        [state.mover[..., :4].reshape(4096, -1), state.landmark[..., :2].reshape(4096, -1)], axis=1
    )
    between = np.corrcoef(numbers.T) - np.eye(numbers.shape[1])
    assert np.abs(between).max() < 5 / math.sqrt(4096)


def test_noise_shares_one_offset():
    game = SimpleCentroid(noise_spread=1e-6, noise_offset=3.0)
    place = worlds(game, 4096)[0].landmark[..., :2]
    assert np.ptp(place, axis=1).max() < 4e-6
    x, y = place[:, 0].T
    assert departure(np.hypot(x, y) / 3) < 2.2  # the length is uniform, not the area
    assert departure(np.arctan2(y, x) / (2 * math.pi) % 1) < 2.2


def test_counts_cover_their_ranges():
    game = SimpleCentroid(num_signal=(2, 4), num_noise=(0, 28))
    role = worlds(game, 8192)[0].role
    signal, noise = (role == SIGNAL).sum(axis=1), (role == NOISE).sum(axis=1)
    for counts, low, high in ((signal, 2, 4), (noise, 0, 28)):
        values, times = np.unique(counts, return_counts=True)
        assert values.tolist() == list(range(low, high + 1))
        expected = len(counts) / (high - low + 1)
        assert np.abs(times - expected).max() < 5 * math.sqrt(expected)
    assert abs(np.corrcoef(signal, noise)[0, 1]) < 5 / math.sqrt(8192)


def test_padding():
    game = SimpleCentroid(num_agents=2, num_signal=(1, 3), num_noise=(0, 28))
    state, key = worlds(game, 64)
    for t in range(3):
        for agent in range(2):
            tokens = seen(game, state, agent)
            mask = game.token_spec.mask(tokens)
            assert (tokens[~mask] == [0, 0, 0, 0, -1]).all()
            np.testing.assert_array_equal(mask.sum(axis=1), (state.role != ABSENT).sum(axis=1))
            assert mask[:, 0].all() and 0 < mask.mean() < 1
        randomness, u = draw_step(game, key, t)
        state = game.transition(state, u, randomness)


@pytest.mark.parametrize(
    ("one", "other", "same_noise"),
    [
        ({"num_noise": 4}, {"num_noise": 28}, 4),
        ({"num_noise": 28}, {"num_noise": (28, 60)}, 28),
        ({"num_noise": 0}, {"num_noise": (0, 28)}, 0),
        ({"num_signal": 3}, {"num_signal": 3, "num_noise": 12}, 4),
    ],
)
def test_more_noise_changes_nobody_else(one, other, same_noise):
    games = [SimpleCentroid(spread=2.0, **options) for options in (one, other)]
    (state_one, key), (state_other, _) = (worlds(game, 64) for game in games)
    for t in range(10):
        np.testing.assert_array_equal(state_one.mover, state_other.mover)
        np.testing.assert_array_equal(state_one.landmark[:, :same_noise], state_other.landmark[:, :same_noise])
        action = games[0].policy("oracle", state_one, draw_step(games[0], key, t)[1])
        state_one, state_other = (
            game.transition(state, action, draw_step(game, key, t)[0])
            for game, state in zip(games, (state_one, state_other), strict=True)
        )


@pytest.mark.parametrize("env_id", [env_id for env_id, (game, _) in ENVIRONMENTS.items() if game == "simple_centroid"])
def test_returns_at_the_start_of_an_id_do_not_fall_with_noise(env_id):
    start = registration.fixed_start(env_id, {})
    assert registration.same_start(env_id, {}) == registration.same_start(env_id, {}, (env_id, {})) == {}
    added = {} if "spread" in ENVIRONMENTS[env_id][1] else start
    assert registration.same_start(env_id, {"num_noise": 60}, (env_id, {})) == added
    assert registration.same_start(env_id, {"num_noise": 60, "spread": None}, (env_id, {})) == {}
    found = [play_baseline(env_id, "oracle", 50, options={"num_noise": noise, **start}).mean() for noise in (0, 28, 60)]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("env_id", [env_id for env_id, (game, _) in ENVIRONMENTS.items() if game != "simple_centroid"])
def test_noise_moves_nobody_in_the_other_games(env_id):
    game, parameters = ENVIRONMENTS[env_id]
    assert (
        registration.fixed_start(env_id, {})
        == registration.same_start(env_id, {}, ("noisy_envs/SimpleCentroid-v0", {}))
        == {}
    )
    if not parameters.get("collidable_obstacles"):
        option, most = registration.noise_option(env_id), 60 if game == "simple_tag" else 15
        few, many = (TokenVectorEnv(game, 64, **{**parameters, option: number}) for number in (0, most))
        few.reset(seed=0)
        many.reset(seed=0)
        agents = few.game.num_agents if game == "simple_tag" else None
        assert np.array_equal(few.state[0], many.state[0][:, :agents])


def test_more_signal_moves_neither_agent_nor_noise():
    one, other = (worlds(SimpleCentroid(num_signal=count, spread=2.0), 64)[0] for count in (3, 9))
    np.testing.assert_array_equal(one.mover[:, 0], other.mover[:, 0])
    np.testing.assert_array_equal(one.landmark, other.landmark)


def test_a_crowd_starts_without_a_placement_loop(monkeypatch):
    drawn = []

    def counted(key, counter, counts):
        drawn.append(sum(counts))
        return uniforms(key, counter, counts)

    monkeypatch.setattr(episode_shell, "uniforms", counted)
    env = gymnasium.make("noisy_envs/SimpleCentroid-v0", num_noise=2000)
    tokens, _ = env.reset(seed=0)
    assert tokens.shape == (2004, 5) and env.observation_space.contains(tokens)
    assert drawn == [2 + 4 + 4 * 3 + 2 + 2 * 2000]  # counts, agent, signal, offset, noise


# --- tokens and rewards ---


def test_tokens_of_each_agent():
    game = SimpleCentroid(num_agents=2, num_signal=2, num_noise=2)
    position = [[1, 2], [3, 5], [10, 0], [0, 10], [-5, -5], [5, 5]]
    velocity = [[1, 0], [0, -1], [2, 2], [-1, 1], [0, 0], [0, 0]]
    state = arranged(game, position, velocity)
    first = [
        [0, 0, 0, 0, SELF],
        [-1.2, -1.4, -0.2, 0, NOISE],
        [0.8, 0.6, -0.2, 0, NOISE],
        [0.4, 0.6, -0.2, -0.2, AGENT],
        [1.8, -0.4, 0.2, 0.4, SIGNAL],
        [-0.2, 1.6, -0.4, 0.2, SIGNAL],
    ]
    second = [
        [0, 0, 0, 0, SELF],
        [-1.6, -2, 0, 0.2, NOISE],
        [0.4, 0, 0, 0.2, NOISE],
        [-0.4, -0.6, 0.2, 0.2, AGENT],
        [1.4, -1, 0.4, 0.6, SIGNAL],
        [-0.6, 1, -0.2, 0.4, SIGNAL],
    ]
    np.testing.assert_allclose(seen(game, state)[0], first, atol=1e-12)
    np.testing.assert_allclose(seen(game, state, 1)[0], second, atol=1e-12)
    double = seen(dataclasses.replace(game, observation_scale=2.5), state, 1)[0]
    np.testing.assert_allclose(double[:, :4], 2 * np.array(second)[:, :4], atol=1e-12)
    assert game.token_spec.roles == {"self": 0, "agent": 1, "signal": 2, "noise": 3}
    assert game.token_spec.query_index == 0 and game.token_spec.num_tokens == 6


@pytest.mark.parametrize(
    ("name", "signal", "tokens"),
    [("1v31v0", 32, 32), ("1v15v16", 16, 32), ("1v3v28", 4, 32), ("1v1v30", 2, 32)],
)
def test_signal_of_the_papers_experiments(name, signal, tokens):
    """The own token counts as signal, as in the paper: 4/32 for 1-3-28."""
    _, info = gymnasium.make(f"noisy_envs/SimpleCentroid-{name}-v0").reset(seed=0)
    assert info["signal_mask"].sum() == signal and info["signal_mask"].shape == (tokens,)
    assert info["snr"] == signal / tokens


def test_signal_mask_of_a_range():
    game = SimpleCentroid(num_agents=2, num_signal=(1, 3), num_noise=(0, 3))
    position = np.zeros((1, 8, 2))
    tokens = seen(game, game.arrange(position, position, np.array([[2]]), np.array([[1]])), 1)
    assert tokens[0, :, -1].tolist() == [SELF, NOISE, ABSENT, ABSENT, AGENT, SIGNAL, SIGNAL, ABSENT]
    assert game.signal_mask(tokens)[0].tolist() == [True, False, False, False, False, True, True, False]


@pytest.mark.parametrize(
    ("options", "near", "far"),
    [
        ({}, -0.005, -0.02),
        ({"reward_shape": "linear"}, -0.0025, -0.04),
        ({"reward_scale": 2.0}, -1.0, -4.0),
        ({"num_signal": (1, 5)}, -0.005, -0.02),
    ],
)
def test_rewards(options, near, far):
    """Three agents at 0, 0.25 and 4 from the centroid (2, 1); noise is no part of it."""
    game = SimpleCentroid(num_agents=3, num_noise=1, **options)
    position = np.full((1, game.num_entities, 2), 50.0)
    position[0, :6] = [[2, 1], [2, 1.25], [-2, 1], [1, 0], [5, 0], [0, 3]]
    state = game.arrange(position, np.zeros_like(position), np.array([[3]]), np.array([[1]]))
    np.testing.assert_allclose(game.reward(state), [[0, near, far]], atol=1e-12)


# --- reference policies ---


def mean_return(game: SimpleCentroid, policy: str, episodes: int) -> float:
    state, key = worlds(game, episodes)
    total = np.zeros(episodes)
    for t in range(game.max_steps):
        randomness, u = draw_step(game, key, t)
        state = game.transition(state, game.policy(policy, state, u), randomness)
        total += game.reward(state)[:, 0]
    return float(total.mean())


@pytest.mark.parametrize(
    ("sizes", "oracle"),
    [((1, 3, 4), -0.20), ((1, 31, 0), -0.18), ((1, 15, 16), -0.19), ((1, 3, 28), -0.23), ((1, 1, 30), -0.31)],
)
def test_oracle_return(sizes, oracle):
    assert mean_return(SimpleCentroid(*sizes), "oracle", 500) == pytest.approx(oracle, abs=0.03)


def test_floor_and_ceiling():
    discrete = SimpleCentroid(continuous_actions=False)
    assert mean_return(DEFAULT, "oracle", 4000) > -0.21
    assert mean_return(DEFAULT, "random", 4000) == pytest.approx(-1.75, abs=0.03)
    assert mean_return(discrete, "oracle", 500) > -0.4
    assert mean_return(discrete, "random", 500) < -1.6


@every_kind
@pytest.mark.parametrize("policy", DEFAULT.policies)
def test_policies_act_within_the_action_space(options, policy):
    game = SimpleCentroid(**options)
    state, key = worlds(game, 256)
    action = game.policy(policy, state, draw_step(game, key, 0)[1])
    if game.continuous_actions:
        assert action.shape == (256, game.num_agents, 5) and action.dtype == np.float32
        assert action.min() >= 0 and action.max() <= 1
    else:
        assert action.shape == (256, game.num_agents) and action.dtype == np.int64
        assert action.min() >= 0 and action.max() <= 4
    assert game.control(action, state.mover).any() == (policy != "still")
    if policy == "random":
        assert (
            departure(action) < 2.2
            if game.continuous_actions
            else np.bincount(action.ravel(), minlength=5).min() > 0.15 * action.size
        )


# --- the observation space and states that users hand over ---


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_steps": 1},
        {"num_agents": 2, "num_signal": (1, 31), "num_noise": (0, 300)},
        {"spread": 0.1, "noise_spread": 30.0},
        {"spread": 30.0, "noise_spread": 0.1, "noise_offset": 9.0},
        {"observation_scale": 0.25, **ALL_SOLID},
        {"observation_scale": 10.675675675675675},
    ],
)
def test_bounds_hold_the_worst_that_can_be_injected(options):
    """Two at opposite corners, at full speed and driven on outwards to the end of the episode."""
    game = SimpleCentroid(**options)
    box, limit = observation_box(game), game.start_reach + game.travel
    corner = np.full((game.num_entities, 2), limit)
    corner[: game.num_agents] *= -1
    state = game.validate_state({"position": corner, "velocity": np.sign(corner) * 5}, ())
    wander = np.full((1, game.num_movers - game.num_agents, 2), math.sqrt(0.5), np.float32)
    outwards = np.tile(np.array([0, 1, 0, 1, 0], np.float32), (1, game.num_agents, 1))
    for _ in range(game.max_steps):
        for agent in range(game.num_agents):
            assert box.contains(seen(game, state, agent)[0])
        assert box.contains(game.world_tokens(state)[0])
        state = game.transition(state, outwards, wandering(game, wander))
    assert box.contains(seen(game, state)[0]) and box.is_bounded()


@every_kind
def test_bounds_hold_in_play(options):
    game = SimpleCentroid(**options)
    box, (state, key) = observation_box(game), worlds(game, 64)
    for t in range(game.max_steps):
        randomness, u = draw_step(game, key, t)
        state = game.transition(state, game.policy("random", state, u), randomness)
        tokens = game.observe(state)
        assert (box.low <= tokens).all() and (tokens <= box.high).all()


@every_kind
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_state_is_admitted_as_it_was(options, backend):
    game = SimpleCentroid(**options)
    state, key = worlds(game, 5)
    for t in range(4):
        randomness, u = draw_step(game, key, t)
        state = game.transition(state, game.policy("random", state, u), randomness)
    given = State(*(to(x, backend) for x in state))
    for again in (game.validate_state(given, (5,)), game.validate_state(State(*(x[0] for x in given)), ())):
        for ours, theirs in zip(state, again, strict=True):
            assert theirs.dtype == np.float32
            np.testing.assert_array_equal(ours[: len(theirs)], theirs)


def test_a_mapping_is_admitted():
    game = SimpleCentroid(num_signal=(1, 3), num_noise=(0, 2))
    state = game.validate_state({"position": np.arange(12).reshape(6, 2), "num_signal": 2, "num_noise": 1}, ())
    assert state.role.tolist() == [[AGENT, SIGNAL, SIGNAL, ABSENT, NOISE, ABSENT]]
    np.testing.assert_array_equal(state.mover[..., :4], [[[0, 1, 0, 0], [2, 3, 0, 0], [4, 5, 0, 0], [0, 0, 0, 0]]])
    np.testing.assert_array_equal(state.landmark[..., :4], [[[8, 9, 0, 0], [0, 0, 0, 0]]])
    pushed = game.validate_state({"position": np.zeros((6, 2)), "velocity": np.ones((6, 2))}, ())
    assert not pushed.landmark[..., :4].any()  # fixed
    several = game.validate_state({"position": np.ones((2, 6, 2)), "num_signal": [1, 3]}, (2,))
    assert (several.role == SIGNAL).sum(axis=1).tolist() == [1, 3]
    assert (several.role == NOISE).sum(axis=1).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("options", "farthest"),
    [
        ({}, 2 + 1 + 0.1 * (5 * 128 + 2)),  # spread, offset of the noise, 128 steps at full speed
        ({"max_steps": 1}, 2 + 1 + 0.7),
        ({"max_steps": 1, "noise_offset": 9.0}, 2 + 9 + 0.7),
        ({"max_steps": 1, "num_noise": (0, 252)}, 4 + 1 + 0.7),
        ({"max_steps": 1, "spread": 5.0, "noise_spread": 0.5}, 5 + 0.7),
    ],
)
def test_how_far_out_is_admitted(options, farthest):
    game = SimpleCentroid(**options)
    position = np.full((game.num_entities, 2), farthest)
    game.validate_state({"position": position - 1e-3}, ())
    with pytest.raises(ValueError, match=r"position: expected numbers from .* got .*"):
        game.validate_state({"position": -position - 1e-3}, ())


GOOD = np.zeros((8, 2))


@pytest.mark.parametrize(
    ("options", "given", "error", "message"),
    [
        ({}, 3, TypeError, "state=3.*position, velocity, num_signal, num_noise"),
        ({}, {}, ValueError, r"missing keys \['position'\]"),
        ({}, {"position": GOOD, "mass": 1}, ValueError, r"unknown keys \['mass'\].*num_noise"),
        ({}, {"position": GOOD[1:]}, ValueError, r"position: expected shape \(8, 2\), got \(7, 2\)"),
        ({}, {"position": GOOD, "velocity": GOOD[0]}, ValueError, r"velocity: expected shape \(8, 2\), got \(2,\)"),
        ({}, {"position": GOOD * np.nan}, ValueError, "position: expected numbers from .* got nan"),
        ({}, {"position": GOOD + np.inf}, ValueError, "position: expected numbers from .* got inf"),
        ({}, {"position": GOOD + 67.3}, ValueError, "position: expected numbers from .* got .*"),
        (
            {},
            {"position": GOOD, "velocity": GOOD - 5.01},
            ValueError,
            "velocity: expected numbers from -5 to 5, got -5.01",
        ),
        ({}, {"position": GOOD, "num_noise": 3}, ValueError, "num_noise=3: expected 4 to 4"),
        ({"num_noise": (2, 4)}, {"position": GOOD, "num_noise": 1}, ValueError, "num_noise=1: expected 2 to 4"),
        ({"num_signal": (1, 3)}, {"position": GOOD, "num_signal": 4}, ValueError, "num_signal=4: expected 1 to 3"),
        ({}, {"position": GOOD, "num_signal": np.nan}, TypeError, "num_signal=nan"),
        ({"num_signal": (1, 3)}, {"position": GOOD, "num_signal": 1.5}, TypeError, "num_signal=1.5"),
        ({}, {"position": GOOD, "num_noise": [4, 4]}, ValueError, "num_noise"),
        ({}, {"position": GOOD, "num_noise": None}, TypeError, "num_noise"),
    ],
)
def test_what_is_not_admitted(options, given, error, message):
    with pytest.raises(error, match=message):
        SimpleCentroid(**options).validate_state(given, ())


# --- options ---

NAN, INF = math.nan, math.inf
BAD: dict[str, list[tuple[Any, type[Exception]]]] = {
    "num_agents": [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError), ((1, 2), TypeError)],
    "num_signal": [(0, ValueError), ((0, 3), ValueError), ((3, 1), ValueError), ((1, 2, 3), TypeError)],
    "num_noise": [(-1, ValueError), ((4, 0), ValueError), ("4", TypeError), (NAN, TypeError), ((0, 4.0), TypeError)],
    "continuous_actions": [(1, TypeError), ("yes", TypeError), (None, TypeError)],
    "max_steps": [(0, ValueError), (10.0, TypeError), (None, TypeError), ((1, 2), TypeError)],
    "other_policy": [("greedy", ValueError), (None, ValueError), (3, ValueError)],
    "noise_role": [("noise", ValueError), (None, ValueError)],
    "noise_motion": [("fast", ValueError), (0, ValueError)],
    "reward_shape": [("squared", ValueError), (None, ValueError), (1, ValueError)],
    "spread": [(0, ValueError), (-1.0, ValueError), (NAN, ValueError), (INF, ValueError), ("2", TypeError)],
    "noise_offset": [(-0.1, ValueError), (NAN, ValueError), (INF, ValueError), (None, TypeError), (True, TypeError)],
}
BAD |= {name: [*BAD["spread"], (None, TypeError)] for name in ("reward_scale", "observation_scale")}
BAD |= {"noise_spread": BAD["spread"]}
BAD |= {name: BAD["continuous_actions"] for name in ALL_SOLID}


def test_each_option_has_bad_values():
    assert set(BAD) == {field.name for field in dataclasses.fields(SimpleCentroid)}


@pytest.mark.parametrize(
    ("option", "value", "error"), [(option, value, error) for option, bad in BAD.items() for value, error in bad]
)
def test_bad_options_are_named(option, value, error):
    with pytest.raises(error) as raised:
        build(SimpleCentroid, {option: value})
    assert f"{option}={value!r}: expected" in str(raised.value)


@pytest.mark.parametrize(
    ("option", "nearest"), [("num_noises", "num_noise"), ("continuous_action", "continuous_actions")]
)
def test_unknown_options_are_named(option, nearest):
    with pytest.raises(
        TypeError,
        match=f"unexpected keyword argument {option!r}: did you mean {nearest!r}.*expected one of num_agents, ",
    ):
        build(SimpleCentroid, {option: 1})


def test_parameters_are_frozen_and_hashable():
    game = SimpleCentroid(num_noise=(0, 28))
    with pytest.raises(dataclasses.FrozenInstanceError):
        game.num_noise = 3
    assert game == SimpleCentroid(num_noise=(0, 28)) and hash(game) == hash(SimpleCentroid(num_noise=(0, 28)))
    assert game != DEFAULT


@pytest.mark.parametrize("given", [[0, 28], (0, 28), [np.int64(0), np.int32(28)]])
def test_lists_and_numpy_scalars_are_options(given):
    game = build(SimpleCentroid, {"num_noise": given, "reward_scale": np.float64(0.5), "collidable_noise": np.True_})
    assert game == SimpleCentroid(num_noise=(0, 28), reward_scale=0.5, collidable_noise=True)
    assert isinstance(hash(game), int) and type(game.reward_scale) is float
    assert all(type(number) is int for number in game.num_noise)


# --- torch ---


def to(array: np.ndarray, backend: str) -> Array:
    """Return the array in the given library."""
    return array if backend == "numpy" else pytest.importorskip("torch").from_numpy(array)


@every_kind
def test_torch_agrees_step_by_step(options):
    """Each step from one state, NumPy's; all in float32."""
    game = SimpleCentroid(**options)
    state, key = worlds(game, 64)

    def outcome(state, u, action, u_step):
        after = game.transition(state, action, game.sample_randomness(u_step))
        tokens = [game.observe(after), *(seen(game, after, agent) for agent in range(game.num_agents))]
        return [*after, *tokens, game.reward(after), game.world_tokens(after), game.policy("random", after, u)]

    for t in range(40):
        _, u = draw_step(game, key, t)
        u_step = uniforms(key, np.full(len(key), t + 1), game.num_step_uniforms)
        action = game.policy("oracle" if t % 2 else "random", state, u)
        ours = outcome(state, u, action, u_step)
        tensors = [to(x, "torch") for x in state], to(u, "torch"), to(action, "torch"), [to(x, "torch") for x in u_step]
        theirs = outcome(State(*tensors[0]), *tensors[1:3], tuple(tensors[3]))
        for array, tensor in zip(ours, theirs, strict=True):
            assert array.dtype == tensor.numpy().dtype
            np.testing.assert_allclose(array, tensor.numpy(), rtol=0, atol=1e-5)
        state = State(*ours[:2])


@every_kind
def test_torch_starts_and_chases_alike(options):
    game = SimpleCentroid(**options)
    state, key = worlds(game, 256)
    start = uniforms(to(key, "torch"), to(np.zeros(256, np.int64), "torch"), game.num_reset_uniforms)
    tensors = game.initial(start)
    for array, tensor in zip(state, tensors, strict=True):
        np.testing.assert_allclose(array, tensor.numpy(), rtol=0, atol=1e-5)
    same = State(*(to(x, "torch") for x in state))
    u = draw_step(game, key, 0)[1]
    chase = game.policy("oracle", state, u), game.policy("oracle", same, to(u, "torch")).numpy()
    np.testing.assert_allclose(*chase, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "kind", ["ranges", "solid ranges", "discrete", *map(slow, ("plain", "linear", "agents", "solid"))]
)
def test_a_step_compiles_whole(kind):
    torch = pytest.importorskip("torch")
    torch._dynamo.reset()
    game = SimpleCentroid(**EVERY_KIND[kind])
    state, key = worlds(game, 4)
    learner = slice(0, 1)
    shape = (4, 1, 5) if game.continuous_actions else (4, 1)
    world = State(*map(torch.from_numpy, state)), torch.from_numpy(key), torch.zeros(4, dtype=torch.int64)
    action = torch.ones(shape, dtype=torch.float32 if game.continuous_actions else torch.int64)
    inputs = EnvParams(game, learner, assign_policies(game, learner), game.max_steps, None), *world, action
    expected = play(*inputs)
    compiled = torch.compile(play, fullgraph=True, backend="eager")(*inputs)
    for ours, theirs in zip((*expected[0], *expected[1:]), (*compiled[0], *compiled[1:]), strict=True):
        np.testing.assert_array_equal(as_numpy(ours), as_numpy(theirs))
