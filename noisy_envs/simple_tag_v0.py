"""Simple tag for PettingZoo: `parallel_env(...)` and, by PettingZoo's conversion, the AEC `env(...)`.

For the game and its options see `noisy_envs.games.simple_tag.SimpleTag`. Agents are named `predator_0`,
`predator_1`, …, `prey_0`, `prey_1`, …
"""

from __future__ import annotations

from typing import Any

from pettingzoo import AECEnv
from pettingzoo.utils import parallel_to_aec, wrappers

from noisy_envs.games.simple_tag import MPE
from noisy_envs.interfaces.pettingzoo_env import ParallelTokenEnv


def parallel_env(
    render_mode: str | None = None, learners: str = "all", mpe: bool = False, **options: Any
) -> ParallelTokenEnv:
    """Make the parallel environment.

    Args:
        render_mode: None, "human" or "rgb_array".
        learners: the controlled agents, "all", "predators", "prey" or the "first" predator; the others follow
            `predator_policy` or `prey_policy`.
        mpe: use the options of MPE2's simple_tag_v3 (`noisy_envs.games.simple_tag.MPE`) as defaults.
        options: of the game.
    """
    return ParallelTokenEnv("simple_tag", render_mode, learners, **{**(MPE if mpe else {}), **options})


def env(
    render_mode: str | None = None, learners: str = "all", mpe: bool = False, **options: Any
) -> AECEnv[str, Any, Any]:
    """Make the AEC environment, in which agents act in turn; see `parallel_env`."""
    return wrappers.OrderEnforcingWrapper(parallel_to_aec(parallel_env(render_mode, learners, mpe, **options)))
