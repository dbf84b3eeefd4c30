"""Drawing: a picture of one world, as an array or in a window.

One function for each game (`SCENES`) turns its state into a `Scene`, what to draw in units of the world, or into a
`Board` of cells, and so does `render_scene` of a game of your own; the rest of the module paints any of them.
pygame is imported at the first drawing, and an array needs no display.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from noisy_envs.arrays import as_numpy
from noisy_envs.games import box_world, box_world_levels
from noisy_envs.games import simple_centroid as centroid
from noisy_envs.games import simple_tag as tag
from noisy_envs.games.particles import ABSENT, State
from noisy_envs.rendering.window import Window

if TYPE_CHECKING:
    import pygame

Color = tuple[int, int, int]
Point = tuple[float, float]

Array = npt.NDArray[Any]
Picture = npt.NDArray[np.uint8]

WHITE, BLACK, GRID, AXES = (255, 255, 255), (30, 30, 30), (236, 236, 236), (205, 205, 205)
GREEN, PALE_GREEN, BLUE, RED = (16, 120, 44), (120, 208, 112), (20, 44, 170), (240, 92, 80)
DARK_RED, BRIGHT_GREEN = (196, 16, 28), (84, 214, 96)
AMBER, YELLOW = (255, 166, 0), (255, 224, 32)
MARGIN = 0.5  # units of the world between the outermost start and the border
# shares of the picture's size
BAND = 0.055  # height of the caption, and of the legend
TEXT = 0.031  # height of a font
LEGIBLE = 0.011  # least radius of an entity
HALO = 0.035  # width of the strongest halo
HALO_SHARE = 0.25  # the same, of a cell
SMOOTH = 2  # a picture is painted so many times too large and scaled down, which smooths edges


class Kind(NamedTuple):
    """How things of one kind look; kinds differ in lightness and shape too, for eyes that confuse colours."""

    name: str  # in the legend
    radius: float  # units of the world
    color: Color
    core: tuple[tuple[float, Color], ...] = ()  # smaller discs on the disc: share of the radius, colour
    shape: str = (
        "disc"  # "disc", "ring", "diamond", "star", "cross", "square", "halo", or "box", two cells, one of its `core`
    )


class Item(NamedTuple):
    """A thing to draw."""

    kind: Kind
    x: float  # units of the world
    y: float
    halo: float = 0.0  # strength, 0 to 1


@dataclass(frozen=True)
class Scene:
    """A picture in units of the world, seen by a camera above the origin that never moves."""

    reach: float  # half the height that the camera sees
    kinds: tuple[Kind, ...]  # the legend; earlier kinds lie on later ones
    items: list[Item]
    arena: float = 0.0  # half the side of a square to outline; 0 for none


@dataclass(frozen=True)
class Board:
    """A square of cells, w along a side."""

    colors: Picture  # (w, w, 3)
    outlined: list[tuple[int, int, int]]  # row, column and length of cells in a row that belong together
    halos: Array  # (w, w) strengths, 0 to 1
    kinds: tuple[Kind, ...]  # the legend


AGENT = Kind("agent", centroid.AGENT_RADIUS, GREEN)
OTHER = Kind("other agents", centroid.AGENT_RADIUS, PALE_GREEN)
SIGNAL = Kind("signal", centroid.SIGNAL_RADIUS, BLUE, ((0.78, WHITE), (0.54, BLUE)))
NOISE = Kind("noise", centroid.NOISE_RADIUS, RED, ((0.64, WHITE),))
CENTROID = Kind("centroid", 0.16, BLACK, shape="cross")  # larger than what may lie on it
PREDATOR = Kind("predator", tag.PREDATOR_RADIUS, DARK_RED)
PREDATORS = Kind("other predators", tag.PREDATOR_RADIUS, DARK_RED, ((0.55, WHITE),))
PREY = Kind("prey", tag.PREY_RADIUS, BRIGHT_GREEN, shape="diamond")
CATCH_FLASH = Kind("catch", 0.2, YELLOW, shape="star")
SOLID_OBSTACLE = Kind("obstacle", tag.OBSTACLE_RADIUS, BLACK)
NOISE_OBSTACLE = Kind("obstacle (noise)", tag.OBSTACLE_RADIUS, BLACK, shape="ring")
ONE_KEY, OTHER_KEY = (tuple(box_world.PALETTE[color].tolist()) for color in (10, 13))  # of 19
AGENT_CELL, GEM_CELL, HELD_CELL = (
    Kind(name, 0.0, tuple(box_world.PALETTE[color].tolist()), shape="square")
    for name, color in (
        ("agent", box_world_levels.AGENT),
        ("gem", box_world_levels.GEM),
        ("held key: top left", box_world_levels.FRAME),
    )
)
KEY_CELL = Kind("loose key", 0.0, ONE_KEY, shape="square")
BOX_CELLS = Kind("content, lock", 0.0, OTHER_KEY, ((1.0, ONE_KEY),), shape="box")
CELLS = AGENT_CELL, GEM_CELL, KEY_CELL, BOX_CELLS, HELD_CELL
WEIGHT = Kind("weight", 0.0, AMBER, shape="halo")  # in the legend alone


def _seen(state: State, halos: Array, looks: dict[int, Kind], first: Kind) -> list[Item]:
    """Show all entities present: the first agent as `first`, others as their roles look; halos as its tokens."""
    rows = np.concatenate([state.mover[:1], state.landmark, state.mover[1:]])  # (N, 5), in the order of the tokens
    return [
        Item(looks[int(role)] if token else first, float(x), float(y), float(halos[token]))
        for token, (x, y, _, _, role) in enumerate(rows)
        if role != ABSENT
    ]


def simple_centroid_scene(game: centroid.SimpleCentroid, state: State, halos: Array) -> Scene:
    """Show a world of SimpleCentroid; `halos` (N,) in the order of the first agent's tokens."""
    items = _seen(state, halos, {centroid.AGENT: OTHER, centroid.SIGNAL: SIGNAL, centroid.NOISE: NOISE}, AGENT)
    middle = state.mover[state.mover[:, 4] == centroid.SIGNAL, :2].mean(axis=0)
    items.append(Item(CENTROID, float(middle[0]), float(middle[1])))
    played = {OTHER: game.num_agents > 1, NOISE: game.num_entities > game.num_movers}
    kinds = tuple(kind for kind in (AGENT, OTHER, SIGNAL, CENTROID, NOISE) if played.get(kind, True))
    return Scene(game.start_reach + MARGIN, kinds, items)


def simple_tag_scene(game: tag.SimpleTag, state: State, halos: Array) -> Scene:
    """Show a world of SimpleTag; `halos` (N,) in the order of the first predator's tokens.

    Obstacles that collide with nothing are hollow. A star lies behind each prey that is caught.
    """
    obstacle = SOLID_OBSTACLE if game.obstacles_matter else NOISE_OBSTACLE
    looks = {tag.PREDATOR: PREDATORS, tag.PREY: PREY, tag.OBSTACLE: obstacle}
    items = _seen(state, halos, looks, PREDATOR)
    prey = state.mover[game.num_predators :, :2]
    caught = game.touching(State(state.mover[None], state.landmark[None]))[0].any(axis=0)
    items += [Item(CATCH_FLASH, float(x), float(y)) for x, y in prey[caught]]
    played = {PREDATORS: game.num_predators > 1, obstacle: game.num_entities > game.num_movers}
    kinds = tuple(kind for kind in (PREDATOR, PREDATORS, PREY, CATCH_FLASH, obstacle) if played.get(kind, True))
    return Scene(game.start_reach + MARGIN, kinds, items, arena=tag.OUTSIDE)


def box_world_board(game: box_world.BoxWorld, state: box_world.State, halos: Array) -> Board:
    """Show a world of BoxWorld as the paper does, `halos` (N,) on the cells of the tokens; each box has an outline."""
    worlds = box_world.State(*(field[None] for field in state))
    square = game.width, game.width
    strengths = np.zeros(game.width * game.width)
    strengths[game.token_cells(worlds)[0]] = halos
    strengths[game.nowhere] = 0.0  # what is absent
    (level,) = game.levels(worlds)
    outlined = [(*divmod(box.cell, game.width), 2) for box in level.boxes]
    if level.key[1] == box_world_levels.GEM:
        outlined.append((0, 0, 1))
    colors = box_world.PALETTE[game.picture(worlds)[0]].reshape(*square, 3)
    return Board(colors, outlined, strengths.reshape(square), CELLS)


SCENES: dict[str, Callable[[Any, Any, Array], Scene | Board]] = {
    centroid.SimpleCentroid.name: simple_centroid_scene,
    tag.SimpleTag.name: simple_tag_scene,
    box_world.BoxWorld.name: box_world_board,
}


class Renderer:
    """Draws the environments of one game: as arrays, or in a window of its own."""

    def __init__(self, game: Any, mode: str, fps: int = 10, size: int = 600) -> None:
        """Choose what to draw; nothing opens before the first drawing.

        Args:
            game: the rules of the game.
            mode: "rgb_array" or "human".
            fps: frames a second at most, in mode "human" only.
            size: width and height in pixels.

        Raises:
            ValueError: naming the option, its value and what is allowed.
        """
        if game.name not in SCENES and not hasattr(game, "render_scene"):
            raise ValueError(
                f"cannot draw {game.name!r}, only {', '.join(SCENES)} and games with a method `render_scene`"
            )
        if mode not in ("human", "rgb_array"):
            raise ValueError(f"mode={mode!r} must be 'human' or 'rgb_array'")
        if fps < 1 or size < 100:
            raise ValueError(f"fps={fps} must be at least 1 and size={size} at least 100")
        self.game, self.mode, self.fps, self.size = game, mode, fps, size
        self._window = Window(game.name, (size, size), fps)

    def draw(
        self, state: Any, step: int, total_return: float, weights: Any = None, meaning: str = "weight"
    ) -> Picture | None:
        """Draw one world.

        Args:
            state: of the game, NumPy arrays without the batch axis. It is not changed.
            step: steps played in this episode, for the caption.
            total_return: sum of rewards so far, for the caption.
            weights: (N,) weights of a pooling head over the tokens of the first agent, or (w, w) over pixels, none
                negative. The largest gets the strongest halo.
            meaning: what they are, in the legend.

        Returns:
            A new array uint8 (size, size, 3), or None in mode "human", where nothing is drawn any more once the person
            has closed the window.
        """
        if self._window.dismissed:
            return None
        halos = _halos(weights, self.game.observation_bounds[0].shape[:-1])
        own = getattr(self.game, "render_scene", None)
        scene = own(state, halos) if own else SCENES[self.game.name](self.game, state, halos)
        if weights is not None:
            scene = replace(scene, kinds=(*scene.kinds, WEIGHT._replace(name=meaning)))
        # + 0.0 turns -0.0 into 0.0
        picture = paint(scene, f"step {step}     return {round(float(total_return), 3) + 0.0:.3f}", self.size)
        if self.mode == "human":
            self._window.show(picture)
            return None
        import pygame

        pixels = np.frombuffer(pygame.image.tobytes(picture, "RGB"), np.uint8)
        return pixels.reshape(self.size, self.size, 3).copy()  # a buffer of bytes is read-only

    def close(self) -> None:
        """Close the window, and no other; drawing again opens a new one."""
        self._window.close()

    def __getstate__(self) -> dict[str, Any]:
        """Give a copy a window of its own."""
        return {**self.__dict__, "_window": copy(self._window)}


def paint(scene: Scene | Board, caption: str, size: int) -> pygame.Surface:
    """Paint a scene as a square of `size` pixels."""
    import pygame

    large, band = SMOOTH * size, SMOOTH * round(BAND * size)
    canvas = pygame.Surface((large, large), depth=32)
    canvas.fill(WHITE)
    view = pygame.Rect(0, band, large, large - 2 * band)
    canvas.set_clip(view)
    hidden = False
    if isinstance(scene, Board):
        _paint_board(canvas, view, scene)
    else:
        hidden = _paint_world(canvas, view, scene)
    canvas.set_clip(None)
    pygame.font.init()
    font = pygame.font.Font(None, round(TEXT * large))  # not kept: a pygame.quit() elsewhere would end it
    text = font.render(caption, True, BLACK)
    canvas.blit(text, text.get_rect(midleft=(band / 2, band / 2)))
    if hidden:
        text = font.render("out of view", True, BLACK)
        place = text.get_rect(midright=(large - band / 2, band / 2))
        canvas.blit(text, place)
        _paint_arrow(canvas, BLACK, (place.left - band / 2, band / 2), 0.0, 1.4 * LEGIBLE * large)
    _paint_legend(canvas, font, large - band / 2, scene.kinds)
    return pygame.transform.smoothscale(canvas, (size, size))


def _paint_world(canvas: pygame.Surface, view: pygame.Rect, scene: Scene) -> bool:
    """Paint grid and things; an arrow at the border stands for a thing out of view. Tell whether there is one."""
    least, scale = LEGIBLE * canvas.get_width(), view.height / 2 / scene.reach
    _paint_grid(canvas, view, scale, scene.arena)
    border = view.inflate(-4 * least, -4 * least)
    things = []
    for item in sorted(scene.items, key=lambda item: scene.kinds.index(item.kind), reverse=True):
        # pygame takes no numpy.float32, such as a state holds
        x, y = view.centerx + scale * float(item.x), view.centery - scale * float(item.y)
        near = (min(max(x, border.left), border.right), min(max(y, border.top), border.bottom))
        things.append((item, max(item.kind.radius * scale, least), (x, y), near, view.collidepoint(x, y)))
    for item, radius, place, near, seen in things:  # all halos first, so that none hides a thing
        _paint_halo(canvas, place if seen else near, radius, item.halo)
    for item, radius, place, near, seen in things:
        if seen:
            _paint_kind(canvas, item.kind, place, radius)
        else:
            angle = math.atan2(place[1] - near[1], place[0] - near[0])
            _paint_arrow(canvas, item.kind.color, near, angle, 1.4 * least)
    return not all(seen for *_, seen in things)


def _paint_board(canvas: pygame.Surface, view: pygame.Rect, board: Board) -> None:
    """Paint cells, outlines, and halos as borders inside their cells."""
    import pygame

    count = len(board.colors)
    side = view.height / count
    left = view.centerx - view.height / 2

    def cells(row: int, column: int, length: int = 1) -> pygame.Rect:
        x, y = round(left + column * side), round(view.top + row * side)
        return pygame.Rect(x, y, round(left + (column + length) * side) - x, round(view.top + (row + 1) * side) - y)

    for row, column in np.ndindex(count, count):
        color = board.colors[row, column].tolist()
        pygame.draw.rect(canvas, color, cells(row, column))
        if any(color):  # no lines in the frame
            pygame.draw.rect(canvas, AXES, cells(row, column), 1)
    for outline in board.outlined:
        pygame.draw.rect(canvas, BLACK, cells(*outline), 2 * SMOOTH)
    for row, column in zip(*board.halos.nonzero(), strict=True):
        width = round(float(board.halos[row, column]) * side * HALO_SHARE)
        if width:
            pygame.draw.rect(canvas, BLACK, cells(row, column).inflate(2, 2), width + 2)
            pygame.draw.rect(canvas, AMBER, cells(row, column), width)


def _paint_grid(canvas: pygame.Surface, view: pygame.Rect, scale: float, arena: float) -> None:
    """Paint lines a unit (or a power of ten of it) apart, those through the origin darker, and the arena's edge."""
    import pygame

    apart = scale * 10.0 ** math.ceil(math.log10(view.width / scale / 20))
    lines = math.ceil(view.width / 2 / apart)
    for line in sorted(range(-lines, lines + 1), key=abs, reverse=True):
        x, y = view.centerx + line * apart, view.centery + line * apart
        pygame.draw.line(canvas, GRID if line else AXES, (x, view.top), (x, view.bottom), SMOOTH)
        pygame.draw.line(canvas, GRID if line else AXES, (view.left, y), (view.right, y), SMOOTH)
    pygame.draw.rect(canvas, AXES, view, SMOOTH)
    if arena:
        side = 2 * arena * scale
        edge = pygame.Rect(view.centerx - side / 2, view.centery - side / 2, side, side)
        pygame.draw.rect(canvas, AXES, edge, 2 * SMOOTH)


def _paint_kind(canvas: pygame.Surface, kind: Kind, place: Point, radius: float) -> None:
    """Paint one thing."""
    import pygame

    x, y = place
    if kind.shape == "cross":
        for color, width, length in ((WHITE, 5, radius + SMOOTH), (kind.color, 2, radius)):
            pygame.draw.line(canvas, color, (x - length, y), (x + length, y), width * SMOOTH)
            pygame.draw.line(canvas, color, (x, y - length), (x, y + length), width * SMOOTH)
    elif kind.shape == "square":
        square = pygame.Rect(x - radius, y - radius, 2 * radius, 2 * radius)
        pygame.draw.rect(canvas, kind.color, square)
        pygame.draw.rect(canvas, BLACK, square, SMOOTH)
    elif kind.shape == "box":
        for left, color in ((x - 1.25 * radius, kind.color), (x, kind.core[0][1])):
            pygame.draw.rect(canvas, color, (left, y - radius, 1.25 * radius, 2 * radius))
        pygame.draw.rect(canvas, BLACK, (x - 1.25 * radius, y - radius, 2.5 * radius, 2 * radius), SMOOTH)
    elif kind.shape == "ring":
        pygame.draw.circle(canvas, kind.color, place, radius, 2 * SMOOTH)
    elif kind.shape == "star":
        pygame.draw.polygon(canvas, BLACK, _star(place, radius + 2 * SMOOTH, 9))
        pygame.draw.polygon(canvas, kind.color, _star(place, radius, 9))
    elif kind.shape == "diamond":
        corner = 1.25 * radius  # as large as the disc
        for color, size in ((BLACK, corner + 2 * SMOOTH), (kind.color, corner)):
            pygame.draw.polygon(canvas, color, [(x - size, y), (x, y - size), (x + size, y), (x, y + size)])
    else:
        pygame.draw.circle(canvas, WHITE, place, radius + SMOOTH)  # parts things that overlap
        for share, color in ((1.0, kind.color), *kind.core):
            pygame.draw.circle(canvas, color, place, share * radius)


def _star(place: Point, radius: float, points: int) -> list[Point]:
    """Return the corners of a star."""
    turns = [(math.pi * corner / points, radius if corner % 2 else 0.6 * radius) for corner in range(2 * points)]
    return [(place[0] + far * math.cos(angle), place[1] + far * math.sin(angle)) for angle, far in turns]


def _paint_arrow(canvas: pygame.Surface, color: Color, place: Point, angle: float, radius: float) -> None:
    """Paint a triangle that points out of the picture."""
    import pygame

    corners = [angle + turn for turn in (0.0, 2.4, -2.4)]
    tip = [(place[0] + radius * math.cos(a), place[1] + radius * math.sin(a)) for a in corners]
    pygame.draw.polygon(canvas, color, tip)


def _paint_halo(canvas: pygame.Surface, place: Point, radius: float, strength: float) -> None:
    """Paint a glow around a thing, wider and denser with its strength."""
    import pygame

    width = strength * HALO * canvas.get_width()
    reach = math.ceil(radius + width)
    if width < 1:
        return
    axis = np.arange(-reach, reach + 1, dtype=np.float32)
    fade = np.clip((radius + width - np.hypot(axis[:, None], axis)) / width, 0.0, 1.0)
    glow = pygame.Surface(fade.shape, pygame.SRCALPHA, 32)
    glow.fill(AMBER)
    pygame.surfarray.pixels_alpha(glow)[:] = fade * (255 * strength)
    canvas.blit(glow, (place[0] - reach, place[1] - reach))


def _paint_legend(canvas: pygame.Surface, font: pygame.font.Font, y: float, kinds: tuple[Kind, ...]) -> None:
    """Paint an icon and a label for each kind, in a row around the middle of the canvas at height `y`."""
    icon = BAND / 2 * canvas.get_width()
    labels = [font.render(kind.name, True, BLACK) for kind in kinds]
    x = (canvas.get_width() - sum(2.3 * icon + label.get_width() for label in labels) + icon) / 2
    for kind, label in zip(kinds, labels, strict=True):
        if kind.shape == "halo":
            _paint_halo(canvas, (x + icon / 2, y), 1.0, 0.5)
        else:
            _paint_kind(canvas, kind, (x + icon / 2, y), LEGIBLE * canvas.get_width())
        canvas.blit(label, label.get_rect(midleft=(x + 1.3 * icon, y)))
        x += 2.3 * icon + label.get_width()


def _halos(weights: Any, shape: tuple[int, ...]) -> Array:
    """Turn weights (N,), or of pixels (w, w), into strengths of halos (N,) relative to the largest; none without."""
    count = math.prod(shape)
    try:
        given = np.zeros(shape) if weights is None else as_numpy(weights).astype(np.float64)
    except ValueError:  # no numbers, or a ragged list
        given = np.zeros(())
    if given.shape not in (shape, (count,)) or not (np.isfinite(given) & (given >= 0)).all():
        raise ValueError(f"weights={weights!r} must be {count} finite numbers, one a token, none negative")
    strengths: Array = given.ravel() / (given.max() or 1.0)
    return strengths
