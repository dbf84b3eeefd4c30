"""What a wrapper finds in the environments beneath it."""

from __future__ import annotations

from typing import Any

import gymnasium
from gymnasium.vector import VectorEnv, VectorWrapper

from noisy_envs.tokens import TokenSpec

AnyEnv = gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]


def find(env: AnyEnv, name: str, default: Any) -> Any:
    """Return an attribute of the outermost layer that has it, through a vector of single environments too."""
    while not hasattr(env, name):
        if isinstance(env, (gymnasium.Wrapper, VectorWrapper)):
            env = env.env
        elif hasattr(env, "call") and env.call("has_wrapper_attr", name)[0]:  # asked first: an error ends a worker
            return env.call("get_wrapper_attr", name)[0]
        else:
            return default
    return getattr(env, name)


def spec_of(env: AnyEnv) -> TokenSpec:
    """Return what the tokens of an environment mean.

    Raises:
        ValueError: its observations are no tokens.
    """
    spec = find(env, "token_spec", None)
    if not isinstance(spec, TokenSpec):
        raise ValueError(f"{env}: has no token_spec: put TokenizeObservation around it first")
    return spec


def num_draws(env: AnyEnv) -> int:
    """Return how many layers of an environment are wrappers of ours that draw numbers."""
    return int(find(env, "num_draws", 0))
