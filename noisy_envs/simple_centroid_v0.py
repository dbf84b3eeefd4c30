"""Simple centroid for PettingZoo: `parallel_env(...)` and, by PettingZoo's conversion, the AEC `env(...)`.

For the game and its options see `noisy_envs.games.simple_centroid.SimpleCentroid`. Agents are named
`agent_0`, `agent_1`, …
"""

from __future__ import annotations

from typing import Any

from pettingzoo import AECEnv
from pettingzoo.utils import parallel_to_aec, wrappers

from noisy_envs.interfaces.pettingzoo_env import ParallelTokenEnv


def parallel_env(render_mode: str | None = None, learners: str = "all", **options: Any) -> ParallelTokenEnv:
    """Make the parallel environment; `options` are those of the game."""
    return ParallelTokenEnv("simple_centroid", render_mode, learners, **options)


def env(render_mode: str | None = None, learners: str = "all", **options: Any) -> AECEnv[str, Any, Any]:
    """Make the AEC environment, in which agents act in turn; `options` are those of the game."""
    return wrappers.OrderEnforcingWrapper(parallel_to_aec(parallel_env(render_mode, learners, **options)))
