"""Environments of others behind the agents' interface, and runs of the agents on them."""

import math
import os
import subprocess
import sys

import gymnasium
import numpy as np
import pytest
from cases import HEADS
from gymnasium import spaces
from helpers import load_agent, train_tiny

pytest.importorskip("torch")
pytest.importorskip("tyro")
import torch

from noisy_envs import registration
from noisy_envs.rendering import token_bars
from noisy_envs.rendering.playback import make_playback
from noisy_envs.tokens import TokenSpec
from noisy_envs.training import gymnasium_envs
from noisy_envs.training.main import main
from noisy_envs.training.run import Run
from noisy_envs.training.settings import parse
from noisy_envs.wrappers import noisy_tokens

CARTPOLE = "CartPole-v1"
WORDS = ["--env-id", CARTPOLE, "--num-noise", "4"]


class Odd(gymnasium.Env):
    """Shows and takes what it is told to, and ends after three steps."""

    metadata = {"render_modes": []}  # noqa: RUF012  as Gymnasium has it

    def __init__(self, render_mode=None, shows=None, takes=None):
        self.render_mode = render_mode
        self.observation_space = shows or spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = takes or spaces.Discrete(3, start=5)
        self.taken = None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.clock = 0
        return self.observation_space.sample() * 0, {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.clock += 1
        return self.observation_space.sample() * 0, float(np.sum(action)), self.clock == 3, False, {}


@pytest.fixture(autouse=True, scope="module")
def registered():
    gymnasium.register("Odd-v0", Odd)
    yield
    gymnasium.registry.pop("Odd-v0")


@pytest.fixture(scope="module")
def ppo():
    return load_agent("adapool")


@pytest.fixture(scope="module")
def trained(ppo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return train_tiny(ppo, folder, *WORDS)[1]


@pytest.fixture
def drawn(monkeypatch):
    """Let `Odd` and its kin be made to be drawn."""
    monkeypatch.setitem(Odd.metadata, "render_modes", ["rgb_array"])


# the worlds


@pytest.mark.parametrize("num_noise", [0, 3, (0, 4)])
def test_worlds_are_those_of_gymnasium(num_noise):
    """World i of seed s is the single environment of s + i, noise included, through ends of episodes."""
    game = gymnasium_envs.GymnasiumGame(CARTPOLE, {"num_noise": num_noise})
    envs = gymnasium_envs.GymnasiumVectorEnv(game, 3)
    singles = [noisy_tokens(gymnasium.make(CARTPOLE), num_noise) for _ in range(3)]
    tokens, _ = envs.reset(seed=7)
    assert torch.equal(tokens, torch.from_numpy(np.stack([env.reset(seed=7 + i)[0] for i, env in enumerate(singles)])))
    rng = np.random.default_rng(0)
    worlds, ends = envs.batch_state, 0
    for _ in range(80):
        actions = rng.integers(0, 2, 3)
        worlds, outcome = envs.pure_step(worlds, torch.from_numpy(actions))
        for i, env in enumerate(singles):
            seen, reward, terminated, truncated, _ = env.step(actions[i])
            np.testing.assert_array_equal(outcome.final_tokens[i], seen)
            assert (outcome.reward[i], outcome.terminated[i], outcome.truncated[i]) == (reward, terminated, truncated)
            if terminated or truncated:
                ends += 1
                seen, _ = env.reset()
            np.testing.assert_array_equal(outcome.tokens[i], seen)
    assert ends > 5 and worlds == 80
    assert outcome.reward.dtype == torch.float32 and outcome.tokens.dtype == torch.float32
    envs.close()


def test_an_environment_need_not_know_of_drawing(ppo, tmp_path):
    class Plain(Odd):
        def __init__(self):
            super().__init__()

    gymnasium.register("Plain-v0", Plain)
    try:
        _, run = train_tiny(ppo, tmp_path, "--env-id", "Plain-v0", "--num-noise", "4")
    finally:
        gymnasium.registry.pop("Plain-v0")
    assert (run / "curve.png").exists() and not (run / "episode.gif").exists()


def test_what_was_seen_stays_as_it_was():
    envs = gymnasium_envs.GymnasiumVectorEnv(gymnasium_envs.GymnasiumGame(CARTPOLE), 2)
    tokens, _ = envs.reset(seed=0)
    before = tokens.clone()
    envs.step(torch.zeros(2, dtype=torch.int64))
    assert torch.equal(tokens, before)


@pytest.mark.parametrize(
    ("space", "given", "taken"),
    [
        (spaces.Discrete(3, start=5), [0, 2], [5, 7]),
        (spaces.Discrete(3, start=-2), [0, 2], [-2, 0]),
        (spaces.Box(-2, 6, (2,), np.float32), [[-1, 1], [0, 9]], [[-2, 6], [2, 6]]),
        (spaces.Box(0, np.inf, (1,), np.float64), [[-3], [8]], [[0], [8]]),
        (spaces.Box(5, np.inf, (1,)), [[-3], [2]], [[5], [7]]),
        (spaces.Box(-np.inf, -5, (1,)), [[-2], [3]], [[-7], [-5]]),
        (spaces.Box(np.float32([-8, -np.inf]), np.float32([8, np.inf])), [[0.5, 0.5], [-9, -9]], [[4, 0.5], [-8, -9]]),
        (spaces.Box(-2, 6, ()), [[-1], [0.5], [9]], [-2, 4, 6]),
        (spaces.Box(-2, 6, (2, 1)), [[-1, 1], [0, 0.5]], [[[-2], [6]], [[2], [4]]]),
        (spaces.Box(-3.4e38, 3.4e38, (1,)), [[-1], [0], [1]], [[-3.4e38], [0], [3.4e38]]),
        (spaces.Box(-1, 1, (1,), np.int32), np.linspace(-1, 1, 9)[:, None], [[i // 3 - 1] for i in range(9)]),
    ],
)  # fmt: skip
def test_actions_get_the_range_of_the_environment(space, given, taken):
    found = gymnasium_envs.ActionRange(space)(np.array(given))
    np.testing.assert_array_equal(found, np.array(taken, space.dtype))
    assert found.dtype == space.dtype or isinstance(space, spaces.Discrete)
    assert all(space.contains(np.asarray(one)) for one in found)


INTEGERS = {
    "few": spaces.Box(-1, 1, (1,), np.int32),
    "one": spaces.Box(4, 4, (1,), np.int64),
    "bytes": spaces.Box(0, 255, (1,), np.uint8),
    "flags": spaces.Box(0, 1, (1,), np.bool_),
}
WIDE = {
    "unbounded": spaces.Box(-np.inf, np.inf, (1,), np.int64),
    "half": spaces.Box(3, np.inf, (1,), np.int32),
    "all": spaces.Box(-(2**63), 2**63 - 1, (1,), np.int64),
    "naturals": spaces.Box(0, 2**64 - 1, (1,), np.uint64),
}


@pytest.mark.parametrize("space", INTEGERS.values(), ids=list(INTEGERS))
def test_each_integer_is_reached_as_often_as_another(space):
    """They were truncated, so that the highest was reached at 1 alone and 0 twice as often as the others."""
    count = int(space.high[0]) - int(space.low[0]) + 1
    middles = (np.arange(5 * count) + 0.5) / (5 * count) * 2 - 1
    found = gymnasium_envs.ActionRange(space)(np.float32(middles)[:, None])[:, 0]
    np.testing.assert_array_equal(found, np.repeat(np.arange(count) + int(space.low[0]), 5))
    assert (
        gymnasium_envs.ActionRange(space)(np.float32([[-7], [-1], [1], [7]]))[:, 0]
        == [*space.low, *space.low, *space.high, *space.high]
    ).all()


@pytest.mark.parametrize("space", WIDE.values(), ids=list(WIDE))
def test_integers_without_bounds_are_rounded_and_wide_ones_stay_inside(space):
    given = np.float32([[-1e30], [-1.2], [0], [0.6], [1.4], [1e30]])
    found = gymnasium_envs.ActionRange(space)(given)
    assert (
        found.dtype == space.dtype
        and all(map(space.contains, found))
        and (np.diff(found[:, 0].astype(float)) >= 0).all()
    )
    if space is WIDE["unbounded"]:
        assert found[1:5, 0].tolist() == [-1, 0, 1, 1]
    elif space is WIDE["half"]:
        assert found[1:5, 0].tolist() == [3, 3, 4, 4]


def test_options_are_divided_between_the_noise_and_the_game():
    game = gymnasium_envs.GymnasiumGame(
        "Odd-v0", {"num_noise": 2, "distribution": "uniform", "takes": spaces.Box(-2, 2, (1,))}
    )
    assert game.token_spec.num_tokens == 1 + 3 + 2 and game.num_noise == 2 and not game.can_render
    assert game.action_space == spaces.Box(-2, 2, (1,))
    assert gymnasium_envs.GymnasiumGame(CARTPOLE).can_render


@pytest.mark.parametrize(
    ("env_id", "options", "told"),
    [
        ("Odd-v0", {"takes": spaces.MultiBinary(3)}, r"action_space=MultiBinary\(3\): expected Discrete or Box"),
        ("Odd-v0", {"takes": spaces.MultiDiscrete(np.full(60, 2))}, r"2 2\]\): expected Disc.*TransformAction"),
        ("Odd-v0", {"takes": spaces.Dict(a=spaces.Discrete(2))}, "action_space=Dict.*TransformAction"),
        ("Odd-v0", {"takes": spaces.Tuple([spaces.Discrete(2)])}, "action_space=Tuple.*TransformAction"),
        ("Odd-v0", {"takes": spaces.Text(3)}, "action_space=Text.*TransformAction"),
        ("Odd-v0", {"takes": spaces.Sequence(spaces.Discrete(2))}, "action_space=Sequence.*TransformAction"),
        ("Odd-v0", {"takes": spaces.Box(-1, 1, (0,))}, "action_space=Box.*: expected at least one number"),
        ("Odd-v0", {"shows": spaces.Box(0, 255, (9, 9, 3), np.uint8)}, "patch_size=8: expected a divisor .*: 1, 3, 9$"),
        ("Odd-v0", {"colour": 3}, "env_id='Odd-v0'.*colour"),
        ("Odd-v0", {"num_noise": -1}, "num_noise=-1: expected at least 0"),
        ("Odd-v0", {"distribution": "even"}, "distribution='even': expected one of 'gaussian'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(env_id, options, told):
    with pytest.raises(ValueError, match=told) as error:
        gymnasium_envs.GymnasiumGame(env_id, options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("env_id", ["noisy_envs/SimpleCentroit-v0", "CartPole-v99", "nothing"])
def test_unknown_ids_are_told(env_id):
    with pytest.raises(ValueError, match=f"env_id='{env_id}': .*another Gymnasium ID"):
        registration.find(env_id)
    assert registration.find(CARTPOLE) == (registration.OTHER, {})


OWN = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
gymnasium.register("{0}/Pole-v0", CartPoleEnv, max_episode_steps=9)
"""


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Let a test write modules, and forget them afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, "forgotten", None)
        return name

    yield write
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_a_module_in_the_id_is_imported(own_module, ppo, tmp_path):
    env_id = f"{own_module('mine_a', OWN.format('mine_a'))}:mine_a/Pole-v0"
    assert registration.find(env_id) == (registration.OTHER, {}) and registration.short_name(env_id) == "Pole-v0"
    assert parse(ppo, ["--env-id", env_id]).env_id == env_id
    _, run = train_tiny(ppo, tmp_path / "runs", "--env-id", env_id)
    assert run.name.startswith("Pole-v0__ppo_adapool")
    (row,) = main(ppo, ["--evaluate", str(run), "--eval-episodes", "2", "--run-dir", str(tmp_path)])
    assert row["env_id"] == env_id and 0 < row["return"] <= 9


@pytest.mark.parametrize("module", ["noisy_envs", "noisy_envs.registration"])
def test_ours_are_ours_with_a_module_too(module, ppo):
    env_id = "noisy_envs/SimpleTag-1v3v28-v0"
    assert registration.find(f"{module}:{env_id}") == registration.ENVIRONMENTS[env_id]
    args = parse(ppo, ["--env-id", f"{module}:{env_id}"])
    assert (args.env_id, args.preset) == (env_id, "paper-text")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("import no_such", "No module named 'no_such'; mine_b imports it"),
        ("\n1 / 0", r"importing mine_b failed with ZeroDivisionError: division by zero \(.*mine_b.py, line 2\)"),
        ("x = = 1", r"importing mine_b failed with SyntaxError: invalid syntax \(mine_b.py, line 1\)"),
        (OWN.format("mine_b"), "Namespace x not found.* expected an ID that mine_b registers"),
        (None, "No module named 'mine_b'; its folder must be on PYTHONPATH"),
    ],
)
def test_a_module_that_does_not_help_is_told(text, told, own_module, ppo, tmp_path):
    if text is not None:
        own_module("mine_b", text)
    with pytest.raises(ValueError, match=f"env_id='mine_b:x/Pole-v0': .*{told}$"):
        registration.find("mine_b:x/Pole-v0")
    with pytest.raises(SystemExit, match=r"^error: env_id='mine_b:x/Pole-v0': "):
        main(ppo, ["--env-id", "mine_b:x/Pole-v0", "--run-dir", str(tmp_path / "runs")])


def test_drawing_without_a_screen_says_nothing_of_it(tmp_path):
    """What begins with pygame.init, as Gymnasium's own games do, complains of Wayland: it looks like our failure."""
    code = """
from noisy_envs.rendering.playback import make_playback
make_playback("CartPole-v1", {}).render()
"""
    hidden = ("SDL_VIDEODRIVER", "DISPLAY", "WAYLAND_DISPLAY", "XDG_RUNTIME_DIR")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env)
    assert done.stderr == ""


def test_references_are_random_play_and_the_threshold():
    """Random play holds CartPole's pole for some 22 steps, by every account."""
    found = gymnasium_envs.GymnasiumGame(CARTPOLE).baselines
    assert found == gymnasium_envs.GymnasiumGame(CARTPOLE, {"num_noise": 3}).baselines  # noise changes no return
    assert 19 < found.random < 26 and found.oracle == 475
    assert all(map(math.isnan, gymnasium_envs.GymnasiumGame("Odd-v0").baselines))


class Endless(Odd):
    """Never ends, and pays nothing."""

    def step(self, action):
        return *super().step(action)[:1], 0.0, False, False, {}


class Broken(Odd):
    def __init__(self, render_mode=None):
        raise KeyError("9x9")


@pytest.fixture
def rough(monkeypatch):
    monkeypatch.setattr(gymnasium.envs.registration, "registry", dict(gymnasium.registry))
    gymnasium.register("Endless-v0", Endless, reward_threshold=0.0)
    gymnasium.register("Broken-v0", Broken)
    monkeypatch.setattr(gymnasium_envs, "MAX_EPISODE_STEPS", 40)


def test_what_never_ends_is_cut_and_a_threshold_that_random_play_reaches_gives_no_score(ppo, rough, tmp_path):
    summary, _ = train_tiny(ppo, tmp_path, "--env-id", "Endless-v0", "--preset", "fast")
    assert summary["return"] == 0 and math.isnan(summary["score"])
    game = gymnasium_envs.GymnasiumGame("Endless-v0", {"max_episode_steps": 7})
    assert (
        game.make().spec.max_episode_steps == 7
        and gymnasium_envs.GymnasiumGame(CARTPOLE).make().spec.max_episode_steps == 500
    )


@pytest.mark.parametrize(
    ("env_id", "options", "last"),
    [
        ("Endless-v0", {}, 40),
        ("Endless-v0", {"max_episode_steps": -1}, 40),
        ("Endless-v0", {"max_episode_steps": None}, 40),
        ("Unlimited-v0", {}, 40),
        ("Unlimited-v0", {"max_episode_steps": 7}, 7),
        ("Pendulum-v1", {"max_episode_steps": -1}, 40),
        ("Pendulum-v1", {"max_episode_steps": None}, 200),
        ("Odd-v0", {"max_episode_steps": -1}, 3),
    ],
)
def test_without_a_time_limit_an_episode_ends_all_the_same(rough, drawn, env_id, options, last):
    """Where the id or the option has -1, which Gymnasium takes for no limit, evaluation and film never ended."""
    gymnasium.register("Unlimited-v0", Endless, max_episode_steps=-1, reward_threshold=0.0)
    game = gymnasium_envs.GymnasiumGame(env_id, options)
    envs, playback = gymnasium_envs.GymnasiumVectorEnv(game, 2), make_playback(env_id, options)
    envs.reset(seed=0)
    actions = torch.zeros(envs.action_space.shape, dtype=torch.int64)
    for clock in range(1, last + 1):
        _, _, terminated, truncated, _ = envs.step(actions)
        playback.step(actions[:1].numpy())
        assert (terminated | truncated).tolist() == [clock == last] * 2 and playback.done == (clock == last)
    if game.spec.reward_threshold is not None:
        assert game.baselines.random == 0


@pytest.mark.parametrize("limit", [0, -2, 1.5, "long", True])
@pytest.mark.parametrize("env_id", ["Pendulum-v1", "Endless-v0"])
def test_a_time_limit_that_is_none_is_told(rough, env_id, limit):
    with pytest.raises(ValueError, match=rf"(^|: )max_episode_steps={limit!r}: expected (an integer|at least 1)$"):
        gymnasium_envs.GymnasiumGame(env_id, {"max_episode_steps": limit})


class Loose(gymnasium.Env):
    """Counts to five and is cut; overwrites what it has shown, all worlds in one buffer, and pays in arrays."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  as Gymnasium has it
    buffers = {"array": np.zeros(1, np.float32), "dict": {"x": np.zeros(1, np.float32)}}  # noqa: RUF012  on purpose
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode=None, shows="array", pays=float, ends=lambda x: x):
        self.shown, self.pays, self.ends, self.render_mode = self.buffers[shows], pays, ends, render_mode
        box = spaces.Box(0, 99, (1,), np.float32)
        self.observation_space = box if shows == "array" else spaces.Dict(x=box)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start = self.clock = 0 if seed is None else seed
        return self.seen(), {}

    def step(self, action):
        self.clock += 1
        return self.seen(), self.pays(self.clock), self.ends(False), self.ends(self.clock - self.start == 5), {}

    def seen(self):
        (self.shown if isinstance(self.shown, np.ndarray) else self.shown["x"])[:] = self.clock
        return self.shown


@pytest.fixture
def loose(rough):
    gymnasium.register("Loose-v0", Loose, disable_env_checker=True)  # which warns, with reason


@pytest.mark.parametrize(
    "options",
    [
        {"shows": "array"},
        {"shows": "dict"},
        {"pays": lambda clock: np.array([clock])},
        {"pays": lambda clock: np.float32([[clock]])},
        {"pays": lambda clock: [clock]},
        {"pays": torch.tensor},
        {"ends": lambda x: np.array([x])},
        {"ends": int},
    ],
    ids=["array", "dict", "(1,)", "(1, 1)", "list", "tensor", "ends", "whole"],
)
def test_what_an_environment_overwrites_or_pays_in_arrays_trains_rightly(loose, options):
    """Truncated worlds bootstrapped from the first state of the next episode, and rewards of one axis failed."""
    game = gymnasium_envs.GymnasiumGame("Loose-v0", options)
    envs = gymnasium_envs.GymnasiumVectorEnv(game, 2)
    tokens, _ = envs.reset(seed=10)
    assert tokens[:, 1, 0].tolist() == [10, 11]
    worlds = envs.batch_state
    for clock in range(1, 6):
        worlds, outcome = envs.pure_step(worlds, torch.zeros(2, dtype=torch.int64))
        assert outcome.final_tokens[:, 1, 0].tolist() == [10 + clock, 11 + clock] == outcome.reward.tolist()
        assert outcome.truncated.tolist() == [clock == 5] * 2 and not outcome.terminated.any()
    assert outcome.tokens[:, 1, 0].tolist() == [0, 0]
    playback = make_playback(game.env_id, game.options, seed=10)
    playback.step(np.zeros(1, np.int64))
    assert playback.total_return == 11 and playback.tokens[0, 1, 0] == 11


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"pays": lambda clock: np.zeros(2)},
            r"Loose-v0: step returned reward=array\(\[0., 0.\]\): expected one float",
        ),
        ({"pays": lambda clock: np.zeros((40, 3))}, "Loose-v0: step returned reward=array"),
        ({"pays": lambda clock: None}, "reward=None: expected one float"),
        ({"pays": lambda clock: "much"}, "reward='much': expected one float"),
        ({"ends": lambda x: None}, "terminated=None: expected one bool"),
    ],
)
def test_a_reward_that_is_no_number_is_told(loose, options, told):
    game = gymnasium_envs.GymnasiumGame("Loose-v0", options)
    envs, playback = gymnasium_envs.GymnasiumVectorEnv(game, 2), make_playback("Loose-v0", options, seed=10)
    envs.reset(seed=10)
    for play in (
        lambda: envs.step(torch.zeros(2, dtype=torch.int64)),
        lambda: playback.step(np.zeros(1, np.int64)),
    ):
        with pytest.raises(gymnasium_envs.InvalidStep, match=told) as error:
            play()
        assert "\n" not in str(error.value)


def test_training_says_in_one_line_what_is_no_reward(ppo, loose, tmp_path, monkeypatch):
    monkeypatch.setattr(Loose.__init__, "__defaults__", (None, "array", lambda clock: np.zeros(2), bool))
    with pytest.raises(SystemExit, match=r"^error: Loose-v0: step returned reward=array.*expected one float$"):
        train_tiny(ppo, tmp_path, "--env-id", "Loose-v0")


ROLES = {"query": 0, "speed": 1, "angle[0]": 2, "noise": 3}
SPEC = TokenSpec(5, ("value", "role"), ROLES)


def draw_bars(weights, roles, width=600, spec=SPEC):
    """Draw bars under a picture, for tokens of these roles."""
    tokens = np.stack([np.zeros(len(roles)), roles], axis=1)
    signal = np.isin(roles, [0, 1, 2]) if spec.roles else np.arange(len(roles)) < 2
    return token_bars.add_bars(np.full((60, width, 3), 7, np.uint8), weights, signal, tokens, spec, "weight")


def spans(strip, color):
    """Return where along a strip's floor bars of a colour stand, and how high: (left, right, height) of each."""
    height = (strip == color).all(axis=2)[token_bars.ROW : token_bars.HEIGHT - token_bars.ROW].sum(axis=0)
    edges = np.flatnonzero(np.diff(height)) + 1
    parts = np.split(np.arange(len(height)), edges)
    return [(part[0], part[-1], height[part[0]]) for part in parts if height[part[0]]]


def test_a_picture_gets_bars_as_high_as_the_weights_features_first_and_in_order():
    weights, roles = np.array([0.1, 0.2, 0.4, 0.1, 0.2]), np.array([0, 3, 2, 1, 3])
    drawn = draw_bars(weights, roles)
    assert drawn.shape == (60 + token_bars.HEIGHT, 600, 3) and (drawn[:60] == 7).all()
    strip, full = drawn[60:], token_bars.HEIGHT - 2 * token_bars.ROW
    assert [height for *_, height in spans(strip, token_bars.SIGNAL)] == [full // 4, full // 4, full]
    assert [height for *_, height in spans(strip, token_bars.NOISE)] == [full // 2, full // 2]
    assert spans(strip, token_bars.SIGNAL)[-1][1] < spans(strip, token_bars.NOISE)[0][0]
    order = np.array([0, 2, 1, 4, 3])  # where tokens are shuffled, bars do not move
    np.testing.assert_array_equal(strip, draw_bars(weights[order], roles[order])[60:])


def test_bars_are_named_and_explained_and_a_strip_is_always_there():
    weights, roles = np.array([0.1, 0.2, 0.4, 0.1, 0.2]), np.array([0, 1, 2, 3, 3])
    strip = draw_bars(weights, roles)[60:]
    dark = (strip.max(axis=2) < 100) & ~(strip == token_bars.SIGNAL).all(axis=2)
    below = dark[token_bars.HEIGHT - token_bars.ROW :]
    for left, right, _ in spans(strip, token_bars.SIGNAL):  # a name in the middle below each
        assert below[:, (left + right) // 2 - 8 : (left + right) // 2 + 9].any()
    assert dark[: token_bars.ROW, :200].any() and dark[: token_bars.ROW, 300:].any()
    renamed = TokenSpec(5, ("value", "role"), {"query": 0, "mass": 1, "angle[0]": 2, "noise": 3})
    other = draw_bars(weights, roles, spec=renamed)[60:]
    changed = np.flatnonzero((strip != other).any(axis=(0, 2)))
    left, right, _ = spans(strip, token_bars.SIGNAL)[1]
    assert len(changed) and left <= changed[0] and changed[-1] <= right
    blank = draw_bars(None, roles)[60:]
    assert blank.shape == strip.shape and (blank == 255).all()


def test_bars_of_padding_of_no_weight_of_no_roles_and_of_small_pictures():
    weights, roles = np.array([0.0, 0.5, 0.5, 0, 0]), np.array([0, 1, 3, -1, -1])
    strip = draw_bars(weights, roles)[60:]
    assert len(spans(strip, token_bars.NOISE)) == 1  # padding has none
    assert (draw_bars(np.zeros(5), roles)[60:] != 255).any()
    plain = draw_bars(weights, roles, spec=TokenSpec(5, ("x", "y"), {}, padded=False))[60:]
    assert len(spans(plain, token_bars.SIGNAL)) == 2 and len(spans(plain, token_bars.NOISE)) == 3
    narrow = draw_bars(weights, roles, width=80)
    assert narrow.shape == (60 + token_bars.HEIGHT - 2 * token_bars.ROW, 80, 3) and (narrow[60:] != 255).any()


# the agents


@pytest.mark.parametrize("head", HEADS)
def test_each_head_plays_with_each_kind_of_action(head, tmp_path):
    agent = load_agent(head)
    for words in (WORDS, ["--env-id", "Pendulum-v1"]):
        summary, _ = train_tiny(agent, tmp_path / words[1], *words)
        assert np.isfinite(summary["return"])


TAKEN = {
    "no axis": spaces.Box(-1, 1, ()),
    "one": spaces.Box(-1, 1, (1,)),
    "two axes": spaces.Box(-1, 1, (2, 3)),
    "integers": spaces.Box(-1, 1, (2,), np.int32),
    "one integer": spaces.Box(0, 3, (), np.uint8),
    "flags": spaces.Box(0, 1, (2,), np.bool_),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,)),
    "half-bounded": spaces.Box(2, np.inf, (1,), np.float64),
    "discrete": spaces.Discrete(3, start=-2),
    "only one": spaces.Discrete(1),
}


@pytest.mark.parametrize("space", TAKEN.values(), ids=list(TAKEN))
def test_each_box_and_discrete_space_is_trained_on_and_played(ppo, drawn, space):
    """The environment asserts that its space contains what it gets; a Box without an axis was an IndexError."""
    game = gymnasium_envs.GymnasiumGame("Odd-v0", {"takes": space, "num_noise": 1})
    envs = gymnasium_envs.GymnasiumVectorEnv(game, 4)
    tokens, _ = envs.reset(seed=0)
    agent = ppo.Agent(ppo.Args(), envs.token_spec, envs.single_action_space)
    parameters, _ = agent(tokens)
    actions = agent.distribution.sample(
        parameters, agent.distribution.noise((4,), "cpu", torch.Generator().manual_seed(0))
    )
    assert tuple(actions.shape) == envs.action_space.shape
    _, outcome = envs.pure_step(envs.batch_state, actions)
    assert outcome.reward.shape == (4,)
    make_playback(game.env_id, game.options).step(agent.distribution.mode(parameters)[:1].detach().numpy())


@pytest.mark.parametrize("space", TAKEN.values(), ids=list(TAKEN))
def test_random_play_takes_what_the_space_draws(drawn, space):
    """Playback converts an agent's actions to the space; the conversion of a drawn action must give it back."""
    taken = []
    playback = make_playback("Odd-v0", {"takes": space})
    playback._env.unwrapped.step = lambda action: (
        taken.append(action) or (np.zeros(3, np.float32), 0.0, False, False, {})
    )
    for seed in range(20):
        playback.step(playback.baseline_actions("random", np.random.default_rng(seed)))
        space.seed(int(np.random.default_rng(seed).integers(2**31)))
        np.testing.assert_allclose(taken[-1], space.sample(), rtol=1e-6)


def test_an_action_without_an_axis_trains(ppo, tmp_path, monkeypatch):
    monkeypatch.setattr(Odd.__init__, "__defaults__", (None, None, TAKEN["no axis"]))
    summary, _ = train_tiny(ppo, tmp_path, "--env-id", "Odd-v0")
    assert math.isfinite(summary["return"])


def test_a_run_goes_on_with_new_episodes(ppo, trained, tmp_path):
    args = parse(ppo, [*WORDS, "--num-envs", "4", "--num-steps", "16", "--minibatch-size", "32", "--no-anneal-lr",
                      "--total-timesteps", "128", "--run-dir", str(tmp_path)])  # fmt: skip
    begun, states = [], []

    class OneUpdate(Run):
        """Stops after an update, which is saved the first time."""

        def begin(self, *words):
            state, kl_coef = super().begin(*words)
            begun.append((self.step, state))
            return state, kl_coef

        def checkpoint(self, agent, optimizer, generator, state, kl_coef):
            if not states:
                super().checkpoint(agent, optimizer, generator, state, kl_coef)
            states.append((state.tokens, {name: x.clone() for name, x in agent.state_dict().items()}))
            self.stopped = True

    def train(args):
        run = OneUpdate(ppo, args)
        with pytest.raises(KeyboardInterrupt):
            ppo.train(run.local_args, run)
        run.close()
        return run.folder

    folder = train(args)
    for _ in range(2):
        train(parse(ppo, ["--resume", str(folder)]))
        step, state = begun[-1]
        assert step == 64 and not state.episode_return.any()
    first, one, other = states
    assert torch.equal(one[0], other[0]) and not torch.equal(one[0], first[0])
    assert all(torch.equal(a, b) for a, b in zip(one[1].values(), other[1].values(), strict=True))


def test_an_evaluation_at_other_noise_with_a_film(ppo, trained, tmp_path, capsys):
    film = tmp_path / "episode.gif"
    rows = main(ppo, ["--evaluate", str(trained), "--num-noise", "0", "9", "--eval-episodes", "3",
                     "--run-dir", str(tmp_path), "--record", str(film)])  # fmt: skip
    assert [row["evaluated"] for row in rows] == [0, 9]
    assert "0 random, 1 solved" in capsys.readouterr().out
    from PIL import Image

    with Image.open(film) as images:
        assert images.size == (600, 400 + token_bars.HEIGHT) and images.n_frames > 5


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--env-id", "CartPole-v7"], "env_id='CartPole-v7'"),
        ([*WORDS, "--preset", "paper"], "preset='paper': expected 'fast' for CartPole-v1"),
        (["--env-id", CARTPOLE, "--learners", "all"], "learners='all': expected one of first in CartPole-v1"),
        (["--env-id", CARTPOLE, "--env-kwargs", "wind=3"], "wind"),
        (["--env-id", "Odd-v0", "--env-kwargs", "num_noise=x"], "num_noise='x'"),
        (["--env-id", "Broken-v0"], "env_id='Broken-v0': KeyError: '9x9'"),
        ([*WORDS, "--env-kwargs", "num_noise=9"], "num_noise=4: num_noise is in env_kwargs too"),
        ([*WORDS[:2], "--env-kwargs", "num_noise=9", "num_noise=2"], "'num_noise=2': num_noise is given twice"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(ppo, rough, words, told, tmp_path):
    with pytest.raises(SystemExit) as stop:
        main(ppo, [*words, "--run-dir", str(tmp_path)])
    assert str(stop.value).startswith("error: ") and told in str(stop.value) and "\n" not in str(stop.value)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_drawn_is_not(ppo, trained, tmp_path):
    words = [word for word in WORDS if word != CARTPOLE]
    _, folder = train_tiny(ppo, tmp_path, words[0], "Odd-v0", *words[1:], "--capture-video")
    assert (folder / "summary.json").is_file() and not (folder / "episode.gif").exists()
    with pytest.raises(SystemExit, match=r"record='x\.gif': Odd-v0 cannot be drawn"):
        main(ppo, ["--evaluate", str(folder), "--record", "x.gif"])
    with pytest.raises(SystemExit, match="was trained on another game"):
        main(ppo, ["--evaluate", str(folder), "--env-id", CARTPOLE])
