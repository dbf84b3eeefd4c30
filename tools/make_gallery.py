"""Record the documentation's GIFs: python tools/make_gallery.py [SOURCE.gif=NAME.gif ...].

Without arguments, the oracle plays each environment and the GIFs go to docs/images/gallery. IDs that play alike show
different episodes. BoxWorld's tokens get borders, because its image does not depend on the kind of observation. With
arguments, existing GIFs, such as those of training runs, are scaled to the same size and written to docs/images.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from PIL import Image, ImageSequence

from noisy_envs import ENVIRONMENTS
from noisy_envs.games.box_world import BoxWorld
from noisy_envs.rendering.video import write_gif
from noisy_envs.training.files import write_atomically
from noisy_envs.training.versions import current_commit

SEED, SIDE, FPS = 1, 400, 10
IMAGES = Path(__file__).parents[1] / "docs" / "images"


def episode(env_id: str) -> list[np.ndarray]:
    """Return the frames (H, W, 3) of one episode of the oracle."""
    env: Any = gymnasium.make(env_id, render_mode="rgb_array").unwrapped
    tokens, _ = env.reset(seed=seed(env_id))

    def render_frame() -> np.ndarray:
        weights = None
        if isinstance(env.game, BoxWorld):
            weights = 0.3 * env.token_spec.mask(tokens)
            weights[env.token_spec.query_index] = 1.0
        frame: np.ndarray = env.render(weights)
        return frame

    frames, ended = [render_frame()], False
    while not ended:
        worlds = type(env.state)._make(field[None] for field in env.state)  # a batch of one
        u = np.zeros((1, 1, *env.action_space.shape), np.float32)  # ignored by the oracle
        tokens, _, terminated, truncated, _ = env.step(env.game.policy("oracle", worlds, u, slice(0, 1))[0, 0])
        frames.append(render_frame())
        ended = terminated or truncated
    env.close()
    return frames


def seed(env_id: str) -> int:
    """Return `SEED` plus the number of earlier IDs that play alike."""
    games = {other: gymnasium.make(other).unwrapped.game for other in ENVIRONMENTS}  # type: ignore[attr-defined]
    before = list(games)[: list(games).index(env_id)]
    return SEED + sum(games[other] == games[env_id] for other in before)


def small(frames: list[np.ndarray]) -> list[np.ndarray]:
    """Scale frames to `SIDE` and round colours, because smooth halos make GIFs of a megabyte."""
    scaled = [np.asarray(Image.fromarray(frame).resize((SIDE, SIDE), Image.Resampling.BOX)) for frame in frames]
    return [np.where(frame > 250, 255, frame & 0xF8).astype(np.uint8) for frame in scaled]


def main() -> None:
    """Record or read episodes, scale them and write GIFs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gifs", nargs="*", metavar="SOURCE.gif=NAME.gif", help="GIF to scale and its new name")
    args = parser.parse_args()
    for argument in args.gifs:
        source, _, name = argument.partition("=")
        with Image.open(source) as images:
            frames = [np.asarray(image.convert("RGB")) for image in ImageSequence.Iterator(images)]
        write_gif(IMAGES / name, small(frames), FPS)
    if not args.gifs:
        metadata = {"script": "tools/make_gallery.py", "policy": "oracle", "seed": SEED, "commit": current_commit()}
        for env_id in ENVIRONMENTS:
            write_gif(IMAGES / "gallery" / f"{env_id.partition('/')[2]}.gif", small(episode(env_id)), FPS)
        write_atomically(IMAGES / "gallery" / "made.json", json.dumps(metadata, indent=2) + "\n")


if __name__ == "__main__":
    main()
