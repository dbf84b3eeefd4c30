"""What the tokens of an observation mean, for code that reads them without knowing the game."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from noisy_envs.arrays import Array, as_numpy, namespace


@dataclass(frozen=True)
class TokenSpec:
    """Names for an observation of `num_tokens` rows and as many columns as there are `features`.

    The mask follows from the observation alone: a row whose `padding_feature` is `padding` is no token, where rows can
    be padding; elsewhere that feature is a value like others.

    Attributes:
        num_tokens: rows, N.
        features: names of the columns.
        roles: name -> value of the role feature, the last one; empty where a game has none.
        query_index: row of the observing agent's own token, AdaPool's query.
        padding_feature: column that tells padding; where there are roles, theirs.
        padding: its value there.
        padded: whether rows can be padding at all.

    Raises:
        ValueError: there are roles, and `padding_feature` is not the last column; or `padding` is not finite.
    """

    num_tokens: int
    features: tuple[str, ...]
    roles: dict[str, int]
    query_index: int = 0
    padding_feature: int = -1
    padding: float = -1.0
    padded: bool = True

    def __post_init__(self) -> None:
        """Check that the role is where wrappers and agents look for it."""
        last = self.num_features - 1
        if self.roles and self.padding_feature not in (-1, last):
            raise ValueError(
                f"padding_feature={self.padding_feature}: must be -1 or {last}, the last column, where there are roles"
            )
        if not math.isfinite(self.padding):
            raise ValueError(f"padding={self.padding}: must be finite")

    @property
    def num_features(self) -> int:
        """Columns of an observation."""
        return len(self.features)

    def check(self, observation: Array) -> None:
        """Raise ValueError unless each token (..., N, D) is padding or has one of the `roles`, if there are any.

        What scales tokens breaks their roles: look once, at what a library's wrapper shows first. It waits for a GPU.
        """
        if not self.roles:
            return
        shown = set(np.unique(as_numpy(observation[..., self.padding_feature])).tolist())
        wrong = shown - {float(role) for role in self.roles.values()} - {self.padding}
        if wrong:
            raise ValueError(
                f"feature {self.features[self.padding_feature]!r} of the tokens is {min(wrong):g}: must be the number "
                f"of a role ({', '.join(self.roles)}) or padding; scale features before they become tokens, or not at "
                "all"
            )

    def finite(self, observation: Array) -> Array:
        """Tell whether all that tokens hold is finite: (..., N, D) -> bool (); padding may hold anything."""
        xp = namespace(observation)
        finite = xp.isfinite(observation)
        return xp.all(finite | ~self.mask(observation)[..., None] if self.padded else finite)

    def mask(self, observation: Array) -> Array:
        """Tell tokens from padding: (..., N, D) -> bool (..., N), True for a token."""
        marker = observation[..., self.padding_feature]
        if self.padded:
            return marker != self.padding
        xp = namespace(marker)
        return xp.ones_like(marker, dtype=xp.bool)
