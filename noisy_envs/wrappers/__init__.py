"""Wrappers that turn observations into tokens and add noise; `vector` has them for vector environments.

A token is a row of values and a role, (value, role) for a number. The `token_spec` of a wrapped environment describes
features, roles, query and padding:

```python
import gymnasium
from noisy_envs.wrappers import AddNoiseTokens, TokenizeObservation, noisy_tokens

env = gymnasium.make("CartPole-v1")
env = AddNoiseTokens(TokenizeObservation(env), num_noise=28)  # tokens (33, 2): query, 4 features, 28 noise tokens
envs = noisy_tokens(gymnasium.make_vec("CartPole-v1", 16), num_noise=28)  # the same for 16 environments: (16, 33, 2)
```

The wrappers of tokens also accept the environments of this package, and any other whose observations are tokens (N, D)
that a `token_spec` describes. `NoisyActions` and `NoisyRewards` accept every environment, `AddDistractorPatches` those
with images.

Seed, episode number and step determine all random numbers. "marginal" and "replay" noise, and numbers that are not
correlated, also depend on what happened since the seed. `reset(seed=s)` starts episode 0, `reset(options={"episode":
n})` episode n, and `reset()` the next episode. A step after the end of an episode starts the next one too, since the
wrapped environment may be an `Autoreset`. Environment i of a vector wrapper with seed s equals the single environment
with seed s + i.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import gymnasium
import numpy as np
from gymnasium.utils import RecordConstructorArgs
from gymnasium.vector import VectorEnv

from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import Count, plain
from noisy_envs.wrappers import faults, noise, tokenize, transforms, vector
from noisy_envs.wrappers.distract import Distract
from noisy_envs.wrappers.disturb import NoisyActions, NoisyRewards
from noisy_envs.wrappers.episode_clock import EpisodeClock
from noisy_envs.wrappers.introspection import find_spec, num_random_layers, space_of, spec_of
from noisy_envs.wrappers.noise import NoiseOptions

__all__ = [
    "AddDistractorPatches",
    "AddNoiseTokens",
    "DisturbTokens",
    "DropTokens",
    "DuplicateTokens",
    "FlattenTokens",
    "NoisyActions",
    "NoisyRewards",
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
        self._clock.count_step([action], [reward])
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
    """Turns an observation into tokens (N, D): its numbers, the rows of its sets, or patches of its images.

    | observation | tokens | features of a token | role |
    |---|---|---|---|
    | `Discrete`, `MultiBinary`, `Box` with one axis, ... | one for each number | value | one for each |
    | `Box` (N, D), not uint8: a set | one for each row | the row | "element" |
    | `Box` (H, W, C), or (H, W) uint8: an image | one for each patch | row, column, the pixels | "patch" |
    | `Dict`, `Tuple` | those of its parts | those of a part, then zeros | as above, but the name of a set or an image |

    The first token is the query for AdaPool: zeros, with the role 0. The others follow in the order of
    `gymnasium.spaces.flatten`; discrete parts are one-hot. Row and column tell where the middle of a patch is, from −1
    at the upper or left edge of the image to 1 at the other one. Pixels with finite bounds are scaled to [0, 1].
    Bounds and values become float32.

    `info` gets `signal_mask`, bool (N,), and `snr`. The query counts as signal, as the agent's own token does in this
    package's games, and so do all other tokens, unless the `signal_mask` in the info of the environment denies it: bool
    (N,) for a set, or (H, W) for an image, where a patch is signal if any of its pixels is.

    Args:
        env: an environment with these observations.
        squash: replace numbers without finite bounds by their tanh, from −1 to 1; otherwise they are unbounded.
        patch_size: height and width of a patch in pixels, a divisor of the image's.

    Raises:
        ValueError: naming the part of the space that has more axes or no fixed length, or the sizes of patches that
            divide an image.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], squash: bool = False, patch_size: int = tokenize.PATCH_SIZE
    ) -> None:
        """Wrap an environment; see the class."""
        RecordConstructorArgs.__init__(self, squash=plain(squash), patch_size=plain(patch_size))
        super().__init__(env, tokenize.Tokenize(space_of(env), squash, patch_size))


class AddDistractorPatches(TokenWrapper):
    """Adds random patches around and over an image, before `TokenizeObservation` with the same `patch_size`.

    Images (H, W, C) become canvases (H + 2 · around · P, W + 2 · around · P, C) for patches of P pixels; grey images
    (H, W) stay grey. `info` gets `signal_mask`, bool (H', W'), True for the pixels of the image that are seen, or those
    of them that the environment's own `signal_mask` marks. `TokenizeObservation` turns it into a mask of tokens.

    Args:
        env: an environment whose observations are images.
        around: width of the ring of noise patches around the image, in patches. A further ring does not change the
            other patches.
        over: number of patches of the image that noise covers, or a range (low, high) from which it is drawn for each
            episode. A further patch does not change which ones come first.
        patch_size: P, a divisor of height and width.
        content: "uniform", where each pixel is drawn on its own between the bounds, or "image", where each patch is one
            of the same image, so that place and neighbours alone tell it from signal.
        frozen: draw content and covered patches once per episode; otherwise in each step.
        moves: draw the place of the image in the canvas for each episode; otherwise it is in the middle.

    Raises:
        ValueError: the observations are no images, or an option has a value that is not allowed.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        around: int = 1,
        over: Count = 0,
        patch_size: int = tokenize.PATCH_SIZE,
        content: str = "uniform",
        frozen: bool = False,
        moves: bool = False,
    ) -> None:
        """Wrap an environment; see the class."""
        transform = Distract(space_of(env), around, over, patch_size, content, frozen, moves)
        RecordConstructorArgs.__init__(self, **transform.options)
        super().__init__(env, transform)


class AddNoiseTokens(TokenWrapper):
    """Adds M uninformative tokens: tokens (N, D) become (N + M, D).

    They have a role of their own, which `token_spec` names "noise" (a game's own noise tokens share it), or with
    `noise_role="signal"` the roles of signal tokens, so that the role does not label noise. In games without roles only
    the values of noise differ. `info` has `signal_mask`, bool (N + M,), and `snr`, the fraction of signal among the
    tokens that are not padding. All wrapped tokens but padding count as signal, unless `info` says otherwise.

    Args:
        env: an environment whose observations are tokens.
        num_noise: M, or a range (low, high) from which the number is drawn for each episode; padding fills up to high.
            Additional noise tokens do not change the values of the first ones.
        distribution: what the values are; signal tokens are those of this environment since its last seed, but not the
            query:

            * "gaussian": normal numbers, with mean 0 and standard deviation `scale`.
            * "uniform": numbers from −`scale` to `scale`.
            * "marginal": `scale` times a random signal token of a past step, drawn in each step from a sample of 128.
            * "replay": `scale` times a signal token of one of the last 16 episodes, at the same step of that episode,
              so that it moves as signal does. When that episode ends, a longer one goes on; without a longer one it
              starts over. The last 1024 steps of an episode are kept, and fewer episodes if tokens are many and large.
              In the first episode after a seed it is a signal token of 1 to 16 steps ago.
            * "copy": a signal token of `delay` steps ago, or of the start of the episode, plus normal numbers of
              standard deviation `scale`, which may be 0 here.
        scale: factor or standard deviation of the values, in their units.
        frozen: draw values and positions once per episode; otherwise in each step.
        shuffle: put all tokens but the query in random order; otherwise noise follows the other tokens.
        noise_role: "own", or "signal": the role of the signal token that noise is drawn from. "gaussian" and "uniform"
            noise has the role of a signal token that is drawn once per episode and noise token. As long as there is no
            signal token, it is the role of the query.
        delay: number of steps of "copy".
        correlation: "none", or "reward" or "action": this number of the last step is added to the first value of each
            noise token. An action is its integer, or its first component within the bounds. At a start it is 0.
        correlated: if False, the number is of a random step since the seed, of the last 128, and not of the last step:
            the values keep their distribution but lose the correlation. Train with True and evaluate with False.
        schedule: how a range `num_noise` is used: "constant" draws from it for each episode; "growing" goes from low in
            episode 0 to high in episode `schedule_episodes` and stays there; "reversed" goes from high to low;
            "fluctuating" goes from low to high and back in each `schedule_episodes`. One number stays as it is.
        schedule_episodes: length of the schedule, in episodes of one environment.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        num_noise: Count,
        distribution: str = "gaussian",
        scale: float = 1.0,
        frozen: bool = False,
        shuffle: bool = True,
        noise_role: str = "own",
        delay: int = 1,
        correlation: str = "none",
        correlated: bool = True,
        schedule: str = "constant",
        schedule_episodes: int = 1000,
    ) -> None:
        """Wrap an environment; see the class."""
        space, spec = space_of(env), spec_of(env)
        options = NoiseOptions(
            num_noise, distribution, scale, frozen, shuffle, noise_role, delay, correlation, correlated, schedule,
            schedule_episodes,
        )  # fmt: skip
        RecordConstructorArgs.__init__(self, **dataclasses.asdict(options))
        super().__init__(env, noise.AddNoise(space, spec, env.action_space, 1, options))


class DisturbTokens(TokenWrapper):
    """Disturbs values of tokens (N, D), with one kind of noise; the query, roles and padding stay as they are.

    `signal_mask` and `snr` of `info` stay too. Around `AddNoiseTokens` it disturbs noise tokens as it does signal. Each
    row is taken for one token, so shuffle afterwards.

    Args:
        env: an environment whose observations are tokens.
        kind: what happens to a value that is hit:

            * "gaussian": a normal number of standard deviation `scale` is added.
            * "dead": it is 0, all the episode.
            * "dropped": it is 0, in this step.
            * "delayed": it is the value of `delay` steps ago, or of the start of the episode, all the episode.
            * "permuted": it is the same feature of another token that is hit, all the episode.
        probability: probability that a value is hit, drawn for each feature of each token, in each step for "gaussian"
            and "dropped", otherwise once per episode.
        scale: standard deviation of "gaussian", in the units of the values.
        delay: number of steps of "delayed".
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        kind: str = "gaussian",
        probability: float = 1.0,
        scale: float = 1.0,
        delay: int = 1,
    ) -> None:
        """Wrap an environment of tokens."""
        transform = faults.Disturb(space_of(env), spec_of(env), 1, kind, probability, scale, delay)
        RecordConstructorArgs.__init__(self, **transform.options)
        super().__init__(env, transform)


class DropTokens(TokenWrapper):
    """Turns random tokens (N, D) but the query into padding; `TokensAndMask` masks them.

    `info` has `signal_mask`, False for them, and `snr`, the fraction of signal among the tokens that are left.

    Args:
        env: an environment whose observations are tokens.
        probability: probability that a token is dropped.
        frozen: draw the tokens once per episode; otherwise in each step.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], probability: float, frozen: bool = False) -> None:
        """Wrap an environment of tokens."""
        transform = faults.Drop(space_of(env), spec_of(env), probability, frozen)
        RecordConstructorArgs.__init__(self, **transform.options)
        super().__init__(env, transform)


class DuplicateTokens(TokenWrapper):
    """Adds M exact copies of random tokens, but neither of the query nor of padding: (N, D) become (N + M, D).

    `info` has `signal_mask`, bool (N + M,), where a copy counts as the token that it is a copy of, and `snr`.

    Args:
        env: an environment whose observations are tokens.
        num_copies: M. Additional copies do not change the first ones.
        frozen: draw the tokens and the order once per episode; otherwise in each step.
        shuffle: put all tokens but the query in random order; otherwise copies follow the other tokens.
    """

    def __init__(
        self, env: gymnasium.Env[Any, Any], num_copies: int, frozen: bool = False, shuffle: bool = True
    ) -> None:
        """Wrap an environment of tokens."""
        transform = faults.Duplicate(space_of(env), spec_of(env), num_copies, frozen, shuffle)
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
    noise_role: str = "own",
    delay: int = 1,
    correlation: str = "none",
    correlated: bool = True,
    schedule: str = "constant",
    schedule_episodes: int = 1000,
    patch_size: int = tokenize.PATCH_SIZE,
) -> OneOrMany:
    """Turn the observations of an environment, single or vector, into tokens with noise, by the wrappers that fit.

    The role "noise" exists even with 0 noise tokens, so that an agent meets the same roles at any noise level, unless
    `noise_role` is "signal".
    `spec_of` returns the meaning of the tokens, also through other wrappers around the result.

    Args:
        env: an environment whose numbers, sets or images `TokenizeObservation` turns into tokens (N, D), or that has
            tokens already. Wrappers that normalise features, such as `NormalizeObservation`, must come before
            the features become tokens: around tokens they would scale the roles too, and `spec_of` raises an error.
        num_noise: M, or a range (low, high) from which it is drawn for each episode. See `AddNoiseTokens` for details,
            also of all other options but `squash`.
        distribution: "gaussian", "uniform", "marginal", "replay" or "copy".
        scale: factor or standard deviation of the values, in their units.
        frozen: draw values and positions once per episode; otherwise in each step.
        shuffle: put all tokens but the query in random order.
        squash: replace numbers without finite bounds by their tanh.
        noise_role: "own" or "signal", the role that noise tokens carry.
        delay: number of steps of "copy".
        correlation: "none", "reward" or "action", which is added to the first value of each noise token.
        correlated: False breaks this correlation but keeps the distribution, for an evaluation.
        schedule: "constant", "growing", "reversed" or "fluctuating", how `num_noise` changes over episodes.
        schedule_episodes: length of the schedule, in episodes of one environment.
        patch_size: height and width of image patches in pixels; see `TokenizeObservation`, also for `squash`.

    Returns:
        An environment, single or vector as `env`, that returns tokens (N + M, D) or (B, N + M, D).

    Raises:
        TypeError: `env` is not an environment, or an option has a wrong type.
        ValueError: the observations cannot become tokens; the role or padding of tokens has other bounds than
            `token_spec` says (a wrapper that keeps the bounds and changes the values is not detected); the number of
            noise tokens is a range, but values of the game's tokens could be mistaken for padding; or the value of an
            option is not allowed.
    """
    options = (
        num_noise, distribution, scale, frozen, shuffle, noise_role, delay, correlation, correlated, schedule,
        schedule_episodes,
    )  # fmt: skip
    if isinstance(env, VectorEnv):
        return vector.AddNoiseTokens(
            env if find_spec(env) else vector.TokenizeObservation(env, squash, patch_size), *options
        )
    return AddNoiseTokens(env if find_spec(env) else TokenizeObservation(env, squash, patch_size), *options)
