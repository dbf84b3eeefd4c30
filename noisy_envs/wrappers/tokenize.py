"""Observations of other environments as tokens: numbers, rows of sets, and patches of images.

Shapes: `R` environments in a batch, `F` numbers of an observation in the order of `gymnasium.spaces.flatten`, `N`
tokens of `D` features each, of which the last is the role.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate

from noisy_envs.arrays import Array, namespace
from noisy_envs.tokens import SIGNAL, TokenSpec
from noisy_envs.validation import MAX_NUMBER, check_flag, plain
from noisy_envs.wrappers.episode_clock import Moment
from noisy_envs.wrappers.images import Patches, is_image
from noisy_envs.wrappers.transforms import Info, convert_like

PATCH_SIZE = 8  # pixels
RESERVED = ("query", "noise", "padding")  # roles that no part of an observation may have
REMEDY = "gymnasium.wrappers.TransformObservation converts it"


@dataclass
class Part:
    """The tokens of a part of an observation that is neither a Dict nor a Tuple.

    Attributes:
        roles: a role for each token, or one for all.
        features: names of the features, without the role.
        index: which of the part's numbers a token holds, (n, w); they follow the place.
        place: features (n, 2) that do not depend on the observation; (n, 0) if there are none.
        patches: how an image is divided; None otherwise.
    """

    roles: list[str]
    features: list[str]
    index: np.ndarray
    place: np.ndarray
    patches: Patches | None = None


class Tokenize:
    """Turns observations into tokens, after a query of zeros."""

    is_random = False

    def __init__(self, space: spaces.Space[Any], squash: bool, patch_size: int) -> None:
        """Prepare for observations of `space`.

        Raises:
            ValueError: it cannot be flattened to a vector of fixed length, or has images of another size.
        """
        squash = plain(squash)
        check_flag("squash", squash)
        self.parts = list(_parts(space, "", space, patch_size))
        names = [role for part in self.parts for role in part.roles]
        if not names:
            raise ValueError(f"{space}: expected at least one number")
        if len({*names, *RESERVED}) < len(names) + len(RESERVED):
            expected = f"features with different names, and none that is {', '.join(RESERVED)}"
            raise ValueError(f"{space}: expected {expected}, got {', '.join(names)}; {REMEDY}")
        roles = {"query": 0} | {name: number for number, name in enumerate(names, start=1)}
        num_tokens = 1 + sum(len(part.index) for part in self.parts)
        features = self._features()
        kinds = dict.fromkeys(names, SIGNAL)
        self.spec = TokenSpec(num_tokens, (*features, "role"), roles, padded=False, kinds=kinds)
        self._lay_out(roles)
        self._set_bounds(space, squash)
        self.takes_signal = isinstance(space, spaces.Box) and len(space.shape) > 1  # of a set or an image
        self.flat_space, self.flat_batch_space = space, batch_space(space, 1)

    def _features(self) -> list[str]:
        """Return the names of the features, of those of all parts if they are the same."""
        named = [part.features for part in self.parts]
        width = max(map(len, named))
        return named[0] if all(names == named[0] for names in named) else [f"value[{i}]" for i in range(width)]

    def _lay_out(self, roles: dict[str, int]) -> None:
        """Make tokens (N, D) without numbers, and find the places (F,) where the numbers of an observation belong."""
        self.template = np.zeros((self.spec.num_tokens, self.spec.num_features), np.float32)
        targets, token = [], 1
        for part in self.parts:
            rows = np.arange(token, token + len(part.index))
            num_places = part.place.shape[1]
            self.template[rows, :num_places] = part.place
            self.template[rows, -1] = [roles[name] for name in part.roles]
            target = np.empty(part.index.size, np.int64)
            target[part.index] = rows[:, None] * self.spec.num_features + num_places + np.arange(part.index.shape[1])
            targets.append(target)
            token = rows[-1] + 1
        self.target = np.concatenate(targets)

    def _set_bounds(self, space: spaces.Space[Any], squash: bool) -> None:
        """Find which numbers are scaled or squashed, and the bounds of all features."""
        flat = spaces.flatten_space(space)
        assert isinstance(flat, spaces.Box)
        is_pixel = np.concatenate([np.full(part.index.size, part.patches is not None) for part in self.parts])
        with np.errstate(over="ignore"):  # bounds beyond float32 become infinite
            low, high = flat.low.astype(np.float32), flat.high.astype(np.float32)
            span = high - low
        scaled = is_pixel & (span <= MAX_NUMBER)  # some environments name the largest number for no bound
        self.offset, self.span = np.where(scaled, low, 0), np.where(scaled & (span > 0), span, 1)
        low, high = np.where(scaled, 0, low), np.where(scaled, 1, high)
        self.squashed = ~np.isfinite(low) | ~np.isfinite(high) if squash else np.zeros(low.shape, np.bool_)
        self.scales, self.squashes = bool(scaled.any()), bool(self.squashed.any())
        self.bounds = tuple(np.where(self.squashed, np.tanh(bound), bound) for bound in (low, high))
        # what is constant has the bounds −1 and 1, since Gymnasium's checker warns about equal bounds
        lowest, highest = -np.ones_like(self.template), np.ones_like(self.template)
        lowest[:, -1], highest[:, -1] = 0, self.template[-1, -1]
        for box, bound in zip((lowest, highest), self.bounds, strict=True):
            box.reshape(-1)[self.target] = bound
        self.space = spaces.Box(lowest, highest, dtype=np.float32)

    def stack(self, observations: list[Any]) -> np.ndarray:
        """Flatten observations one by one: (R, F)."""
        flat: list[Any] = [spaces.flatten(self.flat_space, observation) for observation in observations]
        return np.stack(flat)

    def forget(self, rows: np.ndarray) -> None:
        """Do nothing: there is no history."""

    def read(self, observations: Any) -> Array:
        """Flatten the observations of a vector environment: (R, F)."""
        if isinstance(self.flat_space, spaces.Box):
            return namespace(observations).reshape(observations, (-1, len(self.target)))
        return self.stack(list(iterate(self.flat_batch_space, observations)))

    def apply(self, values: Any, signal: Array | None, moment: Moment) -> tuple[Array, Info]:
        """Write numbers (R, F) into tokens (R, N, D); the query, and what `signal` does not deny, count as signal.

        Args:
            values: numbers of R observations.
            signal: marks signal among the pixels (R, H, W) of an image, or the rows (R, N − 1) of a set; None if all is
                signal, as the numbers of all other observations are.
            moment: is not used.
        """
        xp = namespace(values)
        if values.dtype != xp.float32:
            with np.errstate(over="ignore"):
                values = xp.astype(values, xp.float32)
        if self.scales:
            values = (values - convert_like(self.offset, values)) / convert_like(self.span, values)
        if self.squashes:
            inside = xp.clip(xp.tanh(values), *(convert_like(bound, values) for bound in self.bounds))
            values = xp.where(convert_like(self.squashed, values), inside, values)
        tokens = xp.repeat(convert_like(self.template, values)[None], len(values), axis=0)
        tokens.reshape(len(values), -1)[:, convert_like(self.target, values)] = values  # a view
        mask = xp.ones(tokens.shape[:2], dtype=xp.bool, device=tokens.device)
        real = xp.float64 if xp is np else xp.float32  # as in this package's vector environments
        if signal is None or not self.takes_signal:
            return tokens, {"signal_mask": mask, "snr": xp.ones(len(tokens), dtype=real, device=tokens.device)}
        mask[:, 1:] = self._signal_tokens(signal)
        return tokens, {"signal_mask": mask, "snr": xp.mean(xp.astype(mask, real), axis=1)}

    def _signal_tokens(self, signal: Array) -> Array:
        """Tell which rows of a set are signal, or which patches have a pixel that is: bool (R, N − 1)."""
        shape, patches = self.flat_space.shape, self.parts[0].patches
        assert shape is not None
        expected = shape[: 1 if patches is None else 2]
        if tuple(signal.shape[1:]) != expected:
            what = "row" if patches is None else "pixel"
            got = f"expected shape {expected}, a bool for each {what}, got {tuple(signal.shape[1:])}"
            raise ValueError(f"info['signal_mask']: {got}")
        return signal if patches is None else namespace(signal).any(patches.split(signal), axis=-1)


def _parts(space: spaces.Space[Any], name: str, whole: spaces.Space[Any], patch_size: int) -> Iterator[Part]:
    """Yield the parts of a space, of which `name` is the path in the `whole`."""
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        inner = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for key, part in inner:
            yield from _parts(part, f"{name}.{key}" if name else str(key), whole, patch_size)
        return
    where = f"{space} in {whole}" if name else f"{space}"
    if not space.is_np_flattenable:
        raise ValueError(f"{where}: expected a space that can be flattened to a Box of fixed length; {REMEDY}")
    size = spaces.flatdim(space)
    if size == 0:
        return
    numbers = np.arange(size)
    if not isinstance(space, spaces.Box) or len(space.shape) < 2:
        roles = [f"{name or 'feature'}[{i}]" for i in range(size)]
        yield Part(roles, ["value"], numbers[:, None], np.zeros((size, 0)))
    elif is_image(space):
        patches = Patches.of(space, patch_size)
        index = patches.split(numbers.reshape(1, *space.shape))[0]
        yield Part([name or "patch"], ["row", "column", *patches.names], index, patches.places, patches)
    elif len(space.shape) == 2:
        features = [f"feature[{i}]" for i in range(space.shape[1])]
        yield Part([name or "element"], features, numbers.reshape(space.shape), np.zeros((len(space.low), 0)))
    else:
        hint = (
            REMEDY
            if name
            else f"gymnasium.wrappers.ReshapeObservation makes it {(math.prod(space.shape[:-2]), *space.shape[-2:])}"
        )
        raise ValueError(f"{where}: expected a Box with at most three axes, got shape {space.shape}; {hint}")
