"""Kills, full disks, two at once, files of others: trainers say what is wrong in one line, and lose nothing."""

import errno
import json
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from cases import posix
from helpers import ROOT, TINY, load_agent, with_path

from noisy_envs.training import files
from noisy_envs.training.main import main

torch = pytest.importorskip("torch")
pytest.importorskip("tyro")
AGENT = ROOT / "agents" / "ppo_adapool.py"


@pytest.fixture(scope="module")
def ppo():
    return load_agent("adapool")


@pytest.fixture(scope="module")
def trained(trained_run):
    return trained_run("adapool")


@pytest.fixture
def run(trained, tmp_path):
    """A copy of a run of two updates."""
    (tmp_path / "run").mkdir()
    for path in trained.iterdir():
        (tmp_path / "run" / path.name).write_bytes(path.read_bytes())
    return tmp_path / "run"


def start(*words):
    env = {**with_path(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, AGENT, *map(str, words)]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def refused(ppo, *words):
    """Return the one line that a command ends with."""
    with pytest.raises(SystemExit) as error:
        main(ppo, [*map(str, words)])
    assert "\n" not in str(error.value)
    return str(error.value)


# Files that are not whole


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    code = "import sys, pathlib; from noisy_envs.training.files import replacing\n"
    code += "with replacing(pathlib.Path(sys.argv[1])) as part:\n"
    code += "    part.write_text('new'); print('new', flush=True); input()"
    path, other = tmp_path / "a.csv", tmp_path / ".mine.part"
    other.write_text("of somebody else")
    command = [sys.executable, "-c", code, path]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT) as writer:
        assert writer.stdout.readline() == b"new\n"
        files.write_atomically(path, "ours")
        (left,) = tmp_path.glob(".a.csv.*.part")
        assert left.read_text() == "new" and path.read_text() == "ours"
        writer.kill()
    files.write_atomically(path, "again")
    assert path.read_text() == "again" and sorted(tmp_path.iterdir()) == [other, path]


def test_a_new_file_that_is_removed_before_it_is_locked_is_created_again(tmp_path, monkeypatch):
    lock, listings = files._lock, []

    def late(file):
        listings.append(sorted(tmp_path.iterdir()))
        if len(listings) == 1:
            listings[0][0].unlink()
        return lock(file)

    monkeypatch.setattr(files, "_lock", late)
    files.write_atomically(tmp_path / "a", "whole")
    assert (tmp_path / "a").read_text() == "whole" and len(listings) == 2


def test_a_folder_that_is_locked_is_swept(tmp_path):
    (tmp_path / ".checkpoint.pt.abcdefgh.part").write_text("half")
    (tmp_path / "mine.part").write_text("of somebody else")
    with files.lock_folder(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {".lock", "mine.part"}


@pytest.mark.parametrize("name", ["metrics.csv", "checkpoint.pt"])
def test_a_full_disk_is_told_by_the_file_and_the_last_checkpoint_is_whole(ppo, run, monkeypatch, name):
    before = (run / "checkpoint.pt").read_bytes()
    replacing = files.replacing

    def full(path):
        if path.name == name:
            path = path.with_name(f"{name}-on-a-full-disk")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return replacing(path)

    monkeypatch.setattr(files, "replacing", full)
    told = refused(ppo, "--resume", run, "--total-timesteps", 256)
    assert told.startswith(f"error: [Errno {errno.ENOSPC}] No space left on device: '{run / name}-on-a-full-disk'")
    assert f"once that is fixed, resume with: python {sys.argv[0]} --resume {run}" in told
    monkeypatch.undo()
    assert (run / "checkpoint.pt").read_bytes() == before and not list(run.glob("*.part"))
    assert main(ppo, ["--resume", str(run), "--total-timesteps", "256"])["steps"] == 256


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_error_of_the_system_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch, call):
    path = tmp_path / "a.json"
    path.write_text("old")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match=rf"No space left on device: '{re.escape(str(path))}'"):
        files.write_atomically(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_half_line_of_metrics_is_dropped_and_written_again(ppo, run):
    path = run / "metrics.csv"
    whole = path.read_text()
    path.write_text(whole + whole.splitlines()[-1][:40])
    main(ppo, ["--resume", str(run), "--total-timesteps", "192"])
    header, *lines = path.read_text().splitlines()
    assert [header, *lines[:2]] == whole.splitlines() and [line.split(",")[0] for line in lines] == ["64", "128", "192"]


# Two at once


@pytest.mark.slow
@pytest.mark.parametrize("count", [4, 10])
def test_runs_that_start_together_get_folders_of_their_own(tmp_path, count):
    started = [start(*TINY, "--total-timesteps", 64, "--run-dir", tmp_path) for _ in range(count)]
    told = [process.communicate(timeout=900)[0] for process in started]
    assert [process.returncode for process in started] == [0] * count, told
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == count and all((folder / "summary.json").exists() for folder in folders)
    assert all(any(str(folder) in text for text in told) for folder in folders)


@pytest.mark.slow
def test_a_second_process_on_one_run_is_refused_and_told_of_the_first(ppo, run):
    first = start("--resume", run, "--total-timesteps", 10**6)
    try:
        deadline = time.monotonic() + 120
        while (run / "metrics.csv").read_text().count("\n") < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        before = (run / "checkpoint.pt").stat().st_ino
        told = refused(ppo, "--resume", run, "--total-timesteps", 256)
        assert told == f"error: {run} is in use by another process, {first.pid}; wait until that ends, or stop it"
        assert (run / "checkpoint.pt").stat().st_ino == before and first.poll() is None
    finally:
        first.kill()
        first.communicate()


# Files of others


class Evil:
    """A pickle that would make a folder."""

    def __reduce__(self):
        return os.mkdir, ("evil",)


def crafted(content, how):
    """Return a checkpoint that is not what an agent wrote."""
    if how in ("code", "code in a part"):
        return Evil() if how == "code" else {**content, "progress": Evil()}
    if how == "strange settings":
        return {**content, "args": {**content["args"], "run_dir": 3}}
    if how.startswith("no "):
        return {name: value for name, value in content.items() if name != how.removeprefix("no ")}
    return {**content, how: {"code": 1}}


@pytest.mark.parametrize(
    "how",
    [
        *("code", "code in a part", "no agent", "no optimizer", "no processes", "no progress"),
        *("optimizer", "processes", "progress", "agent", "strange settings"),
    ],
)
def test_a_crafted_checkpoint_runs_nothing_and_is_named(ppo, run, tmp_path, monkeypatch, how):
    monkeypatch.chdir(tmp_path)
    path = run / "checkpoint.pt"
    torch.save(crafted(torch.load(path), how), path)
    before = path.read_bytes()
    assert str(run) in refused(ppo, "--resume", run, "--total-timesteps", 256)
    if how in ("code", "code in a part", "no agent", "agent", "strange settings"):
        assert str(run) in refused(ppo, "--evaluate", run, "--run-dir", tmp_path)
    assert not (tmp_path / "evil").exists() and path.read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, pickle.dumps(Evil())])
def test_a_damaged_summary_is_named(ppo, run, tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    (run / "summary.json").write_bytes(content)
    told = refused(ppo, "--resume", run)
    assert told.startswith(f"error: {run / 'summary.json'} is damaged") and "delete it" in told
    (run / "summary.json").unlink()
    assert main(ppo, ["--resume", str(run)])["steps"] == 128 and json.loads((run / "summary.json").read_text())
    assert not (tmp_path / "evil").exists()


@posix
@pytest.mark.parametrize("during", ["the uninterrupted run", "row", "write"])
def test_a_trainer_that_hangs_is_killed_and_named(tmp_path, monkeypatch, during):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import kill_trainer

    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), daemon=True)
    process.start()
    monkeypatch.setattr(kill_trainer, "PATIENCE", 0.1)
    monkeypatch.setattr(kill_trainer, "start", lambda *_: process)
    root = tmp_path / "run"
    waits = {
        during: lambda: kill_trainer.await_moment(process, root, during, random.Random(1), 1.0),
        "the uninterrupted run": lambda: kill_trainer.uninterrupted(None, root),
    }
    with pytest.raises(TimeoutError, match=re.escape(str(root))):
        waits[during]()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["agents/ppo_adapool.py", "supervised/knn_centroid.py"])
def test_killed_trainers_end_as_if_they_had_not_been(tmp_path, trainer):
    command = [sys.executable, ROOT / "benchmarks" / "kill_trainer.py", "--trainer", ROOT / trainer, "--kills", "3"]
    env = with_path(ROOT)
    done = subprocess.run([*command, "--out", tmp_path / "kills.json"], check=False, env=env, capture_output=True)
    assert done.returncode == 0, (done.stdout + done.stderr).decode()
    found = json.loads((tmp_path / "kills.json").read_text())
    assert len(found["kills"]) == 3 and all(end["rows_equal"] and not end["left"] for end in found["runs"])
