"""What the supervised experiments share: runs that resume, folds, one final test, several runs at a time.

A run is one column of a table (a number of neighbours, a target, a data set), one pooling head, seed and fold. Its
folder, OUT/COLUMN/POOL/seed-S-fold-F, holds `checkpoint.pt` after each epoch, `metrics.csv`, and at the end
`summary.json`. The same command again goes on where it was stopped, and runs only what is missing.

A fold is one of five equal parts, one after another, of what is not for testing; it validates, the others train. The
test set is looked at once: at the end, by the weights of the epoch whose validation error was least.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from chance import Chance
from network import Network, Scale, Shape
from torch import Tensor, nn
from tqdm import tqdm

from noisy_envs.nn.cuda_graph import Recorded
from noisy_envs.randomness import derive_seed
from noisy_envs.training.accelerate import use_deterministic
from noisy_envs.training.arguments import parse_arguments
from noisy_envs.training.checkpoint import (
    checkpoint_errors,
    load_checkpoint,
    read_summary,
    save_checkpoint,
    write_summary,
)
from noisy_envs.training.files import lock_folder, write_atomically
from noisy_envs.training.process import (
    EXIT_INTERRUPTED,
    format_error,
    ignore_broken_pipe,
    memory_errors,
    on_stop_signal,
    stop_signals,
)
from noisy_envs.training.versions import library_versions
from noisy_envs.validation import plain

FOLDS = 5
EVALUATED = 2000  # samples at a time without gradients
CHANCE = 2  # how sets and pictures are drawn; a run of another way is not gone on with
AHEAD = 32  # batches for which chance is drawn at a time
Preset = Literal["fast", "paper"]
Schedule = Literal["constant", "cosine"]
# settings that a run may change when it goes on: they are not what it learns from
FREE = (
    "out", "pools", "seeds", "folds", "device", "threads", "jobs", "compile", "tune", "deterministic", "data_dir",
    "preset", "ks", "targets", "canvas", "download",
)  # fmt: skip


@dataclass(kw_only=True)
class Args:
    """Settings of all experiments."""

    out: Path
    """folder of the runs, the table and the figure"""
    pools: tuple[str, ...]
    """pooling heads"""
    seeds: tuple[int, ...]
    """seeds of weights, order and dropout"""
    folds: tuple[int, ...]
    """which of the five folds validate, one run each"""
    epochs: int
    """passes over the training set"""
    batch_size: int
    """samples in a step"""
    learning_rate: float
    """highest rate of Adam"""
    layers: int
    """layers of the encoder"""
    width: int
    """features of an embedding"""
    heads: int
    """heads of the attention, in the encoder and in AdaPool"""
    feedforward: int
    """width inside a feed-forward"""
    dropout: float = 0.0
    """share of the feed-forward's output that is dropped in training"""
    attention_scale: Scale = "width"
    """scores are divided by the square root of a head's width, or as in the authors' code now of the whole width"""
    init_std: float = 0.02
    """standard deviation of all weights at first"""
    schedule: Schedule = "constant"
    """of the rate: cosine falls to zero at the end"""
    warmup: float = 0.0
    """share of the training in which the rate rises from zero"""
    weight_decay: float = 0.0
    """of AdamW"""
    max_grad_norm: float = math.inf
    """largest norm of a gradient, else it is scaled down; inf for no limit"""
    device: str = "cpu"
    """"cpu" or "cuda\""""
    threads: int = 1
    """CPU threads of a run"""
    jobs: int = 1
    """runs at a time"""
    compile: bool = False
    """whether to compile the layers, and on a GPU to record a step as a CUDA graph"""
    tune: bool = False
    """whether compiling tries many kernels and takes the fastest, which takes minutes"""
    tf32: bool = False
    """whether matrix products on a GPU may round to TensorFloat-32"""
    deterministic: bool = False
    """use only kernels that give the same bits each time, as torch knows them"""
    data_dir: Path = Path("data")
    """folder of data files"""

    def __post_init__(self) -> None:
        """Turn sequences and NumPy's numbers, as files and notebooks have them, into tuples and Python's."""
        for name, value in vars(self).items():
            setattr(self, name, plain(value))


Parsed = TypeVar("Parsed", bound=Args)


class Split(NamedTuple):
    """Indices of samples."""

    train: Tensor
    validation: Tensor
    test: Tensor


class Task(Protocol):
    """What is to be learned."""

    num_samples: int  # of which the first are trained on and validated with, the last test
    num_test: int

    def network(self, pool: str, seed: int) -> Network:
        """Make the network with one of the heads."""

    def draw(self, index: Tensor, chance: Chance) -> Tensor:
        """Return the numbers (B, ...) by which chance may change samples (B,) in training; no batch changes them."""

    def batch(self, index: Tensor, numbers: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of samples (B,), in training as their numbers change them."""

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss."""

    def error(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return what is reported of each sample (B,), the less the better."""


class Cell(NamedTuple):
    """One run."""

    column: str
    pool: str
    seed: int
    fold: int

    def folder(self, out: Path) -> Path:
        """Return where it is kept."""
        return out / self.column / self.pool / f"seed-{self.seed}-fold-{self.fold}"

    def __str__(self) -> str:
        """Name it in messages."""
        return f"{self.column} {self.pool} seed {self.seed} fold {self.fold}"


def parse(kind: type[Parsed], argv: Sequence[str], presets: dict[str, dict[str, Any]], text: str | None) -> Parsed:
    """Return the settings: a preset's, where a word does not tell otherwise."""
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", choices=presets, default="fast")
    preset = first.parse_known_args(argv)[0].preset
    return parse_arguments(kind, argv, kind(**{"preset": preset, **presets[preset]}), text)


def guard(main: Callable[[Sequence[str]], None], argv: Sequence[str]) -> None:
    """Run a program, and end it with one line where its user is to act."""
    try:
        with memory_errors(), on_stop_signal(signal.default_int_handler), ignore_broken_pipe():
            main(argv)
    except KeyboardInterrupt:
        print("stopped; go on with the same command", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None
    except (ValueError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        raise SystemExit(f"error: {format_error(error)}") from None


def check(args: Args, known_pools: Sequence[str]) -> None:
    """Raise ValueError, naming a setting, its value and what is allowed."""
    shape(args).check()
    for name in ("pools", "seeds", "folds"):
        if not getattr(args, name):
            raise ValueError(f"{name}: must be at least one")
    for pool in args.pools:
        if pool not in known_pools:
            raise ValueError(f"pools={pool!r}: must be of {', '.join(known_pools)}")
    limits: dict[str, tuple[float, float]] = {
        "seeds": (0, 2**63 - 1), "folds": (1, FOLDS), "epochs": (1, 10**6), "batch_size": (1, 10**6),
        "learning_rate": (1e-9, 1e3), "warmup": (0, 1), "weight_decay": (0, 1e3), "max_grad_norm": (1e-9, math.inf),
        "threads": (1, 1024), "jobs": (1, 1024),
    }  # fmt: skip
    for name, (lowest, highest) in limits.items():
        value = getattr(args, name)
        for number in value if isinstance(value, tuple) else (value,):
            if not lowest <= number <= highest:  # NaN fails too
                raise ValueError(f"{name}={number}: must be from {lowest:g} to {highest:g}")
    try:
        torch.zeros((), device=args.device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device={args.device!r}: {str(error).splitlines()[0]}") from None


def shape(args: Args, attention_dropout: float = 0.0, final_norm: bool = False) -> Shape:
    """Return the encoder's sizes."""
    sizes = (args.layers, args.width, args.heads, args.feedforward, args.dropout)
    return Shape(*sizes, attention_dropout, args.attention_scale, args.init_std, final_norm)


def split(task: Task, fold: int) -> Split:
    """Return the samples of a fold, on the CPU."""
    learned = task.num_samples - task.num_test
    if learned < FOLDS or task.num_test < 1:
        raise ValueError(f"{learned} samples to train on and {task.num_test} to test: must be at least {FOLDS} and 1")
    low, high = (learned * part // FOLDS for part in (fold - 1, fold))
    index = torch.arange(task.num_samples)
    return Split(torch.cat([index[:low], index[high:learned]]), index[low:high], index[learned:])


def rate(args: Args, step: int, steps: int) -> float:
    """Return the learning rate of a step, of 0 … steps − 1."""
    rising = args.warmup * steps
    if step < rising:
        return args.learning_rate * (step + 1) / math.ceil(rising)
    if args.schedule == "constant":
        return args.learning_rate
    return args.learning_rate * (1 + math.cos(math.pi * (step - rising) / (steps - rising))) / 2


@dataclass
class Run:
    """What a run has come to."""

    network: Network
    optimizer: torch.optim.Optimizer
    rows: list[dict[str, float]] = field(default_factory=list)  # one an epoch
    best: dict[str, Tensor] = field(default_factory=dict)  # weights of the best epoch

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        """Write all of it."""
        content = {"settings": settings, "network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        save_checkpoint(path, {**content, "rows": self.rows, "best": self.best})

    def load(self, path: Path, settings: dict[str, Any]) -> None:
        """Take up a checkpoint.

        Raises:
            ValueError: it is of other settings, naming them, or no checkpoint.
        """
        content = load_checkpoint(path)
        with checkpoint_errors(path):
            check_settings(path, content["settings"], settings)
            self.network.load_state_dict(content["network"])
            self.optimizer.load_state_dict(content["optimizer"])
            self.rows, self.best = content["rows"], content["best"]


def check_settings(path: Path, saved: dict[str, Any], asked: dict[str, Any]) -> None:
    """Raise ValueError if a run in `path` had other settings than are asked."""
    for name in {**saved, **asked}:
        if saved.get(name) != asked.get(name):
            raise ValueError(f"{name}={asked.get(name)}: {path} is of {saved.get(name)}; use another --out")


def settings_of(args: Args, cell: Cell) -> dict[str, Any]:
    """Return what a run depends on, as JSON has it."""
    own = {name: value for name, value in dataclasses.asdict(args).items() if name not in FREE} | cell._asdict()
    own["chance"] = CHANCE
    plain: dict[str, Any] = json.loads(json.dumps({x: None if y == math.inf else y for x, y in own.items()}))
    return plain


Gradient = Callable[[Tensor, Tensor], tuple[Tensor, tuple[Tensor, ...]]]


def gradient_of(task: Task, network: Network) -> Gradient:
    """Return a function of inputs and targets: the loss, and its gradients by the parameters."""
    parameters = list(network.parameters())

    def gradient(inputs: Tensor, targets: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        loss = task.loss(network(inputs), targets)
        return loss.detach(), torch.autograd.grad(loss, parameters)

    return gradient


class Trainer:
    """Trains a network, an epoch at a time."""

    def __init__(self, task: Task, run: Run, args: Args, seed: int) -> None:
        """Take what is to be learned, and compile the network if asked."""
        self.task, self.run, self.args, self.seed = task, run, args, seed
        self.parameters = list(run.network.parameters())
        self.gradient = gradient_of(task, run.network)
        self.recorded: Gradient = self.gradient
        if args.compile:
            run.network.compile_blocks(args.tune)
        if args.compile and torch.device(args.device).type == "cuda":
            self.recorded = Recorded(self.gradient)

    def epoch(self, index: Tensor) -> float:
        """Train on all samples once, in an order that follows from the seed and the epoch; returns the mean loss."""
        args, number = self.args, len(self.run.rows)
        order_seed, dropout_seed = (
            derive_seed(self.seed, f"{purpose} of epoch {number}") for purpose in ("order", "dropout")
        )  # apart: streams of one seed would hold the same numbers
        order = index[torch.randperm(len(index), generator=torch.Generator().manual_seed(order_seed))].to(args.device)
        chance = Chance(derive_seed(self.seed, "batch"), number)
        steps = math.ceil(len(order) / args.batch_size)
        self.run.network.train()
        total = torch.zeros((), device=args.device)
        with random_state(args.device):  # dropout draws from the global state: seeded here, restored after
            torch.manual_seed(dropout_seed)
            for step, (some, numbers) in enumerate(self.batches(order, chance), start=number * steps):
                total += len(some) * self.step(some, numbers, rate(args, step, args.epochs * steps))
        return total.item() / len(index)

    def batches(self, order: Tensor, chance: Chance) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the samples of each batch and their numbers, drawn ahead: a draw is many small kernels on a GPU."""
        size = self.args.batch_size
        for some in order.split(AHEAD * size):
            yield from zip(some.split(size), self.task.draw(some, chance).split(size), strict=True)

    def step(self, index: Tensor, numbers: Tensor, learning_rate: float) -> Tensor:
        """Take a step along the gradient of a batch; returns the mean loss before it."""
        gradient = self.recorded if len(index) == self.args.batch_size else self.gradient  # records have one size
        loss, gradients = gradient(*self.task.batch(index, numbers))
        for parameter, own in zip(self.parameters, gradients, strict=True):
            parameter.grad = own
        if self.args.max_grad_norm < math.inf:
            nn.utils.clip_grad_norm_(self.parameters, self.args.max_grad_norm)
        for group in self.run.optimizer.param_groups:
            group["lr"] = learning_rate
        self.run.optimizer.step()
        return loss


def random_state(device: str) -> AbstractContextManager[None]:
    """Return a context that restores the global random state, the device's too."""
    index = torch.zeros((), device=device).get_device()
    return torch.random.fork_rng(devices=[index] if index >= 0 else [])


@torch.no_grad()
def mean_error(task: Task, network: Network, index: Tensor, device: str) -> float:
    """Return the mean error of samples."""
    network.eval()
    total = torch.zeros((), dtype=torch.float64, device=device)
    for some in index.to(device).split(EVALUATED):
        inputs, targets = task.batch(some, None)
        total += task.error(network(inputs), targets).sum()
    return total.item() / len(index)


def train(task: Task, cell: Cell, args: Args, progress: bool = False) -> dict[str, Any]:
    """Run a cell, or go on with it, and return its summary.

    Raises:
        ValueError: the folder holds a run of other settings.
        FloatingPointError: the loss is not finite.
    """
    folder, settings = cell.folder(args.out), settings_of(args, cell)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "checkpoint.pt"
    # a device draws dropout of its own: the rest of a run comes from that of its beginning
    learned_from = settings | {"device": torch.device(args.device).type}
    with lock_folder(folder):
        seed = derive_seed(cell.seed, f"fold {cell.fold}")
        network = task.network(cell.pool, seed).to(args.device)
        decayed = torch.optim.AdamW(
            network.parameters(), args.learning_rate, weight_decay=args.weight_decay, fused=True
        )
        run = Run(network, decayed)
        if checkpoint.exists():
            run.load(checkpoint, learned_from)
        trainer = Trainer(task, run, args, seed)
        parts = split(task, cell.fold)
        bar = tqdm(total=args.epochs, initial=len(run.rows), desc=str(cell), unit="epoch", disable=not progress)
        with bar:
            while len(run.rows) < args.epochs:
                row = one_epoch(trainer, parts)
                if not math.isfinite(row["train_loss"] + row["validation_error"]):
                    raise FloatingPointError(f"{cell}: the loss is not finite in epoch {len(run.rows) + 1}: {row}")
                if not run.rows or row["validation_error"] < min(x["validation_error"] for x in run.rows):
                    run.best = {name: weight.clone() for name, weight in network.state_dict().items()}
                run.rows.append(row)
                run.save(checkpoint, learned_from)
                write_rows(folder / "metrics.csv", run.rows)
                bar.set_postfix_str(f"validation error {row['validation_error']:.4g}", refresh=False)
                bar.update()
        network.load_state_dict(run.best)
        best = min(run.rows, key=lambda row: row["validation_error"])
        found = {
            "settings": settings,
            "versions": library_versions(),
            "best_epoch": best["epoch"],
            "validation_error": best["validation_error"],
            "test_error": mean_error(task, network, parts.test, args.device),
            "seconds": sum(row["seconds"] for row in run.rows),
        }
        write_summary(folder / "summary.json", found)
    return found


def one_epoch(trainer: Trainer, parts: Split) -> dict[str, float]:
    """Train an epoch and validate; returns the row of `metrics.csv`."""
    run, device = trainer.run, trainer.args.device
    start = time.perf_counter()
    loss = trainer.epoch(parts.train)
    trained = time.perf_counter()
    error = mean_error(trainer.task, run.network, parts.validation, device)
    return {
        "epoch": len(run.rows) + 1,
        "train_loss": loss,
        "validation_error": error,
        "learning_rate": run.optimizer.param_groups[0]["lr"],
        "seconds": trained - start,
        "validation_seconds": time.perf_counter() - trained,
    }


def write_rows(path: Path, rows: list[dict[str, float]]) -> None:
    """Write `metrics.csv`."""
    lines = [",".join(rows[0]), *(",".join(f"{value:.9g}" for value in row.values()) for row in rows)]
    write_atomically(path, "\n".join(lines) + "\n")


def finished_summary(cell: Cell, args: Args) -> dict[str, Any] | None:
    """Return the summary of a finished run, or None.

    Raises:
        ValueError: it is of other settings, naming them, or damaged.
    """
    path = cell.folder(args.out) / "summary.json"
    if not path.exists():
        return None
    found = read_summary(path)
    if not isinstance(found.get("settings"), dict):
        raise ValueError(f"{path} is damaged (it holds no settings): delete it, and it is written again")
    check_settings(path, found["settings"], settings_of(args, cell))
    return found


def run_cell(args: Args, cell: Cell, make_task: Callable[[Any, str], Task]) -> dict[str, Any]:
    """Run a cell in a process of its own, or in this one with a progress bar."""
    torch.set_num_threads(args.threads)
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    use_deterministic(args.deterministic)
    return train(make_task(args, cell.column), cell, args, progress=args.jobs == 1)


def run_all(args: Args, columns: Sequence[str], make_task: Callable[[Any, str], Task]) -> dict[Cell, dict[str, Any]]:
    """Run what is missing, `args.jobs` at a time, and return the summaries of all cells.

    Raises:
        BlockingIOError: another process runs in OUT, naming it.
        ValueError, FloatingPointError: as `train` does.
        KeyboardInterrupt: after Ctrl-C.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    with lock_folder(args.out):  # two that share it would each take a run that the other is to come to
        return run_missing(args, columns, make_task)


def run_missing(
    args: Args, columns: Sequence[str], make_task: Callable[[Any, str], Task]
) -> dict[Cell, dict[str, Any]]:
    """Run what is missing, a line for each, and return the summaries of all cells; see `run_all`."""
    cells = list(dict.fromkeys(
        Cell(column, pool, seed, fold)
        for seed in args.seeds for fold in args.folds for column in columns for pool in args.pools
    ))  # fmt: skip
    found = {cell: finished_summary(cell, args) for cell in cells}
    missing = [cell for cell, summary in found.items() if summary is None]
    print(f"{len(cells)} runs, {len(cells) - len(missing)} of them done before", flush=True)
    for cell, summary in outcomes(args, missing, make_task):
        found[cell] = summary
        done = sum(x is not None for x in found.values())
        print(
            f"[{done}/{len(cells)}] {cell}: test error {summary['test_error']:.5f}, {summary['seconds']:.0f} s",
            flush=True,
        )
    return {cell: summary for cell, summary in found.items() if summary is not None}


def outcomes(
    args: Args, cells: list[Cell], make_task: Callable[[Any, str], Task]
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Run cells and yield their summaries as they end; one that diverges is told, and the others go on.

    Raises:
        FloatingPointError: at last, naming those that diverged.
    """
    diverged = []
    for cell, found in attempts(args, cells, make_task):
        if isinstance(found, FloatingPointError):
            print(f"diverged: {found}", flush=True)
            diverged.append(str(cell))
        else:
            yield cell, found
    if diverged:
        hint = "leave them out for a table of the others, or change the settings and --out"
        raise FloatingPointError(f"diverged: {', '.join(sorted(diverged))}; {hint}")


def attempt(args: Args, cell: Cell, make_task: Callable[[Any, str], Task]) -> dict[str, Any] | FloatingPointError:
    """Run a cell, and return its summary, or the error where it diverged."""
    try:
        return run_cell(args, cell, make_task)
    except FloatingPointError as error:
        return error


def attempts(
    args: Args, cells: list[Cell], make_task: Callable[[Any, str], Task]
) -> Iterator[tuple[Cell, dict[str, Any] | FloatingPointError]]:
    """Run cells and yield what came of each as they end.

    The processes know nothing of Ctrl-C and the like. However this one ends, they end at once, each with its last
    checkpoint.
    """
    if args.jobs == 1 or len(cells) < 2:
        for cell in cells:
            yield cell, attempt(dataclasses.replace(args, jobs=1), cell, make_task)
        return
    context = multiprocessing.get_context("spawn")
    stops: list[int] = []  # noted, instead of raised amid what others do with a lock
    with on_stop_signal(lambda number, frame: stops.append(number)):
        # all processes inherit it, also that by which multiprocessing tracks its locks, before they can ignore stops
        with interrupts_later():
            pool = ProcessPoolExecutor(args.jobs, context, end_with_parent)
            futures = {pool.submit(attempt, args, cell, make_task): cell for cell in cells}
        try:
            while futures:
                for future in wait(futures, timeout=0.2, return_when=FIRST_COMPLETED).done:
                    yield futures.pop(future), future.result()
                if stops:
                    raise KeyboardInterrupt
        except BaseException as error:
            for process in multiprocessing.active_children():
                process.terminate()
            if stops:
                raise KeyboardInterrupt from None
            if isinstance(error, BrokenProcessPool):
                raise ChildProcessError(
                    "a run was killed, for want of memory perhaps; go on with the same command"
                ) from None
            raise
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def end_with_parent() -> None:
    """Let a process of a pool leave stops to its parent, and end when that ends, killed even."""
    for number in stops_of_a_group():
        signal.signal(number, signal.SIG_IGN)
    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which outlives a process that is killed
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def stops_of_a_group() -> list[signal.Signals]:
    """Return what reaches all processes of a terminal or a job, so that one of them must act: all but SIGTERM."""
    return [number for number in stop_signals() if number != signal.SIGTERM]


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Hold stops back, where the system can."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops_of_a_group())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
