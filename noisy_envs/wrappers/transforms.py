"""What the wrappers do to batches of observations; a single environment is a batch of one.

Shapes: `B` environments, `R` of them in a batch, `N` tokens of `D` features each, of which `V` are values (all but the
role, if there is one). Resets and Gymnasium's layout of `info` are left to the wrappers. `noise` adds noise tokens.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate

from noisy_envs.arrays import Array, namespace
from noisy_envs.randomness import uniforms
from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import check_flag, plain
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


class Tokenize:
    """Turns each number of a flat observation into a token: its value, and the role of its feature."""

    is_random = False

    def __init__(self, space: spaces.Space[Any], squash: bool) -> None:
        """Prepare for observations of `space`.

        Raises:
            ValueError: it cannot be flattened to a vector of fixed length.
        """
        squash = plain(squash)
        check_flag("squash", squash)
        names = feature_names(space)
        if len(set(names)) < len(names):
            raise ValueError(f"{space}: expected features with different names, got {', '.join(names)}")
        flat = spaces.flatten_space(space)
        assert isinstance(flat, spaces.Box)
        with np.errstate(over="ignore"):  # bounds beyond float32 become infinite
            low, high = flat.low.astype(np.float32), flat.high.astype(np.float32)
        self.squashed = ~np.isfinite(low) | ~np.isfinite(high) if squash else np.zeros(low.shape, np.bool_)
        self.bounds = tuple(np.where(self.squashed, np.tanh(bound), bound) for bound in (low, high))
        roles = {"query": 0} | {name: number for number, name in enumerate(names, start=1)}
        self.spec = TokenSpec(len(roles), ("value", "role"), roles, padded=False)
        self.roles = np.arange(len(roles), dtype=np.float32)  # (N,)
        # the query is 0, but has the bounds −1 and 1, since Gymnasium's checker warns about equal bounds
        low = np.stack([np.append(np.float32(-1), self.bounds[0]), np.zeros_like(self.roles)], axis=1)
        high = np.stack([np.append(np.float32(1), self.bounds[1]), np.full_like(self.roles, len(names))], axis=1)
        self.space = spaces.Box(low, high, dtype=np.float32)
        self.flat_space, self.flat_batch_space = space, batch_space(space, 1)

    def stack(self, observations: list[Any]) -> np.ndarray:
        """Flatten observations one by one: (R, F)."""
        flat: list[Any] = [spaces.flatten(self.flat_space, observation) for observation in observations]
        return np.stack(flat)

    def forget(self, rows: np.ndarray) -> None:
        """Do nothing: there is no history."""

    def read(self, observations: Any) -> np.ndarray:
        """Flatten the observations of a vector environment: (R, F)."""
        if hasattr(observations, "detach"):
            raise TypeError(f"observations: expected NumPy arrays, got {type(observations)}")
        if isinstance(self.flat_space, spaces.Box) and len(self.flat_space.shape) == 1:
            return np.asarray(observations)
        return self.stack(list(iterate(self.flat_batch_space, observations)))

    def apply(self, values: Any, signal: Array | None, moment: Moment) -> tuple[np.ndarray, Info]:
        """Turn values (R, F) into tokens (R, 1 + F, 2): the query (0, 0), then the features; all count as signal."""
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)
        if self.squashed.any():
            values = np.where(self.squashed, np.clip(np.tanh(values), *self.bounds), values)
        tokens = np.zeros((len(values), len(self.roles), 2), np.float32)
        tokens[:, 1:, 0] = values
        tokens[:, :, 1] = self.roles
        return tokens, {"signal_mask": np.ones(tokens.shape[:2], np.bool_), "snr": np.ones(len(tokens))}


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


def feature_names(space: spaces.Space[Any]) -> list[str]:
    """Name the numbers of the flat space: `position[0]`, `inner.mode[2]`, or `feature[0]` if the space is no container.

    Raises:
        ValueError: naming the space that is an image, has no fixed length, or is empty.
    """
    names = _names(space, "", space)
    if not names:
        raise ValueError(f"{space}: expected at least one number")
    return names


def _names(space: spaces.Space[Any], name: str, whole: spaces.Space[Any]) -> list[str]:
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        return [full for key, part in parts for full in _names(part, f"{name}.{key}" if name else str(key), whole)]
    where = f"{space} in {whole}" if name else f"{space}"
    if not space.is_np_flattenable:
        raise ValueError(f"{where}: expected a space that can be flattened to a Box of fixed length")
    if isinstance(space, spaces.Box) and len(space.shape) > 1:
        hint = "gymnasium.wrappers.FlattenObservation makes each number a feature"
        raise ValueError(f"{where}: expected a Box with one axis, got shape {space.shape}; {hint}")
    return [f"{name or 'feature'}[{i}]" for i in range(spaces.flatdim(space))]


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
