"""Simple centroid (paper, section 4.3.1): stay at the centroid of moving signal among fixed noise.

`B` worlds, `A` learning agents, `S` signal entities, `L` noise entities, `M = A + S` movers, `N = M + L` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from noisy_envs import physics
from noisy_envs.arrays import Array, as_numpy, namespace
from noisy_envs.options import (
    Count,
    check_array,
    check_choice,
    check_count,
    check_fields,
    check_flag,
    check_number,
    check_policy,
    highest,
    lowest,
    plain,
)
from noisy_envs.physics import DAMPING, DT
from noisy_envs.tokens import TokenSpec

SELF, AGENT, SIGNAL, NOISE, ABSENT = 0, 1, 2, 3, -1
AGENT_RADIUS, AGENT_ACCEL, AGENT_SPEED = 0.075, 5.0, 5.0
SIGNAL_RADIUS, SIGNAL_ACCEL, SIGNAL_SPEED = 0.05, 1.0, 2.0
NOISE_RADIUS = 0.05
START_SPEED = 2.0  # each component of a starting velocity is U(-2, 2)
FASTEST = max(AGENT_SPEED, SIGNAL_SPEED, START_SPEED) * (1 + 1e-6)  # of a component; a clipped speed is rounded


class State(NamedTuple):
    """A batch of worlds. Movers are the agents, then the signal; an absent entity is a row of zeros."""

    mover: Array  # (B, M, 4) x, y, vx, vy
    landmark: Array  # (B, L, 4) x, y, 0, 0
    role: Array  # (B, M + L) AGENT, SIGNAL, NOISE or ABSENT, movers first


class Chance(NamedTuple):
    """What chance decides in a step."""

    wander: Array  # (B, S, 2) force of the signal, in newton
    policy: Array  # (B, A, 5), or (B, A) when discrete: uniforms for agents that follow a policy; none if A = 1


@dataclass(frozen=True)
class SimpleCentroid:
    """One agent learns to stay at the centroid of signal entities that wander among fixed noise entities.

    ## Description
    Signal entities push themselves with a constant force in a direction drawn anew at each step. Noise entities
    do not move, and neither reward nor (by default) dynamics depends on them: they are noise in the
    observation alone. The world is the Multi-Particle Environment's: steps of 0.1 s, damping 0.25, unit mass.

    ## Action Space
    `continuous_actions=True`: `Box(0, 1, (5,), float32)`; slot 0 does nothing, slots 1 to 4 push left (−x), right
    (+x), down (−y), up (+y). Opposite slots subtract, values outside 0 … 1 are clipped. A full slot accelerates
    by 5 units/s². `continuous_actions=False`: `Discrete(5)`, the same five as all or nothing.

    ## Observation Space
    `Box((N, 5), float32)`, a token for each entity: x, y, vx, vy relative to the observing agent, divided by
    `observation_scale`, and its role. Rows: the agent itself (0, 0, 0, 0, self), noise, other agents, signal.

    | role | self | another learning agent | signal | noise | padding |
    |---|---|---|---|---|---|
    | value | 0 | 1 | 2 | 3 | −1 |

    Where `num_signal` or `num_noise` is a range, rows of absent entities are padding: 0, 0, 0, 0, −1.

    ## Rewards
    After each step −`reward_scale` · √d, where d is the distance from the agent to the centroid of the signal;
    −`reward_scale` · d with `reward_shape="linear"`. Each agent has its own.

    ## Starting State
    Spread s = max(log₄(entities present), 2), or `spread`. Agents and signal: position U(−s, s), velocity
    U(−2, 2), for each axis. Noise: U(−s, s), or U(−`noise_spread`, `noise_spread`), plus one offset for all, of
    length U(0, `noise_offset`) in a random direction.

    ## Episode End
    Truncated after `max_steps`; never terminated.

    ## Arguments
    * `num_agents`: learning agents. The PettingZoo view drives them all; elsewhere the first learns and the
      others follow `other_policy`: "random", "still", "oracle", or a pure function (tokens (B, N, 5), u) -> action,
      where u and action are (B, 5), or (B,) when actions are discrete; u is U[0, 1).
    * `num_signal`, `num_noise`: a number, or a range (low, high) drawn anew each episode.
    * `continuous_actions`, `max_steps`, `observation_scale`, `reward_shape`, `reward_scale`, `spread`,
      `noise_spread`, `noise_offset`: see above.
    * `collidable_agents`, `collidable_signal`, `collidable_noise`: which kinds push each other away on contact.

    ## Differences
    From the paper's code: the token order (theirs has the noise first for all, ours the own token, then noise),
    and equal bodies at one point feel no force instead of NaN.

    ## Version History
    * v0: first version.
    """

    num_agents: int = 1
    num_signal: Count = 3
    num_noise: Count = 4
    continuous_actions: bool = True
    max_steps: int = 128
    other_policy: object = "random"
    reward_shape: str = "sqrt"
    reward_scale: float = 0.01
    observation_scale: float = 5.0
    spread: float | None = None
    noise_spread: float | None = None
    noise_offset: float = 1.0
    collidable_agents: bool = False
    collidable_signal: bool = False
    collidable_noise: bool = False

    name: ClassVar[str] = "simple_centroid"
    agent_prefix: ClassVar[str] = "agent"
    num_actions: ClassVar[int] = 5
    terminates: ClassVar[bool] = False  # so a shell need not look for an end that never comes
    policies: ClassVar[tuple[str, ...]] = ("random", "still", "oracle")

    def __post_init__(self) -> None:
        """Refuse what the game cannot play.

        Raises:
            ValueError, TypeError: naming the option, its value and what is allowed.
        """
        for name, value in vars(self).copy().items():  # a NumPy scalar would turn float32 worlds into float64
            object.__setattr__(self, name, plain(value))
        check_count("num_agents", self.num_agents, minimum=1, may_be_range=False)
        check_count("num_signal", self.num_signal, minimum=1)
        check_count("num_noise", self.num_noise, minimum=0)
        check_count("max_steps", self.max_steps, minimum=1, may_be_range=False)
        check_choice("reward_shape", self.reward_shape, ("sqrt", "linear"))
        check_policy("other_policy", self.other_policy, self.policies)
        check_number("reward_scale", self.reward_scale, above=0)
        check_number("observation_scale", self.observation_scale, above=0)
        check_number("noise_offset", self.noise_offset, minimum=0)
        for option in ("spread", "noise_spread"):
            if getattr(self, option) is not None:
                check_number(option, getattr(self, option), above=0)
        for option in ("continuous_actions", "collidable_agents", "collidable_signal", "collidable_noise"):
            check_flag(option, getattr(self, option))

    @cached_property
    def num_movers(self) -> int:
        """Places for agents and signal, M."""
        return self.num_agents + highest(self.num_signal)

    @cached_property
    def num_entities(self) -> int:
        """Places for all entities, N."""
        return self.num_movers + highest(self.num_noise)

    @cached_property
    def padded(self) -> bool:
        """Whether a place can be empty."""
        return any(lowest(count) < highest(count) for count in (self.num_signal, self.num_noise))

    @cached_property
    def start_draws(self) -> tuple[int, ...]:
        """Uniforms that `initial` takes for each stream: both counts, agents, signal, noise offset, noise."""
        return (2, 4 * self.num_agents, 4 * highest(self.num_signal), 2, 2 * highest(self.num_noise))

    @cached_property
    def step_draws(self) -> tuple[int, ...]:
        """Uniforms that a step takes for each stream: signal directions, policies."""
        followers = self.num_agents if self.num_agents > 1 else 0
        return (highest(self.num_signal), followers * (self.num_actions if self.continuous_actions else 1))

    @cached_property
    def token_spec(self) -> TokenSpec:
        """What an observation means."""
        roles = {"self": SELF, "agent": AGENT, "signal": SIGNAL, "noise": NOISE}
        return TokenSpec(self.num_entities, ("x", "y", "vx", "vy", "role"), roles)

    @cached_property
    def start_reach(self) -> float:
        """Largest coordinate of an entity at the start."""
        most = self._spread(float(self.num_entities))
        return max(self.spread or most, (self.noise_spread or self.spread or most) + self.noise_offset)

    @cached_property
    def travel(self) -> float:
        """Longest way of a mover along an axis in one episode."""
        return DT * (max(AGENT_SPEED, SIGNAL_SPEED) * self.max_steps + START_SPEED)

    @cached_property
    def observation_bounds(self) -> tuple[list[float], list[float]]:
        """Lowest and highest value of each feature, finite, for any state that `admit` takes, played on."""
        place = 2 * (self.start_reach + 2 * self.travel) / self.observation_scale
        speed = 2 * FASTEST / self.observation_scale
        return [-place, -place, -speed, -speed, ABSENT], [place, place, speed, speed, NOISE]

    def initial(self, u: tuple[Array, ...]) -> State:
        """Draw starting states from uniforms, one array (B, count) for each of `start_draws`."""
        u_count, u_agent, u_signal, u_offset, u_noise = u
        xp = namespace(u_count)
        batch = u_count.shape[0]
        ones = xp.ones_like(u_count[:, :1])
        role = [AGENT * xp.ones_like(u_agent[:, ::4])]
        for u_one, count, kind in ((0, self.num_signal, SIGNAL), (1, self.num_noise, NOISE)):
            size = highest(count) - lowest(count) + 1
            drawn = lowest(count) + xp.floor(u_count[:, u_one : u_one + 1] * size)
            place = xp.arange(highest(count), dtype=u_count.dtype, device=u_count.device)
            role.append(xp.where(place < drawn, kind * ones, ABSENT * ones))
        role = xp.concat(role, axis=1)
        present = xp.astype(role != ABSENT, u_count.dtype)
        entities = xp.sum(present, axis=1, keepdims=True)[..., None]  # (B, 1, 1)

        spread = self._spread(entities) if self.spread is None else self.spread
        noise_spread = spread if self.noise_spread is None else self.noise_spread
        signed = 2 * xp.reshape(xp.concat([u_agent, u_signal], axis=1), (batch, self.num_movers, 4)) - 1
        mover = xp.concat([signed[..., :2] * spread, signed[..., 2:] * START_SPEED], axis=-1)
        angle = 2 * math.pi * u_offset[:, 1:]
        offset = self.noise_offset * u_offset[:, :1] * xp.concat([xp.cos(angle), xp.sin(angle)], axis=1)
        place = (2 * xp.reshape(u_noise, (batch, -1, 2)) - 1) * noise_spread + offset[:, None]
        landmark = xp.concat([place, xp.zeros_like(place)], axis=-1)
        present = present[..., None]
        return State(mover * present[:, : self.num_movers], landmark * present[:, self.num_movers :], role)

    def arrange(self, position: Array, velocity: Array, num_signal: Array, num_noise: Array) -> State:
        """Build states from entities in the order agents, signal, noise, absent ones (anything) included.

        Args:
            position: (B, N, 2) in units of the world.
            velocity: (B, N, 2); that of noise is ignored, it is fixed.
            num_signal: (B, 1) signal entities present.
            num_noise: (B, 1) noise entities present.
        """
        xp = namespace(position)
        movers = self.num_movers
        place = xp.arange(self.num_entities, dtype=position.dtype, device=position.device)[None]
        kind = xp.ones_like(position[..., 0])
        signal = xp.where(place - self.num_agents < num_signal, SIGNAL * kind, ABSENT * kind)
        noise = xp.where(place - movers < num_noise, NOISE * kind, ABSENT * kind)
        role = xp.where(place < self.num_agents, AGENT * kind, xp.where(place < movers, signal, noise))
        present = xp.astype(role != ABSENT, position.dtype)[..., None]
        body = xp.concat([position * present, velocity * present], axis=-1)
        fixed = xp.concat([body[:, movers:, :2], xp.zeros_like(body[:, movers:, 2:])], axis=-1)
        return State(body[:, :movers], fixed, role)

    def chance(self, u: tuple[Array, ...]) -> Chance:
        """Turn uniforms, an array for each of `step_draws`, into the chance of one step: no state enters."""
        xp = namespace(u[0])
        angle = 2 * math.pi * u[0][..., None]
        wander = SIGNAL_ACCEL * xp.concat([xp.cos(angle), xp.sin(angle)], axis=-1)
        shape = (u[1].shape[0], -1, self.num_actions) if self.continuous_actions else u[1].shape
        return Chance(wander, xp.reshape(u[1], shape))

    def admit(self, given: State | Mapping[str, Any], batch: tuple[int, ...]) -> State:
        """Check a state that a user hands over, and return it as float32 NumPy arrays with one batch axis.

        Args:
            given: what `env.unwrapped.state` returned; or a mapping with `position` (..., N, 2), entities in the
                order agents, signal, noise, and if wished `velocity` (..., N, 2), `num_signal`, `num_noise` (...).
            batch: leading shape, () for one world or (B,).

        Raises:
            ValueError, TypeError: naming the field, its value and what is allowed.
        """
        if isinstance(given, State):
            mover, landmark, role = (as_numpy(field) for field in given)
            bodies = np.concatenate([mover, landmark], axis=-2)
            present = {"num_signal": (role == SIGNAL).sum(-1), "num_noise": (role == NOISE).sum(-1)}
            order = {"position": bodies[..., :2], "velocity": bodies[..., 2:], **present}
            state = self.admit(order, batch)
            if not np.array_equal(state.role.reshape(role.shape), role):
                raise ValueError(f"state: role={role.tolist()}: must be agents, signal, noise, the absent last in each")
            return state
        check_fields("state", given, required=("position",), known=("position", "velocity", "num_signal", "num_noise"))
        shape = (*batch, self.num_entities, 2)
        position = check_array("position", given["position"], shape, limit=self.start_reach + self.travel)
        velocity = check_array("velocity", given.get("velocity", np.zeros(shape)), shape, limit=FASTEST)
        counts = []
        for name in ("num_signal", "num_noise"):
            allowed = getattr(self, name)
            count = as_numpy(given.get(name, highest(allowed)))
            if count.dtype.kind not in "iu":
                raise TypeError(f"state: {name}={count}: must be of integers")
            if count.shape not in ((), batch):
                raise ValueError(f"state: {name}={count}: shape {count.shape} must be () or {batch}")
            if (count < lowest(allowed)).any() or (count > highest(allowed)).any():
                raise ValueError(f"state: {name}={count}: must be within {lowest(allowed)} … {highest(allowed)}")
            counts.append(np.broadcast_to(count, batch).reshape(-1, 1))
        rows = (-1, self.num_entities, 2)
        return self.arrange(position.reshape(rows), velocity.reshape(rows), counts[0], counts[1])

    def transition(self, state: State, action: Array, chance: Chance) -> State:
        """Play one step: `action` (B, A, 5), or (B, A) when discrete."""
        xp = namespace(state.mover)
        wander = chance.wander
        if self.padded:
            wander = xp.where(self._signal_present(state), wander, xp.zeros_like(wander))
        return self.push(state, xp.concat([self.control(action), wander], axis=1))

    def push(self, state: State, force: Array) -> State:
        """Move by the forces (B, M, 2) that the movers apply, in newton, and by contacts."""
        xp = namespace(force)
        if force.dtype != state.mover.dtype:
            force = xp.astype(force, state.mover.dtype)
        for (rows, radius), (other, radius_of_other) in self._contacts:
            bodies = xp.concat([state.mover, state.landmark], axis=1)[..., :2]
            present = state.role[:, other] != ABSENT
            felt = physics.contact_force(bodies[:, rows], bodies[:, other], radius + radius_of_other, present)
            felt = xp.where((state.role[:, rows] != ABSENT)[..., None], felt, xp.zeros_like(felt))
            force = xp.concat([force[:, : rows.start], force[:, rows] + felt, force[:, rows.stop :]], axis=1)
        is_agent = xp.astype(state.role[:, : self.num_movers, None] == AGENT, force.dtype)
        max_speed = SIGNAL_SPEED + (AGENT_SPEED - SIGNAL_SPEED) * is_agent
        return State(physics.integrate(state.mover, force, max_speed), state.landmark, state.role)

    def control(self, action: Array) -> Array:
        """Turn actions (B, A, 5), or (B, A) when discrete, into forces (B, A, 2) in newton."""
        xp = namespace(action)
        if self.continuous_actions:
            slots = xp.clip(action, 0.0, 1.0)
            return (slots[..., 2::2] - slots[..., 1::2]) * AGENT_ACCEL
        right, up = (xp.astype(action == k, xp.float32) - xp.astype(action == k - 1, xp.float32) for k in (2, 4))
        return xp.stack([right, up], axis=-1) * AGENT_ACCEL

    def observation(self, state: State, agent: int = 0) -> Array:
        """Return the tokens (B, N, 5) that an agent sees."""
        xp = namespace(state.mover)
        mover, role = state.mover, state.role
        own = mover[:, agent : agent + 1]
        before, after = slice(0, agent), slice(agent + 1, self.num_movers)
        order = [own, state.landmark, mover[:, before], mover[:, after]]
        body = (xp.concat(order, axis=1) - own) * (1.0 / self.observation_scale)
        role = xp.concat([SELF * role[:, :1], role[:, self.num_movers :], role[:, before], role[:, after]], axis=1)
        if self.padded:
            body = xp.where((role != ABSENT)[..., None], body, xp.zeros_like(body))
        return xp.concat([body, role[..., None]], axis=-1)

    def reward(self, state: State) -> Array:
        """Return each agent's reward (B, A) in a state just reached."""
        xp = namespace(state.mover)
        away = state.mover[:, : self.num_agents, :2] - self._signal_mean(state, state.mover[:, self.num_agents :, :2])
        distance = physics.length(away)[..., 0]
        return -self.reward_scale * (xp.sqrt(distance) if self.reward_shape == "sqrt" else distance)

    def signal_mask(self, tokens: Array) -> Array:
        """Tell which tokens (..., N, 5) carry signal, bool (..., N): the observer's own and the signal entities."""
        role = tokens[..., -1]
        return (role == SELF) | (role == SIGNAL)

    def world_tokens(self, state: State) -> Array:
        """Return all entities (B, N, 5) in the frame of the world, in the units of an observation, for a critic."""
        xp = namespace(state.mover)
        body = xp.concat([state.mover, state.landmark], axis=1) * (1.0 / self.observation_scale)
        return xp.concat([body, state.role[..., None]], axis=-1)

    def policy(self, name: str, state: State, u: Array) -> Array:
        """Let every agent act by a reference policy.

        Args:
            name: "random" (uniform over the action space), "still", or "oracle", which sees the state: it aims for
                the point where the signal's centroid will be when the action takes effect, one step ahead.
            state: a batch of worlds.
            u: (B, A, 5) uniforms, or (B, A) when discrete.

        Returns:
            Actions (B, A, 5), or (B, A) int64 when discrete.
        """
        xp = namespace(u)
        if name == "random":
            return u if self.continuous_actions else xp.astype(xp.floor(u * self.num_actions), xp.int64)
        if name == "still":
            return xp.zeros_like(u) if self.continuous_actions else xp.zeros_like(u, dtype=xp.int64)
        return self._chase(state)

    def _chase(self, state: State) -> Array:
        """Act so that the position after next is the signal's expected centroid then."""
        xp = namespace(state.mover)
        me, signal = state.mover[:, : self.num_agents], state.mover[:, self.num_agents :]
        goal = self._signal_mean(state, signal[..., :2] + (2.0 - DAMPING) * DT * signal[..., 2:])  # (B, 1, 2)
        position = me[..., :2] + DT * me[..., 2:]  # already settled by the velocity
        kept = (1.0 - DAMPING) * me[..., 2:]
        if self.continuous_actions:
            push = xp.clip(((goal - position) / DT - kept) / (DT * AGENT_ACCEL), -1.0, 1.0)  # (B, A, 2)
            none = xp.zeros_like(push[..., 0])
            slots = [none] + [xp.maximum(sign * push[..., axis], none) for axis in (0, 1) for sign in (-1, 1)]
            return xp.stack(slots, axis=-1)
        every = xp.arange(self.num_actions, device=me.device)[None]  # (1, 5)
        push = xp.astype(self.control(every), me.dtype)[:, None] * DT  # (1, 1, 5, 2)
        miss = physics.length((position + DT * kept - goal)[..., None, :] + DT * push)[..., 0]
        return xp.argmin(miss, axis=-1)

    def _signal_mean(self, state: State, value: Array) -> Array:
        """Average a vector over the signal present: (B, S, 2) -> (B, 1, 2)."""
        xp = namespace(value)
        if not self.padded:
            return xp.sum(value, axis=1, keepdims=True) * (1.0 / lowest(self.num_signal))
        present = xp.astype(self._signal_present(state), value.dtype)
        return xp.sum(value * present, axis=1, keepdims=True) / xp.sum(present, axis=1, keepdims=True)

    def _signal_present(self, state: State) -> Array:
        """Tell which places of signal are taken, (B, S, 1)."""
        return (state.role[:, self.num_agents : self.num_movers] != ABSENT)[..., None]

    def _spread(self, entities: Array) -> Array:
        """Half-width max(log4(entities), 2) of the square in which entities start."""
        if isinstance(entities, float):
            return max(math.log(entities, 4), 2.0)
        xp = namespace(entities)
        return xp.maximum(xp.log(entities) / math.log(4), 2 * xp.ones_like(entities))

    @cached_property
    def _contacts(self) -> list[tuple[tuple[slice, float], tuple[slice, float]]]:
        """Pairs of colliding kinds, (pushed, pushing), each as its entities and their radius."""
        agents, movers = self.num_agents, self.num_movers
        moving = [(slice(0, agents), AGENT_RADIUS)] if self.collidable_agents else []
        moving += [(slice(agents, movers), SIGNAL_RADIUS)] if self.collidable_signal else []
        fixed = [(slice(movers, self.num_entities), NOISE_RADIUS)] if self.collidable_noise else []
        return [(pushed, pushing) for pushed in moving for pushing in moving + fixed]
