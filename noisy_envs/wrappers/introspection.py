"""What a wrapper finds in the environments beneath it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Space
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
    """Return what the tokens of an environment mean, single or vector, whatever wrappers are around them.

    What worker processes hold between them and the tokens' owner is not seen, nor is a wrapper that keeps the bounds
    and changes the values: `TokenSpec.check` looks at these.

    Raises:
        ValueError: its observations are no tokens, or a wrapper gave other bounds to the feature that tells them apart.
    """
    spec = found_spec(env)
    if spec is None:
        raise ValueError(f"{env}: has no token_spec: put TokenizeObservation around it first")
    shown, own = _world_space(env), _owned_space(env)
    if isinstance(shown, Box) and isinstance(own, Box) and shown.low.size % own.low.size == 0:  # also flat, or stacked
        seen, meant = (
            np.stack([box.low, box.high]).reshape(2, -1, spec.num_features)[..., spec.padding_feature]
            for box in (shown, own)
        )
        if not np.array_equal(seen, np.tile(meant, shown.low.size // own.low.size)):
            name, hint = spec.features[spec.padding_feature], "scale features before they become tokens, or not at all"
            raise ValueError(f"{env}: feature {name!r} of the tokens must keep its bounds: {hint}")
    return spec


def _world_space(env: AnyEnv) -> Space[Any]:
    return env.single_observation_space if isinstance(env, VectorEnv) else env.observation_space


def _owned_space(env: Any) -> Space[Any] | None:
    """Return the space of one world's observations in the layer that has a `token_spec`, or None where it is hidden."""
    while not hasattr(env, "token_spec"):
        if isinstance(env, (gymnasium.Wrapper, VectorWrapper)):
            env = env.env
        elif hasattr(env, "envs"):
            env = env.envs[0]
        else:
            return None
    return _world_space(env)


def found_spec(env: AnyEnv) -> TokenSpec | None:
    """Return what the tokens of an environment mean, or None where its observations are no tokens."""
    spec = find(env, "token_spec", None)
    return spec if isinstance(spec, TokenSpec) else None


def space_of(env: Any) -> Space[Any]:
    """Return the space of a single environment's observations.

    Raises:
        TypeError: it is none.
    """
    if isinstance(env, gymnasium.Env):
        return env.observation_space
    hint = "; noisy_envs.wrappers.vector has the wrappers of vector environments" if isinstance(env, VectorEnv) else ""
    raise TypeError(f"{env!r}: must be a gymnasium.Env{hint}")


def world_space_of(envs: Any) -> Space[Any]:
    """Return the space of the observations of one world of a vector environment.

    Raises:
        TypeError: it is none.
    """
    if isinstance(envs, VectorEnv):
        return envs.single_observation_space
    hint = "; noisy_envs.wrappers has the wrappers of single environments" if isinstance(envs, gymnasium.Env) else ""
    raise TypeError(f"{envs!r}: must be a gymnasium.vector.VectorEnv{hint}")


def num_draws(env: AnyEnv) -> int:
    """Return how many layers of an environment are wrappers of ours that draw numbers."""
    return int(find(env, "num_draws", 0))
