"""BoxWorld: each rule on levels drawn by hand, levels against their promises, and what an observation shows."""

import hashlib
import pickle
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from cases import by_default, slow
from helpers import make, to_backend, with_path

from noisy_envs.arrays import as_numpy
from noisy_envs.games import box_world_levels
from noisy_envs.games.box_world import (
    BLOCKED,
    DEAD_END,
    MOVED,
    OPENED_BOX,
    PALETTE,
    SOLVED,
    TOOK_KEY,
    BoxWorld,
    State,
)
from noisy_envs.games.box_world_levels import (
    ABSENT,
    AGENT,
    CORNER,
    EMPTY,
    FRAME,
    GEM,
    KEYS,
    MAX_CACHED_LEVELS,
    TRIES,
    Box,
    Level,
    LevelConfig,
)
from noisy_envs.randomness import MAX_SEED, episode_key, uniforms

BOX_WORLD = "noisy_envs/BoxWorld-v0"
DATA = Path(__file__).parents[1] / "data" / "boxworld_entities.npz"
MOVE = {"U": 0, "D": 1, "L": 2, "R": 3}
STEP = np.array([(-1, 0), (1, 0), (0, -1), (0, 1)])
EVENT = {".": MOVED, "x": BLOCKED, "k": TOOK_KEY, "o": OPENED_BOX, "*": SOLVED, "-": DEAD_END}
PAID = {".": 0, "x": 0, "k": 1, "o": 1, "*": 10, "-": -1}
KINDS = ("entities", "pixels", "rgb")
SETTINGS: dict[str, dict[str, Any]] = {
    "paper": {},
    "chains": {"size": 12, "goal_length": 4, "num_distractors": 3, "distractor_length": 2},
    "smallest": {"size": 3, "goal_length": 2, "num_distractors": 0},
    "large": {"size": 20},
    "ranges": {"size": (7, 9), "goal_length": (2, 4), "num_distractors": (0, 2), "distractor_length": (1, 2)},
    "crowded": {"size": 5, "goal_length": 6, "num_distractors": 0},
}
DIGESTS = {
    "paper": "5682c872520aff09",
    "chains": "476b1c6db70ae357",
    "smallest": "044c6bffc1cc2085",
    "large": "94df63df0fd011c9",
    "ranges": "78784becce7dee16",
    "crowded": "e624bb2f46cf4431",
}
each_setting = pytest.mark.parametrize("options", SETTINGS.values(), ids=list(SETTINGS))
each_kind = pytest.mark.parametrize("kind", KINDS)


def drawn(short: str) -> str:
    """Put a frame around "corner row row …"."""
    corner, *rows = short.split()
    wall = "#" * (len(rows) + 1)
    return "\n".join([corner + wall, *(f"#{row}#" for row in rows), "#" + wall])


def moved(state: State, backend: str) -> State:
    """Return a state in the given library."""
    return State(*(to_backend(field, backend) for field in state))


def dealt(game: BoxWorld, count: int, first: int = 0) -> State:
    """Return the levels first … first + count - 1."""
    return game.validate_state({"level": first + np.arange(count)}, (count,))


def step(game: BoxWorld, state: State, actions: Any, backend: str = "numpy") -> State:
    """Play one action for each world."""
    return game.transition(state, to_backend(np.array(actions, np.int64).reshape(-1, 1), backend), ())


def same(one: State, other: State) -> None:
    """Demand equal states."""
    for name, a, b in zip(State._fields, one, other, strict=True):
        np.testing.assert_array_equal(as_numpy(a), as_numpy(b), err_msg=name)


def digest(options: dict[str, Any], count: int) -> str:
    """Return a hash of the first levels as they are drawn in characters."""
    config = BoxWorld(**options).level_config
    drawings = [
        box_world_levels.render_text(box_world_levels.draw_level(config, number), config.width)
        for number in range(count)
    ]
    return hashlib.sha256("\n\n".join(drawings).encode()).hexdigest()[:16]


# --- the rules, on a field of 5 × 5 ---

RULES = {  # corner and rows before, moves, what each brings about, corner and rows after ("" for the same)
    "up": ("# ..... ..... ..@.. ..... ....a", "U", ".", "# ..... ..@.. ..... ..... ....a"),
    "down": ("# ..... ..... ..@.. ..... ....a", "D", ".", "# ..... ..... ..... ..@.. ....a"),
    "left": ("# ..... ..... ..@.. ..... ....a", "L", ".", "# ..... ..... .@... ..... ....a"),
    "right": ("# ..... ..... ..@.. ..... ....a", "R", ".", "# ..... ..... ...@. ..... ....a"),
    "frame above": ("# ..@.. ..... ..... ..... ....a", "U", "x", ""),
    "frame below": ("# ..... ..... ..... ....a ..@..", "D", "x", ""),
    "frame left": ("# ..... ..... @.... ..... ....a", "L", "x", ""),
    "frame right": ("# ..... ..... ....@ ..... ....a", "R", "x", ""),
    "at the held key's corner": ("a @.... ..... ..... ..... *A...", "ULLU", "xxxx", ""),
    "at the far corner": ("a ..... ..... ..... ..... *A..@", "DRRD", "xxxx", ""),
    "key above": ("# ..... ..a.. ..@.. ..... *A...", "U", "k", "a ..... ..@.. ..... ..... *A..."),
    "key below": ("# ..... ..... ..@.. ..a.. *A...", "D", "k", "a ..... ..... ..... ..@.. *A..."),
    "key left": ("# ..... ..... .a@.. ..... *A...", "L", "k", "a ..... ..... .@... ..... *A..."),
    "key right": ("# ..... ..... ..@a. ..... *A...", "R", "k", "a ..... ..... ...@. ..... *A..."),
    "key is paid once": ("# ..... .a@.. ..... ..... *A...", "LRLL", "k...", "a ..... @.... ..... ..... *A..."),
    "content from above": ("# ..... .@... .*A.. ..... ....a", "D", "x", ""),
    "content from below": ("# ..... ..... .*A.. .@... ....a", "U", "x", ""),
    "content from the left": ("# ..... ..... @*A.. ..... ....a", "R", "x", ""),
    "content with the lock's key": ("a ..... .@... .*A.. ..... .....", "D", "x", ""),
    "content from the left with the lock's key": ("a ..... ..... @*A.. ..... .....", "R", "x", ""),
    "content from below with the lock's key": ("a ..... ..... .*A.. .@... .....", "U", "x", ""),
    "key in a box": ("c ..... .@... .bA.. ..... *B...", "D", "x", ""),
    "content like the held key": ("b ..... .@... .bA.. ..... *B...", "D", "x", ""),
    "lock without a key from above": ("# ..... ..@.. .*A.. ..... ....a", "D", "x", ""),
    "lock without a key from below": ("# ..... ..... .*A.. ..@.. ....a", "U", "x", ""),
    "lock without a key from the right": ("# ..... ..... .*A@. ..... ....a", "L", "x", ""),
    "lock with a wrong key from above": ("b ..... ..@.. .*A.. ..... .....", "D", "x", ""),
    "lock with a wrong key from below": ("b ..... ..... .*A.. ..@.. .....", "U", "x", ""),
    "lock with a wrong key from the right": ("b ..... ..... .*A@. ..... .....", "L", "x", ""),
    "lock of the content's colour": ("b ..... ..@.. .bA.. ..... *B...", "D", "x", ""),
    "opens from above": ("a ..... ..@.. .bA.. ..... *B...", "D", "o", "b ..... ..... ..@.. ..... *B..."),
    "opens from below": ("a ..... ..... .bA.. ..@.. *B...", "U", "o", "b ..... ..... ..@.. ..... *B..."),
    "opens from the right": ("a ..... ..... .bA@. ..... *B...", "L", "o", "b ..... ..... ..@.. ..... *B..."),
    "a box is paid once": ("a ..... ..@.. .bA.. ..... *B...", "DLRUD", "o....", "b ..... ..... ..@.. ..... *B..."),
    "through a box": ("a ..... ..@.. .bA.. ..... *B...", "DLL", "o..", "b ..... ..... @.... ..... *B..."),
    "gem": ("a ..... ..@.. .*A.. ..... .....", "D", "*", "* ..... ..... ..@.. ..... ....."),
    "gem from below": ("a ..... ..... .*A.. ..@.. .....", "U", "*", "* ..... ..... ..@.. ..... ....."),
    "gem from the right": ("a ..... ..... .*A@. ..... .....", "L", "*", "* ..... ..... ..@.. ..... ....."),
    "distractor": ("a ..... ..@.. .bA.. ..... *A...", "D", "-", "b ..... ..... ..@.. ..... *A..."),
    "distractor from below": ("a ..... ..... .bA.. ..@.. *A...", "U", "-", "b ..... ..... ..@.. ..... *A..."),
    "distractor from the right": ("a ..... ..... .bA@. ..... *A...", "L", "-", "b ..... ..... ..@.. ..... *A..."),
    "distractor of the second key": ("b ..... ..@.. .cB.. ..... *B...", "D", "-", "c ..... ..... ..@.. ..... *B..."),
    "three distractors": ("a ..@.. .cA.. .dA.. .*A.. .eA..", "D", "-", "c ..... ..@.. .dA.. .*A.. .eA.."),
    "gem among three": ("a ..... .cA.. .dA.. .*A@. .eA..", "L", "*", "* ..... .cA.. .dA.. ..@.. .eA.."),
    "long distractor": ("a ..@.. .cA.. .dC.. .eD.. *A...", "D", "-", "c ..... ..@.. .dC.. .eD.. *A..."),
    "long distractor's second box": ("a ..@.. .dC.. cA... eD... *A...", "D", "x", ""),
    "long distractor's third box": ("a ..@.. .eD.. cA... dC... *A...", "D", "x", ""),
    "two keys": ("# @a... ..... ..... ..... ...*A", "RRRRDDDD", "k......*", "* ..... ..... ..... ..... ....@"),
    "three keys": ("# @a... ..... ..bA. ..... *B...", "RRRDDDDLL", "k...o...*", "* ..... ..... ..... ..... .@..."),
    "the old colour is gone": ("a ..... ..@.. .bA.. .cA.. *B...", "DD", "ox", "b ..... ..... ..@.. .cA.. *B..."),
    "keys alike": ("a ..... ..@.. .aA.. ..... *A...", "DDDL", "o..*", "* ..... ..... ..... ..... .@..."),
    "side by side, right first": ("a ....@ bAcA. ..... ..... *C...", "LDLL", ".o.x", "c ..... bA@.. ..... ..... *C..."),
    "side by side, left first": ("a .@... bAcD. ..... ..... *B...", "DR", "ox", "b ..... .@cD. ..... ..... *B..."),
    "stacked, upper first": ("a ..@.. .bA.. .cB.. .*C.. .....", "DDD", "oo*", "* ..... ..... ..... ..@.. ....."),
    "stacked, lower first": ("a ..... .*C.. .cB.. .bA.. ..@..", "UUU", "oo*", "* ..... ..@.. ..... ..... ....."),
    "stacked, middle": ("a ..... .dD.. .bA@. .cE.. *B...", "LUD", "oxx", "b ..... .dD.. ..@.. .cE.. *B..."),
    "shifted, content above a lock": ("a ..@.. .bA.. ..*B. ..... .....", "DD", "ox", "b ..... ..@.. ..*B. ..... ....."),
    "shifted, lock above a content": ("a ..... ..*B. .bA.. ..@.. .....", "UU", "ox", "b ..... ..*B. ..@.. ..... ....."),
    "a content at the wall": ("a ..... ..@.. ..... bA... *B...", "DDL", "..o", "b ..... ..... ..... .@... *B..."),
    "a lock at the right wall": ("a ...bA ....@ ..... ..... *B...", "U", "o", "b ....@ ..... ..... ..... *B..."),
    "a lock in the last cell": ("a ..... ..... ..... ....@ ...*A", "D", "*", "* ..... ..... ..... ..... ....@"),
    "a box in the first cell": ("a *A@.. ..... ..... ..... .....", "L", "*", "* .@... ..... ..... ..... ....."),
    "without boxes": ("# @a... ..... ..... ..... .....", "RL", "k.", "a @.... ..... ..... ..... ....."),
}  # fmt: skip


@pytest.mark.parametrize(
    "options", [{}, {"size": (5, 8), "step_cost": 0.25, "blocked_cost": 0.5}], ids=["plain", "costs"]
)
@pytest.mark.parametrize(("before", "moves", "told", "after"), RULES.values(), ids=list(RULES))
def test_rules(before, moves, told, after, options, backend):
    game = BoxWorld(**{"size": 5, "goal_length": 4, "num_distractors": 2} | options)
    state = moved(game.validate_state({"text": drawn(before)}, ()), backend)
    assert game.render_text(state) == [drawn(before)]
    assert not game.terminated(state)[0] and not game.success(state)[0] and state.outcome[0] == MOVED
    for move, what in zip(moves, told, strict=True):
        kept = moved(State(*(as_numpy(field).copy() for field in state)), backend)
        following = step(game, state, MOVE[move], backend)
        same(state, kept)
        state = following
        assert state.outcome[0] == EVENT[what]
        reward = game.reward(state)
        assert reward.shape == (1, 1) and as_numpy(reward).dtype == np.float32
        assert reward[0, 0] == PAID[what] - game.step_cost - game.blocked_cost * (what == "x")
        assert bool(game.terminated(state)[0]) == (what in "*-") and bool(game.success(state)[0]) == (what == "*")
    assert game.render_text(state) == [drawn(after or before)]
    same(game.validate_state(State(*(as_numpy(x) for x in state)), (1,)), state)


def test_perfect_play_is_paid_goal_length_and_nine():
    env = make(BOX_WORLD, size=5, goal_length=4, num_distractors=2)
    for name, expected in (("two keys", 11), ("three keys", 12)):
        before, moves, *_ = RULES[name]
        env.reset(options={"state": {"text": drawn(before)}})
        *played, last = [env.step(MOVE[move]) for move in moves]
        assert sum(step[1] for step in played) + last[1] == expected
        assert not any(step[2] or step[3] or step[4]["is_success"] for step in played)
        assert last[2] is True and last[3] is False and last[4]["is_success"] is True
        with pytest.raises(RuntimeError, match="ended"):
            env.step(0)


def test_a_distractor_ends_without_success():
    env = make(BOX_WORLD, size=5)
    env.reset(options={"state": {"text": drawn(RULES["distractor"][0])}})
    _, reward, terminated, truncated, info = env.step(1)
    assert (reward, terminated, truncated, info["is_success"]) == (-1.0, True, False, False)
    with pytest.raises(RuntimeError, match="ended"):
        env.step(0)


@pytest.mark.parametrize("limit", [1, 2, 3, 30])
@pytest.mark.parametrize("way", ["idle", "gem", "distractor"])
def test_time_limit(limit, way):
    """The last step opens a box, or does not."""
    env = make(BOX_WORLD, size=5, **({} if limit == 30 else {"max_steps": limit}))
    box = {"idle": "a ..... ....@ ..... ...*A .....", "gem": "a ..... ..... ....@ ...*A ....."}
    env.reset(options={"state": {"text": drawn(box.get(way, "a *A... ..... ....@ ...bA ....."))}})
    for _ in range(limit - 1):
        _, reward, terminated, truncated, _ = env.step(3)  # against the wall
        assert (reward, terminated, truncated) == (0, False, False)
    _, reward, terminated, truncated, info = env.step(1)
    assert reward == {"idle": 0, "gem": 10, "distractor": -1}[way]
    assert (terminated, truncated, info["is_success"]) == (way != "idle", way == "idle", way == "gem")
    with pytest.raises(RuntimeError, match=f"ended after {limit} steps"):
        env.step(0)


# --- many worlds ---


@each_setting
@pytest.mark.parametrize("backend", ["torch", slow("numpy")], indirect=True)  # NumPy runs with torch, too
def test_worlds_of_a_batch_do_not_mix(options, backend):
    game = BoxWorld(**options)
    together = dealt(game, 48, first=1000)
    alone = [moved(State(*(field[i : i + 1] for field in together)), backend) for i in range(48)]
    arrays, together = together, moved(together, backend)
    random, events = np.random.default_rng(0), set()
    for _ in range(30):
        best = game.policy("oracle", arrays, np.zeros((48, 1)))[:, 0]  # so that boxes are opened, too
        actions = np.where(random.random(48) < 0.6, best, random.integers(4, size=48))
        arrays, together = step(game, arrays, actions), step(game, together, actions, backend)
        alone = [step(game, state, [action], backend) for state, action in zip(alone, actions, strict=True)]
        same(together, State(*(np.concatenate([as_numpy(x) for x in field]) for field in zip(*alone, strict=True))))
        same(together, arrays)
        assert all(field.dtype == arrays[0].dtype == np.int64 for field in map(as_numpy, together))
        for show in (game.observe, game.reward):
            np.testing.assert_array_equal(as_numpy(show(together)), show(arrays))
        events.update(arrays.outcome.tolist())
    assert events >= {MOVED, BLOCKED, TOOK_KEY, SOLVED if game.num_boxes < 9 else OPENED_BOX}


def impossible(game: BoxWorld, state: State, before: State) -> Iterator[str]:
    """Tell what the rules do not allow, in words of rows and columns."""
    for i, (things, outcome, size, past) in enumerate(
        zip(
            state.objects.tolist(),
            state.box_outcomes.tolist(),
            state.size.tolist(),
            before.objects.tolist(),
            strict=True,
        )
    ):
        (agent, looks), (key, colour), *rest = things
        boxes = [(*rest[j], *rest[j + 1]) for j in range(0, len(rest), 2)]
        present = [box for box in boxes if box[1] != ABSENT]
        cells = [agent, *([key] if key != CORNER else []), *(cell for box in present for cell in box[::2])]
        inside = [1 <= cell // game.width <= size and 1 <= cell % game.width <= size for cell in cells]
        path = box_world_levels.on_path(tuple(Box(cell, content, lock) for cell, content, _, lock in present))
        role = [
            SOLVED if box[1] == GEM else OPENED_BOX if (box[0], box[1], box[3]) in path else DEAD_END for box in present
        ]
        absent = (game.width**2 - 1, ABSENT) * 2
        facts = {
            "agent": looks == AGENT,
            "inside": all(inside),
            "one thing a cell": len(set(cells)) == len(cells),
            "key": 0 <= colour < KEYS or (colour == GEM and key == CORNER),
            "absent last": boxes == present + [absent] * (len(boxes) - len(present)),
            "pairs": all(box[2] == box[0] + 1 and 0 <= box[1] <= GEM and 0 <= box[3] < KEYS for box in present),
            "order": present == sorted(present),
            "outcome": outcome == role + [0] * (len(boxes) - len(present)),
            "boxes stay": set(present) <= {(*past[j], *past[j + 1]) for j in range(2, len(past), 2)},
            "one key": Counter([colour, *(box[1] for box in present)]).most_common(1)[0][1] == 1,
        }
        yield from (f"world {i}: {fact}" for fact, true in facts.items() if not true)


@each_setting
def test_random_play_stays_within_the_rules(options):
    game = BoxWorld(**options)
    count = 600
    state = dealt(game, count, first=5000)
    random, events = np.random.default_rng(1), Counter()
    for t in range(60):
        actions = random.integers(4, size=count)
        if t % 4:
            actions[:100] = game.policy("oracle", State(*(x[:100] for x in state)), np.zeros((100, 1)))[:, 0]
        before, state = state, step(game, state, actions)
        events.update(state.outcome.tolist())
        apart = np.abs(state.objects[:, 0, 0] - before.objects[:, 0, 0])
        np.testing.assert_array_equal(
            np.isin(state.outcome, [MOVED, TOOK_KEY, OPENED_BOX, SOLVED, DEAD_END]), apart > 0
        )
        assert np.isin(apart, [0, 1, game.width]).all()
        same(State(*state[2:4], *state[2:4], 0, 0), State(*before[2:4], *before[2:4], 0, 0))
        changed = (state.outcome >= TOOK_KEY) | (t % 20 == 19) | (np.arange(count) < 20)
        some, past = (State(*(field[changed] for field in at)) for at in (state, before))
        assert list(impossible(game, some, past)) == []
        lost = (before.box_outcomes > 0).sum(axis=1) - (state.box_outcomes > 0).sum(axis=1)
        np.testing.assert_array_equal(lost, state.outcome >= OPENED_BOX)
        same(game.validate_state(some, (len(some.size),)), some)
    assert set(events) >= {MOVED, BLOCKED, TOOK_KEY, SOLVED} and (
        game.num_boxes < 2 or events[DEAD_END] + events[OPENED_BOX]
    )


# --- the recordings of the paper's environment ---


def recorded(number: int) -> dict[str, np.ndarray]:
    with np.load(DATA) as data:
        return {name.split("_", 1)[1]: data[name] for name in data.files if name.startswith(f"{number}_")}


def transcribed(grid: np.ndarray, start: np.ndarray, locks: np.ndarray) -> str:
    """Draw a recorded picture in characters."""
    colours = {
        tuple(colour): symbol
        for colour, symbol in zip(PALETTE[: EMPTY + 1].tolist(), box_world_levels.SYMBOLS, strict=False)
    }
    rows = [[colours.get(tuple(pixel), "#") for pixel in row] for row in grid.tolist()]
    for row, column, _ in locks:
        rows[row][column] = rows[row][column].upper()
    assert rows[start[0]][start[1]] == "@"
    return "\n".join(map("".join, rows))


@pytest.mark.parametrize("number", range(24))
def test_golden_replay(number):
    recording = recorded(number)
    text = transcribed(recording["grid"], recording["start"], recording["locks"])
    env = make(BOX_WORLD, observation="rgb")
    picture, _ = env.reset(options={"state": {"text": text}})
    np.testing.assert_array_equal(picture, recording["grid"])
    state = env.state
    roles = {
        (cell // 9, cell % 9): outcome
        for (cell, _), outcome in zip(state.objects[3::2], state.box_outcomes, strict=True)
        if outcome
    }
    assert {place: outcome in (OPENED_BOX, SOLVED) for place, outcome in roles.items()} == {
        (row, column): right == 1 for row, column, right in recording["locks"].tolist()
    }
    told = ("action", "reward", "terminated", "truncated", "grids", "positions")
    for action, reward, terminated, truncated, grid, place in zip(*map(recording.get, told), strict=True):
        seen = env.step(action)
        assert seen[1:4] == (reward, terminated, truncated)
        np.testing.assert_array_equal(seen[0], grid)
        assert divmod(env.state.objects[0, 0], 9) == tuple(place)
    assert seen[2] or seen[3]
    assert seen[4]["is_success"] == (recording["reward"][-1] == 10)


# --- levels ---


def solve(game: BoxWorld, state: State) -> np.ndarray:
    """Return the fewest steps (B,) to the gem by trying all, -1 where there is no way."""
    worlds, cells = len(state.size), game.width**2
    steps, world = np.full(worlds, -1), np.arange(worlds)
    tried = np.zeros(worlds * 2 * (GEM + 1) * cells, bool)
    for count in range(1, 10 * cells):
        state = State(*(np.repeat(field, 4, axis=0) for field in state))
        world = np.repeat(world, 4)
        state = step(game, state, np.tile(np.arange(4), len(world) // 4))
        steps[world[state.outcome == SOLVED]] = count
        (agent, key), colour = state.objects[:, :2, 0].T, state.objects[:, 1, 1]
        place = ((2 * world + (key == CORNER)) * (GEM + 1) + colour) * cells + agent
        on = ~tried[place] & (steps[world] < 0) & (state.outcome != DEAD_END)
        tried[place[on]] = True
        rows = np.unique(np.where(on, place, -1), return_index=True)[1]
        rows = rows[on[rows]]
        if not len(rows):
            break
        state, world = State(*(field[rows] for field in state)), world[rows]
    return steps


def check_solutions(options: dict[str, Any], count: int, first: int = 0) -> None:
    """Demand that each level can be solved, and that the oracle does so in as few steps as can be."""
    game = BoxWorld(**options)
    state = dealt(game, count, first)
    shortest = solve(game, state)
    assert (shortest > 0).all()
    world, steps = np.arange(count), np.zeros(count, int)
    for t in range(1, shortest.max() + 1):
        state = step(game, state, game.policy("oracle", state, np.zeros((len(world), 1)))[:, 0])
        assert not np.isin(state.outcome, [BLOCKED, DEAD_END]).any()
        steps[world[state.outcome == SOLVED]] = t
        on = state.outcome != SOLVED
        state, world = State(*(field[on] for field in state)), world[on]
    np.testing.assert_array_equal(steps, shortest)


@each_setting
def test_levels_are_solved(options):
    check_solutions(options, 200)


@pytest.mark.slow
@each_setting
def test_many_levels_are_solved(options):
    check_solutions(options, 10_000, first=10**12)


def parts(level: Level) -> tuple[list[Box], list[list[Box]]]:
    """Return the boxes from the loose key to the gem, and the chains of the others."""
    assert [box.content for box in level.boxes].count(GEM) == 1
    opener = {box.content: box for box in level.boxes}
    assert len(opener) == len(level.boxes)
    path = [opener[GEM]]
    left = dict(opener)  # a ring would ask for a box again
    while path[0].lock != level.key[1]:
        path.insert(0, left.pop(path[0].lock))
    chains = []
    for box in level.boxes:  # chains from their last boxes, that hold keys to nothing
        if box not in path and all(other.lock != box.content for other in level.boxes):
            chain = [box]
            while chain[0].lock in opener and opener[chain[0].lock] not in path:
                chain.insert(0, left.pop(chain[0].lock))
            chains.append(chain)
    return path, chains


def spots(level: Level, width: int) -> tuple[tuple[int, int], tuple[int, int], list[tuple[int, int]]]:
    """Return rows and columns, from 1: of the agent, the key, and the contents."""
    places = [divmod(cell, width) for cell in (level.agent, level.key[0], *(box.cell for box in level.boxes))]
    return places[0], places[1], places[2:]


def around(place: tuple[int, int]) -> set[tuple[int, int]]:
    return {(place[0] + row, place[1] + column) for row, column in STEP.tolist()}


@each_setting
def test_what_a_level_consists_of(options):
    config = BoxWorld(**options).level_config
    seen = defaultdict(Counter)
    for number in range(2000):
        level = box_world_levels.draw_level(config, number)
        path, chains = parts(level)
        colours = [level.key[1], *(box.content for box in level.boxes if box.content != GEM)]
        assert len(set(colours)) == len(colours) and set(colours) <= set(range(KEYS))
        assert list(level.boxes) == sorted(level.boxes)
        assert [box.lock for box in path] == [level.key[1], *(box.content for box in path[:-1])]
        rights = [box.lock for box in path]
        for chain in chains:
            assert chain[0].lock in rights
            assert [box.lock for box in chain[1:]] == [box.content for box in chain[:-1]]
            assert not {box.content for box in chain} & set(rights)
            seen["branches of", len(path)][rights.index(chain[0].lock)] += 1
        assert len(path) + sum(map(len, chains)) == len(level.boxes)
        assert len(set(map(len, chains))) <= 1
        seen["size"][level.size] += 1
        seen["goal_length"][len(path) + 1] += 1
        seen["num_distractors"][len(chains)] += 1
        seen["distractor_length"].update({len(chain) for chain in chains})
        seen["colour"].update(colours)
    for name in ("size", "goal_length", "num_distractors", "distractor_length"):
        low, high = np.broadcast_to(getattr(config, name), 2)
        if name != "distractor_length" or config.num_distractors != 0:
            even(seen[name], range(low, high + 1))
    even(seen["colour"], range(KEYS))
    for name, counter in seen.items():
        if name[0] == "branches of":
            even(counter, range(name[1]))


def even(counter: Counter, outcomes: range) -> None:
    """Demand each outcome and no other, about equally often: five standard deviations."""
    assert set(counter) == set(outcomes)
    mean = counter.total() / len(outcomes)
    assert max(abs(count - mean) for count in counter.values()) <= 5 * np.sqrt(mean)


@by_default(
    ("setting", "tries"),
    [("paper", TRIES), ("large", TRIES), ("ranges", TRIES), ("chains", 0), ("smallest", 0), ("crowded", 0)],
    product(SETTINGS, [TRIES, 0]),
)
def test_where_things_lie(setting, tries, monkeypatch):
    """At random, or in rows where no try succeeds."""
    monkeypatch.setattr(box_world_levels, "TRIES", tries)
    game = BoxWorld(**SETTINGS[setting])
    seen = defaultdict(Counter)
    for number in range(2000):
        level = box_world_levels.draw_level(game.level_config, number)
        agent, key, contents = spots(level, game.width)
        solid = [{(row, column), (row, column + 1)} for row, column in contents]
        cells = {(row, column) for row in range(1, level.size + 1) for column in range(1, level.size + 1)}
        taken = set().union(*solid)
        assert {agent, key} | taken <= cells and len({agent, key} | taken) == 2 + 2 * len(solid)
        for i, box in enumerate(solid):
            near = set().union(*map(around, box))
            assert key not in near
            assert not any(near & other for other in solid[:i])
        free, reached, edge = cells - taken, {agent}, {agent}
        while edge := set().union(*map(around, edge)) & free - reached:
            reached |= edge
        assert reached == free
        if level.size == game.width - 2:
            seen["agent"][agent] += 1
            seen["key"][key] += 1
            seen["content"].update(contents)
    side = game.width - 2
    if tries and setting not in ("crowded", "smallest"):  # boxes there leave little choice
        for who, columns in (("agent", side), ("key", side), ("content", side - 1)):
            for axis, size in ((0, side), (1, columns)):
                counter = Counter(place[axis] for place in seen[who].elements())
                mean = counter.total() / size
                assert set(counter) == set(range(1, size + 1))
                assert 0.5 * mean < min(counter.values()) and max(counter.values()) < 1.6 * mean
    if tries and side < 10:
        assert len(seen["agent"]) == side**2


def test_a_place_in_the_list_tells_nothing():
    game = BoxWorld()
    outcome = dealt(game, 3000).box_outcomes
    even(Counter(np.argmax(outcome == SOLVED, axis=1).tolist()), range(3))
    assert (np.sort(outcome, axis=1) == [SOLVED, DEAD_END, DEAD_END]).all()
    chains = BoxWorld(**SETTINGS["chains"])
    outcome = dealt(chains, 3000).box_outcomes
    for place in range(9):
        share = [(outcome[:, place] == what).mean() for what in (SOLVED, OPENED_BOX, DEAD_END)]
        np.testing.assert_allclose(share, np.array([1, 2, 6]) / 9, atol=0.05)


@each_setting
def test_levels_stay_what_they_were(options):
    name = next(name for name, setting in SETTINGS.items() if setting is options)
    assert digest(options, 100) == DIGESTS[name]


@pytest.mark.parametrize("seed", ["0", "4242"])
def test_levels_are_the_same_in_a_fresh_process(seed):
    code = "import test_box_world as t; print(t.digest(t.SETTINGS['ranges'], 200))"
    here = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=with_path(here, here.parent) | {"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == digest(SETTINGS["ranges"], 200)


# --- banks ---


def number_of(env: Any) -> int:
    env.reset()
    return int(env.state.level)


def test_levels_are_of_the_bank():
    train, test = make(BOX_WORLD, start_level=40, num_levels=7), make(BOX_WORLD, start_level=47, num_levels=5)
    for env, numbers in ((train, range(40, 47)), (test, range(47, 52))):
        env.reset(seed=0)
        even(Counter(number_of(env) for _ in range(700)), numbers)
    default = make(BOX_WORLD)
    default.reset(seed=0)
    seen = [number_of(default) for _ in range(2000)]
    even(Counter(number * 10 // 100_000 for number in seen), range(10))
    assert max(seen) < 100_000 and len(set(seen)) > 1900


def test_levels_of_vector_environments_are_of_the_bank(backend):
    options = {"backend": backend, "start_level": 40, "num_levels": 7}
    envs = gymnasium.make_vec(BOX_WORLD, 700, **options)
    envs.reset(seed=0)
    even(Counter(as_numpy(envs.state.level).tolist()), range(40, 47))
    for level, text in zip(as_numpy(envs.state.level).tolist(), envs.game.render_text(envs.state), strict=True):
        assert text == box_world_levels.render_text(
            box_world_levels.draw_level(envs.game.level_config, level), envs.game.width
        )


def test_a_bank_of_one():
    env = make(BOX_WORLD, start_level=3, num_levels=1)
    env.reset(seed=0)
    first = env.state
    for _ in range(20):
        env.reset()
        same(env.state, first)
    assert first.level == 3


def test_a_bank_that_is_not_kept_whole():
    game = BoxWorld(start_level=7, num_levels=10**9)
    key = episode_key(np.arange(400), np.zeros(400, np.int64))
    drawn_levels = game.initial(uniforms(key, np.zeros(400, np.int64), game.num_reset_uniforms)).level
    even(Counter((drawn_levels // 10**8).tolist()), range(10))
    numbers = np.array([12, 12 + MAX_CACHED_LEVELS, 12, 12 + 5 * MAX_CACHED_LEVELS, 13, 0, 6, MAX_SEED, 12])
    for order in (numbers, numbers[::-1], numbers):
        for number, world in zip(order.tolist(), game.levels(game.validate_state({"level": order}, (9,))), strict=True):
            assert world == box_world_levels.draw_level(game.level_config, number)
    assert len({tuple(world) for world in game.levels(dealt(game, 50))}) == 50


def test_few_levels_are_kept(monkeypatch):
    """Numbers that share a slot push each other out, and come back the same."""
    monkeypatch.setattr(box_world_levels, "MAX_CACHED_LEVELS", 4)
    game = BoxWorld(num_levels=100)
    for numbers in ([0, 4, 8, 1], [8, 0, 4, 4], [0, 0, 12, 3], [4, 8, 0, 12]):
        assert game.levels(game.validate_state({"level": numbers}, (4,))) == [
            box_world_levels.draw_level(game.level_config, n) for n in numbers
        ]


def test_a_level_is_drawn_once(monkeypatch):
    asked, draw_level = [], box_world_levels.draw_level
    monkeypatch.setattr(
        box_world_levels, "draw_level", lambda config, number: asked.append(number) or draw_level(config, number)
    )
    game = BoxWorld(start_level=5)
    for _ in range(3):
        dealt(game, 10)
    assert asked == list(range(10))


def test_the_largest_bank():
    game = BoxWorld(start_level=MAX_SEED - 1, num_levels=1)
    assert game.initial((np.full((2, 2), 0.75, np.float32),)).level.tolist() == [MAX_SEED - 1] * 2
    whole = BoxWorld(num_levels=2**48)
    for word, level in ((0.0, 0), (1 - 2.0**-24, 2**48 - 1)):
        assert whole.initial((np.full((1, 2), word, np.float32),)).level.tolist() == [level]
    with pytest.raises(ValueError, match=f"num_levels={2**48 + 1}: expected at most {2**48}"):
        BoxWorld(num_levels=2**48 + 1)


@pytest.mark.parametrize("level", [0, 5, np.int32(9), 123_456_789_012, MAX_SEED])
def test_a_level_by_number(level, backend):
    env = make(BOX_WORLD)
    tokens, _ = env.reset(seed=1, options={"level": level})
    assert env.state.level == level
    assert env.game.render_text(State(*(x[None] for x in env.state))) == [
        box_world_levels.render_text(box_world_levels.draw_level(env.game.level_config, int(level)), 9)
    ]
    envs = gymnasium.make_vec(BOX_WORLD, 3, backend=backend)
    for given in (level, [level] * 3):
        seen, _ = envs.reset(seed=1, options={"level": given})
        for world in as_numpy(seen):
            np.testing.assert_array_equal(world, tokens)
    each, _ = envs.reset(options={"level": [4, level, 6]})
    np.testing.assert_array_equal(as_numpy(each)[1], tokens)
    assert as_numpy(envs.state.level).tolist() == [4, level, 6]


@pytest.mark.parametrize("level", [-1, 1.5, True, "x", MAX_SEED + 1, 2**80, [1, 2], [], [[1]]])
def test_no_level(level, backend):
    env, envs = make(BOX_WORLD), gymnasium.make_vec(BOX_WORLD, 4, backend=backend)
    for one in (env, envs):
        one.reset(seed=5)
        before = one.state
        with pytest.raises((ValueError, TypeError), match=re.escape(f"level={level!r}: expected")):
            one.reset(seed=6, options={"level": level})
        same(one.state, before)
        one.reset()
        after = one.state
        one.reset(seed=5)
        one.reset()
        same(one.state, after)


def test_level_and_state_exclude_each_other():
    env = make(BOX_WORLD)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="options: expected either state or level, got both"):
        env.reset(options={"level": 1, "state": env.state})
    env.reset(options={"state": {"level": 17}})
    assert env.state.level == 17


# --- observations ---

WIDE = {"size": (5, 8), "num_distractors": (0, 2), "goal_length": (2, 3)}
each_view = pytest.mark.parametrize("options", [{}, WIDE], ids=["one size", "sizes"])


def played(game: BoxWorld, count: int, steps: int) -> list[State]:
    """Return states of play that mostly finds its way."""
    state, random = dealt(game, count, first=77), np.random.default_rng(3)
    states = [state]
    for t in range(steps):
        best = game.policy("oracle", state, np.zeros((count, 1)))[:, 0]
        state = step(game, state, np.where(random.random(count) < 0.7, best, random.integers(4, size=count)))
        if t % 3 == 0 or t == steps - 1:
            states.append(state)
    assert (state.objects[:, 1, 1] == GEM).any()
    return states


def names(colour: np.ndarray) -> np.ndarray:
    """Return the numbers of colours (..., 3) in 0 … 1."""
    rgb = np.rint(255 * colour).astype(int)
    hits = (rgb[..., None, :] == PALETTE[: FRAME + 1]).all(axis=-1)
    assert (hits.sum(axis=-1) == 1).all()
    return hits.argmax(axis=-1)


def places(game: BoxWorld, state: State) -> np.ndarray:
    """Return rows and columns (B, M, 2) of all things."""
    return np.stack(np.divmod(state.objects[..., 0], game.width), axis=-1)


@each_view
def test_everything_is_read_back_from_entities(options, backend):
    game = BoxWorld(**options)
    for state in played(game, 100, 24):
        seen = game.observe(moved(state, backend))
        assert tuple(seen.shape) == (100, 1, 2 + 2 * game.num_boxes, 5) and as_numpy(seen).dtype == np.float32
        for tokens, things, place, size in zip(
            as_numpy(seen)[:, 0], state.objects, places(game, state), state.size, strict=True
        ):
            count = (things[:, 1] != ABSENT).sum()
            assert (tokens[count:] == -1).all()
            np.testing.assert_array_equal(names(tokens[:count, :3]), things[:count, 1])
            apart = tokens[:count, 3:] * (size + 1)
            np.testing.assert_allclose(apart, place[:count] - place[0], atol=1e-5)
            held = things[1, 0] == CORNER
            if held:  # then the key's token tells where the corner is, and so where all is
                np.testing.assert_allclose((apart - apart[1])[0], place[0], atol=1e-5)
            assert (
                count % 2 == 0
                and (tokens[0, 3:] == 0).all()
                and (tokens[:2] >= -1).all()
                and (tokens[:2, 0] >= 0).all()
            )


@each_view
def test_everything_is_read_back_from_pixels(options, backend):
    game, rgb = BoxWorld(**options, observation="pixels"), BoxWorld(**options, observation="rgb")
    for state in played(game, 60, 24):
        seen, pictures = game.observe(moved(state, backend)), rgb.observe(moved(state, backend))
        assert tuple(seen.shape) == (60, 1, (game.width - 2) ** 2 + 1, 5) and as_numpy(seen).dtype == np.float32
        assert tuple(pictures.shape) == (60, 1, game.width, game.width, 3) and as_numpy(pictures).dtype == np.uint8
        worlds = zip(
            as_numpy(seen)[:, 0], as_numpy(pictures)[:, 0], state.objects, places(game, state), state.size, strict=True
        )
        for tokens, picture, things, place, size in worlds:
            assert (tokens[size**2 + 1 :] == -1).all() and (tokens[: size**2 + 1, :3] >= 0).all()
            shown = tokens[: size**2 + 1]
            cell = np.rint((shown[:, 3:] - shown[1, 3:]) * (size + 1)).astype(int)  # row 1 is the corner
            np.testing.assert_allclose((shown[:, 3:] - shown[1, 3:]) * (size + 1), cell, atol=1e-5)
            assert tuple(cell[0]) == tuple(place[0]) and (shown[0, 3:] == 0).all()
            order = [tuple(one) for one in cell[2:].tolist()]
            assert order == [
                (row, column)
                for row in range(1, size + 1)
                for column in range(1, size + 1)
                if (row, column) != tuple(place[0])
            ]
            field = np.zeros((game.width, game.width, 3), np.uint8)
            field[cell[:, 0], cell[:, 1]] = np.rint(255 * shown[:, :3])
            np.testing.assert_array_equal(field, picture)
            there = {(0, 0): FRAME} | {
                tuple(at): colour for at, (_, colour) in zip(place.tolist(), things.tolist(), strict=True)
            }
            expected = [there.get(at, EMPTY) for at in map(tuple, cell.tolist())]
            np.testing.assert_array_equal(names(shown[:, :3]), expected)
            assert (shown[1, :3] == 0).all() == (things[1, 0] != CORNER)


def test_the_frame_of_a_small_field_is_black():
    game = BoxWorld(size=(5, 8), observation="rgb")
    picture = game.observe(game.validate_state({"text": drawn("a ..... ..@.. .bA.. ..... *B...")}, ()))[0, 0]
    expected = np.zeros((10, 10, 3), np.uint8)
    expected[1:6, 1:6] = 220
    expected[0, 0] = expected[3, 3] = (0, 0, 117)
    expected[3, 2] = expected[5, 2] = (230, 190, 255)
    expected[5, 1], expected[2, 3] = 255, 128
    np.testing.assert_array_equal(picture, expected)


def test_colours():
    """As in the paper's code: keys and locks, then gem, agent, empty, frame."""
    expected = (
        "000075 e6beff aaffc3 fffac8 ffd8b1 fabebe f032e6 911eb4 4363d8 42d4f4 3cb44b bfef45 ffff19 f58231 e6194b "
        "800000 9a6324 808000 469990 ffffff 808080 dcdcdc 000000"
    )
    assert [bytes(colour).hex() for colour in PALETTE[: FRAME + 1]] == expected.split()


@pytest.mark.parametrize("move", MOVE)
def test_up_is_up(move, backend):
    """The agent's pixel moves, and all else moves the other way around it."""
    start = drawn("a ..... ..... ..@.. ..... ...bB")
    towards = STEP[MOVE[move]]
    for kind in KINDS:
        game = BoxWorld(size=5, observation=kind)
        state = moved(game.validate_state({"text": start}, ()), backend)
        before, after = (as_numpy(game.observe(one))[0, 0] for one in (state, step(game, state, MOVE[move], backend)))
        if kind == "rgb":
            (was,), (now) = (np.argwhere((picture == 128).all(axis=-1)) for picture in (before, after))
            np.testing.assert_array_equal(now[0] - was, towards)
        else:
            np.testing.assert_allclose(after[1, 3:] - before[1, 3:], -towards / 6, atol=1e-6)
            np.testing.assert_array_equal(after[0], before[0])


@each_kind
@each_view
def test_masks(kind, options, backend):
    game = BoxWorld(**options, observation=kind)
    for state in played(game, 60, 24):
        seen = game.observe(moved(state, backend))[:, 0]
        signal, token = as_numpy(game.signal_mask(seen, moved(state, backend))), as_numpy(game.token_mask(seen))
        assert signal.dtype == token.dtype == bool and signal.shape == token.shape == tuple(seen.shape)[:-1]
        count = (state.objects[..., 1] != ABSENT).sum(axis=1)
        held = state.objects[:, 1, 0] == CORNER
        if kind == "entities":
            np.testing.assert_array_equal(signal, np.arange(game.num_objects) < count[:, None])
            np.testing.assert_array_equal(token, signal)
            continue
        there = np.zeros((60, game.width, game.width), bool)
        for spot, place, number in zip(there, places(game, state), count, strict=True):
            spot[tuple(place[:number].T)] = True
        if kind == "rgb":
            np.testing.assert_array_equal(signal, there)
            row, column = np.indices(token.shape[1:])
            size = state.size[:, None, None]
            inside = (row >= 1) & (column >= 1) & (row <= size) & (column <= size)
            np.testing.assert_array_equal(token, inside | ((row == 0) & (column == 0)))
            continue
        np.testing.assert_array_equal(signal.sum(axis=1), count)
        assert signal[:, 0].all() and (signal[:, 1] == held).all()
        np.testing.assert_array_equal(token, np.arange(token.shape[1]) < state.size[:, None] ** 2 + 1)
        for mask, tokens, spot, size in zip(signal, as_numpy(seen), there, state.size, strict=True):
            cell = np.rint((tokens[mask, 3:] - tokens[1, 3:]) * (size + 1)).astype(int)
            assert spot[tuple(cell.T)].all()
    if kind != "rgb":
        spec = game.token_spec
        assert (spec.query_index, spec.padding_feature, spec.padding, spec.num_features) == (0, 0, -1.0, 5)
        assert spec.features == ("red", "green", "blue", "row", "column") and spec.num_tokens == signal.shape[1]
        np.testing.assert_array_equal(as_numpy(spec.mask(seen)), token)
    else:
        assert not hasattr(game, "token_spec")


@each_kind
@pytest.mark.parametrize(
    "options", [{}, WIDE, {"size": 3, "num_distractors": 0}], ids=["one size", "sizes", "smallest"]
)
def test_observations_are_in_their_space(kind, options):
    env = make(BOX_WORLD, observation=kind, **options)
    env.action_space.seed(0)
    dtype = np.uint8 if kind == "rgb" else np.float32
    game = env.game
    shape = {
        "entities": (game.num_objects, 5),
        "pixels": ((game.width - 2) ** 2 + 1, 5),
        "rgb": (game.width, game.width, 3),
    }
    assert env.observation_space.shape == shape[kind] and env.observation_space.dtype == dtype
    env.reset(seed=0)
    for _ in range(15):
        seen, info = env.reset()
        ended = False
        while not ended:
            assert env.observation_space.contains(seen)
            things = (env.state.objects[:, 1] != ABSENT).sum()
            total = things if kind == "entities" else env.state.size**2 + 1
            assert info["signal_mask"].sum() == things and info["snr"] == things / total
            seen, _, terminated, truncated, info = env.step(env.action_space.sample())
            ended = terminated or truncated
        assert env.observation_space.contains(seen)
        assert info["is_success"] == (env.state.outcome == SOLVED)


def test_kinds_of_observation_play_the_same():
    """What the agent sees changes neither rewards nor ends nor levels."""
    random, seen = np.random.default_rng(0), []
    actions = random.integers(4, size=(60, 200))
    for kind in KINDS:
        envs = gymnasium.make_vec(BOX_WORLD, 200, observation=kind, size=(5, 6), num_distractors=1)
        envs.reset(seed=3, options={"level": np.arange(200)})
        results, states = [], []
        for action in actions:  # over the ends of episodes, too
            results.append(np.array(envs.step(action)[1:4]))
            states.append(envs.state)
        seen.append((np.array(results), states))
    assert (seen[0][0][:, 0] > 1).any() and seen[0][0][:, 1].any() and seen[0][0][:, 2].any()
    for results, states in seen[1:]:
        np.testing.assert_array_equal(results, seen[0][0])
        for ours, theirs in zip(states, seen[0][1], strict=True):
            same(ours, theirs)


# --- policies ---


def test_random_policy(backend):
    game = BoxWorld()
    u = to_backend(np.arange(400, dtype=np.float32)[:, None] / 400, backend)
    actions = as_numpy(game.policy("random", dealt(game, 400), u))
    assert actions.dtype == np.int64 and actions.shape == (400, 1)
    np.testing.assert_array_equal(actions[:, 0], np.repeat(np.arange(4), 100))


@pytest.mark.parametrize(
    "short",
    [
        "b ..... .@... ..... ..*A. .....",  # no lock for the key
        "a @bB.. *A... ..... ..... .....",  # shut in
        "* ..... .@... ..... ..... .....",
        "b ..@.. .cB.. ..... *A... .....",  # a dead end alone
    ],
)
def test_oracle_where_there_is_no_way(short, backend):
    game = BoxWorld(size=5, goal_length=4)
    state = moved(game.validate_state({"text": drawn(short)}, ()), backend)
    action = game.policy("oracle", state, to_backend(np.zeros((1, 1), np.float32), backend))
    assert as_numpy(action).tolist() == [[0]] and as_numpy(action).dtype == np.int64


# --- drawings and errors ---


@each_setting
def test_drawings_are_read_back(options):
    game = BoxWorld(**options)
    state = dealt(game, 500)
    for level, text in zip(game.levels(state), game.render_text(state), strict=True):
        assert box_world_levels.read(text, game.width) == level
        assert box_world_levels.read(text.replace("\n", "  \n  "), game.width) == level
        assert len(text.split("\n")) == level.size + 2
    again = game.validate_state({"text": game.render_text(state)}, (500,))
    same(again, state._replace(level=np.full(500, -1)))


BAD_DRAWINGS = {
    "no square": ("# @.. ... .a", "rows of"),
    "too large": ("# @..... ...... ...... ...... ...... .....a", "expected a square of 3 to 7"),
    "unknown": ("# @.... ..?.. ..... ..... ....a", "'?' in row 2, column 3"),
    "no key of that letter": ("# @.... ..t.. ..... ..... ....a", "'t' in row 2, column 3"),
    "lock alone": ("# @.... ..A.. ..... ..... ....a", "'A' in row 2, column 3"),
    "lock on the left": ("# @.... ..... Ab... ..... .....", "'A' in row 3, column 1"),
    "two locks": ("# @.... ..... bAA.. ..... ....a", "'A' in row 3, column 3"),
    "lock in the next row": ("# @.... ....b A.... ..... .....", "'A' in row 3, column 1"),
    "gem alone": ("# @.... ..*.. ..... ..... ....a", "'*' in row 2, column 3"),
    "gem as lock": ("# @.... b*... ..... ..... ....a", "'*' in row 2, column 2"),
    "frame in the field": ("# @.... ..#.. ..... ..... ....a", "'#' in row 2, column 3"),
    "agent in the corner": ("@ ..... ..... ..... ..... ....a", "'@' in row 0, column 0"),
    "nothing in the corner": (". @.... ..... ..... ..... ....a", "'.' in row 0, column 0"),
    "lock in the corner": ("A @.... ..... ..... ..... ....a", "'A' in row 0, column 0"),
    "no agent": ("# ..... ..... ..... ..... ....a", "expected one agent and one key outside boxes, got 0 and 1"),
    "two agents": ("# @.... @.... ..... ..... ....a", "expected one agent and one key outside boxes, got 2 and 1"),
    "no keys": ("# @.... ..... ..... *A... .....", "expected one agent and one key outside boxes, got 1 and 0"),
    "two keys": ("# @.... b.... ..... ..... ....a", "expected one agent and one key outside boxes, got 1 and 2"),
    "held and loose": ("b @.... ..... ..... ..... ....a", "expected one agent and one key outside boxes, got 1 and 2"),
    "two gems": ("a @.... ..... *A... *B... .....", "expected keys from 0 to 18 (a to s) and at most one gem, 19 (*)"),
    "gem held and boxed": (
        "* @.... ..... *A... ..... .....",
        "expected keys from 0 to 18 (a to s) and at most one gem, 19 (*)",
    ),
    "too many boxes": (
        "a @.... bA... cA... dA... *A...",
        "expected at most 3 boxes (goal_length=2, num_distractors=2, distractor_length=1), got 4",
    ),
    "too small": ("# @.. ... ..a", "expected size=5, got 3"),
}


@pytest.mark.parametrize(("short", "message"), BAD_DRAWINGS.values(), ids=list(BAD_DRAWINGS))
def test_bad_drawings(short, message):
    env = make(BOX_WORLD, size=5)
    env.reset(seed=0)
    before = env.state
    with pytest.raises(ValueError, match=re.escape(message)):
        env.reset(options={"state": {"text": drawn(short)}})
    same(env.state, before)


@pytest.mark.parametrize(
    ("place", "symbol", "message"),
    [
        ((0, 3), "a", "'a' in row 0, column 3"),
        ((0, 3), ".", "'.' in row 0, column 3"),
        ((3, 0), "@", "'@' in row 3, column 0"),
        ((6, 6), "b", "'b' in row 6, column 6"),
        ((6, 3), "A", "'A' in row 6, column 3"),
        ((3, 6), "A", "'A' in row 3, column 6"),  # right of a content
    ],
)
def test_things_on_the_frame(place, symbol, message):
    rows = [list(row) for row in drawn("# @.... ..... ....b ..... ....a").split()]
    rows[place[0]][place[1]] = symbol
    with pytest.raises(ValueError, match=re.escape(message)):
        box_world_levels.read("\n".join(map("".join, rows)), 7)


def test_a_box_in_the_frame():
    with pytest.raises(ValueError, match="'b' in row 2, column 0 is not allowed"):
        box_world_levels.read("#####\n#@.a#\nbA..#\n#...#\n#####", 7)


@pytest.mark.parametrize("text", ["", "#", "##\n##", "###\n#@#", "###\n#@#\n##"])
def test_no_square(text):
    with pytest.raises(ValueError, match="expected a square of 3 to 7"):
        box_world_levels.read(text, 7)


GOOD = Level(5, 8, (9, 0), (Box(22, GEM, 0),))
BAD_LEVELS = {
    "agent on the frame": ({"agent": 3}, "row 0, column 3"),
    "agent right of the field": ({"agent": 13}, "row 1, column 6"),
    "agent far away": ({"agent": 10**6}, "row 142857, column 1"),
    "agent before": ({"agent": -1}, "outside the grid"),
    "key on the frame": ({"key": (6, 0)}, "row 0, column 6"),
    "lock on the frame": ({"boxes": (Box(26, GEM, 0),)}, "row 3, column 6"),
    "content on the frame": ({"boxes": (Box(21, GEM, 0),)}, "row 3, column 0"),
    "agent on the key": ({"agent": 9}, "expected one object per cell"),
    "agent on a content": ({"agent": 22}, "expected one object per cell"),
    "agent on a lock": ({"agent": 23}, "expected one object per cell"),
    "key on a lock": ({"key": (23, 0)}, "expected one object per cell"),
    "boxes on each other": ({"boxes": (Box(22, GEM, 0), Box(23, 1, 0))}, "expected one object per cell"),
    "two gems": (
        {"boxes": (Box(22, GEM, 0), Box(29, GEM, 0))},
        "expected keys from 0 to 18 (a to s) and at most one gem, 19 (*), got [0, 19, 19]",
    ),
    "no colour of a key": (
        {"key": (9, GEM + 1)},
        "expected keys from 0 to 18 (a to s) and at most one gem, 19 (*), got [20, 19]",
    ),
    "a key below 0": (
        {"key": (9, -1)},
        "expected keys from 0 to 18 (a to s) and at most one gem, 19 (*), got [-1, 19]",
    ),
    "a content below 0": (
        {"boxes": (Box(22, -1, 0),)},
        "expected keys from 0 to 18 (a to s) and at most one gem, 19 (*), got [0, -1]",
    ),
    "gem as lock": ({"boxes": (Box(22, 1, GEM),)}, "expected locks and a loose key from 0 to 18, got [19] and 0"),
    "a lock below 0": ({"boxes": (Box(22, 1, -1),)}, "expected locks and a loose key from 0 to 18, got [-1] and 0"),
    "gem loose": ({"key": (9, GEM), "boxes": ()}, "expected locks and a loose key from 0 to 18, got [] and 19"),
}


@pytest.mark.parametrize(("change", "message"), BAD_LEVELS.values(), ids=list(BAD_LEVELS))
def test_bad_levels(change, message):
    box_world_levels.check(GOOD, 7)
    box_world_levels.check(GOOD._replace(key=(CORNER, GEM), boxes=()), 7)
    with pytest.raises(ValueError, match=re.escape(message)):
        box_world_levels.check(GOOD._replace(**change), 7)


BAD_OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"observation": "image"}, "observation='image': expected one of 'entities', 'pixels', 'rgb'"),
    ({"size": 2}, "size=2: expected at least 3"),
    ({"size": (2, 7)}, "size=(2, 7): expected at least 3"),
    ({"size": 33}, "size=33: expected at most 32"),
    ({"size": (7, 33)}, "size=(7, 33): expected at most 32"),
    ({"size": (8, 7)}, "size=(8, 7): expected at least 3 and low <= high"),
    ({"size": 7.0}, "size=7.0: expected an integer"),
    ({"size": True}, "size=True: expected an integer"),
    ({"size": (7, 8, 9)}, "size=(7, 8, 9): expected an integer or a range"),
    ({"goal_length": 1}, "goal_length=1: expected at least 2"),
    ({"goal_length": "2"}, "goal_length='2': expected an integer"),
    ({"num_distractors": -1}, "num_distractors=-1: expected at least 0"),
    ({"num_distractors": (-1, 2)}, "num_distractors=(-1, 2): expected at least 0"),
    ({"distractor_length": 0}, "distractor_length=0: expected at least 1"),
    (
        {"size": 3},
        "size=3, goal_length=2, num_distractors=2, distractor_length=1: expected at most 1 boxes, which fit on size=3",
    ),
    ({"size": (3, 9)}, "expected at most 1 boxes, which fit on size=3, got 3"),
    ({"size": 5, "goal_length": 7, "num_distractors": 0}, "expected at most 5 boxes, which fit on size=5, got 6"),
    ({"goal_length": (2, 4), "num_distractors": (0, 5)}, "expected at most 7 boxes, which fit on size=7, got 8"),
    ({"size": 20, "goal_length": 20, "num_distractors": 1}, "expected at most 19 keys, one of each colour, got 20"),
    ({"start_level": -1}, "start_level=-1: expected at least 0"),
    ({"start_level": (0, 1)}, "start_level=(0, 1): expected an integer"),
    ({"start_level": MAX_SEED}, f"start_level={MAX_SEED}: expected at most {MAX_SEED} - num_levels"),
    ({"start_level": MAX_SEED, "num_levels": 1}, f"start_level={MAX_SEED}: expected at most"),
    ({"num_levels": 0}, "num_levels=0: expected at least 1"),
    ({"num_levels": 1.5}, "num_levels=1.5: expected an integer"),
    ({"max_steps": 0}, "max_steps=0: expected at least 1"),
    ({"max_steps": (1, 2)}, "max_steps=(1, 2): expected an integer"),
    ({"step_cost": "x"}, "step_cost='x': expected a number"),
    ({"step_cost": float("nan")}, "step_cost=nan: expected a finite number"),
    ({"blocked_cost": None}, "blocked_cost=None: expected a number"),
    ({"blocked_cost": float("inf")}, "blocked_cost=inf: expected a finite number"),
    ({"sise": 7}, "did you mean 'size'"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS, ids=[message[:40] for _, message in BAD_OPTIONS])
def test_bad_options(options, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        make(BOX_WORLD, **options)
    if set(options) <= set(BoxWorld.__dataclass_fields__):
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            BoxWorld(**options)
    if set(options) <= set(LevelConfig.__dataclass_fields__):
        config = {"size": 7, "goal_length": 2, "num_distractors": 2, "distractor_length": 1} | options
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            LevelConfig(**config)


@pytest.mark.parametrize(
    "options",
    [
        {"size": 32, "goal_length": 20, "num_distractors": 0},
        {"size": 20, "goal_length": 2, "num_distractors": 9, "distractor_length": 2},
        {"goal_length": 8, "num_distractors": 0},
        {"size": 4, "num_distractors": (0, 0)},
        {"size": [5, np.int64(6)], "step_cost": np.float32(0.5), "num_distractors": np.int64(1)},
    ],
)
def test_limits_of_options(options):
    game = BoxWorld(**options)
    hash(game)
    for level in game.levels(dealt(game, 5)):
        box_world_levels.check(level, game.width)
        assert len(level.boxes) == game.num_boxes


STATE_CHANGES: dict[str, tuple[str, Any, str]] = {
    "events": ("outcome", 6, "outcome=[6]: expected 0 to 5"),
    "no event": ("outcome", -1, "outcome=[-1]: expected 0 to 5"),
    "level": ("level", -2, "level=[-2]: expected at least 0"),
    "size": ("size", 6, "expected size=7, got 6"),
    "outcome": ("box_outcomes", [0, 0, 0], "box_outcomes: expected ["),
    "shape": ("box_outcomes", [0, 0], "box_outcomes: expected integers (3,), got int64 (2,)"),
    "floats": ("objects", np.zeros((8, 2)), "objects: expected integers (8, 2), got float64 (8, 2)"),
    "flags": ("outcome", True, "outcome: expected integers (), got bool ()"),
}


@pytest.mark.parametrize(("field", "value", "message"), STATE_CHANGES.values(), ids=list(STATE_CHANGES))
def test_bad_states(field, value, message):
    env = make(BOX_WORLD)
    env.reset(seed=0)
    before = env.state
    with pytest.raises(ValueError, match=re.escape(message)):
        env.reset(options={"state": before._replace(**{field: np.array(value)})})
    same(env.state, before)


@pytest.mark.parametrize("swap", [[0, 1, 4, 5, 2, 3, 6, 7], [1, 0, *range(2, 8)], [0, 1, 3, 2, *range(4, 8)]])
def test_things_in_another_order(swap):
    env = make(BOX_WORLD)
    env.reset(seed=0)
    with pytest.raises(
        ValueError,
        match=r"(objects|outcomes): expected|outside the grid|one object per cell|from 0 to 18|ordered by cell",
    ):
        env.reset(options={"state": env.state._replace(objects=env.state.objects[swap])})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "state: expected either level or text, got nothing"),
        ({"level": 1, "text": "x"}, "state: expected either level or text, got level, text"),
        ({"number": 1}, "unknown keys ['number']; expected level, text"),
        (5, "state=5: expected a mapping"),
        ({"text": ["", ""]}, "text: expected 1 or 1 levels, got 2"),
    ],
)
def test_bad_starts(given, message):
    env = make(BOX_WORLD)
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        env.reset(options={"state": given})


def test_a_drawing_for_each_world(backend):
    envs = gymnasium.make_vec(BOX_WORLD, 2, size=5, backend=backend)
    drawings = [drawn("a ..... ..@.. .*A.. ..... ....."), drawn("a ..... ..@.. .bA.. ..... *B...")]
    envs.reset(options={"state": {"text": drawings}})
    assert envs.game.render_text(envs.state) == drawings
    seen = envs.step(to_backend(np.array([1, 1]), backend))
    assert as_numpy(seen[1]).tolist() == [10, 1] and as_numpy(seen[2]).tolist() == [True, False]
    envs.reset(options={"state": {"text": drawings[0]}})
    assert envs.game.render_text(envs.state) == [drawings[0]] * 2


@pytest.mark.parametrize(
    "short", ["a ....@ bA... cA... *B... .....", "a ..@.. .bA.. .aB.. .*B.. .....", "a ..@.. .bA.. .bA.. .*B.. ....."]
)
def test_a_state_of_play_is_admitted(short):
    """Also of levels in which a key opens several ways."""
    game = BoxWorld(size=5, goal_length=4, num_distractors=2)
    state = game.validate_state({"text": drawn(short)}, ())
    random = np.random.default_rng(0)
    for _ in range(200):
        state = step(game, state, random.integers(4))
        same(game.validate_state(state, (1,)), state)
        if game.terminated(state)[0]:
            state = game.validate_state({"text": drawn(short)}, ())


def test_a_copy_plays_on():
    game = BoxWorld(**SETTINGS["ranges"])
    state = dealt(game, 20)
    twin = pickle.loads(pickle.dumps(game))
    assert twin == game and hash(twin) == hash(game)
    same(dealt(twin, 20), state)
    same(step(twin, state, [1] * 20), step(game, state, [1] * 20))


def test_a_solved_drawing_is_over():
    env = make(BOX_WORLD, size=3, num_distractors=0)
    _, info = env.reset(options={"state": {"text": "*####\n#@..#\n#...#\n#...#\n#####"}})
    assert info["is_success"]
    with pytest.raises(RuntimeError, match="ended after 0 steps"):
        env.step(0)


def test_a_blocked_move_costs_no_minus_zero():
    game = BoxWorld(size=3, num_distractors=0)
    state = game.transition(game.validate_state({"text": "#####\n#@..#\n#..a#\n#*A.#\n#####"}, ()), np.array([[0]]), ())
    assert state.outcome.tolist() == [1] and not np.signbit(game.reward(state)).any()


def test_cores_share_the_tables_of_pixels():
    tables = [BoxWorld(observation="pixels", size=(5, 9)).tables(np.empty(0)) for _ in range(2)]
    assert all(np.shares_memory(*(table[name] for table in tables)) for name in ("bare", "row"))


@pytest.mark.parametrize("mode", gymnasium.vector.AutoresetMode)
def test_a_world_that_ends_in_the_last_step_of_a_foreign_limit(mode, backend):
    """As Gymnasium's TimeLimit around one world says it: both flags. The game's own limit sets one."""
    drawn = "#####\n#@a.#\n#...#\n#*A.#\n#####"
    for limit in ({"max_episode_steps": 4}, {"max_steps": 4}):
        options = {"size": 3, "num_distractors": 0, **limit}
        native = gymnasium.make_vec(BOX_WORLD, 1, backend=backend, autoreset_mode=mode, **options)
        sync = gymnasium.make_vec(BOX_WORLD, 1, "sync", vector_kwargs={"autoreset_mode": mode}, **options)
        flags = []
        for envs, kind in ((native, backend), (sync, "numpy")):
            envs.reset(options={"state": {"text": drawn}})
            for action in (3, 0, 1, 1):  # a key, a blocked move, a step, the gem
                _, _, terminated, truncated, _ = envs.step(to_backend(np.array([action]), kind))
            flags.append((bool(terminated[0]), bool(truncated[0])))
        assert flags == [(True, "max_episode_steps" in limit)] * 2


def test_known_levels_are_those_that_the_bank_holds():
    """Whatever their numbers; and a bank may be smaller than the field has levels."""
    options = {"size": 3, "num_distractors": 0, "max_steps": 3}
    envs = gymnasium.make_vec(BOX_WORLD, 200, **options, num_levels=1000)
    envs.reset(seed=0)
    asked = [box_world_levels.draw_level(envs.game.level_config, int(number)) for number in envs.state.level]
    for first in (0, 5000):
        game = BoxWorld(**options, start_level=first, num_levels=200)
        bank = {box_world_levels.draw_level(game.level_config, number) for number in range(first, first + 200)}
        share = np.mean([level in bank for level in asked])
        assert 0 < share < 1 and game.known_share(envs.game.render_text(envs.state)) == pytest.approx(share)
