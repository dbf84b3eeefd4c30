"""Runs of an agent: what they leave, repetition, exact resume, signals, and what stops them."""

import json
import shutil
import signal
import threading
import time

import numpy as np
import pytest
from cases import posix

pytest.importorskip("torch")
pytest.importorskip("tyro")
import torch
from training_helpers import BOX, SMALL, begin, ppo, run, start, train_until

from noisy_envs import baselines
from noisy_envs.randomness import derive_seed
from noisy_envs.training import main as main_module
from noisy_envs.training import run as run_module
from noisy_envs.training.checkpoint import load_checkpoint, save_checkpoint
from noisy_envs.training.envs import Envs
from noisy_envs.training.files import new_folder
from noisy_envs.training.main import main
from noisy_envs.training.metrics import read_metrics
from noisy_envs.training.process import stop_signals
from noisy_envs.training.run import Run
from noisy_envs.training.settings import parse


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
    summary, folder = run(tmp_path, "--total-timesteps", "256", "--capture-video")
    assert list(tmp_path.iterdir()) == [folder]
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
        assert film.n_frames == 6  # five steps


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


def test_baselines_are_measured_once(tmp_path, monkeypatch):
    measure, measured = baselines.play_baseline, []
    monkeypatch.setattr(baselines, "play_baseline", lambda *a, **b: measured.append(a) or measure(*a, **b))
    summary, _ = run(tmp_path, "--total-timesteps", "64")
    assert [policy for _, policy in measured] == ["random", "oracle"]
    assert summary["return_random"] < summary["return_oracle"]


def test_one_episode_has_no_interval(tmp_path, capsys):
    run(tmp_path, "--total-timesteps", "64", "--eval-episodes", "1")
    output = capsys.readouterr().out
    assert "(no interval from one episode; 0 random, 1 oracle)" in output and "nan" not in output


def test_the_bar_shows_a_score_only_where_there_is_one(tmp_path, capsys):
    run(tmp_path / "known", "--total-timesteps", "64")
    assert "return=" in (output := capsys.readouterr().err) and "score=" in output and "nan" not in output
    tag = ["--env-id", "noisy_envs/SimpleTag-v0", "--learners", "all"]
    run(tmp_path / "unknown", "--total-timesteps", "320", *tag)
    assert "return=" in (output := capsys.readouterr().err) and "score" not in output and "nan" not in output


# the same again, and going on


@pytest.mark.parametrize(
    "options",
    [
        ["--dropout", "0.1", "--kl-coef", "0.5"],
        [*BOX, "--eval-deterministic", "--dropout", "0.1"],
        ["--no-anneal-lr", "--num-envs", "2", "--learners", "all", "--env-kwargs", "num_agents=2", "max_steps=5"],
    ],
    ids=" ".join,
)
def test_same_seed_same_run_and_resume_is_exact(tmp_path, options):
    words = ["--total-timesteps", "640", "--seed", "0", *options]
    first, folder = run(tmp_path / "whole", *words)
    again, _ = run(tmp_path / "again", *words)
    assert first["return"] == again["return"]
    stopped = train_until(5, [*SMALL, "--run-dir", str(tmp_path / "halves"), *words])
    stopped.close()
    assert load_checkpoint(stopped.folder / "checkpoint.pt")["progress"][:2] == [320, 5]
    resumed = main(ppo, ["--resume", str(stopped.folder)])
    assert resumed["return"] == first["return"]
    whole, halves = (load_checkpoint(path / "checkpoint.pt") for path in (folder, stopped.folder))
    for part in ("agent", "optimizer", "processes"):
        torch.testing.assert_close(whole[part], halves[part], rtol=0, atol=0)
    assert whole["progress"][:2] == halves["progress"][:2] and whole["progress"][3] == halves["progress"][3]
    rows = [read_metrics(path / "metrics.csv") for path in (folder, stopped.folder)]
    for one, other in zip(*rows, strict=True):
        same = {name for name in one if one[name] == other[name] or np.isnan(one[name])}
        assert same >= one.keys() - {"charts/SPS"}


def test_a_run_can_be_made_longer_unless_its_rate_falls(tmp_path):
    _, folder = run(tmp_path / "a", "--total-timesteps", "128", "--no-anneal-lr")
    main(ppo, ["--resume", str(folder), "--total-timesteps", "192"])
    assert [row["global_step"] for row in read_metrics(folder / "metrics.csv")] == [64, 128, 192]
    _, folder = run(tmp_path / "b", "--total-timesteps", "128")
    with pytest.raises(SystemExit, match="total_timesteps=192: expected 128"):
        main(ppo, ["--resume", str(folder), "--total-timesteps", "192"])
    with pytest.raises(SystemExit, match=r"learning_rate=0\.5: the run to resume has 0\.004"):
        main(ppo, ["--resume", str(folder), "--learning-rate", "0.5"])


def test_a_resumed_run_says_from_where(tmp_path, capsys):
    _, folder = run(tmp_path, "--total-timesteps", "192", "--no-anneal-lr")
    assert "resumed at" not in capsys.readouterr().out
    main(ppo, ["--resume", str(folder), "--total-timesteps", "256"])
    assert "resumed at step 192\n" in capsys.readouterr().out


def test_a_run_in_use_is_not_resumed(tmp_path):
    stopped = train_until(1, [*SMALL, "--run-dir", str(tmp_path), "--total-timesteps", "128"])
    with pytest.raises(SystemExit, match="in use by another process"):
        main(ppo, ["--resume", str(stopped.folder)])
    stopped.close()
    assert main(ppo, ["--resume", str(stopped.folder)])["steps"] == 128


def test_a_longer_run_that_was_killed_before_its_summary_is_not_complete(tmp_path):
    _, folder = run(tmp_path, "--total-timesteps", "64", "--no-anneal-lr")
    before = (folder / "summary.json").read_text()
    main(ppo, ["--resume", str(folder), "--total-timesteps", "128"])
    (folder / "summary.json").write_text(before)  # that of the kill
    assert main(ppo, ["--resume", str(folder)])["steps"] == 128
    assert json.loads((folder / "summary.json").read_text())["steps"] == 128


@pytest.mark.parametrize("setting", ["anneal_lr", "gamma"])
def test_a_run_of_other_settings_is_refused(tmp_path, setting):
    _, folder = run(tmp_path, "--total-timesteps", "64", "--no-anneal-lr")
    content = load_checkpoint(folder / "checkpoint.pt")
    value = content["args"].pop(setting)
    match = rf"^error: [^\n]*checkpoint.pt was written by another version of this agent: the settings \['{setting}'\]"
    for args in (content["args"], content["args"] | {setting: value, "beta": 1}):
        save_checkpoint(folder / "checkpoint.pt", {**content, "args": args})
        with pytest.raises(SystemExit, match=match.replace(setting, "beta") if "beta" in args else match):
            main(ppo, ["--resume", str(folder), "--total-timesteps", "128"])


def test_a_complete_run_is_not_run_again(tmp_path, capsys, monkeypatch):
    summary, folder = run(tmp_path, "--total-timesteps", "128")
    before = (folder / "summary.json").read_bytes()
    monkeypatch.setattr(main_module, "Run", lambda *_: pytest.fail("something slow was made first"))
    for given in (folder, tmp_path):  # the run, and the folder of this run alone
        again = main(ppo, ["--resume", str(given)])
        assert again["return"] == summary["return"] and (folder / "summary.json").read_bytes() == before
        assert capsys.readouterr().out.splitlines()[-1].startswith(f"{folder} is complete")


def test_a_complete_run_is_evaluated_and_filmed_again_where_that_is_asked(tmp_path):
    summary, folder = run(tmp_path, "--total-timesteps", "64")
    assert main(ppo, ["--resume", str(folder), "--capture-video"])["return"] == summary["return"]
    assert (folder / "episode.gif").is_file()
    more = main(ppo, ["--resume", str(folder), "--eval-episodes", "5"])
    assert more["eval_episodes"] == 5 and more["return"] != summary["return"] and more["steps"] == summary["steps"]
    assert json.loads((folder / "summary.json").read_text())["eval_episodes"] == 5
    assert main(ppo, ["--resume", str(folder)]) == json.loads((folder / "summary.json").read_text())  # nothing is left


def test_a_run_that_is_older_than_a_setting_resumes_unless_learning_depends_on_it(tmp_path):
    _, folder = run(tmp_path, "--total-timesteps", "64", "--no-anneal-lr")
    content = load_checkpoint(folder / "checkpoint.pt")
    del content["args"]["torch_deterministic"]
    save_checkpoint(folder / "checkpoint.pt", content)
    assert main(ppo, ["--resume", str(folder), "--total-timesteps", "128"])["steps"] == 128
    del content["args"]["gamma"]
    save_checkpoint(folder / "checkpoint.pt", content)
    with pytest.raises(SystemExit, match=r"another version of this agent: the settings \['gamma'\] differ"):
        main(ppo, ["--resume", str(folder)])


def test_a_closed_pipe_is_no_error_of_the_run(tmp_path, monkeypatch):
    def closed(_):
        raise BrokenPipeError

    monkeypatch.setattr(Run, "_announce", closed)
    with pytest.raises(BrokenPipeError):  # which the program ends silently, as `ignore_broken_pipe` has it
        run(tmp_path, "--total-timesteps", "64")


def test_a_copy_of_the_checkpoint_is_not_resumed(tmp_path):
    _, folder = run(tmp_path, "--total-timesteps", "64")
    shutil.copy(folder / "checkpoint.pt", folder / "good.pt")
    with pytest.raises(SystemExit, match=r"good.pt': expected a run's folder, whose checkpoint.pt is resumed"):
        main(ppo, ["--resume", str(folder / "good.pt")])


def test_damaged_metrics_are_reported_before_a_step(tmp_path, monkeypatch):
    _, folder = run(tmp_path, "--total-timesteps", "128", "--no-anneal-lr")
    path = folder / "metrics.csv"
    path.write_text(path.read_text().replace("\n64,", "\n6x4,"))
    monkeypatch.setattr(Run, "iterations", lambda _: pytest.fail("a step was played"))
    with pytest.raises(SystemExit, match=r"^error: .*metrics.csv, line 2: "):
        main(ppo, ["--resume", str(folder), "--total-timesteps", "256"])


def test_metrics_of_other_columns_are_reported_and_kept(tmp_path):
    _, folder = run(tmp_path, "--total-timesteps", "128", "--no-anneal-lr")
    path = folder / "metrics.csv"
    text = path.read_text().replace("losses/entropy", "losses/entropie")
    path.write_text(text)
    with pytest.raises(SystemExit, match=r"^error: [^\n]*metrics.csv: [^\n]*losses/entropie") as error:
        main(ppo, ["--resume", str(folder), "--total-timesteps", "256"])
    assert "the version of the program that started it" in str(error.value) and path.read_text() == text


def test_a_damaged_checkpoint_is_named(tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(SystemExit, match=r"checkpoint\.pt is not a checkpoint"):
        main(ppo, ["--resume", str(tmp_path)])


# signals, and other ends


@posix
@pytest.mark.parametrize(
    "sent", ["SIGUSR1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("SIGINT", "SIGTERM", "SIGHUP"))]
)
def test_a_stopped_run_saves_and_resumes(tmp_path, sent):
    number = getattr(signal, sent)
    words = ("--total-timesteps", "6400000", "--checkpoint-interval", "1000000", "--run-dir", tmp_path)
    process = start(*SMALL, *words, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))  # if nohup ignores it
    path = wait_for(tmp_path)  # written after the first update
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and f"--resume {path.parent}" in output and "Traceback" not in output
    assert "Stopping after this update. Press Ctrl-C again to stop immediately without saving.\n" in output
    step, updates, *_ = load_checkpoint(path)["progress"]
    assert read_metrics(path.parent / "metrics.csv")[-1]["global_step"] == step
    assert step < 6_400_000
    resumed = train_until(updates + 1, ["--resume", str(path.parent)])
    assert resumed.step == step + 64
    resumed.close()


def test_a_second_signal_stops_at_once(tmp_path, monkeypatch, capsys):
    collect = ppo.collect

    def signalled(*given):
        if list(tmp_path.glob("*/checkpoint.pt")):  # in the second update
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return collect(*given)

    monkeypatch.setattr(ppo, "collect", signalled)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores Ctrl-C in background jobs
    try:
        with pytest.raises(SystemExit, match="130"):
            run(tmp_path, "--total-timesteps", "640")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert "stopped; resume with: python" in capsys.readouterr().err
    (path,) = tmp_path.glob("*/checkpoint.pt")
    assert load_checkpoint(path)["progress"][:2] == [64, 1]


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


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="needs a terminal that can hang up")
def test_a_closed_terminal_stops_a_run_unless_it_is_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signal.SIGHUP not in stop_signals()  # as under nohup
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        assert signal.SIGHUP in stop_signals()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_kill_at_any_moment_leaves_a_checkpoint(tmp_path):
    for number in range(2):
        folder = tmp_path / str(number)
        process = start(*SMALL, "--total-timesteps", "6400000", "--run-dir", folder, "--checkpoint-interval", "1")
        path = wait_for(folder)
        time.sleep(0.13 * number)
        process.kill()
        process.communicate()
        step, updates, *_ = load_checkpoint(path)["progress"]
        assert step == 64 * updates >= 64
        resumed = train_until(updates + 1, ["--resume", str(path.parent)])  # the lock died with the process
        resumed.close()


@pytest.mark.parametrize("done", [0, 1])
def test_a_run_that_ends_hard_can_be_resumed_from_its_first_update(tmp_path, monkeypatch, capsys, done):
    collect, calls = ppo.collect, []

    def killed(*given):
        if len(calls) == done:
            raise KeyboardInterrupt  # as the second Ctrl-C does
        calls.append(given)
        return collect(*given)

    monkeypatch.setattr(ppo, "collect", killed)
    with pytest.raises(SystemExit) as error:
        run(tmp_path, "--total-timesteps", "640")
    output = capsys.readouterr().err
    assert error.value.code == 130
    assert ("--resume" in output, "nothing was saved yet" in output) == (bool(done), not done)
    found = list(tmp_path.glob("*/checkpoint.pt"))
    assert len(found) == done
    if done:
        assert load_checkpoint(found[0])["progress"][:2] == [64, 1]
        assert [row["global_step"] for row in read_metrics(found[0].parent / "metrics.csv")] == [64]


def test_checkpoints_follow_the_first_the_last_and_each_third_update(tmp_path, monkeypatch):
    save, saved = run_module.save_checkpoint, []
    monkeypatch.setattr(
        run_module, "save_checkpoint", lambda path, content: saved.append(content["progress"][1]) or save(path, content)
    )
    run(tmp_path, "--total-timesteps", "512", "--checkpoint-interval", "3")
    assert saved == [1, 3, 6, 8]


def test_what_a_checkpoint_holds_is_logged_before(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(run_module, "save_checkpoint", full)
    with pytest.raises(SystemExit, match="no space left"):
        run(tmp_path, "--total-timesteps", "640")
    (path,) = tmp_path.glob("*/metrics.csv")
    assert [row["global_step"] for row in read_metrics(path)] == [64]


# numbers that are not finite


@pytest.mark.parametrize("first", [False, True])
def test_an_observation_that_is_not_finite_stops_the_run(tmp_path, monkeypatch, first):
    make = Envs.__init__

    def broken(envs, *given):
        make(envs, *given)
        mover = envs.start.envs.state.mover.clone()
        mover[0, 1, 0] = torch.nan
        state = envs.start.envs.state._replace(mover=mover)
        tokens = envs.start.tokens * torch.nan if first else envs.start.tokens
        envs.start = envs.start._replace(envs=envs.start.envs._replace(state=state), tokens=tokens)

    monkeypatch.setattr(Envs, "__init__", broken)
    with pytest.raises(
        SystemExit, match=r"^error: noisy_envs/SimpleCentroid-v0 returned an observation that is not finite$"
    ):
        run(tmp_path, "--total-timesteps", "128", "--capture-video")
    assert not list(tmp_path.glob("*/metrics.csv"))


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    words = ["--total-timesteps", "1280", "--learning-rate", "1e6", "--no-anneal-lr", "--max-grad-norm", "1e30"]
    with pytest.raises(SystemExit, match=r"^error: update \d+: losses are no longer finite: "):
        run(tmp_path, *words)


def test_too_little_memory_ends_in_one_line(tmp_path, monkeypatch):
    def exhausted(*_):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory\nframe #0")

    monkeypatch.setattr(ppo, "collect", exhausted)
    with pytest.raises(SystemExit, match=r"^error: not enough memory: DefaultCPUAllocator: can't allocate[^\n]*$"):
        run(tmp_path, "--total-timesteps", "64")


# schedules


def test_the_learning_rate_falls_to_zero_or_stays(tmp_path):
    for word, expected in (("--anneal-lr", [0.004, 0.003, 0.002, 0.001]), ("--no-anneal-lr", [0.004] * 4)):
        _, folder = run(tmp_path / word, "--total-timesteps", "256", "--learning-rate", "0.004", word)
        rows = read_metrics(folder / "metrics.csv")
        assert [row["charts/learning_rate"] for row in rows] == pytest.approx(expected)


@pytest.mark.parametrize(("target", "factor"), [("1e-9", 1.5), ("1e9", 0.5)])
def test_the_kl_penalty_is_adapted_towards_its_target(tmp_path, target, factor):
    _, folder = run(tmp_path, "--total-timesteps", "128", "--kl-coef", "0.2", "--kl-target", target)
    assert load_checkpoint(folder / "checkpoint.pt")["progress"][3] == pytest.approx(0.2 * factor**2)


def test_each_process_draws_from_a_generator_of_its_own(monkeypatch):
    args, *_ = begin()
    seeds = []
    for rank in range(3):
        monkeypatch.setattr(run_module, "RANK", rank)
        seeds.append(Run(ppo, args).generator().initial_seed())
    assert len(set(seeds)) == 3 and min(seeds) > 2**32
    assert Run(ppo, parse(ppo, [*SMALL, "--seed", "2"])).generator().initial_seed() not in seeds
