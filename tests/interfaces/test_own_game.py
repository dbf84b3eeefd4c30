"""A game of the user's own, handed to the shells as a class: that of examples/own_environment.py."""

import copy
import importlib.util
import pickle
import re
import sys
from dataclasses import dataclass
from typing import NamedTuple

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from helpers import ROOT, assert_same, draw_actions, load_agent, play, play_parallel, to_backend, train_tiny

from noisy_envs import registration
from noisy_envs.arrays import Array, as_numpy, namespace
from noisy_envs.games.single_agent import SingleAgentGame
from noisy_envs.interfaces.gymnasium_env import TokenEnv
from noisy_envs.interfaces.pettingzoo_env import ParallelTokenEnv
from noisy_envs.interfaces.scripted import query_policy
from noisy_envs.interfaces.vector_env import TokenVectorEnv
from noisy_envs.tokens import TokenSpec
from noisy_envs.wrappers import noisy_tokens


@pytest.fixture
def fruit(monkeypatch: pytest.MonkeyPatch) -> type:
    """The example's class, with its id registered for the test alone."""
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    spec = importlib.util.spec_from_file_location("own_environment", ROOT / "examples" / "own_environment.py")
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "own_environment", example)
    spec.loader.exec_module(example)
    return example.Fruit


def walk(tokens: np.ndarray) -> np.ndarray:
    return 1 + np.sign(tokens[..., 1, 0]).astype(int)


def test_own_game_is_an_environment_of_gymnasium(fruit):
    env = gymnasium.make("Fruit-v0", num_pebbles=3, max_steps=5)
    check_env(env.unwrapped)
    tokens, info = env.reset(seed=0)
    assert tokens.shape == (5, 2) and info["signal_mask"].tolist() == [True, True, False, False, False]
    while True:
        tokens, reward, terminated, truncated, info = env.step(walk(tokens))
        assert reward == pytest.approx(0.98 if terminated else -0.02)
        assert info["is_success"] == terminated
        if terminated or truncated:
            break
    with pytest.raises(ValueError, match="fruit accepts no state to start from"):
        env.reset(options={"state": env.unwrapped.state})
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'num_pebble': did you mean 'num_pebbles'\?"):
        gymnasium.make("Fruit-v0", num_pebble=3)
    assert env.unwrapped.game.policy("random", None, np.array([[0.99]])).tolist() == [[2]]


def test_the_spec_goes_through_a_file(fruit):
    spec = EnvSpec.from_json(gymnasium.make("Fruit-v0", num_pebbles=3).spec.to_json())
    env = gymnasium.make(spec)
    assert type(env.unwrapped.game) is fruit and env.reset(seed=0)[0].shape == (5, 2)
    envs = gymnasium.make_vec(EnvSpec.from_json(gymnasium.make_vec("Fruit-v0", 2).spec.to_json()))
    assert envs.game == fruit() and envs.reset(seed=0)[0].shape == (2, 9, 2)


@pytest.mark.parametrize(
    ("game", "error", "message"),
    [
        ("fruit", ValueError, "game='fruit': expected one of 'simple_centroid', "),
        ("no_such_module:Fruit", ImportError, "No module named 'no_such_module'"),
        ("own_environment:Apple", AttributeError, "'own_environment' has no attribute 'Apple'"),
    ],
)
@pytest.mark.usefixtures("fruit")
def test_unknown_games_are_named(game, error, message):
    with pytest.raises(error, match=message):
        TokenEnv(game)


@pytest.mark.parametrize("mode", list(AutoresetMode)[:2])
def test_a_vector_of_it_plays_what_single_ones_do(fruit, mode):
    ours = gymnasium.make_vec("Fruit-v0", num_envs=3, max_steps=9, autoreset_mode=mode)
    theirs = SyncVectorEnv([lambda: gymnasium.make("Fruit-v0", max_steps=9)] * 3, autoreset_mode=mode)
    actions = draw_actions(ours.action_space, 30)
    for ours_seen, theirs_seen in zip(
        play(ours, actions, seed=3), play(theirs, actions, seed=3), strict=True
    ):  # tokens, rewards, ends
        assert_same(ours_seen[0], theirs_seen[0])
        for a, b in zip(ours_seen[1:-1], theirs_seen[1:-1], strict=True):
            np.testing.assert_allclose(a, b)


def test_numpy_and_torch_play_alike(fruit):
    pytest.importorskip("torch")
    seen = {}
    for backend in ("numpy", "torch"):
        envs = TokenVectorEnv(fruit, 4, backend=backend, max_steps=6)
        actions = [to_backend(action, backend) for action in draw_actions(envs.action_space, 20)]
        seen[backend] = play(envs, actions, seed=1)
    for ours, theirs in zip(seen["numpy"], seen["torch"], strict=True):
        for a, b in zip(ours[:-1], theirs[:-1], strict=True):
            np.testing.assert_allclose(a, as_numpy(b), atol=1e-6)


def test_no_start_of_the_example_is_over(fruit):
    envs = TokenVectorEnv(fruit, 5000)
    tokens, info = envs.reset(seed=0)
    distance = abs(tokens[:, 1, 0])
    assert not info["is_success"].any() and distance.min() >= 0.0999 and distance.max() > 1.8
    assert abs(envs.state.things).max() <= 1 and (envs.state.things[:, 0] < -0.9).any()
    assert not envs.step(np.ones(5000, np.int64))[2].any()


def test_a_start_that_is_over_is_refused_alike_in_single_and_vector(fruit, backend, monkeypatch):
    """Else a single world raises at its first step, and a vector one goes on with the next episode unsaid."""
    env, starts = TokenEnv(fruit), {}
    for seed in range(60):
        for number in range(2):
            env.reset(seed=seed, options={"episode": number})
            starts[seed, number] = env.state.agent[0]
    seed = next(seed for seed in range(60) if starts[seed, 0] <= 0.9 < starts[seed, 1])
    worse = next(seed for seed in range(60) if starts[seed, 0] > 0.9)
    monkeypatch.setattr(fruit, "terminated", lambda self, state: state.agent[:, 0] > 0.9)
    told = "fruit: episode {} of seed {} starts in a terminal state, which `initial` must not return"
    one = to_backend(np.array([1]), backend)
    options = {"max_steps": 1}
    for env, action in (
        (TokenEnv(fruit, **options), 1),
        (ParallelTokenEnv(fruit, **options), {"agent_0": 1}),
        (TokenVectorEnv(fruit, 1, backend=backend, **options), one),
    ):
        for _ in range(2):  # what is refused changes nothing
            env.reset(seed=seed)
            env.step(action)
            with pytest.raises(ValueError, match=told.format(1, seed)):
                env.step(action) if isinstance(env, TokenVectorEnv) else env.reset()
            with pytest.raises(ValueError, match=told.format(0, worse)):
                env.reset(seed=worse)
    same_step = TokenVectorEnv(fruit, 1, backend=backend, autoreset_mode=AutoresetMode.SAME_STEP, **options)
    same_step.reset(seed=seed)
    with pytest.raises(ValueError, match=told.format(1, seed)):
        same_step.step(one)


@pytest.mark.parametrize("shell", [TokenEnv, TokenVectorEnv, ParallelTokenEnv])
def test_options_of_an_own_game_are_checked(fruit, shell):
    with pytest.raises(ValueError, match="num_pebbles=-1: expected at least 0"):
        shell(fruit, num_pebbles=-1)
    with pytest.raises(ValueError, match="max_steps=0: expected at least 1"):
        shell(fruit, max_steps=0)


def test_an_own_game_is_drawn_by_its_scene(fruit):
    env = gymnasium.make("Fruit-v0", render_mode="rgb_array", num_pebbles=3).unwrapped
    env.reset(seed=0)
    plain, haloed = env.render(), env.render(weights=np.array([0, 1, 0, 0, 0]))
    view = (plain != haloed)[33:567].any(axis=(0, 2))  # between caption and legend
    (changed,) = view.nonzero()
    assert abs(changed.mean() - (300 + 533 / 2 / 1.2 * env.state.things[0])) < 3 and len(changed) < 80
    envs = TokenVectorEnv(fruit, 2, render_mode="rgb_array", num_pebbles=3)
    envs.reset(seed=0)
    np.testing.assert_array_equal(envs.render()[0], plain)


@pytest.mark.parametrize("shell", [TokenEnv, TokenVectorEnv, ParallelTokenEnv])
def test_a_game_without_a_scene_says_what_it_lacks(shell):
    with pytest.raises(ValueError, match=r"render_mode='rgb_array': expected one of None; rendering needs"):
        shell(Drift, render_mode="rgb_array")


def test_the_agents_play_its_native_vector_environment(fruit):
    """World for world and step for step what Gymnasium's vector of single ones plays, noise included."""
    pytest.importorskip("torch")
    from noisy_envs.training import gymnasium_envs

    game = gymnasium_envs.GymnasiumGame("Fruit-v0", {"num_noise": (0, 3), "max_steps": 7})
    native = game.make_vec(3)
    assert isinstance(native.unwrapped, TokenVectorEnv) and game.native and game.can_render
    assert not gymnasium_envs.GymnasiumGame("CartPole-v1").native
    gymnasium.spec("Fruit-v0").vector_entry_point = None
    singles = game.make_vec(3)
    assert isinstance(singles.unwrapped, SyncVectorEnv) and not game.native
    actions = draw_actions(native.action_space, 30)
    for ours, theirs in zip(play(native, actions, seed=3), play(singles, actions, seed=3), strict=True):
        assert_same(ours[0], theirs[0])
        for a, b in zip(ours[1:-1], theirs[1:-1], strict=True):
            np.testing.assert_allclose(a, b)


def test_an_agent_trains_on_it_and_leaves_a_film(fruit, tmp_path, capsys):
    pytest.importorskip("tyro")
    _, run = train_tiny(
        load_agent("avgpool"), tmp_path, "--env-id", "Fruit-v0", "--env-kwargs", "max_steps=3", "--capture-video"
    )
    assert (run / "episode.gif").read_bytes().startswith(b"GIF")
    assert "4 environments" in capsys.readouterr().out


def test_more_pebbles_move_neither_agent_nor_fruit(fruit):
    few, many = (TokenEnv(fruit, num_pebbles=count).reset(seed=7)[0] for count in (1, 9))
    assert_same(few, many[:3])


def test_pettingzoo_copies_and_wrappers_take_it(fruit):
    env = ParallelTokenEnv(fruit)
    assert env.metadata["name"] == "fruit_v0"
    single = play(TokenEnv(fruit), [0, 1, 2], seed=4)
    for ours, theirs in zip(single, play_parallel(env, [{"agent_0": i} for i in range(3)], seed=4), strict=True):
        assert_same(ours[0], theirs[0]["agent_0"])
    assert env.state().shape == (9, 2)
    tokens, _ = noisy_tokens(TokenEnv(fruit), num_noise=4).reset(seed=0)
    assert tokens.shape == (13, 2)
    env = TokenEnv(fruit)
    env.reset(seed=2)
    other = copy.deepcopy(env)
    assert_same(env.step(0), other.step(0))


class State(NamedTuple):
    place: Array  # (B, 1)


class StepRandomness(NamedTuple):
    wind: Array  # (B, 1)


@dataclass(frozen=True)
class Drift(SingleAgentGame):
    """The least that a game adds, one with chance in its steps and without an end of its own."""

    max_steps: int = 3
    name = "drift"
    num_actions = 1
    continuous_actions = True
    num_reset_uniforms = (1,)
    num_step_uniforms = (1,)
    observation_bounds = np.float32([[-9]]), np.float32([[9]])

    @property
    def token_spec(self) -> TokenSpec:
        return TokenSpec(1, ("x",), {}, padded=False)

    def initial(self, u: tuple[Array, ...]) -> State:
        return State(u[0])

    def sample_randomness(self, u: tuple[Array, ...]) -> StepRandomness:
        return StepRandomness(u[0])

    def transition(self, state: State, action: Array, randomness: StepRandomness) -> State:
        return State(state.place + action[:, 0] + randomness.wind)

    def observe(self, state: State, agents: slice = slice(0, 1)) -> Array:
        return state.place[:, None, None]

    def reward(self, state: State, agents: slice = slice(0, 1)) -> Array:
        return -state.place

    def signal_mask(self, tokens: Array, state: State) -> Array:
        return tokens[..., 0] > -1


@dataclass(frozen=True)
class Plain(Drift):
    """Takes its chance as it comes."""

    randomness = SingleAgentGame.sample_randomness

    def transition(self, state: State, action: Array, randomness: tuple[Array]) -> State:
        return State(state.place + action[:, 0] + randomness[0])


@dataclass(frozen=True)
class Bare(Drift):
    """Has an array for its chance."""

    def sample_randomness(self, u: tuple[Array, ...]) -> Array:
        return u[0]

    def transition(self, state: State, action: Array, randomness: Array) -> State:
        return State(state.place + action[:, 0] + randomness)


@pytest.mark.parametrize("game", [Plain, Bare])
def test_chance_needs_no_names(game, backend):
    actions = [np.float32([0.5])] * 3
    named = play(TokenEnv(Drift), actions, seed=5)
    assert_same(play(TokenEnv(game), actions, seed=5), named)
    envs = TokenVectorEnv(game, 1, backend=backend)
    many = play(envs, [to_backend(action[None], backend) for action in actions], seed=5)
    for one, row in zip(named, many, strict=False):
        np.testing.assert_allclose(one[0], as_numpy(row[0])[0], rtol=1e-6)


@dataclass(frozen=True)
class NoAgents(Drift):
    def observe(self, state: State, agents: slice = slice(0, 1)) -> Array:
        return state.place[:, None]


@dataclass(frozen=True)
class Double(Drift):
    def observe(self, state: State, agents: slice = slice(0, 1)) -> Array:
        return namespace(state.place).astype(state.place[:, None, None], namespace(state.place).float64)


@dataclass(frozen=True)
class MoreTokens(Drift):
    token_spec = TokenSpec(2, ("x",), {}, padded=False)


@dataclass(frozen=True)
class MoreFeatures(Drift):
    token_spec = TokenSpec(1, ("x", "role"), {}, padded=False)


EXPECTED = "drift: `observe`: expected ARRAY float32 (B, n, ...) = ({}, 1, 1, 1), got "
MISTAKES = {
    NoAgents: EXPECTED + "ARRAY float32 ({}, 1, 1)",
    Double: EXPECTED + "ARRAY float64 ({}, 1, 1, 1)",
    MoreTokens: "drift: `token_spec`: expected the shape of observations, (1, 1), got 2 tokens of 1 features",
    MoreFeatures: "drift: `token_spec`: expected the shape of observations, (1, 1), got 1 tokens of 2 features",
}


def expected_by(message, env, number):
    """Return the pattern of a message, with the array type and the number of environments."""
    array = "Tensor" if getattr(env, "backend", "numpy") == "torch" else "ndarray"
    return re.escape(message.replace("ARRAY", array).replace("{}", str(number)))


@pytest.mark.parametrize("game", MISTAKES)
def test_a_game_that_does_not_show_what_it_says_is_refused(game, backend):
    worlds = {TokenEnv: 1, ParallelTokenEnv: 1, TokenVectorEnv: 3}
    for shell, number in worlds.items():
        env = shell(game, number, backend=backend) if shell is TokenVectorEnv else shell(game)
        for _ in range(2):
            with pytest.raises(ValueError, match=expected_by(MISTAKES[game], env, number)):
                env.reset(seed=0)


def of_drift(**members):
    """Make a class of rules that are those of `Drift` but for some members."""
    return dataclass(frozen=True)(type("Other", (Drift,), {"__module__": __name__, **members}))


def in_place(self, state, action, randomness):
    place = state.place
    place += randomness.wind
    return state


def overwritten(self, state, agents=slice(0, 1)):
    buffer = BUFFERS.setdefault((type(state.place), len(state.place)), namespace(state.place).zeros_like(state.place))
    buffer[:] = state.place
    return buffer[:, None, None]


BUFFERS = {}
ENDS = {"terminates": True, "terminated": lambda self, state: state.place[:, 0] > 9}
# what a member, the first, returns instead, and the message: ARRAY is the array type, {} the number of environments
FAULTS = {
    "reward of worlds": (
        {"reward": lambda self, s, a: s.place[:, 0]},
        ": expected ARRAY numbers (B, n) = ({}, 1), got ARRAY float32 ({},)",
    ),
    "reward of truth": (
        {"reward": lambda self, s, a: s.place > 0},
        ": expected ARRAY numbers (B, n) = ({}, 1), got ARRAY bool ({}, 1)",
    ),
    "reward of Python": ({"reward": lambda self, s, a: 1.0}, ": expected ARRAY numbers (B, n) = ({}, 1), got float"),
    "no reward": ({"reward": lambda self, s, a: None}, ": expected ARRAY numbers (B, n) = ({}, 1), got NoneType"),
    "ends of agents": (
        {"terminated": lambda self, s: s.place > 9, "terminates": True},
        ": expected ARRAY bool (B,) = ({},), got ARRAY bool ({}, 1)",
    ),
    "ends as numbers": (
        {"terminated": lambda self, s: 0 * s.place[:, 0], "terminates": True},
        ": expected ARRAY bool (B,) = ({},), got ARRAY float32 ({},)",
    ),
    "ends of Python": (
        {"terminated": lambda self, s: np.False_, "terminates": True},
        ": expected ARRAY bool (B,) = ({},), got bool",
    ),
    "success of agents": (
        {"success": lambda self, s: s.place > 9, **ENDS},
        ": expected ARRAY bool (B,) = ({},), got ARRAY bool ({}, 1)",
    ),
    "signal of worlds": (
        {"signal_mask": lambda self, t, s: t[..., 0, 0] > 0},
        ": expected ARRAY bool (B, n, N) = ({}, 1, 1), got ARRAY bool ({}, 1)",
    ),
    "signal as numbers": (
        {"signal_mask": lambda self, t, s: t[..., 0]},
        ": expected ARRAY bool (B, n, N) = ({}, 1, 1), got ARRAY float32 ({}, 1, 1)",
    ),
    "mask of features": (
        {"token_mask": lambda self, t: t > 0},
        ": expected ARRAY bool (B, n, N) = ({}, 1, 1), got ARRAY bool ({}, 1, 1, 1)",
    ),
    "start is a tuple": ({"initial": lambda self, u: (u[0],)}, ": expected a NamedTuple of arrays, got tuple"),
    "start is a list": ({"initial": lambda self, u: [u[0]], **ENDS}, ": expected a NamedTuple of arrays, got list"),
    "start lacks worlds": (
        {"initial": lambda self, u: State(u[0][0, 0])},
        " place: expected ARRAY (B, ...) = ({}, ...), got",
    ),
    "start of Python": (
        {"initial": lambda self, u: State(0.5)},
        " place: expected ARRAY (B, ...) = ({}, ...), got float",
    ),
    "step is a tuple": ({"transition": lambda self, s, a, c: (s.place,)}, ": expected State, got tuple"),
    "step is nothing": ({"transition": lambda self, s, a, c: None}, ": expected State, got NoneType"),
    "step drops an axis": (
        {"transition": lambda self, s, a, c: State(s.place[:, 0])},
        " place: expected ARRAY float32 ({}, 1), got ARRAY float32 ({},)",
    ),
    "step is wider": (
        {"transition": lambda self, s, a, c: State(namespace(a).astype(s.place, namespace(a).float64))},
        " place: expected ARRAY float32 ({}, 1), got ARRAY float64 ({}, 1)",
    ),
    "nothing to see": (
        {"observe": lambda self, s, a: None},
        ": expected ARRAY float32 (B, n, ...) = ({}, 1, 1, 1), got NoneType",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_game_gives_in_another_shape_is_told_at_its_first_reset(fault, backend):
    """It was a traceback of NumPy's, of the shells' inner lines, or no word at all."""
    members, told = FAULTS[fault]
    game, member = of_drift(**members), next(iter(members))
    told = f"drift: `{member}`{told}"
    for shell, number in {TokenEnv: 1, ParallelTokenEnv: 1, TokenVectorEnv: 3}.items():
        env = shell(game, number, backend=backend) if shell is TokenVectorEnv else shell(game)
        with pytest.raises(ValueError, match=expected_by(told, env, number)) as error:
            env.reset(seed=0)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("member", "instead", "told"),
    [
        ("transition", in_place, "drift: `transition` must return new arrays, but it changed its argument `state`"),
        ("observe", overwritten, "drift: `observe` must return a new array, but it returned that of its last call"),
    ],
)
def test_rules_that_overwrite_what_they_gave_are_refused(member, instead, told, backend):
    """What was seen before changed: all observations that were kept became the last one."""
    game = of_drift(**{member: instead})
    for shell, number in {TokenEnv: 1, ParallelTokenEnv: 1, TokenVectorEnv: 3}.items():
        env = shell(game, number, backend=backend) if shell is TokenVectorEnv else shell(game)
        with pytest.raises(ValueError, match=told):
            env.reset(seed=0)


def test_rules_may_show_what_never_changes(backend):
    """A view of a field that a step hands on is no fault."""
    game = of_drift(transition=lambda self, state, action, randomness: state)
    assert TokenEnv(game).reset(seed=0)[0].shape == (1, 1)
    assert TokenVectorEnv(game, 2, backend=backend).reset(seed=0)[0].shape == (2, 1, 1)


def test_an_agent_says_in_one_line_what_a_game_gives_wrongly(monkeypatch, tmp_path):
    pytest.importorskip("tyro")
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    game = of_drift(reward=lambda self, state, agents: -state.place[:, 0])
    gymnasium.register(
        "WrongDrift-v0", registration.SINGLE, vector_entry_point=registration.VECTOR, kwargs={"game": game}
    )
    told = re.escape("error: drift: `reward`: expected ndarray numbers (B, n) = (4, 1), got ndarray float32 (4,)")
    with pytest.raises(SystemExit, match=f"^{told}[^\n]*$"):
        train_tiny(load_agent("adapool"), tmp_path, "--env-id", "WrongDrift-v0")


@pytest.mark.parametrize("limit", [-1, None, 2])
def test_an_own_game_keeps_its_own_limit_where_gymnasium_has_none(fruit, limit):
    pytest.importorskip("torch")
    from noisy_envs.training import gymnasium_envs

    game = gymnasium_envs.GymnasiumGame("Fruit-v0", {"max_steps": 3, "max_episode_steps": limit})
    last = limit if limit == 2 else 3
    for env, action in ((game.make(), 1), (game.make_vec(1), np.array([1]))):
        env.reset(seed=0)
        assert [bool(env.step(action)[3]) for _ in range(last)] == [i == last - 1 for i in range(last)]


class Undecided(SingleAgentGame):
    max_steps: int = 3


@pytest.mark.parametrize("shell", [TokenEnv, TokenVectorEnv, ParallelTokenEnv])
@pytest.mark.parametrize("game", [Undecided, Drift(), "test_own_game:EXPECTED"])
def test_what_is_no_class_of_rules_is_refused(shell, game):
    with pytest.raises(TypeError, match=rf"game={re.escape(repr(game))}: expected the class of a frozen dataclass"):
        shell(game)


@dataclass(frozen=True)
class Signed(Drift):
    """Places from −1 in whole steps, so that the last column holds the number that is padding elsewhere."""

    token_spec = TokenSpec(1, ("x",), {}, padded=False)

    def initial(self, u: tuple[Array, ...]) -> State:
        return State(0 * u[0] - 1)

    def signal_mask(self, tokens: Array, state: State) -> Array:
        return tokens[..., 0] < 0


def test_where_nothing_is_padding_all_tokens_are_present(backend):
    tokens, info = TokenEnv(Signed).reset(seed=0)
    assert tokens.tolist() == [[-1]] and info["snr"] == 1
    envs = TokenVectorEnv(Signed, 2, backend=backend)
    tokens, info = envs.reset(seed=0)
    assert info["snr"].tolist() == [1, 1]
    mask = Signed.token_spec.mask(tokens)
    assert mask.tolist() == [[True]] * 2 and type(mask) is type(tokens)
    assert noisy_tokens(TokenVectorEnv(Signed, 2), num_noise=1).reset(seed=0)[1]["snr"].tolist() == [0.5, 0.5]


def test_the_least_game_plays_everywhere(backend):
    check_env(TokenEnv(Drift), skip_render_check=True)
    single = play(pickle.loads(pickle.dumps(TokenEnv(Drift))), [np.float32([0.5])] * 3, seed=5)
    envs = TokenVectorEnv(Drift, 2, backend=backend)
    actions = [to_backend(np.full((2, 1), 0.5, np.float32), backend)] * 3
    many = play(envs, actions, seed=5)
    for one, row in zip(single, many, strict=False):
        np.testing.assert_allclose(one[0], as_numpy(row[0])[0], rtol=1e-6)
    assert many[-1][3].all() and not many[-1][2].any()
    assert Drift().policy("random", None, np.float32([[0.3]])).tolist() == [[np.float32(0.3)]]
    assert Drift().world_tokens(State(np.ones((2, 1)))).shape == (2, 1, 1)


@pytest.mark.parametrize("value", [7.0, -3.0])
def test_rules_get_numbers_clipped_to_0_to_1(backend, value):
    def moved(shell, number):
        action = np.float32([number])
        env = shell(Drift)
        env.reset(seed=5)
        return env.step({"agent_0": action} if shell is ParallelTokenEnv else action)

    nearest = float(np.clip(value, 0, 1))
    for shell in (TokenEnv, ParallelTokenEnv):
        assert_same(moved(shell, value), moved(shell, nearest))
    seen = []
    for number in (value, nearest):
        envs = TokenVectorEnv(Drift, 2, backend=backend)
        envs.reset(seed=5)
        actions = to_backend(np.full((2, 1), number, np.float32), backend)
        seen.append([envs.pure_step(envs.batch_state, actions)[1].tokens, envs.step(actions)])
    assert_same(*seen)
    u = to_backend(np.full((2, 1), 0.5, np.float32), backend)
    assert_same(query_policy(Drift(), lambda tokens, u: 0 * u + value, None, u), 0 * u + nearest)
