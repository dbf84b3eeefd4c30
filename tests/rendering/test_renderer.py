"""The pictures of a world: what they show, where they open a window, and what they leave alone."""

import copy
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from noisy_envs.games.particles import ABSENT, State
from noisy_envs.games.simple_centroid import NOISE, SIGNAL, SimpleCentroid
from noisy_envs.games.simple_tag import SimpleTag
from noisy_envs.randomness import episode_key, uniforms
from noisy_envs.rendering import renderer
from noisy_envs.rendering.renderer import Renderer

SIZE = 300
BAND = round(renderer.BAND * SIZE)
GAMES = {
    "1-3-4": SimpleCentroid(),
    "1-31-0": SimpleCentroid(num_signal=31, num_noise=0),
    "1-3-28": SimpleCentroid(num_noise=28),
    "3-(1,5)-(0,28)": SimpleCentroid(num_agents=3, num_signal=(1, 5), num_noise=(0, 28)),
    "wide": SimpleCentroid(spread=500.0),
    "narrow": SimpleCentroid(spread=0.05, noise_offset=0.0),
}
TAGS = {
    "1v3v28": SimpleTag(num_obstacles=28),
    "solid": SimpleTag(num_predators=3, num_prey=2, num_obstacles=(0, 6), collidable_obstacles=True),
    "3v2v6": SimpleTag(num_predators=3, num_prey=2, num_obstacles=6),  # the longest legend
}
GAME = GAMES["1-3-4"]
each_game_class = pytest.mark.parametrize("game", GAMES.values(), ids=GAMES)
each_tag = pytest.mark.parametrize("game", TAGS.values(), ids=TAGS)


def start(game: SimpleCentroid | SimpleTag, seed: int = 0) -> State:
    """Return the first world of an episode, without the batch axis."""
    key = episode_key(np.array([seed]), np.array([0]))
    batch = game.initial(uniforms(key, np.array([0]), game.num_reset_uniforms))
    return State(*(part[0] for part in batch))


def place_agent(state: State, x: float, y: float) -> State:
    """Return a copy of a world whose first agent stands elsewhere."""
    mover = state.mover.copy()
    mover[0, :2] = x, y
    return state._replace(mover=mover)


def picture(game: SimpleCentroid | SimpleTag, state: State, weights: object = None, size: int = SIZE) -> np.ndarray:
    """Draw one array with a new renderer."""
    drawn = Renderer(game, "rgb_array", size=size).draw(state, 0, 0.0, weights)
    assert drawn is not None
    return drawn


def close_to(frame: np.ndarray, color: tuple[int, int, int], far: int = 40) -> np.ndarray:
    """Tell which pixels between the caption and the legend have nearly a color, bool (H, W)."""
    found = np.abs(frame.astype(int) - color).max(axis=-1) < far
    band = round(renderer.BAND * len(frame)) + 1
    found[:band] = found[-band:] = False
    return found


def run_clean(code: str, expect: int = 0, driver: str | None = None) -> str:
    """Run code in a new interpreter with warnings as errors and no display; return what it prints."""
    dropped = ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER", "PYGAME_HIDE_SUPPORT_PROMPT")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    head = """
    import sys
    sys.path[:0] = ["tests", "tests/rendering", "."]
    from test_renderer import GAME, TAGS, Renderer, start
    """
    script = textwrap.dedent(head) + textwrap.dedent(code)
    command = [sys.executable, "-W", "error", "-c", script]
    root = str(Path(__file__).parents[2])
    env = kept | ({"SDL_VIDEODRIVER": driver} if driver else {})
    ran = subprocess.run(command, check=False, env=env, cwd=root, capture_output=True, text=True, timeout=60)
    assert ran.returncode == expect, ran.stderr
    return ran.stdout


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give SDL a display that nobody sees, and leave none behind."""
    import pygame

    pygame.quit()
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    yield
    pygame.quit()


def press_close(renderer: Renderer) -> None:
    """Do what a person does who closes the window."""
    import pygame

    assert renderer._window.opened is not None
    pygame.event.post(pygame.event.Event(pygame.WINDOWCLOSE, window=renderer._window.opened[0]))


def is_open(renderer: Renderer) -> bool:
    """Tell whether the renderer has a window that lives."""
    return renderer._window.opened is not None and renderer._window.opened[0].get_surface() is not None


# pictures


@each_game_class
@pytest.mark.parametrize("size", [100, 333, 600])
def test_array_is_uint8_and_shows_something_before_any_step(game: SimpleCentroid, size: int) -> None:
    frame = picture(game, start(game), size=size)
    assert frame.dtype == np.uint8 and frame.shape == (size, size, 3) and frame.flags.writeable
    assert len(np.unique(frame.reshape(-1, 3), axis=0)) > 10
    for kind in (renderer.AGENT, renderer.SIGNAL):
        assert close_to(frame, kind.color, 80).any()
    red, green, blue = np.moveaxis(frame.astype(int), -1, 0)
    assert (red - np.maximum(green, blue) > 60).any() == bool((start(game).role == NOISE).any())


def test_the_same_world_gives_the_same_picture_and_a_new_array() -> None:
    renderer = Renderer(GAME, "rgb_array", size=SIZE)
    first, second = (renderer.draw(start(GAME), 0, 0.0) for _ in range(2))
    assert first is not None and second is not None
    np.testing.assert_array_equal(first, second)
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(picture(GAME, start(GAME)), first)


def test_picture_changes_with_agent_step_and_return() -> None:
    state, renderer = start(GAME), Renderer(GAME, "rgb_array", size=SIZE)
    frames = [
        renderer.draw(state, 0, 0.0),
        renderer.draw(place_agent(state, 0.3, -0.3), 0, 0.0),
        renderer.draw(state, 1, 0.0),
        renderer.draw(state, 0, 0.001),
    ]
    assert len({frame.tobytes() for frame in frames if frame is not None}) == 4


def test_a_return_that_rounds_to_zero_has_no_sign() -> None:
    renderer, state = Renderer(GAME, "rgb_array", size=SIZE), start(GAME)
    np.testing.assert_array_equal(renderer.draw(state, 0, -0.0001), renderer.draw(state, 0, 0.0))


def test_agent_is_drawn_where_it_is() -> None:
    """Up is up, right is right, a unit is a unit, and the radius is true to scale."""
    size = 600
    game = SimpleCentroid(num_signal=1, num_noise=1, spread=0.2, noise_spread=0.2, noise_offset=0.0)
    scale = (size / 2 - round(renderer.BAND * size)) / (game.start_reach + renderer.MARGIN)
    frame = picture(game, place_agent(start(game), 0.45, 0.35), size=size)
    rows, columns = np.nonzero(close_to(frame, renderer.GREEN))
    assert columns.mean() == pytest.approx(size / 2 + 0.45 * scale, abs=1.0)
    assert rows.mean() == pytest.approx(size / 2 - 0.35 * scale, abs=1.0)
    assert np.ptp(columns) / 2 == pytest.approx(renderer.AGENT.radius * scale, abs=1.5)


def test_entities_stay_legible_in_a_wide_world() -> None:
    game = GAMES["wide"]
    columns = np.nonzero(close_to(picture(game, start(game), size=600), renderer.GREEN))[1]
    assert np.ptp(columns) + 1 >= 10


def test_cross_marks_the_centroid_of_the_present_signal() -> None:
    game = SimpleCentroid(num_signal=(1, 4), num_noise=0)
    state = next(s for s in (start(game, seed) for seed in range(50)) if (s.role == SIGNAL).sum() == 2)
    scene = renderer.simple_centroid_scene(game, state, np.zeros(game.num_entities))
    cross = [item for item in scene.items if item.marker is renderer.CENTROID]
    middle = (state.mover[1, :2] + state.mover[2, :2]) / 2
    assert [(item.x, item.y) for item in cross] == [pytest.approx(tuple(middle), abs=1e-6)]


def test_kinds_differ_in_lightness() -> None:
    """A grey picture still tells the kinds apart: agent, other agents, signal, noise."""
    kinds = (renderer.AGENT, renderer.OTHER, renderer.SIGNAL, renderer.NOISE)
    light = sorted(float(np.dot(kind.color, (0.299, 0.587, 0.114))) for kind in kinds)
    assert min(np.diff(light)) > 20


@each_game_class
def test_every_start_is_well_inside(game: SimpleCentroid) -> None:
    for seed in range(50):
        state = start(game, seed)
        scene = renderer.simple_centroid_scene(game, state, np.zeros(game.num_entities))
        assert max(abs(place) for item in scene.items for place in (item.x, item.y)) <= scene.reach - 0.49


def test_drawing_changes_no_state() -> None:
    state = start(GAME)
    before = copy.deepcopy(state)
    for part in state:
        part.flags.writeable = False
    picture(GAME, state, np.ones(8))
    for part, kept in zip(state, before, strict=True):
        np.testing.assert_array_equal(part, kept)


# SimpleTag


def tag_world(game: SimpleTag, *places: tuple[float, float]) -> State:
    """Return a world of resting bodies: predators, prey, obstacles."""
    position = np.array([places], dtype=np.float32)
    state = game.arrange(position, np.zeros_like(position))
    return State(*(part[0] for part in state))


def drawn_kinds(game: SimpleTag, state: State) -> list[str]:
    """Return the kinds of what is shown, in the order of the tokens, catches last."""
    return [item.marker.name for item in renderer.simple_tag_scene(game, state, np.zeros(game.num_entities)).items]


def spot(game: SimpleTag, x: float, y: float, size: int = 600) -> tuple[int, int]:
    """Return row and column of the pixel that shows a place."""
    scale = (size / 2 - round(renderer.BAND * size)) / (game.start_reach + renderer.MARGIN)
    return round(size / 2 - y * scale), round(size / 2 + x * scale)


APART = ((-0.5, 0.0), (0.5, 0.0), (0.5, 0.5), (0.0, -0.5))  # a predator, two prey, an obstacle


def test_tag_shows_each_kind_where_it_is() -> None:
    size, game = 600, SimpleTag(num_prey=2, num_obstacles=1, collidable_obstacles=True)
    scale = (size / 2 - round(renderer.BAND * size)) / (game.start_reach + renderer.MARGIN)
    frame = picture(game, tag_world(game, *APART), size=size)
    for color, x, y in (
        (renderer.DARK_RED, -0.5, 0.0),
        (renderer.BRIGHT_GREEN, 0.5, 0.25),
        (renderer.BLACK, 0.0, -0.5),
    ):
        found = close_to(frame, color)
        if color == renderer.BLACK:  # outlines are black, too
            found &= np.hypot(*(np.indices(found.shape) - size / 2 - np.array([0.5 * scale, 0])[:, None, None])) < 30
        rows, columns = np.nonzero(found)
        assert columns.mean() == pytest.approx(size / 2 + x * scale, abs=1.5)
        assert rows.mean() == pytest.approx(size / 2 - y * scale, abs=1.5)


@pytest.mark.parametrize(
    ("options", "hollow"),
    [
        ({"collidable_obstacles": True}, False),
        ({}, True),
        ({"collidable_obstacles": True, "collidable_predators": False, "collidable_prey": False}, True),
    ],
)
def test_obstacles_that_touch_nobody_are_hollow(options: dict[str, bool], hollow: bool) -> None:
    game = SimpleTag(num_prey=2, num_obstacles=1, **options)
    frame = picture(game, tag_world(game, *APART), size=600)
    scale = (300 - round(renderer.BAND * 600)) / (game.start_reach + renderer.MARGIN)
    middle = frame[round(300 + 0.5 * scale) + 8, 308]  # beside the lines of the grid
    assert middle.min() > 200 if hollow else middle.max() < 60
    rim = frame[round(300 + 0.5 * scale), round(300 + 0.2 * scale) - 3 : round(300 + 0.2 * scale) + 3]
    assert rim.min() < 120


@pytest.mark.parametrize("solid", [False, True])
def test_only_hollow_obstacles_show_what_lies_beneath(solid: bool) -> None:
    game = SimpleTag(num_obstacles=1, collidable_obstacles=solid)
    there, elsewhere = (
        picture(game, tag_world(game, (-1, 1), (1, 1), (1, 1), (1, 1), place), size=600)
        for place in ((0, -1), (-1, -1))
    )
    row, column = spot(game, 0.0, -1.0)
    inside = slice(row - 12, row + 13), slice(column - 12, column + 13)
    assert elsewhere[inside].min() < 220  # lines of the grid cross there
    assert (there[inside] == elsewhere[inside]).all() != solid


@pytest.mark.parametrize("solid", [False, True])
def test_agents_lie_on_obstacles_and_on_the_star(solid: bool) -> None:
    game = SimpleTag(num_prey=1, num_obstacles=1, collidable_obstacles=solid)
    frame = picture(game, tag_world(game, (0.3, 0.3), (0.42, 0.3), (0.36, 0.3)), size=600)
    assert close_to(frame, renderer.DARK_RED)[spot(game, 0.3, 0.3)]
    assert close_to(frame, renderer.BRIGHT_GREEN)[spot(game, 0.42, 0.3)]
    assert close_to(frame, renderer.YELLOW)[spot(game, 0.42, 0.4)]


def test_the_learner_stands_out_among_predators() -> None:
    game = SimpleTag(num_predators=2, num_prey=1, num_obstacles=0)
    frame = picture(game, tag_world(game, (-0.5, 0.5), (0.5, 0.5), (0.5, -0.5)), size=600)
    assert close_to(frame, renderer.DARK_RED)[spot(game, -0.5, 0.5)]
    assert close_to(frame, renderer.WHITE)[spot(game, 0.5, 0.5)]


def test_bodies_of_tag_are_true_to_scale() -> None:
    size, game = 1000, SimpleTag(num_prey=1, num_obstacles=0, start="mpe")
    frame = picture(game, tag_world(game, (-0.5, 0.5), (0.5, 0.5)), size=size)
    scale = (size / 2 - round(renderer.BAND * size)) / (game.start_reach + renderer.MARGIN)
    for color, half in ((renderer.DARK_RED, 0.075), (renderer.BRIGHT_GREEN, 1.25 * 0.05)):
        columns = np.nonzero(close_to(frame, color))[1]
        assert np.ptp(columns) / 2 == pytest.approx(half * scale, abs=1.5)


@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_the_arena_is_outlined_beyond_which_prey_pay(side: float) -> None:
    game = SimpleTag(num_prey=1, num_obstacles=0)
    frame = picture(game, tag_world(game, (0, 0), (0.5, 0)), size=600)
    for along in (0.6, 1.4):  # the edge, and beyond it a line of the grid, which is lighter
        for row, column in (spot(game, side, along), spot(game, along, side)):
            darkest = frame[row - 2 : row + 3, column - 2 : column + 3].min()
            assert 200 < darkest < 215 if along < 1 else 230 < darkest < 255


@pytest.mark.parametrize(("gap", "caught"), [(0.124, 1), (0.126, 0)])
def test_a_catch_flashes(gap: float, caught: int) -> None:
    game = SimpleTag(num_prey=2, num_obstacles=0)
    state = tag_world(game, (0, 0), (gap, 0), (0.5, 0.5))
    assert drawn_kinds(game, state) == ["predator", "prey", "prey", *["catch"] * caught]
    assert close_to(picture(game, state, size=600), renderer.YELLOW).any() == bool(caught)
    through = SimpleTag(num_prey=2, num_obstacles=0, collidable_prey=False)
    assert "catch" not in drawn_kinds(through, state)


def test_the_star_marks_the_prey_that_anyone_touches() -> None:
    game = SimpleTag(num_predators=2, num_prey=3, num_obstacles=0)
    state = tag_world(game, (-0.9, 0), (0.5, 0.5), (0.9, 0), (0.9, 0.9), (0.6, 0.5))
    scene = renderer.simple_tag_scene(game, state, np.zeros(game.num_entities))
    stars = [(item.x, item.y) for item in scene.items if item.marker is renderer.CATCH_FLASH]
    assert stars == [pytest.approx((0.6, 0.5))]


def test_tag_shows_who_learns_and_nobody_absent() -> None:
    game = TAGS["solid"]
    position = np.zeros((1, game.num_entities, 2), np.float32)
    state = State(*(part[0] for part in game.arrange(position, position, 2)))
    kinds = drawn_kinds(game, state)
    assert kinds == ["predator", *["obstacle"] * 2, *["other predators"] * 2, *["prey"] * 2, *["catch"] * 2]
    legend = renderer.simple_tag_scene(game, state, np.zeros(game.num_entities)).markers
    assert [kind.name for kind in legend] == ["predator", "other predators", "prey", "catch", "obstacle"]


def test_kinds_of_tag_differ_in_lightness_and_shape() -> None:
    kinds = (renderer.PREDATOR, renderer.PREY, renderer.SOLID_OBSTACLE, renderer.NOISE_OBSTACLE, renderer.CATCH_FLASH)
    light = {kind.name: float(np.dot(kind.color, (0.299, 0.587, 0.114))) for kind in kinds}
    light[renderer.NOISE_OBSTACLE.name] = 255.0  # hollow
    assert min(np.diff(sorted(light.values()))) > 40
    assert (
        len({kind.shape for kind in (renderer.PREDATOR, renderer.PREY, renderer.CATCH_FLASH, renderer.NOISE_OBSTACLE)})
        == 4
    )


@each_tag
@pytest.mark.parametrize("size", [100, 333, 600, 1000])
def test_picture_of_tag_shows_who_plays_and_its_legend_fits(game: SimpleTag, size: int) -> None:
    frame = picture(game, start(game), np.ones(game.num_entities), size=size)
    assert frame.dtype == np.uint8 and frame.shape == (size, size, 3)
    for kind in (renderer.PREDATOR, renderer.PREY):
        assert close_to(frame, kind.color, 80).any()
    legend = frame[-round(renderer.BAND * size) + 1 :]
    assert (legend != 255).any()
    margin = max(1, size // 200)
    assert (legend[:, :margin] == 255).all() and (legend[:, -margin:] == 255).all()


@each_tag
def test_starts_of_tag_are_well_inside(game: SimpleTag) -> None:
    for seed in range(50):
        scene = renderer.simple_tag_scene(game, start(game, seed), np.zeros(game.num_entities))
        assert max(abs(place) for item in scene.items for place in (item.x, item.y)) <= scene.reach - 0.49


# Padding


def test_padding_is_not_drawn() -> None:
    game = GAMES["3-(1,5)-(0,28)"]
    state = start(game, 1)
    absent = state.role == ABSENT
    assert 0 < absent.sum() < len(absent)
    moved = State(state.mover.copy(), state.landmark.copy())
    moved.mover[absent[: game.num_movers], :4] = 1.0
    moved.landmark[absent[game.num_movers :], :4] = -1.0
    weights = np.linspace(0.0, 1.0, game.num_entities)
    np.testing.assert_array_equal(picture(game, state, weights), picture(game, moved, weights))
    scene = renderer.simple_centroid_scene(game, state, weights)
    assert len(scene.items) == (~absent).sum() + 1  # and the centroid


def test_legend_names_only_kinds_that_the_game_has() -> None:
    names = {}
    for name, game in GAMES.items():
        scene = renderer.simple_centroid_scene(game, start(game), np.zeros(game.num_entities))
        names[name] = [kind.name for kind in scene.markers]
    assert names["1-3-4"] == ["agent", "signal", "centroid", "noise"]
    assert names["1-31-0"] == ["agent", "signal", "centroid"]
    assert names["3-(1,5)-(0,28)"] == ["agent", "other agents", "signal", "centroid", "noise"]
    lonely = SimpleTag(num_obstacles=0)
    scene = renderer.simple_tag_scene(lonely, start(lonely), np.zeros(lonely.num_entities))
    assert [kind.name for kind in scene.markers] == ["predator", "prey", "catch"]


def test_an_arrow_out_of_view_is_explained_where_there_is_one() -> None:
    state = start(GAME)
    inside, outside = (picture(GAME, place_agent(state, x, 0.0)) for x in (0.0, 900.0))
    band, half = round(renderer.BAND * SIZE), SIZE // 2
    assert (inside[:band, half:] == 255).all() and (outside[:band, half:] < 100).any()
    np.testing.assert_array_equal(inside[:band, :half], outside[:band, :half])


# the camera


def test_camera_never_moves() -> None:
    state = start(GAME)
    with_agent, far = (picture(GAME, place_agent(state, *place)) for place in ((0.0, 0.0), (900.0, -40.0)))
    assert close_to(with_agent, renderer.RED).sum() > 10
    np.testing.assert_array_equal(close_to(with_agent, renderer.RED), close_to(far, renderer.RED))
    np.testing.assert_array_equal(close_to(with_agent, renderer.BLUE), close_to(far, renderer.BLUE))


def test_camera_of_tag_never_moves() -> None:
    game = SimpleTag(num_prey=2, num_obstacles=1)
    state = tag_world(game, *APART)
    near, moved, far = (
        picture(game, place_agent(state, *place), size=600) for place in ((-0.5, 0), (-0.9, 0.4), (9e2, 0))
    )
    assert close_to(near, renderer.BRIGHT_GREEN).sum() > 10
    for frame in (moved, far):
        assert (frame != near).any()
        for color in (renderer.BRIGHT_GREEN, renderer.BLACK):
            np.testing.assert_array_equal(close_to(frame, color), close_to(near, color))
    assert np.nonzero(close_to(far, renderer.DARK_RED))[1].min() > 550  # an arrow at the right border


@pytest.mark.parametrize(("x", "y"), [(50, 0), (-50, 0), (0, 50), (0, -50), (50, 50), (-1e6, 1e6)])
def test_agent_out_of_view_is_an_arrow_at_the_border(x: float, y: float) -> None:
    frame = picture(GAME, place_agent(start(GAME), x, y))
    rows, columns = np.nonzero(close_to(frame, renderer.GREEN))
    assert 5 < len(rows) < 100
    if x:
        assert np.sign(x) * (columns.mean() - SIZE / 2) > 0.45 * SIZE
    if y:
        assert np.sign(y) * (SIZE / 2 - rows.mean()) > 0.4 * SIZE


# Halos


def glow(game: SimpleCentroid | SimpleTag, state: State, weights: object) -> np.ndarray:
    """Return how much blue the halos take from each pixel between caption and legend, (H, W)."""
    plain, haloed = (picture(game, state, given)[..., 2].astype(int) for given in (None, weights))
    taken = plain - haloed
    taken[:BAND] = taken[-BAND:] = 0
    return taken


@pytest.mark.parametrize("name", ["1-3-4", "1-3-28", "3-(1,5)-(0,28)", *TAGS])
def test_halo_surrounds_the_entity_of_its_token(name: str) -> None:
    """Weights follow the rows of the observation of agent 0."""
    game = (GAMES | TAGS)[name]
    state = start(game, 2)
    tokens = game.observe(State(*(part[None] for part in state)))[0, 0]
    scale = (SIZE / 2 - BAND) / (game.start_reach + renderer.MARGIN)
    for token in np.nonzero(tokens[:, -1] != ABSENT)[0]:
        x, y = tokens[token, :2] * game.observation_scale + state.mover[0, :2]
        rows, columns = np.nonzero(glow(game, state, np.eye(game.num_entities)[token]) > 20)
        assert (columns.min() + columns.max()) / 2 == pytest.approx(SIZE / 2 + x * scale, abs=2.5)
        assert (rows.min() + rows.max()) / 2 == pytest.approx(SIZE / 2 - y * scale, abs=2.5)


def test_halo_grows_with_the_weight_relative_to_the_largest() -> None:
    game = SimpleCentroid(num_signal=1, num_noise=1)
    mover = np.array([[-1.5, 0, 0, 0, 1], [1.5, 0, 0, 0, 2]], dtype=np.float32)
    state = State(mover, np.array([[0, 1.5, 0, 0, 3]], dtype=np.float32))
    sums, widths = [], []
    for share in (0.0, 0.25, 0.5, 1.0):
        left = glow(game, state, [share, 0.0, 1.0])[:, : SIZE // 2]
        sums.append(left.sum())
        widths.append((left > 0).any(axis=0).sum())
    assert np.all(np.diff(sums) > 0) and np.all(np.diff(widths) > 0) and sums[0] == 0
    np.testing.assert_array_equal(picture(game, state, [1, 2, 4]), picture(game, state, [0.25, 0.5, 1.0]))
    assert (picture(game, state, [1, 1, 1]) != picture(game, state)).any()


def test_weights_of_zero_draw_no_halo() -> None:
    assert not glow(GAME, start(GAME), np.zeros(8)).any()


@pytest.mark.parametrize(
    "weights",
    [np.ones(7), np.ones((8, 1)), 1.0, -np.eye(8)[0], np.full(8, np.nan), np.full(8, np.inf)],
    ids=["few", "matrix", "scalar", "negative", "nan", "inf"],
)
def test_impossible_weights_are_refused(weights: object) -> None:
    with pytest.raises(ValueError, match=r"^weights=.*: expected 8 finite numbers"):
        picture(GAME, start(GAME), weights)


# Options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "ansi"}, "mode='ansi': expected 'human' or 'rgb_array'"),
        ({"fps": 0}, "fps=0: expected at least 1"),
        ({"size": 99}, "size=99: expected at least 100"),
    ],
)
def test_impossible_options_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Renderer(GAME, **({"mode": "rgb_array"} | options))


def test_an_unknown_game_is_refused() -> None:
    class Other:
        name = "chess"

    with pytest.raises(
        ValueError, match=r"game='chess': expected simple_centroid, simple_tag, box_world or a game with"
    ):
        Renderer(Other(), "rgb_array")


# what is imported, what is opened


def test_pygame_comes_with_the_first_drawing_and_no_display_or_mixer_ever() -> None:
    printed = run_clean("""
    for game in (GAME, *TAGS.values()):
        renderer = Renderer(game, "rgb_array", size=100)
        assert game is not GAME or "pygame" not in sys.modules
        frame = renderer.draw(start(game), 0, 0.0)
        import pygame
        assert not pygame.display.get_init() and pygame.mixer.get_init() is None
        assert frame.std() > 0
        renderer.close()
    """)
    assert printed == ""  # no greeting: importing gymnasium turns it off


def test_human_mode_imports_late_and_starts_no_mixer() -> None:
    run_clean(
        """
        renderer = Renderer(GAME, "human", size=100)
        assert "pygame" not in sys.modules
        assert renderer.draw(start(GAME), 0, 0.0) is None
        import pygame
        assert pygame.display.get_init() and pygame.mixer.get_init() is None
        renderer.close()
        """,
        driver="dummy",
    )


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM")
def test_a_run_with_a_window_obeys_kill() -> None:
    code = """
    import os, signal, time
    Renderer(GAME, "human", size=100).draw(start(GAME), 0, 0.0)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1)
    """
    run_clean(code, expect=-signal.SIGTERM, driver="dummy")


# pace


def test_human_is_paced_and_array_is_not(screen: None) -> None:
    state, times = start(GAME), {}
    for mode in ("human", "rgb_array"):
        renderer = Renderer(GAME, mode, fps=10, size=100)
        renderer.draw(state, 0, 0.0)
        began = time.perf_counter()
        for step in range(1, 4):
            renderer.draw(state, step, 0.0)
        times[mode] = time.perf_counter() - began
        renderer.close()
    assert 0.25 < times["human"] < 0.6
    assert times["rgb_array"] < 0.15


# windows


def test_window_shows_the_picture(screen: None) -> None:
    import pygame

    renderer = Renderer(GAME, "human", fps=100, size=SIZE)
    assert renderer.draw(start(GAME), 0, 0.0) is None
    assert renderer._window.opened is not None
    shown = pygame.surfarray.array3d(renderer._window.opened[0].get_surface()).swapaxes(0, 1)
    np.testing.assert_array_equal(shown, picture(GAME, start(GAME)))
    renderer.close()


@pytest.mark.parametrize("mode", ["human", "rgb_array"])
def test_close_is_idempotent_and_drawing_again_works(screen: None, mode: str) -> None:
    renderer = Renderer(GAME, mode, fps=100, size=100)
    renderer.close()
    for _ in range(2):
        renderer.draw(start(GAME), 0, 0.0)
        assert is_open(renderer) == (mode == "human")
        renderer.close()
        renderer.close()
        assert not is_open(renderer)


def test_each_renderer_closes_only_its_own_window(screen: None) -> None:
    import pygame

    users = pygame.display.set_mode((50, 50))
    first, second = (Renderer(GAME, "human", fps=100, size=100) for _ in range(2))
    for window in (first, second):
        window.draw(start(GAME), 0, 0.0)
    first.close()
    assert is_open(second) and not is_open(first)
    second.draw(start(GAME), 1, 0.0)
    second.close()
    assert pygame.display.get_init() and pygame.display.get_surface() is users
    users.fill("red")
    pygame.display.flip()


def test_a_window_that_a_person_closed_stays_closed(screen: None) -> None:
    first, second = (Renderer(GAME, "human", fps=100, size=100) for _ in range(2))
    for window in (first, second):
        window.draw(start(GAME), 0, 0.0)
    press_close(second)
    first.draw(start(GAME), 1, 0.0)  # sees an event that is not its own
    assert is_open(first) and is_open(second)
    second.draw(start(GAME), 1, 0.0)
    assert is_open(first) and not is_open(second)
    for _ in range(2):
        assert second.draw(start(GAME), 2, 0.0) is None and not is_open(second)
    first.draw(start(GAME), 2, 0.0)
    second.close()
    second.draw(start(GAME), 3, 0.0)
    assert is_open(second)
    first.close()
    second.close()


def test_a_program_hears_that_its_window_was_closed(screen: None) -> None:
    import pygame

    renderer = Renderer(GAME, "human", fps=100, size=100)
    renderer.draw(start(GAME), 0, 0.0)
    press_close(renderer)
    renderer.draw(start(GAME), 1, 0.0)
    assert len(pygame.event.get(pygame.WINDOWCLOSE)) == 1
    renderer.close()


def test_other_events_are_left_to_the_program(screen: None) -> None:
    import pygame

    renderer = Renderer(GAME, "human", fps=100, size=100)
    renderer.draw(start(GAME), 0, 0.0)
    pygame.event.clear()
    pygame.event.post(pygame.event.Event(pygame.KEYDOWN, key=pygame.K_LEFT))
    pygame.event.post(pygame.event.Event(pygame.MOUSEMOTION, pos=(1, 1), rel=(0, 0), buttons=(0, 0, 0)))
    renderer.draw(start(GAME), 1, 0.0)
    assert {event.type for event in pygame.event.get()} >= {pygame.KEYDOWN, pygame.MOUSEMOTION}
    renderer.close()


def test_another_programs_quit_does_no_harm(screen: None) -> None:
    """Gymnasium's own games call pygame.quit() when they close."""
    import pygame

    human, array = (Renderer(GAME, mode, fps=100, size=100) for mode in ("human", "rgb_array"))
    before = array.draw(start(GAME), 0, 0.0)
    human.draw(start(GAME), 0, 0.0)
    pygame.quit()
    np.testing.assert_array_equal(array.draw(start(GAME), 0, 0.0), before)
    assert not pygame.display.get_init()
    human.draw(start(GAME), 1, 0.0)
    assert is_open(human)
    pygame.quit()
    human.close()


# copies


@pytest.mark.parametrize("mode", ["human", "rgb_array"])
@pytest.mark.parametrize("clone", [copy.deepcopy, copy.copy, lambda r: pickle.loads(pickle.dumps(r))])
def test_a_copy_begins_afresh(screen: None, mode: str, clone: Callable[[Renderer], Renderer]) -> None:
    renderer = Renderer(GAME, mode, fps=77, size=120)
    shown = renderer.draw(start(GAME), 0, 0.0)
    other = clone(renderer)
    assert (other.game, other.mode, other.fps, other.size) == (GAME, mode, 77, 120)
    assert not is_open(other)
    other.close()
    assert is_open(renderer) == (mode == "human")
    again = other.draw(start(GAME), 0, 0.0)
    if shown is not None:
        np.testing.assert_array_equal(again, shown)
    renderer.close()
    other.close()
