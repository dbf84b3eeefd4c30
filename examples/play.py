"""Play with the arrow keys (Esc ends): python examples/play.py --env-id noisy_envs/BoxWorld-v0."""

import argparse
from itertools import combinations
from typing import Any

import gymnasium
import numpy as np
import pygame
from gymnasium.utils.play import play

import noisy_envs  # noqa: F401  registers the ids

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--env-id", default="noisy_envs/BoxWorld-v0")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
env: Any = gymnasium.make(args.env_id, render_mode="rgb_array")

UP, DOWN, LEFT, RIGHT = pygame.K_UP, pygame.K_DOWN, pygame.K_LEFT, pygame.K_RIGHT
keys: dict[tuple[int, ...], Any]
noop: Any
if isinstance(env.action_space, gymnasium.spaces.Box):  # slots: nothing, left, right, down, up; two keys push aslant
    slots = {LEFT: 1, RIGHT: 2, DOWN: 3, UP: 4}
    held = [combination for count in (1, 2) for combination in combinations(slots, count)]
    keys = {some: np.isin(np.arange(5), [slots[key] for key in some]).astype(np.float32) for some in held}
    noop, waits = np.zeros(5, np.float32), False
elif env.action_space.n == 5:  # nothing, left, right, down, up
    keys = {(LEFT,): 1, (RIGHT,): 2, (DOWN,): 3, (UP,): 4}
    noop, waits = 0, False
else:  # up, down, left, right: the world waits for a key
    keys = {(UP,): 0, (DOWN,): 1, (LEFT,): 2, (RIGHT,): 3}
    noop, waits = 0, True

rewards: list[float] = []


def report(before: Any, after: Any, action: Any, reward: float, terminated: bool, truncated: bool, info: Any) -> None:
    """Print how an episode ended."""
    rewards.append(reward)
    if terminated or truncated:
        solved = {True: ", solved", False: ", not solved"}.get(info.get("is_success"), "")
        print(f"return {sum(rewards):.2f}{solved}")
        rewards.clear()


play(env, keys_to_action=keys, seed=args.seed, noop=noop, wait_on_player=waits, callback=report)
