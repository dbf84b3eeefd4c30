"""Environments that show samples of any space."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

SPACES: dict[str, spaces.Space[Any]] = {
    "set": spaces.Box(-1, 1, (10, 4), np.float32),
    "integers": spaces.Box(-3, 9, (3, 2), np.int64),
    "unbounded": spaces.Box(-np.inf, np.inf, (4, 2), np.float64),
    "one": spaces.Box(-1, 1, (1, 1), np.float32),
    "image": spaces.Box(0, 255, (32, 32, 3), np.uint8),
    "grey": spaces.Box(0, 255, (16, 24), np.uint8),
    "float": spaces.Box(-1, 3, (8, 16, 2), np.float32),
    "wide": spaces.Box(-1e30, 1e30, (8, 8, 1), np.float64),
    "dict": spaces.Dict(
        agent=spaces.Box(-2, 2, (5, 2), np.float32),
        camera=spaces.Box(0, 255, (8, 16, 1), np.uint8),
        me=spaces.Box(-1, 1, (3,), np.float32),
        mode=spaces.Discrete(3, start=4),
    ),
    "nested": spaces.Tuple(
        (spaces.Box(0, 1, (2, 3), np.float32), spaces.Dict(near=spaces.Box(0, 1, (4, 3), np.float32)))
    ),
    "channels": spaces.Box(0, 255, (3, 32, 32), np.uint8),
    "film": spaces.Box(0, 255, (2, 8, 16, 3), np.uint8),
    "sequence": spaces.Sequence(spaces.Discrete(2)),
    "empty": spaces.Box(0, 1, (0, 3), np.float32),
    "thin": spaces.Box(0, 255, (12, 18, 3), np.uint8),
    "named": spaces.Dict(noise=spaces.Box(0, 1, (2, 3), np.float32)),
    "inner film": spaces.Dict(eye=spaces.Box(0, 255, (2, 8, 16, 3), np.uint8)),
    "flat": spaces.Box(-1, 1, (3,), np.float32),
}
ACTIONS: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "unbounded": spaces.Box(-np.inf, np.inf, (3,), np.float64),
    "scalar": spaces.Box(0, 2, (), np.float32),
    "discrete": spaces.Discrete(4, start=3),
    "several": spaces.MultiDiscrete([3, 5]),
    "integers": spaces.Box(0, 3, (2,), np.int64),
    "bits": spaces.MultiBinary(3),
}


class Seen(gymnasium.Env[Any, Any]):
    """Shows a sample of a space at each step, marks signal in it if `mask` is given, and ends after `length` steps.

    The reward of step t is t. `played` has the actions of the episode.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  as Gymnasium has it

    def __init__(self, shows: str = "set", takes: str = "discrete", length: int = 4, mask: Any = None) -> None:
        self.observation_space, self.action_space = SPACES[shows], ACTIONS[takes]
        self.length, self.mask = length, mask
        self.played: list[Any] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.played = []
        return self._see(), self._info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.played.append(action)
        count = len(self.played)
        return self._see(), float(count), count == self.length, False, self._info()

    def _see(self) -> Any:
        self.shown = self._draw(self.observation_space)
        return self.shown

    def _draw(self, space: Any) -> Any:
        if isinstance(space, spaces.Dict):
            return {name: self._draw(part) for name, part in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(self._draw(part) for part in space.spaces)
        if isinstance(space, spaces.Discrete):
            return space.start + self.np_random.integers(space.n)
        if space.dtype.kind == "f":
            return self.np_random.uniform(-1, 1, space.shape).clip(space.low, space.high).astype(space.dtype)
        return self.np_random.integers(space.low, space.high.astype(np.int64) + 1).astype(space.dtype)

    def _info(self) -> dict[str, Any]:
        return {} if self.mask is None else {"signal_mask": np.array(self.mask)}


gymnasium.register("tests/Seen-v0", "seen:Seen")
