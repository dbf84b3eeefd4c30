"""Observations of other environments as tokens.

Shapes: `R` environments in a batch, `F` features of a flat observation, `N` tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate

from noisy_envs.arrays import Array
from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import check_flag, plain
from noisy_envs.wrappers.episode_clock import Moment
from noisy_envs.wrappers.transforms import Info


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
