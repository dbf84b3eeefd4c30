"""Ends that a game brings about itself, in each view of it; their pictures; and what the agent makes of them."""

import dataclasses
import re
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
from cases import IDS
from gymnasium.vector import AutoresetMode
from helpers import assert_same, load_agent, make, to_backend

from noisy_envs import ENVIRONMENTS
from noisy_envs.arrays import as_numpy
from noisy_envs.baselines import baseline_returns, play_baseline
from noisy_envs.games.box_world import BoxWorld, State
from noisy_envs.interfaces.pettingzoo_env import ParallelTokenEnv
from noisy_envs.interfaces.vector_env import TokenVectorEnv
from noisy_envs.registration import GAMES, eval_levels
from noisy_envs.rendering import renderer
from noisy_envs.rendering.renderer import GEM_CELL, SCENES, Board, Renderer, paint

BOX_WORLD = "noisy_envs/BoxWorld-v0"
LEFT = 2
BAND = round(renderer.BAND * 600)  # pixels
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
each_mode = pytest.mark.parametrize("mode", AutoresetMode, ids=lambda mode: mode.name)
each_auto_mode = pytest.mark.parametrize("mode", [NEXT_STEP, SAME_STEP], ids=lambda mode: mode.name)


def drawn(row: str, corner: str = "a") -> str:
    """Draw a field of 7×7 cells, empty but for its first row."""
    return "\n".join([corner + "#" * 8, f"#{row}#", *["#.......#"] * 6, "#" * 9])


# one step to the left solves the first, ends the second, and takes the key of the third
STARTS = {"gem": drawn(".*A@.bA"), "distractor": drawn(".bA@.*A"), "key": drawn(".a@..*A", "#")}
EVENTS = {"gem": (10.0, True), "distractor": (-1.0, True), "key": (1.0, False)}
each_start = pytest.mark.parametrize("start", STARTS)


def native(num_envs: int, mode: AutoresetMode, **options: Any) -> gymnasium.vector.VectorEnv:
    return gymnasium.make_vec(BOX_WORLD, num_envs, autoreset_mode=mode, **options)


@each_start
@pytest.mark.parametrize("limit", [1, 30])
def test_parallel_view_tells_the_end(start, limit):
    env = ParallelTokenEnv("box_world", max_steps=limit)
    paid, over = EVENTS[start]
    for _ in range(2):  # the second episode begins as the first
        _, infos = env.reset(seed=0, options={"state": {"text": STARTS[start]}})
        assert env.agents == ["agent_0"] and infos["agent_0"]["is_success"] is False
        tokens, *told, infos = env.step({"agent_0": LEFT})
        assert told == [{"agent_0": paid}, {"agent_0": over}, {"agent_0": limit == 1 and not over}]
        assert infos["agent_0"]["is_success"] is (start == "gem")
        mask = env.game.token_mask(tokens["agent_0"])  # all entities are signal
        np.testing.assert_array_equal(infos["agent_0"]["signal_mask"], mask)
        assert infos["agent_0"]["snr"] == mask.sum() / (tokens["agent_0"][:, 0] >= 0).sum()
        assert env.agents == ([] if over or limit == 1 else ["agent_0"])
        if not env.agents:
            assert env.step({}) == ({}, {}, {}, {}, {})


@each_mode
@pytest.mark.parametrize("learners", ["first", "all"])
def test_an_end_is_told_once(mode, learners, backend):
    envs = native(3, mode, max_steps=2, backend=backend, learners=learners)
    _, info = envs.reset(seed=0, options={"state": {"text": list(STARTS.values())}})
    assert not as_numpy(info["is_success"]).any() and as_numpy(info["_is_success"]).all()
    lefts = to_backend(np.full(envs.action_space.shape, LEFT), backend)
    _, reward, terminated, truncated, info = envs.step(lefts)
    assert as_numpy(reward).ravel().tolist() == [10, -1, 1]
    assert as_numpy(terminated).tolist() == [True, True, False] and not as_numpy(truncated).any()
    if mode is SAME_STEP:
        for part in (info["final_info"]["_is_success"], info["_final_info"], info["_final_obs"]):
            assert as_numpy(part).tolist() == [True, True, False]
        assert as_numpy(info["final_info"]["is_success"]).tolist() == [True, False, False]
        assert not as_numpy(info["is_success"]).any()
    else:
        assert as_numpy(info["is_success"]).tolist() == [True, False, False]
    if mode is DISABLED:
        with pytest.raises(RuntimeError, match=r"environments \[0, 1\] have ended"):
            envs.step(lefts)
        _, info = envs.reset(options={"reset_mask": as_numpy(terminated)})
        assert as_numpy(info["_is_success"]).tolist() == [True, True, False]
        assert not as_numpy(info["is_success"]).any()
    _, reward, terminated, truncated, info = envs.step(lefts)
    assert envs.episodes[1].tolist() == [1, 1, int(mode is SAME_STEP)]
    assert as_numpy(truncated).tolist() == [False, False, True] and not as_numpy(terminated).any()
    assert not as_numpy(info["is_success"]).any() and not as_numpy(reward).any()


@each_mode
def test_equals_vector_of_singles_that_are_solved(mode):
    both = (
        native(4, mode, size=5, max_steps=12),
        gymnasium.make_vec(BOX_WORLD, 4, "sync", vector_kwargs={"autoreset_mode": mode}, size=5, max_steps=12),
    )
    random, kinds = np.random.default_rng(0), set()
    assert_same(*(envs.reset(seed=5) for envs in both))
    for t in range(80):
        best = both[0].game.policy("oracle", both[0].state, np.zeros((4, 1)))[:, 0]
        actions = np.where(random.random(4) < (0.9, 0.8, 0.5, 0), best, random.integers(4, size=4))
        ours, theirs = (envs.step(actions) for envs in both)
        assert_same(ours, theirs, f"step {t}")
        told = ours[-1].get("final_info", ours[-1])["is_success"]
        kinds |= set(zip(*(x.tolist() for x in (*ours[2:4], told)), strict=True))
        if mode is DISABLED and (over := ours[2] | ours[3]).any():
            assert_same(*(envs.reset(options={"reset_mask": over}) for envs in both), f"reset {t}")
    assert kinds >= {(False, False, False), (True, False, True), (False, True, False)}


@each_mode
@each_start
def test_a_time_limit_of_make_vec_is_gymnasiums(start, mode):
    """Its wrapper around a single world says truncated at a terminated end too; the game's own limit does not."""
    seen = []
    for kwargs in ({"autoreset_mode": mode}, {"vectorization_mode": "sync", "vector_kwargs": {"autoreset_mode": mode}}):
        envs = gymnasium.make_vec(BOX_WORLD, 2, max_episode_steps=1, **kwargs)
        envs.reset(seed=0, options={"state": {"text": STARTS[start]}})
        seen.append(envs.step(np.full(2, LEFT)))
        assert [x.tolist() for x in seen[-1][2:4]] == [[EVENTS[start][1]] * 2, [True] * 2]
    assert_same(*seen)


@each_auto_mode
@each_start
def test_an_end_of_all_worlds_at_once(start, mode, backend):
    envs = native(2, mode, backend=backend, observation="pixels")
    envs.reset(seed=0, options={"state": {"text": STARTS[start]}})
    lefts = to_backend(np.full(2, LEFT), backend)
    *_, info = envs.step(lefts)
    assert as_numpy(info["is_success"]).tolist() == [start == "gem" and mode is NEXT_STEP] * 2
    if mode is NEXT_STEP:
        *_, info = envs.step(lefts)
    assert not as_numpy(info["is_success"]).any()
    state = State(*map(as_numpy, envs.state))
    assert_same(as_numpy(info["signal_mask"]), envs.game.signal_mask(envs.game.observe(state)[:, 0], state))


@each_start
def test_a_finished_world_is_not_played_on(start, backend):
    """Not even where a reset asks for it."""
    env = make(BOX_WORLD)
    env.reset(options={"state": {"text": STARTS[start]}})
    before = env.state
    assert env.step(LEFT)[1:3] == EVENTS[start]
    over, given = EVENTS[start][1], env.state
    _, info = env.reset(seed=3, options={"state": given})
    assert info["is_success"] is (start == "gem")
    if over:
        with pytest.raises(RuntimeError, match="ended after 0 steps"):
            env.step(LEFT)
    assert env.reset()[1]["is_success"] is False
    env.step(LEFT)
    for mode in AutoresetMode:
        envs = native(2, mode, backend=backend)
        pair = type(given)._make(np.stack(fields) for fields in zip(before, given, strict=True))
        _, info = envs.reset(seed=3, options={"state": pair})
        assert as_numpy(info["is_success"]).tolist() == [False, start == "gem"]
        actions = to_backend(np.array([1, 1]), backend)
        if over and mode is DISABLED:
            with pytest.raises(RuntimeError, match=r"environments \[1\] have ended"):
                envs.step(actions)
            continue
        _, reward, terminated, _, info = envs.step(actions)
        assert not as_numpy(reward).any() and not as_numpy(terminated | info["is_success"]).any()
        assert envs.episodes[1].tolist() == [0, int(over)]


@each_start
def test_actions_of_a_finished_world_are_not_looked_at(start, backend):
    envs = native(2, NEXT_STEP, backend=backend, check_actions=True)
    envs.reset(seed=0, options={"state": {"text": [STARTS["key"], STARTS[start]]}})
    envs.step(to_backend(np.array([LEFT, LEFT]), backend))
    senseless = to_backend(np.array([LEFT, -7]), backend)
    if EVENTS[start][1]:
        envs.step(senseless)
        assert envs.episodes[1].tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"expected 0 to 3, got .* in environment 1"):
        envs.step(senseless)


@each_auto_mode
def test_pictures_before_and_after_an_end(mode):
    """Of worlds that end at different times: steps and return in the caption, too."""
    options = {"render_mode": "rgb_array", "max_steps": 2}
    envs = native(3, mode, **options)
    singles = [make(BOX_WORLD, **options) for _ in STARTS]
    envs.reset(seed=0, options={"state": {"text": list(STARTS.values())}})
    for i, (env, text) in enumerate(zip(singles, STARTS.values(), strict=True)):
        env.reset(seed=i, options={"state": {"text": text}})
    for _ in range(4):
        envs.step(np.full(3, LEFT))
        for env in singles:
            waits = mode is NEXT_STEP and env._episode.ended
            if not waits:
                env.step(LEFT)
            if waits or (mode is SAME_STEP and env._episode.ended):
                env.reset()
        for frame, env in zip(envs.render(), singles, strict=True):
            np.testing.assert_array_equal(frame, env.render())


@pytest.mark.parametrize("game", GAMES)
def test_modes_of_drawing_are_the_games(game):
    modes = list(GAMES[game]().render_modes)
    assert ("ansi" in modes) == (game == "box_world")
    (env_id, *_) = (env_id for env_id, (name, _) in ENVIRONMENTS.items() if name == game)
    assert make(env_id).metadata["render_modes"] == ParallelTokenEnv(game).metadata["render_modes"] == modes
    assert TokenVectorEnv(game).metadata["render_modes"] == ["rgb_array"]
    offered = re.escape(f"possible render_modes ({modes})")
    with pytest.warns(UserWarning, match=offered), pytest.raises(ValueError, match="render_mode='rgb': expected one"):
        gymnasium.make(env_id, render_mode="rgb")
    for mode in (*modes, "rgb_array_list"):
        gymnasium.make(env_id, render_mode=mode)


# --- references and levels ---


def test_references_count_one_episode_of_each_world_by_its_seed():
    options = {"size": 5, "step_cost": 0.125, "max_steps": 8}
    found = play_baseline(BOX_WORLD, "oracle", 6, seed=3, options=options)
    env, ends = make(BOX_WORLD, **options), set()
    for i, total in enumerate(found):
        env.reset(seed=3 + i)
        over, paid = (False, False), 0.0
        while not any(over):
            state = State(*(field[None] for field in env.state))
            _, reward, *over, _ = env.step(int(env.game.policy("oracle", state, np.zeros((1, 1)))[0, 0]))
            paid += reward
        assert total == paid
        ends.add(tuple(over))
    assert ends == {(True, False), (False, True)}


def test_options_of_references_go_before_those_of_the_id():
    options = {"num_signal": 1, "num_noise": 2, "max_steps": 5}
    ids = ("noisy_envs/SimpleCentroid-v0", "noisy_envs/SimpleCentroid-1v31v0-v0")
    assert_same(*(play_baseline(env_id, "oracle", 3, options=options) for env_id in ids))


@pytest.mark.parametrize(
    "option",
    [
        {"num_envs": 4},
        {"learners": "all"},
        {"backend": "torch"},
        {"autoreset_mode": "SameStep"},
        {"max_episode_steps": -1},
    ],
)
def test_references_take_the_options_of_the_game_alone(option):
    """Those of the vector environment ended in errors of its own lines, or measured something else unsaid."""
    told = rf"^unexpected keyword argument '{next(iter(option))}': .*expected one of num_agents, .*max_steps"
    for measure in (baseline_returns, partial(play_baseline, policy="random", episodes=2)):
        with pytest.raises(TypeError, match=told):
            measure("noisy_envs/SimpleCentroid-v0", options=option)


def test_references_of_no_episode_are_refused():
    with pytest.raises(ValueError, match=r"^episodes=0: expected at least 1$"):
        play_baseline(BOX_WORLD, "random", 0)


# --- drawing ---


def board(game: BoxWorld, text: str) -> State:
    """Return a drawn world without the batch axis."""
    return State(*(field[0] for field in game.validate_state({"text": text}, ())))


def picture(game: BoxWorld, text: str, weights: Any = None) -> np.ndarray:
    """Draw a world; BAND pixels at its foot are the legend."""
    drawn = Renderer(game, "rgb_array").draw(board(game, text), 0, 0.0, weights)
    assert drawn is not None
    return drawn


def test_legend_of_a_board():
    game = BoxWorld()
    kinds = SCENES["box_world"](game, board(game, STARTS["gem"]), np.zeros(game.num_objects)).markers
    colours = {kind.name: tuple(kind.color) for kind in kinds}
    assert colours == {
        "agent": (128, 128, 128), "gem": (255, 255, 255), "loose key": (60, 180, 75), "content, lock": (245, 130, 49),
        "held key: top left": (0, 0, 0),
    }  # fmt: skip
    foot = [picture(game, STARTS["gem"], weights)[-BAND:] for weights in (None, np.ones(game.num_objects))]
    pale = (np.add(renderer.AMBER, renderer.WHITE) / 2).round()  # the glow's middle: its icon is of half the strength
    amber = [np.abs(strip.astype(int) - pale).max(axis=-1) < 8 for strip in foot]
    assert [bool(found.any()) for found in amber] == [False, True]


def test_white_square_of_a_legend_is_outlined():
    surfarray = pytest.importorskip("pygame").surfarray
    surface = paint(Board(np.zeros((1, 1, 3), np.uint8), [], np.zeros((1, 1)), (GEM_CELL,)), "", 600)
    foot = surfarray.array3d(surface).transpose(1, 0, 2)[-BAND + 1 :].max(axis=-1)
    columns = np.flatnonzero((foot < 200).any(axis=0))
    assert (foot[:, columns[0]] < 200).sum() >= 10  # a side of the icon, not a letter


@pytest.mark.parametrize(("row", "held", "outlined"), [("@......", "*", True), ("@....*C", "c", False)])
def test_a_taken_gem_is_outlined_and_a_held_key_is_not(row, held, outlined):
    drawn_world, side = picture(BoxWorld(), drawn(row, held)), (600 - 2 * BAND) / 9
    for across, down in ((0.5, 0.02), (0.5, 0.98), (0.02, 0.5), (0.98, 0.5)):
        assert (drawn_world[int(BAND + down * side), int(BAND + across * side)].max() < 60) == outlined


def test_lines_part_the_cells_but_not_the_frame():
    drawn = picture(BoxWorld(), STARTS["key"]).astype(int)
    height = 600 - 2 * BAND
    left, side = BAND, height / 9
    field = drawn[int(BAND + 4.5 * side), int(left + 1.2 * side) : int(left + 7.8 * side)].max(axis=-1)
    assert set(field.tolist()) != {220} and 0.8 < (field == 220).mean() < 1
    frame = drawn[int(BAND + 8.5 * side), int(left + 0.3 * side) : int(left + 8.7 * side)]
    assert not frame.any()


def test_a_faint_halo_leaves_its_cell_as_it_was():
    game = BoxWorld()
    weights = np.full(game.num_objects, 1e-4)
    weights[0] = 1.0
    strong = weights * (weights == 1)
    np.testing.assert_array_equal(picture(game, STARTS["gem"], weights), picture(game, STARTS["gem"], strong))


# --- the agent ---


@pytest.fixture(scope="module")
def ppo() -> Any:
    """Import the agent."""
    pytest.importorskip("torch")
    pytest.importorskip("tyro")
    return load_agent("adapool")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Keep all environments that are made."""
    from noisy_envs.training import evaluation

    made = []

    def keeping(maker: Any) -> Any:
        return lambda *args, **options: (made.append(maker(*args, **options)), made[-1])[1]

    for module, name in ((gymnasium, "make_vec"), (evaluation, "make_playback")):
        monkeypatch.setattr(module, name, keeping(getattr(module, name)))
    return made


def oracle(envs: Any) -> Any:
    """Return the best actions (B,) in a torch environment."""
    import torch

    return envs.game.policy("oracle", envs.state, torch.zeros(envs.num_envs, 1))[:, 0]


@pytest.mark.parametrize("env_id", IDS)
def test_what_is_held_out_is_in_no_bank(env_id):
    game, parameters = ENVIRONMENTS[env_id]
    train, evaluation = (GAMES[game](**{**parameters, **options}) for options in ({}, eval_levels(env_id)))
    if game == BoxWorld.name:
        assert evaluation.start_level >= train.start_level + train.num_levels
        assert eval_levels(env_id).keys() == {"start_level"}
    else:
        assert evaluation == train


@pytest.mark.parametrize(("choice", "other"), [("--eval-deterministic", "sample"), ("--no-eval-deterministic", "mode")])
def test_evaluation_and_film_choose_actions_as_asked_on_levels_held_out(ppo, made, monkeypatch, choice, other):
    from noisy_envs.training import evaluation
    from noisy_envs.training.envs import make_envs
    from noisy_envs.training.settings import parse

    args = parse(ppo, ["--env-id", BOX_WORLD, choice])
    envs = make_envs(dataclasses.replace(args, num_envs=50))
    agent = ppo.Agent(args, envs.token_spec, envs.action_space)
    setattr(agent.distribution, other, None)  # not to be called
    monkeypatch.setattr(TokenVectorEnv, "close", lambda _: None)  # a closed environment has no state
    assert evaluation.evaluate(agent, args, 20).shape == (20,)
    assert len(evaluation.record_episode(agent, args)) > 2
    train, evaluated, film = made
    assert int(train.state.level.max()) < 100_000 <= int(evaluated.state.level.min())
    assert film.state.level >= 100_000


def test_evaluation_counts_one_episode_of_each_world(ppo, made, monkeypatch):
    from noisy_envs.training import evaluation
    from noisy_envs.training.settings import parse

    args, steps = parse(ppo, ["--env-id", BOX_WORLD]), iter(range(30))
    monkeypatch.setattr(evaluation, "select_action", lambda *_: (next(steps), oracle(made[0]))[1])
    agent = type("Still", (), {})()
    assert evaluation.evaluate(agent, args, 20).tolist() == [11.0] * 20
    assert made[0].episodes[1].max() > 0  # some ended earlier, and began anew


def test_what_is_held_out_cannot_be_changed_by_its_user():
    eval_levels(BOX_WORLD)["start_level"] = 0
    assert eval_levels(BOX_WORLD) == {"start_level": 100_000}


def test_parallel_view_of_a_world_that_is_over():
    env = ParallelTokenEnv("box_world")
    env.reset(options={"state": {"text": drawn(".......", "*").replace(".", "@", 1)}})
    assert env.agents == [] and env.step({}) == ({}, {}, {}, {}, {})
