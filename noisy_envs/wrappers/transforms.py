"""What the wrappers do to batches of observations; a single environment is a batch of one.

Shapes: `B` environments, `R` of them in a batch, `N` tokens of `D` features each, of which `V` are values (all but the
role, if there is one). Resets and Gymnasium's layout of `info` are left to the wrappers. `noise` adds noise tokens.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces

from noisy_envs.arrays import Array, namespace
from noisy_envs.randomness import uniforms
from noisy_envs.tokens import TokenSpec
from noisy_envs.wrappers.episode_clock import Moment

Info = dict[str, Array]  # about R environments: "signal_mask" bool (R, N), "snr" (R,)
MAX_GAUSSIAN = math.sqrt(48 * math.log(2))  # standard deviations: the largest that uniforms of 24 bits can give


class Transform(Protocol):
    """What a wrapper does to observations."""

    space: Any  # of one transformed observation
    spec: TokenSpec
    is_random: bool  # whether it draws random numbers

    def stack(self, observations: list[Any]) -> Any:
        """Stack observations of R single environments to a batch for `apply`."""

    def read(self, observations: Any) -> Any:
        """Return the observations of a vector environment as a batch for `apply`."""

    def forget(self, rows: np.ndarray) -> None:
        """Forget the history of environments (R,), which start with a new seed."""

    def apply(self, observations: Any, signal: Array | None, moment: Moment) -> tuple[Any, Info]:
        """Transform a batch of R observations; `signal`, bool (R, N), marks signal tokens, None if unknown."""


class TokenTransform:
    """Base of the transforms of tokens."""

    is_random = False

    def __init__(self, space: spaces.Space[Any], spec: TokenSpec) -> None:
        """Check that observations of `space` are the tokens (N, D) that `spec` describes."""
        shape = spec.num_tokens, spec.num_features
        if not isinstance(space, spaces.Box) or space.shape != shape or space.dtype != np.float32:
            got = f"{space.dtype} Box {space.shape}" if isinstance(space, spaces.Box) else type(space).__name__
            raise ValueError(f"observation_space: expected a float32 Box of one agent's tokens {shape}, got {got}")
        self.low, self.high = space.low, space.high  # (N, D)
        self.spec = spec

    def stack(self, observations: list[Any]) -> np.ndarray:
        """Stack tokens (N, D) to (R, N, D)."""
        return np.stack(observations)

    def read(self, observations: Any) -> Any:
        """Return tokens (R, N, D) unchanged."""
        return observations

    def forget(self, rows: np.ndarray) -> None:
        """Do nothing: there is no history."""


class Mask(TokenTransform):
    """Adds the mask of tokens that are not padding."""

    def __init__(self, space: spaces.Space[Any], spec: TokenSpec) -> None:
        """Prepare for tokens of `spec`."""
        super().__init__(space, spec)
        mask: Any = spaces.MultiBinary(spec.num_tokens)  # wrappers that normalise observations would scale a Box
        mask.dtype = np.dtype(np.bool_)
        self.space = spaces.Dict({"tokens": spaces.Box(self.low, self.high, dtype=np.float32), "mask": mask})

    def apply(self, tokens: Array, signal: Array | None, moment: Moment) -> tuple[dict[str, Array], Info]:
        """Return a copy of the tokens (R, N, D), and the mask, bool (R, N)."""
        return {"tokens": namespace(tokens).asarray(tokens, copy=True), "mask": self.spec.mask(tokens)}, {}


class Flatten(TokenTransform):
    """Flattens tokens to one vector."""

    def __init__(self, space: spaces.Space[Any], spec: TokenSpec) -> None:
        """Prepare for tokens of `spec`."""
        super().__init__(space, spec)
        self.space = spaces.Box(self.low.ravel(), self.high.ravel(), dtype=np.float32)

    def apply(self, tokens: Array, signal: Array | None, moment: Moment) -> tuple[Array, Info]:
        """Flatten tokens (R, N, D) to (R, N · D), row by row."""
        xp = namespace(tokens)
        return xp.reshape(xp.asarray(tokens, copy=True), (len(tokens), -1)), {}


class Shuffle(TokenTransform):
    """Puts tokens in random order in each step; the query keeps its position."""

    is_random = True

    def __init__(self, space: spaces.Space[Any], spec: TokenSpec) -> None:
        """Prepare for tokens of `spec`."""
        super().__init__(space, spec)
        self.space = spaces.Box(*bounds_of_any_order(self.low, self.high, spec.query_index), dtype=np.float32)

    def apply(self, tokens: Array, signal: Array | None, moment: Moment) -> tuple[Array, Info]:
        """Return tokens (R, N, D) in random order, and the mask of signal in the same order."""
        if signal is not None:
            check_signal(signal, tokens)
        (u,) = draw_uniforms(moment, (self.spec.num_tokens - 1,), tokens)
        tokens, signal = permute(random_order(u, self.spec.query_index), tokens, signal)
        return tokens, {} if signal is None else {"signal_mask": signal}


def check_signal(signal: Array, tokens: Array) -> None:
    """Raise ValueError unless a mask of signal, from the `info` of any environment, fits tokens (R, N, D)."""
    shape, expected = tuple(signal.shape), tuple(tokens.shape[:2])
    if shape != expected:
        raise ValueError(f"info['signal_mask']: expected shape {expected[1:]}, a bool for each token, got {shape[1:]}")


def info_of(signal: Array, present: Array) -> Info:
    """Return the info for masks of signal and of all tokens but padding, bool (R, N)."""
    xp = namespace(signal)
    real = xp.float64 if xp is np else xp.float32  # as in this package's vector environments
    num_signal, num_tokens = (xp.sum(xp.astype(x, xp.int64), axis=-1) for x in (signal, present))
    return {"signal_mask": signal, "snr": xp.astype(num_signal, real) / num_tokens}


def check_may_be_padded(name: str, value: Any, other: str, spec: TokenSpec, low: np.ndarray, high: np.ndarray) -> None:
    """Raise ValueError if a token could be mistaken for padding, in a game without padding and roles.

    The error is about the option `name`, which may be `other` in any game; the game's tokens have bounds (N, D).
    """
    lowest, highest = low[:, spec.padding_feature].min(), high[:, spec.padding_feature].max()
    if not spec.padded and not spec.roles and lowest <= spec.padding <= highest:
        raise ValueError(
            f"{name}={value}: expected {other}, or tokens with roles, since feature "
            f"{spec.features[spec.padding_feature]!r} may be {spec.padding:g} without being padding"
        )


def padding_row(spec: TokenSpec, like: Array) -> Array:
    """Return a row (D,) of padding: zeros and the padding role as in the particle games, or as in BoxWorld."""
    xp = namespace(like)
    size = spec.num_features
    row = xp.full((size,), 0.0 if spec.roles else spec.padding, dtype=like.dtype, device=like.device)
    row[spec.padding_feature] = spec.padding
    return row


def unlike_padding(values: Array, spec: TokenSpec) -> Array:
    """Set the feature that marks padding to 0 where values (..., V) without roles would be mistaken for padding."""
    if spec.roles or not spec.padded:
        return values
    xp, marker = namespace(values), values[..., spec.padding_feature]
    values[..., spec.padding_feature] = xp.where(marker == spec.padding, xp.zeros_like(marker), marker)
    return values


def widened(low: Any, high: Any, below: float, above: float | None = None) -> tuple[Any, Any]:
    """Return bounds of values to which −`below` to `above` (by default `below`) is added, with room for rounding."""
    above = below if above is None else above
    if below == above == 0:
        return low, high
    low, high = np.float64(low), np.float64(high)
    return low - below - 1e-6 * (abs(low) + below), high + above + 1e-6 * (abs(high) + above)


def bounds_of_any_order(low: np.ndarray, high: np.ndarray, query: int) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds (N, D) of tokens in any order, where only the query keeps its position."""
    others = np.arange(len(low)) != query
    low, high = low.copy(), high.copy()
    if others.any():
        low[others], high[others] = low[others].min(axis=0), high[others].max(axis=0)
    return low, high


def draw_uniforms(moment: Moment, counts: tuple[int, ...], like: Array) -> tuple[Array, ...]:
    """Draw float32 uniforms (R, count) for each stream of `counts`, in the library and on the device of `like`.

    `AddNoise` has eight streams: values, order, the slot in the reservoir, the number of tokens, the second numbers of
    values that need two, the signal token that noise resembles, the episode that it replays, and the step that it
    follows. With separate streams, additional tokens do not change the first ones.
    """
    return uniforms(convert_like(moment.key, like), convert_like(moment.step, like), counts)


def box_muller(u: Array, u_angle: Array) -> Array:
    """Turn two uniforms, (R, n) each, into normal numbers (R, n) by the method of Box and Muller."""
    xp = namespace(u)
    radius = xp.sqrt(-2 * xp.log(1 - u))  # 1 − u is from 2**−24 to 1
    return radius * xp.cos(2 * math.pi * u_angle)


def random_order(u: Array, query: int) -> Array:
    """Return the index of the token for each position (R, N), by uniforms (R, N − 1); `query` keeps its position."""
    xp = namespace(u)
    order = xp.argsort(u, axis=1, stable=True)
    order = order + (order >= query)
    own = xp.full((len(u), 1), query, dtype=order.dtype, device=u.device)
    return xp.concat([order[:, :query], own, order[:, query:]], axis=1)


def permute(order: Array, tokens: Array, signal: Array | None) -> tuple[Array, Array | None]:
    """Return tokens (R, N, D) and their mask of signal (R, N) in the order (R, N)."""
    xp = namespace(tokens)
    tokens = xp.take_along_axis(tokens, order[..., None], axis=1)
    return tokens, None if signal is None else xp.take_along_axis(signal, order, axis=1)


def item(observations: Any, i: int) -> Any:
    """Return observation i of a batch, an array (R, ...) or a dictionary of arrays."""
    if isinstance(observations, dict):
        return {name: part[i] for name, part in observations.items()}
    return observations[i]


def convert_like(array: np.ndarray, like: Array) -> Array:
    """Convert a NumPy array to the library and device of `like`."""
    if isinstance(like, np.ndarray):
        return array
    return namespace(like).asarray(array, device=like.device)
