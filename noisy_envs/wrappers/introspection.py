"""Attributes and spaces of wrapped environments, found through all layers of wrappers."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Space
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper

from noisy_envs.tokens import TokenSpec

AnyEnv = gymnasium.Env[Any, Any] | VectorEnv[Any, Any, Any]


def find(env: AnyEnv, name: str, default: Any) -> Any:
    """Return an attribute of the outermost layer that has it, also from inside a vector of single environments."""
    while not hasattr(env, name):
        if isinstance(env, (gymnasium.Wrapper, VectorWrapper)):
            env = env.env
        elif (
            hasattr(env, "call") and env.call("has_wrapper_attr", name)[0]
        ):  # first: an error would end a worker process
            return env.call("get_wrapper_attr", name)[0]
        else:
            return default
    return getattr(env, name)


def spec_of(env: AnyEnv) -> TokenSpec:
    """Return the meaning of the tokens of an environment, single or vector, through any wrappers.

    Two cases are not detected: wrappers inside worker processes, and a wrapper that keeps the bounds and changes the
    values. `TokenSpec.check` detects these from an observation.

    Raises:
        ValueError: the observations are no tokens, or a wrapper changed the bounds of the role or padding feature.
    """
    spec = find_spec(env)
    if spec is None:
        raise ValueError(f"{env}: expected an environment with a token_spec; TokenizeObservation adds one")
    shown, own = _single_space(env), _token_space(env)
    # a wrapper may also flatten tokens or stack several observations
    if isinstance(shown, Box) and isinstance(own, Box) and shown.low.size % own.low.size == 0:
        bounds, expected = (
            np.stack([box.low, box.high]).reshape(2, -1, spec.num_features)[..., spec.padding_feature]
            for box in (shown, own)
        )
        if not np.array_equal(bounds, np.tile(expected, shown.low.size // own.low.size)):
            name, hint = spec.features[spec.padding_feature], "scale features before they become tokens, or not at all"
            raise ValueError(f"{env}: expected unchanged bounds of the token feature {name!r}; {hint}")
    return spec


def _single_space(env: AnyEnv) -> Space[Any]:
    return env.single_observation_space if isinstance(env, VectorEnv) else env.observation_space


def _token_space(env: Any) -> Space[Any] | None:
    """Return the single observation space of the layer that has a `token_spec`; None if worker processes hide it."""
    while not hasattr(env, "token_spec"):
        if isinstance(env, (gymnasium.Wrapper, VectorWrapper)):
            env = env.env
        elif hasattr(env, "envs"):
            env = env.envs[0]
        else:
            return None
    return _single_space(env)


def find_spec(env: AnyEnv) -> TokenSpec | None:
    """Return the meaning of the tokens of an environment; None if its observations are no tokens."""
    spec = find(env, "token_spec", None)
    return spec if isinstance(spec, TokenSpec) else None


def space_of(env: Any) -> Space[Any]:
    """Return the observation space of a single environment.

    Raises:
        TypeError: `env` is not a single environment.
    """
    if isinstance(env, gymnasium.Env):
        return env.observation_space
    hint = "; noisy_envs.wrappers.vector has the wrappers of vector environments" if isinstance(env, VectorEnv) else ""
    raise TypeError(f"env={env!r}: expected a gymnasium.Env{hint}")


def single_space_of(envs: Any) -> Space[Any]:
    """Return the observation space of one environment of a vector environment.

    Raises:
        TypeError: `envs` is not a vector environment.
    """
    if isinstance(envs, VectorEnv):
        return envs.single_observation_space
    hint = "; noisy_envs.wrappers has the wrappers of single environments" if isinstance(envs, gymnasium.Env) else ""
    raise TypeError(f"env={envs!r}: expected a gymnasium.vector.VectorEnv{hint}")


def num_random_layers(env: AnyEnv) -> int:
    """Return the number of wrappers of this package around an environment that draw random numbers."""
    return int(find(env, "num_random_layers", 0))


def autoreset_mode_of(env: VectorEnv[Any, Any, Any]) -> AutoresetMode:
    """Return the autoreset mode of vector environments; raise ValueError if their metadata has none."""
    mode = env.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise ValueError(f"{env}: metadata['autoreset_mode']={mode!r}: expected an AutoresetMode")
    return mode
