"""The rules of the wrappers, over batches of observations: a single environment is a batch of one.

`B` is the number of worlds, `R` of those looked at, `N` of tokens, `D` of features, of which `V` are values (all but
the role, where there is one), `M` of noise tokens. Nothing here knows Gymnasium's clock or its layout of `info`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate

from noisy_envs.arrays import Array, as_numpy, namespace, outside_inference_mode
from noisy_envs.randomness import STREAM, uniforms
from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import Count, check_choice, check_count, check_flag, check_number, highest, lowest, plain
from noisy_envs.wrappers.episode_clock import Moment

DISTRIBUTIONS = ("gaussian", "uniform", "marginal")
TALLEST = math.sqrt(48 * math.log(2))  # standard deviations: a uniform number of 24 bits gives no larger Gaussian
MEMORY = 128  # steps that the marginal remembers of a world
HORIZON = 8192  # steps in which it forgets
Facts = dict[str, Array]  # what `info` tells of R worlds: "signal_mask" bool (R, N), "snr" (R,)


class Rule(Protocol):
    """What a wrapper does to observations."""

    space: Any  # of one observation that the rule gives
    spec: TokenSpec
    draws: bool  # whether chance has a part

    def batch(self, observations: list[Any]) -> Any:
        """Put observations of R single worlds together as `show` takes them."""

    def read(self, observations: Any) -> Any:
        """Return observations of a vector environment as `show` takes them."""

    def forget(self, rows: np.ndarray) -> None:
        """Drop what is remembered of worlds (R,), which begin with a new seed."""

    def show(self, observations: Any, signal: Array | None, moment: Moment) -> tuple[Any, Facts]:
        """Change observations of R worlds, whose tokens `signal`, bool (R, N), carry signal, where this is known."""


class Tokenize:
    """Turn each number of a flat observation into a token: its value, and which feature it is."""

    draws = False

    def __init__(self, space: spaces.Space[Any], squash: bool) -> None:
        """Prepare for observations of `space`.

        Raises:
            ValueError: they cannot be flattened to a vector of fixed length.
        """
        squash = plain(squash)
        check_flag("squash", squash)
        names = feature_names(space)
        if len(set(names)) < len(names):
            raise ValueError(f"{space}: two features have one name, in {', '.join(names)}")
        flat = spaces.flatten_space(space)
        assert isinstance(flat, spaces.Box)
        with np.errstate(over="ignore"):  # what float32 cannot hold is infinite
            low, high = flat.low.astype(np.float32), flat.high.astype(np.float32)
        self.squashed = ~np.isfinite(low) | ~np.isfinite(high) if squash else np.zeros(low.shape, np.bool_)
        self.bounds = tuple(np.where(self.squashed, np.tanh(bound), bound) for bound in (low, high))
        roles = {"query": 0} | {name: number for number, name in enumerate(names, start=1)}
        self.spec = TokenSpec(len(roles), ("value", "role"), roles, padded=False)
        self.roles = np.arange(len(roles), dtype=np.float32)  # (N,)
        # the query is 0 and has bounds of −1 and 1, since Gymnasium's checker suspects equal ones
        low = np.stack([np.append(np.float32(-1), self.bounds[0]), np.zeros_like(self.roles)], axis=1)
        high = np.stack([np.append(np.float32(1), self.bounds[1]), np.full_like(self.roles, len(names))], axis=1)
        self.space = spaces.Box(low, high, dtype=np.float32)
        self.source, self.sources = space, batch_space(space, 1)

    def batch(self, observations: list[Any]) -> np.ndarray:
        """Flatten observations one by one: (R, F)."""
        flat: list[Any] = [spaces.flatten(self.source, one) for one in observations]
        return np.stack(flat)

    def forget(self, rows: np.ndarray) -> None:
        """Remember nothing."""

    def read(self, observations: Any) -> np.ndarray:
        """Flatten what a vector environment gives: (R, F)."""
        if hasattr(observations, "detach"):
            raise TypeError(f"observations: {type(observations)}: must be NumPy arrays")
        if isinstance(self.source, spaces.Box) and len(self.source.shape) == 1:
            return np.asarray(observations)
        return self.batch(list(iterate(self.sources, observations)))

    def show(self, values: Any, signal: Array | None, moment: Moment) -> tuple[np.ndarray, Facts]:
        """Turn values (R, F) into tokens (R, 1 + F, 2): the query 0, 0, and then the features; all count as signal."""
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)
        if self.squashed.any():
            values = np.where(self.squashed, np.clip(np.tanh(values), *self.bounds), values)
        tokens = np.zeros((len(values), len(self.roles), 2), np.float32)
        tokens[:, 1:, 0] = values
        tokens[:, :, 1] = self.roles
        return tokens, {"signal_mask": np.ones(tokens.shape[:2], np.bool_), "snr": np.ones(len(tokens))}


class TokenRule:
    """What the rules share that change tokens."""

    draws = False

    def __init__(self, space: spaces.Space[Any], spec: TokenSpec) -> None:
        """Check that observations of `space` are the tokens (N, D) that `spec` describes."""
        shape = spec.num_tokens, spec.num_features
        if not isinstance(space, spaces.Box) or space.shape != shape or space.dtype != np.float32:
            given = f"{space.dtype} Box {space.shape}" if isinstance(space, spaces.Box) else type(space).__name__
            raise ValueError(f"{given}: must be a float32 Box of one agent's tokens {shape}")
        self.low, self.high = space.low, space.high  # (N, D)
        self.spec = spec

    def batch(self, observations: list[Any]) -> np.ndarray:
        """Stack tokens (N, D) to (R, N, D)."""
        return np.stack(observations)

    def read(self, observations: Any) -> Any:
        """Return tokens (R, N, D) as they are."""
        return observations

    def forget(self, rows: np.ndarray) -> None:
        """Remember nothing."""


class Mask(TokenRule):
    """Show tokens beside the mask of those that are not padding."""

    def __init__(self, space: spaces.Space[Any], spec: TokenSpec) -> None:
        """Prepare for tokens of `spec`."""
        super().__init__(space, spec)
        mask: Any = spaces.MultiBinary(spec.num_tokens)  # no Box, which what normalises observations would scale
        mask.dtype = np.dtype(np.bool_)
        self.space = spaces.Dict({"tokens": spaces.Box(self.low, self.high, dtype=np.float32), "mask": mask})

    def show(self, tokens: Array, signal: Array | None, moment: Moment) -> tuple[dict[str, Array], Facts]:
        """Return copies of the tokens (R, N, D), and the mask, bool (R, N)."""
        return {"tokens": namespace(tokens).asarray(tokens, copy=True), "mask": self.spec.mask(tokens)}, {}


class Flatten(TokenRule):
    """Show tokens as one vector."""

    def __init__(self, space: spaces.Space[Any], spec: TokenSpec) -> None:
        """Prepare for tokens of `spec`."""
        super().__init__(space, spec)
        self.space = spaces.Box(self.low.ravel(), self.high.ravel(), dtype=np.float32)

    def show(self, tokens: Array, signal: Array | None, moment: Moment) -> tuple[Array, Facts]:
        """Return tokens (R, N, D) as (R, N · D), row after row."""
        xp = namespace(tokens)
        return xp.reshape(xp.asarray(tokens, copy=True), (len(tokens), -1)), {}


class Shuffle(TokenRule):
    """Give tokens new places in each step; the query keeps its own."""

    draws = True

    def __init__(self, space: spaces.Space[Any], spec: TokenSpec) -> None:
        """Prepare for tokens of `spec`."""
        super().__init__(space, spec)
        self.space = spaces.Box(*anywhere(self.low, self.high, spec.query_index), dtype=np.float32)

    def show(self, tokens: Array, signal: Array | None, moment: Moment) -> tuple[Array, Facts]:
        """Return tokens (R, N, D) in another order, and the signal's mask in the same."""
        if signal is not None:
            check_signal(signal, tokens)
        (u,) = drawn(moment, (self.spec.num_tokens - 1,), tokens)
        tokens, signal = permuted(places(u, self.spec.query_index), tokens, signal)
        return tokens, {} if signal is None else {"signal_mask": signal}


class AddNoise(TokenRule):
    """Put noise tokens behind the others, and perhaps give all new places."""

    draws = True

    def __init__(
        self,
        space: spaces.Space[Any],
        spec: TokenSpec,
        num_worlds: int,
        num_noise: Count,
        distribution: str,
        scale: float,
        frozen: bool,
        shuffle: bool,
    ) -> None:
        """Prepare for tokens of `spec` in `num_worlds` worlds.

        Raises:
            ValueError: noise that varies needs padding, for which the marker of the game's own tokens may be taken.
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
        self.num_worlds = num_worlds
        self.most = highest(num_noise)
        self.varies = lowest(num_noise) < self.most
        self.values = spec.num_features - bool(spec.roles)  # V
        drawn_each = self.most * (1 if distribution == "marginal" else self.values)
        self.draws_of_values = drawn_each, 0 if distribution == "uniform" else drawn_each
        self.role = spec.roles.get("noise", 1 + max(spec.roles.values(), default=0))
        roles = spec.roles | {"noise": self.role} if spec.roles else {}
        self.inner = spec
        if self.varies:
            self._check_padding()
        self.spec = dataclasses.replace(
            spec, num_tokens=spec.num_tokens + self.most, roles=roles, padded=spec.padded or self.varies
        )
        low, high = self._noise_bounds()
        bounds = np.concatenate([self.low, low]), np.concatenate([self.high, high])
        self.space = spaces.Box(*(anywhere(*bounds, spec.query_index) if shuffle else bounds), dtype=np.float32)
        self.history = History(num_worlds, spec.num_tokens, self.values) if distribution == "marginal" else None
        self.kept: Array | None = None  # (B, M, V) noise of the episode, which is frozen

    def forget(self, rows: np.ndarray) -> None:
        """Drop what the worlds (R,) have shown so far."""
        if self.history is not None:
            self.history.seen[rows] = 0

    def show(self, tokens: Array, signal: Array | None, moment: Moment) -> tuple[Array, Facts]:
        """Return tokens (R, N + M, D), the mask of those that carry signal and their share of all but padding."""
        xp = namespace(tokens)
        if signal is None:
            signal = self.inner.mask(tokens)
        check_signal(signal, tokens)
        chance = moment.start if self.frozen else moment
        first, second = self.draws_of_values
        u, u_places, *_, more = drawn(chance, (first, self.spec.num_tokens - 1, 0, 0, second), tokens)
        if self.history is None:
            values = gaussian(u, more) if self.distribution == "gaussian" else 2 * u - 1
            values = xp.reshape(values, (len(tokens), self.most, self.values))
        else:
            values = self._remembered(self.history, tokens, signal, u, more, moment)
        noise = self._named(values * self.scale, moment)
        tokens = xp.concat([tokens, noise], axis=1)
        signal = xp.concat([signal, xp.zeros_like(noise[..., 0], dtype=xp.bool)], axis=1)
        if self.shuffle:
            tokens, signal = permuted(places(u_places, self.spec.query_index), tokens, signal)
        real = xp.float64 if xp is np else xp.float32  # as our vector environments have it
        number, among = (xp.sum(xp.astype(x, xp.int64), axis=-1) for x in (signal, self.spec.mask(tokens)))
        return tokens, {"signal_mask": signal, "snr": xp.astype(number, real) / among}

    def _check_padding(self) -> None:
        """Raise ValueError if tokens of a game without padding and roles may look like padding."""
        spec = self.inner
        low, high = self.low[:, spec.padding_feature].min(), self.high[:, spec.padding_feature].max()
        if not spec.padded and not spec.roles and low <= spec.padding <= high:
            raise ValueError(
                f"num_noise={self.num_noise}: must be one number, or the tokens have roles, since feature "
                f"{spec.features[spec.padding_feature]!r} may be {spec.padding:g} without being padding"
            )

    def _named(self, values: Array, moment: Moment) -> Array:
        """Make noise tokens (R, M, D) of values (R, M, V), and padding of those that the episode does not have."""
        xp = namespace(values)
        if self.inner.roles:
            noise = xp.concat([values, xp.full_like(values[..., :1], self.role)], axis=-1)
        elif not self.spec.padded:
            noise = values
        else:  # a marker must not be taken for padding
            noise, marker = values, values[..., self.inner.padding_feature]
            noise[..., self.inner.padding_feature] = xp.where(
                marker == self.inner.padding, xp.zeros_like(marker), marker
            )
        if self.varies:
            *_, u = drawn(moment.start, (0, 0, 0, 1), values)
            number = lowest(self.num_noise) + xp.floor(u * (1 + self.most - lowest(self.num_noise)))  # (R, 1)
            absent = xp.arange(self.most, device=u.device) >= number
            noise = xp.where(absent[..., None], self._padding_row(noise), noise)
        return noise

    def _remembered(
        self, history: History, tokens: Array, signal: Array, u_step: Array, u_token: Array, moment: Moment
    ) -> Array:
        """Add what the worlds show to their history, and draw values (R, M, V) from it by uniforms (R, M)."""
        xp = namespace(tokens)
        # the query is no source: its values are constant, or what the agent is to itself
        source = signal & (xp.arange(self.inner.num_tokens, device=signal.device) != self.inner.query_index)
        values = tokens[..., : self.inner.padding_feature] if self.inner.roles else tokens
        *_, u_place = drawn(moment, (0, 0, 1), tokens)
        history.learn(moment.rows, moment.fresh, values, source, u_place[:, 0])
        found = history.draw(moment.rows, u_step, u_token)
        if not self.frozen:
            return found
        if self.kept is None:
            shape = self.num_worlds, self.most, self.values
            with outside_inference_mode(found):
                self.kept = xp.zeros(shape, dtype=found.dtype, device=found.device)
        starts = np.flatnonzero(moment.fresh & (moment.step == 0))
        self.kept[moved(moment.rows[starts], found)] = found[moved(starts, found)]
        return self.kept[moved(moment.rows, found)]

    def _padding_row(self, like: Array) -> Array:
        """Return the token (D,) of an empty place: zeros and the marker, as the particle games have it."""
        row = namespace(like).zeros_like(like[0, 0])
        if not self.inner.roles:
            row = row + self.inner.padding  # as BoxWorld has it
        row[self.inner.padding_feature] = self.inner.padding
        return row

    def _noise_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lowest and highest values (M, D) of noise."""
        if self.distribution == "marginal":
            with np.errstate(over="ignore"):  # bounds may be the largest numbers of float32
                low, high = (self.scale * bound[:, : self.values] for bound in (self.low, self.high))
            low, high = np.minimum(low.min(axis=0), 0), np.maximum(high.max(axis=0), 0)  # 0 where nothing was seen
        else:
            size = self.scale * (TALLEST if self.distribution == "gaussian" else 1.0)
            high = np.full(self.values, size * (1 + 1e-6))  # what is computed in float32 is rounded
            low = -high
        if self.inner.roles:
            low, high = np.append(low, self.low[:, self.inner.padding_feature].min()), np.append(high, self.role)
        if self.varies:
            row = self._padding_row(low[None, None])
            low, high = np.minimum(low, row), np.maximum(high, row)
        return tuple(np.tile(bound.astype(np.float32), (self.most, 1)) for bound in (low, high))  # type: ignore[return-value]


class History:
    """What the signal has shown so far: of each of B worlds a random sample of its steps, with the tokens in them.

    Noise drawn from it has the signal's distribution itself, not only its mean and deviation: a drawn token is one
    that carried signal once, all its values together, so that neither a feature nor a pair of them tells it apart by
    scale. The sample is of all steps since the seed (Vitter's algorithm R, a step being one item), and after `HORIZON`
    steps it forgets at that pace, to follow what a better policy gets to see. The last few steps would do for the
    scale, but they tell of the episode in play, which noise must not.
    """

    def __init__(self, num_worlds: int, num_tokens: int, num_values: int) -> None:
        """Begin with nothing."""
        self.shape = num_worlds, MEMORY, num_tokens, num_values
        self.seen = np.zeros(num_worlds, np.int64)  # steps that had signal
        self.sizes = np.zeros(self.shape[:2], np.int64)  # signal tokens of a step
        self.values: Any = None  # those first, made when the first tokens tell library and device

    def learn(self, rows: np.ndarray, fresh: np.ndarray, values: Array, signal: Array, u: Array) -> None:
        """Add the values (R, N, V) of one step, of tokens `signal` (R, N), in the worlds that are `fresh`."""
        xp = namespace(values)
        if self.values is None:
            with outside_inference_mode(values):
                self.values = xp.zeros(self.shape, dtype=values.dtype, device=values.device)
        sizes = as_numpy(xp.sum(xp.astype(signal, xp.int64), axis=1))
        fresh = fresh & (sizes > 0)
        seen = self.seen[rows]
        place = np.floor(as_numpy(u).astype(np.float64) * np.minimum(seen + 1, HORIZON)).astype(np.int64)
        place = np.where(seen < MEMORY, seen, place)
        kept = np.flatnonzero(fresh & (place < MEMORY))
        order = xp.argsort(xp.astype(~signal, xp.int64), axis=1, stable=True)
        first = xp.take_along_axis(values, order[..., None], axis=1)
        self.values[moved(rows[kept], values), moved(place[kept], values)] = first[moved(kept, values)]
        self.sizes[rows[kept], place[kept]] = sizes[kept]
        self.seen[rows] += fresh

    def draw(self, rows: np.ndarray, u_step: Array, u_token: Array) -> Array:
        """Draw tokens' values (R, M, V) by uniforms (R, M): a token of a step of the sample, or 0."""
        like, u_step, u_token = u_step, *(as_numpy(u).astype(np.float64) for u in (u_step, u_token))
        step = np.floor(u_step * np.minimum(self.seen[rows], MEMORY)[:, None]).astype(np.int64)
        token = np.floor(u_token * self.sizes[rows[:, None], step]).astype(np.int64)
        index = (rows[:, None] + 0 * step, step, token)
        found = self.values[tuple(moved(i, like) for i in index)]
        found[moved(self.seen[rows] == 0, like)] = 0  # what lies there is of the seed before
        return found


def feature_names(space: spaces.Space[Any]) -> list[str]:
    """Name the numbers of the flat space, as `position[0]`, `inner.mode[2]`, or `feature[0]` where there is but one.

    Raises:
        ValueError: naming the space that is an image, or has no fixed length, or no number at all.
    """
    names = _names(space, "", space)
    if not names:
        raise ValueError(f"{space}: must hold a number at least")
    return names


def _names(space: spaces.Space[Any], name: str, whole: spaces.Space[Any]) -> list[str]:
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        return [one for key, part in parts for one in _names(part, f"{name}.{key}" if name else str(key), whole)]
    where = f"{space} in {whole}" if name else f"{space}"
    if not space.is_np_flattenable:
        raise ValueError(f"{where}: cannot be flattened to a Box of fixed length")
    if isinstance(space, spaces.Box) and len(space.shape) > 1:
        hint = "gymnasium.wrappers.FlattenObservation makes each number a feature"
        raise ValueError(f"{where}: a Box of shape {space.shape} must have one axis; {hint}")
    return [f"{name or 'feature'}[{i}]" for i in range(spaces.flatdim(space))]


def check_signal(signal: Array, tokens: Array) -> None:
    """Raise ValueError unless a mask of signal, which another's `info` may hold, is one (R, N) of tokens (R, N, D)."""
    shape, wanted = tuple(signal.shape), tuple(tokens.shape[:2])
    if shape != wanted:
        raise ValueError(f"info['signal_mask']: shape {shape[1:]} must be {wanted[1:]}, a bool for each token")


def anywhere(low: np.ndarray, high: np.ndarray, query: int) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds (N, D) of tokens that may take each other's places, all but the query."""
    others = np.arange(len(low)) != query
    low, high = low.copy(), high.copy()
    if others.any():
        low[others], high[others] = low[others].min(axis=0), high[others].max(axis=0)
    return low, high


def drawn(moment: Moment, counts: tuple[int, ...], like: Array) -> tuple[Array, ...]:
    """Draw uniforms (R, count), float32 for each of `counts`, in the library and on the device of `like`.

    The streams of `AddNoise` are its values, the places, the memory of the marginal, the number of tokens, and the
    values again, where one of them takes two numbers: in streams of their own more tokens do not move the first.
    """
    return uniforms(moved(moment.key, like), moved(moment.step, like), counts)


def gaussian(u: Array, angle: Array) -> Array:
    """Turn two uniforms, (R, n) each, into normal numbers (R, n), by the method of Box and Muller."""
    xp = namespace(u)
    radius = xp.sqrt(-2 * xp.log(1 - u))  # 1 − u is from 2**−24 to 1
    return radius * xp.cos(2 * math.pi * angle)


def places(u: Array, query: int) -> Array:
    """Return which token comes to each place (R, N), by uniforms (R, N − 1); `query` stays."""
    xp = namespace(u)
    order = xp.argsort(u, axis=1, stable=True)
    order = order + (order >= query)
    own = xp.full((len(u), 1), query, dtype=order.dtype, device=u.device)
    return xp.concat([order[:, :query], own, order[:, query:]], axis=1)


def permuted(order: Array, tokens: Array, signal: Array | None) -> tuple[Array, Array | None]:
    """Return tokens (R, N, D) and their mask (R, N) in the order (R, N)."""
    xp = namespace(tokens)
    tokens = xp.take_along_axis(tokens, order[..., None], axis=1)
    return tokens, None if signal is None else xp.take_along_axis(signal, order, axis=1)


def one(shown: Any, i: int) -> Any:
    """Return observation i of a batch, an array (R, ...) or a dictionary of such."""
    return {name: part[i] for name, part in shown.items()} if isinstance(shown, dict) else shown[i]


def moved(array: np.ndarray, like: Array) -> Array:
    """Return a NumPy array in the library and on the device of `like`."""
    if isinstance(like, np.ndarray):
        return array
    return namespace(like).asarray(array, device=like.device)
