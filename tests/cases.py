"""The cases that tests are parametrised over: what belongs to each game, and lists and decorators made of it.

A new game adds one entry to `CASES`.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from itertools import product
from typing import Any

import pytest

from noisy_envs import ENVIRONMENTS
from noisy_envs.games.simple_tag import MPE
from noisy_envs.registration import GAMES


def steer(tokens: Any, u: Any) -> Any:
    """Act on what the agent sees alone: tokens (B, N, D), u (B, 5) -> (B, 5)."""
    return abs(tokens[:, -1, :5]) + 0 * u


def hunt(tokens: Any, u: Any) -> Any:
    """Run along x towards the last entity that the agent sees, or rest: tokens (B, N, D), u (B,) -> int64 (B,)."""
    return (u < 0.8) * (1 + 1 * (tokens[:, -1, 0] > 0))


def dodge(tokens: Any, u: Any) -> Any:
    """Run along y away from it, or rest."""
    return (u < 0.9) * (3 + 1 * (tokens[:, -1, 1] < 0))


@dataclasses.dataclass(frozen=True)
class GameCase:
    """What the tests know of a game."""

    options: dict[str, dict[str, Any]]
    """Option sets that between them reach every branch of an interface."""
    typical: str
    """The option set that runs by default where one of each game must do: with padding and other agents, if any."""
    first_team: str = "all"
    """The team whose only agent is the first …"""
    first_alone: dict[str, Any] = dataclasses.field(default_factory=dict)
    """… with these options."""
    one_agent: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options that give the parallel environment one agent."""
    three_agents: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options that give the game three agents."""
    policy_options: dict[str, str] = dataclasses.field(default_factory=dict)
    """The option that sets the policy of an agent that is not controlled, by what the agent's name begins with."""
    varied_reward: Callable[[Any, Any, Any], Any] | None = None
    """For a game whose rewards are mostly 0: what differs between environments and steps, (B, n) ≥ 0."""

    def follow(self, policy: Any) -> dict[str, Any]:
        """Return the options with which all agents that are not controlled follow a policy."""
        return dict.fromkeys(self.policy_options.values(), policy)


CASES = {
    "simple_centroid": GameCase(
        options={
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
        typical="ranges",
        first_alone={"num_agents": 1},
        three_agents={"num_agents": 3},
        policy_options={"agent": "other_policy"},
    ),
    "simple_tag": GameCase(
        options={
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
        typical="ranges",
        first_team="predators",
        first_alone={"num_predators": 1},
        one_agent={"num_prey": 1, "learners": "prey"},
        three_agents={"num_predators": 2, "num_prey": 1},
        policy_options={"predator": "predator_policy", "prey": "prey_policy"},
        varied_reward=lambda game, state, agents: abs(game.observe(state, agents)[..., -1, 0]),
    ),
    "box_world": GameCase(
        options={
            "defaults": {},
            "pixels": {"observation": "pixels", "size": (5, 6), "num_distractors": (0, 1), "step_cost": 0.01},
            "rgb": {"observation": "rgb", "size": (5, 6), "num_distractors": (0, 1)},
            "decoys": {"num_noise": (0, 5), "noise_role": "signal"},
            "clutter": {"observation": "pixels", "num_noise": (0, 9), "noise_role": "signal", "noise_motion": "wander"},
            "chains": {
                "size": 8,
                "goal_length": (2, 4),
                "num_distractors": (0, 2),
                "distractor_length": (1, 2),
                "blocked_cost": 0.1,
            },
        },
        typical="chains",
        varied_reward=lambda game, state, agents: state.objects[:, :1, 0] / 64,
    ),
}

HEADS = ("adapool", "avgpool", "clstoken", "maxpool")
IDS = list(ENVIRONMENTS)
GAME_IDS = {game: env_id for env_id, (game, _) in reversed(ENVIRONMENTS.items())}  # each game by its first id
PETTINGZOO = [game for game in GAME_IDS if find_spec(f"noisy_envs.{game}_v0")]
OPTION_SETS = [
    pytest.param(GAME_IDS[game], options, id=f"{game}-{name}")
    for game in GAME_IDS
    for name, options in CASES[game].options.items()
]
TEAMS = [
    pytest.param(GAME_IDS[game], options, team, id=f"{game}-{name}-{team}")
    for game in GAME_IDS
    for name, options in CASES[game].options.items()
    for team in GAMES[game](**options).teams
]
CONTROLS = [
    (env_id, {"continuous_actions": continuous} if choice else {})
    for game, env_id in GAME_IDS.items()
    for choice in ["continuous_actions" in [field.name for field in dataclasses.fields(GAMES[game])]]
    for continuous in ((True, False) if choice else (False,))
]

posix = pytest.mark.skipif(os.name != "posix", reason="Windows has neither these signals nor these files")
each_id = pytest.mark.parametrize("env_id", IDS)
each_game = pytest.mark.parametrize("env_id", GAME_IDS.values(), ids=list(GAME_IDS))
each_case = pytest.mark.parametrize(("env_id", "options"), OPTION_SETS)
each_team = pytest.mark.parametrize(("env_id", "options", "team"), TEAMS)
each_control = pytest.mark.parametrize(("env_id", "options"), CONTROLS)
# of games in which agents can follow a policy
each_policed_control = pytest.mark.parametrize(
    ("env_id", "options"), [control for control in CONTROLS if CASES[ENVIRONMENTS[control[0]][0]].policy_options]
)
each_pettingzoo = pytest.mark.parametrize("game", PETTINGZOO)


def slow(*values: Any, **more: Any) -> Any:
    """Mark values of a parametrisation as slow: `make test` leaves them out."""
    return pytest.param(*values, marks=pytest.mark.slow, **more)


def by_default(names: tuple[str, ...], default: list[Any], every: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise over `default`, and in slow runs over what else is in `every`."""
    return pytest.mark.parametrize(names, [*default, *(slow(*values) for values in every if values not in default)])


def crossed(cases: list[Any], values: Iterable[Any], default: Callable[[Any, Any], bool]) -> list[Any]:
    """Return each case with each value, those as slow for which `default(case, value)` is False."""
    return [
        (pytest.param if default(case, value) else slow)(
            *case.values, value, id=f"{case.id}-{getattr(value, 'name', value)}"
        )
        for case, value in product(cases, values)
    ]


def each_case_and(name: str, values: Iterable[Any], cases: list[Any] = OPTION_SETS) -> pytest.MarkDecorator:
    """Parametrise over option sets (or `TEAMS` of them) and one more parameter.

    By default each option set meets the first value, and the typical option set of each game meets all values. In slow
    runs each option set meets all values.
    """
    first, *_ = values = list(values)
    typical = [game.options[game.typical] for game in CASES.values()]
    params = crossed(cases, values, lambda case, value: value == first or case.values[1] in typical)
    return pytest.mark.parametrize((*("env_id", "options", "team")[: len(cases[0].values)], name), params)
