"""Base class of the particle games: bodies in a plane, actions that accelerate them, and tokens that describe them.

`B` environments, `A` agents, `M` movers, agents first, `L` landmarks, which never move, `N = M + L` entities and
tokens, `K` entity types whose number may vary.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from noisy_envs.arrays import Array, as_numpy, namespace, outside_inference_mode
from noisy_envs.games import physics
from noisy_envs.games.physics import DAMPING, DT
from noisy_envs.randomness import STREAM
from noisy_envs.tokens import TokenSpec
from noisy_envs.validation import check_array, check_fields, highest, lowest, plain, unexpected

SELF, ABSENT = 0, -1  # roles in every game
EVERYONE = slice(None)
MAX_ENTITIES = STREAM // 16  # of one type: a stream holds five numbers for each agent of two types
MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))  # nothing, left, right, down, up: as in MPE
NOISE_MOTIONS = ("still", "wander", "follow", "orbit")
ORBIT_ANGLE = 0.2  # radians that the velocity of orbiting noise turns in a step
# the force that turns a velocity and keeps its length in spite of damping, in multiples of the velocity
ORBIT_ALONG, ORBIT_ACROSS = (math.cos(ORBIT_ANGLE) - (1 - DAMPING)) / DT, math.sin(ORBIT_ANGLE) / DT


class State(NamedTuple):
    """States of B environments: rows x, y, vx, vy, role. An absent entity is a row 0, 0, 0, 0, ABSENT."""

    mover: Array  # (B, M, 5), agents first
    landmark: Array  # (B, L, 5), velocities zero

    @property
    def role(self) -> Array:
        """Roles (B, N), movers first."""
        return namespace(self.mover).concat([self.mover[..., 4], self.landmark[..., 4]], axis=-1)


class EntityType(NamedTuple):
    """A type of entity."""

    option: str  # name of the option that sets their number
    role: int
    radius: float
    solid: bool  # collides with other solid entities
    signal: bool  # matters to the agents
    agent: bool = False
    accel: float = 0.0  # newtons of a full action; the mass is 1
    max_speed: float = 0.0  # 0 for landmarks


def spread(count: Array) -> Array:
    """Return max(log4(count), 2), the half-width of the square in which `count` entities start, a float or an array."""
    if isinstance(count, float):
        return max(math.log(count, 4), 2.0)
    xp = namespace(count)
    return (xp.log(count) / math.log(4)).clip(2.0, None)


class ParticleGame:
    """Physics, actions and tokens; subclasses define `entity_types`: agents, then other movers, then landmarks.

    With `continuous_actions`, actions are `Box(0, 1, (5,), float32)`: slot 0 does nothing, slots 1 to 4 accelerate left
    (−x), right (+x), down (−y) and up (+y). Opposite slots subtract; values are clipped to [0, 1]. Without it, they are
    `Discrete(5)`: nothing, or full acceleration in one of the four directions.
    """

    num_actions: ClassVar[int] = 5
    terminates: ClassVar[bool] = False
    signal_moves: ClassVar[bool] = False
    render_modes: ClassVar[tuple[str, ...]] = ("human", "rgb_array")
    reset_options: ClassVar[tuple[str, ...]] = ()
    start_speed: ClassVar[float]  # largest component of a starting velocity

    # defined by each game: options of the dataclass, constants or properties
    continuous_actions: Any  # bool
    max_steps: Any  # int
    observation_scale: Any  # float
    entity_types: Any  # tuple[EntityType, ...]
    num_agents: Any  # int
    role_names: Any  # dict[str, int], values of the feature "role"
    start_reach: Any  # float, largest starting coordinate
    num_noise: Any  # Count
    noise_motion: Any  # str, of NOISE_MOTIONS

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle the options only; cached values are recomputed."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def prepare(self, like: Array) -> None:
        """Cache nothing."""

    def _convert_options(self) -> None:
        """Convert options to plain Python values: NumPy scalars would turn float32 states into float64."""
        for name, value in vars(self).copy().items():
            object.__setattr__(self, name, plain(value))

    @cached_property
    def max_counts(self) -> tuple[int, ...]:
        """Largest number of entities of each type."""
        return tuple(highest(getattr(self, kind.option)) for kind in self.entity_types)

    @cached_property
    def num_movers(self) -> int:
        """Largest number of movers, M."""
        return sum(count for kind, count in zip(self.entity_types, self.max_counts, strict=True) if kind.max_speed)

    @cached_property
    def num_entities(self) -> int:
        """Largest number of entities, N."""
        return sum(self.max_counts)

    @cached_property
    def rows(self) -> dict[str, slice]:
        """Rows of the entities of each type by the name of its option, movers and landmarks counted together."""
        ends = np.cumsum(self.max_counts).tolist()
        return {
            kind.option: slice(end - count, end)
            for kind, count, end in zip(self.entity_types, self.max_counts, ends, strict=True)
        }

    def entities(self, state: State, option: str) -> Array:
        """Return the rows (B, n, 5) of the entities whose number `option` sets."""
        rows, first = self.rows[option], self.num_movers
        if rows.start < first:
            return state.mover[:, rows]
        return state.landmark[:, rows.start - first : rows.stop - first]

    @cached_property
    def noise_moves(self) -> bool:
        """Whether noise is among the movers."""
        return self.noise_motion != "still" and highest(self.num_noise) > 0

    @cached_property
    def counted_types(self) -> tuple[EntityType, ...]:
        """The K types whose number may be a range."""
        return tuple(kind for kind in self.entity_types if not kind.agent)

    @cached_property
    def padded(self) -> bool:
        """Whether entities can be absent."""
        counts = [getattr(self, kind.option) for kind in self.counted_types]
        return any(lowest(count) < highest(count) for count in counts)

    @cached_property
    def token_spec(self) -> TokenSpec:
        """Meaning of an observation."""
        features, kinds = ("x", "y", "vx", "vy", "role"), self.role_kinds
        return TokenSpec(self.num_entities, features, self.role_names, padded=self.padded, kinds=kinds)

    @cached_property
    def role_kinds(self) -> dict[str, str]:
        """Kinds of roles, see `TokenSpec`, where options change those of `noisy_envs.tokens.KINDS`."""
        return {}

    @cached_property
    def max_velocity(self) -> float:
        """Largest component of a velocity; the factor allows for the rounding of clipped speeds."""
        return max(self.start_speed, *(kind.max_speed for kind in self.entity_types)) * (1 + 1e-6)

    @cached_property
    def travel(self) -> float:
        """Longest distance of a mover along an axis in one episode."""
        return DT * (max(kind.max_speed for kind in self.entity_types) * self.max_steps + self.start_speed)

    @cached_property
    def observation_bounds(self) -> tuple[Array, Array]:
        """Lowest and highest values (N, 5) of an observation, finite, in episodes from any valid state."""
        place = 2 * (self.start_reach + 2 * self.travel) / self.observation_scale
        speed = 2 * self.max_velocity / self.observation_scale
        low = [-place, -place, -speed, -speed, ABSENT]
        high = [place, place, speed, speed, max(self.role_names.values())]
        return np.array([low] * self.num_entities, np.float32), np.array([high] * self.num_entities, np.float32)

    def present(self, u: Array) -> Array:
        """Draw the numbers of entities (B, K) of `counted_types` from uniforms (B, K)."""
        xp = namespace(u)
        counts = []
        for i, kind in enumerate(self.counted_types):
            count = getattr(self, kind.option)
            counts.append(lowest(count) + xp.floor(u[:, i : i + 1] * (highest(count) - lowest(count) + 1)))
        return xp.concat(counts, axis=1)

    def assemble(self, mover: Array, landmark: Array, present: Array) -> State:
        """Return states from rows x, y, vx, vy; rows of absent entities may hold any value.

        Args:
            mover: (B, M, 4).
            landmark: (B, L, 4).
            present: (B, K) numbers of entities of `counted_types`.
        """
        xp = namespace(mover)
        roles = []
        for kind, count in zip(self.entity_types, self.max_counts, strict=True):
            index = xp.arange(count, dtype=mover.dtype, device=mover.device) + xp.zeros_like(mover[:, :1, 0])
            exists = xp.ones_like(index)
            if not kind.agent:
                exists = xp.astype(index < present[:, self.counted_types.index(kind), None], mover.dtype)
            roles.append(ABSENT + exists * (kind.role - ABSENT))
        role = xp.concat(roles, axis=1)[..., None]
        exists = xp.astype(role != ABSENT, mover.dtype)
        rows = [
            xp.concat([body * exists[:, part], role[:, part]], axis=-1)
            for body, part in ((mover, slice(0, self.num_movers)), (landmark, slice(self.num_movers, None)))
        ]
        return State(*rows)

    def arrange(self, position: Array, velocity: Array, *counts: Any) -> State:
        """Return states of entities in the order of `entity_types`; absent entities may have any value.

        Args:
            position: (B, N, 2).
            velocity: (B, N, 2); ignored for landmarks.
            counts: for the first of `counted_types` the numbers of entities, ints or (B, 1); for others the largest.
        """
        xp = namespace(position)
        given = [*counts, *self.max_counts[len(self.entity_types) - len(self.counted_types) + len(counts) :]]
        present = xp.concat([xp.zeros_like(position[:, 0, :1]) + count for count in given], axis=1)
        mover, fixed = position[:, : self.num_movers], position[:, self.num_movers :]
        mover = xp.concat([mover, velocity[:, : self.num_movers]], axis=-1)
        return self.assemble(mover, xp.concat([fixed, xp.zeros_like(fixed)], axis=-1), present)

    def validate_state(self, given: State | Mapping[str, Any], batch: tuple[int, ...]) -> State:
        """Validate a user-supplied state, and return it as float32 NumPy arrays with one batch axis.

        Args:
            given: a value of `env.unwrapped.state`, or a mapping with `position` (..., N, 2), in the order agents,
                other movers, landmarks, and optionally `velocity` (..., N, 2) and numbers of entities (...), for
                example `num_noise`.
            batch: leading shape, () for one environment or (B,).

        Raises:
            ValueError, TypeError: naming the invalid field.
        """
        if isinstance(given, State):
            rows = np.concatenate([as_numpy(field) for field in given], axis=-2)
            role = rows[..., 4]
            numbers = {x.option: (role[..., self.rows[x.option]] == x.role).sum(-1) for x in self.counted_types}
            state = self.validate_state({"position": rows[..., :2], "velocity": rows[..., 2:4], **numbers}, batch)
            if not np.array_equal(state.role.reshape(role.shape), role):
                order = ", ".join(f"{kind.option} of role {kind.role}" for kind in self.entity_types)
                raise unexpected("state: role", role.tolist(), f"{order}, absent ones ({ABSENT}) last in each")
            return state
        options = tuple(kind.option for kind in self.counted_types)
        check_fields("state", given, required=("position",), known=("position", "velocity", *options))
        shape = (*batch, self.num_entities, 2)
        position = check_array("position", given["position"], shape, limit=self.start_reach + self.travel)
        velocity = check_array("velocity", given.get("velocity", np.zeros(shape)), shape, limit=self.max_velocity)
        counts = [self._validate_count(option, given, batch) for option in options]
        position, velocity = (x.reshape(-1, self.num_entities, 2) for x in (position, velocity))
        return self.arrange(position, velocity, *counts)

    def _validate_count(self, option: str, given: Mapping[str, Any], batch: tuple[int, ...]) -> Array:
        """Validate a number of entities in a user-supplied state, and return it as (B, 1)."""
        allowed = getattr(self, option)
        count = as_numpy(given.get(option, highest(allowed)))
        if count.dtype.kind not in "iu":
            raise TypeError(f"state: {option}={count}: expected integers")
        if count.shape not in ((), batch):
            raise ValueError(f"state: {option}: expected shape () or {batch}, got {count.shape}")
        if (count < lowest(allowed)).any() or (count > highest(allowed)).any():
            raise ValueError(f"state: {option}={count}: expected {lowest(allowed)} to {highest(allowed)}")
        return np.broadcast_to(count, batch).reshape(-1, 1).astype(np.float32)

    def directions(self, action: Array, like: Array) -> Array:
        """Turn actions (B, n, 5), or (B, n) if discrete, into directions (B, n, 2) of the dtype of `like`."""
        if not self.continuous_actions:
            return self.table("moves", like)[action]
        slots = namespace(action).astype(action, like.dtype, copy=False)
        return slots[..., 2::2] - slots[..., 1::2]

    def control(self, action: Array, like: Array) -> Array:
        """Turn the joint action (B, A, 5), or (B, A) if discrete, into forces (B, A, 2) of the dtype of `like`."""
        return self.directions(action, like) * self.table("accel", like)

    def noise_force(self, noise: Array, control: Array) -> Array:
        """Return the forces (B, L, 2) of noise (B, L, 5) that follows or orbits; agents apply `control` (B, A, 2)."""
        xp = namespace(noise)
        if self.noise_motion == "orbit":
            x, y = noise[..., 2], noise[..., 3]
            return xp.stack([ORBIT_ALONG * x - ORBIT_ACROSS * y, ORBIT_ACROSS * x + ORBIT_ALONG * y], axis=-1)
        return control[:, :1] + xp.zeros_like(noise[..., :2])

    def moving_forces(self, state: State, *forces: Array) -> Array:
        """Join forces of consecutive movers (B, n, 2) to (B, M, 2); absent movers apply none."""
        xp = namespace(state.mover)
        force = xp.concat(forces, axis=1)
        return xp.where(state.mover[..., 4:] != ABSENT, force, xp.zeros_like(force)) if self.padded else force

    def push(self, state: State, force: Array) -> State:
        """Move the bodies by the forces (B, M, 2) that movers apply, in newtons, and by contact forces."""
        if self._collides:
            force = self._add_contacts(state, force)
        return State(physics.integrate(state.mover, force, self.table("max_speed", state.mover)), state.landmark)

    def _add_contacts(self, state: State, force: Array) -> Array:
        """Add contact forces of solid movers with each other and with solid landmarks to `force` (B, M, 2)."""
        xp = namespace(state.mover)
        first, end = self._solid_movers
        bodies = others = state.mover[:, first:end]
        if self._solid_landmarks[1]:
            others = xp.concat([bodies, state.landmark[:, slice(*self._solid_landmarks)]], axis=1)
        present = None
        if self.padded:
            present = (bodies[..., 4] != ABSENT)[:, :, None] & (others[..., 4] != ABSENT)[:, None]
        positions = bodies[..., :2], others[..., :2]
        total = physics.add_contacts(*positions, force[:, first:end], self._contact_range(bodies), present)
        if end - first == self.num_movers:
            return total
        return xp.concat([force[:, :first], total, force[:, end:]], axis=1)

    def observe(self, state: State, agents: slice = EVERYONE) -> Array:
        """Return the tokens (B, n, N, 5) of `agents`: the own token, landmarks, other movers."""
        xp = namespace(state.mover)
        chosen = range(self.num_agents)[agents]
        # positions and velocities are relative, roles are not
        own = state.mover[:, chosen.start : chosen.stop] * self.table("frame", state.mover)
        rows = []
        for i, agent in enumerate(chosen):
            rows += [own[:, i : i + 1], state.landmark, state.mover[:, :agent], state.mover[:, agent + 1 :]]
        tokens = xp.concat(rows, axis=1).reshape(-1, len(chosen), self.num_entities, 5)
        tokens -= own[:, :, None]  # in place: for large arrays every pass over memory counts
        if self.observation_scale != 1:
            tokens *= self.table("scale", tokens)
        if self.padded:
            tokens = xp.where(tokens[..., 4:] != ABSENT, tokens, self.table("absent", tokens))
        return tokens

    def signal_mask(self, tokens: Array, state: State | None = None) -> Array:
        """Tell which tokens (..., N, 5), in the order of `observe`, are signal: bool (..., N), with the agent's own."""
        present = tokens[..., -1] != ABSENT
        return present & self.table("signal", present)

    def token_mask(self, tokens: Array) -> Array:
        """Return the padding mask of tokens (..., N, 5): bool (..., N), False for padding."""
        return self.token_spec.mask(tokens)

    def world_tokens(self, state: State) -> Array:
        """Return all entities (B, N, 5) in absolute coordinates, scaled as observations, for a centralised critic."""
        xp = namespace(state.mover)
        return xp.concat([state.mover, state.landmark], axis=1) * self.table("scale", state.mover)

    def random_actions(self, u: Array) -> Array:
        """Turn uniforms (B, n, 5), or (B, n) if discrete, into uniformly random actions."""
        xp = namespace(u)
        return u if self.continuous_actions else xp.astype(xp.floor(u * self.num_actions), xp.int64)

    def aim(self, state: State, agents: range, goal: Array) -> Array:
        """Return the actions that bring `agents` closest to a goal (B, n or 1, 2) in two steps.

        An action changes the velocity after this step, hence the position after the next one. Contacts are ignored.
        """
        xp = namespace(state.mover)
        me = state.mover[:, agents.start : agents.stop]
        damped = (1.0 - DAMPING) * me[..., 2:4]
        accel = self.table("accel", me)[agents.start : agents.stop]
        miss = goal - (me[..., :2] + DT * me[..., 2:4])  # (B, n, 2), after this step
        if self.continuous_actions:
            push = ((miss / DT - damped) / (DT * accel)).clip(-1.0, 1.0)
            none = xp.zeros_like(push[..., 0])
            slots = [none] + [xp.maximum(sign * push[..., axis], none) for axis in (0, 1) for sign in (-1, 1)]
            return xp.stack(slots, axis=-1)
        push = self.table("moves", me) * accel[:, None]  # (n, 5, 2)
        left = (miss - DT * damped)[:, :, None] - DT * DT * push
        return xp.argmin(physics.length(left)[..., 0], axis=-1)

    def table(self, name: str, like: Array) -> Array:
        """Return a constant of `_tables` with the library, dtype and device of an array, cached."""
        key = name, like.dtype, like.device
        cached = self._cache.get(key)
        if cached is None:
            with outside_inference_mode(like):
                cached = namespace(like).asarray(self._tables[name], dtype=like.dtype, device=like.device)
            self._cache[key] = cached
        return cached

    def _contact_range(self, like: Array) -> physics.ContactRange:
        """Return the range of contacts with the library, dtype and device of an array, cached."""
        key = "range", like.dtype, like.device
        cached = self._cache.get(key)
        if cached is None:
            with outside_inference_mode(like):
                cached = self._cache[key] = physics.contact_range(self.table("radii", like))
        return cached

    @cached_property
    def _cache(self) -> dict[Any, Any]:
        return {}

    @cached_property
    def _solid_movers(self) -> tuple[int, int]:
        """Start and stop of the solid movers."""
        return self._solid(slice(0, self.num_movers))

    @cached_property
    def _solid_landmarks(self) -> tuple[int, int]:
        """Start and stop of the solid landmarks, counted from the first landmark."""
        return self._solid(slice(self.num_movers, None))

    @cached_property
    def _collides(self) -> bool:
        """Whether a solid mover has another body to collide with."""
        movers, landmarks = (end - first for first, end in (self._solid_movers, self._solid_landmarks))
        return movers > 0 and movers + landmarks > 1

    def _solid(self, part: slice) -> tuple[int, int]:
        """Return start and stop of the solid entities in `part`, counted from the start of `part`."""
        solid = np.flatnonzero(np.repeat([kind.solid for kind in self.entity_types], self.max_counts)[part])
        return (int(solid[0]), int(solid[-1]) + 1) if solid.size else (0, 0)

    @cached_property
    def _tables(self) -> dict[str, np.ndarray]:
        """Constant arrays by name."""
        accel, max_speed, radius, solid, signal = (
            np.repeat([getattr(kind, field) for kind in self.entity_types], self.max_counts)[:, None]
            for field in ("accel", "max_speed", "radius", "solid", "signal")
        )
        radius = np.where(solid, radius, -np.inf)  # bodies between solid ones may not collide
        movers, landmarks = radius[slice(*self._solid_movers)], radius[self.num_movers :][slice(*self._solid_landmarks)]
        radii = np.maximum(movers + np.concatenate([movers, landmarks]).T, -1.0)  # sums of pairs
        np.fill_diagonal(radii, -1.0)  # a body does not collide with itself
        factor = 1.0 / self.observation_scale
        return {
            # in the order of `observe`, whoever observes: either all other agents are signal or none is
            "signal": np.concatenate([[[True]], signal[self.num_movers :], signal[1 : self.num_movers]])[:, 0],
            "accel": accel[: self.num_agents],
            "max_speed": max_speed[: self.num_movers],
            "radii": radii,
            "moves": np.array(MOVES),
            "frame": np.array([1, 1, 1, 1, 0]),
            "scale": np.array([factor, factor, factor, factor, 1]),
            "absent": np.array([0, 0, 0, 0, ABSENT]),
        }
