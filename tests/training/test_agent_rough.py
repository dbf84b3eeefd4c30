"""Rough treatment: odd settings, full disks, kills, copies elsewhere. One line tells what is wrong, nothing is lost."""

import csv
import shutil
import subprocess
import sys
import time

import pytest
from cases import HEADS, posix
from helpers import ROOT, TINY, load_agent, train_tiny, with_path

pytest.importorskip("torch")
pytest.importorskip("tyro")
import torch

from noisy_envs.training.main import main
from noisy_envs.training.run import Run
from noisy_envs.training.settings import parse

try:
    import resource
except ImportError:  # on Windows
    resource = None

AGENT = ROOT / "agents" / "ppo_adapool.py"
HUGE = str(10**30)


@pytest.fixture(scope="module")
def ppo():
    return load_agent("adapool")


def start(path, *words, cwd=None):
    """Run an agent's file in a process of its own, which finds the library, and no checkout's agents."""
    env = {**with_path(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, path, *map(str, words)]
    return subprocess.Popen(command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def with_small_disk(size, *words):
    """Run the agent where no file may grow beyond `size` bytes; returns what it printed."""
    process = start(AGENT, *words)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))  # long before it has imported torch
    return process.communicate(timeout=60)[0].strip()


def weights(run):
    return torch.load(run / "checkpoint.pt")["agent"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--seed", HUGE], f"seed={HUGE}: expected a number from 0 to {2**63 - 1}"),
        (["--num-threads", HUGE], f"num_threads={HUGE}: expected a number from 1 to 1024"),
        (["--eval-episodes", HUGE], f"eval_episodes={HUGE}: expected a number from 1 to 1000000"),
        (["--num-layers", HUGE], f"num_layers={HUGE}: expected a number from 1 to 1000"),
        (["--mlp-dim", HUGE], f"mlp_dim={HUGE}: expected a number from 1 to 16384"),
        (["--init-std", "1e30"], "init_std=1e+30: expected a number from 0 to 100"),
        (["--ent-coef", "inf"], "ent_coef=inf: expected a number from 0 to 1000000"),
        (["--gae-lambda", "nan"], "gae_lambda=nan: expected a number from 0 to 1"),
        (["--log-std-min", "1"], "log_std_min=1.0: expected at most log_std_max=0.5"),
        (
            ["--preset", "slow"],
            "preset='slow': expected 'fast' or 'paper-text' or 'paper' for noisy_envs/SimpleCentroid",
        ),
        (["--dual-clip", "0.5"], "dual_clip=0.5: expected more than 1, or 0 for none"),
        (["--device", ""], "device='': "),
        (["--device", "meta"], "device='meta': "),
        (["--env-id", "ü☃"], "env_id='ü☃': Malformed environment ID: ü☃"),
        (["--env-id", "noisy_envs/SimpleTagg-v0"], "did you mean 'noisy_envs/SimpleTag-v0'? expected an ID that "),
        (["--env-id", "BoxWorld-v0"], "did you mean 'noisy_envs/BoxWorld-v0'? expected an ID that "),
        (["--num-noise", "4", "28"], "num_noise=(4, 28): expected one number for training"),
        (["--record", "x.gif"], "record='x.gif': needs --evaluate"),
        (["--env-kwargs", ""], "env_kwargs='': expected NAME=VALUE"),
        (["--env-kwargs", "x={[]:1}"], "unexpected keyword argument 'x': expected one of "),
        (["--env-kwargs", "num_noise={}"], "num_noise={}: expected an integer or a range"),
        (
            ["--env-id", "noisy_envs/BoxWorld-v0", "--env-kwargs", "observation=rgb"],
            "env_kwargs=('observation=rgb',): expected observations that are tokens",
        ),
        (["--resume", ""], "no checkpoint at checkpoint.pt"),
        pytest.param(["--run-dir", "/dev/null/x"], "Not a directory: '/dev/null/x'", marks=posix),
    ],
    ids=lambda words: "".join(words)[:30] if isinstance(words, list) else "",
)
def test_odd_settings_end_with_one_line_before_anything_is_made(ppo, words, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as error:
        main(ppo, [*TINY, "--total-timesteps", "64", *words])
    message = str(error.value)
    assert message.startswith("error: ") and told in message and "\n" not in message
    assert not list(tmp_path.iterdir())


def test_where_the_oracle_is_no_better_than_chance_there_is_no_score(ppo, tmp_path):
    summary, run = train_tiny(ppo, tmp_path, "--env-kwargs", "max_steps=1")
    assert summary["score"] != summary["score"] and (run / "curve.png").exists()


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits a process from outside")
@pytest.mark.slow
def test_a_full_disk_ends_with_one_line_and_the_last_checkpoint_is_whole(ppo, tmp_path):
    whole, _ = train_tiny(ppo, tmp_path / "whole", "--total-timesteps", "1024", "--checkpoint-interval", "1")
    _, run = train_tiny(ppo, tmp_path / "run", "--checkpoint-interval", "1")
    saved = weights(run)
    size = (run / "checkpoint.pt").stat().st_size
    told = with_small_disk(size - 1000, "--resume", run, "--total-timesteps", 1024)
    last = told.splitlines()[-1]
    assert last.startswith("error: [Errno 27] File too large") and f"resume with: python {AGENT} --resume {run}" in last
    assert "Traceback" not in told
    assert all(torch.equal(x, saved[name]) for name, x in weights(run).items())
    assert main(ppo, ["--resume", str(run), "--total-timesteps", "1024"])["return"] == whole["return"]
    last = with_small_disk(size - 1000, *TINY, "--run-dir", tmp_path / "new").splitlines()[-1]
    assert "File too large" in last and "resume with" not in last  # there is no checkpoint


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_goes_on_as_if_it_had_not_been(ppo, tmp_path):
    length = ["--total-timesteps", str(64 * 200)]
    _, folder = train_tiny(ppo, tmp_path / "whole", *length)
    process = start(AGENT, *TINY, *length, "--checkpoint-interval", 1, "--run-dir", tmp_path / "run")
    for moment in (0.1, 0.4):
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("run/*/checkpoint.pt")) and time.monotonic() < deadline:
            time.sleep(0.05)
        (run,) = (tmp_path / "run").iterdir()
        before = (run / "checkpoint.pt").stat().st_mtime_ns
        while (run / "checkpoint.pt").stat().st_mtime_ns == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(moment)
        process.kill()
        process.communicate()
        torch.load(run / "checkpoint.pt")
        process = start(AGENT, "--resume", run)
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert all(torch.equal(x, weights(folder)[name]) for name, x in weights(run).items())
    with (run / "metrics.csv").open() as ours, (folder / "metrics.csv").open() as theirs:
        columns = ("global_step", "charts/episodic_return", "losses/policy_loss")
        a, b = ([[row[name] for name in columns] for row in csv.DictReader(file)] for file in (ours, theirs))
    assert a == b and len(a) == 200


def test_a_copied_file_without_presets_has_its_own_defaults_for_every_id(tmp_path):
    agent = load_agent("adapool")
    agent.__file__ = str(tmp_path / "mine.py")
    for env_id in ("noisy_envs/SimpleTag-1v3v28-v0", "CartPole-v1"):
        assert parse(agent, ["--env-id", env_id]) == agent.Args(env_id=env_id)
        for preset in ("paper", "fast"):
            with pytest.raises(SystemExit) as error:
                main(agent, ["--env-id", env_id, "--preset", preset])
            expected = f"preset={preset!r}: expected none, as {tmp_path / 'presets.toml'} is missing"
            assert str(error.value) == f"error: {expected}"


@pytest.mark.parametrize(
    "head", [pytest.param(head, marks=() if head == "clstoken" else pytest.mark.slow) for head in HEADS]
)
def test_a_file_copied_elsewhere_runs_with_the_library_alone(head, tmp_path):
    """So does AdaPool's file with the class of another head pasted in."""
    begin, end = "class PoolingHead(", "class Agent("
    own, other = AGENT.read_text(), (AGENT.parent / f"ppo_{head}.py").read_text()
    pasted = other[other.index(begin) : other.index(end)]
    (tmp_path / "mine.py").write_text(own[: own.index(begin)] + pasted + own[own.index(end) :])
    process = start("mine.py", *TINY, "--total-timesteps", 128, cwd=tmp_path)
    told, _ = process.communicate(timeout=60)
    assert process.returncode == 0, told
    (run,) = (tmp_path / "runs").iterdir()
    assert "__mine__" in run.name and (run / "summary.json").exists()


def test_two_runs_at_once_get_folders_of_their_own_and_one_folder_one_run(ppo, tmp_path):
    runs = [start(AGENT, *TINY, "--total-timesteps", 128, "--run-dir", tmp_path / "run") for _ in range(2)]
    assert [process.communicate(timeout=60) and process.returncode for process in runs] == [0, 0]
    run, other = (tmp_path / "run").iterdir()
    assert all(torch.equal(x, weights(other)[name]) for name, x in weights(run).items())
    (run / "summary.json").unlink()  # of a finished run nothing is asked
    asked = []

    class Held(Run):
        def iterations(self):
            with pytest.raises(SystemExit, match=rf"^error: {run} is in use by another process"):
                main(ppo, ["--resume", str(run)])
            asked.append(run)
            return iter(())

    first = Held(ppo, parse(ppo, ["--resume", str(run)]))
    ppo.train(first.local_args, first)
    first.close()
    assert asked == [run]


def test_a_run_goes_on_from_another_folder_and_when_it_was_moved(ppo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(ppo, [*TINY, "--total-timesteps", "128"])
    (run,) = (tmp_path / "runs").iterdir()
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.move(run, tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(ppo, ["--resume", "../moved", "--total-timesteps", "256"])["steps"] == 256
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == set() and (moved / "summary.json").exists()
