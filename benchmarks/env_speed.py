"""Steps a second of the environments, everything included: random actions, resets, observations, infos.

    python benchmarks/env_speed.py [--repeats 7]

NumPy runs on one core. The limit printed beside a vector figure is memory: the bytes of the tokens and of the state
that a step must write and read, over the bandwidth of a copy measured in the same run. A single world is bound by
the overhead of NumPy's calls instead.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch

import noisy_envs
from noisy_envs.runs import commit

CENTROID = "noisy_envs/SimpleCentroid"


def single(env_id: str) -> Callable[[int], int]:
    """Return a function that plays a number of steps of one environment and returns how many it played."""
    env = gymnasium.make(env_id).unwrapped
    env.reset(seed=0)
    actions = [env.action_space.sample() for _ in range(64)]

    def play(steps: int) -> int:
        for i in range(steps):
            *_, terminated, truncated, _ = env.step(actions[i % 64])
            if terminated or truncated:
                env.reset()
        return steps

    return play


def vector(env_id: str, num_envs: int, mode: str, backend: str = "numpy", **keywords: Any) -> Callable[[int], int]:
    """Return a function that plays a number of steps of all worlds and returns how many it played in all."""
    if mode == "native":
        keywords = {"backend": backend, **keywords}
    envs: Any = gymnasium.make_vec(env_id, num_envs, vectorization_mode=None if mode == "native" else mode, **keywords)
    envs.reset(seed=0)
    action = np.random.default_rng(0).random((num_envs, 5), dtype=np.float32)
    actions = torch.from_numpy(action) if backend == "torch" else action

    def play(steps: int) -> int:
        for _ in range(steps):
            envs.step(actions)
        return steps * num_envs

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
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    core = gymnasium.make(f"{CENTROID}-1v3v28-v0").unwrapped.core  # type: ignore[attr-defined]
    tokens = core.num_entities * 5
    step_bytes = 4 * (tokens + 2 * 4 * core.num_movers + 5 * core.num_entities)
    bandwidth = copy_bandwidth()
    print(
        f"noisy-envs {noisy_envs.__version__} {commit()}, Python {platform.python_version()}, NumPy {np.__version__},"
    )
    print(
        f"torch {torch.__version__}, {platform.machine()}; one core; a copy runs at {bandwidth / 1e9:.1f} GB/s, so that"
    )
    print(f"{step_bytes} bytes a step of 1v3v28 allow {bandwidth / step_bytes:,.0f} steps/s")
    rows: list[tuple[str, Callable[[], Callable[[int], int]]]] = [
        ("one world, 1v31v0", lambda: single(f"{CENTROID}-1v31v0-v0")),
        ("one world, 1v3v28", lambda: single(f"{CENTROID}-1v3v28-v0")),
        ("64 worlds, 1v3v28, Gymnasium's SyncVectorEnv", lambda: vector(f"{CENTROID}-1v3v28-v0", 64, "sync")),
        ("64 worlds, 1v3v28, native NumPy", lambda: vector(f"{CENTROID}-1v3v28-v0", 64, "native")),
        ("4,096 worlds, 1v3v28, native NumPy", lambda: vector(f"{CENTROID}-1v3v28-v0", 4096, "native")),
        ("4,096 worlds, 1v3v28, torch", lambda: vector(f"{CENTROID}-1v3v28-v0", 4096, "native", "torch")),
        (
            "4,096 worlds, 1v3v28, torch compiled",
            lambda: vector(f"{CENTROID}-1v3v28-v0", 4096, "native", "torch", compile=True),
        ),
    ]
    for name, make in rows:
        figures = rates(make(), repeats)
        median = statistics.median(figures)
        print(f"{name:48s} {median:12,.0f} steps/s  spread {(max(figures) - min(figures)) / median:4.0%}")


if __name__ == "__main__":
    main()
