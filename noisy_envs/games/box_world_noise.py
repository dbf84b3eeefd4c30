"""Noise of BoxWorld: decoys, which look like keys and boxes, and clutter, which blocks nothing.

`B` environments, `L` noise entities of `E` tokens: 2 for a decoy, 1 for clutter. The noise of a level has its own
random stream and takes cells that the level leaves free, so that it does not change the level. Entities are drawn one
after another: the first do not change when more are added.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice

import numpy as np

from noisy_envs.arrays import Array, namespace
from noisy_envs.games.box_world_levels import (
    ABSENT,
    CLUTTER,
    CORNER,
    GEM,
    KEYS,
    Level,
    LevelConfig,
    flood,
    grid_cells,
    grow,
)
from noisy_envs.randomness import MAX_SEED, IntegerStream
from noisy_envs.tokens import NOISE_ROLES
from noisy_envs.validation import Count, check_choice, check_count, highest, lowest, unexpected

STREAM_SALT = 0x5DEECE66D  # the stream of a level's noise is not that of the level
MOST_BOXES = KEYS - 2  # decoys need two colours that open nothing: of keys and of locks

Token = tuple[int, int]  # cell, colour


@dataclass(frozen=True)
class NoiseConfig:
    """Number and kind of noise entities, options of `noisy_envs.games.box_world.BoxWorld`."""

    num_noise: Count
    noise_role: str
    noise_motion: str

    def check(self, levels: LevelConfig) -> None:
        """Raise ValueError or TypeError unless the options are valid, and noise fits into the fullest level."""
        check_count("num_noise", self.num_noise, minimum=0)
        check_choice("noise_role", self.noise_role, NOISE_ROLES)
        check_choice("noise_motion", self.noise_motion, ("still", "wander"))
        room = (lowest(levels.size) ** 2 - 2 - 2 * levels.max_boxes) // self.tokens_each
        if highest(self.num_noise) > room:
            allowed = f"at most {room}, which fit on size={levels.size} with {levels.max_boxes} boxes"
            raise unexpected("num_noise", self.num_noise, allowed)
        if self.decoys and levels.max_boxes > MOST_BOXES:
            expected = f"0 with {levels.max_boxes} boxes: decoys allow at most {MOST_BOXES}"
            raise unexpected("num_noise", self.num_noise, expected)

    @cached_property
    def looks_like_signal(self) -> bool:
        """Whether there is noise in the colours of keys and locks."""
        return self.noise_role == "signal" and highest(self.num_noise) > 0

    @cached_property
    def decoys(self) -> bool:
        """Whether there are decoys."""
        return self.looks_like_signal and self.noise_motion == "still"

    @cached_property
    def wanders(self) -> bool:
        """Whether there is clutter that moves."""
        return self.noise_motion == "wander" and highest(self.num_noise) > 0

    @cached_property
    def tokens_each(self) -> int:
        """Tokens of an entity, E: content and lock of a decoy box, or a decoy key and padding; 1 for clutter."""
        return 2 if self.decoys else 1

    @cached_property
    def num_tokens(self) -> int:
        """Largest number of noise tokens, L · E."""
        return highest(self.num_noise) * self.tokens_each

    def draw(self, level: Level, width: int, number: int) -> list[Token]:
        """Draw the noise tokens (L · E) of the level with a number, −1 for one given as text; absent ones come last."""
        stream = IntegerStream((MAX_SEED if number < 0 else number) ^ STREAM_SALT)
        num_noise = stream.between(lowest(self.num_noise), highest(self.num_noise))
        if self.decoys:
            tokens = list(islice(draw_decoys(stream, level, width), 2 * num_noise))
        else:
            tokens = list(islice(draw_clutter(stream, level, width, self.noise_role == "own"), num_noise))
        return tokens + [absent(width)] * (self.num_tokens - len(tokens))

    def places(self, noise: np.ndarray) -> list[tuple[int, int]]:
        """Return the first cell of each entity and its number of cells, from the noise (T, 2) of one environment."""
        lengths = 1 + (noise[1::2, 1] != ABSENT) if self.decoys else np.ones(len(noise), np.int64)
        entities = zip(noise[:: self.tokens_each].tolist(), lengths.tolist(), strict=True)
        return [(cell, length) for (cell, colour), length in entities if colour != ABSENT]

    def check_tokens(self, tokens: list[list[int]], level: Level, width: int) -> None:
        """Raise ValueError unless noise tokens, cells and colours, can occur in a level in play."""
        present = [(cell, colour) for cell, colour in tokens if (cell, colour) != absent(width)]
        colours = range(CLUTTER, CLUTTER + 1) if self.noise_role == "own" else range(GEM + 1)
        free = grid_cells(level.size, width) & ~(1 << level.key[0] | sum(3 << box.cell for box in level.boxes))
        if self.decoys:
            held = level.key[0] == CORNER
            free |= (not held) << CORNER  # of the picture, where a decoy key is held
            good = len(dict(present)) == len(present)  # distinct cells
            for (cell, colour), (next_cell, lock) in zip(tokens[::2], tokens[1::2], strict=True):
                is_key = lock == ABSENT and colour != GEM and (held or cell != level.agent)
                is_box = lock < KEYS and cell + 1 == next_cell and cell and level.agent not in (cell, next_cell)
                good &= bool(is_key or is_box)
        else:
            good = True
        if not (good and all(0 <= cell < width * width and free >> cell & 1 and x in colours for cell, x in present)):
            raise ValueError(f"state: noise: expected {self.noise_motion} noise in free cells, got {tokens}")


def absent(width: int) -> Token:
    """Return an absent token, in the last cell of the frame."""
    return width * width - 1, ABSENT


def draw_clutter(stream: IntegerStream, level: Level, width: int, own: bool) -> Iterator[Token]:
    """Draw clutter in distinct free cells, in its `own` colour, or in colours as frequent as those of real objects."""
    room = grid_cells(level.size, width) & ~(1 << level.agent | 1 << level.key[0])
    room &= ~sum(3 << box.cell for box in level.boxes)
    while room:
        cell = stream.member(room)
        room ^= 1 << cell
        yield cell, CLUTTER if own else _draw_colour(stream, 2 * len(level.boxes) + 1)


def draw_decoys(stream: IntegerStream, level: Level, width: int) -> Iterator[Token]:
    """Draw decoys, two tokens each, while there is room: every second one is a box if one fits, the others are keys.

    No decoy key has the colour of a lock, and no decoy lock that of a key outside decoy boxes. Decoys keep the distance
    of real objects where they can; boxes also leave all other cells connected.
    """
    agent, keys = 1 << level.agent, 1 << level.key[0]
    floor = grid_cells(level.size, width) & ~sum(3 << box.cell for box in level.boxes)
    apart = floor & ~(agent | grow(keys | sum(3 << box.cell for box in level.boxes), width))
    known = {level.key[1], *(colour for box in level.boxes for colour in box[1:])}
    unknown = [colour for colour in stream.sample(KEYS, KEYS) if colour not in known]
    key_colours, lock_colours = unknown[::2], unknown[1::2]
    for index in count():
        room = floor & ~(agent | keys)
        if not room or not lock_colours:  # only in levels given as text
            return
        cell = _draw_box(stream, apart, floor, agent, width) if index % 2 else None
        if cell is None:
            cell = stream.member(apart or room)
            keys |= 1 << cell
            apart &= ~grow(1 << cell, width)
            yield cell, key_colours[stream.below(len(key_colours))]
            yield absent(width)
        else:
            floor &= ~(3 << cell)
            apart &= ~grow(3 << cell, width)
            yield cell, _draw_colour(stream, max(len(level.boxes), 1))
            yield cell + 1, lock_colours[stream.below(len(lock_colours))]


def _draw_box(stream: IntegerStream, apart: int, floor: int, agent: int, width: int) -> int | None:
    """Draw the cell of a box within `apart` that leaves the other cells of the `floor` connected, None if none does."""
    room = apart & apart >> 1  # the next cell is for the lock
    while room:
        cell = stream.member(room)
        left = floor & ~(3 << cell)
        if flood(agent, left, width) == left:
            return cell
        room ^= 1 << cell
    return None


def _draw_colour(stream: IntegerStream, objects: int) -> int:
    """Draw the gem, which is one of so many `objects`, or the colour of a key."""
    return GEM if stream.below(objects) == 0 else stream.below(KEYS)


def block(noise: Array, move: Array, agent: Array, outcome: int) -> Array:
    """Return moves (B, 2), target and outcome, that decoy boxes block: agents (B,) stay where they are."""
    xp, on = namespace(noise), noise[..., 0] == move[:, :1]
    if xp is np and not np.count_nonzero(on):  # fast path for most steps of a single environment
        return move
    is_box = noise[:, 1::2, 1] != ABSENT  # the lock
    stays = xp.any((on[:, ::2] | on[:, 1::2]) & is_box, axis=1, keepdims=True)
    return xp.where(stays, xp.stack([agent, xp.full_like(agent, outcome)], axis=1), move)


def walls(noise: np.ndarray) -> list[int]:
    """Return the sets of cells of decoy boxes (B,), from noise (B, T, 2)."""
    return [sum(3 << cell - 1 for cell, colour in locks if colour != ABSENT) for locks in noise[:, 1::2].tolist()]


def take(noise: Array, agent: Array, held: Array, nowhere: int) -> Array:
    """Let agents (B,) without a real key, which is `held` (B,), pick up decoy keys; a decoy is lost to the next key."""
    xp, cell = namespace(noise), noise[..., 0]
    taken, in_hand = cell == agent[:, None], cell == CORNER
    if xp is np and not np.count_nonzero(taken | in_hand):  # fast path for most steps of a single environment
        return noise
    taken = taken & ~held[:, None]
    lost = in_hand & (held | xp.any(taken, axis=1))[:, None]
    noise = xp.asarray(noise, copy=True)
    noise[..., 0] = xp.where(taken, CORNER, xp.where(lost, nowhere, cell))
    noise[..., 1] = xp.where(lost, ABSENT, noise[..., 1])
    return noise


def wander(noise: Array, objects: Array, moves: Array, size: Array, action: Array) -> Array:
    """Move clutter to neighbouring cells without objects.

    Args:
        noise: cells and colours (B, L, 2).
        objects: cells and colours (B, M, 2) after the agents' moves.
        moves: by size, cell and action, the cell that an agent on an empty grid comes to, and an outcome.
        size: of the grids (B,).
        action: of the entities (B, L).
    """
    xp = namespace(noise)
    target = moves[size[:, None], noise[..., 0], action, 0]
    taken = (target[..., None] == objects[:, None, :, 0]).any(axis=-1)
    noise = xp.asarray(noise, copy=True)
    noise[..., 0] = xp.where(taken, noise[..., 0], target)
    return noise


def shown(noise: Array) -> tuple[Array, Array]:
    """Return cells and colours (B, L) of noise, to be written such that the first of those in one cell is shown."""
    xp = namespace(noise)
    if xp is np:  # which writes in order, but not through negative strides
        noise = noise[:, ::-1].copy()
        return noise[..., 0], noise[..., 1]
    cell, colour = noise[..., 0], noise[..., 1]
    first = xp.argmax(xp.astype(cell[:, :, None] == cell[:, None], xp.int64), axis=-1)
    return cell, colour[xp.arange(cell.shape[0], device=cell.device)[:, None], first]
