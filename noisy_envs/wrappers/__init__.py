"""Wrappers that turn observations into tokens and add noise tokens; `vector` has them for vector environments.

A token is a row (value, role). The `token_spec` of a wrapped environment describes roles, query and padding:

```python
import gymnasium
from noisy_envs.wrappers import AddNoiseTokens, TokenizeObservation, noisy_tokens

env = gymnasium.make("CartPole-v1")
env = AddNoiseTokens(TokenizeObservation(env), num_noise=28)  # tokens (33, 2): query, 4 features, 28 noise tokens
envs = noisy_tokens(gymnasium.make_vec("CartPole-v1", 16), num_noise=28)  # the same for 16 environments: (16, 33, 2)
```

`AddNoiseTokens`, `ShuffleTokens`, `TokensAndMask` and `FlattenTokens` also accept the environments of this package, and
any other whose observations are tokens (N, D) that a `token_spec` describes.

Seed, episode number and step determine all random numbers ("marginal" noise also depends on the observations since the
seed). `reset(seed=s)` starts episode 0, `reset(options={"episode": n})` episode n, and `reset()` the next episode. A
step after the end of an episode starts the next one too, since the wrapped environment may be an `Autoreset`.
Environment i of a vector wrapper with seed s equals the single environment with seed s + i.
"""

from __future__ import annotations

from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import VectorEnv

from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import Count, plain
from noisy_envs.wrappers import noise, transforms, vector
from noisy_envs.wrappers.episode_clock import EpisodeClock
from noisy_envs.wrappers.introspection import find_spec, num_random_layers, space_of, spec_of

__all__ = [
    "AddNoiseTokens",
    "FlattenTokens",
    "ShuffleTokens",
    "TokenizeObservation",
    "TokensAndMask",
    "noisy_tokens",
    "spec_of",
    "vector",
]

ROW = np.zeros(1, np.int64)  # a single environment is row 0 of a batch of one
NEW = np.ones(1, np.bool_)  # and each observation of it is new
OneOrMany = TypeVar("OneOrMany", gymnasium.Env[Any, Any], VectorEnv[Any, Any, Any])


class TokenWrapper(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Applies a transform of `noisy_envs.wrappers.transforms` to observations and info."""

    def __init__(self, env: gymnasium.Env[Any, Any], transform: transforms.Transform) -> None:
        """Wrap an environment."""
        super().__init__(env)
        self.observation_space = transform.space
        self._transform = transform
        self._clock = EpisodeClock(1, num_random_layers(env), transform.is_random)
        self._ended = False  # then the next step starts an episode, as that of an Autoreset below does

    @property
    def token_spec(self) -> TokenSpec:
        """Meaning of the tokens."""
        return self._transform.spec

    @property
    def num_random_layers(self) -> int:
        """Number of layers that draw random numbers, this one included."""
        return self._clock.depth + self._transform.is_random

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the next episode, or the first one of `seed`; return observation and info."""
        start = self._clock.plan_reset([seed], options if self._transform.is_random else None)
        observation, info = self.env.reset(seed=seed, options=options)
        self._clock.start(start)
        self._transform.forget(start.rows[start.reseeded])
        self._ended = False
        return self._apply(observation, info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Play an action; return observation, reward, terminated, truncated and info."""
        self._clock.check_started()
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._clock.steps += 1
        if self._ended:
            self._clock.start_next(ROW)
        self._ended = bool(terminated or truncated)
        observation, info = self._apply(observation, info)
        return observation, reward, terminated, truncated, info

    def _apply(self, observation: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        signal = info.get("signal_mask")
        if signal is not None:
            signal = np.asarray(signal, np.bool_)[None]  # another environment may give a list
        batch = self._transform.stack([observation])
        observations, batch_info = self._transform.apply(batch, signal, self._clock.moment(ROW, NEW))
        own_info = {name: x[0] if x.ndim > 1 else float(x[0]) for name, x in batch_info.items()}
        return transforms.item(observations, 0), info | own_info


class TokenizeObservation(TokenWrapper):
    """Turns a flat observation into tokens (1 + F, 2): rows (value, role), with a role for each feature.

    The first token is the constant (0, 0), the query for AdaPool. The features follow in the order of
    `gymnasium.spaces.flatten`; discrete parts are one-hot. Bounds and values become float32. `info` gets `signal_mask`,
    bool (1 + F,), all True (the query counts as signal, as the agent's own token does in this package's games), and
    `snr`, 1.0.

    Args:
        env: an environment with flat observations: a Box with one axis, Discrete, MultiBinary or similar, or a Dict or
            Tuple of these.
        squash: replace features without finite bounds by their tanh, from −1 to 1; otherwise they are unbounded.

    Raises:
        ValueError: naming the part of the space that is an image or has no fixed length.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], squash: bool = False) -> None:
        """Wrap an environment; see the class."""
        RecordConstructorArgs.__init__(self, squash=plain(squash))
        super().__init__(env, transforms.Tokenize(space_of(env), squash))


class AddNoiseTokens(TokenWrapper):
    """Adds M uninformative tokens, with a role of their own: tokens (N, D) become (N + M, D).

    The role is named "noise" in `token_spec`; if the game has noise tokens of its own, they share this role. In games
    without roles only the values of noise differ. `info` has `signal_mask`, bool (N + M,), and `snr`, the fraction of
    signal among the tokens that are not padding. All wrapped tokens but padding count as signal, unless `info` says
    otherwise.

    Args:
        env: an environment whose observations are tokens.
        num_noise: M, or a range (low, high) from which the number is drawn for each episode; padding fills up to high.
            Additional noise tokens do not change the values of the first ones.
        distribution: distribution of the values: "gaussian" (mean 0, standard deviation `scale`), "uniform" (from
            −`scale` to `scale`), or "marginal": `scale` times the values of a signal token that this environment
            returned since the last seed, not the query, drawn from a sample of 128 steps.
        scale: factor of the values, in their units.
        frozen: draw values and positions once per episode; otherwise in each step.
        shuffle: put all tokens but the query in random order; otherwise noise follows the other tokens.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        num_noise: Count,
        distribution: str = "gaussian",
        scale: float = 1.0,
        frozen: bool = False,
        shuffle: bool = True,
    ) -> None:
        """Wrap an environment; see the class."""
        space, spec = space_of(env), spec_of(env)
        transform = noise.AddNoise(space, spec, 1, num_noise, distribution, scale, frozen, shuffle)
        RecordConstructorArgs.__init__(self, **transform.options)
        super().__init__(env, transform)


class ShuffleTokens(TokenWrapper):
    """Puts all tokens (N, D) but the query in random order in each step, and `signal_mask` of `info` in the same."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        """Wrap an environment of tokens."""
        RecordConstructorArgs.__init__(self)
        super().__init__(env, transforms.Shuffle(space_of(env), spec_of(env)))


class TokensAndMask(TokenWrapper):
    """Returns a dictionary: `tokens` (N, D) float32, and `mask` bool (N,), False for padding.

    The space of the mask is `MultiBinary`, so that wrappers that normalise a Box leave it alone or raise an error.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        """Wrap an environment of tokens."""
        RecordConstructorArgs.__init__(self)
        super().__init__(env, transforms.Mask(space_of(env), spec_of(env)))


class FlattenTokens(TokenWrapper):
    """Flattens the tokens (N, D) to one vector (N · D,), row by row; `token_spec` still describes the rows."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        """Wrap an environment of tokens."""
        RecordConstructorArgs.__init__(self)
        super().__init__(env, transforms.Flatten(space_of(env), spec_of(env)))


def noisy_tokens(
    env: OneOrMany,
    num_noise: Count,
    distribution: str = "gaussian",
    scale: float = 1.0,
    frozen: bool = False,
    shuffle: bool = True,
    squash: bool = False,
) -> OneOrMany:
    """Turn the observations of an environment, single or vector, into tokens with noise, by the wrappers that fit.

    The role "noise" exists even with 0 noise tokens, so that an agent meets the same roles at any noise level.
    `spec_of` returns the meaning of the tokens, also through other wrappers around the result.

    Args:
        env: an environment with flat observations, which `TokenizeObservation` turns into tokens (1 + F, 2), or with
            tokens (N, D) already. Wrappers that normalise features, such as `NormalizeObservation`, must come before
            the features become tokens: around tokens they would scale the roles too, and `spec_of` raises an error.
        num_noise: M, or a range (low, high) from which it is drawn for each episode. See `AddNoiseTokens` for details,
            also of the next four.
        distribution: "gaussian", "uniform" or "marginal".
        scale: factor of the values, in their units.
        frozen: draw values and positions once per episode; otherwise in each step.
        shuffle: put all tokens but the query in random order.
        squash: replace features without finite bounds by their tanh, for flat observations.

    Returns:
        An environment, single or vector as `env`, that returns tokens (1 + F + M, 2) or (N + M, D), or (B, ...).

    Raises:
        TypeError: `env` is not an environment, or an option has a wrong type.
        ValueError: the observations are neither flat nor tokens; the role or padding of tokens has other bounds than
            `token_spec` says (a wrapper that keeps the bounds and changes the values is not detected); the number of
            noise tokens is a range, but values of the game's tokens could be mistaken for padding; or the value of an
            option is not allowed.
    """
    if isinstance(env, VectorEnv):
        envs = env if find_spec(env) else vector.TokenizeObservation(env, squash)
        return vector.AddNoiseTokens(envs, num_noise, distribution, scale, frozen, shuffle)
    inner = env if find_spec(env) else TokenizeObservation(env, squash)
    return AddNoiseTokens(inner, num_noise, distribution, scale, frozen, shuffle)
