"""Who plays in `env_speed.py`: our environments and their peers, each as a function that plays many steps.

A player is made for a work, a number of worlds and a device, and called with a number of steps: it plays that many of
each world, with random actions drawn before, resets when episodes of 128 steps are over, and observations written to
memory, and returns how many steps that was in all worlds together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium
import numpy as np

import noisy_envs
from noisy_envs.games.box_world_levels import LevelConfig, draw_level
from noisy_envs.interfaces.vector_env import in_place

Play = Callable[[int], int]
EPISODE = 128
NUM_ACTIONS = 16  # different actions, played in turn


class Work(NamedTuple):
    """What is played."""

    name: str
    env_id: str
    options: dict[str, Any] = {}  # noqa: RUF012  never changed

    @property
    def obstacles(self) -> int:
        """How many obstacles there are in SimpleTag."""
        game: Any = gymnasium.make(self.env_id, **self.options).unwrapped.game  # type: ignore[attr-defined]
        return int(game.num_obstacles)


def one_world(work: Work, worlds: int, device: str) -> Play:
    """Play one environment of `gymnasium.make`."""
    env = gymnasium.make(work.env_id, **work.options).unwrapped
    env.reset(seed=0)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(64)]

    def play(steps: int) -> int:
        for i in range(steps):
            *_, terminated, truncated, _ = env.step(actions[i % 64])
            if terminated or truncated:
                env.reset()
        return steps

    return play


def in_contact(work: Work, worlds: int, device: str) -> Play:
    """Play SimpleTag with prey at rest and the predator among them, in contact all the time."""
    env: Any = gymnasium.make(work.env_id, prey_policy="still").unwrapped
    place = np.zeros((env.game.num_entities, 2))
    place[:4] = (0, 0), (0.12, 0), (0, 0.15), (-0.15, 0)
    env.reset(options={"state": {"position": place}})

    def play(steps: int) -> int:
        for i in range(steps):
            if env.step(1 + i % 2)[3]:
                env.reset(options={"state": {"position": place}})
        return steps

    return play


def levels_drawn(work: Work, worlds: int, device: str) -> Play:
    """Draw levels of BoxWorld, each another, instead of steps."""
    game: Any = gymnasium.make(work.env_id, **work.options).unwrapped.game  # type: ignore[attr-defined]
    config: LevelConfig = game.level_config
    numbers = itertools.count()

    def play(steps: int) -> int:
        for number in itertools.islice(numbers, steps):
            draw_level(config, number)
        return steps

    return play


def processes(mode: str) -> Callable[[Work, int, str], Play]:
    """Return the maker of a player of single environments in Gymnasium's own vector, "sync" or "async"."""

    def make(work: Work, worlds: int, device: str) -> Play:
        return play_vector(gymnasium.make_vec(work.env_id, worlds, mode, **work.options))

    return make


def vector(device_of: str = "numpy", **keywords: Any) -> Callable[[Work, int, str], Play]:
    """Return the maker of a player of our vector environments, in NumPy or torch."""

    def make(work: Work, worlds: int, device: str) -> Play:
        place: dict[str, Any] = {} if device_of == "numpy" else {"backend": "torch", "device": device}
        return play_vector(gymnasium.make_vec(work.env_id, worlds, **place, **keywords, **work.options))

    return make


def play_vector(envs: Any) -> Play:
    """Return the player of vector environments."""
    envs.reset(seed=0)
    envs.action_space.seed(0)
    actions = [envs.action_space.sample() for _ in range(NUM_ACTIONS)]
    device = getattr(envs, "device", None)
    if device is not None:
        import torch

        actions = [torch.from_numpy(one).to(device) for one in actions]

    def play(steps: int) -> int:
        for i in range(steps):
            envs.step(actions[i % NUM_ACTIONS])
        wait_for(device)
        return steps * envs.num_envs

    return play


def recorded(work: Work, worlds: int, device: str) -> Play:
    """Play the pure step of our vector environments, compiled and recorded as one CUDA graph: as our agents do."""
    import torch

    from noisy_envs.nn.cuda_graph import CudaGraph

    envs: Any = gymnasium.make_vec(work.env_id, worlds, backend="torch", device=device, **work.options)
    envs.reset(seed=0)
    actions = torch.from_numpy(envs.action_space.sample()).to(device)
    now, pure_step = envs.batch_state, envs.pure_step
    pure_step(now, actions)  # fills the game's caches
    replay = CudaGraph(partial(in_place, torch.compile(pure_step, fullgraph=True)))

    def play(steps: int) -> int:
        nonlocal now
        for _ in range(steps):
            now, _ = replay(now, actions)
        wait_for(envs.device)
        return steps * worlds

    return play


def wait_for(device: Any) -> None:
    """Wait until a GPU has done what it was asked."""
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.synchronize()


def mpe2(work: Work, worlds: int, device: str) -> Play:
    """Play MPE2's simple_tag_v3, one predator and three prey, obstacles solid only where ours are."""
    from mpe2 import simple_tag_v3

    env = simple_tag_v3.parallel_env(num_good=3, num_adversaries=1, num_obstacles=work.obstacles, max_cycles=EPISODE)
    env.reset(seed=0)
    for landmark in env.unwrapped.world.landmarks:
        landmark.collide = bool(work.options.get("collidable_obstacles"))
    actions = [{agent: env.action_space(agent).sample() for agent in env.possible_agents} for _ in range(64)]

    def play(steps: int) -> int:
        for i in range(steps):
            env.step(actions[i % 64])
            if not env.agents:
                env.reset()
        return steps

    return play


def vmas(work: Work, worlds: int, device: str) -> Play:
    """Play VMAS's simple_tag, obstacles hollow, with one substep a step as in ours instead of its ten."""
    import torch
    import vmas

    env = vmas.make_env(
        "simple_tag", worlds, device=device, continuous_actions=False, seed=0,
        num_good_agents=3, num_adversaries=1, num_landmarks=work.obstacles,
    )  # fmt: skip
    world = env.world
    world._substeps, world._sub_dt = 1, world._dt
    for landmark in world.landmarks:
        landmark._collide = bool(work.options.get("collidable_obstacles"))
    draws = [[torch.randint(5, (worlds, 1), device=device) for _ in range(4)] for _ in range(NUM_ACTIONS)]
    clock = 0

    def play(steps: int) -> int:
        nonlocal clock
        for _ in range(steps):
            env.step(draws[clock % NUM_ACTIONS])
            clock += 1
            if clock % EPISODE == 0:
                env.reset()
        wait_for(torch.device(device))
        return steps * worlds

    return play


def jaxmarl(work: Work, worlds: int, device: str) -> Play:
    """Play JaxMARL's SimpleTagMPE, obstacles hollow, 32 steps of all worlds in one compiled scan."""
    import jax
    import jax.numpy as jnp
    from jaxmarl.environments.mpe.simple_tag import SimpleTagMPE

    env = SimpleTagMPE(
        num_good_agents=3, num_adversaries=1, num_obs=work.obstacles, max_steps=EPISODE - 1
    )  # counts from 0
    solid = bool(work.options.get("collidable_obstacles"))
    env.collide = jnp.concatenate([jnp.ones(4, bool), jnp.full(work.obstacles, solid)])

    def step(carry: Any, key: Any) -> Any:
        state = carry[0]
        key_action, key_step = jax.random.split(key)
        drawn = jax.random.randint(key_action, (env.num_agents, worlds), 0, 5)
        actions = dict(zip(env.agents, drawn, strict=True))
        seen, state, reward, ended, _ = jax.vmap(env.step)(jax.random.split(key_step, worlds), state, actions)
        reward = {name: value.astype(jnp.float32) for name, value in reward.items()}
        return (state, seen, reward, ended), None  # carried from step to step, so that each step writes all of it

    @jax.jit
    def scan(carry: Any, key: Any) -> Any:
        return jax.lax.scan(step, carry, jax.random.split(key, 32))[0]

    seen, state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.key(0), worlds))
    ended = dict.fromkeys([*env.agents, "__all__"], jnp.zeros(worlds, bool))
    carry = state, seen, dict.fromkeys(env.agents, jnp.zeros(worlds)), ended
    keys = (jax.random.key(number) for number in itertools.count(1))

    def play(steps: int) -> int:
        nonlocal carry
        scans = -(-steps // 32)
        for _ in range(scans):
            carry = scan(carry, next(keys))
        jax.block_until_ready(carry)
        return scans * 32 * worlds

    return play


def bytes_of(work: Work) -> tuple[int, int]:
    """Return the bytes that our vectors keep of a world of SimpleTag, and how many of them a step leaves alone."""
    envs: Any = gymnasium.make_vec(work.env_id, 2, **work.options)
    envs.reset(seed=0)
    worlds = envs.batch_state
    kept = sum(x[0].nbytes for x in (*worlds.state, *worlds[1:]))
    fixed = sum(x[0].nbytes for x in (worlds.seed, worlds.number, worlds.key))
    return kept, fixed + worlds.state.landmark[0].nbytes


def versions() -> dict[str, str]:
    """Return the versions of the packages that play, or that they are missing."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"noisy-envs": noisy_envs.__version__}
    for name in ("numpy", "torch", "gymnasium", "mpe2", "vmas", "jaxmarl", "jax"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found
