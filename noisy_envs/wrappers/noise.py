"""Noise tokens that are added to batches of tokens.

Shapes: `B` environments, `R` of them in a batch, `N` tokens of `D` features each, of which `V` are values (all but the
role, if there is one), `M` noise tokens.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

from noisy_envs.arrays import Array, as_numpy, namespace
from noisy_envs.randomness import STREAM
from noisy_envs.tokens import EITHER, NOISE_ROLES, SIGNAL, TokenSpec
from noisy_envs.validation import Count, check_choice, check_count, check_flag, check_number, highest, lowest, plain
from noisy_envs.wrappers.episode_clock import Moment
from noisy_envs.wrappers.memory import EpisodeConstant, EpisodeStore, Follower, SignalReservoir, signal_first
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

DISTRIBUTIONS = ("gaussian", "uniform", "marginal", "replay", "copy")
SAMPLED = ("marginal", "replay", "copy")  # noise tokens are signal tokens of earlier steps
CORRELATIONS = ("none", "reward", "action")
SCHEDULES = ("constant", "growing", "reversed", "fluctuating")
REPLAY_EPISODES = 16  # earlier episodes that are kept, or fewer, at least one, …
REPLAY_NUMBERS = 2**22  # … so that those of an environment have about so many numbers
REPLAY_STEPS = 1024  # of each episode, its last ones
MAX_DELAY = 1000  # steps
MAX_EPISODES = 2**31  # of a schedule


@dataclass(frozen=True)
class NoiseOptions:
    """Options of `AddNoiseTokens`, which explains them.

    Raises:
        TypeError, ValueError: an option has a value that is not allowed.
    """

    num_noise: Count
    distribution: str = "gaussian"
    scale: float = 1.0
    frozen: bool = False
    shuffle: bool = True
    noise_role: str = "own"
    delay: int = 1
    correlation: str = "none"
    correlated: bool = True
    schedule: str = "constant"
    schedule_episodes: int = 1000

    def __post_init__(self) -> None:
        """Check the options."""
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        check_count("num_noise", self.num_noise, minimum=0)
        check_choice("distribution", self.distribution, DISTRIBUTIONS)
        check_number("scale", self.scale, **({"minimum": 0} if self.distribution == "copy" else {"above": 0}))
        check_choice("noise_role", self.noise_role, NOISE_ROLES)
        check_choice("correlation", self.correlation, CORRELATIONS)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_count("delay", self.delay, minimum=0, may_be_range=False, maximum=MAX_DELAY)
        check_count("schedule_episodes", self.schedule_episodes, 1, may_be_range=False, maximum=MAX_EPISODES)
        for name in ("frozen", "shuffle", "correlated"):
            check_flag(name, getattr(self, name))

    def number(self, episode: np.ndarray) -> np.ndarray:
        """Return the number of noise tokens that the schedule sets for the episodes, of the same shape."""
        length = self.schedule_episodes
        if self.schedule == "fluctuating":
            phase = episode % length
            progress = 2 * np.minimum(phase, length - phase)
        else:
            progress = np.minimum(episode, length)
        low, high = lowest(self.num_noise), highest(self.num_noise)
        grown = (high - low) * progress // length
        return high - grown if self.schedule == "reversed" else low + grown


class AddNoise(TokenTransform):
    """Appends noise tokens, and puts all tokens in random order if `shuffle` is True."""

    is_random = True

    def __init__(
        self,
        space: spaces.Space[Any],
        spec: TokenSpec,
        action_space: spaces.Space[Any],
        num_envs: int,
        options: NoiseOptions,
    ) -> None:
        """Prepare for tokens of `spec` in `num_envs` environments.

        Raises:
            ValueError: there are too many noise tokens; their number is a range, but values of the game's tokens could
                be mistaken for padding; or they follow actions that are neither Discrete nor a Box.
        """
        super().__init__(space, spec)
        check_count("num_noise", options.num_noise, minimum=0, maximum=STREAM // spec.num_features)
        self.options = options
        self.inner_spec = spec
        self.max_noise = highest(options.num_noise)  # M
        self.num_varies = lowest(options.num_noise) < self.max_noise
        self.num_values = spec.num_features - bool(spec.roles)  # V
        self.draws_role = bool(spec.roles) and options.noise_role == "signal"
        self.role = spec.roles.get("noise", 1 + max(spec.roles.values(), default=0))
        roles = spec.roles | {"noise": self.role} if spec.roles and not self.draws_role else spec.roles
        signal_roles = [name for name, kind in spec.kinds.items() if kind == SIGNAL]
        if self.num_varies:
            check_may_be_padded("num_noise", options.num_noise, "one number", spec, self.low, self.high)
        self.spec = dataclasses.replace(
            spec,
            num_tokens=spec.num_tokens + self.max_noise,
            roles=roles,
            padded=spec.padded or self.num_varies,
            kinds=spec.kinds | (dict.fromkeys(signal_roles, EITHER) if self.draws_role else {}),
        )
        self.follower: Follower | None = None
        if options.correlation != "none":
            self.follower = Follower(num_envs, options.correlation, options.correlated, action_space)
        self.constant = EpisodeConstant(num_envs)
        self.reservoir = SignalReservoir(num_envs, spec.num_tokens, self.num_values + self.draws_role)
        num_earlier, num_steps = 0, options.delay + 1
        if options.distribution == "replay":
            affordable = REPLAY_NUMBERS // (REPLAY_STEPS * spec.num_tokens * spec.num_features)
            num_earlier, num_steps = max(1, min(REPLAY_EPISODES, affordable)), REPLAY_STEPS
        self.store = EpisodeStore(num_envs, num_earlier, num_steps)
        self._count_draws()
        low, high = self._noise_bounds()
        bounds = np.concatenate([self.low, low]), np.concatenate([self.high, high])
        self.space = spaces.Box(
            *(bounds_of_any_order(*bounds, spec.query_index) if options.shuffle else bounds), dtype=np.float32
        )

    def _count_draws(self) -> None:
        """Set how many uniforms each stream has: in each step, and at the start of an episode."""
        options, count = self.options, self.max_noise
        values = count * self.num_values
        first, second = {
            "gaussian": (values, values), "uniform": (values, 0), "marginal": (count, count), "replay": (0, 0),
            "copy": (values, values),
        }[options.distribution]  # fmt: skip
        self.step_draws = first, self.spec.num_tokens - 1, 0, 0, second
        draws_number = self.num_varies and options.schedule == "constant"
        picks = options.distribution in ("replay", "copy") or (self.draws_role and options.distribution not in SAMPLED)
        self.start_draws = 0, 0, 0, int(draws_number), 0, count * picks, int(options.distribution == "replay")
        self.draws_at_start = any(self.start_draws)

    def forget(self, rows: np.ndarray) -> None:
        """Forget the history of environments (R,)."""
        self.reservoir.forget(rows)
        self.store.forget(rows)
        if self.follower is not None:
            self.follower.forget(rows)

    def apply(self, tokens: Array, signal: Array | None, moment: Moment) -> tuple[Array, Info]:
        """Return tokens (R, N + M, D); the info has the mask of signal, and its share of all tokens but padding."""
        xp, options = namespace(tokens), self.options
        if signal is None:
            signal = self.inner_spec.mask(tokens)
        check_signal(signal, tokens)
        u, u_order, _, _, u_second = draw_uniforms(moment.start if options.frozen else moment, self.step_draws, tokens)
        at_start: tuple[Array, ...] = (u,) * 7  # unused, unless any is drawn
        if self.draws_at_start:
            at_start = draw_uniforms(moment.start, self.start_draws, tokens)
        noise = self._noise(tokens, signal, moment, (u, u_second), at_start[5:])
        noise = self._pad(noise, moment, at_start[3])
        tokens = xp.concat([tokens, noise], axis=1)
        signal = xp.concat([signal, xp.zeros_like(noise[..., 0], dtype=xp.bool)], axis=1)
        if options.shuffle:
            tokens, signal = permute(random_order(u_order, self.spec.query_index), tokens, signal)
        return tokens, info_of(signal, self.spec.mask(tokens))

    def _noise(
        self,
        tokens: Array,
        signal: Array,
        moment: Moment,
        u: tuple[Array, Array],
        u_start: tuple[Array, ...],
    ) -> Array:
        """Return noise tokens (R, M, D), by the uniforms of the step and those of the episode's start."""
        xp, options = namespace(tokens), self.options
        shape = len(tokens), self.max_noise, self.num_values
        if options.distribution in SAMPLED:
            sampled = self._sampled(tokens, signal, moment, u, u_start)
            values, role = sampled[..., : self.num_values], sampled[..., self.num_values :]
        else:
            values = xp.reshape(box_muller(*u) if options.distribution == "gaussian" else 2 * u[0] - 1, shape)
            role = self._role_of_start(tokens, signal, moment, u_start[0]) if self.draws_role else None
        if options.distribution == "copy":
            values = values + options.scale * xp.reshape(box_muller(*u), shape)
        else:
            values = values * options.scale
        if self.follower is not None:
            values[..., 0] += self.follower.numbers(moment, values)[:, None]
        if not self.inner_spec.roles:
            return unlike_padding(values, self.spec)
        return xp.concat([values, role if self.draws_role else xp.full_like(values[..., :1], self.role)], axis=-1)

    def _pad(self, noise: Array, moment: Moment, u: Array) -> Array:
        """Turn noise tokens (R, M, D) beyond the episode's number into padding; it may follow from uniforms (R, 1)."""
        options = self.options
        if not self.num_varies:
            return noise
        xp = namespace(noise)
        if options.schedule == "constant":
            low, high = lowest(options.num_noise), self.max_noise
            number = low + xp.floor(u * (1 + high - low))  # (R, 1)
        else:
            number = xp.asarray(options.number(moment.episode), device=noise.device)[:, None]
        absent = xp.arange(self.max_noise, device=noise.device) >= number
        return xp.where(absent[..., None], padding_row(self.inner_spec, noise), noise)

    def _sources(self, tokens: Array, signal: Array) -> tuple[Array, np.ndarray]:
        """Return tokens that noise may resemble, without a role if it has its own, and how many there are, (R,).

        The query is none of them: its values are constant, or relative to the agent itself.
        """
        xp = namespace(tokens)
        source = signal & (xp.arange(self.inner_spec.num_tokens, device=signal.device) != self.inner_spec.query_index)
        return signal_first(tokens if self.draws_role else tokens[..., : self.num_values], source)

    def _sampled(
        self, tokens: Array, signal: Array, moment: Moment, u: tuple[Array, Array], u_start: tuple[Array, ...]
    ) -> Array:
        """Remember the signal of a step, and return signal tokens of known steps: (R, M, V), with roles (R, M, D)."""
        xp, options = namespace(tokens), self.options
        values, sizes = self._sources(tokens, signal)
        if options.distribution == "marginal":
            *_, u_slot = draw_uniforms(moment, (0, 0, 1), tokens)
            self.reservoir.add(moment, values, sizes, u_slot[:, 0])
            sampled, known = self.reservoir.sample(moment.rows, *u)
        else:
            self.store.add(moment, values, sizes)
            played = self._replayed if options.distribution == "replay" else self._copied
            sampled, known = played(moment, *map(as_numpy, u_start))
        if not known.all():
            sampled = xp.where(xp.asarray(known, device=tokens.device)[..., None], sampled, self._unknown(tokens))
        return self.constant(sampled, moment) if options.frozen else sampled

    def _replayed(self, moment: Moment, u_token: np.ndarray, u_episode: np.ndarray) -> tuple[Array, np.ndarray]:
        """Return tokens of the same step of earlier episodes, or of earlier steps of the first episode."""
        rows, step = moment.rows[:, None], moment.step[:, None]
        available = self.store.available(rows)  # (R, 1)
        is_first = available == 0
        num_sources = np.where(is_first, REPLAY_EPISODES, available)
        # neighbouring noise tokens play different episodes, as two equal tokens would tell that they are noise
        offset = np.floor(u_episode.astype(np.float64) * num_sources).astype(np.int64)
        back = 1 + (offset + np.arange(self.max_noise)) % num_sources  # (R, M)
        lagged = np.maximum(step - back, 0)
        back = np.where(is_first, 0, self.store.longer(rows, np.where(is_first, 1, back), step))
        step = np.where(is_first, lagged, step % self.store.length(rows, back))
        return self._read(rows, back, step, u_token, num_sources)

    def _copied(self, moment: Moment, u_token: np.ndarray, _: np.ndarray) -> tuple[Array, np.ndarray]:
        """Return tokens of `delay` steps ago, or of the start of the episode."""
        step = np.maximum(moment.step[:, None] - self.options.delay, 0)
        return self._read(moment.rows[:, None], np.zeros_like(step), step, u_token, np.ones_like(step))

    def _read(
        self, rows: np.ndarray, back: np.ndarray, step: np.ndarray, u: np.ndarray, num_sources: np.ndarray
    ) -> tuple[Array, np.ndarray]:
        """Read a token of each step, the same in all steps of an episode; tell whether there was any, bool (R, M).

        Noise tokens j, j + num_sources, ... show the same step, and therefore different tokens of it.
        """
        number = np.arange(self.max_noise)
        size = self.store.size(rows, back, step)
        u = np.take_along_axis(u, number % num_sources, axis=1).astype(np.float64)
        token = (np.floor(u * size).astype(np.int64) + number // num_sources) % np.maximum(size, 1)
        return self.store.read(rows, back, step, token), np.broadcast_to(size > 0, token.shape)

    def _role_of_start(self, tokens: Array, signal: Array, moment: Moment, u: Array) -> Array:
        """Return the role (R, M, 1) of a signal token at the start of the episode, by uniforms (R, M)."""
        xp = namespace(tokens)
        values, sizes = self._sources(tokens, signal)
        size = xp.asarray(sizes, dtype=u.dtype, device=tokens.device)[:, None]
        index = xp.astype(xp.floor(u * size), xp.int64)  # below the size, as uniforms have 24 bits
        role = xp.take_along_axis(values[..., -1], index, axis=1)[..., None]
        role = xp.where(size[..., None] > 0, role, self._unknown(tokens)[..., -1:])
        return self.constant(role, moment)

    def _unknown(self, tokens: Array) -> Array:
        """Return what a noise token is before there was signal, (R, 1, V or D): zeros, with the role of the query."""
        xp = namespace(tokens)
        query = tokens[:, self.inner_spec.query_index, None]
        nothing = xp.zeros_like(query[..., : self.num_values])
        return xp.concat([nothing, query[..., self.num_values :]], axis=-1) if self.draws_role else nothing

    def _noise_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lowest and highest values of noise, (M, D) each."""
        options, marker = self.options, self.inner_spec.padding_feature
        if options.distribution in SAMPLED:
            low, high = self.low[:, : self.num_values], self.high[:, : self.num_values]
            if options.distribution == "copy":
                low, high = widened(low, high, options.scale * MAX_GAUSSIAN)
            else:
                with np.errstate(over="ignore"):  # bounds may be the largest numbers of float32
                    low, high = options.scale * low, options.scale * high
            low, high = np.minimum(low.min(axis=0), 0), np.maximum(high.max(axis=0), 0)  # 0 as long as it is empty
        else:
            size = options.scale * (MAX_GAUSSIAN if options.distribution == "gaussian" else 1.0)
            high = np.full(self.num_values, size * (1 + 1e-6))  # a margin for rounding to float32
            low = -high
        if self.follower is not None:
            low, high = low.copy(), high.copy()
            low[0], high[0] = widened(low[0], high[0], max(0, -self.follower.low), max(0, self.follower.high))
        if self.inner_spec.roles:
            highest_role = self.high[:, marker].max() if self.draws_role else self.role
            low, high = np.append(low, self.low[:, marker].min()), np.append(high, highest_role)
        if self.num_varies:
            row = padding_row(self.inner_spec, low)
            low, high = np.minimum(low, row), np.maximum(high, row)
        with np.errstate(over="ignore"):
            return tuple(np.tile(bound.astype(np.float32), (self.max_noise, 1)) for bound in (low, high))  # type: ignore[return-value]
