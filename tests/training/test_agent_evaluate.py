"""Evaluations: fresh seeds, the same result twice, a matrix over noise, films with weights, one line for errors."""

import dataclasses
import json
import time
from itertools import product

import numpy as np
import pytest
from cases import GAME_IDS, HEADS, by_default
from helpers import load_agent, train_tiny

pytest.importorskip("torch")
pytest.importorskip("tyro")
import torch
from PIL import Image

from noisy_envs import registration
from noisy_envs.baselines import baseline_returns
from noisy_envs.games.box_world_levels import draw_level
from noisy_envs.interfaces.vector_env import TokenVectorEnv
from noisy_envs.rendering.playback import make_playback
from noisy_envs.training import envs, evaluation
from noisy_envs.training.checkpoint import save_checkpoint
from noisy_envs.training.envs import env_kwargs, game_of, make_envs, make_eval_envs, with_start_of
from noisy_envs.training.evaluation import known_levels, make_eval_agent, record_episode
from noisy_envs.training.main import main
from noisy_envs.training.settings import load_args, parse

CENTROID, BOX = GAME_IDS["simple_centroid"], GAME_IDS["box_world"]
SHORT = ["--env-kwargs", "max_steps=3"]  # an episode, so that films are
SMALL_BOX = ["--env-id", BOX, "--env-kwargs", "size=6", "max_steps=3"]


@pytest.fixture(scope="module")
def ppo():
    return load_agent("adapool")


@pytest.fixture(scope="module")
def trained(ppo, tmp_path_factory):
    """A run of each noise, 4 and 28: summary and folder."""
    return {
        noise: train_tiny(ppo, tmp_path_factory.mktemp("run"), "--num-noise", str(noise), *SHORT) for noise in (4, 28)
    }


def files(folder):
    """Return what would betray a change."""
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def evaluate(ppo, folder, *words):
    """Evaluate into a new folder: the rows, as they are written."""
    main(ppo, ["--evaluate", *map(str, words), "--run-dir", str(folder)])
    (found,) = folder.iterdir()
    return json.loads((found / "evaluation.json").read_text())["results"], found


@pytest.mark.parametrize("choice", ["--eval-deterministic", "--no-eval-deterministic"])
@pytest.mark.parametrize("game", GAME_IDS)
def test_an_evaluation_repeats_the_runs_own_and_leaves_its_folder_alone(ppo, game, choice, tmp_path):
    words = ["--env-id", GAME_IDS[game], "--preset", "fast", choice, *SHORT]
    summary, run = train_tiny(ppo, tmp_path / "run", *words)
    before = files(run)
    first, second = (evaluate(ppo, tmp_path / name, run)[0] for name in ("first", "second"))
    assert first == second and len(first) == 1
    names = ("score", "score_95", "return", "return_95", "return_random", "return_oracle", "env_kwargs", "env_id")
    assert [first[0][name] for name in names] == [summary[name] for name in names]
    assert files(run) == before


def test_more_episodes_or_other_actions_are_played_when_asked(ppo, trained, tmp_path):
    summary, run = trained[4]
    (more,), _ = evaluate(ppo, tmp_path / "more", run, "--eval-episodes", "4")
    (drawn,), _ = evaluate(ppo, tmp_path / "drawn", run, "--no-eval-deterministic")
    (seeded,), _ = evaluate(ppo, tmp_path / "seeded", run, "--seed", "2")
    assert len({summary["return"], more["return"], drawn["return"], seeded["return"]}) == 4
    assert (drawn["eval_deterministic"], more["eval_deterministic"]) == (False, True)


def test_what_is_asked_for_episodes_holds_for_all_checkpoints(ppo, trained, tmp_path):
    first, run = trained[4]
    _, other = train_tiny(ppo, tmp_path / "run", "--num-noise", "4", *SHORT, "--eval-episodes", "2")
    rows, _ = evaluate(ppo, tmp_path / "out", other, run, "--eval-episodes", "2")  # the first's own number, by word
    (alone,), _ = evaluate(ppo, tmp_path / "alone", run, "--eval-episodes", "2")
    assert rows[1]["return"] == alone["return"] != first["return"]


def test_a_word_holds_for_all_checkpoints_though_it_is_the_firsts_own_setting(ppo, trained, tmp_path):
    words = ["--env-id", "noisy_envs/SimpleCentroid-1v3v28-v0", "--preset", "fast", "--no-eval-deterministic"]
    _, other = train_tiny(ppo, tmp_path / "run", *words, *SHORT)
    asked = ["--env-id", CENTROID, "--eval-deterministic"]
    rows, _ = evaluate(ppo, tmp_path / "out", trained[4][1], other, *asked)
    assert [(row["env_id"], row["eval_deterministic"]) for row in rows] == [(CENTROID, True)] * 2
    rows, _ = evaluate(ppo, tmp_path / "own", trained[4][1], other)
    assert [(row["env_id"], row["eval_deterministic"]) for row in rows] == [(CENTROID, True), (words[1], False)]


def test_levels_are_those_asked_for_unless_training_drew_any_of_them():
    assert registration.eval_levels(BOX, {"start_level": 100_000, "num_levels": 5}, {}) == {}
    assert registration.eval_levels(BOX, {"start_level": 99_999, "num_levels": 5}, {}) == {"start_level": 100_000}
    assert registration.eval_levels(BOX, {"num_levels": 7}, {"start_level": 7, "num_levels": 3}) == {}


def test_training_never_plays_a_seed_of_the_evaluation(ppo):
    for seed in range(5):
        args = parse(ppo, ["--seed", str(seed), "--num-envs", "512"])
        played = make_envs(args).start.envs, make_eval_envs(args, 512)[0].batch_state
        seen = [set(state.seed.tolist()) for state in played]
        assert len(seen[0]) == len(seen[1]) == 512 and not seen[0] & seen[1]


BANKS = [[], ["num_levels=300000"], ["start_level=200000", "num_levels=9"]]


@pytest.mark.parametrize("other", [*BANKS, ["start_level=5", "num_levels=9"]])
@pytest.mark.parametrize("options", BANKS)
def test_box_world_is_evaluated_on_levels_that_its_own_training_cannot_meet(ppo, options, other, monkeypatch):
    args = parse(ppo, ["--env-id", BOX, "--env-kwargs", "max_steps=2", *options])
    game, made = game_of(args), []

    def keeping(make):
        return lambda *words, **options: made.append(make(*words, **options)) or made[-1]

    monkeypatch.setattr(envs, "make_vec", keeping(envs.make_vec))
    monkeypatch.setattr(evaluation, "make_playback", keeping(make_playback))
    monkeypatch.setattr(TokenVectorEnv, "close", lambda _: None)  # a closed environment has no state
    make_envs(dataclasses.replace(args, num_envs=50))
    agent = make_eval_agent(ppo, args, made[0].token_spec, made[0].single_action_space)
    asked = dataclasses.replace(args, env_kwargs=("max_steps=2", *other))
    evaluation.evaluate(agent, asked, 50, args)
    record_episode(agent, asked, args)
    bank = range(game.start_level, game.start_level + game.num_levels)
    train, evaluated, filmed = made
    assert all(level in bank for level in train.state.level.tolist())
    assert not any(level in bank for level in evaluated.state.level.tolist())
    assert int(filmed.state.level[0]) not in bank


def test_the_first_folder_need_not_be_a_run(ppo, trained, tmp_path):
    run = trained[28][1]
    assert parse(ppo, ["--evaluate", str(tmp_path), str(run)]) == parse(ppo, ["--evaluate", str(run)])


def test_the_film_is_of_the_first_run_at_the_first_noise_and_says_so(ppo, trained, tmp_path, capsys):
    (_, run), (_, other) = trained[28], trained[4]
    evaluate(ppo, tmp_path / "out", run, other, "--num-noise", "3", "0", "--record", tmp_path / "a.gif")
    assert f"see an episode of {run}, noise 3, in {tmp_path / 'a.gif'}\n" in capsys.readouterr().out


def test_a_matrix_has_a_row_for_each_run_and_a_column_for_each_noise(ppo, trained, tmp_path):
    noises = (0, 4, 28)
    found, folder = evaluate(ppo, tmp_path, *(run for _, run in trained.values()), "--num-noise", *noises)
    assert {path.name for path in folder.iterdir()} == {"evaluation.json", "matrix.png"}
    with Image.open(folder / "matrix.png") as picture:
        assert min(picture.size) > 100
    assert [(row["trained"], row["evaluated"]) for row in found] == list(product(trained, noises))
    assert [row["run"] for row in found] == [str(run) for _, run in trained.values() for _ in noises]
    for row in found:
        start = {} if row["evaluated"] == row["trained"] else {"spread": {4: 2.0, 28: 2.5}[row["trained"]]}
        random, oracle = baseline_returns(CENTROID, {"max_steps": 3, "num_noise": row["evaluated"], **start})
        assert (row["return_random"], row["return_oracle"]) == (random, oracle)
        assert row["score"] == pytest.approx((row["return"] - random) / (oracle - random))
        assert row["score_95"][0] <= row["score"] <= row["score_95"][1]
        assert row["return_95"][0] <= row["return"] <= row["return_95"][1]
        if row["trained"] == row["evaluated"]:
            assert row["return"] == trained[row["trained"]][0]["return"]
    assert len({row["return"] for row in found}) == 6
    assert len({row["return_random"] for row in found}) == len(trained)  # other noise changes nothing but the noise


TRAINED = {  # settings of training, and how far agents and signal start from the origin then
    "the id": ([], 2.0),
    "noise": (["--num-noise", "28"], 2.5),
    "range": (["--env-kwargs", "num_noise=(0, 28)"], 2.5),
    "ranges": (["--env-kwargs", "num_signal=(1, 35)", "num_noise=(0, 28)"], 3.0),
    "own spread": (["--env-kwargs", "num_noise=(0, 28)", "spread=1.5"], 1.5),
    "an id of the paper": (["--env-id", "noisy_envs/SimpleCentroid-1v1v30-v0", "--preset", "fast"], 2.5),
}


@pytest.mark.parametrize(("words", "spread"), TRAINED.values(), ids=TRAINED)
def test_other_noise_moves_neither_agents_nor_signal(ppo, words, spread):
    own = parse(ppo, words)
    asked = [dataclasses.replace(own, num_noise=(noise,), evaluate=("run",)) for noise in (0, 28, 60)]
    if own.env_kwargs == ():
        asked.append(dataclasses.replace(own, env_kwargs=("num_noise=(0, 60)",), num_noise=()))
    starts = [
        make_eval_envs(args, 512, own)[0].state.mover for args in (own, *(with_start_of(args, own) for args in asked))
    ]
    assert all(torch.equal(start, starts[0]) for start in starts)
    assert 0.99 * spread < starts[0][..., :2].abs().max() <= spread * (1 + 1e-6)


def test_another_id_starts_as_the_trained_one(ppo):
    own, asked = parse(ppo, []), parse(ppo, ["--env-id", "noisy_envs/SimpleCentroid-1v1v30-v0"])
    assert env_kwargs(with_start_of(asked, own)) == {"spread": 2.0}
    assert env_kwargs(with_start_of(own, asked)) == {"spread": 2.5}


def test_a_start_does_not_tell_how_much_noise_a_range_drew(ppo):
    reach = {}
    for told in ([], ["spread=None"]):  # the paper's rule, if it is asked for
        args = parse(ppo, ["--env-kwargs", "num_noise=(0, 252)", *told])
        state = make_envs(dataclasses.replace(args, num_envs=4096)).start.envs.state
        noise = (state.landmark[..., 4] >= 0).sum(dim=1)
        reach[bool(told)] = [state.mover[few, :, :2].abs().max().item() for few in (noise < 12, noise > 200)]
    assert min(reach[False]) > 3.9 and reach[True][0] <= 2 and reach[True][1] > 3.9


def test_references_are_of_the_start_that_was_played(ppo):
    own = parse(ppo, [])
    asked = [dataclasses.replace(own, num_noise=(noise,)) for noise in (0, 28, 60)]
    found = [envs.baseline_returns(with_start_of(args, own)) for args in asked]
    assert found[0] == found[1] == found[2]
    assert found[0].oracle == pytest.approx(envs.baseline_returns(own).oracle, abs=0.01)


SMALL = ["--env-id", BOX, "--env-kwargs", "size=3", "num_distractors=0", "num_levels=2000", "max_steps=3"]


def test_an_evaluation_tells_how_many_of_its_levels_training_drew_from(ppo, tmp_path, capsys):
    summary, run = train_tiny(ppo, tmp_path / "run", *SMALL, "--eval-episodes", "200")
    config = game_of(load_args(ppo, run)).level_config
    args = load_args(ppo, run)
    asked = make_eval_envs(args, 200)[0].state.level.tolist()
    assert not set(asked) & set(range(2000))
    bank = {draw_level(config, number) for number in range(2000)}
    share = np.mean([draw_level(config, number) in bank for number in asked])
    assert 0.4 < share < 0.8 and summary["known_levels"] == pytest.approx(share)
    told = f"over 200 episodes, {100 * share:.3g}% on levels of training"
    assert told in capsys.readouterr().out
    (row,), _ = evaluate(ppo, tmp_path / "out", run)
    assert row["known_levels"] == summary["known_levels"] and told in capsys.readouterr().out
    others = range(10_000, 20_000)
    new = next(n for n in others if not bank & {draw_level(config, number) for number in range(n, n + 3)})
    options = ("size=3", "num_distractors=0", "max_steps=3", f"start_level={new}", "num_levels=3")
    assert known_levels(dataclasses.replace(args, env_kwargs=options), args) == {"known_levels": 0.0}


@pytest.mark.parametrize(
    ("words", "share"),
    [([], {"known_levels": 0.0}), (["--env-id", CENTROID], {}), (["--env-id", "CartPole-v1"], {})],
    ids=["large", "none", "foreign"],
)
def test_where_levels_hardly_repeat_none_is_looked_for(ppo, words, share):
    args = parse(ppo, words or ["--env-id", BOX])
    start = time.perf_counter()
    assert known_levels(args, args) == share and time.perf_counter() - start < 1


GAME_WORDS = {
    "simple_centroid": [*SHORT],
    "simple_centroid, padded": [*SHORT, "num_noise=(0,3)", "num_signal=(1,9)"],
    "simple_tag": ["--env-id", GAME_IDS["simple_tag"], *SHORT],
    "simple_tag, padded": ["--env-id", GAME_IDS["simple_tag"], *SHORT, "num_obstacles=(0,9)"],
    "box_world": SMALL_BOX,
}


@by_default(
    ("head", "game"),
    [
        ("adapool", "simple_centroid"),
        ("adapool", "box_world"),
        ("avgpool", "simple_centroid, padded"),
        ("clstoken", "simple_tag"),
        ("maxpool", "simple_tag, padded"),
    ],
    product(HEADS, GAME_WORDS),
)
def test_a_film_shows_the_weights_of_each_head(head, game, tmp_path, monkeypatch, capsys):
    ppo = load_agent(head)
    _, run = train_tiny(ppo, tmp_path / "run", *GAME_WORDS[game])
    shown = []

    def watched(*words):
        playback = make_playback(*words)
        render, spec = playback.render, playback.token_spec

        def rendered(weights=None, overlay=None):
            if weights is not None:
                tokens = playback.tokens[0]
                shown.append((weights, spec.mask(tokens) if spec.padded else np.ones(len(tokens))))
            return render(weights, overlay)

        playback.render = rendered
        return playback

    monkeypatch.setattr(evaluation, "make_playback", watched)
    evaluate(ppo, tmp_path / "out", run, "--record", tmp_path / "new" / "x.gif")
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"in {tmp_path / 'new' / 'x.gif'}")
    with Image.open(tmp_path / "new" / "x.gif") as film:
        assert film.n_frames == len(shown) + 1 == 4
    for weights, real in shown:
        assert weights.shape == real.shape and weights.min() >= 0
        assert weights.sum() == pytest.approx(1, abs=1e-5)
        assert (weights[real == 0] == 0).all()
    if "padded" in game:
        assert not all(real.all() for _, real in shown)
    if "padded" not in game:
        imageio = pytest.importorskip("imageio_ffmpeg")
        evaluate(ppo, tmp_path / "again", run, "--record", tmp_path / "x.mp4")
        assert imageio.count_frames_and_secs(tmp_path / "x.mp4")[0] == 4


def test_an_evaluation_outlives_a_film_that_fails(ppo, trained, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space for the film")

    monkeypatch.setattr(evaluation, "record_episode", fail)
    with pytest.raises(SystemExit, match=r"^error: no space for the film$"):
        evaluate(ppo, tmp_path / "out", trained[4][1], "--record", tmp_path / "x.gif")
    (folder,) = (tmp_path / "out").iterdir()
    assert len(json.loads((folder / "evaluation.json").read_text())["results"]) == 1


def damage(folder, how):
    """Return the path of a checkpoint that cannot be evaluated."""
    path = folder / "checkpoint.pt"
    content = torch.load(path)
    if how == "cut short":
        path.write_bytes(path.read_bytes()[:5000])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("no checkpoint")
    elif how == "a tensor":
        torch.save(torch.zeros(3), path)
    elif how == "another program's":
        torch.save({"weights": {}}, path)
    elif how == "another version's":
        content["args"]["old_setting"] = content["args"].pop("gamma")
        torch.save(content, path)
    elif how == "another head's":
        torch.save({**content, "file": "ppo_maxpool"}, path)
    elif how == "another network's":
        torch.save({**content, "args": {**content["args"], "embed_dim": 16}}, path)
    elif how == "missing":
        path.unlink()
    return path


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_envs", "4"), ("embed_dim", [32]), ("env_id", 3), ("device", 0), ("gamma", None), ("seed", 1.5),
     ("anneal_lr", "no"), ("run_dir", None), ("env_kwargs", "max_steps=3")],
)  # fmt: skip
def test_a_setting_of_another_kind_is_refused(ppo, trained, name, value, tmp_path):
    content = torch.load(trained[4][1] / "checkpoint.pt")
    save_checkpoint(tmp_path / "checkpoint.pt", {**content, "args": {**content["args"], name: value}})
    with pytest.raises(SystemExit) as end:
        main(ppo, ["--evaluate", str(tmp_path), "--run-dir", str(tmp_path / "out")])
    kind = "str" if name == "run_dir" else type(getattr(ppo.Args(), name)).__name__  # a path is saved as a text
    assert str(end.value) == f"error: {tmp_path / 'checkpoint.pt'}: {name}={value!r}: expected a value of type {kind}"


DAMAGES = ["cut short", "empty", "text", "a tensor", "another program's", "another version's", "another head's"]
DAMAGES += ["another network's", "missing"]


@pytest.mark.parametrize("place", ["first", "second", "resumed"])
@pytest.mark.parametrize("how", DAMAGES)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line(ppo, trained, how, place, tmp_path):
    import shutil

    bad = tmp_path / "bad"
    shutil.copytree(trained[4][1], bad)
    damage(bad, how)
    good, before = trained[28][1], files(bad)
    words = {"first": ["--evaluate", bad, good], "second": ["--evaluate", good, bad], "resumed": ["--resume", bad]}[
        place
    ]
    with pytest.raises(SystemExit) as error:
        main(ppo, [*map(str, words), "--run-dir", str(tmp_path / "out")])
    message = str(error.value)
    assert (
        message.startswith("error: ") and str(bad) in message and len(message.splitlines()) == 1 and len(message) < 600
    )
    assert not (tmp_path / "out").exists()
    assert {path: content for path, content in files(bad).items() if path.name != ".lock"} == {
        path: content for path, content in before.items() if path.name != ".lock"
    }
    if how == "another version's":
        assert "'gamma', 'old_setting'" in message
    if how == "another head's":
        assert message.endswith(
            " is a checkpoint of ppo_maxpool.py: expected one of ppo_adapool.py; use agents/ppo_maxpool.py"
        )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--num-noise", "4", "-1"], "num_noise=-1: expected at least 0"),
        (["--env-id", BOX], f"env_id='{BOX}': "),
        (["--env-id", BOX], f" was trained on another game, {CENTROID}"),
        (["--env-id", "noisy_envs/SimpleTag-v0", "--env-kwargs"], "env_id='noisy_envs/SimpleTag-v0': "),
        (["--embed-dim", "16"], "weights of another network"),
        (["--env-kwargs", "colour=3"], "unexpected keyword argument 'colour'"),
        (["--record", "x.avi"], "x.avi: expected a file name that ends in .gif or .mp4"),
        (["--resume", "there"], "resume='there': not together with --evaluate"),
        (["--eval-episodes", "0"], "eval_episodes=0: expected a number from 1 to"),
        (["--device", "meta"], "device='meta'"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(ppo, trained, words, told, tmp_path):
    with pytest.raises(SystemExit) as error:
        main(ppo, ["--evaluate", str(trained[4][1]), *words, "--run-dir", str(tmp_path)])
    assert told in str(error.value) and str(error.value).startswith("error: ") and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_noise_that_does_not_fit_is_not_evaluated(ppo, tmp_path):
    _, run = train_tiny(ppo, tmp_path / "run", *SMALL_BOX)
    with pytest.raises(SystemExit) as end:
        main(ppo, ["--evaluate", str(run), "--num-noise", "4", "1000", "--run-dir", str(tmp_path / "out")])
    assert str(end.value).startswith("error: num_noise=1000: expected at most")
    assert not (tmp_path / "out").exists()


def test_evaluate_without_a_checkpoint_does_not_train(ppo, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        main(ppo, ["--run-dir", str(tmp_path), "--evaluate"])
    assert error.value.code == 2 and "--evaluate: expected at least one argument" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_names_no_agent_or_has_other_settings_is_refused_in_one_line(ppo, trained, tmp_path):
    """Checkpoints of older versions have both."""
    content = torch.load(trained[4][1] / "checkpoint.pt")
    assert content.pop("file") == "ppo_adapool"
    old = {"hidden_dim": 32, **content["args"]}
    del old["embed_dim"]
    other = (
        "was written by another version of this agent: the settings ['embed_dim', 'hidden_dim'] differ; start a new run"
    )
    for name, args, reason in (
        ("old.pt", old, other),
        ("nameless.pt", content["args"], "is not a checkpoint of agents/ppo_*.py: it names no agent"),
    ):
        path = tmp_path / name
        save_checkpoint(path, {**content, "head": "AdaPool", "args": args})
        with pytest.raises(SystemExit) as end:
            evaluate(ppo, tmp_path / "out", path)
        assert str(end.value) == f"error: {path} {reason}"
    assert not (tmp_path / "out").exists()


def test_sizes_of_an_update_do_not_matter_to_an_evaluation(ppo, tmp_path):
    few = ["--learners", "all", "--num-envs", "4", "--num-steps", "16", "--minibatch-size", "192"]
    _, run = train_tiny(ppo, tmp_path / "run", *few, "--total-timesteps", "192", *SHORT, "num_agents=3")
    for number in (1, 4):  # of which 64 and 256 steps were an update
        rows, _ = evaluate(ppo, tmp_path / str(number), run, *SHORT, f"num_agents={number}")
        assert np.isfinite(rows[0]["return"])
