"""Noise tokens that are added to batches of tokens.

Shapes: `B` environments, `R` of them in a batch, `N` tokens of `D` features each, of which `V` are values (all but the
role, if there is one), `M` noise tokens.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from gymnasium import spaces

from noisy_envs.arrays import Array, as_numpy, namespace, outside_inference_mode
from noisy_envs.randomness import STREAM
from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import Count, check_choice, check_count, check_flag, check_number, highest, lowest, plain
from noisy_envs.wrappers.episode_clock import Moment
from noisy_envs.wrappers.transforms import (
    Info,
    TokenTransform,
    bounds_of_any_order,
    box_muller,
    check_signal,
    convert_like,
    draw_uniforms,
    permute,
    random_order,
)

DISTRIBUTIONS = ("gaussian", "uniform", "marginal")
MAX_GAUSSIAN = math.sqrt(48 * math.log(2))  # standard deviations: the largest that uniforms of 24 bits can give
RESERVOIR_SIZE = 128  # steps of an environment that are kept for the marginal distribution
RESERVOIR_HORIZON = 8192  # steps after which it forgets


class AddNoise(TokenTransform):
    """Appends noise tokens, and puts all tokens in random order if `shuffle` is True."""

    is_random = True

    def __init__(
        self,
        space: spaces.Space[Any],
        spec: TokenSpec,
        num_envs: int,
        num_noise: Count,
        distribution: str,
        scale: float,
        frozen: bool,
        shuffle: bool,
    ) -> None:
        """Prepare for tokens of `spec` in `num_envs` environments.

        Raises:
            ValueError: an option has a value that is not allowed; or the number of noise tokens is a range, but values
                of the game's tokens could be mistaken for padding.
        """
        super().__init__(space, spec)
        num_noise, scale, frozen, shuffle = map(plain, (num_noise, scale, frozen, shuffle))
        check_count("num_noise", num_noise, minimum=0, maximum=STREAM // spec.num_features)
        check_choice("distribution", distribution, DISTRIBUTIONS)
        check_number("scale", scale, above=0)
        check_flag("frozen", frozen)
        check_flag("shuffle", shuffle)
        self.num_noise, self.distribution, self.scale = num_noise, distribution, scale
        self.frozen, self.shuffle = frozen, shuffle
        self.options: dict[str, Any] = {
            "num_noise": num_noise, "distribution": distribution, "scale": scale, "frozen": frozen, "shuffle": shuffle
        }  # fmt: skip
        self.num_envs = num_envs
        self.max_noise = highest(num_noise)
        self.varies = lowest(num_noise) < self.max_noise
        self.num_values = spec.num_features - bool(spec.roles)  # V
        count = self.max_noise * (1 if distribution == "marginal" else self.num_values)
        self.value_draws = count, 0 if distribution == "uniform" else count
        self.role = spec.roles.get("noise", 1 + max(spec.roles.values(), default=0))
        roles = spec.roles | {"noise": self.role} if spec.roles else {}
        self.inner_spec = spec
        if self.varies:
            self._check_padding()
        self.spec = dataclasses.replace(
            spec, num_tokens=spec.num_tokens + self.max_noise, roles=roles, padded=spec.padded or self.varies
        )
        low, high = self._noise_bounds()
        bounds = np.concatenate([self.low, low]), np.concatenate([self.high, high])
        self.space = spaces.Box(
            *(bounds_of_any_order(*bounds, spec.query_index) if shuffle else bounds), dtype=np.float32
        )
        is_marginal = distribution == "marginal"
        self.reservoir = SignalReservoir(num_envs, spec.num_tokens, self.num_values) if is_marginal else None
        self.frozen_values: Array | None = None  # (B, M, V), for "marginal" noise that is frozen

    def forget(self, rows: np.ndarray) -> None:
        """Forget the history of environments (R,)."""
        if self.reservoir is not None:
            self.reservoir.num_steps[rows] = 0

    def apply(self, tokens: Array, signal: Array | None, moment: Moment) -> tuple[Array, Info]:
        """Return tokens (R, N + M, D); the info has the mask of signal, and its share of all tokens but padding."""
        xp = namespace(tokens)
        if signal is None:
            signal = self.inner_spec.mask(tokens)
        check_signal(signal, tokens)
        drawn_at = moment.start if self.frozen else moment
        first, second = self.value_draws
        u, u_order, *_, u_second = draw_uniforms(drawn_at, (first, self.spec.num_tokens - 1, 0, 0, second), tokens)
        if self.reservoir is None:
            values = box_muller(u, u_second) if self.distribution == "gaussian" else 2 * u - 1
            values = xp.reshape(values, (len(tokens), self.max_noise, self.num_values))
        else:
            values = self._marginal_values(self.reservoir, tokens, signal, u, u_second, moment)
        noise = self._to_tokens(values * self.scale, moment)
        tokens = xp.concat([tokens, noise], axis=1)
        signal = xp.concat([signal, xp.zeros_like(noise[..., 0], dtype=xp.bool)], axis=1)
        if self.shuffle:
            tokens, signal = permute(random_order(u_order, self.spec.query_index), tokens, signal)
        real = xp.float64 if xp is np else xp.float32  # as in this package's vector environments
        num_signal, num_tokens = (xp.sum(xp.astype(x, xp.int64), axis=-1) for x in (signal, self.spec.mask(tokens)))
        return tokens, {"signal_mask": signal, "snr": xp.astype(num_signal, real) / num_tokens}

    def _check_padding(self) -> None:
        """Raise ValueError if a token could be mistaken for padding, in a game without padding and roles."""
        spec = self.inner_spec
        low, high = self.low[:, spec.padding_feature].min(), self.high[:, spec.padding_feature].max()
        if not spec.padded and not spec.roles and low <= spec.padding <= high:
            raise ValueError(
                f"num_noise={self.num_noise}: expected one number, or tokens with roles, since feature "
                f"{spec.features[spec.padding_feature]!r} may be {spec.padding:g} without being padding"
            )

    def _to_tokens(self, values: Array, moment: Moment) -> Array:
        """Turn values (R, M, V) into noise tokens (R, M, D); those beyond the episode's number become padding."""
        xp = namespace(values)
        if self.inner_spec.roles:
            noise = xp.concat([values, xp.full_like(values[..., :1], self.role)], axis=-1)
        elif not self.spec.padded:
            noise = values
        else:  # noise must not look like padding
            noise, marker = values, values[..., self.inner_spec.padding_feature]
            is_padding = marker == self.inner_spec.padding
            noise[..., self.inner_spec.padding_feature] = xp.where(is_padding, xp.zeros_like(marker), marker)
        if self.varies:
            *_, u = draw_uniforms(moment.start, (0, 0, 0, 1), values)
            number = lowest(self.num_noise) + xp.floor(u * (1 + self.max_noise - lowest(self.num_noise)))  # (R, 1)
            absent = xp.arange(self.max_noise, device=u.device) >= number
            noise = xp.where(absent[..., None], self._padding_row(noise), noise)
        return noise

    def _marginal_values(
        self, reservoir: SignalReservoir, tokens: Array, signal: Array, u_step: Array, u_token: Array, moment: Moment
    ) -> Array:
        """Add the signal of a step to the reservoir, and sample values (R, M, V) from it by uniforms (R, M)."""
        xp = namespace(tokens)
        # without the query: its values are constant, or relative to the agent itself
        source = signal & (xp.arange(self.inner_spec.num_tokens, device=signal.device) != self.inner_spec.query_index)
        values = tokens[..., : self.inner_spec.padding_feature] if self.inner_spec.roles else tokens
        *_, u_slot = draw_uniforms(moment, (0, 0, 1), tokens)
        reservoir.add(moment.rows, moment.is_new, values, source, u_slot[:, 0])
        sampled = reservoir.sample(moment.rows, u_step, u_token)
        if not self.frozen:
            return sampled
        if self.frozen_values is None:
            shape = self.num_envs, self.max_noise, self.num_values
            with outside_inference_mode(sampled):
                self.frozen_values = xp.zeros(shape, dtype=sampled.dtype, device=sampled.device)
        starts = np.flatnonzero(moment.is_new & (moment.step == 0))
        self.frozen_values[convert_like(moment.rows[starts], sampled)] = sampled[convert_like(starts, sampled)]
        return self.frozen_values[convert_like(moment.rows, sampled)]

    def _padding_row(self, like: Array) -> Array:
        """Return a row (D,) of padding: zeros and the padding role as in the particle games, or as in BoxWorld."""
        row = namespace(like).zeros_like(like[0, 0])
        if not self.inner_spec.roles:
            row = row + self.inner_spec.padding
        row[self.inner_spec.padding_feature] = self.inner_spec.padding
        return row

    def _noise_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lowest and highest values of noise, (M, D) each."""
        if self.distribution == "marginal":
            with np.errstate(over="ignore"):  # bounds may be the largest numbers of float32
                low, high = (self.scale * bound[:, : self.num_values] for bound in (self.low, self.high))
            low, high = np.minimum(low.min(axis=0), 0), np.maximum(high.max(axis=0), 0)  # 0 as long as it is empty
        else:
            size = self.scale * (MAX_GAUSSIAN if self.distribution == "gaussian" else 1.0)
            high = np.full(self.num_values, size * (1 + 1e-6))  # a margin for rounding to float32
            low = -high
        if self.inner_spec.roles:
            low, high = np.append(low, self.low[:, self.inner_spec.padding_feature].min()), np.append(high, self.role)
        if self.varies:
            row = self._padding_row(low[None, None])
            low, high = np.minimum(low, row), np.maximum(high, row)
        return tuple(np.tile(bound.astype(np.float32), (self.max_noise, 1)) for bound in (low, high))  # type: ignore[return-value]


class SignalReservoir:
    """A random sample of past steps of each of B environments, with the signal tokens in them.

    Noise sampled from it has the distribution of the signal itself, not only its mean and deviation: a noise token has
    all values of one past signal token, so neither a feature nor a pair of features tells it apart by scale. The sample
    is taken from all steps since the seed (Vitter's algorithm R, where a step is one item). After `RESERVOIR_HORIZON`
    steps it forgets at that rate, to follow the observations of a better policy. The last few steps would be enough for
    the scale, but they contain information about the current episode, which noise must not have.
    """

    def __init__(self, num_envs: int, num_tokens: int, num_values: int) -> None:
        """Start empty."""
        self.shape = num_envs, RESERVOIR_SIZE, num_tokens, num_values
        self.num_steps = np.zeros(num_envs, np.int64)  # steps with signal since the seed
        self.sizes = np.zeros(self.shape[:2], np.int64)  # signal tokens of each step in the sample
        self.values: Any = None  # signal first; made when the first tokens tell library and device

    def add(self, rows: np.ndarray, is_new: np.ndarray, values: Array, signal: Array, u: Array) -> None:
        """Add a step of the environments where `is_new` (R,): values (R, N, V) of the tokens `signal` (R, N)."""
        xp = namespace(values)
        if self.values is None:
            with outside_inference_mode(values):
                self.values = xp.zeros(self.shape, dtype=values.dtype, device=values.device)
        sizes = as_numpy(xp.sum(xp.astype(signal, xp.int64), axis=1))
        is_new = is_new & (sizes > 0)
        count = self.num_steps[rows]
        slot = np.floor(as_numpy(u).astype(np.float64) * np.minimum(count + 1, RESERVOIR_HORIZON)).astype(np.int64)
        slot = np.where(count < RESERVOIR_SIZE, count, slot)
        added = np.flatnonzero(is_new & (slot < RESERVOIR_SIZE))
        order = xp.argsort(xp.astype(~signal, xp.int64), axis=1, stable=True)
        signal_first = xp.take_along_axis(values, order[..., None], axis=1)
        index = convert_like(rows[added], values), convert_like(slot[added], values)
        self.values[index] = signal_first[convert_like(added, values)]
        self.sizes[rows[added], slot[added]] = sizes[added]
        self.num_steps[rows] += is_new

    def sample(self, rows: np.ndarray, u_step: Array, u_token: Array) -> Array:
        """Sample values of tokens (R, M, V) by uniforms (R, M), one for the step and one for the token; 0 if empty."""
        like, u_step, u_token = u_step, *(as_numpy(u).astype(np.float64) for u in (u_step, u_token))
        step = np.floor(u_step * np.minimum(self.num_steps[rows], RESERVOIR_SIZE)[:, None]).astype(np.int64)
        token = np.floor(u_token * self.sizes[rows[:, None], step]).astype(np.int64)
        index = (rows[:, None] + 0 * step, step, token)
        sampled = self.values[tuple(convert_like(i, like) for i in index)]
        sampled[convert_like(self.num_steps[rows] == 0, like)] = 0  # the entries there are from before the seed
        return sampled
