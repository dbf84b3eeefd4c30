"""The meaning of an observation's tokens, for code that does not know the game."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from noisy_envs.arrays import Array, as_numpy, namespace
from noisy_envs.validation import unexpected


@dataclass(frozen=True)
class TokenSpec:
    """Description of an observation (N, D): N tokens with D features.

    The padding mask follows from the observation alone: if `padded`, a token is padding where its `padding_feature`
    equals `padding`.

    Attributes:
        num_tokens: N.
        features: names of the D features.
        roles: values of the last feature by role; empty if the game has no roles.
        query_index: index of the observing agent's own token, AdaPool's query.
        padding_feature: index of the feature that marks padding; with roles, the last one.
        padding: value of that feature in padding.
        padded: whether an observation can contain padding.

    Raises:
        ValueError: there are roles and `padding_feature` is not the last feature, or `padding` is not finite.
    """

    num_tokens: int
    features: tuple[str, ...]
    roles: dict[str, int]
    query_index: int = 0
    padding_feature: int = -1
    padding: float = -1.0
    padded: bool = True

    def __post_init__(self) -> None:
        """Check that the role is the last feature, where wrappers and agents look for it."""
        last = self.num_features - 1
        if self.roles and self.padding_feature not in (-1, last):
            raise unexpected("padding_feature", self.padding_feature, f"-1 or {last}, as there are roles")
        if not math.isfinite(self.padding):
            raise unexpected("padding", self.padding, "a finite number")

    @property
    def num_features(self) -> int:
        """Number of features, D."""
        return len(self.features)

    def check(self, observation: Array) -> None:
        """Raise ValueError unless every token (..., N, D) is padding or has one of the `roles`, if there are any.

        Wrappers that scale tokens break the roles, so call this once on the first observation; it waits for a GPU.
        """
        if not self.roles:
            return
        values = set(np.unique(as_numpy(observation[..., self.padding_feature])).tolist())
        wrong = values - {float(role) for role in self.roles.values()} - {self.padding}
        if wrong:
            name, roles = self.features[self.padding_feature], ", ".join(self.roles)
            raise ValueError(
                f"tokens: expected padding or a role ({roles}) as feature {name!r}, got {min(wrong):g}; "
                "scale features before they become tokens, or not at all"
            )

    def finite(self, observation: Array) -> Array:
        """Tell whether all tokens are finite: (..., N, D) -> bool (); padding may hold any value."""
        xp = namespace(observation)
        finite = xp.isfinite(observation)
        return xp.all(finite | ~self.mask(observation)[..., None] if self.padded else finite)

    def mask(self, observation: Array) -> Array:
        """Return the padding mask: (..., N, D) -> bool (..., N), False for padding."""
        feature = observation[..., self.padding_feature]
        if self.padded:
            return feature != self.padding
        xp = namespace(feature)
        return xp.ones_like(feature, dtype=xp.bool)
