"""Steps a second of the environments, everything included: random actions, resets, observations, infos.

    python benchmarks/env_speed.py [--repeats 7]

One core. MPE2 must be installed: it plays the same sizes beside ours, agents colliding in both. The limit of a vector
is memory: the bytes of tokens and state that a step must write and read, over the bandwidth of a copy measured in the
same run. A single world is bound by the overhead of NumPy's calls instead.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch

import noisy_envs
from noisy_envs.cores.levels import Recipe, draw_level
from noisy_envs.runs import commit

CENTROID, TAG, BOX = "noisy_envs/SimpleCentroid", "noisy_envs/SimpleTag", "noisy_envs/BoxWorld"

LARGE = {"size": 12, "goal_length": 4, "num_distractors": 3, "distractor_length": 2}


def single(env_id: str, **options: Any) -> Callable[[int], int]:
    """Return a function that plays a number of steps of one environment and returns how many it played."""
    env = gymnasium.make(env_id, **options).unwrapped
    env.reset(seed=0)
    actions = [env.action_space.sample() for _ in range(64)]

    def play(steps: int) -> int:
        for i in range(steps):
            *_, terminated, truncated, _ = env.step(actions[i % 64])
            if terminated or truncated:
                env.reset()
        return steps

    return play


def crowded(env_id: str) -> Callable[[int], int]:
    """Return a function that plays SimpleTag with prey at rest and the predator among them, in contact all the time."""
    env: Any = gymnasium.make(env_id, prey_policy="still").unwrapped
    place = np.zeros((env.core.num_entities, 2))
    place[:4] = (0, 0), (0.12, 0), (0, 0.15), (-0.15, 0)
    env.reset(options={"state": {"position": place}})

    def play(steps: int) -> int:
        for i in range(steps):
            if env.step(1 + i % 2)[3]:
                env.reset(options={"state": {"position": place}})
        return steps

    return play


def vector(env_id: str, num_envs: int, mode: str, backend: str = "numpy", **keywords: Any) -> Callable[[int], int]:
    """Return a function that plays a number of steps of all worlds and returns how many it played in all."""
    if mode == "native":
        keywords = {"backend": backend, **keywords}
    envs: Any = gymnasium.make_vec(env_id, num_envs, vectorization_mode=None if mode == "native" else mode, **keywords)
    envs.reset(seed=0)
    envs.action_space.seed(0)
    samples = [envs.action_space.sample() for _ in range(16)]
    actions = [torch.from_numpy(one) if backend == "torch" else one for one in samples]

    def play(steps: int) -> int:
        for i in range(steps):
            envs.step(actions[i % 16])
        return steps * num_envs

    return play


def drawn_levels(env_id: str, **options: Any) -> Callable[[int], int]:
    """Return a function that draws a number of levels of BoxWorld, each another."""
    recipe: Recipe = gymnasium.make(env_id, **options).unwrapped.core.recipe  # type: ignore[attr-defined]
    numbers = itertools.count()

    def play(steps: int) -> int:
        for number in itertools.islice(numbers, steps):
            draw_level(recipe, number)
        return steps

    return play


def mpe2(num_obstacles: int, collide: bool) -> Callable[[int], int]:
    """Return a function that plays a number of steps of MPE2's simple_tag_v3, one predator and three prey."""
    from mpe2 import simple_tag_v3

    env = simple_tag_v3.parallel_env(num_good=3, num_adversaries=1, num_obstacles=num_obstacles, max_cycles=128)
    env.reset(seed=0)
    for landmark in env.unwrapped.world.landmarks:
        landmark.collide = collide
    actions = [{agent: env.action_space(agent).sample() for agent in env.possible_agents} for _ in range(64)]

    def play(steps: int) -> int:
        for i in range(steps):
            env.step(actions[i % 64])
            if not env.agents:
                env.reset()
        return steps

    return play


def rates(play: Callable[[int], int], repeats: int, least: float = 0.4) -> list[float]:
    """Return steps a second, one figure a repeat, after a warm-up of more than an episode."""
    play(130)
    count = 16
    figures: list[float] = []
    while len(figures) < repeats:
        start = time.perf_counter()
        played = play(count)
        elapsed = time.perf_counter() - start
        if elapsed < least / 2:
            count *= 2
        else:
            figures.append(played / elapsed)
    return figures


def copy_bandwidth() -> float:
    """Return bytes a second, read and written, of copying an array larger than the caches."""
    source = np.ones(2**25, np.float32)
    target = np.empty_like(source)
    times = []
    for _ in range(7):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return 2 * source.nbytes / statistics.median(times)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", default="", metavar="TEXT", help="measure the rows whose name holds it")
    options = parser.parse_args()
    repeats = options.repeats
    torch.set_num_threads(1)
    core = gymnasium.make(f"{CENTROID}-1v3v28-v0").unwrapped.core  # type: ignore[attr-defined]
    tokens = core.num_entities * 5
    step_bytes = 4 * (tokens + 2 * 5 * core.num_movers + 5 * (core.num_entities - core.num_movers))
    bandwidth = copy_bandwidth()
    print(
        f"noisy-envs {noisy_envs.__version__} {commit()}, Python {platform.python_version()}, NumPy {np.__version__},"
    )
    print(
        f"torch {torch.__version__}, {platform.machine()}; one core; a copy runs at {bandwidth / 1e9:.1f} GB/s, so that"
    )
    print(f"{step_bytes} bytes a step of SimpleCentroid 1v3v28 allow {bandwidth / step_bytes:,.0f} steps/s")
    compiled: dict[str, Any] = {"backend": "torch", "compile": True}
    centroid, tag = f"{CENTROID}-1v3v28-v0", f"{TAG}-1v3v28-v0"
    rows: list[tuple[str, Callable[[], Callable[[int], int]]]] = [
        ("SimpleCentroid 1v31v0, one world", lambda: single(f"{CENTROID}-1v31v0-v0")),
        ("SimpleCentroid 1v3v28, one world", lambda: single(centroid)),
        ("  64 worlds, Gymnasium's SyncVectorEnv", lambda: vector(centroid, 64, "sync")),
        ("  64 worlds", lambda: vector(centroid, 64, "native")),
        ("  4,096 worlds", lambda: vector(centroid, 4096, "native")),
        ("  4,096 worlds, torch", lambda: vector(centroid, 4096, "native", "torch")),
        ("  4,096 worlds, torch compiled", lambda: vector(centroid, 4096, "native", **compiled)),
        ("SimpleTag 1v3v28, one world", lambda: single(tag)),
        ("  agents in contact all the time", lambda: crowded(tag)),
        ("  MPE2, obstacles that do not collide", lambda: mpe2(28, collide=False)),
        ("SimpleTag 1v3v28, solid obstacles, one world", lambda: single(tag, collidable_obstacles=True)),
        ("  MPE2, obstacles that collide", lambda: mpe2(28, collide=True)),
        ("SimpleTag 1v3v28, 4,096 worlds", lambda: vector(tag, 4096, "native")),
        ("  all four agents observe", lambda: vector(tag, 4096, "native", learners="all")),
        ("  solid obstacles", lambda: vector(tag, 4096, "native", collidable_obstacles=True)),
        ("  torch compiled", lambda: vector(tag, 4096, "native", **compiled)),
        ("SimpleTag 1v3v4, 4,096 worlds", lambda: vector(f"{TAG}-1v3v4-v0", 4096, "native")),
        ("SimpleTag 1v3v64, 1,024 worlds", lambda: vector(tag, 1024, "native", num_obstacles=64)),
        ("SimpleTag 1v3v0, 1,024 worlds", lambda: vector(tag, 1024, "native", num_obstacles=0)),
        ("BoxWorld entities, one world", lambda: single(f"{BOX}Entities-v0")),
        ("BoxWorld pixels, one world", lambda: single(f"{BOX}Pixels-v0")),
        ("BoxWorld entities, 4,096 worlds", lambda: vector(f"{BOX}Entities-v0", 4096, "native")),
        ("BoxWorld entities, 4,096 worlds, torch", lambda: vector(f"{BOX}Entities-v0", 4096, "native", "torch")),
        ("BoxWorld pixels, 4,096 worlds", lambda: vector(f"{BOX}Pixels-v0", 4096, "native")),
        ("BoxWorld's levels, not steps", lambda: drawn_levels(f"{BOX}-v0")),
        ("  12×12, goal_length 4, 3 distractors of 2", lambda: drawn_levels(f"{BOX}-v0", **LARGE)),
    ]
    for name, make in rows:
        if options.only in name:
            figures = rates(make(), repeats)
            median = statistics.median(figures)
            print(f"{name:46s} {median:12,.0f} steps/s  spread {(max(figures) - min(figures)) / median:4.0%}")


if __name__ == "__main__":
    main()
