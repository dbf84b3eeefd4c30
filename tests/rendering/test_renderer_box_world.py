"""Pictures of BoxWorld: each cell has its colour, held key, gem, outlines and halos are where they belong."""

import gymnasium
import numpy as np
import pytest
from helpers import make

import noisy_envs  # noqa: F401  registers the ids
from noisy_envs.games.box_world import PALETTE, BoxWorld, State
from noisy_envs.rendering import renderer
from noisy_envs.rendering.renderer import Renderer

SIZE = 600
KINDS = {
    "entities": BoxWorld(),
    "pixels": BoxWorld(observation="pixels"),
    "rgb": BoxWorld(observation="rgb"),
    "sizes": BoxWorld(observation="pixels", size=(5, 9)),
    "large": BoxWorld(size=20, goal_length=4, num_distractors=3, distractor_length=2),
}
each_kind = pytest.mark.parametrize("game", KINDS.values(), ids=KINDS)
DRAWN = """
#########
#@......#
#.a.....#
#.......#
#..*A...#
#....bA.#
#.......#
#.......#
#########
"""


def world(game: BoxWorld, **given: object) -> State:
    """Return a world without the batch axis."""
    return State(*(field[0] for field in game.validate_state(given, ())))


def frame(game: BoxWorld, state: State, weights: object = None, size: int = SIZE) -> np.ndarray:
    """Draw one array."""
    drawn = Renderer(game, "rgb_array", size=size).draw(state, 3, 1.0, weights)
    assert drawn is not None and drawn.dtype == np.uint8 and drawn.shape == (size, size, 3)
    return drawn


def cells(game: BoxWorld, drawn: np.ndarray, across: float = 0.5, down: float = 0.5) -> np.ndarray:
    """Return the colours (w, w, 3) that cells have at a place within them, by default the middle."""
    band = round(renderer.BAND * len(drawn))
    height = len(drawn) - 2 * band
    steps = np.arange(game.width) / game.width * height
    rows = band + steps + down * height / game.width
    columns = (len(drawn) - height) / 2 + steps + across * height / game.width
    return drawn[rows.astype(int)[:, None], columns.astype(int)].astype(int)


@each_kind
@pytest.mark.parametrize("level", [0, 1])
def test_cells_have_the_colours_of_the_picture(game, level):
    state = world(game, level=level)
    expected = PALETTE[game.picture(State(*(field[None] for field in state)))[0]].reshape(game.width, game.width, 3)
    np.testing.assert_allclose(cells(game, frame(game, state)), expected, atol=2)


def test_held_key_and_taken_gem_are_shown_at_the_top_left():
    game = BoxWorld()
    held = DRAWN.replace("a", ".").replace("#", "c", 1)
    for drawing, colour in ((DRAWN, (0, 0, 0)), (held, PALETTE[2]), (held.replace("*A", "..").replace("c", "*"), 255)):
        np.testing.assert_allclose(cells(game, frame(game, world(game, text=drawing)))[0, 0], colour, atol=2)


def test_gem_is_outlined_and_empty_cells_are_not():
    game = BoxWorld()
    drawn = frame(game, world(game, text=DRAWN))
    edge = cells(game, drawn, across=0.5, down=0.02).max(axis=-1)
    assert edge[4, 3] < 60 and edge[4, 4] < 60  # the gem's box, content and lock
    assert edge[5, 5] < 60 and edge[6, 3] > 180 and edge[1, 1] > 100 and edge[2, 2] > 60
    won = frame(game, world(game, text=DRAWN.replace("a", ".").replace("*A", "..").replace("#", "*", 1)))
    assert cells(game, won, down=0.02).max(axis=-1)[0, 0] < 60


@pytest.mark.parametrize(("kind", "row", "column", "token"), [
    ("entities", 1, 1, 0), ("entities", 2, 2, 1), ("entities", 4, 3, 2), ("entities", 5, 6, 5),
    ("pixels", 1, 1, 0), ("pixels", 0, 0, 1), ("pixels", 1, 2, 2), ("pixels", 7, 7, 49), ("rgb", 4, 3, 39),
])  # fmt: skip
def test_halo_is_in_the_cell_of_its_token(kind, row, column, token):
    game = KINDS[kind]
    state = world(game, text=DRAWN)
    weights = np.zeros(np.prod(game.observation_bounds[0].shape[:-1]))
    plain = cells(game, frame(game, state, weights), across=0.1)
    weights[token] = 0.3
    drawn = frame(game, state, weights)
    changed = (cells(game, drawn, across=0.1) != plain).any(axis=-1)
    assert changed[row, column] and changed.sum() == 1
    np.testing.assert_allclose(cells(game, drawn, across=0.1)[row, column], renderer.AMBER, atol=12)
    np.testing.assert_array_equal(cells(game, drawn), cells(game, frame(game, state)))  # the colour stays visible


def test_halo_grows_with_the_weight():
    game = KINDS["pixels"]
    state = world(game, text=DRAWN)
    weights = np.zeros(50)
    weights[2:5] = 1.0, 0.5, 0.1
    amber = np.abs(frame(game, state, weights).astype(int) - renderer.AMBER).max(axis=-1) < 30
    side = (SIZE - 2 * round(renderer.BAND * SIZE)) / game.width
    left = (SIZE - side * game.width) / 2
    area = [amber[:, int(left + column * side) : int(left + (column + 1) * side)].sum() for column in (2, 3, 4)]
    assert area[0] > 1.5 * area[1] > 3 * area[2] > 0


@each_kind
@pytest.mark.parametrize("count", [-1, 1])
def test_a_wrong_number_of_weights_is_refused(game, count):
    right = int(np.prod(game.observation_bounds[0].shape[:-1]))
    with pytest.raises(ValueError, match=f"expected {right} finite numbers"):
        frame(game, world(game, level=0), np.ones(right + count))


def test_drawing_changes_nothing():
    game = BoxWorld()
    state = world(game, level=5)
    before = [field.copy() for field in state]
    np.testing.assert_array_equal(frame(game, state), frame(game, state))
    for field, same in zip(state, before, strict=True):
        np.testing.assert_array_equal(field, same)


def test_picture_follows_the_agent_up():
    env = make("noisy_envs/BoxWorld-v0", render_mode="rgb_array")
    env.reset(
        options={"state": {"text": DRAWN.replace("@", ".").replace("#.......#\n#########", "#@......#\n#########")}}
    )
    grey = [cells(env.game, env.render())]
    env.step(0)
    grey.append(cells(env.game, env.render()))
    places = [np.argwhere((colours == 128).all(axis=-1)).tolist() for colours in grey]
    assert places == [[[7, 1]], [[6, 1]]]


def test_ansi():
    env = gymnasium.make("noisy_envs/BoxWorld-v0", render_mode="ansi")
    env.reset(options={"state": {"text": DRAWN}})
    assert env.render() == DRAWN.strip()
    for action in (3, 1):
        env.step(action)
    expected = DRAWN.replace("@", ".").replace("a", "@").strip()
    assert env.render() == "a" + expected[1:]
    assert env.unwrapped.metadata["render_modes"] == ["human", "rgb_array", "ansi"]
    told = "render_mode='ansi': expected one of None, 'human', 'rgb_array'"
    with pytest.warns(UserWarning, match="not in the possible render_modes"), pytest.raises(ValueError, match=told):
        gymnasium.make("noisy_envs/SimpleTag-v0", render_mode="ansi")
    with pytest.raises(ValueError, match="render_mode='ansi': expected one of None, 'rgb_array'"):
        gymnasium.make_vec("noisy_envs/BoxWorld-v0", 2, render_mode="ansi")
