"""The meaning of an observation's tokens, for code that does not know the game."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from noisy_envs.arrays import Array, as_numpy, namespace
from noisy_envs.validation import check_choice, unexpected

OWN, SIGNAL, NOISE, PADDING = "own", "signal", "noise", "padding"
EITHER = "signal or noise"  # the role does not tell: only `signal_mask` in the info does
NOISE_ROLES = ("own", "signal")  # which role noise has, an option of games and wrappers
# what the roles of all games and wrappers are; a role that is not named here is signal, such as "predator" or "prey"
KINDS = {"self": OWN, "query": OWN, "agent": NOISE, "obstacle": NOISE, "noise": NOISE, "padding": PADDING}


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
        kinds: what each role is: "own" (the agent's token or the query), "signal", "noise", "signal or noise" (both
            have it) or "padding". By default as in `KINDS`, which names the roles of all games; a role outside it is
            signal.

    Raises:
        ValueError: there are roles and `padding_feature` is not the last feature, `padding` is not finite, or a kind is
            unknown.
    """

    num_tokens: int
    features: tuple[str, ...]
    roles: dict[str, int]
    query_index: int = 0
    padding_feature: int = -1
    padding: float = -1.0
    padded: bool = True
    kinds: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that the role is the last feature, where wrappers and agents look for it; fill in the kinds."""
        last = self.num_features - 1
        if self.roles and self.padding_feature not in (-1, last):
            raise unexpected("padding_feature", self.padding_feature, f"-1 or {last}, as there are roles")
        if not math.isfinite(self.padding):
            raise unexpected("padding", self.padding, "a finite number")
        for kind in self.kinds.values():
            check_choice("kinds", kind, (OWN, SIGNAL, NOISE, EITHER, PADDING))
        names = [*self.roles, "padding"] if self.roles and self.padded else [*self.roles]
        kinds = {name: self.kinds.get(name, KINDS.get(name, SIGNAL)) for name in names}
        object.__setattr__(self, "kinds", kinds)

    def __str__(self) -> str:
        """Return an aligned text: the number of tokens, their features, and number and kind of each role."""
        features = ", ".join(_ends(run) for run in _runs(self.features, _stem))
        head = f"{self.num_tokens} tokens of {self.num_features} features: {features}"
        if not self.roles:
            feature = self.features[self.padding_feature]
            return f"{head}\nno roles; " + (
                f"padding where {feature} is {self.padding:g}" if self.padded else "no padding"
            )
        numbers = {name: f"{self.roles.get(name, self.padding):g}" for name in self.kinds}
        rows = [("role", "number", "is")]
        for run in _runs(self.kinds, lambda name: (_stem(name), self.kinds[name])):
            rows.append((_ends(run), _ends([numbers[name] for name in run]), self.kinds[run[0]]))
        name_width, number_width, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
        return "\n".join(
            [head, *(f"{name:<{name_width}}  {number:>{number_width}}  {kind}" for name, number, kind in rows)]
        )

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


def _stem(name: str) -> str:
    """Return the part of a name that those of its run share: "x[" of "x[3]"."""
    return name[: name.find("[") + 1] or name


def _runs(names: Iterable[str], key: Callable[[str], Any]) -> list[list[str]]:
    """Group neighbours of equal keys."""
    return [list(run) for _, run in itertools.groupby(names, key)]


def _ends(names: list[str]) -> str:
    """Return the first and the last of some names."""
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
