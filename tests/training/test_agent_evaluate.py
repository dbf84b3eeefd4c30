"""Evaluations: fresh seeds, the same result twice, a matrix over noise, films with weights, one line for errors."""

import dataclasses
import json
import time
from itertools import product

import numpy as np
import pytest
from conftest import GAME_IDS, each_head_and, load_agent, train_tiny

pytest.importorskip("torch")
pytest.importorskip("tyro")
import torch
from PIL import Image

from noisy_envs import registration
from noisy_envs.baselines import baseline_returns
from noisy_envs.games.box_world_levels import draw_level
from noisy_envs.interfaces.pettingzoo_env import ParallelTokenEnv
from noisy_envs.training.checkpoint import save_checkpoint

CENTROID, BOX = GAME_IDS["simple_centroid"], GAME_IDS["box_world"]
SHORT = ["--options", "max_steps=3"]  # an episode, so that films are
SMALL_BOX = ["--env-id", BOX, "--options", "size=6", "max_steps=3"]


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
    ppo.main(["--evaluate", *map(str, words), "--run-dir", str(folder)])
    (found,) = folder.iterdir()
    return json.loads((found / "evaluation.json").read_text())["results"], found


@pytest.mark.parametrize("choice", ["best", "sampled"])
@pytest.mark.parametrize("game", GAME_IDS)
def test_an_evaluation_repeats_the_runs_own_and_leaves_its_folder_alone(ppo, game, choice, tmp_path):
    words = ["--env-id", GAME_IDS[game], "--preset", "fast", "--eval-actions", choice, *SHORT]
    summary, run = train_tiny(ppo, tmp_path / "run", *words)
    before = files(run)
    first, second = (evaluate(ppo, tmp_path / name, run)[0] for name in ("first", "second"))
    assert first == second and len(first) == 1
    names = ("score", "score_95", "return", "return_95", "return_random", "return_oracle", "options", "env_id")
    assert [first[0][name] for name in names] == [summary[name] for name in names]
    assert files(run) == before


def test_more_episodes_or_other_actions_are_played_when_asked(ppo, trained, tmp_path):
    summary, run = trained[4]
    (more,), _ = evaluate(ppo, tmp_path / "more", run, "--eval-episodes", "4")
    (drawn,), _ = evaluate(ppo, tmp_path / "drawn", run, "--eval-actions", "sampled")
    (seeded,), _ = evaluate(ppo, tmp_path / "seeded", run, "--seed", "2")
    assert len({summary["return"], more["return"], drawn["return"], seeded["return"]}) == 4
    assert (drawn["eval_actions"], more["eval_actions"]) == ("sampled", "best")


def test_what_is_asked_for_episodes_holds_for_all_checkpoints(ppo, trained, tmp_path):
    first, run = trained[4]
    _, other = train_tiny(ppo, tmp_path / "run", "--num-noise", "4", *SHORT, "--eval-episodes", "2")
    rows, _ = evaluate(ppo, tmp_path / "out", other, run, "--eval-episodes", "2")  # the first's own number, by word
    (alone,), _ = evaluate(ppo, tmp_path / "alone", run, "--eval-episodes", "2")
    assert rows[1]["return"] == alone["return"] != first["return"]


def test_a_word_holds_for_all_checkpoints_though_it_is_the_firsts_own_setting(ppo, trained, tmp_path):
    words = ["--env-id", "noisy_envs/SimpleCentroid-1v3v28-v0", "--preset", "fast", "--eval-actions", "sampled"]
    _, other = train_tiny(ppo, tmp_path / "run", *words, *SHORT)
    asked = ["--env-id", CENTROID, "--eval-actions", "best"]
    rows, _ = evaluate(ppo, tmp_path / "out", trained[4][1], other, *asked)
    assert [(row["env_id"], row["eval_actions"]) for row in rows] == [(CENTROID, "best")] * 2
    rows, _ = evaluate(ppo, tmp_path / "own", trained[4][1], other)
    assert [(row["env_id"], row["eval_actions"]) for row in rows] == [(CENTROID, "best"), (words[1], "sampled")]


def test_levels_are_those_asked_for_unless_training_drew_any_of_them():
    assert registration.eval_levels(BOX, {"start_level": 100_000, "num_levels": 5}, {}) == {}
    assert registration.eval_levels(BOX, {"start_level": 99_999, "num_levels": 5}, {}) == {"start_level": 100_000}
    assert registration.eval_levels(BOX, {"num_levels": 7}, {"start_level": 7, "num_levels": 3}) == {}


def test_training_never_plays_a_seed_of_the_evaluation(ppo):
    for seed in range(5):
        args = ppo.parse(["--seed", str(seed), "--num-envs", "512"])
        both = [ppo.make_envs(args, 512, purpose)[0] for purpose in ("train", "evaluate")]
        seen = [set(envs.batch_state.seed.tolist()) for envs in both]
        assert len(seen[0]) == len(seen[1]) == 512 and not seen[0] & seen[1]


BANKS = [[], ["num_levels=300000"], ["start_level=200000", "num_levels=9"]]


@pytest.mark.parametrize("other", [*BANKS, ["start_level=5", "num_levels=9"]])
@pytest.mark.parametrize("options", BANKS)
def test_box_world_is_evaluated_on_levels_that_its_own_training_cannot_meet(ppo, options, other, monkeypatch):
    args = ppo.parse(["--env-id", BOX, "--options", "max_steps=2", *options])
    game, made = ppo.game_of(args), []
    monkeypatch.setattr(
        ppo, "make_envs", lambda *words, make=ppo.make_envs, **rest: made.append(make(*words, **rest)) or made[-1]
    )
    monkeypatch.setattr(
        ppo,
        "ParallelTokenEnv",
        lambda *words, **options: made.append((ParallelTokenEnv(*words, **options),)) or made[-1][0],
    )
    train, _ = ppo.make_envs(args, 50, "train")
    agent = ppo.plain_agent(args, train)
    asked = dataclasses.replace(args, options=("max_steps=2", *other))
    ppo.evaluate(agent, asked, 50, args)
    ppo.film(agent, asked, args)
    bank = range(game.start_level, game.start_level + game.num_levels)
    assert all(level in bank for level in train.state.level.tolist())
    assert not any(level in bank for level in made[1][0].state.level.tolist())
    assert int(made[2][0]._episode.state.level[0]) not in bank


def test_the_first_folder_need_not_be_a_run(ppo, trained, tmp_path):
    run = trained[28][1]
    assert ppo.parse(["--evaluate", str(tmp_path), str(run)]) == ppo.parse(["--evaluate", str(run)])


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
    "range": (["--options", "num_noise=(0, 28)"], 2.5),
    "ranges": (["--options", "num_signal=(1, 35)", "num_noise=(0, 28)"], 3.0),
    "own spread": (["--options", "num_noise=(0, 28)", "spread=1.5"], 1.5),
    "an id of the paper": (["--env-id", "noisy_envs/SimpleCentroid-1v1v30-v0", "--preset", "fast"], 2.5),
}


@pytest.mark.parametrize(("words", "spread"), TRAINED.values(), ids=TRAINED)
def test_other_noise_moves_neither_agents_nor_signal(ppo, words, spread):
    own = ppo.parse(words)
    asked = [dataclasses.replace(own, num_noise=(noise,), evaluate=("run",)) for noise in (0, 28, 60)]
    if own.options == ():
        asked.append(dataclasses.replace(own, options=("num_noise=(0, 60)",), num_noise=()))
    starts = [
        ppo.make_envs(args, 512, "evaluate", trained=own)[0].state.mover
        for args in (own, *(ppo.as_trained(args, own) for args in asked))
    ]
    assert all(torch.equal(start, starts[0]) for start in starts)
    assert 0.99 * spread < starts[0][..., :2].abs().max() <= spread * (1 + 1e-6)


def test_another_id_starts_as_the_trained_one(ppo):
    own, asked = ppo.parse([]), ppo.parse(["--env-id", "noisy_envs/SimpleCentroid-1v1v30-v0"])
    assert ppo.env_options(ppo.as_trained(asked, own)) == {"spread": 2.0}
    assert ppo.env_options(ppo.as_trained(own, asked)) == {"spread": 2.5}


def test_a_start_does_not_tell_how_much_noise_a_range_drew(ppo):
    reach = {}
    for told in ([], ["spread=None"]):  # the paper's rule, if it is asked for
        args = ppo.parse(["--options", "num_noise=(0, 252)", *told])
        state = ppo.make_envs(args, 4096, "train")[0].state
        noise = (state.landmark[..., 4] >= 0).sum(dim=1)
        reach[bool(told)] = [state.mover[few, :, :2].abs().max().item() for few in (noise < 12, noise > 200)]
    assert min(reach[False]) > 3.9 and reach[True][0] <= 2 and reach[True][1] > 3.9


def test_references_are_of_the_start_that_was_played(ppo):
    own = ppo.parse([])
    found = [ppo.references(ppo.as_trained(dataclasses.replace(own, num_noise=(noise,)), own)) for noise in (0, 28, 60)]
    assert found[0] == found[1] == found[2] and found[0].oracle == pytest.approx(ppo.references(own).oracle, abs=0.01)


SMALL = ["--env-id", BOX, "--options", "size=3", "num_distractors=0", "num_levels=2000", "max_steps=3"]


def test_an_evaluation_tells_how_many_of_its_levels_training_drew_from(ppo, tmp_path, capsys):
    summary, run = train_tiny(ppo, tmp_path / "run", *SMALL, "--eval-episodes", "200")
    config = ppo.game_of(ppo.load_args(run)).level_config
    args = ppo.load_args(run)
    asked = ppo.make_envs(args, 200, "evaluate")[0].state.level.tolist()
    assert not set(asked) & set(range(2000))
    bank = {draw_level(config, number) for number in range(2000)}
    share = np.mean([draw_level(config, number) in bank for number in asked])
    assert 0.4 < share < 0.8 and summary["known_levels"] == pytest.approx(share)
    told = f"over 200 episodes, {100 * share:.3g} % on levels of training"
    assert told in capsys.readouterr().out
    (row,), _ = evaluate(ppo, tmp_path / "out", run)
    assert row["known_levels"] == summary["known_levels"] and told in capsys.readouterr().out
    others = range(10_000, 20_000)
    new = next(n for n in others if not bank & {draw_level(config, number) for number in range(n, n + 3)})
    options = ("size=3", "num_distractors=0", "max_steps=3", f"start_level={new}", "num_levels=3")
    assert ppo.overlap(dataclasses.replace(args, options=options), args) == {"known_levels": 0.0}


@pytest.mark.parametrize(
    ("words", "share"),
    [([], {"known_levels": 0.0}), (["--env-id", CENTROID], {}), (["--env-id", "CartPole-v1"], {})],
    ids=["large", "none", "foreign"],
)
def test_where_levels_hardly_repeat_none_is_looked_for(ppo, words, share):
    args = ppo.parse(words or ["--env-id", BOX])
    start = time.perf_counter()
    assert ppo.overlap(args, args) == share and time.perf_counter() - start < 1


GAME_WORDS = {
    "simple_centroid": [*SHORT],
    "simple_centroid, padded": [*SHORT, "num_noise=(0,3)", "num_signal=(1,9)"],
    "simple_tag": ["--env-id", GAME_IDS["simple_tag"], *SHORT],
    "simple_tag, padded": ["--env-id", GAME_IDS["simple_tag"], *SHORT, "num_obstacles=(0,9)"],
    "box_world": SMALL_BOX,
}


@each_head_and("game", GAME_WORDS)
def test_a_film_shows_the_weights_of_each_head(head, game, tmp_path, monkeypatch, capsys):
    ppo = load_agent(head)
    _, run = train_tiny(ppo, tmp_path / "run", *GAME_WORDS[game])
    shown = []

    class Watched(ParallelTokenEnv):
        def render(self, weights=None):
            if weights is not None:
                tokens = self._observe()[self.agents[0]]
                shown.append(
                    (weights, self.token_spec.mask(tokens) if self.token_spec.padded else np.ones(len(tokens)))
                )
            return super().render(weights)

    monkeypatch.setattr(ppo, "ParallelTokenEnv", Watched)
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

    monkeypatch.setattr(ppo, "film", fail)
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
        torch.save({**content, "head": "MaxPool"}, path)
    elif how == "another network's":
        torch.save({**content, "args": {**content["args"], "hidden_dim": 16}}, path)
    elif how == "missing":
        path.unlink()
    return path


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_envs", "4"), ("hidden_dim", [32]), ("env_id", 3), ("device", 0), ("gamma", None), ("seed", 1.5),
     ("anneal_lr", "no"), ("run_dir", None), ("options", "max_steps=3")],
)  # fmt: skip
def test_a_setting_of_another_kind_is_refused(ppo, trained, name, value, tmp_path):
    content = torch.load(trained[4][1] / "checkpoint.pt")
    save_checkpoint(tmp_path / "checkpoint.pt", {**content, "args": {**content["args"], name: value}})
    with pytest.raises(SystemExit) as end:
        ppo.main(["--evaluate", str(tmp_path), "--run-dir", str(tmp_path / "out")])
    told = str(end.value)
    assert told.startswith(f"error: {tmp_path / 'checkpoint.pt'} is no checkpoint") and f"{name}={value!r}" in told


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
        ppo.main([*map(str, words), "--run-dir", str(tmp_path / "out")])
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
        assert message.endswith("MaxPool: must be AdaPool, this file's; use agents/ppo_maxpool.py")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--num-noise", "4", "-1"], "num_noise=-1: must be at least 0"),
        (["--env-id", BOX], f"env_id='{BOX}': "),
        (["--env-id", BOX], f" learned another game, {CENTROID}"),
        (["--env-id", "noisy_envs/SimpleTag-v0", "--options"], "env_id='noisy_envs/SimpleTag-v0': "),
        (["--hidden-dim", "16"], "weights of another network"),
        (["--options", "colour=3"], "unexpected keyword argument 'colour'"),
        (["--record", "x.avi"], "must end in .gif or .mp4, got x.avi"),
        (["--resume", "there"], "resume='there': not with --evaluate"),
        (["--eval-episodes", "0"], "eval_episodes=0: must be from 1 to"),
        (["--device", "meta"], "device='meta'"),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_what_cannot_be_evaluated_is_refused_in_one_line(ppo, trained, words, told, tmp_path):
    with pytest.raises(SystemExit) as error:
        ppo.main(["--evaluate", str(trained[4][1]), *words, "--run-dir", str(tmp_path)])
    assert told in str(error.value) and str(error.value).startswith("error: ") and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_box_world_has_no_noise_to_evaluate(ppo, trained, tmp_path):
    _, run = train_tiny(ppo, tmp_path / "run", *SMALL_BOX)
    for paths in ([run], [trained[4][1], run]):
        with pytest.raises(
            SystemExit,
            match=rf"^error: num_noise=4: {BOX} has none, only SimpleCentroid, .* and other Gymnasium environments$",
        ):
            ppo.main(["--evaluate", *map(str, paths), "--num-noise", "4", "28", "--run-dir", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_evaluate_without_a_checkpoint_does_not_train(ppo, tmp_path, capsys):
    with pytest.raises(SystemExit) as error:
        ppo.main(["--run-dir", str(tmp_path), "--evaluate"])
    assert error.value.code == 2 and "--evaluate: expected at least one argument" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_older_checkpoints_do_not_tell_their_head_and_are_evaluated(ppo, trained, tmp_path):
    summary, run = trained[4]
    content = torch.load(run / "checkpoint.pt")
    assert content.pop("head") == "AdaPool"
    save_checkpoint(tmp_path / "old.pt", content)
    assert evaluate(ppo, tmp_path / "out", tmp_path / "old.pt")[0][0]["return"] == summary["return"]


def test_sizes_of_an_update_do_not_matter_to_an_evaluation(ppo, tmp_path):
    few = ["--num-agents", "3", "--num-envs", "4", "--num-steps", "16", "--minibatch-size", "192"]
    _, run = train_tiny(ppo, tmp_path / "run", *few, "--total-timesteps", "192", *SHORT)
    for number in (1, 4):  # of which 64 and 256 steps were an update
        rows, _ = evaluate(ppo, tmp_path / str(number), run, "--num-agents", number)
        assert np.isfinite(rows[0]["return"])
