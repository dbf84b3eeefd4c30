"""BoxWorld's noise: levels stay as they are and can be solved, and only the documented cue tells signal from noise."""

import re
from collections import Counter
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import pytest
from helpers import make, to_backend
from test_box_world import BOX_WORLD, MOVE, check_solutions, dealt, drawn, moved, same, step

from noisy_envs.arrays import as_numpy
from noisy_envs.games.box_world import BLOCKED, MOVED, PALETTE, TOOK_KEY, BoxWorld, State
from noisy_envs.games.box_world_levels import ABSENT, CLUTTER, CORNER, GEM, KEYS, flood, grid_cells, grow

DECOYS = {"noise_role": "signal"}
KINDS: dict[str, dict[str, Any]] = {
    "still clutter": {},
    "clutter": {"noise_motion": "wander"},
    "decoys": DECOYS,
    "clutter like signal": {"noise_role": "signal", "noise_motion": "wander"},
}
LEVELS: dict[str, dict[str, Any]] = {
    "paper": {"num_noise": 6},
    "crowded": {"num_noise": 20},
    "chains": {"size": 12, "goal_length": 4, "num_distractors": 3, "distractor_length": 2, "num_noise": 12},
    "smallest": {"size": 3, "num_distractors": 0, "num_noise": 2},
    "ranges": {"size": (7, 9), "goal_length": (2, 4), "num_distractors": (0, 2), "num_noise": (0, 9)},
}
each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
each_level = pytest.mark.parametrize("options", LEVELS.values(), ids=list(LEVELS))
each_view = pytest.mark.parametrize("view", ["entities", "pixels", "rgb"])


def playing(game: BoxWorld, count: int, steps: int, backend: str = "numpy") -> list[State]:
    """Return the states of play that mostly finds its way; noise moves by the same random numbers in both libraries."""
    random, states = np.random.default_rng(5), [dealt(game, count)]
    for _ in range(steps):
        best = game.policy("oracle", states[-1], np.zeros((count, 1)))[:, 0]
        action = np.where(random.random(count) < 0.5, best, random.integers(4, size=count))[:, None]
        u = tuple(random.random((count, n), dtype=np.float32) for n in game.num_step_uniforms)
        randomness = game.sample_randomness(tuple(to_backend(x, backend) for x in u))
        after = game.transition(moved(states[-1], backend), to_backend(action, backend), randomness)
        states.append(State(*map(as_numpy, after)))
    return states


# --- levels ---


@each_kind
@each_level
def test_levels_are_those_without_noise(options, kind):
    plain = {name: value for name, value in options.items() if name != "num_noise"}
    ours, theirs = (dealt(BoxWorld(**x), 100) for x in (options | kind, plain))
    same(State(*ours[:-1], 0), State(*theirs[:-1], 0))


@each_view
@pytest.mark.parametrize("name", [name for name in KINDS if name != "decoys"])
def test_play_is_that_without_noise(view, name):
    """Clutter blocks nothing, so the same actions lead to the same states and rewards."""
    plain, noisy = (
        gymnasium.make_vec(BOX_WORLD, 100, observation=view, **x) for x in ({}, {"num_noise": 20, **KINDS[name]})
    )
    for envs in (plain, noisy):
        envs.reset(seed=2)
    for action in np.random.default_rng(0).integers(4, size=(60, 100)):
        results = [envs.step(action)[1:4] for envs in (plain, noisy)]
        np.testing.assert_array_equal(*map(np.array, results))
        same(State(*plain.state[:-1], 0), State(*noisy.state[:-1], 0))


@each_kind
def test_the_first_entities_stay_when_more_are_added(kind):
    few, many = (dealt(BoxWorld(num_noise=n, **kind), 200).noise for n in (3, 9))
    np.testing.assert_array_equal(few, many[:, : few.shape[1]])
    ranged = dealt(BoxWorld(num_noise=(2, 9), **kind), 200).noise
    present = ranged[..., 1] != ABSENT
    np.testing.assert_array_equal(ranged[present], many[present])
    assert present.sum(axis=1).min() < present.sum(axis=1).max()


def test_clutter_moves_the_same_when_more_is_added():
    few, many = (gymnasium.make_vec(BOX_WORLD, 50, num_noise=n, noise_motion="wander") for n in (3, 9))
    for envs in (few, many):
        envs.reset(seed=1)
    for action in np.random.default_rng(0).integers(4, size=(20, 50)):
        for envs in (few, many):
            envs.step(action)
        np.testing.assert_array_equal(few.state.noise, many.state.noise[:, :3])
        same(State(*few.state[:-1], 0), State(*many.state[:-1], 0))


@each_kind
@each_level
def test_where_noise_lies(options, kind):
    game = BoxWorld(**options, **kind)
    state = dealt(game, 300)
    counts = Counter()
    for level, tokens in zip(game.levels(state), state.noise.tolist(), strict=True):
        grid, boxes = grid_cells(level.size, game.width), sum(3 << box.cell for box in level.boxes)
        present = [(cell, colour) for cell, colour in tokens if colour != ABSENT]
        cells = [cell for cell, _ in present]
        assert len(set(cells)) == len(cells)
        assert all((grid & ~(boxes | 1 << level.agent | 1 << level.key[0])) >> cell & 1 for cell in cells)
        assert all(cell == game.nowhere for cell, colour in tokens if colour == ABSENT)
        pairs = [
            tokens[i : i + game.noise_config.tokens_each] for i in range(0, len(tokens), game.noise_config.tokens_each)
        ]
        counts[sum(pair[0][1] != ABSENT for pair in pairs)] += 1
        if kind is not DECOYS:
            continue
        walls = [3 << pair[0][0] for pair in pairs if pair[1][1] != ABSENT]
        assert all(pair[1][0] == pair[0][0] + 1 for pair in pairs if pair[1][1] != ABSENT)
        solid = boxes | sum(walls)
        assert not any(grow(wall, game.width) & ((solid & ~wall) | 1 << level.key[0]) for wall in walls)
        floor = grid & ~solid
        assert flood(1 << level.agent, floor, game.width) == floor
    low, high = np.broadcast_to(options["num_noise"], 2)
    assert set(counts) == set(range(low, high + 1))


@each_level
def test_decoys_open_nothing(options):
    game = BoxWorld(**options, **DECOYS)
    state = dealt(game, 300)
    boxes = 0
    for level, tokens in zip(game.levels(state), state.noise.tolist(), strict=True):
        colours = [(first[1], second[1]) for first, second in zip(tokens[::2], tokens[1::2], strict=True)]
        loose = {colour for colour, lock in colours if lock == ABSENT} - {ABSENT}
        locks = {lock for _, lock in colours} - {ABSENT}
        assert not loose & ({box.lock for box in level.boxes} | locks) and GEM not in loose
        assert not locks & {level.key[1], *(box.content for box in level.boxes)}
        boxes += sum(lock != ABSENT for _, lock in colours)
    assert boxes or options == LEVELS["smallest"]


@each_level
def test_levels_with_decoys_are_solved(options):
    """In the fewest steps, as a search of all ways finds."""
    check_solutions({**options, **DECOYS}, 150)


@each_kind
def test_the_oracle_is_paid_as_without_noise(kind):
    envs = gymnasium.make_vec(BOX_WORLD, 300, num_noise=8, max_steps=200, autoreset_mode="Disabled", **kind)
    envs.reset(seed=0)
    total, ended = np.zeros(300), np.zeros(300, bool)
    while not ended.all():
        actions = envs.game.policy("oracle", envs.state, np.zeros((300, 1)))[:, 0]
        _, reward, terminated, truncated, _ = envs.step(actions)
        total, ended = total + reward * ~ended, ended | terminated | truncated
        if ended.any():
            envs.reset(options={"reset_mask": terminated | truncated})
    assert (total == 11).all()


# --- the rules of decoys ---

FIELD = "# ..... ..@.. ..... ..... *A..a"


def with_decoys(game: BoxWorld, text: str, *decoys: tuple[int, ...]) -> State:
    """Return a level with decoys: row, column and colour of a key; of a box the colour of the lock, too."""
    state = game.validate_state({"text": drawn(text)}, ())
    noise = np.full_like(state.noise, (game.nowhere, ABSENT))
    for i, (row, column, colour, *lock) in enumerate(decoys):
        noise[0, 2 * i] = row * game.width + column, colour
        if lock:
            noise[0, 2 * i + 1] = row * game.width + column + 1, *lock
    return game.validate_state(state._replace(noise=noise), (1,))


RULES = {  # decoys, moves, outcomes, colour in the corner at the end
    "picked up": ([(2, 2, 5)], "L", [MOVED], 5),
    "the next decoy replaces it": ([(2, 2, 5), (2, 1, 6)], "LL", [MOVED, MOVED], 6),
    "the key replaces it": ([(3, 3, 5)], "DRRDD", [MOVED, MOVED, MOVED, MOVED, TOOK_KEY], 0),
    "not taken for the key": ([(5, 4, 5)], "RRDDDL", [MOVED] * 4 + [TOOK_KEY, MOVED], 0),
    "lock blocks": ([(3, 2, 5, 6)], "D", [BLOCKED], None),
    "content blocks": ([(3, 3, 5, 6)], "D", [BLOCKED], None),
    "content blocks from the left": ([(2, 4, 5, 6)], "R", [BLOCKED], None),
    "its key does not open it": ([(2, 2, 5), (2, 4, 6, 5)], "LRUR", [MOVED, MOVED, MOVED, MOVED], 5),
    "a gem blocks": ([(3, 3, GEM, 6)], "D", [BLOCKED], None),
}


@pytest.mark.parametrize(("decoys", "moves", "outcomes", "corner"), RULES.values(), ids=list(RULES))
def test_rules_of_decoys(decoys, moves, outcomes, corner, backend):
    game = BoxWorld(size=5, num_noise=3, **DECOYS)
    state = moved(with_decoys(game, FIELD, *decoys), backend)
    for move, outcome in zip(moves, outcomes, strict=True):
        before, state = state, step(game, state, MOVE[move], backend)
        assert state.outcome[0] == outcome and game.reward(state)[0, 0] == (outcome == TOOK_KEY)
        if outcome == BLOCKED:
            same(State(*before[:-2], 0, before.noise), State(*state[:-2], 0, state.noise))
    tokens = np.concatenate([as_numpy(state.objects[0, 1:]), as_numpy(state.noise[0])])
    assert tokens[tokens[:, 0] == CORNER, 1].tolist() == ([] if corner is None else [corner])
    same(game.validate_state(State(*map(as_numpy, state)), (1,)), state)


def test_a_key_in_the_hand_is_not_lost_to_a_decoy(backend):
    game = BoxWorld(size=5, num_noise=1, **DECOYS)
    start = with_decoys(game, "a ..... ..@.. ..... ..... *A...", (2, 2, 5))
    state = step(game, moved(start, backend), MOVE["L"], backend)
    assert state.objects[0, 0, 0] == 2 * game.width + 2 and state.objects[0, 1].tolist() == [CORNER, 0]
    np.testing.assert_array_equal(as_numpy(state.noise), start.noise)


# --- the motion of clutter ---


@pytest.mark.parametrize("role", ["own", "signal"])
def test_clutter_wanders_over_free_cells(role, backend):
    game = BoxWorld(num_noise=8, noise_role=role, noise_motion="wander")
    states = playing(game, 100, 20, backend)
    rested, steps = 0, Counter()
    for before, after in pairwise(states):
        np.testing.assert_array_equal(before.noise[..., 1], after.noise[..., 1])
        apart = after.noise[..., 0] - before.noise[..., 0]
        assert np.isin(apart, [0, 1, -1, game.width, -game.width]).all()
        went = apart != 0
        onto = (after.noise[..., 0, None] == after.objects[:, None, :, 0]).any(axis=-1)
        assert not (onto & went).any()
        rested += (~went).sum()
        steps.update(apart.ravel().tolist())
        same(game.validate_state(after, (100,)), after)
    ways = [steps[x] for x in (1, -1, game.width, -game.width)]
    assert min(ways) > 0.9 * max(ways) and 0 < rested < 0.5 * sum(ways)


def test_both_libraries_move_and_show_noise_alike():
    pytest.importorskip("torch")
    for view in ("entities", "pixels", "rgb"):
        for kind in KINDS.values():
            game = BoxWorld(observation=view, size=(5, 7), num_distractors=1, num_noise=(0, 9), **kind)
            for ours, theirs in zip(playing(game, 60, 12), playing(game, 60, 12, "torch"), strict=True):
                same(ours, theirs)
                seen = game.observe(ours), game.observe(moved(theirs, "torch"))
                np.testing.assert_array_equal(seen[0], as_numpy(seen[1]))
                masks = [
                    game.signal_mask(x[:, 0], y) for x, y in zip(seen, (ours, moved(theirs, "torch")), strict=True)
                ]
                np.testing.assert_array_equal(masks[0], as_numpy(masks[1]))


# --- what the agent sees ---


@each_view
@each_kind
def test_every_view_shows_noise_and_marks_signal(view, kind, backend):
    game = BoxWorld(observation=view, size=(5, 7), num_distractors=1, num_noise=(0, 8), **kind)
    hidden = shown = 0
    for state in playing(game, 80, 20)[::4]:
        like = moved(state, backend)
        seen = game.observe(like)
        mask, seen = as_numpy(game.signal_mask(seen[:, 0], like)), as_numpy(seen[:, 0])
        for i in range(80):
            objects = {cell: colour for cell, colour in state.objects[i].tolist() if colour != ABSENT}
            noise = [(cell, colour) for cell, colour in state.noise[i].tolist() if colour != ABSENT]
            size, agent = state.size[i], state.objects[i, 0, 0]
            if view == "rgb":
                colours, cells = seen[i].reshape(-1, 3), np.arange(game.width**2)
            else:
                tokens = seen[i][seen[i][:, 0] >= 0]
                mask_of = mask[i][seen[i][:, 0] >= 0]
                row, column = (np.rint(tokens[:, 3:] * (size + 1)).astype(int) + np.divmod(agent, game.width)).T
                colours, cells = np.rint(255 * tokens[:, :3]), row * game.width + column
            if view == "entities":
                pairs = [(*divmod(cell, 1), tuple(PALETTE[colour])) for cell, colour in [*objects.items(), *noise]]
                assert Counter(zip(cells.tolist(), map(tuple, colours.astype(int).tolist()), strict=True)) == Counter(
                    (cell, colour) for cell, _, colour in pairs
                )
                assert mask_of.tolist() == [True] * len(objects) + [False] * len(noise)
                continue
            marks = mask[i].ravel() if view == "rgb" else mask_of
            assert set(cells[marks].tolist()) == set(objects)
            expected = dict(noise[::-1]) | objects  # the first hides the others, and objects hide all
            for cell, colour in expected.items():
                np.testing.assert_array_equal(colours[cells == cell], PALETTE[colour][None])
            shown += len(set(dict(noise)) - set(objects))
            hidden += len(noise) - len(set(dict(noise)) - set(objects))
    assert view == "entities" or shown
    assert hidden or view == "entities" or not game.noise_config.wanders


def tokens_of(view: str, kind: dict[str, Any], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return features and labels, signal or not, of all tokens in the colours of keys, locks, gem and clutter."""
    game = BoxWorld(observation=view, num_noise=8, **kind)
    state = dealt(game, count)
    tokens = game.observe(state)[:, 0]
    mask = game.signal_mask(tokens, state)
    look = np.rint(255 * tokens[..., :3]).astype(int)
    coloured = (look[..., None, :] == PALETTE[[*range(GEM + 1), CLUTTER]]).all(axis=-1).any(axis=-1)
    return tokens[coloured], mask[coloured]


def accuracy(features: np.ndarray, signal: np.ndarray) -> float:
    """Return the balanced accuracy of the 15 nearest neighbours on the second half of shuffled tokens."""
    order = np.random.default_rng(0).permutation(len(features))
    features, signal = features[order], signal[order]
    half = len(features) // 2
    scale = np.array([10, 10, 10, 1, 1], np.float32)  # near in colour first
    ours, theirs = features[half:] * scale, features[:half] * scale
    distance = (ours**2).sum(1)[:, None] - 2 * ours @ theirs.T + (theirs**2).sum(1)
    near = np.argpartition(distance, 15, axis=1)[:, :15]
    says = signal[:half][near].mean(axis=1) > signal[:half].mean()
    return float((says[signal[half:]].mean() + 1 - says[~signal[half:]].mean()) / 2)


@pytest.mark.parametrize("view", ["entities", "pixels"])
@each_kind
def test_a_single_token_tells_noise_only_by_its_own_colour(view, kind):
    """At the start, before play has moved the agent to real keys."""
    share = accuracy(*tokens_of(view, kind, 500))
    assert share > 0.99 if kind.get("noise_role") != "signal" else abs(share - 0.5) < 0.04


def test_motion_tells_clutter_that_looks_like_signal():
    game = BoxWorld(num_noise=8, noise_role="signal", noise_motion="wander")
    before, after = playing(game, 300, 4)[::4]
    here, there = (np.divmod(np.concatenate([s.objects, s.noise], axis=1)[..., 0], game.width) for s in (before, after))
    kept = (here[0] == there[0]) & (here[1] == there[1])
    noise = np.arange(kept.shape[1]) >= game.num_objects
    assert kept[:, noise].mean() < 0.3 and kept[:, 2 : game.num_objects].mean() > 0.9


@each_kind
def test_colours_of_noise(kind):
    noise = dealt(BoxWorld(num_noise=10, **kind), 1500).noise
    colour = noise[..., 1][noise[..., 1] != ABSENT]
    if kind.get("noise_role") != "signal":
        assert set(colour.tolist()) == {CLUTTER}
        return
    counts = np.bincount(colour, minlength=GEM + 1)
    assert len(counts) == GEM + 1 and counts[:KEYS].min() > 0.8 * counts[:KEYS].max()
    if kind is DECOYS:  # contents are the gem as often as in the level
        lock = noise[:, 1::2, 1]
        assert (noise[:, ::2, 1][lock != ABSENT] == GEM).mean() == pytest.approx(1 / 3, abs=0.03)
        assert not (noise[:, ::2, 1][lock == ABSENT] == GEM).any()
    else:
        assert counts[GEM] / counts.sum() == pytest.approx(1 / 7, abs=0.02)


def test_text_shows_noise_and_is_read_without_it():
    game = BoxWorld(num_noise=6, **DECOYS)
    state = dealt(game, 50)
    texts = game.render_text(state)
    assert sum(text.count("%") for text in texts) == (state.noise[..., 1] != ABSENT).sum()
    same(
        State(*game.validate_state({"text": texts}, (50,))[:-1], 0),
        State(*state._replace(level=np.full(50, -1))[:-1], 0),
    )
    few = BoxWorld(size=3, num_distractors=0, num_levels=100, num_noise=2, **DECOYS)
    assert few.known_share(few.render_text(dealt(few, 200))) >= 0.5  # of the levels after the bank some equal one of it
    assert few.known_share(few.render_text(dealt(few, 100))) == 1


def test_a_held_decoy_is_drawn_in_the_corner():
    game = BoxWorld(size=5, num_noise=1, **DECOYS)
    state = step(game, with_decoys(game, FIELD, (2, 2, 5)), MOVE["L"])
    assert game.render_text(state) == [drawn("% ..... .@... ..... ..... *A..a")]


@each_kind
def test_levels_lie_on_the_device_with_their_noise(kind):
    torch = pytest.importorskip("torch")
    game, like = BoxWorld(num_noise=4, num_levels=50, **kind), torch.empty(0, dtype=torch.int64)
    game.prepare(like)
    words = torch.zeros((50, 2)), torch.arange(50) * 2.0**-24
    state = game.initial((torch.stack([words[0][:, 0], words[1]], dim=1),))
    same(state, dealt(game, 50))


# --- errors ---

BAD: list[tuple[dict[str, Any], str]] = [
    ({"num_noise": -1}, "num_noise=-1: expected at least 0"),
    ({"num_noise": 1.5}, "num_noise=1.5: expected an integer"),
    ({"num_noise": (3, 1)}, "num_noise=(3, 1): expected at least 0 and low <= high"),
    ({"noise_role": "other"}, "noise_role='other': expected one of 'own', 'signal'"),
    ({"noise_motion": "follow"}, "noise_motion='follow': expected one of 'still', 'wander'"),
    ({"num_noise": 42}, "num_noise=42: expected at most 41, which fit on size=7 with 3 boxes"),
    ({"num_noise": (0, 21), **DECOYS}, "num_noise=(0, 21): expected at most 20, which fit on size=7 with 3 boxes"),
    (
        {"size": 20, "num_distractors": 17, "num_noise": 1, **DECOYS},
        "num_noise=1: expected 0 with 18 boxes: decoys allow at most 17",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_options(options, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        make(BOX_WORLD, **options)


@pytest.mark.parametrize("options", [{"num_noise": 41}, {"num_noise": 20, **DECOYS}, {"noise_role": "signal"}])
def test_limits_of_options(options):
    game = BoxWorld(**options)
    tokens = dealt(game, 200).noise
    assert ((tokens[:, :: game.noise_config.tokens_each, 1] != ABSENT).sum(axis=1) == game.num_noise).all()


BAD_NOISE = {
    "outside": [[3, 5], [80, ABSENT]],
    "beyond": [[10**6, 5], [80, ABSENT]],
    "negative": [[-1, 5], [80, ABSENT]],
    "no colour": [[-2, 99], [80, ABSENT]],
    "lock apart": [[20, 5], [22, 6]],
    "gem lock": [[20, 5], [21, GEM]],
    "lock alone": [[80, ABSENT], [20, 5]],
    "loose gem": [[20, GEM], [80, ABSENT]],
    "absent in the grid": [[20, ABSENT], [80, ABSENT]],
}


@pytest.mark.parametrize("tokens", BAD_NOISE.values(), ids=list(BAD_NOISE))
def test_bad_noise_is_refused(tokens):
    game = BoxWorld(num_noise=1, **DECOYS)
    state = game.validate_state({"text": drawn("# ....... ...@... ....... ....... ....... ....... *A....a")}, ())
    with pytest.raises(ValueError, match="noise: expected still noise in free cells"):
        game.validate_state(state._replace(noise=np.array([tokens])), (1,))
    for place in (2 * 9 + 4, 7 * 9 + 1, 7 * 9 + 2, 7 * 9 + 7):  # on agent, content, lock, key
        with pytest.raises(ValueError, match="noise: expected still noise in free cells"):
            game.validate_state(state._replace(noise=np.array([[[place, 5], [80, ABSENT]]])), (1,))
