"""What the particle games share: bodies in a plane, actions that push them, and the tokens that show them.

`B` worlds, `A` agents, `M` movers of which the agents come first, `L` landmarks that never move, `N = M + L` entities
and tokens.
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
from noisy_envs.validation import check_array, check_fields, highest, lowest, plain

SELF, ABSENT = 0, -1  # roles of every game
EVERYONE = slice(None)
MAX_ENTITIES = STREAM // 16  # of a type: one stream holds five numbers for each agent of two types
MOVES = ((0, 0), (-1, 0), (1, 0), (0, -1), (0, 1))  # nothing, left, right, down, up: as in MPE


class State(NamedTuple):
    """A batch of worlds: rows x, y, vx, vy, role. An absent entity is a row 0, 0, 0, 0, ABSENT."""

    mover: Array  # (B, M, 5), agents first
    landmark: Array  # (B, L, 5), velocities zero

    @property
    def role(self) -> Array:
        """Roles (B, N), movers first."""
        return namespace(self.mover).concat([self.mover[..., 4], self.landmark[..., 4]], axis=-1)


class EntityType(NamedTuple):
    """Entities of one kind."""

    option: str  # that says how many there are
    role: int
    radius: float
    solid: bool  # whether it pushes, and is pushed by, other solid kinds on contact
    agent: bool = False
    accel: float = 0.0  # newton of a full push; the mass is 1
    max_speed: float = 0.0  # 0 for landmarks


def spread(count: Array) -> Array:
    """Half-width max(log4(count), 2) of the square in which so many entities start, a number or an array of floats."""
    if isinstance(count, float):
        return max(math.log(count, 4), 2.0)
    xp = namespace(count)
    return (xp.log(count) / math.log(4)).clip(2.0, None)


class ParticleGame:
    """Physics, actions and tokens of a game that names its kinds: agents, then other movers, then landmarks.

    Actions, with `continuous_actions`: `Box(0, 1, (5,), float32)`; slot 0 does nothing, slots 1 to 4 push left (−x),
    right (+x), down (−y), up (+y). Opposite slots subtract, values outside 0 … 1 are clipped. Without: `Discrete(5)`,
    the same five as all or nothing.
    """

    num_actions: ClassVar[int] = 5
    terminates: ClassVar[bool] = False  # so a shell need not look for an end that never comes
    signal_moves: ClassVar[bool] = False
    render_modes: ClassVar[tuple[str, ...]] = ("human", "rgb_array")
    reset_options: ClassVar[tuple[str, ...]] = ()
    role_names: ClassVar[dict[str, int]]
    start_speed: ClassVar[float]  # largest component of a starting velocity

    # each game's own: options of the dataclass, constants or properties
    continuous_actions: Any  # bool
    max_steps: Any  # int
    observation_scale: Any  # float
    entity_types: Any  # tuple[EntityType, ...]
    num_agents: Any  # int
    start_reach: Any  # float, largest coordinate of an entity at the start

    def __getstate__(self) -> dict[str, Any]:
        """Copy the options alone; what follows from them is made anew."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def prepare(self, like: Array) -> None:
        """Make ready to draw starting states: there is nothing to do."""

    def _settle(self) -> None:
        """Turn options into plain values: a NumPy scalar would turn float32 worlds into float64."""
        for name, value in vars(self).copy().items():
            object.__setattr__(self, name, plain(value))

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Places for the entities of each kind."""
        return tuple(highest(getattr(self, kind.option)) for kind in self.entity_types)

    @cached_property
    def num_movers(self) -> int:
        """Places for all that moves, M."""
        return sum(places for kind, places in zip(self.entity_types, self.places, strict=True) if kind.max_speed)

    @cached_property
    def num_entities(self) -> int:
        """Places for all entities, N."""
        return sum(self.places)

    @cached_property
    def counted(self) -> tuple[EntityType, ...]:
        """Kinds whose number may be a range."""
        return tuple(kind for kind in self.entity_types if not kind.agent)

    @cached_property
    def padded(self) -> bool:
        """Whether a place can be empty."""
        counts = [getattr(self, kind.option) for kind in self.counted]
        return any(lowest(count) < highest(count) for count in counts)

    @cached_property
    def token_spec(self) -> TokenSpec:
        """What an observation means."""
        return TokenSpec(self.num_entities, ("x", "y", "vx", "vy", "role"), self.role_names, padded=self.padded)

    @cached_property
    def fastest(self) -> float:
        """Largest component of a velocity; a clipped speed is rounded."""
        return max(self.start_speed, *(kind.max_speed for kind in self.entity_types)) * (1 + 1e-6)

    @cached_property
    def travel(self) -> float:
        """Longest way of a mover along an axis in one episode."""
        return DT * (max(kind.max_speed for kind in self.entity_types) * self.max_steps + self.start_speed)

    @cached_property
    def observation_bounds(self) -> tuple[Array, Array]:
        """Lowest and highest values (N, 5) of an observation, finite, from any valid state on."""
        place = 2 * (self.start_reach + 2 * self.travel) / self.observation_scale
        speed = 2 * self.fastest / self.observation_scale
        low = [-place, -place, -speed, -speed, ABSENT]
        high = [place, place, speed, speed, max(self.role_names.values())]
        return np.array([low] * self.num_entities, np.float32), np.array([high] * self.num_entities, np.float32)

    def present(self, u: Array) -> Array:
        """Draw how many entities (B, K) there are of each kind in `counted` from uniforms (B, K)."""
        xp = namespace(u)
        counts = []
        for i, kind in enumerate(self.counted):
            count = getattr(self, kind.option)
            counts.append(lowest(count) + xp.floor(u[:, i : i + 1] * (highest(count) - lowest(count) + 1)))
        return xp.concat(counts, axis=1)

    def assemble(self, mover: Array, landmark: Array, present: Array) -> State:
        """Make states of bodies x, y, vx, vy, absent ones (anything) included.

        Args:
            mover: (B, M, 4).
            landmark: (B, L, 4).
            present: (B, K) entities present of each kind in `counted`.
        """
        xp = namespace(mover)
        roles = []
        for kind, places in zip(self.entity_types, self.places, strict=True):
            place = xp.arange(places, dtype=mover.dtype, device=mover.device) + xp.zeros_like(mover[:, :1, 0])
            taken = xp.ones_like(place)
            if not kind.agent:
                taken = xp.astype(place < present[:, self.counted.index(kind), None], mover.dtype)
            roles.append(ABSENT + taken * (kind.role - ABSENT))
        role = xp.concat(roles, axis=1)[..., None]
        here = xp.astype(role != ABSENT, mover.dtype)
        rows = [
            xp.concat([body * here[:, part], role[:, part]], axis=-1)
            for body, part in ((mover, slice(0, self.num_movers)), (landmark, slice(self.num_movers, None)))
        ]
        return State(*rows)

    def arrange(self, position: Array, velocity: Array, *counts: Any) -> State:
        """Make states of entities in the order of the kinds, absent ones (anything) included.

        Args:
            position: (B, N, 2) in units of the world.
            velocity: (B, N, 2); that of landmarks is ignored.
            counts: for each kind in `counted` the entities present, a number or (B, 1); without, all are.
        """
        xp = namespace(position)
        given = counts or [highest(getattr(self, kind.option)) for kind in self.counted]
        present = xp.concat([xp.zeros_like(position[:, 0, :1]) + count for count in given], axis=1)
        mover, fixed = position[:, : self.num_movers], position[:, self.num_movers :]
        mover = xp.concat([mover, velocity[:, : self.num_movers]], axis=-1)
        return self.assemble(mover, xp.concat([fixed, xp.zeros_like(fixed)], axis=-1), present)

    def validate_state(self, given: State | Mapping[str, Any], batch: tuple[int, ...]) -> State:
        """Check a state that a user hands over, and return it as float32 NumPy arrays with one batch axis.

        Args:
            given: what `env.unwrapped.state` returned; or a mapping with `position` (..., N, 2), entities in the
                order agents, other movers, landmarks, and if wished `velocity` (..., N, 2) and the numbers present
                (...) of the kinds that the options count, for example `num_noise`.
            batch: leading shape, () for one world or (B,).

        Raises:
            ValueError, TypeError: naming the field, its value and what is allowed.
        """
        if isinstance(given, State):
            rows = np.concatenate([as_numpy(field) for field in given], axis=-2)
            role = rows[..., 4]
            numbers = {kind.option: (role == kind.role).sum(-1) for kind in self.counted}
            state = self.validate_state({"position": rows[..., :2], "velocity": rows[..., 2:4], **numbers}, batch)
            if not np.array_equal(state.role.reshape(role.shape), role):
                order = ", ".join(f"{kind.option} of role {kind.role}" for kind in self.entity_types)
                raise ValueError(f"state: role={role.tolist()}: must be {order}, the absent ({ABSENT}) last in each")
            return state
        options = tuple(kind.option for kind in self.counted)
        check_fields("state", given, required=("position",), known=("position", "velocity", *options))
        shape = (*batch, self.num_entities, 2)
        position = check_array("position", given["position"], shape, limit=self.start_reach + self.travel)
        velocity = check_array("velocity", given.get("velocity", np.zeros(shape)), shape, limit=self.fastest)
        counts = [self._validate_count(option, given, batch) for option in options]
        position, velocity = (x.reshape(-1, self.num_entities, 2) for x in (position, velocity))
        return self.arrange(position, velocity, *counts)

    def _validate_count(self, option: str, given: Mapping[str, Any], batch: tuple[int, ...]) -> Array:
        """Check how many entities of a kind a user's state has: (B, 1)."""
        allowed = getattr(self, option)
        count = as_numpy(given.get(option, highest(allowed)))
        if count.dtype.kind not in "iu":
            raise TypeError(f"state: {option}={count}: must be of integers")
        if count.shape not in ((), batch):
            raise ValueError(f"state: {option}={count}: shape {count.shape} must be () or {batch}")
        if (count < lowest(allowed)).any() or (count > highest(allowed)).any():
            raise ValueError(f"state: {option}={count}: must be within {lowest(allowed)} … {highest(allowed)}")
        return np.broadcast_to(count, batch).reshape(-1, 1).astype(np.float32)

    def control(self, action: Array, like: Array) -> Array:
        """Turn the joint action (B, A, 5), or (B, A) when discrete, into newtons (B, A, 2) of the type of `like`."""
        accel = self.table("accel", like)
        if not self.continuous_actions:
            return self.table("moves", like)[action] * accel
        slots = namespace(action).astype(action, like.dtype, copy=False)
        return (slots[..., 2::2] - slots[..., 1::2]) * accel

    def push(self, state: State, force: Array) -> State:
        """Move by the forces (B, M, 2) that the movers apply, in newton, and by contacts."""
        if self._collides:
            force = self._feel(state, force)
        return State(physics.integrate(state.mover, force, self.table("max_speed", state.mover)), state.landmark)

    def _feel(self, state: State, force: Array) -> Array:
        """Add to the forces (B, M, 2) those of contacts between solid movers, and with solid landmarks."""
        xp = namespace(state.mover)
        first, end = self._solid_movers
        bodies = others = state.mover[:, first:end]
        if self._solid_landmarks[1]:
            others = xp.concat([bodies, state.landmark[:, slice(*self._solid_landmarks)]], axis=1)
        present = None
        if self.padded:
            present = (bodies[..., 4] != ABSENT)[:, :, None] & (others[..., 4] != ABSENT)[:, None]
        places = bodies[..., :2], others[..., :2]
        felt = physics.add_contacts(*places, force[:, first:end], self._reach(bodies), present)
        if end - first == self.num_movers:
            return felt
        return xp.concat([force[:, :first], felt, force[:, end:]], axis=1)

    def observe(self, state: State, agents: slice = EVERYONE) -> Array:
        """Return the tokens (B, n, N, 5) that `agents` see: the own, landmarks, the other movers."""
        xp = namespace(state.mover)
        chosen = range(self.num_agents)[agents]
        own = state.mover[:, chosen.start : chosen.stop] * self.table("frame", state.mover)  # roles are not relative
        rows = []
        for i, agent in enumerate(chosen):
            rows += [own[:, i : i + 1], state.landmark, state.mover[:, :agent], state.mover[:, agent + 1 :]]
        tokens = xp.concat(rows, axis=1).reshape(-1, len(chosen), self.num_entities, 5)
        tokens -= own[:, :, None]  # in place: large arrays cost by the pass
        if self.observation_scale != 1:
            tokens *= self.table("scale", tokens)
        if self.padded:
            tokens = xp.where(tokens[..., 4:] != ABSENT, tokens, self.table("absent", tokens))
        return tokens

    def token_mask(self, tokens: Array) -> Array:
        """Tell tokens (..., N, 5) from padding, bool (..., N)."""
        return self.token_spec.mask(tokens)

    def world_tokens(self, state: State) -> Array:
        """Return all entities (B, N, 5) in the frame of the world, in the units of an observation, for a critic."""
        xp = namespace(state.mover)
        return xp.concat([state.mover, state.landmark], axis=1) * self.table("scale", state.mover)

    def random_actions(self, u: Array) -> Array:
        """Turn uniforms (B, n, 5) into uniform actions, or (B, n) when discrete."""
        xp = namespace(u)
        return u if self.continuous_actions else xp.astype(xp.floor(u * self.num_actions), xp.int64)

    def aim(self, state: State, agents: range, goal: Array) -> Array:
        """Return the actions that bring `agents` nearest to a goal (B, n or 1, 2), a place for two steps ahead.

        An action changes the velocity after this step, and so the position after the next. Contacts are not foreseen.
        """
        xp = namespace(state.mover)
        me = state.mover[:, agents.start : agents.stop]
        kept = (1.0 - DAMPING) * me[..., 2:4]
        accel = self.table("accel", me)[agents.start : agents.stop]
        miss = goal - (me[..., :2] + DT * me[..., 2:4])  # (B, n, 2), after this step
        if self.continuous_actions:
            push = ((miss / DT - kept) / (DT * accel)).clip(-1.0, 1.0)
            none = xp.zeros_like(push[..., 0])
            slots = [none] + [xp.maximum(sign * push[..., axis], none) for axis in (0, 1) for sign in (-1, 1)]
            return xp.stack(slots, axis=-1)
        push = self.table("moves", me) * accel[:, None]  # (n, 5, 2)
        left = (miss - DT * kept)[:, :, None] - DT * DT * push
        return xp.argmin(physics.length(left)[..., 0], axis=-1)

    def table(self, name: str, like: Array) -> Array:
        """Return a constant of `_tables` in the library, type and device of an array; each is made once."""
        key = name, like.dtype, like.device
        made = self._made.get(key)
        if made is None:
            with outside_inference_mode(like):
                made = namespace(like).asarray(self._tables[name], dtype=like.dtype, device=like.device)
            self._made[key] = made
        return made

    def _reach(self, like: Array) -> physics.Reach:
        """Return how far solid bodies are felt, of the library, type and device of an array; each is made once."""
        key = "reaches", like.dtype, like.device
        made = self._made.get(key)
        if made is None:
            with outside_inference_mode(like):
                made = self._made[key] = physics.reaches(self.table("reach", like))
        return made

    @cached_property
    def _made(self) -> dict[Any, Any]:
        return {}

    @cached_property
    def _solid_movers(self) -> tuple[int, int]:
        """First and end of the movers that feel contacts."""
        return self._solid(slice(0, self.num_movers))

    @cached_property
    def _solid_landmarks(self) -> tuple[int, int]:
        """First and end of the landmarks that push."""
        return self._solid(slice(self.num_movers, None))

    @cached_property
    def _collides(self) -> bool:
        """Whether a mover can meet another body."""
        movers, landmarks = (end - first for first, end in (self._solid_movers, self._solid_landmarks))
        return movers > 0 and movers + landmarks > 1

    def _solid(self, part: slice) -> tuple[int, int]:
        """Return first and end of the solid ones among the entities `part`, counted from its beginning."""
        solid = np.flatnonzero(np.repeat([kind.solid for kind in self.entity_types], self.places)[part])
        return (int(solid[0]), int(solid[-1]) + 1) if solid.size else (0, 0)

    @cached_property
    def _tables(self) -> dict[str, np.ndarray]:
        """Constants by their names."""
        accel, max_speed, radius = (
            np.repeat([getattr(kind, field) for kind in self.entity_types], self.places)[:, None]
            for field in ("accel", "max_speed", "radius")
        )
        movers, landmarks = radius[slice(*self._solid_movers)], radius[self.num_movers :][slice(*self._solid_landmarks)]
        reach = movers + np.concatenate([movers, landmarks]).T
        np.fill_diagonal(reach, -1.0)  # a body does not meet itself
        factor = 1.0 / self.observation_scale
        return {
            "accel": accel[: self.num_agents],
            "max_speed": max_speed[: self.num_movers],
            "reach": reach,
            "moves": np.array(MOVES),
            "frame": np.array([1, 1, 1, 1, 0]),
            "scale": np.array([factor, factor, factor, factor, 1]),
            "absent": np.array([0, 0, 0, 0, ABSENT]),
        }
