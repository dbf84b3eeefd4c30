"""Simple centroid (paper, section 4.3.1): stay at the centroid of moving signal entities among noise entities.

`B` environments, `A` agents, `S` signal entities, `L` noise entities, `M = A + S` movers, `N = M + L` tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from noisy_envs.arrays import Array, namespace
from noisy_envs.games import physics
from noisy_envs.games.particles import (
    ABSENT,
    EVERYONE,
    MAX_ENTITIES,
    NOISE_MOTIONS,
    SELF,
    EntityType,
    ParticleGame,
    State,
    spread,
)
from noisy_envs.games.physics import DAMPING, DT
from noisy_envs.tokens import EITHER, NOISE_ROLES
from noisy_envs.validation import Count, check_choice, check_count, check_flag, check_number, check_policy, highest

AGENT, SIGNAL, NOISE = 1, 2, 3
AGENT_RADIUS, AGENT_ACCEL, AGENT_SPEED = 0.075, 5.0, 5.0
SIGNAL_RADIUS, SIGNAL_ACCEL, SIGNAL_SPEED = 0.05, 1.0, 2.0
NOISE_RADIUS = 0.05


class StepRandomness(NamedTuple):
    """Random variables of one step."""

    wander: Array  # (B, S, 2) forces of the signal entities, in newtons; (B, S + L, 2) if noise wanders too
    policy: Array  # (B, A, 5), or (B, A) if discrete: uniforms for scripted policies; empty if A = 1
    random: Array  # of the same shape: uniformly random actions


@dataclass(frozen=True)
class SimpleCentroid(ParticleGame):
    """The agent must stay at the centroid of signal entities, which wander among noise entities.

    ## Description
    At each step every signal entity accelerates in a random direction. Noise entities do not move, unless
    `noise_motion` is set, and neither the reward nor, by default, the dynamics depend on them. As in the paper, their
    number affects the starting state unless `spread` is set, see "Starting State". The physics are those of the
    Multi-Particle Environment: steps of 0.1 s, damping 0.25, mass 1. The oracle accelerates towards the next position
    of the centroid.

    ## Noise
    By default noise has a role of its own, as in the paper. With `noise_role="signal"` it has the role of signal, and
    an agent must find another cue. The order of the tokens tells signal from noise too, but agents that pool tokens do
    not see it; `noisy_envs.wrappers.ShuffleTokens` hides it from others.

    | `noise_motion` | noise | cue with `noise_role="signal"` |
    |---|---|---|
    | "still" | does not move, as in the paper | motion: all noise has the same velocity relative to the agent |
    | "wander" | starts and moves as signal does | none, if also `noise_offset=0` and `noise_spread=None` |
    | "follow" | accelerates as the first agent does | motion: the velocity relative to that agent vanishes |
    | "orbit" | moves in a circle at constant speed | motion: signal slows down in the first steps |

    `noise_offset` and `noise_spread` add the cue of place. Without any cue no policy that sees tokens but no rewards
    can tell signal from noise. Then the policy "mean", which aims at the centroid of signal and noise together, shows
    what can be reached: it scores about 0.4 among 28 noise entities, the oracle 1. Among 28 that follow, "mean" earns
    less than the random policy. The seed determines how signal moves; the noise has no influence on it.

    ## Action Space
    `continuous_actions=True`: `Box(0, 1, (5,), float32)`. Slot 0 does nothing; slots 1 to 4 accelerate left (−x), right
    (+x), down (−y) and up (+y), by 5 units/s² at most. Opposite slots subtract; values are clipped to [0, 1].
    `continuous_actions=False`: `Discrete(5)`, nothing or full acceleration in one of the four directions.

    ## Observation Space
    `Box((N, 5), float32)`, one token per entity: x, y, vx, vy relative to the observing agent, divided by
    `observation_scale`, and the role. Order: the agent itself (0, 0, 0, 0, self), noise, other agents, signal; noise
    that moves comes last.

    | role | self | another agent | signal | noise | padding |
    |---|---|---|---|---|---|
    | value | 0 | 1 | 2 | 3 | −1 |

    If `num_signal` or `num_noise` is a range, tokens of absent entities are padding: 0, 0, 0, 0, −1.
    `info["signal_mask"]` marks the agent's own token and the signal entities.

    ## Rewards
    −`reward_scale` · √d at each step, where d is the distance from the agent to the centroid of the signal entities, or
    −`reward_scale` · d with `reward_shape="linear"`. Each agent has its own reward.

    ## Starting State
    The spread s is `spread`, or max(log₄(number of entities), 2). Along each axis agents and signal have positions
    U(−s, s) and velocities U(−2, 2). Noise has positions U(−s, s), or U(−`noise_spread`, `noise_spread`), plus one
    common offset of length U(0, `noise_offset`) in a random direction. Noise that moves has velocities U(−2, 2).

    With `spread=None` and more than 16 entities, the number of noise entities also affects where agents and signal
    start: returns fall with it (the oracle's from −0.21 with 12 noise entities to −0.28 with 60), and if `num_noise` is
    a range, starting positions reveal the number. To change only the noise, set `spread`: its default is 2.0 up to 16
    entities and 2.5 for 32.

    ## Episode End
    Episodes are truncated after `max_steps` and never terminate.

    ## Arguments
    * `num_agents`: number of agents. PettingZoo controls all of them by default, Gymnasium the first.
    * `num_signal`, `num_noise`: number of entities, or a range (low, high) from which each episode draws.
    * `continuous_actions`: five floats, or one of five integers.
    * `max_steps`: time limit; Gymnasium's `max_episode_steps` can only shorten it.
    * `other_policy`: policy of agents that are not controlled: "random", "still", "oracle", or a pure function
      (tokens (B, N, 5), u) -> actions, where u and actions are (B, 5), or (B,) if discrete, and u is U[0, 1).
    * `reward_shape`: "sqrt" as in the paper, or "linear".
    * `reward_scale`: factor of the reward.
    * `observation_scale`: divisor of positions and velocities.
    * `spread`: largest starting coordinate of agents and signal; None for max(log₄(number of entities), 2), noise
      included.
    * `noise_spread`: largest starting coordinate of noise before the offset; None for the spread of the others.
    * `noise_offset`: maximum length of the common offset of the noise.
    * `collidable_agents`, `collidable_signal`, `collidable_noise`: which types of entity collide with each other.
    * `noise_role`: "own", or "signal".
    * `noise_motion`: "still", "wander", "follow" or "orbit"; see "Noise".

    ## Differences
    From the paper's code: an agent's own token comes first, before the noise, not after it; the force between bodies at
    the same point is 0, not NaN.

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
    noise_role: str = "own"
    noise_motion: str = "still"

    name: ClassVar[str] = "simple_centroid"
    policies: ClassVar[tuple[str, ...]] = ("random", "still", "oracle", "mean")
    start_speed: ClassVar[float] = 2.0  # each component of a starting velocity is U(-2, 2)

    def __post_init__(self) -> None:
        """Validate the options.

        Raises:
            ValueError, TypeError: naming the option, its value and what is expected.
        """
        self._convert_options()
        check_count("num_agents", self.num_agents, minimum=1, may_be_range=False, maximum=MAX_ENTITIES)
        check_count("num_signal", self.num_signal, minimum=1, maximum=MAX_ENTITIES)
        check_count("num_noise", self.num_noise, minimum=0, maximum=MAX_ENTITIES)
        check_count("max_steps", self.max_steps, minimum=1, may_be_range=False)
        check_choice("reward_shape", self.reward_shape, ("sqrt", "linear"))
        check_choice("noise_role", self.noise_role, NOISE_ROLES)
        check_choice("noise_motion", self.noise_motion, NOISE_MOTIONS)
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
    def entity_types(self) -> tuple[EntityType, ...]:
        """Agents, signal, noise."""
        role, top_speed = (SIGNAL if self.noise_role == "signal" else NOISE), SIGNAL_SPEED * self.noise_moves
        agents, signal, noise = self.collidable_agents, self.collidable_signal, self.collidable_noise
        return (
            EntityType("num_agents", AGENT, AGENT_RADIUS, agents, False, True, AGENT_ACCEL, AGENT_SPEED),
            EntityType("num_signal", SIGNAL, SIGNAL_RADIUS, signal, True, max_speed=SIGNAL_SPEED),
            EntityType("num_noise", role, NOISE_RADIUS, noise, False, max_speed=top_speed),
        )

    @cached_property
    def role_names(self) -> dict[str, int]:
        """Roles by name; noise has one, or that of signal."""
        names = {"self": SELF, "agent": AGENT, "signal": SIGNAL}
        return names | ({"noise": NOISE} if self.noise_role == "own" else {})

    @cached_property
    def role_kinds(self) -> dict[str, str]:
        """Kind of signal, if noise has its role."""
        return {"signal": EITHER} if self.noise_role == "signal" and highest(self.num_noise) else {}

    @cached_property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents."""
        return tuple(f"agent_{i}" for i in range(self.num_agents))

    @cached_property
    def teams(self) -> dict[str, slice]:
        """Sets of agents that can be controlled together."""
        return {"all": slice(0, self.num_agents)}

    @cached_property
    def scripted_policies(self) -> tuple[tuple[slice, Any], ...]:
        """Policies of agents that are not controlled."""
        return ((slice(0, self.num_agents), self.other_policy),)

    @cached_property
    def num_reset_uniforms(self) -> tuple[int, ...]:
        """Uniforms of a reset by stream: numbers of entities, agents, signal, noise offset, positions, velocities."""
        noise = 2 * highest(self.num_noise)
        return (2, 4 * self.num_agents, 4 * highest(self.num_signal), 2, noise, noise * self.noise_moves)

    @cached_property
    def num_step_uniforms(self) -> tuple[int, ...]:
        """Uniforms of a step by stream: signal directions, scripted policies, noise directions."""
        scripted = self.num_agents * (self.num_actions if self.continuous_actions else 1)
        noise = highest(self.num_noise) if self.noise_motion == "wander" else 0
        return (highest(self.num_signal), scripted if self.num_agents > 1 else 0, noise)

    @cached_property
    def largest_spread(self) -> float:
        """Largest starting coordinate of agents and signal, with the largest number of entities."""
        return self.spread or spread(float(self.num_entities))

    @cached_property
    def start_reach(self) -> float:
        """Largest starting coordinate of any entity."""
        return max(self.largest_spread, (self.noise_spread or self.largest_spread) + self.noise_offset)

    def initial(self, u: tuple[Array, ...]) -> State:
        """Draw starting states from uniforms (B, count), one array for each of `num_reset_uniforms`."""
        u_count, u_agent, u_signal, u_offset, u_noise, u_velocity = u
        xp = namespace(u_count)
        batch = u_count.shape[0]
        present = self.present(u_count)
        entities = (self.num_agents + xp.sum(present, axis=1))[:, None, None]
        reach = spread(entities) if self.spread is None else self.spread
        noise_reach = reach if self.noise_spread is None else self.noise_spread
        signed = 2 * xp.reshape(xp.concat([u_agent, u_signal], axis=1), (batch, -1, 4)) - 1
        mover = xp.concat([signed[..., :2] * reach, signed[..., 2:] * self.start_speed], axis=-1)
        angle = 2 * math.pi * u_offset[:, 1:]
        offset = self.noise_offset * u_offset[:, :1] * xp.concat([xp.cos(angle), xp.sin(angle)], axis=1)
        place = (2 * xp.reshape(u_noise, (batch, -1, 2)) - 1) * noise_reach + offset[:, None]
        if not self.noise_moves:
            return self.assemble(mover, xp.concat([place, xp.zeros_like(place)], axis=-1), present)
        velocity = (2 * xp.reshape(u_velocity, place.shape) - 1) * self.start_speed
        mover = xp.concat([mover, xp.concat([place, velocity], axis=-1)], axis=1)
        return self.assemble(mover, mover[:, :0], present)

    def sample_randomness(self, u: tuple[Array, ...]) -> StepRandomness:
        """Turn uniforms (B, count), one array for each of `num_step_uniforms`, into the random variables of a step."""
        xp = namespace(u[0])
        angle = 2 * math.pi * (xp.concat([u[0], u[2]], axis=1) if self.noise_motion == "wander" else u[0])[..., None]
        wander = SIGNAL_ACCEL * xp.concat([xp.cos(angle), xp.sin(angle)], axis=-1)
        shape = (u[1].shape[0], -1, self.num_actions) if self.continuous_actions else u[1].shape
        policy = u[1].reshape(shape)
        return StepRandomness(wander, policy, self.random_actions(policy))

    def transition(self, state: State, action: Array, randomness: StepRandomness) -> State:
        """Return the states after one step of actions (B, A, 5), or (B, A) if discrete."""
        wander = namespace(state.mover).astype(randomness.wander, state.mover.dtype, copy=False)
        forces = [self.control(action, state.mover), wander]
        if self.noise_motion in ("follow", "orbit"):
            forces.append(self.noise_force(self.entities(state, "num_noise"), forces[0]))
        return self.push(state, self.moving_forces(state, *forces))

    def reward(self, state: State, agents: slice = EVERYONE) -> Array:
        """Return the rewards (B, n) of `agents` for the step that led to `state`."""
        me = state.mover[:, : self.num_agents, :2][:, agents]
        signal = self.entities(state, "num_signal")
        distance = physics.length(me - self._mean(signal, signal[..., :2]))[..., 0]
        return -self.reward_scale * (physics.root(distance) if self.reward_shape == "sqrt" else distance)

    def policy(self, name: str, state: State, u: Array, agents: slice = EVERYONE) -> Array:
        """Return the actions of `agents` by a built-in policy.

        Args:
            name: "random" (uniform over the action space), "still", "oracle", which sees the state and aims at the
                position of the centroid when the action takes effect, one step ahead, or "mean", which aims at the
                centroid of signal and noise together: the best that can be done if there is no cue.
            state: of B environments.
            u: uniforms (B, n, 5), or (B, n) if discrete.
            agents: the n agents that act.

        Returns:
            Actions (B, n, 5), or (B, n) int64 if discrete.
        """
        if name in ("oracle", "mean"):
            rows = self.entities(state, "num_signal")
            if name == "mean":
                rows = namespace(u).concat([rows, self.entities(state, "num_noise")], axis=1)
            ahead = rows[..., :2] + (2.0 - DAMPING) * DT * rows[..., 2:4]
            return self.aim(state, range(self.num_agents)[agents], self._mean(rows, ahead))
        return self.random_actions(u if name == "random" else namespace(u).zeros_like(u))

    def _mean(self, rows: Array, value: Array) -> Array:
        """Return the mean of values (B, n, 2) over those of the entities (B, n, 5) that are present, (B, 1, 2)."""
        xp = namespace(value)
        if not self.padded:
            return xp.sum(value, axis=1, keepdims=True) * (1.0 / value.shape[1])
        present = xp.astype(rows[..., 4:] != ABSENT, value.dtype)
        return xp.sum(value * present, axis=1, keepdims=True) / xp.sum(present, axis=1, keepdims=True)
