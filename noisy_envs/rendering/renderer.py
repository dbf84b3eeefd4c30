"""Rendering: a picture of one environment, as an array or in a window.

For each game a function of `SCENES`, or the method `render_scene` of a game of your own, turns a state into a `Scene`,
which is measured in units of the game's plane, or into a `Board` of cells. The rest of the module paints scenes and
boards. pygame is imported at the first drawing; an array needs no display.
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
from noisy_envs.games.particles import ABSENT, ParticleGame, State
from noisy_envs.registration import one_line
from noisy_envs.rendering.window import Window
from noisy_envs.validation import highest

if TYPE_CHECKING:
    import pygame

Color = tuple[int, int, int]
Point = tuple[float, float]

Array = npt.NDArray[Any]
Picture = npt.NDArray[np.uint8]

WHITE, BLACK, GRID, AXES = (255, 255, 255), (30, 30, 30), (236, 236, 236), (205, 205, 205)
GREEN, PALE_GREEN, BLUE, RED = (16, 120, 44), (120, 208, 112), (20, 44, 170), (240, 92, 80)
DARK_RED, PALE_RED, BRIGHT_GREEN = (196, 16, 28), (255, 205, 198), (84, 214, 96)
AMBER, YELLOW = (255, 166, 0), (255, 224, 32)
MARGIN = 0.5  # units between the outermost initial position and the border
# fractions of the picture's size
BAND = 0.055  # height of the caption, and of the legend
TEXT = 0.031  # height of the font
MIN_RADIUS = 0.011  # smallest radius of an entity
HALO = 0.035  # width of the strongest halo
CELL_HALO = 0.25  # the same, as a fraction of a cell
SMOOTH = 2  # a picture is painted this many times larger and scaled down, which smooths edges


class Marker(NamedTuple):
    """How entities of one type look. Markers differ in lightness and shape too, for colour-blind viewers."""

    name: str  # label in the legend
    radius: float  # units of the plane
    color: Color
    inner: tuple[tuple[float, Color], ...] = ()  # smaller discs on the disc: fraction of the radius, colour
    shape: str = "disc"  # or ring, diamond, star, cross, square, frame, halo, box: two cells, one of `inner`


class Item(NamedTuple):
    """An object to draw."""

    marker: Marker
    x: float  # units of the plane
    y: float
    halo: float = 0.0  # strength, 0 to 1


@dataclass(frozen=True)
class Scene:
    """A picture of a plane, seen by a fixed camera above the origin."""

    reach: float  # half the height that the camera sees, in units of the plane
    markers: tuple[Marker, ...]  # the legend; earlier markers are drawn over later ones
    items: list[Item]
    arena: float = 0.0  # half the side of a square to outline; 0 for none


@dataclass(frozen=True)
class Board:
    """A square of w by w cells."""

    colors: Picture  # (w, w, 3)
    outlines: list[tuple[int, int, int, Color]]  # row, column and length of horizontal groups of cells
    halos: Array  # (w, w) strengths, 0 to 1
    markers: tuple[Marker, ...]  # the legend


AGENT = Marker("agent", centroid.AGENT_RADIUS, GREEN)
OTHER = Marker("other agents", centroid.AGENT_RADIUS, PALE_GREEN)
SIGNAL = Marker("signal", centroid.SIGNAL_RADIUS, BLUE, ((0.78, WHITE), (0.54, BLUE)))
NOISE = Marker("noise", centroid.NOISE_RADIUS, RED, ((0.64, WHITE),))
CENTROID = Marker("centroid", 0.16, BLACK, shape="cross")  # larger than what may lie on it
PREDATOR = Marker("predator", tag.PREDATOR_RADIUS, DARK_RED)
PREDATORS = Marker("other predators", tag.PREDATOR_RADIUS, DARK_RED, ((0.55, WHITE),))
PREY = Marker("prey", tag.PREY_RADIUS, BRIGHT_GREEN, shape="diamond")
CATCH_FLASH = Marker("catch", 0.2, YELLOW, shape="star")
DECOY = Marker("noise", tag.PREY_RADIUS, PALE_RED, shape="diamond")
SOLID_OBSTACLE = Marker("obstacle", tag.OBSTACLE_RADIUS, BLACK)
NOISE_OBSTACLE = Marker("obstacle (noise)", tag.OBSTACLE_RADIUS, BLACK, shape="ring")
KEY_COLOR, CONTENT_COLOR = (tuple(box_world.PALETTE[color].tolist()) for color in (10, 13))  # two of 19
AGENT_CELL, GEM_CELL, HELD_CELL = (
    Marker(name, 0.0, tuple(box_world.PALETTE[color].tolist()), shape="square")
    for name, color in (
        ("agent", box_world_levels.AGENT),
        ("gem", box_world_levels.GEM),
        ("held key: top left", box_world_levels.FRAME),
    )
)
KEY_CELL = Marker("loose key", 0.0, KEY_COLOR, shape="square")
BOX_CELLS = Marker("content, lock", 0.0, CONTENT_COLOR, ((1.0, KEY_COLOR),), shape="box")
CELLS = AGENT_CELL, GEM_CELL, KEY_CELL, BOX_CELLS, HELD_CELL
NOISE_CELL = Marker("noise", 0.0, RED, shape="frame")
WEIGHT = Marker("attention", 0.0, AMBER, shape="halo")  # in the legend only


def _items(game: ParticleGame, state: State, halos: Array, markers: tuple[Marker, ...], first: Marker) -> list[Item]:
    """Return all entities that are present, with the halos of the first agent's tokens.

    The first agent has the marker `first`; the others have those of their types, `markers`.
    """
    rows = np.concatenate([state.mover[:1], state.landmark, state.mover[1:]])  # (N, 5), in the order of the tokens
    kinds = np.repeat(np.arange(len(markers)), game.max_counts)
    kinds = np.concatenate([kinds[:1], kinds[game.num_movers :], kinds[1 : game.num_movers]])
    return [
        Item(markers[kind] if token else first, float(x), float(y), float(halos[token]))
        for token, ((x, y, _, _, role), kind) in enumerate(zip(rows, kinds, strict=True))
        if role != ABSENT
    ]


def simple_centroid_scene(game: centroid.SimpleCentroid, state: State, halos: Array) -> Scene:
    """Return the scene of SimpleCentroid; `halos` (N,) are in the order of the first agent's tokens."""
    items = _items(game, state, halos, (OTHER, SIGNAL, NOISE), AGENT)
    signal = state.mover[game.rows["num_signal"]]
    x, y = signal[signal[:, 4] != ABSENT, :2].mean(axis=0)
    items.append(Item(CENTROID, float(x), float(y)))
    optional = {OTHER: game.num_agents > 1, NOISE: highest(game.num_noise) > 0}
    markers = tuple(marker for marker in (AGENT, OTHER, SIGNAL, CENTROID, NOISE) if optional.get(marker, True))
    return Scene(game.start_reach + MARGIN, markers, items)


def simple_tag_scene(game: tag.SimpleTag, state: State, halos: Array) -> Scene:
    """Return the scene of SimpleTag; `halos` (N,) are in the order of the first predator's tokens.

    Obstacles that do not collide are hollow. A star appears behind each caught prey.
    """
    obstacle = SOLID_OBSTACLE if game.obstacles_matter else NOISE_OBSTACLE
    others = (DECOY, obstacle) if game.noise_moves else (obstacle, DECOY)
    items = _items(game, state, halos, (PREDATORS, PREY, *others), PREDATOR)
    prey = state.mover[game.rows["num_prey"], :2]
    caught = game.touching(State(state.mover[None], state.landmark[None]))[0].any(axis=0)
    items += [Item(CATCH_FLASH, float(x), float(y)) for x, y in prey[caught]]
    optional = {
        PREDATORS: game.num_predators > 1,
        obstacle: highest(game.num_obstacles) > 0,
        DECOY: highest(game.num_noise) > 0,
    }
    legend = PREDATOR, PREDATORS, PREY, CATCH_FLASH, obstacle, DECOY
    markers = tuple(marker for marker in legend if optional.get(marker, True))
    return Scene(game.start_reach + MARGIN, markers, items, arena=tag.OUTSIDE)


def box_world_board(game: box_world.BoxWorld, state: box_world.State, halos: Array) -> Board:
    """Return the board of BoxWorld, drawn as in the paper, with an outline around each box, and a red one around noise.

    `halos` (N,) are in the order of the tokens, and appear on their cells.
    """
    batch = box_world.State(*(field[None] for field in state))
    square = game.width, game.width
    strengths = np.zeros(game.width * game.width)
    strengths[game.token_cells(batch)[0]] = halos
    strengths[game.nowhere] = 0.0  # the cell of absent tokens
    (level,) = game.levels(batch)
    outlines = [(*divmod(box.cell, game.width), 2, BLACK) for box in level.boxes]
    if level.key[1] == box_world_levels.GEM:
        outlines.append((0, 0, 1, BLACK))
    outlines += [(*divmod(cell, game.width), length, RED) for cell, length in game.noise_config.places(state.noise)]
    colors = box_world.PALETTE[game.picture(batch)[0]].reshape(*square, 3)
    markers = (*CELLS, NOISE_CELL) if game.num_noise_tokens else CELLS
    return Board(colors, outlines, strengths.reshape(square), markers)


SCENES: dict[str, Callable[[Any, Any, Array], Scene | Board]] = {
    centroid.SimpleCentroid.name: simple_centroid_scene,
    tag.SimpleTag.name: simple_tag_scene,
    box_world.BoxWorld.name: box_world_board,
}


class Renderer:
    """Draws the states of one game, as arrays or in a window."""

    def __init__(self, game: Any, mode: str, fps: int = 10, size: int = 600) -> None:
        """Prepare; a window opens at the first drawing.

        Args:
            game: rules of the game.
            mode: "rgb_array" or "human".
            fps: maximum number of frames per second, in mode "human" only.
            size: width and height in pixels.

        Raises:
            ValueError: naming the argument, its value and what is expected.
        """
        if game.name not in SCENES and not hasattr(game, "render_scene"):
            raise ValueError(f"game={game.name!r}: expected {', '.join(SCENES)} or a game with a method `render_scene`")
        if mode not in ("human", "rgb_array"):
            raise ValueError(f"mode={mode!r}: expected 'human' or 'rgb_array'")
        if fps < 1:
            raise ValueError(f"fps={fps}: expected at least 1")
        if size < 100:
            raise ValueError(f"size={size}: expected at least 100")
        self.game, self.mode, self.fps, self.size = game, mode, fps, size
        self._window = Window(game.name, (size, size), fps)

    def draw(
        self, state: Any, step: int, total_return: float, weights: Any = None, overlay: str = "attention"
    ) -> Picture | None:
        """Draw a state.

        Args:
            state: state of the game: NumPy arrays without batch axis. It is not changed.
            step: steps played in this episode, for the caption.
            total_return: sum of rewards so far, for the caption.
            weights: weights (N,) of the first agent's tokens in a pooling head, or (w, w) of pixels, not negative. The
                largest weight gets the strongest halo.
            overlay: name of the weights in the legend.

        Returns:
            A new array (size, size, 3) uint8, or None in mode "human". After the user has closed the window, nothing is
            drawn.
        """
        if self._window.dismissed:
            return None
        halos = _halos(weights, self.game.observation_bounds[0].shape[:-1])
        method = getattr(self.game, "render_scene", None)
        scene = method(state, halos) if method else SCENES[self.game.name](self.game, state, halos)
        if weights is not None:
            scene = replace(scene, markers=(*scene.markers, WEIGHT._replace(name=overlay)))
        # + 0.0 turns -0.0 into 0.0
        picture = paint(scene, f"step {step}     return {round(float(total_return), 3) + 0.0:.3f}", self.size)
        if self.mode == "human":
            self._window.show(picture)
            return None
        import pygame

        pixels = np.frombuffer(pygame.image.tobytes(picture, "RGB"), np.uint8)
        return pixels.reshape(self.size, self.size, 3).copy()  # an array over bytes is read-only

    def close(self) -> None:
        """Close this renderer's window; drawing again opens a new one."""
        self._window.close()

    def __getstate__(self) -> dict[str, Any]:
        """Give each copy a separate window."""
        return {**self.__dict__, "_window": copy(self._window)}


def paint(scene: Scene | Board, caption: str, size: int) -> pygame.Surface:
    """Paint a scene as a square of `size` pixels."""
    import pygame

    large, band = SMOOTH * size, SMOOTH * round(BAND * size)
    canvas = pygame.Surface((large, large), depth=32)
    canvas.fill(WHITE)
    view = pygame.Rect(0, band, large, large - 2 * band)
    canvas.set_clip(view)
    out_of_view = False
    if isinstance(scene, Board):
        _paint_board(canvas, view, scene)
    else:
        out_of_view = _paint_scene(canvas, view, scene)
    canvas.set_clip(None)
    pygame.font.init()
    font = pygame.font.Font(None, round(TEXT * large))  # not stored: a pygame.quit() elsewhere would invalidate it
    text = font.render(caption, True, BLACK)
    canvas.blit(text, text.get_rect(midleft=(band / 2, band / 2)))
    if out_of_view:
        text = font.render("out of view", True, BLACK)
        place = text.get_rect(midright=(large - band / 2, band / 2))
        canvas.blit(text, place)
        _paint_arrow(canvas, BLACK, (place.left - band / 2, band / 2), 0.0, 1.4 * MIN_RADIUS * large)
    _paint_legend(canvas, font, large - band / 2, scene.markers)
    return pygame.transform.smoothscale(canvas, (size, size))


def _paint_scene(canvas: pygame.Surface, view: pygame.Rect, scene: Scene) -> bool:
    """Paint grid and items; tell whether an item is out of view, where an arrow at the border represents it."""
    min_radius, scale = MIN_RADIUS * canvas.get_width(), view.height / 2 / scene.reach
    _paint_grid(canvas, view, scale, scene.arena)
    border = view.inflate(-4 * min_radius, -4 * min_radius)
    placed = []
    for item in sorted(scene.items, key=lambda item: scene.markers.index(item.marker), reverse=True):
        # a game of your own may give numpy.float32, which pygame does not accept
        x, y = view.centerx + scale * float(item.x), view.centery - scale * float(item.y)
        nearest = (min(max(x, border.left), border.right), min(max(y, border.top), border.bottom))
        placed.append((item, max(item.marker.radius * scale, min_radius), (x, y), nearest, view.collidepoint(x, y)))
    for item, radius, place, nearest, visible in placed:  # all halos first, so that no halo hides an item
        _paint_halo(canvas, place if visible else nearest, radius, item.halo)
    for item, radius, place, nearest, visible in placed:
        if visible:
            _paint_marker(canvas, item.marker, place, radius)
        else:
            angle = math.atan2(place[1] - nearest[1], place[0] - nearest[0])
            _paint_arrow(canvas, item.marker.color, nearest, angle, 1.4 * min_radius)
    return not all(visible for *_, visible in placed)


def _paint_board(canvas: pygame.Surface, view: pygame.Rect, board: Board) -> None:
    """Paint cells, halos as borders inside cells, and outlines."""
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
        if any(color):  # no lines in the black frame
            pygame.draw.rect(canvas, AXES, cells(row, column), 1)
    for row, column in zip(*board.halos.nonzero(), strict=True):
        width = round(float(board.halos[row, column]) * side * CELL_HALO)
        if width:
            pygame.draw.rect(canvas, BLACK, cells(row, column).inflate(2, 2), width + 2)
            pygame.draw.rect(canvas, AMBER, cells(row, column), width)
    for *place, color in board.outlines:
        pygame.draw.rect(canvas, color, cells(*place), 2 * SMOOTH)


def _paint_grid(canvas: pygame.Surface, view: pygame.Rect, scale: float, arena: float) -> None:
    """Paint grid lines at a distance of one unit or a power of ten of it, darker axes, and the arena's edge."""
    import pygame

    distance = scale * 10.0 ** math.ceil(math.log10(view.width / scale / 20))
    lines = math.ceil(view.width / 2 / distance)
    for line in sorted(range(-lines, lines + 1), key=abs, reverse=True):
        x, y = view.centerx + line * distance, view.centery + line * distance
        pygame.draw.line(canvas, GRID if line else AXES, (x, view.top), (x, view.bottom), SMOOTH)
        pygame.draw.line(canvas, GRID if line else AXES, (view.left, y), (view.right, y), SMOOTH)
    pygame.draw.rect(canvas, AXES, view, SMOOTH)
    if arena:
        side = 2 * arena * scale
        edge = pygame.Rect(view.centerx - side / 2, view.centery - side / 2, side, side)
        pygame.draw.rect(canvas, AXES, edge, 2 * SMOOTH)


def _paint_marker(canvas: pygame.Surface, marker: Marker, place: Point, radius: float) -> None:
    """Paint a marker."""
    import pygame

    x, y = place
    if marker.shape == "cross":
        for color, width, length in ((WHITE, 5, radius + SMOOTH), (marker.color, 2, radius)):
            pygame.draw.line(canvas, color, (x - length, y), (x + length, y), width * SMOOTH)
            pygame.draw.line(canvas, color, (x, y - length), (x, y + length), width * SMOOTH)
    elif marker.shape == "square":
        square = pygame.Rect(x - radius, y - radius, 2 * radius, 2 * radius)
        pygame.draw.rect(canvas, marker.color, square)
        pygame.draw.rect(canvas, BLACK, square, SMOOTH)
    elif marker.shape == "frame":
        pygame.draw.rect(canvas, marker.color, (x - radius, y - radius, 2 * radius, 2 * radius), 2 * SMOOTH)
    elif marker.shape == "box":
        for left, color in ((x - 1.25 * radius, marker.color), (x, marker.inner[0][1])):
            pygame.draw.rect(canvas, color, (left, y - radius, 1.25 * radius, 2 * radius))
        pygame.draw.rect(canvas, BLACK, (x - 1.25 * radius, y - radius, 2.5 * radius, 2 * radius), SMOOTH)
    elif marker.shape == "ring":
        pygame.draw.circle(canvas, marker.color, place, radius, 2 * SMOOTH)
    elif marker.shape == "star":
        pygame.draw.polygon(canvas, BLACK, _star(place, radius + 2 * SMOOTH, 9))
        pygame.draw.polygon(canvas, marker.color, _star(place, radius, 9))
    elif marker.shape == "diamond":
        corner = 1.25 * radius  # about the area of the disc
        for color, size in ((BLACK, corner + 2 * SMOOTH), (marker.color, corner)):
            pygame.draw.polygon(canvas, color, [(x - size, y), (x, y - size), (x + size, y), (x, y + size)])
    else:
        pygame.draw.circle(canvas, WHITE, place, radius + SMOOTH)  # separates overlapping items
        for fraction, color in ((1.0, marker.color), *marker.inner):
            pygame.draw.circle(canvas, color, place, fraction * radius)


def _star(place: Point, radius: float, points: int) -> list[Point]:
    """Return the corners of a star."""
    polar = [(math.pi * corner / points, radius if corner % 2 else 0.6 * radius) for corner in range(2 * points)]
    return [(place[0] + r * math.cos(angle), place[1] + r * math.sin(angle)) for angle, r in polar]


def _paint_arrow(canvas: pygame.Surface, color: Color, place: Point, angle: float, radius: float) -> None:
    """Paint a triangle that points in the direction of an angle."""
    import pygame

    corners = [angle + turn for turn in (0.0, 2.4, -2.4)]
    tip = [(place[0] + radius * math.cos(a), place[1] + radius * math.sin(a)) for a in corners]
    pygame.draw.polygon(canvas, color, tip)


def _paint_halo(canvas: pygame.Surface, place: Point, radius: float, strength: float) -> None:
    """Paint a glow whose width and density grow with its strength."""
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


def _paint_legend(canvas: pygame.Surface, font: pygame.font.Font, y: float, markers: tuple[Marker, ...]) -> None:
    """Paint an icon and a label for each marker, in a centred row at height `y`."""
    width = canvas.get_width()
    icon = BAND / 2 * width
    labels = [font.render(marker.name, True, BLACK) for marker in markers]
    filled = sum(1.3 * icon + label.get_width() for label in labels)
    gap = min(icon, (0.98 * width - filled) / max(len(labels) - 1, 1))  # a long legend has narrow gaps
    x = (width - filled - gap * (len(labels) - 1)) / 2
    for marker, label in zip(markers, labels, strict=True):
        if marker.shape == "halo":
            _paint_halo(canvas, (x + icon / 2, y), 1.0, 0.5)
        else:
            _paint_marker(canvas, marker, (x + icon / 2, y), MIN_RADIUS * width)
        canvas.blit(label, label.get_rect(midleft=(x + 1.3 * icon, y)))
        x += 1.3 * icon + label.get_width() + gap


def _halos(weights: Any, shape: tuple[int, ...]) -> Array:
    """Divide weights (N,) or (w, w) by the largest: strengths of halos (N,); zeros without weights."""
    count = math.prod(shape)
    try:
        array = np.zeros(shape) if weights is None else as_numpy(weights).astype(np.float64)
    except ValueError:  # no numbers, or a ragged list
        array = np.zeros(())
    if array.shape not in (shape, (count,)) or not (np.isfinite(array) & (array >= 0)).all():
        expected = f"expected {count} finite numbers, one for each token, none negative"
        raise ValueError(one_line(f"weights={weights!r}: {expected}"))
    strengths: Array = array.ravel() / (array.max() or 1.0)
    return strengths
