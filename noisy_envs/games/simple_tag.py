"""Simple tag (paper, section 4.3.2; MPE, Lowe et al. 2017): predators chase prey among obstacles.

`B` environments, `P` predators, `Q` prey, `A = P + Q` agents, `L` obstacles, `N = A + L` tokens.
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
from noisy_envs.tokens import EITHER, NOISE_ROLES, SIGNAL
from noisy_envs.validation import Count, check_choice, check_count, check_flag, check_policy, highest

OBSTACLE, PREDATOR, PREY, NOISE = 1, 2, 3, 4
PREDATOR_RADIUS, PREDATOR_ACCEL, PREDATOR_SPEED = 0.075, 3.0, 1.0
PREY_RADIUS, PREY_ACCEL, PREY_SPEED = 0.05, 4.0, 1.3
OBSTACLE_RADIUS = 0.2
CATCH = 10.0  # reward of a predator, and penalty of prey, for each step of contact
EDGE, OUTSIDE = 0.9, 1.0  # coordinates where the penalty for leaving starts, and where it becomes exponential
FULL_PENALTY = 10.0  # per axis
SMALLEST_SCALE = 0.1  # of the starting state "paper"
MPE_OBSTACLE_REACH = 0.9
FLEE_DISTANCE = 100.0  # of the goal of a fleeing agent, in multiples of the distance to its pursuer

# the options of MPE2's simple_tag_v3; "Differences" in the docstring lists what remains
MPE: dict[str, Any] = {
    "num_predators": 3,
    "num_prey": 1,
    "num_obstacles": 2,
    "collidable_obstacles": True,
    "reward_sharing": "shared",
    "start": "mpe",
    "max_steps": 25,
}


class StepRandomness(NamedTuple):
    """Random variables of one step."""

    policy: Array  # (B, A, 5), or (B, A) if discrete: uniforms for scripted policies
    random: Array  # of the same shape: uniformly random actions
    noise: Array  # (B, L, 5), or (B, L) if discrete: actions of noise that wanders; otherwise empty


@dataclass(frozen=True)
class SimpleTag(ParticleGame):
    """Predators are rewarded for touching prey; obstacles without collisions are noise in the observation.

    ## Description
    The predator-prey task of the Multi-Particle Environment: prey are faster, predators larger. Steps last 0.1 s,
    damping is 0.25, mass 1. Bodies that can collide push each other away on contact. With `collidable_obstacles=False`,
    as in the paper, obstacles affect neither reward nor dynamics: they are pure noise in the observation, and returns
    are equal with 0 and 28 obstacles. The oracle chases the nearest prey.

    `num_noise` adds decoys: entities of the size of prey that collide with nothing and cannot be caught, see "Noise".

    | | radius | acceleration | top speed |
    |---|---|---|---|
    | predator | 0.075 | 3 | 1 |
    | prey | 0.05 | 4 | 1.3 |
    | obstacle | 0.2 | – | 0 |

    ## Noise
    Decoys start where agents start, and have the speed and the acceleration of prey. With `noise_role="signal"` they
    have the role of prey, and an agent must find another cue.

    | `noise_motion` | decoys | cue with `noise_role="signal"` |
    |---|---|---|
    | "wander" | act at random, as prey do by default | contact: predators push prey, and prey push each other |
    | "still" | do not move | motion: all decoys have the same velocity relative to the agent |
    | "follow" | act as the first predator does | motion: velocities relative to that predator differ little |
    | "orbit" | move in a circle at constant speed | motion: prey change their direction at random |

    The policy "chase_any" chases the nearest of prey and decoys, as if nothing distinguished them. With 3 prey and 4
    decoys that wander it earns 52 per episode, the oracle 275, the random policy 21. The seed determines how agents and
    obstacles start, the number of decoys does not.

    ## Action Space
    `continuous_actions=False`: `Discrete(5)`: nothing, or full acceleration left (−x), right (+x), down (−y) or up
    (+y). `continuous_actions=True`: `Box(0, 1, (5,), float32)`, the same five as strengths. Slot 0 does nothing,
    opposite slots subtract, and values are clipped to [0, 1].

    ## Observation Space
    `Box((N, 5), float32)`, one token per entity: x, y, vx, vy relative to the observing agent, and the role. Order: the
    agent itself (0, 0, 0, 0, self), obstacles, decoys that do not move, the other predators, the other prey, decoys
    that move.

    | role | self | obstacle | predator | prey | noise | padding |
    |---|---|---|---|---|---|---|
    | value | 0 | 1 | 2 | 3 | 4 | −1 |

    If `num_obstacles` or `num_noise` is a range, tokens of absent entities are padding: 0, 0, 0, 0, −1.
    `info["signal_mask"]` marks all agents, and obstacles if they collide.

    ## Rewards
    At each step a predator gets 10 for each prey that it touches (`reward_sharing="own"`, the paper), or 10 for each
    contact of any predator with any prey ("shared", MPE). Prey get −10 for each predator that touches them, and on each
    axis a penalty for leaving the arena: 0 where |x| < 0.9, 10 (|x| − 0.9) where |x| < 1, and min(exp(2|x| − 2), 10)
    beyond. Contacts count only if both predators and prey collide.

    ## Starting State
    `start="paper"`: along each axis agents have positions c · U(−1, 1), with one c ~ U(0.1, max(log₄ A, 0.1)) for all
    agents, and velocities U(−0.5, 0.5); obstacles have positions U(−s, s), s = max(log₄(number of obstacles), 2).
    `start="mpe"`: agents start at rest at U(−1, 1), obstacles at U(−0.9, 0.9).

    ## Episode End
    Episodes are truncated after `max_steps` and never terminate.

    ## Arguments
    * `num_predators`, `num_prey`: number of agents. Gymnasium controls the first predator.
    * `num_obstacles`: number of obstacles, or a range (low, high) from which each episode draws.
    * `continuous_actions`: five floats, or one of five integers.
    * `max_steps`: time limit; Gymnasium's `max_episode_steps` can only shorten it.
    * `prey_policy`, `predator_policy`: policies of agents that are not controlled: "random", "still", "chase" (the
      nearest of the other team), "flee" (from the nearest), "oracle" (predators chase, prey flee), "chase_any" (as
      "chase", but predators chase decoys too), or a pure function
      (tokens (B, N, 5), u) -> actions, where u and actions are (B,), or (B, 5) if continuous, and u is U[0, 1). The
      function gets the tokens of one agent at a time.
    * `reward_sharing`: "own" as in the paper, or "shared" as in MPE.
    * `start`: "paper", or "mpe".
    * `collidable_predators`, `collidable_prey`, `collidable_obstacles`: which types of entity collide with each other.
      Rewards for contacts require that both predators and prey collide.
    * `num_noise`: number of decoys, or a range (low, high) from which each episode draws.
    * `noise_role`: "own", or "signal" for that of prey.
    * `noise_motion`: "wander", "still", "follow" or "orbit"; see "Noise".

    ## Differences
    From MPE2's simple_tag_v3, with the options `MPE` (environment ID `SimpleTagMPE`): agents are named `predator_i` and
    `prey_i`, not `adversary_i` and `agent_i`; observations are tokens, with relative velocities and with those of
    predators; continuous actions outside [0, 1] are clipped without a warning; the force between bodies at the same
    point is 0, not NaN; there is no curriculum, no partial observation and no termination on success. If only predators
    or only prey collide, which MPE2 does not offer, contacts give no reward. Everything else equals MPE2 up to
    rounding: `tests/games/test_mpe2_parity.py` steps both from equal states. From the paper's code: the force between
    bodies at the same point is 0, not NaN.

    ## Version History
    * v0: first version.
    """

    num_predators: int = 1
    num_prey: int = 3
    num_obstacles: Count = 4
    continuous_actions: bool = False
    max_steps: int = 128
    prey_policy: object = "random"
    predator_policy: object = "random"
    reward_sharing: str = "own"
    start: str = "paper"
    collidable_predators: bool = True
    collidable_prey: bool = True
    collidable_obstacles: bool = False
    num_noise: Count = 0
    noise_role: str = "own"
    noise_motion: str = "wander"

    name: ClassVar[str] = "simple_tag"
    policies: ClassVar[tuple[str, ...]] = ("random", "still", "chase", "flee", "oracle", "chase_any")
    start_speed: ClassVar[float] = 0.5  # each component of the paper's starting velocity is U(-0.5, 0.5)
    observation_scale = 1.0  # not an option of this game

    def __post_init__(self) -> None:
        """Validate the options.

        Raises:
            ValueError, TypeError: naming the option, its value and what is expected.
        """
        self._convert_options()
        for option in ("num_predators", "num_prey"):
            check_count(option, getattr(self, option), minimum=1, may_be_range=False, maximum=MAX_ENTITIES)
        check_count("max_steps", self.max_steps, minimum=1, may_be_range=False)
        check_count("num_obstacles", self.num_obstacles, minimum=0, maximum=MAX_ENTITIES)
        check_count("num_noise", self.num_noise, minimum=0, maximum=MAX_ENTITIES)
        check_choice("noise_role", self.noise_role, NOISE_ROLES)
        check_choice("noise_motion", self.noise_motion, NOISE_MOTIONS)
        check_choice("reward_sharing", self.reward_sharing, ("own", "shared"))
        check_choice("start", self.start, ("paper", "mpe"))
        for option in ("predator_policy", "prey_policy"):
            check_policy(option, getattr(self, option), self.policies)
        for option in ("continuous_actions", "collidable_predators", "collidable_prey", "collidable_obstacles"):
            check_flag(option, getattr(self, option))

    @cached_property
    def entity_types(self) -> tuple[EntityType, ...]:
        """Predators, prey, noise if it moves, obstacles, noise if it does not move."""
        predators, prey, matter = self.collidable_predators, self.collidable_prey, self.obstacles_matter
        role, top_speed = (PREY if self.noise_role == "signal" else NOISE), PREY_SPEED * self.noise_moves
        obstacles = EntityType("num_obstacles", OBSTACLE, OBSTACLE_RADIUS, self.collidable_obstacles, matter)
        noise = EntityType("num_noise", role, PREY_RADIUS, False, False, max_speed=top_speed)
        return (
            EntityType(
                "num_predators", PREDATOR, PREDATOR_RADIUS, predators, True, True, PREDATOR_ACCEL, PREDATOR_SPEED
            ),
            EntityType("num_prey", PREY, PREY_RADIUS, prey, True, True, PREY_ACCEL, PREY_SPEED),
            *((noise, obstacles) if self.noise_moves else (obstacles, noise)),
        )

    @cached_property
    def role_names(self) -> dict[str, int]:
        """Roles by name; without noise of a role of its own, there is no such role, as in the paper."""
        names = {"self": SELF, "obstacle": OBSTACLE, "predator": PREDATOR, "prey": PREY}
        return names | ({"noise": NOISE} if self.noise_role == "own" and highest(self.num_noise) else {})

    @cached_property
    def num_agents(self) -> int:
        """Number of predators and prey, A."""
        return self.num_predators + self.num_prey

    @cached_property
    def agents(self) -> tuple[str, ...]:
        """Names of the agents."""
        predators = [f"predator_{i}" for i in range(self.num_predators)]
        return (*predators, *(f"prey_{i}" for i in range(self.num_prey)))

    @cached_property
    def teams(self) -> dict[str, slice]:
        """Sets of agents that can be controlled together."""
        first_prey = self.num_predators
        return {
            "all": slice(0, self.num_agents),
            "predators": slice(0, first_prey),
            "prey": slice(first_prey, self.num_agents),
        }

    @cached_property
    def scripted_policies(self) -> tuple[tuple[slice, Any], ...]:
        """Policies of agents that are not controlled."""
        return ((self.teams["predators"], self.predator_policy), (self.teams["prey"], self.prey_policy))

    @cached_property
    def obstacles_matter(self) -> bool:
        """Whether obstacles collide with an agent; otherwise they are noise."""
        return self.collidable_obstacles and (self.collidable_predators or self.collidable_prey)

    @cached_property
    def role_kinds(self) -> dict[str, str]:
        """Kind of obstacles, if they matter, and of prey, if noise has its role."""
        kinds = {"obstacle": SIGNAL} if self.obstacles_matter else {}
        return kinds | ({"prey": EITHER} if self.noise_role == "signal" and highest(self.num_noise) else {})

    @cached_property
    def num_reset_uniforms(self) -> tuple[int, ...]:
        """Uniforms of a reset by stream: number of obstacles, scale, agents, obstacles, number of noise, noise."""
        noise = highest(self.num_noise)
        return (1, 1, 4 * self.num_agents, 2 * highest(self.num_obstacles), 1, 4 * noise)

    @cached_property
    def num_step_uniforms(self) -> tuple[int, ...]:
        """Uniforms of a step by stream: scripted policies, noise."""
        noise = highest(self.num_noise) if self.noise_motion == "wander" else 0
        size = self.num_actions if self.continuous_actions else 1
        return (self.num_agents * size, noise * size)

    @cached_property
    def largest_scale(self) -> float:
        """Largest starting coordinate of agents with `start="paper"`."""
        return max(math.log(self.num_agents, 4), SMALLEST_SCALE)

    @cached_property
    def start_reach(self) -> float:
        """Largest starting coordinate of any entity."""
        if self.start == "mpe":
            return 1.0
        return max(self.largest_scale, spread(float(max(highest(self.num_obstacles), 1))))

    def initial(self, u: tuple[Array, ...]) -> State:
        """Draw starting states from uniforms (B, count), one array for each of `num_reset_uniforms`."""
        u_obstacles, u_scale, u_agent, u_obstacle, u_noises, u_noise = u
        xp = namespace(u_scale)
        batch = u_scale.shape[0]
        by_type = {"num_obstacles": u_obstacles, "num_noise": u_noises}
        present = self.present(xp.concat([by_type[kind.option] for kind in self.counted_types], axis=1))
        bodies = 2 * xp.reshape(xp.concat([u_agent, u_noise], axis=1), (batch, -1, 4)) - 1  # agents, noise
        place = 2 * xp.reshape(u_obstacle, (batch, -1, 2)) - 1
        if self.start == "mpe":
            position, velocity = bodies[..., :2], xp.zeros_like(bodies[..., 2:])
            place = place * MPE_OBSTACLE_REACH
        else:
            scale = SMALLEST_SCALE + u_scale * (self.largest_scale - SMALLEST_SCALE)  # (B, 1)
            position, velocity = bodies[..., :2] * scale[..., None], bodies[..., 2:] * self.start_speed
            obstacles = [kind.option for kind in self.counted_types].index("num_obstacles")
            place = place * spread(present[:, obstacles, None].clip(1.0, None))[..., None]
        bodies = xp.concat([position, velocity], axis=-1)
        landmark = xp.concat([place, xp.zeros_like(place)], axis=-1)
        if not self.noise_moves:
            position = position[:, self.num_agents :]
            still = xp.concat([position, xp.zeros_like(position)], axis=-1)
            bodies, landmark = bodies[:, : self.num_agents], xp.concat([landmark, still], axis=1)
        return self.assemble(bodies, landmark, present)

    def sample_randomness(self, u: tuple[Array, ...]) -> StepRandomness:
        """Turn uniforms (B, count), one array for each of `num_step_uniforms`, into the random variables of a step."""
        policy, noise = u
        if self.continuous_actions:
            policy, noise = (x.reshape(x.shape[0], -1, self.num_actions) for x in u)
        return StepRandomness(
            policy, self.random_actions(policy), self.random_actions(noise) if self.noise_moves else noise
        )

    def transition(self, state: State, action: Array, randomness: StepRandomness) -> State:
        """Return the states after one step of actions (B, A, 5), or (B, A) if discrete."""
        control = self.control(action, state.mover)
        if not self.noise_moves:
            return self.push(state, control)
        if self.noise_motion == "wander":
            noise = self.directions(randomness.noise, state.mover) * PREY_ACCEL
        else:
            noise = self.noise_force(state.mover[:, self.num_agents :], control)
        return self.push(state, self.moving_forces(state, control, noise))

    def touching(self, state: State) -> Array:
        """Tell which predators touch which prey, bool (B, P, Q); all False unless both collide."""
        place = state.mover[..., :2]
        between = place[:, : self.num_predators, None] - place[:, None, self.rows["num_prey"]]
        reach = PREDATOR_RADIUS + PREY_RADIUS if self.collidable_predators and self.collidable_prey else 0.0
        return physics.length(between)[..., 0] < reach

    def reward(self, state: State, agents: slice = EVERYONE) -> Array:
        """Return the rewards (B, n) of `agents` for the step that led to `state`."""
        chosen = range(self.num_agents)[agents]
        touching, dtype = self.touching(state), state.mover.dtype
        rewards = []
        if chosen.start < self.num_predators:
            gains = touching.sum(axis=2, dtype=dtype) * CATCH
            if self.reward_sharing == "shared":
                gains = gains.sum(axis=1)[:, None] + 0.0 * gains
            rewards.append(gains[:, chosen.start : chosen.stop])
        if chosen.stop > self.num_predators:
            penalty = self.penalty(state.mover[:, self.rows["num_prey"], :2])
            losses = -CATCH * touching.sum(axis=1, dtype=dtype) - penalty
            rewards.append(losses[:, max(chosen.start - self.num_predators, 0) : chosen.stop - self.num_predators])
        return rewards[0] if len(rewards) == 1 else namespace(losses).concat(rewards, axis=1)

    def penalty(self, position: Array) -> Array:
        """Return the penalty (B, Q) of prey at positions (B, Q, 2) for leaving the arena, summed over both axes."""
        xp = namespace(position)
        x = xp.abs(position).clip(0.0, 3.0)  # the penalty is capped before 3; the exponential must not overflow
        inside = (10.0 * (x - EDGE)).clip(0.0, None)
        outside = xp.exp(2.0 * x - 2.0).clip(None, FULL_PENALTY)
        return xp.where(x < OUTSIDE, inside, outside).sum(axis=-1)

    def policy(self, name: str, state: State, u: Array, agents: slice = EVERYONE) -> Array:
        """Return the actions of `agents` by a built-in policy.

        Args:
            name: "random" (uniform over the action space), "still", "chase", "flee", "oracle" or "chase_any", see the
                class.
            state: of B environments.
            u: uniforms (B, n, 5), or (B, n) if discrete.
            agents: the n agents that act.

        Returns:
            Actions (B, n, 5), or (B, n) int64 if discrete.
        """
        xp = namespace(u)
        if name in ("random", "still"):
            return self.random_actions(u if name == "random" else xp.zeros_like(u))
        chosen, first_prey = range(self.num_agents)[agents], self.num_predators
        predators = range(chosen.start, min(chosen.stop, first_prey))
        prey = range(max(chosen.start, first_prey), chosen.stop)
        quarry = self.entities(state, "num_prey")
        if name == "chase_any":
            quarry = xp.concat([quarry, self.entities(state, "num_noise")], axis=1)
        actions = [
            self._react(state, team, rivals, flee=name == "flee" or (name == "oracle" and team is prey))
            for team, rivals in ((predators, quarry), (prey, state.mover[:, :first_prey]))
            if team
        ]
        return actions[0] if len(actions) == 1 else xp.concat(actions, axis=1)

    def _react(self, state: State, agents: range, rivals: Array, flee: bool) -> Array:
        """Let `agents` chase the nearest of `rivals` (B, F, 5), or flee it, by positions one and two steps ahead."""
        xp = namespace(state.mover)
        me = state.mover[:, agents.start : agents.stop]
        mine, theirs = (body[..., :2] + DT * body[..., 2:4] for body in (me, rivals))  # after this step
        distance = physics.length(mine[:, :, None] - theirs[:, None])[..., 0]  # (B, n, F)
        if self.padded:
            distance = xp.where(rivals[:, None, :, 4] != ABSENT, distance, math.inf)
        place = xp.arange(theirs.shape[1], device=theirs.device)
        nearest = xp.astype(place == xp.argmin(distance, axis=-1, keepdims=True), theirs.dtype)[..., None]
        later = theirs + (1.0 - DAMPING) * DT * rivals[..., 2:4]
        goal = xp.sum(nearest * later[:, None], axis=2)
        if flee:
            goal = mine + FLEE_DISTANCE * (mine - goal)
        return self.aim(state, agents, goal)
