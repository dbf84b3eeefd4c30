"""Wrappers that make any Gymnasium environment one of tokens, with noise; `vector` has them for vector environments.

A token is a row (value, role); `token_spec` of a wrapped environment names the roles, the query and the padding:

```python
import gymnasium
from noisy_envs.wrappers import AddNoiseTokens, TokenizeObservation, noisy_tokens

env = gymnasium.make("CartPole-v1")
env = AddNoiseTokens(TokenizeObservation(env), num_noise=28)  # tokens (33, 2): query, 4 features, 28 of noise
envs = noisy_tokens(gymnasium.make_vec("CartPole-v1", 16), num_noise=28)  # the same for 16 worlds, (16, 33, 2)
```

`AddNoiseTokens`, `ShuffleTokens`, `TokensAndMask` and `FlattenTokens` take the project's own environments as well,
and any other whose observations are tokens (N, D) that a `token_spec` describes.

What is drawn follows from the seed, the number of the episode and of the step (and of the "marginal" noise, from what
was shown since the seed): `reset(seed=s)` begins at episode 0, `reset(options={"episode": n})` at number n, and
`reset()` goes on with the next one. So does a step after an end, since an `Autoreset` may lie beneath.
World i of a vector wrapper seeded s is the single one seeded s + i.
"""

from __future__ import annotations

from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import VectorEnv

from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import Count, plain
from noisy_envs.wrappers import transforms, vector
from noisy_envs.wrappers.episode_clock import Clock
from noisy_envs.wrappers.introspection import found_spec, num_draws, space_of, spec_of

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

ONE = np.zeros(1, np.int64)  # the only world
FRESH = np.ones(1, np.bool_)
OneOrMany = TypeVar("OneOrMany", gymnasium.Env[Any, Any], VectorEnv[Any, Any, Any])


class TokenWrapper(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Shows observations and info as a rule of `noisy_envs.wrappers.transforms` changes them."""

    def __init__(self, env: gymnasium.Env[Any, Any], rule: transforms.Rule) -> None:
        """Wrap an environment."""
        super().__init__(env)
        self.observation_space = rule.space
        self._rule = rule
        self._clock = Clock(1, num_draws(env), rule.draws)
        self._ended = False  # whether a step begins the next episode: one that resets beneath, as Autoreset's

    @property
    def token_spec(self) -> TokenSpec:
        """What the tokens mean."""
        return self._rule.spec

    @property
    def num_draws(self) -> int:
        """How many layers draw numbers, this one included."""
        return self._clock.depth + self._rule.draws

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the next episode, or the first one of `seed`: an observation, info."""
        start = self._clock.plan([seed], options if self._rule.draws else None)
        observation, info = self.env.reset(seed=seed, options=options)
        self._clock.begin(start)
        self._rule.forget(start.rows[start.anew])
        self._ended = False
        return self._show(observation, info)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Play an action: an observation, reward, terminated, truncated, info."""
        self._clock.check_begun()
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._clock.steps += 1
        if self._ended:
            self._clock.follow(ONE)
        self._ended = bool(terminated or truncated)
        observation, info = self._show(observation, info)
        return observation, reward, terminated, truncated, info

    def _show(self, observation: Any, info: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        signal = info.get("signal_mask")
        if signal is not None:
            signal = np.asarray(signal, np.bool_)[None]  # others may give a list
        batch = self._rule.batch([observation])
        shown, facts = self._rule.show(batch, signal, self._clock.moment(ONE, FRESH))
        told = {name: fact[0] if fact.ndim > 1 else float(fact[0]) for name, fact in facts.items()}
        return transforms.one(shown, 0), info | told


class TokenizeObservation(TokenWrapper):
    """Turns a flat observation into tokens (1 + F, 2): rows (value, role), the role telling which feature it is.

    The first token is the constant 0, 0, the query for AdaPool. The features follow, in the order of
    `gymnasium.spaces.flatten`: discrete parts are one-hot. Bounds and values become float32. `info` gets `signal_mask`,
    bool (1 + F,), all True (the query counts as signal, as the own token does in our games), and `snr`, 1.0.

    Args:
        env: of any flat observation: a Box of one axis, Discrete, MultiBinary or the like, or a Dict or Tuple of them.
        squash: show features without a finite bound as their tanh, from −1 to 1; otherwise they stay unbounded.

    Raises:
        ValueError: the space has an image or a part of no fixed length, which is named.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], squash: bool = False) -> None:
        """Wrap an environment; see the class."""
        RecordConstructorArgs.__init__(self, squash=plain(squash))
        super().__init__(env, transforms.Tokenize(space_of(env), squash))


class AddNoiseTokens(TokenWrapper):
    """Adds tokens that say nothing, of a role of their own: tokens (N + M, D) for (N, D).

    The role is "noise" of `token_spec`, that of the game's own noise where it has some; in games without roles noise
    differs by its values alone. `info` has `signal_mask`, bool (N + M,), and `snr`, the share of signal among the
    tokens that are not padding. Before it, all tokens are signal but padding, unless `info` says otherwise.

    Args:
        env: of observations that are tokens.
        num_noise: M, or a range (low, high): then the number is drawn for each episode, and padding fills up to high.
            More of them leave the values of the first as they are.
        distribution: of each value: "gaussian" (mean 0, standard deviation `scale`), "uniform" (from −`scale` to
            `scale`), or "marginal": `scale` times the values of a token, not the query, that carried signal in this
            world since the last seed, drawn from a sample of 128 steps.
        scale: in the units of the values.
        frozen: draw values and places once an episode; otherwise anew in each step.
        shuffle: give all tokens but the query random places; otherwise noise follows the others.
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
        rule = transforms.AddNoise(space_of(env), spec_of(env), 1, num_noise, distribution, scale, frozen, shuffle)
        RecordConstructorArgs.__init__(self, **rule.options)
        super().__init__(env, rule)


class ShuffleTokens(TokenWrapper):
    """Gives all tokens (N, D) but the query random places in each step, and `signal_mask` in `info` the same."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        """Wrap an environment of tokens."""
        RecordConstructorArgs.__init__(self)
        super().__init__(env, transforms.Shuffle(space_of(env), spec_of(env)))


class TokensAndMask(TokenWrapper):
    """Shows a dictionary: `tokens` (N, D) float32, and `mask` bool (N,), False for padding.

    The space of the mask is `MultiBinary`, so that what normalises observations of a Box leaves it alone or refuses it.
    """

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        """Wrap an environment of tokens."""
        RecordConstructorArgs.__init__(self)
        super().__init__(env, transforms.Mask(space_of(env), spec_of(env)))


class FlattenTokens(TokenWrapper):
    """Shows the tokens (N, D) as one vector (N · D,), row after row; `token_spec` still describes the rows."""

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
    """Make an environment, single or vector, one of tokens with noise, by the wrappers that fit.

    With 0 noise tokens the role "noise" is still there: an agent meets the same roles at any number. `spec_of` tells
    what the tokens mean, also through wrappers of others around the result.

    Args:
        env: of flat observations, which `TokenizeObservation` makes tokens (1 + F, 2), or of tokens (N, D) already.
            What normalises features, as `NormalizeObservation` does, must come before they are tokens: around tokens it
            would scale their roles too, and `spec_of` refuses it.
        num_noise: M, or a range (low, high), drawn for each episode: see `AddNoiseTokens`, also for what follows.
        distribution: "gaussian", "uniform" or "marginal".
        scale: in the units of the values.
        frozen: draw values and places once an episode; otherwise anew in each step.
        shuffle: give all tokens but the query random places.
        squash: of flat observations, show features without a finite bound as their tanh.

    Returns:
        An environment of the same kind that shows tokens (1 + F + M, 2) or (N + M, D), of worlds (B, ...).

    Raises:
        TypeError: `env` is no environment, or an option is of no type that is allowed, which is named.
        ValueError: the observations are neither flat nor tokens, or tokens whose role or padding has other bounds than
            `token_spec` means (a wrapper that keeps the bounds and changes the values is not seen); noise of a range
            needs padding, for which the game's own tokens may be taken; or an option has a value that is not allowed.
    """
    if isinstance(env, VectorEnv):
        envs = env if found_spec(env) else vector.TokenizeObservation(env, squash)
        return vector.AddNoiseTokens(envs, num_noise, distribution, scale, frozen, shuffle)
    inner = env if found_spec(env) else TokenizeObservation(env, squash)
    return AddNoiseTokens(inner, num_noise, distribution, scale, frozen, shuffle)
