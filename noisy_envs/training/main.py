"""The program of an agent's file: train, resume or evaluate, as the command line says."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from noisy_envs.training import distributed
from noisy_envs.training.accelerate import use_deterministic
from noisy_envs.training.distributed import RANK
from noisy_envs.training.evaluation import evaluate_runs, format_score
from noisy_envs.training.gymnasium_envs import InvalidStep
from noisy_envs.training.metrics import ColumnMismatch
from noisy_envs.training.process import EXIT_INTERRUPTED, ignore_broken_pipe, memory_errors
from noisy_envs.training.run import Run, is_complete, records_video
from noisy_envs.training.settings import parse


def main(module: ModuleType, argv: Sequence[str] | None = None) -> Any:
    """Run an agent's file as a program.

    Args:
        module: the file, which defines `Args`, `Agent` and `train(args, run)`.
        argv: arguments of the command line; None for those of this process.

    Returns:
        The summary of a run, or the rows of an evaluation.

    Raises:
        SystemExit: with one line for an error, or status 130 if a signal stopped training.
    """
    with memory_errors():
        if argv is not None:
            return run_program(module, argv)
        with ignore_broken_pipe():
            return run_program(module, sys.argv[1:])


def run_program(module: ModuleType, argv: Sequence[str]) -> Any:
    """Train, resume or evaluate, as `main` does."""
    try:
        args = parse(module, argv)
        torch.set_num_threads(args.num_threads)
        use_deterministic(args.torch_deterministic)
        if args.evaluate:
            return evaluate_runs(module, args, argv)
    except BrokenPipeError:
        raise
    except (ValueError, OSError, FloatingPointError) as error:
        raise SystemExit(f"error: {error}") from None
    args = dataclasses.replace(args, device=distributed.setup(args.device))
    try:
        return train(module, args)
    finally:
        distributed.teardown()


def train(module: ModuleType, args: Any) -> dict[str, Any]:
    """Train or resume an agent, evaluate it, and leave everything in the run's folder; return the summary."""
    try:
        summary = is_complete(module, args)
        if summary is not None:
            if RANK == 0:
                print(f"{args.resume} is complete: see curve.png, metrics.csv and summary.json there")
            return summary
        run = Run(module, args)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    try:
        with torch.random.fork_rng(devices=[]):  # torch's layers draw from the global state when they are made
            summary = module.train(run.local_args, run)
    except KeyboardInterrupt:
        if RANK == 0:  # no other process knows the folder
            resume = f"resume with: {run.resume_command}"
            print(f"stopped; {resume if run.has_checkpoint else 'nothing was saved yet'}", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        raise
    except (OSError, FloatingPointError, ValueError) as error:
        if isinstance(error, ValueError) and run.began and not isinstance(error, (ColumnMismatch, InvalidStep)):
            raise  # a fault of the code: it needs its traceback
        resumable = isinstance(error, OSError) and run.began and run.has_checkpoint
        hint = f"; once that is fixed, resume with: {run.resume_command}" if resumable else ""
        raise SystemExit(f"error: {error}{hint}") from None
    finally:
        run.close()
    if RANK == 0:
        report(run, summary)
    return summary


def report(run: Run, summary: dict[str, Any]) -> None:
    """Print the result of a run, and where its files are."""
    speed = "" if math.isnan(run.speed) else (
        f", {run.first_seconds:.0f} of them for the first update; {run.speed:,.0f} steps/s after it"
    )  # fmt: skip
    video = "episode.gif, " if records_video(run.args) else ""
    print(
        f"{format_score(summary, run.args)}, trained in {run.seconds:.0f} s{speed}\n"
        f"see curve.png, {video}metrics.csv and summary.json in {run.folder}"
    )
