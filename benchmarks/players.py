"""Define what `env_speed.py` measures: functions that play many steps of our environments and of their peers.

A maker takes a workload, a number of environments and a device, and returns a player. A player takes a number of steps
and plays them in each environment, with random actions drawn beforehand, a reset after each episode of 128 steps, and
observations written to memory. It returns the number of steps of all environments together.
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
NUM_ACTIONS = 16  # different actions, played in rotation


class Work(NamedTuple):
    """A workload: an environment and its options."""

    name: str
    env_id: str
    options: dict[str, Any] = {}  # noqa: RUF012  never modified

    @property
    def obstacles(self) -> int:
        """Number of obstacles in SimpleTag."""
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
    """Play SimpleTag with the predator among resting prey, so that they are always in contact."""
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
    """Draw different levels of BoxWorld instead of playing steps."""
    game: Any = gymnasium.make(work.env_id, **work.options).unwrapped.game  # type: ignore[attr-defined]
    config: LevelConfig = game.level_config
    numbers = itertools.count()

    def play(steps: int) -> int:
        for number in itertools.islice(numbers, steps):
            draw_level(config, number)
        return steps

    return play


def processes(mode: str) -> Callable[[Work, int, str], Play]:
    """Return the maker for single environments in Gymnasium's vector environment, "sync" or "async"."""

    def make(work: Work, worlds: int, device: str) -> Play:
        return play_vector(gymnasium.make_vec(work.env_id, worlds, mode, **work.options))

    return make


def vector(backend: str = "numpy", **keywords: Any) -> Callable[[Work, int, str], Play]:
    """Return the maker for our vector environments, in NumPy or torch."""

    def make(work: Work, worlds: int, device: str) -> Play:
        place: dict[str, Any] = {} if backend == "numpy" else {"backend": "torch", "device": device}
        return play_vector(gymnasium.make_vec(work.env_id, worlds, **place, **keywords, **work.options))

    return make


def play_vector(envs: Any) -> Play:
    """Return a player of vector environments."""
    envs.reset(seed=0)
    envs.action_space.seed(0)
    actions = [envs.action_space.sample() for _ in range(NUM_ACTIONS)]
    device = getattr(envs, "device", None)
    if device is not None:
        import torch

        actions = [torch.from_numpy(action).to(device) for action in actions]

    def play(steps: int) -> int:
        for i in range(steps):
            envs.step(actions[i % NUM_ACTIONS])
        wait_for(device)
        return steps * envs.num_envs

    return play


def recorded(work: Work, worlds: int, device: str) -> Play:
    """Play the pure step, compiled and recorded as one CUDA graph, as our agents do."""
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
    """Wait for a GPU to finish its work."""
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.synchronize()


def mpe2(work: Work, worlds: int, device: str) -> Play:
    """Play MPE2's simple_tag_v3 with one predator and three prey; obstacles are solid only where ours are."""
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
    """Play VMAS's simple_tag with our obstacles and one substep per step, as in ours, instead of ten."""
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
    """Play JaxMARL's SimpleTagMPE with our obstacles, 32 steps of all environments per compiled scan."""
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
        return (state, seen, reward, ended), None  # carried between steps, so that each step writes all results

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
    """Return the bytes of one SimpleTag environment in a vector, and how many of them a step does not change."""
    envs: Any = gymnasium.make_vec(work.env_id, 2, **work.options)
    envs.reset(seed=0)
    worlds = envs.batch_state
    kept = sum(x[0].nbytes for x in (*worlds.state, *worlds[1:]))
    fixed = sum(x[0].nbytes for x in (worlds.seed, worlds.number, worlds.key))
    return kept, fixed + worlds.state.landmark[0].nbytes


def versions() -> dict[str, str]:
    """Return the versions of the packages compared, "missing" for those not installed."""
    from importlib.metadata import PackageNotFoundError, version

    result = {"noisy-envs": noisy_envs.__version__}
    for name in ("numpy", "torch", "gymnasium", "mpe2", "vmas", "jaxmarl", "jax"):
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            result[name] = "missing"
    return result
