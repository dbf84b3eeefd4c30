"""Faults of tokens: disturbed features, dropped and duplicated tokens; the query is spared.

Shapes: `R` observations in a batch, `N` tokens of `D` features each, of which `V` are values (all but the role, if
there is one), `M` copies.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from gymnasium import spaces

from noisy_envs.arrays import Array, namespace
from noisy_envs.randomness import STREAM
from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import check_choice, check_count, check_flag, check_number, plain, unexpected
from noisy_envs.wrappers.episode_clock import Moment
from noisy_envs.wrappers.memory import EpisodeStore
from noisy_envs.wrappers.transforms import (
    MAX_GAUSSIAN,
    Info,
    TokenTransform,
    bounds_of_any_order,
    box_muller,
    check_may_be_padded,
    check_signal,
    draw_uniforms,
    info_of,
    padding_row,
    permute,
    random_order,
    unlike_padding,
    widened,
)

KINDS = ("gaussian", "dead", "dropped", "delayed", "permuted")
EACH_STEP = ("gaussian", "dropped")  # hit other values in each step; the others hit the same ones all the episode
MAX_DELAY = 1000  # steps


class Disturb(TokenTransform):
    """Disturbs values of tokens, but neither roles, padding nor the query."""

    is_random = True

    def __init__(
        self,
        space: spaces.Space[Any],
        spec: TokenSpec,
        num_envs: int,
        kind: str,
        probability: float,
        scale: float,
        delay: int,
    ) -> None:
        """Prepare for tokens of `spec` in `num_envs` environments.

        Raises:
            TypeError, ValueError: an option has a value that is not allowed.
        """
        super().__init__(space, spec)
        kind, probability, scale, delay = map(plain, (kind, probability, scale, delay))
        check_choice("kind", kind, KINDS)
        check_probability(probability)
        check_number("scale", scale, minimum=0)
        check_count("delay", delay, minimum=0, may_be_range=False, maximum=MAX_DELAY)
        self.options: dict[str, Any] = {"kind": kind, "probability": probability, "scale": scale, "delay": delay}
        self.kind, self.probability, self.scale, self.delay = kind, probability, scale, delay
        self.num_values = spec.num_features - bool(spec.roles)  # V
        count = spec.num_tokens * self.num_values
        self.draws = (count,) * {"gaussian": 3, "permuted": 2}.get(kind, 1)  # what is hit, and random numbers
        self.store = EpisodeStore(num_envs, 0, delay + 1)
        self.space = spaces.Box(*self._bounds(), dtype=np.float32)

    def forget(self, rows: np.ndarray) -> None:
        """Forget the history of environments (R,)."""
        self.store.forget(rows)

    def apply(self, tokens: Array, signal: Array | None, moment: Moment) -> tuple[Array, Info]:
        """Return disturbed tokens (R, N, D)."""
        xp = namespace(tokens)
        values = tokens[..., : self.num_values]
        drawn = draw_uniforms(moment if self.kind in EACH_STEP else moment.start, self.draws, tokens)
        u, *others = (xp.reshape(x, values.shape) for x in drawn)
        hit = (u < self.probability) & may_hit(self.spec, tokens)[..., None]
        if self.kind == "gaussian":
            disturbed = values + self.scale * box_muller(*others)
        elif self.kind == "permuted":
            disturbed = permuted(values, hit, others[0])
        elif self.kind == "delayed":
            disturbed = self._delayed(values, moment)
        else:
            disturbed = xp.zeros_like(values)
        values = xp.where(hit, unlike_padding(disturbed, self.spec), values)
        return xp.concat([values, tokens[..., self.num_values :]], axis=-1), {}

    def _delayed(self, values: Array, moment: Moment) -> Array:
        """Remember values (R, N, V), and return those of `delay` steps ago, or of the start of the episode."""
        num_tokens = values.shape[1]
        self.store.add(moment, values, np.full(len(moment.rows), num_tokens))
        step = np.maximum(moment.step - self.delay, 0)[:, None]
        return self.store.read(moment.rows[:, None], np.zeros_like(step), step, np.arange(num_tokens))

    def _bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lowest and highest tokens, (N, D) each."""
        low, high = self.low.copy(), self.high.copy()
        others = np.arange(len(low)) != self.spec.query_index
        hit = others, slice(self.num_values)
        if self.kind == "gaussian":
            with np.errstate(over="ignore"):
                low[hit], high[hit] = widened(low[hit], high[hit], self.scale * MAX_GAUSSIAN)
        elif self.kind == "permuted" and others.any():
            low[hit], high[hit] = low[hit].min(axis=0), high[hit].max(axis=0)
        if self.kind in ("dead", "dropped") or not self.spec.roles:  # then 0 may also replace what looks like padding
            low[hit], high[hit] = np.minimum(low[hit], 0), np.maximum(high[hit], 0)
        return low, high


class Drop(TokenTransform):
    """Turns random tokens into padding."""

    is_random = True

    def __init__(self, space: spaces.Space[Any], spec: TokenSpec, probability: float, frozen: bool) -> None:
        """Prepare for tokens of `spec`.

        Raises:
            TypeError, ValueError: an option has a value that is not allowed; or values of the game's tokens could be
                mistaken for padding.
        """
        super().__init__(space, spec)
        probability, frozen = map(plain, (probability, frozen))
        check_probability(probability)
        check_flag("frozen", frozen)
        check_may_be_padded("probability", probability, "tokens that may be padding", spec, self.low, self.high)
        self.options: dict[str, Any] = {"probability": probability, "frozen": frozen}
        self.probability, self.frozen = probability, frozen
        self.spec = dataclasses.replace(spec, padded=True)
        others = np.arange(spec.num_tokens) != spec.query_index
        low, high, row = self.low.copy(), self.high.copy(), padding_row(spec, self.low)
        low[others], high[others] = np.minimum(low[others], row), np.maximum(high[others], row)
        self.space = spaces.Box(low, high, dtype=np.float32)

    def apply(self, tokens: Array, signal: Array | None, moment: Moment) -> tuple[Array, Info]:
        """Return tokens (R, N, D), some as padding; the info has the mask of the signal that is left, and its share."""
        xp = namespace(tokens)
        present = self.spec.mask(tokens)
        signal = present if signal is None else signal
        check_signal(signal, tokens)
        (u,) = draw_uniforms(moment.start if self.frozen else moment, (self.spec.num_tokens,), tokens)
        dropped = (u < self.probability) & may_hit(self.spec, tokens)
        tokens = xp.where(dropped[..., None], padding_row(self.spec, tokens), tokens)
        return tokens, info_of(signal & ~dropped, present & ~dropped)


class Duplicate(TokenTransform):
    """Appends copies of random tokens, and puts all tokens in random order if `shuffle` is True."""

    is_random = True

    def __init__(self, space: spaces.Space[Any], spec: TokenSpec, num_copies: int, frozen: bool, shuffle: bool) -> None:
        """Prepare for tokens of `spec`.

        Raises:
            TypeError, ValueError: an option has a value that is not allowed; or there is no token but the query.
        """
        super().__init__(space, spec)
        num_copies, frozen, shuffle = map(plain, (num_copies, frozen, shuffle))
        check_count("num_copies", num_copies, minimum=0, may_be_range=False, maximum=STREAM)
        check_flag("frozen", frozen)
        check_flag("shuffle", shuffle)
        if spec.num_tokens == 1:
            raise ValueError(f"num_copies={num_copies}: expected an environment with more tokens than the query")
        self.options: dict[str, Any] = {"num_copies": num_copies, "frozen": frozen, "shuffle": shuffle}
        self.num_copies, self.frozen, self.shuffle = num_copies, frozen, shuffle
        self.inner_spec = spec
        self.spec = dataclasses.replace(spec, num_tokens=spec.num_tokens + num_copies)
        others = np.arange(spec.num_tokens) != spec.query_index
        bounds = [
            np.concatenate([bound, np.tile(extreme(bound[others], axis=0), (num_copies, 1))])
            for bound, extreme in ((self.low, np.min), (self.high, np.max))
        ]
        if shuffle:
            bounds = list(bounds_of_any_order(bounds[0], bounds[1], spec.query_index))
        self.space = spaces.Box(bounds[0], bounds[1], dtype=np.float32)

    def apply(self, tokens: Array, signal: Array | None, moment: Moment) -> tuple[Array, Info]:
        """Return tokens (R, N + M, D); the info has the mask of signal, copies of signal included, and its share."""
        xp, spec = namespace(tokens), self.inner_spec
        signal = spec.mask(tokens) if signal is None else signal
        check_signal(signal, tokens)
        drawn_at = moment.start if self.frozen else moment
        u, u_order = draw_uniforms(drawn_at, (self.num_copies, self.spec.num_tokens - 1), tokens)
        source = may_hit(spec, tokens)
        is_query = xp.arange(spec.num_tokens, device=tokens.device) == spec.query_index
        # padding, if there is any, comes next: without another token copies are padding
        first = xp.argsort(xp.astype(~source, xp.int64) + xp.astype(is_query, xp.int64), axis=1, stable=True)
        size = xp.sum(xp.astype(source, u.dtype), axis=1)[:, None]
        number = xp.astype(xp.floor(u * size), xp.int64)  # below the size, as uniforms have 24 bits
        index = xp.take_along_axis(first, number, axis=1)  # (R, M)
        copies, copied_signal = permute(index, tokens, signal)
        tokens, signal = xp.concat([tokens, copies], axis=1), xp.concat([signal, copied_signal], axis=1)
        if self.shuffle:
            tokens, signal = permute(random_order(u_order, spec.query_index), tokens, signal)
        return tokens, info_of(signal, self.spec.mask(tokens))


def check_probability(value: Any) -> None:
    """Raise unless `value` is a number from 0 to 1."""
    check_number("probability", value, minimum=0)
    if value > 1:
        raise unexpected("probability", value, "at most 1")


def may_hit(spec: TokenSpec, tokens: Array) -> Array:
    """Return a mask of all tokens but the query and padding: (R, N, D) -> bool (R, N)."""
    return spec.mask(tokens) & (namespace(tokens).arange(spec.num_tokens, device=tokens.device) != spec.query_index)


def permuted(values: Array, hit: Array, u: Array) -> Array:
    """Exchange the values that are hit, bool (R, N, V), among tokens, in the order of uniforms (R, N, V)."""
    xp = namespace(values)
    in_order = xp.argsort(xp.astype(~hit, xp.int64), axis=1, stable=True)  # tokens that are hit, then the others
    at_random = xp.argsort(xp.where(hit, u, xp.full_like(u, 2.0)), axis=1, stable=True)
    source = xp.take_along_axis(at_random, xp.argsort(in_order, axis=1), axis=1)
    return xp.take_along_axis(values, source, axis=1)
