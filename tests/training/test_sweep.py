"""The scheduler: it runs only what is missing, reports each end, survives failures, and ends with all its processes."""

import os
import re
import signal
import sys
import time
from functools import partial

import pytest
from cases import posix

from noisy_envs.training import sweep
from noisy_envs.training.files import lock_folder
from noisy_envs.training.process import hold_group_signals, last_message, start_process
from noisy_envs.training.sweep import JobResult, check_settings, run_in_processes, run_in_threads, run_in_turn, run_jobs


def square(number, sleep=0.0):
    """A job that runs in a process of its own, too."""
    if number == 3:
        raise FloatingPointError("first line\n3 is not finite")
    if number == 4:
        raise ValueError("4 is refused")
    if number == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(sleep)
    return JobResult(number, {"square": number**2}, seconds=float(number))


EXECUTORS = {
    "in turn": partial(run_in_turn, run=square, tolerated=FloatingPointError),
    "in processes": partial(run_in_processes, run=square, num_processes=2, tolerated=FloatingPointError),
}
each_executor = pytest.mark.parametrize("execute", EXECUTORS.values(), ids=EXECUTORS)


def describe(summary):
    return f"square {summary['square']}"


@each_executor
def test_unfinished_jobs_run_and_one_that_fails_lets_the_others_go_on(execute, capsys):
    results = run_jobs({1: {"square": 1}, 2: None, 3: None, 6: None}, execute, describe)
    assert {result.job: result.summary for result in results} == {2: {"square": 4}, 3: None, 6: {"square": 36}}
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "4 runs, 1 already finished"
    assert [re.sub(r"^\[[123]/4\] ", "", line) for line in sorted(lines, key=lambda line: line.partition("]")[2])] == [
        "2: square 4, 2 s", "3: FAILED, 3 is not finite", "6: square 36, 6 s",
    ]  # fmt: skip


@each_executor
def test_another_error_ends_all(execute):
    with pytest.raises(ValueError, match="4 is refused"):
        run_jobs({2: None, 4: None}, execute, describe)


def test_nothing_is_started_where_all_is_finished(capsys):
    assert run_jobs({1: {}}, lambda jobs: pytest.fail("started"), describe) == []
    assert capsys.readouterr().out == "1 runs, 1 already finished\n"


@posix
def test_a_killed_process_is_reported():
    with pytest.raises(ChildProcessError, match=r"a run was killed, .*; resume with the same command"):
        list(EXECUTORS["in processes"]([2, 5]))


def stop_all(number):
    """A job that sends SIGTERM to itself and its parent, as `kill -TERM -GROUP` does."""
    os.kill(os.getppid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(100)


@posix
def test_a_signal_that_ends_the_processes_too_is_a_stop_request():
    with pytest.raises(KeyboardInterrupt):
        list(run_in_processes([1, 2], stop_all, 2, FloatingPointError))


def test_a_signal_does_not_break_a_lock(monkeypatch):
    """It must not raise amid a wait for the processes, which would leave the executor's locks undone."""
    waited, wait = [], sweep.wait

    def interrupted(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        waited.append(wait(*args, **kwargs))
        return waited[-1]

    monkeypatch.setattr(sweep, "wait", interrupted)
    before, start = signal.getsignal(signal.SIGINT), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(run_in_processes([1, 2], partial(square, sleep=100), 2, FloatingPointError))
    assert len(waited) == 1 and signal.getsignal(signal.SIGINT) is before and time.monotonic() - start < 50


@pytest.mark.skipif(sys.platform == "win32", reason="holds no signals back")
def test_processes_start_while_each_signal_to_a_group_is_held_back():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with hold_group_signals():
        held = signal.pthread_sigmask(signal.SIG_BLOCK, []) - before
    assert held >= {signal.SIGINT, signal.SIGUSR1} and signal.SIGTERM not in held
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


# commands


class Command:
    """A job whose command is a Python program; its run is finished when the file `done` exists."""

    def __init__(self, folder, code):
        self.folder, self.code = folder, code

    def __str__(self):
        return self.folder.name

    def command(self):
        return [sys.executable, "-c", self.code, str(self.folder)]

    def summary(self):
        return {"square": 0} if (self.folder / "done").exists() else None


START = "import os, pathlib, signal, sys, time; folder = pathlib.Path(sys.argv[1])\n"
FINISH = "(folder / 'done').touch()\n"
KILL_ONCE = "killed = folder / 'killed'\nif not killed.exists(): killed.touch(); os.kill(os.getpid(), signal.SIGKILL)\n"


@posix
def test_commands_are_retried_if_killed_and_reported_if_they_fail(tmp_path, capsys):
    jobs = {
        Command(tmp_path / "good", START + FINISH): None,
        Command(tmp_path / "killed", START + KILL_ONCE + FINISH): None,
        Command(tmp_path / "failed", START + "print('first'); sys.exit('no more sand')"): None,
        Command(tmp_path / "always killed", START + "os.kill(os.getpid(), signal.SIGKILL)"): None,
        Command(tmp_path / "stopped", START + "sys.exit(130)"): None,
    }
    results = {str(result.job): result for result in run_jobs(jobs, partial(run_in_threads, num_threads=2), describe)}
    assert results["good"].summary == results["killed"].summary == {"square": 0}
    assert results["failed"].problem == "exit status 1: no more sand"
    assert results["always killed"].problem.startswith("killed by SIGKILL: ")
    assert results["stopped"].problem == "stopped"
    output = capsys.readouterr().out
    assert output.count("starting killed") == 2 and output.count("starting always killed") == 1 + sweep.MAX_RETRIES
    assert "FAILED, exit status 1: no more sand" in output and "stopped: FAILED" not in output
    assert (tmp_path / "failed" / "log.txt").read_text().splitlines()[-2:] == ["first", "no more sand"]


@posix
def test_a_command_that_outlives_its_parent_keeps_the_lock(tmp_path):
    with (tmp_path / "log.txt").open("wb") as log, lock_folder(tmp_path) as lock:
        command = start_process([sys.executable, "-c", "import time; time.sleep(100)"], log, lock)
    # the parent's lock is closed, as if it had been killed
    with pytest.raises(BlockingIOError, match=f"in use by another process, {os.getpid()}"):
        lock_folder(tmp_path)
    command.kill()
    command.wait()
    with lock_folder(tmp_path):
        pass


def test_settings_that_differ_are_named(tmp_path):
    check_settings(tmp_path, {"a": 1}, {"a": 1.0})
    check_settings(tmp_path, {"a": "1"}, {"a": 1}, lambda new, old: str(new) == old)
    for saved, requested, message in (
        ({"a": 1}, {"a": 2}, "a=2: expected 1, as in "),
        ({}, {"b": 2}, "b=2: expected the default, as in "),
        ({"b": 2}, {}, "b=the default: expected 2, as in "),
    ):
        with pytest.raises(ValueError, match=rf"^{message}{re.escape(str(tmp_path))}; or use another --out$"):
            check_settings(tmp_path, saved, requested)


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ("training\nerror: seed=-1: must be from 0\n", "error: seed=-1: must be from 0"),
        ("╭─ Unrecognized ─╮\n│ --bogus, 1     │\n│ for help: -h   │\n╰────────────────╯\n", "--bogus, 1"),
        ("", "no output"),
    ],
    ids=["line", "box", "nothing"],
)
def test_a_failure_is_explained_by_its_last_message(log, message):
    assert last_message(log) == message
