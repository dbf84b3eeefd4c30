"""Measure the supervised experiments on synthetic sets: time of the data, of a step and of an epoch.

    python benchmarks/supervised_speed.py [--preset paper] [--device cuda] [--num-sets 100000] [--steps 20]
        [other options of supervised/knn_centroid.py]

Prints the seconds to draw the sets and find the targets; the time of a step, eager, compiled and, on a GPU, recorded as
a CUDA graph; the time of an epoch of 720,000 samples at that speed; and the GPU time of a step by kind of operation.

Lower limit for the paper's network (N = 128, 12 layers, 8 heads of width 2): a sample has 12 * 8 * 128² = 1.57 million
pairs of tokens and heads. The compiled attention computes each weight three times, with one `exp2` each: 4.7 million.
An H100 or H200 computes 16 per cycle on each of 132 multiprocessors: 3.6e12 per second at 1.7 GHz, 0.95 s per epoch.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "supervised"))
import experiment
import knn_centroid
from set_task import PAPER, SetTask
from trainer import Run, Trainer

from noisy_envs.training.versions import current_commit

EPOCH = 720_000  # training samples of the paper's five folds
KINDS = {  # substrings of kernel names; the first match counts
    "optimizer": ("multi_tensor", "adam"),
    "attention": ("exp2", "_forward", "_backward_queries", "_backward_keys", "fmha", "flash", "attention", "softmax"),
    "matrix products": ("gemm", "gemv", "cutlass", "cublas", "_mm", "splitK", "nvjet", "_linear", "_sum_of_products"),
    "copies and gathers": ("Memcpy", "Memset", "copy_kernel", "index", "gather"),
    "norms, GELU, dropout, sums": ("",),
}


class Variant(NamedTuple):
    """A way to run training steps."""

    name: str
    compile: bool = True
    max_autotune: bool = False
    tf32: bool = False
    recorded: bool = True


VARIANTS = (
    Variant("eager", compile=False, recorded=False),
    Variant("compiled", recorded=False),
    Variant("compiled, recorded"),
    Variant("compiled, recorded, TF32", tf32=True),
    Variant("tuned, recorded", max_autotune=True),
    Variant("tuned, recorded, TF32", max_autotune=True, tf32=True),
)


@dataclass(kw_only=True)
class Args(knn_centroid.Args):
    """Settings of the measurement, which uses the first value of `pooling`."""

    pooling: tuple[str, ...] = ("adapool",)
    steps: int = 20
    """steps of the timed epoch, which follows a warm-up epoch"""


def seconds(function: Callable[[], object], device: str) -> float:
    """Return the seconds of a call, including its work on the device."""
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def make_trainer(task: SetTask, args: experiment.Args, pooling: str) -> Trainer:
    """Return a trainer of a new network."""
    network = task.network(pooling, seed=1).to(args.device)
    optimizer = torch.optim.AdamW(network.parameters(), args.learning_rate, fused=True)
    return Trainer(task, Run(network, optimizer), args, seed=1)


def kinds(trainer: Trainer, index: torch.Tensor, steps: int) -> Counter[str]:
    """Return the GPU milliseconds per step, by kind of operation."""
    milliseconds: Counter[str] = Counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        trainer.epoch(index)
        torch.cuda.synchronize()
    for event in profiled.key_averages():
        kind = next(kind for kind, names in KINDS.items() if any(name in event.key for name in names))
        milliseconds[kind] += event.self_device_time_total / 1e3 / steps
    return milliseconds


def main(argv: Sequence[str]) -> None:
    """Measure each variant and print its times."""
    args = experiment.parse(Args, argv, {"fast": {}, "paper": {**PAPER, "num_sets": 100_000}}, __doc__)
    knn_centroid.check_all(args)
    steps = args.steps
    if steps < 1:
        raise ValueError(f"steps={steps}: expected at least 1")
    torch.set_num_threads(args.num_threads)
    print(f"{_machine(args.device)}, torch {torch.__version__}, commit {current_commit()}")
    column, pooling, device = knn_centroid.column_name(args.num_neighbors[0]), args.pooling[0], args.device
    tasks: list[SetTask] = []
    elapsed = seconds(lambda: tasks.append(knn_centroid.make_task(args, column)), device)
    print(f"{args.num_sets:,} sets and their targets ({column}): {elapsed:.2f} s")
    task, index = tasks[0], torch.arange(steps * args.batch_size) % args.num_sets
    for variant in VARIANTS:
        if device == "cpu" and (variant.recorded or variant.tf32):
            continue
        torch.backends.cuda.matmul.allow_tf32 = variant.tf32
        settings = dataclasses.replace(args, compile=variant.compile, max_autotune=variant.max_autotune)
        trainer = make_trainer(task, settings, pooling)
        if not variant.recorded:
            trainer.recorded = trainer.gradient
        first = seconds(lambda trainer=trainer: trainer.epoch(index), device)  # type: ignore[misc]
        elapsed = seconds(lambda trainer=trainer: trainer.epoch(index), device)  # type: ignore[misc]
        step = elapsed / steps
        sample, epoch = 1e9 * step / args.batch_size, step * EPOCH / args.batch_size
        print(
            f"{pooling}, {variant.name}: {1e3 * step:.2f} ms per step of {args.batch_size}, "
            f"{sample:,.0f} ns per sample, {epoch:.1f} s per epoch of {EPOCH:,}; warm-up {first:.0f} s",
            flush=True,
        )
        if device != "cpu":
            print("    " + ", ".join(f"{kind} {ms:.2f} ms" for kind, ms in kinds(trainer, index, steps).most_common()))


def _machine(device: str) -> str:
    return "CPU" if device == "cpu" else torch.cuda.get_device_name()


if __name__ == "__main__":
    experiment.guard(main, sys.argv[1:])
