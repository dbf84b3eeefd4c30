"""Runs of the agents: settings, repetition, resuming, stopping, and what a run leaves."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from cases import posix
from helpers import ROOT, load_agent

pytest.importorskip("torch")
pytest.importorskip("tyro")
import torch

from noisy_envs import ENVIRONMENTS
from noisy_envs.randomness import derive_seed
from noisy_envs.training.checkpoint import load_checkpoint, save_checkpoint
from noisy_envs.training.files import new_folder
from noisy_envs.training.metrics import MetricsLogger, read_metrics
from noisy_envs.training.process import stop_signals

SMALL = ["--num-envs", "4", "--num-steps", "16", "--minibatch-size", "32", "--update-epochs", "2"]
SMALL += ["--eval-episodes", "3", "--no-gif"]
BOX = ["--env-id", "noisy_envs/BoxWorld-v0"]
PAPER = ["--env-id", "noisy_envs/SimpleCentroid-1v3v28-v0", "--num-envs", "2", "--num-steps", "16"]
PAPER += [
    "--num-layers",
    "1",
    "--update-epochs",
    "2",
    "--minibatch-size",
    "16",
    "--eval-episodes",
    "3",
    "--no-gif",
    "--total-timesteps",
    "96",
]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

ppo = load_agent("adapool")


def run(folder, *words, agent=ppo):
    summary = agent.main([*SMALL, "--run-dir", str(folder), *words])
    return summary, max(folder.iterdir(), key=lambda path: path.stat().st_mtime)


def start(*words, head="adapool", **options):
    """Start an agent in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "agents" / f"ppo_{head}.py"), *map(str, words)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, **options
    )


def wait_for(folder, name="checkpoint.pt"):
    """Wait for a run's file."""
    for _ in range(2400):
        found = list(folder.glob(f"*/{name}"))
        if found:
            return found[0]
        time.sleep(0.05)
    raise TimeoutError(name)


# what a run leaves


def test_a_run_leaves_what_it_promises(tmp_path):
    words = [word for word in SMALL if word != "--no-gif"]
    summary = ppo.main([*words, "--run-dir", str(tmp_path), "--total-timesteps", "256"])
    (folder,) = tmp_path.iterdir()
    names = {path.name for path in folder.iterdir()}
    assert {"curve.png", "episode.gif", "metrics.csv", "checkpoint.pt", "summary.json"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert not any(name.startswith(".") for name in names - {".lock"})
    written = json.loads((folder / "summary.json").read_text())
    assert written["score"] == pytest.approx(summary["score"])
    assert {"commit", "torch", "machine"} <= written["versions"].keys()
    assert written["settings"]["learning_rate"] == ppo.Args.learning_rate
    rows = read_metrics(folder / "metrics.csv")
    assert [row["global_step"] for row in rows] == [64, 128, 192, 256]
    keys = "charts/episodic_return charts/episodic_length charts/SPS charts/learning_rate losses/policy_loss "
    keys += "losses/value_loss losses/entropy losses/approx_kl losses/clipfrac losses/explained_variance"  # CleanRL's
    assert set(keys.split()) <= rows[0].keys()
    from PIL import Image

    with Image.open(folder / "episode.gif") as film:
        assert film.n_frames > 100


def test_two_runs_never_share_a_folder(tmp_path):
    assert len({new_folder(tmp_path, "run") for _ in range(3)}) == 3


def test_global_random_state_is_left_alone(tmp_path):
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  the point is the global state
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    run(tmp_path, "--total-timesteps", "128", "--dropout", "0.1")
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002


def test_environment_seeds_are_apart():
    seeds = [derive_seed(seed, purpose) for seed in range(100) for purpose in ("train", "evaluate")]
    assert np.diff(sorted(seeds)).min() > 10**6


# the same again, and going on


@pytest.mark.parametrize(
    ("head", "options"),
    [
        pytest.param("avgpool", [], marks=pytest.mark.slow),
        ("adapool", ["--dropout", "0.1", "--kl-coef", "0.5"]),
        ("clstoken", [*BOX, "--eval-actions", "best", "--dropout", "0.1"]),
        ("maxpool", ["--no-anneal-lr", "--num-agents", "2", "--num-envs", "2"]),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)
def test_same_seed_same_run_and_resume_is_exact(tmp_path, head, options):
    agent = load_agent(head)
    words = ["--total-timesteps", "640", "--seed", "0", *options]
    first, folder = run(tmp_path / "whole", *words, agent=agent)
    again, _ = run(tmp_path / "again", *words, agent=agent)
    assert first["return"] == again["return"]
    trainer = agent.Trainer(agent.parse([*SMALL, "--run-dir", str(tmp_path / "halves"), *words]))
    metrics = None
    for _ in range(5):
        log = trainer.iterate()
        metrics = metrics or MetricsLogger(trainer.folder, tuple(log))
        metrics.add(trainer.step, log)
    metrics.close()
    trainer.save()
    trainer.close()
    resumed = agent.main(["--resume", str(trainer.folder)])
    assert resumed["return"] == first["return"]
    whole, halves = (load_checkpoint(path / "checkpoint.pt") for path in (folder, trainer.folder))
    for part in ("agent", "optimizer", "processes"):
        torch.testing.assert_close(whole[part], halves[part], rtol=0, atol=0)
    assert whole["progress"][:2] == halves["progress"][:2] and whole["progress"][3] == halves["progress"][3]
    rows = [read_metrics(path / "metrics.csv") for path in (folder, trainer.folder)]
    for one, other in zip(*rows, strict=True):
        same = {name for name in one if one[name] == other[name] or np.isnan(one[name])}
        assert same >= one.keys() - {"charts/SPS"}


def test_a_run_can_be_made_longer_unless_its_rate_falls(tmp_path):
    _, folder = run(tmp_path / "a", "--total-timesteps", "128", "--no-anneal-lr")
    ppo.main(["--resume", str(folder), "--total-timesteps", "192"])
    assert [row["global_step"] for row in read_metrics(folder / "metrics.csv")] == [64, 128, 192]
    _, folder = run(tmp_path / "b", "--total-timesteps", "128")
    with pytest.raises(SystemExit, match="total_timesteps=192: must stay 128"):
        ppo.main(["--resume", str(folder), "--total-timesteps", "192"])
    with pytest.raises(SystemExit, match=r"learning_rate=0\.5: the run to resume has 0\.004"):
        ppo.main(["--resume", str(folder), "--learning-rate", "0.5"])


def test_a_run_that_goes_on_says_from_where(tmp_path, capsys):
    _, folder = run(tmp_path, "--total-timesteps", "192", "--no-anneal-lr")
    assert "going on" not in capsys.readouterr().out
    ppo.main(["--resume", str(folder), "--total-timesteps", "256"])
    assert "going on from step 192\n" in capsys.readouterr().out


def test_a_run_in_use_is_not_resumed(tmp_path):
    trainer = ppo.Trainer(ppo.parse([*SMALL, "--run-dir", str(tmp_path), "--total-timesteps", "128"]))
    trainer.save()
    with pytest.raises(SystemExit, match="in use by another process"):
        ppo.main(["--resume", str(trainer.folder)])
    trainer.close()
    assert ppo.main(["--resume", str(trainer.folder)])["steps"] == 128


@posix
@pytest.mark.parametrize(
    "sent", ["SIGUSR1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("SIGINT", "SIGTERM", "SIGHUP"))]
)
def test_a_stopped_run_saves_and_goes_on(tmp_path, sent):
    number = getattr(signal, sent)
    words = ("--total-timesteps", "6400000", "--save-every", "1000000", "--run-dir", tmp_path)
    process = start(*SMALL, *words, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))  # if nohup ignores it
    path = wait_for(tmp_path)  # written after the first update
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and f"--resume {path.parent}" in output and "Traceback" not in output
    assert "stopping after this update, which is saved; once more: at once\n" in output
    step = load_checkpoint(path)["progress"][0]
    assert read_metrics(path.parent / "metrics.csv")[-1]["global_step"] == step
    assert step < 6_400_000
    trainer = ppo.Trainer(ppo.parse(["--resume", str(path.parent)]))
    trainer.iterate()
    assert trainer.step == step + 64
    trainer.close()


def test_a_run_trains_in_any_thread(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(run(tmp_path, "--total-timesteps", "128")[0]))
    thread.start()
    thread.join()
    assert found[0]["steps"] == 128


@posix
def test_a_run_that_outlives_its_terminal_by_nohup_trains_on(tmp_path):
    def ignore():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does

    process = start(*SMALL, "--total-timesteps", "128", "--run-dir", tmp_path, preexec_fn=ignore)
    wait_for(tmp_path)
    process.send_signal(signal.SIGHUP)
    assert process.communicate(timeout=60) and process.returncode == 0


def test_a_stop_before_anything_is_saved_says_so(tmp_path, monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt  # as the second Ctrl-C does

    monkeypatch.setattr(ppo.Trainer, "iterate", interrupted)
    with pytest.raises(SystemExit) as error:
        run(tmp_path)
    told = capsys.readouterr().err
    assert error.value.code == 130 and "stopped before the first update was done: nothing is saved" in told
    assert "--resume" not in told


def test_a_kill_at_any_moment_leaves_a_checkpoint(tmp_path):
    for number in range(2):
        folder = tmp_path / str(number)
        process = start(*SMALL, "--total-timesteps", "6400000", "--run-dir", folder, "--save-every", "1")
        path = wait_for(folder)
        time.sleep(0.13 * number)
        process.kill()
        process.communicate()
        assert load_checkpoint(path)["progress"][0] >= 64
        trainer = ppo.Trainer(ppo.parse(["--resume", str(path.parent)]))  # the lock died with the process
        trainer.close()


@pytest.mark.parametrize("done", [0, 1])
def test_a_run_that_ends_hard_can_go_on_from_its_first_update(tmp_path, monkeypatch, capsys, done):
    iterate = ppo.Trainer.iterate

    def killed(trainer):
        if trainer.updates == done:
            raise KeyboardInterrupt
        return iterate(trainer)

    monkeypatch.setattr(ppo.Trainer, "iterate", killed)
    with pytest.raises(SystemExit, match="130"):
        run(tmp_path, "--total-timesteps", "640")
    assert ("--resume" if done else "nothing is saved") in capsys.readouterr().err
    found = list(tmp_path.glob("*/checkpoint.pt"))
    assert len(found) == done
    if done:
        assert load_checkpoint(found[0])["progress"][:2] == [64, 1]
        assert [row["global_step"] for row in read_metrics(found[0].parent / "metrics.csv")] == [64]


def test_what_a_checkpoint_holds_is_logged_before(tmp_path, monkeypatch):
    def full(trainer):
        raise OSError("no space left")

    monkeypatch.setattr(ppo.Trainer, "save", full)
    with pytest.raises(SystemExit, match="no space left"):
        run(tmp_path, "--total-timesteps", "640")
    (path,) = tmp_path.glob("*/metrics.csv")
    assert [row["global_step"] for row in read_metrics(path)] == [64]


def test_a_longer_run_that_was_killed_before_its_summary_is_not_finished(tmp_path):
    _, folder = run(tmp_path, "--total-timesteps", "64", "--no-anneal-lr")
    before = (folder / "summary.json").read_text()
    ppo.main(["--resume", str(folder), "--total-timesteps", "128"])
    (folder / "summary.json").write_text(before)  # that of the kill
    assert ppo.main(["--resume", str(folder)])["steps"] == 128
    assert json.loads((folder / "summary.json").read_text())["steps"] == 128


def test_a_run_that_is_older_than_a_setting_goes_on_unless_learning_depends_on_it(tmp_path):
    _, folder = run(tmp_path, "--total-timesteps", "64", "--no-anneal-lr")
    content = load_checkpoint(folder / "checkpoint.pt")
    del content["args"]["deterministic"]
    save_checkpoint(folder / "checkpoint.pt", content)
    ppo.main(["--resume", str(folder), "--total-timesteps", "128"])
    del content["args"]["gamma"]
    save_checkpoint(folder / "checkpoint.pt", content)
    with pytest.raises(SystemExit, match=r"another version of this file: it differs in \['gamma'\]"):
        ppo.main(["--resume", str(folder)])


def test_a_finished_run_is_not_run_again(tmp_path, capsys, monkeypatch):
    summary, folder = run(tmp_path, "--total-timesteps", "128")
    before = (folder / "summary.json").read_bytes()
    monkeypatch.setattr(ppo, "Trainer", lambda args: pytest.fail("something slow was made first"))
    for given in (folder, tmp_path):  # the run, and the folder of this run alone
        again = ppo.main(["--resume", str(given)])
        assert again["return"] == summary["return"] and (folder / "summary.json").read_bytes() == before
        assert capsys.readouterr().out.splitlines()[-1].startswith(f"{folder} is finished")


def test_a_finished_run_is_evaluated_and_filmed_anew_where_that_is_asked(tmp_path):
    summary, folder = run(tmp_path, "--total-timesteps", "64", "--options", "max_steps=3")
    more = ppo.main(["--resume", str(folder), "--eval-episodes", "5"])
    assert more["eval_episodes"] == 5 and more["return"] != summary["return"] and more["steps"] == summary["steps"]
    assert json.loads((folder / "summary.json").read_text())["eval_episodes"] == 5
    ppo.main(["--resume", str(folder), "--gif"])
    assert (folder / "episode.gif").is_file()


def test_a_copy_of_the_checkpoint_is_not_taken_up(tmp_path):
    _, folder = run(tmp_path, "--total-timesteps", "64")
    shutil.copy(folder / "checkpoint.pt", folder / "good.pt")
    with pytest.raises(SystemExit, match=r"good.pt': must be a run's folder, which goes on from its checkpoint.pt"):
        ppo.main(["--resume", str(folder / "good.pt")])


def test_damaged_metrics_are_told_before_a_step(tmp_path, monkeypatch):
    _, folder = run(tmp_path, "--total-timesteps", "128", "--no-anneal-lr")
    path = folder / "metrics.csv"
    path.write_text(path.read_text().replace("\n64,", "\n6x4,"))
    monkeypatch.setattr(ppo.Trainer, "iterate", lambda trainer: pytest.fail("a step was played"))
    with pytest.raises(SystemExit, match=r"^error: .*metrics.csv, line 2: must be"):
        ppo.main(["--resume", str(folder), "--total-timesteps", "256"])


def test_metrics_of_other_columns_are_told_and_kept(tmp_path):
    _, folder = run(tmp_path, "--total-timesteps", "128", "--no-anneal-lr")
    path = folder / "metrics.csv"
    text = path.read_text().replace("losses/entropy", "losses/entropie")
    path.write_text(text)
    with pytest.raises(SystemExit, match=r"^error: .*metrics.csv must have the same columns .*losses/entropie") as told:
        ppo.main(["--resume", str(folder), "--total-timesteps", "256"])
    assert "the version of the program that began it" in str(told.value) and path.read_text() == text


def test_one_episode_tells_no_interval(tmp_path, capsys):
    run(tmp_path, "--total-timesteps", "64", "--options", "max_steps=3", "--eval-episodes", "1")
    told = capsys.readouterr().out
    assert "(no interval from one episode; 0 random, 1 oracle)" in told and "nan" not in told


def test_the_bar_tells_a_score_only_where_there_is_one(tmp_path, capsys):
    run(tmp_path / "known", "--total-timesteps", "64", "--options", "max_steps=3")
    assert "return=" in (told := capsys.readouterr().err) and "score=" in told and "nan" not in told
    run(tmp_path / "unknown", "--total-timesteps", "320", "--options", "max_steps=3",
        "--parallel-env", "simple_tag_v0")  # fmt: skip
    assert "return=" in (told := capsys.readouterr().err) and "score" not in told and "nan" not in told


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs a terminal that can hang up")
def test_a_closed_terminal_stops_a_run_unless_it_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stop_signals()  # as under nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_damaged_checkpoint_is_named(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(SystemExit, match=r"checkpoint\.pt is no checkpoint"):
        ppo.main(["--resume", str(tmp_path)])


# settings


def test_a_paper_id_takes_the_papers_settings():
    args = ppo.parse(["--env-id", "noisy_envs/SimpleCentroid-1v3v28-v0", "--seed", "7"])
    assert (args.hidden_dim, args.num_layers, args.num_heads, args.feedforward_dim) == (8, 3, 8, 32)
    assert (args.minibatch_size, args.update_epochs, args.learning_rate, args.vf_coef) == (8192, 16, 2.5e-3, 0.05)
    assert (args.total_timesteps, args.gamma, args.gae_lambda, args.max_grad_norm) == (4_000_000, 0.99, 0.95, 10.0)
    assert args.seed == 7
    assert args.num_envs * args.num_steps == 8192


def test_a_paper_id_of_tag_takes_its_own_settings():
    args = ppo.parse(["--env-id", "noisy_envs/SimpleTag-1v3v0-v0"])
    assert (args.num_layers, args.num_heads, args.hidden_dim, args.feedforward_dim) == (6, 3, 3, 12)
    assert (args.kl_coef, args.kl_target, args.vf_coef, args.ent_coef) == (0.5, 0.01, 0.0005, 0.005)
    assert args.num_envs * args.num_steps == args.minibatch_size == 8192
    assert (args.update_epochs, args.learning_rate, args.total_timesteps) == (16, 2.5e-3, 4_000_000)
    assert (args.gamma, args.gae_lambda, args.clip_coef, args.max_grad_norm) == (0.99, 0.95, 0.2, 10.0)


def test_a_paper_id_of_box_world_takes_its_own_settings():
    for kind in ("Entities", "Pixels"):
        args = ppo.parse(["--env-id", f"noisy_envs/BoxWorld{kind}-v0"])
        assert (args.num_layers, args.num_heads, args.hidden_dim, args.feedforward_dim) == (6, 6, 6, 24)
        assert (args.kl_coef, args.vf_coef, args.ent_coef, args.dropout, args.init_std) == (0, 0.01, 0, 0.1, 0.02)
        assert args.num_envs * args.num_steps == args.minibatch_size == 14_400
        assert (args.update_epochs, args.learning_rate, args.total_timesteps) == (32, 2.5e-3, 40_000_000)
        assert (args.gamma, args.gae_lambda, args.clip_coef, args.max_grad_norm) == (0.99, 0.95, 0.2, 10.0)


@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_presets_by_name(env_id):
    chosen = {name: ppo.parse(["--env-id", env_id, "--preset", name]) for name in ("paper", "fast")}
    default = ppo.parse(["--env-id", env_id])
    assert default == chosen[default.preset] and default.env_id == env_id
    assert chosen["paper"].num_layers >= 3 and chosen["fast"].num_layers == 2
    assert (default.preset == "fast") == (env_id.split("/")[1] in ppo.GENERAL)


def test_every_setting_is_explained():
    shown = subprocess.run(
        [sys.executable, ROOT / "agents" / "ppo_maxpool.py", "--env-id", "noisy_envs/SimpleTag-1v3v0-v0", "--help"],
        capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "200"},
    ).stdout  # fmt: skip
    for field in dataclasses.fields(ppo.Args):
        assert f"--{field.name.replace('_', '-')}" in shown
    assert "(default: 12)" in shown and "(default: 0.0005)" in shown  # the id's own


@posix
@pytest.mark.parametrize("program", ["ppo_avgpool", "compare"])
def test_a_reader_that_has_read_enough_is_no_error(program):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, ROOT / "agents" / f"{program}.py", "--help"],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    "words",
    [
        ["--num-envs", "0"],
        ["--total-timesteps", "10"],
        ["--minibatch-size", "1"],
        ["--minibatch-size", "3000"],
        ["--num-heads", "5"],
        ["--attention-scale", "none"],
        ["--resume", "/nowhere"],
        ["--evaluate", "/nowhere"],
        ["--env-id", "noisy_envs/Nothing-v0"],
        ["--learning-rate", "nan"],
        ["--gamma", "1.5"],
        ["--device", "abacus"],
        ["--seed", "-1"],
        ["--options", "colour=red"],
        ["--options", "num_signal"],
        ["--gif", "False"],
        ["--options", "num_signal=-3"],
        ["--num-noise", "4", "28"],
        ["--num-noise", "4", "--env-id", "noisy_envs/BoxWorld-v0"],
        ["--num-agents", "4", "--env-id", "noisy_envs/BoxWorld-v0"],
        ["--record", "episode.gif"],
        ["--parallel-env", "simple_tag_v0", "--env-id", "noisy_envs/BoxWorld-v0"],
    ],
    ids=" ".join,
)
def test_bad_settings_end_with_one_line(words, tmp_path):
    with pytest.raises(SystemExit) as error:
        ppo.main(["--run-dir", str(tmp_path), *words])
    assert words[1].split("=")[0] in str(error.value) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["--num-steps", "1000000000000", "--total-timesteps", "1000000000000000", "--no-anneal-lr"],
        ["--hidden-dim", "16384", "--num-layers", "900"],
        ["--eval-episodes", "1000000", "--num-noise", "1000000"],
        [
            "--num-noise",
            "1000000",
            "--num-envs",
            "8",
            "--num-steps",
            "16",
            "--minibatch-size",
            "64",
            "--eval-episodes",
            "2",
        ],
    ],
    ids=" ".join,
)
def test_more_than_the_memory_is_refused_before_it_is_taken(words, tmp_path):
    with pytest.raises(
        SystemExit, match=r"^error: not enough memory: [^\n]* need at least [^\n]* GiB, cpu has [^\n]* GiB$"
    ):
        ppo.main(["--run-dir", str(tmp_path), *words])


def test_options_reach_the_worlds():
    args = ppo.parse(["--options", "num_signal=5", "num_noise=(0, 28)", "reward_shape=linear"])
    game = ppo.make_envs(args, 2, "train")[0].game
    assert (game.num_signal, game.num_noise, game.reward_shape) == (5, (0, 28), "linear")
    tag = ppo.parse(["--env-id", "noisy_envs/SimpleTag-v0", "--num-noise", "9", "--num-agents", "2"])
    game = ppo.make_envs(tag, 2, "train")[0].game
    assert (game.num_obstacles, game.num_predators) == (9, 2)


def test_a_score_is_of_the_game_that_was_played():
    args = ppo.parse(["--num-noise", "4"])
    assert ppo.references(args) == ppo.references(ppo.parse([]))  # as registered
    assert ppo.references(dataclasses.replace(args, num_noise=(28,))).random < ppo.references(args).random - 0.05


def test_evaluation_is_on_levels_that_training_never_meets():
    args = ppo.parse(BOX)
    found = {purpose: ppo.make_envs(args, 50, purpose)[0].state.level for purpose in ("train", "evaluate")}
    assert found["train"].min() >= 0 and found["train"].max() < 100_000 <= found["evaluate"].min()


def test_evaluated_actions_are_the_best_or_drawn():
    args = ppo.parse(BOX)
    assert args.eval_actions == "sampled" and ppo.parse([]).eval_actions == "best"
    envs, tokens = ppo.make_envs(args, 200, "evaluate")
    agent = ppo.Agent(args, envs.token_spec, envs.single_action_space)
    likely = agent(tokens)[0].argmax(-1)
    drawn, best = (
        ppo.decide(agent, tokens, dataclasses.replace(args, eval_actions=how), torch.Generator().manual_seed(0))
        for how in ("sampled", "best")
    )
    assert torch.equal(best, likely) and not torch.equal(drawn, likely) and set(drawn.tolist()) == {0, 1, 2, 3}


# files


@pytest.mark.parametrize("place", ["class", "outside"])
def test_copies_are_checked_and_mended(tmp_path, place):
    for folder in ("agents", "tools", "noisy_envs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    check = [sys.executable, tmp_path / "tools" / "check_copies.py"]
    assert subprocess.run(check, check=False).returncode == 0
    path = tmp_path / "agents" / "ppo_clstoken.py"
    good = path.read_text()
    word = "pooled = embeddings[:, 0]" if place == "class" else "loss.backward()"
    assert word in good or place == "outside"
    path.write_text(good.replace(word, word + "  # changed") if word in good else good.replace("PPO", "PPO2", 1))
    wrong = subprocess.run(check, check=False, capture_output=True, text=True)
    assert wrong.returncode == 1 and "agents/ppo_clstoken.py" in wrong.stdout
    subprocess.run([*check, "--fix"], check=True, stdout=subprocess.DEVNULL)
    assert path.read_text() == good


# compilation, and several processes


@needs_compiler
@pytest.mark.slow
def test_a_compiled_run_is_the_same_but_for_rounding(tmp_path):
    folders = {}
    for word in ("--compile", "--no-compile"):
        ppo.main([*PAPER, "--dropout", "0", "--run-dir", str(tmp_path / word), word])
        (folders[word],) = (tmp_path / word).iterdir()
    rows = [read_metrics(folder / "metrics.csv") for folder in folders.values()]
    for one, other in zip(*rows, strict=True):
        for name in ("losses/policy_loss", "losses/value_loss", "losses/entropy", "losses/grad_norm"):
            assert one[name] == pytest.approx(other[name], rel=2e-3, abs=2e-4), name
    with pytest.raises(SystemExit, match="dropout"):  # told from what may change
        ppo.main(["--resume", str(folders["--compile"]), "--dropout", "0.1"])
    compiled, plain = (load_checkpoint(folder / "checkpoint.pt")["agent"] for folder in folders.values())
    assert compiled.keys() == plain.keys()
    resumed = ppo.main(["--resume", str(folders["--compile"]), "--no-compile", "--total-timesteps", "128"])
    assert resumed["steps"] == 128


@needs_compiler
def test_a_compiled_policy_follows_the_weights_and_is_compiled_once(tmp_path):
    args = ppo.parse(
        [*PAPER, "--options", "num_noise=(0, 28)", "--dropout", "0.1", "--run-dir", str(tmp_path), "--compile"]
    )
    trainer = ppo.Trainer(args)
    trainer.iterate()
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(3):
        trainer.iterate()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before > 0
    with torch.no_grad():
        _, samples, _ = trainer.collect(trainer.play, torch.zeros(16, 2, 5))
        plain = ppo.plain_agent(args, trainer.envs)
        plain.load_state_dict(trainer.agent.state_dict())
        torch.testing.assert_close(samples.parameters, plain(samples.tokens)[0], rtol=0, atol=1e-4)
    trainer.close()


def test_two_processes_train_one_run(tmp_path):
    words = [*SMALL, "--total-timesteps", "128", "--run-dir", str(tmp_path), "--save-every", "1", "--dropout", "0.1"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    agent = str(ROOT / "agents" / "ppo_adapool.py")
    done = subprocess.run(
        [*launch, agent, *words], capture_output=True, text=True, env=environment, check=False, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = tmp_path.iterdir()  # only one process writes
    assert [row["global_step"] for row in read_metrics(folder / "metrics.csv")] == [64, 128]
    first, second = load_checkpoint(folder / "checkpoint.pt")["processes"]
    args = ppo.parse(words)
    _, tokens = ppo.make_envs(args, 4, "train")
    for rank, part in enumerate((first, second)):
        envs, own = ppo.make_envs(args, 2, "train", first=2 * rank)
        assert torch.equal(own, tokens[2 * rank : 2 * rank + 2])  # worlds that one process would have
        assert part["play"][0][2].tolist() == envs.episodes[0].tolist()  # seeds
    generators = [torch.Generator(), torch.Generator()]
    for generator, part in zip(generators, (first, second), strict=True):
        generator.set_state(part["generator"])
    seeds = {generator.initial_seed() for generator in generators}
    assert len(seeds) == 2 and min(seeds) > 2**32  # no other run's
    (folder / "summary.json").unlink()  # of a finished run nothing is asked
    with pytest.raises(SystemExit, match="is of 2 processes"):
        ppo.main(["--resume", str(folder)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_demo_learns(tmp_path, seed):
    assert ppo.main(["--seed", str(seed), "--run-dir", str(tmp_path), "--no-gif"])["score"] >= 0.7


@pytest.mark.slow
def test_box_world_is_learned_slowly(tmp_path):
    words = [*BOX, "--total-timesteps", "524288", "--eval-episodes", "1000"]
    assert ppo.main([*words, "--run-dir", str(tmp_path), "--no-gif"])["return"] >= 1.5  # random play: 0.46


@pytest.mark.slow
def test_the_predator_learns(tmp_path):
    words = ["--env-id", "noisy_envs/SimpleTag-v0", "--seed", "2", "--run-dir", str(tmp_path), "--no-gif"]
    assert ppo.main(words)["score"] >= 0.7
