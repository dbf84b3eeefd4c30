"""Levels of BoxWorld (paper, section 4.4; Zambaldi et al. 2018), determined by sizes and a number.

A picture is the grid and a frame one cell wide around it; its cells are numbered row by row. A set of cells is an
integer, with a bit for each cell. Thanks to the frame, a shift by one cell never reaches the next row.
"""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from noisy_envs.randomness import IntegerStream
from noisy_envs.validation import Count, check_count, highest, lowest

KEYS = 19  # colours of keys and locks
GEM, AGENT, EMPTY, FRAME, ABSENT, CLUTTER = range(KEYS, KEYS + 6)
CORNER = 0  # top left cell of the frame, which shows the held key
LARGEST_SIZE = 32  # 1,025 tokens of pixels
MAX_CACHED_LEVELS = 1 << 17  # levels
TRIES = 50  # random layouts before boxes are placed in rows
SYMBOLS = string.ascii_lowercase[:KEYS] + "*@.#"  # of each colour
LOCKS = string.ascii_uppercase[:KEYS]
NOISE = "%"  # symbol of each cell with noise


class Box(NamedTuple):
    """A box: its content and, in the next cell of the row, its lock."""

    cell: int  # of the content
    content: int  # colour of a key, or GEM
    lock: int  # colour of the key that opens it


class Level(NamedTuple):
    """A level. The only key outside boxes is loose or held."""

    size: int  # width of the grid
    agent: int  # cell
    key: tuple[int, int]  # cell, or CORNER if held, and colour
    boxes: tuple[Box, ...]  # ordered by cell


@dataclass(frozen=True)
class LevelConfig:
    """Sizes of levels, the options of `noisy_envs.games.box_world.BoxWorld`."""

    size: Count
    goal_length: Count
    num_distractors: Count
    distractor_length: Count

    def __post_init__(self) -> None:
        """Validate that a level with the largest number of boxes fits the smallest grid.

        Raises:
            ValueError, TypeError: naming the option, its value and what is expected.
        """
        check_count("size", self.size, minimum=3, maximum=LARGEST_SIZE)
        for option, minimum in (("goal_length", 2), ("num_distractors", 0), ("distractor_length", 1)):
            check_count(option, getattr(self, option), minimum)
        options = ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(self).items())
        room = len(_rows(lowest(self.size), self.width)) - 1  # one place is for the loose key
        if self.max_boxes > room:
            allowed = f"at most {room} boxes, which fit on size={lowest(self.size)}"
            raise ValueError(f"{options}: expected {allowed}, got {self.max_boxes}")
        if self.max_boxes > KEYS:
            raise ValueError(f"{options}: expected at most {KEYS} keys, one of each colour, got {self.max_boxes}")

    @property
    def least_levels(self) -> int:
        """Lower bound on the number of distinct levels: those with boxes in rows, and as few boxes as allowed."""
        branches = lowest(self.num_distractors)
        boxes = lowest(self.goal_length) - 1 + branches * lowest(self.distractor_length)
        size, rows = lowest(self.size), len(_rows(lowest(self.size), self.width))
        layouts = math.perm(rows, boxes + 1) // math.factorial(branches)  # branches are interchangeable
        return layouts * math.perm(KEYS, boxes) * (size * size - 2 * boxes - 1)  # free cells for the agent

    @property
    def width(self) -> int:
        """Width of a picture."""
        return highest(self.size) + 2

    @property
    def max_boxes(self) -> int:
        """Largest number of boxes, hence of keys."""
        return highest(self.goal_length) - 1 + highest(self.num_distractors) * highest(self.distractor_length)


def draw_level(config: LevelConfig, number: int) -> Level:
    """Draw the level with a number: keys and locks, then positions that leave all free cells connected."""
    stream = IntegerStream(number)
    size, goal_length, branches, length = (
        stream.between(lowest(count), highest(count))
        for count in (config.size, config.goal_length, config.num_distractors, config.distractor_length)
    )
    solution = goal_length - 1
    colours = stream.sample(KEYS, solution + branches * length)
    path, others = colours[:solution], colours[solution:]
    pairs = list(zip((*path[1:], GEM), path, strict=True))  # content, lock
    for branch in range(branches):  # the first lock fits a key of the path, the others the preceding key
        keys = others[branch * length : (branch + 1) * length]
        pairs += zip(keys, (path[stream.below(solution)], *keys), strict=False)
    cells, key, agent = _lay_out(stream, size, config.width, len(pairs))
    boxes = (Box(cell, *pairs[i]) for cell, i in zip(cells, stream.sample(len(pairs), len(pairs)), strict=True))
    return Level(size, agent, (key, path[0]), tuple(sorted(boxes)))


def _lay_out(stream: IntegerStream, size: int, width: int, count: int) -> tuple[list[int], int, int]:
    """Draw the cells of the contents of `count` boxes, of the key and of the agent.

    Boxes share no edge with each other or the key, and do not divide the grid.
    """
    grid = grid_cells(size, width)
    for _ in range(TRIES):
        free, solid = grid, 0
        cells: list[int] = []
        while len(cells) < count and (room := free & free >> 1):  # the next cell is for the lock
            cells.append(stream.member(room))
            box = 3 << cells[-1]
            solid |= box
            free &= ~grow(box, width)
        if len(cells) == count and free:
            key = stream.member(free)
            agent = stream.member(grid & ~solid & ~(1 << key))
            if flood(1 << agent, grid & ~solid, width) == grid & ~solid:
                return cells, key, agent
    rows = _rows(size, width)
    *cells, key = (rows[i] for i in stream.sample(len(rows), count + 1))
    solid = sum(3 << cell for cell in cells)
    return cells, key, stream.member(grid & ~solid & ~(1 << key))


def _rows(size: int, width: int) -> list[int]:
    """Return cells for boxes in every other row, with free columns between them."""
    return [row * width + column for row in range(1, size + 1, 2) for column in range(1, size, 3)]


def grid_cells(size: int, width: int) -> int:
    """Return the cells of the grid, without the frame."""
    row = (1 << size) - 1
    return sum(row << (line * width + 1) for line in range(1, size + 1))


def grow(cells: int, width: int) -> int:
    """Return cells and their neighbours."""
    return cells | cells << 1 | cells >> 1 | cells << width | cells >> width


def flood(start: int, free: int, width: int) -> int:
    """Return the cells of `free` that can be reached from `start`."""
    reached, wider = 0, start
    while wider != reached:
        reached, wider = wider, grow(wider, width) & free
    return reached


def on_path(boxes: tuple[Box, ...]) -> set[Box]:
    """Return the boxes that lead to the gem; all others are dead ends."""
    path: set[Box] = set()
    needed = {GEM}
    while sources := {box for box in boxes if box.content in needed} - path:
        path |= sources
        needed = {box.lock for box in sources}
    return path


def moves(width: int) -> tuple[int, int, int, int]:
    """Return the offsets of the cells up, down, left and right, in the order of the actions."""
    return -width, width, -1, 1


def next_move(level: Level, width: int, walls: int = 0) -> int:
    """Return the first action of a shortest solution around further `walls`, a set of cells, or 0 if there is none.

    If all keys differ, the next goal (the loose key, or the lock that the held key opens) and the cell where the agent
    then stands are determined, so that shortest paths between goals make a shortest solution.
    """
    goals = 1 << level.key[0]
    if level.key[0] == CORNER:
        goals = sum(2 << box.cell for box in on_path(level.boxes) if box.lock == level.key[1])
    free = grid_cells(level.size, width) & ~(walls | sum(3 << box.cell for box in level.boxes))
    near, wider = 0, goals  # cells closer to a goal than the agent
    while not wider >> level.agent & 1:
        if near == wider:
            return 0
        near, wider = wider, grow(wider, width) & (free | wider)
    return next((i for i, move in enumerate(moves(width)) if near >> (level.agent + move) & 1), 0)


def render_text(level: Level, width: int, noise: Iterable[int] = ()) -> str:
    """Draw a level and the cells of noise in characters, see `read`."""
    rows = [["#"] * (level.size + 2) for _ in range(level.size + 2)]
    for line in rows[1:-1]:
        line[1:-1] = "." * level.size
    shown = [(cell, NOISE) for cell in noise]
    shown += [(level.key[0], SYMBOLS[level.key[1]]), (level.agent, SYMBOLS[AGENT])]
    for box in level.boxes:
        shown += [(box.cell, SYMBOLS[box.content]), (box.cell + 1, LOCKS[box.lock])]
    for cell, symbol in shown:
        row, column = divmod(cell, width)
        rows[row][column] = symbol
    return "\n".join(map("".join, rows))


def read(drawing: str, width: int) -> Level:
    """Read a level from a square of characters, with its frame.

    `.` is empty, `@` the agent, `*` the gem, `a` … `s` are keys, and `A` … `S` the locks that they open, to the right
    of the content. A key or gem in the top left corner is held. `%` is noise, which is not read. For example

        #####
        #@..#
        #..a#
        #*A.#
        #####

    Args:
        drawing: the characters, with line breaks.
        width: of the picture, at least that of the drawing.

    Raises:
        ValueError: invalid drawing.
    """
    rows = drawing.split()
    size = len(rows) - 2
    if {len(row) for row in rows} != {size + 2} or not 1 <= size <= width - 2:
        lengths = [len(row) for row in rows]
        raise ValueError(f"text: expected a square of 3 to {width} characters, '.' if empty, got rows of {lengths}")
    boxes, agents, keys = [], [], []
    for y, row in enumerate(rows):
        for x, symbol in enumerate(row):
            cell, lock = y * width + x, LOCKS.find(row[x + 1 : x + 2] or "#")
            frame = not (1 <= y <= size and 1 <= x <= size)
            if symbol == ("#" if frame else ".") or (symbol == NOISE and (cell == CORNER or not frame)):
                continue
            if symbol == "@" and not frame:
                agents.append(cell)
            elif symbol in SYMBOLS[: GEM + 1] and lock >= 0 and not frame:
                boxes.append(Box(cell, SYMBOLS.index(symbol), lock))
            elif symbol in SYMBOLS[: GEM + 1] and (cell == CORNER or (not frame and symbol != "*")):
                keys.append((cell, SYMBOLS.index(symbol)))
            elif not (boxes and boxes[-1].cell == cell - 1 and not frame):
                raise ValueError(f"text: {symbol!r} in row {y}, column {x} is not allowed")
    if len(agents) != 1 or len(keys) != 1:
        raise ValueError(f"text: expected one agent and one key outside boxes, got {len(agents)} and {len(keys)}")
    return Level(size, agents[0], keys[0], tuple(boxes))


def check(level: Level, width: int) -> None:
    """Raise ValueError unless objects are in distinct cells of the grid, and colours are valid."""
    held = level.key[0] == CORNER
    cells = [level.agent, *([] if held else [level.key[0]]), *(box.cell + i for box in level.boxes for i in (0, 1))]
    inside = grid_cells(level.size, width)
    for cell in cells:
        if not (0 <= cell < width * width and inside >> cell & 1):
            raise ValueError(f"level: object outside the grid, in row {cell // width}, column {cell % width}")
    if len(set(cells)) < len(cells):
        raise ValueError(f"level: expected one object per cell, got cells {cells}")
    if level.boxes != tuple(sorted(level.boxes)):
        raise ValueError(f"level: expected boxes ordered by cell, got {[box.cell for box in level.boxes]}")
    keys, locks = [level.key[1], *(box.content for box in level.boxes)], [box.lock for box in level.boxes]
    if not all(0 <= key <= GEM for key in keys) or keys.count(GEM) > 1:
        raise ValueError(
            f"level: expected keys from 0 to {KEYS - 1} (a to s) and at most one gem, {GEM} (*), got {keys}"
        )
    if not all(0 <= lock < KEYS for lock in locks) or (level.key[1] == GEM and not held):
        expected = f"locks and a loose key from 0 to {KEYS - 1}"
        raise ValueError(f"level: expected {expected}, got {locks} and {level.key[1]}")


class LevelCache:
    """Levels as rows of integers, drawn on first use and cached."""

    def __init__(self, start: int, count: int, length: int, row: Callable[[int], Sequence[int]]) -> None:
        """Allocate rows for the levels `start` … `start + count - 1`, at most `MAX_CACHED_LEVELS` at a time.

        Args:
            start: lowest number, at least 0.
            count: number of levels.
            length: of a row, M.
            row: draws the row of a number.
        """
        self._start, self._row = start, row
        self._rows = np.zeros((min(count, MAX_CACHED_LEVELS), length), np.int16)
        self._numbers = np.full(len(self._rows), -1)  # of the cached levels

    def rows(self, numbers: np.ndarray) -> np.ndarray:
        """Return the rows (R, M) int64 of the levels `numbers` (R,), which may lie outside the range."""
        slots = (numbers - self._start) % len(self._rows)
        rows = self._rows[slots].astype(np.int64)
        for i in (self._numbers[slots] != numbers).nonzero()[0]:
            rows[i] = self._rows[slots[i]] = self._row(int(numbers[i]))
            self._numbers[slots[i]] = numbers[i]
        return rows
