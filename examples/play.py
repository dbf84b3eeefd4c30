"""Play with the arrow keys (Esc quits): python examples/play.py --env-id noisy_envs/BoxWorld-v0."""

import argparse
from typing import Any

import gymnasium
import numpy as np
import pygame

from noisy_envs import ENVIRONMENTS
from noisy_envs.rendering.window import has_display, key_events

SLOTS = ["nothing", "left", "right", "down", "up"]  # of the particle games
MOVES = ["up", "down", "left", "right"]  # of BoxWorld


def arrows(held: set[str]) -> list[str]:
    """Return the arrows pressed since the last call; `held` keeps those that are down.

    Raises:
        SystemExit: Esc, or the window is closed.
    """
    pressed = []
    for key, down in key_events():
        if key in ("escape", "quit"):
            raise SystemExit
        if key in MOVES and down:
            pressed.append(key)
            held.add(key)
        else:
            held.discard(key)
    return pressed


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--env-id", default="noisy_envs/BoxWorld-v0", choices=ENVIRONMENTS, metavar="ID")
parser.add_argument("--seed", type=int, default=None)
args = parser.parse_args()
if not has_display():
    raise SystemExit("error: there is no display for a window")
env: Any = gymnasium.make(args.env_id, render_mode="human")
env.reset(seed=args.seed)
held: set[str] = set()
total = 0.0
while True:
    pressed = arrows(held)
    actions: list[Any] = [MOVES.index(arrow) for arrow in pressed]  # the game waits for a key
    if isinstance(env.action_space, gymnasium.spaces.Box):  # the game runs on; two arrows push diagonally
        actions = [np.isin(SLOTS, list(held | set(pressed))).astype(np.float32)]
    elif env.action_space.n == len(SLOTS):
        actions = [SLOTS.index(arrow) for arrow in [*pressed, *held, "nothing"][:1]]
    for action in actions:
        _, reward, terminated, truncated, info = env.step(action)  # draws, ten times a second
        total += float(reward)
        if terminated or truncated:
            print(f"return {total:.2f}{', solved' if info.get('is_success') else ''}", flush=True)
            pygame.time.wait(1000)
            env.reset()
            total = 0.0
            break
    if not actions:
        pygame.time.wait(20)
