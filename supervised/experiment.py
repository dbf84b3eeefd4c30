"""What the supervised experiments share: settings, runs that resume exactly, one look at the test set.

A run trains one column of a table (a number of neighbors, a target, a data set) with one pooling head, seed and fold.
Its folder, OUT/COLUMN/POOLING/seed-S-fold-F, holds `checkpoint.pt` after each epoch, `metrics.csv`, and at the end
`summary.json`. The same command again resumes what was stopped, and runs only what is missing.

The test set is evaluated once, at the end, with the weights of the epoch with the lowest validation error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from network import AttentionScale, EncoderConfig
from tqdm import tqdm
from trainer import NUM_FOLDS, Run, Task, Trainer, mean_error, split, train_epoch

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
)
from noisy_envs.training.sweep import JobResult, check_settings, run_in_processes, run_in_turn, run_jobs
from noisy_envs.training.versions import library_versions
from noisy_envs.validation import check_count, check_number, plain

CHANCE_VERSION = 2  # of how sets and images are drawn; runs of another version are not resumed
Preset = Literal["fast", "paper"]
Schedule = Literal["constant", "cosine"]
# settings that may change when a run is resumed, because its result does not depend on them
FREE = (
    "out", "pooling", "seeds", "folds", "device", "num_threads", "jobs", "compile", "max_autotune",
    "torch_deterministic", "data_dir", "preset", "num_neighbors", "targets", "canvas_size", "download",
)  # fmt: skip
# defaults of settings that older runs do not hold; runs store only other values, so that older runs can be resumed
ADDED = {"mark_class_token": False, "class_token_init": "normal"}


@dataclass(kw_only=True)
class Args:
    """Settings of all experiments."""

    out: Path
    """folder of the runs, the table and the figure"""
    pooling: tuple[str, ...]
    """pooling heads"""
    seeds: tuple[int, ...]
    """seeds of the initial weights, the order of samples and dropout"""
    folds: tuple[int, ...]
    """folds to validate on, from 1 to 5; each is one run"""
    epochs: int
    """passes over the training set"""
    batch_size: int
    """samples per step"""
    learning_rate: float
    """peak learning rate of Adam"""
    num_layers: int
    """layers of the encoder"""
    embed_dim: int
    """size of a token's embedding"""
    num_heads: int
    """attention heads, of the encoder and of AdaPool"""
    feedforward_dim: int
    """hidden size of the feed-forward layers"""
    dropout: float = 0.0
    """dropout probability after the feed-forward layers"""
    attention_scale: AttentionScale = "embed"
    """divide attention scores by the square root of a head's size, or of the embedding's as the authors' code does"""
    init_std: float = 0.02
    """standard deviation of the initial weights"""
    schedule: Schedule = "constant"
    """schedule of the learning rate; cosine decays it to zero"""
    warmup: float = 0.0
    """share of the steps in which the learning rate rises from zero"""
    weight_decay: float = 0.0
    """weight decay of AdamW"""
    max_grad_norm: float = math.inf
    """gradients are clipped to this norm; inf for no limit"""
    device: str = "cpu"
    """"cpu" or "cuda\""""
    num_threads: int = 1
    """CPU threads per run"""
    jobs: int = 1
    """runs at a time"""
    compile: bool = False
    """compile the layers, and on a GPU record each step as a CUDA graph"""
    max_autotune: bool = False
    """when compiling, try many kernels and take the fastest; this takes minutes"""
    tf32: bool = False
    """allow TensorFloat-32 in matrix products on a GPU"""
    torch_deterministic: bool = False
    """use only deterministic algorithms of torch"""
    data_dir: Path = Path("data")
    """folder of data files"""

    def __post_init__(self) -> None:
        """Convert sequences and NumPy numbers, as files and notebooks have them, to tuples and Python numbers."""
        for name, value in vars(self).items():
            setattr(self, name, plain(value))


ArgsT = TypeVar("ArgsT", bound=Args)


MakeTask = Callable[[Any, str], Task]  # settings, column -> task


class Job(NamedTuple):
    """One run."""

    column: str
    pooling: str
    seed: int
    fold: int

    def folder(self, out: Path) -> Path:
        """Return the folder of the run."""
        return out / self.column / self.pooling / f"seed-{self.seed}-fold-{self.fold}"

    def __str__(self) -> str:
        """Name the run in messages."""
        return f"{self.column} {self.pooling} seed {self.seed} fold {self.fold}"


def parse(kind: type[ArgsT], argv: Sequence[str], presets: dict[str, dict[str, Any]], text: str | None) -> ArgsT:
    """Return the settings: those on the command line, and the preset's for the rest."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", choices=presets, default="fast")
    preset = parser.parse_known_args(argv)[0].preset
    return parse_arguments(kind, argv, kind(**{"preset": preset, **presets[preset]}), text)


def guard(main: Callable[[Sequence[str]], None], argv: Sequence[str]) -> None:
    """Run `main` and report expected errors in one line."""
    try:
        with memory_errors(), on_stop_signal(signal.default_int_handler), ignore_broken_pipe():
            main(argv)
    except KeyboardInterrupt:
        print("stopped; resume with the same command", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None
    except (ValueError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        raise SystemExit(f"error: {format_error(error)}") from None


def check(args: Args, known_pooling: Sequence[str]) -> None:
    """Raise ValueError, naming a setting, its value and what is allowed."""
    encoder_config(args).check()
    for name in ("pooling", "seeds", "folds"):
        check_not_empty(args, name)
    for pooling in args.pooling:
        if pooling not in known_pooling:
            raise ValueError(f"pooling={pooling!r}: expected one of {', '.join(known_pooling)}")
    for seed in args.seeds:
        check_count("seeds", seed, 0, may_be_range=False)
    for fold in args.folds:
        check_count("folds", fold, 1, may_be_range=False, maximum=NUM_FOLDS)
    for name in ("epochs", "batch_size", "num_threads", "jobs"):
        check_count(name, getattr(args, name), 1, may_be_range=False)
    check_number("learning_rate", args.learning_rate, above=0)
    check_number("weight_decay", args.weight_decay, minimum=0)
    if not 0 <= args.warmup <= 1:  # NaN fails too
        raise ValueError(f"warmup={args.warmup}: expected a share from 0 to 1")
    if not args.max_grad_norm > 0:
        raise ValueError(f"max_grad_norm={args.max_grad_norm}: expected a number above 0, or inf")
    try:
        torch.zeros((), device=args.device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"device={args.device!r}: {str(error).splitlines()[0]}") from None


def check_not_empty(args: Args, name: str) -> None:
    """Raise ValueError if a setting has no values."""
    if not getattr(args, name):
        raise ValueError(f"{name}: expected at least one value")


def encoder_config(args: Args, attention_dropout: float = 0.0, final_norm: bool = False) -> EncoderConfig:
    """Return the encoder's sizes."""
    sizes = (args.num_layers, args.embed_dim, args.num_heads, args.feedforward_dim, args.dropout)
    return EncoderConfig(*sizes, attention_dropout, args.attention_scale, args.init_std, final_norm)


def run_settings(args: Args, job: Job) -> dict[str, Any]:
    """Return the settings that a run's result depends on, as JSON stores them."""
    settings = {x: y for x, y in dataclasses.asdict(args).items() if x not in FREE and ADDED.get(x) != y}
    settings |= {**job._asdict(), "chance": CHANCE_VERSION}
    stored: dict[str, Any] = json.loads(json.dumps({x: None if y == math.inf else y for x, y in settings.items()}))
    return stored


def save_run(path: Path, run: Run, settings: dict[str, Any]) -> None:
    """Write a checkpoint."""
    content = {"settings": settings, "network": run.network.state_dict(), "optimizer": run.optimizer.state_dict()}
    save_checkpoint(path, {**content, "rows": run.rows, "best": run.best})


def load_run(path: Path, run: Run, settings: dict[str, Any]) -> None:
    """Load a checkpoint.

    Raises:
        ValueError: it has other settings, or is no checkpoint; the message names them.
    """
    content = load_checkpoint(path)
    with checkpoint_errors(path):
        check_settings(path, content["settings"], settings)
        run.network.load_state_dict(content["network"])
        run.optimizer.load_state_dict(content["optimizer"])
        run.rows, run.best = content["rows"], content["best"]


def train(task: Task, job: Job, args: Args, progress: bool = False) -> dict[str, Any]:
    """Start or resume the run of a job, and return its summary.

    Raises:
        ValueError: the folder holds a run with other settings.
        FloatingPointError: the loss is not finite.
    """
    folder, settings = job.folder(args.out), run_settings(args, job)
    checkpoint = folder / "checkpoint.pt"
    # each type of device draws its own dropout, so a run is resumed on the type it started on
    resumed_settings = settings | {"device": torch.device(args.device).type}
    with lock_folder(folder):
        seed = derive_seed(job.seed, f"fold {job.fold}")
        network = task.network(job.pooling, seed).to(args.device)
        optimizer = torch.optim.AdamW(
            network.parameters(), args.learning_rate, weight_decay=args.weight_decay, fused=True
        )
        run = Run(network, optimizer)
        if checkpoint.exists():
            load_run(checkpoint, run, resumed_settings)
        trainer = Trainer(task, run, args, seed)
        parts = split(task, job.fold)
        bar = tqdm(total=args.epochs, initial=len(run.rows), desc=str(job), unit="epoch", disable=not progress)
        with bar:
            while len(run.rows) < args.epochs:
                row = train_epoch(trainer, parts)
                if not math.isfinite(row["train_loss"] + row["validation_error"]):
                    raise FloatingPointError(f"the loss is not finite in epoch {len(run.rows) + 1}: {row}")
                if not run.rows or row["validation_error"] < min(x["validation_error"] for x in run.rows):
                    run.best = {name: weight.clone() for name, weight in network.state_dict().items()}
                run.rows.append(row)
                save_run(checkpoint, run, resumed_settings)
                write_metrics(folder / "metrics.csv", run.rows)
                bar.set_postfix_str(f"validation error {row['validation_error']:.4g}", refresh=False)
                bar.update()
        network.load_state_dict(run.best)
        best = min(run.rows, key=lambda row: row["validation_error"])
        summary = {
            "settings": settings,
            "versions": library_versions(),
            "best_epoch": best["epoch"],
            "validation_error": best["validation_error"],
            "test_error": mean_error(task, network, parts.test, args.device),
            "seconds": sum(row["seconds"] for row in run.rows),
        }
        write_summary(folder / "summary.json", summary)
    return summary


def write_metrics(path: Path, rows: list[dict[str, float]]) -> None:
    """Write `metrics.csv`."""
    lines = [",".join(rows[0]), *(",".join(f"{value:.9g}" for value in row.values()) for row in rows)]
    write_atomically(path, "\n".join(lines) + "\n")


def finished_summary(job: Job, args: Args) -> dict[str, Any] | None:
    """Return the summary of a finished run, or None.

    Raises:
        ValueError: it has other settings, or is damaged; the message names them.
    """
    path = job.folder(args.out) / "summary.json"
    if not path.exists():
        return None
    summary = read_summary(path)
    if not isinstance(summary.get("settings"), dict):
        raise ValueError(f"{path} is damaged (it holds no settings): delete it, and it will be written again")
    check_settings(path, summary["settings"], run_settings(args, job))
    return summary


def run_job(job: Job, args: Args, make_task: MakeTask, progress: bool) -> JobResult:
    """Run a job in this process."""
    torch.set_num_threads(args.num_threads)
    torch.backends.cuda.matmul.allow_tf32 = args.tf32
    use_deterministic(args.torch_deterministic)
    summary = train(make_task(args, job.column), job, args, progress)
    return JobResult(job, summary, seconds=summary["seconds"])


def run_all(args: Args, columns: Sequence[str], make_task: MakeTask) -> dict[Job, dict[str, Any]]:
    """Run what is missing, `args.jobs` at a time, and return the summaries of all jobs.

    Raises:
        BlockingIOError: another process runs in OUT; the message names it.
        ValueError: a folder holds a run with other settings.
        FloatingPointError: some runs diverged; it is raised after all others have finished.
        KeyboardInterrupt: after Ctrl-C.
    """
    with lock_folder(args.out):  # two processes would each start runs that the other one has planned
        jobs = dict.fromkeys(
            Job(column, pooling, seed, fold)
            for seed in args.seeds for fold in args.folds for column in columns for pooling in args.pooling
        )  # fmt: skip
        summaries = {job: finished_summary(job, args) for job in jobs}

        def execute(jobs: list[Job]) -> Iterator[JobResult]:
            parallel = args.jobs > 1 and len(jobs) > 1  # a single run is not worth a process
            run = partial(run_job, args=args, make_task=make_task, progress=not parallel)
            return (
                run_in_processes(jobs, run, args.jobs, FloatingPointError)
                if parallel
                else run_in_turn(jobs, run, FloatingPointError)
            )

        results = run_jobs(summaries, execute, lambda summary: f"test error {summary['test_error']:.5f}")
    diverged = sorted(str(result.job) for result in results if result.summary is None)
    if diverged:
        hint = "leave these out to get a table of the others, or change the settings and --out"
        raise FloatingPointError(f"diverged: {', '.join(diverged)}; {hint}")
    summaries |= {result.job: result.summary for result in results}
    return {job: summary for job, summary in summaries.items() if summary is not None}
