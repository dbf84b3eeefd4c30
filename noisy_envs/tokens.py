"""What the tokens of an observation mean, for code that reads them without knowing the game."""

from __future__ import annotations

from dataclasses import dataclass

from noisy_envs.arrays import Array


@dataclass(frozen=True)
class TokenSpec:
    """Names for an observation of `num_tokens` rows and as many columns as there are `features`.

    The mask follows from the observation alone: a row whose `marker` feature is `padding` is no token.
    """

    num_tokens: int
    features: tuple[str, ...]
    roles: dict[str, int]  # name -> value of the role feature; empty where a game has none
    query: int = 0  # row of the observing agent's own token, AdaPool's query
    marker: int = -1  # column that tells padding
    padding: float = -1.0
    padded: bool = True  # whether rows can be padding at all

    @property
    def num_features(self) -> int:
        """Columns of an observation."""
        return len(self.features)

    def mask(self, observation: Array) -> Array:
        """Tell tokens from padding: (..., N, D) -> bool (..., N), True for a token."""
        return observation[..., self.marker] != self.padding
