"""Supervised runs: folds, one look at the test set, exact resumption, and an end whenever one is asked for."""

import csv
import dataclasses
import errno
import importlib
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT, load_supervised, with_path

from noisy_envs.training import sweep
from noisy_envs.training.files import lock_folder

torch = pytest.importorskip("torch")
pytest.importorskip("tyro")
experiment, trainer = load_supervised("experiment"), load_supervised("trainer")
network = load_supervised("network")
aggregation = load_supervised("aggregation")
synthetic = load_supervised("synthetic")

JOB = experiment.Job("max", "adapool", 1, 2)


@pytest.fixture(autouse=True)
def restored():
    """Use one thread, as runs do, and leave this process's threads and handlers as they were."""
    threads, handler = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    signal.signal(signal.SIGTERM, handler)


class Fake:
    """A task of 50 numbers, 10 of them for the test, that notes what is asked of it.

    The network is one weight. `course` are the validation errors of the epochs in turn, else its squared error.
    """

    num_samples, num_test = 50, 10

    def __init__(self, course=(), stop_at=None, loss=None):
        self.course, self.stop_at, self.fixed_loss = list(course), stop_at, loss
        self.log = []  # (whether in training, whether gradients are on, samples), a batch
        self.weights = []  # when looked at
        self.inputs = torch.linspace(-1, 1, self.num_samples)[:, None]

    def network(self, pool, seed):
        self.net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(self.net.weight, 0.5)
        return self.net

    def draw(self, index, chance):
        return index[:, None]

    def batch(self, index, numbers):
        assert numbers is None or numbers[:, 0].tolist() == index.tolist()  # each sample gets its own
        if self.stop_at is not None and len(self.log) == self.stop_at:
            raise KeyboardInterrupt
        assert self.net.training == (numbers is not None) == torch.is_grad_enabled()
        self.log.append((numbers is not None, index.tolist()))
        if numbers is None:
            self.weights.append(self.net.weight.item())
        return self.inputs[index], 3 * self.inputs[index]

    def loss(self, outputs, targets):
        loss = (outputs - targets).square().mean()
        return loss if self.fixed_loss is None else loss * self.fixed_loss

    def error(self, outputs, targets):
        if self.course and len(outputs) == 8:  # a fold, the test set is 10
            return torch.full((8,), self.course.pop(0))
        return (outputs - targets).square()[:, 0]


def settings(out, **other):
    """Settings of the fake task."""
    own = {
        "epochs": 4,
        "batch_size": 9,
        "learning_rate": 0.1,
        **dict.fromkeys(("num_layers", "embed_dim", "num_heads", "feedforward_dim"), 1),
    }
    lists = {"pooling": ("adapool",), "seeds": (1,), "folds": (2,)}
    return experiment.Args(out=out, **{**own, **lists, **other})


def small(out, **other):
    """Settings of a real task of 60 sets with dropout, and a folder of data beside OUT."""
    own = {"num_sets": 60, "num_vectors": 4, "num_features": 8, "embed_dim": 8, "feedforward_dim": 8, "dropout": 0.2}
    lists = {"pooling": ("adapool",), "seeds": (1,), "folds": (2,), "targets": ("max",)}
    rest = {"epochs": 4, "batch_size": 10, "learning_rate": 0.01, "jobs": 1, "data_dir": out.parent / "data"}
    return aggregation.Args(out=out, **{**own, **lists, **rest, **other})


def weights_of(folder, key="network"):
    return torch.load(folder / "checkpoint.pt", weights_only=True)[key]


def assert_same_run(one, other, job=JOB):
    """Demand the same weights, optimizer, metrics and results of a job in two folders, to the bit."""
    one, other = job.folder(one), job.folder(other)
    for key in ("network", "best"):
        a, b = weights_of(one, key), weights_of(other, key)
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    a, b = (weights_of(folder, "optimizer")["state"] for folder in (one, other))
    assert all(torch.equal(a[number][name], b[number][name]) for number in a for name in a[number])
    first, second = (
        [{name: value for name, value in row.items() if "seconds" not in name} for row in metrics(folder)]
        for folder in (one, other)
    )
    assert first == second
    first, second = (json.loads((folder / "summary.json").read_text()) for folder in (one, other))
    for name in ("best_epoch", "validation_error", "test_error"):
        assert first[name] == second[name]


def metrics(folder):
    return list(csv.DictReader((folder / "metrics.csv").read_text().splitlines()))


# folds and the test set


@pytest.mark.parametrize(("samples", "tests"), [(50, 10), (103, 11), (6, 1), (60_000, 6000)])
def test_five_contiguous_folds_of_what_is_not_for_testing(samples, tests):
    task = Fake()
    task.num_samples, task.num_test = samples, tests
    parts = [trainer.split(task, fold) for fold in range(1, 6)]
    learned = samples - tests
    for part in parts:
        assert part.test.tolist() == list(range(learned, samples))
        assert sorted(part.train.tolist() + part.validation.tolist()) == list(range(learned))
        assert abs(len(part.validation) - learned / 5) < 1
        low, high = part.validation[0], part.validation[-1]
        assert part.validation.tolist() == list(range(low, high + 1))
    assert torch.cat([part.validation for part in parts]).tolist() == list(range(learned))


@pytest.mark.parametrize(("samples", "tests"), [(4, 0), (9, 0), (5, 1), (3, 3)])
def test_too_few_samples_are_refused(samples, tests):
    task = Fake()
    task.num_samples, task.num_test = samples, tests
    with pytest.raises(
        ValueError, match=rf"{samples - tests} samples .* {tests} for testing: expected at least 5 and 1"
    ):
        trainer.split(task, 1)


def test_the_test_set_is_read_once_at_the_end(tmp_path):
    task = Fake()
    experiment.train(task, JOB, settings(tmp_path))
    validation, test = list(range(8, 16)), list(range(40, 50))
    *before, last = task.log
    assert last == (False, test)
    trained = [index for training_now, index in before if training_now]
    assert [index for training_now, index in before if not training_now] == [validation] * 4
    assert not {*test, *validation} & {sample for index in trained for sample in index}
    assert [len(index) for index in trained] == [9, 9, 9, 5] * 4
    epochs = [[*chain(*trained[start : start + 4])] for start in range(0, 16, 4)]
    for order in epochs:
        assert sorted(order) == [*range(8), *range(16, 40)] != order
    assert len(set(map(tuple, epochs))) == 4


@pytest.mark.parametrize(
    ("course", "best"),
    [((4, 3, 2, 1), 4), ((1, 2, 3, 4), 1), ((3, 1, 2, 1), 2), ((2, 2, 2, 2), 1), ((9, 8, 1, 5), 3)],
)
def test_the_best_validation_epoch_is_tested(tmp_path, course, best):
    """The first of several that are as good."""
    task = Fake(course)
    found = experiment.train(task, JOB, settings(tmp_path))
    *looked, tested = task.weights
    assert tested == looked[best - 1] and len(set(looked)) == 4
    assert (found["best_epoch"], found["validation_error"]) == (best, course[best - 1])
    assert found["test_error"] == pytest.approx((task.inputs[40:] * (3 - tested)).square().mean().item())
    assert [float(row["validation_error"]) for row in metrics(JOB.folder(tmp_path))] == list(course)
    assert weights_of(JOB.folder(tmp_path))["weight"].item() == looked[-1]


def test_errors_and_losses_are_means_over_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "EVAL_BATCH_SIZE", 3)
    task = Fake()
    found = experiment.train(task, JOB, settings(tmp_path, epochs=1, learning_rate=1e-9))
    (row,) = metrics(JOB.folder(tmp_path))
    squares = (2.5 * task.inputs).square()[:, 0]
    parts = trainer.split(task, 2)
    assert float(row["train_loss"]) == pytest.approx(squares[parts.train].mean().item(), rel=1e-5)
    assert float(row["validation_error"]) == pytest.approx(squares[parts.validation].mean().item(), rel=1e-5)
    assert found["test_error"] == pytest.approx(squares[parts.test].mean().item(), rel=1e-5)
    assert [index for training_now, index in task.log if not training_now][-4:] == [
        [40, 41, 42], [43, 44, 45], [46, 47, 48], [49],
    ]  # fmt: skip


def test_each_epoch_and_seed_has_chance_of_its_own(tmp_path):
    task, found = Fake(), []
    task.draw = lambda index, chance: found.append(chance) or index[:, None]
    for seed in (1, 2):
        experiment.train(task, JOB._replace(seed=seed), settings(tmp_path))
    assert len(set(found)) == len(found) == 8


# resuming


def stop(folder, at):
    """Train until a batch, and return the settings and the checkpoint's path."""
    args = settings(folder)
    with pytest.raises(KeyboardInterrupt):
        experiment.train(Fake(stop_at=at), JOB, args)
    return args, JOB.folder(args.out) / "checkpoint.pt"


@pytest.mark.parametrize("stop_at", [0, 2, 4, 5, 7, 12, 20])
def test_a_stopped_run_goes_on_exactly(tmp_path, stop_at):
    """Stopped in the first, second and third epoch, in training and validation, and before the test."""
    experiment.train(Fake(), JOB, settings(tmp_path / "whole"))
    stop(tmp_path / "stopped", stop_at)
    assert not (JOB.folder(tmp_path / "stopped") / "summary.json").exists()
    again = Fake()
    experiment.train(again, JOB, settings(tmp_path / "stopped"))
    assert len(again.log) == 5 * (4 - stop_at // 5) + 1  # no epoch that was done before
    assert_same_run(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.parametrize("pool", network.POOLING)
def test_a_stopped_run_with_dropout_goes_on_exactly(tmp_path, monkeypatch, pool):
    job = JOB._replace(pooling=pool)
    args = [small(tmp_path / name, pooling=(pool,)) for name in ("whole", "stopped")]
    experiment.train(aggregation.make_task(args[0], "max"), job, args[0])
    task = aggregation.make_task(args[1], "max")
    batch, count = task.batch, iter(range(100))

    def stop(index, numbers):
        if next(count) == 8:  # in the second epoch, of 5 + 1 batches
            raise KeyboardInterrupt
        return batch(index, numbers)

    monkeypatch.setattr(task, "batch", stop)
    with pytest.raises(KeyboardInterrupt):
        experiment.train(task, job, args[1])
    assert len(metrics(job.folder(tmp_path / "stopped"))) == 1
    torch.rand(3)
    experiment.train(aggregation.make_task(args[1], "max"), job, args[1])
    assert_same_run(tmp_path / "whole", tmp_path / "stopped", job)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.slow
def test_compiled_runs_are_the_same(tmp_path, monkeypatch):
    """They differ by rounding; heads of size 2 use this package's attention, which the last run makes wrong."""

    def error(name, **other):
        args = small(tmp_path / name, num_heads=4, num_layers=1, dropout=0.0, init_std=0.5, **other)
        return experiment.train(aggregation.make_task(args, "max"), JOB, args)["test_error"]

    usual, compiled = error("usual"), error("compiled", compile=True)
    assert compiled == pytest.approx(usual, rel=1e-4)
    ours = network.narrow_attention
    monkeypatch.setattr(network, "narrow_attention", lambda *x, **y: 2 * ours(*x, **y))
    assert error("twice", compile=True) != pytest.approx(usual, rel=1e-3)


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_experiment_runs_in_any_thread(jobs, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(experiment.__file__).parent)  # for the processes
    args = small(tmp_path / "out", jobs=jobs, seeds=(1, 2), epochs=1)
    found = []
    thread = threading.Thread(target=lambda: found.append(experiment.run_all(args, ["max"], aggregation.make_task)))
    thread.start()
    thread.join()
    assert len(found[0]) == 2


def test_dropout_acts(tmp_path):
    """Or the test before would show nothing of it."""
    for dropout, name in ((0.0, "none"), (0.2, "some")):
        args = small(tmp_path / name, dropout=dropout)
        experiment.train(aggregation.make_task(args, "max"), JOB, args)
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "none", tmp_path / "some")


def test_seeds_and_folds_start_each_from_weights_of_their_own(tmp_path):
    """And all pooling heads of one seed and fold from the same."""
    asked = {}

    class Noting(Fake):
        def network(self, pool, seed):
            asked.setdefault(seed, []).append(pool)
            return super().network(pool, seed)

    args = settings(tmp_path, pooling=("a", "b"), seeds=(1, 2), folds=(1, 2), epochs=1)
    experiment.run_all(args, ["max"], lambda args, column: Noting())
    assert list(asked.values()) == [["a", "b"]] * 4


def test_the_same_seed_gives_the_same_and_others_differ(tmp_path):
    for name in ("one", "two"):
        args = small(tmp_path / name, seeds=(1, 2), folds=(2, 3))
        experiment.run_all(args, ["max"], aggregation.make_task)
        torch.rand(1)
    jobs = [JOB._replace(seed=seed, fold=fold) for seed in (1, 2) for fold in (2, 3)]
    for job in jobs:
        assert_same_run(tmp_path / "one", tmp_path / "two", job)
    firsts = {
        weights_of(job.folder(tmp_path / "one"))["encoder.layers.0.feedforward.0.weight"][0, 0].item() for job in jobs
    }
    assert len(firsts) == 4


def test_a_finished_run_is_not_run_again(tmp_path, capsys):
    args = settings(tmp_path, seeds=(1, 2))
    first = experiment.run_all(args, ["max"], lambda args, column: Fake())
    assert list(first) == [experiment.Job("max", "adapool", seed, 2) for seed in (1, 2)]
    assert "2 runs, 0 already finished" in capsys.readouterr().out
    again = experiment.run_all(args, ["max"], None)
    assert "2 runs, 2 already finished" in capsys.readouterr().out
    assert {job: json.loads(json.dumps(summary)) for job, summary in first.items()} == again
    more = dataclasses.replace(args, seeds=(2, 3), jobs=2)  # one is missing: no process is worth while
    made = []
    experiment.run_all(more, ["max"], lambda args, column: made.append(column) or Fake())
    assert made == ["max"] and "2 runs, 1 already finished" in capsys.readouterr().out


def test_a_second_process_in_one_folder_is_refused(tmp_path):
    args = settings(tmp_path, seeds=(1, 2))
    message = f"{args.out} is in use by another process, {os.getpid()};"
    with lock_folder(args.out), pytest.raises(BlockingIOError, match=re.escape(message)):
        experiment.run_all(args, ["max"], lambda args, column: Fake())
    assert not list(args.out.glob("*/*/*/summary.json"))


OTHER = {
    "epochs": 5, "batch_size": 10, "learning_rate": 0.2, "embed_dim": 2, "dropout": 0.1, "weight_decay": 0.5,
    "schedule": "cosine", "warmup": 0.5, "max_grad_norm": 1.0, "attention_scale": "head", "init_std": 0.1,
}  # fmt: skip


def test_a_run_goes_on_where_it_began(tmp_path):
    """Another kind of device draws another dropout."""
    stop(tmp_path, 7)
    (path,) = tmp_path.rglob("checkpoint.pt")
    content = experiment.load_checkpoint(path)
    content["settings"]["device"] = "cuda"
    experiment.save_checkpoint(path, content)
    with pytest.raises(ValueError, match=r"^device=cpu: expected cuda, as in .*checkpoint\.pt; or use another --out"):
        experiment.run_all(settings(tmp_path), ["max"], lambda args, column: Fake())


@pytest.mark.parametrize("stop_at", [None, 7], ids=["finished", "stopped"])
@pytest.mark.parametrize("name", OTHER)
def test_another_setting_in_the_same_folder_is_refused(tmp_path, name, stop_at):
    args = settings(tmp_path)
    if stop_at is None:
        experiment.run_all(args, ["max"], lambda args, column: Fake())
    else:
        stop(tmp_path, stop_at)
    (tmp_path / ".lock").write_text(f"{os.getpid()} {socket.gethostname()}\n")  # as it is when a run began
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(
        ValueError, match=rf"^{name}={OTHER[name]}: expected .*, as in .*seed-1-fold-2.*; or use another --out"
    ):
        experiment.run_all(dataclasses.replace(args, **{name: OTHER[name]}), ["max"], lambda args, column: Fake())
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "change",
    [{"num_threads": 2}, {"jobs": 2}, {"data_dir": Path("elsewhere")}, {"pooling": ("adapool", "avgpool")},
     {"seeds": (1, 2)}, {"folds": (2, 3)}],
)  # fmt: skip
def test_settings_that_a_run_does_not_depend_on_may_change(tmp_path, change):
    stop(tmp_path, at=7)
    task = Fake()
    experiment.train(task, JOB, settings(tmp_path, **change))
    assert len(task.log) == 16


@pytest.mark.parametrize(
    ("script", "free"),
    [("aggregation", {"targets"}), ("knn_centroid", {"num_neighbors"}), ("vision", {"canvas_size", "download"})],
)
def test_settings_that_columns_tell_may_change(script, free):
    """What is free is a setting of a script, and no setting of what is learned is."""
    names = {field.name for field in dataclasses.fields(load_supervised(script).Args)}
    assert names & set(experiment.FREE) == free | {
        "out", "pooling", "seeds", "folds", "device", "num_threads", "jobs", "compile", "max_autotune",
        "torch_deterministic", "data_dir", "preset",
    }  # fmt: skip


@pytest.mark.parametrize("size", [0, 100, -10])
def test_a_damaged_checkpoint_is_refused_and_a_deleted_one_begins_anew(tmp_path, size):
    experiment.train(Fake(), JOB, settings(tmp_path / "whole"))
    args, path = stop(tmp_path / "hurt", at=7)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=re.escape(str(path))):
        experiment.train(Fake(), JOB, args)
    path.unlink()
    experiment.train(Fake(), JOB, args)
    assert_same_run(tmp_path / "whole", tmp_path / "hurt")


@pytest.mark.parametrize("content", [{"args": {}, "agent": {}}, torch.zeros(2), [1], {"settings": None}])
def test_a_checkpoint_of_something_else_is_refused(tmp_path, content):
    path = JOB.folder(tmp_path) / "checkpoint.pt"
    path.parent.mkdir(parents=True)
    torch.save(content, path)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} was not written by this program"):
        experiment.train(Fake(), JOB, settings(tmp_path))


def test_a_full_disk_names_the_file_and_loses_nothing(tmp_path, monkeypatch):
    experiment.train(Fake(), JOB, settings(tmp_path / "whole"))
    args, path = stop(tmp_path / "full", at=15)
    before = path.read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(SystemExit) as error:
            experiment.guard(lambda _: experiment.train(Fake(), JOB, args) and None, [])
    message = (
        f"error: [Errno {errno.ENOSPC}] No space left on device: '{path}'; once that is fixed, resume with the same"
    )
    assert str(error.value) == f"{message} command" and path.read_bytes() == before
    experiment.train(Fake(), JOB, args)
    assert_same_run(tmp_path / "whole", tmp_path / "full")
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", "[" * 100_000])
def test_a_damaged_summary_is_named(tmp_path, text):
    args = settings(tmp_path)
    experiment.run_all(args, ["max"], lambda args, column: Fake())
    path = JOB.folder(tmp_path) / "summary.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))} is damaged .*delete it"):
        experiment.run_all(args, ["max"], lambda args, column: Fake())
    path.unlink()
    task = Fake()
    experiment.run_all(args, ["max"], lambda args, column: task)
    assert len(task.log) == 1  # the test alone


def test_a_folder_in_use_is_refused(tmp_path):
    folder = JOB.folder(tmp_path)
    folder.mkdir(parents=True)
    with lock_folder(folder), pytest.raises(BlockingIOError, match=rf"{re.escape(str(folder))} is in use"):
        experiment.train(Fake(), JOB, settings(tmp_path))
    assert [path.name for path in folder.iterdir()] == [".lock"]
    experiment.train(Fake(), JOB, settings(tmp_path))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, value):
    with pytest.raises(FloatingPointError, match="the loss is not finite in epoch 1"):
        experiment.train(Fake(loss=value), JOB, settings(tmp_path))
    with pytest.raises(FloatingPointError, match="not finite in epoch 3"):
        experiment.train(Fake([1, 1, value]), JOB, settings(tmp_path))
    assert len(metrics(JOB.folder(tmp_path))) == 2
    assert not (JOB.folder(tmp_path) / "summary.json").exists()


def last_line(args, make_task):
    """Run the columns "max" and "mean", and return the one line that the program ends with."""
    with pytest.raises(SystemExit) as error:
        experiment.guard(lambda _: experiment.run_all(args, ["max", "mean"], make_task) and None, [])
    return str(error.value)


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_others_run_where_one_diverges(tmp_path, monkeypatch, capsys, jobs):
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", lambda jobs, *_: ThreadPoolExecutor(jobs))  # faster
    args = settings(tmp_path, seeds=(1, 2), jobs=jobs)
    for done in (0, 2):  # the same command meets the same NaN, and does not run the others again
        message = last_line(args, lambda args, column: Fake(loss=math.nan if column == "max" else None))
        assert message.startswith("error: diverged: max adapool seed 1 fold 2, max adapool seed 2 fold 2; ")
        first, *lines = capsys.readouterr().out.splitlines()
        assert first == f"4 runs, {done} already finished" and len(lines) == 4 - done
        assert sum(": FAILED, the loss is not finite in epoch 1" in line for line in lines) == 2
        assert all(f"] max adapool seed {seed} fold 2: FAILED, " in "\n".join(lines) for seed in (1, 2))
    assert sorted(path.parts[-4] for path in tmp_path.rglob("summary.json")) == ["mean"] * 2
    args = dataclasses.replace(args, seeds=(1,))
    assert len(experiment.run_all(args, ["mean"], None)) == 1


DIVERGING = """
import aggregation
from set_task import SetTask

class Diverging(SetTask):
    def loss(self, outputs, targets):
        return super().loss(outputs, targets) * float("nan")

def make_task(args, column):
    return (Diverging if column == "max" else SetTask)(args, aggregation.TARGETS[column])
"""


@pytest.mark.slow
def test_the_other_processes_go_on_where_one_diverges(tmp_path, monkeypatch, capsys):
    (tmp_path / "diverging.py").write_text(DIVERGING)
    for folder in (Path(experiment.__file__).parent, tmp_path):
        monkeypatch.syspath_prepend(folder)  # for the processes
    make_task = importlib.import_module("diverging").make_task
    args = small(tmp_path / "runs", pooling=TWO, jobs=2, epochs=1)
    message = last_line(args, make_task)
    assert message.startswith("error: diverged: max ") and all(f"max {pool} seed 1 fold 2" in message for pool in TWO)
    assert capsys.readouterr().out.count("fold 2: FAILED, the loss is not finite") == 2
    assert {path.parts[-4] for path in tmp_path.rglob("summary.json")} == {"mean"}
    assert len(list(tmp_path.rglob("summary.json"))) == 2


# learning


def rates(**other):
    return [trainer.learning_rate(settings(Path(), learning_rate=2.0, **other), step, 10) for step in range(10)]


def test_rates():
    assert rates() == [2.0] * 10
    assert rates(warmup=0.5) == pytest.approx([0.4, 0.8, 1.2, 1.6, *[2.0] * 6])
    assert rates(warmup=1.0) == pytest.approx([0.2 * step for step in range(1, 11)])
    assert rates(schedule="cosine") == pytest.approx([1 + math.cos(math.pi * step / 10) for step in range(10)])
    both = rates(schedule="cosine", warmup=0.2)
    assert both == pytest.approx([1.0, 2.0, *(1 + math.cos(math.pi * step / 8) for step in range(8))])
    assert both[2] == 2.0 and 0 < both[-1] < 0.08
    assert rates(warmup=0.25) == pytest.approx([2 / 3, 4 / 3, *[2.0] * 8])
    assert all(0 < rate <= 2 for warmup in np.linspace(0, 1, 50) for rate in rates(warmup=warmup, schedule="cosine"))


def test_the_rate_follows_the_steps_of_all_epochs(tmp_path):
    args = settings(tmp_path, schedule="cosine", warmup=0.3)
    experiment.train(Fake(), JOB, args)
    rates = [float(row["learning_rate"]) for row in metrics(JOB.folder(tmp_path))]
    assert rates == pytest.approx([trainer.learning_rate(args, step, 16) for step in (3, 7, 11, 15)])


def test_gradients_are_clipped(tmp_path):
    norms = []
    for limit in (math.inf, 1e-3):
        task = Fake()
        experiment.train(task, JOB, settings(tmp_path / str(limit), max_grad_norm=limit, epochs=1, learning_rate=1e-9))
        norms.append(task.net.weight.grad.norm().item())
    assert norms[0] > 0.1 and norms[1] == pytest.approx(1e-3, rel=1e-3)


def test_weights_decay(tmp_path):
    found = []
    for decay in (0.0, 0.5):
        task = Fake(loss=0.0)
        experiment.train(task, JOB, settings(tmp_path / str(decay), weight_decay=decay, epochs=1))
        found.append(weights_of(JOB.folder(tmp_path / str(decay)))["weight"].item())
    assert found == pytest.approx([0.5, 0.5 * (1 - 0.1 * 0.5) ** 4])


@pytest.mark.parametrize("pool", network.POOLING)
def test_the_global_random_states_are_left_alone(tmp_path, pool):
    def states():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002

    before = states()
    args = small(tmp_path / "run", pooling=(pool,))
    experiment.run_all(args, ["max"], aggregation.make_task)
    assert states() == before


def test_columns_pools_seeds_and_folds_make_cells(tmp_path):
    args = settings(tmp_path, pooling=("a", "b"), seeds=(3, 4), folds=(1, 5), epochs=1)
    made = []
    found = experiment.run_all(args, ["x", "y"], lambda args, column: made.append(column) or Fake())
    assert set(found) == {
        experiment.Job(column, pool, seed, fold)
        for column in "xy"
        for pool in "ab"
        for seed in (3, 4)
        for fold in (1, 5)
    }
    assert sorted(made) == ["x"] * 8 + ["y"] * 8
    assert {str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("summary.json")} == {
        f"{job.column}/{job.pooling}/seed-{job.seed}-fold-{job.fold}" for job in found
    }


# settings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pooling": ()}, "pooling: expected at least one value"),
        ({"seeds": ()}, "seeds: expected at least one value"),
        ({"folds": ()}, "folds: expected at least one value"),
        ({"pooling": ("adapool", "sum")}, "pooling='sum': expected one of adapool"),
        ({"folds": (1, 6)}, "folds=6: expected at most 5"),
        ({"folds": (0,)}, "folds=0: expected at least 1"),
        ({"seeds": (1, -1)}, "seeds=-1: expected at least 0"),
        ({"epochs": 0}, "epochs=0: expected at least 1"),
        ({"batch_size": 0}, "batch_size=0: expected at least 1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0: expected a number above 0"),
        ({"learning_rate": math.nan}, "learning_rate=nan: expected a finite number"),
        ({"warmup": 1.1}, "warmup=1.1: expected a share from 0 to 1"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0: expected at least 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0: expected a number above 0, or inf"),
        ({"num_threads": 0}, "num_threads=0: expected at least 1"),
        ({"jobs": 0}, "jobs=0: expected at least 1"),
        ({"device": "abacus"}, "device='abacus': "),
        ({"num_layers": 0}, "num_layers=0: expected at least 1"),
        ({"feedforward_dim": 0}, "feedforward_dim=0: expected at least 1"),
        ({"num_heads": 2, "embed_dim": 3}, "num_heads=2: expected a divisor of embed_dim=3"),
        ({"dropout": 1.0}, "dropout=1.0: expected a probability from 0 to below 1"),
        ({"init_std": 0.0}, "init_std=0.0: expected a number above 0"),
        ({"init_std": math.inf}, "init_std=inf: expected a finite number"),
    ],
)
def test_bad_settings_are_named(tmp_path, change, message):
    experiment.check(settings(tmp_path), ["adapool"])
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        experiment.check(settings(tmp_path, **change), ["adapool"])


def test_an_argument_overrides_a_preset():
    presets = {"fast": {}, "paper": {"epochs": 100, "num_layers": 12}}

    def parse(*argv):
        args = experiment.parse(aggregation.Args, argv, presets, None)
        return args.preset, args.epochs, args.num_layers, args.embed_dim

    assert parse() == ("fast", 15, 2, 16)
    assert parse("--preset", "paper") == ("paper", 100, 12, 16)
    assert parse("--num-layers", "3", "--preset", "paper") == ("paper", 100, 3, 16)


@pytest.mark.parametrize("error", [ValueError, OSError, FloatingPointError, BlockingIOError, ModuleNotFoundError])
def test_errors_end_with_one_line(error):
    def main(argv):
        raise error(f"about {argv}")

    with pytest.raises(SystemExit, match=re.escape("error: about ['a']")) as ended:
        experiment.guard(main, ["a"])
    assert ended.value.__suppress_context__


# several runs at a time, and their end

SLOW = """
import sys, time
from pathlib import Path
import aggregation, experiment
from set_task import SetTask

class Slow(SetTask):
    def batch(self, index, numbers):
        if numbers is not None and not Path(__file__).with_name("hurry").exists():
            time.sleep(0.15)
        return super().batch(index, numbers)

def make_task(args, column):
    return Slow(args, aggregation.TARGETS[column])

def main(argv):
    args = experiment.parse(aggregation.Args, argv, {"fast": {}}, None)
    experiment.run_all(args, args.targets, make_task)

if __name__ == "__main__":
    experiment.guard(main, sys.argv[1:])
"""
TWO = ("avgpool", "adapool")
ARGV = ["--num-sets", "60", "--num-vectors", "4", "--num-features", "8", "--embed-dim", "8", "--feedforward-dim", "8"]
ARGV += ["--dropout", "0.2", "--pooling", *TWO, "--seeds", "1", "--folds", "2", "--targets", "max", "--epochs", "6"]
ARGV += ["--batch-size", "10", "--learning-rate", "0.01"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The folder of the two runs, and the one that holds the data."""
    folder = tmp_path_factory.mktemp("whole")
    args = small(folder / "runs", epochs=6, pooling=TWO)
    experiment.run_all(args, ["max"], aggregation.make_task)
    return folder


def start(folder, data, jobs):
    """Start a program that is slow, in a process group of its own, as a shell does."""
    (folder / "slow.py").write_text(SLOW)
    argv = [*ARGV, "--out", str(folder / "runs"), "--data-dir", str(data), "--jobs", str(jobs)]
    return subprocess.Popen(
        [sys.executable, str(folder / "slow.py"), *argv], env=with_path(ROOT / "supervised", ROOT),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def alive(group):
    """Return the processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):
            continue
        if int(its_group) == group and state != "Z":
            found.append(stat.parent.name)
    return found


def until(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for orphans in /proc")
@pytest.mark.parametrize(
    ("jobs", "number", "group"),
    [
        pytest.param(1, signal.SIGINT, True, marks=pytest.mark.slow, id="1-Ctrl-C"),
        pytest.param(2, signal.SIGINT, True, marks=pytest.mark.process, id="2-Ctrl-C"),
        pytest.param(2, getattr(signal, "SIGUSR1", 0), True, marks=pytest.mark.slow, id="2-SIGUSR1"),
        pytest.param(2, signal.SIGTERM, False, marks=pytest.mark.slow, id="2-SIGTERM"),
        pytest.param(2, signal.SIGKILL, False, marks=pytest.mark.process, id="2-SIGKILL"),
    ],
)
def test_a_signal_ends_all_and_the_same_command_goes_on(tmp_path, uninterrupted, jobs, number, group):
    process = start(tmp_path, uninterrupted / "data", jobs)
    try:
        until(lambda: len(list(tmp_path.rglob("metrics.csv"))) == jobs)
        (os.killpg if group else os.kill)(process.pid, number)
        out, err = process.communicate(timeout=60)
        until(lambda: not alive(process.pid), 20)
    finally:
        if alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    assert out == "2 runs, 0 already finished\n" and "Traceback" not in err
    if number != signal.SIGKILL:
        assert process.returncode == 130
        assert err.strip().splitlines()[-1] == "stopped; resume with the same command"
        assert "leaked" not in err
    assert not list(tmp_path.rglob("summary.json"))
    done = [len(metrics(path.parent)) for path in tmp_path.rglob("metrics.csv")]
    assert len(done) <= jobs and max(done, default=0) < 6  # a kill may come before a first row is written

    if jobs == 2 and number == signal.SIGINT:  # the same command indeed
        (tmp_path / "hurry").touch()
        process = start(tmp_path, uninterrupted / "data", jobs)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and out.startswith("2 runs, 0 already finished\n[1/2] max ") and not err
    else:
        args = small(tmp_path / "runs", epochs=6, pooling=TWO, data_dir=uninterrupted / "data")
        experiment.run_all(args, ["max"], aggregation.make_task)
    for pool in TWO:
        assert_same_run(uninterrupted / "runs", tmp_path / "runs", JOB._replace(pooling=pool))


@pytest.mark.process
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
def test_a_second_command_and_a_lost_process_are_reported(tmp_path, uninterrupted):
    """While it runs, others are refused; if one of its processes is killed, it ends and reports that."""
    process = start(tmp_path, uninterrupted / "data", 2)
    try:
        until(lambda: len(list(tmp_path.rglob("metrics.csv"))) == 2)
        args = small(tmp_path / "runs", epochs=6, pooling=TWO, data_dir=uninterrupted / "data")
        with pytest.raises(BlockingIOError, match="is in use by another process"):
            experiment.run_all(args, ["max"], aggregation.make_task)
        workers = [x for x in alive(process.pid) if b"spawn_main" in (Path("/proc") / x / "cmdline").read_bytes()]
        assert len(workers) == 2
        os.kill(int(workers[0]), signal.SIGKILL)
        _, err = process.communicate(timeout=60)
        until(lambda: not alive(process.pid), 20)
    finally:
        if alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 1 and err.startswith("error: a run was killed") and err.count("\n") == 1


def test_a_run_on_sets_of_another_version_is_not_resumed(tmp_path, monkeypatch):
    args = small(tmp_path / "out", epochs=1)
    experiment.run_all(args, ["max"], aggregation.make_task)
    old = experiment.CHANCE_VERSION
    monkeypatch.setattr(experiment, "CHANCE_VERSION", old + 1)
    with pytest.raises(ValueError, match=rf"^chance={old + 1}: expected {old}, as in .*; or use another --out$"):
        experiment.run_all(args, ["max"], aggregation.make_task)
