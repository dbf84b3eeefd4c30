"""What the tests share: cases over the registry, fixtures, and helpers that play and compare."""

import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from noisy_envs import ENVIRONMENTS
from noisy_envs.arrays import as_numpy
from noisy_envs.games.simple_tag import MPE
from noisy_envs.registration import CORES

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read as torch is imported: tests run side by side, one for each core
ROOT = Path(__file__).parents[1]
HEADS = ("adapool", "avgpool", "clstoken", "maxpool")
IDS = list(ENVIRONMENTS)
GAMES = {game: env_id for env_id, (game, _) in reversed(ENVIRONMENTS.items())}  # each game by its first id


def steer(tokens: Any, u: Any) -> Any:
    """Act on what the agent sees alone: tokens (B, N, D), u (B, 5) -> (B, 5)."""
    return abs(tokens[:, -1, :5]) + 0 * u


def hunt(tokens: Any, u: Any) -> Any:
    """Run along x towards the last that the agent sees, or rest: tokens (B, N, D), u (B,) -> int64 (B,)."""
    return (u < 0.8) * (1 + 1 * (tokens[:, -1, 0] > 0))


def dodge(tokens: Any, u: Any) -> Any:
    """Run along y away from it, or rest."""
    return (u < 0.9) * (3 + 1 * (tokens[:, -1, 1] < 0))


# For each game option sets that between them reach every branch of a shell; a new game must add its own.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "simple_centroid": {
        "defaults": {},
        "ranges": {"num_agents": 2, "num_signal": (1, 3), "num_noise": (0, 5), "other_policy": "oracle"},
        "function": {"num_agents": 3, "num_signal": (1, 12), "other_policy": steer},
        "discrete": {
            "continuous_actions": False,
            "num_agents": 2,
            "spread": 0.3,
            **dict.fromkeys(("collidable_agents", "collidable_signal", "collidable_noise"), True),
        },
    },
    "simple_tag": {
        "defaults": {},
        "ranges": {"num_predators": 2, "num_obstacles": (0, 6), "predator_policy": "chase", "prey_policy": "flee"},
        "functions": {"num_predators": 2, "num_prey": 2, "predator_policy": hunt, "prey_policy": dodge},
        "mpe": {option: value for option, value in MPE.items() if option != "max_steps"},  # tests set their own
        "crowded": {
            "continuous_actions": True,
            "num_predators": 2,
            "num_obstacles": 12,
            "collidable_obstacles": True,
            "reward_sharing": "shared",
        },
    },
    "box_world": {
        "defaults": {},
        "pixels": {"observation": "pixels", "size": (5, 6), "num_distractors": (0, 1), "step_cost": 0.01},
        "rgb": {"observation": "rgb", "size": (5, 6), "num_distractors": (0, 1)},
        "chains": {
            "size": 8,
            "goal_length": (2, 4),
            "num_distractors": (0, 2),
            "distractor_length": (1, 2),
            "blocked_cost": 0.1,
        },
    },
}
# options that give a game of PettingZoo one and three agents that are driven; the second are options of the game alone
ONE_AND_THREE: dict[str, list[dict[str, Any]]] = {
    "simple_centroid": [{}, {"num_agents": 3}],
    "simple_tag": [{"num_prey": 1, "learners": "prey"}, {"num_predators": 2, "num_prey": 1}],
}
# the team, and options with which the first agent is all of it
FIRST_TEAM: dict[str, tuple[str, dict[str, Any]]] = {
    "simple_centroid": ("all", {"num_agents": 1}),
    "simple_tag": ("predators", {"num_predators": 1}),
    "box_world": ("all", {}),
}
# the option that says what an undriven agent does, by what its name begins with
POLICY_OF: dict[str, dict[str, str]] = {
    "simple_centroid": {"agent": "other_policy"},
    "simple_tag": {"predator": "predator_policy", "prey": "prey_policy"},
}
# options by which all agents that are not driven follow a policy
FOLLOW: dict[str, Callable[[Any], dict[str, Any]]] = {
    game: partial(dict.fromkeys, list(options.values())) for game, options in POLICY_OF.items()
}
# games whose rewards are mostly 0, and what differs from world to world and step to step, (B, n)
SPARSE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "simple_tag": lambda core, state, agents: abs(core.observe(state, agents)[..., -1, 0]),
    "box_world": lambda core, state, agents: state.thing[:, :1, 0] / 64,
}

CASES = [(GAMES[game], options) for game in GAMES for options in VARIANTS[game].values()]
CASE_NAMES = [f"{game}-{name}" for game in GAMES for name in VARIANTS[game]]
CONTROLS = [
    (env_id, {"continuous_actions": continuous} if choice else {})
    for game, env_id in GAMES.items()
    for choice in ["continuous_actions" in [field.name for field in dataclasses.fields(CORES[game])]]
    for continuous in ((True, False) if choice else (False,))
]
TEAM_CASES = [
    pytest.param(GAMES[game], options, team, id=f"{game}-{name}-{team}")
    for game in GAMES
    for name, options in VARIANTS[game].items()
    for team in CORES[game](**options).teams
]
PETTINGZOO = [game for game in GAMES if find_spec(f"noisy_envs.{game}_v0")]

posix = pytest.mark.skipif(os.name != "posix", reason="Windows has neither these signals nor these files")
each_id = pytest.mark.parametrize("env_id", IDS)
each_game = pytest.mark.parametrize("env_id", GAMES.values(), ids=list(GAMES))
each_case = pytest.mark.parametrize(("env_id", "options"), CASES, ids=CASE_NAMES)
each_team = pytest.mark.parametrize(("env_id", "options", "team"), TEAM_CASES)


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what `in_turn` leaves to slow runs: each case of a test keeps one of its values."""
    cases: dict[Any, dict[str, dict[str, list[pytest.Item]]]] = {}
    for item in items:
        for marker in item.iter_markers("in_turn"):
            rest = dict(item.callspec.params)
            value = repr([rest.pop(name) for name in marker.args])
            cases.setdefault(item.function, {}).setdefault(repr(rest), {}).setdefault(value, []).append(item)
    for of_function in cases.values():
        for i, of_case in enumerate(of_function.values()):
            turn = i + i // len(of_case)  # or a value might always meet the same one of another parameter
            for j, of_value in enumerate(of_case.values()):
                for item in of_value:
                    if j != turn % len(of_case):
                        item.add_marker(pytest.mark.slow)


def each_head_and(name: str, values: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrise over heads and what `name` can be: each of both in each run of the tests, all pairs in slow ones."""
    values = list(values)
    turns = max(len(HEADS), len(values))
    quick = {(HEADS[i % len(HEADS)], values[i % len(values)]) for i in range(turns)}
    pairs = [pytest.param(*pair, marks=() if pair in quick else pytest.mark.slow) for pair in product(HEADS, values)]
    return pytest.mark.parametrize(("head", name), pairs)


each_control = pytest.mark.parametrize(("env_id", "options"), CONTROLS)
# of games in which agents can follow a policy
each_policed_control = pytest.mark.parametrize(
    ("env_id", "options"), [control for control in CONTROLS if ENVIRONMENTS[control[0]][0] in POLICY_OF]
)
each_pettingzoo = pytest.mark.parametrize("game", PETTINGZOO)


@pytest.fixture(params=["numpy", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend of the vector environments."""
    if request.param == "torch":
        pytest.importorskip("torch")
    return request.param


@pytest.fixture
def dummy_display(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let human mode open its window where there is no display."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


@pytest.fixture
def dense_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let sparse games pay also for where the agent is, never 0, so that a lost or exchanged reward shows."""
    for game, varied in SPARSE.items():

        def reward(
            self: Any, state: Any, agents: slice = slice(None), sparse: Any = CORES[game].reward, varied: Any = varied
        ) -> Any:
            return sparse(self, state, agents) - 0.5 - varied(self, state, agents)

        monkeypatch.setattr(CORES[game], "reward", reward)


def with_path(*folders: Path) -> dict[str, str]:
    """Return the environment of a process that looks for modules in these folders first."""
    known = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), *([known] if known else [])])}


def make(env_id: str, **options: Any) -> gymnasium.Env:
    """Make a single environment without wrappers."""
    return gymnasium.make(env_id, **options).unwrapped


def module(game: str) -> Any:
    """Import the PettingZoo module of a game."""
    return importlib.import_module(f"noisy_envs.{game}_v0")


def load_agent(head: str) -> Any:
    """Import the agent of a head, which is in no package, under its file's name."""
    name = f"ppo_{head}"
    spec = importlib.util.spec_from_file_location(name, ROOT / "agents" / f"{name}.py")
    agent = importlib.util.module_from_spec(spec)
    sys.modules[name] = agent  # where dataclasses look up its annotations
    spec.loader.exec_module(agent)
    return agent


def load_supervised(name: str) -> Any:
    """Import a module of supervised/, which is no package: it and the siblings it imports go by their files' names."""
    folder = str(ROOT / "supervised")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


TINY = ["--num-envs", "4", "--num-steps", "16", "--minibatch-size", "32", "--update-epochs", "1"]
TINY += ["--no-anneal-lr", "--eval-episodes", "3", "--no-capture-video"]


def train_tiny(agent: Any, folder: Path, *words: str) -> tuple[dict[str, Any], Path]:
    """Train for two updates or as long as asked, in a new folder: the run's summary and folder."""
    from noisy_envs.training.main import main

    length = [] if "--total-timesteps" in words else ["--total-timesteps", "128"]
    summary = main(agent, [*TINY, *length, "--run-dir", str(folder), *words])
    (run,) = folder.iterdir()
    return summary, run


def draw_actions(space: gymnasium.Space, count: int, seed: int = 0) -> list[Any]:
    """Sample actions; the space's own generator is left as it was new."""
    space.seed(seed)
    return [space.sample() for _ in range(count)]


def still(space: gymnasium.Space) -> Any:
    """Return the action of zeros."""
    return space.sample() * 0


def to_backend(array: np.ndarray, backend: str) -> Any:
    """Return an array as the backend's."""
    if backend == "numpy":
        return array
    import torch

    return torch.from_numpy(np.array(array))


def play(env: Any, actions: list[Any], **reset: Any) -> list[Any]:
    """Reset (if keywords are given) and step a single or a vector environment: all that it returned.

    A single environment is reset, without seed, when its episode ends.
    """
    seen: list[Any] = [env.reset(**reset)] if reset else []
    for action in actions:
        seen.append(env.step(action))
        if not isinstance(env, gymnasium.vector.VectorEnv) and (seen[-1][2] or seen[-1][3]):
            seen.append(env.reset())
    return seen


def play_parallel(env: Any, actions: list[Any], **reset: Any) -> list[Any]:
    """Do the same with PettingZoo's parallel view: `actions` are dictionaries."""
    seen: list[Any] = [env.reset(**reset)] if reset else []
    for action in actions:
        seen.append(env.step(action))
        if not env.agents:
            seen.append(env.reset())
    return seen


def assert_same(a: Any, b: Any, where: str = "result") -> None:
    """Demand equality to the bit, in nested containers too: types, keys, dtypes, shapes and values."""
    assert type(a) is type(b), f"{where}: {type(a)} and {type(b)}"
    if isinstance(a, dict):
        assert a.keys() == b.keys(), f"{where}: keys {sorted(a)} and {sorted(b)}"
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), f"{where}: lengths {len(a)} and {len(b)}"
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif type(a).__module__ in ("numpy", "torch"):
        assert a.dtype == b.dtype, f"{where}: {a.dtype} and {b.dtype}"
        a, b = as_numpy(a), as_numpy(b)
        assert a.shape == b.shape, f"{where}: shapes {a.shape} and {b.shape}"
        if a.dtype == object:
            assert_same(a.tolist(), b.tolist(), where)
        else:
            np.testing.assert_array_equal(a, b, err_msg=where)
    else:
        assert a == b, f"{where}: {a} and {b}"
