"""Levels of BoxWorld (paper, section 4.4; Zambaldi et al. 2018): a recipe and a number make one, anywhere the same.

The cells of a picture, the field and a frame one cell wide around it, are numbered row by row; a set of cells is an
integer with the bits of its members. The frame keeps a shift by one cell from leaving a row.
"""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from noisy_envs.randomness import IntegerStream
from noisy_envs.validation import Count, check_count, highest, lowest

KEYS = 19  # colours of keys and locks
GEM, AGENT, EMPTY, FRAME, ABSENT = range(KEYS, KEYS + 5)
CORNER = 0  # the cell of the frame, top left, that shows the held key
LARGEST_SIZE = 32  # pixels: 1,025 tokens
MAX_CACHED_LEVELS = 1 << 17  # levels
TRIES = 50  # at laying out a level at random, before it is laid out in rows
SYMBOLS = string.ascii_lowercase[:KEYS] + "*@.#"  # by colour
LOCKS = string.ascii_uppercase[:KEYS]


class Box(NamedTuple):
    """Two cells in a row: the content and, right of it, the lock."""

    cell: int  # of the content
    content: int  # colour: a key's, or GEM
    lock: int  # colour of the key that opens it


class Level(NamedTuple):
    """What lies where. The only key that is in no box lies loose in the field, or is held."""

    size: int  # cells along a side of the field
    agent: int  # cell
    key: tuple[int, int]  # cell, CORNER if held; colour
    boxes: tuple[Box, ...]  # in the order of their cells


@dataclass(frozen=True)
class LevelConfig:
    """What a level consists of; see `noisy_envs.games.box_world.BoxWorld`."""

    size: Count
    goal_length: Count
    num_distractors: Count
    distractor_length: Count

    def __post_init__(self) -> None:
        """Refuse what cannot be laid out.

        Raises:
            ValueError, TypeError: naming the option, its value and the limit.
        """
        for option, least in (("size", 3), ("goal_length", 2), ("num_distractors", 0), ("distractor_length", 1)):
            check_count(option, getattr(self, option), least)
        if highest(self.size) > LARGEST_SIZE:
            raise ValueError(f"size={self.size}: must be at most {LARGEST_SIZE}")
        asked = ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(self).items())
        room = len(_rows(lowest(self.size), self.width)) - 1  # one is for the loose key
        if self.max_boxes > room:
            raise ValueError(f"{asked}: {self.max_boxes} boxes; at most {room} fit on size={lowest(self.size)}")
        if self.max_boxes > KEYS:
            raise ValueError(f"{asked}: {self.max_boxes} keys; at most {KEYS}, since each has a colour of its own")

    @property
    def least_levels(self) -> int:
        """How many levels there are at least: those laid out in rows, with as few boxes as there may be."""
        branches = lowest(self.num_distractors)
        boxes = lowest(self.goal_length) - 1 + branches * lowest(self.distractor_length)
        size, rows = lowest(self.size), len(_rows(lowest(self.size), self.width))
        layouts = math.perm(rows, boxes + 1) // math.factorial(branches)  # two branches may change places
        return layouts * math.perm(KEYS, boxes) * (size * size - 2 * boxes - 1)  # the agent is where nothing else is

    @property
    def width(self) -> int:
        """Cells along a side of a picture."""
        return highest(self.size) + 2

    @property
    def max_boxes(self) -> int:
        """Most boxes of a level, and so most keys."""
        return highest(self.goal_length) - 1 + highest(self.num_distractors) * highest(self.distractor_length)


def draw_level(config: LevelConfig, number: int) -> Level:
    """Draw a level: keys and locks, then places, so that every free cell can be reached from every other."""
    stream = IntegerStream(number)
    size, goal_length, branches, length = (
        stream.between(lowest(count), highest(count))
        for count in (config.size, config.goal_length, config.num_distractors, config.distractor_length)
    )
    solution = goal_length - 1
    colours = stream.sample(KEYS, solution + branches * length)
    path, others = colours[:solution], colours[solution:]
    pairs = list(zip((*path[1:], GEM), path, strict=True))  # content, lock
    for branch in range(branches):  # its first lock fits a key of the path, each further one the key before
        keys = others[branch * length : (branch + 1) * length]
        pairs += zip(keys, (path[stream.below(solution)], *keys), strict=False)
    cells, key, agent = _lay_out(stream, size, config.width, len(pairs))
    boxes = (Box(cell, *pairs[i]) for cell, i in zip(cells, stream.sample(len(pairs), len(pairs)), strict=True))
    return Level(size, agent, (key, path[0]), tuple(sorted(boxes)))


def _lay_out(stream: IntegerStream, size: int, width: int, count: int) -> tuple[list[int], int, int]:
    """Draw cells of the contents of `count` boxes, of the key and of the agent.

    No two boxes share an edge, nor a box and the key, and boxes do not part the field.
    """
    everywhere = field(size, width)
    for _ in range(TRIES):
        free, solid = everywhere, 0
        cells: list[int] = []
        while len(cells) < count and (room := free & free >> 1):  # the lock needs the next cell
            cells.append(stream.member(room))
            box = 3 << cells[-1]
            solid |= box
            free &= ~grow(box, width)
        if len(cells) == count and free:
            key = stream.member(free)
            agent = stream.member(everywhere & ~solid & ~(1 << key))
            if flood(1 << agent, everywhere & ~solid, width) == everywhere & ~solid:
                return cells, key, agent
    rows = _rows(size, width)
    *cells, key = (rows[i] for i in stream.sample(len(rows), count + 1))
    solid = sum(3 << cell for cell in cells)
    return cells, key, stream.member(everywhere & ~solid & ~(1 << key))


def _rows(size: int, width: int) -> list[int]:
    """Return cells for as many boxes as stand apart in every other row, with free columns between them."""
    return [row * width + column for row in range(1, size + 1, 2) for column in range(1, size, 3)]


def field(size: int, width: int) -> int:
    """Return the cells within the frame."""
    row = (1 << size) - 1
    return sum(row << (line * width + 1) for line in range(1, size + 1))


def grow(cells: int, width: int) -> int:
    """Return the cells and those that share an edge with them."""
    return cells | cells << 1 | cells >> 1 | cells << width | cells >> width


def flood(start: int, free: int, width: int) -> int:
    """Return the cells among `free` that are reached from `start`."""
    reached, wider = 0, start
    while wider != reached:
        reached, wider = wider, grow(wider, width) & free
    return reached


def on_path(boxes: tuple[Box, ...]) -> set[Box]:
    """Return the boxes that lead to the gem; all others are dead ends."""
    found: set[Box] = set()
    wanted = {GEM}
    while before := {box for box in boxes if box.content in wanted} - found:
        found |= before
        wanted = {box.lock for box in before}
    return found


def moves(width: int) -> tuple[int, int, int, int]:
    """Return how far a cell lies from that of the agent: up, down, left, right, in the order of the actions."""
    return -width, width, -1, 1


def next_move(level: Level, width: int) -> int:
    """Return the first action of a shortest solution, or 0 where there is none.

    Where no two keys are alike, the next goal is forced, the loose key or the lock that the held key opens, and so is
    the cell where the agent then stands: shortest ways from goal to goal make a shortest solution.
    """
    goals = 1 << level.key[0]
    if level.key[0] == CORNER:
        goals = sum(2 << box.cell for box in on_path(level.boxes) if box.lock == level.key[1])
    free = field(level.size, width) & ~sum(3 << box.cell for box in level.boxes)
    near, wider = 0, goals  # cells from which a goal is fewer steps away than from the agent
    while not wider >> level.agent & 1:
        if near == wider:
            return 0
        near, wider = wider, grow(wider, width) & (free | wider)
    return next((i for i, move in enumerate(moves(width)) if near >> (level.agent + move) & 1), 0)


def render_text(level: Level, width: int) -> str:
    """Draw a level in characters, see `read`."""
    rows = [["#"] * (level.size + 2) for _ in range(level.size + 2)]
    for line in rows[1:-1]:
        line[1:-1] = "." * level.size
    shown = [(level.key[0], SYMBOLS[level.key[1]]), (level.agent, SYMBOLS[AGENT])]
    for box in level.boxes:
        shown += [(box.cell, SYMBOLS[box.content]), (box.cell + 1, LOCKS[box.lock])]
    for cell, symbol in shown:
        row, column = divmod(cell, width)
        rows[row][column] = symbol
    return "\n".join(map("".join, rows))


def read(drawing: str, width: int) -> Level:
    """Read a level: a square of characters, its frame included.

    `.` is empty, `@` the agent, `*` the gem, `a` … `s` are keys, and `A` … `S` the locks that they open, each right of
    its content. A key or gem in the top left corner is held, as in

        #####
        #@..#
        #..a#
        #*A.#
        #####

    Args:
        drawing: the characters.
        width: of the picture in cells, at least that of the drawing.

    Raises:
        ValueError: naming what is wrong where.
    """
    rows = drawing.split()
    size = len(rows) - 2
    if {len(row) for row in rows} != {size + 2} or not 1 <= size <= width - 2:
        found = [len(row) for row in rows]
        raise ValueError(f"text: rows of {found} characters must be a square of 3 to {width}; an empty cell is '.'")
    boxes, agents, keys = [], [], []
    for y, row in enumerate(rows):
        for x, symbol in enumerate(row):
            cell, lock = y * width + x, LOCKS.find(row[x + 1 : x + 2] or "#")
            framed = not (1 <= y <= size and 1 <= x <= size)
            if (framed and symbol == "#") or (not framed and symbol == "."):
                continue
            if symbol == "@" and not framed:
                agents.append(cell)
            elif symbol in SYMBOLS[: GEM + 1] and lock >= 0 and not framed:
                boxes.append(Box(cell, SYMBOLS.index(symbol), lock))
            elif symbol in SYMBOLS[: GEM + 1] and (cell == CORNER or (not framed and symbol != "*")):
                keys.append((cell, SYMBOLS.index(symbol)))
            elif not (boxes and boxes[-1].cell == cell - 1 and not framed):
                raise ValueError(f"text: {symbol!r} in row {y}, column {x} must not stand there")
    if len(agents) != 1 or len(keys) != 1:
        raise ValueError(f"text: {len(agents)} agents and {len(keys)} keys outside boxes, must be one of each")
    return Level(size, agents[0], keys[0], tuple(boxes))


def check(level: Level, width: int) -> None:
    """Raise ValueError unless things lie in the field, each in a cell of its own, and the gem only where it can be."""
    held = level.key[0] == CORNER
    cells = [level.agent, *([] if held else [level.key[0]]), *(box.cell + i for box in level.boxes for i in (0, 1))]
    inside = field(level.size, width)
    for cell in cells:
        if not (0 <= cell < width * width and inside >> cell & 1):
            raise ValueError(f"level: a thing in row {cell // width}, column {cell % width} lies outside the field")
    if len(set(cells)) < len(cells):
        raise ValueError(f"level: cells {cells} must hold one thing each")
    if level.boxes != tuple(sorted(level.boxes)):
        raise ValueError(f"level: boxes at {[box.cell for box in level.boxes]} must be in the order of their cells")
    keys, locks = [level.key[1], *(box.content for box in level.boxes)], [box.lock for box in level.boxes]
    if not all(0 <= key <= GEM for key in keys) or keys.count(GEM) > 1:
        raise ValueError(f"level: keys {keys} must be from 0 to {KEYS - 1} (a to s), or one the gem, {GEM} (*)")
    if not all(0 <= lock < KEYS for lock in locks) or (level.key[1] == GEM and not held):
        raise ValueError(f"level: locks {locks} and the loose key {level.key[1]} must be from 0 to {KEYS - 1}")


class LevelCache:
    """Levels as rows of M integers, each drawn when it is first asked for, and kept."""

    def __init__(self, start: int, count: int, length: int, row: Callable[[int], Sequence[int]]) -> None:
        """Keep room for the levels `start` … `start + count - 1`, at most `MAX_CACHED_LEVELS` of them at a time.

        Args:
            start: number of a level, from 0.
            count: how many.
            length: of a row, M.
            row: draws the row of a level's number.
        """
        self._start, self._row = start, row
        self._rows = np.zeros((min(count, MAX_CACHED_LEVELS), length), np.int16)
        self._numbers = np.full(len(self._rows), -1)  # of the levels in them

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the rows (R, M) int64 of the levels `numbers` (R,), also of such that are not in the bank."""
        slots = (numbers - self._start) % len(self._rows)
        rows = self._rows[slots].astype(np.int64)
        for i in (self._numbers[slots] != numbers).nonzero()[0]:
            rows[i] = self._rows[slots[i]] = self._row(int(numbers[i]))
            self._numbers[slots[i]] = numbers[i]
        return rows
